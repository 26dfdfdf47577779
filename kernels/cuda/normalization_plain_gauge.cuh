// Iterations of 4 x 4 matrices, each a thread's, in the gauge where that costs least.
//
// P depends on the logits by what no scaling of rows and columns undoes:
//   K_ij = exp(W_ij - W_i0 - W_0j + W_00),
// whose first row and column are ones; the scalings before the first iteration are exp(W_0j - W_00) instead of ones.
// Known up to a factor, u and v begin with the same number: u_i = s_0 / s_i with s = K v. A half step is nine
// multiplications and additions, three additions and seven operations for the quotients: 19 instead of 24.
//
// All of it stays in range if |log K| <= r and |log v / v_0| <= r before the first iteration: sums are of the positive,
// the first term is v_0, so 1 <= s_i / v_0 <= 1 + 3 exp(2 r); and quotients of sums with weights within exp(+-r) of
// each other, s_i / s_0 for one, stay within exp(+-r). Products of two sums are in range since v_0 is small, and what
// they divide since s_2 s_3 / (s_0 v_0) <= exp(r) (1 + 3 exp(2 r)). Matrices beyond, or whose logits may be below the
// recipe's floor, are iterated as they are.
//
// Where no iterates are kept, rows are not divided at all: of u only the direction matters, and 1 / s is that of
//   (s_1 s_2 s_3, s_0 s_2 s_3, s_0 s_1 s_3, s_0 s_1 s_2):
// six multiplications. Columns are, v_j = t_0 / t_j with t = K^T u, three reciprocals and three multiplications: 18
// and 18. With v_0 = 1, s_0 <= 1 + 3 exp(r) and 1 <= s_i <= 1 + 3 exp(2 r), so that u and t are between 1 and some 108
// exp(6 r): 2^250, all that float32 has if they begin at its lower end. K in the registers is c K therefore, c = 2^-42:
// s_1, s_2, s_3 are c times theirs, u_0 c^3 times, u_1, u_2, u_3 (which have s_0) c^2 times, and t_j = u_0 + sum u_i
// (c K_ij) is c^3 times its own.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_GAUGE_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_GAUGE_CUH_

#include "kernels/cuda/normalization_registers.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

constexpr int kGauged = 4;          // The side.
constexpr float kGaugeRange = 28;   // nats: 3 exp(3 r) < 2^126.
constexpr float kFirst = 0x1p-32f;  // u_0 and v_0.
constexpr float kLow = 0x1p-42f;    // c: kLow^3 >= 2^-126, 4 (kLow (1 + 3 exp(2 r)))^3 < 2^126.

template <class Shape>
constexpr bool MayBeGauged = Shape::kLanes == 1 && Shape::kSize == kGauged;

using Square = float[kGauged][kGauged];
using Scalings = float[kGauged];

// K in place of W, but for its first row and column, which nothing reads until GaugeIterate has ended; and the first v.
// kLows: c K, and v_0 is 1. False: nothing has changed.
template <bool kLows>
__device__ inline bool GaugeStart(float floor, Square& W, Scalings& v) {
  constexpr float kLog2E = 1.4426950408889634f, kOfV = kLows ? 1 : kFirst, kOfK = kLows ? kLow : 1;
  float x[kGauged][kGauged], most = 0, least = W[0][0];
#pragma unroll
  for (int c = 1; c < kGauged; ++c) {
    x[0][c] = __fmul_rn(kLog2E, W[0][c] - W[0][0]);
    most = c == 1 ? fabsf(x[0][c]) : fmaxf(most, fabsf(x[0][c]));
  }
#pragma unroll
  for (int r = 1; r < kGauged; ++r) {
    least = fminf(least, W[r][0]);
#pragma unroll
    for (int c = 1; c < kGauged; ++c) {
      x[r][c] = fmaf(kLog2E, W[r][c] - W[r][0], -x[0][c]);
      most = fmaxf(most, fabsf(x[r][c]));
    }
  }
  if (!(most <= kLog2E * kGaugeRange && least - 2 * kGaugeRange > floor)) return false;
  v[0] = kOfV;
#pragma unroll
  for (int c = 1; c < kGauged; ++c) v[c] = kOfV * Exp2(x[0][c]);
#pragma unroll
  for (int r = 1; r < kGauged; ++r) {
#pragma unroll
    for (int c = 1; c < kGauged; ++c) W[r][c] = kOfK * Exp2(x[r][c]);
  }
  return true;
}

