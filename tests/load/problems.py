"""The problems of the soak: sizes 4 to 4,096, all kinds and outputs, and for each how its answer is checked.

The first answer to each problem is checked in float64, by formulas of tests/python/numpy_reference.py, from what the
reply itself carries: potentials, plan, sums. All later answers must have its bits: so the service promises, whatever
the company.
"""

import dataclasses
import hashlib
from collections.abc import Callable

import numpy as np
import numpy_reference as reference
from sinkhorn_client import problems
from sinkhorn_client._proto import sinkhorn_pb2 as pb

ALL_OF_CLOUDS = [
    *["value", "value_linear", "primal_bound", "potentials", "plan", "marginals"],
    *["gradient_points", "gradient_masses", "projection", "members"],
]
ALL_OF_MATRICES = [*ALL_OF_CLOUDS[:6], "gradient_masses", "gradient_cost", "members"]
LARGE = ["value", "potentials", "gradient_points", "projection"]  # Nothing n x m.


@dataclasses.dataclass
class Case:
    """One problem of the load."""

    name: str
    weight: float  # Of its share among the requests.
    problem: problems.Problem
    check: Callable  # Of the first answer, as the client's library reads it. Raises AssertionError.
    body: bytes = b""  # The request without its id.
    bits: bytes = b""  # Of the answer.

    def __post_init__(self):
        self.body = self.problem.message.SerializeToString()

    def learn(self, reply):
        self.check(self.problem.read(reply, self.problem.batch_shape))
        self.bits = bits_of(reply)


def bits_of(reply):
    """What of a reply depends on its problem alone."""
    kept = pb.SolveResponse()
    kept.CopyFrom(reply)
    kept.ClearField("request_id")
    kept.ClearField("execution")
    return hashlib.blake2b(kept.SerializeToString(deterministic=True)).digest()


# ---- Checks ---------------------------------------------------------------------------------------------------------


def close(actual, wanted, bound):
    assert np.all(np.isfinite(actual)) and np.max(np.abs(actual - wanted)) <= bound, np.max(np.abs(actual - wanted))


def check_transport(cost, epsilon):
    """That all outputs belong to the potentials of the same reply, and these to the problem. Costs are of size 1."""

    def check(result):
        n, m = cost.shape
        at = reference.Transport(cost, np.full(n, 1 / n), np.full(m, 1 / m), epsilon, f=result.f, g=result.g)
        plan = at.plan
        errors = np.abs(plan.sum(axis=1) - at.a).sum(), np.abs(plan.sum(axis=0) - at.b).sum()
        close(errors[0], result.convergence.marginal_error_a, 2e-4)
        close(errors[1], result.convergence.marginal_error_b, 2e-4)
        assert result.convergence.converged and max(errors) < 1e-3
        dual = at.a @ at.f + at.b @ at.g - epsilon * (plan.sum() - 1)
        close(result.value, dual, 1e-5)
        assert result.dual_bound <= result.value + 1e-6
        if result.plan is not None:
            close(result.plan, plan, 1e-4 * plan.max())
            close(result.row_sums, plan.sum(axis=1), 1e-6)
            assert result.primal_bound >= result.dual_bound
        if result.projection_x is not None:
            assert np.all(np.isfinite(result.projection_x)) and np.all(np.isfinite(result.gradient_x))

    return check


def check_plan(logits, iterations):
    """Of the recipe that people call log-domain: rows, then columns."""

    def check(result):
        for matrix, plan in zip(logits.reshape(-1, *logits.shape[-2:]), result.plan.reshape(-1, *logits.shape[-2:])):
            steps = reference.RECIPES["log_row_column"]
            close(plan, reference.normalize(matrix.astype(np.float64), steps, iterations), 2e-5)
        if result.gradient_logits is not None:
            # Scaling a row or a column of exp(logits) changes nothing once it has converged.
            close(result.gradient_logits.sum(axis=-1), 0, 2e-3)

    return check


# ---- The problems ---------------------------------------------------------------------------------------------------


