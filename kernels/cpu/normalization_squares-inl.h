// The linear solver for the shapes that come by the million: N x N, N = 4 and 8, all marginals 1, a fixed number of
// iterations. One matrix per lane; the scaling vectors of all iterations stay in registers, K in the first-level cache.
//
// The arithmetic is that of normalization_linear-inl.h. What is different is that everything is unrolled, that two
// groups of lanes of 4 x 4 go side by side (one alone waits for its own results), and that the lines of the next inputs
// and of the own outputs are fetched a few per iteration: fetched at once they would fill the core's line buffers and
// stop it.
#if defined(SINKHORN_KERNELS_CPU_NORMALIZATION_SQUARES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SINKHORN_KERNELS_CPU_NORMALIZATION_SQUARES_INL_H_
#undef SINKHORN_KERNELS_CPU_NORMALIZATION_SQUARES_INL_H_
#else
#define SINKHORN_KERNELS_CPU_NORMALIZATION_SQUARES_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "hwy/highway.h"
#include "kernels/cpu/half.h"
#include "kernels/cpu/normalization_io-inl.h"
#include "kernels/cpu/normalization_kernels.h"
#include "kernels/cpu/normalization_linear-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn {
namespace cpu {
namespace normalization {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// A line is what is scaled first: a row, or a column where the spec is transposed.
template <int N, Guard kGuard>
class Squares {
 public:
  using T = float;
  using D = hn::ScalableTag<T>;
  using V = hn::Vec<D>;
  static constexpr int kLanes = static_cast<int>(hn::MaxLanes(D()));
  static constexpr int kGroups = N == 4 ? 2 : 1;  // Side by side.
  static constexpr int64_t kMembers = int64_t{kLanes} * kGroups;
  static constexpr int kSize = N * N;

  Squares(const NormalizationSpec& spec, Arena* arena) : spec_(spec) {
    const int64_t slots = spec.unrolled ? spec.iterations + 1 : 0;
    stage_ = arena->Take<T>(kLanes * (kSize + kLanes));
    for (Lanes& g : groups_) {
      g.k = arena->Take<T>(kSize * kLanes);
      if (!spec.unrolled) continue;
      g.bar = arena->Take<T>(kSize * kLanes);
      if (spec.recipe.offset > 0) g.factor = arena->Take<T>(kSize * kLanes);
      for (T** x : {&g.u, &g.v, &g.x, &g.y}) *x = arena->Take<T>(slots * N * kLanes);
    }
  }

  void Solve(const int64_t* members, int64_t count, NormalizationTally* tally) {
    for (int64_t first = 0; first < count; first += kMembers) {
      const int64_t size = std::min(kMembers, count - first);
      const bool in_order = members[first + size - 1] - members[first] == size - 1;
      // Any groups past the last member repeat it and store nothing.
      for (int g = 0; g < kGroups; ++g) Begin(&groups_[g], members + first, size, g * kLanes, tally);
      Fetcher fetchers[4];
      if (in_order) {
        const NormalizationInputs& in = spec_.problem.normalization;
        const Outputs& out = spec_.problem.outputs;
        const int64_t next = members[first] + size, next_size = std::min(kMembers, count - first - size);
        fetchers[0] = Fetcher(OutputTensor(out.plan, N, N), members[first], size, spec_.iterations);
        fetchers[1] = Fetcher(InputTensor(in.logits, N, N), next, next_size, spec_.iterations);
        fetchers[2] =
            Fetcher(InputTensor(in.cotangent, N, N), members[first], spec_.unrolled ? size : 0, spec_.iterations);
        fetchers[3] = Fetcher(OutputTensor(out.gradient_logits, N, N), members[first], size, spec_.iterations);
      }
      Iterate(fetchers);
      for (Lanes& g : groups_) {
        Finish(&g, tally);
        if (spec_.unrolled) Backward(&g, &fetchers[3], tally);
      }
    }
  }

