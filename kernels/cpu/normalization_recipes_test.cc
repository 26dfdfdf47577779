// Normalisation by every recipe, forward and unrolled, against the float64 oracle, finite differences and a closed
// form, on every instruction set.
#include <algorithm>
#include <cmath>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/targets.h"
//
#include "hwy/highway.h"
#include "kernels/cpu/normalization_test_util.h"

namespace sinkhorn::cpu {
namespace {

using oracle::NamedRecipe;

const std::vector<Shape> kShapes = {{1, 1},   {1, 5},   {5, 1},   {2, 2},   {3, 7},   {4, 4},   {8, 8},   {16, 16},
                                    {31, 37}, {32, 32}, {64, 64}, {300, 7}, {7, 300}, {33, 65}, {1, 2000}};

class Recipes : public testing::TestWithParam<int> {};

TEST_P(Recipes, MatchTheOracleInEveryShape) {
  for (Precision precision : {Precision::kStrict, Precision::kDouble}) {
    for (Shape shape : kShapes) {
      for (double deviation : {1.0, 6.0}) {
        Request request = RandomRequest(shape, shape.n * shape.m > 500 ? 2 : 19, deviation, precision);
        request.recipe = TestRecipes()[GetParam()].recipe;
        ExpectOracle(request, Solve(request));  // Without the history of a backward pass.
        AddCotangent(&request);
        ExpectOracle(request, Solve(request));
      }
    }
  }
}

// Far beyond the range of exp: float32 hands such members to float64, and float64 to logarithms.
TEST_P(Recipes, MatchTheOracleForLargeLogits) {
  for (Precision precision : {Precision::kStrict, Precision::kDouble}) {
    for (Shape shape : {Shape{1, 5}, Shape{4, 4}, Shape{8, 8}, Shape{9, 5}, Shape{40, 30}}) {
      for (double deviation : {30.0, 200.0, 3000.0}) {
        Request request = RandomRequest(shape, 5, deviation, precision);
        request.recipe = TestRecipes()[GetParam()].recipe;
        AddCotangent(&request);
        ExpectOracle(request, Solve(request));
      }
    }
  }
}

// Logits that are large together: exp overflows, differences are harmless.
TEST_P(Recipes, MatchTheOracleForShiftedLogits) {
  for (double shift : {-1e4, -100.0, 100.0, 1e4}) {
    for (Shape shape : {Shape{4, 4}, Shape{5, 6}, Shape{40, 30}}) {
      Request request = RandomRequest(shape, 3, 1, Precision::kStrict);
      for (double& logit : request.logits) logit += shift;
      request.recipe = TestRecipes()[GetParam()].recipe;
      AddCotangent(&request);
      ExpectOracle(request, Solve(request));
    }
  }
}

TEST_P(Recipes, MatchTheOracleWithMarginalsAndDustbin) {
  for (Precision precision : {Precision::kStrict, Precision::kDouble}) {
    for (Shape shape : {Shape{1, 1}, Shape{4, 4}, Shape{3, 7}, Shape{8, 8}, Shape{45, 30}}) {
      for (int variant = 0; variant < 4; ++variant) {
        Request request = RandomRequest(shape, 5, 2, precision);
        request.recipe = TestRecipes()[GetParam()].recipe;
        request.shared_marginals = variant == 3;
        const int64_t members = request.shared_marginals ? 1 : request.count;
        if (variant > 0) request.row_marginals = Uniform(members * shape.n, .1, 3, 11);
        if (variant > 1) request.column_marginals = Uniform(members * shape.m, .1, 3, 12);
        for (bool dustbin : {false, true}) {
          if (dustbin) request.dustbin = Uniform(request.count, -1, 1, 13);
          AddCotangent(&request);
          ExpectOracle(request, Solve(request));
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Recipes, testing::Range(0, static_cast<int>(TestRecipes().size())));

// The reverse of the steps against central differences of the steps, both by the kernels.
TEST(Unrolled, EqualsFiniteDifferences) {
  for (const NamedRecipe& recipe : TestRecipes()) {
    if (recipe.recipe.logit_floor > -1e4) continue;  // Not differentiable everywhere.
    SCOPED_TRACE(recipe.name);
    for (Shape shape : {Shape{4, 4}, Shape{3, 5}}) {
      Request request = RandomRequest(shape, 1, 1, Precision::kDouble);
      request.recipe = recipe.recipe;
      AddCotangent(&request);
      const auto loss = [&](const Vector& logits) {
        Request shifted = request;
        shifted.logits = logits;
        shifted.cotangent.clear();
        const Vector plan = Solve(shifted).plan;
        double sum = 0;
        for (size_t k = 0; k < plan.size(); ++k) sum += plan[k] * request.cotangent[k];
        return sum;
      };
      const Vector expected = oracle::FiniteDifferences(loss, request.logits, 1e-5);
      const double scale = MaxAbs(expected);
      EXPECT_LE(MaxDifference(Solve(request).gradient, expected), 1e-6 * scale);
      request.precision = Precision::kStrict;
      EXPECT_LE(MaxDifference(Solve(request).gradient, expected), 1e-5 * scale);
    }
  }
}

// An added guard shrinks some rows by a factor per iteration, and the scalings drift: float32 loses them after a few
// dozen iterations, float64 after a few hundred.
TEST(Unrolled, RowsThatAnAddedGuardStarves) {
  for (int iterations : {20, 36, 60, 300}) {
    for (Shape shape : {Shape{40, 2}, Shape{2, 17}, Shape{150, 7}}) {
      for (Precision precision : {Precision::kStrict, Precision::kDouble}) {
        Request request = RandomRequest(shape, 3, 1, precision);
        request.recipe = oracle::CustomRecipe(Start::kRowSoftmax, .84, Order::kRowColumn, Guard::kAdd, .47);
        request.iterations = iterations;
        request.row_marginals = Uniform(request.count * shape.n, .125, 4, 17);
        AddCotangent(&request);
        SCOPED_TRACE(iterations);
        ExpectOracle(request, Solve(request));
      }
    }
  }
}

// 2 x 2: p = sigmoid((L11 + L22 - L12 - L21) / 2), dp/dL11 = p (1 - p) / 2.
TEST(Unrolled, TwoByTwoClosedForm) {
  Request request = RandomRequest({2, 2}, 50, 1, Precision::kDouble);
  request.iterations = 200;
  for (int64_t k = 0; k < request.count; ++k) {
    for (int e = 0; e < 4; ++e) request.cotangent.push_back(e == 0);
  }
  const Answer answer = Solve(request);
  for (int64_t k = 0; k < request.count; ++k) {
    const double* l = &request.logits[4 * k];
    const double p = 1 / (1 + std::exp(-(l[0] + l[3] - l[1] - l[2]) / 2));
    EXPECT_NEAR(answer.plan[4 * k], p, 1e-12);
    EXPECT_NEAR(answer.plan[4 * k + 1], 1 - p, 1e-12);
    EXPECT_NEAR(answer.gradient[4 * k], p * (1 - p) / 2, 1e-12);
    EXPECT_NEAR(answer.gradient[4 * k + 1], -p * (1 - p) / 2, 1e-12);
  }
}

TEST(Targets, AllMatchTheOracle) {
  const int64_t chosen = hwy::SupportedTargets();
  for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    SCOPED_TRACE(hwy::TargetName(target));
    for (Precision precision : {Precision::kStrict, Precision::kDouble}) {
      for (Shape shape :
           {Shape{1, 1}, Shape{4, 4}, Shape{8, 8}, Shape{5, 7}, Shape{40, 33}, Shape{70, 64}, Shape{150, 20}}) {
        for (const NamedRecipe& recipe : TestRecipes()) {
          for (double deviation : {1.0, 200.0}) {
            Request request = RandomRequest(shape, shape.n * shape.m > 500 ? 1 : 9, deviation, precision);
            request.recipe = recipe.recipe;
            AddCotangent(&request);
            ExpectOracle(request, Solve(request));
          }
        }
        Request exact = RandomRequest(shape, 5, 2, precision);
        exact.recipe = ExactRecipe();
        exact.iterations = 100;
        exact.mode = BackwardMode::kImplicit;
        AddCotangent(&exact);
        const Answer answer = Solve(exact);
        EXPECT_LE(answer.report.convergence.marginal_error_b, 1e-12 * static_cast<double>(shape.n));
        const Vector plan = Member(answer.plan, 0, shape.n * shape.m);
        const Vector cotangent = Rounded(exact, exact.cotangent, 0, shape.n * shape.m);
        const Vector expected = oracle::ImplicitGradient(plan, shape.n, shape.m, cotangent);
        EXPECT_LE(MaxDifference(Member(answer.gradient, 0, shape.n * shape.m), expected),
                  1e-5 * (MaxAbs(expected) + 1e-3));
      }
    }
  }
  hwy::SetSupportedTargetsForTest(chosen);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace
}  // namespace sinkhorn::cpu
