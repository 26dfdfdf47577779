// How problems lie in memory and passes over them are cut into blocks: by their shape and the device alone.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_SHAPE_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_SHAPE_CUH_

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
// not solved there. Plain updates at a fixed epsilon are, symmetric ones where nothing is to be judged or one side's
// residual tells the other's. More than one block take a cluster.
struct OnChipShape {
  int tiles, ranks, rows, owned;
};
constexpr int kOnChipTilesMost = 16, kOnChipRanksMost = 16;
constexpr int kOnChipSide = kOnChipTilesMost * kTile;  // The most rows, or columns.
__host__ __device__ inline OnChipShape OnChipShapeOf(const Job& job, int rows, int columns) {
  if (job.solver.epsilon_decay != 0 || job.precision == Precision::kDouble) return {0, 0, 0, 0};
  if (job.symmetric && job.solver.tolerance > 0) return {0, 0, 0, 0};
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
// Streamed jobs: float32 costs in memory, or exponents of clouds that are kept there after the first iteration. Rows
// that fit a block, enough of them for slabs to fill a device; nothing that any device solves on the chip.
constexpr int kStreamColumnsMost = 16384;
constexpr int kEndColumns = 64;  // Of a block that adds up slabs.
__host__ __device__ inline bool MayStream(const Job& job) {
  return job.hopper && job.precision != Precision::kDouble && job.size[1] <= kStreamColumnsMost &&
         (job.engines == 1 || job.size[0] <= kStreamColumnsMost);
}
// Numbers of a row.
__host__ __device__ inline int StreamColumns(const Job& job, int engine) {
  const int columns = EngineSize(job, engine, 1);
  return job.dense && columns % 4 == 0 ? columns : static_cast<int>(CeilDiv(columns, kCloudTile) * kCloudTile);
}
__host__ __device__ inline bool KeepsHalves(const Job& job) { return !job.dense && PlanesOf(job) == 1; }
// Whether engine 0's iterations are alternating half steps at one epsilon; all engines' go to the marginals, as many as
// were asked for; both, of the only one.
__host__ __device__ inline bool IsAlternating(const Job& job) {
  return !job.symmetric && job.solver.epsilon_decay == 0;
}
__host__ __device__ inline bool IsFixed(const Job& job) {
  return job.solver.tolerance == 0 && std::isinf(job.solver.rho_a) && std::isinf(job.solver.rho_b);
}
__host__ __device__ inline bool IsPlain(const Job& job) {
  return IsAlternating(job) && job.engines == 1 && IsFixed(job);
}
// Held jobs: streamed ones whose densities so many blocks of a device together have room for, in shared memory and
// registers, from one iteration to the next (transport_stream_held.cu). A whole device, or a part of it: some problems
// are then solved at once. Of those at one epsilon; not more iterations than others may wait for: sweeps go on. Of
// debiased ones all three engines are (HoldsSelves); where there is no room for those of one side, and a tolerance,
// engine 0 alone, and the others, which take fewer iterations, are swept.
constexpr int kHeldThreads = 512, kHeldRowsMost = 32, kHeldOwnedMost = 64;  // Of a block; columns that it adds up.
constexpr int kHeldAtOnceMost = 4;                                          // Problems.
constexpr int kHeldColumnsMost = 4096, kHeldIterationsMost = 512;
constexpr int kHeldLaunchesMost = 2;  // Of judged iterations: how many there will be is not known.
constexpr int kHeldQuadColumns = 4 * kHeldThreads;
constexpr int kHeldBytes = 216 * 1024, kHeldBytesMost = 227 * 1024;  // Of shared memory: rows; all.
constexpr int kHeldJudgingBytes = 1024, kHeldJointBytes = 6400;      // Where iterations are judged; extrapolated.
constexpr int kHeldRegisters = 32;                                   // Of a thread, for rows.
// How iterations go: as many as were asked for; until something is met; with columns extrapolated, too. Symmetric ones:
// either way.
enum class HeldKind : int { kPlain, kJudged, kExtrapolated, kSymmetric };
__host__ __device__ constexpr int HeldBytes(HeldKind kind) {
  return kHeldBytes - (kind == HeldKind::kPlain          ? 0
                       : kind == HeldKind::kExtrapolated ? kHeldJointBytes
                                                         : kHeldJudgingBytes);
}
__host__ __device__ constexpr int HeldRowsOfRegisters(int quads, int number_bytes) {
  return kHeldRegisters * 4 / (quads * 4 * number_bytes);
}
// Whether rows in shared memory are as long as the most that so many quads can have: halves.
__host__ __device__ constexpr bool HeldRowsArePadded(int number_bytes) { return number_bytes == 2; }
__host__ __device__ inline int HeldQuads(const Job& job, int engine = 0) {  // Of columns, that a thread has.
  return static_cast<int>(CeilDiv(StreamColumns(job, engine), kHeldQuadColumns));
}
// Extrapolation halves the iterations, and costs as much as those that take 5 us take themselves. Members in kMixed are
// extrapolated, though, as sweeps do with what they do not hold of them.
__host__ __device__ inline HeldKind HeldKindOf(const Job& job, Mode mode) {
  if (job.symmetric) return HeldKind::kSymmetric;
  if (IsFixed(job)) return HeldKind::kPlain;
  return IsAccelerated(job) && (HeldQuads(job) == 2 || mode == kMixed) ? HeldKind::kExtrapolated : HeldKind::kJudged;
}
// Rows of an engine that a block has room for in so many bytes, and in registers.
__host__ __device__ inline int HeldRoom(const Job& job, int engine, int bytes, bool registers) {
  const int number_bytes = KeepsHalves(job) ? 2 : 4, quads = HeldQuads(job, engine);
  const int columns = HeldRowsArePadded(number_bytes) ? quads * kHeldQuadColumns : StreamColumns(job, engine);
  return bytes / (columns * number_bytes) + (registers ? HeldRowsOfRegisters(quads, number_bytes) : 0);
}
// Of engine 0, whatever the member's mode.
__host__ __device__ inline int HeldRoom(const Job& job, bool registers) {
  return HeldRoom(job, 0, HeldBytes(HeldKindOf(job, kMixed)), registers);
}
// The fewest blocks that have room for so many rows, and that suit(blocks); 0: none have.
template <typename Suit>
__host__ __device__ inline int BlocksWithRoom(int64_t all_rows, int room, Suit suit) {
  for (int at_once = kHeldAtOnceMost; at_once > 0; --at_once) {
    const int blocks = kProcessors / at_once;
    const int64_t rows = CeilDiv(all_rows, blocks);
    if (rows <= kHeldRowsMost && rows <= room && suit(blocks)) return blocks;
  }
  return 0;
}
// Where rows are read again.
__host__ __device__ inline int ReadingBlocks(int64_t all_rows) {
  return CeilDiv(all_rows, kProcessors) <= kHeldRowsMost ? kProcessors : 0;
}
// Columns that a block adds up, in fours, of those that are all threads' first quad, or second.
__host__ __device__ inline int HeldOwned(const Job& job, int blocks) {
  const int columns = StreamColumns(job, 0) < kHeldQuadColumns ? StreamColumns(job, 0) : kHeldQuadColumns;
  return static_cast<int>(CeilDiv(columns, 4 * blocks)) * 4;
}
// Debiased jobs whose engines 1 and 2 are held as well (transport_stream_self.cu): in floats. Blocks of one of them, if
// it is streamed.
__host__ __device__ inline int SelfRoom(const Job& job, int engine, bool registers) {
  return HeldRoom(job, engine, HeldBytes(HeldKind::kJudged), registers);
}
__host__ __device__ inline int SelfBlocks(const Job& job, int engine) {
  const int rows = EngineSize(job, engine, 0);
  if (StreamColumns(job, engine) > kHeldColumnsMost) return 0;
  const int blocks = BlocksWithRoom(rows, SelfRoom(job, engine, true), [](int) { return true; });
  return blocks > 0 || HeldQuads(job, engine) < 2 ? blocks : ReadingBlocks(rows);
}
__host__ __device__ inline bool SelfReads(const Job& job, int engine) {
  return CeilDiv(EngineSize(job, engine, 0), SelfBlocks(job, engine)) > SelfRoom(job, engine, true);
}
__host__ __device__ inline bool HoldsSelves(const Job& job) {
  return job.engines > 1 && job.solver.epsilon_decay == 0 && !KeepsHalves(job) && SelfBlocks(job, 1) > 0 &&
         SelfBlocks(job, 2) > 0;
}
// Blocks of engine 0 of a member of such a job, if it is streamed; 0: it cannot be held.
__host__ __device__ inline int HeldBlocks(const Job& job) {
  const bool coarse = KeepsHalves(job) && !IsPlain(job);  // Marginals would end at 1e-4.
  const bool beside = job.engines > 1 && job.solver.tolerance == 0 && !HoldsSelves(job);
  if (job.solver.epsilon_decay != 0 || coarse || beside || StreamColumns(job, 0) > kHeldColumnsMost) return 0;
  const int quads = HeldQuads(job);
  const auto suit = [&](int blocks) { return HeldOwned(job, blocks) <= kHeldOwnedMost / quads; };
  const int blocks = BlocksWithRoom(job.size[0], HeldRoom(job, true), suit);
  return blocks > 0 || KeepsHalves(job) || quads < 2 ? blocks : ReadingBlocks(job.size[0]);
}
// Whether there are enough of both sides to keep exponents of, fewer where two problems at least are held at once, and
// too many of one to be solved on the chip.
constexpr int kKeptRowsLeast = 1024, kHeldSideLeast = 512;
__host__ __device__ inline bool AreManyRows(const Job& job) {
  const int fewer = job.size[0] < job.size[1] ? job.size[0] : job.size[1];
  const int most = job.size[0] < job.size[1] ? job.size[1] : job.size[0];
  const bool held = HeldBlocks(job) > 0 && HeldBlocks(job) < kProcessors;
  return fewer >= (held ? kHeldSideLeast : kKeptRowsLeast) && most > kOnChipSide;
}
// Whether all engines are.
__host__ __device__ inline bool HoldsAll(const Job& job) { return job.held && (job.engines == 1 || HoldsSelves(job)); }
__host__ __device__ inline int HeldLaunches(const Job& job) {
  const int most = IsFixed(job) ? 1 : kHeldLaunchesMost;
  return job.solver.max_iterations <= kHeldIterationsMost ? 1 : most;
}
// Whether some rows are read again in each iteration: floats, for which registers are wanted then.
__host__ __device__ inline bool HeldReads(const Job& job) {
  return CeilDiv(job.size[0], HeldBlocks(job)) > HeldRoom(job, true);
}
// Whether the launch that makes the last of a fixed number of iterations measures as well, if it makes them all: of
// halves, and where rows are read again. Floats that are all held, 1,100 x 1,100 of them, took a tenth longer.
__host__ __device__ constexpr bool HeldMeasures(HeldKind kind, int quads, bool halves, bool reads) {
  return kind == HeldKind::kPlain && quads == 2 && (halves || reads);
}
__host__ __device__ inline bool HeldMeasures(const Job& job) {
  return HeldMeasures(HeldKindOf(job, kFloat), HeldQuads(job), KeepsHalves(job), HeldReads(job)) &&
         job.solver.max_iterations <= kHeldIterationsMost;
}
// Looped jobs: those that are too large to be held and that a whole device sweeps in one launch of many iterations
// (transport_stream_loop.cu): streamed ones, or points of few coordinates, from which it makes exponents itself. Plain
// ones, and those with a tolerance that columns' terms, floats of which one bit is another's, can meet; of debiased
// ones engine 0 (Job::looped_beside), before the others are swept.
constexpr int kLoopBlocks = kProcessors, kLoopThreads = 256, kLoopRowsMost = 256;  // Rows: of a block.
constexpr int kLoopQuadsMost = 10, kLoopColumnsMost = kLoopQuadsMost * 4 * kLoopThreads;
constexpr int kLoopOwnedMost = 80;  // Columns that a block adds up.
constexpr int kLoopDimMost = 3, kLoopRowsLeast = 1024;
constexpr double kLoopToleranceLeast = 3e-6;
// Of shared memory: rows on their way, or points of all columns.
__host__ __device__ constexpr int LoopBytes(bool judged) { return (judged ? 199 : 204) * 1024; }
__host__ __device__ inline bool LoopsJudged(const Job& job) {
  const SolverOptions& solver = job.solver;
  return IsAlternating(job) && (job.engines == 1 || !KeepsHalves(job)) && solver.tolerance >= kLoopToleranceLeast &&
         std::isinf(solver.rho_a) && std::isinf(solver.rho_b);
}
__host__ __device__ inline bool MayLoop(const Job& job) {
  return (IsPlain(job) || LoopsJudged(job)) && MayStream(job) && StreamColumns(job, 0) <= kLoopColumnsMost &&
         HeldBlocks(job) == 0 && job.size[0] >= kLoopRowsLeast && CeilDiv(job.size[0], kLoopBlocks) <= kLoopRowsMost;
}
// Of few columns most threads have none, and half steps take less time, unless something is judged, which loops do
// themselves, and rows are not too many.
constexpr int kLoopRowsOfFewMost = 8192;
__host__ __device__ inline bool LoopsPoints(const Job& job) {
  const bool few = job.size[1] <= kOnChipSide;
  return MayLoop(job) && SourceOf(job) == Source::kProducts && job.dim <= kLoopDimMost &&
         (!few || (job.size[0] > kOnChipSide && job.size[0] <= kLoopRowsOfFewMost && job.solver.tolerance > 0));
}
// Whether densities of FAST lie in memory instead of their exponents: loops and gradients alone read them.
__host__ __device__ inline bool KeepsDensities(const Job& job) {
  return job.looped && KeepsHalves(job) && !LoopsPoints(job);
}
// Whether the columns' first half step stores them: transport_first_columns.cu.
__host__ __device__ inline bool KeepsFirstDensities(const Job& job) {
  return job.streamed && KeepsDensities(job) && PartsOf(1, job.dim) == Parts::kOne;
}
// Whether iterations are judged as transport_joint.cuh does, where they are held or looped.
__host__ __device__ inline bool IsJoint(const Job& job) {
  return HeldBlocks(job) > 0 ? HeldKindOf(job, kMixed) == HeldKind::kExtrapolated : LoopsJudged(job);
}
// Columns that a block adds up, in fours.
__host__ __device__ inline int LoopOwned(const Job& job) {
  return static_cast<int>(CeilDiv(StreamColumns(job, 0), 4 * kLoopBlocks)) * 4;
}
// Clouds whose exponents are kept: where they are held, or, of FAST, looped; or where reading them takes less time
// than making them anew (measured on an H200: of 32 coordinates up to 3,000 x 3,000, of 64 always; of distances, which
// are roots, always), and so much memory, of an engine, is not too much.
constexpr int64_t kKeptBytesMost = int64_t{1} << 30;
constexpr int kKeptIterationsLeast = 4, kKeptDimLeast = 64;
constexpr int kKeptDimLeastOfFew = 17, kKeptFew = 1 << 23;  // Rows times columns.

__host__ __device__ inline int64_t KeptBytes(const Job& job, int engine) {
  return int64_t{EngineSize(job, engine, 0)} * StreamColumns(job, engine) * (KeepsHalves(job) ? 2 : 4);
}
__host__ __device__ inline int64_t MostKeptBytes(const Job& job) {  // Of any engine.
  int64_t most = 0;
  for (int e = 0; e < job.engines; ++e) most = KeptBytes(job, e) > most ? KeptBytes(job, e) : most;
  return most;
}
__host__ __device__ inline bool KeepsExponents(const Job& job) {
  const int64_t rows = job.size[0], columns = job.size[1];
  return MayStream(job) && !job.dense && job.solver.epsilon_decay == 0 &&
         (SourceOf(job) == Source::kDistances || HeldBlocks(job) > 0 ||
          job.dim >= (rows * columns <= kKeptFew ? kKeptDimLeastOfFew : kKeptDimLeast) ||
          (KeepsHalves(job) && MayLoop(job) && !LoopsPoints(job))) &&
         job.solver.max_iterations >= kKeptIterationsLeast && AreManyRows(job) && MostKeptBytes(job) <= kKeptBytesMost;
}
// Dense jobs whose costs are streamed, by whole numbers of 16 bytes a row: as they were given, or copied by the
// preparation as floats, rows padded, if that is not too much memory.
constexpr int kStreamFew = 1 << 21;  // Rows times columns.
__host__ __device__ inline bool HasCostRows(const Job& job) {
  return job.in.cost.dtype == DType::kFloat32 && job.size[1] % 4 == 0;
}
__host__ __device__ inline bool StreamsCosts(const Job& job) {
  const bool copies = job.solver.max_iterations >= kKeptIterationsLeast && KeptBytes(job, 0) <= kKeptBytesMost;
  return MayStream(job) && job.dense && (HasCostRows(job) || copies) &&
         (AreManyRows(job) || int64_t{job.size[0]} * job.size[1] >= kStreamFew);
}
__host__ __device__ inline bool CopiesCosts(const Job& job) { return job.streamed && job.dense && !HasCostRows(job); }
// Looped clouds of FAST whose densities are made of products in every iteration, once for both sides: blocks have some
// columns, and all rows pass by (transport_cloud_loop.cu). Where exponents are not kept, and half steps take longer.
constexpr int kCloudLoopLeast = 14000;                                  // Columns.
constexpr int kCloudLoopTeams = 4;                                      // Of a block, each a warpgroup.
constexpr int kCloudLoopColumnsLeast = 64, kCloudLoopColumnsMost = 96;  // Of a team.
// Columns of a block: in eights, as swizzled halves lie.
__host__ __device__ inline int CloudLoopColumns(const Job& job) {
  return static_cast<int>(CeilDiv(job.size[1], 8 * kLoopBlocks)) * 8;
}
__host__ __device__ inline bool LoopsClouds(const Job& job) {
  return IsPlain(job) && job.hopper && SourceOf(job) == Source::kProducts && PlanesOf(job) == 1 && job.dim <= kDepth &&
         job.size[0] >= kLoopRowsLeast && job.size[1] >= kCloudLoopLeast && !KeepsExponents(job) &&
         CloudLoopColumns(job) <= kCloudLoopTeams * kCloudLoopColumnsMost;
}
// Framed jobs: members in kMixed are swept too, from float32 exponents in the frame of their potentials, which is
// renewed as those move. Only the data tell whether a job has such members: jobs that keep no exponents otherwise are
// given room for them where it is little, or where the tolerance makes it likely.
constexpr int kFramedRowsLeast = 512, kFramedPairsLeast = 1 << 20;
constexpr int64_t kFramedBytesMost = int64_t{64} << 20;
constexpr double kFramedTolerance = 1e-5;
__host__ __device__ inline bool FramesExponents(const Job& job) {
  const int64_t rows = job.size[0], columns = job.size[1];
  const double tolerance = job.solver.tolerance;
  const bool few = !job.dense && job.dim <= kFewDims;  // Half steps take less time.
  if (!MayStream(job) || PlanesOf(job) == 1 || job.solver.epsilon_decay != 0 ||
      job.solver.max_iterations < kKeptIterationsLeast || (tolerance > 0 && tolerance < kExactToleranceLeast) ||
      rows < kFramedRowsLeast || (rows * columns < kFramedPairsLeast && (few || !AreManyRows(job))) ||
      (rows <= kOnChipSide && columns <= kOnChipSide)) {
    return false;
  }
  const bool likely = KeepsExponents(job) || (tolerance > 0 && tolerance <= kFramedTolerance);
  return MostKeptBytes(job) <= (likely ? kKeptBytesMost : kFramedBytesMost);
}
// Whether members in kMixed are held from one renewal of their frames to the next.
__host__ __device__ inline bool HoldsFrames(const Job& job) { return HoldsAll(job) && job.framed; }
// Whether there is room for exponents and their frames; for exponents, or for copies of costs.
__host__ __device__ inline bool HasFrames(const Job& job) { return job.framed || (job.streamed && !job.dense); }
__host__ __device__ inline bool HasNumbers(const Job& job) { return HasFrames(job) || CopiesCosts(job); }
// Whether passes over an engine in this state are: its statistics then lie as Geometry::kStream.
__host__ __device__ inline bool IsStreamed(const Job& job, const EngineState& state) {
  if (state.mode == kMixed) return job.framed && (state.kept & kKept) != 0;
  return job.streamed && state.mode == kFloat && (job.dense || (state.kept & kKept) != 0);
}
// Of a slab: all engines' together are as many as a device has at once.
__host__ __device__ inline int StreamRows(const Job& job) {
  const int all = job.engines == 1 ? job.size[0] : 2 * job.size[0] + job.size[1];
  const int rows = (all + kProcessors - 1) / kProcessors;
  return rows > 16 ? rows : 16;
}
__host__ __device__ inline int StreamSlabs(const Job& job, int engine) {
  return (EngineSize(job, engine, 0) + StreamRows(job) - 1) / StreamRows(job);
}
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
