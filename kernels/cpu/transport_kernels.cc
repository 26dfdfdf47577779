// Row blocks are register tiles: kRowBlock rows by two vectors of columns stay in accumulators while a panel of points
// streams by. One function per loop; the tables at the end are all that leaves this file.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/transport_kernels.cc"
#include "kernels/cpu/targets.h"
//
#include "hwy/foreach_target.h"
//
#include <algorithm>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/cpu/math-inl.h"
#include "kernels/cpu/transport_kernels.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn {
namespace cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#define SINKHORN_UNROLL _Pragma("GCC unroll 8")

// Register rows per pass: AVX-512 has 32 registers, the others 16.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET >= HWY_SSSE3
constexpr int kTileRows = 4;
#else
constexpr int kTileRows = 8;
#endif
constexpr size_t kPrefetchBytes = 16384;  // Two such blocks fit a level-1 cache.
constexpr size_t kNearBytes = 32768;      // Of rows that stay in it between two uses.
constexpr int kLaggedGroups = 3;
constexpr int64_t kFloatColumns = 4096;  // Columns that a sum in T spans before it goes to double.

template <typename TE>
using TagOf = hn::CappedTag<TE, 16>;  // At most half a column pad.

// Where the columns from j on begin in row 0 of a block; row r is r * kTile further. A product where it can be one: the
// inner loops have little time for addresses.
template <class D>
HWY_INLINE int64_t ColumnIndex(D d, int64_t j) {
  return hn::Lanes(d) == kTile ? j * kRowBlock : BlockIndex(0, j);
}

// Between the types of exponents, densities and doubles, lane by lane.
template <class D, class V>
HWY_INLINE hn::Vec<D> Convert(D d, V v) {
  if constexpr (sizeof(hn::TFromD<D>) < sizeof(hn::TFromV<V>)) {
    return hn::DemoteTo(d, v);
  } else if constexpr (sizeof(hn::TFromD<D>) > sizeof(hn::TFromV<V>)) {
    return hn::PromoteTo(d, v);
  } else {
    return v;
  }
}

// One panel: acc[r][0..1] = <rows[r], y> + terms, or scale |rows[r] - y|^2 + terms.
template <int kRows, bool kDistance, class DE, typename TE = hn::TFromD<DE>>
HWY_INLINE void PanelExponents(DE de, const TE* HWY_RESTRICT rows, int64_t dim, const TE* HWY_RESTRICT panel, TE scale,
                               const TE* HWY_RESTRICT row_term, const TE* HWY_RESTRICT col_term,
                               hn::Vec<DE> (&acc)[kRows][2]) {
  const size_t lanes = hn::Lanes(de);
  const auto c0 = hn::Load(de, col_term);
  const auto c1 = hn::Load(de, col_term + lanes);
  SINKHORN_UNROLL for (int r = 0; r < kRows; ++r) {
    const auto term = hn::Set(de, row_term[r]);
    acc[r][0] = kDistance ? hn::Zero(de) : hn::Add(c0, term);
    acc[r][1] = kDistance ? hn::Zero(de) : hn::Add(c1, term);
  }
  for (int64_t k = 0; k < dim; ++k) {
    const auto y0 = hn::Load(de, panel + k * 2 * lanes);
    const auto y1 = hn::Load(de, panel + k * 2 * lanes + lanes);
    SINKHORN_UNROLL for (int r = 0; r < kRows; ++r) {
      const auto x = hn::Set(de, rows[r * dim + k]);
      if (kDistance) {
        const auto d0 = hn::Sub(x, y0), d1 = hn::Sub(x, y1);
        acc[r][0] = hn::MulAdd(d0, d0, acc[r][0]);
        acc[r][1] = hn::MulAdd(d1, d1, acc[r][1]);
      } else {
        acc[r][0] = hn::MulAdd(x, y0, acc[r][0]);
        acc[r][1] = hn::MulAdd(x, y1, acc[r][1]);
      }
    }
  }
  if (kDistance) {
    const auto s = hn::Set(de, scale);
    SINKHORN_UNROLL for (int r = 0; r < kRows; ++r) {
      const auto term = hn::Set(de, row_term[r]);
      acc[r][0] = hn::MulAdd(s, acc[r][0], hn::Add(c0, term));
      acc[r][1] = hn::MulAdd(s, acc[r][1], hn::Add(c1, term));
    }
  }
}

