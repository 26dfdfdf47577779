// Transport against the oracle, iteration by iteration: shapes that bite, epsilon from 1e-3 to 10,
// both update rules, annealing, relaxed marginals, both precisions.
#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/conformance/backends.h"
#include "tests/conformance/check.h"
#include "tests/conformance/random_problems.h"

namespace sinkhorn::conformance {
namespace {

using oracle::Sum;
using oracle::Transport;

struct Shape {
  int64_t n, m, dim;
};

class TransportTest : public ConformanceTest {
 protected:
  // Both precisions against one run of the oracle.
  void Check(const Transport& problem, int iterations, const std::string& name, uint32_t wanted = kPotentials) {
    Case c = CaseOf(problem, name);
    c.solver().max_iterations = iterations;
    c.wanted = wanted;
    const oracle::Potentials reference = Iterate(MemberTransport(c), iterations);
    for (Precision precision : {Precision::kStrict, Precision::kDouble}) {
      c.solver().precision = precision;
      SCOPED_TRACE(absl::StrCat(name, precision == Precision::kDouble ? " DOUBLE" : " STRICT"));
      const Answer answer = SolveAlone(backend(), c);
      if (answer.status.ok()) ExpectMatchesOracle(c, answer, reference);
    }
  }

  // Of a problem with squared distances: plain ones, and relaxed marginals.
  void CheckVariants(Transport problem, const std::string& name) {
    problem.point_cost = PointCost::kEuclidean;
    Check(problem, 6, name + " Euclidean");
    problem.point_cost = PointCost::kSquaredEuclidean;
    problem.solver.rho_a = 0.3;
    Check(problem, 6, name + " relaxed");
  }

  void CheckFast(Transport problem, int iterations, double tolerance, UpdateRule rule = UpdateRule::kAlternating) {
    problem.solver.update_rule = rule;
    Case c = CaseOf(problem, "fast");
    c.solver().max_iterations = iterations;
    c.solver().precision = Precision::kFast;
    const Answer answer = SolveAlone(backend(), c);
    const oracle::Potentials reference = Iterate(MemberTransport(c), iterations);
    ExpectClose("FAST f", answer.f.values(), reference.f, tolerance);
    ExpectClose("FAST g", answer.g.values(), reference.g, tolerance);
  }

  // The three problems of a debiased one, each against its own iterates.
  void CheckDebiased(const Transport& problem, int iterations, const std::string& name) {
    Case c = CaseOf(problem, name);
    c.solver().max_iterations = iterations;
    c.solver().debias = true;
    const Transport member = MemberTransport(c);
    const oracle::Potentials reference = Iterate(member, iterations);
    const auto of_itself = [&](Transport self) {
      self.solver.update_rule = UpdateRule::kSymmetric;
      return Iterate(self, iterations).f;
    };
    const Vector f_aa = of_itself(SelfProblemA(member)), g_bb = of_itself(SelfProblemB(member));
    for (Precision precision : {Precision::kStrict, Precision::kDouble}) {
      c.solver().precision = precision;
      const double room = PotentialTolerance(c, reference);
      const std::string which = precision == Precision::kDouble ? "DOUBLE " : "STRICT ";
      SCOPED_TRACE(which + name);
      const Answer answer = SolveAlone(backend(), c);
      ExpectClose(which + "f, debiased", answer.f.values(), reference.f, room);
      ExpectClose(which + "g, debiased", answer.g.values(), reference.g, room);
      ExpectClose(which + "f_aa", answer.f_aa.values(), f_aa, room);
      ExpectClose(which + "g_bb", answer.g_bb.values(), g_bb, room);
    }
  }

  // Of sizes that GPUs sweep, which of CPUs tell no more: symmetric updates and, of clouds, self-terms as well.
  void CheckSweeps(Transport problem, int iterations, const std::string& name) {
    Check(problem, iterations, name);
    if (GetParam() != "cuda") return;
    if (problem.cost.empty()) CheckDebiased(problem, std::min(iterations, 7), name);
    problem.solver.update_rule = UpdateRule::kSymmetric;
    Check(problem, iterations, name + " symmetric");
  }

