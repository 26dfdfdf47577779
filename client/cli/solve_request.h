// The flags of `sinkhorn solve` that state the problem, and the request they make. Each flag is a field of the
// contract, under the field's own name; a flag that is not given leaves its field unset, so the server's defaults hold.
#ifndef SINKHORN_CLIENT_CLI_SOLVE_REQUEST_H_
#define SINKHORN_CLIENT_CLI_SOLVE_REQUEST_H_

#include <string>

#include "absl/status/statusor.h"
#include "sinkhorn/v1/sinkhorn.pb.h"

namespace sinkhorn::client {

// The problem is the one whose inputs are given: --logits (or --plan), --cost, or --x and --y. Reads the arrays that
// the flags name. Any error: a flag or file that is wrong; whether the problem itself is sound is for the server to
// say.
absl::StatusOr<v1::SolveRequest> RequestFromFlags();

// One line for people: "point_cloud: x [400, 3] float32, y [500, 3] float32".
std::string DescribeRequest(const v1::SolveRequest& request);

// "[400, 3] float32"
std::string DescribeTensor(const v1::Tensor& tensor);

}  // namespace sinkhorn::client

#endif  // SINKHORN_CLIENT_CLI_SOLVE_REQUEST_H_
