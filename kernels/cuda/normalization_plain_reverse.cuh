// The plain kernel's half step of rows, and the reverse of its iterations.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_REVERSE_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_REVERSE_CUH_

#include "kernels/cuda/normalization_plain_start.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

// u, the lane's own rows of it, from v.
template <class Shape, int kLeast, bool kActs>
__device__ inline void RowStep(const float (&K)[Shape::R][Shape::C], const float (&v)[Shape::C],
                               const Border<Shape, kLeast, kActs>& border, float (&u)[Shape::R]) {
  float s[Shape::R];
  TimesRows<Shape::R, Shape::C>(K, v, s);
  ScatterRows<Shape>(s);
  Reciprocals<Shape::kOwn>(s, u);
  border.ClearRows(u);
}

// A lane's adjoints of log K but for the factor K. Rows that registers have no room for stay in the buffer, in the
// lane's own places.
template <class Shape, class Way>
class Adjoints {
 public:
  static constexpr int R = Shape::R, C = Shape::C, kKept = Shape::kSize > 32 ? 0 : R;

  // From dL/dP in the buffer.
  __device__ Adjoints(const Place<Shape>& place, bool transposed, int lane, int n, int64_t first, int count,
                      float* buffer)
      : place_(place), transposed_(transposed), buffer_(buffer) {
    if constexpr (kKept == R) {
      Way::Read(place, transposed, lane, n, first, count, buffer, kept_);
    } else {
      Stage<Shape>::ForTile(place, transposed, [&](int r, int c, int at) {
        if (r < kKept) kept_[r][c] = buffer[at];
      });
    }
  }
  // x = body(r, c, x) for all entries, row by row.
  template <class Body>
  __device__ void ForEach(Body body) {
#pragma unroll
    for (int r = 0; r < kKept; ++r) {
#pragma unroll
      for (int c = 0; c < C; ++c) kept_[r][c] = body(r, c, kept_[r][c]);
    }
    if constexpr (kKept == R) return;
    if (transposed_) {
      Stage<Shape>::ForTile(place_, true, [&](int r, int c, int at) {
        if (r >= kKept) buffer_[at] = body(r, c, buffer_[at]);
      });
      return;
    }
    Stage<Shape>::template ForRuns<2>(place_, [&](int r, int c, int at) {
      if (r < kKept) return;
      float2* const pair = reinterpret_cast<float2*>(buffer_ + at);
      float2 x = *pair;
      x.x = body(r, c, x.x);
      x.y = body(r, c + 1, x.y);
      *pair = x;
    });
  }
  // All of it, where registers have room.
  __device__ float (&Kept())[R][C] {
    static_assert(kKept == R, "some is in the buffer");
    return kept_;
  }
  // To `buffer`, all of it; where some is in the buffer that it came in, that is the one.
  __device__ void Write(int lane, int n, int64_t first, int count, float* buffer) {
    if constexpr (kKept == R) {
      Way::WriteEach(place_, transposed_, lane, n, first, count, buffer, [&](int r, int c) { return kept_[r][c]; });
    } else {
      Stage<Shape>::ForTile(place_, transposed_, [&](int r, int c, int at) {
        if (r < kKept) buffer_[at] = kept_[r][c];
      });
    }
  }

 private:
  const Place<Shape>& place_;
  const bool transposed_;
  float* const buffer_;
  float kept_[kKept > 0 ? kKept : 1][C];
};

