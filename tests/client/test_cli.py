"""The programs `sinkhorn` and `sinkhorn_loadgen` against a real server: every kind of problem from files and numbers,
compared with NumPy in float64, and every exit code.

The programs are those of bazel-bin, or of $SINKHORN_SERVER, $SINKHORN_CLI and $SINKHORN_LOADGEN.
"""

import contextlib
import json
import os
import pathlib
import pty
import socket
import subprocess
import time

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
OK, USAGE, REFUSED, UNAVAILABLE, DEADLINE, NOT_CONVERGED = range(6)


def program(variable, path):
    found = pathlib.Path(os.environ.get(variable, ROOT / "bazel-bin" / path))
    assert found.exists(), f"{found} is missing: bazel build //{os.path.dirname(path)}/..., or set {variable}"
    return str(found)


class Cli:
    """`sinkhorn`, pointed at the server."""

    def __init__(self, target):
        self.target = target

    def command(self, command, flags):
        values = [f"--{name}={value}" for name, value in flags.items()]
        return [program("SINKHORN_CLI", "client/cli/sinkhorn"), command, f"--server={self.target}", *values]

    def run(self, command, **flags):
        return subprocess.run(self.command(command, flags), capture_output=True, text=True, timeout=120)

    def json(self, command, **flags):
        done = self.run(command, json="true", **flags)
        assert done.returncode == OK, done.stderr
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


@pytest.fixture(scope="module")
def cli(tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("server")) as target:
        cli = Cli(target)
        assert cli.run("health", wait="true", timeout="30s").returncode == OK
        yield cli


@pytest.fixture
def files(tmp_path):
    """Saves an array as .npy and returns its path."""

    def save(name, array):
        np.save(tmp_path / f"{name}.npy", array)
        return tmp_path / f"{name}.npy"

    return save


# ---- The formulas, in float64 -------------------------------------------------------------------


def log_sum_exp(values, axis):
    largest = values.max(axis=axis, keepdims=True)
    return largest + np.log(np.exp(values - largest).sum(axis=axis, keepdims=True))


def log_row_column(logits, iterations):
    scaled = np.asarray(logits, np.float64)
    for _ in range(iterations):
        scaled = scaled - log_sum_exp(scaled, -1)
        scaled = scaled - log_sum_exp(scaled, -2)
    return np.exp(scaled)


def exp_column_row(logits, iterations):
    scaled = np.exp(np.asarray(logits, np.float64))
    for _ in range(iterations):
        scaled = scaled / scaled.sum(axis=-2, keepdims=True)
        scaled = scaled / scaled.sum(axis=-1, keepdims=True)
    return scaled


def transport(cost, a, b, epsilon, iterations, rho=np.inf):
    """Plan and dual value after alternating updates; `rho` relaxes both sides."""
    damping = 1 / (1 + epsilon / rho)
    g = np.zeros(len(b))
    for _ in range(iterations):
        f = -epsilon * damping * log_sum_exp(np.log(b) + (g - cost) / epsilon, 1)[:, 0]
        g = -epsilon * damping * log_sum_exp(np.log(a)[:, None] + (f[:, None] - cost) / epsilon, 0)[0]
    plan = a[:, None] * b * np.exp((f[:, None] + g - cost) / epsilon)
    if np.isinf(rho):
        return plan, a @ f + b @ g - epsilon * (plan.sum() - 1)
    sides = rho * (a @ (1 - np.exp(-f / rho)) + b @ (1 - np.exp(-g / rho)))
    return plan, sides - epsilon * (plan.sum() - a.sum() * b.sum())


def squared_distances(x, y):
    return ((x[:, None] - y[None]) ** 2).sum(axis=2)


# ---- Normalisation ------------------------------------------------------------------------------


