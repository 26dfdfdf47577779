// Error details travel as google.rpc.Status in the trailer `grpc-status-details-bin`: a list of Any.
#include "client/cpp/errors.h"

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "google/rpc/error_details.pb.h"

namespace sinkhorn::client {
namespace {

constexpr absl::string_view kTypePrefix = "type.googleapis.com/google.rpc.";

// The detail of type `name`, if it is there and readable.
template <typename Message>
absl::optional<Message> Find(const absl::Status& status, absl::string_view name) {
  const absl::optional<absl::Cord> payload = status.GetPayload(absl::StrCat(kTypePrefix, name));
  Message message;
  if (!payload || !message.ParseFromString(std::string(*payload))) return absl::nullopt;
  return message;
}

void AttachDetails(const google::rpc::Status& from, absl::Status* to) {
  for (const google::protobuf::Any& detail : from.details()) {
    to->SetPayload(detail.type_url(), absl::Cord(detail.value()));
  }
}

}  // namespace

absl::Status FromGrpcStatus(const grpc::Status& status, absl::Time deadline) {
  if (status.ok()) return absl::OkStatus();
  const bool unimplemented = status.error_code() == grpc::StatusCode::UNIMPLEMENTED;
  if (unimplemented && absl::Now() >= deadline) return MissingAnswer(deadline);
  // absl and gRPC number the codes alike.
  absl::Status result(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  google::rpc::Status details;
  if (details.ParseFromString(status.error_details())) AttachDetails(details, &result);
  return result;
}

absl::Status FromRpcStatus(const google::rpc::Status& status) {
  absl::Status result(static_cast<absl::StatusCode>(status.code()), status.message());
  if (result.ok()) return absl::InternalError("the server sent an error without a code");
  AttachDetails(status, &result);
  return result;
}

absl::Status MissingAnswer(absl::Time deadline, bool cancelled) {
  if (absl::Now() >= deadline) return absl::DeadlineExceededError("the deadline passed before the answer was read");
  if (cancelled) return absl::CancelledError("the call was cancelled before its answer was read");
  return absl::InternalError("the server ended the call with OK, but sent no answer");
}

ErrorDetails GetErrorDetails(const absl::Status& status) {
  ErrorDetails details;
  if (const auto info = Find<google::rpc::ErrorInfo>(status, "ErrorInfo")) {
    details.reason = info->reason();
    details.domain = info->domain();
    details.metadata.insert(info->metadata().begin(), info->metadata().end());
  }
  if (const auto bad_request = Find<google::rpc::BadRequest>(status, "BadRequest")) {
    for (const auto& violation : bad_request->field_violations()) {
      details.fields.push_back({violation.field(), violation.description()});
    }
  }
  if (const auto retry = Find<google::rpc::RetryInfo>(status, "RetryInfo")) {
    details.retry_delay =
        absl::Seconds(retry->retry_delay().seconds()) + absl::Nanoseconds(retry->retry_delay().nanos());
  }
  return details;
}

std::string Describe(const absl::Status& status) {
  const ErrorDetails details = GetErrorDetails(status);
  std::string text = absl::StatusCodeToString(status.code());
  if (!details.reason.empty()) absl::StrAppend(&text, " (", details.reason, ")");
  absl::StrAppend(&text, ": ", status.message());
  if (details.retry_delay) absl::StrAppend(&text, "; retry after ", absl::FormatDuration(*details.retry_delay));
  return text;
}

}  // namespace sinkhorn::client
