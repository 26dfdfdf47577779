// Normalisation in float64: every recipe, the exact solution and every backward mode, one plain
// loop per formula.
//
// All of it works on the logarithm L of the matrix, so nothing overflows for any finite logits: a
// division by a sum s is L -= log s, a guard max(s, e) is max(log s, log e), an added offset is a
// log-sum-exp of two.
#ifndef SINKHORN_TESTS_ORACLE_NORMALIZATION_H_
#define SINKHORN_TESTS_ORACLE_NORMALIZATION_H_

#include <cstdint>
#include <functional>

#include "kernels/problem.h"
#include "tests/oracle/linear_algebra.h"

namespace sinkhorn::oracle {

struct Normalization {
  int64_t n = 0, m = 0;
  Vector logits;  // [n, m]
  Recipe recipe;
  int iterations = 0;
  Vector row_marginals;     // [n]; empty: all 1
  Vector column_marginals;  // [m]; empty: all 1 (exact: sum of row marginals / m)
};

// The (n + 1) x (m + 1) problem with `score` in the added row and column; each added marginal is
// the sum of the other side's.
Normalization WithDustbin(const Normalization& problem, double score);

// Defaults filled in.
Vector RowMarginals(const Normalization& problem);
Vector ColumnMarginals(const Normalization& problem);

// P [n, m] after `iterations` iterations of the recipe; of the exact recipe: the fixed point.
Vector Normalize(const Normalization& problem);

// Vector-Jacobian product of Normalize with the cotangent [n, m]: the reverse of every step done,
// by hand. REQUIRES: not the exact recipe.
Vector UnrolledGradient(const Normalization& problem, const Vector& cotangent);

// From the gradient in the log of the matrix before the first division to that in the logits: through
// offset, softmax and floor.
Vector GradientThroughStart(const Normalization& problem, Vector gradient);

// Implicit derivatives from P alone (n x m). Marginals that P has; all 1; all 1 by the full (n + m)
// system.
Vector ImplicitGradient(const Vector& plan, int64_t n, int64_t m, const Vector& cotangent);
Vector ImplicitUnitGradient(const Vector& plan, int64_t n, int64_t m, const Vector& cotangent);
Vector ImplicitFullGradient(const Vector& plan, int64_t n, int64_t m, const Vector& cotangent);

// Sums of an n x m matrix.
Vector RowSums(const Vector& matrix, int64_t n, int64_t m);
Vector ColumnSums(const Vector& matrix, int64_t n, int64_t m);

// Central finite differences of `function` (a scalar) at `point`.
Vector FiniteDifferences(const std::function<double(const Vector&)>& function, Vector point, double step);

}  // namespace sinkhorn::oracle

#endif  // SINKHORN_TESTS_ORACLE_NORMALIZATION_H_
