#include "server/config.h"

#include <algorithm>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/commit.h"
#include "server/machine.h"

// ---- Addresses ----
ABSL_FLAG(std::string, listen, "0.0.0.0:8001",
          "Address of the gRPC service, HOST:PORT. Port 0 picks a free one, which the log names.");
ABSL_FLAG(std::string, metrics_listen, "0.0.0.0:8002",
          "Address of /metrics for Prometheus, and of /healthz and /readyz, HOST:PORT. Port 0 picks a free one. Empty: "
          "none.");
ABSL_FLAG(std::string, port_file, "",
          "When ready, write the two ports here, gRPC's and the metrics' (0: none), a line each. Empty: do not.");

// ---- Device ----
ABSL_FLAG(std::string, backend, "auto", "What solves: 'cpu', 'cuda', or 'auto' for the best one present.");
ABSL_FLAG(std::string, devices, "all",
          "CUDA backend: 'all', or indices such as 0,2. Each has a queue of its own, and a request goes to the least "
          "loaded.");
ABSL_FLAG(int, lanes, 2, "CUDA backend: batches in flight on each device, so that copies overlap solves.");
ABSL_FLAG(int64_t, device_memory_bytes, 0,
          "CUDA backend: the most that the server takes of each device's memory. 0: all but 1 GiB.");
ABSL_FLAG(
    int, threads, 0,
    "Threads of the CPU backend. 0: one per core that the process may run on and has CPU time for (cgroup quota).");
ABSL_FLAG(int64_t, kernel_cache_bytes, int64_t{256} << 20,
          "CPU backend: a transport problem whose n * m kernel matrix fits these bytes keeps it in memory; larger ones "
          "recompute it.");

ABSL_FLAG(std::string, inject_fault, "",
          "For tests of what stands around the server: device_lost@N (launch N and later ones), device_memory@N, bug@N "
          "(problem N alone), kernel_trap@N (a real one, in slice N of a GPU), slow_start@DURATION; several separated "
          "by commas. The golden problems count.");

// ---- Queue ----
ABSL_FLAG(int64_t, max_queue_requests, 1024,
          "Requests that may wait for each device; further ones get RESOURCE_EXHAUSTED, QUEUE_FULL.");
ABSL_FLAG(int64_t, max_queue_bytes, int64_t{4} << 30,
          "Bytes of inputs and outputs of all requests, from arrival until the replies are sent.");
ABSL_FLAG(double, max_queue_seconds, 300,
          "Predicted time, on its device, of what would go before a request; beyond it gets RESOURCE_EXHAUSTED, "
          "QUEUE_FULL. An idle device takes any one request.");
ABSL_FLAG(int64_t, max_working_bytes, 0,
          "Bytes of working memory of all requests being solved on a device, on a GPU their tensors too. One is always "
          "let in. 0: 4 GiB on the CPU, three quarters of a GPU's memory.");
ABSL_FLAG(int64_t, max_batch_problems, 1 << 20, "Problems that share a launch. 1: one request at a time.");
ABSL_FLAG(int, max_batch_delay_us, 0,
          "Microseconds that an idle device waits for company. 0: it never does; requests that arrive while it works "
          "are batched anyway.");

// ---- Limits of a request ----
ABSL_FLAG(int64_t, max_points, 1 << 20, "Points n, m of a point cloud.");
ABSL_FLAG(int64_t, max_dimension, 4096, "Dimension d of a point cloud, and columns of apply_v and apply_u.");
ABSL_FLAG(int64_t, max_matrix_elements, int64_t{1} << 28, "Elements n * m of a cost matrix, a plan or logits.");
ABSL_FLAG(int64_t, max_members, 1 << 20, "Problems in one request.");
ABSL_FLAG(int, max_iterations, 100000, "Iterations that a request may ask for.");
ABSL_FLAG(int64_t, max_receive_message_bytes, 256 << 20, "Bytes of a request.");
ABSL_FLAG(int64_t, max_reply_bytes, int64_t{1} << 30, "Bytes of a reply.");

// ---- RPC ----
ABSL_FLAG(
    int, rpc_threads, 0,
    "Threads that receive, decode, encode and send requests. 0: half of the cores, at most 8. On 8 cores and more "
    "each polls its own connections, unless the environment variable GRPC_POLL_STRATEGY says epoll1, which suits "
    "thousands of connections.");
