// Exponents of clouds to memory (transport_exponents.cuh), of costs that are products.
#include "kernels/cuda/transport_exponents.cuh"
#include "kernels/cuda/transport_launch.h"

namespace sinkhorn {
namespace cuda {

void LaunchExponents(const LaunchTable& table, int64_t blocks, Source source, int planes, bool densities, int dim,
                     cudaStream_t stream) {
  if (source == Source::kDistances) return LaunchDistanceExponents(table, blocks, dim, stream);
  const auto launch = [&](void (*strict)(LaunchTable), void (*fast)(LaunchTable), void (*fast_densities)(LaunchTable)) {
    LaunchStreaming(planes == 2 ? strict : densities ? fast_densities : fast, blocks, planes, dim, true, stream, table);
  };
  switch (PartsOf(planes, dim)) {
    case Parts::kOne:
      return launch(ExponentKernel<2, Parts::kOne, float, ProductCost>,
                    ExponentKernel<1, Parts::kOne, __half, ProductCost>,
                    ExponentKernel<1, Parts::kOne, Density, ProductCost>);
    case Parts::kFew:
      return launch(ExponentKernel<2, Parts::kFew, float, ProductCost>,
                    ExponentKernel<1, Parts::kFew, __half, ProductCost>,
                    ExponentKernel<1, Parts::kFew, Density, ProductCost>);
    case Parts::kMany:
      return launch(ExponentKernel<2, Parts::kMany, float, ProductCost>,
                    ExponentKernel<1, Parts::kMany, __half, ProductCost>,
                    ExponentKernel<1, Parts::kMany, Density, ProductCost>);
  }
}

}  // namespace cuda
}  // namespace sinkhorn
