#include "client/loadgen/verify.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/tensor.h"
#include "google/protobuf/descriptor.h"

namespace sinkhorn::client {
namespace {

// What rounding to the reply's dtype and float32 arithmetic may change, relative to a sum.
double Slack(v1::DataType dtype) {
  switch (dtype) {
    case v1::DATA_TYPE_FLOAT16:
      return 1e-3;
    case v1::DATA_TYPE_BFLOAT16:
      return 8e-3;
    default:
      return 2e-5;
  }
}

// The largest over the members of sum_i |sums[i] - marginal|; also the largest single difference.
struct Miss {
  double l1 = 0;
  double single = 0;
};
Miss MissOf(const std::vector<double>& sums, int64_t members, double marginal) {
  Miss miss;
  const size_t size = sums.size() / static_cast<size_t>(members);
  for (size_t begin = 0; begin < sums.size(); begin += size) {
    double l1 = 0;
    for (size_t i = begin; i < begin + size; ++i) {
      l1 += std::fabs(sums[i] - marginal);
      miss.single = std::max(miss.single, std::fabs(sums[i] - marginal));
    }
    miss.l1 = std::max(miss.l1, l1);
  }
  return miss;
}

// Checks `tensor` and reads it. Returns what is wrong with it.
std::string Read(const char* name, const v1::Tensor& tensor, int64_t size, std::vector<double>* values) {
  const absl::StatusOr<std::vector<double>> read = ToDoubles(tensor);
  if (!read.ok()) return absl::StrCat(name, ": ", read.status().message());
  *values = *read;
  if (static_cast<int64_t>(values->size()) != size) {
    return absl::StrCat(name, " has ", values->size(), " elements instead of ", size);
  }
  for (double value : *values) {
    if (!std::isfinite(value)) return absl::StrCat(name, " is not finite");
  }
  return "";
}

std::string CompareMiss(const char* side, double observed, double reported, double slack, bool worst_of_several) {
  const bool fits = observed <= reported + slack && (worst_of_several || observed >= reported - slack);
  if (fits) return "";
  return absl::StrCat("marginal error of the ", side, " is ", observed, "; the reply says ", reported);
}

std::string VerifyNormalization(const MixEntry& entry, const v1::SolveResponse& response,
                                const std::vector<double>& rows, const std::vector<double>& columns) {
  std::vector<double> plan;
  std::string wrong = Read("plan", response.plan(), entry.problem_count() * entry.n * entry.m, &plan);
  if (!wrong.empty()) return wrong;
  if (*std::min_element(plan.begin(), plan.end()) < 0) return "plan has a negative entry";

  const v1::NormalizationRecipe recipe = entry.blank.normalization().recipe();
  const bool exact = recipe == v1::NORMALIZATION_RECIPE_EXACT;
  const bool ends_on_rows = recipe == v1::NORMALIZATION_RECIPE_EXP_COLUMN_ROW;
  const double column_marginal = exact ? static_cast<double>(entry.n) / entry.m : 1;
  const Miss row_miss = MissOf(rows, entry.problem_count(), 1);
  const Miss column_miss = MissOf(columns, entry.problem_count(), column_marginal);
  const double slack = Slack(entry.dtype);
  if ((exact || ends_on_rows) && row_miss.single > slack)
    return absl::StrCat("a row sum misses 1 by ", row_miss.single);
  if ((exact || !ends_on_rows) && column_miss.single > slack * std::max(1.0, column_marginal)) {
    return absl::StrCat("a column sum misses ", column_marginal, " by ", column_miss.single);
  }
  // The sums of the plan itself, added up here.
  std::vector<double> own_rows(rows.size());
  for (size_t i = 0; i < plan.size(); ++i) own_rows[i / static_cast<size_t>(entry.m)] += plan[i];
  for (size_t i = 0; i < rows.size(); ++i) {
    if (std::fabs(own_rows[i] - rows[i]) > slack * std::max(1.0, rows[i])) return "row_sums are not those of the plan";
  }
  const double mass = static_cast<double>(std::max(entry.n, entry.m));
  wrong = CompareMiss("rows", row_miss.l1, response.convergence().marginal_error_a(), slack * mass, false);
  if (!wrong.empty()) return wrong;
  return CompareMiss("columns", column_miss.l1, response.convergence().marginal_error_b(), slack * mass, false);
}

std::string VerifyTransport(const MixEntry& entry, const v1::SolveRequest& request, const v1::SolveResponse& response,
                            const std::vector<double>& rows, const std::vector<double>& columns) {
  const v1::Convergence& convergence = response.convergence();
  const bool debias = request.solver().debias();  // The reply's errors are the worst of three problems then.
  const double slack = std::max(1e-4, Slack(entry.dtype));
  const Miss row_miss = MissOf(rows, entry.problem_count(), 1.0 / static_cast<double>(entry.n));
  const Miss column_miss = MissOf(columns, entry.problem_count(), 1.0 / static_cast<double>(entry.m));
  std::string wrong = CompareMiss("rows", row_miss.l1, convergence.marginal_error_a(), slack, debias);
  if (wrong.empty()) {
    wrong = CompareMiss("columns", column_miss.l1, convergence.marginal_error_b(), slack, debias);
  }
  if (!wrong.empty()) return wrong;
  const double tolerance = request.solver().has_tolerance() ? request.solver().tolerance() : 1e-5;
  const double larger = std::max(convergence.marginal_error_a(), convergence.marginal_error_b());
  if (convergence.converged() && larger > tolerance) {
    return absl::StrCat("the reply says converged with a marginal error of ", larger);
  }
  for (double value : response.value()) {
    if (!std::isfinite(value)) return "value is not finite";
  }
  return "";
}

}  // namespace

std::string VerifyAnswer(const MixEntry& entry, const v1::SolveRequest& request, const v1::SolveResponse& response) {
  std::vector<double> rows, columns;
  std::string wrong = Read("row_sums", response.row_sums(), entry.problem_count() * entry.n, &rows);
  if (wrong.empty()) wrong = Read("column_sums", response.column_sums(), entry.problem_count() * entry.m, &columns);
  if (!wrong.empty()) return wrong;
  return entry.kind == v1::SolveRequest::kNormalization ? VerifyNormalization(entry, response, rows, columns)
                                                        : VerifyTransport(entry, request, response, rows, columns);
}

uint64_t Fingerprint(const v1::SolveResponse& response) {
  uint64_t hash = 0;
  const auto add = [&hash](const std::string& bytes) {
    hash = (hash ^ std::hash<std::string>()(bytes)) * 0x9e3779b97f4a7c15;
  };
  std::vector<const google::protobuf::FieldDescriptor*> fields;
  const google::protobuf::Reflection* reflection = response.GetReflection();
  reflection->ListFields(response, &fields);
  for (const google::protobuf::FieldDescriptor* field : fields) {
    if (field->is_repeated() || field->message_type() != v1::Tensor::descriptor()) continue;
    add(static_cast<const v1::Tensor&>(reflection->GetMessage(response, field)).data());
  }
  for (const auto* values : {&response.value(), &response.value_linear(), &response.dual_bound()}) {
    add(std::string(reinterpret_cast<const char*>(values->data()), values->size() * sizeof(double)));
  }
  return hash;
}

}  // namespace sinkhorn::client