// K x, or K^T x of `columns`, but for the first.
template <bool columns>
__device__ inline void GaugeTimes(const Square& K, const Scalings& x, Scalings& sums) {
#pragma unroll
  for (int k = 1; k < kGauged; ++k) {
    sums[k] = x[0];
#pragma unroll
    for (int l = 1; l < kGauged; ++l) sums[k] = fmaf(columns ? K[l][k] : K[k][l], x[l], sums[k]);
  }
}
__device__ inline float GaugeSum(const Scalings& x) { return ((x[0] + x[1]) + x[2]) + x[3]; }
// u from v, or v from u: kFirst s_0 / s_i. s: all but the first.
__device__ inline void GaugeStep(const Scalings& s, const Scalings& from, Scalings& to) {
  const float first = fmaf(kFirst, from[3], fmaf(kFirst, from[2], fmaf(kFirst, from[1], kFirst * kFirst)));
  const float pair = __fmul_rn(first, Reciprocal(s[2] * s[3]));
  to[0] = kFirst;
  to[1] = __fmul_rn(first, Reciprocal(s[1]));
  to[2] = __fmul_rn(pair, s[3]);
  to[3] = __fmul_rn(pair, s[2]);
}

// All iterations from v. put(t, v): the scalings after t of them, up to a factor. K, u and v become such that
// P_ij = u_i K_ij v_j, with all of K, and q = K^T u.
template <int kTogether, class Put>
__device__ inline void GaugeIterate(int iterations, Square& K, Scalings& u, Scalings& v, Scalings& q, Put put) {
  put(0, v);
#pragma unroll kTogether
  for (int t = 1; t <= iterations; ++t) {
    float s[kGauged];
    GaugeTimes<false>(K, v, s);
    GaugeStep(s, v, u);
    GaugeTimes<true>(K, u, q);
    GaugeStep(q, u, v);
    put(t, v);
  }
  q[0] = GaugeSum(u);
  Reciprocals<kGauged>(q, v);
#pragma unroll
  for (int k = 0; k < kGauged; ++k) K[0][k] = K[k][0] = 1;
}

// The same of c K without a trace: P in its place, its sums in s and q. Roundings are spelled out: all instances have
// the same.
template <int kTogether>
__device__ inline void GaugePlan(int iterations, Square& K, Scalings& v, Scalings& s, Scalings& q) {
  float u[kGauged];
  const auto iterate = [&] {
#pragma unroll
    for (int r = 1; r < kGauged; ++r) s[r] = fmaf(K[r][3], v[3], fmaf(K[r][2], v[2], fmaf(K[r][1], v[1], kLow)));
    s[0] = ((1 + v[1]) + v[2]) + v[3];
    const float a = __fmul_rn(s[0], s[1]), b = __fmul_rn(s[2], s[3]);
    u[0] = __fmul_rn(s[1], b);
    u[1] = __fmul_rn(s[0], b);
    u[2] = __fmul_rn(s[3], a);
    u[3] = __fmul_rn(s[2], a);
#pragma unroll
    for (int c = 1; c < kGauged; ++c) q[c] = fmaf(K[3][c], u[3], fmaf(K[2][c], u[2], fmaf(K[1][c], u[1], u[0])));
    q[0] = fmaf(kLow, u[3], fmaf(kLow, u[2], fmaf(kLow, u[1], u[0])));
  };
  iterate();
#pragma unroll kTogether
  for (int t = 2; t <= iterations; ++t) {
#pragma unroll
    for (int c = 1; c < kGauged; ++c) v[c] = __fmul_rn(q[0], Reciprocal(q[c]));
    iterate();
  }
  // u_i v_j first: it is P_ij / (c K_ij), or c times that; no product of u and K is in range for certain.
#pragma unroll
  for (int c = 0; c < kGauged; ++c) v[c] = Reciprocal(q[c]);
#pragma unroll
  for (int r = 0; r < kGauged; ++r) {
#pragma unroll
    for (int c = 0; c < kGauged; ++c) {
      const float scaling = __fmul_rn(u[r], v[c]);
      K[r][c] = r == 0 ? scaling : __fmul_rn(scaling, c == 0 ? kLow : K[r][c]);
      s[r] = c == 0 ? K[r][c] : __fadd_rn(s[r], K[r][c]);
    }
  }
#pragma unroll
  for (int c = 0; c < kGauged; ++c) q[c] = __fmul_rn(q[c], v[c]);
}

