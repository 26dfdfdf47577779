// The implicit backward modes' linear system, but FULL's, for matrices in tiles: P, alpha and beta in registers.
// Formulas as in normalization_implicit.cuh.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_TILES_IMPLICIT_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_TILES_IMPLICIT_CUH_

#include "kernels/cuda/normalization_tile.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

// What the system is solved with. float32: of matrices that registers have no room for otherwise, as far as they are
// well-conditioned.
template <class T>
struct Solving;
template <>
struct Solving<double> {
  static constexpr double kSolved = 1e-9;  // Of the residual's norm: a sixtieth of what P's float32 rounds off.
  static constexpr double kLeastCurvature = 0;
  static constexpr double kVanishing = 1e-290;  // Sums below have no reciprocal.
};
template <>
struct Solving<float> {
  static constexpr float kSolved = 1e-7f;
  static constexpr float kLeastCurvature = 0.1f;  // Of a direction, in units of the diagonal's.
  static constexpr float kVanishing = 1e-37f;
};

template <int kOwn, class T>
__device__ inline T Dot(const T* a, const T* b) {
  T sum = 0;
#pragma unroll
  for (int k = 0; k < kOwn; ++k) sum = fma(a[k], b[k], sum);
  return sum;
}

// Sums over all lanes of a matrix, at the price of one and a half.
template <class Shape, class T>
__device__ inline void OverMatrixTwo(T* a, T* b) {
  if constexpr (Shape::kLanes > 1) {
    const bool upper = (threadIdx.x & Shape::kLanes / 2) != 0;
    T mine = upper ? *b : *a;
    mine += __shfl_xor_sync(kFullMask, upper ? *a : *b, Shape::kLanes / 2);
#pragma unroll
    for (int mask = Shape::kLanes / 4; mask >= 1; mask /= 2) mine += __shfl_xor_sync(kFullMask, mine, mask);
    const T other = __shfl_xor_sync(kFullMask, mine, Shape::kLanes / 2);
    *a = upper ? other : mine;
    *b = upper ? mine : other;
  }
}

// (diag(d) - P^T diag(1/r) P) x = b for all matrices of the warp, by conjugate gradients preconditioned by diag(d),
// unless d is 1 but for roundings (kOnes). x, b (used up) and diagonal: the lane's own columns; inverse: 1/r of its own
// rows. Padding is 0. False, to all lanes of a matrix: too ill-conditioned.
template <class Shape, bool kOnes, class T>
__device__ inline bool SolveTiles(const T (&P)[Shape::R][Shape::C], const T* inverse, const T* diagonal, T* residual,
                                  int steps, T* x) {
  using Limits = Solving<T>;
  constexpr int R = Shape::R, C = Shape::C, kOwn = Shape::kOwn;
  T inverted[kOwn], direction[kOwn], ones = 0, total = 0;
#pragma unroll
  for (int k = 0; k < kOwn; ++k) {
    inverted[k] = kOnes ? 1 : diagonal[k] > Limits::kVanishing ? 1 / diagonal[k] : 0;
    x[k] = 0;
    ones += diagonal[k];
    total += residual[k];
  }
  OverMatrixTwo<Shape>(&ones, &total);
  const T inverse_sum = 1 / ones;
  // The part along the null vector is taken off.
  const auto project = [&](T sum, T* y) {
    const T share = sum * inverse_sum;
#pragma unroll
    for (int k = 0; k < kOwn; ++k) y[k] = fma(-share, diagonal[k], y[k]);
  };
  const auto norm_of = [&] {
    T sum = 0;
#pragma unroll
    for (int k = 0; k < kOwn; ++k) sum = fma(residual[k] * residual[k], inverted[k], sum);
    return OverMatrix<Shape, Sum>(sum);
  };
  project(total, residual);
  T norm = norm_of();
  const T goal = norm * (Limits::kSolved * Limits::kSolved);
  bool good = true;
#pragma unroll
  for (int k = 0; k < kOwn; ++k) direction[k] = residual[k] * inverted[k];
#pragma unroll 1
  for (int step = 0; step < steps && __any_sync(kFullMask, norm > goal); ++step) {
    T t[R], q[C];
    {
      T p[C];
#pragma unroll
      for (int k = 0; k < kOwn; ++k) p[k] = direction[k];
      GatherCols<Shape>(p);
      TimesRows<R, C>(P, p, t);
    }
    ScatterRows<Shape>(t);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) t[k] *= inverse[k];
    GatherRows<Shape>(t);
    TimesCols<R, C>(P, t, q);
    ScatterCols<Shape>(q);
    T sum = 0;
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      q[k] = fma(diagonal[k], direction[k], -q[k]);
      sum += q[k];
    }
    // What is taken off q does not count: `direction`, times the diagonal, has no part along the null vector.
    T curvature = Dot<kOwn>(direction, q);
    OverMatrixTwo<Shape>(&curvature, &sum);
    project(sum, q);
    const bool moves = norm > goal && curvature != 0;  // Matrices that are done stand still.
    if constexpr (Limits::kLeastCurvature > 0) {
      T scale = 0;
#pragma unroll
      for (int k = 0; k < kOwn; ++k) scale = fma(direction[k] * direction[k], diagonal[k], scale);
      scale = OverMatrix<Shape, Sum>(scale);
      if (norm > goal && !(curvature > Limits::kLeastCurvature * scale)) good = false;
    }
    const T length = moves ? norm / curvature : 0;
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      x[k] = fma(length, direction[k], x[k]);
      residual[k] = fma(-length, q[k], residual[k]);
    }
    const T next = norm_of(), turn = moves ? next / norm : 0;
    norm = moves ? next : 0;
