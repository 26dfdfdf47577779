// Normalisation forward, against the oracle: every recipe, shapes, given marginals, dustbin, logits
// up to 1e4, all dtypes, tolerance, exact solutions.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/conformance/backends.h"
#include "tests/conformance/check.h"
#include "tests/conformance/check_normalization.h"
#include "tests/conformance/random_problems.h"
#include "tests/oracle/recipes.h"

namespace sinkhorn::conformance {
namespace {

using oracle::CustomRecipe;
using oracle::NamedRecipe;
using oracle::Normalization;

std::vector<NamedRecipe> Recipes() {
  return {
      {"LOG_ROW_COLUMN", LogRowColumnRecipe()},
      {"EXP_COLUMN_ROW", ExpColumnRowRecipe()},
      {"DEEPSEEK", DeepSeekRecipe()},
      {"plain, columns first", CustomRecipe(Start::kExp, 0, Order::kColumnRow, Guard::kNone, 0)},
      {"guard by maximum", CustomRecipe(Start::kExp, 0, Order::kRowColumn, Guard::kMax, 2)},
      {"guard by sum", CustomRecipe(Start::kExp, 0, Order::kRowColumn, Guard::kAdd, 0.5)},
      {"offset", CustomRecipe(Start::kExp, 0.25, Order::kRowColumn, Guard::kNone, 0)},
      {"softmax, no guard", CustomRecipe(Start::kRowSoftmax, 0, Order::kRowColumn, Guard::kNone, 0)},
      {"softmax, offset, guard by maximum",
       CustomRecipe(Start::kRowSoftmax, 0.01, Order::kRowColumn, Guard::kMax, 0.9)},
      {"floor, offset, guard, columns first",
       CustomRecipe(Start::kExp, 0.125, Order::kColumnRow, Guard::kAdd, 0.0625, -0.75)},
  };
}

class NormalizationTest : public ConformanceTest {
 protected:
  void CheckForward(const Case& c) {
    SCOPED_TRACE(c.name);
    const Answer answer = SolveAlone(backend(), c);
    if (!answer.status.ok()) return;
    for (int64_t index = 0; index < c.problem.count; ++index) {
      ExpectMatchesRecipe(MemberCase(c, index), MemberAnswer(answer, index, c.problem.count));
    }
  }

  void CheckBothPrecisions(Case c) {
    const std::string name = c.name;
    for (Precision precision : {Precision::kStrict, Precision::kDouble}) {
      c.solver().precision = precision;
      c.name = name + (precision == Precision::kDouble ? " DOUBLE" : " STRICT");
      CheckForward(c);
    }
  }

