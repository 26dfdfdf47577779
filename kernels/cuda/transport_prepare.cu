// Inputs to the workspace: points centred on their own mean, masses and their logarithms, first potentials, and from
// the data's ranges the arithmetic that each member needs.
//
// Step 0  sums and ranges of chunks of points, ranges of chunks of costs
// Step 1  centres and boxes of the clouds
// Step 2  points, norms, masses, potentials
// Step 3  states
// Step 4  points as sums of two halves
//
// FAST rounds centred coordinates to 11 bits once, before anything is made of them, so that norms and products agree:
// its answers are exact for clouds displaced by the rounding.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_cloud.cuh"
#include "kernels/cuda/transport_hopper.cuh"
#include "kernels/cuda/transport_launch.h"

namespace sinkhorn {
namespace cuda {
namespace {

constexpr int kChunkCosts = 16384;
constexpr int kBlockPoints = 64;  // Rows of a block in step 2.
constexpr int kWarps = kThreads / 32;
constexpr int kCentreLanes = 32;  // Coordinates of a block in step 1.

__host__ __device__ int PointChunks(const Job& job, int side) {
  return static_cast<int>(CeilDiv(job.size[side], ChunkPoints(job.size[side])));
}
__host__ __device__ int PointBlocks(const Job& job, int side) {
  return static_cast<int>(CeilDiv(job.size[side], kBlockPoints));
}
// Of step 4: padding too, as far as kernels read.
__host__ __device__ int SplitBlocks(const Job& job, int side) {
  const int64_t points =
      OnChipTiles(job) > 0 ? CeilDiv(job.size[side], kCloudTile) * kCloudTile : PaddedPoints(job.size[side]);
  return static_cast<int>(points / kBlockPoints);
}
__host__ __device__ int64_t CostChunks(const Job& job) {
  return CeilDiv(int64_t{job.size[0]} * job.size[1], kChunkCosts);
}

// Step 0, points: thread t adds up coordinate t % dim (or t, t + kThreads ...) of every rows-th row.
__device__ void SumChunk(const Member& member, int side, int chunk) {
  const Job& job = member.job;
  __shared__ double scratch[3][kThreads];
  const TensorView& view = side == 0 ? job.in.x : job.in.y;
  const int dim = job.dim, count = job.size[side];
  const int lanes = min(dim, kThreads), rows = kThreads / lanes;
  const int lane = threadIdx.x % lanes, row = threadIdx.x / lanes;
  const int first = chunk * ChunkPoints(count), last = min(count, first + ChunkPoints(count));
  double* out = member.At<double>(job.at.chunk_sums[side]) + int64_t{3} * dim * chunk;
  double* centre = count <= ChunkPoints(count) ? member.At<double>(job.at.centre[side]) : nullptr;  // All are here.
  for (int k0 = 0; k0 < dim; k0 += lanes) {
    const int k = k0 + lane;
    double sum = 0, low = INFINITY, high = -INFINITY;
    if (row < rows && k < dim) {
      for (int i = first + row; i < last; i += rows) {
        const double value = LoadInput(view, member.index, int64_t{count} * dim, int64_t{i} * dim + k);
        sum += value;
        low = fmin(low, value);
        high = fmax(high, value);
      }
    }
    __syncthreads();
    scratch[0][threadIdx.x] = sum;
    scratch[1][threadIdx.x] = low;
    scratch[2][threadIdx.x] = high;
    __syncthreads();
    if (row == 0 && k < dim) {
      for (int r = 1; r < rows; ++r) {
        sum += scratch[0][r * lanes + lane];
        low = fmin(low, scratch[1][r * lanes + lane]);
        high = fmax(high, scratch[2][r * lanes + lane]);
      }
      out[k] = sum;
      if (centre != nullptr) centre[k] = sum / count;
      out[dim + k] = low;
      out[2 * dim + k] = high;
    }
  }
}

__device__ void RangeOfCosts(const Member& member, int64_t chunk) {
  const Job& job = member.job;
  __shared__ double scratch[kMostWarps];
  const int64_t size = int64_t{job.size[0]} * job.size[1];
  const int64_t last = min(size, (chunk + 1) * kChunkCosts);
  double low = INFINITY, high = -INFINITY;
  for (int64_t i = chunk * kChunkCosts + threadIdx.x; i < last; i += kThreads) {
    const double cost = LoadInput(job.in.cost, member.index, size, i);
    low = fmin(low, cost);
    high = fmax(high, cost);
  }
  low = -BlockMax(-low, scratch);
  high = BlockMax(high, scratch);
  if (threadIdx.x == 0) member.At<ChunkStats>(job.at.chunk_stats)[chunk] = {low, high, 0};
}

// Step 1, unless one chunk has all: the chunks' sums to the centre; their ranges to those of the cloud, in place of the
// first chunk's. A block has kCentreLanes coordinates; a warp every kWarps-th chunk of them.
__device__ void CentreOf(const Member& member, int side, int block) {
  const Job& job = member.job;
  __shared__ double scratch[3][kWarps][kCentreLanes];
  const int dim = job.dim, chunks = PointChunks(job, side), lane = threadIdx.x % kCentreLanes;
  const int warp = threadIdx.x / kCentreLanes, k = block * kCentreLanes + lane;
  double* in = member.At<double>(job.at.chunk_sums[side]);
  double sum = 0, low = INFINITY, high = -INFINITY;
#pragma unroll 4
  for (int c = warp; c < chunks && k < dim; c += kWarps) {
    const double* chunk = in + int64_t{3} * dim * c;
    sum += chunk[k];
    low = fmin(low, chunk[dim + k]);
    high = fmax(high, chunk[2 * dim + k]);
  }
  scratch[0][warp][lane] = sum;
  scratch[1][warp][lane] = low;
  scratch[2][warp][lane] = high;
  __syncthreads();  // All have read.
  if (warp > 0 || k >= dim) return;
  for (int w = 1; w < kWarps; ++w) {
    sum += scratch[0][w][lane];
    low = fmin(low, scratch[1][w][lane]);
    high = fmax(high, scratch[2][w][lane]);
  }
  in[dim + k] = low;
  in[2 * dim + k] = high;
  member.At<double>(job.at.centre[side])[k] = sum / job.size[side];
}

// To 11 significant bits.
__device__ double RoundedTo11Bits(double value) {
  int exponent;
  const double mantissa = frexp(value, &exponent);
  return ldexp(rint(ldexp(mantissa, 11)), exponent - 11);
}

// Step 2: one warp a point.
__device__ void CentrePoint(const Member& member, int side, int i, double* radius2) {
  const Job& job = member.job;
  const TensorView& view = side == 0 ? job.in.x : job.in.y;
  const int dim = job.dim, count = job.size[side];
  const double* centre = member.At<double>(job.at.centre[side]);
  const double* theirs = member.At<double>(job.at.centre[1 - side]);
  double* points64 = member.At<double>(job.at.points64[side]) + int64_t{i} * dim;
  float* points32 = member.At<float>(job.at.points32[side]) + int64_t{i} * dim;
  double norm2 = 0, along = 0, apart2 = 0;
  for (int k = threadIdx.x % 32; k < dim; k += 32) {
    const double apart = side == 0 ? centre[k] - theirs[k] : theirs[k] - centre[k];
    double value = LoadInput(view, member.index, int64_t{count} * dim, int64_t{i} * dim + k) - centre[k];
    if (job.precision == Precision::kFast) value = RoundedTo11Bits(value);
    points64[k] = value;
    if (job.precision != Precision::kDouble) points32[k] = static_cast<float>(value);
    norm2 += value * value;
    along += value * apart;
    apart2 += apart * apart;
  }
  for (int lane = 16; lane > 0; lane /= 2) {
    norm2 += __shfl_xor_sync(0xffffffffu, norm2, lane);
    along += __shfl_xor_sync(0xffffffffu, along, lane);
    apart2 += __shfl_xor_sync(0xffffffffu, apart2, lane);
  }
  *radius2 = norm2;
  if (threadIdx.x % 32 != 0) return;
  // C = kappa |x + d - y|^2 with d = centre_x - centre_y.
  member.At<double>(job.at.linear[side])[i] = job.in.kappa * (side == 0 ? 2 * along + apart2 : -2 * along);
  member.At<double>(job.at.norm2[side])[i] = job.in.kappa * norm2;
}

__device__ void PreparePoints(const Member& member, int side, int block) {
  const Job& job = member.job;
  __shared__ double scratch[kMostWarps];
  const int count = job.size[side], first = block * kBlockPoints, last = min(count, first + kBlockPoints);
  double high = 0, total = 0;
  if (!job.dense) {
    for (int i = first + static_cast<int>(threadIdx.x) / 32; i < last; i += kWarps) {
      double radius2;
      CentrePoint(member, side, i, &radius2);
      high = fmax(high, radius2);
    }
    __syncthreads();  // The shifts are there.
  }
  const int i = first + threadIdx.x;
  if (threadIdx.x < kBlockPoints && i < last) {
    const TensorView& view = side == 0 ? job.in.a : job.in.b;
    const double mass = view.data == nullptr ? 1.0 / count : LoadInput(view, member.index, count, i);
    member.mass(side)[i] = mass;
    member.log_mass(side)[i] = mass > 0 ? log2(mass) : kVoid;
    total = mass;
    const TensorView& initial = side == 0 ? job.in.initial_f : job.in.initial_g;
    const double f = initial.data == nullptr ? 0 : LoadInput(initial, member.index, count, i);
    member.phi(0, 0, side)[i] = f - member.Shift(0, side, i);
    if (job.engines > 1) {
      for (int s = 0; s < 2; ++s) member.phi(1 + side, 0, s)[i] = -member.Shift(1 + side, s, i);
    }
  }
  high = BlockMax(high, scratch);
  total = BlockSum(total, scratch);
  if (threadIdx.x != 0) return;
  ChunkStats* stats = member.At<ChunkStats>(job.at.chunk_stats) + (job.dense ? CostChunks(job) : 0);
  stats[side == 0 ? block : PointBlocks(job, 0) + block] = {0, high, total};
}

// Step 3.
struct Ranges {
  double low, high;           // Of the costs.
  double radius[2], mass[2];  // Of the clouds; total masses.
  double box;                 // kappa |diagonal of the box around both|^2
};
__device__ Ranges RangesOf(const Member& member) {
  const Job& job = member.job;
  __shared__ double scratch[kMostWarps];
  Ranges ranges = {0, 0, {0, 0}, {0, 0}, 0};
  const ChunkStats* stats = member.At<ChunkStats>(job.at.chunk_stats);
  if (job.dense) {
    double low = INFINITY, high = -INFINITY;
    const int64_t chunks = CostChunks(job);
    for (int64_t k = threadIdx.x; k < chunks; k += kThreads) {
      low = fmin(low, stats[k].low);
      high = fmax(high, stats[k].high);
    }
    ranges.low = -BlockMax(-low, scratch);
    ranges.high = BlockMax(high, scratch);
    stats += chunks;
  }
  for (int side = 0; side < 2; ++side) {
    double high = 0, mass = 0;
    for (int k = threadIdx.x; k < PointBlocks(job, side); k += kThreads) {
      high = fmax(high, stats[k].high);
      mass += stats[k].mass;
    }
    ranges.radius[side] = sqrt(BlockMax(high, scratch));
    ranges.mass[side] = BlockSum(mass, scratch);
    stats += PointBlocks(job, side);
  }
  if (job.dense) return ranges;
  double box = 0;
  const double* x = member.At<double>(job.at.chunk_sums[0]) + job.dim;
  const double* y = member.At<double>(job.at.chunk_sums[1]) + job.dim;
  for (int k = threadIdx.x; k < job.dim; k += kThreads) {
    const double side = fmax(x[job.dim + k], y[job.dim + k]) - fmin(x[k], y[k]);
    box += side * side;
  }
  ranges.box = job.in.kappa * BlockSum(box, scratch);
  return ranges;
}

// The largest exponent among products of some of the points, which stand for all. Every thread gets it.
__device__ double SampleExponents(const Member& member) {
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

// `sampled`: the largest exponent of a sample.
__device__ int ModeFor(const Job& job, double cost_max, double sampled) {
  if (job.precision == Precision::kDouble) return kDouble;
  // A float32 exponent must not spoil the potentials, nor a certificate that is asked for.
  // FAST answers are off by more than that anyway.
  const double slack = job.precision == Precision::kFast ? 16 : 1;
  const double exponent = cost_max / job.solver.epsilon / slack, tolerance = job.solver.tolerance;
  // Twice the sample's, since the largest of all is larger.
  const double most = 2 * sampled <= kFloatExponentMax ? kCloudExponentMax : kFloatExponentMax;
  return exponent > most || (tolerance > 0 && kFloatExponentError * exponent > tolerance) ? kMixed : kFloat;
}

__device__ void PrepareStates(const Member& member) {
  const Job& job = member.job;
  const SolverOptions& solver = job.solver;
  const Ranges r = RangesOf(member);
  for (int64_t k = threadIdx.x; k < job.engines * job.at.arrival_stride; k += kThreads) {
    member.At<unsigned>(job.at.arrivals)[k] = 0;
  }
  // Points may have many coordinates and small products; but with themselves they have large ones.
  double sampled = INFINITY;
  if (!job.dense && job.engines == 1 && job.dim > kDepth && job.precision != Precision::kDouble) {
    sampled = SampleExponents(member);
  }
  if (threadIdx.x >= job.engines) return;
  const int engine = threadIdx.x;
  const bool unbalanced = !isinf(solver.rho_a) || !isinf(solver.rho_b);
  double cost_max, range;
  if (job.dense) {
    cost_max = fmax(fabs(r.low), fabs(r.high));
    range = r.high - r.low;
  } else {
    const double radius = fmax(r.radius[0], r.radius[1]);
    cost_max = 2 * job.in.kappa * (solver.debias ? radius * radius : r.radius[0] * r.radius[1]);
    range = r.box;
    if (unbalanced) cost_max += range;  // Damping acts on whole potentials: their shift does not cancel.
  }
  EngineState s = {};
  const double start = fmax(solver.epsilon, solver.epsilon_start > 0 ? solver.epsilon_start : range);
  s.epsilon = solver.epsilon_decay > 0 ? start : solver.epsilon;
  s.relaxation.weight = 1;
  s.relaxation.ceiling = 2 - 1e-4;
  s.relax = s.previous_relax = 1;
  for (int side = 0; side < 2; ++side) s.total_mass[side] = r.mass[MeasureOf(engine, side)];
  s.cost_max = cost_max;
  // Coordinates as halves are at most 64, and so far above where halves lose bits.
  const double radius = fmax(r.radius[0], r.radius[1]);
  s.point_scale = radius > 0 && isfinite(radius) ? ldexp(1.0, 5 - ilogb(radius)) : 1;
  s.starting = engine > 0 || job.starting;
  s.fresh = 1;
  s.mode = ModeFor(job, cost_max, sampled);
  s.reason = static_cast<int>(StopReason::kMaxIterations);
  if (engine == 0 && IsAccelerated(job)) {
    s.anderson = GeometryOf(job, s.mode) != Geometry::kOnChip;
    *member.anderson() = {1, 1, 0, 0, 0, 0, INFINITY, INFINITY, {}};
  }
  if (s.starting) {
    s.relax = 1;
  } else if (job.symmetric) {
    s.relax = 0.5;
  }
  *member.state(engine) = s;
}

// Step 4: x scale = high + low + what is below 2^-22 of it; FAST has no low. A thread makes chunks of 8 coordinates.
__device__ void SplitPoints(const Member& member, int side, int block) {
  const Job& job = member.job;
  const EngineState& state = *member.state(0);
  if (state.mode != kFloat) return;
  const int dim = job.dim, count = job.size[side], first = block * kBlockPoints, planes = PlanesOf(job);
  const int row_bytes = CloudRowBytes(dim), depths = CloudDepths(dim), chunks = row_bytes / 16;
  const int64_t plane_bytes = int64_t{kCloudTile} * row_bytes;
  const double* in = member.At<double>(job.at.points64[side]);
  char* out = member.At<char>(job.at.halves[side]);
  for (int e = threadIdx.x; e < kBlockPoints * depths * chunks; e += kThreads) {
    const int chunk = e % chunks, depth = e / chunks % depths;
    const int64_t i = first + e / chunks / depths;
    alignas(16) __half high[8], low[8];
#pragma unroll
    for (int q = 0; q < 8; ++q) {
      const int k = depth * kDepth + chunk * 8 + q;
      const float value = k < dim && i < count ? static_cast<float>(in[i * dim + k] * state.point_scale) : 0;
      high[q] = __float2half_rn(value);
      low[q] = __float2half_rn(value - __half2float(high[q]));
    }
    char* to = out + (i / kCloudTile * depths + depth) * planes * plane_bytes +
               SwizzledAt(static_cast<int>(i % kCloudTile), chunk, row_bytes);
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(high);
    if (planes == 2) *reinterpret_cast<uint4*>(to + plane_bytes) = *reinterpret_cast<const uint4*>(low);
  }
}

__global__ void __launch_bounds__(kThreads) PrepareKernel(LaunchTable table, int step) {
  AllowNextKernel();
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  AwaitKernelBefore();
  if (step == 3) return PrepareStates(Member{job, work.block});
  if (step == 1) {
    const int64_t of_side = CeilDiv(job.dim, kCentreLanes), rest = work.block % (2 * of_side);
    return CentreOf(Member{job, work.block / (2 * of_side)}, rest < of_side ? 0 : 1, static_cast<int>(rest % of_side));
  }
  const bool costs = step == 0 && job.dense;
  int chunks[2];
  for (int side = 0; side < 2; ++side) {
    chunks[side] = step == 0 ? PointChunks(job, side) : step == 2 ? PointBlocks(job, side) : SplitBlocks(job, side);
  }
  const int64_t of_member = costs ? CostChunks(job) : chunks[0] + chunks[1];
  const Member member{job, work.block / of_member};
  const int64_t rest = work.block % of_member;
  if (costs) return RangeOfCosts(member, rest);
  const int side = rest < chunks[0] ? 0 : 1, chunk = static_cast<int>(side == 0 ? rest : rest - chunks[0]);
  if (step == 0) return SumChunk(member, side, chunk);
  return step == 2 ? PreparePoints(member, side, chunk) : SplitPoints(member, side, chunk);
}

}  // namespace

int64_t PrepareBlocks(const Job& job, int step) {
  switch (step) {
    case 0:
      return job.dense ? CostChunks(job) : PointChunks(job, 0) + PointChunks(job, 1);
    case 1:
      return job.dense || PointChunks(job, 0) * PointChunks(job, 1) == 1 ? 0 : 2 * CeilDiv(job.dim, kCentreLanes);
    case 2:
      return PointBlocks(job, 0) + PointBlocks(job, 1);
    case 3:
      return 1;
    default:
      return job.dense || job.precision == Precision::kDouble ? 0 : SplitBlocks(job, 0) + SplitBlocks(job, 1);
  }
}

void LaunchPrepare(const LaunchTable& table, int64_t blocks, int step, cudaStream_t stream) {
  LaunchNext(PrepareKernel, blocks, kThreads, 0, stream, table, step);
}

}  // namespace cuda
}  // namespace sinkhorn
