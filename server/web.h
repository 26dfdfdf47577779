// The small HTTP server beside gRPC, for Prometheus and for probes that speak no gRPC.
//
//   /metrics   Prometheus' text format
//   /healthz   200 as long as the process answers
//   /readyz    200 while solves should come here, else 503
#ifndef SINKHORN_SERVER_WEB_H_
#define SINKHORN_SERVER_WEB_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "prometheus/collectable.h"

struct mg_context;

namespace sinkhorn {

class WebServer {
 public:
  // Listens on `address`, HOST:PORT; port 0 finds a free one. UNAVAILABLE: it cannot. `ready` is called on its threads;
  // what is passed outlives the server.
  static absl::StatusOr<std::unique_ptr<WebServer>> Start(const std::string& address,
                                                          const prometheus::Collectable* metrics,
                                                          std::function<bool()> ready);
  ~WebServer();

  int port() const { return port_; }

 private:
  WebServer(const prometheus::Collectable* metrics, std::function<bool()> ready)
      : metrics_(metrics), ready_(std::move(ready)) {}

  const prometheus::Collectable* const metrics_;
  const std::function<bool()> ready_;
  mg_context* context_ = nullptr;
  int port_ = 0;
};

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_WEB_H_
