#include "client/cli/solve_request.h"

#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/types/optional.h"
#include "client/cli/array_input.h"
#include "client/cli/names.h"
#include "client/cpp/tensor.h"

using OptionalDouble = absl::optional<double>;
using OptionalInt = absl::optional<int32_t>;

// ---- Arrays ----
ABSL_FLAG(std::string, logits, "", "solve: normalisation. Logits W [..., n, m]: .npy, .csv/.tsv/.txt, or 0,1;1,0.");
ABSL_FLAG(std::string, row_marginals, "", "solve: normalisation. Target row sums [n]; default all 1.");
ABSL_FLAG(std::string, column_marginals, "", "solve: normalisation. Target column sums [m]; default all 1.");
ABSL_FLAG(std::string, dustbin_score, "", "solve: normalisation. Score of an added row and column.");
ABSL_FLAG(std::string, cotangent, "", "solve: normalisation. dL/dP; the gradient of the logits is returned.");
ABSL_FLAG(std::string, plan, "", "solve: normalisation. P of an earlier forward, instead of --logits, for a backward.");
ABSL_FLAG(std::string, cost, "", "solve: dense transport. Cost matrix C [..., n, m].");
ABSL_FLAG(std::string, x, "", "solve: point clouds. Source points [..., n, d].");
ABSL_FLAG(std::string, y, "", "solve: point clouds. Target points [..., m, d].");
ABSL_FLAG(std::string, a, "", "solve: transport. Masses of the rows (x) [n]; default 1/n each.");
ABSL_FLAG(std::string, b, "", "solve: transport. Masses of the columns (y) [m]; default 1/m each.");
ABSL_FLAG(std::string, initial_f, "", "solve: transport. Initial potential f [n].");
ABSL_FLAG(std::string, initial_g, "", "solve: transport. Initial potential g [m].");
ABSL_FLAG(std::string, apply_v, "", "solve: transport. V [m, k]; P V is returned.");
ABSL_FLAG(std::string, apply_u, "", "solve: transport. U [n, k]; P^T U is returned.");
ABSL_FLAG(std::string, hessian_x, "",
          "solve: point clouds. Directions of x [k, n, d] (text: one of them); Hessian-vector products are returned.");
ABSL_FLAG(std::string, hessian_y, "", "solve: point clouds. Directions of y [k, m, d]; default 0.");
ABSL_FLAG(std::string, dtype, "",
          "solve: converts all inputs to float32, float64, float16 or bfloat16 before they are sent; outputs have the "
          "dtype of the first input. Default: as in the .npy file; float32 for text.");

// ---- What is asked ----
ABSL_FLAG(std::string, cost_function, "",
          "solve: point clouds, required. squared_euclidean (|x-y|^2), half_squared_euclidean (|x-y|^2 / 2), euclidean "
          "(|x-y|), cosine (1 - cos) or negative_dot (-<x,y>).");
ABSL_FLAG(std::vector<std::string>, outputs, {},
          "solve: comma-separated list of value, value_linear, primal_bound, potentials, plan, marginals, "
          "gradient_points, gradient_masses, gradient_cost, projection, members. Default: value,potentials for "
          "transport, plan for normalisation.");
ABSL_FLAG(std::string, request_id, "", "solve: name of the request in the server's log.");
ABSL_FLAG(std::string, recipe, "",
          "solve: normalisation. log_row_column (default), exp_column_row, deepseek, exact, or custom (then see "
          "--custom_*).");
ABSL_FLAG(std::string, backward_mode, "",
          "solve: normalisation with --cotangent. unrolled, implicit, implicit_unit or implicit_full.");
ABSL_FLAG(std::string, custom_start, "", "solve: --recipe=custom. exp or row_softmax.");
ABSL_FLAG(std::string, custom_order, "", "solve: --recipe=custom. row_column or column_row.");
ABSL_FLAG(std::string, custom_guard, "", "solve: --recipe=custom. none, max or add.");
ABSL_FLAG(OptionalDouble, custom_offset, {}, "solve: --recipe=custom. Added to each entry after the start.");
ABSL_FLAG(OptionalDouble, custom_guard_value, {}, "solve: --recipe=custom. The guard's value.");
ABSL_FLAG(OptionalDouble, custom_logit_floor, {}, "solve: --recipe=custom. Lower logits are raised to it.");

