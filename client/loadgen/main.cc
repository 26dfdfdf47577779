// sinkhorn_loadgen: load for a Sinkhorn server, and what it does to the latencies.
//
//   sinkhorn_loadgen --clients=64 --mix=normalization:32x4x4:20
//   sinkhorn_loadgen --rate=2000 --mix=normalization:32x4x4:20=0.9,point_cloud:256x256x64:10=0.1 --verify
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "client/cli/connection.h"
#include "client/cli/exit_codes.h"
#include "client/cpp/errors.h"
#include "client/loadgen/load.h"
#include "client/loadgen/load_report.h"

ABSL_FLAG(std::string, mix, "normalization:32x4x4:20",
          "Problems, separated by commas: KIND:SHAPE[:ITERATIONS][:OPTION...][=WEIGHT]. KIND: normalization, dense, "
          "point_cloud. SHAPE: [BATCHx]NxM, point clouds [BATCHx]NxMxD. OPTION: epsilon=0.1, tolerance=1e-6, "
          "dtype=float16, recipe=exact, double, fast, symmetric, debias, gradient, plan, value, marginals.");
ABSL_FLAG(int, clients, 8, "Closed loop: callers, each sending its next request when the last is answered.");
ABSL_FLAG(double, rate, 0,
          "Open loop instead: requests per second, Poisson arrivals. Latency counts from the moment a request should "
          "have been sent.");
