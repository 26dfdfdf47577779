#include "kernels/cpu/transport_engine.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/cpu/transport_blocks.h"

namespace sinkhorn::cpu {
namespace {

constexpr int64_t kSmallSlotPairs = 32768, kSmallSlotsMax = 4;
constexpr int64_t kSlotPairs = 65536, kSlotsMax = 64, kAccumulatorsMax = int64_t{1} << 24;
constexpr int64_t kChunkPairs = int64_t{1} << 20;
// STRICT stops when the residual has not fallen for this many iterations near its rounding level.
constexpr int64_t kStalledIterations = 200;
constexpr double kRoundingError = 1e-5;

// Both sides' potentials may share a large constant, of opposite signs, beside which rounding to TE would leave nothing
// of them: then it moves into the shifts. Whether it did.
template <typename TE, typename T>
bool Recentre(TransportState<TE, T>* state, Buffer<double>* f, Buffer<double>* g) {
  constexpr double kLarge = sizeof(TE) == sizeof(float) ? 0x1p20 : 0x1p40;
  // Alternating updates begin with g alone.
  const double shared = state->symmetric ? ((*f)[0] - (*g)[0]) / 2 : -(*g)[0];
  if (!(std::abs(shared) > kLarge) || std::isinf(shared)) return false;
  for (int side = 0; side < 2; ++side) {
    const double own = side == 0 ? shared : -shared;
    for (double& potential : side == 0 ? *f : *g) potential -= own;
    for (double& shift : state->side[side].shift) shift += own;
  }
  return true;
}

}  // namespace

template <typename TE, typename T>
TransportEngine<TE, T>::TransportEngine(const CostSource<TE, T>* cost, const EngineOptions& options)
    : cost_(*cost),
      solver_(options.solver),
      state_(cost, solver_.update_rule == UpdateRule::kSymmetric),
      x_(state_.side[0]),
      y_(state_.side[1]),
      accelerated_(solver_.over_relaxation && solver_.tolerance > 0 && std::isinf(solver_.rho_a) &&
                   std::isinf(solver_.rho_b) && !state_.symmetric),
      anderson_(accelerated_),
      relaxation_(accelerated_) {
  state_.epsilon = solver_.epsilon_decay > 0 ? std::max(solver_.epsilon, solver_.epsilon_start) : solver_.epsilon;
  for (int side = 0; side < 2; ++side) {
    state_.side[side].Init(cost_.size(side), options.mass[side], options.initial[side], cost_.shift(side),
                           state_.epsilon, side == 0 ? solver_.rho_a : solver_.rho_b);
  }
  if (Recentre(&state_, &x_.pending, &y_.pending)) {
    for (TransportSide<TE, T>& s : state_.side) s.Freeze(s.pending);
  }
  state_.plain = state_.balanced() && !state_.symmetric;
  next_weight_.Resize(cost_.padded(1));
  const int64_t cache_size = RoundUp(cost_.size(0), kRowBlock) * cost_.padded(1);
  use_cache_ = cache_size * static_cast<int64_t>(sizeof(T)) <= options.cache_bytes;
  if (use_cache_) state_.cache.Allocate(cache_size);
  if (accelerated_) extrapolated_.Resize(cost_.padded(1));
  state_.remade.assign(RoundUp(cost_.size(0), kRowBlock) / kRowBlock, 0);
  answer_.convergence.stop_reason = StopReason::kMaxIterations;
  starting_ = state_.symmetric && options.initial[0] == nullptr && options.initial[1] == nullptr;
  StartIteration();
}

// ---- Phases and their chunks ----------------------------------------------------------------------------------------

template <typename TE, typename T>
int64_t TransportEngine<TE, T>::block_count() const {
  return RoundUp(sweeping() ? cost_.size(0) : static_cast<int64_t>(list_.size()), kRowBlock) / kRowBlock;
}

template <typename TE, typename T>
void TransportEngine<TE, T>::StartIteration() {
  previous_relax_ = state_.relax;
  state_.relax = starting_ || anderson_.active() ? 1 : state_.symmetric ? 0.5 : relaxation_.TakeWeight();
  state_.first = convergence().iterations == 0 && state_.relax == 1;
  Start(state_.symmetric && safe_sweep_ ? Phase::kSafeRows : Phase::kSweep);
}

template <typename TE, typename T>
void TransportEngine<TE, T>::Start(Phase phase) {
  phase_ = phase;
  side_ = sweeping() || phase == Phase::kSafeRows ? 0 : 1;
  state_.measures = phase == Phase::kMeasure;
  if (phase == Phase::kSafeRows || phase == Phase::kSafeColumns) {
    list_.resize(cost_.size(side_));
    for (size_t i = 0; i < list_.size(); ++i) list_[i] = i;
  }
  const int64_t weight = 1 + (state_.cache_valid && sweeping() ? 0 : cost_.dim() / 16);
  chunk_blocks_ = std::max<int64_t>(1, kChunkPairs / weight / (kRowBlock * cost_.padded(1 - side_)));
  step_ = 0;
  if (sweeping()) return CutSweep();
  chunk_blocks_ = std::min(chunk_blocks_, block_count());
  slots_ = (block_count() + chunk_blocks_ - 1) / chunk_blocks_;
  steps_ = 1;
}

// Slots own their rows and their column sums: cut by the shape alone.
template <typename TE, typename T>
void TransportEngine<TE, T>::CutSweep() {
  const int64_t columns = cost_.padded(1), pairs = cost_.size(0) * cost_.size(1);
  slots_ = std::max((pairs + kSlotPairs - 1) / kSlotPairs, std::min(pairs / kSmallSlotPairs, kSmallSlotsMax));
  slots_ = std::min({slots_, kSlotsMax, block_count(), std::max<int64_t>(1, kAccumulatorsMax / columns)});
  const int64_t slot_blocks = (block_count() + slots_ - 1) / slots_;
  chunk_blocks_ = std::min(chunk_blocks_, slot_blocks);
  steps_ = (slot_blocks + chunk_blocks_ - 1) / chunk_blocks_;
  if (acc_.size() < slots_ * columns) acc_.Allocate(slots_ * columns);
  slot_error_.assign(slots_, 0);
  slot_unsafe_.assign(slots_, 0);
  std::fill(state_.remade.begin(), state_.remade.end(), 0);
}

template <typename TE, typename T>
void TransportEngine<TE, T>::RunChunk(int64_t chunk, Scratch* scratch) {
  if (!sweeping()) {
    const int64_t end = std::min(block_count(), (chunk + 1) * chunk_blocks_);
    for (int64_t block = chunk * chunk_blocks_; block < end; ++block) SafeBlock(block, scratch);
    return;
  }
  T* acc = acc_.data() + chunk * cost_.padded(1);
  if (step_ == 0) std::fill(acc, acc + cost_.padded(1), T(0));
  const int64_t begin = chunk * block_count() / slots_ + step_ * chunk_blocks_;
  const int64_t end = std::min((chunk + 1) * block_count() / slots_, begin + chunk_blocks_);
  if (!SweepBlocks(&state_, begin, end, acc, &slot_error_[chunk], scratch)) slot_unsafe_[chunk] = 1;
}

// Half steps of listed rows by a full log-sum-exp, into pending.
template <typename TE, typename T>
void TransportEngine<TE, T>::SafeBlock(int64_t block, Scratch* scratch) {
  TransportSide<TE, T>& s = state_.side[side_];
  int64_t rows[kRowBlock];
  for (int64_t r = 0; r < kRowBlock; ++r) {
    const size_t index = block * kRowBlock + r;
    rows[r] = index < list_.size() ? list_[index] : -1;
  }
  TE max[kRowBlock];
  double sums[kRowBlock];
  LogSumExps(state_, side_, rows, max, sums, scratch);
  const double relax = phase_ == Phase::kVoidColumns ? 1 : state_.relax;
  for (int r = 0; r < kRowBlock; ++r) {
    if (rows[r] < 0) continue;
    const int64_t i = rows[r];
    if (phase_ == Phase::kExtremeSums) {
      answer_.side[side_].ratio[i] = std::exp2(state_.Potential(side_, i) + max[r] + std::log2(sums[r]));
      continue;
    }
    const double half_step = -max[r] - std::log2(sums[r]);
    const double damped = s.Damping(state_.epsilon) * (half_step + s.shift[i]) - s.shift[i];
    const double old = relax == 1 ? 0 : state_.Potential(side_, i);
    s.pending[i] = relax == 1 ? damped : old + relax * (damped - old);
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
      Recentre(&state_, &x_.pending, &y_.pending);
      for (TransportSide<TE, T>& s : state_.side) s.Freeze(s.pending);
      state_.cache_valid = false;
      return EndIteration();
    case Phase::kBadColumns:
      return ApplyScalings();
    case Phase::kVoidColumns:
      for (int64_t j : void_columns_) {
        y_.frame[j] = y_.term[j] = static_cast<TE>(y_.pending[j]);
        y_.scaling[j] = ScalingOf<T>(y_.pending[j] - y_.frame[j]);
      }
      return Start(Phase::kMeasure);
    case Phase::kExtremeSums:
      return side_ == 0 ? MeasureExtremeSums(1) : Finish();
    case Phase::kDone:
      return;
  }
}

// ---- After a sweep --------------------------------------------------------------------------------------------------

template <typename TE, typename T>
void TransportEngine<TE, T>::EndSweep() {
  double error[2] = {0, 0};
  for (double e : slot_error_) error[0] += e;
  const int64_t columns = cost_.padded(1);
  double range[2];
  kernels_.balanced_columns(columns, y_.size, acc_.data(), slots_, columns, y_.mass.data(), y_.sums.data(),
                            y_.next.data(), next_weight_.data(), range);
  if (state_.symmetric) {
    for (int64_t j = 0; j < y_.size; ++j) {
      if (y_.mass[j] > 0 && !IsSafe(y_.sums[j])) slot_unsafe_[0] = 1;
    }
    if (std::count(slot_unsafe_.begin(), slot_unsafe_.end(), 1) > 0) return Start(Phase::kSafeRows);
  }
  // The residual is that of the potentials the sweep began with. Alternating: their columns are exact from the first
  // iteration on, unless over-relaxed.
  const bool sums_safe = IsSafe(range[0]) && IsSafe(range[1]);
  const bool known = !safe_sweep_ && (state_.symmetric || convergence().iterations > 0) && at_target();
  if (anderson_.active()) {
    if (AccelerateColumns(sums_safe)) return;
  } else if (known) {
    for (int64_t j = 0; state_.symmetric && j < y_.size; ++j) {
      error[1] += state_.ErrorOf(1, j, y_.scaling[j] * y_.sums[j]);
    }
    if (ShouldStop(error)) {
      state_.RestoreRows();
      return StopIterating();
    }
  }
  if (state_.plain && state_.relax == 1 && sums_safe) {  // The scalings are already there.
    void_columns_.clear();
    std::swap(x_.scaling, x_.next);
    std::swap(y_.scaling, y_.next);
    std::swap(y_.weight, next_weight_);
    KeepOrRefreeze(true);
    return EndIteration();
  }
  if (!state_.symmetric) {  // Columns follow from the new u.
    std::swap(x_.scaling, x_.next);
    x_.SetWeights();
  }
  UpdateColumns();
}

// Tells the errors of the potentials that the sweep began with, and why they are the answer.
template <typename TE, typename T>
bool TransportEngine<TE, T>::ShouldStop(const double* error) {
  Convergence& c = answer_.convergence;
  c.marginal_error_a = error[0];
  c.marginal_error_b = error[1];
  const double worst = std::max(error[0], error[1]);
  relaxation_.Observe(worst / x_.total_mass);
  if (!(solver_.tolerance > 0)) return false;
  if (worst <= solver_.tolerance) {
    if (state_.symmetric || previous_relax_ == 1) {
      c.stop_reason = StopReason::kTolerance;
      return true;
    }
    relaxation_.Plain();
  }
  if (best_iteration_ == 0 || worst < 0.98 * best_error_) {
    best_error_ = worst;
    best_iteration_ = c.iterations;
  } else if (sizeof(T) == sizeof(float) && worst < kRoundingError &&
             c.iterations > best_iteration_ + kStalledIterations) {
    c.stop_reason = StopReason::kPrecision;
    return true;
  }
  return false;
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
  for (int64_t j = 0; j < y_.size; ++j) error += y_.mass64[j] * std::abs(y_.scaling[j] * y_.sums[j] - 1);
  answer_.convergence.marginal_error_a = 0;
  answer_.convergence.marginal_error_b = error;
  if (error <= solver_.tolerance) {
    answer_.convergence.stop_reason = StopReason::kTolerance;
    StopAtRows();
    return true;
  }
  Buffer<double>&from = y_.pending, &to = extrapolated_;
  y_.Potentials(&from);
  kernels_.log_scaling(from.size(), y_.next.data(), y_.frame.data(), to.data());
  anderson_.Extrapolate(error / y_.total_mass, y_.mass64, from, &to);
  // The kernel makes 2^(-shift - frame) with damping 0.
  for (double& potential : to) potential = -potential;
  kernels_.update(from.size(), y_.sums.data(), y_.scaling.data(), y_.frame.data(), to.data(), 0, 1, y_.next.data());
  for (int64_t j = 0; j < from.size(); ++j) next_weight_[j] = y_.mass[j] * y_.next[j];
  return false;
}

// The answer is the sweep's new u with the v it began with.
template <typename TE, typename T>
void TransportEngine<TE, T>::StopAtRows() {
  ++answer_.convergence.iterations;
  std::swap(x_.scaling, x_.next);
  for (int side = 0; side < 2; ++side) answer_.side[side].ratio.Resize(cost_.padded(side));
  for (int64_t j = 0; j < y_.size; ++j) {
    if (y_.mass[j] == 0) y_.scaling[j] = y_.next[j];
    answer_.side[1].ratio[j] = y_.scaling[j] * y_.sums[j];
  }
  for (int64_t i = 0; i < x_.size; ++i) answer_.side[0].ratio[i] = x_.scaling[i] * x_.sums[i];
  Finish();
}

template <typename TE, typename T>
void TransportEngine<TE, T>::UpdateColumns() {
  kernels_.update(cost_.padded(1), y_.sums.data(), y_.scaling.data(), y_.frame.data(), y_.shift.data(),
                  y_.Damping(state_.epsilon), state_.relax, y_.next.data());
  bad_columns_.clear();
  void_columns_.clear();
  list_.clear();
  for (int64_t j = 0; j < cost_.padded(1); ++j) {
    const bool safe = IsSafe(y_.sums[j]);
    if (safe && IsRepresentable(y_.next[j])) continue;
    if (j >= y_.size) {
      y_.next[j] = 1;
      continue;
    }
    if (safe) y_.pending[j] = state_.NextPotential(1, j);
    y_.next[j] = 1;
    // Where there is no mass the last half step is enough, unless it is to be averaged with those before.
    const bool now = safe || y_.mass[j] > 0 || state_.symmetric;
    (now ? bad_columns_ : void_columns_).push_back(j);
    if (now && !safe) list_.push_back(j);
  }
  if (list_.empty()) return ApplyScalings();
  Start(Phase::kBadColumns);
}

template <typename TE, typename T>
void TransportEngine<TE, T>::ApplyScalings() {
  if (state_.symmetric) std::swap(x_.scaling, x_.next);
  std::swap(y_.scaling, y_.next);
  KeepOrRefreeze(bad_columns_.empty());
  if (state_.cache_valid) {
    for (TransportSide<TE, T>& s : state_.side) s.SetWeights();
  }
  bad_columns_.clear();
  EndIteration();
}

// Goes on with the cached densities if they may be kept, or with frames at the present potentials.
template <typename TE, typename T>
void TransportEngine<TE, T>::KeepOrRefreeze(bool keep) {
  state_.cache_valid = keep && use_cache_ && at_target() && !x_.Drifted() && !y_.Drifted();
  if (state_.cache_valid) return;
  Buffer<double> f, g;
  x_.Potentials(&f);
  y_.Potentials(&g);
  for (int64_t j : bad_columns_) g[j] = y_.pending[j];
  if (state_.symmetric) Recentre(&state_, &f, &g);
  x_.Freeze(f);
  y_.Freeze(g);
}

template <typename TE, typename T>
void TransportEngine<TE, T>::EndIteration() {
  safe_sweep_ = false;
  if (starting_) {
    starting_ = false;
    return StartIteration();
  }
  ++answer_.convergence.iterations;
  if (!at_target()) SetEpsilon(std::max(solver_.epsilon, state_.epsilon * solver_.epsilon_decay));
  if (convergence().iterations >= solver_.max_iterations) return StopIterating();
  StartIteration();
}

template <typename TE, typename T>
void TransportEngine<TE, T>::SetEpsilon(double epsilon) {
  state_.SetEpsilon(epsilon);
  safe_sweep_ = true;
}

// ---- The end --------------------------------------------------------------------------------------------------------

template <typename TE, typename T>
void TransportEngine<TE, T>::StopIterating() {
  // The answer is for the epsilon that was asked for, also when annealing was cut short: potentials that no plan goes
  // with, perhaps.
  answer_.cut_short = !at_target();
  if (answer_.cut_short) SetEpsilon(solver_.epsilon);
  x_.SetWeights();
  if (!void_columns_.empty()) {
    list_ = void_columns_;
    return Start(Phase::kVoidColumns);
  }
  Start(Phase::kMeasure);
}

template <typename TE, typename T>
void TransportEngine<TE, T>::EndMeasure() {
  const int64_t columns = cost_.padded(1);
  for (int side = 0; side < 2; ++side) answer_.side[side].ratio.Resize(cost_.padded(side));
  for (int64_t i = 0; i < x_.size; ++i) answer_.side[0].ratio[i] = x_.scaling[i] * x_.sums[i];
  for (int64_t j = 0; j < y_.size; ++j) {
    double sum = 0;
    for (int64_t slot = 0; slot < slots_; ++slot) sum += acc_[slot * columns + j];
    answer_.side[1].ratio[j] = y_.scaling[j] * sum;
  }
  // Their potentials are exact half steps, which densities could not show.
  for (int64_t j : void_columns_) answer_.side[1].ratio[j] = state_.Target(1, j);
  MeasureExtremeSums(0);
}

// Far from the solution densities may have saturated, and those of light rows, whose scalings are up to 1 / kDrift on
// either side, may have been flushed: such sums are made by log-sum-exps.
template <typename TE, typename T>
void TransportEngine<TE, T>::MeasureExtremeSums(int side) {
  constexpr double kLight = sizeof(T) == sizeof(float) ? 0x1p-30 : 0x1p-890;  // Smallest number * kDrift^2 / rounding.
  list_.clear();
  for (int64_t i = 0; i < cost_.size(side); ++i) {
    const double ratio = answer_.side[side].ratio[i];
    if (!(ratio >= kLight && ratio < kHuge)) list_.push_back(i);
  }
  if (list_.empty()) return side == 0 ? MeasureExtremeSums(1) : Finish();
  Start(Phase::kExtremeSums);
  side_ = side;
}

template <typename TE, typename T>
void TransportEngine<TE, T>::Finish() {
  Convergence& c = answer_.convergence;
  c.marginal_error_a = state_.TotalError(0, answer_.side[0].ratio);
  c.marginal_error_b = state_.TotalError(1, answer_.side[1].ratio);
  c.converged = std::max(c.marginal_error_a, c.marginal_error_b) <= solver_.tolerance;
  // What stopped it differs from these by rounding.
  if (c.stop_reason == StopReason::kTolerance && !c.converged) c.stop_reason = StopReason::kPrecision;
  answer_.epsilon = state_.epsilon;
  answer_.exponent_rounding = sizeof(TE) == sizeof(float) ? 0x1p-21 : 0x1p-49;
  answer_.density_rounding = sizeof(T) == sizeof(float) ? 2e-6 : 1e-13;
  const double unit = state_.epsilon / kLog2E;
  for (int side = 0; side < 2; ++side) {
    TransportSide<TE, T>& s = state_.side[side];
    TransportAnswer::Side& out = answer_.side[side];
    s.Potentials(&s.pending);
    s.Freeze(s.pending);
    out.size = s.size;
    out.rho = s.rho;
    out.total_mass = s.total_mass;
    out.mass = std::move(s.mass64);
    out.potential.Resize(cost_.padded(side));
    out.marginal.Resize(cost_.padded(side));
    for (int64_t i = 0; i < s.size; ++i) {
      out.marginal[i] = out.mass[i] == 0 ? 0 : out.mass[i] * out.ratio[i];
      out.potential[i] = (s.pending[i] + s.shift[i]) * unit;
    }
    out.exponent = std::move(s.pending);
  }
  std::fill(state_.remade.begin(), state_.remade.end(), 0);  // All frames are at the answer.
  state_.cache = Buffer<T>();
  acc_ = Buffer<T>();
  phase_ = Phase::kDone;
}

template class TransportEngine<float, float>;
template class TransportEngine<double, float>;
template class TransportEngine<double, double>;

}  // namespace sinkhorn::cpu
