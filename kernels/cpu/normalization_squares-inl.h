// The linear solver for the shapes that come by the million: N x N, N = 4 and 8, all marginals 1, a fixed number of
// iterations. One matrix per lane; the scaling vectors of all iterations stay in registers, K in the first-level cache.
//
// The arithmetic is that of normalization_linear-inl.h. What is different is that everything is unrolled, that groups
// of lanes of 4 x 4 go side by side (one alone waits for its own results), and that the lines of the next inputs and of
// the own outputs are fetched a few per iteration: fetched at once they would fill the core's line buffers and stop it.
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
#include <utility>
#include <vector>

#include "hwy/highway.h"
#include "kernels/cpu/half.h"
#include "kernels/cpu/normalization_guard-inl.h"
#include "kernels/cpu/normalization_io-inl.h"
#include "kernels/cpu/normalization_kernels.h"
#include "kernels/cpu/normalization_squares_backward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::cpu::normalization::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// c / s_i, i < 4, with c such that c / s_0 is within 12 % of 1, and no division: c / s_0 = scale s_1 s_2 s_3, and the
// scale is of the size of 1 / (s_1 s_2 s_3), for which the difference of the representations as integers does.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void ProportionalInverses(D d, const V* s, V* inverse) {
  const hn::RebindToUnsigned<D> du;
  const V ab = hn::Mul(s[0], s[1]), ce = hn::Mul(s[2], s[3]), first = hn::Mul(s[1], ce);
  const V scale = hn::BitCast(d, hn::Sub(hn::Set(du, 0x7ef311c7u), hn::BitCast(du, first)));
  const V per_ab = hn::Mul(ce, scale), per_ce = hn::Mul(ab, scale);
  inverse[0] = hn::Mul(first, scale);
  inverse[1] = hn::Mul(s[0], per_ab);
  inverse[2] = hn::Mul(s[3], per_ce);
  inverse[3] = hn::Mul(s[2], per_ce);
}

template <int N, Guard kGuard>
class Squares : private SquaresBackward<N, kGuard> {
  using Base = SquaresBackward<N, kGuard>;
  using Base::At;
  using Base::kLanes;
  using Base::kLinesElements;
  using Base::kSize;
  using Base::Line;
  using Base::LoadAt;
  using Base::PutLine;
  using Base::spec_;
  using Base::stage_;
  using typename Base::D;
  using typename Base::Lanes;
  using typename Base::T;
  using typename Base::V;

 public:
  // Up to the last step a common factor of u or of v changes nothing but v or u, unless a guard or the backward pass
  // sees it. The four of a side are then within a factor exp(range) of the first, which is near 1, and products of
  // three of their sums must be normal: wider members take the plain way.
  static constexpr bool kFreeOfScale = N == 4 && kGuard == Guard::kNone;
  // Groups of lanes side by side; the few with a history, or where members are few.
  static constexpr int kMany = N == 4 ? 4 : 1, kFew = Base::kHistoryGroups;
  // For `count` members. `wide`: of any range that the linear solver holds; see kFreeOfScale.
  Squares(const NormalizationSpec& spec, int64_t count, bool wide, Arena* arena)
      : Base(spec), wide_(wide), groups_count_(spec.unrolled || wide || count <= kFew * kLanes ? kFew : kMany) {
    const int64_t slots = spec.unrolled ? spec.iterations + 1 : 0;
    stage_ = arena->Take<T>(kLanes * (kSize + kLanes));
    for (int i = 0; i < groups_count_; ++i) {
      Lanes& g = groups_[i];
      g.k = arena->Take<T>(kSize * kLanes);
      if (!spec.unrolled) continue;
      g.bar = arena->Take<T>(kSize * kLanes);
      if (spec.recipe.offset > 0) g.factor = arena->Take<T>(kSize * kLanes);
      for (T** x : {&g.u, &g.v, &g.x, &g.y}) *x = arena->Take<T>(slots * N * kLanes);
    }
  }

