// Forward solver in the linear domain: K = exp(W - row maximum), u and v themselves. (Its unrolled backward pass:
// normalization_linear_backward-inl.h.)
//
// Safe while no entry of K that matters underflows: scalings stay within the range of K (they are ratios of its
// entries), so an entry above exp(-60) in float32 and exp(-600) in float64, less the range of the marginals, keeps
// every sum, every scaling and their products normal. Members beyond that are handed on.
#if defined(SINKHORN_KERNELS_CPU_NORMALIZATION_LINEAR_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SINKHORN_KERNELS_CPU_NORMALIZATION_LINEAR_INL_H_
#undef SINKHORN_KERNELS_CPU_NORMALIZATION_LINEAR_INL_H_
#else
#define SINKHORN_KERNELS_CPU_NORMALIZATION_LINEAR_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/cpu/math-inl.h"
#include "kernels/cpu/normalization_guard-inl.h"
#include "kernels/cpu/normalization_linear_backward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::cpu::normalization::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class Layout>
class LinearSolver final : public LinearBackward<LinearSolver<Layout>, Layout> {
  using Base = LinearBackward<LinearSolver<Layout>, Layout>;
  friend Base;
  friend typename Base::Forward;

 public:
  using Base::Base;
  using typename Base::D;
  using typename Base::Scalar;
  using typename Base::T;
  using typename Base::V;
  static constexpr int64_t kLanes = Base::kLanes;
  static constexpr bool kExact = false;

 private:
  using Base::ColGuard;
  using Base::Inverse;
  using Base::RowGuard;
  static constexpr double kRange = sizeof(T) == 4 ? 60 : 600;     // nats
  static constexpr double kLowest = sizeof(T) == 4 ? -40 : -500;  // log of the first row sums: guards see them
  static constexpr double kLargestScaling = sizeof(T) == 4 ? 1e25 : 1e280;  // Flushing: 1e-38 and 1e-308.

  // Lanes whose scalings are so large that their counterparts, which flushing takes, may count. With a guard both
  // drift: only the product of theirs is bounded.
  hn::Mask<D> Drifted() const {
    const D d;
    V largest = hn::Zero(d);
    for (int64_t k = 0; k < this->layout_.row_elements(); k += kLanes) {
      largest = hn::Max(largest, hn::Load(d, this->U(this->t_) + k));
    }
    for (int64_t k = 0; k < this->layout_.col_elements(); k += kLanes) {
      largest = hn::Max(largest, hn::Load(d, this->W(this->t_) + k));
    }
    return hn::Gt(this->layout_.ReduceMax(largest), hn::Set(d, static_cast<T>(kLargestScaling)));
  }

  // ---- Start: from logits to K --------------------------------------------------------------------------------------
  void StartRows(int64_t begin, int64_t end, Scalar* scalars) {
    const D d;
    const Layout& layout = this->layout_;
    const Recipe& recipe = this->spec_.recipe;
    const V floor = hn::Set(d, static_cast<T>(std::max<double>(recipe.logit_floor, std::numeric_limits<T>::lowest())));
    const V huge = hn::Set(d, std::numeric_limits<T>::max());
    V widest = hn::Zero(d);
    V smallest = hn::Set(d, T(1)), lowest_row = huge, lowest_logit = huge;
    const bool whole = !this->spec_.softmax() && recipe.offset == 0 && WithWholeRows([&](auto vectors) HWY_ATTR {
      ExpRows<vectors()>(begin, end, floor, &lowest_row, &lowest_logit, &widest);
    });
    for (int64_t i = whole ? end : begin; i < end; ++i) {
      const T* row = this->LogitsRow(i);
      V max = floor, min = huge;
      for (int64_t jv = 0; jv < layout.vectors(); ++jv) {
        const V x = hn::LoadU(d, row + jv * kLanes);
        max = hn::Max(max, x);
        min = hn::Min(min, layout.ReplacePads(jv, x, huge));
      }
      max = layout.ReduceMax(max);
      lowest_row = hn::Min(lowest_row, max);
      lowest_logit = hn::Min(lowest_logit, min);
      if (this->spec_.softmax()) {
        smallest = hn::Min(smallest, SoftmaxRow(i, max, floor, row));
      } else if (recipe.offset > 0) {
        smallest = hn::Min(smallest, OffsetRow(i, max, floor, row));
      } else {
        widest = hn::Max(widest, hn::Sub(max, hn::Max(min, floor)));
        ExpRow(i, max, floor, row);
      }
    }
    smallest = hn::Min(smallest, Exp(d, hn::Neg(widest)));
    hn::Store(layout.ReduceMin(smallest), d, scalars[Base::kSmallest].value);
    hn::Store(lowest_row, d, scalars[Base::kLowestRow].value);
    hn::Store(layout.ReduceMin(lowest_logit), d, scalars[Base::kLowestLogit].value);
  }

