// Large point clouds: 10,000 x 10,000 points, a few iterations, against the oracle; and the memory
// they take.
#include "absl/strings/str_cat.h"
#include "tests/conformance/backends.h"
#include "tests/conformance/check.h"
#include "tests/conformance/random_problems.h"
#include "tests/oracle/closed_forms.h"

namespace sinkhorn::conformance {
namespace {

class LargeTest : public ConformanceTest {};

TEST_P(LargeTest, TenThousandPoints) {
  if (GetParam() == "cpu_streamed") GTEST_SKIP() << "cpu streams this size too";
  oracle::Transport problem = RandomClouds(10000, 10000, 3, 0.01, 1);
  problem.a.clear();
  problem.b.clear();
  for (UpdateRule rule : {UpdateRule::kAlternating, UpdateRule::kSymmetric}) {
    problem.solver.update_rule = rule;
    Case c = CaseOf(problem, "10,000");
    c.solver().max_iterations = 2;
    const oracle::Transport member = MemberTransport(c);
    const oracle::Potentials reference = Iterate(member, 2);
    const double value = Value(member, reference);
    SCOPED_TRACE(rule == UpdateRule::kAlternating ? "alternating" : "symmetric");
    const Answer answer = SolveAlone(backend(), c);
    const double tolerance = PotentialTolerance(c, reference);
    ExpectClose("STRICT f, 10,000 points", answer.f.values(), reference.f, tolerance);
    ExpectClose("STRICT g, 10,000 points", answer.g.values(), reference.g, tolerance);
    ExpectClose("STRICT value, 10,000 points", answer.value, {value}, 4 * tolerance);
    if (rule == UpdateRule::kAlternating) {
      EXPECT_LE(answer.dual_bound[0], PrimalBound(member, reference));
      EXPECT_GE(answer.dual_bound[0], value - 4 * tolerance);
    }
  }
}

TEST_P(LargeTest, TenThousandPointsDouble) {
  if (GetParam() == "cpu_streamed") GTEST_SKIP() << "cpu streams this size too";
  Case c = CaseOf(RandomClouds(10000, 9973, 3, 0.1, 2), "10,000 double");
  c.solver().max_iterations = 1;
  c.solver().precision = Precision::kDouble;
  const oracle::Potentials reference = Iterate(MemberTransport(c), 1);
  const Answer answer = SolveAlone(backend(), c);
  const double tolerance = PotentialTolerance(c, reference);
  ExpectClose("DOUBLE f, 10,000 points", answer.f.values(), reference.f, tolerance);
  ExpectClose("DOUBLE g, 10,000 points", answer.g.values(), reference.g, tolerance);
}

// Closed form 6 at 4,096 x 4,096 corners: the value of a converged problem, without an oracle's
// loop.
TEST_P(LargeTest, HypercubeOf4096Corners) {
  for (double epsilon : {0.1, 1.0}) {
    oracle::Transport problem = oracle::Hypercubes(12, 0.5, 0.75);
    problem.a.clear();
    problem.b.clear();
    problem.solver.epsilon = epsilon;
    Case c = CaseOf(problem, "hypercube");
    c.solver().max_iterations = 1;
    const double value = oracle::HypercubesValue(12, 0.5, 0.75, epsilon);
    for (Precision precision : {Precision::kStrict, Precision::kDouble}) {
      c.solver().precision = precision;
      const Answer answer = SolveAlone(backend(), c);
      const bool strict = precision == Precision::kStrict;
      const double f = value / 2;  // The size of the potentials, up to the constant.
      const double tolerance = strict ? 1e-4 * epsilon + 1e-6 * f : 1e-9 * (epsilon + f);
      ExpectClose(strict ? "STRICT hypercube value" : "DOUBLE hypercube value", answer.value, {value}, 2 * tolerance);
      EXPECT_LE(answer.dual_bound[0], value * (1 + 1e-13));
    }
  }
}

// Without a kernel cache a point cloud's memory is O((n + m) d): it doubles with the points, and is
// far below n x m.
TEST_P(LargeTest, MemoryIsLinear) {
  if (GetParam() == "cpu") GTEST_SKIP() << "keeps a kernel cache";
  const auto bytes = [&](int64_t points) {
    Case c = CaseOf(RandomClouds(4, 4, 3, 0.1, 3), "");
    c.problem.n = c.problem.m = points;
    c.solver().max_iterations = 10;
    return backend()->WorkingBytes(c.problem);
  };
  EXPECT_LT(bytes(100000), 2.2 * bytes(50000));
  EXPECT_LT(bytes(100000), 200000 * 512);  // n x m floats would be 40 GB.
}

INSTANTIATE_ON_BACKENDS(LargeTest);

}  // namespace
}  // namespace sinkhorn::conformance
