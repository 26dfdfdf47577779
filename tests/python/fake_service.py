"""A Sinkhorn service in this process whose answers a test scripts: error paths that a healthy server does not take."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterable, Iterator

import grpc
from google.protobuf import any_pb2, message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2

from sinkhorn_client._proto import sinkhorn_pb2 as pb

SERVICE = "sinkhorn.v1.SinkhornService"

Solve = Callable[[pb.SolveRequest, grpc.ServicerContext], pb.SolveResponse]
SolveStream = Callable[[Iterator[pb.SolveStreamRequest], grpc.ServicerContext], Iterable[pb.SolveStreamResponse]]
Check = Callable[[health_pb2.HealthCheckRequest, grpc.ServicerContext], health_pb2.HealthCheckResponse]


@contextlib.contextmanager
def serving(
    solve: Solve | None = None,
    solve_stream: SolveStream | None = None,
    info: pb.GetServerInfoResponse | None = None,
    check: Check | None = None,
    *,
    answerless: bool = False,
) -> Iterator[str]:
    """Serves the given methods, the others being UNIMPLEMENTED; yields the target. `answerless`: Solve ends with OK and
    no answer, as it looks to a client whose gRPC has dropped it."""
    methods = {}
    if answerless:
        methods["Solve"] = grpc.unary_stream_rpc_method_handler(lambda request, context: iter(()))
    if solve is not None:
        methods["Solve"] = grpc.unary_unary_rpc_method_handler(
            solve, pb.SolveRequest.FromString, pb.SolveResponse.SerializeToString
        )
    if solve_stream is not None:
        methods["SolveStream"] = grpc.stream_stream_rpc_method_handler(
            solve_stream, pb.SolveStreamRequest.FromString, pb.SolveStreamResponse.SerializeToString
        )
    if info is not None:
        methods["GetServerInfo"] = grpc.unary_unary_rpc_method_handler(
            lambda request, context: info,
            pb.GetServerInfoRequest.FromString,
            pb.GetServerInfoResponse.SerializeToString,
        )
    health = {}
    if check is not None:
        health["Check"] = grpc.unary_unary_rpc_method_handler(
            check, health_pb2.HealthCheckRequest.FromString, health_pb2.HealthCheckResponse.SerializeToString
        )
    options = [("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)]
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(8), options=options)
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(SERVICE, methods),
            grpc.method_handlers_generic_handler("grpc.health.v1.Health", health),
        )
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(grace=None).wait()


def status(
    code: grpc.StatusCode,
    reason: str,
    text: str = "a message",
    *,
    metadata: dict[str, str] | None = None,
    field: str = "",
    retry_seconds: float | None = None,
) -> status_pb2.Status:
    """The status that the real server makes of an error (server/status.cc)."""
    made = status_pb2.Status(code=code.value[0], message=text)
    _pack(made, error_details_pb2.ErrorInfo(reason=reason, domain="sinkhorn", metadata=metadata))
    if field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=text)
        _pack(made, error_details_pb2.BadRequest(field_violations=[violation]))
    if retry_seconds is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(retry_seconds * 1e9))
        _pack(made, retry)
    return made


def _pack(made: status_pb2.Status, detail: message.Message) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    made.details.append(packed)


def abort(context: grpc.ServicerContext, made: status_pb2.Status, pushback_ms: int | None = None) -> None:
    """Ends the call with that status, its details and, if given, the pushback trailer."""
    trailers = [("grpc-status-details-bin", made.SerializeToString())]
    if pushback_ms is not None:
        trailers.append(("grpc-retry-pushback-ms", str(pushback_ms)))
    context.set_trailing_metadata(tuple(trailers))
    codes = {code.value[0]: code for code in grpc.StatusCode}
    context.abort(codes[made.code], made.message)
