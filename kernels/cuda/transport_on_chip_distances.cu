// Whole solves of small float32 problems (transport_on_chip_solve.cuh) of distances: a file of its own, since it is as
// much to compile again.
#include "kernels/cuda/transport_on_chip_launch.cuh"

namespace sinkhorn {
namespace cuda {

void LaunchOnChipDistances(const LaunchTable& table, int64_t blocks, const OnChipLaunch& of, int chunks,
                           cudaStream_t stream) {
  LaunchSolves<Source::kDistances>(table, blocks, of, chunks, stream);
}

}  // namespace cuda
}  // namespace sinkhorn
