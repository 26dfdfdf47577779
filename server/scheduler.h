// Decides which problems are resident on a backend and when. Knows kernels/backend.h, an injected clock and nothing of
// gRPC, so it is tested with a virtual clock and under TSan.
//
// Iteration-level batching: each lane of the backend repeats a round: drop the cancelled and the expired, admit waiting
// problems (earliest deadline first within a bounded window of the oldest, so that nobody starves), advance all its
// residents by one slice in shared launches, hand over the finished. Work-conserving: an idle lane never waits for
// company unless `max_batch_delay` asks for it.
//
// Guarantees. `done` runs exactly once for each accepted task. A task is never launched after its deadline or its
// cancellation; a running one leaves at the next slice. Waiting requests and bytes never exceed the limits. A task is
// passed over by later ones at most `window` times... see SchedulerOptions. A failing task does not touch the others.
#ifndef SINKHORN_SERVER_SCHEDULER_H_
#define SINKHORN_SERVER_SCHEDULER_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/backend.h"

namespace sinkhorn {

// Time and waiting, injected. The real one uses absl::Now; tests step a virtual one.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual absl::Time Now() = 0;
};
Clock* RealClock();

struct SchedulerOptions {
  int64_t max_queue_requests = 1024;             // Waiting, not yet resident.
  int64_t max_queue_bytes = int64_t{4} << 30;    // Of waiting and resident tasks together.
  int64_t max_working_bytes = int64_t{4} << 30;  // Backend working memory of all residents (one problem is always let in).
  int64_t max_resident_problems = 1 << 20;       // Members of all residents of a lane (--max_batch_problems; 1: no batching).
  int64_t window = 64;                           // The oldest waiting tasks among which the earliest deadline goes first.
  absl::Duration slice = absl::Milliseconds(5);  // Of one Advance: bounds how long a newcomer waits to join.
  absl::Duration max_batch_delay = absl::ZeroDuration();
};

// Where a task's time went, and in what company.
struct TaskTiming {
  absl::Duration queue;    // From Submit to the first launch.
  absl::Duration compute;  // From the first launch to the end.
  int64_t batch_problem_count = 0;  // Largest number of members that shared a launch with it, its own included.
  int64_t launch_count = 0;
};

struct TaskResult {
  // OK; what the Solve said; DEADLINE_EXCEEDED or CANCELLED (`stage` tells where: "queue" or "running");
  // UNAVAILABLE (device lost, or the scheduler was stopped).
  absl::Status status;
  const char* stage = "";
  SolveReport report;
  TaskTiming timing;
};

// One request. The problem's views must stay valid until `done` has been called.
struct Task {
  Problem problem;
  int64_t bytes = 0;  // Inputs and outputs.
  absl::Time deadline = absl::InfiniteFuture();
  // Runs exactly once, on a lane's thread, without the lock; must not block. May call Submit and Cancel.
  std::function<void(const TaskResult&)> done;
};

using TaskId = uint64_t;

// A snapshot for metrics.
struct SchedulerStats {
  int64_t queue_requests = 0, queue_bytes = 0, resident_requests = 0, resident_problems = 0, bytes = 0;
  double queue_predicted_seconds = 0;
  absl::Duration queue_oldest_age;
};

// What a round did, for metrics. Called on the lane's thread without the lock.
struct RoundInfo {
  int lane = 0;
  int64_t problem_count = 0, request_count = 0;
  double seconds = 0;
};

class Scheduler {
 public:
  // `backend` and `clock` outlive the scheduler. `on_round` may be empty.
  Scheduler(Backend* backend, Clock* clock, const SchedulerOptions& options,
            std::function<void(const RoundInfo&)> on_round = nullptr);
  ~Scheduler();  // Stops.

  // Queues `task`. On OK takes it and writes `id`. On error `done` is never called and `task` is left as it was.
  // RESOURCE_EXHAUSTED: queue full (see PushbackHint). UNAVAILABLE: draining or stopped or device lost.
  // DEADLINE_EXCEEDED: the deadline has passed.
  absl::Status Submit(Task* task, TaskId* id);

  // Asks that the task ends soon: at once if it waits, at the next slice if it runs. Its `done` gets CANCELLED unless it
  // finishes first. Unknown ids are ignored.
  void Cancel(TaskId id);

  // How long a refused client should wait before it tries again, from the queue's predicted work.
  absl::Duration PushbackHint() const;

  // Refuses new tasks from now on; what is queued goes on.
  void StopAccepting();
  // Blocks until nothing is queued or resident, or until `deadline`. True: empty.
  bool AwaitEmpty(absl::Time deadline);
  // Ends: whatever is left gets UNAVAILABLE. Joins the lanes' threads. Idempotent.
  void Stop();

  SchedulerStats stats() const;

  // Starts one thread per lane that runs rounds until Stop.
  void Start();
  // One round of `lane` on this thread: true if there was anything to do. For tests with a virtual clock, instead of Start.
  bool RunRound(int lane);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_SCHEDULER_H_
