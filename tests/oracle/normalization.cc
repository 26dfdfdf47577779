#include "tests/oracle/normalization.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "tests/oracle/transport.h"
#include "tests/oracle/transport_outputs.h"

namespace sinkhorn::oracle {
namespace {

// One row (or column) of a matrix: `count` elements `stride` apart.
struct Line {
  int64_t begin, stride, count;
};

Line LineOf(const Normalization& problem, bool rows, int64_t index) {
  if (rows) return {index * problem.m, 1, problem.m};
  return {index, problem.m, problem.n};
}

// exp of each entry.
Vector ExpOfAll(Vector matrix) {
  Exponentials(matrix.data(), matrix.size());
  return matrix;
}

// log(sum(exp(line))) of all rows (or columns).
Vector LogSums(const Normalization& problem, bool rows, const Vector& matrix) {
  const int64_t n = problem.n, m = problem.m, count = rows ? n : m;
  Vector largest(count, -std::numeric_limits<double>::infinity()), sums(count, 0.0), terms(matrix.size());
  const auto for_all = [&](auto f) {  // f(entry, its line)
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < m; ++j) f(i * m + j, rows ? i : j);
    }
  };
  for_all([&](int64_t at, int64_t line) { largest[line] = std::max(largest[line], matrix[at]); });
  for (double& value : largest) value = std::isinf(value) ? 0 : value;  // All -inf: -inf - -inf would be NaN.
  for_all([&](int64_t at, int64_t line) { terms[at] = matrix[at] - largest[line]; });
  terms = ExpOfAll(std::move(terms));
  for_all([&](int64_t at, int64_t line) { sums[line] += terms[at]; });
  for (int64_t line = 0; line < count; ++line) sums[line] = largest[line] + std::log(sums[line]);
  return sums;
}

double LogAddExp(double p, double q) {
  const double both[] = {p, q};
  return LogSumExp(both, 2);
}

// log of what a line of log-sum `log_sum` is divided by, before its marginal.
double LogDivisor(const Recipe& recipe, double log_sum) {
  switch (recipe.guard) {
    case Guard::kNone:
      return log_sum;
    case Guard::kMax:
      return std::max(log_sum, std::log(recipe.guard_value));
    case Guard::kAdd:
      return LogAddExp(log_sum, std::log(recipe.guard_value));
  }
  return log_sum;
}

// d LogDivisor / d log_sum
double LogDivisorSlope(const Recipe& recipe, double log_sum) {
  switch (recipe.guard) {
    case Guard::kNone:
      return 1;
    case Guard::kMax:
      return log_sum > std::log(recipe.guard_value) ? 1 : 0;
    case Guard::kAdd:
      return std::exp(log_sum - LogDivisor(recipe, log_sum));
  }
  return 1;
}

Vector FlooredLogits(const Normalization& problem) {
  Vector logits = problem.logits;
  for (double& value : logits) value = std::max(value, problem.recipe.logit_floor);
  return logits;
}

// Row softmax in the log domain, scaled to the row marginals: it stands for the first row step.
Vector LogSoftmaxRows(const Normalization& problem, Vector logits) {
  const Vector marginals = RowMarginals(problem), log_sums = LogSums(problem, true, logits);
  for (int64_t i = 0; i < problem.n; ++i) {
    const double shift = std::log(marginals[i]) - log_sums[i];
    for (int64_t j = 0; j < problem.m; ++j) logits[i * problem.m + j] += shift;
  }
  return logits;
}

// log of the matrix before the first division.
Vector StartMatrix(const Normalization& problem) {
  Vector matrix = FlooredLogits(problem);
  if (problem.recipe.start == Start::kRowSoftmax) {
    matrix = LogSoftmaxRows(problem, std::move(matrix));
  }
  if (problem.recipe.offset > 0) {
    for (double& value : matrix) value = LogAddExp(value, std::log(problem.recipe.offset));
  }
  return matrix;
}

