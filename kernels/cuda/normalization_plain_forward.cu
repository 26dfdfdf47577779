// Instances of the plain recipes' kernel: forward.
#include "kernels/cuda/normalization_plain_instances.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template PlainFunction PlainKernelOf<Work::kForward, false, false>(int size, bool one);
template PlainFunction PlainKernelOf<Work::kForward, true, false>(int size, bool one);

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
