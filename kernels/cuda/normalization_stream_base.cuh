// Sides from 33 to 1,024, and many rows of few columns: a block solves a member, or a cluster of blocks that has its
// rows among them, float32 in the linear domain. K = exp(W - row maximum) is kept in registers and shared memory where
// it fits, else in the workspace, from which L2 serves it; an iteration reads it once.
//
// A warp takes a row: its lanes hold every 32nd column of v, the row of K, and of the column sums that the warp
// gathers. So a row's sum, its scaling u_i and its share u_i K_ij of the column sums need K_ij once.
//
// Here: what a member has in memory, its marginals, its start, and a pass over its rows and columns. What is made of
// them: normalization_stream.cuh.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_STREAM_BASE_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_STREAM_BASE_CUH_

#include <type_traits>

#include "kernels/cuda/normalization_stream_cluster.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

// What a member of one block has instead of a cluster.
struct NoCluster {
  __device__ NoCluster(uint64_t (&)[kStreamBarriers], int, int) {}
  __device__ void Leave() const {}
};

// A member's memory and the steps that all of its course is made of.
template <class Shape>
class StreamBase {
 public:
  static constexpr int C = Shape::C, W = Shape::kWarpCount, kColumns = Shape::kColumns;
  static constexpr int kKept = Shape::kKept, kStored = Shape::kStored;

 protected:
  __device__ StreamBase(const Task& task, float* slot, uint64_t (&barriers)[kStreamBarriers])
      : task_(task),
        lane_(threadIdx.x % 32),
        warp_(WarpNumber()),
        cluster_(barriers, task.rows, task.cols),
        k_(slot),
        history_(slot + StreamMatrixRows<Shape>(task.rows) * kColumns) {}

  // ---- Shared memory: of clusters addresses that take no registers --------------------------------------------------
  static constexpr int kParts = kStreamClusterFloats<Shape> + W * kStored * kColumns, kV = kParts + W * kColumns;
  static constexpr int kRowVectors = kV + 4 * kColumns;
  __device__ static float* Shared(int at) { return DynamicFloats() + at; }
  // The rows of K that are kept there, [W, kStored, kColumns]; the warps' sums of columns, [W, kColumns].
  __device__ static float* Stored(int warp, int k) {
    return Shared(kStreamClusterFloats<Shape> + (warp * kStored + k) * kColumns);
  }
  __device__ static float* Parts() { return Shared(kParts); }
  // Of the columns, [kColumns].
  __device__ static float* V() { return Shared(kV); }
  __device__ static float* ColumnMarginals() { return Shared(kV + kColumns); }
  __device__ static float* ColumnBars() { return Shared(kV + 2 * kColumns); }
  __device__ static float* VNow() { return Shared(kV + 3 * kColumns); }
  // Of the block's rows.
  __device__ float* U() const { return RowVector(0); }
  __device__ float* RowMarginals() const { return RowVector(1); }
  __device__ float* NextU() const { return RowVector(2); }
  __device__ float* RowBars() const { return RowVector(3); }
  __device__ float* Scalars() const { return RowVector(4); }  // [W]
  __device__ float* RowVector(int k) const {
    return Shared(kRowVectors + k * static_cast<int>(StreamBlockRows<Shape>(task_.rows)));
  }

  // ---- The block's rows ---------------------------------------------------------------------------------------------
  // The first of them in the matrix, and how many it has. They are counted from that on, but where it says otherwise.
  __device__ int FirstRow() const {
    if constexpr (Shape::kCluster) return cluster_.FirstRow();
    return 0;
  }
  __device__ int Rows() const {
    if constexpr (Shape::kCluster) return cluster_.Rows();
    return task_.rows;
  }
  __device__ bool IsFirstBlock() const { return FirstRow() == 0; }

