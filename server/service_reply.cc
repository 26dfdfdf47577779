// Out: what was solved is looked through, encoded, counted and handed over. service_call.cc: in.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/answer_check.h"
#include "server/log.h"
#include "server/reply_plan.h"
#include "server/service_call.h"
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
    case StopReason::kTimeBudget:
      return v1::STOP_REASON_TIME_BUDGET;
  }
  return v1::STOP_REASON_UNSPECIFIED;
}

void Fill(const Convergence& in, v1::Convergence* out) {
  out->set_iterations(in.iterations);
  out->set_converged(in.converged);
  out->set_marginal_error_a(in.marginal_error_a);
  out->set_marginal_error_b(in.marginal_error_b);
  out->set_stop_reason(ToProto(in.stop_reason));
}

}  // namespace

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
  Fill(result_.report.convergence, response_->mutable_convergence());
  for (const Convergence& member : prepared_.members) Fill(member, response_->add_members());
  FillExtras(prepared_, response_);
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
  const TenantMetrics& tenant = context_->MetricsOf(tenant_);
  (error == nullptr ? tenant.answered : submitted_ ? tenant.failed : tenant.refused)->Add();
  if (submitted_) tenant.queue_seconds->Observe(absl::ToDoubleSeconds(result_.timing.queue));
  if (device_seconds() > 0) tenant.device_seconds->Add(device_seconds());
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

}  // namespace sinkhorn
