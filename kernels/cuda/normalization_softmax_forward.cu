// Instances of the plain kernel for softmax recipes: float32, forward.
#include "kernels/cuda/normalization_plain.cuh"
#include "kernels/cuda/normalization_plain_kernels.h"

namespace sinkhorn {
namespace cuda {
namespace normalization {

PlainFunction SoftmaxForward(int size, bool one) { return PlainKernelOf<Work::kForward, false, true>(size, one); }

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
