// The launches of the transport family: one function per kernel, defined beside it. All are asynchronous and neither
// allocate nor synchronise; errors are left for TakeLaunchError (launch.cuh). `blocks` is the table's last first_block.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_LAUNCH_H_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_LAUNCH_H_

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <tuple>
#include <vector>

#include "kernels/cuda/transport_shape.cuh"

namespace sinkhorn {
namespace cuda {

// Something that is asked for once a device, by any threads.
class FactOfDevice {
 public:
  // Of the calling thread's device; `ask` answers with a number from 0 on. 0: of no device that is known.
  template <typename Ask>
  int Get(Ask ask) {
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess || device >= kMostDevices) return 0;
    if (known_[device] == 0) {
      known_[device] = 1 + ask();
      (void)cudaGetLastError();  // That a device cannot is no error.
    }
    return known_[device] - 1;
  }

 private:
  static constexpr int kMostDevices = 64;
  std::atomic<int> known_[kMostDevices] = {};  // 0: not asked yet; or 1 more than the answer.
};

// ---- transport_prepare.cu: inputs to the workspace, states to their start -----------------------------------------
// Blocks of a member: PrepareBlocks, in this order of steps; they leave PreparedStats(job) ChunkStats.
// `squares`: of jobs that IsSquared alone.
constexpr int kSphereStep = 0, kRangesStep = 1, kCentresStep = 2, kPointsStep = 3, kStatesStep = 4, kPrepareSteps = 5;
// `points`: of a block of the last step but one, PreparedPoints of all points of the launch: so few that all processors
// get some, since a block takes its points one after the other. What comes of it is the same.
int PreparedPoints(int64_t all);
int64_t PrepareBlocks(const Job& job, int step, int points);
int64_t PreparedStats(const Job& job);
void LaunchPrepare(const LaunchTable& table, int64_t blocks, bool squares, int step, int points, cudaStream_t stream);
// All steps in one launch, a block for each member: of jobs that MayPrepareAll, since they are solved on the chip, and
// that have many. What comes of it is the same.
bool MayPrepareAll(const Job& job);
void LaunchPrepareAll(const LaunchTable& table, int64_t blocks, bool squares, cudaStream_t stream);

// ---- transport_half_step.cu ---------------------------------------------------------------------------------------
// One pass over one side of engines of `mode`. Blocks of a member: PassBlocks, kBound: of its first engine alone.
void LaunchHalfStep(const LaunchTable& table, int64_t blocks, Source source, Mode mode, int side, Pass pass, int step,
                    cudaStream_t stream);

// ---- transport_exact_step.cu: the same of jobs that MultipliesDoubles, in kMixed, but kBound -----------------------
// All jobs of a launch have at most kFewDims coordinates, or none; `dim`: the largest.
void LaunchExactStep(const LaunchTable& table, int64_t blocks, int dim, int side, Pass pass, cudaStream_t stream);

// ---- transport_cloud.cu: the same for products of clouds in float32, by tensor cores ------------------------------
// `planes`: 2, products as accurate as float32's; 1, one product of rounded coordinates. `dim`: the largest; all
// jobs have the same PartsOf. `hopper`: HasHopperKernels().
// Whether the code in use is Hopper's own, on the calling thread's device.
bool HasHopperKernels();
void LaunchCloudStep(const LaunchTable& table, int64_t blocks, int planes, int dim, bool hopper, int side, Pass pass,
                     cudaStream_t stream);

// ---- transport_cloud_distances.cu: the same for distances, of jobs with halves ------------------------------------
void LaunchCloudDistances(const LaunchTable& table, int64_t blocks, int dim, bool hopper, int side, Pass pass,
                          cudaStream_t stream);

// ---- transport_anderson.cu: columns extrapolated after their half step --------------------------------------------
// Of a job that IsAccelerated. Terms of columns that are swept are left as sweeps leave them.
int64_t AndersonBlocks(const Job& job);
void LaunchAnderson(const LaunchTable& table, int64_t blocks, cudaStream_t stream);

// ---- transport_on_chip.cu: whole solves, measured -----------------------------------------------------------------
// Up to `chunks` times kOnChipChunk iterations of engines in float32, those of the mask, which have these tiles and
// ranks; kExact: of engines in kMixed.
struct OnChipLaunch {
  Source source;
  int tiles, ranks;
  unsigned engines;  // Bit e: engine e.
  // Whether clusters are as wide as they come, of which a device has few at once, with processors to spare: those solve
  // one problem after the other, for which jobs come in the order of their OnChipShape's ranks, the widest first, since
  // blocks that a problem does not need leave for good.
  bool IsWide() const { return ranks == kOnChipRanksMost; }
  // Wide ones first, then the narrowest, which fit beside them.
  bool operator<(const OnChipLaunch& other) const {
    const auto key = [](const OnChipLaunch& of) {
      return std::make_tuple(!of.IsWide(), of.ranks, of.tiles, of.source, of.engines);
    };
    return key(*this) < key(other);
  }
};
// All that a job takes.
std::vector<OnChipLaunch> OnChipLaunchesOf(const Job& job);
int64_t OnChipBlocks(const Job& job, const OnChipLaunch& of);
void LaunchOnChip(const LaunchTable& table, int64_t blocks, const OnChipLaunch& of, int chunks, cudaStream_t stream);
// What it calls for these sources.
void LaunchOnChipDistances(const LaunchTable& table, int64_t blocks, const OnChipLaunch& of, int chunks,
                           cudaStream_t stream);
void LaunchOnChipExact(const LaunchTable& table, int64_t blocks, const OnChipLaunch& of, int chunks,
                       cudaStream_t stream);
// Whether clusters of kOnChipRanksMost blocks can be had, on the calling thread's device.
bool HasWideClusters();

// ---- transport_exact.cu: exponents in float64 to memory, for solves on the chip -----------------------------------
// Of members in kMixed, of jobs that IsExactOnChip: ExactBlocks of each engine of a member.
void LaunchExact(const LaunchTable& table, int64_t blocks, Source source, cudaStream_t stream);
// The same in float32, in the frame of their potentials, for sweeps: of jobs that are framed, after an iteration.
// FrameBlocks of a member. Of products all jobs of a launch have FrameDim `dim`. `first`: they are the members' first,
// and even those that have stopped get them.
inline int FrameDim(const Job& job) { return job.dim <= kFewDims ? kFewDims : job.dim; }
void LaunchFrames(const LaunchTable& table, int64_t blocks, Source source, int dim, bool first, cudaStream_t stream);

// ---- transport_exponents.cu: exponents of clouds to memory --------------------------------------------------------
// Of jobs that KeepsExponents, after their first iteration: PassBlocks of a member and side 0. Jobs of one launch have
// the same source (transport_exponents_distances.cu), planes and PartsOf; `dim`: the largest.
// Of those that KeepsDensities: 2 to the power of exponents, all jobs of a launch or none.
void LaunchExponents(const LaunchTable& table, int64_t blocks, Source source, int planes, bool densities, int dim,
                     cudaStream_t stream);
void LaunchDistanceExponents(const LaunchTable& table, int64_t blocks, int dim, cudaStream_t stream);

// ---- transport_first_columns.cu: the columns' first half step, which leaves densities -------------------------------
// Of jobs that KeepsFirstDensities, instead of LaunchCloudStep: PassBlocks of a member and side 1. `dim`: the largest.
// LaunchExponents comes after it all the same, for members whose densities could not be used.
void LaunchFirstColumns(const LaunchTable& table, int64_t blocks, int dim, cudaStream_t stream);

// ---- transport_stream.cu, transport_stream_end.cu: costs or exponents in memory, both sides in one sweep ------------
// For streamed jobs: StreamBlocks of a job, for each of its StreamLaunchesOf, then StreamEndBlocks. Jobs of one launch
// have numbers of one size and the same StreamLaunch. LaunchStreamTerms comes before the first, and again where columns
// have got other potentials, or the problem another epsilon, since: StreamTermsBlocks of a job. Slabs may be read while
// the kernel before ends: that is not the one that writes them. `odd`: an odd number of passes came before in this
// slice.
struct StreamLaunch {
  bool halves;       // Exponents of FAST.
  int quads;         // Of columns, that a thread has.
  unsigned engines;  // Bit e: engine e.
  bool operator<(const StreamLaunch& other) const {
    return std::tie(halves, quads, engines) < std::tie(other.halves, other.quads, other.engines);
  }
};
// All that a job takes.
std::vector<StreamLaunch> StreamLaunchesOf(const Job& job);
int64_t StreamBlocks(const Job& job, const StreamLaunch& of);
int64_t StreamTermsBlocks(const Job& job);
int64_t StreamEndBlocks(const Job& job);
void LaunchStreamTerms(const LaunchTable& table, int64_t blocks, cudaStream_t stream);
void LaunchStream(const LaunchTable& table, int64_t blocks, const StreamLaunch& of, Pass pass, bool odd,
                  cudaStream_t stream);
void LaunchStreamEnd(const LaunchTable& table, int64_t blocks, Pass pass, cudaStream_t stream);

// ---- transport_stream_held.cu: kHeldIterationsMost iterations, or all that are left, on the chip -------------------
// Of jobs that are held, after an iteration: engine 0, a problem for each member. Jobs of one launch have the same
// HeldLaunchOf. All its blocks run at once. Columns' terms are left as sweeps leave them, and to those what is not
// solved yet. FramedLaunchOf: members in kMixed, whose exponents lie in their frames, up to so many iterations.
struct HeldLaunch {
  HeldKind kind;
  bool halves;  // Exponents of FAST.
  bool reads;   // Of some rows, in each iteration, what there is no room for.
  int quads;    // Of columns, that a thread has.
  int blocks;   // Of a problem.
  int launches;
  Mode mode;       // Of members.
  int iterations;  // Of a launch.
  bool operator<(const HeldLaunch& other) const {
    return std::tie(kind, halves, reads, quads, blocks, launches, mode, iterations) <
           std::tie(other.kind, other.halves, other.reads, other.quads, other.blocks, other.launches, other.mode,
                    other.iterations);
  }
};
// Whether the calling thread's device has room.
bool HasHeldKernels();
HeldLaunch HeldLaunchOf(const Job& job);
HeldLaunch FramedLaunchOf(const Job& job, int iterations);
void LaunchHeld(const LaunchTable& table, int64_t problems, const HeldLaunch& of, cudaStream_t stream);

// ---- transport_stream_self.cu: the same of engines 1 and 2, of jobs that HoldsSelves, after two passes --------------
// Those whose sums leave the range of such launches are left to sweeps; all others are measured. A problem for each
// engine of the mask, of each member.
struct SelfLaunch {
  bool judged;  // There is a tolerance, or marginals are relaxed.
  bool reads;   // As HeldLaunch's.
  int quads, blocks, launches;
  Mode mode;
  int iterations;
  unsigned engines;  // Bit e: engine e.
  auto Kind() const { return std::tie(judged, reads, quads, blocks, launches, mode, iterations); }
  bool operator<(const SelfLaunch& other) const {
    return std::make_pair(Kind(), engines) < std::make_pair(other.Kind(), other.engines);
  }
};
// All that a job takes: of engines in kFloat; in kMixed, up to so many iterations.
std::vector<SelfLaunch> SelfLaunchesOf(const Job& job);
std::vector<SelfLaunch> FramedSelfLaunchesOf(const Job& job, int iterations);
int64_t SelfProblems(const Job& job, const SelfLaunch& of);
void LaunchSelf(const LaunchTable& table, int64_t problems, const SelfLaunch& of, cudaStream_t stream);

// ---- transport_symmetric.cu: up to `iterations` of engines whose two sides move at once ---------------------------
// Of jobs that loops_symmetric, engines of the mask (0, or 1 and 2) that are apart (IsApart): a problem for each, of
// each member. Jobs of one launch have the same SymmetricLaunchOf. Those that have stopped are measured, unless that
// was before the last epsilon.
struct SymmetricLaunch {
  int dims;  // 2 or 3.
  int group, iterations;
  unsigned engines;
  bool operator<(const SymmetricLaunch& other) const {
    return std::tie(dims, group, iterations, engines) <
           std::tie(other.dims, other.group, other.iterations, other.engines);
  }
};
SymmetricLaunch SymmetricLaunchOf(const Job& job, unsigned engines, int iterations);
int64_t SymmetricProblems(const Job& job, const SymmetricLaunch& of);
void LaunchSymmetric(const LaunchTable& table, int64_t problems, const SymmetricLaunch& of, cudaStream_t stream);

// ---- transport_stream_loop.cu: up to `most` iterations by all of a device ------------------------------------------
// Of jobs that are looped, after an iteration: a problem for each member. Those that are not solved in float32, or have
// fallen, are left as they are. Jobs of one launch have the same LoopLaunchOf. All blocks run at once, where
// HasHeldKernels. Columns' terms are left as sweeps leave them. Those whose last iteration it was are measured, unless
// their other engines are swept.
struct LoopLaunch {
  bool judged;     // There is a tolerance.
  int dims;        // 2 or 3: of points; 0: numbers lie in memory,
  bool densities;  // as densities of FAST.
  int quads;       // Of columns, that a thread has.
  bool operator<(const LoopLaunch& other) const {
    return std::tie(judged, dims, densities, quads) < std::tie(other.judged, other.dims, other.densities, other.quads);
  }
};
LoopLaunch LoopLaunchOf(const Job& job);
void LaunchLoop(const LaunchTable& table, int64_t problems, const LoopLaunch& of, int most, cudaStream_t stream);

// ---- transport_cloud_loop.cu: the same, of clouds whose densities are made anew in each --------------------------
// Of jobs that are looped and LoopsClouds, with the same CloudLoopLaunchOf. Nothing is left for sweeps, which they do
// not have; else as LaunchLoop.
struct CloudLoopLaunch {
  int across, columns;  // Teams side by side, and columns of each.
  int products;         // Of points, sixteen coordinates each: 1, 2 or 4.
  bool operator<(const CloudLoopLaunch& other) const {
    return std::tie(across, columns, products) < std::tie(other.across, other.columns, other.products);
  }
};
CloudLoopLaunch CloudLoopLaunchOf(const Job& job);
void LaunchCloudLoop(const LaunchTable& table, int64_t problems, const CloudLoopLaunch& of, int most,
                     cudaStream_t stream);

// ---- transport_apply.cu: passes over the plan ---------------------------------------------------------------------
// ApplyBlocks of a member.
int64_t ApplyBlocks(const Job& job, int side);
void LaunchApply(const LaunchTable& table, int64_t blocks, Source source, Mode mode, int side, cudaStream_t stream);

// ---- transport_exact_apply.cu: right-hand sides of jobs that MultipliesDoubles; directions but of WeighsDirections --
// Jobs of one launch have the same ExactApplyLaunchOf, `any` of which says whether there is something; `dim`: the
// largest. Blocks of a job. Directions are of members of any mode.
struct ExactApplyLaunch {
  bool any, directions;
  bool few, wide;  // Coordinates; chunks of right-hand sides.
  int ranks;       // Blocks of a cluster.
  bool operator<(const ExactApplyLaunch& other) const {
    return std::tie(any, directions, few, wide, ranks) <
           std::tie(other.any, other.directions, other.few, other.wide, other.ranks);
  }
};
ExactApplyLaunch ExactApplyLaunchOf(const Job& job, Mode mode, int side);
int64_t ExactApplyBlocks(const Job& job, const ExactApplyLaunch& of, Mode mode, int side);
void LaunchExactApply(const LaunchTable& table, int64_t blocks, const ExactApplyLaunch& of, int dim, Mode mode,
                      int side, cudaStream_t stream);

// ---- transport_weights.cu: directions of jobs that WeighsDirections, a chunk of rows after the other ---------------
// Weights, then sums of points by them. Jobs of one launch have the same splits, or ranks; `dim`: the largest. Blocks
// of a job, none for chunks that it does not have.
struct WeightLaunch {
  int chunks;  // 0: there is nothing.
  int splits;  // Parts of the columns that blocks make weights of;
  int ranks;   // blocks of a cluster, which add up what is multiplied by them.
};
int DirectionItems(const Job& job, int side);  // Job::weight_items, or 0.
WeightLaunch DirectionLaunchOf(const Job& job, int side);
int64_t DirectionWeightBlocks(const Job& job, int side, int chunk, int splits);
int64_t DirectionSumBlocks(const Job& job, int side, int chunk, int ranks);
void LaunchDirectionWeights(const LaunchTable& table, int64_t blocks, int dim, int splits, int side, int chunk,
                            cudaStream_t stream);
void LaunchDirectionSums(const LaunchTable& table, int64_t blocks, int ranks, int side, int chunk, cudaStream_t stream);

// By which exact tiles (transport_exact_tiles.cuh) outputs are made. Jobs of one launch agree.
enum class Exact : int { kNone, kFew, kMany };
inline Exact ExactOf(const Job& job) {
  return !MultipliesDoubles(job) ? Exact::kNone : job.dim <= kFewDims ? Exact::kFew : Exact::kMany;
}

// ---- transport_linear.cu: <C, P> of jobs that HasWholeCosts -------------------------------------------------------
// LinearBlocks of a member. `exact`: of jobs that HasExactCosts ExactOf, for members of any mode, and `dim` is the
// largest; of others kNone.
int64_t LinearBlocks(const Job& job);
void LaunchLinear(const LaunchTable& table, int64_t blocks, Exact exact, int dim, Mode mode, cudaStream_t stream);

// ---- transport_sparse.cu: the plan's larger entries ---------------------------------------------------------------
// Of jobs with sparse plans: entries of rows are counted, SparseBlocks of a member; counts become places, one block of
// a member; entries are stored there, SparseBlocks again.
int64_t SparseBlocks(const Job& job);
void LaunchSparse(const LaunchTable& table, int64_t blocks, Source source, Mode mode, bool storing,
                  cudaStream_t stream);
void LaunchSparsePlaces(const LaunchTable& table, int64_t blocks, cudaStream_t stream);

// ---- transport_directions.cu: gradients to points whose cost is no squared distance of them -----------------------
// Of |x - y|: DirectionBlocks of a member. Of cosines, from what the kernels for squared distances left: TurnBlocks.
int64_t DirectionBlocks(const Job& job, int side);
void LaunchDirections(const LaunchTable& table, int64_t blocks, int side, cudaStream_t stream);
int64_t TurnBlocks(const Job& job);
void LaunchTurn(const LaunchTable& table, int64_t blocks, cudaStream_t stream);

// ---- transport_gradient.cu: gradients and projections of points, of jobs in float32 that HasGradientKernel --------
// Jobs of one launch have the same planes and GradientLaunchOf, and dims that lie alike (CloudRowBytes, PartsOf);
// `dim`: the largest.
enum class Sides : int { kNone, kFirst, kSecond, kBoth };
struct GradientLaunch {
  Sides sides;
  int ranks;     // Blocks that share the tiles of a block of rows (0: parts of all tiles are blocks');
  int cuts = 1;  // each of them cut into so many, of kCutTiles tiles.
};
constexpr int kCutTiles = 2;
// Of a side, or of both where their sizes are within a factor of two: those are launched with the first.
GradientLaunch GradientLaunchOf(const Job& job, int side);
// Cuts that such a launch may have where there are processors to spare, without any answer's change; 1: none.
int GradientCuts(const Job& job, const GradientLaunch& launch);
int64_t GradientBlocks(const Job& job, const GradientLaunch& launch);
void LaunchGradient(const LaunchTable& table, int64_t blocks, int planes, int dim, const GradientLaunch& of,
                    cudaStream_t stream);

// ---- transport_gradient_even.cu: the same for jobs that fill a device by themselves, of one part of coordinates ---
// Jobs of one launch have the same planes and dims that lie alike; `dim`: the largest. Bytes of a member's workspace,
// at Layout::densities.
bool HasEvenGradient(const Job& job);
int64_t EvenGradientBytes(const Job& job);
int64_t EvenGradientBlocks(const Job& job);
void LaunchEvenGradient(const LaunchTable& table, int64_t blocks, int planes, int dim, cudaStream_t stream);

// ---- transport_gradient_kept.cu: the same for jobs whose exponents are kept, of more than kDepth coordinates ------
// Jobs of one launch have the same planes and KeptGradientLaunchOf, and all or none KeepsDensities. Bytes of a member's
// workspace, at Layout::densities, and its Layout::arrivals.
int64_t KeptGradientBytes(const Job& job);
int64_t KeptGradientCounters(const Job& job);
GradientLaunch KeptGradientLaunchOf(const Job& job, int side);
int64_t KeptGradientBlocks(const Job& job, const GradientLaunch& launch);
void LaunchKeptGradient(const LaunchTable& table, int64_t blocks, int planes, bool densities, const GradientLaunch& of,
                        cudaStream_t stream);

// ---- transport_exact_gradient.cu: the same for jobs in kMixed that HasExactGradient --------------------------------
// ExactGradientBlocks of both sides of a member.
void LaunchExactGradient(const LaunchTable& table, int64_t blocks, cudaStream_t stream);

// ---- transport_gradient_wide.cu: the same for jobs that HasWideGradient, a chunk of rows after the other ----------
// Jobs of one launch have the same planes, PartsOf and WideLaunchOf; `dim`: the largest.
struct WideLaunch {
  int splits;  // Parts of the columns that blocks make densities of,
  int ranks;   // and that those of a cluster add up.
};
WideLaunch WideLaunchOf(const Job& job, int side);
int WideChunks(const Job& job, int side);
// None for chunks that a job does not have.
int64_t DensityBlocks(const Job& job, int splits, int side, int chunk);
void LaunchDensities(const LaunchTable& table, int64_t blocks, int planes, int dim, int splits, int side, int chunk,
                     cudaStream_t stream);
int64_t WideBlocks(const Job& job, int ranks, int side, int chunk);
void LaunchWideGradient(const LaunchTable& table, int64_t blocks, int planes, int ranks, int side, int chunk,
                        cudaStream_t stream);

// ---- transport_bound.cu: the primal bound of jobs that want one ----------------------------------------------------
// A start, BoundStartBlocks of a member; three passes for sums, of side 0, 1 and 0, BoundStepBlocks; and the value,
// BoundBlocks. Jobs of a launch have the same source and ExactOf; `dim`: the largest.
int64_t BoundStartBlocks(const Job& job);
int64_t BoundStepBlocks(const Job& job, int step);
int64_t BoundBlocks(const Job& job);
void LaunchBoundStart(const LaunchTable& table, int64_t blocks, cudaStream_t stream);
void LaunchBoundStep(const LaunchTable& table, int64_t blocks, Source source, Exact exact, int dim, int step,
                     cudaStream_t stream);
void LaunchBoundValue(const LaunchTable& table, int64_t blocks, Source source, Exact exact, int dim,
                      cudaStream_t stream);

// ---- transport_finish.cu ------------------------------------------------------------------------------------------
// What is stored last, in one launch: vectors of jobs that are through, StoreBlocks of a member, and their scalars, one
// block of a member, which, where there are none for vectors, stores those too; of all jobs what the host reads, one
// block of a job: reports[k] for job k.
int64_t StoreBlocks(const Job& job);
struct EndTables {
  LaunchTable vectors, scalars, all;
  int64_t vector_blocks, scalar_blocks;
  JobReport* reports;
};
void LaunchEnd(const EndTables& end, cudaStream_t stream);

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_LAUNCH_H_