  // `count` members of normal logits, float32.
  static Case Batch(int64_t count, int64_t n, int64_t m, const NamedRecipe& recipe, int iterations, double deviation,
                    uint64_t seed) {
    Case c = CaseOf(RandomLogits(n, m, recipe.recipe, iterations, deviation, seed),
                    absl::StrCat(recipe.name, " ", count, " of ", n, " x ", m, " deviation ", deviation));
    c.problem.count = count;
    c.logits = Tensor::Of(Random(seed).Normals(count * n * m, deviation));
    return c;
  }
};

TEST_P(NormalizationTest, ShapesOfEveryRecipe) {
  const int64_t shapes[][2] = {{1, 1},   {1, 7},  {7, 1},   {2, 2},   {3, 3},   {4, 4},
                               {5, 3},   {8, 8},  {6, 11},  {16, 16}, {17, 31}, {32, 32},
                               {33, 33}, {31, 2}, {64, 64}, {100, 7}, {7, 100}, {67, 129}};
  uint64_t seed = 1;
  for (const NamedRecipe& recipe : Recipes()) {
    for (const auto& [n, m] : shapes) {
      for (double deviation : {1.0, 6.0}) {
        CheckBothPrecisions(Batch(3, n, m, recipe, 10, deviation, ++seed));
      }
    }
  }
}

TEST_P(NormalizationTest, IterationCounts) {
  for (const NamedRecipe& recipe : Recipes()) {
    for (int iterations : {1, 2, 3, 20, 100}) {
      for (int64_t n : {4, 19}) {
        CheckBothPrecisions(Batch(2, n, n + 1, recipe, iterations, 2, iterations));
      }
    }
  }
}

// Counts around the widths of vectors, and many.
TEST_P(NormalizationTest, MemberCounts) {
  for (int64_t count : {1, 2, 7, 8, 15, 16, 17, 33, 1000}) {
    for (int64_t n : {4, 8}) {
      for (const NamedRecipe& recipe : {Recipes()[0], Recipes()[1], Recipes()[2]}) {
        CheckBothPrecisions(Batch(count, n, n, recipe, 20, 1.5, count));
      }
    }
  }
}

TEST_P(NormalizationTest, LargeMatrices) {
  for (const NamedRecipe& recipe : {Recipes()[0], Recipes()[1], Recipes()[2]}) {
    CheckBothPrecisions(Batch(1, 509, 701, recipe, 5, 2, 31));
    CheckBothPrecisions(Batch(2, 1000, 3, recipe, 5, 2, 32));
    CheckBothPrecisions(Batch(2, 3, 2000, recipe, 5, 2, 33));
  }
}

TEST_P(NormalizationTest, GivenMarginals) {
  for (const NamedRecipe& recipe : Recipes()) {
    for (int64_t n : {4, 9, 40}) {
      Case c = Batch(4, n, n + 2, recipe, 7, 1, 41);
      c.name += " marginals";
      c.row_marginals = Tensor::Of(Random(42).Uniforms(4 * n, 0.25, 3));
      CheckBothPrecisions(c);
      c.column_marginals = Tensor::Shared(Random(43).Uniforms(n + 2, 0.25, 3));
      CheckBothPrecisions(c);
      c.row_marginals = Tensor();
      CheckBothPrecisions(c);
    }
  }
}

TEST_P(NormalizationTest, SharedLogits) {
  Case c = Batch(3, 6, 5, Recipes()[0], 4, 1, 45);
  c.logits = Tensor::Shared(Random(46).Normals(30, 1));
  c.row_marginals = Tensor::Of(Random(47).Uniforms(18, 0.5, 2));
  CheckBothPrecisions(c);
}

TEST_P(NormalizationTest, Dustbin) {
  for (const NamedRecipe& recipe : Recipes()) {
    for (int64_t n : {1, 4, 7, 31, 40}) {
      Case c = Batch(3, n, n + 3, recipe, 8, 1, 51);
      c.name += " dustbin";
      c.dustbin_score = Tensor::Of({0.5, -1.0, 2.0});
      CheckBothPrecisions(c);
      c.dustbin_score = Tensor::Shared({0.75});
      c.row_marginals = Tensor::Of(Random(52).Uniforms(3 * n, 0.25, 3));
      CheckBothPrecisions(c);
    }
  }
}

TEST_P(NormalizationTest, LargeLogits) {
  for (const NamedRecipe& recipe : Recipes()) {
    for (double size : {30.0, 300.0, 1e4}) {
      for (int64_t n : {2, 4, 8, 24, 50}) {
        Case c = Batch(5, n, n, recipe, 20, 1, 61);
        c.name = absl::StrCat(recipe.name, " |W| to ", size, " n ", n);
        c.logits = Tensor::Of(Random(62).Uniforms(5 * n * n, -size, size));
        CheckBothPrecisions(c);
      }
    }
  }
}

// A common shift of all logits changes nothing where there is neither guard nor offset, however
// large it is.
TEST_P(NormalizationTest, ShiftedLogits) {
  for (double shift : {-8192.0, 8192.0}) {
    for (int64_t n : {4, 8, 40}) {
      Case c = Batch(3, n, n, Recipes()[0], 10, 1, 65);
      Vector logits = c.logits.values();
      for (double& logit : logits) logit = static_cast<float>(logit) + shift;
      c.logits = Tensor::Of(logits);
      c.name = absl::StrCat("shift ", shift, " n ", n);
      CheckBothPrecisions(c);
    }
  }
}

// The floor of LOG_ROW_COLUMN at -1e5 and a floor that bites.
TEST_P(NormalizationTest, LogitFloor) {
  Case c = Batch(2, 5, 5, Recipes()[0], 6, 1, 71);
  Vector logits = c.logits.values();
  logits[3] = logits[30] = -2e5;
  logits[7] = -1e5;
  c.logits = Tensor::Of(logits);
  c.name = "floor -1e5";
  c.solver().precision = Precision::kDouble;
  CheckForward(c);
}

TEST_P(NormalizationTest, EveryDType) {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    for (DType output : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
      for (int64_t n : {3, 4, 8, 21, 50}) {
        for (const NamedRecipe& recipe : {Recipes()[0], Recipes()[1], Recipes()[2]}) {
          Case c = Batch(3, n, n, recipe, 10, 1, 81);
          c.name = absl::StrCat(c.name, " dtype ", static_cast<int>(dtype), " to ", static_cast<int>(output));
          c.logits = Tensor::Of(c.logits.values(), dtype);
          c.row_marginals = Tensor::Of(Random(82).Uniforms(3 * n, 0.5, 2), dtype);
          c.output_dtype = output;
          CheckBothPrecisions(c);
        }
      }
    }
  }
}

// ---- Tolerance ------------------------------------------------------------------------------

TEST_P(NormalizationTest, StopsAtTheTolerance) {
  for (double tolerance : {1e-2, 1e-4}) {
    for (int64_t n : {4, 8, 40}) {
      Case c = Batch(6, n, n, Recipes()[0], 5000, 1.5, 91);
      c.solver().tolerance = tolerance;
      SCOPED_TRACE(c.name);
      const Answer answer = SolveAlone(backend(), c);
      for (int64_t index = 0; index < 6; ++index) {
        Normalization problem = MemberNormalization(c, index);
        const Convergence& convergence = answer.convergence[index];
        EXPECT_TRUE(convergence.converged);
        EXPECT_EQ(convergence.stop_reason, StopReason::kTolerance);
        EXPECT_LE(convergence.marginal_error_a, tolerance);
        EXPECT_LE(convergence.marginal_error_b, tolerance);
        // The certificate is true of the plan that came back ...
        const Vector plan = answer.plan.member(index, 6);
        EXPECT_LE(oracle::DistanceL1(oracle::RowSums(plan, n, n), Vector(n, 1.0)), tolerance + 1e-6 * n);
        // ... and the plan is the recipe's at the iteration it names.
        problem.iterations = convergence.iterations;
        const Vector expected = Normalize(problem);
        ExpectClose("STRICT P at a tolerance", plan, expected, PlanRoom(c, problem, expected));
      }
    }
  }
}

TEST_P(NormalizationTest, IterationLimitIsNotAnError) {
  Case c = Batch(2, 6, 6, Recipes()[0], 3, 6, 95);
  c.solver().tolerance = 1e-6;
  const Answer answer = SolveAlone(backend(), c);
  for (const Convergence& convergence : answer.convergence) {
    EXPECT_FALSE(convergence.converged);
    EXPECT_EQ(convergence.iterations, 3);
    EXPECT_EQ(convergence.stop_reason, StopReason::kMaxIterations);
  }
}

// ---- Exact ----------------------------------------------------------------------------------

class ExactTest : public NormalizationTest {
 protected:
  // Marginals to rounding, and P = diag(u) exp(W) diag(v): together they make it the solution.
  void CheckExact(const Case& c) {
    SCOPED_TRACE(c.name);
    const Answer answer = SolveAlone(backend(), c);
    if (!answer.status.ok()) return;
    const bool strict = c.solver().precision != Precision::kDouble;
    for (int64_t index = 0; index < c.problem.count; ++index) {
      const Normalization problem = MemberNormalization(c, index);
      const int64_t n = problem.n, m = problem.m;
      const Vector plan = answer.plan.member(index, c.problem.count);
      const Vector rows = RowMarginals(problem), columns = ColumnMarginals(problem);
      const double room = (strict ? 4e-6 : 1e-12) * oracle::Sum(rows);
      const std::string prefix = strict ? "STRICT exact " : "DOUBLE exact ";
      ExpectClose(prefix + "marginals, L1",
                  {oracle::DistanceL1(oracle::RowSums(plan, n, m), rows),
                   oracle::DistanceL1(oracle::ColumnSums(plan, n, m), columns)},
                  {0, 0}, room);
      EXPECT_LE(answer.convergence[index].marginal_error_a, room);
      EXPECT_LE(answer.convergence[index].marginal_error_b, room);
      EXPECT_TRUE(answer.convergence[index].converged);
      CheckForm(prefix + "form", problem, plan, strict);
    }
  }

