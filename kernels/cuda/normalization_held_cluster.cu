// Instances of the kernel that holds matrices on the chip for clusters of blocks: sides from 257 to 1,024.
#include "kernels/cuda/normalization_held.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template <>
HeldFunction HeldKernelOf<Held512>(bool backward) {
  return backward ? HeldKernel<Held512, true> : HeldKernel<Held512, false>;
}
template <>
HeldFunction HeldKernelOf<Held1024>(bool backward) {
  return backward ? HeldKernel<Held1024, true> : HeldKernel<Held1024, false>;
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
