#!/usr/bin/env python3
"""What the server does with point clouds on a GPU machine, batched against one problem at a time.

  bazel build //server:sinkhorn_server //client/loadgen:sinkhorn_loadgen
  tests/bench/gpu_clouds_serving.py --out DIR

Four loads: many clients with clouds of 256 points and gradients; many with a mix of sizes from 16 to 4,096 points; 64
clients with small clouds beside one that solves 50,000 points all the time; and those beside one whose requests have 64
members of 4,096 points, to a tolerance. Server and load generators share the machine and speak over loopback. Every
answer is checked (--no-verify: none). Needs nothing but Python 3. Writes DIR/gpu_clouds_serving.md and .json. --bin: a
folder with both programs, where there is no bazel-bin.
"""

import argparse
import json
import pathlib
import re
import sys
import threading
import time

import gpu_serving

SMALL_P99_MS_WANTED = 20


def clouds(n, dim=64, *options, weight=None):
    text = ":".join([f"point_cloud:{n}x{n}x{dim}", "10", *options])
    return text if weight is None else f"{text}={weight}"


GRADIENTS = clouds(256, 64, "gradient")
SIZES = ",".join(
    clouds(n, dim, "gradient", weight=weight)
    for n, dim, weight in ((16, 3, 1), (64, 64, 1), (256, 64, 1), (500, 3, 0.5), (1024, 64, 0.2), (4096, 64, 0.05))
)
SMALL = clouds(64, 64, "gradient")
LARGE = {
    "50,000": clouds(50000, 64),
    "64 x 4,096": "point_cloud:64x4096x4096x3:1000:epsilon=0.01:tolerance=1e-5",
}


def beside_a_large_one(which, loadgen, server, options):
    """64 clients with small clouds beside one client with a large problem, of LARGE."""
    large = {}

    def solve_large():
        longer = argparse.Namespace(**vars(options) | {"seconds": options.seconds + 1, "threads": 1})
        large["result"] = gpu_serving.load(loadgen, server, 1, longer.seconds, longer, LARGE[which])["all"]

    thread = threading.Thread(target=solve_large)
    thread.start()
    time.sleep(0.3)
    small = gpu_serving.measure(f"64 points, beside {which}", loadgen, server, 64, options, SMALL)
    thread.join()
    result = large["result"]
    beside = {
        "mode": f"{which} points, beside 64 clients",
        "clients": 1,
        "requests_per_second": result["requests_per_second"],
        "p50_ms": 1e3 * result["latency_seconds"]["p50"],
        "p99_ms": 1e3 * result["latency_seconds"]["p99"],
        "errors": result["errors"],
    }
    return [small, beside]


COLUMNS = (
    ("server", "server", "{}"),
    ("load", "mode", "{}"),
    ("clients", "clients", "{}"),
    ("requests/s", "requests_per_second", "{:,.0f}"),
    ("p50 ms", "p50_ms", "{:.2f}"),
    ("p99 ms", "p99_ms", "{:.2f}"),
    ("problems per launch", "matrices_per_launch", "{:.1f}"),
    *((f"{stage} us", f"{stage}_us", "{:,.0f}") for stage in gpu_serving.STAGES),
    ("server CPU us", "server_cpu_us", "{:,.0f}"),
)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument("--bin", type=pathlib.Path)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--threads", type=int, default=6, help="of the load generator")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--stream", action="store_true", help="SolveStream, a stream for each connection")
    parser.add_argument("--no-verify", dest="verify", action="store_false")
    options = parser.parse_args()
    server_path, loadgen = gpu_serving.programs(options.bin)

    rows, where, commit = [], "", "?"
    for mode, flags in (("batched", []), ("one by one", ["--max_batch_problems=1"])):
        server = gpu_serving.Server(server_path, f"--backend={options.backend}", *flags)
        try:
            where = gpu_serving.machine(server.log)
            commit = next((m for k in server.metrics() for m in re.findall(r'commit="([^"]*)"', k)), "?")
            fresh = [
                gpu_serving.measure("256 points, gradients", loadgen, server, options.clients, options, GRADIENTS),
                gpu_serving.measure("16 to 4,096 points", loadgen, server, options.clients, options, SIZES),
                gpu_serving.measure("64 points, alone", loadgen, server, 64, options, SMALL),
                *(row for which in LARGE for row in beside_a_large_one(which, loadgen, server, options)),
            ]
        finally:
            server.stop()
        for row in fresh:
            print(mode, row, flush=True)
        rows += [{"server": mode} | row for row in fresh]
    beside = [row for row in rows if row["server"] == "batched" and "64 points, beside" in row["mode"]]
    p99 = max(row["p99_ms"] for row in beside)
    met = "met" if p99 <= SMALL_P99_MS_WANTED else "missed"
    text = (
        f"{where}. {time.strftime('%Y-%m-%d', time.gmtime())}, commit {commit}.\n"
        f"Command: `{' '.join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]])}`\n\n{gpu_serving.table(rows, COLUMNS)}\n\n"
        f"Small clouds beside a large one: p99 {p99:.1f} ms (wanted: {SMALL_P99_MS_WANTED}: {met}).\n"
    )
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu_clouds_serving.md").write_text(text)
    (options.out / "gpu_clouds_serving.json").write_text(
        json.dumps({"machine": where, "commit": commit, "rows": rows}, indent=1)
    )
    return 1 if any(row["errors"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
