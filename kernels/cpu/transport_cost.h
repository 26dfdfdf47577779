// Where exponents come from: a cost matrix or two point clouds, seen from either side.
//
// Both clouds are centred on their own means: a translation of one changes the cost only by a term of the row and a
// term of the column, which the potentials absorb (`shift`). What is left is one product:
//   C_ij = shift_x[i] + shift_y[j] - 2 kappa <x_i, y_j>,   x, y centred.
// DOUBLE keeps kappa |x_i - y_j|^2 whole instead, which costs twice as much and does not cancel for clusters far apart.
// The other costs of points are that one in disguise, with kappa = 1/2:
//   -<x, y>        lacks |x|^2 / 2 and |y|^2 / 2, a term of the row and one of the column: other shifts.
//   1 - cos(x, y)  is |x - y|^2 / 2 of points on the unit sphere: clouds are normalised when they are loaded.
// but for |x - y|, which has no product to it: both clouds are centred on one point, and distances are whole, with a
// root. Dense costs have no shift and z_ij = -C_ij log2(e) / epsilon.
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
  Buffer<double> length;  // [count], of the points before they were normalised; empty: they were not.
};
Cloud MakeCloud(const TensorView& points, int64_t member, int64_t count, int64_t dim, bool normalize = false);
// Centres both on one point between them.
void ShareCentre(Cloud* x, Cloud* y);
// |diagonal of the box around both|^2.
double BoxDiagonal2(const Cloud& x, const Cloud& y);

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
  // A point cloud problem with the cost of `in`. Keeps both clouds, which are as the cost wants them: normalised for
  // kCosine, with one centre for kEuclidean.
  CostSource(const Cloud* x, const Cloud* y, const TransportInputs& in);
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
  // Exponents of rows of side 0 without terms, with all of the cost in them that can be:
  //   -(C_ij - linear_shift(0, i) - linear_shift(1, j)) log2(e) / epsilon
  // A squared distance is whole and does not cancel.
  void WholeExponents(const int64_t* rows, double epsilon, const TE* zeros, TE* out, TE* workspace) const;
  double linear_shift(int side, int64_t i) const { return whole_distances() ? 0 : shift_[side][i]; }
  // The same as Exponents, to densities with their weighted sums.
  void Densities(int side, const int64_t* rows, double epsilon, const TE* row_term, const TE* col_term,
                 const T* weights, T* out, double* sums, TE* workspace) const;
  // Elements of `workspace` that the two need.
  int64_t WorkspaceSize(int side) const { return dense_ ? block_size(side) : RoundUp(kRowBlock * dim(), 16); }

 private:
  // Whole distances, not products.
  bool distance() const { return sizeof(T) == sizeof(double) || point_cost_ == PointCost::kEuclidean; }
  bool whole_distances() const { return !dense_ && point_cost_ != PointCost::kNegativeDot; }
  TE LoadPoints(int side, const int64_t* rows, double epsilon, TE* out) const;
  void LoadCosts(int side, const int64_t* rows, TE* workspace, const TE** out) const;

  const TransportKernels<TE, T>& kernels_ = GetTransportKernels<TE, T>();
  bool dense_;
  int64_t size_[2];
  TensorView cost_;
  int64_t cost_offset_ = 0;
  const Cloud* cloud_[2] = {nullptr, nullptr};
  PointCost point_cost_ = PointCost::kSquaredEuclidean;
  double kappa_ = 0;
  const TE* Packed(int side) const;

  mutable Buffer<TE> packed_[2];  // Made when first used: most problems need one side.
  mutable std::once_flag packed_once_[2];
  Buffer<double> shift_[2];
};

}  // namespace sinkhorn::cpu

#endif  // SINKHORN_KERNELS_CPU_TRANSPORT_COST_H_
