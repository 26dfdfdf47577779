// What a forward solver makes of its last passes: the certificate, the sums, P and the gradient.
#if defined(SINKHORN_KERNELS_CPU_NORMALIZATION_OUTPUTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SINKHORN_KERNELS_CPU_NORMALIZATION_OUTPUTS_INL_H_
#undef SINKHORN_KERNELS_CPU_NORMALIZATION_OUTPUTS_INL_H_
#else
#define SINKHORN_KERNELS_CPU_NORMALIZATION_OUTPUTS_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "hwy/highway.h"
#include "kernels/cpu/half.h"
#include "kernels/cpu/normalization_solver-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::cpu::normalization::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// ---- The certificate -----------------------------------------------------------------------------------------------

template <class Derived, class Layout_, bool kLog>
void ForwardSolver<Derived, Layout_, kLog>::Certify() {
  const D d;
  CombineColumns(Accumulator(0));
  const V row_unscale = hn::Load(d, marginals_.row_unscale.value);
  const V col_unscale = hn::Load(d, marginals_.col_unscale.value);
  V rows = L1(layout_.row_elements(), [&](int64_t k) HWY_ATTR {
    return hn::NegMulAdd(hn::Load(d, marginals_.row + k), row_unscale, hn::Load(d, row_sum_ + k));
  });
  V cols = L1(layout_.col_elements(), [&](int64_t k) HWY_ATTR {
    return hn::NegMulAdd(hn::Load(d, marginals_.col + k), col_unscale, hn::Load(d, Accumulator(0) + k));
  });
  auto bad = hn::Not(hn::Lt(hn::Add(rows, cols), hn::Set(d, std::numeric_limits<T>::max())));
  if constexpr (!kLog) {
    if (spec_.recipe.guard != Guard::kNone) bad = hn::Or(bad, derived().Drifted());
  }
  if (!Derived::kExact && stops_early()) {  // The errors that stopped it: the sums of P differ from them by rounding.
    const auto stopped = hn::Ne(hn::Load(d, stopped_.value), hn::Zero(d));
    rows = hn::IfThenElse(stopped, hn::Load(d, row_error_.value), rows);
    cols = hn::IfThenElse(stopped, hn::Load(d, stopped_col_error_.value), cols);
  }
  if (!hn::AllFalse(d, bad)) Fail(bad);
  if (!Derived::kExact && !stops_early() && outputs().convergence == nullptr) {
    TallyTogether(rows, cols);
  } else {
    hn::Store(rows, d, row_error_.value);
    hn::Store(cols, d, col_error_.value);
    WriteConvergence();
  }
  StoreSums();
}

template <class Derived, class Layout_, bool kLog>
template <class M>
void ForwardSolver<Derived, Layout_, kLog>::Fail(M lanes) {
  if constexpr (kLog) {
    tally_.finite = false;
  } else {
    HandOn(lanes);
  }
}

template <class Derived, class Layout_, bool kLog>
void ForwardSolver<Derived, Layout_, kLog>::WriteConvergence() {
  for (int64_t l = 0; l < kMembers; ++l) {
    if (!group_.store[l]) continue;
    Convergence c;
    c.iterations = stopped_.value[l] != 0 ? static_cast<int32_t>(stopped_.value[l]) : spec_.iterations;
    c.marginal_error_a = spec_.transposed ? col_error_.value[l] : row_error_.value[l];
    c.marginal_error_b = spec_.transposed ? row_error_.value[l] : col_error_.value[l];
    derived().Judge(l, std::max(c.marginal_error_a, c.marginal_error_b), &c);
    if (outputs().convergence != nullptr) outputs().convergence[group_.member[l]] = c;
    tally_.Add(c, 1);
  }
}

// The same where the iterations are fixed and nobody asks for single members.
template <class Derived, class Layout_, bool kLog>
void ForwardSolver<Derived, Layout_, kLog>::TallyTogether(V rows, V cols) {
  const D d;
  HWY_ALIGN T stored[kLanes];
  int64_t count = 0;
  for (int64_t l = 0; l < kLanes; ++l) {
    stored[l] = group_.store[Layout::kPerLane ? l : 0] ? T(1) : T(0);
    count += l < kMembers && group_.store[l];
  }
  const auto largest = [&](V errors) HWY_ATTR {
    return static_cast<double>(hn::GetLane(hn::MaxOfLanes(d, hn::Mul(errors, hn::Load(d, stored)))));
  };
  Convergence c;
  c.iterations = spec_.iterations;
  c.marginal_error_a = largest(spec_.transposed ? cols : rows);
  c.marginal_error_b = largest(spec_.transposed ? rows : cols);
  c.converged = c.marginal_error_a == 0 && c.marginal_error_b == 0;
  tally_.Add(c, count);
}

