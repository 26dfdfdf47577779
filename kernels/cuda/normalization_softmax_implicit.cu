// Instances of the plain kernel for softmax recipes: float32, forward and the implicit modes' backward.
#include "kernels/cuda/normalization_plain.cuh"
#include "kernels/cuda/normalization_plain_kernels.h"

namespace sinkhorn {
namespace cuda {
namespace normalization {

PlainFunction SoftmaxImplicit(int size, bool one) { return PlainKernelOf<Work::kImplicit, false, true>(size, one); }

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
