// Timed transport solves on one GPU, as the backend runs them but with tensors already there: one JSON line for each
// row of the tables, for gpu_transport.py.
//
// A solve is timed by the host's clock from the first launch to the last Collect, preparation and measuring included,
// median of repeats. Before the clock starts its answer is compared with the same iterations in float64 (DOUBLE, which
// the conformance tests hold to the oracle).
#include <algorithm>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/bench/gpu_transport_solve.h"

namespace sinkhorn {
namespace {

void Measure(const Row& row, const DeviceInfo& device, Context* context) {
  const Inputs inputs(row);
  const Answer answer(row);
  double error = -1, gradient_error = -1;
  if (row.check) {
    const Answer exact(row);
    const std::vector<Problem> reference = {ProblemOf(row, inputs, exact, Precision::kDouble)};
    const std::vector<Problem> ours = {ProblemOf(row, inputs, answer, row.precision)};
    Solve(reference, WorkspacesOf(reference, device), context, nullptr);
    Solve(ours, WorkspacesOf(ours, device), context, nullptr);
    error = Difference(row, answer, exact);
    if (row.gradient) gradient_error = GradientDifference(row, answer, exact);
  }
  const std::vector<Problem> problems = {ProblemOf(row, inputs, answer, row.precision)};
  const auto workspaces = WorkspacesOf(problems, device);
  std::vector<double> seconds;
  Convergence convergence;
  const int warm = row.repeats > 1 ? 2 : 0;
  for (int k = 0; k < row.repeats + warm; ++k) {
    const double s = Solve(problems, workspaces, context, &convergence);
    if (k >= warm) seconds.push_back(s);
  }
  std::sort(seconds.begin(), seconds.end());
  std::printf(
      "{\"name\": \"%s\", \"dense\": %d, \"cost\": %d, \"count\": %ld, \"n\": %ld, \"m\": %ld, \"dim\": %ld, "
      "\"epsilon\": %g, "
      "\"precision\": \"%s\", \"median_ms\": %.4f, \"min_ms\": %.4f, \"error_eps\": %.3g, \"iterations\": %d, "
      "\"gradient_error\": %.3g, \"error_a\": %.3g, \"error_b\": %.3g, \"workspace_mb\": %.1f}\n",
      row.name.c_str(), row.dense, static_cast<int>(row.cost), row.count, row.n, row.m, row.dim, row.epsilon,
      row.precision == Precision::kFast ? "FAST" : "STRICT", seconds[seconds.size() / 2] * 1e3, seconds[0] * 1e3, error,
      convergence.iterations, gradient_error, convergence.marginal_error_a, convergence.marginal_error_b,
      cuda::Transport()->WorkspaceBytes(device, problems[0]) / 1e6);
  std::fflush(stdout);
}

// 1,024 clouds of 16..1,024 points in one batch, against the same work in uniform batches of 512 points. Every
// kChecked-th answer is compared with float64.
void MeasureRagged(int64_t dim, const DeviceInfo& device, Context* context) {
  std::mt19937 random(11);
  std::uniform_int_distribution<int> points(16, 1024);
  constexpr int kChecked = 16;
  double seconds[2], pairs[2] = {0, 0}, error = 0;
  for (int ragged = 0; ragged < 2; ++ragged) {
    std::vector<Row> rows;
    std::vector<std::unique_ptr<Inputs>> inputs;
    std::vector<std::unique_ptr<Answer>> answers;
    std::vector<Problem> problems;
    for (int k = 0; k < 1024; ++k) {
      Row row;
      row.n = ragged ? points(random) : 512;
      row.m = ragged ? points(random) : 512;
      row.dim = dim;
      row.iterations = 50;
      rows.push_back(row);
      pairs[ragged] += 1.0 * row.n * row.m;
      inputs.push_back(std::make_unique<Inputs>(row));
      answers.push_back(std::make_unique<Answer>(row));
      problems.push_back(ProblemOf(row, *inputs.back(), *answers.back(), Precision::kStrict));
    }
    const auto workspaces = WorkspacesOf(problems, device);
    seconds[ragged] = 1e9;
    for (int k = 0; k < 3; ++k)
      seconds[ragged] = std::min(seconds[ragged], Solve(problems, workspaces, context, nullptr));
    for (size_t k = 0; k < rows.size(); k += kChecked) {
      const Answer exact(rows[k]);
      const std::vector<Problem> reference = {ProblemOf(rows[k], *inputs[k], exact, Precision::kDouble)};
      Solve(reference, WorkspacesOf(reference, device), context, nullptr);
      error = std::max(error, Difference(rows[k], *answers[k], exact));
    }
  }
  std::printf(
      "{\"name\": \"ragged\", \"dim\": %ld, \"uniform_ms\": %.3f, \"ragged_ms\": %.3f, \"share\": %.3f, "
      "\"error_eps\": %.3g}\n",
      dim, seconds[0] * 1e3, seconds[1] * 1e3, seconds[1] / pairs[1] / (seconds[0] / pairs[0]), error);
  std::fflush(stdout);
}

int Main(int argc, char** argv) {
  const DeviceInfo device = FirstDevice();
  Context context(device);
  for (int k = 1; k < argc || k == 1; ++k) {
    const std::string chosen = k < argc ? argv[k] : "";
    for (const Row& row : RowsOf(chosen)) Measure(row, device, &context);
    if (chosen.empty() || chosen == "ragged") {
      for (int64_t dim : {3, 64}) MeasureRagged(dim, device, &context);
    }
  }
  return 0;
}

}  // namespace
}  // namespace sinkhorn

int main(int argc, char** argv) { return sinkhorn::Main(argc, argv); }
