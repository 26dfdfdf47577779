// Sides from 33 to 1,024, and many rows of few columns: a block solves a member, float32 in the linear domain. K =
// exp(W - row maximum) is kept in registers and shared memory where it fits, else in the workspace, from which L2
// serves it; an iteration reads it once.
//
// A warp takes a row: its lanes hold every 32nd column of v, the row of K, and of the column sums that the warp
// gathers. So a row's sum, its scaling u_i and its share u_i K_ij of the column sums need K_ij once.
//
// Here: what a member has in memory, its marginals, its start, and a pass over its rows and columns. What is made of
// them: normalization_stream.cuh.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_STREAM_BASE_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_STREAM_BASE_CUH_

#include "kernels/cuda/normalization_stream_shape.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

// A member's memory and the steps that all of its course is made of.
template <class Shape>
class StreamBase {
 public:
  static constexpr int C = Shape::C, W = Shape::kWarpCount, kColumns = Shape::kColumns;
  static constexpr int kKept = Shape::kKept, kStored = Shape::kStored;

 protected:
  __device__ StreamBase(const Task& task, float* shared, float* slot)
      : task_(task),
        lane_(threadIdx.x % 32),
        warp_(WarpNumber()),
        stored_(shared),
        parts_(stored_ + W * kStored * kColumns),
        v_(parts_ + W * kColumns),
        c_(v_ + kColumns),
        col_bar_(c_ + kColumns),
        v_now_(col_bar_ + kColumns),
        u_(v_now_ + kColumns),
        r_(u_ + task.rows),
        next_u_(r_ + task.rows),
        row_bar_(next_u_ + task.rows),
        scalars_(row_bar_ + task.rows),
        k_(slot),
        history_(slot + StreamMatrixRows<Shape>(task.rows) * kColumns) {}

  // ---- Tensors: a row of the kernel's at a time, every 32nd number a lane's, what lies beyond 0 ---------------------
  __device__ float Load(const Tensor& tensor, int64_t size, int64_t at) const {
    return LoadAs<float>(tensor.dtype, tensor.data, (tensor.shared ? 0 : member_ * size) + at);
  }
  // Row i of n x m matrices; `size` columns of it are there.
  __device__ void LoadRow(const Tensor& tensor, int n, int m, int i, int size, float (&x)[C]) const {
    const int64_t at = PlaceOf(tensor.shared ? 0 : member_, n, m, i), step = task_.transposed ? m : 1;
    switch (tensor.dtype) {
      case DType::kFloat32:
        return LoadLine(static_cast<const float*>(tensor.data) + at, step, size, x);
      case DType::kFloat64:
        return LoadLine(static_cast<const double*>(tensor.data) + at, step, size, x);
      case DType::kFloat16:
        return LoadLine(static_cast<const __half*>(tensor.data) + at, step, size, x);
      case DType::kBFloat16:
        return LoadLine(static_cast<const __nv_bfloat16*>(tensor.data) + at, step, size, x);
    }
  }
  __device__ void StoreRow(const Output& output, int n, int m, int i, int size, const float (&x)[C]) const {
    const int64_t at = PlaceOf(member_, n, m, i), step = task_.transposed ? m : 1;
    if (output.dtype == DType::kFloat32) {
      float* to = static_cast<float*>(output.data) + at;
#pragma unroll
      for (int c = 0; c < C; ++c) {
        if (lane_ + 32 * c < size) to[(lane_ + 32 * c) * step] = x[c];
      }
      return;
    }
#pragma unroll
    for (int c = 0; c < C; ++c) {
      if (lane_ + 32 * c < size) StoreAs(output.dtype, output.data, at + (lane_ + 32 * c) * step, x[c]);
    }
  }
  __device__ void LoadLogits(int i, float (&w)[C]) const {
    const int bin = task_.has_dustbin ? 1 : 0, size = task_.cols - bin;
    LoadRow(task_.logits, task_.n - bin, task_.m - bin, min(i, task_.rows - bin - 1), size, w);
    if (bin == 0) return;
    const float score = Load(task_.dustbin, 1, 0);
#pragma unroll
    for (int c = 0; c < C; ++c) {
      if (i == task_.rows - 1 || lane_ + 32 * c == size) w[c] = score;
    }
  }
  __device__ int64_t PlaceOf(int64_t member, int n, int m, int i) const {
    return member * n * m + (task_.transposed ? int64_t{i} : int64_t{i} * m);
  }
  template <class T>
  __device__ void LoadLine(const T* from, int64_t step, int size, float (&x)[C]) const {
#pragma unroll
    for (int c = 0; c < C; ++c) x[c] = lane_ + 32 * c < size ? static_cast<float>(from[(lane_ + 32 * c) * step]) : 0.0f;
  }

