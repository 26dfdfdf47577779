#include "tests/oracle/transport.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "tests/oracle/transport_outputs.h"

namespace sinkhorn::oracle {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double Damping(double eps, double rho) { return std::isinf(rho) ? 1.0 : 1 / (1 + eps / rho); }

// a for balanced rows, a exp(-f / rho) otherwise: what the row sums must be.
double TargetMass(double mass, double potential, double rho) {
  return std::isinf(rho) ? mass : mass * std::exp(-potential / rho);
}

// Newton step on g of the dual objective with f eliminated, at potentials whose f is a fresh half
// step. The dual's Hessian (times -eps) is [diag(r + p) P; P^T diag(c + q)], p = (eps / rho_a) a
// exp(-f / rho_a) and q likewise (0: balanced). Its Schur complement on g is a graph Laplacian plus
// a non-negative diagonal; both are summed as positive terms, so nothing cancels however weakly the
// graph is connected.
Potentials NewtonStep(const Transport& problem, const Potentials& at, const Vector& plan) {
  const int64_t n = problem.n, m = problem.m;
  const double eps = problem.solver.epsilon;
  const bool balanced = std::isinf(problem.solver.rho_a) && std::isinf(problem.solver.rho_b);
  const auto extra = [&](double mass, double potential, double rho) {
    return std::isinf(rho) ? 0.0 : eps / rho * TargetMass(mass, potential, rho);
  };
  Vector matrix(m * m, 0.0), right(m, 0.0), f_gradient(n, 0.0), f_diagonal(n, 0.0);
  for (int64_t i = 0; i < n; ++i) {
    const double* row = &plan[i * m];
    double sum = 0;
    for (int64_t j = 0; j < m; ++j) sum += row[j];
    const double p = extra(problem.a[i], at.f[i], problem.solver.rho_a);
    f_gradient[i] = TargetMass(problem.a[i], at.f[i], problem.solver.rho_a) - sum;
    f_diagonal[i] = sum + p;
    if (!(f_diagonal[i] > 0)) continue;
    for (int64_t j = 0; j < m; ++j) {
      if (row[j] == 0) continue;
      const double share = row[j] / f_diagonal[i];
      right[j] -= share * f_gradient[i];
      matrix[j * m + j] += share * p;
      for (int64_t k = 0; k < m; ++k) {
        if (k == j) continue;
        matrix[j * m + k] -= share * row[k];
        matrix[j * m + j] += share * row[k];
      }
    }
  }
  for (int64_t j = 0; j < m; ++j) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += plan[i * m + j];
    right[j] += TargetMass(problem.b[j], at.g[j], problem.solver.rho_b) - sum;
    matrix[j * m + j] += extra(problem.b[j], at.g[j], problem.solver.rho_b);
  }
  if (balanced) {  // The constant is free: hold g of the heaviest column.
    const int64_t held = std::max_element(problem.b.begin(), problem.b.end()) - problem.b.begin();
    for (int64_t j = 0; j < m; ++j) matrix[held * m + j] = matrix[j * m + held] = 0;
    matrix[held * m + held] = 1;
    right[held] = 0;
  }
  Potentials step{Vector(n, 0.0), SolveLinear(std::move(matrix), std::move(right), m)};
  for (int64_t i = 0; i < n; ++i) {
    if (!(f_diagonal[i] > 0)) continue;
    double rest = f_gradient[i];
    for (int64_t j = 0; j < m; ++j) rest -= plan[i * m + j] * step.g[j];
    step.f[i] = rest / f_diagonal[i];
  }
  for (double& value : step.f) value *= eps;
  for (double& value : step.g) value *= eps;
  return step;
}

double TotalError(const Transport& problem, const Potentials& at) {
  const double error = MarginalErrorA(problem, at) + MarginalErrorB(problem, at);
  return std::isfinite(error) ? error : kInfinity;
}

// One alternating iteration at the final epsilon.
Potentials Sweep(const Transport& problem, const Potentials& from) {
  Potentials to;
  to.f = HalfStepRows(problem, from.g, problem.solver.epsilon);
  to.g = HalfStepColumns(problem, to.f, problem.solver.epsilon);
  return to;
}

// Newton's step, halved until a sweep from there leaves a smaller error than `error`; plain sweeps
// if none does.
Potentials SafeguardedStep(const Transport& problem, const Potentials& from, double error) {
  const Potentials step = NewtonStep(problem, from, Plan(problem, from));
  double length = 1;
  for (int halving = 0; halving < 8; ++halving, length /= 2) {
    Potentials trial = from;
    for (int64_t j = 0; j < problem.m; ++j) trial.g[j] += length * step.g[j];
    trial = Sweep(problem, trial);
    if (TotalError(problem, trial) < error * (1 - 0.1 * length)) return trial;
  }
  Potentials swept = from;
  for (int i = 0; i < 20; ++i) swept = Sweep(problem, swept);
  return swept;
}

