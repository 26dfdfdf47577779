// The implicit backward modes' multipliers, but FULL's, for matrices in tiles: P, alpha and beta in registers; their
// system by elimination, where a lane has it whole, or by normalization_tiles_system.cuh. Formulas as in
// normalization_implicit.cuh.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_TILES_IMPLICIT_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_TILES_IMPLICIT_CUH_

#include "kernels/cuda/normalization_tiles_system.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

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
// the matrices. narrow: what TimesPlan takes besides. False, to all lanes of a matrix: too ill-conditioned.
template <class Shape, bool kOnes, class T, class Visit>
__device__ inline bool ImplicitMultipliers(const Place<Shape>& place, T (&P)[Shape::R][Shape::C], int n, int m,
                                           bool unit, Visit visit, T (&alpha)[Shape::R], T (&beta)[Shape::C],
                                           float (&narrow)[Shape::R][Shape::C]) {
  constexpr int R = Shape::R, C = Shape::C, kOwn = Shape::kOwn;
  constexpr bool kAlone = Shape::kLanes == 1;
  T side[kOwn];
  Descent<Shape, kOnes, T> system;
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
    for (int k = 0; k < kOwn; ++k) system.diagonal[k] = place.OwnCol(k) >= m ? 0 : unit ? 1 : sums[k];
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
      system.inverse[k] = !inside ? 0 : unit ? 1 : sums[k] > Solving<T>::kVanishing ? 1 / sums[k] : 0;
      side[k] = alpha[k];
      alpha[k] = side[k] * system.inverse[k];
    }
    GatherRows<Shape>(alpha);
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int c = 0; c < C; ++c) right[c] = fma(-P[r][c], alpha[r], right[c]);
    }
    ScatterCols<Shape>(right);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) system.residual[k] = right[k];
  }
  const int steps = 2 * m + 10;
  if constexpr (kMixes<Shape, T>) {
    SolveMixed<Shape>(P, steps, &system, narrow);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      beta[k] = system.x[k];
      alpha[k] = (side[k] - system.product[k]) * system.inverse[k];
    }
    GatherCols<Shape>(beta);
    GatherRows<Shape>(alpha);
    return true;
  } else {
    bool good = true;
    if (kAlone && !unit) {  // IMPLICIT_UNIT takes sums for 1 that are not quite: its lines do not sum up to 0.
      if constexpr (kAlone) SolveAlone<R, C>(P, system.inverse, system.diagonal, system.residual, beta);
    } else {
      good = SolveTiles<Shape, kOnes>(P, system.inverse, system.diagonal, system.residual, steps, beta);
    }
    GatherCols<Shape>(beta);
    TimesRows<R, C>(P, beta, alpha);
    ScatterRows<Shape>(alpha);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) alpha[k] = (side[k] - alpha[k]) * system.inverse[k];
    GatherRows<Shape>(alpha);
    return good;
  }
}

// x P afterwards: kMixes leaves P in `narrow`.
template <class Shape, class T>
__device__ inline float TimesPlan(T x, const T (&P)[Shape::R][Shape::C], const float (&narrow)[Shape::R][Shape::C],
                                  int r, int c) {
  if constexpr (kMixes<Shape, T>) return static_cast<float>(x) * narrow[r][c];
  return static_cast<float>(x * P[r][c]);
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_TILES_IMPLICIT_CUH_
