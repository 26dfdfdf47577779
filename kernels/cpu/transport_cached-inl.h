// Loops over densities that are there already: one read serves rows, then (from the nearest cache) columns.
#if defined(SINKHORN_KERNELS_CPU_TRANSPORT_CACHED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SINKHORN_KERNELS_CPU_TRANSPORT_CACHED_INL_H_
#undef SINKHORN_KERNELS_CPU_TRANSPORT_CACHED_INL_H_
#else
#define SINKHORN_KERNELS_CPU_TRANSPORT_CACHED_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/cpu/transport_vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr size_t kPrefetchBytes = 16384;  // Two such blocks fit a level-1 cache.
constexpr size_t kNearBytes = 32768;      // Of rows that stay in it between two uses.
constexpr int kLaggedGroups = 3;

template <typename T>
void RowSums(const T* HWY_RESTRICT t, int64_t columns, const T* HWY_RESTRICT weights, double* sums) {
  const TagOf<T> d;
  const int64_t lanes = hn::Lanes(d);
  std::fill(sums, sums + kRowBlock, 0.0);
  for (int64_t begin = 0; begin < columns; begin += kFloatColumns) {
    const int64_t end = std::min(columns, begin + kFloatColumns);
    hn::Vec<TagOf<T>> sum[kRowBlock];
    SINKHORN_UNROLL for (int r = 0; r < kRowBlock; ++r) sum[r] = hn::Zero(d);
    for (int64_t j = begin; j < end; j += lanes) {
      const auto w = hn::Load(d, weights + j);
      const T* const column = t + ColumnIndex(d, j);
      SINKHORN_UNROLL for (int r = 0; r < kRowBlock; ++r) {
        sum[r] = hn::MulAdd(hn::Load(d, column + r * kTile), w, sum[r]);
      }
    }
    for (int r = 0; r < kRowBlock; ++r) sums[r] += hn::GetLane(hn::SumOfLanes(d, sum[r]));
  }
}

template <typename T>
void AddColumns(const T* HWY_RESTRICT t, int64_t columns, const T* w, T* HWY_RESTRICT acc) {
  const TagOf<T> d;
  const int64_t lanes = hn::Lanes(d);
  hn::Vec<TagOf<T>> weight[kRowBlock];
  SINKHORN_UNROLL for (int r = 0; r < kRowBlock; ++r) weight[r] = hn::Set(d, w[r]);
  // The block is in the nearest cache by now: time to fetch the one behind it, if both fit. (Past the end it does no
  // harm.)
  const T* HWY_RESTRICT following = t + (kRowBlock * columns * sizeof(T) <= kPrefetchBytes ? kRowBlock * columns : 0);
  for (int64_t j = 0; j < columns; j += lanes) {
    const T* const column = t + ColumnIndex(d, j);
    const T* const fetched = following + ColumnIndex(d, j);
    SINKHORN_UNROLL for (int r = 0; r < kRowBlock; ++r) hwy::Prefetch(fetched + r * kTile);
    auto a = hn::Load(d, acc + j);
    auto b = hn::Zero(d);
    SINKHORN_UNROLL for (int r = 0; r < kRowBlock; r += 2) {
      a = hn::MulAdd(hn::Load(d, column + r * kTile), weight[r], a);
      b = hn::MulAdd(hn::Load(d, column + (r + 1) * kTile), weight[r + 1], b);
    }
    hn::Store(hn::Add(a, b), d, acc + j);
  }
}

// sums[r] = sum of the lanes of v[r].
template <int kRows, class D, typename T = hn::TFromD<D>>
HWY_INLINE void SumsOfLanes(D d, const hn::Vec<D> (&v)[kRows], double* sums) {
#if HWY_TARGET <= HWY_AVX3
  if constexpr (sizeof(T) == sizeof(float)) {
    const hn::RepartitionToWide<D> dw;
    const hn::Half<D> dh;
    const auto pair = [=](hn::Vec<D> a, hn::Vec<D> b) HWY_ATTR {  // Per 16 bytes: a b a b
      return hn::BitCast(dw, hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b)));
    };
    const auto four = [=](const hn::Vec<D>* q) HWY_ATTR {  // Per 16 bytes, then 32: a b c d
      const auto ab = pair(q[0], q[1]), ce = pair(q[2], q[3]);
      const auto s =
          hn::Add(hn::BitCast(d, hn::InterleaveLower(dw, ab, ce)), hn::BitCast(d, hn::InterleaveUpper(dw, ab, ce)));
      return hn::Add(hn::LowerHalf(dh, s), hn::UpperHalf(dh, s));
    };
    for (int r = 0; r < kRows; r += 4) {
      const hn::Half<hn::Half<D>> dq;
      const auto s = four(v + r);
      const auto total = hn::Add(hn::LowerHalf(dq, s), hn::UpperHalf(dq, s));
      const hn::Rebind<double, decltype(dq)> dd;
      hn::StoreU(hn::PromoteTo(dd, total), dd, sums + r);
    }
    return;
  }
