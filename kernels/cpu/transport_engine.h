// Sinkhorn iterations of one problem between two measures, as phases of chunks (work.h).
//
// One sweep over the plan serves both sides: a block of rows is made (or read from the cache), its row sums give the
// new u, and while it is still in the nearest cache it is added, scaled by the new u, to the column sums, which give
// the new v. The row sums also tell the marginal error of the potentials that the sweep started from: the stopping test
// is free.
//
//   density T_ij = 2^(z_ij + frame_x[i] + frame_y[j]);   F = frame_x + log2 u, G = frame_y + log2 v   (potentials, base
//   2, / epsilon)
//
// Frames are potentials frozen when densities were computed; while the scalings u, v stay within 2^+-kDrift a cached T
// serves all iterations. A row whose sum leaves the safe range is made anew around its own maximum; such a column is
// solved by a log-sum-exp over its own entries. Nothing else needs a maximum.
// Faster than plain updates, with a tolerance: Anderson's extrapolation of G as long as it pays (anderson.h), then
// over-relaxation, F <- F + w (F' - F), with w from the observed rate (relaxation.h).
#ifndef SINKHORN_KERNELS_CPU_TRANSPORT_ENGINE_H_
#define SINKHORN_KERNELS_CPU_TRANSPORT_ENGINE_H_

#include <cstdint>
#include <vector>

#include "kernels/cpu/anderson.h"
#include "kernels/cpu/buffer.h"
#include "kernels/cpu/relaxation.h"
#include "kernels/cpu/transport_cost.h"
#include "kernels/cpu/transport_kernels.h"
#include "kernels/cpu/work.h"
#include "kernels/problem.h"

namespace sinkhorn {
namespace cpu {

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

  int64_t chunk_count() const;
  // Pairs that a chunk handles, at most.
  int64_t chunk_pairs() const { return chunk_blocks_ * kRowBlock * cost_.padded(1 - side_); }
  // True while phases read densities from the cache (they cost a fraction of making them).
  bool cached() const { return cache_valid_; }
  void RunChunk(int64_t chunk, Scratch* scratch);
  void EndPhase();
  bool finished() const { return phase_ == Phase::kDone; }

  // REQUIRES: finished. Potentials in units of the cost [padded], sums of P at them.
  const Buffer<double>& potential(int side) const { return potential_[side]; }
  const Buffer<double>& marginal(int side) const { return marginal_[side]; }
  const Convergence& convergence() const { return convergence_; }
  double epsilon() const { return epsilon_; }
  bool finite() const;

  // P of a block, kRowBlock rows of `side` (rows[r] < 0: zeros), with its row sums.
  // REQUIRES: finished. `workspace`: the cost's.
  void PlanRows(int side, const int64_t* rows, T* plan, double* sums, TE* workspace) const;
  const Buffer<double>& mass(int side) const { return mass64_[side]; }
  double total_mass(int side) const;
  // marginal / mass; where there is no mass, what it would be for a little.
  double marginal_ratio(int side, int64_t i) const { return ratio_[side][i]; }
  // The dual objective at the potentials, and what rounding may have added to it.
  double DualValue() const;
  double DualValueRounding() const;

 private:
  // SafeRows, SafeColumns: an iteration (or the start) of symmetric updates by log-sum-exps. Measure: a sweep that
  // changes nothing. VoidColumns: potentials of columns without mass, which no sweep could give.
  // HugeSums: what Measure could not sum.
  enum class Phase { kSafeRows, kSafeColumns, kSweep, kBadColumns, kVoidColumns, kMeasure, kHugeSums, kDone };

  bool sweeping() const { return phase_ == Phase::kSweep || phase_ == Phase::kMeasure; }
  bool symmetric() const { return solver_.update_rule == UpdateRule::kSymmetric; }
  bool at_target() const { return epsilon_ == solver_.epsilon; }
  double damping(int side) const { return 1 / (1 + epsilon_ / rho_[side]); }
  int64_t block_count() const;

