// What the transport kernels share: a resident problem as the device sees it, the state of its solves, and how a block
// finds its work.
//
// A job is a resident problem: `count` members of one shape. Each member is solved by one engine (OT(a, b)), debiased
// ones by three (also OT(a, a) and OT(b, b)), all at once. Side 0 of an engine has the rows, side 1 the columns.
//
// Potentials phi are kept in double, in units of the cost, without the part that the points' centring and norms absorb:
//   f_i = phi_i + shift_i;  P_ij = 2^(z_ij + phi_i s + phi_j s + log2 a_i + log2 b_j),  s = log2(e) / epsilon.
// z_ij is a member's exponent without the terms of row and column, in one of three arithmetics:
//   kFloat   STRICT: float32; clouds 2 kappa s <x_i, y_j>, centred; dense -C_ij s.
//   kMixed   STRICT where the cost spans too many epsilons for that: z in float64, 2^z in float32.
//   kDouble  DOUBLE: float64; clouds -kappa s |x_i - y_j|^2, which does not cancel for clusters far apart.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_TYPES_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_TYPES_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/problem.h"

namespace sinkhorn {
namespace cuda {

constexpr int kThreads = 256;   // Of every block here, unless a kernel says otherwise.
constexpr int kMostWarps = 32;  // Of any block.
constexpr int kTile = 64;       // Rows of a block; columns of a step.
constexpr int kSplitBlocks =
    264;  // Blocks that a pass over one engine should have at least: two for each SM of an H200.
constexpr double kLog2E = 1.4426950408889634074;
constexpr double kVoid = -1e30;            // The log2 of no mass.
constexpr double kFloatExponentMax = 400;  // Cost over epsilon up to which float32 exponents serve STRICT.
constexpr double kCloudExponentMax =
    4000;  // The same for clouds whose products are, by a sample, far below their bound.
constexpr double kFloatExponentError = 4e-8;  // Of a density, for each unit of cost over epsilon.

enum Mode : int { kFloat = 0, kMixed = 1, kDouble = 2 };

// What a pass over an engine's rows (or columns) is for.
enum class Pass : int {
  kIterate,  // A half step.
  kMeasure,  // The sums of P at the final potentials.
  kBound,    // Sums of the plan as the primal bound rounds it, in double: side 0, side 1, side 0.
};

// Where things lie in a member's part of the workspace, in bytes from its start.
struct Layout {
  int64_t state;             // EngineState[engines]
  int64_t arrivals;          // unsigned[engines][arrival_stride]: one per row block, then one of the engine
  int64_t arrival_stride;    // unsigneds
  int64_t mass[2];           // double[n]
  int64_t log_mass[2];       // double[n], kVoid where there is none
  int64_t linear[2];         // double[n]: the shift's part that is linear in the point; engine 0 only
  int64_t norm2[2];          // double[n]: kappa |x|^2, centred
  int64_t centre[2];         // double[dim]
  int64_t points64[2];       // double[n, dim], centred
  int64_t points32[2];       // float[n, dim], centred (not for DOUBLE)
  int64_t halves[2];         // The same, scaled, as sums of halves: transport_cloud.cuh (not for DOUBLE)
  int64_t phi[3][2][2];      // [engine][parity][side]: double[size]
  int64_t ratio[3][2];       // [engine][side]: double[size], marginal / mass
  int64_t partial[3];        // [engine]: double[splits, rows], log2 sums
  int64_t stream_partial;    // float[StreamSlabs, m]; jobs that may be streamed
  int64_t stats[3][2];       // [engine][side]: BlockStats[row blocks]
  int64_t anderson;          // AndersonState; jobs that are accelerated
  int64_t anderson_vectors;  // double[2 + 2 kAndersonWindow, m]
  int64_t chunk_stats;       // ChunkStats of the preparation
  int64_t chunk_sums[2];     // double[chunks, 3, dim]: sums, minima, maxima of coordinates
  int64_t linear_value;      // double[row blocks]: sum P z of a row block
  int64_t bound_psi[2], bound_log_weight[2], bound_lack[2], bound_partial, bound_stats;
  int64_t bytes;  // Of a member.
};

// One resident problem. Passed by address in device memory; plain data.
struct Job {
  int64_t count;
  int32_t size[2];  // n, m
  int32_t dim;
  int32_t engines;  // 1 or 3
  bool dense, symmetric, starting, relaxing, wants_bound;
  bool hopper;                // Kernels for it are there.
  bool wide_clusters;         // Clusters of kOnChipRanksMost blocks can be had.
  bool streamed;              // transport_stream.cu, in float32.
  int8_t cloud_splits[3][2];  // [engine][side], for Geometry::kCloud
  Precision precision;
  TransportInputs in;
  SolverOptions solver;
  Outputs out;
  char* workspace;
  Layout at;
};

// Partial results of one row block.
struct BlockStats {
  double error;      // sum mass |ratio - target|
  double dual;       // sum mass f, or its relaxed form
  double plan_mass;  // sum mass ratio
  double largest;    // |phi s|
  double terms;      // sum |mass f|
  double finite;     // 1 if all potentials are
};

// Of a chunk of points or costs, from the preparation.
struct ChunkStats {
  double low, high;  // Costs; points: the largest norm^2 in `high`.
  double mass;
};

// Automatic over-relaxation: kernels/cpu/relaxation.h says what it does and why.
struct RelaxationState {
  double weight, ceiling, log_sum, previous_mean;
  int32_t count, settled, plain, skipped;
};

// Anderson acceleration: kernels/cpu/anderson.h says what it does and why.
constexpr int kAndersonWindow = 8;
struct AndersonState {
  int32_t active, fresh, count, iterations, restarts, skipped;
  double trial, least;
  double gram[kAndersonWindow][kAndersonWindow];
};

struct EngineState {
  double epsilon;                // Of the iteration in progress.
  double relax, previous_relax;  // Of the iteration in progress and of the one before.
  RelaxationState relaxation;
  double error[2];
  double best_error;
  double total_mass[2];
  double cost_max;
  double point_scale;  // Of the points as halves: a power of two.
  int32_t best_iteration;
  int32_t iterations;
  int32_t parity;    // Which phi are the present ones.
  int32_t starting;  // Symmetric: the half steps from zero, not yet an iteration.
  int32_t fresh;     // Epsilon has just changed: residuals tell nothing yet.
  int32_t stopped;
  int32_t unsafe;       // Streamed jobs: this iteration needs maxima.
  int32_t bad;          // A sum of the pass under way was not safe.
  int32_t anderson;     // Columns are extrapolated as long as that pays; over-relaxation takes over then.
  int32_t extrapolate;  // These columns are to be.
  int32_t reason;       // StopReason
  int32_t mode;         // Mode
  int32_t converged;
  int32_t finite;
};

// What the host reads of a job after each slice.
struct JobReport {
  int32_t running;  // Engines that still iterate.
  int32_t modes;    // 1 << Mode, over all engines.
  int32_t iterations;
  int32_t converged;
  int32_t reason;
  int32_t least_iterations;
  double error[2];
  int64_t diverged;  // The first member that is not finite, or -1.
  int32_t diverged_iterations;
};

// A launch over several jobs: block b belongs to job k with first_block[k] <= b < first_block[k + 1].
struct LaunchTable {
  const Job* jobs;
  const int64_t* first_block;  // [job_count + 1]
  int32_t job_count;
};

// ---- Shapes (host and device) -------------------------------------------------------------------------------------

__host__ __device__ inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Which of x (0) and y (1) stands on a side of an engine's problem.
__host__ __device__ inline int MeasureOf(int engine, int side) { return engine == 0 ? side : engine - 1; }
__host__ __device__ inline int EngineSize(const Job& job, int engine, int side) {
  return job.size[MeasureOf(engine, side)];
}

// Clouds as halves: tiles of points, for each part of kDepth coordinates a plane for each half.
constexpr int kCloudRows = 256;  // Of a block.
constexpr int kCloudTile = 128;  // Columns of a step, and points of a tile in memory.
constexpr int kDepth = 64;       // Coordinates of a step.
__host__ __device__ inline int PlanesOf(const Job& job) { return job.precision == Precision::kFast ? 1 : 2; }
__host__ __device__ inline int CloudDepths(int dim) { return (dim + kDepth - 1) / kDepth; }
__host__ __device__ inline int CloudRowBytes(int dim) { return dim <= 16 ? 32 : dim <= 32 ? 64 : 128; }
__host__ __device__ inline int64_t PaddedPoints(int64_t points) {
  return (points + kCloudRows - 1) / kCloudRows * kCloudRows;
}
__host__ __device__ inline int64_t HalvesBytes(const Job& job, int side) {
  return PaddedPoints(job.size[side]) * CloudDepths(job.dim) * PlanesOf(job) * CloudRowBytes(job.dim);
}

// How a pass is cut into blocks: by the kernel, and by the shape alone.
enum class Geometry : int {
  kPlain,   // kTile rows against kTile columns a step.
  kCloud,   // kCloudRows rows against kCloudTile columns a step: clouds in float32.
  kOnChip,  // All in one block or cluster.
  kStream,  // Slabs of rows, and blocks of columns.
};
constexpr int kOnChipChunk = 256;  // Iterations after which densities are made anew.
// How a problem lies on the chip: `ranks` blocks of `rows` rows and all columns, of which there is room for `tiles`
// times kTile; each block looks after the potentials of `owned` of them. No tiles: it is not solved there. Plain
// alternating updates at a fixed epsilon are. More than one block take a cluster.
struct OnChipShape {
  int tiles, ranks, rows, owned;
};
constexpr int kOnChipTilesMost = 16, kOnChipRanksMost = 16;
__host__ __device__ inline OnChipShape OnChipShapeOf(const Job& job) {
  const int rows = job.size[0], columns = job.size[1];
  if (job.engines > 1 || job.symmetric || job.solver.epsilon_decay != 0 || job.precision == Precision::kDouble) {
    return {0, 0, 0, 0};
  }
  for (int tiles = 1; tiles <= 2; tiles *= 2) {
    if (rows <= tiles * kTile && columns <= tiles * kTile) return {tiles, 1, tiles * kTile, tiles * kTile};
  }
  if (!job.hopper) return {0, 0, 0, 0};
  if (rows <= 4 * kTile && columns <= 4 * kTile) return {4, 2, 2 * kTile, 2 * kTile};
  for (int tiles = 8; tiles <= (job.wide_clusters ? kOnChipTilesMost : 8); tiles *= 2) {
    for (int ranks = 4; ranks <= (job.wide_clusters ? kOnChipRanksMost : 8); ranks *= 2) {
      if (rows <= ranks * kTile && columns <= tiles * kTile) return {tiles, ranks, kTile, tiles * kTile / ranks};
    }
  }
  return {0, 0, 0, 0};
}
__host__ __device__ inline int OnChipTiles(const Job& job) { return OnChipShapeOf(job).tiles; }
// Jobs whose columns are extrapolated, where they are not solved on the chip.
__host__ __device__ inline bool IsAccelerated(const Job& job) { return job.relaxing; }
// Jobs that may be streamed: long enough to fill a device with slabs, rows that fit a block.
constexpr int kStreamColumnsMost = 16384;
__host__ __device__ inline bool MayStream(const Job& job) {
  return job.dense && !job.symmetric && job.engines == 1 && job.precision != Precision::kDouble &&
         job.in.cost.dtype == DType::kFloat32 && job.size[1] % 4 == 0 && job.size[1] <= kStreamColumnsMost &&
         int64_t{job.size[0]} * job.size[1] >= (1 << 21);
}
__host__ __device__ inline int StreamRows(const Job& job) {  // Of a slab.
  const int rows = (job.size[0] + 131) / 132;
  return rows > 16 ? rows : 16;
}
__host__ __device__ inline int StreamSlabs(const Job& job) {
  return (job.size[0] + StreamRows(job) - 1) / StreamRows(job);
}
// Whether transport_gradient.cu makes gradients and projections, rather than transport_apply.cu.
__host__ __device__ inline bool HasGradientKernel(const Job& job, int mode) {
  return job.hopper && !job.dense && mode == kFloat;
}
__host__ __device__ inline int RowsOf(const Job& job, int side, Geometry geometry) {
  switch (geometry) {
    case Geometry::kCloud:
      return kCloudRows;
    case Geometry::kOnChip: {
      const OnChipShape shape = OnChipShapeOf(job);
      return side == 0 ? shape.rows : shape.owned;
    }
    case Geometry::kStream:
      return side == 0 ? StreamRows(job) : kThreads;
    default:
      return kTile;
  }
}
__host__ __device__ inline Geometry GeometryOf(const Job& job, int mode) {
  if (mode != kFloat) return Geometry::kPlain;
  return OnChipTiles(job) > 0 ? Geometry::kOnChip : job.dense ? Geometry::kPlain : Geometry::kCloud;
}
__host__ __device__ inline int RowBlocks(const Job& job, int engine, int side, Geometry geometry = Geometry::kPlain) {
  const int rows = RowsOf(job, side, geometry);
  return (EngineSize(job, engine, side) + rows - 1) / rows;
}
// Parts that the columns of a pass are cut into.
__host__ __device__ inline int Splits(const Job& job, int engine, int side, Geometry geometry = Geometry::kPlain) {
  if (geometry == Geometry::kOnChip) return 1;
  if (geometry == Geometry::kCloud) return job.cloud_splits[engine][side];
  const int64_t tiles = CeilDiv(EngineSize(job, engine, 1 - side), kTile);
  const int64_t blocks = RowBlocks(job, engine, side, geometry);
  const int64_t wave = kSplitBlocks / blocks, most = tiles / 4;
  const int64_t splits = wave < most ? wave : most;
  return static_cast<int>(splits > 1 ? splits : 1);
}
__host__ __device__ inline int64_t EngineBlocks(const Job& job, int engine, int side, Geometry geometry) {
  return int64_t{1} * RowBlocks(job, engine, side, geometry) * Splits(job, engine, side, geometry);
}
__host__ __device__ inline int64_t PassBlocks(const Job& job, int side, Geometry geometry) {  // Of one member.
  int64_t blocks = 0;
  for (int e = 0; e < job.engines; ++e) blocks += EngineBlocks(job, e, side, geometry);
  return blocks;
}
__host__ __device__ inline double RhoOf(const Job& job, int engine, int side) {
  return MeasureOf(engine, side) == 0 ? job.solver.rho_a : job.solver.rho_b;
}
__host__ __device__ inline bool IsSymmetric(const Job& job, int engine) { return engine > 0 || job.symmetric; }

// ---- Addresses ----------------------------------------------------------------------------------------------------

// A member's workspace.
struct Member {
  const Job& job;
  int64_t index;

