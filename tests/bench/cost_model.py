"""Fits the server's cost model to measured solves: server/cost_table.h, and the evidence beside it.

    bazel build //tests/bench:sinkhorn_cost_samples && .venv/bin/python tests/bench/cost_model.py

measures (half a minute, at real-time priority `chrt -f 5` where others work) into results/cost_model.csv, fits, and
writes server/cost_table.h and results/cost_model.md. --fit-only fits what results/cost_model.csv has.

For each family of problems: predicted = overhead + factor * figure, the two that make the sum of squared logarithms of
measured over predicted least. `figure` is the backend's own prediction for the iterations that were really done; the
table's iterations for a tolerance are their geometric mean.
"""

import argparse
import csv
import datetime
import math
import os
import pathlib
import platform
import subprocess

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROGRAM = pathlib.Path(os.environ.get("BAZEL_BIN", ROOT / "bazel-bin")) / "tests/bench/sinkhorn_cost_samples"
SAMPLES = HERE / "results/cost_model.csv"
REPORT = HERE / "results/cost_model.md"
TABLE = ROOT / "server/cost_table.h"
# In the order of CostFamily in server/cost_model.h.
FAMILIES = (
    "normalization",
    "normalization_gradient",
    "normalization_exact",
    "dense",
    "dense_tolerance",
    "point_cloud",
    "point_cloud_tolerance",
)
# What a GPU's own figures are taken for until problems have been measured: of max_iterations, what a tolerance needs.
OTHER_ITERATIONS = {"normalization_exact": 30, "dense_tolerance": 100, "point_cloud_tolerance": 100}


def measure():
    """Writes SAMPLES."""
    text = subprocess.run([PROGRAM], check=True, capture_output=True, text=True).stdout
    device, _, rows = text.partition("\n")
    when = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    model = next((l.split(":")[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), "?")
    SAMPLES.write_text(f"{device}; {model}, {os.cpu_count()} cores, {platform.system()}; {when}\n{rows}")


def read():
    """(comment, {family: rows})."""
    comment, _, text = SAMPLES.read_text().partition("\n")
    families = {family: [] for family in FAMILIES}
    for row in csv.DictReader(text.splitlines()):
        families[row["family"]].append(row)
    return comment.lstrip("# "), families


def fit(rows):
    """(overhead, factor, logarithms of measured over predicted, sorted)."""
    points = [(float(row["figure_seconds"]), float(row["measured_seconds"])) for row in rows]

    def errors(overhead_over_factor):
        logs = [math.log(measured / (figure + overhead_over_factor)) for figure, measured in points]
        mean = sum(logs) / len(logs)
        return sum((log - mean) ** 2 for log in logs), math.exp(mean)

    candidates = [0] + [1e-7 * 1.1**i for i in range(100)]
    best = min(candidates, key=lambda candidate: errors(candidate)[0])
    factor = errors(best)[1]
    overhead, factor = float(f"{best * factor:.3g}"), float(f"{factor:.3g}")
    return overhead, factor, sorted(math.log(m / (overhead + factor * f)) for f, m in points)


def usual_iterations(family, rows):
    if not family.endswith(("_tolerance", "_exact")):
        return 0
    logs = [math.log(int(row["iterations"])) for row in rows]
    return round(math.exp(sum(logs) / len(logs)))


def table(comment, fits):
    def block(rows):
        width = max(len(row) for row in rows)
        return "\n".join(f"    {row:{width}}  // {family}" for row, family in zip(rows, FAMILIES))

    lines = block([f"{{{overhead:g}, {factor:g}, {iterations}}}," for _, overhead, factor, iterations, _ in fits])
    others = block([f"{{0, 1, {OTHER_ITERATIONS.get(family, 0)}}}," for family in FAMILIES])
    return f"""// What the server's cost model was fitted to. Made by tests/bench/cost_model.py; not to be edited.
//
// {comment}.
// The samples: tests/bench/results/cost_model.csv; how well they fit: cost_model.md there.
#ifndef SINKHORN_SERVER_COST_TABLE_H_
#define SINKHORN_SERVER_COST_TABLE_H_

namespace sinkhorn {{

// predicted = overhead_seconds + factor * the backend's figure for min(max_iterations, iterations).
struct CostRow {{
  double overhead_seconds;
  double factor;
  int iterations;  // With a tolerance: as many as problems usually take. 0: all of max_iterations.
}};

// The CPU backend. In the order of CostFamily.
constexpr CostRow kCpuCosts[] = {{
{lines}
}};

// A GPU: its backend's figures were measured with its kernels, and stand until problems have been.
constexpr CostRow kOtherCosts[] = {{
{others}
}};

}}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_COST_TABLE_H_
"""


def report(comment, fits):
    rows = []
    for family, overhead, factor, iterations, logs in fits:
        quantiles = [math.exp(logs[int(part * len(logs))]) for part in (0.05, 0.25, 0.75, 0.95)]
        rows.append(
            f"| {family} | {len(logs)} | {1e6 * overhead:.3g} | {factor:.3g} | {iterations or ''} | "
            + " | ".join(f"{quantile:.2f}" for quantile in quantiles)
            + " |"
        )
    return f"""# The cost model's table

{comment}. `tests/bench/cost_model.py`; samples: `cost_model.csv`.

predicted seconds = overhead + factor * the backend's figure for the iterations. The last four columns: measured over
predicted of the samples, at four quantiles; a class of problems is corrected by its own ratio as soon as the server has
measured some.

| family | samples | overhead us | factor | usual iterations | 5 % | 25 % | 75 % | 95 % |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
{chr(10).join(rows)}
"""


def results():
    """The texts of TABLE and REPORT from SAMPLES."""
    comment, families = read()
    fits = []
    for family, rows in families.items():
        overhead, factor, logs = fit(rows)
        fits.append((family, overhead, factor, usual_iterations(family, rows), logs))
    return table(comment, fits), report(comment, fits)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit-only", action="store_true")
    if not parser.parse_args().fit_only:
        measure()
    header, text = results()
    TABLE.write_text(header)
    REPORT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
