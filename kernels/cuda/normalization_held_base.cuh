// Plain normalisations with sides from 65 to 1,024: K = exp(W - row maximum) is held in the registers and the shared
// memory of a block, or of a cluster of blocks of which each has some of the rows, from the first iteration to the
// last. An iteration multiplies each entry twice where it lies, and nothing but vectors moves.
//
// A lane owns four or eight columns of 32 rows of its warp: most of them in registers, the others in shared memory.
// Sums over rows are reduced by scattering: lane l ends with that of row l and keeps what belongs to the row (its
// scaling, its adjoint). Sums over columns go through shared memory; in a cluster each block sums up some columns for
// all, from parts sent to it, and sends back what becomes of them.
//
// Here: a block's memory, the start, a pass over rows and columns. Forward, backward and the course of a member:
// normalization_held{_forward,_unrolled,_implicit,}.cuh.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_BASE_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_BASE_CUH_

#include <type_traits>

#include "kernels/cuda/normalization_held_rows.cuh"
#include "kernels/cuda/transport_cluster.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

constexpr float kLog2E = 1.4426950408889634f;

// Addresses in blocks of the cluster: where a thread sends sums, and what becomes of others; each with the barrier that
// is told. 0: nowhere.
struct alignas(16) Route {
  uint32_t to, told, back, told_back;
};

// What a block hears: bytes of columns' sums, and of what becomes of all; totals so far.
struct Heard {
  unsigned sums, vector, totals;
};
// What is told in clusters: columns' sums, what becomes of them, and totals.
constexpr int kHeldBarriers = 3;

// kSpares: registers are short, and the matrices' side is looked up where it is wanted.
template <class Shape, bool kSpares>
class HeldBase {
 public:
  static constexpr int C = Shape::C, W = Shape::W, kKept = Shape::kKept, kGroup = Shape::kGroup;
  static constexpr int kHalf = Shape::kHalf;
  static constexpr int kWarpColumns = Shape::kWarpColumns, kColumns = Shape::kColumns;

 protected:
  // `barriers`: of this block; used in clusters.
  __device__ HeldBase(const Task& task, float* slot, uint64_t (&barriers)[kHeldBarriers], int rank, int ranks)
      : task_(task),
        n_(task.n),
        lane_(threadIdx.x % 32),
        warp_(Warp()),
        across_(warp_ % Shape::kAcross),
        down_(warp_ / Shape::kAcross),
        rank_(rank),
        ranks_(ranks),
        barriers_(barriers),
        history_(slot) {}

  // A block's forward kernels spill less for what WarpNumber says, others more.
  __device__ static int Warp() {
    return Shape::kCluster || kSpares ? static_cast<int>(threadIdx.x / 32) : WarpNumber();
  }

  // ---- Shared memory: addresses that take no registers --------------------------------------------------------------
  static constexpr int kParts = W * Shape::kBuffer * kWarpColumns, kVector = kParts + W * kWarpColumns;
  static constexpr int kInbox = kVector + kColumns, kLine = kVector + (Shape::kCluster ? 2 : 1) * kColumns;
  static constexpr int kErrors = kLine + 32 * W, kRowParts = kErrors + 32 * W;
  static constexpr int kScalars = kRowParts + 2 * Shape::kAcross * Shape::kRows;
  static constexpr int kTotals = kScalars + 2 * W, kRoutes = kTotals + 4 * (1 + Shape::kRanksMost);
  static_assert(kRoutes + kHeldRouteFloats<Shape> <= kHeldSharedFloats<Shape>, "all of it");
  static_assert(!Shape::kCluster || kRoutes % (sizeof(Route) / sizeof(float)) == 0, "aligned");

