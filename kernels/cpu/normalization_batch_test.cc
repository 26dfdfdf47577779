// Normalisation of requests: each member stops by itself and has the same bits in any company; every dtype, matrices
// cut into blocks, failures, and how the work is cut.
#include <algorithm>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/cpu/normalization_test_util.h"

namespace sinkhorn::cpu {
namespace {

// ---- Early stop -----------------------------------------------------------------------------------------------------
TEST(Tolerance, EachMemberStopsByItself) {
  for (Precision precision : {Precision::kStrict, Precision::kDouble}) {
    for (Shape shape : {Shape{4, 4}, Shape{5, 7}, Shape{40, 30}}) {
      for (double deviation : {1.0, 90.0}) {  // 90: in logarithms, or not converged.
        for (const Recipe& recipe : {LogRowColumnRecipe(), ExpColumnRowRecipe(), DeepSeekRecipe()}) {
          Request request = RandomRequest(shape, 21, deviation, precision);
          request.recipe = recipe;
          if (shape.n != shape.m) request.column_marginals = Vector(request.count * shape.m, double(shape.n) / shape.m);
          request.iterations = 60;
          request.tolerance = 1e-3;
          AddCotangent(&request);
          SCOPED_TRACE(absl::StrCat(Name(request), " deviation ", deviation));
          const Answer answer = Solve(request);
          ASSERT_TRUE(answer.status.ok());
          int32_t most = 0;
          for (int64_t k = 0; k < request.count; ++k) {
            const Convergence& c = answer.convergence[k];
            most = std::max(most, c.iterations);
            EXPECT_EQ(c.converged, std::max(c.marginal_error_a, c.marginal_error_b) <= 1e-3);
            EXPECT_EQ(c.stop_reason, c.converged ? StopReason::kTolerance : StopReason::kMaxIterations);
            EXPECT_TRUE(c.converged || c.iterations == request.iterations);
            // Its result is that of as many iterations without a tolerance.
            if (k % 10 != 0) continue;
            Request fixed = request;
            fixed.tolerance = 0;
            fixed.iterations = c.iterations;
            const Answer expected = Solve(fixed);
            const int64_t size = shape.n * shape.m;
            const double rounding = precision == Precision::kDouble ? 1e-12 : 1e-6;
            EXPECT_LE(MaxDifference(Member(answer.plan, k, size), Member(expected.plan, k, size)), rounding);
            EXPECT_LE(MaxDifference(Member(answer.gradient, k, size), Member(expected.gradient, k, size)),
                      10 * rounding);
            EXPECT_NEAR(c.marginal_error_a, expected.convergence[k].marginal_error_a, 1e-5);
          }
          EXPECT_EQ(answer.report.convergence.iterations, most);
        }
      }
    }
  }
}

TEST(Convergence, WithoutToleranceAllIterationsAreDone) {
  Request request = RandomRequest({4, 4}, 40, 1, Precision::kStrict);
  const Answer answer = Solve(request);
  Convergence worst;
  for (const Convergence& member : answer.convergence) {
    EXPECT_EQ(member.iterations, request.iterations);
    EXPECT_EQ(member.stop_reason, StopReason::kMaxIterations);
    worst.marginal_error_a = std::max(worst.marginal_error_a, member.marginal_error_a);
    worst.marginal_error_b = std::max(worst.marginal_error_b, member.marginal_error_b);
  }
  EXPECT_EQ(answer.report.convergence.marginal_error_a, worst.marginal_error_a);
  EXPECT_EQ(answer.report.convergence.marginal_error_b, worst.marginal_error_b);
  EXPECT_GT(worst.marginal_error_a, 1e-6);  // Rows were scaled first,
  EXPECT_LT(worst.marginal_error_b, 1e-6);  // columns last.
}

// ---- The same bits in any company -----------------------------------------------------------------------------------
// Member `index` of the request alone.
Request Alone(const Request& request, int64_t index) {
  const int64_t border = !request.dustbin.empty();
  const auto part = [&](const Vector& values, int64_t size) {
    return values.empty() ? Vector() : Member(values, index, size);
  };
  Request alone = request;
  alone.count = 1;
  alone.logits = part(request.logits, request.n * request.m);
  alone.row_marginals = part(request.row_marginals, request.n);
  alone.column_marginals = part(request.column_marginals, request.m);
  alone.dustbin = part(request.dustbin, 1);
  alone.cotangent = part(request.cotangent, (request.n + border) * (request.m + border));
  return alone;
}

TEST(Bits, AreTheSameAloneAndInAnyPosition) {
  for (int variant = 0; variant < 8; ++variant) {
    for (Shape shape : {Shape{4, 4}, Shape{8, 8}, Shape{5, 3}, Shape{16, 16}, Shape{40, 33}}) {
      const int64_t count = shape.n * shape.m > 1000 ? 9 : 1000, size = shape.n * shape.m;
      Request request = RandomRequest(shape, count, 1, variant % 2 ? Precision::kDouble : Precision::kStrict);
      // Strangers of every kind of range beside each other.
      for (int64_t k = 0; k < count; ++k) {
        const double scale = k % 7 == 3 ? 40 : k % 11 == 5 ? 1000 : 1;
        for (int64_t e = 0; e < size; ++e) request.logits[k * size + e] *= scale;
      }
      if (variant >= 2) request.recipe = ExpColumnRowRecipe();
      if (variant >= 4) request.tolerance = 1e-3;
      if (variant == 5) request.row_marginals = Uniform(count * shape.n, .5, 2, 3);
      if (variant >= 6) request.mode = BackwardMode::kImplicit;
      if (variant == 7) {
        request.recipe = ExactRecipe();
        request.iterations = 100;
      }
      AddCotangent(&request);
      SCOPED_TRACE(absl::StrCat(Name(request), " variant ", variant));
      const Answer together = Solve(request);
      for (int64_t k : {int64_t{0}, int64_t{3}, int64_t{5}, count / 2, count - 1}) {
        const Answer alone = Solve(Alone(request, k));
        EXPECT_EQ(alone.plan, Member(together.plan, k, size)) << k;
        EXPECT_EQ(alone.gradient, Member(together.gradient, k, size)) << k;
        EXPECT_EQ(alone.row_sums, Member(together.row_sums, k, shape.n)) << k;
        EXPECT_EQ(alone.convergence[0].iterations, together.convergence[k].iterations) << k;
        EXPECT_EQ(alone.convergence[0].marginal_error_a, together.convergence[k].marginal_error_a) << k;
      }
    }
  }
}

// ---- Types, sizes, failures -----------------------------------------------------------------------------------------
TEST(Types, HalfPrecisionTensors) {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat64, DType::kFloat32}) {
    for (Precision precision : {Precision::kStrict, Precision::kDouble}) {
      for (Shape shape : {Shape{4, 4}, Shape{8, 8}, Shape{5, 7}, Shape{40, 33}}) {
        for (const Recipe& recipe : {LogRowColumnRecipe(), ExpColumnRowRecipe()}) {
          Request request = RandomRequest(shape, 17, 1, precision);
          request.recipe = recipe;
          request.dtype = dtype;
          AddCotangent(&request);
          SCOPED_TRACE(Name(request));
          const Answer answer = Solve(request);
          // Outputs are rounded once more, to the dtype: half a unit in the last place of numbers up to 1 (4 for
          // gradients).
          const double unit = dtype == DType::kFloat16 ? 0x1p-11 : dtype == DType::kBFloat16 ? 0x1p-8 : 1e-6;
          const int64_t size = shape.n * shape.m;
          for (int64_t k : {0, 16}) {
            const oracle::Normalization problem = OracleProblem(request, k);
            EXPECT_LE(MaxDifference(Member(answer.plan, k, size), oracle::Normalize(problem)), 1.01 * unit);
            const Vector gradient = oracle::UnrolledGradient(problem, Rounded(request, request.cotangent, k, size));
            EXPECT_LE(MaxDifference(Member(answer.gradient, k, size), gradient), 4 * unit);
          }
        }
      }
    }
  }
}

