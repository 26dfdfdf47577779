// The server's flags, parsed and checked. Every flag is documented in `--help`; unknown ones and bad values are errors.
#ifndef SINKHORN_SERVER_CONFIG_H_
#define SINKHORN_SERVER_CONFIG_H_

#include <cstdint>
#include <string>

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

struct Config {
  std::string listen, metrics_listen, port_file, backend;
  CpuBackendOptions cpu;
  Faults faults;
  SchedulerOptions scheduler;
  ServiceOptions service;
  TlsFiles tls;
  absl::Duration drain_grace, drain_timeout;
  absl::Duration max_connection_age, max_connection_age_grace;
  int keepalive_time_ms = 0;
  bool reflection = true;
};

// Parses the command line. Exits by itself, as absl does, on --help, --version, unknown flags and values of the wrong
// type. INVALID_ARGUMENT: a value out of range; the message names the flag, the rule and the value.
absl::StatusOr<Config> ParseConfig(int argc, char** argv);

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_CONFIG_H_