  template <typename T>
  __device__ T* At(int64_t offset) const {
    return reinterpret_cast<T*>(job.workspace + index * job.at.bytes + offset);
  }
  __device__ EngineState* state(int engine) const { return At<EngineState>(job.at.state) + engine; }
  __device__ AndersonState* anderson() const { return At<AndersonState>(job.at.anderson); }
  __device__ double* mass(int side) const { return At<double>(job.at.mass[side]); }
  __device__ double* log_mass(int side) const { return At<double>(job.at.log_mass[side]); }
  __device__ double* phi(int engine, int parity, int side) const {
    return At<double>(job.at.phi[engine][parity][side]);
  }
  __device__ double* ratio(int engine, int side) const { return At<double>(job.at.ratio[engine][side]); }
  __device__ BlockStats* stats(int engine, int side) const { return At<BlockStats>(job.at.stats[engine][side]); }

  // What is added to phi to get the potential: `distance` says whether z holds whole distances or products.
  __device__ double Shift(int engine, int side, int i, bool distance) const {
    if (job.dense) return 0;
    const int measure = MeasureOf(engine, side);
    const double linear = engine == 0 ? At<double>(job.at.linear[side])[i] : 0;
    return distance ? linear : linear + At<double>(job.at.norm2[measure])[i];
  }
  __device__ double Shift(int engine, int side, int i) const {
    return Shift(engine, side, i, job.precision == Precision::kDouble);
  }
};

// False where a slice enqueued the end of what turned out to need more.
__device__ inline bool IsSolved(const Member& member) {
  for (int e = 0; e < member.job.engines; ++e) {
    if (!member.state(e)->stopped) return false;
  }
  return true;
}

__device__ inline double LoadDouble(DType dtype, const void* data, int64_t i) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(data)[i];
    case DType::kFloat64:
      return static_cast<const double*>(data)[i];
    case DType::kFloat16:
      return __half2float(static_cast<const __half*>(data)[i]);
    case DType::kBFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
  }
  return 0;
}
// The same to float: what is no double needs no double.
__device__ inline float LoadFloat(DType dtype, const void* data, int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[i];
  return static_cast<float>(LoadDouble(dtype, data, i));
}
template <typename T>
__device__ inline T LoadAs(DType dtype, const void* data, int64_t i) {
  if constexpr (sizeof(T) == sizeof(float)) return LoadFloat(dtype, data, i);
  return static_cast<T>(LoadDouble(dtype, data, i));
}
// Element i of a member's tensor of `size` elements.
__device__ inline double LoadInput(const TensorView& view, int64_t member, int64_t size, int64_t i) {
  return LoadDouble(view.dtype, view.data, (view.shared ? 0 : member * size) + i);
}
__device__ inline void StoreOutput(const OutputView& view, int64_t i, double value) {
  switch (view.dtype) {
    case DType::kFloat32:
      static_cast<float*>(view.data)[i] = static_cast<float>(value);
      return;
    case DType::kFloat64:
      static_cast<double*>(view.data)[i] = value;
      return;
    case DType::kFloat16:
      static_cast<__half*>(view.data)[i] = __double2half(value);
      return;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(view.data)[i] = __double2bfloat16(value);
      return;
  }
}

