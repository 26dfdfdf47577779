// Derivatives of the normalisation: unrolled against the oracle's reverse of the same steps,
// implicit modes against it at convergence, against dense solves away from it, and the setting of
// the corrected-backward study.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/conformance/backends.h"
#include "tests/conformance/check.h"
#include "tests/conformance/check_normalization.h"
#include "tests/conformance/random_problems.h"

namespace sinkhorn::conformance {
namespace {

using oracle::Normalization;

struct NamedRecipe {
  const char* name;
  Recipe recipe;
};

std::vector<NamedRecipe> Recipes() {
  Recipe guarded;
  guarded.guard = Guard::kMax;
  guarded.guard_value = 2;  // Bites on some rows and columns.
  Recipe softmax = DeepSeekRecipe();
  softmax.offset = softmax.guard_value = 0.03125;
  Recipe floored;
  floored.offset = 0.125;
  floored.order = Order::kColumnRow;
  floored.guard = Guard::kAdd;
  floored.guard_value = 0.0625;
  floored.logit_floor = -0.75;
  Recipe softmax_floored = softmax;
  softmax_floored.logit_floor = -0.5;
  return {{"LOG_ROW_COLUMN", LogRowColumnRecipe()}, {"EXP_COLUMN_ROW", ExpColumnRowRecipe()},
          {"DEEPSEEK", DeepSeekRecipe()},           {"guard by maximum", guarded},
          {"softmax, offset, guard", softmax},      {"floor, offset, guard, columns first", floored},
          {"softmax, floor", softmax_floored}};
}

class BackwardTest : public ConformanceTest {
 protected:
  static Case Batch(int64_t count, int64_t n, int64_t m, const NamedRecipe& recipe, int iterations, double deviation,
                    BackwardMode mode, uint64_t seed) {
    Case c = CaseOf(RandomLogits(n, m, recipe.recipe, iterations, deviation, seed),
                    absl::StrCat(recipe.name, " ", count, " of ", n, " x ", m, " deviation ", deviation, " iterations ",
                                 iterations));
    c.problem.count = count;
    c.logits = Tensor::Of(Random(seed).Normals(count * n * m, deviation));
    c.cotangent = Tensor::Of(Random(seed + 1).Normals(count * n * m, 1));
    c.problem.normalization.backward = mode;
    return c;
  }

  void CheckAgainstUnrolled(const Case& c, const std::string& what) {
    SCOPED_TRACE(c.name);
    const Answer answer = SolveAlone(backend(), c);
    if (!answer.status.ok()) return;
    for (int64_t index = 0; index < c.problem.count; ++index) {
      ExpectMatchesUnrolled(what, MemberCase(c, index), MemberAnswer(answer, index, c.problem.count));
    }
  }

  // P of every member.
  void CheckPlan(const Case& c) {
    SCOPED_TRACE(c.name);
    const Answer answer = SolveAlone(backend(), c);
    if (!answer.status.ok()) return;
    for (int64_t index = 0; index < c.problem.count; ++index) {
      ExpectMatchesRecipe(MemberCase(c, index), MemberAnswer(answer, index, c.problem.count));
    }
  }

