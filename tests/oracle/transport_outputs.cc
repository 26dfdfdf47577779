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
  double sum = 0;
  for (size_t i = 0; i < mass.size(); ++i) {
    const double term = std::isinf(rho) ? potential[i] : -rho * std::expm1(-potential[i] / rho);
    sum += mass[i] * term;
  }
  return sum;
}

// |sums - mass exp(-potential / rho)|_1
double MarginalError(const Vector& sums, const Vector& mass, const Vector& potential, double rho) {
  double error = 0;
  for (size_t i = 0; i < mass.size(); ++i) {
    const double target = std::isinf(rho) ? mass[i] : mass[i] * std::exp(-potential[i] / rho);
    error += std::abs(sums[i] - target);
  }
  return error;
}

Potentials Exchanged(const Potentials& at) { return {at.g, at.f}; }

}  // namespace

double PlanEntry(const Transport& problem, const Potentials& at, int64_t i, int64_t j) {
  const double mass = problem.a[i] * problem.b[j];
  if (mass == 0) return 0;
  return mass * std::exp((at.f[i] + at.g[j] - problem.Cost(i, j)) / problem.solver.epsilon);
}

Vector Plan(const Transport& problem, const Potentials& at) {
  Vector plan(problem.n * problem.m);
  for (int64_t i = 0; i < problem.n; ++i) {
    for (int64_t j = 0; j < problem.m; ++j) plan[i * problem.m + j] = PlanEntry(problem, at, i, j);
  }
  return plan;
}

Vector PlanRowSums(const Transport& problem, const Potentials& at) {
  Vector sums(problem.n, 0.0);
  ParallelFor(problem.n, problem.m, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = 0; j < problem.m; ++j) sums[i] += PlanEntry(problem, at, i, j);
    }
  });
  return sums;
}

Vector PlanColumnSums(const Transport& problem, const Potentials& at) {
  Vector sums(problem.m, 0.0);
  ParallelFor(problem.m, problem.n, [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      for (int64_t i = 0; i < problem.n; ++i) sums[j] += PlanEntry(problem, at, i, j);
    }
  });
  return sums;
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
  Vector rows(problem.n, 0.0);
  ParallelFor(problem.n, problem.m, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = 0; j < problem.m; ++j) {
        rows[i] += PlanEntry(problem, at, i, j) * problem.Cost(i, j);
      }
    }
  });
  return Sum(rows);
}

double PrimalBound(const Transport& problem, const Potentials& at) {
  const int64_t n = problem.n, m = problem.m;
  const double eps = problem.solver.epsilon;
  // 1. Shrink rows to at most a, then columns to at most b.
  Vector row_factor = PlanRowSums(problem, at);
  for (int64_t i = 0; i < n; ++i) {
    row_factor[i] = row_factor[i] > 0 ? std::min(1.0, problem.a[i] / row_factor[i]) : 1.0;
  }
  Vector column_factor(m);
  ParallelFor(m, n, [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      double sum = 0;
      for (int64_t i = 0; i < n; ++i) sum += row_factor[i] * PlanEntry(problem, at, i, j);
      column_factor[j] = sum > 0 ? std::min(1.0, problem.b[j] / sum) : 1.0;
    }
  });
  const auto shrunk = [&](int64_t i, int64_t j) {
    return row_factor[i] * column_factor[j] * PlanEntry(problem, at, i, j);
  };
  // 2. What is missing on both sides goes into a product.
  Vector missing_a(n), missing_b(m);
  ParallelFor(n, m, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      double sum = 0;
      for (int64_t j = 0; j < m; ++j) sum += shrunk(i, j);
      missing_a[i] = std::max(0.0, problem.a[i] - sum);
    }
  });
  ParallelFor(m, n, [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      double sum = 0;
      for (int64_t i = 0; i < n; ++i) sum += shrunk(i, j);
      missing_b[j] = std::max(0.0, problem.b[j] - sum);
    }
  });
  const double missing = Sum(missing_a);
  // 3. The primal value of the result.
  Vector rows(n, 0.0);
  ParallelFor(n, m, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = 0; j < m; ++j) {
        const double product = missing > 0 ? missing_a[i] * missing_b[j] / missing : 0.0;
        const double mass = shrunk(i, j) + product;
        rows[i] += mass * problem.Cost(i, j) + eps * KullbackLeibler(mass, problem.a[i] * problem.b[j]);
      }
    }
  });
  return Sum(rows);
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
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = 0; j < problem.m; ++j) {
        const double mass = PlanEntry(problem, at, i, j);
        const Vector slope = problem.CostGradient(i, j);
        for (int64_t k = 0; k < dim; ++k) gradient[i * dim + k] += mass * slope[k];
      }
    }
  });
  return gradient;
}

Vector GradientY(const Transport& problem, const Potentials& at) { return GradientX(Swapped(problem), Exchanged(at)); }

Vector GradientA(const Transport& problem, const Potentials& at) {
  const double rho = problem.solver.rho_a, mass_b = Sum(problem.b);
  Vector gradient(problem.n);
  for (int64_t i = 0; i < problem.n; ++i) {
    double sum = 0;  // r_i / a_i, defined for a_i = 0 too.
    for (int64_t j = 0; j < problem.m; ++j) {
      if (problem.b[j] == 0) continue;
      sum += problem.b[j] * std::exp((at.f[i] + at.g[j] - problem.Cost(i, j)) / problem.solver.epsilon);
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
  Vector change(n * m, 0.0), matrix(size * size, 0.0), right(size, 0.0);
  for (int64_t i = 0; i < n; ++i) matrix[i * size + i] = extra(problem.a[i], at.f[i], problem.solver.rho_a);
  for (int64_t j = 0; j < m; ++j) {
    matrix[(n + j) * size + n + j] = extra(problem.b[j], at.g[j], problem.solver.rho_b);
  }
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < m; ++j) {
      const Vector by_x = problem.CostGradient(i, j), by_y = swapped.CostGradient(j, i);
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
      const Vector by_x = problem.CostGradient(i, j), by_y = swapped.CostGradient(j, i);
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
  Vector product(problem.n * columns, 0.0);
  for (int64_t i = 0; i < problem.n; ++i) {
    for (int64_t j = 0; j < problem.m; ++j) {
      const double mass = PlanEntry(problem, at, i, j);
      for (int64_t k = 0; k < columns; ++k) {
        product[i * columns + k] += mass * v[j * columns + k];
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
