"""What comes back: plain dataclasses of numpy arrays. An output that was not asked for is None.

Shapes: [...] is the batch's leading dimensions, () without a batch. Arrays have the dtype of the problem's first tensor
(logits, cost, x), except for `value` and the like, which are float64. All are writable and the caller's own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from sinkhorn_client import _tensor
from sinkhorn_client._proto import sinkhorn_pb2 as pb
from sinkhorn_client._tensor import Array


@dataclasses.dataclass(frozen=True)
class Convergence:
    """How good the answer is; for a batch, the worst member."""

    # Iterations done, annealing and Newton steps included.
    iterations: int
    # Both marginal errors are <= tolerance.
    converged: bool
    # |P 1 - a|_1, in units of mass; unbalanced: |P 1 - a exp(-f / rho_a)|_1.
    marginal_error_a: float
    # |P^T 1 - b|_1 likewise.
    marginal_error_b: float
    # `tolerance`, `max_iterations`, `precision` (the residual no longer falls) or `not_iterated`.
    stop_reason: str


@dataclasses.dataclass(frozen=True)
class HessianConvergence:
    """How the conjugate gradients of one member's Hessian-vector products ended: the worst direction."""

    # Iterations done.
    iterations: int
    # Relative residual of the linear system, computed anew from the solution.
    residual: float
    # The residual is <= hessian_tolerance.
    converged: bool


@dataclasses.dataclass(frozen=True, eq=False)
class SparsePlan:
    """The entries of one member's plan that are >= the threshold, in compressed sparse rows.

    `scipy.sparse.csr_array((plan.values, plan.columns, plan.row_offsets), shape=(n, m))` is the matrix.
    """

    # How many there are. More than sparse_max_entries: the arrays are None.
    entry_count: int
    # Their sum, in any case.
    mass: float
    # Row i has the entries [row_offsets[i], row_offsets[i + 1]); int64 [n + 1].
    row_offsets: npt.NDArray[np.int64] | None
    # Column of each entry, ascending within a row; int32 [entry_count].
    columns: npt.NDArray[np.int32] | None
    # The entries [entry_count].
    values: Array | None


@dataclasses.dataclass(frozen=True)
class Execution:
    """How the request was executed."""

    # `cpu` or `cuda`.
    backend: str
    # Name, such as `cpu: AVX3_SPR, 2 threads`.
    device: str
    # `strict`, `fast` or `double`: the arithmetic used.
    precision: str
    # Kernel family.
    family: str
    # Largest number of problems, of all clients, that shared a launch with this one.
    batch_problem_count: int
    # Launches that this request took part in.
    launch_count: int
    # From arrival to the first launch, s.
    queue_seconds: float
    # Copies to and from the device, s.
    transfer_seconds: float
    # From the first launch to the last, s.
    compute_seconds: float


class _ShortRepr:
    """Shows arrays by shape and dtype, and leaves out what is absent."""

    def __repr__(self) -> str:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        present = {name: value for name, value in fields.items() if value is not None and np.size(value)}
        return f"{type(self).__name__}({', '.join(f'{name}={_short(value)}' for name, value in present.items())})"


def _short(value: object) -> str:
    if not isinstance(value, np.ndarray):
        return repr(value)
    return f"{value[()]!r}" if value.ndim == 0 else f"<{value.dtype} {list(value.shape)}>"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NormalizationResult(_ShortRepr):
    """P = diag(u) exp(W) diag(v) and its derivatives. With a dustbin, P has n + 1 rows and m + 1 columns."""

    request_id: str
    convergence: Convergence
    execution: Execution
    # One per member, in row-major order of the batch, if `members` was asked for.
    members: tuple[Convergence, ...] = ()
    # P [..., n, m].
    plan: Array | None = None
    # P 1 [..., n].
    row_sums: Array | None = None
    # P^T 1 [..., m].
    column_sums: Array | None = None
    # dL/dlogits [..., n, m], with a cotangent.
    gradient_logits: Array | None = None
    # dL/d dustbin_score [...], with a cotangent and a dustbin.
    gradient_dustbin_score: Array | None = None


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TransportResult(_ShortRepr):
    """The solution of an optimal-transport problem."""

    request_id: str
    convergence: Convergence
    execution: Execution
    # One per member, in row-major order of the batch, if `members` was asked for.
    members: tuple[Convergence, ...] = ()
    # The dual objective at the returned potentials [...]; debiased: the divergence.
    value: npt.NDArray[np.float64] | None = None
    # <C, P> [...].
    value_linear: npt.NDArray[np.float64] | None = None
    # Lower bound of the optimal value [...]; debiased: of the cross term OT(a, b).
    dual_bound: npt.NDArray[np.float64] | None = None
    # Upper bound of it [...].
    primal_bound: npt.NDArray[np.float64] | None = None
    # Potentials [..., n] and [..., m], units of the cost. Balanced: f + t, g - t is the same solution for any t.
    f: Array | None = None
    g: Array | None = None
    # Debiased: potentials of OT(a, a) [..., n] and OT(b, b) [..., m].
    f_aa: Array | None = None
    g_bb: Array | None = None
    # P [..., n, m]; entries sum to the mass, so they are about 1 / (n m).
    plan: Array | None = None
    # P 1 [..., n] and P^T 1 [..., m].
    row_sums: Array | None = None
    column_sums: Array | None = None
    # Derivatives of `value` in x [..., n, d], y [..., m, d], a [..., n], b [..., m] and the cost [..., n, m].
    gradient_x: Array | None = None
    gradient_y: Array | None = None
    gradient_a: Array | None = None
    gradient_b: Array | None = None
    gradient_cost: Array | None = None
    # P V [..., n, k] and P^T U [..., m, k].
    plan_v: Array | None = None
    plan_transpose_u: Array | None = None
    # Barycentric projections: of x [..., n, d] = sum_j P_ij y_j / sum_j P_ij, of y [..., m, d] likewise.
    projection_x: Array | None = None
    projection_y: Array | None = None
    # Hessian-vector products [..., k, n, d] and [..., k, m, d], with hessian_x or hessian_y; a convergence per member.
    hessian_x: Array | None = None
    hessian_y: Array | None = None
    hessian_convergence: tuple[HessianConvergence, ...] = ()
    # One per member, in row-major order of the batch, with sparse_threshold.
    sparse_plan: tuple[SparsePlan, ...] = ()


