// A channel as this service wants it: large messages, retries that honour the server's pushback, round robin over
// replicas, keepalive. gRPC's own defaults refuse replies beyond 4 MiB and never retry a request beyond 256 KiB.
#ifndef SINKHORN_CLIENT_CPP_CHANNEL_H_
#define SINKHORN_CLIENT_CPP_CHANNEL_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "grpcpp/channel.h"

namespace sinkhorn::client {

// Encryption; PEM texts. An empty `root_certificates` means the system's.
struct TlsOptions {
  std::string root_certificates;
  std::string certificate;  // The client's own, for servers that ask for one; with `private_key`.
  std::string private_key;
  std::string server_name;  // Expected in the server's certificate, if it is not the target's host.
};

struct ClientOptions {
  // Attempts of a call that fails with UNAVAILABLE or RESOURCE_EXHAUSTED, the first included; 1: no retries. The
  // server's pushback, where it sends one, sets the wait. In [1, 5].
  int max_attempts = 5;
  // Largest message either way, and the bytes of a channel's requests that are kept for retries. Below 2^31.
  int64_t max_message_bytes = (int64_t{1} << 31) - 1;
  // After a silence of `keepalive_time` during a call the connection is probed, and given up `keepalive_timeout` later.
  // The server closes connections that are probed more often than every 10 s.
  absl::Duration keepalive_time = absl::Seconds(60);
  absl::Duration keepalive_timeout = absl::Seconds(20);
  // A call waits for a connection (until its deadline) instead of failing while there is none.
  bool wait_for_ready = false;
  // Connections of its own, shared with no other channel of this process.
  bool private_connections = false;
  // Follows http_proxy and its relatives in the environment.
  bool use_http_proxy = false;
  // Unset: no encryption.
  absl::optional<TlsOptions> tls;
  // Sent as `authorization: Bearer TOKEN` with every call.
  std::string auth_token;
};

// Makes a channel to `target`: "host:port", "dns:///name:port" (all its addresses), "unix:/path". Connects at the first
// call. INVALID_ARGUMENT: an empty target or an option out of range.
absl::StatusOr<std::shared_ptr<grpc::Channel>> CreateChannel(const std::string& target, const ClientOptions& options);

}  // namespace sinkhorn::client

#endif  // SINKHORN_CLIENT_CPP_CHANNEL_H_
