// What the exit code of each of the client programs says.
#ifndef SINKHORN_CLIENT_CLI_EXIT_CODES_H_
#define SINKHORN_CLIENT_CLI_EXIT_CODES_H_

#include "absl/status/status.h"

namespace sinkhorn::client {

enum ExitCode {
  kExitOk = 0,
  kExitUsage = 1,         // The command line, or a file that it names. (absl's own code for an unknown flag.)
  kExitRefused = 2,       // The server answered with an error; asking again will not help.
  kExitUnavailable = 3,   // No server, one that is not ready or one that is full: try again later.
  kExitDeadline = 4,      // --timeout is over.
  kExitNotConverged = 5,  // With --require_converged: the answer does not meet the tolerance.
};

inline ExitCode ExitCodeOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return kExitOk;
    case absl::StatusCode::kUnavailable:
      return kExitUnavailable;
    case absl::StatusCode::kResourceExhausted:
      return kExitUnavailable;
    case absl::StatusCode::kDeadlineExceeded:
      return kExitDeadline;
    default:
      return kExitRefused;
  }
}

}  // namespace sinkhorn::client

#endif  // SINKHORN_CLIENT_CLI_EXIT_CODES_H_
