// A half step of scalings in the linear domain, and its reverse, under each guard.
#if defined(SINKHORN_KERNELS_CPU_NORMALIZATION_GUARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SINKHORN_KERNELS_CPU_NORMALIZATION_GUARD_INL_H_
#undef SINKHORN_KERNELS_CPU_NORMALIZATION_GUARD_INL_H_
#else
#define SINKHORN_KERNELS_CPU_NORMALIZATION_GUARD_INL_H_
#endif

#include <limits>
#include <type_traits>

#include "hwy/highway.h"
#include "kernels/cpu/math-inl.h"
#include "kernels/problem.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::cpu::normalization::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using cpu::HWY_NAMESPACE::Reciprocal;

// Guards that scalings bear: below, old / guard may overflow; above, P shrinks to nothing in a few steps.
constexpr double kSmallestGuard = 1e-12, kLargestGuard = 1e6;

// Runs body(std::integral_constant<Guard, guard>()).
template <class Body>
HWY_INLINE void WithGuard(Guard guard, Body body) {
  switch (guard) {
    case Guard::kNone:
      return body(std::integral_constant<Guard, Guard::kNone>());
    case Guard::kMax:
      return body(std::integral_constant<Guard, Guard::kMax>());
    case Guard::kAdd:
      return body(std::integral_constant<Guard, Guard::kAdd>());
  }
}

// The scaling after a division: old * marginal / h(old * s), h the guard.
template <Guard kGuard, class D, class V = hn::Vec<D>>
HWY_INLINE V Rescaled(D d, V s, V old, V marginal, V guard, V inverse_guard) {
  if constexpr (kGuard == Guard::kNone) {
    return hn::Mul(marginal, Reciprocal(d, s));
  } else if constexpr (kGuard == Guard::kMax) {
    // Min returns its second operand where one is NaN: a NaN survives, an overflow of the first does not.
    return hn::Min(hn::Mul(hn::Mul(old, marginal), inverse_guard), hn::Mul(marginal, Reciprocal(d, s)));
  } else {
    return hn::Mul(hn::Mul(old, marginal), Reciprocal(d, hn::MulAdd(old, s, guard)));
  }
}

// Reverse of Rescaled in logarithms: bar = adjoint of log now. Returns theta * bar * now / marginal, the multiplier of
// -K v; *bar becomes the adjoint of log old that does not pass through s.
template <Guard kGuard, class D, class V = hn::Vec<D>>
HWY_INLINE V Unscaled(D d, V old, V now, V marginal, V inverse_marginal, V guard, V inverse_guard, V* bar) {
  const V multiplier = hn::Mul(*bar, hn::Mul(now, inverse_marginal));
  if constexpr (kGuard == Guard::kNone) {
    *bar = hn::Zero(d);
    return multiplier;
  } else if constexpr (kGuard == Guard::kMax) {
    const auto passes = hn::Lt(now, hn::Mul(hn::Mul(old, marginal), inverse_guard));  // As computed there.
    *bar = hn::IfThenZeroElse(passes, *bar);
    return hn::IfThenElseZero(passes, multiplier);
  } else {
    // 1 - theta = guard / (old s + guard), and now / old knows that divisor: 1 where they are too small to tell.
    const V share = hn::Mul(hn::Mul(now, Reciprocal(d, old)), hn::Mul(inverse_marginal, guard));
    *bar = hn::IfThenElse(hn::Ge(hn::Min(old, now), hn::Set(d, std::numeric_limits<hn::TFromD<D>>::min())),
                          hn::Mul(*bar, share), *bar);
    return multiplier;
  }
}

}  // namespace sinkhorn::cpu::normalization::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // SINKHORN_KERNELS_CPU_NORMALIZATION_GUARD_INL_H_
