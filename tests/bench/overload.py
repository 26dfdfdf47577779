"""The real server under more load than it can bear, a quiet tenant beside a flooding one, and clients that are pushed back.

    bazel build //server:sinkhorn_server //client/loadgen:sinkhorn_loadgen && python3 tests/bench/overload.py

Writes results/overload.md. Server and generators share the machine's cores, so that what refusing costs is paid by the
same cores that solve. Three minutes; --seconds=5 for a look.
"""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import subprocess
import tempfile
import threading
import time
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
BIN = pathlib.Path(os.environ.get("BAZEL_BIN", HERE.parents[1] / "bazel-bin"))
# 256 points in the plane on each side, a fixed number of iterations: small to send, 10 ms and more to solve.
MIX = "point_cloud:256x256x2:2000:value"
DEADLINE_MS = 500
PUSHED_SECONDS = 5
OVERLOAD = 4
TOKENS = {"quiet": "quiet-tenants-token", "flood": "flooding-tenants-token"}


class Server:
    def __init__(self, process, port, metrics_port):
        self.process, self.port, self.metrics_port = process, port, metrics_port

    def metrics(self):
        """{'name{labels}': value}."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        lines = urllib.request.urlopen(url, timeout=30).read().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    def peak_megabytes(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


@contextlib.contextmanager
def server(folder, *flags):
    ports = folder / f"ports-{time.monotonic_ns()}"
    command = [BIN / "server/sinkhorn_server", "--listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0", "--backend=cpu"]
    process = subprocess.Popen([*command, f"--port_file={ports}", *flags], stderr=subprocess.DEVNULL)
    try:
        while not ports.exists():
            if process.poll() is not None:
                raise RuntimeError("the server did not start")
            time.sleep(0.02)
        yield Server(process, *map(int, ports.read_text().split()))
    finally:
        process.kill()
        process.wait()


def load(target, seconds, *flags, warmup=1.0):
    """The generator's JSON."""
    command = [BIN / "client/loadgen/sinkhorn_loadgen", f"--server=127.0.0.1:{target.port}", f"--mix={MIX}", "--json"]
    command += [f"--duration={seconds}s", f"--warmup={warmup}s", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):
        raise RuntimeError(f"{command}: {done.stderr}")
    return json.loads(done.stdout)["all"]


def total(metrics, name, **labels):
    want = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(v for k, v in metrics.items() if k.split("{")[0] == name and all(word in k for word in want))


