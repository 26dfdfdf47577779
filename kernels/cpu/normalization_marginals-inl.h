// The marginals of a group of members, as its kernels use them.
//
// In the linear domain u and v are only free of drift if both sides have the same total, and P's scale matters to the
// guards alone. So the marginals are scaled to the total `rows`: after a row step the kernel's P is row_scale times the
// true one, after a column step col_scale times, and a guard is scaled like the sums that it meets. Where all marginals
// are 1 and the matrix is square, all scales are exactly 1. In the log domain nothing is scaled.
#if defined(SINKHORN_KERNELS_CPU_NORMALIZATION_MARGINALS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SINKHORN_KERNELS_CPU_NORMALIZATION_MARGINALS_INL_H_
#undef SINKHORN_KERNELS_CPU_NORMALIZATION_MARGINALS_INL_H_
#else
#define SINKHORN_KERNELS_CPU_NORMALIZATION_MARGINALS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "hwy/highway.h"
#include "kernels/cpu/normalization_io-inl.h"
#include "kernels/cpu/normalization_spec.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::cpu::normalization::HWY_NAMESPACE {

// A number per lane, in memory.
template <class T, int64_t kLanes>
struct LaneScalar {
  HWY_ALIGN T value[kLanes];
  void Fill(double x) { std::fill(value, value + kLanes, static_cast<T>(x)); }
};

template <class Layout, bool kLog>
class ScaledMarginals {
 public:
  using T = typename Layout::T;
  static constexpr int64_t kLanes = Layout::kLanes;
  using Scalar = LaneScalar<T, kLanes>;

  ScaledMarginals(const NormalizationSpec& spec, const Layout& layout, Arena* arena) : spec_(spec), layout_(layout) {
    row = arena->Take<T>(layout.row_elements());
    row_inverse = arena->Take<T>(layout.row_elements());
    col = arena->Take<T>(layout.col_elements());
    col_inverse = arena->Take<T>(layout.col_elements());
    if constexpr (kLog) {
      row_log = arena->Take<T>(layout.row_elements());
      col_log = arena->Take<T>(layout.col_elements());
    }
  }

  void Load(const Group<Layout::kMembers>& group) {
    std::vector<double> r(spec_.rows), c(spec_.cols);
    for (int64_t l = 0; l < Layout::kMembers; ++l) {
      if (l == 0 || (spec_.own_marginals && group.store[l])) spec_.LoadMarginals(group.member[l], r.data(), c.data());
      SetLane(l, r, c);
    }
  }

  T *row, *col;                  // Scaled.
  T *row_inverse, *col_inverse;  // 1 / them
  T *row_log = nullptr, *col_log = nullptr;
  Scalar row_unscale, col_unscale;  // Marginal / scaled marginal.
  Scalar col_scale, row_scale;
  Scalar row_guard, col_guard;  // In the log domain their logarithms.
  Scalar range;                 // log(largest / smallest), both sides added.

 private:
  static double LogRange(const std::vector<double>& x) {
    const auto [smallest, largest] = std::minmax_element(x.begin(), x.end());
    return *smallest > 0 ? std::log(*largest / *smallest) : HUGE_VAL;
  }

  void SetLane(int64_t l, const std::vector<double>& r, const std::vector<double>& c) {
    const double total = static_cast<double>(spec_.rows);
    const double r_scale = kLog ? 1 : total / std::accumulate(r.begin(), r.end(), 0.0);
    const double c_scale = kLog ? 1 : total / std::accumulate(c.begin(), c.end(), 0.0);
    SetSide(l, r, r_scale, layout_.row_elements(), row, row_inverse, row_log);
    SetSide(l, c, c_scale, layout_.col_elements(), col, col_inverse, col_log);
    SetScalar(l, r_scale, &row_scale);
    SetScalar(l, c_scale, &col_scale);
    SetScalar(l, 1 / r_scale, &row_unscale);
    SetScalar(l, 1 / c_scale, &col_unscale);
    const double guard = spec_.recipe.guard_value;
    SetScalar(l, kLog ? std::log(guard) : guard * c_scale, &row_guard);
    SetScalar(l, kLog ? std::log(guard) : guard * r_scale, &col_guard);
    SetScalar(l, LogRange(r) + LogRange(c), &range);
  }

  void SetScalar(int64_t l, double x, Scalar* scalar) {
    if constexpr (Layout::kPerLane) {
      scalar->value[l] = static_cast<T>(x);
    } else {
      scalar->Fill(x);
    }
  }

  void SetSide(int64_t l, const std::vector<double>& x, double scale, int64_t elements, T* scaled, T* inverse, T* log) {
    const int64_t step = Layout::kPerLane ? kLanes : 1;
    const int64_t size = static_cast<int64_t>(x.size());
    for (int64_t k = 0; k < elements / step; ++k) {  // Padding: 0.
      const double value = k < size ? x[k] * scale : 0;
      scaled[k * step + l] = static_cast<T>(value);
      inverse[k * step + l] = k < size ? static_cast<T>(1 / value) : T(0);
      if constexpr (kLog) log[k * step + l] = k < size ? static_cast<T>(std::log(value)) : T(0);
    }
  }

  const NormalizationSpec& spec_;
  const Layout& layout_;
};

}  // namespace sinkhorn::cpu::normalization::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // SINKHORN_KERNELS_CPU_NORMALIZATION_MARGINALS_INL_H_
