// A block's way through the columns of a cloud: copies that run ahead, and the products of its rows with a tile.
//
// Shallow (up to kDepth coordinates): the rows' halves stay in shared memory. Deep: rows and columns are copied for
// every kDepth coordinates. Before Hopper: the same tiles, one at a time, by mma.sync, whose results lie in registers
// alike.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_CLOUD_STREAM_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_CLOUD_STREAM_CUH_

#include "kernels/cuda/transport_cloud.cuh"
#include "kernels/cuda/transport_hopper.cuh"

namespace sinkhorn {
namespace cuda {

constexpr int kPlaneAlignment = 1024;  // The longest swizzle's period.

// Stages of copies. Deep ones have rows too.
template <bool kDeep>
constexpr int kStages = kDeep ? 2 : 4;

// Where things lie in dynamic shared memory, as its addresses.
template <int kPlanes, bool kDeep, int kRowTiles>
struct Places {
  uint32_t base;
  int plane_bytes;
  __device__ uint32_t Rows(int stage) const {
    return base + (kDeep ? stage * (kRowTiles + 1) * kPlanes * plane_bytes : 0);
  }
  __device__ uint32_t Columns(int stage) const {
    return base + (kDeep ? stage * (kRowTiles + 1) + kRowTiles : kRowTiles + stage) * kPlanes * plane_bytes;
  }
};
// Tiles of shared memory that a stream takes, beside what aligns it.
template <bool kDeep, int kRowTiles>
constexpr int kStreamTiles = kDeep ? kStages<true>*(kRowTiles + 1) : kRowTiles + kStages<false>;

// Products in the order of their sizes: high low, low high, high high.
__device__ constexpr int RowPlane(int product) { return product == 1 ? 1 : 0; }
__device__ constexpr int ColumnPlane(int product) { return product == 0 ? 1 : 0; }
template <int kPlanes>
constexpr int kFirstProduct = kPlanes == 2 ? 0 : 2;

#if SINKHORN_HOPPER

constexpr int kTurn = 1;   // Names of barriers: whose turn it is at the matrix units,
constexpr int kTerms = 5;  // and a warpgroup's terms.

// The copies and products of a block of kGroups warpgroups. kAgain: the columns of one part of the coordinates are
// wanted once more after a tile's products, until Release.
template <int kPlanes, bool kDeep, int kGroups = 4, bool kAgain = false>
class Stream {
 public:
  static constexpr int kStage = kStages<kDeep>, kRowTiles = kGroups / 2;
  static constexpr bool kTurns = !kDeep && !kAgain;  // At the matrix units.

  __device__ Stream(const CloudContext& c, uint64_t* full, uint64_t* empty)
      : c_(c), full_(full), empty_(empty), places_{Aligned(), c.plane_bytes} {
    steps_ = (c.last_tile - c.first_tile) * StepsOfTile();
    const int group = Group();
    const uint32_t half = group / 2 * kPlanes * c_.plane_bytes + group % 2 * 64 * c_.row_bytes;
    rows_ = MatrixAt(places_.Rows(0) + half, c_.row_bytes);
    columns_ = MatrixAt(places_.Columns(0), c_.row_bytes);
  }
  // Which part of the coordinates is wanted again.
  __device__ void WantAgain(int depth) { again_ = depth; }
  // By one thread, before all others may go on.
  __device__ static void Init(uint64_t* full, uint64_t* empty) {
    for (int stage = 0; stage < kStage; ++stage) {
      InitBarrier(&full[stage], 1);
      InitBarrier(&empty[stage], kGroups);
    }
    FenceBarriers();
  }
  // The tiles once more, from the first on.
  __device__ void Begin() {
    limit_ += steps_;
    if (threadIdx.x == 0) {
      for (int step = limit_ - steps_; step < min(limit_ - steps_ + kStage, limit_); ++step) Copy(step);
    }
    __syncwarp();
    if (kTurns && Group() == kGroups - 1) ArriveAt(kTurn, 256);
  }

