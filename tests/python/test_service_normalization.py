"""Normalisation by the real server against float64 numpy: recipes, marginals, dustbin, the four backward modes."""

import dataclasses

import ml_dtypes
import numpy as np
import numpy_reference as reference
import pytest

from sinkhorn_client import CustomRecipe

SHAPES = [(1, 1), (4, 4), (1, 5), (7, 3), (8, 8), (17, 40)]
CUSTOM = CustomRecipe("exp", 0.01, "column_row", "add", 1e-3, logit_floor=-1.0)
STEPS = {**reference.RECIPES, CUSTOM: reference.Steps(**dataclasses.asdict(CUSTOM))}
PRECISIONS = [(np.float64, "double", 1e-12), (np.float32, "strict", 2e-5)]


def logits(n, m, scale=2.0, seed=0):
    return np.random.default_rng(seed).standard_normal((n, m)) * scale


def recipe_name(recipe):
    return recipe if isinstance(recipe, str) else "custom"


@pytest.mark.parametrize("recipe", STEPS, ids=recipe_name)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("iterations", [1, 3, 20])
def test_recipes(client, recipe, shape, iterations):
    for dtype, precision, tolerance in PRECISIONS:
        w = logits(*shape).astype(dtype)
        result = client.normalize(
            w, recipe=recipe, iterations=iterations, precision=precision, outputs=["plan", "marginals"]
        )
        expected = reference.normalize(w.astype(np.float64), STEPS[recipe], iterations)
        assert result.plan == pytest.approx(expected, rel=tolerance, abs=1e-30)
        assert result.row_sums == pytest.approx(expected.sum(axis=1), rel=tolerance)
        assert result.column_sums == pytest.approx(expected.sum(axis=0), rel=tolerance)
        assert result.convergence.iterations == iterations
        errors = np.abs(expected.sum(axis=1) - 1).sum(), np.abs(expected.sum(axis=0) - 1).sum()
        actual = result.convergence.marginal_error_a, result.convergence.marginal_error_b
        assert actual == pytest.approx(errors, rel=1e-3, abs=tolerance * max(shape))


def test_the_default_is_twenty_sweeps_of_log_row_column(client):
    w = logits(6, 6)
    result = client.normalize(w)
    assert result.convergence.iterations == 20
    assert result.plan == pytest.approx(reference.normalize(w, STEPS["log_row_column"], 20), rel=1e-5)
    assert result.row_sums is None and result.gradient_logits is None


@pytest.mark.parametrize("recipe", STEPS, ids=recipe_name)
def test_marginals_and_dustbin(client, recipe):
    w, rows, columns = logits(5, 3), np.array([1.0, 2, 0.5, 1, 1.5]), np.array([2.0, 3, 1])
    for dustbin in (None, 0.7):
        result = client.normalize(
            w,
            recipe=recipe,
            iterations=10,
            row_marginals=rows,
            column_marginals=columns,
            dustbin_score=dustbin,
            precision="double",
        )
        expected = reference.normalize(w, STEPS[recipe], 10, rows, columns, dustbin)
        assert result.plan.shape == ((5, 3) if dustbin is None else (6, 4))
        assert result.plan == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("scale", [1.0, 8.0, 300.0])
def test_large_logits(client, scale):
    w = logits(8, 8, scale).astype(np.float32)
    result = client.normalize(w, iterations=30)
    expected = reference.solve(-w.astype(np.float64), np.ones(8), np.ones(8), epsilon=1.0, iterations=30).plan
    assert result.plan == pytest.approx(expected, rel=2e-4, abs=1e-30)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_exact(client, shape, scale):
    w = logits(*shape, scale)
    result = client.normalize(w, recipe="exact", outputs=["plan", "marginals"], precision="double")
    n, m = shape
    assert result.convergence.converged
    assert result.row_sums == pytest.approx(np.ones(n), abs=1e-10)
    assert result.column_sums == pytest.approx(np.full(m, n / m), abs=1e-10)
    # It is diag(u) exp(W) diag(v): the logarithm less W is a sum of a row and a column term.
    rest = np.log(result.plan) - w
    assert rest - rest[:, :1] - rest[:1, :] + rest[0, 0] == pytest.approx(np.zeros(shape), abs=1e-9)


def test_a_tolerance_stops_early(client):
    result = client.normalize(logits(6, 6, 1.0), iterations=1000, tolerance=1e-4, outputs=["plan", "marginals"])
    assert result.convergence.converged and result.convergence.stop_reason == "tolerance"
    assert result.convergence.iterations < 200
    assert np.abs(result.row_sums - 1).sum() <= 1.1e-4 and np.abs(result.column_sums - 1).sum() <= 1.1e-4


# ---- Backward -----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", STEPS, ids=recipe_name)
@pytest.mark.parametrize("shape", [(4, 4), (3, 5)])
def test_unrolled(client, recipe, shape):
    w, cotangent = logits(*shape), logits(*shape, seed=1)
    gradient = reference.unrolled_gradient(w, cotangent, lambda moved: reference.normalize(moved, STEPS[recipe], 5))
    for dtype, precision, tolerance in [(np.float64, "double", 1e-10), (np.float32, "strict", 1e-5)]:
        result = client.normalize(
            w.astype(dtype), recipe=recipe, iterations=5, cotangent=cotangent.astype(dtype), precision=precision
        )
        assert result.plan is not None
        assert np.abs(result.gradient_logits - gradient).max() <= tolerance * np.abs(gradient).max()


