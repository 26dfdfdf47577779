// What the server tells Prometheus: every name in one place, with its help text.
//
// Seconds are in gRPC's A66 buckets, 10 us to 100 s. Labels have few values and never come from users.
#ifndef SINKHORN_SERVER_METRICS_H_
#define SINKHORN_SERVER_METRICS_H_

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "prometheus/collectable.h"
#include "prometheus/metric_family.h"
#include "server/instrument.h"

namespace sinkhorn {

class Metrics : public prometheus::Collectable {
 public:
  Metrics();

  // RPCs.
  Family<Counter> calls_started;   // {grpc_method}
  Family<Histogram> call_seconds;  // {grpc_method, grpc_status}

  // Requests: each Solve call and each problem of a stream.
  Family<Counter> requests_rejected;      // {reason}
  Family<Counter> requests_abandoned;     // {stage, cause}
  Family<Counter> wasted_device_seconds;  // {cause}
  Family<Histogram> stage_seconds;        // {stage}: decode, queue, h2d, solve, d2h, encode
  Family<Counter> outcomes;               // {problem, outcome}
  Family<Histogram> iterations;           // {problem}
  Family<Histogram> marginal_error;       // {problem}

  // The same by tenant: those that the file of weights names, and "other".
  Family<Counter> tenant_requests;         // {tenant, outcome}: answered, refused, failed
  Family<Counter> tenant_device_seconds;   // {tenant}
  Family<Histogram> tenant_queue_seconds;  // {tenant}

  // The device.
  Family<Counter> batches;              // {device, family}
  Family<Histogram> batch_problems;     // {family}
  Family<Counter> device_busy_seconds;  // {device}

  using Labels = std::vector<std::pair<std::string, std::string>>;
  // A gauge whose value is asked for at each collection. All of one name are added in a row.
  void AddGauge(std::string name, std::string help, Labels labels, std::function<double()> value);

  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  struct Gauge {
    std::string name, help;
    Labels labels;
    std::function<double()> value;
  };
  void CollectGauges(std::vector<prometheus::MetricFamily>* families) const;

  mutable std::mutex mutex_;
  std::vector<Gauge> gauges_;
};

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_METRICS_H_
