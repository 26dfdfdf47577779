// The standard health protocol: Check and Watch of the readiness names, of liveness, and of unknown names.
#include "server/health.h"

#include <chrono>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace sinkhorn {
namespace {

using grpc::health::v1::Health;
using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

constexpr char kService[] = "sinkhorn.v1.SinkhornService";

class HealthTest : public testing::Test {
 protected:
  HealthTest() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&health_);
    loop_ = std::make_unique<RpcLoop>(builder.AddCompletionQueue());
    server_ = builder.BuildAndStart();
    health_.ExpectCalls(loop_.get());
    loop_->Start();
    stub_ = Health::NewStub(grpc::CreateChannel(absl::StrCat("127.0.0.1:", port), grpc::InsecureChannelCredentials()));
  }

  ~HealthTest() override {
    server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(2));
    loop_.reset();
  }

  static HealthCheckRequest Request(const std::string& name) {
    HealthCheckRequest request;
    request.set_service(name);
    return request;
  }

  grpc::Status Check(const std::string& name, HealthCheckResponse* response) {
    grpc::ClientContext context;
    return stub_->Check(&context, Request(name), response);
  }

  HealthCheckResponse::ServingStatus StatusOf(const std::string& name) {
    HealthCheckResponse response;
    EXPECT_TRUE(Check(name, &response).ok());
    return response.status();
  }

  HealthService health_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<RpcLoop> loop_;
  std::unique_ptr<Health::Stub> stub_;
};

TEST_F(HealthTest, ReadinessFollowsTheServerAndLivenessDoesNot) {
  EXPECT_EQ(StatusOf(""), HealthCheckResponse::NOT_SERVING);
  EXPECT_EQ(StatusOf(kService), HealthCheckResponse::NOT_SERVING);
  EXPECT_EQ(StatusOf("liveness"), HealthCheckResponse::SERVING);
  health_.SetReady(true);
  EXPECT_EQ(StatusOf(""), HealthCheckResponse::SERVING);
  EXPECT_EQ(StatusOf(kService), HealthCheckResponse::SERVING);
  health_.SetReady(false);
  EXPECT_EQ(StatusOf(""), HealthCheckResponse::NOT_SERVING);
  EXPECT_EQ(StatusOf(kService), HealthCheckResponse::NOT_SERVING);
  EXPECT_EQ(StatusOf("liveness"), HealthCheckResponse::SERVING);
}

TEST_F(HealthTest, UnknownNames) {
  HealthCheckResponse response;
  EXPECT_EQ(Check("sinkhorn", &response).error_code(), grpc::StatusCode::NOT_FOUND);

  grpc::ClientContext context;
  auto watch = stub_->Watch(&context, Request("sinkhorn"));
  ASSERT_TRUE(watch->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::SERVICE_UNKNOWN);
  context.TryCancel();
  EXPECT_EQ(watch->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(HealthTest, WatchTellsEachChange) {
  grpc::ClientContext context;
  auto watch = stub_->Watch(&context, Request(kService));
  HealthCheckResponse response;
  ASSERT_TRUE(watch->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::NOT_SERVING);
  for (int i = 0; i < 3; ++i) {
    health_.SetReady(true);
    health_.SetReady(true);  // No change, no message.
    ASSERT_TRUE(watch->Read(&response));
    EXPECT_EQ(response.status(), HealthCheckResponse::SERVING);
    health_.SetReady(false);
    ASSERT_TRUE(watch->Read(&response));
    EXPECT_EQ(response.status(), HealthCheckResponse::NOT_SERVING);
  }
  context.TryCancel();
  EXPECT_FALSE(watch->Read(&response));
}

// A Watch must not hold up the server's end, and its last word must arrive.
TEST_F(HealthTest, ShutdownEndsWatches) {
  health_.SetReady(true);
  grpc::ClientContext context, other_context, liveness_context;
  auto watch = stub_->Watch(&context, Request(""));
  auto liveness = stub_->Watch(&liveness_context, Request("liveness"));
  HealthCheckResponse response;
  ASSERT_TRUE(watch->Read(&response));
  ASSERT_TRUE(liveness->Read(&response));

  health_.SetReady(false);
  health_.Shutdown();
  ASSERT_TRUE(watch->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::NOT_SERVING);
  EXPECT_FALSE(watch->Read(&response));
  EXPECT_EQ(watch->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_FALSE(liveness->Read(&response));
  EXPECT_EQ(liveness->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);

  auto late = stub_->Watch(&other_context, Request(""));
  while (late->Read(&response)) {
  }
  EXPECT_EQ(late->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);

  const auto begin = std::chrono::steady_clock::now();
  server_->Shutdown();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(2));
}

TEST_F(HealthTest, WatchersThatComeAndGoWhileTheStatusChanges) {
  std::atomic<bool> stop{false};
  std::thread changer([&] {
    for (bool ready = true; !stop; ready = !ready) health_.SetReady(ready);
  });
  for (int i = 0; i < 200; ++i) {
    grpc::ClientContext context;
    auto watch = stub_->Watch(&context, Request(kService));
    HealthCheckResponse response;
    ASSERT_TRUE(watch->Read(&response));
    context.TryCancel();
    EXPECT_EQ(watch->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  stop = true;
  changer.join();
}

}  // namespace
}  // namespace sinkhorn