// The divisions in order: true stands for rows, false for columns.
std::vector<bool> Steps(const Normalization& problem) {
  const bool rows_first = problem.recipe.order == Order::kRowColumn;
  std::vector<bool> steps;
  for (int t = 0; t < problem.iterations; ++t) {
    steps.push_back(rows_first);
    steps.push_back(!rows_first);
  }
  // A row softmax has been the first one.
  if (problem.recipe.start == Start::kRowSoftmax && !steps.empty()) steps.erase(steps.begin());
  return steps;
}

// Divides all rows (or columns) of exp(matrix).
Vector Divide(const Normalization& problem, bool rows, Vector matrix) {
  const Vector marginals = rows ? RowMarginals(problem) : ColumnMarginals(problem);
  const Vector log_sums = LogSums(problem, rows, matrix);
  for (int64_t index = 0; index < (rows ? problem.n : problem.m); ++index) {
    const Line line = LineOf(problem, rows, index);
    const double divisor = LogDivisor(problem.recipe, log_sums[index]);
    const double shift = std::log(marginals[index]) - divisor;
    for (int64_t k = 0; k < line.count; ++k) matrix[line.begin + k * line.stride] += shift;
  }
  return matrix;
}

// Reverse of Divide: turns the gradient in its result into the gradient in its argument `matrix`.
void DivideBackward(const Normalization& problem, bool rows, const Vector& matrix, Vector* gradient) {
  const Vector log_sums = LogSums(problem, rows, matrix);
  Vector totals(log_sums.size(), 0.0), shares = matrix;
  for (size_t index = 0; index < log_sums.size(); ++index) {
    const Line line = LineOf(problem, rows, index);
    for (int64_t k = 0; k < line.count; ++k) {
      totals[index] += (*gradient)[line.begin + k * line.stride];
      shares[line.begin + k * line.stride] -= log_sums[index];
    }
    totals[index] *= LogDivisorSlope(problem.recipe, log_sums[index]);
  }
  shares = ExpOfAll(std::move(shares));
  for (size_t index = 0; index < log_sums.size(); ++index) {
    const Line line = LineOf(problem, rows, index);
    for (int64_t k = 0; k < line.count; ++k) {
      const int64_t at = line.begin + k * line.stride;
      (*gradient)[at] -= totals[index] * shares[at];
    }
  }
}

Vector NormalizeExactly(const Normalization& problem) {
  Transport transport;
  transport.n = problem.n;
  transport.m = problem.m;
  transport.cost = problem.logits;
  for (double& value : transport.cost) value = -std::max(value, problem.recipe.logit_floor);
  transport.a = RowMarginals(problem);
  transport.b = ColumnMarginals(problem);
  transport.solver.epsilon = 1;
  return Plan(transport, Converge(transport));
}

// alpha and beta to dW = (dR - alpha_i - beta_j) R.
Vector ApplyMultipliers(const Vector& plan, int64_t n, int64_t m, const Vector& cotangent, const Vector& alpha,
                        const Vector& beta) {
  Vector gradient(n * m);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < m; ++j) {
      const int64_t at = i * m + j;
      gradient[at] = (cotangent[at] - alpha[i] - beta[j]) * plan[at];
    }
  }
  return gradient;
}

Vector Product(const Vector& plan, const Vector& cotangent) {
  Vector product(plan.size());
  for (size_t k = 0; k < plan.size(); ++k) product[k] = plan[k] * cotangent[k];
  return product;
}

