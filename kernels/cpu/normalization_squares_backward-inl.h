// The unrolled backward pass of normalization_squares-inl.h: normalization_solver-inl.h has the mathematics.
#if defined(SINKHORN_KERNELS_CPU_NORMALIZATION_SQUARES_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SINKHORN_KERNELS_CPU_NORMALIZATION_SQUARES_BACKWARD_INL_H_
#undef SINKHORN_KERNELS_CPU_NORMALIZATION_SQUARES_BACKWARD_INL_H_
#else
#define SINKHORN_KERNELS_CPU_NORMALIZATION_SQUARES_BACKWARD_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "kernels/cpu/normalization_guard-inl.h"
#include "kernels/cpu/normalization_io-inl.h"
#include "kernels/cpu/normalization_kernels.h"
#include "kernels/cpu/normalization_squares_lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::cpu::normalization::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <int N, Guard kGuard>
class SquaresBackward : protected SquareLanes<N> {
  using Base = SquareLanes<N>;

 protected:
  using Base::At;
  using Base::Base;
  using Base::kLanes;
  using Base::kSize;
  using Base::Line;
  using Base::LoadAt;
  using Base::PutLine;
  using Base::spec_;
  using typename Base::D;
  using typename Base::Lanes;
  using typename Base::T;
  using typename Base::V;
  // Groups of lanes side by side: as many as have their history in the first-level cache.
  static constexpr int kHistoryGroups = N == 4 ? 2 : 1;

  // bar K = dP * P - K * sum_t (u_t y_t^T + x_t v_{t-1}^T): see normalization_solver-inl.h.
  void Backward(Lanes* groups, Fetcher* gradient, NormalizationTally* tally) {
    for (int g = 0; g < kHistoryGroups; ++g) {
      this->Load(spec_.problem.normalization.cotangent, groups[g], groups[g].bar);
      Multiply(&groups[g]);
    }
    Reverse(groups, gradient);
    for (int i = 0; i < kHistoryGroups; ++i) {
      const Lanes& g = groups[i];
      if (!g.any) continue;
      Collect(g);
      Chain(g, tally);
      this->Store([&](int r, int c) HWY_ATTR { return LoadAt(g.bar, r, c); }, g, spec_.problem.outputs.gradient_logits);
    }
  }

  V Guarded() const { return hn::Set(D(), static_cast<T>(spec_.recipe.guard_value)); }
  V InverseGuard() const { return hn::Div(hn::Set(D(), T(1)), Guarded()); }

 private:
  // bar = dP * P and its sums.
  HWY_INLINE void Multiply(Lanes* g) const {
    const D d;
    V v[N], col_bar[N];
    SINKHORN_UNROLLED for (int j = 0; j < N; ++j) {
      v[j] = Line(g->second, j);
      col_bar[j] = hn::Zero(d);
    }
    SINKHORN_UNROLLED for (int i = 0; i < N; ++i) {
      const V u = Line(g->first, i);
      V row_bar = hn::Zero(d);
      SINKHORN_UNROLLED for (int j = 0; j < N; ++j) {
        const V p = hn::Mul(hn::Mul(LoadAt(g->k, i, j), u), v[j]);
        const V bar = hn::Mul(LoadAt(g->bar, i, j), p);
        hn::Store(bar, d, g->bar + At(i, j));
        row_bar = hn::Add(row_bar, bar);
        col_bar[j] = hn::Add(col_bar[j], bar);
      }
      PutLine(row_bar, g->first_bar, i);
    }
    SINKHORN_UNROLLED for (int j = 0; j < N; ++j) PutLine(col_bar[j], g->second_bar, j);
  }

