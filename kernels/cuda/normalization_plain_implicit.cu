// Instances of the plain recipes' kernel: float32, forward and the implicit modes' backward.
#include "kernels/cuda/normalization_plain.cuh"
#include "kernels/cuda/normalization_plain_kernels.h"

namespace sinkhorn {
namespace cuda {
namespace normalization {

PlainFunction PlainImplicit(int size, bool one) { return PlainKernelOf<Work::kImplicit, false, false>(size, one); }

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
