// Replies as the load generator reads them.
#ifndef SINKHORN_CLIENT_LOADGEN_REPLY_H_
#define SINKHORN_CLIENT_LOADGEN_REPLY_H_

#include <string>

#include "absl/status/status.h"
#include "grpcpp/support/byte_buffer.h"
#include "sinkhorn/v1/sinkhorn.pb.h"

namespace sinkhorn::client {

// How much of a SolveResponse is read: `convergence` and `execution`, while tensors are skipped; or all of it.
enum class ReplyPart { kSummary, kAll };

// A SolveResponse. INTERNAL: it cannot be decoded.
absl::Status ReadReply(grpc::ByteBuffer* reply, ReplyPart part, v1::SolveResponse* response);

// A SolveStreamResponse: the request's id, and its answer. The problem's error if it has one; INTERNAL: it cannot be
// decoded, or has neither.
absl::Status ReadStreamReply(grpc::ByteBuffer* reply, ReplyPart part, std::string* request_id,
                             v1::SolveResponse* response);

}  // namespace sinkhorn::client

#endif  // SINKHORN_CLIENT_LOADGEN_REPLY_H_
