#include "tests/oracle/linear_algebra.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <thread>
#include <utility>

namespace sinkhorn::oracle {
namespace {

// f of all values, by eight that do not wait for each other.
template <class F>
double Fold(const double* values, int64_t count, double start, F f) {
  double folded[8];
  std::fill(std::begin(folded), std::end(folded), start);
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int64_t k = 0; k < 8; ++k) folded[k] = f(folded[k], values[i + k]);
  }
  for (; i < count; ++i) folded[0] = f(folded[0], values[i]);
  for (int64_t k = 1; k < 8; ++k) folded[0] = f(folded[0], folded[k]);
  return folded[0];
}

double LargerOf(double p, double q) { return p < q ? q : p; }

}  // namespace

double Sum(const Vector& values) { return Fold(values.data(), values.size(), 0, std::plus<>()); }

double Dot(const Vector& p, const Vector& q) {
  double sum = 0;
  for (size_t i = 0; i < p.size(); ++i) sum += p[i] * q[i];
  return sum;
}

double MaxAbs(const Vector& values) {
  double largest = 0;
  for (double value : values) largest = std::max(largest, std::abs(value));
  return largest;
}

double DistanceL1(const Vector& p, const Vector& q) {
  double sum = 0;
  for (size_t i = 0; i < p.size(); ++i) sum += std::abs(p[i] - q[i]);
  return sum;
}

double LogSumExp(const double* values, int64_t count) {
  const double largest = Fold(values, count, -std::numeric_limits<double>::infinity(), LargerOf);
  if (std::isinf(largest)) return largest;  // All -inf: -inf - -inf would be NaN.
  double sum = 0, terms[256];
  for (int64_t begin = 0; begin < count; begin += std::size(terms)) {
    const int64_t some = std::min<int64_t>(std::size(terms), count - begin);
    for (int64_t k = 0; k < some; ++k) terms[k] = values[begin + k] - largest;
    Exponentials(terms, some);
    sum += Fold(terms, some, 0, std::plus<>());
  }
  return largest + std::log(sum);
}

Vector SolveLinear(Vector matrix, Vector right, int64_t n) {
  const auto row = [&](int64_t i) { return matrix.data() + i * n; };
  std::vector<bool> has_pivot(n, true);
  for (int64_t k = 0; k < n; ++k) {
    int64_t pivot = k;
    for (int64_t i = k + 1; i < n; ++i) {
      if (std::abs(row(i)[k]) > std::abs(row(pivot)[k])) pivot = i;
    }
    if (!(std::abs(row(pivot)[k]) > 1e-300)) {
      has_pivot[k] = false;
      continue;
    }
    if (pivot != k) {
      std::swap_ranges(row(pivot), row(pivot) + n, row(k));
      std::swap(right[pivot], right[k]);
    }
    for (int64_t i = k + 1; i < n; ++i) {
      const double factor = row(i)[k] / row(k)[k];
      if (factor == 0) continue;
      for (int64_t j = k; j < n; ++j) row(i)[j] -= factor * row(k)[j];
      right[i] -= factor * right[k];
    }
  }
  Vector solution(n, 0.0);
  for (int64_t k = n - 1; k >= 0; --k) {
    if (!has_pivot[k]) continue;
    double rest = right[k];
    for (int64_t j = k + 1; j < n; ++j) rest -= row(k)[j] * solution[j];
    solution[k] = rest / row(k)[k];
  }
  return solution;
}

Vector SolvePseudoInverse(Vector matrix, const Vector& right, int64_t n, double cutoff) {
  Vector vectors(n * n, 0.0);  // Row k is the k-th eigenvector.
  for (int64_t i = 0; i < n; ++i) vectors[i * n + i] = 1;
  for (int sweep = 0; sweep < 60; ++sweep) {
    double off_diagonal = 0, diagonal = 0;
    for (int64_t p = 0; p < n; ++p) {
      diagonal += matrix[p * n + p] * matrix[p * n + p];
      for (int64_t q = p + 1; q < n; ++q) {
        const double a_pq = matrix[p * n + q];
        off_diagonal += a_pq * a_pq;
        if (a_pq == 0) continue;
        const double theta = (matrix[q * n + q] - matrix[p * n + p]) / (2 * a_pq);
        const double t = (theta < 0 ? -1 : 1) / (std::abs(theta) + std::hypot(theta, 1.0));
        const double c = 1 / std::hypot(t, 1.0), s = t * c;
        for (int64_t k = 0; k < n; ++k) {  // Columns p and q, then rows p and q.
          const double a = matrix[k * n + p], b = matrix[k * n + q];
          matrix[k * n + p] = c * a - s * b;
          matrix[k * n + q] = s * a + c * b;
        }
        for (int64_t k = 0; k < n; ++k) {
          const double a = matrix[p * n + k], b = matrix[q * n + k];
          matrix[p * n + k] = c * a - s * b;
          matrix[q * n + k] = s * a + c * b;
          const double v = vectors[p * n + k], w = vectors[q * n + k];
          vectors[p * n + k] = c * v - s * w;
          vectors[q * n + k] = s * v + c * w;
        }
      }
    }
    if (off_diagonal <= 1e-34 * diagonal) break;
  }
  double largest = 0;
  for (int64_t k = 0; k < n; ++k) largest = std::max(largest, std::abs(matrix[k * n + k]));
  Vector solution(n, 0.0);
  for (int64_t k = 0; k < n; ++k) {
    const double eigenvalue = matrix[k * n + k];
    if (std::abs(eigenvalue) <= cutoff * largest) continue;
    double projection = 0;
    for (int64_t i = 0; i < n; ++i) projection += vectors[k * n + i] * right[i];
    for (int64_t i = 0; i < n; ++i) solution[i] += projection / eigenvalue * vectors[k * n + i];
  }
  return solution;
}

void ParallelFor(int64_t count, int64_t cost_of_one, const std::function<void(int64_t, int64_t)>& body) {
  const int64_t threads =
      std::min<int64_t>(std::max(1u, std::thread::hardware_concurrency()), 1 + count * cost_of_one / (1 << 16));
  if (threads <= 1 || count <= 1) return body(0, count);
  std::vector<std::thread> pool;
  for (int64_t t = 0; t < threads; ++t) {
    pool.emplace_back(body, count * t / threads, count * (t + 1) / threads);
  }
  for (std::thread& thread : pool) thread.join();
}

}  // namespace sinkhorn::oracle
