"""Calls to the real server as programs make them: concurrent, streamed, large, wrong, late, refused; and the demo."""

import asyncio
import os
import pathlib
import subprocess
import sys
import time

import grpc
import numpy as np
import numpy_reference as reference
import pytest
from PIL import Image
from scipy.spatial import cKDTree

import sinkhorn_client as sc
from sinkhorn_client import AsyncClient, Client, problems

DEMO = pathlib.Path(__file__).parents[2] / "client" / "python" / "examples" / "colour_transfer.py"


def cloud_problem(seed, **options):
    """A problem of a shape of its own."""
    random = np.random.default_rng(seed)
    n, m, dim = random.integers(2, 40), random.integers(2, 40), random.integers(1, 6)
    x, y = random.random((n, dim)).astype(np.float32), random.random((m, dim)).astype(np.float32)
    options = {"epsilon": 0.1 + 0.1 * (seed % 3), "tolerance": 1e-5, **options}
    return problems.point_cloud(x, y, cost="squared_euclidean", **options), (x, y, options["epsilon"])


def assert_solves(result, cloud):
    x, y, epsilon = cloud
    cost = reference.squared_distances(x.astype(np.float64), y.astype(np.float64))
    expected = reference.solve(cost, epsilon=epsilon)
    assert float(result.value) == pytest.approx(expected.dual, abs=3e-5)


# ---- Concurrency --------------------------------------------------------------------------------


async def test_64_concurrent_calls(server):
    made = [cloud_problem(seed, request_id=str(seed)) for seed in range(64)]
    async with AsyncClient(server.target, timeout=60) as client:
        results = await asyncio.gather(*(client.solve(problem) for problem, _ in made))
        again = await asyncio.gather(*(client.solve(problem) for problem, _ in reversed(made)))
    for seed, (result, (_, cloud)) in enumerate(zip(results, made, strict=True)):
        assert result.request_id == str(seed) and result.convergence.converged
        assert_solves(result, cloud)
    for first, second in zip(results, reversed(again), strict=True):  # Whatever the company: the same bits.
        assert np.array_equal(first.f, second.f) and np.array_equal(first.value, second.value)


async def test_concurrent_problems_share_launches(server):
    """Problems long enough to meet: while the first runs, the others join it."""
    random = np.random.default_rng(0)
    clouds = [
        (random.random((600, 3)).astype(np.float32), random.random((500, 3)).astype(np.float32)) for _ in range(8)
    ]
    options = dict(cost="squared_euclidean", epsilon=0.01, max_iterations=300, tolerance=0.0)
    async with AsyncClient(server.target, timeout=60) as client:
        results = await asyncio.gather(*(client.point_cloud(x, y, **options) for x, y in clouds))
    assert max(result.execution.batch_problem_count for result in results) >= 2


async def test_asyncio_has_every_method(server):
    async with AsyncClient(server.target) as client:
        await client.wait_until_ready(10)
        assert await client.health() == await client.health("liveness") == "SERVING"
        assert (await client.server_info()).state == "ready"
        assert (await client.normalize(np.zeros((3, 3)))).plan == pytest.approx(np.full((3, 3), 1 / 3))
        assert float((await client.transport(np.zeros((3, 3)), epsilon=1)).value) == pytest.approx(0, abs=1e-6)
        with pytest.raises(sc.InvalidField):
            await client.transport(np.zeros((3, 3)), epsilon=-1)


def test_health_and_server_info(client):
    assert client.health() == client.health("sinkhorn.v1.SinkhornService") == client.health("liveness") == "SERVING"
    info = client.server_info()
    assert info.state == "ready" and info.version and info.uptime_seconds > 0
    assert info.devices and all(
        device.backend in ("cpu", "cuda") and device.memory_bytes > 0 for device in info.devices
    )
    limits = vars(info.limits)
    assert all(limit > 0 for limit in limits.values()), limits