template <typename TE, bool kDistance>
void PanelsExponents(const TE* rows, int64_t dim, const TE* packed, int64_t columns, TE scale, const TE* row_term,
                     const TE* col_term, TE* out) {
  const TagOf<TE> de;
  const int64_t lanes = hn::Lanes(de);
  for (int64_t j = 0; j < columns; j += 2 * lanes) {
    for (int r0 = 0; r0 < kRowBlock; r0 += kTileRows) {
      hn::Vec<TagOf<TE>> acc[kTileRows][2];
      PanelExponents<kTileRows, kDistance>(de, rows + r0 * dim, dim, packed + j * dim, scale, row_term + r0,
                                           col_term + j, acc);
      TE* const column0 = out + ColumnIndex(de, j) + r0 * kTile;
      TE* const column1 = out + ColumnIndex(de, j + lanes) + r0 * kTile;
      SINKHORN_UNROLL for (int r = 0; r < kTileRows; ++r) {
        hn::Store(acc[r][0], de, column0 + r * kTile);
        hn::Store(acc[r][1], de, column1 + r * kTile);
      }
    }
  }
}

template <typename TE>
void Exponents(const TE* rows, int64_t dim, const TE* packed, int64_t columns, TE scale, const TE* row_term,
               const TE* col_term, TE* out) {
  return scale == 0 ? PanelsExponents<TE, false>(rows, dim, packed, columns, scale, row_term, col_term, out)
                    : PanelsExponents<TE, true>(rows, dim, packed, columns, scale, row_term, col_term, out);
}

template <typename TE, typename T, bool kDistance>
void PanelsExpSums(const TE* rows, int64_t dim, const TE* packed, int64_t columns, TE scale, const TE* row_term,
                   const TE* col_term, const T* weights, T* out, double* sums) {
  const TagOf<TE> de;
  const hn::Rebind<T, TagOf<TE>> dt;
  const int64_t lanes = hn::Lanes(de);
  for (int r0 = 0; r0 < kRowBlock; r0 += kTileRows) {
    double total[kTileRows] = {};
    for (int64_t begin = 0; begin < columns; begin += kFloatColumns) {
      const int64_t end = std::min(columns, begin + kFloatColumns);
      hn::Vec<hn::Rebind<T, TagOf<TE>>> sum[kTileRows];
      SINKHORN_UNROLL for (int r = 0; r < kTileRows; ++r) sum[r] = hn::Zero(dt);
      for (int64_t j = begin; j < end; j += 2 * lanes) {
        hn::Vec<TagOf<TE>> acc[kTileRows][2];
        PanelExponents<kTileRows, kDistance>(de, rows + r0 * dim, dim, packed + j * dim, scale, row_term + r0,
                                             col_term + j, acc);
        const auto w0 = hn::Load(dt, weights + j);
        const auto w1 = hn::Load(dt, weights + j + lanes);
        T* const column0 = out + ColumnIndex(dt, j) + r0 * kTile;
        T* const column1 = out + ColumnIndex(dt, j + lanes) + r0 * kTile;
        SINKHORN_UNROLL for (int r = 0; r < kTileRows; ++r) {
          const auto t0 = Exp2(dt, Convert(dt, acc[r][0]));
          const auto t1 = Exp2(dt, Convert(dt, acc[r][1]));
          hn::Store(t0, dt, column0 + r * kTile);
          hn::Store(t1, dt, column1 + r * kTile);
          sum[r] = hn::MulAdd(t0, w0, sum[r]);
          sum[r] = hn::MulAdd(t1, w1, sum[r]);
        }
      }
      for (int r = 0; r < kTileRows; ++r) total[r] += hn::GetLane(hn::SumOfLanes(dt, sum[r]));
    }
    for (int r = 0; r < kTileRows; ++r) sums[r0 + r] = total[r];
  }
}

template <typename TE, typename T>
void ExpSums(const TE* rows, int64_t dim, const TE* packed, int64_t columns, TE scale, const TE* row_term,
             const TE* col_term, const T* weights, T* out, double* sums) {
  return scale == 0
             ? PanelsExpSums<TE, T, false>(rows, dim, packed, columns, scale, row_term, col_term, weights, out, sums)
             : PanelsExpSums<TE, T, true>(rows, dim, packed, columns, scale, row_term, col_term, weights, out, sums);
}