  // ---- Sums over the block, to all threads; order what was written before -------------------------------------------
  __device__ float BlockSum(float x) { return OverBlock<Sum, W>(x, scalars_); }
  __device__ float BlockMax(float x) { return OverBlock<Max, W>(x, scalars_); }
  template <class Term>
  __device__ float SumOf(int size, Term term) {
    float sum = 0;
    for (int k = threadIdx.x; k < size; k += Shape::kThreadCount) sum += term(k);
    return BlockSum(sum);
  }

  // ---- Marginals, scaled to the total `rows` ------------------------------------------------------------------------
  __device__ void LoadMarginals() {
    const int bin = task_.has_dustbin ? 1 : 0;
    LoadSide(task_.transposed ? task_.column_marginals : task_.row_marginals, task_.rows - bin, task_.rows, r_);
    LoadSide(task_.transposed ? task_.row_marginals : task_.column_marginals, task_.cols - bin, kColumns, c_);
    float row_total = SumOf(task_.rows - bin, [&](int k) { return r_[k]; });
    float col_total = SumOf(task_.cols - bin, [&](int k) { return c_[k]; });
    if (bin == 1) {
      if (threadIdx.x == 0) {
        r_[task_.rows - 1] = col_total;
        c_[task_.cols - 1] = row_total;
      }
      row_total = col_total = row_total + col_total;
      __syncthreads();  // The dustbin's are there.
    }
    range_ = 0;
    if (task_.own_marginals || bin == 1) range_ = LogRange(r_, task_.rows) + LogRange(c_, task_.cols);
    const float total = static_cast<float>(task_.rows);
    row_scale_ = total / row_total;
    col_scale_ = total / col_total;
    for (int k = threadIdx.x; k < task_.rows; k += Shape::kThreadCount) r_[k] *= row_scale_;
    for (int k = threadIdx.x; k < task_.cols; k += Shape::kThreadCount) c_[k] *= col_scale_;
    const float guard = static_cast<float>(task_.guard_value);
    const float row_guard = guard * col_scale_, col_guard = guard * row_scale_;
    const bool add = task_.guard == Guard::kAdd, most = task_.guard == Guard::kMax;
    row_add_ = add ? row_guard : 0;
    col_add_ = add ? col_guard : 0;
    row_most_ = most ? row_guard : kSmallest;
    col_most_ = most ? col_guard : kSmallest;
    guards_fit_ =
        task_.guard == Guard::kNone || (fmaxf(row_guard, col_guard) <= 1e6f && fminf(row_guard, col_guard) >= 1e-12f);
    __syncthreads();  // The marginals are there.
  }
  __device__ void LoadSide(const Tensor& tensor, int size, int padded, float* x) {
    for (int k = threadIdx.x; k < padded; k += Shape::kThreadCount) {
      x[k] = k >= size ? 0.0f : tensor.data == nullptr ? 1.0f : Load(tensor, size, k);
    }
    __syncthreads();  // They are there.
  }
  __device__ float LogRange(const float* x, int size) {
    float low = FLT_MAX, high = 0;
    for (int k = threadIdx.x; k < size; k += Shape::kThreadCount) {
      low = fminf(low, x[k]);
      high = fmaxf(high, x[k]);
    }
    high = BlockMax(high);
    low = -BlockMax(-low);
    return low > 0 ? logf(high / low) : FLT_MAX;
  }

  // ---- Start --------------------------------------------------------------------------------------------------------
  struct RowStart {  // K = scale e^(max(W, floor) - top) + added
    float top, scale, added;
  };
  __device__ RowStart StartOf(int i, float (&w)[C]) const {
    float top = task_.floor32;
    LoadLogits(i, w);
#pragma unroll
    for (int c = 0; c < C; ++c) {
      if (lane_ + 32 * c < task_.cols) top = fmaxf(top, w[c]);
    }
    RowStart start = {WarpMax(top), 1, 0};
    if (task_.softmax) {
      float sum = 0;
#pragma unroll
      for (int c = 0; c < C; ++c) {
        if (lane_ + 32 * c < task_.cols) sum += Exp(Raised(w[c], task_.floor32) - start.top);
      }
      start.scale = r_[i] / (row_scale_ * WarpSum(sum));
      start.added = static_cast<float>(task_.offset);
    } else if (task_.offset > 0) {
      const float log_offset = logf(static_cast<float>(task_.offset));
      start.top = fmaxf(start.top, log_offset);
      start.added = Exp(log_offset - start.top);
    }
    return start;
  }
  // Number k of this warp's rows, where it has rows of its own: the first kKept in registers, then kStored.
  __device__ int RowOf(int k) const { return warp_ * Shape::kWarpRows + k; }
  __device__ float* Stored(int k) const { return stored_ + (warp_ * kStored + k) * kColumns; }
  // A row of K in memory, from the start on.
  __device__ float* RowOfK(int i) const {
    if constexpr (kStored > 0) {
      const int k = i % Shape::kWarpRows;
      if (k >= kKept) return stored_ + (i / Shape::kWarpRows * kStored + k - kKept) * kColumns;
    }
    return k_ + int64_t{i} * kColumns;
  }

