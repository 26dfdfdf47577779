// Random problems (random_draws.h) against the oracle. The seed of a failing one is in its name.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/conformance/backends.h"
#include "tests/conformance/check.h"
#include "tests/conformance/check_hessian.h"
#include "tests/conformance/check_normalization.h"
#include "tests/conformance/random_draws.h"

namespace sinkhorn::conformance {
namespace {

using oracle::Transport;

class RandomTest : public ConformanceTest {
 protected:
  void ExpectOfItsPotentials(Case c);
};

// By how many powers of two the plan's entries are more than what is asked for can be made of: infinitely, where not
// even float64 holds their densities; NaN where these are so close to its end that it is open.
double Excess(const Case& c, const Transport& problem, const oracle::Potentials& at) {
  const auto are_held = [&](double moved) {
    oracle::Potentials to = at;
    for (double& f : to.f) f += moved * problem.solver.epsilon;
    return std::isfinite(oracle::MaxAbs(oracle::GradientA(problem, to)) +
                         oracle::MaxAbs(oracle::GradientA(Swapped(problem), {to.g, to.f})));
  };
  constexpr double kClose = 16;  // More than masses and rounding come to.
  if (!are_held(-kClose)) return std::numeric_limits<double>::infinity();
  if (!are_held(kClose)) return std::numeric_limits<double>::quiet_NaN();
  constexpr uint32_t kOfEntries =
      kPlan | kValueLinear | kPrimalBound | kGradientPoints | kGradientCost | kProjections | kProducts;
  const bool limited = c.solver().precision != Precision::kDouble;
  if (!limited || (c.wanted & kOfEntries) == 0) return -std::numeric_limits<double>::infinity();
  const double error = std::max(MarginalErrorA(problem, at), MarginalErrorB(problem, at));
  return std::log2(error / (oracle::Sum(problem.a) * oracle::Sum(problem.b))) - 40;
}

double LargerError(const Convergence& end) { return std::max(end.marginal_error_a, end.marginal_error_b); }

void ExpectAgreesWithItself(const Case& c, const Convergence& end) {
  EXPECT_EQ(end.converged, LargerError(end) <= c.solver().tolerance);
  EXPECT_TRUE(end.converged || end.stop_reason != StopReason::kTolerance);
  EXPECT_LE(end.iterations, c.solver().max_iterations);
}

TEST_P(RandomTest, TransportIterates) {
  // Those found faults which the first rounds do not: light rows' sums and projections; saturated densities where there
  // is no mass.
  for (int seed : Seeds({511, 2450, 3018, 8284})) {
    Case c = AnyTransport(seed);
    SayNext(c);
    const Transport problem = MemberTransport(c);
    const oracle::Potentials at = Iterate(problem, c.solver().max_iterations);
    const double excess = Excess(c, problem, at);
    if (std::isnan(excess)) continue;
    const double doubt = 2 * PotentialTolerance(c, at) / c.solver().epsilon / std::log(2);
    if (excess - doubt > 0) {
      EXPECT_EQ(SolveTogether(backend(), {&c})[0].status.code(), absl::StatusCode::kFailedPrecondition) << c.name;
    } else if (excess + doubt < 0 || SolveTogether(backend(), {&c})[0].status.ok()) {
      CheckIterates(backend(), c);
    }
  }
}

// Far from the solution and at it, whatever rounding or annealing does: bounds that a client may rely on.
TEST_P(RandomTest, BoundsBracketTheOptimum) {
  // Those found upper bounds that were none: FAST's, below the optimum; no number, where annealing was cut short.
  for (int seed : Seeds({71035, 3008138}, 4)) {
    Case c = AnyTransport(seed);
    Random random(seed + (uint64_t{1} << 43));
    c.solver().precision = static_cast<Precision>(random.Integer(0, 2));
    c.solver().max_iterations = std::lround(LogUniform(&random, 1, 400));  // Annealing may be cut short.
    if (random.Chance(0.5)) c.solver().tolerance = LogUniform(&random, 1e-7, 1e-1);
    const Transport problem = MemberTransport(c);
    const bool balanced = std::isinf(problem.solver.rho_a) && std::isinf(problem.solver.rho_b);
    c.wanted &= balanced ? ~0u : ~uint32_t{kPrimalBound};
    absl::StrAppend(&c.name, ", now ", c.solver().max_iterations, ", precision ",
                    static_cast<int>(c.solver().precision), ", to ", c.solver().tolerance);
    SayNext(c);
    const Answer answer = SolveTogether(backend(), {&c})[0];
    if (!answer.status.ok()) continue;
    // What the oracle has not reached is between its bounds; where it has none above, its error tells how far it is.
    double error = 0;
    const oracle::Potentials at = Converge(problem, &error);
    const double low = Value(problem, at), scale = oracle::MaxAbs(at.f) + oracle::MaxAbs(at.g);
    const bool relaxed = !std::isinf(problem.solver.rho_a) && !std::isinf(problem.solver.rho_b);
    const double high = balanced  ? PrimalBound(problem, at)
                        : relaxed ? PrimalValue(problem, Plan(problem, at))
                                  : low + error * scale;
    const double rounding = 1e-13 * (std::abs(low) + scale * std::max(oracle::Sum(problem.a), oracle::Sum(problem.b)));
    if (std::isnan(high)) continue;  // It has come nowhere.
    EXPECT_LE(answer.dual_bound[0], high + rounding) << c.name;
    if (!answer.primal_bound.empty()) {
      EXPECT_GE(answer.primal_bound[0], low - rounding) << c.name;
    }
  }
}

// Wherever a solve ends, what it says and makes is of the potentials that it returns.
void RandomTest::ExpectOfItsPotentials(Case c) {
  c.wanted |= kPotentials;
  SayNext(c);
  SCOPED_TRACE(c.name);
  Answer answer = SolveTogether(backend(), {&c})[0];
  if (!answer.status.ok()) return;
  Convergence& end = answer.convergence[0];
  ExpectAgreesWithItself(c, end);
  const Transport problem = MemberTransport(c);
  const oracle::Potentials returned{answer.f.values(), answer.g.values()};
  if (!(Excess(c, problem, returned) < 0)) return;
  if (end.stop_reason == StopReason::kPrecision) {
    const double rounding = oracle::Sum(PlanRowSums(problem, returned)) * PlanTolerance(c, returned);
    EXPECT_LE(LargerError(end), c.solver().tolerance + std::max(1e-5, rounding));
  }
  c.solver().max_iterations = end.iterations;
  end.stop_reason = StopReason::kMaxIterations;
  ExpectMatchesOracle(c, answer, returned, backend()->device().backend != "cuda");
}

TEST_P(RandomTest, AnswersAreOfTheirPotentials) {
  // Those found annealing that ended where its first epsilon met the tolerance; a tolerance that was not met, but by
  // rounding; potentials that shared a constant beside which nothing was left of them.
  for (int seed : Seeds({2946, 2330, 20985}, 4)) {
    Case c = AnyTransport(seed);
    AnyEnd(seed, &c);
    ExpectOfItsPotentials(c);
  }
}

// Up to what rounded coordinates and densities make of them.
TEST_P(RandomTest, FastAnswersAreOfTheirPotentials) {
  for (int seed : Seeds({}, 4)) {
    Case c = AnyTransport(seed);
    AnyEnd(seed, &c);
    c.solver().precision = Precision::kFast;
    ExpectOfItsPotentials(c);
  }
}

// Of all three problems of a debiased one.
TEST_P(RandomTest, DebiasedAnswersAreOfTheirPotentials) {
  for (int seed : Seeds({}, 4)) {
    Case c = AnyTransport(seed);
    if (c.problem.kind != ProblemKind::kPointCloud) continue;
    AnyEnd(seed, &c);
    c.solver().debias = true;
    c.wanted = kPotentials | kGradientPoints | kGradientMasses;
    SayNext(c);
    SCOPED_TRACE(c.name);
    const Answer answer = SolveTogether(backend(), {&c})[0];
    if (!answer.status.ok()) continue;
    const Transport problem = MemberTransport(c), of_a = SelfProblemA(problem), of_b = SelfProblemB(problem);
    const oracle::Potentials at{answer.f.values(), answer.g.values()};
    const Vector f_aa = answer.f_aa.values(), g_bb = answer.g_bb.values();
    const std::pair<const Transport&, oracle::Potentials> parts[] = {
        {problem, at}, {of_a, {f_aa, f_aa}}, {of_b, {g_bb, g_bb}}};
    if (std::any_of(std::begin(parts), std::end(parts),
                    [&](const auto& part) { return !(Excess(c, part.first, part.second) < 0); })) {
      continue;
    }
    // 1. What rounding may do to each.
    const double of_sums = c.solver().precision == Precision::kDouble ? 1e-13 : 2.4e-7;
    double room = 0, error_a = 0, error_b = 0, of_errors = 0, relative[3];
    for (int k = 0; k < 3; ++k) {
      const auto& [part, of_part] = parts[k];
      relative[k] = PlanTolerance(c, of_part);
      const double plan_mass = oracle::Sum(PlanRowSums(part, of_part));
      room += part.solver.epsilon * plan_mass * relative[k] + 1e-12 * std::abs(Value(part, of_part));
      room += 1e-12 * part.solver.epsilon * oracle::Sum(part.a) * oracle::Sum(part.b);
      error_a = std::max(error_a, MarginalErrorA(part, of_part));
      error_b = std::max(error_b, MarginalErrorB(part, of_part));
      of_errors = std::max(of_errors, (plan_mass + error_a + error_b) * (relative[k] + of_sums));
    }
    // 2. Value, errors, gradients.
    const std::string label = LabelPrefix(c) + "debiased ";
    ExpectClose(label + "value", answer.value, {Divergence(problem, at, f_aa, g_bb)}, room);
    const Convergence& end = answer.convergence[0];
    ExpectClose(label + "errors", {end.marginal_error_a, end.marginal_error_b}, {error_a, error_b}, of_errors);
    for (const bool is_x : {true, false}) {
      const Transport cross = is_x ? problem : Swapped(problem);
      const oracle::Potentials of_cross = is_x ? at : oracle::Potentials{at.g, at.f};
      const auto& [self, of_self] = parts[is_x ? 1 : 2];
      const double of_entries = std::max(relative[0], relative[is_x ? 1 : 2]);
      const Vector sums = PlanRowSums(cross, of_cross), self_sums = PlanRowSums(self, of_self);
      const double slope = std::max(LargestSlope(cross), LargestSlope(self));
      Vector of_points;
      for (int64_t i = 0; i < cross.n; ++i) {
        of_points.insert(of_points.end(), cross.dim, slope * (of_entries * (sums[i] + self_sums[i]) + 1e-30));
      }
      ExpectClose(label + "gradients", (is_x ? answer.gradient_x : answer.gradient_y).values(),
                  DivergenceGradientX(cross, of_cross, of_self.f), of_points);
      Vector of_masses = GradientARoom(cross, of_cross, 0, of_entries);
      const Vector of_self_masses = GradientARoom(self, of_self, 0, of_entries);
      const double size = oracle::MaxAbs(of_cross.f) + oracle::MaxAbs(of_self.f);
      const Vector expected = DivergenceGradientA(cross, of_cross, of_self.f);
      for (size_t i = 0; i < of_masses.size(); ++i) {
        of_masses[i] += of_self_masses[i] + 1e-12 * (size + std::abs(expected[i]));
      }
      ExpectClose(label + "gradients in masses", (is_x ? answer.gradient_a : answer.gradient_b).values(), expected,
                  of_masses);
    }
  }
}

TEST_P(RandomTest, HessianVectorProducts) {
  const std::vector<int> seeds = Seeds({}, 20);
  // Relaxed dots may not: their self-terms weigh far more than what they are of. Nor, in float32, systems of few points
  // that are nearly singular.
  size_t converged = 0;
  for (int seed : seeds) {
    const Case c = AnyHessian(seed);
    SayNext(c);
    SCOPED_TRACE(c.name);
    const Answer answer = SolveAlone(backend(), c);
    if (!answer.status.ok() || !answer.convergence[0].converged) continue;
    converged += answer.hessian_convergence[0].converged;
    ExpectMatchesHessian(c, answer);
  }
  EXPECT_GE(converged, seeds.size() * 9 / 10);
}

TEST_P(RandomTest, NormalizationForwardAndBackward) {
  if (GetParam() == "cpu_streamed") GTEST_SKIP() << "the same as cpu";
  // These as well: scalings that an added guard drives apart by 30 orders of magnitude.
  for (int seed : Seeds({1230, 1643})) {
    const Case c = AnyNormalization(seed);
    SayNext(c);
    SCOPED_TRACE(c.name);
    const Answer answer = SolveAlone(backend(), c);
    if (!answer.status.ok()) continue;
    for (int64_t index = 0; index < c.problem.count; ++index) {
      const Case member = MemberCase(c, index);
      const Answer member_answer = MemberAnswer(answer, index, c.problem.count);
      ExpectMatchesRecipe(member, member_answer);
      ExpectMatchesUnrolled(LabelPrefix(c) + "unrolled", member, member_answer);
    }
  }
}

// Wherever iterations end, EXACT too: the plan, what is said of it, and the derivative of what was done or at its plan.
TEST_P(RandomTest, NormalizationsAreWhatTheySay) {
  if (GetParam() == "cpu_streamed") GTEST_SKIP() << "the same as cpu";
  // These as well: systems that are not definite, of sums that IMPLICIT_UNIT and IMPLICIT_FULL take for 1, and one of
  // a single column, which is nothing but rounding.
  for (int seed : Seeds({301055, 301318, 301483, 401033, 402369, 301547}, 4)) {
    Case c = AnyNormalization(seed);
    AnyBackward(seed, &c);
    if (oracle::MaxAbs(c.logits.values()) > 1e4) continue;  // Beyond the stated accuracy.
    SayNext(c);
    SCOPED_TRACE(c.name);
    const Answer answer = SolveTogether(backend(), {&c})[0];
    if (!answer.status.ok()) continue;
    for (int64_t index = 0; index < c.problem.count; ++index) {
      Case member = MemberCase(c, index);
      const Answer of_member = MemberAnswer(answer, index, c.problem.count);
      const Convergence& end = of_member.convergence[0];
      ExpectAgreesWithItself(c, end);
      member.solver().max_iterations = end.iterations;
      const bool exact = c.problem.normalization.recipe.exact;
      if (exact) {
        ExpectScalesExactly(member, of_member);
      } else {
        ExpectMatchesRecipe(member, of_member);
      }
      if (c.cotangent.present() && c.problem.normalization.backward == BackwardMode::kUnrolled) {
        ExpectMatchesUnrolled(LabelPrefix(c) + "unrolled, at its end", member, of_member);
      } else if (c.cotangent.present()) {
        ExpectMatchesImplicit(LabelPrefix(c) + "implicit, at its plan", member, of_member);
      }
    }
  }
}

INSTANTIATE_ON_BACKENDS(RandomTest);

}  // namespace
}  // namespace sinkhorn::conformance
