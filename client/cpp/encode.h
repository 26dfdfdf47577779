// Encodes a request without copying its tensors: the wire bytes refer to the request's own memory.
//
// Generated code copies each tensor into fresh memory, whose pages are touched for the first time. A call with a 64 MiB
// request, beyond the solve: 123 ms by copy, 84 ms in place; 1 MiB: 1.5 and 0.6 ms (two busy cores, loopback).
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
