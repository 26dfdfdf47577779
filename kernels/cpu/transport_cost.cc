#include "kernels/cpu/transport_cost.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/half.h"

namespace sinkhorn {
namespace cpu {
namespace {
constexpr double kLog2E = 1.4426950408889634074;
}  // namespace

Cloud MakeCloud(const TensorView& points, int64_t member, int64_t count, int64_t dim) {
  Cloud cloud;
  cloud.count = count;
  cloud.dim = dim;
  cloud.points.Allocate(count * dim);
  cloud.centre.Resize(dim);
  cloud.norm2.Allocate(count);
  LoadAsDouble(points.dtype, points.data, points.shared ? 0 : member * count * dim, count * dim, cloud.points.data());
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t k = 0; k < dim; ++k) cloud.centre[k] += cloud.points[i * dim + k];
  }
  for (double& c : cloud.centre) c /= count;
  double radius2 = 0;
  for (int64_t i = 0; i < count; ++i) {
    double* point = cloud.points.data() + i * dim;
    for (int64_t k = 0; k < dim; ++k) point[k] -= cloud.centre[k];
    cloud.norm2[i] = DotDouble(point, point, dim);
    radius2 = std::max(radius2, cloud.norm2[i]);
  }
  cloud.radius = std::sqrt(radius2);
  return cloud;
}

double BoxCost(const Cloud& x, const Cloud& y, double kappa) {
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
  return kappa * diagonal2;
}

CostRange RangeOf(const TensorView& cost, int64_t member, int64_t n, int64_t m) {
  CostRange range{INFINITY, -INFINITY};
  double row[512];
  const int64_t offset = cost.shared ? 0 : member * n * m;
  for (int64_t i = 0; i < n * m; i += 512) {
    const int64_t count = std::min<int64_t>(512, n * m - i);
    LoadAsDouble(cost.dtype, cost.data, offset + i, count, row);
    for (int64_t k = 0; k < count; ++k) {
      range.min = std::min(range.min, row[k]);
      range.max = std::max(range.max, row[k]);
    }
  }
  return range;
}

template <typename TE, typename T>
CostSource<TE, T>::CostSource(const Cloud* x, const Cloud* y, double kappa)
    : dense_(false), size_{x->count, y->count}, cloud_{x, y}, kappa_(kappa) {
  const int64_t dim = x->dim;
  const int64_t panel = kernels_.panel;
  // C = kappa |x + d - y|^2 with d = centre_x - centre_y: what depends on one side alone goes into its shift.
  Buffer<double> d(dim);
  double d2 = 0;
  for (int64_t k = 0; k < dim; ++k) {
    d[k] = x->centre[k] - y->centre[k];
    d2 += d[k] * d[k];
  }
  for (int side = 0; side < 2; ++side) {
    const Cloud& cloud = *cloud_[side];
    shift_[side].Resize(padded(side));
    packed_[side].Resize(padded(side) * dim);
    for (int64_t first = 0; first < cloud.count; first += panel) {
      TE* packed = packed_[side].data() + first * dim;
      const int64_t count = std::min(panel, cloud.count - first);
      for (int64_t i = 0; i < count; ++i) {
        const double* point = cloud.points.data() + (first + i) * dim;
        for (int64_t k = 0; k < dim; ++k) packed[k * panel + i] = static_cast<TE>(point[k]);
        const double along = DotDouble(point, d.data(), dim);
        shift_[side][first + i] =
            kappa * ((kDistance ? 0 : cloud.norm2[first + i]) + (side == 0 ? 2 * along + d2 : -2 * along));
      }
    }
  }
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
  const double factor = kDistance ? 1 : 2 * kappa_ * kLog2E / epsilon;
  for (int r = 0; r < kRowBlock; ++r) {
    const double* point = rows[r] < 0 ? nullptr : cloud_[side]->points.data() + rows[r] * dim;
    for (int64_t k = 0; k < dim; ++k) out[r * dim + k] = point == nullptr ? 0 : static_cast<TE>(point[k] * factor);
  }
  return static_cast<TE>(kDistance ? -kappa_ * kLog2E / epsilon : 0);
}

// Costs of rows (side 0) or columns (side 1) of C, one per row of `out` [kRowBlock, padded], row-major.
template <typename TE, typename T>
void CostSource<TE, T>::LoadCosts(int side, const int64_t* rows, TE* out) const {
  const int64_t n = size_[0], m = size_[1], columns = padded(1 - side);
  for (int r = 0; r < kRowBlock; ++r) {
    TE* row = out + r * columns;
    std::fill(rows[r] < 0 ? row : row + size_[1 - side], row + columns, TE(0));
    if (side == 0 && rows[r] >= 0) LoadRow(cost_.dtype, cost_.data, cost_offset_ + rows[r] * m, m, row);
  }
  if (side == 0) return;
  for (int64_t i = 0; i < n; ++i) {  // Neighbouring columns share the row's cache line.
    for (int r = 0; r < kRowBlock; ++r) {
      if (rows[r] >= 0) LoadRow(cost_.dtype, cost_.data, cost_offset_ + i * m + rows[r], 1, out + r * columns + i);
    }
  }
}

template <typename TE, typename T>
void CostSource<TE, T>::Exponents(int side, const int64_t* rows, double epsilon, const TE* row_term, const TE* col_term,
                                  TE* out, TE* workspace) const {
  const int64_t columns = padded(1 - side);
  if (!dense_) {
    const TE scale = LoadPoints(side, rows, epsilon, workspace);
    kernels_.exponents(workspace, dim(), packed_[1 - side].data(), columns, scale, row_term, col_term, out);
    return;
  }
  LoadCosts(side, rows, workspace);
  const TE scale = static_cast<TE>(-kLog2E / epsilon);
  for (int64_t tile = 0; tile < columns; tile += kTile) {
    for (int r = 0; r < kRowBlock; ++r) {
      const TE* cost = workspace + r * columns + tile;
      TE* e = out + BlockIndex(r, tile);
      for (int j = 0; j < kTile; ++j) e[j] = cost[j] * scale + (row_term[r] + col_term[tile + j]);
    }
  }
}

template <typename TE, typename T>
void CostSource<TE, T>::Densities(int side, const int64_t* rows, double epsilon, const TE* row_term, const TE* col_term,
                                  const T* weights, T* out, double* sums, TE* workspace) const {
  const int64_t columns = padded(1 - side);
  if (!dense_) {
    const TE scale = LoadPoints(side, rows, epsilon, workspace);
    kernels_.exp_sums(workspace, dim(), packed_[1 - side].data(), columns, scale, row_term, col_term, weights, out,
                      sums);
    return;
  }
  const TE zero[kRowBlock] = {};
  TE* e = workspace + block_size(side);
  Exponents(side, rows, epsilon, row_term, col_term, e, workspace);
  kernels_.exp_rows(e, columns, zero, weights, out, sums);
}

template class CostSource<float, float>;
template class CostSource<double, float>;
template class CostSource<double, double>;

}  // namespace cpu
}  // namespace sinkhorn
