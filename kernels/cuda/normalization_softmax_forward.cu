// Instances of the plain kernel for softmax recipes: forward.
#include "kernels/cuda/normalization_plain_instances.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template PlainFunction PlainKernelOf<Work::kForward, false, true>(int size, bool one);
template PlainFunction PlainKernelOf<Work::kForward, true, true>(int size, bool one);

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
