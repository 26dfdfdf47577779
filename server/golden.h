// Solves problems with known answers before the server says that it is ready: one of each kind, on the real path of
// scheduler and backend.
#ifndef SINKHORN_SERVER_GOLDEN_H_
#define SINKHORN_SERVER_GOLDEN_H_

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/scheduler.h"

namespace sinkhorn {

// OK when every golden problem is solved right within `timeout`. Else says which was not, what came and what should
// have.
absl::Status CheckGoldenProblems(Scheduler* scheduler, absl::Duration timeout);

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_GOLDEN_H_