  void Start(Phase phase);
  void StartIteration();
  bool SweepBlock(int64_t block, int64_t done, T* acc, double* error, Scratch* scratch);
  void MakeSafeRows(int64_t row, const int64_t* rows, T* out, double* sums, TE* e, TE* workspace);
  void SafeBlock(int64_t block, Scratch* scratch);
  double UpdateRows(int64_t row, const int64_t* rows, T* weight, bool* far);
  void MoveRows(int64_t row, const int64_t* rows, T* weight, T* out, TE* workspace);
  void KeepRows(int64_t row, const int64_t* rows);
  void RestoreRows();
  double Potential(int side, int64_t i) const;
  double NextPotential(int side, int64_t i) const;
  double Target(int side, int64_t i) const;
  double ErrorOf(int side, int64_t i, double ratio) const;

  void EndSweep();
  bool AccelerateColumns(bool sums_safe);
  void StopAtRows();
  void UpdateColumns();
  void ApplyScalings();
  void EndIteration();
  void EndMeasure();
  void MeasureHugeSums(int side);
  void Finish();
  void Potentials(int side, Buffer<double>* out) const;
  void Freeze(int side, const Buffer<double>& potential);
  void SetWeights(int side);
  void SetEpsilon(double epsilon);
  void Refreeze();
  bool Drifted() const;
  void StopIterating();

  const CostSource<TE, T>& cost_;
  const TransportKernels<TE, T>& kernels_ = GetTransportKernels<TE, T>();
  const SolverOptions solver_;
  const double rho_[2];
  bool use_cache_ = false;
  bool plain_ = false;  // Balanced and alternating: updates need no logarithm unless over-relaxed.
  double epsilon_ = 0;
  const bool accelerated_;
  Anderson anderson_;  // First; where it does not pay:
  Relaxation relaxation_;
  double relax_ = 1, previous_relax_ = 1;  // Of the sweep in progress and of the one before.

  Phase phase_ = Phase::kSweep;
  int side_ = 0;               // Whose rows the phase runs over.
  std::vector<int64_t> list_;  // Rows of a safe phase.
  int64_t slots_ = 1, chunk_blocks_ = 1, step_ = 0, steps_ = 1;
  bool safe_sweep_ = true;  // Frames tell nothing yet.
  bool cache_valid_ = false;
  bool cut_short_ = false;
  bool starting_ = false;  // Symmetric: the half steps from zero, not yet an iteration.
  double best_error_ = 0;
  int64_t best_iteration_ = 0;

  Buffer<T> mass_[2];  // [padded], as all that follow
  Buffer<double> mass64_[2];
  Buffer<TE> penalty_[2];    // 0, or kVoid where there is no mass
  Buffer<double> shift_[2];  // the cost's, * log2(e) / epsilon
  Buffer<double> frame_[2];
  Buffer<TE> term_[2];         // the same; kVoid where padded
  Buffer<T> scaling_[2];       // u, v
  Buffer<T> next_[2];          // those of the sweep in progress
  Buffer<T> weight_[2];        // mass * scaling; that of the rows is up to date outside sweeps
  Buffer<T> next_weight_;      // of the columns
  Buffer<double> pending_[2];  // potentials that a safe phase found
  Buffer<double> extrapolated_;
  Buffer<double> sums_[2];  // weighted sums of T over the other side
  Buffer<T> cache_;         // [padded rows, padded columns]
  Buffer<T> acc_;           // [slots, padded columns]
  std::vector<double> slot_error_;
  std::vector<char> slot_unsafe_;  // Symmetric: a row's sum left the safe range.
  std::vector<char> remade_;       // Per block: rows with new frames; their potentials before are in pending_.
  std::vector<int64_t> bad_columns_, void_columns_;
  Buffer<double> potential_[2], marginal_[2], ratio_[2];
  Convergence convergence_;
};

}  // namespace cpu
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CPU_TRANSPORT_ENGINE_H_
