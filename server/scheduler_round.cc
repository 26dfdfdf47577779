// A round of a lane. In order: (1) drop residents that were cancelled or have expired; (2) under the lock, take from
// the queue what is cancelled, expired or next; (3) admit the newcomers; (4) check all residents again, because
// admitting takes time; (5) advance them; (6) hand over the finished.
#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "server/scheduler_impl.h"

namespace sinkhorn {
namespace {

// Whether a task has to leave at `now`, and as what.
absl::Status EndReason(const ScheduledTask& task, absl::Time now) {
  if (task.cancelled.load(std::memory_order_acquire)) return absl::CancelledError("cancelled by the client");
  if (task.task.deadline > now) return absl::OkStatus();
  return absl::DeadlineExceededError(task.result.timing.launch_count == 0 ? "the deadline passed in the queue"
                                                                          : "the deadline passed while running");
}

// Counts the problems of a resident for its family.
void CountFamily(const ScheduledTask& task, RoundInfo* info) {
  const char* family = task.solve->family();
  for (RoundInfo::Share& share : info->families) {
    if (share.family != family) continue;  // String literals: an address is a name.
    share.problem_count += task.task.problem.count;
    return;
  }
  info->families.push_back({family, task.task.problem.count});
}

}  // namespace

Scheduler::Impl::Round Scheduler::Impl::RunRound(int lane_index) {
  Lane* lane = &lanes_[lane_index];
  bool worked = DropEnded(lane);

  Tasks entering, ended;
  Round round = TakeFromQueue(lane, &entering, &ended);
  worked |= !entering.empty() || !ended.empty();
  HandOver(lane, &ended);
  Admit(lane, &entering);

  // Until none has to leave: `done` takes time as well, and nothing is launched after its deadline.
  while (DropEnded(lane)) {
  }
  worked |= !lane->residents.empty();
  FinishLate(lane);
  Advance(lane);
  round.worked = worked;
  return round;
}

// Hands over the residents that were cancelled or have expired. True if there were any.
bool Scheduler::Impl::DropEnded(Lane* lane) {
  if (lane->residents.empty()) return false;
  const absl::Time now = clock_->Now();
  Tasks ended;
  for (ScheduledTaskPtr& task : lane->residents) {
    task->result.status = EndReason(*task, now);
    if (!task->result.status.ok()) ended.push_back(std::move(task));
  }
  if (ended.empty()) return false;
  auto& residents = lane->residents;
  residents.erase(std::remove(residents.begin(), residents.end(), nullptr), residents.end());
  HandOver(lane, &ended);
  return true;
}

// Step 2: moves tasks from the queue to `entering` (room is reserved for them) and to `ended`.
Scheduler::Impl::Round Scheduler::Impl::TakeFromQueue(Lane* lane, Tasks* entering, Tasks* ended) {
  Round round;
  Lane* sleeper = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const absl::Time now = clock_->Now();
    for (TaskId id : cancelled_) {
      const auto found = tasks_.find(id);
      if (found != tasks_.end() && found->second->waiting) ended->push_back(queue_.Remove(found->second));
    }
    cancelled_.clear();
    queue_.TakeExpired(now, ended);
    for (ScheduledTaskPtr& task : *ended) task->result.status = EndReason(*task, now);

    round.stopped = stopped_;
    if (stopped_ || !device_error_.empty()) {
      TakeAll(lane, ended);
    } else {
      TakeEntering(lane, now, entering, &round);
      // What this lane has no room for may suit one that sleeps.
      if (!sleepers_.empty() && HeldUntil() <= now && queue_.Next(RoomIn(0)) != nullptr) sleeper = Ring();
    }
    round.rings = rings_;
  }
  Wake(sleeper);
  return round;
}

