// Costs of points other than squared distances: |x - y|, 1 - cos(x, y) and -<x, y>. Against the oracle step by step,
// at convergence, and in closed form.
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/conformance/backends.h"
#include "tests/conformance/check.h"
#include "tests/conformance/random_problems.h"
#include "tests/oracle/closed_forms.h"

namespace sinkhorn::conformance {
namespace {

using oracle::Potentials;
using oracle::Transport;

constexpr PointCost kCosts[] = {PointCost::kEuclidean, PointCost::kCosine, PointCost::kNegativeDot};
constexpr Precision kPrecisions[] = {Precision::kStrict, Precision::kDouble};
constexpr double kInfinity = std::numeric_limits<double>::infinity();

const char* NameOf(PointCost cost) {
  switch (cost) {
    case PointCost::kSquaredEuclidean:
      return "squared";
    case PointCost::kEuclidean:
      return "euclidean";
    case PointCost::kCosine:
      return "cosine";
    case PointCost::kNegativeDot:
      return "negative dot";
  }
  return "";
}

class PointCostsTest : public ConformanceTest {
 protected:
  // Everything that can be asked, in both precisions, against the oracle's iterates.
  void Check(Transport problem, int iterations, const std::string& name) {
    for (UpdateRule rule : {UpdateRule::kAlternating, UpdateRule::kSymmetric}) {
      problem.solver.update_rule = rule;
      for (Precision precision : kPrecisions) {
        Case c = CaseOf(problem, absl::StrCat(NameOf(problem.point_cost), " ", name, " rule ", static_cast<int>(rule),
                                              precision == Precision::kDouble ? " DOUBLE" : " STRICT"));
        c.solver().precision = precision;
        c.solver().max_iterations = iterations;
        c.wanted =
            kPotentials | kPlan | kSums | kValueLinear | kGradientPoints | kGradientMasses | kProjections | kProducts;
        if (std::isinf(problem.solver.rho_a) && std::isinf(problem.solver.rho_b)) c.wanted |= kPrimalBound;
        c.problem.transport.v_columns = 2;
        c.v = Tensor::Of(Random(1).Normals(problem.m * 2, 1));
        CheckIterates(backend(), c);
      }
    }
  }

  Answer Converged(const Transport& problem, Precision precision, uint32_t wanted) {
    Case c = CaseOf(problem, NameOf(problem.point_cost), DType::kFloat64);
    c.solver().precision = precision;
    c.solver().max_iterations = 5000;
    c.solver().tolerance = precision == Precision::kDouble ? 1e-13 : 1e-6;
    c.wanted = wanted;
    return SolveAlone(backend(), c);
  }