// Points of a chunk of the preparation's sums.
__host__ __device__ inline int ChunkPoints(int64_t points) { return points <= 16384 ? 64 : 512; }

// ---- Blocks and their work ----------------------------------------------------------------------------------------

// A copy of a job in shared memory, which everything reads again and again. Barriers inside; all threads of a block
// call it, once.
__device__ inline const Job& CopyJob(const Job& job) {
  __shared__ alignas(16) uint64_t words[sizeof(Job) / sizeof(uint64_t)];
  static_assert(sizeof(Job) % sizeof(uint64_t) == 0, "Job");
  const auto* from = reinterpret_cast<const uint64_t*>(&job);
  for (int k = threadIdx.x; k < static_cast<int>(sizeof(Job) / sizeof(uint64_t)); k += blockDim.x) words[k] = from[k];
  __syncthreads();
  return *reinterpret_cast<const Job*>(words);
}

// The job of this block and the block's number within it. Barriers inside.
struct BlockWork {
  int job;
  int64_t block;
};
__device__ inline BlockWork FindWork(const LaunchTable& table, int64_t block) {
  __shared__ BlockWork found;
  for (int k = threadIdx.x; k < table.job_count; k += blockDim.x) {
    const int64_t first = table.first_block[k];
    if (first <= block && block < table.first_block[k + 1]) found = {k, block - first};
  }
  __syncthreads();
  return found;
}

// Adds up one value of each thread, always in the same order; every thread gets the sum. `scratch`: a double for each
// warp.
template <typename Combine>
__device__ inline double BlockReduce(double value, double* scratch, Combine combine) {
  for (int lane = 16; lane > 0; lane /= 2) value = combine(value, __shfl_xor_sync(0xffffffffu, value, lane));
  __syncthreads();  // What is there has been read.
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  value = scratch[0];
  for (int warp = 1; warp < static_cast<int>(blockDim.x) / 32; ++warp) value = combine(value, scratch[warp]);
  return value;
}
__device__ inline double BlockSum(double value, double* scratch) {
  return BlockReduce(value, scratch, [](double a, double b) { return a + b; });
}
__device__ inline double BlockMax(double value, double* scratch) {
  return BlockReduce(value, scratch, [](double a, double b) { return fmax(a, b); });
}

// Counts the arrivals of `expected` blocks at a counter that is 0 before and after; true in the last one, which then
// sees what the others wrote before. All threads of a block call it.
__device__ inline bool LastToArrive(unsigned* counter, unsigned expected) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(counter, 1u) + 1 == expected;
    if (last) *counter = 0;
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_TYPES_CUH_
