// What all calls of the service share: the parts it is made of, its state, its threads, its counters. Private to the
// service.
#ifndef SINKHORN_SERVER_SERVICE_CONTEXT_H_
#define SINKHORN_SERVER_SERVICE_CONTEXT_H_

#include <grpcpp/grpcpp.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unsupported/Eigen/CXX11/ThreadPool>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/executors.h"
#include "server/log.h"
#include "server/metrics.h"
#include "server/scheduler.h"
#include "server/service.h"
#include "server/status.h"
#include "server/tenants.h"

namespace sinkhorn {

constexpr char kSolveMethod[] = "sinkhorn.v1.SinkhornService/Solve";
constexpr char kSolveStreamMethod[] = "sinkhorn.v1.SinkhornService/SolveStream";
constexpr char kGetServerInfoMethod[] = "sinkhorn.v1.SinkhornService/GetServerInfo";

// What a solved problem of one kind is counted by.
struct SolvedMetrics {
  Counter* outcomes[kStopReasons];  // By StopReason.
  Histogram* iterations;
  Histogram* marginal_error;
};

// What a tenant's requests are counted by.
struct TenantMetrics {
  TenantMetrics(Metrics* metrics, const std::string& label);
  Counter* const answered;
  Counter* const refused;  // Before they were queued.
  Counter* const failed;
  Counter* const device_seconds;
  Histogram* const queue_seconds;
};

// A share of the bytes that the server holds for its clients. Given back when it goes.
class HeldBytes {
 public:
  HeldBytes() = default;
  HeldBytes(HeldBytes&& other) noexcept : total_(std::move(other.total_)), bytes_(other.bytes_) {}
  ~HeldBytes() {
    if (total_ != nullptr) total_->fetch_sub(bytes_);
  }

 private:
  friend class ServiceContext;
  std::shared_ptr<std::atomic<int64_t>> total_;  // Replies may be sent, and freed, after all else is gone.
  int64_t bytes_ = 0;
};

class ServiceContext {
 public:
  ServiceContext(const Executors* executors, Metrics* metrics, const ServiceOptions& options);

  // Runs `work` on the pool. False: too much waits for it already, and `work` was not taken.
  bool TrySchedule(std::function<void()> work);
  // Takes `bytes` for a request or a reply, from its arrival or planning until its memory is freed. False: too many are
  // held already. REQUIRES: `held` holds none.
  bool TryHold(int64_t bytes, HeldBytes* held);
  int64_t held_bytes() const { return held_->load(); }
  // Reports that the device is lost: once.
  void DeviceLost();
  bool device_lost() const { return device_lost_.load(); }
  // Whether the caller may call. If not, that is counted and logged, but not more than once a second.
  bool Allow(const grpc::ServerContextBase& rpc);
  // Whose call it is. REQUIRES: it is allowed.
  Tenant TenantOf(const grpc::ServerContextBase& rpc);
  // Tells the caller's balancer about the load: in the trailer of a call that ends so, after so much work.
  void ReportLoad(grpc::StatusCode code, double device_seconds, grpc::ServerContextBase* rpc);
  const TenantMetrics& MetricsOf(const Tenant& tenant);
  // Counts a finished Solve call.
  void CallFinished(grpc::StatusCode code, absl::Duration duration);
  // Logs a bug of ours and makes the error that refers to it.
  Error Incident(absl::string_view request_id, absl::string_view what);

  const Executors* const executors;
  Metrics* const metrics;
  const ServiceOptions options;
  const absl::Time started = absl::Now();
  std::atomic<ServiceState> state{ServiceState::kWarming};
  std::atomic<int64_t> in_flight{0};
  std::atomic<int64_t> arrivals{0};  // Requests so far, refused ones too.
  LogThrottle slow;
  Counter* const solve_started;
  Histogram* const solve_ok_seconds;
  Histogram* const decode_seconds;
  Histogram* const queue_seconds;
  Histogram* const h2d_seconds;
  Histogram* const solve_seconds;
  Histogram* const d2h_seconds;
  Histogram* const encode_seconds;
  SolvedMetrics solved[3];  // By ProblemKind.

 private:
  std::atomic<int64_t> pending_{0};
  const std::shared_ptr<std::atomic<int64_t>> held_ = std::make_shared<std::atomic<int64_t>>(0);
  std::atomic<bool> device_lost_{false};
  LogThrottle strangers_;
  std::atomic<uint64_t> next_incident_;
  std::mutex tenants_mutex_;  // Of making the next of these.
  std::array<std::unique_ptr<const TenantMetrics>, Tenants::kLabels> tenants_made_;
  std::array<std::atomic<const TenantMetrics*>, Tenants::kLabels> tenants_{};  // By label; null: not made yet.
  Eigen::ThreadPool pool_;  // Last: its threads end before anything else goes.
};

// Labels of the metrics.
const char* KindName(ProblemKind kind);
const char* OutcomeName(StopReason reason);
const char* GrpcCodeName(grpc::StatusCode code);  // "OK", "INVALID_ARGUMENT" and so on.

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_SERVICE_CONTEXT_H_