#endif
  SINKHORN_UNROLL for (int r = 0; r < kRows; ++r) sums[r] = hn::GetLane(hn::SumOfLanes(d, v[r]));
}

// A pass over cached rows, kRows at a time: while one group is added to the column sums, the row sums of the group kLag
// further on are made, so that its way from the cache behind hides under the first one's arithmetic.
template <int kRows, typename T>
class CachedSweep {
 public:
  using D = TagOf<T>;
  using V = hn::Vec<D>;
  static constexpr int kStep = 8 / kRows;  // Vectors of columns at a time: enough independent sums.

  CachedSweep(const T* t, int64_t columns, const T* weights, T* acc)
      : t_(t), columns_(columns), weights_(weights), acc_(acc) {}

  // acc += the rows of group `now` times their factors;  sums = weighted sums of the rows of group `later`.
  template <bool kAdd, bool kSum>
  HWY_INLINE void Pass(int64_t now, const T* factors, int64_t later, double* sums) const {
    const D d;
    const int64_t lanes = hn::Lanes(d);
    const T* HWY_RESTRICT added = Group(now);
    const T* HWY_RESTRICT summed = Group(later);
    const T* HWY_RESTRICT weights = weights_;
    T* HWY_RESTRICT acc = acc_;
    V weight[kRows];
    SINKHORN_UNROLL for (int r = 0; r < kRows; ++r) weight[r] = kAdd ? hn::Set(d, factors[r]) : hn::Zero(d);
    for (int64_t begin = 0; begin < columns_; begin += kFloatColumns) {
      const int64_t end = std::min(columns_, begin + kFloatColumns);
      V sum[kStep][kRows];
      SINKHORN_UNROLL for (int k = 0; k < kStep; ++k) {
        SINKHORN_UNROLL for (int r = 0; r < kRows; ++r) sum[k][r] = hn::Zero(d);
      }
      for (int64_t j = begin; j < end; j += kStep * lanes) {
        SINKHORN_UNROLL for (int k = 0; k < kStep; ++k) {
          const int64_t c = j + k * lanes;
          if (kSum) {
            const auto w = hn::Load(d, weights + c);
            const T* const column = summed + ColumnIndex(d, c);
            SINKHORN_UNROLL for (int r = 0; r < kRows; ++r) {
              sum[k][r] = hn::MulAdd(hn::Load(d, column + r * kTile), w, sum[k][r]);
            }
          }
          if (kAdd) {
            const T* const column = added + ColumnIndex(d, c);
            auto a = hn::Load(d, acc + c);
            auto b = hn::Mul(hn::Load(d, column), weight[0]);
            SINKHORN_UNROLL for (int r = 1; r < kRows; r += 2) {
              a = hn::MulAdd(hn::Load(d, column + r * kTile), weight[r], a);
              if (r + 1 < kRows) b = hn::MulAdd(hn::Load(d, column + (r + 1) * kTile), weight[r + 1], b);
            }
            hn::Store(hn::Add(a, b), d, acc + c);
          }
        }
      }
      if (kSum) {
        SINKHORN_UNROLL for (int k = 1; k < kStep; ++k) {
          SINKHORN_UNROLL for (int r = 0; r < kRows; ++r) sum[0][r] = hn::Add(sum[0][r], sum[k][r]);
        }
        double part[kRows];
        SumsOfLanes<kRows>(d, sum[0], part);
        for (int r = 0; r < kRows; ++r) sums[r] = begin == 0 ? part[r] : sums[r] + part[r];
      }
    }
  }

 private:
  const T* Group(int64_t group) const {
    constexpr int64_t kGroups = kRowBlock / kRows;
    return t_ + group / kGroups * (kRowBlock * columns_) + group % kGroups * (kRows * kTile);
  }

  const T* const t_;
  const int64_t columns_;
  const T* const weights_;
  T* const acc_;
};

