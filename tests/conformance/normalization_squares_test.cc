// Normalisation of squares with sides from 65 to 1,024, of the implicit modes from 4 on, forward and backward, against
// the oracle: sides around the sizes that kernels are made for, types, ranges of values, and company that changes no
// bit.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/conformance/backends.h"
#include "tests/conformance/check.h"
#include "tests/conformance/check_normalization.h"
#include "tests/conformance/company.h"
#include "tests/conformance/random_problems.h"

namespace sinkhorn::conformance {
namespace {

// `count` members of normal logits.
Case Squares(int64_t count, int64_t n, int iterations, double deviation, DType dtype, uint64_t seed,
             const Recipe& recipe = LogRowColumnRecipe()) {
  Case c =
      CaseOf(RandomLogits(n, n, recipe, iterations, deviation, seed),
             absl::StrCat(count, " of ", n, " x ", n, ", ", iterations, " iterations, deviation ", deviation), dtype);
  c.problem.count = count;
  c.output_dtype = dtype;
  c.logits = Tensor::Of(Random(seed).Normals(count * n * n, deviation), dtype);
  return c;
}

Case WithCotangent(Case c) {
  const int64_t size = c.problem.count * c.problem.n * c.problem.m;
  c.cotangent = Tensor::Of(Random(99).Normals(size, 1), c.logits.dtype());
  c.problem.normalization.backward = BackwardMode::kUnrolled;
  absl::StrAppend(&c.name, ", backward");
  return c;
}

Case WithImplicit(Case c, BackwardMode mode = BackwardMode::kImplicit) {
  c = WithCotangent(std::move(c));
  c.problem.normalization.backward = mode;
  absl::StrAppend(&c.name, mode == BackwardMode::kImplicit ? ", implicit" : ", implicit, unit");
  return c;
}

class SquaresTest : public ConformanceTest {
 protected:
  // P as the oracle has it, and the gradient at that P, converged or not.
  void CheckImplicit(const Case& c) {
    SCOPED_TRACE(c.name);
    const Answer answer = SolveAlone(backend(), c);
    if (!answer.status.ok()) return;
    const int64_t n = c.problem.n;
    for (int64_t index = 0; index < c.problem.count; ++index) {
      const Case member = MemberCase(c, index);
      const Answer member_answer = MemberAnswer(answer, index, c.problem.count);
      ExpectMatchesRecipe(member, member_answer);
      const Vector plan = oracle::Normalize(MemberNormalization(member)), cotangent = member.cotangent.values();
      const Vector expected = c.problem.normalization.backward == BackwardMode::kImplicit
                                  ? oracle::ImplicitGradient(plan, n, n, cotangent)
                                  : oracle::ImplicitUnitGradient(plan, n, n, cotangent);
      Vector terms = plan;
      for (size_t k = 0; k < terms.size(); ++k) terms[k] = std::abs(terms[k] * cotangent[k]);
      const double line =
          std::max(oracle::MaxAbs(oracle::RowSums(terms, n, n)), oracle::MaxAbs(oracle::ColumnSums(terms, n, n)));
      ExpectClose(LabelPrefix(c) + "implicit", member_answer.gradient_logits.values(), expected,
                  GradientRoom(c, oracle::MaxAbs(expected), line));
    }
  }
  void Check(const Case& c) {
    SCOPED_TRACE(c.name);
    const Answer answer = SolveAlone(backend(), c);
    if (!answer.status.ok()) return;
    for (int64_t index = 0; index < c.problem.count; ++index) {
      const Case member = MemberCase(c, index);
      const Answer member_answer = MemberAnswer(answer, index, c.problem.count);
      ExpectMatchesRecipe(member, member_answer);
      if (c.cotangent.present()) ExpectMatchesUnrolled(LabelPrefix(c) + "unrolled", member, member_answer);
    }
  }
};

constexpr int64_t kSides[] = {65, 66, 100, 127, 128, 129, 131, 200, 255, 256};
constexpr int64_t kLargeSides[] = {257, 300, 383, 385, 512, 513, 577, 700, 961, 1000, 1023, 1024};

TEST_P(SquaresTest, Forward) {
  for (int64_t n : kSides) Check(Squares(3, n, 20, 1.5, DType::kFloat32, n));
  for (int64_t n : kLargeSides) Check(Squares(1, n, 4, 1.5, DType::kFloat32, n));
}

TEST_P(SquaresTest, Backward) {
  for (int64_t n : kSides) Check(WithCotangent(Squares(2, n, 7, 1, DType::kFloat32, n)));
  for (int64_t n : kLargeSides) Check(WithCotangent(Squares(1, n, 3, 1, DType::kFloat32, n)));
}

// From well-conditioned ones to some near permutations.
TEST_P(SquaresTest, Implicit) {
  for (int64_t n : {9, 16, 24, 30, 32, 33, 64, 65, 100, 128, 130, 200, 256, 300}) {
    CheckImplicit(WithImplicit(Squares(n < 200 ? 3 : 1, n, 20, 1, DType::kFloat32, n)));
    if (n > 130) continue;
    CheckImplicit(WithImplicit(Squares(1, n, 20, 1, DType::kFloat32, n + 1), BackwardMode::kImplicitUnit));
    for (double deviation : {3.0, 5.0, 8.0}) {
      CheckImplicit(WithImplicit(Squares(1, n, 20, deviation, DType::kFloat32, n + 2)));
    }
  }
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) CheckImplicit(WithImplicit(Squares(2, 99, 9, 1, dtype, 3)));
}

// Members near permutations beside ordinary ones, which they leave alone.
TEST_P(SquaresTest, ImplicitBesideIllConditioned) {
  for (int64_t n : {4, 8, 12, 16, 23, 30, 32, 64}) {
    Case c = WithImplicit(Squares(19, n, 20, 1, DType::kFloat32, n + 7));
    Vector logits = c.logits.values();
    for (int64_t k = 0; k < c.problem.count * n * n; ++k) {
      const int64_t member = k / (n * n);
      logits[k] *= member % 7 == 3 ? 8 : member % 7 == 5 ? 4 : 1;
    }
    c.logits = Tensor::Of(logits);
    CheckImplicit(c);
    ExpectMembersAreProblems(backend(), c);
  }
}

// A softmax first, an offset, and a guard that is added; rows that end in one entry, so that u and v are as far from 1
// as the offset lets them.
TEST_P(SquaresTest, Softmax) {
  Recipe coarse = DeepSeekRecipe();
  coarse.offset = 1e-3;
  coarse.guard_value = 1e-5;
  for (const Recipe& recipe : {DeepSeekRecipe(), coarse}) {
    for (int64_t n : {65, 100, 127, 128, 130, 200, 256, 257, 385, 512, 577, 1000}) {
      for (double deviation : {1.0, 30.0}) {
        for (int iterations : {1, 2, 8}) {
          if (iterations != 8 && n != 100 && n != 385) continue;
          const Case c = Squares(n < 257 ? 3 : 1, n, iterations, deviation, DType::kFloat32, n, recipe);
          Check(c);
          if (n < 1000) Check(WithCotangent(c));
        }
      }
    }
  }
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (int64_t n : {129, 520}) Check(WithCotangent(Squares(2, n, 5, 1, dtype, n, DeepSeekRecipe())));
  }
}

