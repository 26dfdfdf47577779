// Instances of the plain recipes' kernel: forward and the implicit modes' backward.
#include "kernels/cuda/normalization_plain_instances.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template PlainFunction PlainKernelOf<Work::kImplicit, false, false>(int size, bool one);
template PlainFunction PlainKernelOf<Work::kImplicit, true, false>(int size, bool one);

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
