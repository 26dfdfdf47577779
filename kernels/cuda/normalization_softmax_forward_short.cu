// Instances of the plain kernel for softmax recipes: types of 2 bytes, forward.
#include "kernels/cuda/normalization_plain.cuh"
#include "kernels/cuda/normalization_plain_kernels.h"

namespace sinkhorn {
namespace cuda {
namespace normalization {

PlainFunction SoftmaxForwardShort(int size, bool one) { return PlainKernelOf<Work::kForward, true, true>(size, one); }

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
