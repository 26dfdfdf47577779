#include "tests/conformance/check_normalization.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "gtest/gtest.h"
#include "tests/conformance/check.h"

namespace sinkhorn::conformance {

using oracle::MaxAbs;
using oracle::Normalization;
using oracle::Sum;

namespace {

double LargestLogit(const Normalization& problem) {
  double largest = 0;
  for (double logit : problem.logits) {
    largest = std::max(largest, std::abs(std::max(logit, problem.recipe.logit_floor)));
  }
  return largest;
}

// `gradient` [problem.n, problem.m]; the dustbin's row and column all share its score.
void ExpectGradient(const std::string& what, const Case& member_case, const Answer& member, const Vector& gradient,
                    double room) {
  const Normalization problem = MemberNormalization(member_case);
  const int64_t n = member_case.problem.n, m = member_case.problem.m;
  Vector logits(n * m);
  double score = 0;
  for (int64_t k = 0; k < problem.n * problem.m; ++k) {
    const int64_t i = k / problem.m, j = k % problem.m;
    (i < n && j < m ? logits[i * m + j] : score) += gradient[k];
  }
  ExpectClose(what, member.gradient_logits.values(), logits, room);
  if (!member_case.dustbin_score.present()) return;
  ExpectClose(what + ", dustbin", member.gradient_dustbin_score.values(), {score}, room * (n + m + 1));
}

}  // namespace

Vector PlanRoom(const Case& the_case, const Normalization& problem, const Vector& plan) {
  const bool strict = the_case.solver().precision != Precision::kDouble;
  const double relative = strict ? 1e-5 + 1e-6 * LargestLogit(problem) : 1e-9;
  const DType dtype = the_case.output_dtype;
  Vector room(plan.size());
  for (size_t k = 0; k < plan.size(); ++k) {
    room[k] = (relative + UnitRoundoff(dtype)) * plan[k] + (strict ? 1e-10 : 1e-18) + SmallestPositive(dtype);
  }
  return room;
}

double GradientRoom(const Case& the_case, double largest, double cancelled) {
  const bool strict = the_case.solver().precision != Precision::kDouble;
  const double working = UnitRoundoff(strict ? DType::kFloat32 : DType::kFloat64);
  const DType dtype = the_case.output_dtype;
  return ((strict ? 1e-5 : 1e-9) + UnitRoundoff(dtype)) * largest + 8 * working * cancelled + SmallestPositive(dtype) +
         (strict ? 1e-30 : 1e-290);  // Near underflow.
}

void ExpectMatchesRecipe(const Case& member_case, const Answer& member) {
  const Normalization problem = MemberNormalization(member_case);
  const Vector plan = Normalize(problem), room = PlanRoom(member_case, problem, plan);
  const Vector row_marginals = RowMarginals(problem), column_marginals = ColumnMarginals(problem);
  const auto rows = [&](const Vector& v) { return oracle::RowSums(v, problem.n, problem.m); };
  const auto columns = [&](const Vector& v) { return oracle::ColumnSums(v, problem.n, problem.m); };
  const std::string prefix = LabelPrefix(member_case);
  ExpectClose(prefix + "P", member.plan.values(), plan, room);
  ExpectClose(prefix + "row sums", member.row_sums.values(), rows(plan), rows(room));
  ExpectClose(prefix + "column sums", member.column_sums.values(), columns(plan), columns(room));
  const Convergence& convergence = member.convergence[0];
  // Sums of as many terms as there are rows and columns, each rounded.
  const double rounding = member_case.solver().precision == Precision::kDouble ? 1e-14 : 1e-6;
  ExpectClose(prefix + "marginal errors", {convergence.marginal_error_a, convergence.marginal_error_b},
              {oracle::DistanceL1(rows(plan), row_marginals), oracle::DistanceL1(columns(plan), column_marginals)},
              Sum(room) + rounding * (Sum(row_marginals) + Sum(column_marginals)));
  EXPECT_EQ(convergence.iterations, member_case.solver().max_iterations);
}

void ExpectMatchesUnrolled(const std::string& what, const Case& member_case, const Answer& member) {
  const Normalization problem = MemberNormalization(member_case);
  const Vector cotangent = member_case.cotangent.values();
  const Vector gradient = UnrolledGradient(problem, cotangent);
  // What cancels: sums over lines of |dP * P|, with P's own rounding where logits are large.
  Vector terms = Normalize(problem);
  for (size_t k = 0; k < terms.size(); ++k) terms[k] = std::abs(terms[k] * cotangent[k]);
  const double line = std::max(MaxAbs(oracle::RowSums(terms, problem.n, problem.m)),
                               MaxAbs(oracle::ColumnSums(terms, problem.n, problem.m)));
  const double cancelled = line * (1 + LargestLogit(problem) / 8);
  ExpectGradient(what, member_case, member, gradient, GradientRoom(member_case, MaxAbs(gradient), cancelled));
}

void ExpectMatchesImplicit(const std::string& what, const Case& member_case, const Answer& member) {
  const Normalization problem = MemberNormalization(member_case);
  const Vector marginals = RowMarginals(problem);
  const auto [least, most] = std::minmax_element(marginals.begin(), marginals.end());
  if (LargestLogit(problem) > 10 || *least < 0.01 || *most > 100) return;
  const int64_t n = problem.n, m = problem.m;
  const Vector plan = member.plan.values(), cotangent = member_case.cotangent.values();
  const auto formula = [&](const Vector& at) {
    switch (member_case.problem.normalization.backward) {
      case BackwardMode::kImplicitUnit:
        return GradientThroughStart(problem, oracle::ImplicitUnitGradient(at, n, m, cotangent));
      case BackwardMode::kImplicitFull:
        return GradientThroughStart(problem, oracle::ImplicitFullGradient(at, n, m, cotangent));
      default:
        return GradientThroughStart(problem, oracle::ImplicitGradient(at, n, m, cotangent));
    }
  };
  const Vector gradient = formula(plan);
  const double rounding = std::max(member_case.solver().precision == Precision::kDouble ? 1e-12 : 1e-7,
                                   UnitRoundoff(member_case.output_dtype));
  std::mt19937 random(1);
  std::uniform_real_distribution<double> any(-rounding, rounding);
  double sensitivity = 0, cancelled = 0;
  for (int k = 0; k < 3; ++k) {
    Vector other = plan;
    for (double& p : other) p *= 1 + any(random);
    const Vector moved = formula(other);
    for (size_t e = 0; e < moved.size(); ++e) sensitivity = std::max(sensitivity, std::abs(moved[e] - gradient[e]));
  }
  for (size_t k = 0; k < plan.size(); ++k) cancelled = std::max(cancelled, std::abs(plan[k] * cotangent[k]));
  const double room = GradientRoom(member_case, MaxAbs(gradient), cancelled * std::max(n, m)) + 100 * sensitivity;
  ExpectGradient(what, member_case, member, gradient, room);
}

void ExpectScalesExactly(const Case& member_case, const Answer& member) {
  const Normalization problem = MemberNormalization(member_case);
  const int64_t n = problem.n, m = problem.m;
  const Vector plan = member.plan.values();
  const auto scaling = [&](int64_t i, int64_t j) {  // log u_i + log v_j
    return std::log(plan[i * m + j]) - std::max(problem.logits[i * m + j], problem.recipe.logit_floor);
  };
  // Of those that float32 holds: entries against the largest of their row and of their column.
  const auto is_held = [&](int64_t i, int64_t j) { return plan[i * m + j] > 1e-30; };
  std::vector<int64_t> of_row(n, 0), of_column(m, 0);
  for (int64_t k = 0; k < n * m; ++k) {
    const int64_t i = k / m, j = k % m;
    if (plan[k] > plan[i * m + of_row[i]]) of_row[i] = j;
    if (plan[k] > plan[of_column[j] * m + j]) of_column[j] = i;
  }
  double worst = 0;
  for (int64_t k = 0; k < n * m; ++k) {
    const int64_t i = k / m, j = k % m, l = of_row[i], r = of_column[j];
    if (!is_held(i, j) || !is_held(i, l) || !is_held(r, j) || !is_held(r, l)) continue;
    worst = std::max(worst, std::abs(scaling(i, j) + scaling(r, l) - scaling(i, l) - scaling(r, j)));
  }
  const bool strict = member_case.solver().precision != Precision::kDouble;
  const double largest = LargestLogit(problem);
  const double rounding = 16 * UnitRoundoff(DType::kFloat64) * largest;  // Of the sums above.
  ExpectClose(LabelPrefix(member_case) + "EXACT scales", {worst}, {0},
              rounding + (strict ? 1e-5 + 1e-6 * largest : 1e-9));
  const Convergence& end = member.convergence[0];
  const double error_a = oracle::DistanceL1(oracle::RowSums(plan, n, m), RowMarginals(problem));
  const double error_b = oracle::DistanceL1(oracle::ColumnSums(plan, n, m), ColumnMarginals(problem));
  ExpectClose(LabelPrefix(member_case) + "EXACT errors", {end.marginal_error_a, end.marginal_error_b},
              {error_a, error_b}, (strict ? 1e-6 : 1e-14) * Sum(RowMarginals(problem)));
}

}  // namespace sinkhorn::conformance
