// Dense and point-cloud transport on the GPU: residents, and the launches of a slice.
//
// A resident is prepared in its first slice, which tells the host the arithmetic that its data need; then iterates, two
// passes an iteration, as many as fit the slice; and ends with the measuring passes and its outputs; Hessian-vector
// products come last, in slices of their own. Engines that have converged sit out the passes that are still enqueued.
// All decisions between passes are made on the device (transport_control.cuh), so that nothing waits for the host.
//
// Those that take a whole device, one after the other, take turns: as many as fit the slice, those first that had fewer
// slices or waited for more; and so do the members of each.
#include <algorithm>
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

// All residents, but of those that take a whole device only as many as fit a slice, at least one.
std::vector<Resident*> ThoseWhoseTurnItIs(const std::vector<Resident*>& all, double slice_seconds) {
  std::vector<TransportResident*> taking;
  for (Resident* r : all) {
    if (Of(r)->TakesDevice()) taking.push_back(Of(r));
  }
  std::stable_sort(taking.begin(), taking.end(), [](const auto* p, const auto* q) { return p->ComesBefore(*q); });
  std::vector<const Resident*> waiting;
  double left = slice_seconds;
  for (TransportResident* r : taking) {
    const double seconds = TurnMembers(r->job(), slice_seconds) * TogetherSeconds(r->job());
    if (r != taking[0] && seconds > left) {
      waiting.push_back(r);
      r->Wait();
    } else {
      left -= seconds;
    }
  }
  std::vector<Resident*> chosen;
  for (Resident* r : all) {
    if (std::find(waiting.begin(), waiting.end(), r) == waiting.end()) chosen.push_back(r);
  }
  return chosen;
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
    return SolveSeconds(job) + 3 * IterationSeconds(job) + 20 * kLaunchSeconds + OutputSeconds(job) +
           ProductSeconds(job);
  }
  std::unique_ptr<Resident> Make(const Problem& problem, void* workspace) const override {
    return std::make_unique<TransportResident>(problem, workspace);
  }
  absl::Status Launch(absl::Span<Resident* const> residents, double slice_seconds,
                      LaunchContext* context) const override {
    std::vector<Resident*> solving, products;
    for (Resident* r : residents) (Of(r)->stage() == Stage::kProducts ? products : solving).push_back(r);
    solving = ThoseWhoseTurnItIs(solving, slice_seconds);
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
