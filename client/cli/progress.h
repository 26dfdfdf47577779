// Shows on a terminal that a long call is alive: a line on stderr with the time that has passed, from half a second on.
// Nothing is written where stderr is not a terminal.
#ifndef SINKHORN_CLIENT_CLI_PROGRESS_H_
#define SINKHORN_CLIENT_CLI_PROGRESS_H_

#include <string>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

namespace sinkhorn::client {

// Blocks until `done`. The line reads "solving: 3.2 s of 60 s" for the label "solving"; it is wiped at the end.
void WaitWithProgress(const std::string& label, absl::Duration timeout, const absl::Notification& done);

}  // namespace sinkhorn::client

#endif  // SINKHORN_CLIENT_CLI_PROGRESS_H_
