// SinkhornService over gRPC: what stands between the wire and the scheduler.
//
//   RPC thread -> [decode, validate] -> scheduler -> backend -> [encode] -> RPC thread
//
// The bracketed steps run on a small pool of threads, unless the request is so small that handing it over would cost
// more than doing it. RPC threads never copy, scan or solve anything large. A call that is cancelled or past its
// deadline ends at once where it waits, and at the scheduler's next slice where it runs.
#ifndef SINKHORN_SERVER_SERVICE_H_
#define SINKHORN_SERVER_SERVICE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "grpcpp/server_builder.h"
#include "server/executors.h"
#include "server/load_report.h"
#include "server/metrics.h"
#include "server/rpc_loop.h"
#include "server/scheduler.h"
#include "server/tenants.h"
#include "server/tokens.h"
#include "server/validate.h"

namespace sinkhorn {

struct ServiceOptions {
  Limits limits;
  // Reported by GetServerInfo. max_queue_bytes also bounds what requests and replies hold outside the scheduler's
  // queue: while they are decoded and while they are sent.
  SchedulerOptions queue;
  int64_t max_receive_message_bytes = 256 << 20;  // Reported by GetServerInfo; gRPC enforces it.
  int rpc_threads = 1;                            // That receive, decode, encode and send, each with its own queue.
  int threads = 2;                                // That decode, validate and encode what is large.
  int64_t max_pending_decodes = 256;           // Requests that wait for these threads; then QUEUE_FULL. At most 1000.
  int64_t inline_bytes = 64 << 10;             // Smaller requests and replies are decoded and encoded where they are.
  int64_t stream_read_ahead_requests = 256;    // Of one stream: read but not answered yet.
  int64_t stream_read_ahead_bytes = 64 << 20;  // Likewise; at least one request.
  bool log_requests = false;                   // One line for each request.
  absl::Duration slow_request = absl::InfiniteDuration();  // Requests that take longer have a line, of each second one.
  std::string version = "0.0.0";
  std::string commit;
  // Called once when the device is lost. In-flight requests have got or will get UNAVAILABLE.
  std::function<void()> on_device_lost;
  // Callers need one of these tokens. Null: nobody needs any.
  std::shared_ptr<Tokens> tokens;
  // What balancers are told in trailers of Solve and SolveStream. Null: nothing.
  std::shared_ptr<LoadReport> load_report;
  // Whose calls share by which weights.
  std::shared_ptr<Tenants> tenants = std::make_shared<Tenants>();
};

enum class ServiceState {
  kWarming,   // Refuses solves: WARMING.
  kReady,     // Takes them.
  kDraining,  // Still takes them; health and GetServerInfo say that it will stop.
  kStopping,  // Refuses them: DRAINING. Streams end when their problems are answered.
};

class SinkhornServer {
 public:
  // All outlive the service. Solves may come as soon as the state is kReady.
  SinkhornServer(const Executors* executors, Metrics* metrics, const ServiceOptions& options);
  // REQUIRES: the schedulers are stopped, if Start was not followed by Shutdown.
  ~SinkhornServer();

  // Adds the service to the gRPC server that is being built, starts it and keeps it. False: it cannot listen. `beside`,
  // and whatever else was registered with `builder`, outlives the service.
  bool Start(grpc::ServerBuilder* builder, LoopService* beside = nullptr);
  // Ends the gRPC server: no call comes any more, and those unanswered at `deadline` are cancelled. Returns when the
  // last call has ended. REQUIRES: Start returned true; the schedulers run, or are stopped.
  void Shutdown(absl::Time deadline);

  void SetState(ServiceState state);
  ServiceState state() const;
  bool device_lost() const;
  // Requests between arrival and answer.
  int64_t requests_in_flight() const;
  // Callers that share the devices by weight: seen lately.
  int tenants() const;
  // Memory of requests and of replies, from arrival until gRPC has sent them.
  int64_t held_bytes() const;
  // Blocks until none is in flight, or until `deadline`. True: none.
  bool AwaitIdle(absl::Time deadline);
  // Blocks until no request has arrived for `silence`, or until `deadline`.
  void AwaitSilence(absl::Duration silence, absl::Time deadline);
  // Blocks until the replies to all accepted requests have been handed to the kernel, or until `deadline`. The state is
  // kStopping. True: they have.
  bool AwaitSent(absl::Time deadline);

 private:
  class Rpc;
  std::unique_ptr<Rpc> rpc_;
};

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_SERVICE_H_
