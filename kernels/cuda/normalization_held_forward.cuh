// A member that is held on the chip, forward: iterations, P and its sums, and what gradients begin with.
//
// Recipes that begin with a softmax: formulas as in normalization_plain_softmax.cuh. Those that begin with columns have
// given rows at first likewise, u = e^(row maximum), which are 1 of exp W, and end with a step of rows more. A guard, a
// least sum, is left to another kernel where it acts: by the first sums of both, as GuardRests has it.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_FORWARD_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_FORWARD_CUH_

#include "kernels/cuda/normalization_held_base.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template <class Shape, Work kWork, Lead kLead>
class HeldForward : protected HeldBase<Shape, kWork != Work::kForward> {
  using Base = HeldBase<Shape, kWork != Work::kForward>;

 protected:
  static constexpr bool kUnrolled = kWork == Work::kUnrolled, kImplicit = kWork == Work::kImplicit;
  static constexpr bool kBackward = kUnrolled || kImplicit;
  static constexpr bool kSoftmax = kLead == Lead::kSoftmax, kColumnsFirst = kLead == Lead::kColumns;
  static constexpr bool kGiven = kLead != Lead::kRows;  // The first rows' scalings are no step's.

  using Base::across_;
  using Base::Buffer;
  using Base::C;
  using Base::Columns;
  using Base::down_;
  using Base::Error;
  using Base::FirstColumn;
  using Base::FirstRow;
  using Base::HasRow;
  using Base::HistoryU;
  using Base::HistoryV;
  using Base::Inside;
  using Base::IsFirstOwner;
  using Base::kColumns;
  using Base::kGroup;
  using Base::kWarpColumns;
  using Base::lane_;
  using Base::Line;
  using Base::member_;
  using Base::OwnRow;
  using Base::Pass;
  using Base::Read;
  using Base::ReadVector;
  using Base::Remember;
  using Base::Rows;
  using Base::scale_;
  using Base::shift_;
  using Base::Side;
  using Base::task_;
  using Base::Vector;
  using Base::Write;

  __device__ HeldForward(const Task& task, float* slot, uint64_t (&barriers)[kHeldBarriers], int rank, int ranks)
      : Base(task, slot, barriers, rank, ranks) {
    for (int j = threadIdx.x; j < kColumns; j += Shape::kThreadCount)
      Vector()[j] = 0;  // Nobody sends what lies beyond.
    if (Shape::kCluster && threadIdx.x == 0) InitReceiving(barriers);
    if constexpr (Shape::kCluster) this->PlanRoute();
    __syncthreads();                               // All is set up,
    if constexpr (Shape::kCluster) SyncCluster();  // in all blocks.
  }

