// Turns a SolveRequest into a kernels Problem, or says which field is wrong. Only this file knows what is legal; past
// it, code relies on it.
//
// Order of the checks: options, shapes, lengths and limits first, from the message alone and with products that cannot
// overflow; then scans of the data; then, when nothing can go wrong any more, the memory of the outputs.
#ifndef SINKHORN_SERVER_VALIDATE_H_
#define SINKHORN_SERVER_VALIDATE_H_

#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "kernels/problem.h"
#include "server/block.h"
#include "server/status.h"
#include "server/wire.h"
#include "sinkhorn/v1/sinkhorn.pb.h"

namespace sinkhorn {

// Above these a request is refused with PROBLEM_TOO_LARGE.
struct Limits {
  int64_t max_points = 1 << 20;                    // n, m of a point cloud.
  int64_t max_dimension = 4096;                    // d, and the columns of apply_v and apply_u.
  int64_t max_matrix_elements = int64_t{1} << 28;  // n * m of a cost matrix, a plan or logits, of one member.
  int64_t max_members = 1 << 20;                   // Members of a request.
  int64_t max_iterations = 100000;
  int64_t max_reply_bytes = int64_t{1} << 30;
};

constexpr int kMaxRank = 32;  // Dimensions of a tensor.
constexpr int kMaxRequestIdBytes = 128;

// A validated request: the problem, and the memory of its answer.
struct Prepared {
  Problem problem;                   // Inputs view the request's bytes; outputs view the fields below.
  std::vector<ReplyTensor> tensors;  // Outputs that are tensors, all in `block`.
  Block block;                       // Uninitialised.
  size_t block_bytes = 0;
  std::vector<Convergence> members;         // For OUTPUT_MEMBERS, else empty.
  std::vector<HessianConvergence> hessian;  // Of each member, with Hessian-vector products.
  int64_t bytes = 0;                        // Inputs and outputs, for the queue's accounting.
};

// Validates `request`, which was decoded from `bytes` (server/wire.h). On success fills `prepared`, and `response` with
// room for the per-member values, which are written in place; both and `bytes` must outlive the solve. Else says what
// is wrong: INVALID_FIELD, PROBLEM_TOO_LARGE, or DEVICE_MEMORY if there is no memory for the outputs.
absl::optional<Error> Validate(absl::string_view bytes, const v1::SolveRequest& request, const Limits& limits,
                               Prepared* prepared, v1::SolveResponse* response);

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_VALIDATE_H_
