// Inputs to the workspace: points centred on their own mean, masses and their logarithms, first potentials, and from
// the data's ranges the arithmetic that each member needs.
//
// Step 0  cosines: points on the unit sphere
// Step 1  sums and ranges of chunks of points, ranges of chunks of costs
// Step 2  centres and boxes of the clouds
// Step 3  points, norms, masses, potentials
// Step 4  states
// Step 5  points as sums of two halves
//
// Shifts of points x + c and y + e, x and y centred. What depends on one side alone goes into its own:
//   kappa |x + d - y|^2 = kappa (|x|^2 + |y|^2 + 2 <x, d> - 2 <y, d> + |d|^2) - 2 kappa <x, y>,  d = c - e;
//   -<x + c, y + e>     = -<x, e> - <y, c> - <c, e> - <x, y>.
//
// FAST rounds centred coordinates to 11 bits once, before anything is made of them, so that norms and products agree:
// its answers are exact for clouds displaced by the rounding.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_cloud.cuh"
#include "kernels/cuda/transport_hopper.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_prepare_states.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

// Step 0: one warp a point. The largest coordinate is taken out first: no square over- or underflows.
__device__ void NormalizePoints(const Member& member, int side, int block) {
  const Job& job = member.job;
  const TensorView& view = side == 0 ? job.in.x : job.in.y;
  const int dim = job.dim, count = job.size[side], first = block * kBlockPoints, lane = threadIdx.x % 32;
  for (int i = first + static_cast<int>(threadIdx.x) / 32; i < min(count, first + kBlockPoints); i += kWarps) {
    double* out = member.At<double>(job.at.points64[side]) + int64_t{i} * dim;
    double largest = 0, norm2 = 0;
    for (int k = lane; k < dim; k += 32) {
      out[k] = LoadInput(view, member.index, int64_t{count} * dim, int64_t{i} * dim + k);
      largest = fmax(largest, fabs(out[k]));
    }
    for (int other = 16; other > 0; other /= 2) largest = fmax(largest, __shfl_xor_sync(0xffffffffu, largest, other));
    if (!(largest > 0)) largest = 1;
    for (int k = lane; k < dim; k += 32) {
      out[k] /= largest;
      norm2 += out[k] * out[k];
    }
    for (int other = 16; other > 0; other /= 2) norm2 += __shfl_xor_sync(0xffffffffu, norm2, other);
    const double norm = norm2 > 0 ? sqrt(norm2) : 1;
    for (int k = lane; k < dim; k += 32) out[k] /= norm;
    if (lane == 0) member.At<double>(job.at.length[side])[i] = largest * norm;
  }
}

// A cloud before it is centred: as given, or where step 0 left it.
template <bool kSquares>
__device__ const TensorView& PointsOf(const Member& member, int side, TensorView* sphere) {
  const Job& job = member.job;
  if (kSquares || !IsCosine(job)) return side == 0 ? job.in.x : job.in.y;
  *sphere = {DType::kFloat64, member.At<double>(job.at.points64[side]), /*shared=*/true};
  return *sphere;
}