 private:
  struct Lanes {
    int64_t member[kLanes];
    bool store[kLanes];
    bool any;
    T *k, *bar = nullptr, *factor = nullptr;
    T *u, *v, *x, *y;                // Of all iterations, from 0.
    HWY_ALIGN T first[N * kLanes];   // u of the last iteration,
    HWY_ALIGN T second[N * kLanes];  // v,
    HWY_ALIGN T sums[N * kLanes];    // and the sums that v was made from.
  };
  // Element j of line i.
  static constexpr int At(int i, int j) { return (i * N + j) * kLanes; }
  // Where element e of a tensor's matrix is kept.
  static constexpr int Place(int e, bool transposed) { return transposed ? At(e % N, e / N) : e * kLanes; }
  static V LoadAt(const T* matrix, int i, int j) { return hn::Load(D(), matrix + At(i, j)); }
  static V Line(const T* x, int i) { return hn::Load(D(), x + i * kLanes); }
  static void PutLine(V value, T* x, int i) { hn::Store(value, D(), x + i * kLanes); }

  // ---- Tensors to lanes and back ------------------------------------------------------------------------------------
  void Load(const TensorView& view, const Lanes& g, T* matrix) const {
    const D d;
    const T* source[kLanes];
    for (int l = 0; l < kLanes; ++l) {
      const int64_t offset = (view.shared ? 0 : g.member[l]) * kSize;
      if (view.dtype == DType::kFloat32) {
        source[l] = static_cast<const T*>(view.data) + offset;
      } else {
        LoadRow(view.dtype, view.data, offset, kSize, stage_ + l * kSize);
        source[l] = stage_ + l * kSize;
      }
    }
    static_assert(kSize % kLanes == 0, "whole vectors");
    SINKHORN_UNROLLED for (int e = 0; e < kSize; e += kLanes) {
      V v[kLanes];
      SINKHORN_UNROLLED for (int l = 0; l < kLanes; ++l) v[l] = hn::LoadU(d, source[l] + e);
      Transpose(d, v);
      if (spec_.transposed) {
        SINKHORN_UNROLLED for (int k = 0; k < kLanes; ++k) hn::Store(v[k], d, matrix + Place(e + k, true));
      } else {
        SINKHORN_UNROLLED for (int k = 0; k < kLanes; ++k) hn::Store(v[k], d, matrix + Place(e + k, false));
      }
    }
  }
  // entry(i, j) gives element j of line i.
  template <class F>
  void Store(F entry, const Lanes& g, const OutputView& view) const {
    if (spec_.transposed) {
      StoreOriented<true>(entry, g, view);
    } else {
      StoreOriented<false>(entry, g, view);
    }
  }
  template <bool kTransposed, class F>
  HWY_INLINE void StoreOriented(F entry, const Lanes& g, const OutputView& view) const {
    const D d;
    T* target[kLanes];
    const bool direct = view.dtype == DType::kFloat32;
    for (int l = 0; l < kLanes; ++l) {
      target[l] = direct && g.store[l] ? static_cast<T*>(view.data) + g.member[l] * kSize : stage_ + l * kSize;
    }
    SINKHORN_UNROLLED for (int e = 0; e < kSize; e += kLanes) {
      V v[kLanes];
      SINKHORN_UNROLLED for (int k = 0; k < kLanes; ++k) {
        v[k] = kTransposed ? entry((e + k) % N, (e + k) / N) : entry((e + k) / N, (e + k) % N);
      }
      Transpose(d, v);
      SINKHORN_UNROLLED for (int l = 0; l < kLanes; ++l) hn::StoreU(v[l], d, target[l] + e);
    }
    if (direct) return;
    for (int l = 0; l < kLanes; ++l) {
      if (g.store[l]) StoreRow(view.dtype, target[l], kSize, view.data, g.member[l] * kSize);
    }
  }

