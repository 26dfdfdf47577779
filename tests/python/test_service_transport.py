"""Transport by the real server against float64 numpy: every output, option, type and batch form."""

import itertools

import ml_dtypes
import numpy as np
import numpy_reference as reference
import pytest

from sinkhorn_client import problems

CLOUDS = {"cost": "squared_euclidean"}
KAPPA = {"squared_euclidean": 1.0, "half_squared_euclidean": 0.5}


def clouds(n=7, m=5, dim=3, seed=0, dtype=np.float64):
    random = np.random.default_rng(seed)
    x, y = random.random((n, dim)), random.random((m, dim)) + 0.2
    return x.astype(dtype), y.astype(dtype)


def masses(n, seed, total=1.0):
    a = np.random.default_rng(seed).random(n) + 0.1
    return a / a.sum() * total


def cost_matrix(n=7, m=5, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).random((n, m)).astype(dtype)


def rho(reach, degree):
    return np.inf if reach is None else reach**degree


# ---- The iterations -----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["alternating", "symmetric"])
@pytest.mark.parametrize("iterations", [1, 2, 9])
@pytest.mark.parametrize("epsilon", [0.02, 0.5])
@pytest.mark.parametrize("reach", [None, 0.7])
def test_fixed_iterations_follow_the_formula(client, rule, iterations, epsilon, reach):
    x, y = clouds(40, 33)
    a, b = masses(40, 1), masses(33, 2)
    options = dict(epsilon=epsilon, update_rule=rule, max_iterations=iterations, tolerance=0.0, reach_b=reach)
    steps = dict(epsilon=epsilon, update_rule=rule, iterations=iterations)
    for dtype, precision in [(np.float64, "double"), (np.float32, "strict")]:
        at, bt, xt, yt = (array.astype(dtype) for array in (a, b, x, y))
        cost = reference.squared_distances(x, y).astype(dtype)
        cloud = client.point_cloud(xt, yt, a=at, b=bt, precision=precision, **CLOUDS, **options)
        dense = client.transport(cost, a=at, b=bt, precision=precision, **options)
        exact = reference.squared_distances(xt.astype(np.float64), yt.astype(np.float64))
        for result, matrix, degree in [(cloud, exact, 2), (dense, cost.astype(np.float64), 1)]:
            expected = reference.solve(matrix, at, bt, rho_b=rho(reach, degree), **steps)
            assert result.convergence.iterations == iterations
            assert result.convergence.stop_reason == "max_iterations"
            assert result.execution.precision == precision
            for actual, wanted in [(result.f, expected.f), (result.g, expected.g)]:
                # The contract: 1e-4 epsilon + 1e-6 |f| for STRICT; DOUBLE rounds in the 16th digit, some hundred times.
                bound = 1e-4 * epsilon + 1e-6 * np.abs(wanted) if dtype == np.float32 else 1e-12 * (1 + np.abs(wanted))
                assert np.all(np.abs(actual - wanted) <= bound)
            errors = result.convergence.marginal_error_a, result.convergence.marginal_error_b
            assert errors == pytest.approx(expected.errors, abs=1e-4 if dtype == np.float32 else 1e-10)


@pytest.mark.parametrize("options", [{}, {"update_rule": "symmetric"}, {"over_relaxation": "off"}, {"scaling": 0.7}])
def test_every_way_leads_to_the_solution(client, options):
    x, y = clouds(30, 20)
    expected = reference.solve(reference.squared_distances(x, y), epsilon=0.05)
    result = client.point_cloud(
        x, y, epsilon=0.05, tolerance=1e-9, max_iterations=20000, precision="double", **CLOUDS, **options
    )
    assert result.convergence.converged and result.convergence.stop_reason == "tolerance"
    assert max(result.convergence.marginal_error_a, result.convergence.marginal_error_b) <= 1e-9
    assert float(result.value) == pytest.approx(expected.dual, abs=1e-8)


