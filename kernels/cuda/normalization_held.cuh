// The course of a member that is held on the chip: iterations, P and its sums, the iterations backward, the gradient;
// and the kernel.
//
// Backward, formulas as in normalization_registers.cuh. The reverse of an iteration is a pass with other vectors. The
// vectors of all iterations go to the workspace; where the passes are done the registers of K make room for the
// gradient, a product of these histories, and its factor K is computed once more from the logits, bit by bit the same.
// Of the implicit modes a step of conjugate gradients is a pass, too.
//
// Recipes that begin with a softmax: formulas as in normalization_plain_softmax.cuh. Those that begin with columns have
// given rows at first likewise, u = e^(row maximum), which are 1 of exp W, and end with a step of rows more. A guard, a
// least sum, is left to another kernel where it acts: by the first sums of both, as GuardRests has it.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_CUH_

#include "kernels/cuda/normalization_held_base.cuh"
#include "kernels/cuda/normalization_plain_softmax.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template <class Shape, Work kWork, Lead kLead>
class Held : private HeldBase<Shape, kWork != Work::kForward> {
  using Base = HeldBase<Shape, kWork != Work::kForward>;
  static constexpr bool kUnrolled = kWork == Work::kUnrolled, kImplicit = kWork == Work::kImplicit;
  static constexpr bool kBackward = kUnrolled || kImplicit;
  static constexpr bool kSoftmax = kLead == Lead::kSoftmax, kColumnsFirst = kLead == Lead::kColumns;
  static constexpr bool kGiven = kLead != Lead::kRows;  // The first rows' scalings are no step's.

 public:
  __device__ Held(const Task& task, float* slot, uint64_t (&barriers)[kHeldBarriers], int rank, int ranks)
      : Base(task, slot, barriers, rank, ranks) {
    for (int j = threadIdx.x; j < kColumns; j += Shape::kThreadCount)
      Vector()[j] = 0;  // Nobody sends what lies beyond.
    if (Shape::kCluster && threadIdx.x == 0) InitReceiving(barriers);
    if constexpr (Shape::kCluster) this->PlanRoute();
    __syncthreads();                               // All is set up,
    if constexpr (Shape::kCluster) SyncCluster();  // in all blocks.
  }

  // `tally`: in shared memory.
  __device__ void Solve(int64_t member, LaneTally* tally) {
    member_ = member;
    bool safe = this->template Start<kLead>();
    const float col_error = Iterate(&safe);
    float row_bar = 0, col_bars[C];
    const float row_error = FinishForward(&row_bar, col_bars);
    if constexpr (kImplicit) safe = SolveImplicit(row_bar, col_bars) && safe;
    this->KeepTotals(row_error, col_error, safe);
    bool finite = true;
    if constexpr (kUnrolled) {
      Reverse(row_bar, col_bars);
      finite = FinishGradient();
    } else if constexpr (kImplicit) {
      finite = FinishImplicit();
    }
    const float4 totals = this->MemberTotals(finite);
    if (rank_ == 0 && threadIdx.x == 0) {
      const bool good = totals.z == 0 && totals.x + totals.y < FLT_MAX;
      task_.redo[member] = good ? 0 : 1;
      if (!good) tally->flags |= Tally::kRedo;
      if (good && totals.w != 0) tally->flags |= Tally::kNotFinite;
      // Where columns come first Certify takes them for rows.
      const float first_error = kColumnsFirst ? totals.y : totals.x, second_error = kColumnsFirst ? totals.x : totals.y;
      if (good) Certify(task_, member, true, first_error, second_error, task_.iterations, tally);
    }
    __syncthreads();  // Shared memory and the slot are free.
  }

