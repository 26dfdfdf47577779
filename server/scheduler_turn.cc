// Which residents take part in a slice, and what it costs them.
//
// All of them if the device does them side by side, or if what they have left fits a slice: the common case. Otherwise
// they take turns: tenants by what they have had, and each tenant's tasks in this order:
//   those that were asked to finish soon, and those that would miss their deadlines if they waited any longer, the
//   earliest deadline first;
//   then those whose predicted time, kPatience times from their arrival on, ends first: short ones pass long ones,
//   which come forward as they wait.
// And in every kRotation-th slice whoever sits out longest goes first, so that a wrong prediction starves nobody.
#include <algorithm>
#include <utility>
#include <vector>

#include "server/scheduler_impl.h"

namespace sinkhorn {
namespace {

constexpr double kUrgent = 2;  // Times what is left, plus a slice: then a deadline is near.

// Less goes first.
struct Urgency {
  bool can_wait = true;
  absl::Time when;
  TaskId id = 0;
  bool operator<(const Urgency& other) const {
    if (can_wait != other.can_wait) return !can_wait;
    if (when != other.when) return when < other.when;
    return id < other.id;
  }
};

Urgency UrgencyOf(const ScheduledTask& task, absl::Time now, absl::Duration slice) {
  const absl::Duration left = absl::Nanoseconds(task.remaining_ns);
  if (task.finishing) return {false, task.task.finish_by, task.id};
  if (task.task.deadline - now < kUrgent * left + slice) return {false, task.task.deadline, task.id};
  return {true, DueTime(task), task.id};
}

}  // namespace

// What it may have of a slice, as predicted. One that has had all it was predicted to need may need any time.
int64_t Scheduler::Impl::SliceNs(const ScheduledTask& task) const {
  if (task.predicted_ns == 0) return 0;
  return task.remaining_ns > 0 ? std::min(task.remaining_ns, task.slice_ns) : task.slice_ns;
}

void Scheduler::Impl::ChooseTurn(Lane* lane) {
  const double full = options_.turn_slices * static_cast<double>(absl::ToInt64Nanoseconds(options_.slice));
  double work = 0;
  for (const ScheduledTaskPtr& task : lane->residents) work += static_cast<double>(SliceNs(*task));
  lane->turn.clear();
  if (work <= full || lane->problems <= options_.turn_problems || lane->residents.size() <= 1) {
    for (ScheduledTaskPtr& task : lane->residents) {
      lane->turn.push_back(task.get());
      task->sat_out = 0;
    }
    if (lane->sitting_out_ns == 0) return;  // Only this thread changes it.
    std::lock_guard<std::mutex> lock(mutex_);
    lane->sitting_out_ns = 0;
    return;
  }
  const absl::Time now = clock_->Now();
  std::lock_guard<std::mutex> lock(mutex_);
  TakeTurns(lane, now);
}

void Scheduler::Impl::TakeTurns(Lane* lane, absl::Time now) {
  struct Candidate {
    Urgency urgency;
    ScheduledTask* task;
    bool operator<(const Candidate& other) const { return urgency < other.urgency; }
  };
  struct Line {  // A tenant's residents.
    double turn;
    std::vector<Candidate> tasks;
    size_t next = 0;
  };
  std::vector<std::pair<int, Line>> lines;
  ScheduledTask* patient = nullptr;
  for (ScheduledTaskPtr& task : lane->residents) {
    const int tenant = task->task.tenant;
    auto line = std::find_if(lines.begin(), lines.end(), [&](const auto& entry) { return entry.first == tenant; });
    if (line == lines.end()) line = lines.insert(lines.end(), {tenant, {tenants_.Turn(tenant), {}, 0}});
    line->second.tasks.push_back({UrgencyOf(*task, now, options_.slice), task.get()});
    if (patient == nullptr || task->sat_out > patient->sat_out) patient = task.get();
  }
  for (auto& entry : lines) std::sort(entry.second.tasks.begin(), entry.second.tasks.end());

  const double full = options_.turn_slices * static_cast<double>(absl::ToInt64Nanoseconds(options_.slice));
  double work = 0;
  int64_t problems = 0;
  const auto take = [&](ScheduledTask* task, Line* line) {
    const auto ns = static_cast<double>(SliceNs(*task));
    work += ns;
    problems += task->task.problem.count;
    line->turn += ns * 1e-9 / tenants_.at(task->task.tenant).weight;
    lane->turn.push_back(task);
  };
  if (++lane->turns_taken % kRotation == 0) {
    const int tenant = patient->task.tenant;
    take(patient, &std::find_if(lines.begin(), lines.end(), [&](const auto& e) { return e.first == tenant; })->second);
  } else {
    patient = nullptr;
  }
  for (;;) {
    Line* first = nullptr;
    for (auto& entry : lines) {
      Line& line = entry.second;
      if (line.next < line.tasks.size() && (first == nullptr || line.turn < first->turn)) first = &line;
    }
    if (first == nullptr) break;
    ScheduledTask* task = first->tasks[first->next++].task;
    if (task == patient) continue;
    const bool fits = work + static_cast<double>(SliceNs(*task)) <= full || problems < options_.turn_problems;
    if (!fits && !lane->turn.empty()) break;
    take(task, first);
  }

  lane->sitting_out_ns = 0;
  for (ScheduledTaskPtr& task : lane->residents) {
    ++task->sat_out;
    lane->sitting_out_ns += task->remaining_ns;
  }
  for (ScheduledTask* task : lane->turn) {
    task->sat_out = 0;
    lane->sitting_out_ns -= task->remaining_ns;
  }
}

// A slice has taken `time`: shares it among those who took part.
void Scheduler::Impl::Charge(Lane* lane, absl::Duration time) {
  double work = 0;
  for (ScheduledTask* task : lane->turn) work += static_cast<double>(SliceNs(*task)) + 1;
  std::lock_guard<std::mutex> lock(mutex_);
  for (ScheduledTask* task : lane->turn) {
    const absl::Duration share = time * ((static_cast<double>(SliceNs(*task)) + 1) / work);
    task->result.timing.lane_time += share;
    tenants_.Charge(task->task.tenant, absl::ToDoubleSeconds(share));
    const int64_t had = std::min(task->remaining_ns, absl::ToInt64Nanoseconds(share));
    task->remaining_ns -= had;
    load_ns_.fetch_sub(had, std::memory_order_relaxed);
    resident_predicted_ns_ -= had;
    TenantAccounts::Account& tenant = tenants_.at(task->task.tenant);
    tenant.backlog_ns -= had;
    tenant.resident_ns -= had;
  }
}

}  // namespace sinkhorn