def test_normalization_of_a_batch(cli, files, tmp_path):
    logits = np.random.default_rng(1).normal(size=(5, 6, 4)).astype(np.float32)

    reply, outputs = cli.solve(
        tmp_path / "out", logits=files("w", logits), max_iterations=7, outputs="plan,marginals,members"
    )

    assert outputs["plan"].dtype == np.float32 and outputs["plan"].shape == (5, 6, 4)
    np.testing.assert_allclose(outputs["plan"], log_row_column(logits, 7), rtol=2e-5)
    np.testing.assert_allclose(outputs["row_sums"], log_row_column(logits, 7).sum(axis=2), rtol=2e-5)
    assert reply["convergence"]["iterations"] == 7
    assert len(reply["members"]) == 5
    assert reply["plan"]["file"].endswith("out/plan.npy") and reply["plan"]["shape"] == [5, 6, 4]


@pytest.mark.parametrize("dtype, tolerance", [("float16", 1e-3), ("bfloat16", 8e-3), ("float64", 2e-5)])
def test_normalization_in_other_types(cli, files, tmp_path, dtype, tolerance):
    logits = np.array([[0.5, -1, 2], [1, 1.5, -0.25], [0, 0.75, 1]])  # Exact in all of them.

    reply, outputs = cli.solve(tmp_path / "out", logits=files("w", logits), dtype=dtype)

    assert reply["plan"]["dtype"] == dtype
    np.testing.assert_allclose(outputs["plan"].astype(np.float64), log_row_column(logits, 20), rtol=tolerance)


def test_normalization_recipes(cli, files, tmp_path):
    logits = np.random.default_rng(2).normal(size=(5, 5)).astype(np.float32)
    path = files("w", logits)

    _, columns_first = cli.solve(tmp_path / "a", logits=path, recipe="exp_column_row", max_iterations=6)
    _, spelled_out = cli.solve(
        tmp_path / "b",
        logits=path,
        recipe="custom",
        custom_start="exp",
        custom_order="column_row",
        custom_guard="max",
        custom_guard_value=1e-10,
        max_iterations=6,
    )
    _, exact = cli.solve(tmp_path / "c", logits=path, recipe="exact", dtype="float64", precision="double")
    _, deepseek = cli.solve(tmp_path / "d", logits=path, recipe="deepseek", max_iterations=200)

    np.testing.assert_allclose(columns_first["plan"], exp_column_row(logits, 6), rtol=2e-5)
    np.testing.assert_allclose(spelled_out["plan"], exp_column_row(logits, 6), rtol=2e-5)
    np.testing.assert_allclose(exact["plan"].sum(axis=0), 1, rtol=1e-12)
    np.testing.assert_allclose(exact["plan"].sum(axis=1), 1, rtol=1e-12)
    np.testing.assert_allclose(deepseek["plan"], exact["plan"], atol=2e-5)  # Its guard of 1e-6 stays.


def test_normalization_with_marginals_and_dustbin(cli, tmp_path):
    # Marginals: rows 1 and 2, columns 2 and 1. Ends on columns.
    reply, outputs = cli.solve(
        tmp_path / "a", logits="0,1;2,0.5", row_marginals="1,2", column_marginals="2,1", max_iterations=200,
        outputs="plan,marginals",
    )
    np.testing.assert_allclose(outputs["row_sums"], [1, 2], rtol=1e-5)
    np.testing.assert_allclose(outputs["column_sums"], [2, 1], rtol=1e-5)

    reply, outputs = cli.solve(
        tmp_path / "b", logits="0,1,2;3,0,1", dustbin_score=0.5, max_iterations=500, outputs="plan,marginals"
    )
    assert reply["plan"]["shape"] == [3, 4]
    np.testing.assert_allclose(outputs["row_sums"], [1, 1, 3], rtol=1e-4)
    np.testing.assert_allclose(outputs["column_sums"], [1, 1, 1, 2], rtol=1e-4)


