// Sums of columns over the blocks that a problem has, and what follows from them back to all.
//
// The first blocks look after the potentials of `owned` columns each: they alone have the cluster's sums of those. Of
// two blocks each looks after all columns: they exchange sums, and what follows from them need not travel.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_SUMS_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_SUMS_CUH_

#include "kernels/cuda/transport_cluster.cuh"
#include "kernels/cuda/transport_on_chip_memory.cuh"
#include "kernels/cuda/transport_rows.cuh"

namespace sinkhorn {
namespace cuda {

// A block's part in them.
template <Source kSource, int kTiles>
class OnChipSums {
 public:
  using S = Shape<kTiles>;
  using Memory = OnChipMemory<kSource, S>;

  // `job` has the engine's sizes.
  __device__ OnChipSums(const Job& job, int64_t index, int engine, const OnChipShape& shape, Memory* memory)
      : job_(job), m_(*memory), warp_(WarpNumber()), lane_(threadIdx.x % 32) {
    if (threadIdx.x == 0) {
      m_.index = index;
      m_.engine = engine;
      m_.symmetric = IsSymmetric(job, engine);
      m_.rank = S::kCluster ? ClusterRank() : 0;
      m_.ranks = shape.ranks;
      m_.slots = OnChipSlots(shape.ranks);
      m_.owned = shape.owned;
      m_.owned_log2 = __ffs(shape.owned) - 1;
      m_.owners = S::kMost >> m_.owned_log2;
      m_.own = m_.rank < m_.owners ? m_.owned : 0;
      m_.first_own = m_.rank * m_.own;
      m_.heard_bytes = m_.ranks * m_.own * static_cast<int>(sizeof(float));
      m_.planes = PlanesOf(job);
      m_.depths = CloudDepths(job.dim);
      m_.row_bytes = CloudRowBytes(job.dim);
      for (int side = 0; side < 2; ++side) {
        m_.halves[side] = member().template At<char>(job.at.halves[MeasureOf(engine, side)]);
      }
    }
    const int side = static_cast<int>(threadIdx.x) - 32;  // Meanwhile.
    if (side == 0 || side == 1) m_.log_size[side] = log2f(static_cast<float>(size(side)));
    __syncthreads();
  }

 protected:
  // ---- Where things are -------------------------------------------------------------------------------------------

  __device__ Member member() const { return {job_, m_.index}; }
  __device__ double scale() const { return m_.scale; }
  __device__ int engine() const { return m_.engine; }
  __device__ int size(int side) const { return job_.size[side]; }
  __device__ EngineState* state() const { return member().state(engine()); }
  __device__ int first_row() const { return m_.rank * S::kBlockRows; }
  // The block that owns a column, and which of its columns that is.
  __device__ int OwnerOf(int column) const { return column >> m_.owned_log2; }
  __device__ int OfOwner(int column) const { return column & (m_.owned - 1); }
  // The owned column, of the block, that this thread knows the sum of after Gather; and of all. In a block that owns
  // none, some column, which it knows nothing of.
  __device__ int Owned() const { return S::kShared ? threadIdx.x : OfOwner(threadIdx.x); }
  __device__ int OwnedColumn() const { return S::kShared ? threadIdx.x : m_.first_own + Owned(); }
  __device__ bool IsOwner() const { return S::kShared || static_cast<int>(threadIdx.x) < m_.own; }

  // kCount floats side by side.
  template <int kCount>
  __device__ static void Read(const float* from, float (&to)[kCount]) {
    if constexpr (kCount == 4) {
      const float4 v = *reinterpret_cast<const float4*>(from);
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    } else if constexpr (kCount == 2) {
      const float2 v = *reinterpret_cast<const float2*>(from);
      to[0] = v.x, to[1] = v.y;
    } else {
      to[0] = *from;
    }
  }
  template <int kCount>
  __device__ static void Write(const float (&from)[kCount], float* to) {
    if constexpr (kCount == 4) {
      *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
    } else {
      *reinterpret_cast<float2*>(to) = make_float2(from[0], from[1]);
    }
  }

