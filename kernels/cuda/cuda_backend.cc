#include "kernels/cuda/cuda_backend.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/lane.h"
#include "kernels/cuda/tensors.h"

namespace sinkhorn {
namespace cuda {
namespace {

// For predictions: a slice without work, and the bus with packing.
constexpr double kSliceSeconds = 15e-6;
constexpr double kTransferBytesPerSecond = 15e9;

const char* Name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "FLOAT32";
    case DType::kFloat64:
      return "FLOAT64";
    case DType::kFloat16:
      return "FLOAT16";
    case DType::kBFloat16:
      return "BFLOAT16";
  }
  return "";
}

// What no family takes, in words.
std::string Describe(const Problem& problem) {
  const char* kind = problem.kind == ProblemKind::kNormalization ? "normalization"
                     : problem.kind == ProblemKind::kDense       ? "dense"
                                                                 : "point_cloud";
  DType dtype = DType::kFloat32;
  bool first = true;
  ForEachInput(problem, [&](const TensorView& view, size_t) {
    if (std::exchange(first, false)) dtype = view.dtype;
  });
  std::string text = absl::StrCat(kind, " ", problem.n, " x ", problem.m);
  if (problem.kind == ProblemKind::kPointCloud) absl::StrAppend(&text, " x ", problem.dim);
  absl::StrAppend(&text, " ", Name(dtype));
  if (problem.solver.precision == Precision::kDouble) absl::StrAppend(&text, ", precision DOUBLE");
  if (problem.kind == ProblemKind::kNormalization) {
    if (problem.normalization.recipe.exact) absl::StrAppend(&text, ", recipe EXACT");
    if (problem.normalization.cotangent) {
      absl::StrAppend(&text, ", backward ", static_cast<int>(problem.normalization.backward));
    }
  }
  return text;
}

class CudaBackend final : public Backend {
 public:
  CudaBackend(std::unique_ptr<Context> context, std::vector<std::unique_ptr<Lane>> lanes)
      : context_(std::move(context)), lanes_(std::move(lanes)) {}

  DeviceDescription device() const override {
    const DeviceInfo& info = context_->info;
    return {absl::StrCat("cuda:", info.index, ": ", info.name), "cuda", info.memory_bytes, info.index};
  }
  int lanes() const override { return static_cast<int>(lanes_.size()); }

  int64_t WorkingBytes(const Problem& problem) const override {
    const Family* family = FamilyOf(problem);
    const int64_t workspace = family != nullptr ? family->WorkspaceBytes(context_->info, problem) : 0;
    return static_cast<int64_t>(InputBytes(problem) + OutputBytes(problem)) + workspace;
  }

  double PredictedSeconds(const Problem& problem) const override {
    const Family* family = FamilyOf(problem);
    if (family == nullptr) return 0;
    const double bytes = static_cast<double>(InputBytes(problem) + OutputBytes(problem));
    return kSliceSeconds + bytes / kTransferBytesPerSecond + family->PredictedSeconds(context_->info, problem);
  }

  bool can_finish_soon() const override { return true; }

  absl::StatusOr<std::unique_ptr<Solve>> Admit(const Problem& problem) override {
    if (absl::Status status = context_->Health(); !status.ok()) return status;
    const Family* family = FamilyOf(problem);
    if (family == nullptr) {
      return absl::UnimplementedError(absl::StrCat("no CUDA kernel family solves ", Describe(problem)));
    }
    return std::unique_ptr<Solve>(std::make_unique<CudaSolve>(problem, family, context_->info));
  }

  absl::Status Advance(int lane, absl::Span<Solve* const> solves, double slice_seconds) override {
    return lanes_[lane]->Advance(solves, slice_seconds);
  }

  std::vector<MemoryUse> memory() const override {
    const BlockPool::Stats device = context_->device_pool.stats(), pinned = context_->pinned_pool.stats();
    return {{"device_reserved", static_cast<int64_t>(device.reserved_bytes)},
            {"device_used", static_cast<int64_t>(device.used_bytes)},
            {"pinned_reserved", static_cast<int64_t>(pinned.reserved_bytes)},
            {"pinned_used", static_cast<int64_t>(pinned.used_bytes)}};
  }

 private:
  const Family* FamilyOf(const Problem& problem) const {
    for (const Family* family : context_->families) {
      if (family->Takes(context_->info, problem)) return family;
    }
    return nullptr;
  }

  const std::unique_ptr<Context> context_;
  const std::vector<std::unique_ptr<Lane>> lanes_;
};

}  // namespace
}  // namespace cuda

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(int device, const CudaBackendOptions& options) {
  const absl::StatusOr<std::vector<DeviceInfo>> devices = ListDevices();
  if (!devices.ok()) return devices.status();
  if (device < 0 || device >= static_cast<int>(devices->size())) {
    return absl::UnavailableError(absl::StrCat("no CUDA device ", device, ": ", devices->size(), " present"));
  }
  absl::StatusOr<std::unique_ptr<cuda::Context>> context = cuda::Context::Make((*devices)[device], options);
  if (!context.ok()) return context.status();
  std::vector<std::unique_ptr<cuda::Lane>> lanes;
  for (int i = 0; i < std::max(1, options.lanes); ++i) {
    absl::StatusOr<std::unique_ptr<cuda::Lane>> lane = cuda::Lane::Make(context->get());
    if (!lane.ok()) return lane.status();
    lanes.push_back(*std::move(lane));
  }
  return std::unique_ptr<Backend>(std::make_unique<cuda::CudaBackend>(*std::move(context), std::move(lanes)));
}

}  // namespace sinkhorn
