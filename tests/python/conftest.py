"""`server` is a real server process: of $SINKHORN_SERVER, or of bazel-bin."""

import contextlib
import dataclasses
import os
import pathlib
import subprocess
import time

import pytest

from sinkhorn_client import Client

ROOT = pathlib.Path(__file__).parents[2]


@dataclasses.dataclass
class Server:
    """A running server."""

    target: str
    process: subprocess.Popen


def binary():
    path = pathlib.Path(os.environ.get("SINKHORN_SERVER", ROOT / "bazel-bin" / "server" / "sinkhorn_server"))
    assert path.exists(), f"{path} is missing: bazel build //server:sinkhorn_server, or set SINKHORN_SERVER"
    return path


@contextlib.contextmanager
def running_server(folder, *flags, credentials=None):
    """A server with these flags, ready; its log goes into `folder`. Killed at the end. `credentials` are for TLS."""
    ports, log = folder / "ports", folder / "log"
    command = [binary(), "--listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0", f"--port_file={ports}", *flags]
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 30
        while not (ports.exists() and len(ports.read_text().split()) == 2):
            assert process.poll() is None and time.monotonic() < deadline, f"{command} is not ready:\n{log.read_text()}"
            time.sleep(0.02)
        target = f"{'localhost' if credentials else '127.0.0.1'}:{ports.read_text().split()[0]}"
        with Client(target, credentials=credentials) as client:
            client.wait_until_ready(10)
        yield Server(target, process)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """The server that tests share; it must outlive them."""
    with running_server(tmp_path_factory.mktemp("server")) as started:
        yield started
        assert started.process.poll() is None, "the server died"


@pytest.fixture(scope="session")
def client(server):
    """A client of it."""
    with Client(server.target, timeout=60) as connected:
        yield connected


@pytest.fixture
def start_server(tmp_path):
    """Starts a server with flags of the test's own."""
    with contextlib.ExitStack() as stack:
        yield lambda *flags, **options: stack.enter_context(running_server(tmp_path, *flags, **options))
