// What a problem's exponents are made of, and how it lies on the chip: by its shape and the device alone.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_PROBLEM_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_PROBLEM_CUH_

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "kernels/cuda/transport_types.cuh"

namespace sinkhorn {
namespace cuda {

__host__ __device__ constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Which of x (0) and y (1) stands on a side of an engine's problem.
__host__ __device__ inline int MeasureOf(int engine, int side) { return engine == 0 ? side : engine - 1; }
__host__ __device__ inline int EngineSize(const Job& job, int engine, int side) {
  return job.size[MeasureOf(engine, side)];
}

// A plan as its rows see it: an engine's side, and which of x and y its rows and its columns are.
struct PlanSide {
  int engine, side, own, other;
  __host__ __device__ PlanSide(int engine_of, int side_of)
      : engine(engine_of),
        side(side_of),
        own(MeasureOf(engine_of, side_of)),
        other(MeasureOf(engine_of, 1 - side_of)) {}
  // What a side's gradients and products are made of: the plan, and, of debiased problems, which have a second term,
  // that of the side's own problem.
  __host__ __device__ static PlanSide Term(int side_of, int term) {
    return term == 0 ? PlanSide(0, side_of) : PlanSide(1 + side_of, 0);
  }
};

// What exponents are made of.
enum class Source : int {
  kProducts,   // Of points; DOUBLE: squared distances.
  kDistances,  // Of points, with a root: |x - y|.
  kCosts,      // A matrix.
  kExact,      // Themselves, in float64: made once of any of the above for solves on the chip, and of no job's own.
};
__host__ __device__ inline Source SourceOf(const Job& job) {
  if (job.dense) return Source::kCosts;
  return job.in.point_cost == PointCost::kEuclidean ? Source::kDistances : Source::kProducts;
}
__host__ __device__ inline bool IsCosine(const Job& job) {
  return !job.dense && job.in.point_cost == PointCost::kCosine;
}
__host__ __device__ inline bool IsNegativeDot(const Job& job) {
  return !job.dense && job.in.point_cost == PointCost::kNegativeDot;
}
// Whether nothing is to be prepared beyond what squared distances and cost matrices need.
__host__ __device__ inline bool IsSquared(const Job& job) {
  return job.dense || job.in.point_cost == PointCost::kSquaredEuclidean;
}
// Whether members whose exponents need float64, and what is made of any member's plan, go through the tiles of
// float64's matrix units: transport_exact_tiles.cuh. Of few coordinates a column's term is one more.
constexpr int kFewDims = 3;
constexpr int kFewColumns = kThreads, kManyColumns = 128;  // Of a tile.
__host__ __device__ inline bool MultipliesDoubles(const Job& job) {
  return job.hopper && SourceOf(job) == Source::kProducts && job.precision != Precision::kDouble;
}
// Whether <C, P> is added up by such tiles: points of FAST are rounded, costs are those of points as given.
__host__ __device__ inline bool HasExactCosts(const Job& job) {
  return MultipliesDoubles(job) && job.precision != Precision::kFast;
}
// Whether it is added up from whole costs, transport_linear.cu, rather than from exponents.
__host__ __device__ inline bool HasWholeCosts(const Job& job) {
  return HasExactCosts(job) || (SourceOf(job) == Source::kProducts && !IsNegativeDot(job));
}
// Clouds as halves: tiles of points, for each part of kDepth coordinates a plane for each half.
constexpr int kCloudRows = 256;  // Of a block.
constexpr int kCloudTile = 128;  // Columns of a step, and points of a tile in memory.
constexpr int kDepth = 64;       // Coordinates of a step.
__host__ __device__ inline int PlanesOf(const Job& job) {
  return job.precision == Precision::kFast && SourceOf(job) == Source::kProducts ? 1 : 2;
}
__host__ __device__ inline int CloudDepths(int dim) { return (dim + kDepth - 1) / kDepth; }
__host__ __device__ constexpr int CloudRowBytes(int dim) { return dim <= 16 ? 32 : dim <= 32 ? 64 : 128; }
// How a block reads coordinates: one part of kDepth, or a few, while its rows stay in shared memory; or many, and rows
// come with every tile's columns.
enum class Parts : int { kOne, kFew, kMany };
__host__ __device__ inline Parts PartsOf(int planes, int dim) {
  const int depths = CloudDepths(dim);
  return depths == 1 ? Parts::kOne : planes * depths <= 4 ? Parts::kFew : Parts::kMany;
}
__host__ __device__ inline int64_t PaddedPoints(int64_t points) {
  return (points + kCloudRows - 1) / kCloudRows * kCloudRows;
}
__host__ __device__ inline int64_t HalvesBytes(const Job& job, int side) {
  return PaddedPoints(job.size[side]) * CloudDepths(job.dim) * PlanesOf(job) * CloudRowBytes(job.dim);
}

// How a pass is cut into blocks: by the kernel, and by the shape alone.
enum class Geometry : int {
  kPlain,   // kTile rows against kTile columns a step.
  kExact,   // kTile rows, too, by other steps: products of clouds in kMixed on float64's matrix units.
  kCloud,   // kCloudRows rows against kCloudTile columns a step: products of clouds in float32.
  kOnChip,  // All in one block or cluster.
  kStream,  // Slabs of rows, and blocks of columns.
};
constexpr int kOnChipChunk = 256;  // Iterations after which densities are made anew.
// How a problem lies on the chip: `ranks` blocks of `rows` rows and all columns, of which there is room for `tiles`
// times kTile; blocks look after the potentials of `owned` of them each, the last ones perhaps of none. No tiles: it is
// not solved there. More than one block take a cluster.
struct OnChipShape {
  int tiles, ranks, rows, owned;
};
constexpr int kOnChipTilesMost = 16, kOnChipRanksMost = 16;
constexpr int kOnChipSide = kOnChipTilesMost * kTile;  // The most rows, or columns.
__host__ __device__ inline OnChipShape OnChipShapeOf(const Job& job, int rows, int columns) {
  if (job.precision == Precision::kDouble) return {0, 0, 0, 0};
  for (int tiles = 1; tiles <= 2; tiles *= 2) {
    if (rows <= tiles * kTile && columns <= tiles * kTile) return {tiles, 1, tiles * kTile, tiles * kTile};
  }
  if (!job.hopper) return {0, 0, 0, 0};
  if (rows <= 4 * kTile && columns <= 4 * kTile) return {4, 2, 2 * kTile, 2 * kTile};
  const int tiles = columns <= 8 * kTile ? 8 : kOnChipTilesMost;
  int ranks = rows <= 4 * kTile ? 4 : static_cast<int>(CeilDiv(rows, kTile)), owners = 4;
  if (ranks > kOnChipRanksMost || columns > kOnChipTilesMost * kTile) return {0, 0, 0, 0};
  if ((ranks > 8 || tiles > 8) && !job.wide_clusters) return {0, 0, 0, 0};
  while (2 * owners <= ranks) owners *= 2;
  // Engines that one launch solves are all as wide as their clusters.
  if (job.engines > 1) ranks = owners = ranks > owners ? 2 * owners : owners;
  return {tiles, ranks, kTile, tiles * kTile / owners};
}
// Places for sums of so many blocks.
__host__ __device__ inline int OnChipSlots(int ranks) { return ranks > 8 ? 16 : ranks > 4 ? 8 : 4; }
// Blocks of the clusters that so many blocks' problems are launched in: the last ones leave at once.
__host__ __device__ inline int OnChipCluster(int ranks) {
  return ranks > 8 ? kOnChipRanksMost : ranks > 6 ? 8 : ranks > 4 ? 6 : ranks;
}
__host__ __device__ inline OnChipShape OnChipShapeOf(const Job& job, int engine) {
  return OnChipShapeOf(job, EngineSize(job, engine, 0), EngineSize(job, engine, 1));
}
// Of the largest engine; none unless all are solved there.
__host__ __device__ inline int OnChipTiles(const Job& job) {
  const int most = job.size[0] > job.size[1] ? job.size[0] : job.size[1];
  return job.engines == 1 ? OnChipShapeOf(job, 0).tiles : OnChipShapeOf(job, most, most).tiles;
}
// Whether members of mode kMixed are solved there too, from exponents in memory: unless sums in float32 are too coarse
// for the tolerance.
constexpr double kExactToleranceLeast = 5e-7;
__host__ __device__ inline bool IsExactOnChip(const Job& job) {
  const double tolerance = job.solver.tolerance;
  return OnChipTiles(job) > 0 && (tolerance == 0 || tolerance >= kExactToleranceLeast);
}
__host__ __device__ inline int ExactColumns(const Job& job, int engine) {  // Of a row there.
  return (EngineSize(job, engine, 1) + 3) / 4 * 4;
}
// Jobs whose columns are extrapolated, where they are not solved on the chip.
__host__ __device__ inline bool IsAccelerated(const Job& job) { return job.relaxing; }

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_PROBLEM_CUH_
