// Encodes a request without copying its tensors: the wire bytes refer to the request's own memory.
//
// Generated code copies each tensor into fresh memory, which for large ones costs more than sending them (64 MiB, pages
// touched for the first time: see the commit for figures).
#ifndef SINKHORN_CLIENT_CPP_ENCODE_H_
#define SINKHORN_CLIENT_CPP_ENCODE_H_

#include "grpcpp/support/byte_buffer.h"
#include "sinkhorn/v1/sinkhorn.pb.h"

namespace sinkhorn::client {

// Takes `request`, which lives until gRPC has released the last of the bytes: that may be after the call has ended. The
// bytes are those of SerializeToString. REQUIRES: they are fewer than 2^31.
grpc::ByteBuffer EncodeInPlace(v1::SolveRequest request);

}  // namespace sinkhorn::client

#endif  // SINKHORN_CLIENT_CPP_ENCODE_H_
