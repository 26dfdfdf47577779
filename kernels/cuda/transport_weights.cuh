// Weights of pairs that are made once, of exact tiles (transport_exact_tiles.cuh), and then multiplied by all numbers
// of right-hand sides' rows: where exponents take longer than such a product, and a block has not registers for all
// sums.
//
// A chunk of items, kTile rows each, lies in memory at a time: floats, as factors of float64's matrix units, in the
// order in which threads read them. An item's segments, other columns or other weights, follow each other.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_WEIGHTS_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_WEIGHTS_CUH_

#include <algorithm>

#include "kernels/cuda/transport_exact_sums.cuh"
#include "kernels/cuda/transport_exact_tiles.cuh"
#include "kernels/cuda/transport_job.h"
#include "kernels/cuda/transport_launch.h"

namespace sinkhorn {
namespace cuda {

constexpr int kSumThreads = kThreads;  // Of a block that adds up.
constexpr int kWeightEights = 8;       // Numbers of a row that it makes, in eights.
// How a right-hand side's numbers are dealt to blocks: evenly, in eights.
struct WeightGroups {
  int eights, groups;
  __host__ __device__ explicit WeightGroups(int dim)
      : eights(static_cast<int>(CeilDiv(dim, 8))), groups(static_cast<int>(CeilDiv(eights, kWeightEights))) {}
  __host__ __device__ int First(int group) const { return eights * group / groups; }  // Eights before.
};
constexpr int kWeightStride = 8 * kWeightEights + 2;  // Of right-hand sides in shared memory: banks do not meet.
constexpr size_t kWeightSharedBytes = sizeof(double) * 2 * kManyColumns * kWeightStride;

// Of a chunk, which a job may not have, of `all` items of a side.
__host__ __device__ inline int64_t ItemsOfChunk(const Job& job, int side, int64_t all, int chunk) {
  const int64_t items = job.weight_items[side], left = all - chunk * items;
  return left < 0 ? 0 : left < items ? left : items;
}

// A side's weights: all items, bytes of each, plans that it is made of, and tiles of the longest; what memory a job's
// may take, which more coordinates may exceed.
struct WeightShape {
  int64_t all, item_bytes;
  int plans;
  int64_t plan_tiles, bytes_most;
  // Of an item, to be added up.
  int64_t tiles() const { return item_bytes / WeightColumnBytes(kManyColumns); }
};
constexpr int64_t kWeightBytesMost = int64_t{256} << 20;
// How long it takes to add up what weights multiply, in tiles, on an H200, which has so many clusters of four blocks at
// once: `count` members' chunks of so many items, by clusters of `ranks` blocks.
inline int64_t TilesToAdd(const Job& job, const WeightShape& of, int64_t count, int64_t items, int ranks) {
  constexpr int64_t kClusters = 30, kBeside = 2, kBesideChunk = 3;  // Tiles that a block, or a chunk, takes beside.
  const int64_t at_once = ranks < 4 ? kProcessors : 4 * kClusters;
  const int64_t blocks = count * WeightGroups(job.dim).groups * ranks;  // Of an item of each.
  const int64_t whole = of.all / items, left = of.all - whole * items;
  const int64_t waves = whole * CeilDiv(items * blocks, at_once) + CeilDiv(left * blocks, at_once);
  return waves * (CeilDiv(of.tiles(), ranks) + kBeside) + CeilDiv(of.all, items) * kBesideChunk;
}
// Items of chunks that take the least time, in no more memory than so many bytes for each coordinate, or than a job's
// may take.
inline int64_t BestItems(const Job& job, const WeightShape& of, int64_t count, int ranks) {
  constexpr int64_t kBytes = 8, kMore = 8;  // Chunks more than must be.
  const int64_t points = int64_t{job.size[0]} + job.size[1];
  const int64_t most = std::max(kBytes * points * job.dim, of.bytes_most / count) / of.item_bytes;
  const int64_t least = CeilDiv(of.all, std::max<int64_t>(most, 1));
  int64_t best = CeilDiv(of.all, least);
  for (int64_t chunks = least + 1; chunks <= std::min(of.all, least + kMore); ++chunks) {
    const int64_t items = CeilDiv(of.all, chunks);
    if (TilesToAdd(job, of, count, items, ranks) < TilesToAdd(job, of, count, best, ranks)) best = items;
  }
  return best;
}
// Blocks of a cluster, which share an item's tiles: by a member's shape alone.
inline int WeightRanks(const Job& job, const WeightShape& of) {
  int best = 1;
  int64_t least = 0;
  for (int ranks = 1; ranks <= kPortableRanks && (ranks == 1 || 4 * ranks <= of.tiles()); ranks *= 2) {
    const int64_t time = TilesToAdd(job, of, 1, BestItems(job, of, 1, ranks), ranks);
    if (ranks > 1 && time >= least) continue;
    best = ranks;
    least = time;
  }
  return best;
}
// Job::weight_items.
inline int WeightItems(const Job& job, const WeightShape& of) {
  return of.all == 0 ? 0 : static_cast<int>(BestItems(job, of, job.count, WeightRanks(job, of)));
}
// `at_once`: blocks that make weights, of those a device has.
inline WeightLaunch WeightLaunchOf(const Job& job, int side, const WeightShape& of, int at_once) {
  if (of.all == 0) return {0, 0, 0};
  const int64_t items = job.weight_items[side];
  return {static_cast<int>(CeilDiv(of.all, items)), BestSplits(job.count * items * of.plans, of.plan_tiles, at_once, 1),
          WeightRanks(job, of)};
}

#if SINKHORN_HOPPER

// A sum of floats in two of them, which lacks nothing but what is 2^-46 or so of it.
struct SplitSum {
  float high, low;
  __device__ void Add(float x) {
    const float sum = __fadd_rn(high, x), moved = __fsub_rn(sum, high);
    low = __fadd_rn(low, __fadd_rn(__fsub_rn(high, __fsub_rn(sum, moved)), __fsub_rn(x, moved)));
    high = sum;
  }
  __device__ double value() const { return static_cast<double>(high) + low; }
};

// An item's, counted from the first of its chunk.
__device__ inline char* WeightsOfItem(const Member& member, int64_t item, int64_t item_bytes) {
  return member.At<char>(member.job.at.densities) + item * item_bytes;
}
// Of a segment: what the thread has of the eight columns with `column` and of rows Row(r - 1) and Row(r), r odd: of its
// two columns the first, of both rows, then the second.
template <typename Tiles>
__device__ inline float4* WeightsAt(char* segment, int64_t column, int r) {
  const int64_t fragment = column / 8 * (kTile / 16) + Tiles::Row(r) / 16;
  return reinterpret_cast<float4*>(segment) + fragment * 32 + threadIdx.x % 32;
}

// A part of a sum: weights * right, of so many columns.
struct WeightSegment {
  char* weights;
  const double* right;  // [columns, numbers of a row]
  int columns;
  int first, last;  // Tiles, counted through all segments.
};
constexpr int kSegmentsMost = 4;
struct WeightSegments {
  WeightSegment of[kSegmentsMost];
  int count;
  __device__ void Begin() { count = 0; }
  __device__ int tiles() const { return count > 0 ? of[count - 1].last : 0; }
  // Behind the last. Returns where the weights of another are.
  __device__ char* Add(char* weights, const double* right, int columns) {
    const int first = tiles();
    of[count] = {weights, right, columns, first, first + static_cast<int>(CeilDiv(columns, kManyColumns))};
    ++count;
    return weights + WeightColumnBytes(columns);
  }
  __device__ const WeightSegment& Find(int tile) const {
    int s = 0;
    while (tile >= of[s].last) ++s;
    return of[s];
  }
};

// Sums over a range of tiles: numbers 8 * first_eight and so on, of `eights` eights, of rows of `width` numbers. kMass:
// of weights, too. Between matrix products nothing is done in float64: it would wait until their units are idle.
template <bool kMass>
class WeightedSums {
 public:
  using Tiles = ManyTilesOf<4>;
  using Rights = RightSums<Tiles, kWeightEights>;

