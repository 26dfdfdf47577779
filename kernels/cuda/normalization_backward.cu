// Instances of the implicit modes' kernel.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/normalization_backward.cuh"
#include "kernels/cuda/normalization_kernels.h"

namespace sinkhorn {
namespace cuda {
namespace normalization {

cudaError_t LaunchBackward(int tile, const LaunchOf& launch, int blocks, cudaStream_t stream) {
  switch (tile) {
    case 0:
      LaunchKernel(BackwardKernel<Tile4>, blocks, kThreads, 0, stream, launch);
      break;
    case 1:
      LaunchKernel(BackwardKernel<Tile8>, blocks, kThreads, 0, stream, launch);
      break;
    case 2:
      LaunchKernel(BackwardKernel<Tile16>, blocks, kThreads, 0, stream, launch);
      break;
    default:
      LaunchKernel(BackwardKernel<Tile32>, blocks, kThreads, 0, stream, launch);
      break;
  }
  return TakeLaunchError();
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
