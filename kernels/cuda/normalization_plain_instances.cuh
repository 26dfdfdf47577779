// What the files with instances of the plain kernel have, and its launcher, which would make them all, has not.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_INSTANCES_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_INSTANCES_CUH_

#include "kernels/cuda/normalization_plain.cuh"
#include "kernels/cuda/normalization_plain_kernels.h"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template <Work kWork, bool kShort, bool kSoftmax>
PlainFunction PlainKernelOf(int size, bool one) {
  return WithPlainShape<kWork, kSoftmax>(size, [&](auto shape) -> PlainFunction {
    using Shape = decltype(shape);
    if constexpr (kWork != Work::kForward && !HasBackward(Shape::kSize)) {
      return nullptr;
    } else {
      if constexpr (HasOne<Shape, kWork, kSoftmax>) {
        if (one) return PlainKernel<Shape, kWork, kShort, true, kSoftmax>;
      }
      return one ? nullptr : PlainKernel<Shape, kWork, kShort, false, kSoftmax>;
    }
  });
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_INSTANCES_CUH_