// Safeguarded steps until the error is at most `enough`, or no longer falls.
Potentials Refine(const Transport& problem, Potentials at, double enough, int max_steps, double* error) {
  double least = TotalError(problem, at);
  int without_progress = 0;
  for (int step = 0; step < max_steps && least > enough && without_progress < 4; ++step) {
    Potentials next = SafeguardedStep(problem, at, least);
    const double next_error = TotalError(problem, next);
    // Exponents as large as |f| / eps are known to 16 digits only.
    const double rounding = 1e-12 + 1e-15 * (MaxAbs(next.f) + MaxAbs(next.g)) / problem.solver.epsilon;
    const bool is_rounding = next_error < rounding;
    without_progress = is_rounding && next_error >= 0.9 * least ? without_progress + 1 : 0;
    if (next_error < least || !is_rounding) at = std::move(next), least = next_error;
  }
  if (error) *error = least;
  return at;
}

// The cost of points at p and q.
[[gnu::always_inline]] inline double CostOfPoints(const Transport& problem, const double* p, const double* q) {
  const auto sum = [dim = problem.dim](auto term) {
    double total = 0, others[3] = {};  // Four that do not wait for each other.
    int64_t k = 0;
    for (; k + 4 <= dim; k += 4) {
      total += term(k);
      for (int64_t each = 0; each < 3; ++each) others[each] += term(k + 1 + each);
    }
    if (k > 0) total += others[0] + (others[1] + others[2]);
    for (; k < dim; ++k) total += term(k);
    return total;
  };
  const auto apart2 = [=](int64_t k) { return (p[k] - q[k]) * (p[k] - q[k]); };
  switch (problem.point_cost) {
    case PointCost::kSquaredEuclidean:
      return problem.kappa * sum(apart2);
    case PointCost::kEuclidean:
      return std::sqrt(sum(apart2));
    case PointCost::kCosine: {  // From the points on the sphere: 1 - cos would cancel where they are near each other.
      const double norm_x = std::sqrt(sum([=](int64_t k) { return p[k] * p[k]; }));
      const double norm_y = std::sqrt(sum([=](int64_t k) { return q[k] * q[k]; }));
      return sum([=](int64_t k) {
               const double apart = p[k] / norm_x - q[k] / norm_y;
               return apart * apart;
             }) /
             2;
    }
    case PointCost::kNegativeDot:
      return -sum([=](int64_t k) { return p[k] * q[k]; });
  }
  return 0;
}

}  // namespace

double Transport::Cost(int64_t i, int64_t j) const {
  double room;
  return *Costs(i, j, j + 1, &room);
}

const double* Transport::Costs(int64_t i, int64_t begin, int64_t end, double* room) const {
  if (!cost.empty()) return &cost[i * m + begin];
  if (!known_cost.empty()) return &known_cost[i * m + begin];
  for (int64_t j = begin; j < end; ++j) room[j - begin] = CostOfPoints(*this, &x[i * dim], &y[j * dim]);
  return room;
}

void Transport::CostGradient(int64_t i, int64_t j, double* gradient) const {
  const double* p = &x[i * dim];
  const double* q = &y[j * dim];
  double dot = 0, x2 = 0, y2 = 0;
  for (int64_t k = 0; k < dim && point_cost == PointCost::kCosine; ++k) {
    dot += p[k] * q[k];
    x2 += p[k] * p[k];
    y2 += q[k] * q[k];
  }
  const double distance = point_cost == PointCost::kEuclidean ? Cost(i, j) : 0;
  for (int64_t k = 0; k < dim; ++k) {
    switch (point_cost) {
      case PointCost::kSquaredEuclidean:
        gradient[k] = 2 * kappa * (p[k] - q[k]);
        break;
      case PointCost::kEuclidean:
        gradient[k] = p[k] == q[k] ? 0 : (p[k] - q[k]) / distance;
        break;
      case PointCost::kCosine:
        gradient[k] = (dot / x2 * p[k] - q[k]) / (std::sqrt(x2) * std::sqrt(y2));
        break;
      case PointCost::kNegativeDot:
        gradient[k] = -q[k];
        break;
    }
  }
}

