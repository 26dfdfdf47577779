// The workspace's layout, how passes are cut, and what an iteration costs.
#include "kernels/cuda/transport_job.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cuda/transport_hessian.h"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_slice.h"
#include "kernels/cuda/transport_symmetric.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

constexpr size_t kAlignment = 256;

// Hands out parts of a member's workspace.
class Partition {
 public:
  int64_t Take(int64_t bytes) {
    const int64_t at = bytes_;
    bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_ = 0;
};

// Whether clouds may be there as halves: for products; for distances where they are made from products, which does not
// pay for few coordinates, unless that is done once for all iterations.
bool MayHaveHalves(const Job& job) {
  constexpr int kRootDimLeast = 9;
  if (job.precision == Precision::kDouble || job.dense) return false;
  return SourceOf(job) == Source::kProducts || job.dim >= kRootDimLeast || KeepsExponents(job);
}

// Whether what is made of the plan needs points as they are.
bool ReadsPoints(const Job& job) {
  const Outputs& out = job.out;
  for (const OutputView* view : {&out.plan, &out.gradient_x, &out.gradient_y, &out.gradient_cost, &out.plan_v,
                                 &out.plan_transpose_u, &out.projection_x, &out.projection_y}) {
    if (view->data != nullptr) return true;
  }
  return out.value_linear != nullptr || out.primal_bound != nullptr || out.sparse_plan.max_entries > 0 ||
         job.in.hessian.count > 0;
}

Layout LayoutOf(const Job& job) {
  Layout at = {};
  Partition part;
  const int64_t size[2] = {job.size[0], job.size[1]}, dim = job.dim;
  const int64_t most = std::max(size[0], size[1]), blocks = CeilDiv(most, kTile);
  // Sweeps; iterations of a whole device's blocks together.
  const bool sweeps = job.streamed || job.framed;
  const bool together =
      LoopsSymmetric(job) || (sweeps ? HeldBlocks(job) > 0 || MayLoop(job) : LoopsPoints(job) || LoopsClouds(job));
  int64_t densities = 0;
  at.state = part.Take(job.engines * sizeof(EngineState));
  at.arrival_stride = std::max(blocks, KeptGradientCounters(job)) + 1;
  at.arrivals = part.Take(job.engines * at.arrival_stride * sizeof(unsigned));
  for (int side = 0; side < 2; ++side) {
    const int64_t vector = size[side] * sizeof(double);
    at.mass[side] = part.Take(vector);
    at.log_mass[side] = part.Take(vector);
    if (!job.dense) {
      at.linear[side] = part.Take(vector);
      at.norm2[side] = part.Take(vector);
      at.centre[side] = part.Take(dim * sizeof(double));
      at.points64[side] = part.Take(vector * dim);
      if (job.precision != Precision::kDouble) at.points32[side] = part.Take(size[side] * dim * sizeof(float));
      if (MayHaveHalves(job)) at.halves[side] = part.Take(HalvesBytes(job, side));
      if (IsNegativeDot(job) && job.engines > 1) at.self_linear[side] = part.Take(vector);
      if (IsCosine(job) || SourceOf(job) == Source::kDistances) at.length[side] = part.Take(vector);
      if (IsCosine(job) && WantsGradient(job, side)) at.gradient[side] = part.Take(vector * dim);
      at.chunk_sums[side] = part.Take(CeilDiv(size[side], ChunkPoints(size[side])) * 3 * dim * sizeof(double));
    }
    if (MayHaveHalves(job) && SourceOf(job) == Source::kProducts && HasWideGradient(job) && MakesMeans(job, side)) {
      densities = std::max(densities, WideBytes(job, side));
    }
    if (WeighsDirections(job, side)) {
      densities = std::max(densities, job.weight_items[side] * DirectionItemBytes(job, side));
    }
    if (job.wants_bound) {
      at.bound_psi[side] = part.Take(vector);
      at.bound_log_weight[side] = part.Take(vector);
      at.bound_lack[side] = part.Take(vector);
    }
  }
  for (int e = 0; e < job.engines; ++e) {
    for (int side = 0; side < 2; ++side) {
      const int64_t vector = EngineSize(job, e, side) * sizeof(double);
      for (int parity = 0; parity < 2; ++parity) at.phi[e][parity][side] = part.Take(vector);
      at.ratio[e][side] = part.Take(vector);
      const int blocks =
          std::max({RowBlocks(job, e, side), kOnChipRanksMost, sweeps ? RowBlocks(job, e, side, Geometry::kStream) : 0,
                    together ? kProcessors : 0});
      at.stats[e][side] = part.Take(blocks * sizeof(BlockStats));
    }
    int64_t partial = 0;
    for (Geometry geometry : {Geometry::kPlain, Geometry::kCloud, Geometry::kExact}) {
      for (int side = 0; side < 2; ++side) {
        partial = std::max<int64_t>(partial, int64_t{Splits(job, e, side, geometry)} * EngineSize(job, e, side));
      }
    }
    at.partial[e] = part.Take(partial * sizeof(double));
    const bool apart = LoopsSymmetric(job) && IsSymmetric(job, e);
    if (sweeps || apart || LoopsPoints(job)) {
      const int64_t number = sizeof(float), columns = StreamColumns(job, e), row = columns * number;
      const int slabs = std::max(StreamSlabs(job, e), together ? kProcessors : 0);
      const int64_t sums = sweeps || LoopsPoints(job) ? slabs * row : 0;
      at.stream_sums[e] = part.Take(apart ? std::max(sums, SymmetricBytes(job, e)) : sums);
      at.stream_terms[e] = part.Take(apart ? std::max(row, SymmetricColumns(job, e) * number) : row);
      if (together && e == 0) at.stream_scales = part.Take(row);
      if (together && e == 0 && IsJoint(job)) at.joint_told = part.Take(2 * kJointTold * kProcessors * sizeof(double));
    }
    if (HasNumbers(job)) at.exponents[e] = part.Take(KeptBytes(job, e));
    for (int side = 0; side < 2 && HasFrames(job); ++side) {
      at.frame[e][side] = part.Take(EngineSize(job, e, side) * sizeof(double));
    }
  }
  if (MayHaveHalves(job)) densities = std::max({densities, EvenGradientBytes(job), KeptGradientBytes(job)});
  at.densities = part.Take(std::max(densities, BentWeightBytes(job)));
  if (IsAccelerated(job)) {
    at.anderson = part.Take(sizeof(AndersonState));
    at.anderson_vectors = part.Take((2 + 2 * kAndersonWindow) * size[1] * static_cast<int64_t>(sizeof(double)));
  }
  if (LoopsClouds(job)) {
    at.loop_totals = part.Take(3 * PaddedPoints(size[0]) * sizeof(uint64_t));
    at.loop_frames = part.Take(3 * PaddedPoints(size[0]) * sizeof(float));
  }
  if (sweeps || LoopsClouds(job)) at.stream_reference = part.Take(sizeof(double));
  // Whatever clusters can be had: a layout is asked for before that is known.
  Job widest = job;
  widest.wide_clusters = true;
  for (int e = 0; e < job.engines && IsExactOnChip(widest); ++e) {
    at.exact[e] = part.Take(int64_t{EngineSize(job, e, 0)} * ExactColumns(job, e) * sizeof(double));
  }
  at.chunk_stats = part.Take(PreparedStats(job) * sizeof(ChunkStats));
  at.linear_value = part.Take(LinearParts(job) * sizeof(double));
  if (job.out.sparse_plan.max_entries > 0) {
    at.row_mass = part.Take(size[0] * OutputSplits(job) * sizeof(double));
    at.row_counts = part.Take(size[0] * OutputSplits(job) * sizeof(int));
  }
  if (job.wants_bound) {
    at.bound_partial = part.Take(BoundBlocks(job) * sizeof(double));
    at.bound_stats = part.Take(blocks * sizeof(BlockStats));
  }
  at.bytes = part.bytes();
  return at;
}

}  // namespace

