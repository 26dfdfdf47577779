"""Arguments become the right fields of a request, and the client's words are exactly the contract's."""

import dataclasses
import inspect
import typing

import ml_dtypes
import numpy as np
import pytest

from sinkhorn_client import AsyncClient, Client, CustomRecipe, problems, results
from sinkhorn_client._proto import sinkhorn_pb2 as pb
from sinkhorn_client._tensor import decode

X = np.zeros((5, 3), np.float32)
Y = np.ones((4, 3), np.float32)


# ---- The whole contract is covered: these fail when the .proto grows and the client does not -----


@pytest.mark.parametrize(
    ("literal", "enum", "prefix", "elsewhere"),
    [
        (problems.Recipe, pb.NormalizationRecipe, "NORMALIZATION_RECIPE", {"custom"}),
        (problems.Start, pb.NormalizationStart, "NORMALIZATION_START", set()),
        (problems.Order, pb.NormalizationOrder, "NORMALIZATION_ORDER", set()),
        (problems.Guard, pb.NormalizationGuard, "NORMALIZATION_GUARD", set()),
        (problems.BackwardMode, pb.BackwardMode, "BACKWARD_MODE", set()),
        (problems.Cost, pb.CostFunction, "COST_FUNCTION", set()),
        (problems.UpdateRule, pb.UpdateRule, "UPDATE_RULE", set()),
        (problems.OverRelaxation, pb.OverRelaxation, "OVER_RELAXATION", set()),
        (problems.Precision, pb.Precision, "PRECISION", set()),
        (problems.Output, pb.Output, "OUTPUT", set()),
    ],
)
def test_words_are_the_contracts(literal, enum, prefix, elsewhere):
    expected = {name.removeprefix(f"{prefix}_").lower() for name, value in enum.items() if value != 0}
    assert set(typing.get_args(literal)) | elsewhere == expected


def names(message):
    return set(message.DESCRIPTOR.fields_by_name)


def test_every_option_of_the_contract_can_be_said():
    options = set(problems.TransportOptions.__annotations__)
    assert names(pb.SolverOptions) <= options
    request = {"a", "b", "outputs", "apply_v", "apply_u", "request_id", "timeout"}
    plain = {"preconditioner", "neumann_terms"}
    hessian = plain | {f"hessian_{name}" for name in names(pb.HessianProducts) - plain}
    sparse = {f"sparse_{name}" for name in names(pb.SparsePlanOptions)}
    assert options == names(pb.SolverOptions) | request | hessian | sparse
    assert names(pb.DenseProblem) | names(pb.PointCloudProblem) <= options | {"cost", "x", "y"}
    normalize = set(inspect.signature(problems.normalize).parameters)
    assert names(pb.NormalizationProblem) - {"custom"} <= normalize
    assert names(pb.CustomRecipe) == {field.name for field in dataclasses.fields(CustomRecipe)}


def test_every_field_of_an_answer_is_read():
    def fields(kind):
        return {field.name for field in dataclasses.fields(kind)}

    assert fields(results.NormalizationResult) | fields(results.TransportResult) == names(pb.SolveResponse)
    for kind, message in [
        (results.Convergence, pb.Convergence),
        (results.Execution, pb.Execution),
        (results.ServerInfo, pb.GetServerInfoResponse),
        (results.Limits, pb.Limits),
        (results.Device, pb.Device),
    ]:
        assert fields(kind) == names(message)


@pytest.mark.parametrize("name", ["normalize", "transport", "point_cloud"])
@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_methods_show_the_arguments_of_their_problem(client, name):
    build, method = getattr(problems, name), getattr(client, name)
    assert list(inspect.signature(method).parameters) == ["self", *inspect.signature(build).parameters]
    assert method.__doc__ == build.__doc__ and method.__name__ == name
    for option in inspect.signature(build).parameters:
        assert option in build.__doc__


# ---- Normalisation -------------------------------------------------------------------------------


