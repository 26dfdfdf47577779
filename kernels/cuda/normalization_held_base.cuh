// Plain normalisations with sides from 65 to 1,024: K = exp(W - row maximum) is held in the registers and the shared
// memory of a block, or of a cluster of blocks of which each has some of the rows, from the first iteration to the
// last. An iteration multiplies each entry twice where it lies, and nothing but vectors moves.
//
// A lane owns four or eight columns of 32 rows of its warp: most of them in registers, the others in shared memory.
// Sums over rows are reduced by scattering: lane l ends with that of row l and keeps what belongs to the row (its
// scaling, its adjoint). Sums over columns go through shared memory; in a cluster each block sums up some columns for
// all, from parts sent to it, and sends back what becomes of them.
//
// Here: a block's memory, the start, a pass over rows and columns. The course of a member: normalization_held.cuh.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_BASE_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_BASE_CUH_

#include "kernels/cuda/normalization_held_rows.cuh"
#include "kernels/cuda/transport_cluster.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

constexpr float kLog2E = 1.4426950408889634f;

// To the same place in the shared memory of block `rank` of the cluster.
__device__ inline void StoreRemote(const float* own, float x, int rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(RemoteAddress(own, rank)), "f"(x) : "memory");
#endif
}

template <class Shape>
class HeldBase {
 public:
  static constexpr int C = Shape::C, W = Shape::W, kKept = Shape::kKept, kGroup = Shape::kGroup;
  static constexpr int kHalf = Shape::kHalf;
  static constexpr int kWarpColumns = Shape::kWarpColumns, kColumns = Shape::kColumns;