# ---- Streams ------------------------------------------------------------------------------------


def test_a_stream_of_strangers(client):
    """Every kind and size in one stream, some of them wrong: each is answered as it is alone."""
    made = [cloud_problem(seed)[0] for seed in range(40)]
    random = np.random.default_rng(1)
    made += [problems.normalize(random.standard_normal((n, n + 2)).astype(np.float32)) for n in range(1, 20)]
    made += [problems.transport(random.random((n, 7)).astype(np.float32), epsilon=0.2) for n in range(1, 20)]
    bad = {5: problems.normalize([[np.nan]]), 30: problems.transport(np.zeros((2, 2)), epsilon=0)}
    for index, problem in bad.items():
        made.insert(index, problem)

    replies = sorted(client.solve_stream(made), key=lambda reply: reply.index)

    assert [reply.index for reply in replies] == list(range(len(made)))
    for reply, problem in zip(replies, made, strict=True):
        if reply.index in bad:
            assert isinstance(reply.error, sc.InvalidField)
            continue
        result, alone = reply.result(), client.solve(problem)
        for name in ("value", "f", "g", "plan"):
            if (array := getattr(alone, name, None)) is not None:
                assert np.array_equal(getattr(result, name), array)


async def test_an_asynchronous_stream(server):
    made = [cloud_problem(seed) for seed in range(30)]

    async def items():
        for problem, _ in made:
            await asyncio.sleep(0)
            yield problem

    async with AsyncClient(server.target, timeout=60) as client:
        replies = [reply async for reply in client.solve_stream(items())]
    assert sorted(reply.index for reply in replies) == list(range(30))
    for reply in replies:
        assert_solves(reply.result(), made[reply.index][1])


def test_a_long_stream_is_read_as_it_is_answered(client):
    """The server reads ahead of its replies by a bounded number: items are made on demand."""
    made = 0

    def items():
        nonlocal made
        for _ in range(5000):
            made += 1
            yield problems.normalize(np.zeros((2, 2), np.float32), iterations=1)

    count = sum(1 for reply in client.solve_stream(items()) if reply.result().plan is not None)
    assert count == made == 5000


def test_leaving_a_stream_leaves_the_server_well(client):
    endless = (cloud_problem(seed)[0] for seed in range(10**9))
    for count, reply in enumerate(client.solve_stream(endless)):
        assert reply.error is None
        if count == 20:
            break
    deadline = time.monotonic() + 10
    while client.server_info().requests_in_flight and time.monotonic() < deadline:
        time.sleep(0.05)
    assert client.server_info().requests_in_flight == 0


# ---- Sizes --------------------------------------------------------------------------------------


def test_large_messages(client):
    """36 MB there and back."""
    w = np.random.default_rng(0).standard_normal((3000, 3000)).astype(np.float32)
    result = client.normalize(w, iterations=2)
    assert result.plan.shape == w.shape
    assert result.plan.sum(axis=0) == pytest.approx(np.ones(3000), abs=1e-4)


# ---- Errors -------------------------------------------------------------------------------------

