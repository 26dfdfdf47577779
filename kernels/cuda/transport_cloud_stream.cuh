// A block's way through the columns of a cloud: copies that run ahead, and the products of its rows with a tile.
//
// The rows' halves stay in shared memory where they fit (Parts), and a ring of stages brings the columns'; else stages
// have rows too. With one part of the coordinates warpgroups take turns at the matrix units, so that the others'
// exponentials are done meanwhile; with more, which keep them busy for longer, order costs more than it gains, and two
// blocks of a multiprocessor (MultiplyHalf) need none. Before Hopper: the same tiles, one at a time, by mma.sync, whose
// results lie in registers alike.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_CLOUD_STREAM_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_CLOUD_STREAM_CUH_

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_cloud.cuh"
#include "kernels/cuda/transport_hopper.cuh"

namespace sinkhorn {
namespace cuda {

// Of copies, for blocks of `groups` warpgroups.
constexpr int StagesOf(int planes, Parts parts, int groups) {
  if (planes == 1 || parts == Parts::kOne) return 4;
  return groups == 4 ? 2 : parts == Parts::kFew ? 4 : 3;
}
// Tiles of shared memory that a stream takes, beside what aligns it.
constexpr int StreamTiles(int planes, Parts parts, int depths, int groups) {
  const int stages = StagesOf(planes, parts, groups), row_tiles = groups / 2;
  return parts == Parts::kMany ? stages * (row_tiles + 1) : row_tiles * depths + stages;
}

// Where things lie in dynamic shared memory, as its addresses.
template <Parts kParts, int kRowTiles>
struct Places {
  uint32_t base;
  int tile_bytes, depths;
  __device__ uint32_t Rows(int stage, int part) const {
    return base + (kParts == Parts::kMany ? stage * (kRowTiles + 1) : part * kRowTiles) * tile_bytes;
  }
  __device__ uint32_t Columns(int stage) const {
    return base +
           (kParts == Parts::kMany ? stage * (kRowTiles + 1) + kRowTiles : depths * kRowTiles + stage) * tile_bytes;
  }
};

// Products in the order of their sizes: high low, low high, high high.
__device__ constexpr int RowPlane(int product) { return product == 1 ? 1 : 0; }
__device__ constexpr int ColumnPlane(int product) { return product == 0 ? 1 : 0; }
template <int kPlanes>
constexpr int kFirstProduct = kPlanes == 2 ? 0 : 2;

#if SINKHORN_HOPPER

constexpr int kTurn = 1;   // Names of barriers: whose turn it is at the matrix units,
constexpr int kTerms = 5;  // and a warpgroup's terms.

// The copies and products of a block of kGroups warpgroups. kAgain: the columns of so many
// parts of the coordinates are wanted once more after a tile's products; or, without kProducts, they alone (kFew).
template <int kPlanes, Parts kParts, int kGroups = 4, int kAgain = 0, bool kProducts = true>
class Stream {
  static constexpr int kStage = StagesOf(kPlanes, kParts, kGroups);

 public:
  static constexpr int kWarpgroups = kGroups;
  static constexpr bool kOnePart = kParts == Parts::kOne;
  static constexpr int kRowTiles = kGroups / 2;
  static constexpr bool kTurns = kParts == Parts::kOne && kAgain == 0;  // At the matrix units.
  static constexpr bool kStays = kParts == Parts::kOne && kAgain > 0;   // A tile's only part is still there.

  __device__ Stream(const CloudContext& c, uint64_t* full, uint64_t* empty)
      : c_(c),
        full_(full),
        empty_(empty),
        group_(static_cast<int>(OfWarp(threadIdx.x / 128))),
        places_{Aligned(), kPlanes * c.plane_bytes, Depths()} {
    rows_ = places_.Rows(0, 0) + group_ / 2 * kPlanes * c.plane_bytes + group_ % 2 * 64 * c.row_bytes;
  }
  // By one thread, before all others may go on.
  __device__ static void Init(uint64_t* full, uint64_t* empty) {
    for (int stage = 0; stage < kStage; ++stage) {
      InitBarrier(&full[stage], 1);
      InitBarrier(&empty[stage], kGroups);
    }
    FenceBarriers();
  }
  // The tiles once more, from the first on. `count` parts from `again` on are wanted again (the last, where there are
  // no more). `other_rows`: the context has others since.
  __device__ void Begin(int again = 0, int count = kAgain, bool other_rows = false) {
    again_ = again;
    parts_ = Depths() + (kStays ? 0 : count);
    first_ = limit_;
    if (other_rows) rows_at_ = limit_;
    limit_ += (c_.last_tile - c_.first_tile) * parts_;
    // A warp for each: a thread takes hundreds of cycles to begin a copy.
    const int warp = threadIdx.x / 32;
    if (warp < kStage) CopyStep(32 * warp, warp);
    if (kTurns && group_ == kGroups - 1) ArriveAt(kTurn, 256);
  }