def test_annealing_starts_where_it_is_told(client):
    x, y = clouds(30, 20)
    counts = [
        client.point_cloud(
            x, y, epsilon=0.1, scaling=0.5, epsilon_start=start, tolerance=1e-3, over_relaxation="off", **CLOUDS
        ).convergence.iterations
        for start in (0.1, 1e4)
    ]
    # Plain iterations: log(1e5) / log(4) = 8.3 annealing steps more, none of them the last.
    assert counts[1] >= counts[0] + 7


def test_a_warm_start_saves_the_iterations(client):
    x, y = clouds(30, 20)
    options = dict(epsilon=0.05, tolerance=1e-6, precision="double", **CLOUDS)
    cold = client.point_cloud(x, y, **options)
    warm = client.point_cloud(x, y, initial_f=cold.f, initial_g=cold.g, **options)
    assert warm.convergence.iterations <= 2 < cold.convergence.iterations
    assert float(warm.value) == pytest.approx(float(cold.value), abs=1e-6)


def test_the_iteration_limit_is_no_error(client):
    result = client.point_cloud(*clouds(), epsilon=1e-3, max_iterations=2, tolerance=1e-9, **CLOUDS)
    assert not result.convergence.converged
    assert result.convergence.stop_reason == "max_iterations" and result.convergence.iterations == 2
    assert result.convergence.marginal_error_a > 1e-9 or result.convergence.marginal_error_b > 1e-9


def test_blur_is_a_length(client):
    x, y = clouds()
    by_blur, by_epsilon = (
        client.point_cloud(x, y, **CLOUDS, **option) for option in ({"blur": 0.3}, {"epsilon": 0.09})
    )
    assert float(by_blur.value) == pytest.approx(float(by_epsilon.value), rel=1e-12)
    cost = cost_matrix()
    assert np.array_equal(client.transport(cost, blur=0.3).f, client.transport(cost, epsilon=0.3).f)


# ---- The outputs --------------------------------------------------------------------------------

PRECISE = {"precision": "double", "tolerance": 1e-11, "max_iterations": 50000}


def close(wanted):
    return pytest.approx(wanted, abs=1e-9)


SIDES = [(None, None), (0.6, None), (None, 0.8), (0.6, 0.8)]


@pytest.mark.parametrize(("reach_a", "reach_b"), SIDES)
def test_dense_outputs(client, reach_a, reach_b):
    n, m, epsilon = 7, 5, 0.1
    cost = cost_matrix(n, m)
    balanced = reach_a is None and reach_b is None
    a, b = masses(n, 1), masses(m, 2, 1.0 if balanced else 1.5)
    v, u = np.random.default_rng(3).standard_normal((m, 2)), np.random.default_rng(4).standard_normal((n, 3))
    outputs = ["value", "value_linear", "potentials", "plan", "marginals", "gradient_masses", "gradient_cost"]
    result = client.transport(
        cost,
        a=a,
        b=b,
        epsilon=epsilon,
        reach_a=reach_a,
        reach_b=reach_b,
        apply_v=v,
        apply_u=u,
        outputs=outputs + ["primal_bound"] * balanced,
        **PRECISE,
    )
    sides = dict(epsilon=epsilon, rho_a=rho(reach_a, 1), rho_b=rho(reach_b, 1))
    expected = reference.solve(cost, a, b, **sides)

    assert float(result.value) == close(expected.dual) == close(expected.primal)
    assert float(result.value_linear) == close((cost * expected.plan).sum())
    assert float(result.dual_bound) <= expected.primal + 1e-12
    assert float(result.dual_bound) == pytest.approx(expected.primal, abs=1e-6)
    if balanced:
        assert expected.primal - 1e-12 <= float(result.primal_bound) <= expected.primal + 1e-6
        shift = result.f[0] - expected.f[0]
        assert result.f - shift == close(expected.f) and result.g + shift == close(expected.g)
    else:
        assert result.f == close(expected.f) and result.g == close(expected.g)
    assert result.plan == close(expected.plan)
    assert result.gradient_cost == close(expected.plan)
    assert result.row_sums == close(expected.plan.sum(axis=1))
    assert result.column_sums == close(expected.plan.sum(axis=0))
    assert result.plan_v == close(expected.plan @ v)
    assert result.plan_transpose_u == close(expected.plan.T @ u)

    # The masses' gradients; where the totals are tied, only moves of mass between bins have a meaning.
    def value(a, b):
        return reference.solve(cost, a, b, **sides).dual

    def moving(mass, moves):
        return mass + np.append(-moves.sum(), moves)

    by_a = reference.central_differences(lambda moves: value(moving(a, moves), b), np.zeros(n - 1))
    by_b = reference.central_differences(lambda moves: value(a, moving(b, moves)), np.zeros(m - 1))
    assert result.gradient_a[1:] - result.gradient_a[0] == pytest.approx(by_a, abs=1e-6)
    assert result.gradient_b[1:] - result.gradient_b[0] == pytest.approx(by_b, abs=1e-6)
    if not balanced:
        by_a = reference.central_differences(lambda mass: value(mass, b), a)
        by_b = reference.central_differences(lambda mass: value(a, mass), b)
        assert result.gradient_a == pytest.approx(by_a, abs=1e-6)
        assert result.gradient_b == pytest.approx(by_b, abs=1e-6)