// One vector of costs per row at a time: f(r, j, exponents of row r from column j on). A row has `count` columns; those
// beyond cost nothing.
template <class DE, typename TE, class F>
HWY_INLINE void ForCostExponents(DE de, const TE* const* rows, int64_t count, int64_t begin, int64_t end, TE scale,
                                 const TE* row_term, const TE* col_term, const F& f) {
  const int64_t lanes = hn::Lanes(de);
  const auto s = hn::Set(de, scale);
  int64_t j = begin;
  for (const int64_t whole = std::min(end, count / lanes * lanes); j < whole; j += lanes) {
    const auto c = hn::Load(de, col_term + j);
    SINKHORN_UNROLL for (int r = 0; r < kRowBlock; ++r) {
      f(r, j, hn::MulAdd(hn::LoadU(de, rows[r] + j), s, hn::Add(hn::Set(de, row_term[r]), c)));
    }
  }
  for (HWY_ALIGN TE rest[HWY_MAX_BYTES / sizeof(TE)]; j < end; j += lanes) {
    const auto c = hn::Load(de, col_term + j);
    for (int r = 0; r < kRowBlock; ++r) {
      for (int64_t i = 0; i < lanes; ++i) rest[i] = j + i < count ? rows[r][j + i] : TE(0);
      f(r, j, hn::MulAdd(hn::Load(de, rest), s, hn::Add(hn::Set(de, row_term[r]), c)));
    }
  }
}

template <typename TE>
void CostExponents(const TE* const* rows, int64_t count, int64_t columns, TE scale, const TE* row_term,
                   const TE* col_term, TE* HWY_RESTRICT out) {
  const TagOf<TE> de;
  ForCostExponents(de, rows, count, 0, columns, scale, row_term, col_term,
                   [=](int r, int64_t j, hn::Vec<TagOf<TE>> e)
                       HWY_ATTR { hn::Store(e, de, out + ColumnIndex(de, j) + r * kTile); });
}

template <typename TE, typename T>
void CostExpSums(const TE* const* rows, int64_t count, int64_t columns, TE scale, const TE* row_term,
                 const TE* col_term, const T* weights, T* HWY_RESTRICT out, double* sums) {
  const TagOf<TE> de;
  const hn::Rebind<T, TagOf<TE>> dt;
  using V = hn::Vec<hn::Rebind<T, TagOf<TE>>>;
  std::fill(sums, sums + kRowBlock, 0.0);
  for (int64_t begin = 0; begin < columns; begin += kFloatColumns) {
    V sum[kRowBlock];
    SINKHORN_UNROLL for (int r = 0; r < kRowBlock; ++r) sum[r] = hn::Zero(dt);
    ForCostExponents(de, rows, count, begin, std::min(columns, begin + kFloatColumns), scale, row_term, col_term,
                     [&](int r, int64_t j, hn::Vec<TagOf<TE>> e) HWY_ATTR {
                       const auto t = Exp2(dt, Convert(dt, e));
                       hn::Store(t, dt, out + ColumnIndex(dt, j) + r * kTile);
                       sum[r] = hn::MulAdd(t, hn::Load(dt, weights + j), sum[r]);
                     });
    for (int r = 0; r < kRowBlock; ++r) sums[r] += hn::GetLane(hn::SumOfLanes(dt, sum[r]));
  }
}

template <typename TE>
void RowMax(const TE* e, int64_t columns, const TE* penalty, TE* max) {
  const TagOf<TE> de;
  const int64_t lanes = hn::Lanes(de);
  hn::Vec<TagOf<TE>> m[kRowBlock];
  SINKHORN_UNROLL for (int r = 0; r < kRowBlock; ++r) m[r] = hn::Set(de, static_cast<TE>(kVoid));
  for (int64_t j = 0; j < columns; j += lanes) {
    const auto p = hn::Load(de, penalty + j);
    const TE* const column = e + ColumnIndex(de, j);
    SINKHORN_UNROLL for (int r = 0; r < kRowBlock; ++r) {
      m[r] = hn::Max(m[r], hn::Add(hn::Load(de, column + r * kTile), p));
    }
  }
  for (int r = 0; r < kRowBlock; ++r) max[r] = hn::GetLane(hn::MaxOfLanes(de, m[r]));
}

