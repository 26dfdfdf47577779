// Half steps between clouds whose cost is |x - y| (transport_cloud_distances.cuh).
#include "kernels/cuda/transport_cloud_distances.cuh"
#include "kernels/cuda/transport_launch.h"

namespace sinkhorn {
namespace cuda {

void LaunchCloudDistances(const LaunchTable& table, int64_t blocks, int dim, bool hopper, int side, Pass pass,
                          cudaStream_t stream) {
  constexpr int kPlanes = 2;
  const auto launch = [&](void (*kernel)(LaunchTable, int, Pass)) {
    LaunchStreaming(kernel, blocks, kPlanes, dim, hopper, stream, table, side, pass);
  };
  switch (PartsOf(kPlanes, dim)) {
    case Parts::kOne:
      return launch(CloudStepKernel<kPlanes, Parts::kOne, DistanceCost>);
    case Parts::kFew:
      return launch(CloudStepKernel<kPlanes, Parts::kFew, DistanceCost>);
    case Parts::kMany:
      return launch(CloudStepKernel<kPlanes, Parts::kMany, DistanceCost>);
  }
}

}  // namespace cuda
}  // namespace sinkhorn
