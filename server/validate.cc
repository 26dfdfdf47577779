#include "server/validate.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/reply_plan.h"
#include "server/solver_check.h"
#include "server/tensor_check.h"

namespace sinkhorn {
namespace {

using absl::nullopt;
using absl::optional;
using absl::StrCat;

constexpr int64_t kMaxDirections = 128;    // Of Hessian-vector products in one request.
constexpr double kTotalsTolerance = 1e-5;  // Relative, between totals that must be equal.

// Validates one request. Errors are returned as soon as they are found, so a later check may rely on the earlier ones.
class Validator {
 public:
  Validator(absl::string_view bytes, const v1::SolveRequest& request, const Limits& limits, Problem* problem)
      : request_(request), limits_(limits), problem_(*problem), tensors_(bytes) {}

  optional<Error> Run();
  const TensorCheck& tensors() const { return tensors_; }
  const OutputMask& outputs() const { return outputs_; }

 private:
  // Checks that need the message alone.
  optional<Error> CheckNormalization();
  optional<Error> CheckNormalizationSource(const v1::NormalizationProblem& in);
  optional<Error> CheckBackward(const v1::NormalizationProblem& in);
  optional<Error> CheckDense();
  optional<Error> CheckPointCloud();
  optional<Error> CheckMasses(const std::string& prefix, const v1::Tensor* a, const v1::Tensor* b);
  optional<Error> CheckTransportExtras();
  optional<Error> CheckHessian();
  optional<Error> CheckSparsePlan();
  optional<Error> CheckMatrixSize(const char* field, int64_t rows, int64_t columns);
  optional<Error> CheckCount();

  // Checks of the contents.
  optional<Error> CheckDirections();
  optional<Error> CheckTotals(const std::string& prefix);
  optional<Error> CheckExactTotals();