  // Runs body(std::integral_constant<int, vectors>) where rows are so few whole vectors that they fit into registers.
  template <class Body>
  bool WithWholeRows(Body body) const {
    if constexpr (!Layout::kPerLane) {
      if (this->layout_.cols() == this->layout_.stride()) {
        switch (this->layout_.vectors()) {
          case 1:
            return body(std::integral_constant<int, 1>()), true;
          case 2:
            return body(std::integral_constant<int, 2>()), true;
          case 4:
            return body(std::integral_constant<int, 4>()), true;
        }
      }
    }
    return false;
  }
  // Rows of C vectors: their extremes, and ExpRow.
  template <int C>
  void ExpRows(int64_t begin, int64_t end, V floor, V* lowest_row, V* lowest_logit, V* widest) {
    constexpr int R = Layout::kGroup;
    V low_row = *lowest_row, low_logit = *lowest_logit, wide = *widest, max[R], later[R];
    int64_t i = begin;
    if (i + R <= end) RowMaxima<R, C>(i, floor, &low_row, later);
    for (; i + R <= end; i += R) {
      SINKHORN_UNROLLED for (int r = 0; r < R; ++r) max[r] = later[r];
      // Those of the next rows hide behind these rows' exponentials.
      if (i + 2 * R <= end) RowMaxima<R, C>(i + R, floor, &low_row, later);
      ExpWhole<R, C>(i, floor, max, &low_logit, &wide);
    }
    for (; i < end; ++i) {
      RowMaxima<1, C>(i, floor, &low_row, max);
      ExpWhole<1, C>(i, floor, max, &low_logit, &wide);
    }
    *lowest_row = this->layout_.ReduceMin(low_row);
    *lowest_logit = low_logit;
    *widest = wide;
  }
  // Of R rows, each in all lanes.
  template <int R, int C>
  HWY_INLINE void RowMaxima(int64_t i, V floor, V* lowest_row, V* max) const {
    const D d;
    V part[R];
    SINKHORN_UNROLLED for (int r = 0; r < R; ++r) {
      const T* row = this->LogitsRow(i + r);
      part[r] = hn::LoadU(d, row);
      SINKHORN_UNROLLED for (int c = 1; c < C; ++c) part[r] = hn::Max(part[r], hn::LoadU(d, row + c * kLanes));
    }
    Layout::template MaximaOfRows<R>(i, part, max, [&](auto rows, V top) HWY_ATTR {
      top = hn::Max(top, floor);
      *lowest_row = hn::Min(*lowest_row, top);
      rows.Store(StartOf(top), this->U(0));
      return top;
    });
  }
  template <int R, int C>
  HWY_INLINE void ExpWhole(int64_t i, V floor, const V* max, V* lowest_logit, V* widest) {
    const D d;
    SINKHORN_UNROLLED for (int r = 0; r < R; ++r) {
      const T* row = this->LogitsRow(i + r);
      T* k = this->matrix_ + (i + r) * C * kLanes;
      V min = hn::LoadU(d, row);
      SINKHORN_UNROLLED for (int c = 0; c < C; ++c) {
        const V x = hn::LoadU(d, row + c * kLanes);
        min = hn::Min(min, x);
        hn::Store(ExpOf(hn::Sub(hn::Max(x, floor), max[r])), d, k + c * kLanes);
      }
      *lowest_logit = hn::Min(*lowest_logit, min);
      *widest = hn::Max(*widest, hn::Sub(max[r], hn::Max(min, floor)));
    }
  }
  HWY_INLINE static V ExpOf(V x) {
    if constexpr (sizeof(T) == 4) {
      return ExpInRange(D(), x);
    } else {
      return ExpBounded(D(), x);
    }
  }