def test_normalization_gradient(cli, files, tmp_path):
    random = np.random.default_rng(3)
    logits, cotangent = random.normal(size=(2, 4, 3))
    _, outputs = cli.solve(
        tmp_path / "out",
        logits=files("w", logits),
        cotangent=files("g", cotangent),
        max_iterations=5,
        precision="double",
    )

    differences = np.empty_like(logits)
    for index in np.ndindex(logits.shape):
        step = np.zeros_like(logits)
        step[index] = 1e-6
        change = log_row_column(logits + step, 5) - log_row_column(logits - step, 5)
        differences[index] = (cotangent * change).sum() / 2e-6
    np.testing.assert_allclose(outputs["gradient_logits"], differences, rtol=1e-5, atol=1e-9)


def test_backward_from_a_plan(cli, files, tmp_path):
    random = np.random.default_rng(4)
    logits, cotangent = random.normal(size=(2, 4, 4))
    plan = log_row_column(logits, 500)
    flags = dict(cotangent=files("g", cotangent), precision="double")

    _, outputs = cli.solve(tmp_path / "a", plan=files("p", plan), backward_mode="implicit", **flags)
    _, unrolled = cli.solve(tmp_path / "b", logits=files("w", logits), max_iterations=500, **flags)

    np.testing.assert_allclose(outputs["gradient_logits"], unrolled["gradient_logits"], atol=1e-7)


# ---- Transport ----------------------------------------------------------------------------------


def test_dense_transport(cli, files, tmp_path):
    random = np.random.default_rng(5)
    cost, v = random.random((30, 20)), random.random((20, 2))
    a, b = random.dirichlet(np.ones(30)), random.dirichlet(np.ones(20))
    np.savetxt(tmp_path / "a.csv", a)  # One mass a line.

    reply, outputs = cli.solve(
        tmp_path / "out",
        cost=files("c", cost),
        a=tmp_path / "a.csv",
        b=files("b", b),
        apply_v=files("v", v),
        epsilon=0.1,
        tolerance=1e-8,
        precision="double",
        dtype="float64",
        outputs="value,value_linear,primal_bound,potentials,plan,marginals,gradient_cost,gradient_masses",
    )

    # The text's masses are float32, so they miss a total of 1 by rounding, which the tolerance of 1e-5 allows.
    plan, value = transport(cost, a.astype(np.float32).astype(np.float64), b, 0.1, 2000)
    np.testing.assert_allclose(outputs["plan"], plan, atol=1e-7)
    np.testing.assert_allclose(outputs["gradient_cost"], plan, atol=1e-7)
    np.testing.assert_allclose(outputs["plan_v"], plan @ v, atol=1e-7)
    np.testing.assert_allclose(outputs["value"], [value], rtol=1e-6)
    np.testing.assert_allclose(outputs["value_linear"], [(plan * cost).sum()], rtol=1e-6)
    assert reply["dual_bound"][0] <= value * (1 + 1e-6) and reply["primal_bound"][0] >= value * (1 - 1e-6)
    assert reply["convergence"]["converged"] and reply["convergence"]["stop_reason"] == "tolerance"
    f, gradient = outputs["f"], outputs["gradient_a"]
    np.testing.assert_allclose(f - f[0], gradient - gradient[0], atol=1e-7)


@pytest.mark.parametrize("cost_function, factor", [("squared_euclidean", 1), ("half_squared_euclidean", 0.5)])
def test_point_clouds(cli, files, tmp_path, cost_function, factor):
    random = np.random.default_rng(6)
    x, y = random.random((40, 3)), random.random((50, 3))

    _, outputs = cli.solve(
        tmp_path / "out",
        x=files("x", x.astype(np.float32)),
        y=files("y", y.astype(np.float32)),
        cost_function=cost_function,
        blur=0.3,
        tolerance=1e-6,
        outputs="value,plan,gradient_points,projection",
    )

    a, b = np.full(40, 1 / 40), np.full(50, 1 / 50)
    plan, value = transport(factor * squared_distances(x, y), a, b, 0.09, 2000)
    np.testing.assert_allclose(outputs["value"], [value], rtol=1e-4)
    np.testing.assert_allclose(outputs["plan"], plan, rtol=2e-3)
    np.testing.assert_allclose(outputs["projection_x"], plan @ y * 40, atol=1e-4)
    np.testing.assert_allclose(outputs["gradient_x"], 2 * factor * (x / 40 - plan @ y), atol=1e-5)


