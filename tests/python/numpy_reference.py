"""What the service must answer, in plain float64 numpy: one short function per formula of the contract.

Derivatives are not derived: they come from complex steps (normalisation) and central differences (transport) of the
same functions, or from a dense solve of the system that the contract names (implicit modes).
"""

from __future__ import annotations

import dataclasses

import numpy as np

# ---- Normalisation ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Steps:
    """The knobs of a recipe (proto: CustomRecipe)."""

    start: str = "exp"
    offset: float = 0.0
    order: str = "row_column"
    guard: str = "none"
    guard_value: float = 0.0
    logit_floor: float = -np.inf


RECIPES = {
    "log_row_column": Steps(logit_floor=-1e5),
    "exp_column_row": Steps(order="column_row", guard="max", guard_value=1e-10),
    "deepseek": Steps("row_softmax", 1e-6, "row_column", "add", 1e-6),
}


def normalize(logits, steps, iterations, row_marginals=None, column_marginals=None, dustbin_score=None):
    """P of one matrix by the steps of a recipe. Takes complex logits too, for complex-step derivatives."""
    n, m = logits.shape
    rows = np.ones(n) if row_marginals is None else np.asarray(row_marginals, np.float64)
    columns = np.ones(m) if column_marginals is None else np.asarray(column_marginals, np.float64)
    if dustbin_score is not None:
        wide = np.full((n + 1, m + 1), dustbin_score, np.result_type(logits, np.float64, np.asarray(dustbin_score)))
        wide[:n, :m] = logits
        rows, columns, logits = np.append(rows, columns.sum()), np.append(columns, rows.sum()), wide
    logits = np.where(logits.real > steps.logit_floor, logits, steps.logit_floor)
    # exp(W - largest) leaves the result of guarded recipes the same only if nothing is shifted: only the log form is.
    shift = logits.real.max() if steps.guard == "none" and steps.offset == 0 else 0.0
    if steps.start == "row_softmax":
        p = np.exp(logits - logits.real.max(axis=1, keepdims=True))
        p = p / p.sum(axis=1, keepdims=True) * rows[:, None] + steps.offset
    else:
        p = np.exp(logits - shift) + steps.offset
    for iteration in range(iterations):
        for side in steps.order.split("_"):
            if side == "row" and not (iteration == 0 and steps.start == "row_softmax"):
                p = p * (rows / guarded(p.sum(axis=1), steps))[:, None]
            if side == "column":
                p = p * (columns / guarded(p.sum(axis=0), steps))[None, :]
    return p


def guarded(total, steps):
    if steps.guard == "max":
        return np.where(total.real > steps.guard_value, total, steps.guard_value)
    return total + steps.guard_value if steps.guard == "add" else total


def unrolled_gradient(logits, cotangent, forward):
    """dL/dlogits of L = sum(cotangent * forward(logits)), by a complex step in each entry: exact to rounding."""
    gradient = np.zeros(logits.shape)
    for index in np.ndindex(*logits.shape):
        stepped = logits.astype(complex)
        stepped[index] += 1e-30j
        gradient[index] = (cotangent * forward(stepped)).sum().imag / 1e-30
    return gradient


def implicit_gradient(plan, cotangent, unit_marginals=False):
    """dL/dlogits at the fixed point: a dense least-squares solve of [diag r, P; P^T, diag c] (alpha, beta) = s."""
    r = np.ones(plan.shape[0]) if unit_marginals else plan.sum(axis=1)
    c = np.ones(plan.shape[1]) if unit_marginals else plan.sum(axis=0)
    weighted = plan * cotangent
    system = np.block([[np.diag(r), plan], [plan.T, np.diag(c)]])
    solution = np.linalg.lstsq(system, np.concatenate([weighted.sum(axis=1), weighted.sum(axis=0)]), rcond=1e-12)[0]
    alpha, beta = solution[: len(r)], solution[len(r) :]
    return (cotangent - alpha[:, None] - beta[None, :]) * plan


# ---- Transport ----------------------------------------------------------------------------------


@dataclasses.dataclass
class Transport:
    """A problem and its potentials."""

    cost: np.ndarray
    a: np.ndarray
    b: np.ndarray
    epsilon: float
    rho_a: float = np.inf
    rho_b: float = np.inf
    f: np.ndarray = None
    g: np.ndarray = None
    iterations: int = 0

    @property
    def plan(self):
        with np.errstate(divide="ignore"):  # log 0 of an empty bin.
            log_mass = np.log(self.a)[:, None] + np.log(self.b)[None, :]
        return np.exp(log_mass + (self.f[:, None] + self.g[None, :] - self.cost) / self.epsilon)

    @property
    def errors(self):
        """The two marginal errors of the certificate."""
        target_a = self.a * np.exp(-self.f / self.rho_a)
        target_b = self.b * np.exp(-self.g / self.rho_b)
        return np.abs(self.plan.sum(axis=1) - target_a).sum(), np.abs(self.plan.sum(axis=0) - target_b).sum()

    @property
    def dual(self):
        """The dual objective at the potentials; the optimal value at the solution."""
        mass = self.plan.sum() - self.a.sum() * self.b.sum()
        return side(self.a, self.f, self.rho_a) + side(self.b, self.g, self.rho_b) - self.epsilon * mass

    @property
    def primal(self):
        """<C, P> + epsilon KL(P | a b^T) + the marginals' penalties, of the plan as it is."""
        value = (self.cost * self.plan).sum() + self.epsilon * divergence(self.plan, np.outer(self.a, self.b))
        if np.isfinite(self.rho_a):
            value += self.rho_a * divergence(self.plan.sum(axis=1), self.a)
        if np.isfinite(self.rho_b):
            value += self.rho_b * divergence(self.plan.sum(axis=0), self.b)
        return value


