// From a solution to its outputs: vectors, scalars, and what the host is told after each slice.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_control.cuh"
#include "kernels/cuda/transport_hopper.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_tile.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

__device__ double Potential(const Member& member, int engine, int side, int i) {
  return member.phi(engine, member.state(engine)->parity, side)[i] + member.Shift(engine, side, i);
}

// ---- Vectors ------------------------------------------------------------------------------------------------------

// d(dual) / d mass_i of one engine's problem, one argument at a time.
__device__ double DualSlope(const Member& member, int engine, int side, double rho, int i) {
  const double f = Potential(member, engine, side, i), epsilon = member.job.solver.epsilon;
  return (isinf(rho) ? f : -rho * expm1(-f / rho)) -
         epsilon * (member.ratio(engine, side)[i] - member.state(engine)->total_mass[1 - side]);
}

__device__ void StorePoint(const Member& member, int side, int i) {
  const Job& job = member.job;
  const Outputs& out = job.out;
  const int64_t at = member.index * job.size[side] + i;
  const OutputView& potential = side == 0 ? out.f : out.g;
  const OutputView& sums = side == 0 ? out.row_sums : out.column_sums;
  const OutputView& gradient = side == 0 ? out.gradient_a : out.gradient_b;
  const OutputView& self = side == 0 ? out.f_aa : out.g_bb;
  const double mass = member.mass(side)[i];
  if (potential.data != nullptr) StoreOutput(potential, at, Potential(member, 0, side, i));
  if (sums.data != nullptr) StoreOutput(sums, at, mass == 0 ? 0 : mass * member.ratio(0, side)[i]);
  if (self.data != nullptr && job.engines > 1) {
    StoreOutput(self, at, (Potential(member, 1 + side, 0, i) + Potential(member, 1 + side, 1, i)) / 2);
  }
  if (gradient.data == nullptr) return;
  const double rho = side == 0 ? job.solver.rho_a : job.solver.rho_b;
  double slope = DualSlope(member, 0, side, rho, i);
  if (job.engines > 1) {
    const double* total = member.state(0)->total_mass;
    slope -= (DualSlope(member, 1 + side, 0, rho, i) + DualSlope(member, 1 + side, 1, rho, i)) / 2;
    slope += job.solver.epsilon * (total[side] - total[1 - side]);
  }
  StoreOutput(gradient, at, slope);
}

__device__ void StoreVectors(const LaunchTable& table, int64_t index) {
  const BlockWork work = FindWork(table, index);
  AwaitKernelBefore();
  const Job& job = table.jobs[work.job];
  const int of_side = static_cast<int>(CeilDiv(job.size[0], kThreads));
  const int blocks = of_side + static_cast<int>(CeilDiv(job.size[1], kThreads));
  const int block = static_cast<int>(work.block % blocks), side = block < of_side ? 0 : 1;
  const int i = (side == 0 ? block : block - of_side) * kThreads + threadIdx.x;
  const Member member{job, work.block / blocks};
  if (i < job.size[side] && IsSolved(member)) StorePoint(member, side, i);
}

// ---- Scalars ------------------------------------------------------------------------------------------------------

struct DualValue {
  double value, rounding;
};
// By how much the dual value is less when one side's potentials are lowered by what FAST's rounding may add to a cost:
// then it is that of a cost nowhere above the given one.
__device__ double LossByCosts(const Member& member, int blocks, double* scratch) {
  const Job& job = member.job;
  const EngineState& state = *member.state(0);
  const double less = state.cost_rounding, rho = job.solver.rho_a;
  if (less == 0) return 0;
  if (isinf(rho)) return less * state.total_mass[0];
  if (isinf(job.solver.rho_b)) return less * state.total_mass[1];
  double dual = 0;  // sum a rho (1 - exp(-f / rho))
  for (int k = threadIdx.x; k < blocks; k += kThreads) dual += member.stats(0, 0)[k].dual;
  return (rho * state.total_mass[0] - BlockSum(dual, scratch)) * expm1(less / rho);
}
// <a, f> + <b, g> - eps (sum P - mass_a mass_b), and what rounding may have added to it: an exponent is a sum of
// rounded terms, and densities and their sums are rounded too.
__device__ DualValue DualOf(const Member& member, int engine) {
  __shared__ double scratch[kMostWarps];
  const Job& job = member.job;
  const EngineState& state = *member.state(engine);
  const Geometry geometry = IsStreamed(job, state) ? Geometry::kStream : GeometryOf(job, state.mode);
  const auto blocks = [&](int side) {
    return state.measured > 0 ? state.measured : RowBlocks(job, engine, side, geometry);
  };
  double dual = 0, plan_mass = 0, terms = 0, largest[2] = {0, 0};
#pragma unroll 1
  for (int side = 0; side < 2; ++side) {
    const BlockStats* stats = member.stats(engine, side);
    const int all = blocks(side);
#pragma unroll 1
    for (int k = threadIdx.x; k < all; k += kThreads) {
      dual += stats[k].dual;
      terms += stats[k].terms;
      if (side == 0) plan_mass += stats[k].plan_mass;
      largest[side] = fmax(largest[side], stats[k].largest);
    }
  }
  dual = BlockSum(dual, scratch);
  plan_mass = BlockSum(plan_mass, scratch);
  terms = BlockSum(terms, scratch);
  const double epsilon = job.solver.epsilon;
  double both = BlockMax(largest[0], scratch) + BlockMax(largest[1], scratch);
  // Distances are as wrong as the coordinates that they are made of.
  if (SourceOf(job) == Source::kDistances) both += state.cost_max * kLog2E / epsilon;
  const double masses = state.total_mass[0] * state.total_mass[1];
  // What is framed is near 0, as float; on the chip at most twice what scalings may drift by.
  const bool coarse = state.mode == kFloat || IsStreamed(job, state);
  const bool drifts = state.mode == kMixed && geometry == Geometry::kOnChip;
  // FAST beyond the chip keeps exponents or densities of 16 bits.
  const bool halves = coarse && KeepsHalves(job) && geometry != Geometry::kOnChip;
  const double exponent = coarse ? 0x1p-21 : 0x1p-49;
  const double density = halves ? 0x1p-7 : state.mode == kDouble ? 1e-13 : drifts ? 5e-6 : 2e-6;
  const double loss = engine == 0 ? LossByCosts(member, blocks(0), scratch) : 0;
  return {epsilon * masses + dual - epsilon * plan_mass,
          epsilon * plan_mass * (exponent * both + density) + 1e-13 * (epsilon * masses + terms) + loss};
}

