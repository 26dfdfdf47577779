// What the iterations of one transport problem ended with, and what follows from it: the dual objective, in double.
#ifndef SINKHORN_KERNELS_CPU_TRANSPORT_ANSWER_H_
#define SINKHORN_KERNELS_CPU_TRANSPORT_ANSWER_H_

#include <cstdint>

#include "kernels/cpu/buffer.h"
#include "kernels/problem.h"

namespace sinkhorn::cpu {

struct TransportAnswer {
  // One measure's. Arrays are padded with zeros.
  struct Side {
    int64_t size = 0;
    double rho = 0;
    double total_mass = 0;
    Buffer<double> mass;
    Buffer<double> potential;  // in units of the cost
    Buffer<double> marginal;   // sums of P
    Buffer<double> ratio;      // marginal / mass; where there is no mass, what it would be for a little
    Buffer<double> exponent;   // potential in the densities' exponents, base 2
  };

  // False: some of it is no number, or infinite.
  bool finite() const;
  // <a, f> + <b, g> - eps (sum P - mass_a mass_b); unbalanced: rho (1 - exp(-f / rho)) in place of f.
  double DualValue() const;
  // What rounding may have added to it.
  double DualValueRounding() const;

  Side side[2];
  double epsilon = 0;
  Convergence convergence;
  bool cut_short = false;        // Annealing was: perhaps no plan goes with the potentials.
  double exponent_rounding = 0;  // Relative, of the arithmetic that made it: of an exponent,
  double density_rounding = 0;   // and of densities, weights and their sums.
};

}  // namespace sinkhorn::cpu

#endif  // SINKHORN_KERNELS_CPU_TRANSPORT_ANSWER_H_