class MemorySampler(threading.Thread):
    """Resident megabytes, ten times a second."""

    def __init__(self, pid):
        super().__init__(daemon=True)
        self.path, self.samples, self.over = pathlib.Path(f"/proc/{pid}/statm"), [], threading.Event()

    def run(self):
        while not self.over.wait(0.1):
            self.samples.append(int(self.path.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20)


# ---- Overload -------------------------------------------------------------------------------------------------------


def recovery(target):
    """Seconds until nothing is in flight any more."""
    start = time.monotonic()
    while total(target.metrics(), "sinkhorn_requests_in_flight") > 0:
        time.sleep(0.005)
    return time.monotonic() - start


def overload(folder, seconds):
    with server(folder) as target:
        load(target, 2, "--clients=8")  # The cost model learns.
        capacity = load(target, max(2, seconds / 6), "--clients=8")["requests_per_second"]
        before = target.metrics()
        sampler = MemorySampler(target.process.pid)
        sampler.start()
        flags = (f"--rate={OVERLOAD * capacity:.0f}", f"--deadline_ms={DEADLINE_MS}", "--max_attempts=1")
        result = load(target, seconds, *flags, warmup=0)
        empty = recovery(target)
        sampler.over.set()
        after = target.metrics()
        lone = load(target, 2, "--clients=1", warmup=0)

        def grown(name, **labels):
            return total(after, name, **labels) - total(before, name, **labels)

        expired = grown("sinkhorn_requests_abandoned_total")
        solved = grown("sinkhorn_iterations_count")
        refused = grown("sinkhorn_requests_rejected_total")
        return {
            "capacity_per_s": capacity,
            "offered_per_s": (solved + refused + expired) / seconds,
            "goodput_per_s": result["requests"] / seconds,
            "refused": {
                reason: grown("sinkhorn_requests_rejected_total", reason=reason)
                for reason in ("INFEASIBLE_DEADLINE", "QUEUE_FULL")
            },
            "accepted": solved + expired,
            "in_time": solved / max(1, solved + expired),
            "p50_ms": 1e3 * result["latency_seconds"]["p50"],
            "p99_ms": 1e3 * result["latency_seconds"]["p99"],
            "peak_mb": max(sampler.samples),
            "second_half_growth_mb": max(sampler.samples) - max(sampler.samples[: len(sampler.samples) // 2]),
            "empty_s": empty,
            "lone_after_ms": 1e3 * lone["latency_seconds"]["p50"],
            "errors": result["errors"],
        }


# ---- A quiet tenant beside a flooding one ---------------------------------------------------------------------------


def flood(folder, seconds):
    for name, token in TOKENS.items():
        (folder / name).write_text(token + "\n")
    (folder / "tokens").write_text("\n".join(TOKENS.values()) + "\n")
    rows = {}
    with server(folder, f"--auth_token_file={folder / 'tokens'}") as target:
        quiet = ("--rate=8", f"--auth_token_file={folder / 'quiet'}")
        flooding = (f"--auth_token_file={folder / 'flood'}", "--clients=256")
        load(target, 2, flooding[0], "--clients=8")
        rows["alone"] = load(target, seconds, *quiet)
        thread = threading.Thread(target=lambda: rows.update(flood=load(target, seconds + 3, *flooding)))
        thread.start()
        time.sleep(1.5)
        rows["beside the flood"] = load(target, seconds, *quiet, warmup=0.5)
        thread.join()
        with server(folder) as other:  # The same without identities: one address, one tenant.
            thread = threading.Thread(target=lambda: load(other, seconds + 3, "--clients=256"))
            thread.start()
            time.sleep(1.5)
            rows["beside it, as the same tenant"] = load(other, seconds, "--rate=8", warmup=0.5)
            thread.join()
    return rows


# ---- Pushed back ----------------------------------------------------------------------------------------------------


def pushed_back(folder, seconds):
    """64 callers before a queue of 32: those that try once, and stock ones, which wait as they are told."""
    rows = {}
    for name, attempts in (("one attempt", 1), ("as shipped: five attempts", 5)):
        with server(folder, "--max_queue_requests=32", "--max_batch_problems=2") as target:
            load(target, 1, "--clients=4")
            before = target.metrics()
            rows[name] = load(target, seconds, "--clients=64", f"--max_attempts={attempts}", warmup=0)
            after = target.metrics()
            refused = "sinkhorn_requests_rejected_total"
            full = total(after, refused, reason="QUEUE_FULL") - total(before, refused, reason="QUEUE_FULL")
            rows[name]["refused_per_s"] = full / seconds
    return rows


# ---- Tables ---------------------------------------------------------------------------------------------------------


def verdict(good):
    return "met" if good else "missed"


def milliseconds(row, part):
    return f"{1e3 * row[part + '_seconds']['p50']:.1f} / {1e3 * row[part + '_seconds']['p99']:.1f}"


def report(result, rows, pushed, seconds):
    model = next((l.split(":")[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), "?")
    when = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    goodput = result["goodput_per_s"] / result["capacity_per_s"]
    good = f"{result['goodput_per_s']:.1f}/s = {100 * goodput:.1f} %"
    met = f"{100 * result['in_time']:.2f} % of {result['accepted']:.0f}"
    memory = f"{result['peak_mb']:.0f} MB; {result['second_half_growth_mb']:.1f} MB more in the second half"
    refused = ", ".join(f"{reason} {count:.0f}" for reason, count in result["refused"].items())
    ratio = rows["beside the flood"]["latency_seconds"]["p99"] / rows["alone"]["latency_seconds"]["p99"]
    table = "\n".join(
        f"| {name} | {row['requests_per_second']:.1f} | {milliseconds(row, 'latency')} | {milliseconds(row, 'queue')} "
        f"| {milliseconds(row, 'compute')} | {milliseconds(row, 'outside')} "
        f"| {sum(row['errors'].values()) if row['errors'] else 0} |"
        for name, row in rows.items()
    )
    push_table = "\n".join(
        f"| {name} | {row['requests_per_second']:.1f} | {sum((row['errors'] or {}).values()) / PUSHED_SECONDS:.1f} "
        f"| {row['refused_per_s']:.1f} |"
        for name, row in pushed.items()
    )
    return f"""# Overload and fairness

{model}, {os.cpu_count()} cores shared by server and generators; {when};
`tests/bench/overload.py --seconds={seconds:g}`.
Requests: `{MIX}` (256 points in the plane on each side, 2,000 iterations, the value alone).

## {OVERLOAD} times the capacity for {seconds:g} s, deadlines of {DEADLINE_MS} ms

| | | wanted | |
| --- | ---: | ---: | --- |
| capacity, 8 callers in a closed loop | {result["capacity_per_s"]:.1f}/s | | |
| offered | {result["offered_per_s"]:.1f}/s | | |
| goodput: answered before their deadline | {good} | 90 % | {verdict(goodput >= 0.9)} |
| accepted that met their deadline | {met} | 99 % | {verdict(result["in_time"] >= 0.99)} |
| refused | {refused} | | |
| latency of answers, p50 and p99 | {result["p50_ms"]:.0f} and {result["p99_ms"]:.0f} ms | | |
| resident memory, peak | {memory} | bounded | |
| nothing left in flight after | {result["empty_s"]:.2f} s | 2 s | {verdict(result["empty_s"] <= 2)} |
| a lone caller's p50 then | {result["lone_after_ms"]:.1f} ms | | |

What the callers saw: {json.dumps(result["errors"])}.

## A quiet tenant (8 requests/s) beside a flooding one (256 callers that never pause)

Medians / 99th percentiles in ms: of all, and where the server says that they went; outside is the rest, both ends' RPC
and the wait for a core that generator and server share.

| quiet tenant | answers/s | latency | queue | compute | outside | errors |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
{table}

Its p99 beside the flood is {ratio:.2f} times its lone value (wanted: at most 2: {verdict(ratio <= 2)}). The row "flood" is
the flooding tenant's. Alone, its longest ones are those that arrive while another of its own is solved.

## Stock clients and a full queue (64 callers that never pause, a queue of 32)

| callers | answers/s | failed calls/s | refused by the server/s |
| --- | ---: | ---: | ---: |
{push_table}

Clients with the shipped retry policy wait as long as `grpc-retry-pushback-ms` says before they come back, four times at
most: here twice as many callers as the queue has places never pause, so some find it full five times.
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results/overload.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        result = overload(folder, arguments.seconds)
        rows = flood(folder, max(4, 0.3 * arguments.seconds))
        pushed = pushed_back(folder, PUSHED_SECONDS)
    text = report(result, rows, pushed, arguments.seconds)
    arguments.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
