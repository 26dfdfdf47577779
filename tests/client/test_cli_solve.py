"""`sinkhorn solve`: every kind of problem and option from files and numbers, against NumPy in float64."""

import numpy as np
import pytest

# ---- The formulas, in float64 -------------------------------------------------------------------


def log_sum_exp(values, axis):
    largest = values.max(axis=axis, keepdims=True)
    return largest + np.log(np.exp(values - largest).sum(axis=axis, keepdims=True))


def log_row_column(logits, iterations):
    scaled = np.asarray(logits, np.float64)
    for _ in range(iterations):
        scaled = scaled - log_sum_exp(scaled, -1)
        scaled = scaled - log_sum_exp(scaled, -2)
    return np.exp(scaled)


def exp_column_row(logits, iterations):
    scaled = np.exp(np.asarray(logits, np.float64))
    for _ in range(iterations):
        scaled = scaled / scaled.sum(axis=-2, keepdims=True)
        scaled = scaled / scaled.sum(axis=-1, keepdims=True)
    return scaled


def transport(cost, a, b, epsilon, iterations, rho=np.inf):
    """Plan and dual value after alternating updates; `rho` relaxes both sides."""
    damping = 1 / (1 + epsilon / rho)
    g = np.zeros(len(b))
    for _ in range(iterations):
        f = -epsilon * damping * log_sum_exp(np.log(b) + (g - cost) / epsilon, 1)[:, 0]
        g = -epsilon * damping * log_sum_exp(np.log(a)[:, None] + (f[:, None] - cost) / epsilon, 0)[0]
    plan = a[:, None] * b * np.exp((f[:, None] + g - cost) / epsilon)
    if np.isinf(rho):
        return plan, a @ f + b @ g - epsilon * (plan.sum() - 1)
    sides = rho * (a @ (1 - np.exp(-f / rho)) + b @ (1 - np.exp(-g / rho)))
    return plan, sides - epsilon * (plan.sum() - a.sum() * b.sum())


def squared_distances(x, y):
    return ((x[:, None] - y[None]) ** 2).sum(axis=2)


# ---- Normalisation ------------------------------------------------------------------------------


def test_normalization_of_a_batch(cli, files, tmp_path):
    logits = np.random.default_rng(1).normal(size=(5, 6, 4)).astype(np.float32)

    reply, outputs = cli.solve(
        tmp_path / "out", logits=files("w", logits), max_iterations=7, outputs="plan,marginals,members"
    )

    assert outputs["plan"].dtype == np.float32 and outputs["plan"].shape == (5, 6, 4)
    np.testing.assert_allclose(outputs["plan"], log_row_column(logits, 7), rtol=2e-5)
    np.testing.assert_allclose(outputs["row_sums"], log_row_column(logits, 7).sum(axis=2), rtol=2e-5)
    assert reply["convergence"]["iterations"] == 7
    assert len(reply["members"]) == 5
    assert reply["plan"]["file"].endswith("out/plan.npy") and reply["plan"]["shape"] == [5, 6, 4]


@pytest.mark.parametrize("dtype, tolerance", [("float16", 1e-3), ("bfloat16", 8e-3), ("float64", 2e-5)])
def test_normalization_in_other_types(cli, files, tmp_path, dtype, tolerance):
    logits = np.array([[0.5, -1, 2], [1, 1.5, -0.25], [0, 0.75, 1]])  # Exact in all of them.

    reply, outputs = cli.solve(tmp_path / "out", logits=files("w", logits), dtype=dtype)

    assert reply["plan"]["dtype"] == dtype
    np.testing.assert_allclose(outputs["plan"].astype(np.float64), log_row_column(logits, 20), rtol=tolerance)


def test_normalization_recipes(cli, files, tmp_path):
    logits = np.random.default_rng(2).normal(size=(5, 5)).astype(np.float32)
    path = files("w", logits)

    _, columns_first = cli.solve(tmp_path / "a", logits=path, recipe="exp_column_row", max_iterations=6)
    _, spelled_out = cli.solve(
        tmp_path / "b",
        logits=path,
        recipe="custom",
        custom_start="exp",
        custom_order="column_row",
        custom_guard="max",
        custom_guard_value=1e-10,
        max_iterations=6,
    )
    _, exact = cli.solve(tmp_path / "c", logits=path, recipe="exact", dtype="float64", precision="double")
    _, deepseek = cli.solve(tmp_path / "d", logits=path, recipe="deepseek", max_iterations=200)

    np.testing.assert_allclose(columns_first["plan"], exp_column_row(logits, 6), rtol=2e-5)
    np.testing.assert_allclose(spelled_out["plan"], exp_column_row(logits, 6), rtol=2e-5)
    np.testing.assert_allclose(exact["plan"].sum(axis=0), 1, rtol=1e-12)
    np.testing.assert_allclose(exact["plan"].sum(axis=1), 1, rtol=1e-12)
    np.testing.assert_allclose(deepseek["plan"], exact["plan"], atol=2e-5)  # Its guard of 1e-6 stays.


