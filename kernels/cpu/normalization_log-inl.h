// Forward solver in the log domain: A = log of the start matrix, phi = log u and gamma = log v, log-sum-exps with
// maxima. Any finite logits. An iteration is two passes: rows, with the column maxima of A + phi; columns.
#if defined(SINKHORN_KERNELS_CPU_NORMALIZATION_LOG_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SINKHORN_KERNELS_CPU_NORMALIZATION_LOG_INL_H_
#undef SINKHORN_KERNELS_CPU_NORMALIZATION_LOG_INL_H_
#else
#define SINKHORN_KERNELS_CPU_NORMALIZATION_LOG_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/cpu/math-inl.h"
#include "kernels/cpu/normalization_outputs-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::cpu::normalization::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// log(e^a + e^b). -inf is e^-inf; not for two of them.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V LogAddExp(D d, V a, V b) {
  const V one = hn::Set(d, hn::TFromD<D>(1));
  return hn::Add(hn::Max(a, b), Log(d, hn::Add(one, ExpBounded(d, hn::Neg(hn::Abs(hn::Sub(a, b)))))));
}

template <class Layout>
class LogSolver final : public ForwardSolver<LogSolver<Layout>, Layout, true> {
  using Base = ForwardSolver<LogSolver<Layout>, Layout, true>;
  friend Base;

 public:
  using Base::Base;
  using typename Base::D;
  using typename Base::Scalar;
  using typename Base::T;
  using typename Base::V;
  static constexpr int64_t kLanes = Base::kLanes;
  static constexpr bool kExact = false;

 private:
  V LogGuard() const { return hn::Load(D(), this->marginals_.row_guard.value); }

  // ---- Start: from logits to A --------------------------------------------------------------------------------------
  void StartRows(int64_t begin, int64_t end, Scalar*) {
    const D d;
    const Layout& layout = this->layout_;
    const Recipe& recipe = this->spec_.recipe;
    const V lowest = hn::Set(d, std::numeric_limits<T>::lowest());
    const V floor = hn::Set(d, static_cast<T>(std::max<double>(recipe.logit_floor, std::numeric_limits<T>::lowest())));
    const V log_offset = hn::Set(d, static_cast<T>(std::log(recipe.offset)));
    for (int64_t i = begin; i < end; ++i) {
      const T* row = this->LogitsRow(i);
      T* logarithms = this->matrix_ + i * layout.stride();
      V shift = hn::Zero(d);
      if (this->spec_.softmax()) {
        const V zero = hn::Zero(d);
        shift = hn::Sub(layout.LoadRow(this->marginals_.row_log, i), RowLogSum(
                                                                         row, [&](int64_t) { return zero; }, floor));
      }
      for (int64_t jv = 0; jv < layout.vectors(); ++jv) {
        const V x = hn::LoadU(d, row + jv * kLanes);
        const V start = hn::Add(hn::Max(x, floor), shift);
        const V a = recipe.offset > 0 ? LogAddExp(d, start, log_offset) : start;
        hn::Store(layout.ReplacePads(jv, a, lowest), d, logarithms + jv * kLanes);
        if (this->factor_ == nullptr) continue;
        // Raised logits have no derivative, but a softmax's derivative needs their share: its sign tells them apart.
        const V share = Exp(d, hn::Sub(start, a)), raised = this->spec_.softmax() ? hn::Neg(share) : hn::Zero(d);
        const V factor = hn::IfThenElse(hn::Gt(x, floor), share, raised);
        hn::Store(layout.KeepColumns(jv, factor), d, this->factor_ + i * layout.stride() + jv * kLanes);
      }
      layout.StoreRow(hn::Zero(d), this->U(0), i);
    }
  }
  void EndStart() { std::fill(this->W(0), this->W(0) + this->layout_.col_elements(), T(0)); }

  // LSE_j(max(row_j, floor) + added(jv)), padding apart.
  template <class Added>
  V RowLogSum(const T* row, Added added, V floor) const {
    const D d;
    const Layout& layout = this->layout_;
    const V lowest = hn::Set(d, std::numeric_limits<T>::lowest());
    V max = lowest;
    const auto entry = [&](int64_t jv) HWY_ATTR {
      return layout.ReplacePads(jv, hn::Add(hn::Max(hn::LoadU(d, row + jv * kLanes), floor), added(jv)), lowest);
    };
    for (int64_t jv = 0; jv < layout.vectors(); ++jv) max = hn::Max(max, entry(jv));
    max = layout.ReduceMax(max);
    V sum = hn::Zero(d);
    for (int64_t jv = 0; jv < layout.vectors(); ++jv) {
      sum = hn::Add(sum, ExpBounded(d, hn::Sub(entry(jv), max)));
    }
    return hn::Add(max, Log(d, layout.Reduce(sum)));
  }

