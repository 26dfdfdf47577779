"""deploy/container: the image is built by its own build.sh with a real builder, holds nothing but the server and its
probe, and runs as the manifests say: their arguments, read-only root, not as root.

Its programs are those of this build. With $SINKHORN_TEST_COMPILE=1 the image compiles them itself, which takes long.
"""

import copy
import json
import os
import pathlib
import re
import shutil
import signal
import stat
import subprocess

import pytest

from .conftest import DEPLOY, ROOT, Image

# A Debian of its own, made once: it takes half a minute.
BASE = ROOT / ".cache/deploy/bookworm.tar"
MEGABYTE = 1_000_000


def run(*command, timeout=300, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **options)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]} {done.stderr[-4000:]}"
    return done.stdout.strip()


def make_base():
    if BASE.exists():
        return
    BASE.parent.mkdir(parents=True, exist_ok=True)
    draft = BASE.with_suffix(".draft.tar")
    lean = ["--variant=apt", '--aptopt=Acquire::Languages "none"', "--dpkgopt=path-exclude=/usr/share/doc/*"]
    lean += ["--dpkgopt=path-exclude=/usr/share/locale/*", "--dpkgopt=path-exclude=/usr/share/man/*"]
    command = ["mmdebstrap", *lean, "bookworm", draft]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        pytest.skip(f"no base image: {done.stderr.strip().splitlines()[-1:]}")
    draft.rename(BASE)


class Builder:
    """buildah with a store of its own, and a tree in which build.sh finds what it needs. `driver`: overlay shares files
    between layers, where the file system allows it; vfs copies them."""

    def __init__(self, folder, programs, driver):
        folder.mkdir()
        storage = folder / "storage.conf"
        storage.write_text(f'[storage]\ndriver = "{driver}"\ngraphroot = "{folder}/store"\nrunroot = "{folder}/run"\n')
        self.images = {}
        self.environment = {**os.environ, "BUILDAH_ISOLATION": "chroot", "CONTAINERS_STORAGE_CONF": str(storage)}
        self.compiles = os.environ.get("SINKHORN_TEST_COMPILE") == "1"
        self.tree = ROOT
        if not self.compiles:
            self.tree = folder / "tree"
            shutil.copytree(DEPLOY / "container", self.tree / "deploy/container")
            for source in ("deploy/install.sh", "server/config.h"):
                (self.tree / source).parent.mkdir(exist_ok=True)
                shutil.copy(ROOT / source, self.tree / source)
            (self.tree / "prebuilt").mkdir()
            shutil.copy(programs["server"], self.tree / "prebuilt/sinkhorn_server")
            shutil.copy(programs["cli"], self.tree / "prebuilt/sinkhorn")

    def buildah(self, *arguments, **options):
        return run("buildah", *arguments, env=self.environment, **options)

    def import_base(self):
        container = self.buildah("from", "scratch")
        self.buildah("add", "-q", container, BASE, "/")
        self.buildah("commit", "-q", "--rm", container, "localhost/base")

    def image(self, target):
        """(the name, what build.sh said last, its configuration, the Image); built once."""
        if target not in self.images:
            name, last = self.build(target)
            self.images[target] = (name, last, *self.unpack(name))
        return self.images[target]

    def build(self, target):
        arguments = [
            "--pull-never",
            "--layers",
            "--build-arg=BASE=localhost/base",
            "--build-arg=TOOLKIT=localhost/base",
        ]
        if not self.compiles:
            arguments.append("--build-arg=PROGRAMS=prebuilt")
        script = self.tree / "deploy/container/build.sh"
        command = [script, "--engine", "buildah", "--target", target, "--", *arguments]
        last = run(*command, env=self.environment, timeout=3600 if self.compiles else 300).splitlines()[-1]
        return last.rsplit(":", 1)[0], last

    def unpack(self, name):
        config = json.loads(self.buildah("inspect", "--type=image", name))["Docker"]["config"]
        root = self.buildah("mount", self.buildah("from", "--pull-never", name))
        return config, Image(root, config["Entrypoint"], config["Env"])


@pytest.fixture(scope="module")
def builder(programs, tmp_path_factory):
    if os.geteuid() != 0:
        pytest.skip("building images here takes root")
    if not shutil.which("buildah"):
        pytest.skip("no buildah: deploy/install.sh")
    make_base()
    folder = tmp_path_factory.mktemp("images")
    made, complaints = None, []
    for driver in ("overlay", "vfs"):
        made = Builder(folder / driver, programs, driver)
        try:
            made.import_base()
            break
        except AssertionError as why:
            complaints.append(str(why))
    else:
        pytest.skip(f"buildah does not work here: {complaints}")
    yield made
    subprocess.run(["buildah", "umount", "--all"], env=made.environment, capture_output=True, check=False)
    subprocess.run(["umount", *folder.glob("*/store/overlay")], capture_output=True, check=False)
    shutil.rmtree(folder, ignore_errors=True)  # Hundreds of megabytes.


