// Anderson acceleration of alternating Sinkhorn updates (Anderson 1965, type II; for Sinkhorn: OTT).
//
// One iteration is a map g -> G(g) of the columns' potentials; near the solution it is linear and its residual
// r = G - g falls by the slowest mode's rate. The next g is G less the combination of the last differences of G whose
// differences of r fit r best, in the norm of the masses: like a Krylov method it removes the few slow modes that a
// well-conditioned problem has within as many iterations, and there is no factor to find out.
//
// It gives up for good where it does not pay: far from linear, or with more slow modes than differences.
#ifndef SINKHORN_KERNELS_CPU_ANDERSON_H_
#define SINKHORN_KERNELS_CPU_ANDERSON_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/cpu/buffer.h"
#include "kernels/cpu/transport_points.h"

namespace sinkhorn::cpu {

class Anderson {
 public:
  static constexpr int kWindow = 8;

  explicit Anderson(bool enabled) : active_(enabled) {}
  // False: the plain updates are all there is.
  bool active() const { return active_; }

  // Plain updates go on; what came before says nothing about what comes after.
  void Restart() {
    count_ = 0;
    fresh_ = true;
    least_ = INFINITY;
  }
  // An iteration that could not be extrapolated.
  void Skip() {
    Restart();
    if (++skipped_ > kTrial) active_ = false;
  }

  // `to` = G(from), with that step's residual error; makes `to` the potentials to go on from.
  // `mass`: [from.size()], 0 where padded.
  void Extrapolate(double error, const Buffer<double>& mass, const Buffer<double>& from, Buffer<double>* to) {
    if (!Judge(error)) return;
    const int64_t size = from.size();
    if (last_.size() != size) Allocate(mass);
    Residual(mass, from, *to);
    if (!fresh_) AddDifference(*to);
    fresh_ = false;
    std::copy(to->begin(), to->end(), last_.begin());
    std::swap(residual_, last_residual_);
    if (count_ == 0) return;
    double weight[kWindow] = {};
    Fit(std::min(count_, kWindow), weight);
    for (int64_t j = 0; j < size; ++j) {
      double sum = 0;
      for (int k = 0; k < kWindow; ++k) sum += weight[k] * steps_[k][j];
      (*to)[j] -= sum;
    }
  }

 private:
  static constexpr int kTrial = 16;       // In so many iterations
  static constexpr double kGain = 1.2;    // the error falls by this factor,
  static constexpr double kGrowth = 4;    // and it grows by this one
  static constexpr int kRestartsMax = 3;  // no more often than that.
  static constexpr double kRidge = 1e-10;

  bool Judge(double error) {
    if (iterations_++ % kTrial == 0) {
      if (error * kGain > trial_) active_ = false;
      trial_ = error;
    }
    if (error > kGrowth * least_) {
      if (++restarts_ > kRestartsMax) active_ = false;
      Restart();
    }
    least_ = std::min(least_, error);
    return active_;
  }

  void Allocate(const Buffer<double>& mass) {
    const int64_t size = mass.size();
    root_mass_.Resize(size);
    for (int64_t j = 0; j < size; ++j) root_mass_[j] = std::sqrt(mass[j]);
    for (auto* buffer : {&last_, &residual_, &last_residual_}) buffer->Resize(size);
    for (Buffer<double>& step : steps_) step.Resize(size);
    differences_.Resize(kWindow * size);
  }

  // sqrt(mass) (to - from), less the constant that potentials are free to take.
  void Residual(const Buffer<double>& mass, const Buffer<double>& from, const Buffer<double>& to) {
    double sum = 0, total = 0;
    for (int64_t j = 0; j < from.size(); ++j) {
      sum += mass[j] * (to[j] - from[j]);
      total += mass[j];
    }
    for (int64_t j = 0; j < from.size(); ++j) residual_[j] = root_mass_[j] * (to[j] - from[j] - sum / total);
  }

  void AddDifference(const Buffer<double>& to) {
    const int at = count_++ % kWindow;
    double* difference = differences_.data() + at * to.size();
    for (int64_t j = 0; j < to.size(); ++j) {
      steps_[at][j] = to[j] - last_[j];
      difference[j] = residual_[j] - last_residual_[j];
    }
    double dots[kWindow];
    const int known = std::min(count_, kWindow);
    RowDots(differences_.data(), known, to.size(), difference, dots);
    for (int k = 0; k < known; ++k) gram_[at][k] = gram_[k][at] = dots[k];
  }

  // Least squares by Cholesky's factorisation of the normal equations, slightly damped.
  void Fit(int count, double* weight) const {
    double factor[kWindow][kWindow] = {}, ridge = 0;
    for (int k = 0; k < count; ++k) ridge += kRidge * gram_[k][k];
    RowDots(differences_.data(), count, last_residual_.size(), last_residual_.data(), weight);
    for (int i = 0; i < count; ++i) {
      for (int j = 0; j <= i; ++j) {
        double sum = gram_[i][j] + (i == j ? ridge : 0);
        for (int k = 0; k < j; ++k) sum -= factor[i][k] * factor[j][k];
        if (i == j && !(sum > 0)) sum = INFINITY;  // Nothing new in this one: its weight becomes 0.
        factor[i][j] = i == j ? std::sqrt(sum) : sum / factor[j][j];
      }
      for (int k = 0; k < i; ++k) weight[i] -= factor[i][k] * weight[k];
      weight[i] /= factor[i][i];
    }
    for (int i = count - 1; i >= 0; --i) {
      for (int k = i + 1; k < count; ++k) weight[i] -= factor[k][i] * weight[k];
      weight[i] /= factor[i][i];
    }
  }

  bool active_, fresh_ = true;
  int count_ = 0, iterations_ = 0, restarts_ = 0, skipped_ = 0;
  double trial_ = INFINITY, least_ = INFINITY;
  double gram_[kWindow][kWindow] = {};
  Buffer<double> root_mass_;
  Buffer<double> last_, residual_, last_residual_;  // Of the iteration before.
  Buffer<double> steps_[kWindow];                   // Differences of G,
  Buffer<double> differences_;                      // [kWindow, size]: and of r.
};

}  // namespace sinkhorn::cpu

#endif  // SINKHORN_KERNELS_CPU_ANDERSON_H_
