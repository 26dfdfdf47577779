// Matrices with sides from 65 to 1,024 on the chip: the choice of a kernel, and its launch.
#include "kernels/cuda/normalization_held_shape.cuh"
#include "kernels/cuda/normalization_kernels.h"
#include "kernels/cuda/normalization_plan.cuh"

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

}  // namespace

MemberPlan HeldPlanOf(int device, int multiprocessors, const Task& task) {
  constexpr int kSizes = 4, kMostRanks = 16;
  static AskedOnce known[kSizes][kMostRanks + 1];
  MemberPlan plan;
  plan.size = task.n <= 128 ? 0 : task.n <= 256 ? 1 : task.n <= 512 ? 2 : 3;
  WithShape(plan.size, [&](auto shape) {
    using Shape = decltype(shape);
    plan.ranks = (task.n + Shape::kRows - 1) / Shape::kRows;
    plan.shared_bytes = kSharedBytes<Shape>;
    plan.slot_bytes = task.unrolled ? (int64_t{task.iterations} + 1) * kHeldStep<Shape> * sizeof(float) : 0;
    plan.at_a_time = known[plan.size][plan.ranks].Get(device, [&] {
      auto* const kernel = HeldKernelOf<Shape, Lead::kRows>(Work::kUnrolled);
      return MembersAtATime(kernel, plan.ranks, Shape::kThreadCount, kSharedBytes<Shape>, kHeldBeforeHopper<Shape>,
                            multiprocessors);
    });
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