 private:
  using Base::across_;
  using Base::Buffer;
  using Base::C;
  using Base::Column;
  using Base::Columns;
  using Base::down_;
  using Base::Error;
  using Base::FirstColumn;
  using Base::FirstRow;
  using Base::Further;
  using Base::HasRow;
  using Base::HistoryU;
  using Base::HistoryV;
  using Base::HistoryX;
  using Base::HistoryY;
  using Base::Inside;
  using Base::IsFirstOwner;
  using Base::kColumns;
  using Base::kGroup;
  using Base::kHalf;
  using Base::kWarpColumns;
  using Base::lane_;
  using Base::Line;
  using Base::member_;
  using Base::OwnColumn;
  using Base::OwnRow;
  using Base::Pass;
  using Base::rank_;
  using Base::Read;
  using Base::ReadVector;
  using Base::Remember;
  using Base::Rows;
  using Base::scale_;
  using Base::shift_;
  using Base::Side;
  using Base::task_;
  using Base::Vector;
  using Base::warp_;
  using Base::Write;

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
  static constexpr int kPart = kBackward ? 2 : kGroup;  // Rows whose sums are combined together.
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
    // A loop, not all rows at once: what is executed once waits for its instructions.
#pragma unroll 1
    for (int first = 0; first < Shape::kWarpRows; first += kGroup) {
      if constexpr (kBackward) {
        rows.Fetch(task_.cotangent, first, kGroup, Buffer(0));
        const float* const k_rows = this->RowsOfK(first);
        rows.Arrived();
        FinishGroup(rows, first, wanted, &row_sum, row_bar, col_bars,
                    [&](int k, int h, float(&x)[4]) { this->ReadQuad(k_rows + k * kWarpColumns, h, x); });
      } else {
        this->WithGroup(first, [&](auto group) {
          FinishGroup(rows, first, wanted, &row_sum, row_bar, col_bars,
                      [&](int k, int h, float(&x)[4]) { this->QuadOfK(group.value + k, h, x); });
        });
      }
      if (wanted && (kBackward || !rows.Quads())) rows.Store(task_.plan, first, kGroup, Buffer(0));
      __syncwarp();  // The buffers are free.
    }
    row_sum = this->template AcrossWarps<Sum>(row_sum, 0);
    if constexpr (kBackward) *row_bar = this->template AcrossWarps<Sum>(*row_bar, 1);
    row_sum_ = row_sum;
    if (across_ != 0 || !HasRow()) return 0;
    StoreSum(task_.row_sums, OwnRow(), row_sum);
    return fabsf(row_sum - 1);
  }

  // FinishForward of a group of rows. quad_of_k(row, quad, its entries of K).
  template <class QuadOfK>
  __device__ void FinishGroup(const HeldRows<Shape>& rows, int first, bool wanted, float* row_sum, float* row_bar,
                              float (&col_bars)[C], QuadOfK quad_of_k) const {
    const auto sink = rows.To(task_.plan, first);
#pragma unroll
    for (int part = 0; part < kGroup; part += kPart) {
      float sums[kPart] = {}, bars[kPart] = {};
#pragma unroll
      for (int h = 0; h < Shape::kQuads; ++h) {  // By quads: registers have room for no more.
        float v[4];
        this->ReadQuad(Vector() + FirstColumn(), h, v);
#pragma unroll
        for (int e = 0; e < kPart; ++e) {
          const int k = part + e;
          float p[4], d[4] = {};
          const float u = Line()[first + k];
          quad_of_k(k, h, p);
          if constexpr (kBackward) this->ReadQuad(Buffer(k), h, d);
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            p[c] = p[c] * u * v[c];
            sums[e] += p[c];
            if (kBackward) {
              const float bar = FirstRow() + first + k < Side() && Inside(4 * h + c) ? d[c] * p[c] : 0.0f;
              bars[e] += bar;
              col_bars[4 * h + c] += bar;
            }
          }
          if constexpr (kBackward) {  // Registers are short: through the buffer.
            this->WriteQuad(p, Buffer(k), h);
          } else if (wanted) {
            Give(rows, sink, k, h, p, Buffer(0));
          }
        }
      }
      const float sum = Scatter<kPart>(sums, lane_), bar = kBackward ? Scatter<kPart>(bars, lane_) : 0.0f;
      if (lane_ / kPart == (first + part) / kPart) *row_sum = sum, *row_bar = bar;
    }
  }
  // Results, of row k quad h: to where they go or, where that is not by quads, to the buffer, to be stored from there.
  __device__ void Give(const HeldRows<Shape>& rows, const typename HeldRows<Shape>::Sink& sink, int k, int h,
                       const float (&x)[4], float* buffer) const {
    if (rows.Quads()) return rows.Put(sink, k, h, make_float4(x[0], x[1], x[2], x[3]));
    this->WriteQuad(x, buffer + k * kWarpColumns, h);
  }
  __device__ void GiveRow(const HeldRows<Shape>& rows, const typename HeldRows<Shape>::Sink& sink, int k,
                          const float (&x)[C], float* buffer) const {
#pragma unroll
    for (int h = 0; h < Shape::kQuads; ++h) {
      const float quad[4] = {x[4 * h], x[4 * h + 1], x[4 * h + 2], x[4 * h + 3]};
      Give(rows, sink, k, h, quad, buffer);
    }
  }

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
      const auto sink = rows.To(task_.gradient, first);
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
        for (int k = 0; k < kHalf; ++k) {
          FinishRow(total, first + k, Buffer(k), g[k], &infinite);
          GiveRow(rows, sink, k, g[k], Buffer(0));
        }
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
        GiveRow(rows, sink, k, g[k], Buffer(0));  // The buffer: where the lane's logits were.
      }
      if (!rows.Quads()) rows.Store(task_.gradient, first, kHalf, Buffer(0));
    }
    return infinite == 0;
  }
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
    const bool comes = task_.logits.dtype == DType::kFloat32;  // A row with each iteration.
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
      if (comes && t <= kHalf) rows.Fetch(task_.logits, first + t - 1, 1, Buffer(t - 1));
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
    if (comes && last < kHalf) rows.Fetch(task_.logits, first + last, kHalf - last, Buffer(last));
  }

  // ---- The implicit modes -------------------------------------------------------------------------------------------
  // As in normalization_implicit.cuh, by conjugate gradients in float32. Columns of P sum up to 1, or to kSum. A thread
  // has some columns' numbers, in every block of a cluster the same; they are kept where rows come and go.
  static constexpr int kMine = kColumns / Shape::kThreadCount;
  enum Number { kX, kResidual, kDirection, kV, kSum };
  __device__ float& Mine(Number number, int k) const { return Buffer(number)[32 * k + lane_]; }
  __device__ static int MyColumn(int k) { return static_cast<int>(threadIdx.x) + Shape::kThreadCount * k; }
  // The vector becomes number(k), of the own columns.
  template <class NumberOf>
  __device__ void SetVector(NumberOf number) {
#pragma unroll
    for (int k = 0; k < kMine; ++k) Vector()[MyColumn(k)] = MyColumn(k) < Side() ? number(k) : 0.0f;
    __syncthreads();  // The vector is there.
  }
  // Sums over the block. Uses of the same `first` need a barrier between them, and a pass.
  template <int kCount>
  __device__ void BlockSums(float (&x)[kCount], int first) const {
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      x[e] = WarpSum(x[e]);
      if (lane_ == 0) Line()[first + e] = x[e];
    }
    __syncthreads();  // The warps' are there.
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      x[e] = 0;
#pragma unroll
      for (int w = 0; w < Shape::W; ++w) x[e] += Line()[32 * (w - this->warp_) + first + e];
    }
  }

  // alpha, and v beta in the vector. False: too ill-conditioned for float32.
  __device__ bool SolveImplicit(float row_bar, const float (&col_bars)[C]) {
    constexpr int kMostSteps = 64;
    constexpr float kSolved = 1e-7f, kLeastCurvature = 0.1f;
    inverse_ = !HasRow() ? 0.0f : task_.backward == BackwardMode::kImplicitUnit ? 1.0f : 1 / row_sum_;
    float x[C], q[C];
    ReadVector(x);
    __syncthreads();  // The rows' parts are read.
    if constexpr (kColumnsFirst) {
      (void)Pass(x, q, [&](float) { return u_; });
#pragma unroll
      for (int k = 0; k < kMine; ++k) Mine(kV, k) = Vector()[MyColumn(k)];
      Columns(q, [](int, float sum) { return sum; });
      const bool unit = task_.backward == BackwardMode::kImplicitUnit;
#pragma unroll
      for (int k = 0; k < kMine; ++k) Mine(kSum, k) = unit ? 1.0f : Mine(kV, k) * Vector()[MyColumn(k)];
      SetVector([&](int k) { return Mine(kV, k); });
    }
    const float side = row_bar * inverse_ * u_;
    (void)Pass(x, q, [&](float) { return side; });
#pragma unroll
    for (int c = 0; c < C; ++c) q[c] = fmaf(-x[c], q[c], col_bars[c]);
#pragma unroll
    for (int k = 0; k < kMine; ++k) Mine(kV, k) = Vector()[MyColumn(k)];
    Columns(q, [](int, float sum) { return sum; });
    // The residual: the right-hand side without its part along the constant.
    float total[1] = {};
#pragma unroll
    for (int k = 0; k < kMine; ++k) total[0] += Vector()[MyColumn(k)];
    BlockSums(total, 0);
    float norm[1] = {};
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
      const float residual = MyColumn(k) < Side() ? Vector()[MyColumn(k)] - total[0] / Side() : 0.0f;
      Mine(kX, k) = 0;
      Mine(kResidual, k) = Mine(kDirection, k) = residual;
      norm[0] = fmaf(residual, residual, norm[0]);
    }
    BlockSums(norm, 4);
    const float goal = norm[0] * kSolved * kSolved;
    bool good = norm[0] < FLT_MAX;
