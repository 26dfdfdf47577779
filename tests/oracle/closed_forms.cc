#include "tests/oracle/closed_forms.h"

#include <algorithm>
#include <cmath>

namespace sinkhorn::oracle {
namespace {

constexpr double kPi = 3.14159265358979323846;

// A symmetric 2 x 2 matrix, or any with positive eigenvalues.
struct Matrix2 {
  double xx, xy, yx, yy;
  double trace() const { return xx + yy; }
  double determinant() const { return xx * yy - xy * yx; }
};

Matrix2 operator*(const Matrix2& p, const Matrix2& q) {
  return {p.xx * q.xx + p.xy * q.yx, p.xx * q.xy + p.xy * q.yy, p.yx * q.xx + p.yy * q.yx, p.yx * q.xy + p.yy * q.yy};
}
Matrix2 Scaled(const Matrix2& p, double s) { return {s * p.xx, s * p.xy, s * p.yx, s * p.yy}; }
Matrix2 PlusIdentity(const Matrix2& p, double s) { return {p.xx + s, p.xy, p.yx, p.yy + s}; }

// Cayley-Hamilton: sqrt(M) = (M + sqrt(det) I) / sqrt(trace + 2 sqrt(det)).
Matrix2 SquareRoot(const Matrix2& p) {
  const double root = std::sqrt(p.determinant());
  return Scaled(PlusIdentity(p, root), 1 / std::sqrt(p.trace() + 2 * root));
}

Matrix2 CovarianceOf(const Gaussian& gaussian) {
  const double* c = gaussian.covariance;
  return {c[0], c[1], c[1], c[2]};
}

// Grid points mean + A^(1/2) z, z on a square grid, with masses proportional to exp(-|z|^2 / 2).
void GaussianOnGrid(const Gaussian& gaussian, int side, double extent, Vector* points, Vector* masses) {
  const Matrix2 root = SquareRoot(CovarianceOf(gaussian));
  for (int i = 0; i < side; ++i) {
    for (int j = 0; j < side; ++j) {
      const double u = extent * (2.0 * i / (side - 1) - 1), v = extent * (2.0 * j / (side - 1) - 1);
      points->push_back(gaussian.mean[0] + root.xx * u + root.xy * v);
      points->push_back(gaussian.mean[1] + root.yx * u + root.yy * v);
      masses->push_back(std::exp(-(u * u + v * v) / 2));
    }
  }
  const double total = Sum(*masses);
  for (double& mass : *masses) mass /= total;
}

}  // namespace

double OnePointMass(double a, double b, double c, double epsilon, double rho_a, double rho_b) {
  return std::exp(((epsilon + rho_a) * std::log(a) + (epsilon + rho_b) * std::log(b) - c) / (epsilon + rho_a + rho_b));
}

double OnePointValue(double a, double b, double c, double epsilon, double rho_a, double rho_b) {
  const double p = OnePointMass(a, b, c, epsilon, rho_a, rho_b);
  return epsilon * (a * b - p) + rho_a * (a - p) + rho_b * (b - p);
}

double TwoByTwoPlan11(double a, double b, const Vector& cost, double epsilon) {
  const double k = std::exp((cost[1] + cost[2] - cost[0] - cost[3]) / epsilon);
  const double s = 1 + (k - 1) * (a + b);
  return (s - std::sqrt(s * s - 4 * k * (k - 1) * a * b)) / (2 * (k - 1));
}

double TwoByTwoDoublyStochastic11(const Vector& logits) {
  return 1 / (1 + std::exp(-(logits[0] + logits[3] - logits[1] - logits[2]) / 2));
}

double TwoByTwoDoublyStochasticSlope11(const Vector& logits) {
  const double p = TwoByTwoDoublyStochastic11(logits);
  return p * (1 - p) / 2;
}

Transport Polygons(int64_t count, double r, double R) {
  Transport problem;
  problem.n = problem.m = count;
  problem.dim = 2;
  for (int64_t i = 0; i < count; ++i) {
    const double angle = 2 * kPi * i / count;
    problem.x.insert(problem.x.end(), {r * std::cos(angle), r * std::sin(angle)});
    problem.y.insert(problem.y.end(), {R * std::cos(angle), R * std::sin(angle)});
  }
  return WithUniformMasses(problem);
}

double PolygonsValue(double r, double R, double epsilon) {
  return r * r + R * R - epsilon * std::log(std::cyl_bessel_i(0, 2 * r * R / epsilon));
}

double PolygonsSlope(double r, double R, double epsilon) {
  const double z = 2 * r * R / epsilon;
  return 2 * r - 2 * R * std::cyl_bessel_i(1, z) / std::cyl_bessel_i(0, z);
}

Transport Hypercubes(int64_t dim, double r, double R) {
  Transport problem;
  problem.n = problem.m = int64_t{1} << dim;
  problem.dim = dim;
  for (int64_t corner = 0; corner < problem.n; ++corner) {
    for (int64_t k = 0; k < dim; ++k) {
      const double sign = corner >> k & 1 ? 1 : -1;
      problem.x.push_back(r * sign);
      problem.y.push_back(R * sign);
    }
  }
  return WithUniformMasses(problem);
}

double HypercubesValue(int64_t dim, double r, double R, double epsilon) {
  // log cosh z = |z| + log((1 + exp(-2 |z|)) / 2), which does not overflow.
  const double z = std::abs(2 * r * R / epsilon);
  const double log_cosh = z + std::log1p(std::exp(-2 * z)) - std::log(2.0);
  return dim * (r * r + R * R - epsilon * log_cosh);
}

Transport Product(const Transport& first, const Transport& second) {
  Transport product;
  product.n = first.n * second.n;
  product.m = first.m * second.m;
  product.dim = first.dim + second.dim;
  product.kappa = first.kappa;
  product.solver = first.solver;
  const auto combine = [](const Vector& p, int64_t p_count, int64_t p_dim, const Vector& q, int64_t q_count,
                          int64_t q_dim, Vector* points) {
    for (int64_t i = 0; i < p_count; ++i) {
      for (int64_t j = 0; j < q_count; ++j) {
        points->insert(points->end(), &p[i * p_dim], &p[i * p_dim] + p_dim);
        points->insert(points->end(), &q[j * q_dim], &q[j * q_dim] + q_dim);
      }
    }
  };
  combine(first.x, first.n, first.dim, second.x, second.n, second.dim, &product.x);
  combine(first.y, first.m, first.dim, second.y, second.m, second.dim, &product.y);
  for (double p : first.a) {
    for (double q : second.a) product.a.push_back(p * q);
  }
  for (double p : first.b) {
    for (double q : second.b) product.b.push_back(p * q);
  }
  return product;
}

double GaussiansValue(const Gaussian& first, const Gaussian& second, double epsilon) {
  const double s2 = epsilon / 2, dim = 2;
  const Matrix2 a = CovarianceOf(first), b = CovarianceOf(second), root = SquareRoot(a);
  const Matrix2 d = SquareRoot(PlusIdentity(Scaled(root * b * root, 4), s2 * s2));
  const double shift_x = first.mean[0] - second.mean[0], shift_y = first.mean[1] - second.mean[1];
  return shift_x * shift_x + shift_y * shift_y + a.trace() + b.trace() - d.trace() + dim * s2 * (1 - std::log(2 * s2)) +
         s2 * std::log(PlusIdentity(d, s2).determinant());
}

Transport GaussiansOnGrids(const Gaussian& first, const Gaussian& second, int side, double extent) {
  Transport problem;
  problem.n = problem.m = int64_t{side} * side;
  problem.dim = 2;
  GaussianOnGrid(first, side, extent, &problem.x, &problem.a);
  GaussianOnGrid(second, side, extent, &problem.y, &problem.b);
  return problem;
}

double UnbalancedValueFromMass(double mass_a, double mass_b, double plan_mass, double rho, double epsilon) {
  return rho * (mass_a + mass_b) + epsilon * mass_a * mass_b - (2 * rho + epsilon) * plan_mass;
}

double SortedLineValue(Vector x, Vector y) {
  std::sort(x.begin(), x.end());
  std::sort(y.begin(), y.end());
  double value = 0;
  for (size_t i = 0; i < x.size(); ++i) value += (x[i] - y[i]) * (x[i] - y[i]) / x.size();
  return value;
}

}  // namespace sinkhorn::oracle
