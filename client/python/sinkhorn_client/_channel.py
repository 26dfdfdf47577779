"""What the sync and the asyncio client share: the channel and its defaults, streams' bookkeeping."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import grpc
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2

from sinkhorn_client import errors
from sinkhorn_client._proto import sinkhorn_pb2 as pb
from sinkhorn_client.problems import Problem

R = TypeVar("R")

SERVICE = "sinkhorn.v1.SinkhornService"

# Seconds that `server_info` and `health` may take.
SHORT_TIMEOUT = 10.0

# A refused or lost call is tried again, after the server's pushback (grpc-retry-pushback-ms) where it sends one; a
# negative pushback means never. All calls are idempotent.
_RETRY_POLICY = {
    "maxAttempts": 5,
    "initialBackoff": "0.1s",
    "maxBackoff": "5s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
}

_SERVICE_CONFIG = {
    # A headless service's name gives all replicas: spread the calls over them.
    "loadBalancingConfig": [{"round_robin": {}}],
    "methodConfig": [{"name": [{"service": SERVICE}], "retryPolicy": _RETRY_POLICY}],
}

CHANNEL_DEFAULTS: dict[str, Any] = {
    "grpc.service_config": json.dumps(_SERVICE_CONFIG),
    # A call above gRPC's default of 256 KiB would not be tried again: keep as much as a server takes by default.
    "grpc.per_rpc_retry_buffer_size": 256 << 20,
    # The server's limits are the limits.
    "grpc.max_send_message_length": -1,
    "grpc.max_receive_message_length": -1,
    # Notices a dead connection under a long solve.
    "grpc.keepalive_time_ms": 60_000,
    "grpc.keepalive_timeout_ms": 20_000,
    "grpc.http2.max_pings_without_data": 0,
    # Finds a server that was restarted within seconds; gRPC's own pause grows to two minutes, an attempt takes 20 s.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.min_reconnect_backoff_ms": 5_000,  # For an attempt: handshakes on a busy machine take long.
    "grpc.max_reconnect_backoff_ms": 1_000,
    "grpc.primary_user_agent": "sinkhorn-client-python",
}


class Connection:
    """A channel and the service's methods. `library` is grpc or grpc.aio: calls return what that library's calls do."""

    def __init__(
        self,
        library: Any,
        target: str,
        timeout: float | None,
        credentials: grpc.ChannelCredentials | None,
        token: str | None,
        options: dict[str, Any] | None,
    ) -> None:
        arguments = list({**CHANNEL_DEFAULTS, **(options or {})}.items())
        if credentials is None:
            self.channel = library.insecure_channel(target, arguments)
        else:
            self.channel = library.secure_channel(target, credentials, arguments)
        self._timeout = timeout
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        unary, stream = self.channel.unary_unary, self.channel.stream_stream
        self._solve = unary(_method("Solve"), pb.SolveRequest.SerializeToString, pb.SolveResponse.FromString)
        self._solve_stream = stream(
            _method("SolveStream"), pb.SolveStreamRequest.SerializeToString, pb.SolveStreamResponse.FromString
        )
        self._server_info = unary(
            _method("GetServerInfo"),
            pb.GetServerInfoRequest.SerializeToString,
            pb.GetServerInfoResponse.FromString,
        )
        self._health = unary(
            "/grpc.health.v1.Health/Check",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )

    def solve(self, problem: Problem[Any]) -> Any:
        """Calls Solve."""
        return self._solve(problem.message, **self._call(problem.timeout))

    def solve_stream(self, messages: Any, timeout: float | None) -> Any:
        """Calls SolveStream."""
        return self._solve_stream(messages, **self._call(timeout))

    def server_info(self) -> Any:
        """Calls GetServerInfo."""
        return self._server_info(pb.GetServerInfoRequest(), **self._call(SHORT_TIMEOUT))

    def health(self, service: str, timeout: float) -> Any:
        """Calls Health.Check."""
        return self._health(health_pb2.HealthCheckRequest(service=service), **self._call(timeout))

    def deadline(self, timeout: float | None) -> float:
        """When a call that begins now, with this timeout, has to be done, by time.monotonic()."""
        limit = self._limit(timeout)
        return math.inf if limit is None else time.monotonic() + limit

    def _limit(self, timeout: float | None) -> float | None:
        return self._timeout if timeout is None else timeout

    def _call(self, timeout: float | None) -> dict[str, Any]:
        return {"timeout": self._limit(timeout), "metadata": self._metadata}


def answered(response: R | None, deadline: float) -> R:
    """What a unary call returned. gRPC returns None, as if all were well, when the deadline passes before an answer
    that has arrived is read: that raises DeadlineExceeded, and without such a cause InternalError."""
    if response is not None:
        return response
    if time.monotonic() >= deadline:
        code, message = grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed before the answer was read"
    else:
        code, message = grpc.StatusCode.INTERNAL, "the server ended the call with OK, but sent no answer"
    raise errors.from_status(status_pb2.Status(code=code.value[0], message=message))


def describe_method(method: Any, build: Callable[..., Any]) -> None:
    """Gives a client's `method` the name, documentation and signature of the function that builds its problem, for
    help() and notebooks."""
    functools.update_wrapper(method, build)
    signature = inspect.signature(build)
    answer = str(signature.return_annotation).removeprefix("Problem[").removesuffix("]")
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__signature__ = signature.replace(
        parameters=[itself, *signature.parameters.values()], return_annotation=answer
    )


def _method(name: str) -> str:
    return f"/{SERVICE}/{name}"


def health_name(response: health_pb2.HealthCheckResponse) -> str:
    """`SERVING`, `NOT_SERVING` ..."""
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


class ReadinessWait:
    """The waiting of `wait_until_ready`, without its sleeps."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._last = ""

    def left(self) -> float:
        """Seconds that the next check may take, > 0. Raises DeadlineExceeded when there are none."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise errors.DeadlineExceeded(
                f"not ready within {self._timeout:g} s; the last answer: {self._last}",
                code=grpc.StatusCode.DEADLINE_EXCEEDED,
            )
        return left

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Around a check: an unreachable server is an answer like any other."""
        try:
            yield
        except (errors.Unavailable, errors.DeadlineExceeded) as error:
            self._last = error.message

    def ready(self, status: str) -> bool:
        """Whether that is the answer waited for."""
        self._last = status
        return status == "SERVING"