@pytest.mark.parametrize("cost", ["squared_euclidean", "half_squared_euclidean", "euclidean", "cosine", "negative_dot"])
@pytest.mark.parametrize(("reach_a", "reach_b"), SIDES)
def test_point_cloud_outputs(client, cost, reach_a, reach_b):
    n, m, epsilon, degree = 6, 4, 0.1, 2 if cost in KAPPA else 1
    x, y = clouds(n, m, 2)
    a, b = masses(n, 1), masses(m, 2, 1.0 if reach_a is None and reach_b is None else 1.5)
    v, u = np.random.default_rng(3).standard_normal((m, 2)), np.random.default_rng(4).standard_normal((n, 1))
    result = client.point_cloud(
        x,
        y,
        a=a,
        b=b,
        cost=cost,
        epsilon=epsilon,
        reach_a=reach_a,
        reach_b=reach_b,
        apply_v=v,
        apply_u=u,
        outputs=["value", "value_linear", "potentials", "plan", "marginals", "gradient_points", "projection"],
        **PRECISE,
    )
    sides = dict(epsilon=epsilon, rho_a=rho(reach_a, degree), rho_b=rho(reach_b, degree))

    def value(x, y):
        return reference.solve(reference.costs(x, y, cost), a, b, **sides).dual

    expected = reference.solve(reference.costs(x, y, cost), a, b, **sides)
    assert float(result.value) == close(expected.dual) == close(expected.primal)
    assert float(result.value_linear) == close((expected.cost * expected.plan).sum())
    assert float(result.dual_bound) <= expected.primal + 1e-12
    assert result.plan == close(expected.plan)
    assert result.row_sums == close(expected.plan.sum(axis=1))
    assert result.column_sums == close(expected.plan.sum(axis=0))
    assert result.plan_v == close(expected.plan @ v)
    assert result.plan_transpose_u == close(expected.plan.T @ u)
    assert result.projection_x == close(expected.plan @ y / expected.plan.sum(axis=1)[:, None])
    assert result.projection_y == close(expected.plan.T @ x / expected.plan.sum(axis=0)[:, None])
    assert result.gradient_x == pytest.approx(reference.central_differences(lambda p: value(p, y), x), abs=1e-6)
    assert result.gradient_y == pytest.approx(reference.central_differences(lambda p: value(x, p), y), abs=1e-6)


# ---- Hessian-vector products, sparse plans ------------------------------------------------------


