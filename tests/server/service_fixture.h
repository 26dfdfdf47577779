// A server in this process: the real scheduler and service on the fake backend, behind a real gRPC channel.
#ifndef SINKHORN_TESTS_SERVER_SERVICE_FIXTURE_H_
#define SINKHORN_TESTS_SERVER_SERVICE_FIXTURE_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/types/optional.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"
#include "server/gauges.h"
#include "server/metrics.h"
#include "server/scheduler.h"
#include "server/service.h"
#include "sinkhorn/v1/sinkhorn.grpc.pb.h"
#include "tests/server/fake_backend.h"
#include "tests/server/requests.h"

namespace sinkhorn {

class ServiceTest : public testing::Test {
 protected:
  // Before Start: what the server is made with.
  SchedulerOptions scheduler_options_;
  ServiceOptions options_;
  int max_receive_message_bytes_ = 64 << 20;

  FakeBackend backend_;
  Metrics metrics_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<Executors> executors_;
  std::unique_ptr<SinkhornServer> service_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::SinkhornService::Stub> stub_;

  void Start(ServiceState state = ServiceState::kReady) {
    options_.queue = scheduler_options_;
    scheduler_ =
        std::make_unique<Scheduler>(&backend_, RealClock(), scheduler_options_, RoundCounter(backend_, &metrics_));
    executors_ = std::make_unique<Executors>(std::vector<Executor>{{&backend_, scheduler_.get()}});
    service_ = std::make_unique<SinkhornServer>(executors_.get(), &metrics_, options_);
    AddServerGauges(service_.get(), executors_.get(), {"1.2.3", "abc", false}, &metrics_);
    service_->SetState(state);
    scheduler_->Start();
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.SetMaxReceiveMessageSize(max_receive_message_bytes_);
    ASSERT_TRUE(service_->Start(&builder));
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);  // Each failure is seen once.
    channel_ =
        grpc::CreateCustomChannel(absl::StrCat("127.0.0.1:", port), grpc::InsecureChannelCredentials(), arguments);
    stub_ = v1::SinkhornService::NewStub(channel_);
  }

  void TearDown() override {
    if (channel_ == nullptr) return;
    backend_.hold = false;
    service_->Shutdown(absl::Now() + absl::Seconds(5));
    EXPECT_TRUE(service_->AwaitIdle(absl::Now() + absl::Seconds(5))) << "a call ended without being counted out";
    scheduler_->Stop();
    EXPECT_EQ(backend_.alive, 0);
    EXPECT_EQ(scheduler_->stats().bytes, 0);
    EXPECT_TRUE(Eventually([this] { return service_->held_bytes() == 0; })) << service_->held_bytes();
  }

  grpc::Status Solve(const v1::SolveRequest& request, v1::SolveResponse* response, grpc::ClientContext* context) {
    return stub_->Solve(context, request, response);
  }
  grpc::Status Solve(const v1::SolveRequest& request) {
    grpc::ClientContext context;
    v1::SolveResponse response;
    return stub_->Solve(&context, request, &response);
  }

  // Waits until `condition` holds; false after some seconds.
  template <class Condition>
  static bool Eventually(Condition condition) {
    const absl::Time deadline = absl::Now() + absl::Seconds(10);
    while (!condition()) {
      if (absl::Now() > deadline) return false;
      absl::SleepFor(absl::Milliseconds(1));
    }
    return true;
  }

  double Abandoned(const char* stage, const char* cause) {
    return metrics_.requests_abandoned.With({stage, cause})->value();
  }
};

// The details of a status: of the google.rpc messages, the first of type T.
template <class T>
absl::optional<T> Detail(const google::rpc::Status& status) {
  for (const auto& any : status.details()) {
    T detail;
    if (any.UnpackTo(&detail)) return detail;
  }
  return absl::nullopt;
}
inline google::rpc::Status Rich(const grpc::Status& status) {
  google::rpc::Status rich;
  EXPECT_TRUE(rich.ParseFromString(status.error_details()));
  EXPECT_EQ(rich.code(), static_cast<int>(status.error_code()));
  EXPECT_EQ(rich.message(), status.error_message());
  return rich;
}
inline std::string Reason(const grpc::Status& status) {
  const auto info = Detail<google::rpc::ErrorInfo>(Rich(status));
  if (!info.has_value()) return "(no ErrorInfo)";
  EXPECT_EQ(info->domain(), "sinkhorn");
  return info->reason();
}

}  // namespace sinkhorn

#endif  // SINKHORN_TESTS_SERVER_SERVICE_FIXTURE_H_
