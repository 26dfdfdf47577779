// Gradients to the points and projections of clouds with more coordinates than a block's registers hold sums of, in
// float32, on Hopper's matrix units.
//
// Exponents of many coordinates take longer than what is made of them, so they are made once: of a chunk of rows, whose
// densities are kept as matrix fragments, in the order in which threads read them. Blocks then multiply them by the
// columns' points, up to kWideParts parts of kDepth coordinates each; those of a cluster have shares of the tiles.
#include <algorithm>

#include "kernels/cuda/transport_cloud_stream.cuh"
#include "kernels/cuda/transport_gradient.cuh"
#include "kernels/cuda/transport_job.h"
#include "kernels/cuda/transport_launch.h"

namespace sinkhorn {
namespace cuda {
namespace {

constexpr int kWideParts = 4;

__host__ __device__ inline int WideGroups(const Job& job) {
  return static_cast<int>(CeilDiv(CloudDepths(job.dim), kWideParts));
}
__host__ __device__ inline int64_t TilesOf(const Job& job, int side) { return CeilDiv(job.size[1 - side], kCloudTile); }
// Of a chunk: rows, of a block that makes densities and of one that adds up points.
__host__ __device__ inline int64_t RowsOfChunk(const Job& job, int side, int chunk) {
  const int64_t rows = WideChunkRows(job, side), left = PaddedPoints(job.size[side]) - chunk * rows;
  return left < 0 ? 0 : left < rows ? left : rows;
}
__host__ __device__ inline int64_t DensityRowBlocks(const Job& job, int side, int chunk) {
  return RowsOfChunk(job, side, chunk) / kCloudRows;
}
__host__ __device__ inline int64_t WideRowBlocks(const Job& job, int side, int chunk) {
  return RowsOfChunk(job, side, chunk) / kGradientRows;
}

#if SINKHORN_HOPPER

// The fragments of a warpgroup's 64 rows and a tile's columns: this thread's first; kThreadsOfGroup apart are those of
// high and low halves of 16 columns each.
constexpr int kThreadsOfGroup = 128;
__device__ inline uint4* FragmentsAt(const Member& member, int64_t group, int64_t tiles, int tile) {
  return member.At<uint4>(member.job.at.densities) + (group * tiles + tile) * 16 * kThreadsOfGroup +
         threadIdx.x % kThreadsOfGroup;
}

#endif

template <int kPlanes, Parts kParts>
__global__ void __launch_bounds__(kCloudThreads, 1) DensityKernel(LaunchTable table, int side, int chunk, int splits) {
#if SINKHORN_HOPPER
  constexpr int kStages = StagesOf(kPlanes, kParts, kGroups);
  __shared__ CloudContext c;
  __shared__ float terms[SlotsOf(kGroups)][kCloudTile];
  alignas(8) __shared__ uint64_t full[kStages], empty[kStages];
  using Columns = Stream<kPlanes, kParts, kGroups>;
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int64_t blocks = DensityRowBlocks(job, side, chunk), index = work.block / splits;
  const Member member{job, index / blocks};
  AwaitKernelBefore();
  if (member.state(0)->mode != kFloat || !IsSolved(member)) return;
  const int first = static_cast<int>(chunk * (WideChunkRows(job, side) / kCloudRows));
  const int block = static_cast<int>(index % blocks), split = static_cast<int>(work.block % splits);
  if (threadIdx.x == 0) {
    FillShape(member, RowBlock{member.index, 0, first + block, split, splits}, side, Pass::kMeasure, &c);
    FillState(member, &c);
    Columns::Init(full, empty);
  }
  __syncthreads();
  const int group = threadIdx.x / 128, column = threadIdx.x % 128;
  float level[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int i = c.first_row + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * row;
    level[row] =
        DensityLevel(c, c.own_phi[min(i, c.rows - 1)] + c.reference, i < c.rows ? member.ratio(0, side)[i] : 0);
  }
  Columns stream(c, full, empty);
  stream.Begin();
  const auto load = [&](int tile) { return c.LoadTerm(tile * kCloudTile + column); };
  const auto store = [&](int slot, const ColumnTerm& of) { terms[slot][column] = c.TermOf(of); };
  EachTile(c, &stream, load(c.first_tile), load, store, [&](float(&acc)[16][4], int slot, int tile) {
    uint4* fragments = FragmentsAt(member, kGroups * block + group, TilesOf(job, side), tile);
    EachFragment(c.factor, acc, terms[slot], level, [&](int k, const auto& high, const auto& low) {
      fragments[2 * k * kThreadsOfGroup] = make_uint4(high[0], high[1], high[2], high[3]);
      fragments[(2 * k + 1) * kThreadsOfGroup] = make_uint4(low[0], low[1], low[2], low[3]);
    });
  });
#endif
}

template <int kPlanes>
__global__ void __launch_bounds__(kThreads, 1) WideGradientKernel(LaunchTable table, int side, int chunk, int ranks) {
#if SINKHORN_HOPPER
  constexpr int kStages = StagesOf(kPlanes, Parts::kFew, kGradientGroups);
  __shared__ CloudContext c;
  alignas(8) __shared__ uint64_t full[kStages], empty[kStages];
  using Columns = Stream<kPlanes, Parts::kFew, kGradientGroups, kWideParts, false>;
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int groups = WideGroups(job), rank = static_cast<int>(work.block % ranks);
  const int64_t blocks = WideRowBlocks(job, side, chunk) * groups, index = work.block / ranks;
  const Member member{job, index / blocks};
  if (member.state(0)->mode != kFloat || !IsSolved(member)) return;
  const int group = static_cast<int>(index % blocks % groups), block = static_cast<int>(index % blocks / groups);
  const int depths = CloudDepths(job.dim), first_part = depths * group / groups;
  const int parts = depths * (group + 1) / groups - first_part;
  if (threadIdx.x == 0) {
    FillShape(member, RowBlock{member.index, 0, block, rank, ranks}, side, Pass::kMeasure, &c);
    Columns::Init(full, empty);
  }
  __syncthreads();
  Columns stream(c, full, empty);
  stream.Begin(first_part, parts);
  PointSums<kWideParts, kDepth> rows[1] = {};
  float sums[kDepth / 8][4];
  const float whole[2] = {1, 1};
  for (int tile = c.first_tile; tile < c.last_tile; ++tile) {
    const uint4* fragments =
        FragmentsAt(member, kGradientGroups * block + threadIdx.x / kThreadsOfGroup, TilesOf(job, side), tile);
    uint32_t high[8][4], low[8][4];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint4 h = __ldcg(fragments + 2 * k * kThreadsOfGroup);
      const uint4 l = __ldcg(fragments + (2 * k + 1) * kThreadsOfGroup);
      high[k][0] = h.x, high[k][1] = h.y, high[k][2] = h.z, high[k][3] = h.w;
      low[k][0] = l.x, low[k][1] = l.y, low[k][2] = l.z, low[k][3] = l.w;
    }
#pragma unroll
    for (int part = 0; part < kWideParts; ++part) {
      if (part >= parts) break;
      AddProducts<kPlanes, kDepth>(high, low, stream.Again(), whole, sums, rows[0].total[part]);
      stream.Release();
    }
  }
  const int64_t first_row = chunk * WideChunkRows(job, side) + block * kGradientRows;
  const int64_t row0 = first_row + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  StoreSums(rows, member, side, row0, 8, first_part, parts, rank, ranks);
#endif
}

// Of a chunk's densities, by the shape alone.
int DensitySplits(const Job& job, int side) {
  return CloudSplits(WideChunkRows(job, side), job.size[1 - side], job.dim);
}

}  // namespace

int WideChunks(const Job& job, int side) {
  return static_cast<int>(CeilDiv(PaddedPoints(job.size[side]), WideChunkRows(job, side)));
}

WideLaunch WideLaunchOf(const Job& job, int side) {
  const int64_t blocks = WideChunkRows(job, side) / kGradientRows * WideGroups(job);
  return {DensitySplits(job, side), RanksOf(blocks, TilesOf(job, side), 4)};
}

int64_t DensityBlocks(const Job& job, int splits, int side, int chunk) {
  return job.count * DensityRowBlocks(job, side, chunk) * splits;
}
int64_t WideBlocks(const Job& job, int ranks, int side, int chunk) {
  return job.count * WideRowBlocks(job, side, chunk) * WideGroups(job) * ranks;
}

void LaunchDensities(const LaunchTable& table, int64_t blocks, int planes, int dim, int splits, int side, int chunk,
                     cudaStream_t stream) {
  const Parts parts = PartsOf(planes, dim);
  const auto launch = [&](void (*kernel)(LaunchTable, int, int, int)) {
    LaunchStreaming(kernel, blocks, planes, dim, true, stream, table, side, chunk, splits);
  };
  if (planes == 2) return launch(DensityKernel<2, Parts::kMany>);
  launch(parts == Parts::kFew ? DensityKernel<1, Parts::kFew> : DensityKernel<1, Parts::kMany>);
}

void LaunchWideGradient(const LaunchTable& table, int64_t blocks, int planes, int ranks, int side, int chunk,
                        cudaStream_t stream) {
  const size_t tile = static_cast<size_t>(planes) * kCloudTile * CloudRowBytes(kDepth);
  const size_t ring = StreamTiles(planes, Parts::kFew, 0, kGradientGroups) * tile + kPlaneAlignment;
  const size_t smem_bytes = std::max<size_t>(ring, PointSumBytes(kWideParts, kDepth));
  LaunchCluster(planes == 2 ? WideGradientKernel<2> : WideGradientKernel<1>, blocks, ranks, kThreads, smem_bytes,
                stream, table, side, chunk, ranks);
}

}  // namespace cuda
}  // namespace sinkhorn
