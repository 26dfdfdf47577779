#include "tests/conformance/device_sizes.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/conformance/check.h"
#include "tests/conformance/company.h"

namespace sinkhorn::conformance {

std::vector<Case> CasesOf(const std::vector<LargeShape>& shapes) {
  std::vector<Case> cases;
  for (const LargeShape& of : shapes) {
    const int k = static_cast<int>(cases.size());
    const int64_t n = of.n / kShorter, m = of.m / kShorter;
    oracle::Transport problem =
        of.dim == 0 ? RandomDense(n, m, of.epsilon, 70 + k) : RandomClouds(n, m, of.dim, of.epsilon, 70 + k);
    if (k % 2 == 1) {
      problem.a[4] += problem.a[0], problem.a[0] = 0;
      problem.b[6] += problem.b[13], problem.b[13] = 0;
    }
    Case c = CaseOf(problem, absl::StrCat(n, " x ", m, " d ", of.dim, " eps ", of.epsilon));
    c.solver().max_iterations = of.iterations;
    c.solver().precision = of.precision;
    c.solver().tolerance = of.tolerance;
    c.solver().rho_a = c.solver().rho_b = of.rho;
    c.problem.transport.point_cost = of.cost;
    c.wanted = kPotentials;
    c.output_dtype = DType::kFloat64;
    cases.push_back(c);
  }
  return cases;
}

Case Members(const LargeShape& of, int64_t count, double spread, Random* random) {
  const std::string name = absl::StrCat(of.n, " x ", of.m, " d ", of.dim, " spread ", spread, " to ", of.tolerance);
  Case c = CaseOf(RandomClouds(of.n, of.m, of.dim, of.epsilon, 90), name);
  Vector x = random->Uniforms(count * of.n * of.dim, 0, 1);
  for (int64_t i = of.n * of.dim; i < 2 * of.n * of.dim; ++i) x[i] *= spread;
  c.problem.count = count;
  c.x = Tensor::Of(x);
  c.y = Tensor::Shared(random->Uniforms(of.m * of.dim, 0, 1));
  c.a = Tensor::Shared(random->Masses(of.n));
  c.b = Tensor::Shared(random->Masses(of.m));
  c.solver().max_iterations = of.iterations;
  c.solver().precision = of.precision;
  c.solver().tolerance = of.tolerance;
  c.wanted = kPotentials | kGradientPoints;
  return c;
}

void AddDebiased(std::vector<Case>* cases, size_t step) {
  const size_t plain = cases->size();
  for (size_t k = 0; k < plain; k += step) {
    Case c = (*cases)[k];
    c.solver().debias = c.problem.kind == ProblemKind::kPointCloud;
    c.name += ", debiased";
    if (c.solver().debias) cases->push_back(c);
  }
}

Answer DeviceSizesTest::Solution(Case c) {
  c.solver().precision = Precision::kDouble;
  c.solver().tolerance = 1e-7;
  c.solver().max_iterations = 5000;
  const Answer answer = SolveAlone(backend(), c);
  EXPECT_TRUE(answer.convergence[0].converged) << c.name;
  return answer;
}

std::vector<LargeShape> DeviceSizesTest::Chosen(std::vector<LargeShape> shapes, size_t few) const {
  if (!is_gpu()) shapes.resize(std::min(few, shapes.size()));
  return shapes;
}

void DeviceSizesTest::ExpectRightTogetherAndAlone(const std::vector<Case>& cases) {
  const std::vector<const Case*> order = PointersTo(cases);
  const std::vector<Answer> together = SolveTogether(backend(), order);
  ExpectSameBits(order, together, AllAlone(backend(), order));
  if (is_gpu()) ExpectSameBits(order, SolveTogether(backend(), order, 1e-5), together);
  for (size_t k = 0; k < cases.size(); ++k) {
    const bool fast = cases[k].solver().precision == Precision::kFast;
    Case exact = cases[k];
    exact.solver().precision = Precision::kDouble;
    // FAST: coordinates to 11 digits, of costs that are sums of many.
    const double room = fast ? 0.004 : 1e-3 * cases[k].solver().epsilon, error_room = fast ? 2e-3 : 1e-5;
    const Answer answer = SolveAlone(backend(), exact);
    EXPECT_LE(Distance(together[k], answer), room) << cases[k].name;
    const Convergence &got = together[k].convergence[0], &right = answer.convergence[0];
    EXPECT_NEAR(got.marginal_error_a, right.marginal_error_a, error_room + 0.02 * right.marginal_error_a)
        << cases[k].name;
    EXPECT_NEAR(got.marginal_error_b, right.marginal_error_b, error_room) << cases[k].name;
    EXPECT_EQ(got.iterations, right.iterations) << cases[k].name;
  }
}

void DeviceSizesTest::ExpectSolvedTogetherAndAlone(const std::vector<Case>& cases) {
  constexpr int kFew = 12;
  const std::vector<const Case*> order = PointersTo(cases);
  const std::vector<Answer> together = SolveTogether(backend(), order);
  ExpectSameBits(order, together, AllAlone(backend(), order));
  ExpectSameBits(order, SolveTogether(backend(), order, 1e-5), together);
  for (size_t k = 0; k < cases.size(); ++k) {
    const SolverOptions& solver = cases[k].solver();
    const Convergence& got = together[k].convergence[0];
    const bool limited = solver.max_iterations <= kFew;
    EXPECT_EQ(got.converged, !limited) << cases[k].name;
    EXPECT_EQ(got.iterations == solver.max_iterations, limited) << cases[k].name << " " << got.iterations;
    if (limited) continue;
    EXPECT_LE(std::max(got.marginal_error_a, got.marginal_error_b), solver.tolerance) << cases[k].name;
    // To float64 they are a solution as well; FAST rounds coordinates.
    if (solver.debias || (solver.precision == Precision::kFast && got.converged)) continue;
    Case exact = cases[k];
    exact.solver().precision = Precision::kDouble;
    exact.solver().tolerance = 1.5 * solver.tolerance;
    exact.solver().max_iterations = 2;
    exact.solver().epsilon_decay = 0;
    exact.initial_f = Tensor::Of(together[k].f.values(), DType::kFloat64);
    exact.initial_g = Tensor::Of(together[k].g.values(), DType::kFloat64);
    EXPECT_TRUE(SolveAlone(backend(), exact).convergence[0].converged) << cases[k].name;
  }
}

}  // namespace sinkhorn::conformance
