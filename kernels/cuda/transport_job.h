// From a problem to what the device needs to know of it.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_JOB_H_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_JOB_H_

#include "kernels/cuda/transport_shape.cuh"

namespace sinkhorn {
namespace cuda {

// What a device can do: Job's `hopper` and `wide_clusters`.
struct DeviceKernels {
  bool hopper, wide_clusters;
};

// All but the workspace's address, whose layout does not depend on the device.
Job JobOf(const Problem& problem, const DeviceKernels& kernels);

// Of one iteration of all members, launches left out.
double IterationSeconds(const Job& job);

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_JOB_H_
