// What happens between the passes of an engine: residuals, stopping, over-relaxation, annealing. One thread per engine.
// The rules are those of kernels/cpu/transport_engine.cc.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_CONTROL_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_CONTROL_CUH_

#include "kernels/cuda/transport_block.cuh"

namespace sinkhorn {
namespace cuda {

// STRICT stops when the residual has not fallen for this many iterations near its rounding level.
constexpr int kStalledIterations = 200;
constexpr double kRoundingError = 1e-5;
// Float32 sums made anew may differ by this part of a residual: what stops must still hold when it is measured.
constexpr double kMeasuringRoom = 0.97;
__device__ inline double RoomOf(const Job& job, const EngineState& s) {
  return s.mode == kFloat || GeometryOf(job, s.mode) == Geometry::kOnChip || job.framed ? kMeasuringRoom : 1;
}

// ---- Over-relaxation (kernels/cpu/relaxation.h) -------------------------------------------------------------------

__device__ inline void ChangeWeight(RelaxationState* r, double weight) {
  r->weight = weight;
  r->settled = 0;
}
__device__ inline void AdaptWeight(RelaxationState* r, double rate, double error) {
  constexpr double kLinearError = 0.5, kMargin = 0.1, kStep = 0.4;
  if (rate >= 1) {
    if (r->weight == 1) return;
    r->ceiling = fmax(1.0, 2 - 2 * (2 - r->weight));
    return ChangeWeight(r, r->ceiling);
  }
  r->ceiling = 2 - 0.8 * (2 - r->ceiling);
  if (error > kLinearError || rate < r->weight - 1 + kMargin * (2 - r->weight)) return;
  const double sum = rate + r->weight - 1;
  const double s2 = fmin(sum * sum / (rate * r->weight * r->weight), 1 - 1e-9);
  const double wanted = fmin(fmin(2 / (1 + sqrt(1 - s2)), r->ceiling), 2 - kStep * (2 - r->weight));
  if (wanted > 2 - (1 - kMargin) * (2 - r->weight)) ChangeWeight(r, wanted);
}
// A large weight keeps the rounding of every iteration alive: one plain iteration between blocks removes it.
__device__ inline bool Smooths(const RelaxationState& r) { return r.weight > 1.85; }
__device__ inline void ObserveResidual(RelaxationState* r, double error) {
  if (!(error > 0)) return;
  if (r->skipped > 0) {
    --r->skipped;
    return;
  }
  const int block = 5 + min(static_cast<int>(1 / (2 - r->weight)), 60);
  r->log_sum += log(error);
  if (++r->count < block) return;
  const double mean = r->log_sum / r->count;
  const double rate = exp((mean - r->previous_mean) / (r->count + (Smooths(*r) ? 1 : 0)));
  const bool comparable = r->settled > 1;  // The first block after a change shows the change.
  r->previous_mean = mean;
  r->log_sum = 0;
  r->count = 0;
  ++r->settled;
  if (comparable) AdaptWeight(r, rate, error);
  if (Smooths(*r)) {
    r->plain = 1;
    r->skipped = 2;
  }
}

// ---- Iterations ---------------------------------------------------------------------------------------------------

// The mode at an epsilon. Where it is annealed, passes that are not solves on the chip follow it.
__device__ inline int ModeAt(const EngineState& s, double epsilon) {
  return s.mode == kDouble ? kDouble : epsilon < s.float_epsilon ? kMixed : kFloat;
}

// The relaxation of the iteration that begins now.
__device__ inline void StartIteration(const Job& job, int engine, EngineState* s) {
  s->previous_relax = s->relax;
  if (s->starting) {
    s->relax = 1;
  } else if (IsSymmetric(job, engine)) {
    s->relax = 0.5;
  } else {
    s->relax = s->relaxation.plain ? 1 : s->relaxation.weight;
    s->relaxation.plain = 0;
  }
}

__device__ inline void Stop(const Job& job, EngineState* s, StopReason reason) {
  s->stopped = 1;
  s->reason = static_cast<int>(reason);
  s->cut_short = s->epsilon != job.solver.epsilon;
  s->epsilon = job.solver.epsilon;  // The answer is for the epsilon that was asked for.
}

// If that was the last iteration: why.
__device__ inline bool StopAtLimit(const Job& job, EngineState* s) {
  const bool all = s->iterations >= job.solver.max_iterations;
  if (all || job.finish_soon) Stop(job, s, all ? StopReason::kMaxIterations : StopReason::kTimeBudget);
  return s->stopped;
}

// After `done` plain iterations more, which change nothing else; `parity`: of the potentials that they have left.
__device__ inline void MovePlain(const Job& job, EngineState* s, int done, int parity) {
  s->iterations += done;
  s->parity = parity;
  s->fresh = 0;
  StopAtLimit(job, s);
}

// A sum has left the range of a launch of many iterations. What is kept may be for such launches alone.
__device__ inline void Fall(const Job& job, EngineState* s) {
  s->fallen = 1;
  if (job.looped) s->kept = 0;
}

// Columns' residual at the new rows, which are exact: at the tolerance that is the answer, and the columns' own update
// cannot make it worse. Before, the columns' next potentials are extrapolated.
__device__ inline void JudgeColumns(const Job& job, EngineState* s, double error) {
  s->error[0] = 0;
  s->error[1] = error;
  if (error <= job.solver.tolerance * RoomOf(job, *s)) return Stop(job, s, StopReason::kTolerance);
  s->extrapolate = 1;
}

// The residual of the present potentials is known: stops, or adapts the over-relaxation.
__device__ inline void JudgeResidual(const Job& job, int engine, EngineState* s) {
  const bool symmetric = IsSymmetric(job, engine);
  if (s->fresh || s->starting || (!symmetric && s->iterations == 0)) return;
  const double worst = fmax(s->error[0], s->error[1]), tolerance = job.solver.tolerance;
  if (job.relaxing && engine == 0) ObserveResidual(&s->relaxation, worst / s->total_mass[0]);
  if (!(tolerance > 0)) return;
  if (worst <= tolerance * RoomOf(job, *s)) {
    if (symmetric || s->previous_relax == 1) return Stop(job, s, StopReason::kTolerance);
    s->relaxation.plain = 1;  // One plain iteration: the columns are exact after it.
  }
  if (s->best_iteration == 0 || worst < 0.98 * s->best_error) {
    s->best_error = worst;
    s->best_iteration = s->iterations;
  } else if (s->mode != kDouble && worst < kRoundingError && s->iterations > s->best_iteration + kStalledIterations) {
    Stop(job, s, StopReason::kPrecision);
  }
}

// After the rows' half step; `error`: their residual before it.
__device__ inline void EndRows(const Job& job, int engine, EngineState* s, double error) {
  s->error[0] = error;
  if (IsSymmetric(job, engine)) return;
  s->error[1] = 0;  // Columns are exact, unless over-relaxed.
  if (s->anderson) return;
  JudgeResidual(job, engine, s);
}

// Of the iteration after the one in progress, if there is one.
__device__ inline double NextEpsilon(const Job& job, const EngineState& s) {
  if (s.starting || s.epsilon == job.solver.epsilon) return s.epsilon;
  return fmax(job.solver.epsilon, s.epsilon * job.solver.epsilon_decay);
}

// After the columns' half step.
__device__ inline void EndColumns(const Job& job, int engine, EngineState* s, double error) {
  if (IsSymmetric(job, engine)) {
    s->error[1] = error;
    JudgeResidual(job, engine, s);
    if (s->stopped) return;
  }
  s->parity ^= 1;
  s->fresh = 0;
  if (s->starting) {
    s->starting = 0;
    s->fresh = s->epsilon != job.solver.epsilon;  // A residual would be another problem's.
    return StartIteration(job, engine, s);
  }
  ++s->iterations;
  if (s->anderson && s->epsilon == job.solver.epsilon) {
    JudgeColumns(job, s, error);
    if (s->stopped) return;
  }
  if (s->epsilon != job.solver.epsilon) {
    s->epsilon = NextEpsilon(job, *s);
    s->fresh = 1;
  }
  if (StopAtLimit(job, s)) {
    s->extrapolate = 0;
    return;
  }
  StartIteration(job, engine, s);
}

// ---- Half steps ---------------------------------------------------------------------------------------------------

// What marginal / mass is at the optimum: 1; unbalanced: exp(-f / rho).
__device__ inline double TargetRatio(double f, double rho) { return isinf(rho) ? 1 : exp(-f / rho); }

// By what relaxed marginals damp a half step.
__device__ inline double DampingOf(double epsilon, double rho) { return isinf(rho) ? 1 : 1 / (1 + epsilon / rho); }

// The potential after a half step to -lse / s (base 2, without the shift).
__device__ inline double HalfStep(double old, double lse, double s, double shift, double epsilon, double rho,
                                  double relax) {
  const double damping = DampingOf(epsilon, rho);
  const double half_step = -lse / s;
  const double damped = damping == 1 ? half_step : damping * (half_step + shift) - shift;
  return relax == 1 ? damped : old + relax * (damped - old);
}

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_CONTROL_CUH_