  void Solve(const int64_t* members, int64_t count, NormalizationTally* tally) {
    const int64_t capacity = groups_count_ * kLanes;
    for (int64_t first = 0; first < count; first += capacity) {
      const int64_t size = std::min(capacity, count - first);
      const bool in_order = members[first + size - 1] - members[first] == size - 1;
      // Lanes past the last member repeat it and store nothing.
      bool any = false;
      for (int g = 0; g < groups_count_; ++g) {
        Begin(&groups_[g], members + first, size, g * kLanes, tally);
        any |= groups_[g].any;
      }
      if (!any) continue;  // All too wide for this way: they take the other.
      Fetcher fetchers[4];
      if (in_order) {
        const NormalizationInputs& in = spec_.problem.normalization;
        const Outputs& out = spec_.problem.outputs;
        const int64_t next = members[first] + size, next_size = std::min(capacity, count - first - size);
        fetchers[0] = Fetcher(OutputTensor(out.plan, N, N), members[first], size, spec_.iterations);
        fetchers[1] = Fetcher(InputTensor(in.logits, N, N), next, next_size, spec_.iterations);
        fetchers[2] =
            Fetcher(InputTensor(in.cotangent, N, N), members[first], spec_.unrolled ? size : 0, spec_.iterations);
        fetchers[3] = Fetcher(OutputTensor(out.gradient_logits, N, N), members[first], size, spec_.iterations);
      }
      if (spec_.unrolled) {
        Iterate<kFew, false, true>(fetchers);
      } else if (wide_) {
        Iterate<kFew, false, false>(fetchers);
      } else if (groups_count_ == kFew) {
        Iterate<kFew, kFreeOfScale, false>(fetchers);
      } else {
        Iterate<kMany, kFreeOfScale, false>(fetchers);
      }
      for (int g = 0; g < groups_count_; ++g) Finish(&groups_[g], tally);
      if (spec_.unrolled) this->Backward(groups_, &fetchers[3], tally);
    }
    ReportWorst(tally);
  }

 private:
  // ---- Start --------------------------------------------------------------------------------------------------------
  void Begin(Lanes* g, const int64_t* members, int64_t count, int64_t begin, NormalizationTally* tally) {
    this->Assign(members, count, begin, g);
    const TensorView& logits = spec_.problem.normalization.logits;
    const T* source = this->Source(logits, *g);
    if (spec_.transposed) this->Load(logits, *g, g->k);
    const bool plain = spec_.recipe.offset == 0 && !spec_.softmax();
    const Extremes found = plain ? StartLines<true>(source, g) : StartLines<false>(source, g);
    // Logits at or below the floor are rare enough to be left to the next tier.
    const double floor = std::max<double>(spec_.recipe.logit_floor, std::numeric_limits<T>::lowest());
    const D d;
    auto safe = hn::And(hn::Le(found.range, hn::Set(d, Range())), hn::Gt(found.lowest, hn::Set(d, T(floor))));
    if (kGuard != Guard::kNone && !spec_.softmax()) {
      safe = hn::And(safe, hn::Ge(found.lowest_line, hn::Set(d, T(kLowestLine))));
    }
    this->HandOn(hn::Not(safe), g, tally);
  }

  // Of the logits: the lowest, the lowest maximum of a line, the widest line.
  struct Extremes {
    V lowest, lowest_line, range;
  };
  // K of all lines. `kPlain`: exp alone.
  template <bool kPlain>
  HWY_INLINE Extremes StartLines(const T* source, Lanes* g) const {
    const D d;
    const V huge = hn::Set(d, std::numeric_limits<T>::max());
    const bool loaded = spec_.transposed;  // Into K.
    Extremes found = {huge, huge, hn::Neg(huge)};
    for (int e = 0; e < kSize; e += kLinesElements) {
      V x[kLinesElements];
      if (loaded) {
        SINKHORN_UNROLLED for (int k = 0; k < kLinesElements; ++k) x[k] = hn::Load(d, g->k + (e + k) * kLanes);
      } else {
        SINKHORN_UNROLLED for (int p = 0; p < kLinesElements; p += kLanes)
            LoadTransposed(d, source + e + p, kSize, x + p);
      }
      SINKHORN_UNROLLED for (int k = 0; k < kLinesElements; k += N) {
        const auto larger = [](V a, V b) HWY_ATTR { return hn::Max(a, b); };
        const auto smaller = [](V a, V b) HWY_ATTR { return hn::Min(a, b); };
        const V max = Folded(x + k, larger), min = Folded(x + k, smaller);
        found.lowest = hn::Min(found.lowest, min);
        found.lowest_line = hn::Min(found.lowest_line, max);
        found.range = hn::Max(found.range, hn::Sub(max, min));
        if constexpr (kPlain) {
          PlainLine(g, (e + k) / N, max, x + k);
        } else {
          StartLine(g, (e + k) / N, max, x + k);
        }
      }
    }
    return found;
  }

  HWY_INLINE static void PlainLine(Lanes* g, int i, V max, const V* x) {
    const D d;
    SINKHORN_UNROLLED for (int j = 0; j < N; ++j) hn::Store(ExpInRange(d, hn::Sub(x[j], max)), d, g->k + At(i, j));
    PutLine(kGuard == Guard::kNone ? hn::Set(d, T(1)) : Exp(d, hn::Min(max, hn::Set(d, T(kRange)))), g->first, i);
  }

