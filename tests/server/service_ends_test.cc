// Solve, end to end in one process: calls that end early, by deadline, time budget, cancellation or drain.
#include <future>
#include <thread>

#include "tests/server/service_fixture.h"

namespace sinkhorn {
namespace {

using grpc::StatusCode;

void SetDeadline(grpc::ClientContext* context, absl::Duration left) {
  context->set_deadline(absl::ToChronoTime(absl::Now() + left));
}

// ---- Deadlines and cancellation -------------------------------------------------------------------------------------

TEST_F(ServiceTest, InfeasibleDeadlineIsRefusedAtOnce) {
  backend_.predicted_seconds = 1000;
  Start();
  grpc::ClientContext context;
  SetDeadline(&context, absl::Seconds(30));
  v1::SolveResponse response;
  const grpc::Status status =
      Solve(Normalization(), &response, &context);  // Tolerance 0: a fixed number of iterations.
  EXPECT_EQ(status.error_code(), StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(Reason(status), "INFEASIBLE_DEADLINE");
  const auto pushback = context.GetServerTrailingMetadata().find("grpc-retry-pushback-ms");
  ASSERT_NE(pushback, context.GetServerTrailingMetadata().end());
  EXPECT_EQ(pushback->second, "-1");

  grpc::ClientContext with_tolerance;  // May stop after any number of iterations.
  SetDeadline(&with_tolerance, absl::Seconds(30));
  EXPECT_TRUE(Solve(Dense(), &response, &with_tolerance).ok());
}

TEST_F(ServiceTest, ATimeBudgetGivesWhatThereIs) {
  backend_.hold = backend_.anytime = true;
  Start();
  v1::SolveRequest request = Dense();
  request.mutable_solver()->set_time_budget(0.05);
  grpc::ClientContext context;
  SetDeadline(&context, absl::Seconds(30));
  v1::SolveResponse response;
  const grpc::Status status = Solve(request, &response, &context);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_FALSE(response.convergence().converged());
  EXPECT_EQ(response.convergence().stop_reason(), v1::STOP_REASON_TIME_BUDGET);
}

TEST_F(ServiceTest, ATimeBudgetIsRefusedWhereProblemsCannotEndEarly) {
  Start();
  v1::SolveRequest request = Dense();
  request.mutable_solver()->set_time_budget(0.05);
  const grpc::Status status = Solve(request);
  EXPECT_EQ(status.error_code(), StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(Reason(status), "UNSUPPORTED");
  EXPECT_EQ(Detail<google::rpc::BadRequest>(Rich(status))->field_violations(0).field(), "solver.time_budget");
}

TEST_F(ServiceTest, WhatTheDeviceCannotDoIsNamed) {
  Start();
  backend_.unsupported = "point_cloud.cost";
  const grpc::Status status = Solve(Dense());
  EXPECT_EQ(status.error_code(), StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(Reason(status), "UNSUPPORTED");
  EXPECT_EQ(Detail<google::rpc::BadRequest>(Rich(status))->field_violations(0).field(), "point_cloud.cost");
  EXPECT_EQ(backend_.admitted, 0);
}

TEST_F(ServiceTest, DeadlineWhileRunning) {
  backend_.hold = true;
  Start();
  grpc::ClientContext context;
  SetDeadline(&context, absl::Milliseconds(100));
  v1::SolveResponse response;
  EXPECT_EQ(Solve(Normalization(), &response, &context).error_code(), StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(Eventually([this] { return service_->requests_in_flight() == 0; }));
  EXPECT_EQ(Abandoned("running", "deadline"), 1);
  EXPECT_GT(metrics_.wasted_device_seconds.With({"deadline"})->value(), 0);
}

TEST_F(ServiceTest, DeadlineInTheQueue) {
  scheduler_options_.max_resident_problems = 1;
  backend_.hold = true;
  Start();
  auto running = std::async([this] { return Solve(Normalization()); });
  ASSERT_TRUE(Eventually([this] { return scheduler_->stats().resident_requests == 1; }));
  grpc::ClientContext context;
  SetDeadline(&context, absl::Milliseconds(100));
  v1::SolveResponse response;
  EXPECT_EQ(Solve(Normalization(), &response, &context).error_code(), StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(Eventually([this] { return service_->requests_in_flight() == 1; }));
  EXPECT_EQ(Abandoned("queue", "deadline"), 1);
  EXPECT_EQ(backend_.admitted, 1) << "an expired request was launched";
  backend_.hold = false;
  EXPECT_TRUE(running.get().ok());
}

TEST_F(ServiceTest, CancelledWhileRunningEndsPromptly) {
  backend_.hold = true;
  Start();
  grpc::ClientContext context;
  auto running = std::async([&] {
    v1::SolveResponse response;
    return Solve(Normalization(), &response, &context);
  });
  ASSERT_TRUE(Eventually([this] { return backend_.alive == 1; }));
  const absl::Time begin = absl::Now();
  context.TryCancel();
  EXPECT_EQ(running.get().error_code(), StatusCode::CANCELLED);
  EXPECT_TRUE(Eventually([this] { return service_->requests_in_flight() == 0 && backend_.alive == 0; }));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(2));
  EXPECT_EQ(Abandoned("running", "cancelled"), 1);
}

TEST_F(ServiceTest, CancelledInTheQueue) {
  scheduler_options_.max_resident_problems = 1;
  backend_.hold = true;
  Start();
  auto running = std::async([this] { return Solve(Normalization()); });
  ASSERT_TRUE(Eventually([this] { return scheduler_->stats().resident_requests == 1; }));
  grpc::ClientContext context;
  auto waiting = std::async([&] {
    v1::SolveResponse response;
    return Solve(Normalization(), &response, &context);
  });
  ASSERT_TRUE(Eventually([this] { return scheduler_->stats().queue_requests == 1; }));
  context.TryCancel();
  EXPECT_EQ(waiting.get().error_code(), StatusCode::CANCELLED);
  EXPECT_TRUE(Eventually([this] { return service_->requests_in_flight() == 1; }));
  EXPECT_EQ(Abandoned("queue", "cancelled"), 1);
  EXPECT_EQ(backend_.admitted, 1);
  backend_.hold = false;
  EXPECT_TRUE(running.get().ok());
}

// ---- Draining -------------------------------------------------------------------------------------------------------

TEST_F(ServiceTest, IdleOnlyWhenAllIsAnswered) {
  backend_.hold = true;
  Start();
  auto running = std::async([this] { return Solve(Normalization()); });
  ASSERT_TRUE(Eventually([this] { return backend_.alive == 1; }));
  service_->SetState(ServiceState::kStopping);
  EXPECT_FALSE(service_->AwaitIdle(absl::Now() + absl::Milliseconds(50)));
  backend_.hold = false;
  EXPECT_TRUE(service_->AwaitIdle(absl::Now() + absl::Seconds(10)));
  EXPECT_TRUE(running.get().ok()) << "an accepted request was lost";
}

TEST_F(ServiceTest, SilenceIsWhenNobodyAsksAnyMore) {
  Start(ServiceState::kStopping);
  std::atomic<bool> quiet{false};
  std::thread client([&] {
    for (int i = 0; i < 20; ++i) {
      EXPECT_EQ(Reason(Solve(Normalization())), "DRAINING");
      absl::SleepFor(absl::Milliseconds(10));
    }
    quiet = true;
  });
  service_->AwaitSilence(absl::Milliseconds(500), absl::Now() + absl::Seconds(30));
  EXPECT_TRUE(quiet);
  client.join();
  const absl::Time begin = absl::Now();
  service_->AwaitSilence(absl::Seconds(30), begin + absl::Milliseconds(50));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(5)) << "the deadline ends the wait";
}

TEST_F(ServiceTest, WaitsUntilRepliesAreSent) {
  backend_.hold = true;
  Start();
  EXPECT_TRUE(service_->AwaitSent(absl::Now())) << "nothing was asked yet";
  auto running = std::async([this] { return Solve(Normalization()); });
  ASSERT_TRUE(Eventually([this] { return backend_.alive == 1; }));
  service_->SetState(ServiceState::kStopping);
  EXPECT_FALSE(service_->AwaitSent(absl::Now() + absl::Milliseconds(50)));
  backend_.hold = false;
  EXPECT_TRUE(service_->AwaitSent(absl::Now() + absl::Seconds(10)));
  EXPECT_TRUE(running.get().ok());
}

TEST_F(ServiceTest, WhatIsLeftWhenTheSchedulerStopsIsUnavailable) {
  backend_.hold = true;
  Start();
  auto running = std::async([this] { return Solve(Normalization()); });
  ASSERT_TRUE(Eventually([this] { return backend_.alive == 1; }));
  service_->SetState(ServiceState::kStopping);
  scheduler_->Stop();
  const grpc::Status status = running.get();
  EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(Reason(status), "DRAINING");
}

}  // namespace
}  // namespace sinkhorn