X, Y = np.zeros((4, 2), np.float32), np.ones((3, 2), np.float32)
SQUARED = {"cost": "squared_euclidean"}
WRONG = [
    ("solver.epsilon", problems.point_cloud(X, Y, epsilon=-1.0, **SQUARED)),
    ("solver.epsilon", problems.point_cloud(X, Y, epsilon=np.nan, **SQUARED)),
    ("solver.epsilon", problems.transport(X)),
    ("solver", problems.transport(X, epsilon=1, blur=1)),
    ("solver.tolerance", problems.transport(X, epsilon=1, tolerance=-1)),
    ("solver.scaling", problems.transport(X, epsilon=1, scaling=1.5)),
    ("solver.reach_a", problems.transport(X, epsilon=1, reach_a=0.0)),
    ("solver.max_iterations", problems.transport(X, epsilon=1, max_iterations=-3)),
    ("solver.debias", problems.transport(X, epsilon=1, debias=True)),
    ("point_cloud.x", problems.point_cloud(np.full((4, 2), np.inf, np.float32), Y, epsilon=1, **SQUARED)),
    ("point_cloud.y", problems.point_cloud(X, Y[:, :1], epsilon=1, **SQUARED)),
    ("point_cloud.y", problems.point_cloud(X, Y.astype(np.float64), epsilon=1, **SQUARED)),
    ("point_cloud.x", problems.point_cloud(X[0], Y, epsilon=1, **SQUARED)),
    ("point_cloud.a", problems.point_cloud(X, Y, a=[1, 2, 3], epsilon=1, **SQUARED)),
    ("point_cloud.a", problems.point_cloud(X, Y, a=[1, -1, 1, 0], epsilon=1, **SQUARED)),
    ("point_cloud", problems.point_cloud(X, Y, a=[1, 1, 1, 1], epsilon=1, **SQUARED)),
    ("point_cloud.b", problems.point_cloud(X, Y, b=[0, 0, 0], epsilon=1, **SQUARED)),
    ("dense.cost", problems.transport([[np.nan]], epsilon=1)),
    ("apply_v", problems.transport(X, epsilon=1, apply_v=np.ones((5, 1), np.float32))),
    ("outputs", problems.transport(X, epsilon=1, outputs=["projection"])),
    ("normalization.logits", problems.normalize([[np.inf]])),
    ("normalization.row_marginals", problems.normalize(X, row_marginals=[1, 1, 1, 0])),
    ("normalization.cotangent", problems.normalize(X, cotangent=Y)),
    ("normalization", problems.normalize(plan=X)),
    ("request_id", problems.normalize(X, request_id="x" * 129)),
]


@pytest.mark.parametrize(("field", "problem"), WRONG, ids=[f"{i}-{field}" for i, (field, _) in enumerate(WRONG)])
def test_wrong_fields_are_named(client, field, problem):
    with pytest.raises(sc.InvalidField) as caught:
        client.solve(problem)
    error = caught.value
    assert error.field.startswith(field)
    assert str(error).startswith(error.field) and error.rule and error.rule in str(error) and error.value in str(error)


def test_too_large(client):
    limits = client.server_info().limits
    with pytest.raises(sc.ProblemTooLarge) as caught:
        client.transport(X, epsilon=1, max_iterations=limits.max_iterations + 1)
    assert (caught.value.limit, caught.value.actual) == (limits.max_iterations, limits.max_iterations + 1)
    with pytest.raises(sc.ProblemTooLarge, match="dimension|d "):
        client.point_cloud(
            np.zeros((1, limits.max_dimension + 1)), np.zeros((1, limits.max_dimension + 1)), epsilon=1, **SQUARED
        )


def test_what_overflows_diverges(client):
    bad = problems.transport([[1e308, -1e308], [0, 0]], epsilon=1e-3)
    good, cloud = cloud_problem(0)
    with pytest.raises(sc.Diverged, match="increase epsilon"):
        client.solve(bad)
    replies = {reply.index: reply for reply in client.solve_stream([good, bad, good])}
    assert isinstance(replies[1].error, ArithmeticError)
    assert_solves(replies[0].result(), cloud)
    assert_solves(replies[2].result(), cloud)


def long_problem(**options):
    """Minutes of work."""
    random = np.random.default_rng(0)
    x, y = random.random((20000, 3)).astype(np.float32), random.random((20000, 3)).astype(np.float32)
    return problems.point_cloud(x, y, epsilon=0.01, max_iterations=2000, tolerance=0.0, **SQUARED, **options)