ABSL_FLAG(absl::Duration, duration, absl::Seconds(10), "Time measured, after the warm-up.");
ABSL_FLAG(int64_t, requests, 0, "Ends earlier, after so many measured requests; 0: no such bound.");
ABSL_FLAG(absl::Duration, warmup, absl::Seconds(1), "Time before the measurement.");
ABSL_FLAG(int64_t, deadline_ms, 0, "Deadline of each request; 0: none.");
ABSL_FLAG(int64_t, max_in_flight, 10'000, "Open loop: further requests are counted as not sent.");
ABSL_FLAG(int, connections, 0, "TCP connections. 0: one per client, at most 8 (open loop: 8).");
ABSL_FLAG(bool, stream, false,
          "Send over SolveStream, one stream for each connection, rather than by a call of Solve for each request. "
          "Nothing is retried.");
ABSL_FLAG(int, threads, 1, "Threads that send and receive (open loop: one more each that keeps time).");
ABSL_FLAG(int, payloads, 8, "Different random inputs per problem of the mix.");
ABSL_FLAG(uint64_t, seed, 1, "Of the inputs, the mix and the arrivals.");
ABSL_FLAG(int, max_attempts, 1, "Attempts per request; above 1, the channel retries what the server pushes back.");
ABSL_FLAG(
    bool, verify, false,
    "Check every answer: marginals against the reply's certificate, and the same bits for the same input. Costs CPU.");
ABSL_FLAG(bool, json, false, "Print one JSON object instead of the table.");

namespace sinkhorn::client {
namespace {

absl::StatusOr<LoadOptions> OptionsFromFlags() {
  absl::StatusOr<std::vector<MixEntry>> mix = ParseMix(absl::GetFlag(FLAGS_mix));
  if (!mix.ok()) return absl::InvalidArgumentError(absl::StrCat("--mix ", mix.status().message()));
  absl::StatusOr<ClientOptions> connection = ConnectionOptions();
  if (!connection.ok()) return connection.status();
  connection->max_attempts = absl::GetFlag(FLAGS_max_attempts);

  LoadOptions options;
  options.target = ServerTarget();
  options.connection = *std::move(connection);
  options.mix = *std::move(mix);
  options.clients = absl::GetFlag(FLAGS_clients);
  options.rate = absl::GetFlag(FLAGS_rate);
  options.max_in_flight = absl::GetFlag(FLAGS_max_in_flight);
  options.warmup = absl::GetFlag(FLAGS_warmup);
  options.duration = absl::GetFlag(FLAGS_duration);
  options.requests = absl::GetFlag(FLAGS_requests);
  if (absl::GetFlag(FLAGS_deadline_ms) > 0) options.deadline = absl::Milliseconds(absl::GetFlag(FLAGS_deadline_ms));
  options.connections = absl::GetFlag(FLAGS_connections);
  if (options.connections == 0) options.connections = options.rate > 0 ? 8 : std::min(8, options.clients);
  options.stream = absl::GetFlag(FLAGS_stream);
  options.threads = absl::GetFlag(FLAGS_threads);
  options.payloads = absl::GetFlag(FLAGS_payloads);
  options.verify = absl::GetFlag(FLAGS_verify);
  options.seed = absl::GetFlag(FLAGS_seed);
  if (options.clients < 1 || options.threads < 1 || options.payloads < 1 || options.connections < 1) {
    return absl::InvalidArgumentError("--clients, --threads, --payloads and --connections must be >= 1");
  }
  if (options.stream && options.deadline != absl::InfiniteDuration()) {
    return absl::InvalidArgumentError("--deadline_ms and --stream exclude each other: a deadline is all of a stream's");
  }
  if (!(options.rate >= 0) || options.duration > absl::Hours(24) || options.duration <= absl::ZeroDuration() ||
      options.warmup < absl::ZeroDuration() || options.warmup > absl::Hours(1)) {
    return absl::InvalidArgumentError("--rate must be >= 0, --duration in (0, 24h] and --warmup in [0, 1h]");
  }
  return options;
}

int Main(int argc, char** argv) {
  absl::FlagsUsageConfig config;
  const auto ours = [](absl::string_view file) { return absl::StrContains(file, "client/"); };
  config.contains_helpshort_flags = config.contains_help_flags = config.contains_helppackage_flags = ours;
  absl::SetFlagsUsageConfig(config);
  absl::SetProgramUsageMessage(
      "puts load on a Sinkhorn server and measures latencies.\n\n"
      "  sinkhorn_loadgen --clients=64 --mix=normalization:32x4x4:20\n"
      "  sinkhorn_loadgen --rate=2000 --mix=normalization:32x4x4:20=0.9,point_cloud:256x256x64:10=0.1 --verify\n\n"
      "Exit codes: 0 measured; 1 wrong command line; 2 --verify found a wrong answer; 3 no request was answered.");
  if (absl::ParseCommandLine(argc, argv).size() > 1) {
    std::fprintf(stderr, "sinkhorn_loadgen: unexpected argument: all options are flags, see --help\n");
    return kExitUsage;
  }
  const absl::StatusOr<LoadOptions> options = OptionsFromFlags();
  if (!options.ok()) {
    std::fprintf(stderr, "sinkhorn_loadgen: %s\n", std::string(options.status().message()).c_str());
    return kExitUsage;
  }
  const absl::StatusOr<LoadResult> result = RunLoad(*options);
  if (!result.ok()) {
    std::fprintf(stderr, "sinkhorn_loadgen: %s: %s\n", options->target.c_str(), Describe(result.status()).c_str());
    return kExitUnavailable;
  }
  const std::string report = absl::GetFlag(FLAGS_json) ? LoadJson(*options, *result) : LoadText(*options, *result);
  std::fputs(report.c_str(), stdout);
  if (result->wrong_count > 0) return kExitRefused;
  return result->all.latency.count() == 0 ? kExitUnavailable : kExitOk;
}

}  // namespace
}  // namespace sinkhorn::client

int main(int argc, char** argv) {
  // Each thread waits for its own connections alone: with gRPC's default, epoll1, one thread at a time waits for all
  // and hands events on (16 cores, 6 threads: 61 us of CPU per request, 30 us so).
  setenv("GRPC_POLL_STRATEGY", "poll", /*overwrite=*/0);
  // The packaged abseil is built with its debug default on: each lock taken would search a graph of all locks held.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  return sinkhorn::client::Main(argc, argv);
}