  __device__ WeightedSums(const WeightSegments& segments, int width, int first_eight, int eights)
      : segments_(segments), width_(width), first_(8 * first_eight), eights_(eights) {}

  __device__ void Sum(const TileRange& range, Rights* sums) const {
    if (range.first >= range.last) return;
    switch (eights_) {
      case 1:
        return SumOf<1>(range, sums);
      case 2:
        return SumOf<2>(range, sums);
      case 3:
      case 4:
        return SumOf<4>(range, sums);
      case 5:
      case 6:
        return SumOf<6>(range, sums);
      default:
        return SumOf<8>(range, sums);
    }
  }

 private:
  static constexpr int kPairs = Tiles::kRows / 2;
  static constexpr int kEight = kTile / 16 * 32;  // Fragments of eight columns.

  // kEights: those wanted, or one more.
  template <int kEights>
  __device__ void SumOf(const TileRange& range, Rights* sums) const {
    Copy(range.first, 0);
    CommitCopies();
    const float4* from = Weights(range.first);
    float4 next[2][kPairs];  // Of the eights that come, by turns.
    Load(from, next[0]);
    Load(from + kEight, next[1]);
    SplitSum mass[Tiles::kRows] = {};
    for (int tile = range.first; tile < range.last; ++tile) {
      const int stage = (tile - range.first) % 2;
      if (tile + 1 < range.last) Copy(tile + 1, 1 - stage);
      CommitCopies();
      WaitForCopies<1>();
      __syncthreads();
      const float4* after = tile + 1 < range.last ? Weights(tile + 1) : from;
      const double* right =
          Stage(stage) + (32 * Tiles::Group() + 2 * (threadIdx.x % 4)) * kWeightStride + threadIdx.x % 32 / 4;
#pragma unroll 1
      for (int n = 0; n < 4; n += 2) {
#pragma unroll
        for (int turn = 0; turn < 2; ++turn, right += 8 * kWeightStride) {
          double weights[kPairs][4];
#pragma unroll
          for (int m = 0; m < kPairs; ++m) {
            const float4 four = next[turn][m];
            weights[m][0] = four.x, weights[m][1] = four.y, weights[m][2] = four.z, weights[m][3] = four.w;
            if constexpr (kMass) {
              mass[2 * m].Add(four.x), mass[2 * m].Add(four.z);
              mass[2 * m + 1].Add(four.y), mass[2 * m + 1].Add(four.w);
            }
          }
          Load((n == 0 ? from + 2 * kEight : after) + turn * kEight, next[turn]);
#pragma unroll
          for (int e = 0; e < kEights; ++e) {
            const double numbers[2] = {right[8 * e], right[kWeightStride + 8 * e]};
#pragma unroll
            for (int m = 0; m < kPairs; ++m) AddDoubles(weights[m], numbers, sums->products[m][e]);
          }
        }
      }
      from = after;
      __syncthreads();  // The stage has been read.
    }
#pragma unroll
    for (int r = 0; r < Tiles::kRows; ++r) sums->mass[r] = mass[r].value();
  }

