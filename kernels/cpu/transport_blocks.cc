#include "kernels/cpu/transport_blocks.h"

#include <algorithm>
#include <cmath>

namespace sinkhorn::cpu {
namespace {

// Scratch of a block: exponents, the cost's workspace and densities.
template <typename TE, typename T>
struct BlockMemory {
  BlockMemory(const CostSource<TE, T>& cost, int side, Scratch* scratch) {
    const int64_t block = cost.block_size(side), work = cost.WorkspaceSize(side);
    e = static_cast<TE*>(scratch->Get((block + work) * sizeof(TE) + block * sizeof(T)));
    workspace = e + block;
    t = reinterpret_cast<T*>(workspace + work);
  }
  TE* e;
  TE* workspace;
  T* t;
};

// Rows of a block that go through the general updates.
template <typename TE, typename T>
class BlockSweep {
 public:
  // The block from `row` on. Its first `done` rows (plain updates only) count already in `acc` and the error.
  BlockSweep(TransportState<TE, T>* state, int64_t row, int64_t done, Scratch* scratch)
      : s_(*state), x_(state->side[0]), y_(state->side[1]), row_(row), done_(done), memory_(s_.cost, 0, scratch) {
    for (int r = 0; r < kRowBlock; ++r) rows_[r] = row + r < x_.size ? row + r : -1;
    if (s_.cache.size() > 0) memory_.t = s_.cache.data() + row * s_.cost.padded(1);
  }

  // Returns false if a row's sum left the safe range and could not be mended here.
  bool Run(T* acc, double* error) {
    // 1. Densities and their row sums.
    if (s_.cache_valid) {
      s_.kernels.row_sums(memory_.t, s_.cost.padded(1), y_.weight.data(), sums());
    } else {
      MakeDensities(sums());
    }
    const bool make_safe = !s_.measures && NeedsMaxima();
    if (make_safe && s_.symmetric) return false;
    if (make_safe) MakeSafeRows();

    // 2. The new u, and how far the rows were from their marginals.
    T weight[kRowBlock];
    if (s_.plain && (s_.relax == 1 || s_.measures)) {
      T mass[kRowBlock];
      for (int64_t r = 0; r < kRowBlock; ++r) mass[r] = r < done_ ? T(0) : x_.mass[row_ + r];
      *error +=
          s_.kernels.balanced_rows(sums(), x_.scaling.data() + row_, mass, s_.measures, x_.next.data() + row_, weight);
    } else {
      bool far = false;
      *error += UpdateRows(weight, &far);
      if (far && s_.symmetric) return false;
      if (far) MoveRows(weight);
    }

    // 3. Column sums of the scaled rows.
    s_.kernels.add_columns(memory_.t, s_.cost.padded(1), weight, acc);
    return true;
  }

 private:
  double* sums() { return x_.sums.data() + row_; }

  void MakeDensities(double* sums) {
    s_.cost.Densities(0, rows_, s_.epsilon, x_.term.data() + row_, y_.term.data(), y_.weight.data(), memory_.t, sums,
                      memory_.workspace);
  }

  // Sums too large or small: their inverses are to be near 1, too.
  bool NeedsMaxima() {
    for (int r = 0; r < kRowBlock; ++r) {
      if (rows_[r] >= 0 && !(sums()[r] > 1 / kDrift && sums()[r] < kHuge)) return true;
    }
    return false;
  }

  // Alternating updates: makes rows around their own maxima. The frames become minus the maxima, whatever the
  // potentials were.
  void MakeSafeRows() {
    const int64_t columns = s_.cost.padded(1);
    const TE zero[kRowBlock] = {};
    TE max[kRowBlock];
    s_.cost.Exponents(0, rows_, s_.epsilon, zero, y_.term.data(), memory_.e, memory_.workspace);
    s_.kernels.row_max(memory_.e, columns, y_.penalty.data(), max);
    s_.kernels.exp_rows(memory_.e, columns, max, y_.weight.data(), memory_.t, sums());
    if (!s_.first) s_.KeepRows(row_);
    for (int r = 0; r < kRowBlock; ++r) {
      if (rows_[r] < 0) continue;
      x_.term[row_ + r] = -max[r];
      x_.frame[row_ + r] = -max[r];
      if (!s_.first) x_.scaling[row_ + r] = ScalingOf<T>(x_.pending[row_ + r] + max[r]);
    }
  }

  // Returns the block's residual. `far`: new scalings are too far from their frames.
  double UpdateRows(T* weight, bool* far) {
    const bool remade = s_.remade[row_ / kRowBlock];
    const T* u = x_.scaling.data() + row_;
    T* next = x_.next.data() + row_;
    double error = 0;
    if (!s_.measures && !remade) {
      s_.kernels.update(kRowBlock, sums(), u, x_.frame.data() + row_, x_.shift.data() + row_, x_.Damping(s_.epsilon),
                        s_.relax, next);
    }
    for (int r = 0; r < kRowBlock; ++r) {
      const int64_t i = row_ + r;
      if (rows_[r] < 0) {
        next[r] = 1;
        weight[r] = 0;
        continue;
      }
      if (!s_.measures && remade) next[r] = ScalingOf<T>(s_.NextPotential(0, i) - x_.frame[i]);
      if (!s_.measures && !(s_.symmetric ? IsRepresentable(next[r]) : IsNear(next[r]))) *far = true;
      weight[r] = x_.mass[i] == 0 ? T(0) : x_.mass[i] * (s_.measures || s_.symmetric ? u[r] : next[r]);
      error += s_.ErrorOf(0, i, u[r] * x_.sums[i]);
    }
    return error;
  }

