// The implicit backward modes, but FULL, of sides up to 32: from P (in the workspace, where the forward kernel left
// it, or given) and dL/dP to the logits. P and the system are float64 in registers; formulas as in
// normalization_implicit.cuh.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_BACKWARD_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_BACKWARD_CUH_

#include "kernels/cuda/normalization_tiles_start.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

constexpr double kSolved = 1e-14;      // Of the residual's norm.
constexpr double kVanishing = 1e-290;  // Sums below have no reciprocal.

template <int kOwn>
__device__ inline double Dot(const double* a, const double* b) {
  double sum = 0;
#pragma unroll
  for (int k = 0; k < kOwn; ++k) sum = fma(a[k], b[k], sum);
  return sum;
}

// (diag(d) - P^T diag(1/r) P) x = b for all matrices of the warp, by conjugate gradients preconditioned by diag(d). x,
// b and diagonal: the lane's own columns; inverse: 1/r of its own rows. Padding is 0.
template <class Shape>
__device__ inline void SolveTiles(const double (&P)[Shape::R][Shape::C], const double* inverse, const double* diagonal,
                                  const double* b, int steps, double* x) {
  constexpr int R = Shape::R, C = Shape::C, kOwn = Shape::kOwn;
  double residual[kOwn], inverted[kOwn], direction[kOwn], ones = 0;
#pragma unroll
  for (int k = 0; k < kOwn; ++k) {
    inverted[k] = diagonal[k] > kVanishing ? 1 / diagonal[k] : 0;
    residual[k] = b[k];
    x[k] = 0;
    ones += diagonal[k];
  }
  const double inverse_sum = 1 / OverMatrix<Shape, Sum>(ones);
  const auto project = [&](double* y) {
    double sum = 0;
#pragma unroll
    for (int k = 0; k < kOwn; ++k) sum += y[k];
    const double share = OverMatrix<Shape, Sum>(sum) * inverse_sum;
#pragma unroll
    for (int k = 0; k < kOwn; ++k) y[k] -= share * diagonal[k];
  };
  const auto norm_of = [&] {
    double sum = 0;
#pragma unroll
    for (int k = 0; k < kOwn; ++k) sum = fma(residual[k] * residual[k], inverted[k], sum);
    return OverMatrix<Shape, Sum>(sum);
  };
  project(residual);
  double norm = norm_of();
  const double goal = norm * kSolved * kSolved;
#pragma unroll
  for (int k = 0; k < kOwn; ++k) direction[k] = residual[k] * inverted[k];
#pragma unroll 1
  for (int step = 0; step < steps && __any_sync(kFullMask, norm > goal); ++step) {
    double p[C], t[R], q[C];
#pragma unroll
    for (int k = 0; k < kOwn; ++k) p[k] = direction[k];
    GatherCols<Shape>(p);
    TimesRows<R, C>(P, p, t);
    ScatterRows<Shape>(t);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) t[k] *= inverse[k];
    GatherRows<Shape>(t);
    TimesCols<R, C>(P, t, q);
    ScatterCols<Shape>(q);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) q[k] = diagonal[k] * direction[k] - q[k];
    project(q);
    const double curvature = OverMatrix<Shape, Sum>(Dot<kOwn>(direction, q));
    const bool moves = norm > goal && curvature != 0;  // Matrices that are done stand still.
    const double length = moves ? norm / curvature : 0;
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      x[k] = fma(length, direction[k], x[k]);
      residual[k] = fma(-length, q[k], residual[k]);
    }
    const double next = norm_of(), turn = moves ? next / norm : 0;
    norm = moves ? next : 0;
#pragma unroll
    for (int k = 0; k < kOwn; ++k) direction[k] = fma(turn, direction[k], residual[k] * inverted[k]);
  }
}

