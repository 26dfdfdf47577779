// Thin calls: prepare a context, call the stub, translate the status.
#include "client/cpp/client.h"

#include <algorithm>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/cpp/encode.h"
#include "grpcpp/client_context.h"

namespace sinkhorn::client {
namespace {

constexpr char kSolveMethod[] = "/sinkhorn.v1.SinkhornService/Solve";
constexpr size_t kInPlaceBytes = 64 << 10;  // From here on a request is sent from where it lies.

// No answer is empty.
bool IsMissing(const v1::SolveResponse& response) { return response.ByteSizeLong() == 0; }

}  // namespace

// The asynchronous calls of a client that have not ended. The client's destructor waits for them, because gRPC cannot
// close a channel on one of its own threads: the last reference to it must not go there.
class Client::CallCount {
 public:
  void Enter() {
    absl::MutexLock lock(&mutex_);
    ++count_;
  }
  void Leave() {
    absl::MutexLock lock(&mutex_);
    --count_;
  }
  void AwaitZero() {
    const auto zero = [this] { return count_ == 0; };
    absl::MutexLock lock(&mutex_, absl::Condition(&zero));
  }

 private:
  absl::Mutex mutex_;
  int64_t count_ ABSL_GUARDED_BY(mutex_) = 0;
};

// One asynchronous call: owns what gRPC writes to until it has ended.
class Client::AsyncCall : public Call {
 public:
  AsyncCall(std::shared_ptr<CallCount> count, absl::Time deadline, Callback done)
      : count_(std::move(count)), deadline_(deadline), done_(std::move(done)) {
    count_->Enter();
  }

  void Cancel() override {
    absl::MutexLock lock(&mutex_);
    cancelled_ = true;
    if (context_ != nullptr) context_->TryCancel();
  }

  void End(const grpc::Status& status) {
    bool cancelled;
    {
      absl::MutexLock lock(&mutex_);
      context_.reset();  // And with it a reference to the channel.
      cancelled = cancelled_;
    }
    if (!status.ok()) {
      done_(FromGrpcStatus(status));
    } else if (IsMissing(response_)) {
      done_(MissingAnswer(deadline_, cancelled));
    } else {
      done_(std::move(response_));
    }
    done_ = nullptr;  // What it captured may go with the client.
    count_->Leave();
  }

  // Of a call that has not begun.
  grpc::ClientContext* context() ABSL_NO_THREAD_SAFETY_ANALYSIS { return context_.get(); }
  v1::SolveResponse* response() { return &response_; }

 private:
  const std::shared_ptr<CallCount> count_;
  const absl::Time deadline_;
  Callback done_;
  v1::SolveResponse response_;
  absl::Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<grpc::ClientContext> context_ ABSL_GUARDED_BY(mutex_) = std::make_unique<grpc::ClientContext>();
};

namespace {

// ---- A stream ----

class GrpcSolveStream : public SolveStream {
 public:
  GrpcSolveStream(v1::SinkhornService::Stub* stub, std::unique_ptr<grpc::ClientContext> context)
      : context_(std::move(context)), stream_(stub->SolveStream(context_.get())) {}

  ~GrpcSolveStream() override {
    if (finished_) return;
    context_->TryCancel();
    Finish().IgnoreError();
  }

  bool Write(v1::SolveRequest request) override {
    v1::SolveStreamRequest message;
    message.mutable_solve()->Swap(&request);
    return stream_->Write(message);
  }

  void WritesDone() override { stream_->WritesDone(); }

  bool Read(Reply* reply) override {
    v1::SolveStreamResponse message;
    if (!stream_->Read(&message)) return false;
    reply->request_id = std::move(*message.mutable_request_id());
    if (message.has_error()) {
      reply->result = FromRpcStatus(message.error());
    } else if (IsMissing(message.solve())) {
      reply->result = absl::InternalError("the server sent neither an answer nor an error");
    } else {
      reply->result = std::move(*message.mutable_solve());
    }
    return true;
  }

