"""The real server answers a stock client: right numbers, and each row of the status table that shows from outside."""

import threading
import time

import grpc
import numpy as np
import pytest


def normalize(logits, iterations):
    """LOG_ROW_COLUMN in float64, as the contract spells it."""
    log_p = np.maximum(logits.astype(np.float64), -1e5)
    for _ in range(iterations):
        for axis in (-1, -2):
            top = log_p.max(axis, keepdims=True)
            log_p = log_p - top - np.log(np.exp(log_p - top).sum(axis, keepdims=True))
    return np.exp(log_p)


def transport_value(cost, epsilon, iterations=2000):
    """The optimal dual value for uniform masses, in float64."""
    n, m = cost.shape
    f, g = np.zeros(n), np.zeros(m)

    def softmin(matrix, axis, size):
        top = matrix.max(axis, keepdims=True)
        return -epsilon * (np.log(np.exp(matrix - top).sum(axis)) + top.squeeze(axis) - np.log(size))

    for _ in range(iterations):
        f = softmin((g[None, :] - cost) / epsilon, 1, m)
        g = softmin((f[:, None] - cost) / epsilon, 0, n)
    return f.mean() + g.mean()


# ---- Answers --------------------------------------------------------------------------------------------------------


def test_normalization(api, server):
    logits = np.random.default_rng(1).normal(size=(5, 6, 6)).astype(np.float32)
    with api.stub(server) as stub:
        reply = stub.Solve(api.normalization(logits, iterations=30, request_id="abc"), timeout=30)
    assert reply.request_id == "abc"
    np.testing.assert_allclose(api.array(reply.plan), normalize(logits, 30), rtol=2e-5)
    assert reply.convergence.iterations == 30
    assert reply.convergence.marginal_error_a < 1e-3
    assert reply.execution.backend == "cpu"
    assert reply.execution.family.startswith("cpu-")
    assert reply.execution.batch_problem_count >= 5


def test_dense(api, server):
    cost = np.random.default_rng(2).random((30, 20)).astype(np.float32)
    with api.stub(server) as stub:
        reply = stub.Solve(api.dense(cost, 0.1, tolerance=1e-6), timeout=30)
    expected = transport_value(cost.astype(np.float64), 0.1)
    assert reply.convergence.converged
    assert reply.value[0] == pytest.approx(expected, rel=1e-5)
    assert reply.dual_bound[0] <= expected
    assert api.array(reply.f).shape == (30,)


def test_point_cloud_with_every_output(api, server):
    rng = np.random.default_rng(3)
    x, y = rng.random((25, 3)).astype(np.float32), rng.random((40, 3)).astype(np.float32)
    with api.stub(server) as stub:
        reply = stub.Solve(api.cloud(x, y, 0.05, tolerance=1e-6, outputs=[1, 2, 3, 4, 5, 6, 7, 8, 10, 11]), timeout=30)
    cost = ((x[:, None].astype(np.float64) - y[None].astype(np.float64)) ** 2).sum(-1)
    expected = transport_value(cost, 0.05)
    assert reply.value[0] == pytest.approx(expected, rel=1e-5)
    assert reply.dual_bound[0] <= expected <= reply.primal_bound[0]
    plan = api.array(reply.plan)
    np.testing.assert_allclose(plan.sum(1), api.array(reply.row_sums), rtol=1e-5)
    np.testing.assert_allclose(plan.sum(), 1, rtol=1e-4)
    np.testing.assert_allclose(api.array(reply.projection_x), plan @ y / plan.sum(1, keepdims=True), rtol=1e-3)
    assert reply.value_linear[0] == pytest.approx((plan * cost).sum(), rel=1e-4)
    assert api.array(reply.gradient_y).shape == (40, 3)
    assert len(reply.members) == 1


