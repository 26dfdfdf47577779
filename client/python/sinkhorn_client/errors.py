"""What can go wrong, as exceptions. Each also is the built-in that a caller may already catch.

    SinkhornError
      InvalidRequest (ValueError)            INVALID_ARGUMENT: will never work; `field`
        InvalidField                         and `rule`, `value`
        ProblemTooLarge                      and `limit`, `actual`
      ResourceExhausted                      RESOURCE_EXHAUSTED
        QueueFull                            come back after `retry_after` seconds
        DeviceMemory                         this problem did not fit
      DeadlineExceeded (TimeoutError)        DEADLINE_EXCEEDED
        InfeasibleDeadline                   refused at once: it could not be met
        Expired                              it passed; `stage` says where
      Unavailable (ConnectionError)          UNAVAILABLE: try elsewhere
        Warming, Draining, DeviceLost
      Diverged (ArithmeticError)             the result is not finite; the message says what to change
      Cancelled                              CANCELLED
      Unauthenticated (PermissionError)      UNAUTHENTICATED, PERMISSION_DENIED
      InternalError                          a bug of the server; `incident` finds it in the server's log

Reaching the iteration limit is no error: see `Convergence.converged`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "sinkhorn"


@dataclasses.dataclass(frozen=True)
class FieldViolation:
    """One bad field: its path in the request, and the rule with the value that breaks it."""

    field: str
    description: str


class SinkhornError(Exception):
    """A call failed. `str(error)` is the server's message."""

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode = grpc.StatusCode.UNKNOWN,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        violations: Iterable[FieldViolation] = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        # The gRPC status code.
        self.code = code
        # Why, in UPPER_SNAKE_CASE; empty when the error was not made by the service but by gRPC or a proxy.
        self.reason = reason
        # Facts about this failure, by name.
        self.metadata = dict(metadata or {})
        # The bad fields, if that is what is wrong.
        self.violations = tuple(violations)
        # Seconds to wait before another try; None: the server did not say.
        self.retry_after = retry_after

    def _number(self, key: str) -> int | None:
        text = self.metadata.get(key, "")
        return int(text) if text.lstrip("-").isdigit() else None


class InvalidRequest(SinkhornError, ValueError):
    """The request can never work."""

    @property
    def field(self) -> str:
        """Path of the bad field, such as `point_cloud.x.shape`; empty if the server did not say."""
        return self.violations[0].field if self.violations else self.metadata.get("field", "")


class InvalidField(InvalidRequest):
    """A field breaks a rule. The message is `field rule; got value`."""

    @property
    def rule(self) -> str:
        """What holds for the field, such as `must be finite and > 0`."""
        description = self.violations[0].description if self.violations else self.message
        rule = description.removeprefix(self.field).lstrip(" :")
        return rule.rpartition("; got ")[0] or rule

    @property
    def value(self) -> str:
        """What came instead, as text; empty if the server did not say."""
        return self.metadata.get("value", "")


class ProblemTooLarge(InvalidRequest):
    """Above a limit of the server: see `ServerInfo.limits`."""

    @property
    def limit(self) -> int | None:
        """The limit."""
        return self._number("limit")

    @property
    def actual(self) -> int | None:
        """What was asked."""
        return self._number("actual")


class ResourceExhausted(SinkhornError):
    """The server, or a message limit on the way, is at its end."""


class QueueFull(ResourceExhausted):
    """Too much is waiting. The client has tried again already, after each pushback; `retry_after` is the last."""


class DeviceMemory(ResourceExhausted):
    """The device's memory did not hold this problem."""


class DeadlineExceeded(SinkhornError, TimeoutError):
    """Not done within the timeout."""


class InfeasibleDeadline(DeadlineExceeded):
    """Refused on arrival: the deadline could not be met."""


class Expired(DeadlineExceeded):
    """The deadline passed on the server."""

    @property
    def stage(self) -> str:
        """Where: `decode`, `queue` or `running`."""
        return self.metadata.get("stage", "")


class Unavailable(SinkhornError, ConnectionError):
    """No server can take the call now."""


class Warming(Unavailable):
    """The server is starting."""


class Draining(Unavailable):
    """The server is going away."""


class DeviceLost(Unavailable):
    """The server's device failed."""


class Diverged(SinkhornError, ArithmeticError):
    """The result is not finite, or is made of more than its precision holds."""


class Cancelled(SinkhornError):
    """The call was cancelled, by the caller or on the way."""


class Unauthenticated(SinkhornError, PermissionError):
    """The token or certificate is missing or wrong."""


class InternalError(SinkhornError):
    """A bug of the server."""

    @property
    def incident(self) -> str:
        """Finds the error in the server's log."""
        return self.metadata.get("incident", "")


_BY_REASON: dict[str, type[SinkhornError]] = {
    "INVALID_FIELD": InvalidField,
    "PROBLEM_TOO_LARGE": ProblemTooLarge,
    "QUEUE_FULL": QueueFull,
    "DEVICE_MEMORY": DeviceMemory,
    "INFEASIBLE_DEADLINE": InfeasibleDeadline,
    "EXPIRED": Expired,
    "WARMING": Warming,
    "DRAINING": Draining,
    "DEVICE_LOST": DeviceLost,
    "DIVERGED": Diverged,
}

_BY_CODE: dict[grpc.StatusCode, type[SinkhornError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: Unauthenticated,
    grpc.StatusCode.INTERNAL: InternalError,
}

_CODES = {code.value[0]: code for code in grpc.StatusCode}


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raises what gRPC raises inside as the exceptions of this module."""
    try:
        yield
    except grpc.RpcError as error:
        # gRPC's frames hold its call, which keeps the channel connecting for as long as the caller keeps the error.
        traceback.clear_frames(error.__traceback__)
        raise from_rpc_error(error) from None


def from_rpc_error(error: grpc.RpcError) -> SinkhornError:
    """The exception for what a sync or asyncio call raised."""
    call: Any = error  # What a call raises also is the call.
    trailers: dict[str, str | bytes] = dict(call.trailing_metadata() or ())
    status = status_pb2.Status(code=call.code().value[0], message=call.details() or "")
    packed = trailers.get("grpc-status-details-bin")
    if isinstance(packed, bytes):
        status.details.extend(status_pb2.Status.FromString(packed).details)
    pushback = str(trailers.get("grpc-retry-pushback-ms", ""))
    return from_status(status, retry_after=int(pushback) / 1000 if pushback.isdigit() else None)


def from_status(status: status_pb2.Status, retry_after: float | None = None) -> SinkhornError:
    """The exception for a status with its details. `retry_after` is used when the details have none."""
    info, retry, bad = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), error_details_pb2.BadRequest()
    for detail in status.details:
        for message in (info, retry, bad):
            detail.Unpack(message)
    if retry.HasField("retry_delay"):
        retry_after = retry.retry_delay.ToTimedelta().total_seconds()
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    by_reason = _BY_REASON.get(info.reason) if info.domain == DOMAIN else None
    return (by_reason or _BY_CODE.get(code, SinkhornError))(
        status.message,
        code=code,
        reason=info.reason,
        metadata=info.metadata,
        violations=[FieldViolation(v.field, v.description) for v in bad.field_violations],
        retry_after=retry_after,
    )
