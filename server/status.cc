#include "server/status.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "google/rpc/error_details.pb.h"

namespace sinkhorn {
namespace {

constexpr char kDomain[] = "sinkhorn";

Error Make(absl::StatusCode code, const char* reason, std::string message) {
  Error error;
  error.code = code;
  error.reason = reason;
  error.message = std::move(message);
  return error;
}

std::string Seconds(absl::Duration duration) { return absl::StrCat(absl::ToDoubleSeconds(duration)); }

}  // namespace

Error InvalidField(absl::string_view field, absl::string_view rule, absl::string_view value) {
  Error error =
      Make(absl::StatusCode::kInvalidArgument, "INVALID_FIELD", absl::StrCat(field, " ", rule, "; got ", value));
  error.field = std::string(field);
  error.metadata = {{"field", error.field}, {"value", std::string(value)}};
  return error;
}

Error TooLarge(absl::string_view field, absl::string_view what, int64_t limit, int64_t actual) {
  Error error = Make(absl::StatusCode::kInvalidArgument, "PROBLEM_TOO_LARGE",
                     absl::StrCat(field, ": ", what, " must be at most ", limit, "; got ", actual));
  error.field = std::string(field);
  error.metadata = {{"field", error.field}, {"limit", absl::StrCat(limit)}, {"actual", absl::StrCat(actual)}};
  return error;
}

Error QueueFull(absl::Duration retry_after, absl::string_view why) {
  Error error = Make(absl::StatusCode::kResourceExhausted, "QUEUE_FULL", std::string(why));
  error.retry_after = std::max(retry_after, absl::Milliseconds(1));
  return error;
}

Error InfeasibleDeadline(absl::Duration left, absl::Duration needed) {
  Error error =
      Make(absl::StatusCode::kDeadlineExceeded, "INFEASIBLE_DEADLINE",
           absl::StrCat("cannot finish before the deadline: ", Seconds(left),
                        " s are left, the work before it and its own are predicted to take ", Seconds(needed), " s"));
  error.metadata = {{"left_seconds", Seconds(left)}, {"needed_seconds", Seconds(needed)}};
  error.never_retry = true;
  return error;
}

Error Expired(absl::string_view stage) {
  Error error =
      Make(absl::StatusCode::kDeadlineExceeded, "EXPIRED", absl::StrCat("the deadline passed; stage: ", stage));
  error.metadata = {{"stage", std::string(stage)}};
  return error;
}

Error Cancelled(absl::string_view stage) {
  Error error = Make(absl::StatusCode::kCancelled, "CANCELLED", absl::StrCat("the client cancelled; stage: ", stage));
  error.metadata = {{"stage", std::string(stage)}};
  return error;
}

Error Unauthenticated() {
  return Make(absl::StatusCode::kUnauthenticated, "UNAUTHENTICATED",
              "authorization must be 'Bearer TOKEN' with a token of this server; got none or another");
}

Error Warming() {
  return Make(absl::StatusCode::kUnavailable, "WARMING", "the server is starting and not ready for solves yet");
}

Error Draining() {
  return Make(absl::StatusCode::kUnavailable, "DRAINING", "the server is shutting down and takes no new solves");
}

Error DeviceLost(absl::string_view why) {
  return Make(absl::StatusCode::kUnavailable, "DEVICE_LOST", absl::StrCat("the device is lost: ", why));
}

Error DeviceMemory(absl::string_view why) {
  return Make(absl::StatusCode::kResourceExhausted, "DEVICE_MEMORY", absl::StrCat("out of memory: ", why));
}

Error Diverged(absl::string_view why) {
  return Make(absl::StatusCode::kFailedPrecondition, "DIVERGED", std::string(why));
}

Error Unsupported(absl::string_view field, absl::string_view why) {
  Error error = Make(absl::StatusCode::kUnimplemented, "UNSUPPORTED", absl::StrCat(field, " ", why));
  error.field = std::string(field);
  error.metadata = {{"field", error.field}};
  return error;
}

Error Internal(absl::string_view incident) {
  Error error = Make(absl::StatusCode::kInternal, "INTERNAL",
                     absl::StrCat("a bug in the server; its log tells more under incident ", incident));
  error.metadata = {{"incident", std::string(incident)}};
  return error;
}

google::rpc::Status ToRpcStatus(const Error& error) {
  google::rpc::Status status;
  status.set_code(static_cast<int>(error.code));  // absl, gRPC and google.rpc number their codes alike.
  status.set_message(error.message);

  google::rpc::ErrorInfo info;
  info.set_reason(error.reason);
  info.set_domain(kDomain);
  for (const auto& entry : error.metadata) (*info.mutable_metadata())[entry.first] = entry.second;
  status.add_details()->PackFrom(info);

  if (!error.field.empty()) {
    google::rpc::BadRequest bad_request;
    auto* violation = bad_request.add_field_violations();
    violation->set_field(error.field);
    violation->set_description(error.message);
    status.add_details()->PackFrom(bad_request);
  }
  if (error.retry_after.has_value()) {
    google::rpc::RetryInfo retry;
    const int64_t nanos = absl::ToInt64Nanoseconds(*error.retry_after);
    retry.mutable_retry_delay()->set_seconds(nanos / 1000000000);
    retry.mutable_retry_delay()->set_nanos(static_cast<int32_t>(nanos % 1000000000));
    status.add_details()->PackFrom(retry);
  }
  return status;
}

absl::optional<std::string> RetryPushback(const Error& error) {
  if (error.never_retry) return "-1";
  if (!error.retry_after.has_value()) return absl::nullopt;
  return absl::StrCat(
      std::max<int64_t>(1, absl::ToInt64Milliseconds(absl::Ceil(*error.retry_after, absl::Milliseconds(1)))));
}

}  // namespace sinkhorn
