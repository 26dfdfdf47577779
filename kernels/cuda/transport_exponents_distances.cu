// Exponents of clouds to memory (transport_exponents.cuh), of costs that are distances.
#include "kernels/cuda/transport_cloud_distances.cuh"
#include "kernels/cuda/transport_exponents.cuh"
#include "kernels/cuda/transport_launch.h"

namespace sinkhorn {
namespace cuda {

void LaunchDistanceExponents(const LaunchTable& table, int64_t blocks, int dim, cudaStream_t stream) {
  constexpr int kPlanes = 2;
  const auto launch = [&](void (*kernel)(LaunchTable)) {
    LaunchStreaming(kernel, blocks, kPlanes, dim, true, stream, table);
  };
  switch (PartsOf(kPlanes, dim)) {
    case Parts::kOne:
      return launch(ExponentKernel<kPlanes, Parts::kOne, float, DistanceCost>);
    case Parts::kFew:
      return launch(ExponentKernel<kPlanes, Parts::kFew, float, DistanceCost>);
    case Parts::kMany:
      return launch(ExponentKernel<kPlanes, Parts::kMany, float, DistanceCost>);
  }
}

}  // namespace cuda
}  // namespace sinkhorn
