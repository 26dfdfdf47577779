#include "server/web.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "civetweb.h"
#include "prometheus/text_serializer.h"

namespace sinkhorn {
namespace {

constexpr char kTextFormat[] = "text/plain; version=0.0.4; charset=utf-8";
constexpr char kThreads[] = "2";  // A slow scrape leaves one for probes.
constexpr char kRequestTimeoutMs[] = "10000";

// Returns the status, as a handler does.
int Reply(mg_connection* connection, int status, const char* status_text, const char* type, const std::string& body) {
  const std::string method = mg_get_request_info(connection)->request_method;
  if (method != "GET" && method != "HEAD") {
    mg_printf(connection, "HTTP/1.1 405 Method Not Allowed\r\nAllow: GET, HEAD\r\nContent-Length: 0\r\n\r\n");
    return 405;
  }
  const std::string head = absl::StrCat("HTTP/1.1 ", status, " ", status_text, "\r\nContent-Type: ", type,
                                        "\r\nContent-Length: ", body.size(), "\r\nCache-Control: no-store\r\n\r\n");
  mg_write(connection, head.data(), head.size());
  if (method == "GET") mg_write(connection, body.data(), body.size());
  return status;
}

int ReplyMetrics(mg_connection* connection, void* metrics) {
  const auto families = static_cast<const prometheus::Collectable*>(metrics)->Collect();
  return Reply(connection, 200, "OK", kTextFormat, prometheus::TextSerializer().Serialize(families));
}

int ReplyHealth(mg_connection* connection, void*) { return Reply(connection, 200, "OK", "text/plain", "ok\n"); }

int ReplyReady(mg_connection* connection, void* ready) {
  if ((*static_cast<const std::function<bool()>*>(ready))()) {
    return Reply(connection, 200, "OK", "text/plain", "ready\n");
  }
  return Reply(connection, 503, "Service Unavailable", "text/plain", "not ready\n");
}

}  // namespace

absl::StatusOr<std::unique_ptr<WebServer>> WebServer::Start(const std::string& address,
                                                            const prometheus::Collectable* metrics,
                                                            std::function<bool()> ready) {
  std::unique_ptr<WebServer> server(new WebServer(metrics, std::move(ready)));
  mg_init_library(0);
  const char* options[] = {"listening_ports",    address.c_str(),   "num_threads", kThreads,
                           "request_timeout_ms", kRequestTimeoutMs, nullptr};
  const mg_callbacks no_callbacks{};
  server->context_ = mg_start(&no_callbacks, nullptr, options);
  mg_server_port port;
  if (server->context_ == nullptr || mg_get_server_ports(server->context_, 1, &port) != 1) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", address));
  }
  server->port_ = port.port;
  mg_set_request_handler(server->context_, "/metrics$", &ReplyMetrics,
                         const_cast<prometheus::Collectable*>(server->metrics_));
  mg_set_request_handler(server->context_, "/healthz$", &ReplyHealth, nullptr);
  mg_set_request_handler(server->context_, "/readyz$", &ReplyReady,
                         const_cast<std::function<bool()>*>(&server->ready_));
  return server;
}

WebServer::~WebServer() {
  if (context_ != nullptr) mg_stop(context_);
}

}  // namespace sinkhorn