// Large enough to be cut into blocks of rows and kept resident; some need the other tiers.
TEST(Sizes, LargeMatricesInPhases) {
  for (bool columns_first : {false, true}) {
    Request request = RandomRequest({320, 420}, 2, columns_first ? 100 : 1, Precision::kStrict);
    request.recipe = columns_first ? ExpColumnRowRecipe() : LogRowColumnRecipe();
    request.iterations = 30;
    AddCotangent(&request);
    ExpectOracle(request, Solve(request));
  }
}

TEST(Sizes, LargeExactAndImplicit) {
  Request request = RandomRequest({450, 400}, 2, 2, Precision::kDouble);
  request.recipe = ExactRecipe();
  request.iterations = 100;
  request.mode = BackwardMode::kImplicit;
  AddCotangent(&request);
  const Answer answer = Solve(request);
  ASSERT_TRUE(answer.status.ok());
  EXPECT_LT(answer.report.convergence.marginal_error_a, 1e-10);
  EXPECT_LT(answer.report.convergence.marginal_error_b, 1e-10);
  // The gradient in log K has the sums of alpha and beta taken out: its own sums vanish.
  for (int64_t k = 0; k < 2; ++k) {
    const Vector gradient = Member(answer.gradient, k, 450 * 400);
    EXPECT_LE(MaxAbs(oracle::RowSums(gradient, 450, 400)), 1e-11);
    EXPECT_LE(MaxAbs(oracle::ColumnSums(gradient, 450, 400)), 1e-11);
  }
}

