// The client against a real gRPC server on loopback whose answers are the test's.
#include "client/cpp/client.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/cpp/encode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/fake_service.h"

namespace sinkhorn::client {
namespace {

using ::testing::HasSubstr;

// Generous: only a hang reaches it.
absl::Time Soon() { return absl::Now() + absl::Seconds(20); }

std::unique_ptr<Client> Connect(const std::string& target, const ClientOptions& options = {}) {
  return *Client::Create(target, options);
}

// Returns the logits as the plan.
grpc::Status Echo(grpc::ServerContext*, const v1::SolveRequest& request, v1::SolveResponse* response) {
  *response->mutable_plan() = request.normalization().logits();
  return grpc::Status::OK;
}

v1::SolveRequest Request(const std::string& id, int64_t size = 4) {
  v1::SolveRequest request = NormalizationRequest(MakeTensor(std::vector<float>(size * size, 1.5f), {size, size}), 3);
  request.set_request_id(id);
  return request;
}

TEST(ClientTest, Solves) {
  FakeServer server(Echo);
  const auto client = Connect(server.target());

  const absl::StatusOr<v1::SolveResponse> response = client->Solve(Request("first"), Soon());

  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_EQ(response->request_id(), "first");
  EXPECT_EQ(View<float>(response->plan())->size(), 16u);
}

TEST(ClientTest, ErrorsKeepCodeMessageAndReason) {
  FakeServer server([](auto...) {
    return ServiceError(grpc::StatusCode::INVALID_ARGUMENT, "INVALID_FIELD", "solver.epsilon must be > 0; got -1");
  });

  const absl::Status status = Connect(server.target())->Solve(Request("bad"), Soon()).status();

  EXPECT_EQ(Describe(status), "INVALID_ARGUMENT (INVALID_FIELD): solver.epsilon must be > 0; got -1");
  EXPECT_EQ(server.solve_count(), 1) << "an invalid request must not be retried";
}

TEST(ClientTest, RetriesUnavailableAndQueueFull) {
  std::atomic<int> calls{0};
  FakeServer server(
      [&calls](grpc::ServerContext* context, const v1::SolveRequest& request, v1::SolveResponse* response) {
        switch (calls++) {
          case 0:
            return ServiceError(grpc::StatusCode::UNAVAILABLE, "DRAINING", "draining");
          case 1:
            return ServiceError(grpc::StatusCode::RESOURCE_EXHAUSTED, "QUEUE_FULL", "queue is full");
          default:
            return Echo(context, request, response);
        }
      });

  EXPECT_TRUE(Connect(server.target())->Solve(Request("patient"), Soon()).ok());
  EXPECT_EQ(server.solve_count(), 3);
}

TEST(ClientTest, AMovedRequestIsSentAsItIs) {
  FakeServer server(Echo);
  const auto client = Connect(server.target());
  for (const int64_t size : {4, 200, 1500}) {  // Below and above what is sent in place.
    v1::SolveRequest request = Request("moved", size);
    const v1::Tensor logits = request.normalization().logits();

    const auto response = client->Solve(std::move(request), Soon());

    ASSERT_TRUE(response.ok()) << response.status();
    EXPECT_EQ(response->request_id(), "moved");
    EXPECT_TRUE(response->plan().SerializeAsString() == logits.SerializeAsString());
  }
}

TEST(ClientTest, AMovedRequestMayOutliveItsCall) {
  absl::Notification leave;
  FakeServer server([&leave](auto...) {
    leave.WaitForNotification();
    return grpc::Status::OK;
  });
  const auto client = Connect(server.target());
  std::vector<absl::Status> statuses;
  for (int i = 0; i < 4; ++i) {  // The deadline passes while most of the 64 MB are still unsent.
    statuses.push_back(client->Solve(Request("late", 4000), absl::Now() + absl::Milliseconds(20)).status());
  }
  leave.Notify();

  for (const absl::Status& status : statuses) EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(EncodeTest, TheBytesAreThoseOfProtobuf) {
  for (const int64_t size : {1, 10, 31, 32, 33, 100, 1000}) {
    v1::SolveRequest request = Request(std::string(100, 'r'), size);
    *request.mutable_normalization()->mutable_cotangent() = request.normalization().logits();
    *request.mutable_apply_v() = MakeTensor(std::vector<double>(size, 2.5), {size, 1});
    request.mutable_solver()->set_tolerance(1e-3);
    const std::string expected = request.SerializeAsString();
    const char* large = request.normalization().logits().data().data();

    const grpc::ByteBuffer encoded = EncodeInPlace(std::move(request));

    std::vector<grpc::Slice> slices;
    ASSERT_TRUE(encoded.Dump(&slices).ok());
    std::string actual;
    bool in_place = false;
    for (const grpc::Slice& slice : slices) {
      actual.append(slice.begin(), slice.end());
      in_place |= reinterpret_cast<const char*>(slice.begin()) == large;
    }
    EXPECT_TRUE(actual == expected) << size;
    EXPECT_EQ(in_place, size >= 32) << size;  // What does not fit the rest of a block of 4 KiB.
  }
}

// gRPC's default retries nothing above 256 KiB.
TEST(ClientTest, RetriesLargeRequestsToo) {
  std::atomic<int> calls{0};
  FakeServer server(
      [&calls](grpc::ServerContext* context, const v1::SolveRequest& request, v1::SolveResponse* response) {
        if (calls++ == 0) return ServiceError(grpc::StatusCode::UNAVAILABLE, "DRAINING", "draining");
        return Echo(context, request, response);
      });

  const v1::SolveRequest request = Request("large", 2000);  // 16 MB each way.
  const auto response = Connect(server.target())->Solve(request, Soon());

  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_EQ(response->plan().data().size(), 16'000'000u);
  EXPECT_EQ(server.solve_count(), 2);

  calls = 0;
  EXPECT_TRUE(Connect(server.target())->Solve(v1::SolveRequest(request), Soon()).ok());
  EXPECT_EQ(server.solve_count(), 4);
}

TEST(ClientTest, OneAttemptMeansOne) {
  FakeServer server([](auto...) { return ServiceError(grpc::StatusCode::UNAVAILABLE, "DRAINING", "draining"); });
  ClientOptions options;
  options.max_attempts = 1;

  EXPECT_EQ(Connect(server.target(), options)->Solve(Request("once"), Soon()).status().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(server.solve_count(), 1);
}

TEST(ClientTest, GivesUpAfterTheLastAttempt) {
  FakeServer server([](auto...) { return ServiceError(grpc::StatusCode::UNAVAILABLE, "DRAINING", "draining"); });

  const absl::Status status = Connect(server.target())->Solve(Request("stubborn"), Soon()).status();

  EXPECT_EQ(GetErrorDetails(status).reason, "DRAINING");
  EXPECT_EQ(server.solve_count(), 5);
}

TEST(ClientTest, ThePushbackSetsTheWait) {
  std::atomic<int> calls{0};
  FakeServer server(
      [&calls](grpc::ServerContext* context, const v1::SolveRequest& request, v1::SolveResponse* response) {
        if (calls++ > 0) return Echo(context, request, response);
        context->AddTrailingMetadata("grpc-retry-pushback-ms", "300");
        return ServiceError(grpc::StatusCode::RESOURCE_EXHAUSTED, "QUEUE_FULL", "queue is full");
      });
  const absl::Time start = absl::Now();

  EXPECT_TRUE(Connect(server.target())->Solve(Request("later"), Soon()).ok());

  EXPECT_GE(absl::Now() - start, absl::Milliseconds(299));
}

TEST(ClientTest, TheDeadlineEndsACall) {
  FakeServer server([](grpc::ServerContext* context, auto...) {
    while (!context->IsCancelled()) absl::SleepFor(absl::Milliseconds(1));
    return grpc::Status::CANCELLED;
  });
  const absl::Time start = absl::Now();

  const absl::Status status =
      Connect(server.target())->Solve(Request("slow"), start + absl::Milliseconds(100)).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(95));
}

TEST(ClientTest, AsyncRunsTheCallbackOnce) {
  FakeServer server(Echo);
  const auto client = Connect(server.target());
  std::atomic<int> calls{0};
  absl::Notification done;
  absl::StatusOr<v1::SolveResponse> response;

  client->SolveAsync(Request("async"), Soon(), [&](absl::StatusOr<v1::SolveResponse> result) {
    response = std::move(result);
    if (++calls == 1) done.Notify();
  });
  done.WaitForNotification();

  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_EQ(response->request_id(), "async");
  EXPECT_EQ(calls, 1);
}

TEST(ClientTest, AsyncMayBeCancelled) {
  absl::Notification arrived;
  FakeServer server([&arrived](grpc::ServerContext* context, auto...) {
    arrived.Notify();
    while (!context->IsCancelled()) absl::SleepFor(absl::Milliseconds(1));
    return grpc::Status::CANCELLED;
  });
  const auto client = Connect(server.target());
  absl::Notification done;
  absl::Status status;

  const std::shared_ptr<Call> call =
      client->SolveAsync(Request("doomed"), Soon(), [&](absl::StatusOr<v1::SolveResponse> result) {
        status = result.status();
        done.Notify();
      });
  arrived.WaitForNotification();
  call->Cancel();
  done.WaitForNotification();

  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
}

TEST(ClientTest, AMissingAnswerIsAnError) {
  FakeServer answerless(nullptr);
  FakeServer empty([](grpc::ServerContext*, const v1::SolveRequest&, v1::SolveResponse* response) {
    response->Clear();
    return grpc::Status::OK;
  });
  for (const FakeServer* server : {&answerless, &empty}) {
    const auto client = Connect(server->target());
    for (const int size : {4, 200}) {  // Encoded by gRPC and in place.
      absl::Notification done;
      absl::Status status;
      client->SolveAsync(Request("lost", size), Soon(), [&](absl::StatusOr<v1::SolveResponse> result) {
        status = result.status();
        done.Notify();
      });
      done.WaitForNotification();
      EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    }
    EXPECT_FALSE(client->Solve(Request("lost"), Soon()).ok());
  }
  const auto client = Connect(empty.target());
  const auto stream = client->OpenStream(Soon());
  ASSERT_TRUE(stream->Write(Request("lost")));
  SolveStream::Reply reply;
  ASSERT_TRUE(stream->Read(&reply));
  EXPECT_EQ(reply.result.status().code(), absl::StatusCode::kInternal) << reply.result.status();
}

// gRPC aborts when a channel is closed on one of its own threads, where callbacks run.
TEST(ClientTest, AClientMayGoAsSoonAsItsCallsHaveEnded) {
  FakeServer server(Echo);
  for (int i = 0; i < 200; ++i) {
    auto client = Connect(server.target());
    absl::Notification done;
    client->SolveAsync(Request("brief", i % 2 == 0 ? 4 : 200), Soon(), [&done](auto) { done.Notify(); });
    done.WaitForNotification();
    client.reset();
  }
}

TEST(ClientTest, AClientWaitsForItsCallbacks) {
  FakeServer server(Echo);
  auto client = Connect(server.target());
  std::atomic<bool> returned{false};

  client->SolveAsync(Request("slow"), Soon(), [&returned](auto) {
    absl::SleepFor(absl::Milliseconds(50));
    returned = true;
  });
  client.reset();

  EXPECT_TRUE(returned);
}

TEST(ClientTest, SolveAllKeepsOrderAndBoundsFlight) {
  std::atomic<int> in_flight{0}, most{0};
  FakeServer server([&](grpc::ServerContext*, const v1::SolveRequest& request, v1::SolveResponse*) {
    const int now = ++in_flight;
    int seen = most;
    while (seen < now && !most.compare_exchange_weak(seen, now)) {
    }
    absl::SleepFor(absl::Milliseconds(2));
    --in_flight;
    if (request.request_id() == "13") {
      return ServiceError(grpc::StatusCode::FAILED_PRECONDITION, "DIVERGED", "not finite");
    }
    return grpc::Status::OK;
  });
  std::vector<v1::SolveRequest> requests;
  for (int i = 0; i < 50; ++i) requests.push_back(Request(absl::StrCat(i)));

  const auto results = Connect(server.target())->SolveAll(requests, Soon(), /*max_in_flight=*/4);

  ASSERT_EQ(results.size(), 50u);
  for (int i = 0; i < 50; ++i) {
    if (i == 13) {
      EXPECT_EQ(GetErrorDetails(results[i].status()).reason, "DIVERGED");
    } else {
      ASSERT_TRUE(results[i].ok()) << results[i].status();
      EXPECT_EQ(results[i]->request_id(), absl::StrCat(i));
    }
  }
  EXPECT_LE(most, 4);
  EXPECT_GE(most, 2) << "nothing ran side by side";
  EXPECT_TRUE(Connect(server.target())->SolveAll({}, Soon()).empty());
}

TEST(ClientTest, StreamsAnswersAndErrorsSideBySide) {
  FakeServer server([](grpc::ServerContext* context, const v1::SolveRequest& request, v1::SolveResponse* response) {
    if (request.request_id() == "1") return ServiceError(grpc::StatusCode::INVALID_ARGUMENT, "INVALID_FIELD", "bad");
    return Echo(context, request, response);
  });
  const auto client = Connect(server.target());
  const auto stream = client->OpenStream(Soon());
  std::thread writer([&stream] {
    for (int i = 0; i < 20; ++i) EXPECT_TRUE(stream->Write(Request(absl::StrCat(i))));
    stream->WritesDone();
  });

  int count = 0;
  SolveStream::Reply reply;
  while (stream->Read(&reply)) {
    ++count;
    EXPECT_EQ(reply.result.ok(), reply.request_id != "1");
    if (!reply.result.ok()) {
      EXPECT_EQ(GetErrorDetails(reply.result.status()).reason, "INVALID_FIELD");
    }
  }
  writer.join();

  EXPECT_EQ(count, 20);
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_FALSE(stream->Write(Request("too late")));
}

TEST(ClientTest, AnAbandonedStreamIsCancelled) {
  FakeServer server(Echo);
  const auto client = Connect(server.target());
  auto stream = client->OpenStream(absl::InfiniteFuture());
  ASSERT_TRUE(stream->Write(Request("0")));

  stream.reset();  // Must return although nothing was read.

  EXPECT_TRUE(client->Solve(Request("after"), Soon()).ok());
}

TEST(ClientTest, SendsTheToken) {
  std::string seen;
  FakeServer server([&seen](grpc::ServerContext* context, auto...) {
    const auto found = context->client_metadata().find("authorization");
    if (found != context->client_metadata().end()) seen.assign(found->second.data(), found->second.size());
    return grpc::Status::OK;
  });
  ClientOptions options;
  options.auth_token = "secret";

  EXPECT_TRUE(Connect(server.target(), options)->Solve(Request("known"), Soon()).ok());

  EXPECT_EQ(seen, "Bearer secret");
}

TEST(ClientTest, HealthInfoAndReadiness) {
  FakeServer server(Echo);
  const auto client = Connect(server.target());

  EXPECT_TRUE(*client->CheckHealth(Soon()));
  EXPECT_EQ(client->CheckHealth(Soon(), "nobody").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(client->GetServerInfo(Soon())->version(), "1.2.3");
  EXPECT_TRUE(client->WaitForReady(Soon()).ok());
  server.set_serving(false);
  EXPECT_FALSE(*client->CheckHealth(Soon()));
  const absl::Status late = client->WaitForReady(absl::Now() + absl::Milliseconds(500));
  EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(late.message()), HasSubstr("NOT_SERVING"));
}

TEST(ClientTest, FindsAServerThatComesLateSoon) {
  int port;
  {
    FakeServer server(Echo);  // Finds a free port, and gives it back.
    port = server.port();
  }
  ClientOptions options;
  options.wait_for_ready = true;
  const auto client = Connect(absl::StrCat("127.0.0.1:", port), options);
  absl::Notification done;
  absl::StatusOr<v1::SolveResponse> response;
  client->SolveAsync(Request("early"), absl::Now() + absl::Seconds(60), [&](absl::StatusOr<v1::SolveResponse> result) {
    response = std::move(result);
    done.Notify();
  });
  absl::SleepFor(absl::Seconds(6));  // gRPC's own pause between attempts has grown to 10 s by now.

  FakeServer server(Echo, port);
  EXPECT_TRUE(done.WaitForNotificationWithTimeout(absl::Seconds(4)));
  done.WaitForNotification();
  EXPECT_TRUE(response.ok()) << response.status();
}

TEST(ClientTest, WaitForReadyOutlastsAServerThatIsNotThereYet) {
  int port;
  {
    FakeServer server(Echo);  // Finds a free port, and gives it back.
    port = server.port();
  }
  const auto client = Connect(absl::StrCat("127.0.0.1:", port));
  EXPECT_EQ(client->CheckHealth(absl::Now() + absl::Seconds(5)).status().code(), absl::StatusCode::kUnavailable);
  absl::Status ready;
  std::thread waiter([&] { ready = client->WaitForReady(Soon()); });

  absl::SleepFor(absl::Milliseconds(50));
  FakeServer server(Echo, port);
  waiter.join();

  EXPECT_TRUE(ready.ok()) << ready;
}

TEST(ClientTest, OptionsAreChecked) {
  ClientOptions options;
  options.max_attempts = 0;
  EXPECT_EQ(Client::Create("localhost:1", options).status().code(), absl::StatusCode::kInvalidArgument);
  options = {};
  options.max_message_bytes = int64_t{1} << 31;
  EXPECT_EQ(Client::Create("localhost:1", options).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Client::Create("").status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace sinkhorn::client