  // ---- Iterations ---------------------------------------------------------------------------------------------------
  // Returns this thread's part of the columns' errors. *safe: false where a guard acts.
  __device__ float Iterate(bool* safe) {
    float v[C];
#pragma unroll
    for (int c = 0; c < C; ++c) v[c] = Inside(c) ? 1.0f : 0.0f;
    if constexpr (kUnrolled) {
      for (int j = threadIdx.x; j < kColumns; j += Shape::kThreadCount) HistoryV(0)[j] = j < Side() ? 1.0f : 0.0f;
    }
    *Error() = 0;
    const float guard = GuardValue();
    float a = 1, b = 1;  // Of the own row and column, kSoftmax: 1 / u and 1 / v; kColumnsFirst: b is v.
    float q[C];
    const auto row_step = [&](int t, float sum) {
      if (!HasRow()) return 0.0f;
      if constexpr (kColumnsFirst) {
        if (t == 1) return Exp2(-shift_);
        if (t == 2) *safe = *safe && u_ * sum > guard;
      }
      if (kSoftmax && t > 1) a = fmaf(guard, a, sum);
      return Reciprocal(kSoftmax ? a : sum);
    };
#pragma unroll 1
    for (int t = 1; t <= task_.iterations; ++t) {
      const bool last = t == task_.iterations;
      u_ = Pass(v, q, [&](float sum) { return row_step(t, sum); });
      if (kUnrolled && across_ == 0) HistoryU(t)[down_ * 32 + lane_] = u_;
      Columns(q, [&](int j, float sum) {
        if (kSoftmax) b = fmaf(guard, b, sum);
        const float now = Reciprocal(kSoftmax ? b : sum);
        if constexpr (kColumnsFirst) {
          if (t == 1) *safe = *safe && sum > guard;
          b = now;
        } else {
          if (last) {
            *Error() = fabsf(fmaf(now, sum, -1.0f));
            StoreSum(task_.column_sums, j, now * sum);
          }
        }
        return now;
      });
      ReadVector(v);
      if constexpr (kUnrolled) Remember(HistoryV(t));
    }
    if constexpr (kColumnsFirst) {
      u_ = Pass(v, q, [&](float sum) { return row_step(task_.iterations + 1, sum); });
      Columns(q, [&](int j, float sum) {
        *Error() = fabsf(fmaf(b, sum, -1.0f));
        StoreSum(task_.column_sums, j, b * sum);
        return b;  // The vector stays.
      });
    }
    return IsFirstOwner() ? *Error() : 0.0f;
  }
  __device__ float GuardValue() const {
    return kGiven && task_.guard != Guard::kNone ? static_cast<float>(task_.guard_value) : 0.0f;
  }
  __device__ void StoreSum(const Output& output, int k, float x) const {
    if (output.data != nullptr) StoreAs(output.dtype, output.data, member_ * Side() + k, x);
  }

  // ---- P and its sums; backward, the adjoints of the last step ------------------------------------------------------
  static constexpr int kPart = 2;  // Rows whose sums are combined together.
  // Returns this thread's part of the rows' errors. row_bar: of the own row. col_bars: of the lane's columns, of this
  // warp's rows.
  __device__ float FinishForward(float* row_bar, float (&col_bars)[C]) {
    const HeldRows<Shape> rows = Rows();
    Line()[lane_] = u_;
    __syncwarp();  // The multipliers are there.
#pragma unroll
    for (int c = 0; c < C; ++c) col_bars[c] = 0;
    float row_sum = 0;
    const bool wanted = task_.plan.data != nullptr;
    if constexpr (!kBackward) {
      if (wanted && rows.Quads()) {
        if (task_.plan.dtype == DType::kFloat32) {
          FinishInRegisters<true>(rows, &row_sum);
        } else {
          FinishInRegisters<false>(rows, &row_sum);
        }
      } else {
        FinishInBuffers(rows, wanted, &row_sum);
      }
    } else {
      // A loop, not all rows at once: what is executed once waits for its instructions.
#pragma unroll 1
      for (int first = 0; first < Shape::kWarpRows; first += kGroup) {
        if (!Streams(rows)) rows.Fetch(task_.cotangent, first, kGroup, Buffer(0));
        const float* const k_rows = this->RowsOfK(first);
        rows.Arrived();
        FinishGroupAndBars(rows, first, k_rows, wanted, &row_sum, row_bar, col_bars);
        if (wanted && !rows.Quads()) rows.Store(task_.plan, first, kGroup, Buffer(0));
        __syncwarp();  // The buffers are free.
      }
    }
    row_sum = this->template AcrossWarps<Sum>(row_sum, 0);
    if constexpr (kBackward) *row_bar = this->template AcrossWarps<Sum>(*row_bar, 1);
    row_sum_ = row_sum;
    if (across_ != 0 || !HasRow()) return 0;
    StoreSum(task_.row_sums, OwnRow(), row_sum);
    return fabsf(row_sum - 1);
  }

