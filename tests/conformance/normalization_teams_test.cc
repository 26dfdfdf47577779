// Matrices that several blocks of a GPU solve together: sides above 256, float64, EXACT, implicit systems of given
// marginals and dustbins; and tall ones, of more rows than columns. What they are, and the same bits in any company.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/conformance/backends.h"
#include "tests/conformance/check_normalization.h"
#include "tests/conformance/company.h"
#include "tests/conformance/random_problems.h"

namespace sinkhorn::conformance {
namespace {

class TeamsTest : public ConformanceTest {
 protected:
  static Case Batch(int64_t count, int64_t n, int64_t m, const Recipe& recipe, int iterations, uint64_t seed) {
    Case c = CaseOf(RandomLogits(n, m, recipe, iterations, 1, seed), absl::StrCat(count, " of ", n, " x ", m));
    c.problem.count = count;
    c.logits = Tensor::Of(Random(seed).Normals(count * n * m, 1));
    return c;
  }
  static Case WithCotangent(Case c, BackwardMode mode) {
    const int64_t bin = c.dustbin_score.present() ? 1 : 0;
    c.problem.normalization.backward = mode;
    c.cotangent = Tensor::Of(Random(7).Normals(c.problem.count * (c.problem.n + bin) * (c.problem.m + bin), 1));
    absl::StrAppend(&c.name, ", backward ", static_cast<int>(mode));
    return c;
  }
  static Case InDouble(Case c) {
    c.solver().precision = Precision::kDouble;
    c.name += ", DOUBLE";
    return c;
  }
  static Case WithMarginals(Case c) {
    const int64_t n = c.problem.n, m = c.problem.m;
    c.row_marginals = Tensor::Of(Random(8).Uniforms(c.problem.count * n, 0.25, 3));
    c.column_marginals = Tensor::Shared(Random(9).Uniforms(m, 0.25, 3));
    c.name += ", marginals";
    return c;
  }
  static Case WithDustbin(Case c) {
    c.dustbin_score = Tensor::Of(Random(10).Normals(c.problem.count, 1));
    c.name += ", dustbin";
    return c;
  }

