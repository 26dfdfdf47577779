"""A server under a long mixed load and everything that goes wrong in one: is all answered, and does nothing grow?

    bazel build //server:sinkhorn_server //client/loadgen:sinkhorn_loadgen
    .venv/bin/python tests/load/soak.py --minutes=30       # writes tests/bench/results/soak.md

First the answers to all problems are checked in float64 (problems.py), then the capacity for their mix is measured,
then callers offer 70 % of it: single calls and streams, of which some are cancelled, some have deadlines that nobody
can keep, some are wrong; and every few seconds a client process with calls in flight is killed. Each call must end as
its kind says (calls.py), once, under its own id, with the bits that were checked.
"""

import argparse
import collections
import contextlib
import dataclasses
import datetime
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests/python"), str(ROOT / "client/python"), str(ROOT)]
    import client_stubs

    client_stubs.generate()

import grpc
import numpy as np

from tests.load import problems
from tests.load.calls import KINDS, TIMEOUT, Caller

LOAD = 0.7  # Of the capacity.
CALLERS, CHANNELS = 16, 4
PARTS = 1 / 3, 2 / 3  # Of the time; a silence after each.
LEAST_AGE = 270  # Seconds after which the server asks a connection to go: five minutes, of which gRPC takes up to 10 %.
SECONDS_BETWEEN_KILLS = 4
# By how much memory may differ between two silences. Each thread that solves keeps up to 8 MB of small blocks
# (kernels/cpu/memory_pool.h), some time more, some time less; records of connections and the allocator's own the rest.
KEPT_MB = 8 * os.cpu_count()
RESIDENT_MAY_GROW_MB, LIVE_MAY_GROW_MB = KEPT_MB + 4, KEPT_MB + 2
SILENCE = 11  # Seconds after which an idle server has given back what its pools keep.


def program(variable, path):
    return pathlib.Path(os.environ.get(variable, ROOT / "bazel-bin" / path))


# ---- The server -----------------------------------------------------------------------------------------------------


class Server:
    def __init__(self, folder, *flags):
        ports, self.log_path = folder / "ports", folder / "log"
        command = [program("SINKHORN_SERVER", "server/sinkhorn_server"), "--backend=cpu", f"--port_file={ports}"]
        command += ["--listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0", *flags]
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(command, stderr=log)
        while not ports.exists():
            assert self.process.poll() is None, self.log_path.read_text()
            time.sleep(0.02)
        port, self.metrics_port = map(int, ports.read_text().split())
        self.address = f"127.0.0.1:{port}"

    def metrics(self):
        """{'name{labels}': value}."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        lines = urllib.request.urlopen(url, timeout=30).read().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    def total(self, name, *words):
        return sum(v for k, v in self.metrics().items() if k.split("{")[0] == name and all(word in k for word in words))

    def open_files(self):
        """What is open, how often: {'socket': 5, 'anon_inode:[eventfd]': 3}. The fewest within two seconds: who looks
        at the metrics has a socket for a moment longer."""
        fewest = None
        for _ in range(20):
            time.sleep(0.1)
            kinds = collections.Counter()
            for entry in pathlib.Path(f"/proc/{self.process.pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    kinds[re.sub(r":\[\d+\]", "", os.readlink(entry))] += 1
            fewest = kinds if fewest is None else min(fewest, kinds, key=lambda files: sum(files.values()))
        return fewest

    def sizes(self):
        """(resident MB, open files, threads)."""
        folder = pathlib.Path(f"/proc/{self.process.pid}")
        pages = int((folder / "statm").read_text().split()[1])
        return (
            pages * os.sysconf("SC_PAGESIZE") / 2**20,
            len(os.listdir(folder / "fd")),
            len(os.listdir(folder / "task")),
        )

    def stop(self):
        self.process.kill()
        self.process.wait()


class Sampler(threading.Thread):
    """The server's sizes four times a second while it is loaded: [(resident MB, open files, threads)]."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self.server, self.samples, self.loaded, self.over = server, [], threading.Event(), threading.Event()

    def run(self):
        while not self.over.wait(0.25):
            if self.loaded.is_set():
                self.samples.append(self.server.sizes())


# ---- The load -------------------------------------------------------------------------------------------------------


