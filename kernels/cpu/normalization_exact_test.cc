// The recipe EXACT: the marginals to rounding, as a scaling of exp W.
#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/cpu/normalization_test_util.h"

namespace sinkhorn::cpu {
namespace {

struct ExactCase {
  Shape shape;
  double deviation;
  int64_t count;
};

TEST(Exact, ReachesTheMarginals) {
  for (const ExactCase& c : std::vector<ExactCase>{{{1, 1}, 1, 2},
                                                   {{1, 7}, 4, 2},
                                                   {{7, 1}, 4, 2},
                                                   {{4, 4}, 2, 200},
                                                   {{4, 4}, 8, 200},
                                                   {{4, 4}, 16, 200},
                                                   {{5, 3}, 16, 50},
                                                   {{8, 8}, 8, 50},
                                                   {{20, 30}, 8, 9},
                                                   {{64, 64}, 4, 3},
                                                   {{100, 40}, 8, 2},
                                                   {{300, 200}, 2, 1},
                                                   {{200, 300}, 4, 1}}) {
    for (bool marginals : {false, true}) {
      for (Precision precision : {Precision::kStrict, Precision::kDouble}) {
        Request request = RandomRequest(c.shape, c.count, c.deviation, precision);
        request.recipe = ExactRecipe();
        request.iterations = 200;
        if (marginals) {
          request.row_marginals = Uniform(c.count * c.shape.n, .01, 1, 4);
          request.column_marginals = Uniform(c.count * c.shape.m, .01, 1, 5);
          for (int64_t k = 0; k < c.count; ++k) {  // Equal totals.
            double rows = 0, columns = 0;
            for (int64_t i = 0; i < c.shape.n; ++i) rows += request.row_marginals[k * c.shape.n + i];
            for (int64_t j = 0; j < c.shape.m; ++j) columns += request.column_marginals[k * c.shape.m + j];
            for (int64_t j = 0; j < c.shape.m; ++j) request.column_marginals[k * c.shape.m + j] *= rows / columns;
          }
        }
        SCOPED_TRACE(absl::StrCat(Name(request), " deviation ", c.deviation));
        const Answer answer = Solve(request);
        ASSERT_TRUE(answer.status.ok());
        // STRICT: float32 marginals have equal totals to 1e-7 only.
        const double total = static_cast<double>(std::max(c.shape.n, c.shape.m));
        const double tolerance = precision == Precision::kDouble ? 1e-13 * total : 1e-6 * total;
        for (const Convergence& member : answer.convergence) {
          ASSERT_LE(member.marginal_error_a, tolerance);
          ASSERT_LE(member.marginal_error_b, tolerance);
          ASSERT_LE(member.iterations, 100);
          if (precision == Precision::kDouble) {
            ASSERT_TRUE(member.converged);
            ASSERT_EQ(member.stop_reason, StopReason::kPrecision);
          }
        }
        // It is a scaling of exp W: all 2 x 2 cross ratios agree.
        for (int64_t k : {int64_t{0}, c.count - 1}) {
          const Vector logits = Rounded(request, request.logits, k, c.shape.n * c.shape.m);
          const Vector plan = Member(answer.plan, k, c.shape.n * c.shape.m);
          for (int64_t i = 1; i < c.shape.n; ++i) {
            for (int64_t j = 1; j < c.shape.m; ++j) {
              const int64_t at = i * c.shape.m + j, left = at - 1, up = at - c.shape.m, corner = up - 1;
              if (std::min({plan[at], plan[left], plan[up], plan[corner]}) < 1e-30) continue;  // May be flushed.
              const double actual =
                  std::log(plan[at]) + std::log(plan[corner]) - std::log(plan[left]) - std::log(plan[up]);
              const double expected = logits[at] + logits[corner] - logits[left] - logits[up];
              ASSERT_NEAR(actual, expected, precision == Precision::kDouble ? 1e-10 : 1e-5);
            }
          }
        }
      }
    }
  }
}

TEST(Exact, StopsAtTheTolerance) {
  Request request = RandomRequest({6, 6}, 40, 3, Precision::kDouble);
  request.recipe = ExactRecipe();
  request.iterations = 200;
  request.tolerance = 1e-3;
  const Answer answer = Solve(request);
  for (const Convergence& member : answer.convergence) {
    EXPECT_TRUE(member.converged);
    EXPECT_EQ(member.stop_reason, StopReason::kTolerance);
    EXPECT_LE(std::max(member.marginal_error_a, member.marginal_error_b), 1e-3);
  }
  EXPECT_LT(answer.report.convergence.iterations, 12);
}

TEST(Exact, DustbinAndGradient) {
  Request request = RandomRequest({5, 4}, 7, 2, Precision::kDouble);
  request.recipe = ExactRecipe();
  request.iterations = 200;
  request.mode = BackwardMode::kImplicit;
  request.dustbin = Uniform(request.count, -1, 1, 3);
  AddCotangent(&request);
  const Answer answer = Solve(request);
  for (int64_t k = 0; k < request.count; ++k) {
    EXPECT_LE(answer.convergence[k].marginal_error_a, 1e-12);
    EXPECT_LE(answer.convergence[k].marginal_error_b, 1e-12);
    const Vector plan = Member(answer.plan, k, 30);
    EXPECT_LE(MaxDifference(plan, OraclePlan(request, k)), 1e-9);
    const Vector gradient = oracle::ImplicitGradient(plan, 6, 5, Member(request.cotangent, k, 30));
    double border = 0;
    for (int64_t e = 0; e < 30; ++e) {
      const int64_t i = e / 5, j = e % 5;
      if (i == 5 || j == 4) {
        border += gradient[e];
      } else {
        EXPECT_NEAR(answer.gradient[k * 20 + i * 4 + j], gradient[e], 1e-10);
      }
    }
    EXPECT_NEAR(answer.dustbin_gradient[k], border, 1e-9);
  }
}

}  // namespace
}  // namespace sinkhorn::cpu