  void CheckBothPrecisions(Case c, const std::string& what) {
    for (Precision precision : {Precision::kStrict, Precision::kDouble}) {
      c.solver().precision = precision;
      const bool strict = precision == Precision::kStrict;
      CheckAgainstUnrolled(c, (strict ? "STRICT " : "DOUBLE ") + what);
    }
  }
};

constexpr BackwardMode kImplicitModes[] = {BackwardMode::kImplicit, BackwardMode::kImplicitUnit,
                                           BackwardMode::kImplicitFull};

// ---- Unrolled -------------------------------------------------------------------------------

TEST_P(BackwardTest, UnrolledShapes) {
  const int64_t shapes[][2] = {{1, 1}, {1, 6},   {6, 1},   {2, 2},   {4, 4},   {8, 8},
                               {5, 3}, {16, 16}, {17, 23}, {32, 32}, {33, 40}, {64, 64}};
  uint64_t seed = 1;
  for (const NamedRecipe& recipe : Recipes()) {
    for (const auto& [n, m] : shapes) {
      for (double deviation : {0.5, 2.0}) {
        CheckBothPrecisions(Batch(3, n, m, recipe, 10, deviation, BackwardMode::kUnrolled, seed += 2), "unrolled");
      }
    }
  }
}

TEST_P(BackwardTest, UnrolledIterationCounts) {
  for (const NamedRecipe& recipe : Recipes()) {
    for (int iterations : {1, 2, 20, 60}) {
      for (int64_t n : {4, 8, 20}) {
        CheckBothPrecisions(Batch(17, n, n, recipe, iterations, 1, BackwardMode::kUnrolled, 71), "unrolled");
      }
    }
  }
}

// A least number that sums are divided by, which acts on a whole row or column that is far below, on none of the
// others: kernels may leave it out where it does not act. The plan as well, with a backward and without.
TEST_P(BackwardTest, UnrolledGuardsThatAct) {
  Recipe rows_first = ExpColumnRowRecipe();
  rows_first.order = Order::kRowColumn;
  Recipe coarse = ExpColumnRowRecipe();
  coarse.guard_value = 1e-3;
  for (const NamedRecipe& recipe : {NamedRecipe{"EXP_COLUMN_ROW", ExpColumnRowRecipe()},
                                    NamedRecipe{"rows first", rows_first}, NamedRecipe{"guard 1e-3", coarse}}) {
    for (int64_t n : {3, 4, 8, 11, 16, 20, 24, 32, 48, 64}) {
      Random random(67);
      Vector logits;
      int64_t count = 0;
      for (double far : {0.0, 3.0, 9.0, 18.0, 22.0, 24.0, 32.0}) {
        for (int which = 0; which < 2; ++which, ++count) {  // A row, a column.
          for (int64_t k = 0; k < n * n; ++k) {
            logits.push_back(random.Normal() - ((which == 0 ? k / n : k % n) == n - 2 ? far : 0));
          }
        }
      }
      Case c = Batch(count, n, n, recipe, 20, 1, BackwardMode::kUnrolled, 68);
      c.logits = Tensor::Of(logits);
      CheckAgainstUnrolled(c, "STRICT unrolled, guards that act");
      CheckPlan(c);
      c.cotangent = Tensor();
      CheckPlan(c);
    }
  }
}

// Guards that drive the scalings of long sides apart, iteration by iteration, until float32 has no room for them: a
// little before it loses their digits. The plan as well.
TEST_P(BackwardTest, UnrolledGuardsThatDriveScalingsApart) {
  const int64_t shapes[][2] = {{60, 1}, {100, 2}, {1, 166}};
  for (const auto& [n, m] : shapes) {
    for (Guard guard : {Guard::kAdd, Guard::kMax}) {
      for (double value : {0.3, 1.0}) {
        Recipe recipe;
        recipe.guard = guard;
        recipe.guard_value = value;
        for (Order order : {Order::kRowColumn, Order::kColumnRow}) {
          recipe.order = order;
          for (int iterations : {17, 20, 24, 28, 33}) {
            const Case c = Batch(1, n, m, {"guard", recipe}, iterations, 0.3, BackwardMode::kUnrolled, 69);
            SCOPED_TRACE(
                absl::StrCat("guard ", static_cast<int>(guard), " ", value, " order ", static_cast<int>(order)));
            CheckAgainstUnrolled(c, "STRICT unrolled, scalings apart");
            CheckPlan(c);
          }
        }
      }
    }
  }
}

// 4 x 4 with an entry, a row or a column far from the others: kernels choose their arithmetic by such ranges, for each
// member on its own. The plan as well.
TEST_P(BackwardTest, UnrolledRangesOfFours) {
  constexpr int64_t kSide = 4, kArea = kSide * kSide;
  Vector logits;
  int64_t count = 0;
  Random random(65);
  for (double far : {5.0, 18.0, 26.0, 27.5, 28.5, 30.0, 36.0, 45.0}) {
    for (double sign : {1.0, -1.0}) {
      for (int64_t at : {0, 2, 5, 12, 15}) {
        for (int which = 0; which < 3; ++which, ++count) {  // An entry, its row, its column.
          for (int64_t k = 0; k < kArea; ++k) {
            const bool is_far = which == 0 ? k == at : which == 1 ? k / kSide == at / kSide : k % kSide == at % kSide;
            logits.push_back(random.Normal() + (is_far ? sign * far : 0));
          }
        }
      }
    }
  }
  for (const NamedRecipe& recipe : {Recipes()[0], Recipes()[1]}) {
    for (int iterations : {1, 20}) {
      Case c = Batch(count, kSide, kSide, recipe, iterations, 1, BackwardMode::kUnrolled, 66);
      c.logits = Tensor::Of(logits);
      CheckAgainstUnrolled(c, "STRICT unrolled, ranges of fours");
      CheckPlan(c);
    }
  }
}

// Softmax recipes of squares, for which kernels may take another arithmetic where the guard is small: rows that end in
// one entry, columns that none of them has, so that u and v are as far from 1 as the offset lets them; on both sides of
// what is small. The plan as well, with a backward and without; members of which most go out to the edge.
TEST_P(BackwardTest, UnrolledSoftmaxOfSquares) {
  const auto softmax = [](double offset, Guard guard, double value) {
    Recipe recipe = DeepSeekRecipe();
    recipe.offset = offset;
    recipe.guard = guard;
    recipe.guard_value = value;
    return recipe;
  };
  for (const NamedRecipe& recipe :
       {NamedRecipe{"DEEPSEEK", DeepSeekRecipe()}, NamedRecipe{"guard 1e-5", softmax(1e-4, Guard::kAdd, 1e-5)},
        NamedRecipe{"guard 1.1e-5", softmax(1e-4, Guard::kAdd, 1.1e-5)},
        NamedRecipe{"no guard", softmax(1e-6, Guard::kNone, 0)},
        NamedRecipe{"no offset", softmax(0, Guard::kAdd, 1e-6)}}) {
    for (int64_t n : {1, 3, 4, 7, 8, 11, 12, 16, 20, 24, 31, 32, 41, 64}) {
      Random random(73);
      Vector logits;
      int64_t count = 0;
      for (double far : {0.0, 3.0, 9.0, 16.0, 28.0, 45.0, 400.0}) {
        for (int which = 0; which < 3; ++which, ++count) {  // Rows end in one column; in one each; a column has none.
          for (int64_t k = 0; k < n * n; ++k) {
            const int64_t i = k / n, j = k % n;
            const bool is_far = which == 0 ? j == n / 2 : which == 1 ? j == (i + 1) % n : j == n - 1;
            logits.push_back(random.Normal() + (is_far ? (which == 2 ? -far : far) : 0));
          }
        }
      }
      for (int iterations : {1, 2, 3, 20}) {
        if (iterations != 20 && n != 4 && n != 11 && n != 32 && n != 41) continue;
        Case c = Batch(count, n, n, recipe, iterations, 1, BackwardMode::kUnrolled, 74);
        c.logits = Tensor::Of(logits);
        CheckAgainstUnrolled(c, "STRICT unrolled, softmax of squares");
        CheckPlan(c);
        c.cotangent = Tensor();
        CheckPlan(c);
      }
    }
  }
}

TEST_P(BackwardTest, UnrolledWithMarginalsAndDustbin) {
  for (const NamedRecipe& recipe : Recipes()) {
    for (int64_t n : {4, 7, 35}) {
      Case c = Batch(3, n, n + 1, recipe, 6, 1, BackwardMode::kUnrolled, 81);
      c.row_marginals = Tensor::Of(Random(82).Uniforms(3 * n, 0.5, 2));
      c.column_marginals = Tensor::Shared(Random(83).Uniforms(n + 1, 0.5, 2));
      CheckBothPrecisions(c, "unrolled, marginals");
      c.dustbin_score = Tensor::Of({0.5, -1.0, 1.5});
      c.cotangent = Tensor::Of(Random(84).Normals(3 * (n + 1) * (n + 2), 1));
      CheckBothPrecisions(c, "unrolled, dustbin");
    }
  }
}

TEST_P(BackwardTest, UnrolledStopsAtTheFloor) {
  Case c = Batch(1, 4, 4, Recipes()[0], 5, 1, BackwardMode::kUnrolled, 91);
  Vector logits = c.logits.values();
  logits[2] = -1e5;
  logits[9] = -3e5;
  c.logits = Tensor::Of(logits);
  CheckBothPrecisions(c, "unrolled, floor");
  const Vector gradient = SolveAlone(backend(), c).gradient_logits.values();
  EXPECT_EQ(gradient[2], 0);
  EXPECT_EQ(gradient[9], 0);
}

// At a tolerance: the derivative of the iterations that each member did.
TEST_P(BackwardTest, UnrolledAtATolerance) {
  for (int64_t n : {4, 8, 20}) {
    Case c = Batch(6, n, n, Recipes()[0], 500, 1, BackwardMode::kUnrolled, 95);
    c.solver().tolerance = 1e-3;
    const Answer answer = SolveAlone(backend(), c);
    for (int64_t index = 0; index < 6; ++index) {
      Normalization problem = MemberNormalization(c, index);
      problem.iterations = answer.convergence[index].iterations;
      EXPECT_LT(problem.iterations, 500);
      const Vector expected = UnrolledGradient(problem, c.cotangent.member(index, 6));
      ExpectClose("STRICT unrolled, tolerance", answer.gradient_logits.member(index, 6), expected,
                  GradientRoom(c, oracle::MaxAbs(expected), 1));
    }
  }
}

TEST_P(BackwardTest, UnrolledEveryDType) {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    for (int64_t n : {4, 8, 20}) {
      Case c = Batch(5, n, n, Recipes()[0], 10, 1, BackwardMode::kUnrolled, 101);
      c.logits = Tensor::Of(c.logits.values(), dtype);
      c.cotangent = Tensor::Of(c.cotangent.values(), dtype);
      c.output_dtype = dtype;
      CheckAgainstUnrolled(c, "STRICT unrolled, its own dtype");
    }
  }
}

TEST_P(BackwardTest, GradientAtLargeLogitsIsFinite) {
  for (const NamedRecipe& recipe : Recipes()) {
    for (BackwardMode mode :
         {BackwardMode::kUnrolled, BackwardMode::kImplicit, BackwardMode::kImplicitUnit, BackwardMode::kImplicitFull}) {
      for (int64_t n : {4, 8, 40}) {
        Case c = Batch(3, n, n, recipe, 20, 1, mode, 111);
        c.logits = Tensor::Of(Random(112).Uniforms(3 * n * n, -1e4, 1e4));
        SCOPED_TRACE(absl::StrCat(c.name, " mode ", static_cast<int>(mode)));
        const Answer answer = SolveAlone(backend(), c);
        for (double value : answer.gradient_logits.values()) ASSERT_TRUE(std::isfinite(value));
      }
    }
  }
}

// ---- Implicit -------------------------------------------------------------------------------

TEST_P(BackwardTest, ImplicitModesEqualUnrolledAtConvergence) {
  for (BackwardMode mode : kImplicitModes) {
    for (int64_t n : {1, 2, 4, 8, 16, 20, 33}) {
      CheckBothPrecisions(Batch(5, n, n, Recipes()[0], 400, 0.75, mode, 121),
                          absl::StrCat("implicit, converged, mode ", static_cast<int>(mode)));
    }
    if (mode == BackwardMode::kImplicitFull) continue;  // No other kernel's where columns come first.
    for (int64_t n : {3, 4, 8, 11, 12, 16, 20, 24, 32, 47, 64}) {
      const Case c = Batch(5, n, n, Recipes()[1], 400, 0.75, mode, 122);
      CheckAgainstUnrolled(c, absl::StrCat("implicit, columns first, mode ", static_cast<int>(mode)));
      CheckPlan(c);
    }
  }
}

TEST_P(BackwardTest, ImplicitWithMarginalsAtConvergence) {
  for (int64_t n : {4, 9, 35}) {
    Case c = Batch(3, n, n + 2, Recipes()[0], 400, 0.75, BackwardMode::kImplicit, 131);
    c.row_marginals = Tensor::Shared(Random(132).Masses(n, 8));
    c.column_marginals = Tensor::Shared(Random(133).Masses(n + 2, 8));
    CheckBothPrecisions(c, "implicit, marginals");
    c.dustbin_score = Tensor::Of({0.5, -1.0, 1.5});
    c.cotangent = Tensor::Of(Random(134).Normals(3 * (n + 1) * (n + 3), 1));
    CheckBothPrecisions(c, "implicit, dustbin");
  }
}

// From P on to the logits there may be an offset, a softmax and a floor; and guards, which do not act on all members.
TEST_P(BackwardTest, ImplicitThroughTheStart) {
  Recipe offset, softmax, floored, softmax_floored, guarded;
  offset.offset = 0.25;
  softmax.start = Start::kRowSoftmax;
  softmax.offset = 0.125;
  floored.offset = 0.0625;
  floored.order = Order::kColumnRow;
  floored.logit_floor = -0.5;
  softmax_floored.start = Start::kRowSoftmax;
  softmax_floored.logit_floor = -0.25;
  guarded.guard = Guard::kMax;
  guarded.guard_value = 1e-3;
  for (const NamedRecipe& recipe : {NamedRecipe{"offset", offset},
                                    {"softmax, offset", softmax},
                                    {"floor, offset", floored},
                                    {"softmax, floor", softmax_floored},
                                    {"guard", guarded}}) {
    for (int64_t n : {2, 4, 8, 20, 35}) {
      Case c = Batch(4, n, n, recipe, 400, 1, BackwardMode::kImplicit, 126);
      if (recipe.recipe.guard != Guard::kNone) {
        Vector logits = c.logits.values();
        for (int64_t k = 0; k < n * n; k += n) logits[k] -= 9;  // The first member's first column.
        c.logits = Tensor::Of(logits);
      }
      CheckBothPrecisions(c, absl::StrCat("implicit through ", recipe.name));
    }
  }
}

// EXACT converges by itself: its implicit gradient is that of many sweeps.
TEST_P(BackwardTest, ImplicitOfExact) {
  for (int64_t n : {2, 4, 8, 24}) {
    Case c = Batch(3, n, n, {"EXACT", ExactRecipe()}, 200, 1, BackwardMode::kImplicit, 141);
    for (Precision precision : {Precision::kStrict, Precision::kDouble}) {
      c.solver().precision = precision;
      const Answer answer = SolveAlone(backend(), c);
      for (int64_t index = 0; index < 3; ++index) {
        Normalization sweeps = MemberNormalization(c, index);
        sweeps.recipe = LogRowColumnRecipe();
        sweeps.iterations = 1000;
        const Vector expected = UnrolledGradient(sweeps, c.cotangent.member(index, 3));
        ExpectClose("implicit of EXACT", answer.gradient_logits.member(index, 3), expected,
                    GradientRoom(c, oracle::MaxAbs(expected), 1));
      }
    }
  }
}

// Away from convergence the mode with real marginals is still the derivative of a fixed point: that
// with P's own marginals.
TEST_P(BackwardTest, ImplicitFromPlanAlone) {
  for (int64_t n : {1, 2, 4, 8, 13, 40}) {
    for (int64_t m : {n, n + 3}) {
      Normalization problem = RandomLogits(n, m, ExpColumnRowRecipe(), 3, 1, 151);
      Case c;
      c.name = absl::StrCat("from P, ", n, " x ", m);
      c.problem.kind = ProblemKind::kNormalization;
      c.problem.n = n;
      c.problem.m = m;
      c.problem.solver.max_iterations = 1;
      c.plan = Tensor::Of(Normalize(problem));
      c.cotangent = Tensor::Of(Random(152).Normals(n * m, 1));
      c.problem.normalization.backward = BackwardMode::kImplicit;
      c.wanted = kSums;
      SCOPED_TRACE(c.name);
      const Vector plan = c.plan.values();
      const Vector expected = oracle::ImplicitGradient(plan, n, m, c.cotangent.values());
      for (Precision precision : {Precision::kStrict, Precision::kDouble}) {
        c.solver().precision = precision;
        const Answer answer = SolveAlone(backend(), c);
        if (!answer.status.ok()) continue;
        ExpectClose("implicit from P", answer.gradient_logits.values(), expected,
                    GradientRoom(c, oracle::MaxAbs(expected), oracle::MaxAbs(oracle::RowSums(plan, n, m))));
        ExpectClose("sums from P", answer.row_sums.values(), oracle::RowSums(plan, n, m), 1e-6 * m);
        EXPECT_EQ(answer.convergence[0].iterations, 0);
        EXPECT_EQ(answer.convergence[0].stop_reason, StopReason::kNotIterated);
      }
    }
  }
}

// Of a doubly stochastic P all implicit modes are the same.
TEST_P(BackwardTest, ImplicitModesFromPlanAlone) {
  for (int64_t n : {2, 4, 8, 21}) {
    Case c;
    c.problem.kind = ProblemKind::kNormalization;
    c.problem.n = c.problem.m = n;
    c.problem.solver.max_iterations = 1;
    c.problem.solver.precision = Precision::kDouble;
    c.plan = Tensor::Of(Normalize(RandomLogits(n, n, ExactRecipe(), 1, 1, 155)), DType::kFloat64);
    c.cotangent = Tensor::Of(Random(156).Normals(n * n, 1), DType::kFloat64);
    c.wanted = 0;
    const Vector expected = oracle::ImplicitGradient(c.plan.values(), n, n, c.cotangent.values());
    for (BackwardMode mode : kImplicitModes) {
      c.problem.normalization.backward = mode;
      ExpectClose("DOUBLE modes from P", SolveAlone(backend(), c).gradient_logits.values(), expected,
                  GradientRoom(c, oracle::MaxAbs(expected), 1));
    }
  }
}

// Blocks that do not touch: the matrix of the implicit system is singular along one constant per
// block.
TEST_P(BackwardTest, ImplicitOfDisconnectedPlans) {
  Case c;
  c.name = "two blocks and a permutation";
  c.problem.kind = ProblemKind::kNormalization;
  c.problem.count = 2;
  c.problem.n = c.problem.m = 4;
  c.problem.solver.max_iterations = 1;
  c.plan = Tensor::Of({.75, .25, 0, 0, .25, .75, 0, 0, 0, 0, .5, .5, 0, 0, .5, .5,  //
                       0,   1,   0, 0, 1,   0,   0, 0, 0, 0, 0,  1,  0, 0, 1,  0});
  c.cotangent = Tensor::Of(Random(161).Normals(32, 1));
  c.wanted = 0;
  for (BackwardMode mode : kImplicitModes) {
    c.problem.normalization.backward = mode;
    SCOPED_TRACE(static_cast<int>(mode));
    const Answer answer = SolveAlone(backend(), c);
    for (int64_t index = 0; index < 2; ++index) {
      const Vector expected = oracle::ImplicitGradient(c.plan.member(index, 2), 4, 4, c.cotangent.member(index, 2));
      ExpectClose("implicit, disconnected", answer.gradient_logits.member(index, 2), expected, 1e-5);
    }
  }
}

// ---- The corrected-backward study -----------------------------------------------------------

// |p - q| / |q|, Euclidean.
double RelativeError(const Vector& p, const Vector& q) {
  double error = 0, norm = 0;
  for (size_t k = 0; k < p.size(); ++k) {
    error += (p[k] - q[k]) * (p[k] - q[k]);
    norm += q[k] * q[k];
  }
  return std::sqrt(error / norm);
}

// Errors of the three derivatives of one batch against the derivative of the steps done, in
// float64.
class StudyTest : public BackwardTest {
 protected:
  struct Errors {
    double mean = 0, largest = 0;
  };

