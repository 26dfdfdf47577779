"""Tables of the results: Markdown for people, JSON for programs, a plot for the README."""

import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys


def about(argv, cores):
    """Where, when and what was measured."""
    root = pathlib.Path(__file__).resolve().parents[2]

    def git(*arguments):
        out = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True)
        return out.stdout.strip() if out.returncode == 0 else "unknown"

    cpu = {}
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        cpu.setdefault(key.strip(), value.strip())
    widest = [name for name in ("avx512f", "avx2") if name in cpu.get("flags", "")]
    versions = {}
    for module in ("torch", "ot", "jax", "ott", "geomloss", "numpy"):
        if module in sys.modules:
            versions[module] = getattr(sys.modules[module], "__version__", "?")
    return {
        "machine": f"{cores} cores of {cpu.get('model name', platform.machine())} (family {cpu.get('cpu family')}, "
        f"model {cpu.get('model')}), {widest[0] if widest else 'no AVX2'}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": git("rev-parse", "--short", "HEAD") + (" (modified)" if git("status", "--porcelain", "-uno") else ""),
        "command": "python " + " ".join([os.path.relpath(argv[0], root), *argv[1:]]),
        "load_average": round(os.getloadavg()[0], 2),
        "versions": versions,
    }


def write(results, out):
    text = markdown(results)
    if out is None:
        print(text)
        return
    out.mkdir(parents=True, exist_ok=True)
    for section in set(results) - {"about"}:
        part = {"about": results["about"], section: results[section]}
        (out / f"{section}.json").write_text(json.dumps(part, indent=1) + "\n")
        (out / f"{section}.md").write_text(markdown(part))
    print(text)
    try:
        import plot
    except ImportError as missing:
        print(f"no plot: {missing}", file=sys.stderr)
        return
    plot.draw(out)


def markdown(results):
    info = results["about"]
    lines = [
        f"Measured on {info['machine']}; {info['date']}, commit {info['commit']}, load average at the start "
        f"{info['load_average']}. `{info['command']}`",
        "",
    ]
    if info["versions"]:
        lines += ["Versions: " + ", ".join(f"{k} {v}" for k, v in info["versions"].items()) + ".", ""]
    for section, render in (("fixed", _fixed), ("cold", _cold), ("serving", _serving)):
        if section in results:
            lines += render(results[section]) + _failures(results[section])
    return "\n".join(lines)


def _failures(section):
    return [f"**Failed: {line}**\n" for line in section.get("failures", [])]


def number(value, digits=3):
    """Three significant digits, without exponents where they are readable."""
    if value is None or value != value:
        return ""
    if value == 0:
        return "0"
    if abs(value) >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if abs(value) >= 1e-3 else f"{value:.1e}"


def table(header, rows):
    align = ["---"] + ["---:"] * (len(header) - 1)
    return ["| " + " | ".join(row) + " |" for row in [header, align, *rows]] + [""]


def _fixed(section):
    ceilings = section["ceilings"]
    sizes = list(ceilings["read"].items())
    reads = ", ".join(f"{number(rate / 1e9)} GB/s from {int(size) >> 10:,} KiB" for size, rate in sizes[2::4] or sizes)
    lines = [
        "## Fixed iterations, float32, milliseconds (median)",
        "",
        "Every answer is checked against float64 first; the error column is ours (potentials: in units of epsilon).",
        "Ratio: the fastest peer's time over ours. Floor: the row's least work at this machine's ceilings, and what it",
        "is mostly made of: that resource bounds a row that falls short.",
        "",
    ]
    rows = []
    for r in section["rows"]:
        ours, wanted, peer = r["ours"], r["wanted_ms"], r["fastest_peer"]
        verdict = ""
        if wanted:
            over = ours["median_ms"] / wanted
            verdict = "met" if over <= 1 else f"{over:.2f} x over"
        rows.append(
            [
                r["name"], number(ours["median_ms"]), number(ours["min_ms"]),
                f"{peer} {number(r['peers'][peer]['median_ms'])}" if peer else "",
                f"{r['ratio']:.1f}" if peer else "",
                number(wanted), verdict, number(r["floor_ms"]), r["bound"], f"{r['error']:.0e}",
            ]
        )  # fmt: skip
    header = ["work", "ours", "min", "fastest peer", "ratio", "wanted", "", "floor", "made of", "error"]
    lines += table(header, rows)
    lines += [
        f"Ceilings in this run, all cores together: {ceilings['fma']:.2g} multiply-adds/s, "
        f"{ceilings['exp']:.2g} exponentials/s; reads {reads}.",
        "",
    ]
    over = [r for r in section["rows"] if r["wanted_ms"] and r["ours"]["median_ms"] > r["wanted_ms"] and r["limit"]]
    if over:
        lines += ["What keeps rows from what is wanted (times in ms unless said otherwise):", ""]
        for limit in dict.fromkeys(r["limit"] for r in over):
            lines.append(f"- {'; '.join(r['name'] for r in over if r['limit'] == limit)}: {limit}")
        lines.append("")
    names = list(dict.fromkeys(name for r in section["rows"] for name in r["peers"]))
    if names:
        lines += ["### All peers", ""]
        for kind, chosen in (
            ("transport", [r for r in section["rows"] if "POT" in r["peers"]]),
            ("normalisation", [r for r in section["rows"] if "JAX scalings" in r["peers"]]),
        ):
            columns = [n for n in names if any(n in r["peers"] for r in chosen)]
            if chosen:
                body = [
                    [r["name"], number(r["ours"]["median_ms"])] + [_cell(r["peers"].get(n)) for n in columns]
                    for r in chosen
                ]
                lines += table([kind, "ours", *columns], body)
    return lines


