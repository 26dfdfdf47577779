// Dense and point-cloud transport on the GPU: residents, and the launches of a slice.
//
// A resident is prepared in its first slice, which tells the host the arithmetic that its data need; then iterates, two
// passes an iteration, as many as fit the slice; and ends with the measuring passes and its outputs; Hessian-vector
// products come last, in slices of their own. Engines that have converged sit out the passes that are still enqueued.
// All decisions between passes are made on the device (transport_control.cuh), so that nothing waits for the host.
#include <limits>
#include <vector>

#include "kernels/cuda/family.h"
#include "kernels/cuda/transport_hessian.h"
#include "kernels/cuda/transport_job.h"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_resident.h"
#include "kernels/cuda/transport_slice.h"

namespace sinkhorn {
namespace cuda {
namespace {

// Before kernels can be asked. Of a workspace's layout, where the device is Hopper, all that a resident finds.
DeviceKernels KernelsOf(const DeviceInfo& device) {
  const bool hopper = device.compute_major == 9;
  return {hopper, hopper, hopper};
}

class TransportFamily final : public Family {
 public:
  const char* name() const override { return "transport"; }
  bool Takes(const DeviceInfo& /*device*/, const Problem& problem) const override {
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 1024;
    return problem.kind != ProblemKind::kNormalization && problem.n <= kMost && problem.m <= kMost;
  }
  int64_t WorkspaceBytes(const DeviceInfo& device, const Problem& problem) const override {
    return problem.count * JobOf(problem, KernelsOf(device)).at.bytes;
  }
  double PredictedSeconds(const DeviceInfo& device, const Problem& problem) const override {
    const Job job = JobOf(problem, KernelsOf(device));
    return SolveSeconds(job) + 3 * IterationSeconds(job) + 20 * kLaunchSeconds + ProductSeconds(job);
  }
  std::unique_ptr<Resident> Make(const Problem& problem, void* workspace) const override {
    return std::make_unique<TransportResident>(problem, workspace);
  }
  absl::Status Launch(absl::Span<Resident* const> residents, double slice_seconds,
                      LaunchContext* context) const override {
    std::vector<Resident*> solving, products;
    for (Resident* r : residents) (Of(r)->stage() == Stage::kProducts ? products : solving).push_back(r);
    const absl::Status status =
        solving.empty() ? absl::OkStatus() : LaunchSlice(absl::MakeConstSpan(solving), slice_seconds, context);
    if (!status.ok() || products.empty()) return status;
    return LaunchProducts(absl::MakeConstSpan(products), slice_seconds, context);
  }
  void Collect(absl::Span<Resident* const> residents) const override {
    for (Resident* resident : residents) Of(resident)->Collect();
  }
};

}  // namespace

const Family* Transport() {
  static const TransportFamily family;
  return &family;
}

}  // namespace cuda
}  // namespace sinkhorn