  // acc = the products of this warpgroup's rows with a tile's columns over one step's coordinates (added if not the
  // first).
  __device__ void Multiply(float (&acc)[16][4]) {
    const int step = step_, part = part_;
    const uint32_t rows = rows_ + places_.Rows(step % kStage, part) - places_.Rows(0, 0), columns = ColumnsOf(step);
    switch (part + 1 == Depths() ? c_.last_steps : kDepth / 16) {
      case 1:
        MultiplySteps<1>(rows, columns, part > 0, acc);
        break;
      case 2:
        MultiplySteps<2>(rows, columns, part > 0, acc);
        break;
      case 3:
        MultiplySteps<3>(rows, columns, part > 0, acc);
        break;
      default:
        MultiplySteps<4>(rows, columns, part > 0, acc);
        break;
    }
    if (kTurns) {
      // The next warpgroup comes in while the last products of this one are made.
      WaitForProducts<1>();
      HandOver(step + 1 < limit_);
      // Two steps later all have read what is there. Each warpgroup in its turn, for copies take a while to begin.
      if (step - 2 >= first_ && step % kGroups == group_) CopyStep(128 * group_, kStage - 2);
    }
    WaitForProducts<0>();
    Release();
  }
  // kStays: a turn is for the products of what has been made of a tile, and for the next tile's own.
  // acc = the first tile's products.
  template <int kSteps>
  __device__ void MultiplyFirst(float (&acc)[16][4]) {
    if (group_ == kGroups - 1) ArriveAt(kTurn, 256);
    MultiplySteps<kSteps>(rows_, ColumnsOf(step_), false, acc);
    WaitForProducts<1>();
    HandOver(true);
    WaitForProducts<0>();
  }
  // `begin` commits a group of products, `end` takes them. acc = the next tile's products, if there is one.
  template <int kSteps, typename Begin, typename End>
  __device__ void MultiplyNext(Begin begin, End end, float (&acc)[16][4]) {
    const bool more = step_ + 1 < limit_;
    if (more) {
      MultiplySteps<kSteps>(rows_, ColumnsOf(step_ + 1), false, acc, begin);
    } else {
      WaitAt(kTurn + group_, 256);
      BeginProducts();
      begin();
      CommitProducts();
      CommitProducts();
    }
    WaitForProducts<2>();
    end();
    Release();
    WaitForProducts<1>();
    HandOver(more);
    WaitForProducts<0>();
  }
  // acc = the products with half of a tile's columns, without turns: where a multiprocessor has other blocks.
  template <int kSteps>
  __device__ void MultiplyHalf(int half, float (&acc)[8][4]) {
    constexpr int kRowBytes = RowBytes<kSteps>(), kPlane = kCloudTile * kRowBytes / 16;
    const uint32_t columns = ColumnsOf(step_) + half * kCloudTile / 2 * kRowBytes;
    const uint64_t a = MatrixAt(OfWarp(rows_), kRowBytes), b = MatrixAt(OfWarp(columns), kRowBytes);
    BeginProducts();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) CommitStep<kPlane>(a + 2 * k, b + 2 * k, k > 0, acc);
    CommitProducts();
    WaitForProducts<0>();
  }
  // Where the next columns wanted again are; until Release.
  __device__ uint32_t Again() {
    if (!kStays) WaitForPhase(&full_[step_ % kStage], step_ / kStage & 1);
    return places_.Columns(step_ % kStage);
  }
  // Behind the stages, in dynamic shared memory.
  __device__ char* End() const { return DynamicShared() + (places_.Columns(kStage) - SharedAddress(DynamicShared())); }
  // This step's columns have been read by this warpgroup.
  __device__ void Release() {
    if (threadIdx.x % 128 == 0) Arrive(&empty_[step_ % kStage]);
    // The last warpgroup, at once.
    if (!kTurns) CopyStep(128 * (kGroups - 1), kStage);
    ++step_;
    if (++part_ == parts_) part_ = 0;
  }

 private:
  struct Nothing {
    __device__ void operator()() const {}
  };

  __device__ static uint32_t Aligned() {
    return (SharedAddress(DynamicShared()) + kPlaneAlignment - 1) / kPlaneAlignment * kPlaneAlignment;
  }
  __device__ int Depths() const { return !kProducts ? 0 : kParts == Parts::kOne ? 1 : c_.depths; }

