// Solves that are asked to finish soon: the iterate reached is the answer, to the bit that of so many iterations, with
// a certificate and outputs like any other.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/conformance/backends.h"
#include "tests/conformance/case.h"
#include "tests/conformance/random_problems.h"

namespace sinkhorn::conformance {
namespace {

class AnytimeTest : public ConformanceTest {
 protected:
  // The answer of `c`, asked to finish after `slices`.
  Answer Cut(const Case& c, int slices) {
    int taken = 0;
    return SolveTogether(backend(), {&c}, 1e-3, [&](Solve* solve) {
      if (++taken >= slices && !solve->done()) solve->FinishSoon();
    })[0];
  }
  // That answer is the one of as many iterations as it has done.
  void ExpectIterationReached(Case c, int slices) {
    SCOPED_TRACE(absl::StrCat(c.name, " after ", slices, " slices"));
    c.solver().max_iterations = 100000000;
    const Answer cut = Cut(c, slices);
    ASSERT_TRUE(cut.status.ok()) << cut.status;
    const Convergence& reached = cut.report.convergence;
    EXPECT_EQ(reached.stop_reason, StopReason::kTimeBudget);
    EXPECT_GE(reached.iterations, 1);
    ASSERT_LT(reached.iterations, 100000000);
    c.solver().max_iterations = reached.iterations;
    Answer whole = SolveAlone(backend(), c);
    EXPECT_EQ(whole.report.convergence.stop_reason, StopReason::kMaxIterations);
    for (Convergence& member : whole.convergence) member.stop_reason = StopReason::kTimeBudget;
    EXPECT_EQ(DifferenceInBits(cut, whole), "");
  }
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const auto& [n, m] : {std::pair<int, int>{60, 50}, {700, 600}, {1500, 1300}}) {
    for (const bool dense : {false, true}) {
      Case c = CaseOf(dense ? RandomDense(n, m, 0.05, 7) : RandomClouds(n, m, 3, 0.05, 7),
                      absl::StrCat(dense ? "dense " : "clouds ", n, " x ", m));
      c.solver().tolerance = 0;
      c.wanted = kPotentials | kGradientMasses;
      if (!dense) c.wanted |= kGradientPoints;
      cases.push_back(c);
      c.solver().update_rule = UpdateRule::kSymmetric;
      c.name += ", symmetric";
      cases.push_back(c);
    }
  }
  return cases;
}

TEST_P(AnytimeTest, IsTheAnswerOfTheIterationsReached) {
  ASSERT_TRUE(backend()->can_finish_soon());
  for (const Case& c : Cases()) ExpectIterationReached(c, 3);
}

// An unreachable tolerance: the least it can do is one iteration.
TEST_P(AnytimeTest, AskedAtOnceItStillIterates) {
  for (Case c : Cases()) {
    SCOPED_TRACE(c.name);
    c.solver().max_iterations = 100000000;
    c.solver().tolerance = 1e-300;
    c.solver().precision = Precision::kDouble;
    const Answer cut = Cut(c, 0);
    ASSERT_TRUE(cut.status.ok()) << cut.status;
    EXPECT_GE(cut.report.convergence.iterations, 1);
    EXPECT_FALSE(cut.report.convergence.converged);
    EXPECT_EQ(cut.report.convergence.stop_reason, StopReason::kTimeBudget);
    EXPECT_LE(cut.dual_bound[0], cut.value[0] + 1e-9);
  }
}

// The self-terms of a debiased problem end as well.
TEST_P(AnytimeTest, DebiasedEndsToo) {
  Case c = CaseOf(RandomClouds(300, 200, 3, 0.01, 3), "debiased");
  c.solver().debias = true;
  c.solver().max_iterations = 100000000;
  c.solver().tolerance = 0;
  const Answer cut = Cut(c, 2);
  ASSERT_TRUE(cut.status.ok()) << cut.status;
  EXPECT_EQ(cut.report.convergence.stop_reason, StopReason::kTimeBudget);
}

// Whom nobody asked goes on.
TEST_P(AnytimeTest, NeighboursGoOn) {
  Case asked = CaseOf(RandomClouds(200, 150, 3, 0.05, 1), "asked");
  Case other = CaseOf(RandomClouds(150, 200, 3, 0.05, 2), "other");
  asked.solver().max_iterations = 100000000;
  other.solver().max_iterations = 400;
  asked.solver().tolerance = other.solver().tolerance = 0;
  Solve* first = nullptr;
  int taken = 0;
  const std::vector<Answer> together = SolveTogether(backend(), {&asked, &other}, 1e-3, [&](Solve* solve) {
    if (first == nullptr) first = solve;
    if (solve == first && ++taken >= 3 && !solve->done()) solve->FinishSoon();
  });
  EXPECT_EQ(together[0].report.convergence.stop_reason, StopReason::kTimeBudget);
  EXPECT_EQ(DifferenceInBits(together[1], SolveAlone(backend(), other)), "");
}

INSTANTIATE_ON_BACKENDS(AnytimeTest);

}  // namespace
}  // namespace sinkhorn::conformance
