// Symmetric linear systems A x = b of many lanes, of which the owner supplies products A p, one per step.
//
// By conjugate gradients, with a diagonal preconditioner. Where A is not known to be positive semidefinite and is found
// not to be, a lane begins again with minimal residuals (Paige & Saunders, 1975), which do not need that: vectors v of
// length 1, each A v but for its parts along the two before, make A tridiagonal; a rotation for each step makes that
// triangular, of which directions w and the steps along them follow. The residual never grows.
//
// A lane that is done stands still.
#if defined(SINKHORN_KERNELS_CPU_NORMALIZATION_SYMMETRIC_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SINKHORN_KERNELS_CPU_NORMALIZATION_SYMMETRIC_INL_H_
#undef SINKHORN_KERNELS_CPU_NORMALIZATION_SYMMETRIC_INL_H_
#else
#define SINKHORN_KERNELS_CPU_NORMALIZATION_SYMMETRIC_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <utility>

#include "hwy/highway.h"
#include "kernels/cpu/normalization_layout-inl.h"
#include "kernels/cpu/normalization_marginals-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::cpu::normalization::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Lane scalar: sum over elements k, k + kLanes, ... of term(k).
template <class Layout, class F>
HWY_INLINE typename Layout::V SumOver(const Layout& layout, int64_t elements, F term) {
  typename Layout::V sum = hn::Zero(typename Layout::D());
  for (int64_t k = 0; k < elements; k += Layout::kLanes) sum = hn::Add(sum, term(k));
  return layout.Reduce(sum);
}

template <class Layout>
class SymmetricSolver {
 public:
  using T = typename Layout::T;
  using D = typename Layout::D;
  using V = typename Layout::V;
  static constexpr int64_t kLanes = Layout::kLanes;

  // Of `size` elements. definite: A is positive semidefinite. least_curvature: (p, A p) below it, in units of
  // (p, p / preconditioner), is taken for 0.
  SymmetricSolver(const Layout& layout, int64_t size, int64_t most_steps, bool definite, double least_curvature,
                  Arena* arena)
      : layout_(layout),
        size_(size),
        most_steps_(most_steps),
        definite_(definite),
        least_curvature_(static_cast<T>(least_curvature)) {
    for (T** x : {&x_, &residual_, &p_, &q_}) *x = arena->Take<T>(size_);
    if (definite_) return;
    for (T** x : {&right_, &v_, &old_v_, &old_w_}) *x = arena->Take<T>(size_);
  }

  // b, to be filled before Begin. Padding must be 0, here and in the product.
  T* right() const { return definite_ ? residual_ : right_; }

  // To a residual of `tolerance` in the norm of the preconditioner `inverse`, which is taken for 1 unless definite.
  void Begin(const T* inverse, double tolerance) {
    inverse_ = inverse;
    if (!definite_) std::copy(right_, right_ + size_, residual_);
    std::fill(x_, x_ + size_, T(0));
    for (int64_t k = 0; k < size_; k += kLanes) hn::Store(Preconditioned(k), D(), p_ + k);
    const V norm = Norm();
    hn::Store(norm, D(), norm_.value);
    hn::Store(norm, D(), spread_.value);
    hn::Store(hn::Mul(norm, hn::Set(D(), static_cast<T>(tolerance * tolerance))), D(), goal_.value);
    hn::Store(hn::Zero(D()), D(), indefinite_.value);
    steps_ = 0;
    phase_ = Phase::kConjugate;
  }
  bool done() const { return phase_ != Phase::kResidual && IsOver(); }
  const T* direction() const { return phase_ == Phase::kConjugate ? p_ : phase_ == Phase::kResidual ? x_ : v_; }
  T* product() const { return q_; }  // The owner stores A direction() there, then calls Step.
  T* solution() const { return x_; }

  void Step() {
    ++steps_;
    if (phase_ == Phase::kConjugate) {
      StepConjugate();
      if (definite_ || !IsOver() || hn::AllFalse(D(), Indefinite())) return;
      for (int64_t k = 0; k < size_; k += kLanes) {
        hn::Store(hn::IfThenZeroElse(Indefinite(), hn::Load(D(), x_ + k)), D(), x_ + k);
      }
      hn::Store(hn::Zero(D()), D(), largest_.value);
      rounds_ = 0;
      phase_ = Phase::kResidual;
    } else if (phase_ == Phase::kResidual) {
      BeginMinimal();
    } else {
      StepMinimal();
      if (IsOver() && ++rounds_ < kRounds) phase_ = Phase::kResidual;
    }
  }

