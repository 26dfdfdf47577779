"""The real server binary, its log and its metrics, and stock clients made from the contract alone.

The binary is $SINKHORN_SERVER, or bazel-bin's. Everything is on loopback, on ports that the system picks.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import time
import urllib.request

import grpc
import grpc_tools.protoc
import numpy as np
import prometheus_client.parser
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

ROOT = pathlib.Path(__file__).parents[2]
BINARY = pathlib.Path(os.environ.get("SINKHORN_SERVER", ROOT / "bazel-bin/server/sinkhorn_server"))
PROTOS = [
    "sinkhorn/v1/sinkhorn.proto",
    "google/rpc/status.proto",
    "google/rpc/error_details.proto",
    "grpc/health/v1/health.proto",
    "xds/data/orca/v3/orca_load_report.proto",
]
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ("grpc.enable_retries", 0)]


class Server:
    """A server process: started with `flags`, ready when the constructor returns, or listening if `ready` is False."""

    def __init__(self, folder, *flags, ready=True):
        assert BINARY.exists(), f"{BINARY} is missing: bazel build //server:sinkhorn_server"
        folder.mkdir(parents=True, exist_ok=True)
        self.log_path, ports = folder / "log", folder / "ports"
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                [
                    BINARY,
                    "--listen=127.0.0.1:0",
                    "--metrics_listen=127.0.0.1:0",
                    f"--port_file={ports}",
                    "--drain_grace=300ms",
                    *flags,
                ],
                stderr=log,
            )
        deadline = time.monotonic() + 60
        while not (ports.exists() if ready else '"event":"listening"' in self.log()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"the server did not start: {self.log()}")
            time.sleep(0.01)
        if ready:
            self.port, self.metrics_port = map(int, ports.read_text().split())
        else:
            listening = next(json.loads(line) for line in self.log().splitlines() if '"event":"listening"' in line)
            self.port, self.metrics_port = int(listening["port"]), int(listening["metrics_port"])
        self.address = f"127.0.0.1:{self.port}"

    def log(self):
        return self.log_path.read_text()

    def metrics(self):
        """All samples: {(name, (label, value), ...): value}."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        text = urllib.request.urlopen(url, timeout=10).read().decode()
        families = prometheus_client.parser.text_string_to_metric_families(text)
        samples = [sample for family in families for sample in family.samples]
        return {(sample.name, *sorted(sample.labels.items())): sample.value for sample in samples}

    def metric(self, name, **labels):
        return self.metrics().get((name, *sorted(labels.items())), 0)

    def rounds(self):
        """How often the device has advanced its problems."""
        return self.metric("sinkhorn_batches_total", device="cpu:0", family="all")

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def wait(self, seconds=60):
        return self.process.wait(seconds)

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session")
def run_binary():
    """Runs the binary to its end."""
    return lambda *flags: subprocess.run([BINARY, *flags], capture_output=True, text=True, timeout=60)


