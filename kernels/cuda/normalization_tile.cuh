// A matrix cut into tiles of R x C entries, one per lane of a group of P x Q lanes.
//
// A half step is a product of each lane's tile with a vector, a sum over the lanes that share rows (or columns), and a
// division. The sum is a reduce-scatter: log2 of the group's width exchanges, each of half as many numbers as the one
// before, after which each lane owns R / Q rows (C / P columns), divides, and gives the result back the same way. Lanes
// hold their rows and columns in an order of their own, k ^ Twist, so that what a lane keeps always lies in the lower
// half of its registers: no selects.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_TILE_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_TILE_CUH_

#include <cfloat>
#include <cstdint>

#include "kernels/cuda/native.cuh"
#include "kernels/cuda/normalization_task.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

constexpr int kWarps = 4;  // Of a block, each on its own.
constexpr int kThreads = 32 * kWarps;
constexpr unsigned kFullMask = 0xffffffffu;
// Of the block's warps; all lanes call. By a shuffle, so that the compiler knows that they have the same: what follows
// from it is kept once, not in each lane's registers, and lanes that exchange numbers are known not to have parted.
__device__ inline int WarpNumber() {
  const int warp = threadIdx.x / 32;
  return __shfl_sync(kFullMask, warp, 0);
}

template <int kTileRows, int kTileCols, int kRowGroups, int kColGroups>
struct TileShape {
  static constexpr int R = kTileRows, C = kTileCols, P = kRowGroups, Q = kColGroups;
  static constexpr int kLanes = P * Q;  // Of a matrix.
  static constexpr int kMembers = 32 / kLanes;
  static constexpr int kSize = R * P;  // Rows and columns, padding included.
  static constexpr int kOwn = R / Q;   // Rows that a lane owns; as many columns.
  // Keeps the lanes of a warp in different banks.
  static constexpr int kMemberStride = kSize * kSize + (kLanes == 1 ? 4 : kLanes == 2 ? 8 : kLanes == 8 ? 16 : 0);
  static constexpr int kBufferFloats = kMembers * kMemberStride;
  static_assert(kSize == C * Q && kOwn == C / P && kOwn >= 1, "square, and owned alike");
  static_assert(R == kOwn * Q && C == kOwn * P, "lanes own all of it");
};

// The sizes that there are kernels for. A 4 x 4 matrix is one thread's, an 8 x 8 one is two lanes'.
using Tile4 = TileShape<4, 4, 1, 1>;
using Tile8 = TileShape<4, 8, 2, 1>;
using Tile12 = TileShape<6, 6, 2, 2>;
using Tile16 = TileShape<4, 8, 4, 2>;
using Tile20 = TileShape<10, 10, 2, 2>;
using Tile24 = TileShape<6, 12, 4, 2>;
using Tile28 = TileShape<14, 14, 2, 2>;
using Tile32 = TileShape<4, 8, 8, 4>;
using Tile32Wide = TileShape<8, 8, 4, 4>;  // Fewer exchanges for more registers.
using Tile64 = TileShape<8, 16, 8, 4>;     // The plain recipes' alone.

// Where a lane is in its matrix.
template <class Shape>
struct Place {
  __device__ explicit Place(int lane)
      : member(lane / Shape::kLanes),
        q(lane % Shape::Q),
        p(lane % Shape::kLanes / Shape::Q),
        row_twist(q * Shape::kOwn),
        col_twist(p * Shape::kOwn) {}
  __device__ int Row(int r) const { return Shape::R * p + Twisted(r, row_twist, q); }
  __device__ int Col(int c) const { return Shape::C * q + Twisted(c, col_twist, p); }
  __device__ int OwnRow(int k) const { return Shape::R * p + row_twist + k; }
  __device__ int OwnCol(int k) const { return Shape::C * q + col_twist + k; }
  // The last of all lanes' rows number r, and of their columns.
  static constexpr int Last(int k) { return Shape::kSize - Shape::kOwn + k % Shape::kOwn; }
  // Tells lanes of a matrix apart.
  __device__ bool first() const { return p == 0 && q == 0; }

  // Number k of a lane's rows or columns: those of other lanes' groups change places.
  __device__ static int Twisted(int k, int twist, int group) {
    constexpr int kOwn = Shape::kOwn;
    if constexpr ((kOwn & (kOwn - 1)) == 0) return k ^ twist;
    return (k / kOwn ^ group) * kOwn + k % kOwn;
  }

  int member;  // Of the warp's.
  int q, p, row_twist, col_twist;
};