@dataclasses.dataclass(frozen=True)
class StreamReply(Generic[R]):
    """One answer of a stream, or one error."""

    # Position of the problem among those sent, from 0.
    index: int
    request_id: str
    # Why this problem failed; None if it did not.
    error: errors.SinkhornError | None
    _result: R | None

    def result(self) -> R:
        """The answer. Raises the problem's error if it failed."""
        if self.error is not None:
            raise self.error
        assert self._result is not None
        return self._result


class StreamBook(Generic[R]):
    """Matches a stream's replies, which come in completion order, with its problems."""

    def __init__(self) -> None:
        self._sent_count = 0
        # What it takes to read a reply, without the request's data.
        self._pending: dict[str, tuple[int, Problem[R]]] = {}
        self._failure: Exception | None = None

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Around the reading of the caller's problems: gRPC only logs an error there, so it is kept for the caller."""
        try:
            yield
        except Exception as error:
            self._failure = error
            raise

    @contextlib.contextmanager
    def replying(self) -> Iterator[None]:
        """Around the reading of replies: raises the caller's own error, if that is what ended the stream."""
        try:
            with errors.translated():
                yield
        except (errors.SinkhornError, asyncio.CancelledError):
            if self._failure is not None:
                raise self._failure from None
            raise

    def send(self, problem: Problem[R]) -> pb.SolveStreamRequest:
        """The message of the next problem. Raises ValueError for a request_id that is still in use or for a timeout."""
        index, self._sent_count = self._sent_count, self._sent_count + 1
        if problem.timeout is not None:
            raise ValueError("timeout must be unset in a stream: solve_stream's holds for all problems")
        request_id = problem.message.request_id or f"#{index}"
        if request_id in self._pending:
            raise ValueError(f"request_id must be unique in a stream; got {request_id!r} again")
        self._pending[request_id] = index, dataclasses.replace(problem, message=pb.SolveRequest())
        message = pb.SolveStreamRequest(solve=problem.message)
        message.solve.request_id = request_id
        return message

    def receive(self, response: pb.SolveStreamResponse) -> StreamReply[R]:
        """Reads a reply."""
        index, problem = self._pending.pop(response.request_id)
        if response.HasField("error"):
            return StreamReply(index, response.request_id, errors.from_status(response.error), None)
        answer = problem.read(response.solve, problem.batch_shape)
        return StreamReply(index, response.request_id, None, answer)