// <C, P>: what the passes added up, and, where that was exponents, the shifts' part.
__device__ double LinearValue(const Member& member) {
  __shared__ double scratch[kMostWarps];
  const Job& job = member.job;
  double products = 0, shifts = 0;
  for (int k = threadIdx.x; k < LinearParts(job); k += kThreads) {
    products += member.At<double>(job.at.linear_value)[k];
  }
  for (int side = 0; side < 2 && SourceOf(job) == Source::kProducts && !HasWholeCosts(job); ++side) {
    for (int i = threadIdx.x; i < job.size[side]; i += kThreads) {
      const double mass = member.mass(side)[i];
      if (mass > 0) shifts += mass * member.ratio(0, side)[i] * member.Shift(0, side, i);
    }
  }
  products = BlockSum(products, scratch);
  shifts = BlockSum(shifts, scratch);
  if (HasWholeCosts(job)) return products;
  return shifts - products * job.solver.epsilon / kLog2E;
}

__device__ Convergence WorstOf(const Member& member) {
  Convergence worst = {};
  for (int e = 0; e < member.job.engines; ++e) {
    const EngineState& s = *member.state(e);
    worst.iterations = max(worst.iterations, s.iterations);
    worst.marginal_error_a = fmax(worst.marginal_error_a, s.error[0]);
    worst.marginal_error_b = fmax(worst.marginal_error_b, s.error[1]);
    const bool cut = e > 0 && worst.stop_reason == StopReason::kTimeBudget;
    StopReason reason = static_cast<StopReason>(s.reason);
    // What stopped it differs from these by rounding.
    if (reason == StopReason::kTolerance && !s.converged) reason = StopReason::kPrecision;
    if (e == 0 || (!s.converged && !cut)) worst.stop_reason = reason;
    worst.converged = (e == 0 || worst.converged) && s.converged;
  }
  return worst;
}

// kVectors: those are stored here, too.
template <bool kVectors>
__device__ void StoreScalars(const LaunchTable& table, int64_t index) {
  __shared__ double scratch[kMostWarps];
  const BlockWork work = FindWork(table, index);
  const Job& job = CopyJob(table.jobs[work.job]);
  AwaitKernelBefore();
  const Member member{job, work.block};
  if (!IsSolved(member)) return;
  for (int side = 0; side < 2 && kVectors; ++side) {
    for (int i = threadIdx.x; i < job.size[side]; i += kThreads) StorePoint(member, side, i);
  }
  const Outputs& out = job.out;
  const DualValue cross = DualOf(member, 0);
  double value = cross.value;
  if (job.engines > 1) {
    const double difference = member.state(0)->total_mass[0] - member.state(0)->total_mass[1];
    value += job.solver.epsilon / 2 * difference * difference;
    for (int self = 1; self <= 2; ++self) value -= DualOf(member, self).value / 2;
  }
  double linear = 0, bound = 0;
  if (out.value_linear != nullptr) linear = LinearValue(member);
  if (job.wants_bound) {
    for (int k = threadIdx.x; k < BoundParts(job); k += kThreads) {
      bound += member.At<double>(job.at.bound_partial)[k];
    }
    const EngineState& state = *member.state(0);
    bound = BlockSum(bound, scratch) + state.cost_rounding * fmax(state.total_mass[0], state.total_mass[1]);
  }
  if (threadIdx.x != 0) return;
  if (job.looped) member.state(0)->stored = 1;
  if (out.value != nullptr) out.value[member.index] = value;
  if (out.dual_bound != nullptr) out.dual_bound[member.index] = cross.value - cross.rounding;
  if (out.value_linear != nullptr) out.value_linear[member.index] = linear;
  if (out.primal_bound != nullptr) out.primal_bound[member.index] = bound;
  if (out.convergence != nullptr) out.convergence[member.index] = WorstOf(member);
}