  __device__ static double* Stage(int stage) {
    return reinterpret_cast<double*>(DynamicShared()) + stage * kManyColumns * kWeightStride;
  }
  // The first of a tile's, of this warp's columns.
  __device__ const float4* Weights(int tile) const {
    const WeightSegment& segment = segments_.Find(tile);
    return WeightsAt<Tiles>(segment.weights, int64_t{tile - segment.first} * kManyColumns + 32 * Tiles::Group(), 1);
  }
  __device__ static void Load(const float4* from, float4 (&to)[kPairs]) {
#pragma unroll
    for (int m = 0; m < kPairs; ++m) to[m] = __ldcg(from + 32 * m);
  }
  __device__ void Copy(int tile, int stage) const { width_ % 2 == 0 ? Copy<2>(tile, stage) : Copy<1>(tile, stage); }
  template <int kSideBySide>
  __device__ void Copy(int tile, int stage) const {
    constexpr int kThreadsOfRow = 8 * kWeightEights / kSideBySide, kTogether = Tiles::kBlockThreads / kThreadsOfRow;
    const WeightSegment& segment = segments_.Find(tile);
    const int own = threadIdx.x / kThreadsOfRow, k = threadIdx.x % kThreadsOfRow * kSideBySide, width = width_;
    if (k >= 8 * eights_) return;
    const bool inside = first_ + k < width;
    const double* from = segment.right + (inside ? first_ + k : 0);
    const int first = (tile - segment.first) * kManyColumns + own, columns = segment.columns;
    const uint32_t shared = SharedAddress(Stage(stage) + own * kWeightStride + k);
    constexpr int kRounds = kManyColumns / kTogether;
    constexpr uint32_t kRoundBytes = kTogether * kWeightStride * sizeof(double);
    const auto copy = [&](int q, const double* row, bool there) {
      kSideBySide == 2 ? CopyDoubles(shared + q * kRoundBytes, row, there)
                       : CopyDouble(shared + q * kRoundBytes, row, there);
    };
    if (first - own + kManyColumns <= columns) {
      const double* row = from + int64_t{first} * width;
      const int step = kTogether * width;
#pragma unroll
      for (int q = 0; q < kRounds; ++q, row += step) copy(q, row, inside);
    } else {
#pragma unroll 1
      for (int q = 0; q < kRounds; ++q) {
        const int j = first + q * kTogether;
        copy(q, from + int64_t{min(j, columns - 1)} * width, inside && j < columns);
      }
    }
  }

