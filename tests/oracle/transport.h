// Entropic transport in float64: the iterations and the fixed point.
//
//   f_i = damping_a * -eps log sum_j b_j exp((g_j - C_ij) / eps),   damping = 1 / (1 + eps / rho)
//   (1: balanced)
//
// and its mirror for g. Everything is evaluated in the log domain with a maximum taken out.
#ifndef SINKHORN_TESTS_ORACLE_TRANSPORT_H_
#define SINKHORN_TESTS_ORACLE_TRANSPORT_H_

#include <cstdint>
#include <limits>

#include "kernels/problem.h"
#include "tests/oracle/linear_algebra.h"

namespace sinkhorn::oracle {

// One problem: `cost` for a dense one, else points x [n, dim], y [m, dim] with the cost `point_cost`: kappa |x - y|^2,
// |x - y|, 1 - cos(x, y) or -<x, y>.
struct Transport {
  int64_t n = 0, m = 0, dim = 0;
  Vector cost;  // [n, m] or empty
  Vector x, y;
  PointCost point_cost = PointCost::kSquaredEuclidean;
  double kappa = 1;
  Vector a, b;                  // Masses; WithUniformMasses fills them in.
  Vector initial_f, initial_g;  // Empty: none.
  // Used: epsilon, epsilon_decay, epsilon_start, update_rule, rho_a, rho_b.
  SolverOptions solver;
  Vector known_cost;  // [n, m]: Cost of points, or empty. WithKnownCost fills it in; changing points makes it wrong.

  double Cost(int64_t i, int64_t j) const;
  // The costs of row i from column `begin` to `end`: where they are kept, else worked out in `room` [end - begin].
  const double* Costs(int64_t i, int64_t begin, int64_t end, double* room) const;
  // The gradient of C_ij in x_i [dim]; of |x - y| where it has none: 0.
  void CostGradient(int64_t i, int64_t j, double* gradient) const;
  // The derivative of that gradient as x_i moves along dx and y_j along dy [dim each]. Not of |x - y|.
  Vector CostCurvature(int64_t i, int64_t j, const double* dx, const double* dy) const;
};

// 1 / n and 1 / m where masses are empty.
Transport WithUniformMasses(Transport problem);
// Points' costs worked out once for all that asks for them; of more than 2^22 pairs not.
Transport WithKnownCost(Transport problem);
// The same problem with the sides exchanged.
Transport Swapped(const Transport& problem);
// The self problems (a, a) and (b, b) of a debiased one.
Transport SelfProblemA(const Transport& problem);
Transport SelfProblemB(const Transport& problem);

struct Potentials {
  Vector f, g;
  // [n, m]: what PlanEntries makes of them, or empty. WithKnownPlan fills it in; changing f or g makes it wrong.
  Vector known_plan = {};
};

// First epsilon of an annealed schedule when `epsilon_start` is 0: the cost's largest value, as max C - min C for a
// cost matrix; for points kappa |D|^2 (negative dots: kappa = 1/2) or |D|, D the diagonal of the box around both
// clouds, and 2 for 1 - cos. Never below epsilon.
double DefaultEpsilonStart(const Transport& problem);
// Epsilon of iteration t = 0, 1, ...
double EpsilonAt(const Transport& problem, int t);

// The half step of all rows at `eps`, damped.
Vector HalfStepRows(const Transport& problem, const Vector& g, double eps);
Vector HalfStepColumns(const Transport& problem, const Vector& f, double eps);

// Exactly `iterations` iterations of the problem's schedule and update rule.
Potentials Iterate(const Transport& problem, int iterations);

// The solution at the final epsilon: annealed sweeps, then Newton steps on the dual, until the
// marginal errors are rounding. `error`, if given, receives the L1 error left. For n + m up to
// about a thousand.
Potentials Converge(const Transport& problem, double* error = nullptr);

// The symmetric potential f_aa = f = g of a self problem, at its solution.
Vector ConvergeSymmetric(const Transport& self_problem);

}  // namespace sinkhorn::oracle

#endif  // SINKHORN_TESTS_ORACLE_TRANSPORT_H_
