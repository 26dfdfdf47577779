#include "server/cost_model.h"

#include <algorithm>
#include <cmath>

#include "server/cost_table.h"

namespace sinkhorn {
namespace {

constexpr double kDecay = 15.0 / 16;
// What the fitted formula itself weighs, in seconds of problems measured: the first microseconds decide nothing.
constexpr double kPriorSeconds = 1e-5;
constexpr double kMostRatio = 1e4;

// Classes of a family by size: a factor of 16 in n * m each.
int SizeBucket(const Problem& problem) {
  const double pairs = std::max(1.0, static_cast<double>(problem.n) * static_cast<double>(problem.m));
  return std::min(7, static_cast<int>(std::log2(pairs) / 4));
}

}  // namespace

CostFamily CostFamilyOf(const Problem& problem) {
  const bool tolerance = problem.solver.tolerance > 0;
  switch (problem.kind) {
    case ProblemKind::kNormalization:
      if (problem.normalization.cotangent) return CostFamily::kNormalizationGradient;
      return problem.normalization.recipe.exact || tolerance ? CostFamily::kNormalizationExact
                                                             : CostFamily::kNormalization;
    case ProblemKind::kDense:
      return tolerance ? CostFamily::kDenseTolerance : CostFamily::kDense;
    case ProblemKind::kPointCloud:
      return tolerance ? CostFamily::kPointCloudTolerance : CostFamily::kPointCloud;
  }
  return CostFamily::kNormalization;
}

const char* CostFamilyName(CostFamily family) {
  static const char* const kNames[] = {
      "normalization", "normalization_gradient", "normalization_exact", "dense", "dense_tolerance",
      "point_cloud",   "point_cloud_tolerance"};
  return kNames[static_cast<int>(family)];
}

CostModel::CostModel(const Backend* backend)
    : backend_(backend), costs_(backend->device().backend == "cpu" ? kCpuCosts : kOtherCosts) {}

CostModel::Formula CostModel::FormulaOf(const Problem& problem) const {
  const CostFamily family = CostFamilyOf(problem);
  const CostRow& row = costs_[static_cast<int>(family)];
  Formula formula;
  formula.problem_class =
      (static_cast<int>(family) * 2 + (problem.solver.precision == Precision::kDouble)) * 8 + SizeBucket(problem);
  formula.guessed = problem.solver.tolerance > 0;
  double figure;
  if (formula.guessed && row.iterations > 0 && problem.solver.max_iterations > row.iterations) {
    Problem likely = problem;
    likely.solver.max_iterations = row.iterations;
    figure = backend_->PredictedSeconds(likely);
  } else {
    figure = backend_->PredictedSeconds(problem);
  }
  // !(x > 0) rather than x <= 0: NaN too.
  formula.seconds = !(figure > 0) ? 0 : std::min(row.overhead_seconds + row.factor * figure, kMaxSeconds);
  return formula;
}

double CostModel::ratio(int problem_class) const {
  const Class& c = classes_[problem_class];
  const double ratio = (c.measured_seconds + kPriorSeconds) / (c.formula_seconds + kPriorSeconds);
  return std::min(std::max(ratio, 1 / kMostRatio), kMostRatio);
}

void CostModel::Measured(int problem_class, double formula_seconds, double seconds) {
  Class& c = classes_[problem_class];
  const double expected = formula_seconds * ratio(problem_class);
  seconds = std::min(std::max(seconds, expected / kMostSurprise), expected * kMostSurprise);
  c.measured_seconds = kDecay * c.measured_seconds + seconds;
  c.formula_seconds = kDecay * c.formula_seconds + formula_seconds;
  c.measured = std::min(c.measured + 1, kKnown);
}

void CostModel::Doubt(int problem_class) {
  Class& c = classes_[problem_class];
  c.measured_seconds += (c.formula_seconds - c.measured_seconds) * (1 - kDecay);
}

}  // namespace sinkhorn
