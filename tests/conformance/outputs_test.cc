// Every output of transport at fixed iterations, in every dtype, precision and kind of problem; and
// debiased ones at convergence.
#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/conformance/backends.h"
#include "tests/conformance/check.h"
#include "tests/conformance/random_problems.h"

namespace sinkhorn::conformance {
namespace {

using oracle::Transport;

constexpr uint32_t kDenseOutputs =
    kPotentials | kPlan | kSums | kValueLinear | kGradientMasses | kGradientCost | kProducts;
constexpr uint32_t kCloudOutputs =
    kPotentials | kPlan | kSums | kValueLinear | kGradientMasses | kGradientPoints | kProjections | kProducts;

// `problem` with everything asked of it.
Case Everything(const Transport& problem, const std::string& name, int iterations) {
  Case c = CaseOf(problem, name);
  c.solver().max_iterations = iterations;
  c.wanted = problem.cost.empty() ? kCloudOutputs : kDenseOutputs;
  const bool balanced = std::isinf(problem.solver.rho_a) && std::isinf(problem.solver.rho_b);
  if (balanced) c.wanted |= kPrimalBound;
  c.problem.transport.v_columns = 3;
  c.problem.transport.u_columns = 2;
  c.v = Tensor::Of(Random(1).Normals(problem.m * 3, 1));
  c.u = Tensor::Of(Random(2).Normals(problem.n * 2, 1));
  return c;
}

class OutputsTest : public ConformanceTest {
 protected:
  void CheckBothPrecisions(Case c) {
    const std::string name = c.name;
    for (Precision precision : {Precision::kStrict, Precision::kDouble}) {
      c.solver().precision = precision;
      c.name = name + (precision == Precision::kDouble ? " DOUBLE" : " STRICT");
      CheckIterates(backend(), c);
    }
  }
};

TEST_P(OutputsTest, Balanced) {
  for (double epsilon : {0.01, 0.2, 5.0}) {
    for (int iterations : {1, 4, 30}) {
      const std::string name = absl::StrCat(" eps ", epsilon, " iterations ", iterations);
      CheckBothPrecisions(Everything(RandomClouds(23, 31, 3, epsilon, 3), "clouds" + name, iterations));
      CheckBothPrecisions(Everything(RandomDense(31, 23, epsilon, 4), "dense" + name, iterations));
    }
  }
}

TEST_P(OutputsTest, Shapes) {
  const int64_t shapes[][3] = {{1, 1, 1}, {1, 6, 2}, {6, 1, 2}, {17, 16, 64}, {150, 4, 3}, {5, 140, 5}, {67, 70, 2}};
  for (const auto& [n, m, dim] : shapes) {
    const std::string name = absl::StrCat(" ", n, " x ", m);
    CheckBothPrecisions(Everything(RandomClouds(n, m, dim, 0.1, 5), "clouds" + name, 3));
    CheckBothPrecisions(Everything(RandomDense(n, m, 0.1, 6), "dense" + name, 3));
  }
}

// So many that a backend may take coordinates, and rows, part by part.
TEST_P(OutputsTest, ManyCoordinates) {
  const int64_t shapes[][3] = {{300, 520, 193}, {40, 30, 784}};
  for (const auto& [n, m, dim] : shapes) {
    const std::string name = absl::StrCat("clouds ", n, " x ", m, " d ", dim);
    CheckBothPrecisions(Everything(RandomClouds(n, m, dim, 0.02 * dim, 23), name, 3));
  }
}

// Right-hand sides of more numbers than a backend may take at once, beside bounds and <C, P>, of every cost.
TEST_P(OutputsTest, WideProducts) {
  const struct {
    int64_t n, m, dim, v_columns, u_columns;
    PointCost cost;
  } shapes[] = {{150, 300, 2, 9, 33, PointCost::kSquaredEuclidean}, {70, 1100, 40, 33, 8, PointCost::kSquaredEuclidean},
                {500, 70, 5, 33, 40, PointCost::kNegativeDot},      {20, 4200, 3, 8, 17, PointCost::kSquaredEuclidean},
                {600, 70, 70, 1, 64, PointCost::kCosine},           {140, 200, 33, 40, 9, PointCost::kEuclidean},
                {20, 4200, 3, 1, 1, PointCost::kEuclidean},         {90, 130, 16, 5, 100, PointCost::kCosine}};
  int k = 0;
  for (const auto& of : shapes) {
    if (GetParam() != "cuda" && k++ % 3 != 0) continue;  // Of CPUs more shapes tell no more.
    for (double epsilon : {0.003, 0.1}) {
      Transport problem = RandomClouds(of.n, of.m, of.dim, epsilon * of.dim, 57);
      problem.point_cost = of.cost;
      Case c = Everything(problem, absl::StrCat(of.n, " x ", of.m, " d ", of.dim, " eps ", epsilon), 4);
      c.wanted = kPotentials | kValueLinear | kPrimalBound | kProducts | kProjections | kGradientPoints;
      c.problem.transport.v_columns = of.v_columns;
      c.problem.transport.u_columns = of.u_columns;
      c.v = Tensor::Of(Random(58).Normals(of.m * of.v_columns, 1));
      c.u = Tensor::Of(Random(59).Normals(of.n * of.u_columns, 1));
      CheckBothPrecisions(c);
    }
  }
}

// Epsilons so small that exponents need float64: more points than a chip has room for, of few coordinates and of many;
// the last two so many that a GPU keeps exponents in memory.
TEST_P(OutputsTest, SmallEpsilons) {
  const int64_t shapes[][3] = {{1060, 70, 1},  {70, 1060, 2},  {1030, 90, 3},    {1030, 50, 4},    {50, 1100, 17},
                               {1040, 60, 64}, {60, 1040, 70}, {1100, 1000, 40}, {1040, 1020, 100}};
  for (const auto& [n, m, dim] : shapes) {
    const bool few = n * m < 200000;
    if (GetParam() != "cuda" && (!few || dim % 2 == 0)) continue;  // Of CPUs more shapes tell no more.
    for (int iterations : few ? std::vector<int>{1, 6} : std::vector<int>{7}) {
      Transport problem = RandomClouds(n, m, dim, 1e-3 * dim, 24);
      const std::string name = absl::StrCat("clouds ", n, " x ", m, " d ", dim, " iterations ", iterations);
      Case c = Everything(problem, name, iterations);
      if (!few) c.wanted = kPotentials | kSums | kGradientPoints | kProjections;
      CheckBothPrecisions(c);
      if (!few) continue;
      Transport other = problem;
      other.point_cost = iterations == 1 ? PointCost::kNegativeDot : PointCost::kCosine;
      if (iterations > 1) other.solver.epsilon = 1e-3;
      CheckBothPrecisions(Everything(other, name + " of another cost", iterations));
      problem.solver.update_rule = UpdateRule::kSymmetric;
      problem.solver.rho_b = 0.5;
      CheckBothPrecisions(Everything(problem, name + " relaxed", iterations));
    }
  }
}

TEST_P(OutputsTest, Relaxed) {
  const double infinity = std::numeric_limits<double>::infinity();
  const double pairs[][2] = {{0.5, 0.5}, {infinity, 0.3}, {2, infinity}};
  for (const auto& [rho_a, rho_b] : pairs) {
    for (bool dense : {false, true}) {
      Transport problem = dense ? RandomDense(21, 17, 0.1, 7) : RandomClouds(21, 17, 2, 0.1, 8);
      problem.kappa = 0.5;
      problem.b = Random(9).Masses(17, 1.5);
      problem.solver.rho_a = rho_a;
      problem.solver.rho_b = rho_b;
      const std::string name = absl::StrCat(dense ? "dense" : "clouds", " rho ", rho_a, ", ", rho_b);
      for (UpdateRule rule : {UpdateRule::kAlternating, UpdateRule::kSymmetric}) {
        problem.solver.update_rule = rule;
        CheckBothPrecisions(Everything(problem, name, 5));
      }
    }
  }
}

// Rows of no mass: potentials by the half step, plan rows 0, projection 0.
TEST_P(OutputsTest, ZeroMasses) {
  for (bool dense : {false, true}) {
    Transport problem = dense ? RandomDense(12, 14, 0.1, 10) : RandomClouds(12, 14, 3, 0.1, 11);
    problem.a[4] += problem.a[0];
    problem.b[6] += problem.b[13];
    problem.a[0] = problem.b[13] = 0;
    Case c = Everything(problem, dense ? "dense" : "clouds", 4);
    CheckBothPrecisions(c);
    const Answer answer = SolveAlone(backend(), c);
    const Vector plan = answer.plan.values(), f = answer.f.values(), g = answer.g.values();
    for (int64_t j = 0; j < 14; ++j) EXPECT_EQ(plan[j], 0);
    for (int64_t i = 0; i < 12; ++i) EXPECT_EQ(plan[i * 14 + 13], 0);
    EXPECT_TRUE(std::isfinite(f[0]) && std::isfinite(g[13]));
    if (!dense) {
      for (int64_t k = 0; k < 3; ++k) EXPECT_EQ(answer.projection_x.values()[k], 0);
      for (int64_t k = 0; k < 3; ++k) EXPECT_EQ(answer.projection_y.values()[13 * 3 + k], 0);
    }
  }
}

TEST_P(OutputsTest, EveryDType) {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    for (DType output : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
      for (bool dense : {false, true}) {
        Case c = Everything(
            dense ? RandomDense(13, 19, 0.2, 12) : RandomClouds(13, 19, 3, 0.2, 13),
            absl::StrCat(dense ? "dense " : "clouds ", static_cast<int>(dtype), " to ", static_cast<int>(output)), 4);
        for (Tensor Case::*input : {&Case::cost, &Case::x, &Case::y, &Case::v, &Case::u}) {
          if ((c.*input).present()) c.*input = Tensor::Of((c.*input).values(), dtype);
        }
        c.output_dtype = output;
        CheckBothPrecisions(c);
      }
    }
  }
}

TEST_P(OutputsTest, BatchesWithSharedTensors) {
  Case c = Everything(RandomClouds(9, 11, 2, 0.2, 14), "batch", 4);
  c.problem.count = 3;
  c.x = Tensor::Of(Random(15).Uniforms(3 * 18, 0, 1));
  c.y = Tensor::Shared(c.y.values());
  c.a = Tensor::Shared(c.a.values());
  c.b = Tensor();
  c.v = Tensor::Of(Random(16).Normals(3 * 33, 1));
  c.u = Tensor::Shared(c.u.values());
  CheckBothPrecisions(c);
  c.solver().update_rule = UpdateRule::kSymmetric;
  c.initial_f = Tensor::Of(Random(17).Uniforms(27, -0.5, 0.5));
  c.initial_g = Tensor::Shared(Random(18).Uniforms(11, -0.5, 0.5));
  CheckBothPrecisions(c);
}

TEST_P(OutputsTest, OneAtATime) {
  const Case all = Everything(RandomClouds(14, 10, 2, 0.2, 19), "clouds", 4);
  for (uint32_t bit = 1; bit <= kProducts; bit *= 2) {
    Case c = all;
    c.wanted = bit;
    if (bit == kGradientCost) continue;  // Has no place among point clouds.
    CheckIterates(backend(), c);
  }
  Case nothing = all;
  nothing.wanted = 0;
  CheckIterates(backend(), nothing);
}

// Points may be left out of a solve's memory where only potentials are asked for, in any arithmetic.
TEST_P(OutputsTest, PotentialsWhateverElseIsWanted) {
  const int64_t shapes[][3] = {{30, 40, 2}, {100, 90, 33}, {200, 250, 3}, {520, 130, 5}, {90, 80, 70}};
  for (const auto& [n, m, dim] : shapes) {
    for (double epsilon : {1e-3, 0.2}) {
      for (Precision precision : {Precision::kStrict, Precision::kFast}) {
        SCOPED_TRACE(absl::StrCat(n, " x ", m, " d ", dim, " eps ", epsilon, " ", static_cast<int>(precision)));
        Case c = CaseOf(RandomClouds(n, m, dim, epsilon, 22), "clouds");
        c.solver().max_iterations = 5;
        c.solver().precision = precision;
        const Answer alone = SolveAlone(backend(), c);
        c.wanted |= kGradientPoints | kSums;
        const Answer all = SolveAlone(backend(), c);
        EXPECT_EQ(alone.f.values(), all.f.values());
        EXPECT_EQ(alone.g.values(), all.g.values());
        EXPECT_EQ(alone.value, all.value);
      }
    }
  }
}

TEST_P(OutputsTest, ManyColumns) {
  Case c = Everything(RandomDense(33, 40, 0.2, 20), "70 columns", 3);
  c.problem.transport.v_columns = 70;
  c.v = Tensor::Of(Random(21).Normals(40 * 70, 1));
  CheckBothPrecisions(c);
}

// ---- Debiased -------------------------------------------------------------------------------

class DebiasedTest : public OutputsTest {
 protected:
  // All that a debiased problem returns, at convergence in DOUBLE, against the oracle's three
  // solutions.
  void CheckDebiased(const Transport& problem, const std::string& name) {
    SCOPED_TRACE(name);
    Case c = Everything(problem, name, 20000);
    c.solver().debias = true;
    c.wanted &= ~kPrimalBound;
    c.solver().precision = Precision::kDouble;
    c.solver().tolerance = 1e-13;
    const Answer answer = SolveAlone(backend(), c);
    if (!answer.status.ok()) return;
    const oracle::Potentials at = Converge(problem);
    const Vector f_aa = ConvergeSymmetric(SelfProblemA(problem));
    const Vector g_bb = ConvergeSymmetric(SelfProblemB(problem));
    const bool balanced = std::isinf(problem.solver.rho_a) && std::isinf(problem.solver.rho_b);
    const oracle::Potentials returned{answer.f.values(), answer.g.values()};
    const auto gauge = [&](const oracle::Potentials& p) { return balanced ? Centered(p) : p; };
    const double room = 1e-9;
    ExpectClose("debiased f", gauge(returned).f, gauge(at).f, room);
    ExpectClose("debiased g", gauge(returned).g, gauge(at).g, room);
    ExpectClose("debiased f_aa", answer.f_aa.values(), f_aa, room);
    ExpectClose("debiased g_bb", answer.g_bb.values(), g_bb, room);
    ExpectClose("debiased value", answer.value, {Divergence(problem, at, f_aa, g_bb)}, room);
    EXPECT_LE(answer.dual_bound[0], Value(problem, at) + 1e-13);
    ExpectClose("debiased plan", answer.plan.values(), Plan(problem, at), room);
    ExpectClose("debiased gradient_x", answer.gradient_x.values(), DivergenceGradientX(problem, at, f_aa), room);
    ExpectClose("debiased gradient_y", answer.gradient_y.values(), DivergenceGradientY(problem, at, g_bb), room);
    const auto free = [&](Vector values) {  // Balanced: up to a constant.
      const double mean = balanced ? oracle::Sum(values) / values.size() : 0;
      for (double& value : values) value -= mean;
      return values;
    };
    ExpectClose("debiased gradient_a", free(answer.gradient_a.values()), free(DivergenceGradientA(problem, at, f_aa)),
                room);
    ExpectClose("debiased gradient_b", free(answer.gradient_b.values()), free(DivergenceGradientB(problem, at, g_bb)),
                room);
  }
};

TEST_P(DebiasedTest, Balanced) {
  for (double epsilon : {0.05, 0.5}) {
    for (UpdateRule rule : {UpdateRule::kAlternating, UpdateRule::kSymmetric}) {
      Transport problem = RandomClouds(15, 18, 2, epsilon, 31);
      problem.solver.update_rule = rule;
      problem.kappa = 0.5;
      CheckDebiased(problem, absl::StrCat("eps ", epsilon, " rule ", static_cast<int>(rule)));
    }
  }
}

TEST_P(DebiasedTest, Relaxed) {
  for (UpdateRule rule : {UpdateRule::kAlternating, UpdateRule::kSymmetric}) {
    Transport problem = RandomClouds(13, 12, 3, 0.2, 32);
    problem.solver.rho_a = problem.solver.rho_b = 0.7;
    problem.solver.update_rule = rule;
    CheckDebiased(problem, "equal masses");
    problem.b = Random(33).Masses(12, 1.5);
    CheckDebiased(problem, "unequal masses");
  }
}

// As they are trained with, where exponents of the last epsilons need float64: against DOUBLE.
TEST_P(DebiasedTest, AnnealedToSmallEpsilons) {
  for (int64_t dim : {2, 3, 20}) {
    if (GetParam() != "cuda" && dim != 3) continue;
    Transport problem = RandomClouds(1050, 80, dim, 1e-3 * dim, 35);
    problem.solver.update_rule = UpdateRule::kSymmetric;
    Case c = Everything(problem, absl::StrCat("annealed d ", dim), 10);
    c.solver().debias = true;
    c.solver().epsilon_decay = 0.25;
    c.wanted &= ~kPrimalBound;
    c.solver().precision = Precision::kDouble;
    const Answer exact = SolveAlone(backend(), c);
    c.solver().precision = Precision::kStrict;
    const Answer answer = SolveAlone(backend(), c);
    ASSERT_TRUE(exact.status.ok() && answer.status.ok()) << c.name;
    for (Tensor Answer::*potential : {&Answer::f, &Answer::g, &Answer::f_aa, &Answer::g_bb}) {
      ExpectClose("STRICT against DOUBLE potentials", (answer.*potential).values(), (exact.*potential).values(),
                  1e-4 * problem.solver.epsilon);
    }
    for (Tensor Answer::*gradient : {&Answer::gradient_x, &Answer::gradient_y}) {
      const Vector wanted = (exact.*gradient).values();
      ExpectClose("STRICT against DOUBLE gradients", (answer.*gradient).values(), wanted,
                  1e-4 * oracle::MaxAbs(wanted));
    }
  }
}

// S(a, a) = 0, with no gradient.
TEST_P(DebiasedTest, OfItselfIsZero) {
  Transport problem = RandomClouds(20, 20, 3, 0.1, 34);
  problem.y = problem.x;
  problem.b = problem.a;
  for (Precision precision : {Precision::kStrict, Precision::kDouble}) {
    const bool strict = precision == Precision::kStrict;
    Case c = Everything(problem, "S(a, a)", 5000);
    c.solver().debias = true;
    c.wanted &= ~kPrimalBound;
    c.solver().precision = precision;
    c.solver().tolerance = strict ? 1e-6 : 1e-13;
    const Answer answer = SolveAlone(backend(), c);
    // Each of three values may be off by its potentials' errors.
    const double room = strict ? 4 * (1e-4 * 0.1 + 1e-6) : 4e-10;
    ExpectClose(strict ? "STRICT S(a, a)" : "DOUBLE S(a, a)", answer.value, {0}, room);
    ExpectClose(strict ? "STRICT dS(a, a)/dx" : "DOUBLE dS(a, a)/dx", answer.gradient_x.values(), Vector(60, 0.0),
                room / 0.1 / 20 * 4);
  }
}

INSTANTIATE_ON_BACKENDS(OutputsTest);
INSTANTIATE_ON_BACKENDS(DebiasedTest);

}  // namespace
}  // namespace sinkhorn::conformance
