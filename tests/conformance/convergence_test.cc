// Solves to a tolerance, and the certificate: it is true of what came back, and its bounds bracket
// the optimal value in every balanced case, converged or not, in either precision.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/conformance/backends.h"
#include "tests/conformance/check.h"
#include "tests/conformance/random_problems.h"

namespace sinkhorn::conformance {
namespace {

using oracle::Potentials;
using oracle::Transport;

struct Named {
  std::string name;
  Transport problem;
};

// Balanced problems from easy to hard.
std::vector<Named> BalancedProblems() {
  std::vector<Named> problems;
  for (double epsilon : {1e-3, 1e-2, 0.1, 10.0}) {
    problems.push_back({absl::StrCat("clouds eps ", epsilon), RandomClouds(37, 43, 2, epsilon, 1)});
    problems.push_back({absl::StrCat("dense eps ", epsilon), RandomDense(43, 37, epsilon, 2)});
    problems.push_back({absl::StrCat("n >> m eps ", epsilon), RandomClouds(400, 5, 3, epsilon, 3)});
    problems.push_back({absl::StrCat("one row eps ", epsilon), RandomDense(1, 30, epsilon, 4)});
    problems.push_back({absl::StrCat("d 64 eps ", epsilon), RandomClouds(40, 40, 64, epsilon, 5)});
  }
  Transport offset = RandomClouds(30, 31, 3, 0.01, 6);
  for (double& x : offset.x) x = static_cast<float>(x + 1000);
  for (double& y : offset.y) y = static_cast<float>(y + 1000);
  problems.push_back({"common offset", offset});
  Transport apart = RandomClouds(30, 31, 3, 1.0, 7);
  for (double& y : apart.y) y = static_cast<float>(y + 1000);
  problems.push_back({"far apart", apart});
  Transport clusters = RandomClouds(32, 32, 3, 0.1, 8);
  clusters.a.clear();
  clusters.b.clear();
  for (int k = 0; k < 48; ++k) {
    clusters.x[k] = static_cast<float>(clusters.x[k] + 577);
    clusters.y[k] = static_cast<float>(clusters.y[k] + 577);
  }
  problems.push_back({"far clusters", oracle::WithUniformMasses(clusters)});
  Transport empty = RandomDense(20, 22, 0.05, 9);
  empty.a[3] += empty.a[0];
  empty.b[3] += empty.b[7];
  empty.a[0] = empty.b[7] = 0;
  problems.push_back({"zero masses", empty});
  return problems;
}

// Bounds that say nothing would bracket too: they must be those of the potentials that came back,
// up to what the precision does to a cost (float32: 1e-6 of the potentials), to epsilon and to a
// mass of 1.
void CheckBoundsOf(const Case& c, const Answer& answer, const Transport& problem) {
  const Potentials returned{answer.f.values(), answer.g.values()};
  const double dual = Value(problem, returned), primal = PrimalBound(problem, returned);
  const double room = 10 * PotentialTolerance(c, returned);
  EXPECT_GE(answer.dual_bound[0], dual - room);
  // Mass that rounding displaces may have to go the longest way.
  const double displaced = PlanTolerance(c, returned) * DefaultEpsilonStart(problem);
  EXPECT_LE(answer.primal_bound[0], primal + room + displaced);
  EXPECT_LE(std::abs(answer.value[0] - dual), room);
}

// That it says it stopped at its tolerance, and where that is.
void ExpectReached(const Case& c, const Answer& answer) {
  const Convergence& convergence = answer.convergence[0];
  EXPECT_TRUE(convergence.converged);
  EXPECT_EQ(convergence.stop_reason, StopReason::kTolerance);
  EXPECT_LE(convergence.marginal_error_a, c.solver().tolerance);
  EXPECT_LE(convergence.marginal_error_b, c.solver().tolerance);
}
// True of the potentials that came back, up to their precision's rounding of the exponents.
void ExpectWithinTolerance(const Case& c, const Answer& answer, const Transport& problem) {
  const Potentials returned{answer.f.values(), answer.g.values()};
  const double rounding = PlanTolerance(c, returned) / 10;
  EXPECT_LE(MarginalErrorA(problem, returned), c.solver().tolerance + rounding);
  EXPECT_LE(MarginalErrorB(problem, returned), c.solver().tolerance + rounding);
}

class ConvergenceTest : public ConformanceTest {};

constexpr Precision kPrecisions[] = {Precision::kStrict, Precision::kDouble};

TEST_P(ConvergenceTest, BoundsBracketTheOptimum) {
  for (const auto& [name, problem] : BalancedProblems()) {
    double error = 0;
    const Potentials at = Converge(problem, &error);
    // Exponents as large as |f| / eps are known to 16 digits only.
    const double size = oracle::MaxAbs(at.f) + oracle::MaxAbs(at.g);
    ASSERT_LT(error, 1e-12 + 1e-15 * size / problem.solver.epsilon) << name;
    const double optimum = Value(problem, at);
    // The oracle's own rounding, and the duality gap that its residual leaves.
    const double slack = 1e-13 * (1 + std::abs(optimum)) + PrimalBound(problem, at) - optimum;
    for (Precision precision : kPrecisions) {
      for (int iterations : {1, 3, 30, 3000}) {
        for (UpdateRule rule : {UpdateRule::kAlternating, UpdateRule::kSymmetric}) {
          Case c = CaseOf(problem, name);
          c.solver().precision = precision;
          c.solver().update_rule = rule;
          c.solver().max_iterations = iterations;
          c.solver().tolerance = iterations == 3000 ? 1e-6 : 0;
          c.wanted = kPotentials | kPrimalBound;
          SCOPED_TRACE(absl::StrCat(name, precision == Precision::kDouble ? " DOUBLE " : " STRICT ", iterations,
                                    rule == UpdateRule::kSymmetric ? " symmetric" : ""));
          const Answer answer = SolveAlone(backend(), c);
          if (!answer.status.ok()) continue;
          EXPECT_LE(answer.dual_bound[0], optimum + slack);
          EXPECT_GE(answer.primal_bound[0], optimum - slack);
          CheckBoundsOf(c, answer, problem);
        }
      }
    }
  }
}

// Two entries of the plan are about the smallest numbers there are, and their masses are not.
TEST_P(ConvergenceTest, BoundsWhereEntriesUnderflow) {
  for (int cost = 725; cost < 765; ++cost) {
    Transport problem = RandomDense(2, 2, 1, 13);
    problem.cost = {0, cost * 1.0, cost * 1.0, 0};
    problem.a = problem.b = {1000.1 + cost, 2000.7 - cost};
    for (Precision precision : kPrecisions) {
      Case c = CaseOf(problem, absl::StrCat("cost ", cost));
      c.solver().precision = precision;
      c.solver().max_iterations = 1;
      c.wanted = kPotentials | kPrimalBound;
      SCOPED_TRACE(c.name);
      const Answer answer = SolveAlone(backend(), c);
      if (!answer.status.ok()) continue;
      const Potentials returned{answer.f.values(), answer.g.values()};
      const double dual = Value(problem, returned), primal = PrimalBound(problem, returned);
      EXPECT_NEAR(answer.primal_bound[0], primal, 1e-5 * (std::abs(primal) + std::abs(dual)));
      EXPECT_LE(answer.dual_bound[0], answer.primal_bound[0]);
    }
  }
}

// A schedule that ends before it reaches epsilon: the bounds are still those of the problem asked
// for.
TEST_P(ConvergenceTest, BoundsBracketWhenAnnealingIsCutShort) {
  for (bool dense : {false, true}) {
    const Transport problem = dense ? RandomDense(20, 24, 0.02, 11) : RandomClouds(20, 24, 2, 0.02, 12);
    const double optimum = Value(problem, Converge(problem));
    for (Precision precision : kPrecisions) {
      for (int iterations : {1, 2, 4}) {
        Case c = CaseOf(problem, dense ? "dense" : "clouds");
        c.solver().precision = precision;
        c.solver().epsilon_decay = 0.7;
        c.solver().max_iterations = iterations;
        c.wanted = kPrimalBound;
        SCOPED_TRACE(absl::StrCat(c.name, " ", iterations, " iterations"));
        const Answer answer = SolveAlone(backend(), c);
        if (!answer.status.ok()) continue;
        EXPECT_LE(answer.dual_bound[0], optimum + 1e-12);
        EXPECT_GE(answer.primal_bound[0], optimum - 1e-12);
      }
    }
  }
}

// ---- Tolerance ------------------------------------------------------------------------------

TEST_P(ConvergenceTest, ReachesTheTolerance) {
  for (const auto& [name, problem] : BalancedProblems()) {
    if (problem.solver.epsilon < 1e-2) continue;
    const Potentials solution = Converge(problem);
    for (Precision precision : kPrecisions) {
      const bool strict = precision == Precision::kStrict;
      for (UpdateRule rule : {UpdateRule::kAlternating, UpdateRule::kSymmetric}) {
        for (bool over_relaxation : {false, true}) {
          Case c = CaseOf(problem, name);
          c.solver().precision = precision;
          c.solver().update_rule = rule;
          c.solver().over_relaxation = over_relaxation;
          c.solver().max_iterations = 100000;
          c.solver().tolerance = strict ? 1e-4 : 1e-9;
          SCOPED_TRACE(absl::StrCat(name, strict ? " STRICT" : " DOUBLE",
                                    rule == UpdateRule::kSymmetric ? " symmetric" : "",
                                    over_relaxation ? " over-relaxed" : ""));
          const Answer answer = SolveAlone(backend(), c);
          if (!answer.status.ok()) continue;
          ExpectReached(c, answer);
          ExpectWithinTolerance(c, answer, problem);
          const double optimum = Value(problem, solution);
          EXPECT_LE(answer.dual_bound[0], optimum + 1e-11 * (1 + std::abs(optimum)));
        }
      }
    }
  }
}

// The same at sizes at which it pays to keep what products make; the bounds say what the answer is worth.
TEST_P(ConvergenceTest, ReachesTheToleranceAtThousandsOfManyCoordinates) {
  const Transport problem = RandomClouds(1040, 1060, 70, 0.15, 66);
  for (Precision precision : {Precision::kStrict, Precision::kFast}) {
    Case c = CaseOf(problem, "d 70");
    c.solver().precision = precision;
    c.solver().max_iterations = 1000;
    c.solver().tolerance = 1e-4;
    c.wanted |= kPrimalBound;
    SCOPED_TRACE(precision == Precision::kFast ? "FAST" : "STRICT");
    const Answer answer = SolveAlone(backend(), c);
    if (!answer.status.ok()) continue;
    ExpectReached(c, answer);
    if (precision == Precision::kFast) continue;
    ExpectWithinTolerance(c, answer, MemberTransport(c));
    CheckBoundsOf(c, answer, MemberTransport(c));
  }
}

// Slow modes do not keep STRICT from a tolerance that float32 can express: two mixtures of Gaussians, a hundredth of
// the iterations that plain updates need. Columns are extrapolated unless a GPU has all of a problem on its chip, where
// iterations are ten times cheaper: there updates are over-relaxed.
TEST_P(ConvergenceTest, StrictReachesOneMillionthAtSmallEpsilon) {
  for (int64_t count : {1000, 1100}) {
    Random random(61);
    Transport problem = RandomClouds(count, count, 2, 1, 62);
    problem.a.clear();
    problem.b.clear();
    const double centres[][3] = {{0, 0, 0.3}, {2, 1, 0.5}, {1, 3, 0.2}, {1, 1, 0.6}, {3, 2, 0.3}};  // And widths.
    for (Vector* points : {&problem.x, &problem.y}) {
      const int first = points == &problem.x ? 0 : 3, last = points == &problem.x ? 2 : 4;
      const Vector normals = random.Normals(2 * count, 1);
      for (int64_t i = 0; i < count; ++i) {
        const double* c = centres[random.Integer(first, last)];
        for (int k = 0; k < 2; ++k) (*points)[2 * i + k] = c[k] + c[2] * normals[2 * i + k];
      }
    }
    for (double epsilon : {0.5, 0.05, 0.005}) {
      problem.solver.epsilon = epsilon;
      Case c = CaseOf(problem, absl::StrCat("mixtures of ", count, ", eps ", epsilon));
      c.solver().max_iterations = 3000;
      c.solver().tolerance = 1e-6;
      const Answer answer = SolveAlone(backend(), c);
      EXPECT_EQ(answer.convergence[0].stop_reason, StopReason::kTolerance) << c.name;
      const Potentials returned{answer.f.values(), answer.g.values()};
      EXPECT_LE(MarginalErrorA(WithUniformMasses(MemberTransport(c)), returned), 1.5e-6) << c.name;
      EXPECT_LE(MarginalErrorB(WithUniformMasses(MemberTransport(c)), returned), 1.5e-6) << c.name;
      if (epsilon != 0.5) continue;
      const int iterations = answer.convergence[0].iterations;
      if (GetParam() == "cuda" && count == 1000) {
        c.solver().over_relaxation = false;
        EXPECT_LE(iterations, SolveAlone(backend(), c).convergence[0].iterations);
      } else {
        EXPECT_LE(iterations, 20);
      }
    }
  }
}

// Sizes at which a GPU sweeps what lies in memory: all three problems of a debiased one stop for themselves.
TEST_P(ConvergenceTest, ThousandsOfPointsStop) {
  for (bool debias : {false, true}) {
    for (UpdateRule rule : {UpdateRule::kAlternating, UpdateRule::kSymmetric}) {
      Case c = CaseOf(RandomClouds(1100, 1290, 64, 0.5, 63), absl::StrCat("rule ", static_cast<int>(rule)));
      c.solver().update_rule = rule;
      c.solver().debias = debias;
      c.solver().max_iterations = 1000;
      c.solver().tolerance = 1e-4;
      SCOPED_TRACE(absl::StrCat(c.name, " debias ", debias));
      const Answer answer = SolveAlone(backend(), c);
      EXPECT_EQ(answer.convergence[0].stop_reason, StopReason::kTolerance);
      const Transport member = MemberTransport(c);
      const Potentials returned{answer.f.values(), answer.g.values()};
      EXPECT_LE(MarginalErrorA(member, returned), 1.1e-4);
      EXPECT_LE(MarginalErrorB(member, returned), 1.1e-4);
      if (!debias) continue;
      EXPECT_LE(MarginalErrorA(SelfProblemA(member), {answer.f_aa.values(), answer.f_aa.values()}), 1.1e-4);
      EXPECT_LE(MarginalErrorA(SelfProblemB(member), {answer.g_bb.values(), answer.g_bb.values()}), 1.1e-4);
    }
  }
}

// Over-relaxation may only help: never more iterations than plain updates, give or take a check.
TEST_P(ConvergenceTest, OverRelaxationHelps) {
  for (double epsilon : {0.01, 0.1}) {
    Case c = CaseOf(RandomClouds(30, 30, 2, epsilon, 21), "unit square");
    c.solver().precision = Precision::kDouble;
    c.solver().max_iterations = 100000;
    c.solver().tolerance = 1e-6;
    c.solver().over_relaxation = false;
    const int plain = SolveAlone(backend(), c).convergence[0].iterations;
    c.solver().over_relaxation = true;
    const int relaxed = SolveAlone(backend(), c).convergence[0].iterations;
    EXPECT_LE(relaxed, plain + 20) << "eps " << epsilon;
    if (epsilon == 0.01) {
      EXPECT_LT(relaxed, 0.6 * plain);
    }
  }
}

TEST_P(ConvergenceTest, SolutionsOfRelaxedProblems) {
  const double infinity = std::numeric_limits<double>::infinity();
  const double pairs[][2] = {{0.5, 0.5}, {infinity, 0.3}, {0.1, infinity}, {0.05, 3}};
  for (const auto& [rho_a, rho_b] : pairs) {
    for (bool dense : {false, true}) {
      Transport problem = dense ? RandomDense(21, 27, 0.05, 31) : RandomClouds(21, 27, 2, 0.05, 32);
      problem.b = Random(33).Masses(27, 1.5);
      problem.solver.rho_a = rho_a;
      problem.solver.rho_b = rho_b;
      const Potentials solution = Converge(problem);
      for (UpdateRule rule : {UpdateRule::kAlternating, UpdateRule::kSymmetric}) {
        Case c = CaseOf(problem, absl::StrCat(dense ? "dense" : "clouds", " rho ", rho_a, ", ", rho_b));
        c.solver().precision = Precision::kDouble;
        c.solver().update_rule = rule;
        c.solver().max_iterations = 100000;
        c.solver().tolerance = 1e-12;
        SCOPED_TRACE(c.name);
        const Answer answer = SolveAlone(backend(), c);
        EXPECT_TRUE(answer.convergence[0].converged);
        ExpectClose("relaxed solution, f", answer.f.values(), solution.f, 1e-9);
        ExpectClose("relaxed solution, g", answer.g.values(), solution.g, 1e-9);
        ExpectClose("relaxed solution, value", answer.value, {Value(problem, solution)}, 1e-9);
        EXPECT_LE(answer.dual_bound[0], Value(problem, solution) + 1e-12);
      }
    }
  }
}

TEST_P(ConvergenceTest, SolutionsOfBalancedProblems) {
  for (bool dense : {false, true}) {
    const Transport problem = dense ? RandomDense(25, 28, 0.05, 41) : RandomClouds(25, 28, 3, 0.05, 42);
    const Potentials solution = Centered(Converge(problem));
    for (double decay : {0.0, 0.5}) {
      Case c = CaseOf(problem, dense ? "dense" : "clouds");
      c.solver().precision = Precision::kDouble;
      c.solver().max_iterations = 100000;
      c.solver().tolerance = 1e-12;
      c.solver().epsilon_decay = decay;
      const Answer answer = SolveAlone(backend(), c);
      EXPECT_TRUE(answer.convergence[0].converged);
      const Potentials at = Centered({answer.f.values(), answer.g.values()});
      ExpectClose("balanced solution, f", at.f, solution.f, 1e-9);
      ExpectClose("balanced solution, g", at.g, solution.g, 1e-9);
      ExpectClose("balanced solution, value", answer.value, {Value(problem, solution)}, 1e-9);
    }
  }
}

// A tolerance below what the precision can reach ends with an answer that says so, well before the
// limit.
TEST_P(ConvergenceTest, StopsAtThePrecision) {
  Case c = CaseOf(RandomClouds(40, 45, 2, 0.1, 51), "tolerance 1e-14 in STRICT");
  c.solver().max_iterations = 1000000;
  c.solver().tolerance = 1e-14;
  const Answer answer = SolveAlone(backend(), c);
  const Convergence& convergence = answer.convergence[0];
  if (convergence.stop_reason == StopReason::kPrecision) {
    EXPECT_FALSE(convergence.converged);
    EXPECT_LE(convergence.marginal_error_a, 1e-4);
    EXPECT_LE(convergence.marginal_error_b, 1e-4);
  } else {
    EXPECT_EQ(convergence.stop_reason, StopReason::kTolerance);
  }
  EXPECT_LT(convergence.iterations, 100000);
}

TEST_P(ConvergenceTest, IterationLimitIsNotAnError) {
  Case c = CaseOf(RandomClouds(40, 45, 2, 1e-3, 52), "5 iterations");
  c.solver().max_iterations = 5;
  c.solver().tolerance = 1e-8;
  const Answer answer = SolveAlone(backend(), c);
  EXPECT_FALSE(answer.convergence[0].converged);
  EXPECT_EQ(answer.convergence[0].stop_reason, StopReason::kMaxIterations);
  EXPECT_EQ(answer.convergence[0].iterations, 5);
  EXPECT_GT(answer.convergence[0].marginal_error_a + answer.convergence[0].marginal_error_b, 1e-8);
}

// Started from a solution there is next to nothing to do.
TEST_P(ConvergenceTest, WarmStart) {
  for (UpdateRule rule : {UpdateRule::kAlternating, UpdateRule::kSymmetric}) {
    for (bool over_relaxation : {false, true}) {
      Case c = CaseOf(RandomClouds(30, 33, 2, 0.02, 56), "warm start");
      c.solver().update_rule = rule;
      c.solver().over_relaxation = over_relaxation;
      c.solver().precision = Precision::kDouble;
      c.solver().max_iterations = 20000;
      c.solver().tolerance = 1e-8;
      const Answer cold = SolveAlone(backend(), c);
      c.initial_f = Tensor::Of(cold.f.values(), DType::kFloat64);
      c.initial_g = Tensor::Of(cold.g.values(), DType::kFloat64);
      const Answer warm = SolveAlone(backend(), c);
      EXPECT_GT(cold.convergence[0].iterations, 20);
      EXPECT_LE(warm.convergence[0].iterations, 10);
      EXPECT_TRUE(warm.convergence[0].converged);
    }
  }
}

// Annealing does not stop before epsilon is reached, however small the residual on the way.
TEST_P(ConvergenceTest, AnnealsToTheEnd) {
  const Transport problem = RandomClouds(20, 20, 2, 0.01, 53);
  Case c = CaseOf(problem, "annealed");
  c.solver().epsilon_start = 1000;
  c.solver().epsilon_decay = 0.5;
  c.solver().max_iterations = 10000;
  c.solver().tolerance = 1e-4;
  const Answer answer = SolveAlone(backend(), c);
  EXPECT_TRUE(answer.convergence[0].converged);
  EXPECT_GE(answer.convergence[0].iterations, 17);  // 1000 / 2^17 < 0.01
  const Potentials returned{answer.f.values(), answer.g.values()};
  EXPECT_LE(MarginalErrorA(problem, returned), 2e-4);
  EXPECT_LE(MarginalErrorB(problem, returned), 2e-4);
}

// The report is the worst member, and members that are done stay as they were.
TEST_P(ConvergenceTest, MembersConvergeOnTheirOwn) {
  Case c = CaseOf(RandomClouds(16, 16, 2, 0.05, 54), "members");
  c.problem.count = 12;
  Vector x = Random(55).Uniforms(12 * 32, 0, 1);
  for (size_t k = 0; k < x.size(); ++k) x[k] = static_cast<float>(x[k] * (1 + k / 32));
  c.x = Tensor::Of(x);
  c.y = Tensor::Shared(c.y.values());
  c.a = c.b = Tensor();
  c.solver().max_iterations = 2000;
  c.solver().tolerance = 1e-4;
  const Answer answer = SolveAlone(backend(), c);
  int largest = 0, smallest = 1 << 30;
  for (const Convergence& convergence : answer.convergence) {
    largest = std::max(largest, convergence.iterations);
    smallest = std::min(smallest, convergence.iterations);
  }
  EXPECT_EQ(answer.report.convergence.iterations, largest);
  EXPECT_LT(smallest, largest);
}

INSTANTIATE_ON_BACKENDS(ConvergenceTest);

}  // namespace
}  // namespace sinkhorn::conformance