ABSL_FLAG(
    int, io_threads, 0,
    "Threads that decode, check and encode requests too large for these. 0: a quarter of the cores, at least 2, at "
    "most 8.");
ABSL_FLAG(int, keepalive_time_ms, 60000, "Milliseconds after which a silent connection is pinged.");
ABSL_FLAG(absl::Duration, max_connection_age, absl::Minutes(5),
          "Age at which a connection is asked to go, so that clients spread over new replicas. 'inf': never.");
ABSL_FLAG(absl::Duration, max_connection_age_grace, absl::Seconds(60),
          "What calls on such a connection have to finish.");
ABSL_FLAG(bool, reflection, true,
          "Serve gRPC reflection, which lets generic clients discover the service. With --auth_token_file the default "
          "is not to: reflection asks nobody for a token.");
ABSL_FLAG(
    bool, report_load, false,
    "Tell balancers in each call's trailer how loaded this server is (ORCA, endpoint-load-metrics-bin), as gRPC's "
    "and Envoy's client-side weighted round robin want it. Callers can read it.");
ABSL_FLAG(bool, log_requests, false, "Log a line for each request. Errors of the server are logged in any case.");
ABSL_FLAG(
    absl::Duration, slow_request, absl::Seconds(10),
    "Log a line that says where the time went for a request that took longer, but at most one a second. 0: none.");
ABSL_FLAG(std::string, tls_cert, "",
          "Certificate chain, PEM. Set with --tls_key: serve TLS. Reread while serving when it changes.");
ABSL_FLAG(std::string, tls_key, "", "Private key of --tls_cert, PEM.");
ABSL_FLAG(std::string, tls_client_ca, "",
          "Certificates, PEM, by which clients must be signed. Empty: clients need none.");

ABSL_FLAG(
    std::string, auth_token_file, "",
    "File of bearer tokens, one a line: calls need 'authorization: Bearer TOKEN' with one of them, but for health "
    "checks. Reread while serving when it changes. Empty: no call needs any. Without TLS the tokens travel in the "
    "open.");

ABSL_FLAG(
    std::string, tenant_weights, "",
    "File of tenants' weights, one a line: 'cert:SUBJECT WEIGHT', 'token:DIGEST WEIGHT' (first 12 hexadecimal digits "
    "of the token's SHA-256), 'peer:ipv4:ADDRESS WEIGHT', or '* WEIGHT' for those not named. Tenants share devices by "
    "weight, and metrics tell those named apart. Reread while serving when it changes. Empty: all weigh 1.");

// ---- Shutdown ----
ABSL_FLAG(
    absl::Duration, drain_grace, absl::Seconds(10),
    "After SIGTERM: how long requests are still taken while health says NOT_SERVING, for load balancers to notice.");
ABSL_FLAG(absl::Duration, drain_timeout, absl::Seconds(30), "After that: how long accepted requests have to finish.");

namespace sinkhorn {
namespace {

constexpr char kUsage[] =
    "Solves entropic optimal transport problems over gRPC (sinkhorn.v1.SinkhornService).\n\n"
    "  sinkhorn_server --listen=0.0.0.0:8001\n\n"
    "SIGTERM drains and exits 0; a second one exits at once.";

constexpr int64_t kMessageBytesMax = 0x7fffffff;  // gRPC's and protobuf's own limit.

// Collects the first complaint.
class Checker {
 public:
  template <class T>
  T InRange(const absl::Flag<T>& flag, const char* name, T low, T high) {
    const T value = absl::GetFlag(flag);
    if (value < low || value > high) {
      Complain(absl::StrCat("--", name, " must be in [", low, ", ", high, "]; got ", value));
    }
    return value;
  }

  absl::Duration NonNegative(const absl::Flag<absl::Duration>& flag, const char* name) {
    const absl::Duration value = absl::GetFlag(flag);
    if (value < absl::ZeroDuration()) {
      Complain(absl::StrCat("--", name, " must be >= 0; got ", absl::FormatDuration(value)));
    }
    return value;
  }

