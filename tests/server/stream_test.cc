// SolveStream in one process: order, errors of one problem, flow control, cancellation, and a stopping server.
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <thread>

#include "gmock/gmock.h"
#include "tests/server/service_fixture.h"

namespace sinkhorn {
namespace {

using grpc::StatusCode;

using Stream = std::unique_ptr<grpc::ClientReaderWriter<v1::SolveStreamRequest, v1::SolveStreamResponse>>;

v1::SolveStreamRequest Item(const std::string& id, float logit = 0) {
  v1::SolveStreamRequest item;
  *item.mutable_solve()->mutable_normalization()->mutable_logits() = Filled({1, 1}, logit);
  item.mutable_solve()->set_request_id(id);
  return item;
}

std::string Reason(const v1::SolveStreamResponse& reply) {
  const auto info = Detail<google::rpc::ErrorInfo>(reply.error());
  return info.has_value() ? info->reason() : "(none)";
}

using StreamTest = ServiceTest;

TEST_F(StreamTest, AnswersEachProblemOnce) {
  Start();
  grpc::ClientContext context;
  Stream stream = stub_->SolveStream(&context);
  constexpr int kCount = 2000;
  std::thread writer([&] {
    for (int i = 0; i < kCount; ++i) ASSERT_TRUE(stream->Write(Item(std::to_string(i), static_cast<float>(i))));
    stream->WritesDone();
  });
  std::set<std::string> seen;
  v1::SolveStreamResponse reply;
  while (stream->Read(&reply)) {
    ASSERT_TRUE(reply.has_solve()) << reply.error().message();
    EXPECT_EQ(reply.solve().request_id(), reply.request_id());
    EXPECT_EQ(Floats(reply.solve().plan())[0], 2 * std::stof(reply.request_id()) + 1);
    EXPECT_TRUE(seen.insert(reply.request_id()).second) << "answered twice";
  }
  writer.join();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(seen.size(), static_cast<size_t>(kCount));
}

TEST_F(StreamTest, AnErrorIsAReplyOfItsOwn) {
  backend_.verdict = [](const Problem& problem) {
    return problem.kind == ProblemKind::kDense ? absl::FailedPreconditionError("diverged") : absl::OkStatus();
  };
  Start();
  grpc::ClientContext context;
  Stream stream = stub_->SolveStream(&context);
  v1::SolveStreamRequest invalid = Item("invalid");
  invalid.mutable_solve()->mutable_normalization()->mutable_logits()->clear_data();
  v1::SolveStreamRequest diverging;
  *diverging.mutable_solve() = Dense();
  diverging.mutable_solve()->set_request_id("diverging");
  v1::SolveStreamRequest empty;
  stream->Write(Item("first"));
  stream->Write(invalid);
  stream->Write(diverging);
  stream->Write(empty);
  stream->Write(Item("last"));
  stream->WritesDone();
  std::map<std::string, v1::SolveStreamResponse> replies;
  v1::SolveStreamResponse reply;
  while (stream->Read(&reply)) replies[reply.request_id()] = reply;
  EXPECT_TRUE(stream->Finish().ok());
  ASSERT_EQ(replies.size(), 5u);
  EXPECT_TRUE(replies["first"].has_solve());
  EXPECT_TRUE(replies["last"].has_solve());
  EXPECT_EQ(replies["invalid"].error().code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Reason(replies["invalid"]), "INVALID_FIELD");
  EXPECT_TRUE(Detail<google::rpc::BadRequest>(replies["invalid"].error()).has_value());
  EXPECT_EQ(replies["diverging"].error().code(), StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(Reason(replies["diverging"]), "DIVERGED");
  EXPECT_EQ(Reason(replies[""]), "INVALID_FIELD");
}

TEST_F(StreamTest, LargeAndSmallProblemsMix) {
  Start();
  grpc::ClientContext context;
  Stream stream = stub_->SolveStream(&context);
  std::map<std::string, size_t> sizes;
  for (int i = 0; i < 20; ++i) {
    v1::SolveStreamRequest item = Item(std::to_string(i));
    const int64_t columns = i % 2 ? 1 : 300000 + i;
    *item.mutable_solve()->mutable_normalization()->mutable_logits() = Filled({1, columns}, 1);
    sizes[std::to_string(i)] = columns;
    ASSERT_TRUE(stream->Write(item));
  }
  stream->WritesDone();
  v1::SolveStreamResponse reply;
  while (stream->Read(&reply)) {
    EXPECT_EQ(Floats(reply.solve().plan()), std::vector<float>(sizes[reply.request_id()], 3));
    sizes.erase(reply.request_id());
  }
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_TRUE(sizes.empty());
}

TEST_F(StreamTest, ReadsAheadByABoundedNumber) {
  options_.stream_read_ahead_requests = 5;
  backend_.hold = true;
  Start();
  grpc::ClientContext context;
  Stream stream = stub_->SolveStream(&context);
  for (int i = 0; i < 50; ++i) ASSERT_TRUE(stream->Write(Item(std::to_string(i))));
  stream->WritesDone();
  ASSERT_TRUE(Eventually([this] { return service_->requests_in_flight() == 5; }));
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_EQ(service_->requests_in_flight(), 5);
  backend_.hold = false;
  int count = 0;
  v1::SolveStreamResponse reply;
  while (stream->Read(&reply)) ++count;
  EXPECT_EQ(count, 50);
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(StreamTest, ReadsAheadByBoundedBytes) {
  options_.stream_read_ahead_bytes = 1000;
  backend_.hold = true;
  Start();
  grpc::ClientContext context;
  Stream stream = stub_->SolveStream(&context);
  for (int i = 0; i < 4; ++i) {
    v1::SolveStreamRequest item = Item(std::to_string(i));
    *item.mutable_solve()->mutable_normalization()->mutable_logits() = Filled({1, 400}, 1);
    ASSERT_TRUE(stream->Write(item));
  }
  stream->WritesDone();
  ASSERT_TRUE(Eventually([this] { return service_->requests_in_flight() == 1; }));
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_EQ(service_->requests_in_flight(), 1);
  backend_.hold = false;
  int count = 0;
  v1::SolveStreamResponse reply;
  while (stream->Read(&reply)) ++count;
  EXPECT_EQ(count, 4);
  EXPECT_TRUE(stream->Finish().ok());
}

// Replies that a client does not read are not piled up without limit, however small their requests.
TEST_F(StreamTest, UnreadRepliesAreBounded) {
  scheduler_options_.max_queue_bytes = 20 << 20;
  Start();
  grpc::ClientContext context;
  Stream stream = stub_->SolveStream(&context);
  v1::SolveStreamRequest item;
  *item.mutable_solve()->mutable_point_cloud()->mutable_x() = Filled({1000, 1}, 1);
  *item.mutable_solve()->mutable_point_cloud()->mutable_y() = Filled({1000, 1}, 1);
  item.mutable_solve()->mutable_point_cloud()->set_cost(v1::COST_FUNCTION_SQUARED_EUCLIDEAN);
  item.mutable_solve()->mutable_solver()->set_epsilon(1);
  item.mutable_solve()->add_outputs(v1::OUTPUT_PLAN);  // 4 MB for 8 KB.
  constexpr int kCount = 40;
  for (int i = 0; i < kCount; ++i) ASSERT_TRUE(stream->Write(item));
  stream->WritesDone();
  ASSERT_TRUE(Eventually([this] { return service_->held_bytes() > 4 << 20 && service_->requests_in_flight() == 0; }));
  EXPECT_LE(service_->held_bytes(), 20 << 20);
  int solved = 0, refused = 0;
  v1::SolveStreamResponse reply;
  while (stream->Read(&reply)) {
    if (reply.has_solve()) {
      ++solved;
    } else {
      EXPECT_EQ(Reason(reply), "QUEUE_FULL");
      ++refused;
    }
  }
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(solved + refused, kCount);
  EXPECT_GE(solved, 4);
  EXPECT_GE(refused, 1);
}

TEST_F(StreamTest, CancellationDropsItsProblems) {
  backend_.hold = true;
  scheduler_options_.turn_problems = 10;  // All run, none waits for its turn.
  Start();
  grpc::ClientContext context;
  Stream stream = stub_->SolveStream(&context);
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(stream->Write(Item(std::to_string(i))));
  ASSERT_TRUE(Eventually([this] { return backend_.alive == 10; }));
  context.TryCancel();
  EXPECT_EQ(stream->Finish().error_code(), StatusCode::CANCELLED);
  EXPECT_TRUE(Eventually([this] { return service_->requests_in_flight() == 0 && backend_.alive == 0; }));
  EXPECT_EQ(Abandoned("running", "cancelled"), 10);
}

TEST_F(StreamTest, DeadlineHoldsForEachProblem) {
  backend_.hold = true;
  Start();
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Milliseconds(200)));
  Stream stream = stub_->SolveStream(&context);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(stream->Write(Item(std::to_string(i))));
  EXPECT_EQ(stream->Finish().error_code(), StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(Eventually([this] { return service_->requests_in_flight() == 0; }));
  EXPECT_EQ(Abandoned("running", "deadline"), 3);
}

TEST_F(StreamTest, AStoppingServerAnswersWhatItHasReadAndEndsTheStream) {
  backend_.hold = true;
  Start();
  grpc::ClientContext busy_context, idle_context;
  Stream busy = stub_->SolveStream(&busy_context);
  Stream idle = stub_->SolveStream(&idle_context);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(busy->Write(Item(std::to_string(i))));
  ASSERT_TRUE(Eventually([this] { return backend_.alive == 3; }));
  service_->SetState(ServiceState::kStopping);
  grpc::Status status = idle->Finish();
  EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(sinkhorn::Reason(status), "DRAINING");

  backend_.hold = false;
  int answers = 0;
  v1::SolveStreamResponse reply;
  while (busy->Read(&reply)) answers += reply.has_solve();
  EXPECT_EQ(answers, 3);
  status = busy->Finish();
  EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(sinkhorn::Reason(status), "DRAINING");
}

TEST_F(StreamTest, ANewStreamOnAStoppingServerEndsAtOnce) {
  Start(ServiceState::kStopping);
  grpc::ClientContext context;
  EXPECT_EQ(stub_->SolveStream(&context)->Finish().error_code(), StatusCode::UNAVAILABLE);
}

}  // namespace
}  // namespace sinkhorn