  // K = exp(W - max). Rows that are too wide come out as anything and are handed on.
  void ExpRow(int64_t i, V max, V floor, const T* row) {
    const D d;
    const Layout& layout = this->layout_;
    T* k = this->matrix_ + i * layout.stride();
    for (int64_t jv = 0; jv < layout.vectors(); ++jv) {
      const V x = hn::Sub(hn::Max(hn::LoadU(d, row + jv * kLanes), floor), max);
      hn::Store(layout.KeepColumns(jv, ExpOf(x)), d, k + jv * kLanes);
    }
    PutStart(i, max);
  }
  // A row's u before the first step; without a guard any will do.
  HWY_INLINE V StartOf(V top) const {
    const D d;
    if (this->spec_.recipe.guard == Guard::kNone) return hn::Set(d, T(1));
    return hn::Mul(Exp(d, hn::Min(top, hn::Set(d, T(kRange)))), hn::Load(d, this->marginals_.col_scale.value));
  }
  void PutStart(int64_t i, V top) { this->layout_.StoreRow(StartOf(top), this->U(0), i); }

  // K = (exp(W) + offset) exp(-top). Returns the row's smallest entry.
  V OffsetRow(int64_t i, V max, V floor, const T* row) {
    const D d;
    const V log_offset = hn::Set(d, static_cast<T>(std::log(this->spec_.recipe.offset)));
    const V top = hn::Max(max, log_offset), added = Exp(d, hn::Sub(log_offset, top));
    V smallest = hn::Set(d, T(1));
    for (int64_t jv = 0; jv < this->layout_.vectors(); ++jv) {
      const V e = ExpBounded(d, hn::Sub(hn::Max(hn::LoadU(d, row + jv * kLanes), floor), top));
      smallest = hn::Min(smallest, PutEntry(i, jv, e, hn::Add(e, added)));
    }
    PutStart(i, top);
    return smallest;
  }

  // K = r softmax(W) + offset.
  V SoftmaxRow(int64_t i, V max, V floor, const T* row) {
    const D d;
    const Layout& layout = this->layout_;
    T* k = this->matrix_ + i * layout.stride();
    V sum = hn::Zero(d);
    for (int64_t jv = 0; jv < layout.vectors(); ++jv) {
      const V e = ExpBounded(d, hn::Sub(hn::Max(hn::LoadU(d, row + jv * kLanes), floor), max));
      hn::Store(e, d, k + jv * kLanes);
      sum = hn::Add(sum, layout.KeepColumns(jv, e));
    }
    const V marginal =
        hn::Mul(layout.LoadRow(this->marginals_.row, i), hn::Load(d, this->marginals_.row_unscale.value));
    const V scale = hn::Mul(marginal, Reciprocal(d, layout.Reduce(sum)));
    const V offset = hn::Set(d, static_cast<T>(this->spec_.recipe.offset));
    V smallest = hn::Set(d, T(1));
    for (int64_t jv = 0; jv < layout.vectors(); ++jv) {
      const V e = hn::Mul(hn::Load(d, k + jv * kLanes), scale);
      smallest = hn::Min(smallest, PutEntry(i, jv, e, hn::Add(e, offset)));
    }
    layout.StoreRow(hn::Load(d, this->marginals_.row_scale.value), this->U(0), i);
    return smallest;
  }