template <class Shape>
__global__ void __launch_bounds__(kThreads) BackwardKernel(const __grid_constant__ LaunchOf launch) {
  constexpr int R = Shape::R, C = Shape::C, kOwn = Shape::kOwn;
  __shared__ Task task;
  __shared__ __align__(16) float buffers[kWarps][Shape::kBufferFloats];
  const int block = LoadTask(launch, &task);
  const int lane = threadIdx.x % 32;
  const Place<Shape> place(lane);
  float* const buffer = buffers[threadIdx.x / 32];
  const bool unit = task.backward == BackwardMode::kImplicitUnit;
  // P's own orientation decides what is eliminated; the start's rows are P's where it has any to chain through.
  const int n = task.n, m = task.m, bin = task.has_dustbin ? 1 : 0;
  LaneTally tally;

  ForMembers<Shape>(task, block, [&](int64_t first, int count) {
    const int64_t mine = first + min(place.member, count - 1);
    // Members that the forward kernel could not hold are left out.
    const bool left = (task.redo[mine / task.redo_members] >> mine % task.redo_members & 1) != 0;
    const bool there = place.member < count && !left;
    float one[R][C];
    double P[R][C], row[R], col[C], side[kOwn], inverse[kOwn], diagonal[kOwn], right[kOwn], beta[C];
    Stage<Shape>::Load(lane, task.given_plan, n, m, first, count, buffer);
    __syncwarp();  // P is there.
    Stage<Shape>::Read(place, false, buffer, one);
    __syncwarp();  // The buffer is free.
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int c = 0; c < C; ++c) P[r][c] = place.Row(r) < n && place.Col(c) < m ? one[r][c] : 0;
    }
    Stage<Shape>::Load(lane, task.cotangent, n, m, first, count, buffer);
    __syncwarp();  // dL/dP is there.
    Stage<Shape>::Read(place, false, buffer, one);
    __syncwarp();  // The buffer is free.

    // 1. Sums of P and of P * dP, and the right-hand side.
    double sums[R], sums_of_cols[C];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      row[r] = sums[r] = 0;
#pragma unroll
      for (int c = 0; c < C; ++c) {
        if (place.Row(r) >= n || place.Col(c) >= m) one[r][c] = 0;
        sums[r] += P[r][c];
        row[r] = fma(P[r][c], static_cast<double>(one[r][c]), row[r]);
        sums_of_cols[c] = r == 0 ? P[r][c] : sums_of_cols[c] + P[r][c];
      }
    }
    ScatterRows<Shape>(sums);
    ScatterRows<Shape>(row);
    ScatterCols<Shape>(sums_of_cols);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const bool inside = place.OwnRow(k) < n;
      inverse[k] = !inside ? 0 : unit ? 1 : sums[k] > kVanishing ? 1 / sums[k] : 0;
      side[k] = row[k];
      row[k] = side[k] * inverse[k];
      diagonal[k] = place.OwnCol(k) >= m ? 0 : unit ? 1 : sums_of_cols[k];
    }
    GatherRows<Shape>(row);
#pragma unroll
    for (int c = 0; c < C; ++c) {
      col[c] = 0;
#pragma unroll
      for (int r = 0; r < R; ++r) col[c] = fma(one[r][c] - row[r], P[r][c], col[c]);
    }
    ScatterCols<Shape>(col);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) right[k] = col[k];

    // 2. beta, alpha, and dL/d log K = (dP - alpha_i - beta_j) P.
    SolveTiles<Shape>(P, inverse, diagonal, right, 2 * m + 10, beta);
    GatherCols<Shape>(beta);
    TimesRows<R, C>(P, beta, row);
    ScatterRows<Shape>(row);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) row[k] = (side[k] - row[k]) * inverse[k];
    GatherRows<Shape>(row);
    float G[R][C];
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int c = 0; c < C; ++c) G[r][c] = static_cast<float>((one[r][c] - row[r] - beta[c]) * P[r][c]);
    }

    // 3. On to the logits, and out.
    float infinite = 0, border = 0;
    if (task.forward) {
      Stage<Shape>::Load(lane, task.logits, n - bin, m - bin, first, count, buffer);
      if (bin == 1) Stage<Shape>::FillBorder(lane, task.dustbin, n, m, first, count, buffer);
      __syncwarp();  // The logits are there.
      Stage<Shape>::Read(place, false, buffer, one);
      __syncwarp();  // The buffer is free.
      if (task.softmax || task.offset > 0) {
        Terms<kOwn> terms;
        LoadTerms<Shape>(task, place, first + min(place.member, count - 1), &terms);
        ChainToLogits<Shape>(task, place, terms, one, G);
      }
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int c = 0; c < C; ++c) G[r][c] = one[r][c] > task.floor32 ? G[r][c] : 0;
      }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int c = 0; c < C; ++c) {
        const int i = place.Row(r), j = place.Col(c);
        if (i >= n || j >= m) continue;
        infinite = fmaf(G[r][c], 0.0f, infinite);
        if (i == n - 1 || j == m - 1) border += G[r][c];
      }
    }
    if (there) tally.flags |= infinite == 0 ? 0u : Tally::kNotFinite;
    border = OverMatrix<Shape, Sum>(border);
    if (bin == 1 && there && place.first() && task.dustbin_gradient.data != nullptr) {
      StoreAs(task.dustbin_gradient.dtype, task.dustbin_gradient.data, first + place.member, border);
    }
    Stage<Shape>::Write(place, false, G, buffer);
    __syncwarp();  // The gradient is there.
    Stage<Shape>::Store(lane, task.gradient, n - bin, m - bin, first, count, buffer);
    __syncwarp();  // The buffer is free.
  });
  StoreTally(task, block, tally);
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_BACKWARD_CUH_