  void CheckBothRules(Transport problem, int iterations, const std::string& name) {
    problem.solver.update_rule = UpdateRule::kAlternating;
    Check(problem, iterations, absl::StrCat(name, " alternating"));
    problem.solver.update_rule = UpdateRule::kSymmetric;
    Check(problem, iterations, absl::StrCat(name, " symmetric"));
  }
};

std::string NameOf(const Shape& s, double epsilon) {
  return absl::StrCat(s.n, " x ", s.m, " d ", s.dim, " eps ", epsilon);
}

TEST_P(TransportTest, PointCloudShapes) {
  const Shape shapes[] = {{1, 1, 1},    {1, 7, 2},    {7, 1, 2},     {2, 2, 3},     {31, 37, 3},
                          {97, 101, 5}, {16, 16, 4},  {17, 15, 1},   {500, 3, 2},   {3, 500, 2},
                          {64, 64, 64}, {130, 67, 7}, {33, 17, 100}, {40, 30, 257}, {5, 6, 1024}};
  uint64_t seed = 1;
  for (const Shape& s : shapes) {
    for (double epsilon : {1e-3, 1e-2, 0.1, 1.0, 10.0}) {
      CheckBothRules(RandomClouds(s.n, s.m, s.dim, epsilon, ++seed), 7, NameOf(s, epsilon));
    }
  }
}

TEST_P(TransportTest, DenseShapes) {
  const Shape shapes[] = {{1, 1, 0},    {1, 9, 0},   {9, 1, 0},   {2, 2, 0},   {23, 29, 0},
                          {101, 97, 0}, {16, 16, 0}, {400, 5, 0}, {5, 400, 0}, {128, 65, 0}};
  uint64_t seed = 100;
  for (const Shape& s : shapes) {
    for (double epsilon : {1e-3, 1e-2, 0.1, 1.0, 10.0}) {
      CheckBothRules(RandomDense(s.n, s.m, epsilon, ++seed), 7, NameOf(s, epsilon));
    }
  }
}

TEST_P(TransportTest, IterationCounts) {
  for (int iterations : {1, 2, 3, 50, 200}) {
    CheckBothRules(RandomClouds(37, 41, 3, 0.05, iterations), iterations, absl::StrCat(iterations, " iterations"));
    CheckBothRules(RandomDense(41, 37, 0.02, iterations), iterations,
                   absl::StrCat("dense, ", iterations, " iterations"));
  }
}

// Scalings drift far from 1 while epsilon is small: whatever is cached must be renewed in time.
TEST_P(TransportTest, ManyIterationsAtSmallEpsilon) {
  for (double epsilon : {1e-3, 4e-3}) {
    CheckBothRules(RandomClouds(59, 61, 2, epsilon, 205), 150, absl::StrCat("eps ", epsilon));
    CheckBothRules(RandomDense(61, 59, epsilon, 206), 150, absl::StrCat("dense eps ", epsilon));
  }
}

// Takes the mass of the first and the last point of either side.
void EmptyEnds(Transport* problem) {
  for (auto* mass : {&problem->a, &problem->b}) {
    (*mass)[3] += mass->front() + mass->back();
    mass->front() = mass->back() = 0;
  }
}

// At every size that is solved whole by a block or a cluster of a GPU, with exponents too large for float32.
TEST_P(TransportTest, SmallEpsilonAtEverySize) {
  const int64_t sizes[][2] = {{60, 41}, {120, 128}, {250, 199}, {400, 512}, {700, 530}, {601, 1003}};
  int seed = 310;
  for (const auto& [n, m] : sizes) {
    const std::string size = absl::StrCat(n, " x ", m);
    Transport problem = RandomClouds(n, m, 3, 1e-3, ++seed);
    Check(problem, 6, size);
    CheckVariants(problem, size);
    Check(RandomDense(n, m, 1e-3, ++seed), 6, size + " dense");
  }
}

// The same beyond, where a GPU keeps them in memory: potentials move by hundreds of epsilon.
TEST_P(TransportTest, SmallEpsilonInMemory) {
  const int64_t sizes[][2] = {{1100, 1030}, {600, 2001}};
  int seed = 330;
  for (const auto& [n, m] : sizes) {
    const std::string size = absl::StrCat(n, " x ", m);
    Transport problem = RandomClouds(n, m, 3, 1e-3, ++seed);
    EmptyEnds(&problem);
    CheckSweeps(problem, 21, size);
    CheckVariants(problem, size);
    problem = RandomDense(n, m, 1e-3, ++seed);
    EmptyEnds(&problem);
    for (double& cost : problem.cost) cost += 5;
    problem.initial_g = Random(seed).Uniforms(m, 9, 10);
    CheckSweeps(problem, 21, size + " dense");
  }
}

TEST_P(TransportTest, Thousands) {
  for (double epsilon : {1e-3, 0.1}) {
    CheckBothRules(RandomClouds(1009, 997, 3, epsilon, 200), 4, absl::StrCat("d 3 eps ", epsilon));
    CheckBothRules(RandomClouds(701, 1103, 64, epsilon, 201), 3, absl::StrCat("d 64 eps ", epsilon));
    CheckBothRules(RandomDense(1009, 503, epsilon, 202), 4, absl::StrCat("dense eps ", epsilon));
  }
  CheckBothRules(RandomClouds(20011, 3, 2, 0.01, 203), 5, "n >> m");
  CheckBothRules(RandomClouds(2, 10007, 2, 0.01, 204), 5, "m >> n");
}

// Sizes at which it pays to keep what products make.
TEST_P(TransportTest, ThousandsOfManyCoordinates) {
  Transport problem = RandomClouds(1100, 2050, 100, 0.05, 207);
  EmptyEnds(&problem);
  CheckSweeps(problem, 6, "zero masses");
  problem.solver.epsilon = 0.4;
  problem.solver.rho_b = 1;
  problem.b = Random(208).Masses(2050, 1.75);
  CheckSweeps(problem, 6, "relaxed");
}

// A size at which costs are read from memory.
TEST_P(TransportTest, MillionsOfCosts) {
  Transport problem = RandomDense(1030, 2040, 0.02, 209);
  EmptyEnds(&problem);
  CheckSweeps(problem, 4, "zero masses");
  problem.solver.epsilon = 0.0015;
  problem.solver.epsilon_decay = 0.3;
  CheckSweeps(problem, 8, "annealed");
}

TEST_P(TransportTest, UniformMassesByDefault) {
  Transport clouds = RandomClouds(11, 7, 2, 0.1, 210), dense = RandomDense(7, 11, 0.1, 211);
  for (Transport* problem : {&clouds, &dense}) {
    problem->a.clear();
    problem->b.clear();
  }
  CheckBothRules(clouds, 5, "clouds");
  CheckBothRules(dense, 5, "dense");
}

TEST_P(TransportTest, HalfSquaredEuclidean) {
  Transport problem = RandomClouds(29, 31, 3, 0.05, 220);
  problem.kappa = 0.5;
  CheckBothRules(problem, 6, "kappa 1/2");
}

// At 2.5e-3 some of the epsilons are large enough for exponents in float32, and the last are not.
TEST_P(TransportTest, Annealed) {
  for (double epsilon : {1e-3, 2.5e-3, 0.1, 10.0}) {
    for (double start : {0.0, 3.0 * epsilon}) {
      for (bool dense : {false, true}) {
        Transport problem = dense ? RandomDense(43, 37, epsilon, 230) : RandomClouds(43, 37, 3, epsilon, 231);
        problem.solver.epsilon_start = start;
        for (double decay : {0.25, 0.81}) {  // From 3 to 1e-3 in 6 and in 38 iterations.
          problem.solver.epsilon_decay = decay;
          CheckBothRules(problem, decay == 0.25 ? 12 : 42,
                         absl::StrCat(dense ? "dense" : "clouds", " eps ", epsilon, " from ", start, " decay ", decay));
          if (!dense && start > 0) CheckDebiased(problem, 7, absl::StrCat("eps ", epsilon, " from ", start));
        }
      }
    }
  }
}

// A schedule that has not reached epsilon when the iterations end: the potentials are those of the
// steps done.
TEST_P(TransportTest, AnnealingCutShort) {
  for (bool dense : {false, true}) {
    Transport problem = dense ? RandomDense(33, 37, 1e-3, 232) : RandomClouds(33, 37, 3, 1e-3, 233);
    if (dense) {
      for (double& cost : problem.cost) cost = static_cast<float>(cost * 4 - 9);  // All negative.
    }
    problem.solver.epsilon_decay = 0.5;
    for (UpdateRule rule : {UpdateRule::kAlternating, UpdateRule::kSymmetric}) {
      problem.solver.update_rule = rule;
      for (int iterations : {1, 2, 5}) {
        Case c = CaseOf(problem, dense ? "dense" : "clouds");
        c.solver().max_iterations = iterations;
        const oracle::Potentials reference = Iterate(MemberTransport(c), iterations);
        for (Precision precision : {Precision::kStrict, Precision::kDouble}) {
          c.solver().precision = precision;
          SCOPED_TRACE(absl::StrCat(c.name, " iterations ", iterations));
          const Answer answer = SolveAlone(backend(), c);
          const double room = PotentialTolerance(c, reference);
          const bool strict = precision == Precision::kStrict;
          ExpectClose(strict ? "STRICT f, cut short" : "DOUBLE f, cut short", answer.f.values(), reference.f, room);
          ExpectClose(strict ? "STRICT g, cut short" : "DOUBLE g, cut short", answer.g.values(), reference.g, room);
        }
      }
    }
  }
}

TEST_P(TransportTest, RelaxedMarginals) {
  const double infinity = std::numeric_limits<double>::infinity();
  const double pairs[][2] = {{1, 1}, {0.05, 0.05}, {infinity, 0.5}, {0.2, infinity}, {0.1, 5}, {1e4, 1e4}};
  for (double epsilon : {1e-2, 0.1, 2.0}) {
    for (const auto& [rho_a, rho_b] : pairs) {
      for (bool dense : {false, true}) {
        Transport problem = dense ? RandomDense(31, 23, epsilon, 250) : RandomClouds(31, 23, 2, epsilon, 251);
        problem.b = Random(252).Masses(23, 1.75);
        problem.solver.rho_a = rho_a;
        problem.solver.rho_b = rho_b;
        const std::string name =
            absl::StrCat(dense ? "dense" : "clouds", " eps ", epsilon, " rho ", rho_a, ", ", rho_b);
        CheckBothRules(problem, 8, name);
        problem.solver.epsilon_decay = 0.3;
        CheckBothRules(problem, 8, name + " annealed");
      }
    }
  }
}

// Of many coordinates, with centres that are near each other and far apart.
TEST_P(TransportTest, RelaxedAtManyCoordinates) {
  const int64_t sizes[][2] = {{150, 130}, {1100, 1030}};
  for (const auto& [n, m] : sizes) {
    for (double apart : {0.0, 0.3, 3.0}) {
      for (double epsilon : {0.1, 2.0}) {
        Transport problem = RandomClouds(n, m, 64, epsilon, 253);
        problem.b = Random(254).Masses(m, 1.75);
        for (double& y : problem.y) y = static_cast<float>(y + apart);
        problem.solver.rho_a = 1;
        problem.solver.rho_b = 3;
        Check(problem, 6, absl::StrCat(n, " x ", m, ", apart ", apart, ", eps ", epsilon));
      }
    }
  }
}

// A relaxed potential may move by hundreds of epsilon in one step, and what the rows should sum to may be far below
// what float32 holds.
TEST_P(TransportTest, RelaxedFarFromTheMasses) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (double cost : {100.0, 200.0, 1000.0}) {
    for (double rho_b : {1.0, 30.0, infinity}) {
      for (bool swapped : {false, true}) {
        Transport problem = RandomDense(11, 9, 1, 306);
        for (double& c : problem.cost) c += cost;
        problem.solver.rho_a = swapped ? rho_b : 1;
        problem.solver.rho_b = swapped ? 1 : rho_b;
        for (int iterations : {1, 2, 5, 40}) {
          CheckBothRules(problem, iterations,
                         absl::StrCat("cost ", cost, ", rho ", problem.solver.rho_a, " ", problem.solver.rho_b));
        }
      }
    }
  }
}

TEST_P(TransportTest, InitialPotentials) {
  for (bool dense : {false, true}) {
    Transport problem = dense ? RandomDense(19, 23, 0.05, 260) : RandomClouds(19, 23, 3, 0.05, 261);
    problem.initial_g = Random(262).Uniforms(23, -0.5, 0.5);
    problem.solver.update_rule = UpdateRule::kAlternating;
    Check(problem, 2, "alternating from g");
    problem.initial_f = Random(263).Uniforms(19, -0.5, 0.5);
    CheckBothRules(problem, 2, "from f and g");
    problem.solver.rho_b = 0.5;
    CheckBothRules(problem, 2, "from f and g, relaxed");
  }
}

TEST_P(TransportTest, ZeroMasses) {
  for (bool dense : {false, true}) {
    for (double rho : {std::numeric_limits<double>::infinity(), 0.5}) {
      Transport problem = dense ? RandomDense(31, 29, 0.02, 270) : RandomClouds(31, 29, 3, 0.02, 271);
      problem.a[3] += problem.a[0] + problem.a[30];
      problem.a[0] = problem.a[30] = 0;
      problem.b[5] += problem.b[1] + problem.b[2];
      problem.b[1] = problem.b[2] = 0;
      problem.solver.rho_b = rho;
      CheckBothRules(problem, 6, absl::StrCat(dense ? "dense" : "clouds", " rho ", rho));
      Transport one = problem;  // All mass in one point.
      one.a.assign(31, 0.0);
      one.a[17] = 1;
      CheckBothRules(one, 6, "one point has all");
    }
  }
}

TEST_P(TransportTest, TotalsOtherThanOne) {
  for (bool dense : {false, true}) {
    for (double total : {std::ldexp(1.0, -6), 16.0, 1024.0}) {
      Transport problem = dense ? RandomDense(17, 19, 0.05, 275) : RandomClouds(17, 19, 2, 0.05, 276);
      for (double& a : problem.a) a *= total;
      for (double& b : problem.b) b *= total;
      CheckBothRules(problem, 5, absl::StrCat(dense ? "dense" : "clouds", " total ", total));
    }
  }
}

// Masses that are all but nothing: a sum loses them, a logarithm does not.
TEST_P(TransportTest, TinyMasses) {
  for (bool dense : {false, true}) {
    Transport problem = dense ? RandomDense(17, 19, 0.05, 277) : RandomClouds(17, 19, 2, 0.05, 278);
    problem.a[3] = std::ldexp(1.0, -60);
    problem.a[4] += Sum(problem.b) - Sum(problem.a);
    problem.b[2] = std::ldexp(1.0, -100);
    problem.b[5] += Sum(problem.a) - Sum(problem.b);
    CheckBothRules(problem, 6, dense ? "dense" : "clouds");
  }
}

TEST_P(TransportTest, FarFromTheOrigin) {
  for (double epsilon : {1e-3, 1e-1, 10.0}) {
    Transport problem = RandomClouds(61, 53, 3, epsilon, 280);
    for (double& x : problem.x) x = static_cast<float>(x + 1000);
    for (double& y : problem.y) y = static_cast<float>(y + 1000);
    CheckBothRules(problem, 6, absl::StrCat("common offset, eps ", epsilon));
  }
}

TEST_P(TransportTest, CloudsFarApart) {
  for (double epsilon : {1e-3, 1e-2, 1.0, 10.0}) {
    Transport problem = RandomClouds(61, 53, 3, epsilon, 281);
    for (double& y : problem.y) y = static_cast<float>(y + 1000);
    CheckBothRules(problem, 6, absl::StrCat("eps ", epsilon));
  }
}

// Two clusters a thousand apart, in both clouds, with half of the mass each: potentials stay near 1
// while |x|^2 is near 1e6.
TEST_P(TransportTest, FarClusters) {
  for (int64_t dim : {2, 64}) {
    for (double epsilon : {1e-2, 1.0, 10.0}) {
      Transport problem = RandomClouds(64, 48, dim, epsilon, 282);
      problem.a.clear();
      problem.b.clear();
      const double offset = 1000 / std::sqrt(static_cast<double>(dim));
      for (int64_t k = 0; k < 32 * dim; ++k) {
        problem.x[k] = static_cast<float>(problem.x[k] + offset);
      }
      for (int64_t k = 0; k < 24 * dim; ++k) {
        problem.y[k] = static_cast<float>(problem.y[k] + offset);
      }
      CheckBothRules(problem, 6, absl::StrCat("d ", dim, " eps ", epsilon));
    }
  }
}

// Identical points: every distance is 0, and a difference of squares would make it negative.
TEST_P(TransportTest, CoincidentPoints) {
  Transport problem = RandomClouds(40, 40, 3, 1e-3, 290);
  problem.y = problem.x;
  problem.b = problem.a;
  CheckBothRules(problem, 6, "y = x");
  for (double& x : problem.x) x = 300.25;
  problem.y = problem.x;
  CheckBothRules(problem, 6, "all in one place");
}

TEST_P(TransportTest, LargeAndNegativeCosts) {
  for (double scale : {1e-4, 1e4}) {
    Transport problem = RandomDense(37, 31, 0.02 * scale, 291);
    for (double& cost : problem.cost) cost = static_cast<float>((cost - 0.7) * scale);
    CheckBothRules(problem, 6, absl::StrCat("scale ", scale));
  }
  Transport constant = RandomDense(9, 9, 0.1, 292);
  constant.cost.assign(81, 5000.0);  // A constant cost: the plan is a b^T.
  CheckBothRules(constant, 3, "constant 5000");
}

// Totals may differ by 1e-5, relatively; nothing is rescaled.
TEST_P(TransportTest, SlightlyUnequalTotals) {
  Transport problem = RandomClouds(20, 21, 2, 0.1, 295);
  problem.b[0] += 7 * std::ldexp(1.0, -20);
  CheckBothRules(problem, 5, "totals differ by 7e-6");
}

// Inputs in float64 that float32 cannot hold: STRICT may not round them before it takes
// differences.
TEST_P(TransportTest, Float64InputsFarAway) {
  Transport problem = RandomClouds(47, 43, 3, 1e-2, 296);
  for (double& x : problem.x) x = x * 1.000000123 + 1000;
  for (double& y : problem.y) y = y * 1.000000321 + 1000;
  for (UpdateRule rule : {UpdateRule::kAlternating, UpdateRule::kSymmetric}) {
    Case c = CaseOf(problem, "float64 at 1000", DType::kFloat64);
    c.solver().update_rule = rule;
    c.solver().max_iterations = 6;
    for (Precision precision : {Precision::kStrict, Precision::kDouble}) {
      c.solver().precision = precision;
      CheckIterates(backend(), c);
    }
  }
}

// Of points within 4 of their centre; a cost is the sum of 100 errors that do not know of each other.
constexpr double kIndependentTf32 = 2 * 5 * 4.0 / (1 << 11) / 10;

// A backend may solve FAST as STRICT; it may not be worse than a TF32 product makes it.
TEST_P(TransportTest, FastIsAtLeastTf32) {
  // Rounding coordinates of size up to sqrt(8) by 2^-11 displaces each cost by about 2 |x - y| |x|
  // 2^-11.
  CheckFast(RandomClouds(50, 60, 8, 0.5, 297), 10, 2 * 3 * 3 * std::ldexp(1.0, -11));
  for (UpdateRule rule : {UpdateRule::kAlternating, UpdateRule::kSymmetric}) {
    CheckFast(RandomClouds(110, 2050, 100, 0.8, 298), 6, 4 * kIndependentTf32, rule);
  }
}

TEST_P(TransportTest, ThousandsInFastAreAtLeastTf32) {
  for (UpdateRule rule : {UpdateRule::kAlternating, UpdateRule::kSymmetric}) {
    CheckFast(RandomClouds(1100, 2050, 100, 0.8, 298), 6, 4 * kIndependentTf32, rule);
  }
}

INSTANTIATE_ON_BACKENDS(TransportTest);

}  // namespace
}  // namespace sinkhorn::conformance