  // ---- Start --------------------------------------------------------------------------------------------------------
  void Begin(Lanes* g, const int64_t* members, int64_t count, int64_t begin, NormalizationTally* tally) {
    for (int l = 0; l < kLanes; ++l) {
      g->store[l] = begin + l < count;
      g->member[l] = members[g->store[l] ? begin + l : count - 1];
    }
    Load(spec_.problem.normalization.logits, *g, g->k);
    const D d;
    const V huge = hn::Set(d, std::numeric_limits<T>::max());
    V lowest = huge, lowest_line = huge, range = hn::Neg(huge);
    SINKHORN_UNROLLED for (int i = 0; i < N; ++i) {
      V x[N];
      SINKHORN_UNROLLED for (int j = 0; j < N; ++j) x[j] = LoadAt(g->k, i, j);
      V max = x[0], min = x[0];
      SINKHORN_UNROLLED for (int j = 1; j < N; ++j) {
        max = hn::Max(max, x[j]);
        min = hn::Min(min, x[j]);
      }
      lowest = hn::Min(lowest, min);
      lowest_line = hn::Min(lowest_line, max);
      range = hn::Max(range, hn::Sub(max, min));
      StartLine(g, i, max, x);
    }
    // Logits at or below the floor are rare enough to be left to the next tier.
    const double floor = std::max<double>(spec_.recipe.logit_floor, std::numeric_limits<T>::lowest());
    auto safe = hn::And(hn::Le(range, hn::Set(d, T(kRange))), hn::Gt(lowest, hn::Set(d, static_cast<T>(floor))));
    if (kGuard != Guard::kNone && !spec_.softmax()) {
      safe = hn::And(safe, hn::Ge(lowest_line, hn::Set(d, T(kLowestLine))));
    }
    HandOn(hn::Not(safe), g, tally);
  }

  // K of line i from its logits: the linear solver's ExpRow and SoftmaxRow.
  HWY_INLINE void StartLine(Lanes* g, int i, V max, const V* x) {
    const D d;
    const double offset = spec_.recipe.offset;
    V e[N], top = max, added = hn::Set(d, static_cast<T>(offset)), start = hn::Set(d, T(1));
    if (!spec_.softmax() && offset > 0) {
      const V log_offset = hn::Set(d, static_cast<T>(std::log(offset)));
      top = hn::Max(max, log_offset);
      added = Exp(d, hn::Sub(log_offset, top));
      SINKHORN_UNROLLED for (int j = 0; j < N; ++j) e[j] = ExpBounded(d, hn::Sub(x[j], top));
    } else {
      SINKHORN_UNROLLED for (int j = 0; j < N; ++j) e[j] = ExpInRange(d, hn::Sub(x[j], top));
    }
    if (spec_.softmax()) {
      V sum = e[0];
      SINKHORN_UNROLLED for (int j = 1; j < N; ++j) sum = hn::Add(sum, e[j]);
      const V scale = Reciprocal(d, sum);
      SINKHORN_UNROLLED for (int j = 0; j < N; ++j) e[j] = hn::Mul(e[j], scale);
    } else if (kGuard != Guard::kNone) {
      start = Exp(d, hn::Min(top, hn::Set(d, T(kRange))));
    }
    PutLine(start, g->first, i);
    SINKHORN_UNROLLED for (int j = 0; j < N; ++j) {
      const V entry = offset > 0 ? hn::Add(e[j], added) : e[j];
      hn::Store(entry, d, g->k + At(i, j));
      if (g->factor != nullptr) hn::Store(hn::Div(e[j], entry), d, g->factor + At(i, j));
    }
  }

  // Lanes beyond this tier: not stored, handed on.
  void HandOn(hn::Mask<D> lanes, Lanes* g, NormalizationTally* tally) {
    g->any = true;
    if (hn::AllFalse(D(), lanes)) return;
    HWY_ALIGN T flag[kLanes];
    hn::Store(hn::IfThenElse(lanes, hn::Set(D(), T(1)), hn::Zero(D())), D(), flag);
    g->any = false;
    for (int l = 0; l < kLanes; ++l) {
      if (g->store[l] && flag[l] != 0) tally->redo.push_back(g->member[l]);
      g->store[l] &= flag[l] == 0;
      g->any |= g->store[l];
    }
  }

