// Instances of the kernel that holds matrices on the chip for recipes that begin with columns, clusters of blocks.
#include "kernels/cuda/normalization_held.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template <>
HeldFunction HeldColumns<Held512>(Work work) {
  return work == Work::kImplicit   ? HeldKernel<Held512, Work::kImplicit, Lead::kColumns>
         : work == Work::kUnrolled ? HeldKernel<Held512, Work::kUnrolled, Lead::kColumns>
                                   : HeldKernel<Held512, Work::kForward, Lead::kColumns>;
}
template <>
HeldFunction HeldColumns<Held1024>(Work work) {
  return work == Work::kImplicit   ? HeldKernel<Held1024, Work::kImplicit, Lead::kColumns>
         : work == Work::kUnrolled ? HeldKernel<Held1024, Work::kUnrolled, Lead::kColumns>
                                   : HeldKernel<Held1024, Work::kForward, Lead::kColumns>;
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
