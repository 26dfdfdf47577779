#include "tests/oracle/transport_outputs.h"

#include <algorithm>
#include <cmath>

namespace sinkhorn::oracle {
namespace {

// p log(p / q) - p + q, with 0 log 0 = 0.
double KullbackLeibler(double p, double q) { return p == 0 ? q : p * std::log(p / q) - p + q; }

// sum_i mass_i phi(potential_i): the identity for a balanced side, rho (1 - exp(-. / rho))
// otherwise.
double DualTerm(const Vector& mass, const Vector& potential, double rho) {
  long double sum = 0;  // Thousands of terms may be alike, and so what each addition rounds off.
  for (size_t i = 0; i < mass.size(); ++i) {
    const double term = std::isinf(rho) ? potential[i] : -rho * std::expm1(-potential[i] / rho);
    sum += mass[i] * term;
  }
  return static_cast<double>(sum);
}

// |sums - mass exp(-potential / rho)|_1
double MarginalError(const Vector& sums, const Vector& mass, const Vector& potential, double rho) {
  long double error = 0;  // Of hundreds of masses a double's own rounding is more than what is allowed for.
  for (size_t i = 0; i < mass.size(); ++i) {
    const double target = std::isinf(rho) ? mass[i] : mass[i] * std::exp(-potential[i] / rho);
    error += std::abs(sums[i] - target);
  }
  return static_cast<double>(error);
}

Potentials Exchanged(const Potentials& at) { return {at.g, at.f}; }

// exp((f_i + g_j - C_ij) / eps) of row i, j from `begin` to `end`.
void Densities(const Transport& problem, const Potentials& at, int64_t i, int64_t begin, int64_t end,
               double* densities) {
  const double* const cost = problem.Costs(i, begin, end, densities);
  for (int64_t j = begin; j < end; ++j) {
    densities[j - begin] = (at.f[i] + at.g[j] - cost[j - begin]) / problem.solver.epsilon;
  }
  Exponentials(densities, end - begin);
}

// Sums of an n x m matrix of which entries(i, begin, end, out) makes row i, columns from `begin` to `end`.
template <class Entries>
Vector RowSumsOf(int64_t n, int64_t m, const Entries& entries) {
  Vector sums(n);
  ParallelFor(n, m, [&](int64_t begin, int64_t end) {
    Vector row(m);
    for (int64_t i = begin; i < end; ++i) {
      entries(i, 0, m, row.data());
      sums[i] = Sum(row);
    }
  });
  return sums;
}
template <class Entries>
Vector ColumnSumsOf(int64_t n, int64_t m, const Entries& entries) {
  Vector sums(m, 0.0);
  ParallelFor(m, n, [&](int64_t begin, int64_t end) {
    Vector row(end - begin);
    for (int64_t i = 0; i < n; ++i) {
      entries(i, begin, end, row.data());
      for (int64_t j = begin; j < end; ++j) sums[j] += row[j - begin];
    }
  });
  return sums;
}

// What PlanEntries makes, as RowSumsOf and ColumnSumsOf want it.
auto EntriesOf(const Transport& problem, const Potentials& at) {
  return [&](int64_t i, int64_t begin, int64_t end, double* out) { PlanEntries(problem, at, i, begin, end, out); };
}

}  // namespace

void PlanEntries(const Transport& problem, const Potentials& at, int64_t i, int64_t begin, int64_t end,
                 double* entries) {
  if (!at.known_plan.empty()) {
    const double* const row = &at.known_plan[i * problem.m];
    std::copy(row + begin, row + end, entries);
    return;
  }
  Densities(problem, at, i, begin, end, entries);
  for (int64_t j = begin; j < end; ++j) {
    const double mass = problem.a[i] * problem.b[j];
    entries[j - begin] = mass == 0 ? 0 : mass * entries[j - begin];
  }
}

Potentials WithKnownPlan(const Transport& problem, Potentials at) {
  if (problem.n * problem.m <= int64_t{1} << 22) at.known_plan = Plan(problem, at);
  return at;
}

Vector Plan(const Transport& problem, const Potentials& at) {
  Vector plan(problem.n * problem.m);
  for (int64_t i = 0; i < problem.n; ++i) PlanEntries(problem, at, i, 0, problem.m, &plan[i * problem.m]);
  return plan;
}

Vector PlanRowSums(const Transport& problem, const Potentials& at) {
  return RowSumsOf(problem.n, problem.m, EntriesOf(problem, at));
}

Vector PlanColumnSums(const Transport& problem, const Potentials& at) {
  return ColumnSumsOf(problem.n, problem.m, EntriesOf(problem, at));
}

double MarginalErrorA(const Transport& problem, const Potentials& at) {
  return MarginalError(PlanRowSums(problem, at), problem.a, at.f, problem.solver.rho_a);
}

double MarginalErrorB(const Transport& problem, const Potentials& at) {
  return MarginalError(PlanColumnSums(problem, at), problem.b, at.g, problem.solver.rho_b);
}

double Value(const Transport& problem, const Potentials& at) {
  return DualTerm(problem.a, at.f, problem.solver.rho_a) + DualTerm(problem.b, at.g, problem.solver.rho_b) -
         problem.solver.epsilon * (Sum(PlanRowSums(problem, at)) - Sum(problem.a) * Sum(problem.b));
}

double ValueLinear(const Transport& problem, const Potentials& at) {
  return Sum(RowSumsOf(problem.n, problem.m, [&](int64_t i, int64_t begin, int64_t end, double* out) {
    Vector room(end - begin);
    const double* const cost = problem.Costs(i, begin, end, room.data());
    PlanEntries(problem, at, i, begin, end, out);
    for (int64_t j = begin; j < end; ++j) out[j - begin] *= cost[j - begin];
  }));
}

double PrimalBound(const Transport& problem, const Potentials& at) {
  const int64_t n = problem.n, m = problem.m;
  const double eps = problem.solver.epsilon;
  // 1. Shrink rows to at most a, then columns to at most b.
  Vector row_factor(n, 1.0), column_factor(m, 1.0);
  const auto shrunk = [&](int64_t i, int64_t begin, int64_t end, double* out) {
    PlanEntries(problem, at, i, begin, end, out);
    for (int64_t j = begin; j < end; ++j) out[j - begin] *= row_factor[i] * column_factor[j];
  };
  const auto factors = [](const Vector& masses, Vector sums) {
    for (size_t i = 0; i < sums.size(); ++i) sums[i] = sums[i] > 0 ? std::min(1.0, masses[i] / sums[i]) : 1.0;
    return sums;
  };
  row_factor = factors(problem.a, RowSumsOf(n, m, shrunk));
  column_factor = factors(problem.b, ColumnSumsOf(n, m, shrunk));
  // 2. What is missing on both sides goes into a product.
  const auto missing = [](const Vector& masses, Vector sums) {
    for (size_t i = 0; i < sums.size(); ++i) sums[i] = std::max(0.0, masses[i] - sums[i]);
    return sums;
  };
  const Vector missing_a = missing(problem.a, RowSumsOf(n, m, shrunk));
  const Vector missing_b = missing(problem.b, ColumnSumsOf(n, m, shrunk));
  const double total = Sum(missing_a);
  // 3. The primal value of the result.
  return Sum(RowSumsOf(n, m, [&](int64_t i, int64_t begin, int64_t end, double* out) {
    Vector room(end - begin);
    const double* const cost = problem.Costs(i, begin, end, room.data());
    shrunk(i, begin, end, out);
    for (int64_t j = begin; j < end; ++j) {
      const double product = total > 0 ? missing_a[i] * missing_b[j] / total : 0.0;
      const double mass = out[j - begin] + product;
      out[j - begin] = mass * cost[j - begin] + eps * KullbackLeibler(mass, problem.a[i] * problem.b[j]);
    }
  }));
}

double PrimalValue(const Transport& problem, const Vector& plan) {
  const SolverOptions& solver = problem.solver;
  double value = 0;
  Vector row_sums(problem.n, 0.0), column_sums(problem.m, 0.0);
  for (int64_t i = 0; i < problem.n; ++i) {
    for (int64_t j = 0; j < problem.m; ++j) {
      const double mass = plan[i * problem.m + j];
      row_sums[i] += mass;
      column_sums[j] += mass;
      value += mass * problem.Cost(i, j) + solver.epsilon * KullbackLeibler(mass, problem.a[i] * problem.b[j]);
    }
  }
  for (int64_t i = 0; i < problem.n && std::isfinite(solver.rho_a); ++i) {
    value += solver.rho_a * KullbackLeibler(row_sums[i], problem.a[i]);
  }
  for (int64_t j = 0; j < problem.m && std::isfinite(solver.rho_b); ++j) {
    value += solver.rho_b * KullbackLeibler(column_sums[j], problem.b[j]);
  }
  return value;
}

double Divergence(const Transport& problem, const Potentials& at, const Vector& f_aa, const Vector& g_bb) {
  const double mass_difference = Sum(problem.a) - Sum(problem.b);
  return Value(problem, at) - Value(SelfProblemA(problem), {f_aa, f_aa}) / 2 -
         Value(SelfProblemB(problem), {g_bb, g_bb}) / 2 +
         problem.solver.epsilon / 2 * mass_difference * mass_difference;
}

Vector GradientX(const Transport& problem, const Potentials& at) {
  const int64_t dim = problem.dim;
  Vector gradient(problem.n * dim, 0.0);
  ParallelFor(problem.n, problem.m, [&](int64_t begin, int64_t end) {
    Vector masses(problem.m), slope(dim);
    for (int64_t i = begin; i < end; ++i) {
      PlanEntries(problem, at, i, 0, problem.m, masses.data());
      for (int64_t j = 0; j < problem.m; ++j) {
        problem.CostGradient(i, j, slope.data());
        for (int64_t k = 0; k < dim; ++k) gradient[i * dim + k] += masses[j] * slope[k];
      }
    }
  });
  return gradient;
}

Vector GradientY(const Transport& problem, const Potentials& at) { return GradientX(Swapped(problem), Exchanged(at)); }

Vector GradientA(const Transport& problem, const Potentials& at) {
  const double rho = problem.solver.rho_a, mass_b = Sum(problem.b);
  Vector gradient(problem.n), densities(problem.m);
  for (int64_t i = 0; i < problem.n; ++i) {
    Densities(problem, at, i, 0, problem.m, densities.data());
    double sum = 0;  // r_i / a_i, defined for a_i = 0 too.
    for (int64_t j = 0; j < problem.m; ++j) {
      if (problem.b[j] != 0) sum += problem.b[j] * densities[j];
    }
    gradient[i] =
        (std::isinf(rho) ? at.f[i] : -rho * std::expm1(-at.f[i] / rho)) - problem.solver.epsilon * (sum - mass_b);
  }
  return gradient;
}

Vector GradientB(const Transport& problem, const Potentials& at) { return GradientA(Swapped(problem), Exchanged(at)); }

Vector DivergenceGradientX(const Transport& problem, const Potentials& at, const Vector& f_aa) {
  Vector gradient = GradientX(problem, at);
  const Vector self = GradientX(SelfProblemA(problem), {f_aa, f_aa});
  for (size_t k = 0; k < gradient.size(); ++k) gradient[k] -= self[k];
  return gradient;
}

Vector DivergenceGradientY(const Transport& problem, const Potentials& at, const Vector& g_bb) {
  return DivergenceGradientX(Swapped(problem), Exchanged(at), g_bb);
}

Vector DivergenceGradientA(const Transport& problem, const Potentials& at, const Vector& f_aa) {
  Vector gradient = GradientA(problem, at);
  const Vector self = GradientA(SelfProblemA(problem), {f_aa, f_aa});
  const double mass_slope = problem.solver.epsilon * (Sum(problem.a) - Sum(problem.b));
  for (size_t i = 0; i < gradient.size(); ++i) gradient[i] += mass_slope - self[i];
  return gradient;
}

Vector DivergenceGradientB(const Transport& problem, const Potentials& at, const Vector& g_bb) {
  return DivergenceGradientA(Swapped(problem), Exchanged(at), g_bb);
}

Vector HessianTimes(const Transport& problem, const Potentials& at, const Vector& dx, const Vector& dy) {
  const int64_t n = problem.n, m = problem.m, dim = problem.dim, size = n + m;
  const double eps = problem.solver.epsilon;
  const Transport swapped = Swapped(problem);
  const Vector plan = Plan(problem, at);
  const auto extra = [&](double mass, double potential, double rho) {
    return std::isinf(rho) ? 0.0 : eps / rho * mass * std::exp(-potential / rho);
  };
  // 1. How costs change, and the system [diag(r + p) P; P^T diag(c + q)] (df, dg) = (P dC 1, P^T dC 1).
  Vector change(n * m, 0.0), matrix(size * size, 0.0), right(size, 0.0), by_x(dim), by_y(dim);
  for (int64_t i = 0; i < n; ++i) matrix[i * size + i] = extra(problem.a[i], at.f[i], problem.solver.rho_a);
  for (int64_t j = 0; j < m; ++j) {
    matrix[(n + j) * size + n + j] = extra(problem.b[j], at.g[j], problem.solver.rho_b);
  }
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < m; ++j) {
      problem.CostGradient(i, j, by_x.data());
      swapped.CostGradient(j, i, by_y.data());
      for (int64_t k = 0; k < dim; ++k) change[i * m + j] += by_x[k] * dx[i * dim + k] + by_y[k] * dy[j * dim + k];
      const double mass = plan[i * m + j];
      matrix[i * size + i] += mass;
      matrix[(n + j) * size + n + j] += mass;
      matrix[i * size + n + j] = matrix[(n + j) * size + i] = mass;
      right[i] += mass * change[i * m + j];
      right[n + j] += mass * change[i * m + j];
    }
  }
  const Vector potentials = SolvePseudoInverse(matrix, right, size);
  // 2. d(sum_j P_ij grad C_ij), both sides.
  Vector product(size * dim, 0.0);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < m; ++j) {
      const double mass = plan[i * m + j];
      const double moved = mass * (potentials[i] + potentials[n + j] - change[i * m + j]) / eps;
      problem.CostGradient(i, j, by_x.data());
      swapped.CostGradient(j, i, by_y.data());
      const Vector curve_x = problem.CostCurvature(i, j, &dx[i * dim], &dy[j * dim]);
      const Vector curve_y = swapped.CostCurvature(j, i, &dy[j * dim], &dx[i * dim]);
      for (int64_t k = 0; k < dim; ++k) {
        product[i * dim + k] += moved * by_x[k] + mass * curve_x[k];
        product[(n + j) * dim + k] += moved * by_y[k] + mass * curve_y[k];
      }
    }
  }
  return product;
}

