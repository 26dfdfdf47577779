// A stand-in for the server, in the test's own process: a real gRPC server on a loopback port whose Solve is a function
// of the test.
#ifndef SINKHORN_TESTS_CLIENT_FAKE_SERVICE_H_
#define SINKHORN_TESTS_CLIENT_FAKE_SERVICE_H_

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "sinkhorn/v1/sinkhorn.grpc.pb.h"

namespace sinkhorn::client {

// An error with the service's details.
inline grpc::Status ServiceError(grpc::StatusCode code, const std::string& reason, const std::string& message) {
  google::rpc::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain("sinkhorn");
  google::rpc::Status status;
  status.set_code(code);
  status.set_message(message);
  status.add_details()->PackFrom(info);
  return grpc::Status(code, message, status.SerializeAsString());
}

class FakeServer : private sinkhorn::v1::SinkhornService::Service, private grpc::health::v1::Health::Service {
 public:
  using Solve_ = std::function<grpc::Status(grpc::ServerContext*, const v1::SolveRequest&, v1::SolveResponse*)>;

  // Listens on `port`; 0 finds a free one. Without a `solve` calls end with OK and no answer, as they look to a client
  // whose gRPC has dropped it.
  explicit FakeServer(Solve_ solve, int port = 0) : solve_(std::move(solve)) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(absl::StrCat("127.0.0.1:", port), grpc::InsecureServerCredentials(), &port_);
    if (solve_) {
      builder.RegisterService(static_cast<sinkhorn::v1::SinkhornService::Service*>(this));
    } else {
      builder.RegisterCallbackGenericService(&answerless_);
    }
    builder.RegisterService(static_cast<grpc::health::v1::Health::Service*>(this));
    builder.SetMaxReceiveMessageSize(-1);
    server_ = builder.BuildAndStart();
  }
  ~FakeServer() override { server_->Shutdown(std::chrono::system_clock::now() + std::chrono::milliseconds(100)); }

  std::string target() const { return absl::StrCat("127.0.0.1:", port_); }
  int port() const { return port_; }
  void set_serving(bool serving) { serving_ = serving; }
  int solve_count() const { return solve_count_; }

 private:
  struct EndsAtOnce : grpc::ServerGenericBidiReactor {
    EndsAtOnce() { Finish(grpc::Status::OK); }
    void OnDone() override { delete this; }
  };
  struct Answerless : grpc::CallbackGenericService {
    grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override {
      return new EndsAtOnce;
    }
  };

  grpc::Status Solve(grpc::ServerContext* context, const v1::SolveRequest* request,
                     v1::SolveResponse* response) override {
    ++solve_count_;
    response->set_request_id(request->request_id());
    return solve_(context, *request, response);
  }

  grpc::Status SolveStream(grpc::ServerContext* context,
                           grpc::ServerReaderWriter<v1::SolveStreamResponse, v1::SolveStreamRequest>* stream) override {
    v1::SolveStreamRequest request;
    while (stream->Read(&request)) {
      v1::SolveStreamResponse response;
      response.set_request_id(request.solve().request_id());
      const grpc::Status status = Solve(context, &request.solve(), response.mutable_solve());
      if (!status.ok()) response.mutable_error()->ParseFromString(status.error_details());
      stream->Write(response);
    }
    return grpc::Status::OK;
  }

  grpc::Status GetServerInfo(grpc::ServerContext*, const v1::GetServerInfoRequest*,
                             v1::GetServerInfoResponse* response) override {
    response->set_version("1.2.3");
    return grpc::Status::OK;
  }

  grpc::Status Check(grpc::ServerContext*, const grpc::health::v1::HealthCheckRequest* request,
                     grpc::health::v1::HealthCheckResponse* response) override {
    if (request->service() != "sinkhorn.v1.SinkhornService") {
      return grpc::Status(grpc::StatusCode::NOT_FOUND, "unknown service");
    }
    response->set_status(serving_ ? grpc::health::v1::HealthCheckResponse::SERVING
                                  : grpc::health::v1::HealthCheckResponse::NOT_SERVING);
    return grpc::Status::OK;
  }

  const Solve_ solve_;
  int port_ = 0;
  std::atomic<bool> serving_{true};
  std::atomic<int> solve_count_{0};
  Answerless answerless_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace sinkhorn::client

#endif  // SINKHORN_TESTS_CLIENT_FAKE_SERVICE_H_