def test_normalization_with_marginals_and_dustbin(cli, tmp_path):
    # Marginals: rows 1 and 2, columns 2 and 1. Ends on columns.
    reply, outputs = cli.solve(
        tmp_path / "a", logits="0,1;2,0.5", row_marginals="1,2", column_marginals="2,1", max_iterations=200,
        outputs="plan,marginals",
    )
    np.testing.assert_allclose(outputs["row_sums"], [1, 2], rtol=1e-5)
    np.testing.assert_allclose(outputs["column_sums"], [2, 1], rtol=1e-5)

    reply, outputs = cli.solve(
        tmp_path / "b", logits="0,1,2;3,0,1", dustbin_score=0.5, max_iterations=500, outputs="plan,marginals"
    )
    assert reply["plan"]["shape"] == [3, 4]
    np.testing.assert_allclose(outputs["row_sums"], [1, 1, 3], rtol=1e-4)
    np.testing.assert_allclose(outputs["column_sums"], [1, 1, 1, 2], rtol=1e-4)


def test_normalization_gradient(cli, files, tmp_path):
    random = np.random.default_rng(3)
    logits, cotangent = random.normal(size=(2, 4, 3))
    _, outputs = cli.solve(
        tmp_path / "out",
        logits=files("w", logits),
        cotangent=files("g", cotangent),
        max_iterations=5,
        precision="double",
    )

    differences = np.empty_like(logits)
    for index in np.ndindex(logits.shape):
        step = np.zeros_like(logits)
        step[index] = 1e-6
        change = log_row_column(logits + step, 5) - log_row_column(logits - step, 5)
        differences[index] = (cotangent * change).sum() / 2e-6
    np.testing.assert_allclose(outputs["gradient_logits"], differences, rtol=1e-5, atol=1e-9)


def test_backward_from_a_plan(cli, files, tmp_path):
    random = np.random.default_rng(4)
    logits, cotangent = random.normal(size=(2, 4, 4))
    plan = log_row_column(logits, 500)
    flags = dict(cotangent=files("g", cotangent), precision="double")

    _, outputs = cli.solve(tmp_path / "a", plan=files("p", plan), backward_mode="implicit", **flags)
    _, unrolled = cli.solve(tmp_path / "b", logits=files("w", logits), max_iterations=500, **flags)

    np.testing.assert_allclose(outputs["gradient_logits"], unrolled["gradient_logits"], atol=1e-7)


# ---- Transport ----------------------------------------------------------------------------------


def test_dense_transport(cli, files, tmp_path):
    random = np.random.default_rng(5)
    cost, v = random.random((30, 20)), random.random((20, 2))
    a, b = random.dirichlet(np.ones(30)), random.dirichlet(np.ones(20))
    np.savetxt(tmp_path / "a.csv", a)  # One mass a line.

    reply, outputs = cli.solve(
        tmp_path / "out",
        cost=files("c", cost),
        a=tmp_path / "a.csv",
        b=files("b", b),
        apply_v=files("v", v),
        epsilon=0.1,
        tolerance=1e-8,
        precision="double",
        dtype="float64",
        outputs="value,value_linear,primal_bound,potentials,plan,marginals,gradient_cost,gradient_masses",
    )

    # The text's masses are float32, so they miss a total of 1 by rounding, which the tolerance of 1e-5 allows.
    plan, value = transport(cost, a.astype(np.float32).astype(np.float64), b, 0.1, 2000)
    np.testing.assert_allclose(outputs["plan"], plan, atol=1e-7)
    np.testing.assert_allclose(outputs["gradient_cost"], plan, atol=1e-7)
    np.testing.assert_allclose(outputs["plan_v"], plan @ v, atol=1e-7)
    np.testing.assert_allclose(outputs["value"], [value], rtol=1e-6)
    np.testing.assert_allclose(outputs["value_linear"], [(plan * cost).sum()], rtol=1e-6)
    assert reply["dual_bound"][0] <= value * (1 + 1e-6) and reply["primal_bound"][0] >= value * (1 - 1e-6)
    assert reply["convergence"]["converged"] and reply["convergence"]["stop_reason"] == "tolerance"
    f, gradient = outputs["f"], outputs["gradient_a"]
    np.testing.assert_allclose(f - f[0], gradient - gradient[0], atol=1e-7)