def side(mass, potential, rho):
    return (mass * potential).sum() if np.isinf(rho) else rho * (mass * -np.expm1(-potential / rho)).sum()


def divergence(p, q):
    used = p > 0
    return (p[used] * np.log(p[used] / q[used])).sum() - p.sum() + q.sum()


def half_step(cost, g, b, epsilon, rho):
    """f_i = -epsilon LSE_j[log b_j + (g_j - C_ij) / epsilon], damped on an unbalanced side."""
    damping = 1.0 if np.isinf(rho) else 1.0 / (1.0 + epsilon / rho)
    exponent = np.where(b > 0, (g - cost) / epsilon, -np.inf)
    top = exponent.max(axis=1)
    return -epsilon * damping * (top + np.log(np.exp(exponent - top[:, None]) @ b))


def solve(cost, a=None, b=None, *, epsilon, rho_a=np.inf, rho_b=np.inf, update_rule="alternating", iterations=None):
    """So many iterations from zero potentials; without `iterations`, until next to nothing moves and as many again."""
    n, m = cost.shape
    a = np.full(n, 1 / n) if a is None else np.asarray(a, np.float64)
    b = np.full(m, 1 / m) if b is None else np.asarray(b, np.float64)
    p = Transport(cost, a, b, epsilon, rho_a, rho_b, np.zeros(n), np.zeros(m))
    if update_rule == "symmetric":
        p.f, p.g = (
            half_step(cost, p.g, b, epsilon, rho_a),
            half_step(cost.T, p.f, a, epsilon, rho_b),
        )
    last = iterations or 100_000
    while p.iterations < last:
        before = p.f
        f = half_step(cost, p.g, b, epsilon, rho_a)
        if update_rule == "symmetric":
            p.f, p.g = (p.f + f) / 2, (p.g + half_step(cost.T, p.f, a, epsilon, rho_b)) / 2
        else:
            p.f, p.g = f, half_step(cost.T, f, a, epsilon, rho_b)
        p.iterations += 1
        if iterations is None and np.abs(p.f - before).max() <= 1e-13 * (1 + np.abs(p.f).max()):
            last, iterations = 2 * p.iterations, p.iterations
    return p


def squared_distances(x, y, kappa=1.0):
    return kappa * ((x[:, None, :] - y[None, :, :]) ** 2).sum(axis=-1)


def costs(x, y, cost):
    """Cost matrix [n, m] of point clouds under a cost of the contract."""
    if cost == "euclidean":
        return np.sqrt(squared_distances(x, y))
    if cost == "negative_dot":
        return -x @ y.T
    if cost == "cosine":
        return 1 - (x @ y.T) / np.linalg.norm(x, axis=1)[:, None] / np.linalg.norm(y, axis=1)[None, :]
    return squared_distances(x, y, {"squared_euclidean": 1.0, "half_squared_euclidean": 0.5}[cost])


def debiased(x, y, a=None, b=None, *, kappa=1.0, **options):
    """The Sinkhorn divergence OT(a,b) - OT(a,a)/2 - OT(b,b)/2 + epsilon/2 (mass a - mass b)^2."""
    cross = solve(squared_distances(x, y, kappa), a, b, **options)
    rho_a, rho_b = options.pop("rho_a", np.inf), options.pop("rho_b", np.inf)
    aa = solve(squared_distances(x, x, kappa), a, a, rho_a=rho_a, rho_b=rho_a, **options)
    bb = solve(squared_distances(y, y, kappa), b, b, rho_a=rho_b, rho_b=rho_b, **options)
    masses = cross.a.sum() - cross.b.sum()
    return cross.dual - aa.dual / 2 - bb.dual / 2 + cross.epsilon / 2 * masses**2


def central_differences(function, at, step=1e-5):
    """The gradient of a scalar function, entry by entry."""
    gradient = np.zeros(at.shape)
    for index in np.ndindex(*at.shape):
        moved = at.copy()
        moved[index] += step
        above = function(moved)
        moved[index] -= 2 * step
        gradient[index] = (above - function(moved)) / (2 * step)
    return gradient