def deployment(rendered, overlay):
    (found,) = [document for document in rendered(overlay) if document["kind"] == "Deployment"]
    return copy.deepcopy(found)


def check_contents(config, image):
    """What the manifests rely on, and nothing an intruder could use."""
    assert config["User"] == "65532:65532"
    assert image.entrypoint == ["/usr/bin/sinkhorn_server"]
    assert config["Healthcheck"]["Test"][:3] == ["CMD", "/usr/bin/sinkhorn", "health"]
    files = [path for path in pathlib.Path(image.root).rglob("*") if path.is_file()]
    assert {path.name for path in files if path.parent.name in ("bin", "sbin")} == {"sinkhorn_server", "sinkhorn"}
    assert all("lib" in str(path.relative_to(image.root)) for path in files if path.suffix == ".so")
    assert not [path for path in files if path.stat().st_mode & (stat.S_ISUID | stat.S_ISGID)]


def device_code(image):
    """Bytes of GPU machine code in the image's server: a build with nvcc lends it, the image's own has none."""
    sections = run("readelf", "--section-headers", "--wide", pathlib.Path(image.root, "usr/bin/sinkhorn_server"))
    return sum(int(size, 16) for size in re.findall(r" \.nv_fatbin +\S+ +\S+ +\S+ +(\S+)", sections))


def test_cpu_image(builder, rendered, start_pod, capsys):
    name, last, config, image = builder.image("cpu")
    check_contents(config, image)
    with capsys.disabled():
        print(f"\n{last}")
    files = [path for path in pathlib.Path(image.root).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) - device_code(image) < 64 * MEGABYTE

    manifest = deployment(rendered, "cpu")
    container = manifest["spec"]["template"]["spec"]["containers"][0]
    assert name.removeprefix("localhost/") == container["image"]
    # Nobody else calls it: it need not wait for them to notice that it leaves.
    container["args"].remove("--drain_grace=10s")
    container["args"].append("--drain_grace=0s")
    pod = start_pod(manifest, image=image)
    pod.await_probe("startupProbe")
    pod.await_probe("livenessProbe", seconds=0)
    pod.await_probe("readinessProbe", seconds=0)
    status = pathlib.Path(f"/proc/{pod.process.pid}/status").read_text().split("\n")
    fields = dict(line.split(":\t", 1) for line in status if ":\t" in line)
    assert set(fields["Uid"].split()) == {"65532"} and int(fields["CapEff"], 16) == 0 and fields["NoNewPrivs"] == "1"
    healthcheck = pod.run(*config["Healthcheck"]["Test"][1:])
    assert healthcheck.returncode == 0, healthcheck.stderr
    solved = pod.run("sinkhorn", "solve", "--cost=0,1;1,0", "--epsilon=0.5", "--outputs=value", "--json")
    assert '"converged": true' in solved.stdout, solved.stderr
    written = pod.run("sinkhorn", "solve", "--cost=0,1;1,0", "--epsilon=0.5", "--out=/tmp/out")
    assert written.returncode != 0 and "/tmp/out" in written.stderr, "the root is read-only"
    pod.process.send_signal(signal.SIGTERM)
    assert pod.process.wait(20) == 0, pod.log()


def test_tls_in_the_image(builder, rendered, start_pod, tls_secret):
    """The probes of the overlay `tls` are commands: the image must have what they call."""
    *_, image = builder.image("cpu")
    pod = start_pod(deployment(rendered, "tls"), mounts={"tls": tls_secret}, image=image)
    pod.await_probe("startupProbe")
    pod.await_probe("livenessProbe", seconds=0)
    pod.await_probe("readinessProbe", seconds=0)


def test_cuda_image(builder, programs, rendered, start_pod):
    """It starts without a driver, and says that this is what is missing."""
    nvcc = b"built without nvcc" not in programs["server"].read_bytes()
    if not nvcc and not builder.compiles:
        pytest.skip("this build has no CUDA")
    name, _, config, image = builder.image("cuda")
    check_contents(config, image)
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in image.environment
    manifest = deployment(rendered, "gpu")
    assert name.removeprefix("localhost/") == manifest["spec"]["template"]["spec"]["containers"][0]["image"]
    pod = start_pod(manifest, image=image)
    pod.process.wait(20)  # The node's driver is not in the pod: nobody mounted it.
    assert pod.process.returncode == 1
    assert '"event":"start_failed","why":"--backend=cuda: ' in pod.log()
