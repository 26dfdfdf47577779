#include "client/cli/solve_report.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/json.h"
#include "client/cli/names.h"
#include "client/cli/solve_request.h"
#include "client/cpp/errors.h"
#include "client/cpp/npy.h"
#include "client/cpp/tensor.h"

namespace sinkhorn::client {
namespace {

constexpr int64_t kPrintMax = 64;        // Elements of an array in the summary.
constexpr int64_t kJsonMax = 1'000'000;  // The same in JSON.
constexpr int kScalarsMax = 8;           // Values of a batch in the summary.

using google::protobuf::FieldDescriptor;
using NamedTensors = std::vector<std::pair<std::string, v1::Tensor>>;

// The tensors of the answer under their fields' names, in the contract's order. Copies nothing.
std::vector<std::pair<std::string, const v1::Tensor*>> Tensors(const v1::SolveResponse& response) {
  std::vector<std::pair<std::string, const v1::Tensor*>> tensors;
  const google::protobuf::Reflection* reflection = response.GetReflection();
  std::vector<const FieldDescriptor*> fields;
  reflection->ListFields(response, &fields);
  for (const FieldDescriptor* field : fields) {
    if (field->is_repeated() || field->message_type() != v1::Tensor::descriptor()) continue;
    tensors.emplace_back(field->name(), static_cast<const v1::Tensor*>(&reflection->GetMessage(response, field)));
  }
  return tensors;
}

// The lists of one double per member.
std::vector<std::pair<std::string, const google::protobuf::RepeatedField<double>*>> Scalars(
    const v1::SolveResponse& response) {
  return {{"value", &response.value()},
          {"value_linear", &response.value_linear()},
          {"dual_bound", &response.dual_bound()},
          {"primal_bound", &response.primal_bound()}};
}

std::string Milliseconds(double seconds) { return absl::StrFormat("%.3g ms", 1e3 * seconds); }

// ---- Parts of the summary ----

void AppendLine(const std::string& name, const std::string& text, std::string* out) {
  absl::StrAppendFormat(out, "%-16s %s\n", name, text);
}

std::string ScalarText(const google::protobuf::RepeatedField<double>& values) {
  std::vector<std::string> texts;
  for (int i = 0; i < std::min(values.size(), kScalarsMax); ++i) texts.push_back(absl::StrFormat("%.9g", values[i]));
  std::string text = absl::StrJoin(texts, "  ");
  if (values.size() > kScalarsMax) absl::StrAppend(&text, "  ... (", values.size(), " members)");
  return text;
}

// Whether a fixed number of iterations was asked for, so that the question of convergence does not arise.
bool IsFixed(const v1::SolveRequest& request) {
  const bool unset = request.has_normalization() &&
                     request.normalization().recipe() != v1::NORMALIZATION_RECIPE_EXACT &&
                     !request.solver().has_tolerance();
  return unset || (request.solver().has_tolerance() && request.solver().tolerance() == 0);
}

std::string ConvergenceText(const v1::Convergence& convergence, bool fixed) {
  const std::string iterations =
      absl::StrCat(convergence.iterations(), convergence.iterations() == 1 ? " iteration" : " iterations");
  const std::string outcome = fixed
                                  ? iterations
                                  : absl::StrCat(convergence.converged() ? "converged after " : "not converged after ",
                                                 iterations, " (", ShortName(convergence.stop_reason()), ")");
  return absl::StrFormat("%s, marginal errors %.3g (a) and %.3g (b)", outcome, convergence.marginal_error_a(),
                         convergence.marginal_error_b());
}

std::string HessianText(const v1::HessianConvergence& convergence) {
  return absl::StrFormat("%s after %d iteration%s of conjugate gradients, residual %.3g",
                         convergence.converged() ? "converged" : "not converged", convergence.iterations(),
                         convergence.iterations() == 1 ? "" : "s", convergence.residual());
}

// Entries as rows (row, column, value).
v1::Tensor EntriesOf(const v1::SparsePlan& plan) {
  const absl::StatusOr<std::vector<double>> values = ToDoubles(plan.values());
  std::vector<double> entries;
  for (int i = 0; i + 1 < plan.row_offsets_size() && values.ok(); ++i) {
    for (int64_t k = plan.row_offsets(i); k < plan.row_offsets(i + 1); ++k) {
      entries.insert(entries.end(), {static_cast<double>(i), static_cast<double>(plan.columns(k)), (*values)[k]});
    }
  }
  return MakeTensor(absl::MakeConstSpan(entries), {static_cast<int64_t>(entries.size() / 3), 3});
}

// "sparse_plan", or "sparse_plan_2" of a batch.
std::string SparsePlanName(const v1::SolveResponse& response, int member) {
  return response.sparse_plan_size() == 1 ? "sparse_plan" : absl::StrCat("sparse_plan_", member);
}

std::string ExecutionText(const v1::Execution& execution) {
  return absl::StrFormat("%s; %s, %s; %d problem%s in the batch, %d launch%s", execution.device(), execution.family(),
                         ShortName(execution.precision()), execution.batch_problem_count(),
                         execution.batch_problem_count() == 1 ? "" : "s", execution.launch_count(),
                         execution.launch_count() == 1 ? "" : "es");
}

std::string TimeText(const v1::Execution& execution, absl::Duration round_trip) {
  return absl::StrFormat("%s with connecting; in the server: queue %s, transfer %s, compute %s",
                         Milliseconds(absl::ToDoubleSeconds(round_trip)), Milliseconds(execution.queue_seconds()),
                         Milliseconds(execution.transfer_seconds()), Milliseconds(execution.compute_seconds()));
}

// Rows of the last dimension, indented.
std::string Rows(const v1::Tensor& tensor) {
  const absl::StatusOr<std::vector<double>> values = ToDoubles(tensor);
  if (!values.ok()) return absl::StrCat("  ", values.status().message(), "\n");
  const size_t columns = tensor.shape_size() == 0 ? 1 : std::max<size_t>(1, tensor.shape(tensor.shape_size() - 1));
  std::string out;
  for (size_t i = 0; i < values->size(); ++i) {
    absl::StrAppendFormat(&out, i % columns == 0 ? "  %12.6g" : " %12.6g", (*values)[i]);
    if ((i + 1) % columns == 0) out.push_back('\n');
  }
  return out;
}

}  // namespace

absl::StatusOr<SavedFiles> SaveOutputs(const v1::SolveResponse& response, const std::string& directory) {
  if (mkdir(directory.c_str(), 0777) != 0 && errno != EEXIST) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot make the directory ", directory));
  }
  SavedFiles saved;
  const auto save = [&](const std::string& name, const v1::Tensor& tensor) {
    const std::string path = absl::StrCat(directory, "/", name, ".npy");
    saved[name] = path;
    return WriteNpy(path, tensor);
  };
  for (const auto& [name, values] : Scalars(response)) {
    if (values->empty()) continue;
    const v1::Tensor tensor = MakeTensor(absl::MakeConstSpan(values->data(), values->size()), {values->size()});
    if (absl::Status status = save(name, tensor); !status.ok()) return status;
  }
  for (const auto& [name, tensor] : Tensors(response)) {
    if (absl::Status status = save(name, *tensor); !status.ok()) return status;
  }
  for (int i = 0; i < response.sparse_plan_size(); ++i) {
    if (response.sparse_plan(i).row_offsets_size() == 0) continue;
    const absl::Status status = save(SparsePlanName(response, i), EntriesOf(response.sparse_plan(i)));
    if (!status.ok()) return status;
  }
  return saved;
}

