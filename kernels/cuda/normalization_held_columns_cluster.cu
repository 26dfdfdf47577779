// Instances of the kernel that holds matrices on the chip, recipes that begin with columns: clusters of blocks.
#include "kernels/cuda/normalization_held.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template HeldFunction HeldKernelOf<Held512, Lead::kColumns>(Work work);
template HeldFunction HeldKernelOf<Held1024, Lead::kColumns>(Work work);

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