def test_normalize_says_as_little_as_it_was_told():
    message = problems.normalize(X).message
    expected = pb.SolveRequest()
    expected.normalization.logits.CopyFrom(message.normalization.logits)
    expected.normalization.recipe = pb.NORMALIZATION_RECIPE_LOG_ROW_COLUMN
    assert message == expected
    assert np.array_equal(decode(message.normalization.logits), X)


def test_normalize_with_everything():
    problem = problems.normalize(
        X,
        recipe=CustomRecipe("row_softmax", 1e-6, "row_column", "add", 1e-7, logit_floor=-9.0),
        iterations=7,
        tolerance=0.0,
        row_marginals=[1, 2, 3, 4, 5],
        column_marginals=np.ones(3),
        dustbin_score=0.5,
        cotangent=X,
        backward_mode="implicit_unit",
        precision="double",
        outputs=["plan", "marginals"],
        request_id="me",
        timeout=2.5,
    )
    message = problem.message
    custom = message.normalization.custom
    assert message.normalization.recipe == pb.NORMALIZATION_RECIPE_CUSTOM
    assert (custom.start, custom.order, custom.guard) == (
        pb.NORMALIZATION_START_ROW_SOFTMAX,
        pb.NORMALIZATION_ORDER_ROW_COLUMN,
        pb.NORMALIZATION_GUARD_ADD,
    )
    assert (custom.offset, custom.guard_value, custom.logit_floor) == (1e-6, 1e-7, -9.0)
    assert message.solver.max_iterations == 7
    assert message.solver.HasField("tolerance") and message.solver.tolerance == 0
    assert message.solver.precision == pb.PRECISION_DOUBLE
    assert message.normalization.logits.dtype == pb.DATA_TYPE_FLOAT32
    assert message.normalization.row_marginals.dtype == pb.DATA_TYPE_FLOAT64  # Untyped.
    assert list(message.normalization.dustbin_score.shape) == []
    assert decode(message.normalization.dustbin_score) == 0.5
    assert message.normalization.backward_mode == pb.BACKWARD_MODE_IMPLICIT_UNIT
    assert list(message.outputs) == [pb.OUTPUT_PLAN, pb.OUTPUT_MARGINALS]
    assert message.request_id == "me"
    assert problem.timeout == 2.5


def test_backward_from_a_plan_names_no_recipe():
    message = problems.normalize(plan=X, cotangent=X, backward_mode="implicit").message
    assert message.normalization.recipe == pb.NORMALIZATION_RECIPE_UNSPECIFIED
    assert message.normalization.HasField("plan") and not message.normalization.HasField("logits")


# ---- Transport -----------------------------------------------------------------------------------


def test_point_cloud_with_everything():
    options = {
        "epsilon": 0.5,
        "blur": 0.25,
        "scaling": 0.75,
        "epsilon_start": 4,
        "max_iterations": 9,
        "tolerance": 1e-3,
        "reach_a": 2,
        "reach_b": 3.0,
        "debias": True,
    }
    problem = problems.point_cloud(
        X,
        Y,
        cost="half_squared_euclidean",
        a=np.full(5, 0.2, np.float32),
        b=[0.25] * 4,
        update_rule="symmetric",
        over_relaxation="off",
        precision="fast",
        initial_f=np.zeros(5),
        initial_g=np.zeros(4),
        outputs=["value", "projection"],
        apply_v=Y,
        apply_u=X,
        request_id="id",
        timeout=1,
        **options,
    )
    message, solver = problem.message, problem.message.solver
    assert {name: getattr(solver, name) for name in options} == options
    assert (solver.update_rule, solver.over_relaxation) == (pb.UPDATE_RULE_SYMMETRIC, pb.OVER_RELAXATION_OFF)
    assert solver.precision == pb.PRECISION_FAST
    assert message.point_cloud.cost == pb.COST_FUNCTION_HALF_SQUARED_EUCLIDEAN
    assert message.point_cloud.a.dtype == pb.DATA_TYPE_FLOAT32
    assert message.point_cloud.b.dtype == pb.DATA_TYPE_FLOAT64  # Untyped.
    assert list(solver.initial_f.shape) == [5] and list(solver.initial_g.shape) == [4]
    assert list(message.apply_v.shape) == [4, 3] and list(message.apply_u.shape) == [5, 3]
    assert list(message.outputs) == [pb.OUTPUT_VALUE, pb.OUTPUT_PROJECTION]
    assert (message.request_id, problem.timeout) == ("id", 1)