template <typename TE, typename T>
void ExpRows(const TE* e, int64_t columns, const TE* shift, const T* weights, T* out, double* sums) {
  const TagOf<TE> de;
  const hn::Rebind<T, TagOf<TE>> dt;
  const int64_t lanes = hn::Lanes(de);
  for (int r0 = 0; r0 < kRowBlock; r0 += 4) {
    double total[4] = {};
    for (int64_t begin = 0; begin < columns; begin += kFloatColumns) {
      const int64_t end = std::min(columns, begin + kFloatColumns);
      hn::Vec<hn::Rebind<T, TagOf<TE>>> sum[4];
      SINKHORN_UNROLL for (int r = 0; r < 4; ++r) sum[r] = hn::Zero(dt);
      for (int64_t j = begin; j < end; j += lanes) {
        const auto w = hn::Load(dt, weights + j);
        const int64_t at = ColumnIndex(dt, j) + r0 * kTile;
        SINKHORN_UNROLL for (int r = 0; r < 4; ++r) {
          const auto exponent = hn::Sub(hn::Load(de, e + at + r * kTile), hn::Set(de, shift[r0 + r]));
          const auto t = Exp2(dt, Convert(dt, exponent));
          hn::Store(t, dt, out + at + r * kTile);
          sum[r] = hn::MulAdd(t, w, sum[r]);
        }
      }
      for (int r = 0; r < 4; ++r) total[r] += hn::GetLane(hn::SumOfLanes(dt, sum[r]));
    }
    for (int r = 0; r < 4; ++r) sums[r0 + r] = total[r];
  }
}

// ---- Cached densities: one read serves rows, then (from the nearest cache) columns
// ------------------------------------

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
    double total = 0;
    for (int64_t begin = 0; begin < columns; begin += kFloatColumns) {
      const int64_t end = std::min(columns, begin + kFloatColumns);
      auto sum = hn::Zero(d);
      for (int64_t j = begin; j < end; j += lanes) {
        const auto p = hn::Mul(hn::Mul(hn::Load(d, t + BlockIndex(r, j)), hn::Load(d, col + j)), u);
        hn::Store(p, d, t + BlockIndex(r, j));
        sum = hn::Add(sum, p);
      }
      total += hn::GetLane(hn::SumOfLanes(d, sum));
    }
    sums[r] = total;
  }
}

// ---- Products with the plan
// -------------------------------------------------------------------------------------------

template <typename T>
void Multiply(const T* HWY_RESTRICT p, int64_t columns, const T* HWY_RESTRICT v, int64_t width,
              double* HWY_RESTRICT out) {
  const TagOf<T> d;
  const int64_t lanes = hn::Lanes(d);
  std::fill(out, out + kRowBlock * width, 0.0);
  HWY_ALIGN T buffer[HWY_MAX_BYTES / sizeof(T)];
  for (int64_t begin = 0; begin < columns; begin += 1024) {
    const int64_t end = std::min(columns, begin + 1024);
    for (int64_t c = 0; c < width; c += lanes) {
      hn::Vec<TagOf<T>> acc[kRowBlock];
      SINKHORN_UNROLL for (int r = 0; r < kRowBlock; ++r) acc[r] = hn::Zero(d);
      for (int64_t j = begin; j < end; ++j) {
        const auto value = hn::Load(d, v + j * width + c);
        const T* column = p + BlockIndex(0, j);
        SINKHORN_UNROLL for (int r = 0; r < kRowBlock; ++r) {
          acc[r] = hn::MulAdd(hn::Set(d, column[r * kTile]), value, acc[r]);
        }
      }
      for (int r = 0; r < kRowBlock; ++r) {
        hn::Store(acc[r], d, buffer);
        for (int64_t i = 0; i < lanes; ++i) out[r * width + c + i] += buffer[i];
      }
    }
  }
}

template <typename TE, typename T>
double Dot(const T* p, int64_t columns, const TE* e) {
  const hn::CappedTag<double, 8> dd;
  const hn::Rebind<T, hn::CappedTag<double, 8>> dt;
  const hn::Rebind<TE, hn::CappedTag<double, 8>> de;
  const int64_t lanes = hn::Lanes(dd);
  auto sum = hn::Zero(dd);
  for (int64_t i = 0; i < kRowBlock * columns; i += lanes) {
    sum = hn::MulAdd(Convert(dd, hn::LoadU(dt, p + i)), Convert(dd, hn::LoadU(de, e + i)), sum);
  }
  return hn::GetLane(hn::SumOfLanes(dd, sum));
}

