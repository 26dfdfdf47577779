// What can be asked of a transport problem at given potentials, in float64: one plain loop per
// formula.
//
//   P_ij = a_i b_j exp((f_i + g_j - C_ij) / eps)
//
// Values are those of OT = min <C, P> + eps KL(P | a b^T) [+ rho_a KL(P 1 | a) + rho_b KL(P^T 1 |
// b)].
#ifndef SINKHORN_TESTS_ORACLE_TRANSPORT_OUTPUTS_H_
#define SINKHORN_TESTS_ORACLE_TRANSPORT_OUTPUTS_H_

#include "tests/oracle/transport.h"

namespace sinkhorn::oracle {

// P_ij of row i, j from `begin` to `end`.
void PlanEntries(const Transport& problem, const Potentials& at, int64_t i, int64_t begin, int64_t end,
                 double* entries);
// The plan worked out once for all that asks for its entries; one of more than 2^22 not.
Potentials WithKnownPlan(const Transport& problem, Potentials at);
Vector Plan(const Transport& problem, const Potentials& at);         // [n, m]
Vector PlanRowSums(const Transport& problem, const Potentials& at);  // P 1
Vector PlanColumnSums(const Transport& problem, const Potentials& at);

// |P 1 - a|_1; unbalanced: |P 1 - a exp(-f / rho_a)|_1.
double MarginalErrorA(const Transport& problem, const Potentials& at);
double MarginalErrorB(const Transport& problem, const Potentials& at);

// The dual objective: <a, f> (unbalanced: <a, rho_a (1 - exp(-f / rho_a))>) + its mirror - eps (sum
// P - mass a mass b). At any potentials a lower bound of the optimal value.
double Value(const Transport& problem, const Potentials& at);
// <C, P>
double ValueLinear(const Transport& problem, const Potentials& at);
// Balanced: value of P rounded to the marginals (Altschuler, Weed & Rigollet 2017): an upper bound.
double PrimalBound(const Transport& problem, const Potentials& at);
// <C, P> + eps KL(P | a b^T) [+ rho KL of the marginals] of any plan [n, m].
double PrimalValue(const Transport& problem, const Vector& plan);
// OT(a,b) - OT(a,a)/2 - OT(b,b)/2 + eps/2 (mass a - mass b)^2 at given potentials of all three
// problems.
double Divergence(const Transport& problem, const Potentials& at, const Vector& f_aa, const Vector& g_bb);

// Derivatives of Value in its inputs at fixed potentials. [n, dim], [m, dim], [n], [m]. That in C
// is the plan.
Vector GradientX(const Transport& problem, const Potentials& at);
Vector GradientY(const Transport& problem, const Potentials& at);
Vector GradientA(const Transport& problem, const Potentials& at);
Vector GradientB(const Transport& problem, const Potentials& at);

// Derivatives of the divergence at its solution: of the cross term less one side of the self term,
// and of the mass term.
Vector DivergenceGradientX(const Transport& problem, const Potentials& at, const Vector& f_aa);
Vector DivergenceGradientY(const Transport& problem, const Potentials& at, const Vector& g_bb);
Vector DivergenceGradientA(const Transport& problem, const Potentials& at, const Vector& f_aa);
Vector DivergenceGradientB(const Transport& problem, const Potentials& at, const Vector& g_bb);

// The product of Value's Hessian in (x, y) with a direction (dx [n, dim], dy [m, dim]) at a solution: the rows of x,
// then those of y. The potentials' derivatives are the least-squares solution of the whole linear system.
Vector HessianTimes(const Transport& problem, const Potentials& at, const Vector& dx, const Vector& dy);
Vector DivergenceHessianTimes(const Transport& problem, const Potentials& at, const Vector& f_aa, const Vector& g_bb,
                              const Vector& dx, const Vector& dy);

// P V [n, columns] for V [m, columns]; P^T U [m, columns] for U [n, columns].
Vector PlanTimes(const Transport& problem, const Potentials& at, const Vector& v, int64_t columns);
Vector PlanTransposeTimes(const Transport& problem, const Potentials& at, const Vector& u, int64_t columns);
// Barycentric projections sum_j P_ij y_j / sum_j P_ij; rows of no mass get 0.
Vector ProjectionX(const Transport& problem, const Potentials& at);
Vector ProjectionY(const Transport& problem, const Potentials& at);

}  // namespace sinkhorn::oracle

#endif  // SINKHORN_TESTS_ORACLE_TRANSPORT_OUTPUTS_H_
