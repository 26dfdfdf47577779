// A problem for echo_family.h that owns its tensors and knows its answer.
#ifndef SINKHORN_KERNELS_CUDA_ECHO_PROBLEM_H_
#define SINKHORN_KERNELS_CUDA_ECHO_PROBLEM_H_

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/echo_family.h"
#include "kernels/problem.h"

namespace sinkhorn {
namespace cuda {

class EchoProblem {
 public:
  EchoProblem(int64_t count, int64_t n, int64_t m, uint32_t seed = 1)
      : cost_(count * n * m), plan_(count * n * m, -7), f_(count * n, -7), convergence_(count) {
    std::mt19937 random(seed);
    for (float& value : cost_) value = static_cast<float>(random() % 1000) / 8;
    problem.kind = ProblemKind::kDense;
    problem.count = count;
    problem.n = n;
    problem.m = m;
    problem.transport.cost = {DType::kFloat32, cost_.data(), false};
    problem.solver.epsilon = kEchoWell;
    problem.solver.max_iterations = 1;
    problem.outputs.plan = {DType::kFloat32, plan_.data()};
    problem.outputs.f = {DType::kFloat32, f_.data()};
    problem.outputs.convergence = convergence_.data();
  }
  EchoProblem(const EchoProblem&) = delete;  // `problem` points into it.
  EchoProblem& operator=(const EchoProblem&) = delete;

  EchoProblem& Slices(int slices) {
    problem.solver.max_iterations = slices;
    return *this;
  }
  EchoProblem& Behaves(double behaviour) {
    problem.solver.epsilon = behaviour;
    return *this;
  }
  EchoProblem& Copied() {
    problem.solver.update_rule = UpdateRule::kSymmetric;
    return *this;
  }
  EchoProblem& Takes(double seconds) {
    problem.solver.tolerance = seconds;
    return *this;
  }

  // What is wrong with the answer; "" if nothing.
  std::string Wrong() const {
    for (size_t i = 0; i < plan_.size(); ++i) {
      if (plan_[i] != 2 * cost_[i] + 1) return absl::StrCat("plan[", i, "] = ", plan_[i], " of ", plan_.size());
    }
    for (size_t i = 0; i < f_.size(); ++i) {
      float sum = 0;
      for (int64_t j = 0; j < problem.m; ++j) sum += cost_[i * problem.m + j];
      if (f_[i] != sum) return absl::StrCat("f[", i, "] = ", f_[i], ", not ", sum);
    }
    for (const Convergence& member : convergence_) {
      if (member.iterations != problem.solver.max_iterations || !member.converged) return "convergence";
    }
    return "";
  }
  bool Untouched() const {
    for (float value : plan_) {
      if (value != -7) return false;
    }
    return true;
  }

  Problem problem;

 private:
  std::vector<float> cost_, plan_, f_;
  std::vector<Convergence> convergence_;
};

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_ECHO_PROBLEM_H_