// ---- O(n) updates, in double
// ------------------------------------------------------------------------------------------

template <typename T>
double BalancedRows(const double* sums, const T* u, const T* mass, bool keep, T* next, T* weight) {
  const hn::CappedTag<double, 8> d;
  const hn::Rebind<T, hn::CappedTag<double, 8>> dt;
  auto error = hn::Zero(d);
  const auto one = hn::Set(d, 1.0);
  for (size_t r = 0; r < kRowBlock; r += hn::Lanes(d)) {
    const auto s = hn::LoadU(d, sums + r);
    const auto old = hn::LoadU(dt, u + r);
    const auto m = hn::LoadU(dt, mass + r);
    // Rows that only pad have no sum.
    const auto inverse = Convert(dt, hn::Div(one, hn::IfThenElse(hn::Gt(s, hn::Zero(d)), s, one)));
    const auto w = keep ? old : inverse;
    hn::StoreU(inverse, dt, next + r);
    hn::StoreU(hn::IfThenElseZero(hn::Gt(m, hn::Zero(dt)), hn::Mul(m, w)), dt, weight + r);
    error = hn::MulAdd(Convert(d, m), hn::Abs(hn::MulSub(Convert(d, old), s, one)), error);
  }
  return hn::GetLane(hn::SumOfLanes(d, error));
}

template <typename T>
void BalancedColumns(int64_t count, int64_t size, const T* acc, int64_t slots, int64_t stride, const T* mass,
                     double* sums, T* next, T* weight, double* range) {
  const hn::CappedTag<double, 8> d;
  const hn::Rebind<T, hn::CappedTag<double, 8>> dt;
  const int64_t lanes = hn::Lanes(d);
  auto low = hn::Inf(d), high = hn::Zero(d);
  const auto one = hn::Set(d, 1.0);
  for (int64_t j = 0; j < count; j += lanes) {
    auto sum = Convert(d, hn::LoadU(dt, acc + j));
    for (int64_t slot = 1; slot < slots; ++slot) sum = hn::Add(sum, Convert(d, hn::LoadU(dt, acc + slot * stride + j)));
    if (j + lanes > size) sum = hn::IfThenElse(hn::FirstN(d, j < size ? size - j : 0), sum, one);
    hn::StoreU(sum, d, sums + j);
    low = hn::Min(low, sum);
    high = hn::Max(high, sum);
    const auto inverse = Convert(dt, hn::Div(one, sum));
    const auto m = hn::LoadU(dt, mass + j);
    hn::StoreU(inverse, dt, next + j);
    hn::StoreU(hn::IfThenElseZero(hn::Gt(m, hn::Zero(dt)), hn::Mul(m, inverse)), dt, weight + j);
  }
  range[0] = hn::GetLane(hn::MinOfLanes(d, low));
  range[1] = hn::GetLane(hn::MaxOfLanes(d, high));
}

template <typename T>
void Update(int64_t count, const double* sums, const T* u, const double* frame, const double* shift, double damping,
            double relax, T* u_new) {
  if (damping == 1 && relax == 1) {
    for (int64_t i = 0; i < count; ++i) u_new[i] = static_cast<T>(1.0 / sums[i]);
    return;
  }
  const hn::CappedTag<double, 8> d;
  const hn::Rebind<T, hn::CappedTag<double, 8>> dt;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t i = 0; i < count; i += lanes) {
    const auto s = hn::LoadU(d, sums + i);
    const auto f = hn::LoadU(d, frame + i);
    const auto p = hn::LoadU(d, shift + i);
    const auto old = hn::Add(f, Log2(d, Convert(d, hn::LoadU(dt, u + i))));
    const auto half_step = hn::Sub(f, Log2(d, s));
    const auto damped = hn::Sub(hn::Mul(hn::Set(d, damping), hn::Add(half_step, p)), p);
    const auto next = hn::MulAdd(hn::Set(d, relax), hn::Sub(damped, old), old);
    const auto scaling = hn::IfThenElse(hn::Gt(s, hn::Zero(d)), Exp2(d, hn::Sub(next, f)), hn::Inf(d));
    hn::StoreU(Convert(dt, scaling), dt, u_new + i);
  }
}

