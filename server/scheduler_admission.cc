// Whether a task is taken: limits of the queue, the tenants' parts of them, and deadlines that can be met.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/scheduler_impl.h"

namespace sinkhorn {
namespace {

constexpr absl::Duration kMaxPushback = absl::Minutes(1);
// Times the fitted formula, of what a newcomer takes itself: beyond, its class is too various to be sure.
constexpr double kMostBelieved = 4;
// A tenant that was seen so lately is expected back.
constexpr absl::Duration kExpected = absl::Seconds(10);

}  // namespace

void Scheduler::Impl::Predict(absl::Time finish_by, ScheduledTask* scheduled) const {
  const double ratio = costs_.ratio(scheduled->formula.problem_class);
  // Bounded by the formula's bound: sums stay far from overflow.
  const double most = std::min(absl::ToDoubleSeconds(finish_by - scheduled->submitted), CostModel::kMaxSeconds);
  scheduled->predicted_ns = scheduled->remaining_ns =
      std::llround(std::max(0.0, std::min(scheduled->formula.seconds * ratio, most)) * 1e9);
  // Company makes it cheaper: so much of a slice is what it takes.
  scheduled->slice_ns = std::max<int64_t>(
      1, std::llround(static_cast<double>(absl::ToInt64Nanoseconds(options_.slice)) * std::min(ratio, 1.0)));
}

// Why a task cannot be accepted now.
absl::Status Scheduler::Impl::Refusal(const Task& task, const ScheduledTask& scheduled, Admission* admission) {
  const absl::Time now = scheduled.submitted;
  if (!device_error_.empty()) return absl::UnavailableError(device_error_);
  if (stopped_) return absl::UnavailableError("the scheduler has stopped");
  if (!accepting_) return absl::UnavailableError("draining: no new requests");
  if (task.deadline <= now) return absl::DeadlineExceededError("the deadline has passed");
  admission->retry_after = Pushback();
  if (absl::Status full = QueueRefusal(task); !full.ok()) return full;
  if (absl::Status full = ShareRefusal(task, now); !full.ok()) {
    const double own = LaneSeconds(tenants_.at(task.tenant).backlog_ns) * tenants_.Slowdown(task.tenant);
    admission->retry_after = std::min(options_.slice + absl::Seconds(own), kMaxPushback);
    return full;
  }
  return TimeRefusal(task, scheduled, admission);
}

absl::Status Scheduler::Impl::QueueRefusal(const Task& task) const {
  if (queue_.requests() >= options_.max_queue_requests) {
    return absl::ResourceExhaustedError(
        absl::StrCat("queue full: ", queue_.requests(), " requests wait, limit ", options_.max_queue_requests));
  }
  if (task.bytes > options_.max_queue_bytes - bytes_) {
    return absl::ResourceExhaustedError(absl::StrCat("queue full: ", bytes_, " bytes held and ", task.bytes,
                                                     " in this request, limit ", options_.max_queue_bytes));
  }
  return absl::OkStatus();
}

// Once a limit is half used up, what is left belongs to the tenants by weight.
absl::Status Scheduler::Impl::ShareRefusal(const Task& task, absl::Time now) const {
  const TenantAccounts::Account& own = tenants_.at(task.tenant);
  const bool requests = 2 * queue_.requests() >= options_.max_queue_requests;
  const bool bytes = bytes_ >= options_.max_queue_bytes / 2;
  if (own.requests == 0 || !(requests || bytes)) return absl::OkStatus();
  const double share = tenants_.Share(task.tenant, now - kExpected);
  if (share == 1) return absl::OkStatus();
  const auto has_its_part = [share](int64_t held, int64_t limit) {
    return static_cast<double>(held) >= share * static_cast<double>(limit) / 2;
  };
  const bool full = (requests && has_its_part(own.waiting, options_.max_queue_requests)) ||
                    (bytes && has_its_part(own.bytes, options_.max_queue_bytes));
  return full ? absl::ResourceExhaustedError("queue full for this tenant: it has its part, and others need theirs")
              : absl::OkStatus();
}

// Whether too much work lies before it: more than the limit, or than its deadline leaves time for.
absl::Status Scheduler::Impl::TimeRefusal(const Task& task, const ScheduledTask& scheduled, Admission* admission) {
  const int problem_class = scheduled.formula.problem_class;
  const double part = costs_.known(problem_class) ? 0.5 : scheduled.formula.guessed ? 0 : 0.25;
  const double believed = std::min(costs_.ratio(problem_class), kMostBelieved);
  const bool anytime = task.finish_by < absl::InfiniteFuture();  // Then it takes as little as it must.
  const absl::Duration own =
      anytime ? absl::ZeroDuration() : absl::Seconds(part * scheduled.formula.seconds * believed);
  const absl::Duration left = task.deadline - scheduled.submitted;
  const auto needed = [own](absl::Duration before) { return Admission::kQueueSafety * before + own; };

  const absl::Duration all = absl::Seconds(LaneSeconds(load_ns_.load(std::memory_order_relaxed)));
  if (all <= options_.max_queue_time && needed(all) <= left) return absl::OkStatus();
  const absl::Duration before = TimeBefore(task, scheduled);
  if (before > options_.max_queue_time) {
    admission->retry_after = std::min(before - options_.max_queue_time + options_.slice, kMaxPushback);
    return absl::ResourceExhaustedError(absl::StrCat("queue full: work for ", absl::ToDoubleSeconds(before),
                                                     " s lies before it, limit ",
                                                     absl::ToDoubleSeconds(options_.max_queue_time), " s"));
  }
  const bool in_time = needed(before) <= left;
  if (in_time && (needed(all) <= left || !DelaysAnother(task, scheduled))) return absl::OkStatus();
  if (own > left) costs_.Doubt(problem_class);  // Or one wrong ratio would refuse all that could mend it.
  admission->infeasible = true;
  admission->left = left;
  admission->needed = needed(in_time ? all : before);
  return absl::DeadlineExceededError("cannot finish before the deadline");
}

// What goes before a task, as predicted: what does in the lanes' order (scheduler_turn.cc), and what has an earlier
// deadline. Its tenant's part of it is done at the tenant's share at least, and all is done before the last of it ends.
absl::Duration Scheduler::Impl::TimeBefore(const Task& task, const ScheduledTask& scheduled) const {
  const absl::Time due = DueTime(scheduled);
  int64_t all = 0, tenants = 0;
  for (const auto& entry : tasks_) {
    const ScheduledTask& other = *entry.second;
    const bool later = other.task.deadline > task.deadline || other.task.deadline == absl::InfiniteFuture();
    if (later && DueTime(other) > due) continue;
    all += other.remaining_ns;
    if (other.task.tenant == task.tenant) tenants += other.remaining_ns;
  }
  double seconds = LaneSeconds(all);
  const double slowdown = tenants_.Slowdown(task.tenant);
  if (slowdown > 1) {
    const double own = LaneSeconds(scheduled.predicted_ns);
    seconds = std::min(seconds, slowdown * (LaneSeconds(tenants) + own) - own + absl::ToDoubleSeconds(options_.slice));
  }
  return absl::Seconds(seconds);
}

// Whether one of the tenant's accepted tasks would miss a later deadline for it.
bool Scheduler::Impl::DelaysAnother(const Task& task, const ScheduledTask& scheduled) const {
  std::vector<std::pair<absl::Time, int64_t>> later;  // Deadlines, and the work that has them.
  int64_t work = scheduled.predicted_ns;
  for (const auto& entry : tasks_) {
    const ScheduledTask& other = *entry.second;
    if (other.task.tenant != task.tenant || other.task.deadline == absl::InfiniteFuture()) continue;
    if (other.task.deadline <= task.deadline) {
      work += other.remaining_ns;
    } else {
      later.emplace_back(other.task.deadline, other.remaining_ns);
    }
  }
  std::sort(later.begin(), later.end());
  const double slowdown = tenants_.Slowdown(task.tenant);
  const auto in_time = [&](int64_t ns, absl::Time deadline) {
    return scheduled.submitted + absl::Seconds(slowdown * LaneSeconds(ns)) <= deadline;
  };
  for (const auto& [deadline, ns] : later) {
    work += ns;
    if (!in_time(work, deadline) && in_time(work - scheduled.predicted_ns, deadline)) return true;
  }
  return false;
}

absl::Duration Scheduler::Impl::Pushback() const {
  int64_t work = queue_.predicted_ns();
  // Room in the queue, yet refused: residents hold the bytes, or the time.
  if (queue_.requests() < options_.max_queue_requests) work += resident_predicted_ns_;
  return std::min(options_.slice + absl::Seconds(LaneSeconds(work)), kMaxPushback);
}

}  // namespace sinkhorn