@pytest.mark.parametrize("preconditioner", ["none", "jacobi", "neumann", None])
@pytest.mark.parametrize("cost", ["squared_euclidean", "cosine", "negative_dot"])
def test_hessian_vector_products(client, cost, preconditioner):
    x, y = clouds(6, 4, 2)
    random = np.random.default_rng(5)
    dx, dy = random.standard_normal((2, 6, 2)), random.standard_normal((2, 4, 2))
    options = dict(cost=cost, epsilon=0.2, **PRECISE)
    result = client.point_cloud(
        x,
        y,
        hessian_x=dx,
        hessian_y=dy,
        preconditioner=preconditioner,
        hessian_tolerance=1e-11,
        outputs=["value"],
        **options,
    )
    (convergence,) = result.hessian_convergence
    assert convergence.converged and convergence.residual <= 1e-11 and convergence.iterations > 0
    step = 1e-6  # Third derivatives of cosines are large near zero.
    for q in range(2):
        more, less = (
            client.point_cloud(x + s * dx[q], y + s * dy[q], outputs=["gradient_points"], **options)
            for s in (step, -step)
        )
        slope_x = (more.gradient_x - less.gradient_x) / (2 * step)
        slope_y = (more.gradient_y - less.gradient_y) / (2 * step)
        assert result.hessian_x[q] == pytest.approx(slope_x, abs=1e-5)
        assert result.hessian_y[q] == pytest.approx(slope_y, abs=1e-5)


def test_hessian_iteration_limit_is_data(client):
    x, y = clouds(30, 20, 2)
    result = client.point_cloud(
        x, y, cost="squared_euclidean", epsilon=0.01, hessian_x=x[None], hessian_max_iterations=1, hessian_tolerance=0
    )
    assert result.hessian_convergence[0].iterations == 1 and not result.hessian_convergence[0].converged


@pytest.mark.parametrize("threshold", [0.0, 1e-3, 0.02])
def test_sparse_plan(client, threshold):
    x, y = clouds(9, 7, 2)
    batch = np.stack([x, x + 0.5])
    result = client.point_cloud(
        batch,
        y,
        cost="euclidean",
        epsilon=0.02,
        sparse_threshold=threshold,
        sparse_max_entries=63,
        outputs=["plan"],
    )
    assert len(result.sparse_plan) == 2
    for sparse, plan in zip(result.sparse_plan, result.plan, strict=True):
        kept = np.where((plan >= threshold) & (plan > 0), plan, 0)
        rows = np.repeat(np.arange(9), np.diff(sparse.row_offsets))
        dense = np.zeros((9, 7))
        dense[rows, sparse.columns] = sparse.values
        assert np.array_equal(dense, kept) and sparse.entry_count == np.count_nonzero(kept)
        assert sparse.mass == pytest.approx(kept.sum())
    few = client.point_cloud(x, y, cost="euclidean", epsilon=0.02, sparse_max_entries=2)
    assert few.sparse_plan[0].entry_count > 2 and few.sparse_plan[0].values is None
    assert few.sparse_plan[0].mass == pytest.approx(1, abs=1e-4)


def test_sparse_plan_without_entries(client):
    result = client.transport(cost_matrix(), epsilon=0.1, sparse_threshold=10, sparse_max_entries=5)
    (sparse,) = result.sparse_plan
    assert sparse.entry_count == 0 and sparse.mass == 0 and sparse.values.shape == (0,)


@pytest.mark.parametrize(("reach_a", "reach_b"), [(None, None), (0.6, 0.6)])
def test_debiased(client, reach_a, reach_b):
    x, y = clouds(6, 4, 2)
    a, b = masses(6, 1), masses(4, 2, 1.0 if reach_a is None else 1.5)
    sides = dict(epsilon=0.1, rho_a=rho(reach_a, 2), rho_b=rho(reach_b, 2))
    result = client.point_cloud(
        x,
        y,
        a=a,
        b=b,
        epsilon=0.1,
        reach_a=reach_a,
        reach_b=reach_b,
        debias=True,
        outputs=["value", "potentials", "gradient_points"],
        **CLOUDS,
        **PRECISE,
    )

    def divergence(x, y):
        return reference.debiased(x, y, a, b, **sides)

    assert float(result.value) == pytest.approx(divergence(x, y), abs=1e-9)
    assert result.f_aa.shape == (6,) and result.g_bb.shape == (4,)
    self_sides = dict(epsilon=0.1, rho_a=sides["rho_a"], rho_b=sides["rho_a"], update_rule="symmetric")
    expected = reference.solve(reference.squared_distances(x, x), a, a, **self_sides)
    assert result.f_aa == pytest.approx(expected.f, abs=1e-8)
    assert result.gradient_x == pytest.approx(reference.central_differences(lambda p: divergence(p, y), x), abs=1e-6)
    assert result.gradient_y == pytest.approx(reference.central_differences(lambda p: divergence(x, p), y), abs=1e-6)