// Solves (diag(c) - R^T diag(r)^-1 R) beta = s_c - R^T diag(r)^-1 s_r on the vectors orthogonal to
// the constant.
Vector ReducedImplicitGradient(const Vector& plan, int64_t n, int64_t m, const Vector& cotangent, const Vector& r,
                               const Vector& c) {
  const Vector product = Product(plan, cotangent);
  const Vector s_r = RowSums(product, n, m), s_c = ColumnSums(product, n, m);
  Vector matrix(m * m, 0.0), right = s_c;
  for (int64_t j = 0; j < m; ++j) matrix[j * m + j] = c[j];
  for (int64_t i = 0; i < n; ++i) {
    if (r[i] == 0) continue;
    for (int64_t j = 0; j < m; ++j) {
      right[j] -= plan[i * m + j] * s_r[i] / r[i];
      for (int64_t k = 0; k < m; ++k) {
        matrix[j * m + k] -= plan[i * m + j] * plan[i * m + k] / r[i];
      }
    }
  }
  // Project: matrix <- Q matrix Q, right <- Q right, Q = I - 1 1^T / m.
  const auto center = [m](double* values, int64_t stride) {
    double mean = 0;
    for (int64_t k = 0; k < m; ++k) mean += values[k * stride] / m;
    for (int64_t k = 0; k < m; ++k) values[k * stride] -= mean;
  };
  for (int64_t j = 0; j < m; ++j) center(&matrix[j * m], 1);
  for (int64_t k = 0; k < m; ++k) center(&matrix[k], m);
  center(right.data(), 1);
  const Vector beta = SolvePseudoInverse(std::move(matrix), right, m);
  Vector alpha(n, 0.0);
  for (int64_t i = 0; i < n; ++i) {
    if (r[i] == 0) continue;
    alpha[i] = s_r[i];
    for (int64_t j = 0; j < m; ++j) alpha[i] -= plan[i * m + j] * beta[j];
    alpha[i] /= r[i];
  }
  return ApplyMultipliers(plan, n, m, cotangent, alpha, beta);
}

}  // namespace

Normalization WithDustbin(const Normalization& problem, double score) {
  Normalization larger = problem;
  larger.n = problem.n + 1;
  larger.m = problem.m + 1;
  larger.logits.assign(larger.n * larger.m, score);
  for (int64_t i = 0; i < problem.n; ++i) {
    for (int64_t j = 0; j < problem.m; ++j) {
      larger.logits[i * larger.m + j] = problem.logits[i * problem.m + j];
    }
  }
  larger.row_marginals = RowMarginals(problem);
  larger.column_marginals = ColumnMarginals(problem);
  const double row_total = Sum(larger.row_marginals), column_total = Sum(larger.column_marginals);
  larger.row_marginals.push_back(column_total);
  larger.column_marginals.push_back(row_total);
  return larger;
}

Vector RowMarginals(const Normalization& problem) {
  return problem.row_marginals.empty() ? Vector(problem.n, 1.0) : problem.row_marginals;
}

Vector ColumnMarginals(const Normalization& problem) {
  if (!problem.column_marginals.empty()) return problem.column_marginals;
  const double each = problem.recipe.exact ? Sum(RowMarginals(problem)) / problem.m : 1.0;
  return Vector(problem.m, each);
}

Vector Normalize(const Normalization& problem) {
  if (problem.recipe.exact) return NormalizeExactly(problem);
  Vector matrix = StartMatrix(problem);
  for (bool rows : Steps(problem)) matrix = Divide(problem, rows, std::move(matrix));
  return ExpOfAll(std::move(matrix));
}

Vector GradientThroughStart(const Normalization& problem, Vector gradient) {
  Vector before_offset = FlooredLogits(problem);
  const bool softmax = problem.recipe.start == Start::kRowSoftmax;
  if (softmax) before_offset = LogSoftmaxRows(problem, std::move(before_offset));
  const Vector after_offset = StartMatrix(problem);
  for (size_t k = 0; k < gradient.size(); ++k) {
    gradient[k] *= std::exp(before_offset[k] - after_offset[k]);
  }
  if (softmax) {
    const Vector log_sums = LogSums(problem, true, before_offset);
    for (int64_t i = 0; i < problem.n; ++i) {
      double total = 0;
      for (int64_t j = 0; j < problem.m; ++j) total += gradient[i * problem.m + j];
      for (int64_t j = 0; j < problem.m; ++j) {
        const int64_t at = i * problem.m + j;
        gradient[at] -= total * std::exp(before_offset[at] - log_sums[i]);
      }
    }
  }
  for (size_t k = 0; k < gradient.size(); ++k) {
    if (problem.logits[k] <= problem.recipe.logit_floor) gradient[k] = 0;
  }
  return gradient;
}

