#include "server/solver_check.h"

#include <cmath>

#include "absl/strings/str_cat.h"

namespace sinkhorn {
namespace {

using absl::nullopt;
using absl::optional;
using absl::StrCat;

constexpr int kTransportIterations = 1000;
constexpr int kNormalizationIterations = 20;
constexpr int kExactIterations = 200;
constexpr int kNeumannTerms = 3, kNeumannTermsMax = 16;
constexpr double kTransportTolerance = 1e-5;

// !(x > 0) rather than x <= 0: it refuses NaN too.
bool IsPositive(double x) { return x > 0 && std::isfinite(x); }
bool IsNonNegative(double x) { return x >= 0 && std::isfinite(x); }

// A length to the power of the cost's degree. Refuses what over- or underflows.
optional<Error> Power(const char* field, double length, int degree, double* energy) {
  if (!IsPositive(length)) return InvalidField(field, "must be finite and > 0", StrCat(length));
  *energy = degree == 2 ? length * length : length;
  if (IsPositive(*energy)) return nullopt;
  return InvalidField(field, StrCat("must have a power ", degree, " that is finite and > 0"), StrCat(length));
}

optional<Error> CheckIterations(const v1::SolverOptions& in, int default_iterations, const Limits& limits,
                                SolverOptions* out) {
  if (in.max_iterations() < 0) {
    return InvalidField("solver.max_iterations", "must be >= 0 (0: the default)", StrCat(in.max_iterations()));
  }
  if (in.max_iterations() > limits.max_iterations) {
    return TooLarge("solver.max_iterations", "iterations", limits.max_iterations, in.max_iterations());
  }
  out->max_iterations = in.max_iterations() > 0 ? in.max_iterations() : default_iterations;
  return nullopt;
}

optional<Error> CheckTolerance(const v1::SolverOptions& in, double default_tolerance, SolverOptions* out) {
  out->tolerance = in.has_tolerance() ? in.tolerance() : default_tolerance;
  if (IsNonNegative(out->tolerance)) return nullopt;
  return InvalidField("solver.tolerance", "must be finite and >= 0", StrCat(out->tolerance));
}

optional<Error> CheckPrecision(const v1::SolverOptions& in, SolverOptions* out) {
  switch (in.precision()) {
    case v1::PRECISION_UNSPECIFIED:
    case v1::PRECISION_STRICT:
      out->precision = Precision::kStrict;
      return nullopt;
    case v1::PRECISION_FAST:
      out->precision = Precision::kFast;
      return nullopt;
    case v1::PRECISION_DOUBLE:
      out->precision = Precision::kDouble;
      return nullopt;
    default:
      return InvalidField("solver.precision", "must be a Precision", StrCat(in.precision()));
  }
}

optional<Error> CheckEpsilon(const v1::SolverOptions& in, int degree, SolverOptions* out) {
  if (in.epsilon() != 0 && in.blur() != 0) {
    return InvalidField("solver.blur", "must be unset when epsilon is set", StrCat(in.blur()));
  }
  if (in.blur() != 0) return Power("solver.blur", in.blur(), degree, &out->epsilon);
  out->epsilon = in.epsilon();
  if (IsPositive(out->epsilon)) return nullopt;
  return InvalidField("solver.epsilon", "must be finite and > 0 (or blur set instead)", StrCat(in.epsilon()));
}

optional<Error> CheckSchedule(const v1::SolverOptions& in, int degree, SolverOptions* out) {
  if (in.scaling() == 0) {
    if (in.epsilon_start() == 0) return nullopt;
    return InvalidField("solver.epsilon_start", "must be unset without scaling", StrCat(in.epsilon_start()));
  }
  if (!(in.scaling() > 0 && in.scaling() < 1)) {
    return InvalidField("solver.scaling", "must be in (0, 1), or 0 for none", StrCat(in.scaling()));
  }
  if (optional<Error> error = Power("solver.scaling", in.scaling(), degree, &out->epsilon_decay)) return error;
  if (in.epsilon_start() == 0) return nullopt;
  out->epsilon_start = in.epsilon_start();
  if (std::isfinite(out->epsilon_start) && out->epsilon_start >= out->epsilon) return nullopt;
  return InvalidField("solver.epsilon_start", StrCat("must be finite and >= epsilon = ", out->epsilon),
                      StrCat(in.epsilon_start()));
}

optional<Error> CheckUpdates(const v1::SolverOptions& in, SolverOptions* out) {
  switch (in.update_rule()) {
    case v1::UPDATE_RULE_UNSPECIFIED:
    case v1::UPDATE_RULE_ALTERNATING:
      out->update_rule = UpdateRule::kAlternating;
      break;
    case v1::UPDATE_RULE_SYMMETRIC:
      out->update_rule = UpdateRule::kSymmetric;
      break;
    default:
      return InvalidField("solver.update_rule", "must be an UpdateRule", StrCat(in.update_rule()));
  }
  switch (in.over_relaxation()) {
    case v1::OVER_RELAXATION_UNSPECIFIED:
    case v1::OVER_RELAXATION_AUTO:
      out->over_relaxation = out->update_rule == UpdateRule::kAlternating && out->tolerance > 0;
      return nullopt;
    case v1::OVER_RELAXATION_OFF:
      out->over_relaxation = false;
      return nullopt;
    default:
      return InvalidField("solver.over_relaxation", "must be an OverRelaxation", StrCat(in.over_relaxation()));
  }
}

optional<Error> CheckCustomRecipe(const v1::CustomRecipe& in, Recipe* out) {
  const auto bad_enum = [](const char* field, int value) {
    return InvalidField(field, "must be a value of its enum", StrCat(value));
  };
  switch (in.order()) {
    case v1::NORMALIZATION_ORDER_UNSPECIFIED:
    case v1::NORMALIZATION_ORDER_ROW_COLUMN:
      out->order = Order::kRowColumn;
      break;
    case v1::NORMALIZATION_ORDER_COLUMN_ROW:
      out->order = Order::kColumnRow;
      break;
    default:
      return bad_enum("normalization.custom.order", in.order());
  }
  switch (in.start()) {
    case v1::NORMALIZATION_START_UNSPECIFIED:
    case v1::NORMALIZATION_START_EXP:
      out->start = Start::kExp;
      break;
    case v1::NORMALIZATION_START_ROW_SOFTMAX:
      out->start = Start::kRowSoftmax;
      if (out->order == Order::kRowColumn) break;
      return InvalidField("normalization.custom.order", "must be ROW_COLUMN with start ROW_SOFTMAX", "COLUMN_ROW");
    default:
      return bad_enum("normalization.custom.start", in.start());
  }
  switch (in.guard()) {
    case v1::NORMALIZATION_GUARD_UNSPECIFIED:
    case v1::NORMALIZATION_GUARD_NONE:
      out->guard = Guard::kNone;
      break;
    case v1::NORMALIZATION_GUARD_MAX:
      out->guard = Guard::kMax;
      break;
    case v1::NORMALIZATION_GUARD_ADD:
      out->guard = Guard::kAdd;
      break;
    default:
      return bad_enum("normalization.custom.guard", in.guard());
  }
  if (!IsNonNegative(in.offset())) {
    return InvalidField("normalization.custom.offset", "must be finite and >= 0", StrCat(in.offset()));
  }
  if (!IsNonNegative(in.guard_value())) {
    return InvalidField("normalization.custom.guard_value", "must be finite and >= 0", StrCat(in.guard_value()));
  }
  if (out->guard == Guard::kNone && in.guard_value() != 0) {
    return InvalidField("normalization.custom.guard_value", "must be 0 with guard NONE", StrCat(in.guard_value()));
  }
  if (in.has_logit_floor() && !std::isfinite(in.logit_floor())) {
    return InvalidField("normalization.custom.logit_floor", "must be finite (unset: no floor)",
                        StrCat(in.logit_floor()));
  }
  out->offset = in.offset();
  out->guard_value = in.guard_value();
  if (in.has_logit_floor()) out->logit_floor = in.logit_floor();
  return nullopt;
}

}  // namespace

optional<Error> CheckTransportSolver(const v1::SolverOptions& in, ProblemKind kind, PointCost cost,
                                     const Limits& limits, SolverOptions* out) {
  const int degree = kind == ProblemKind::kPointCloud && cost == PointCost::kSquaredEuclidean ? 2 : 1;
  if (auto error = CheckEpsilon(in, degree, out)) return error;
  if (auto error = CheckSchedule(in, degree, out)) return error;
  if (auto error = CheckIterations(in, kTransportIterations, limits, out)) return error;
  if (auto error = CheckTolerance(in, kTransportTolerance, out)) return error;
  if (auto error = CheckUpdates(in, out)) return error;
  if (in.has_reach_a()) {
    if (auto error = Power("solver.reach_a", in.reach_a(), degree, &out->rho_a)) return error;
  }
  if (in.has_reach_b()) {
    if (auto error = Power("solver.reach_b", in.reach_b(), degree, &out->rho_b)) return error;
  }
  if (in.has_time_budget() && !IsPositive(in.time_budget())) {
    return InvalidField("solver.time_budget", "must be finite and > 0", StrCat(in.time_budget()));
  }
  out->debias = in.debias();
  if (in.debias() && kind != ProblemKind::kPointCloud) {
    return InvalidField("solver.debias", "is for point clouds only", "a dense problem");
  }
  return CheckPrecision(in, out);
}

optional<Error> CheckCostFunction(v1::CostFunction cost, TransportInputs* out) {
  switch (cost) {
    case v1::COST_FUNCTION_SQUARED_EUCLIDEAN:
      return nullopt;
    case v1::COST_FUNCTION_HALF_SQUARED_EUCLIDEAN:
      out->kappa = 0.5;
      return nullopt;
    case v1::COST_FUNCTION_EUCLIDEAN:
      out->point_cost = PointCost::kEuclidean;
      return nullopt;
    case v1::COST_FUNCTION_COSINE:
      out->point_cost = PointCost::kCosine;
      return nullopt;
    case v1::COST_FUNCTION_NEGATIVE_DOT:
      out->point_cost = PointCost::kNegativeDot;
      return nullopt;
    default:
      return InvalidField("point_cloud.cost",
                          "must be SQUARED_EUCLIDEAN, HALF_SQUARED_EUCLIDEAN, EUCLIDEAN, COSINE or NEGATIVE_DOT",
                          StrCat(cost));
  }
}

optional<Error> CheckSparsePlanOptions(const v1::SparsePlanOptions& in, const Limits& limits, SparseOutput* out) {
  if (!IsNonNegative(in.threshold())) {
    return InvalidField("sparse_plan.threshold", "must be finite and >= 0", StrCat(in.threshold()));
  }
  if (in.max_entries() < 1) return InvalidField("sparse_plan.max_entries", "must be >= 1", StrCat(in.max_entries()));
  if (in.max_entries() > limits.max_matrix_elements) {
    return TooLarge("sparse_plan.max_entries", "the number of entries", limits.max_matrix_elements, in.max_entries());
  }
  out->threshold = in.threshold();
  out->max_entries = in.max_entries();
  return nullopt;
}

optional<Error> CheckHessianOptions(const v1::HessianProducts& in, const Limits& limits, HessianInputs* out) {
  switch (in.preconditioner()) {
    case v1::PRECONDITIONER_UNSPECIFIED:
    case v1::PRECONDITIONER_JACOBI:
      out->preconditioner = Preconditioner::kJacobi;
      break;
    case v1::PRECONDITIONER_NONE:
      out->preconditioner = Preconditioner::kNone;
      break;
    case v1::PRECONDITIONER_NEUMANN:
      out->preconditioner = Preconditioner::kNeumann;
      break;
    default:
      return InvalidField("hessian.preconditioner", "must be a Preconditioner", StrCat(in.preconditioner()));
  }
  const bool neumann = out->preconditioner == Preconditioner::kNeumann;
  if (in.neumann_terms() < 0 || in.neumann_terms() > (neumann ? kNeumannTermsMax : 0)) {
    return InvalidField(
        "hessian.neumann_terms",
        neumann ? StrCat("must be in [1, ", kNeumannTermsMax, "], or 0 for the default") : "must be 0 without NEUMANN",
        StrCat(in.neumann_terms()));
  }
  if (neumann) out->neumann_terms = in.neumann_terms() > 0 ? in.neumann_terms() : kNeumannTerms;
  if (in.has_tolerance()) out->tolerance = in.tolerance();
  if (!IsNonNegative(out->tolerance)) {
    return InvalidField("hessian.tolerance", "must be finite and >= 0", StrCat(out->tolerance));
  }
  if (in.max_iterations() < 0) {
    return InvalidField("hessian.max_iterations", "must be >= 0 (0: the default)", StrCat(in.max_iterations()));
  }
  if (in.max_iterations() > limits.max_iterations) {
    return TooLarge("hessian.max_iterations", "iterations", limits.max_iterations, in.max_iterations());
  }
  if (in.max_iterations() > 0) out->max_iterations = in.max_iterations();
  return nullopt;
}

optional<Error> CheckNormalizationSolver(const v1::SolverOptions& in, bool exact, bool backward_only,
                                         const Limits& limits, SolverOptions* out) {
  const struct {
    const char* field;
    bool set;
  } refused[] = {
      {"solver.epsilon", in.epsilon() != 0},
      {"solver.blur", in.blur() != 0},
      {"solver.scaling", in.scaling() != 0},
      {"solver.epsilon_start", in.epsilon_start() != 0},
      {"solver.update_rule", in.update_rule() != 0},
      {"solver.over_relaxation", in.over_relaxation() != 0},
      {"solver.reach_a", in.has_reach_a()},
      {"solver.reach_b", in.has_reach_b()},
      {"solver.debias", in.debias()},
      {"solver.time_budget", in.has_time_budget()},
      {"solver.initial_f", in.has_initial_f()},
      {"solver.initial_g", in.has_initial_g()},
  };
  for (const auto& entry : refused) {
    if (entry.set) return InvalidField(entry.field, "must be unset: it is for transport problems", "a normalization");
  }
  if (backward_only && in.max_iterations() != 0) {
    return InvalidField("solver.max_iterations", "must be unset with `plan`: nothing is iterated",
                        StrCat(in.max_iterations()));
  }
  if (backward_only && in.has_tolerance()) {
    return InvalidField("solver.tolerance", "must be unset with `plan`: nothing is iterated", StrCat(in.tolerance()));
  }
  if (auto error = CheckIterations(in, exact ? kExactIterations : kNormalizationIterations, limits, out)) return error;
  if (auto error = CheckTolerance(in, 0, out)) return error;
  out->over_relaxation = false;
  return CheckPrecision(in, out);
}

optional<Error> CheckRecipe(const v1::NormalizationProblem& in, Recipe* out) {
  if (in.has_custom() && in.recipe() != v1::NORMALIZATION_RECIPE_CUSTOM) {
    return InvalidField("normalization.custom", "must be unset unless the recipe is CUSTOM",
                        StrCat("recipe ", in.recipe()));
  }
  switch (in.recipe()) {
    case v1::NORMALIZATION_RECIPE_UNSPECIFIED:
    case v1::NORMALIZATION_RECIPE_LOG_ROW_COLUMN:
      *out = LogRowColumnRecipe();
      return nullopt;
    case v1::NORMALIZATION_RECIPE_EXP_COLUMN_ROW:
      *out = ExpColumnRowRecipe();
      return nullopt;
    case v1::NORMALIZATION_RECIPE_DEEPSEEK:
      *out = DeepSeekRecipe();
      return nullopt;
    case v1::NORMALIZATION_RECIPE_EXACT:
      *out = ExactRecipe();
      return nullopt;
    case v1::NORMALIZATION_RECIPE_CUSTOM:
      if (!in.has_custom()) return InvalidField("normalization.custom", "is required with recipe CUSTOM", "nothing");
      return CheckCustomRecipe(in.custom(), out);
    default:
      return InvalidField("normalization.recipe", "must be a NormalizationRecipe", StrCat(in.recipe()));
  }
}

}  // namespace sinkhorn