  const v1::SolveRequest& request_;
  const Limits& limits_;
  Problem& problem_;
  TensorCheck tensors_;
  OutputMask outputs_;
};

optional<Error> Validator::Run() {
  if (request_.request_id().size() > kMaxRequestIdBytes) {
    return InvalidField("request_id", StrCat("must have at most ", kMaxRequestIdBytes, " bytes"),
                        StrCat(request_.request_id().size(), " bytes"));
  }
  // 1. The message: options, shapes, limits.
  std::string prefix;
  optional<Error> error;
  switch (request_.problem_case()) {
    case v1::SolveRequest::kNormalization:
      error = CheckNormalization();
      break;
    case v1::SolveRequest::kDense:
      prefix = "dense";
      error = CheckDense();
      break;
    case v1::SolveRequest::kPointCloud:
      prefix = "point_cloud";
      error = CheckPointCloud();
      break;
    case v1::SolveRequest::PROBLEM_NOT_SET:
      return InvalidField("problem", "must be one of normalization, dense and point_cloud", "none");
  }
  if (error) return error;
  if ((error = CheckHessian()) || (error = CheckSparsePlan())) return error;
  if ((error = CheckCount())) return error;
  if ((error = CheckOutputs(request_, problem_, &outputs_))) return error;
  if (outputs_.Has(v1::OUTPUT_PLAN) && problem_.kind == ProblemKind::kPointCloud) {
    if ((error = CheckMatrixSize("outputs", problem_.n, problem_.m))) return error;
  }
  // 2. The data.
  if ((error = tensors_.Scan())) return error;
  if ((error = CheckDirections())) return error;
  return problem_.kind == ProblemKind::kNormalization ? CheckExactTotals() : CheckTotals(prefix);
}

// ---- Normalisation --------------------------------------------------------------------------------------------------

optional<Error> Validator::CheckNormalization() {
  const v1::NormalizationProblem& in = request_.normalization();
  NormalizationInputs* inputs = &problem_.normalization;
  problem_.kind = ProblemKind::kNormalization;

  if (optional<Error> error = CheckNormalizationSource(in)) return error;
  if (optional<Error> error = CheckRecipe(in, &inputs->recipe)) return error;
  int64_t* n = &problem_.n;
  int64_t* m = &problem_.m;
  if (in.has_row_marginals()) {
    if (auto error = tensors_.Add("normalization.row_marginals", in.row_marginals(), {{"n", n}},
                                  ElementRule::kFinitePositive, &inputs->row_marginals)) {
      return error;
    }
  }
  if (in.has_column_marginals()) {
    if (auto error = tensors_.Add("normalization.column_marginals", in.column_marginals(), {{"m", m}},
                                  ElementRule::kFinitePositive, &inputs->column_marginals)) {
      return error;
    }
  }
  if (in.has_dustbin_score()) {
    if (auto error = tensors_.Add("normalization.dustbin_score", in.dustbin_score(), {}, ElementRule::kFinite,
                                  &inputs->dustbin_score)) {
      return error;
    }
  }
  if (optional<Error> error = CheckBackward(in)) return error;
  if (request_.has_apply_v()) return InvalidField("apply_v", "is for transport problems only", "a normalization");
  if (request_.has_apply_u()) return InvalidField("apply_u", "is for transport problems only", "a normalization");
  return CheckNormalizationSolver(request_.solver(), inputs->recipe.exact, static_cast<bool>(inputs->plan), limits_,
                                  &problem_.solver);
}

// The matrix to work on: logits, or the plan of an earlier forward.
optional<Error> Validator::CheckNormalizationSource(const v1::NormalizationProblem& in) {
  NormalizationInputs* inputs = &problem_.normalization;
  int64_t* n = &problem_.n;
  int64_t* m = &problem_.m;
  if (!in.has_plan()) {
    if (!in.has_logits()) return InvalidField("normalization.logits", "is required without `plan`", "nothing");
    if (auto error = tensors_.Add("normalization.logits", in.logits(), {{"n", n}, {"m", m}}, ElementRule::kFinite,
                                  &inputs->logits)) {
      return error;
    }
    const int64_t added = in.has_dustbin_score() ? 1 : 0;
    return CheckMatrixSize("normalization.logits.shape", SaturatingSum(*n, added), SaturatingSum(*m, added));
  }
  if (in.has_logits()) return InvalidField("normalization.plan", "must be unset with `logits`", "both");
  if (!in.has_cotangent()) return InvalidField("normalization.cotangent", "is required with `plan`", "nothing");
  if (in.has_dustbin_score()) return InvalidField("normalization.dustbin_score", "must be unset with `plan`", "both");
  if (in.recipe() != v1::NORMALIZATION_RECIPE_UNSPECIFIED) {
    return InvalidField("normalization.recipe", "must be unset with `plan`", StrCat(in.recipe()));
  }
  if (auto error = tensors_.Add("normalization.plan", in.plan(), {{"n", n}, {"m", m}}, ElementRule::kFiniteNonNegative,
                                &inputs->plan)) {
    return error;
  }
  return CheckMatrixSize("normalization.plan.shape", *n, *m);
}

optional<Error> Validator::CheckBackward(const v1::NormalizationProblem& in) {
  NormalizationInputs* inputs = &problem_.normalization;
  if (!in.has_cotangent()) {
    if (in.backward_mode() == v1::BACKWARD_MODE_UNSPECIFIED) return nullopt;
    return InvalidField("normalization.backward_mode", "must be unset without `cotangent`", StrCat(in.backward_mode()));
  }
  int64_t rows = problem_.n + (in.has_dustbin_score() ? 1 : 0);
  int64_t columns = problem_.m + (in.has_dustbin_score() ? 1 : 0);
  if (auto error = tensors_.Add("normalization.cotangent", in.cotangent(), {{"rows", &rows}, {"columns", &columns}},
                                ElementRule::kFinite, &inputs->cotangent)) {
    return error;
  }
  const bool unrollable = static_cast<bool>(inputs->logits) && !inputs->recipe.exact;
  switch (in.backward_mode()) {
    case v1::BACKWARD_MODE_UNSPECIFIED:
      inputs->backward = unrollable ? BackwardMode::kUnrolled : BackwardMode::kImplicit;
      return nullopt;
    case v1::BACKWARD_MODE_UNROLLED:
      if (!unrollable) {
        return InvalidField("normalization.backward_mode", "UNROLLED needs logits and a recipe other than EXACT",
                            inputs->logits ? "recipe EXACT" : "a plan");
      }
      inputs->backward = BackwardMode::kUnrolled;
      return nullopt;
    case v1::BACKWARD_MODE_IMPLICIT:
      inputs->backward = BackwardMode::kImplicit;
      return nullopt;
    case v1::BACKWARD_MODE_IMPLICIT_UNIT:
      inputs->backward = BackwardMode::kImplicitUnit;
      return nullopt;
    case v1::BACKWARD_MODE_IMPLICIT_FULL:
      inputs->backward = BackwardMode::kImplicitFull;
      return nullopt;
    default:
      return InvalidField("normalization.backward_mode", "must be a BackwardMode", StrCat(in.backward_mode()));
  }
}

// EXACT with column marginals given needs equal totals. (Unset ones are chosen to fit; a dustbin makes the totals
// equal.)
optional<Error> Validator::CheckExactTotals() {
  const NormalizationInputs& inputs = problem_.normalization;
  if (!inputs.recipe.exact || !inputs.column_marginals || inputs.dustbin_score) return nullopt;
  const auto total = [&](const TensorView& marginals, int64_t size, int64_t member) {
    return marginals ? Sum(marginals, marginals.shared ? 0 : member * size, size) : static_cast<double>(size);
  };
  for (int64_t member = 0; member < problem_.count; ++member) {
    const double rows = total(inputs.row_marginals, problem_.n, member);
    const double columns = total(inputs.column_marginals, problem_.m, member);
    if (std::abs(rows - columns) <= kTotalsTolerance * std::max(rows, columns)) continue;
    return InvalidField("normalization.column_marginals.data",
                        "must have the total of the row marginals (1e-5 relative) for EXACT",
                        StrCat(columns, " against ", rows, " in member ", member));
  }
  return nullopt;
}

// ---- Transport ------------------------------------------------------------------------------------------------------

optional<Error> Validator::CheckDense() {
  const v1::DenseProblem& in = request_.dense();
  problem_.kind = ProblemKind::kDense;
  if (!in.has_cost()) return InvalidField("dense.cost", "is required", "nothing");
  if (auto error = tensors_.Add("dense.cost", in.cost(), {{"n", &problem_.n}, {"m", &problem_.m}}, ElementRule::kFinite,
                                &problem_.transport.cost)) {
    return error;
  }
  if (auto error = CheckMatrixSize("dense.cost.shape", problem_.n, problem_.m)) return error;
  return CheckMasses("dense", in.has_a() ? &in.a() : nullptr, in.has_b() ? &in.b() : nullptr);
}

optional<Error> Validator::CheckPointCloud() {
  const v1::PointCloudProblem& in = request_.point_cloud();
  TransportInputs* inputs = &problem_.transport;
  problem_.kind = ProblemKind::kPointCloud;
  if (!in.has_x()) return InvalidField("point_cloud.x", "is required", "nothing");
  if (!in.has_y()) return InvalidField("point_cloud.y", "is required", "nothing");
  if (auto error = tensors_.Add("point_cloud.x", in.x(), {{"n", &problem_.n}, {"d", &problem_.dim}},
                                ElementRule::kFinite, &inputs->x)) {
    return error;
  }
  if (auto error = tensors_.Add("point_cloud.y", in.y(), {{"m", &problem_.m}, {"d", &problem_.dim}},
                                ElementRule::kFinite, &inputs->y)) {
    return error;
  }
  if (in.y().dtype() != in.x().dtype()) {
    return InvalidField("point_cloud.y.dtype", StrCat("must be that of x, ", v1::DataType_Name(in.x().dtype())),
                        v1::DataType_Name(in.y().dtype()));
  }
  if (problem_.n > limits_.max_points) {
    return TooLarge("point_cloud.x.shape", "the number of points n", limits_.max_points, problem_.n);
  }
  if (problem_.m > limits_.max_points) {
    return TooLarge("point_cloud.y.shape", "the number of points m", limits_.max_points, problem_.m);
  }
  if (problem_.dim > limits_.max_dimension) {
    return TooLarge("point_cloud.x.shape", "the dimension d", limits_.max_dimension, problem_.dim);
  }
  if (auto error = CheckCostFunction(in.cost(), inputs)) return error;
  return CheckMasses("point_cloud", in.has_a() ? &in.a() : nullptr, in.has_b() ? &in.b() : nullptr);
}

// Cosines: every point has a direction.
optional<Error> Validator::CheckDirections() {
  if (problem_.transport.point_cost != PointCost::kCosine) return nullopt;
  const struct {
    const char* field;
    const TensorView& view;
    int64_t size;
  } clouds[] = {{"point_cloud.x.data", problem_.transport.x, problem_.n},
                {"point_cloud.y.data", problem_.transport.y, problem_.m}};
  for (const auto& cloud : clouds) {
    const int64_t rows = cloud.size * (cloud.view.shared ? 1 : problem_.count);
    const int64_t row = FirstVoidRow(cloud.view, rows, problem_.dim);
    if (row < 0) continue;
    return InvalidField(cloud.field, "must have no zero vector with COSINE",
                        StrCat("a zero vector in row ", row % cloud.size, " of member ", row / cloud.size));
  }
  return nullopt;
}

optional<Error> Validator::CheckMasses(const std::string& prefix, const v1::Tensor* a, const v1::Tensor* b) {
  TransportInputs* inputs = &problem_.transport;
  if (a != nullptr) {
    if (auto error =
            tensors_.Add(prefix + ".a", *a, {{"n", &problem_.n}}, ElementRule::kFiniteNonNegative, &inputs->a)) {
      return error;
    }
  }
  if (b != nullptr) {
    if (auto error =
            tensors_.Add(prefix + ".b", *b, {{"m", &problem_.m}}, ElementRule::kFiniteNonNegative, &inputs->b)) {
      return error;
    }
  }
  return CheckTransportExtras();
}

// What all transport problems share: the solver's options, initial potentials, and matrices to apply the plan to.
optional<Error> Validator::CheckTransportExtras() {
  TransportInputs* inputs = &problem_.transport;
  const v1::SolverOptions& solver = request_.solver();
  if (auto error = CheckTransportSolver(solver, problem_.kind, inputs->point_cost, limits_, &problem_.solver))
    return error;
  if (solver.has_initial_f()) {
    if (auto error = tensors_.Add("solver.initial_f", solver.initial_f(), {{"n", &problem_.n}}, ElementRule::kFinite,
                                  &inputs->initial_f)) {
      return error;
    }
  }
  if (solver.has_initial_g()) {
    if (auto error = tensors_.Add("solver.initial_g", solver.initial_g(), {{"m", &problem_.m}}, ElementRule::kFinite,
                                  &inputs->initial_g)) {
      return error;
    }
  }
  if (request_.has_apply_v()) {
    if (auto error = tensors_.Add("apply_v", request_.apply_v(), {{"m", &problem_.m}, {"k", &inputs->v_columns}},
                                  ElementRule::kFinite, &inputs->v)) {
      return error;
    }
    if (inputs->v_columns > limits_.max_dimension) {
      return TooLarge("apply_v.shape", "the number of columns k", limits_.max_dimension, inputs->v_columns);
    }
  }
  if (request_.has_apply_u()) {
    if (auto error = tensors_.Add("apply_u", request_.apply_u(), {{"n", &problem_.n}, {"k", &inputs->u_columns}},
                                  ElementRule::kFinite, &inputs->u)) {
      return error;
    }
    if (inputs->u_columns > limits_.max_dimension) {
      return TooLarge("apply_u.shape", "the number of columns k", limits_.max_dimension, inputs->u_columns);
    }
  }
  return nullopt;
}

optional<Error> Validator::CheckHessian() {
  if (!request_.has_hessian()) return nullopt;
  const v1::HessianProducts& in = request_.hessian();
  HessianInputs* out = &problem_.transport.hessian;
  if (problem_.kind != ProblemKind::kPointCloud) return InvalidField("hessian", "is for point clouds only", "another");
  if (problem_.transport.point_cost == PointCost::kEuclidean) {
    return InvalidField("hessian", "is not for EUCLIDEAN, which has no second derivative where points meet",
                        "cost EUCLIDEAN");
  }
  if (!in.has_x() && !in.has_y()) return InvalidField("hessian.x", "or hessian.y is required", "neither");
  int64_t count = 0;
  if (in.has_x()) {
    if (auto error = tensors_.Add("hessian.x", in.x(), {{"k", &count}, {"n", &problem_.n}, {"d", &problem_.dim}},
                                  ElementRule::kFinite, &out->x)) {
      return error;
    }
  }
  if (in.has_y()) {
    if (auto error = tensors_.Add("hessian.y", in.y(), {{"k", &count}, {"m", &problem_.m}, {"d", &problem_.dim}},
                                  ElementRule::kFinite, &out->y)) {
      return error;
    }
  }
  if (count > kMaxDirections) return TooLarge("hessian", "the number of directions k", kMaxDirections, count);
  out->count = count;
  return CheckHessianOptions(in, limits_, out);
}

optional<Error> Validator::CheckSparsePlan() {
  if (!request_.has_sparse_plan()) return nullopt;
  SparseOutput* out = &problem_.outputs.sparse_plan;
  if (problem_.kind == ProblemKind::kNormalization) {
    return InvalidField("sparse_plan", "is for transport problems only", "a normalization");
  }
  if (auto error = CheckSparsePlanOptions(request_.sparse_plan(), limits_, out)) return error;
  out->max_entries = std::min(out->max_entries, SaturatingProduct(problem_.n, problem_.m));
  return nullopt;
}

// Totals of the masses: finite and > 0; balanced: equal. Absent masses have total 1.
optional<Error> Validator::CheckTotals(const std::string& prefix) {
  const TensorView& a = problem_.transport.a;
  const TensorView& b = problem_.transport.b;
  if (!a && !b) return nullopt;
  const bool balanced = std::isinf(problem_.solver.rho_a) && std::isinf(problem_.solver.rho_b);
  const bool all_shared = (!a || a.shared) && (!b || b.shared);
  for (int64_t member = 0; member < (all_shared ? 1 : problem_.count); ++member) {
    const double mass_a = a ? Sum(a, a.shared ? 0 : member * problem_.n, problem_.n) : 1;
    const double mass_b = b ? Sum(b, b.shared ? 0 : member * problem_.m, problem_.m) : 1;
    for (const auto& side : {std::make_pair(".a.data", mass_a), std::make_pair(".b.data", mass_b)}) {
      if (side.second > 0 && std::isfinite(side.second)) continue;
      return InvalidField(prefix + side.first, "must have a finite total > 0",
                          StrCat(side.second, " in member ", member));
    }
    if (!balanced || std::abs(mass_a - mass_b) <= kTotalsTolerance * std::max(mass_a, mass_b)) continue;
    return InvalidField(prefix + (b ? ".b.data" : ".a.data"),
                        "must make the totals of a and b equal (1e-5 relative) unless a reach is set",
                        StrCat("a: ", mass_a, ", b: ", mass_b, " in member ", member));
  }
  return nullopt;
}

// ---- Sizes ----------------------------------------------------------------------------------------------------------

optional<Error> Validator::CheckMatrixSize(const char* field, int64_t rows, int64_t columns) {
  const int64_t elements = SaturatingProduct(rows, columns);
  if (elements <= limits_.max_matrix_elements) return nullopt;
  return TooLarge(field, "the number of matrix elements n * m", limits_.max_matrix_elements, elements);
}

optional<Error> Validator::CheckCount() {
  problem_.count = tensors_.count();
  if (problem_.count <= limits_.max_members) return nullopt;
  return TooLarge("problem", "the number of members", limits_.max_members, problem_.count);
}

}  // namespace

optional<Error> Validate(absl::string_view bytes, const v1::SolveRequest& request, const Limits& limits,
                         Prepared* prepared, v1::SolveResponse* response) {
  Validator validator(bytes, request, limits, &prepared->problem);
  if (optional<Error> error = validator.Run()) return error;
  return PlanReply(validator.outputs(), validator.tensors(), limits, prepared, response);
}

}  // namespace sinkhorn
