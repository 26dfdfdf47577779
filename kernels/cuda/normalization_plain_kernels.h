// The instances of the plain kernel: twelve files, so that they are compiled side by side.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_KERNELS_H_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_KERNELS_H_

#include "kernels/cuda/normalization_kernels.h"

namespace sinkhorn {
namespace cuda {
namespace normalization {

using PlainFunction = void (*)(LaunchOf);

// Of tile `size` (kPlainSides). `one`: as PlainTraits has it; null where there is none.
PlainFunction PlainForward(int size, bool one);
PlainFunction PlainForwardShort(int size, bool one);
PlainFunction PlainBackward(int size, bool one);
PlainFunction PlainBackwardShort(int size, bool one);
PlainFunction PlainImplicit(int size, bool one);
PlainFunction PlainImplicitShort(int size, bool one);
// Of recipes that begin with a softmax.
PlainFunction SoftmaxForward(int size, bool one);
PlainFunction SoftmaxForwardShort(int size, bool one);
PlainFunction SoftmaxBackward(int size, bool one);
PlainFunction SoftmaxBackwardShort(int size, bool one);
PlainFunction SoftmaxImplicit(int size, bool one);
PlainFunction SoftmaxImplicitShort(int size, bool one);

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_KERNELS_H_
