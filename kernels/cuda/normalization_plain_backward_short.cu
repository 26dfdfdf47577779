// Instances of the plain recipes' kernel: types of 2 bytes, forward and backward.
#include "kernels/cuda/normalization_plain.cuh"
#include "kernels/cuda/normalization_plain_kernels.h"

namespace sinkhorn {
namespace cuda {
namespace normalization {

PlainFunction PlainBackwardShort(int size, bool one) { return PlainKernelOf<Work::kUnrolled, true, false>(size, one); }

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