@pytest.mark.parametrize("cost_function, factor", [("squared_euclidean", 1), ("half_squared_euclidean", 0.5)])
def test_point_clouds(cli, files, tmp_path, cost_function, factor):
    random = np.random.default_rng(6)
    x, y = random.random((40, 3)), random.random((50, 3))

    _, outputs = cli.solve(
        tmp_path / "out",
        x=files("x", x.astype(np.float32)),
        y=files("y", y.astype(np.float32)),
        cost_function=cost_function,
        blur=0.3,
        tolerance=1e-6,
        outputs="value,plan,gradient_points,projection",
    )

    a, b = np.full(40, 1 / 40), np.full(50, 1 / 50)
    plan, value = transport(factor * squared_distances(x, y), a, b, 0.09, 2000)
    np.testing.assert_allclose(outputs["value"], [value], rtol=1e-4)
    np.testing.assert_allclose(outputs["plan"], plan, rtol=2e-3)
    np.testing.assert_allclose(outputs["projection_x"], plan @ y * 40, atol=1e-4)
    np.testing.assert_allclose(outputs["gradient_x"], 2 * factor * (x / 40 - plan @ y), atol=1e-5)


def test_point_cloud_options(cli, files, tmp_path):
    random = np.random.default_rng(7)
    x, y = random.random((25, 2)), random.random((30, 2)) + 0.2
    flags = dict(x=files("x", x), y=files("y", y), cost_function="squared_euclidean", epsilon=0.1, precision="double")
    a, b = np.full(25, 1 / 25), np.full(30, 1 / 30)
    cross = transport(squared_distances(x, y), a, b, 0.1, 3000)[1]
    divergence = (
        cross
        - transport(squared_distances(x, x), a, a, 0.1, 3000)[1] / 2
        - transport(squared_distances(y, y), b, b, 0.1, 3000)[1] / 2
    )
    relaxed = transport(squared_distances(x, y), a, b, 0.1, 3000, rho=0.25)[1]

    debiased = cli.solve(tmp_path / "a", debias="true", tolerance=1e-8, **flags)[0]
    unbalanced = cli.solve(tmp_path / "b", reach_a=0.5, reach_b=0.5, tolerance=1e-8, **flags)[0]
    annealed = cli.solve(
        tmp_path / "c",
        scaling=0.7,
        epsilon_start=2,
        update_rule="symmetric",
        max_iterations=3000,
        tolerance=1e-8,
        **flags,
    )[0]
    plain = cli.solve(tmp_path / "d", over_relaxation="off", tolerance=1e-8, **flags)[0]

    np.testing.assert_allclose(debiased["value"], [divergence], rtol=1e-5)
    np.testing.assert_allclose(unbalanced["value"], [relaxed], rtol=1e-5)
    np.testing.assert_allclose(annealed["value"], [cross], rtol=1e-5)
    np.testing.assert_allclose(plain["value"], [cross], rtol=1e-5)


# ---- The C++ library ----------------------------------------------------------------------------


def test_the_cpp_example(cli, run_program):
    done = run_program("SINKHORN_CPP_EXAMPLE", "client/cpp/example", cli.target)

    x, y = np.array([[0, 0], [1, 0], [0, 1]]), np.array([[2, 2], [3, 2], [2, 3], [3, 3]])
    plan, value = transport(squared_distances(x, y), np.full(3, 1 / 3), np.full(4, 1 / 4), 0.05, 20000)
    gradient = 2 * (x / 3 - plan @ y)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout
    assert float(lines[0].split()[1].strip(",")) == pytest.approx(value, rel=1e-4)
    for line, row in zip(lines[1:], gradient, strict=True):
        shown = [float(word) for word in line[line.index("(") + 1 : -1].split(",")]
        np.testing.assert_allclose(shown, row, atol=1e-3)
