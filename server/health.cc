#include "server/health.h"

#include <utility>

namespace sinkhorn {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

namespace {

const char* const kReadinessNames[] = {"", "sinkhorn.v1.SinkhornService"};
constexpr char kLiveness[] = "liveness";

grpc::Status ShuttingDown() { return grpc::Status(grpc::StatusCode::UNAVAILABLE, "the server is shutting down"); }

}  // namespace

// One Watch call. Writes the latest status whenever it differs from the last one written; statuses that come and go
// while a write is under way may be skipped.
class HealthService::Watcher final : public grpc::ServerWriteReactor<HealthCheckResponse> {
 public:
  Watcher(HealthService* service, std::string name, Status status)
      : service_(service), name_(std::move(name)), wanted_(status) {
    absl::MutexLock lock(&mutex_);
    WriteIfChanged();
  }

  const std::string& name() const { return name_; }

  void Set(Status status) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    wanted_ = status;
    WriteIfChanged();
  }

  // Ends the call once what is being written is written.
  void End(const grpc::Status& status) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    if (ending_) return;
    ending_ = true;
    end_status_ = status;
    if (!writing_) Finish(end_status_);
  }

  void OnWriteDone(bool ok) override ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (ending_) {
      Finish(end_status_);
    } else if (ok) {
      WriteIfChanged();
    }  // Else the call is broken: OnCancel ends it.
  }

  void OnCancel() override { End(grpc::Status(grpc::StatusCode::CANCELLED, "the watcher went away")); }

  void OnDone() override {
    service_->Remove(this);
    { absl::MutexLock lock(&mutex_); }  // Whoever called Finish has let go of it.
    delete this;
  }

 private:
  void WriteIfChanged() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || ending_ || (written_any_ && response_.status() == wanted_)) return;
    written_any_ = writing_ = true;
    response_.set_status(wanted_);
    StartWrite(&response_);
  }

  HealthService* const service_;
  const std::string name_;
  absl::Mutex mutex_;
  Status wanted_ ABSL_GUARDED_BY(mutex_);
  bool written_any_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Status end_status_ ABSL_GUARDED_BY(mutex_);
  HealthCheckResponse response_ ABSL_GUARDED_BY(mutex_);
};

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

void HealthService::Remove(Watcher* watcher) {
  absl::MutexLock lock(&mutex_);
  watchers_.erase(watcher);
}

grpc::ServerUnaryReactor* HealthService::Check(grpc::CallbackServerContext* context, const HealthCheckRequest* request,
                                               HealthCheckResponse* response) {
  Status status;
  {
    absl::MutexLock lock(&mutex_);
    status = StatusOf(request->service());
  }
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  if (status == HealthCheckResponse::SERVICE_UNKNOWN) {
    reactor->Finish(grpc::Status(grpc::StatusCode::NOT_FOUND, "no service of that name"));
  } else {
    response->set_status(status);
    reactor->Finish(grpc::Status::OK);
  }
  return reactor;
}

grpc::ServerWriteReactor<HealthCheckResponse>* HealthService::Watch(grpc::CallbackServerContext*,
                                                                    const HealthCheckRequest* request) {
  absl::MutexLock lock(&mutex_);
  auto* watcher = new Watcher(this, request->service(), StatusOf(request->service()));
  watchers_.insert(watcher);
  if (shut_down_) watcher->End(ShuttingDown());
  return watcher;
}

}  // namespace sinkhorn