template <typename T>
void LogScaling(int64_t count, const T* u, const double* frame, double* out) {
  const hn::CappedTag<double, 8> d;
  const hn::Rebind<T, hn::CappedTag<double, 8>> dt;
  for (int64_t i = 0; i < count; i += hn::Lanes(d)) {
    hn::StoreU(hn::Add(hn::LoadU(d, frame + i), Log2(d, Convert(d, hn::LoadU(dt, u + i)))), d, out + i);
  }
}

template <typename T>
bool Within(int64_t count, const T* values, T low, T high) {
  const TagOf<T> d;
  const int64_t lanes = hn::Lanes(d);
  auto in = hn::Eq(hn::Zero(d), hn::Zero(d));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto v = hn::LoadU(d, values + i);
    in = hn::And(in, hn::And(hn::Gt(v, hn::Set(d, low)), hn::Lt(v, hn::Set(d, high))));
  }
  bool all = hn::AllTrue(d, in);
  for (; i < count; ++i) all = all && values[i] > low && values[i] < high;
  return all;
}

template <typename TE, typename T>
void Freeze(int64_t count, int64_t size, const double* potential, TE* term, double* frame, T* scaling) {
  const hn::CappedTag<double, 8> d;
  const hn::Rebind<TE, hn::CappedTag<double, 8>> de;
  const hn::Rebind<T, hn::CappedTag<double, 8>> dt;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t i = 0; i < count; i += lanes) {
    const auto exists = hn::FirstN(d, i < size ? size - i : 0);
    const auto p = hn::IfThenElse(exists, hn::LoadU(d, potential + i), hn::Set(d, kVoid));
    const auto rounded = Convert(de, p);
    const auto f = Convert(d, rounded);
    const auto left = hn::Min(hn::Max(hn::Sub(p, f), hn::Set(d, -100.0)), hn::Set(d, 100.0));
    hn::StoreU(rounded, de, term + i);
    hn::StoreU(hn::IfThenElseZero(exists, f), d, frame + i);
    hn::StoreU(Convert(dt, hn::IfThenElse(exists, Exp2(d, left), hn::Set(d, 1.0))), dt, scaling + i);
  }
}

// ---- Points
// ----------------------------------------------------------------------------------------------------------

template <typename TE>
void ScaleRow(const double* point, int64_t dim, double factor, TE* out) {
  const hn::CappedTag<double, 8> d;
  const hn::Rebind<TE, hn::CappedTag<double, 8>> de;
  const int64_t lanes = hn::Lanes(d);
  int64_t k = 0;
  for (; k + lanes <= dim; k += lanes) {
    hn::StoreU(Convert(de, hn::Mul(hn::LoadU(d, point + k), hn::Set(d, factor))), de, out + k);
  }
  for (; k < dim; ++k) out[k] = static_cast<TE>(point[k] * factor);
}

// Four points at a time by transposing squares of 4 x 4.
template <typename TE>
void Pack(const double* HWY_RESTRICT points, int64_t count, int64_t dim, TE* HWY_RESTRICT out) {
  const int64_t panel = 2 * hn::Lanes(TagOf<TE>());
  for (int64_t first = 0; first < count; first += panel, out += panel * dim) {
    const int64_t size = std::min(panel, count - first);
    int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
    if constexpr (sizeof(TE) == sizeof(float)) {
      const hn::Full128<float> d;
      const hn::Full128<double> dd;
      const hn::Full64<float> dh;
      const hn::RepartitionToWide<hn::Full128<float>> dw;
      const auto load = [=](const double* p) HWY_ATTR {
        return hn::Combine(d, hn::DemoteTo(dh, hn::LoadU(dd, p + 2)), hn::DemoteTo(dh, hn::LoadU(dd, p)));
      };
      for (; i + 4 <= size; i += 4) {
        const double* row = points + (first + i) * dim;
        float* column = out + i;
        int64_t k = 0;
        for (; k + 4 <= dim; k += 4) {
          const auto a = load(row + k), b = load(row + dim + k), c = load(row + 2 * dim + k),
                     e = load(row + 3 * dim + k);
          const auto ab_low = hn::BitCast(dw, hn::InterleaveLower(d, a, b));  // a0 b0 a1 b1
          const auto ab_high = hn::BitCast(dw, hn::InterleaveUpper(d, a, b));
          const auto ce_low = hn::BitCast(dw, hn::InterleaveLower(d, c, e));
          const auto ce_high = hn::BitCast(dw, hn::InterleaveUpper(d, c, e));
          hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dw, ab_low, ce_low)), d, column + k * panel);
          hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dw, ab_low, ce_low)), d, column + (k + 1) * panel);
          hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dw, ab_high, ce_high)), d, column + (k + 2) * panel);
          hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dw, ab_high, ce_high)), d, column + (k + 3) * panel);
        }
        for (; k < dim; ++k) {
          for (int r = 0; r < 4; ++r) column[k * panel + r] = static_cast<float>(row[r * dim + k]);
        }
      }
    }