@pytest.fixture
def start(tmp_path):
    """Starts servers, and ends those that still run after the test."""
    servers = []

    def start_one(*flags, **options):
        servers.append(Server(tmp_path / f"server{len(servers)}", *flags, **options))
        return servers[-1]

    yield start_one
    for server in servers:
        server.kill()


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A server that tests share; it must outlive them all."""
    shared = Server(tmp_path_factory.mktemp("shared"))
    yield shared
    assert shared.process.poll() is None, f"the shared server died: {shared.log()}"
    shared.terminate()
    assert shared.wait() == 0


@pytest.fixture(scope="session")
def api(tmp_path_factory):
    """A client made from the .proto files: what a stranger with the contract has."""
    return Api(tmp_path_factory.mktemp("descriptors") / "set")


class Namespace:
    """The messages of a proto package, as attributes."""

    def __init__(self, pool, package):
        self.pool, self.package = pool, package

    def __getattr__(self, name):
        return message_factory.GetMessageClass(self.pool.FindMessageTypeByName(f"{self.package}.{name}"))


class Stub:
    """The calls of a service."""

    def __init__(self, channel, service):
        for method in service.methods:
            kind = (
                ("stream" if method.client_streaming else "unary")
                + "_"
                + ("stream" if method.server_streaming else "unary")
            )
            call = getattr(channel, kind)(
                f"/{service.full_name}/{method.name}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, call)


class Api:
    """Short words for making requests and reading answers.

    Has a descriptor pool of its own: other tests in this process may load the same files under other names."""

    def __init__(self, descriptor_set):
        arguments = [
            "protoc",
            f"-I{ROOT / 'proto'}",
            f"-I{pathlib.Path(grpc_tools.__file__).parent / '_proto'}",
            "--include_imports",
            f"--descriptor_set_out={descriptor_set}",
        ]
        assert grpc_tools.protoc.main([*arguments, *PROTOS]) == 0
        pool = descriptor_pool.DescriptorPool()
        for file in descriptor_pb2.FileDescriptorSet.FromString(descriptor_set.read_bytes()).file:
            pool.Add(file)
        self.pool = pool
        self.pb, self.rpc = Namespace(pool, "sinkhorn.v1"), Namespace(pool, "google.rpc")
        self.health_pb = Namespace(pool, "grpc.health.v1")
        self.orca_pb = Namespace(pool, "xds.data.orca.v3")

    @contextlib.contextmanager
    def channel(self, server):
        with grpc.insecure_channel(server.address, options=UNLIMITED) as channel:
            yield channel

    @contextlib.contextmanager
    def stub(self, server, **tls):
        """Of SinkhornService; with `tls`, the arguments of grpc.ssl_channel_credentials, over TLS."""
        if tls:
            credentials = grpc.ssl_channel_credentials(**tls)
            opened = grpc.secure_channel(f"localhost:{server.port}", credentials, options=UNLIMITED)
        else:
            opened = grpc.insecure_channel(server.address, options=UNLIMITED)
        with opened as channel:
            yield self.stub_of(channel, self.pool.FindServiceByName("sinkhorn.v1.SinkhornService"))

    @staticmethod
    def stub_of(channel, service):
        return Stub(channel, service)

    @contextlib.contextmanager
    def health(self, server):
        with self.channel(server) as channel:
            yield Stub(channel, self.pool.FindServiceByName("grpc.health.v1.Health"))

    def tensor(self, array):
        array = np.ascontiguousarray(array)
        dtype = {"float32": 1, "float64": 2, "float16": 3}[array.dtype.name]
        return self.pb.Tensor(dtype=dtype, shape=array.shape, data=array.tobytes())

    @staticmethod
    def array(tensor):
        dtype = {1: np.float32, 2: np.float64, 3: np.float16}[tensor.dtype]
        return np.frombuffer(tensor.data, dtype).reshape(tuple(tensor.shape))

    def normalization(self, logits, iterations=20, **fields):
        return self.pb.SolveRequest(
            normalization=self.pb.NormalizationProblem(logits=self.tensor(logits)),
            solver=self.pb.SolverOptions(max_iterations=iterations),
            **fields,
        )

    def dense(self, cost, epsilon, outputs=(), **solver):
        return self.pb.SolveRequest(
            dense=self.pb.DenseProblem(cost=self.tensor(cost)),
            solver=self.pb.SolverOptions(epsilon=epsilon, **solver),
            outputs=outputs,
        )

    def cloud(self, x, y, epsilon, outputs=(), **solver):
        problem = self.pb.PointCloudProblem(x=self.tensor(x), y=self.tensor(y), cost=1)
        return self.pb.SolveRequest(
            point_cloud=problem, solver=self.pb.SolverOptions(epsilon=epsilon, **solver), outputs=outputs
        )

    def long_problem(self):
        """Runs for longer than any test waits, in slices, and is cheap to send."""
        x, y = np.random.default_rng(0).random((2, 3000, 3), dtype=np.float32)
        return self.cloud(x, y, 1e-3, tolerance=0, max_iterations=100000)

    def endless_problem(self):
        """The same, but nobody can tell in advance: it asks for an accuracy that it is slow to reach."""
        x, y = np.random.default_rng(0).random((2, 3000, 3), dtype=np.float32)
        return self.cloud(x, y, 1e-5, tolerance=1e-12, max_iterations=100000)

    def error(self, call_error):
        """(code, reason, ErrorInfo's metadata, trailers) of a failed call."""
        trailers = dict(call_error.trailing_metadata() or ())
        rich = self.rpc.Status.FromString(trailers.get("grpc-status-details-bin", b""))
        return call_error.code(), *self.reason(rich), trailers

    def reason(self, rich):
        info = self.rpc.ErrorInfo()
        for detail in rich.details:
            if detail.Unpack(info):
                return info.reason, dict(info.metadata)
        return "", {}


def eventually(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture(name="eventually", scope="session")
def eventually_fixture():
    return eventually