  // ---- Iteration ---------------------------------------------------------------------------------------------------
  // The potential after a division: old + log marginal - log h(e^(old + sum)).
  V Shifted(V log_sum, V old, V log_marginal) const {
    const D d;
    switch (this->spec_.recipe.guard) {
      case Guard::kNone:
        return hn::Sub(log_marginal, log_sum);
      case Guard::kMax:
        return hn::Sub(hn::Add(old, log_marginal), hn::Max(hn::Add(old, log_sum), LogGuard()));
      case Guard::kAdd:
        return hn::Sub(hn::Add(old, log_marginal), LogAddExp(d, hn::Add(old, log_sum), LogGuard()));
    }
    return log_sum;
  }

  void IterateRows(int64_t block, int64_t begin, int64_t end) {
    const D d;
    const Layout& layout = this->layout_;
    const V lowest = hn::Set(d, std::numeric_limits<T>::lowest());
    const T* gamma = this->W(this->t_ - 1);
    T* column_max = this->Accumulator(block);
    std::fill(column_max, column_max + layout.col_elements(), std::numeric_limits<T>::lowest());
    for (int64_t i = begin; i < end; ++i) {
      const T* row = this->matrix_ + i * layout.stride();
      const V old = layout.LoadRow(this->U(this->t_ - 1), i);
      V phi = old;
      if (!this->row_step_is_done()) {
        const V log_sum = RowLogSum(
            row, [&](int64_t jv) HWY_ATTR { return hn::Load(d, gamma + jv * kLanes); }, lowest);
        phi = Shifted(log_sum, old, layout.LoadRow(this->marginals_.row_log, i));
        layout.StoreRow(hn::Add(old, log_sum), this->row_sum_, i);
      }
      layout.StoreRow(phi, this->U(this->t_), i);
      for (int64_t k = 0; k < layout.stride(); k += kLanes) {
        hn::Store(hn::Max(hn::Load(d, column_max + k), hn::Add(hn::Load(d, row + k), phi)), d, column_max + k);
      }
    }
  }

  // Combines the maxima into those of block 0; then the pass over the columns.
  void EndRows() {
    const D d;
    const int64_t elements = this->layout_.col_elements();
    T* max = this->Accumulator(0);
    for (int64_t b = 1; b < this->blocks_; ++b) {
      for (int64_t k = 0; k < elements; k += kLanes) {
        hn::Store(hn::Max(hn::Load(d, max + k), hn::Load(d, this->Accumulator(b) + k)), d, max + k);
      }
    }
    this->pass_ = Pass::kColumns;
  }
  void EndColumns() { this->EndIteration(); }

  void ColumnRows(int64_t block, int64_t begin, int64_t end) {
    const D d;
    const Layout& layout = this->layout_;
    const T* max = this->Accumulator(0);
    T* sum = this->SecondAccumulator(block);
    std::fill(sum, sum + layout.col_elements(), T(0));
    for (int64_t i = begin; i < end; ++i) {
      const T* row = this->matrix_ + i * layout.stride();
      const V phi = layout.LoadRow(this->U(this->t_), i);
      for (int64_t k = 0; k < layout.stride(); k += kLanes) {
        const V exponent = hn::Sub(hn::Add(hn::Load(d, row + k), phi), hn::Load(d, max + k));
        hn::Store(hn::Add(hn::Load(d, sum + k), ExpBounded(d, exponent)), d, sum + k);
      }
    }
  }

