#include "server/service_stream.h"

#include <utility>
#include <vector>

#include "absl/time/clock.h"

namespace sinkhorn {

// ---- One problem of a stream ----------------------------------------------------------------------------------------

class StreamCall::Item final : public SolveCall, private RpcLoop::Item {
 public:
  Item(StreamCall* stream, ServiceContext* context, absl::Time deadline, int64_t bytes)
      : SolveCall(context, deadline, /*in_stream=*/true), bytes_(bytes), stream_(stream) {
    stream_->Ref();
    set_tenant(stream_->tenant_);
    set_trace_id(stream_->trace_id_);
  }

  int64_t bytes() const { return bytes_; }
  using SolveCall::device_seconds;

 protected:
  void Deliver(const Error* error, grpc::ByteBuffer* reply) override {
    if (error == nullptr) return stream_->Answer(this, reply);
    v1::SolveStreamResponse response;
    response.set_request_id(request_id());
    *response.mutable_error() = ToRpcStatus(*error);
    grpc::Slice slice(response.SerializeAsString());
    grpc::ByteBuffer message(&slice, 1);
    stream_->Answer(this, &message);
  }

  bool Defer() override {
    stream_->presence_.loop()->Post(this);
    return true;
  }

 private:
  ~Item() override { stream_->Unref(); }
  void Resume() override { SolveCall::Answer(); }

  const int64_t bytes_;
  StreamCall* const stream_;
};

// ---- Registry -------------------------------------------------------------------------------------------------------

void StreamRegistry::Add(StreamCall* stream) {
  absl::MutexLock lock(&mutex_);
  streams_.insert(stream);
}

void StreamRegistry::Remove(StreamCall* stream) {
  absl::MutexLock lock(&mutex_);
  streams_.erase(stream);
}

void StreamRegistry::EndAll() {
  absl::MutexLock lock(&mutex_);
  for (StreamCall* stream : streams_) stream->EndIfDone();
}

// ---- The stream -----------------------------------------------------------------------------------------------------

StreamCall::StreamCall(const Method* method, RpcLoop* loop)
    : method_(method),
      context_(method->context),
      presence_(loop),
      arrived_(this, &StreamCall::OnArrived),
      read_done_(this, &StreamCall::OnRead),
      written_(this, &StreamCall::OnWritten),
      done_(this, &StreamCall::OnDone),
      finish_done_(this, &StreamCall::OnFinished) {
  rpc_.AsyncNotifyWhenDone(&done_);
  method->request(&rpc_, &stream_, loop->queue(), &arrived_);
}

void StreamCall::OnArrived(bool ok) {
  if (!ok) return Unref();  // The server shuts down: none came.
  Expect(method_, presence_.loop());
  started_ = absl::Now();
  deadline_ = DeadlineOf(rpc_.deadline());
  trace_id_ = TraceIdOfCall(rpc_);
  allowed_ = context_->Allow(rpc_);
  if (allowed_) tenant_ = context_->TenantOf(rpc_);
  context_->metrics->calls_started.With({kSolveStreamMethod})->Add();
  Ref();  // Of OnDone; the first is OnFinished's.
  method_->registry->Add(this);
  {
    absl::MutexLock lock(&mutex_);
    ReadMore();
  }
  EndIfDone();  // The caller may be a stranger, or the server stopping already.
}

void StreamCall::ReadMore() {
  if (!allowed_ || reading_ || half_closed_ || broken_ || finished_) return;
  if (context_->state.load() == ServiceState::kStopping) return;
  if (outstanding_ >= context_->options.stream_read_ahead_requests) return;
  if (outstanding_ > 0 && outstanding_bytes_ >= context_->options.stream_read_ahead_bytes) return;
  reading_ = true;
  Ref();
  stream_.Read(&read_, &read_done_);
}

void StreamCall::OnRead(bool ok) {
  grpc::ByteBuffer message;
  Item* item = nullptr;
  bool cancelled = false;
  {
    absl::MutexLock lock(&mutex_);
    reading_ = false;
    if (ok) {
      message.Swap(&read_);
      const int64_t bytes = static_cast<int64_t>(message.Length());
      item = new Item(this, context_, deadline_, bytes);
      items_.insert(item);
      ++outstanding_;
      outstanding_bytes_ += bytes;
      cancelled = broken_;
      ReadMore();
    } else {
      half_closed_ = true;
    }
  }
  if (item != nullptr) {
    if (cancelled) item->Cancel();
    item->Start(&message);
    item->Unref();
  } else {
    EndIfDone();
  }
  Unref();
}

void StreamCall::Answer(Item* item, grpc::ByteBuffer* reply) {
  {
    absl::MutexLock lock(&mutex_);
    items_.erase(item);
    device_seconds_ += item->device_seconds();
    if (broken_) {
      Forget(item->bytes());
    } else {
      replies_.push_back({});
      replies_.back().message.Swap(reply);
      replies_.back().request_bytes = item->bytes();
      if (!writing_) WriteNext();
    }
  }
  EndIfDone();
}

void StreamCall::WriteNext() {
  if (replies_.empty()) return;
  writing_ = true;
  Ref();
  grpc::WriteOptions options;
  if (replies_.size() > 1) options.set_buffer_hint();  // To leave with the next, by one call of the system's.
  stream_.Write(replies_.front().message, options, &written_);
}

void StreamCall::Forget(int64_t request_bytes) {
  --outstanding_;
  outstanding_bytes_ -= request_bytes;
}

void StreamCall::OnWritten(bool ok) {
  {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (!ok) broken_ = true;
    do {
      Forget(replies_.front().request_bytes);
      replies_.pop_front();
    } while (broken_ && !replies_.empty());
    WriteNext();
    ReadMore();
  }
  EndIfDone();
  Unref();
}

void StreamCall::OnDone(bool) {
  if (rpc_.IsCancelled()) Break();
  Unref();
}

// Nobody listens any more.
void StreamCall::Break() {
  std::vector<Item*> items;
  {
    absl::MutexLock lock(&mutex_);
    broken_ = true;
    for (Item* item : items_) {
      item->Ref();
      items.push_back(item);
    }
  }
  for (Item* item : items) {
    item->Cancel();
    item->Unref();
  }
  EndIfDone();
}

void StreamCall::EndIfDone() {
  const bool stopping = context_->state.load() == ServiceState::kStopping;
  grpc::Status status;
  double device_seconds = 0;
  {
    absl::MutexLock lock(&mutex_);
    if (finished_ || writing_ || outstanding_ > 0) return;
    if (allowed_ && !half_closed_ && !broken_ && !stopping) return;
    finished_ = true;
    device_seconds = device_seconds_;
    if (!allowed_) {
      status = ToGrpcStatus(Unauthenticated());
    } else if (broken_) {
      status = ToGrpcStatus(absl::Now() >= deadline_ ? Expired("stream") : Cancelled("stream"));
    } else if (!half_closed_) {
      status = ToGrpcStatus(Draining());
    }
  }
  context_->metrics->call_seconds.With({kSolveStreamMethod, GrpcCodeName(status.error_code())})
      ->Observe(absl::ToDoubleSeconds(absl::Now() - started_));
  context_->ReportLoad(status.error_code(), device_seconds, &rpc_);
  stream_.Finish(status, &finish_done_);
}

void StreamCall::OnFinished(bool) {
  method_->registry->Remove(this);
  Unref();
}

}  // namespace sinkhorn
