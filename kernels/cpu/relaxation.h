// Automatic over-relaxation of alternating Sinkhorn updates.
//
// Near the solution alternating updates are a linear block iteration with rate s^2 (s: second singular value of the
// scaled plan), and over-relaxing both half steps by w is successive over-relaxation: its rate r obeys (r + w - 1)^2 =
// r w^2 s^2, and w = 2 / (1 + sqrt(1 - s^2)) is best (Young 1971; for Sinkhorn: Lehmann, von Renesse, Sambale &
// Uschmajew 2022).
//
// The rate is read off blocks of residuals (their geometric means: above the best w residuals oscillate), s follows
// from it, and w goes towards what s asks for, since slower modes only show when faster ones are gone. Blocks in which
// the residual grows take w back.
//
// A large w keeps fast modes alive, and the rounding of every iteration with them: the residual is then up to
// 1 / (2 - w) times that of the slow modes. One plain iteration between blocks removes them and shows how far the
// solution is.
#ifndef SINKHORN_KERNELS_CPU_RELAXATION_H_
#define SINKHORN_KERNELS_CPU_RELAXATION_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace sinkhorn::cpu {

class Relaxation {
 public:
  explicit Relaxation(bool enabled) : enabled_(enabled) {}

  // Tells the residual before each iteration, in units of the total mass; adapts the factor.
  void Observe(double error) {
    if (!enabled_ || !(error > 0)) return;
    if (skipped_ > 0) {
      --skipped_;
      return;
    }
    log_sum_ += std::log(error);
    if (++count_ < Block()) return;
    const double mean = log_sum_ / count_;
    const double rate = std::exp((mean - previous_mean_) / (count_ + (smooths() ? 1 : 0)));
    const bool comparable = settled_ > 1;  // The first block after a change shows the change.
    previous_mean_ = mean;
    log_sum_ = 0;
    count_ = 0;
    ++settled_;
    if (comparable) Adapt(rate, error);
    if (smooths()) {
      plain_ = 1;
      skipped_ = 2;
    }
  }

  // Asks for one plain iteration: the columns are exact after it.
  void Plain() { plain_ = std::max(plain_, 1); }
  // The factor of the next iteration.
  double TakeWeight() {
    if (plain_ == 0) return weight_;
    --plain_;
    return 1;
  }

 private:
  static constexpr double kLinearError = 0.5;  // Further out the rate says nothing.
  static constexpr double kMargin = 0.1;       // Of 2 - w: rates this close to w - 1 are as good as they get.
  static constexpr double kStep = 0.4;         // 2 - w shrinks by this much at a time.
  static constexpr double kNoisyWeight = 1.85;

  bool smooths() const { return weight_ > kNoisyWeight; }
  // The slower the rate, the longer it takes to see it.
  int Block() const { return 5 + std::min(static_cast<int>(1 / (2 - weight_)), 60); }

  void Adapt(double rate, double error) {
    if (rate >= 1) {
      if (weight_ == 1) return;
      ceiling_ = std::max(1.0, 2 - 2 * (2 - weight_));
      return Change(ceiling_);
    }
    ceiling_ = 2 - 0.8 * (2 - ceiling_);
    if (error > kLinearError || rate < weight_ - 1 + kMargin * (2 - weight_)) return;
    const double sum = rate + weight_ - 1;
    const double s2 = std::min(sum * sum / (rate * weight_ * weight_), 1 - 1e-9);
    const double wanted = std::min({2 / (1 + std::sqrt(1 - s2)), ceiling_, 2 - kStep * (2 - weight_)});
    if (wanted > 2 - (1 - kMargin) * (2 - weight_)) Change(wanted);
  }
  void Change(double weight) {
    weight_ = weight;
    settled_ = 0;
  }

  const bool enabled_;
  int plain_ = 0, skipped_ = 0;
  double weight_ = 1, ceiling_ = 2 - 1e-4;
  double log_sum_ = 0, previous_mean_ = 0;
  int count_ = 0, settled_ = 0;
};

}  // namespace sinkhorn::cpu

#endif  // SINKHORN_KERNELS_CPU_RELAXATION_H_