 private:
  using Mask = hn::Mask<D>;
  using Scalar = LaneScalar<T, kLanes>;
  enum class Phase { kConjugate, kResidual, kMinimal };
  static constexpr int kRounds = 2;         // Of minimal residuals: the second for what rounding left of the first.
  static constexpr double kUnseen = 1e-12;  // Parts of A's norm below are nothing that a solution can rest on.

  static V Load(const Scalar& scalar) { return hn::Load(D(), scalar.value); }

  void StepConjugate() {
    const D d;
    const V norm = Load(norm_), spread = Load(spread_), curvature = Dot(p_, q_);
    // Lanes that are done, or whose direction A does not see, stay where they are.
    const Mask seen = hn::Gt(hn::Abs(curvature), hn::Mul(hn::Set(d, least_curvature_), spread));
    Mask moves = hn::And(Open(), seen);
    if (!definite_) {
      const Mask ascends = hn::And(seen, hn::Gt(curvature, hn::Zero(d)));
      hn::Store(hn::IfThenElse(hn::AndNot(ascends, Open()), hn::Set(d, T(1)), Load(indefinite_)), d, indefinite_.value);
      moves = hn::And(moves, ascends);
    }
    const V step = hn::IfThenElseZero(moves, hn::Div(norm, curvature));
    for (int64_t k = 0; k < size_; k += kLanes) {
      hn::Store(hn::MulAdd(step, hn::Load(d, p_ + k), hn::Load(d, x_ + k)), d, x_ + k);
      hn::Store(hn::NegMulAdd(step, hn::Load(d, q_ + k), hn::Load(d, residual_ + k)), d, residual_ + k);
    }
    const V next = hn::IfThenElseZero(moves, Norm());
    const V turn = hn::IfThenElseZero(moves, hn::Div(next, norm));
    hn::Store(next, d, norm_.value);
    hn::Store(hn::MulAdd(hn::Mul(turn, turn), spread, next), d, spread_.value);
    for (int64_t k = 0; k < size_; k += kLanes) {
      hn::Store(hn::MulAdd(turn, hn::Load(d, p_ + k), Preconditioned(k)), d, p_ + k);
    }
  }

  // Lanes that are not definite, from where they are; the others stay.
  void BeginMinimal() {
    const D d;
    for (int64_t k = 0; k < size_; k += kLanes) {
      const V rest = hn::Sub(hn::Load(d, right_ + k), hn::Load(d, q_ + k));
      hn::Store(hn::IfThenElseZero(Indefinite(), rest), d, residual_ + k);
    }
    const V norm = Dot(residual_, residual_), length = hn::Sqrt(norm);
    const V scale = hn::IfThenElseZero(hn::Gt(norm, hn::Zero(d)), hn::Div(hn::Set(d, T(1)), length));
    for (int64_t k = 0; k < size_; k += kLanes) {
      hn::Store(hn::Mul(scale, hn::Load(d, residual_ + k)), d, v_ + k);
    }
    for (T* x : {old_v_, p_, old_w_}) std::fill(x, x + size_, T(0));
    hn::Store(norm, d, norm_.value);
    hn::Store(length, d, length_.value);
    hn::Store(hn::Set(d, T(-1)), d, cosine_.value);
    for (Scalar* x : {&sine_, &beta_, &bar_, &above_}) hn::Store(hn::Zero(d), d, x->value);
    steps_ = 0;
    phase_ = Phase::kMinimal;
  }

