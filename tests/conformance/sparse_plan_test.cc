// The larger entries of a plan: those of the dense plan, no more, no less, in order.
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/conformance/backends.h"
#include "tests/conformance/check.h"
#include "tests/conformance/random_problems.h"

namespace sinkhorn::conformance {
namespace {

using oracle::Transport;

class SparsePlanTest : public ConformanceTest {
 protected:
  // The dense plan, thresholded, is what must come back, to the bit.
  void Check(Case c, double threshold) {
    c.wanted |= kPlan;
    c.problem.outputs.sparse_plan.threshold = threshold;
    c.problem.outputs.sparse_plan.max_entries = c.problem.n * c.problem.m;
    const Answer answer = SolveAlone(backend(), c);
    const int64_t n = c.problem.n, m = c.problem.m, room = n * m;
    for (int64_t member = 0; member < c.problem.count; ++member) {
      const Vector plan = answer.plan.member(member, c.problem.count);
      const Vector values = answer.sparse_values.member(member, c.problem.count);
      const int64_t* offsets = &answer.sparse_offsets[member * (n + 1)];
      int64_t at = 0;
      double mass = 0;
      for (int64_t i = 0; i < n; ++i) {
        ASSERT_EQ(offsets[i], at) << "row " << i;
        for (int64_t j = 0; j < m; ++j) {
          const double entry = plan[i * m + j];
          if (entry < threshold || entry == 0) continue;
          ASSERT_EQ(answer.sparse_columns[member * room + at], j);
          ASSERT_EQ(values[at], entry);
          mass += entry;
          ++at;
        }
      }
      EXPECT_EQ(offsets[n], at);
      EXPECT_NEAR(answer.sparse_mass[member], mass, 1e-12 * mass);
      if (at == 0) continue;
      // Too many by one: their number and mass, and no more.
      Case tight = MemberCase(c, member);
      tight.problem.outputs.sparse_plan.max_entries = at;
      const Answer fits = SolveAlone(backend(), tight);
      EXPECT_EQ(fits.sparse_offsets[n], at);
      EXPECT_EQ(fits.sparse_values.values(), Vector(values.begin(), values.begin() + at));
      if (at == 1) continue;
      tight.problem.outputs.sparse_plan.max_entries = at - 1;
      const Answer over = SolveAlone(backend(), tight);
      EXPECT_EQ(over.sparse_offsets[n], at);
      EXPECT_EQ(over.sparse_mass, fits.sparse_mass);
      EXPECT_EQ(over.sparse_columns, std::vector<int32_t>(at - 1, -1));
    }
  }
};

TEST_P(SparsePlanTest, EntriesOfTheDensePlan) {
  for (Precision precision : {Precision::kStrict, Precision::kDouble}) {
    for (double epsilon : {0.005, 0.1}) {
      for (double threshold : {0.0, 1e-6, 1e-3, 0.5}) {
        for (bool dense : {false, true}) {
          Case c = CaseOf(dense ? RandomDense(31, 45, epsilon, 1) : RandomClouds(45, 31, 3, epsilon, 2), "sparse");
          c.solver().precision = precision;
          c.solver().max_iterations = 20;
          Check(c, threshold);
        }
      }
    }
  }
}

TEST_P(SparsePlanTest, BatchesAndSizes) {
  Case c = CaseOf(RandomClouds(20, 13, 2, 0.01, 3), "batch");
  c.problem.count = 3;
  c.x = Tensor::Of(Random(4).Uniforms(3 * 40, 0, 1));
  c.y = Tensor::Shared(c.y.values());
  c.a = Tensor::Shared(c.a.values());
  c.b = Tensor::Shared(c.b.values());
  c.solver().max_iterations = 10;
  Check(c, 1e-3);
  for (const auto& [n, m] : {std::pair<int64_t, int64_t>{1, 1}, {1, 200}, {300, 1}, {65, 64}, {129, 33}, {2100, 7}}) {
    Case odd = CaseOf(RandomClouds(n, m, 2, 0.05, 6), "odd");
    odd.solver().max_iterations = 4;
    Check(odd, 1e-5);
  }
  Case large = CaseOf(RandomClouds(701, 903, 3, 0.005, 5), "large");
  large.solver().max_iterations = 5;
  Check(large, 1e-5);
}

// Whatever else is asked for, and whatever the cost: exponents too large for float32, distances, costs in halves.
TEST_P(SparsePlanTest, AnySourceOfTheDensePlan) {
  for (Precision precision : {Precision::kStrict, Precision::kFast, Precision::kDouble}) {
    for (PointCost cost :
         {PointCost::kSquaredEuclidean, PointCost::kEuclidean, PointCost::kCosine, PointCost::kNegativeDot}) {
      for (double epsilon : {1e-4, 0.2}) {
        Case c = CaseOf(RandomClouds(67, 130, 5, epsilon, 7), "cost");
        c.problem.transport.point_cost = cost;
        c.solver().precision = precision;
        c.solver().max_iterations = 20;
        c.solver().rho_a = 0.5;
        c.wanted = kSums | kValueLinear | kGradientPoints;
        Check(c, 1e-4);
      }
    }
    Case halves = CaseOf(RandomDense(70, 90, 0.05, 8), "halves", DType::kFloat16);
    halves.solver().precision = precision;
    halves.solver().max_iterations = 5;
    Check(halves, 1e-4);
  }
}

// Annealed, debiased, with a tolerance, among others: the lists of all come from one slice.
TEST_P(SparsePlanTest, Company) {
  std::vector<Case> cases;
  for (int k = 0; k < 12; ++k) {
    Case c = CaseOf(k % 3 == 0 ? RandomDense(20 + k, 31, 0.05, 20 + k) : RandomClouds(20 + 9 * k, 31, 3, 0.05, 20 + k),
                    absl::StrCat("company ", k));
    c.wanted = kPlan | kPotentials;
    c.solver().max_iterations = 30;
    c.solver().tolerance = k % 2 == 0 ? 0 : 1e-3;
    c.solver().epsilon_decay = k % 4 == 0 ? 0.5 : 0;
    c.solver().debias = k % 3 == 1;
    c.problem.outputs.sparse_plan.threshold = k % 5 * 1e-3;
    c.problem.outputs.sparse_plan.max_entries = k == 7 ? 3 : k == 8 ? 0 : c.problem.n * c.problem.m;
    cases.push_back(c);
  }
  std::vector<const Case*> together;
  for (const Case& c : cases) together.push_back(&c);
  const std::vector<Answer> answers = SolveTogether(backend(), together);
  for (size_t k = 0; k < cases.size(); ++k) {
    EXPECT_EQ(DifferenceInBits(answers[k], SolveAlone(backend(), cases[k])), "") << cases[k].name;
  }
}

INSTANTIATE_ON_BACKENDS(SparsePlanTest);

}  // namespace
}  // namespace sinkhorn::conformance
