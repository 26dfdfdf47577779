#include "client/loadgen/mix.h"

#include <random>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cli/names.h"
#include "client/cpp/tensor.h"

namespace sinkhorn::client {
namespace {

constexpr double kDefaultEpsilon = 0.1;  // Of costs that are about 1.

void AddOutput(v1::Output output, v1::SolveRequest* request) {
  for (int present : request->outputs()) {
    if (present == output) return;
  }
  request->add_outputs(output);
}

absl::Status SetKind(absl::string_view text, MixEntry* entry) {
  if (text == "normalization") {
    entry->kind = v1::SolveRequest::kNormalization;
    entry->blank.mutable_normalization();
  } else if (text == "dense") {
    entry->kind = v1::SolveRequest::kDense;
    entry->blank.mutable_dense();
  } else if (text == "point_cloud") {
    entry->kind = v1::SolveRequest::kPointCloud;
    entry->blank.mutable_point_cloud()->set_cost(v1::COST_FUNCTION_SQUARED_EUCLIDEAN);
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("the problem must be normalization, dense or point_cloud; got ", text));
  }
  if (entry->kind != v1::SolveRequest::kNormalization) entry->blank.mutable_solver()->set_epsilon(kDefaultEpsilon);
  return absl::OkStatus();
}

absl::Status SetShape(absl::string_view text, MixEntry* entry) {
  std::vector<int64_t> extents;
  for (absl::string_view part : absl::StrSplit(text, 'x')) {
    int64_t extent = 0;
    if (!absl::SimpleAtoi(part, &extent) || extent < 1) {
      return absl::InvalidArgumentError(absl::StrCat("the shape must be numbers >= 1 joined by x; got ", text));
    }
    extents.push_back(extent);
  }
  const size_t rank = entry->kind == v1::SolveRequest::kPointCloud ? 3 : 2;
  if (extents.size() != rank && extents.size() != rank + 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("the shape must be ", rank == 3 ? "[BATCHx]NxMxD" : "[BATCHx]NxM", "; got ", text));
  }
  if (extents.size() == rank + 1) {
    entry->batch = extents[0];
    extents.erase(extents.begin());
  }
  entry->n = extents[0];
  entry->m = extents[1];
  if (rank == 3) entry->dim = extents[2];
  return absl::OkStatus();
}

absl::Status SetOption(absl::string_view key, absl::string_view value, MixEntry* entry) {
  const bool normalization = entry->kind == v1::SolveRequest::kNormalization;
  double number = 0;
  int32_t iterations = 0;
  if (value.empty() && absl::SimpleAtoi(key, &iterations)) {
    entry->blank.mutable_solver()->set_max_iterations(iterations);
    if (!entry->blank.solver().has_tolerance() && !normalization) entry->blank.mutable_solver()->set_tolerance(0);
  } else if (key == "epsilon" && !normalization && absl::SimpleAtod(value, &number)) {
    entry->blank.mutable_solver()->set_epsilon(number);
  } else if (key == "tolerance" && absl::SimpleAtod(value, &number)) {
    entry->blank.mutable_solver()->set_tolerance(number);
  } else if (key == "dtype") {
    const absl::StatusOr<int> dtype = FromShortName(v1::DataType_descriptor(), value);
    if (!dtype.ok()) return absl::InvalidArgumentError(absl::StrCat("dtype ", dtype.status().message()));
    entry->dtype = static_cast<v1::DataType>(*dtype);
  } else if (key == "recipe" && normalization) {
    const absl::StatusOr<int> recipe = FromShortName(v1::NormalizationRecipe_descriptor(), value);
    if (!recipe.ok()) return absl::InvalidArgumentError(absl::StrCat("recipe ", recipe.status().message()));
    entry->blank.mutable_normalization()->set_recipe(static_cast<v1::NormalizationRecipe>(*recipe));
  } else if (!value.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("unknown or unreadable option ", key, "=", value));
  } else if (key == "double") {
    entry->blank.mutable_solver()->set_precision(v1::PRECISION_DOUBLE);
  } else if (key == "fast" && !normalization) {
    entry->blank.mutable_solver()->set_precision(v1::PRECISION_FAST);
  } else if (key == "symmetric" && !normalization) {
    entry->blank.mutable_solver()->set_update_rule(v1::UPDATE_RULE_SYMMETRIC);
  } else if (key == "debias" && entry->kind == v1::SolveRequest::kPointCloud) {
    entry->blank.mutable_solver()->set_debias(true);
  } else if (key == "gradient") {
    entry->gradient = true;
    if (!normalization) AddOutput(v1::OUTPUT_VALUE, &entry->blank);
    if (entry->kind == v1::SolveRequest::kDense) AddOutput(v1::OUTPUT_GRADIENT_COST, &entry->blank);
    if (entry->kind == v1::SolveRequest::kPointCloud) AddOutput(v1::OUTPUT_GRADIENT_POINTS, &entry->blank);
  } else if (key == "plan") {
    AddOutput(v1::OUTPUT_PLAN, &entry->blank);
  } else if (key == "value" && !normalization) {
    AddOutput(v1::OUTPUT_VALUE, &entry->blank);
  } else if (key == "marginals") {
    AddOutput(v1::OUTPUT_MARGINALS, &entry->blank);
  } else {
    return absl::InvalidArgumentError(absl::StrCat("unknown option ", key, " of this problem"));
  }
  return absl::OkStatus();
}

