"""What the client does about the network: retries with pushback, deadlines, streams, metadata, readiness."""

import asyncio
import contextlib
import threading
import time

import fake_service
import grpc
import numpy as np
import pytest
from fake_service import status
from grpc_health.v1 import health_pb2

import sinkhorn_client as sc
from sinkhorn_client import AsyncClient, Client, _channel, problems
from sinkhorn_client._proto import sinkhorn_pb2 as pb

LOGITS = np.zeros((2, 2), np.float32)
QUEUE_FULL = status(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
DRAINING = status(grpc.StatusCode.UNAVAILABLE, "DRAINING")


class Flaky:
    """A Solve that fails so many times first."""

    def __init__(self, failure_count, failure, pushback_ms=None):
        self.failure_count, self.failure, self.pushback_ms = failure_count, failure, pushback_ms
        self.times = []

    def __call__(self, request, context):
        self.times.append(time.monotonic())
        if len(self.times) <= self.failure_count:
            fake_service.abort(context, self.failure, self.pushback_ms)
        return pb.SolveResponse(request_id=request.request_id)


# ---- Retries -------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [QUEUE_FULL, DRAINING])
def test_refused_calls_are_tried_again_after_the_pushback(failure):
    solve = Flaky(2, failure, pushback_ms=150)
    with fake_service.serving(solve) as target, Client(target) as client:
        assert client.normalize(LOGITS, request_id="again").request_id == "again"
    assert len(solve.times) == 3
    assert all(later - earlier > 0.14 for earlier, later in zip(solve.times, solve.times[1:], strict=False))


def test_asyncio_tries_again_too():
    solve = Flaky(2, QUEUE_FULL, pushback_ms=20)

    async def main(target):
        async with AsyncClient(target) as client:
            await client.normalize(LOGITS)

    with fake_service.serving(solve) as target:
        asyncio.run(main(target))
    assert len(solve.times) == 3


def test_it_gives_up_after_five_tries():
    solve = Flaky(100, QUEUE_FULL, pushback_ms=5)
    with fake_service.serving(solve) as target, Client(target) as client, pytest.raises(sc.QueueFull):
        client.normalize(LOGITS)
    assert len(solve.times) == 5


def test_a_negative_pushback_means_never():
    solve = Flaky(1, QUEUE_FULL, pushback_ms=-1)
    with fake_service.serving(solve) as target, Client(target) as client, pytest.raises(sc.QueueFull):
        client.normalize(LOGITS)
    assert len(solve.times) == 1


def test_a_bad_request_is_not_tried_again():
    solve = Flaky(1, status(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"))
    with fake_service.serving(solve) as target, Client(target) as client, pytest.raises(sc.InvalidField):
        client.normalize(LOGITS)
    assert len(solve.times) == 1


def test_large_requests_are_tried_again():
    """gRPC's own default drops a request above 256 KiB from its retry buffer."""
    solve = Flaky(1, QUEUE_FULL, pushback_ms=5)
    with fake_service.serving(solve) as target, Client(target) as client:
        client.normalize(np.zeros((2048, 2048), np.float32))  # 16 MiB
    assert len(solve.times) == 2


# ---- One call ------------------------------------------------------------------------------------


def test_messages_above_grpcs_default_limit():
    def solve(request, context):
        return pb.SolveResponse(plan=request.normalization.logits)

    logits = np.random.default_rng(0).standard_normal((1500, 1500)).astype(np.float32)  # 9 MB; the default is 4.
    with fake_service.serving(solve) as target, Client(target) as client:
        assert np.array_equal(client.normalize(logits).plan, logits)


def test_the_timeout_of_the_call_goes_before_the_clients():
    def solve(request, context):
        return pb.SolveResponse(request_id=f"{context.time_remaining()}")

    with fake_service.serving(solve) as target:
        with Client(target, timeout=100) as client:
            assert 95 < float(client.normalize(LOGITS).request_id) < 102
            assert 45 < float(client.normalize(LOGITS, timeout=50).request_id) < 52
        with Client(target) as client:
            assert float(client.normalize(LOGITS).request_id) > 1e6  # None.


@pytest.mark.parametrize("timeout", [60, None])
def test_a_missing_answer_is_an_error(timeout):
    async def asyncio_solve(target):
        async with AsyncClient(target, timeout=timeout) as client:
            await client.normalize(LOGITS)

    with fake_service.serving(answerless=True) as target, Client(target, timeout=timeout) as client:
        with pytest.raises(sc.InternalError):
            client.normalize(LOGITS)
        with pytest.raises(sc.InternalError):
            asyncio.run(asyncio_solve(target))


def test_an_answer_that_the_deadline_has_taken_is_a_timeout_error():
    with pytest.raises(sc.DeadlineExceeded):
        _channel.answered(None, time.monotonic())
    assert _channel.answered("answer", time.monotonic()) == "answer"


def test_a_deadline_is_a_timeout_error():
    over = threading.Event()
    with fake_service.serving(lambda request, context: over.wait(10)) as target, Client(target) as client:
        start = time.monotonic()
        with pytest.raises(sc.DeadlineExceeded) as caught:
            client.normalize(LOGITS, timeout=0.2)
        assert 0.1 < time.monotonic() - start < 5
        assert isinstance(caught.value, TimeoutError) and caught.value.reason == ""
        over.set()


def test_token_and_user_agent():
    def solve(request, context):
        sent = dict(context.invocation_metadata())
        return pb.SolveResponse(request_id=f"{sent.get('authorization')} {sent['user-agent'].split()[0]}")

    with fake_service.serving(solve) as target:
        with Client(target, token="secret") as client:
            assert client.normalize(LOGITS).request_id == "Bearer secret sinkhorn-client-python"
        with Client(target) as client:
            assert client.normalize(LOGITS).request_id.startswith("None")


def test_nobody_there():
    with Client("127.0.0.1:1") as client, pytest.raises(sc.Unavailable):
        client.normalize(LOGITS, timeout=20)


def test_a_server_that_cannot_do_it():
    with fake_service.serving() as target, Client(target) as client, pytest.raises(sc.SinkhornError) as caught:
        client.server_info()
    assert caught.value.code == grpc.StatusCode.UNIMPLEMENTED


def test_cancelling_a_task_cancels_the_call():
    started, cancelled = threading.Event(), threading.Event()

    def solve(request, context):
        context.add_callback(cancelled.set)
        started.set()
        cancelled.wait(10)
        return pb.SolveResponse()

    async def main(target):
        async with AsyncClient(target) as client:
            task = asyncio.create_task(client.normalize(LOGITS))
            await asyncio.to_thread(started.wait, 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(cancelled.wait, 10)

    with fake_service.serving(solve) as target:
        asyncio.run(main(target))


# ---- Streams -------------------------------------------------------------------------------------


def collect(target, items, use_asyncio, **options):
    """All replies of a stream, by either client."""

    async def main():
        async with AsyncClient(target) as client:
            return [reply async for reply in client.solve_stream(items, **options)]

    if use_asyncio:
        return asyncio.run(main())
    with Client(target) as client:
        return list(client.solve_stream(items, **options))


def reversed_stream(requests, context):
    """Answers in reverse order; problems named `bad` fail."""
    for request in reversed(list(requests)):
        name = request.solve.request_id
        if name == "bad":
            error = status(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
            yield pb.SolveStreamResponse(request_id=name, error=error)
        elif request.solve.HasField("dense"):
            yield pb.SolveStreamResponse(request_id=name, solve=pb.SolveResponse(request_id=name, value=[1, 2]))
        else:
            solve = pb.SolveResponse(request_id=name, plan=request.solve.normalization.logits)
            yield pb.SolveStreamResponse(request_id=name, solve=solve)


either = pytest.mark.parametrize("use_asyncio", [False, True])


@either
def test_replies_are_matched_with_their_problems(use_asyncio):
    items = [
        problems.normalize(LOGITS + 1),
        problems.transport(np.zeros((2, 3, 3)), epsilon=1, request_id="mine"),
        problems.normalize(LOGITS, request_id="bad"),
        problems.normalize(LOGITS + 4),
    ]
    with fake_service.serving(solve_stream=reversed_stream) as target:
        replies = collect(target, items, use_asyncio)
    assert [reply.index for reply in replies] == [3, 2, 1, 0]
    assert [reply.request_id for reply in replies] == ["#3", "bad", "mine", "#0"]
    assert isinstance(replies[0].result(), sc.NormalizationResult) and replies[0].result().plan[0, 0] == 4
    assert isinstance(replies[1].error, sc.InvalidField)
    with pytest.raises(sc.InvalidField):
        replies[1].result()
    assert isinstance(replies[2].result(), sc.TransportResult) and list(replies[2].result().value) == [1, 2]
    assert replies[3].result().plan[0, 0] == 1


@either
def test_an_error_of_the_callers_own_iterable_comes_back(use_asyncio):
    def items():
        yield problems.normalize(LOGITS)
        raise KeyError("my own")

    with fake_service.serving(solve_stream=reversed_stream) as target, pytest.raises(KeyError, match="my own"):
        collect(target, items(), use_asyncio)


@either
def test_misuse_of_a_stream(use_asyncio):
    twice = [problems.normalize(LOGITS, request_id="same")] * 2
    timed = [problems.normalize(LOGITS, timeout=1)]
    with fake_service.serving(solve_stream=reversed_stream) as target:
        with pytest.raises(ValueError, match="request_id must be unique in a stream; got 'same' again"):
            collect(target, twice, use_asyncio)
        with pytest.raises(ValueError, match="timeout must be unset in a stream"):
            collect(target, timed, use_asyncio)


@either
def test_a_stream_that_fails_as_a_whole(use_asyncio):
    def solve_stream(requests, context):
        next(requests)
        fake_service.abort(context, status(grpc.StatusCode.INTERNAL, "INTERNAL"))
        yield

    with fake_service.serving(solve_stream=solve_stream) as target, pytest.raises(sc.InternalError):
        collect(target, [problems.normalize(LOGITS)], use_asyncio)


@either
def test_a_streams_deadline(use_asyncio):
    over = threading.Event()

    def solve_stream(requests, context):
        context.add_callback(over.set)
        over.wait(10)
        yield from ()

    with fake_service.serving(solve_stream=solve_stream) as target, pytest.raises(sc.DeadlineExceeded):
        collect(target, [problems.normalize(LOGITS)], use_asyncio, timeout=0.2)


@either
def test_leaving_a_stream_early_cancels_it(use_asyncio):
    cancelled = threading.Event()

    def solve_stream(requests, context):
        context.add_callback(cancelled.set)
        for request in requests:
            yield pb.SolveStreamResponse(request_id=request.solve.request_id, solve=pb.SolveResponse())
        cancelled.wait(10)

    async def main(target):
        async with AsyncClient(target) as client:
            async with contextlib.aclosing(client.solve_stream([problems.normalize(LOGITS)])) as replies:
                async for _ in replies:
                    break
            assert await asyncio.to_thread(cancelled.wait, 10)

    with fake_service.serving(solve_stream=solve_stream) as target:
        if use_asyncio:
            asyncio.run(main(target))
            return
        with Client(target) as client:
            for _ in client.solve_stream([problems.normalize(LOGITS)]):
                break
            assert cancelled.wait(10)


def test_asynchronous_items():
    async def items():
        for i in range(3):
            await asyncio.sleep(0.01)
            yield problems.normalize(LOGITS + i)

    with fake_service.serving(solve_stream=reversed_stream) as target:
        replies = collect(target, items(), use_asyncio=True)
    assert [reply.result().plan[0, 0] for reply in replies] == [2, 1, 0]


# ---- Server info, health, answers ----------------------------------------------------------------


def test_server_info():
    info = pb.GetServerInfoResponse(version="1.2.3", state="ready", uptime_seconds=4.5)
    info.devices.add(name="cpu: AVX2, 2 threads", backend="cpu", memory_bytes=5)
    info.limits.max_points = 77
    with fake_service.serving(info=info) as target, Client(target) as client:
        read = client.server_info()
    assert (read.version, read.state, read.uptime_seconds, read.limits.max_points) == ("1.2.3", "ready", 4.5, 77)
    assert read.devices == (sc.results.Device("cpu: AVX2, 2 threads", "cpu", 5),)


@either
def test_wait_until_ready(use_asyncio):
    answers = [None, health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING]
    asked = []

    def check(request, context):
        asked.append(request.service)
        answer = answers[len(asked) - 1]
        if answer is None:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        return health_pb2.HealthCheckResponse(status=answer)

    async def main(target):
        async with AsyncClient(target) as client:
            await client.wait_until_ready(timeout=20)

    with fake_service.serving(check=check) as target:
        if use_asyncio:
            asyncio.run(main(target))
        else:
            with Client(target) as client:
                client.wait_until_ready(timeout=20)
    assert asked == ["", "", ""]


def test_wait_until_ready_gives_up():
    def check(request, context):
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)

    with fake_service.serving(check=check) as target, Client(target) as client:
        assert client.health("liveness") == "NOT_SERVING"
        with pytest.raises(sc.DeadlineExceeded, match="not ready within 0.3 s; the last answer: NOT_SERVING"):
            client.wait_until_ready(timeout=0.3)


def test_an_answer_is_read_whole():
    def solve(request, context):
        response = pb.SolveResponse(request_id="r", value=[1.5, 2.5], dual_bound=[1.25, 2.25])
        response.convergence.iterations = 12
        response.convergence.converged = True
        response.convergence.stop_reason = pb.STOP_REASON_TOLERANCE
        response.execution.precision = pb.PRECISION_STRICT
        response.execution.batch_problem_count = 9
        response.members.add(iterations=3, stop_reason=pb.STOP_REASON_MAX_ITERATIONS)
        response.f.CopyFrom(problems.normalize(np.ones((2, 4), np.float32)).message.normalization.logits)
        return response

    with fake_service.serving(solve) as target, Client(target) as client:
        result = client.transport(np.zeros((2, 4, 4), np.float32), epsilon=1)
    assert result.value.dtype == np.float64 and list(result.value) == [1.5, 2.5]
    assert list(result.dual_bound) == [1.25, 2.25]
    assert result.convergence == sc.Convergence(12, True, 0, 0, "tolerance")
    assert (result.execution.precision, result.execution.batch_problem_count) == ("strict", 9)
    assert result.members == (sc.Convergence(3, False, 0, 0, "max_iterations"),)
    assert result.f.shape == (2, 4) and result.f.dtype == np.float32
    assert result.g is None and result.plan is None and result.primal_bound is None
    assert "f=<float32 [2, 4]>" in repr(result) and "value=<float64 [2]>" in repr(result) and "plan" not in repr(result)


def test_value_of_a_single_problem_is_a_scalar_array():
    response = pb.SolveResponse(value=[1.5])
    with fake_service.serving(lambda request, context: response) as target, Client(target) as client:
        value = client.transport(np.zeros((4, 4)), epsilon=1).value
    assert value.shape == () and float(value) == 1.5 and f"{value:.2f}" == "1.50"
