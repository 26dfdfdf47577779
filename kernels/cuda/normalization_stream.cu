// Instances of the kernel for sides from 33 to 1,024, and for many rows of few columns.
#include "kernels/cuda/normalization_plan.cuh"
#include "kernels/cuda/normalization_stream.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {
namespace {

// Runs body(StreamShape) for a size.
template <class Body>
auto WithShape(int size, Body body) {
  switch (size) {
    case 0:
      return body(Stream64());
    case 1:
      return body(Stream128());
    case 2:
      return body(Stream256());
    case 3:
      return body(Stream512());
    case 4:
      return body(Stream1024());
    case 5:
      return body(Tall64());
    case 6:
      return body(Tall128());
    case 7:
      return body(Tall256());
    case 8:
      return body(Spread64());
    case 9:
      return body(Spread128());
    case 10:
      return body(Spread256());
    case 11:
      return body(Spread512());
    default:
      return body(Spread1024());
  }
}

}  // namespace

int64_t StreamSlotBytes(int size, const Task& task) {
  return WithShape(size, [&](auto shape) {
    return (StreamSlotFloats<decltype(shape)>(task) * static_cast<int64_t>(sizeof(float)) + 255) / 256 * 256;
  });
}
int64_t StreamSharedBytes(int size, int64_t rows) {
  return WithShape(size, [&](auto shape) {
    return StreamSharedFloats<decltype(shape)>(rows) * static_cast<int64_t>(sizeof(float));
  });
}

MemberPlan SpreadPlanOf(int device, int multiprocessors, const Task& task) {
  constexpr int kSizes = 5;
  static AskedOnce known[kSizes][kSpreadRanks + 1];
  const int size = StreamIndex(task.cols);
  MemberPlan plan;
  plan.size = kSpreadIndex + size;
  plan.ranks = SpreadRanks(task.rows, task.cols);
  WithShape(plan.size, [&](auto shape) {
    using Shape = decltype(shape);
    if constexpr (Shape::kCluster) {
      static_assert(Shape::kRows * Shape::kColumns == kSpreadArea && Shape::kMostRanks == kSpreadRanks, "as told");
      plan.shared_bytes = StreamSharedBytes(plan.size, task.rows);
      plan.slot_bytes = StreamSlotBytes(plan.size, task);
      plan.at_a_time = known[size][plan.ranks].Get(device, [&] {
        return MembersAtATime(StreamKernel<Shape>, plan.ranks, Shape::kThreadCount, plan.shared_bytes, false,
                              multiprocessors);
      });
    }
  });
  return plan;
}

cudaError_t LaunchStream(int size, int ranks, const LaunchOf& launch, int blocks, int64_t shared_bytes,
                         cudaStream_t stream) {
  WithShape(size, [&](auto shape) {
    using Shape = decltype(shape);
    LaunchCluster(StreamKernel<Shape>, blocks, ranks, Shape::kThreadCount, shared_bytes, stream, launch);
  });
  return TakeLaunchError();
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
