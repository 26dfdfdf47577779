// Half steps f_i = -epsilon LSE_j[log b_j + (g_j - C_ij) / epsilon] and the sums of the plan, for every problem and every
// arithmetic: tiles of exponents under a running maximum.
//
// A block has kTile rows of one engine and a part of its columns. The last block of a row block combines the parts and
// moves the potentials; the last of an engine decides how it goes on.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_control.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_tile.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

// Stands for max + log2(sum).
template <typename TE, typename T>
struct LogSum {
  TE max = static_cast<TE>(kVoid);
  T sum = 0;
  __device__ void Add(const TE (&e)[4]) {
    const TE largest = fmax(fmax(e[0], e[1]), fmax(e[2], e[3]));
    if (largest > max) {
      sum *= Exp2(static_cast<T>(max - largest));
      max = largest;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) sum += Exp2(static_cast<T>(e[k] - max));
  }
};

// What a block works on.
struct RowBlock {
  int64_t member;
  int engine, block, split, splits;
};
__device__ RowBlock FindRowBlock(const Job& job, int64_t index, int side, int engines) {
  int64_t of_member = 0;
  for (int e = 0; e < engines; ++e) of_member += int64_t{1} * RowBlocks(job, e, side) * Splits(job, e, side);
  RowBlock found;
  found.member = index / of_member;
  int64_t rest = index % of_member;
  for (found.engine = 0; found.engine < engines - 1; ++found.engine) {
    const int64_t blocks = int64_t{1} * RowBlocks(job, found.engine, side) * Splits(job, found.engine, side);
    if (rest < blocks) break;
    rest -= blocks;
  }
  found.splits = Splits(job, found.engine, side);
  found.block = static_cast<int>(rest / found.splits);
  found.split = static_cast<int>(rest % found.splits);
  return found;
}

// Where a pass finds potentials and weights, by side.
struct PassView {
  const double* phi[2];
  const double* log_weight[2];
};
__device__ PassView ViewOf(const Member& member, int engine, int side, Pass pass) {
  const Job& job = member.job;
  PassView view;
  const int parity = member.state(engine)->parity;
  for (int s = 0; s < 2; ++s) {
    if (pass == Pass::kBound) {
      view.phi[s] = member.At<double>(job.at.bound_psi[s]);
      view.log_weight[s] = member.At<double>(job.at.bound_log_weight[s]);
      continue;
    }
    // Alternating: columns see the new rows.
    const bool is_new = pass == Pass::kIterate && side == 1 && s == 0 && !IsSymmetric(job, engine);
    view.phi[s] = member.phi(engine, is_new ? parity ^ 1 : parity, s);
    view.log_weight[s] = member.log_mass(MeasureOf(engine, s));
  }
  return view;
}

