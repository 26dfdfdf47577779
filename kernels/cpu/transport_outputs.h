// What a transport member found, to the outputs asked for that need no pass over the plan.
#ifndef SINKHORN_KERNELS_CPU_TRANSPORT_OUTPUTS_H_
#define SINKHORN_KERNELS_CPU_TRANSPORT_OUTPUTS_H_

#include <cstdint>
#include <vector>

#include "kernels/cpu/transport_answer.h"
#include "kernels/problem.h"

namespace sinkhorn::cpu {

struct TransportResults {
  std::vector<const TransportAnswer*> answers;     // Its own; debiased also those of OT(a, a) and OT(b, b).
  const double* gradient[2] = {nullptr, nullptr};  // [n, dim], [m, dim], where wanted
  const double* hessian[2] = {nullptr, nullptr};   // [count, n, dim], [count, m, dim], where wanted
  HessianConvergence hessian_convergence;
  double value_linear = 0, primal_bound = 0;  // Where wanted.
};

void StoreOutputs(const Problem& problem, int64_t index, const TransportResults& results);

}  // namespace sinkhorn::cpu

#endif  // SINKHORN_KERNELS_CPU_TRANSPORT_OUTPUTS_H_