  __device__ static float* Shared(int at) { return reinterpret_cast<float*>(DynamicShared()) + at; }
  // The warp's: rows that come and go, [kGroup, kWarpColumns], behind them rows of K, as many, and further ones that
  // come and go (the first two together, while there is no K); the multipliers of its rows, [32].
  __device__ float* Buffer(int k) const { return Shared((warp_ * Shape::kBuffer + k) * kWarpColumns); }
  __device__ float* Stored(int k) const { return Buffer(kGroup + k); }
  __device__ float* Further(int k) const { return Buffer(2 * kGroup + k); }
  __device__ float* Line() const { return Shared(kLine + 32 * warp_); }
  // The block's: the warps' sums of columns, [kDown, kColumns]; the vector; in clusters the sums that the blocks sent
  // of the columns that this one owns, [quads, kRanksMost] of 4; parts of rows' sums, [2, kAcross, kRows]; sums of
  // warps, [2, W]; totals of the block and, in clusters, of all, [1 + ranks] of 4; there, too, the threads' routes and
  // columns.
  __device__ static float* Parts(int down) { return Shared(kParts + down * kColumns); }
  __device__ static float* Vector() { return Shared(kVector); }
  __device__ static float* Inbox() { return Shared(kInbox); }
  __device__ static float* RowParts(int buffer) { return Shared(kRowParts + buffer * Shape::kAcross * Shape::kRows); }
  __device__ static float* Error() { return Shared(kErrors + threadIdx.x); }  // The thread's.
  __device__ static float* Scalars() { return Shared(kScalars); }
  __device__ static float4* Totals() { return reinterpret_cast<float4*>(Shared(kTotals)); }
  __device__ static Route* ThreadRoute() { return reinterpret_cast<Route*>(Shared(kRoutes)) + threadIdx.x; }
  __device__ static int* ThreadColumn() {
    return reinterpret_cast<int*>(Shared(kRoutes + 4 * Shape::kThreadCount)) + threadIdx.x;
  }
  __device__ static Heard* BlockHeard() { return reinterpret_cast<Heard*>(Shared(kRoutes + 5 * Shape::kThreadCount)); }