  void UpdateColumns() {
    const D d;
    const Layout& layout = this->layout_;
    this->CombineColumns(this->SecondAccumulator(0));
    const T* old = this->W(this->t_ - 1);
    T* now = this->W(this->t_);
    V error = hn::Zero(d);
    for (int64_t jv = 0; jv < layout.vectors(); ++jv) {
      const int64_t k = jv * kLanes;
      const V log_sum =
          hn::Add(hn::Load(d, this->Accumulator(0) + k), Log(d, hn::Load(d, this->SecondAccumulator(0) + k)));
      const V gamma = Shifted(log_sum, hn::Load(d, old + k), hn::Load(d, this->marginals_.col_log + k));
      hn::Store(layout.KeepColumns(jv, gamma), d, now + k);
      const V difference = hn::Sub(Exp(d, hn::Add(gamma, log_sum)), hn::Load(d, this->marginals_.col + k));
      error = hn::Add(error, layout.KeepColumns(jv, hn::Abs(difference)));
    }
    hn::Store(layout.Reduce(error), d, this->col_error_.value);
    if (this->stops_early()) this->KeepStopped(old, layout.col_elements(), now);
  }

  V RowErrorBefore() const {
    const D d;
    V error = hn::Zero(d);
    for (int64_t i = 0; i < this->layout_.rows(); ++i) {
      const V sum = Exp(d, this->layout_.LoadRow(this->row_sum_, i));
      error = hn::Add(error, hn::Abs(hn::Sub(sum, this->layout_.LoadRow(this->marginals_.row, i))));
    }
    return error;
  }

