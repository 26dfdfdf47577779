// Instances of the plain recipes' kernel: types of 2 bytes, forward.
#include "kernels/cuda/normalization_plain_instances.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template PlainFunction PlainKernelOf<Work::kForward, true, false>(int size, bool one);

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
