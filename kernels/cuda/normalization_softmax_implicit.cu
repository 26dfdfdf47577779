// Instances of the plain kernel for softmax recipes: forward and the implicit modes' backward.
#include "kernels/cuda/normalization_plain_instances.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template PlainFunction PlainKernelOf<Work::kImplicit, false, true>(int size, bool one);
template PlainFunction PlainKernelOf<Work::kImplicit, true, true>(int size, bool one);

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