// log2 sum over this block's columns for row threadIdx.x < kTile.
template <bool kDense, int kMode>
__device__ double SumTiles(const TileContext& c, const PassView& view, int row0, int first_tile, int last_tile) {
  using TE = ExponentOf<kMode>;
  using T = DensityOf<kMode>;
  __shared__ TileMemory<kDense, kMode> memory;
  __shared__ TE terms[kTile];
  __shared__ TE maxima[16][kTile + 1];
  __shared__ T sums[16][kTile + 1];
  const double* phi = view.phi[1 - c.side];
  const double* log_weight = view.log_weight[1 - c.side];
  const double reference = phi[0];
  LogSum<TE, T> rows[4];
  for (int tile = first_tile; tile < last_tile; ++tile) {
    const int col0 = tile * kTile;
    __syncthreads();  // The terms before have been read.
    if (threadIdx.x < kTile) {
      const int j = col0 + threadIdx.x;
      terms[threadIdx.x] = static_cast<TE>(j < c.columns ? Term(phi, log_weight, reference, c.scale, j) : kVoid);
    }
    __syncthreads();
    TE z[4][4];
    MakeTile<kDense, kMode>(c, row0, col0, &memory, z);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int k = 0; k < 4; ++k) z[r][k] += terms[4 * c.col_lane + k];
      rows[r].Add(z[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    maxima[c.col_lane][4 * c.row_lane + r] = rows[r].max;
    sums[c.col_lane][4 * c.row_lane + r] = rows[r].sum;
  }
  __syncthreads();
  if (threadIdx.x >= kTile) return 0;
  double max = kVoid, sum = 0;
  for (int k = 0; k < 16; ++k) max = fmax(max, static_cast<double>(maxima[k][threadIdx.x]));
  for (int k = 0; k < 16; ++k) sum += sums[k][threadIdx.x] * exp2(maxima[k][threadIdx.x] - max);
  return max + log2(sum) + reference * c.scale;
}

// The parts' log2 sums to that of the row.
__device__ double CombineParts(const double* parts, int splits, int64_t stride) {
  double max = kVoid, sum = 0;
  for (int k = 0; k < splits; ++k) max = fmax(max, __ldcg(parts + k * stride));
  for (int k = 0; k < splits; ++k) sum += exp2(__ldcg(parts + k * stride) - max);
  return max + log2(sum);
}

// ---- What becomes of a row's sum ----------------------------------------------------------------------------------

__device__ void IterateRow(const Member& member, const RowBlock& b, int side, int i, double lse, double scale,
                           BlockStats* stats) {
  const Job& job = member.job;
  const EngineState& state = *member.state(b.engine);
  const double old = member.phi(b.engine, state.parity, side)[i];
  const double shift = member.Shift(b.engine, side, i), rho = RhoOf(job, b.engine, side);
  const double mass = member.mass(MeasureOf(b.engine, side))[i];
  member.phi(b.engine, state.parity ^ 1, side)[i] = HalfStep(old, lse, scale, shift, state.epsilon, rho, state.relax);
  if (mass > 0) stats->error = mass * fabs(exp2(fma(old, scale, lse)) - TargetRatio(old + shift, rho));
}

__device__ void MeasureRow(const Member& member, const RowBlock& b, int side, int i, double lse, double scale,
                           BlockStats* stats) {
  const EngineState& state = *member.state(b.engine);
  const int measure = MeasureOf(b.engine, side);
  const double phi = member.phi(b.engine, state.parity, side)[i], rho = RhoOf(member.job, b.engine, side);
  const double f = phi + member.Shift(b.engine, side, i), mass = member.mass(measure)[i];
  const double ratio = exp2(fmin(fma(phi, scale, lse), 1000.0));  // Saturates: annealing may have been cut short.
  member.ratio(b.engine, side)[i] = ratio;
  stats->finite = isfinite(f) ? 1 : 0;
  if (!(mass > 0)) return;
  stats->error = mass * fabs(ratio - TargetRatio(f, rho));
  stats->dual = mass * (isinf(rho) ? f : -rho * expm1(-f / rho));
  stats->plan_mass = mass * ratio;
  const double reference = member.phi(b.engine, state.parity, 1)[0];
  stats->largest = fabs((side == 0 ? phi + reference : phi - reference) * scale) + fabs(member.log_mass(measure)[i]);
  stats->terms = fabs(mass * f);
  if (!isfinite(stats->dual)) stats->finite = 0;
}

// Steps 0 and 1 shrink rows, then columns, that are above their marginal; steps 1 and 2 tell what is missing.
__device__ void BoundRow(const Member& member, int side, int step, int i, double lse, double scale, BlockStats* stats) {
  const Job& job = member.job;
  double* log_weight = member.At<double>(job.at.bound_log_weight[side]);
  const double mass = member.mass(side)[i];
  const double sum = mass > 0 ? exp2(fma(member.At<double>(job.at.bound_psi[side])[i], scale, log_weight[i]) + lse) : 0;
  if (step < 2 && sum > mass) log_weight[i] += log2(mass / sum);
  if (step == 0) return;
  const double lack = fmax(0.0, step == 1 ? mass - fmin(sum, mass) : mass - sum);
  member.At<double>(job.at.bound_lack[side])[i] = lack;
  stats->error = lack;
}

// Adds up the block's statistics (thread by thread in the same order) into `out`.
__device__ void StoreStats(const BlockStats& own, bool whole, BlockStats* out) {
  __shared__ double scratch[kThreads];
  BlockStats sum;
  sum.error = BlockSum(own.error, scratch);
  if (whole) {
    sum.dual = BlockSum(own.dual, scratch);
    sum.plan_mass = BlockSum(own.plan_mass, scratch);
    sum.largest = BlockMax(own.largest, scratch);
    sum.terms = BlockSum(own.terms, scratch);
    sum.finite = -BlockMax(-own.finite, scratch);
  }
  if (threadIdx.x == 0) *out = sum;
}

// The sums of all row blocks' errors, and whether potentials are finite.
__device__ void EndPass(const Member& member, const RowBlock& b, int side, Pass pass) {
  __shared__ double scratch[kThreads];
  const Job& job = member.job;
  const BlockStats* stats = member.stats(b.engine, side);
  double error = 0, finite = 1;
  for (int k = threadIdx.x; k < RowBlocks(job, b.engine, side); k += kThreads) {
    error += __ldcg(&stats[k].error);
    if (pass == Pass::kMeasure) finite = fmin(finite, __ldcg(&stats[k].finite));
  }
  error = BlockSum(error, scratch);
  finite = -BlockMax(-finite, scratch);
  if (threadIdx.x != 0) return;
  EngineState* state = member.state(b.engine);
  if (pass == Pass::kIterate) {
    return side == 0 ? EndRows(job, b.engine, state, error) : EndColumns(job, b.engine, state, error);
  }
  state->error[side] = error;
  state->finite = (side == 0 || state->finite) && finite > 0;
  if (side == 1) state->converged = fmax(state->error[0], state->error[1]) <= job.solver.tolerance;
}

template <bool kDense, int kMode>
__global__ void __launch_bounds__(kThreads, 2) HalfStepKernel(LaunchTable table, int side, Pass pass, int step) {
  // 1. Whose rows.
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = table.jobs[work.job];
  const RowBlock b = FindRowBlock(job, work.block, side, pass == Pass::kBound ? 1 : job.engines);
  const Member member{job, b.member};
  const EngineState* state = member.state(b.engine);
  if (pass != Pass::kBound && state->mode != kMode) return;
  if (pass == Pass::kIterate && state->stopped) return;

  // 2. Their sums over this block's columns, then over all.
  const TileContext c = MakeTileContext(job, b.member, b.engine, side, state->epsilon);
  const int tiles = static_cast<int>(CeilDiv(c.columns, kTile)), row0 = b.block * kTile;
  double lse = SumTiles<kDense, kMode>(c, ViewOf(member, b.engine, side, pass), row0,
                                       static_cast<int>(int64_t{tiles} * b.split / b.splits),
                                       static_cast<int>(int64_t{tiles} * (b.split + 1) / b.splits));
  const int i = row0 + threadIdx.x;
  const bool mine = threadIdx.x < kTile && i < c.rows;
  unsigned* arrivals = member.At<unsigned>(job.at.arrivals) + b.engine * job.at.arrival_stride;
  if (b.splits > 1) {
    double* parts = member.At<double>(job.at.partial[b.engine]);
    if (mine) parts[int64_t{b.split} * c.rows + i] = lse;
    if (!LastToArrive(arrivals + b.block, b.splits)) return;
    if (mine) lse = CombineParts(parts + i, b.splits, c.rows);
  }

  // 3. What follows for the rows.
  BlockStats stats = {0, 0, 0, 0, 0, 1};
  if (mine && pass == Pass::kIterate) IterateRow(member, b, side, i, lse, c.scale, &stats);
  if (mine && pass == Pass::kMeasure) MeasureRow(member, b, side, i, lse, c.scale, &stats);
  if (mine && pass == Pass::kBound) BoundRow(member, side, step, i, lse, c.scale, &stats);
  StoreStats(
      stats, pass == Pass::kMeasure,
      (pass == Pass::kBound ? member.At<BlockStats>(job.at.bound_stats) : member.stats(b.engine, side)) + b.block);

  // 4. What follows for the engine.
  if (pass == Pass::kBound) return;
  const int blocks = RowBlocks(job, b.engine, side);
  if (LastToArrive(arrivals + job.at.arrival_stride - 1, blocks)) EndPass(member, b, side, pass);
}

template <bool kDense>
void Launch(const LaunchTable& table, int64_t blocks, Mode mode, int side, Pass pass, int step, cudaStream_t stream) {
  switch (mode) {
    case kFloat:
      return LaunchKernel(HalfStepKernel<kDense, kFloat>, blocks, kThreads, 0, stream, table, side, pass, step);
    case kMixed:
      return LaunchKernel(HalfStepKernel<kDense, kMixed>, blocks, kThreads, 0, stream, table, side, pass, step);
    case kDouble:
      return LaunchKernel(HalfStepKernel<kDense, kDouble>, blocks, kThreads, 0, stream, table, side, pass, step);
  }
}

}  // namespace

void LaunchHalfStep(const LaunchTable& table, int64_t blocks, bool dense, Mode mode, int side, Pass pass, int step,
                    cudaStream_t stream) {
  return dense ? Launch<true>(table, blocks, mode, side, pass, step, stream)
               : Launch<false>(table, blocks, mode, side, pass, step, stream);
}

}  // namespace cuda
}  // namespace sinkhorn
