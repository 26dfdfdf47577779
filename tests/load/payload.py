"""Requests and replies of 64 and 200 MB: the time and the memory they take, beside a server of generated code.

    bazel build //server:sinkhorn_server //client/loadgen:sinkhorn_loadgen //tests/load:generated_server
    python3 tests/load/payload.py                       # writes tests/bench/results/payload.md; half a minute
"""

import argparse
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("BAZEL_BIN", ROOT / "bazel-bin"))
SIZES = {"64 MB": "4000x4000", "200 MB": "7000x7140"}  # Of float32.
DIRECTIONS = {"request": "marginals", "request and reply": "plan"}
ROUNDS = 3
# Of a message, once the wire's bytes are in gRPC's slices, and until its bytes are there again.
COPIES = {"ours": "1 in, 0 out", "generated": "1 in, 1 out"}


class Server:
    def __init__(self, folder, name, command):
        self.ports = folder / f"{name}.ports"
        self.process = subprocess.Popen([*map(str, command(self.ports))], stderr=subprocess.DEVNULL)
        while not self.ports.exists():
            assert self.process.poll() is None, name
            time.sleep(0.02)
        self.port = int(self.ports.read_text().split()[0])

    def megabytes(self, field):
        lines = pathlib.Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e6

    def stop(self):
        self.process.kill()
        self.process.wait()


def start(folder, name):
    if name == "generated":
        return Server(folder, name, lambda ports: [BIN / "tests/load/generated_server", ports])
    flags = ["--listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0", "--backend=cpu"]
    return Server(folder, name, lambda ports: [BIN / "server/sinkhorn_server", *flags, f"--port_file={ports}"])


def call(server, size, output, requests):
    """The generator's figures of so many requests, one after the other."""
    mix = f"normalization:{SIZES[size]}:1:{output}"
    command = [BIN / "client/loadgen/sinkhorn_loadgen", f"--server=127.0.0.1:{server.port}", f"--mix={mix}", "--json"]
    command += ["--clients=1", "--payloads=1", "--warmup=0s", "--duration=60s", f"--requests={requests}"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120, check=True)
    figures = json.loads(done.stdout)["all"]
    assert not figures["errors"] and figures["requests"] == requests, figures
    return figures


def measure(name, size, output, requests):
    """A server of its own, so that its peak is of these requests alone."""
    with tempfile.TemporaryDirectory() as folder:
        server = start(pathlib.Path(folder), name)
        try:
            before = server.megabytes("VmHWM")
            call(server, size, output, 1)
            one = server.megabytes("VmHWM") - before
            figures = call(server, size, output, requests)
            times = [figures[part + "_seconds"]["p50"] for part in ("latency", "compute")]
            return {"ms": 1e3 * (times[0] - times[1]), "solve_ms": 1e3 * times[1], "peak_mb": one}
        finally:
            server.stop()


def rows(requests):
    """Each cell is the median of rounds that take turns."""
    keys = [(size, direction, name) for size in SIZES for direction in DIRECTIONS for name in COPIES]
    found = {key: [] for key in keys}
    for _ in range(ROUNDS):
        for size, direction, name in keys:
            found[size, direction, name].append(measure(name, size, DIRECTIONS[direction], requests))
    return {
        key: {figure: statistics.median(round_[figure] for round_ in rounds) for figure in rounds[0]}
        for key, rounds in found.items()
    }


def report(found):
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    names = {"ours": "ours", "generated": "generated code, no solve"}
    table = "\n".join(
        f"| {size} {direction} | {names[name]} | {row['ms']:.0f} | {row['solve_ms']:.0f} | {COPIES[name]} "
        f"| {row['peak_mb']:.0f} |"
        for (size, direction, name), row in found.items()
    )
    return f"""# Requests and replies of 64 and 200 MB

{os.cpu_count()} cores shared by server and client; {when}; `tests/load/payload.py`. One C++ client, one request at a time,
logits of float32, one iteration; medians of {ROUNDS} rounds that take turns, each with servers of its own.

| message | server | ms beyond the solve | ms of the solve | copies | peak MB above an idle server's |
| --- | --- | ---: | ---: | --- | ---: |
{table}

Milliseconds are the client's, its own copies and the loopback included; ours also look at every number. Copies are of the
tensor between gRPC's slices and where it is used: ours gathers what came in pieces, and sends the memory that the solver
wrote. Generated code copies in parsing and in serialising; here it moves the request's tensor into the reply and solves
nothing. The peak of ours holds the request as received, gathered (slices are freed as they are copied), what the solver
works with, and the reply.
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=5, help="timed, for each cell and round")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "tests/bench/results/payload.md")
    arguments = parser.parse_args()
    text = report(rows(arguments.requests))
    arguments.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