  // acc = the products of this warpgroup's rows with a tile's columns over one step's coordinates (added if not the
  // first).
  __device__ void Multiply(float (&acc)[16][4]) {
    const int step = step_++, stage = step % kStage, group = Group(), depth = kDeep ? step % StepsOfTile() : 0;
    const int stage_bytes = (kDeep ? kRowTiles + 1 : 1) * kPlanes * c_.plane_bytes;
    const uint64_t columns = columns_ + stage * stage_bytes / 16,
                   rows = kDeep ? rows_ + stage * stage_bytes / 16 : rows_;
    const int products = depth + 1 == Depths() ? c_.last_steps : kDepth / 16;
    WaitForPhase(&full_[stage], step / kStage & 1);
    if (kTurns) WaitAt(kTurn + group, 256);
    if (kDeep && depth == 0) {
#pragma unroll
      for (int e = 0; e < 64; ++e) acc[e / 4][e % 4] = 0;
    }
    switch (products) {
      case 1:
        MultiplySteps<1>(rows, columns, acc);
        break;
      case 2:
        MultiplySteps<2>(rows, columns, acc);
        break;
      case 3:
        MultiplySteps<3>(rows, columns, acc);
        break;
      default:
        MultiplySteps<4>(rows, columns, acc);
        break;
    }
    Refill(step);
    if (kTurns) {
      // The next warpgroup comes in while the last products of this one are made.
      WaitForProducts<1>();
      if (group != kGroups - 1 || step + 1 < limit_) ArriveAt(kTurn + (group + 1) % kGroups, 256);
    }
    WaitForProducts<0>();
    if (kDeep || !kAgain) Release();
  }
  // Where the columns wanted again are.
  __device__ uint32_t Again() {
    if (kDeep) {
      const int step = step_++;
      WaitForPhase(&full_[step % kStage], step / kStage & 1);
      Refill(step);
    }
    return places_.Columns((step_ - 1) % kStage);
  }
  // The last step's columns have been read by this warpgroup.
  __device__ void Release() {
    if (threadIdx.x % 128 == 0) Arrive(&empty_[(step_ - 1) % kStage]);
  }

 private:
  __device__ static uint32_t Aligned() {
    return (SharedAddress(DynamicShared()) + kPlaneAlignment - 1) / kPlaneAlignment * kPlaneAlignment;
  }
  __device__ static int Group() { return __shfl_sync(0xffffffffu, threadIdx.x / 128, 0); }
  __device__ int Depths() const { return kDeep ? c_.depths : 1; }
  __device__ int StepsOfTile() const { return Depths() + (kDeep && kAgain ? 1 : 0); }

  // Two groups of products: the last step's apart.
  template <int kSteps>
  __device__ void MultiplySteps(uint64_t rows, uint64_t columns, float (&acc)[16][4]) {
    const int plane = c_.plane_bytes / 16;
    BeginProducts();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (k == kSteps - 1) CommitProducts();
#pragma unroll
      for (int product = kFirstProduct<kPlanes>; product < 3; ++product) {
        const bool first = k == 0 && product == kFirstProduct<kPlanes>;
        MultiplyGroup(rows + RowPlane(product) * plane + 2 * k, columns + ColumnPlane(product) * plane + 2 * k,
                      kDeep || !first, acc);
      }
    }
    CommitProducts();
  }

  // By one thread: begins a step's copies.
  __device__ void Copy(int step) {
    const int stage = step % kStage, part = step % StepsOfTile(), tile = c_.first_tile + step % steps_ / StepsOfTile();
    const int depth = part < Depths() ? part : again_;
    const unsigned bytes = kPlanes * c_.plane_bytes;
    const bool rows = part < Depths() && (kDeep || step == 0);
    ArriveExpecting(&full_[stage], rows ? (kRowTiles + 1) * bytes : bytes);
    CopyBulk(places_.Columns(stage), c_.Tile(c_.y, tile, depth, kPlanes), bytes, &full_[stage]);
    for (int tile_of = 0; tile_of < kRowTiles && rows; ++tile_of) {
      CopyBulk(places_.Rows(stage) + tile_of * bytes,
               c_.Tile(c_.x, kRowTiles * c_.block.block + tile_of, depth, kPlanes), bytes, &full_[stage]);
    }
  }
  // What was read some steps ago is free when all have read it.
  __device__ void Refill(int step) {
    constexpr int kLag = kDeep ? 1 : 2;
    const int read = step - kLag;
    if (threadIdx.x == 0 && read >= limit_ - steps_ && read + kStage < limit_) {
      WaitForPhase(&empty_[read % kStage], read / kStage & 1);
      Copy(read + kStage);
    }
    __syncwarp();
  }