template <int kRows, int kLag, typename T>
int64_t SweepGroups(const T* t, int64_t columns, int64_t rows, const T* weights, const T* u, const T* mass, bool keep,
                    double low, double high, double* sums, T* next, T* acc, double* error) {
  const hn::CappedTag<double, kRows> d;
  const hn::Rebind<T, hn::CappedTag<double, kRows>> dt;
  const CachedSweep<kRows, T> sweep(t, columns, weights, acc);
  const int64_t groups = (rows + kRows - 1) / kRows;
  auto errors = hn::Zero(d);
  HWY_ALIGN T weight[kLag][kRows];
  // The new scalings of a group from its sums. False, and nothing counts, if one is unsafe.
  const auto update = [&](int64_t group) HWY_ATTR {
    auto part = errors;
    for (int64_t r = 0; r < kRows; r += hn::Lanes(d)) {
      const int64_t row = group * kRows + r;
      const auto s = hn::LoadU(d, sums + row);
      const auto real = hn::FirstN(d, std::max<int64_t>(rows - row, 0));
      const auto safe = hn::And(hn::Gt(s, hn::Set(d, low)), hn::Lt(s, hn::Set(d, high)));
      if (!hn::AllTrue(d, hn::Or(safe, hn::Not(real)))) return false;
      const auto one = hn::Set(d, 1.0);
      const auto old = hn::LoadU(dt, u + row);
      const auto m = hn::LoadU(dt, mass + row);
      const auto inverse = Convert(dt, hn::Div(one, hn::IfThenElse(hn::Gt(s, hn::Zero(d)), s, one)));
      hn::StoreU(inverse, dt, next + row);
      hn::StoreU(hn::IfThenElseZero(hn::Gt(m, hn::Zero(dt)), hn::Mul(m, keep ? old : inverse)), dt,
                 weight[group % kLag] + r);
      part = hn::MulAdd(Convert(d, m), hn::Abs(hn::MulSub(Convert(d, old), s, one)), part);
    }
    errors = part;
    return true;
  };
  for (int64_t g = 0; g < std::min<int64_t>(kLag, groups); ++g) {
    sweep.template Pass<false, true>(0, nullptr, g, sums + g * kRows);
  }
  int64_t done = 0;
  for (bool safe = groups > 0 && update(0); safe; ++done) {
    const bool more = done + 1 < groups;
    if (kLag > 1) safe = more && update(done + 1);  // Its sums are known: its divisions hide under this pass.
    const T* w = weight[done % kLag];
    if (done + kLag < groups) {
      sweep.template Pass<true, true>(done, w, done + kLag, sums + (done + kLag) * kRows);
    } else {
      sweep.template Pass<true, false>(done, w, 0, nullptr);
    }
    if (kLag == 1) safe = more && update(done + 1);
  }
  *error += hn::GetLane(hn::SumOfLanes(d, errors));
  return done * kRows;
}

template <typename T>
int64_t BalancedSweep(const T* t, int64_t columns, int64_t rows, const T* weights, const T* u, const T* mass, bool keep,
                      double low, double high, double* sums, T* next, T* acc, double* error) {
  const auto sweep = kTileRows == 8 && kLaggedGroups * kRowBlock * columns * sizeof(T) <= kNearBytes
                         ? SweepGroups<kRowBlock, kLaggedGroups - 1, T>
                         : SweepGroups<kRowBlock / 2, 1, T>;
  return sweep(t, columns, rows, weights, u, mass, keep, low, high, sums, next, acc, error);
}

template <typename T>
void Scale(T* t, int64_t columns, const T* row, const T* col, double* sums) {
  const TagOf<T> d;
  const int64_t lanes = hn::Lanes(d);
  for (int r = 0; r < kRowBlock; ++r) {
    const auto u = hn::Set(d, row[r]);
    const auto row_exists = hn::Gt(u, hn::Zero(d));
    double total = 0;
    for (int64_t begin = 0; begin < columns; begin += kFloatColumns) {
      const int64_t end = std::min(columns, begin + kFloatColumns);
      auto sum = hn::Zero(d);
      for (int64_t j = begin; j < end; j += lanes) {
        const auto v = hn::Load(d, col + j);
        const auto product = hn::Mul(hn::Mul(hn::Load(d, t + BlockIndex(r, j)), v), u);
        // Where there is no mass densities are anything, and their products with the other side's may overflow.
        const auto p = hn::IfThenElseZero(hn::And(row_exists, hn::Gt(v, hn::Zero(d))), product);
        hn::Store(p, d, t + BlockIndex(r, j));
        sum = hn::Add(sum, p);
      }
      total += hn::GetLane(hn::SumOfLanes(d, sum));
    }
    sums[r] = total;
  }
}

}  // namespace sinkhorn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // SINKHORN_KERNELS_CPU_TRANSPORT_CACHED_INL_H_