#pragma unroll 1
    for (int step = 0; norm[0] > goal && good; ++step) {
      SetVector([&](int k) { return Mine(kV, k) * Mine(kDirection, k); });
      ReadVector(x);
      (void)Pass(x, q, [&](float product) { return u_ * u_ * inverse_ * product; });
      Columns(q, [](int, float product) { return product; });
      float sums[3] = {};  // Of direction * product, direction^2, the product.
      float product[kMine];
#pragma unroll
      for (int k = 0; k < kMine; ++k) {
        const float direction = Mine(kDirection, k);
        const float own = kColumnsFirst ? Mine(kSum, k) * direction : direction;
        product[k] = MyColumn(k) < Side() ? fmaf(-Mine(kV, k), Vector()[MyColumn(k)], own) : 0.0f;
        sums[0] = fmaf(direction, product[k], sums[0]);
        sums[1] = fmaf(direction, direction, sums[1]);
        sums[2] += product[k];
      }
      BlockSums(sums, 0);
      good = step < kMostSteps && sums[0] > kLeastCurvature * sums[1];
      const float stride = norm[0] / sums[0], share = sums[2] / Side();
      float next[1] = {};
#pragma unroll
      for (int k = 0; k < kMine; ++k) {
        const float residual = MyColumn(k) < Side() ? fmaf(-stride, product[k] - share, Mine(kResidual, k)) : 0.0f;
        Mine(kX, k) = fmaf(stride, Mine(kDirection, k), Mine(kX, k));
        Mine(kResidual, k) = residual;
        next[0] = fmaf(residual, residual, next[0]);
      }
      BlockSums(next, 4);
      const float turn = next[0] / norm[0];
#pragma unroll
      for (int k = 0; k < kMine; ++k) Mine(kDirection, k) = fmaf(turn, Mine(kDirection, k), Mine(kResidual, k));
      norm[0] = next[0];
    }
    SetVector([&](int k) { return Mine(kV, k) * Mine(kX, k); });
    ReadVector(x);
    (void)Pass(x, q, [&](float product) {
      alpha_ = fmaf(-u_, product, row_bar) * inverse_;
      return 0.0f;
    });
    return good && norm[0] <= goal;
  }

  // dL/dlogits = (dP - alpha_i - beta_j) P. True: this thread's part is finite.
  __device__ bool FinishImplicit() {
    const HeldRows<Shape> rows = Rows();
    float v[C], shares[C], infinite = 0;
    ReadVector(shares);
    __syncthreads();  // The vector is free.
    SetVector([&](int k) { return Mine(kV, k); });
    ReadVector(v);
    Line()[lane_] = u_;
    __syncwarp();  // The multipliers are there.
#pragma unroll 1
    for (int first = 0; first < Shape::kWarpRows; first += kGroup) {
      rows.Fetch(task_.cotangent, first, kGroup, Buffer(0));
      const float* const k_rows = this->RowsOfK(first);
      rows.Arrived();
#pragma unroll
      for (int k = 0; k < kGroup; ++k) {
        const float u = Line()[first + k], alpha = __shfl_sync(kFullMask, alpha_, first + k);
#pragma unroll
        for (int h = 0; h < Shape::kQuads; ++h) {
          float g[4], d[4];
          this->ReadQuad(k_rows + k * kWarpColumns, h, g);
          this->ReadQuad(Buffer(k), h, d);
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            g[c] *= u * fmaf(d[c] - alpha, v[4 * h + c], -shares[4 * h + c]);
            if (FirstRow() + first + k < Side() && Inside(4 * h + c)) infinite = fmaf(g[c], 0.0f, infinite);
          }
          this->WriteQuad(g, Buffer(k), h);
        }
      }
      if constexpr (kSoftmax) ChainGroup(first, &infinite);
      rows.Store(task_.gradient, first, kGroup, Buffer(0));
      __syncwarp();  // The buffers are free.
    }
    return infinite == 0;
  }

  // From dL/dlog K, a group of rows in the buffer, to dL/dlogits.
  __device__ void ChainGroup(int first, float* infinite) const {
    const float offset = static_cast<float>(task_.offset);
    __syncwarp();  // The rows of K are read.
    Rows().Fetch(task_.logits, first, kGroup, Further(0));
    Rows().Arrived();
    float totals[kGroup];
#pragma unroll
    for (int k = 0; k < kGroup; ++k) {
      float s[C], g[C];
      ToSoftmax(first + k, Further(k), s);
      Read(Buffer(k), g);
      totals[k] = 0;
#pragma unroll
      for (int c = 0; c < C; ++c) {
        g[c] = OfSoftmax<true>(g[c], s[c], offset);
        totals[k] = fmaf(s[c], g[c], totals[k]);
      }
      Write(g, Buffer(k));
    }
    const float total = this->template AcrossWarps<Sum>(Scatter<kGroup>(totals, lane_), first / kGroup % 2);
#pragma unroll
    for (int k = 0; k < kGroup; ++k) {
      float g[C];
      Read(Buffer(k), g);
      FinishRow(total, first + k, Further(k), g, infinite);
      Write(g, Buffer(k));
    }
  }

  float u_ = 0;      // Of the own row.
  float taken_ = 0;  // Of the own row's cotangents, by the last rows' step.
  float row_sum_ = 0, inverse_ = 0, alpha_ = 0;
};

