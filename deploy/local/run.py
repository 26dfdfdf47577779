"""What deploy/local.sh runs: a cluster, Prometheus, load, a supervisor as Kubernetes would be, and a view once a second."""

import argparse
import collections
import contextlib
import json
import math
import pathlib
import signal
import subprocess
import sys
import threading
import time
import urllib.parse

from cluster import Cluster, free_ports, get

ROOT = pathlib.Path(__file__).parents[2]
MIX = "normalization:32x4x4:20=0.8,dense:40x30:50:value=0.1,point_cloud:100x100x3:20:gradient=0.1"
STATES = ("warming", "ready", "draining", "stopping")
SOLVE = 'grpc_method=~".*/Solve"'
RESTART_AFTER_SECONDS = 2
CHAOS_EVERY_SECONDS = 5


class Prometheus:
    """With the rules of deploy/prometheus; scrapes once a second."""

    def __init__(self, folder, replicas):
        (self.port,) = free_ports(1)
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(ROOT / "deploy/prometheus/alerts.yml")],
            "scrape_configs": [
                {
                    "job_name": "sinkhorn",
                    "static_configs": [{"targets": [f"127.0.0.1:{replica.metrics_port}" for replica in replicas]}],
                }
            ],
        }
        path = folder / "prometheus.yml"
        path.write_text(json.dumps(config))  # JSON is YAML.
        command = ["prometheus", f"--config.file={path}", f"--storage.tsdb.path={folder}/prometheus"]
        command += [f"--web.listen-address=127.0.0.1:{self.port}", "--storage.tsdb.retention.time=1h"]
        with open(folder / "prometheus.log", "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def query(self, expression):
        """{instance: value}; "" stands for all of them."""
        query = urllib.parse.urlencode({"query": expression})
        with contextlib.suppress(OSError):
            result = json.loads(get(f"http://127.0.0.1:{self.port}/api/v1/query?{query}"))["data"]["result"]
            return {series["metric"].get("instance", ""): float(series["value"][1]) for series in result}
        return {}

    def alerts(self):
        with contextlib.suppress(OSError):
            alerts = json.loads(get(f"http://127.0.0.1:{self.port}/api/v1/alerts"))["data"]["alerts"]
            return sorted({f"{alert['labels']['alertname']} ({alert['state']})" for alert in alerts})
        return []


class Load(threading.Thread):
    """Generators one after the other, with the retry policy that the clients ship; counts what they saw."""

    def __init__(self, program, cluster, clients):
        super().__init__(daemon=True)
        flags = [f"--mix={MIX}", f"--clients={clients}", "--max_attempts=5", "--connections=4", "--verify", "--json"]
        self.command = [program, *flags, "--warmup=0s", "--duration=3s", *cluster.client_flags()]
        self.answered, self.wrong, self.errors = 0, 0, collections.Counter()
        self.ending, self.process = False, None

    def run(self):
        while not self.ending:
            self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            output, complaint = self.process.communicate()
            if not output:
                if not self.ending:
                    self.errors[complaint.strip() or "the generator ended"] += 1
                continue
            report = json.loads(output)
            self.answered += report["all"]["requests"]
            self.wrong += report["wrong_count"]
            self.errors.update(report["all"]["errors"])

    def stop(self):
        self.ending = True
        self.join()


class Supervisor:
    """Starts replicas that ended; with `chaos`, makes them end."""

    def __init__(self, cluster, chaos):
        self.cluster, self.chaos = cluster, chaos
        self.ended, self.starts = {}, collections.Counter()
        self.next_chaos, self.turn, self.last = time.monotonic() + CHAOS_EVERY_SECONDS, 0, ""

    def step(self):
        now = time.monotonic()
        for index, replica in enumerate(self.cluster.replicas):
            if replica.running():
                self.ended.pop(index, None)
            elif now - self.ended.setdefault(index, now) > RESTART_AFTER_SECONDS:
                replica.start()
                self.starts[index] += 1
        if self.chaos and now > self.next_chaos:
            self.next_chaos = now + CHAOS_EVERY_SECONDS
            index = self.turn % len(self.cluster.replicas)
            number = signal.SIGKILL if self.turn % 2 == 0 else signal.SIGTERM
            self.last = f"{number.name} to replica {index}"
            self.cluster.replicas[index].signal(number)
            self.turn += 1


# Name: (query, by instance or over all; scale; digits).
COLUMNS = {
    "requests/s": ("sum by (instance) (rate(grpc_server_call_duration_seconds_count{%s}[5s]))", 1, 0),
    "p50 ms": (
        "histogram_quantile(.5, sum by (le%s) (rate(grpc_server_call_duration_seconds_bucket{%s}[5s])))",
        1e3,
        2,
    ),
    "p99 ms": (
        "histogram_quantile(.99, sum by (le%s) (rate(grpc_server_call_duration_seconds_bucket{%s}[5s])))",
        1e3,
        2,
    ),
    "problems/batch": (
        "sum%s (rate(sinkhorn_batch_problems_sum[5s])) / sum%s (rate(sinkhorn_batch_problems_count[5s]))",
        1,
        1,
    ),
    "queue ms": ("max%s (sinkhorn_queue_predicted_seconds)", 1e3, 2),
    "busy %": ("avg%s (rate(sinkhorn_device_busy_seconds_total[5s]))", 100, 1),
    "memory MB": ("sum%s (process_resident_memory_bytes)", 1e-6, 0),
}


def expressions(name):
    """(for each replica, for all of them)"""
    text = COLUMNS[name][0]
    if name == "requests/s":
        return text % SOLVE, (text % SOLVE).replace(" by (instance)", "")
    if "le%s" in text:
        return text % (", instance", SOLVE), text % ("", SOLVE)
    return text.replace("%s", " by (instance)"), text.replace("%s", "")


def show(cluster, prometheus, load, supervisor, started):
    """The view, as lines."""
    states = prometheus.query("sinkhorn_server_state == 1")
    state_names = {name: prometheus.query(f'sinkhorn_server_state{{state="{name}"}} == 1') for name in STATES}
    columns = {name: [prometheus.query(expression) for expression in expressions(name)] for name in COLUMNS}
    yield f"Sinkhorn: {len(cluster.replicas)} replicas behind Envoy at {cluster.address} (TLS)   {seconds_since(started)} s"
    yield f"Prometheus http://127.0.0.1:{prometheus.port}   Envoy http://127.0.0.1:{cluster.admin_port}   logs {cluster.folder}"
    yield ""
    yield "  ".join(
        ["replica         ", "process ", "state   ", "Envoy    ", *(f"{name:>14}" for name in columns), "starts"]
    )
    for index, (replica, healthy) in enumerate(zip(cluster.replicas, cluster.healthy(), strict=True)):
        instance = f"127.0.0.1:{replica.metrics_port}"
        state = next((name for name in STATES if instance in state_names[name]), "")
        process = str(replica.process.pid) if replica.running() else "ended"
        cells = [number(name, values[0].get(instance)) for name, values in columns.items()]
        row = [f"{instance:<16}", f"{process:<8}", f"{state if instance in states else '':<8}"]
        yield "  ".join([*row, f"{'healthy' if healthy else 'out':<9}", *cells, f"{1 + supervisor.starts[index]:>6}"])
    yield "  ".join([f"{'all':<16}", " " * 8, " " * 8, " " * 9, *(number(n, v[1].get("")) for n, v in columns.items())])
    yield ""
    errors = ", ".join(f"{count} {error}" for error, count in load.errors.items()) or "none"
    yield f"clients: {load.answered} answers, {load.wrong} of them wrong, failed calls: {errors}"
    yield f"alerts:  {', '.join(prometheus.alerts()) or 'none'}"
    yield f"chaos:   {supervisor.last or 'none yet'}" if supervisor.chaos else ""


def number(name, value):
    _, scale, digits = COLUMNS[name]
    return f"{'':>14}" if value is None or math.isnan(value) else f"{value * scale:>14.{digits}f}"


def seconds_since(started):
    return round(time.monotonic() - started)


def parse():
    parser = argparse.ArgumentParser()
    for program in ("server", "loadgen", "envoy"):
        parser.add_argument(f"--{program}", required=True)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--chaos", action="store_true")
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "build/local", help="for logs and certificates")
    return parser.parse_args()


def main():
    flags = parse()
    flags.folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    screen = sys.stdout.isatty()
    with contextlib.ExitStack() as stack:
        server_flags = ["--drain_grace=2s", "--threads=1"]
        cluster = Cluster(flags.folder, flags.server, flags.envoy, replicas=flags.replicas, flags=server_flags)
        stack.enter_context(cluster)
        prometheus = Prometheus(flags.folder, cluster.replicas)
        stack.callback(prometheus.process.wait)
        stack.callback(prometheus.process.terminate)
        load = Load(flags.loadgen, cluster, flags.clients)
        load.start()
        stack.callback(load.stop)
        supervisor, started = Supervisor(cluster, flags.chaos), time.monotonic()
        while time.monotonic() - started < flags.seconds:
            supervisor.step()
            lines = list(show(cluster, prometheus, load, supervisor, started))
            print(("\033[H\033[2J" if screen else "") + "\n".join(lines), flush=True)
            time.sleep(1)
    print(f"\n{load.answered} answers, {load.wrong} wrong, failed calls: {dict(load.errors) or 'none'}")
    return 1 if load.wrong or load.errors or not load.answered else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
