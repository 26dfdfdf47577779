// Solve, end to end in one process: answers, and every row of the status table that a fake backend can produce.
#include "server/service.h"

#include <future>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "grpcpp/generic/generic_stub.h"
#include "tests/server/service_fixture.h"

namespace sinkhorn {
namespace {

using grpc::StatusCode;
using testing::HasSubstr;

// ---- Answers --------------------------------------------------------------------------------------------------------

TEST_F(ServiceTest, AnswersWithTensorsAndCertificate) {
  Start();
  v1::SolveRequest request = Normalization();
  request.set_request_id("seven");
  request.mutable_solver()->set_max_iterations(7);
  grpc::ClientContext context;
  v1::SolveResponse response;
  const grpc::Status status = Solve(request, &response, &context);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.request_id(), "seven");
  EXPECT_EQ(Floats(response.plan()), (std::vector<float>{1, 3, 5, 7, 9, 11}));
  EXPECT_EQ(response.plan().dtype(), v1::DATA_TYPE_FLOAT32);
  ASSERT_EQ(response.plan().shape_size(), 2);
  EXPECT_EQ(response.plan().shape(1), 3);
  EXPECT_EQ(response.convergence().iterations(), 7);
  EXPECT_TRUE(response.convergence().converged());
  EXPECT_EQ(response.convergence().marginal_error_a(), 0.25);
  EXPECT_EQ(response.convergence().stop_reason(), v1::STOP_REASON_TOLERANCE);
  EXPECT_EQ(response.execution().backend(), "fake");
  EXPECT_EQ(response.execution().device(), "fake device");
  EXPECT_EQ(response.execution().family(), "fake");
  EXPECT_EQ(response.execution().precision(), v1::PRECISION_STRICT);
  EXPECT_EQ(response.execution().batch_problem_count(), 1);
  EXPECT_GE(response.execution().launch_count(), 1);
  EXPECT_GT(response.execution().queue_seconds(), 0);
  EXPECT_FALSE(response.has_f());
}

TEST_F(ServiceTest, AnswersTransportPerMember) {
  Start();
  v1::SolveRequest request = Dense();
  *request.mutable_dense()->mutable_a() = Filled({5, 2}, 0.5f);
  request.add_outputs(v1::OUTPUT_VALUE);
  request.add_outputs(v1::OUTPUT_POTENTIALS);
  request.add_outputs(v1::OUTPUT_MEMBERS);
  grpc::ClientContext context;
  v1::SolveResponse response;
  ASSERT_TRUE(Solve(request, &response, &context).ok());
  ASSERT_EQ(response.value_size(), 5);
  EXPECT_EQ(response.value(4), 5.0);
  EXPECT_EQ(response.members_size(), 5);
  EXPECT_EQ(Floats(response.f()), std::vector<float>(10, 1));
  EXPECT_EQ(Floats(response.g()), std::vector<float>(15, 2));
}

// Sizes around the thresholds at which decoding moves to the pool and replies refer to the backend's memory.
TEST_F(ServiceTest, EverySizeArrivesWhole) {
  Start();
  for (int64_t columns : {1, 1000, 4050, 4097, 16300, 16384, 100000, 5000000}) {
    v1::SolveRequest request;
    std::vector<float> logits(columns);
    for (int64_t i = 0; i < columns; ++i) logits[i] = static_cast<float>(i % 1013);
    *request.mutable_normalization()->mutable_logits() = Float32Tensor({1, columns}, logits);
    grpc::ClientContext context;
    v1::SolveResponse response;
    const grpc::Status status = Solve(request, &response, &context);
    ASSERT_TRUE(status.ok()) << columns << ": " << status.error_message();
    std::vector<float> expected(columns);
    for (int64_t i = 0; i < columns; ++i) expected[i] = 2 * logits[i] + 1;
    EXPECT_EQ(Floats(response.plan()), expected) << columns;
  }
}

TEST_F(ServiceTest, ManyClientsAtOnce) {
  Start();
  std::vector<std::thread> clients;
  for (int client = 0; client < 8; ++client) {
    clients.emplace_back([this, client] {
      for (int i = 0; i < 50; ++i) {
        v1::SolveRequest request;
        const float w = static_cast<float>(1000 * client + i);
        *request.mutable_normalization()->mutable_logits() = Filled({1, 1 + 400 * (i % 50)}, w);
        grpc::ClientContext context;
        v1::SolveResponse response;
        ASSERT_TRUE(Solve(request, &response, &context).ok());
        ASSERT_EQ(Floats(response.plan()).back(), 2 * w + 1);
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(metrics_.calls_started.With({"sinkhorn.v1.SinkhornService/Solve"})->value(), 400);
}

// gRPC's shutdown does not wait until the queues are empty: their threads may still be taking from them what refers to
// the gRPC server, which must not go before.
TEST_F(ServiceTest, ComesAndGoesManyTimes) {
  Start();
  options_.rpc_threads = 3;
  for (int i = 0; i < 30; ++i) {
    SinkhornServer service(executors_.get(), &metrics_, options_);
    service.SetState(ServiceState::kReady);
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    ASSERT_TRUE(service.Start(&builder));
    const auto stub = v1::SinkhornService::NewStub(
        grpc::CreateChannel(absl::StrCat("127.0.0.1:", port), grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    v1::SolveResponse response;
    ASSERT_TRUE(stub->Solve(&context, Normalization(), &response).ok());
    if (i % 2 == 0) service.Shutdown(absl::Now());  // Its destructor does so too.
  }
}

TEST_F(ServiceTest, ServerInfo) {
  options_.version = "9.8.7";
  options_.limits.max_points = 12345;
  Start(ServiceState::kWarming);
  const auto info = [this] {
    grpc::ClientContext context;
    v1::GetServerInfoResponse response;
    EXPECT_TRUE(stub_->GetServerInfo(&context, {}, &response).ok());
    return response;
  };
  EXPECT_EQ(info().state(), "warming");
  service_->SetState(ServiceState::kReady);
  EXPECT_EQ(info().state(), "ready");
  EXPECT_EQ(info().version(), "9.8.7");
  EXPECT_EQ(info().limits().max_points(), 12345);
  ASSERT_EQ(info().devices_size(), 1);
  EXPECT_EQ(info().devices(0).name(), "fake device");
  service_->SetState(ServiceState::kDraining);
  EXPECT_EQ(info().state(), "draining");
}

// ---- Refused --------------------------------------------------------------------------------------------------------

TEST_F(ServiceTest, InvalidFieldNamesItself) {
  Start();
  v1::SolveRequest request = Dense();
  request.mutable_solver()->set_epsilon(-2);
  const grpc::Status status = Solve(request);
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Reason(status), "INVALID_FIELD");
  const auto bad_request = Detail<google::rpc::BadRequest>(Rich(status));
  ASSERT_TRUE(bad_request.has_value());
  ASSERT_EQ(bad_request->field_violations_size(), 1);
  EXPECT_EQ(bad_request->field_violations(0).field(), "solver.epsilon");
  EXPECT_THAT(status.error_message(), HasSubstr("-2"));
  EXPECT_EQ(metrics_.requests_rejected.With({"INVALID_FIELD"})->value(), 1);
}

TEST_F(ServiceTest, TooLargeTellsLimitAndValue) {
  options_.limits.max_matrix_elements = 5;
  Start();
  const grpc::Status status = Solve(Dense());
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Reason(status), "PROBLEM_TOO_LARGE");
  const auto info = Detail<google::rpc::ErrorInfo>(Rich(status));
  EXPECT_EQ(info->metadata().at("limit"), "5");
  EXPECT_EQ(info->metadata().at("actual"), "6");
}

TEST_F(ServiceTest, BytesThatAreNoMessage) {
  Start();
  grpc::GenericStub generic(channel_);
  for (const std::string& bytes :
       {std::string("\xff\xff\xff\xff\xff"), std::string("\x0a\x7f"), std::string(100000, 'x')}) {
    grpc::Slice slice(bytes);
    grpc::ByteBuffer request(&slice, 1), response;
    grpc::ClientContext context;
    grpc::Status status;
    absl::Notification finished;
    generic.UnaryCall(&context, "/sinkhorn.v1.SinkhornService/Solve", grpc::StubOptions(), &request, &response,
                      [&](grpc::Status result) {
                        status = result;
                        finished.Notify();
                      });
    finished.WaitForNotification();
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(Reason(status), "INVALID_FIELD");
  }
}

TEST_F(ServiceTest, MessageAboveTheLimit) {
  max_receive_message_bytes_ = 1 << 20;
  Start();
  v1::SolveRequest request;
  *request.mutable_normalization()->mutable_logits() = Filled({1, 300000}, 0);
  EXPECT_EQ(Solve(request).error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(Solve(Normalization()).ok()) << "the next call is served";
}

TEST_F(ServiceTest, WarmingAndStopping) {
  Start(ServiceState::kWarming);
  grpc::Status status = Solve(Normalization());
  EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(Reason(status), "WARMING");
  service_->SetState(ServiceState::kDraining);
  EXPECT_TRUE(Solve(Normalization()).ok()) << "a draining server still takes requests";
  service_->SetState(ServiceState::kStopping);
  status = Solve(Normalization());
  EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(Reason(status), "DRAINING");
}

TEST_F(ServiceTest, QueueFullTellsWhenToRetry) {
  scheduler_options_.max_queue_requests = 1;
  scheduler_options_.max_resident_problems = 1;
  backend_.hold = true;
  Start();
  auto running = std::async([this] { return Solve(Normalization()); });
  ASSERT_TRUE(Eventually([this] { return scheduler_->stats().resident_requests == 1; }));
  auto waiting = std::async([this] { return Solve(Normalization()); });
  ASSERT_TRUE(Eventually([this] { return scheduler_->stats().queue_requests == 1; }));

  grpc::ClientContext context;
  v1::SolveResponse response;
  const grpc::Status status = Solve(Normalization(), &response, &context);
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(Reason(status), "QUEUE_FULL");
  const auto retry = Detail<google::rpc::RetryInfo>(Rich(status));
  ASSERT_TRUE(retry.has_value());
  const double seconds = retry->retry_delay().seconds() + 1e-9 * retry->retry_delay().nanos();
  EXPECT_GT(seconds, 0);
  const auto pushback = context.GetServerTrailingMetadata().find("grpc-retry-pushback-ms");
  ASSERT_NE(pushback, context.GetServerTrailingMetadata().end());
  EXPECT_EQ(std::stoi(std::string(pushback->second.data(), pushback->second.size())), std::ceil(seconds * 1e3));

  backend_.hold = false;
  EXPECT_TRUE(running.get().ok());
  EXPECT_TRUE(waiting.get().ok());
}

TEST_F(ServiceTest, QueueFullByBytes) {
  scheduler_options_.max_queue_bytes = 1000;
  Start();
  v1::SolveRequest request;
  *request.mutable_normalization()->mutable_logits() = Filled({1, 1000}, 0);
  EXPECT_EQ(Reason(Solve(request)), "QUEUE_FULL");
}

TEST_F(ServiceTest, TooManyLargeRequestsToDecode) {
  options_.max_pending_decodes = 0;
  Start();
  v1::SolveRequest request;
  *request.mutable_normalization()->mutable_logits() = Filled({1, 100000}, 0);
  EXPECT_EQ(Reason(Solve(request)), "QUEUE_FULL");
  EXPECT_TRUE(Solve(Normalization()).ok()) << "small requests need no pool";
}

// ---- Failing problems -----------------------------------------------------------------------------------------------

TEST_F(ServiceTest, Diverged) {
  backend_.verdict = [](const Problem&) { return absl::FailedPreconditionError("raise epsilon"); };
  Start();
  const grpc::Status status = Solve(Dense());
  EXPECT_EQ(status.error_code(), StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(Reason(status), "DIVERGED");
  EXPECT_EQ(status.error_message(), "raise epsilon");
  EXPECT_EQ(metrics_.outcomes.With({"dense", "DIVERGED"})->value(), 1);
}

TEST_F(ServiceTest, NonFiniteValueIsNeverSent) {
  backend_.value_offset = std::numeric_limits<double>::quiet_NaN();
  Start();
  const grpc::Status status = Solve(Dense());
  EXPECT_EQ(status.error_code(), StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(Reason(status), "DIVERGED");
}

TEST_F(ServiceTest, OutOfDeviceMemoryFailsThatProblemAlone) {
  backend_.admission = [](const Problem& problem) {
    return problem.kind == ProblemKind::kDense ? absl::ResourceExhaustedError("12 GB") : absl::OkStatus();
  };
  Start();
  const grpc::Status status = Solve(Dense());
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(Reason(status), "DEVICE_MEMORY");
  EXPECT_TRUE(Solve(Normalization()).ok());
}

TEST_F(ServiceTest, LostDevice) {
  std::atomic<int> told{0};
  options_.on_device_lost = [&] { ++told; };
  Start();
  EXPECT_TRUE(Solve(Normalization()).ok());
  EXPECT_FALSE(service_->device_lost());
  backend_.lost = true;
  for (int i = 0; i < 2; ++i) {
    const grpc::Status status = Solve(Normalization());
    EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE);
    EXPECT_EQ(Reason(status), "DEVICE_LOST");
  }
  EXPECT_EQ(told, 1);
  EXPECT_TRUE(service_->device_lost());
}

TEST_F(ServiceTest, OurBugIsLoggedOnceUnderItsIncident) {
  backend_.verdict = [](const Problem&) { return absl::InternalError("index 7 out of range"); };
  Start();
  testing::internal::CaptureStderr();
  const grpc::Status status = Solve(Normalization());
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_EQ(status.error_code(), StatusCode::INTERNAL);
  EXPECT_EQ(Reason(status), "INTERNAL");
  const std::string incident = Detail<google::rpc::ErrorInfo>(Rich(status))->metadata().at("incident");
  EXPECT_EQ(incident.size(), 16u);
  EXPECT_THAT(status.error_message(), HasSubstr(incident));
  EXPECT_THAT(status.error_message(), testing::Not(HasSubstr("out of range"))) << "our insides are not the client's";
  EXPECT_THAT(log, HasSubstr(absl::StrCat("\"incident\":\"", incident, "\"")));
  EXPECT_THAT(log, HasSubstr("index 7 out of range"));
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 1);
}

}  // namespace
}  // namespace sinkhorn
