// What callers do with the scheduler: submit, cancel, ask, start, stop; and how idle lanes sleep until there is work.
#include "server/scheduler.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "server/scheduler_impl.h"

namespace sinkhorn {
namespace {

// For wait_for, which overflows with very long waits.
std::chrono::nanoseconds WallTime(absl::Duration wait) {
  return absl::ToChronoNanoseconds(std::min(wait, absl::Hours(24 * 365)));
}

class AbslClock final : public Clock {
 public:
  absl::Time Now() override { return absl::Now(); }
};

}  // namespace

Clock* RealClock() {
  static AbslClock clock;
  return &clock;
}

Scheduler::Impl::Impl(Backend* backend, Clock* clock, const SchedulerOptions& options,
                      std::function<void(const RoundInfo&)> on_round)
    : backend_(backend),
      clock_(clock),
      options_(options),
      on_round_(std::move(on_round)),
      lanes_(std::max(1, backend->lanes())),
      queue_(std::max<int64_t>(1, options.window), &tenants_),
      costs_(backend) {
  for (size_t i = 0; i < lanes_.size(); ++i) lanes_[i].index = static_cast<int>(i);
}

// ---- Submitting and cancelling ------------------------------------------------------------------------------------

absl::Status Scheduler::Impl::Submit(Task* task, TaskId* id, Admission* admission) {
  auto scheduled = std::make_unique<ScheduledTask>();
  scheduled->working_bytes = backend_->WorkingBytes(task->problem);
  scheduled->formula = costs_.FormulaOf(task->problem);
  scheduled->submitted = clock_->Now();
  Admission unasked;

  Lane *sleeper = nullptr, *borrowed = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Predict(task->finish_by, scheduled.get());
    tenants_.Seen(task->tenant, task->weight, scheduled->submitted);
    if (absl::Status s = Refusal(*task, *scheduled, admission != nullptr ? admission : &unasked); !s.ok()) return s;
    *id = scheduled->id = ++last_id_;
    scheduled->task = std::move(*task);
    bytes_ += scheduled->task.bytes;
    load_ns_.fetch_add(scheduled->remaining_ns, std::memory_order_relaxed);
    tenants_.Add(scheduled->task.tenant, scheduled->task.bytes, scheduled->remaining_ns);
    tasks_.emplace(scheduled->id, scheduled.get());
    borrowed = Borrow(*scheduled);
    queue_.Push(std::move(scheduled));
    if (borrowed == nullptr) sleeper = Ring();
  }
  Wake(sleeper);
  if (borrowed != nullptr) RunBorrowed(borrowed);
  return absl::OkStatus();
}

void Scheduler::Impl::Cancel(TaskId id) {
  Lane* sleeper = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = tasks_.find(id);
    if (found == tasks_.end()) return;
    if (found->second->cancelled.exchange(true, std::memory_order_acq_rel)) return;
    if (!found->second->waiting) return;
    cancelled_.push_back(id);
    sleeper = Ring();
  }
  Wake(sleeper);
}

// ---- Idle lanes ---------------------------------------------------------------------------------------------------

Scheduler::Impl::Lane* Scheduler::Impl::Ring() {
  ++rings_;
  return sleepers_.empty() ? nullptr : sleepers_.back();
}

// Where a round takes 10 us, waking a thread for it and being woken for what comes of it cost as much again each: with
// lent lanes the server spends .024 to .030 ms on a request of 32 matrices of 4 x 4 where it spent .041 to .056, at 16
// to 64 clients, and answers a lone one in .08 ms for .17 (two KVM cores).
Scheduler::Impl::Lane* Scheduler::Impl::Borrow(const ScheduledTask& task) {
  const bool alone = tasks_.size() == 1 && !sleepers_.empty() && options_.max_batch_delay == absl::ZeroDuration();
  if (!alone || task.predicted_ns == 0 || absl::Nanoseconds(task.predicted_ns) > options_.lend) return nullptr;
  Lane* lane = sleepers_.back();
  sleepers_.pop_back();
  lane->lent = true;
  return lane;
}

// What comes meanwhile is solved here too if it is as short, but not for ever: this thread has other work.
void Scheduler::Impl::RunBorrowed(Lane* lane) {
  constexpr int kMostRounds = 4;
  for (int rounds = 1;; ++rounds) {
    const Round round = RunRound(lane->index);
    std::lock_guard<std::mutex> lock(mutex_);
    const bool more = rings_ != round.rings || !lane->residents.empty() || stopped_;
    const bool few = lane->residents.empty() && absl::Nanoseconds(queue_.predicted_ns()) <= options_.lend;
    if (more && few && rounds < kMostRounds) continue;
    lane->lent = false;
    sleepers_.push_back(lane);
    if (!more) return;
    ++rings_;
    return Wake(lane);
  }
}