  // ---- Places -------------------------------------------------------------------------------------------------------
  __device__ int FirstRow() const { return rank_ * Shape::kRows + down_ * Shape::kWarpRows; }
  __device__ int FirstColumn() const { return across_ * kWarpColumns; }
  __device__ int Side() const { return kSpares ? task_.n : n_; }
  // The lane's own row, and whether it is one.
  __device__ int OwnRow() const { return FirstRow() + lane_; }
  __device__ bool HasRow() const { return OwnRow() < Side(); }
  // Column number c of the lane: in its warp.
  __device__ int Column(int c) const { return 4 * lane_ + 128 * (c / 4) + c % 4; }
  __device__ bool Inside(int c) const { return FirstColumn() + Column(c) < Side(); }
  __device__ HeldRows<Shape> Rows() const {
    // From lane to lane, so that it is not looked up for each row.
    const int n = __shfl_sync(kFullMask, Side(), 0);
    // What follows from the lane is found again each time where there are fewer registers than that is worth.
    constexpr bool kForgets = kSpares && (Shape::kCluster || Shape::kQuads == 1);
    return {member_, n, FirstRow(), FirstColumn(), kForgets ? Opaque(lane_) : lane_};
  }
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
  // False, to some threads at least: the range is too wide. kSoftmax: K is the rows' softmax and the recipe's offset,
  // whose range that is. kColumns: the rows' maxima, too, must be in range, and with them the first sums of columns.
  template <Lead kLead>
  __device__ bool Start() {
    constexpr bool kSoftmax = kLead == Lead::kSoftmax;
    constexpr float kRange = kLead == Lead::kColumns ? kPlainRange : kGeneralRange;
    const HeldRows<Shape> rows = Rows();
    float lowest = 0;
    // Or what they were would be kept, where registers are wanted for other things, until some are set below.
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
#pragma unroll
      for (int c = 0; c < C; ++c) kept_[k][c] = 0;
    }
    // Groups of rows come three steps ahead. The last group comes before the one that takes the first one's place.
    static_assert(kKept == Shape::kWarpRows - kGroup, "the last group stays where it comes");
    const auto group_of = [](int step) { return step < 2 ? step : 5 - step; };
    const auto place_of = [this](int step) { return step == 1 ? Further(0) : step == 2 ? Stored(0) : Buffer(0); };
#pragma unroll 1
    for (int step = -3; step < 4; ++step) {
      if (step >= 0) {
        WaitForCopies<2>();
        __syncwarp();  // The rows are there.
        const int first = kGroup * group_of(step);
        FillColumns<kSoftmax>(place_of(step));
        if constexpr (kSpares) {
          StartGroup<kSoftmax, true>(first, place_of(step), &lowest);
          if (HasOthers()) ClearGroup(first, place_of(step));
          WithGroup(first, [&](auto group) {
            if constexpr (group.value < kKept) {
#pragma unroll
              for (int k = 0; k < kGroup; ++k) Read(place_of(step) + k * kWarpColumns, kept_[group.value + k]);
            }
          });
        } else {
          WithGroup(first,
                    [&](auto group) { StartGroup<kSoftmax, group.value == kKept>(group, place_of(step), &lowest); });
        }
        __syncwarp();  // The place is free.
      }
      if (step + 3 < 4) rows.Fetch(task_.logits, kGroup * group_of(step + 3), kGroup, place_of(step + 3));
      CommitCopies();
    }
    if (!kSpares && HasOthers()) ClearOthers();
    if constexpr (kSoftmax) return true;
    if (FirstColumn() >= Side()) lowest = 0;  // It has no logits.
    // All logits within the range of their maximum, and above the floor.
    bool safe = lowest >= -kLog2E * kRange && (!HasRow() || shift_ / -kLog2E - kRange > task_.floor32);
    if constexpr (kLead == Lead::kColumns) safe = safe && fabsf(shift_) <= kLog2E * kRange;
    return safe;
  }
  // Columns of the warp that are in the matrix; rows from its row `first` to the matrix's last, 0 or less: none.
  __device__ int ColumnsInside() const { return min(max(Side() - FirstColumn(), 0), kWarpColumns); }
  __device__ int RowsInside(int first) const { return Side() - FirstRow() - first; }
  // Votes, so that the compiler knows that all lanes go one way.
  __device__ bool HasOtherColumns() const { return __any_sync(kFullMask, FirstColumn() + kWarpColumns > Side()); }
  __device__ bool HasOthers() const {
    return __any_sync(kFullMask, FirstRow() + Shape::kWarpRows > Side()) || HasOtherColumns();
  }
  // Logits in columns outside of the matrix become such as do not change what StartGroup finds of their rows: the
  // largest, the lowest exponent, the sum of exponentials. (Not the lowest of a warp that has no columns.)
  template <bool kSoftmax>
  __device__ void FillColumns(float* place) const {
    if (!HasOtherColumns()) return;
    const int columns = ColumnsInside();
    float nothing[kGroup];
#pragma unroll
    for (int k = 0; k < kGroup; ++k) nothing[k] = kSoftmax || columns == 0 ? -FLT_MAX : place[k * kWarpColumns];
#pragma unroll 1
    for (int c = columns / 32 * 32 + lane_; c < kWarpColumns; c += 32) {
#pragma unroll
      for (int k = 0; k < kGroup; ++k) {
        if (c >= columns) place[k * kWarpColumns + c] = nothing[k];
      }
    }
    __syncwarp();  // All is filled.
  }
  // K outside of the matrix becomes 0: in a group of rows that are in `place`, and of all.
  __device__ void ClearGroup(int first, float* place) const {
    const int rows = RowsInside(first), columns = ColumnsInside();
    __syncwarp();  // The lanes have written theirs.
#pragma unroll 1
    for (int c = (rows < kGroup ? 0 : columns / 32 * 32) + lane_; c < kWarpColumns; c += 32) {
#pragma unroll
      for (int k = 0; k < kGroup; ++k) {
        if (k >= rows || c >= columns) place[k * kWarpColumns + c] = 0;
      }
    }
    __syncwarp();  // All is filled.
  }
  __device__ void ClearOthers() {
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
#pragma unroll
      for (int c = 0; c < C; ++c) {
        if (FirstRow() + k >= Side() || !Inside(c)) kept_[k][c] = 0;
      }
    }
    ClearGroup(kKept, Stored(0));
  }
  // From the logits of the group of rows from `first` on, in `place`, to K: in place, or in registers, where `first` is
  // known when compiled.
  template <bool kSoftmax, bool kInPlace, class First>
  __device__ void StartGroup(First first, float* place, float* lowest) {
    // taken[k] = take(row k); the first time rows come from `place`.
    float taken[kGroup];
    const auto take_rows = [&](bool first_time, auto take) {
#pragma unroll
      for (int k = 0; k < kGroup; ++k) {
        if constexpr (kInPlace) {
          float w[C];
          Read(place + k * kWarpColumns, w);
          taken[k] = take(w);
        } else {
          if (first_time) Read(place + k * kWarpColumns, kept_[first + k]);
          taken[k] = take(kept_[first + k]);
        }
      }
    };
    const auto change_rows = [&](auto change) {
#pragma unroll kInPlace ? 4 : kGroup
      for (int k = 0; k < kGroup; ++k) {
        if constexpr (kInPlace) {
          float w[C];
          Read(place + k * kWarpColumns, w);
          change(k, w);
          Write(w, place + k * kWarpColumns);
        } else {
          change(k, kept_[first + k]);
        }
      }
    };
    take_rows(true, [](const float(&w)[C]) { return OverLane<Max>(w); });
    // The two buffers in turns, as groups come: the last one before the third.
    const float own = OverRow<Max>(taken, kSoftmax ? 0 : (first + (first < kKept - kGroup ? 0 : kGroup)) / kGroup % 2);
    // Its rounding scales the row: nothing that u would not undo.
    if (lane_ / kGroup == first / kGroup) shift_ = HasRow() ? -kLog2E * own : 0.0f;
    change_rows([&](int k, float(&w)[C]) {
      const float shift = __shfl_sync(kFullMask, shift_, first + k);
#pragma unroll
      for (int c = 0; c < C; ++c) w[c] = fmaf(kLog2E, w[c], shift);
      if (!kSoftmax && k < RowsInside(first)) *lowest = fminf(*lowest, OverLane<Min>(w));
#pragma unroll
      for (int c = 0; c < C; ++c) w[c] = Exp2(w[c]);
    });
    if constexpr (kSoftmax) {  // Rows by their sums, and the offset.
      const float offset = static_cast<float>(task_.offset);
      take_rows(false, [](const float(&w)[C]) { return OverLane<Sum>(w); });
      const float sum = OverRow<Sum>(taken, 1);
      if (lane_ / kGroup == first / kGroup) scale_ = HasRow() ? Reciprocal(sum) : 0.0f;
      change_rows([&](int k, float(&w)[C]) {
        const float scale = __shfl_sync(kFullMask, scale_, first + k);
#pragma unroll
        for (int c = 0; c < C; ++c) w[c] = fmaf(w[c], scale, offset);
      });
    }
  }
  // What a group's rows come to over the lanes and warps that have them, from what they are in this lane: on each
  // row's own lane. `buffer`: as AcrossWarps'.
  template <class Op>
  __device__ float OverRow(float (&taken)[kGroup], int buffer) const {
    return AcrossWarps<Op>(Scatter<kGroup, Op>(taken, lane_), buffer);
  }
  template <class Op>
  __device__ static float OverLane(const float (&x)[C]) {
    float all = Op::Of(Op::Of(x[0], x[1]), Op::Of(x[2], x[3]));
#pragma unroll
    for (int c = 4; c < C; c += 4) all = Op::Of(all, Op::Of(Op::Of(x[c], x[c + 1]), Op::Of(x[c + 2], x[c + 3])));
    return all;
  }

  // The lane's quad h of a row of a buffer.
  __device__ void ReadQuad(const float* row, int h, float (&x)[4]) const {
    const float4 y = *reinterpret_cast<const float4*>(row + Column(4 * h));
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  }
  __device__ void WriteQuad(const float (&x)[4], float* row, int h) const {
    *reinterpret_cast<float4*>(row + Column(4 * h)) = make_float4(x[0], x[1], x[2], x[3]);
  }
  // Quad h of row number k of K; known when compiled.
  __device__ void QuadOfK(int k, int h, float (&x)[4]) const {
    if (k >= kKept) return ReadQuad(Stored(k - kKept), h, x);
#pragma unroll
    for (int c = 0; c < 4; ++c) x[c] = kept_[k][4 * h + c];
  }
  // body(the number of a group's first row, known when compiled).
  template <class Body>
  __device__ static void WithGroup(int first, Body body) {
    static_assert(Shape::kWarpRows == 4 * kGroup, "see below");
    if (first == 0) return body(std::integral_constant<int, 0>());
    if (first == kGroup) return body(std::integral_constant<int, kGroup>());
    if (first == 2 * kGroup) return body(std::integral_constant<int, 2 * kGroup>());
    body(std::integral_constant<int, 3 * kGroup>());
  }
  // A group's rows of K in shared memory; of those in registers copies. So that what is done with them is one piece of
  // code: what the kernels for gradients do once for a member would not fit into the processor's cache of instructions.
  __device__ const float* RowsOfK(int first) const {
    if (first == kKept) return Stored(0);
    WithGroup(first, [this](auto group) {
      if constexpr (group.value < kKept) {
#pragma unroll
        for (int k = 0; k < kGroup; ++k) Write(kept_[group.value + k], Further(k));
      }
    });
    return Further(0);
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
    [[maybe_unused]] Route route;
    [[maybe_unused]] int own;
    if constexpr (Shape::kCluster) {  // What is fetched here is not waited for where all blocks wait.
      route = *ThreadRoute(), own = *ThreadColumn();
      const Heard heard = *BlockHeard();
      if (threadIdx.x == 0) {
        ExpectReceived(&barriers_[0], heard.sums);
        ExpectReceived(&barriers_[1], heard.vector);
      }
    }
    Write(q, Parts(down_) + FirstColumn());
    __syncthreads();  // The parts are there.
    if constexpr (!Shape::kCluster) {
      const int j = threadIdx.x;
      float sum = Parts(0)[j];
#pragma unroll
      for (int w = 1; w < Shape::kDown; ++w) sum += Parts(w)[j];
      Vector()[j] = j < Side() ? column(j, sum) : 0.0f;
      __syncthreads();  // The vector is there.
    } else {
      SendParts(route);
      AwaitReceived(&barriers_[0], parity_);
      ReceiveParts(route, own, column);
      AwaitReceived(&barriers_[1], parity_);
      parity_ ^= 1;
    }
  }
  // Quads of columns that there are, and those of an owner.
  __device__ int QuadsOfAll() const { return (Side() + 3) / 4; }
  __device__ int QuadsEach() const { return (QuadsOfAll() + ranks_ - 1) / ranks_; }
  __device__ int QuadsMine() const { return max(min(QuadsEach(), QuadsOfAll() - rank_ * QuadsEach()), 0); }
  // Where a thread sends what, the same for all members. As many lanes as a cluster has blocks at most share a quad of
  // columns that the block owns: lane k of them has what block k sent, and sends to block k what becomes of the sums.
  __device__ void PlanRoute() const {
    constexpr int kMost = Shape::kRanksMost;
    const int quad = threadIdx.x, owner = quad / QuadsEach();
    const int place = threadIdx.x / kMost, lane = threadIdx.x % kMost;
    Route route = {0, 0, 0, 0};
    if (quad < QuadsOfAll()) {
      const int there = quad % QuadsEach() * kMost + rank_;
      route.to = RemoteAddress(Inbox() + 4 * there, owner);
      route.told = RemoteAddress(&barriers_[0], owner);
    }
    if (place < QuadsMine() && lane < ranks_) {
      route.back = RemoteAddress(Vector() + 4 * (rank_ * QuadsEach() + place), lane);
      route.told_back = RemoteAddress(&barriers_[1], lane);
    }
    *ThreadRoute() = route;
    const int j = SharedColumn();
    *ThreadColumn() = place < QuadsMine() && j < Side() ? j : -1;
    if (threadIdx.x == 0) {
      constexpr unsigned kQuad = sizeof(float4);
      *BlockHeard() = {QuadsMine() * ranks_ * kQuad, QuadsOfAll() * kQuad, 0};
    }
  }
  // Each block's sums to the columns' owners.
  __device__ void SendParts(const Route& route) const {
    if (route.to == 0) return;
    float sum[4] = {};
#pragma unroll
    for (int w = 0; w < Shape::kDown; ++w) {
      const float4 x = *reinterpret_cast<const float4*>(Parts(w) + 4 * threadIdx.x);
      sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
    }
    SendTo(route.to, sum, route.told);
  }
  // The column that a thread of a cluster's block owns, with others of its lanes.
  __device__ int SharedColumn() const {
    constexpr int kMost = Shape::kRanksMost;
    const int quad = rank_ * QuadsEach() + static_cast<int>(threadIdx.x) / kMost;
    return 4 * quad + (lane_ & kMost / 2 ? 2 : 0) + (lane_ & kMost / 4 ? 1 : 0);
  }
  // `own`: the column that the thread owns, or -1.
  template <class ColumnFunction>
  __device__ void ReceiveParts(const Route& route, int own, ColumnFunction column) {
    constexpr int kMost = Shape::kRanksMost;
    float4 x = make_float4(0, 0, 0, 0);
    if (route.back != 0) x = *reinterpret_cast<const float4*>(Inbox() + 4 * threadIdx.x);
    const bool high = lane_ & kMost / 2, odd = lane_ & kMost / 4;
    float a = high ? x.z : x.x, b = high ? x.w : x.y;
    a += __shfl_xor_sync(kFullMask, high ? x.x : x.z, kMost / 2);
    b += __shfl_xor_sync(kFullMask, high ? x.y : x.w, kMost / 2);
    float sum = odd ? b : a;
    sum += __shfl_xor_sync(kFullMask, odd ? a : b, kMost / 4);
#pragma unroll
    for (int mask = kMost / 8; mask >= 1; mask /= 2) sum += __shfl_xor_sync(kFullMask, sum, mask);
    const float mine = own >= 0 ? column(own, sum) : 0.0f;
    const int base = lane_ / kMost * kMost;
    const float all[4] = {__shfl_sync(kFullMask, mine, base), __shfl_sync(kFullMask, mine, base + kMost / 4),
                          __shfl_sync(kFullMask, mine, base + kMost / 2),
                          __shfl_sync(kFullMask, mine, base + kMost / 2 + kMost / 4)};
    if (route.back != 0) SendTo(route.back, all, route.told_back);
  }
  // The column whose `column` this thread calls, and whether no other thread does.
  __device__ int OwnColumn() const {
    if constexpr (Shape::kCluster) return min(SharedColumn(), Side() - 1);
    return min(static_cast<int>(threadIdx.x), Side() - 1);
  }
  __device__ bool IsFirstOwner() const {
    constexpr int kAlike = Shape::kCluster ? Shape::kRanksMost / 4 : 1;  // Lanes with the same column.
    return lane_ % kAlike == 0;
  }

  // ---- Totals of a member's blocks, in rank 0's first thread --------------------------------------------------------
  // Of the block, for MemberTotals: the threads' errors, and whether all are safe.
  __device__ void KeepTotals(float row_error, float col_error, bool safe) const {
    row_error = WarpSum(row_error);
    col_error = WarpSum(col_error);
    const bool unsafe = __syncthreads_or(!safe);  // The memory is free.
    if (lane_ == 0) Scalars()[warp_] = row_error, Scalars()[W + warp_] = col_error;
    __syncthreads();  // The warps' are there.
    if (threadIdx.x != 0) return;
    float4 sums = make_float4(0, 0, unsafe ? 1 : 0, 0);
    for (int w = 0; w < W; ++w) sums.x += Scalars()[w], sums.y += Scalars()[W + w];
    *Totals() = sums;
  }
  // Errors of rows and of columns, blocks that are not safe, and those with a thread that is not `finite`: once for
  // each member, and there alone. Nobody sends the next one's before columns have been exchanged again.
  __device__ float4 MemberTotals(bool finite) {
    const bool infinite = __syncthreads_or(!finite);
    if (threadIdx.x != 0) return make_float4(0, 0, 0, 0);
    float4 sums = *Totals();
    sums.w = infinite ? 1 : 0;
    if constexpr (Shape::kCluster) {
      const float own[4] = {sums.x, sums.y, sums.z, sums.w};
      Send(reinterpret_cast<const float*>(Totals() + 1 + rank_), own, &barriers_[2], 0);
      if (rank_ != 0) return sums;
      ExpectReceived(&barriers_[2], static_cast<unsigned>(ranks_ * sizeof(float4)));
      AwaitReceived(&barriers_[2], BlockHeard()->totals++ & 1);
      sums = Totals()[1];
      for (int k = 1; k < ranks_; ++k) {
        const float4 x = Totals()[1 + k];
        sums.x += x.x, sums.y += x.y, sums.z += x.z, sums.w += x.w;
      }
    }
    return sums;
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

  uint64_t (&barriers_)[kHeldBarriers];
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