void Scheduler::Impl::TakeEntering(Lane* lane, absl::Time now, Tasks* entering, Round* round) {
  const absl::Time held_until = HeldUntil();
  if (lane->residents.empty() && now < held_until) {
    round->wake_at = held_until;
    return;
  }
  while (ScheduledTask* next = queue_.Next(RoomIn(lane->problems))) {
    entering->push_back(queue_.Take(next));
    next->has_room = true;
    TenantAccounts::Account& tenant = tenants_.at(next->task.tenant);
    tenant.waiting -= 1;
    tenant.resident_ns += next->remaining_ns;
    lane->problems += next->task.problem.count;
    resident_requests_ += 1;
    resident_problems_ += next->task.problem.count;
    resident_working_bytes_ += next->working_bytes;
    resident_predicted_ns_ += next->remaining_ns;
  }
}

// Stopped, or the device is lost: all that waits, and this lane's residents.
void Scheduler::Impl::TakeAll(Lane* lane, Tasks* ended) {
  const size_t first = ended->size();
  while (!queue_.empty()) ended->push_back(queue_.Remove(queue_.oldest()));
  for (ScheduledTaskPtr& task : lane->residents) ended->push_back(std::move(task));
  lane->residents.clear();
  // A status of its own for each: copies would share memory between threads.
  const std::string why = device_error_.empty() ? "the scheduler has stopped" : device_error_;
  for (size_t i = first; i < ended->size(); ++i) (*ended)[i]->result.status = absl::UnavailableError(why);
}

// What fits on a lane whose residents have `lane_problems` members. An empty lane takes any request; an empty backend
// takes any problem.
Room Scheduler::Impl::RoomIn(int64_t lane_problems) const {
  constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
  Room room;
  room.problems = lane_problems == 0 ? kAny : options_.max_resident_problems - lane_problems;
  room.working_bytes = resident_requests_ == 0 ? kAny : options_.max_working_bytes - resident_working_bytes_;
  return room;
}

// Until when an empty lane lets the queue wait for company: not at all if none can come or would fit.
absl::Time Scheduler::Impl::HeldUntil() const {
  const bool held = options_.max_batch_delay > absl::ZeroDuration() && accepting_ && !queue_.empty() &&
                    queue_.requests() < options_.max_queue_requests &&
                    queue_.problems() < options_.max_resident_problems;
  return held ? queue_.HoldUntil(options_.max_batch_delay) : absl::InfinitePast();
}

void Scheduler::Impl::Admit(Lane* lane, Tasks* entering) {
  Tasks ended;
  for (ScheduledTaskPtr& task : *entering) {
    task->result.status = EndReason(*task, clock_->Now());
    if (task->result.status.ok()) {
      absl::StatusOr<std::unique_ptr<Solve>> solve = backend_->Admit(task->task.problem);
      if (solve.ok()) {
        task->solve = *std::move(solve);
      } else {
        task->result.status = std::move(solve).status();
      }
    }
    (task->solve != nullptr ? lane->residents : ended).push_back(std::move(task));
  }
  HandOver(lane, &ended);
}

// Residents whose time is up give what they have.
void Scheduler::Impl::FinishLate(Lane* lane) {
  if (lane->residents.empty()) return;
  const absl::Time now = clock_->Now();
  for (ScheduledTaskPtr& task : lane->residents) {
    if (task->finishing || task->task.finish_by > now) continue;
    task->finishing = true;
    task->solve->FinishSoon();
  }
}

// Steps 5 and 6.
void Scheduler::Impl::Advance(Lane* lane) {
  ChooseTurn(lane);
  if (lane->turn.empty()) return;
  RoundInfo info;
  info.lane = lane->index;
  info.request_count = static_cast<int64_t>(lane->turn.size());
  info.sat_out = static_cast<int64_t>(lane->residents.size()) - info.request_count;
  lane->solves.clear();
  for (ScheduledTask* task : lane->turn) {
    lane->solves.push_back(task->solve.get());
    info.problem_count += task->task.problem.count;
    CountFamily(*task, &info);
  }
  const absl::Time start = clock_->Now();
  for (ScheduledTask* task : lane->turn) {
    TaskTiming& timing = task->result.timing;
    if (timing.launch_count++ == 0) task->first_launch = start;
    timing.batch_problem_count = std::max(timing.batch_problem_count, info.problem_count);
  }

  const absl::Status status = backend_->Advance(lane->index, lane->solves, absl::ToDoubleSeconds(options_.slice));

  const absl::Duration time = clock_->Now() - start;
  info.seconds = absl::ToDoubleSeconds(time);
  Charge(lane, time);
  HandOverFinished(lane, status);
  if (on_round_) on_round_(info);
}

