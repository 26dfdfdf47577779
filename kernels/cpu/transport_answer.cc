#include "kernels/cpu/transport_answer.h"

#include <algorithm>
#include <cmath>

namespace sinkhorn::cpu {

bool TransportAnswer::finite() const {
  for (const Side& s : side) {
    for (int64_t i = 0; i < s.size; ++i) {
      if (!std::isfinite(s.potential[i]) || std::isnan(s.ratio[i])) return false;
      if (std::isinf(s.ratio[i]) && !cut_short) return false;
      // What it costs to miss the mass: costs below zero by hundreds of rho.
      if (std::isfinite(s.rho) && s.mass[i] > 0 && !std::isfinite(std::exp(-s.potential[i] / s.rho))) return false;
    }
  }
  return true;
}

double TransportAnswer::DualValue() const {
  double value = epsilon * side[0].total_mass * side[1].total_mass, plan_mass = 0;
  for (const Side& s : side) {
    for (int64_t i = 0; i < s.size; ++i) {
      const double f = s.potential[i];
      if (s.mass[i] > 0) value += s.mass[i] * (std::isinf(s.rho) ? f : -s.rho * std::expm1(-f / s.rho));
    }
  }
  for (int64_t i = 0; i < side[0].size; ++i) plan_mass += side[0].marginal[i];
  return value - epsilon * plan_mass;
}

// The objective is exact for the potentials but for the mass of P: an exponent is a sum of rounded terms, and
// densities, weights and sums are rounded too.
double TransportAnswer::DualValueRounding() const {
  double plan_mass = 0, terms = epsilon * side[0].total_mass * side[1].total_mass;
  double exponents = 0;  // The largest of each side.
  for (const Side& s : side) {
    double largest = 0;
    for (int64_t i = 0; i < s.size; ++i) {
      largest = std::max(largest, std::abs(s.exponent[i]));
      terms += std::abs(s.mass[i] * s.potential[i]);
    }
    exponents += largest;
  }
  for (int64_t i = 0; i < side[0].size; ++i) plan_mass += side[0].marginal[i];
  const double sums = std::max(1e-13, 0x1p-53 * static_cast<double>(side[0].size + side[1].size));
  return epsilon * plan_mass * (exponent_rounding * exponents + density_rounding) + sums * terms;
}

}  // namespace sinkhorn::cpu
