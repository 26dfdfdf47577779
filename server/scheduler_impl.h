// The inside of the scheduler: its state, and which file holds which part.
//
//   scheduler.cc            what callers do: submit, cancel, ask, start, stop; and how idle lanes sleep
//   scheduler_admission.cc  whether a task is taken
//   scheduler_round.cc      what a lane does
//   scheduler_turn.cc       which residents take part in a slice, and what it costs them
//   scheduler_queue.cc      who becomes resident next
//   scheduler_tenants.cc    what tenants have had
//
// One lock guards the queue and the counters; a lane's residents belong to its thread alone, or to the one that has
// borrowed it. Backend calls, destruction of Solves and `done` run without the lock.
#ifndef SINKHORN_SERVER_SCHEDULER_IMPL_H_
#define SINKHORN_SERVER_SCHEDULER_IMPL_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/cost_model.h"
#include "server/scheduler.h"
#include "server/scheduler_queue.h"
#include "server/scheduler_tenants.h"

namespace sinkhorn {

// A resident's turn comes by the time at which it would end if it took so many times what is predicted.
constexpr double kPatience = 10;
inline absl::Time DueTime(const ScheduledTask& task) {
  return task.submitted + kPatience * absl::Nanoseconds(task.predicted_ns);
}

class Scheduler::Impl {
 public:
  Impl(Backend* backend, Clock* clock, const SchedulerOptions& options, std::function<void(const RoundInfo&)> on_round);

  absl::Status Submit(Task* task, TaskId* id, Admission* admission) ABSL_LOCKS_EXCLUDED(mutex_);
  void Cancel(TaskId id) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Duration PushbackHint() const ABSL_LOCKS_EXCLUDED(mutex_);
  void StopAccepting() ABSL_LOCKS_EXCLUDED(mutex_);
  bool AwaitEmpty(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);
  SchedulerStats stats() const ABSL_LOCKS_EXCLUDED(mutex_);
  double LoadSeconds() const { return static_cast<double>(load_ns_.load(std::memory_order_relaxed)) * 1e-9; }
  void Start();
  // What a lane's thread needs to know after a round.
  struct Round {
    bool worked = false;
    bool stopped = false;
    uint64_t rings = 0;                           // As of this round: a later ring means that something is new.
    absl::Time wake_at = absl::InfiniteFuture();  // Of an idle lane that lets tasks wait for company.
  };
  Round RunRound(int lane_index) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Lane {
    int index = 0;
    std::vector<ScheduledTaskPtr> residents;
    int64_t problems = 0;              // Members of the residents and of those being admitted.
    std::vector<ScheduledTask*> turn;  // Who takes part in this slice.
    std::vector<Solve*> solves;        // Likewise; members to keep their memory.
    int64_t turns_taken = 0;           // Slices in which not all could take part.
    int64_t sitting_out_ns = 0;        // Predicted, of those who do. Guarded by mutex_.
    std::condition_variable bell;      // While idle it waits for `rings_` to change.
    bool lent = false;                 // To a thread that submits: its own must not run. Guarded by mutex_.
    std::thread thread;
  };
  using Tasks = std::vector<ScheduledTaskPtr>;

  // -- Steps of a round, on the lane's thread.
  bool DropEnded(Lane* lane);
  Round TakeFromQueue(Lane* lane, Tasks* entering, Tasks* ended) ABSL_LOCKS_EXCLUDED(mutex_);
  void TakeEntering(Lane* lane, absl::Time now, Tasks* entering, Round* round) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TakeAll(Lane* lane, Tasks* ended) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Admit(Lane* lane, Tasks* entering);
  void Advance(Lane* lane);
  void FinishLate(Lane* lane);
  void HandOverFinished(Lane* lane, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  void ChooseTurn(Lane* lane) ABSL_LOCKS_EXCLUDED(mutex_);
  void TakeTurns(Lane* lane, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Charge(Lane* lane, absl::Duration time) ABSL_LOCKS_EXCLUDED(mutex_);
  int64_t SliceNs(const ScheduledTask& task) const;
  void HandOver(Lane* lane, Tasks* ended) ABSL_LOCKS_EXCLUDED(mutex_);

  // -- Idle lanes. Ring says that something is new, and returns the lane that should look: Wake it after unlocking.
  // Always the one that fell asleep last: its core wakes soonest, and what comes meanwhile joins its batch.
  Lane* Ring() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void Wake(Lane* lane) {
    if (lane != nullptr) lane->bell.notify_one();
  }
  void WakeAll() {
    for (Lane& lane : lanes_) lane.bell.notify_one();
  }
  // A sleeping lane for a task that has just been queued, if this thread had better solve it; else null.
  Lane* Borrow(const ScheduledTask& task) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A round of a borrowed lane, which then goes back.
  void RunBorrowed(Lane* lane) ABSL_LOCKS_EXCLUDED(mutex_);
  void RunLane(int lane_index);
  void WaitForRing(Lane* lane, const Round& round) ABSL_LOCKS_EXCLUDED(mutex_);

  Room RoomIn(int64_t lane_problems) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Time HeldUntil() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  double LaneSeconds(int64_t predicted_ns) const;

  // -- Admission.
  void Predict(absl::Time finish_by, ScheduledTask* scheduled) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Refusal(const Task& task, const ScheduledTask& scheduled, Admission* admission)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status TimeRefusal(const Task& task, const ScheduledTask& scheduled, Admission* admission)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status QueueRefusal(const Task& task) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status ShareRefusal(const Task& task, absl::Time now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool DelaysAnother(const Task& task, const ScheduledTask& scheduled) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Duration TimeBefore(const Task& task, const ScheduledTask& scheduled) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Duration Pushback() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Backend* const backend_;
  Clock* const clock_;
  const SchedulerOptions options_;
  const std::function<void(const RoundInfo&)> on_round_;
  std::vector<Lane> lanes_;

  // std::mutex rather than absl::Mutex: the packaged abseil is not built for TSan, which would see false races.
  mutable std::mutex mutex_;
  std::condition_variable empty_;  // AwaitEmpty waits for the last task.
  uint64_t rings_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Lane*> sleepers_ ABSL_GUARDED_BY(mutex_);  // The last to fall asleep at the end.

  TenantAccounts tenants_ ABSL_GUARDED_BY(mutex_);
  WaitingQueue queue_ ABSL_GUARDED_BY(mutex_);
  std::vector<TaskId> cancelled_ ABSL_GUARDED_BY(mutex_);  // Waiting tasks to drop in the next round of any lane.
  std::unordered_map<TaskId, ScheduledTask*> tasks_ ABSL_GUARDED_BY(mutex_);  // Accepted and not yet handed over.
  TaskId last_id_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;         // Of `tasks_`.
  int64_t handing_over_ ABSL_GUARDED_BY(mutex_) = 0;  // Tasks whose `done` is about to run or running.
  int64_t resident_requests_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t resident_problems_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t resident_working_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t resident_predicted_ns_ ABSL_GUARDED_BY(mutex_) = 0;
  std::atomic<int64_t> load_ns_{0};  // Yet to be had, of `tasks_`, as predicted. Changed under the lock, read without.
  CostModel costs_;                  // Its ratios: guarded by mutex_; its formula is not.
  bool accepting_ ABSL_GUARDED_BY(mutex_) = true;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::string device_error_ ABSL_GUARDED_BY(mutex_);  // Not empty: the device is lost.

  std::mutex stop_mutex_;  // Makes Stop idempotent among threads.
};

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_SCHEDULER_IMPL_H_