 protected:
  // `barriers`: of this block; used in clusters.
  __device__ HeldBase(const Task& task, float* slot, uint64_t (&barriers)[2], int rank, int ranks)
      : task_(task),
        n_(task.n),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32),
        across_(warp_ % Shape::kAcross),
        down_(warp_ / Shape::kAcross),
        rank_(rank),
        ranks_(ranks),
        barriers_(barriers),
        history_(slot) {}

  // ---- Shared memory: addresses that take no registers --------------------------------------------------------------
  static constexpr int kParts = W * Shape::kBuffer * kWarpColumns, kVector = kParts + W * kWarpColumns;
  static constexpr int kInbox = kVector + kColumns, kLine = kVector + (Shape::kCluster ? 2 : 1) * kColumns;
  static constexpr int kErrors = kLine + 32 * W, kRowParts = kErrors + 32 * W;
  static constexpr int kScalars = kRowParts + 2 * Shape::kAcross * Shape::kRows;
  static_assert(kScalars + W + Shape::kRanksMost <= kHeldSharedFloats<Shape>, "all of it");

  __device__ static float* Shared(int at) { return reinterpret_cast<float*>(DynamicShared()) + at; }
  // The warp's: rows that come and go, [kGroup, kWarpColumns], behind them rows of K, as many, and room for copies of
  // others (the first two: rows that come and go, while there is no K); the multipliers of its rows, [32].
  __device__ float* Buffer(int k) const { return Shared((warp_ * Shape::kBuffer + k) * kWarpColumns); }
  __device__ float* Stored(int k) const { return Buffer(kGroup + k); }
  __device__ float* Copied(int k) const { return Buffer(2 * kGroup + k); }
  __device__ float* Line() const { return Shared(kLine + 32 * warp_); }
  // The block's: the warps' sums of columns, [kDown, kColumns]; the vector; in clusters the sums that the blocks sent
  // of the columns that this one owns, [quads, kRanksMost] of 4; parts of rows' sums, [2, kAcross, kRows]; [W] and
  // [ranks].
  __device__ static float* Parts(int down) { return Shared(kParts + down * kColumns); }
  __device__ static float* Vector() { return Shared(kVector); }
  __device__ static float* Inbox() { return Shared(kInbox); }
  __device__ static float* RowParts(int buffer) { return Shared(kRowParts + buffer * Shape::kAcross * Shape::kRows); }
  __device__ static float* Error() { return Shared(kErrors + threadIdx.x); }  // The thread's.
  __device__ static float* Scalars() { return Shared(kScalars); }

  // ---- Places -------------------------------------------------------------------------------------------------------
  __device__ int FirstRow() const { return rank_ * Shape::kRows + down_ * Shape::kWarpRows; }
  __device__ int FirstColumn() const { return across_ * kWarpColumns; }
  // The lane's own row, and whether it is one.
  __device__ int OwnRow() const { return FirstRow() + lane_; }
  __device__ bool HasRow() const { return OwnRow() < n_; }
  // Column number c of the lane: in its warp.
  __device__ int Column(int c) const { return 4 * lane_ + 128 * (c / 4) + c % 4; }
  __device__ bool Inside(int c) const { return FirstColumn() + Column(c) < n_; }
  __device__ HeldRows<Shape> Rows() const { return {member_, n_, FirstRow(), FirstColumn(), lane_}; }
  // The lane's C numbers of a row of a buffer.
  __device__ void Read(const float* row, float (&x)[C]) const {
#pragma unroll
    for (int c = 0; c < C; c += 4) {
      const float4 y = *reinterpret_cast<const float4*>(row + Column(c));
      x[c] = y.x, x[c + 1] = y.y, x[c + 2] = y.z, x[c + 3] = y.w;
    }
  }
  __device__ void Write(const float (&x)[C], float* row) const {
#pragma unroll
    for (int c = 0; c < C; c += 4) {
      *reinterpret_cast<float4*>(row + Column(c)) = make_float4(x[c], x[c + 1], x[c + 2], x[c + 3]);
    }
  }
  __device__ void ReadVector(float (&x)[C]) const { Read(Vector() + FirstColumn(), x); }

  // ---- Rows whose columns several warps hold ------------------------------------------------------------------------
  // Of the parts of all of them, in the lane's own row. Two uses of a buffer need a barrier between them.
  template <class Op>
  __device__ float AcrossWarps(float part, int buffer) const {
    if constexpr (Shape::kAcross == 1) return part;
    float* const parts = RowParts(buffer) + down_ * Shape::kWarpRows + lane_;
    parts[across_ * Shape::kRows] = part;
    // The warps side by side have written theirs.
    SyncSome<32 * Shape::kAcross>(1 + down_);
    float all = parts[0];
#pragma unroll
    for (int w = 1; w < Shape::kAcross; ++w) all = Op::Of(all, parts[w * Shape::kRows]);
    return all;
  }

  // ---- Start --------------------------------------------------------------------------------------------------------
  __device__ float Largest(const float (&w)[C]) const {
    float top = -FLT_MAX;
#pragma unroll
    for (int c = 0; c < C; ++c) {
      if (Inside(c)) top = fmaxf(top, w[c]);
    }
    return top;
  }
  // K of a row of logits; `lowest`: of the exponents.
  __device__ void Exponentials(bool is_row, float shift, float (&w)[C], float* lowest) const {
#pragma unroll
    for (int c = 0; c < C; ++c) {
      const bool inside = is_row && Inside(c);
      const float x = fmaf(kLog2E, w[c], shift);
      if (inside) *lowest = fminf(*lowest, x);
      w[c] = inside ? Exp2(x) : 0.0f;
    }
  }
  // False, to some threads at least: the range is too wide. kSoftmax: K is the rows' softmax and the recipe's offset,
  // whose range that is. kColumns: the rows' maxima, too, must be in range, and with them the first sums of columns.
  template <Lead kLead>
  __device__ bool Start() {
    constexpr bool kSoftmax = kLead == Lead::kSoftmax;
    constexpr float kRange = kLead == Lead::kColumns ? kPlainRange : kGeneralRange;
    const HeldRows<Shape> rows = Rows();
    float lowest = 0;
    rows.Fetch(task_.logits, 0, kHalf, Buffer(0));
    rows.Arrived();
    StartHalf<kSoftmax>(0, &lowest);
#pragma unroll
    for (int k = 0; k < kHalf; ++k) Read(Buffer(k), kept_[k]);
    __syncwarp();  // The buffer is free.
    rows.Fetch(task_.logits, kHalf, kHalf, Buffer(0));
    rows.Arrived();
    StartHalf<kSoftmax>(1, &lowest);
#pragma unroll
    for (int k = kHalf; k < kKept; ++k) Read(Buffer(k - kHalf), kept_[k]);
    if constexpr (kSoftmax) return true;
    // All logits within the range of their maximum, and above the floor.
    bool safe = lowest >= -kLog2E * kRange && (!HasRow() || shift_ / -kLog2E - kRange > task_.floor32);
    if constexpr (kLead == Lead::kColumns) safe = safe && fabsf(shift_) <= kLog2E * kRange;
    return safe;
  }
  // K in place of the logits in the buffer, the first or the second half of the warp's rows. A loop, not all rows at
  // once: what is executed once waits for its instructions.
  template <bool kSoftmax>
  __device__ void StartHalf(int half, float* lowest) {
    const int first = half * kHalf;
    const float own = OverHalf<Max>(half, kSoftmax ? 0 : half, [this](const float(&w)[C]) { return this->Largest(w); });
    // Its rounding scales the row: nothing that u would not undo.
    if (lane_ / kHalf == half) shift_ = HasRow() ? -kLog2E * own : 0.0f;
#pragma unroll 4
    for (int k = 0; k < kHalf; ++k) {
      float w[C];
      Read(Buffer(k), w);
      Exponentials(FirstRow() + first + k < n_, __shfl_sync(kFullMask, shift_, first + k), w, lowest);
      Write(w, Buffer(k));
    }
    if constexpr (kSoftmax) DivideHalf(half);
  }
  // What a row in the buffer, the first or the second half of the warp's, comes to over the lanes and warps that have
  // it, from take(a lane's elements): on the row's own lane. `buffer`: as AcrossWarps'.
  template <class Op, class Take>
  __device__ float OverHalf(int half, int buffer, Take take) {
    const int first = half * kHalf;
    float taken[kGroup], own = 0;
#pragma unroll 1
    for (int group = 0; group < kHalf; group += kGroup) {
#pragma unroll
      for (int k = 0; k < kGroup; ++k) {
        float w[C];
        Read(Buffer(group + k), w);
        taken[k] = take(w);
      }
      const float over_lanes = Scatter<kGroup, Op>(taken, lane_);
      if (lane_ / kGroup == (first + group) / kGroup) own = over_lanes;
    }
    return AcrossWarps<Op>(own, buffer);
  }
  // From exponentials to K: rows by their sums, and the offset.
  __device__ void DivideHalf(int half) {
    const int first = half * kHalf;
    const float offset = static_cast<float>(task_.offset);
    const float own = OverHalf<Sum>(half, 1, [](const float(&w)[C]) {
      float sum = w[0];
#pragma unroll
      for (int c = 1; c < C; ++c) sum += w[c];
      return sum;
    });
    if (lane_ / kHalf == half) scale_ = HasRow() ? Reciprocal(own) : 0.0f;
#pragma unroll 4
    for (int k = 0; k < kHalf; ++k) {
      float w[C];
      const float scale = __shfl_sync(kFullMask, scale_, first + k);
      Read(Buffer(k), w);
#pragma unroll
      for (int c = 0; c < C; ++c) {
        w[c] = FirstRow() + first + k < n_ && Inside(c) ? fmaf(w[c], scale, offset) : 0.0f;
      }
      Write(w, Buffer(k));
    }
  }

  // The rows of K from number `first` on, in shared memory.
  __device__ const float* RowsOfK(int first) const {
    if (first == kKept) return Stored(0);
#pragma unroll
    for (int group = 0; group < kKept; group += kGroup) {
      if (first != group) continue;
#pragma unroll
      for (int k = 0; k < kGroup; ++k) Write(kept_[group + k], Copied(k));
    }
    return Copied(0);
  }

  // ---- A pass: products of rows with x, what `row` makes of each, and the products of that with columns, to q -------
  // row(sum): on the row's own lane. Returns what it returned.
  template <class RowFunction>
  __device__ float Pass(const float (&x)[C], float (&q)[C], RowFunction row) const {
    // The sums are scattered: lane l ends with that of row l. The first step at once: a row and that 16 below it.
    const bool upper = (lane_ & kHalf) != 0;
    float sums[kHalf];
    static_assert(kGroup == 8 && kKept % 8 == 0, "see below");
#pragma unroll
    for (int k = 0; k < kHalf; ++k) {
      const float near = Product(kept_[k], x);
      float far;
      if (k + kHalf < kKept) {
        far = Product(kept_[k + kHalf], x);
      } else {
        float stored[C];
        Read(Stored(k + kHalf - kKept), stored);
        far = Product(stored, x);
      }
      sums[k] = (upper ? far : near) + __shfl_xor_sync(kFullMask, upper ? near : far, kHalf);
    }
    const float own = row(AcrossWarps<Sum>(ScatterHalves<kHalf, Sum>(sums, lane_), 0));
    Line()[lane_] = own;
    __syncwarp();  // The multipliers are there.
#pragma unroll
    for (int c = 0; c < C; ++c) q[c] = 0;
    // Stored rows are on their way while others are worked on.
    float ahead[4][C];
#pragma unroll
    for (int k = 0; k < kKept; k += 4) {
      if (k == 0 || k == kKept / 2) {
#pragma unroll
        for (int e = 0; e < 4; ++e) Read(Stored(k == 0 ? e : 4 + e), ahead[e]);
      }
      const float4 u = *reinterpret_cast<const float4*>(Line() + k);
      AddProduct(u.x, kept_[k], q);
      AddProduct(u.y, kept_[k + 1], q);
      AddProduct(u.z, kept_[k + 2], q);
      AddProduct(u.w, kept_[k + 3], q);
      if (k + 4 == kKept / 2) AddProducts(kKept, ahead, q);
    }
    AddProducts(kKept + 4, ahead, q);
    return own;
  }
  __device__ static float Product(const float (&k)[C], const float (&x)[C]) {
    float sum = k[0] * x[0];
#pragma unroll
    for (int c = 1; c < C; ++c) sum = fmaf(k[c], x[c], sum);
    return sum;
  }
  __device__ static void AddProduct(float u, const float (&k)[C], float (&q)[C]) {
#pragma unroll
    for (int c = 0; c < C; ++c) q[c] = fmaf(u, k[c], q[c]);
  }

  // Rows from number `line` on.
  __device__ void AddProducts(int line, const float (&rows)[4][C], float (&q)[C]) const {
    const float4 u = *reinterpret_cast<const float4*>(Line() + line);
    AddProduct(u.x, rows[0], q);
    AddProduct(u.y, rows[1], q);
    AddProduct(u.z, rows[2], q);
    AddProduct(u.w, rows[3], q);
  }

  // ---- Columns: the sums of all rows' parts q, what `column` makes of each, to all as the vector --------------------
  // column(j, sum): on the owner of column j < n (in a cluster several lanes, with the same numbers).
  template <class ColumnFunction>
  __device__ void Columns(const float (&q)[C], ColumnFunction column) {
    Write(q, Parts(down_) + FirstColumn());
    __syncthreads();  // The parts are there.
    if constexpr (!Shape::kCluster) {
      const int j = threadIdx.x;
      float sum = Parts(0)[j];
#pragma unroll
      for (int w = 1; w < Shape::kDown; ++w) sum += Parts(w)[j];
      Vector()[j] = j < n_ ? column(j, sum) : 0.0f;
      __syncthreads();  // The vector is there.
    } else {
      SendParts();
      AwaitReceived(&barriers_[0], parity_);
      ReceiveParts(column);
      AwaitReceived(&barriers_[1], parity_);
      parity_ ^= 1;
    }
  }
  // Quads of columns that there are, and those of an owner.
  __device__ int QuadsOfAll() const { return (n_ + 3) / 4; }
  __device__ int QuadsEach() const { return (QuadsOfAll() + ranks_ - 1) / ranks_; }
  __device__ int QuadsMine() const { return max(min(QuadsEach(), QuadsOfAll() - rank_ * QuadsEach()), 0); }
  // Each block's sums to the columns' owners.
  __device__ void SendParts() {
    if (threadIdx.x == 0) {
      ExpectReceived(&barriers_[0], static_cast<unsigned>(QuadsMine() * ranks_ * sizeof(float4)));
      ExpectReceived(&barriers_[1], static_cast<unsigned>(QuadsOfAll() * sizeof(float4)));
    }
    const int quad = threadIdx.x;
    if (quad >= QuadsOfAll()) return;
    float sum[4] = {};
#pragma unroll
    for (int w = 0; w < Shape::kDown; ++w) {
      const float4 x = *reinterpret_cast<const float4*>(Parts(w) + 4 * quad);
      sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
    }
    const int owner = quad / QuadsEach(), place = quad % QuadsEach() * Shape::kRanksMost + rank_;
    Send(Inbox() + 4 * place, sum, &barriers_[0], owner);
  }
  // The column that a thread of a cluster's block owns, with others of its lanes.
  __device__ int SharedColumn() const {
    constexpr int kMost = Shape::kRanksMost;
    const int quad = rank_ * QuadsEach() + static_cast<int>(threadIdx.x) / kMost;
    return 4 * quad + (lane_ & kMost / 2 ? 2 : 0) + (lane_ & kMost / 4 ? 1 : 0);
  }
  // As many lanes as a cluster has blocks at most share a quad of columns: lane k of them has what block k sent, and
  // sends to block k what becomes of the sums.
  template <class ColumnFunction>
  __device__ void ReceiveParts(ColumnFunction column) {
    constexpr int kMost = Shape::kRanksMost;
    const int place = threadIdx.x / kMost, from = threadIdx.x % kMost;
    const bool there = place < QuadsMine();
    float4 x = make_float4(0, 0, 0, 0);
    if (there && from < ranks_) x = *reinterpret_cast<const float4*>(Inbox() + 4 * threadIdx.x);
    const bool high = lane_ & kMost / 2, odd = lane_ & kMost / 4;
    float a = high ? x.z : x.x, b = high ? x.w : x.y;
    a += __shfl_xor_sync(kFullMask, high ? x.x : x.z, kMost / 2);
    b += __shfl_xor_sync(kFullMask, high ? x.y : x.w, kMost / 2);
    float sum = odd ? b : a;
    sum += __shfl_xor_sync(kFullMask, odd ? a : b, kMost / 4);
#pragma unroll
    for (int mask = kMost / 8; mask >= 1; mask /= 2) sum += __shfl_xor_sync(kFullMask, sum, mask);
    const int j = SharedColumn();
    const float mine = there && j < n_ ? column(j, sum) : 0.0f;
    const int base = lane_ / kMost * kMost;
    const float all[4] = {__shfl_sync(kFullMask, mine, base), __shfl_sync(kFullMask, mine, base + kMost / 4),
                          __shfl_sync(kFullMask, mine, base + kMost / 2),
                          __shfl_sync(kFullMask, mine, base + kMost / 2 + kMost / 4)};
    if (there && from < ranks_) Send(Vector() + 4 * (rank_ * QuadsEach() + place), all, &barriers_[1], from);
  }
  // The column whose `column` this thread calls, and whether no other thread does.
  __device__ int OwnColumn() const {
    if constexpr (Shape::kCluster) return min(SharedColumn(), n_ - 1);
    return min(static_cast<int>(threadIdx.x), n_ - 1);
  }
  __device__ bool IsFirstOwner() const {
    constexpr int kAlike = Shape::kCluster ? Shape::kRanksMost / 4 : 1;  // Lanes with the same column.
    return lane_ % kAlike == 0;
  }

  // ---- Sums over the member's blocks, in rank 0's first thread ------------------------------------------------------
  __device__ float MemberSum(float x) const {
    x = OverBlock<Sum, W>(x, Scalars());
    if constexpr (!Shape::kCluster) return x;
    float* const all = Scalars() + W;
    if (threadIdx.x == 0) StoreRemote(all + rank_, x, 0);
    SyncCluster();  // All blocks' are there.
    float sum = all[0];
    for (int k = 1; k < ranks_; ++k) sum += all[k];
    SyncCluster();  // The memory is free.
    return sum;
  }

  // ---- History ------------------------------------------------------------------------------------------------------
  __device__ float* HistoryU(int t) const { return history_ + int64_t{t} * kHeldStep<Shape>; }
  __device__ float* HistoryX(int t) const { return HistoryU(t) + Shape::kRows; }
  __device__ float* HistoryV(int t) const { return HistoryX(t) + Shape::kRows; }
  __device__ float* HistoryY(int t) const { return HistoryV(t) + kColumns; }
  __device__ void Remember(float* to) const {
    if (threadIdx.x < kColumns / 4) {
      reinterpret_cast<float4*>(to)[threadIdx.x] = reinterpret_cast<const float4*>(Vector())[threadIdx.x];
    }
  }

  const Task& task_;
  const int n_, lane_, warp_, across_, down_;  // The warp's place among the block's.
  const int rank_, ranks_;                     // The block's among the cluster's.
  int64_t member_ = 0;

  uint64_t (&barriers_)[2];
  float* const history_;  // In the workspace.

  float kept_[kKept][C];
  float shift_ = 0;  // Of the own row: K = 2^(log2 e W + shift);
  float scale_ = 0;  // and of that, its softmax.
  unsigned parity_ = 0;
};

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_BASE_CUH_
