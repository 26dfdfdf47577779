// The standard grpc.health.v1 service. Names: "" and "sinkhorn.v1.SinkhornService" tell whether to send solves here;
// "liveness" is SERVING as long as the process answers, whatever the load and while it drains. Other names are unknown:
// NOT_FOUND from Check, SERVICE_UNKNOWN from Watch.
//
// Our own, because gRPC's built-in one says SERVING as soon as the server starts and cannot leave one name out of a
// shutdown.
#ifndef SINKHORN_SERVER_HEALTH_H_
#define SINKHORN_SERVER_HEALTH_H_

#include <grpcpp/grpcpp.h>

#include <set>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "server/rpc_loop.h"
#include "server/rpc_small.h"

namespace sinkhorn {

class HealthService final : public grpc::health::v1::Health::AsyncService, public LoopService {
 public:
  void ExpectCalls(RpcLoop* loop) override;

  // Not ready at first. Every Watch of a readiness name is told of the change.
  void SetReady(bool ready) ABSL_LOCKS_EXCLUDED(mutex_);

  // Ends all Watch calls, so that the server can shut down; later ones end at once.
  void Shutdown() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  class Watcher;
  using Status = grpc::health::v1::HealthCheckResponse::ServingStatus;

  grpc::Status Check(const std::string& name, grpc::health::v1::HealthCheckResponse* response)
      ABSL_LOCKS_EXCLUDED(mutex_);
  Status StatusOf(const std::string& name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Add(Watcher* watcher) ABSL_LOCKS_EXCLUDED(mutex_);
  void Remove(Watcher* watcher) ABSL_LOCKS_EXCLUDED(mutex_);

  const SmallMethod<grpc::health::v1::HealthCheckRequest, grpc::health::v1::HealthCheckResponse> check_{
      [this](auto* rpc, auto* request, auto* responder, auto* queue, void* tag) {
        RequestCheck(rpc, request, responder, queue, queue, tag);
      },
      [this](const auto&, const auto& request, auto* response) { return Check(request.service(), response); }};
  absl::Mutex mutex_;
  bool ready_ ABSL_GUARDED_BY(mutex_) = false;
  bool shut_down_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<Watcher*> watchers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_HEALTH_H_
