// Backward through the iterations of a member that is held on the chip, formulas as in normalization_registers.cuh. The
// reverse of an iteration is a pass with other vectors. The vectors of all iterations go to the workspace; where the
// passes are done the registers of K make room for the gradient, a product of these histories, and its factor K is
// computed once more from the logits, bit by bit the same.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_UNROLLED_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_UNROLLED_CUH_

#include "kernels/cuda/normalization_held_forward.cuh"
#include "kernels/cuda/normalization_plain_softmax.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template <class Shape, Lead kLead>
class HeldUnrolled : protected HeldForward<Shape, Work::kUnrolled, kLead> {
  using Base = HeldForward<Shape, Work::kUnrolled, kLead>;

 protected:
  using Base::across_;
  using Base::Base;
  using Base::Buffer;
  using Base::C;
  using Base::Column;
  using Base::Columns;
  using Base::down_;
  using Base::FinishRow;
  using Base::FirstColumn;
  using Base::FirstRow;
  using Base::Further;
  using Base::GuardValue;
  using Base::HistoryU;
  using Base::HistoryV;
  using Base::HistoryX;
  using Base::HistoryY;
  using Base::Inside;
  using Base::kColumnsFirst;
  using Base::kGiven;
  using Base::kGroup;
  using Base::kHalf;
  using Base::kSoftmax;
  using Base::kWarpColumns;
  using Base::lane_;
  using Base::Line;
  using Base::OwnColumn;
  using Base::Pass;
  using Base::PutRows;
  using Base::Read;
  using Base::ReadVector;
  using Base::Remember;
  using Base::Rows;
  using Base::shift_;
  using Base::Side;
  using Base::task_;
  using Base::ToSoftmax;
  using Base::u_;
  using Base::warp_;

  // ---- The iterations backward: their multipliers to the history ----------------------------------------------------
  __device__ void Reverse(float row_bar, const float (&col_bars)[C]) {
    const int last = task_.iterations, j_own = OwnColumn();
    const float v_last = HistoryV(last)[j_own];
    const float guard = GuardValue();
    float row_left = row_bar * u_, col_left = 0;  // Of x and y, from the iteration behind: the guard's.
    const auto column_step = [&](int, float sum) { return col_left = sum * v_last; };
    float y[C], q[C];
    if constexpr (kColumnsFirst) {  // The last rows' step.
      taken_ = row_bar;
      ReadVector(y);
      __syncthreads();  // The rows' parts are read.
      (void)Pass(y, q, [&](float) { return row_left; });
#pragma unroll
      for (int c = 0; c < C; ++c) q[c] = fmaf(-y[c], q[c], col_bars[c]);
      row_bar = 0;
      Columns(q, column_step);
    } else {
      Columns(col_bars, column_step);
    }
#pragma unroll 1
    for (int t = last; t >= 1; --t) {
      const float u = HistoryU(t)[down_ * 32 + lane_], v = HistoryV(t - 1)[j_own];
      ReadVector(y);
      Remember(HistoryY(t));
      if (kGiven && t == 1) {
        if (across_ == 0) HistoryX(t)[down_ * 32 + lane_] = 0;
        break;
      }
      const float x =
          Pass(y, q, [&](float sum) { return kSoftmax ? fmaf(-u * u, sum, row_left) : fmaf(-u, sum, row_bar) * u; });
      row_left = guard * x;
      row_bar = 0;
      if (across_ == 0) HistoryX(t)[down_ * 32 + lane_] = x;
      if (t > 1) {
        Columns(q, [&](int, float sum) {
          return kSoftmax ? col_left = fmaf(-v * v, sum, guard * col_left) : -v * sum * v;
        });
      }
    }
    __syncthreads();  // The history is there.
  }

  // ---- The gradient -------------------------------------------------------------------------------------------------
  // True: this thread's part is finite.
  __device__ bool FinishGradient() {
    const HeldRows<Shape> rows = Rows();
    float infinite = 0;
    Line()[lane_] = u_;
#pragma unroll 1
    for (int first = 0; first < Shape::kWarpRows; first += kHalf) {
      float g[kHalf][C], v[C];
      __syncwarp();  // The buffer is free.
      rows.Fetch(task_.cotangent, first, kHalf, Buffer(0));
      Read(HistoryV(task_.iterations) + FirstColumn(), v);
      rows.Arrived();
#pragma unroll
      for (int k = 0; k < kHalf; ++k) {
        const float u = Line()[first + k], taken = kColumnsFirst ? __shfl_sync(kFullMask, taken_, first + k) : 0.0f;
        Read(Buffer(k), g[k]);
#pragma unroll
        for (int c = 0; c < C; ++c) g[k][c] = (kColumnsFirst ? g[k][c] - taken : g[k][c]) * (u * v[c]);
      }
      __syncwarp();  // The buffer is free.
      AddHistory(rows, first, g);
      rows.Arrived();
      if constexpr (kSoftmax) {
        float totals[kHalf];
#pragma unroll
        for (int k = 0; k < kHalf; ++k) {
          float s[C];
          ToSoftmax(first + k, Buffer(k), s);
          totals[k] = 0;
#pragma unroll
          for (int c = 0; c < C; ++c) {
            g[k][c] = OfSoftmax<false>(g[k][c], s[c], 0);
            totals[k] = fmaf(s[c], g[k][c], totals[k]);
          }
        }
        const float total = this->template AcrossWarps<Sum>(Scatter<kHalf>(totals, lane_), first / kHalf);
#pragma unroll
        for (int k = 0; k < kHalf; ++k) FinishRow(total, first + k, Buffer(k), g[k], &infinite);
      }
#pragma unroll
      for (int k = 0; !kSoftmax && k < kHalf; ++k) {
        float w[C];
        const float shift = __shfl_sync(kFullMask, shift_, first + k);
        Read(Buffer(k), w);
#pragma unroll
        for (int c = 0; c < C; ++c) {
          g[k][c] *= Exp2(fmaf(kLog2E, w[c], shift));
          if (FirstRow() + first + k < Side() && Inside(c)) infinite = fmaf(g[k][c], 0.0f, infinite);
        }
      }
      PutRows(rows, task_.gradient, first, g, Buffer(0));  // The buffer: where the lane's logits were.
    }
    return infinite == 0;
  }

