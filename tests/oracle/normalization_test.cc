// The oracle of normalisation against the recipes' steps in the linear domain, against finite differences, and its
// backward modes against each other.
#include "tests/oracle/normalization.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "gtest/gtest.h"
#include "tests/oracle/oracle_test_util.h"
#include "tests/oracle/recipes.h"

namespace sinkhorn::oracle {
namespace {

std::vector<Recipe> Recipes() {
  const Recipe custom = CustomRecipe(Start::kExp, 1e-3, Order::kColumnRow, Guard::kAdd, 0.05, -0.5);
  Recipe guarded = ExpColumnRowRecipe();
  guarded.guard_value = 3;  // Bites on some rows.
  Recipe softmax_floored = DeepSeekRecipe();
  softmax_floored.logit_floor = -0.5;
  return {LogRowColumnRecipe(), ExpColumnRowRecipe(), DeepSeekRecipe(), custom, guarded, softmax_floored};
}

Normalization RandomLogits(int64_t n, int64_t m, double scale, unsigned seed) {
  Normalization problem;
  problem.n = n;
  problem.m = m;
  problem.logits = Uniform(n * m, -scale, scale, seed);
  return problem;
}

// The named recipes as NUMERICS section 2 writes them, in the linear domain.
TEST(Normalization, NamedRecipesStepByStep) {
  Normalization problem = RandomLogits(3, 4, 2, 101);
  problem.iterations = 3;
  const auto scale_rows = [](Vector* matrix, const std::function<double(double)>& divisor) {
    const Vector sums = RowSums(*matrix, 3, 4);
    for (int k = 0; k < 12; ++k) (*matrix)[k] /= divisor(sums[k / 4]);
  };
  const auto scale_columns = [](Vector* matrix, const std::function<double(double)>& divisor) {
    const Vector sums = ColumnSums(*matrix, 3, 4);
    for (int k = 0; k < 12; ++k) (*matrix)[k] /= divisor(sums[k % 4]);
  };
  const auto plain = [](double s) { return s; };
  const auto at_least = [](double s) { return std::max(s, 1e-10); };
  const auto plus = [](double s) { return s + 1e-6; };
  Vector exponential = problem.logits;
  for (double& value : exponential) value = std::exp(value);

  Vector log_row_column = exponential, exp_column_row = exponential, deepseek = exponential;
  for (int t = 0; t < 3; ++t) {
    scale_rows(&log_row_column, plain);
    scale_columns(&log_row_column, plain);
    scale_columns(&exp_column_row, at_least);
    scale_rows(&exp_column_row, at_least);
  }
  scale_rows(&deepseek, plain);
  for (double& value : deepseek) value += 1e-6;
  scale_columns(&deepseek, plus);
  for (int t = 1; t < 3; ++t) {
    scale_rows(&deepseek, plus);
    scale_columns(&deepseek, plus);
  }
  problem.recipe = LogRowColumnRecipe();
  ExpectAllNear(Normalize(problem), log_row_column, 1e-15);
  problem.recipe = ExpColumnRowRecipe();
  ExpectAllNear(Normalize(problem), exp_column_row, 1e-15);
  problem.recipe = DeepSeekRecipe();
  ExpectAllNear(Normalize(problem), deepseek, 1e-15);
}

TEST(Normalization, ExactHasTheMarginals) {
  for (double scale : {1.0, 20.0}) {
    Normalization problem = RandomLogits(9, 6, scale, 111);
    problem.recipe = ExactRecipe();
    const Vector plan = Normalize(problem);
    ExpectAllNear(RowSums(plan, 9, 6), Vector(9, 1.0), 1e-12);
    ExpectAllNear(ColumnSums(plan, 9, 6), Vector(6, 1.5), 1e-12);
    const Vector with_bin = Normalize(WithDustbin(problem, 0.3));
    Vector rows(9, 1.0);
    rows.push_back(9);
    ExpectAllNear(RowSums(with_bin, 10, 7), rows, 1e-11);
  }
}

TEST(Normalization, UnrolledMatchesFiniteDifferences) {
  for (const Recipe& recipe : Recipes()) {
    Normalization problem = RandomLogits(4, 3, 2, 121);
    problem.recipe = recipe;
    problem.iterations = 3;
    problem.row_marginals = Uniform(4, 0.5, 2, 122);
    problem.column_marginals = Uniform(3, 0.5, 2, 123);
    const Vector cotangent = Uniform(12, -1, 1, 124);
    const Vector numeric = FiniteDifferences(
        [&](const Vector& logits) {
          Normalization moved = problem;
          moved.logits = logits;
          return Dot(Normalize(moved), cotangent);
        },
        problem.logits, 1e-6);
    ExpectAllNear(UnrolledGradient(problem, cotangent), numeric, 1e-9);
  }
}

TEST(Normalization, ImplicitModesMatchUnrolledAtConvergence) {
  Normalization problem = RandomLogits(5, 5, 1, 131);
  problem.recipe = LogRowColumnRecipe();
  problem.iterations = 300;
  const Vector cotangent = Uniform(25, -1, 1, 132), plan = Normalize(problem);
  const Vector unrolled = UnrolledGradient(problem, cotangent);
  ExpectAllNear(ImplicitGradient(plan, 5, 5, cotangent), unrolled, 1e-13);
  ExpectAllNear(ImplicitUnitGradient(plan, 5, 5, cotangent), unrolled, 1e-12);
  ExpectAllNear(ImplicitFullGradient(plan, 5, 5, cotangent), unrolled, 1e-12);
  problem.row_marginals = Uniform(5, 0.5, 2, 133);
  problem.column_marginals = problem.row_marginals;
  const Vector other = Normalize(problem);
  ExpectAllNear(ImplicitGradient(other, 5, 5, cotangent), UnrolledGradient(problem, cotangent), 1e-13);
}

TEST(Normalization, SurvivesHugeLogits) {
  for (const Recipe& recipe : Recipes()) {
    Normalization problem = RandomLogits(6, 6, 1e4, 141);
    problem.recipe = recipe;
    problem.iterations = 20;
    for (double value : Normalize(problem)) EXPECT_TRUE(std::isfinite(value) && value >= 0);
    const Vector cotangent = Uniform(36, -1, 1, 142);
    for (double value : UnrolledGradient(problem, cotangent)) EXPECT_TRUE(std::isfinite(value));
  }
}

}  // namespace
}  // namespace sinkhorn::oracle