Vector DivergenceHessianTimes(const Transport& problem, const Potentials& at, const Vector& f_aa, const Vector& g_bb,
                              const Vector& dx, const Vector& dy) {
  Vector product = HessianTimes(problem, at, dx, dy);
  const Vector self_x = HessianTimes(SelfProblemA(problem), {f_aa, f_aa}, dx, dx);
  const Vector self_y = HessianTimes(SelfProblemB(problem), {g_bb, g_bb}, dy, dy);
  // Half of both sides, which are equal.
  for (size_t k = 0; k < dx.size(); ++k) product[k] -= self_x[k];
  for (size_t k = 0; k < dy.size(); ++k) product[dx.size() + k] -= self_y[k];
  return product;
}

Vector PlanTimes(const Transport& problem, const Potentials& at, const Vector& v, int64_t columns) {
  Vector product(problem.n * columns, 0.0), masses(problem.m);
  for (int64_t i = 0; i < problem.n; ++i) {
    PlanEntries(problem, at, i, 0, problem.m, masses.data());
    for (int64_t j = 0; j < problem.m; ++j) {
      for (int64_t k = 0; k < columns; ++k) {
        product[i * columns + k] += masses[j] * v[j * columns + k];
      }
    }
  }
  return product;
}

Vector PlanTransposeTimes(const Transport& problem, const Potentials& at, const Vector& u, int64_t columns) {
  return PlanTimes(Swapped(problem), Exchanged(at), u, columns);
}

