"""deploy/prometheus and deploy/grafana: alert rules that promtool accepts and tests, a runbook entry for each, and, with a
real Prometheus that scrapes real servers under load, data for every query; two alerts fire for real."""

import concurrent.futures
import contextlib
import json
import re
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request

import prometheus_client.parser
import pytest
import yaml

from .conftest import DEPLOY, local_cluster

ALERTS = DEPLOY / "prometheus/alerts.yml"


def rules():
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


# ---- Files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ["check", "rules", "--lint-fatal", "alerts.yml"],
        ["check", "config", "--lint-fatal", "prometheus.yml"],
        ["test", "rules", "alerts_test.yml"],
    ],
    ids=" ".join,
)
def test_promtool(command):
    done = subprocess.run(
        ["promtool", *command], cwd=DEPLOY / "prometheus", capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_in_a_unit_test():
    tests = yaml.safe_load((DEPLOY / "prometheus/alerts_test.yml").read_text())["tests"]
    cases = [case for test in tests for case in test.get("alert_rule_test", [])]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == {rule["alert"] for rule in rules()}


def test_every_alert_is_in_the_runbook():
    runbook = (DEPLOY / "RUNBOOK.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^#|\Z)", runbook, re.DOTALL | re.MULTILINE))
    assert list(sections) == [rule["alert"] for rule in rules()]
    for rule in rules():
        assert len(sections[rule["alert"]]) > 100
        assert rule["annotations"]["runbook"] == f"deploy/RUNBOOK.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_the_operator_gets_the_same_rules(rendered):
    made = subprocess.run([DEPLOY / "prometheus/to_operator.sh"], capture_output=True, text=True, check=True).stdout
    file = DEPLOY / "kubernetes/components/monitoring/prometheusrule.yaml"
    assert file.read_text() == made, "run deploy/prometheus/to_operator.sh"
    (rule,) = [document for document in rendered("cpu") if document["kind"] == "PrometheusRule"]
    assert rule["spec"] == yaml.safe_load(ALERTS.read_text())


def test_the_memory_alert_knows_the_limit(rendered):
    (rule,) = [rule for rule in rules() if rule["alert"] == "SinkhornMemoryHigh"]
    for overlay in ("cpu", "gpu"):
        (deployment,) = [document for document in rendered(overlay) if document["kind"] == "Deployment"]
        limit = deployment["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"]
        assert rule["expr"].endswith(f"> {(int(limit.removesuffix('Gi')) - 1) << 30}")


# ---- Live -----------------------------------------------------------------------------------------------------------

# A quick operator: minutes of the rules are seconds here, so that alerts fire while the test waits.
HASTE = 30


def hasty(text):
    def shrink(match):
        return f"{match[1]}{max(1, int(match[2]) * {'m': 60, 's': 1}[match[3]] // HASTE)}s"

    return re.sub(r"(\[|for: |offset )(\d+)([ms])\b", shrink, text)


class Prometheus:
    def __init__(self, folder, targets):
        folder.mkdir(parents=True, exist_ok=True)
        (self.port,) = local_cluster.free_ports(1)
        (folder / "alerts.yml").write_text(hasty(ALERTS.read_text()))
        config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "250ms", "scrape_timeout": "250ms", "evaluation_interval": "250ms"}
        (job,) = config["scrape_configs"]
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": targets}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        with open(folder / "log", "wb") as log:
            self.process = subprocess.Popen(
                [*command, f"--web.listen-address=127.0.0.1:{self.port}"], stdout=log, stderr=log
            )

    def get(self, path, **query):
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as reply:
            return json.load(reply)["data"]

    def query(self, expression):
        return self.get("query", query=expression)["result"]

    def firing(self):
        return {
            (alert["labels"]["alertname"], alert["labels"].get("instance"))
            for alert in self.get("alerts")["alerts"]
            if alert["state"] == "firing"
        }


def eventually(condition, what, seconds=30):
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):  # Not listening yet.
            if condition():
                return
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def observed(programs, tmp_path_factory):
    """Two replicas that have seen everything a replica can see, one of them still under load, and a Prometheus."""
    assert shutil.which("prometheus"), "deploy/install.sh"
    folder = tmp_path_factory.mktemp("observed")
    ports = local_cluster.free_ports(4)
    replicas, processes = [], []
    faults = "--inject_fault=bug@40"  # One request ends as INTERNAL.
    try:
        for index, flags in enumerate([[faults], ["--max_queue_requests=1", "--threads=1"]]):
            grpc_port, metrics_port = ports[2 * index : 2 * index + 2]
            addresses = [f"--listen=127.0.0.1:{grpc_port}", f"--metrics_listen=127.0.0.1:{metrics_port}"]
            with open(folder / f"server{index}.log", "wb") as log:
                processes.append(subprocess.Popen([programs["server"], *addresses, *flags], stderr=log))
            replicas.append((f"127.0.0.1:{grpc_port}", f"127.0.0.1:{metrics_port}"))
        prometheus = Prometheus(folder / "prometheus", [metrics for _, metrics in replicas])
        processes.append(prometheus.process)
        eventually(lambda: prometheus.query('sum(sinkhorn_server_state{state="ready"}) == 2'), "both ready")
        yield prometheus, replicas, processes, programs
    finally:
        for process in processes:
            process.kill()
            process.wait()


