// Matrices with sides from 65 to 1,024 on the chip: the choice of a kernel, and its launch.
#include <algorithm>
#include <atomic>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/normalization_held_shape.cuh"
#include "kernels/cuda/normalization_kernels.h"
#include "kernels/cuda/transport_cluster.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

namespace {

// Runs body(HeldShape) for a size.
template <class Body>
auto WithShape(int size, Body body) {
  switch (size) {
    case 0:
      return body(Held128());
    case 1:
      return body(Held256());
    case 2:
      return body(Held512());
    default:
      return body(Held1024());
  }
}

template <class Shape>
constexpr size_t kSharedBytes = kHeldSharedFloats<Shape> * sizeof(float);

// Members at a time on the calling thread's device; 0: it cannot run the kernel.
template <class Shape>
int MembersAtATime(int multiprocessors, int ranks) {
  auto* const kernel = HeldKernelOf<Shape, Lead::kRows>(Work::kUnrolled);
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) return 0;
  if (attributes.ptxVersion < 90 && !kHeldBeforeHopper<Shape>) return 0;
  AllowShared(kernel, kSharedBytes<Shape>);
  int most = 0;
  if (ranks == 1) {
    const cudaError_t error =
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&most, kernel, Shape::kThreadCount, kSharedBytes<Shape>);
    return error == cudaSuccess ? most * multiprocessors : 0;
  }
  AllowRanks(kernel, ranks);
  AttributedLaunch launch(kernel, ranks, Shape::kThreadCount, kSharedBytes<Shape>, nullptr);
  launch.Add(ClusterOf(ranks));
  return cudaOccupancyMaxActiveClusters(&most, kernel, launch.config()) == cudaSuccess ? most : 0;
}

}  // namespace

HeldPlan HeldPlanOf(int device, int multiprocessors, const Task& task) {
  constexpr int kMostDevices = 64, kSizes = 4, kMostRanks = 16;
  static std::atomic<int> known[kMostDevices][kSizes][kMostRanks + 1];  // Members at a time + 1; 0: not asked yet.
  HeldPlan plan;
  plan.size = task.n <= 128 ? 0 : task.n <= 256 ? 1 : task.n <= 512 ? 2 : 3;
  WithShape(plan.size, [&](auto shape) {
    using Shape = decltype(shape);
    plan.ranks = (task.n + Shape::kRows - 1) / Shape::kRows;
    plan.shared_bytes = kSharedBytes<Shape>;
    plan.slot_bytes = task.unrolled ? (int64_t{task.iterations} + 1) * kHeldStep<Shape> * sizeof(float) : 0;
    if (device < 0 || device >= kMostDevices) return;
    std::atomic<int>& at_a_time = known[device][plan.size][plan.ranks];
    if (at_a_time == 0) {
      int before = device;
      (void)cudaGetDevice(&before);
      if (before != device) (void)cudaSetDevice(device);
      at_a_time = 1 + MembersAtATime<Shape>(multiprocessors, plan.ranks);
      if (before != device) (void)cudaSetDevice(before);
      (void)cudaGetLastError();  // That it cannot is no error.
    }
    plan.at_a_time = std::max(at_a_time - 1, 0);
  });
  return plan;
}

cudaError_t LaunchHeld(int size, int ranks, Work work, Lead lead, const LaunchOf& launch, int blocks,
                       int64_t shared_bytes, cudaStream_t stream) {
  WithShape(size, [&](auto shape) {
    using Shape = decltype(shape);
    auto* const kernel = lead == Lead::kSoftmax   ? HeldKernelOf<Shape, Lead::kSoftmax>(work)
                         : lead == Lead::kColumns ? HeldKernelOf<Shape, Lead::kColumns>(work)
                                                  : HeldKernelOf<Shape, Lead::kRows>(work);
    LaunchCluster(kernel, blocks, ranks, Shape::kThreadCount, shared_bytes, stream, launch);
  });
  return TakeLaunchError();
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
