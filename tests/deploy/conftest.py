"""What the tests of deploy/ share: programs, certificates, rendered manifests, and pods without a cluster.

The programs are those of bazel-bin, or of $SINKHORN_SERVER, $SINKHORN_CLI and $SINKHORN_LOADGEN.
"""

import dataclasses
import functools
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SERVICE = "sinkhorn.v1.SinkhornService"


def load_module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


local_cluster = load_module(DEPLOY / "local/cluster.py")  # Replicas behind Envoy, as deploy/local.sh has them.


def program(variable, path):
    found = pathlib.Path(os.environ.get(variable, ROOT / "bazel-bin" / path))
    assert found.exists(), f"{found} is missing: bazel build //{os.path.dirname(path)}/..., or set {variable}"
    return found


@pytest.fixture(scope="session")
def programs():
    """server, cli and loadgen."""
    return {
        "server": program("SINKHORN_SERVER", "server/sinkhorn_server"),
        "cli": program("SINKHORN_CLI", "client/cli/sinkhorn"),
        "loadgen": program("SINKHORN_LOADGEN", "client/loadgen/sinkhorn_loadgen"),
    }


def from_pip(name):
    """A program that a package of tests/requirements.txt brought."""
    return pathlib.Path(sys.executable).with_name(name)


@pytest.fixture(scope="session", name="from_pip")
def from_pip_fixture():
    return from_pip


# ---- Manifests ------------------------------------------------------------------------------------------------------


@functools.cache
def render(folder):
    command = [from_pip("kubectl"), "kustomize", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


@pytest.fixture(scope="session")
def rendered():
    """rendered(overlay): its documents."""
    return lambda overlay: render(DEPLOY / "kubernetes/overlays" / overlay)


# ---- Certificates ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def tls_secret(tmp_path_factory):
    """A folder like a mounted Secret: tls.crt, tls.key, ca.crt; for `sinkhorn` and `localhost`, server and client."""
    folder = tmp_path_factory.mktemp("secret")
    script = DEPLOY / "local/certificates.sh"
    subprocess.run([script, folder], check=True, capture_output=True, timeout=60)
    return folder


# ---- Pods -----------------------------------------------------------------------------------------------------------

# Makes the container's world, then becomes the command that follows "--". Before it: "SOURCE:TARGET" for each mounted
# folder. $ROOT: the image's root file system; if empty, this machine's, with $SERVER and $CLIENT in /run/bin.
POD_SCRIPT = """
ip link set lo up
if [ "$ROOT" ]; then
  mkdir -p "$ROOT/proc" "$ROOT/run" "$ROOT/sys"
  mount --bind "$ROOT" "$ROOT"
  mount -t proc proc "$ROOT/proc"
  mount --rbind /sys "$ROOT/sys"
  mount -o remount,bind,ro "$ROOT/sys"
fi
mount -t tmpfs tmpfs "$ROOT/run"
while [ "$1" != -- ]; do
  mkdir -p "$ROOT${1#*:}"
  cp -rL "${1%%:*}"/. "$ROOT${1#*:}"
  chmod -R a+rX "$ROOT${1#*:}"
  shift
done
shift
if [ ! "$ROOT" ]; then
  mkdir /run/bin
  cp "$SERVER" /run/bin/sinkhorn_server
  cp "$CLIENT" /run/bin/sinkhorn
fi
mount -o remount,ro "$ROOT/run"
mount -o remount,bind,ro "${ROOT:-/}"
exec "$@"
"""


@dataclasses.dataclass(frozen=True)
class Image:
    """A built image: its unpacked root file system and what its configuration says."""

    root: str
    entrypoint: list[str]
    environment: list[str]


class Pod:
    """A pod's container as a node would run it, less the cgroup: arguments, ports and paths exactly as in the manifest,
    in a network of its own, on a read-only root, without capabilities and (if the tests run as root) as the manifest's
    user. The image's, if there is one; else this machine's files with the programs of this build."""

    def __init__(self, manifest, programs, log_path, mounts=None, image=None):
        spec = manifest["spec"]["template"]["spec"]
        self.container, self.image = spec["containers"][0], image
        volumes = [f"{mounts[mount['name']]}:{mount['mountPath']}" for mount in self.container.get("volumeMounts", [])]
        self.namespaces = ["--net", "--mount"]
        become = ["setpriv", "--no-new-privs"]
        if os.geteuid() != 0:
            self.namespaces.append("--user")
        else:
            user, group = spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsGroup"]
            if image:
                become += [shutil.which("chroot"), f"--userspec={user}:{group}", "--groups=", image.root]
            else:
                become += [f"--reuid={user}", f"--regid={group}", "--clear-groups", "--inh-caps=-all"]
                become += ["--bounding-set=-all"]
        self.environment = image.environment if image else ["PATH=/run/bin:/usr/bin:/bin"]
        entrypoint = image.entrypoint if image else ["/run/bin/sinkhorn_server"]
        environment = {"ROOT": image.root if image else "", "PATH": os.environ["PATH"]}
        self.log_path = log_path
        with open(log_path, "wb") as log:
            self.process = subprocess.Popen(
                [
                    *["unshare", *self.namespaces, *([] if os.geteuid() == 0 else ["--map-root-user"])],
                    *["sh", "-ec", POD_SCRIPT, "sh", *volumes, "--"],
                    *["env", "-i", *self.environment, *[shutil.which(become[0]), *become[1:]]],
                    *[*entrypoint, *self.container["args"]],
                ],
                env={**environment, "SERVER": str(programs["server"]), "CLIENT": str(programs["cli"])},
                stdout=log,
                stderr=log,
            )

    def run(self, *command, timeout=30):
        """Runs a command beside the server."""
        enter = [shutil.which("nsenter"), f"--target={self.process.pid}", *self.namespaces, "--preserve-credentials"]
        if self.image:
            enter += ["--root", "--wd"]
        environment = dict(variable.split("=", 1) for variable in self.environment)
        return subprocess.run(
            [*enter, *command], env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )

    def ask(self, name):
        """Asks a probe of the manifest as Kubernetes would: the process that did, which exits with 0 if it succeeds."""
        probe = self.container[name]
        if "exec" in probe:
            command = probe["exec"]["command"]
        else:
            asked = probe["grpc"]
            target = f"--server=127.0.0.1:{asked['port']}"
            command = ["sinkhorn", "health", target, f"--service={asked.get('service', '')}"]
        return self.run(*command, timeout=probe["timeoutSeconds"] + 5)

    def probe(self, name):
        return self.ask(name).returncode == 0

    def await_probe(self, name, seconds=30):
        """Seconds 0: it succeeds at once."""
        deadline = time.monotonic() + seconds
        while (asked := self.ask(name)).returncode != 0:
            why = f"{name}: {asked.stdout}{asked.stderr}; the server:\n{self.log()}"
            assert self.process.poll() is None and time.monotonic() < deadline, why
            time.sleep(0.05)

    def log(self):
        return self.log_path.read_text()

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start_pod(programs, tmp_path):
    """start_pod(deployment, mounts): a Pod, killed after the test. Skips where namespaces cannot be made."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    tried = subprocess.run(["unshare", "--net", "--mount", *user, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0 or not shutil.which("ip"):
        pytest.skip(f"no network and mount namespaces here: {tried.stderr.strip() or 'iproute2 is missing'}")
    pods = []

    def start(deployment, **options):
        pods.append(Pod(deployment, programs, tmp_path / f"pod{len(pods)}.log", **options))
        return pods[-1]

    yield start
    for pod in pods:
        pod.kill()
