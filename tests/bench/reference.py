"""float64 NumPy, one plain loop per formula: what every answer is checked against before it is timed."""

import numpy as np


def squared_distances(x, y):
    x, y = x.astype(np.float64), y.astype(np.float64)
    return np.maximum((x**2).sum(1)[:, None] + (y**2).sum(1) - 2 * (x @ y.T), 0)


def _log_sum_exp(values, axis):
    top = values.max(axis=axis, keepdims=True)
    values = np.exp(values - top)
    return np.log(values.sum(axis=axis)) + np.squeeze(top, axis)


def potentials(cost, epsilon, iterations):
    """f from g = 0, g from f, and so on; uniform masses."""
    n, m = cost.shape
    scaled = cost.astype(np.float64) / epsilon
    g = np.zeros(m)
    for _ in range(iterations):
        f = -_log_sum_exp((g - np.log(m))[None, :] - scaled, axis=1)
        g = -_log_sum_exp((f - np.log(n))[:, None] - scaled, axis=0)
    return epsilon * f, epsilon * g


def potential_error(answer, expected, epsilon):
    """Largest difference in units of epsilon, after the constant that f and g share has been taken out."""
    (f, g), (f0, g0) = [[np.asarray(v, np.float64).ravel() for v in pair] for pair in (answer, expected)]
    shift = (np.mean(f - f0) - np.mean(g - g0)) / 2
    return float(max(np.abs(f - f0 - shift).max(), np.abs(g - g0 + shift).max()) / epsilon)


def marginal_error(f, g, cost, epsilon):
    """The larger of |P 1 - a|_1 and |P^T 1 - b|_1; uniform masses."""
    n, m = cost.shape
    f, g = np.asarray(f, np.float64).ravel(), np.asarray(g, np.float64).ravel()
    with np.errstate(over="ignore", invalid="ignore"):
        plan = np.exp((f[:, None] + g - cost) / epsilon) / (n * m)
        error = max(np.abs(plan.sum(1) - 1 / n).sum(), np.abs(plan.sum(0) - 1 / m).sum())
    return float(error) if np.isfinite(error) else float("inf")


def log_row_column(logits, iterations, cotangent=None):
    """P of the recipe, and the unrolled gradient if there is a cotangent."""
    log_plan = np.maximum(logits.astype(np.float64), -1e5)
    steps = []
    for _ in range(iterations):
        for axis in (2, 1):
            log_plan = log_plan - np.expand_dims(_log_sum_exp(log_plan, axis), axis)
            steps.append((axis, log_plan))
    plan = np.exp(log_plan)
    if cotangent is None:
        return plan, None
    gradient = plan * cotangent
    for axis, after in reversed(steps):
        gradient = gradient - np.exp(after) * gradient.sum(axis=axis, keepdims=True)
    return plan, gradient
