// Sizes whose densities a GPU holds, on all of it or a part: each is as right as float64 says, or has met its
// tolerance, and has the same bits alone, in company and in slices of any length.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/conformance/company.h"
#include "tests/conformance/device_sizes.h"

namespace sinkhorn::conformance {
namespace {

class HeldSizesTest : public DeviceSizesTest {};

// Its chip has room for their densities; some move so far from where they began that those are made again.
TEST_P(HeldSizesTest, SizesThatFillAGpu) {
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
TEST_P(HeldSizesTest, FramesThatFillAGpu) {
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
TEST_P(HeldSizesTest, CostsOfEveryType) {
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
TEST_P(HeldSizesTest, RelaxedSizesThatFillAGpu) {
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
TEST_P(HeldSizesTest, TolerancesAtSizesThatFillAGpu) {
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
TEST_P(HeldSizesTest, DebiasedSizesThatFillAGpu) {
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
TEST_P(HeldSizesTest, SymmetricSizesThatFillAGpu) {
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
TEST_P(HeldSizesTest, DebiasedSizesOfAGpu) {
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

INSTANTIATE_ON_BACKENDS(HeldSizesTest);

}  // namespace
}  // namespace sinkhorn::conformance