#endif
    for (; i < size; ++i) {
      const double* row = points + (first + i) * dim;
      for (int64_t k = 0; k < dim; ++k) out[k * panel + i] = static_cast<TE>(row[k]);
    }
  }
}

HWY_INLINE double DotOfDoubles(const double* a, const double* b, int64_t count) {
  const hn::CappedTag<double, 8> d;
  const int64_t lanes = hn::Lanes(d);
  double total = 0;
  int64_t i = 0;
  if (count >= 2 * lanes) {
    auto sum0 = hn::Zero(d), sum1 = hn::Zero(d);
    for (; i + 2 * lanes <= count; i += 2 * lanes) {
      sum0 = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), sum0);
      sum1 = hn::MulAdd(hn::LoadU(d, a + i + lanes), hn::LoadU(d, b + i + lanes), sum1);
    }
    total = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1)));
  }
  for (; i < count; ++i) total += a[i] * b[i];
  return total;
}

void DotsOfRows(const double* rows, int64_t count, int64_t dim, const double* vector, double* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = DotOfDoubles(rows + i * dim, vector, dim);
}

// Rows are taken `lanes` at a time, as `dim` vectors: lane l of vector v belongs to coordinate (v lanes + l) mod dim.
void CentreRows(double* HWY_RESTRICT rows, int64_t count, int64_t dim, double* HWY_RESTRICT centre, double* norm2) {
  const hn::CappedTag<double, 8> d;
  const int64_t lanes = hn::Lanes(d), whole = count / lanes * lanes * dim;
  constexpr int64_t kSmall = 16;  // Dimensions whose pattern is kept; above, rows are vectors enough.
  HWY_ALIGN double pattern[kSmall * HWY_MAX_BYTES / sizeof(double)] = {};
  std::fill(centre, centre + dim, 0.0);
  if (dim <= kSmall) {
    for (int64_t i = 0; i < whole; i += dim * lanes) {
      for (int64_t v = 0; v < dim * lanes; v += lanes) {
        hn::Store(hn::Add(hn::Load(d, pattern + v), hn::LoadU(d, rows + i + v)), d, pattern + v);
      }
    }
    for (int64_t v = 0; v < dim * lanes; ++v) centre[v % dim] += pattern[v];
    for (int64_t i = whole; i < count * dim; ++i) centre[i % dim] += rows[i];
  } else {
    for (int64_t i = 0; i < count; ++i) {
      const double* row = rows + i * dim;
      int64_t k = 0;
      for (; k + lanes <= dim; k += lanes) {
        hn::StoreU(hn::Add(hn::LoadU(d, centre + k), hn::LoadU(d, row + k)), d, centre + k);
      }
      for (; k < dim; ++k) centre[k] += row[k];
    }
  }
  for (int64_t k = 0; k < dim; ++k) centre[k] /= static_cast<double>(count);
  if (dim <= kSmall) {
    for (int64_t v = 0; v < dim * lanes; ++v) pattern[v] = centre[v % dim];
    for (int64_t i = 0; i < whole; i += dim * lanes) {
      for (int64_t v = 0; v < dim * lanes; v += lanes) {
        hn::StoreU(hn::Sub(hn::LoadU(d, rows + i + v), hn::Load(d, pattern + v)), d, rows + i + v);
      }
    }
    for (int64_t i = whole; i < count * dim; ++i) rows[i] -= centre[i % dim];
  }
  for (int64_t i = 0; i < count; ++i) {
    double* row = rows + i * dim;
    if (dim > kSmall) {
      int64_t k = 0;
      for (; k + lanes <= dim; k += lanes) {
        hn::StoreU(hn::Sub(hn::LoadU(d, row + k), hn::LoadU(d, centre + k)), d, row + k);
      }
      for (; k < dim; ++k) row[k] -= centre[k];
    }
    norm2[i] = DotOfDoubles(row, row, dim);
  }
}