def test_a_deadline_ends_the_work(client):
    start = time.monotonic()
    with pytest.raises(sc.DeadlineExceeded):
        client.solve(long_problem(timeout=0.5))
    assert time.monotonic() - start < 5
    deadline = time.monotonic() + 10
    while client.server_info().requests_in_flight and time.monotonic() < deadline:
        time.sleep(0.05)
    assert client.server_info().requests_in_flight == 0


async def test_a_full_queue_tells_when_to_come_back(start_server):
    """At least the first is taken, as many more as find the queue empty. With the client's retries all are answered."""
    busy = start_server("--max_queue_requests=1", "--max_batch_problems=1")
    x = np.random.default_rng(0).random((2000, 3)).astype(np.float32)
    options = dict(epsilon=0.01, max_iterations=30, tolerance=0.0, **SQUARED)
    async with AsyncClient(busy.target, options={"grpc.enable_retries": 0}) as client:
        calls = [client.point_cloud(x, x, **options) for _ in range(8)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, BaseException)]
    assert 1 <= len(refused) <= 7
    assert all(type(error) is sc.QueueFull and error.retry_after > 0 for error in refused)
    async with AsyncClient(busy.target) as client:
        await asyncio.gather(*(client.point_cloud(x, x, **options) for _ in range(3)))


def test_a_server_that_dies(start_server):
    doomed = start_server()
    with Client(doomed.target) as client:
        assert client.health() == "SERVING"
        doomed.process.kill()
        doomed.process.wait()
        with pytest.raises(sc.Unavailable):
            client.normalize(X, timeout=20)


async def test_tls_with_client_certificates(start_server, tmp_path):
    """Both sides show a certificate; without one, or in plain text, there is no answer."""
    for name in ("server", "client"):
        subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
        files = ["-keyout", tmp_path / f"{name}.key", "-out", tmp_path / f"{name}.crt"]
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject, *files]
        subprocess.run(command, check=True, capture_output=True)
    root, key, certificate = ((tmp_path / name).read_bytes() for name in ("server.crt", "client.key", "client.crt"))
    credentials = grpc.ssl_channel_credentials(root, key, certificate)
    secure = start_server(
        f"--tls_cert={tmp_path / 'server.crt'}",
        f"--tls_key={tmp_path / 'server.key'}",
        f"--tls_client_ca={tmp_path / 'client.crt'}",
        credentials=credentials,
    )
    problem, cloud = cloud_problem(0)
    with Client(secure.target, credentials=credentials) as client:
        assert_solves(client.solve(problem), cloud)
    async with AsyncClient(secure.target, credentials=credentials) as client:
        assert_solves(await client.solve(problem), cloud)
    for wrong in (None, grpc.ssl_channel_credentials(root)):
        with Client(secure.target, credentials=wrong) as client, pytest.raises(sc.SinkhornError):
            client.transport(X, epsilon=1, timeout=5)


# ---- The demo -----------------------------------------------------------------------------------


def test_demo(server, tmp_path):
    """Toy size: the result is the same photograph, in colours that the target has."""
    picture = tmp_path / "picture.png"
    command = [sys.executable, DEMO, "--server", server.target, "--picture", picture, "--colours=400", "--samples=2"]
    environment = {**os.environ, "PYTHONPATH": str(DEMO.parents[1])}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "#0" in shown.stdout and "#1" in shown.stdout and "NOT CONVERGED" not in shown.stdout
    assert str(picture) in shown.stdout
    page = np.asarray(Image.open(picture)).astype(np.float64) / 255
    for row in range(2):
        source, target, result = (page[42 + row * 469 :][:427, 12 + column * 652 :][:, :640] for column in range(3))
        palette = cKDTree(target.reshape(-1, 3)[::7])
        before, after = (np.median(palette.query(image.reshape(-1, 3)[::97])[0]) for image in (source, result))
        assert after < before / 2
        edges = [np.abs(np.diff(image.mean(axis=2), axis=1)).ravel() for image in (source, result)]
        assert np.corrcoef(edges)[0, 1] > 0.8
