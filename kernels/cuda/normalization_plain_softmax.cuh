// The plain kernel's steps for recipes that begin with a softmax of rows and add a guard to every sum (DEEPSEEK).
//
// K = softmax + offset, which is no less than e^-kPlainRange. e: the guard. A half step is u <- u / (u K v + e); with
// a = 1 / u and b = 1 / v
//   a_t = K v_(t-1) + e a_(t-1),  b_t = K^T u_t + e b_(t-1),  a_1 = b_0 = 1 (the softmax is the first rows' step).
// Backward, x and y the adjoints of a and b but for their sign, from x = u_T row(dP * P) and y = v_T column(dP * P):
//   x_t = e x_(t+1) - u_t^2 K y_t,  y_(t-1) = e y_t - v_(t-1)^2 K^T x_t,
//   dL/dK = dP u v - sum_t (u_t y_t^T + x_t v_(t-1)^T), with x_1 = 0.
//
// No sum of a row of P is below 1 / n, nearly, once columns are divided: they summed up to n at most, the rows to 1. So
// a_(t-1) <= n K v_(t-1), and a_t = K v_(t-1) + e K v_(t-2) but for (n e)^2 of it: u can be made again from v alone.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_SOFTMAX_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_SOFTMAX_CUH_

#include <cstring>
#include <type_traits>

#include "kernels/cuda/normalization_plain_start.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

// e^(W - row maximum) in place of W and 1 / its row sums in all lanes of a row. 0 in columns outside and, kUnit, in
// rows outside.
template <class Shape, bool kPadded, bool kUnit>
__device__ inline void Softmax(const Task& task, const Place<Shape>& place, float (&W)[Shape::R][Shape::C],
                               float (&scale)[Shape::R]) {
  constexpr float kLog2E = 1.4426950408889634f;
  float top[Shape::R];
  RowTops<Shape, kUnit>(task, place, W, top);
#pragma unroll
  for (int r = 0; r < Shape::R; ++r) {
#pragma unroll
    for (int c = 0; c < Shape::C; ++c) {
      const float e = Exp2(kLog2E * (W[r][c] - top[r]));
      const bool inside = kUnit ? IsInside<kPadded>(task, place, r, c) : !kPadded || place.Col(c) < task.n;
      W[r][c] = inside ? e : 0.0f;
      scale[r] = c == 0 ? W[r][c] : scale[r] + W[r][c];
    }
  }
  ScatterRows<Shape>(scale);
#pragma unroll
  for (int k = 0; k < Shape::kOwn; ++k) {
    scale[k] = Reciprocal(kUnit && place.OwnRow(k) >= task.n ? 1.0f : scale[k]);
  }
  GatherRows<Shape>(scale);
}

// K in place of W. Its range is the offset's. kUnit: the unit matrix outside; else what has scalings of 0.
template <class Shape, bool kPadded, bool kUnit>
__device__ inline void SoftmaxStart(const Task& task, const Place<Shape>& place, float (&K)[Shape::R][Shape::C]) {
  float scale[Shape::R];
  Softmax<Shape, kPadded, kUnit>(task, place, K, scale);
  const float offset = static_cast<float>(task.offset);
#pragma unroll
  for (int r = 0; r < Shape::R; ++r) {
#pragma unroll
    for (int c = 0; c < Shape::C; ++c) {
      const bool inside = !kUnit || IsInside<kPadded>(task, place, r, c);
      K[r][c] = inside ? fmaf(K[r][c], scale[r], offset) : place.Row(r) == place.Col(c) ? 1.0f : 0.0f;
    }
  }
}

// K of either kind of recipe. False: the range is too wide.
template <class Shape, bool kPadded, bool kUnit, bool kSoftmax>
__device__ inline bool StartOf(const Task& task, const Place<Shape>& place, float (&K)[Shape::R][Shape::C]) {
  if constexpr (kSoftmax) {
    SoftmaxStart<Shape, kPadded, kUnit>(task, place, K);
    return true;
  } else {
    return PlainStart<Shape, kUnit>(task, place, K);
  }
}

// u and v after all iterations, in all lanes of a row or column, and q = K^T u, the lane's own. put(t, u, v): what the
// lane owns after t of them.
template <class Shape, int kLeast, bool kActs, class Put>
__device__ inline void SoftmaxIterate(const float (&K)[Shape::R][Shape::C], const Border<Shape, kLeast, kActs>& border,
                                      float guard, int iterations, float (&u)[Shape::R], float (&v)[Shape::C],
                                      float (&q)[Shape::C], Put put) {
  constexpr int R = Shape::R, C = Shape::C, kOwn = Shape::kOwn;
  float a[kOwn], b[kOwn];
#pragma unroll
  for (int k = 0; k < kOwn; ++k) a[k] = b[k] = 1;
#pragma unroll
  for (int r = 0; r < R; ++r) u[r] = 1;
#pragma unroll
  for (int c = 0; c < C; ++c) v[c] = 1;
  put(0, u, v);
  border.ClearRows(u);
  if constexpr (kActs) GatherRows<Shape>(u);
  const auto columns = [&](int t) {
    TimesCols<R, C>(K, u, q);
    ScatterCols<Shape>(q);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) b[k] = fmaf(guard, b[k], q[k]);
    Reciprocals<kOwn>(b, v);
    border.ClearCols(v);
    put(t, u, v);
    GatherCols<Shape>(v);
  };
  columns(1);
