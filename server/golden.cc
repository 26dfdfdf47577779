#include "server/golden.h"

#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"

namespace sinkhorn {
namespace {

constexpr double kTolerance = 1e-4;  // A broken device is off by more, float32 by less.

// Solves `problem` and compares `actual`, which the solve writes, with `expected`.
template <class T>
absl::Status Check(Scheduler* scheduler, absl::Time deadline, const char* name, const Problem& problem, const T& actual,
                   double expected) {
  absl::Notification finished;
  absl::Status status;
  Task task;
  task.problem = problem;
  task.deadline = deadline;
  task.done = [&](const TaskResult& result) {
    status = result.status;
    finished.Notify();
  };
  TaskId id;
  if (absl::Status submitted = scheduler->Submit(&task, &id); !submitted.ok()) return submitted;
  finished.WaitForNotification();
  if (!status.ok()) return absl::Status(status.code(), absl::StrCat("golden problem '", name, "': ", status.message()));
  if (std::abs(actual - expected) <= kTolerance * std::max(1.0, std::abs(expected))) return status;  // False for NaN.
  return absl::InternalError(absl::StrCat("golden problem '", name, "' must give ", expected, "; got ", actual));
}

// 2 x 2 logits: P11 = sigmoid((L11 + L22 - L12 - L21) / 2).
absl::Status CheckNormalization(Scheduler* scheduler, absl::Time deadline) {
  const float logits[4] = {1, 0, -0.5f, 0.5f};
  float plan[4] = {};
  Problem problem;
  problem.kind = ProblemKind::kNormalization;
  problem.n = problem.m = 2;
  problem.normalization.logits = {DType::kFloat32, logits, false};
  problem.normalization.recipe = LogRowColumnRecipe();
  problem.solver.max_iterations = 100;
  problem.outputs.plan = {DType::kFloat32, plan};
  return Check(scheduler, deadline, "normalization", problem, plan[0], 1 / (1 + std::exp(-1.0)));
}

// 2 x 2 costs, uniform marginals: P11 = sqrt(k) / (2 (1 + sqrt(k))) with k = exp((C12 + C21 - C11 - C22) / epsilon).
absl::Status CheckDense(Scheduler* scheduler, absl::Time deadline) {
  const float cost[4] = {0, 1, 1, 0.5f};
  float plan[4] = {};
  Problem problem;
  problem.kind = ProblemKind::kDense;
  problem.n = problem.m = 2;
  problem.transport.cost = {DType::kFloat32, cost, false};
  problem.solver.epsilon = 0.5;
  problem.solver.max_iterations = 1000;
  problem.solver.tolerance = 1e-6;
  problem.outputs.plan = {DType::kFloat32, plan};
  const double root = std::exp(1.5 / 0.5 / 2);
  return Check(scheduler, deadline, "dense", problem, plan[0], root / (2 * (1 + root)));
}

// Points +-r against +-R on a line: value = r^2 + R^2 - epsilon log cosh(2 r R / epsilon).
absl::Status CheckPointCloud(Scheduler* scheduler, absl::Time deadline) {
  const float x[2] = {-1, 1}, y[2] = {-2, 2};
  double value = 0;
  Problem problem;
  problem.kind = ProblemKind::kPointCloud;
  problem.n = problem.m = 2;
  problem.dim = 1;
  problem.transport.x = {DType::kFloat32, x, false};
  problem.transport.y = {DType::kFloat32, y, false};
  problem.solver.epsilon = 1;
  problem.solver.max_iterations = 1000;
  problem.solver.tolerance = 1e-6;
  problem.outputs.value = &value;
  return Check(scheduler, deadline, "point cloud", problem, value, 1 + 4 - std::log(std::cosh(4.0)));
}

}  // namespace

absl::Status CheckGoldenProblems(Scheduler* scheduler, absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  for (auto check : {CheckNormalization, CheckDense, CheckPointCloud}) {
    if (absl::Status status = check(scheduler, deadline); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace sinkhorn
