// The instances of the plain kernel: six files, so that they are compiled side by side.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_KERNELS_H_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_KERNELS_H_

#include "kernels/cuda/normalization_kernels.h"

namespace sinkhorn {
namespace cuda {
namespace normalization {

using PlainFunction = void (*)(LaunchOf);

// Of tile `size` (kPlainSides). kShort, `one`, kSoftmax: as PlainTraits has them. Null where there is none.
template <Work kWork, bool kShort, bool kSoftmax>
PlainFunction PlainKernelOf(int size, bool one);

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_KERNELS_H_
