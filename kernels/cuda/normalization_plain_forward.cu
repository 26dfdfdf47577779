// Instances of the plain recipes' kernel: float32, forward.
#include "kernels/cuda/normalization_plain.cuh"
#include "kernels/cuda/normalization_plain_kernels.h"

namespace sinkhorn {
namespace cuda {
namespace normalization {

PlainFunction PlainForward(int size, bool one) { return PlainKernelOf<Work::kForward, false, false>(size, one); }

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
