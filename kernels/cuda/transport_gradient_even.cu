// The same as transport_gradient.cu of one problem that fills a device by itself, of one part of the coordinates.
//
// All tiles of all blocks of rows, one after the other, are cut into as many even parts as a device runs blocks at a
// time, so that none waits for others, however many blocks of rows there are. Where a part ends inside a block of rows,
// its sums go to memory; whichever of that block's parts is the last to end adds them up, in their order.
#include "kernels/cuda/transport_gradient_sums.cuh"
#include "kernels/cuda/transport_launch.h"

namespace sinkhorn {
namespace cuda {
namespace {

// Coordinates, with those that fill a row; and parts.
__host__ __device__ inline int EvenColumns(const Job& job) { return CloudRowBytes(job.dim) / 2; }
__host__ __device__ inline int64_t EvenParts(const Job& job) {
  return kProcessors * PiecesOf(Parts::kOne, EvenColumns(job));
}
// Of a part: with fewer, clusters share blocks of rows; with more, the last ones' waiting is little.
constexpr int kLeastTiles = 16, kMostTiles = 512;

// A side's tiles: of each block of rows, and how many of those there are, if any sums are wanted.
struct SideTiles {
  int64_t of_block, blocks;
  __host__ __device__ int64_t all() const { return of_block * blocks; }
};
__host__ __device__ inline SideTiles TilesOf(const Job& job, int side) {
  return {CeilDiv(job.size[1 - side], kCloudTile), MakesMeans(job, side) ? GradientRowBlocks(job, side) : 0};
}
__host__ __device__ inline int64_t AllTiles(const Job& job) { return TilesOf(job, 0).all() + TilesOf(job, 1).all(); }

#if SINKHORN_HOPPER

// Where a part begins, and which part has a tile.
__device__ inline int64_t FirstOf(int64_t all, int64_t parts, int64_t part) { return all * part / parts; }
__device__ inline int64_t PartOf(int64_t all, int64_t parts, int64_t tile) {
  return CeilDiv((tile + 1) * parts, all) - 1;
}

#endif

template <int kPlanes, int kColumns>
__global__ void __launch_bounds__(kThreads, PiecesOf(Parts::kOne, kColumns)) EvenGradientKernel(LaunchTable table) {
#if SINKHORN_HOPPER
  constexpr int kStages = StagesOf(kPlanes, Parts::kOne, kGradientGroups);
  __shared__ CloudContext c;
  __shared__ float terms[TermTiles(Parts::kOne)][kCloudTile];
  alignas(8) __shared__ uint64_t full[kStages], empty[kStages];
  using Block = Sums<kPlanes, Parts::kOne, kColumns, 1>;
  using Rows = typename Block::Rows;
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int64_t parts = EvenParts(job);
  const Member member{job, work.block / parts};
  const int64_t part = work.block % parts;
  if (member.state(0)->mode != kFloat || !IsSolved(member)) return;
  const SideTiles first = TilesOf(job, 0), second = TilesOf(job, 1);
  const int64_t all = first.all() + second.all(), until = FirstOf(all, parts, part + 1);
  // A thread's entries of a part's sums: of the block of rows that it begins inside, and of others.
  const auto sums_of = [&](int64_t of, bool begins_inside) {
    return member.At<float>(job.at.densities) + (2 * of + (begins_inside ? 1 : 0)) * Rows::kEntries * kThreads +
           threadIdx.x;
  };
  // The context of a block of rows, and its tiles of this part.
  const auto fill = [&](int side, int block, int64_t first_tile, int64_t last_tile) {
    __syncthreads();  // Shared memory is free.
    if (threadIdx.x == 0) {
      FillShape(member, RowBlock{member.index, 0, block, 0, 1}, side, Pass::kMeasure, &c);
      c.first_tile = static_cast<int>(first_tile);
      c.last_tile = static_cast<int>(last_tile);
      FillState(member, &c);
    }
    __syncthreads();
  };
  if (threadIdx.x == 0) Block::Columns::Init(full, empty);
  fill(0, 0, 0, 0);  // What all blocks of rows share is there: the stream asks for it.
  typename Block::Columns stream(c, full, empty);
#pragma unroll 1
  for (int64_t tile = FirstOf(all, parts, part); tile < until;) {
    const int side = tile < first.all() ? 0 : 1;
    const int64_t before = side == 0 ? 0 : first.all(), of_block = side == 0 ? first.of_block : second.of_block;
    const int block = static_cast<int>((tile - before) / of_block);
    const int64_t begin = before + block * of_block, end = begin + of_block, last = min(end, until);
    const bool inside = tile > begin;
    fill(side, block, tile - begin, last - begin);
    const int row0 = block * kGradientRows + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    const RowLevel rows[2] = {LevelOf(member, c, 0, side, row0), LevelOf(member, c, 0, side, row0 + 8)};
    const float level[2] = {rows[0].level, rows[1].level}, weight[2] = {1, 1};
    Block sums = {};
    sums.Add(c, level, weight, 0, terms, &stream, /*other_rows=*/true);
    if (last - tile < of_block) {
      sums.rows[0].Each([&](int e, float& sum) { sums_of(part, inside)[e * kThreads] = sum; });
      const int64_t first_part = PartOf(all, parts, begin), last_part = PartOf(all, parts, end - 1);
      unsigned* arrivals = member.At<unsigned>(job.at.arrivals) + (side == 0 ? 0 : first.blocks) + block;
      tile = last;
      if (!LastToArrive(arrivals, static_cast<unsigned>(last_part - first_part + 1))) continue;
      sums = {};
#pragma unroll 1
      for (int64_t of = first_part; of <= last_part; ++of) {
        const float* from = sums_of(of, of > first_part);
        sums.rows[0].Each([&](int e, float& sum) { sum += __ldcg(from + e * kThreads); });
      }
    }
    tile = last;
    StoreSums(sums.rows, member, side, row0, 8, /*first_part=*/0, /*parts=*/1, /*rank=*/0, /*ranks=*/1);
  }
#endif
}

}  // namespace

bool HasEvenGradient(const Job& job) {
  return job.engines == 1 && HasGradientKernel(job, kFloat) && job.precision != Precision::kDouble &&
         PartsOf(PlanesOf(job), job.dim) == Parts::kOne && AllTiles(job) >= kLeastTiles * kProcessors &&
         AllTiles(job) <= kMostTiles * kProcessors;
}
int64_t EvenGradientBytes(const Job& job) {
  const int64_t of_block = int64_t{kGradientRows} * EvenColumns(job) * sizeof(float);
  return HasEvenGradient(job) ? 2 * EvenParts(job) * of_block : 0;  // A part begins, and ends, inside one at most.
}
int64_t EvenGradientBlocks(const Job& job) { return job.count * EvenParts(job); }

void LaunchEvenGradient(const LaunchTable& table, int64_t blocks, int planes, int dim, cudaStream_t stream) {
  const size_t tile = static_cast<size_t>(planes) * kCloudTile * CloudRowBytes(dim);
  const size_t smem_bytes = StreamTiles(planes, Parts::kOne, 1, kGradientGroups) * tile + kPlaneAlignment;
  const auto launch = [&](void (*kernel)(LaunchTable)) {
    LaunchKernel(kernel, blocks, kThreads, smem_bytes, stream, table);
  };
  switch (CloudRowBytes(dim)) {
    case 32:
      return launch(planes == 2 ? EvenGradientKernel<2, 16> : EvenGradientKernel<1, 16>);
    case 64:
      return launch(planes == 2 ? EvenGradientKernel<2, 32> : EvenGradientKernel<1, 32>);
    default:
      return launch(planes == 2 ? EvenGradientKernel<2, 64> : EvenGradientKernel<1, 64>);
  }
}

}  // namespace cuda
}  // namespace sinkhorn