// ---- Solver ----
ABSL_FLAG(OptionalDouble, epsilon, {}, "solve: regularisation in units of the cost. Transport needs it or --blur.");
ABSL_FLAG(OptionalDouble, blur, {},
          "solve: the same as a length: epsilon = blur^p (squared distances: p = 2; else 1).");
ABSL_FLAG(OptionalDouble, scaling, {}, "solve: annealing: blur is multiplied by it each iteration; in (0, 1).");
ABSL_FLAG(OptionalDouble, epsilon_start, {}, "solve: first epsilon of the annealing. Default: the largest cost.");
ABSL_FLAG(std::string, update_rule, "", "solve: transport. alternating (default) or symmetric.");
ABSL_FLAG(std::string, over_relaxation, "", "solve: transport. auto (default) or off.");
ABSL_FLAG(OptionalInt, max_iterations, {},
          "solve: upper bound on iterations. Default: transport 1000, normalisation 20.");
ABSL_FLAG(OptionalDouble, tolerance, {},
          "solve: stops at this L1 marginal error. Default 1e-5 (normalisation 0); 0: exactly --max_iterations.");
ABSL_FLAG(OptionalDouble, reach_a, {},
          "solve: transport. Relaxes the row marginals: rho = reach^p. Default: balanced.");
ABSL_FLAG(OptionalDouble, reach_b, {}, "solve: transport. Relaxes the column marginals.");
ABSL_FLAG(OptionalDouble, time_budget, {},
          "solve: transport. Seconds after arrival at which iterating ends and the iterate reached is the answer, with "
          "its certificate, instead of an error at the deadline.");
ABSL_FLAG(std::string, preconditioner, "", "solve: --hessian_x, --hessian_y. none, jacobi (default) or neumann.");
ABSL_FLAG(OptionalInt, neumann_terms, {}, "solve: --preconditioner=neumann. Terms, 1 to 16; default 3.");
ABSL_FLAG(OptionalDouble, hessian_tolerance, {},
          "solve: --hessian_x, --hessian_y. Relative residual of their conjugate gradients; default 1e-5.");
ABSL_FLAG(OptionalInt, hessian_max_iterations, {}, "solve: --hessian_x, --hessian_y. Iterations; default 200.");
ABSL_FLAG(OptionalDouble, sparse_threshold, {},
          "solve: transport. Returns the plan's entries from this on, at most --sparse_max_entries.");
ABSL_FLAG(OptionalInt, sparse_max_entries, {},
          "solve: transport. Most entries of a sparse plan; with more, their number and mass alone come back.");
ABSL_FLAG(bool, debias, false, "solve: point clouds. Sinkhorn divergence instead of the transport cost.");
ABSL_FLAG(std::string, precision, "", "solve: strict (default), fast or double.");

