"""deploy/kubernetes: every overlay renders, is valid in several Kubernetes versions, agrees with itself and with the
server, which runs with exactly the rendered arguments."""

import copy
import functools
import json
import pathlib
import re
import signal
import subprocess
import urllib.parse

import kubernetes_validate
import kubernetes_validate.utils
import pytest

OVERLAYS = ["cpu", "gpu", "tls", "autoscaling"]
VERSIONS = ["1.28", "1.31", "1.34", "1.37"]
GIBIBYTE = 1 << 30
# Types of the Prometheus operator; the tests of monitoring check them.
FOREIGN = {"monitoring.coreos.com/v1"}

# Each document would read megabytes of definitions anew.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)


def only(documents, kind):
    found = [document for document in documents if document["kind"] == kind]
    assert len(found) == 1, f"{len(found)} documents of kind {kind}"
    return found[0]


def server_container(documents):
    containers = only(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert len(containers) == 1
    return containers[0]


def flags(documents):
    pairs = [argument.removeprefix("--").split("=", 1) for argument in server_container(documents)["args"]]
    assert len(dict(pairs)) == len(pairs), f"a flag is set twice: {pairs}"
    return dict(pairs)


def seconds(duration):
    number, unit = re.fullmatch(r"([\d.]+)(ms|s|m|h)", duration).groups()
    return float(number) * {"ms": 1e-3, "s": 1, "m": 60, "h": 3600}[unit]


def size(quantity):
    number, unit = re.fullmatch(r"(\d+)(Ki|Mi|Gi|)", quantity).groups()
    return int(number) << {"": 0, "Ki": 10, "Mi": 20, "Gi": 30}[unit]


# ---- Validity -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_valid(rendered, overlay, version):
    native = [document for document in rendered(overlay) if document["apiVersion"] not in FOREIGN]
    assert len(native) >= 8
    for document in native:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_validation_is_strict(rendered, version):
    deployment = copy.deepcopy(only(rendered("cpu"), "Deployment"))
    deployment["spec"]["template"]["spec"]["terminationGracePeriod"] = 60
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        kubernetes_validate.validate(deployment, version, strict=True)


def test_components_combine(from_pip, tmp_path):
    """An overlay of one's own: GPUs, TLS and autoscaling at once."""
    kubernetes = tmp_path / "kubernetes"
    source = pathlib.Path(__file__).parents[2] / "deploy/kubernetes"
    subprocess.run(["cp", "-r", source, kubernetes], check=True)
    mine = kubernetes / "overlays/mine"
    mine.mkdir()
    (mine / "kustomization.yaml").write_text(
        "resources: [../gpu]\ncomponents: [../../components/tls, ../../components/autoscaling]\n"
    )
    done = subprocess.run([from_pip("kubectl"), "kustomize", mine], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for expected in ("--backend=cuda", "--tls_client_ca=", "kind: HorizontalPodAutoscaler", "nvidia.com/gpu"):
        assert expected in done.stdout


# ---- Agreement within -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_references(rendered, overlay):
    """Everything that names a port, a label or an object names one that is there."""
    documents = rendered(overlay)
    deployment, container = only(documents, "Deployment"), server_container(documents)
    pod = deployment["spec"]["template"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {
        "grpc": urllib.parse.urlsplit(f"//{flags(documents)['listen']}").port,
        "metrics": urllib.parse.urlsplit(f"//{flags(documents)['metrics_listen']}").port,
    }

    services = {document["metadata"]["name"]: document for document in documents if document["kind"] == "Service"}
    assert set(services) == {"sinkhorn", "sinkhorn-headless", "sinkhorn-metrics"}
    assert services["sinkhorn-headless"]["spec"]["clusterIP"] == "None"
    assert "clusterIP" not in services["sinkhorn"]["spec"]
    policy, budget = only(documents, "NetworkPolicy")["spec"], only(documents, "PodDisruptionBudget")["spec"]
    selectors = [service["spec"]["selector"] for service in services.values()]
    selectors += [selector["matchLabels"] for selector in (deployment["spec"]["selector"], budget["selector"])]
    selectors += [policy["podSelector"]["matchLabels"]]
    selectors += [spread["labelSelector"]["matchLabels"] for spread in pod["spec"]["topologySpreadConstraints"]]
    for selector in selectors:
        assert selector and selector.items() <= pod["metadata"]["labels"].items()
    named = [port["targetPort"] for service in services.values() for port in service["spec"]["ports"]]
    named += [port["port"] for rule in policy["ingress"] for port in rule["ports"]]
    assert set(named) == set(ports)
    assert policy["egress"] == [] and budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"

    account = only(documents, "ServiceAccount")
    assert pod["spec"]["serviceAccountName"] == account["metadata"]["name"]
    assert account["automountServiceAccountToken"] is False and pod["spec"]["automountServiceAccountToken"] is False
    namespace = only(documents, "Namespace")["metadata"]["name"]
    assert {document["metadata"].get("namespace", namespace) for document in documents} == {namespace}

    monitor = only(documents, "ServiceMonitor")["spec"]
    selected = [s for s in services.values() if monitor["selector"]["matchLabels"].items() <= labels(s).items()]
    assert [service["metadata"]["name"] for service in selected] == ["sinkhorn-metrics"]
    assert {endpoint["port"] for endpoint in monitor["endpoints"]} == {"metrics"}
    assert labels(selected[0])[monitor["jobLabel"]] == "sinkhorn"


def labels(document):
    return document["metadata"].get("labels", {})


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_restricted(rendered, overlay):
    """The `restricted` pod security standard, which the namespace enforces, and a read-only root."""
    documents = rendered(overlay)
    enforced = labels(only(documents, "Namespace"))["pod-security.kubernetes.io/enforce"]
    pod = only(documents, "Deployment")["spec"]["template"]["spec"]
    container = server_container(documents)["securityContext"]
    assert enforced == "restricted"
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["readOnlyRootFilesystem"] and not container["allowPrivilegeEscalation"]
    assert container["capabilities"] == {"drop": ["ALL"]}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert all(volume.keys() <= {"name", "secret", "configMap", "emptyDir"} for volume in pod.get("volumes", []))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_shutdown_fits_into_the_grace_period(rendered, overlay):
    documents = rendered(overlay)
    stop = server_container(documents).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    needed = stop + seconds(flags(documents)["drain_grace"]) + seconds(flags(documents)["drain_timeout"])
    closing = 10  # The server's own bounds on closing connections, with room.
    grace = only(documents, "Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace >= needed + closing
    # Drain starts when endpoints are removed: readiness must have had the time to say so to those who ask it.
    ready = server_container(documents)["readinessProbe"]
    assert seconds(flags(documents)["drain_grace"]) >= ready["periodSeconds"] * ready["failureThreshold"]


def test_autoscaler(rendered):
    documents = rendered("autoscaling")
    spec = only(documents, "HorizontalPodAutoscaler")["spec"]
    deployment = only(documents, "Deployment")
    assert spec["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"], "applying it again would undo the autoscaler"
    assert [metric["type"] for metric in spec["metrics"]] == ["Pods"], "never utilisation"
    assert "replicas" in only(rendered("cpu"), "Deployment")["spec"]


# ---- Agreement with the server --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def defaults(programs):
    """The server's flags and their defaults."""
    text = subprocess.run([programs["server"], "--help"], capture_output=True, text=True, check=False).stdout
    found = dict(re.findall(r"--(\w+) \(.*?\);?\s+default:\s+(\S+);", text, re.DOTALL))
    assert len(found) > 25
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_memory_limit(rendered, defaults, overlay):
    """The limit holds what the flags allow at once."""
    documents = rendered(overlay)
    set_flags = {**defaults, **flags(documents)}
    limits = server_container(documents)["resources"]["limits"]
    queue = int(set_flags["max_queue_bytes"])  # Requests and replies; as much again may be arriving.
    working = int(set_flags["max_working_bytes"]) + int(set_flags["kernel_cache_bytes"])
    if set_flags["backend"] == "cpu":
        assert int(set_flags["max_working_bytes"]) > 0, "0 is 4 GiB: say what is meant"
        assert int(set_flags["threads"]) == int(limits["cpu"]), "or throttled threads hold up the others"
    else:
        assert limits["nvidia.com/gpu"] == "1"
    assert 0 < int(set_flags["rpc_threads"]) <= int(limits["cpu"]), "0 counts the node's cores, not the limit"
    assert size(limits["memory"]) >= 2 * queue + working + GIBIBYTE
    assert limits == server_container(documents)["resources"]["requests"], "nobody else's memory is promised"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_image_is_of_this_version(rendered, programs, overlay):
    done = subprocess.run([programs["server"], "--version"], capture_output=True, text=True, check=False)
    version = done.stdout.split()[1]
    expected = f"sinkhorn-server:{version}" + ("-cuda" if overlay == "gpu" else "")
    assert server_container(rendered(overlay))["image"] == expected


@pytest.mark.parametrize("overlay", ["cpu", "tls"])
def test_server_runs_as_rendered(rendered, start_pod, tls_secret, overlay):
    """Started exactly as rendered: probes, limits, a solve, metrics, and what probes say while it drains."""
    documents = rendered(overlay)
    deployment = only(documents, "Deployment")
    volumes = deployment["spec"]["template"]["spec"].get("volumes", [])
    assert {volume["secret"]["secretName"] for volume in volumes} <= {"sinkhorn-tls"}
    pod = start_pod(deployment, mounts={volume["name"]: tls_secret for volume in volumes})
    pod.await_probe("startupProbe")
    pod.await_probe("readinessProbe", seconds=0)
    pod.await_probe("livenessProbe", seconds=0)

    client = ["--server=127.0.0.1:8001", "--timeout=10s"]
    if overlay == "tls":
        plain = pod.run("sinkhorn", "health", *client, "--timeout=2s")
        assert plain.returncode != 0, "plain text is refused"
        folder = "/run/sinkhorn/tls"
        unsigned = pod.run("sinkhorn", "health", *client, "--timeout=2s", f"--tls_root_cert={folder}/ca.crt")
        assert unsigned.returncode != 0, "a client without a certificate is refused"
        client += [f"--tls_root_cert={folder}/ca.crt", f"--tls_cert={folder}/tls.crt", f"--tls_key={folder}/tls.key"]
        client += ["--tls_server_name=sinkhorn"]
    info = pod.run("sinkhorn", "info", "--json", *client)
    assert info.returncode == 0, info.stderr
    limits = json.loads(info.stdout)["limits"]
    assert limits["max_queue_bytes"] == int(flags(documents)["max_queue_bytes"])
    solved = pod.run("sinkhorn", "solve", "--cost=0,1;1,0", "--epsilon=0.5", "--outputs=value", "--json", *client)
    assert solved.returncode == 0, solved.stderr
    assert '"converged": true' in solved.stdout
    fetch = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8002/metrics', timeout=5).read().decode())"
    scraped = pod.run("/usr/bin/python3", "-c", fetch)
    assert 'sinkhorn_server_state{state="ready"} 1' in scraped.stdout, scraped.stderr

    pod.process.send_signal(signal.SIGTERM)
    while pod.probe("readinessProbe"):
        pass
    assert pod.process.poll() is None and pod.probe("livenessProbe"), "drain is no reason to kill it"
    pod.process.send_signal(signal.SIGTERM)  # The second one spares the test the drain.
    pod.process.wait(10)


def test_gpu_server_takes_its_arguments(rendered, start_pod):
    """With a GPU it gets ready; without one it says that this is what is missing."""
    pod = start_pod(only(rendered("gpu"), "Deployment"))
    try:
        pod.process.wait(10)
    except subprocess.TimeoutExpired:
        pod.await_probe("startupProbe", seconds=120)
        return
    assert pod.process.returncode == 1
    assert '"event":"start_failed","why":"--backend=cuda: ' in pod.log()