Vector UnrolledGradient(const Normalization& problem, const Vector& cotangent) {
  std::vector<Vector> history = {StartMatrix(problem)};
  const std::vector<bool> steps = Steps(problem);
  for (bool rows : steps) history.push_back(Divide(problem, rows, history.back()));
  Vector gradient = ExpOfAll(history.back());
  for (size_t k = 0; k < gradient.size(); ++k) gradient[k] *= cotangent[k];
  for (size_t step = steps.size(); step-- > 0;) {
    DivideBackward(problem, steps[step], history[step], &gradient);
  }
  return GradientThroughStart(problem, std::move(gradient));
}

Vector ImplicitGradient(const Vector& plan, int64_t n, int64_t m, const Vector& cotangent) {
  return ReducedImplicitGradient(plan, n, m, cotangent, RowSums(plan, n, m), ColumnSums(plan, n, m));
}

Vector ImplicitUnitGradient(const Vector& plan, int64_t n, int64_t m, const Vector& cotangent) {
  return ReducedImplicitGradient(plan, n, m, cotangent, Vector(n, 1.0), Vector(m, 1.0));
}

Vector ImplicitFullGradient(const Vector& plan, int64_t n, int64_t m, const Vector& cotangent) {
  const int64_t size = n + m;
  const Vector product = Product(plan, cotangent);
  Vector matrix(size * size, 0.0), right = RowSums(product, n, m);
  const Vector s_c = ColumnSums(product, n, m);
  right.insert(right.end(), s_c.begin(), s_c.end());
  for (int64_t k = 0; k < size; ++k) matrix[k * size + k] = 1;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < m; ++j) {
      matrix[i * size + n + j] = matrix[(n + j) * size + i] = plan[i * m + j];
    }
  }
  // Project out (1, -1), the direction that leaves dW alone at a doubly stochastic P.
  Vector free(size, 1.0);
  for (int64_t j = 0; j < m; ++j) free[n + j] = -1;
  const auto project = [&](double* values, int64_t stride) {
    double mean = 0;
    for (int64_t k = 0; k < size; ++k) mean += free[k] * values[k * stride] / size;
    for (int64_t k = 0; k < size; ++k) values[k * stride] -= mean * free[k];
  };
  for (int64_t k = 0; k < size; ++k) project(&matrix[k * size], 1);
  for (int64_t k = 0; k < size; ++k) project(&matrix[k], size);
  project(right.data(), 1);
  const Vector solution = SolvePseudoInverse(std::move(matrix), right, size);
  return ApplyMultipliers(plan, n, m, cotangent, Vector(solution.begin(), solution.begin() + n),
                          Vector(solution.begin() + n, solution.end()));
}

Vector RowSums(const Vector& matrix, int64_t n, int64_t m) {
  Vector sums(n, 0.0);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < m; ++j) sums[i] += matrix[i * m + j];
  }
  return sums;
}

Vector ColumnSums(const Vector& matrix, int64_t n, int64_t m) {
  Vector sums(m, 0.0);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < m; ++j) sums[j] += matrix[i * m + j];
  }
  return sums;
}

Vector FiniteDifferences(const std::function<double(const Vector&)>& function, Vector point, double step) {
  Vector gradient(point.size());
  for (size_t k = 0; k < point.size(); ++k) {
    const double at = point[k];
    point[k] = at + step;
    const double above = function(point);
    point[k] = at - step;
    const double below = function(point);
    point[k] = at;
    gradient[k] = (above - below) / (2 * step);
  }
  return gradient;
}

}  // namespace sinkhorn::oracle
