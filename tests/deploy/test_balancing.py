"""Replicas behind a real Envoy and a real haproxy, in the configurations of deploy/local, and behind clients that balance by
themselves: what callers notice when a replica is killed or freezes, or when all are replaced one by one.

Every reply is checked: its marginals against its certificate, and the same bits for the same input whoever solved it.
"""

import collections
import importlib.util
import json
import os
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
        made.start_haproxy()
        yield made
    for replica in made.replicas:
        assert "incident" not in replica.log_path.read_text()


class Load:
    """Generators at work, one after the other, until `result()`: what they saw, summed."""

    def __init__(self, programs, cluster, attempts, address=None):
        flags = [f"--mix={MIX}", "--clients=2", f"--max_attempts={attempts}", "--connections=2", "--verify", "--json"]
        flags += ["--warmup=0s", "--duration=1500ms", "--deadline_ms=30000", *cluster.client_flags(address)]
        self.command = [programs["loadgen"], *flags]
        self.ending, self.reports = threading.Event(), []
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while not self.ending.is_set():
            done = subprocess.run(self.command, capture_output=True, text=True, timeout=120, check=False)
            self.reports.append(json.loads(done.stdout) if done.stdout else {"not_begun": done.stderr})

    def answered(self):
        return sum(report["all"]["requests"] for report in self.reports if "all" in report)

    def result(self):
        """(answers, {error: how many}), all answers right."""
        self.ending.set()
        self.thread.join()
        errors = collections.Counter()
        for report in self.reports:
            if "not_begun" in report:  # Its first call, to health, failed.
                errors[report["not_begun"].strip().rsplit(": ", 1)[-1]] += 1
                continue
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


def check(one, errors=frozenset()):
    """Right answers, and no errors but these."""
    answers, seen = one.result()
    assert {error.split("/")[0] for error in seen} <= errors, seen
    assert answers > 0


def ways(cluster):
    """Through Envoy, through haproxy, and to all replicas in turns."""
    return [cluster.address, cluster.haproxy_address, cluster.every_replica()]


def await_calls(cluster, replica):
    before, deadline = solved(replica, cluster), time.monotonic() + 30
    while solved(replica, cluster) <= before:
        assert time.monotonic() < deadline, "the replica gets no calls"
        time.sleep(0.1)


def test_a_killed_replica(cluster, load):
    """Clients with the shipped retry policy see nothing of it; those that never try again see UNAVAILABLE at most."""
    retrying = [load(attempts=5, address=address) for address in ways(cluster)]
    plain = [load(attempts=1, address=address) for address in ways(cluster)[:2]]
    time.sleep(1)
    killed = cluster.replicas[0]
    killed.signal(signal.SIGKILL)
    killed.process.wait()
    time.sleep(1.5)
    killed.start()
    cluster.await_replicas()
    await_calls(cluster, killed)
    for one in retrying:
        check(one)
    for one in plain:
        check(one, {"UNAVAILABLE"})


def test_all_replicas_replaced(cluster, load):
    """No call fails behind a balancer, with Envoy not even for clients that never try again. Clients that balance by
    themselves do not ask for health, so they call a replica until it shuts down; gRPC answers a call that arrives in that
    moment with CANCELLED."""
    behind_envoy, behind_haproxy = load(attempts=1), load(attempts=5, address=cluster.haproxy_address)
    alone = load(attempts=5, address=cluster.every_replica())
    time.sleep(0.5)
    for replica in cluster.replicas:
        assert cluster.restart(replica) == 0
    await_calls(cluster, cluster.replicas[-1])
    check(behind_envoy)
    check(behind_haproxy)
    check(alone, {"CANCELLED"})


def test_a_frozen_replica(cluster, load):
    """Its traffic moves within seconds; the calls that it holds are answered when it goes on."""
    before, frozen = load(attempts=5), cluster.replicas[1]
    time.sleep(0.5)
    frozen.signal(signal.SIGSTOP)
    try:
        cluster.await_healthy(len(cluster.replicas) - 1, seconds=5)
        during = load(attempts=1)
        time.sleep(0.5)
        check(during)
    finally:
        frozen.signal(signal.SIGCONT)
    cluster.await_healthy(len(cluster.replicas))
    check(before)


@pytest.mark.skipif(os.environ.get("SINKHORN_TEST_LONG") != "1", reason="takes 20 s: set SINKHORN_TEST_LONG=1")
def test_a_replica_frozen_for_good(cluster, load):
    """The calls that it holds are lost with its connections, which Envoy gives up within 13 s, and tried elsewhere."""
    before, frozen = load(attempts=5), cluster.replicas[2]
    time.sleep(0.5)
    frozen.signal(signal.SIGSTOP)
    started = time.monotonic()
    try:
        cluster.await_healthy(len(cluster.replicas) - 1, seconds=5)
        check(before)
        assert time.monotonic() - started < 20
    finally:
        frozen.stop()
        frozen.start()
    cluster.await_replicas()
    cluster.await_healthy(len(cluster.replicas))


def test_local_sh(programs, from_pip, tmp_path):
    """The trial cluster of deploy/local.sh shows itself and sees no failed call while one replica is killed."""
    named = {"SINKHORN_SERVER": programs["server"], "SINKHORN_LOADGEN": programs["loadgen"], "ENVOY": from_pip("envoy")}
    done = subprocess.run(
        [DEPLOY / "local.sh", "--seconds=12", "--clients=2", "--chaos", f"--folder={tmp_path}"],
        env={**os.environ, **{name: str(path) for name, path in named.items()}},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "SIGKILL to replica 0" in done.stdout and done.stdout.endswith(" 0 wrong, failed calls: none\n")
    views = done.stdout.split("Sinkhorn: 3 replicas behind Envoy")[1:]
    rows = [line.split() for line in views[-1].splitlines() if line.startswith("127.0.0.1:")]
    assert len(rows) == 3 and sum(row[2:4] == ["ready", "healthy"] for row in rows) >= 2
    assert any(len(row) == 12 for row in rows), "no figures from Prometheus"
