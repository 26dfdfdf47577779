// Decides which problems are resident on a backend and when. Knows kernels/backend.h, an injected clock and nothing of
// gRPC, so it is tested with a virtual clock and under TSan.
//
// Iteration-level batching: each lane of the backend repeats a round: drop the cancelled and the expired, admit waiting
// problems (tenants in turn, earliest deadline first within a bounded window of the oldest, so that nobody starves),
// advance those whose turn it is by one slice in shared launches, hand over the finished. Work-conserving: an idle lane
// never waits for company unless `max_batch_delay` asks for it.
//
// Guarantees
//   Exactly once. `done` runs exactly once for each accepted task, after its Solve has been destroyed.
//   In time. A task is never launched at or after its deadline or its cancellation (its lane looks right before every
//     launch); a running one leaves before its lane's next slice.
//   Bounded. Waiting requests, and bytes of all accepted tasks, never exceed the limits; nor does the work that is
//     predicted to go before a newcomer.
//   Feasible. A task that is predicted to miss its deadline (work before it, as its tenant's share lets it be done, and
//     its own) is refused: see Admission.
//   Fair. Tenants that have work share the device by weight (scheduler_tenants.h says how closely), whatever they
//     queue, and each finds its part of the second half of the queue free of the others.
//   No starvation. Of a tenant's tasks, later ones pass over an earlier one at most `window` times: a task with k
//     others of its tenant ahead of it in the queue when it was submitted becomes resident after at most k + `window`
//     others of the tenant have. A task that was passed over that often goes next when it is its tenant's turn: if it
//     does not fit beside the residents, nothing else is admitted until enough of them have left. Residents whose work
//     fits a slice all take part in it; of more, some sit out, but each takes part at least once in kRotation times as
//     many slices as the lane has residents. Newcomers join at the next slice.
//   Isolated. A task that cannot be admitted or fails does not touch the others. A lost device ends all of them.
#ifndef SINKHORN_SERVER_SCHEDULER_H_
#define SINKHORN_SERVER_SCHEDULER_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/backend.h"

namespace sinkhorn {

// Time, injected. The real one uses absl::Now; tests step a virtual one. Now() is called from all threads, also while
// the scheduler's lock is held: it must not call the scheduler.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual absl::Time Now() = 0;
};
Clock* RealClock();

struct SchedulerOptions {
  // Tasks that wait and are not yet resident.
  int64_t max_queue_requests = 1024;
  // Task::bytes of waiting and resident tasks together. A task with more never gets in: refuse it as too large before.
  int64_t max_queue_bytes = int64_t{4} << 30;
  // Backend working memory of all residents. With no other resident any problem is let in.
  int64_t max_working_bytes = int64_t{4} << 30;
  // Members of all residents of a lane (--max_batch_problems). An empty lane takes any one request, so 1 turns batching
  // off: one request at a time.
  int64_t max_resident_problems = 1 << 20;
  // Predicted time of what goes before a newcomer (see Admission), beyond which it is refused.
  absl::Duration max_queue_time = absl::InfiniteDuration();
  // A tenant's oldest waiting tasks among which the earliest deadline goes first, of those that fit. 1: in order of
  // arrival.
  int64_t window = 64;
  // Of one Advance: bounds how long a newcomer waits to join.
  absl::Duration slice = absl::Milliseconds(5);
  // Residents take turns when they have more than this to do in a slice, in predicted slices, and are more than this
  // many members: what the device does side by side about as fast as one.
  double turn_slices = 1;
  int64_t turn_problems = 1;
  // A task that is alone, and predicted to take at most this, is solved by the thread that submits it, before Submit
  // returns: in the time that it would take to wake an idle lane's thread. Only where any thread can run a lane, which
  // backends of a GPU do not say. 0: never.
  absl::Duration lend = absl::ZeroDuration();
  // How long a lane without residents lets the oldest task wait for company. Cut short by a deadline that would come
  // too near, by a full batch or a full queue, by StopAccepting.
  absl::Duration max_batch_delay = absl::ZeroDuration();
};

// Where a task's time went, and in what company.
struct TaskTiming {
  absl::Duration queue;             // From Submit to the first launch; never launched: to the end.
  absl::Duration compute;           // From the first launch to the end.
  absl::Duration lane_time;         // Its share of its slices' time, by predicted work: shares add up to the time.
  int64_t batch_problem_count = 0;  // Largest number of members that shared a launch with it, its own included.
  int64_t launch_count = 0;
};

struct TaskResult {
  // OK; what Admit or the Solve said; DEADLINE_EXCEEDED or CANCELLED (`stage` tells where: "queue" or "running");
  // UNAVAILABLE (device lost: SchedulerStats::device_lost; or the scheduler was stopped).
  absl::Status status;
  const char* stage = "";  // "" if OK.
  SolveReport report;      // If OK.
  TaskTiming timing;
  int64_t handed_over = 1;  // Tasks whose `done` runs at the same time, one after another.
};