// dL/dW in place of dL/dP u_i v_j in G. Bars: of log u and log v, of the last iteration; col_bar is used up. get(t, v):
// what `put` was given.
template <class Get>
__device__ inline void GaugeReverse(const Square& K, int iterations, const Scalings& last_row_bar, Scalings& col_bar,
                                    Square& G, Get get) {
  float v[kGauged], before[kGauged], row_bar[kGauged];
#pragma unroll
  for (int k = 0; k < kGauged; ++k) row_bar[k] = last_row_bar[k];
  get(iterations, v);
  float first = kFirst * col_bar[0];  // times v_0
#pragma unroll 5
  for (int t = iterations; t >= 1; --t) {
    float s[kGauged], u[kGauged], scaled[kGauged], x[kGauged], y[kGauged], q[kGauged];
    get(t - 1, before);
    // Rows: u, with u_i K_ij before_j summing up to 1. Columns: `scaled`, with scaled_i K_ij v_j.
    GaugeTimes<false>(K, before, s);
    s[0] = GaugeSum(before);
    Reciprocals<kGauged>(s, u);
    const float factor = Reciprocal(kFirst * GaugeSum(u));
#pragma unroll
    for (int k = 0; k < kGauged; ++k) {
      scaled[k] = __fmul_rn(factor, u[k]);
      y[k] = k == 0 ? first : __fmul_rn(col_bar[k], v[k]);
    }
    GaugeTimes<false>(K, y, s);
    s[0] = GaugeSum(y);
#pragma unroll
    for (int k = 0; k < kGauged; ++k) {
      x[k] = __fmul_rn(fmaf(-scaled[k], s[k], row_bar[k]), u[k]);
      row_bar[k] = 0;
    }
    GaugeTimes<true>(K, x, q);
    first = -kFirst * kFirst * GaugeSum(x);
#pragma unroll
    for (int k = 0; k < kGauged; ++k) {
      if (k > 0) col_bar[k] = -__fmul_rn(before[k], q[k]);
      v[k] = before[k];
    }
#pragma unroll
    for (int r = 1; r < kGauged; ++r) {
#pragma unroll
      for (int c = 1; c < kGauged; ++c) G[r][c] = fmaf(-scaled[r], y[c], fmaf(-x[r], v[c], G[r][c]));
    }
  }
  // From log K, and from the first v, to the logits.
#pragma unroll
  for (int c = 1; c < kGauged; ++c) G[0][c] = col_bar[c];
  G[0][0] = -((col_bar[1] + col_bar[2]) + col_bar[3]);
#pragma unroll
  for (int r = 1; r < kGauged; ++r) {
    float sum = 0;
#pragma unroll
    for (int c = 1; c < kGauged; ++c) {
      G[r][c] = __fmul_rn(G[r][c], K[r][c]);
      G[0][c] -= G[r][c];
      sum += G[r][c];
    }
    G[r][0] = -sum;
    G[0][0] += sum;
  }
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_GAUGE_CUH_