  V PutEntry(int64_t i, int64_t jv, V e, V entry) {
    const D d;
    const Layout& layout = this->layout_;
    const int64_t at = i * layout.stride() + jv * kLanes;
    hn::Store(layout.KeepColumns(jv, entry), d, this->matrix_ + at);
    if (this->factor_ != nullptr) hn::Store(layout.KeepColumns(jv, hn::Div(e, entry)), d, this->factor_ + at);
    return layout.ReplacePads(jv, entry, hn::Set(d, T(1)));
  }

  void EndStart() {
    const D d;
    const Layout& layout = this->layout_;
    const Recipe& recipe = this->spec_.recipe;
    const auto min = [](V a, V b) HWY_ATTR { return hn::Min(a, b); };
    const V range = hn::Sub(hn::Set(d, T(kRange)), hn::Load(d, this->marginals_.range.value));
    auto safe = hn::Ge(this->Combined(Base::kSmallest, min), Exp(d, hn::Neg(range)));
    if (recipe.guard != Guard::kNone && !this->spec_.softmax()) {
      safe = hn::And(safe, hn::Ge(this->Combined(Base::kLowestRow, min), hn::Set(d, T(kLowest))));
    }
    if (recipe.guard != Guard::kNone) {
      const V large = hn::Set(d, T(kLargestGuard)), small = hn::Set(d, T(kSmallestGuard));
      const V row = RowGuard(), col = ColGuard();
      safe = hn::And(safe, hn::And(hn::And(hn::Le(row, large), hn::Le(col, large)),
                                   hn::And(hn::Ge(row, small), hn::Ge(col, small))));
    }
    if (this->spec_.unrolled) {  // No factor is kept for logits below the floor here.
      const double floor = std::max<double>(recipe.logit_floor, std::numeric_limits<T>::lowest());
      safe = hn::And(safe, hn::Gt(this->Combined(Base::kLowestLogit, min), hn::Set(d, static_cast<T>(floor))));
    }
    if (!hn::AllTrue(d, safe)) this->HandOn(hn::Not(safe));
    for (int64_t jv = 0; jv < layout.vectors(); ++jv) {
      hn::Store(layout.KeepColumns(jv, hn::Set(d, T(1))), d, this->W(0) + jv * kLanes);
    }
  }

  // ---- Iteration ----------------------------------------------------------------------------------------------------
  void IterateRows(int64_t block, int64_t begin, int64_t end) {
    WithGuard(this->spec_.recipe.guard,
              [&](auto guard) HWY_ATTR { this->template IterateRowsGuarded<guard()>(block, begin, end); });
  }
  template <Guard kGuard>
  void IterateRowsGuarded(int64_t block, int64_t begin, int64_t end) {
    const T* old = this->U(this->t_ - 1);
    T* now = this->U(this->t_);
    T* sums = this->stops_early() ? this->row_sum_ : nullptr;
    const T* marginal = this->marginals_.row;
    const bool skip = this->row_step_is_done();
    const V guard = RowGuard(), inverse = Inverse(guard);
    const auto rescale = [=](auto row, V s) HWY_ATTR {
      const V before = row.Load(old);
      if (sums != nullptr) row.Store(s, sums);
      V u = Rescaled<kGuard>(D(), s, before, row.Load(marginal), guard, inverse);
      if (skip) u = before;
      row.Store(u, now);
      return u;
    };
    this->InPanels(block, begin, end, this->Accumulator(block), nullptr,
                   [&](int64_t first, int64_t last, T* sum, T*) HWY_ATTR {
                     this->layout_.Sweep(this->matrix_, first, last, this->W(this->t_ - 1), sum, rescale);
                   });
  }

  void EndRows() { this->EndIteration(); }
  void ColumnRows(int64_t, int64_t, int64_t) {}  // No second pass.
  void EndColumns() {}