int BestSplits(int64_t blocks, int64_t tiles, int64_t at_once, double beside) {
  constexpr int64_t kMostSplits = 64;
  int best = 1;
  double least = std::numeric_limits<double>::infinity();
  for (int64_t splits = 1; splits <= std::max<int64_t>(1, std::min(kMostSplits, tiles / 2)); ++splits) {
    const double time = CeilDiv(blocks * splits, at_once) * (CeilDiv(tiles, splits) + beside);
    if (time < 0.99 * least) {
      least = time;
      best = static_cast<int>(splits);
    }
  }
  return best;
}

namespace {

int ExactSplits(const Job& job, int engine, int side) {
  constexpr int kColumns = 256;  // A tile of few coordinates; two of many.
  constexpr double kBeside = 4;  // A block's beginning and end.
  const int64_t blocks = job.engines * CeilDiv(EngineSize(job, engine, side), kTile);
  return BestSplits(blocks, CeilDiv(EngineSize(job, engine, 1 - side), kColumns), 2 * kProcessors, kBeside);
}

// Whether FAST's own densities are too coarse to be held, as they are but for plain iterations, and it would be held if
// it were STRICT, which takes less time than to sweep it.
bool IsHeldAsStrict(Job job) {
  if (IsPlain(job) || !KeepsHalves(job)) return false;
  job.precision = Precision::kStrict;
  return KeepsExponents(job) && HeldBlocks(job) > 0 && (job.engines == 1 || HoldsSelves(job));
}

}  // namespace