// Step 1, points: thread t adds up coordinate t % dim (or t, t + kThreads ...) of every rows-th row.
template <bool kSquares>
__device__ void SumChunk(const Member& member, int side, int chunk) {
  const Job& job = member.job;
  __shared__ double scratch[3][kThreads];
  TensorView sphere;
  const TensorView& view = PointsOf<kSquares>(member, side, &sphere);
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

// Step 2, unless one chunk has all: the chunks' sums to the centre; their ranges to those of the cloud, in place of the
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

// <u, v>, by a warp; every lane gets it.
__device__ double WarpDot(const double* u, const double* v, int dim) {
  double sum = 0;
  for (int k = threadIdx.x % 32; k < dim; k += 32) sum += u[k] * v[k];
  for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
  return sum;
}

// Step 3: one warp a point.
template <bool kSquares>
__device__ void CentrePoint(const Member& member, int side, int i, double* radius2) {
  const Job& job = member.job;
  TensorView sphere;
  const TensorView& view = PointsOf<kSquares>(member, side, &sphere);
  const int dim = job.dim, count = job.size[side];
  const bool together = !kSquares && SourceOf(job) == Source::kDistances;
  const double* centre = member.At<double>(job.at.centre[side]);
  const double* theirs = member.At<double>(job.at.centre[1 - side]);
  double* points64 = member.At<double>(job.at.points64[side]) + int64_t{i} * dim;
  float* points32 = member.At<float>(job.at.points32[side]) + int64_t{i} * dim;
  double norm2 = 0, along = 0, apart2 = 0;
  for (int k = threadIdx.x % 32; k < dim; k += 32) {
    const double apart = side == 0 ? centre[k] - theirs[k] : theirs[k] - centre[k];
    double value = LoadInput(view, member.index, int64_t{count} * dim, int64_t{i} * dim + k);
    value -= together ? (centre[k] + theirs[k]) / 2 : centre[k];
    if (job.precision == Precision::kFast && !together) value = RoundedTo11Bits(value);
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
  double linear = job.in.kappa * (side == 0 ? 2 * along + apart2 : -2 * along), square = job.in.kappa * norm2;
  if (together) linear = square = 0;
  if (together && threadIdx.x % 32 == 0 && job.halves) member.At<double>(job.at.length[side])[i] = norm2;
  if (!kSquares && IsNegativeDot(job)) {  // Whole distances have too much.
    linear = -square - WarpDot(points64, theirs, dim) - (side == 0 ? WarpDot(centre, theirs, dim) : 0);
    if (job.engines > 1) {
      member.At<double>(job.at.self_linear[side])[i] =
          -square - WarpDot(points64, centre, dim) - WarpDot(centre, centre, dim) / 2;
    }
  }
  if (threadIdx.x % 32 != 0) return;
  member.At<double>(job.at.linear[side])[i] = linear;
  member.At<double>(job.at.norm2[side])[i] = square;
}

template <bool kSquares>
__device__ void PreparePoints(const Member& member, int side, int block) {
  const Job& job = member.job;
  __shared__ double scratch[kMostWarps];
  const int count = job.size[side], first = block * kBlockPoints, last = min(count, first + kBlockPoints);
  double high = 0, total = 0;
  if (!job.dense) {
    for (int i = first + static_cast<int>(threadIdx.x) / 32; i < last; i += kWarps) {
      double radius2;
      CentrePoint<kSquares>(member, side, i, &radius2);
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

// Step 5: x scale = high + low + what is below 2^-22 of it; FAST has no low. A thread makes chunks of 8 coordinates.
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

// kSquares: of jobs that IsSquared alone.
template <bool kSquares>
__global__ void __launch_bounds__(kThreads) PrepareKernel(LaunchTable table, int step) {
  AllowNextKernel();
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  AwaitKernelBefore();
  if (step == kStatesStep) return PrepareStates<kSquares>(Member{job, work.block});
  if (step == kCentresStep) {
    const int64_t of_side = CeilDiv(job.dim, kCentreLanes), rest = work.block % (2 * of_side);
    return CentreOf(Member{job, work.block / (2 * of_side)}, rest < of_side ? 0 : 1, static_cast<int>(rest % of_side));
  }
  const bool costs = step == kRangesStep && job.dense;
  int chunks[2];
  for (int side = 0; side < 2; ++side) {
    chunks[side] = step == kRangesStep   ? PointChunks(job, side)
                   : step == kHalvesStep ? SplitBlocks(job, side)
                                         : PointBlocks(job, side);
  }
  const int64_t of_member = costs ? CostChunks(job) : chunks[0] + chunks[1];
  const Member member{job, work.block / of_member};
  const int64_t rest = work.block % of_member;
  if (costs) return RangeOfCosts(member, rest);
  const int side = rest < chunks[0] ? 0 : 1, chunk = static_cast<int>(side == 0 ? rest : rest - chunks[0]);
  switch (step) {
    case kSphereStep:
      if constexpr (!kSquares) NormalizePoints(member, side, chunk);
      return;
    case kRangesStep:
      return SumChunk<kSquares>(member, side, chunk);
    case kPointsStep:
      return PreparePoints<kSquares>(member, side, chunk);
    default:
      return SplitPoints(member, side, chunk);
  }
}

}  // namespace

int64_t PrepareBlocks(const Job& job, int step) {
  switch (step) {
    case kSphereStep:
      return IsCosine(job) ? PointBlocks(job, 0) + PointBlocks(job, 1) : 0;
    case kRangesStep:
      return job.dense ? CostChunks(job) : PointChunks(job, 0) + PointChunks(job, 1);
    case kCentresStep:
      return job.dense || PointChunks(job, 0) * PointChunks(job, 1) == 1 ? 0 : 2 * CeilDiv(job.dim, kCentreLanes);
    case kPointsStep:
      return PointBlocks(job, 0) + PointBlocks(job, 1);
    case kStatesStep:
      return 1;
    default:
      return job.halves ? SplitBlocks(job, 0) + SplitBlocks(job, 1) : 0;
  }
}

void LaunchPrepare(const LaunchTable& table, int64_t blocks, bool squares, int step, cudaStream_t stream) {
  LaunchNext(squares ? PrepareKernel<true> : PrepareKernel<false>, blocks, kThreads, 0, stream, table, step);
}

}  // namespace cuda
}  // namespace sinkhorn