  // Where a step's columns are, once they are there.
  __device__ uint32_t ColumnsOf(int step) const {
    const uint32_t columns = places_.Columns(step % kStage);
    WaitForPhase(&full_[step % kStage], step / kStage & 1);
    return columns;
  }
  // Whose turn is next; `more`: after the last warpgroup, the first's once more.
  __device__ void HandOver(bool more) {
    if (group_ != kGroups - 1 || more) ArriveAt(kTurn + (group_ + 1) % kGroups, 256);
  }
  template <int kSteps>
  static constexpr int RowBytes() {
    return CloudRowBytes(kParts == Parts::kOne ? 16 * kSteps : kDepth);
  }
  // Of 16 coordinates; `add`: to what acc is.
  template <int kPlane, int kEights>
  __device__ static void CommitStep(uint64_t a, uint64_t b, bool add, float (&acc)[kEights][4]) {
#pragma unroll
    for (int product = kFirstProduct<kPlanes>; product < 3; ++product) {
      const bool first = product == kFirstProduct<kPlanes>;
      MultiplyGroup(a + RowPlane(product) * kPlane, b + ColumnPlane(product) * kPlane, !first || add, acc);
    }
  }

  // Two groups of products, the last steps' apart: the next warpgroup comes in while they are made. Where matrices lie
  // is known before the turn, and to the compiler as one number of a warp: products follow each other without a pause.
  // before: comes first in the turn.
  template <int kSteps, typename Before = Nothing>
  __device__ void MultiplySteps(uint32_t rows, uint32_t columns, bool add, float (&acc)[16][4], Before before = {}) {
    constexpr int kLast = kStays || kPlanes == 1 ? 2 : 1;
    constexpr int kRowBytes = RowBytes<kSteps>(), kPlane = kCloudTile * kRowBytes / 16;
    const uint64_t a = MatrixAt(OfWarp(rows), kRowBytes), b = MatrixAt(OfWarp(columns), kRowBytes);
    if (kOnePart) WaitAt(kTurn + group_, 256);
    BeginProducts();
    before();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (k == (kSteps > kLast ? kSteps - kLast : 0)) CommitProducts();
      CommitStep<kPlane>(a + 2 * k, b + 2 * k, k > 0 || (kParts != Parts::kOne && add), acc);
    }
    CommitProducts();
  }

  // Begins the copies of the step that is so many ahead, if there is one, when its stage is free. By one thread, whose
  // warp calls it.
  __device__ void CopyStep(int thread, int ahead) {
    const int step = step_ + ahead;
    if (static_cast<int>(threadIdx.x) == thread && step < limit_) {
      const int at = step - first_, tile = kTurns ? at : at / parts_;
      if (step >= kStage) WaitForPhase(&empty_[step % kStage], (step / kStage - 1) & 1);
      Copy(step, at - tile * parts_, c_.first_tile + tile);
    }
    __syncwarp();
  }
  __device__ void Copy(int step, int part, int tile) {
    const int stage = step % kStage;
    const int last = (kProducts ? Depths() : c_.depths) - 1;
    const int depth = part < Depths() ? part : min(again_ + part - Depths(), last);
    const unsigned bytes = places_.tile_bytes;
    const bool rows = part < Depths() && (kParts == Parts::kMany || step - rows_at_ < Depths());
    ArriveExpecting(&full_[stage], rows ? (kRowTiles + 1) * bytes : bytes);
    CopyBulk(places_.Columns(stage), c_.ColumnTile(tile, depth, kPlanes), bytes, &full_[stage]);
    if (!rows) return;
    for (int k = 0; k < kRowTiles; ++k) {
      CopyBulk(places_.Rows(stage, part) + k * bytes, c_.RowTile(kRowTiles * c_.block.block + k, depth, kPlanes), bytes,
               &full_[stage]);
    }
  }

  const CloudContext& c_;
  uint64_t* const full_;
  uint64_t* const empty_;
  const int group_;
  const Places<kParts, kRowTiles> places_;
  uint32_t rows_;              // Where this warpgroup's are, of the first stage.
  int parts_ = 1, again_ = 0;  // Steps of a tile.
  int step_ = 0, part_ = 0;    // The next, and its part.
  int first_ = 0, limit_ = 0;  // Steps of these tiles.
  int rows_at_ = 0;            // The first of those that bring rows.
};

__device__ inline void WaitForTerms() { WaitAt(kTerms + threadIdx.x / 128, 128); }