  // Alternating updates: rows whose new scalings are far from 1 (a relaxed side moves a potential as far as it likes)
  // get frames at their new potentials and are made again.
  void MoveRows(T* weight) {
    s_.KeepRows(row_);
    for (int r = 0; r < kRowBlock; ++r) {
      const int64_t i = row_ + r;
      if (rows_[r] < 0 || IsNear(x_.next[i])) continue;
      const double potential = s_.NextPotential(0, i);
      x_.term[i] = static_cast<TE>(potential);
      x_.frame[i] = x_.term[i];
      x_.next[i] = ScalingOf<T>(potential - x_.frame[i]);
      weight[r] = x_.mass[i] * x_.next[i];
    }
    double unused[kRowBlock];
    MakeDensities(unused);
  }

  TransportState<TE, T>& s_;
  TransportSide<TE, T>&x_, &y_;
  const int64_t row_, done_;
  BlockMemory<TE, T> memory_;
  int64_t rows_[kRowBlock];
};

}  // namespace

template <typename TE, typename T>
bool SweepBlocks(TransportState<TE, T>* state, int64_t begin, int64_t end, T* acc, double* error, Scratch* scratch) {
  TransportSide<TE, T>& x = state->side[0];
  const int64_t columns = state->cost.padded(1);
  const bool measures = state->measures;
  const bool balanced = state->cache_valid && state->plain && (state->relax == 1 || measures);
  bool safe = true;
  for (int64_t block = begin; block < end; ++block) {
    int64_t done = 0;
    if (balanced) {
      const int64_t row = block * kRowBlock, rows = std::min(x.size, end * kRowBlock) - row;
      done = state->kernels.balanced_sweep(state->cache.data() + row * columns, columns, rows,
                                           state->side[1].weight.data(), x.scaling.data() + row, x.mass.data() + row,
                                           measures, measures ? -1 : 1 / kDrift, measures ? INFINITY : kHuge,
                                           x.sums.data() + row, x.next.data() + row, acc, error);
      if (done >= rows) return safe;
      block += done / kRowBlock;
      done %= kRowBlock;
    }
    safe = BlockSweep<TE, T>(state, block * kRowBlock, done, scratch).Run(acc, error) && safe;
  }
  return safe;
}

template <typename TE, typename T>
void LogSumExps(const TransportState<TE, T>& state, int side, const int64_t* rows, TE* max, double* sums,
                Scratch* scratch) {
  const TransportSide<TE, T>& other = state.side[1 - side];
  const int64_t columns = state.cost.padded(1 - side);
  const BlockMemory<TE, T> memory(state.cost, side, scratch);
  const TE zero[kRowBlock] = {};
  state.cost.Exponents(side, rows, state.epsilon, zero, other.term.data(), memory.e, memory.workspace);
  state.kernels.row_max(memory.e, columns, other.penalty.data(), max);
  state.kernels.exp_rows(memory.e, columns, max, other.weight.data(), memory.t, sums);
}

template <typename TE, typename T>
void PlanRows(const TransportState<TE, T>& state, int side, const int64_t* rows, T* plan, double* sums, TE* workspace) {
  const TransportSide<TE, T>&own = state.side[side], &other = state.side[1 - side];
  TE row_term[kRowBlock];
  T row_weight[kRowBlock];
  for (int r = 0; r < kRowBlock; ++r) {
    row_term[r] = rows[r] < 0 ? static_cast<TE>(kVoid) : own.term[rows[r]];
    row_weight[r] = rows[r] < 0 ? T(0) : own.weight[rows[r]];
  }
  state.cost.Densities(side, rows, state.epsilon, row_term, other.term.data(), other.weight.data(), plan, sums,
                       workspace);
  state.kernels.scale(plan, state.cost.padded(1 - side), row_weight, other.weight.data(), sums);
}

template <typename TE, typename T>
void ScaledPlanRows(const TransportState<TE, T>& state, int side, const int64_t* rows, T* plan, double* sums, TE* e,
                    TE* workspace) {
  const TransportSide<TE, T>&own = state.side[side], &other = state.side[1 - side];
  const int64_t columns = state.cost.padded(1 - side);
  const TE zero[kRowBlock] = {};
  TE max[kRowBlock];
  T exists[kRowBlock];
  for (int r = 0; r < kRowBlock; ++r) exists[r] = rows[r] >= 0 && own.penalty[rows[r]] == 0 ? T(1) : T(0);
  state.cost.Exponents(side, rows, state.epsilon, zero, other.term.data(), e, workspace);
  state.kernels.row_max(e, columns, other.penalty.data(), max);
  state.kernels.exp_rows(e, columns, max, other.weight.data(), plan, sums);
  state.kernels.scale(plan, columns, exists, other.weight.data(), sums);
}

#define SINKHORN_INSTANTIATE(TE, T)                                                                           \
  template bool SweepBlocks<TE, T>(TransportState<TE, T>*, int64_t, int64_t, T*, double*, Scratch*);          \
  template void LogSumExps<TE, T>(const TransportState<TE, T>&, int, const int64_t*, TE*, double*, Scratch*); \
  template void PlanRows<TE, T>(const TransportState<TE, T>&, int, const int64_t*, T*, double*, TE*);         \
  template void ScaledPlanRows<TE, T>(const TransportState<TE, T>&, int, const int64_t*, T*, double*, TE*, TE*)
SINKHORN_INSTANTIATE(float, float);
SINKHORN_INSTANTIATE(double, float);
SINKHORN_INSTANTIATE(double, double);
#undef SINKHORN_INSTANTIATE

}  // namespace sinkhorn::cpu
