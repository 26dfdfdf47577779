// Hessian-vector products on one GPU, through the backend: one JSON line for each size, of what an iteration of the
// conjugate gradients takes, and all of it.
//
// An iteration is the difference of two solves that are allowed different numbers of them, medians of repeats. Before
// the clock starts products are compared with DOUBLE's, which the conformance tests hold to the oracle.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "kernels/cuda/cuda_backend.h"

namespace sinkhorn {
namespace {

struct Row {
  int64_t n, dim, directions;
  Precision precision;
};

// A problem's memory on the host.
class Clouds {
 public:
  explicit Clouds(const Row& row) : row_(row) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (auto* cloud : {&x_, &y_}) {
      cloud->resize(row.n * row.dim);
      for (float& value : *cloud) value = normal(random) / std::sqrt(2.0f * row.dim);
    }
    for (auto* steps : {&dx_, &dy_}) {
      steps->resize(row.directions * row.n * row.dim);
      for (float& value : *steps) value = normal(random);
    }
    for (auto* product : {&product_x_, &product_y_}) product->resize(row.directions * row.n * row.dim);
  }

  Problem ProblemOf(Precision precision, double epsilon, int iterations, double tolerance) {
    Problem p;
    p.kind = ProblemKind::kPointCloud;
    p.n = p.m = row_.n;
    p.dim = row_.dim;
    p.transport.x.data = x_.data();
    p.transport.y.data = y_.data();
    HessianInputs& hessian = p.transport.hessian;
    hessian.x.data = dx_.data();
    hessian.y.data = dy_.data();
    hessian.count = row_.directions;
    hessian.tolerance = tolerance;
    hessian.max_iterations = iterations;
    p.solver.epsilon = epsilon;
    p.solver.max_iterations = 500;
    p.solver.tolerance = precision == Precision::kDouble ? 1e-9 : 1e-6;
    p.solver.precision = precision;
    p.outputs.value = &value_;
    p.outputs.hessian_x.data = product_x_.data();
    p.outputs.hessian_y.data = product_y_.data();
    p.outputs.hessian_convergence = &convergence_;
    return p;
  }

  std::vector<float> products() const {
    std::vector<float> all = product_x_;
    all.insert(all.end(), product_y_.begin(), product_y_.end());
    return all;
  }
  const HessianConvergence& convergence() const { return convergence_; }

 private:
  const Row row_;
  std::vector<float> x_, y_, dx_, dy_, product_x_, product_y_;
  double value_ = 0;
  HessianConvergence convergence_;
};

double Solve(Backend* backend, const Problem& problem) {
  const auto start = std::chrono::steady_clock::now();
  auto solve = backend->Admit(problem);
  if (!solve.ok()) std::fprintf(stderr, "%s\n", solve.status().ToString().c_str()), std::exit(1);
  while (!(*solve)->done()) {
    const absl::Status status = backend->Advance(0, {solve->get()}, 0.02);
    if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str()), std::exit(1);
  }
  if (!(*solve)->status().ok()) std::fprintf(stderr, "%s\n", (*solve)->status().ToString().c_str()), std::exit(1);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double MedianSeconds(Backend* backend, const Problem& problem) {
  std::vector<double> seconds;
  for (int k = 0; k < 9; ++k) {
    const double s = Solve(backend, problem);
    if (k >= 2) seconds.push_back(s);
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

void Measure(const Row& row, Backend* backend) {
  constexpr double kEpsilon = 0.1, kTolerance = 1e-5;
  constexpr int kFew = 4, kMany = 24;  // Iterations; no residual is that small.
  Clouds clouds(row);
  (void)Solve(backend, clouds.ProblemOf(Precision::kDouble, kEpsilon, 500, 1e-9));
  const std::vector<float> exact = clouds.products();
  const Problem whole = clouds.ProblemOf(row.precision, kEpsilon, 500, kTolerance);
  (void)Solve(backend, whole);
  const std::vector<float> ours = clouds.products();
  const HessianConvergence converged = clouds.convergence();
  double largest = 0, error = 0;
  for (size_t k = 0; k < exact.size(); ++k) {
    const double difference = std::abs(exact[k] - ours[k]);
    error = difference <= error ? error : std::isfinite(difference) ? difference : INFINITY;
    largest = std::max<double>(largest, std::abs(exact[k]));
  }
  const double seconds = MedianSeconds(backend, whole);
  Problem without = whole;
  without.transport.hessian = HessianInputs();
  without.outputs.hessian_x = without.outputs.hessian_y = OutputView();
  without.outputs.hessian_convergence = nullptr;
  const double solve_seconds = MedianSeconds(backend, without);
  double both[2];
  int iterations[2];
  for (int k = 0; k < 2; ++k) {
    both[k] = MedianSeconds(backend, clouds.ProblemOf(row.precision, kEpsilon, k == 0 ? kFew : kMany, 1e-300));
    iterations[k] = clouds.convergence().iterations;
  }
  std::printf(
      "{\"name\": \"hessian\", \"n\": %ld, \"dim\": %ld, \"directions\": %ld, \"precision\": \"%s\", "
      "\"error\": %.3g, \"residual\": %.3g, \"iterations\": %d, \"all_ms\": %.4f, \"without_ms\": %.4f, "
      "\"iteration_ms\": %.4f, \"timed_iterations\": %d}\n",
      row.n, row.dim, row.directions, row.precision == Precision::kFast ? "FAST" : "STRICT", error / largest,
      converged.residual, converged.iterations, seconds * 1e3, solve_seconds * 1e3,
      (both[1] - both[0]) * 1e3 / (iterations[1] - iterations[0]), iterations[1]);
  std::fflush(stdout);
}

int Main() {
  const auto backend = MakeCudaBackend(0, CudaBackendOptions());
  if (!backend.ok()) {
    std::printf("no GPU\n");
    return 0;
  }
  for (int64_t n : {2048, 10000}) {
    for (int64_t directions : {1, 4}) {
      for (Precision precision : {Precision::kStrict, Precision::kFast}) {
        Measure({n, 64, directions, precision}, backend->get());
      }
    }
  }
  Measure({10000, 3, 1, Precision::kStrict}, backend->get());
  return 0;
}

}  // namespace
}  // namespace sinkhorn

int main() { return sinkhorn::Main(); }