int CloudSplits(int64_t rows, int64_t columns, int dim) {
  return BestSplits(CeilDiv(rows, kCloudRows), CeilDiv(columns, kCloudTile), kProcessors, 2.0 / CloudDepths(dim));
}

Job JobOf(const Problem& problem, const DeviceKernels& kernels) {
  Job job = {};
  job.hopper = kernels.hopper;
  job.wide_clusters = kernels.wide_clusters;
  job.count = problem.count;
  job.size[0] = static_cast<int32_t>(problem.n);
  job.size[1] = static_cast<int32_t>(problem.m);
  job.dense = problem.kind == ProblemKind::kDense;
  job.dim = job.dense ? 0 : static_cast<int32_t>(problem.dim);
  job.engines = problem.solver.debias && !job.dense ? 3 : 1;
  job.symmetric = problem.solver.update_rule == UpdateRule::kSymmetric;
  job.starting = job.symmetric && !problem.transport.initial_f && !problem.transport.initial_g;
  job.relaxing = problem.solver.over_relaxation && problem.solver.tolerance > 0 && !job.symmetric &&
                 std::isinf(problem.solver.rho_a) && std::isinf(problem.solver.rho_b);
  job.wants_bound = problem.outputs.primal_bound != nullptr;
  job.precision = problem.solver.precision;
  job.in = problem.transport;
  job.in.kappa = CostFactor(problem.transport);
  job.solver = problem.solver;
  job.out = problem.outputs;
  if (kernels.held && IsHeldAsStrict(job)) job.precision = Precision::kStrict;
  for (int e = 0; e < job.engines && !job.dense; ++e) {
    for (int side = 0; side < 2; ++side) {
      job.cloud_splits[e][side] =
          static_cast<int8_t>(CloudSplits(EngineSize(job, e, side), EngineSize(job, e, 1 - side), job.dim));
      job.exact_splits[e][side] = static_cast<int8_t>(ExactSplits(job, e, side));
    }
  }
  job.halves = MayHaveHalves(job) && (SourceOf(job) == Source::kProducts || OnChipTiles(job) == 0);
  // Small problems: to restore points takes one block.
  job.lean = job.halves && IsSquared(job) && job.engines == 1 && OnChipTiles(job) > 0 && job.dim <= kDepth &&
             !ReadsPoints(job);
  job.streamed = StreamsCosts(job) || KeepsExponents(job);
  job.held = kernels.held && job.streamed && HeldBlocks(job) > 0;
  const bool loops = kernels.held && ((MayLoop(job) && job.streamed) || LoopsPoints(job) || LoopsClouds(job));
  (job.engines == 1 ? job.looped : job.looped_beside) = loops;
  job.loops_symmetric = kernels.held && LoopsSymmetric(job);
  job.framed = FramesExponents(job);
  for (int side = 0; side < 2; ++side) {
    job.weight_items[side] = std::max(DirectionItems(job, side), BentItems(job, side));
  }
  job.at = LayoutOf(job);
  job.at.bytes += ProductBytesOf(job);  // The last part.
  return job;
}

namespace {

// Members that an H200 holds at once, and an iteration of them; where rows are read again.
int64_t HeldAtOnce(const Job& job) { return kProcessors / HeldBlocks(job); }
double HeldRoundSeconds(const Job& job) {
  constexpr double kSeconds = 8e-6, kLeastSeconds = 4.5e-6, kReadingSeconds = 14e-6;
  return HeldReads(job) ? kReadingSeconds : kLeastSeconds + (kSeconds - kLeastSeconds) * HeldBlocks(job) / kProcessors;
}
// An iteration of a member's engines 1 and 2, if many are held.
double SelfSeconds(const Job& job) {
  constexpr double kSeconds = 4e-6, kReadingSeconds = 12e-6;
  double seconds = 0;
  for (int engine : {1, 2}) {
    seconds += (SelfReads(job, engine) ? kReadingSeconds : kSeconds) * SelfBlocks(job, engine) / kProcessors;
  }
  return seconds;
}
// A looped one, of a member.
double LoopSeconds(Job job) {
  job.count = job.engines = 1;
  job.loops_symmetric = false;
  job.looped = true;
  return IterationSeconds(job);
}

// An iteration of a member's engines that are apart.
double SymmetricSeconds(const Job& job) {
  constexpr double kPairSeconds = 4e-13, kSeconds = 9e-6;
  const double n = job.size[0], m = job.size[1];
  const double selves = job.engines > 1 ? (n * n + m * m) / 2 * kPairSeconds + kSeconds : 0;
  return selves + (job.symmetric ? n * m * kPairSeconds + kSeconds : 0);
}
// Iterations of a launch, each of which takes so long.
int ChunkOf(double seconds) {
  constexpr double kSeconds = 4e-3;
  return static_cast<int>(std::min(1e6, std::max(1.0, kSeconds / seconds)));
}

}  // namespace