  const CloudContext& c_;
  uint64_t* const full_;
  uint64_t* const empty_;
  const Places<kPlanes, kDeep, kRowTiles> places_;
  uint64_t rows_, columns_;  // Of the first stage.
  int steps_, step_ = 0, limit_ = 0, again_ = 0;
};

__device__ inline void WaitForTerms() { WaitAt(kTerms + threadIdx.x / 128, 128); }

#else

template <int kPlanes, bool kDeep>
class Stream {
 public:
  __device__ Stream(const CloudContext& c, uint64_t* /*full*/, uint64_t* /*empty*/) : c_(c) {}
  __device__ static void Init(uint64_t* /*full*/, uint64_t* /*empty*/) {}
  __device__ void Begin() { step_ = 0; }

  __device__ void Multiply(float (&acc)[16][4]) {
    const int step = step_++;
    const int depths = kDeep ? c_.depths : 1, depth = kDeep ? step % depths : 0;
    const int bytes = kPlanes * c_.plane_bytes;
    char* const rows = DynamicShared();
    char* const columns = rows + 2 * bytes;
    __syncthreads();  // What is there has been read.
    CopyTile(c_.Tile(c_.y, c_.first_tile + step / depths, depth, kPlanes), columns, bytes);
    for (int half = 0; half < 2 && (kDeep || step == 0); ++half) {
      CopyTile(c_.Tile(c_.x, 2 * c_.block.block + half, depth, kPlanes), rows + half * bytes, bytes);
    }
    CommitCopies();
    WaitForCopies<0>();
    __syncthreads();
    if (depth == 0) {
#pragma unroll
      for (int e = 0; e < 64; ++e) acc[e / 4][e % 4] = 0;
    }
    const int products = depth + 1 == depths ? c_.last_steps : kDepth / 16;
    for (int k = 0; k < products; ++k) MultiplyStep(rows, columns, k, acc);
  }

 private:
  __device__ static void CopyTile(const char* from, char* to, int bytes) {
    for (int at = 16 * threadIdx.x; at < bytes; at += 16 * kCloudThreads) CopyAsync16(to + at, from + at);
  }
  __device__ void MultiplyStep(const char* rows, const char* columns, int k, float (&acc)[16][4]) {
    const int lane = threadIdx.x % 32, group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4;
    rows += group / 2 * kPlanes * c_.plane_bytes;
    uint32_t a[kPlanes][4];
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      const int row = group % 2 * 64 + warp * 16 + lane % 16;
      LoadMatrices(rows + plane * c_.plane_bytes + SwizzledAt(row, 2 * k + lane / 16, c_.row_bytes), a[plane]);
    }
#pragma unroll
    for (int pair = 0; pair < 8; ++pair) {
      uint32_t b[kPlanes][4];
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) {
        const int row = 16 * pair + lane / 16 * 8 + lane % 8;
        LoadMatrices(columns + plane * c_.plane_bytes + SwizzledAt(row, 2 * k + lane / 8 % 2, c_.row_bytes), b[plane]);
      }
#pragma unroll
      for (int product = kFirstProduct<kPlanes>; product < 3; ++product) {
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          const uint32_t(&right)[4] = b[ColumnPlane(product)];
          MultiplyHalves(a[RowPlane(product)], right[2 * q], right[2 * q + 1], acc[2 * pair + q]);
        }
      }
    }
  }
  const CloudContext& c_;
  int step_ = 0;
};

__device__ inline void WaitForTerms() { __syncthreads(); }

#endif

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_CLOUD_STREAM_CUH_