  // In pairs: one after the other would wait for each result.
  template <class F>
  HWY_INLINE static V Folded(const V* x, F combine) {
    V part[N / 2];
    SINKHORN_UNROLLED for (int j = 0; j < N / 2; ++j) part[j] = combine(x[j], x[j + N / 2]);
    SINKHORN_UNROLLED for (int size = N / 4; size > 0; size /= 2) {
      SINKHORN_UNROLLED for (int j = 0; j < size; ++j) part[j] = combine(part[j], part[j + size]);
    }
    return part[0];
  }

  // K of line i from its logits: the linear solver's OffsetRow and SoftmaxRow.
  HWY_INLINE void StartLine(Lanes* g, int i, V max, const V* x) const {
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

  // ---- Iterations ---------------------------------------------------------------------------------------------------
  template <int kCount, bool kProportional, bool kHistory>
  HWY_NOINLINE void Iterate(Fetcher* fetchers) {
    V u[kCount][N], v[kCount][N], sum[N];
    SINKHORN_UNROLLED for (int g = 0; g < kCount; ++g) {
      SINKHORN_UNROLLED for (int i = 0; i < N; ++i) {
        u[g][i] = Line(groups_[g].first, i);
        v[g][i] = hn::Set(D(), T(1));
      }
      if (kHistory) Remember(groups_[g], 0, u[g], v[g]);
    }
    for (int32_t t = 1; t < spec_.iterations; ++t) {
      for (int f = 0; f < 3; ++f) fetchers[f].Some();
      if (t > 1 || !spec_.softmax()) {
        SINKHORN_UNROLLED for (int g = 0; g < kCount; ++g) ScaleLines<kProportional>(groups_[g], v[g], u[g]);
      }
      SINKHORN_UNROLLED for (int g = 0; g < kCount; ++g) {
        ScaleColumns<kProportional>(groups_[g], u[g], sum, v[g]);
        if (kHistory) Remember(groups_[g], t, u[g], v[g]);
      }
    }
    for (int f = 0; f < 3; ++f) fetchers[f].Some();
    SINKHORN_UNROLLED for (int g = 0; g < kCount; ++g) {
      if (spec_.iterations > 1 || !spec_.softmax()) ScaleLines<kProportional>(groups_[g], v[g], u[g]);
      ScaleColumns<false>(groups_[g], u[g], sum, v[g]);
      if (kHistory) Remember(groups_[g], spec_.iterations, u[g], v[g]);
      SINKHORN_UNROLLED for (int i = 0; i < N; ++i) {
        PutLine(u[g][i], groups_[g].first, i);
        PutLine(v[g][i], groups_[g].second, i);
        PutLine(sum[i], groups_[g].sums, i);
      }
    }
  }
  template <bool kProportional>
  HWY_INLINE void ScaleLines(const Lanes& g, const V* v, V* u) const {
    V sum[N];
    SINKHORN_UNROLLED for (int i = 0; i < N; ++i) sum[i] = this->RowDot(g.k, i, v);
    Rescale<kProportional>(sum, u);
  }
  template <bool kProportional>
  HWY_INLINE void ScaleColumns(const Lanes& g, const V* u, V* sum, V* v) const {
    SINKHORN_UNROLLED for (int j = 0; j < N; ++j) sum[j] = this->ColumnDot(g.k, j, u);
    Rescale<kProportional>(sum, v);
  }
  // The scalings of a side from its sums.
  template <bool kProportional>
  HWY_INLINE void Rescale(const V* sum, V* scaling) const {
    if constexpr (kProportional) {
      ProportionalInverses(D(), sum, scaling);
    } else {
      const V one = hn::Set(D(), T(1)), guard = this->Guarded(), inverse = this->InverseGuard();
      SINKHORN_UNROLLED for (int i = 0; i < N; ++i) {
        scaling[i] = Rescaled<kGuard>(D(), sum[i], scaling[i], one, guard, inverse);
      }
    }
  }
  HWY_INLINE static void Remember(const Lanes& g, int32_t t, const V* u, const V* v) {
    SINKHORN_UNROLLED for (int i = 0; i < N; ++i) {
      PutLine(u[i], g.u, t * N + i);
      PutLine(v[i], g.v, t * N + i);
    }
  }
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
      this->Store(entry, *g, plan);
    } else {
      SINKHORN_UNROLLED for (int e = 0; e < kSize; ++e) entry(e / N, e % N);
    }
    SINKHORN_UNROLLED for (int i = 0; i < N; ++i) first_error = hn::Add(first_error, hn::Abs(hn::Sub(sum[i], one)));
    const V errors = hn::Add(first_error, second_error);
    this->HandOn(hn::Not(hn::Lt(errors, hn::Set(d, std::numeric_limits<T>::max()))), g, tally);
    Certify(*g, first_error, second_error, sum);
  }

  void Certify(const Lanes& g, V first_error, V second_error, const V* first_sums) {
    const D d;
    if (!g.all) {
      HWY_ALIGN T stored[kLanes];
      for (int l = 0; l < kLanes; ++l) stored[l] = g.store[l] ? T(1) : T(0);
      const auto keep = hn::Gt(hn::Load(d, stored), hn::Zero(d));
      first_error = hn::IfThenElseZero(keep, first_error);
      second_error = hn::IfThenElseZero(keep, second_error);
    }
    hn::Store(hn::Max(hn::Load(d, largest_first_), first_error), d, largest_first_);
    hn::Store(hn::Max(hn::Load(d, largest_second_), second_error), d, largest_second_);
    stored_ += g.all ? kLanes : std::count(g.store, g.store + kLanes, true);

    const Outputs& out = spec_.problem.outputs;
    if (out.convergence == nullptr && !out.row_sums && !out.column_sums) return;
    HWY_ALIGN T first[kLanes], second[kLanes], first_sum[N * kLanes], second_sum[N * kLanes];
    hn::Store(first_error, d, first);
    hn::Store(second_error, d, second);
    for (int i = 0; i < N; ++i) {
      PutLine(first_sums[i], first_sum, i);
      PutLine(hn::Mul(Line(g.sums, i), Line(g.second, i)), second_sum, i);
    }
    for (int l = 0; l < kLanes; ++l) {
      if (!g.store[l]) continue;
      StoreSums(spec_.transposed ? second_sum : first_sum, l, g.member[l], out.row_sums);
      StoreSums(spec_.transposed ? first_sum : second_sum, l, g.member[l], out.column_sums);
      if (out.convergence != nullptr) out.convergence[g.member[l]] = Certificate(first[l], second[l]);
    }
  }
  Convergence Certificate(T first_error, T second_error) const {
    Convergence c;
    c.iterations = spec_.iterations;
    c.marginal_error_a = spec_.transposed ? second_error : first_error;
    c.marginal_error_b = spec_.transposed ? first_error : second_error;
    c.converged = first_error == 0 && second_error == 0;
    return c;
  }
  void ReportWorst(NormalizationTally* tally) const {
    const D d;
    const T first = hn::GetLane(hn::MaxOfLanes(d, hn::Load(d, largest_first_)));
    const T second = hn::GetLane(hn::MaxOfLanes(d, hn::Load(d, largest_second_)));
    tally->Add(Certificate(first, second), stored_);
  }
  static void StoreSums(const T* sums, int lane, int64_t member, const OutputView& view) {
    if (!view) return;
    T one[N];
    for (int i = 0; i < N; ++i) one[i] = sums[i * kLanes + lane];
    StoreRow(view.dtype, one, N, view.data, member * N);
  }

  T Range() const { return kFreeOfScale && !wide_ ? T(27) : T(kRange); }
  static constexpr double kRange = 60, kLowestLine = -40;  // As for the linear solver.

  const bool wide_;
  const int groups_count_;
  Lanes groups_[kMany];
  HWY_ALIGN T largest_first_[kLanes] = {};  // Errors
  HWY_ALIGN T largest_second_[kLanes] = {};
  int64_t stored_ = 0;
};

template <class Solver>
void SolveWith(const NormalizationSpec& spec, const int64_t* members, int64_t count, bool wide, Scratch* scratch,
               NormalizationTally* tally) {
  Arena measure(nullptr);
  Solver(spec, count, wide, &measure);
  Arena arena(scratch->Get(measure.used()));
  Solver(spec, count, wide, &arena).Solve(members, count, tally);
}

template <class Solver>
void SolveAll(const NormalizationSpec& spec, const int64_t* members, int64_t count, Scratch* scratch,
              NormalizationTally* tally) {
  const bool narrow_first = Solver::kFreeOfScale && !spec.unrolled;
  SolveWith<Solver>(spec, members, count, !narrow_first, scratch, tally);
  if (!narrow_first || tally->redo.empty()) return;
  const std::vector<int64_t> wide = std::exchange(tally->redo, {});
  SolveWith<Solver>(spec, wide.data(), static_cast<int64_t>(wide.size()), true, scratch, tally);
}

}  // namespace sinkhorn::cpu::normalization::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // SINKHORN_KERNELS_CPU_NORMALIZATION_SQUARES_INL_H_
