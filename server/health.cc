#include "server/health.h"

#include <grpcpp/support/async_stream.h>

#include <utility>

namespace sinkhorn {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

namespace {

const char* const kReadinessNames[] = {"", "sinkhorn.v1.SinkhornService"};
constexpr char kLiveness[] = "liveness";

grpc::Status ShuttingDown() { return grpc::Status(grpc::StatusCode::UNAVAILABLE, "the server is shutting down"); }

}  // namespace

// One Watch call, from before it arrives to its end. Writes the latest status whenever it differs from the last one
// written; statuses that come and go while a write is under way may be skipped.
class HealthService::Watcher final {
 public:
  // Makes room on `loop` for one more call; when it has been taken, the call makes room for the next.
  static void Expect(HealthService* service, RpcLoop* loop) { new Watcher(service, loop); }

  const std::string& name() const { return request_.service(); }

  void Set(Status status) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    wanted_ = status;
    GoOn();
  }

  // Ends the call once the latest status is written.
  void End(const grpc::Status& status) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    if (ending_) return;
    ending_ = true;
    end_status_ = status;
    GoOn();
  }

 private:
  Watcher(HealthService* service, RpcLoop* loop)
      : service_(service),
        presence_(loop),
        arrived_(this, &Watcher::OnArrived),
        written_(this, &Watcher::OnWritten),
        done_(this, &Watcher::OnDone),
        finished_(this, &Watcher::OnFinished) {
    rpc_.AsyncNotifyWhenDone(&done_);
    service->RequestWatch(&rpc_, &request_, &writer_, loop->queue(), loop->queue(), &arrived_);
  }

  void OnArrived(bool ok) {
    if (!ok) {
      delete this;  // The server shuts down: none came.
      return;
    }
    Expect(service_, presence_.loop());
    service_->Add(this);
  }

  void OnWritten(bool ok) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (!ok) broken_ = true;  // OnDone follows.
    GoOn();
  }

  void OnDone(bool) {
    {
      absl::MutexLock lock(&mutex_);
      broken_ = true;
    }
    End(grpc::Status(grpc::StatusCode::CANCELLED, "the watcher went away"));
    EndOneOfTwo();
  }

  void OnFinished(bool) { EndOneOfTwo(); }

  // OnDone and OnFinished, in either order, are the last of a call; both come in the loop's thread.
  void EndOneOfTwo() {
    if (!std::exchange(one_ended_, true)) return;
    service_->Remove(this);
    { absl::MutexLock lock(&mutex_); }  // Whoever called Finish has let go of it.
    delete this;
  }

  // Writes what is new, or ends if that was asked for.
  void GoOn() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || finishing_) return;
    if (!broken_ && !(written_any_ && response_.status() == wanted_)) {
      written_any_ = writing_ = true;
      response_.set_status(wanted_);
      writer_.Write(response_, &written_);
    } else if (ending_) {
      finishing_ = true;
      writer_.Finish(end_status_, &finished_);
    }
  }

  HealthService* const service_;
  const RpcLoop::Presence presence_;
  RpcLoop::Step<Watcher> arrived_, written_, done_, finished_;
  bool one_ended_ = false;
  grpc::ServerContext rpc_;
  HealthCheckRequest request_;

  absl::Mutex mutex_;
  grpc::ServerAsyncWriter<HealthCheckResponse> writer_ ABSL_GUARDED_BY(mutex_){&rpc_};
  Status wanted_ ABSL_GUARDED_BY(mutex_) = HealthCheckResponse::UNKNOWN;
  bool written_any_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;  // Nobody receives statuses any more.
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  bool finishing_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Status end_status_ ABSL_GUARDED_BY(mutex_);
  HealthCheckResponse response_ ABSL_GUARDED_BY(mutex_);
};

void HealthService::ExpectCalls(RpcLoop* loop) {
  SmallCall<HealthCheckRequest, HealthCheckResponse>::Expect(&check_, loop);
  Watcher::Expect(this, loop);
}

HealthService::Status HealthService::StatusOf(const std::string& name) const {
  if (name == kLiveness) return HealthCheckResponse::SERVING;
  for (const char* readiness : kReadinessNames) {
    if (name == readiness) return ready_ ? HealthCheckResponse::SERVING : HealthCheckResponse::NOT_SERVING;
  }
  return HealthCheckResponse::SERVICE_UNKNOWN;
}

void HealthService::SetReady(bool ready) {
  absl::MutexLock lock(&mutex_);
  ready_ = ready;
  for (Watcher* watcher : watchers_) watcher->Set(StatusOf(watcher->name()));
}

void HealthService::Shutdown() {
  absl::MutexLock lock(&mutex_);
  shut_down_ = true;
  for (Watcher* watcher : watchers_) watcher->End(ShuttingDown());
}

void HealthService::Add(Watcher* watcher) {
  absl::MutexLock lock(&mutex_);
  watchers_.insert(watcher);
  watcher->Set(StatusOf(watcher->name()));
  if (shut_down_) watcher->End(ShuttingDown());
}

void HealthService::Remove(Watcher* watcher) {
  absl::MutexLock lock(&mutex_);
  watchers_.erase(watcher);
}

grpc::Status HealthService::Check(const std::string& name, HealthCheckResponse* response) {
  absl::MutexLock lock(&mutex_);
  response->set_status(StatusOf(name));
  if (response->status() == HealthCheckResponse::SERVICE_UNKNOWN)
    return grpc::Status(grpc::StatusCode::NOT_FOUND, "no service of that name");
  return grpc::Status::OK;
}

}  // namespace sinkhorn