template <typename T>
void RangeOfRow(const T* row, int64_t count, T* low, T* high) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = hn::Lanes(d);
  hn::Vec<hn::ScalableTag<T>> min[4], max[4];
  SINKHORN_UNROLL for (int k = 0; k < 4; ++k) min[k] = hn::Inf(d), max[k] = hn::Neg(hn::Inf(d));
  int64_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    SINKHORN_UNROLL for (int k = 0; k < 4; ++k) {
      const auto v = hn::LoadU(d, row + i + k * lanes);
      min[k] = hn::Min(min[k], v);
      max[k] = hn::Max(max[k], v);
    }
  }
  const auto least = hn::Min(hn::Min(min[0], min[1]), hn::Min(min[2], min[3]));
  const auto most = hn::Max(hn::Max(max[0], max[1]), hn::Max(max[2], max[3]));
  *low = hn::GetLane(hn::MinOfLanes(d, least));
  *high = hn::GetLane(hn::MaxOfLanes(d, most));
  for (; i < count; ++i) {
    *low = std::min(*low, row[i]);
    *high = std::max(*high, row[i]);
  }
}
void RangeOfFloats(const float* row, int64_t count, float* low, float* high) { RangeOfRow(row, count, low, high); }
void RangeOfDoubles(const double* row, int64_t count, double* low, double* high) { RangeOfRow(row, count, low, high); }

template <typename TE, typename T>
const TransportKernels<TE, T>& Table() {
  static const TransportKernels<TE, T> table = {
      static_cast<int>(2 * hn::Lanes(TagOf<TE>())),
      Exponents<TE>,
      ExpSums<TE, T>,
      CostExponents<TE>,
      CostExpSums<TE, T>,
      RowMax<TE>,
      ExpRows<TE, T>,
      RowSums<T>,
      AddColumns<T>,
      Scale<T>,
      Multiply<T>,
      Dot<TE, T>,
      BalancedRows<T>,
      BalancedSweep<T>,
      BalancedColumns<T>,
      Update<T>,
      LogScaling<T>,
      Within<T>,
      Freeze<TE, T>,
      ScaleRow<TE>,
      Pack<TE>,
  };
  return table;
}

const TransportKernels<float, float>& TableFloat() { return Table<float, float>(); }
const TransportKernels<double, float>& TableMixed() { return Table<double, float>(); }
const TransportKernels<double, double>& TableDouble() { return Table<double, double>(); }

}  // namespace HWY_NAMESPACE
}  // namespace cpu
}  // namespace sinkhorn
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sinkhorn {
namespace cpu {

HWY_EXPORT(DotsOfRows);
HWY_EXPORT(CentreRows);
HWY_EXPORT(RangeOfFloats);
HWY_EXPORT(RangeOfDoubles);
HWY_EXPORT(TableFloat);
HWY_EXPORT(TableMixed);
HWY_EXPORT(TableDouble);

void RowDots(const double* rows, int64_t count, int64_t dim, const double* vector, double* out) {
  HWY_DYNAMIC_DISPATCH(DotsOfRows)(rows, count, dim, vector, out);
}
void Centre(double* rows, int64_t count, int64_t dim, double* centre, double* norm2) {
  HWY_DYNAMIC_DISPATCH(CentreRows)(rows, count, dim, centre, norm2);
}
void Range(const float* values, int64_t count, float* low, float* high) {
  HWY_DYNAMIC_DISPATCH(RangeOfFloats)(values, count, low, high);
}
void Range(const double* values, int64_t count, double* low, double* high) {
  HWY_DYNAMIC_DISPATCH(RangeOfDoubles)(values, count, low, high);
}

template <>
const TransportKernels<float, float>& GetTransportKernels() {
  return HWY_DYNAMIC_DISPATCH(TableFloat)();
}
template <>
const TransportKernels<double, float>& GetTransportKernels() {
  return HWY_DYNAMIC_DISPATCH(TableMixed)();
}
template <>
const TransportKernels<double, double>& GetTransportKernels() {
  return HWY_DYNAMIC_DISPATCH(TableDouble)();
}

}  // namespace cpu
}  // namespace sinkhorn
#endif  // HWY_ONCE