Vector Transport::CostCurvature(int64_t i, int64_t j, const double* dx, const double* dy) const {
  Vector curvature(dim);
  if (point_cost != PointCost::kCosine) {
    for (int64_t k = 0; k < dim; ++k) {
      curvature[k] = point_cost == PointCost::kNegativeDot ? -dy[k] : 2 * kappa * (dx[k] - dy[k]);
    }
    return curvature;
  }
  // On the sphere: p = x / |x|, q = y / |y|, s = <p, q>; the gradient is -(q - s p) / |x|.
  Vector p(&x[i * dim], &x[i * dim] + dim), q(&y[j * dim], &y[j * dim] + dim), dp(dim), dq(dim);
  const double norm_x = std::sqrt(Dot(p, p)), norm_y = std::sqrt(Dot(q, q));
  double s = 0, along_x = 0, along_y = 0, ds = 0;
  for (int64_t k = 0; k < dim; ++k) {
    p[k] /= norm_x;
    q[k] /= norm_y;
    s += p[k] * q[k];
    along_x += p[k] * dx[k];
    along_y += q[k] * dy[k];
  }
  for (int64_t k = 0; k < dim; ++k) {
    dp[k] = (dx[k] - along_x * p[k]) / norm_x;
    dq[k] = (dy[k] - along_y * q[k]) / norm_y;
    ds += dp[k] * q[k] + p[k] * dq[k];
  }
  for (int64_t k = 0; k < dim; ++k) {
    curvature[k] = -(dq[k] - ds * p[k] - s * dp[k]) / norm_x + (q[k] - s * p[k]) * along_x / (norm_x * norm_x);
  }
  return curvature;
}

Transport WithUniformMasses(Transport problem) {
  if (problem.a.empty()) problem.a.assign(problem.n, 1.0 / problem.n);
  if (problem.b.empty()) problem.b.assign(problem.m, 1.0 / problem.m);
  return problem;
}

Transport WithKnownCost(Transport problem) {
  const bool is_known = !problem.cost.empty() || !problem.known_cost.empty();
  if (is_known || problem.n * problem.m > int64_t{1} << 22) return problem;
  Vector known(problem.n * problem.m);
  ParallelFor(problem.n, problem.m * problem.dim, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      problem.Costs(i, 0, problem.m, &known[i * problem.m]);
    }
  });
  problem.known_cost = std::move(known);
  return problem;
}

Transport Swapped(const Transport& problem) {
  Transport swapped = problem;
  std::swap(swapped.n, swapped.m);
  std::swap(swapped.x, swapped.y);
  std::swap(swapped.a, swapped.b);
  std::swap(swapped.initial_f, swapped.initial_g);
  std::swap(swapped.solver.rho_a, swapped.solver.rho_b);
  Vector& costs = problem.cost.empty() ? swapped.known_cost : swapped.cost;
  for (int64_t i = 0; i < problem.n && !costs.empty(); ++i) {
    for (int64_t j = 0; j < problem.m; ++j) costs[j * problem.n + i] = problem.Cost(i, j);
  }
  return swapped;
}

Transport SelfProblemA(const Transport& problem) {
  Transport self = problem;
  self.m = self.n;
  self.y = self.x;
  self.b = self.a;
  self.solver.rho_b = self.solver.rho_a;
  self.initial_f.clear();
  self.initial_g.clear();
  self.known_cost.clear();
  return self;
}

Transport SelfProblemB(const Transport& problem) { return SelfProblemA(Swapped(problem)); }

double DefaultEpsilonStart(const Transport& problem) {
  double largest = 0;
  const bool halved = problem.point_cost == PointCost::kNegativeDot;
  if (!problem.cost.empty()) {
    const auto [low, high] = std::minmax_element(problem.cost.begin(), problem.cost.end());
    largest = *high - *low;
  } else {
    for (int64_t k = 0; k < problem.dim; ++k) {
      double low = kInfinity, high = -kInfinity;
      for (int64_t i = 0; i < problem.n; ++i) {
        low = std::min(low, problem.x[i * problem.dim + k]);
        high = std::max(high, problem.x[i * problem.dim + k]);
      }
      for (int64_t j = 0; j < problem.m; ++j) {
        low = std::min(low, problem.y[j * problem.dim + k]);
        high = std::max(high, problem.y[j * problem.dim + k]);
      }
      largest += (halved ? 0.5 : problem.kappa) * (high - low) * (high - low);
    }
    if (problem.point_cost == PointCost::kEuclidean) largest = std::sqrt(largest / problem.kappa);
    if (problem.point_cost == PointCost::kCosine) largest = 2;
  }
  return std::max(largest, problem.solver.epsilon);
}

double EpsilonAt(const Transport& problem, int t) {
  const SolverOptions& solver = problem.solver;
  if (solver.epsilon_decay == 0) return solver.epsilon;
  const double start = solver.epsilon_start > 0 ? solver.epsilon_start : DefaultEpsilonStart(problem);
  return std::max(solver.epsilon, start * std::pow(solver.epsilon_decay, t));
}

