"""The client for threads. `aio` has its twin for asyncio."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import grpc

from sinkhorn_client import _channel, errors, problems, results
from sinkhorn_client._channel import StreamBook, StreamReply
from sinkhorn_client._proto import sinkhorn_pb2 as pb
from sinkhorn_client.problems import Problem

P = ParamSpec("P")
R = TypeVar("R")


def _solving(build: Callable[P, Problem[R]]) -> Callable[Concatenate[Client, P], R]:
    """The method that builds a problem and solves it."""

    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.solve(build(*args, **kwargs))

    _channel.describe_method(method, build)
    return method


class Client:
    """A connection to a Sinkhorn server, or to several behind one name. Safe to use from many threads.

        with Client("localhost:8001") as client:
            result = client.point_cloud(x, y, cost="squared_euclidean", epsilon=0.05)
            print(result.value, result.convergence)

    target              gRPC name of the server: `host:port`; `dns:///name:port`, whose addresses share the calls;
                        `unix:path`.
    timeout             Seconds that a call may take, unless it says otherwise. Default: no limit.
    credentials         Of `grpc.ssl_channel_credentials`, for TLS. Default: plain text.
    token               Sent as `authorization: Bearer ...` with each call.
    options             gRPC channel arguments that replace the defaults (`CHANNEL_DEFAULTS`).

    Calls that the server refuses for now (queue full, starting, draining) are tried again up to four times, after the
    pause the server asks for. Errors are `SinkhornError`s: see `sinkhorn_client.errors`.
    """

    def __init__(
        self,
        target: str = "localhost:8001",
        *,
        timeout: float | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self._connection = _channel.Connection(grpc, target, timeout, credentials, token, options)

    normalize = _solving(problems.normalize)
    transport = _solving(problems.transport)
    point_cloud = _solving(problems.point_cloud)

    def solve(self, problem: Problem[R]) -> R:
        """Solves a problem made by `sinkhorn_client.problems`."""
        with errors.translated():
            deadline = self._connection.deadline(problem.timeout)
            response = _channel.answered(self._connection.solve(problem), deadline)
        return problem.read(response, problem.batch_shape)

    def solve_stream(self, items: Iterable[Problem[R]], *, timeout: float | None = None) -> Iterator[StreamReply[R]]:
        """Solves many problems over one call; yields replies in the order in which they finish.

        `items` is read on another thread, ahead of the replies by what the server admits. The deadline `timeout`
        (default: the client's) holds for each of them. A problem that fails gives a reply with an `error` and leaves
        the others alone. Leaving the loop early cancels what is not finished. Raises what `items` raises, and
        SinkhornError when the stream itself fails.
        """
        book: StreamBook[R] = StreamBook()

        def messages() -> Iterator[pb.SolveStreamRequest]:
            with book.reading():
                yield from map(book.send, items)

        call = self._connection.solve_stream(messages(), timeout)
        try:
            with book.replying():
                yield from map(book.receive, call)
        finally:
            call.cancel()

    def server_info(self) -> results.ServerInfo:
        """What the server is, its devices and its limits. Works while it is draining."""
        with errors.translated():
            deadline = self._connection.deadline(_channel.SHORT_TIMEOUT)
            return results.server_info(_channel.answered(self._connection.server_info(), deadline))

    def health(self, service: str = "", *, timeout: float = _channel.SHORT_TIMEOUT) -> str:
        """`SERVING` or `NOT_SERVING`: whether the server takes problems. Service `liveness`: whether its process is
        sane."""
        with errors.translated():
            deadline = self._connection.deadline(timeout)
            return _channel.health_name(_channel.answered(self._connection.health(service, timeout), deadline))

    def wait_until_ready(self, timeout: float = 60.0) -> None:
        """Returns when the server takes problems. Raises DeadlineExceeded after `timeout` seconds."""
        wait = _channel.ReadinessWait(timeout)
        while True:
            with wait.trying():
                if wait.ready(self.health(timeout=wait.left())):
                    return
            time.sleep(min(0.1, wait.left()))

    def close(self) -> None:
        """Ends the connection; calls that run are cancelled."""
        self._connection.channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