  // ---- P, its sums and, backward, bar A of the last step ------------------------------------------------------------
  void FinalRows(int64_t block, int64_t begin, int64_t end) {
    const D d;
    const Layout& layout = this->layout_;
    const bool backward = this->spec_.unrolled;
    T* col_sums = this->Accumulator(block);
    T* col_bars = this->SecondAccumulator(block);
    std::fill(col_sums, col_sums + layout.col_elements(), T(0));
    std::fill(col_bars, col_bars + layout.col_elements(), T(0));
    const T* gamma = this->W(this->t_);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t at = i * layout.stride();
      const V phi = layout.LoadRow(this->U(this->t_), i);
      T* plan = this->PlanRow(i);
      V row_sum = hn::Zero(d), row_bar = hn::Zero(d);
      for (int64_t k = 0; k < layout.stride(); k += kLanes) {
        const V p = Exp(d, hn::Add(hn::Add(hn::Load(d, this->matrix_ + at + k), phi), hn::Load(d, gamma + k)));
        hn::StoreU(p, d, plan + k);
        row_sum = hn::Add(row_sum, p);
        hn::Store(hn::Add(hn::Load(d, col_sums + k), p), d, col_sums + k);
        if (!backward) continue;
        const V bar = hn::Mul(hn::Load(d, this->cotangent_ + at + k), p);
        hn::Store(bar, d, this->cotangent_ + at + k);
        row_bar = hn::Add(row_bar, bar);
        hn::Store(hn::Add(hn::Load(d, col_bars + k), bar), d, col_bars + k);
      }
      layout.StoreRow(layout.Reduce(row_sum), this->row_sum_, i);
      if (backward) layout.StoreRow(layout.Reduce(row_bar), this->row_bar_, i);
    }
  }

  // ---- Reverse of iteration t: columns, then rows ------------------------------------------------------------------
  // As Unscaled of the linear solver: the multiplier of -P at `now`; *bar becomes what passes by the sum.
  V Unshifted(V old, V now, V log_marginal, V inverse_marginal, V* bar) const {
    const D d;
    const V multiplier = hn::Mul(*bar, inverse_marginal);
    switch (this->spec_.recipe.guard) {
      case Guard::kNone:
        *bar = hn::Zero(d);
        return multiplier;
      case Guard::kMax: {
        const auto passes = hn::Lt(now, hn::Sub(hn::Add(old, log_marginal), LogGuard()));  // As computed there.
        *bar = hn::IfThenZeroElse(passes, *bar);
        return hn::IfThenElseZero(passes, multiplier);
      }
      case Guard::kAdd:
        *bar = hn::Mul(multiplier, Exp(d, hn::Add(LogGuard(), hn::Sub(now, old))));
        return multiplier;
    }
    return multiplier;
  }
  hn::Mask<D> Idle() const {
    const D d;
    const V stopped = hn::Load(d, this->stopped_.value);
    return hn::And(hn::Ne(stopped, hn::Zero(d)), hn::Lt(stopped, hn::Set(d, static_cast<T>(this->t_))));
  }

  void BeginReverseStep() {
    const D d;
    const auto idle = Idle();
    for (int64_t jv = 0; jv < this->layout_.vectors(); ++jv) {
      const int64_t k = jv * kLanes;
      const V bar = hn::Load(d, this->col_bar_ + k);
      V carried = bar;
      const V multiplier =
          Unshifted(hn::Load(d, this->W(this->t_ - 1) + k), hn::Load(d, this->W(this->t_) + k),
                    hn::Load(d, this->marginals_.col_log + k), hn::Load(d, this->marginals_.col_inverse + k), &carried);
      hn::Store(hn::IfThenZeroElse(idle, multiplier), d, this->Y(this->t_) + k);
      hn::Store(this->layout_.KeepColumns(jv, hn::IfThenElse(idle, bar, carried)), d, this->col_bar_ + k);
    }
  }

  void ReverseRows(int64_t block, int64_t begin, int64_t end) {
    const D d;
    const Layout& layout = this->layout_;
    const auto idle = Idle();
    const T* before = this->W(this->t_ - 1);
    const T* after = this->W(this->t_);
    const T* y = this->Y(this->t_);
    T* col_sums = this->Accumulator(block);
    std::fill(col_sums, col_sums + layout.col_elements(), T(0));
    for (int64_t i = begin; i < end; ++i) {
      const T* a = this->matrix_ + i * layout.stride();
      T* bar_a = this->cotangent_ + i * layout.stride();
      const V phi = layout.LoadRow(this->U(this->t_), i);
      V sum = hn::Zero(d);
      for (int64_t k = 0; k < layout.stride(); k += kLanes) {
        const V p = Exp(d, hn::Add(hn::Add(hn::Load(d, a + k), phi), hn::Load(d, after + k)));
        const V share = hn::Mul(p, hn::Load(d, y + k));
        sum = hn::Add(sum, share);
        hn::Store(hn::Sub(hn::Load(d, bar_a + k), share), d, bar_a + k);
      }
      const V bar = hn::Sub(layout.LoadRow(this->row_bar_, i), layout.Reduce(sum));
      V carried = bar;
      V multiplier =
          Unshifted(layout.LoadRow(this->U(this->t_ - 1), i), phi, layout.LoadRow(this->marginals_.row_log, i),
                    layout.LoadRow(this->marginals_.row_inverse, i), &carried);
      multiplier = hn::IfThenZeroElse(idle, multiplier);
      if (this->row_step_is_done()) multiplier = hn::Zero(d);
      layout.StoreRow(hn::IfThenElse(idle, bar, carried), this->row_bar_, i);
      for (int64_t k = 0; k < layout.stride(); k += kLanes) {
        const V p = Exp(d, hn::Add(hn::Add(hn::Load(d, a + k), phi), hn::Load(d, before + k)));
        const V share = hn::Mul(p, multiplier);
        hn::Store(hn::Sub(hn::Load(d, bar_a + k), share), d, bar_a + k);
        hn::Store(hn::Add(hn::Load(d, col_sums + k), share), d, col_sums + k);
      }
    }
  }

  void EndReverse() {
    const D d;
    this->CombineColumns(this->Accumulator(0));
    for (int64_t k = 0; k < this->layout_.col_elements(); k += kLanes) {
      hn::Store(hn::Sub(hn::Load(d, this->col_bar_ + k), hn::Load(d, this->Accumulator(0) + k)), d, this->col_bar_ + k);
    }
  }

  void GradientRows(int64_t, int64_t) {}  // bar A is complete.

  // gradient_ij -= softmax_ij * total, softmax = |factor| e^A / r; 0 where the factor is negative (StartRows).
  void SoftmaxBackward(int64_t i, V total) {
    const D d;
    const Layout& layout = this->layout_;
    const V scale = hn::Mul(total, layout.LoadRow(this->marginals_.row_inverse, i));
    for (int64_t k = 0; k < layout.stride(); k += kLanes) {
      const int64_t at = i * layout.stride() + k;
      const V factor = hn::Load(d, this->factor_ + at);
      const V softmax = hn::Mul(Exp(d, hn::Load(d, this->matrix_ + at)), hn::Abs(factor));
      const V gradient = hn::NegMulAdd(softmax, scale, hn::Load(d, this->cotangent_ + at));
      hn::Store(hn::IfThenZeroElse(hn::Lt(factor, hn::Zero(d)), gradient), d, this->cotangent_ + at);
    }
  }
};

}  // namespace sinkhorn::cpu::normalization::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // SINKHORN_KERNELS_CPU_NORMALIZATION_LOG_INL_H_