#else

template <int kPlanes, Parts kParts, int kGroups = 4, int kAgain = 0>
class Stream {
 public:
  static constexpr int kWarpgroups = kGroups;
  static constexpr bool kOnePart = kParts == Parts::kOne, kTurns = false;

  __device__ Stream(const CloudContext& c, uint64_t* /*full*/, uint64_t* /*empty*/) : c_(c) {}
  __device__ static void Init(uint64_t* /*full*/, uint64_t* /*empty*/) {}
  __device__ void Begin() { step_ = 0; }

  __device__ void Multiply(float (&acc)[16][4]) {
    const int step = step_++;
    const int depths = kParts == Parts::kOne ? 1 : c_.depths, depth = step % depths;
    const int bytes = kPlanes * c_.plane_bytes;
    char* const rows = DynamicShared();
    char* const columns = rows + 2 * bytes;
    __syncthreads();  // What is there has been read.
    CopyTile(c_.ColumnTile(c_.first_tile + step / depths, depth, kPlanes), columns, bytes);
    for (int half = 0; half < 2 && (depths > 1 || step == 0); ++half) {
      CopyTile(c_.RowTile(2 * c_.block.block + half, depth, kPlanes), rows + half * bytes, bytes);
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

// What tiles' columns add lies in shared memory, in slots of a tile each, while it is wanted. Arithmetic in float64,
// which makes it, waits until the matrix units are idle. So warpgroups that take turns at those share it: each brings
// one tile's in kGroups, before its turn, when it waits anyway; two turns later all have read what was there, so that
// kTurnSlots are enough. Others have two slots each.
constexpr int kTurnSlots = 4;
constexpr int SlotsOf(int groups) { return 2 * groups; }

// The first tile that this thread brings something for.
template <typename Columns>
__device__ inline int FirstBrought(const CloudContext& c) {
  return c.first_tile + (Columns::kTurns ? static_cast<int>(threadIdx.x) / 128 : 0);
}
// For each of the block's tiles, while `stream` goes through them: use(products, slot, tile). store(slot, of), before,
// of what load(tile) has returned; `first`: of FirstBrought. kAhead: loaded a tile or more before it is stored.
template <bool kAhead = true, typename Columns, typename Loaded, typename Load, typename Store, typename Use>
__device__ inline void EachTile(const CloudContext& c, Columns* stream, const Loaded& first, Load load, Store store,
                                Use use) {
  constexpr int kGroups = Columns::kWarpgroups;
  const int group = threadIdx.x / 128, depths = Columns::kOnePart ? 1 : c.depths;
  if constexpr (Columns::kTurns) {
    store(group, first);
    Loaded next = load(c.first_tile + kGroups + group);
    for (int tile = c.first_tile, step = 0; tile < c.last_tile; ++tile, ++step) {
      if (step + 1 >= kGroups && (step + 1) % kGroups == group) {
        store((step + 1) % kTurnSlots, next);
        next = load(tile + 1 + kGroups);
      }
      float acc[16][4];
      stream->Multiply(acc);
      use(acc, step % kTurnSlots, tile);
    }
  } else {
    const int ring = 2 * group;
    store(ring, first);
    Loaded next;
    for (int tile = c.first_tile, step = 0; tile < c.last_tile; ++tile, ++step) {
      const int slot = ring + (step + 1) % 2;
      if (kAhead) next = load(tile + 1);
      float acc[16][4];
      for (int depth = 0; depth < depths; ++depth) stream->Multiply(acc);
      WaitForTerms();
      use(acc, ring + step % 2, tile);
      if (!kAhead) next = load(tile + 1);
      store(slot, next);
    }
  }
}

// A launch of a kernel whose blocks of kGroups warpgroups stream columns of up to `dim` coordinates.
template <typename... Parameters, typename... Arguments>
void LaunchStreaming(void (*kernel)(Parameters...), int64_t blocks, int planes, int dim, bool hopper,
                     cudaStream_t stream, const Arguments&... arguments) {
  const int tiles = hopper ? StreamTiles(planes, PartsOf(planes, dim), CloudDepths(dim), kGroups) : 3;
  const size_t smem_bytes = static_cast<size_t>(tiles) * planes * kCloudTile * CloudRowBytes(dim) + kPlaneAlignment;
  if (!hopper) return LaunchKernel(kernel, blocks, kCloudThreads, smem_bytes, stream, arguments...);
  LaunchOverlapping(kernel, blocks, kCloudThreads, smem_bytes, stream, arguments...);
}

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_CLOUD_STREAM_CUH_
