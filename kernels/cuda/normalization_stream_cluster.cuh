// What the blocks of a member tell each other where it is a cluster's: the columns' sums, and numbers now and then.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_STREAM_CLUSTER_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_STREAM_CLUSTER_CUH_

#include "kernels/cuda/normalization_stream_shape.cuh"
#include "kernels/cuda/transport_cluster.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

constexpr int kStreamBarriers = 2;

// Each block sums up some quads of columns for all: it hears the blocks' parts of those, and says what they come to.
// At the beginning of dynamic shared memory: kStreamClusterFloats.
template <class Shape>
class StreamCluster {
 public:
  static constexpr int W = Shape::kWarpCount, kColumns = Shape::kColumns, kMost = Shape::kMostRanks;
  static_assert(Shape::kThreadCount % kMost == 0, "lanes of a quad, one for each block that is told of it");
  static_assert(4 * Shape::kThreadCount >= kColumns, "a thread for each quad");

  // `barriers`: of this block.
  __device__ StreamCluster(uint64_t (&barriers)[kStreamBarriers], int rows, int columns)
      : rank_(ClusterRank()), ranks_(ClusterRanks()), quads_((columns + 3) / 4), barriers_(barriers) {
    const int each_rows = (rows + ranks_ - 1) / ranks_, first_row = rank_ * each_rows;
    if (threadIdx.x == 0) {
      InitReceiving(barriers);
      Own()[0] = first_row;
      Own()[1] = min(each_rows, rows - first_row);
    }
    const int quad = threadIdx.x, to = quad / Each();
    *ThreadRoute() = make_uint4(0, 0, RemoteAddress(Sums() + 4 * (First() + quad / kMost), quad % kMost % ranks_),
                                RemoteAddress(&barriers[1], quad % kMost % ranks_));
    if (quad < quads_) {
      ThreadRoute()->x = RemoteAddress(Inbox() + 4 * (quad % Each() * ranks_ + rank_), to);
      ThreadRoute()->y = RemoteAddress(&barriers[0], to);
    }
    SyncCluster();  // All blocks have set up theirs.
  }
  // This block's rows of the member.
  __device__ int FirstRow() const { return Own()[0]; }
  __device__ int Rows() const { return Own()[1]; }
  // Blocks that are done wait for those that may still send to them.
  __device__ void Leave() const { SyncCluster(); }

  // The columns' sums over all blocks, in each of them the same bits; parts: the block's warps', [W, kColumns], that
  // all its threads know to be there. They are read, and the result stays, until the next time.
  __device__ const float* Sum(const float* parts) {
    const uint4 route = *ThreadRoute();
    const int mine = max(min(Each(), quads_ - First()), 0);
    if (threadIdx.x == 0) {
      constexpr unsigned kQuad = sizeof(float4);
      ExpectReceived(&barriers_[0], mine * ranks_ * kQuad);
      ExpectReceived(&barriers_[1], quads_ * kQuad);
    }
    if (threadIdx.x < quads_) {
      float sum[4] = {};
#pragma unroll
      for (int w = 0; w < W; ++w) AddTo(sum, parts + w * kColumns + 4 * threadIdx.x);
      SendTo(route.x, sum, route.y);
    }
    AwaitReceived(&barriers_[0], parity_);
    // As many lanes as a cluster has blocks at most share a quad: each tells one block.
    uint32_t back = route.z;
#pragma unroll 1
    for (int k = threadIdx.x / kMost; k < mine && threadIdx.x % kMost < ranks_; k += Shape::kThreadCount / kMost) {
      const float* const from = Inbox() + 4 * k * ranks_;
      float sum[4] = {};
#pragma unroll
      for (int r = 0; r < kMost; ++r) {
        if (r < ranks_) AddTo(sum, from + 4 * r);
      }
      SendTo(back, sum, route.w);
      back += Shape::kThreadCount / kMost * sizeof(float4);
    }
    AwaitReceived(&barriers_[1], parity_);
    parity_ ^= 1;
    return Sums();
  }
  // The sum of the blocks' numbers x, each the same in all threads of its block: to all threads of all, the same bits.
  __device__ float Total(float x) {
    float* const slot = Slots() + (turn_ ^= 1);  // The other one may still be read.
    if (threadIdx.x == 0) *slot = x;
    SyncCluster();
    const int from = threadIdx.x % 32;
    return WarpSum(from < ranks_ ? LoadRemote(slot, from) : 0.0f);
  }

 private:
  // [kColumns]; [Each(), ranks_] of 4; [2]; where a thread sends parts of a quad and tells of it, and where its sums.
  // Before those the block's own rows.
  __device__ static float* Sums() { return DynamicFloats(); }
  __device__ static float* Inbox() { return Sums() + kColumns; }
  __device__ static float* Slots() { return Inbox() + kColumns + 4 * kMost; }
  __device__ static int* Own() { return reinterpret_cast<int*>(Slots() + 2); }
  __device__ static uint4* ThreadRoute() { return reinterpret_cast<uint4*>(Slots() + 4) + threadIdx.x; }

  __device__ static void AddTo(float (&sum)[4], const float* from) {
    const float4 x = *reinterpret_cast<const float4*>(from);
    sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
  }
  // Quads that a block sums up, and its first one.
  __device__ int Each() const { return (quads_ + ranks_ - 1) / ranks_; }
  __device__ int First() const { return rank_ * Each(); }

  const int rank_, ranks_, quads_;
  uint64_t (&barriers_)[kStreamBarriers];
  unsigned parity_ = 0;
  int turn_ = 0;
};

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_STREAM_CLUSTER_CUH_