def cloud(random, n, m, dimension, weight, outputs, epsilon=0.1):
    x, y = random.random((n, dimension), np.float32), random.random((m, dimension), np.float32)
    x, y = x / np.float32(np.sqrt(dimension)), y / np.float32(np.sqrt(dimension))  # Costs are at most 1.
    problem = problems.point_cloud(x, y, cost="squared_euclidean", epsilon=epsilon, outputs=outputs)
    cost = reference.squared_distances(x.astype(np.float64), y.astype(np.float64))
    return Case(f"cloud {n} x {m}, d = {dimension}", weight, problem, check_transport(cost, epsilon))


def dense(random, n, m, weight, outputs, epsilon=0.1):
    cost = random.random((n, m), np.float32)
    problem = problems.transport(cost, epsilon=epsilon, outputs=outputs)
    return Case(f"dense {n} x {m}", weight, problem, check_transport(cost.astype(np.float64), epsilon))


def normalization(random, count, n, weight, backward=False):
    logits = random.standard_normal((count, n, n), np.float32)
    cotangent = random.standard_normal(logits.shape, np.float32) if backward else None
    mode = "unrolled" if backward else None
    problem = problems.normalize(logits, iterations=20, cotangent=cotangent, backward_mode=mode)
    name = f"{count} x {n} x {n}" + (" with backward" if backward else "")
    return Case(name, weight, problem, check_plan(logits, 20))


def cases(seed=1):
    """About half of them small, as what trains models sends; a few large ones make most of the work."""
    random = np.random.default_rng(seed)
    return [
        normalization(random, 32, 4, 20),
        normalization(random, 32, 4, 15, backward=True),
        normalization(random, 128, 8, 8, backward=True),
        normalization(random, 8, 64, 5),
        normalization(random, 2, 256, 2, backward=True),
        normalization(random, 1, 1000, 0.5),
        cloud(random, 4, 4, 2, 8, ALL_OF_CLOUDS),
        cloud(random, 50, 60, 3, 8, ALL_OF_CLOUDS),
        cloud(random, 256, 256, 64, 5, ALL_OF_CLOUDS),
        cloud(random, 1000, 900, 3, 2, LARGE),
        cloud(random, 4096, 4096, 3, 0.3, LARGE),
        cloud(random, 4096, 17, 8, 2, ALL_OF_CLOUDS),
        dense(random, 5, 7, 8, ALL_OF_MATRICES),
        dense(random, 100, 100, 6, ALL_OF_MATRICES),
        dense(random, 512, 300, 2, ALL_OF_MATRICES),
        dense(random, 2048, 2048, 0.2, ["value", "potentials"]),
    ]


def endless(random):
    """Longer than any caller of the soak waits, and nobody can tell in advance."""
    x, y = random.random((2, 2000, 3), np.float32)
    return problems.point_cloud(
        *(x, y), cost="squared_euclidean", epsilon=1e-5, tolerance=1e-12, max_iterations=100000, outputs=["value"]
    ).message


def bad_requests(random):
    """[(bytes, gRPC code, reason)]: what is refused, and how."""
    fine = problems.transport(random.random((4, 5), np.float32), epsilon=0.1).message

    def changed(change):
        message = pb.SolveRequest()
        message.CopyFrom(fine)
        change(message)
        return message.SerializeToString()

    nan = np.full((4, 5), np.nan, np.float32).tobytes()
    invalid = ("INVALID_ARGUMENT", "INVALID_FIELD")
    return [
        (changed(lambda request: setattr(request.solver, "epsilon", -1.0)), *invalid),
        (changed(lambda request: setattr(request.dense.cost, "data", nan)), *invalid),
        (changed(lambda request: setattr(request.dense.cost, "data", b"123")), *invalid),
        (changed(lambda request: setattr(request.solver, "max_iterations", 1 << 30)), invalid[0], "PROBLEM_TOO_LARGE"),
        (changed(lambda request: request.ClearField("dense")), *invalid),
        (b"\xff" * 100, *invalid),
    ]
