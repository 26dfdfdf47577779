// Hessian-vector products: against the oracle's dense linear algebra, finite differences of the solver's own gradients,
// and translation.
#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/conformance/backends.h"
#include "tests/conformance/check.h"
#include "tests/conformance/check_hessian.h"
#include "tests/conformance/random_problems.h"

namespace sinkhorn::conformance {
namespace {

using oracle::Transport;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr PointCost kCosts[] = {PointCost::kSquaredEuclidean, PointCost::kCosine, PointCost::kNegativeDot};
constexpr Precision kPrecisions[] = {Precision::kStrict, Precision::kDouble};

class HessianTest : public ConformanceTest {
 protected:
  // `problem` with `count` random directions, iterated to convergence.
  static Case CaseWith(const Transport& problem, Precision precision, int64_t count, uint64_t seed) {
    Case c = CaseOf(problem, "products", DType::kFloat64);
    const bool strict = precision == Precision::kStrict;
    c.solver().precision = precision;
    c.solver().max_iterations = 20000;
    c.solver().tolerance = strict ? 1e-6 : 1e-13;
    c.problem.transport.hessian.count = count;
    c.problem.transport.hessian.tolerance = strict ? 1e-5 : 1e-12;
    c.problem.transport.hessian.max_iterations = 500;
    c.direction_x = Tensor::Of(Random(seed).Normals(count * problem.n * problem.dim, 1), DType::kFloat64);
    c.direction_y = Tensor::Of(Random(seed + 1).Normals(count * problem.m * problem.dim, 1), DType::kFloat64);
    return c;
  }

