// How passes over problems, and what is made of their plans, are cut into blocks: by their shape and the device alone.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_SHAPE_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_SHAPE_CUH_

#include <cstdint>

#include "kernels/cuda/transport_stream_shape.cuh"

namespace sinkhorn {
namespace cuda {

// Whether transport_gradient.cu, or one beside it, makes gradients and projections of members of this mode.
__host__ __device__ inline bool HasGradientKernel(const Job& job, int mode) {
  return job.hopper && SourceOf(job) == Source::kProducts && mode == kFloat;
}
__host__ __device__ inline int RowsOf(const Job& job, int engine, int side, Geometry geometry) {
  switch (geometry) {
    case Geometry::kCloud:
      return kCloudRows;
    case Geometry::kOnChip: {
      const OnChipShape shape = OnChipShapeOf(job, engine);
      return side == 0 ? shape.rows : shape.owned;
    }
    case Geometry::kStream:
      return side == 0 ? StreamRows(job) : kEndColumns;
    default:
      return kTile;
  }
}
__host__ __device__ inline Geometry GeometryOf(const Job& job, int mode) {
  if (mode == kMixed && IsExactOnChip(job)) return Geometry::kOnChip;
  if (mode == kMixed && MultipliesDoubles(job)) return Geometry::kExact;
  if (mode != kFloat) return Geometry::kPlain;
  if (OnChipTiles(job) > 0) return Geometry::kOnChip;
  return job.halves ? Geometry::kCloud : Geometry::kPlain;
}
__host__ __device__ inline int RowBlocks(const Job& job, int engine, int side, Geometry geometry = Geometry::kPlain) {
  const int rows = RowsOf(job, engine, side, geometry);
  return (EngineSize(job, engine, side) + rows - 1) / rows;
}
// Parts that a block of rows is cut into, by columns, where all pairs are gone through once, for an output: so that a
// small problem fills a device; each of `tiles`.
__host__ __device__ inline int OutputSplits(const Job& job) {
  const int most = RowBlocks(job, 0, 1) / 2, wanted = 2 * kProcessors / RowBlocks(job, 0, 0);
  const int splits = wanted < most ? wanted : most;
  return splits > 1 ? splits : 1;
}
struct SplitTiles {
  int first, last;
};
__host__ __device__ inline SplitTiles TilesOfSplit(const Job& job, int split) {
  const int tiles = RowBlocks(job, 0, 1), splits = OutputSplits(job);
  return {tiles * split / splits, tiles * (split + 1) / splits};
}
__host__ __device__ inline int OutputParts(const Job& job) { return RowBlocks(job, 0, 0) * OutputSplits(job); }
// The same of exact tiles; what the primal bound, and <C, P>, are added up of.
__host__ __device__ inline int ExactParts(const Job& job) { return RowBlocks(job, 0, 0) * job.exact_splits[0][0]; }
__host__ __device__ inline int BoundParts(const Job& job) {
  return MultipliesDoubles(job) ? ExactParts(job) : OutputParts(job);
}
__host__ __device__ inline int LinearParts(const Job& job) {
  if (HasExactCosts(job)) return ExactParts(job);
  return RowBlocks(job, 0, 0) * (HasWholeCosts(job) ? OutputSplits(job) : 1);
}
__host__ __device__ inline int64_t ExactBlocks(const Job& job, int engine) {
  return int64_t{1} * RowBlocks(job, engine, 0) * RowBlocks(job, engine, 1);
}
// Of an engine's columns: to write their terms, and to add up slabs.
__host__ __device__ inline int StreamTermBlocks(const Job& job, int engine) {
  return (StreamColumns(job, engine) + kThreads - 1) / kThreads;
}
__host__ __device__ inline int StreamEnds(const Job& job, int engine) {
  return RowBlocks(job, engine, 1, Geometry::kStream);
}
// Parts that the columns of a pass are cut into.
__host__ __device__ inline int Splits(const Job& job, int engine, int side, Geometry geometry = Geometry::kPlain) {
  if (geometry == Geometry::kOnChip) return 1;
  if (geometry == Geometry::kCloud) return job.cloud_splits[engine][side];
  if (geometry == Geometry::kExact) return job.exact_splits[engine][side];
  const int64_t tiles = CeilDiv(EngineSize(job, engine, 1 - side), kTile);
  const int64_t blocks = RowBlocks(job, engine, side, geometry);
  const int64_t wave = kSplitBlocks / blocks, most = tiles / 4;
  const int64_t splits = wave < most ? wave : most;
  return static_cast<int>(splits > 1 ? splits : 1);
}
__host__ __device__ inline int64_t FrameBlocks(const Job& job, int engine) {
  const int64_t rows = RowBlocks(job, engine, 0);
  if (MultipliesDoubles(job)) return rows * Splits(job, engine, 0, Geometry::kExact);
  return rows * CeilDiv(StreamColumns(job, engine), kTile);
}
__host__ __device__ inline int64_t EngineBlocks(const Job& job, int engine, int side, Geometry geometry) {
  return int64_t{1} * RowBlocks(job, engine, side, geometry) * Splits(job, engine, side, geometry);
}
// Parts of a launch that serves some engines (bit e: engine e), of each of which a member has kBlocksOf(job, e) blocks.
__host__ __device__ inline unsigned AllEngines(const Job& job) { return (1u << job.engines) - 1; }
template <auto kBlocksOf>
__host__ __device__ inline int64_t BlocksOf(const Job& job, unsigned engines) {  // Of one member.
  int64_t blocks = 0;
  for (int e = 0; e < job.engines; ++e) {
    if (engines >> e & 1) blocks += kBlocksOf(job, e);
  }
  return blocks;
}
struct EnginePart {
  int64_t member, block;
  int engine;
};
template <auto kBlocksOf>
__device__ inline EnginePart FindEnginePart(const Job& job, unsigned engines, int64_t index) {
  const int64_t of_member = BlocksOf<kBlocksOf>(job, engines);
  EnginePart found = {index / of_member, index % of_member, 0};
  for (;; ++found.engine) {
    if ((engines >> found.engine & 1) == 0) continue;
    const int64_t blocks = kBlocksOf(job, found.engine);
    if (found.block < blocks) return found;
    found.block -= blocks;
  }
}
// Engines, from 0 on, that a pass over a side is for: of engines 1 and 2, whose columns are their rows, rows alone.
__host__ __device__ inline int PassEngines(const Job& job, int side) { return side == 0 ? job.engines : 1; }
__host__ __device__ inline int64_t PassBlocks(const Job& job, int side, Geometry geometry) {  // Of one member.
  int64_t blocks = 0;
  for (int e = 0; e < PassEngines(job, side); ++e) blocks += EngineBlocks(job, e, side, geometry);
  return blocks;
}
__host__ __device__ inline Geometry SweepGeometry(const Job& job, int mode) {  // Of Hessian-vector products.
  if (mode == kFloat) return Geometry::kCloud;
  return mode == kMixed && MultipliesDoubles(job) ? Geometry::kExact : Geometry::kPlain;
}
__host__ __device__ inline const OutputView& GradientOf(const Job& job, int side) {
  return side == 0 ? job.out.gradient_x : job.out.gradient_y;
}
// Products with the Hessian of cosines take it too.
__host__ __device__ inline bool WantsGradient(const Job& job, int side) {
  const OutputView& product = side == 0 ? job.out.hessian_x : job.out.hessian_y;
  return GradientOf(job, side).data != nullptr ||
         (IsCosine(job) && job.in.hessian.count > 0 && product.data != nullptr);
}
__host__ __device__ inline const OutputView& ProjectionOf(const Job& job, int side) {
  return side == 0 ? job.out.projection_x : job.out.projection_y;
}
// Whether transport_exact_apply.cu, or transport_weights.cu, makes a side's gradients of |x - y|.
__host__ __device__ inline bool GivesDirections(const Job& job, int side) {
  return job.hopper && SourceOf(job) == Source::kDistances && job.precision != Precision::kDouble &&
         GradientOf(job, side).data != nullptr;
}
// Numbers of a row in a chunk of right-hand sides (transport_exact_apply.cu): of few coordinates, or where no more are
// wanted; else.
constexpr int kNarrowRight = 8, kWideRight = 32;
// Weights of kTile rows (an item) and so many columns, which are made once, a chunk of rows after the other, for all
// numbers of right-hand sides (transport_weights.cuh).
__host__ __device__ inline int64_t WeightColumnBytes(int columns) {
  return CeilDiv(columns, kManyColumns) * kManyColumns * kTile * static_cast<int64_t>(sizeof(float));
}
// Whether directions are made so: where they would take chunks else. An item's bytes.
__host__ __device__ inline bool WeighsDirections(const Job& job, int side) {
  return GivesDirections(job, side) && job.dim > kWideRight;
}
__host__ __device__ inline int64_t DirectionItemBytes(const Job& job, int side) {
  return WeightColumnBytes(job.size[1 - side]) + (job.engines > 1 ? WeightColumnBytes(job.size[side]) : 0);
}
// Projections of cosines are of other points: RightSide (transport_plan.cuh).
__host__ __device__ inline bool ProjectsMeans(const Job& job, int side) {
  return ProjectionOf(job, side).data != nullptr && !IsCosine(job);
}
// Whether means of the other cloud's points are wanted, for gradients or projections.
__host__ __device__ inline bool MakesMeans(const Job& job, int side) {
  return WantsGradient(job, side) || ProjectsMeans(job, side);
}
// Whether transport_gradient_kept.cu makes them of members whose exponents are kept, or in a frame.
__host__ __device__ inline bool HasKeptGradient(const Job& job, int mode) {
  const bool kept = mode == kFloat ? job.dim > kDepth : mode == kMixed && job.framed && job.dim > kDepth / 2;
  return kept && job.engines == 1 && HasGradientKernel(job, kFloat);
}
// Whether transport_exact_gradient.cu makes them of members in kMixed; blocks of a member that do so for a side.
__host__ __device__ inline bool HasExactGradient(const Job& job) {
  return MultipliesDoubles(job) && job.dim <= kFewDims;
}
__host__ __device__ inline int64_t ExactGradientBlocks(const Job& job, int side) {
  return HasExactGradient(job) && MakesMeans(job, side) ? RowBlocks(job, 0, side) : 0;
}
// Whether transport_gradient_wide.cu makes them, where there is a HasGradientKernel; rows of its chunks, whose
// densities take no more memory than so many bytes for each coordinate, or than kCloudRows rows take.
constexpr int kWideDepthsLeast = 4;
constexpr int kWideBytes = 8;
__host__ __device__ inline bool HasWideGradient(const Job& job) {
  return job.engines == 1 && CloudDepths(job.dim) >= kWideDepthsLeast;
}
__host__ __device__ inline int64_t WideRowBytes(const Job& job, int side) {
  return CeilDiv(job.size[1 - side], kCloudTile) * kCloudTile * 4;  // Two halves a density.
}
__host__ __device__ inline int64_t WideChunkRows(const Job& job, int side) {
  const int64_t rows = PaddedPoints(job.size[side]), points = int64_t{job.size[0]} + job.size[1];
  const int64_t most = kWideBytes * points * job.dim / WideRowBytes(job, side) / kCloudRows * kCloudRows;
  const int64_t chunks = CeilDiv(rows, most > kCloudRows ? most : kCloudRows);
  return PaddedPoints(CeilDiv(rows, chunks));
}
__host__ __device__ inline int64_t WideBytes(const Job& job, int side) {
  return WideChunkRows(job, side) * WideRowBytes(job, side);
}
__host__ __device__ inline double RhoOf(const Job& job, int engine, int side) {
  return MeasureOf(engine, side) == 0 ? job.solver.rho_a : job.solver.rho_b;
}
__host__ __device__ inline bool IsSymmetric(const Job& job, int engine) { return engine > 0 || job.symmetric; }

// Points of a chunk of the preparation's sums.
__host__ __device__ inline int ChunkPoints(int64_t points) {
  return points <= 1024 ? 1024 : points <= 16384 ? 64 : 512;
}

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_SHAPE_CUH_
