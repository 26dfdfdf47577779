// The plain kernel's start: from logits to K, and whether a guard may be left out.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_START_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_START_CUH_

#include "kernels/cuda/normalization_registers.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

// Of a matrix that may be smaller than the tile.
template <bool kPadded, class Shape>
__device__ inline bool IsInside(const Task& task, const Place<Shape>& place, int r, int c) {
  return !kPadded || (place.Row(r) < task.n && place.Col(c) < task.n);
}
// Clears what scalings have outside a matrix smaller than the tile, n >= kLeast. kActs: else it does nothing.
template <class Shape, int kLeast, bool kActs>
class Border {
 public:
  __device__ Border(const Place<Shape>& place, int n) : place_(place), n_(n) {}
  // Of x, the lane's own.
  __device__ void ClearRows(float* x) const { Clear(n_ - place_.OwnRow(0), x); }
  __device__ void ClearCols(float* x) const { Clear(n_ - place_.OwnCol(0), x); }

 private:
  __device__ static void Clear(int inside, float* x) {
#pragma unroll
    for (int k = 0; k < Shape::kOwn; ++k) {
      if (kActs && Place<Shape>::Last(k) >= kLeast && k >= inside) x[k] = 0;
    }
  }
  const Place<Shape>& place_;
  const int n_;
};

// Row maxima, in all lanes of a row.
template <class Shape, bool kPadded>
__device__ inline void RowTops(const Task& task, const Place<Shape>& place, const float (&W)[Shape::R][Shape::C],
                               float (&top)[Shape::R]) {
#pragma unroll
  for (int r = 0; r < Shape::R; ++r) {
    top[r] = kPadded ? -FLT_MAX : W[r][0];
#pragma unroll
    for (int c = kPadded ? 0 : 1; c < Shape::C; ++c) {
      if (IsInside<kPadded>(task, place, r, c)) top[r] = fmaxf(top[r], W[r][c]);
    }
  }
  ScatterRows<Shape, Max>(top);
  GatherRows<Shape>(top);
}

// K = exp(W - row maximum) in place of W. False: the range is too wide.
template <class Shape, bool kPadded>
__device__ inline bool PlainStart(const Task& task, const Place<Shape>& place, float (&K)[Shape::R][Shape::C]) {
  const auto inside = [&](int r, int c) { return IsInside<kPadded>(task, place, r, c); };
  float top[Shape::R];
  RowTops<Shape, kPadded>(task, place, K, top);
  constexpr float kLog2E = 1.4426950408889634f;
  float lowest = 0, lowest_top = FLT_MAX;  // The former in units of log 2.
#pragma unroll
  for (int r = 0; r < Shape::R; ++r) {
    if (!kPadded || place.Row(r) < task.n) lowest_top = fminf(lowest_top, top[r]);
    const float shift = -kLog2E * top[r];  // Its rounding scales the row: nothing that u would not undo.
#pragma unroll
    for (int c = 0; c < Shape::C; ++c) {
      const float x = fmaf(kLog2E, K[r][c], shift);
      if (inside(r, c)) lowest = fminf(lowest, x);
      K[r][c] = inside(r, c) ? Exp2(x) : place.Row(r) == place.Col(c) ? 1.0f : 0.0f;
    }
  }
  // All logits within the range of their maximum, and above the floor.
  const bool safe = lowest >= -kLog2E * kPlainRange && lowest_top - kPlainRange > task.floor32;
  return OverMatrix<Shape, Min>(safe ? 1.0f : 0.0f) > 0;
}

// Whether a guard, a least number that sums are divided by, acts on none of them, so that members are solved as without
// it. Two half steps tell: the first sums of rows, which are e^top or more, and those of columns then, which are
// e^(W - top) / n or more of their every entry. All later ones are means of reciprocals of the sums before, n at most.
template <class Shape, bool kPadded>
__device__ inline bool GuardRests(const Task& task, const Place<Shape>& place, const float (&W)[Shape::R][Shape::C]) {
  float top[Shape::R], most[Shape::C];
  RowTops<Shape, kPadded>(task, place, W, top);
#pragma unroll
  for (int c = 0; c < Shape::C; ++c) {
    most[c] = -FLT_MAX;
#pragma unroll
    for (int r = 0; r < Shape::R; ++r) {
      if (IsInside<kPadded>(task, place, r, c)) most[c] = fmaxf(most[c], W[r][c] - top[r]);
    }
  }
  ScatterCols<Shape, Max>(most);
  const float guard = logf(static_cast<float>(task.guard_value)), of_column = guard + logf(static_cast<float>(task.n));
  bool rests = true;
#pragma unroll
  for (int r = 0; r < Shape::R; ++r) rests = rests && ((kPadded && place.Row(r) >= task.n) || top[r] > guard);
#pragma unroll
  for (int k = 0; k < Shape::kOwn; ++k) {
    rests = rests && ((kPadded && place.OwnCol(k) >= task.n) || most[k] > of_column);
  }
  return OverMatrix<Shape, Min>(rests ? 1.0f : 0.0f) > 0;
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_START_CUH_
