// The preparation's step 4: states, from the data's ranges; and how its steps are cut into blocks.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_PREPARE_STATES_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_PREPARE_STATES_CUH_

#include "kernels/cuda/transport_control.cuh"

namespace sinkhorn {
namespace cuda {

constexpr int kChunkCosts = 16384;
constexpr int kSpherePoints = 64;  // Of a block in step 0.
constexpr int kStatsPoints = 16;   // That have statistics of their own, however blocks are cut.
constexpr int kWarps = kThreads / 32;
constexpr int kCentreLanes = 32;  // Coordinates of a block in step 2.

__host__ __device__ inline int PointChunks(const Job& job, int side) {
  return static_cast<int>(CeilDiv(job.size[side], ChunkPoints(job.size[side])));
}
// A chunk's coordinates are cut into slices where one block would be long over them all.
__host__ __device__ inline int SliceCoordinates(const Job& job, int side) {
  return job.size[side] > 256 && job.size[side] <= 1024 ? 16 : job.dim;
}
__host__ __device__ inline int Slices(const Job& job, int side) {
  return (job.dim + SliceCoordinates(job, side) - 1) / SliceCoordinates(job, side);
}
__host__ __device__ inline int SphereBlocks(const Job& job, int side) {
  return static_cast<int>(CeilDiv(job.size[side], kSpherePoints));
}
__host__ __device__ inline int PointStats(const Job& job, int side) {
  return static_cast<int>(CeilDiv(job.size[side], kStatsPoints));
}
// Points of step 3: with padding, as far as kernels read halves. `on_chip`: of jobs that are solved there, which read
// whole tiles; all others, and sweeps behind the solve, whole blocks of rows.
__host__ __device__ inline int WrittenPoints(const Job& job, int side, bool on_chip) {
  if (!job.halves) return job.size[side];
  const bool sweeps = HasWideGradient(job) || job.in.hessian.count > 0;
  const int rows = on_chip && !sweeps ? kCloudTile : kCloudRows;
  return (job.size[side] + rows - 1) / rows * rows;
}
// Blocks of step 3, of so many points each: behind those that have points, those of padding alone.
__host__ __device__ inline int PaddedPointBlocks(const Job& job, int side, int points) {
  return static_cast<int>(CeilDiv(WrittenPoints(job, side, OnChipTiles(job) > 0), points));
}
__host__ __device__ inline int64_t CostChunks(const Job& job) {
  return CeilDiv(int64_t{job.size[0]} * job.size[1], kChunkCosts);
}

// Step 4.
struct Ranges {
  double low, high;           // Of the costs.
  double radius[2], mass[2];  // Of the clouds; total masses.
  double range;               // Of costs of points: that of the box around both clouds.
  double apart;               // The centres' distance; squared distances only.
  double farthest[2];         // Largest norms of points that are not centred; negative dots only.
};
template <bool kSquares>
__device__ Ranges RangesOf(const Member& member) {
  const Job& job = member.job;
  double mass[2] = {0, 0}, box = 0, apart2 = 0, centre2[2] = {0, 0};
  double low = INFINITY, high = -INFINITY, radius2[2] = {0, 0};
  const ChunkStats* stats = member.At<ChunkStats>(job.at.chunk_stats);
  if (job.dense) {
    const int64_t chunks = CostChunks(job);
#pragma unroll 1
    for (int64_t k = threadIdx.x; k < chunks; k += kThreads) {
      low = fmin(low, stats[k].low);
      high = fmax(high, stats[k].high);
    }
    stats += chunks;
  }
#pragma unroll
  for (int side = 0; side < 2; ++side) {
#pragma unroll 1
    for (int k = threadIdx.x; k < PointStats(job, side); k += kThreads) {
      radius2[side] = fmax(radius2[side], stats[k].high);
      mass[side] += stats[k].mass;
    }
    stats += PointStats(job, side);
  }
  if (!job.dense) {
    const double* x = member.At<double>(job.at.chunk_sums[0]) + job.dim;
    const double* y = member.At<double>(job.at.chunk_sums[1]) + job.dim;
    const double* centre[2] = {member.At<double>(job.at.centre[0]), member.At<double>(job.at.centre[1])};
#pragma unroll 1
    for (int k = threadIdx.x; k < job.dim; k += kThreads) {
      const double side = fmax(x[job.dim + k], y[job.dim + k]) - fmin(x[k], y[k]);
      box += side * side;
      apart2 += (centre[0][k] - centre[1][k]) * (centre[0][k] - centre[1][k]);
      for (int of = 0; of < 2 && !kSquares; ++of) centre2[of] += centre[of][k] * centre[of][k];
    }
  }
  double sums[6] = {mass[0], mass[1], box, apart2, centre2[0], centre2[1]};
  double most[4] = {-low, high, radius2[0], radius2[1]};
  BlockReduce(sums, most);
  Ranges ranges = {-most[0], most[1], {sqrt(most[2]), sqrt(most[3])}, {sums[0], sums[1]}, 0, 0, {0, 0}};
  if (job.dense) return ranges;
  ranges.range = job.in.kappa * sums[2];
  if (kSquares) ranges.apart = sqrt(sums[3]);
  if (!kSquares && SourceOf(job) == Source::kDistances) ranges.range = sqrt(ranges.range);
  if (!kSquares && IsCosine(job)) ranges.range = 2;
  for (int side = 0; side < 2 && !kSquares && IsNegativeDot(job); ++side) {
    ranges.farthest[side] = ranges.radius[side] + sqrt(sums[4 + side]);
  }
  return ranges;
}

// The largest exponent among products of some of the points, which stand for all. Every thread gets it.
__device__ inline double SampleExponents(const Member& member) {
  constexpr int kPoints = 32;
  __shared__ double scratch[kMostWarps];
  const Job& job = member.job;
  double largest = 0;
  // A warp has some points of x in turn, its lanes coordinates side by side, against eight of y at once.
  constexpr int kOthers = 8;
  for (int group = threadIdx.x / 32; group < kPoints * kPoints / kOthers; group += kWarps) {
    const int64_t i = int64_t{job.size[0]} * (group * kOthers / kPoints) / kPoints;
    const float* x = member.At<float>(job.at.points32[0]) + i * job.dim;
    float products[kOthers] = {};
    for (int k = threadIdx.x % 32; k < job.dim; k += 32) {
#pragma unroll
      for (int other = 0; other < kOthers; ++other) {
        const int64_t j = int64_t{job.size[1]} * (group * kOthers % kPoints + other) / kPoints;
        products[other] = fmaf(x[k], member.At<float>(job.at.points32[1])[j * job.dim + k], products[other]);
      }
    }
    for (float product : products) {
      for (int lane = 16; lane > 0; lane /= 2) product += __shfl_xor_sync(0xffffffffu, product, lane);
      largest = fmax(largest, fabs(static_cast<double>(product)));
    }
  }
  return 2 * job.in.kappa / job.solver.epsilon * BlockMax(largest, scratch);
}

// A bound of what exponents are made of, in units of the cost.
template <bool kSquares>
__device__ double LargestCost(const Job& job, const Ranges& r) {
  if (job.dense) return fmax(fabs(r.low), fabs(r.high));
  const double radius = fmax(r.radius[0], r.radius[1]), farthest = fmax(r.farthest[0], r.farthest[1]);
  const bool debias = job.solver.debias, unbalanced = !isinf(job.solver.rho_a) || !isinf(job.solver.rho_b);
  double largest = 2 * job.in.kappa * (debias ? radius * radius : r.radius[0] * r.radius[1]);
  if (!kSquares && SourceOf(job) == Source::kDistances) largest = 2 * radius;
  // Damping acts on whole potentials: their shift does not cancel, but for what all points have of it. Of squared
  // distances that is kappa (|x|^2 + 2 <x, d>), d the difference of the centres, and often far below the box's range.
  const double shift = kSquares ? fmin(r.range, job.in.kappa * radius * (radius + 2 * r.apart)) : r.range;
  if (unbalanced) largest += shift + (debias ? farthest * farthest : r.farthest[0] * r.farthest[1]);
  return largest;
}

// How far a cost may be from that of the points as given: FAST rounds their centred coordinates to 11 digits.
template <bool kSquares>
__device__ double CostRounding(const Job& job, const Ranges& r) {
  if (PlanesOf(job) == 2) return 0;
  constexpr double kRounding = 0x1.01p-11;  // Of a radius, which is that of rounded points.
  const double moved[2] = {kRounding * r.radius[0], kRounding * r.radius[1]};
  if (!kSquares && IsNegativeDot(job)) return moved[0] * r.farthest[1] + moved[1] * (r.farthest[0] + moved[0]);
  const double distance = !kSquares && IsCosine(job) ? 2 : r.radius[0] + r.radius[1] + r.apart;  // At most.
  const double both = moved[0] + moved[1];
  return job.in.kappa * both * (2 * distance + both);
}

// Both clouds' centres, once all points are there, become the one that they have.
__device__ inline void ShareCentre(const Member& member) {
  double* x = member.At<double>(member.job.at.centre[0]);
  double* y = member.At<double>(member.job.at.centre[1]);
#pragma unroll 1
  for (int k = threadIdx.x; k < member.job.dim; k += kThreads) x[k] = y[k] = (x[k] + y[k]) / 2;
}

// The least epsilon at which float32 exponents serve. `sampled`: the largest exponent of a sample, at the last epsilon.
template <bool kSquares>
__device__ double FloatEpsilon(const Job& job, double cost_max, double sampled) {
  // A float32 exponent must not spoil the potentials, nor a certificate that is asked for.
  // FAST answers are off by more than that anyway, but for distances, which are not rounded.
  const bool root = !kSquares && SourceOf(job) == Source::kDistances;
  const double slack = job.precision == Precision::kFast && !root ? 16 : 1;
  const double cost = cost_max / slack, epsilon = job.solver.epsilon, tolerance = job.solver.tolerance;
  double limit = kFloatExponentMax;
  if (root && job.halves) limit = kRootExponentMax;
  // Potentials of negative dots are no larger than products, whose parts of 16 coordinates are rounded one by one.
  if (!kSquares && IsNegativeDot(job)) limit = fmin(limit, kDotExponentMax / CeilDiv(job.dim, 16));
  // Twice the sample's, since the largest of all is larger.
  double least = fmin(cost / limit, fmax(cost / kCloudExponentMax, 2 * sampled * epsilon / limit));
  if (tolerance > 0) least = fmax(least, kFloatExponentError * cost / tolerance);
  // What larger epsilons have left is in the potentials still. On the chip a solve ends as it begins.
  const bool always = OnChipTiles(job) > 0 || kFloatExponentError * cost > kAnnealedError * epsilon;
  return least > epsilon && always ? INFINITY : least;
}

template <bool kSquares>
__device__ void PrepareStates(const Member& member) {
  const Job& job = member.job;
  const SolverOptions& solver = job.solver;
  // Left there with the points, before all else of the state.
  const double point_scale = job.halves ? member.state(0)->point_scale : 1;
  const Ranges r = RangesOf<kSquares>(member);
#pragma unroll 1
  for (int64_t k = threadIdx.x; k < job.engines * job.at.arrival_stride; k += kThreads) {
    member.At<unsigned>(job.at.arrivals)[k] = 0;
  }
  // Points may have many coordinates and small products; but with themselves they have large ones.
  double sampled = INFINITY;
  if (SourceOf(job) == Source::kProducts && job.halves && job.engines == 1 && job.dim > kDepth) {
    sampled = SampleExponents(member);
  }
  if (!kSquares && SourceOf(job) == Source::kDistances) ShareCentre(member);
  if (threadIdx.x >= job.engines) return;
  const int engine = threadIdx.x;
  const double cost_max = LargestCost<kSquares>(job, r), range = job.dense ? r.high - r.low : r.range;
  EngineState s = {};
  const double start = fmax(solver.epsilon, solver.epsilon_start > 0 ? solver.epsilon_start : range);
  s.epsilon = solver.epsilon_decay > 0 ? start : solver.epsilon;
  s.relaxation.weight = 1;
  s.relaxation.ceiling = 2 - 1e-4;
  s.relax = s.previous_relax = 1;
  for (int side = 0; side < 2; ++side) s.total_mass[side] = r.mass[MeasureOf(engine, side)];
  s.cost_max = cost_max;
  s.cost_rounding = CostRounding<kSquares>(job, r);
  s.point_scale = point_scale;
  s.starting = engine > 0 || job.starting;
  s.fresh = 1;
  s.float_epsilon = static_cast<float>(FloatEpsilon<kSquares>(job, cost_max, sampled));
  s.mode = job.precision == Precision::kDouble ? kDouble : kFloat;
  s.mode = ModeAt(s, s.epsilon);
  s.reason = static_cast<int>(StopReason::kMaxIterations);
  if (engine == 0 && IsAccelerated(job)) {
    const bool relaxes = job.held && s.mode == kFloat && HeldKindOf(job, kFloat) != HeldKind::kExtrapolated;
    s.anderson = GeometryOf(job, s.mode) != Geometry::kOnChip && !relaxes;
    *member.anderson() = {{1, 1, 0, 0, 0, 0, INFINITY, INFINITY}, {}};
  }
  if (s.starting) {
    s.relax = 1;
  } else if (job.symmetric) {
    s.relax = 0.5;
  }
  *member.state(engine) = s;
}

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_PREPARE_STATES_CUH_
