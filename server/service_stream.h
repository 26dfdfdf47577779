// SolveStream: many problems on one call, answered as they finish. Private to the service.
#ifndef SINKHORN_SERVER_SERVICE_STREAM_H_
#define SINKHORN_SERVER_SERVICE_STREAM_H_

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/async_stream.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <set>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/rpc_loop.h"
#include "server/service_call.h"

namespace sinkhorn {

class StreamCall;

// The open streams, so that a stopping server can end them.
class StreamRegistry {
 public:
  void Add(StreamCall* stream) ABSL_LOCKS_EXCLUDED(mutex_);
  void Remove(StreamCall* stream) ABSL_LOCKS_EXCLUDED(mutex_);
  // Each stream ends as soon as what it has read is answered. The state must be kStopping.
  void EndAll() ABSL_LOCKS_EXCLUDED(mutex_);
  bool empty() const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return streams_.empty();
  }

 private:
  mutable absl::Mutex mutex_;
  std::set<StreamCall*> streams_ ABSL_GUARDED_BY(mutex_);
};

// From before it arrives to its end. Reads ahead of its answers by a bounded number of requests and bytes; an answer
// counts until it is written, so a client that does not read stops being read. Lives until the RPC is done and its last
// problem has let go.
class StreamCall final {
 public:
  using Rpc = grpc::ServerAsyncReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>;
  struct Method {
    ServiceContext* context;
    StreamRegistry* registry;
    std::function<void(grpc::ServerContext*, Rpc*, grpc::ServerCompletionQueue*, void* tag)> request;
  };

  // Makes room on `loop` for one more call; when it has been taken, the call makes room for the next. `method` outlives
  // the loop.
  static void Expect(const Method* method, RpcLoop* loop) { new StreamCall(method, loop); }

  // Ends if there is nothing left to do: also when the server is stopping.
  void EndIfDone() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  class Item;
  struct Reply {
    grpc::ByteBuffer message;
    int64_t request_bytes;
  };

  StreamCall(const Method* method, RpcLoop* loop);
  ~StreamCall() = default;
  void OnArrived(bool ok);
  void OnRead(bool ok) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnWritten(bool ok) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnDone(bool ok) ABSL_LOCKS_EXCLUDED(mutex_);  // The client has its status, or has gone away.
  void OnFinished(bool ok);
  void Break() ABSL_LOCKS_EXCLUDED(mutex_);
  void Answer(Item* item, grpc::ByteBuffer* reply) ABSL_LOCKS_EXCLUDED(mutex_);
  void ReadMore() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget(int64_t request_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Ref() { references_.fetch_add(1, std::memory_order_relaxed); }
  void Unref() {
    if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

  const Method* const method_;
  ServiceContext* const context_;
  const RpcLoop::Presence presence_;
  RpcLoop::Step<StreamCall> arrived_, read_done_, written_, done_, finish_done_;
  std::atomic<int> references_{1};
  grpc::ServerContext rpc_;
  Rpc stream_{&rpc_};
  // Of its arrival.
  absl::Time started_, deadline_;
  bool allowed_ = false;  // The caller may call.
  Tenant tenant_;
  std::string trace_id_;

  absl::Mutex mutex_;
  grpc::ByteBuffer read_;  // gRPC's while reading_.
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool half_closed_ ABSL_GUARDED_BY(mutex_) = false;  // The client sends no more.
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;      // The front of replies_.
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;       // Nobody receives replies any more.
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t outstanding_ ABSL_GUARDED_BY(mutex_) = 0;  // Requests read and not answered.
  int64_t outstanding_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  double device_seconds_ ABSL_GUARDED_BY(mutex_) = 0;  // Of answered ones.
  std::set<Item*> items_ ABSL_GUARDED_BY(mutex_);      // Requests without a reply.
  std::deque<Reply> replies_ ABSL_GUARDED_BY(mutex_);  // Replies not written.
};

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_SERVICE_STREAM_H_