  absl::Status Finish() override {
    if (finished_) return status_;
    finished_ = true;
    v1::SolveStreamResponse unread;  // Finish waits for the status, which comes after all replies.
    while (stream_->Read(&unread)) {
    }
    status_ = FromGrpcStatus(stream_->Finish());
    return status_;
  }

  void Cancel() override { context_->TryCancel(); }

 private:
  const std::unique_ptr<grpc::ClientContext> context_;
  const std::unique_ptr<grpc::ClientReaderWriter<v1::SolveStreamRequest, v1::SolveStreamResponse>> stream_;
  bool finished_ = false;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Client>> Client::Create(const std::string& target, const ClientOptions& options) {
  absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = CreateChannel(target, options);
  if (!channel.ok()) return channel.status();
  return std::make_unique<Client>(*std::move(channel), options);
}

Client::Client(std::shared_ptr<grpc::Channel> channel, const ClientOptions& options)
    : channel_(std::move(channel)),
      stub_(v1::SinkhornService::NewStub(channel_)),
      encoded_stub_(std::make_unique<grpc::TemplatedGenericStub<grpc::ByteBuffer, v1::SolveResponse>>(channel_)),
      health_(grpc::health::v1::Health::NewStub(channel_)),
      calls_(std::make_shared<CallCount>()),
      wait_for_ready_(options.wait_for_ready),
      authorization_(options.auth_token.empty() ? "" : absl::StrCat("Bearer ", options.auth_token)) {}

Client::~Client() { calls_->AwaitZero(); }

void Client::Prepare(absl::Time deadline, bool wait_for_ready, grpc::ClientContext* context) const {
  if (deadline != absl::InfiniteFuture()) context->set_deadline(absl::ToChronoTime(deadline));
  context->set_wait_for_ready(wait_for_ready);
  if (!authorization_.empty()) context->AddMetadata("authorization", authorization_);
}

absl::StatusOr<v1::SolveResponse> Client::Solve(const v1::SolveRequest& request, absl::Time deadline) {
  grpc::ClientContext context;
  Prepare(deadline, wait_for_ready_, &context);
  v1::SolveResponse response;
  const grpc::Status status = stub_->Solve(&context, request, &response);
  if (!status.ok()) return FromGrpcStatus(status, deadline);
  if (IsMissing(response)) return MissingAnswer(deadline);
  return response;
}

absl::StatusOr<v1::SolveResponse> Client::Solve(v1::SolveRequest&& request, absl::Time deadline) {
  if (request.ByteSizeLong() < kInPlaceBytes) return Solve(static_cast<const v1::SolveRequest&>(request), deadline);
  absl::Notification done;
  absl::StatusOr<v1::SolveResponse> response;
  SolveAsync(std::move(request), deadline, [&](absl::StatusOr<v1::SolveResponse> result) {
    response = std::move(result);
    done.Notify();
  });
  done.WaitForNotification();
  return response;
}

std::shared_ptr<Call> Client::SolveAsync(const v1::SolveRequest& request, absl::Time deadline, Callback done) {
  auto call = std::make_shared<AsyncCall>(calls_, deadline, std::move(done));
  Prepare(deadline, wait_for_ready_, call->context());
  stub_->async()->Solve(call->context(), &request, call->response(),
                        [call](grpc::Status status) { call->End(status); });
  return call;
}

std::shared_ptr<Call> Client::SolveAsync(v1::SolveRequest&& request, absl::Time deadline, Callback done) {
  if (request.ByteSizeLong() < kInPlaceBytes) {
    return SolveAsync(static_cast<const v1::SolveRequest&>(request), deadline, std::move(done));
  }
  auto call = std::make_shared<AsyncCall>(calls_, deadline, std::move(done));
  Prepare(deadline, wait_for_ready_, call->context());
  const grpc::ByteBuffer encoded = EncodeInPlace(std::move(request));
  encoded_stub_->UnaryCall(call->context(), kSolveMethod, grpc::StubOptions(), &encoded, call->response(),
                           [call](grpc::Status status) { call->End(status); });
  return call;
}

std::vector<absl::StatusOr<v1::SolveResponse>> Client::SolveAll(absl::Span<const v1::SolveRequest> requests,
                                                                absl::Time deadline, int max_in_flight) {
  std::vector<absl::StatusOr<v1::SolveResponse>> results(requests.size(), absl::UnknownError("not sent"));
  // Shared with the callbacks, the last of which may still be unlocking when the wait below has returned.
  struct State {
    absl::Mutex mutex;
    int in_flight = 0;
  };
  const auto state = std::make_shared<State>();
  const auto wait_until_below = [&state](int limit) {
    const auto below = [&state, limit] { return state->in_flight < limit; };
    state->mutex.LockWhen(absl::Condition(&below));
  };
  for (size_t i = 0; i < requests.size(); ++i) {
    wait_until_below(std::max(1, max_in_flight));
    ++state->in_flight;
    state->mutex.Unlock();
    SolveAsync(requests[i], deadline, [state, result = &results[i]](absl::StatusOr<v1::SolveResponse> response) {
      *result = std::move(response);
      absl::MutexLock lock(&state->mutex);
      --state->in_flight;
    });
  }
  wait_until_below(1);
  state->mutex.Unlock();
  return results;
}

std::unique_ptr<SolveStream> Client::OpenStream(absl::Time deadline) {
  auto context = std::make_unique<grpc::ClientContext>();
  Prepare(deadline, wait_for_ready_, context.get());
  return std::make_unique<GrpcSolveStream>(stub_.get(), std::move(context));
}

absl::StatusOr<v1::GetServerInfoResponse> Client::GetServerInfo(absl::Time deadline) {
  grpc::ClientContext context;
  Prepare(deadline, wait_for_ready_, &context);
  v1::GetServerInfoResponse response;
  const grpc::Status status = stub_->GetServerInfo(&context, v1::GetServerInfoRequest(), &response);
  if (!status.ok()) return FromGrpcStatus(status, deadline);
  return response;
}

absl::StatusOr<bool> Client::CheckHealth(absl::Time deadline, absl::string_view service) {
  grpc::ClientContext context;
  Prepare(deadline, wait_for_ready_, &context);
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(std::string(service));
  grpc::health::v1::HealthCheckResponse response;
  const grpc::Status status = health_->Check(&context, request, &response);
  if (!status.ok()) return FromGrpcStatus(status, deadline);
  return response.status() == grpc::health::v1::HealthCheckResponse::SERVING;
}

absl::Status Client::WaitForReady(absl::Time deadline) {
  constexpr absl::Duration kPauseMax = absl::Milliseconds(500);
  absl::Duration pause = absl::Milliseconds(5);
  std::string seen;
  while (true) {
    const absl::StatusOr<bool> serving = CheckHealth(std::min(deadline, absl::Now() + absl::Seconds(5)));
    if (serving.ok() && *serving) return absl::OkStatus();
    const bool timed_out = serving.status().code() == absl::StatusCode::kDeadlineExceeded;
    if (!serving.ok() && !timed_out && serving.status().code() != absl::StatusCode::kUnavailable) {
      return serving.status();  // It will not change.
    }
    // A check that `deadline` cut short tells less than the one before it.
    if (!timed_out || seen.empty()) {
      seen =
          serving.ok() ? "it answers NOT_SERVING (starting, draining or out of devices)" : Describe(serving.status());
    }
    if (absl::Now() + pause >= deadline) {
      return absl::DeadlineExceededError(absl::StrCat("the server is not ready: ", seen));
    }
    absl::SleepFor(pause);
    pause = std::min(2 * pause, kPauseMax);
  }
}

}  // namespace sinkhorn::client