// After a slice with this outcome. One that failed ends those who took part in it.
void Scheduler::Impl::HandOverFinished(Lane* lane, const absl::Status& status) {
  for (ScheduledTask* task : lane->turn) {
    if (!status.ok()) {
      task->result.status = absl::Status(status.code(), status.message());
    } else if (task->solve->done()) {
      task->result.status = task->solve->status();
      if (task->result.status.ok()) task->result.report = task->solve->report();
    } else {
      continue;
    }
    task->finished = true;
  }
  Tasks ended;
  auto& residents = lane->residents;
  for (ScheduledTaskPtr& task : residents) {
    if (task->finished) ended.push_back(std::move(task));
  }
  residents.erase(std::remove(residents.begin(), residents.end(), nullptr), residents.end());
  if (absl::IsUnavailable(status)) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (device_error_.empty()) device_error_ = absl::StrCat("device lost: ", status.message());
    Ring();
    WakeAll();
  }
  HandOver(lane, &ended);
}

// The end of `ended`, whose statuses are set: destroys the Solves, gives back what the tasks held, runs each `done`.
void Scheduler::Impl::HandOver(Lane* lane, Tasks* ended) {
  if (ended->empty()) return;
  const absl::Time now = clock_->Now();
  for (ScheduledTaskPtr& task : *ended) {
    task->solve.reset();  // Before `done`, which may free the memory that it works on.
    TaskResult& result = task->result;
    result.handed_over = static_cast<int64_t>(ended->size());
    const bool launched = result.timing.launch_count > 0;
    if (!result.status.ok()) result.stage = launched ? "running" : "queue";
    result.timing.queue = std::max((launched ? task->first_launch : now) - task->submitted, absl::ZeroDuration());
    if (launched) result.timing.compute = std::max(now - task->first_launch, absl::ZeroDuration());
  }
  const auto count = static_cast<int64_t>(ended->size());
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (ScheduledTaskPtr& task : *ended) {
      tasks_.erase(task->id);
      bytes_ -= task->task.bytes;
      load_ns_.fetch_sub(task->remaining_ns, std::memory_order_relaxed);
      tenants_.Remove(task->task.tenant, task->task.bytes, task->remaining_ns);
      // One that did not finish took at least so much.
      const double seconds = absl::ToDoubleSeconds(task->result.timing.lane_time);
      const bool whole = task->result.status.ok() && !task->finishing;
      if (whole || seconds * 1e9 > static_cast<double>(task->predicted_ns)) {
        costs_.Measured(task->formula.problem_class, task->formula.seconds, seconds);
      }
      TenantAccounts::Account& tenant = tenants_.at(task->task.tenant);
      if (!task->has_room) {
        tenant.waiting -= 1;
        continue;
      }
      tenant.resident_ns -= task->remaining_ns;
      lane->problems -= task->task.problem.count;
      resident_requests_ -= 1;
      resident_problems_ -= task->task.problem.count;
      resident_working_bytes_ -= task->working_bytes;
      resident_predicted_ns_ -= task->remaining_ns;
    }
    handing_over_ += count;
  }
  for (ScheduledTaskPtr& task : *ended) {
    if (task->task.done) task->task.done(task->result);
    task.reset();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  handing_over_ -= count;
  if (tasks_.empty() && handing_over_ == 0) empty_.notify_all();
}

}  // namespace sinkhorn
