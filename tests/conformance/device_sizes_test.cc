// Sizes for which a GPU has ways of its own, one chip for a problem, launches of many iterations, many members: each is
// as right as float64 says, or has met its tolerance, and has the same bits alone, in company, in slices of any length
// and as a member. Those that it holds: held_sizes_test.cc.
#include "tests/conformance/device_sizes.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/conformance/check.h"
#include "tests/conformance/company.h"
#include "tests/oracle/linear_algebra.h"

namespace sinkhorn::conformance {
namespace {

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

// One chip, or a part of it: updates of both sides at once, to residuals of both, and epsilons that get smaller, for
// which it keeps exponents; slow ones are cut into slices before they are at the last epsilon.
TEST_P(DeviceSizesTest, SymmetricAndAnnealedOnAChip) {
  constexpr Precision kStrict = Precision::kStrict, kFast = Precision::kFast;
  constexpr PointCost kEuclidean = PointCost::kEuclidean;
  const double inf = std::numeric_limits<double>::infinity();
  const std::vector<LargeShape> shapes = Chosen({{64, 50, 3, 0.05, 30, kStrict},
                                                 {120, 128, 20, 0.1, 40, kFast},
                                                 {60, 33, 0, 0.05, 30, kStrict, 0, 0.5},
                                                 {250, 256, 64, 1, 40, kStrict},
                                                 {90, 200, 0, 0.05, 30, kStrict},
                                                 {500, 512, 3, 0.05, 30, kStrict, 0, 2},
                                                 {700, 400, 40, 0.2, 40, kStrict},
                                                 {1000, 1024, 64, 0.2, 40, kFast},
                                                 {900, 650, 3, 0.05, 40, kStrict, 0, inf, kEuclidean},
                                                 {1024, 770, 0, 0.05, 40, kStrict},
                                                 {100, 90, 3, 0.002, 100, kStrict},
                                                 {800, 900, 40, 0.01, 100, kStrict},
                                                 {300, 400, 0, 0.001, 100, kStrict}},
                                                4);
  const auto annealed = [](std::vector<Case> cases, double decay) {
    for (size_t k = 0; k < cases.size(); ++k) {
      cases[k].solver().epsilon_decay = decay;
      if (k % 2 == 1) cases[k].solver().update_rule = UpdateRule::kSymmetric;
      if (k % 3 == 1) cases[k].solver().epsilon_start = 2;
    }
    AddDebiased(&cases, 1);
    return cases;
  };
  ExpectRightTogetherAndAlone(annealed(CasesOf(shapes), 0.4));
  std::vector<LargeShape> longer = Chosen(shapes, 2);
  for (LargeShape& of : longer) of.iterations = 620;  // At most 550 are on the way to the last epsilon.
  ExpectRightTogetherAndAlone(annealed(CasesOf(longer), 0.985));
  std::vector<LargeShape> judged = shapes;
  for (LargeShape& of : judged) of.iterations = of.epsilon < 0.02 ? 12 : 900, of.tolerance = 1e-5;
  ExpectSolvedTogetherAndAlone(annealed(CasesOf(judged), 0.5));
  std::vector<Case> symmetric = CasesOf(judged);
  AddDebiased(&symmetric, 1);
  for (Case& c : symmetric) c.solver().update_rule = UpdateRule::kSymmetric;
  ExpectSolvedTogetherAndAlone(symmetric);
}

// Its chip has no room for their densities, and it sweeps them in launches of many iterations; some move too far for
// that, so that others have to go on.
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

// Few coordinates, too many points to be held: both sides at once, in launches of many iterations; of debiased problems
// those of x and y with themselves, from the start, half of all pairs. Some epsilons become too small for that.
TEST_P(DeviceSizesTest, SymmetricSizesThatAGpuMultiplies) {
  constexpr Precision kStrict = Precision::kStrict, kFast = Precision::kFast;
  const double inf = std::numeric_limits<double>::infinity();
  const std::vector<LargeShape> shapes = Chosen({{4500, 4300, 3, 0.05, 12, kStrict},
                                                 {1100, 5000, 2, 0.05, 13, kFast},
                                                 {5300, 1030, 1, 0.1, 20, kStrict, 0, 0.5},
                                                 {60, 4700, 3, 0.02, 30, kStrict},
                                                 {9000, 4200, 3, 0.02, 9, kStrict},
                                                 {4200, 4400, 3, 0.05, 12, kStrict, 0, inf, PointCost::kCosine},
                                                 {4300, 4200, 2, 0.05, 12, kStrict, 0, inf, PointCost::kNegativeDot},
                                                 {1500, 4400, 3, 0.001, 25, kStrict}},
                                                1);
  std::vector<Case> cases = CasesOf(shapes), annealed;
  AddDebiased(&cases, 1);
  for (size_t k = 0, all = cases.size(); k < all; ++k) {
    cases.push_back(cases[k]);
    cases.back().solver().update_rule = UpdateRule::kSymmetric;
    annealed.push_back(cases[k]);
    annealed.back().solver().epsilon_decay = 0.5;
    if (k % 3 == 1) annealed.back().solver().epsilon_start = 2;
    if (k % 2 == 1) annealed.back().solver().update_rule = UpdateRule::kSymmetric;
  }
  ExpectRightTogetherAndAlone(cases);
  ExpectRightTogetherAndAlone(annealed);
  std::vector<LargeShape> judged = shapes;
  for (LargeShape& of : judged) of.iterations = of.epsilon < 0.02 ? 12 : 900, of.tolerance = 1e-5;
  cases = CasesOf(judged);
  AddDebiased(&cases, 1);
  for (size_t k = 0, all = cases.size(); k < all; ++k) {
    cases.push_back(cases[k]);
    cases.back().solver().update_rule = UpdateRule::kSymmetric;
    if (k % 2 == 1) cases.back().solver().epsilon_decay = 0.5;
  }
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

// Epsilons so large that the tolerance is met before exponents are kept: what is measured does not depend on whether
// they would have been in the same slice.
TEST_P(DeviceSizesTest, EndsBeforeExponentsAreKept) {
  constexpr Precision kStrict = Precision::kStrict, kFast = Precision::kFast;
  std::vector<Case> cases = CasesOf(Chosen({{1100, 1300, 40, 1e5, 60, kStrict, 1e-5},
                                            {4087, 4500, 89, 1e5, 60, kStrict, 1e-5},
                                            {4300, 1100, 20, 1e5, 60, kFast, 1e-5},
                                            {1500, 2100, 3, 1e5, 60, kStrict, 1e-5}},
                                           1));
  AddDebiased(&cases, 1);
  for (size_t k = 0, all = cases.size(); k < all; ++k) {
    cases[k].wanted |= kSums;
    cases.push_back(cases[k]);
    cases.back().solver().update_rule = UpdateRule::kSymmetric;
  }
  const std::vector<const Case*> order = PointersTo(cases);
  const std::vector<Answer> alone = AllAlone(backend(), order);
  ExpectSameBits(order, SolveTogether(backend(), order, 1e-5), alone);
  for (size_t k = 0; k < cases.size(); ++k) EXPECT_LE(alone[k].convergence[0].iterations, 2) << cases[k].name;
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
