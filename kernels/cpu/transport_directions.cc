#include "kernels/cpu/transport_directions.h"

#include <algorithm>

#include "kernels/cpu/half.h"

namespace sinkhorn::cpu {

template <typename TE, typename T>
HessianStage<TE, T>::HessianStage(const MemberInputs* inputs, const std::vector<SolvedProblem<TE, T>>& problems,
                                  const Buffer<double>* gradient, int64_t cache_bytes)
    : inputs_(*inputs),
      in_(inputs_.problem.transport),
      problems_(problems),
      gradient_(gradient),
      cache_bytes_(cache_bytes),
      dim_(inputs_.problem.dim) {
  const Outputs& out = inputs_.problem.outputs;
  convergence_.converged = true;
  for (int side = 0; side < 2; ++side) {
    LoadDirections(side);
    if (side == 0 ? out.hessian_x : out.hessian_y) product_[side].Resize(in_.hessian.count * cloud(side).count * dim_);
  }
  Start();
}

template <typename TE, typename T>
void HessianStage<TE, T>::LoadDirections(int side) {
  const TensorView& view = side == 0 ? in_.hessian.x : in_.hessian.y;
  const Cloud& points = cloud(side);
  const int64_t size = in_.hessian.count * points.count * dim_;
  if (!view) return;
  direction_[side].Resize(size);
  LoadAsDouble(view.dtype, view.data, view.shared ? 0 : inputs_.index * size, size, direction_[side].data());
  if (in_.point_cost != PointCost::kCosine) return;
  given_[side].Resize(size);
  std::copy(direction_[side].begin(), direction_[side].end(), given_[side].begin());
  for (int64_t at = 0; at < size; at += dim_) {  // Onto the sphere.
    const int64_t i = at / dim_ % points.count;
    double* step = direction_[side].data() + at;
    double along = 0;
    for (int64_t k = 0; k < dim_; ++k) along += step[k] * (points.points[i * dim_ + k] + points.centre[k]);
    for (int64_t k = 0; k < dim_; ++k) {
      step[k] = (step[k] - along * (points.points[i * dim_ + k] + points.centre[k])) / points.length[i];
    }
  }
}

// The next problem with products that are wanted: OT(a, a) is moved on both sides by the steps of x.
template <typename TE, typename T>
void HessianStage<TE, T>::Start() {
  current_ = nullptr;
  const auto skipped = [&] {
    return which_ > 0 && (product_[which_ - 1].size() == 0 || direction_[which_ - 1].size() == 0);
  };
  while (which_ < problems_.size() && skipped()) ++which_;
  if (which_ == problems_.size()) {
    for (int side = 0; side < 2 && in_.point_cost == PointCost::kCosine; ++side) LeaveSphere(side);
    return;
  }
  const SolvedProblem<TE, T>& solved = problems_[which_];
  HessianProblem<TE, T> problem{solved.cost, solved.state, solved.answer, {}, &in_, {}, {}, cache_bytes_};
  for (int side = 0; side < 2; ++side) {
    const int measure = which_ == 0 ? side : static_cast<int>(which_) - 1;
    problem.cloud[side] = &cloud(measure);
    problem.direction[side] = direction_[measure].size() > 0 ? direction_[measure].data() : nullptr;
    problem.wanted[side] = which_ == 0 ? product_[side].size() > 0 : side == 0;
  }
  current_ = std::make_unique<TransportHessian<TE, T>>(problem);
}

template <typename TE, typename T>
void HessianStage<TE, T>::EndPhase() {
  current_->EndPhase();
  if (current_->chunk_count() > 0) return;
  Absorb();
  ++which_;
  Start();
}

template <typename TE, typename T>
void HessianStage<TE, T>::Absorb() {
  const HessianConvergence& c = current_->convergence();
  convergence_.iterations = std::max(convergence_.iterations, c.iterations);
  convergence_.residual = std::max(convergence_.residual, c.residual);
  convergence_.converged = convergence_.converged && c.converged;
  for (int side = 0; side < 2; ++side) {
    if (which_ > 0 && side != static_cast<int>(which_) - 1) continue;
    const Buffer<double>& part = current_->product(which_ == 0 ? side : 0);
    for (int64_t k = 0; k < product_[side].size(); ++k) product_[side][k] += which_ == 0 ? part[k] : -part[k];
  }
}

template <typename TE, typename T>
void HessianStage<TE, T>::LeaveSphere(int side) {
  const Cloud& points = cloud(side);
  for (int64_t at = 0; at < product_[side].size(); at += dim_) {
    const int64_t i = at / dim_ % points.count;
    const auto x = [&](int64_t k) { return points.points[i * dim_ + k] + points.centre[k]; };
    const double* g = gradient_[side].data() + i * dim_;
    const bool moves = direction_[side].size() > 0;
    double* out = product_[side].data() + at;
    double out_along = 0, g_along = 0, step_g = 0, given_along = 0;
    for (int64_t k = 0; k < dim_; ++k) {
      out_along += x(k) * out[k];
      g_along += x(k) * g[k];
      step_g += moves ? direction_[side][at + k] * g[k] : 0;
      given_along += moves ? x(k) * given_[side][at + k] : 0;
    }
    const double length = points.length[i];
    for (int64_t k = 0; k < dim_; ++k) {
      const double turned = (g[k] - x(k) * g_along) / length, step = moves ? direction_[side][at + k] : 0;
      out[k] = (out[k] - x(k) * out_along - step * g_along - x(k) * step_g - given_along * turned) / length;
    }
  }
}

template class HessianStage<float, float>;
template class HessianStage<double, float>;
template class HessianStage<double, double>;

}  // namespace sinkhorn::cpu
