#include "kernels/cpu/transport_cost.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/cpu/half.h"
#include "kernels/cpu/transport_points.h"

namespace sinkhorn::cpu {
namespace {

// The tensor's memory from `offset` on if it holds floats that may be read in place.
const float* AlignedFloats(const TensorView& view, int64_t offset) {
  if (view.dtype != DType::kFloat32 || reinterpret_cast<uintptr_t>(view.data) % alignof(float) != 0) return nullptr;
  return static_cast<const float*>(view.data) + offset;
}

// Divides rows by their lengths. The largest coordinate is taken out first: no square over- or underflows.
void Normalize(int64_t count, int64_t dim, double* points, double* length) {
  for (int64_t i = 0; i < count; ++i) {
    double* point = points + i * dim;
    double largest = 0, norm2 = 0;
    for (int64_t k = 0; k < dim; ++k) largest = std::max(largest, std::abs(point[k]));
    if (!(largest > 0)) continue;
    for (int64_t k = 0; k < dim; ++k) {
      point[k] /= largest;
      norm2 += point[k] * point[k];
    }
    const double norm = std::sqrt(norm2);
    for (int64_t k = 0; k < dim; ++k) point[k] /= norm;
    length[i] = largest * norm;
  }
}

double Radius(const Cloud& cloud) {
  double radius2 = 0;
  for (double norm2 : cloud.norm2) radius2 = std::max(radius2, norm2);
  return std::sqrt(radius2);
}
}  // namespace

Cloud MakeCloud(const TensorView& points, int64_t member, int64_t count, int64_t dim, bool normalize) {
  Cloud cloud;
  cloud.count = count;
  cloud.dim = dim;
  cloud.points.Allocate(count * dim);
  cloud.centre.Resize(dim);
  cloud.norm2.Allocate(count);
  const int64_t offset = points.shared ? 0 : member * count * dim;
  double* out = cloud.points.data();
  const float* in = normalize ? nullptr : AlignedFloats(points, offset);
  if (in != nullptr) {
    Centre(in, count, dim, out, cloud.centre.data(), cloud.norm2.data());
  } else {
    LoadAsDouble(points.dtype, points.data, offset, count * dim, out);
    if (normalize) {
      cloud.length.Resize(count);
      Normalize(count, dim, out, cloud.length.data());
    }
    Centre(out, count, dim, out, cloud.centre.data(), cloud.norm2.data());
  }
  cloud.radius = Radius(cloud);
  return cloud;
}

void ShareCentre(Cloud* x, Cloud* y) {
  Buffer<double> centre(x->dim);
  for (int64_t k = 0; k < x->dim; ++k) centre[k] = (x->centre[k] + y->centre[k]) / 2;
  for (Cloud* cloud : {x, y}) {
    for (int64_t i = 0; i < cloud->count; ++i) {
      double* point = cloud->points.data() + i * cloud->dim;
      cloud->norm2[i] = 0;
      for (int64_t k = 0; k < cloud->dim; ++k) {
        point[k] += cloud->centre[k] - centre[k];
        cloud->norm2[i] += point[k] * point[k];
      }
    }
    std::copy(centre.begin(), centre.end(), cloud->centre.begin());
    cloud->radius = Radius(*cloud);
  }
}

double BoxDiagonal2(const Cloud& x, const Cloud& y) {
  double diagonal2 = 0;
  for (int64_t k = 0; k < x.dim; ++k) {
    double low = INFINITY, high = -INFINITY;
    for (const Cloud* cloud : {&x, &y}) {
      for (int64_t i = 0; i < cloud->count; ++i) {
        const double value = cloud->points[i * x.dim + k] + cloud->centre[k];
        low = std::min(low, value);
        high = std::max(high, value);
      }
    }
    diagonal2 += (high - low) * (high - low);
  }
  return diagonal2;
}

CostRange RangeOf(const TensorView& cost, int64_t member, int64_t n, int64_t m, int64_t begin, int64_t end) {
  CostRange range{INFINITY, -INFINITY};
  const int64_t offset = cost.shared ? 0 : member * n * m;
  double row[512], low, high;
  for (int64_t i = begin * m; i < end * m; i += 512) {
    const int64_t count = std::min<int64_t>(512, end * m - i);
    if (const float* values = AlignedFloats(cost, offset + i)) {
      float low_float, high_float;
      Range(values, count, &low_float, &high_float);
      low = low_float;
      high = high_float;
    } else {
      LoadAsDouble(cost.dtype, cost.data, offset + i, count, row);
      Range(row, count, &low, &high);
    }
    range.min = std::min(range.min, low);
    range.max = std::max(range.max, high);
  }
  return range;
}

template <typename TE, typename T>
CostSource<TE, T>::CostSource(const Cloud* x, const Cloud* y, const TransportInputs& in)
    : dense_(false), size_{x->count, y->count}, cloud_{x, y}, point_cost_(in.point_cost), kappa_(CostFactor(in)) {
  for (int side = 0; side < 2; ++side) shift_[side].Resize(padded(side));
  if (point_cost_ == PointCost::kEuclidean) return;
  // Of points x + c and y + e, x and y centred. What depends on one side alone goes into its shift:
  //   kappa |x + d - y|^2 = kappa (|x|^2 + |y|^2 + 2 <x, d> - 2 <y, d> + |d|^2) - 2 kappa <x, y>,  d = c - e;
  //   -<x + c, y + e>     = -<x, e> - <y, c> - <c, e> - <x, y>.
  const bool dot = point_cost_ == PointCost::kNegativeDot;
  const int64_t dim = x->dim;
  for (int side = 0; side < 2; ++side) {
    const Cloud& cloud = *cloud_[side];
    const Cloud& other = *cloud_[1 - side];
    Buffer<double> d(dim);
    double constant = 0;  // Of side 0.
    for (int64_t k = 0; k < dim; ++k) {
      d[k] = dot ? -other.centre[k] : cloud.centre[k] - other.centre[k];
      constant += dot ? -cloud.centre[k] * other.centre[k] : d[k] * d[k] * kappa_;
    }
    double* shift = shift_[side].data();
    RowDots(cloud.points.data(), cloud.count, dim, d.data(), shift);
    for (int64_t i = 0; i < cloud.count; ++i) {
      // Whole squared distances hold kappa (|x|^2 + |y|^2) already.
      const double square = kappa_ * cloud.norm2[i] * ((distance() ? 0 : 1) - (dot ? 1 : 0));
      shift[i] = square + shift[i] * (dot ? 1 : 2 * kappa_) + (side == 0 ? constant : 0);
    }
  }
}

template <typename TE, typename T>
const TE* CostSource<TE, T>::Packed(int side) const {
  std::call_once(packed_once_[side], [this, side] {
    const int64_t dim = this->dim(), count = size_[side], panel = kernels_.panel;
    Buffer<TE> packed;
    packed.Allocate(padded(side) * dim);
    std::fill(packed.data() + count / panel * panel * dim, packed.end(), TE(0));
    Pack(cloud_[side]->points.data(), count, dim, panel, packed.data());
    packed_[side] = std::move(packed);
  });
  return packed_[side].data();
}

template <typename TE, typename T>
CostSource<TE, T>::CostSource(const TensorView& cost, int64_t member, int64_t n, int64_t m)
    : dense_(true), size_{n, m}, cost_(cost), cost_offset_(cost.shared ? 0 : member * n * m) {
  for (int side = 0; side < 2; ++side) shift_[side].Resize(padded(side));
}

// The block's points, scaled for products. Returns the kernels' `scale`.
template <typename TE, typename T>
TE CostSource<TE, T>::LoadPoints(int side, const int64_t* rows, double epsilon, TE* out) const {
  const int64_t dim = this->dim();
  const double factor = distance() ? 1 : 2 * kappa_ * kLog2E / epsilon;
  for (int r = 0; r < kRowBlock; ++r) {
    if (rows[r] < 0) {
      std::fill(out + r * dim, out + (r + 1) * dim, TE(0));
    } else {
      ScaleRow(cloud_[side]->points.data() + rows[r] * dim, dim, factor, out + r * dim);
    }
  }
  if (!distance()) return 0;
  return static_cast<TE>((point_cost_ == PointCost::kEuclidean ? 1 : -1) * kappa_ * kLog2E / epsilon);
}

// Costs of rows (side 0) or columns (side 1) of C, one per row of the block: in place, or in `workspace`.
template <typename TE, typename T>
void CostSource<TE, T>::LoadCosts(int side, const int64_t* rows, TE* workspace, const TE** out) const {
  const int64_t n = size_[0], m = size_[1], count = size_[1 - side];
  for (int r = 0; r < kRowBlock; ++r) {
    TE* row = workspace + r * padded(1 - side);
    out[r] = row;
    if (rows[r] < 0) {
      std::fill(row, row + count, TE(0));
    } else if (side == 0) {
      const int64_t offset = cost_offset_ + rows[r] * m;
      if constexpr (sizeof(TE) == sizeof(float)) {
        out[r] = AlignedFloats(cost_, offset);
        if (out[r] != nullptr) continue;
        out[r] = row;
      }
      LoadRow(cost_.dtype, cost_.data, offset, m, row);
    }
  }
  if (side == 0) return;
  for (int64_t i = 0; i < n; ++i) {  // Neighbouring columns share the row's cache line.
    for (int r = 0; r < kRowBlock; ++r) {
      if (rows[r] >= 0) {
        LoadRow(cost_.dtype, cost_.data, cost_offset_ + i * m + rows[r], 1, workspace + r * padded(0) + i);
      }
    }
  }
}

template <typename TE, typename T>
void CostSource<TE, T>::Exponents(int side, const int64_t* rows, double epsilon, const TE* row_term, const TE* col_term,
                                  TE* out, TE* workspace) const {
  const int64_t columns = padded(1 - side);
  if (!dense_) {
    const TE scale = LoadPoints(side, rows, epsilon, workspace);
    kernels_.exponents(workspace, dim(), Packed(1 - side), columns, scale, row_term, col_term, out);
    return;
  }
  const TE* costs[kRowBlock];
  LoadCosts(side, rows, workspace, costs);
  kernels_.cost_exponents(costs, size_[1 - side], columns, static_cast<TE>(-kLog2E / epsilon), row_term, col_term, out);
}

template <typename TE, typename T>
void CostSource<TE, T>::WholeExponents(const int64_t* rows, double epsilon, const TE* zeros, TE* out,
                                       TE* workspace) const {
  if (!whole_distances() || point_cost_ == PointCost::kEuclidean) {
    return Exponents(0, rows, epsilon, zeros, zeros, out, workspace);
  }
  const int64_t dim = this->dim();
  for (int r = 0; r < kRowBlock; ++r) {
    for (int64_t k = 0; k < dim; ++k) {
      const double apart = cloud_[0]->centre[k] - cloud_[1]->centre[k];
      workspace[r * dim + k] = rows[r] < 0 ? TE(0) : static_cast<TE>(cloud_[0]->points[rows[r] * dim + k] + apart);
    }
  }
  kernels_.exponents(workspace, dim, Packed(1), padded(1), static_cast<TE>(-kappa_ * kLog2E / epsilon), zeros, zeros,
                     out);
}

template <typename TE, typename T>
void CostSource<TE, T>::Densities(int side, const int64_t* rows, double epsilon, const TE* row_term, const TE* col_term,
                                  const T* weights, T* out, double* sums, TE* workspace) const {
  const int64_t columns = padded(1 - side);
  if (!dense_) {
    const TE scale = LoadPoints(side, rows, epsilon, workspace);
    kernels_.exp_sums(workspace, dim(), Packed(1 - side), columns, scale, row_term, col_term, weights, out, sums);
    return;
  }
  const TE* costs[kRowBlock];
  LoadCosts(side, rows, workspace, costs);
  kernels_.cost_exp_sums(costs, size_[1 - side], columns, static_cast<TE>(-kLog2E / epsilon), row_term, col_term,
                         weights, out, sums);
}

template class CostSource<float, float>;
template class CostSource<double, float>;
template class CostSource<double, double>;

}  // namespace sinkhorn::cpu
