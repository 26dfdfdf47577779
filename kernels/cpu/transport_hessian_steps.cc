// What Hessian-vector products do between their sweeps: right-hand sides, preconditioned conjugate gradients, and the
// check of what they found.
#include <algorithm>
#include <cmath>

#include "kernels/cpu/transport_hessian.h"

namespace sinkhorn::cpu {
namespace {

double DotProduct(const double* p, const double* q, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += p[i] * q[i];
  return sum;
}

}  // namespace

template <typename TE, typename T>
void TransportHessian<TE, T>::EndPhase() {
  if (++step_ < steps_) return;
  switch (phase_) {
    case Phase::kSetup:
      return EndSetup();
    case Phase::kReduce:
      return EndReduce();
    case Phase::kMultiply:
      return EndMultiply();
    case Phase::kNeumann:
      return EndNeumann();
    case Phase::kCheck:
      return EndCheck();
    case Phase::kRows:
    case Phase::kColumns:
      return Finish(phase_);
    case Phase::kDone:
      return;
  }
}

// A sweep's sum of column j for a direction.
template <typename TE, typename T>
double TransportHessian<TE, T>::Column(int64_t index, int64_t j) const {
  const int64_t columns = cost_.padded(1);
  double sum = 0;
  for (int64_t slot = 0; slot < slots_; ++slot) sum += acc_[(slot * (count_ + 1) + index) * columns + j];
  return sum;
}

template <typename TE, typename T>
void TransportHessian<TE, T>::EndSetup() {
  plan_valid_ = plan_.size() > 0;
  for (int64_t q = 0; q < count_; ++q) {
    Direction& direction = directions_[q];
    for (int64_t i = 0; i < cost_.size(0); ++i) direction.right[0][i] -= extra_[0][i] * direction.shift[0][i];
    for (int64_t j = 0; j < cost_.size(1); ++j) {
      direction.right[1][j] = Column(q, j) - extra_[1][j] * direction.shift[1][j];
    }
  }
  for (int64_t j = 0; j < cost_.size(1); ++j) {
    // A column that shares its rows with nobody has 0 there, up to rounding.
    const double diagonal = diagonal_[1][j];
    jacobi_[j] = std::max(diagonal - Column(count_, j), 1e-6 * diagonal);
  }
  Start(Phase::kReduce);
}

template <typename TE, typename T>
void TransportHessian<TE, T>::EndReduce() {
  for (int64_t q = 0; q < count_; ++q) {
    Direction& direction = directions_[q];
    for (int64_t j = 0; j < cost_.size(1); ++j) {
      direction.right[1][j] = diagonal_[1][j] > 0 ? direction.right[1][j] - Column(q, j) : 0;
    }
    Project(&direction.right[1]);
    std::copy(direction.right[1].begin(), direction.right[1].end(), direction.residual.begin());
    direction.norm = Norm(direction.residual);
    direction.active = direction.norm > 0;
    direction.checked = INFINITY;
  }
  if (!any_active()) return StartSchur(Phase::kCheck, nullptr);
  Condition();
}

template <typename TE, typename T>
void TransportHessian<TE, T>::EndMultiply() {
  const int64_t size = cost_.size(1);
  for (int64_t q = 0; q < count_; ++q) {
    Direction& d = directions_[q];
    if (!d.active) continue;
    Buffer<double> image(size);
    for (int64_t j = 0; j < size; ++j) image[j] = diagonal_[1][j] * d.step[j] - Column(q, j);
    const double curvature = DotProduct(d.step.data(), image.data(), size);
    const double length = curvature > 0 ? d.inner / curvature : 0;
    for (int64_t j = 0; j < size; ++j) {
      d.potential[1][j] += length * d.step[j];
      d.residual[j] -= length * image[j];
    }
    Project(&d.residual);
    ++d.iterations;
    // Rounding may leave no curvature at all.
    d.active = length > 0 && Norm(d.residual) > options_.tolerance * d.norm && d.iterations < options_.max_iterations;
  }
  if (any_active()) return Condition();
  StartSchur(Phase::kCheck, nullptr);
}

// conditioned = M^-1 residual, perhaps after some sweeps.
template <typename TE, typename T>
void TransportHessian<TE, T>::Condition() {
  const bool neumann = options_.preconditioner == Preconditioner::kNeumann;
  for (Direction& d : directions_) {
    for (int64_t j = 0; j < cost_.size(1) && d.active; ++j) {
      const double diagonal = options_.preconditioner == Preconditioner::kNone ? 1
                              : neumann                                        ? diagonal_[1][j]
                                                                               : jacobi_[j];
      d.conditioned[j] = diagonal > 0 ? d.residual[j] / diagonal : 0;
    }
  }
  neumann_left_ = neumann ? options_.neumann_terms : 0;
  if (neumann_left_ > 0) return StartSchur(Phase::kNeumann, &Direction::conditioned);
  TakeSteps();
}

// sum over l of (diag^-1 P^T diag^-1 P)^l diag^-1, by Horner's rule.
template <typename TE, typename T>
void TransportHessian<TE, T>::EndNeumann() {
  for (int64_t q = 0; q < count_; ++q) {
    Direction& d = directions_[q];
    for (int64_t j = 0; j < cost_.size(1) && d.active; ++j) {
      d.conditioned[j] = diagonal_[1][j] > 0 ? (d.residual[j] + Column(q, j)) / diagonal_[1][j] : 0;
    }
  }
  if (--neumann_left_ > 0) return StartSchur(Phase::kNeumann, &Direction::conditioned);
  TakeSteps();
}

template <typename TE, typename T>
void TransportHessian<TE, T>::TakeSteps() {
  const int64_t size = cost_.size(1);
  for (Direction& d : directions_) {
    if (!d.active) continue;
    const double inner = DotProduct(d.residual.data(), d.conditioned.data(), size);
    const double keep = d.inner > 0 ? inner / d.inner : 0;
    for (int64_t j = 0; j < size; ++j) d.step[j] = d.conditioned[j] + keep * d.step[j];
    d.inner = inner;
  }
  StartSchur(Phase::kMultiply, &Direction::step);
}

// The residuals that were updated have drifted from those of the solution: these are told, and gone on with as long as
// that helps.
template <typename TE, typename T>
void TransportHessian<TE, T>::EndCheck() {
  convergence_ = HessianConvergence();
  for (int64_t q = 0; q < count_; ++q) {
    Direction& d = directions_[q];
    for (int64_t j = 0; j < cost_.size(1); ++j) {
      d.residual[j] = diagonal_[1][j] > 0 ? d.right[1][j] - (diagonal_[1][j] * d.potential[1][j] - Column(q, j)) : 0;
    }
    Project(&d.residual);
    const double residual = d.norm > 0 ? Norm(d.residual) / d.norm : 0;
    d.active = residual > options_.tolerance && d.iterations < options_.max_iterations && residual < d.checked / 2;
    d.checked = residual;
    d.inner = 0;
    convergence_.iterations = std::max(convergence_.iterations, d.iterations);
    convergence_.residual = std::max(convergence_.residual, residual);
  }
  convergence_.converged = convergence_.residual <= options_.tolerance;
  if (any_active()) return Condition();
  Finish(Phase::kCheck);
}

template <typename TE, typename T>
void TransportHessian<TE, T>::Finish(Phase after) {
  if (after == Phase::kCheck && problem_.wanted[0]) return StartOutput(Phase::kRows);
  if (after != Phase::kColumns && problem_.wanted[1]) return StartOutput(Phase::kColumns);
  phase_ = Phase::kDone;
  plan_ = Buffer<T>();
  acc_ = Buffer<T>();
}

// Residuals are masses: each column's counts relative to its own.
template <typename TE, typename T>
double TransportHessian<TE, T>::Norm(const Buffer<double>& residual) const {
  double sum = 0;
  for (int64_t j = 0; j < cost_.size(1); ++j) {
    if (diagonal_[1][j] > 0) sum += residual[j] * residual[j] / diagonal_[1][j];
  }
  return std::sqrt(sum);
}

// Balanced: S reaches only what sums to zero.
template <typename TE, typename T>
void TransportHessian<TE, T>::Project(Buffer<double>* residual) const {
  if (!balanced_) return;
  double sum = 0, total = 0;
  for (int64_t j = 0; j < cost_.size(1); ++j) {
    sum += (*residual)[j];
    total += diagonal_[1][j];
  }
  for (int64_t j = 0; j < cost_.size(1); ++j) (*residual)[j] -= sum / total * diagonal_[1][j];
}

template <typename TE, typename T>
bool TransportHessian<TE, T>::any_active() const {
  return std::any_of(directions_.begin(), directions_.end(), [](const Direction& d) { return d.active; });
}

template class TransportHessian<float, float>;
template class TransportHessian<double, float>;
template class TransportHessian<double, double>;

}  // namespace sinkhorn::cpu
