// Instances of the kernel that holds matrices on the chip, recipes that begin with rows: clusters of blocks.
#include "kernels/cuda/normalization_held.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template HeldFunction HeldKernelOf<Held512, Lead::kRows>(Work work);
template HeldFunction HeldKernelOf<Held1024, Lead::kRows>(Work work);

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
