// The implicit backward modes against the oracle, against the unrolled one, and against each other away from
// convergence.
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/cpu/normalization_test_util.h"

namespace sinkhorn::cpu {
namespace {

using oracle::NamedRecipe;

const std::vector<BackwardMode> kImplicitModes = {BackwardMode::kImplicit, BackwardMode::kImplicitUnit,
                                                  BackwardMode::kImplicitFull};

Vector OracleImplicit(BackwardMode mode, const Vector& plan, Shape shape, const Vector& cotangent) {
  if (mode == BackwardMode::kImplicit) return oracle::ImplicitGradient(plan, shape.n, shape.m, cotangent);
  if (mode == BackwardMode::kImplicitUnit) return oracle::ImplicitUnitGradient(plan, shape.n, shape.m, cotangent);
  return oracle::ImplicitFullGradient(plan, shape.n, shape.m, cotangent);
}

TEST(Implicit, MatchesTheOracle) {
  for (BackwardMode mode : kImplicitModes) {
    for (Shape shape :
         {Shape{1, 1}, Shape{4, 4}, Shape{8, 8}, Shape{3, 7}, Shape{17, 17}, Shape{40, 40}, Shape{45, 30}}) {
      if (mode != BackwardMode::kImplicit && shape.n != shape.m) continue;  // Not singular there, nor meant to be.
      for (Precision precision : {Precision::kStrict, Precision::kDouble}) {
        for (const Recipe& recipe : {LogRowColumnRecipe(), ExpColumnRowRecipe()}) {
          Request request = RandomRequest(shape, 11, 1.5, precision);
          request.recipe = recipe;
          request.mode = mode;
          AddCotangent(&request);
          SCOPED_TRACE(absl::StrCat(Name(request), " mode ", static_cast<int>(mode)));
          const Answer answer = Solve(request);
          ASSERT_TRUE(answer.status.ok()) << answer.status;
          const int64_t size = shape.n * shape.m;
          for (int64_t member : {0, 5, 10}) {
            const Vector plan = OraclePlan(request, member);
            const Vector cotangent = Rounded(request, request.cotangent, member, size);
            const Vector expected = OracleImplicit(mode, plan, shape, cotangent);
            const double tolerance = precision == Precision::kDouble ? 1e-10 : 1e-6;
            EXPECT_LE(MaxDifference(Member(answer.gradient, member, size), expected),
                      tolerance * (MaxAbs(expected) + 1e-3));
            EXPECT_LE(MaxDifference(Member(answer.plan, member, size), plan), tolerance);
          }
        }
      }
    }
  }
}

// At the fixed point all modes are the derivative of the iterations; with offset or softmax through the start as well.
TEST(Implicit, EqualsUnrolledAtConvergence) {
  for (const NamedRecipe& recipe : TestRecipes()) {
    if (recipe.recipe.guard_value > 1e-5) continue;  // Such a guard moves the fixed point away from the marginals.
    SCOPED_TRACE(recipe.name);
    for (Shape shape : {Shape{4, 4}, Shape{6, 9}, Shape{40, 40}}) {
      Request request = RandomRequest(shape, 3, 1, Precision::kDouble);
      request.recipe = recipe.recipe;
      request.iterations = 400;
      if (recipe.recipe.logit_floor > -1e4) {
        for (double& logit : request.logits) logit += std::abs(logit + .5) < .01 ? .02 : 0;
      }
      AddCotangent(&request);
      const Vector unrolled = Solve(request).gradient;
      for (BackwardMode mode : kImplicitModes) {
        if (mode != BackwardMode::kImplicit && shape.n != shape.m) continue;
        request.mode = mode;
        // DEEPSEEK's guards leave the sums of its fixed point 1e-6 away from 1, which two of the modes do not know.
        const bool exact = recipe.recipe.guard_value < 1e-8 || mode == BackwardMode::kImplicit;
        EXPECT_LE(MaxDifference(Solve(request).gradient, unrolled), exact ? 1e-9 : 1e-5) << static_cast<int>(mode);
      }
      request.mode = BackwardMode::kUnrolled;
    }
  }
}

TEST(Implicit, BackwardFromThePlanAlone) {
  for (BackwardMode mode : kImplicitModes) {
    for (Shape shape : {Shape{4, 4}, Shape{40, 40}}) {
      Request forward = RandomRequest(shape, 9, 1, Precision::kDouble);
      forward.mode = mode;
      AddCotangent(&forward);
      const Answer both = Solve(forward);
      Request backward = forward;
      backward.logits.clear();
      backward.plan = both.plan;
      const Answer alone = Solve(backward);
      ASSERT_TRUE(alone.status.ok());
      EXPECT_EQ(alone.gradient, both.gradient);
      EXPECT_EQ(alone.report.convergence.stop_reason, StopReason::kNotIterated);
      EXPECT_EQ(alone.report.convergence.iterations, 0);
      EXPECT_LE(MaxDifference(alone.row_sums, both.row_sums), 1e-13);
      EXPECT_NEAR(alone.report.convergence.marginal_error_a, both.report.convergence.marginal_error_a, 1e-12);
    }
  }
}

// The corrected-backward study: 8 x 8, logits uniform in [0, 4], 10 iterations that end on rows, so that columns are
// off. Measured against the derivative of the iterations done and against that of the map iterated without end, the
// system with the marginals that P really has is nearer than those that assume 1: on average, and for more than 85 % of
// the matrices (94 % and 91 % of these; average errors 5.9e-6 against 6.2e-6, and 1.24e-6 against 1.39e-6).
TEST(Implicit, RealMarginalsBeatUnitMarginalsAwayFromConvergence) {
  constexpr int64_t kCount = 4096, kSize = 64;
  Request request;
  request.n = request.m = 8;
  request.count = kCount;
  request.dtype = DType::kFloat64;
  request.precision = Precision::kDouble;
  request.recipe = ExpColumnRowRecipe();
  request.iterations = 10;
  request.logits = Uniform(kCount * kSize, 0, 4, 3);
  AddCotangent(&request);
  const Vector unrolled = Solve(request).gradient;
  std::vector<Vector> gradients;
  for (BackwardMode mode : kImplicitModes) {
    request.mode = mode;
    gradients.push_back(Solve(request).gradient);
  }
  request.recipe = ExactRecipe();
  request.iterations = 200;
  request.mode = BackwardMode::kImplicit;
  const Vector infinite = Solve(request).gradient;

  const auto error = [&](const Vector& gradient, const Vector& truth, int64_t member) {
    double sum = 0;
    for (int64_t k = member * kSize; k < (member + 1) * kSize; ++k) sum += std::pow(gradient[k] - truth[k], 2);
    return std::sqrt(sum);
  };
  for (const Vector* truth : {&unrolled, &infinite}) {
    for (size_t other : {1, 2}) {
      int64_t wins = 0;
      double real_total = 0, other_total = 0;
      for (int64_t member = 0; member < kCount; ++member) {
        const double real = error(gradients[0], *truth, member), unit = error(gradients[other], *truth, member);
        wins += real < unit;
        real_total += real;
        other_total += unit;
      }
      EXPECT_LT(real_total, .97 * other_total);
      EXPECT_GT(wins, kCount * 85 / 100);
    }
  }
}

}  // namespace
}  // namespace sinkhorn::cpu
