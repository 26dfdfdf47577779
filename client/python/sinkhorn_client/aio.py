"""The client for asyncio: the twin of `client`, which documents what both do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import grpc

from sinkhorn_client import _channel, errors, problems, results
from sinkhorn_client._channel import StreamBook, StreamReply
from sinkhorn_client._proto import sinkhorn_pb2 as pb
from sinkhorn_client.problems import Problem

P = ParamSpec("P")
R = TypeVar("R")


def _solving(build: Callable[P, Problem[R]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, R]]:
    """The method that builds a problem and solves it."""

    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.solve(build(*args, **kwargs))

    _channel.describe_method(method, build)
    return method


class AsyncClient:
    """A connection to a Sinkhorn server for asyncio; arguments and methods are those of `Client`.

        async with AsyncClient("localhost:8001") as client:
            calls = [client.normalize(logits) for logits in many]
            results = await asyncio.gather(*calls)

    Make it and use it in one running event loop. Cancelling a task cancels its call, on the server too.
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
        self._connection = _channel.Connection(grpc.aio, target, timeout, credentials, token, options)

    normalize = _solving(problems.normalize)
    transport = _solving(problems.transport)
    point_cloud = _solving(problems.point_cloud)

    async def solve(self, problem: Problem[R]) -> R:
        """Solves a problem made by `sinkhorn_client.problems`."""
        with errors.translated():
            deadline = self._connection.deadline(problem.timeout)
            response = _channel.answered(await self._connection.solve(problem), deadline)
        return problem.read(response, problem.batch_shape)

    async def solve_stream(
        self, items: Iterable[Problem[R]] | AsyncIterable[Problem[R]], *, timeout: float | None = None
    ) -> AsyncIterator[StreamReply[R]]:
        """Solves many problems over one call: see `Client.solve_stream`. `items` may be asynchronous."""
        book: StreamBook[R] = StreamBook()

        async def messages() -> AsyncIterator[pb.SolveStreamRequest]:
            with book.reading():
                if isinstance(items, AsyncIterable):
                    async for problem in items:
                        yield book.send(problem)
                else:
                    for problem in items:
                        yield book.send(problem)

        call = self._connection.solve_stream(messages(), timeout)
        try:
            with book.replying():
                async for response in call:
                    yield book.receive(response)
        finally:
            call.cancel()
            del call  # A caller that keeps an error keeps this frame: see `errors.translated`.

    async def server_info(self) -> results.ServerInfo:
        """See `Client.server_info`."""
        with errors.translated():
            deadline = self._connection.deadline(_channel.SHORT_TIMEOUT)
            return results.server_info(_channel.answered(await self._connection.server_info(), deadline))

    async def health(self, service: str = "", *, timeout: float = _channel.SHORT_TIMEOUT) -> str:
        """See `Client.health`."""
        with errors.translated():
            deadline = self._connection.deadline(timeout)
            return _channel.health_name(_channel.answered(await self._connection.health(service, timeout), deadline))

    async def wait_until_ready(self, timeout: float = 60.0) -> None:
        """See `Client.wait_until_ready`."""
        wait = _channel.ReadinessWait(timeout)
        while True:
            with wait.trying():
                if wait.ready(await self.health(timeout=wait.left())):
                    return
            await asyncio.sleep(min(0.1, wait.left()))

    async def close(self) -> None:
        """Ends the connection; calls that run are cancelled."""
        await self._connection.channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
