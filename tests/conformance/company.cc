#include "tests/conformance/company.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace sinkhorn::conformance {

std::vector<const Case*> PointersTo(const std::vector<Case>& cases) {
  std::vector<const Case*> pointers;
  for (const Case& c : cases) pointers.push_back(&c);
  return pointers;
}

std::vector<Answer> AllAlone(Backend* backend, const std::vector<const Case*>& cases) {
  std::vector<Answer> answers;
  for (const Case* c : cases) answers.push_back(SolveAlone(backend, *c));
  return answers;
}

void ExpectSameBits(const std::vector<const Case*>& cases, const std::vector<Answer>& actual,
                    const std::vector<Answer>& expected) {
  for (size_t k = 0; k < cases.size(); ++k) {
    EXPECT_EQ(DifferenceInBits(actual[k], expected[k]), "") << "problem " << k << ": " << cases[k]->name;
  }
}

void ExpectMembersAreProblems(Backend* backend, const Case& c) {
  const int64_t count = c.problem.count;
  const Answer together = SolveAlone(backend, c);
  if (!together.status.ok()) return;
  for (int64_t index = 0; index < count; ++index) {
    const Answer alone = SolveAlone(backend, MemberCase(c, index));
    EXPECT_EQ(DifferenceInBits(MemberAnswer(together, index, count), alone), "")
        << c.name << ", member " << index << " of " << count;
  }
}

double Distance(const Answer& answer, const Answer& exact) {
  double difference = 0;
  const auto compare = [&](const Vector& actual, const Vector& expected) {
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) {
      const double d = std::abs(actual[i] - expected[i]);
      difference = d <= difference ? difference : std::isfinite(d) ? d : INFINITY;  // No number is not forgotten.
    }
  };
  compare(answer.f.values(), exact.f.values());
  compare(answer.g.values(), exact.g.values());
  compare(answer.f_aa.values(), exact.f_aa.values());
  compare(answer.g_bb.values(), exact.g_bb.values());
  return difference;
}

}  // namespace sinkhorn::conformance