std::string Summary(const v1::SolveRequest& request, const v1::SolveResponse& response, absl::Duration round_trip,
                    const SavedFiles& saved) {
  std::string out;
  AppendLine("problem", DescribeRequest(request), &out);
  for (const auto& [name, values] : Scalars(response)) {
    if (!values->empty()) AppendLine(name, ScalarText(*values), &out);
  }
  const bool fixed = IsFixed(request);
  AppendLine("convergence", ConvergenceText(response.convergence(), fixed), &out);
  for (int i = 0; i < std::min(response.members_size(), kScalarsMax); ++i) {
    AppendLine(absl::StrCat("  member ", i), ConvergenceText(response.members(i), fixed), &out);
  }
  for (int i = 0; i < std::min(response.hessian_convergence_size(), kScalarsMax); ++i) {
    AppendLine("hessian", HessianText(response.hessian_convergence(i)), &out);
  }
  AppendLine("execution", ExecutionText(response.execution()), &out);
  AppendLine("time", TimeText(response.execution(), round_trip), &out);
  for (const auto& [name, tensor] : Tensors(response)) {
    const auto file = saved.find(name);
    const absl::StatusOr<int64_t> count = ElementCount(*tensor);
    const bool print = file == saved.end() && count.ok() && *count <= kPrintMax;
    std::string where;
    if (file != saved.end()) {
      where = absl::StrCat("  -> ", file->second);
    } else if (!print) {
      where = "  (not saved: give --out=DIRECTORY)";
    }
    AppendLine(name, absl::StrCat(DescribeTensor(*tensor), where), &out);
    if (print) out.append(Rows(*tensor));
  }
  for (int i = 0; i < std::min(response.sparse_plan_size(), kScalarsMax); ++i) {
    const v1::SparsePlan& plan = response.sparse_plan(i);
    const bool complete = plan.row_offsets_size() > 0;
    const std::string name = SparsePlanName(response, i);
    const auto file = saved.find(name);
    AppendLine(name,
               absl::StrFormat("%d entries, mass %.6g%s%s", plan.entry_count(), plan.mass(),
                               complete ? "" : ": more than --sparse_max_entries",
                               file == saved.end() ? "" : absl::StrCat("  -> ", file->second)),
               &out);
    if (complete && file == saved.end() && plan.entry_count() * 3 <= kPrintMax) out.append(Rows(EntriesOf(plan)));
  }
  return out;
}

