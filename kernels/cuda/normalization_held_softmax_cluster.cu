// Instances of the kernel that holds matrices on the chip for softmax recipes, clusters of blocks: sides from 257 on.
#include "kernels/cuda/normalization_held.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template <>
HeldFunction HeldSoftmax<Held512>(Work work) {
  return work == Work::kImplicit   ? HeldKernel<Held512, Work::kImplicit, Lead::kSoftmax>
         : work == Work::kUnrolled ? HeldKernel<Held512, Work::kUnrolled, Lead::kSoftmax>
                                   : HeldKernel<Held512, Work::kForward, Lead::kSoftmax>;
}
template <>
HeldFunction HeldSoftmax<Held1024>(Work work) {
  return work == Work::kImplicit   ? HeldKernel<Held1024, Work::kImplicit, Lead::kSoftmax>
         : work == Work::kUnrolled ? HeldKernel<Held1024, Work::kUnrolled, Lead::kSoftmax>
                                   : HeldKernel<Held1024, Work::kForward, Lead::kSoftmax>;
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