def call(programs, kind, server, *flags):
    command = [programs[kind], f"--server={server}", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def everything(programs, server, crowded):
    """Load of every kind on both replicas, for some three seconds: an overflowing queue on `crowded`, and on `server`
    all kinds of problem, a missed deadline, a wrong request and one that diverges."""
    mix = "normalization:32x4x4:20=0.8,dense:64x64:value=0.1,point_cloud:64x64x3:value=0.1"
    with concurrent.futures.ThreadPoolExecutor() as pool:
        jobs = [
            pool.submit(call, programs, "loadgen", server, f"--mix={mix}", "--clients=4", "--duration=3s"),
            pool.submit(call, programs, "loadgen", crowded, "--mix=dense:200x200:200", "--clients=8", "--duration=3s"),
            pool.submit(
                *[
                    call,
                    programs,
                    "loadgen",
                    server,
                    "--mix=point_cloud:3000x3000x3:100000:tolerance=1e-12:epsilon=1e-5",
                ],
                *["--clients=1", "--requests=3", "--deadline_ms=400", "--duration=3s", "--warmup=0s"],
            ),
        ]
        wrong = ["solve", "--cost=0,1;1,0", "--epsilon=-1"]
        while not jobs[0].done():
            assert call(programs, "cli", server, *wrong).returncode == 2
            time.sleep(0.2)
    return [job.result() for job in jobs]


def live_names(metrics_address):
    """Names of the families that a replica exports, with the suffixes of their kind."""
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=10) as reply:
        families = list(prometheus_client.parser.text_string_to_metric_families(reply.read().decode()))
    suffixes = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}
    return {family.name + suffix for family in families for suffix in suffixes.get(family.type, ("",))}


def names_in(expression):
    return set(re.findall(r"\b((?:sinkhorn|grpc_server|process)_\w+)\b(?!\s*=)", expression))


def dashboard():
    return json.loads((DEPLOY / "grafana/sinkhorn.json").read_text())


def dashboard_queries():
    """{panel's title: expressions}"""
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    assert len(panels) > 20 and len({panel["title"] for panel in panels}) == len(panels)
    return {panel["title"]: [target["expr"] for target in panel["targets"]] for panel in panels}


def test_live(observed):
    """One scrape of everything serves all the questions below: it takes ten seconds."""
    prometheus, (server, crowded), processes, programs = observed
    results = everything(programs, server[0], crowded[0])
    assert results[0].returncode == 0, results[0].stderr

    # Every metric that a rule, a panel or the autoscaler names is exported.
    exported = live_names(server[1]) | live_names(crowded[1])
    adapter = yaml.safe_load((DEPLOY / "kubernetes/components/autoscaling/prometheus-adapter.yaml").read_text())
    expressions = [rule["expr"] for rule in rules()] + [rule["seriesQuery"] for rule in adapter]
    expressions += [expression for panel in dashboard_queries().values() for expression in panel]
    named = set().union(*map(names_in, expressions))
    assert len(named) > 15 and named <= exported, named - exported

    # Every query of the dashboard returns data; and none of it is a nan of nothing divided by nothing.
    time.sleep(0.5)  # A last scrape.
    silent = []
    for panel, queries in dashboard_queries().items():
        for query in queries:
            ready = query.replace("$__rate_interval", "10s").replace("$instance", ".*")
            series = prometheus.query(ready)
            if not [one for one in series if one["value"][1] != "NaN"]:
                silent.append((panel, ready))
    assert not silent

    # The rules' inputs exist under the labels by which rules choose them.
    for selector in (
        'sinkhorn_outcomes_total{outcome="INTERNAL"} > 0',
        'sinkhorn_requests_rejected_total{reason="QUEUE_FULL"} > 0',
        'sinkhorn_requests_abandoned_total{cause="deadline"} > 0',
        'sinkhorn_stage_duration_seconds_bucket{stage="queue"} > 0',
        'grpc_server_call_duration_seconds_count{grpc_status="INTERNAL"} > 0',
        "sinkhorn_wasted_device_seconds_total > 0",
    ):
        assert prometheus.query(selector), selector

    # A bug and a dead replica are noticed; what is well stays quiet.
    eventually(lambda: ("SinkhornBug", server[1]) in prometheus.firing(), "SinkhornBug")
    assert not {"SinkhornReplicaDown", "SinkhornNoneReady", "SinkhornDeviceLost"} & {n for n, _ in prometheus.firing()}
    processes[1].send_signal(signal.SIGKILL)
    eventually(lambda: ("SinkhornReplicaDown", crowded[1]) in prometheus.firing(), "SinkhornReplicaDown")
    assert ("SinkhornReplicaDown", server[1]) not in prometheus.firing()
    processes[0].send_signal(signal.SIGKILL)
    eventually(lambda: ("SinkhornNoneReady", None) in prometheus.firing(), "SinkhornNoneReady")