def test_point_cloud_options(cli, files, tmp_path):
    random = np.random.default_rng(7)
    x, y = random.random((25, 2)), random.random((30, 2)) + 0.2
    flags = dict(x=files("x", x), y=files("y", y), cost_function="squared_euclidean", epsilon=0.1, precision="double")
    a, b = np.full(25, 1 / 25), np.full(30, 1 / 30)
    cross = transport(squared_distances(x, y), a, b, 0.1, 3000)[1]
    divergence = (
        cross
        - transport(squared_distances(x, x), a, a, 0.1, 3000)[1] / 2
        - transport(squared_distances(y, y), b, b, 0.1, 3000)[1] / 2
    )
    relaxed = transport(squared_distances(x, y), a, b, 0.1, 3000, rho=0.25)[1]

    debiased = cli.solve(tmp_path / "a", debias="true", tolerance=1e-8, **flags)[0]
    unbalanced = cli.solve(tmp_path / "b", reach_a=0.5, reach_b=0.5, tolerance=1e-8, **flags)[0]
    annealed = cli.solve(
        tmp_path / "c",
        scaling=0.7,
        epsilon_start=2,
        update_rule="symmetric",
        max_iterations=3000,
        tolerance=1e-8,
        **flags,
    )[0]
    plain = cli.solve(tmp_path / "d", over_relaxation="off", tolerance=1e-8, **flags)[0]

    np.testing.assert_allclose(debiased["value"], [divergence], rtol=1e-5)
    np.testing.assert_allclose(unbalanced["value"], [relaxed], rtol=1e-5)
    np.testing.assert_allclose(annealed["value"], [cross], rtol=1e-5)
    np.testing.assert_allclose(plain["value"], [cross], rtol=1e-5)


# ---- What is printed ----------------------------------------------------------------------------


def test_the_summary_shows_the_answer(cli):
    done = cli.run("solve", cost="0,1;1,0", epsilon=0.5, outputs="value,plan", request_id="seen")

    # Closed form of the symmetric 2 x 2 problem: P11 / P12 = exp(1 / epsilon).
    p11 = 0.5 * np.exp(2) / (1 + np.exp(2))
    assert done.returncode == OK, done.stderr
    assert "converged" in done.stdout and "marginal errors" in done.stdout
    assert "round trip" in done.stdout and "compute" in done.stdout
    row = [float(word) for word in done.stdout.strip().splitlines()[-2].split()]
    np.testing.assert_allclose(row, [p11, 0.5 - p11], rtol=1e-5)
    assert done.stderr == ""


def test_json_carries_small_arrays(cli):
    reply = cli.json("solve", cost="0,1;1,0", epsilon=0.5, outputs="value,plan", request_id="seen")

    p11 = 0.5 * np.exp(2) / (1 + np.exp(2))
    np.testing.assert_allclose(reply["plan"]["data"], [[p11, 0.5 - p11], [0.5 - p11, p11]], rtol=1e-5)
    assert reply["request_id"] == "seen"
    assert reply["execution"]["backend"] in ("cpu", "cuda")
    assert reply["round_trip_seconds"] > 0


def test_info_health_and_version(cli):
    info = cli.json("info")
    assert info["state"] == "ready" and info["devices"] and info["limits"]["max_iterations"] > 0
    assert "ready" in cli.run("info").stdout
    health = cli.run("health")
    assert (health.returncode, health.stdout) == (OK, "SERVING\n")
    assert cli.run("health", service="liveness").returncode == OK
    assert cli.run("health", service="nobody").returncode == REFUSED
    assert cli.run("version").stdout.startswith("sinkhorn ")