  static Case Setting(int64_t count, const Vector& logits, int iterations) {
    Case c;
    c.problem.kind = ProblemKind::kNormalization;
    c.problem.count = count;
    c.problem.n = c.problem.m = 8;
    c.problem.normalization.recipe = ExpColumnRowRecipe();
    c.solver().max_iterations = iterations;
    c.logits = Tensor::Of(logits);
    c.cotangent = Tensor::Of(Random(172).Normals(count * 64, 1));
    c.wanted = 0;
    return c;
  }

  void Compute(const Case& c) {
    const int64_t count = c.problem.count;
    expected_.resize(count);
    oracle::ParallelFor(count, 1 << 16, [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) {
        expected_[index] = UnrolledGradient(MemberNormalization(c, index), c.cotangent.member(index, count));
      }
    });
  }

  Errors ErrorsOf(Case c, Precision precision, BackwardMode mode) {
    c.solver().precision = precision;
    c.problem.normalization.backward = mode;
    const Answer answer = SolveAlone(backend(), c);
    const int64_t count = c.problem.count;
    Errors errors;
    for (int64_t index = 0; index < count; ++index) {
      const double error = RelativeError(answer.gradient_logits.member(index, count), expected_[index]);
      errors.mean += error / count;
      errors.largest = std::max(errors.largest, error);
    }
    return errors;
  }