  // ---- Barriers ---------------------------------------------------------------------------------------------------

  // Before all that follows, and a SyncCluster. `first`: the block has solved nothing yet.
  __device__ void InitSums(bool first) {
    if (threadIdx.x == 0 && first) {
      InitReceiving(m_.gathering);
      for (auto& barriers : m_.spreading) InitReceiving(barriers);
    }
  }
  // By one thread, after a SyncCluster and before the same blocks solve another problem.
  __device__ void EndSums() {
    for (unsigned buffer = 0; buffer < 2; ++buffer) {
      EndUses(&m_.gathering[buffer], (gathered_ + 1 - buffer) / 2);
      for (uint64_t& barrier : m_.spreading[buffer]) EndUses(&barrier, (spread_ + 1 - buffer) / 2);
    }
  }

  // ---- Over the cluster -------------------------------------------------------------------------------------------

  // Of kCount columns from `column` on, the sums over this block's warps, or the largest, from `parts`.
  template <bool kLargest, int kCount>
  __device__ void CombineParts(int column, float (&own)[kCount]) const {
    Read(m_.parts[0] + column, own);
#pragma unroll
    for (int w = 1; w < S::kWarps; ++w) {
      float part[kCount];
      Read(m_.parts[w] + column, part);
#pragma unroll
      for (int k = 0; k < kCount; ++k) own[k] = kLargest ? fmaxf(own[k], part[k]) : own[k] + part[k];
    }
  }
  // Column Owned()'s sum over all warps of all blocks, or the largest. Errors are added up too, into heard_error_, if
  // they are `told`. Parts may be written again once something has been Spread.
  template <bool kLargest>
  __device__ float Gather(bool told = false, double error = 0) {
    if constexpr (S::kSplit) {
      TellOwners<kLargest, S::kOwn>(0);
      return Hear<kLargest>(told, error);
    } else {
      heard_error_ = error;
      float own[S::kOwn];
      CombineParts<kLargest>(S::kOwn * threadIdx.x, own);
      if constexpr (S::kCluster) {
        const int buffer = gathered_ & 1, column = S::kOwn * threadIdx.x;
        uint64_t* barrier = &m_.gathering[buffer];
        if (threadIdx.x == 0) ExpectReceived(barrier, S::kMost * sizeof(float) + (told ? sizeof(double) : 0));
        Send(m_.Gathered(buffer) + column, own, barrier, m_.rank ^ 1);
        if (told && threadIdx.x == 0) Send(&m_.gathered_error[buffer][0], error, barrier, m_.rank ^ 1);
        AwaitReceived(barrier, gathered_ >> 1 & 1);
        const float other = m_.Gathered(buffer)[column];
        own[0] = kLargest ? fmaxf(own[0], other) : own[0] + other;
        if (told) heard_error_ = error + m_.gathered_error[buffer][0];
        ++gathered_;
      }
      return own[0];
    }
  }
  // What this block's parts of kCount columns a thread, from `first` on, come to: to the blocks that own them.
  template <bool kLargest, int kCount>
  __device__ void TellOwners(int first) {
    const int buffer = gathered_ & 1, column = first + kCount * threadIdx.x;
    float own[kCount];
    CombineParts<kLargest>(column, own);
    float* to = m_.Gathered(buffer) + m_.rank * m_.owned + OfOwner(column);
    Send(to, own, &m_.gathering[buffer], OwnerOf(column));
  }
  // What is heard of blocks that there are not, before the first Hear of sums.
  __device__ void ClearSlots() {
    for (int k = m_.ranks * m_.owned + threadIdx.x; k < m_.slots * m_.owned; k += S::kBlockThreads) {
      m_.Gathered(0)[k] = m_.Gathered(1)[k] = 0;
    }
  }
  // From `first` on, of so many owners, whose columns lie one slot after the other.
  template <int kOwners, int kSlots>
  __device__ static float AddSlots(const float* first) {
    constexpr int kOwned = S::kMost / kOwners;
    float sum = 0;
#pragma unroll
    for (int k = 0; k < kSlots; k += 4) {
      const float* four = first + k * kOwned;
      sum += (four[0] + four[kOwned]) + (four[2 * kOwned] + four[3 * kOwned]);
    }
    return sum;
  }
  // What all blocks have told of this one's columns; of none, something that is no use.
  template <bool kLargest>
  __device__ float Hear(bool told, double error) {
    const int buffer = gathered_ & 1;
    uint64_t* barrier = &m_.gathering[buffer];
    if (threadIdx.x == 0) ExpectReceived(barrier, m_.heard_bytes + (told ? m_.ranks * sizeof(double) : 0));
    if (told && threadIdx.x < m_.ranks) Send(&m_.gathered_error[buffer][m_.rank], error, barrier, threadIdx.x);
    // All wait for what comes after this wait: the rest is fetched before.
    const int slots = m_.slots, owners = m_.owners;
    const float* first = m_.Gathered(buffer) + Owned();
    AwaitReceived(barrier, gathered_ >> 1 & 1);
    float sum = static_cast<float>(kVoid);
    if constexpr (kLargest) {
      for (int k = 0; k < m_.ranks; ++k) sum = fmaxf(sum, first[k * m_.owned]);
    } else {
      sum = owners == 16  ? AddSlots<16, 16>(first)
            : owners == 4 ? (slots == 8 ? AddSlots<4, 8>(first) : AddSlots<4, 4>(first))
            : slots == 16 ? AddSlots<8, 16>(first)
                          : AddSlots<8, 8>(first);
    }
    heard_error_ = 0;
    for (int k = 0; k < m_.ranks && told; ++k) heard_error_ += m_.gathered_error[buffer][k];
    ++gathered_;
    return sum;
  }
  // The sum of what owned columns have, over those of all blocks; all threads get the same.
  __device__ double SumOfColumns(double value) {
    for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(0xffffffffu, value, lane);
    if (lane_ == 0) m_.column_errors[warp_] = value;
    __syncthreads();
    double sum = 0;
    for (int w = 0; w < S::kWarps; ++w) sum += m_.column_errors[w];
    if constexpr (S::kSplit) {
      const int buffer = gathered_ & 1;
      uint64_t* barrier = &m_.gathering[buffer];
      if (threadIdx.x == 0) ExpectReceived(barrier, m_.ranks * sizeof(double));
      if (threadIdx.x < m_.ranks) Send(&m_.gathered_error[buffer][m_.rank], sum, barrier, threadIdx.x);
      AwaitReceived(barrier, gathered_ >> 1 & 1);
      sum = 0;
      for (int k = 0; k < m_.ranks; ++k) sum += m_.gathered_error[buffer][k];
      ++gathered_;
    }
    return sum;
  }
  // Whether any thread of any block says so; all threads get the same.
  __device__ bool AnyInCluster(bool value) {
    const int here = __syncthreads_or(value);
    if constexpr (!S::kCluster) return here != 0;
    if (threadIdx.x == 0) m_.said = here != 0 ? 1 : 0;
    SyncCluster();
    const bool any = __any_sync(0xffffffffu, lane_ < m_.ranks && LoadRemote(&m_.said, lane_) != 0);
    SyncCluster();  // No block has left before all have heard.
    return any;
  }
  // Whether any row of the problem has no mass.
  __device__ bool HasVoidRows() const {
    if constexpr (!S::kCluster) return m_.voids != 0;
    return __any_sync(0xffffffffu, lane_ < m_.ranks && LoadRemote(&m_.voids, lane_) != 0);
  }
  // What column Owned() has now to all blocks' `to`, an array of all columns. Afterwards it is there.
  template <typename T>
  __device__ void Spread(T value, T* to) {
    if constexpr (S::kSplit) {
      BeginSpread(value, to);
      AwaitSpread(0);
      AwaitSpread(1);
    } else {
      to[threadIdx.x] = value;
    }
    __syncthreads();  // It is there; and parts have been read, which the cluster knew before this block's threads.
  }
  // The same, there for a thread that has called AwaitSpread for the column's half.
  template <typename T>
  __device__ void BeginSpread(T value, T* to) {
    if constexpr (sizeof(T) == sizeof(float)) {
      EndSpread(value, PlanSpread(to));
    } else {
      const uint64_t* barrier = ExpectSpread<T>();
      const int first = OwnerOf(threadIdx.x) * S::kOwn;
      for (int k = 0; k < S::kOwn && m_.own > 0; ++k) {
        Send(&to[OwnedColumn()], value, barrier, first + k);
        const int other = first + k + m_.owners;
        if (other < m_.ranks) Send(&to[OwnedColumn()], value, barrier, other);
      }
    }
  }
  // The same in two steps, of which the first needs no value. Each of the threads that know it tells kOwn blocks of it,
  // and perhaps those that come as many as there are owners later: of floats, one block kOwn of them side by side.
  struct SpreadPlan {
    uint32_t to[2], barrier[2];  // In one block, and in another;
    int blocks;                  // or in fewer.
  };
  __device__ SpreadPlan PlanSpread(float* to) {
    const uint64_t* barrier = ExpectSpread<float>();
    const float* own = &to[OwnedColumn() / S::kOwn * S::kOwn];
    const int rank = OwnerOf(threadIdx.x) * S::kOwn + lane_ % S::kOwn, other = rank + m_.owners;
    const int blocks = m_.own == 0 ? 0 : other < m_.ranks ? 2 : 1;
    return {{RemoteAddress(own, rank), RemoteAddress(own, other)},
            {RemoteAddress(barrier, rank), RemoteAddress(barrier, other)},
            blocks};
  }
  __device__ void EndSpread(float value, const SpreadPlan& plan) {
    float values[S::kOwn];
    const int from = lane_ / S::kOwn * S::kOwn;
#pragma unroll
    for (int k = 0; k < S::kOwn; ++k) values[k] = __shfl_sync(0xffffffffu, value, from + k);
    if (plan.blocks > 0) SendTo(plan.to[0], values, plan.barrier[0]);
    if (plan.blocks > 1) SendTo(plan.to[1], values, plan.barrier[1]);
  }
  // The barrier that this block's columns tell, of either half of them. `T`: the type that comes.
  template <typename T>
  __device__ const uint64_t* ExpectSpread() {
    uint64_t(&barriers)[2] = m_.spreading[spread_++ & 1];
    if (threadIdx.x == 0) {
      for (uint64_t& barrier : barriers) ExpectReceived(&barrier, S::kMost / 2 * sizeof(T));
    }
    return &barriers[m_.rank >= m_.owners / 2 ? 1 : 0];
  }
  __device__ void AwaitSpread(int half) const {
    const unsigned last = spread_ - 1;
    AwaitReceived(&m_.spreading[last & 1][half], last >> 1 & 1);
  }

  const Job& job_;
  Memory& m_;
  const int warp_, lane_;
  double heard_error_ = 0;

 private:
  // By a shuffle the compiler knows that all lanes have the same, and keeps what follows from it once: the widest
  // kernel spills less, others need no help.
  __device__ static int WarpNumber() {
    const int warp = threadIdx.x / 32;
    return kTiles == kOnChipTilesMost ? __shfl_sync(0xffffffffu, warp, 0) : warp;
  }

  unsigned gathered_ = 0, spread_ = 0;  // So far.
};

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_SUMS_CUH_