double HeldIterationSeconds(const Job& job, int64_t members) {
  const double selves = HoldsSelves(job) ? members * SelfSeconds(job) : 0;
  return CeilDiv(members, HeldAtOnce(job)) * HeldRoundSeconds(job) + selves;
}

int LoopChunk(const Job& job) { return ChunkOf(LoopSeconds(job)); }
int SymmetricChunk(const Job& job) { return ChunkOf(SymmetricSeconds(job)); }

double TogetherSeconds(const Job& job) {
  constexpr int kUsual = 128, kUsualOfLoops = 64, kUsualOfSelves = 12;  // Iterations, where there is a tolerance.
  const bool judged = job.solver.tolerance > 0;
  const int most = job.solver.max_iterations;
  if (job.held) {
    const double selves = HoldsSelves(job) ? SelfSeconds(job) : 0;
    return std::min(most, judged ? kUsual : kHeldIterationsMost) * HeldRoundSeconds(job) / HeldAtOnce(job) +
           std::min(most, judged ? kUsualOfSelves : kHeldIterationsMost) * selves;
  }
  double seconds = 0;
  if (job.loops_symmetric) {
    const int usual = !judged ? most : job.symmetric ? kUsual : kUsualOfSelves;
    seconds += std::min({most, SymmetricChunk(job), usual}) * SymmetricSeconds(job);
  }
  if (!job.looped && !job.looped_beside) return seconds;
  return seconds + std::min({most, LoopChunk(job), judged ? kUsualOfLoops : most}) * LoopSeconds(job);
}

int64_t TurnMembers(const Job& job, double slice_seconds) {
  if (!(job.held || job.looped || job.looped_beside || job.loops_symmetric)) return job.count;
  const int64_t at_once = job.held ? HeldAtOnce(job) : 1;
  const double rounds = std::max(1.0, slice_seconds / (at_once * TogetherSeconds(job)));
  return rounds * at_once < job.count ? static_cast<int64_t>(rounds) * at_once : job.count;
}

double SolveSeconds(const Job& job) {
  const int64_t most = job.solver.max_iterations;
  const int64_t held = HoldsAll(job) ? std::min<int64_t>(most, kHeldIterationsMost * HeldLaunches(job)) : 0;
  double seconds = (most - held) * (IterationSeconds(job) + 2 * kLaunchSeconds);
  return held > 0 ? seconds + held * HeldIterationSeconds(job, job.count) : seconds;
}