  // ---- Iterations ---------------------------------------------------------------------------------------------------
  HWY_NOINLINE void Iterate(Fetcher* fetchers) {
    const D d;
    const V one = hn::Set(d, T(1)), guard = Guarded(), inverse = InverseGuard();
    const bool history = spec_.unrolled;
    V u[kGroups][N], v[kGroups][N], sum[kGroups][N];
    SINKHORN_UNROLLED for (int g = 0; g < kGroups; ++g) {
      SINKHORN_UNROLLED for (int i = 0; i < N; ++i) {
        u[g][i] = Line(groups_[g].first, i);
        v[g][i] = sum[g][i] = one;
      }
      if (history) Remember(groups_[g], 0, u[g], v[g]);
    }
    for (int32_t t = 1; t <= spec_.iterations; ++t) {
      for (int f = 0; f < 3; ++f) fetchers[f].Some();
      if (t > 1 || !spec_.softmax()) {
        SINKHORN_UNROLLED for (int g = 0; g < kGroups; ++g) {
          SINKHORN_UNROLLED for (int i = 0; i < N; ++i) {
            V s = hn::Mul(LoadAt(groups_[g].k, i, 0), v[g][0]);
            SINKHORN_UNROLLED for (int j = 1; j < N; ++j) s = hn::MulAdd(LoadAt(groups_[g].k, i, j), v[g][j], s);
            u[g][i] = Rescaled<kGuard>(d, s, u[g][i], one, guard, inverse);
          }
        }
      }
      SINKHORN_UNROLLED for (int g = 0; g < kGroups; ++g) {
        SINKHORN_UNROLLED for (int j = 0; j < N; ++j) {
          V s = hn::Mul(LoadAt(groups_[g].k, 0, j), u[g][0]);
          SINKHORN_UNROLLED for (int i = 1; i < N; ++i) s = hn::MulAdd(LoadAt(groups_[g].k, i, j), u[g][i], s);
          sum[g][j] = s;
          v[g][j] = Rescaled<kGuard>(d, s, v[g][j], one, guard, inverse);
        }
        if (history) Remember(groups_[g], t, u[g], v[g]);
      }
    }
    SINKHORN_UNROLLED for (int g = 0; g < kGroups; ++g) {
      SINKHORN_UNROLLED for (int i = 0; i < N; ++i) {
        PutLine(u[g][i], groups_[g].first, i);
        PutLine(v[g][i], groups_[g].second, i);
        PutLine(sum[g][i], groups_[g].sums, i);
      }
    }
  }
  HWY_INLINE static void Remember(const Lanes& g, int32_t t, const V* u, const V* v) {
    SINKHORN_UNROLLED for (int i = 0; i < N; ++i) {
      PutLine(u[i], g.u, t * N + i);
      PutLine(v[i], g.v, t * N + i);
    }
  }
  V Guarded() const { return hn::Set(D(), static_cast<T>(spec_.recipe.guard_value)); }
  V InverseGuard() const { return hn::Div(hn::Set(D(), T(1)), Guarded()); }