// ---- Sums and P ----------------------------------------------------------------------------------------------------

template <class Derived, class Layout_, bool kLog>
void ForwardSolver<Derived, Layout_, kLog>::StoreSums() const {
  const OutputView& of_rows = spec_.transposed ? outputs().column_sums : outputs().row_sums;
  const OutputView& of_cols = spec_.transposed ? outputs().row_sums : outputs().column_sums;
  if (of_rows) StoreVector(row_sum_, layout_.rows(), of_rows);
  if (of_cols) StoreVector(Accumulator(0), layout_.cols(), of_cols);
}

template <class Derived, class Layout_, bool kLog>
void ForwardSolver<Derived, Layout_, kLog>::StoreVector(const T* x, int64_t size, const OutputView& view) const {
  std::vector<T> one(size);
  constexpr int64_t kStep = Layout::kPerLane ? kLanes : 1;
  for (int64_t l = 0; l < kMembers; ++l) {
    if (!group_.store[l]) continue;
    for (int64_t k = 0; k < size; ++k) one[k] = x[k * kStep + l];
    StoreRow(view.dtype, one.data(), size, view.data, group_.member[l] * size);
  }
}

template <class Derived, class Layout_, bool kLog>
void ForwardSolver<Derived, Layout_, kLog>::StorePlan(int64_t begin, int64_t end, T* stage) const {
  if (direct_plan_ != nullptr) return;
  if (outputs().plan) {
    io_.Store(plan_, group_, false, begin, end, stage, OutputTensor(outputs().plan, spec_.n, spec_.m));
  }
  if (!plan_copy_) return;
  Group<kMembers> copies = group_;
  for (int64_t l = 0; l < kMembers; ++l) copies.member[l] = l;
  io_.Store(plan_, copies, false, begin, end, stage, plan_copy_);
}

// ---- The gradient --------------------------------------------------------------------------------------------------

// bar K becomes dL/dW: through offset and softmax; then the dustbin's share and the check for overflow.
template <class Derived, class Layout_, bool kLog>
void ForwardSolver<Derived, Layout_, kLog>::FinishGradient(int64_t begin, int64_t end, Scalar* scalars) {
  const D d;
  V infinite = hn::Zero(d);
  for (int64_t i = begin; i < end; ++i) {
    T* gradient = cotangent_ + i * layout_.stride();
    const T* factor = factor_ == nullptr ? nullptr : factor_ + i * layout_.stride();
    V total = hn::Zero(d);
    for (int64_t k = 0; k < layout_.stride(); k += kLanes) {
      V g = hn::Load(d, gradient + k);
      if (factor != nullptr) g = hn::Mul(g, hn::Abs(hn::Load(d, factor + k)));
      hn::Store(g, d, gradient + k);
      total = hn::Add(total, g);
      infinite = hn::MulAdd(g, hn::Zero(d), infinite);
    }
    if (spec_.softmax()) derived().SoftmaxBackward(i, layout_.Reduce(total));
  }
  hn::Store(layout_.Reduce(infinite), d, scalars[kInfinite].value);
  hn::Store(layout_.BorderSum(cotangent_, begin, end), d, scalars[kBorder].value);
}

template <class Derived, class Layout_, bool kLog>
void ForwardSolver<Derived, Layout_, kLog>::EndGradient() {
  const OutputView& view = outputs().gradient_dustbin_score;
  for (int64_t l = 0; l < kMembers; ++l) {
    if (!group_.store[l]) continue;
    T infinite = 0, border = 0;
    for (int64_t b = 0; b < blocks_; ++b) {
      infinite += BlockScalars(b)[kInfinite].value[l];
      border += BlockScalars(b)[kBorder].value[l];
    }
    if (!(infinite == 0)) tally_.finite = false;
    if (spec_.dustbin && view) StoreRow(view.dtype, &border, 1, view.data, group_.member[l]);
  }
}

}  // namespace sinkhorn::cpu::normalization::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // SINKHORN_KERNELS_CPU_NORMALIZATION_OUTPUTS_INL_H_