def _cell(entry):
    if entry is None:
        return ""
    if "failed" in entry:
        return "failed"
    if "median_ms" not in entry:
        return f"wrong by {entry['error']:.0e}"
    return number(entry["median_ms"]) + ("" if entry["same_work"] else " (own schedule)")


NOT_THERE = (
    "All peers. A peer much slower than the fastest is given up after a few times its time (the error is then "
    "shown), or not run if its time per iteration and the iterations it needs are known."
)


def _cold(section):
    lines = [
        f"## From cold to a marginal error of {section['target']:g}, milliseconds (median)",
        "",
        "Both L1 marginal errors verified in float64 from the returned potentials; epsilon in units of the mean cost.",
        "",
    ]
    rows, notes = [], []
    for r in section["rows"]:
        fastest = r["fastest_peer"]
        cells = []
        for entry in r["ours"].values():
            there = "" if entry["there"] else f" **not there: {entry['verified_error']:.0e}**"
            cells.append(f"{number(entry['median_ms'])} ({entry['iterations']:,} it){there}")
        rows.append(
            [f"{r['case']}, {r['factor']:g}", *cells]
            + (
                [f"{fastest} {number(r['peers'][fastest]['median_ms'])}", f"{r['ratio']:.1f}"]
                if r["ratio"]
                else ["none", ""]
            )
        )
        if r["peers"]:
            notes.append(
                f"- {r['case']}, {r['factor']:g}: " + "; ".join(_cold_peer(*item) for item in r["peers"].items())
            )
    lines += table(["problem, epsilon", "ours, strict", "ours, double", "fastest peer that gets there", "ratio"], rows)
    return lines + ([NOT_THERE, "", *notes, ""] if notes else [])


def _cold_peer(name, entry):
    if entry["there"]:
        return f"{name} {number(entry['median_ms'])} ms" + (
            f" ({entry['iterations']:,} it)" if entry["iterations"] else ""
        )
    return f"{name} " + ("" if entry["note"].startswith("not run") else "not there: ") + entry["note"]


def _serving(section):
    lines = ["## Serving: requests of 32 matrices 4 x 4, 20 iterations", ""]
    if section["load"]:
        rows = [
            [
                r["server"], f"{r['clients']}", f"{r['requests_per_second']:,.0f}",
                number(r["p50_ms"]), number(r["p99_ms"]),
                number(r["server_cpu_ms"]), number(r["batch"] or None), f"{r['errors']}" if r["errors"] else "",
            ]
            for r in section["load"]
        ]  # fmt: skip
        header = [
            "server",
            "clients",
            "requests/s",
            "p50 ms",
            "p99 ms",
            "server CPU ms/request",
            "problems/batch",
            "errors",
        ]
        lines += table(header, rows)
    for note in section["notes"]:
        lines += [note, ""]
    if section["payload"]:
        lines += ["### The RPC path: one request at a time, time beyond the solve", ""]
        rows = [
            [
                r["direction"], f"{r['kib']:,} KiB", number(r["total_ms"]), number(r["compute_ms"]),
                number(r["overhead_ms"]), number(r["overhead_ms_per_mib"]), number(r["server_cpu_ms"]),
            ]
            for r in section["payload"]
        ]  # fmt: skip
        header = ["payload", "size", "total ms", "solve ms", "beyond ms", "beyond ms/MiB", "server CPU ms"]
        lines += table(header, rows)
    return lines
