// A member's passes over its plan: entries, products, gradients and projections, a block of rows at a time.
#include <algorithm>
#include <vector>

#include "kernels/cpu/half.h"
#include "kernels/cpu/transport_blocks.h"
#include "kernels/cpu/transport_points.h"
#include "kernels/cpu/transport_typed_member.h"

namespace sinkhorn::cpu {
namespace {

constexpr int64_t kPanel = 16;  // Points of a panel of directions.

// Points [count, dim] as right-hand sides [padded, width].
template <typename T>
void LoadPoints(const Cloud& points, int64_t padded, int64_t width, Buffer<T>* out) {
  out->Resize(padded * width);
  for (int64_t j = 0; j < points.count; ++j) {
    for (int64_t k = 0; k < points.dim; ++k) (*out)[j * width + k] = static_cast<T>(points.points[j * points.dim + k]);
  }
}

}  // namespace

template <typename TE, typename T>
void TypedMember<TE, T>::StartPass() {
  if (pass_ == passes_.size()) return StartBound();
  const CostSource<TE, T>& cost = *costs_[pass().engine];
  const int64_t padded = cost.padded(1 - pass().side);
  LoadRightSides();
  if (zeros_.size() < padded) zeros_.Resize(padded);
  const int64_t blocks = RoundUp(cost.size(pass().side), kRowBlock) / kRowBlock;
  const int64_t weight = 4 + (problem_.dim + points_width_ + columns_width_) / 16;
  apply_blocks_ = std::min(blocks, std::max<int64_t>(1, kChunkPairs / weight / (kRowBlock * padded)));
  apply_chunks_ = (blocks + apply_blocks_ - 1) / apply_blocks_;
  linear_.assign(apply_chunks_, 0);
  if (out().sparse_plan.max_entries > 0 && pass_ == 0) {
    sparse_ = std::make_unique<SparseRows<T>>(out().sparse_plan, index_, problem_.n, apply_chunks_);
  }
}

// What the pass's plan is multiplied with.
template <typename TE, typename T>
void TypedMember<TE, T>::LoadRightSides() {
  const int other = 1 - pass().side;
  const int64_t padded = costs_[pass().engine]->padded(other);
  const Cloud& points = cloud(Measure(pass().engine, other));
  points_width_ = columns_width_ = 0;
  const bool products = gradient_wanted() && !euclidean();
  if (products || projection()) {
    points_width_ = RoundUp(points.dim, 16);
    LoadPoints(points, padded, points_width_, &points_);
    if (projection() && &given(other) != &points) LoadPoints(given(other), padded, points_width_, &given_points_);
  }
  if (gradient_wanted() && euclidean()) {
    packed_.Resize(padded * points.dim);
    Pack(points.points.data(), points.count, points.dim, kPanel, packed_.data());
  }
  const TensorView& view = pass().side == 0 ? problem_.transport.v : problem_.transport.u;
  const OutputView& product = pass().side == 0 ? out().plan_v : out().plan_transpose_u;
  if (pass().engine > 0 || !product) return;
  const int64_t width = pass().side == 0 ? problem_.transport.v_columns : problem_.transport.u_columns;
  columns_width_ = RoundUp(width, 16);
  columns_.Resize(padded * columns_width_);
  const int64_t offset = view.shared ? 0 : index_ * size(other) * width;
  for (int64_t j = 0; j < size(other); ++j) {
    LoadRow(view.dtype, view.data, offset + j * width, width, columns_.data() + j * columns_width_);
  }
}

template <typename TE, typename T>
void TypedMember<TE, T>::ApplyBlock(int64_t row, int64_t chunk, Scratch* scratch) {
  const auto& kernels = GetTransportKernels<TE, T>();
  const int side = pass().side, which = pass().engine;
  const CostSource<TE, T>& cost = *costs_[which];
  const int64_t columns = cost.padded(1 - side), count = cost.size(1 - side);
  const int64_t product_width = std::max(points_width_, columns_width_);
  int64_t rows[kRowBlock];
  for (int r = 0; r < kRowBlock; ++r) rows[r] = row + r < cost.size(side) ? row + r : -1;
  double* product = static_cast<double*>(scratch->Get(kRowBlock * product_width * sizeof(double) +
                                                      cost.block_size(side) * (sizeof(T) + sizeof(TE)) +
                                                      cost.WorkspaceSize(side) * sizeof(TE) + columns * sizeof(T)));
  TE* e = reinterpret_cast<TE*>(product + kRowBlock * product_width);
  TE* workspace = e + cost.block_size(side);
  T* plan = reinterpret_cast<T*>(workspace + cost.WorkspaceSize(side));
  T* plan_row = plan + cost.block_size(side);
  double sums[kRowBlock];
  PlanRows(engines_[which]->state(), side, rows, plan, sums, workspace);

  const bool first = which == 0 && side == 0;
  if (first && out().value_linear != nullptr) {
    cost.WholeExponents(rows, problem_.solver.epsilon, zeros_.data(), e, workspace);
    linear_[chunk] += kernels.dot(plan, columns, e);
  }
  const bool entries = first && (out().plan || out().gradient_cost || sparse_ != nullptr);
  for (int r = 0; r < kRowBlock && entries && rows[r] >= 0; ++r) {
    const int64_t offset = (index_ * problem_.n + rows[r]) * problem_.m;
    for (int64_t j = 0; j < count; ++j) plan_row[j] = plan[BlockIndex(r, j)];
    for (const OutputView* view : {&out().plan, &out().gradient_cost}) {
      if (*view) StoreRow(view->dtype, plan_row, count, view->data, offset);
    }
    if (sparse_ != nullptr) sparse_->AddRow(chunk, rows[r], plan_row, count);
  }
  if (columns_width_ > 0) {
    kernels.multiply(plan, columns, columns_.data(), columns_width_, product);
    const OutputView& view = side == 0 ? out().plan_v : out().plan_transpose_u;
    const int64_t width = side == 0 ? problem_.transport.v_columns : problem_.transport.u_columns;
    for (int r = 0; r < kRowBlock && rows[r] >= 0; ++r) {
      StoreFromDouble(view.dtype, product + r * columns_width_, width, view.data,
                      (index_ * size(side) + rows[r]) * width);
    }
  }
  if (gradient_wanted() && euclidean()) {
    for (int r = 0; r < kRowBlock && rows[r] >= 0; ++r) {
      for (int64_t j = 0; j < columns; ++j) plan_row[j] = plan[BlockIndex(r, j)];
      AddDirections(rows[r], plan_row);
    }
  }
  if (gradient_wanted() && !euclidean()) {
    kernels.multiply(plan, columns, points_.data(), points_width_, product);
    for (int r = 0; r < kRowBlock && rows[r] >= 0; ++r) AddGradient(rows[r], sums[r], product + r * points_width_);
  }
  if (projection()) StoreProjections(rows, sums, plan, product, e, workspace);
}

// Last of what a block is for, since it may make the plan anew.
template <typename TE, typename T>
void TypedMember<TE, T>::StoreProjections(const int64_t* rows, double* sums, T* plan, double* product, TE* e,
                                          TE* workspace) const {
  const int side = pass().side;
  if (std::any_of(sums, sums + kRowBlock, [](double sum) { return sum < kLightRow; })) {
    ScaledPlanRows(engines_[0]->state(), side, rows, plan, sums, e, workspace);
  }
  const Buffer<T>& points = &given(1 - side) == &cloud(1 - side) ? points_ : given_points_;
  GetTransportKernels<TE, T>().multiply(plan, costs_[0]->padded(1 - side), points.data(), points_width_, product);
  for (int r = 0; r < kRowBlock && rows[r] >= 0; ++r) Project(rows[r], sums[r], product + r * points_width_);
}

// Barycentric projection sum_j P_ij y_j / r_i of point i from its row's mass, 0 where it has none, and product.
template <typename TE, typename T>
void TypedMember<TE, T>::Project(int64_t i, double mass, const double* product) const {
  const Cloud& theirs = given(1 - pass().side);
  std::vector<double> mean(theirs.dim, 0.0);
  for (int64_t k = 0; k < theirs.dim && mass > 0; ++k) mean[k] = product[k] / mass + theirs.centre[k];
  const OutputView& view = projection();
  StoreFromDouble(view.dtype, mean.data(), theirs.dim, view.data, (index_ * size(pass().side) + i) * theirs.dim);
}

// Gradient of point i: 2 kappa (r_i x_i - sum_j P_ij y_j), of negative dots - sum_j P_ij y_j.
template <typename TE, typename T>
void TypedMember<TE, T>::AddGradient(int64_t i, double mass, const double* product) {
  const int which = pass().engine, own = Measure(which, pass().side), other = Measure(which, 1 - pass().side);
  const Cloud& mine = cloud(own);
  const Cloud& theirs = cloud(other);
  const bool dot = problem_.transport.point_cost == PointCost::kNegativeDot;
  const double scale = (which == 0 ? 2 : -2) * CostFactor(problem_.transport);
  for (int64_t k = 0; k < mine.dim; ++k) {
    const double x = dot ? -theirs.centre[k] : mine.points[i * mine.dim + k] + (mine.centre[k] - theirs.centre[k]);
    gradient_[own][i * mine.dim + k] += scale * (mass * x - product[k]);
  }
}

// Gradient sum_j P_ij (x_i - y_j) / |x_i - y_j| of point i.
template <typename TE, typename T>
void TypedMember<TE, T>::AddDirections(int64_t i, const T* plan_row) {
  const int which = pass().engine, own = Measure(which, pass().side);
  const int64_t dim = problem_.dim, columns = costs_[which]->padded(1 - pass().side);
  std::vector<double> weights(plan_row, plan_row + columns);
  for (double& weight : weights) weight = which == 0 ? weight : -weight;
  sinkhorn::cpu::AddDirections(cloud(own).points.data() + i * dim, dim, packed_.data(), columns, kPanel, weights.data(),
                               gradient_[own].data() + i * dim);
}

// Gradients of normalised points become those of the points themselves: (g - <g, x> x) / |point|, x on the sphere.
template <typename TE, typename T>
void TypedMember<TE, T>::TurnGradients() {
  const int64_t dim = problem_.dim;
  for (int side = 0; side < 2; ++side) {
    const Cloud& points = cloud(side);
    for (int64_t i = 0; i < points.count && gradient_[side].size() > 0; ++i) {
      double* gradient = gradient_[side].data() + i * dim;
      const auto x = [&](int64_t k) { return points.points[i * dim + k] + points.centre[k]; };
      double along = 0;
      for (int64_t k = 0; k < dim; ++k) along += gradient[k] * x(k);
      for (int64_t k = 0; k < dim; ++k) gradient[k] = (gradient[k] - along * x(k)) / points.length[i];
    }
  }
}

template class TypedMember<float, float>;
template class TypedMember<double, float>;
template class TypedMember<double, double>;

}  // namespace sinkhorn::cpu
