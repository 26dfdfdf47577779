// The launches of a slice.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_SLICE_H_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_SLICE_H_

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/cuda/family.h"

namespace sinkhorn {
namespace cuda {

constexpr double kLaunchSeconds = 3e-6;

// As Family::Launch, for transport's residents.
absl::Status LaunchSlice(absl::Span<Resident* const> residents, double slice_seconds, LaunchContext* context);
// The same for those whose Hessian-vector products are under way (transport_hessian_slice.cc).
absl::Status LaunchProducts(absl::Span<Resident* const> residents, double slice_seconds, LaunchContext* context);

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_SLICE_H_
