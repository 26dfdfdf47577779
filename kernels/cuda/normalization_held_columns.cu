// Instances of the kernel that holds matrices on the chip for recipes that begin with columns, blocks.
#include "kernels/cuda/normalization_held.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template <>
HeldFunction HeldColumns<Held128>(Work work) {
  return work == Work::kImplicit   ? HeldKernel<Held128, Work::kImplicit, Lead::kColumns>
         : work == Work::kUnrolled ? HeldKernel<Held128, Work::kUnrolled, Lead::kColumns>
                                   : HeldKernel<Held128, Work::kForward, Lead::kColumns>;
}
template <>
HeldFunction HeldColumns<Held256>(Work work) {
  return work == Work::kImplicit   ? HeldKernel<Held256, Work::kImplicit, Lead::kColumns>
         : work == Work::kUnrolled ? HeldKernel<Held256, Work::kUnrolled, Lead::kColumns>
                                   : HeldKernel<Held256, Work::kForward, Lead::kColumns>;
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
