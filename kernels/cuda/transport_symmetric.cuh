// Which engines launches of many iterations of their own make (transport_symmetric.cu), and by how many blocks: by
// their shape and the device alone.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_SYMMETRIC_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_SYMMETRIC_CUH_

#include <cstdint>

#include "kernels/cuda/transport_shape.cuh"

namespace sinkhorn {
namespace cuda {

// Of a block. Rows are so many times some number; a warp takes so many columns at a time.
constexpr int kSymmetricThreads = 512, kSymmetricWarps = kSymmetricThreads / 32;
constexpr int kSymmetricRows = 8, kSymmetricColumns = 64;

// Engines of a launch.
constexpr unsigned kCrossEngine = 1, kSelfEngines = 2 | 4;

// Whether an engine is one of those that LoopsSymmetric; engine 0 from cold, at an epsilon that may be too small for
// that: after a pass.
__host__ __device__ inline bool IsApart(const Job& job, int engine, const EngineState& state) {
  const bool apart = job.loops_symmetric && IsSymmetric(job, engine) && state.mode == kFloat && !state.fallen;
  return apart && !(engine == 0 && state.starting && job.solver.epsilon_decay == 0);
}
// How many blocks have an engine, of `group`: each has some rows, a side's points. Of engine 0 it has all columns, and
// adds up some. Of the others, whose columns are the same points, it has those of its rows and of half of all blocks
// after it, in a circle, so that each pair of points is one block's: an odd number of blocks.
struct SymmetricShape {
  int group, blocks, rows, columns, owned;
};
__host__ __device__ inline SymmetricShape SymmetricShapeOf(const Job& job, int engine) {
  const int64_t n = EngineSize(job, engine, 0), m = EngineSize(job, engine, 1);
  if (engine == 0) {
    const int rows = static_cast<int>(CeilDiv(n, kSymmetricRows * kProcessors)) * kSymmetricRows;
    const int columns = static_cast<int>(CeilDiv(m, kSymmetricColumns)) * kSymmetricColumns;
    return {kProcessors, kProcessors, rows, columns, static_cast<int>(CeilDiv(columns, 4 * kProcessors)) * 4};
  }
  // Both at once, unless one would wait for the other.
  const int64_t more = job.size[0] > job.size[1] ? job.size[0] : job.size[1];
  const int group = more * 2 <= 3 * (int64_t{job.size[0]} + job.size[1] - more) ? kProcessors / 2 : kProcessors;
  const int rows = static_cast<int>(CeilDiv(n, kSymmetricRows * (group - 1))) * kSymmetricRows;
  const int blocks = static_cast<int>(CeilDiv(n, rows)) / 2 * 2 + 1;
  return {group, blocks, rows, (blocks / 2 + 1) * rows, rows};
}
// Of all blocks, with those that are no points and come last.
__host__ __device__ inline int64_t SymmetricColumns(const Job& job, int engine) {
  const SymmetricShape shape = SymmetricShapeOf(job, engine);
  return engine == 0 ? shape.columns : int64_t{shape.blocks} * shape.rows;
}
// Of what blocks tell each other, in this order: float[blocks, columns], their columns' sums; errors, by turn and side,
// double[2, 2, kProcessors]; float4[SymmetricColumns], coordinates and mass.
__host__ __device__ inline int64_t SymmetricSumBytes(const SymmetricShape& shape) {
  return int64_t{shape.blocks} * shape.columns * static_cast<int64_t>(sizeof(float));
}
constexpr int64_t kSymmetricErrorBytes = 2 * 2 * kProcessors * sizeof(double);
__host__ __device__ inline int64_t SymmetricBytes(const Job& job, int engine) {
  return SymmetricSumBytes(SymmetricShapeOf(job, engine)) + kSymmetricErrorBytes +
         SymmetricColumns(job, engine) * 4 * static_cast<int64_t>(sizeof(float));
}

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_SYMMETRIC_CUH_