@pytest.mark.parametrize("megabytes", [4, 200])
def test_large_messages(api, server, megabytes):
    n = int((megabytes * 2**20 / 4) ** 0.5)
    logits = np.random.default_rng(4).random((n, n), dtype=np.float32)
    request = api.normalization(logits, iterations=1)
    assert request.ByteSize() > megabytes * 2**20 * 0.99
    with api.stub(server) as stub:
        plan = api.array(stub.Solve(request, timeout=120).plan)
    assert plan.shape == (n, n)
    np.testing.assert_allclose(plan.sum(0, dtype=np.float64), 1, atol=1e-4)
    rows = slice(0, n, max(1, n // 16))
    expected = np.exp(logits[rows].astype(np.float64))
    expected /= expected.sum(1, keepdims=True)
    scale = plan[rows] / expected  # One factor per column.
    np.testing.assert_allclose(scale, np.broadcast_to(scale.mean(0), scale.shape), rtol=1e-3)


def test_a_message_above_the_limit_is_refused_and_the_next_is_served(api, start):
    server = start("--max_receive_message_bytes=1000000", "--max_reply_bytes=1000000")
    with api.stub(server) as stub:
        with pytest.raises(grpc.RpcError) as refused:
            stub.Solve(api.normalization(np.zeros((600, 600), np.float32)), timeout=30)
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert stub.Solve(api.normalization(np.zeros((3, 3), np.float32)), timeout=30).HasField("plan")


# ---- The status table -----------------------------------------------------------------------------------------------


def failure(api, stub, request, **call):
    with pytest.raises(grpc.RpcError) as error:
        stub.Solve(request, **{"timeout": 30, **call})
    return api.error(error.value)


def test_invalid_field(api, server):
    cost = np.ones((3, 3), np.float32)
    cost[1, 2] = np.nan
    with api.stub(server) as stub:
        code, reason, metadata, trailers = failure(api, stub, api.dense(cost, 0.1))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert metadata["field"] == "dense.cost.data" and metadata["element"] == "5"
    assert "grpc-retry-pushback-ms" not in trailers


def test_problem_too_large(api, start):
    server = start("--max_points=100")
    x = np.zeros((101, 2), np.float32)
    with api.stub(server) as stub:
        code, reason, metadata, _ = failure(api, stub, api.cloud(x, x, 0.1))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PROBLEM_TOO_LARGE")
    assert (metadata["limit"], metadata["actual"]) == ("100", "101")


def test_queue_full_and_cancelled_and_expired(api, start, eventually):
    server = start("--max_queue_requests=1", "--max_batch_problems=1")
    with api.stub(server) as stub:
        before = server.rounds()
        running = stub.Solve.future(api.endless_problem())  # A long one's end is foreseen, and that nobody waits for it.
        eventually(lambda: server.rounds() > before + 3)
        waiting = stub.Solve.future(api.endless_problem(), timeout=1.5)
        eventually(lambda: server.metric("sinkhorn_queue_requests") == 1)

        code, reason, _, trailers = failure(api, stub, api.long_problem())
        assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert int(trailers["grpc-retry-pushback-ms"]) >= 1

        assert waiting.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        eventually(lambda: server.metric("sinkhorn_requests_abandoned_total", stage="queue", cause="deadline") == 1)
        running.cancel()
        eventually(lambda: server.metric("sinkhorn_requests_in_flight") == 0)
        assert server.metric("sinkhorn_requests_abandoned_total", stage="running", cause="cancelled") == 1
        assert server.metric("sinkhorn_wasted_device_seconds_total", cause="cancelled") > 0
        assert server.metric("sinkhorn_queue_bytes") == 0


def test_infeasible_deadline(api, server):
    with api.stub(server) as stub:
        code, reason, _, trailers = failure(api, stub, api.long_problem(), timeout=1)
    assert (code, reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "INFEASIBLE_DEADLINE")
    assert trailers["grpc-retry-pushback-ms"] == "-1"


def test_time_budget(api, server):
    """The iterate reached comes back in time, with a certificate that says how good it is."""
    with api.stub(server) as stub:
        request = api.endless_problem()
        request.solver.time_budget = 0.3
        begin = time.monotonic()
        reply = stub.Solve(request, timeout=20)
        assert 0.3 <= time.monotonic() - begin < 10
        assert not reply.convergence.converged and reply.convergence.iterations >= 1
        assert reply.convergence.stop_reason == 5
        assert reply.convergence.marginal_error_a + reply.convergence.marginal_error_b > 1e-12
        longer = api.endless_problem()
        longer.solver.time_budget = 3
        assert stub.Solve(longer, timeout=30).convergence.iterations > reply.convergence.iterations

        normalization = api.normalization(np.zeros((4, 4), np.float32))
        normalization.solver.time_budget = 1
        code, reason, metadata, _ = failure(api, stub, normalization)
    assert (code, reason, metadata["field"]) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_FIELD",
        "solver.time_budget",
    )


def test_expired_while_running(api, start, eventually):
    server = start()
    with api.stub(server) as stub:
        begin = time.monotonic()
        with pytest.raises(grpc.RpcError) as error:
            stub.Solve(api.endless_problem(), timeout=0.7)
    assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - begin < 5
    eventually(lambda: server.metric("sinkhorn_requests_in_flight") == 0)
    assert server.metric("sinkhorn_requests_abandoned_total", stage="running", cause="deadline") == 1


def test_diverged(api, server):
    # Finite as float64, infinite as float32, in which STRICT works.
    with api.stub(server) as stub:
        code, reason, _, _ = failure(api, stub, api.dense(np.full((3, 3), 1e300), 0.1))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "DIVERGED")