  static double ValueRoom(double epsilon, double value, Precision precision) {
    if (precision == Precision::kDouble) return 1e-9 * (epsilon + std::abs(value));
    return 2e-4 * epsilon + 2e-6 * std::abs(value);
  }
};

// Points around the origin, so that angles are all there.
Transport Clouds(PointCost cost, int64_t n, int64_t m, int64_t dim, double epsilon, uint64_t seed) {
  Transport problem = RandomClouds(n, m, dim, epsilon, seed);
  problem.point_cost = cost;
  for (Vector* points : {&problem.x, &problem.y}) {
    for (double& value : *points) value = static_cast<float>(2 * value - 1);
  }
  return problem;
}

TEST_P(PointCostsTest, Shapes) {
  const int64_t shapes[][3] = {{1, 1, 1},  {1, 7, 2},    {7, 1, 2},     {31, 37, 3},  {17, 15, 1},
                               {64, 5, 5}, {33, 47, 64}, {20, 22, 100}, {130, 67, 7}, {5, 6, 1024}};
  uint64_t seed = 1;
  for (PointCost cost : kCosts) {
    for (const auto& [n, m, dim] : shapes) {
      for (double epsilon : {3e-3, 0.1, 5.0}) {
        Check(Clouds(cost, n, m, dim, epsilon, ++seed), 5, absl::StrCat(n, " x ", m, " d ", dim, " eps ", epsilon));
      }
    }
  }
}

// Where a GPU changes its ways: clusters of 2 to 16 blocks, coordinates by 64, and clouds that no chip holds.
TEST_P(PointCostsTest, LargerShapes) {
  const int64_t shapes[][3] = {{200, 129, 5}, {20, 255, 65},  {300, 7, 129}, {520, 300, 2},  {900, 5, 64},
                               {33, 1500, 1}, {1030, 3, 100}, {3, 1040, 33}, {1030, 1, 200}, {60, 1100, 10}};
  uint64_t seed = 200;
  for (PointCost cost : kCosts) {
    for (const auto& [n, m, dim] : shapes) {
      Check(Clouds(cost, n, m, dim, 0.3, ++seed), 2, absl::StrCat(n, " x ", m, " d ", dim));
    }
  }
}

TEST_P(PointCostsTest, ManyIterationsAndThousands) {
  for (PointCost cost : kCosts) {
    Check(Clouds(cost, 59, 61, 3, 5e-3, 30), 80, "80 iterations");
    Check(Clouds(cost, 1009, 503, 3, 0.05, 31), 3, "a thousand");
  }
}

TEST_P(PointCostsTest, Relaxed) {
  const double pairs[][2] = {{0.5, 0.5}, {kInfinity, 0.3}, {2, kInfinity}};
  for (PointCost cost : kCosts) {
    for (const auto& [rho_a, rho_b] : pairs) {
      for (double offset : {0.0, 3.0}) {
        Transport problem = Clouds(cost, 21, 17, 2, 0.1, 40);
        for (double& x : problem.x) x += offset;
        for (double& y : problem.y) y += offset / 2;
        problem.b = Random(41).Masses(17, 1.5);
        problem.solver.rho_a = rho_a;
        problem.solver.rho_b = rho_b;
        Check(problem, 6, absl::StrCat("rho ", rho_a, ", ", rho_b, " offset ", offset));
      }
    }
  }
}

TEST_P(PointCostsTest, Annealed) {
  for (PointCost cost : kCosts) {
    for (double start : {0.0, 0.3}) {
      Transport problem = Clouds(cost, 23, 37, 3, 0.02, 50);
      problem.solver.epsilon_start = start;
      problem.solver.epsilon_decay = 0.25;
      Check(problem, 12, absl::StrCat("from ", start));
    }
  }
}

TEST_P(PointCostsTest, ZeroMassesAndBatches) {
  for (PointCost cost : kCosts) {
    Transport problem = Clouds(cost, 12, 14, 3, 0.1, 60);
    problem.a[4] += problem.a[0];
    problem.b[6] += problem.b[13];
    problem.a[0] = problem.b[13] = 0;
    Check(problem, 4, "zero masses");
    Case c = CaseOf(problem, "batch");
    c.problem.count = 3;
    c.x = Tensor::Of(Random(61).Normals(3 * 36, 1));
    c.y = Tensor::Shared(c.y.values());
    c.a = Tensor::Shared(c.a.values());
    c.b = Tensor::Shared(c.b.values());
    c.solver().max_iterations = 4;
    c.wanted = kPotentials | kGradientPoints | kProjections;
    CheckIterates(backend(), c);
  }
}

// Far from the origin, and clouds far from each other: nothing may cancel.
TEST_P(PointCostsTest, FarAway) {
  for (PointCost cost : kCosts) {
    for (double apart : {0.0, 1000.0}) {
      for (double epsilon : {1e-2, 1.0}) {
        Transport problem = Clouds(cost, 31, 23, 3, epsilon, 70);
        for (double& x : problem.x) x = static_cast<float>(x + 1000);
        for (double& y : problem.y) y = static_cast<float>(y + 1000 + apart);
        Check(problem, 5, absl::StrCat("apart ", apart, " eps ", epsilon));
      }
    }
  }
}

// Where symmetric updates have just begun, sums are no use to float32. A GPU's blocks must agree on that: those, too,
// that look after no column, or none that there is.
TEST_P(PointCostsTest, FarAwayInManyBlocks) {
  const int64_t shapes[][2] = {{85, 332}, {5, 557}, {274, 295}, {593, 240}, {130, 70}};
  for (const auto& [n, m] : shapes) {
    Transport problem = Clouds(PointCost::kNegativeDot, n, m, 8, 1e-2, 75);
    for (double& x : problem.x) x = static_cast<float>(x + 300);
    for (double& y : problem.y) y = static_cast<float>(y + 300);
    Check(problem, 2, absl::StrCat(n, " x ", m));
  }
}

// Begun far away, a plan may be far more than float32 holds: nothing is made of its entries then, and potentials and
// sums are as good as ever.
TEST_P(PointCostsTest, EntriesBeyondFloat) {
  Transport problem = Clouds(PointCost::kNegativeDot, 70, 50, 3, 0.1, 76);
  problem.solver.update_rule = UpdateRule::kSymmetric;
  problem.solver.rho_a = problem.solver.rho_b = 0.01;  // Potentials stay what they were, nearly by half.
  problem.initial_f.assign(problem.n, 10);
  problem.initial_g.assign(problem.m, 10);
  const Potentials at = Iterate(problem, 1);
  const double error = std::max(MarginalErrorA(problem, at), MarginalErrorB(problem, at));
  ASSERT_GT(error, 0x1p120);
  ASSERT_LT(error, 0x1p200);
  Case c = CaseOf(problem, "beyond float");
  c.solver().max_iterations = 1;
  for (uint32_t wanted : {kPlan, kValueLinear, kGradientPoints, kProjections}) {
    c.wanted = kPotentials | wanted;
    for (Precision precision : {Precision::kStrict, Precision::kFast}) {
      c.solver().precision = precision;
      EXPECT_EQ(SolveTogether(backend(), {&c})[0].status.code(), absl::StatusCode::kFailedPrecondition) << wanted;
    }
    c.solver().precision = Precision::kDouble;
    CheckIterates(backend(), c);
  }
  c.wanted = kPotentials | kSums | kGradientMasses;
  c.solver().precision = Precision::kStrict;
  CheckIterates(backend(), c);
}

// Points without mass beside lonely ones, after one iteration: their sums may be more than float32 holds, which the
// masses' gradients tell, or more than float64 does.
TEST_P(PointCostsTest, FullRowsWithoutMass) {
  for (const auto& [n, m] : {std::pair<int64_t, int64_t>{9, 12}, {70, 50}, {200, 260}, {500, 400}, {1100, 1030}}) {
    for (double squared_distance : {100.0, 200.0, 1000.0}) {
      Transport problem = Clouds(PointCost::kSquaredEuclidean, n, m, 3, 1, 77);
      problem.a = Random(78).Masses(n);
      problem.a[0] += problem.a[n - 1];
      problem.a[n - 1] = 0;
      problem.y[3 * (m - 1)] = std::sqrt(squared_distance);
      for (int k = 0; k < 3; ++k) problem.x[3 * (n - 1) + k] = problem.y[3 * (m - 1) + k];
      Case c = CaseOf(problem, absl::StrCat(n, " x ", m, ", ", squared_distance));
      c.wanted = kPotentials | kSums | kGradientMasses;
      c.solver().max_iterations = 1;
      for (Precision precision : {Precision::kStrict, Precision::kDouble}) {
        c.solver().precision = precision;
        if (squared_distance < 700) {  // A row's sum is its exponential, nearly.
          CheckIterates(backend(), c);
        } else {
          EXPECT_EQ(SolveTogether(backend(), {&c})[0].status.code(), absl::StatusCode::kFailedPrecondition) << c.name;
        }
      }
    }
  }
}

// Distances near zero, where a product would leave nothing of them; coincident points pull nowhere.
TEST_P(PointCostsTest, NearAndCoincidentPoints) {
  for (int64_t dim : {3, 20, 70}) {
    SCOPED_TRACE(absl::StrCat("d ", dim));
    const int64_t n = dim == 3 ? 40 : 150;
    Transport problem = Clouds(PointCost::kEuclidean, n, n, dim, 1e-3, 80);
    problem.y = problem.x;
    problem.b = problem.a;
    Check(problem, 6, "y = x");
    for (double& y : problem.y) y = static_cast<float>(y + 1e-4);
    Check(problem, 6, "y near x");
    for (double& x : problem.x) x = 300.25;
    problem.y = problem.x;
    Check(problem, 6, "all in one place");
  }
}

TEST_P(PointCostsTest, Debiased) {
  for (PointCost cost : kCosts) {
    for (double rho : {kInfinity, 0.7}) {
      SCOPED_TRACE(absl::StrCat(NameOf(cost), " rho ", rho));
      Transport problem = Clouds(cost, 15, 18, 2, 0.3, 90);
      problem.solver.rho_a = problem.solver.rho_b = rho;
      Case c = CaseOf(problem, "debiased", DType::kFloat64);
      c.solver().debias = true;
      c.solver().precision = Precision::kDouble;
      c.solver().max_iterations = 20000;
      c.solver().tolerance = 1e-13;
      c.wanted = kPotentials | kGradientPoints | kGradientMasses;
      const Answer answer = SolveAlone(backend(), c);
      const Potentials at = Converge(problem);
      const Vector f_aa = ConvergeSymmetric(SelfProblemA(problem)), g_bb = ConvergeSymmetric(SelfProblemB(problem));
      ExpectClose("point cost, debiased f_aa", answer.f_aa.values(), f_aa, 1e-9);
      ExpectClose("point cost, debiased g_bb", answer.g_bb.values(), g_bb, 1e-9);
      ExpectClose("point cost, debiased value", answer.value, {Divergence(problem, at, f_aa, g_bb)}, 1e-9);
      ExpectClose("point cost, debiased gradient_x", answer.gradient_x.values(), DivergenceGradientX(problem, at, f_aa),
                  1e-8);
      ExpectClose("point cost, debiased gradient_y", answer.gradient_y.values(), DivergenceGradientY(problem, at, g_bb),
                  1e-8);
    }
  }
}

// In float32, where the self problems have kernels of their own; at convergence, so at the potentials' tolerance.
TEST_P(PointCostsTest, DebiasedInStrict) {
  constexpr double kSlope = 4;  // Of any cost here in a coordinate.
  for (PointCost cost : kCosts) {
    for (int64_t dim : {3, 70}) {
      SCOPED_TRACE(absl::StrCat(NameOf(cost), " d ", dim));
      Transport problem = Clouds(cost, 65, 50, dim, 0.5, 95);
      Case c = CaseOf(problem, "debiased", DType::kFloat64);
      c.solver().debias = true;
      c.solver().max_iterations = 20000;
      c.solver().tolerance = 1e-6;
      c.wanted = kGradientPoints | kProjections;
      const Answer answer = SolveAlone(backend(), c);
      const Potentials at = Converge(problem);
      const Vector f_aa = ConvergeSymmetric(SelfProblemA(problem)), g_bb = ConvergeSymmetric(SelfProblemB(problem));
      const double value = Divergence(problem, at, f_aa, g_bb);
      ExpectClose("point cost, STRICT debiased value", answer.value, {value},
                  2 * ValueRoom(0.5, Value(problem, at), Precision::kStrict));
      const double room = kSlope * 1e-4 / 50;
      ExpectClose("point cost, STRICT debiased gradient_x", answer.gradient_x.values(),
                  DivergenceGradientX(problem, at, f_aa), room);
      ExpectClose("point cost, STRICT debiased gradient_y", answer.gradient_y.values(),
                  DivergenceGradientY(problem, at, g_bb), room);
      ExpectClose("point cost, STRICT debiased projection_x", answer.projection_x.values(), ProjectionX(problem, at),
                  2e-3);
    }
  }
}

// A backend may solve FAST as STRICT; it may not be worse than rounding coordinates to 11 bits makes it.
TEST_P(PointCostsTest, FastIsAtLeastTf32) {
  for (PointCost cost : kCosts) {
    for (int64_t n : {50, 1050}) {
      Case c = CaseOf(Clouds(cost, n, 60, 8, 0.5, 97), "fast");
      c.solver().max_iterations = 10;
      c.solver().precision = Precision::kFast;
      c.wanted = kPotentials | kGradientPoints;
      const Answer answer = SolveAlone(backend(), c);
      const Transport problem = MemberTransport(c);
      const Potentials reference = Iterate(problem, 10);
      // Displaces points of size up to sqrt(8) by 2^-11 of it, and costs by that much times a slope of up to 3.
      const double room = 2 * 3 * 3 * std::ldexp(1.0, -11);
      ExpectClose("point cost, FAST f", answer.f.values(), reference.f, room);
      Vector rooms;  // Densities are off by exp(room / eps) and slopes by the displacement, twice.
      for (double sum : PlanRowSums(problem, reference)) rooms.insert(rooms.end(), 8, 3 * std::expm1(2 * room) * sum);
      ExpectClose("point cost, FAST gradient_x", answer.gradient_x.values(), GradientX(problem, reference), rooms);
    }
  }
}

// Gradients by finite differences of the solver's own values, in DOUBLE at convergence.
TEST_P(PointCostsTest, GradientsByFiniteDifferences) {
  constexpr double kStep = 1e-5;
  for (PointCost cost : kCosts) {
    const Transport problem = Clouds(cost, 6, 5, 3, 0.2, 100);
    const Answer answer = Converged(problem, Precision::kDouble, kGradientPoints);
    const Vector gradient_x = answer.gradient_x.values(), gradient_y = answer.gradient_y.values();
    const auto slope = [&](Vector Transport::*points, size_t k) {
      Transport more = problem, less = problem;
      (more.*points)[k] += kStep;
      (less.*points)[k] -= kStep;
      return (Converged(more, Precision::kDouble, 0).value[0] - Converged(less, Precision::kDouble, 0).value[0]) /
             (2 * kStep);
    };
    for (size_t k = 0; k < 6; ++k) {
      EXPECT_NEAR(gradient_x[k], slope(&Transport::x, k), 1e-7) << NameOf(cost);
      EXPECT_NEAR(gradient_y[k], slope(&Transport::y, k), 1e-7) << NameOf(cost);
    }
  }
}

// ---- Closed forms -----------------------------------------------------------------------------------------------

// Concentric regular polygons under a cost of the angle alone: constant potentials, value -eps log mean exp(-c / eps).
TEST_P(PointCostsTest, Polygons) {
  const double r = 1.0, R = 0.7;
  const std::function<double(double)> of_angle[] = {
      [&](double t) { return std::sqrt(r * r + R * R - 2 * r * R * std::cos(t)); },
      [](double t) { return 1 - std::cos(t); }, [&](double t) { return -r * R * std::cos(t); }};
  for (int k = 0; k < 3; ++k) {
    for (double epsilon : {0.05, 0.5}) {
      for (Precision precision : kPrecisions) {
        Transport problem = oracle::Polygons(240, r, R);
        problem.point_cost = kCosts[k];
        problem.solver.epsilon = epsilon;
        double mean = 0;
        for (int i = 0; i < 240; ++i) mean += std::exp(-of_angle[k](2 * M_PI * i / 240) / epsilon) / 240;
        const double value = -epsilon * std::log(mean);
        const Answer answer = Converged(problem, precision, kPotentials);
        ExpectClose(absl::StrCat("polygons, ", NameOf(kCosts[k])), answer.value, {value},
                    ValueRoom(epsilon, value, precision));
        EXPECT_LE(answer.dual_bound[0], value + 1e-13);
      }
    }
  }
}

// -<x, y> between the corners of two cubes: value -d eps log cosh(r R / eps).
TEST_P(PointCostsTest, HypercubesOfNegativeDots) {
  for (double epsilon : {0.05, 1.0}) {
    for (Precision precision : kPrecisions) {
      Transport problem = oracle::Hypercubes(8, 0.5, 0.8);
      problem.point_cost = PointCost::kNegativeDot;
      problem.solver.epsilon = epsilon;
      const double value = -8 * epsilon * std::log(std::cosh(0.4 / epsilon));
      ExpectClose("hypercubes, negative dot", Converged(problem, precision, 0).value, {value},
                  ValueRoom(epsilon, value, precision));
    }
  }
}

// Distances on the line at small epsilon: sort both.
TEST_P(PointCostsTest, DistancesOnTheLine) {
  Transport problem;
  problem.n = problem.m = 64;
  problem.dim = 1;
  problem.point_cost = PointCost::kEuclidean;
  problem.x = Random(112).Uniforms(64, 0, 1);
  problem.y = Random(113).Uniforms(64, 0.25, 1.5);
  Vector x = problem.x, y = problem.y;
  std::sort(x.begin(), x.end());
  std::sort(y.begin(), y.end());
  double sorted = 0;
  for (int i = 0; i < 64; ++i) sorted += std::abs(x[i] - y[i]) / 64;
  problem.solver.epsilon = 1e-3;
  for (Precision precision : kPrecisions) {
    Case c = CaseOf(problem, "line", DType::kFloat64);
    c.solver().precision = precision;
    c.solver().max_iterations = 20000;
    c.solver().tolerance = 1e-4;
    c.wanted = kPrimalBound;
    const Answer answer = SolveAlone(backend(), c);
    EXPECT_LE(answer.dual_bound[0], sorted + 1e-3 * std::log(64.0));
    EXPECT_GE(answer.primal_bound[0], sorted - 1e-12);
  }
}

// -<x, y> is |x - y|^2 / 2 less |x|^2 / 2 and |y|^2 / 2, which potentials absorb; 1 - cos is that of points on the
// sphere and does not know lengths.
TEST_P(PointCostsTest, DisguisesOfHalfSquaredDistances) {
  Transport dot = Clouds(PointCost::kNegativeDot, 14, 19, 3, 0.1, 120);
  Transport half = dot;
  half.point_cost = PointCost::kSquaredEuclidean;
  half.kappa = 0.5;
  Transport cosine = dot, scaled = dot, sphere = half;
  cosine.point_cost = scaled.point_cost = PointCost::kCosine;
  const auto stretch = [](Vector* points, const std::function<double(double, int64_t)>& factor) {
    for (size_t i = 0; i < points->size(); i += 3) {
      const double norm = std::sqrt((*points)[i] * (*points)[i] + (*points)[i + 1] * (*points)[i + 1] +
                                    (*points)[i + 2] * (*points)[i + 2]);
      for (int k = 0; k < 3; ++k) (*points)[i + k] *= factor(norm, i / 3);
    }
  };
  stretch(&scaled.x, [](double, int64_t i) { return std::ldexp(1.0, i % 2 == 0 ? 400 : -400); });
  stretch(&sphere.x, [](double norm, int64_t) { return 1 / norm; });
  stretch(&sphere.y, [](double norm, int64_t) { return 1 / norm; });
  for (Precision precision : kPrecisions) {
    const double room = precision == Precision::kDouble ? 1e-9 : 1e-4;
    const Answer p = Converged(dot, precision, kPlan), q = Converged(half, precision, kPlan);
    ExpectClose("negative dot, plan", p.plan.values(), q.plan.values(), room);
    double squares = 0;
    for (size_t k = 0; k < dot.x.size(); ++k) squares += dot.a[k / 3] * dot.x[k] * dot.x[k] / 2;
    for (size_t k = 0; k < dot.y.size(); ++k) squares += dot.b[k / 3] * dot.y[k] * dot.y[k] / 2;
    ExpectClose("negative dot, value", p.value, {q.value[0] - squares}, room);
    const Answer u = Converged(cosine, precision, kPlan), v = Converged(sphere, precision, kPlan);
    ExpectClose("cosine, value", u.value, v.value, room);
    ExpectClose("cosine, value of any lengths", Converged(scaled, precision, kPlan).value, u.value, room);
  }
}

INSTANTIATE_ON_BACKENDS(PointCostsTest);

}  // namespace
}  // namespace sinkhorn::conformance
