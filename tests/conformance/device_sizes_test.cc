// Sizes for which a GPU has ways of its own, one chip for a problem, all of them, launches of many iterations: each is
// as right as float64 says, or has met its tolerance, and has the same bits alone, in company, in slices of any length
// and as a member.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/conformance/backends.h"
#include "tests/conformance/case.h"
#include "tests/conformance/check.h"
#include "tests/conformance/company.h"
#include "tests/conformance/random_problems.h"
#include "tests/oracle/linear_algebra.h"

namespace sinkhorn::conformance {
namespace {

// Under a sanitizer sides are so much shorter: no GPU is there, others have no ways of their own for these sizes, and
// all pairs would take it ten minutes.
#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t kShorter = 4;
#else
constexpr int64_t kShorter = 1;
#endif

// Problems for which it takes a whole GPU, or a part of it. Every other one has points or costs without mass.
struct LargeShape {
  int64_t n, m, dim;  // No dim: costs.
  double epsilon;
  int iterations;
  Precision precision;
  double tolerance = 0;
  double rho = std::numeric_limits<double>::infinity();
  PointCost cost = PointCost::kSquaredEuclidean;
};
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

// Members with points of their own, the second's spread out so much more.
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

// Every so many cases once more, debiased, unless they have costs.
void AddDebiased(std::vector<Case>* cases, size_t step) {
  const size_t plain = cases->size();
  for (size_t k = 0; k < plain; k += step) {
    Case c = (*cases)[k];
    c.solver().debias = c.problem.kind == ProblemKind::kPointCloud;
    c.name += ", debiased";
    if (c.solver().debias) cases->push_back(c);
  }
}

class DeviceSizesTest : public ConformanceTest {
 protected:
  // To float64.
  Answer Solution(Case c) {
    c.solver().precision = Precision::kDouble;
    c.solver().tolerance = 1e-7;
    c.solver().max_iterations = 5000;
    const Answer answer = SolveAlone(backend(), c);
    EXPECT_TRUE(answer.convergence[0].converged) << c.name;
    return answer;
  }

  bool is_gpu() const { return GetParam() == "cuda"; }
  // Of many iterations, other backends than a GPU, without ways of their own for sizes, try a few.
  std::vector<LargeShape> Chosen(std::vector<LargeShape> shapes, size_t few) const {
    if (!is_gpu()) shapes.resize(std::min(few, shapes.size()));
    return shapes;
  }

