"""Envoy's client-side weighted round robin by the load that replicas report: a slow replica gets less to do."""

import json
import signal
import subprocess
import threading
import time

import pytest

from .conftest import local_cluster


class Slow(threading.Thread):
    """Stops a replica for four fifths of the time, as a neighbour that takes its CPU would."""

    def __init__(self, replica):
        super().__init__(daemon=True)
        self.replica, self.over = replica, threading.Event()

    def run(self):
        while not self.over.is_set():
            self.replica.signal(signal.SIGSTOP)
            self.over.wait(0.004)
            self.replica.signal(signal.SIGCONT)
            self.over.wait(0.001)


def solved(replica):
    lines = replica.metrics().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("sinkhorn_iterations_count{"))


def share_of_the_slow(programs, envoy, folder, flags, seconds=8):
    """Of two replicas under a steady load far below what they can do."""
    flags = ["--threads=1", *flags]
    options = {"replicas": 2, "flags": flags, "balancing": "reported_load"}
    with local_cluster.Cluster(folder, programs["server"], envoy, **options) as cluster:
        load = [programs["loadgen"], "--mix=point_cloud:256x256x2:800:value", "--rate=25", "--json", "--warmup=0s"]
        load += cluster.client_flags()
        slow = Slow(cluster.replicas[0])
        slow.start()
        try:
            subprocess.run([*load, "--duration=5s"], check=True, capture_output=True, timeout=60)  # It learns.
            before = [solved(replica) for replica in cluster.replicas]
            done = subprocess.run([*load, f"--duration={seconds}s"], check=True, capture_output=True, timeout=60)
        finally:
            slow.over.set()
            slow.join()
        time.sleep(0.1)
        counts = [solved(replica) - was for replica, was in zip(cluster.replicas, before)]
        assert not json.loads(done.stdout)["all"]["errors"]
    assert sum(counts) > 15 * seconds
    return counts[0] / sum(counts)


@pytest.mark.parametrize("reports, most", [(True, 0.42), (False, 1)])
def test_a_slow_replica_gets_less(programs, from_pip, tmp_path, reports, most):
    share = share_of_the_slow(programs, from_pip("envoy"), tmp_path, ["--report_load"] if reports else [])
    print(f"the slow replica of two had {100 * share:.0f} % of the calls")
    assert share < most
    # Without reports all weigh the same: the difference is the reports' doing.
    assert reports or 0.45 < share < 0.55