  // log P - W of every 2 x 2 block of neighbours, where P is not too small to have digits.
  static void CheckForm(const std::string& what, const Normalization& problem, const Vector& plan, bool strict) {
    const double smallest = strict ? 1e-6 : 1e-12, scale = oracle::MaxAbs(problem.logits);
    Vector residual;
    for (int64_t i = 0; i + 1 < problem.n; ++i) {
      for (int64_t j = 0; j + 1 < problem.m; ++j) {
        const int64_t corners[] = {i * problem.m + j, (i + 1) * problem.m + j + 1, i * problem.m + j + 1,
                                   (i + 1) * problem.m + j};
        double sum = 0, least = 1;
        for (int k = 0; k < 4; ++k) {
          const double logit = std::max(problem.logits[corners[k]], problem.recipe.logit_floor);
          least = std::min(least, plan[corners[k]]);
          sum += (k < 2 ? 1 : -1) * (std::log(plan[corners[k]]) - logit);
        }
        if (least > smallest) residual.push_back(sum);
      }
    }
    ExpectClose(what, residual, Vector(residual.size(), 0.0), strict ? 4e-5 + 4e-6 * scale : 1e-9 * (1 + scale));
  }

  void CheckBothExact(Case c) {
    const std::string name = c.name;
    for (Precision precision : {Precision::kStrict, Precision::kDouble}) {
      c.solver().precision = precision;
      c.name = name + (precision == Precision::kDouble ? " DOUBLE" : " STRICT");
      CheckExact(c);
    }
  }
};

TEST_P(ExactTest, ShapesAndSpreads) {
  const int64_t shapes[][2] = {{1, 1}, {1, 5}, {5, 1},   {2, 2},   {4, 4},   {8, 8},
                               {5, 9}, {9, 5}, {20, 20}, {33, 31}, {64, 64}, {128, 100}};
  for (const auto& [n, m] : shapes) {
    for (double deviation : {0.5, 2.0, 8.0}) {
      CheckBothExact(Batch(4, n, m, {"EXACT", ExactRecipe()}, 200, deviation, n + 101));
    }
  }
}

TEST_P(ExactTest, EqualsTheOracle) {
  Case c = Batch(3, 12, 9, {"EXACT", ExactRecipe()}, 200, 1, 111);
  for (Precision precision : {Precision::kStrict, Precision::kDouble}) {
    c.solver().precision = precision;
    const Answer answer = SolveAlone(backend(), c);
    for (int64_t index = 0; index < 3; ++index) {
      const Vector expected = Normalize(MemberNormalization(c, index));
      ExpectClose("exact P", answer.plan.member(index, 3), expected, precision == Precision::kDouble ? 1e-11 : 1e-5);
    }
  }
}

TEST_P(ExactTest, GivenMarginalsAndDustbin) {
  for (int64_t n : {4, 30}) {
    Case c = Batch(3, n, n + 1, {"EXACT", ExactRecipe()}, 200, 2, 121);
    c.row_marginals = Tensor::Shared(Random(122).Masses(n, 8));
    c.name += " row marginals";
    CheckBothExact(c);
    c.column_marginals = Tensor::Shared(Random(123).Masses(n + 1, 8));
    c.name += " both marginals";
    CheckBothExact(c);
    c.dustbin_score = Tensor::Of({0.5, -2.0, 3.0});
    c.name += " dustbin";
    CheckBothExact(c);
  }
}

// Nearly permutations: the fixed point exists, sweeps alone crawl.
TEST_P(ExactTest, SharpLogits) {
  for (double deviation : {16.0, 40.0}) {
    for (int64_t n : {3, 6, 16}) {
      CheckBothExact(Batch(8, n, n, {"EXACT", ExactRecipe()}, 200, deviation, 131));
    }
  }
}

INSTANTIATE_ON_DEVICES(NormalizationTest);
INSTANTIATE_ON_DEVICES(ExactTest);

}  // namespace
}  // namespace sinkhorn::conformance
