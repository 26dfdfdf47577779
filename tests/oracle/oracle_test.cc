// The oracle of transport against closed forms 1-12 and against finite differences: whoever trusts the oracle trusts
// this.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "gtest/gtest.h"
#include "tests/oracle/closed_forms.h"
#include "tests/oracle/normalization.h"
#include "tests/oracle/oracle_test_util.h"
#include "tests/oracle/transport.h"
#include "tests/oracle/transport_outputs.h"

namespace sinkhorn::oracle {
namespace {

Vector Masses(size_t count, unsigned seed, double total = 1) {
  Vector masses = Uniform(count, 0.1, 1, seed);
  const double sum = Sum(masses);
  for (double& mass : masses) mass *= total / sum;
  return masses;
}

Transport RandomClouds(int64_t n, int64_t m, int64_t dim, double epsilon, unsigned seed) {
  Transport problem;
  problem.n = n;
  problem.m = m;
  problem.dim = dim;
  problem.x = Uniform(n * dim, 0, 1, seed);
  problem.y = Uniform(m * dim, 0, 1, seed + 1);
  problem.a = Masses(n, seed + 2);
  problem.b = Masses(m, seed + 3);
  problem.solver.epsilon = epsilon;
  return problem;
}

Potentials ConvergedOrFail(const Transport& problem) {
  double error = 0;
  Potentials at = Converge(problem, &error);
  EXPECT_LT(error, 1e-12 * (Sum(problem.a) + Sum(problem.b)));
  return at;
}

// ---- Exponentials ---------------------------------------------------------------------------

// Of the C library's, whose own are within one unit: two such units apart at most, and the same where they end.
TEST(Exponentials, AreTheLibrarys) {
  for (const auto& [low, high] : {std::pair(-1e-3, 1e-3), std::pair(-40.0, 1.0), std::pair(-746.0, 710.0)}) {
    for (size_t count : {1, 2, 3, 4, 7, 100, 10007}) {
      const Vector at = Uniform(count, low, high, 800 + count);
      Vector got = at;
      Exponentials(got.data(), count);
      for (size_t k = 0; k < count; ++k) {
        const double right = std::exp(at[k]), below = std::nextafter(right, 0), above = std::nextafter(right, HUGE_VAL);
        EXPECT_GE(got[k], std::nextafter(below, 0)) << at[k];
        EXPECT_LE(got[k], std::nextafter(above, HUGE_VAL)) << at[k];
      }
    }
  }
  const double nan = std::numeric_limits<double>::quiet_NaN();
  Vector ends = {0, -0.0, -HUGE_VAL, HUGE_VAL, -1e300, 1e300, -745.2, 709.79, nan};
  const Vector expected = {1, 1, 0, HUGE_VAL, 0, HUGE_VAL, 0, HUGE_VAL};
  Exponentials(ends.data(), ends.size());
  for (size_t k = 0; k < expected.size(); ++k) EXPECT_EQ(ends[k], expected[k]) << k;
  EXPECT_TRUE(std::isnan(ends.back()));
}

TEST(Exponentials, LogSumExpIsTheSums) {
  for (size_t count : {1, 5, 8, 255, 256, 257, 1000}) {
    const Vector values = Uniform(count, 700, 720, 810 + count);
    long double sum = 0;
    for (double value : values) sum += std::exp(static_cast<long double>(value) - 720);
    EXPECT_NEAR(LogSumExp(values.data(), count), static_cast<double>(std::log(sum) + 720), 4e-13) << count;
  }
  const Vector nothing(9, -HUGE_VAL);
  EXPECT_EQ(LogSumExp(nothing.data(), 9), -HUGE_VAL);
  EXPECT_EQ(LogSumExp(nothing.data(), 0), -HUGE_VAL);
}

// ---- Closed forms ---------------------------------------------------------------------------

TEST(ClosedForms, OnePointEach) {  // 1
  for (double rho_a : {0.3, 2.0}) {
    Transport problem;
    problem.n = problem.m = 1;
    problem.cost = {1.7};
    problem.a = {0.6};
    problem.b = {1.3};
    problem.solver.epsilon = 0.2;
    problem.solver.rho_a = rho_a;
    problem.solver.rho_b = 0.9;
    const Potentials at = ConvergedOrFail(problem);
    EXPECT_NEAR(Plan(problem, at)[0], OnePointMass(0.6, 1.3, 1.7, 0.2, rho_a, 0.9), 1e-14);
    EXPECT_NEAR(Value(problem, at), OnePointValue(0.6, 1.3, 1.7, 0.2, rho_a, 0.9), 1e-13);
  }
  Transport balanced;
  balanced.n = balanced.m = 1;
  balanced.cost = {1.7};
  balanced.solver.epsilon = 0.2;
  balanced = WithUniformMasses(balanced);
  const Potentials at = Iterate(balanced, 1);
  EXPECT_NEAR(Plan(balanced, at)[0], 1, 1e-14);  // exp of an exponent around 8.5
  EXPECT_NEAR(Value(balanced, at), 1.7, 1e-14);
}

TEST(ClosedForms, TwoByTwo) {  // 2
  Transport problem;
  problem.n = problem.m = 2;
  problem.cost = {0.3, 1.1, 0.7, 0.2};
  problem.a = {0.3, 0.7};
  problem.b = {0.45, 0.55};
  problem.solver.epsilon = 0.25;
  const Potentials at = ConvergedOrFail(problem);
  EXPECT_NEAR(Plan(problem, at)[0], TwoByTwoPlan11(0.3, 0.45, problem.cost, 0.25), 1e-14);

  Normalization square;
  square.n = square.m = 2;
  square.logits = {0.4, -1.0, 0.3, 2.0};
  square.recipe = ExactRecipe();
  const Vector plan = Normalize(square);
  EXPECT_NEAR(plan[0], TwoByTwoDoublyStochastic11(square.logits), 1e-14);
  EXPECT_NEAR(ImplicitGradient(plan, 2, 2, {1, 0, 0, 0})[0], TwoByTwoDoublyStochasticSlope11(square.logits), 1e-14);
}

TEST(ClosedForms, SymmetricUnbalancedTwoByTwo) {  // 3
  Transport problem;
  problem.n = problem.m = 2;
  problem.cost = {0, 1, 1, 0};
  problem.solver.epsilon = problem.solver.rho_a = problem.solver.rho_b = 1;
  problem = WithUniformMasses(problem);
  const Vector plan = Plan(problem, ConvergedOrFail(problem));
  ExpectAllNear(plan,
                {kSymmetricUnbalancedP11, kSymmetricUnbalancedP12, kSymmetricUnbalancedP12, kSymmetricUnbalancedP11},
                1e-10);
}

TEST(ClosedForms, GaugeScalingSwap) {  // 4
  Transport problem;
  problem.n = 7;
  problem.m = 5;
  problem.cost = Uniform(35, 0, 2, 1);
  problem.a = Masses(7, 2);
  problem.b = Masses(5, 3);
  problem.solver.epsilon = 0.1;
  const Potentials at = ConvergedOrFail(problem);
  const Vector u = Uniform(7, -1, 1, 4), v = Uniform(5, -1, 1, 5);
  Transport shifted = problem;
  for (int64_t i = 0; i < 7; ++i) {
    for (int64_t j = 0; j < 5; ++j) shifted.cost[i * 5 + j] += u[i] + v[j];
  }
  const Potentials moved = ConvergedOrFail(shifted);
  ExpectAllNear(Plan(shifted, moved), Plan(problem, at), 1e-13);
  const double constant = moved.f[0] - at.f[0] - u[0];
  for (int64_t i = 0; i < 7; ++i) EXPECT_NEAR(moved.f[i], at.f[i] + u[i] + constant, 1e-12);
  for (int64_t j = 0; j < 5; ++j) EXPECT_NEAR(moved.g[j], at.g[j] + v[j] - constant, 1e-12);

  problem.solver.rho_a = 0.5;
  problem.solver.rho_b = 0.8;
  const double value = Value(problem, ConvergedOrFail(problem));
  Transport scaled = problem;
  for (double& cost : scaled.cost) cost *= 3;
  scaled.solver.epsilon *= 3;
  scaled.solver.rho_a *= 3;
  scaled.solver.rho_b *= 3;
  EXPECT_NEAR(Value(scaled, ConvergedOrFail(scaled)), 3 * value, 1e-12);

  const Potentials unswapped = ConvergedOrFail(problem);
  const Potentials swapped = ConvergedOrFail(Swapped(problem));
  ExpectAllNear(swapped.f, unswapped.g, 1e-12);
  ExpectAllNear(swapped.g, unswapped.f, 1e-12);
}

TEST(ClosedForms, Polygons) {  // 5
  Transport problem = Polygons(400, 1.0, 0.7);
  problem.solver.epsilon = 0.1;
  const Potentials at = Iterate(problem, 2);
  EXPECT_NEAR(Value(problem, at), PolygonsValue(1.0, 0.7, 0.1), 1e-13);
  for (double f : at.f) EXPECT_NEAR(f, at.f[0], 1e-13);
  const Vector gradient = GradientX(problem, at);
  EXPECT_NEAR(Dot(gradient, problem.x), PolygonsSlope(1.0, 0.7, 0.1), 1e-13);
}

TEST(ClosedForms, Hypercubes) {  // 6
  for (double epsilon : {0.05, 1.0, 10.0}) {
    Transport problem = Hypercubes(9, 0.5, 0.8);
    problem.solver.epsilon = epsilon;
    const Potentials at = Iterate(problem, 1);
    EXPECT_NEAR(Value(problem, at), HypercubesValue(9, 0.5, 0.8, epsilon), 1e-12);
    EXPECT_LT(MarginalErrorA(problem, at), 1e-12);
  }
}

TEST(ClosedForms, ProductsAdd) {  // 7
  const Transport first = RandomClouds(5, 4, 2, 0.2, 11), second = RandomClouds(3, 6, 1, 0.2, 12);
  const Potentials at_first = ConvergedOrFail(first), at_second = ConvergedOrFail(second);
  const Transport product = Product(first, second);
  Potentials sum;
  for (double p : at_first.f) {
    for (double q : at_second.f) sum.f.push_back(p + q);
  }
  for (double p : at_first.g) {
    for (double q : at_second.g) sum.g.push_back(p + q);
  }
  EXPECT_LT(MarginalErrorA(product, sum) + MarginalErrorB(product, sum), 1e-13);
  EXPECT_NEAR(Value(product, ConvergedOrFail(product)), Value(first, at_first) + Value(second, at_second), 1e-13);
}

TEST(ClosedForms, Translation) {  // 8
  for (double epsilon : {0.01, 1.0}) {
    Transport problem = RandomClouds(12, 12, 2, epsilon, 21);
    const double t[2] = {0.4, -0.9};
    problem.kappa = 0.5;
    problem.b = problem.a;
    for (int64_t i = 0; i < 12; ++i) {
      for (int k = 0; k < 2; ++k) problem.y[2 * i + k] = problem.x[2 * i + k] + t[k];
    }
    const Potentials at = ConvergedOrFail(problem);
    const Transport self = SelfProblemA(problem);
    const Vector f_aa = ConvergeSymmetric(self), g_bb = ConvergeSymmetric(SelfProblemB(problem));
    EXPECT_NEAR(Divergence(problem, at, f_aa, g_bb), 0.5 * (0.16 + 0.81), 1e-12);
    Vector gradient = GradientX(problem, at);
    const Vector self_gradient = GradientX(self, {f_aa, f_aa});
    for (int64_t i = 0; i < 12; ++i) {
      for (int k = 0; k < 2; ++k) {
        EXPECT_NEAR(gradient[2 * i + k] - self_gradient[2 * i + k], -problem.a[i] * t[k], 1e-12);
      }
    }
  }
}

TEST(ClosedForms, Gaussians) {  // 9
  const Gaussian first = {{0.1, -0.2}, {0.5, 0.2, 0.3}}, second = {{0.6, 0.3}, {0.2, -0.05, 0.4}};
  Transport problem = GaussiansOnGrids(first, second, 22, 6.5);
  problem.solver.epsilon = 0.6;
  const Potentials at = Iterate(problem, 60);
  EXPECT_LT(MarginalErrorA(problem, at), 1e-12);
  EXPECT_NEAR(Value(problem, at), GaussiansValue(first, second, 0.6), 1e-8);
}

TEST(ClosedForms, UnbalancedValueFromMass) {  // 10
  Transport problem = RandomClouds(9, 14, 3, 0.05, 31);
  problem.b = Masses(14, 5, 1.8);
  problem.solver.rho_a = problem.solver.rho_b = 0.4;
  const Potentials at = ConvergedOrFail(problem);
  const double mass = Sum(PlanRowSums(problem, at));
  EXPECT_NEAR(Value(problem, at), UnbalancedValueFromMass(1, 1.8, mass, 0.4, 0.05), 1e-12);
  EXPECT_NEAR(Value(problem, at), PrimalValue(problem, Plan(problem, at)), 1e-12);
}

TEST(ClosedForms, Limits) {  // 11
  Transport problem = RandomClouds(10, 8, 2, 1e9, 41);
  const Vector plan = Plan(problem, ConvergedOrFail(problem));
  for (int64_t i = 0; i < 10; ++i) {
    for (int64_t j = 0; j < 8; ++j) {
      EXPECT_NEAR(plan[i * 8 + j], problem.a[i] * problem.b[j], 1e-9);
    }
  }
  Transport line;
  line.n = line.m = 40;
  line.dim = 1;
  line.x = Uniform(40, 0, 1, 42);
  line.y = Uniform(40, 0.2, 1.4, 43);
  const double sorted = SortedLineValue(line.x, line.y);
  for (double epsilon : {1e-3, 1e-2}) {
    line.solver.epsilon = epsilon;
    line = WithUniformMasses(line);
    const double value = Value(line, ConvergedOrFail(line));
    EXPECT_GE(value, sorted - 1e-12);
    EXPECT_LE(value, sorted + epsilon * std::log(40.0) + 1e-12);
  }
}

TEST(ClosedForms, BoundsBracket) {  // 12
  for (double epsilon : {1e-3, 1e-1, 10.0}) {
    const Transport problem = RandomClouds(17, 23, 2, epsilon, 51);
    const double value = Value(problem, ConvergedOrFail(problem));
    for (int iterations : {1, 3, 10, 1000}) {
      const Potentials at = Iterate(problem, iterations);
      EXPECT_LE(Value(problem, at), value + 1e-13);
      EXPECT_GE(PrimalBound(problem, at), value - 1e-13);
    }
    const Potentials at = ConvergedOrFail(problem);
    EXPECT_NEAR(PrimalBound(problem, at), value, 1e-11);
    EXPECT_NEAR(PrimalValue(problem, Plan(problem, at)), value, 1e-11);
  }
}

// ---- Transport ------------------------------------------------------------------------------

TEST(Transport, ConvergesInHardCases) {
  for (double epsilon : {1e-3, 1e-2, 10.0}) {
    Transport problem = RandomClouds(61, 47, 2, epsilon, 61);
    problem.a[5] = problem.a[6] = problem.b[0] = 0;
    const double total_a = Sum(problem.a), total_b = Sum(problem.b);
    for (double& a : problem.a) a /= total_a;
    for (double& b : problem.b) b /= total_b;
    const Potentials at = ConvergedOrFail(problem);
    for (double f : at.f) EXPECT_TRUE(std::isfinite(f));
    ConvergedOrFail(Swapped(problem));
    problem.solver.rho_a = 0.5;
    ConvergedOrFail(problem);
  }
}

TEST(Transport, UpdateRulesShareTheFixedPoint) {
  for (double rho_b : {std::numeric_limits<double>::infinity(), 0.7}) {
    Transport problem = RandomClouds(13, 9, 2, 0.3, 71);
    problem.solver.rho_b = rho_b;
    const double value = Value(problem, ConvergedOrFail(problem));
    for (UpdateRule rule : {UpdateRule::kAlternating, UpdateRule::kSymmetric}) {
      problem.solver.update_rule = rule;
      EXPECT_NEAR(Value(problem, Iterate(problem, 2000)), value, 1e-12);
      problem.solver.epsilon_decay = 0.5;
      EXPECT_NEAR(Value(problem, Iterate(problem, 2000)), value, 1e-12);
      problem.solver.epsilon_decay = 0;
    }
  }
}

// The first iterations, written out.
TEST(Transport, ScheduleAndStart) {
  Transport problem = RandomClouds(4, 3, 1, 0.01, 81);
  problem.x = {0, 1, 2, 3};
  problem.y = {-1, 0, 1};
  problem.solver.epsilon_decay = 0.25;
  EXPECT_DOUBLE_EQ(EpsilonAt(problem, 0), 16);
  EXPECT_DOUBLE_EQ(EpsilonAt(problem, 1), 4);
  EXPECT_DOUBLE_EQ(EpsilonAt(problem, 9), 0.01);
  problem.solver.epsilon_start = 2;
  EXPECT_DOUBLE_EQ(EpsilonAt(problem, 1), 0.5);
  const Vector zero_f(4, 0.0), zero_g(3, 0.0);
  const Vector f0 = HalfStepRows(problem, zero_g, 2), g0 = HalfStepColumns(problem, f0, 2);
  ExpectAllNear(Iterate(problem, 1).g, g0, 0);
  ExpectAllNear(Iterate(problem, 2).f, HalfStepRows(problem, g0, 0.5), 0);
  problem.solver.update_rule = UpdateRule::kSymmetric;
  const Vector g_start = HalfStepColumns(problem, zero_f, 2);
  const Vector f_next = HalfStepRows(problem, g_start, 2);
  const Potentials once = Iterate(problem, 1);
  for (int64_t i = 0; i < 4; ++i) EXPECT_DOUBLE_EQ(once.f[i], (f0[i] + f_next[i]) / 2);
  problem.initial_f = {1, 2, 3, 4};
  problem.initial_g = {-1, 0, 1};
  const Potentials warm = Iterate(problem, 1);
  const Vector f_half = HalfStepRows(problem, problem.initial_g, 2);
  for (int64_t i = 0; i < 4; ++i) EXPECT_DOUBLE_EQ(warm.f[i], (i + 1 + f_half[i]) / 2);
}

// Gradients at fixed potentials are those of the dual objective; finite differences of it know no
// formula.
TEST(Transport, GradientsMatchFiniteDifferences) {
  for (double rho : {std::numeric_limits<double>::infinity(), 0.6}) {
    Transport problem = RandomClouds(5, 4, 2, 0.3, 91);
    problem.b = Masses(4, 92, 1.4);
    problem.solver.rho_a = rho;
    const Potentials at = Iterate(problem, 2);
    const auto check = [&](Vector Transport::*field, const Vector& gradient) {
      const Vector numeric = FiniteDifferences(
          [&](const Vector& values) {
            Transport moved = problem;
            moved.*field = values;
            return Value(moved, at);
          },
          problem.*field, 1e-6);
      ExpectAllNear(gradient, numeric, 1e-8);
    };
    check(&Transport::x, GradientX(problem, at));
    check(&Transport::y, GradientY(problem, at));
    check(&Transport::a, GradientA(problem, at));
    check(&Transport::b, GradientB(problem, at));
  }
}

// At the solution: every evaluation below solves three problems anew.
TEST(Transport, DivergenceGradientsMatchFiniteDifferences) {
  Transport problem = RandomClouds(4, 5, 2, 0.3, 93);
  problem.b = Masses(5, 94, 1.4);
  problem.solver.rho_a = problem.solver.rho_b = 0.8;
  const auto divergence = [](const Transport& moved) {
    return Divergence(moved, Converge(moved), ConvergeSymmetric(SelfProblemA(moved)),
                      ConvergeSymmetric(SelfProblemB(moved)));
  };
  const auto check = [&](Vector Transport::*field, const Vector& gradient) {
    const Vector numeric = FiniteDifferences(
        [&](const Vector& values) {
          Transport moved = problem;
          moved.*field = values;
          return divergence(moved);
        },
        problem.*field, 1e-5);
    ExpectAllNear(gradient, numeric, 1e-8);
  };
  const Potentials at = Converge(problem);
  const Vector f_aa = ConvergeSymmetric(SelfProblemA(problem));
  const Vector g_bb = ConvergeSymmetric(SelfProblemB(problem));
  check(&Transport::x, DivergenceGradientX(problem, at, f_aa));
  check(&Transport::y, DivergenceGradientY(problem, at, g_bb));
  check(&Transport::a, DivergenceGradientA(problem, at, f_aa));
  check(&Transport::b, DivergenceGradientB(problem, at, g_bb));
}

TEST(Transport, PlanProductsAgreeWithThePlan) {
  const Transport problem = RandomClouds(6, 5, 2, 0.3, 95);
  const Potentials at = Iterate(problem, 3);
  const Vector plan = Plan(problem, at), ones_m(5, 1.0), ones_n(6, 1.0);
  ExpectAllNear(PlanRowSums(problem, at), RowSums(plan, 6, 5), 1e-15);
  ExpectAllNear(PlanColumnSums(problem, at), ColumnSums(plan, 6, 5), 1e-15);
  ExpectAllNear(PlanTimes(problem, at, ones_m, 1), PlanRowSums(problem, at), 1e-15);
  ExpectAllNear(PlanTransposeTimes(problem, at, ones_n, 1), PlanColumnSums(problem, at), 1e-15);
  double linear = 0;
  for (int64_t k = 0; k < 30; ++k) linear += plan[k] * problem.Cost(k / 5, k % 5);
  EXPECT_NEAR(ValueLinear(problem, at), linear, 1e-15);
  const Vector projection = ProjectionX(problem, at), sums = PlanRowSums(problem, at);
  const Vector gradient = GradientX(problem, at);
  for (int64_t k = 0; k < 12; ++k) {
    EXPECT_NEAR(gradient[k], 2 * sums[k / 2] * (problem.x[k] - projection[k]), 1e-14);
  }
}

// ---- Costs of points, and second derivatives ------------------------------------------------

TEST(PointCosts, SlopesByFiniteDifferences) {
  constexpr double kStep = 1e-6;
  const auto gradient_of = [](const Transport& problem) {
    Vector gradient(3);
    problem.CostGradient(1, 1, gradient.data());
    return gradient;
  };
  for (PointCost cost :
       {PointCost::kSquaredEuclidean, PointCost::kEuclidean, PointCost::kCosine, PointCost::kNegativeDot}) {
    Transport problem = RandomClouds(3, 2, 3, 0.1, 700);
    problem.point_cost = cost;
    for (int64_t k = 0; k < 3; ++k) {
      Transport more = problem, less = problem;
      more.x[3 + k] += kStep;
      less.x[3 + k] -= kStep;
      EXPECT_NEAR(gradient_of(problem)[k], (more.Cost(1, 1) - less.Cost(1, 1)) / (2 * kStep), 1e-9);
    }
    if (cost == PointCost::kEuclidean) continue;
    const Vector dx = Uniform(3, -1, 1, 701), dy = Uniform(3, -1, 1, 702);
    Transport more = problem, less = problem;
    for (int64_t k = 0; k < 3; ++k) {
      more.x[3 + k] += kStep * dx[k];
      less.x[3 + k] -= kStep * dx[k];
      more.y[3 + k] += kStep * dy[k];
      less.y[3 + k] -= kStep * dy[k];
    }
    const Vector curvature = problem.CostCurvature(1, 1, dx.data(), dy.data());
    const Vector up = gradient_of(more), down = gradient_of(less);
    for (int64_t k = 0; k < 3; ++k) EXPECT_NEAR(curvature[k], (up[k] - down[k]) / (2 * kStep), 1e-8);
  }
}

// Products with the Hessian are how gradients change, potentials solved for anew.
TEST(Hessian, ByFiniteDifferencesOfGradients) {
  constexpr double kStep = 1e-4;
  const double infinity = std::numeric_limits<double>::infinity();
  const double pairs[][2] = {{infinity, infinity}, {0.5, 0.7}, {infinity, 0.4}};
  for (PointCost cost : {PointCost::kSquaredEuclidean, PointCost::kCosine, PointCost::kNegativeDot}) {
    for (const auto& [rho_a, rho_b] : pairs) {
      for (bool debias : {false, true}) {
        Transport problem = RandomClouds(6, 5, 2, 0.3, 710);
        problem.point_cost = cost;
        problem.solver.rho_a = rho_a;
        problem.solver.rho_b = rho_b;
        const Vector dx = Uniform(12, -1, 1, 711), dy = Uniform(10, -1, 1, 712);
        const auto gradient = [&](double step) {
          Transport moved = problem;
          for (size_t k = 0; k < dx.size(); ++k) moved.x[k] += step * dx[k];
          for (size_t k = 0; k < dy.size(); ++k) moved.y[k] += step * dy[k];
          const Potentials at = Converge(moved);
          Vector both = GradientX(moved, at), by_y = GradientY(moved, at);
          if (debias) {
            both = DivergenceGradientX(moved, at, ConvergeSymmetric(SelfProblemA(moved)));
            by_y = DivergenceGradientY(moved, at, ConvergeSymmetric(SelfProblemB(moved)));
          }
          both.insert(both.end(), by_y.begin(), by_y.end());
          return both;
        };
        const Potentials at = Converge(problem);
        const Vector product = debias ? DivergenceHessianTimes(problem, at, ConvergeSymmetric(SelfProblemA(problem)),
                                                               ConvergeSymmetric(SelfProblemB(problem)), dx, dy)
                                      : HessianTimes(problem, at, dx, dy);
        Vector slope = gradient(kStep);
        const Vector less = gradient(-kStep);
        for (size_t k = 0; k < slope.size(); ++k) slope[k] = (slope[k] - less[k]) / (2 * kStep);
        ExpectAllNear(product, slope, 2e-6);
      }
    }
  }
}

}  // namespace
}  // namespace sinkhorn::oracle