  V RowErrorBefore() const {
    const D d;
    const T* u = this->U(this->t_ - 1);
    const V scale = hn::Load(d, this->marginals_.col_unscale.value),
            unscale = hn::Load(d, this->marginals_.row_unscale.value);
    return this->L1(this->layout_.row_elements(), [&](int64_t k) HWY_ATTR {
      const V sum = hn::Mul(hn::Mul(hn::Load(d, u + k), hn::Load(d, this->row_sum_ + k)), scale);
      return hn::NegMulAdd(hn::Load(d, this->marginals_.row + k), unscale, sum);
    });
  }

  void UpdateColumns() {
    WithGuard(this->spec_.recipe.guard, [&](auto guard) HWY_ATTR { this->template UpdateColumnsGuarded<guard()>(); });
  }
  template <Guard kGuard>
  void UpdateColumnsGuarded() {
    const D d;
    const Layout& layout = this->layout_;
    this->CombineColumns(this->Accumulator(0));
    const T* sums = this->Accumulator(0);
    const T* old = this->W(this->t_ - 1);
    T* now = this->W(this->t_);
    const V guard = ColGuard(), inverse = Inverse(guard);
    for (int64_t jv = 0; jv < layout.vectors(); ++jv) {
      const int64_t k = jv * kLanes;
      const V v = Rescaled<kGuard>(d, hn::Load(d, sums + k), hn::Load(d, old + k),
                                   hn::Load(d, this->marginals_.col + k), guard, inverse);
      hn::Store(layout.KeepColumns(jv, v), d, now + k);
    }
    if (!this->stops_early()) return;
    this->KeepStopped(old, layout.col_elements(), now);
    const V unscale = hn::Load(d, this->marginals_.col_unscale.value);
    const V error = this->L1(layout.col_elements(), [&](int64_t k) HWY_ATTR {
      return hn::Mul(unscale,
                     hn::MulSub(hn::Load(d, now + k), hn::Load(d, sums + k), hn::Load(d, this->marginals_.col + k)));
    });
    hn::Store(error, d, this->col_error_.value);
  }

