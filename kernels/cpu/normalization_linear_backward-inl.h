// The unrolled backward pass of the linear solver: normalization_solver-inl.h has the mathematics.
#if defined(SINKHORN_KERNELS_CPU_NORMALIZATION_LINEAR_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SINKHORN_KERNELS_CPU_NORMALIZATION_LINEAR_BACKWARD_INL_H_
#undef SINKHORN_KERNELS_CPU_NORMALIZATION_LINEAR_BACKWARD_INL_H_
#else
#define SINKHORN_KERNELS_CPU_NORMALIZATION_LINEAR_BACKWARD_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/cpu/normalization_guard-inl.h"
#include "kernels/cpu/normalization_outputs-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::cpu::normalization::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class Derived, class Layout>
class LinearBackward : public ForwardSolver<Derived, Layout, false> {
 public:
  using Forward = ForwardSolver<Derived, Layout, false>;
  using Forward::Forward;
  using typename Forward::D;
  using typename Forward::T;
  using typename Forward::V;
  static constexpr int64_t kLanes = Forward::kLanes;

 protected:
  friend Forward;

  V RowGuard() const { return hn::Load(D(), this->marginals_.row_guard.value); }
  V ColGuard() const { return hn::Load(D(), this->marginals_.col_guard.value); }
  V Inverse(V guard) const { return hn::Div(hn::Set(D(), T(1)), guard); }

  // ---- Reverse of iteration t: columns, then rows -------------------------------------------------------------------
  void BeginReverseStep() {
    WithGuard(this->spec_.recipe.guard, [&](auto guard) HWY_ATTR { this->template ReverseColumns<guard()>(); });
  }
  template <Guard kGuard>
  void ReverseColumns() {
    const D d;
    const T* old = this->W(this->t_ - 1);
    const T* now = this->W(this->t_);
    T* y = this->Y(this->t_);
    const auto idle = Idle();
    const V guard = ColGuard(), inverse = Inverse(guard);
    for (int64_t jv = 0; jv < this->layout_.vectors(); ++jv) {
      const int64_t k = jv * kLanes;
      const V bar = hn::Load(d, this->col_bar_ + k);
      V carried = bar;
      const V multiplier =
          Unscaled<kGuard>(d, hn::Load(d, old + k), hn::Load(d, now + k), hn::Load(d, this->marginals_.col + k),
                           hn::Load(d, this->marginals_.col_inverse + k), guard, inverse, &carried);
      hn::Store(hn::IfThenZeroElse(idle, multiplier), d, y + k);
      hn::Store(this->layout_.KeepColumns(jv, hn::IfThenElse(idle, bar, carried)), d, this->col_bar_ + k);
    }
  }

  // Lanes whose result is of an earlier iteration than t.
  hn::Mask<D> Idle() const {
    const D d;
    const V stopped = hn::Load(d, this->stopped_.value);
    return hn::And(hn::Ne(stopped, hn::Zero(d)), hn::Lt(stopped, hn::Set(d, static_cast<T>(this->t_))));
  }

  void ReverseRows(int64_t block, int64_t begin, int64_t end) {
    WithGuard(this->spec_.recipe.guard,
              [&](auto guard) HWY_ATTR { this->template ReverseRowsGuarded<guard()>(block, begin, end); });
  }
  template <Guard kGuard>
  void ReverseRowsGuarded(int64_t block, int64_t begin, int64_t end) {
    const T* old = this->U(this->t_ - 1);
    const T* now = this->U(this->t_);
    T* x = this->X(this->t_);
    T* row_bar = this->row_bar_;
    const T* marginal = this->marginals_.row;
    const T* inverse_marginal = this->marginals_.row_inverse;
    const auto idle = Idle();
    const bool skip = this->row_step_is_done();
    const V guard = RowGuard(), inverse = Inverse(guard);
    const auto reverse = [=](auto row, V s) HWY_ATTR {
      const D d;
      const V u = row.Load(now);
      const V bar = hn::NegMulAdd(u, s, row.Load(row_bar));
      V carried = bar;
      V multiplier = Unscaled<kGuard>(d, row.Load(old), u, row.Load(marginal), row.Load(inverse_marginal), guard,
                                      inverse, &carried);
      multiplier = hn::IfThenZeroElse(idle, multiplier);
      if (skip) multiplier = hn::Zero(d);
      row.Store(multiplier, x);
      row.Store(hn::IfThenElse(idle, bar, carried), row_bar);
      return multiplier;
    };
    this->InPanels(block, begin, end, this->Accumulator(block), nullptr,
                   [&](int64_t first, int64_t last, T* sum, T*)
                       HWY_ATTR { this->layout_.Sweep(this->matrix_, first, last, this->Y(this->t_), sum, reverse); });
  }

