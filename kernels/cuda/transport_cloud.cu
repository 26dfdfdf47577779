// Half steps between clouds in float32 (transport_cloud_step.cuh) whose exponents are products.
#include "kernels/cuda/transport_cloud_step.cuh"

namespace sinkhorn {
namespace cuda {

bool HasHopperKernels() {
  static FactOfDevice fact;
  return fact.Get([] {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, CloudStepKernel<1, Parts::kOne, ProductCost>) == cudaSuccess &&
           attributes.ptxVersion >= 90;
  });
}

void LaunchCloudStep(const LaunchTable& table, int64_t blocks, int planes, int dim, bool hopper, int side, Pass pass,
                     cudaStream_t stream) {
  const auto launch = [&](void (*kernel)(LaunchTable, int, Pass)) {
    LaunchStreaming(kernel, blocks, planes, dim, hopper, stream, table, side, pass);
  };
  switch (PartsOf(planes, dim)) {
    case Parts::kOne:
      return launch(planes == 2 ? CloudStepKernel<2, Parts::kOne, ProductCost>
                                : CloudStepKernel<1, Parts::kOne, ProductCost>);
    case Parts::kFew:
      return launch(planes == 2 ? CloudStepKernel<2, Parts::kFew, ProductCost>
                                : CloudStepKernel<1, Parts::kFew, ProductCost>);
    case Parts::kMany:
      return launch(planes == 2 ? CloudStepKernel<2, Parts::kMany, ProductCost>
                                : CloudStepKernel<1, Parts::kMany, ProductCost>);
  }
}

}  // namespace cuda
}  // namespace sinkhorn
