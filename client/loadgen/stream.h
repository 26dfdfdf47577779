// Requests on SolveStream. Private to the load generator.
#ifndef SINKHORN_CLIENT_LOADGEN_STREAM_H_
#define SINKHORN_CLIENT_LOADGEN_STREAM_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "client/loadgen/reply.h"
#include "client/loadgen/request.h"
#include "grpcpp/client_context.h"
#include "grpcpp/completion_queue.h"
#include "grpcpp/generic/generic_stub.h"

namespace sinkhorn::client {

struct LoadStreamOptions {
  std::chrono::system_clock::time_point deadline;  // Of the stream, so of all that is on it.
  std::string authorization;                       // The header's value; empty: none.
  ReplyPart part = ReplyPart::kSummary;
};

// A stream that many requests are on at a time; answers find theirs by `request_id`. Begins with the first request, and
// again with the next one if the server, or the network, has ended it: what was on it then ends with the stream's
// status. Its events come from `queue`, from one thread, which is told of answers.
class LoadStream {
 public:
  // All outlive it.
  LoadStream(grpc::GenericStub* stub, grpc::CompletionQueue* queue, const LoadStreamOptions& options,
             LoadReceiver* receiver);

  // `solve`: an encoded SolveRequest without a `request_id`. From any thread.
  void Send(const grpc::Slice& solve, const LoadRequest& request) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends it when all is answered; Closed follows, possibly before this returns. Send must not. From any thread.
  void Close() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  class Step final : public LoadEvent {
   public:
    Step(LoadStream* stream, void (LoadStream::*what)(bool)) : stream_(stream), what_(what) {}
    void Happen(bool ok) override { (stream_->*what_)(ok); }

   private:
    LoadStream* const stream_;
    void (LoadStream::*const what_)(bool);
  };
  struct Call {
    grpc::ClientContext context;
    std::unique_ptr<grpc::GenericClientAsyncReaderWriter> rpc;
    grpc::ByteBuffer reply;  // gRPC's until it is read.
    grpc::Status status;
    bool started = false, writing = false, broken = false, half_closed = false, finished = false;
  };

  void Open() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Finish() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnStarted(bool ok) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnWritten(bool ok) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnRead(bool ok) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnFinished(bool ok) ABSL_LOCKS_EXCLUDED(mutex_);
  void EndIfOver() ABSL_LOCKS_EXCLUDED(mutex_);

  grpc::GenericStub* const stub_;
  grpc::CompletionQueue* const queue_;
  const LoadStreamOptions options_;
  LoadReceiver* const receiver_;
  Step started_{this, &LoadStream::OnStarted}, written_{this, &LoadStream::OnWritten}, read_{this, &LoadStream::OnRead},
      finished_{this, &LoadStream::OnFinished};

  absl::Mutex mutex_;
  std::unique_ptr<Call> call_ ABSL_GUARDED_BY(mutex_);  // Null: there is no stream.
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t last_id_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<grpc::ByteBuffer> unsent_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<std::string, LoadRequest> under_way_ ABSL_GUARDED_BY(mutex_);  // By id.
};

}  // namespace sinkhorn::client

#endif  // SINKHORN_CLIENT_LOADGEN_STREAM_H_
