// Rows of a pass: which block has which, what becomes of their sums, and what follows for an engine when all are done.
// Shared by the kernels that make the sums.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_ROWS_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_ROWS_CUH_

#include "kernels/cuda/native.cuh"
#include "kernels/cuda/transport_control.cuh"
#include "kernels/cuda/transport_tile.cuh"

namespace sinkhorn {
namespace cuda {

// How a kernel cuts a pass: rows of a block, and columns of a step, parts of the columns.
struct RowBlock {
  int64_t member;
  int engine, block, split, splits;
};
__device__ inline RowBlock FindRowBlock(const Job& job, int64_t index, int side, int engines, Geometry geometry) {
  int64_t of_member = 0;
  for (int e = 0; e < engines; ++e) of_member += EngineBlocks(job, e, side, geometry);
  RowBlock found;
  found.member = index / of_member;
  int64_t rest = index % of_member;
  for (found.engine = 0; found.engine < engines - 1; ++found.engine) {
    const int64_t blocks = EngineBlocks(job, found.engine, side, geometry);
    if (rest < blocks) break;
    rest -= blocks;
  }
  found.splits = Splits(job, found.engine, side, geometry);
  found.block = static_cast<int>(rest / found.splits);
  found.split = static_cast<int>(rest % found.splits);
  return found;
}

// Whether a pass has nothing to do for an engine.
__device__ inline bool IsIdle(const Job& job, const EngineState& state, Pass pass) {
  if (pass == Pass::kIterate) return state.stopped != 0;
  return pass == Pass::kMeasure && (state.measured > 0 || IsStored(job, state));
}

// Where a pass finds potentials and weights, by side.
struct PassView {
  const double* phi[2];
  const double* log_weight[2];
};
__device__ inline PassView ViewOf(const Member& member, int engine, int side, Pass pass, int parity) {
  const Job& job = member.job;
  PassView view;
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

// A row's sum of 2 to the power of exponents, under a running maximum: stands for max + log2(sum).
template <typename TE, typename T>
struct LogSum {
  TE max;
  T sum;
  __device__ static LogSum OfNothing() { return {static_cast<TE>(kVoid), 0}; }
  template <int kCount>
  __device__ void Add(const TE (&e)[kCount]) {
    TE largest = e[0];
#pragma unroll
    for (int k = 1; k < kCount; ++k) largest = fmax(largest, e[k]);
    Raise(largest);
#pragma unroll
    for (int k = 0; k < kCount; ++k) sum += Exp2(static_cast<T>(e[k] - max));
  }
  __device__ void Add(const LogSum& other) {
    Raise(other.max);
    sum += other.sum * Exp2(static_cast<T>(other.max - max));
  }

 private:
  __device__ void Raise(TE to) {
    if (!(to > max)) return;
    sum *= Exp2(static_cast<T>(max - to));
    max = to;
  }
};

// A row's sum over some of the columns: its log2, or `sum` times 2^level.
struct ScaledSum {
  float level, sum;
};
__device__ inline double LogOf(double log) { return log; }
__device__ inline double LogOf(const ScaledSum& s) { return s.level + log2(static_cast<double>(s.sum)); }

// log2 of the sum of a row's parts.
__device__ inline double CombineParts(const double* parts, int splits, int64_t stride) {
  double max = kVoid, sum = 0;
  for (int k = 0; k < splits; ++k) max = fmax(max, __ldcg(parts + k * stride));
  for (int k = 0; k < splits; ++k) sum += exp2(__ldcg(parts + k * stride) - max);
  return max + log2(sum);
}
__device__ inline double CombineParts(const ScaledSum* parts, int splits, int64_t stride) {
  constexpr int kTogether = 8;  // On their way at once.
  constexpr float kNothing = static_cast<float>(kVoid);
  float level = kNothing;
  double sum = 0;
  for (int first = 0; first < splits; first += kTogether) {
    float2 part[kTogether];  // As ScaledSum.
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const auto* at = reinterpret_cast<const float2*>(parts + min(first + k, splits - 1) * stride);
      part[k] = __ldcg(at);
      if (first + k >= splits) part[k] = make_float2(kNothing, 0);
    }
    const float before = level;
#pragma unroll
    for (int k = 0; k < kTogether; ++k) level = fmaxf(level, part[k].x);
    sum *= FastExp2(before - level);
#pragma unroll
    for (int k = 0; k < kTogether; ++k) sum += part[k].y * FastExp2(part[k].x - level);
  }
  return level + log2(sum);
}

// ---- What becomes of a row's sum ----------------------------------------------------------------------------------

// A half step of a row, as it is before its sum is known: read before another block may end the pass.
struct RowStep {
  double phi, shift, mass;
  double epsilon, relax;
  int parity;
};
__device__ inline RowStep LoadRow(const Member& member, const RowBlock& b, int side, int i, bool judged) {
  const EngineState& state = *member.state(b.engine);
  const bool shifted = judged || !isinf(RhoOf(member.job, b.engine, side));
  return {member.phi(b.engine, state.parity, side)[i],
          shifted ? member.Shift(b.engine, side, i) : 0,
          judged ? member.mass(MeasureOf(b.engine, side))[i] : 0,
          state.epsilon,
          state.relax,
          state.parity};
}
__device__ inline void IterateRow(const Member& member, const RowBlock& b, int side, int i, const RowStep& row,
                                  double lse, double scale, bool judged, BlockStats* stats) {
  const double rho = RhoOf(member.job, b.engine, side);
  member.phi(b.engine, row.parity ^ 1, side)[i] = HalfStep(row.phi, lse, scale, row.shift, row.epsilon, rho, row.relax);
  if (!judged || !(row.mass > 0)) return;
  stats->error = row.mass * fabs(exp2(fma(row.phi, scale, lse)) - TargetRatio(row.phi + row.shift, rho));
}

// A point at the final potentials.
struct MeasuredPoint {
  double phi, shift, mass, log_mass;
  double reference;  // The first phi of the columns, with the sign that makes phi a difference from it.
  bool cut_short;    // As EngineState's.
};
// What `lse`, its row's, says of it; then its ratio.
__device__ inline double MeasurePoint(const MeasuredPoint& point, double rho, double lse, double scale,
                                      BlockStats* stats) {
  const double f = point.phi + point.shift, mass = point.mass;
  const double exponent = fma(point.phi, scale, lse);
  const double ratio = exp2(point.cut_short ? fmin(exponent, 1000.0) : exponent);
  stats->finite = isfinite(f) && isfinite(ratio) ? 1 : 0;
  if (!(mass > 0)) return ratio;
  stats->error = mass * fabs(ratio - TargetRatio(f, rho));
  stats->dual = mass * (isinf(rho) ? f : -rho * expm1(-f / rho));
  stats->plan_mass = mass * ratio;
  stats->largest = fabs((point.phi + point.reference) * scale) + fabs(point.log_mass);
  stats->terms = fabs(mass * f);
  if (!isfinite(stats->dual)) stats->finite = 0;
  return ratio;
}
__device__ inline void MeasureRow(const Member& member, const RowBlock& b, int side, int i, double lse, double scale,
                                  BlockStats* stats) {
  const EngineState& state = *member.state(b.engine);
  const int measure = MeasureOf(b.engine, side), parity = state.parity;
  const double reference = member.phi(b.engine, parity, 1)[0];
  const MeasuredPoint point = {
      member.phi(b.engine, parity, side)[i], member.Shift(b.engine, side, i),    member.mass(measure)[i],
      member.log_mass(measure)[i],           side == 0 ? reference : -reference, state.cut_short != 0};
  member.ratio(b.engine, side)[i] = MeasurePoint(point, RhoOf(member.job, b.engine, side), lse, scale, stats);
}

// Steps 0 and 1 shrink rows, then columns, that are above their marginal; steps 1 and 2 tell what is missing.
__device__ inline void BoundRow(const Member& member, int side, int step, int i, double lse, double scale,
                                BlockStats* stats) {
  const Job& job = member.job;
  double* log_weight = member.At<double>(job.at.bound_log_weight[side]);
  const double mass = member.mass(side)[i], log_mass = member.log_mass(side)[i];
  // As logarithms: annealing may have been cut short where sums are more than a double holds.
  const double log_sum = fma(member.At<double>(job.at.bound_psi[side])[i], scale, log_weight[i]) + lse;
  if (step < 2 && mass > 0 && log_sum > log_mass) log_weight[i] += log_mass - log_sum;
  if (step == 0) return;
  const double sum = mass > 0 ? exp2(log_sum) : 0;
  const double lack = fmax(0.0, step == 1 ? mass - fmin(sum, mass) : mass - sum);
  member.At<double>(job.at.bound_lack[side])[i] = lack;
  stats->error = lack;
}

__device__ inline BlockStats NoStats() { return {0, 0, 0, 0, 0, 1}; }
__device__ inline BlockStats Combine(const BlockStats& a, const BlockStats& b) {
  return {a.error + b.error,          a.dual + b.dual,   a.plan_mass + b.plan_mass,
          fmax(a.largest, b.largest), a.terms + b.terms, fmin(a.finite, b.finite)};
}
// Adds up the block's statistics (thread by thread in the same order) into `out`; not `whole`: errors alone. `scratch`:
// shared memory, one for each warp.
__device__ inline void StoreStats(const BlockStats& own, bool whole, BlockStats* out, BlockStats* scratch) {
  BlockStats sum = own;
  const auto combine_lanes = [&] {
#pragma unroll 1
    for (int lane = 16; lane > 0; lane /= 2) {
      BlockStats other = {__shfl_xor_sync(0xffffffffu, sum.error, lane), 0, 0, 0, 0, 1};
      if (whole) {
        other.dual = __shfl_xor_sync(0xffffffffu, sum.dual, lane);
        other.plan_mass = __shfl_xor_sync(0xffffffffu, sum.plan_mass, lane);
        other.largest = __shfl_xor_sync(0xffffffffu, sum.largest, lane);
        other.terms = __shfl_xor_sync(0xffffffffu, sum.terms, lane);
        other.finite = __shfl_xor_sync(0xffffffffu, sum.finite, lane);
      }
      sum = Combine(sum, other);
    }
  };
  combine_lanes();
  __syncthreads();  // What is there has been read.
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  sum = threadIdx.x < blockDim.x / 32 ? scratch[threadIdx.x] : NoStats();
  combine_lanes();
  if (threadIdx.x == 0) *out = sum;
}
__device__ inline void StoreStats(const BlockStats& own, bool whole, BlockStats* out) {
  __shared__ BlockStats scratch[kMostWarps];
  StoreStats(own, whole, out, scratch);
}

// The sums of all row blocks' errors, and whether potentials are finite. `scratch`: as BlockSum's.
__device__ inline void EndPass(const Member& member, const RowBlock& b, int side, Pass pass, int blocks,
                               double* scratch) {
  const Job& job = member.job;
  const BlockStats* stats = member.stats(b.engine, side);
  double error = 0, finite = 1;
#pragma unroll 1
  for (int k = threadIdx.x; k < blocks; k += blockDim.x) {
    error += __ldcg(&stats[k].error);
    if (pass == Pass::kMeasure) finite = fmin(finite, __ldcg(&stats[k].finite));
  }
  error = BlockSum(error, scratch);
  if (pass == Pass::kMeasure) finite = -BlockMax(-finite, scratch);
  if (threadIdx.x != 0) return;
  EngineState* state = member.state(b.engine);
  if (pass == Pass::kIterate) {
    EngineState next = *state;  // Loads and stores together.
    side == 0 ? EndRows(job, b.engine, &next, error) : EndColumns(job, b.engine, &next, error);
    next.mode = ModeAt(next, next.epsilon);
    *state = next;
    return;
  }
  state->measured = 0;
  state->error[side] = error;
  state->finite = (side == 0 || state->finite) && finite > 0;
  if (side == 1) state->converged = fmax(state->error[0], state->error[1]) <= job.solver.tolerance;
}

__device__ inline void EndPass(const Member& member, const RowBlock& b, int side, Pass pass, int blocks) {
  __shared__ double scratch[kMostWarps];
  EndPass(member, b, side, pass, blocks, scratch);
}

// The state after a columns' pass that is not judged. By one thread.
__device__ inline void MoveState(const Member& member, int engine) {
  EngineState next = *member.state(engine);  // Loads and stores together.
  EndColumns(member.job, engine, &next, 0);
  next.mode = ModeAt(next, next.epsilon);
  *member.state(engine) = next;
}

// What follows when row threadIdx.x of this block knows its sum over this block's columns, `part` times 2^offset: parts
// are combined, rows move, and the last block of an engine decides how it goes on. Of engines 1 and 2 columns do as the
// rows that are the same points. All threads call it; the last has no row.
template <typename Part>
__device__ void FinishRows(const Member& member, const RowBlock& b, int side, Pass pass, int step, Part part,
                           double offset, double scale, Geometry geometry) {
  static_assert(sizeof(Part) == sizeof(double), "partial");
  const Job& job = member.job;
  const int rows = EngineSize(job, b.engine, side), tile = RowsOf(job, b.engine, side, geometry);
  const int i = b.block * tile + threadIdx.x, blocks = RowBlocks(job, b.engine, side, geometry);
  const bool mine = threadIdx.x < tile && i < rows;
  unsigned* arrivals = member.At<unsigned>(job.at.arrivals) + b.engine * job.at.arrival_stride;
  unsigned* all_arrivals = arrivals + job.at.arrival_stride - 1;
  // With a fixed number of iterations residuals decide nothing, and the state moves on while rows are finished.
  const bool judged = pass != Pass::kIterate || job.solver.tolerance > 0;
  const int last_side = b.engine > 0 ? 1 : side;
  const bool moves = !judged && last_side == 1;
  RowStep row = {};
  if (mine && pass == Pass::kIterate) row = LoadRow(member, b, side, i, judged);
  double lse = mine && b.splits == 1 ? LogOf(part) + offset : 0;
  if (b.splits > 1) {
    Part* parts = member.At<Part>(job.at.partial[b.engine]);
    if (mine) parts[int64_t{b.split} * rows + i] = part;
    const LastOf last = LastToArrive(arrivals + b.block, b.splits, all_arrivals, moves ? blocks * b.splits : 0);
    if (last.second && threadIdx.x + 1 == blockDim.x) MoveState(member, b.engine);
    if (!last.first) return;
    if (mine) lse = CombineParts(parts + i, b.splits, rows) + offset;
  } else if (moves && LastToArrive(all_arrivals, blocks) && threadIdx.x + 1 == blockDim.x) {
    MoveState(member, b.engine);
  }
  BlockStats stats = NoStats();
  if (mine && pass == Pass::kIterate) {
    IterateRow(member, b, side, i, row, lse, scale, judged, &stats);
    if (b.engine > 0) member.phi(b.engine, row.parity ^ 1, 1)[i] = member.phi(b.engine, row.parity ^ 1, 0)[i];
  }
  if (mine && pass == Pass::kBound) BoundRow(member, side, step, i, lse, scale, &stats);
  if (!judged) return;
#pragma unroll 1
  for (int s = side; s <= last_side; ++s) {
    if (mine && pass == Pass::kMeasure) MeasureRow(member, b, s, i, lse, scale, &stats);
    BlockStats* all = pass == Pass::kBound ? member.At<BlockStats>(job.at.bound_stats) : member.stats(b.engine, s);
    StoreStats(stats, pass == Pass::kMeasure, all + b.block);
  }
  if (pass == Pass::kBound || !LastToArrive(all_arrivals, blocks)) return;
#pragma unroll 1
  for (int s = side; s <= last_side; ++s) EndPass(member, b, s, pass, blocks);
}

// Whether what a side sums up to is known before it is measured: the last of a fixed number of plain iterations has
// given columns the potentials at which that is what it should be.
__device__ inline bool IsKnown(const Job& job, int side, Pass pass) {
  return pass == Pass::kMeasure && side == 1 && IsPlain(job);
}
// FinishRows, then. All threads call it.
__device__ inline void FinishKnown(const Member& member, const RowBlock& b, int side, Geometry geometry) {
  if (b.split > 0) return;
  const Job& job = member.job;
  const EngineState& state = *member.state(b.engine);
  const int tile = RowsOf(job, b.engine, side, geometry), i = b.block * tile + threadIdx.x;
  const double scale = kLog2E / state.epsilon;
  BlockStats stats = NoStats();
  if (threadIdx.x < tile && i < EngineSize(job, b.engine, side)) {
    const double phi = member.phi(b.engine, state.parity, side)[i];
    MeasureRow(member, b, side, i, -phi * scale, scale, &stats);
  }
  StoreStats(stats, true, member.stats(b.engine, side) + b.block);
  const int blocks = RowBlocks(job, b.engine, side, geometry);
  unsigned* arrivals = member.At<unsigned>(job.at.arrivals) + (b.engine + 1) * job.at.arrival_stride - 1;
  if (LastToArrive(arrivals, blocks)) EndPass(member, b, side, Pass::kMeasure, blocks);
}

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_ROWS_CUH_
