// Channel arguments and the service config, in one place.
#include "client/cpp/channel.h"

#include <limits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"

namespace sinkhorn::client {
namespace {

// Retries go to the next replica (round robin). All calls of the service are idempotent; a stream is retried only until
// its first reply arrives.
std::string ServiceConfig(int max_attempts) {
  std::string retry;
  if (max_attempts > 1) {
    retry = absl::StrCat(R"(, "retryPolicy": {"maxAttempts": )", max_attempts,
                         R"(, "initialBackoff": "0.1s", "maxBackoff": "5s", "backoffMultiplier": 2,)"
                         R"( "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"]})");
  }
  return absl::StrCat(R"({"loadBalancingConfig": [{"round_robin": {}}],)"
                      R"( "methodConfig": [{"name": [{"service": "sinkhorn.v1.SinkhornService"}])",
                      retry, "}]}");
}

grpc::ChannelArguments Arguments(const ClientOptions& options) {
  const int bytes = static_cast<int>(options.max_message_bytes);
  grpc::ChannelArguments arguments;
  arguments.SetServiceConfigJSON(ServiceConfig(options.max_attempts));
  arguments.SetInt(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, options.max_attempts > 1);
  arguments.SetInt(GRPC_ARG_PER_RPC_RETRY_BUFFER_SIZE, bytes);
  arguments.SetMaxReceiveMessageSize(bytes);
  arguments.SetMaxSendMessageSize(bytes);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, static_cast<int>(absl::ToInt64Milliseconds(options.keepalive_time)));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                   static_cast<int>(absl::ToInt64Milliseconds(options.keepalive_timeout)));
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // Or it stops after two, in the midst of a long solve.
  // gRPC's defaults, 1 s growing to 2 minutes and 20 s for an attempt, would find a restarted server late.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5000);  // For an attempt: handshakes on a busy machine take long.
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, options.private_connections);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, options.use_http_proxy);
  arguments.SetUserAgentPrefix("sinkhorn-client-cpp");
  if (options.tls && !options.tls->server_name.empty()) {
    arguments.SetSslTargetNameOverride(options.tls->server_name);
  }
  return arguments;
}

std::shared_ptr<grpc::ChannelCredentials> Credentials(const ClientOptions& options) {
  if (!options.tls) return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions ssl;
  ssl.pem_root_certs = options.tls->root_certificates;
  ssl.pem_cert_chain = options.tls->certificate;
  ssl.pem_private_key = options.tls->private_key;
  return grpc::SslCredentials(ssl);
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::Channel>> CreateChannel(const std::string& target, const ClientOptions& options) {
  if (target.empty()) return absl::InvalidArgumentError("target must be host:port; got an empty string");
  if (options.max_attempts < 1 || options.max_attempts > 5) {
    return absl::InvalidArgumentError(absl::StrCat("max_attempts must be in [1, 5]; got ", options.max_attempts));
  }
  if (options.max_message_bytes < 1 || options.max_message_bytes > std::numeric_limits<int>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_message_bytes must be in [1, 2^31); got ", options.max_message_bytes));
  }
  return grpc::CreateCustomChannel(target, Credentials(options), Arguments(options));
}

}  // namespace sinkhorn::client