#pragma unroll(Shape::kLanes == 1 ? 4 : Shape::kSize == 28 ? 1 : 2)
  for (int t = 2; t <= iterations; ++t) {
    float s[R];
    TimesRows<R, C>(K, v, s);
    ScatterRows<Shape>(s);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) a[k] = fmaf(guard, a[k], s[k]);
    Reciprocals<kOwn>(a, u);
    border.ClearRows(u);
    GatherRows<Shape>(u);
    columns(t);
  }
}

// The iterations backward. u, v: of the last. row_bar, col_bar: sums of dP * P, the lane's own. add: as ReversePlain's.
template <class Shape, int kLeast, bool kActs, class Memory, class Add>
__device__ inline void SoftmaxReverse(const float (&K)[Shape::R][Shape::C], const Border<Shape, kLeast, kActs>& border,
                                      float guard, const Memory& history, int iterations, float (&u)[Shape::R],
                                      float (&v)[Shape::C], const float (&row_bar)[Shape::R],
                                      const float (&col_bar)[Shape::C], Add add) {
  constexpr int R = Shape::R, C = Shape::C, kOwn = Shape::kOwn;
  constexpr bool kRemade = !Memory::kHasU;  // u is.
  float x[R], y[C], left[kOwn], before[C], sums[R];
#pragma unroll
  for (int k = 0; k < kOwn; ++k) {
    left[k] = row_bar[k] * u[k];  // Of x, from the iteration behind.
    y[k] = col_bar[k] * v[k];
  }
  const auto rewind = [&](int t) {  // `before`: v_t; `sums`: K v_t, the lane's own, and of t = 0 a_1.
    history.GetV(t, before);
    GatherCols<Shape>(before);
    if (t > 0) {
      TimesRows<R, C>(K, before, sums);
      ScatterRows<Shape>(sums);
    } else {
#pragma unroll
      for (int k = 0; k < kOwn; ++k) sums[k] = 1;
    }
  };
  if constexpr (kRemade) rewind(iterations - 1);
#pragma unroll(Shape::kLanes == 1 ? 4 : 1)
  for (int t = iterations; t > 1; --t) {
    float s[R], q[C];
    GatherCols<Shape>(y);
    if constexpr (kRemade) {
#pragma unroll
      for (int c = 0; c < C; ++c) v[c] = before[c];
      float a[kOwn];
#pragma unroll
      for (int k = 0; k < kOwn; ++k) a[k] = sums[k];
      rewind(t - 2);
#pragma unroll
      for (int k = 0; k < kOwn; ++k) a[k] = fmaf(guard, sums[k], a[k]);
      Reciprocals<kOwn>(a, u);
      border.ClearRows(u);
    } else {
      history.GetU(t, u);
      history.GetV(t - 1, v);
      GatherCols<Shape>(v);
    }
    TimesRows<R, C>(K, y, s);
    ScatterRows<Shape>(s);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      x[k] = fmaf(-u[k] * u[k], s[k], left[k]);
      left[k] = guard * x[k];
    }
    GatherRows<Shape>(u);
    GatherRows<Shape>(x);
    TimesCols<R, C>(K, x, q);
    ScatterCols<Shape>(q);
    add(t, u, x, v, y);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) y[k] = fmaf(-v[k] * v[k], q[k], guard * y[k]);
  }
  // The first rows' step is the softmax.
#pragma unroll
  for (int r = 0; r < R; ++r) u[r] = 1, x[r] = 0;
  GatherCols<Shape>(y);
  add(1, u, x, v, y);
}

