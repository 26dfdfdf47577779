#include "server/service_call.h"

#include <chrono>
#include <cstring>
#include <exception>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/answer_check.h"
#include "server/log.h"
#include "server/trace.h"
#include "server/wire.h"

namespace sinkhorn {
namespace {

using absl::nullopt;
using absl::optional;
using absl::StrCat;

// Replies up to this are copied into one piece; larger ones refer to the memory that the backend wrote.
constexpr size_t kFlatReplyBytes = 16 << 10;
// Members up to which a reply is encoded on the scheduler's thread or the call's loop, which must not be kept.
constexpr int64_t kInlineMembers = 4096;
// Replies of one slice up to which they are encoded and sent there: waking another thread takes longer.
constexpr int64_t kInlineReplies = 2;

constexpr char kTooManyBytes[] = "too many bytes are being received, solved and sent";

// The tensors of a reply while gRPC sends them.
struct SentBlock {
  Block memory;
  HeldBytes held;
  static void Delete(void* block) { delete static_cast<SentBlock*>(block); }
};

v1::Precision ToProto(Precision precision) {
  switch (precision) {
    case Precision::kStrict:
      return v1::PRECISION_STRICT;
    case Precision::kFast:
      return v1::PRECISION_FAST;
    case Precision::kDouble:
      return v1::PRECISION_DOUBLE;
  }
  return v1::PRECISION_UNSPECIFIED;
}

v1::StopReason ToProto(StopReason reason) {
  switch (reason) {
    case StopReason::kTolerance:
      return v1::STOP_REASON_TOLERANCE;
    case StopReason::kMaxIterations:
      return v1::STOP_REASON_MAX_ITERATIONS;
    case StopReason::kPrecision:
      return v1::STOP_REASON_PRECISION;
    case StopReason::kNotIterated:
      return v1::STOP_REASON_NOT_ITERATED;
  }
  return v1::STOP_REASON_UNSPECIFIED;
}

// What was stopped before its `max_iterations` ran out of time. Backends do not know.
void Fill(const Convergence& in, int32_t max_iterations, v1::Convergence* out) {
  out->set_iterations(in.iterations);
  out->set_converged(in.converged);
  out->set_marginal_error_a(in.marginal_error_a);
  out->set_marginal_error_b(in.marginal_error_b);
  const bool late = in.stop_reason == StopReason::kMaxIterations && in.iterations < max_iterations;
  out->set_stop_reason(late ? v1::STOP_REASON_TIME_BUDGET : ToProto(in.stop_reason));
}

google::protobuf::ArenaOptions InitialBlock(char* block, size_t size) {
  google::protobuf::ArenaOptions options;
  options.initial_block = block;
  options.initial_block_size = size;
  return options;
}

}  // namespace

// ---- In -------------------------------------------------------------------------------------------------------------

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

// ---- Out ------------------------------------------------------------------------------------------------------------

// On the scheduler's thread.
void SolveCall::OnSolved(const TaskResult& result) {
  context_->queue_seconds->Observe(absl::ToDoubleSeconds(result.timing.queue));
  result_ = result;
  if (result.timing.launch_count > 0) {
    // Copies are part of the first and the last slice.
    const SolveReport& report = result.report;
    compute_seconds_ =
        std::max(0.0, absl::ToDoubleSeconds(result.timing.compute) - report.h2d_seconds - report.d2h_seconds);
    if (report.h2d_seconds > 0) context_->h2d_seconds->Observe(report.h2d_seconds);
    context_->solve_seconds->Observe(compute_seconds_);
    if (report.d2h_seconds > 0) context_->d2h_seconds->Observe(report.d2h_seconds);
  }
  if (result.handed_over > kInlineReplies && Defer()) return;
  Answer();
}

void SolveCall::Answer() {
  if (!result_.status.ok()) return Fail(SolveError(result_));
  // Every output is looked through.
  const bool large = prepared_.problem.count > kInlineMembers ||
                     static_cast<int64_t>(prepared_.block_bytes) >= context_->options.inline_bytes;
  if (large && context_->TrySchedule([this] { Encode(); })) return;
  Encode();
}

Error SolveCall::SolveError(const TaskResult& result) {
  const absl::Status& status = result.status;
  const bool expired = status.code() == absl::StatusCode::kDeadlineExceeded;
  const bool cancelled = status.code() == absl::StatusCode::kCancelled;
  if (expired || cancelled) {
    const bool late = expired || IsLate();
    const char* cause = late ? "deadline" : "cancelled";
    if (result.timing.launch_count > 0) {
      context_->metrics->wasted_device_seconds.With({cause})->Add(absl::ToDoubleSeconds(result.timing.compute));
    }
    return late ? Expired(result.stage) : Cancelled(result.stage);
  }
  switch (status.code()) {
    case absl::StatusCode::kFailedPrecondition:
      return Diverged(status.message());
    case absl::StatusCode::kResourceExhausted:
      return DeviceMemory(status.message());
    case absl::StatusCode::kUnavailable:
      if (context_->state.load() == ServiceState::kStopping) return Draining();
      context_->DeviceLost();
      return DeviceLost(status.message());
    default:
      return context_->Incident(request_id_, StrCat("solve: ", status.ToString()));
  }
}

// gRPC cancels a call whose deadline has passed, and the client's clock may strike first: the time left travels rounded
// up, by as much as a hundredth.
bool SolveCall::IsLate() const {
  if (deadline_ == absl::InfiniteFuture()) return false;
  return absl::Now() >= deadline_ - absl::Milliseconds(5) - 0.02 * (deadline_ - arrived_);
}

void SolveCall::Encode() {
  const absl::Time begin = absl::Now();
  if (!IsAnswer(result_.report.convergence, *response_, prepared_)) {
    return Fail(
        Diverged("the result is not finite: the costs may be too large for this epsilon, or the masses too small; "
                 "raise epsilon, scale the inputs, or ask for precision DOUBLE"));
  }
  FillResponse();
  grpc::ByteBuffer reply = EncodeReply();
  encode_ = absl::Now() - begin;
  context_->encode_seconds->Observe(absl::ToDoubleSeconds(encode_));
  Finish(nullptr, &reply);
}

void SolveCall::FillResponse() {
  response_->set_request_id(request_id_);
  const int32_t most = request_->solver().has_time_budget() ? prepared_.problem.solver.max_iterations : 0;
  Fill(result_.report.convergence, most, response_->mutable_convergence());
  for (const Convergence& member : prepared_.members) Fill(member, most, response_->add_members());
  v1::Execution* execution = response_->mutable_execution();
  execution->set_backend(executor_->device.backend);
  execution->set_device(executor_->device.name);
  execution->set_precision(ToProto(result_.report.precision));
  execution->set_family(result_.report.family);
  execution->set_batch_problem_count(result_.timing.batch_problem_count);
  execution->set_launch_count(result_.timing.launch_count);
  execution->set_queue_seconds(absl::ToDoubleSeconds(before_queue_ + result_.timing.queue));
  execution->set_transfer_seconds(result_.report.h2d_seconds + result_.report.d2h_seconds);
  execution->set_compute_seconds(compute_seconds_);
}

grpc::ByteBuffer SolveCall::EncodeReply() {
  const std::vector<WirePiece> pieces =
      EncodeResponse(*response_, prepared_.tensors, in_stream_ ? optional<absl::string_view>(request_id_) : nullopt);
  size_t total = 0;
  for (const WirePiece& piece : pieces) total += piece.head.size() + (piece.tensor ? piece.tensor->bytes : 0);

  if (total <= kFlatReplyBytes) {
    grpc::Slice flat(total);
    char* out = reinterpret_cast<char*>(const_cast<uint8_t*>(flat.begin()));
    for (const WirePiece& piece : pieces) {
      std::memcpy(out, piece.head.data(), piece.head.size());
      out += piece.head.size();
      if (piece.tensor == nullptr) continue;
      std::memcpy(out, prepared_.block.get() + piece.tensor->offset, piece.tensor->bytes);
      out += piece.tensor->bytes;
    }
    return grpc::ByteBuffer(&flat, 1);
  }

  std::vector<grpc::Slice> slices;
  slices.reserve(2 * pieces.size());
  grpc::Slice block;
  if (prepared_.block != nullptr) {
    auto* sent = new SentBlock{std::move(prepared_.block), std::move(held_reply_)};
    block = grpc::Slice(sent->memory.get(), prepared_.block_bytes, &SentBlock::Delete, sent);
  }
  for (const WirePiece& piece : pieces) {
    slices.emplace_back(piece.head);
    if (piece.tensor != nullptr)
      slices.push_back(block.sub(piece.tensor->offset, piece.tensor->offset + piece.tensor->bytes));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

void SolveCall::Fail(const Error& error) { Finish(&error, nullptr); }

void SolveCall::Finish(const Error* error, grpc::ByteBuffer* reply) {
  Account(error);
  ServiceContext* context = context_;
  Deliver(error, reply);
  context->in_flight.fetch_sub(1);
  Unref();
}

void SolveCall::Account(const Error* error) const {
  Metrics* metrics = context_->metrics;
  const Convergence& convergence = result_.report.convergence;
  if (error == nullptr) {
    const SolvedMetrics& solved = context_->solved[static_cast<int>(prepared_.problem.kind)];
    solved.outcomes[static_cast<int>(convergence.stop_reason)]->Add();
    solved.iterations->Observe(convergence.iterations);
    solved.marginal_error->Observe(std::max(convergence.marginal_error_a, convergence.marginal_error_b));
  } else {
    metrics->outcomes.With({ProblemName(), error->reason})->Add();
    const bool cancelled = error->code == absl::StatusCode::kCancelled;
    if (cancelled || error->reason == absl::string_view("EXPIRED")) {
      const std::string& stage = error->metadata[0].second;
      metrics->requests_abandoned.With({stage, cancelled ? "cancelled" : "deadline"})->Add();
    } else if (!submitted_) {
      metrics->requests_rejected.With({error->reason})->Add();
    }
  }
  LogRequest(error);
}

// A line for each request, if asked for; else for the slow ones.
void SolveCall::LogRequest(const Error* error) const {
  const ServiceOptions& options = context_->options;
  const absl::Duration took = absl::Now() - arrived_;
  const bool all = options.log_requests;
  int64_t slow = 0;
  if (!all && (took <= options.slow_request || (slow = context_->slow.Pass()) == 0)) return;
  const auto seconds = [](absl::Duration duration) { return StrCat(absl::ToDoubleSeconds(duration)); };
  const Problem& problem = prepared_.problem;
  const SolveReport& report = result_.report;
  Log(all ? Severity::kInfo : Severity::kWarning, all ? "request" : "slow_request",
      {{"request_id", request_id_},
       {"trace_id", trace_id_},
       {"problem", ProblemName()},
       {"shape",
        StrCat(problem.count, "x", problem.n, "x", problem.m, problem.dim > 0 ? StrCat("x", problem.dim) : "")},
       {"outcome", error ? error->reason : OutcomeName(report.convergence.stop_reason)},
       {"message", error ? error->message : ""},
       {"seconds", seconds(took)},
       {"decode_seconds", seconds(before_queue_)},
       {"queue_seconds", seconds(result_.timing.queue)},
       {"transfer_seconds", StrCat(report.h2d_seconds + report.d2h_seconds)},
       {"compute_seconds", StrCat(compute_seconds_)},
       {"encode_seconds", seconds(encode_)},
       {"launches", StrCat(result_.timing.launch_count)},
       {"batch_problems", StrCat(result_.timing.batch_problem_count)},
       {"device", executor_->device.name},
       {"slow_requests", StrCat(slow)}});
}

const char* SolveCall::ProblemName() const {
  if (request_ == nullptr || request_->problem_case() == v1::SolveRequest::PROBLEM_NOT_SET) return "none";
  return KindName(prepared_.problem.kind);
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
