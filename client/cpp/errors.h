// What a failed call says: the status code, the message ("field, rule, value") and, decoded, the reason behind it.
//
//   absl::StatusOr<v1::SolveResponse> response = client->Solve(request, deadline);
//   if (!response.ok()) {
//     ErrorDetails details = GetErrorDetails(response.status());
//     if (details.reason == "QUEUE_FULL") Retry(details.retry_delay);
//   }
#ifndef SINKHORN_CLIENT_CPP_ERRORS_H_
#define SINKHORN_CLIENT_CPP_ERRORS_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/support/status.h"

namespace sinkhorn::client {

// One field of the request that breaks a rule.
struct FieldViolation {
  std::string field;        // Path from the request: "point_cloud.x.shape[1]".
  std::string description;  // The rule and the value that breaks it.
};

// The details that this service attaches to its errors. Empty where the server (or a proxy, or gRPC itself) gave none.
struct ErrorDetails {
  std::string reason;                           // "INVALID_FIELD", "QUEUE_FULL", "DRAINING", ...
  std::string domain;                           // "sinkhorn"
  std::map<std::string, std::string> metadata;  // Facts: limit, actual, stage, ...
  std::vector<FieldViolation> fields;
  absl::optional<absl::Duration> retry_delay;  // Come back after it.
};

// Decodes the details that the functions below attached. Unreadable ones are left out.
ErrorDetails GetErrorDetails(const absl::Status& status);

// A gRPC status as absl's: code, message, and each detail as a payload under its type URL. UNIMPLEMENTED when
// `deadline` has passed is what gRPC's blocking calls make of a missing answer: see MissingAnswer.
absl::Status FromGrpcStatus(const grpc::Status& status, absl::Time deadline = absl::InfiniteFuture());

// The same for an error that travels inside a message (SolveStream). INTERNAL: it has no code.
absl::Status FromRpcStatus(const google::rpc::Status& status);

// Of a call that ended with OK but without its answer, since gRPC drops what has arrived when the deadline passes, or
// the call is cancelled, before it is read. DEADLINE_EXCEEDED if `deadline` has passed, CANCELLED if the caller asked
// for the end; INTERNAL: the server has sent none.
absl::Status MissingAnswer(absl::Time deadline, bool cancelled = false);

// One line for people: "INVALID_ARGUMENT (INVALID_FIELD): solver.epsilon must be > 0; got -1".
std::string Describe(const absl::Status& status);

}  // namespace sinkhorn::client

#endif  // SINKHORN_CLIENT_CPP_ERRORS_H_