// A factor common to a row's entries cancels: with the largest exponential 1, rows of any mass have a projection.
Vector ProjectionX(const Transport& problem, const Potentials& at) {
  Vector projection(problem.n * problem.dim, 0.0);
  for (int64_t i = 0; i < problem.n; ++i) {
    if (!(problem.a[i] > 0)) continue;
    double largest = -HUGE_VAL, sum = 0;
    for (int64_t j = 0; j < problem.m; ++j) {
      if (problem.b[j] > 0) largest = std::max(largest, at.g[j] - problem.Cost(i, j));
    }
    for (int64_t j = 0; j < problem.m; ++j) {
      if (!(problem.b[j] > 0)) continue;
      const double weight = problem.b[j] * std::exp((at.g[j] - problem.Cost(i, j) - largest) / problem.solver.epsilon);
      sum += weight;
      for (int64_t k = 0; k < problem.dim; ++k) {
        projection[i * problem.dim + k] += weight * problem.y[j * problem.dim + k];
      }
    }
    for (int64_t k = 0; k < problem.dim; ++k) projection[i * problem.dim + k] /= sum;
  }
  return projection;
}

Vector ProjectionY(const Transport& problem, const Potentials& at) {
  return ProjectionX(Swapped(problem), Exchanged(at));
}

}  // namespace sinkhorn::oracle
