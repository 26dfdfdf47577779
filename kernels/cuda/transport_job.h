// From a problem to what the device needs to know of it.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_JOB_H_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_JOB_H_

#include "kernels/cuda/transport_types.cuh"

namespace sinkhorn {
namespace cuda {

// All but the workspace's address. `hopper`: its kernels are there; the layout does not depend on it.
Job JobOf(const Problem& problem, bool hopper);

// Of one iteration of all members, launches left out.
double IterationSeconds(const Job& job);

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_JOB_H_