// ---- Sums over lanes ------------------------------------------------------------------------------------------------
struct Sum {
  template <class T>
  __device__ static T Of(T a, T b) {
    return a + b;
  }
};
struct Max {
  __device__ static float Of(float a, float b) { return fmaxf(a, b); }
};
struct Min {
  __device__ static float Of(float a, float b) { return fminf(a, b); }
};

// x[k] of N over `kGroup` lanes, kStep apart: each lane ends with the first N / kGroup. kHalf: of N.
template <class Op, int kGroup, int kStep, int kHalf, class T>
__device__ __forceinline__ void ReduceScatter(T* x) {
  if constexpr (kGroup > 1) {
#pragma unroll
    for (int k = 0; k < kHalf; ++k) x[k] = Op::Of(x[k], __shfl_xor_sync(kFullMask, x[k + kHalf], kGroup / 2 * kStep));
    ReduceScatter<Op, kGroup / 2, kStep, kHalf / 2>(x);
  }
}
// Back again. kHalf: those a lane begins with.
template <int kGroup, int kStep, int kHalf, int kMask = 1, class T>
__device__ __forceinline__ void AllGather(T* x) {
  if constexpr (kMask < kGroup) {
#pragma unroll
    for (int k = 0; k < kHalf; ++k) x[k + kHalf] = __shfl_xor_sync(kFullMask, x[k], kMask * kStep);
    AllGather<kGroup, kStep, 2 * kHalf, 2 * kMask>(x);
  }
}
template <class Shape, class Op = Sum, class T>
__device__ inline void ScatterRows(T (&x)[Shape::R]) {
  ReduceScatter<Op, Shape::Q, 1, Shape::R / 2>(x);
}
template <class Shape, class Op = Sum, class T>
__device__ inline void ScatterCols(T (&x)[Shape::C]) {
  ReduceScatter<Op, Shape::P, Shape::Q, Shape::C / 2>(x);
}
template <class Shape, class T>
__device__ inline void GatherRows(T (&x)[Shape::R]) {
  AllGather<Shape::Q, 1, Shape::kOwn>(x);
}
template <class Shape, class T>
__device__ inline void GatherCols(T (&x)[Shape::C]) {
  AllGather<Shape::P, Shape::Q, Shape::kOwn>(x);
}
// Over all lanes of a matrix.
template <class Shape, class Op, class T>
__device__ inline T OverMatrix(T x) {
#pragma unroll
  for (int mask = Shape::kLanes / 2; mask >= 1; mask /= 2) x = Op::Of(x, __shfl_xor_sync(kFullMask, x, mask));
  return x;
}

// ---- Products of a tile ---------------------------------------------------------------------------------------------
template <int R, int C, class T>
__device__ inline void TimesRows(const T (&K)[R][C], const T (&v)[C], T (&s)[R]) {
#pragma unroll
  for (int r = 0; r < R; ++r) s[r] = K[r][0] * v[0];
#pragma unroll
  for (int c = 1; c < C; ++c) {
#pragma unroll
    for (int r = 0; r < R; ++r) s[r] = fma(K[r][c], v[c], s[r]);
  }
}
template <int R, int C, class T>
__device__ inline void TimesCols(const T (&K)[R][C], const T (&u)[R], T (&q)[C]) {
#pragma unroll
  for (int c = 0; c < C; ++c) q[c] = K[0][c] * u[0];
#pragma unroll
  for (int r = 1; r < R; ++r) {
#pragma unroll
    for (int c = 0; c < C; ++c) q[c] = fma(K[r][c], u[r], q[c]);
  }
}

__device__ inline float Reciprocal(float x) { return FastReciprocal(x); }
__device__ inline float Exp2(float x) { return FastExp2(x); }
// e^x, x <= 0 or so.
__device__ inline float Exp(float x) { return Exp2(x * 1.4426950408889634f); }

// 1 / x of the first N numbers; two at a time through one reciprocal of their product: special functions are the scarce
// unit. Products must not leave the range of float32.
template <int N>
__device__ inline void Reciprocals(const float* x, float* y) {
  if constexpr (N == 1) {
    y[0] = Reciprocal(x[0]);
  } else {
#pragma unroll
    for (int k = 0; k + 1 < N; k += 2) {
      const float a = x[k], b = x[k + 1], inverse = Reciprocal(a * b);
      y[k] = inverse * b;
      y[k + 1] = inverse * a;
    }
    if constexpr (N % 2 == 1) y[N - 1] = Reciprocal(x[N - 1]);
  }
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_TILE_CUH_