  // A column of the tridiagonal matrix: beta, alpha, next; of the triangular one: above (by two), delta, gamma.
  void StepMinimal() {
    const D d;
    const V beta = Load(beta_);
    for (int64_t k = 0; k < size_; k += kLanes) {
      hn::Store(hn::NegMulAdd(beta, hn::Load(d, old_v_ + k), hn::Load(d, q_ + k)), d, q_ + k);
    }
    const V alpha = Dot(v_, q_);
    for (int64_t k = 0; k < size_; k += kLanes) {
      hn::Store(hn::NegMulAdd(alpha, hn::Load(d, v_ + k), hn::Load(d, q_ + k)), d, q_ + k);
    }
    const V next_square = Dot(q_, q_), next = hn::Sqrt(next_square);
    const V cosine = Load(cosine_), sine = Load(sine_), bar = Load(bar_), above = Load(above_);
    const V delta = hn::MulAdd(cosine, bar, hn::Mul(sine, alpha));
    const V gamma_bar = hn::MulSub(sine, bar, hn::Mul(cosine, alpha));
    const V gamma_square = hn::MulAdd(gamma_bar, gamma_bar, next_square);
    const V largest = hn::Max(Load(largest_), hn::MulAdd(beta, beta, hn::MulAdd(alpha, alpha, next_square)));
    const Mask moves =
        hn::And(Open(), hn::Gt(gamma_square, hn::Mul(hn::Set(d, static_cast<T>(kUnseen * kUnseen)), largest)));
    const V inverse = hn::IfThenElseZero(moves, hn::Div(hn::Set(d, T(1)), hn::Sqrt(gamma_square)));
    const V turned_cosine = hn::Mul(gamma_bar, inverse), turned_sine = hn::Mul(next, inverse);
    const V step = hn::Mul(turned_cosine, Load(length_)), length = hn::Mul(turned_sine, Load(length_));
    const V scale = hn::IfThenElseZero(hn::Gt(next, hn::Zero(d)), hn::Div(hn::Set(d, T(1)), next));
    for (int64_t k = 0; k < size_; k += kLanes) {
      const V old = hn::NegMulAdd(above, hn::Load(d, old_w_ + k), hn::Load(d, v_ + k));
      const V w = hn::Mul(inverse, hn::NegMulAdd(delta, hn::Load(d, p_ + k), old));
      hn::Store(w, d, old_w_ + k);
      hn::Store(hn::MulAdd(step, w, hn::Load(d, x_ + k)), d, x_ + k);
      hn::Store(hn::Mul(scale, hn::Load(d, q_ + k)), d, old_v_ + k);
    }
    std::swap(v_, old_v_);
    std::swap(p_, old_w_);
    hn::Store(next, d, beta_.value);
    hn::Store(hn::Mul(sine, next), d, above_.value);
    hn::Store(hn::Neg(hn::Mul(cosine, next)), d, bar_.value);
    hn::Store(turned_cosine, d, cosine_.value);
    hn::Store(turned_sine, d, sine_.value);
    hn::Store(largest, d, largest_.value);
    hn::Store(length, d, length_.value);
    hn::Store(hn::Mul(length, length), d, norm_.value);
  }

  bool IsOver() const {
    const int64_t most = phase_ == Phase::kMinimal ? 2 * most_steps_ : most_steps_;
    return steps_ >= most || hn::AllFalse(D(), Open());
  }
  Mask Open() const { return hn::Gt(Load(norm_), Load(goal_)); }
  Mask Indefinite() const { return hn::Gt(Load(indefinite_), hn::Zero(D())); }
  V Preconditioned(int64_t k) const {
    const V r = hn::Load(D(), residual_ + k);
    return definite_ ? hn::Mul(r, hn::Load(D(), inverse_ + k)) : r;
  }
  V Norm() const {
    return SumOver(layout_, size_,
                   [&](int64_t k) HWY_ATTR { return hn::Mul(hn::Load(D(), residual_ + k), Preconditioned(k)); });
  }
  V Dot(const T* a, const T* b) const {
    return SumOver(layout_, size_,
                   [&](int64_t k) HWY_ATTR { return hn::Mul(hn::Load(D(), a + k), hn::Load(D(), b + k)); });
  }

  const Layout& layout_;
  const int64_t size_, most_steps_;
  const bool definite_;
  const T least_curvature_;
  const T* inverse_ = nullptr;
  T *x_, *residual_, *q_;
  T* p_;  // The direction; of minimal residuals: w.
  // Where A may be indefinite.
  T *right_ = nullptr, *v_ = nullptr, *old_v_ = nullptr, *old_w_ = nullptr;
  Scalar norm_, goal_;  // Squares: of the residual's length, and of what that is to be.
  Scalar spread_;       // (p, p / preconditioner)
  Scalar indefinite_;   // 1: A is.
  Scalar length_;       // Of the residual.
  Scalar cosine_, sine_, beta_, bar_, above_;
  Scalar largest_;     // Square of a column of the tridiagonal matrix.
  int64_t steps_ = 0;  // Of this phase.
  int rounds_ = 0;
  Phase phase_ = Phase::kConjugate;
};

}  // namespace sinkhorn::cpu::normalization::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // SINKHORN_KERNELS_CPU_NORMALIZATION_SYMMETRIC_INL_H_
