// Where exponents come from: a cost matrix or two point clouds, seen from either side.
//
// Both clouds are centred on their own means: a translation of one changes the cost only by a term of the row and a
// term of the column, which the potentials absorb (`shift`). What is left is one product:
//   C_ij = shift_x[i] + shift_y[j] - 2 kappa <x_i, y_j>,   x, y centred.
// DOUBLE keeps kappa |x_i - y_j|^2 whole instead, which costs twice as much and does not cancel for clusters far apart.
// Dense costs have no shift and z_ij = -C_ij log2(e) / epsilon.
#ifndef SINKHORN_KERNELS_CPU_TRANSPORT_COST_H_
#define SINKHORN_KERNELS_CPU_TRANSPORT_COST_H_

#include <cstdint>
#include <mutex>

#include "kernels/cpu/buffer.h"
#include "kernels/cpu/transport_kernels.h"
#include "kernels/problem.h"

namespace sinkhorn::cpu {

constexpr double kLog2E = 1.4426950408889634074;

// One measure's support, as double: coordinates centred, with what was subtracted. Empty for dense problems.
struct Cloud {
  int64_t count = 0, dim = 0;
  Buffer<double> points;  // [count, dim], centred
  Buffer<double> centre;  // [dim]
  Buffer<double> norm2;   // [count], of centred points
  double radius = 0;      // Largest norm of a centred point.
};
Cloud MakeCloud(const TensorView& points, int64_t member, int64_t count, int64_t dim);
// kappa |diagonal of the box around both|^2.
double BoxCost(const Cloud& x, const Cloud& y, double kappa);

// Range of rows [begin, end) of a cost matrix.
struct CostRange {
  double min = 0, max = 0;
};
CostRange RangeOf(const TensorView& cost, int64_t member, int64_t n, int64_t m, int64_t begin, int64_t end);

constexpr int64_t RoundUp(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Rows of side 0 are x, of side 1 y; the columns are the other side's points.
template <typename TE, typename T>
class CostSource {
 public:
  // A point cloud problem. Keeps both clouds.
  CostSource(const Cloud* x, const Cloud* y, double kappa);
  // A dense one. `cost` stays valid.
  CostSource(const TensorView& cost, int64_t member, int64_t n, int64_t m);

  bool dense() const { return dense_; }
  int64_t size(int side) const { return size_[side]; }
  int64_t padded(int side) const { return RoundUp(size_[side], kColumnPad); }
  // Elements of a block of exponents or densities of `side`.
  int64_t block_size(int side) const { return kRowBlock * padded(1 - side); }
  int64_t dim() const { return dense_ ? 0 : cloud_[0]->dim; }
  // In units of the cost [padded], zero where padded.
  const Buffer<double>& shift(int side) const { return shift_[side]; }

  // Exponents of a block: kRowBlock rows of `side` (rows[r] < 0: none) against all columns, see transport_kernels.h.
  // `epsilon` > 0.
  void Exponents(int side, const int64_t* rows, double epsilon, const TE* row_term, const TE* col_term, TE* out,
                 TE* workspace) const;
  // The same to densities with their weighted sums.
  void Densities(int side, const int64_t* rows, double epsilon, const TE* row_term, const TE* col_term,
                 const T* weights, T* out, double* sums, TE* workspace) const;
  // Elements of `workspace` that the two need.
  int64_t WorkspaceSize(int side) const { return dense_ ? block_size(side) : RoundUp(kRowBlock * dim(), 16); }

 private:
  static constexpr bool kDistance = sizeof(T) == sizeof(double);

  TE LoadPoints(int side, const int64_t* rows, double epsilon, TE* out) const;
  void LoadCosts(int side, const int64_t* rows, TE* workspace, const TE** out) const;

  const TransportKernels<TE, T>& kernels_ = GetTransportKernels<TE, T>();
  bool dense_;
  int64_t size_[2];
  TensorView cost_;
  int64_t cost_offset_ = 0;
  const Cloud* cloud_[2] = {nullptr, nullptr};
  double kappa_ = 0;
  const TE* Packed(int side) const;

  mutable Buffer<TE> packed_[2];  // Made when first used: most problems need one side.
  mutable std::once_flag packed_once_[2];
  Buffer<double> shift_[2];
};

}  // namespace sinkhorn::cpu

#endif  // SINKHORN_KERNELS_CPU_TRANSPORT_COST_H_
