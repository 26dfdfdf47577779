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
constexpr int64_t kFloatColumns = 4096;   // Columns that a sum in T spans before it goes to double.

template <typename TE>
using TagOf = hn::CappedTag<TE, 16>;  // At most half a column pad.

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
      SINKHORN_UNROLL for (int r = 0; r < kTileRows; ++r) {
        hn::Store(acc[r][0], de, out + BlockIndex(r0 + r, j));
        hn::Store(acc[r][1], de, out + BlockIndex(r0 + r, j + lanes));
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
        SINKHORN_UNROLL for (int r = 0; r < kTileRows; ++r) {
          const auto t0 = Exp2(dt, Convert(dt, acc[r][0]));
          const auto t1 = Exp2(dt, Convert(dt, acc[r][1]));
          hn::Store(t0, dt, out + BlockIndex(r0 + r, j));
          hn::Store(t1, dt, out + BlockIndex(r0 + r, j + lanes));
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

template <typename TE>
void RowMax(const TE* e, int64_t columns, const TE* penalty, TE* max) {
  const TagOf<TE> de;
  const int64_t lanes = hn::Lanes(de);
  hn::Vec<TagOf<TE>> m[kRowBlock];
  SINKHORN_UNROLL for (int r = 0; r < kRowBlock; ++r) m[r] = hn::Set(de, static_cast<TE>(kVoid));
  for (int64_t j = 0; j < columns; j += lanes) {
    const auto p = hn::Load(de, penalty + j);
    SINKHORN_UNROLL for (int r = 0; r < kRowBlock; ++r) {
      m[r] = hn::Max(m[r], hn::Add(hn::Load(de, e + BlockIndex(r, j)), p));
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
        SINKHORN_UNROLL for (int r = 0; r < 4; ++r) {
          const auto exponent = hn::Sub(hn::Load(de, e + BlockIndex(r0 + r, j)), hn::Set(de, shift[r0 + r]));
          const auto t = Exp2(dt, Convert(dt, exponent));
          hn::Store(t, dt, out + BlockIndex(r0 + r, j));
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
      SINKHORN_UNROLL for (int r = 0; r < kRowBlock; ++r) {
        sum[r] = hn::MulAdd(hn::Load(d, t + BlockIndex(r, j)), w, sum[r]);
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
    SINKHORN_UNROLL for (int r = 0; r < kRowBlock; ++r) hwy::Prefetch(following + BlockIndex(r, j));
    auto a = hn::Load(d, acc + j);
    auto b = hn::Zero(d);
    SINKHORN_UNROLL for (int r = 0; r < kRowBlock; r += 2) {
      a = hn::MulAdd(hn::Load(d, t + BlockIndex(r, j)), weight[r], a);
      b = hn::MulAdd(hn::Load(d, t + BlockIndex(r + 1, j)), weight[r + 1], b);
    }
    hn::Store(hn::Add(a, b), d, acc + j);
  }
}

// A pass over cached rows, kRows at a time: while a group is added to the column sums, the next one's row sums are made,
// so that its way from the cache behind hides under the first one's arithmetic.
template <int kRows, typename T>
class CachedSweep {
 public:
  using D = TagOf<T>;
  using V = hn::Vec<D>;
  static constexpr int kStep = 8 / kRows;  // Vectors of columns at a time: enough independent sums.

  CachedSweep(const T* t, int64_t columns, const T* weights, T* acc)
      : t_(t), columns_(columns), weights_(weights), acc_(acc) {}

  const T* Group(int64_t group) const {
    constexpr int64_t kGroups = kRowBlock / kRows;
    return t_ + group / kGroups * (kRowBlock * columns_) + group % kGroups * (kRows * kTile);
  }

  // acc += the group's rows times w;  sums = weighted sums of the next group's rows. Either may be left out.
  template <bool kAdd, bool kSum>
  HWY_INLINE void Pass(int64_t group, const T* w, double* sums) const {
    const D d;
    const int64_t lanes = hn::Lanes(d);
    const T* HWY_RESTRICT now = Group(group);
    const T* HWY_RESTRICT following = Group(group + 1);
    const T* HWY_RESTRICT weights = weights_;
    T* HWY_RESTRICT acc = acc_;
    V weight[kRows];
    SINKHORN_UNROLL for (int r = 0; r < kRows; ++r) weight[r] = kAdd ? hn::Set(d, w[r]) : hn::Zero(d);
    double total[kRows] = {};
    for (int64_t begin = 0; begin < columns_; begin += kFloatColumns) {
      const int64_t end = std::min(columns_, begin + kFloatColumns);
      V sum[kRows][kStep];
      SINKHORN_UNROLL for (int r = 0; r < kRows; ++r) {
        SINKHORN_UNROLL for (int k = 0; k < kStep; ++k) sum[r][k] = hn::Zero(d);
      }
      for (int64_t j = begin; j < end; j += kStep * lanes) {
        SINKHORN_UNROLL for (int k = 0; k < kStep; ++k) {
          const int64_t c = j + k * lanes, at = BlockIndex(0, c);
          if (kSum) {
            const auto column = hn::Load(d, weights + c);
            SINKHORN_UNROLL for (int r = 0; r < kRows; ++r) {
              sum[r][k] = hn::MulAdd(hn::Load(d, following + at + r * kTile), column, sum[r][k]);
            }
          }
          if (kAdd) {
            auto a = hn::Load(d, acc + c);
            auto b = hn::Mul(hn::Load(d, now + at), weight[0]);
            SINKHORN_UNROLL for (int r = 1; r < kRows; r += 2) {
              a = hn::MulAdd(hn::Load(d, now + at + r * kTile), weight[r], a);
              if (r + 1 < kRows) b = hn::MulAdd(hn::Load(d, now + at + (r + 1) * kTile), weight[r + 1], b);
            }
            hn::Store(hn::Add(a, b), d, acc + c);
          }
        }
      }
      if (kSum) {
        SINKHORN_UNROLL for (int r = 0; r < kRows; ++r) {
          for (int k = 1; k < kStep; ++k) sum[r][0] = hn::Add(sum[r][0], sum[r][k]);
          total[r] += hn::GetLane(hn::SumOfLanes(d, sum[r][0]));
        }
      }
    }
    if (kSum) std::copy(total, total + kRows, sums);
  }

 private:
  const T* const t_;
  const int64_t columns_;
  const T* const weights_;
  T* const acc_;
};

template <int kRows, typename T>
int64_t SweepGroups(const T* t, int64_t columns, int64_t rows, const T* weights, const T* u, const T* mass, double low,
                    double high, double* sums, T* next, T* acc, double* error) {
  const hn::CappedTag<double, kRows> d;
  const hn::Rebind<T, hn::CappedTag<double, kRows>> dt;
  const CachedSweep<kRows, T> sweep(t, columns, weights, acc);
  const int64_t groups = (rows + kRows - 1) / kRows;
  const auto one = hn::Set(d, 1.0);
  auto errors = hn::Zero(d);
  HWY_ALIGN T weight[kRows];
  sweep.template Pass<false, true>(-1, weight, sums);
  int64_t group = 0;
  for (; group < groups; ++group) {
    const int64_t row = group * kRows;
    bool safe = true;
    for (int r = 0; r < kRows; r += hn::Lanes(d)) {
      const auto s = hn::LoadU(d, sums + row + r);
      const auto in = hn::And(hn::Gt(s, hn::Set(d, low)), hn::Lt(s, hn::Set(d, high)));
      const auto real = hn::FirstN(d, std::max<int64_t>(rows - row - r, 0));
      if (!hn::AllTrue(d, hn::Or(in, hn::Not(real)))) safe = false;
      const auto old = hn::LoadU(dt, u + row + r);
      const auto m = hn::LoadU(dt, mass + row + r);
      const auto inverse = Convert(dt, hn::Div(one, hn::IfThenElse(real, s, one)));
      hn::StoreU(inverse, dt, next + row + r);
      hn::StoreU(hn::IfThenElseZero(hn::Gt(m, hn::Zero(dt)), hn::Mul(m, inverse)), dt, weight + r);
      errors = hn::MulAdd(Convert(d, m), hn::Abs(hn::MulSub(Convert(d, old), s, one)), errors);
    }
    if (!safe) break;
    if (group + 1 < groups) {
      sweep.template Pass<true, true>(group, weight, sums + row + kRows);
    } else {
      sweep.template Pass<true, false>(group, weight, sums);
    }
  }
  *error += hn::GetLane(hn::SumOfLanes(d, errors));
  return group * kRows;
}

template <typename T>
int64_t BalancedSweep(const T* t, int64_t columns, int64_t rows, const T* weights, const T* u, const T* mass,
                      double low, double high, double* sums, T* next, T* acc, double* error) {
  return kTileRows == 8 && kRowBlock * columns * sizeof(T) <= kPrefetchBytes
             ? SweepGroups<8>(t, columns, rows, weights, u, mass, low, high, sums, next, acc, error)
             : SweepGroups<4>(t, columns, rows, weights, u, mass, low, high, sums, next, acc, error);
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

double DotOfDoubles(const double* a, const double* b, int64_t count) {
  const hn::CappedTag<double, 8> d;
  const int64_t lanes = hn::Lanes(d);
  auto sum0 = hn::Zero(d), sum1 = hn::Zero(d);
  int64_t i = 0;
  for (; i + 2 * lanes <= count; i += 2 * lanes) {
    sum0 = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), sum0);
    sum1 = hn::MulAdd(hn::LoadU(d, a + i + lanes), hn::LoadU(d, b + i + lanes), sum1);
  }
  double total = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1)));
  for (; i < count; ++i) total += a[i] * b[i];
  return total;
}

template <typename TE, typename T>
const TransportKernels<TE, T>& Table() {
  static const TransportKernels<TE, T> table = {
      static_cast<int>(2 * hn::Lanes(TagOf<TE>())),
      Exponents<TE>,
      ExpSums<TE, T>,
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

HWY_EXPORT(DotOfDoubles);
HWY_EXPORT(TableFloat);
HWY_EXPORT(TableMixed);
HWY_EXPORT(TableDouble);

double DotDouble(const double* a, const double* b, int64_t count) {
  return HWY_DYNAMIC_DISPATCH(DotOfDoubles)(a, b, count);
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
