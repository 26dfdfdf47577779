// Whole solves of small problems (transport_on_chip_solve.cuh) from exponents in float64: a file of its own, since it
// is as much to compile again.
#include "kernels/cuda/transport_on_chip_launch.cuh"

namespace sinkhorn {
namespace cuda {

void LaunchOnChipExact(const LaunchTable& table, int64_t blocks, const OnChipLaunch& of, int chunks,
                       cudaStream_t stream) {
  LaunchSolves<Source::kExact>(table, blocks, of, chunks, stream);
}

}  // namespace cuda
}  // namespace sinkhorn
