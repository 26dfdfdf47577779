// The linear system of the implicit backward modes, but FULL's, for matrices in tiles: solved by all lanes of a warp.
// Formulas as in normalization_implicit.cuh.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_TILES_SYSTEM_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_TILES_SYSTEM_CUH_

#include <type_traits>

#include "kernels/cuda/normalization_tile.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

// What the system is solved with. float32 throughout: of matrices that registers have no room for otherwise, as far as
// they are well-conditioned.
template <class T>
struct Solving;
template <>
struct Solving<double> {
  static constexpr double kSolved = 1e-9;       // Of the residual's norm: a sixtieth of what P's float32 rounds off.
  static constexpr double kVanishing = 1e-290;  // Sums below have no reciprocal.
  static constexpr bool kMayFail = false;
  // Where float32 takes over: what is left of the residual's norm, as small a part as makes what float32 rounds off no
  // more than kSolved. It goes on as long as no direction's curvature is below kLeastCurvature.
  static constexpr double kTakenOver = 1e-2;
  static constexpr double kLeastCurvature = 1e-3;  // In units of the diagonal's.
};
template <>
struct Solving<float> {
  static constexpr float kSolved = 1e-7f;
  static constexpr float kVanishing = 1e-37f;
  static constexpr bool kMayFail = true;
  static constexpr float kLeastCurvature = 0.1f;
};
// float64 begins, float32 goes on; where a lane has so little to keep that registers have room for the longer code.
template <class Shape, class T>
constexpr bool kMixes = Shape::kLanes > 1 && Shape::kOwn <= 2 && std::is_same_v<T, double>;

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

template <int kOwn, class T>
__device__ inline T Dot(const T* a, const T* b) {
  T sum = 0;
#pragma unroll
  for (int k = 0; k < kOwn; ++k) sum = fma(a[k], b[k], sum);
  return sum;
}

// t = P x and q = (diag(d) - P^T diag(1/r) P) x, what the lane has of them, and its part of the sum of q.
template <class Shape, class T>
__device__ inline T ApplySystem(const T (&P)[Shape::R][Shape::C], const T* inverse, const T* diagonal, const T* x, T* t,
                                T (&q)[Shape::C]) {
  constexpr int R = Shape::R, C = Shape::C, kOwn = Shape::kOwn;
  T u[R];
  {
    T p[C];
#pragma unroll
    for (int k = 0; k < kOwn; ++k) p[k] = x[k];
    GatherCols<Shape>(p);
    TimesRows<R, C>(P, p, u);
  }
  ScatterRows<Shape>(u);
#pragma unroll
  for (int k = 0; k < kOwn; ++k) {
    t[k] = u[k];
    u[k] *= inverse[k];
  }
  GatherRows<Shape>(u);
  TimesCols<R, C>(P, u, q);
  ScatterCols<Shape>(q);
  T sum = 0;
#pragma unroll
  for (int k = 0; k < kOwn; ++k) {
    q[k] = fma(diagonal[k], x[k], -q[k]);
    sum += q[k];
  }
  return sum;
}

// (diag(d) - P^T diag(1/r) P) x = b of all matrices of a warp, by conjugate gradients preconditioned by diag(d), unless
// d is 1 but for roundings (kOnes); by a type that another begins for, or goes on for. What a lane has of its own
// columns, and rows. Padding is 0.
template <class Shape, bool kOnes, class T>
struct Descent {
  static constexpr int R = Shape::R, C = Shape::C, kOwn = Shape::kOwn;

  // From x = 0. `residual`, `diagonal` and `inverse` are there: b, d and 1/r.
  __device__ void Begin() {
    T ones = 0, total = 0;
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      inverted[k] = kOnes ? 1 : diagonal[k] > Solving<T>::kVanishing ? 1 / diagonal[k] : 0;
      x[k] = product[k] = 0;
      ones += diagonal[k];
      total += residual[k];
    }
    OverMatrixTwo<Shape>(&ones, &total);
    inverse_sum = 1 / ones;
    Project(total, residual);
    Restart();
  }
  __device__ void Restart() {
    norm = spread = Norm();
#pragma unroll
    for (int k = 0; k < kOwn; ++k) direction[k] = residual[k] * inverted[k];
  }

  // At most so many steps, while open() of any of the warp's matrices. Those of which it is not stand still.
  template <class Open>
  __device__ void Run(const T (&P)[R][C], int steps, T least_curvature, Open open) {
#pragma unroll 1
    for (int step = 0; step < steps && __any_sync(kFullMask, open()); ++step) {
      T t[kOwn], q[C];
      T sum = ApplySystem<Shape>(P, inverse, diagonal, direction, t, q), curvature = Dot<kOwn>(direction, q);
      // What is taken off q does not count: `direction`, times the diagonal, has no part along the null vector.
      OverMatrixTwo<Shape>(&curvature, &sum);
      Project(sum, q);
      if (open()) well = well && curvature > least_curvature * spread;
      const bool moves = open() && curvature != 0;
      const T length = moves ? norm / curvature : 0;
#pragma unroll
      for (int k = 0; k < kOwn; ++k) {
        x[k] = fma(length, direction[k], x[k]);
        product[k] = fma(length, t[k], product[k]);
        residual[k] = fma(-length, q[k], residual[k]);
      }
      const T next = Norm(), turn = moves ? next / norm : 0;
      if (moves) spread = fma(turn * turn, spread, next);
#pragma unroll
      for (int k = 0; k < kOwn; ++k) {
        const T turned = fma(turn, direction[k], residual[k] * inverted[k]);
        direction[k] = moves ? turned : direction[k];
      }
      if (open()) norm = moves ? next : 0;
    }
  }

  // The part along the null vector is taken off.
  __device__ void Project(T sum, T* y) const {
    const T share = sum * inverse_sum;
#pragma unroll
    for (int k = 0; k < kOwn; ++k) y[k] = fma(-share, diagonal[k], y[k]);
  }
  __device__ T Norm() const {
    T sum = 0;
#pragma unroll
    for (int k = 0; k < kOwn; ++k) sum = fma(residual[k] * residual[k], inverted[k], sum);
    return OverMatrix<Shape, Sum>(sum);
  }

  T diagonal[kOwn], inverse[kOwn], inverted[kOwn];
  T x[kOwn], residual[kOwn], direction[kOwn];
  T product[kOwn];  // P x.
  T inverse_sum;
  T norm, spread;    // Squares of the residual's, by diag(1/d), and of the direction's, by diag(d).
  bool well = true;  // No direction's curvature was too small yet.
};

