// Instances of the plain recipes' kernel: types of 2 bytes, forward and the implicit modes' backward.
#include "kernels/cuda/normalization_plain.cuh"
#include "kernels/cuda/normalization_plain_kernels.h"

namespace sinkhorn {
namespace cuda {
namespace normalization {

PlainFunction PlainImplicitShort(int size, bool one) { return PlainKernelOf<Work::kImplicit, true, false>(size, one); }

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
