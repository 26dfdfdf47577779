// Instances of the kernel that holds matrices on the chip for the implicit backward modes.
#include "kernels/cuda/normalization_held.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template <>
HeldFunction HeldImplicit<Held128>() {
  return HeldKernel<Held128, Work::kImplicit, Lead::kRows>;
}
template <>
HeldFunction HeldImplicit<Held256>() {
  return HeldKernel<Held256, Work::kImplicit, Lead::kRows>;
}
template <>
HeldFunction HeldImplicit<Held512>() {
  return HeldKernel<Held512, Work::kImplicit, Lead::kRows>;
}
template <>
HeldFunction HeldImplicit<Held1024>() {
  return HeldKernel<Held1024, Work::kImplicit, Lead::kRows>;
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