  const WeightSegments& segments_;
  const int width_, first_, eights_;
};

// Of a block that adds up: which item of the chunk, counted there and through all, and what of its numbers and tiles.
struct SumWork {
  int64_t member, item, of_all;
  int first_eight, eights, rank;
  // Blocks of a job's chunk, of `all` items of a side.
  __device__ static SumWork Find(const Job& job, int side, int64_t all, int chunk, int64_t block, int ranks) {
    const WeightGroups groups(job.dim);
    const int64_t items = ItemsOfChunk(job, side, all, chunk), index = block / ranks;
    const int group = static_cast<int>(index % groups.groups), first = groups.First(group);
    const int64_t item = index / groups.groups % items;
    return {index / groups.groups / items,
            item,
            int64_t{chunk} * job.weight_items[side] + item,
            first,
            groups.First(group + 1) - first,
            static_cast<int>(block % ranks)};
  }
};
// store(row, number, sum, mass) of an item's rows, `row_count` of which there are. All threads of a cluster.
template <bool kMass, typename Store>
__device__ inline void AddWeighted(const WeightSegments& segments, int dim, const SumWork& of, int ranks,
                                   int64_t row_count, Store store) {
  using Sums = WeightedSums<kMass>;
  __shared__ SharedSums<kWeightEights> shared;
  typename Sums::Rights sums;
  sums.Clear();
  Sums(segments, dim, of.first_eight, of.eights).Sum(RangeOf(segments.tiles(), of.rank, ranks), &sums);
  AddUp<typename Sums::Tiles, kWeightEights>(sums, &shared);
  const int first = 8 * of.first_eight, width = min(8 * of.eights, dim - first);
  EachSum(&shared, of.rank, ranks, static_cast<int>(min(row_count, int64_t{kTile})), width,
          [&](int row, int k, double value, double mass) { store(row, first + k, value, mass); });
}

#endif

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_WEIGHTS_CUH_