// (diag(d) - P^T diag(1/r) P) x = b for all matrices of the warp, by conjugate gradients preconditioned by diag(d),
// unless d is 1 but for roundings (kOnes). x, b (used up) and diagonal: the lane's own columns; inverse: 1/r of its own
// rows. Padding is 0. False, to all lanes of a matrix: too ill-conditioned. Descent's steps, without what it has
// besides: tiles that fill their registers would spill it.
template <class Shape, bool kOnes, class T>
__device__ inline bool SolveTiles(const T (&P)[Shape::R][Shape::C], const T* inverse, const T* diagonal, T* residual,
                                  int steps, T* x) {
  using Limits = Solving<T>;
  constexpr int C = Shape::C, kOwn = Shape::kOwn;
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
    T t[kOwn], q[C];
    T sum = ApplySystem<Shape>(P, inverse, diagonal, direction, t, q);
    // What is taken off q does not count: `direction`, times the diagonal, has no part along the null vector.
    T curvature = Dot<kOwn>(direction, q);
    OverMatrixTwo<Shape>(&curvature, &sum);
    project(sum, q);
    const bool moves = norm > goal && curvature != 0;  // Matrices that are done stand still.
    if constexpr (Limits::kMayFail) {
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

// The same by both types, to x and P x. Float32 takes P in another array, from that of float64, which registers have no
// room beside: that is what is left.
template <class Shape, bool kOnes>
__device__ inline void SolveMixed(double (&P)[Shape::R][Shape::C], int steps, Descent<Shape, kOnes, double>* system,
                                  float (&narrow)[Shape::R][Shape::C]) {
  using Limits = Solving<double>;
  constexpr int R = Shape::R, C = Shape::C, kOwn = Shape::kOwn;
  system->Begin();
  const double goal = system->norm * (Limits::kSolved * Limits::kSolved);
  const double taken_over = system->norm * (Limits::kTakenOver * Limits::kTakenOver);
  const auto unsolved = [&] { return system->norm > goal; };
  const auto ready = [&] { return system->well && system->norm <= taken_over; };
#pragma unroll 1
  for (;;) {
    system->Run(P, steps, Limits::kLeastCurvature, [&] { return unsolved() && !ready(); });
    const bool goes_on = unsolved() && ready();
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int c = 0; c < C; ++c) narrow[r][c] = static_cast<float>(Opaque(P[r][c]));
    }
    if (!__any_sync(kFullMask, goes_on)) break;
    // Scaled by a power of two, so that the residual's norm is near 1.
    const int half = goes_on ? (__double2hiint(system->norm) >> 20) / 2 - 511 : 0;
    const double down = __hiloint2double((1023 - half) << 20, 0), up = __hiloint2double((1023 + half) << 20, 0);
    Descent<Shape, kOnes, float> rest;
    rest.inverse_sum = static_cast<float>(system->inverse_sum);
    rest.norm = goes_on ? static_cast<float>(system->norm * down * down) : 0;
    rest.spread = static_cast<float>(system->spread * down * down);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      rest.diagonal[k] = static_cast<float>(system->diagonal[k]);
      rest.inverse[k] = static_cast<float>(system->inverse[k]);
      rest.inverted[k] = static_cast<float>(system->inverted[k]);
      rest.residual[k] = static_cast<float>(system->residual[k] * down);
      rest.direction[k] = static_cast<float>(system->direction[k] * down);
      rest.x[k] = rest.product[k] = 0;
    }
    const float rest_goal = static_cast<float>(goal * down * down);
    rest.Run(narrow, steps, static_cast<float>(Limits::kLeastCurvature),
             [&] { return rest.norm > rest_goal && rest.well; });
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      system->x[k] = fma(up, static_cast<double>(rest.x[k]), system->x[k]);
      system->product[k] = fma(up, static_cast<double>(rest.product[k]), system->product[k]);
      system->residual[k] = rest.well ? 0 : up * rest.residual[k];
    }
    if (__all_sync(kFullMask, rest.well)) break;
    // It cannot go on with some.
    system->well = rest.well;
    system->Restart();
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int c = 0; c < C; ++c) P[r][c] = narrow[r][c];
    }
  }
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_TILES_SYSTEM_CUH_