  // FinishForward of all rows, forward: straight from registers, where Quads(), or by way of buffers, from where P goes
  // to memory, if it is wanted.
  template <bool kFloats>
  __device__ void FinishInRegisters(const HeldRows<Shape>& rows, float* row_sum) const {
#pragma unroll
    for (int first = 0; first < Shape::kWarpRows; first += kGroup) {
      const auto quad_of_k = [&](int k, int h, float(&x)[4]) { this->QuadOfK(first + k, h, x); };
      FinishGroup(first, quad_of_k, row_sum, [&](auto quad_of_p) {
        rows.template PutRowsAs<kFloats, kGroup>(rows.To(task_.plan, first), quad_of_p);
      });
    }
  }
  __device__ void FinishInBuffers(const HeldRows<Shape>& rows, bool wanted, float* row_sum) const {
#pragma unroll 1
    for (int first = 0; first < Shape::kWarpRows; first += kGroup) {
      const float* const k_rows = this->RowsOfK(first);
      const auto quad_of_k = [&](int k, int h, float(&x)[4]) { this->ReadQuad(k_rows + k * kWarpColumns, h, x); };
      FinishGroup(first, quad_of_k, row_sum, [&](auto quad_of_p) {
#pragma unroll
        for (int k = 0; k < kGroup; ++k) {
#pragma unroll
          for (int h = 0; h < Shape::kQuads; ++h) {
            const float4 p = quad_of_p(k, h);
            this->WriteQuad({p.x, p.y, p.z, p.w}, Buffer(k), h);
          }
        }
      });
      if (wanted) rows.Store(task_.plan, first, kGroup, Buffer(0));
    }
  }
  // Of a group of rows. quad_of_k(row, quad, its entries of K); put(of P).
  template <class QuadOfK, class Put>
  __device__ void FinishGroup(int first, QuadOfK quad_of_k, float* row_sum, Put put) const {
    float u[kGroup], sums[kGroup] = {};
#pragma unroll
    for (int k = 0; k < kGroup; k += 4) {
      const float4 x = *reinterpret_cast<const float4*>(Line() + first + k);
      u[k] = x.x, u[k + 1] = x.y, u[k + 2] = x.z, u[k + 3] = x.w;
    }
    put([&](int k, int h) {
      float v[4], p[4];
      this->ReadQuad(Vector() + FirstColumn(), h, v);
      quad_of_k(k, h, p);
#pragma unroll
      for (int c = 0; c < 4; ++c) p[c] = p[c] * u[k] * v[c];
      sums[k] += (p[0] + p[1]) + (p[2] + p[3]);
      return make_float4(p[0], p[1], p[2], p[3]);
    });
    const float sum = Scatter<kGroup>(sums, lane_);
    if (lane_ / kGroup == first / kGroup) *row_sum = sum;
  }