// The adjoints of the last step, in place of the cotangents. row_bar, col_bar: of what the lane owns. Roundings are
// spelled out: all instances have the same.
template <class Shape, bool kPadded, class Way>
__device__ inline void LastAdjoints(const Place<Shape>& place, int n, const float (&K)[Shape::R][Shape::C],
                                    const float (&u)[Shape::R], const float (&v)[Shape::C], Adjoints<Shape, Way>* G,
                                    float (&row_bar)[Shape::R], float (&col_bar)[Shape::C]) {
  G->ForEach([&](int r, int c, float cotangent) {
    const bool inside = !kPadded || Shape::kSize > 32 || (place.Row(r) < n && place.Col(c) < n);
    const float g = inside ? __fmul_rn(cotangent, __fmul_rn(u[r], v[c])) : 0.0f, bar = __fmul_rn(g, K[r][c]);
    row_bar[r] = c == 0 ? bar : row_bar[r] + bar;
    col_bar[c] = r == 0 ? bar : col_bar[c] + bar;
    return g;
  });
  ScatterRows<Shape>(row_bar);
  ScatterCols<Shape>(col_bar);
}

// The iterations backward. u, v: of the last iteration. add(t, u, x, v, y): G loses u_t y_t^T + x_t v_(t-1)^T; of each
// the first kOwn are the lane's own.
template <class Shape, int kLeast, bool kActs, class Memory, class Add>
__device__ inline void ReversePlain(const float (&K)[Shape::R][Shape::C], const Border<Shape, kLeast, kActs>& border,
                                    const Memory& history, int iterations, float (&u)[Shape::R], float (&v)[Shape::C],
                                    float (&row_bar)[Shape::R], float (&col_bar)[Shape::C], Add add) {
  constexpr int R = Shape::R, C = Shape::C, kOwn = Shape::kOwn;
  float v_own[kOwn];
#pragma unroll
  for (int k = 0; k < kOwn; ++k) v_own[k] = v[k];
#pragma unroll Shape::kLanes == 1 ? 2 : 1
  for (int t = iterations; t >= 1; --t) {
    float x[R], y[C], s[R], q[C];
#pragma unroll
    for (int k = 0; k < kOwn; ++k) y[k] = col_bar[k] * v_own[k];
    if constexpr (Memory::kHasU) history.GetU(t, u);
    history.GetV(t - 1, v);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) v_own[k] = v[k];
    GatherCols<Shape>(y);
    GatherCols<Shape>(v);
    if constexpr (!Memory::kHasU) RowStep<Shape>(K, v, border, u);
    GatherRows<Shape>(u);
    TimesRows<R, C>(K, y, s);
    ScatterRows<Shape>(s);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      x[k] = __fmul_rn(fmaf(-u[k], s[k], row_bar[k]), u[k]);
      row_bar[k] = 0;
    }
    GatherRows<Shape>(x);
    TimesCols<R, C>(K, x, q);
    ScatterCols<Shape>(q);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) col_bar[k] = -v_own[k] * q[k];
    add(t, u, x, v, y);
  }
}

// G of all iterations at once. vectors: their x and y.
template <class Shape, class Memory>
__device__ inline void AddIterations(const Memory& history, const Memory& vectors, int iterations,
                                     float (&G)[Shape::R][Shape::C]) {
  constexpr int R = Shape::R, C = Shape::C, kOwn = Shape::kOwn;
  float next_x[R], next_y[C];  // On their way.
  vectors.GetU(iterations, next_x);
  vectors.GetV(iterations, next_y);
#pragma unroll 1
  for (int t = iterations; t >= 1; --t) {
    float u[R], x[R], v[C], y[C];
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      x[k] = next_x[k];
      y[k] = next_y[k];
    }
    history.GetU(t, u);
    history.GetV(t - 1, v);
    if (t > 1) {
      vectors.GetU(t - 1, next_x);
      vectors.GetV(t - 1, next_y);
    }
    GatherRows<Shape>(u);
    GatherRows<Shape>(x);
    GatherCols<Shape>(v);
    GatherCols<Shape>(y);
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int c = 0; c < C; ++c) G[r][c] = fmaf(-u[r], y[c], fmaf(-x[r], v[c], G[r][c]));
    }
  }
}

// Puts x in the place of y, which it returns.
__device__ inline float Exchanged(float* y, float x) {
  const float old = *y;
  *y = x;
  return old;
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_REVERSE_CUH_
