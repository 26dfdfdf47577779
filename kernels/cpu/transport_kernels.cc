// Row blocks are register tiles: kRowBlock rows by two vectors of columns stay in accumulators while a panel of points
// streams by. One function per loop; the tables at the end are all that leaves this file.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/transport_kernels.cc"
#include "kernels/cpu/targets.h"
//
#include "hwy/foreach_target.h"
//
#include <algorithm>

#include "hwy/highway.h"
#include "kernels/cpu/math-inl.h"
#include "kernels/cpu/transport_cached-inl.h"
#include "kernels/cpu/transport_kernels.h"
#include "kernels/cpu/transport_updates-inl.h"
#include "kernels/cpu/transport_vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// What an exponent is made of, apart from terms: <x, y>, scale |x - y|^2 or -scale |x - y|.
enum class Form { kProduct, kSquare, kRoot };

// One panel: acc[r][0..1] = the form of rows[r] and y, plus terms.
template <int kRows, Form kForm, class DE, typename TE = hn::TFromD<DE>>
HWY_INLINE void PanelExponents(DE de, const TE* HWY_RESTRICT rows, int64_t dim, const TE* HWY_RESTRICT panel, TE scale,
                               const TE* HWY_RESTRICT row_term, const TE* HWY_RESTRICT col_term,
                               hn::Vec<DE> (&acc)[kRows][2]) {
  constexpr bool kDistance = kForm != Form::kProduct;
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
    const auto s = hn::Set(de, kForm == Form::kRoot ? -scale : scale);
    SINKHORN_UNROLL for (int r = 0; r < kRows; ++r) {
      const auto term = hn::Set(de, row_term[r]);
      if (kForm == Form::kRoot) {
        acc[r][0] = hn::Sqrt(acc[r][0]);
        acc[r][1] = hn::Sqrt(acc[r][1]);
      }
      acc[r][0] = hn::MulAdd(s, acc[r][0], hn::Add(c0, term));
      acc[r][1] = hn::MulAdd(s, acc[r][1], hn::Add(c1, term));
    }
  }
}

template <typename TE, Form kForm>
void PanelsExponents(const TE* rows, int64_t dim, const TE* packed, int64_t columns, TE scale, const TE* row_term,
                     const TE* col_term, TE* out) {
  const TagOf<TE> de;
  const int64_t lanes = hn::Lanes(de);
  for (int64_t j = 0; j < columns; j += 2 * lanes) {
    for (int r0 = 0; r0 < kRowBlock; r0 += kTileRows) {
      hn::Vec<TagOf<TE>> acc[kTileRows][2];
      PanelExponents<kTileRows, kForm>(de, rows + r0 * dim, dim, packed + j * dim, scale, row_term + r0, col_term + j,
                                       acc);
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
  const auto panels = scale == 0  ? PanelsExponents<TE, Form::kProduct>
                      : scale < 0 ? PanelsExponents<TE, Form::kSquare>
                                  : PanelsExponents<TE, Form::kRoot>;
  panels(rows, dim, packed, columns, scale, row_term, col_term, out);
}

template <typename TE, typename T, Form kForm>
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
        PanelExponents<kTileRows, kForm>(de, rows + r0 * dim, dim, packed + j * dim, scale, row_term + r0, col_term + j,
                                         acc);
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
  const auto panels = scale == 0  ? PanelsExpSums<TE, T, Form::kProduct>
                      : scale < 0 ? PanelsExpSums<TE, T, Form::kSquare>
                                  : PanelsExpSums<TE, T, Form::kRoot>;
  panels(rows, dim, packed, columns, scale, row_term, col_term, weights, out, sums);
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

// ---- Products with the plan ----------------------------------------------------------------------------------------

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
  };
  return table;
}

const TransportKernels<float, float>& TableFloat() { return Table<float, float>(); }
const TransportKernels<double, float>& TableMixed() { return Table<double, float>(); }
const TransportKernels<double, double>& TableDouble() { return Table<double, double>(); }

}  // namespace sinkhorn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sinkhorn::cpu {

HWY_EXPORT(TableFloat);
HWY_EXPORT(TableMixed);
HWY_EXPORT(TableDouble);

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

}  // namespace sinkhorn::cpu
#endif  // HWY_ONCE