#pragma unroll
    for (int k = 0; k < kOwn; ++k) direction[k] = fma(turn, direction[k], residual[k] * inverted[k]);
  }
  return good && norm <= goal;
}

// 1 / x to a rounding or two, x far from the ends of the range.
__device__ inline double InverseOf(double x) {
  double y = FastReciprocal(x);
#pragma unroll
  for (int k = 0; k < 2; ++k) y = fma(y, fma(-x, y, 1.0), y);
  return y;
}

// The same system where a lane has the whole matrix, by elimination, with x_0 = 0, as the null vector allows. Nothing
// cancels: entries beside the diagonal are <= 0 and stay so, and the diagonal is what makes lines sum up to 0.
template <int R, int C>
__device__ inline void SolveAlone(const double (&P)[R][C], const double* inverse, const double* diagonal,
                                  double* residual, double* x) {
  constexpr double kOpen = 1e-13;    // Pivots below, of the diagonal: parts of the plan that nothing connects.
  double beside[C][C], inverted[C];  // Of each column from 1 on: minus the entries of those before it, all >= 0.
#pragma unroll
  for (int c = 1; c < C; ++c) {
    double shares[R];
#pragma unroll
    for (int r = 0; r < R; ++r) shares[r] = P[r][c] * inverse[r];
#pragma unroll
    for (int k = 0; k < c; ++k) {
      beside[c][k] = 0;
#pragma unroll
      for (int r = 0; r < R; ++r) beside[c][k] = fma(shares[r], P[r][k], beside[c][k]);
    }
  }
  // The last column first.
#pragma unroll
  for (int c = C - 1; c >= 1; --c) {
    double pivot = beside[c][0];
#pragma unroll
    for (int k = 1; k < c; ++k) pivot += beside[c][k];
    inverted[c] = pivot > kOpen * diagonal[c] ? InverseOf(pivot) : 0;
#pragma unroll
    for (int k = 1; k < c; ++k) {
      const double share = beside[c][k] * inverted[c];
      residual[k] = fma(share, residual[c], residual[k]);
#pragma unroll
      for (int l = 0; l < k; ++l) beside[k][l] = fma(share, beside[c][l], beside[k][l]);
    }
  }
  x[0] = 0;
#pragma unroll
  for (int c = 1; c < C; ++c) {
    double sum = residual[c];
#pragma unroll
    for (int k = 1; k < c; ++k) sum = fma(beside[c][k], x[k], sum);
    x[c] = sum * inverted[c];
  }
}

// alpha and beta of dL/d log K = (dP - alpha_i - beta_j) P, n x m matrices. `unit`: IMPLICIT_UNIT. visit(body) calls
// body(r, c, dP) once, in the order of the columns of each row and of the rows of each column; dP and P are 0 outside
// the matrices. False, to all lanes of a matrix: too ill-conditioned.
template <class Shape, bool kOnes, class T, class Visit>
__device__ inline bool ImplicitMultipliers(const Place<Shape>& place, const T (&P)[Shape::R][Shape::C], int n, int m,
                                           bool unit, Visit visit, T (&alpha)[Shape::R], T (&beta)[Shape::C]) {
  constexpr int R = Shape::R, C = Shape::C, kOwn = Shape::kOwn;
  T inverse[kOwn], diagonal[kOwn], side[kOwn], residual[kOwn];
  {
    T sums[C];
#pragma unroll
    for (int c = 0; c < C; ++c) {
      sums[c] = P[0][c];
#pragma unroll
      for (int r = 1; r < R; ++r) sums[c] += P[r][c];
    }
    ScatterCols<Shape>(sums);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) diagonal[k] = place.OwnCol(k) >= m ? 0 : unit ? 1 : sums[k];
  }
  {
    T sums[R], right[C];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      alpha[r] = 0;
      sums[r] = P[r][0];
#pragma unroll
      for (int c = 1; c < C; ++c) sums[r] += P[r][c];
    }
#pragma unroll
    for (int c = 0; c < C; ++c) right[c] = 0;
    visit([&](int r, int c, float d) {
      alpha[r] = fma(P[r][c], static_cast<T>(d), alpha[r]);
      right[c] = fma(P[r][c], static_cast<T>(d), right[c]);
    });
    ScatterRows<Shape>(sums);
    ScatterRows<Shape>(alpha);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const bool inside = place.OwnRow(k) < n;
      inverse[k] = !inside ? 0 : unit ? 1 : sums[k] > Solving<T>::kVanishing ? 1 / sums[k] : 0;
      side[k] = alpha[k];
      alpha[k] = side[k] * inverse[k];
    }
    GatherRows<Shape>(alpha);
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int c = 0; c < C; ++c) right[c] = fma(-P[r][c], alpha[r], right[c]);
    }
    ScatterCols<Shape>(right);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) residual[k] = right[k];
  }
  // IMPLICIT_UNIT takes sums for 1 that are not quite, so that its lines do not quite sum up to 0.
  constexpr bool kAlone = Shape::kLanes == 1;
  bool good = true;
  if (kAlone && !unit) {
    if constexpr (kAlone) SolveAlone<R, C>(P, inverse, diagonal, residual, beta);
  } else {
    good = SolveTiles<Shape, kOnes>(P, inverse, diagonal, residual, 2 * m + 10, beta);
  }
  GatherCols<Shape>(beta);
  TimesRows<R, C>(P, beta, alpha);
  ScatterRows<Shape>(alpha);
#pragma unroll
  for (int k = 0; k < kOwn; ++k) alpha[k] = (side[k] - alpha[k]) * inverse[k];
  GatherRows<Shape>(alpha);
  return good;
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_TILES_IMPLICIT_CUH_