 private:
  // What AddHistory needs of iteration t comes a few iterations ahead, to one of so many places in turn: the warp's
  // columns of y_t and v_(t-1) to rows of the buffer, its rows of u_t and x_t to its line of sums.
  static constexpr int kAhead = kGroup / 2;
  __device__ float* Step(int t) const { return Further(t % kAhead * 2); }
  __device__ float* StepOfRows(int t) const {
    static_assert(2 * kHalf * kAhead <= kWarpColumns, "room");
    return Base::Parts(0) + warp_ * kWarpColumns + t % kAhead * 2 * kHalf;
  }
  // Its rows are those from `first` on.
  __device__ void FetchStep(int t, int first) const {
#pragma unroll
    for (int c = 0; c < C; c += 4) {
      FetchAsync16(SharedAddress(Step(t) + Column(c)), HistoryY(t) + FirstColumn() + Column(c));
      FetchAsync16(SharedAddress(Step(t) + kWarpColumns + Column(c)), HistoryV(t - 1) + FirstColumn() + Column(c));
    }
    static_assert(kHalf == 16, "a lane for each quad of both");
    if (lane_ >= 8) return;
    const float* const from = lane_ < 4 ? HistoryU(t) : HistoryX(t);
    FetchAsync16(SharedAddress(StepOfRows(t) + 4 * lane_), from + down_ * 32 + first + 4 * (lane_ % 4));
  }
  // g -= sum_t (u_t y_t^T + x_t v_(t-1)^T), the warp's rows from `first` on. Meanwhile their logits come to the buffer.
  __device__ void AddHistory(const HeldRows<Shape>& rows, int first, float (&g)[kHalf][C]) const {
    const int last = task_.iterations;
    const bool comes = rows.Quads() && task_.logits.dtype == DType::kFloat32;  // A row with each iteration.
    if (!comes) rows.Fetch(task_.logits, first, kHalf, Buffer(0));
#pragma unroll 1
    for (int t = 1; t < kAhead; ++t) {
      if (t <= last) FetchStep(t, first);
      CommitCopies();
    }
#pragma unroll 1
    for (int t = 1; t <= last; ++t) {
      WaitForCopies<kAhead - 2>();
      __syncwarp();  // Iteration t is there, and the place of the one before it is free.
      if (t + kAhead - 1 <= last) FetchStep(t + kAhead - 1, first);
      if (comes && t <= kHalf) rows.FetchRow(task_.logits, first + t - 1, Buffer(t - 1));
      CommitCopies();
      float y[C], v[C];
      Read(Step(t), y);
      Read(Step(t) + kWarpColumns, v);
#pragma unroll
      for (int k = 0; k < kHalf; k += 4) {
        const float4 u = *reinterpret_cast<const float4*>(StepOfRows(t) + k);
        const float4 x = *reinterpret_cast<const float4*>(StepOfRows(t) + kHalf + k);
#pragma unroll
        for (int c = 0; c < C; ++c) {
          g[k][c] = fmaf(-u.x, y[c], fmaf(-x.x, v[c], g[k][c]));
          g[k + 1][c] = fmaf(-u.y, y[c], fmaf(-x.y, v[c], g[k + 1][c]));
          g[k + 2][c] = fmaf(-u.z, y[c], fmaf(-x.z, v[c], g[k + 2][c]));
          g[k + 3][c] = fmaf(-u.w, y[c], fmaf(-x.w, v[c], g[k + 3][c]));
        }
      }
    }
#pragma unroll 1
    for (int k = last; comes && k < kHalf; ++k) rows.FetchRow(task_.logits, first + k, Buffer(k));
  }

  float taken_ = 0;  // Of the own row's cotangents, by the last rows' step.
};

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_UNROLLED_CUH_