  // ---- P, its sums and, backward, bar K of the last step ------------------------------------------------------------
  void FinalRows(int64_t block, int64_t begin, int64_t end) {
    T* bars = this->spec_.unrolled ? this->SecondAccumulator(block) : nullptr;
    this->InPanels(
        block, begin, end, this->Accumulator(block), bars,
        [&](int64_t first, int64_t last, T* col_sums, T* col_bars) { FinalPanel(first, last, col_sums, col_bars); });
  }
  void FinalPanel(int64_t begin, int64_t end, T* col_sums, T* col_bars) {
    const D d;
    const Layout& layout = this->layout_;
    const V unscale = hn::Load(d, this->marginals_.col_unscale.value);
    if (WithWholeRows([&](auto vectors) HWY_ATTR {
          col_bars == nullptr ? FinalWhole<vectors(), false>(begin, end, unscale, col_sums, col_bars)
                              : FinalWhole<vectors(), true>(begin, end, unscale, col_sums, col_bars);
        })) {
      return;
    }
    std::fill(col_sums, col_sums + layout.col_elements(), T(0));
    if (col_bars != nullptr) std::fill(col_bars, col_bars + layout.col_elements(), T(0));
    for (int64_t i = begin; i < end; ++i) {
      const V u = hn::Mul(layout.LoadRow(this->U(this->t_), i), unscale);
      V row_sum = hn::Zero(d), row_bar = hn::Zero(d);
      for (int64_t k = 0; k < layout.stride(); k += kPanelVectors * kLanes) {
        FinalPiece(i, k, std::min(k + kPanelVectors * kLanes, layout.stride()), u, col_sums, col_bars, &row_sum,
                   &row_bar);
      }
      layout.StoreRow(layout.Reduce(row_sum), this->row_sum_, i);
      if (col_bars != nullptr) layout.StoreRow(layout.Reduce(row_bar), this->row_bar_, i);
    }
  }
  // FinalPanel for rows of C vectors: v and the columns' sums stay in registers.
  template <int C, bool kBackward>
  void FinalWhole(int64_t begin, int64_t end, V unscale, T* col_sums, T* col_bars) {
    const D d;
    V v[C], sums[C], bars[C];
    SINKHORN_UNROLLED for (int c = 0; c < C; ++c) {
      v[c] = hn::Load(d, this->W(this->t_) + c * kLanes);
      sums[c] = bars[c] = hn::Zero(d);
    }
    constexpr int R = Layout::kGroup;
    int64_t i = begin;
    for (; i + R <= end; i += R) FinalRowsOf<R, C, kBackward>(i, unscale, v, sums, bars);
    for (; i < end; ++i) FinalRowsOf<1, C, kBackward>(i, unscale, v, sums, bars);
    SINKHORN_UNROLLED for (int c = 0; c < C; ++c) {
      hn::Store(sums[c], d, col_sums + c * kLanes);
      if constexpr (kBackward) hn::Store(bars[c], d, col_bars + c * kLanes);
    }
  }
  template <int R, int C, bool kBackward>
  HWY_INLINE void FinalRowsOf(int64_t i, V unscale, const V* v, V* sums, V* bars) {
    const D d;
    V row_sum[R], row_bar[R];
    SINKHORN_UNROLLED for (int r = 0; r < R; ++r) {
      const V u = hn::Mul(this->layout_.LoadRow(this->U(this->t_), i + r), unscale);
      const T* k = this->matrix_ + (i + r) * C * kLanes;
      T* cotangent = this->cotangent_ + (i + r) * C * kLanes;
      T* plan = this->PlanRow(i + r);
      row_sum[r] = row_bar[r] = hn::Zero(d);
      SINKHORN_UNROLLED for (int c = 0; c < C; ++c) {
        const V p = hn::Mul(hn::Mul(hn::Load(d, k + c * kLanes), u), v[c]);
        hn::StoreU(p, d, plan + c * kLanes);
        row_sum[r] = hn::Add(row_sum[r], p);
        sums[c] = hn::Add(sums[c], p);
        if constexpr (kBackward) {
          const V bar = hn::Mul(hn::Load(d, cotangent + c * kLanes), p);
          hn::Store(bar, d, cotangent + c * kLanes);
          row_bar[r] = hn::Add(row_bar[r], bar);
          bars[c] = hn::Add(bars[c], bar);
        }
      }
    }
    Layout::template StoreSums<R>(row_sum, this->row_sum_, i);
    if constexpr (kBackward) Layout::template StoreSums<R>(row_bar, this->row_bar_, i);
  }
  // Elements [begin, end) of row i.
  HWY_INLINE void FinalPiece(int64_t i, int64_t begin, int64_t end, V u, T* col_sums, T* col_bars, V* row_sum,
                             V* row_bar) {
    const D d;
    const int64_t at = i * this->layout_.stride();
    const T* v = this->W(this->t_);
    T* plan = this->PlanRow(i);
    V sum = hn::Zero(d), bar_sum = hn::Zero(d);
    for (int64_t k = begin; k < end; k += kLanes) {
      const V p = hn::Mul(hn::Mul(hn::Load(d, this->matrix_ + at + k), u), hn::Load(d, v + k));
      hn::StoreU(p, d, plan + k);
      sum = hn::Add(sum, p);
      hn::Store(hn::Add(hn::Load(d, col_sums + k), p), d, col_sums + k);
      if (col_bars == nullptr) continue;
      const V bar = hn::Mul(hn::Load(d, this->cotangent_ + at + k), p);
      hn::Store(bar, d, this->cotangent_ + at + k);
      bar_sum = hn::Add(bar_sum, bar);
      hn::Store(hn::Add(hn::Load(d, col_bars + k), bar), d, col_bars + k);
    }
    *row_sum = hn::Add(*row_sum, sum);
    *row_bar = hn::Add(*row_bar, bar_sum);
  }
};

}  // namespace sinkhorn::cpu::normalization::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // SINKHORN_KERNELS_CPU_NORMALIZATION_LINEAR_INL_H_