void Scheduler::Impl::RunLane(int lane_index) {
  for (;;) {
    const Round round = RunRound(lane_index);
    if (round.stopped) return;
    if (!round.worked) WaitForRing(&lanes_[lane_index], round);
  }
}

// Sleeps at once. Spinning first would not pay: Submit to `done` takes 2.3 us when the lane fell asleep up to 100 us
// ago, 13 us after longer pauses (medians, two KVM cores), and a spin as long as those would take a core from the
// others.
void Scheduler::Impl::WaitForRing(Lane* lane, const Round& round) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto rung = [&] { return rings_ != round.rings && !lane->lent; };
  sleepers_.push_back(lane);
  if (round.wake_at == absl::InfiniteFuture()) {
    lane->bell.wait(lock, rung);
  } else {
    lane->bell.wait_for(lock, WallTime(round.wake_at - clock_->Now()), rung);
  }
  sleepers_.erase(std::find(sleepers_.begin(), sleepers_.end(), lane));
}

// ---- Start, drain, stop -------------------------------------------------------------------------------------------

void Scheduler::Impl::Start() {
  for (Lane& lane : lanes_) {
    lane.thread = std::thread([this, index = lane.index] { RunLane(index); });
  }
}

void Scheduler::Impl::StopAccepting() {
  std::lock_guard<std::mutex> lock(mutex_);
  accepting_ = false;
  Ring();  // Tasks that wait for company go.
  WakeAll();
}

bool Scheduler::Impl::AwaitEmpty(absl::Time deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto empty = [this] { return tasks_.empty() && handing_over_ == 0; };
  return empty_.wait_for(lock, WallTime(deadline - clock_->Now()), empty);
}

void Scheduler::Impl::Stop() {
  std::lock_guard<std::mutex> stop_lock(stop_mutex_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
    Ring();
    WakeAll();
  }
  for (Lane& lane : lanes_) {
    if (lane.thread.joinable()) lane.thread.join();
  }
  // Without Start, nobody else has ended what is left. With it, nothing is.
  for (Lane& lane : lanes_) RunRound(lane.index);
}

// ---- What others want to know -------------------------------------------------------------------------------------

// Predicted work as seconds of the whole backend.
double Scheduler::Impl::LaneSeconds(int64_t predicted_ns) const {
  return static_cast<double>(predicted_ns) * 1e-9 / static_cast<double>(lanes_.size());
}

absl::Duration Scheduler::Impl::PushbackHint() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return Pushback();
}

SchedulerStats Scheduler::Impl::stats() const {
  const absl::Time now = clock_->Now();
  std::lock_guard<std::mutex> lock(mutex_);
  SchedulerStats stats;
  stats.queue_requests = queue_.requests();
  stats.queue_bytes = queue_.bytes();
  stats.resident_requests = resident_requests_;
  stats.resident_problems = resident_problems_;
  stats.bytes = bytes_;
  stats.working_bytes = resident_working_bytes_;
  int64_t waiting_ns = queue_.predicted_ns();
  for (const Lane& lane : lanes_) waiting_ns += lane.sitting_out_ns;
  stats.queue_predicted_seconds = LaneSeconds(waiting_ns);
  stats.backlog_predicted_seconds = LaneSeconds(load_ns_.load(std::memory_order_relaxed));
  if (!queue_.empty()) stats.queue_oldest_age = std::max(now - queue_.oldest()->submitted, absl::ZeroDuration());
  stats.device_lost = !device_error_.empty();
  return stats;
}

// ---- The public face ----------------------------------------------------------------------------------------------

Scheduler::Scheduler(Backend* backend, Clock* clock, const SchedulerOptions& options,
                     std::function<void(const RoundInfo&)> on_round)
    : impl_(std::make_unique<Impl>(backend, clock, options, std::move(on_round))) {}
Scheduler::~Scheduler() { Stop(); }
absl::Status Scheduler::Submit(Task* task, TaskId* id, Admission* admission) {
  return impl_->Submit(task, id, admission);
}
void Scheduler::Cancel(TaskId id) { impl_->Cancel(id); }
absl::Duration Scheduler::PushbackHint() const { return impl_->PushbackHint(); }
void Scheduler::StopAccepting() { impl_->StopAccepting(); }
bool Scheduler::AwaitEmpty(absl::Time deadline) { return impl_->AwaitEmpty(deadline); }
void Scheduler::Stop() { impl_->Stop(); }
SchedulerStats Scheduler::stats() const { return impl_->stats(); }
double Scheduler::LoadSeconds() const { return impl_->LoadSeconds(); }
void Scheduler::Start() { impl_->Start(); }
bool Scheduler::RunRound(int lane) { return impl_->RunRound(lane).worked; }

}  // namespace sinkhorn
