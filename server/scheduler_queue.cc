// Who goes next: earliest deadline first within a window, bounded passing over. The header states the rule.
#include "server/scheduler_queue.h"

#include <algorithm>
#include <utility>

namespace sinkhorn {
namespace {

bool Fits(const ScheduledTask& task, const Room& room) {
  return task.task.problem.count <= room.problems && task.working_bytes <= room.working_bytes;
}

}  // namespace

void WaitingQueue::Push(ScheduledTaskPtr task) {
  problems_ += task->task.problem.count;
  bytes_ += task->task.bytes;
  predicted_ns_ += task->predicted_ns;
  no_deadline_before_ = std::min(no_deadline_before_, task->task.deadline);
  tasks_.push_back(std::move(task));
  tasks_.back()->position = std::prev(tasks_.end());
}

ScheduledTaskPtr WaitingQueue::Remove(ScheduledTask* task) {
  ScheduledTaskPtr owned = std::move(*task->position);
  tasks_.erase(task->position);
  problems_ -= owned->task.problem.count;
  bytes_ -= owned->task.bytes;
  predicted_ns_ -= owned->predicted_ns;
  owned->waiting = false;
  return owned;
}

ScheduledTask* WaitingQueue::Next(const Room& room) const {
  if (tasks_.empty()) return nullptr;
  if (oldest()->passed_over >= window_) return Fits(*oldest(), room) ? oldest() : nullptr;

  ScheduledTask* next = nullptr;
  int64_t left = window_;
  for (const ScheduledTaskPtr& task : tasks_) {
    if (left-- == 0) break;
    if (!Fits(*task, room)) continue;
    if (no_deadline_before_ == absl::InfiniteFuture()) return task.get();  // None has a deadline: no need to look on.
    if (next == nullptr || task->task.deadline < next->task.deadline) next = task.get();
  }
  return next;
}

ScheduledTaskPtr WaitingQueue::Take(ScheduledTask* next) {
  for (auto it = tasks_.begin(); it != next->position; ++it) ++(*it)->passed_over;
  return Remove(next);
}

void WaitingQueue::TakeExpired(absl::Time now, std::vector<ScheduledTaskPtr>* expired) {
  if (now < no_deadline_before_) return;
  no_deadline_before_ = absl::InfiniteFuture();
  for (auto it = tasks_.begin(); it != tasks_.end();) {
    ScheduledTask* task = (it++)->get();  // Removing it leaves the next iterator valid.
    if (task->task.deadline <= now) {
      expired->push_back(Remove(task));
    } else {
      no_deadline_before_ = std::min(no_deadline_before_, task->task.deadline);
    }
  }
}

absl::Time WaitingQueue::HoldUntil(absl::Duration delay) const {
  absl::Time until = oldest()->submitted + delay;
  int64_t left = window_;
  for (const ScheduledTaskPtr& task : tasks_) {
    if (left-- == 0) break;
    until = std::min(until, task->task.deadline - absl::Nanoseconds(task->predicted_ns));
  }
  return until;
}

}  // namespace sinkhorn