  // Backward: where dL/dP streams, its first group comes to the buffer ahead, and each row that has been read makes
  // place for one of the next group.
  __device__ bool Streams(const HeldRows<Shape>& rows) const {
    return rows.Quads() && task_.cotangent.dtype == DType::kFloat32;
  }
  __device__ void BeginStream() const {
    const HeldRows<Shape> rows = Rows();
    if (Streams(rows)) rows.Fetch(task_.cotangent, 0, kGroup, Buffer(0));
  }
  // FinishForward of a group of rows of K in shared memory, dL/dP's in the buffer. P goes straight to memory, where
  // Quads(), or into the buffer.
  __device__ void FinishGroupAndBars(const HeldRows<Shape>& rows, int first, const float* k_rows, bool wanted,
                                     float* row_sum, float* row_bar, float (&col_bars)[C]) const {
#pragma unroll 1
    for (int part = 0; part < kGroup; part += kPart) {
      FinishPart(first, part, k_rows, row_sum, row_bar, col_bars, [&](auto quad_of) {
        auto sink = rows.To(task_.plan, first + part);
        if (!wanted) sink.rows = 0;
        if (!rows.Quads()) {
#pragma unroll
          for (int h = 0; h < Shape::kQuads; ++h) {  // By quads: registers have room for no more.
#pragma unroll
            for (int e = 0; e < kPart; ++e) {
              const float4 p = quad_of(e, h);
              this->WriteQuad({p.x, p.y, p.z, p.w}, Buffer(part + e), h);
            }
          }
        } else {
          rows.template PutRows<kPart>(sink, quad_of);
        }
      });
      if (!Streams(rows) || first + kGroup == Shape::kWarpRows) continue;
#pragma unroll
      for (int k = part; k < part + kPart; ++k) rows.FetchRow(task_.cotangent, first + kGroup + k, Buffer(k));
    }
  }
  // put(row of the part, quad of it; that of P).
  template <class Put>
  __device__ void FinishPart(int first, int part, const float* k_rows, float* row_sum, float* row_bar,
                             float (&col_bars)[C], Put put) const {
    float sums[kPart] = {}, bars[kPart] = {};
    put([&](int e, int h) {
      const int k = part + e;
      float v[4], p[4], d[4];
      const float u = Line()[first + k];
      this->ReadQuad(Vector() + FirstColumn(), h, v);
      this->ReadQuad(k_rows + k * kWarpColumns, h, p);
      this->ReadQuad(Buffer(k), h, d);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        p[c] = p[c] * u * v[c];
        sums[e] += p[c];
        const float bar = FirstRow() + first + k < Side() && Inside(4 * h + c) ? d[c] * p[c] : 0.0f;
        bars[e] += bar;
        col_bars[4 * h + c] += bar;
      }
      return make_float4(p[0], p[1], p[2], p[3]);
    });
    const float sum = Scatter<kPart>(sums, lane_), bar = Scatter<kPart>(bars, lane_);
    if (lane_ / kPart == (first + part) / kPart) *row_sum = sum, *row_bar = bar;
  }
  // Results of rows from `first` on: to where they go or, where that is not by quads, by way of the buffer.
  template <int kCount>
  __device__ void PutRows(const HeldRows<Shape>& rows, const Output& output, int first, const float (&x)[kCount][C],
                          float* buffer) const {
    const auto quad_of = [&](int k, int h) {
      return make_float4(x[k][4 * h], x[k][4 * h + 1], x[k][4 * h + 2], x[k][4 * h + 3]);
    };
    if (!rows.Quads()) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) Write(x[k], buffer + k * kWarpColumns);
      rows.Store(output, first, kCount, buffer);
    } else {
      rows.template PutRows<kCount>(rows.To(output, first), quad_of);
    }
  }

  // ---- A softmax before all of it, backward -----------------------------------------------------------------------
  // The softmax in place of a row of logits.
  __device__ void ToSoftmax(int row, float* logits, float (&s)[C]) const {
    const float shift = __shfl_sync(kFullMask, shift_, row), scale = __shfl_sync(kFullMask, scale_, row);
    Read(logits, s);
#pragma unroll
    for (int c = 0; c < C; ++c) {
      s[c] = FirstRow() + row < Side() && Inside(c) ? Exp2(fmaf(kLog2E, s[c], shift)) * scale : 0.0f;
    }
    Write(s, logits);
  }
  // dL/dlogits in place of dL/dsoftmax. total: its product with the softmax, a row in shared memory, on the row's lane.
  __device__ void FinishRow(float total, int row, const float* softmax, float (&g)[C], float* infinite) const {
    float s[C];
    const float mean = __shfl_sync(kFullMask, total, row);
    Read(softmax, s);
#pragma unroll
    for (int c = 0; c < C; ++c) {
      g[c] = s[c] * (g[c] - mean);
      *infinite = fmaf(g[c], 0.0f, *infinite);
    }
  }

  float u_ = 0;  // Of the own row.
  float row_sum_ = 0;
};

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_FORWARD_CUH_
