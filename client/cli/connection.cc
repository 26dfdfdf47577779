#include "client/cli/connection.h"

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

ABSL_FLAG(std::string, server, "",
          "The server, host:port, dns:///name:port (all its addresses, in turn) or unix:/path. Default: "
          "$SINKHORN_ADDRESS, or 127.0.0.1:8001.");
ABSL_FLAG(std::string, auth_token_file, "", "File with the token that is sent as `authorization: Bearer`.");
ABSL_FLAG(bool, tls, false, "Encrypt the connection. Implied by the other --tls flags.");
ABSL_FLAG(std::string, tls_root_cert, "", "PEM file of the authorities to trust. Default: the system's.");
ABSL_FLAG(std::string, tls_cert, "", "PEM file of the client's own certificate, if the server asks for one.");
ABSL_FLAG(std::string, tls_key, "", "PEM file of its private key.");
ABSL_FLAG(std::string, tls_server_name, "",
          "Name expected in the server's certificate. Default: the host of --server.");

namespace sinkhorn::client {
namespace {

// Contents of the file that `path` names; empty for an empty path.
absl::Status ReadOptional(const std::string& path, std::string* contents) {
  if (path.empty()) return absl::OkStatus();
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path));
  std::stringstream buffer;
  buffer << file.rdbuf();
  *contents = buffer.str();
  return absl::OkStatus();
}

}  // namespace

std::string ServerTarget() {
  if (std::string target = absl::GetFlag(FLAGS_server); !target.empty()) return target;
  const char* environment = std::getenv("SINKHORN_ADDRESS");
  return environment != nullptr && *environment != '\0' ? environment : "127.0.0.1:8001";
}

absl::StatusOr<ClientOptions> ConnectionOptions() {
  ClientOptions options;
  TlsOptions tls;
  tls.server_name = absl::GetFlag(FLAGS_tls_server_name);
  const struct {
    std::string path;
    std::string* contents;
  } files[] = {{absl::GetFlag(FLAGS_auth_token_file), &options.auth_token},
               {absl::GetFlag(FLAGS_tls_root_cert), &tls.root_certificates},
               {absl::GetFlag(FLAGS_tls_cert), &tls.certificate},
               {absl::GetFlag(FLAGS_tls_key), &tls.private_key}};
  for (const auto& file : files) {
    if (absl::Status status = ReadOptional(file.path, file.contents); !status.ok()) return status;
  }
  absl::StripAsciiWhitespace(&options.auth_token);
  if (tls.certificate.empty() != tls.private_key.empty()) {
    return absl::InvalidArgumentError("--tls_cert and --tls_key go together");
  }
  const bool any = !tls.root_certificates.empty() || !tls.certificate.empty() || !tls.server_name.empty();
  if (any || absl::GetFlag(FLAGS_tls)) options.tls = tls;
  return options;
}

}  // namespace sinkhorn::client