@dataclasses.dataclass(frozen=True)
class Device:
    """One device of the server."""

    name: str
    # `cpu` or `cuda`.
    backend: str
    memory_bytes: int


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits above which the server refuses a problem."""

    # Largest n, m of a point cloud.
    max_points: int
    # Largest dimension d.
    max_dimension: int
    # Largest n * m of a matrix.
    max_matrix_elements: int
    # Largest number of members of a batch.
    max_members: int
    # Largest max_iterations.
    max_iterations: int
    # Largest request and reply, in bytes.
    max_receive_message_bytes: int
    max_reply_bytes: int
    # Requests that may wait, and their bytes.
    max_queue_requests: int
    max_queue_bytes: int


@dataclasses.dataclass(frozen=True)
class ServerInfo:
    """What the server is."""

    version: str
    commit: str
    devices: tuple[Device, ...]
    limits: Limits
    # `warming`, `ready` or `draining`.
    state: str
    uptime_seconds: float
    # Requests waiting or being solved now.
    requests_in_flight: int


def normalization_result(response: pb.SolveResponse, batch_shape: tuple[int, ...]) -> NormalizationResult:
    """Reads the reply to a normalisation."""
    return NormalizationResult(**_fields(NormalizationResult, response, batch_shape))


def transport_result(response: pb.SolveResponse, batch_shape: tuple[int, ...]) -> TransportResult:
    """Reads the reply to a transport problem."""
    fields = _fields(TransportResult, response, batch_shape)
    fields["hessian_convergence"] = tuple(
        HessianConvergence(**_plain(HessianConvergence, member)) for member in response.hessian_convergence
    )
    fields["sparse_plan"] = tuple(_sparse_plan(member) for member in response.sparse_plan)
    return TransportResult(**fields)


def server_info(response: pb.GetServerInfoResponse) -> ServerInfo:
    """Reads the reply to GetServerInfo."""
    plain = _plain(ServerInfo, response)
    plain["devices"] = tuple(Device(**_plain(Device, device)) for device in response.devices)
    plain["limits"] = Limits(**_plain(Limits, response.limits))
    return ServerInfo(**plain)


# Fields of the dataclasses are named as the contract's, so the kind of the value decides how it is read.
def _fields(result: type[Any], response: pb.SolveResponse, batch_shape: tuple[int, ...]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "request_id": response.request_id,
        "convergence": _convergence(response.convergence),
        "execution": _execution(response.execution),
        "members": tuple(_convergence(member) for member in response.members),
    }
    for field in dataclasses.fields(result):
        if field.name in fields or field.name in ("hessian_convergence", "sparse_plan"):
            continue
        value = getattr(response, field.name)
        if isinstance(value, pb.Tensor):
            fields[field.name] = _tensor.decode(value) if response.HasField(field.name) else None
        else:
            fields[field.name] = np.array(value, np.float64).reshape(batch_shape) if len(value) else None
    return fields


def _sparse_plan(message: pb.SparsePlan) -> SparsePlan:
    if not message.row_offsets:
        return SparsePlan(message.entry_count, message.mass, None, None, None)
    offsets, columns = np.array(message.row_offsets, np.int64), np.array(message.columns, np.int32)
    return SparsePlan(message.entry_count, message.mass, offsets, columns, _tensor.decode(message.values))


def _convergence(message: pb.Convergence) -> Convergence:
    reason = pb.StopReason.Name(message.stop_reason).removeprefix("STOP_REASON_").lower()
    return Convergence(**{**_plain(Convergence, message), "stop_reason": reason})


def _execution(message: pb.Execution) -> Execution:
    precision = pb.Precision.Name(message.precision).removeprefix("PRECISION_").lower()
    return Execution(**{**_plain(Execution, message), "precision": precision})


def _plain(result: type[Any], message: Any) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in dataclasses.fields(result)}