Vector HalfStepRows(const Transport& problem, const Vector& g, double eps) {
  Vector offset(problem.m);  // log b_j + g_j / eps
  for (int64_t j = 0; j < problem.m; ++j) offset[j] = std::log(problem.b[j]) + g[j] / eps;
  const double damping = Damping(eps, problem.solver.rho_a);
  Vector f(problem.n);
  ParallelFor(problem.n, problem.m, [&](int64_t begin, int64_t end) {
    Vector exponent(problem.m), room(problem.m);
    for (int64_t i = begin; i < end; ++i) {
      const double* const cost = problem.Costs(i, 0, problem.m, room.data());
      for (int64_t j = 0; j < problem.m; ++j) exponent[j] = offset[j] - cost[j] / eps;
      f[i] = -eps * damping * LogSumExp(exponent.data(), problem.m);
    }
  });
  return f;
}

Vector HalfStepColumns(const Transport& problem, const Vector& f, double eps) {
  constexpr int64_t kTogether = 8;  // Columns: what a row has of them is one read from memory.
  const int64_t n = problem.n;
  Vector offset(n);  // log a_i + f_i / eps
  for (int64_t i = 0; i < n; ++i) offset[i] = std::log(problem.a[i]) + f[i] / eps;
  const double damping = Damping(eps, problem.solver.rho_b);
  Vector g(problem.m);
  ParallelFor(problem.m, n, [&](int64_t begin, int64_t end) {
    Vector exponent(kTogether * n);
    double room[kTogether];
    for (int64_t first = begin; first < end; first += kTogether) {
      const int64_t last = std::min(first + kTogether, end);
      for (int64_t i = 0; i < n; ++i) {
        const double* const cost = problem.Costs(i, first, last, room);
        for (int64_t j = first; j < last; ++j) exponent[(j - first) * n + i] = offset[i] - cost[j - first] / eps;
      }
      for (int64_t j = first; j < last; ++j) g[j] = -eps * damping * LogSumExp(&exponent[(j - first) * n], n);
    }
  });
  return g;
}

Potentials Iterate(const Transport& problem, int iterations) {
  const bool given = !problem.initial_f.empty() || !problem.initial_g.empty();
  Potentials at{problem.initial_f, problem.initial_g};
  at.f.resize(problem.n, 0.0);
  at.g.resize(problem.m, 0.0);
  if (problem.solver.update_rule == UpdateRule::kAlternating) {
    for (int t = 0; t < iterations; ++t) {
      const double eps = EpsilonAt(problem, t);
      at.f = HalfStepRows(problem, at.g, eps);
      at.g = HalfStepColumns(problem, at.f, eps);
    }
    return at;
  }
  if (!given) {
    const double eps = EpsilonAt(problem, 0);
    at = {HalfStepRows(problem, at.g, eps), HalfStepColumns(problem, at.f, eps)};
  }
  for (int t = 0; t < iterations; ++t) {
    const double eps = EpsilonAt(problem, t);
    const Vector f = HalfStepRows(problem, at.g, eps), g = HalfStepColumns(problem, at.f, eps);
    for (int64_t i = 0; i < problem.n; ++i) at.f[i] = (at.f[i] + f[i]) / 2;
    for (int64_t j = 0; j < problem.m; ++j) at.g[j] = (at.g[j] + g[j]) / 2;
  }
  return at;
}

Potentials Converge(const Transport& problem, double* error) {
  if (problem.m > problem.n) {  // Newton's system is on the columns: make them the fewer.
    Potentials swapped = Converge(Swapped(problem), error);
    return {std::move(swapped.g), std::move(swapped.f)};
  }
  const double mass = Sum(problem.a) + Sum(problem.b);
  Transport stage = problem;
  Potentials at{Vector(problem.n, 0.0), Vector(problem.m, 0.0)};
  for (double eps = DefaultEpsilonStart(problem); eps > problem.solver.epsilon; eps *= 0.6) {
    stage.solver.epsilon = eps;
    for (int sweep = 0; sweep < 3; ++sweep) at = Sweep(stage, at);
    at = Refine(stage, std::move(at), 1e-3 * mass, 20, nullptr);
  }
  return Refine(problem, Sweep(problem, at), 1e-15 * mass, 300, error);
}

Vector ConvergeSymmetric(const Transport& self_problem) {
  const Potentials at = Converge(self_problem);
  Vector symmetric(self_problem.n);
  for (int64_t i = 0; i < self_problem.n; ++i) symmetric[i] = (at.f[i] + at.g[i]) / 2;
  return symmetric;
}

}  // namespace sinkhorn::oracle
