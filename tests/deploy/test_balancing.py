"""Replicas behind a real Envoy and a real haproxy, in the configurations of deploy/local, and behind clients that balance by
themselves: what callers notice when a replica is killed, freezes or cannot be reached, or when all are replaced one by one.

Each replica has a host of its own: a network namespace, joined to the others by a bridge. Every reply is checked: its marginals against its certificate, and the same bits for the same input whoever solved it.
"""

import collections
import json
import os
import shutil
import signal
import subprocess
import threading
import time

import pytest

from .conftest import DEPLOY, local_cluster

MIX = "normalization:32x4x4:20=0.8,dense:40x30:50:value=0.1,point_cloud:50x60x3:20:gradient=0.1"
# Long enough for Envoy to notice (half a second), short enough for a test.
FLAGS = ["--drain_grace=1500ms", "--drain_timeout=10s", "--threads=1"]


class Host:
    """A network namespace on the bridge `hub`, at `address`."""

    def __init__(self, hub, name, address):
        self.hub, self.name, self.address = hub, name, address
        # Not "ip netns exec", which also mounts, and so fails where the root is not a mount.
        self.command = ["nsenter", f"--net=/run/netns/{name}"]
        ip("netns", "add", name)

    def join(self):
        name, hub, address = self.name, self.hub, self.address
        ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", name, "master", hub, "up")
        run(*self.command, "ip", "link", "set", "lo", "up")
        run(*self.command, "ip", "address", "add", f"{address}/24", "dev", "eth0")
        run(*self.command, "ip", "link", "set", "eth0", "up")
        # Known for good, or the first second of silence would end in "no route" rather than in silence.
        link = json.loads(run(*self.command, "ip", "-json", "link", "show", "eth0"))[0]["address"]
        ip("neighbour", "replace", address, "lladdr", link, "dev", hub, "nud", "permanent")

    def cut(self):
        """What is sent to it or by it is lost, and nobody is told."""
        ip("link", "set", self.name, "nomaster")

    def mend(self):
        ip("link", "set", self.name, "master", self.hub)


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout


def ip(*arguments):
    return run("ip", *arguments)


@pytest.fixture(scope="module")
def hosts():
    """Three hosts; none if this user may not make them."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        yield []
        return
    number, made = os.getpid(), []
    hub, network = f"sink{number}", f"10.{100 + number // 250 % 100}.{number % 250}"
    ip("link", "add", hub, "type", "bridge")
    try:
        ip("address", "add", f"{network}.1/24", "dev", hub)
        ip("link", "set", hub, "up")
        for index in range(3):
            made.append(Host(hub, f"{hub}-{index}", f"{network}.{index + 2}"))
            made[-1].join()
        yield made
    finally:
        ip("link", "delete", hub)
        for host in made:
            ip("netns", "delete", host.name)


@pytest.fixture(scope="module")
def cluster(programs, hosts, from_pip, tmp_path_factory):
    folder, places = tmp_path_factory.mktemp("cluster"), [(host.address, host.command) for host in hosts]
    with local_cluster.Cluster(folder, programs["server"], from_pip("envoy"), flags=FLAGS, hosts=places) as made:
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
        ways = {None: "Envoy", cluster.address: "Envoy", cluster.haproxy_address: "haproxy"}
        way = ways.get(address, "round robin of the clients")
        self.name = f"{way}, {'retries' if attempts > 1 else 'never retries'}"
        self.ending, self.reports = threading.Event(), []
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while not self.ending.is_set():
            done = subprocess.run(self.command, capture_output=True, text=True, timeout=120, check=False)
            self.reports.append(json.loads(done.stdout) if done.stdout else {"not_begun": done.stderr})

    def answered(self):
        return sum(report["all"]["requests"] for report in self.reports if "all" in report)

    def result(self, at_least, seconds=60):
        """(answers, {error: how many}), all answers right. Goes on until it has `at_least` answers, for so long at most."""
        deadline = time.monotonic() + seconds
        while self.answered() < at_least and time.monotonic() < deadline:
            time.sleep(0.1)
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


def solved(replica):
    lines = replica.metrics().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("sinkhorn_outcomes_total{"))


def check(one, errors=frozenset()):
    """More than a hundred right answers, and no errors but these."""
    answers, seen = one.result(at_least=101)
    print(f"{one.name}: {answers} right answers, failed calls: {seen or 'none'}")
    assert {error.split("/")[0] for error in seen} <= errors, seen
    assert answers > 100


def ways(cluster):
    """Through Envoy, through haproxy, and to all replicas in turns."""
    return [cluster.address, cluster.haproxy_address, cluster.every_replica()]


def await_calls(replica):
    before, deadline = solved(replica), time.monotonic() + 30
    while solved(replica) <= before:
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
    await_calls(killed)
    for one in retrying:
        check(one)
    for one in plain:
        check(one, {"UNAVAILABLE"})


def test_all_replicas_replaced(cluster, load):
    """No call fails, with Envoy not even for clients that never try again."""
    behind_envoy, behind_haproxy = load(attempts=1), load(attempts=5, address=cluster.haproxy_address)
    alone = load(attempts=5, address=cluster.every_replica())
    time.sleep(0.5)
    for replica in cluster.replicas:
        assert cluster.restart(replica) == 0
    await_calls(cluster.replicas[-1])
    check(behind_envoy)
    check(behind_haproxy)
    check(alone)


def check_silence(cluster, load, replica, begin, end):
    """A replica is silent for a while: traffic moves within seconds; the calls that it holds are answered afterwards."""
    before = [load(attempts=5, address=address) for address in ways(cluster)]
    time.sleep(0.5)
    begin()
    try:
        cluster.await_healthy(len(cluster.replicas) - 1, seconds=5)
        during = [load(attempts=1, address=address) for address in ways(cluster)[:2]]
        for one in during:
            check(one)
    finally:
        end()
    cluster.await_healthy(len(cluster.replicas))
    await_calls(replica)
    for one in before:
        check(one)


def test_a_frozen_replica(cluster, load):
    frozen = cluster.replicas[1]
    check_silence(
        *(cluster, load, frozen), lambda: frozen.signal(signal.SIGSTOP), lambda: frozen.signal(signal.SIGCONT)
    )


def test_a_replica_out_of_reach(cluster, hosts, load):
    if not hosts:
        pytest.skip("only root makes network namespaces")
    check_silence(cluster, load, cluster.replicas[0], hosts[0].cut, hosts[0].mend)


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
