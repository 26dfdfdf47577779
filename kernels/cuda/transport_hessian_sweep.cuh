// A sweep's blocks: which rows and directions each has, and what becomes of its sums. Shared by the kernels that make
// the sums.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_HESSIAN_SWEEP_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_HESSIAN_SWEEP_CUH_

#include "kernels/cuda/transport_hessian.cuh"
#include "kernels/cuda/transport_rows.cuh"

namespace sinkhorn {
namespace cuda {

// A block's rows, against the directions from first * kSweepTogether on.
struct SweepBlock {
  RowBlock rows;
  int group;
};
__device__ inline SweepBlock FindSweepBlock(const Job& job, int64_t index, int side, Geometry geometry) {
  const int64_t groups = SweepGroups(job);
  return {FindRowBlock(job, index / groups, side, job.engines, geometry), static_cast<int>(index % groups)};
}

// What the plan is multiplied with, for kTogether directions; null for those that need nothing. Whether any does.
template <int kTogether>
__device__ inline bool SourcesOf(const ProductVectors& v, int group, int side, const double* (&sources)[kTogether]) {
  bool any = false;
  for (int q = 0; q < kTogether; ++q) {
    sources[q] = v.Source(side, int64_t{group} * kSweepTogether + q);
    any = any || sources[q] != nullptr;
  }
  return any;
}

// Row i's sum of a direction, by the phase's rule.
__device__ inline void StoreImage(const ProductVectors& v, int side, int64_t q, int64_t i, double sum) {
  if (side == 1) {
    v.image(1, q)[i] = sum;
    return;
  }
  const double inverse = v.inverse(0)[i];
  v.image(0, q)[i] = sum * inverse;
  if (v.states[q].phase == Phase::kCheck) v.potential(0, q)[i] = (v.right(0, q)[i] - sum) * inverse;
}

// Thread t has `sums` of row t of the block over this block's columns, of `tile` rows: parts are combined, always in
// the same order. All threads call it.
template <int kTogether>
__device__ inline void FinishSweep(const ProductVectors& v, const SweepBlock& b, int side, int tile,
                                   const double* const (&sources)[kTogether], const double (&sums)[kTogether]) {
  const int64_t rows = v.size[side], i = int64_t{b.rows.block} * tile + threadIdx.x;
  const int64_t first = int64_t{b.group} * kSweepTogether;
  const bool mine = threadIdx.x < tile && i < rows;
  const int splits = b.rows.splits;
  if (splits > 1) {
    for (int q = 0; q < kTogether && mine; ++q) {
      if (sources[q] != nullptr) v.partial[(b.rows.split * v.count + first + q) * rows + i] = sums[q];
    }
    if (!LastToArrive(v.arrivals + b.group * v.row_blocks + b.rows.block, splits)) return;
  }
  for (int q = 0; q < kTogether && mine; ++q) {
    if (sources[q] == nullptr) continue;
    double sum = splits > 1 ? 0 : sums[q];
    for (int k = 0; k < splits && splits > 1; ++k) sum += __ldcg(v.partial + (k * v.count + first + q) * rows + i);
    StoreImage(v, side, first + q, i, sum);
  }
}

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_HESSIAN_SWEEP_CUH_