std::string SolveJson(const v1::SolveResponse& response, absl::Duration round_trip, const SavedFiles& saved) {
  const auto tensor_to_json = [&saved](const std::string& name, const v1::Tensor& tensor) {
    std::string rest;
    if (const auto file = saved.find(name); file != saved.end()) {
      rest = absl::StrCat("\"file\": ", JsonString(file->second));
    } else if (const auto count = ElementCount(tensor); count.ok() && *count <= kJsonMax) {
      rest = absl::StrCat("\"data\": ", JsonElements(tensor));
    } else {
      rest = "\"data\": null";  // Too long for JSON: --out takes it.
    }
    return absl::StrCat("{\"dtype\": ", JsonString(ShortName(tensor.dtype())), ", \"shape\": [",
                        absl::StrJoin(tensor.shape(), ", "), "], ", rest, "}");
  };
  return absl::StrCat("{", JsonMembers(response, tensor_to_json),
                      ", \"round_trip_seconds\": ", JsonNumber(absl::ToDoubleSeconds(round_trip)), "}\n");
}

std::string ErrorJson(const absl::Status& status) {
  const ErrorDetails details = GetErrorDetails(status);
  std::vector<std::string> fields, metadata;
  for (const FieldViolation& violation : details.fields) {
    fields.push_back(absl::StrCat("{\"field\": ", JsonString(violation.field),
                                  ", \"description\": ", JsonString(violation.description), "}"));
  }
  for (const auto& [key, value] : details.metadata) {
    metadata.push_back(absl::StrCat(JsonString(key), ": ", JsonString(value)));
  }
  std::string out = absl::StrCat("{\"error\": {\"code\": ", JsonString(absl::StatusCodeToString(status.code())),
                                 ", \"reason\": ", JsonString(details.reason),
                                 ", \"message\": ", JsonString(status.message()), ", \"fields\": [",
                                 absl::StrJoin(fields, ", "), "], \"metadata\": {", absl::StrJoin(metadata, ", "), "}");
  if (details.retry_delay) {
    absl::StrAppend(&out, ", \"retry_delay_seconds\": ", JsonNumber(absl::ToDoubleSeconds(*details.retry_delay)));
  }
  return out + "}}\n";
}

}  // namespace sinkhorn::client
