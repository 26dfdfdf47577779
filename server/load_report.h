// What the trailer of a reply tells load balancers that weigh their servers: an ORCA report, as gRPC's and Envoy's
// client-side weighted round robin read it (gRFC A51, A58).
//
//   application_utilization  share of the time that the devices' lanes worked
//   rps_fractional, eps      requests answered, and failed by no fault of their caller, a second
//   cpu_utilization          share of the process' cores
//   named_metrics            backlog_seconds: predicted device time of all that is accepted and not finished
//   request_cost             device_seconds: this request's share of its launches
//
// A balancer's weight is rps over utilization: answers per second of work. All are of the last seconds, fading, and are
// looked up ten times a second at most; between them a report costs the encoding of one number.
#ifndef SINKHORN_SERVER_LOAD_REPORT_H_
#define SINKHORN_SERVER_LOAD_REPORT_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/time/time.h"

namespace sinkhorn {

class LoadReport {
 public:
  static constexpr char kTrailer[] = "endpoint-load-metrics-bin";
  static constexpr absl::Duration kRefresh = absl::Milliseconds(100);
  static constexpr absl::Duration kFading = absl::Seconds(2);  // A second so long ago counts 1/e.

  struct Sources {                            // Called by one thread at a time.
    std::function<double()> busy_seconds;     // Of all lanes since the start.
    std::function<double()> backlog_seconds;  // Now.
    std::function<double()> cpu_seconds;      // Of the process since its start.
    double lanes = 1, cores = 1;
  };
  enum class Outcome { kAnswered, kRefused, kFailed };  // Refused: by its caller's fault or wish.

  LoadReport(Sources sources, absl::Time now);

  // The trailer's value for a request that ends now. Any thread.
  std::string Of(Outcome outcome, double device_seconds, absl::Time now);

 private:
  struct Rates {
    double busy = 0, cpu = 0, answered = 0, failed = 0;
  };
  Rates Totals() const;
  void Refresh(absl::Time now);

  const Sources sources_;
  std::atomic<int64_t> answered_{0}, failed_{0};
  std::atomic<int64_t> due_ns_;
  std::shared_ptr<const std::string> common_;  // The encoded report but for its cost. Read and replaced atomically.
  std::atomic<bool> refreshing_{false};
  // Of the thread that refreshes.
  absl::Time last_;
  Rates totals_, rates_;  // As of `last_`; rates a second.
};

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_LOAD_REPORT_H_
