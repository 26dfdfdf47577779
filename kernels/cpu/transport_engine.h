// Sinkhorn iterations of one problem between two measures, as phases of chunks (work.h).
//
// An iteration is one sweep over the plan (transport_blocks.h) and an update of the columns from its sums. The row sums
// also tell the marginal error of the potentials that the sweep started from: the stopping test is free. A column whose
// sum leaves the safe range is solved by a log-sum-exp over its own entries.
// Faster than plain updates, with a tolerance: Anderson's extrapolation of G as long as it pays (anderson.h), then
// over-relaxation, F <- F + w (F' - F), with w from the observed rate (relaxation.h).
#ifndef SINKHORN_KERNELS_CPU_TRANSPORT_ENGINE_H_
#define SINKHORN_KERNELS_CPU_TRANSPORT_ENGINE_H_

#include <cstdint>
#include <vector>

#include "kernels/cpu/anderson.h"
#include "kernels/cpu/buffer.h"
#include "kernels/cpu/relaxation.h"
#include "kernels/cpu/transport_answer.h"
#include "kernels/cpu/transport_cost.h"
#include "kernels/cpu/transport_state.h"
#include "kernels/cpu/work.h"
#include "kernels/problem.h"

namespace sinkhorn::cpu {

// What the engine is asked for, besides the cost.
struct EngineOptions {
  SolverOptions solver;      // epsilon_start resolved (>= epsilon).
  const double* mass[2];     // [n], [m]; total > 0
  const double* initial[2];  // potentials in units of the cost, or null for 0
  int64_t cache_bytes = 0;   // Densities are kept if they fit.
};

template <typename TE, typename T>
class TransportEngine {
 public:
  // `cost` outlives the engine; options are copied, masses and initial potentials only read here.
  TransportEngine(const CostSource<TE, T>* cost, const EngineOptions& options);

  int64_t chunk_count() const { return finished() ? 0 : slots_; }
  // Pairs that a chunk handles, at most.
  int64_t chunk_pairs() const { return chunk_blocks_ * kRowBlock * cost_.padded(1 - side_); }
  // True while phases read densities from the cache (they cost a fraction of making them).
  bool cached() const { return state_.cache_valid; }
  void RunChunk(int64_t chunk, Scratch* scratch);
  void EndPhase();
  bool finished() const { return phase_ == Phase::kDone; }
  // The iteration in progress is the last, if it is not anyway. Between phases or within one, while no chunk runs.
  void FinishSoon() {
    const int32_t last = answer_.convergence.iterations + 1;
    const bool iterating = phase_ != Phase::kVoidColumns && phase_ != Phase::kMeasure && phase_ != Phase::kExtremeSums;
    if (!iterating || finished() || solver_.max_iterations <= last) return;
    solver_.max_iterations = last;
    answer_.convergence.stop_reason = StopReason::kTimeBudget;  // Unless it stops by itself.
  }
  const Convergence& convergence() const { return answer_.convergence; }

  // REQUIRES: finished.
  const TransportAnswer& answer() const { return answer_; }
  const TransportState<TE, T>& state() const { return state_; }  // For PlanRows.

 private:
  // SafeRows, SafeColumns: an iteration (or the start) of symmetric updates by log-sum-exps. Measure: a sweep that
  // changes nothing. VoidColumns: potentials of columns without mass, which no sweep could give.
  // ExtremeSums: what Measure could not sum.
  enum class Phase { kSafeRows, kSafeColumns, kSweep, kBadColumns, kVoidColumns, kMeasure, kExtremeSums, kDone };

  bool sweeping() const { return phase_ == Phase::kSweep || phase_ == Phase::kMeasure; }
  bool at_target() const { return state_.epsilon == solver_.epsilon; }
  int64_t block_count() const;

  void Start(Phase phase);
  void CutSweep();
  void StartIteration();
  void SafeBlock(int64_t block, Scratch* scratch);

  void EndSweep();
  bool ShouldStop(const double* error);
  bool AccelerateColumns(bool sums_safe);
  void StopAtRows();
  void UpdateColumns();
  void ApplyScalings();
  void KeepOrRefreeze(bool keep);
  void EndIteration();
  void SetEpsilon(double epsilon);
  void StopIterating();
  void EndMeasure();
  void MeasureExtremeSums(int side);
  void Finish();

  const CostSource<TE, T>& cost_;
  const TransportKernels<TE, T>& kernels_ = GetTransportKernels<TE, T>();
  SolverOptions solver_;  // As asked for, but for FinishSoon.
  TransportState<TE, T> state_;
  TransportSide<TE, T>&x_, &y_;  // Its rows and its columns.
  const bool accelerated_;
  Anderson anderson_;  // First; where it does not pay:
  Relaxation relaxation_;
  double previous_relax_ = 1;  // Of the sweep before the one in progress.

  Phase phase_ = Phase::kSweep;
  int side_ = 0;               // Whose rows the phase runs over.
  std::vector<int64_t> list_;  // Rows of a safe phase.
  int64_t slots_ = 1, chunk_blocks_ = 1, step_ = 0, steps_ = 1;
  bool use_cache_ = false;
  bool safe_sweep_ = true;  // Frames tell nothing yet.
  bool starting_ = false;   // Symmetric: the half steps from zero, not yet an iteration.
  double best_error_ = 0;
  int64_t best_iteration_ = 0;

  Buffer<T> next_weight_;  // Of the columns, [padded].
  Buffer<double> extrapolated_;
  Buffer<T> acc_;  // [slots, padded columns]
  std::vector<double> slot_error_;
  std::vector<char> slot_unsafe_;  // Symmetric: a row's sum left the safe range.
  std::vector<int64_t> bad_columns_, void_columns_;
  TransportAnswer answer_;
};

}  // namespace sinkhorn::cpu

#endif  // SINKHORN_KERNELS_CPU_TRANSPORT_ENGINE_H_