template <class Shape, Work kWork, Lead kLead>
__global__ void __launch_bounds__(Shape::kThreadCount, Shape::kThreadCount == 128 ? 3 : 1)
    HeldKernel(const __grid_constant__ LaunchOf launch) {
#if __CUDA_ARCH__ >= 900
  constexpr bool kRuns = true;
#else
  constexpr bool kRuns = kHeldBeforeHopper<Shape>;
#endif
  if constexpr (kRuns) {
    __shared__ Task task;
    __shared__ uint64_t barriers[kHeldBarriers];
    const int block = LoadTask(launch, &task);
    const int ranks = Shape::kCluster ? task.ranks : 1, rank = block % ranks, clusters = task.blocks / ranks;
    __shared__ LaneTally tally;  // Thread 0's; registers have no room for it.
    if (threadIdx.x == 0) tally = LaneTally();
    Held<Shape, kWork, kLead> held(task, reinterpret_cast<float*>(task.workspace + task.slot_bytes * block), barriers,
                                   rank, ranks);
    for (int64_t member = task.first + block / ranks; member < task.last; member += clusters)
      held.Solve(member, &tally);
    if constexpr (Shape::kCluster) SyncCluster();  // Nobody sends to a block that is gone.
    if (threadIdx.x == 0) StoreTally(task, block, tally.rows, tally.cols, tally.iterations, tally.flags);
  }
}

template <class Shape, Lead kLead>
HeldFunction HeldKernelOf(Work work) {
  return work == Work::kImplicit   ? HeldKernel<Shape, Work::kImplicit, kLead>
         : work == Work::kUnrolled ? HeldKernel<Shape, Work::kUnrolled, kLead>
                                   : HeldKernel<Shape, Work::kForward, kLead>;
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_CUH_
