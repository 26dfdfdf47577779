// Measures what problems cost beside what the CPU backend predicts: a line of CSV for each, on standard output.
//
//   sinkhorn_cost_samples [THREADS]
//
// cost_model.py fits the server's cost model to them. Shapes, options and values are random from a fixed seed; a
// problem runs alone, and its median of several solves is taken.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/cost_model.h"

namespace sinkhorn::bench {
namespace {

using SteadyClock = std::chrono::steady_clock;
constexpr double kSliceSeconds = 5e-3;  // As the server's scheduler.
constexpr double kLongestSeconds = 0.15, kShortestSeconds = 5e-6;

// Inputs and outputs of one problem.
struct Sample {
  Problem problem;
  std::vector<std::vector<float>> tensors;
  std::vector<double> values;

  const float* Random(int64_t elements, std::mt19937_64* random) {
    std::normal_distribution<float> normal;
    tensors.emplace_back(elements);
    for (float& value : tensors.back()) value = normal(*random);
    return tensors.back().data();
  }
  OutputView Out(int64_t elements) {
    tensors.emplace_back(elements);
    return {DType::kFloat32, tensors.back().data()};
  }
};

int64_t LogUniform(double low, double high, std::mt19937_64* random) {
  return std::llround(std::exp(std::uniform_real_distribution<double>(std::log(low), std::log(high))(*random)));
}

void FillNormalization(CostFamily family, Sample* sample, std::mt19937_64* random) {
  Problem& p = sample->problem;
  p.kind = ProblemKind::kNormalization;
  p.n = p.m = LogUniform(4, 512, random);
  p.count = LogUniform(1, 4096, random);
  const int64_t elements = p.count * p.n * p.m;
  p.solver.max_iterations = static_cast<int32_t>(LogUniform(5, 100, random));
  p.normalization.recipe = LogRowColumnRecipe();
  if (family == CostFamily::kNormalizationExact) {
    p.normalization.recipe = ExactRecipe();
    p.solver.max_iterations = 200;
    p.solver.tolerance = 1e-5;
  }
  if (elements > (1 << 23)) return;  // Too long anyway.
  p.normalization.logits = {DType::kFloat32, sample->Random(elements, random)};
  if (family == CostFamily::kNormalizationGradient) {
    p.normalization.cotangent = {DType::kFloat32, sample->Random(elements, random)};
    p.outputs.gradient_logits = sample->Out(elements);
  }
  p.outputs.plan = sample->Out(elements);
}

void FillTransport(CostFamily family, Sample* sample, std::mt19937_64* random) {
  Problem& p = sample->problem;
  const bool dense = family == CostFamily::kDense || family == CostFamily::kDenseTolerance;
  p.kind = dense ? ProblemKind::kDense : ProblemKind::kPointCloud;
  p.n = LogUniform(8, 2048, random);
  p.m = LogUniform(8, 2048, random);
  p.dim = dense ? 0 : LogUniform(1, 128, random);
  p.count = LogUniform(1, 64, random);
  if (p.count * p.n * p.m > (1 << 23)) return;
  if (dense) {
    float* cost = const_cast<float*>(sample->Random(p.count * p.n * p.m, random));
    for (int64_t i = 0; i < p.count * p.n * p.m; ++i) cost[i] = cost[i] * cost[i];
    p.transport.cost = {DType::kFloat32, cost};
  } else {
    p.transport.x = {DType::kFloat32, sample->Random(p.count * p.n * p.dim, random)};
    p.transport.y = {DType::kFloat32, sample->Random(p.count * p.m * p.dim, random)};
  }
  // Of the mean cost, the range in which people use it.
  p.solver.epsilon =
      (dense ? 1.0 : 2.0 * static_cast<double>(p.dim)) * 0.01 * static_cast<double>(LogUniform(1, 20, random));
  p.solver.max_iterations = static_cast<int32_t>(LogUniform(5, 200, random));
  if (family == CostFamily::kDenseTolerance || family == CostFamily::kPointCloudTolerance) {
    p.solver.max_iterations = 1000;
    p.solver.tolerance = std::pow(10.0, -static_cast<double>(2 + (*random)() % 4));
  }
  sample->values.resize(2 * p.count);
  p.outputs.value = sample->values.data();
  p.outputs.dual_bound = sample->values.data() + p.count;
  p.outputs.f = sample->Out(p.count * p.n);
  p.outputs.g = sample->Out(p.count * p.m);
  if ((*random)() % 3 == 0) p.outputs.plan = sample->Out(p.count * p.n * p.m);
}

// Seconds of one solve, or < 0: it failed.
double Solve(Backend* backend, const Problem& problem, SolveReport* report) {
  const SteadyClock::time_point start = SteadyClock::now();
  auto solve = backend->Admit(problem);
  if (!solve.ok()) return -1;
  sinkhorn::Solve* const resident = solve->get();
  while (!resident->done()) {
    if (!backend->Advance(0, {&resident, 1}, kSliceSeconds).ok()) return -1;
  }
  if (!resident->status().ok()) return -1;
  *report = resident->report();
  return std::chrono::duration<double>(SteadyClock::now() - start).count();
}

bool Measure(Backend* backend, CostFamily family, std::mt19937_64* random) {
  Sample sample;
  const Problem& p = sample.problem;
  sample.problem.kind = ProblemKind::kDense;
  const bool normalization = family <= CostFamily::kNormalizationExact;
  normalization ? FillNormalization(family, &sample, random) : FillTransport(family, &sample, random);
  if (sample.tensors.empty()) return false;
  Problem likely = p;
  if (p.solver.tolerance > 0) likely.solver.max_iterations = std::min(p.solver.max_iterations, 60);
  if (backend->PredictedSeconds(likely) > kLongestSeconds) return false;

  SolveReport report;
  std::vector<double> seconds;
  for (double total = 0; seconds.size() < 5 || (seconds.size() < 9 && total < 0.05);) {
    const double s = Solve(backend, p, &report);
    if (s < 0) return false;
    total += s;
    seconds.push_back(s);
  }
  std::sort(seconds.begin() + 1, seconds.end());  // The first warms up.
  const double median = seconds[(seconds.size() + 1) / 2];
  if (median < kShortestSeconds) return false;
  Problem done = p;
  done.solver.max_iterations = std::max(1, report.convergence.iterations);
  std::printf("%s,%ld,%ld,%ld,%ld,%d,%g,%d,%.4g,%.4g\n", CostFamilyName(family), static_cast<long>(p.count),
              static_cast<long>(p.n), static_cast<long>(p.m), static_cast<long>(p.dim), p.solver.max_iterations,
              p.solver.tolerance, report.convergence.iterations, backend->PredictedSeconds(done), median);
  return true;
}

int Run(int threads) {
  CpuBackendOptions options;
  options.threads = threads;
  const std::unique_ptr<Backend> backend = MakeCpuBackend(options);
  std::printf("# %s\n", backend->device().name.c_str());
  std::printf("family,count,n,m,dim,max_iterations,tolerance,iterations,figure_seconds,measured_seconds\n");
  std::mt19937_64 random(1);
  constexpr int kSamples = 60;
  for (int f = 0; f < kCostFamilies; ++f) {
    for (int taken = 0, tries = 0; taken < kSamples && tries < 20 * kSamples; ++tries) {
      taken += Measure(backend.get(), static_cast<CostFamily>(f), &random);
    }
  }
  return 0;
}

}  // namespace
}  // namespace sinkhorn::bench

int main(int argc, char** argv) { return sinkhorn::bench::Run(argc > 1 ? std::atoi(argv[1]) : 0); }
