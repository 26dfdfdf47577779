// In: a call arrives, is decoded, validated and queued. service_reply.cc: out.
#include "server/service_call.h"

#include <chrono>
#include <cstring>
#include <exception>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/trace.h"
#include "server/wire.h"

namespace sinkhorn {
namespace {

using absl::nullopt;
using absl::optional;
using absl::StrCat;

constexpr char kTooManyBytes[] = "too many bytes are being received, solved and sent";

google::protobuf::ArenaOptions InitialBlock(char* block, size_t size) {
  google::protobuf::ArenaOptions options;
  options.initial_block = block;
  options.initial_block_size = size;
  return options;
}

}  // namespace

SolveCall::SolveCall(ServiceContext* context, absl::Time deadline, bool in_stream)
    : context_(context),
      deadline_(deadline),
      in_stream_(in_stream),
      executor_(&context->executors->front()),
      arena_(InitialBlock(arena_block_, sizeof(arena_block_))) {}

void SolveCall::Start(grpc::ByteBuffer* message) {
  arrived_ = absl::Now();
  message_.Swap(message);
  context_->arrivals.fetch_add(1);
  context_->in_flight.fetch_add(1);  // Before the state is read: whoever waits for idleness first sets the state.
  Ref();                             // Released by Finish.
  if (!allowed_) return Fail(Unauthenticated());
  switch (context_->state.load()) {
    case ServiceState::kWarming:
      return Fail(Warming());
    case ServiceState::kStopping:
      return Fail(Draining());
    case ServiceState::kReady:
    case ServiceState::kDraining:
      break;
  }
  const int64_t bytes = static_cast<int64_t>(message_.Length());
  if (!context_->TryHold(bytes, &held_request_)) return Fail(Full(kTooManyBytes));
  if (bytes < context_->options.inline_bytes) return Process();
  if (!context_->TrySchedule([this] { Process(); })) Fail(Full("too many large requests wait to be decoded"));
}

void SolveCall::Cancel() {
  cancelled_.store(true);
  // Either this sees the task, or Submit sees the flag.
  if (const TaskId id = task_id_.load()) executor_->scheduler->Cancel(id);
}

void SolveCall::Process() {
  optional<Error> error;
  if (cancelled_.load()) {
    error = IsLate() ? Expired("decode") : Cancelled("decode");
  } else if (arrived_ >= deadline_ || absl::Now() >= deadline_) {
    error = Expired("decode");
  } else {
    try {
      error = Decode();
    } catch (const std::bad_alloc&) {
      error = DeviceMemory("the request could not be decoded");
    } catch (const std::exception& exception) {
      error = context_->Incident(request_id_, StrCat("decode: ", exception.what()));
    }
  }
  executor_ = &context_->executors->LeastLoaded();  // Before task_id_, which tells Cancel that there is one.
  if (!error.has_value() && request_->solver().has_time_budget() && !executor_->backend->can_finish_soon()) {
    error = Unsupported("solver.time_budget", "is not supported by this server's devices: they finish what they begin");
  }
  if (const char* field;
      !error.has_value() && (field = executor_->backend->Unsupported(prepared_.problem)) != nullptr) {
    error = Unsupported(field, "asks for what this server's devices cannot do yet; a CPU server can");
  }
  before_queue_ = absl::Now() - arrived_;
  context_->decode_seconds->Observe(absl::ToDoubleSeconds(before_queue_));
  if (error.has_value()) return Fail(*error);
  Submit();
}

// The message's bytes in one piece. Copies them if they came in several, and lets go of each as it is copied. Unset: no
// memory.
optional<absl::string_view> SolveCall::Flatten() {
  if (message_.TrySingleSlice(&slice_).ok()) {
    message_.Clear();
    return absl::string_view(reinterpret_cast<const char*>(slice_.begin()), slice_.size());
  }
  const size_t size = message_.Length();
  std::vector<grpc::Slice> slices;
  block_ = NewBlock(size);
  if (block_ == nullptr || !message_.Dump(&slices).ok()) return nullopt;
  message_.Clear();
  char* out = block_.get();
  for (grpc::Slice& slice : slices) {
    std::memcpy(out, slice.begin(), slice.size());
    out += slice.size();
    slice = grpc::Slice();
  }
  return absl::string_view(block_.get(), size);
}

optional<Error> SolveCall::Decode() {
  const optional<absl::string_view> message = Flatten();
  if (!message.has_value()) return DeviceMemory("the request could not be decoded");
  const absl::string_view bytes = *message;
  bool parsed;
  if (in_stream_) {
    auto* outer = google::protobuf::Arena::CreateMessage<v1::SolveStreamRequest>(&arena_);
    parsed = DecodeWithoutTensors(bytes, outer);
    request_ = outer->mutable_solve();
  } else {
    request_ = google::protobuf::Arena::CreateMessage<v1::SolveRequest>(&arena_);
    parsed = DecodeWithoutTensors(bytes, request_);
  }
  if (!parsed)
    return InvalidField("request", "must be a message of this contract", StrCat(bytes.size(), " other bytes"));
  if (request_->request_id().size() <= kMaxRequestIdBytes) request_id_ = request_->request_id();
  response_ = google::protobuf::Arena::CreateMessage<v1::SolveResponse>(&arena_);
  if (optional<Error> error = Validate(bytes, *request_, context_->options.limits, &prepared_, response_)) return error;
  if (!context_->TryHold(static_cast<int64_t>(prepared_.block_bytes), &held_reply_)) return Full(kTooManyBytes);
  return nullopt;
}

void SolveCall::Submit() {
  Task task;
  task.problem = prepared_.problem;
  task.bytes = prepared_.bytes;
  task.deadline = deadline_;
  if (request_->solver().has_time_budget()) task.finish_by = arrived_ + absl::Seconds(request_->solver().time_budget());
  task.tenant = tenant_.number;
  task.weight = tenant_.weight;
  task.done = [this](const TaskResult& result) { OnSolved(result); };
  TaskId id = 0;
  submitted_ = true;
  Ref();  // The answer may come, and be the end of this, before Submit returns.
  Admission admission;
  const absl::Status status = executor_->scheduler->Submit(&task, &id, &admission);
  if (!status.ok()) {
    submitted_ = false;
    Fail(SubmitError(status, admission));
  } else {
    task_id_.store(id);
    if (cancelled_.load()) executor_->scheduler->Cancel(id);
  }
  Unref();
}

Error SolveCall::Full(absl::string_view why) const { return QueueFull(executor_->scheduler->PushbackHint(), why); }

Error SolveCall::SubmitError(const absl::Status& status, const Admission& admission) const {
  switch (status.code()) {
    case absl::StatusCode::kResourceExhausted:
      return QueueFull(admission.retry_after, status.message());
    case absl::StatusCode::kDeadlineExceeded:
      return admission.infeasible ? InfeasibleDeadline(admission.left, admission.needed) : Expired("queue");
    case absl::StatusCode::kUnavailable:
      if (context_->state.load() == ServiceState::kStopping) return Draining();
      context_->DeviceLost();
      return DeviceLost(status.message());
    default:
      return context_->Incident(request_id_, StrCat("submit: ", status.ToString()));
  }
}

grpc::Status ToGrpcStatus(const Error& error) {
  return grpc::Status(static_cast<grpc::StatusCode>(error.code), error.message, ToRpcStatus(error).SerializeAsString());
}

std::string TraceIdOfCall(const grpc::ServerContextBase& rpc) {
  const auto header = rpc.client_metadata().find(kTraceParent);
  if (header == rpc.client_metadata().end()) return "";
  return std::string(TraceIdOf({header->second.data(), header->second.size()}));
}

absl::Time DeadlineOf(std::chrono::system_clock::time_point deadline) {
  return deadline == std::chrono::system_clock::time_point::max() ? absl::InfiniteFuture() : absl::FromChrono(deadline);
}

}  // namespace sinkhorn
