// The registers kernel for all other recipes, shapes up to a tile's and types: marginals, guards, offset, softmax,
// floor, dustbin, tolerance. As PlainKernel, with more to look up.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_TILES_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_TILES_CUH_

#include <type_traits>

#include "kernels/cuda/normalization_tiles_start.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template <class Shape>
__device__ inline void LoadLogits(const Task& task, const Place<Shape>& place, int lane, int64_t first, int count,
                                  float* buffer, float (&W)[Shape::R][Shape::C]) {
  const int bin = task.has_dustbin ? 1 : 0;
  Stage<Shape>::Load(lane, task.logits, task.n - bin, task.m - bin, first, count, buffer);
  if (bin == 1) Stage<Shape>::FillBorder(lane, task.dustbin, task.n, task.m, first, count, buffer);
  __syncwarp();  // The logits are there.
  Stage<Shape>::Read(place, task.transposed, buffer, W);
  __syncwarp();  // The buffer is free.
}

template <class Shape, bool kBackward>
constexpr int kTilesBlocks = Shape::kLanes == 1 ? (kBackward ? 4 : 5) : (kBackward ? 2 : 4);

template <class Shape, bool kBackward>
__global__ void __launch_bounds__(kThreads, kTilesBlocks<Shape, kBackward>)
    TilesKernel(const __grid_constant__ LaunchOf launch) {
  constexpr int R = Shape::R, C = Shape::C, kOwn = Shape::kOwn;
  __shared__ Task task;
  // Forward: one for what goes out and one for what comes in meanwhile. Backward: the same for both.
  __shared__ __align__(16) float buffers[kWarps][kBackward ? 1 : 2][Shape::kBufferFloats];
  const int block = LoadTask(launch, &task);
  const int lane = threadIdx.x % 32, warp = WarpNumber();
  const Place<Shape> place(lane);
  float* const buffer = buffers[warp][0];
  float* const incoming = buffers[warp][kBackward ? 0 : 1];
  bool fetched = false;  // The logits of the members that come next are on their way.
  float* const memory =
      task.workspace == nullptr ? DynamicFloats() : reinterpret_cast<float*>(task.workspace + task.slot_bytes * block);
  LaneTally tally;

  ForMembers<Shape>(task, block, warp, [&](int64_t first, int count) {
    History<kOwn> history(memory);
    const bool there = place.member < count;
    const int64_t member = first + min(place.member, count - 1);
    // 1. K, u_0 and v_0.
    float K[R][C], u[R], v[C], s[R], q[C];
    Terms<kOwn> terms;
    LoadTerms<Shape>(task, place, member, &terms);
    if (fetched) {
      WaitForFetches();
      __syncwarp();  // The logits are there.
      Stage<Shape>::Read(place, task.transposed, incoming, K);
      __syncwarp();  // The buffer is free.
    } else {
      LoadLogits<Shape>(task, place, lane, first, count, incoming, K);
    }
    if constexpr (!kBackward) {
      const int64_t next = first + MemberStep<Shape>(task), left = task.last - next;
      fetched = left > 0 && !task.has_dustbin &&
                Stage<Shape>::FetchRows(lane, task.logits, task.n, task.m, next,
                                        static_cast<int>(min(int64_t{Shape::kMembers}, left)), incoming);
    }
    const bool safe = Start<Shape>(task, place, terms, K, u);
#pragma unroll
    for (int c = 0; c < C; ++c) v[c] = place.Col(c) < task.cols ? 1 : 0;
    if constexpr (kBackward) history.Put(0, u, v);

    // 2. Iterations. The row sums that iteration t meets are those of the result of t - 1: where both errors are small
    // enough that result stands.
    int stopped = 0, last = task.iterations;
    float stopped_row_error = 0, stopped_col_error = 0, col_error = FLT_MAX;
    const int of_softmax = task.softmax ? 1 : 0;  // The iteration whose rows it was.
    const auto iterate = [&](auto is_judged) {
      constexpr bool kJudged = decltype(is_judged)::value;
#pragma unroll 1
      for (int t = 1; t <= task.iterations; ++t) {
        TimesRows<R, C>(K, v, s);
        ScatterRows<Shape>(s);
        if (kJudged && t > 1) {
          float sum = 0;
#pragma unroll
          for (int k = 0; k < kOwn; ++k) {
            sum += fabsf(u[k] * s[k] / terms.col_scale - terms.row.marginal[k] / terms.row_scale);
          }
          const float row_error = OverMatrix<Shape, Sum>(sum);
          if (stopped == 0 && row_error <= task.tolerance32 && col_error <= task.tolerance32) {
            stopped = t - 1;
            stopped_row_error = row_error;
            stopped_col_error = col_error;
          }
          if (__all_sync(kFullMask, stopped != 0 || !there || !safe)) {
            last = t - 1;
            break;
          }
        }
        if (t != of_softmax) {
#pragma unroll
          for (int k = 0; k < kOwn; ++k) {
            const float now = terms.row.Rescaled(k, s[k], u[k]);
            if (!kJudged || stopped == 0) u[k] = now;
          }
        }
        GatherRows<Shape>(u);
        TimesCols<R, C>(K, u, q);
        ScatterCols<Shape>(q);
#pragma unroll
        for (int k = 0; k < kOwn; ++k) {
          const float now = terms.col.Rescaled(k, q[k], v[k]);
          if (!kJudged || stopped == 0) v[k] = now;
        }
        if constexpr (kBackward) history.Put(t, u, v);
        if constexpr (kJudged) {
          float sum = 0;
#pragma unroll
          for (int k = 0; k < kOwn; ++k) sum += fabsf(v[k] * q[k] - terms.col.marginal[k]);
          col_error = OverMatrix<Shape, Sum>(sum) / terms.col_scale;
        }
        GatherCols<Shape>(v);
      }
    };
    const bool judged = task.tolerance32 > 0;
    judged ? iterate(std::true_type()) : iterate(std::false_type());

    // 3. P and its sums.
    const float unscale = 1 / terms.col_scale;
    TimesRows<R, C>(K, v, s);
    ScatterRows<Shape>(s);
    TimesCols<R, C>(K, u, q);
    ScatterCols<Shape>(q);
    float row_marginal[kOwn], col_marginal[kOwn];
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      s[k] *= u[k] * unscale;
      q[k] *= v[k] * unscale;
      row_marginal[k] = terms.row.marginal[k] / terms.row_scale;
      col_marginal[k] = terms.col.marginal[k] * unscale;
    }
    float row_error = ErrorL1<Shape>(s, row_marginal), last_col_error = ErrorL1<Shape>(q, col_marginal);
    bool good = safe && row_error + last_col_error < FLT_MAX;
    if (task.guard != Guard::kNone) {
      bool all = true;
#pragma unroll
      for (int r = 0; r < R; ++r) all = all && (place.Row(r) >= task.rows || KeepsDigits(u[r]));
#pragma unroll
      for (int c = 0; c < C; ++c) all = all && (place.Col(c) >= task.cols || KeepsDigits(v[c]));
      good = OverMatrix<Shape, Min>(all ? 1.0f : 0.0f) > 0 && good;
    }
    if (stopped != 0) {
      row_error = stopped_row_error;
      last_col_error = stopped_col_error;
    }
    StoreRedo<Shape>(task, place, first, there && !good, lane);
    if (there && !good) tally.flags |= Tally::kRedo;
    if (there && good) {
      Certify(task, member, place.first(), row_error, last_col_error, stopped != 0 ? stopped : task.iterations, &tally);
    }
    StoreSums<Shape>(task, place, lane, first, count, s, q, buffer);
    if (task.plan.data != nullptr || task.plan_copy.data != nullptr) {
      float plan[R][C];
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int c = 0; c < C; ++c) plan[r][c] = K[r][c] * (u[r] * unscale) * v[c];
      }
      Stage<Shape>::Write(place, task.transposed, plan, buffer);
      __syncwarp();  // P is there.
      if (task.plan.data != nullptr) Stage<Shape>::Store(lane, task.plan, task.n, task.m, first, count, buffer);
      if (task.plan_copy.data != nullptr)
        Stage<Shape>::Store(lane, task.plan_copy, task.n, task.m, first, count, buffer);
      __syncwarp();  // The buffer is free.
    }
    if constexpr (kBackward) {
      // 4. The adjoints of the last step. G: those of log K, but for the factor K.
      float G[R][C], row_bar[R], col_bar[C], v_now[kOwn];
      Stage<Shape>::Load(lane, task.cotangent, task.n, task.m, first, count, buffer);
      __syncwarp();  // dL/dP is there.
      Stage<Shape>::Read(place, task.transposed, buffer, G);
      __syncwarp();  // The buffer is free.
#pragma unroll
      for (int r = 0; r < R; ++r) {
        row_bar[r] = 0;
#pragma unroll
        for (int c = 0; c < C; ++c) {
          const bool inside = place.Row(r) < task.rows && place.Col(c) < task.cols;
          G[r][c] = inside ? G[r][c] * (u[r] * unscale) * v[c] : 0.0f;
          const float bar = G[r][c] * K[r][c];
          row_bar[r] += bar;
          col_bar[c] = r == 0 ? bar : col_bar[c] + bar;
        }
      }
      ScatterRows<Shape>(row_bar);
      ScatterCols<Shape>(col_bar);
#pragma unroll
      for (int k = 0; k < kOwn; ++k) v_now[k] = v[k];

      // 5. The iterations backward; those that a member did not do pass by.
      const auto reverse = [&](auto is_judged) {
        constexpr bool kJudged = decltype(is_judged)::value;
        float u_now[kOwn];
        history.GetU(last, u_now);
#pragma unroll 1
        for (int t = last; t >= 1; --t) {
          const bool idle = kJudged && stopped != 0 && stopped < t;
          float x[R], y[C], u_old[kOwn];
          history.GetU(t - 1, u_old);
          history.GetV(t - 1, v);
#pragma unroll
          for (int k = 0; k < kOwn; ++k) {
            float bar = col_bar[k];
            const float multiplier = terms.col.Unscaled(k, v[k], v_now[k], &bar);
            y[k] = idle ? 0.0f : multiplier;
            if (!idle) col_bar[k] = bar;
            u[k] = u_now[k];
          }
          GatherCols<Shape>(y);
          GatherRows<Shape>(u);
          TimesRows<R, C>(K, y, s);
          ScatterRows<Shape>(s);
#pragma unroll
          for (int k = 0; k < kOwn; ++k) {
            float bar = row_bar[k] - u_now[k] * s[k];
            const float multiplier = terms.row.Unscaled(k, u_old[k], u_now[k], &bar);
            x[k] = idle || t == of_softmax ? 0.0f : multiplier;
            if (!idle) row_bar[k] = bar;
            v_now[k] = v[k];
            u_now[k] = u_old[k];
          }
          GatherRows<Shape>(x);
          GatherCols<Shape>(v);
          TimesCols<R, C>(K, x, q);
          ScatterCols<Shape>(q);
#pragma unroll
          for (int k = 0; k < kOwn; ++k) col_bar[k] -= v_now[k] * q[k];
#pragma unroll
          for (int r = 0; r < R; ++r) {
#pragma unroll
            for (int c = 0; c < C; ++c) G[r][c] = fmaf(-u[r], y[c], fmaf(-x[r], v[c], G[r][c]));
          }
        }
      };
      judged ? reverse(std::true_type()) : reverse(std::false_type());

      // 6. The gradient.
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int c = 0; c < C; ++c) G[r][c] *= K[r][c];
      }
      if (task.softmax || task.offset > 0) {
        LoadLogits<Shape>(task, place, lane, first, count, buffer, K);
        ChainToLogits<Shape>(task, place, terms, K, G);
      }
      float infinite = 0, border = 0;
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int c = 0; c < C; ++c) {
          const int i = place.Row(r), j = place.Col(c);
          if (i >= task.rows || j >= task.cols) continue;
          infinite = fmaf(G[r][c], 0.0f, infinite);
          if (i == task.rows - 1 || j == task.cols - 1) border += G[r][c];
        }
      }
      if (there && good && !(infinite == 0)) tally.flags |= Tally::kNotFinite;
      border = OverMatrix<Shape, Sum>(border);
      const int bin = task.has_dustbin ? 1 : 0;
      if (bin == 1 && there && place.first() && task.dustbin_gradient.data != nullptr) {
        StoreAs(task.dustbin_gradient.dtype, task.dustbin_gradient.data, member, border);
      }
      Stage<Shape>::Write(place, task.transposed, G, buffer);
      __syncwarp();  // The gradient is there.
      Stage<Shape>::Store(lane, task.gradient, task.n - bin, task.m - bin, first, count, buffer);
      __syncwarp();  // The buffer is free.
    }
  });
  StoreTally(task, block, tally);
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_TILES_CUH_