  __device__ bool Start() {
    const bool plain = !task_.softmax && task_.offset == 0;
    float narrow = 0, smallest = 1, lowest_row = FLT_MAX, lowest_logit = FLT_MAX;
    const auto one = [&](int i, float(&k)[C]) {
      float w[C];
      const RowStart start = StartOf(i, w);
      lowest_row = fminf(lowest_row, start.top);
#pragma unroll
      for (int c = 0; c < C; ++c) {
        const bool inside = lane_ + 32 * c < task_.cols;
        const float x = Raised(w[c], task_.floor32) - start.top;
        k[c] = inside ? fmaf(start.scale, Exp(x), start.added) : 0.0f;
        if (inside) {
          lowest_logit = fminf(lowest_logit, w[c]);
          narrow = fminf(narrow, x);
          smallest = fminf(smallest, k[c]);
        }
      }
      if (lane_ != 0) return;
      u_[i] = task_.softmax                 ? row_scale_
              : task_.guard != Guard::kNone ? expf(fminf(start.top, kGeneralRange)) * col_scale_
                                            : 1.0f;
    };
    const int first = Shape::kResident ? RowOf(0) : warp_, step = Shape::kResident ? 1 : W;
    const int end = Shape::kResident ? RowOf(Shape::kWarpRows) : task_.rows;
#pragma unroll 1
    for (int i = first; i < end; i += step) {
      float row[C] = {};
      if (i < task_.rows) one(i, row);
      float* const to = RowOfK(i) + lane_;
#pragma unroll
      for (int c = 0; c < C; ++c) to[32 * c] = row[c];
    }
    if constexpr (kKept > 0) {
      __syncwarp();  // K is there.
#pragma unroll
      for (int k = 0; k < kKept; ++k) {
#pragma unroll
        for (int c = 0; c < C; ++c) kept_[k][c] = k_[int64_t{RowOf(k)} * kColumns + lane_ + 32 * c];
      }
    }
    for (int j = threadIdx.x; j < kColumns; j += Shape::kThreadCount) v_[j] = j < task_.cols ? 1 : 0;
    const float range = kGeneralRange - range_;
    bool safe = guards_fit_ && range > 0 && (plain ? narrow >= -range : smallest >= Exp(-range));
    if (task_.guard != Guard::kNone && !task_.softmax) safe = safe && lowest_row >= kLowestRow;
    if (task_.unrolled) safe = safe && lowest_logit > task_.floor32;
    safe = __syncthreads_and(safe);
    if (task_.unrolled && safe) {
      Remember(0);
      ClearPadding();
    }
    return safe;
  }

