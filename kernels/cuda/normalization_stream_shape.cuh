// The shapes of the kernel for sides from 33 to 1,024, and for many rows of few columns, the memory that each needs,
// and sums over a warp.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_STREAM_SHAPE_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_STREAM_SHAPE_CUH_

#include "kernels/cuda/normalization_registers.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

constexpr int CeilPowerOfTwo(int x) { return x <= 1 ? 1 : 2 * CeilPowerOfTwo((x + 1) / 2); }

// Columns of a lane, warps, and rows of a warp that stay in registers and in shared memory (0: none do); blocks of a
// member at most, one below the other (1: it is a block's).
template <int kLaneColumns, int kBlockWarpCount, int kKeptRows, int kStoredRows, int kRanks = 1>
struct StreamShape {
  static constexpr int C = kLaneColumns, kWarpCount = kBlockWarpCount, kKept = kKeptRows, kStored = kStoredRows;
  static constexpr int kThreadCount = 32 * kWarpCount, kColumns = 32 * C;
  static constexpr int kWarpRows = kKept + kStored;
  static constexpr bool kResident = kWarpRows > 0;
  static constexpr int kRows = kWarpRows * kWarpCount;  // Of a block, at most; 0: any.
  static constexpr int kMostRanks = kRanks;
  static constexpr bool kCluster = kMostRanks > 1;
  // Rows that a warp takes together: of those in shared memory, and where it has none of its own.
  static constexpr int kStoredTogether = C <= 2 ? 16 : C <= 4 ? 8 : C <= 8 ? 4 : C <= 16 ? 2 : 1;
  static constexpr int kTogether = C <= 2 ? 8 : C <= 8 ? 4 : C <= 16 ? 2 : 1;
};
using Stream64 = StreamShape<2, 4, 16, 0>;
using Stream128 = StreamShape<4, 16, 8, 0>;
using Stream256 = StreamShape<8, 16, 4, 12>;
using Stream512 = StreamShape<16, 16, 0, 0>;
using Stream1024 = StreamShape<32, 8, 0, 0>;
using Tall64 = StreamShape<2, 16, 0, 0>;
using Tall128 = StreamShape<4, 16, 0, 0>;
using Tall256 = StreamShape<8, 16, 0, 0>;
using Spread64 = StreamShape<2, 8, 32, 96, 16>;
using Spread128 = StreamShape<4, 8, 32, 32, 16>;
using Spread256 = StreamShape<8, 8, 16, 16, 16>;
using Spread512 = StreamShape<16, 8, 8, 8, 16>;
using Spread1024 = StreamShape<32, 8, 3, 5, 16>;

// A block's rows of a matrix of so many: numbers of each that it has room for, in shared memory and in its history.
template <class Shape>
__host__ __device__ constexpr int64_t StreamBlockRows(int64_t rows) {
  return Shape::kCluster ? Shape::kRows : rows;
}
// Floats of shared memory: of them those of a cluster's blocks, for each other. And of a slot of the workspace.
template <class Shape>
constexpr int kStreamClusterFloats =
    Shape::kCluster ? 2 * Shape::kColumns + 4 * Shape::kMostRanks + 4 + 4 * Shape::kThreadCount : 0;
template <class Shape>
__host__ __device__ constexpr int64_t StreamSharedFloats(int64_t rows) {
  return (Shape::kWarpCount * (1 + Shape::kStored) + 4) * Shape::kColumns + kStreamClusterFloats<Shape> +
         4 * StreamBlockRows<Shape>(rows) + 32;
}
template <class Shape>
__host__ __device__ constexpr int64_t StreamMatrixRows(int64_t rows) {
  return Shape::kResident ? Shape::kKept * Shape::kWarpCount : rows;
}
template <class Shape>
__host__ __device__ inline int64_t StreamSlotFloats(const Task& task) {
  const int64_t rows = StreamBlockRows<Shape>(task.rows), cols = Shape::kColumns;
  return StreamMatrixRows<Shape>(rows) * cols +
         (task.unrolled ? (int64_t{task.iterations} + 1) * 2 * (rows + cols) : 0);
}

// The first log2(kRows) of its steps. Recursive: a loop over halves would not be unrolled, and its sums be put into
// local memory.
template <int kRows, class Op>
__device__ __forceinline__ float ScatterHalves(float* s, int lane) {
  if constexpr (kRows > 1) {
    constexpr int kHalf = kRows / 2;
    const bool upper = (lane & kHalf) != 0;
#pragma unroll
    for (int k = 0; k < kHalf; ++k) {
      const float mine = upper ? s[k + kHalf] : s[k], other = upper ? s[k] : s[k + kHalf];
      s[k] = Op::Of(mine, __shfl_xor_sync(kFullMask, other, kHalf));
    }
    return ScatterHalves<kHalf, Op>(s, lane);
  } else {
    return s[0];
  }
}
// A warp's kRows sums (or maxima) over its lanes: lane l ends with the whole one of row l % kRows.
template <int kRows, class Op = Sum>
__device__ inline float Scatter(float (&s)[kRows], int lane) {
  float all = ScatterHalves<kRows, Op>(s, lane);
#pragma unroll
  for (int mask = kRows; mask < 32; mask *= 2) all = Op::Of(all, __shfl_xor_sync(kFullMask, all, mask));
  return all;
}

template <class Op>
__device__ inline float OverWarp(float x) {
#pragma unroll
  for (int mask = 16; mask >= 1; mask /= 2) x = Op::Of(x, __shfl_xor_sync(kFullMask, x, mask));
  return x;
}
__device__ inline float WarpSum(float x) { return OverWarp<Sum>(x); }
__device__ inline float WarpMax(float x) { return OverWarp<Max>(x); }

// Over a block of so many warps, to all threads; orders what was written before. `memory`: of a number for each warp.
template <class Op, int kWarpCount>
__device__ inline float OverBlock(float x, float* memory) {
  x = OverWarp<Op>(x);
  __syncthreads();  // The memory is free.
  if (threadIdx.x % 32 == 0) memory[threadIdx.x / 32] = x;
  __syncthreads();  // The warps' are there.
  float all = memory[0];
  for (int w = 1; w < kWarpCount; ++w) all = Op::Of(all, memory[w]);
  return all;
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_STREAM_SHAPE_CUH_
