// Whether an answer is right, as far as a client can tell without solving the problem itself.
#ifndef SINKHORN_CLIENT_LOADGEN_VERIFY_H_
#define SINKHORN_CLIENT_LOADGEN_VERIFY_H_

#include <cstdint>
#include <string>

#include "client/loadgen/mix.h"
#include "sinkhorn/v1/sinkhorn.pb.h"

namespace sinkhorn::client {

// Returns what is wrong with the answer to a request that MakeRequest(entry, seed, true) made; empty if nothing is.
//
// All outputs are whole and finite. Normalisation: the plan is >= 0, the side scaled last has its marginals, and both
// are as far off as the reply's `convergence` says. Transport: the row and column sums of the plan miss their masses by
// what `convergence` says, and by no more than the tolerance where it says converged.
std::string VerifyAnswer(const MixEntry& entry, const v1::SolveRequest& request, const v1::SolveResponse& response);

// A hash of the outputs, bit by bit, without what may differ between two executions. The server promises the same bits
// whatever else it solves at the time.
uint64_t Fingerprint(const v1::SolveResponse& response);

}  // namespace sinkhorn::client

#endif  // SINKHORN_CLIENT_LOADGEN_VERIFY_H_