def test_progress_shows_on_a_terminal_only(cli, files):
    # 100,000 iterations take a second or more.
    cost = files("c", np.random.default_rng(9).random((400, 400), np.float32))
    command = cli.command("solve", dict(cost=cost, epsilon=1, max_iterations=100000, tolerance=0, outputs="value"))
    terminal, stderr = pty.openpty()
    shown = b""
    with os.fdopen(terminal, "rb", buffering=0) as screen, subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=stderr
    ) as process:
        os.close(stderr)
        with contextlib.suppress(OSError):  # How a terminal says that nobody writes to it any more.
            while chunk := screen.read(4096):
                shown += chunk
    shown = shown.decode()
    assert process.returncode == OK
    assert "solving: 0.5 s of 60 s" in shown
    assert shown.endswith("\r\x1b[K"), "the line must be wiped"

    assert subprocess.run(command, capture_output=True, timeout=120).stderr == b""


# ---- What goes wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, words",
    [
        (dict(), "--logits"),
        (dict(cost="0,1", logits="0,1"), "one problem"),
        (dict(cost="0,1;1", epsilon=1), "row 2 has 1 numbers"),
        (dict(cost="absent.npy", epsilon=1), "absent.npy"),
        (dict(x="0", y="1", epsilon=1), "--cost_function must be"),
        (dict(cost="0,1", cost_function="squared_euclidean"), "--cost_function belongs to point clouds"),
        (dict(logits="0,1", a="1"), "--a does not belong"),
        (dict(cost="0,1", epsilon=1, outputs="value,pan"), "--outputs must be one of value, "),
        (dict(cost="0,1", epsilon="big"), "epsilon"),
        (dict(cost="0,1", epsilon=1, dtype="int8"), "--dtype must be one of float32"),
        (dict(cost="0,1", epsilon=1, frobnicate=1), "frobnicate"),
        (dict(cost="0,1", epsilon=1, tls_root_cert="absent.pem"), "cannot open absent.pem"),
    ],
)
def test_a_wrong_command_line(cli, flags, words):
    done = cli.run("solve", **flags)
    assert done.returncode == USAGE
    assert words in done.stderr and done.stdout == ""


def test_unsupported_files_say_what_to_do(cli, files):
    fortran = cli.run("solve", cost=files("f", np.asfortranarray(np.eye(3))), epsilon=1)
    integers = cli.run("solve", cost=files("i", np.eye(3, dtype=int)), epsilon=1)
    assert fortran.returncode == USAGE and "ascontiguousarray" in fortran.stderr
    assert integers.returncode == USAGE and "astype" in integers.stderr


def test_the_server_refuses(cli):
    done = cli.run("solve", cost="0,1;1,0", epsilon=-1)
    assert done.returncode == REFUSED
    assert "INVALID_FIELD" in done.stderr and "epsilon" in done.stderr and "-1" in done.stderr

    done = cli.run("solve", cost="0,nan;1,0", epsilon=1, json="true")
    error = json.loads(done.stdout)["error"]
    assert done.returncode == REFUSED
    assert error["code"] == "INVALID_ARGUMENT" and error["reason"] == "INVALID_FIELD"
    assert error["fields"][0]["field"] == "dense.cost.data"


def test_no_server(cli):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # Bound, never listening: connections are refused.
        nobody = Cli(f"127.0.0.1:{free.getsockname()[1]}")
        for command, flags in [("solve", dict(cost="0,1", epsilon=1)), ("info", {}), ("health", {})]:
            done = nobody.run(command, **flags)
            assert done.returncode == UNAVAILABLE and nobody.target in done.stderr
        assert nobody.run("health", wait="true", timeout="300ms").returncode == DEADLINE


def test_timeout(cli, files):
    cost = files("c", np.random.default_rng(8).random((1000, 1000)))
    done = cli.run("solve", cost=cost, epsilon=0.1, max_iterations=100000, tolerance=0, timeout="200ms")
    assert done.returncode == DEADLINE
    assert "DEADLINE_EXCEEDED" in done.stderr