def test_zero_masses(client):
    x, y = clouds(6, 4)
    a, b = np.array([0.5, 0, 0.2, 0, 0, 0.3]), np.array([0, 0.4, 0.6, 0])
    outputs = ["value", "plan", "projection"]
    result = client.point_cloud(x, y, a=a, b=b, epsilon=0.1, outputs=outputs, **CLOUDS, **PRECISE)
    kept = np.ix_(a > 0, b > 0)
    expected = reference.solve(reference.squared_distances(x, y)[kept], a[a > 0], b[b > 0], epsilon=0.1)
    assert float(result.value) == pytest.approx(expected.dual, abs=1e-9)
    assert result.plan[kept] == pytest.approx(expected.plan, abs=1e-9)
    assert result.plan.sum() == pytest.approx(expected.plan.sum(), abs=1e-9)
    assert np.all(result.projection_x[a == 0] == 0)


def test_only_what_was_asked_for_comes(client):
    result = client.transport(cost_matrix(), epsilon=0.1, outputs=["marginals"])
    assert result.row_sums is not None and result.column_sums is not None
    assert result.value is None and result.f is None and result.plan is None and result.members == ()
    default = client.transport(cost_matrix(), epsilon=0.1)
    assert default.value is not None and default.dual_bound is not None and default.f is not None
    assert default.plan is None and default.value_linear is None and default.row_sums is None


# ---- Types and batches --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_types(client, dtype):
    x, y = clouds(30, 20, dtype=dtype)
    result = client.point_cloud(
        x, y, epsilon=0.1, tolerance=1e-6, outputs=["value", "potentials", "plan", "projection"], **CLOUDS
    )
    expected = reference.solve(reference.squared_distances(x.astype(np.float64), y.astype(np.float64)), epsilon=0.1)
    # The inputs count as they are; the outputs are rounded once to the type.
    unit = {np.float32: 6e-8, np.float64: 1e-16, np.float16: 5e-4, ml_dtypes.bfloat16: 4e-3}[dtype]
    assert result.f.dtype == result.g.dtype == result.plan.dtype == result.projection_x.dtype == np.dtype(dtype)
    assert float(result.value) == pytest.approx(expected.dual, abs=2e-5)
    plan = result.plan.astype(np.float64)
    assert plan == pytest.approx(expected.plan, rel=unit + 1e-3, abs=1e-7)
    projection = expected.plan @ y.astype(np.float64) / expected.plan.sum(axis=1)[:, None]
    assert result.projection_x.astype(np.float64) == pytest.approx(projection, rel=unit + 1e-4)


def test_every_tensor_may_have_a_type_of_its_own(client):
    """Half-precision points with masses as Python numbers, which half precision would round out of balance."""
    x, y = clouds(10, 5, dtype=np.float16)
    result = client.point_cloud(
        x,
        y,
        a=[0.1] * 10,
        b=np.full(5, 0.2, np.float32),
        initial_g=np.zeros(5),
        apply_v=np.ones((5, 1), ml_dtypes.bfloat16),
        epsilon=0.1,
        outputs=["value", "marginals"],
        **CLOUDS,
    )
    expected = reference.solve(reference.squared_distances(x.astype(np.float64), y.astype(np.float64)), epsilon=0.1)
    assert float(result.value) == pytest.approx(expected.dual, abs=2e-5)
    assert result.row_sums.dtype == result.plan_v.dtype == np.float16
    assert result.plan_v[:, 0] == pytest.approx(np.full(10, 0.1), rel=2e-3)


