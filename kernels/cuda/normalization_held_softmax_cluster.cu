// Instances of the kernel that holds matrices on the chip for softmax recipes, clusters of blocks: sides from 257 on.
#include "kernels/cuda/normalization_held.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template <>
HeldFunction HeldSoftmax<Held512>(Work work) {
  return work == Work::kImplicit   ? HeldKernel<Held512, Work::kImplicit, true>
         : work == Work::kUnrolled ? HeldKernel<Held512, Work::kUnrolled, true>
                                   : HeldKernel<Held512, Work::kForward, true>;
}
template <>
HeldFunction HeldSoftmax<Held1024>(Work work) {
  return work == Work::kImplicit   ? HeldKernel<Held1024, Work::kImplicit, true>
         : work == Work::kUnrolled ? HeldKernel<Held1024, Work::kUnrolled, true>
                                   : HeldKernel<Held1024, Work::kForward, true>;
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
