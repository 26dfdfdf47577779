// The flags that say which server is meant and how it is reached; the same for all client programs:
//   --server --auth_token_file --tls --tls_root_cert --tls_cert --tls_key --tls_server_name
#ifndef SINKHORN_CLIENT_CLI_CONNECTION_H_
#define SINKHORN_CLIENT_CLI_CONNECTION_H_

#include <string>

#include "absl/status/statusor.h"
#include "client/cpp/channel.h"

namespace sinkhorn::client {

// --server, or $SINKHORN_ADDRESS where the flag is not given.
std::string ServerTarget();

// Reads the files that the flags name. Any error: a file that cannot be read, or flags that do not go together.
absl::StatusOr<ClientOptions> ConnectionOptions();

}  // namespace sinkhorn::client

#endif  // SINKHORN_CLIENT_CLI_CONNECTION_H_
