// Instances of the kernel that holds matrices on the chip for clusters of blocks: sides from 257 to 1,024.
#include "kernels/cuda/normalization_held.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template <>
HeldFunction HeldKernelOf<Held512>(HeldWork work) {
  return work == HeldWork::kImplicit   ? HeldImplicit<Held512>()
         : work == HeldWork::kUnrolled ? HeldKernel<Held512, HeldWork::kUnrolled>
                                       : HeldKernel<Held512, HeldWork::kForward>;
}
template <>
HeldFunction HeldKernelOf<Held1024>(HeldWork work) {
  return work == HeldWork::kImplicit   ? HeldImplicit<Held1024>()
         : work == HeldWork::kUnrolled ? HeldKernel<Held1024, HeldWork::kUnrolled>
                                       : HeldKernel<Held1024, HeldWork::kForward>;
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