namespace sinkhorn::client {
namespace {

// One array flag: its name, its value, the rank it is given in text (array_input.h), and the field it fills.
struct ArrayFlag {
  const char* name;
  std::string value;
  int min_rank;
  v1::Tensor* (*field)(v1::SolveRequest*);
};

std::vector<ArrayFlag> ArrayFlags(bool dense) {
  using R = v1::SolveRequest;
  return {
      {"logits", absl::GetFlag(FLAGS_logits), 2, [](R* r) { return r->mutable_normalization()->mutable_logits(); }},
      {"row_marginals", absl::GetFlag(FLAGS_row_marginals), 1,
       [](R* r) { return r->mutable_normalization()->mutable_row_marginals(); }},
      {"column_marginals", absl::GetFlag(FLAGS_column_marginals), 1,
       [](R* r) { return r->mutable_normalization()->mutable_column_marginals(); }},
      {"dustbin_score", absl::GetFlag(FLAGS_dustbin_score), 0,
       [](R* r) { return r->mutable_normalization()->mutable_dustbin_score(); }},
      {"cotangent", absl::GetFlag(FLAGS_cotangent), 2,
       [](R* r) { return r->mutable_normalization()->mutable_cotangent(); }},
      {"plan", absl::GetFlag(FLAGS_plan), 2, [](R* r) { return r->mutable_normalization()->mutable_plan(); }},
      {"cost", absl::GetFlag(FLAGS_cost), 2, [](R* r) { return r->mutable_dense()->mutable_cost(); }},
      {"x", absl::GetFlag(FLAGS_x), 2, [](R* r) { return r->mutable_point_cloud()->mutable_x(); }},
      {"y", absl::GetFlag(FLAGS_y), 2, [](R* r) { return r->mutable_point_cloud()->mutable_y(); }},
      {"a", absl::GetFlag(FLAGS_a), 1,
       dense ? +[](R* r) { return r->mutable_dense()->mutable_a(); }
             : +[](R* r) { return r->mutable_point_cloud()->mutable_a(); }},
      {"b", absl::GetFlag(FLAGS_b), 1,
       dense ? +[](R* r) { return r->mutable_dense()->mutable_b(); }
             : +[](R* r) { return r->mutable_point_cloud()->mutable_b(); }},
      {"initial_f", absl::GetFlag(FLAGS_initial_f), 1, [](R* r) { return r->mutable_solver()->mutable_initial_f(); }},
      {"initial_g", absl::GetFlag(FLAGS_initial_g), 1, [](R* r) { return r->mutable_solver()->mutable_initial_g(); }},
      {"apply_v", absl::GetFlag(FLAGS_apply_v), 2, [](R* r) { return r->mutable_apply_v(); }},
      {"apply_u", absl::GetFlag(FLAGS_apply_u), 2, [](R* r) { return r->mutable_apply_u(); }},
      {"hessian_x", absl::GetFlag(FLAGS_hessian_x), 3, [](R* r) { return r->mutable_hessian()->mutable_x(); }},
      {"hessian_y", absl::GetFlag(FLAGS_hessian_y), 3, [](R* r) { return r->mutable_hessian()->mutable_y(); }},
  };
}

// The flags that belong to one problem only, for the message when they are mixed.
absl::StatusOr<v1::SolveRequest::ProblemCase> WhichProblem() {
  const bool normalization = !absl::GetFlag(FLAGS_logits).empty() || !absl::GetFlag(FLAGS_plan).empty();
  const bool dense = !absl::GetFlag(FLAGS_cost).empty();
  const bool point_cloud = !absl::GetFlag(FLAGS_x).empty() || !absl::GetFlag(FLAGS_y).empty();
  if (normalization + dense + point_cloud != 1) {
    return absl::InvalidArgumentError(
        "give the inputs of one problem: --logits (normalisation), --cost (dense transport), or --x and --y (point "
        "clouds)");
  }
  if (normalization) return v1::SolveRequest::kNormalization;
  return dense ? v1::SolveRequest::kDense : v1::SolveRequest::kPointCloud;
}

absl::Status ReadArrays(v1::SolveRequest::ProblemCase problem, v1::SolveRequest* request) {
  int dtype = v1::DATA_TYPE_UNSPECIFIED;
  if (const std::string name = absl::GetFlag(FLAGS_dtype); !name.empty()) {
    const absl::StatusOr<int> found = FromShortName(v1::DataType_descriptor(), name);
    if (!found.ok()) return absl::InvalidArgumentError(absl::StrCat("--dtype ", found.status().message()));
    dtype = *found;
  }
  for (const ArrayFlag& flag : ArrayFlags(problem == v1::SolveRequest::kDense)) {
    if (flag.value.empty()) continue;
    absl::StatusOr<v1::Tensor> tensor = ReadArray(flag.value, flag.min_rank);
    if (tensor.ok() && dtype != v1::DATA_TYPE_UNSPECIFIED) tensor = Convert(*tensor, static_cast<v1::DataType>(dtype));
    if (!tensor.ok()) {
      return absl::Status(tensor.status().code(), absl::StrCat("--", flag.name, ": ", tensor.status().message()));
    }
    *flag.field(request) = *std::move(tensor);
    if (request->problem_case() != problem && request->problem_case() != v1::SolveRequest::PROBLEM_NOT_SET) {
      return absl::InvalidArgumentError(absl::StrCat("--", flag.name, " does not belong to this problem"));
    }
  }
  return absl::OkStatus();
}

// Sets an enum field through `set` if the flag is given.
template <typename Set>
absl::Status SetEnum(const char* flag, const std::string& name, const google::protobuf::EnumDescriptor* type, Set set) {
  if (name.empty()) return absl::OkStatus();
  const absl::StatusOr<int> value = FromShortName(type, name);
  if (!value.ok()) return absl::InvalidArgumentError(absl::StrCat("--", flag, " ", value.status().message()));
  set(*value);
  return absl::OkStatus();
}

absl::Status SetEnums(v1::SolveRequest::ProblemCase problem, v1::SolveRequest* request) {
  // Touched only if a flag is given: mutable_*() would make the field present.
  const auto normalization = [request] { return request->mutable_normalization(); };
  const auto custom = [request] { return request->mutable_normalization()->mutable_custom(); };
  const auto solver = [request] { return request->mutable_solver(); };
  absl::Status status;
  status.Update(SetEnum("cost_function", absl::GetFlag(FLAGS_cost_function), v1::CostFunction_descriptor(),
                        [&](int v) { request->mutable_point_cloud()->set_cost(static_cast<v1::CostFunction>(v)); }));
  status.Update(SetEnum("recipe", absl::GetFlag(FLAGS_recipe), v1::NormalizationRecipe_descriptor(),
                        [&](int v) { normalization()->set_recipe(static_cast<v1::NormalizationRecipe>(v)); }));
  status.Update(SetEnum("backward_mode", absl::GetFlag(FLAGS_backward_mode), v1::BackwardMode_descriptor(),
                        [&](int v) { normalization()->set_backward_mode(static_cast<v1::BackwardMode>(v)); }));
  status.Update(SetEnum("custom_start", absl::GetFlag(FLAGS_custom_start), v1::NormalizationStart_descriptor(),
                        [&](int v) { custom()->set_start(static_cast<v1::NormalizationStart>(v)); }));
  status.Update(SetEnum("custom_order", absl::GetFlag(FLAGS_custom_order), v1::NormalizationOrder_descriptor(),
                        [&](int v) { custom()->set_order(static_cast<v1::NormalizationOrder>(v)); }));
  status.Update(SetEnum("custom_guard", absl::GetFlag(FLAGS_custom_guard), v1::NormalizationGuard_descriptor(),
                        [&](int v) { custom()->set_guard(static_cast<v1::NormalizationGuard>(v)); }));
  status.Update(SetEnum("update_rule", absl::GetFlag(FLAGS_update_rule), v1::UpdateRule_descriptor(),
                        [&](int v) { solver()->set_update_rule(static_cast<v1::UpdateRule>(v)); }));
  status.Update(SetEnum("over_relaxation", absl::GetFlag(FLAGS_over_relaxation), v1::OverRelaxation_descriptor(),
                        [&](int v) { solver()->set_over_relaxation(static_cast<v1::OverRelaxation>(v)); }));
  status.Update(SetEnum("precision", absl::GetFlag(FLAGS_precision), v1::Precision_descriptor(),
                        [&](int v) { solver()->set_precision(static_cast<v1::Precision>(v)); }));
  status.Update(
      SetEnum("preconditioner", absl::GetFlag(FLAGS_preconditioner), v1::Preconditioner_descriptor(),
              [&](int v) { request->mutable_hessian()->set_preconditioner(static_cast<v1::Preconditioner>(v)); }));
  for (const std::string& output : absl::GetFlag(FLAGS_outputs)) {
    status.Update(SetEnum("outputs", output, v1::Output_descriptor(),
                          [&](int v) { request->add_outputs(static_cast<v1::Output>(v)); }));
  }
  if (status.ok() && request->problem_case() != problem) {
    return absl::InvalidArgumentError(
        "--cost_function belongs to point clouds; --recipe, --custom_* and --backward_mode to normalisation");
  }
  return status;
}

void SetNumbers(v1::SolveRequest* request) {
  const auto solver = [request] { return request->mutable_solver(); };
  const auto custom = [request] { return request->mutable_normalization()->mutable_custom(); };
  if (const auto v = absl::GetFlag(FLAGS_epsilon)) solver()->set_epsilon(*v);
  if (const auto v = absl::GetFlag(FLAGS_blur)) solver()->set_blur(*v);
  if (const auto v = absl::GetFlag(FLAGS_scaling)) solver()->set_scaling(*v);
  if (const auto v = absl::GetFlag(FLAGS_epsilon_start)) solver()->set_epsilon_start(*v);
  if (const auto v = absl::GetFlag(FLAGS_max_iterations)) solver()->set_max_iterations(*v);
  if (const auto v = absl::GetFlag(FLAGS_tolerance)) solver()->set_tolerance(*v);
  if (const auto v = absl::GetFlag(FLAGS_reach_a)) solver()->set_reach_a(*v);
  if (const auto v = absl::GetFlag(FLAGS_reach_b)) solver()->set_reach_b(*v);
  if (const auto v = absl::GetFlag(FLAGS_time_budget)) solver()->set_time_budget(*v);
  const auto hessian = [request] { return request->mutable_hessian(); };
  if (const auto v = absl::GetFlag(FLAGS_neumann_terms)) hessian()->set_neumann_terms(*v);
  if (const auto v = absl::GetFlag(FLAGS_hessian_tolerance)) hessian()->set_tolerance(*v);
  if (const auto v = absl::GetFlag(FLAGS_hessian_max_iterations)) hessian()->set_max_iterations(*v);
  if (const auto v = absl::GetFlag(FLAGS_sparse_threshold)) request->mutable_sparse_plan()->set_threshold(*v);
  if (const auto v = absl::GetFlag(FLAGS_sparse_max_entries)) request->mutable_sparse_plan()->set_max_entries(*v);
  if (absl::GetFlag(FLAGS_debias)) solver()->set_debias(true);
  if (const auto v = absl::GetFlag(FLAGS_custom_offset)) custom()->set_offset(*v);
  if (const auto v = absl::GetFlag(FLAGS_custom_guard_value)) custom()->set_guard_value(*v);
  if (const auto v = absl::GetFlag(FLAGS_custom_logit_floor)) custom()->set_logit_floor(*v);
  request->set_request_id(absl::GetFlag(FLAGS_request_id));
}

}  // namespace

absl::StatusOr<v1::SolveRequest> RequestFromFlags() {
  const absl::StatusOr<v1::SolveRequest::ProblemCase> problem = WhichProblem();
  if (!problem.ok()) return problem.status();
  v1::SolveRequest request;
  if (absl::Status status = ReadArrays(*problem, &request); !status.ok()) return status;
  if (*problem == v1::SolveRequest::kPointCloud && absl::GetFlag(FLAGS_cost_function).empty()) {
    return absl::InvalidArgumentError(absl::StrCat("--cost_function must be one of ",
                                                   ShortNames(v1::CostFunction_descriptor()),
                                                   ": the factor of a squared distance rescales epsilon"));
  }
  SetNumbers(&request);
  if (absl::Status status = SetEnums(*problem, &request); !status.ok()) return status;
  return request;
}

std::string DescribeTensor(const v1::Tensor& tensor) {
  return absl::StrCat("[", absl::StrJoin(tensor.shape(), ", "), "] ", ShortName(tensor.dtype()));
}

std::string DescribeRequest(const v1::SolveRequest& request) {
  switch (request.problem_case()) {
    case v1::SolveRequest::kNormalization: {
      const v1::NormalizationProblem& problem = request.normalization();
      if (!problem.has_logits()) return absl::StrCat("normalization, plan ", DescribeTensor(problem.plan()));
      return absl::StrCat("normalization, logits ", DescribeTensor(problem.logits()));
    }
    case v1::SolveRequest::kDense:
      return absl::StrCat("dense, cost ", DescribeTensor(request.dense().cost()));
    case v1::SolveRequest::kPointCloud:
      return absl::StrCat("point_cloud, x ", DescribeTensor(request.point_cloud().x()), ", y ",
                          DescribeTensor(request.point_cloud().y()));
    default:
      return "no problem";
  }
}

}  // namespace sinkhorn::client