// More marginal on one side than on the other: scalings would drift by a factor of 43 per iteration.
TEST(Sizes, UnequalTotalsDoNotOverflow) {
  Request request = RandomRequest({300, 7}, 2, 1, Precision::kStrict);
  request.iterations = 400;
  ExpectOracle(request, Solve(request));
}

TEST(Failures, OverflowIsReported) {
  struct {
    BackwardMode mode;
    DType dtype;
    double huge;
  } const cases[] = {{BackwardMode::kUnrolled, DType::kFloat32, 3e38},
                     {BackwardMode::kUnrolled, DType::kFloat64, 1.7e308},
                     {BackwardMode::kImplicit, DType::kFloat64, 1.7e308}};
  for (Shape shape : {Shape{4, 4}, Shape{5, 3}, Shape{40, 40}}) {
    for (const auto& [mode, dtype, huge] : cases) {
      Request request = RandomRequest(shape, 3, 1, Precision::kStrict);
      request.mode = mode;
      request.dtype = dtype;
      request.cotangent = Vector(3 * shape.n * shape.m, 0);
      for (size_t k = 0; k < request.cotangent.size(); ++k) request.cotangent[k] = k % 2 ? huge : -huge;
      // What overflows float32 alone is finite where float64 solves STRICT.
      const bool finite = dtype == DType::kFloat32 && SolvesInDouble(Problem());
      EXPECT_EQ(Solve(request).status.code(), finite ? absl::StatusCode::kOk : absl::StatusCode::kFailedPrecondition)
          << shape.n << ", " << huge;
    }
  }
}

TEST(Work, SmallRequestsAreOneChunkAndEstimatesArePositive) {
  const Vector logits(32 * 16);
  const Tensor tensor(DType::kFloat32, logits);
  Problem problem;
  problem.kind = ProblemKind::kNormalization;
  problem.count = 32;
  problem.n = problem.m = 4;
  problem.normalization.logits = tensor.view();
  problem.solver.max_iterations = 20;
  const std::unique_ptr<Work> work = MakeNormalizationWork(problem);
  EXPECT_EQ(work->chunk_count(), 1);
  EXPECT_GT(work->chunk_seconds(), 0);
  // A group of members at a time: of one where there are no vectors, in float64.
  EXPECT_GT(NormalizationBytes(problem), SolvesInDouble(problem) ? 16 * 8 : 32 * 16 * 4);
  const double seconds = NormalizationSeconds(problem);
  problem.count = 64;
  EXPECT_DOUBLE_EQ(NormalizationSeconds(problem), 2 * seconds);
}

}  // namespace
}  // namespace sinkhorn::cpu