  // ---- A pass: row sums with x, what `row` makes of them, and the columns' sums of it in parts_ ---------------------
  // row(i, sum), on one lane, returns the multiplier of the row.
  template <class RowFunction>
  __device__ void Pass(const float* x, RowFunction row) {
    float xs[C], sums[C];
#pragma unroll
    for (int c = 0; c < C; ++c) {
      xs[c] = x[lane_ + 32 * c];
      sums[c] = 0;
    }
    if constexpr (kKept > 0) {
      float s[kKept];
#pragma unroll
      for (int k = 0; k < kKept; ++k) {
        s[k] = 0;
#pragma unroll
        for (int c = 0; c < C; ++c) s[k] = fmaf(kept_[k][c], xs[c], s[k]);
      }
      const float sum = Scatter<kKept>(s, lane_);
      const int i = RowOf(lane_ % kKept);
      const float multiplier = lane_ < kKept && i < task_.rows ? row(i, sum) : 0.0f;
#pragma unroll
      for (int k = 0; k < kKept; ++k) {
        const float one = __shfl_sync(kFullMask, multiplier, k);
#pragma unroll
        for (int c = 0; c < C; ++c) sums[c] = fmaf(one, kept_[k][c], sums[c]);
      }
    }
    if constexpr (kStored > 0) {
#pragma unroll 1
      for (int k = 0; k < kStored; k += 4) {
        PassRows<4>(RowOf(kKept + k), 1, 4, Stored(k) + lane_, kColumns, xs, sums, row);
      }
    }
    if constexpr (!Shape::kResident) {
      constexpr int kTogether = Shape::kTogether;
#pragma unroll 1
      for (int i = warp_; i < task_.rows; i += W * kTogether) {
        const int there = (task_.rows - i + W - 1) / W;
        PassRows<kTogether>(i, W, there, k_ + int64_t{i} * kColumns + lane_, int64_t{W} * kColumns, xs, sums, row);
      }
    }
#pragma unroll
    for (int c = 0; c < C; ++c) parts_[warp_ * kColumns + lane_ + 32 * c] = sums[c];
    __syncthreads();  // The parts are there.
  }
  // Rows i, i + step, ... of K in memory, `pitch` apart. Past those that are `there`: the last one's, and a multiplier
  // of 0.
  template <int kTogether, class RowFunction>
  __device__ void PassRows(int i, int step, int there, const float* from, int64_t pitch, const float (&xs)[C],
                           float (&sums)[C], RowFunction row) {
    float k[kTogether][C], s[kTogether];
#pragma unroll
    for (int e = 0; e < kTogether; ++e) {
#pragma unroll
      for (int c = 0; c < C; ++c) k[e][c] = from[(e == 0 ? 0 : min(e, there - 1)) * pitch + 32 * c];
    }
#pragma unroll
    for (int e = 0; e < kTogether; ++e) {
      s[e] = 0;
#pragma unroll
      for (int c = 0; c < C; ++c) s[e] = fmaf(k[e][c], xs[c], s[e]);
    }
    const float sum = Scatter<kTogether>(s, lane_);  // Lane e takes row e.
    const int mine = i + step * lane_;
    const float multiplier = lane_ < kTogether && mine < task_.rows ? row(mine, sum) : 0.0f;
#pragma unroll
    for (int e = 0; e < kTogether; ++e) {
      const float one = __shfl_sync(kFullMask, multiplier, e);
#pragma unroll
      for (int c = 0; c < C; ++c) sums[c] = fmaf(one, k[e][c], sums[c]);
    }
  }
  // column(j, sum) for each column; then all is there. Returns this thread's sum of what it returns.
  template <class ColumnOf>
  __device__ float Columns(ColumnOf column) {
    float total = 0;
    for (int j = threadIdx.x; j < task_.cols; j += Shape::kThreadCount) {
      float sum = parts_[j];
#pragma unroll
      for (int w = 1; w < W; ++w) sum += parts_[w * kColumns + j];
      total += column(j, sum);
    }
    __syncthreads();  // What the columns wrote is there, the parts are free.
    return total;
  }

  // ---- History: the vectors of all iterations -----------------------------------------------------------------------
  __device__ float* HistoryU(int t) const { return history_ + int64_t{t} * 2 * (task_.rows + kColumns); }
  __device__ float* HistoryX(int t) const { return HistoryU(t) + task_.rows; }
  __device__ float* HistoryV(int t) const { return HistoryX(t) + task_.rows; }
  __device__ float* HistoryY(int t) const { return HistoryV(t) + kColumns; }
  __device__ void Remember(int t) {
    for (int i = threadIdx.x; i < task_.rows; i += Shape::kThreadCount) HistoryU(t)[i] = u_[i];
    for (int j = threadIdx.x; j < kColumns; j += Shape::kThreadCount) HistoryV(t)[j] = v_[j];
  }
  // Columns that there are not, which the gradient reads and drops.
  __device__ void ClearPadding() {
    const int padding = kColumns - task_.cols;
    for (int k = threadIdx.x; k < task_.iterations * padding; k += Shape::kThreadCount) {
      const int t = 1 + k / padding, j = task_.cols + k % padding;
      HistoryV(t)[j] = HistoryY(t)[j] = 0;
    }
  }

  const Task& task_;
  const int lane_;
  const int warp_;
  int64_t member_ = 0;

  // Shared memory.
  float* const stored_;  // [W, kStored, kColumns]: the rows of K that are kept there
  float* const parts_;   // [W, kColumns]: the warps' sums of columns
  float* const v_;       // [kColumns]
  float* const c_;       // Marginals of the columns.
  float* const col_bar_;
  float* const v_now_;
  float* const u_;  // [rows]
  float* const r_;  // Marginals of the rows.
  float* const next_u_;
  float* const row_bar_;
  float* const scalars_;  // [W]

  // The workspace.
  float* const k_;        // [rows, kColumns]: the rows of K that are not stored_
  float* const history_;  // u, x, v, y of each iteration

  float kept_[kKept > 0 ? kKept : 1][C];
  float row_scale_ = 1;
  float col_scale_ = 1;
  float range_ = 0;
  float row_add_ = 0;
  float col_add_ = 0;
  float row_most_ = 0;
  float col_most_ = 0;
  bool guards_fit_ = true;
};

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_STREAM_BASE_CUH_
