// Who goes next: tenants in turn, the earliest deadline first within a window, bounded passing over. The header states
// the rule.
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
  const size_t tenant = task->task.tenant;
  if (tenant >= lines_.size()) lines_.resize(tenant + 1);  // Moves lists, which leaves their iterators valid.
  requests_ += 1;
  problems_ += task->task.problem.count;
  bytes_ += task->task.bytes;
  predicted_ns_ += task->predicted_ns;
  no_deadline_before_ = std::min(no_deadline_before_, task->task.deadline);
  Line& line = lines_[tenant];
  if (line.empty()) turns_.push_back(task->task.tenant);
  line.push_back(std::move(task));
  line.back()->position = std::prev(line.end());
}

ScheduledTaskPtr WaitingQueue::Remove(ScheduledTask* task) {
  Line& line = lines_[task->task.tenant];
  ScheduledTaskPtr owned = std::move(*task->position);
  line.erase(task->position);
  if (line.empty()) turns_.erase(std::find(turns_.begin(), turns_.end(), owned->task.tenant));
  requests_ -= 1;
  problems_ -= owned->task.problem.count;
  bytes_ -= owned->task.bytes;
  predicted_ns_ -= owned->predicted_ns;
  owned->waiting = false;
  return owned;
}

ScheduledTask* WaitingQueue::oldest() const {
  ScheduledTask* oldest = nullptr;
  for (int tenant : turns_) {
    ScheduledTask* task = lines_[tenant].front().get();
    if (oldest == nullptr || task->id < oldest->id) oldest = task;
  }
  return oldest;
}

void WaitingQueue::SortTurns() const {
  if (turns_.size() < 2) return;
  std::sort(turns_.begin(), turns_.end(), [this](int a, int b) {
    const double turn_a = tenants_.TurnWithResidents(a), turn_b = tenants_.TurnWithResidents(b);
    return turn_a != turn_b ? turn_a < turn_b : a < b;
  });
}

ScheduledTask* WaitingQueue::NextOf(const Line& line, const Room& room) const {
  ScheduledTask* next = nullptr;
  int64_t left = window_;
  for (const ScheduledTaskPtr& task : line) {
    if (left-- == 0) break;
    if (!Fits(*task, room)) continue;
    if (no_deadline_before_ == absl::InfiniteFuture()) return task.get();  // None has a deadline: no need to look on.
    if (next == nullptr || task->task.deadline < next->task.deadline) next = task.get();
  }
  return next;
}

ScheduledTask* WaitingQueue::Next(const Room& room) const {
  SortTurns();
  for (int tenant : turns_) {
    const Line& line = lines_[tenant];
    ScheduledTask* oldest = line.front().get();
    if (oldest->passed_over >= window_) return Fits(*oldest, room) ? oldest : nullptr;
    if (ScheduledTask* next = NextOf(line, room)) return next;
  }
  return nullptr;
}

ScheduledTaskPtr WaitingQueue::Take(ScheduledTask* next) {
  const int tenant = next->task.tenant;
  for (int earlier : turns_) {  // In the order of Next.
    if (earlier == tenant) break;
    ++lines_[earlier].front()->passed_over;
  }
  for (auto it = lines_[tenant].begin(); it != next->position; ++it) ++(*it)->passed_over;
  return Remove(next);
}

void WaitingQueue::TakeExpired(absl::Time now, std::vector<ScheduledTaskPtr>* expired) {
  if (now < no_deadline_before_) return;
  no_deadline_before_ = absl::InfiniteFuture();
  for (Line& line : lines_) {
    for (auto it = line.begin(); it != line.end();) {
      ScheduledTask* task = (it++)->get();  // Removing it leaves the next iterator valid.
      if (task->task.deadline <= now) {
        expired->push_back(Remove(task));
      } else {
        no_deadline_before_ = std::min(no_deadline_before_, task->task.deadline);
      }
    }
  }
}

absl::Time WaitingQueue::HoldUntil(absl::Duration delay) const {
  absl::Time until = oldest()->submitted + delay;
  for (int tenant : turns_) {
    int64_t left = window_;
    for (const ScheduledTaskPtr& task : lines_[tenant]) {
      if (left-- == 0) break;
      until = std::min(until, task->task.deadline - absl::Nanoseconds(task->predicted_ns));
    }
  }
  return until;
}

}  // namespace sinkhorn