// Columns first, with a guard that acts on a column or a row far below, or on none; logits away from 0.
TEST_P(SquaresTest, ColumnsFirst) {
  Recipe unguarded = LogRowColumnRecipe();
  unguarded.order = Order::kColumnRow;
  for (const Recipe& recipe : {ExpColumnRowRecipe(), unguarded}) {
    for (int64_t n : {65, 100, 128, 130, 256, 300, 513, 1000}) {
      const int64_t count = n < 257 ? 4 : 1;
      for (int iterations : {1, 2, 8}) {
        if (iterations != 8 && n != 100 && n != 300) continue;
        Case c = Squares(count, n, iterations, 1, DType::kFloat32, n, recipe);
        Vector logits = c.logits.values();
        for (int64_t k = 0; k < count * n * n; ++k) {
          const int64_t member = k / (n * n), i = k / n % n, j = k % n;
          logits[k] += member == 1   ? 15
                       : member == 2 ? (j == n / 2 ? -40 : 0)
                       : member == 3 ? (i == n / 2 ? -35 : 0)
                                     : 0;
        }
        c.logits = Tensor::Of(logits);
        Check(c);
        if (n < 1000) Check(WithCotangent(c));
        if (n == 100) CheckImplicit(WithImplicit(c, BackwardMode::kImplicitUnit));
        if (n == 100 || n == 130) CheckImplicit(WithImplicit(c));
      }
    }
  }
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (int64_t n : {129, 520}) Check(WithCotangent(Squares(2, n, 5, 1, dtype, n, ExpColumnRowRecipe())));
  }
}

