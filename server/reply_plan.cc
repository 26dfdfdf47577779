#include "server/reply_plan.h"

#include <cmath>
#include <functional>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace sinkhorn {
namespace {

using absl::nullopt;
using absl::optional;
using absl::StrCat;

constexpr int64_t kScalarBytes = 10;      // Of one per-member double on the wire, tags included.
constexpr int64_t kMemberBytes = 40;      // Of one member's Convergence on the wire.
constexpr int64_t kHessianBytes = 24;     // Of one member's HessianConvergence.
constexpr int64_t kSparsePlanBytes = 64;  // Of one member's SparsePlan, without what it lists.
constexpr int64_t kMessageBytes = 1024;   // Everything else in a reply.

int64_t RoundUp(int64_t bytes) { return SaturatingSum(bytes, kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment; }

// Why `output` does not fit the problem; nullptr if it does.
const char* Misfit(int output, const Problem& problem) {
  const bool normalization = problem.kind == ProblemKind::kNormalization;
  const char* const kTransportOnly = "is for transport problems only";
  const char* const kPointCloudsOnly = "is for point clouds only";
  switch (output) {
    case v1::OUTPUT_MARGINALS:
    case v1::OUTPUT_MEMBERS:
      return nullptr;
    case v1::OUTPUT_PLAN:
      return problem.normalization.plan ? "must not be asked for when `plan` is given" : nullptr;
    case v1::OUTPUT_VALUE:
    case v1::OUTPUT_VALUE_LINEAR:
    case v1::OUTPUT_POTENTIALS:
    case v1::OUTPUT_GRADIENT_MASSES:
      return normalization ? kTransportOnly : nullptr;
    case v1::OUTPUT_PRIMAL_BOUND:
      if (normalization) return kTransportOnly;
      if (problem.solver.debias) return "is not for debiased problems";
      return std::isinf(problem.solver.rho_a) && std::isinf(problem.solver.rho_b) ? nullptr
                                                                                  : "is for balanced problems only";
    case v1::OUTPUT_GRADIENT_POINTS:
    case v1::OUTPUT_PROJECTION:
      return problem.kind == ProblemKind::kPointCloud ? nullptr : kPointCloudsOnly;
    case v1::OUTPUT_GRADIENT_COST:
      return problem.kind == ProblemKind::kDense ? nullptr : "is for dense problems only";
    default:
      return "must be an Output other than UNSPECIFIED";
  }
}

// Collects the reply's tensors: first their sizes, then, once the block exists, their addresses.
class Layout {
 public:
  Layout(DType dtype, const std::vector<int64_t>& leading, int64_t count, Prepared* prepared)
      : dtype_(dtype), leading_(leading), count_(count), prepared_(prepared) {}

  void Add(int field, OutputView* view, std::initializer_list<int64_t> core) {
    ReplyTensor tensor;
    tensor.field = field;
    tensor.dtype = ToProto(dtype_);
    tensor.shape = leading_;
    int64_t bytes = SaturatingProduct(count_, static_cast<int64_t>(SizeOf(dtype_)));
    for (int64_t extent : core) {
      tensor.shape.push_back(extent);
      bytes = SaturatingProduct(bytes, extent);
    }
    tensor.offset = static_cast<size_t>(block_bytes_);
    tensor.bytes = static_cast<size_t>(bytes);
    block_bytes_ = SaturatingSum(block_bytes_, RoundUp(bytes));
    wire_bytes_ = SaturatingSum(wire_bytes_, SaturatingSum(bytes, kTensorHeaderBytesMax));
    prepared_->tensors.push_back(std::move(tensor));
    views_.push_back(view);
  }

  // Memory that is no tensor of the reply, `wire_bytes` in it.
  void Reserve(int64_t bytes, int64_t wire_bytes, std::function<void(char*)> bind) {
    reserved_.emplace_back(static_cast<size_t>(block_bytes_), std::move(bind));
    block_bytes_ = SaturatingSum(block_bytes_, RoundUp(bytes));
    wire_bytes_ = SaturatingSum(wire_bytes_, wire_bytes);
  }

  DType dtype() const { return dtype_; }
  int64_t block_bytes() const { return block_bytes_; }
  int64_t wire_bytes() const { return wire_bytes_; }

  // False: no memory.
  bool Allocate() {
    if (block_bytes_ == 0) return true;
    prepared_->block = NewBlock(static_cast<size_t>(block_bytes_));
    if (prepared_->block == nullptr) return false;
    prepared_->block_bytes = static_cast<size_t>(block_bytes_);
    for (size_t i = 0; i < views_.size(); ++i) {
      views_[i]->dtype = dtype_;
      views_[i]->data = prepared_->block.get() + prepared_->tensors[i].offset;
    }
    for (const auto& [offset, bind] : reserved_) bind(prepared_->block.get() + offset);
    return true;
  }

 private:
  const DType dtype_;
  const std::vector<int64_t>& leading_;
  const int64_t count_;
  Prepared* const prepared_;
  std::vector<OutputView*> views_;
  std::vector<std::pair<size_t, std::function<void(char*)>>> reserved_;  // Offsets in the block.
  int64_t block_bytes_ = 0;
  int64_t wire_bytes_ = 0;
};

// The dtype of the problem's first tensor.
DType ReplyType(const Problem& problem) {
  switch (problem.kind) {
    case ProblemKind::kNormalization:
      return problem.normalization.plan ? problem.normalization.plan.dtype : problem.normalization.logits.dtype;
    case ProblemKind::kDense:
      return problem.transport.cost.dtype;
    case ProblemKind::kPointCloud:
      return problem.transport.x.dtype;
  }
  return DType::kFloat32;
}

void AddTensors(const OutputMask& mask, Problem* problem, Layout* layout) {
  using R = v1::SolveResponse;
  Outputs* out = &problem->outputs;
  const int64_t n = problem->n, m = problem->m, dim = problem->dim;
  const bool dustbin = static_cast<bool>(problem->normalization.dustbin_score);
  const int64_t rows = n + (dustbin ? 1 : 0), columns = m + (dustbin ? 1 : 0);
  if (mask.Has(v1::OUTPUT_POTENTIALS)) {
    layout->Add(R::kFFieldNumber, &out->f, {n});
    layout->Add(R::kGFieldNumber, &out->g, {m});
    if (problem->solver.debias) {
      layout->Add(R::kFAaFieldNumber, &out->f_aa, {n});
      layout->Add(R::kGBbFieldNumber, &out->g_bb, {m});
    }
  }
  if (mask.Has(v1::OUTPUT_PLAN)) layout->Add(R::kPlanFieldNumber, &out->plan, {rows, columns});
  if (mask.Has(v1::OUTPUT_MARGINALS)) {
    layout->Add(R::kRowSumsFieldNumber, &out->row_sums, {rows});
    layout->Add(R::kColumnSumsFieldNumber, &out->column_sums, {columns});
  }
  if (problem->normalization.cotangent) {
    layout->Add(R::kGradientLogitsFieldNumber, &out->gradient_logits, {n, m});
    if (dustbin) layout->Add(R::kGradientDustbinScoreFieldNumber, &out->gradient_dustbin_score, {});
  }
  if (mask.Has(v1::OUTPUT_GRADIENT_POINTS)) {
    layout->Add(R::kGradientXFieldNumber, &out->gradient_x, {n, dim});
    layout->Add(R::kGradientYFieldNumber, &out->gradient_y, {m, dim});
  }
  if (mask.Has(v1::OUTPUT_GRADIENT_MASSES)) {
    layout->Add(R::kGradientAFieldNumber, &out->gradient_a, {n});
    layout->Add(R::kGradientBFieldNumber, &out->gradient_b, {m});
  }
  if (mask.Has(v1::OUTPUT_GRADIENT_COST)) layout->Add(R::kGradientCostFieldNumber, &out->gradient_cost, {n, m});
  if (problem->transport.v) layout->Add(R::kPlanVFieldNumber, &out->plan_v, {n, problem->transport.v_columns});
  if (problem->transport.u) {
    layout->Add(R::kPlanTransposeUFieldNumber, &out->plan_transpose_u, {m, problem->transport.u_columns});
  }
  if (mask.Has(v1::OUTPUT_PROJECTION)) {
    layout->Add(R::kProjectionXFieldNumber, &out->projection_x, {n, dim});
    layout->Add(R::kProjectionYFieldNumber, &out->projection_y, {m, dim});
  }
  if (const int64_t directions = problem->transport.hessian.count; directions > 0) {
    layout->Add(R::kHessianXFieldNumber, &out->hessian_x, {directions, n, dim});
    layout->Add(R::kHessianYFieldNumber, &out->hessian_y, {directions, m, dim});
  }
}

// Room for `max_entries` of each member; columns and offsets are varints on the wire.
void AddSparsePlan(Problem* problem, Layout* layout) {
  SparseOutput* out = &problem->outputs.sparse_plan;
  if (out->max_entries == 0) return;
  const int64_t entries = SaturatingProduct(problem->count, out->max_entries);
  const int64_t offsets = SaturatingProduct(problem->count, problem->n + 1);
  const int64_t width = static_cast<int64_t>(SizeOf(layout->dtype()));
  out->values.dtype = layout->dtype();
  layout->Reserve(SaturatingProduct(entries, sizeof(int32_t)), SaturatingProduct(entries, 5),
                  [out](char* data) { out->columns = reinterpret_cast<int32_t*>(data); });
  layout->Reserve(SaturatingProduct(entries, width), SaturatingProduct(entries, width),
                  [out](char* data) { out->values.data = data; });
  layout->Reserve(SaturatingProduct(offsets, sizeof(int64_t)), SaturatingProduct(offsets, 5),
                  [out](char* data) { out->row_offsets = reinterpret_cast<int64_t*>(data); });
  layout->Reserve(SaturatingProduct(problem->count, sizeof(double)),
                  SaturatingProduct(problem->count, kSparsePlanBytes),
                  [out](char* data) { out->mass = reinterpret_cast<double*>(data); });
}

double* AddScalars(int64_t count, google::protobuf::RepeatedField<double>* field) {
  field->Resize(static_cast<int>(count), 0);
  return field->mutable_data();
}

}  // namespace

optional<Error> CheckOutputs(const v1::SolveRequest& request, const Problem& problem, OutputMask* mask) {
  for (int i = 0; i < request.outputs_size(); ++i) {
    const int output = request.outputs(i);
    if (const char* rule = Misfit(output, problem)) {
      return InvalidField(StrCat("outputs[", i, "]"), rule,
                          v1::Output_IsValid(output) ? v1::Output_Name(request.outputs(i)) : StrCat(output));
    }
    mask->Add(output);
  }
  if (request.outputs_size() > 0) return nullopt;
  if (problem.kind != ProblemKind::kNormalization) {
    mask->Add(v1::OUTPUT_VALUE);
    mask->Add(v1::OUTPUT_POTENTIALS);
  } else if (!problem.normalization.plan) {
    mask->Add(v1::OUTPUT_PLAN);
  }
  return nullopt;
}

optional<Error> PlanReply(const OutputMask& mask, const TensorCheck& inputs, const Limits& limits, Prepared* prepared,
                          v1::SolveResponse* response) {
  Problem* problem = &prepared->problem;
  const int64_t count = problem->count;
  Layout layout(ReplyType(*problem), inputs.leading(), count, prepared);
  AddTensors(mask, problem, &layout);
  AddSparsePlan(problem, &layout);

  // 1. The reply's size, before anything is allocated.
  const int scalars =
      2 * mask.Has(v1::OUTPUT_VALUE) + mask.Has(v1::OUTPUT_VALUE_LINEAR) + mask.Has(v1::OUTPUT_PRIMAL_BOUND);
  const bool hessian = problem->transport.hessian.count > 0;
  const int64_t per_member =
      scalars * kScalarBytes + (mask.Has(v1::OUTPUT_MEMBERS) ? kMemberBytes : 0) + (hessian ? kHessianBytes : 0);
  const int64_t wire_bytes =
      SaturatingSum(kMessageBytes, SaturatingSum(layout.wire_bytes(), SaturatingProduct(count, per_member)));
  if (wire_bytes > limits.max_reply_bytes) {
    return TooLarge("outputs", "bytes of the reply", limits.max_reply_bytes, wire_bytes);
  }
  prepared->bytes = SaturatingSum(inputs.total_bytes(), SaturatingSum(layout.block_bytes(), count * per_member));

  // 2. Its memory.
  if (!layout.Allocate()) return DeviceMemory(StrCat(layout.block_bytes(), " bytes for the outputs"));
  Outputs* out = &problem->outputs;
  if (mask.Has(v1::OUTPUT_VALUE)) {
    out->value = AddScalars(count, response->mutable_value());
    out->dual_bound = AddScalars(count, response->mutable_dual_bound());
  }
  if (mask.Has(v1::OUTPUT_VALUE_LINEAR)) out->value_linear = AddScalars(count, response->mutable_value_linear());
  if (mask.Has(v1::OUTPUT_PRIMAL_BOUND)) out->primal_bound = AddScalars(count, response->mutable_primal_bound());
  if (hessian) {
    prepared->hessian.resize(count);
    out->hessian_convergence = prepared->hessian.data();
  }
  if (mask.Has(v1::OUTPUT_MEMBERS)) {
    prepared->members.resize(count);
    out->convergence = prepared->members.data();
  }
  return nullopt;
}

void FillExtras(const Prepared& prepared, v1::SolveResponse* response) {
  for (const HessianConvergence& member : prepared.hessian) {
    v1::HessianConvergence* out = response->add_hessian_convergence();
    out->set_iterations(member.iterations);
    out->set_residual(member.residual);
    out->set_converged(member.converged);
  }
  const Problem& problem = prepared.problem;
  const SparseOutput& sparse = problem.outputs.sparse_plan;
  if (sparse.max_entries == 0) return;
  for (int64_t member = 0; member < problem.count; ++member) {
    const int64_t* offsets = sparse.row_offsets + member * (problem.n + 1);
    const int32_t* columns = sparse.columns + member * sparse.max_entries;
    const int64_t entries = offsets[problem.n], width = static_cast<int64_t>(SizeOf(sparse.values.dtype));
    v1::SparsePlan* out = response->add_sparse_plan();
    out->set_entry_count(entries);
    out->set_mass(sparse.mass[member]);
    if (entries > sparse.max_entries) continue;
    out->mutable_row_offsets()->Add(offsets, offsets + problem.n + 1);
    out->mutable_columns()->Add(columns, columns + entries);
    v1::Tensor* values = out->mutable_values();
    values->set_dtype(ToProto(sparse.values.dtype));
    values->add_shape(entries);
    values->set_data(static_cast<const char*>(sparse.values.data) + member * sparse.max_entries * width,
                     static_cast<size_t>(entries * width));
  }
}

}  // namespace sinkhorn
