// The course of a member with sides from 33 to 1,024, or of many rows and few columns: its iterations, P and its sums,
// the iterations backward, the gradient; and the kernel.
//
// The reverse of an iteration is the same pass as an iteration, with other vectors. What dL/d log K gathers over the
// iterations, sum_t (u_t y_t^T + x_t v_(t-1)^T), is a product of histories, formed at the end. Formulas and limits as
// in normalization_registers.cuh and _tiles.cuh.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_STREAM_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_STREAM_CUH_

#include "kernels/cuda/normalization_stream_base.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template <class Shape>
class Streamed : private StreamBase<Shape> {
  using Base = StreamBase<Shape>;

 public:
  __device__ Streamed(const Task& task, float* slot, uint64_t (&barriers)[kStreamBarriers])
      : Base(task, slot, barriers) {}

  __device__ void Solve(int64_t member, LaneTally* tally) {
    member_ = member;
    LoadMarginals();
    const bool safe = Start();
    int iterations = task_.iterations;
    float row_error = 0, col_error = 0;
    bool good = safe;
    if (safe) {
      const bool stopped = Iterate(&iterations, &row_error, &col_error);
      float last_row_error, last_col_error;
      FinishForward(&last_row_error, &last_col_error);
      good =
          last_row_error + last_col_error < FLT_MAX && (task_.guard == Guard::kNone || MemberAll(ScalingsKeepDigits()));
      if (!stopped) row_error = last_row_error, col_error = last_col_error;
    }
    if (IsFirstBlock() && threadIdx.x == 0) {
      task_.redo[member] = good ? 0 : 1;
      if (!good) tally->flags |= Tally::kRedo;
      if (good) Certify(task_, member, true, row_error, col_error, iterations, tally);
    }
    if (good && task_.unrolled) {
      Reverse(iterations);
      if (!FinishGradient(iterations)) tally->flags |= Tally::kNotFinite;
    }
    __syncthreads();  // Shared memory and the slot are free.
  }
  // After all members.
  __device__ void Leave() const { cluster_.Leave(); }

 private:
  using Base::BlockSum;
  using Base::C;
  using Base::cluster_;
  using Base::col_add_;
  using Base::col_most_;
  using Base::col_scale_;
  using Base::ColumnBars;
  using Base::ColumnMarginals;
  using Base::Columns;
  using Base::FirstRow;
  using Base::HistoryU;
  using Base::HistoryV;
  using Base::HistoryX;
  using Base::HistoryY;
  using Base::IsFirstBlock;
  using Base::kColumns;
  using Base::lane_;
  using Base::LoadKept;
  using Base::LoadLogits;
  using Base::LoadMarginals;
  using Base::LoadRow;
  using Base::member_;
  using Base::MemberAll;
  using Base::MemberSum;
  using Base::NextU;
  using Base::Parts;
  using Base::Pass;
  using Base::row_add_;
  using Base::row_most_;
  using Base::row_scale_;
  using Base::RowBars;
  using Base::RowMarginals;
  using Base::RowOfK;
  using Base::Rows;
  using Base::Start;
  using Base::StartOf;
  using Base::StoreRow;
  using Base::task_;
  using Base::U;
  using Base::V;
  using Base::VNow;
  using Base::W;
  using Base::warp_;
  using typename Base::RowStart;

  // ---- Iterations ---------------------------------------------------------------------------------------------------
  // True: stopped by the tolerance.
  __device__ bool Iterate(int* iterations, float* row_error, float* col_error) {
    const bool stops = task_.tolerance32 > 0;
    float last_col_error = FLT_MAX;
    LoadKept();
    __syncthreads();  // u_0 and v_0 are there.
#pragma unroll 1
    for (int t = 1; t <= task_.iterations; ++t) {
      const bool skip = task_.softmax && t == 1;
      float error = 0;  // Of the result before.
      Pass(V(), [&](int i, float sum) {
        const float old = U()[i];
        const float now = skip ? old : RowMarginals()[i] * old * Reciprocal(fmaxf(fmaf(old, sum, row_add_), row_most_));
        NextU()[i] = now;
        if (stops) error += fabsf(old * sum / col_scale_ - RowMarginals()[i] / row_scale_);
        return now;
      });
      if (stops && t > 1) {
        const float before = MemberSum(error);
        if (before <= task_.tolerance32 && last_col_error <= task_.tolerance32) {
          *iterations = t - 1;
          *row_error = before;
          *col_error = last_col_error;
          return true;
        }
      }
      for (int i = threadIdx.x; i < Rows(); i += Shape::kThreadCount) {
        U()[i] = NextU()[i];
        if (task_.unrolled) HistoryU(t)[i] = U()[i];
      }
      const float total = Columns([&](int j, float sum) {
        const float old = V()[j];
        const float now = ColumnMarginals()[j] * old * Reciprocal(fmaxf(fmaf(old, sum, col_add_), col_most_));
        V()[j] = now;
        if (task_.unrolled) HistoryV(t)[j] = now;
        return fabsf(now * sum - ColumnMarginals()[j]);
      });
      if (stops) last_col_error = BlockSum(total) / col_scale_;
    }
    return false;
  }

