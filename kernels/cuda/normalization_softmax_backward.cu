// Instances of the plain kernel for softmax recipes: float32, forward and backward.
#include "kernels/cuda/normalization_plain.cuh"
#include "kernels/cuda/normalization_plain_kernels.h"

namespace sinkhorn {
namespace cuda {
namespace normalization {

PlainFunction SoftmaxBackward(int size, bool one) { return PlainKernelOf<Work::kUnrolled, false, true>(size, one); }

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