// ---- Reports ------------------------------------------------------------------------------------------------------

// Of `r`'s members and of those after them, `p`'s. Reasons are -1 where there are no members.
__device__ void AddReport(const JobReport& p, JobReport* r) {
  r->running += p.running;
  r->looping += p.looping;
  r->crossing += p.crossing;
  r->modes |= p.modes;
  r->iterations = max(r->iterations, p.iterations);
  r->fewest = min(r->fewest, p.fewest);
  if (r->diverged < 0 && p.diverged >= 0) r->diverged = p.diverged, r->diverged_iterations = p.diverged_iterations;
  for (int side = 0; side < 2; ++side) r->error[side] = fmax(r->error[side], p.error[side]);
  const bool cut = r->reason == static_cast<int>(StopReason::kTimeBudget);
  if (r->reason < 0 || (p.reason >= 0 && !p.converged && !cut)) r->reason = p.reason;
  r->converged = r->converged && p.converged;
}

// The worst over all members: neighbours are put together, then neighbours of those.
__device__ void StoreReport(const Job& job, JobReport* report) {
  __shared__ JobReport parts[kThreads];
  AwaitKernelBefore();
  const JobReport none = {0, 0, 0, 0, 0, INT32_MAX, 1, -1, {0, 0}, -1, 0};
  JobReport r = none;
  const int64_t each = CeilDiv(job.count, kThreads);
  const int64_t last = min(job.count, (threadIdx.x + 1) * each);
  const bool limited = MakesFloatEntries(job.solver, job.out);
  for (int64_t m = threadIdx.x * each; m < last; ++m) {
    const Member member{job, m};
    const Convergence worst = WorstOf(member);
    JobReport of_member = none;
    for (int e = 0; e < job.engines; ++e) {
      const EngineState& s = *member.state(e);
      of_member.running += s.stopped ? 0 : 1;
      if (!s.stopped) of_member.fewest = min(of_member.fewest, s.iterations);
      of_member.looping += s.stopped || s.fallen || s.mode != kFloat ? 0 : 1;
      if (e == 0) of_member.crossing = of_member.looping;
      of_member.modes |= 1 << s.mode | 1 << ModeAt(s, job.solver.epsilon);
      const double error = fmax(s.error[0], s.error[1]);
      const bool exempt = !limited || s.cut_short;
      const bool holds = s.finite && (exempt || HoldsEntries(error, s.total_mass[0], s.total_mass[1]));
      if (s.stopped && !holds && of_member.diverged < 0) {
        of_member.diverged = m, of_member.diverged_iterations = s.iterations;
      }
    }
    of_member.iterations = worst.iterations;
    of_member.error[0] = worst.marginal_error_a;
    of_member.error[1] = worst.marginal_error_b;
    of_member.reason = static_cast<int>(worst.stop_reason);
    of_member.converged = worst.converged;
    AddReport(of_member, &r);
  }
  parts[threadIdx.x] = r;
#pragma unroll 1
  for (int width = 1; width < kThreads; width *= 2) {
    __syncthreads();
    if (threadIdx.x % (2 * width) == 0) AddReport(parts[threadIdx.x + width], &parts[threadIdx.x]);
  }
  if (threadIdx.x == 0) *report = parts[0];
}

// Vectors, scalars and reports need nothing of each other.
__global__ void __launch_bounds__(kThreads) EndKernel(EndTables end) {
  const int64_t scalars = blockIdx.x - end.vector_blocks, reports = scalars - end.scalar_blocks;
  if (scalars < 0) return StoreVectors(end.vectors, blockIdx.x);
  if (reports < 0) return StoreScalars</*kVectors=*/false>(end.scalars, scalars);
  StoreReport(end.all.jobs[reports], end.reports + reports);
}
// The same of many small members, whose vectors have no blocks of their own. Reports, which are of many, come first.
__global__ void __launch_bounds__(kThreads) EndManyKernel(EndTables end) {
  const int64_t scalars = int64_t{blockIdx.x} - end.all.job_count;
  if (scalars >= 0) return StoreScalars</*kVectors=*/true>(end.scalars, scalars);
  StoreReport(end.all.jobs[blockIdx.x], end.reports + blockIdx.x);
}

}  // namespace

int64_t StoreBlocks(const Job& job) { return CeilDiv(job.size[0], kThreads) + CeilDiv(job.size[1], kThreads); }

void LaunchEnd(const EndTables& end, cudaStream_t stream) {
  const bool many = end.vector_blocks == 0 && end.scalar_blocks > 0;
  LaunchNext(many ? EndManyKernel : EndKernel, end.vector_blocks + end.scalar_blocks + end.all.job_count, kThreads, 0,
             stream, end);
}

}  // namespace cuda
}  // namespace sinkhorn