  // On a GPU, however long slices are.
  void ExpectRightTogetherAndAlone(const std::vector<LargeShape>& shapes) {
    ExpectRightTogetherAndAlone(CasesOf(shapes));
  }
  void ExpectRightTogetherAndAlone(const std::vector<Case>& cases) {
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

  // The same of those with a tolerance, at which they stop wherever they are, or else, if iterations are few, when all
  // of them are done.
  void ExpectSolvedTogetherAndAlone(const std::vector<Case>& cases) {
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
      exact.initial_f = Tensor::Of(together[k].f.values(), DType::kFloat64);
      exact.initial_g = Tensor::Of(together[k].g.values(), DType::kFloat64);
      EXPECT_TRUE(SolveAlone(backend(), exact).convergence[0].converged) << cases[k].name;
    }
  }
};

// Problems of all widths that a GPU solves on its chip, of some of which more than it has at once: those that come one
// after the other in the same blocks, and beside each other, are strangers, and iterate as float64 does.
TEST_P(DeviceSizesTest, EveryWidth) {
  std::vector<Case> cases;
  for (int64_t rows = 160; rows <= 1024; rows += 54) {
    for (const int64_t columns : {310, 700}) {
      const int k = static_cast<int>(cases.size());
      const oracle::Transport problem = k % 3 == 0 ? RandomDense(rows, columns, 0.2, 50 + k)
                                                   : RandomClouds(rows, columns, k % 2 == 0 ? 3 : 40, 0.2, 50 + k);
      Case c = CaseOf(problem, absl::StrCat(k % 3 == 0 ? "dense " : "clouds ", rows, " x ", columns));
      if (k % 3 == 2 && k % 4 == 0) c.problem.transport.point_cost = PointCost::kEuclidean;
      c.solver().max_iterations = 6;
      c.wanted = kPotentials;
      c.output_dtype = DType::kFloat64;
      cases.push_back(c);
    }
  }
  const size_t plain = cases.size();
  for (size_t k = 0; k < plain; ++k) {
    Case exact = cases[k], judged = cases[k];
    exact.solver().precision = Precision::kDouble;
    judged.solver().tolerance = 1e-3;
    judged.solver().max_iterations = 40;
    if (k % 2 == 0) judged.solver().rho_a = 1;
    cases.push_back(exact);
    cases.push_back(judged);
  }
  const std::vector<const Case*> order = PointersTo(cases);
  const std::vector<Answer> together = SolveTogether(backend(), order);
  ExpectSameBits(order, together, AllAlone(backend(), order));
  for (size_t k = 0; k < plain; ++k) {
    EXPECT_LE(Distance(together[k], together[plain + 2 * k]), 1e-3 * cases[k].solver().epsilon) << cases[k].name;
  }
}

// Its chip has room for their densities; some move so far from where they began that those are made again.
TEST_P(DeviceSizesTest, SizesThatFillAGpu) {
  constexpr Precision kStrict = Precision::kStrict, kFast = Precision::kFast;
  ExpectRightTogetherAndAlone({{1100, 1300, 40, 0.2, 12, kStrict},
                               {2150, 1060, 20, 0.2, 12, kFast},
                               {1030, 2100, 64, 0.05, 30, kFast},
                               {1300, 1025, 18, 0.01, 40, kStrict},
                               {1500, 1404, 0, 0.05, 12, kStrict},
                               {600, 3600, 0, 0.02, 12, kStrict},
                               {1100, 1201, 17, 0.004, 25, kFast},
                               {1700, 1281, 0, 0.004, 25, kStrict},
                               {3300, 2900, 3, 0.05, 12, kStrict},
                               {1200, 1300, 2, 0.05, 12, kFast},
                               {900, 1100, 40, 0.2, 12, kStrict},
                               {1030, 512, 3, 0.05, 12, kStrict},
                               {520, 2300, 20, 0.1, 12, kFast},
                               {700, 1033, 0, 0.05, 12, kStrict}});
}

// Exponents that need float64, of which it holds floats in a frame for some iterations each; of the last ones sums
// leave what floats hold again and again, while those of others do not.
TEST_P(DeviceSizesTest, FramesThatFillAGpu) {
  constexpr Precision kStrict = Precision::kStrict;
  std::vector<Case> fixed = CasesOf(Chosen({{1100, 1300, 40, 0.01, 75, kStrict},
                                            {1030, 1040, 2, 0.001, 90, kStrict},
                                            {1500, 1404, 0, 0.001, 33, kStrict},
                                            {2100, 2500, 3, 0.002, 140, kStrict},
                                            {1700, 1281, 20, 0.01, 200, kStrict},
                                            {3300, 2900, 3, 0.003, 20, kStrict},
                                            {1025, 1150, 3, 3e-5, 60, kStrict},
                                            {1100, 2300, 30, 1e-4, 50, kStrict},
                                            {600, 1800, 3, 0.002, 40, kStrict},
                                            {1100, 520, 30, 0.01, 70, kStrict}},
                                           1));
  AddDebiased(&fixed, 1);
  ExpectRightTogetherAndAlone(fixed);
  const std::vector<LargeShape> shapes = {
      {1100, 1300, 40, 0.02, 2000, kStrict, 1e-4},      {1030, 1040, 2, 0.003, 2000, kStrict, 1e-5},
      {1500, 1404, 0, 0.002, 2000, kStrict, 1e-4, 0.5}, {2100, 2500, 3, 0.005, 2000, kStrict, 1e-5},
      {1700, 1281, 20, 0.01, 12, kStrict, 1e-6},        {1100, 2100, 3, 0.005, 2000, kStrict, 1e-5, 0.2},
      {900, 1100, 40, 0.02, 2000, kStrict, 1e-4}};
  std::vector<Case> cases = CasesOf(Chosen(shapes, 1));
  if (cases.size() > 1) cases[1].solver().over_relaxation = false;
  AddDebiased(&cases, 1);
  ExpectSolvedTogetherAndAlone(cases);
}

// Costs of any type, and rows of any length, which it copies where they are not floats in fours: held, looped, swept,
// with and without float64's exponents, a member's own and shared.
TEST_P(DeviceSizesTest, CostsOfEveryType) {
  constexpr Precision kStrict = Precision::kStrict;
  const std::vector<LargeShape> shapes = Chosen({{1100, 1027, 0, 0.05, 12, kStrict},
                                                 {1500, 1404, 0, 0.05, 12, kStrict},
                                                 {2300, 1025, 0, 0.001, 20, kStrict},
                                                 {1030, 2310, 0, 0.02, 3, kStrict},
                                                 {1050, 4499, 0, 0.05, 12, kStrict},
                                                 {500, 4300, 0, 0.05, 12, kStrict}},
                                                1);
  for (DType type : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16}) {
    std::vector<Case> cases = CasesOf(shapes);
    for (size_t k = 0; k < cases.size(); ++k) cases[k].cost = Tensor::Of(cases[k].cost.values(), type);
    cases.push_back(cases.back());
    cases.back().solver().update_rule = UpdateRule::kSymmetric;
    cases.push_back(cases[0]);
    cases.back().solver().rho_a = 1;
    ExpectRightTogetherAndAlone(cases);
    Random random(15);
    Case members = cases[0];
    const int64_t count = 3, size = members.problem.n * members.problem.m;
    members.problem.count = count;
    members.cost = Tensor::Of(random.Uniforms(count * size, 0, 1), type);
    members.a = Tensor::Shared(members.a.values());
    members.b = Tensor::Shared(members.b.values());
    ExpectMembersAreProblems(backend(), members);
    members.cost = Tensor::Shared(random.Uniforms(size, 0, 1), type);
    members.a = Tensor::Of(random.Uniforms(count * members.problem.n, 0.5, 1));
    members.solver().rho_b = 1;
    ExpectMembersAreProblems(backend(), members);
  }
}

// The same with relaxed marginals, which float64 damps alike.
TEST_P(DeviceSizesTest, RelaxedSizesThatFillAGpu) {
  constexpr Precision kStrict = Precision::kStrict, kFast = Precision::kFast;
  const double inf = std::numeric_limits<double>::infinity();
  const double rhos[][2] = {{1, 1}, {0.3, inf}, {inf, 2}, {0.05, 0.1}, {20, 5}};
  std::vector<Case> cases = CasesOf({{1100, 1300, 40, 0.2, 12, kStrict},
                                     {2150, 1060, 20, 0.2, 12, kFast},
                                     {1500, 1404, 0, 0.05, 12, kStrict},
                                     {1030, 2100, 64, 0.1, 30, kStrict},
                                     {3300, 2900, 3, 0.05, 12, kStrict},
                                     {1300, 1025, 18, 0.01, 40, kStrict}});
  for (size_t k = 0; k < cases.size(); ++k) {
    cases[k].solver().rho_a = rhos[k % 5][0], cases[k].solver().rho_b = rhos[k % 5][1];
  }
  const std::vector<const Case*> order = PointersTo(cases);
  const std::vector<Answer> together = SolveTogether(backend(), order);
  ExpectSameBits(order, together, AllAlone(backend(), order));
  for (size_t k = 0; k < cases.size(); ++k) {
    Case exact = cases[k];
    exact.solver().precision = Precision::kDouble;
    const bool fast = cases[k].solver().precision == kFast;
    const Answer answer = SolveAlone(backend(), exact);
    EXPECT_LE(Distance(together[k], answer), fast ? 0.004 : 1e-3 * cases[k].solver().epsilon) << cases[k].name;
    const Convergence &got = together[k].convergence[0], &right = answer.convergence[0];
    EXPECT_NEAR(got.marginal_error_a, right.marginal_error_a, 0.02 * right.marginal_error_a + 1e-4) << cases[k].name;
    EXPECT_NEAR(got.marginal_error_b, right.marginal_error_b, 1e-4) << cases[k].name;
  }
}

// And with a tolerance.
TEST_P(DeviceSizesTest, TolerancesAtSizesThatFillAGpu) {
  constexpr Precision kStrict = Precision::kStrict, kFast = Precision::kFast;
  const std::vector<LargeShape> shapes = {
      {1100, 1300, 40, 0.2, 300, kStrict, 1e-5},  //
      {2100, 1060, 20, 0.2, 400, kFast, 1e-5},        {1300, 1025, 18, 0.02, 900, kStrict, 1e-4},
      {1500, 1404, 0, 0.05, 400, kStrict, 1e-5, 0.5}, {600, 3600, 0, 0.02, 400, kStrict, 1e-3},
      {3300, 2900, 3, 0.05, 300, kStrict, 1e-5},      {4100, 4001, 64, 0.1, 400, kStrict, 1e-5},
      {1200, 1300, 2, 0.01, 11, kStrict, 1e-6},       {1100, 1201, 17, 0.004, 700, kFast, 1e-4},
      {1700, 1281, 0, 0.004, 6, kStrict, 1e-6},       {900, 1100, 40, 0.2, 300, kStrict, 1e-5},
      {1100, 520, 3, 0.05, 300, kFast, 1e-5},         {700, 1033, 0, 0.02, 900, kStrict, 1e-4, 0.5}};
  std::vector<Case> cases = CasesOf(Chosen(shapes, 2));
  cases[0].solver().over_relaxation = false;
  ExpectSolvedTogetherAndAlone(cases);
}

// Of debiased ones it holds the densities of all three problems; some move so far that theirs are made again.
TEST_P(DeviceSizesTest, DebiasedSizesThatFillAGpu) {
  constexpr Precision kStrict = Precision::kStrict, kFast = Precision::kFast;
  std::vector<Case> cases = CasesOf(Chosen({{1100, 1300, 40, 0.2, 12, kStrict},
                                            {2150, 1060, 20, 0.2, 12, kFast},
                                            {1030, 2100, 64, 0.05, 30, kStrict},
                                            {1300, 1025, 18, 0.02, 40, kStrict},
                                            {3300, 2900, 3, 0.05, 12, kStrict},
                                            {1200, 1300, 2, 0.05, 12, kFast},
                                            {1100, 1201, 17, 0.03, 25, kStrict},
                                            {1056, 1056, 3, 0.02, 9, kStrict},
                                            {1025, 4096, 3, 0.05, 7, kStrict},
                                            {4096, 2048, 64, 0.1, 8, kStrict},
                                            {600, 1500, 3, 0.05, 12, kStrict},
                                            {1100, 520, 40, 0.2, 12, kFast}},
                                           1));
  for (Case& c : cases) c.solver().debias = true;
  const size_t plain = cases.size();
  const double inf = std::numeric_limits<double>::infinity();
  const double rhos[][2] = {{1, 1}, {0.3, inf}, {inf, 2}, {0.05, 0.1}, {20, 5}};
  for (size_t k = 0; k < plain; k += 2) {
    cases.push_back(cases[k]);
    cases.back().solver().rho_a = rhos[k / 2 % 5][0], cases.back().solver().rho_b = rhos[k / 2 % 5][1];
    cases.back().name += ", relaxed";
  }
  ExpectRightTogetherAndAlone(cases);
}

// Updates of both sides at once: as many as were asked for, to the marginals and relaxed, then to a tolerance; points
// without mass move as others do.
TEST_P(DeviceSizesTest, SymmetricSizesThatFillAGpu) {
  constexpr Precision kStrict = Precision::kStrict, kFast = Precision::kFast;
  const auto symmetric = [](std::vector<Case> cases) {
    AddDebiased(&cases, 2);
    for (Case& c : cases) c.solver().update_rule = UpdateRule::kSymmetric;
    return cases;
  };
  ExpectRightTogetherAndAlone(symmetric(CasesOf(Chosen({{1100, 1300, 40, 0.2, 12, kStrict},
                                                        {2150, 1060, 20, 0.2, 12, kFast},
                                                        {1030, 2100, 64, 0.05, 30, kStrict},
                                                        {1300, 1025, 18, 0.02, 40, kStrict},
                                                        {3300, 2900, 3, 0.05, 12, kStrict},
                                                        {1500, 1404, 0, 0.05, 12, kStrict},
                                                        {1100, 2300, 20, 0.2, 12, kStrict, 0, 0.5},
                                                        {600, 3600, 0, 0.02, 12, kStrict},
                                                        {900, 1100, 40, 0.2, 12, kStrict},
                                                        {1100, 1300, 40, 0.01, 75, kStrict},
                                                        {1700, 1281, 0, 0.004, 25, kStrict, 0, 0.5}},
                                                       1))));
  ExpectSolvedTogetherAndAlone(symmetric(CasesOf(Chosen({{1100, 1300, 40, 0.2, 600, kStrict, 1e-5},
                                                         {2100, 1060, 20, 0.2, 600, kFast, 1e-5},
                                                         {1300, 1025, 18, 0.05, 2000, kStrict, 1e-4},
                                                         {1500, 1404, 0, 0.05, 900, kStrict, 1e-5, 0.5},
                                                         {3300, 2900, 3, 0.05, 600, kStrict, 1e-5},
                                                         {1200, 1300, 2, 0.01, 11, kStrict, 1e-6}},
                                                        1))));
}

// The same with tolerances; of larger ones it sweeps x and y in launches of many iterations, before the others.
TEST_P(DeviceSizesTest, DebiasedSizesOfAGpu) {
  constexpr Precision kStrict = Precision::kStrict, kFast = Precision::kFast;
  std::vector<LargeShape> shapes = {
      {1100, 1300, 40, 0.2, 300, kStrict, 1e-5}, {2100, 1060, 3, 0.05, 400, kStrict, 1e-5},
      {3300, 2900, 3, 0.02, 300, kStrict, 1e-5}, {1200, 1500, 64, 0.1, 400, kStrict, 1e-5, 0.5},
      {4100, 4001, 64, 0.1, 400, kStrict, 1e-5}, {1100, 2500, 20, 0.05, 12, kStrict, 1e-6},
      {2100, 1060, 20, 0.2, 400, kFast, 1e-5},   {4300, 1100, 64, 0.1, 300, kStrict, 1e-5},
      {1100, 4300, 3, 0.02, 300, kStrict, 1e-5}, {4500, 4400, 64, 0.1, 400, kStrict, 1e-5},
      {1100, 4300, 3, 0.05, 9, kStrict, 1e-5},   {4300, 1100, 64, 0.1, 300, kFast, 1e-4}};
  if (!is_gpu()) shapes = {{130, 150, 40, 0.2, 300, kStrict, 1e-5}};
  std::vector<Case> cases = CasesOf(shapes);
  for (Case& c : cases) c.solver().debias = true;
  ExpectSolvedTogetherAndAlone(cases);
  for (const Case& c : cases) {
    if (c.solver().max_iterations < 100 || c.solver().precision == kFast) continue;
    const Answer got = SolveAlone(backend(), c), right = Solution(c);
    EXPECT_NEAR(got.value[0], right.value[0], 1e-5 * std::max(1.0, std::abs(right.value[0]))) << c.name;
  }
}

// It has not, and sweeps them in launches of many iterations; some move too far for that, so that others have to go on.
TEST_P(DeviceSizesTest, SizesThatAGpuSweeps) {
  constexpr Precision kStrict = Precision::kStrict, kFast = Precision::kFast;
  ExpectRightTogetherAndAlone({{1100, 4300, 20, 0.2, 12, kFast},
                               {4300, 1100, 64, 0.1, 12, kStrict},
                               {1025, 6300, 64, 0.2, 11, kFast},
                               {4500, 2060, 3, 0.02, 30, kStrict},
                               {1030, 9900, 2, 0.05, 12, kFast},
                               {1100, 4400, 0, 0.03, 12, kStrict},
                               {1200, 5000, 3, 0.004, 40, kStrict},
                               {4700, 1201, 17, 0.004, 24, kFast},
                               {1100, 4300, 3, 0.001, 30, kStrict},
                               {1100, 4300, 30, 0.004, 30, kFast}});
}

TEST_P(DeviceSizesTest, TolerancesAtSizesThatAGpuSweeps) {
  constexpr Precision kStrict = Precision::kStrict, kFast = Precision::kFast;
  const std::vector<LargeShape> shapes = {
      {1025, 4300, 20, 0.2, 300, kFast, 1e-5},    {4300, 1100, 64, 0.1, 300, kStrict, 1e-5},
      {1025, 6300, 64, 0.2, 300, kFast, 1e-5},    {4500, 2060, 3, 0.02, 900, kStrict, 1e-5},
      {1030, 9900, 2, 0.05, 400, kFast, 1e-5},    {1100, 4400, 0, 0.03, 400, kStrict, 1e-5},
      {1200, 5000, 3, 0.004, 900, kStrict, 1e-4}, {4300, 1400, 3, 0.004, 900, kFast, 1e-3},
      {1100, 4300, 3, 0.001, 12, kStrict, 1e-5},  {4500, 4400, 40, 0.1, 400, kStrict, 1e-5},
      {1100, 4300, 40, 0.1, 300, kStrict, 1e-6},  {1100, 4300, 30, 0.02, 9, kStrict, 1e-5},
      {1100, 4300, 30, 5, 300, kStrict, 1e-3},    {1100, 4300, 30, 0.004, 700, kFast, 1e-3}};
  std::vector<Case> cases = CasesOf(Chosen(shapes, 1));
  if (cases.size() > 1) cases[9].solver().over_relaxation = false;
  ExpectSolvedTogetherAndAlone(cases);
}

// Distances, whose exponents are kept as those of squares are; of near points they are made from coordinates.
TEST_P(DeviceSizesTest, DistancesAtSizesOfAGpu) {
  constexpr Precision kStrict = Precision::kStrict, kFast = Precision::kFast;
  constexpr PointCost kEuclidean = PointCost::kEuclidean;
  const double inf = std::numeric_limits<double>::infinity();
  std::vector<LargeShape> shapes = {{1100, 1300, 40, 0.2, 12, kStrict}, {2150, 1060, 3, 0.05, 12, kFast},
                                    {1100, 4300, 2, 0.05, 12, kStrict}, {4300, 1100, 64, 0.1, 12, kStrict},
                                    {1025, 6300, 200, 0.2, 11, kFast},  {1300, 1100, 1, 0.02, 30, kStrict}};
  for (LargeShape& of : shapes) of.cost = kEuclidean;
  ExpectRightTogetherAndAlone(Chosen(shapes, 1));
  shapes = {{1100, 1300, 3, 0.05, 400, kStrict, 1e-5, inf, kEuclidean},
            {1100, 4300, 20, 0.1, 400, kStrict, 1e-5, inf, kEuclidean},
            {1500, 1404, 2, 0.05, 400, kFast, 1e-5, 0.5, kEuclidean},
            {4300, 1400, 3, 0.02, 9, kStrict, 1e-6, inf, kEuclidean}};
  std::vector<Case> cases = CasesOf(Chosen(shapes, 1));
  ExpectSolvedTogetherAndAlone(cases);
  for (Case& c : cases) c.solver().debias = true;
  ExpectSolvedTogetherAndAlone(cases);
}

// More columns than that, of FAST: it makes densities anew in each iteration, once for rows and columns.
TEST_P(DeviceSizesTest, SizesThatAGpuMultiplies) {
  constexpr Precision kFast = Precision::kFast;
  ExpectRightTogetherAndAlone({{1100, 14100, 50, 0.2, 5, kFast},
                               {1030, 17000, 20, 0.2, 5, kFast},
                               {1024, 26000, 3, 0.05, 5, kFast},
                               {1030, 43000, 40, 0.2, 4, kFast},
                               {1100, 14300, 30, 0.004, 8, kFast}});
}

// Epsilons for which a GPU takes float64, of clouds that share launches: those of few coordinates may need more room
// than those of many.
TEST_P(DeviceSizesTest, SmallEpsilonsOfAllDimensions) {
  std::vector<Case> cases;
  for (int64_t dim : {100, 64, 4, 33, 50, 65}) {
    for (bool products : {false, true}) {
      Case c = CaseOf(RandomClouds(1100 / kShorter, 70, dim, 2e-5 * dim, 62),
                      absl::StrCat("d ", dim, products ? ", Hessian-vector products" : ""));
      c.solver().max_iterations = 3;
      c.wanted = kPotentials | kSums | kGradientPoints;
      if (products) {
        c.problem.transport.hessian.count = 2;
        c.problem.transport.hessian.max_iterations = 2;
        c.direction_x = Tensor::Of(Random(63).Normals(2 * c.problem.n * dim, 1));
      }
      cases.push_back(c);
    }
  }
  const std::vector<const Case*> order = PointersTo(cases);
  ExpectSameBits(order, SolveTogether(backend(), order), AllAlone(backend(), order));
}

// All ways to a point are as long, or all ways from one: nothing is left for launches of many iterations but to
// measure, whether those come in the same slice or later.
TEST_P(DeviceSizesTest, EndsWithTheFirstIteration) {
  std::vector<Case> cases;
  for (Precision precision : {Precision::kStrict, Precision::kFast}) {
    for (int64_t dim : {1, 2, 20}) {
      for (bool to_one_place : {false, true}) {
        oracle::Transport problem = RandomClouds(3300 / kShorter, dim < 20 ? 11 : 4300 / kShorter, dim, 0.5, 60);
        for (double& x : to_one_place ? problem.y : problem.x) x = 0.5;
        Case c = CaseOf(problem, absl::StrCat("d ", dim, to_one_place ? ", to" : ", from", " one place, precision ",
                                              static_cast<int>(precision)));
        c.solver().max_iterations = 125;
        c.solver().tolerance = 1e-5;
        c.solver().precision = precision;
        if (dim == 1) c.problem.transport.point_cost = PointCost::kCosine;
        c.wanted = kPotentials | kSums;
        cases.push_back(c);
      }
    }
  }
  const std::vector<const Case*> order = PointersTo(cases);
  const std::vector<Answer> alone = AllAlone(backend(), order);
  ExpectSameBits(order, SolveTogether(backend(), order, 1e-5), alone);
  for (size_t k = 0; k < cases.size(); ++k) {
    // Of many coordinates a GPU keeps exponents, which may be rounded otherwise than the first iteration's: one more.
    const bool keeps = is_gpu() && cases[k].problem.dim > 2;
    EXPECT_LE(alone[k].convergence[0].iterations, keeps ? 3 : 2) << cases[k].name;
  }
}

// FAST rounds coordinates, and densities that it holds or sweeps: a bound allows for that, and says something still.
TEST_P(DeviceSizesTest, FastBoundsHold) {
  constexpr Precision kFast = Precision::kFast;
  const std::vector<LargeShape> shapes = {{300, 250, 40, 0.05, 300, kFast},  {700, 900, 3, 0.01, 500, kFast},
                                          {1100, 1300, 40, 0.1, 200, kFast}, {2150, 1060, 20, 0.05, 300, kFast},
                                          {1100, 4300, 20, 0.1, 200, kFast}, {4300, 1100, 64, 0.2, 200, kFast}};
  for (const Case& c : CasesOf(Chosen(shapes, 1))) {
    const Answer got = SolveAlone(backend(), c), right = Solution(c);
    EXPECT_LE(got.dual_bound[0], right.value[0] + 1e-6) << c.name;
    EXPECT_GE(got.dual_bound[0], right.value[0] - c.solver().epsilon) << c.name;
  }
}

// Whatever a GPU does with problems of their size, iterations by launches of many included. One member is so spread out
// that it may need another way than its neighbours.
TEST_P(DeviceSizesTest, MembersOfEverySize) {
  if (!is_gpu()) GTEST_SKIP() << "sizes of a GPU";
  constexpr Precision kStrict = Precision::kStrict, kFast = Precision::kFast;
  constexpr int64_t kCount = 3;
  const std::vector<LargeShape> shapes = {
      {300, 200, 20, 0.1, 40, kStrict},          {1100, 1300, 40, 0.1, 600, kStrict},
      {1100, 1060, 3, 0.05, 600, kFast},         {1100, 4300, 20, 0.1, 400, kFast},
      {1100, 1300, 40, 0.1, 60, kStrict},        {1100, 1060, 20, 0.05, 60, kFast},
      {1030, 4400, 3, 0.05, 300, kStrict},       {1030, 14100, 30, 0.1, 150, kFast},
      {1100, 1000, 40, 0.02, 20, kStrict},       {1030, 80, 3, 1e-3, 20, kStrict},
      {1100, 1300, 40, 0.1, 400, kStrict, 1e-5}, {1100, 2500, 20, 0.1, 400, kStrict, 1e-5},
      {1100, 4300, 20, 0.1, 400, kFast, 1e-5},   {1030, 4400, 3, 0.05, 300, kStrict, 1e-5},
      {1100, 4300, 64, 0.1, 400, kStrict, 1e-5}, {1100, 1300, 40, 0.01, 300, kStrict, 1e-5},
      {1100, 1060, 3, 0.003, 150, kStrict},      {1100, 2500, 3, 0.003, 75, kStrict},
      {900, 1100, 40, 0.1, 60, kStrict},         {1100, 600, 3, 0.05, 300, kStrict, 1e-5}};
  Random random(12);
  for (const LargeShape& of : shapes) {
    for (double spread : {1.0, 4.0}) {
      Case c = Members(of, kCount, spread, &random);
      ExpectMembersAreProblems(backend(), c);
      c.solver().debias = of.tolerance > 0 || of.m <= 2500;
      if (c.solver().debias) ExpectMembersAreProblems(backend(), c);
      c.solver().update_rule = UpdateRule::kSymmetric;
      if (of.m <= 2500) ExpectMembersAreProblems(backend(), c);
    }
  }
}

// So many members that a GPU deals with them in other ways than with one: each prepared by one block, and tiles of a
// gradient not shared out.
TEST_P(DeviceSizesTest, ManyMembers) {
  constexpr Precision kStrict = Precision::kStrict, kFast = Precision::kFast;
  const std::vector<std::pair<LargeShape, int64_t>> all = {
      {{60, 50, 3, 0.1, 10, kStrict}, 140},    {{40, 45, 20, 0.1, 10, kFast}, 140},
      {{130, 70, 64, 0.1, 10, kStrict}, 140},  {{40, 45, 200, 0.5, 10, kStrict}, 140},
      {{70, 300, 20, 0.1, 10, kFast}, 140},    {{90, 100, 3, 1e-4, 10, kStrict}, 140},
      {{500, 390, 64, 0.1, 10, kStrict}, 40},  {{400, 1000, 5, 0.1, 10, kStrict}, 30},
      {{1000, 900, 20, 0.1, 10, kStrict}, 12}, {{770, 640, 40, 0.1, 10, kFast}, 20}};
  Random random(14);
  for (size_t k = 0; k < (is_gpu() ? all.size() : 2); ++k) {
    const auto& [of, count] = all[k];
    for (PointCost cost : {PointCost::kSquaredEuclidean, PointCost::kCosine, PointCost::kNegativeDot}) {
      Case c = Members(of, count, 4, &random);
      c.problem.transport.point_cost = cost;
      const Answer together = SolveAlone(backend(), c);
      for (int64_t index : {int64_t{0}, int64_t{1}, count / 2, count - 1}) {
        const Answer alone = SolveAlone(backend(), MemberCase(c, index));
        EXPECT_EQ(DifferenceInBits(MemberAnswer(together, index, count), alone), "")
            << c.name << ", cost " << static_cast<int>(cost) << ", member " << index;
      }
    }
  }
}

// Gradients and projections of sizes whose tiles a GPU cuts evenly, wherever that is inside a block of rows: as float64
// has them, alone and beside another. Of more than 64 coordinates from exponents that are kept, or that need float64.
TEST_P(DeviceSizesTest, GradientsThatFillAGpu) {
  if (!is_gpu()) GTEST_SKIP() << "sizes of a GPU";
  constexpr Precision kStrict = Precision::kStrict, kFast = Precision::kFast;
  Random random(15);
  for (const LargeShape& of : std::vector<LargeShape>{{4300, 4500, 64, 0.2, 5, kStrict},
                                                      {4300, 4500, 20, 0.1, 5, kFast},
                                                      {3000, 7001, 3, 0.05, 5, kStrict},
                                                      {8200, 7100, 40, 0.1, 5, kStrict},
                                                      {4400, 4150, 128, 0.5, 5, kStrict},
                                                      {4301, 4420, 100, 0.5, 5, kFast},
                                                      {1100, 13000, 150, 0.5, 5, kStrict},
                                                      {1500, 1701, 784, 3, 5, kStrict},
                                                      {4200, 4301, 50, 0.02, 5, kStrict}}) {
    for (PointCost cost : {PointCost::kSquaredEuclidean, PointCost::kCosine, PointCost::kNegativeDot}) {
      Case c = Members(of, 2, 2, &random);
      c.problem.transport.point_cost = cost;
      if (cost != PointCost::kSquaredEuclidean) {
        if (of.dim != 100 && of.dim != 128) continue;
        c.name += ", another cost";
      }
      c.wanted |= kProjections;
      ExpectMembersAreProblems(backend(), c);
      Case exact = c;
      exact.solver().precision = Precision::kDouble;
      const Answer got = SolveAlone(backend(), c), right = SolveAlone(backend(), exact);
      const double room = of.precision == kFast ? 5e-3 : 3e-5;
      for (const auto& [tensor, exact_tensor] : {std::make_pair(&got.gradient_x, &right.gradient_x),
                                                 {&got.gradient_y, &right.gradient_y},
                                                 {&got.projection_x, &right.projection_x},
                                                 {&got.projection_y, &right.projection_y}}) {
        const Vector expected = exact_tensor->values();
        ExpectClose(c.name, tensor->values(), expected, room * oracle::MaxAbs(expected));
      }
    }
  }
}

// Those that take a whole GPU each are solved a few a slice, so that others need not wait for all of them; asked to
// finish, those whose turn has not come have an answer too.
TEST_P(DeviceSizesTest, MembersTakeTurns) {
  if (!is_gpu()) GTEST_SKIP() << "sizes of a GPU";
  constexpr Precision kStrict = Precision::kStrict, kFast = Precision::kFast;
  constexpr int64_t kCount = 5;
  Random random(13);
  std::vector<Case> cases;
  cases.push_back(Members({1100, 1300, 40, 0.1, 400, kStrict, 1e-5}, 3 * kCount, 1, &random));
  for (const LargeShape& of : std::vector<LargeShape>{{1900, 1700, 40, 0.1, 400, kStrict, 1e-5},
                                                      {1500, 1100, 3, 0.003, 250, kStrict},
                                                      {1900, 1700, 3, 0.003, 900, kStrict, 1e-5},
                                                      {1100, 1060, 20, 0.05, 600, kFast},
                                                      {2100, 2300, 3, 0.05, 1500, kStrict},
                                                      {1100, 4300, 20, 0.1, 400, kFast, 1e-5},
                                                      {1030, 14100, 30, 0.1, 150, kFast},
                                                      {1030, 4400, 3, 0.05, 1000, kStrict},
                                                      {1030, 4400, 3, 0.05, 300, kStrict, 1e-5}}) {
    cases.push_back(Members(of, kCount, 1, &random));
    if (of.tolerance == 0 && of.m > 1500) continue;
    cases.push_back(cases.back());
    cases.back().solver().debias = true;
    cases.back().name += ", debiased";
  }
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    const Answer whole = SolveTogether(backend(), {&c}, 10)[0];
    int slices = 0;
    const Answer parts = SolveTogether(backend(), {&c}, 1e-5, [&](Solve*) { ++slices; })[0];
    EXPECT_EQ(DifferenceInBits(parts, whole), "");
    EXPECT_GT(slices, kCount / 2);
    const int64_t count = c.problem.count;
    int taken = 0;
    const Answer cut = SolveTogether(backend(), {&c}, 1e-5, [&](Solve* solve) {
      if (++taken == 2) solve->FinishSoon();
    })[0];
    ASSERT_TRUE(cut.status.ok()) << cut.status;
    int cut_short = 0;
    for (int64_t k = 0; k < count; ++k) {
      const Convergence& member = cut.convergence[k];
      if (member.stop_reason != StopReason::kTimeBudget) {
        EXPECT_EQ(DifferenceInBits(MemberAnswer(cut, k, count), MemberAnswer(whole, k, count)), "") << k;
        continue;
      }
      ++cut_short;
      EXPECT_GE(member.iterations, 1);
      EXPECT_LT(member.marginal_error_a, 1);
      EXPECT_LT(member.marginal_error_b, 1);
    }
    EXPECT_GT(cut_short, 0);
    EXPECT_TRUE(std::isfinite(Distance(cut, whole)));
  }
}

INSTANTIATE_ON_BACKENDS(DeviceSizesTest);

}  // namespace
}  // namespace sinkhorn::conformance
