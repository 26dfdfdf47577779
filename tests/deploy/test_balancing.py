"""Replicas behind a real Envoy, in the configuration of deploy/local, and behind clients that balance by themselves: what
callers notice when a replica is killed, or when all are replaced one by one.

Every reply is checked: its marginals against its certificate, and the same bits for the same input whoever solved it.
"""

import collections
import importlib.util
import json
import signal
import subprocess
import threading
import time

import pytest

from .conftest import DEPLOY

MIX = "normalization:32x4x4:20=0.8,dense:40x30:50:value=0.1,point_cloud:50x60x3:20:gradient=0.1"
# Long enough for Envoy to notice (half a second), short enough for a test.
FLAGS = ["--drain_grace=1500ms", "--drain_timeout=10s", "--threads=1"]


def load_module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cluster(programs, from_pip, tmp_path_factory):
    module = load_module(DEPLOY / "local/cluster.py")
    with module.Cluster(tmp_path_factory.mktemp("cluster"), programs["server"], from_pip("envoy"), flags=FLAGS) as made:
        made.get = module.get
        yield made
    for replica in made.replicas:
        assert "incident" not in replica.log_path.read_text()


class Load:
    """Generators at work, one after the other, until `result()`: what they saw, summed."""

    def __init__(self, programs, cluster, attempts, address=None):
        flags = [f"--mix={MIX}", "--clients=4", f"--max_attempts={attempts}", "--connections=2", "--verify", "--json"]
        flags += ["--warmup=0s", "--duration=1500ms", "--deadline_ms=30000", *cluster.client_flags(address)]
        self.command = [programs["loadgen"], *flags]
        self.ending, self.reports = threading.Event(), []
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while not self.ending.is_set():
            done = subprocess.run(self.command, capture_output=True, text=True, timeout=120, check=False)
            self.reports.append(json.loads(done.stdout) if done.stdout else {"broke": done.stderr})

    def answered(self):
        return sum(report["all"]["requests"] for report in self.reports)

    def result(self):
        """(answers, {error: how many}), all answers right."""
        self.ending.set()
        self.thread.join()
        errors = collections.Counter()
        for report in self.reports:
            assert "broke" not in report, report
            assert report["verified"] and report["wrong_count"] == 0, report["wrong"]
            errors.update(report["all"]["errors"])
        return self.answered(), dict(errors)


@pytest.fixture
def load(programs, cluster):
    """Starts loads, and ends them whatever happens."""
    loads = []

    def start(**options):
        loads.append(Load(programs, cluster, **options))
        return loads[-1]

    yield start
    for one in loads:
        one.ending.set()
        one.thread.join()


def solved(replica, cluster):
    text = cluster.get(f"http://127.0.0.1:{replica.metrics_port}/metrics")
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("sinkhorn_outcomes_total{"))


def kill_one(cluster, replica):
    time.sleep(1)
    replica.signal(signal.SIGKILL)
    replica.process.wait()
    time.sleep(1.5)
    replica.start()
    cluster.await_replicas()


def replace_all(cluster):
    time.sleep(0.5)
    for replica in cluster.replicas:
        assert cluster.restart(replica) == 0
    time.sleep(0.5)


def test_a_killed_replica_behind_envoy(cluster, load):
    """Clients with the shipped retry policy see nothing of it; those without see UNAVAILABLE at most."""
    retrying, plain = load(attempts=5), load(attempts=1)
    kill_one(cluster, cluster.replicas[0])
    deadline = time.monotonic() + 30
    while solved(cluster.replicas[0], cluster) == 0:
        assert time.monotonic() < deadline, "the new one gets no calls"
        time.sleep(0.1)
    answers, errors = retrying.result()
    assert errors == {} and answers > 100
    answers, errors = plain.result()
    assert {error.split("/")[0] for error in errors} <= {"UNAVAILABLE"} and answers > 100


def test_all_replicas_replaced_behind_envoy(cluster, load):
    """No call fails, not even for clients that never try again."""
    plain = load(attempts=1)
    replace_all(cluster)
    answers, errors = plain.result()
    assert errors == {} and answers > 100
    assert all(solved(replica, cluster) > 0 for replica in cluster.replicas)


def test_a_killed_replica_and_clients_that_balance(cluster, load):
    retrying = load(attempts=5, address=cluster.every_replica())
    kill_one(cluster, cluster.replicas[1])
    answers, errors = retrying.result()
    assert errors == {} and answers > 100


def test_all_replicas_replaced_and_clients_that_balance(cluster, load):
    retrying = load(attempts=5, address=cluster.every_replica())
    replace_all(cluster)
    answers, errors = retrying.result()
    assert errors == {} and answers > 100
