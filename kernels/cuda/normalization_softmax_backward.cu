// Instances of the plain kernel for softmax recipes: forward and backward.
#include "kernels/cuda/normalization_plain_instances.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template PlainFunction PlainKernelOf<Work::kUnrolled, false, true>(int size, bool one);
template PlainFunction PlainKernelOf<Work::kUnrolled, true, true>(int size, bool one);

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