  // ---- P and its certificate ----------------------------------------------------------------------------------------
  HWY_NOINLINE void Finish(Lanes* g, NormalizationTally* tally) {
    const D d;
    const V one = hn::Set(d, T(1));
    V u[N], v[N], sum[N];
    V second_error = hn::Zero(d), first_error = hn::Zero(d);
    SINKHORN_UNROLLED for (int i = 0; i < N; ++i) {
      u[i] = Line(g->first, i);
      v[i] = Line(g->second, i);
      sum[i] = hn::Zero(d);
      second_error = hn::Add(second_error, hn::Abs(hn::MulSub(Line(g->sums, i), v[i], one)));
    }
    const auto entry = [&](int i, int j) HWY_ATTR {
      const V p = hn::Mul(hn::Mul(LoadAt(g->k, i, j), u[i]), v[j]);
      sum[i] = hn::Add(sum[i], p);
      return p;
    };
    const OutputView& plan = spec_.problem.outputs.plan;
    if (plan) {
      Store(entry, *g, plan);
    } else {
      SINKHORN_UNROLLED for (int e = 0; e < kSize; ++e) entry(e / N, e % N);
    }
    SINKHORN_UNROLLED for (int i = 0; i < N; ++i) first_error = hn::Add(first_error, hn::Abs(hn::Sub(sum[i], one)));
    const V errors = hn::Add(first_error, second_error);
    HandOn(hn::Not(hn::Lt(errors, hn::Set(d, std::numeric_limits<T>::max()))), g, tally);
    Certify(*g, first_error, second_error, sum, tally);
  }

  void Certify(const Lanes& g, V first_error, V second_error, const V* first_sums, NormalizationTally* tally) const {
    const D d;
    HWY_ALIGN T first[kLanes], second[kLanes];
    hn::Store(first_error, d, first);
    hn::Store(second_error, d, second);
    Convergence worst;
    worst.iterations = spec_.iterations;
    int64_t count = 0;
    T largest_first = 0, largest_second = 0;
    for (int l = 0; l < kLanes; ++l) {
      largest_first = std::max(largest_first, g.store[l] ? first[l] : T(0));
      largest_second = std::max(largest_second, g.store[l] ? second[l] : T(0));
      count += g.store[l];
    }
    worst.marginal_error_a = spec_.transposed ? largest_second : largest_first;
    worst.marginal_error_b = spec_.transposed ? largest_first : largest_second;
    worst.converged = largest_first == 0 && largest_second == 0;
    tally->Add(worst, count);

    const Outputs& out = spec_.problem.outputs;
    if (out.convergence == nullptr && !out.row_sums && !out.column_sums) return;
    HWY_ALIGN T first_sum[N * kLanes], second_sum[N * kLanes];
    for (int i = 0; i < N; ++i) {
      PutLine(first_sums[i], first_sum, i);
      PutLine(hn::Mul(Line(g.sums, i), Line(g.second, i)), second_sum, i);
    }
    for (int l = 0; l < kLanes; ++l) {
      if (!g.store[l]) continue;
      StoreSums(spec_.transposed ? second_sum : first_sum, l, g.member[l], out.row_sums);
      StoreSums(spec_.transposed ? first_sum : second_sum, l, g.member[l], out.column_sums);
      if (out.convergence == nullptr) continue;
      Convergence& c = out.convergence[g.member[l]] = worst;
      c.marginal_error_a = spec_.transposed ? second[l] : first[l];
      c.marginal_error_b = spec_.transposed ? first[l] : second[l];
      c.converged = first[l] == 0 && second[l] == 0;
    }
  }
  static void StoreSums(const T* sums, int lane, int64_t member, const OutputView& view) {
    if (!view) return;
    T one[N];
    for (int i = 0; i < N; ++i) one[i] = sums[i * kLanes + lane];
    StoreRow(view.dtype, one, N, view.data, member * N);
  }

  // ---- Backward -----------------------------------------------------------------------------------------------------
  // bar K = dP * P - K * sum_t (u_t y_t^T + x_t v_{t-1}^T): see normalization_solver-inl.h.
  void Backward(Lanes* g, Fetcher* gradient, NormalizationTally* tally) {
    if (!g->any) return;
    Load(spec_.problem.normalization.cotangent, *g, g->bar);
    V row_bar[N], col_bar[N];
    Multiply(*g, row_bar, col_bar);
    Reverse(*g, row_bar, col_bar, gradient);
    Collect(*g);
    Chain(*g, tally);
    Store([&](int i, int j) HWY_ATTR { return LoadAt(g->bar, i, j); }, *g, spec_.problem.outputs.gradient_logits);
  }

