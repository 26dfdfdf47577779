"""Every row of the service's status table becomes its own exception, for unary calls, streams and asyncio alike."""

import asyncio
import gc
import pickle
import socket
import weakref

import fake_service
import grpc
import numpy as np
import pytest
from fake_service import status

import sinkhorn_client as sc
from sinkhorn_client import AsyncClient, Client, _channel, errors, problems
from sinkhorn_client._proto import sinkhorn_pb2 as pb

LOGITS = np.zeros((2, 2), np.float32)
ONE_TRY = {"grpc.enable_retries": 0}
Code = grpc.StatusCode
INTERNAL = status(Code.INTERNAL, "INTERNAL")

# Reason, code, exception, built-in that it also is.
TABLE = [
    ("INVALID_FIELD", Code.INVALID_ARGUMENT, sc.InvalidField, ValueError),
    ("PROBLEM_TOO_LARGE", Code.INVALID_ARGUMENT, sc.ProblemTooLarge, ValueError),
    ("QUEUE_FULL", Code.RESOURCE_EXHAUSTED, sc.QueueFull, sc.ResourceExhausted),
    ("DEVICE_MEMORY", Code.RESOURCE_EXHAUSTED, sc.DeviceMemory, sc.ResourceExhausted),
    ("INFEASIBLE_DEADLINE", Code.DEADLINE_EXCEEDED, sc.InfeasibleDeadline, TimeoutError),
    ("EXPIRED", Code.DEADLINE_EXCEEDED, sc.Expired, TimeoutError),
    ("WARMING", Code.UNAVAILABLE, sc.Warming, ConnectionError),
    ("DRAINING", Code.UNAVAILABLE, sc.Draining, ConnectionError),
    ("DEVICE_LOST", Code.UNAVAILABLE, sc.DeviceLost, ConnectionError),
    ("DIVERGED", Code.FAILED_PRECONDITION, sc.Diverged, ArithmeticError),
    ("CANCELLED", Code.CANCELLED, sc.Cancelled, sc.SinkhornError),
    ("INTERNAL", Code.INTERNAL, sc.InternalError, sc.SinkhornError),
    ("", Code.UNAUTHENTICATED, sc.Unauthenticated, PermissionError),
    ("", Code.DATA_LOSS, sc.SinkhornError, Exception),
    ("A_REASON_OF_TOMORROW", Code.UNAVAILABLE, sc.Unavailable, ConnectionError),
]


@pytest.mark.parametrize(("reason", "code", "kind", "builtin"), TABLE)
def test_status_table(reason, code, kind, builtin):
    failure = status(code, reason, "what went wrong", metadata={"key": "value"})

    def solve(request, context):
        fake_service.abort(context, failure)

    def solve_stream(requests, context):
        for request in requests:
            yield pb.SolveStreamResponse(request_id=request.solve.request_id, error=failure)

    async def asyncio_error(target):
        async with AsyncClient(target, options=ONE_TRY) as client:
            with pytest.raises(sc.SinkhornError) as caught:
                await client.normalize(LOGITS)
        return caught.value

    with fake_service.serving(solve, solve_stream) as target:
        with Client(target, options=ONE_TRY) as client:
            with pytest.raises(sc.SinkhornError) as unary:
                client.normalize(LOGITS)
            (reply,) = client.solve_stream([problems.normalize(LOGITS)])
            with pytest.raises(kind):
                reply.result()
        for error in (unary.value, reply.error, asyncio.run(asyncio_error(target))):
            assert type(error) is kind
            assert isinstance(error, builtin)
            assert (error.code, error.reason, str(error)) == (code, reason, "what went wrong")
            assert error.metadata == {"key": "value"}
            assert error.violations == ()


def raised(failure, pushback_ms=None):
    def solve(request, context):
        fake_service.abort(context, failure, pushback_ms)

    with (
        fake_service.serving(solve) as target,
        Client(target, options=ONE_TRY) as client,
        pytest.raises(sc.SinkhornError) as caught,
    ):
        client.normalize(LOGITS)
    return caught.value


def test_invalid_field_tells_field_rule_and_value():
    text = "solver.epsilon must be finite and > 0; got -1"
    failure = status(
        Code.INVALID_ARGUMENT,
        "INVALID_FIELD",
        text,
        field="solver.epsilon",
        metadata={"field": "solver.epsilon", "value": "-1"},
    )
    error = raised(failure)
    assert (error.field, error.rule, error.value) == ("solver.epsilon", "must be finite and > 0", "-1")
    assert error.violations == (errors.FieldViolation("solver.epsilon", text),)


def test_problem_too_large_tells_limit_and_actual():
    metadata = {"field": "point_cloud.x", "limit": "1048576", "actual": "2000000"}
    error = raised(status(Code.INVALID_ARGUMENT, "PROBLEM_TOO_LARGE", metadata=metadata))
    assert (error.field, error.limit, error.actual) == ("point_cloud.x", 1048576, 2000000)


def test_queue_full_tells_when_to_come_back():
    assert raised(status(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_seconds=0.25)).retry_after == 0.25
    assert raised(status(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL"), pushback_ms=40).retry_after == 0.04
    assert raised(status(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL"), pushback_ms=-1).retry_after is None


def test_expired_and_internal_tell_their_facts():
    assert raised(status(Code.DEADLINE_EXCEEDED, "EXPIRED", metadata={"stage": "queue"})).stage == "queue"
    assert raised(status(Code.INTERNAL, "INTERNAL", metadata={"incident": "7f"})).incident == "7f"


def test_another_domains_reason_is_not_ours():
    failure = status(Code.INVALID_ARGUMENT, "INVALID_FIELD")
    detail = failure.details[0]
    detail.value = detail.value.replace(b"sinkhorn", b"somebody")
    assert type(raised(failure)) is sc.InvalidRequest


def test_errors_survive_pickling():
    error = raised(
        status(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", "full", metadata={"key": "value"}, field="f", retry_seconds=0.5)
    )
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is sc.QueueFull
    assert copy.__dict__ == error.__dict__ and str(copy) == "full"


@pytest.mark.parametrize("stream", [False, True])
def test_a_kept_error_does_not_keep_a_closed_client_connecting(stream):
    def solve(request, context):
        fake_service.abort(context, INTERNAL)

    def solve_stream(requests, context):
        fake_service.abort(context, INTERNAL)
        yield

    async def fail(target):
        async with AsyncClient(target) as client:
            with pytest.raises(sc.InternalError) as caught:
                if stream:
                    _ = [reply async for reply in client.solve_stream([problems.normalize(LOGITS)])]
                else:
                    await client.normalize(LOGITS)
        return caught.value

    with fake_service.serving(solve, solve_stream) as target:
        error = asyncio.run(fail(target))
    host, port = target.split(":")
    with socket.create_server((host, int(port))) as listener:
        listener.settimeout(5 * _channel.CHANNEL_DEFAULTS["grpc.initial_reconnect_backoff_ms"] / 1000)
        with pytest.raises(TimeoutError):
            listener.accept()
    del error  # Kept until here.


def test_an_error_goes_with_its_last_reference():
    """And what its frames hold, such as the request: no collector is waited for."""

    def solve(request, context):
        fake_service.abort(context, INTERNAL)

    with fake_service.serving(solve) as target, Client(target) as client:
        gc.disable()
        try:
            try:
                client.normalize(LOGITS)
            except sc.InternalError as error:
                gone = weakref.ref(error)
            assert gone() is None
        finally:
            gc.enable()


def test_every_exception_is_exported():
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert {kind.__name__ for kind in kinds} <= set(sc.__all__)
