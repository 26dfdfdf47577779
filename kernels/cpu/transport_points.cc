#include "kernels/cpu/transport_points.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/transport_points.cc"
#include "kernels/cpu/targets.h"
//
#include "hwy/foreach_target.h"
//
#include <algorithm>

#include "hwy/highway.h"
#include "kernels/cpu/buffer.h"
#include "kernels/cpu/transport_vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename TE>
void ScaledRow(const double* point, int64_t dim, double factor, TE* out) {
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
void PackRows(const double* HWY_RESTRICT points, int64_t count, int64_t dim, int64_t panel, TE* HWY_RESTRICT out) {
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

template <class D, typename From>
HWY_INLINE hn::Vec<D> LoadAs(D d, const From* from) {
  return Convert(d, hn::LoadU(hn::Rebind<From, D>(), from));
}

// Up to kSmall dimensions, rows are taken `lanes` at a time, as `dim` vectors: lane l of vector v belongs to coordinate
// (v lanes + l) mod dim. Above, rows are vectors enough.
template <typename From>
void CentreRows(const From* in, int64_t count, int64_t dim, double* out, double* HWY_RESTRICT centre,
                double* HWY_RESTRICT norm2) {
  const hn::CappedTag<double, 8> d;
  constexpr int64_t kSmall = 16;
  const int64_t lanes = hn::Lanes(d), rows = dim <= kSmall ? lanes : 1, step = rows * dim;
  const int64_t whole = count / rows * step, vectors = step / lanes * lanes;  // Of a step.
  Buffer<double> pattern(step);
  for (int64_t i = 0; i < whole; i += step) {
    int64_t v = 0;
    for (; v < vectors; v += lanes) {
      hn::StoreU(hn::Add(hn::LoadU(d, pattern.data() + v), LoadAs(d, in + i + v)), d, pattern.data() + v);
    }
    for (; v < step; ++v) pattern[v] += in[i + v];
  }
  std::fill(centre, centre + dim, 0.0);
  for (int64_t v = 0; v < step; ++v) centre[v % dim] += pattern[v];
  for (int64_t i = whole; i < count * dim; ++i) centre[i % dim] += in[i];
  for (int64_t k = 0; k < dim; ++k) centre[k] /= static_cast<double>(count);

  for (int64_t v = 0; v < step; ++v) pattern[v] = centre[v % dim];
  for (int64_t i = 0; i < whole; i += step) {
    int64_t v = 0;
    for (; v < vectors; v += lanes) {
      hn::StoreU(hn::Sub(LoadAs(d, in + i + v), hn::LoadU(d, pattern.data() + v)), d, out + i + v);
    }
    for (; v < step; ++v) out[i + v] = in[i + v] - pattern[v];
    for (int64_t r = i / dim; r < i / dim + rows; ++r) norm2[r] = DotOfDoubles(out + r * dim, out + r * dim, dim);
  }
  for (int64_t i = whole; i < count * dim; ++i) out[i] = in[i] - centre[i % dim];
  for (int64_t r = whole / dim; r < count; ++r) norm2[r] = DotOfDoubles(out + r * dim, out + r * dim, dim);
}
void CentreFloats(const float* in, int64_t count, int64_t dim, double* out, double* centre, double* norm2) {
  CentreRows(in, count, dim, out, centre, norm2);
}
void CentreDoubles(const double* in, int64_t count, int64_t dim, double* out, double* centre, double* norm2) {
  CentreRows(in, count, dim, out, centre, norm2);
}

void DirectionsTo(const double* HWY_RESTRICT point, int64_t dim, const double* HWY_RESTRICT packed, int64_t columns,
                  int64_t panel, const double* HWY_RESTRICT weights, double* HWY_RESTRICT out) {
  const hn::CappedTag<double, 8> d;
  const int64_t lanes = hn::Lanes(d);
  Buffer<double> sums(dim * lanes);
  for (int64_t j = 0; j < columns; j += lanes) {
    const double* y = packed + j / panel * panel * dim + j % panel;
    auto square = hn::Zero(d);
    for (int64_t k = 0; k < dim; ++k) {
      const auto difference = hn::Sub(hn::Set(d, point[k]), hn::LoadU(d, y + k * panel));
      square = hn::MulAdd(difference, difference, square);
    }
    const auto apart = hn::Gt(square, hn::Zero(d));
    const auto distance = hn::IfThenElse(apart, hn::Sqrt(square), hn::Set(d, 1.0));
    const auto weight = hn::IfThenElseZero(apart, hn::Div(hn::LoadU(d, weights + j), distance));
    for (int64_t k = 0; k < dim; ++k) {
      const auto difference = hn::Sub(hn::Set(d, point[k]), hn::LoadU(d, y + k * panel));
      hn::StoreU(hn::MulAdd(weight, difference, hn::LoadU(d, sums.data() + k * lanes)), d, sums.data() + k * lanes);
    }
  }
  for (int64_t k = 0; k < dim; ++k) out[k] += hn::GetLane(hn::SumOfLanes(d, hn::LoadU(d, sums.data() + k * lanes)));
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

void ScaleToFloat(const double* row, int64_t dim, double factor, float* out) { ScaledRow(row, dim, factor, out); }
void ScaleToDouble(const double* row, int64_t dim, double factor, double* out) { ScaledRow(row, dim, factor, out); }
void PackFloats(const double* rows, int64_t count, int64_t dim, int64_t panel, float* out) {
  PackRows(rows, count, dim, panel, out);
}
void PackDoubles(const double* rows, int64_t count, int64_t dim, int64_t panel, double* out) {
  PackRows(rows, count, dim, panel, out);
}

}  // namespace sinkhorn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sinkhorn::cpu {

HWY_EXPORT(DotsOfRows);
HWY_EXPORT(CentreFloats);
HWY_EXPORT(CentreDoubles);
HWY_EXPORT(DirectionsTo);
HWY_EXPORT(RangeOfFloats);
HWY_EXPORT(RangeOfDoubles);
HWY_EXPORT(ScaleToFloat);
HWY_EXPORT(ScaleToDouble);
HWY_EXPORT(PackFloats);
HWY_EXPORT(PackDoubles);

void RowDots(const double* rows, int64_t count, int64_t dim, const double* vector, double* out) {
  HWY_DYNAMIC_DISPATCH(DotsOfRows)(rows, count, dim, vector, out);
}
void Centre(const float* in, int64_t count, int64_t dim, double* out, double* centre, double* norm2) {
  HWY_DYNAMIC_DISPATCH(CentreFloats)(in, count, dim, out, centre, norm2);
}
void Centre(const double* in, int64_t count, int64_t dim, double* out, double* centre, double* norm2) {
  HWY_DYNAMIC_DISPATCH(CentreDoubles)(in, count, dim, out, centre, norm2);
}
void AddDirections(const double* point, int64_t dim, const double* packed, int64_t columns, int64_t panel,
                   const double* weights, double* out) {
  HWY_DYNAMIC_DISPATCH(DirectionsTo)(point, dim, packed, columns, panel, weights, out);
}
void Range(const float* values, int64_t count, float* low, float* high) {
  HWY_DYNAMIC_DISPATCH(RangeOfFloats)(values, count, low, high);
}
void Range(const double* values, int64_t count, double* low, double* high) {
  HWY_DYNAMIC_DISPATCH(RangeOfDoubles)(values, count, low, high);
}
void ScaleRow(const double* row, int64_t dim, double factor, float* out) {
  HWY_DYNAMIC_DISPATCH(ScaleToFloat)(row, dim, factor, out);
}
void ScaleRow(const double* row, int64_t dim, double factor, double* out) {
  HWY_DYNAMIC_DISPATCH(ScaleToDouble)(row, dim, factor, out);
}
void Pack(const double* rows, int64_t count, int64_t dim, int64_t panel, float* out) {
  HWY_DYNAMIC_DISPATCH(PackFloats)(rows, count, dim, panel, out);
}
void Pack(const double* rows, int64_t count, int64_t dim, int64_t panel, double* out) {
  HWY_DYNAMIC_DISPATCH(PackDoubles)(rows, count, dim, panel, out);
}

}  // namespace sinkhorn::cpu
#endif  // HWY_ONCE