  HWY_NOINLINE void Reverse(const Lanes* groups, Fetcher* gradient) const {
    constexpr int kCount = kHistoryGroups;
    const V one = hn::Set(D(), T(1)), guard = Guarded(), inverse = InverseGuard();
    V row_bar[kCount][N], col_bar[kCount][N];
    SINKHORN_UNROLLED for (int g = 0; g < kCount; ++g) {
      SINKHORN_UNROLLED for (int i = 0; i < N; ++i) {
        row_bar[g][i] = Line(groups[g].first_bar, i);
        col_bar[g][i] = Line(groups[g].second_bar, i);
      }
    }
    for (int32_t t = spec_.iterations; t > 0; --t) {
      gradient->Some();
      const int64_t now = int64_t{t} * N * kLanes, old = now - N * kLanes;
      const bool skip = t == 1 && spec_.softmax();
      V x[kCount][N];
      SINKHORN_UNROLLED for (int g = 0; g < kCount; ++g) {
        const Lanes& lanes = groups[g];
        V y[N];
        SINKHORN_UNROLLED for (int j = 0; j < N; ++j) {
          y[j] = Unscaled<kGuard>(D(), Line(lanes.v + old, j), Line(lanes.v + now, j), one, one, guard, inverse,
                                  &col_bar[g][j]);
          PutLine(y[j], lanes.y + now, j);
        }
        SINKHORN_UNROLLED for (int i = 0; i < N; ++i) {
          const V s = this->RowDot(lanes.k, i, y);
          const V u = Line(lanes.u + now, i);
          row_bar[g][i] = hn::NegMulAdd(u, s, row_bar[g][i]);
          x[g][i] = Unscaled<kGuard>(D(), Line(lanes.u + old, i), u, one, one, guard, inverse, &row_bar[g][i]);
          if (skip) x[g][i] = hn::Zero(D());
          PutLine(x[g][i], lanes.x + now, i);
        }
      }
      SINKHORN_UNROLLED for (int g = 0; g < kCount; ++g) {
        const Lanes& lanes = groups[g];
        SINKHORN_UNROLLED for (int j = 0; j < N; ++j) {
          const V s = this->ColumnDot(lanes.k, j, x[g]);
          col_bar[g][j] = hn::NegMulAdd(Line(lanes.v + old, j), s, col_bar[g][j]);
        }
      }
    }
  }

  // bar -= K * sum_t (...), in tiles of 4 x 4 sums.
  HWY_INLINE void Collect(const Lanes& g) const {
    const D d;
    for (int i = 0; i < N; i += 4) {
      for (int j = 0; j < N; j += 4) {
        V sum[4][4];
        SINKHORN_UNROLLED for (int r = 0; r < 4; ++r) {
          SINKHORN_UNROLLED for (int c = 0; c < 4; ++c) sum[r][c] = hn::Zero(d);
        }
        for (int32_t t = 1; t <= spec_.iterations; ++t) {
          V y[4], v[4];
          SINKHORN_UNROLLED for (int c = 0; c < 4; ++c) {
            y[c] = Line(g.y, t * N + j + c);
            v[c] = Line(g.v, (t - 1) * N + j + c);
          }
          SINKHORN_UNROLLED for (int r = 0; r < 4; ++r) {
            const V u = Line(g.u, t * N + i + r), x = Line(g.x, t * N + i + r);
            SINKHORN_UNROLLED for (int c = 0; c < 4; ++c) {
              sum[r][c] = hn::MulAdd(u, y[c], hn::MulAdd(x, v[c], sum[r][c]));
            }
          }
        }
        SINKHORN_UNROLLED for (int r = 0; r < 4; ++r) {
          SINKHORN_UNROLLED for (int c = 0; c < 4; ++c) {
            const V bar = hn::NegMulAdd(LoadAt(g.k, i + r, j + c), sum[r][c], LoadAt(g.bar, i + r, j + c));
            hn::Store(bar, d, g.bar + At(i + r, j + c));
          }
        }
      }
    }
  }

  // From log K to the logits; checks that all is finite.
  HWY_INLINE void Chain(const Lanes& g, NormalizationTally* tally) const {
    const D d;
    V infinite = hn::Zero(d);
    SINKHORN_UNROLLED for (int i = 0; i < N; ++i) {
      V total = hn::Zero(d);
      SINKHORN_UNROLLED for (int j = 0; j < N; ++j) {
        V bar = LoadAt(g.bar, i, j);
        infinite = hn::MulAdd(bar, hn::Zero(d), infinite);
        if (g.factor != nullptr) {
          bar = hn::Mul(bar, LoadAt(g.factor, i, j));
          hn::Store(bar, d, g.bar + At(i, j));
        }
        total = hn::Add(total, bar);
      }
      if (!spec_.softmax()) continue;
      SINKHORN_UNROLLED for (int j = 0; j < N; ++j) {
        V softmax = LoadAt(g.k, i, j);
        if (g.factor != nullptr) softmax = hn::Mul(softmax, LoadAt(g.factor, i, j));
        hn::Store(hn::NegMulAdd(softmax, total, LoadAt(g.bar, i, j)), d, g.bar + At(i, j));
      }
    }
    HWY_ALIGN T flag[kLanes];
    hn::Store(infinite, d, flag);
    for (int l = 0; l < kLanes; ++l) {
      if (g.store[l] && !(flag[l] == 0)) tally->finite = false;
    }
  }
};

}  // namespace sinkhorn::cpu::normalization::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // SINKHORN_KERNELS_CPU_NORMALIZATION_SQUARES_BACKWARD_INL_H_
