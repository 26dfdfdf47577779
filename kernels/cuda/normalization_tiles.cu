// Instances of the general recipes' kernel.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/normalization_kernels.h"
#include "kernels/cuda/normalization_tiles.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template <class Shape>
static void LaunchShape(bool backward, const LaunchOf& launch, int blocks, int64_t shared_bytes, cudaStream_t stream) {
  if (backward) {
    LaunchKernel(TilesKernel<Shape, true>, blocks, kThreads, shared_bytes, stream, launch);
  } else {
    LaunchKernel(TilesKernel<Shape, false>, blocks, kThreads, 0, stream, launch);
  }
}

cudaError_t LaunchTiles(int tile, bool backward, const LaunchOf& launch, int blocks, int64_t shared_bytes,
                        cudaStream_t stream) {
  switch (tile) {
    case 0:
      LaunchShape<Tile4>(backward, launch, blocks, shared_bytes, stream);
      break;
    case 1:
      LaunchShape<Tile8>(backward, launch, blocks, shared_bytes, stream);
      break;
    case 2:
      LaunchShape<Tile16>(backward, launch, blocks, shared_bytes, stream);
      break;
    default:
      LaunchShape<Tile32>(backward, launch, blocks, shared_bytes, stream);
      break;
  }
  return TakeLaunchError();
}

int64_t HistoryBytes(int tile, int32_t iterations) {
  switch (tile) {
    case 0:
      return HistoryBytes<Tile4>(2, iterations);
    case 1:
      return HistoryBytes<Tile8>(2, iterations);
    case 2:
      return HistoryBytes<Tile16>(2, iterations);
    default:
      return HistoryBytes<Tile32>(2, iterations);
  }
}
int64_t SharedHistoryBytes() { return kSharedHistoryBytes; }

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
