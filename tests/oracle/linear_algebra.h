// The little linear algebra that the oracle needs: dense, float64, plain loops.
#ifndef SINKHORN_TESTS_ORACLE_LINEAR_ALGEBRA_H_
#define SINKHORN_TESTS_ORACLE_LINEAR_ALGEBRA_H_

#include <cstdint>
#include <functional>
#include <vector>

namespace sinkhorn::oracle {

using Vector = std::vector<double>;

double Sum(const Vector& values);
double Dot(const Vector& p, const Vector& q);
double MaxAbs(const Vector& values);
// sum_i |p_i - q_i|
double DistanceL1(const Vector& p, const Vector& q);

// Replaces each value by its exponential, right to 1.02 units in the last place (of subnormal results too): std::exp
// for many at once, in which the oracle would spend most of its time.
void Exponentials(double* values, int64_t count);

// log(sum(exp(values))); -inf for an empty sum.
double LogSumExp(const double* values, int64_t count);

// Solves the n x n system `matrix` (row-major) by Gaussian elimination with partial pivoting. A
// column without a pivot (all below 1e-300) gets a zero unknown.
Vector SolveLinear(Vector matrix, Vector right, int64_t n);

// Least-squares solution, of least norm, of a symmetric system: an eigenvalue decomposition (Jacobi
// rotations) without the eigenvalues below `cutoff` times the largest.
Vector SolvePseudoInverse(Vector matrix, const Vector& right, int64_t n, double cutoff = 1e-12);

// Runs body(begin, end) over [0, count) cut into one range per thread. Small counts stay on this
// thread.
void ParallelFor(int64_t count, int64_t cost_of_one, const std::function<void(int64_t, int64_t)>& body);

}  // namespace sinkhorn::oracle

#endif  // SINKHORN_TESTS_ORACLE_LINEAR_ALGEBRA_H_
