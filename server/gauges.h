// The gauges of a running server: its state, its queue, its device; and the counters of the scheduler's rounds.
#ifndef SINKHORN_SERVER_GAUGES_H_
#define SINKHORN_SERVER_GAUGES_H_

#include <functional>
#include <memory>
#include <string>

#include "kernels/backend.h"
#include "server/executors.h"
#include "server/load_report.h"
#include "server/metrics.h"
#include "server/scheduler.h"
#include "server/service.h"

namespace sinkhorn {

// Labels of sinkhorn_build_info.
struct BuildInfo {
  std::string version;
  std::string commit;
  bool cuda = false;
};

// `server` and `executors` must outlive the collection of `metrics`.
void AddServerGauges(const SinkhornServer* server, const Executors* executors, const BuildInfo& build,
                     Metrics* metrics);

// What balancers are told: see load_report.h. Both must outlive it.
std::shared_ptr<LoadReport> MakeLoadReport(const Executors* executors, Metrics* metrics);

// To be called after each round of the backend's scheduler. `metrics` must outlive it.
std::function<void(const RoundInfo&)> RoundCounter(const Backend& backend, Metrics* metrics);

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_GAUGES_H_
