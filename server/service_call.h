// One problem on its way through the server, whether it came by Solve or in a stream: decode, validate, queue, encode.
// Private to the service.
#ifndef SINKHORN_SERVER_SERVICE_CALL_H_
#define SINKHORN_SERVER_SERVICE_CALL_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

#include "absl/types/optional.h"
#include "google/protobuf/arena.h"
#include "server/block.h"
#include "server/scheduler.h"
#include "server/service_context.h"
#include "server/status.h"
#include "server/validate.h"
#include "sinkhorn/v1/sinkhorn.pb.h"

namespace sinkhorn {

// Life: whoever makes a SolveCall holds a reference; while it is worked on, the work holds another.
class SolveCall {
 public:
  // `deadline`: absl::InfiniteFuture() for none.
  SolveCall(ServiceContext* context, absl::Time deadline, bool in_stream);
  SolveCall(const SolveCall&) = delete;
  SolveCall& operator=(const SolveCall&) = delete;

  // Takes the bytes of the message and begins. Deliver follows, possibly before this returns.
  void Start(grpc::ByteBuffer* message);
  // Asks that Deliver comes soon. At any time, from any thread, while the caller holds a reference.
  void Cancel();

  void Ref() { references_.fetch_add(1, std::memory_order_relaxed); }
  void Unref() {
    if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

 protected:
  virtual ~SolveCall() = default;
  // The outcome, exactly once. `error` null: `reply` is the encoded SolveResponse (SolveStreamResponse in a stream).
  virtual void Deliver(const Error* error, grpc::ByteBuffer* reply) = 0;
  // Asked when the problem is solved, on a lane's thread, where many are and that has better to do than to encode and
  // send: true takes over, and calls Answer on another thread.
  virtual bool Defer() { return false; }
  void Answer();

  // Before Start.
  void set_deadline(absl::Time deadline) { deadline_ = deadline; }
  void set_allowed(bool allowed) { allowed_ = allowed; }
  void set_trace_id(std::string id) { trace_id_ = std::move(id); }
  void set_tenant(const Tenant& tenant) { tenant_ = tenant; }

  ServiceContext* const context_;
  const std::string& request_id() const { return request_id_; }
  // Its share of its launches' time, once it is solved.
  double device_seconds() const { return absl::ToDoubleSeconds(result_.timing.lane_time); }

 private:
  void Process();  // Decode, validate, submit.
  absl::optional<Error> Decode();
  absl::optional<absl::string_view> Flatten();
  void Submit();
  Error Full(absl::string_view why) const;
  Error SubmitError(const absl::Status& status, const Admission& admission) const;
  void OnSolved(const TaskResult& result);
  Error SolveError(const TaskResult& result);
  bool IsLate() const;
  void Encode();
  void FillResponse();
  grpc::ByteBuffer EncodeReply();
  void Fail(const Error& error);
  void Finish(const Error* error, grpc::ByteBuffer* reply);
  void Account(const Error* error) const;
  void LogRequest(const Error* error) const;
  const char* ProblemName() const;

  absl::Time deadline_;
  bool allowed_ = true;  // The caller may call.
  Tenant tenant_;
  const bool in_stream_;
  const Executor* executor_;  // Whose device solves it; chosen when it is decoded.
  absl::Time arrived_;
  std::atomic<int> references_{1};
  std::atomic<bool> cancelled_{false};
  std::atomic<TaskId> task_id_{0};
  bool submitted_ = false;  // The scheduler has taken it.

  grpc::ByteBuffer message_;
  // The message in one piece, of which the tensors are views: gRPC's own slice, or a block if it came in several.
  grpc::Slice slice_;
  Block block_;
  HeldBytes held_request_, held_reply_;
  std::string request_id_, trace_id_;
  Prepared prepared_;
  TaskResult result_;
  absl::Duration before_queue_, encode_;
  double compute_seconds_ = 0;

  char arena_block_[2048];
  google::protobuf::Arena arena_;
  v1::SolveRequest* request_ = nullptr;    // On the arena.
  v1::SolveResponse* response_ = nullptr;  // On the arena; all but the tensors.
};

// The gRPC form of an error.
grpc::Status ToGrpcStatus(const Error& error);
// The id of the trace that the caller says it is part of, or "".
std::string TraceIdOfCall(const grpc::ServerContextBase& rpc);
// A gRPC deadline as absl's time.
absl::Time DeadlineOf(std::chrono::system_clock::time_point deadline);

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_SERVICE_CALL_H_
