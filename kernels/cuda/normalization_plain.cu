// Instances of the plain recipes' kernel.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/normalization_kernels.h"
#include "kernels/cuda/normalization_registers.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template <class Shape>
static void LaunchShape(bool is_short, bool backward, const LaunchOf& launch, int blocks, int64_t shared_bytes,
                        cudaStream_t stream) {
  auto* const kernel = backward ? (is_short ? PlainKernel<Shape, true, true> : PlainKernel<Shape, true, false>)
                                : (is_short ? PlainKernel<Shape, false, true> : PlainKernel<Shape, false, false>);
  LaunchKernel(kernel, blocks, kThreads, shared_bytes, stream, launch);
}

cudaError_t LaunchPlain(int tile, bool is_short, bool backward, const LaunchOf& launch, int blocks,
                        int64_t shared_bytes, cudaStream_t stream) {
  switch (tile) {
    case 0:
      LaunchShape<Tile4>(is_short, backward, launch, blocks, shared_bytes, stream);
      break;
    case 1:
      LaunchShape<Tile8>(is_short, backward, launch, blocks, shared_bytes, stream);
      break;
    case 2:
      LaunchShape<Tile16>(is_short, backward, launch, blocks, shared_bytes, stream);
      break;
    default:
      LaunchShape<Tile32>(is_short, backward, launch, blocks, shared_bytes, stream);
      break;
  }
  return cudaGetLastError();
}

int64_t HistoryBytes(int tile, int32_t iterations) {
  switch (tile) {
    case 0:
      return HistoryBytes<Tile4>(iterations);
    case 1:
      return HistoryBytes<Tile8>(iterations);
    case 2:
      return HistoryBytes<Tile16>(iterations);
    default:
      return HistoryBytes<Tile32>(iterations);
  }
}
int64_t SharedHistoryBytes() { return kSharedHistoryBytes; }

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