  // ---- Tensors: a row of the kernel's at a time, every 32nd number a lane's, what lies beyond 0 ---------------------
  __device__ float Load(const Tensor& tensor, int64_t size, int64_t at) const {
    return LoadAs<float>(tensor.dtype, tensor.data, (tensor.shared ? 0 : member_ * size) + at);
  }
  // Row i of n x m matrices, of all its rows; `size` columns of it are there.
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
    const int bin = task_.has_dustbin ? 1 : 0, size = task_.cols - bin, row = FirstRow() + i;
    LoadRow(task_.logits, task_.n - bin, task_.m - bin, min(row, task_.rows - bin - 1), size, w);
    if (bin == 0) return;
    const float score = Load(task_.dustbin, 1, 0);
#pragma unroll
    for (int c = 0; c < C; ++c) {
      if (row == task_.rows - 1 || lane_ + 32 * c == size) w[c] = score;
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
  __device__ float BlockSum(float x) { return OverBlock<Sum, W>(x, Scalars()); }
  // Over all blocks of the member, of numbers that each has of its own rows.
  __device__ float MemberSum(float x) {
    x = BlockSum(x);
    if constexpr (Shape::kCluster) x = cluster_.Total(x);
    return x;
  }
  __device__ bool MemberAll(bool x) {
    if constexpr (Shape::kCluster) return cluster_.Total(__syncthreads_and(x) ? 0.0f : 1.0f) == 0;
    return __syncthreads_and(x);
  }

  // ---- Marginals, scaled to the total `rows` ------------------------------------------------------------------------
  __device__ void LoadMarginals() {
    const int bin = task_.has_dustbin ? 1 : 0, first = FirstRow();
    const Tensor &a = task_.row_marginals, &b = task_.column_marginals;
    SideTotal rows = LoadSide(task_.transposed ? b : a, first, task_.rows - bin, Rows(), RowMarginals());
    SideTotal cols = LoadSide(task_.transposed ? a : b, 0, task_.cols - bin, kColumns, ColumnMarginals());
    OverBlockOf(&rows, &cols);
    if (bin == 1) {
      if (threadIdx.x == 0) {
        if (first + Rows() == task_.rows) RowMarginals()[Rows() - 1] = cols.total;
        ColumnMarginals()[task_.cols - 1] = rows.total;
      }
      __syncthreads();  // The dustbin's are there.
      const float row_total = rows.total;
      rows.Add(cols.total);
      cols.Add(row_total);
    }
    range_ = rows.LogRange() + cols.LogRange();
    const float total = static_cast<float>(task_.rows);
    row_scale_ = total / rows.total;
    col_scale_ = total / cols.total;
    for (int k = threadIdx.x; k < Rows(); k += Shape::kThreadCount) RowMarginals()[k] *= row_scale_;
    for (int k = threadIdx.x; k < task_.cols; k += Shape::kThreadCount) ColumnMarginals()[k] *= col_scale_;
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
  // What a side's marginals come to.
  struct SideTotal {
    float total = 0, low = FLT_MAX, high = 0;
    __device__ void Add(float x) { Add({x, x, x}); }
    __device__ void Add(const SideTotal& x) {
      total += x.total;
      low = fminf(low, x.low);
      high = fmaxf(high, x.high);
    }
    __device__ float LogRange() const { return low > 0 ? logf(high / low) : FLT_MAX; }
  };
  // To x those from number `first` on, 0 beyond the `size` that there are. Returns what this thread's part of all of
  // them comes to.
  __device__ SideTotal LoadSide(const Tensor& tensor, int first, int size, int padded, float* x) const {
    SideTotal mine;
    for (int k = threadIdx.x; k < size; k += Shape::kThreadCount) {
      const float marginal = tensor.data == nullptr ? 1.0f : Load(tensor, size, k);
      mine.Add(marginal);
      if (k >= first && k - first < padded) x[k - first] = marginal;
    }
    for (int k = max(size - first, 0) + threadIdx.x; k < padded; k += Shape::kThreadCount) x[k] = 0;
    return mine;
  }
  // Of both sides, from the threads' to all threads; what was written before is there.
  __device__ void OverBlockOf(SideTotal* rows, SideTotal* cols) const {
    SideTotal* const parts = reinterpret_cast<SideTotal*>(Parts());  // [W, 2]
    for (SideTotal* side : {rows, cols}) {
      *side = {WarpSum(side->total), -WarpMax(-side->low), WarpMax(side->high)};
      if (lane_ == 0) parts[2 * warp_ + (side == cols)] = *side;
    }
    __syncthreads();  // The warps' are there.
    *rows = parts[0];
    *cols = parts[1];
    for (int w = 1; w < W; ++w) {
      rows->Add(parts[2 * w]);
      cols->Add(parts[2 * w + 1]);
    }
  }

  // ---- Start --------------------------------------------------------------------------------------------------------
  struct RowStart {  // K = scale e^(max(W, floor) - top) + added
    float top, scale, added;
  };
  // Of the row's logits.
  __device__ RowStart StartOf(int i, const float (&w)[C]) const {
    float top = task_.floor32;
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
      start.scale = RowMarginals()[i] / (row_scale_ * WarpSum(sum));
      start.added = static_cast<float>(task_.offset);
    } else if (task_.offset > 0) {
      const float log_offset = logf(static_cast<float>(task_.offset));
      start.top = fmaxf(start.top, log_offset);
      start.added = Exp(log_offset - start.top);
    }
    return start;
  }
  // Number k of this warp's rows: where those stay, the first kKept in registers, then kStored.
  __device__ int RowOf(int k) const { return warp_ + k * W; }
  // A row of K in memory, from the start on.
  __device__ float* RowOfK(int i) const {
    if constexpr (kStored > 0) {
      if (i >= kKept * W) return Stored(i % W, i / W - kKept);
    }
    return k_ + int64_t{i} * kColumns;
  }

  __device__ bool Start() {
    const bool plain = !task_.softmax && task_.offset == 0;
    float narrow = 0, smallest = 1, lowest_row = FLT_MAX, lowest_logit = FLT_MAX;
    const auto one = [&](int i, const float(&w)[C], float(&k)[C]) {
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
      float* const u = U() + i;
      *u = task_.softmax                 ? row_scale_
           : task_.guard != Guard::kNone ? expf(fminf(start.top, kGeneralRange)) * col_scale_
                                         : 1.0f;
    };
    const int end = Shape::kResident ? Shape::kRows : Rows();
    constexpr int kTogether = C > 16 ? 1 : 2;  // They come at once.
#pragma unroll 1
    for (int i = warp_; i < end; i += kTogether * W) {
      float w[kTogether][C];
#pragma unroll
      for (int e = 0; e < kTogether; ++e) LoadLogits(i + e * W, w[e]);
#pragma unroll
      for (int e = 0; e < kTogether; ++e) {
        if (i + e * W >= end) break;
        float row[C] = {};
        if (i + e * W < Rows()) one(i + e * W, w[e], row);
        float* const to = RowOfK(i + e * W) + lane_;
#pragma unroll
        for (int c = 0; c < C; ++c) to[32 * c] = row[c];
      }
    }
    for (int j = threadIdx.x; j < kColumns; j += Shape::kThreadCount) V()[j] = j < task_.cols ? 1 : 0;
    const float range = kGeneralRange - range_;
    bool safe = guards_fit_ && range > 0 && (plain ? narrow >= -range : smallest >= Exp(-range));
    if (task_.guard != Guard::kNone && !task_.softmax) safe = safe && lowest_row >= kLowestRow;
    if (task_.unrolled) safe = safe && lowest_logit > task_.floor32;
    safe = MemberAll(safe);
    if (task_.unrolled && safe) {
      Remember(0);
      ClearPadding();
    }
    return safe;
  }

  // ---- Rows in registers, before passes: for nothing else there would be registers left -----------------------------
  __device__ void LoadKept() {
    if constexpr (kKept > 0) {
      __syncwarp();  // K is there.
#pragma unroll
      for (int k = 0; k < kKept; ++k) {
#pragma unroll
        for (int c = 0; c < C; ++c) kept_[k][c] = k_[int64_t{RowOf(k)} * kColumns + lane_ + 32 * c];
      }
    }
  }

  // ---- A pass: row sums with x, what `row` makes of them, and the columns' sums of it in Parts() --------------------
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
      constexpr int kSums = CeilPowerOfTwo(kKept);
      float s[kSums] = {};
#pragma unroll
      for (int k = 0; k < kKept; ++k) {
#pragma unroll
        for (int c = 0; c < C; ++c) s[k] = fmaf(kept_[k][c], xs[c], s[k]);
      }
      const float sum = Scatter<kSums>(s, lane_);
      const int i = RowOf(lane_ % kSums);
      const float multiplier = lane_ < kKept && i < Rows() ? row(i, sum) : 0.0f;
#pragma unroll
      for (int k = 0; k < kKept; ++k) {
        const float one = __shfl_sync(kFullMask, multiplier, k);
#pragma unroll
        for (int c = 0; c < C; ++c) sums[c] = fmaf(one, kept_[k][c], sums[c]);
      }
    }
    if constexpr (kStored > 0) {
      constexpr int kTogether = Shape::kStoredTogether;
#pragma unroll 1
      for (int k = 0; k < kStored && RowOf(kKept + k) < Rows(); k += kTogether) {
        PassRows<kTogether>(RowOf(kKept + k), kTogether, Stored(warp_, k) + lane_, kColumns, xs, sums, row);
      }
    }
    if constexpr (!Shape::kResident) {
      constexpr int kTogether = Shape::kTogether;
#pragma unroll 1
      for (int i = warp_; i < Rows(); i += W * kTogether) {
        const int there = (Rows() - i + W - 1) / W;
        PassRows<kTogether>(i, there, k_ + int64_t{i} * kColumns + lane_, int64_t{W} * kColumns, xs, sums, row);
      }
    }
#pragma unroll
    for (int c = 0; c < C; ++c) Parts()[warp_ * kColumns + lane_ + 32 * c] = sums[c];
    __syncthreads();  // The parts are there.
  }
  // Rows i, i + W, ... of K in memory, `pitch` apart. Past those that are `there`: the last one's, and a multiplier of
  // 0.
  template <int kTogether, class RowFunction>
  __device__ void PassRows(int i, int there, const float* from, int64_t pitch, const float (&xs)[C], float (&sums)[C],
                           RowFunction row) {
    float k[kTogether][C], s[kTogether];
#pragma unroll
    for (int e = 0; e < kTogether; ++e) {
#pragma unroll
      for (int c = 0; c < C; ++c) k[e][c] = from[(e == 0 ? 0 : min(e, there - 1)) * pitch + 32 * c];
    }
    constexpr int kChains = kTogether < 4 && C >= 4 ? 4 / kTogether : 1;  // A sum's: one would be waited for.
#pragma unroll
    for (int e = 0; e < kTogether; ++e) {
      float chains[kChains] = {};
#pragma unroll
      for (int c = 0; c < C; ++c) chains[c % kChains] = fmaf(k[e][c], xs[c], chains[c % kChains]);
      s[e] = chains[0];
#pragma unroll
      for (int chain = 1; chain < kChains; ++chain) s[e] += chains[chain];
    }
    const float sum = Scatter<kTogether>(s, lane_);  // Lane e takes row e.
    const int mine = i + W * lane_;
    const float multiplier = lane_ < kTogether && mine < Rows() ? row(mine, sum) : 0.0f;
#pragma unroll
    for (int e = 0; e < kTogether; ++e) {
      const float one = __shfl_sync(kFullMask, multiplier, e);
#pragma unroll
      for (int c = 0; c < C; ++c) sums[c] = fmaf(one, k[e][c], sums[c]);
    }
  }
  // column(j, sum) for each column, in all blocks; then all is there. Returns this thread's sum of what it returns.
  template <class ColumnOf>
  __device__ float Columns(ColumnOf column) {
    float total = 0;
    const float* of_all = Parts();
    if constexpr (Shape::kCluster) of_all = cluster_.Sum(Parts());
    for (int j = threadIdx.x; j < task_.cols; j += Shape::kThreadCount) {
      float sum = of_all[j];
      if constexpr (!Shape::kCluster) {
#pragma unroll
        for (int w = 1; w < W; ++w) sum += Parts()[w * kColumns + j];
      }
      total += column(j, sum);
    }
    __syncthreads();  // What the columns wrote is there, the parts are free.
    return total;
  }

  // ---- History: the vectors of all iterations -----------------------------------------------------------------------
  __device__ float* HistoryU(int t) const { return history_ + t * 2 * (StreamBlockRows<Shape>(task_.rows) + kColumns); }
  __device__ float* HistoryX(int t) const { return HistoryU(t) + StreamBlockRows<Shape>(task_.rows); }
  __device__ float* HistoryV(int t) const { return HistoryX(t) + StreamBlockRows<Shape>(task_.rows); }
  __device__ float* HistoryY(int t) const { return HistoryV(t) + kColumns; }
  __device__ void Remember(int t) {
    for (int i = threadIdx.x; i < Rows(); i += Shape::kThreadCount) HistoryU(t)[i] = U()[i];
    for (int j = threadIdx.x; j < kColumns; j += Shape::kThreadCount) HistoryV(t)[j] = V()[j];
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
  std::conditional_t<Shape::kCluster, StreamCluster<Shape>, NoCluster> cluster_;

  // The workspace.
  float* const k_;        // [StreamMatrixRows, kColumns]: the rows of K that do not stay in shared memory.
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