def test_warming(api, start, eventually):
    server = start("--inject_fault=slow_start@2s", ready=False)
    request = api.normalization(np.zeros((2, 2), np.float32))
    with api.stub(server) as stub, api.health(server) as health:
        code, reason, _, _ = failure(api, stub, request)
        assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "WARMING")
        check = api.health_pb.HealthCheckRequest
        assert health.Check(check(service=""), timeout=10).status == 2
        assert health.Check(check(service="liveness"), timeout=10).status == 1
        eventually(lambda: health.Check(check(service=""), timeout=10).status == 1)
        assert stub.Solve(request, timeout=10).HasField("plan")


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("device_memory@6", (grpc.StatusCode.RESOURCE_EXHAUSTED, "DEVICE_MEMORY")),
        ("bug@6", (grpc.StatusCode.INTERNAL, "INTERNAL")),
    ],
)
def test_one_problem_fails_alone(api, start, fault, expected):
    server = start(f"--inject_fault={fault}")
    request = api.normalization(np.ones((2, 2), np.float32))
    outcomes = []
    with api.stub(server) as stub:
        for _ in range(6):
            try:
                outcomes.append(stub.Solve(request, timeout=10).plan.data)
            except grpc.RpcError as error:
                code, reason, metadata, _ = api.error(error)
                outcomes.append((code, reason))
                if reason == "INTERNAL":
                    assert server.log().count(metadata["incident"]) == 1
    # Three golden problems came first.
    assert outcomes.pop(2) == expected
    assert len(set(outcomes)) == 1 and isinstance(outcomes[0], bytes)


def test_device_lost(api, start):
    server = start("--inject_fault=device_lost@8", "--drain_grace=0s")
    request = api.normalization(np.zeros((2, 2), np.float32))
    with api.stub(server) as stub, api.health(server) as health:
        watch = health.Watch(api.health_pb.HealthCheckRequest(service=""), timeout=30)
        assert next(watch).status == 1
        for _ in range(20):
            try:
                stub.Solve(request, timeout=10)
            except grpc.RpcError as error:
                code, reason, _, _ = api.error(error)
                break
        assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "DEVICE_LOST")
        assert next(watch).status == 2
    assert server.wait() == 1
    assert '"event":"device_lost"' in server.log()


def test_iteration_limit_is_not_an_error(api, server):
    rng = np.random.default_rng(5)
    with api.stub(server) as stub:
        reply = stub.Solve(api.dense(rng.random((50, 50)), 1e-3, tolerance=1e-9, max_iterations=3), timeout=30)
    assert not reply.convergence.converged
    assert reply.convergence.iterations == 3
    assert reply.convergence.stop_reason == 2


def test_server_info(api, server):
    with api.stub(server) as stub:
        info = stub.GetServerInfo(api.pb.GetServerInfoRequest(), timeout=10)
    assert info.state == "ready" and info.devices[0].backend == "cpu"
    assert info.limits.max_queue_requests == 1024
    assert 0 < info.uptime_seconds < 3600


# ---- Streams --------------------------------------------------------------------------------------------------------


def test_nan_in_one_problem_leaves_its_neighbours_bits_alone(api, server):
    rng = np.random.default_rng(6)
    requests = []
    for i in range(60):
        n, m = rng.integers(2, 40, 2)
        if i % 3 == 0:
            request = api.normalization(rng.normal(size=(n, m)).astype(np.float32))
        elif i % 3 == 1:
            request = api.dense(rng.random((n, m)).astype(np.float32), 0.05)
        else:
            request = api.cloud(rng.random((n, 2)).astype(np.float32), rng.random((m, 2)).astype(np.float32), 0.05)
        requests.append(request)
    spoiled = api.normalization(np.full((7, 9), np.nan, np.float32))
    too_big = api.dense(np.full((5, 5), 1e300), 0.1)  # Valid, and diverges.

    def answers(stub, problems):
        for i, problem in enumerate(problems):
            problem.request_id = str(i)
        stream = stub.SolveStream(iter([api.pb.SolveStreamRequest(solve=problem) for problem in problems]), timeout=60)
        return {int(reply.request_id): reply for reply in stream}

    def bits(reply):
        solve = reply.solve
        return [
            solve.plan.data,
            solve.f.data,
            solve.g.data,
            list(solve.value),
            list(solve.dual_bound),
            solve.convergence.iterations,
        ]

    with api.stub(server) as stub:
        alone = [stub.Solve(request, timeout=30) for request in requests]
        mixed = []
        for i, request in enumerate(requests):
            mixed += [request, spoiled if i % 2 else too_big]
        together = answers(stub, [type(request).FromString(request.SerializeToString()) for request in mixed])
    assert len(together) == 120
    for i, solo in enumerate(alone):
        assert bits(together[2 * i]) == bits(api.pb.SolveStreamResponse(solve=solo)), i
        reason, _ = api.reason(together[2 * i + 1].error)
        assert reason == ("INVALID_FIELD" if i % 2 else "DIVERGED")


def test_stream_of_many_clients(api, server):
    failures = []

    def client(seed):
        rng = np.random.default_rng(seed)
        problems = {f"{seed}-{i}": rng.normal(size=(rng.integers(2, 9), 4)).astype(np.float32) for i in range(100)}
        try:
            with api.stub(server) as stub:
                requests = (
                    api.pb.SolveStreamRequest(solve=api.normalization(logits, request_id=name))
                    for name, logits in list(problems.items())
                )
                for reply in stub.SolveStream(requests, timeout=60):
                    np.testing.assert_allclose(
                        api.array(reply.solve.plan), normalize(problems.pop(reply.request_id), 20), rtol=1e-4
                    )
            assert not problems
        except Exception as error:  # noqa: BLE001  Reported by the test's own thread.
            failures.append(error)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
