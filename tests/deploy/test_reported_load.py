"""Envoy's client-side weighted round robin by the load that replicas report: a slow replica gets less to do."""

import contextlib
import json
import os
import subprocess
import sys
import time

import pytest

from .conftest import local_cluster


@contextlib.contextmanager
def neighbour_on(cpu):
    """A process that would have all of a CPU."""
    process = subprocess.Popen(["taskset", "-c", cpu, "timeout", "60", sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def solved(replica):
    lines = replica.metrics().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("sinkhorn_iterations_count{"))


def mix(iterations):
    return f"--mix=point_cloud:256x256x2:{iterations}:value"


def iterations_that_take(seconds, loadgen, flags, probe=4800):
    """Of a problem of `mix`, at the server that the flags name."""
    command = [loadgen, *flags, mix(probe), "--clients=1", "--requests=20", "--warmup=0s", "--json"]
    done = subprocess.run(command, check=True, capture_output=True, timeout=60)
    return round(probe * seconds / json.loads(done.stdout)["all"]["latency_seconds"]["p50"])


def share_of_the_slow(programs, envoy, folder, flags, seconds=8, rate=15):
    """Of two replicas under a steady load far below what they can do, one of them with a quarter of a CPU.

    Whoever else is on the machine takes from both alike: the kernel shares each CPU by niceness. A solve outlasts its
    slices, of some milliseconds, on any machine: shorter ones never feel a neighbour."""
    cpus = [str(cpu) for cpu in sorted(os.sched_getaffinity(0))]
    slow = ("127.0.0.1", ["taskset", "-c", cpus[0], "nice", "-n", "5"])
    fast = ("127.0.0.1", ["taskset", "-c", cpus[-1]])
    flags = ["--threads=1", *flags]
    options = {"replicas": 2, "flags": flags, "hosts": [slow, fast], "balancing": "reported_load"}
    with local_cluster.Cluster(folder, programs["server"], envoy, **options) as cluster:
        to_the_fast = cluster.client_flags(cluster.replicas[1].target())
        iterations = iterations_that_take(0.025, programs["loadgen"], to_the_fast)
        with neighbour_on(cpus[0]):
            load = [programs["loadgen"], *cluster.client_flags(), mix(iterations)]
            load += [f"--rate={rate}", "--json", "--warmup=0s"]
            subprocess.run([*load, "--duration=5s"], check=True, capture_output=True, timeout=60)  # It learns.
            before = [solved(replica) for replica in cluster.replicas]
            done = subprocess.run([*load, f"--duration={seconds}s"], check=True, capture_output=True, timeout=60)
            time.sleep(0.1)
            counts = [solved(replica) - was for replica, was in zip(cluster.replicas, before)]
        assert not json.loads(done.stdout)["all"]["errors"]
    assert sum(counts) > 0.6 * rate * seconds
    return counts[0] / sum(counts)


@pytest.mark.parametrize("reports, most", [(True, 0.42), (False, 1)])
def test_a_slow_replica_gets_less(programs, from_pip, tmp_path, reports, most):
    share = share_of_the_slow(programs, from_pip("envoy"), tmp_path, ["--report_load"] if reports else [])
    print(f"the slow replica of two had {100 * share:.0f} % of the calls")
    assert share < most
    # Without reports all weigh the same: the difference is the reports' doing.
    assert reports or 0.45 < share < 0.55