class Load:
    """The callers, and what they saw."""

    def __init__(self, server, seed=7):
        self.server, self.channels = server, []
        self.cases = problems.cases()
        self.weights = [case.weight for case in self.cases]
        generator = np.random.default_rng(seed)
        self.endless, self.bad = problems.endless(generator).SerializeToString(), problems.bad_requests(generator)
        self.callers = [Caller(number, self, seed + number) for number in range(CALLERS)]
        self.lock = threading.Lock()
        self.connect()
        self.clear()

    def connect(self):
        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        apart = [("grpc.use_local_subchannel_pool", 1)]
        self.channels = [grpc.insecure_channel(self.server.address, [*unlimited, *apart]) for _ in range(CHANNELS)]
        for caller in self.callers:
            caller.connect(self.channels[caller.number % CHANNELS])

    def disconnect(self):
        for channel in self.channels:
            channel.close()

    def clear(self):
        self.counts, self.wrong, self.seconds, self.taken = collections.Counter(), [], [], 0

    def learn(self):
        for case in self.cases:
            case.learn(self.callers[0].solve(case.body, timeout=TIMEOUT))

    def ended(self, kind, problem, seconds):
        with self.lock:
            self.counts[kind] += 1
            self.seconds.append(seconds)
            if problem is not None:
                self.wrong.append(f"{kind}: {problem}")

    def taken_along(self):
        with self.lock:
            self.taken += 1

    def run(self, seconds, rate=None):
        """Calls for so long; `rate` a second of all callers together, or as fast as they are answered. Returns calls/s.

        A caller that is late does not catch up, or a slow second would be followed by an overload."""
        begin, over, before = time.monotonic(), time.monotonic() + seconds, sum(self.counts.values())

        def work(caller):
            due = begin
            while (now := time.monotonic()) < over:
                if rate is not None:
                    due = max(due, now - 1) + caller.random.expovariate(rate / CALLERS)
                    time.sleep(max(0, min(due, over) - now))
                caller.call(caller.random.choices(list(KINDS), KINDS.values())[0])

        threads = [threading.Thread(target=work, args=(caller,)) for caller in self.callers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return (sum(self.counts.values()) - before) / (time.monotonic() - begin)


class Victims(threading.Thread):
    """Clients that die by SIGKILL with calls in flight."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self.over, self.killed = threading.Event(), 0
        mix = "point_cloud:2000x2000x3:5000:value,normalization:4096x32x32:1000"
        self.command = [program("SINKHORN_LOADGEN", "client/loadgen/sinkhorn_loadgen"), f"--server={server.address}"]
        self.command += [f"--mix={mix}", "--clients=3", "--payloads=1", "--warmup=0s", "--duration=60s"]

    def run(self):
        while not self.over.wait(SECONDS_BETWEEN_KILLS):
            victim = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            time.sleep(1)
            self.killed += victim.poll() is None
            victim.kill()
            victim.wait()


# ---- The run, and what it says --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    capacity: float
    rate: float
    seconds: float
    counts: dict
    wrong: list
    taken: int  # Late calls that learnt only that their connection, which was of age, had closed.
    latencies: list
    killed: int
    samples: list
    silences: list  # (resident MB, MB in use) after a third of the calls, and after all.
    files_before: collections.Counter
    files_after: collections.Counter
    unfinished: dict  # What the server's own counters say is left.

    def thirds(self, column):
        """Medians of the middle third of the time under load and of the last."""
        values, third = [sample[column] for sample in self.samples], len(self.samples) // 3
        return statistics.median(values[third : 2 * third]), statistics.median(values[2 * third :])

    def faults(self):
        """What is not as it must be: nothing."""
        faults = list(self.wrong[:20])
        aged = CHANNELS * sum(int(part * self.seconds / LEAST_AGE) for part in PARTS)  # Connections, at most.
        if self.taken > aged:  # Each closes with one call.
            faults.append(f"{self.taken} late calls lost their connection, {aged} connections at most were of age")
        (resident0, live0), (resident1, live1) = self.silences
        if resident1 > resident0 + RESIDENT_MAY_GROW_MB:
            faults.append(f"resident memory grows: {resident0:.1f} MB, then {resident1:.1f} MB")
        if live1 > live0 + LIVE_MAY_GROW_MB:
            faults.append(f"memory in use grows: {live0:.2f} MB, then {live1:.2f} MB")
        for name, column in (("open files", 1), ("threads", 2)):
            middle, last = self.thirds(column)
            if last > middle + 2:
                faults.append(f"{name} grow: {middle:.0f}, then {last:.0f}")
        if more := self.files_after - self.files_before:
            faults.append(f"open afterwards and not before: {dict(more)}")
        faults += [f"left behind: {name} = {value}" for name, value in self.unfinished.items() if value != 0]
        if not self.killed:
            faults.append("no client was killed")
        return faults


def left_behind(server):
    """What must be 0 when nobody calls any more."""
    metrics = server.metrics()
    left = {name: metrics[name] for name in ("sinkhorn_requests_in_flight", "sinkhorn_requests_held_bytes")}
    left |= {name: metrics[name] for name in ("sinkhorn_queue_requests", "sinkhorn_queue_bytes")}
    for method in ("Solve", "SolveStream"):
        word = f'grpc_method="sinkhorn.v1.SinkhornService/{method}"'
        begun = server.total("grpc_server_call_started_total", word)
        left[f"{method} calls without an end"] = begun - server.total("grpc_server_call_duration_seconds_count", word)
    return left


def silence(server, files):
    """(resident MB, MB in use) of a server to which nobody has been connected for a while, with so many open files. An
    open connection keeps buffers for what it may read next, several MB after a burst of large requests."""
    await_settled(server, files)
    server.metrics()
    time.sleep(SILENCE)
    metrics = server.metrics()
    return server.sizes()[0], metrics['sinkhorn_heap_bytes{use="live"}'] / 2**20


def await_settled(server, files, seconds=20):
    """Until connections are closed and nothing is left, or so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if server.sizes()[1] <= files and not any(left_behind(server).values()):
            return
        time.sleep(0.2)


def soak(seconds, flags=()):
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        server = Server(pathlib.Path(name), *flags)
        stack.callback(server.stop)
        server.metrics()
        files_before = server.open_files()
        load = Load(server)
        load.learn()
        load.run(min(5, seconds / 10))  # The cost model learns.
        load.clear()
        capacity = load.run(min(20, seconds / 6))
        load.clear()
        load.disconnect()
        sampler = Sampler(server)
        sampler.start()
        silences, rates, killed = [], [], 0
        for part in (share * seconds for share in PARTS):
            load.connect()
            sampler.loaded.set()
            victims = Victims(server)
            victims.start()
            rates.append(load.run(part, LOAD * capacity) * part)
            victims.over.set()
            victims.join()
            killed += victims.killed
            sampler.loaded.clear()
            load.disconnect()
            silences.append(silence(server, sum(files_before.values())))
        sampler.over.set()
        sampler.join()
        rate = sum(rates) / seconds
        files_after = server.open_files()
        assert server.process.poll() is None and "incident" not in server.log_path.read_text()
        return Result(
            *(capacity, rate, seconds, dict(load.counts), load.wrong, load.taken, sorted(load.seconds), killed),
            *(sampler.samples, silences, files_before, files_after, left_behind(server)),
        )


def report(result):
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?")
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    calls, n = sum(result.counts.values()), len(result.latencies)
    (mb0, mb1), (files0, files1), (threads0, threads1) = (result.thirds(column) for column in (0, 1, 2))
    peak = max(sample[0] for sample in result.samples)
    kinds = ", ".join(f"{kind} {result.counts.get(kind, 0)}" for kind in KINDS)
    seen = LIVE_MAY_GROW_MB * 2**20 / (2 * calls / 3)
    faults = result.faults()
    left = "nothing" if not any(result.unfinished.values()) else str(result.unfinished)
    p50, p99 = (1e3 * result.latencies[int(part * n)] for part in (0.5, 0.99))
    (resident0, live0), (resident1, live1) = result.silences
    memory = f"{mb0:.0f} and {mb1:.0f} MB (peak {peak:.0f})"
    before, after = (sum(files.values()) for files in (result.files_before, result.files_after))
    files = f"{files0:.0f} and {files1:.0f}; before {before}, after {after}"
    rows = {
        "calls": f"{calls}: {kinds}",
        "calls/s, and as fast as they were answered before": f"{result.rate:.1f} and {result.capacity:.1f}",
        "clients killed with calls in flight": result.killed,
        "wrong, lost, doubled or unexpected": len(result.wrong),
        "late calls that learnt only that their connection of age was closed": result.taken,
        "latency of all kinds, p50 and p99": f"{p50:.0f} and {p99:.0f} ms",
        "resident in a silence after a third of the time, and after all": f"{resident0:.1f} and {resident1:.1f} MB",
        "of it in use": f"{live0:.2f} and {live1:.2f} MB",
        "resident memory under load, median of the middle third and of the last": memory,
        "open files, likewise": files,
        "threads, likewise": f"{threads0:.0f} and {threads1:.0f}",
        "left behind in the server": left,
        "faults": "none" if not faults else "; ".join(faults),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"""# Soak: {result.seconds / 60:g} minutes at {100 * LOAD:.0f} % of the capacity

{model}, {os.cpu_count()} cores shared by server, callers and whatever else ran; {when};
`tests/load/soak.py --minutes={result.seconds / 60:g}`. {len(problems.cases())} problems of sizes 4 to 4,096, all outputs.

| | |
| --- | --- |
{table}

Every answer has the bits that were checked in float64 before the start, and its own id. In the silences nobody is
connected: an open connection keeps buffers of up to a few MB for what it may read next. Memory is flat if, between the
two, what is in use grows by {LIVE_MAY_GROW_MB} MB at most and what is resident by {RESIDENT_MAY_GROW_MB}: each thread
that solves keeps up to 8 MB of small blocks, some time more, some time less. A leak of {seen:.0f} bytes a call would be
seen. Under load memory follows what is in flight: one of these problems holds 64 MB.
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "tests/bench/results/soak.md")
    arguments = parser.parse_args()
    result = soak(60 * arguments.minutes)
    text = report(result)
    arguments.out.write_text(text)
    print(text)
    sys.exit(1 if result.faults() else 0)


if __name__ == "__main__":
    main()
