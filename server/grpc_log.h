// gRPC's own messages, such as failed TLS handshakes, as lines of the server's log.
//
//   {"time":"...","severity":"WARNING","event":"grpc","where":"ssl_transport_security.cc:1501","message":"..."}
#ifndef SINKHORN_SERVER_GRPC_LOG_H_
#define SINKHORN_SERVER_GRPC_LOG_H_

namespace sinkhorn {

// Call once, before gRPC is used. GRPC_VERBOSITY decides what gRPC says, as ever; its errors are warnings here, since a
// stranger's bad handshake is among them and nothing of ours has failed.
void ForwardGrpcLog();

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_GRPC_LOG_H_
