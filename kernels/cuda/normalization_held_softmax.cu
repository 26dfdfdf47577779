// Instances of the kernel that holds matrices on the chip, recipes that begin with a softmax: blocks.
#include "kernels/cuda/normalization_held.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template HeldFunction HeldKernelOf<Held128, Lead::kSoftmax>(Work work);
template HeldFunction HeldKernelOf<Held256, Lead::kSoftmax>(Work work);

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
