"""The problems that the service solves, as functions that build requests.

`Client` and `AsyncClient` have methods of the same names, arguments and documentation that also send the request and
return the answer. Used directly, these functions make the items of a stream:

    clouds = (problems.point_cloud(x, y, cost="squared_euclidean", epsilon=0.05) for x, y in pairs)
    for reply in client.solve_stream(clouds):
        print(reply.index, reply.result().value)

Arrays may be numpy arrays or anything that `numpy.asarray` takes. float32, float64, float16 and bfloat16 (package
ml_dtypes) are sent as they are, and outputs come back in the type of the first one (logits, cost, x). Python numbers
and integers are sent as float64, in `y` as x's type. [..., n, m] stands for any number of leading batch dimensions,
equal in all arrays that have them; an array without them is shared by all members of the batch.
Values are checked by the server alone, so that one rule holds for all clients.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypedDict, TypeVar

import numpy.typing as npt

from sinkhorn_client import _tensor, results
from sinkhorn_client._proto import sinkhorn_pb2 as pb

if TYPE_CHECKING:
    from typing_extensions import Unpack

R = TypeVar("R")
_P = ParamSpec("_P")

# Words of the contract's enumerations, in lower case.
Recipe = Literal["log_row_column", "exp_column_row", "deepseek", "exact"]
Start = Literal["exp", "row_softmax"]
Order = Literal["row_column", "column_row"]
Guard = Literal["none", "max", "add"]
BackwardMode = Literal["unrolled", "implicit", "implicit_unit", "implicit_full"]
Cost = Literal["squared_euclidean", "half_squared_euclidean", "euclidean", "cosine", "negative_dot"]
UpdateRule = Literal["alternating", "symmetric"]
OverRelaxation = Literal["auto", "off"]
Precision = Literal["strict", "fast", "double"]
Preconditioner = Literal["none", "jacobi", "neumann"]
Output = Literal[
    "value",
    "value_linear",
    "primal_bound",
    "potentials",
    "plan",
    "marginals",
    "gradient_points",
    "gradient_masses",
    "gradient_cost",
    "projection",
    "members",
]


@dataclasses.dataclass(frozen=True, eq=False)
class Problem(Generic[R]):
    """A request that is ready to be sent; `R` is the type of its answer."""

    message: pb.SolveRequest
    # Leading dimensions of the batch; () without one.
    batch_shape: tuple[int, ...]
    # Makes the answer of a reply and the batch's shape.
    read: Callable[[pb.SolveResponse, tuple[int, ...]], R]
    # Seconds the call may take; None: the client's default.
    timeout: float | None = None


@dataclasses.dataclass(frozen=True)
class CustomRecipe:
    """The knobs of the named recipes, spelled out."""

    # How the matrix begins: `exp` is exp(max(W, logit_floor)) + offset; `row_softmax` is the softmax of each row of
    # max(W, logit_floor), + offset; it counts as the first iteration's row step and needs order `row_column`.
    start: Start = "exp"
    # Added to each entry after the start. Finite, >= 0.
    offset: float = 0.0
    # The side scaled first. The other side is exact at the end.
    order: Order = "row_column"
    # What a sum is divided through: marginal / sum, / max(sum, guard_value) or / (sum + guard_value).
    guard: Guard = "none"
    # Finite, >= 0; 0 with guard `none`.
    guard_value: float = 0.0
    # Logits below it are raised to it, and their gradient is 0. None: no floor.
    logit_floor: float | None = None


class TransportOptions(TypedDict, total=False):
    """Options of both transport problems, by keyword:

    a, b                [n] or [..., n], [m] or [..., m]: masses, >= 0, total > 0. Default 1 / n and 1 / m each.
                        Balanced problems need equal totals (1e-5 relative).
    epsilon, blur       Regularisation, finite, > 0; exactly one of them. epsilon is in units of the cost;
                        epsilon = blur^p, p the cost's degree (2 for squared distances, 1 for all others).
    outputs             What to return; default value and potentials. `value` (with dual_bound), `value_linear`,
                        `primal_bound`, `potentials` (f, g; debiased also f_aa, g_bb), `plan`, `marginals` (row_sums,
                        column_sums), `gradient_points`, `gradient_masses`, `gradient_cost`, `projection`, `members`.
    apply_v, apply_u    V [..., m, k] and U [..., n, k]: returns plan_v = P V and plan_transpose_u = P^T U.
    tolerance           Stops when both L1 marginal errors are <= it, in units of mass. >= 0, default 1e-5. 0: exactly
                        max_iterations.
    max_iterations      Range [1, server limit], default 1000. Reaching it is no error: see `convergence.converged`.
    update_rule         `alternating` (default) or `symmetric` (GeomLoss's averaged updates).
    over_relaxation     `auto` (default) or `off`.
    scaling             Annealing: blur is multiplied by it each iteration down to its target. In (0, 1). Default: none.
    epsilon_start       First epsilon of an annealed schedule, >= epsilon. Default: the largest cost.
    reach_a, reach_b    Unbalanced: rho = reach^p relaxes that side's marginal. Finite, > 0. Default: balanced.
    debias              Sinkhorn divergence OT(a,b) - OT(a,a)/2 - OT(b,b)/2 (+ mass term). Point clouds only.
    precision           `strict` (default, as accurate as float32 arithmetic), `fast` or `double`.
    initial_f           [n] or [..., n], finite: start. Default 0; `initial_g` [m] or [..., m] likewise.
    time_budget         Anytime answers: seconds after arrival at which iterating ends and the iterate reached is the
                        answer, with its certificate (`convergence.stop_reason` "time_budget") instead of an error.
                        Finite, > 0; choose `timeout` larger, by what outputs and transfer take.
    hessian_x           Point clouds: directions [..., k, n, d] of x. Returns hessian_x and hessian_y, the products of
                        the Hessian of `value` in (x, y) with them, and hessian_convergence. Not for `euclidean`.
    hessian_y           Directions [..., k, m, d] of y likewise; without one of them that side does not move.
    preconditioner      Of their conjugate gradients: `none`, `jacobi` (default) or `neumann`.
    neumann_terms       With `neumann`: range [1, 16], default 3.
    hessian_tolerance   Relative residual at which they stop, >= 0, default 1e-5. STRICT reaches about 1e-6.
    hessian_max_iterations  Range [1, server limit], default 200.
    sparse_threshold    Returns `sparse_plan`: the entries of the plan >= it (and > 0), in units of mass. >= 0.
    sparse_max_entries  Required with it, >= 1: a member with more entries returns their number and mass alone.
    request_id          Up to 128 bytes, echoed in the answer and the server's log.
    timeout             Seconds, > 0: the deadline. Default: the client's. Not in streams.
    """

    a: npt.ArrayLike | None
    b: npt.ArrayLike | None
    epsilon: float | None
    blur: float | None
    outputs: Iterable[Output] | None
    apply_v: npt.ArrayLike | None
    apply_u: npt.ArrayLike | None
    tolerance: float | None
    max_iterations: int | None
    update_rule: UpdateRule | None
    over_relaxation: OverRelaxation | None
    scaling: float | None
    epsilon_start: float | None
    reach_a: float | None
    reach_b: float | None
    debias: bool | None
    precision: Precision | None
    initial_f: npt.ArrayLike | None
    initial_g: npt.ArrayLike | None
    time_budget: float | None
    hessian_x: npt.ArrayLike | None
    hessian_y: npt.ArrayLike | None
    preconditioner: Preconditioner | None
    neumann_terms: int | None
    hessian_tolerance: float | None
    hessian_max_iterations: int | None
    sparse_threshold: float | None
    sparse_max_entries: int | None
    request_id: str | None
    timeout: float | None


def _with_transport_options(build: Callable[_P, R]) -> Callable[_P, R]:
    """Shows TransportOptions in place of **options, to help() and to notebooks."""
    signature = inspect.signature(build)
    fixed = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation.__forward_arg__)
        for name, annotation in TransportOptions.__annotations__.items()
    ]
    build.__signature__ = signature.replace(parameters=[*fixed, *options])  # type: ignore[attr-defined]
    build.__doc__ = f"{build.__doc__}\n    {TransportOptions.__doc__}"
    return build


def normalize(
    logits: npt.ArrayLike | None = None,
    *,
    recipe: Recipe | CustomRecipe = "log_row_column",
    iterations: int | None = None,
    tolerance: float | None = None,
    row_marginals: npt.ArrayLike | None = None,
    column_marginals: npt.ArrayLike | None = None,
    dustbin_score: npt.ArrayLike | None = None,
    cotangent: npt.ArrayLike | None = None,
    backward_mode: BackwardMode | None = None,
    plan: npt.ArrayLike | None = None,
    precision: Precision | None = None,
    outputs: Iterable[Output] = (),
    request_id: str = "",
    timeout: float | None = None,
) -> Problem[results.NormalizationResult]:
    """Scales a matrix of logits to given marginals: P = diag(u) exp(W) diag(v).

    logits              W [..., n, m], finite, |W| <= 1e4 for the stated accuracy.
    recipe              `log_row_column` (default), `exp_column_row`, `deepseek`, `exact` (Newton: both marginals hold
                        to rounding), or a CustomRecipe.
    iterations          At most so many, range [1, server limit]. Default 20; `exact`: 200.
    tolerance           Stops when both L1 marginal errors are <= it. >= 0. Default 0: does all iterations.
    row_marginals       [n] or [..., n], > 0. Default: all 1.
    column_marginals    [m] or [..., m], > 0. Default: all 1; `exact`: the rows' total / m.
    dustbin_score       Scalar or [...]: adds a row and a column of this score (SuperGlue, 2020).
    cotangent           dL/dP, of the plan's shape: returns gradient_logits (and gradient_dustbin_score).
    backward_mode       `unrolled` (exact for the iterations done; default), `implicit` (at the fixed point, with the
                        marginals that P has; default of `exact` and of `plan`), `implicit_unit`, `implicit_full`.
    plan                P [..., n, m] of an earlier answer, instead of logits, with a cotangent: the gradient alone.
    precision           `strict` (default), `fast` or `double`.
    outputs             Of `plan`, `marginals`, `members`. Default: the plan.
    request_id          Up to 128 bytes, echoed in the answer and the server's log.
    timeout             Seconds, > 0: the deadline. Default: the client's. Not in streams.

    Raises TypeError and ValueError for what cannot be sent, and SinkhornError for what the server says of it: see
    `sinkhorn_client.errors`. Reaching `iterations` is no error: see `convergence`.
    """
    message = pb.SolveRequest(request_id=request_id, outputs=_outputs(outputs))
    solver: dict[str, Any] = {"max_iterations": iterations, "tolerance": tolerance, "precision": precision}
    _set_options(message.solver, solver)
    problem = message.normalization
    problem.SetInParent()
    if plan is None or logits is not None:
        _set_recipe(problem, recipe)
    if backward_mode is not None:
        problem.backward_mode = _enum(pb.BackwardMode, "BACKWARD_MODE", "backward_mode", backward_mode)
    matrices = {"logits": logits, "plan": plan, "cotangent": cotangent}
    vectors = {"row_marginals": row_marginals, "column_marginals": column_marginals}
    tensors = _Tensors()
    tensors.add(problem, {name: (value, 2) for name, value in matrices.items()})
    tensors.add(problem, {name: (value, 1) for name, value in vectors.items()})
    tensors.add(problem, {"dustbin_score": (dustbin_score, 0)})
    return Problem(message, tensors.batch_shape, results.normalization_result, timeout)


@_with_transport_options
def transport(cost: npt.ArrayLike, **options: Unpack[TransportOptions]) -> Problem[results.TransportResult]:
    """Optimal transport with a cost matrix.

    cost                C [..., n, m], finite.

    Raises TypeError and ValueError for what cannot be sent, and SinkhornError for what the server says of it: see
    `sinkhorn_client.errors`.
    """
    message = pb.SolveRequest()
    tensors = _Tensors()
    tensors.add(message.dense, {"cost": (cost, 2)})
    return _transport(message, message.dense, tensors, options)


@_with_transport_options
def point_cloud(
    x: npt.ArrayLike, y: npt.ArrayLike, *, cost: Cost, **options: Unpack[TransportOptions]
) -> Problem[results.TransportResult]:
    """Optimal transport between point clouds; the n x m cost matrix is never sent.

    x, y                Points [..., n, d] and [..., m, d], of one dtype, finite.
    cost                `squared_euclidean` |x - y|^2 (POT, OTT), `half_squared_euclidean` |x - y|^2 / 2 (GeomLoss),
                        `euclidean` |x - y|, `cosine` 1 - cos(x, y) or `negative_dot` -<x, y>.
                        Required: the factor of a squared distance rescales epsilon.

    Raises TypeError and ValueError for what cannot be sent, and SinkhornError for what the server says of it: see
    `sinkhorn_client.errors`.
    """
    message = pb.SolveRequest()
    message.point_cloud.cost = _enum(pb.CostFunction, "COST_FUNCTION", "cost", cost)
    x = _tensor.as_float_array(x)
    tensors = _Tensors()
    tensors.add(message.point_cloud, {"x": (x, 2), "y": (_tensor.as_float_array(y, like=x.dtype), 2)})
    return _transport(message, message.point_cloud, tensors, options)


def _transport(
    message: pb.SolveRequest, problem: Any, tensors: _Tensors, options: TransportOptions
) -> Problem[results.TransportResult]:
    unknown = options.keys() - TransportOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown option {', '.join(sorted(unknown))}; see TransportOptions")
    rest: dict[str, Any] = dict(options)
    message.request_id = rest.pop("request_id", None) or ""
    message.outputs.extend(_outputs(rest.pop("outputs", None) or ()))
    timeout = rest.pop("timeout", None)
    tensors.add(problem, {name: (rest.pop(name, None), 1) for name in ("a", "b")})
    tensors.add(message, {name: (rest.pop(name, None), 2) for name in ("apply_v", "apply_u")})
    tensors.add(message.solver, {name: (rest.pop(name, None), 1) for name in ("initial_f", "initial_g")})
    _set_hessian(message, tensors, rest)
    _set_sparse_plan(message, rest)
    _set_options(message.solver, rest)
    return Problem(message, tensors.batch_shape, results.transport_result, timeout)


def _set_hessian(message: pb.SolveRequest, tensors: _Tensors, options: dict[str, Any]) -> None:
    """Takes the options of Hessian-vector products out of `options`."""
    arrays = {name: options.pop(f"hessian_{name}", None) for name in ("x", "y")}
    scalars = {name: options.pop(f"hessian_{name}", None) for name in ("tolerance", "max_iterations")}
    scalars |= {name: options.pop(name, None) for name in ("preconditioner", "neumann_terms")}
    if all(value is None for value in (*arrays.values(), *scalars.values())):
        return
    message.hessian.SetInParent()
    tensors.add(message.hessian, {name: (value, 3) for name, value in arrays.items()})
    _set_options(message.hessian, scalars)


def _set_sparse_plan(message: pb.SolveRequest, options: dict[str, Any]) -> None:
    """Takes the options of sparse plans out of `options`."""
    threshold, max_entries = options.pop("sparse_threshold", None), options.pop("sparse_max_entries", None)
    if threshold is None and max_entries is None:
        return
    message.sparse_plan.threshold = float(threshold or 0)
    message.sparse_plan.max_entries = int(max_entries or 0)


class _Tensors:
    """Fills tensor fields; leading dimensions of any set the batch's shape."""

    def __init__(self) -> None:
        self.batch_shape: tuple[int, ...] = ()

    def add(self, message: Any, values: Mapping[str, tuple[npt.ArrayLike | None, int]]) -> None:
        """Sets each named field that has a value; with it goes the number of its own, trailing dimensions."""
        for name, (value, dimensions) in values.items():
            if value is None:
                continue
            tensor = _tensor.encode(value)
            self.batch_shape = self.batch_shape or tuple(tensor.shape[: max(0, len(tensor.shape) - dimensions)])
            getattr(message, name).CopyFrom(tensor)


def _set_recipe(problem: pb.NormalizationProblem, recipe: Recipe | CustomRecipe) -> None:
    name = "custom" if isinstance(recipe, CustomRecipe) else recipe
    problem.recipe = _enum(pb.NormalizationRecipe, "NORMALIZATION_RECIPE", "recipe", name)
    if not isinstance(recipe, CustomRecipe):
        return
    custom = problem.custom
    custom.start = _enum(pb.NormalizationStart, "NORMALIZATION_START", "start", recipe.start)
    custom.order = _enum(pb.NormalizationOrder, "NORMALIZATION_ORDER", "order", recipe.order)
    custom.guard = _enum(pb.NormalizationGuard, "NORMALIZATION_GUARD", "guard", recipe.guard)
    custom.offset, custom.guard_value = float(recipe.offset), float(recipe.guard_value)
    if recipe.logit_floor is not None:
        custom.logit_floor = float(recipe.logit_floor)


_OPTION_ENUMS: dict[str, tuple[Any, str]] = {
    "update_rule": (pb.UpdateRule, "UPDATE_RULE"),
    "over_relaxation": (pb.OverRelaxation, "OVER_RELAXATION"),
    "precision": (pb.Precision, "PRECISION"),
    "preconditioner": (pb.Preconditioner, "PRECONDITIONER"),
}


def _set_options(solver: pb.SolverOptions | pb.HessianProducts, options: Mapping[str, Any]) -> None:
    """Sets the given ones of the scalar fields of `solver`, which are named as the options."""
    for name, value in options.items():
        if value is None:
            continue
        if name in _OPTION_ENUMS:
            setattr(solver, name, _enum(*_OPTION_ENUMS[name], name, value))
        elif name in ("max_iterations", "neumann_terms", "debias"):
            setattr(solver, name, value)
        else:
            setattr(solver, name, float(value))


def _outputs(names: Iterable[str]) -> list[Any]:
    if isinstance(names, str):
        raise TypeError(f"outputs must be a list of names; got {names!r}")
    return [_enum(pb.Output, "OUTPUT", "outputs", name) for name in names]


def _enum(kind: Any, prefix: str, argument: str, word: str) -> Any:
    """The value of an enumeration for its word. Raises ValueError that lists the words."""
    words = [name.removeprefix(f"{prefix}_").lower() for name, value in kind.items() if value != 0]
    if word not in words:
        raise ValueError(f"{argument} must be one of {', '.join(words)}; got {word!r}")
    return kind.Value(f"{prefix}_{word.upper()}")