def test_batch_dimensions_pass_through(client):
    shape, n, m = (2, 3), 6, 4
    random = np.random.default_rng(0)
    x = random.random((*shape, n, 2)).astype(np.float32)
    y = random.random((m, 2)).astype(np.float32)  # Shared.
    b = np.full((*shape, m), 0.25, np.float32)
    b[1, 2] = [0.1, 0.2, 0.3, 0.4]
    v = random.random((*shape, m, 3)).astype(np.float32)
    outputs = ["value", "value_linear", "potentials", "plan", "marginals", "gradient_points", "projection", "members"]
    options = dict(epsilon=0.1, outputs=outputs, **CLOUDS)
    batch = client.point_cloud(x, y, b=b, apply_v=v, **options)

    assert batch.value.shape == batch.dual_bound.shape == batch.value_linear.shape == shape
    assert batch.f.shape == batch.row_sums.shape == (*shape, n) and batch.g.shape == batch.column_sums.shape == (
        *shape,
        m,
    )
    assert batch.plan.shape == (*shape, n, m) and batch.plan_v.shape == (*shape, n, 3)
    assert batch.projection_x.shape == batch.gradient_x.shape == x.shape
    assert batch.projection_y.shape == batch.gradient_y.shape == (*shape, m, 2)
    assert len(batch.members) == 6
    assert batch.convergence.iterations == max(member.iterations for member in batch.members)

    for number, index in enumerate(itertools.product(range(2), range(3))):
        alone = client.point_cloud(x[index], y, b=b[index], apply_v=v[index], **options)
        assert alone.value.shape == ()
        assert alone.convergence == batch.members[number]
        for name in ("value", "dual_bound", "f", "g", "plan", "plan_v", "gradient_x", "projection_x"):
            assert np.array_equal(getattr(alone, name), getattr(batch, name)[index]), name


def test_a_batch_of_shared_clouds(client):
    """Only the initial potentials have the batch's dimensions."""
    x, y = clouds()
    initial = np.zeros((3, len(y)))
    initial[1] = 0.3
    result = client.point_cloud(x, y, initial_g=initial, epsilon=0.2, tolerance=1e-9, **CLOUDS)
    assert result.value.shape == (3,) and result.f.shape == (3, len(x))
    assert result.value == pytest.approx(np.full(3, float(result.value[0])), abs=1e-7)


def test_a_large_cloud_streams(client):
    """2,000 x 1,500 points in 24 dimensions against the same formula."""
    x, y = clouds(2000, 1500, 24, dtype=np.float32)
    result = client.point_cloud(x, y, epsilon=0.5, max_iterations=5, tolerance=0.0, **CLOUDS)
    cost = reference.squared_distances(x.astype(np.float64), y.astype(np.float64))
    expected = reference.solve(cost, epsilon=0.5, iterations=5)
    assert np.all(np.abs(result.f - expected.f) <= 1e-4 * 0.5 + 1e-6 * np.abs(expected.f))
    assert np.all(np.abs(result.g - expected.g) <= 1e-4 * 0.5 + 1e-6 * np.abs(expected.g))


def test_the_reply_tells_how_it_was_made(client):
    problem = problems.point_cloud(*clouds(), epsilon=0.1, request_id="my own", **CLOUDS)
    result = client.solve(problem)
    execution, devices = result.execution, client.server_info().devices
    assert result.request_id == "my own"
    assert (execution.backend, execution.device) in {(device.backend, device.name) for device in devices}
    assert execution.family and execution.batch_problem_count >= 1 and execution.launch_count >= 1
    assert 0 <= execution.queue_seconds < 60 and 0 < execution.compute_seconds < 60