// One request. The problem's views must stay valid until `done` has been called.
struct Task {
  Problem problem;
  int64_t bytes = 0;  // Inputs and outputs.
  absl::Time deadline = absl::InfiniteFuture();
  // When its iterations should end: it is then asked to finish soon (Solve::FinishSoon) and gets the next turn. The
  // backend can do so, or this is far away.
  absl::Time finish_by = absl::InfiniteFuture();
  // Whose it is: a small number, of those that a bounded register gives out; and what the tenant weighs, > 0.
  int tenant = 0;
  double weight = 1;
  // Runs exactly once, on a lane's thread (without Start: in RunRound or Stop) or in Submit, without the lock; must not
  // block. May run before Submit has returned. May call Submit, Cancel, PushbackHint, stats and StopAccepting; not
  // AwaitEmpty or Stop.
  std::function<void(const TaskResult&)> done;
};

using TaskId = uint64_t;

// What is predicted when a task comes.
//
// It is refused as infeasible if the time left is less than
//   kQueueSafety * (what goes before it) + a part of its own work:
// half of it, because the class's problems differ among each other; a quarter of a fixed number of iterations, and
// nothing of an unknown one, until some of the class have been measured (cost_model.h). What goes before it is accepted
// work that is due earlier or has an earlier deadline: all of that, or, if it is less, its tenant's times the sum of
// the tenants' weights over its own. It is refused as well if for it another task of its tenant would miss its
// deadline.
struct Admission {
  static constexpr double kQueueSafety = 1.5;
  bool infeasible = false;      // The refusal is DEADLINE_EXCEEDED because of the prediction.
  absl::Duration left, needed;  // Until the deadline; what it would take.
  // A refusal as RESOURCE_EXHAUSTED: when to try again.
  absl::Duration retry_after;
};

// A snapshot for metrics.
struct SchedulerStats {
  int64_t queue_requests = 0, queue_bytes = 0;           // Waiting.
  int64_t resident_requests = 0, resident_problems = 0;  // On all lanes.
  int64_t bytes = 0;                                     // Of waiting and resident tasks.
  int64_t working_bytes = 0;                             // Of residents.
  // Predicted by the cost model (cost_model.h), over the lanes: for what waits or sat the last slice out; for all that
  // was accepted.
  double queue_predicted_seconds = 0, backlog_predicted_seconds = 0;
  absl::Duration queue_oldest_age;
  bool device_lost = false;  // For good: only a new process helps.
};

// A resident that sits out longest goes first in every so many of the slices that not all can take part in.
constexpr int kRotation = 16;

// What a round did, for metrics. Called on the lane's thread without the lock.
struct RoundInfo {
  struct Share {
    const char* family = "";  // Solve::family.
    int64_t problem_count = 0;
  };
  int lane = 0;
  int64_t problem_count = 0, request_count = 0;
  double seconds = 0;
  absl::InlinedVector<Share, 4> families;  // The problems by family.
  int64_t sat_out = 0;                     // Residents that took no part.
};

class Scheduler {
 public:
  // `backend` and `clock` outlive the scheduler. `on_round` may be empty.
  // REQUIRES: all limits >= 1.
  Scheduler(Backend* backend, Clock* clock, const SchedulerOptions& options,
            std::function<void(const RoundInfo&)> on_round = nullptr);
  ~Scheduler();  // Stops.

  // Queues `task`. On OK takes it and writes `id`, before `done` can run. On error `done` is never called and `task` is
  // left as it was. Calls the backend's WorkingBytes and PredictedSeconds on this thread. `admission` may be null.
  // RESOURCE_EXHAUSTED: queue full, or the tenant's part of it. UNAVAILABLE: draining or stopped or device lost.
  // DEADLINE_EXCEEDED: the deadline has passed, or would before the end.
  absl::Status Submit(Task* task, TaskId* id, Admission* admission = nullptr);

  // Asks that the task ends soon: if it waits, when a lane is next between two slices, so at once if one is idle; if it
  // runs, before its lane's next slice. Its `done` gets CANCELLED unless it finishes first. Unknown ids are ignored.
  void Cancel(TaskId id);

  // How long a refused client should wait before it tries again: the time that clears the queue, as predicted, and a
  // slice. At most a minute. Add jitter where many are refused at once.
  absl::Duration PushbackHint() const;

  // Refuses new tasks from now on; what is queued goes on.
  void StopAccepting();
  // Blocks until nothing is queued or resident and every `done` has returned, or until `deadline`. True: empty.
  bool AwaitEmpty(absl::Time deadline);
  // Ends: whatever is left gets UNAVAILABLE, running problems after their slice. Joins the lanes' threads. Idempotent.
  void Stop();

  SchedulerStats stats() const;
  // Predicted for all that waits and runs. Takes no lock.
  double LoadSeconds() const;

  // Starts one thread per lane that runs rounds until Stop.
  void Start();
  // One round of `lane` on this thread: true if there was anything to do. For tests with a virtual clock, instead of
  // Start; one call per lane at a time.
  bool RunRound(int lane);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_SCHEDULER_H_