  // bar = dP * P and its sums.
  HWY_INLINE void Multiply(const Lanes& g, V* row_bar, V* col_bar) const {
    const D d;
    V v[N];
    SINKHORN_UNROLLED for (int j = 0; j < N; ++j) {
      v[j] = Line(g.second, j);
      col_bar[j] = hn::Zero(d);
    }
    SINKHORN_UNROLLED for (int i = 0; i < N; ++i) {
      const V u = Line(g.first, i);
      row_bar[i] = hn::Zero(d);
      SINKHORN_UNROLLED for (int j = 0; j < N; ++j) {
        const V p = hn::Mul(hn::Mul(LoadAt(g.k, i, j), u), v[j]);
        const V bar = hn::Mul(LoadAt(g.bar, i, j), p);
        hn::Store(bar, d, g.bar + At(i, j));
        row_bar[i] = hn::Add(row_bar[i], bar);
        col_bar[j] = hn::Add(col_bar[j], bar);
      }
    }
  }

  HWY_INLINE void Reverse(const Lanes& g, V* row_bar, V* col_bar, Fetcher* gradient) const {
    const D d;
    const V one = hn::Set(d, T(1)), guard = Guarded(), inverse = InverseGuard();
    for (int32_t t = spec_.iterations; t > 0; --t) {
      gradient->Some();
      const T *u_old = g.u + (t - 1) * N * kLanes, *u_now = g.u + t * N * kLanes;
      const T *v_old = g.v + (t - 1) * N * kLanes, *v_now = g.v + t * N * kLanes;
      V x[N], y[N];
      SINKHORN_UNROLLED for (int j = 0; j < N; ++j) {
        y[j] = Unscaled<kGuard>(d, Line(v_old, j), Line(v_now, j), one, one, guard, inverse, &col_bar[j]);
        PutLine(y[j], g.y, t * N + j);
      }
      SINKHORN_UNROLLED for (int i = 0; i < N; ++i) {
        V s = hn::Mul(LoadAt(g.k, i, 0), y[0]);
        SINKHORN_UNROLLED for (int j = 1; j < N; ++j) s = hn::MulAdd(LoadAt(g.k, i, j), y[j], s);
        const V u = Line(u_now, i);
        row_bar[i] = hn::NegMulAdd(u, s, row_bar[i]);
        x[i] = Unscaled<kGuard>(d, Line(u_old, i), u, one, one, guard, inverse, &row_bar[i]);
        if (t == 1 && spec_.softmax()) x[i] = hn::Zero(d);
        PutLine(x[i], g.x, t * N + i);
      }
      SINKHORN_UNROLLED for (int j = 0; j < N; ++j) {
        V s = hn::Mul(LoadAt(g.k, 0, j), x[0]);
        SINKHORN_UNROLLED for (int i = 1; i < N; ++i) s = hn::MulAdd(LoadAt(g.k, i, j), x[i], s);
        col_bar[j] = hn::NegMulAdd(Line(v_old, j), s, col_bar[j]);
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

  static constexpr double kRange = 60, kLowestLine = -40;  // As for the linear solver.

  const NormalizationSpec& spec_;
  T* stage_;
  Lanes groups_[kGroups];
};

template <class Solver>
void SolveAll(const NormalizationSpec& spec, const int64_t* members, int64_t count, Scratch* scratch,
              NormalizationTally* tally) {
  Arena measure(nullptr);
  Solver(spec, &measure);
  Arena arena(scratch->Get(measure.used()));
  Solver(spec, &arena).Solve(members, count, tally);
}

}  // namespace HWY_NAMESPACE
}  // namespace normalization
}  // namespace cpu
}  // namespace sinkhorn
HWY_AFTER_NAMESPACE();

#endif  // SINKHORN_KERNELS_CPU_NORMALIZATION_SQUARES_INL_H_