  // ---- P and its sums; backward, the adjoints of the last step ------------------------------------------------------
  __device__ void FinishForward(float* row_error, float* col_error) {
    const float unscale = 1 / col_scale_;
    float sums[C] = {}, bars[C] = {};
    double error = 0;  // Of hundreds of rows, one after the other.
    // The kernel that goes on from a copy stores P itself.
    const Output& plan = task_.plan_copy.data != nullptr ? task_.plan_copy : task_.plan;
    for (int i = warp_; i < Rows(); i += W) {
      float row = 0, bar_row = 0, p[C], bar[C];
      const float* const from = RowOfK(i) + lane_;
      const float u = U()[i] * unscale;
#pragma unroll
      for (int c = 0; c < C; ++c) p[c] = from[32 * c] * u * V()[lane_ + 32 * c];
      if (task_.unrolled) LoadRow(task_.cotangent, task_.n, task_.m, FirstRow() + i, task_.cols, bar);
      if (plan.data != nullptr) StoreRow(plan, task_.n, task_.m, FirstRow() + i, task_.cols, p);
#pragma unroll
      for (int c = 0; c < C; ++c) {
        row += p[c];
        sums[c] += p[c];
        if (!task_.unrolled) continue;
        bar[c] *= p[c];
        bar_row += bar[c];
        bars[c] += bar[c];
      }
      row = WarpSum(row);
      if (task_.unrolled) bar_row = WarpSum(bar_row);
      if (lane_ != 0) continue;
      RowBars()[i] = bar_row;
      error += fabsf(row - RowMarginals()[i] / row_scale_);
      StoreSum(true, FirstRow() + i, row);
    }
    *row_error = MemberSum(static_cast<float>(error));
#pragma unroll
    for (int c = 0; c < C; ++c) Parts()[warp_ * kColumns + lane_ + 32 * c] = sums[c];
    __syncthreads();  // The parts are there.
    *col_error = BlockSum(Columns([&](int j, float sum) {
      if (IsFirstBlock()) StoreSum(false, j, sum);
      return fabsf(sum - ColumnMarginals()[j] * unscale);
    }));
    if (!task_.unrolled) return;
#pragma unroll
    for (int c = 0; c < C; ++c) Parts()[warp_ * kColumns + lane_ + 32 * c] = bars[c];
    __syncthreads();  // The parts are there.
    (void)Columns([&](int j, float sum) {
      ColumnBars()[j] = sum;
      return 0.0f;
    });
  }
  // Those that this thread sees.
  __device__ bool ScalingsKeepDigits() const {
    bool all = true;
    for (int i = threadIdx.x; i < Rows(); i += Shape::kThreadCount) all = all && KeepsDigits(U()[i]);
    for (int j = threadIdx.x; j < task_.cols; j += Shape::kThreadCount) all = all && KeepsDigits(V()[j]);
    return all;
  }
  __device__ void StoreSum(bool of_rows, int k, float x) const {
    const Output& output = of_rows != task_.transposed ? task_.row_sums : task_.column_sums;
    const int size = of_rows ? task_.rows : task_.cols;
    if (output.data != nullptr) StoreAs(output.dtype, output.data, member_ * size + k, x);
  }

  // ---- The iterations backward: their multipliers to the history ----------------------------------------------------
  // y of iteration t from the adjoints of log v_t.
  __device__ float ColumnMultiplier(int t, int j) {
    float bar = ColumnBars()[j];
    const float y = Unscaled(HistoryV(t - 1)[j], HistoryV(t)[j], ColumnMarginals()[j], col_add_, col_most_, &bar);
    ColumnBars()[j] = bar;
    HistoryY(t)[j] = y;
    return y;
  }
  __device__ void Reverse(int iterations) {
    LoadKept();
    for (int j = threadIdx.x; j < kColumns; j += Shape::kThreadCount) {
      VNow()[j] = j < task_.cols && iterations > 0 ? ColumnMultiplier(iterations, j) : 0.0f;
    }
    __syncthreads();  // y is there.
#pragma unroll 1
    for (int t = iterations; t >= 1; --t) {
      const bool skip = task_.softmax && t == 1;
      Pass(VNow(), [&](int i, float sum) {
        const float now = HistoryU(t)[i];
        float bar = RowBars()[i] - now * sum;
        float x = Unscaled(HistoryU(t - 1)[i], now, RowMarginals()[i], row_add_, row_most_, &bar);
        if (skip) x = 0;
        RowBars()[i] = bar;
        HistoryX(t)[i] = x;
        return x;
      });
      (void)Columns([&](int j, float sum) {
        ColumnBars()[j] -= HistoryV(t - 1)[j] * sum;
        if (t > 1) VNow()[j] = ColumnMultiplier(t - 1, j);
        return 0.0f;
      });
    }
  }

