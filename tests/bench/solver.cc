#include "tests/bench/solver.h"

#include <chrono>
#include <cstdio>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/problem.h"

namespace sinkhorn::bench {
namespace {

using SteadyClock = std::chrono::steady_clock;

// As the server's scheduler does.
constexpr double kSliceSeconds = 5e-3;

Problem ToProblem(const TimedProblem& in) {
  const DType dtype = static_cast<DType>(in.dtype);
  Problem problem;
  problem.kind = static_cast<ProblemKind>(in.kind);
  problem.count = in.count;
  problem.n = in.n;
  problem.m = in.m;
  problem.dim = in.dim;
  problem.normalization.logits = {dtype, in.logits};
  problem.normalization.cotangent = {dtype, in.cotangent};
  problem.normalization.backward = BackwardMode::kUnrolled;
  problem.normalization.recipe = LogRowColumnRecipe();
  problem.transport.cost = {dtype, in.cost};
  problem.transport.x = {dtype, in.x};
  problem.transport.y = {dtype, in.y};
  problem.solver.epsilon = in.epsilon;
  problem.solver.tolerance = in.tolerance;
  problem.solver.max_iterations = in.max_iterations;
  problem.solver.precision = static_cast<Precision>(in.precision);
  problem.outputs.f = {dtype, in.f};
  problem.outputs.g = {dtype, in.g};
  problem.outputs.plan = {dtype, in.plan};
  problem.outputs.gradient_logits = {dtype, in.gradient_logits};
  return problem;
}

void ToReport(const SolveReport& in, TimedReport* report) {
  report->iterations = in.convergence.iterations;
  report->converged = in.convergence.converged;
  report->stop_reason = static_cast<int32_t>(in.convergence.stop_reason);
  report->marginal_error_a = in.convergence.marginal_error_a;
  report->marginal_error_b = in.convergence.marginal_error_b;
  std::snprintf(report->family, sizeof report->family, "%s", in.family);
}

absl::Status SolveOnce(Backend* backend, const Problem& problem, TimedReport* report) {
  absl::StatusOr<std::unique_ptr<Solve>> solve = backend->Admit(problem);
  if (!solve.ok()) return solve.status();
  Solve* const resident = solve->get();
  while (!resident->done()) {
    if (absl::Status s = backend->Advance(0, {&resident, 1}, kSliceSeconds); !s.ok()) return s;
  }
  if (resident->status().ok()) ToReport(resident->report(), report);
  return resident->status();
}

}  // namespace

absl::Status SolveTimed(Backend* backend, const TimedProblem& in, int warmups, int repeats, double* seconds,
                        TimedReport* report) {
  const Problem problem = ToProblem(in);
  for (int i = -warmups; i < repeats; ++i) {
    const SteadyClock::time_point start = SteadyClock::now();
    const absl::Status status = SolveOnce(backend, problem, report);
    const double elapsed = std::chrono::duration<double>(SteadyClock::now() - start).count();
    if (!status.ok()) return status;
    if (i >= 0) seconds[i] = elapsed;
  }
  return absl::OkStatus();
}

}  // namespace sinkhorn::bench