// Of one block each, in all ways.
TEST_P(SquaresTest, OfABlock) {
  for (const Recipe& recipe : {LogRowColumnRecipe(), DeepSeekRecipe(), ExpColumnRowRecipe()}) {
    for (int64_t n : {65, 100, 128}) {
      for (int iterations : {1, 4}) {
        const Case c = Squares(2, n, iterations, 1, n == 100 ? DType::kBFloat16 : DType::kFloat32, n, recipe);
        Check(c);
        Check(WithCotangent(c));
        if (recipe.start == Start::kExp) CheckImplicit(WithImplicit(c));
      }
    }
  }
}

// The implicit modes go on from P through the softmax: as all iterations do where they have converged.
TEST_P(SquaresTest, ImplicitThroughTheSoftmax) {
  Recipe recipe;
  recipe.start = Start::kRowSoftmax;
  recipe.offset = 0.01;
  for (int64_t n : {35, 64, 65, 128, 200, 256, 300, 513}) {
    const Case c = WithCotangent(Squares(n < 200 ? 2 : 1, n, 40, 1, DType::kFloat32, n + 1, recipe));
    Check(c);
    for (BackwardMode mode : {BackwardMode::kImplicit, BackwardMode::kImplicitUnit}) {
      Case implicit = c;
      implicit.problem.normalization.backward = mode;
      Check(implicit);
    }
  }
}

TEST_P(SquaresTest, OneIteration) {
  for (int64_t n : {67, 129, 500}) Check(WithCotangent(Squares(2, n, 1, 2, DType::kFloat32, n)));
}

// More vectors than a matrix has rows.
TEST_P(SquaresTest, ManyIterations) { Check(WithCotangent(Squares(1, 130, 200, 1, DType::kFloat32, 5))); }

TEST_P(SquaresTest, ShortTypes) {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (int64_t n : {100, 129, 256, 259, 520}) Check(WithCotangent(Squares(2, n, 5, 1, dtype, n)));
  }
}

// Rows whose values lie further apart than float32 reaches, next to rows that do not.
TEST_P(SquaresTest, WideRanges) {
  for (int64_t n : {80, 150, 300}) {
    Case c = Squares(3, n, 5, 1, DType::kFloat32, n);
    Vector logits = c.logits.values();
    for (int64_t k = 0; k < n * n; ++k) logits[n * n + k] *= 40;
    c.logits = Tensor::Of(logits);
    absl::StrAppend(&c.name, ", one of 40");
    Check(c);
    Check(WithCotangent(c));
  }
}

TEST_P(SquaresTest, SameBitsInAnyCompany) {
  std::vector<Case> cases;
  for (int64_t n : {100, 200, 256, 300, 400, 520, 600, 1000}) {
    for (int64_t count : {1, 3}) {
      cases.push_back(Squares(count, n, 6, 1, DType::kFloat32, n + count));
      cases.push_back(WithCotangent(cases.back()));
      cases.push_back(WithImplicit(cases[cases.size() - 2]));
      for (const Recipe& recipe : {DeepSeekRecipe(), ExpColumnRowRecipe()}) {
        cases.push_back(Squares(count, n, 6, 1, DType::kFloat32, n + count, recipe));
        cases.push_back(WithCotangent(cases.back()));
        cases.push_back(WithImplicit(cases[cases.size() - 2]));
      }
    }
  }
  std::vector<const Case*> all;
  for (const Case& c : cases) all.push_back(&c);
  const std::vector<Answer> together = SolveTogether(backend(), all);
  for (size_t k = 0; k < cases.size(); ++k) {
    const int64_t count = cases[k].problem.count;
    EXPECT_EQ(DifferenceInBits(together[k], SolveAlone(backend(), cases[k])), "") << cases[k].name;
    const Answer last = SolveAlone(backend(), MemberCase(cases[k], count - 1));
    EXPECT_EQ(DifferenceInBits(MemberAnswer(together[k], count - 1, count), last), "") << cases[k].name << ", the last";
  }
}

INSTANTIATE_ON_DEVICES(SquaresTest);

}  // namespace
}  // namespace sinkhorn::conformance
