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
#include "tests/conformance/company.h"
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

class BatchingTest : public ConformanceTest {};

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

// Whoever takes long leaves room for others, between iterations, and comes to the same.
TEST_P(BatchingTest, LongNormalizationsYield) {
  Recipe exact;
  exact.exact = true;
  for (const bool is_exact : {false, true}) {
    Case c = CaseOf(RandomLogits(45, 35, is_exact ? exact : LogRowColumnRecipe(), is_exact ? 30 : 60, 20, 51),
                    is_exact ? "EXACT" : "LOG_ROW_COLUMN");
    c.problem.count = 5;
    c.logits = Tensor::Of(Random(52).Normals(5 * 45 * 35, 20));
    c.cotangent = Tensor::Of(Random(53).Normals(5 * 45 * 35, 1));
    c.problem.normalization.backward = is_exact ? BackwardMode::kImplicit : BackwardMode::kUnrolled;
    c.solver().precision = Precision::kDouble;
    for (const double tolerance : {0.0, 1e-3}) {
      c.solver().tolerance = tolerance;
      SCOPED_TRACE(absl::StrCat(c.name, " to ", tolerance));
      int slices = 0;
      const Answer yielding = SolveTogether(backend(), {&c}, 1e-6, [&](Solve*) { ++slices; })[0];
      EXPECT_EQ(DifferenceInBits(yielding, SolveTogether(backend(), {&c}, 1000)[0]), "");
      if (backend()->device().backend == "cuda") {
        EXPECT_GT(slices, 10);
      }
    }
  }
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
      ExpectMembersAreProblems(backend(), c);
      c.a = Tensor::Shared(random.Masses(n));
      ExpectMembersAreProblems(backend(), c);

      Case normalization = RandomNormalizationCase(&random, 200 + repeat, 20);
      ExpectMembersAreProblems(backend(), normalization);
    }
  }
}

INSTANTIATE_ON_BACKENDS(BatchingTest);

}  // namespace
}  // namespace sinkhorn::conformance
