// The same as transport_gradient.cu of one problem that fills a device by itself, of one part of the coordinates.
//
// All tiles of all blocks of rows are cut into even parts: transport_gradient_parts.cuh.
#include "kernels/cuda/transport_gradient_parts.cuh"
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

template <int kPlanes, int kColumns>
__global__ void __launch_bounds__(kThreads, PiecesOf(Parts::kOne, kColumns)) EvenGradientKernel(LaunchTable table) {
#if SINKHORN_HOPPER
  constexpr int kStages = StagesOf(kPlanes, Parts::kOne, kGradientGroups);
  __shared__ CloudContext c;
  __shared__ float terms[TermTiles(Parts::kOne)][kCloudTile];
  alignas(8) __shared__ uint64_t full[kStages], empty[kStages];
  using Block = Sums<kPlanes, Parts::kOne, kColumns, 1>;
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int parts = static_cast<int>(EvenParts(job));
  const Member member{job, work.block / parts};
  const int part = static_cast<int>(work.block % parts);
  if (member.state(0)->mode != kFloat || !IsSolved(member)) return;
  const auto tiles = [&] { return EvenTiles(job, parts, /*groups=*/1); };
  // The context of a block of rows, and its tiles of this part.
  const auto fill = [&](const EvenPiece& piece) {
    __syncthreads();  // Shared memory is free.
    if (threadIdx.x == 0) {
      FillShape(member, RowBlock{member.index, 0, piece.block, 0, 1}, piece.side, Pass::kMeasure, &c);
      c.first_tile = piece.first_tile;
      c.last_tile = piece.last_tile;
      FillState(member, &c);
    }
    __syncthreads();
  };
  if (threadIdx.x == 0) Block::Columns::Init(full, empty);
  fill({});  // What all blocks of rows share is there: the stream asks for it.
  typename Block::Columns stream(c, full, empty);
#pragma unroll 1
  for (int at = tiles().FirstOf(part), until = tiles().FirstOf(part + 1); at < until;) {
    const EvenPiece piece = tiles().PieceAt(at, part);
    at = piece.end;
    if (piece.first_tile == piece.last_tile) continue;
    fill(piece);
    const int side = piece.side, row0 = piece.block * kGradientRows + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    const RowLevel rows[2] = {LevelOf(member, c, 0, side, row0), LevelOf(member, c, 0, side, row0 + 8)};
    const float level[2] = {rows[0].level, rows[1].level}, weight[2] = {1, 1};
    Block sums = {};
    sums.Add(c, level, weight, 0, terms, &stream, /*other_rows=*/true);
    if (!tiles().MakeWhole(member, piece, part, /*group=*/0, &sums.rows[0])) continue;
    StoreSums(sums.rows, member, side, row0, 8, /*first_part=*/0, /*parts=*/1, /*rank=*/0, /*ranks=*/1);
  }
#endif
}

}  // namespace

bool HasEvenGradient(const Job& job) {
  return job.engines == 1 && HasGradientKernel(job, kFloat) && job.precision != Precision::kDouble &&
         PartsOf(PlanesOf(job), job.dim) == Parts::kOne && FillDevice(job, /*groups=*/1);
}
int64_t EvenGradientBytes(const Job& job) {
  return HasEvenGradient(job) ? PartialSumBytes(EvenParts(job), EvenColumns(job)) : 0;
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