def test_unrolled_with_marginals_and_dustbin(client):
    w, cotangent, score = logits(4, 3), logits(5, 4, seed=1), 0.3
    rows, columns = np.array([1.0, 2, 0.5, 1]), np.array([2.0, 3, 1])

    def forward(moved, score=score):
        return reference.normalize(moved, STEPS["log_row_column"], 6, rows, columns, score)

    result = client.normalize(
        w,
        iterations=6,
        row_marginals=rows,
        column_marginals=columns,
        dustbin_score=score,
        cotangent=cotangent,
        precision="double",
    )
    assert result.gradient_logits == pytest.approx(
        reference.unrolled_gradient(w, cotangent, forward), rel=1e-9, abs=1e-12
    )
    by_score = (cotangent * forward(w.astype(complex), score + 1e-30j)).sum().imag / 1e-30
    assert result.gradient_dustbin_score.shape == ()
    assert float(result.gradient_dustbin_score) == pytest.approx(by_score, rel=1e-9)


@pytest.mark.parametrize("mode", ["implicit", "implicit_unit", "implicit_full"])
def test_implicit_modes_equal_the_unrolled_one_at_convergence(client, mode):
    w, cotangent = logits(6, 6, 1.0), logits(6, 6, seed=1)
    forward = lambda moved: reference.normalize(moved, STEPS["log_row_column"], 300)  # noqa: E731
    expected = reference.unrolled_gradient(w, cotangent, forward)
    options = dict(cotangent=cotangent, backward_mode=mode, precision="double")
    for recipe, iterations in [("exact", None), ("log_row_column", 300)]:
        result = client.normalize(w, recipe=recipe, iterations=iterations, **options)
        assert result.gradient_logits == pytest.approx(expected, rel=1e-6, abs=1e-8)
    alone = client.normalize(plan=forward(w), **options)
    assert alone.gradient_logits == pytest.approx(expected, rel=1e-6, abs=1e-8)
    assert alone.plan is None and alone.convergence.stop_reason == "not_iterated"


@pytest.mark.parametrize("iterations", [2, 5])
def test_implicit_modes_away_from_convergence(client, iterations):
    """IMPLICIT takes the marginals that P has, the others take 1."""
    w, cotangent = logits(5, 5, 1.5), logits(5, 5, seed=1)
    plan = reference.normalize(w, STEPS["exp_column_row"], iterations)
    result = client.normalize(plan=plan, cotangent=cotangent, backward_mode="implicit", precision="double")
    assert result.gradient_logits == pytest.approx(reference.implicit_gradient(plan, cotangent), rel=1e-6, abs=1e-9)
    forward = client.normalize(
        w,
        recipe="exp_column_row",
        iterations=iterations,
        cotangent=cotangent,
        backward_mode="implicit",
        precision="double",
    )
    assert forward.gradient_logits == pytest.approx(result.gradient_logits, rel=1e-9, abs=1e-12)


# ---- Types and batches --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_types(client, dtype):
    w, cotangent = logits(6, 6).astype(dtype), logits(6, 6, seed=1).astype(dtype)
    result = client.normalize(w, cotangent=cotangent, outputs=["plan", "marginals"])
    steps = STEPS["log_row_column"]
    plan = reference.normalize(w.astype(np.float64), steps, 20)
    gradient = reference.unrolled_gradient(
        w.astype(np.float64), cotangent.astype(np.float64), lambda moved: reference.normalize(moved, steps, 20)
    )
    unit = {np.float32: 6e-8, np.float64: 1e-16, np.float16: 5e-4, ml_dtypes.bfloat16: 4e-3}[dtype]
    for name in ("plan", "row_sums", "column_sums", "gradient_logits"):
        assert getattr(result, name).dtype == np.dtype(dtype)
    assert result.plan.astype(np.float64) == pytest.approx(plan, rel=unit + 2e-5, abs=1e-7)
    error = np.abs(result.gradient_logits.astype(np.float64) - gradient).max()
    assert error <= (unit + 2e-5) * np.abs(gradient).max()


def test_batch_dimensions_pass_through(client):
    random = np.random.default_rng(0)
    w = random.standard_normal((2, 3, 5, 4)).astype(np.float32)
    cotangent = random.standard_normal((2, 3, 6, 5)).astype(np.float32)
    scores = random.standard_normal((2, 3)).astype(np.float32)
    rows = np.linspace(0.5, 1.5, 5, dtype=np.float32)  # Shared.
    options = dict(iterations=7, row_marginals=rows, outputs=["plan", "marginals", "members"])
    batch = client.normalize(w, dustbin_score=scores, cotangent=cotangent, **options)
    assert batch.plan.shape == (2, 3, 6, 5) and batch.row_sums.shape == (2, 3, 6)
    assert batch.gradient_logits.shape == w.shape and batch.gradient_dustbin_score.shape == (2, 3)
    assert len(batch.members) == 6
    for index in np.ndindex(2, 3):
        alone = client.normalize(w[index], dustbin_score=scores[index], cotangent=cotangent[index], **options)
        for name in ("plan", "row_sums", "column_sums", "gradient_logits", "gradient_dustbin_score"):
            assert np.array_equal(getattr(alone, name), getattr(batch, name)[index]), name


def test_many_small_matrices(client):
    w = np.random.default_rng(0).standard_normal((10000, 4, 4)).astype(np.float32)
    result = client.normalize(w, recipe="exp_column_row", iterations=20)
    assert result.plan.shape == w.shape
    assert result.plan.sum(axis=2) == pytest.approx(np.ones((10000, 4)), abs=1e-5)  # It ends on rows.
    for index in (0, 4321, 9999):
        expected = reference.normalize(w[index].astype(np.float64), STEPS["exp_column_row"], 20)
        assert result.plan[index] == pytest.approx(expected, rel=2e-5)
    assert result.execution.batch_problem_count >= 10000
