// What the contract allows is accepted, close to its rules too, and becomes the problem that it says.
#include "server/validate.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "tests/server/requests.h"
#include "tests/server/validated.h"

namespace sinkhorn {
namespace {

using testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(ValidateTest, NormalizationDefaults) {
  const auto run = Check(Normalization());
  ASSERT_FALSE(run->error.has_value());
  const Problem& problem = run->prepared.problem;
  EXPECT_EQ(problem.kind, ProblemKind::kNormalization);
  EXPECT_EQ(problem.count, 1);
  EXPECT_EQ(problem.n, 2);
  EXPECT_EQ(problem.m, 3);
  EXPECT_EQ(problem.solver.max_iterations, 20);
  EXPECT_EQ(problem.solver.tolerance, 0);
  EXPECT_EQ(problem.normalization.recipe.logit_floor, -1e5);
  EXPECT_TRUE(problem.outputs.plan);
  EXPECT_FALSE(problem.outputs.gradient_logits);
  EXPECT_EQ(problem.outputs.value, nullptr);
  ASSERT_EQ(run->prepared.tensors.size(), 1u);
  EXPECT_EQ(run->prepared.tensors[0].shape, (std::vector<int64_t>{2, 3}));
  // The view is of the request's own bytes: nothing was copied.
  const char* data = static_cast<const char*>(problem.normalization.logits.data);
  EXPECT_GE(data, run->bytes.data());
  EXPECT_LT(data, run->bytes.data() + run->bytes.size());
  float last;
  std::memcpy(&last, data + 5 * sizeof(float), sizeof(last));
  EXPECT_EQ(last, 5.0f);
}

TEST(ValidateTest, TransportDefaults) {
  const auto run = Check(PointCloud());
  ASSERT_FALSE(run->error.has_value());
  const Problem& problem = run->prepared.problem;
  EXPECT_EQ(problem.kind, ProblemKind::kPointCloud);
  EXPECT_EQ(problem.dim, 2);
  EXPECT_EQ(problem.transport.kappa, 1);
  EXPECT_EQ(problem.solver.max_iterations, 1000);
  EXPECT_EQ(problem.solver.tolerance, 1e-5);
  EXPECT_TRUE(problem.solver.over_relaxation);
  EXPECT_EQ(problem.solver.epsilon_decay, 0);
  EXPECT_TRUE(std::isinf(problem.solver.rho_a));
  EXPECT_NE(problem.outputs.value, nullptr);
  EXPECT_NE(problem.outputs.dual_bound, nullptr);
  EXPECT_EQ(problem.outputs.primal_bound, nullptr);
  EXPECT_TRUE(problem.outputs.f);
  EXPECT_TRUE(problem.outputs.g);
  EXPECT_FALSE(problem.outputs.f_aa);
  EXPECT_FALSE(problem.outputs.plan);
}

// Squared distances have degree 2, the other costs of points 1.
TEST(ValidateTest, CostsOfPoints) {
  const struct {
    v1::CostFunction function;
    PointCost cost;
    double kappa, epsilon;
  } rows[] = {{v1::COST_FUNCTION_SQUARED_EUCLIDEAN, PointCost::kSquaredEuclidean, 1, 0.25},
              {v1::COST_FUNCTION_HALF_SQUARED_EUCLIDEAN, PointCost::kSquaredEuclidean, 0.5, 0.25},
              {v1::COST_FUNCTION_EUCLIDEAN, PointCost::kEuclidean, 1, 0.5},
              {v1::COST_FUNCTION_COSINE, PointCost::kCosine, 1, 0.5},
              {v1::COST_FUNCTION_NEGATIVE_DOT, PointCost::kNegativeDot, 1, 0.5}};
  for (const auto& row : rows) {
    v1::SolveRequest request = PointCloud();
    *request.mutable_point_cloud()->mutable_x() = Filled({3, 2}, 1);
    *request.mutable_point_cloud()->mutable_y() = Filled({4, 2}, 1);
    request.mutable_point_cloud()->set_cost(row.function);
    request.mutable_solver()->clear_epsilon();
    request.mutable_solver()->set_blur(0.5);
    const auto run = Check(request);
    ASSERT_FALSE(run->error.has_value()) << run->error->message;
    EXPECT_EQ(run->prepared.problem.transport.point_cost, row.cost);
    EXPECT_EQ(run->prepared.problem.transport.kappa, row.kappa);
    EXPECT_EQ(run->prepared.problem.solver.epsilon, row.epsilon);
  }
}

TEST(ValidateTest, ZeroVectorsAreNamed) {
  v1::SolveRequest request = PointCloud();
  request.mutable_point_cloud()->set_cost(v1::COST_FUNCTION_COSINE);
  *request.mutable_point_cloud()->mutable_y() = Filled({4, 2}, 1);
  v1::Tensor x = Filled({2, 3, 2}, 1);
  const float tiny[2] = {0, 1e-40f};  // Subnormal: arithmetic may take it for zero.
  std::memcpy(&(*x.mutable_data())[5 * sizeof(tiny)], tiny, sizeof(tiny));
  *request.mutable_point_cloud()->mutable_x() = x;
  const auto run = Check(request);
  ASSERT_TRUE(run->error.has_value());
  EXPECT_EQ(run->error->field, "point_cloud.x.data");
  EXPECT_NE(run->error->message.find("row 2 of member 1"), std::string::npos) << run->error->message;
  request.mutable_point_cloud()->set_cost(v1::COST_FUNCTION_EUCLIDEAN);
  EXPECT_FALSE(Check(request)->error.has_value());
}

TEST(ValidateTest, LengthsBecomeEnergies) {
  v1::SolveRequest request = PointCloud();
  request.mutable_solver()->clear_epsilon();
  request.mutable_solver()->set_blur(0.5);
  request.mutable_solver()->set_scaling(0.8);
  request.mutable_solver()->set_reach_a(3);
  const auto cloud = Check(request);
  ASSERT_FALSE(cloud->error.has_value());
  EXPECT_DOUBLE_EQ(cloud->prepared.problem.solver.epsilon, 0.25);
  EXPECT_DOUBLE_EQ(cloud->prepared.problem.solver.epsilon_decay, 0.64);
  EXPECT_DOUBLE_EQ(cloud->prepared.problem.solver.rho_a, 9);
  EXPECT_TRUE(std::isinf(cloud->prepared.problem.solver.rho_b));

  request = Dense();
  request.mutable_solver()->clear_epsilon();
  request.mutable_solver()->set_blur(0.5);
  const auto dense = Check(request);
  ASSERT_FALSE(dense->error.has_value());
  EXPECT_DOUBLE_EQ(dense->prepared.problem.solver.epsilon, 0.5);
}

TEST(ValidateTest, SharedAndBatchedTensors) {
  v1::SolveRequest request = Dense();  // The cost is shared by the 2 x 4 members that a brings.
  *request.mutable_dense()->mutable_a() = Filled({2, 4, 2}, 0.5f);
  request.add_outputs(v1::OUTPUT_PLAN);
  request.add_outputs(v1::OUTPUT_VALUE);
  request.add_outputs(v1::OUTPUT_MEMBERS);
  const auto run = Check(request);
  ASSERT_FALSE(run->error.has_value()) << run->error->message;
  EXPECT_EQ(run->prepared.problem.count, 8);
  EXPECT_TRUE(run->prepared.problem.transport.cost.shared);
  EXPECT_FALSE(run->prepared.problem.transport.a.shared);
  EXPECT_EQ(run->prepared.tensors[0].shape, (std::vector<int64_t>{2, 4, 2, 3}));
  EXPECT_EQ(run->prepared.tensors[0].bytes, 2u * 4 * 2 * 3 * 4);
  EXPECT_EQ(run->response.value_size(), 8);
  EXPECT_EQ(run->prepared.members.size(), 8u);
}

TEST(ValidateTest, DustbinAddsARowAndAColumn) {
  v1::SolveRequest request = Normalization();
  auto* problem = request.mutable_normalization();
  *problem->mutable_logits() = Filled({4, 2, 3}, 0);
  *problem->mutable_dustbin_score() = Filled({4}, 1);
  *problem->mutable_cotangent() = Filled({3, 4}, 1);  // Shared.
  const auto run = Check(request);
  ASSERT_FALSE(run->error.has_value()) << run->error->message;
  ASSERT_EQ(run->prepared.tensors.size(), 3u);
  EXPECT_EQ(run->prepared.tensors[0].shape, (std::vector<int64_t>{4, 3, 4}));
  EXPECT_EQ(run->prepared.tensors[1].shape, (std::vector<int64_t>{4, 2, 3}));
  EXPECT_EQ(run->prepared.tensors[2].shape, (std::vector<int64_t>{4}));
  EXPECT_EQ(run->prepared.problem.normalization.backward, BackwardMode::kUnrolled);
}

TEST(ValidateTest, BackwardFromPlanAlone) {
  v1::SolveRequest request;
  *request.mutable_normalization()->mutable_plan() = Float32Tensor({2, 2}, {-0.0f, 1, 1, 0});
  *request.mutable_normalization()->mutable_cotangent() = Filled({2, 2}, -1);
  const auto run = Check(request);
  ASSERT_FALSE(run->error.has_value()) << run->error->message;
  EXPECT_EQ(run->prepared.problem.normalization.backward, BackwardMode::kImplicit);
  ASSERT_EQ(run->prepared.tensors.size(), 1u);
  EXPECT_EQ(run->prepared.tensors[0].field, v1::SolveResponse::kGradientLogitsFieldNumber);
}

TEST(ValidateTest, EveryOutputOfADebiasedCloudHasItsOwnMemory) {
  v1::SolveRequest request = PointCloud();
  request.mutable_solver()->set_debias(true);
  for (int output : {1, 2, 4, 5, 6, 7, 8, 10, 11}) request.add_outputs(static_cast<v1::Output>(output));
  *request.mutable_apply_v() = Filled({3, 5}, 1);
  *request.mutable_apply_u() = Filled({2, 7}, 1);
  const auto run = Check(request);
  ASSERT_FALSE(run->error.has_value()) << run->error->message;
  EXPECT_EQ(run->prepared.tensors.size(), 15u);
  size_t end = 0;
  for (const ReplyTensor& tensor : run->prepared.tensors) {
    EXPECT_GE(tensor.offset, end);
    EXPECT_EQ(tensor.offset % 64, 0u);
    end = tensor.offset + tensor.bytes;
  }
  EXPECT_LE(end, run->prepared.block_bytes);
  EXPECT_TRUE(run->prepared.problem.outputs.g_bb);
  EXPECT_EQ(run->prepared.problem.transport.v_columns, 5);
  EXPECT_EQ(run->prepared.problem.transport.u_columns, 7);
}

TEST(ValidateTest, TotalsMayDifferWithinRoundingOrWhenRelaxed) {
  v1::SolveRequest request = Dense();
  *request.mutable_dense()->mutable_a() = Float32Tensor({2}, {0.5f, 0.500004f});
  EXPECT_FALSE(Check(request)->error.has_value());
  *request.mutable_dense()->mutable_a() = Float32Tensor({2}, {0.5f, 0.7f});
  EXPECT_TRUE(Check(request)->error.has_value());
  request.mutable_solver()->set_reach_b(1);
  EXPECT_FALSE(Check(request)->error.has_value());
}

TEST(ValidateTest, ExactChoosesColumnTotalsAndChecksGivenOnes) {
  v1::SolveRequest request = Normalization();
  request.mutable_normalization()->set_recipe(v1::NORMALIZATION_RECIPE_EXACT);
  EXPECT_FALSE(Check(request)->error.has_value());
  EXPECT_EQ(Check(request)->prepared.problem.solver.max_iterations, 200);
  *request.mutable_normalization()->mutable_row_marginals() = Filled({2}, 3);
  EXPECT_FALSE(Check(request)->error.has_value());
  *request.mutable_normalization()->mutable_column_marginals() = Filled({3}, 2);
  EXPECT_FALSE(Check(request)->error.has_value());
}

TEST(ValidateTest, LimitsThemselvesAreAccepted) {
  Limits limits;
  limits.max_points = 3;
  limits.max_dimension = 2;
  limits.max_members = 1;
  limits.max_iterations = 7;
  v1::SolveRequest request = PointCloud();
  request.mutable_solver()->set_max_iterations(7);
  request.set_request_id(std::string(128, 'x'));
  EXPECT_FALSE(Check(request, limits)->error.has_value());
}

TEST(ValidateTest, TheMessageTellsFieldRuleAndValue) {
  v1::SolveRequest request = PointCloud();
  *request.mutable_point_cloud()->mutable_x() = Float32Tensor({2, 2}, {0, 1, kNan, 3});
  EXPECT_EQ(Check(request)->error->message, "point_cloud.x.data must be finite; got nan at element 2");
  *request.mutable_point_cloud()->mutable_x() = Filled({2, 3}, 0);
  EXPECT_EQ(Check(request)->error->message, "point_cloud.y.shape must be [..., m, d = 3]; got [3, 2]");
}

// Data is scanned in blocks: the first offender is found wherever it stands.
TEST(ValidateTest, FindsTheOffenderAtAnyPosition) {
  for (int64_t position : {0, 1, 4095, 4096, 8191, 9999}) {
    std::vector<float> values(10000, 1);
    values[position] = kNan;
    values[9999] = kNan;
    v1::SolveRequest request;
    *request.mutable_normalization()->mutable_logits() = Float32Tensor({100, 100}, values);
    const auto run = Check(request);
    ASSERT_TRUE(run->error.has_value());
    EXPECT_THAT(run->error->message, testing::EndsWith(absl::StrCat("at element ", position)));
  }
}

// Denormals, minus zero and the largest finite numbers are finite, in every dtype and at any alignment.
TEST(ValidateTest, EdgesOfTheFormats) {
  v1::SolveRequest request = Normalization();
  auto* logits = request.mutable_normalization()->mutable_logits();
  for (const char* id : {"", "x", "xx", "xxx"}) {  // Moves the data by a byte.
    request.set_request_id(id);
    *logits = Float32Tensor({1, 4}, {-0.0f, 1e-45f, 3.4028235e38f, -3.4028235e38f});
    EXPECT_FALSE(Check(request)->error.has_value());
    *logits = Float64Tensor({1, 3}, {5e-324, 1.7976931348623157e308, -1.7976931348623157e308});
    EXPECT_FALSE(Check(request)->error.has_value());
    *logits = Float32Tensor({1, 4}, {});
    logits->set_dtype(v1::DATA_TYPE_FLOAT16);
    logits->set_data(std::string("\x01\x00\xff\x7b\xff\xfb\x00\x80", 8));  // Denormal, +-65504, -0.
    EXPECT_FALSE(Check(request)->error.has_value());
    logits->set_dtype(v1::DATA_TYPE_BFLOAT16);
    logits->set_data(std::string("\x01\x00\x7f\x7f\x7f\xff\x00\x80", 8));
    EXPECT_FALSE(Check(request)->error.has_value());
  }
}

}  // namespace
}  // namespace sinkhorn
