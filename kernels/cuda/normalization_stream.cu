// Instances of the kernel for sides from 33 to 1,024, and for many rows of few columns.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/normalization_kernels.h"
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
    default:
      return body(Tall256());
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

cudaError_t LaunchStream(int size, const LaunchOf& launch, int blocks, int64_t shared_bytes, cudaStream_t stream) {
  WithShape(size, [&](auto shape) {
    using Shape = decltype(shape);
    LaunchKernel(StreamKernel<Shape>, blocks, Shape::kThreadCount, shared_bytes, stream, launch);
  });
  return TakeLaunchError();
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
