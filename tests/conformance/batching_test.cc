// Batching is invisible: a problem's answer has the same bits alone, among a thousand strangers, in
// any order, in slices of any length, on one thread or two, and as a member of a larger batch.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/conformance/backends.h"
#include "tests/conformance/case.h"
#include "tests/conformance/random_problems.h"

namespace sinkhorn::conformance {
namespace {

DType RandomDType(Random* random) { return static_cast<DType>(random->Integer(0, 3)); }

Case RandomNormalizationCase(Random* random, uint64_t seed, int64_t largest) {
  const Recipe recipes[] = {LogRowColumnRecipe(), ExpColumnRowRecipe(), DeepSeekRecipe(), ExactRecipe()};
  const int64_t n = random->Integer(1, largest);
  const int64_t m = random->Chance(0.5) ? n : random->Integer(1, largest);
  const int kind = random->Integer(0, 3);
  Case c = CaseOf(RandomLogits(n, m, recipes[kind], random->Integer(1, 25), 1, seed),
                  absl::StrCat("normalisation ", n, " x ", m), RandomDType(random));
  if (kind == 3) c.solver().max_iterations = 200;
  c.problem.count = random->Integer(1, 20);
  c.logits = Tensor::Of(random->Normals(c.problem.count * n * m, 1.5), c.logits.dtype());
  if (kind < 3 && random->Chance(0.3)) c.solver().tolerance = 1e-3;
  const bool dustbin = random->Chance(0.2);
  if (dustbin) c.dustbin_score = Tensor::Shared({0.5});
  if (random->Chance(0.5)) {
    const int64_t size = dustbin ? (n + 1) * (m + 1) : n * m;
    c.cotangent = Tensor::Of(random->Normals(c.problem.count * size, 1));
    const bool unrolled = kind < 3 && random->Chance(0.5);
    c.problem.normalization.backward = unrolled ? BackwardMode::kUnrolled : BackwardMode::kImplicit;
  }
  return c;
}

Case RandomTransportCase(Random* random, uint64_t seed, int64_t largest) {
  const int64_t n = random->Integer(1, largest), m = random->Integer(1, largest);
  const double epsilon = std::exp(random->Uniform(std::log(0.01), 0));
  const bool dense = random->Chance(0.5);
  const int64_t dim = random->Integer(1, 9);
  Case c = CaseOf(dense ? RandomDense(n, m, epsilon, seed) : RandomClouds(n, m, dim, epsilon, seed),
                  absl::StrCat(dense ? "dense " : "clouds ", n, " x ", m));
  c.solver().max_iterations = random->Integer(1, 40);
  if (random->Chance(0.3)) c.solver().tolerance = 1e-3;
  if (random->Chance(0.3)) c.solver().update_rule = UpdateRule::kSymmetric;
  if (random->Chance(0.2)) c.solver().epsilon_decay = 0.5;
  if (random->Chance(0.3)) c.solver().rho_a = random->Uniform(0.1, 2);
  if (!dense && random->Chance(0.2)) c.solver().debias = true, c.solver().tolerance = 1e-4;
  if (random->Chance(0.3)) c.solver().precision = Precision::kDouble;
  c.wanted = kPotentials | (random->Chance(0.3) ? kPlan | kSums | kValueLinear | kGradientMasses : 0);
  if (!dense && random->Chance(0.3)) c.wanted |= kGradientPoints;
  if (!std::isfinite(c.solver().rho_a) && !c.solver().debias && random->Chance(0.2)) {
    c.wanted |= kPrimalBound;
  }
  c.output_dtype = random->Chance(0.5) ? DType::kFloat32 : DType::kFloat64;
  if (!dense && random->Chance(0.5)) c.problem.transport.point_cost = static_cast<PointCost>(random->Integer(1, 3));
  return c;
}

std::vector<Case> Strangers(int64_t count, int64_t largest, uint64_t seed) {
  Random random(seed);
  std::vector<Case> cases;
  for (int64_t k = 0; k < count; ++k) {
    cases.push_back(random.Chance(0.5) ? RandomNormalizationCase(&random, seed + k, largest)
                                       : RandomTransportCase(&random, seed + k, largest));
  }
  return cases;
}

std::vector<const Case*> PointersTo(const std::vector<Case>& cases) {
  std::vector<const Case*> pointers;
  for (const Case& c : cases) pointers.push_back(&c);
  return pointers;
}

void ExpectSameBits(const std::vector<const Case*>& cases, const std::vector<Answer>& actual,
                    const std::vector<Answer>& expected) {
  for (size_t k = 0; k < cases.size(); ++k) {
    EXPECT_EQ(DifferenceInBits(actual[k], expected[k]), "") << "problem " << k << ": " << cases[k]->name;
  }
}

// The largest difference of a potential.
double Distance(const Answer& answer, const Answer& exact) {
  double difference = 0;
  const auto compare = [&](const Vector& actual, const Vector& expected) {
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) {
      const double d = std::abs(actual[i] - expected[i]);
      difference = d <= difference ? difference : std::isfinite(d) ? d : INFINITY;  // No number is not forgotten.
    }
  };
  compare(answer.f.values(), exact.f.values());
  compare(answer.g.values(), exact.g.values());
  return difference;
}

// Problems for which it takes a whole GPU, or half of it. Every other one has points or costs without mass.
struct LargeShape {
  int64_t n, m, dim;  // No dim: costs.
  double epsilon;
  int iterations;
  Precision precision;
  double tolerance = 0;
  double rho = std::numeric_limits<double>::infinity();
};
std::vector<Case> CasesOf(const std::vector<LargeShape>& shapes) {
  std::vector<Case> cases;
  for (const LargeShape& of : shapes) {
    const int k = static_cast<int>(cases.size());
    oracle::Transport problem = of.dim == 0 ? RandomDense(of.n, of.m, of.epsilon, 70 + k)
                                            : RandomClouds(of.n, of.m, of.dim, of.epsilon, 70 + k);
    if (k % 2 == 1) {
      problem.a[4] += problem.a[0], problem.a[0] = 0;
      problem.b[6] += problem.b[13], problem.b[13] = 0;
    }
    Case c = CaseOf(problem, absl::StrCat(of.n, " x ", of.m, " d ", of.dim, " eps ", of.epsilon));
    c.solver().max_iterations = of.iterations;
    c.solver().precision = of.precision;
    c.solver().tolerance = of.tolerance;
    c.solver().rho_a = c.solver().rho_b = of.rho;
    c.wanted = kPotentials;
    c.output_dtype = DType::kFloat64;
    cases.push_back(c);
  }
  return cases;
}
class BatchingTest : public ConformanceTest {
 protected:
  std::vector<Answer> AllAlone(Backend* backend, const std::vector<const Case*>& cases) {
    std::vector<Answer> answers;
    for (const Case* c : cases) answers.push_back(SolveAlone(backend, *c));
    return answers;
  }