// dL/dK from that or, kOfLog, dL/dlog K, where it matters: the softmax s is not 0.
template <bool kOfLog>
__device__ inline float OfSoftmax(float g, float s, float offset) {
  return !(s > 0) ? 0.0f : kOfLog ? g * Reciprocal(s + offset) : g;
}
// dL/dW in place of dL/dK or, kOfLog, dL/dlog K in G, of tiles in registers. W is used up. infinite: as
// ReviseToImplicit's.
template <class Shape, bool kPadded, bool kOfLog>
__device__ inline void SoftmaxChain(const Task& task, const Place<Shape>& place, float (&W)[Shape::R][Shape::C],
                                    float (&G)[Shape::R][Shape::C], float* infinite) {
  float scale[Shape::R], total[Shape::R];
  Softmax<Shape, kPadded, kPadded>(task, place, W, scale);
  const float offset = static_cast<float>(task.offset);
#pragma unroll
  for (int r = 0; r < Shape::R; ++r) {
    total[r] = 0;
#pragma unroll
    for (int c = 0; c < Shape::C; ++c) {
      W[r][c] *= scale[r];
      if (kOfLog) G[r][c] = OfSoftmax<true>(G[r][c], W[r][c], offset);
      total[r] = fmaf(W[r][c], G[r][c], total[r]);
    }
  }
  ScatterRows<Shape>(total);
  GatherRows<Shape>(total);
#pragma unroll
  for (int r = 0; r < Shape::R; ++r) {
#pragma unroll
    for (int c = 0; c < Shape::C; ++c) {
      G[r][c] = W[r][c] * (G[r][c] - total[r]);
      *infinite = fmaf(G[r][c], 0.0f, *infinite);
    }
  }
}

// Over the 8 lanes of a row.
template <class Op>
__device__ inline float OverEight(float x) {
#pragma unroll
  for (int mask = 4; mask >= 1; mask /= 2) x = Op::Of(x, __shfl_xor_sync(kFullMask, x, mask));
  return x;
}
// The same of a matrix that fills a warp's registers, in its buffer: four rows at a time, two quads of each a lane's,
// in few instructions, which each warp executes for the first time.
template <class Shape, bool kShort, bool kOfLog>
__device__ inline void SoftmaxChainRows(const Task& task, int lane, int n, int64_t member, float* buffer,
                                        float* infinite) {
  static_assert(Shape::kMembers == 1 && Shape::kSize == 64, "a row is two quads of each of eight lanes");
  constexpr int kPer = 8;
  constexpr float kLog2E = 1.4426950408889634f;
  const int group = lane / 8;
  const float offset = static_cast<float>(task.offset);
  const auto column = [&](int k) { return 4 * (lane % 8) + 32 * (k / 4) + k % 4; };
  using Raw = std::conditional_t<kShort, uint16_t, float>;  // Four of them are loaded at once, if they may be.
  using Raws = std::conditional_t<kShort, uint2, float4>;
  const auto load = [&](int row, Raws(&x)[kPer / 4]) {
    const Raw* const from = static_cast<const Raw*>(task.logits.data) + (member * n + row) * n;
#pragma unroll
    for (int k = 0; k < kPer; k += 4) {
      if (row >= n || column(k) >= n) continue;
      if (n % 4 == 0) {
        x[k / 4] = *reinterpret_cast<const Raws*>(from + column(k));
      } else {
        Raw four[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) four[e] = from[min(column(k + e), n - 1)];
        memcpy(&x[k / 4], four, sizeof(Raws));
      }
    }
  };
  Raws next[kPer / 4] = {};  // On their way.
  load(group, next);
#pragma unroll 1
  for (int begin = 0; begin < n; begin += 4) {
    const int row = begin + group;
    const auto inside = [&](int k) { return row < n && column(k) < n; };
    float x[kPer], g[kPer], top = -FLT_MAX, sum = 0, total = 0;
    if constexpr (kShort) {
      Unpack(task.logits.dtype, make_uint4(next[0].x, next[0].y, next[1].x, next[1].y), x);
    } else {
      memcpy(x, next, sizeof(x));
    }
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      if (inside(k)) top = fmaxf(top, x[k]);
    }
    if (begin + 4 < n) load(row + 4, next);
    top = OverEight<Max>(top);
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      x[k] = inside(k) ? Exp2(kLog2E * (x[k] - top)) : 0.0f;
      sum += x[k];
    }
    const float scale = Reciprocal(fmaxf(OverEight<Sum>(sum), kSmallest));
#pragma unroll
    for (int k = 0; k < kPer; k += 4) {
      const float4 y = *reinterpret_cast<const float4*>(buffer + Stage<Shape>::At(0, row, column(k)));
      g[k] = y.x, g[k + 1] = y.y, g[k + 2] = y.z, g[k + 3] = y.w;
    }
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      x[k] *= scale;
      g[k] = OfSoftmax<kOfLog>(g[k], x[k], offset);
      total = fmaf(x[k], g[k], total);
    }
    total = OverEight<Sum>(total);
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      g[k] = x[k] * (g[k] - total);
      *infinite = fmaf(g[k], 0.0f, *infinite);
    }
#pragma unroll
    for (int k = 0; k < kPer; k += 4) {
      float4* const to = reinterpret_cast<float4*>(buffer + Stage<Shape>::At(0, row, column(k)));
      *to = make_float4(g[k], g[k + 1], g[k + 2], g[k + 3]);
    }
  }
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_SOFTMAX_CUH_
