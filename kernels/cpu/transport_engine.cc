#include "kernels/cpu/transport_engine.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace sinkhorn {
namespace cpu {
namespace {

constexpr double kLog2E = 1.4426950408889634074;
// Scalings stay within [1 / kDrift, kDrift]: what densities lose below 2^-126 stays below 2^-90.
constexpr double kDrift = 0x1p+36;
// Sums outside [kTiny, kHuge] may have lost entries that count.
constexpr double kTiny = 0x1p-60, kHuge = 0x1p+80;
constexpr double kScalingExponentMax = 100;
constexpr int64_t kSmallSlotPairs = 32768, kSmallSlotsMax = 4;
constexpr int64_t kSlotPairs = 65536, kSlotsMax = 64, kAccumulatorsMax = int64_t{1} << 24;
constexpr int64_t kChunkPairs = int64_t{1} << 20;
// STRICT stops when the residual has not fallen for this many iterations near its rounding level.
constexpr int64_t kStalledIterations = 200;
constexpr double kRoundingError = 1e-5;

// A scaling that stands for 2^exponent and stays finite.
template <typename T>
T ScalingOf(double exponent) {
  return static_cast<T>(std::exp2(std::min(std::max(exponent, -kScalingExponentMax), kScalingExponentMax)));
}

// False for NaN too.
bool IsSafe(double sum) { return sum > kTiny && sum < kHuge; }
bool IsNear(double scaling) { return scaling >= 1 / kDrift && scaling <= kDrift; }
bool IsRepresentable(double scaling) {
  constexpr double kMax = 0x1p+100;
  return scaling > 1 / kMax && scaling < kMax;
}

}  // namespace

template <typename TE, typename T>
TransportEngine<TE, T>::TransportEngine(const CostSource<TE, T>* cost, const EngineOptions& options)
    : cost_(*cost),
      solver_(options.solver),
      rho_{options.solver.rho_a, options.solver.rho_b},
      accelerated_(options.solver.over_relaxation && options.solver.tolerance > 0 && std::isinf(rho_[0]) &&
                   std::isinf(rho_[1]) && !symmetric()),
      anderson_(accelerated_),
      relaxation_(accelerated_) {
  epsilon_ = solver_.epsilon_decay > 0 ? std::max(solver_.epsilon, solver_.epsilon_start) : solver_.epsilon;
  for (int side = 0; side < 2; ++side) {
    const int64_t size = cost_.size(side), padded = cost_.padded(side);
    next_weight_.Resize(padded);
    for (auto* buffer : {&mass_[side], &scaling_[side], &next_[side], &weight_[side]}) buffer->Resize(padded);
    for (auto* buffer : {&mass64_[side], &shift_[side], &frame_[side], &pending_[side], &sums_[side]}) {
      buffer->Resize(padded);
    }
    for (auto* buffer : {&potential_[side], &marginal_[side], &ratio_[side]}) buffer->Resize(padded);
    penalty_[side].Resize(padded);
    term_[side].Resize(padded);
    for (int64_t i = 0; i < padded; ++i) {
      const double mass = i < size ? options.mass[side][i] : 0;
      mass_[side][i] = static_cast<T>(mass);
      mass64_[side][i] = mass;
      penalty_[side][i] = static_cast<TE>(mass > 0 ? 0 : kVoid);
      shift_[side][i] = cost_.shift(side)[i] * kLog2E / epsilon_;
      const double initial = i < size && options.initial[side] != nullptr ? options.initial[side][i] : 0;
      pending_[side][i] = initial * kLog2E / epsilon_ - shift_[side][i];
    }
    Freeze(side, pending_[side]);
  }
  const int64_t cache_size = RoundUp(cost_.size(0), kRowBlock) * cost_.padded(1);
  use_cache_ = cache_size * static_cast<int64_t>(sizeof(T)) <= options.cache_bytes;
  if (use_cache_) cache_.Allocate(cache_size);
  plain_ = std::isinf(rho_[0]) && std::isinf(rho_[1]) && !symmetric();
  if (accelerated_) extrapolated_.Resize(cost_.padded(1));
  remade_.assign(RoundUp(cost_.size(0), kRowBlock) / kRowBlock, 0);
  convergence_.stop_reason = StopReason::kMaxIterations;
  starting_ = symmetric() && options.initial[0] == nullptr && options.initial[1] == nullptr;
  StartIteration();
}

// ---- Phases and their chunks
// --------------------------------------------------------------------------------------------

template <typename TE, typename T>
int64_t TransportEngine<TE, T>::block_count() const {
  return RoundUp(sweeping() ? cost_.size(0) : static_cast<int64_t>(list_.size()), kRowBlock) / kRowBlock;
}

template <typename TE, typename T>
void TransportEngine<TE, T>::StartIteration() {
  previous_relax_ = relax_;
  relax_ = starting_ || anderson_.active() ? 1 : symmetric() ? 0.5 : relaxation_.TakeWeight();
  Start(symmetric() && safe_sweep_ ? Phase::kSafeRows : Phase::kSweep);
}

template <typename TE, typename T>
void TransportEngine<TE, T>::Start(Phase phase) {
  phase_ = phase;
  side_ = sweeping() || phase == Phase::kSafeRows ? 0 : 1;
  if (phase == Phase::kSafeRows || phase == Phase::kSafeColumns) {
    list_.resize(cost_.size(side_));
    for (size_t i = 0; i < list_.size(); ++i) list_[i] = i;
  }
  const int64_t columns = cost_.padded(1 - side_);
  const int64_t weight = 1 + (cache_valid_ && sweeping() ? 0 : cost_.dim() / 16);
  const int64_t chunk_blocks = std::max<int64_t>(1, kChunkPairs / weight / (kRowBlock * columns));
  step_ = 0;
  if (sweeping()) {
    // Slots own their rows and their column sums: cut by the shape alone.
    const int64_t pairs = cost_.size(0) * cost_.size(1);
    slots_ = std::max((pairs + kSlotPairs - 1) / kSlotPairs, std::min(pairs / kSmallSlotPairs, kSmallSlotsMax));
    slots_ = std::min({slots_, kSlotsMax, block_count(), std::max<int64_t>(1, kAccumulatorsMax / columns)});
    const int64_t slot_blocks = (block_count() + slots_ - 1) / slots_;
    chunk_blocks_ = std::min(chunk_blocks, slot_blocks);
    steps_ = (slot_blocks + chunk_blocks_ - 1) / chunk_blocks_;
    if (acc_.size() < slots_ * columns) acc_.Allocate(slots_ * columns);
    slot_error_.assign(slots_, 0);
    slot_unsafe_.assign(slots_, 0);
    std::fill(remade_.begin(), remade_.end(), 0);
  } else {
    chunk_blocks_ = std::min(chunk_blocks, block_count());
    slots_ = (block_count() + chunk_blocks_ - 1) / chunk_blocks_;
    steps_ = 1;
  }
}

template <typename TE, typename T>
int64_t TransportEngine<TE, T>::chunk_count() const {
  return finished() ? 0 : slots_;
}

template <typename TE, typename T>
void TransportEngine<TE, T>::RunChunk(int64_t chunk, Scratch* scratch) {
  if (!sweeping()) {
    const int64_t end = std::min(block_count(), (chunk + 1) * chunk_blocks_);
    for (int64_t block = chunk * chunk_blocks_; block < end; ++block) SafeBlock(block, scratch);
    return;
  }
  const int64_t columns = cost_.padded(1);
  T* acc = acc_.data() + chunk * columns;
  if (step_ == 0) std::fill(acc, acc + columns, T(0));
  const int64_t begin = chunk * block_count() / slots_ + step_ * chunk_blocks_;
  const int64_t end = std::min((chunk + 1) * block_count() / slots_, begin + chunk_blocks_);
  const bool measure = phase_ == Phase::kMeasure;
  const bool balanced = cache_valid_ && plain_ && (relax_ == 1 || measure);
  for (int64_t block = begin; block < end; ++block) {
    int64_t done = 0;
    if (balanced) {
      const int64_t row = block * kRowBlock, rows = std::min(cost_.size(0), end * kRowBlock) - row;
      done = kernels_.balanced_sweep(cache_.data() + row * columns, columns, rows, weight_[1].data(),
                                     scaling_[0].data() + row, mass_[0].data() + row, measure,
                                     measure ? -1 : 1 / kDrift, measure ? INFINITY : kHuge, sums_[0].data() + row,
                                     next_[0].data() + row, acc, &slot_error_[chunk]);
      if (done >= rows) return;
      block += done / kRowBlock;
      done %= kRowBlock;
    }
    if (!SweepBlock(block, done, acc, &slot_error_[chunk], scratch)) slot_unsafe_[chunk] = 1;
  }
}

template <typename TE, typename T>
void TransportEngine<TE, T>::EndPhase() {
  if (++step_ < steps_) return;
  switch (phase_) {
    case Phase::kSweep:
      return EndSweep();
    case Phase::kMeasure:
      return EndMeasure();
    case Phase::kSafeRows:
      return Start(Phase::kSafeColumns);
    case Phase::kSafeColumns:
      Freeze(0, pending_[0]);
      Freeze(1, pending_[1]);
      cache_valid_ = false;
      return EndIteration();
    case Phase::kBadColumns:
      return ApplyScalings();
    case Phase::kVoidColumns:
      for (int64_t j : void_columns_) {
        frame_[1][j] = term_[1][j] = static_cast<TE>(pending_[1][j]);
        scaling_[1][j] = ScalingOf<T>(pending_[1][j] - frame_[1][j]);
      }
      return Start(Phase::kMeasure);
    case Phase::kHugeSums:
      return side_ == 0 ? MeasureHugeSums(1) : Finish();
    case Phase::kDone:
      return;
  }
}

// ---- One block of rows
// --------------------------------------------------------------------------------------------------

// The block's first `done` rows (plain updates only) count already in `acc` and `error`. Returns false if a row's sum
// left the safe range and could not be mended here.
template <typename TE, typename T>
bool TransportEngine<TE, T>::SweepBlock(int64_t block, int64_t done, T* acc, double* error, Scratch* scratch) {
  const int64_t row = block * kRowBlock, columns = cost_.padded(1);
  int64_t rows[kRowBlock];
  for (int r = 0; r < kRowBlock; ++r) rows[r] = row + r < cost_.size(0) ? row + r : -1;
  TE* e = static_cast<TE*>(
      scratch->Get((cost_.block_size(0) + cost_.WorkspaceSize(0)) * sizeof(TE) + cost_.block_size(0) * sizeof(T)));
  TE* workspace = e + cost_.block_size(0);
  T* t = use_cache_ ? cache_.data() + row * columns : reinterpret_cast<T*>(workspace + cost_.WorkspaceSize(0));

  // 1. Densities and their row sums.
  double* sums = sums_[0].data() + row;
  const bool measure = phase_ == Phase::kMeasure;
  bool safe = false;
  if (cache_valid_) {
    kernels_.row_sums(t, columns, weight_[1].data(), sums);
  } else {
    cost_.Densities(0, rows, epsilon_, term_[0].data() + row, term_[1].data(), weight_[1].data(), t, sums, workspace);
  }
  for (int r = 0; r < kRowBlock && !safe && !measure; ++r) {
    safe = rows[r] >= 0 && !(sums[r] > 1 / kDrift && sums[r] < kHuge);  // So that u is near, too.
  }
  if (safe && symmetric()) return false;
  if (safe) MakeSafeRows(row, rows, t, sums, e, workspace);

  // 2. The new u, and how far the rows were from their marginals.
  T weight[kRowBlock];
  if (plain_ && (relax_ == 1 || measure)) {
    T mass[kRowBlock];
    for (int64_t r = 0; r < kRowBlock; ++r) mass[r] = r < done ? T(0) : mass_[0][row + r];
    *error += kernels_.balanced_rows(sums, scaling_[0].data() + row, mass, measure, next_[0].data() + row, weight);
  } else {
    bool far = false;
    *error += UpdateRows(row, rows, weight, &far);
    if (far && symmetric()) return false;
    if (far) MoveRows(row, rows, weight, t, workspace);
  }

  // 3. Column sums of the scaled rows.
  kernels_.add_columns(t, columns, weight, acc);
  return true;
}

// Returns the block's residual. `far`: new scalings are too far from their frames.
template <typename TE, typename T>
double TransportEngine<TE, T>::UpdateRows(int64_t row, const int64_t* rows, T* weight, bool* far) {
  const bool measure = phase_ == Phase::kMeasure, remade = remade_[row / kRowBlock];
  const T* u = scaling_[0].data() + row;
  T* next = next_[0].data() + row;
  double error = 0;
  if (!measure && !remade) {
    kernels_.update(kRowBlock, sums_[0].data() + row, u, frame_[0].data() + row, shift_[0].data() + row, damping(0),
                    relax_, next);
  }
  for (int r = 0; r < kRowBlock; ++r) {
    if (rows[r] < 0) {
      next[r] = 1;
      weight[r] = 0;
      continue;
    }
    if (!measure && remade) next[r] = ScalingOf<T>(NextPotential(0, row + r) - frame_[0][row + r]);
    if (!measure && !(symmetric() ? IsRepresentable(next[r]) : IsNear(next[r]))) *far = true;
    weight[r] = mass_[0][row + r] == 0 ? T(0) : mass_[0][row + r] * (measure || symmetric() ? u[r] : next[r]);
    error += ErrorOf(0, row + r, u[r] * sums_[0][row + r]);
  }
  return error;
}

// Alternating updates: makes rows around their own maxima. The frames become minus the maxima, whatever the potentials
// were.
template <typename TE, typename T>
void TransportEngine<TE, T>::MakeSafeRows(int64_t row, const int64_t* rows, T* out, double* sums, TE* e,
                                          TE* workspace) {
  const int64_t columns = cost_.padded(1);
  const TE zero[kRowBlock] = {};
  TE max[kRowBlock];
  cost_.Exponents(0, rows, epsilon_, zero, term_[1].data(), e, workspace);
  kernels_.row_max(e, columns, penalty_[1].data(), max);
  kernels_.exp_rows(e, columns, max, weight_[1].data(), out, sums);
  const bool first = convergence_.iterations == 0 && relax_ == 1;  // What was before does not matter.
  if (!first) KeepRows(row, rows);
  for (int r = 0; r < kRowBlock; ++r) {
    if (rows[r] < 0) continue;
    term_[0][row + r] = -max[r];
    frame_[0][row + r] = -max[r];
    if (!first) scaling_[0][row + r] = ScalingOf<T>(pending_[0][row + r] + max[r]);
  }
}

// Alternating updates: rows whose new scalings are far from 1 (a relaxed side moves a potential as far as it likes) get
// frames at their new potentials and are made again.
template <typename TE, typename T>
void TransportEngine<TE, T>::MoveRows(int64_t row, const int64_t* rows, T* weight, T* out, TE* workspace) {
  KeepRows(row, rows);
  for (int r = 0; r < kRowBlock; ++r) {
    T& next = next_[0][row + r];
    if (rows[r] < 0 || IsNear(next)) continue;
    const double potential = NextPotential(0, row + r);
    term_[0][row + r] = static_cast<TE>(potential);
    frame_[0][row + r] = term_[0][row + r];
    next = ScalingOf<T>(potential - frame_[0][row + r]);
    weight[r] = mass_[0][row + r] * next;
  }
  double sums[kRowBlock];
  cost_.Densities(0, rows, epsilon_, term_[0].data() + row, term_[1].data(), weight_[1].data(), out, sums, workspace);
}

// The block's rows get other frames in this sweep: their potentials before it are in pending_ from now on.
template <typename TE, typename T>
void TransportEngine<TE, T>::KeepRows(int64_t row, const int64_t* rows) {
  for (int r = 0; r < kRowBlock; ++r) {
    if (rows[r] >= 0) pending_[0][row + r] = Potential(0, row + r);
  }
  remade_[row / kRowBlock] = 1;
}

// Takes the sweep back that ran last, as far as frames go: the answer is what it began with.
template <typename TE, typename T>
void TransportEngine<TE, T>::RestoreRows() {
  if (std::count(remade_.begin(), remade_.end(), 0) == static_cast<int64_t>(remade_.size())) return;
  Buffer<double> potential(cost_.padded(0));
  for (int64_t i = 0; i < cost_.size(0); ++i) potential[i] = Potential(0, i);
  Freeze(0, potential);
  std::fill(remade_.begin(), remade_.end(), 0);
  cache_valid_ = false;
}

// Before the sweep in progress. Base 2, / epsilon.
template <typename TE, typename T>
double TransportEngine<TE, T>::Potential(int side, int64_t i) const {
  if (side == 0 && remade_[i / kRowBlock]) return pending_[0][i];
  return frame_[side][i] + std::log2(static_cast<double>(scaling_[side][i]));
}

// After it, from the sum.
template <typename TE, typename T>
double TransportEngine<TE, T>::NextPotential(int side, int64_t i) const {
  const double half_step = frame_[side][i] - std::log2(sums_[side][i]);
  const double damped = damping(side) * (half_step + shift_[side][i]) - shift_[side][i];
  if (relax_ == 1) return damped;
  const double old = Potential(side, i);
  return old + relax_ * (damped - old);
}

// Half steps of listed rows by a full log-sum-exp, into pending_.
template <typename TE, typename T>
void TransportEngine<TE, T>::SafeBlock(int64_t block, Scratch* scratch) {
  const int other = 1 - side_;
  const int64_t columns = cost_.padded(other);
  int64_t rows[kRowBlock];
  for (int64_t r = 0; r < kRowBlock; ++r) {
    const size_t index = block * kRowBlock + r;
    rows[r] = index < list_.size() ? list_[index] : -1;
  }
  TE* e = static_cast<TE*>(scratch->Get((cost_.block_size(side_) + cost_.WorkspaceSize(side_)) * sizeof(TE) +
                                        cost_.block_size(side_) * sizeof(T)));
  TE* workspace = e + cost_.block_size(side_);
  T* t = reinterpret_cast<T*>(workspace + cost_.WorkspaceSize(side_));
  const TE zero[kRowBlock] = {};
  TE max[kRowBlock];
  double sums[kRowBlock];
  cost_.Exponents(side_, rows, epsilon_, zero, term_[other].data(), e, workspace);
  kernels_.row_max(e, columns, penalty_[other].data(), max);
  kernels_.exp_rows(e, columns, max, weight_[other].data(), t, sums);
  const double relax = phase_ == Phase::kVoidColumns ? 1 : relax_;
  for (int r = 0; r < kRowBlock; ++r) {
    if (rows[r] < 0) continue;
    const int64_t i = rows[r];
    if (phase_ == Phase::kHugeSums) {
      ratio_[side_][i] = std::exp2(Potential(side_, i) + max[r] + std::log2(sums[r]));
      continue;
    }
    const double shift = shift_[side_][i];
    const double half_step = -max[r] - std::log2(sums[r]);
    const double damped = damping(side_) * (half_step + shift) - shift;
    const double old = relax == 1 ? 0 : Potential(side_, i);
    pending_[side_][i] = relax == 1 ? damped : old + relax * (damped - old);
  }
}

// What marginal / mass is at the optimum: 1; unbalanced: exp(-f / rho).
template <typename TE, typename T>
double TransportEngine<TE, T>::Target(int side, int64_t i) const {
  if (std::isinf(rho_[side])) return 1;
  return std::exp2(-(Potential(side, i) + shift_[side][i]) * epsilon_ / rho_[side]);
}

template <typename TE, typename T>
double TransportEngine<TE, T>::ErrorOf(int side, int64_t i, double ratio) const {
  return mass64_[side][i] == 0 ? 0 : mass64_[side][i] * std::abs(ratio - Target(side, i));
}

// ---- After a sweep
// ------------------------------------------------------------------------------------------------------

template <typename TE, typename T>
void TransportEngine<TE, T>::EndSweep() {
  double error[2] = {0, 0};
  for (double e : slot_error_) error[0] += e;
  const int64_t columns = cost_.padded(1);
  double range[2];
  kernels_.balanced_columns(columns, cost_.size(1), acc_.data(), slots_, columns, mass_[1].data(), sums_[1].data(),
                            next_[1].data(), next_weight_.data(), range);
  if (symmetric()) {
    for (int64_t j = 0; j < cost_.size(1); ++j) {
      if (mass_[1][j] > 0 && !IsSafe(sums_[1][j])) slot_unsafe_[0] = 1;
    }
    if (std::count(slot_unsafe_.begin(), slot_unsafe_.end(), 1) > 0) return Start(Phase::kSafeRows);
  }
  // The residual is that of the potentials the sweep began with. Alternating: their columns are exact from the first
  // iteration on, unless over-relaxed.
  const bool sums_safe = IsSafe(range[0]) && IsSafe(range[1]);
  const bool known = !safe_sweep_ && (symmetric() || convergence_.iterations > 0);
  if (anderson_.active()) {
    if (AccelerateColumns(sums_safe)) return;
  } else if (known) {
    if (symmetric()) {
      for (int64_t j = 0; j < cost_.size(1); ++j) error[1] += ErrorOf(1, j, scaling_[1][j] * sums_[1][j]);
    }
    convergence_.marginal_error_a = error[0];
    convergence_.marginal_error_b = error[1];
    const double worst = std::max(error[0], error[1]);
    relaxation_.Observe(worst / total_mass(0));
    if (solver_.tolerance > 0) {
      if (worst <= solver_.tolerance) {
        if (symmetric() || previous_relax_ == 1) {
          convergence_.stop_reason = StopReason::kTolerance;
          RestoreRows();
          return StopIterating();
        }
        relaxation_.Plain();
      }
      if (best_iteration_ == 0 || worst < 0.98 * best_error_) {
        best_error_ = worst;
        best_iteration_ = convergence_.iterations;
      } else if (sizeof(T) == sizeof(float) && worst < kRoundingError &&
                 convergence_.iterations > best_iteration_ + kStalledIterations) {
        convergence_.stop_reason = StopReason::kPrecision;
        RestoreRows();
        return StopIterating();
      }
    }
  }
  if (plain_ && relax_ == 1 && sums_safe) {  // The scalings are already there.
    void_columns_.clear();
    std::swap(scaling_[0], next_[0]);
    std::swap(scaling_[1], next_[1]);
    std::swap(weight_[1], next_weight_);
    cache_valid_ = use_cache_ && at_target() && !Drifted();
    if (!cache_valid_) Refreeze();
    return EndIteration();
  }
  if (!symmetric()) {  // Columns follow from the new u.
    std::swap(scaling_[0], next_[0]);
    SetWeights(0);
  }
  UpdateColumns();
}

// The rows are exact now, so the columns' sums tell the whole residual of the new u with the old v: at the tolerance
// that is the answer, measured already. Before, the columns' next potentials are extrapolated. Returns true if it has
// stopped.
template <typename TE, typename T>
bool TransportEngine<TE, T>::AccelerateColumns(bool sums_safe) {
  if (!at_target()) return false;
  if (!sums_safe) {
    anderson_.Skip();
    return false;
  }
  double error = 0;
  for (int64_t j = 0; j < cost_.size(1); ++j) error += mass64_[1][j] * std::abs(scaling_[1][j] * sums_[1][j] - 1);
  convergence_.marginal_error_a = 0;
  convergence_.marginal_error_b = error;
  if (error <= solver_.tolerance) {
    convergence_.stop_reason = StopReason::kTolerance;
    StopAtRows();
    return true;
  }
  Buffer<double>&from = pending_[1], &to = extrapolated_;
  Potentials(1, &from);
  kernels_.log_scaling(from.size(), next_[1].data(), frame_[1].data(), to.data());
  anderson_.Extrapolate(error / total_mass(1), mass64_[1], from, &to);
  // The kernel makes 2^(-shift - frame) with damping 0.
  for (double& potential : to) potential = -potential;
  kernels_.update(from.size(), sums_[1].data(), scaling_[1].data(), frame_[1].data(), to.data(), 0, 1, next_[1].data());
  for (int64_t j = 0; j < from.size(); ++j) next_weight_[j] = mass_[1][j] * next_[1][j];
  return false;
}

// The answer is the sweep's new u with the v it began with.
template <typename TE, typename T>
void TransportEngine<TE, T>::StopAtRows() {
  ++convergence_.iterations;
  std::swap(scaling_[0], next_[0]);
  for (int64_t j = 0; j < cost_.size(1); ++j) {
    if (mass_[1][j] == 0) scaling_[1][j] = next_[1][j];
    ratio_[1][j] = scaling_[1][j] * sums_[1][j];
  }
  for (int64_t i = 0; i < cost_.size(0); ++i) ratio_[0][i] = scaling_[0][i] * sums_[0][i];
  Finish();
}

template <typename TE, typename T>
void TransportEngine<TE, T>::UpdateColumns() {
  kernels_.update(cost_.padded(1), sums_[1].data(), scaling_[1].data(), frame_[1].data(), shift_[1].data(), damping(1),
                  relax_, next_[1].data());
  bad_columns_.clear();
  void_columns_.clear();
  list_.clear();
  for (int64_t j = 0; j < cost_.padded(1); ++j) {
    const bool safe = IsSafe(sums_[1][j]);
    if (safe && IsRepresentable(next_[1][j])) continue;
    if (j >= cost_.size(1)) {
      next_[1][j] = 1;
      continue;
    }
    if (safe) pending_[1][j] = NextPotential(1, j);
    next_[1][j] = 1;
    // Where there is no mass the last half step is enough, unless it is to be averaged with those before.
    const bool now = safe || mass_[1][j] > 0 || symmetric();
    (now ? bad_columns_ : void_columns_).push_back(j);
    if (now && !safe) list_.push_back(j);
  }
  if (list_.empty()) return ApplyScalings();
  Start(Phase::kBadColumns);
}

template <typename TE, typename T>
void TransportEngine<TE, T>::ApplyScalings() {
  if (symmetric()) std::swap(scaling_[0], next_[0]);
  std::swap(scaling_[1], next_[1]);
  cache_valid_ = use_cache_ && at_target() && bad_columns_.empty() && !Drifted();
  if (cache_valid_) {
    for (int side = 0; side < 2; ++side) SetWeights(side);
  } else {
    Refreeze();
  }
  bad_columns_.clear();
  EndIteration();
}

template <typename TE, typename T>
void TransportEngine<TE, T>::EndIteration() {
  safe_sweep_ = false;
  if (starting_) {
    starting_ = false;
    return StartIteration();
  }
  ++convergence_.iterations;
  if (!at_target()) SetEpsilon(std::max(solver_.epsilon, epsilon_ * solver_.epsilon_decay));
  if (convergence_.iterations >= solver_.max_iterations) return StopIterating();
  StartIteration();
}

template <typename TE, typename T>
void TransportEngine<TE, T>::StopIterating() {
  // The answer is for the epsilon that was asked for, also when annealing was cut short: potentials that no plan goes
  // with, perhaps.
  cut_short_ = !at_target();
  if (cut_short_) SetEpsilon(solver_.epsilon);
  SetWeights(0);
  if (!void_columns_.empty()) {
    list_ = void_columns_;
    return Start(Phase::kVoidColumns);
  }
  Start(Phase::kMeasure);
}

template <typename TE, typename T>
void TransportEngine<TE, T>::EndMeasure() {
  const int64_t columns = cost_.padded(1);
  for (int64_t i = 0; i < cost_.size(0); ++i) ratio_[0][i] = scaling_[0][i] * sums_[0][i];
  for (int64_t j = 0; j < cost_.size(1); ++j) {
    double sum = 0;
    for (int64_t slot = 0; slot < slots_; ++slot) sum += acc_[slot * columns + j];
    ratio_[1][j] = scaling_[1][j] * sum;
  }
  // Their potentials are exact half steps, which densities could not show.
  for (int64_t j : void_columns_) ratio_[1][j] = Target(1, j);
  MeasureHugeSums(0);
}

// Far from the solution densities may have saturated; sums of them are made by log-sum-exps.
template <typename TE, typename T>
void TransportEngine<TE, T>::MeasureHugeSums(int side) {
  list_.clear();
  for (int64_t i = 0; i < cost_.size(side); ++i) {
    if (!(ratio_[side][i] < kHuge)) list_.push_back(i);
  }
  if (list_.empty()) return side == 0 ? MeasureHugeSums(1) : Finish();
  Start(Phase::kHugeSums);
  side_ = side;
}

template <typename TE, typename T>
void TransportEngine<TE, T>::Finish() {
  double error[2] = {0, 0};
  for (int side = 0; side < 2; ++side) {
    for (int64_t i = 0; i < cost_.size(side); ++i) error[side] += ErrorOf(side, i, ratio_[side][i]);
  }
  convergence_.marginal_error_a = error[0];
  convergence_.marginal_error_b = error[1];
  convergence_.converged = std::max(error[0], error[1]) <= solver_.tolerance;
  for (int side = 0; side < 2; ++side) {
    Potentials(side, &pending_[side]);
    Freeze(side, pending_[side]);
    for (int64_t i = 0; i < cost_.size(side); ++i) {
      marginal_[side][i] = mass64_[side][i] == 0 ? 0 : mass64_[side][i] * ratio_[side][i];
      potential_[side][i] = (pending_[side][i] + shift_[side][i]) * epsilon_ / kLog2E;
    }
  }
  cache_ = Buffer<T>();
  acc_ = Buffer<T>();
  phase_ = Phase::kDone;
}

// ---- Frames
// -------------------------------------------------------------------------------------------------------------

template <typename TE, typename T>
void TransportEngine<TE, T>::Potentials(int side, Buffer<double>* out) const {
  if (out->size() != cost_.padded(side)) out->Resize(cost_.padded(side));
  kernels_.log_scaling(cost_.padded(side), scaling_[side].data(), frame_[side].data(), out->data());
}

template <typename TE, typename T>
void TransportEngine<TE, T>::Freeze(int side, const Buffer<double>& potential) {
  kernels_.freeze(cost_.padded(side), cost_.size(side), potential.data(), term_[side].data(), frame_[side].data(),
                  scaling_[side].data());
  SetWeights(side);
}

template <typename TE, typename T>
void TransportEngine<TE, T>::SetWeights(int side) {
  for (int64_t i = 0; i < cost_.padded(side); ++i) {
    weight_[side][i] = mass_[side][i] == 0 ? T(0) : mass_[side][i] * scaling_[side][i];
  }
}

// Frames at the present potentials.
template <typename TE, typename T>
void TransportEngine<TE, T>::Refreeze() {
  Buffer<double> potential;
  Potentials(0, &potential);
  Freeze(0, potential);
  Potentials(1, &potential);
  for (int64_t j : bad_columns_) potential[j] = pending_[1][j];
  Freeze(1, potential);
}

// Potentials keep their values in units of the cost.
template <typename TE, typename T>
void TransportEngine<TE, T>::SetEpsilon(double epsilon) {
  const double ratio = epsilon_ / epsilon;
  epsilon_ = epsilon;
  Buffer<double> potential;
  for (int side = 0; side < 2; ++side) {
    Potentials(side, &potential);
    for (double& value : potential) value *= ratio;
    for (double& value : shift_[side]) value *= ratio;
    Freeze(side, potential);
  }
  cache_valid_ = false;
  safe_sweep_ = true;
}

template <typename TE, typename T>
bool TransportEngine<TE, T>::Drifted() const {
  for (int side = 0; side < 2; ++side) {
    if (!kernels_.within(cost_.size(side), scaling_[side].data(), T(1 / kDrift), T(kDrift))) return true;
  }
  return false;
}

// ---- Results
// ------------------------------------------------------------------------------------------------------------

template <typename TE, typename T>
bool TransportEngine<TE, T>::finite() const {
  for (int side = 0; side < 2; ++side) {
    for (int64_t i = 0; i < cost_.size(side); ++i) {
      if (!std::isfinite(potential_[side][i]) || std::isnan(ratio_[side][i])) return false;
      if (std::isinf(ratio_[side][i]) && !cut_short_) return false;
    }
  }
  return true;
}

template <typename TE, typename T>
void TransportEngine<TE, T>::PlanRows(int side, const int64_t* rows, T* plan, double* sums, TE* workspace) const {
  const int other = 1 - side;
  TE row_term[kRowBlock];
  T row_weight[kRowBlock];
  for (int r = 0; r < kRowBlock; ++r) {
    row_term[r] = rows[r] < 0 ? static_cast<TE>(kVoid) : term_[side][rows[r]];
    row_weight[r] = rows[r] < 0 ? T(0) : weight_[side][rows[r]];
  }
  cost_.Densities(side, rows, epsilon_, row_term, term_[other].data(), weight_[other].data(), plan, sums, workspace);
  kernels_.scale(plan, cost_.padded(other), row_weight, weight_[other].data(), sums);
}

template <typename TE, typename T>
double TransportEngine<TE, T>::total_mass(int side) const {
  double sum = 0;
  for (double mass : mass64_[side]) sum += mass;
  return sum;
}

// <a, f> + <b, g> - eps (sum P - mass_a mass_b); unbalanced: rho (1 - exp(-f / rho)) in place of f.
template <typename TE, typename T>
double TransportEngine<TE, T>::DualValue() const {
  double value = epsilon_ * total_mass(0) * total_mass(1), plan_mass = 0;
  for (int side = 0; side < 2; ++side) {
    for (int64_t i = 0; i < cost_.size(side); ++i) {
      const double f = potential_[side][i], rho = rho_[side];
      if (mass64_[side][i] > 0) value += mass64_[side][i] * (std::isinf(rho) ? f : -rho * std::expm1(-f / rho));
      if (side == 0) plan_mass += marginal_[0][i];
    }
  }
  return value - epsilon_ * plan_mass;
}

// The objective is exact for the potentials but for the mass of P: an exponent is a sum of rounded terms, and
// densities, weights and sums are rounded too.
template <typename TE, typename T>
double TransportEngine<TE, T>::DualValueRounding() const {
  constexpr double kExponent = sizeof(TE) == sizeof(float) ? 0x1p-21 : 0x1p-49;
  constexpr double kDensity = sizeof(T) == sizeof(float) ? 2e-6 : 1e-13;
  double plan_mass = 0, terms = epsilon_ * total_mass(0) * total_mass(1), largest[2] = {0, 0};
  for (int side = 0; side < 2; ++side) {
    for (int64_t i = 0; i < cost_.size(side); ++i) {
      largest[side] = std::max(largest[side], std::abs(pending_[side][i]));
      terms += std::abs(mass64_[side][i] * potential_[side][i]);
      if (side == 0) plan_mass += marginal_[0][i];
    }
  }
  return epsilon_ * plan_mass * (kExponent * (largest[0] + largest[1]) + kDensity) + 1e-13 * terms;
}

template class TransportEngine<float, float>;
template class TransportEngine<double, float>;
template class TransportEngine<double, double>;

}  // namespace cpu
}  // namespace sinkhorn
