// The closed forms of tests/oracle/closed_forms.h, solved by the backends. Names carry their
// numbers (13, partial transport, is not offered yet).
#include "tests/oracle/closed_forms.h"

#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/conformance/backends.h"
#include "tests/conformance/check.h"
#include "tests/conformance/random_problems.h"

namespace sinkhorn::conformance {
namespace {

using oracle::Potentials;
using oracle::Transport;

class ClosedFormsTest : public ConformanceTest {
 protected:
  // A case that iterates until nothing changes.
  Case ConvergedCase(const Transport& problem, Precision precision, const std::string& name) {
    Case c = CaseOf(problem, name, DType::kFloat64);
    c.solver().precision = precision;
    c.solver().max_iterations = 3000;
    c.solver().tolerance = precision == Precision::kDouble ? 1e-13 : 1e-6;
    return c;
  }

  // What a value may be off by: both potentials' errors, and the marginals' at the tolerance.
  static double ValueRoom(const Case& c, double value) {
    if (c.solver().precision == Precision::kDouble) return 1e-9 * (c.solver().epsilon + std::abs(value));
    return 2e-4 * c.solver().epsilon + 2e-6 * std::abs(value);
  }

  void ExpectValue(const Case& c, double value) {
    SCOPED_TRACE(absl::StrCat(c.name, c.solver().precision == Precision::kDouble ? " DOUBLE" : " STRICT"));
    const Answer answer = SolveAlone(backend(), c);
    if (!answer.status.ok()) return;
    ExpectClose(c.solver().precision == Precision::kDouble ? "DOUBLE closed form" : "STRICT closed form", answer.value,
                {value}, ValueRoom(c, value));
    EXPECT_LE(answer.dual_bound[0], value + 1e-13 * (1 + std::abs(value)));
  }
};

constexpr Precision kPrecisions[] = {Precision::kStrict, Precision::kDouble};

TEST_P(ClosedFormsTest, Form01OnePointEach) {
  for (Precision precision : kPrecisions) {
    Transport problem;
    problem.n = problem.m = 1;
    problem.cost = {1.75};
    problem.solver.epsilon = 0.2;
    ExpectValue(ConvergedCase(problem, precision, "balanced"), 1.75);
    problem.a = {0.625};
    problem.b = {1.25};
    for (double rho_a : {0.3, 2.0}) {
      problem.solver.rho_a = rho_a;
      problem.solver.rho_b = 0.9;
      Case c = ConvergedCase(problem, precision, absl::StrCat("rho_a ", rho_a));
      c.wanted = kPlan;
      ExpectValue(c, oracle::OnePointValue(0.625, 1.25, 1.75, 0.2, rho_a, 0.9));
      const double mass = oracle::OnePointMass(0.625, 1.25, 1.75, 0.2, rho_a, 0.9);
      ExpectClose("closed form 1, plan", SolveAlone(backend(), c).plan.values(), {mass},
                  (precision == Precision::kDouble ? 1e-9 : 2e-4) * mass);
    }
    Transport cloud;  // The same as points.
    cloud.n = cloud.m = cloud.dim = 1;
    cloud.x = {0.5};
    cloud.y = {2.0};
    cloud.solver.epsilon = 0.2;
    ExpectValue(ConvergedCase(cloud, precision, "points"), 2.25);
  }
}

TEST_P(ClosedFormsTest, Form02TwoByTwo) {
  Transport problem;
  problem.n = problem.m = 2;
  problem.cost = {0.25, 1.125, 0.75, 0.1875};
  problem.a = {0.25, 0.75};
  problem.b = {0.4375, 0.5625};
  problem.solver.epsilon = 0.25;
  for (Precision precision : kPrecisions) {
    Case c = ConvergedCase(problem, precision, "2 x 2");
    c.wanted = kPlan;
    const double p = oracle::TwoByTwoPlan11(0.25, 0.4375, problem.cost, 0.25);
    ExpectClose("closed form 2, plan", SolveAlone(backend(), c).plan.values(),
                {p, 0.25 - p, 0.4375 - p, 0.75 - 0.4375 + p}, precision == Precision::kDouble ? 1e-10 : 1e-5);
  }
}

TEST_P(ClosedFormsTest, Form02DoublyStochasticTwoByTwo) {
  for (Precision precision : kPrecisions) {
    for (double scale : {1.0, 6.0}) {
      oracle::Normalization problem = RandomLogits(2, 2, ExactRecipe(), 200, scale, 7);
      Case c = CaseOf(problem, "2 x 2");
      c.solver().precision = precision;
      c.cotangent = Tensor::Of({1, 0, 0, 0});
      c.problem.normalization.backward = BackwardMode::kImplicit;
      const Answer answer = SolveAlone(backend(), c);
      const double p = oracle::TwoByTwoDoublyStochastic11(problem.logits);
      const double slope = oracle::TwoByTwoDoublyStochasticSlope11(problem.logits);
      const double relative = precision == Precision::kDouble ? 1e-9 : 1e-5;
      ExpectClose("closed form 2, doubly stochastic", answer.plan.values(), {p, 1 - p, 1 - p, p}, relative);
      ExpectClose("closed form 2, slope", answer.gradient_logits.values(), {slope, -slope, -slope, slope}, relative);
    }
  }
}

TEST_P(ClosedFormsTest, Form03SymmetricUnbalanced) {
  Transport problem;
  problem.n = problem.m = 2;
  problem.cost = {0, 1, 1, 0};
  problem.solver.epsilon = problem.solver.rho_a = problem.solver.rho_b = 1;
  for (Precision precision : kPrecisions) {
    for (UpdateRule rule : {UpdateRule::kAlternating, UpdateRule::kSymmetric}) {
      problem.solver.update_rule = rule;
      Case c = ConvergedCase(problem, precision, "3");
      c.wanted = kPlan;
      const double p = oracle::kSymmetricUnbalancedP11, q = oracle::kSymmetricUnbalancedP12;
      ExpectClose("closed form 3", SolveAlone(backend(), c).plan.values(), {p, q, q, p},
                  precision == Precision::kDouble ? 1e-10 : 1e-5);
    }
  }
}

TEST_P(ClosedFormsTest, Form04Gauge) {
  Transport problem = RandomDense(7, 5, 0.125, 41);
  const Vector u = Random(42).Uniforms(7, -1, 1), v = Random(43).Uniforms(5, -1, 1);
  Transport shifted = problem;
  for (int64_t k = 0; k < 35; ++k) shifted.cost[k] += u[k / 5] + v[k % 5];
  for (Precision precision : kPrecisions) {
    Case plain = ConvergedCase(problem, precision, "plain");
    Case moved = ConvergedCase(shifted, precision, "shifted");
    plain.wanted = moved.wanted = kPlan | kPotentials;
    const Answer p = SolveAlone(backend(), plain), q = SolveAlone(backend(), moved);
    const double tolerance = precision == Precision::kDouble ? 1e-9 : 1e-5;
    ExpectClose("closed form 4, plan", q.plan.values(), p.plan.values(), tolerance);
    Potentials expected{p.f.values(), p.g.values()};
    for (int64_t i = 0; i < 7; ++i) expected.f[i] += u[i];
    for (int64_t j = 0; j < 5; ++j) expected.g[j] += v[j];
    expected = Centered(expected);
    const Potentials actual = Centered({q.f.values(), q.g.values()});
    ExpectClose("closed form 4, f", actual.f, expected.f, 2 * tolerance);
    ExpectClose("closed form 4, g", actual.g, expected.g, 2 * tolerance);
  }
}

TEST_P(ClosedFormsTest, Form04ScalingAndSwap) {
  Transport problem = RandomDense(9, 6, 0.125, 44);
  problem.solver.rho_a = 0.5;
  problem.solver.rho_b = 0.75;
  for (Precision precision : kPrecisions) {
    const Answer plain = SolveAlone(backend(), ConvergedCase(problem, precision, "plain"));
    Transport scaled = problem;
    for (double& cost : scaled.cost) cost *= 3;
    scaled.solver.epsilon *= 3;
    scaled.solver.rho_a *= 3;
    scaled.solver.rho_b *= 3;
    ExpectValue(ConvergedCase(scaled, precision, "scaled"), 3 * Value(problem, Converge(problem)));
    const Answer swapped = SolveAlone(backend(), ConvergedCase(Swapped(problem), precision, "swapped"));
    const double tolerance = precision == Precision::kDouble ? 1e-9 : 1e-5;
    ExpectClose("closed form 4, swap", swapped.f.values(), plain.g.values(), tolerance);
    ExpectClose("closed form 4, swap", swapped.g.values(), plain.f.values(), tolerance);
  }
}

TEST_P(ClosedFormsTest, Form05Polygons) {
  for (Precision precision : kPrecisions) {
    for (double epsilon : {0.1, 1.0}) {
      Transport problem = oracle::Polygons(400, 1.0, 0.7);
      problem.a.clear();
      problem.b.clear();
      problem.solver.epsilon = epsilon;
      Case c = ConvergedCase(problem, precision, absl::StrCat("400 corners, eps ", epsilon));
      c.wanted = kPotentials | kGradientPoints;
      ExpectValue(c, oracle::PolygonsValue(1.0, 0.7, epsilon));
      const Answer answer = SolveAlone(backend(), c);
      const double relative = precision == Precision::kDouble ? 1e-9 : 1e-5;
      const Vector f = answer.f.values();
      ExpectClose("closed form 5, f constant", f, Vector(400, f[0]),
                  1e-4 * relative / 1e-5 * epsilon + 1e-1 * relative);
      ExpectClose("closed form 5, d/dr", {oracle::Dot(answer.gradient_x.values(), problem.x)},
                  {oracle::PolygonsSlope(1.0, 0.7, epsilon)}, 10 * relative);
    }
  }
}

TEST_P(ClosedFormsTest, Form06Hypercubes) {
  for (Precision precision : kPrecisions) {
    for (double epsilon : {0.05, 1.0, 10.0}) {
      Transport problem = oracle::Hypercubes(8, 0.5, 0.8);
      problem.a.clear();
      problem.b.clear();
      problem.solver.epsilon = epsilon;
      Case c = ConvergedCase(problem, precision, absl::StrCat("eps ", epsilon));
      ExpectValue(c, oracle::HypercubesValue(8, 0.5, 0.8, epsilon));
      c.solver().max_iterations = 1;  // One iteration converges.
      c.solver().tolerance = 0;
      ExpectValue(c, oracle::HypercubesValue(8, 0.5, 0.8, epsilon));
    }
  }
}

TEST_P(ClosedFormsTest, Form07ProductsAdd) {
  const Transport first = RandomClouds(6, 5, 2, 0.25, 71), second = RandomClouds(4, 7, 1, 0.25, 72);
  for (Precision precision : kPrecisions) {
    const Answer p = SolveAlone(backend(), ConvergedCase(first, precision, "first"));
    const Answer q = SolveAlone(backend(), ConvergedCase(second, precision, "second"));
    const Case product = ConvergedCase(oracle::Product(first, second), precision, "product");
    const Answer both = SolveAlone(backend(), product);
    ExpectClose("closed form 7, value", both.value, {p.value[0] + q.value[0]}, 3 * ValueRoom(product, 1));
    Potentials sum;
    for (double pf : p.f.values()) {
      for (double qf : q.f.values()) sum.f.push_back(pf + qf);
    }
    sum.g.assign(product.problem.m, 0.0);
    const Potentials expected = Centered(sum), actual = Centered({both.f.values(), both.g.values()});
    ExpectClose("closed form 7, f", actual.f, expected.f, 3 * ValueRoom(product, 1));
  }
}

TEST_P(ClosedFormsTest, Form08Translation) {
  const double t[2] = {0.375, -0.875};
  for (Precision precision : kPrecisions) {
    for (double kappa : {0.5, 1.0}) {
      for (double epsilon : {0.02, 1.0}) {
        Transport problem = RandomClouds(16, 16, 2, epsilon, 81);
        problem.kappa = kappa;
        problem.b = problem.a;
        for (int64_t k = 0; k < 32; ++k) problem.y[k] = problem.x[k] + t[k % 2];
        Case c = ConvergedCase(problem, precision, absl::StrCat("kappa ", kappa, " eps ", epsilon));
        c.solver().debias = true;
        c.wanted = kGradientPoints;
        SCOPED_TRACE(c.name);
        const Answer answer = SolveAlone(backend(), c);
        const double expected = kappa * (t[0] * t[0] + t[1] * t[1]);
        // Three values, each with potentials about as large as the shift.
        ExpectClose("closed form 8, value", answer.value, {expected}, 3 * ValueRoom(c, 1));
        Vector gradient(32);
        for (int64_t k = 0; k < 32; ++k) gradient[k] = -2 * kappa * problem.a[k / 2] * t[k % 2];
        const double relative = precision == Precision::kDouble ? 1e-8 : 1e-3;
        ExpectClose("closed form 8, gradient", answer.gradient_x.values(), gradient, relative * 2 * kappa / 16);
      }
    }
  }
}

TEST_P(ClosedFormsTest, Form09Gaussians) {
  const oracle::Gaussian first = {{0.1, -0.2}, {0.5, 0.2, 0.3}};
  const oracle::Gaussian second = {{0.6, 0.3}, {0.2, -0.05, 0.4}};
  Transport problem = oracle::GaussiansOnGrids(first, second, 24, 7);
  problem.solver.epsilon = 0.6;
  for (Precision precision : kPrecisions) {
    Case c = ConvergedCase(problem, precision, "24 x 24 points");
    c.solver().tolerance = 1e-6;  // Of masses whose totals agree to rounding.
    const double value = oracle::GaussiansValue(first, second, 0.6);
    const Answer answer = SolveAlone(backend(), c);
    EXPECT_TRUE(answer.convergence[0].converged);
    // The grids cut the tails off at 7 deviations: 1e-9. Totals that differ by 1e-16 are the same.
    ExpectClose("closed form 9", answer.value, {value}, 2e-4 * 0.6 + 2e-6 * value);
    EXPECT_LE(answer.dual_bound[0], value + 1e-8);
  }
}

TEST_P(ClosedFormsTest, Form10UnbalancedValueFromMass) {
  Transport problem = RandomClouds(12, 17, 3, 0.05, 101);
  problem.b = Random(102).Masses(17, 1.75);
  problem.solver.rho_a = problem.solver.rho_b = 0.4;
  for (Precision precision : kPrecisions) {
    Case c = ConvergedCase(problem, precision, "10");
    c.wanted = kSums | kPotentials;
    const Answer answer = SolveAlone(backend(), c);
    const Vector rows = answer.row_sums.values(), f = answer.f.values();
    const double expected = oracle::UnbalancedValueFromMass(1, 1.75, oracle::Sum(rows), 0.4, 0.05);
    const double relative = precision == Precision::kDouble ? 1e-9 : 1e-4;
    ExpectClose("closed form 10", answer.value, {expected}, relative);
    for (int64_t i = 0; i < 12; ++i) {
      EXPECT_NEAR(rows[i], problem.a[i] * std::exp(-f[i] / 0.4), relative * problem.a[i]);
    }
  }
}

TEST_P(ClosedFormsTest, Form11LargeEpsilon) {
  Transport problem = RandomClouds(10, 8, 2, 1e6, 111);
  for (Precision precision : kPrecisions) {
    Case c = ConvergedCase(problem, precision, "eps 1e6");
    c.wanted = kPlan;
    const Vector plan = SolveAlone(backend(), c).plan.values();
    for (int64_t k = 0; k < 80; ++k) {
      const double expected = problem.a[k / 8] * problem.b[k % 8];
      EXPECT_NEAR(plan[k], expected, 1e-5 * expected);
    }
  }
}

TEST_P(ClosedFormsTest, Form11SmallEpsilonOnTheLine) {
  Transport problem;
  problem.n = problem.m = 64;
  problem.dim = 1;
  problem.x = Random(112).Uniforms(64, 0, 1);
  problem.y = Random(113).Uniforms(64, 0.25, 1.5);
  const double sorted = oracle::SortedLineValue(problem.x, problem.y);
  for (double epsilon : {1e-3, 1e-2}) {
    problem.solver.epsilon = epsilon;
    for (Precision precision : kPrecisions) {
      Case c = ConvergedCase(problem, precision, absl::StrCat("eps ", epsilon));
      c.solver().max_iterations = 20000;
      c.solver().tolerance = 1e-4;
      c.wanted = kPotentials | kPrimalBound;
      const Answer answer = SolveAlone(backend(), c);
      EXPECT_LE(answer.dual_bound[0], sorted + epsilon * std::log(64.0));
      EXPECT_GE(answer.primal_bound[0], sorted - 1e-12);
      EXPECT_GE(answer.value[0], sorted - ValueRoom(c, sorted) - 1e-4);
      EXPECT_LE(answer.value[0], sorted + epsilon * std::log(64.0) + ValueRoom(c, sorted));
    }
  }
}

INSTANTIATE_ON_BACKENDS(ClosedFormsTest);

}  // namespace
}  // namespace sinkhorn::conformance
