// Which problems have their costs or exponents in memory, and which of those are held, looped or framed: by their shape
// and the device alone.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_SHAPE_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_SHAPE_CUH_

#include <cmath>
#include <cstdint>

#include "kernels/cuda/transport_problem.cuh"

namespace sinkhorn {
namespace cuda {

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
// ones engine 0 (Job::looped_beside), before the others are swept, or beside launches of their own.
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
__host__ __device__ inline bool HasLoopShape(const Job& job) {
  return MayStream(job) && StreamColumns(job, 0) <= kLoopColumnsMost && HeldBlocks(job) == 0 &&
         job.size[0] >= kLoopRowsLeast && CeilDiv(job.size[0], kLoopBlocks) <= kLoopRowsMost;
}
__host__ __device__ inline bool MayLoop(const Job& job) {
  return (IsPlain(job) || LoopsJudged(job)) && HasLoopShape(job);
}
// Engines whose two sides move at once, of points of few coordinates, that launches of many iterations make
// (transport_symmetric.cu): those of symmetric updates, and 1 and 2 of debiased problems, whose pairs count once. Where
// they are not held.
constexpr int kSymmetricPointsMost = 1 << 16;  // Of a side.
__host__ __device__ inline bool LoopsSymmetric(const Job& job) {
  const int most = job.size[0] > job.size[1] ? job.size[0] : job.size[1];
  const bool held = HoldsSelves(job) || HeldBlocks(job) > 0;
  return (job.engines > 1 || job.symmetric) && job.hopper && SourceOf(job) == Source::kProducts &&
         job.precision != Precision::kDouble && job.dim <= kLoopDimMost && OnChipTiles(job) == 0 && !held &&
         most <= kSymmetricPointsMost;
}
// Of few columns most threads have none, and half steps take less time, unless something is judged, which loops do
// themselves, and rows are not too many. Of debiased jobs whose other engines have launches of their own, as many
// iterations as were asked for, too.
constexpr int kLoopRowsOfFewMost = 8192;
__host__ __device__ inline bool LoopsPoints(const Job& job) {
  const bool few = job.size[1] <= kOnChipSide;
  const bool beside = IsAlternating(job) && IsFixed(job) && LoopsSymmetric(job);
  return (beside ? HasLoopShape(job) : MayLoop(job)) && SourceOf(job) == Source::kProducts && job.dim <= kLoopDimMost &&
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

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_SHAPE_CUH_
