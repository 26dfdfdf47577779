// Which kernel families are in this build, the most specialised first.
#ifndef SINKHORN_KERNELS_CUDA_FAMILIES_H_
#define SINKHORN_KERNELS_CUDA_FAMILIES_H_

#include <vector>

#include "kernels/cuda/family.h"

namespace sinkhorn {
namespace cuda {

const std::vector<const Family*>& Families();

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_FAMILIES_H_