  void ExpectMembersAreProblems(const Case& c) {
    const int64_t count = c.problem.count;
    const Answer together = SolveAlone(backend(), c);
    if (!together.status.ok()) return;
    for (int64_t index = 0; index < count; ++index) {
      const Answer alone = SolveAlone(backend(), MemberCase(c, index));
      EXPECT_EQ(DifferenceInBits(MemberAnswer(together, index, count), alone), "")
          << c.name << ", member " << index << " of " << count;
    }
  }

  // `any_slices`: and however long slices are.
  void ExpectRightTogetherAndAlone(const std::vector<LargeShape>& shapes, bool any_slices = false) {
    const std::vector<Case> cases = CasesOf(shapes);
    const std::vector<const Case*> order = PointersTo(cases);
    const std::vector<Answer> together = SolveTogether(backend(), order);
    ExpectSameBits(order, together, AllAlone(backend(), order));
    if (any_slices) ExpectSameBits(order, SolveTogether(backend(), order, 1e-5), together);
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

TEST_P(BatchingTest, AThousandStrangers) {
  const std::vector<Case> cases = Strangers(1000, 24, 1);
  std::vector<const Case*> order = PointersTo(cases);
  const std::vector<Answer> alone = AllAlone(backend(), order);
  ExpectSameBits(order, SolveTogether(backend(), order), alone);

  std::vector<const Case*> reversed(order.rbegin(), order.rend());
  const std::vector<Answer> alone_reversed(alone.rbegin(), alone.rend());
  ExpectSameBits(reversed, SolveTogether(backend(), reversed), alone_reversed);
}

TEST_P(BatchingTest, RaggedAndLarger) {
  const std::vector<Case> cases = Strangers(30, 250, 2);
  const std::vector<const Case*> order = PointersTo(cases);
  ExpectSameBits(order, SolveTogether(backend(), order), AllAlone(backend(), order));
}

TEST_P(BatchingTest, ThousandsOfManyCoordinates) {
  std::vector<Case> cases = Strangers(10, 250, 11);
  const int rules = GetParam() == "cuda" ? 3 : 1;  // GPUs sweep symmetric updates and self-terms as well.
  for (int rule = 0; rule < rules; ++rule) {
    for (int k = 0; k < 4; ++k) {
      Case c = CaseOf(RandomClouds(1030 + 8 * k, 1100 - 9 * k, 20 + 40 * k, 0.1 + 0.1 * k, 12 + k),
                      absl::StrCat("large ", k, ", rule ", rule));
      c.solver().precision = k % 2 == 0 ? Precision::kStrict : Precision::kFast;
      c.solver().max_iterations = 5 + 3 * k;
      if (k >= 2) c.solver().tolerance = 1e-3;
      if (rule == 1) c.solver().update_rule = UpdateRule::kSymmetric;
      c.solver().debias = rule == 2;
      c.wanted = kPotentials | kGradientPoints;
      cases.insert(cases.begin() + 3 * k, c);
    }
  }
  const std::vector<const Case*> order = PointersTo(cases);
  const std::vector<Answer> alone = AllAlone(backend(), order);
  ExpectSameBits(order, SolveTogether(backend(), order), alone);
  ExpectSameBits(order, SolveTogether(backend(), order, 1e-5), alone);
}

// Problems of all widths that a GPU solves on its chip, of some of which more than it has at once: those that come one
// after the other in the same blocks, and beside each other, are strangers, and iterate as float64 does.
TEST_P(BatchingTest, EveryWidth) {
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
TEST_P(BatchingTest, SizesThatFillAGpu) {
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
                               {1200, 1300, 2, 0.05, 12, kFast}},
                              GetParam() == "cuda");
}

// The same with relaxed marginals, which float64 damps alike.
TEST_P(BatchingTest, RelaxedSizesThatFillAGpu) {
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
TEST_P(BatchingTest, TolerancesAtSizesThatFillAGpu) {
  constexpr Precision kStrict = Precision::kStrict, kFast = Precision::kFast;
  std::vector<LargeShape> shapes = {
      {1100, 1300, 40, 0.2, 300, kStrict, 1e-5},  //
      {2100, 1060, 20, 0.2, 400, kFast, 1e-5},        {1300, 1025, 18, 0.02, 900, kStrict, 1e-4},
      {1500, 1404, 0, 0.05, 400, kStrict, 1e-5, 0.5}, {600, 3600, 0, 0.02, 400, kStrict, 1e-3},
      {3300, 2900, 3, 0.05, 300, kStrict, 1e-5},      {4100, 4001, 64, 0.1, 400, kStrict, 1e-5},
      {1200, 1300, 2, 0.01, 11, kStrict, 1e-6},       {1100, 1201, 17, 0.004, 700, kFast, 1e-4},
      {1700, 1281, 0, 0.004, 6, kStrict, 1e-6}};
  if (GetParam() != "cuda") shapes.resize(2);
  std::vector<Case> cases = CasesOf(shapes);
  cases[0].solver().over_relaxation = false;
  ExpectSolvedTogetherAndAlone(cases);
}

// Of debiased ones it holds the densities of x and y alone, or sweeps those in launches of many iterations.
TEST_P(BatchingTest, DebiasedSizesOfAGpu) {
  constexpr Precision kStrict = Precision::kStrict, kFast = Precision::kFast;
  std::vector<LargeShape> shapes = {
      {1100, 1300, 40, 0.2, 300, kStrict, 1e-5}, {2100, 1060, 3, 0.05, 400, kStrict, 1e-5},
      {3300, 2900, 3, 0.02, 300, kStrict, 1e-5}, {1200, 1500, 64, 0.1, 400, kStrict, 1e-5, 0.5},
      {4100, 4001, 64, 0.1, 400, kStrict, 1e-5}, {1100, 2500, 20, 0.05, 12, kStrict, 1e-6},
      {2100, 1060, 20, 0.2, 400, kFast, 1e-5},   {4300, 1100, 64, 0.1, 300, kStrict, 1e-5},
      {1100, 4300, 3, 0.02, 300, kStrict, 1e-5}, {4500, 4400, 64, 0.1, 400, kStrict, 1e-5},
      {1100, 4300, 3, 0.05, 9, kStrict, 1e-5},   {4300, 1100, 64, 0.1, 300, kFast, 1e-4}};
  if (GetParam() != "cuda") shapes = {{130, 150, 40, 0.2, 300, kStrict, 1e-5}};
  std::vector<Case> cases = CasesOf(shapes);
  for (Case& c : cases) c.solver().debias = true;
  ExpectSolvedTogetherAndAlone(cases);
  for (const Case& c : cases) {
    if (c.solver().max_iterations < 100 || c.solver().precision == kFast) continue;
    Case exact = c;
    exact.solver().precision = Precision::kDouble;
    exact.solver().tolerance = 1e-7;
    exact.solver().max_iterations = 3000;
    const Answer got = SolveAlone(backend(), c), right = SolveAlone(backend(), exact);
    EXPECT_TRUE(right.convergence[0].converged) << c.name;
    EXPECT_NEAR(got.value[0], right.value[0], 1e-5 * std::max(1.0, std::abs(right.value[0]))) << c.name;
  }
}

// It has not, and sweeps them in launches of many iterations; some move too far for that, so that others have to go on.
TEST_P(BatchingTest, SizesThatAGpuSweeps) {
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
                               {1100, 4300, 30, 0.004, 30, kFast}},
                              GetParam() == "cuda");
}

TEST_P(BatchingTest, TolerancesAtSizesThatAGpuSweeps) {
  constexpr Precision kStrict = Precision::kStrict, kFast = Precision::kFast;
  std::vector<LargeShape> shapes = {
      {1025, 4300, 20, 0.2, 300, kFast, 1e-5},    {4300, 1100, 64, 0.1, 300, kStrict, 1e-5},
      {1025, 6300, 64, 0.2, 300, kFast, 1e-5},    {4500, 2060, 3, 0.02, 900, kStrict, 1e-5},
      {1030, 9900, 2, 0.05, 400, kFast, 1e-5},    {1100, 4400, 0, 0.03, 400, kStrict, 1e-5},
      {1200, 5000, 3, 0.004, 900, kStrict, 1e-4}, {4300, 1400, 3, 0.004, 900, kFast, 1e-3},
      {1100, 4300, 3, 0.001, 12, kStrict, 1e-5},  {4500, 4400, 40, 0.1, 400, kStrict, 1e-5},
      {1100, 4300, 40, 0.1, 300, kStrict, 1e-6},  {1100, 4300, 30, 0.02, 9, kStrict, 1e-5},
      {1100, 4300, 30, 5, 300, kStrict, 1e-3},    {1100, 4300, 30, 0.004, 700, kFast, 1e-3}};
  if (GetParam() != "cuda") shapes.resize(1);
  std::vector<Case> cases = CasesOf(shapes);
  if (cases.size() > 1) cases[9].solver().over_relaxation = false;
  ExpectSolvedTogetherAndAlone(cases);
}

// More columns than that, of FAST: it makes densities anew in each iteration, once for rows and columns.
TEST_P(BatchingTest, SizesThatAGpuMultiplies) {
  constexpr Precision kFast = Precision::kFast;
  ExpectRightTogetherAndAlone({{1100, 14100, 50, 0.2, 5, kFast},
                               {1030, 17000, 20, 0.2, 5, kFast},
                               {1024, 26000, 3, 0.05, 5, kFast},
                               {1030, 43000, 40, 0.2, 4, kFast},
                               {1100, 14300, 30, 0.004, 8, kFast}},
                              GetParam() == "cuda");
}

// Lanes at work at the same time, with the same kernels on problems of other shapes: what one launches is nothing to
// the other.
TEST_P(BatchingTest, LanesAreStrangers) {
  if (backend()->lanes() < 2) GTEST_SKIP() << "one lane";
  std::vector<Case> cases;
  for (int k = 0; k < 2; ++k) {
    Case c = CaseOf(RandomClouds(1300 + 100 * k, 1100, k == 0 ? 3 : 64, 0.1, 40 + k), absl::StrCat("lane ", k));
    c.solver().max_iterations = 30;
    c.wanted = kPotentials | kGradientPoints;
    cases.push_back(c);
  }
  const std::vector<Answer> alone = AllAlone(backend(), PointersTo(cases));
  constexpr int kTimes = 100;
  std::vector<std::string> differences[2];
  std::vector<std::thread> threads;
  for (int lane = 0; lane < 2; ++lane) {
    threads.emplace_back([&, lane] {
      for (int k = 0; k < kTimes; ++k) {
        const auto answers = SolveTogether(backend(), {&cases[lane]}, 0.005, nullptr, lane);
        const std::string difference = DifferenceInBits(answers[0], alone[lane]);
        if (!difference.empty()) differences[lane].push_back(difference);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int lane = 0; lane < 2; ++lane) {
    EXPECT_TRUE(differences[lane].empty()) << cases[lane].name << ": " << differences[lane].size() << " times of "
                                           << kTimes << ", " << differences[lane][0];
  }
}

TEST_P(BatchingTest, SlicesOfAnyLength) {
  const std::vector<Case> cases = Strangers(60, 60, 3);
  const std::vector<const Case*> order = PointersTo(cases);
  const std::vector<Answer> expected = SolveTogether(backend(), order, 0.005);
  ExpectSameBits(order, SolveTogether(backend(), order, 1e-5), expected);
  ExpectSameBits(order, SolveTogether(backend(), order, 10), expected);
}

TEST_P(BatchingTest, OneThreadOrTwo) {
  if (!HasThreads(GetParam())) GTEST_SKIP() << "no threads to choose";
  std::vector<Case> cases = Strangers(200, 24, 4);
  // Large enough to be cut into many chunks.
  cases.push_back(CaseOf(RandomClouds(1500, 1300, 3, 0.05, 5), "clouds 1,500 x 1,300"));
  cases.push_back(CaseOf(RandomClouds(700, 900, 64, 0.05, 6), "clouds 700 x 900 d 64"));
  cases.push_back(CaseOf(RandomDense(900, 1100, 0.05, 7), "dense 900 x 1,100"));
  cases.push_back(CaseOf(RandomClouds(3000, 3, 2, 0.05, 8), "clouds 3,000 x 3"));
  for (size_t k = cases.size() - 4; k < cases.size(); ++k) {
    cases[k].solver().max_iterations = 5;
    cases[k].wanted = kPotentials | kSums | kValueLinear | kPrimalBound | kGradientMasses;
  }
  cases.push_back(CaseOf(RandomLogits(600, 500, LogRowColumnRecipe(), 5, 1, 9), "logits 600 x 500"));
  const std::vector<const Case*> order = PointersTo(cases);
  const auto one = MakeBackend(GetParam(), 1), two = MakeBackend(GetParam(), 2);
  const std::vector<Answer> expected = SolveTogether(one.get(), order);
  ExpectSameBits(order, SolveTogether(two.get(), order), expected);
  ExpectSameBits(order, AllAlone(two.get(), order), expected);
}

// NaN among the inputs, which validation keeps out, and valid numbers beyond all arithmetic: no
// neighbour notices, and what is valid ends with an error or with numbers, never with both.
TEST_P(BatchingTest, HopelessNeighbours) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  std::vector<Case> hopeless;
  Case nan_cost = CaseOf(RandomDense(9, 8, 0.1, 61), "NaN cost");
  nan_cost.solver().max_iterations = 5;
  nan_cost.cost = Tensor::Of(Vector(72, nan));
  hopeless.push_back(nan_cost);
  Case nan_point = CaseOf(RandomClouds(9, 8, 2, 0.1, 62), "NaN point");
  nan_point.solver().max_iterations = 5;
  nan_point.x = Tensor::Of(Vector(18, nan));
  hopeless.push_back(nan_point);
  Case nan_logit = CaseOf(RandomLogits(4, 4, LogRowColumnRecipe(), 5, 1, 63), "NaN logit");
  nan_logit.logits = Tensor::Of(Vector(16, nan));
  hopeless.push_back(nan_logit);
  Case overflow = CaseOf(RandomDense(9, 8, 1e-3, 64), "exp(1e6)");
  overflow.cost = Tensor::Of(Vector(72, -1e4));
  overflow.solver().rho_a = overflow.solver().rho_b = 1e-2;
  overflow.solver().max_iterations = 5;
  hopeless.push_back(overflow);
  for (Case& c : hopeless) c.wanted |= kPlan | kSums;

  const std::vector<Case> neighbours = Strangers(60, 24, 65);
  const std::vector<const Case*> alone = PointersTo(neighbours);
  const std::vector<Answer> expected = SolveTogether(backend(), alone);
  std::vector<const Case*> company;
  for (size_t k = 0; k < alone.size(); ++k) {
    company.push_back(&hopeless[k % hopeless.size()]);
    company.push_back(alone[k]);
  }
  const std::vector<Answer> all = SolveTogether(backend(), company);
  std::vector<Answer> actual;
  for (size_t k = 1; k < all.size(); k += 2) actual.push_back(all[k]);
  ExpectSameBits(alone, actual, expected);
  for (size_t k = 0; k < 2 * hopeless.size(); k += 2) {
    SCOPED_TRACE(company[k]->name);
    const bool valid = company[k] == &hopeless.back();
    if (!valid && company[k]->problem.kind != ProblemKind::kNormalization) {
      EXPECT_EQ(all[k].status.code(), absl::StatusCode::kFailedPrecondition);
    }
    if (!valid) continue;
    if (!all[k].status.ok()) {
      EXPECT_EQ(all[k].status.code(), absl::StatusCode::kFailedPrecondition);
      continue;
    }
    for (const Vector& values : {all[k].value, all[k].f.values(), all[k].g.values(), all[k].plan.values()}) {
      for (double value : values) EXPECT_TRUE(std::isfinite(value));
    }
  }
}

// Progress never goes back, and ends at what the report says.
TEST_P(BatchingTest, ProgressIsMonotone) {
  Case c = CaseOf(RandomClouds(400, 500, 3, 0.01, 66), "400 x 500");
  c.solver().max_iterations = 60;
  std::vector<int> seen;
  const std::vector<Answer> answers =
      SolveTogether(backend(), {&c}, 1e-4, [&](Solve* solve) { seen.push_back(solve->progress().iterations); });
  EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
  EXPECT_EQ(seen.back(), 60);
  EXPECT_EQ(answers[0].report.convergence.iterations, 60);
}

// A batch of `count` members is `count` problems.
TEST_P(BatchingTest, MembersAreProblems) {
  Random random(10);
  for (int64_t count : {2, 17, 40}) {
    for (int repeat = 0; repeat < 6; ++repeat) {
      Case c = RandomTransportCase(&random, 100 + repeat, 30);
      c.problem.count = count;
      const bool dense = c.problem.kind == ProblemKind::kDense;
      const int64_t n = c.problem.n, m = c.problem.m;
      if (dense) c.cost = Tensor::Of(random.Uniforms(count * n * m, 0, 1));
      if (!dense) c.x = Tensor::Of(random.Uniforms(count * n * c.problem.dim, 0, 1));
      if (!dense) c.y = Tensor::Shared(random.Uniforms(m * c.problem.dim, 0, 1));
      Vector masses;
      for (int64_t k = 0; k < count; ++k) {
        const Vector one = random.Masses(n);
        masses.insert(masses.end(), one.begin(), one.end());
      }
      c.a = Tensor::Of(masses);
      c.b = Tensor::Shared(random.Masses(m));
      ExpectMembersAreProblems(c);
      c.a = Tensor::Shared(random.Masses(n));
      ExpectMembersAreProblems(c);

      Case normalization = RandomNormalizationCase(&random, 200 + repeat, 20);
      ExpectMembersAreProblems(normalization);
    }
  }
}

// Whatever a GPU does with problems of their size, iterations by launches of many included. One member is so spread out
// that it may need another way than its neighbours.
TEST_P(BatchingTest, MembersOfEverySize) {
  if (GetParam() != "cuda") GTEST_SKIP() << "sizes of a GPU";
  constexpr Precision kStrict = Precision::kStrict, kFast = Precision::kFast;
  constexpr int64_t kCount = 3;
  const std::vector<LargeShape> shapes = {
      {300, 200, 20, 0.1, 40, kStrict},          {1100, 1300, 40, 0.1, 600, kStrict},
      {1100, 1060, 3, 0.05, 600, kFast},         {1100, 4300, 20, 0.1, 400, kFast},
      {1030, 4400, 3, 0.05, 300, kStrict},       {1030, 14100, 30, 0.1, 150, kFast},
      {1100, 1000, 40, 0.02, 20, kStrict},       {1030, 80, 3, 1e-3, 20, kStrict},
      {1100, 1300, 40, 0.1, 400, kStrict, 1e-5}, {1100, 2500, 20, 0.1, 400, kStrict, 1e-5},
      {1100, 4300, 20, 0.1, 400, kFast, 1e-5},   {1030, 4400, 3, 0.05, 300, kStrict, 1e-5},
      {1100, 4300, 64, 0.1, 400, kStrict, 1e-5}};
  Random random(12);
  for (const LargeShape& of : shapes) {
    for (double spread : {1.0, 4.0}) {
      const std::string name = absl::StrCat(of.n, " x ", of.m, " d ", of.dim, " spread ", spread, " to ", of.tolerance);
      Case c = CaseOf(RandomClouds(of.n, of.m, of.dim, of.epsilon, 90), name);
      Vector x = random.Uniforms(kCount * of.n * of.dim, 0, 1);
      for (int64_t i = of.n * of.dim; i < 2 * of.n * of.dim; ++i) x[i] *= spread;
      c.problem.count = kCount;
      c.x = Tensor::Of(x);
      c.y = Tensor::Shared(random.Uniforms(of.m * of.dim, 0, 1));
      c.a = Tensor::Shared(random.Masses(of.n));
      c.b = Tensor::Shared(random.Masses(of.m));
      c.solver().max_iterations = of.iterations;
      c.solver().precision = of.precision;
      c.solver().tolerance = of.tolerance;
      c.wanted = kPotentials | kGradientPoints;
      ExpectMembersAreProblems(c);
      c.solver().debias = of.tolerance > 0;
      if (c.solver().debias) ExpectMembersAreProblems(c);
    }
  }
}

INSTANTIATE_ON_BACKENDS(BatchingTest);

}  // namespace
}  // namespace sinkhorn::conformance
