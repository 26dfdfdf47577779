// Which outputs a request gets, and the memory they are written to.
#ifndef SINKHORN_SERVER_REPLY_PLAN_H_
#define SINKHORN_SERVER_REPLY_PLAN_H_

#include <cstdint>

#include "absl/types/optional.h"
#include "server/status.h"
#include "server/tensor_check.h"
#include "server/validate.h"
#include "sinkhorn/v1/sinkhorn.pb.h"

namespace sinkhorn {

// A set of outputs.
class OutputMask {
 public:
  void Add(int output) { bits_ |= uint32_t{1} << output; }
  bool Has(int output) const { return bits_ >> output & 1; }

 private:
  uint32_t bits_ = 0;
};

// Checks that the outputs asked for fit the problem, and fills in the default ones.
absl::optional<Error> CheckOutputs(const v1::SolveRequest& request, const Problem& problem, OutputMask* mask);

// Points `prepared->problem.outputs` to memory of `prepared` and `response`. PROBLEM_TOO_LARGE when the reply would
// exceed the limit, DEVICE_MEMORY when there is no memory for it.
absl::optional<Error> PlanReply(const OutputMask& mask, const TensorCheck& inputs, const Limits& limits,
                                Prepared* prepared, v1::SolveResponse* response);

// Adds what is neither a tensor nor a scalar: how Hessian-vector products converged, sparse plans. REQUIRES: solved.
void FillExtras(const Prepared& prepared, v1::SolveResponse* response);

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_REPLY_PLAN_H_
