// Automatic over-relaxation of alternating Sinkhorn updates.
//
// Near the solution alternating updates are a linear block iteration with rate s^2 (s: second singular value of the scaled plan),
// and over-relaxing both half steps by w is successive over-relaxation: its rate r obeys (r + w - 1)^2 = r w^2 s^2, and
// w = 2 / (1 + sqrt(1 - s^2)) is best (Young 1971; for Sinkhorn: Lehmann, von Renesse, Sambale & Uschmajew 2022).
// s^2 is read off the residuals of past iterations and improved as slower modes show.
#ifndef SINKHORN_KERNELS_CPU_RELAXATION_H_
#define SINKHORN_KERNELS_CPU_RELAXATION_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace sinkhorn {
namespace cpu {

class Relaxation {
 public:
  explicit Relaxation(bool enabled) : enabled_(enabled) {}

  // The factor of the next iteration.
  double weight() const { return weight_; }

  // Tells the residual before each iteration; adapts the weight.
  void Observe(double error) {
    if (!enabled_) return;
    ++since_change_;
    if (!(error < kGrowth * best_since_change_)) return Retreat(error);
    best_since_change_ = std::min(best_since_change_, error);
    if (since_change_ == kSettle) reference_ = error;
    if (since_change_ < kSettle + window_) return;
    const double rate = std::pow(error / reference_, 1.0 / window_);
    if (error < kLinearError && rate < 1 && rate > weight_ - 1 + kMargin) {
      const double s2 = std::min((rate + weight_ - 1) * (rate + weight_ - 1) / (rate * weight_ * weight_), s2_max_);
      const double wanted = 2 / (1 + std::sqrt(1 - s2));
      if (wanted > weight_ + kMargin * (2 - weight_)) return Change(wanted, error);
    }
    // Measure again from here.
    reference_ = error;
    since_change_ = kSettle;
  }

  // One plain iteration: the columns are exact after it.
  void Plain() { plain_ = true; }
  double TakeWeight() {
    const double weight = plain_ ? 1 : weight_;
    plain_ = false;
    return weight;
  }

 private:
  static constexpr int kSettle = 6;            // Iterations until a new weight shows its rate.
  static constexpr double kGrowth = 4;         // A residual grown by this much: step back.
  static constexpr double kLinearError = 0.2;  // Units of mass: further out the rate says nothing.
  static constexpr double kMargin = 0.02;

  void Change(double weight, double error) {
    weight_ = weight;
    // The slower the rate, the longer it takes to see it.
    window_ = std::min(8 + static_cast<int>(2 / (2 - weight)), 100);
    since_change_ = 0;
    best_since_change_ = error;
    reference_ = error;
  }
  void Retreat(double error) {
    s2_max_ = std::max(0.25, 1 - 4 * (1 - std::min(s2_max_, S2Of(weight_))));
    Change(1, error);
  }
  static double S2Of(double weight) {
    const double root = 2 / weight - 1;
    return 1 - root * root;
  }

  bool enabled_;
  bool plain_ = false;
  double weight_ = 1;
  double s2_max_ = 1 - 1e-9;
  int window_ = 6;
  int64_t since_change_ = 0;
  double best_since_change_ = INFINITY, reference_ = INFINITY;
};

}  // namespace cpu
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CPU_RELAXATION_H_