double OutputSeconds(const Job& job) {
  // Measured on an H200. Those that blocks of kTile rows make of all columns wait for the columns where blocks are few;
  // those of clusters (transport_exact_apply.cu), for their shares.
  const Outputs& out = job.out;
  const double pairs = 1e-12 * job.count * job.size[0] * job.size[1], dim = job.dense ? 0 : job.dim;
  const bool exact = MultipliesDoubles(job), few = dim <= kFewDims;
  const auto by_rows = [&](int side, double tile_us, double pair_ps) {
    return std::max(CeilDiv(job.size[1 - side], kTile) * tile_us * 1e-6, pairs * pair_ps);
  };
  const auto by_clusters = [&](int side, double chunks, double tile_us, double pair_ps) {
    const int64_t tiles = CeilDiv(job.size[1 - side], 8 * (few ? kFewColumns : kManyColumns));
    return 2.5e-5 + chunks * std::max(tiles * tile_us * 1e-6, pairs * pair_ps);
  };
  double seconds = 0;
  if (out.plan.data != nullptr || out.gradient_cost.data != nullptr) seconds += 1e-5 + pairs * (8 + 0.25 * dim);
  if (out.value_linear != nullptr) {
    seconds += HasExactCosts(job) ? 2.5e-5 + pairs * (1.5 + 0.06 * dim) : 1e-5 + pairs * (3 + 0.6 * dim);
  }
  if (job.wants_bound) seconds += 8e-5 + pairs * (exact ? 11.5 + 0.22 * dim : 38 + 1.6 * dim);
  if (out.sparse_plan.max_entries > 0) seconds += 2e-5 + 2 * pairs * (6.5 + 0.22 * dim);
  for (int side = 0; side < 2; ++side) {
    if ((side == 0 ? out.plan_v : out.plan_transpose_u).data != nullptr) {
      const int64_t width = side == 0 ? job.in.v_columns : job.in.u_columns;
      const double chunks =
          few || width <= kNarrowRight ? CeilDiv(width, kNarrowRight) : 1.55 * CeilDiv(width, kWideRight);
      seconds += exact ? by_clusters(side, chunks, 3 + 0.09 * dim, 2.7 + 0.06 * dim)
                       : CeilDiv(width, kTile) * by_rows(side, 9.5 + 0.1 * dim, 17 + 0.24 * dim);
    }
    if (WeighsDirections(job, side)) {
      seconds += 4.5e-5 + pairs * (4 + 0.11 * dim);
    } else if (GivesDirections(job, side)) {
      seconds += by_clusters(side, 1, 5 + 0.12 * dim, few ? 4.4 : 8 + 0.067 * dim);
    } else if (SourceOf(job) == Source::kDistances && WantsGradient(job, side)) {
      seconds += by_rows(side, 16.5 + 0.18 * dim, 35 + 1.2 * dim);
    } else if (MakesMeans(job, side)) {
      seconds += 1e-5 + pairs * (0.6 + 0.015 * dim);
    }
  }
  return (job.precision == Precision::kDouble ? 4 : 1) * seconds;
}

namespace {

// Of the iterations, those on the way to the last epsilon, which take four times as long on the chip. Where the data
// tell the first, it is not known yet.
double AnnealedShare(const Job& job) {
  constexpr double kUsualRatio = 1e3;
  const SolverOptions& solver = job.solver;
  if (solver.epsilon_decay == 0) return 0;
  const double ratio = solver.epsilon_start > 0 ? std::max(1.0, solver.epsilon_start / solver.epsilon) : kUsualRatio;
  const double annealed = std::log(ratio) / -std::log(solver.epsilon_decay);
  return std::min(1.0, annealed / std::max(1, solver.max_iterations));
}

}  // namespace

double IterationSeconds(const Job& job) {
  if (OnChipTiles(job) > 0) {
    // Blocks of an H200 at once: of one wave an iteration takes 1 to 3 us, and solves begin and end in each.
    const double at_once = OnChipTiles(job) == 1 ? 792 : OnChipTiles(job) == 2 ? 264 : 132;
    int64_t blocks = 0;
    for (int e = 0; e < job.engines; ++e) blocks += int64_t{1} * job.count * OnChipShapeOf(job, e).ranks;
    return (1 + 3 * AnnealedShare(job)) * (1 + 3 * blocks / at_once) * 1e-6;
  }
  if (job.loops_symmetric) {
    const double apart = job.count * SymmetricSeconds(job);
    if (job.symmetric) return apart;
    Job cross = job;
    cross.engines = 1;
    cross.loops_symmetric = false;
    cross.looped = job.looped_beside;
    return apart + IterationSeconds(cross);
  }
  double pairs = 0, passes = 0;  // All; as often as half steps go over them.
  for (int e = 0; e < job.engines; ++e) {
    const double of_engine = 1.0 * EngineSize(job, e, 0) * EngineSize(job, e, 1);
    pairs += of_engine, passes += (e == 0 ? 2 : 1) * of_engine;
  }
  if (job.looped && LoopsClouds(job)) return job.count * (pairs * 5e-13 + 2e-5);
  if (job.looped) return job.count * (pairs * (job.streamed && !KeepsHalves(job) ? 8.7e-13 : 4.5e-13) + 5e-6);
  if (job.streamed) return job.count * pairs * (KeepsHalves(job) ? 6e-13 : 1.2e-12) + 1e-5;
  if (!job.halves) {
    const double slow = job.precision == Precision::kDouble ? 4 : 1;
    return job.count * (passes * slow * (8e-13 + 8e-14 * job.dim) + 2e-8) + 2e-5;
  }
  return job.count * (passes * (3e-13 + 4e-15 * job.dim * (2 * PlanesOf(job) - 1)) + 2e-8) + 2e-5;
}

}  // namespace cuda
}  // namespace sinkhorn