def test_require_converged(cli):
    flags = dict(cost="0,1,3;1,0,2", epsilon=0.01, max_iterations=1)
    done = cli.run("solve", **flags)
    assert done.returncode == OK and "not converged" in done.stdout
    assert cli.run("solve", require_converged="true", **flags).returncode == NOT_CONVERGED


def test_tls(tmp_path):
    # One self-signed certificate serves as authority, server and client.
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=solver.test", "-addext", "subjectAltName=DNS:solver.test", "-days", "1"]
    subprocess.run([*command, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    flags = [f"--tls_cert={certificate}", f"--tls_key={key}", f"--tls_client_ca={certificate}"]
    with running_server(tmp_path, *flags) as target:
        cli = Cli(target)
        trust = dict(tls_root_cert=certificate, tls_server_name="solver.test")
        own = dict(tls_cert=certificate, tls_key=key)
        problem = dict(cost="0,1;1,0", epsilon=1)

        assert cli.run("solve", **problem, **trust, **own).returncode == OK
        assert cli.run("solve", **problem, **trust).returncode == UNAVAILABLE  # The server wants a certificate.
        assert cli.run("solve", **problem, **own, tls_server_name="solver.test").returncode == UNAVAILABLE
        assert cli.run("solve", **problem).returncode == UNAVAILABLE
        assert cli.run("solve", **problem, **trust, tls_cert=certificate).returncode == USAGE


# ---- Load generator -----------------------------------------------------------------------------


def load(cli, **flags):
    command = [program("SINKHORN_LOADGEN", "client/loadgen/sinkhorn_loadgen"), f"--server={cli.target}", "--json"]
    done = subprocess.run(
        command + [f"--{name}={value}" for name, value in flags.items()], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == OK, done.stdout + done.stderr
    return json.loads(done.stdout)


MIX = ",".join(
    [
        "normalization:32x4x4:20=5",
        "normalization:7x5:10:gradient",
        "normalization:4x8x8:recipe=exact",
        "normalization:6x6:dtype=bfloat16",
        "dense:40x30:50",
        "dense:3x20x20:tolerance=1e-4:plan:value",
        "point_cloud:50x60x3:20",
        "point_cloud:2x30x30x16:10:gradient",
        "point_cloud:20x20x2:debias",
    ]
)


def test_closed_loop_answers_are_right(cli):
    result = load(cli, mix=MIX, clients=16, requests=500, warmup="100ms", verify="true")

    assert result["all"]["requests"] == 500 and result["all"]["errors"] == {}
    assert result["verified"] and result["wrong_count"] == 0, result["wrong"]
    assert all(entry["stats"]["requests"] > 0 for entry in result["entries"])
    latency = result["all"]["latency_seconds"]
    assert 0 < latency["p50"] <= latency["p99"] <= latency["max"]
    assert result["all"]["batch_problems"]["max"] >= 32


def test_open_loop_answers_are_right(cli):
    result = load(cli, mix=MIX, rate=200, duration="1s", warmup="100ms", verify="true")

    assert result["wrong_count"] == 0, result["wrong"]
    assert result["all"]["errors"] == {} and result["not_sent"] == 0
    assert 100 < result["all"]["requests"] < 300


# ---- C++ example --------------------------------------------------------------------------------


def test_the_cpp_example(cli):
    command = [program("SINKHORN_CPP_EXAMPLE", "client/cpp/example"), cli.target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    x, y = np.array([[0, 0], [1, 0], [0, 1]]), np.array([[2, 2], [3, 2], [2, 3], [3, 3]])
    plan, value = transport(squared_distances(x, y), np.full(3, 1 / 3), np.full(4, 1 / 4), 0.05, 20000)
    gradient = 2 * (x / 3 - plan @ y)
    lines = done.stdout.splitlines()
    assert done.returncode == OK, done.stdout
    assert float(lines[0].split()[1].strip(",")) == pytest.approx(value, rel=1e-4)
    for line, row in zip(lines[1:], gradient, strict=True):
        shown = [float(word) for word in line[line.index("(") + 1 : -1].split(",")]
        np.testing.assert_allclose(shown, row, atol=1e-3)
