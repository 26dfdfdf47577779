#!/usr/bin/env python3
"""What the server does on a GPU machine: requests of 32 matrices 4 x 4, batched against one by one, by clients.

  bazel build //server:sinkhorn_server //client/loadgen:sinkhorn_loadgen
  tests/bench/gpu_serving.py --out DIR

Server and load generator share the machine and speak over loopback. Needs nothing but Python 3. Writes
DIR/gpu_serving.md and .json. --bin: a folder with both programs, where there is no bazel-bin.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
TICKS = os.sysconf("SC_CLK_TCK")
STAGES = ("decode", "queue", "h2d", "solve", "d2h", "encode")
MIX = "normalization:32x4x4:20"


def programs(folder):
    """The server and the load generator, from one folder or from bazel-bin."""
    if folder:
        return folder / "sinkhorn_server", folder / "sinkhorn_loadgen"
    return ROOT / "bazel-bin/server/sinkhorn_server", ROOT / "bazel-bin/client/loadgen/sinkhorn_loadgen"


class Server:
    """A server process that is ready."""

    def __init__(self, path, *flags):
        self.folder = tempfile.TemporaryDirectory()
        ports = pathlib.Path(self.folder.name) / "ports"
        self.log = pathlib.Path(self.folder.name) / "log"
        addresses = ["--listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0", f"--port_file={ports}"]
        command = [path, *addresses, "--drain_grace=0s", "--max_connection_age=inf", *flags]
        self.process = subprocess.Popen(command, stderr=open(self.log, "wb"))
        deadline = time.monotonic() + 60
        while not ports.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start: {self.log.read_text()}")
            time.sleep(0.01)
        self.port, self.metrics_port = ports.read_text().split()

    def metrics(self):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        return {name: float(value) for name, value in re.findall(r"^(\w+(?:\{[^}]*\})?) (\S+)$", text, re.M)}

    def cpu_seconds(self):
        """Of each thread, by id."""
        seconds = {}
        for task in pathlib.Path(f"/proc/{self.process.pid}/task").iterdir():
            try:
                fields = (task / "stat").read_text()
            except OSError:
                continue
            numbers = fields.rpartition(")")[2].split()
            seconds[int(task.name)] = (int(numbers[11]) + int(numbers[12])) / TICKS
        return seconds

    def stop(self):
        self.process.terminate()
        code = self.process.wait(60)
        if code != 0:
            print(f"server left with {code}: {self.log.read_text()}", file=sys.stderr)


def load(loadgen, server, clients, seconds, options, mix=MIX):
    threads = min(clients, options.threads)
    command = [loadgen, f"--server=127.0.0.1:{server.port}", f"--clients={clients}", f"--mix={mix}", "--json"]
    command += [f"--threads={threads}", f"--connections={min(clients, options.connections)}"]
    command += ["--warmup=500ms", f"--duration={seconds}s"]
    command += ["--stream"] * options.stream + ["--verify"] * options.verify
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise SystemExit(f"{command}: exit {done.returncode}: {done.stdout}{done.stderr}")
    return json.loads(done.stdout)


def total(metrics, name):
    return sum(value for key, value in metrics.items() if key == name or key.startswith(name + "{"))


def measure(label, loadgen, server, clients, options, mix=MIX):
    before, cpu_before, wall = server.metrics(), server.cpu_seconds(), time.monotonic()
    result = load(loadgen, server, clients, options.seconds, options, mix)
    wall = time.monotonic() - wall
    after, cpu_after = server.metrics(), server.cpu_seconds()
    everything = result["all"]
    calls = max(1, round(total(after, "sinkhorn_iterations_count") - total(before, "sinkhorn_iterations_count")))
    row = {
        "mode": label,
        "mix": mix,
        "clients": clients,
        "requests_per_second": everything["requests_per_second"],
        "p50_ms": 1e3 * everything["latency_seconds"]["p50"],
        "p99_ms": 1e3 * everything["latency_seconds"]["p99"],
        "errors": everything["errors"],
        "generator_cpu_us": 1e6 * result["generator_cpu_seconds_per_request"],
    }
    problems = total(after, "sinkhorn_batch_problems_sum") - total(before, "sinkhorn_batch_problems_sum")
    batches = total(after, "sinkhorn_batch_problems_count") - total(before, "sinkhorn_batch_problems_count")
    row["matrices_per_launch"] = problems / max(1, batches)
    row["launches_per_second"] = batches / wall
    for stage in STAGES:
        key = f'sinkhorn_stage_duration_seconds_sum{{stage="{stage}"}}'
        row[f"{stage}_us"] = 1e6 * (after.get(key, 0) - before.get(key, 0)) / calls
    busy = {task: seconds - cpu_before.get(task, 0) for task, seconds in cpu_after.items()}
    row["server_cpu_us"] = 1e6 * sum(busy.values()) / calls
    row["busiest_threads"] = [round(s / wall, 2) for s in sorted(busy.values(), reverse=True)[:14]]
    if result["wrong_count"]:
        raise SystemExit(f"wrong answers: {result['wrong']}")
    return row


COLUMNS = (
    ("mode", "mode", "{}"),
    ("clients", "clients", "{}"),
    ("requests/s", "requests_per_second", "{:,.0f}"),
    ("p50 ms", "p50_ms", "{:.3f}"),
    ("p99 ms", "p99_ms", "{:.3f}"),
    ("matrices per launch", "matrices_per_launch", "{:,.0f}"),
    ("decode us", "decode_us", "{:.1f}"),
    ("queue us", "queue_us", "{:.1f}"),
    ("copy in us", "h2d_us", "{:.1f}"),
    ("solve us", "solve_us", "{:.1f}"),
    ("copy out us", "d2h_us", "{:.1f}"),
    ("encode us", "encode_us", "{:.1f}"),
    ("server CPU us", "server_cpu_us", "{:.1f}"),
)


def table(rows, columns=COLUMNS):
    lines = ["| " + " | ".join(name for name, _, _ in columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [form.format(row[key]) if key in row else "" for _, key, form in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def machine(log):
    ready = [json.loads(line) for line in log.read_text().splitlines() if '"ready"' in line]
    cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    return f"{ready[0]['device'] if ready else '?'}; {os.cpu_count()} cores{' of ' + cpu.group(1) if cpu else ''}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument("--bin", type=pathlib.Path)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--clients", default="1,16,256")
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--threads", type=int, default=6, help="of the load generator")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--stream", action="store_true", help="SolveStream, a stream for each connection")
    parser.add_argument("--repeat", type=int, default=1, help="measurements of each row; the median counts")
    parser.add_argument("--verify", action="store_true", help="check every answer; costs the generator CPU")
    parser.add_argument("--flags", default="", help="further flags of the server, separated by spaces")
    parser.add_argument("--mixes", default="", help="further rows: mixes separated by spaces, with the most clients")
    parser.add_argument("--batched-only", action="store_true")
    parser.add_argument("--name", default="gpu_serving")
    options = parser.parse_args()
    server_path, loadgen = programs(options.bin)

    rows, clients = [], [int(word) for word in options.clients.split(",")]
    where = ""
    one = "--max_batch_problems=1"
    modes = (("batched", []), ("one by one", [one]), ("one by one, one lane", [one, "--lanes=1"]))
    for label, flags in modes[: 1 if options.batched_only else 3]:
        server = Server(server_path, f"--backend={options.backend}", *flags, *options.flags.split())
        try:
            where = machine(server.log)
            commit = next((m for k in server.metrics() for m in re.findall(r'commit="([^"]*)"', k)), "?")
            for count in clients:
                repeats = [measure(label, loadgen, server, count, options) for _ in range(options.repeat)]
                repeats.sort(key=lambda row: row["requests_per_second"])
                rows.append(repeats[len(repeats) // 2])
                print(rows[-1], flush=True)
            for mix in options.mixes.split() if not flags else []:
                rows.append(measure(f"batched, {mix}", loadgen, server, clients[-1], options, mix))
                print(rows[-1], flush=True)
        finally:
            server.stop()
    rate = {(row["mode"], row["clients"]): row["requests_per_second"] for row in rows if row["mix"] == MIX}
    counts = [] if options.batched_only else clients
    gain = "{}: {:.2f} and {:.2f} times"
    gains = [gain.format(c, *(rate["batched", c] / rate[mode, c] for mode, _ in modes[1:])) for c in counts]
    text = (
        f"{where}. {time.strftime('%Y-%m-%d', time.gmtime())}, commit {commit}.\n"
        f"Command: `{' '.join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]])}`\n\n{table(rows)}\n\n"
        "Requests per second, batched against one by one on as many lanes and on one, by clients: "
        f"{'; '.join(gains)}.\n"
        f"The load generator took {', '.join(format(row['generator_cpu_us'], '.1f') for row in rows)} us of CPU per "
        "request, row by row.\n"
    )
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{options.name}.md").write_text(text)
    (options.out / f"{options.name}.json").write_text(json.dumps({"machine": where, "commit": commit, "rows": rows}))
    return 1 if any(row["errors"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
