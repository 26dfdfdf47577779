// The benchmarks' way into the CPU backend, at toy size: every kind of row gives the oracle's
// answer and a time.
#include "tests/bench/solver.h"

#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/problem.h"
#include "tests/bench/ceilings.h"
#include "tests/oracle/normalization.h"
#include "tests/oracle/transport.h"

namespace sinkhorn::bench {
namespace {

using oracle::Vector;

CpuBackendOptions TwoThreads() {
  CpuBackendOptions options;
  options.threads = 2;
  return options;
}

class SolverTest : public testing::Test {
 protected:
  std::vector<float> Uniform(int64_t count) {
    std::uniform_real_distribution<float> uniform(0, 1);
    std::vector<float> values(count);
    for (float& value : values) value = uniform(random_);
    return values;
  }

  // Solves three times; expects three times of the clock.
  TimedReport Solve(const TimedProblem& problem) {
    TimedReport report = {};
    double seconds[3] = {-1, -1, -1};
    EXPECT_EQ(SolveTimed(backend_.get(), problem, 1, 3, seconds, &report), absl::OkStatus());
    for (double s : seconds) EXPECT_GT(s, 0);
    EXPECT_STRNE(report.family, "");
    return report;
  }

  std::mt19937 random_{7};
  const std::unique_ptr<Backend> backend_ = MakeCpuBackend(TwoThreads());
};

Vector Wide(const std::vector<float>& values) { return Vector(values.begin(), values.end()); }

// STRICT: within 1e-4 epsilon + 1e-6 |f|.
void ExpectClose(const std::vector<float>& actual, const Vector& expected, double epsilon) {
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], 1e-4 * epsilon + 1e-6 * std::abs(expected[i])) << "at " << i;
  }
}

TEST_F(SolverTest, PointCloudOfFixedIterations) {
  const int64_t n = 37, m = 29, dim = 3;
  const std::vector<float> x = Uniform(n * dim), y = Uniform(m * dim);
  std::vector<float> f(n), g(m);
  TimedProblem problem = {};
  problem.kind = static_cast<int32_t>(ProblemKind::kPointCloud);
  problem.count = 1, problem.n = n, problem.m = m, problem.dim = dim;
  problem.x = x.data(), problem.y = y.data(), problem.f = f.data(), problem.g = g.data();
  problem.epsilon = 0.1, problem.max_iterations = 10;

  const TimedReport report = Solve(problem);

  oracle::Transport same;
  same.n = n, same.m = m, same.dim = dim, same.x = Wide(x), same.y = Wide(y);
  same.solver.epsilon = 0.1;
  const auto expected = Iterate(WithUniformMasses(same), 10);
  EXPECT_EQ(report.iterations, 10);
  ExpectClose(f, expected.f, 0.1);
  ExpectClose(g, expected.g, 0.1);
}

TEST_F(SolverTest, DenseToATolerance) {
  const int64_t n = 31, m = 40;
  const std::vector<float> cost = Uniform(n * m);
  const std::vector<double> wide_cost(cost.begin(), cost.end());
  std::vector<double> f(n), g(m);
  TimedProblem problem = {};
  problem.kind = static_cast<int32_t>(ProblemKind::kDense);
  problem.dtype = static_cast<int32_t>(DType::kFloat64);
  problem.count = 1, problem.n = n, problem.m = m;
  problem.cost = wide_cost.data(), problem.f = f.data(), problem.g = g.data();
  problem.epsilon = 0.05, problem.tolerance = 1e-6, problem.max_iterations = 10000;

  const TimedReport report = Solve(problem);

  EXPECT_TRUE(report.converged);
  double error_a = 0;
  for (int64_t i = 0; i < n; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < m; ++j) sum += std::exp((f[i] + g[j] - wide_cost[i * m + j]) / 0.05) / (n * m);
    error_a += std::abs(sum - 1.0 / n);
  }
  EXPECT_LE(error_a, 1e-6);
}

TEST_F(SolverTest, NormalizationForwardAndBackward) {
  const int64_t count = 5, n = 4;
  const std::vector<float> logits = Uniform(count * n * n), cotangent = Uniform(count * n * n);
  std::vector<float> plan(count * n * n), gradient(count * n * n);
  TimedProblem problem = {};
  problem.kind = static_cast<int32_t>(ProblemKind::kNormalization);
  problem.count = count, problem.n = n, problem.m = n;
  problem.logits = logits.data(), problem.cotangent = cotangent.data();
  problem.plan = plan.data(), problem.gradient_logits = gradient.data();
  problem.max_iterations = 20;

  Solve(problem);

  for (int64_t member = 0; member < count; ++member) {
    const int64_t begin = member * n * n, end = begin + n * n;
    oracle::Normalization same;
    same.n = n, same.m = n, same.iterations = 20, same.recipe = LogRowColumnRecipe();
    same.logits = Wide({logits.begin() + begin, logits.begin() + end});
    const Vector expected = Normalize(same);
    const Vector expected_gradient = UnrolledGradient(same, Wide({cotangent.begin() + begin, cotangent.begin() + end}));
    for (int64_t k = 0; k < n * n; ++k) {
      EXPECT_NEAR(plan[begin + k], expected[k], 1e-6);
      EXPECT_NEAR(gradient[begin + k], expected_gradient[k], 1e-6);
    }
  }
}

TEST(CeilingsTest, AreRates) {
  EXPECT_GT(FmaRate(1), 1e8);
  EXPECT_GT(ExpRate(1), 1e7);
  EXPECT_GT(ReadRate(1, 1 << 16), 1e8);
}

}  // namespace
}  // namespace sinkhorn::bench