  static std::vector<Case> Cases() {
    std::vector<Case> cases;
    const auto add = [&](const Case& c) {
      cases.push_back(c);
      cases.push_back(InDouble(c));
    };
    // 1. Tall, wide and square; every kind of start, order and guard.
    Recipe guarded;
    guarded.guard = Guard::kMax;
    guarded.guard_value = 2;  // Acts on some.
    uint64_t seed = 0;
    for (const Recipe& recipe : {LogRowColumnRecipe(), ExpColumnRowRecipe(), DeepSeekRecipe(), guarded}) {
      add(Batch(2, 1100, 40, recipe, 4, ++seed));
      add(Batch(1, 18, 1200, recipe, 4, ++seed));
      add(WithCotangent(Batch(2, 30, 1100, recipe, 3, ++seed), BackwardMode::kUnrolled));
      add(WithDustbin(WithMarginals(Batch(2, 190, 160, recipe, 4, ++seed))));
    }
    add(Batch(1, 1030, 300, LogRowColumnRecipe(), 3, ++seed));
    add(WithCotangent(WithDustbin(Batch(1, 700, 100, LogRowColumnRecipe(), 3, ++seed)), BackwardMode::kUnrolled));
    add(WithCotangent(Batch(1, 600, 250, DeepSeekRecipe(), 3, ++seed), BackwardMode::kUnrolled));
    // 2. Implicit systems.
    add(WithCotangent(Batch(2, 130, 128, LogRowColumnRecipe(), 6, ++seed), BackwardMode::kImplicitUnit));
    add(WithCotangent(WithMarginals(Batch(2, 128, 140, LogRowColumnRecipe(), 6, ++seed)), BackwardMode::kImplicit));
    cases.push_back(WithCotangent(Batch(1, 130, 130, LogRowColumnRecipe(), 6, ++seed), BackwardMode::kImplicitFull));
    cases.push_back(
        WithCotangent(WithDustbin(Batch(1, 140, 128, DeepSeekRecipe(), 6, ++seed)), BackwardMode::kImplicit));
    // Of float32 one kernel iterates and another solves the system, but for members beyond the first one's range.
    cases.push_back(WithCotangent(WithMarginals(Batch(2, 300, 290, LogRowColumnRecipe(), 6, ++seed)),  //
                                  BackwardMode::kImplicit));
    cases.push_back(
        WithCotangent(WithDustbin(Batch(2, 60, 1600, ExpColumnRowRecipe(), 6, ++seed)), BackwardMode::kImplicit));
    Case masked =
        WithCotangent(WithMarginals(Batch(3, 140, 70, LogRowColumnRecipe(), 6, ++seed)), BackwardMode::kImplicit);
    std::vector<double> logits = Random(seed).Normals(3 * 140 * 70, 1);
    logits[140 * 70 + 200] = -300;  // Of the second.
    masked.logits = Tensor::Of(logits);
    masked.name += ", masked";
    cases.push_back(masked);
    // 3. EXACT, by conjugate gradients and by elimination; a tolerance.
    for (int64_t m : {140, 90}) {
      Case exact = WithCotangent(Batch(1, 190, m, ExactRecipe(), 200, ++seed), BackwardMode::kImplicit);
      exact.solver().tolerance = 1e-6;
      add(exact);
    }
    Case stops = WithMarginals(Batch(2, 160, 170, LogRowColumnRecipe(), 300, ++seed));
    stops.solver().tolerance = 1e-3;
    add(stops);
    // 4. Of float32, what is more than a block holds: all widths, the last block with fewer rows, and with one.
    for (const auto& [n, m] : {std::pair<int64_t, int64_t>{5000, 60}, {1025, 100}, {300, 290}, {130, 1000}}) {
      cases.push_back(WithMarginals(Batch(2, n, m, LogRowColumnRecipe(), 4, ++seed)));
      cases.push_back(Batch(1, m, n, ExpColumnRowRecipe(), 4, ++seed));
      cases.push_back(WithCotangent(WithDustbin(Batch(1, n, m, guarded, 3, ++seed)), BackwardMode::kUnrolled));
    }
    cases.push_back(WithCotangent(WithMarginals(Batch(1, 1000, 1000, LogRowColumnRecipe(), 3, ++seed)),  //
                                  BackwardMode::kUnrolled));
    stops = WithDustbin(WithMarginals(Batch(2, 400, 330, LogRowColumnRecipe(), 300, ++seed)));
    stops.solver().tolerance = 1e-3;
    cases.push_back(stops);
    return cases;
  }
};

TEST_P(TeamsTest, AreWhatTheySay) {
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.name);
    const Answer answer = SolveAlone(backend(), c);
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    for (int64_t index = 0; index < c.problem.count; ++index) {
      Case member = MemberCase(c, index);
      const Answer of_member = MemberAnswer(answer, index, c.problem.count);
      if (c.problem.normalization.recipe.exact) {
        ExpectScalesExactly(member, of_member);
      } else {
        member.solver().max_iterations = of_member.convergence[0].iterations;
        ExpectMatchesRecipe(member, of_member);
      }
      if (!c.cotangent.present()) continue;
      if (c.problem.normalization.backward == BackwardMode::kUnrolled) {
        ExpectMatchesUnrolled("unrolled, of a team", member, of_member);
      } else {
        ExpectMatchesImplicit("implicit, of a team", member, of_member);
      }
    }
  }
}

TEST_P(TeamsTest, SameBitsInAnyCompany) {
  const std::vector<Case> cases = Cases();
  const std::vector<const Case*> all = PointersTo(cases);
  ExpectSameBits(all, SolveTogether(backend(), all), AllAlone(backend(), all));
  for (const Case& c : cases) ExpectMembersAreProblems(backend(), c);
}

INSTANTIATE_ON_DEVICES(TeamsTest);

}  // namespace
}  // namespace sinkhorn::conformance
