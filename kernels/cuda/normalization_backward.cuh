// The implicit backward modes, but FULL, of sides up to 32 and recipes that are not plain: from P (in the workspace,
// where the forward kernel left it, or given) and dL/dP to the logits. P and the system are float64 in registers, of
// which float32 goes on with some (normalization_tiles_system.cuh).
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_BACKWARD_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_BACKWARD_CUH_

#include "kernels/cuda/normalization_tiles_implicit.cuh"
#include "kernels/cuda/normalization_tiles_start.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template <class Shape>
__global__ void __launch_bounds__(kThreads) BackwardKernel(const __grid_constant__ LaunchOf launch) {
  constexpr int R = Shape::R, C = Shape::C, kOwn = Shape::kOwn;
  __shared__ Task task;
  __shared__ __align__(16) float buffers[kWarps][Shape::kBufferFloats];
  const int block = LoadTask(launch, &task);
  const int lane = threadIdx.x % 32, warp = WarpNumber();
  const Place<Shape> place(lane);
  float* const buffer = buffers[warp];
  const bool unit = task.backward == BackwardMode::kImplicitUnit;
  // P's own orientation decides what is eliminated; the start's rows are P's where it has any to chain through.
  const int n = task.n, m = task.m, bin = task.has_dustbin ? 1 : 0;
  LaneTally tally;

  ForMembers<Shape>(task, block, warp, [&](int64_t first, int count) {
    const int64_t mine = first + min(place.member, count - 1);
    // Members that the forward kernel could not hold are left out.
    const bool left = (task.redo[mine / task.redo_members] >> mine % task.redo_members & 1) != 0;
    const bool there = place.member < count && !left;
    float one[R][C], narrow[R][C];
    double P[R][C], alpha[R], beta[C];
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

#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int c = 0; c < C; ++c) {
        if (place.Row(r) >= n || place.Col(c) >= m) one[r][c] = 0;
      }
    }

    // 1. dL/d log K = (dP - alpha_i - beta_j) P.
    const auto visit = [&](auto body) {
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int c = 0; c < C; ++c) body(r, c, one[r][c]);
      }
    };
    (void)ImplicitMultipliers<Shape, false>(place, P, n, m, unit, visit, alpha, beta, narrow);
    float G[R][C];
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int c = 0; c < C; ++c) G[r][c] = TimesPlan<Shape, double>(one[r][c] - alpha[r] - beta[c], P, narrow, r, c);
    }

    // 2. On to the logits, and out.
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
