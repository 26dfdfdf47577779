// The last look at an answer before it is sent. Free of gRPC.
#ifndef SINKHORN_SERVER_ANSWER_CHECK_H_
#define SINKHORN_SERVER_ANSWER_CHECK_H_

#include "kernels/problem.h"
#include "server/validate.h"
#include "sinkhorn/v1/sinkhorn.pb.h"

namespace sinkhorn {

// Whether marginal errors and values are finite and no output is NaN. Backends say when a solve diverges; inputs beyond
// what the precision holds (points 1e22 apart in float32) may still break an output that the iterations do not use,
// such as a gradient. A bound may be infinite: it then bounds nothing. So may a potential, of a point without mass.
bool IsAnswer(const Convergence& convergence, const v1::SolveResponse& response, const Prepared& prepared);

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_ANSWER_CHECK_H_
