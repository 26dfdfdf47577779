// The server's flags, parsed and checked. Every flag is documented in `--help`; unknown ones and bad values are errors.
#ifndef SINKHORN_SERVER_CONFIG_H_
#define SINKHORN_SERVER_CONFIG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/fault.h"
#include "server/scheduler.h"
#include "server/service.h"

namespace sinkhorn {

constexpr char kVersion[] = "0.1.0";

struct TlsFiles {
  std::string certificate, key, client_ca;  // Empty certificate: no TLS. Empty client_ca: clients need no certificate.
};

// Of the CUDA backend, in words that every build knows.
struct CudaFlags {
  std::vector<int> devices;  // CUDA's indices; empty: all.
  int lanes = 2;
  int64_t memory_bytes = 0;  // 0: all but a reserve.
};

struct Config {
  std::string listen, metrics_listen, port_file, backend;
  CpuBackendOptions cpu;
  CudaFlags cuda;
  Faults faults;
  SchedulerOptions scheduler;  // max_working_bytes 0: by the device.
  ServiceOptions service;
  TlsFiles tls;
  std::string auth_token_file;  // Empty: calls need no token.
  std::string tenant_file;      // Empty: all tenants weigh the same.
  absl::Duration drain_grace, drain_timeout;
  absl::Duration max_connection_age, max_connection_age_grace;
  int keepalive_time_ms = 0;
  bool reflection = true;
  bool report_load = false;
};

// Parses the command line. Exits by itself, as absl does, on --help, --version, unknown flags and values of the wrong
// type. INVALID_ARGUMENT: a value out of range; the message names the flag, the rule and the value.
absl::StatusOr<Config> ParseConfig(int argc, char** argv);

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_CONFIG_H_
