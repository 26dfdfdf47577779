// Instances of the kernel that holds matrices on the chip for softmax recipes, blocks: sides from 65 to 256.
#include "kernels/cuda/normalization_held.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template <>
HeldFunction HeldSoftmax<Held128>(Work work) {
  return work == Work::kImplicit   ? HeldKernel<Held128, Work::kImplicit, Lead::kSoftmax>
         : work == Work::kUnrolled ? HeldKernel<Held128, Work::kUnrolled, Lead::kSoftmax>
                                   : HeldKernel<Held128, Work::kForward, Lead::kSoftmax>;
}
template <>
HeldFunction HeldSoftmax<Held256>(Work work) {
  return work == Work::kImplicit   ? HeldKernel<Held256, Work::kImplicit, Lead::kSoftmax>
         : work == Work::kUnrolled ? HeldKernel<Held256, Work::kUnrolled, Lead::kSoftmax>
                                   : HeldKernel<Held256, Work::kForward, Lead::kSoftmax>;
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