  // The mode with P's real marginals is closer than the one that takes them for 1.
  void ExpectCorrectedBeatsUnit(const Case& c) {
    Compute(c);
    for (Precision precision : {Precision::kStrict, Precision::kDouble}) {
      const bool strict = precision == Precision::kStrict;
      SCOPED_TRACE(strict ? "STRICT" : "DOUBLE");
      const Errors unrolled = ErrorsOf(c, precision, BackwardMode::kUnrolled);
      const Errors corrected = ErrorsOf(c, precision, BackwardMode::kImplicit);
      const Errors unit = ErrorsOf(c, precision, BackwardMode::kImplicitUnit);
      std::printf(
          "%s error of dL/dW, mean (largest): unrolled %.2g (%.2g), corrected %.3g (%.3g), "
          "unit marginals %.3g (%.3g)\n",
          strict ? "STRICT" : "DOUBLE", unrolled.mean, unrolled.largest, corrected.mean, corrected.largest, unit.mean,
          unit.largest);
      EXPECT_LE(unrolled.largest, strict ? 1e-5 : 1e-9);
      EXPECT_LT(corrected.mean, unit.mean);
    }
  }

 private:
  std::vector<Vector> expected_;
};

// The study's own: 65,536 matrices 8 x 8, logits uniform in [0, 4], 10 iterations. Nearly
// converged: errors near 6e-6.
TEST_P(StudyTest, ItsOwnSetting) {
  constexpr int64_t kCount = 65536;
  ExpectCorrectedBeatsUnit(Setting(kCount, Random(171).Uniforms(kCount * 64, 0, 4), 10));
}

TEST_P(StudyTest, FurtherFromConvergence) {
  ExpectCorrectedBeatsUnit(Setting(4096, Random(173).Uniforms(4096 * 64, 0, 4), 2));
  ExpectCorrectedBeatsUnit(Setting(4096, Random(174).Normals(4096 * 64, 4), 10));
}

INSTANTIATE_ON_DEVICES(BackwardTest);
INSTANTIATE_ON_DEVICES(StudyTest);

}  // namespace
}  // namespace sinkhorn::conformance