  // ---- The gradient -------------------------------------------------------------------------------------------------
  // True: it is finite.
  __device__ bool FinishGradient(int iterations) {
    const float unscale = 1 / col_scale_;
    const int last = iterations;
    float infinite = 0, border = 0;
    constexpr int kTogether = C >= 32 ? 1 : C >= 16 ? 2 : 4;
#pragma unroll 1
    for (int first = warp_ * kTogether; first < Rows(); first += W * kTogether) {
      float g[kTogether][C];
#pragma unroll
      for (int e = 0; e < kTogether; ++e) {
        const int i = min(first + e, Rows() - 1);
        LoadRow(task_.cotangent, task_.n, task_.m, FirstRow() + i, task_.cols, g[e]);
        const float u = U()[i] * unscale;
#pragma unroll
        for (int c = 0; c < C; ++c) g[e][c] *= u * HistoryV(last)[lane_ + 32 * c];
      }
#pragma unroll 1
      for (int t = 1; t <= last; ++t) {
        const float *u = HistoryU(t), *x = HistoryX(t), *v = HistoryV(t - 1) + lane_, *y = HistoryY(t) + lane_;
        float us[kTogether], xs[kTogether];
#pragma unroll
        for (int e = 0; e < kTogether; ++e) {
          const int i = min(first + e, Rows() - 1);
          us[e] = -u[i];
          xs[e] = -x[i];
        }
#pragma unroll
        for (int c = 0; c < C; ++c) {
          const float vc = v[32 * c], yc = y[32 * c];
#pragma unroll
          for (int e = 0; e < kTogether; ++e) g[e][c] = fmaf(us[e], yc, fmaf(xs[e], vc, g[e][c]));
        }
      }
#pragma unroll
      for (int e = 0; e < kTogether; ++e) {
        if (first + e < Rows()) FinishRow(first + e, g[e], &infinite, &border);
      }
    }
    border = MemberSum(border);
    const Output& output = task_.dustbin_gradient;
    if (task_.has_dustbin && IsFirstBlock() && threadIdx.x == 0 && output.data != nullptr) {
      StoreAs(output.dtype, output.data, member_, border);
    }
    return __syncthreads_and(infinite == 0);
  }
  __device__ void FinishRow(int i, float (&g)[C], float* infinite, float* border) {
    const bool chained = task_.softmax || task_.offset > 0;
    float w[C], total = 0;
    RowStart start = {0, 1, 0};
    if (chained) {
      LoadLogits(i, w);
      start = StartOf(i, w);
    }
    const float* const from = RowOfK(i) + lane_;
#pragma unroll
    for (int c = 0; c < C; ++c) {
      const int j = lane_ + 32 * c;
      if (j >= task_.cols) continue;
      g[c] *= from[32 * c];
      if (chained) {
        const float e = start.scale * Exp(w[c] - start.top), entry = e + start.added;
        g[c] = entry > 0 ? g[c] * (e / entry) : 0.0f;
        total += g[c];
      }
    }
    if (task_.softmax) total = WarpSum(total) * row_scale_ / RowMarginals()[i];
    const int bin = task_.has_dustbin ? 1 : 0, row = FirstRow() + i;
#pragma unroll
    for (int c = 0; c < C; ++c) {
      const int j = lane_ + 32 * c;
      if (j >= task_.cols) continue;
      if (task_.softmax) g[c] -= start.scale * Exp(w[c] - start.top) * total;
      *infinite = fmaf(g[c], 0.0f, *infinite);
      if (row >= task_.rows - bin || j >= task_.cols - bin) *border += g[c];
    }
    if (row < task_.rows - bin) {
      StoreRow(task_.gradient, task_.n - bin, task_.m - bin, row, task_.cols - bin, g);
    }
  }
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreadCount) StreamKernel(const __grid_constant__ LaunchOf launch) {
#if __CUDA_ARCH__ >= 900
  constexpr bool kRuns = true;
#else
  constexpr bool kRuns = !Shape::kCluster;
#endif
  if constexpr (kRuns) {
    __shared__ Task task;
    __shared__ uint64_t barriers[kStreamBarriers];
    const int block = LoadTask(launch, &task), ranks = Shape::kCluster ? task.ranks : 1;
    LaneTally tally;
    Streamed<Shape> streamed(task, reinterpret_cast<float*>(task.workspace + task.slot_bytes * block), barriers);
    const int step = task.blocks / ranks;
    for (int64_t member = task.first + block / ranks; member < task.last; member += step) {
      streamed.Solve(member, &tally);
    }
    streamed.Leave();
    if (threadIdx.x == 0) StoreTally(task, block, tally.rows, tally.cols, tally.iterations, tally.flags);
  }
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_STREAM_CUH_
