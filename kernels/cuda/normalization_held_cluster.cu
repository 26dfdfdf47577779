// Instances of the kernel that holds matrices on the chip for clusters of blocks: sides from 257 to 1,024.
#include "kernels/cuda/normalization_held.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template <>
HeldFunction HeldKernelOf<Held512>(Work work) {
  return work == Work::kImplicit   ? HeldImplicit<Held512>()
         : work == Work::kUnrolled ? HeldKernel<Held512, Work::kUnrolled, Lead::kRows>
                                   : HeldKernel<Held512, Work::kForward, Lead::kRows>;
}
template <>
HeldFunction HeldKernelOf<Held1024>(Work work) {
  return work == Work::kImplicit   ? HeldImplicit<Held1024>()
         : work == Work::kUnrolled ? HeldKernel<Held1024, Work::kUnrolled, Lead::kRows>
                                   : HeldKernel<Held1024, Work::kForward, Lead::kRows>;
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
