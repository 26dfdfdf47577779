// Instances of the plain recipes' kernel: types of 2 bytes, forward.
#include "kernels/cuda/normalization_plain.cuh"
#include "kernels/cuda/normalization_plain_kernels.h"

namespace sinkhorn {
namespace cuda {
namespace normalization {

PlainFunction PlainForwardShort(int size, bool one) { return PlainKernelOf<Work::kForward, true, false>(size, one); }

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