def test_untyped_points_of_y_take_the_type_of_x():
    message = problems.point_cloud(X, [[0, 1, 2]], cost="squared_euclidean", epsilon=1).message
    assert message.point_cloud.y.dtype == message.point_cloud.x.dtype == pb.DATA_TYPE_FLOAT32


def test_options_that_are_none_are_unset():
    plain = problems.transport(X, epsilon=1).message
    unset = {name: None for name in problems.TransportOptions.__annotations__ if name != "epsilon"}
    assert problems.transport(X, epsilon=1, **unset).message == plain
    assert not plain.solver.HasField("tolerance") and not plain.solver.HasField("reach_a")


def test_numpy_scalars_are_numbers():
    solver = problems.transport(X, epsilon=np.float32(0.5), max_iterations=np.int64(3), debias=np.True_).message.solver
    assert (solver.epsilon, solver.max_iterations, solver.debias) == (0.5, 3, True)


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (dict(x=(5, 3), y=(4, 3)), ()),
        (dict(x=(7, 5, 3), y=(4, 3)), (7,)),
        (dict(x=(5, 3), y=(2, 7, 4, 3)), (2, 7)),
        (dict(x=(5, 3), y=(4, 3), b=(6, 4)), (6,)),
        (dict(x=(5, 3), y=(4, 3), initial_g=(6, 4)), (6,)),
        (dict(x=(5, 3), y=(4, 3), apply_u=(6, 5, 2)), (6,)),
        (dict(x=(1, 5, 3), y=(4, 3)), (1,)),
    ],
)
def test_batch_shape_is_that_of_any_tensor(shapes, expected):
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    assert problems.point_cloud(**arrays, cost="squared_euclidean", epsilon=1).batch_shape == expected


def test_batch_shape_of_a_normalisation():
    assert problems.normalize(X, dustbin_score=np.zeros(3)).batch_shape == (3,)
    assert problems.normalize(X, row_marginals=np.ones((2, 5))).batch_shape == (2,)
    assert problems.normalize(np.zeros((4, 2, 2)), dustbin_score=1.0).batch_shape == (4,)


def test_bfloat16_goes_as_it_is():
    message = problems.normalize(X.astype(ml_dtypes.bfloat16)).message
    assert message.normalization.logits.dtype == pb.DATA_TYPE_BFLOAT16


# ---- What cannot be sent -------------------------------------------------------------------------


def test_unknown_words_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="recipe must be one of log_row_column, exp_column_row.*got 'sinkhorn'"):
        problems.normalize(X, recipe="sinkhorn")
    with pytest.raises(ValueError, match="cost must be one of squared_euclidean, half_squared.*; got 'manhattan'"):
        problems.point_cloud(X, Y, cost="manhattan", epsilon=1)
    with pytest.raises(ValueError, match="outputs must be one of value"):
        problems.transport(X, epsilon=1, outputs=["plans"])
    with pytest.raises(ValueError, match="update_rule must be one of alternating, symmetric"):
        problems.transport(X, epsilon=1, update_rule="jacobi")


def test_mistakes_are_type_errors():
    with pytest.raises(TypeError, match="unknown option epsilom"):
        problems.transport(X, epsilom=1)
    with pytest.raises(TypeError, match="outputs must be a list"):
        problems.transport(X, epsilon=1, outputs="plan")
    with pytest.raises(TypeError, match="cost"):
        problems.point_cloud(X, Y, epsilon=1)
    with pytest.raises(TypeError):
        problems.transport(X, epsilon=1, max_iterations=1.5)
