"""A real server, and `sinkhorn` pointed at it. The programs are those of bazel-bin, or of $SINKHORN_SERVER,
$SINKHORN_CLI, $SINKHORN_LOADGEN and $SINKHORN_CPP_EXAMPLE."""

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import time

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]


def program(variable, path):
    found = pathlib.Path(os.environ.get(variable, ROOT / "bazel-bin" / path))
    assert found.exists(), f"{found} is missing: bazel build //{os.path.dirname(path)}/..., or set {variable}"
    return str(found)


@dataclasses.dataclass(frozen=True)
class Cli:
    """`sinkhorn`, pointed at the server."""

    target: str

    def command(self, command, flags):
        values = [f"--{name}={value}" for name, value in flags.items()]
        return [program("SINKHORN_CLI", "client/cli/sinkhorn"), command, f"--server={self.target}", *values]

    def run(self, command, **flags):
        return subprocess.run(self.command(command, flags), capture_output=True, text=True, timeout=120)

    def json(self, command, **flags):
        done = self.run(command, json="true", **flags)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def solve(self, out, **flags):
        """The reply as JSON, and each output as it was saved."""
        reply = self.json("solve", out=out, **flags)
        return reply, {file.stem: np.load(file) for file in pathlib.Path(out).glob("*.npy")}


@contextlib.contextmanager
def running_server(folder, *flags):
    """A server with these flags; yields its address. Killed at the end."""
    port_file, log_file = folder / "port", folder / "log"
    server = program("SINKHORN_SERVER", "server/sinkhorn_server")
    command = [server, "--listen=127.0.0.1:0", "--metrics_listen=", f"--port_file={port_file}", *flags]
    with open(log_file, "wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            deadline = time.monotonic() + 30
            while not (port_file.exists() and port_file.read_text().endswith("\n")):
                assert process.poll() is None and time.monotonic() < deadline, log_file.read_text()
                time.sleep(0.01)
            yield "127.0.0.1:" + port_file.read_text().split()[0]
            assert process.poll() is None, "the server died"
        finally:
            process.kill()


@pytest.fixture(scope="session")
def cli(tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("server")) as target:
        cli = Cli(target)
        assert cli.run("health", wait="true", timeout="30s").returncode == 0
        yield cli


@pytest.fixture
def start_cli(tmp_path):
    """Starts a server with flags of the test's own."""
    with contextlib.ExitStack() as stack:
        yield lambda *flags: Cli(stack.enter_context(running_server(tmp_path, *flags)))


@pytest.fixture
def run_program():
    """Runs another of the programs: variable, path, flags."""

    def run(variable, path, *flags):
        return subprocess.run([program(variable, path), *flags], capture_output=True, text=True, timeout=120)

    return run


@pytest.fixture
def files(tmp_path):
    """Saves an array as .npy and returns its path."""

    def save(name, array):
        np.save(tmp_path / f"{name}.npy", array)
        return tmp_path / f"{name}.npy"

    return save
