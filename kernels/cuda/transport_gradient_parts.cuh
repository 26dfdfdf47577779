// Gradients of one problem that fills a device by itself: its tiles, those of each block of rows behind those of the
// one before, are cut into as many even parts as a device runs blocks at a time, so that none waits for others, however
// many blocks of rows there are. Where a part ends inside a block of rows, its sums go to memory; whichever of that
// block's parts is the last to end adds them up, in their order.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_GRADIENT_PARTS_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_GRADIENT_PARTS_CUH_

#include "kernels/cuda/transport_gradient.cuh"

namespace sinkhorn {
namespace cuda {

// A side's tiles: of each block of rows, and how many of those there are, if any sums are wanted.
struct SideTiles {
  int of_block, blocks;
};
__host__ __device__ inline SideTiles TilesOf(const Job& job, int side) {
  return {static_cast<int>(CeilDiv(job.size[1 - side], kCloudTile)),
          MakesMeans(job, side) ? static_cast<int>(GradientRowBlocks(job, side)) : 0};
}
// Whether there are as many as parts should have, where each is gone through for so many groups of coordinates: with
// fewer, clusters share blocks of rows; with more, the last ones' waiting is little.
inline bool FillDevice(const Job& job, int groups) {
  constexpr int kLeastTiles = 16, kMostTiles = 512;  // Of a part.
  int64_t tiles = 0;
  for (int side = 0; side < 2; ++side) tiles += int64_t{TilesOf(job, side).of_block} * TilesOf(job, side).blocks;
  return tiles * groups >= kLeastTiles * kProcessors && tiles * groups <= kMostTiles * kProcessors;
}
// Of a member's workspace, at Layout::densities, for parts of all groups: a part begins, and ends, inside one block
// of rows at most.
inline int64_t PartialSumBytes(int64_t parts, int columns) {
  return 2 * parts * kGradientRows * columns * static_cast<int64_t>(sizeof(float));
}
// Of Layout::arrivals.
inline int64_t PartialSumCounters(const Job& job, int groups) {
  return int64_t{TilesOf(job, 0).blocks + TilesOf(job, 1).blocks} * groups;
}

#if SINKHORN_HOPPER

// What a part has of a block of rows.
struct EvenPiece {
  int side, block;
  int first_tile, last_tile;
  int end;  // Where the part goes on.
};

// Parts of the same number have the same tiles, each of another group of coordinates, side by side: what blocks read of
// exponents comes from the second-level cache for all but one of them.
class EvenTiles {
 public:
  __device__ EvenTiles(const Job& job, int parts, int groups)
      : first_(TilesOf(job, 0)), second_(TilesOf(job, 1)), parts_(parts), groups_(groups) {}

  // Where a part begins: among all tiles, with kBeside before each block of rows, for what is to be done beside them by
  // the part that has its first, which it comes to last.
  __device__ int FirstOf(int part) const { return All() * part / parts_; }
  // What a part does from there, or from where it goes on; no tiles, where it ends among those beside.
  __device__ EvenPiece PieceAt(int at, int part) const {
    const bool is_first = at < Places(first_);
    const SideTiles& side = is_first ? first_ : second_;
    const int before = is_first ? 0 : Places(first_), places = kBeside + side.of_block;
    const int block = (at - before) / places, begin = before + block * places;
    const int end = min(begin + places, FirstOf(part + 1));
    return {is_first ? 0 : 1, block, max(at - begin - kBeside, 0), max(end - begin - kBeside, 0), end};
  }
  // Whether `sums`, of a part's piece and a group, are those of the whole block of rows now. All threads of the block
  // call it.
  template <typename Rows>
  __device__ bool MakeWhole(const Member& member, const EvenPiece& piece, int part, int group, Rows* sums) const {
    const bool is_first = piece.side == 0;
    const int of_block = is_first ? first_.of_block : second_.of_block;
    if (piece.last_tile - piece.first_tile == of_block) return true;
    // A thread's entries of a part's sums: of the block of rows that it begins inside, and of others.
    const auto sums_of = [&](int of, bool begins_inside) {
      const int64_t index = 2 * (int64_t{of} * groups_ + group) + (begins_inside ? 1 : 0);
      return member.At<float>(member.job.at.densities) + index * Rows::kEntries * kThreads + threadIdx.x;
    };
    float* const to = sums_of(part, piece.first_tile > 0);
    sums->Each([&](int e, float& sum) { to[e * kThreads] = sum; });
    const int begin = (is_first ? 0 : Places(first_)) + piece.block * (kBeside + of_block) + kBeside;
    const int first_part = PartOf(begin), last_part = PartOf(begin + of_block - 1);
    const int counter = ((is_first ? 0 : first_.blocks) + piece.block) * groups_ + group;
    unsigned* const arrivals = member.At<unsigned>(member.job.at.arrivals) + counter;
    if (!LastToArrive(arrivals, static_cast<unsigned>(last_part - first_part + 1))) return false;
    *sums = {};
#pragma unroll 1
    for (int of = first_part; of <= last_part; ++of) {
      const float* const from = sums_of(of, of > first_part);
      sums->Each([&](int e, float& sum) { sum += __ldcg(from + e * kThreads); });
    }
    return true;
  }

 private:
  static constexpr int kBeside = 7;

  __device__ static int Places(const SideTiles& side) { return side.blocks * (kBeside + side.of_block); }
  __device__ int All() const { return Places(first_) + Places(second_); }
  // Which part has a place.
  __device__ int PartOf(int place) const { return ((place + 1) * parts_ + All() - 1) / All() - 1; }

  const SideTiles first_, second_;
  const int parts_, groups_;
};

#endif

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_GRADIENT_PARTS_CUH_
