// Every error that the service can send, in one place: code, reason, message, and what a client is told about retrying.
//
//   situation                            code                 reason                retry
//   a field is wrong                     INVALID_ARGUMENT     INVALID_FIELD         no
//   over a limit                         INVALID_ARGUMENT     PROBLEM_TOO_LARGE     no
//   queue full                           RESOURCE_EXHAUSTED   QUEUE_FULL            after the pushback
//   cannot finish before the deadline    DEADLINE_EXCEEDED    INFEASIBLE_DEADLINE   no (pushback -1)
//   deadline passed                      DEADLINE_EXCEEDED    EXPIRED               no
//   client went away                     CANCELLED            CANCELLED             nobody to tell
//   no token, or another                 UNAUTHENTICATED      UNAUTHENTICATED       no
//   starting, draining, device lost      UNAVAILABLE          WARMING, DRAINING, DEVICE_LOST   elsewhere
//   no memory for this problem           RESOURCE_EXHAUSTED   DEVICE_MEMORY         yes
//   the result is not finite             FAILED_PRECONDITION  DIVERGED              no
//   the devices cannot do it             UNIMPLEMENTED        UNSUPPORTED           no
//   our bug                              INTERNAL             INTERNAL              no
//
// Free of gRPC: what travels is google.rpc.Status, which the RPC layer puts into trailers and streams into replies.
#ifndef SINKHORN_SERVER_STATUS_H_
#define SINKHORN_SERVER_STATUS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "google/rpc/status.pb.h"

namespace sinkhorn {

struct Error {
  absl::StatusCode code = absl::StatusCode::kInternal;
  const char* reason = "";  // A string literal of the table above: safe as a metric's label.
  std::string message;
  std::string field;  // Path from the request, such as "point_cloud.x.shape". Empty: no one field is to blame.
  std::vector<std::pair<std::string, std::string>> metadata;
  absl::optional<absl::Duration> retry_after;  // Becomes RetryInfo and the pushback trailer.
  bool never_retry = false;                    // Becomes the pushback -1.
};

// `rule` reads on after the field's name: "must be finite and > 0". `value` is what came.
Error InvalidField(absl::string_view field, absl::string_view rule, absl::string_view value);
Error TooLarge(absl::string_view field, absl::string_view what, int64_t limit, int64_t actual);
Error QueueFull(absl::Duration retry_after, absl::string_view why);
Error InfeasibleDeadline(absl::Duration left, absl::Duration needed);
// `stage` is where the request was: "decode", "queue" or "running".
Error Expired(absl::string_view stage);
Error Cancelled(absl::string_view stage);
Error Unauthenticated();
Error Warming();
Error Draining();
Error DeviceLost(absl::string_view why);
Error DeviceMemory(absl::string_view why);
Error Diverged(absl::string_view why);
Error Unsupported(absl::string_view field, absl::string_view why);
// `incident` finds the one line of the server's log that says more.
Error Internal(absl::string_view incident);

// The error as it travels: ErrorInfo {reason, domain "sinkhorn", metadata}, then BadRequest or RetryInfo if they apply.
google::rpc::Status ToRpcStatus(const Error& error);

// The value of the trailer `grpc-retry-pushback-ms`, which stock gRPC clients honour. Unset: no trailer.
absl::optional<std::string> RetryPushback(const Error& error);

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_STATUS_H_
