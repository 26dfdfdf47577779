// The tasks that wait for a lane, and the rule for who goes next. No lock and no clock: the scheduler has both.
//
// The rule: the tenant whose turn it is (scheduler_tenants.h) and that has a task that fits; of its tasks, among the
// `window` oldest that fit, the earliest deadline; ties go to the older. Each time a later task of the tenant is taken,
// the older ones were passed over once more, and so was its oldest when it was the tenant's turn and another's task
// fitted. The oldest has always been passed over most often, so it alone needs watching: at `window` times nobody but
// it may go when it is the tenant's turn. Hence no task is ever passed over more than `window` times.
#ifndef SINKHORN_SERVER_SCHEDULER_QUEUE_H_
#define SINKHORN_SERVER_SCHEDULER_QUEUE_H_

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "server/cost_model.h"
#include "server/scheduler.h"
#include "server/scheduler_tenants.h"

namespace sinkhorn {

// A task from Submit to `done`.
struct ScheduledTask {
  Task task;
  TaskId id = 0;
  absl::Time submitted;
  int64_t working_bytes = 0;
  CostModel::Formula formula;
  int64_t predicted_ns = 0;                                      // Whole nanoseconds, so that sums return to zero.
  int64_t remaining_ns = 0;                                      // Of these, what it has not had yet. >= 0.
  int64_t slice_ns = 0;                                          // The most that counts in one slice.
  std::atomic<bool> cancelled{false};                            // Set by any thread, read by its lane.
  std::list<std::unique_ptr<ScheduledTask>>::iterator position;  // In the queue, while it waits.
  int64_t passed_over = 0;
  bool waiting = true;    // In the queue.
  bool has_room = false;  // Counted among its lane's residents.

  // Of a resident; its lane's thread alone touches these.
  std::unique_ptr<Solve> solve;
  absl::Time first_launch;
  int64_t sat_out = 0;  // Slices in a row that it took no part in.
  bool finished = false;
  bool finishing = false;  // Asked to finish soon.
  TaskResult result;
};
using ScheduledTaskPtr = std::unique_ptr<ScheduledTask>;

// What is still free beside the residents.
struct Room {
  int64_t problems = 0;
  int64_t working_bytes = 0;
};

class WaitingQueue {
 public:
  // REQUIRES: window >= 1. `tenants` outlives the queue.
  WaitingQueue(int64_t window, const TenantAccounts* tenants) : window_(window), tenants_(*tenants) {}

  void Push(ScheduledTaskPtr task);
  // REQUIRES: it waits here.
  ScheduledTaskPtr Remove(ScheduledTask* task);

  // The task that goes next by the rule above, or null if none may. Cost O(window) for each tenant that waits.
  ScheduledTask* Next(const Room& room) const;
  // Takes Next's choice out, and counts it against those passed over.
  ScheduledTaskPtr Take(ScheduledTask* next);
  // Takes out the tasks whose deadline is at or before `now`. Cheap until one may have come.
  void TakeExpired(absl::Time now, std::vector<ScheduledTaskPtr>* expired);
  // When a lane that could wait for company should stop waiting: the oldest is `delay` old, or a task of a window, by
  // its prediction, must start to meet its deadline. REQUIRES: not empty.
  absl::Time HoldUntil(absl::Duration delay) const;

  bool empty() const { return requests_ == 0; }
  int64_t requests() const { return requests_; }
  int64_t problems() const { return problems_; }
  int64_t bytes() const { return bytes_; }
  int64_t predicted_ns() const { return predicted_ns_; }
  // REQUIRES: not empty.
  ScheduledTask* oldest() const;

 private:
  using Line = std::list<ScheduledTaskPtr>;  // A tenant's tasks in order of arrival.
  ScheduledTask* NextOf(const Line& line, const Room& room) const;
  // Tenants that wait, in the order of their turns.
  void SortTurns() const;

  const int64_t window_;
  const TenantAccounts& tenants_;
  std::vector<Line> lines_;         // By tenant.
  mutable std::vector<int> turns_;  // Tenants with tasks.
  int64_t requests_ = 0, problems_ = 0, bytes_ = 0, predicted_ns_ = 0;
  absl::Time no_deadline_before_ = absl::InfiniteFuture();  // Of any waiting task; a lower bound.
};

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_SCHEDULER_QUEUE_H_
