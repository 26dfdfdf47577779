// Transport problems whose solution is known, and the solution. Costs are kappa |x - y|^2 with
// kappa = 1 unless said otherwise; masses are uniform where a problem leaves them empty. Epsilon
// and rho are to be set in `solver`.
#ifndef SINKHORN_TESTS_ORACLE_CLOSED_FORMS_H_
#define SINKHORN_TESTS_ORACLE_CLOSED_FORMS_H_

#include <cstdint>

#include "tests/oracle/transport.h"

namespace sinkhorn::oracle {

// 1. One point each, masses a and b, cost c, both sides relaxed: the plan's only entry.
double OnePointMass(double a, double b, double c, double epsilon, double rho_a, double rho_b);
// Its value: e (a b - p) + rho_a (a - p) + rho_b (b - p).
double OnePointValue(double a, double b, double c, double epsilon, double rho_a, double rho_b);

// 2. 2 x 2 with masses (a, 1 - a), (b, 1 - b): P_11.
double TwoByTwoPlan11(double a, double b, const Vector& cost, double epsilon);
// Doubly stochastic 2 x 2 from logits: P_11 and its derivative in the logit 11.
double TwoByTwoDoublyStochastic11(const Vector& logits);
double TwoByTwoDoublyStochasticSlope11(const Vector& logits);

// 3. a = b = (1/2, 1/2), C = [[0, 1], [1, 0]], epsilon = rho = 1, both sides relaxed.
constexpr double kSymmetricUnbalancedP11 = .3220535748;
constexpr double kSymmetricUnbalancedP12 = .1184768891;

// 5. Concentric regular polygons of `count` corners and radii r and R. Value and its derivative in
// r; exact up to terms that fall like I_count(2 r R / epsilon).
Transport Polygons(int64_t count, double r, double R);
double PolygonsValue(double r, double R, double epsilon);
double PolygonsSlope(double r, double R, double epsilon);

// 6. The 2^dim corners of the cubes r {+-1}^dim and R {+-1}^dim. One iteration converges.
Transport Hypercubes(int64_t dim, double r, double R);
double HypercubesValue(int64_t dim, double r, double R, double epsilon);

// 7. Product measures: points (p, q) with mass mass_1(p) mass_2(q). Values and potentials add.
Transport Product(const Transport& first, const Transport& second);

// 9. Two Gaussians N(mean, covariance) in the plane, epsilon = 2 s^2 (Janati, Muzellec, Peyre &
// Cuturi 2020).
struct Gaussian {
  double mean[2];
  double covariance[3];  // xx, xy, yy
};
double GaussiansValue(const Gaussian& first, const Gaussian& second, double epsilon);
// Both as weights on grids of side^2 points out to `extent` standard deviations: for smooth
// integrands exact to rounding.
Transport GaussiansOnGrids(const Gaussian& first, const Gaussian& second, int side, double extent);

// 10. The value of an unbalanced problem with the same rho on both sides, from the mass of its
// optimal plan.
double UnbalancedValueFromMass(double mass_a, double mass_b, double plan_mass, double rho, double epsilon);

// 11. Unregularised transport of uniform masses on the line, n = m: sort both.
double SortedLineValue(Vector x, Vector y);

}  // namespace sinkhorn::oracle

#endif  // SINKHORN_TESTS_ORACLE_CLOSED_FORMS_H_
