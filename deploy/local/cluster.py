"""Replicas of the server behind Envoy on this machine: what deploy/local.sh shows and tests/deploy tries out.

Needs Python's standard library only. Replicas speak mutual TLS; so does Envoy with them; clients need the authority's
certificate. All addresses are on loopback, unless replicas have hosts of their own.
"""

import contextlib
import dataclasses
import json
import pathlib
import signal
import socket
import string
import subprocess
import time
import urllib.request

HERE = pathlib.Path(__file__).parent


_POLICY = "type.googleapis.com/envoy.extensions.load_balancing_policies."
# How Envoy chooses a replica.
BALANCING = {
    "least_request": {
        "name": "envoy.load_balancing_policies.least_request",
        "typed_config": {"@type": _POLICY + "least_request.v3.LeastRequest"},
    },
    # By answers per second of work, as the trailers of replicas with --report_load say.
    "reported_load": {
        "name": "envoy.load_balancing_policies.client_side_weighted_round_robin",
        "typed_config": {
            "@type": _POLICY + "client_side_weighted_round_robin.v3.ClientSideWeightedRoundRobin",
            "blackout_period": "2s",
            "weight_update_period": "0.5s",
        },
    },
}


def free_ports(count):
    """Ports that nobody listens on now; all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def accepts(host, port):
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


def get(url):
    with urllib.request.urlopen(url, timeout=5) as reply:
        return reply.read().decode()


@dataclasses.dataclass
class Replica:
    """A server process that can be started again on the same ports."""

    command: list
    address: str
    port: int
    metrics_port: int
    log_path: pathlib.Path
    process: subprocess.Popen | None = None

    def target(self):
        return f"{self.address}:{self.port}"

    def metrics(self):
        return get(f"http://{self.address}:{self.metrics_port}/metrics")

    def start(self):
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(self.command, stderr=log)

    def ready(self):
        try:
            return 'sinkhorn_server_state{state="ready"} 1' in self.metrics()
        except OSError:
            return False

    def running(self):
        return self.process is not None and self.process.poll() is None

    def signal(self, number):
        self.process.send_signal(number)

    def stop(self):
        """At once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class Cluster:
    """`with Cluster(folder, server, envoy) as cluster:` has all replicas ready and Envoy's opinion that they are.

    hosts: for each replica (address, what to put before a command so that it runs there); none: all on loopback.
    balancing: one of BALANCING."""

    def __init__(self, folder, server, envoy, replicas=3, flags=(), hosts=None, balancing="least_request"):
        self.folder, self.envoy_binary = pathlib.Path(folder), envoy
        self.folder.mkdir(parents=True, exist_ok=True)
        self.certificates = self.folder / "certificates"
        subprocess.run([HERE / "certificates.sh", self.certificates], check=True, capture_output=True)
        self.port, self.admin_port, haproxy_port, *ports = free_ports(3 + 2 * replicas)
        self.address, self.haproxy_address = f"localhost:{self.port}", f"localhost:{haproxy_port}"
        secret = [f"--tls_cert={self.certificates}/tls.crt", f"--tls_key={self.certificates}/tls.key"]
        secret.append(f"--tls_client_ca={self.certificates}/ca.crt")
        self.replicas = []
        for index, (address, there) in enumerate(hosts or [("127.0.0.1", [])] * replicas):
            port, metrics_port = ports[2 * index : 2 * index + 2]
            listen = [f"--listen={address}:{port}", f"--metrics_listen={address}:{metrics_port}"]
            command, log_path = [*there, server, *listen, *secret, *flags], self.folder / f"replica{index}.log"
            self.replicas.append(Replica(command, address, port, metrics_port, log_path))
        self.balancing = BALANCING[balancing]
        self.envoy = self.haproxy = None

    # ---- Clients ----

    def client_flags(self, address=None):
        """For `sinkhorn` and `sinkhorn_loadgen`."""
        flags = [f"--server={address or self.address}", f"--tls_root_cert={self.certificates}/ca.crt"]
        flags += [f"--tls_cert={self.certificates}/tls.crt", f"--tls_key={self.certificates}/tls.key"]
        return [*flags, "--tls_server_name=sinkhorn"]

    def every_replica(self):
        """An address that a client balances over by itself."""
        return "ipv4:" + ",".join(replica.target() for replica in self.replicas)

    # ---- Life ----

    def __enter__(self):
        try:
            for replica in self.replicas:
                replica.start()
            self.await_replicas()
            self.start_envoy()
            self.await_healthy(len(self.replicas))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for replica in self.replicas:
            replica.stop()
        for balancer in (self.envoy, self.haproxy):
            if balancer is not None:
                balancer.kill()
                balancer.wait()

    def start_haproxy(self):
        """Beside Envoy, before the same replicas. Takes calls at `haproxy_address`."""
        secret = self.certificates / "tls.pem"
        secret.write_text("".join((self.certificates / f"tls.{part}").read_text() for part in ("crt", "key")))
        unavailable = self.folder / "unavailable.http"
        lines = ["HTTP/1.1 200 OK", "content-type: application/grpc", "content-length: 0", "grpc-status: 14"]
        unavailable.write_text("\r\n".join([*lines, "grpc-message: no replica answered", "", ""]))
        host, port = self.haproxy_address.split(":")
        servers = [f"  server replica{i} {replica.target()}" for i, replica in enumerate(self.replicas)]
        path = self.folder / "haproxy.cfg"
        path.write_text(
            string.Template((HERE / "haproxy.cfg").read_text()).substitute(
                host=host,
                port=port,
                certificates=self.certificates,
                unavailable=unavailable,
                servers="\n".join(servers),
            )
        )
        with open(self.folder / "haproxy.log", "wb") as log:
            self.haproxy = subprocess.Popen(["haproxy", "-db", "-f", path], stdout=log, stderr=log)
        self._await(lambda: accepts(host, int(port)), "haproxy listens", seconds=10)

    def start_envoy(self):
        addresses = [{"address": replica.address, "port_value": replica.port} for replica in self.replicas]
        endpoints = [{"endpoint": {"address": {"socket_address": address}}} for address in addresses]
        config = string.Template((HERE / "envoy.yaml").read_text()).substitute(
            host="127.0.0.1",
            port=self.port,
            admin_port=self.admin_port,
            certificates=self.certificates,
            endpoints=json.dumps(endpoints),
            balancing=json.dumps(self.balancing),
        )
        path = self.folder / "envoy.yaml"
        path.write_text(config)
        command = [
            self.envoy_binary,
            "-c",
            path,
            "--concurrency",
            "2",
            "--log-level",
            "warning",
            "--use-dynamic-base-id",
        ]
        with open(self.folder / "envoy.log", "wb") as log:
            self.envoy = subprocess.Popen(command, stdout=log, stderr=log)

    def await_replicas(self, seconds=60):
        self._await(lambda: all(replica.ready() for replica in self.replicas), "replicas ready", seconds)

    def await_healthy(self, count, seconds=60):
        self._await(lambda: sum(self.healthy()) == count, f"Envoy holds {count} replicas for healthy", seconds)

    def _await(self, condition, what, seconds):
        deadline = time.monotonic() + seconds
        while not condition():
            dead = self.envoy is not None and self.envoy.poll() is not None
            if dead or time.monotonic() > deadline:
                raise RuntimeError(f"not in {seconds} s: {what}; logs are in {self.folder}")
            time.sleep(0.05)

    def healthy(self):
        """Envoy's opinion of each replica."""
        try:
            status = json.loads(get(f"http://127.0.0.1:{self.admin_port}/clusters?format=json"))
        except OSError:
            return [False] * len(self.replicas)
        hosts = {
            host["address"]["socket_address"]["port_value"]: not set(host["health_status"]) - {"eds_health_status"}
            for host in status["cluster_statuses"][0].get("host_statuses", [])
        }
        return [hosts.get(replica.port, False) for replica in self.replicas]

    def restart(self, replica, seconds=60):
        """As a rollout does: asks it to go, and starts it again when it has."""
        replica.signal(signal.SIGTERM)
        code = replica.process.wait(seconds)
        replica.start()
        self._await(replica.ready, "a restarted replica is ready", seconds)
        self.await_healthy(len(self.replicas), seconds)
        return code