  void ExpectProducts(const Case& c, const std::string& what) {
    SCOPED_TRACE(what);
    const Answer answer = SolveAlone(backend(), c);
    if (!answer.status.ok()) return;
    EXPECT_TRUE(answer.hessian_convergence[0].converged) << answer.hessian_convergence[0].residual;
    ExpectMatchesHessian(c, answer);
  }
};

Transport Clouds(PointCost cost, int64_t n, int64_t m, int64_t dim, double epsilon, uint64_t seed) {
  Transport problem = RandomClouds(n, m, dim, epsilon, seed);
  problem.point_cost = cost;
  return problem;
}

TEST_P(HessianTest, MatchesDenseLinearAlgebra) {
  const double pairs[][2] = {{kInfinity, kInfinity}, {0.5, 0.8}, {kInfinity, 0.4}, {0.4, kInfinity}};
  for (PointCost cost : kCosts) {
    for (const auto& [rho_a, rho_b] : pairs) {
      for (Precision precision : kPrecisions) {
        Transport problem = Clouds(cost, 13, 17, 3, 0.1, 1);
        problem.solver.rho_a = rho_a;
        problem.solver.rho_b = rho_b;
        ExpectProducts(CaseWith(problem, precision, 3, 2),
                       absl::StrCat("cost ", static_cast<int>(cost), " rho ", rho_a, ", ", rho_b));
      }
    }
  }
}

TEST_P(HessianTest, ShapesAndEpsilons) {
  const int64_t shapes[][3] = {{1, 1, 1}, {1, 6, 2}, {6, 1, 2}, {33, 9, 5}, {9, 40, 20}, {20, 22, 1}};
  for (const auto& [n, m, dim] : shapes) {
    for (double epsilon : {0.05, 1.0}) {
      for (Precision precision : kPrecisions) {
        ExpectProducts(CaseWith(Clouds(PointCost::kSquaredEuclidean, n, m, dim, epsilon * dim / 3, 5), precision, 2, 6),
                       absl::StrCat(n, " x ", m, " d ", dim, " eps ", epsilon));
      }
    }
  }
}

TEST_P(HessianTest, OneSideAlone) {
  for (PointCost cost : kCosts) {
    for (bool of_x : {false, true}) {
      Case c = CaseWith(Clouds(cost, 11, 8, 2, 0.1, 10), Precision::kDouble, 2, 11);
      (of_x ? c.direction_y : c.direction_x) = Tensor();
      ExpectProducts(c, of_x ? "x alone" : "y alone");
    }
  }
}

TEST_P(HessianTest, Debiased) {
  for (PointCost cost : kCosts) {
    for (double rho : {kInfinity, 0.6}) {
      for (Precision precision : kPrecisions) {
        Transport problem = Clouds(cost, 12, 9, 2, 0.2, 20);
        problem.solver.rho_a = problem.solver.rho_b = rho;
        Case c = CaseWith(problem, precision, 2, 21);
        c.solver().debias = true;
        ExpectProducts(c, absl::StrCat("debiased, cost ", static_cast<int>(cost), " rho ", rho));
      }
    }
  }
}

// More coordinates than a GPU multiplies as halves; more columns than a block takes at once; clouds that move alone.
TEST_P(HessianTest, ManyCoordinates) {
  const double shapes[][4] = {{40, 150, 100, 10}, {30, 70, 3, 0.2}, {70, 25, 20, 2}};
  for (const auto& [n, m, dim, epsilon] : shapes) {
    for (PointCost cost : kCosts) {
      for (int moving = 1; moving <= 3; ++moving) {  // Bit 0: x, bit 1: y.
        Transport problem = Clouds(cost, n, m, dim, cost == PointCost::kCosine ? 0.1 : epsilon, 140);
        if (moving == 2) problem.solver.rho_a = problem.solver.epsilon;
        Case c = CaseWith(problem, Precision::kStrict, moving == 3 ? 2 : 1, 141);
        c.solver().debias = moving != 2;
        if ((moving & 1) == 0) c.direction_x = Tensor();
        if ((moving & 2) == 0) c.direction_y = Tensor();
        ExpectProducts(c, absl::StrCat(n, " x ", m, " d ", dim, " cost ", static_cast<int>(cost), " moving ", moving));
      }
    }
  }
}

TEST_P(HessianTest, Preconditioners) {
  int32_t iterations[3];
  for (Preconditioner preconditioner : {Preconditioner::kNone, Preconditioner::kJacobi, Preconditioner::kNeumann}) {
    Case c = CaseWith(Clouds(PointCost::kSquaredEuclidean, 40, 37, 2, 0.01, 30), Precision::kDouble, 2, 31);
    c.problem.transport.hessian.preconditioner = preconditioner;
    c.problem.transport.hessian.neumann_terms = preconditioner == Preconditioner::kNeumann ? 3 : 0;
    ExpectProducts(c, absl::StrCat("preconditioner ", static_cast<int>(preconditioner)));
    iterations[static_cast<int>(preconditioner)] = SolveAlone(backend(), c).hessian_convergence[0].iterations;
  }
  EXPECT_LE(iterations[1], iterations[0]);
  EXPECT_LT(iterations[2], iterations[1]);
}

TEST_P(HessianTest, IterationLimitIsData) {
  Case c = CaseWith(Clouds(PointCost::kSquaredEuclidean, 40, 37, 2, 0.01, 30), Precision::kDouble, 2, 31);
  c.problem.transport.hessian.max_iterations = 2;
  const Answer answer = SolveAlone(backend(), c);
  EXPECT_EQ(answer.hessian_convergence[0].iterations, 2);
  EXPECT_FALSE(answer.hessian_convergence[0].converged);
  EXPECT_GT(answer.hessian_convergence[0].residual, 1e-12);
}

// Points without mass neither pull nor are pulled, and clouds may be far apart and far from the origin.
TEST_P(HessianTest, ZeroMassesFarAway) {
  Transport problem = Clouds(PointCost::kSquaredEuclidean, 12, 14, 3, 0.1, 40);
  problem.a[4] += problem.a[0];
  problem.b[6] += problem.b[13];
  problem.a[0] = problem.b[13] = 0;
  for (double& x : problem.x) x += 1000;
  for (double& y : problem.y) y += 900;
  for (Precision precision : kPrecisions) {
    const Case c = CaseWith(problem, precision, 1, 41);
    ExpectProducts(c, "zero masses");
    const Vector product = SolveAlone(backend(), c).hessian_x.values();
    for (int64_t k = 0; k < 3; ++k) EXPECT_EQ(product[k], 0);
  }
}

TEST_P(HessianTest, BatchesAndSharedDirections) {
  Case c = CaseWith(Clouds(PointCost::kSquaredEuclidean, 9, 11, 2, 0.2, 50), Precision::kDouble, 2, 51);
  c.problem.count = 3;
  c.x = Tensor::Of(Random(52).Uniforms(3 * 18, 0, 1), DType::kFloat64);
  c.y = Tensor::Shared(c.y.values(), DType::kFloat64);
  c.a = Tensor::Shared(c.a.values(), DType::kFloat64);
  c.b = Tensor::Shared(c.b.values(), DType::kFloat64);
  c.direction_x = Tensor::Of(Random(53).Normals(3 * 36, 1), DType::kFloat64);
  c.direction_y = Tensor::Shared(c.direction_y.values(), DType::kFloat64);
  const Answer batch = SolveAlone(backend(), c);
  for (int64_t index = 0; index < 3; ++index) {
    const Case member = MemberCase(c, index);
    ExpectProducts(member, absl::StrCat("member ", index));
    const Answer alone = SolveAlone(backend(), member);
    EXPECT_EQ(batch.hessian_x.member(index, 3), alone.hessian_x.values());
    EXPECT_EQ(batch.hessian_y.member(index, 3), alone.hessian_y.values());
  }
}

// Large enough for a GPU's blocks to share out columns.
TEST_P(HessianTest, MembersAreAsAlone) {
  if (GetParam() != "cuda") GTEST_SKIP() << "as the test before";
  for (PointCost cost : kCosts) {
    for (int64_t count : {1, 5}) {
      for (int64_t dim : {40, 100}) {
        Case c = CaseWith(Clouds(cost, 260, 610, dim, 0.05 * dim, 55), Precision::kStrict, count, 56);
        c.problem.count = 3;
        c.x = Tensor::Of(Random(57).Uniforms(3 * 260 * dim, 0, 1), DType::kFloat64);
        c.y = Tensor::Shared(c.y.values(), DType::kFloat64);
        c.a = Tensor::Shared(c.a.values(), DType::kFloat64);
        c.b = Tensor::Shared(c.b.values(), DType::kFloat64);
        c.direction_x = Tensor::Shared(c.direction_x.values(), DType::kFloat64);
        c.direction_y = Tensor::Shared(c.direction_y.values(), DType::kFloat64);
        const Answer batch = SolveAlone(backend(), c);
        for (int64_t index = 0; index < 3; ++index) {
          const Answer alone = SolveAlone(backend(), MemberCase(c, index));
          EXPECT_EQ(batch.hessian_x.member(index, 3), alone.hessian_x.values());
          EXPECT_EQ(batch.hessian_y.member(index, 3), alone.hessian_y.values());
        }
      }
    }
  }
}

TEST_P(HessianTest, SameBitsOnAnyNumberOfThreads) {
  if (!HasThreads(GetParam())) GTEST_SKIP() << "not a matter of threads";
  const Case c = CaseWith(Clouds(PointCost::kSquaredEuclidean, 500, 431, 3, 0.1, 60), Precision::kStrict, 3, 61);
  const auto one = MakeBackend(GetParam(), 1), three = MakeBackend(GetParam(), 3);
  EXPECT_EQ(DifferenceInBits(SolveAlone(one.get(), c), SolveAlone(three.get(), c)), "");
}

// Sizes of every way that a GPU solves clouds, one direction or more than a block takes: other precisions against
// DOUBLE, which the tests above hold to the oracle.
TEST_P(HessianTest, PrecisionsAgreeAtAllSizes) {
  const bool whole = GetParam() == "cuda";  // Of CPUs large sizes tell no more.
  const int64_t shapes[][4] = {{60, 50, 1, 5},    {70, 130, 3, 1},    {250, 200, 64, 3},   {300, 700, 100, 2},
                               {900, 1000, 3, 6}, {1100, 1030, 1, 1}, {1300, 1500, 64, 1}, {1030, 1290, 100, 5}};
  for (const auto& [n, m, dim, count] : shapes) {
    for (bool debias : {false, true}) {
      if ((debias && n > 1000) || (!whole && n > 300)) continue;
      const std::string what = absl::StrCat(n, " x ", m, " d ", dim, " directions ", count, debias ? " debiased" : "");
      Case c =
          CaseWith(Clouds(PointCost::kSquaredEuclidean, n, m, dim, 0.1 * dim, 90 + n), Precision::kDouble, count, 91);
      c.solver().debias = debias;
      c.solver().tolerance = 1e-10;
      c.problem.transport.hessian.tolerance = 1e-9;
      const Answer exact = SolveAlone(backend(), c);
      ASSERT_TRUE(exact.status.ok()) << what;
      EXPECT_TRUE(exact.hessian_convergence[0].converged) << what << ": " << exact.hessian_convergence[0].residual;
      for (Precision precision : {Precision::kStrict, Precision::kFast}) {
        const bool fast = precision == Precision::kFast;
        c.solver().precision = precision;
        c.solver().tolerance = fast ? 1e-4 : 1e-6;
        c.problem.transport.hessian.tolerance = fast ? 1e-4 : 1e-5;
        const Answer answer = SolveAlone(backend(), c);
        ASSERT_TRUE(answer.status.ok()) << what;
        EXPECT_TRUE(answer.hessian_convergence[0].converged) << what << ": " << answer.hessian_convergence[0].residual;
        for (Tensor Answer::*side : {&Answer::hessian_x, &Answer::hessian_y}) {
          const Vector wanted = (exact.*side).values();
          // FAST: coordinates of 11 bits, products of costs of up to some epsilons.
          ExpectClose(fast ? "FAST against DOUBLE products" : "STRICT against DOUBLE products", (answer.*side).values(),
                      wanted, (fast ? 1e-2 : 1e-3) * oracle::MaxAbs(wanted));
        }
      }
    }
  }
}

// Residents with directions, sizes and precisions of their own share slices, long ones and short.
TEST_P(HessianTest, CompanyIsInvisible) {
  std::vector<Case> cases;
  for (int k = 0; k < 12; ++k) {
    const int64_t shapes[][3] = {{20, 30, 2}, {200, 170, 3},  {280, 260, 64},
                                 {5, 300, 1}, {600, 1100, 3}, {90, 80, 100}};
    const auto& [n, m, dim] = shapes[k % 6];
    const Precision precision = k % 4 == 3 ? Precision::kDouble : k % 4 == 2 ? Precision::kFast : Precision::kStrict;
    cases.push_back(
        CaseWith(Clouds(PointCost::kSquaredEuclidean, n, m, dim, 0.1 * dim, 100 + k), precision, 1 + k % 6, 101));
    Case& c = cases.back();
    c.solver().tolerance = 1e-5;
    c.problem.transport.hessian.tolerance = 1e-4;
    c.problem.transport.hessian.preconditioner = static_cast<Preconditioner>(k % 3);
    c.problem.transport.hessian.neumann_terms = k % 3 == 2 ? 2 : 0;
    c.solver().debias = k % 5 == 4;
    if (k % 5 == 3) c.solver().rho_a = 0.5;
    if (k % 7 == 6) c.direction_y = Tensor();
  }
  cases.push_back(CaseOf(RandomDense(40, 50, 0.1, 130), "without products"));
  cases.back().solver().max_iterations = 300;
  std::vector<const Case*> together;
  std::vector<Answer> alone;
  for (const Case& c : cases) {
    together.push_back(&c);
    alone.push_back(SolveAlone(backend(), c));
  }
  for (double slice_seconds : {0.005, 1e-5}) {
    const std::vector<Answer> answers = SolveTogether(backend(), together, slice_seconds);
    for (size_t k = 0; k < cases.size(); ++k) {
      EXPECT_EQ(DifferenceInBits(answers[k], alone[k]), "") << "case " << k;
      if (alone[k].hessian_convergence.empty()) continue;
      EXPECT_EQ(answers[k].hessian_convergence[0].iterations, alone[k].hessian_convergence[0].iterations) << k;
      EXPECT_EQ(answers[k].hessian_convergence[0].residual, alone[k].hessian_convergence[0].residual) << k;
    }
  }
}

// The derivative of what the solver itself calls the gradient.
TEST_P(HessianTest, FiniteDifferencesOfGradients) {
  constexpr double kStep = 1e-5;
  for (PointCost cost : kCosts) {
    for (bool debias : {false, true}) {
      const Transport problem = Clouds(cost, 8, 7, 2, 0.2, 70);
      Case c = CaseWith(problem, Precision::kDouble, 1, 71);
      c.solver().debias = debias;
      const Answer answer = SolveAlone(backend(), c);
      const auto gradient = [&](double step) {
        Transport moved = problem;
        const Vector dx = c.direction_x.values(), dy = c.direction_y.values();
        for (size_t k = 0; k < dx.size(); ++k) moved.x[k] += step * dx[k];
        for (size_t k = 0; k < dy.size(); ++k) moved.y[k] += step * dy[k];
        Case other = CaseOf(moved, "moved", DType::kFloat64);
        other.solver() = c.solver();
        other.wanted = kGradientPoints;
        return SolveAlone(backend(), other).gradient_x.values();
      };
      Vector slope = gradient(kStep);
      const Vector less = gradient(-kStep);
      for (size_t k = 0; k < slope.size(); ++k) slope[k] = (slope[k] - less[k]) / (2 * kStep);
      ExpectClose("finite differences of gradients", answer.hessian_x.values(), slope, 1e-6);
    }
  }
}

// Closed form 8: moving all of x by v, the debiased value kappa |t - v|^2 has the second derivative 2 kappa a_i v.
TEST_P(HessianTest, Translation) {
  const double t[2] = {0.375, -0.875}, v[2] = {0.5, 2};
  for (int64_t n : {16, 900}) {
    for (Precision precision : kPrecisions) {
      for (double kappa : {0.5, 1.0}) {
        Transport problem = RandomClouds(n, n, 2, 0.1, 81);
        problem.kappa = kappa;
        problem.b = problem.a;
        for (int64_t k = 0; k < 2 * n; ++k) problem.y[k] = problem.x[k] + t[k % 2];
        Case c = CaseWith(problem, precision, 1, 82);
        c.solver().debias = true;
        c.direction_y = Tensor();
        Vector along(2 * n), expected(2 * n);
        for (int64_t k = 0; k < 2 * n; ++k) {
          along[k] = v[k % 2];
          expected[k] = 2 * kappa * problem.a[k / 2] * v[k % 2];
        }
        c.direction_x = Tensor::Of(along, DType::kFloat64);
        const Answer answer = SolveAlone(backend(), c);
        const double relative = precision == Precision::kDouble ? 1e-8 : 1e-3;
        ExpectClose("closed form 8, Hessian-vector product", answer.hessian_x.values(), expected,
                    relative * oracle::MaxAbs(expected));
      }
    }
  }
}

INSTANTIATE_ON_BACKENDS(HessianTest);

}  // namespace
}  // namespace sinkhorn::conformance