bool TakesValue(absl::string_view key) {
  return key == "epsilon" || key == "tolerance" || key == "dtype" || key == "recipe";
}

// Takes the weight off the end of `text`: `20=3`, `gradient=3` and `epsilon=0.1=3` have one, `epsilon=0.1` has none.
absl::Status TakeWeight(absl::string_view* text, MixEntry* entry) {
  const std::vector<absl::string_view> pieces = absl::StrSplit(text->substr(text->rfind(':') + 1), '=');
  if (pieces.size() <= (TakesValue(pieces[0]) ? 2 : 1)) return absl::OkStatus();
  if (!absl::SimpleAtod(pieces.back(), &entry->weight) || !(entry->weight > 0)) {
    return absl::InvalidArgumentError(absl::StrCat("the weight must be a number > 0; got ", pieces.back()));
  }
  text->remove_suffix(pieces.back().size() + 1);
  return absl::OkStatus();
}

absl::Status ParseEntry(absl::string_view text, MixEntry* entry) {
  if (absl::Status status = TakeWeight(&text, entry); !status.ok()) return status;
  entry->name = std::string(text);
  const std::vector<absl::string_view> parts = absl::StrSplit(text, ':');
  if (parts.size() < 2) return absl::InvalidArgumentError("must be PROBLEM:SHAPE[:ITERATIONS][:OPTION...][=WEIGHT]");
  if (absl::Status status = SetKind(parts[0], entry); !status.ok()) return status;
  if (absl::Status status = SetShape(parts[1], entry); !status.ok()) return status;
  for (size_t i = 2; i < parts.size(); ++i) {
    const std::pair<absl::string_view, absl::string_view> option = absl::StrSplit(parts[i], absl::MaxSplits('=', 1));
    if (absl::Status status = SetOption(option.first, option.second, entry); !status.ok()) return status;
  }
  return absl::OkStatus();
}

// ---- Random arrays ----

template <typename Distribution>
v1::Tensor Random(const MixEntry& entry, std::vector<int64_t> shape, Distribution distribution,
                  std::mt19937_64* random) {
  if (entry.batch > 0) shape.insert(shape.begin(), entry.batch);
  std::vector<float> values(static_cast<size_t>(*ElementCount(shape)));
  for (float& value : values) value = distribution(*random);
  return MakeTensor(values, shape, entry.dtype);
}

}  // namespace

absl::StatusOr<std::vector<MixEntry>> ParseMix(absl::string_view text) {
  std::vector<MixEntry> entries;
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    MixEntry entry;
    if (absl::Status status = ParseEntry(part, &entry); !status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("'", part, "': ", status.message()));
    }
    entries.push_back(std::move(entry));
  }
  return entries;
}

v1::SolveRequest MakeRequest(const MixEntry& entry, uint64_t seed, bool verify) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform(0, 1);
  v1::SolveRequest request = entry.blank;
  switch (entry.kind) {
    case v1::SolveRequest::kNormalization: {
      v1::NormalizationProblem* problem = request.mutable_normalization();
      *problem->mutable_logits() = Random(entry, {entry.n, entry.m}, normal, &random);
      if (entry.gradient) *problem->mutable_cotangent() = Random(entry, {entry.n, entry.m}, normal, &random);
      break;
    }
    case v1::SolveRequest::kDense:
      *request.mutable_dense()->mutable_cost() = Random(entry, {entry.n, entry.m}, uniform, &random);
      break;
    default:
      *request.mutable_point_cloud()->mutable_x() = Random(entry, {entry.n, entry.dim}, uniform, &random);
      *request.mutable_point_cloud()->mutable_y() = Random(entry, {entry.m, entry.dim}, uniform, &random);
      break;
  }
  if (verify) {
    // An empty list means the default outputs: keep those, and add what is checked.
    if (request.outputs().empty() && entry.kind != v1::SolveRequest::kNormalization) {
      AddOutput(v1::OUTPUT_VALUE, &request);
      AddOutput(v1::OUTPUT_POTENTIALS, &request);
    }
    if (entry.kind == v1::SolveRequest::kNormalization) AddOutput(v1::OUTPUT_PLAN, &request);
    AddOutput(v1::OUTPUT_MARGINALS, &request);
  }
  return request;
}

}  // namespace sinkhorn::client