  void EndReverse() {
    const D d;
    this->CombineColumns(this->Accumulator(0));
    const T* v = this->W(this->t_ - 1);
    for (int64_t k = 0; k < this->layout_.col_elements(); k += kLanes) {
      const V bar =
          hn::NegMulAdd(hn::Load(d, v + k), hn::Load(d, this->Accumulator(0) + k), hn::Load(d, this->col_bar_ + k));
      hn::Store(bar, d, this->col_bar_ + k);
    }
  }

  // ---- bar K = dP * P - K * sum_t (u_t y_t^T + x_t v_{t-1}^T) -------------------------------------------------------
  void GradientRows(int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + 4 <= end; i += 4) GradientTiles<4>(i);
    for (; i < end; ++i) GradientTiles<1>(i);
  }
  template <int R>
  void GradientTiles(int64_t i) {
    int64_t jv = 0;
    for (; jv + 4 <= this->layout_.vectors(); jv += 4) GradientTile<R, 4>(i, jv);
    for (; jv < this->layout_.vectors(); ++jv) GradientTile<R, 1>(i, jv);
  }
  template <int R, int C>
  void GradientTile(int64_t i, int64_t jv) {
    const D d;
    const Layout& layout = this->layout_;
    V sum[R][C];
    SINKHORN_UNROLLED for (int r = 0; r < R; ++r) {
      SINKHORN_UNROLLED for (int c = 0; c < C; ++c) sum[r][c] = hn::Zero(d);
    }
    const int32_t last = this->last_;
    for (int32_t t = 1; t <= last; ++t) {
      const T* u = this->U(t);
      const T* x = this->X(t);
      const T* v = this->W(t - 1) + jv * kLanes;
      const T* y = this->Y(t) + jv * kLanes;
      V vc[C], yc[C];
      SINKHORN_UNROLLED for (int c = 0; c < C; ++c) {
        vc[c] = hn::Load(d, v + c * kLanes);
        yc[c] = hn::Load(d, y + c * kLanes);
      }
      SINKHORN_UNROLLED for (int r = 0; r < R; ++r) {
        const V ur = layout.LoadRow(u, i + r), xr = layout.LoadRow(x, i + r);
        SINKHORN_UNROLLED for (int c = 0; c < C; ++c) {
          sum[r][c] = hn::MulAdd(ur, yc[c], hn::MulAdd(xr, vc[c], sum[r][c]));
        }
      }
    }
    SINKHORN_UNROLLED for (int r = 0; r < R; ++r) {
      SINKHORN_UNROLLED for (int c = 0; c < C; ++c) {
        const int64_t at = (i + r) * layout.stride() + (jv + c) * kLanes;
        T* bar = this->cotangent_ + at;
        hn::Store(hn::NegMulAdd(hn::Load(d, this->matrix_ + at), sum[r][c], hn::Load(d, bar)), d, bar);
      }
    }
  }
  // gradient_ij -= softmax_ij * total, softmax = factor K / r.
  void SoftmaxBackward(int64_t i, V total) {
    const D d;
    const Layout& layout = this->layout_;
    const V marginal =
        hn::Mul(layout.LoadRow(this->marginals_.row, i), hn::Load(d, this->marginals_.row_unscale.value));
    const V scale = hn::Div(total, marginal);
    for (int64_t k = 0; k < layout.stride(); k += kLanes) {
      const int64_t at = i * layout.stride() + k;
      V softmax = hn::Load(d, this->matrix_ + at);
      if (this->factor_ != nullptr) softmax = hn::Mul(softmax, hn::Load(d, this->factor_ + at));
      hn::Store(hn::NegMulAdd(softmax, scale, hn::Load(d, this->cotangent_ + at)), d, this->cotangent_ + at);
    }
  }
};

}  // namespace sinkhorn::cpu::normalization::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // SINKHORN_KERNELS_CPU_NORMALIZATION_LINEAR_BACKWARD_INL_H_
