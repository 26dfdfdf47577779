// Generates load and measures it.
//
// Closed loop: `clients` callers, each sending its next request when the last is answered. Open loop: requests arrive
// at random (Poisson) at `rate` per second whether the server keeps up or not, and a latency counts from the moment the
// request should have been sent: a server that stalls cannot hide it (no "coordinated omission").
//
// A request is a call of Solve, or goes over a stream that others are on, too; it is asked and measured alike.
//
// Few threads, requests encoded beforehand and replies hardly decoded, so that the generator's own cost stays small; it
// is reported.
#ifndef SINKHORN_CLIENT_LOADGEN_LOAD_H_
#define SINKHORN_CLIENT_LOADGEN_LOAD_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/channel.h"
#include "client/loadgen/histogram.h"
#include "client/loadgen/mix.h"

namespace sinkhorn::client {

struct LoadOptions {
  std::string target;
  ClientOptions connection;
  std::vector<MixEntry> mix;
  int clients = 1;                              // Closed loop: callers.
  double rate = 0;                              // Open loop: requests per second; 0: closed loop.
  int64_t max_in_flight = 10'000;               // Open loop: a request that would be one more is counted as not sent.
  absl::Duration warmup = absl::Seconds(1);     // Not measured.
  absl::Duration duration = absl::Seconds(10);  // Measured; ends earlier after `requests`.
  int64_t requests = 0;                         // Measured requests; 0: no bound.
  absl::Duration deadline = absl::InfiniteDuration();  // Of each request.
  absl::Duration drain = absl::Seconds(30);  // Requests still unanswered this long after the end are cancelled.
  absl::Duration connect_timeout = absl::Seconds(10);  // Until the server is there and ready.
  int connections = 1;
  bool stream = false;  // Over SolveStream, one stream for each connection. REQUIRES: no `deadline`.
  int threads = 1;
  int payloads = 8;  // Different inputs per entry of the mix.
  bool verify = false;
  uint64_t seed = 1;
};

// One entry of the mix, or all of them. Times in ns.
struct LoadStats {
  Histogram latency;
  Histogram queue, transfer, compute;     // As the server says (`execution`).
  Histogram outside;                      // The rest: network, encoding, both ends' threads.
  Histogram batch;                        // `batch_problem_count`.
  int64_t problems = 0;                   // Members of answered requests.
  int64_t iteration_limit = 0;            // Answers that stopped there rather than at a tolerance.
  int64_t iterations = 0;                 // Summed over the answers.
  std::map<std::string, int64_t> errors;  // "CODE" or "CODE/REASON" to count.

  void Merge(const LoadStats& other);
};

struct LoadResult {
  std::vector<LoadStats> entries;  // As in the mix.
  LoadStats all;
  double seconds = 0;              // From the end of the warm-up to the last answer.
  int64_t not_sent = 0;            // Open loop: max_in_flight was reached.
  Histogram start_delay;           // Open loop: how late the generator itself was, ns. Part of the latencies.
  double cpu_seconds = 0;          // The generator's own, over all of the run.
  int64_t call_count = 0;          // Over all of the run.
  std::vector<std::string> wrong;  // What --verify found; at most 20.
  int64_t wrong_count = 0;
};

// Runs the load; returns when all requests are answered or cancelled. Errors of requests are part of the result.
// DEADLINE_EXCEEDED: the server is not ready within `connect_timeout`.
absl::StatusOr<LoadResult> RunLoad(const LoadOptions& options);

}  // namespace sinkhorn::client

#endif  // SINKHORN_CLIENT_LOADGEN_LOAD_H_