  std::string Address(const absl::Flag<std::string>& flag, const char* name) {
    std::string value = absl::GetFlag(flag);
    const size_t colon = value.rfind(':');
    int port = -1;
    if (colon == std::string::npos || !absl::SimpleAtoi(value.substr(colon + 1), &port) || port < 0 || port > 65535) {
      Complain(absl::StrCat("--", name, " must be HOST:PORT; got '", value, "'"));
    }
    return value;
  }

  void Complain(std::string complaint) {
    if (status_.ok()) status_ = absl::InvalidArgumentError(complaint);
  }
  const absl::Status& status() const { return status_; }

 private:
  absl::Status status_;
};

#define IN_RANGE(flag, low, high) checker.InRange(FLAGS_##flag, #flag, low, high)

void CheckLimits(Checker& checker, Config* config) {
  constexpr int64_t kMost = int64_t{1} << 40;
  Limits* limits = &config->service.limits;
  limits->max_points = IN_RANGE(max_points, int64_t{1}, kMost);
  limits->max_dimension = IN_RANGE(max_dimension, int64_t{1}, kMost);
  limits->max_matrix_elements = IN_RANGE(max_matrix_elements, int64_t{1}, kMost);
  limits->max_members = IN_RANGE(max_members, int64_t{1}, int64_t{1} << 24);
  limits->max_iterations = IN_RANGE(max_iterations, 1, 1000000000);
  limits->max_reply_bytes = IN_RANGE(max_reply_bytes, int64_t{4096}, kMessageBytesMax);
  config->service.max_receive_message_bytes = IN_RANGE(max_receive_message_bytes, int64_t{4096}, kMessageBytesMax);

  SchedulerOptions* queue = &config->scheduler;
  queue->max_queue_requests = IN_RANGE(max_queue_requests, int64_t{1}, kMost);
  queue->max_queue_bytes = IN_RANGE(max_queue_bytes, int64_t{1}, kMost);
  queue->max_queue_time = absl::Seconds(IN_RANGE(max_queue_seconds, 0.0, 1e9));
  queue->max_working_bytes = IN_RANGE(max_working_bytes, int64_t{0}, kMost);
  queue->max_resident_problems = IN_RANGE(max_batch_problems, int64_t{1}, kMost);
  queue->max_batch_delay = absl::Microseconds(IN_RANGE(max_batch_delay_us, 0, 10000000));
  const int64_t one_request = config->service.max_receive_message_bytes + limits->max_reply_bytes;
  if (checker.status().ok() && queue->max_queue_bytes < one_request) {
    checker.Complain(absl::StrCat(
        "--max_queue_bytes must hold one request: at least max_receive_message_bytes + max_reply_bytes = ", one_request,
        "; got ", queue->max_queue_bytes));
  }
  config->service.queue = *queue;
}

void CheckBackend(Checker& checker, Config* config) {
  config->backend = absl::GetFlag(FLAGS_backend);
  if (config->backend != "auto" && config->backend != "cpu" && config->backend != "cuda") {
    checker.Complain(absl::StrCat("--backend must be auto, cpu or cuda; got '", config->backend, "'"));
  }
  const absl::StatusOr<Faults> faults = ParseFaults(absl::GetFlag(FLAGS_inject_fault));
  if (faults.ok()) {
    config->faults = *faults;
  } else {
    checker.Complain(absl::StrCat("--inject_fault ", faults.status().message()));
  }
  const std::string devices = absl::GetFlag(FLAGS_devices);
  if (devices != "all") {
    for (absl::string_view word : absl::StrSplit(devices, ',')) {
      int index = -1;
      const bool known = absl::SimpleAtoi(word, &index) && index >= 0;
      if (!known || absl::c_linear_search(config->cuda.devices, index)) {
        checker.Complain(absl::StrCat("--devices must be 'all' or different indices >= 0; got '", devices, "'"));
      }
      config->cuda.devices.push_back(index);
    }
  }
  config->cuda.lanes = IN_RANGE(lanes, 1, 64);
  config->cuda.memory_bytes = IN_RANGE(device_memory_bytes, int64_t{0}, int64_t{1} << 50);
  config->cpu.threads = IN_RANGE(threads, 0, 4096);
  if (config->cpu.threads == 0) config->cpu.threads = AvailableCores();
  config->cpu.kernel_cache_bytes = IN_RANGE(kernel_cache_bytes, int64_t{0}, int64_t{1} << 40);
}

void CheckTls(Checker& checker, Config* config) {
  config->tls = {absl::GetFlag(FLAGS_tls_cert), absl::GetFlag(FLAGS_tls_key), absl::GetFlag(FLAGS_tls_client_ca)};
  if (config->tls.certificate.empty() != config->tls.key.empty()) {
    checker.Complain("--tls_cert and --tls_key must be set together");
  }
  if (config->tls.certificate.empty() && !config->tls.client_ca.empty()) {
    checker.Complain("--tls_client_ca needs --tls_cert and --tls_key");
  }
}

// --help shows the flags of this program, and none of the libraries'.
void ConfigureUsage() {
  absl::SetProgramUsageMessage(kUsage);
  absl::FlagsUsageConfig usage;
  const auto is_ours = [](absl::string_view file) { return absl::EndsWith(file, "server/config.cc"); };
  usage.contains_helpshort_flags = is_ours;
  usage.contains_help_flags = is_ours;
  usage.contains_helppackage_flags = is_ours;
  usage.version_string = [] { return absl::StrCat("sinkhorn_server ", kVersion, "\n"); };
  absl::SetFlagsUsageConfig(usage);
}

}  // namespace

absl::StatusOr<Config> ParseConfig(int argc, char** argv) {
  ConfigureUsage();
  const bool asked_for_reflection = std::any_of(argv + 1, argv + argc, [](absl::string_view argument) {
    return absl::StartsWith(argument, "--reflection") || absl::StartsWith(argument, "-reflection");
  });
  const std::vector<char*> rest = absl::ParseCommandLine(argc, argv);
  Checker checker;
  if (rest.size() > 1) checker.Complain(absl::StrCat("takes flags only; got '", rest[1], "'"));

  Config config;
  config.listen = checker.Address(FLAGS_listen, "listen");
  config.metrics_listen = absl::GetFlag(FLAGS_metrics_listen);
  if (!config.metrics_listen.empty()) checker.Address(FLAGS_metrics_listen, "metrics_listen");
  config.port_file = absl::GetFlag(FLAGS_port_file);
  CheckBackend(checker, &config);
  CheckLimits(checker, &config);
  CheckTls(checker, &config);
  config.service.rpc_threads = IN_RANGE(rpc_threads, 0, 256);
  if (config.service.rpc_threads == 0) {
    config.service.rpc_threads = std::min(8, std::max(1, AvailableCores() / 2));
  }
  config.service.threads = IN_RANGE(io_threads, 0, 1024);
  if (config.service.threads == 0) config.service.threads = std::min(8, std::max(2, AvailableCores() / 4));
  config.service.log_requests = absl::GetFlag(FLAGS_log_requests);
  config.service.slow_request = checker.NonNegative(FLAGS_slow_request, "slow_request");
  if (config.service.slow_request == absl::ZeroDuration()) config.service.slow_request = absl::InfiniteDuration();
  config.service.version = kVersion;
  config.service.commit = kCommit;
  config.keepalive_time_ms = IN_RANGE(keepalive_time_ms, 1, 0x7fffffff);
  config.auth_token_file = absl::GetFlag(FLAGS_auth_token_file);
  config.tenant_file = absl::GetFlag(FLAGS_tenant_weights);
  config.reflection = absl::GetFlag(FLAGS_reflection) && (config.auth_token_file.empty() || asked_for_reflection);
  config.report_load = absl::GetFlag(FLAGS_report_load);
  config.drain_grace = checker.NonNegative(FLAGS_drain_grace, "drain_grace");
  config.drain_timeout = checker.NonNegative(FLAGS_drain_timeout, "drain_timeout");
  config.max_connection_age = checker.NonNegative(FLAGS_max_connection_age, "max_connection_age");
  config.max_connection_age_grace = checker.NonNegative(FLAGS_max_connection_age_grace, "max_connection_age_grace");
  if (!checker.status().ok()) return checker.status();
  return config;
}

}  // namespace sinkhorn
