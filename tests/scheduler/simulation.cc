// A random life of a scheduler and the model that watches it; see the header.
#include "tests/scheduler/simulation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "absl/strings/str_cat.h"

namespace sinkhorn {
namespace {

constexpr absl::Duration kSlice = absl::Milliseconds(5);

}  // namespace

// ---- Random events ------------------------------------------------------------------------------------------------

Simulation::Simulation(uint64_t seed) : random_(seed), lanes_(seed % 3 == 0 ? 2 : 1), backend_(lanes_) {
  const int64_t windows[] = {1, 2, 3, 8, 64}, problems[] = {1, 4, 16, 1000};
  options_.max_queue_requests = Pick(1, 40);
  options_.max_queue_bytes = Pick(50, 2000);
  options_.max_working_bytes = Pick(20, 200);
  options_.max_resident_problems = problems[Pick(0, 3)];
  options_.window = windows[Pick(0, 4)];
  options_.slice = kSlice;
  if (Chance(0.2)) options_.max_batch_delay = absl::Milliseconds(Pick(1, 20));
  reentrant_ = Chance(0.5);
  load_ = Chance(0.5) ? 0.7 : 0.3;
  cancel_chance_ = Chance(0.5) ? 0.1 : 0.0;
  fail_chance_ = Chance(0.5) ? 0.1 : 0.0;
  if (Chance(0.1)) lose_device_at_ = Pick(0, 100);
  if (Chance(0.1)) stop_at_ = Pick(0, 300);
  if (Chance(0.3)) stop_accepting_at_ = Pick(0, 300);
  predicts_ = Chance(0.5);
  if (predicts_ && Chance(0.5)) tenants_ = 3;
  if (predicts_ && Chance(0.3)) options_.turn_problems = 8;
  if (predicts_ && Chance(0.3)) options_.max_queue_time = absl::Milliseconds(Pick(10, 200));

  backend_.on_admit = [this](FakeSpec* spec) { OnAdmit(static_cast<Record*>(spec)); };
  backend_.on_advance = [this](int lane, absl::Span<FakeSpec* const> specs) { return OnAdvance(lane, specs); };
  scheduler_ = std::make_unique<Scheduler>(&backend_, &clock_, options_);
}

void Simulation::Run() {
  for (steps_ = 0; steps_ < 300; ++steps_) {
    if (steps_ == stop_accepting_at_) {
      scheduler_->StopAccepting();
      accepting_ = false;
    }
    if (steps_ == stop_at_) {
      stopped_ = true;
      scheduler_->Stop();
    }
    Act();
    CheckStats();
    if (testing::Test::HasFailure()) return;
  }
  Drain();
  CheckEnd();
}

void Simulation::Act() {
  if (Chance(load_)) {
    for (int64_t burst = Pick(1, 4); burst > 0; --burst) SubmitOne(/*exact=*/true);
  }
  if (Chance(cancel_chance_)) CancelOne();
  if (Chance(0.3)) clock_.Step(absl::Microseconds(Pick(0, 3000)));
  if (Chance(0.7)) RunLane(static_cast<int>(Pick(0, lanes_ - 1)));
}

// `exact`: the model knows what waits, so the answer is known.
void Simulation::SubmitOne(bool exact) {
  records_.emplace_back();
  Record* record = &records_.back();
  record->sequence = static_cast<int64_t>(records_.size());
  record->count = Chance(0.1) ? Pick(1, 2000) : Pick(1, 6);
  record->slices = Chance(0.1) ? Pick(5, 40) : Pick(1, 3);
  record->working_bytes = Chance(0.1) ? Pick(0, 400) : Pick(0, 30);
  record->bytes = Chance(0.05) ? Pick(0, 2500) : Pick(0, 60);
  record->predicted_seconds = predicts_ ? static_cast<double>(record->slices) * 0.004 : 0;
  record->tenant = static_cast<int>(Pick(0, tenants_ - 1));
  if (Chance(fail_chance_)) record->admit_code = absl::StatusCode::kResourceExhausted;
  if (Chance(fail_chance_)) record->solve_code = absl::StatusCode::kFailedPrecondition;
  record->submitted = clock_.Now();
  record->deadline = absl::InfiniteFuture();
  if (Chance(0.7)) record->deadline = clock_.Now() + absl::Microseconds(Pick(Chance(0.1) ? -5000 : 1000, 200000));

  Task task;
  task.problem = FakeProblem(record);
  task.bytes = record->bytes;
  task.deadline = record->deadline;
  task.done = [this, record](const TaskResult& result) { OnDone(record, result); };
  task.tenant = record->tenant;
  task.weight = 1 + record->tenant;
  record->ahead = static_cast<int64_t>(WaitingOf(record->tenant).size());
  record->admissions_before = admissions_[record->tenant];
  const absl::StatusCode expected = ExpectedCode(*record);

  Admission admission;
  const absl::Status status = scheduler_->Submit(&task, &record->id, &admission);

  if (exact && !RefusedByPrediction(*record, status, admission)) {
    EXPECT_EQ(status.code(), expected) << status;
  }
  EXPECT_EQ(status.ok(), task.done == nullptr) << "taken on OK, left alone on error";
  if (status.ok()) {
    record->state = Record::kWaiting;
    live_.push_back(record);
    ++coverage_.accepted;
  }
  if (absl::IsResourceExhausted(status)) ++coverage_.full;
  Trace(absl::StrCat("submit ", record->sequence, " ", static_cast<int>(status.code())));
}

absl::StatusCode Simulation::ExpectedCode(const Record& record) {
  int64_t bytes = record.bytes, waiting = 0;
  for (const Record* other : live_) {
    bytes += other->bytes;
    waiting += other->state == Record::kWaiting;
  }
  if (lost_ || stopped_ || !accepting_) return absl::StatusCode::kUnavailable;
  if (record.deadline <= clock_.Now()) return absl::StatusCode::kDeadlineExceeded;
  const bool full = waiting >= options_.max_queue_requests || bytes > options_.max_queue_bytes;
  return full ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kOk;
}

// Whether a task was refused for what is predicted, of which the model knows only what it may not do.
bool Simulation::RefusedByPrediction(const Record& record, const absl::Status& status, const Admission& admission) {
  if (!predicts_ || status.ok()) return false;
  const bool idle = std::none_of(live_.begin(), live_.end(), [&](Record* other) { return !Ended(*other); });
  if (admission.infeasible) {
    ++coverage_.infeasible;
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
    EXPECT_EQ(admission.left, record.deadline - clock_.Now());
    EXPECT_GT(admission.needed, admission.left);
    EXPECT_GT(admission.left, absl::ZeroDuration());
    return true;
  }
  if (!absl::IsResourceExhausted(status)) return false;
  EXPECT_GT(admission.retry_after, absl::ZeroDuration());
  const bool mine = std::any_of(live_.begin(), live_.end(), [&](Record* r) { return r->tenant == record.tenant; });
  if (ExpectedCode(record) == absl::StatusCode::kResourceExhausted) return false;
  EXPECT_FALSE(idle && live_.empty()) << "an idle server is never full";
  EXPECT_TRUE(mine || options_.max_queue_time < absl::InfiniteDuration()) << "no tenant without work has had its part";
  ++coverage_.share_full;
  return true;
}

// Any task of the past too: unknown ids are ignored.
void Simulation::CancelOne() {
  if (records_.empty()) return;
  Record& record = records_[Pick(std::max<int64_t>(0, static_cast<int64_t>(records_.size()) - 20),
                                 static_cast<int64_t>(records_.size()) - 1)];
  record.cancelled = true;
  scheduler_->Cancel(record.id);
  Trace(absl::StrCat("cancel ", record.sequence));
}

// Nothing new comes: all that was accepted must end.
void Simulation::Drain() {
  load_ = 0;
  for (int rounds = 0; rounds < 20000; ++rounds) {
    if (live_.empty()) return;
    for (int lane = 0; lane < lanes_; ++lane) RunLane(lane);
    clock_.Step(absl::Milliseconds(1));  // Lets a held batch go.
    if (testing::Test::HasFailure()) return;
  }
  ADD_FAILURE() << "tasks are left that never end";
}

void Simulation::CheckEnd() {
  for (int lane = 0; lane < lanes_; ++lane) EXPECT_FALSE(scheduler_->RunRound(lane));
  EXPECT_TRUE(scheduler_->AwaitEmpty(absl::InfinitePast()));
  const SchedulerStats stats = scheduler_->stats();
  EXPECT_EQ(stats.queue_requests, 0);
  EXPECT_EQ(stats.queue_bytes, 0);
  EXPECT_EQ(stats.resident_requests, 0);
  EXPECT_EQ(stats.resident_problems, 0);
  EXPECT_EQ(stats.bytes, 0);
  EXPECT_EQ(stats.working_bytes, 0);
  EXPECT_EQ(stats.queue_predicted_seconds, 0);
  EXPECT_EQ(stats.backlog_predicted_seconds, 0);
  EXPECT_EQ(scheduler_->LoadSeconds(), 0);
  EXPECT_EQ(stats.queue_oldest_age, absl::ZeroDuration());
  EXPECT_EQ(stats.device_lost, lost_);
  EXPECT_NEAR(absl::ToDoubleSeconds(shares_), absl::ToDoubleSeconds(lane_time_), 1e-4) << "time lost or doubled";
  EXPECT_EQ(backend_.violations(), 0);
  for (const Record& record : records_) EXPECT_EQ(record.solves, 0);
}

// ---- What the scheduler does --------------------------------------------------------------------------------------

void Simulation::RunLane(int lane) {
  current_lane_ = lane;
  admit_failed_ = false;
  const int64_t launches = launches_;
  const bool worked = scheduler_->RunRound(lane);
  Trace(absl::StrCat("round ", lane, " ", worked));
  if (!worked) {
    EXPECT_EQ(launches, launches_);
    CheckIdle(lane);
  }
}

void Simulation::OnAdmit(Record* record) {
  Trace(absl::StrCat("admit ", record->sequence, " lane ", current_lane_));
  ASSERT_EQ(record->state, Record::kWaiting) << "admitted twice, or after its end";
  EXPECT_FALSE(Ended(*record)) << "admitted after its deadline or cancellation";
  if (!reentrant_ && tenants_ == 1) CheckOrder(*record);

  // The documented guarantee: at most `window` later ones before it, at most ahead + window in all.
  EXPECT_LE(record->passed_over, options_.window);
  EXPECT_LE(admissions_[record->tenant] - record->admissions_before, record->ahead + options_.window) << "starved";
  for (Record* other : WaitingOf(record->tenant)) {
    if (Ended(*other)) continue;  // On its way out.
    if (other->sequence < record->sequence) ++other->passed_over;
    EXPECT_LE(other->passed_over, options_.window) << "starves";
  }
  ++admissions_[record->tenant];
  record->state = Record::kResident;
  record->lane = current_lane_;
  if (record->admit_code != absl::StatusCode::kOk) admit_failed_ = true;

  if (reentrant_) {
    if (Chance(0.2)) clock_.Step(absl::Microseconds(Pick(0, 20000)));
    if (Chance(cancel_chance_)) CancelOne();
    if (Chance(load_ / 4)) SubmitOne(/*exact=*/false);
  }
}

absl::Status Simulation::OnAdvance(int lane, absl::Span<FakeSpec* const> specs) {
  EXPECT_EQ(lane, current_lane_);
  EXPECT_FALSE(lost_) << "launched on a lost device";
  std::vector<Record*> launched;
  int64_t problems = 0, working_bytes = 0;
  for (FakeSpec* spec : specs) {
    launched.push_back(static_cast<Record*>(spec));
    problems += spec->count;
  }
  for (Record* record : launched) {
    EXPECT_EQ(record->state, Record::kResident);
    EXPECT_FALSE(Ended(*record)) << "launched after its deadline or cancellation";
    if (record->launches++ == 0) record->first_launch = clock_.Now();
    record->batch_problems = std::max(record->batch_problems, problems);
  }
  if (launched.size() > 1) {
    ++coverage_.shared_launches;
    EXPECT_LE(problems, options_.max_resident_problems);
  }
  const std::vector<Record*> residents = All(Record::kResident);
  for (Record* record : residents) working_bytes += record->working_bytes;
  if (residents.size() > 1) {
    EXPECT_LE(working_bytes, options_.max_working_bytes);
  }

  // All residents of the lane take part, or as many as fill the slice, in turns; what waits could not have joined.
  std::vector<Record*> expected = ResidentsOf(lane);
  if (launched.size() < expected.size()) {
    EXPECT_TRUE(predicts_);
    EXPECT_GE(problems, options_.turn_problems);
    ++coverage_.turns;
    int64_t longest = 0;
    for (Record* record : expected) {
      const bool takes_part = std::find(launched.begin(), launched.end(), record) != launched.end();
      record->sat_out = takes_part ? 0 : record->sat_out + 1;
      record->company = std::max(record->company, static_cast<int64_t>(expected.size()));
      longest = std::max(longest, record->sat_out - kRotation * record->company);
    }
    EXPECT_LE(longest, 0) << "a resident starves";
    expected = launched;
  }
  const auto older = [](const Record* a, const Record* b) { return a->sequence < b->sequence; };
  std::sort(launched.begin(), launched.end(), older);
  std::sort(expected.begin(), expected.end(), older);
  EXPECT_EQ(launched, expected);
  if (!reentrant_ && !admit_failed_ && tenants_ == 1) {
    EXPECT_EQ(Admissible(lane), nullptr) << "left behind although it fits";
  }
  CheckStats();

  const absl::Time start = clock_.Now();
  // The slice passes; meanwhile others come and go.
  for (int64_t events = Pick(0, 3); events > 0; --events) {
    clock_.Step(kSlice * (static_cast<double>(Pick(1, 60)) / 100));
    if (Chance(load_)) SubmitOne(/*exact=*/true);
    if (Chance(cancel_chance_)) CancelOne();
  }
  Trace(absl::StrCat("advance ", lane, " ", launched.size(), " to ", absl::ToUnixNanos(clock_.Now())));
  lane_time_ += clock_.Now() - start;
  if (launches_++ != lose_device_at_) return absl::OkStatus();
  lost_ = true;
  return absl::UnavailableError("fake loss");
}

void Simulation::OnDone(Record* record, const TaskResult& result) {
  Trace(absl::StrCat("done ", record->sequence, " ", static_cast<int>(result.status.code()), " ", result.stage));
  ASSERT_TRUE(record->state == Record::kWaiting || record->state == Record::kResident) << "a second reply";
  CheckCode(*record, result);
  EXPECT_EQ(record->solves, 0) << "`done` before the Solve was destroyed";
  const bool launched = record->launches > 0;
  EXPECT_EQ(std::string(result.stage), result.status.ok() ? "" : launched ? "running" : "queue");
  EXPECT_EQ(result.timing.launch_count, record->launches);
  EXPECT_EQ(result.timing.batch_problem_count, record->batch_problems);
  const absl::Time queue_end = launched ? record->first_launch : clock_.Now();
  EXPECT_EQ(result.timing.queue, queue_end - record->submitted);
  EXPECT_EQ(result.timing.compute, launched ? clock_.Now() - record->first_launch : absl::ZeroDuration());
  shares_ += result.timing.lane_time;
  record->state = Record::kDone;
  live_.erase(std::find(live_.begin(), live_.end(), record));

  if (reentrant_ && Chance(load_ / 4)) SubmitOne(/*exact=*/false);
  if (reentrant_ && Chance(cancel_chance_)) CancelOne();
}

// Whether the reply's code is one that this task can have.
void Simulation::CheckCode(const Record& record, const TaskResult& result) {
  const bool running = record.launches > 0;
  switch (result.status.code()) {
    case absl::StatusCode::kOk:
      ++coverage_.ok;
      EXPECT_EQ(record.slices_done, record.slices);
      EXPECT_EQ(result.report.convergence.iterations, record.slices);
      EXPECT_EQ(record.solve_code, absl::StatusCode::kOk);
      return;
    case absl::StatusCode::kCancelled:
      ++(running ? coverage_.cancelled_running : coverage_.cancelled_waiting);
      EXPECT_TRUE(record.cancelled);
      return;
    case absl::StatusCode::kDeadlineExceeded:
      ++(running ? coverage_.expired_running : coverage_.expired_waiting);
      EXPECT_LE(record.deadline, clock_.Now());
      return;
    case absl::StatusCode::kUnavailable:
      ++coverage_.unavailable;
      EXPECT_TRUE(lost_ || stopped_);
      return;
    case absl::StatusCode::kResourceExhausted:
      ++coverage_.admit_failed;
      EXPECT_EQ(record.admit_code, result.status.code());
      EXPECT_FALSE(running);
      return;
    case absl::StatusCode::kFailedPrecondition:
      ++coverage_.solve_failed;
      EXPECT_EQ(record.solve_code, result.status.code());
      EXPECT_EQ(record.slices_done, record.slices);
      return;
    default:
      ADD_FAILURE() << "unexpected " << result.status;
  }
}

// The counters are the model's, exactly, whenever no callback is running.
void Simulation::CheckStats() {
  SchedulerStats expected;
  for (const Record* record : live_) {
    expected.bytes += record->bytes;
    if (record->state == Record::kWaiting) {
      expected.queue_requests += 1;
      expected.queue_bytes += record->bytes;
      expected.queue_oldest_age = std::max(expected.queue_oldest_age, clock_.Now() - record->submitted);
    } else {
      expected.resident_requests += 1;
      expected.resident_problems += record->count;
      expected.working_bytes += record->working_bytes;
    }
  }
  const SchedulerStats stats = scheduler_->stats();
  EXPECT_EQ(stats.queue_requests, expected.queue_requests);
  EXPECT_EQ(stats.queue_bytes, expected.queue_bytes);
  EXPECT_EQ(stats.queue_oldest_age, expected.queue_oldest_age);
  EXPECT_EQ(stats.resident_requests, expected.resident_requests);
  EXPECT_EQ(stats.resident_problems, expected.resident_problems);
  EXPECT_EQ(stats.working_bytes, expected.working_bytes);
  EXPECT_EQ(stats.bytes, expected.bytes);
  EXPECT_LE(stats.queue_requests, options_.max_queue_requests);
  EXPECT_LE(stats.bytes, options_.max_queue_bytes);
  EXPECT_GE(stats.queue_predicted_seconds, 0);
  EXPECT_LE(stats.queue_predicted_seconds, stats.backlog_predicted_seconds + 1e-9);
  EXPECT_GT(scheduler_->PushbackHint(), absl::ZeroDuration());
}

// Earliest deadline first among the window's tasks that fit, unless the oldest was passed over too often.
void Simulation::CheckOrder(const Record& record) {
  const Record* expected = Admissible(current_lane_);
  ASSERT_NE(expected, nullptr) << "admitted although nothing may be";
  EXPECT_EQ(record.sequence, expected->sequence);
  if (expected->passed_over >= options_.window) ++coverage_.forced;
}

// A lane that found nothing to do.
void Simulation::CheckIdle(int lane) {
  EXPECT_TRUE(ResidentsOf(lane).empty());
  const std::vector<Record*> waiting = All(Record::kWaiting);
  if (waiting.empty() || stopped_ || lost_) {
    EXPECT_TRUE(waiting.empty());
    return;
  }
  const bool held = accepting_ && clock_.Now() < waiting.front()->submitted + options_.max_batch_delay;
  if (held) ++coverage_.held;
  // Re-entrant seeds: tasks that were chosen and ended before Admit count as having passed over, unseen by the model,
  // so the oldest may be due earlier.
  const bool oldest_due = reentrant_ && !Fits(*waiting.front(), lane);
  if (!held && !oldest_due && tenants_ == 1) {
    EXPECT_EQ(Admissible(lane), nullptr) << "idle although there is work";
  }
}

// ---- The model ----------------------------------------------------------------------------------------------------

std::vector<Record*> Simulation::All(Record::State state) {
  std::vector<Record*> all;
  for (Record* record : live_) {
    if (record->state == state) all.push_back(record);
  }
  return all;
}

std::vector<Record*> Simulation::WaitingOf(int tenant) {
  std::vector<Record*> waiting;
  for (Record* record : All(Record::kWaiting)) {
    if (record->tenant == tenant) waiting.push_back(record);
  }
  return waiting;
}

std::vector<Record*> Simulation::Window() {
  std::vector<Record*> window = All(Record::kWaiting);
  if (static_cast<int64_t>(window.size()) > options_.window) window.resize(options_.window);
  return window;
}

std::vector<Record*> Simulation::ResidentsOf(int lane) {
  std::vector<Record*> residents;
  for (Record* record : All(Record::kResident)) {
    if (record->lane == lane) residents.push_back(record);
  }
  return residents;
}

bool Simulation::Fits(const Record& record, int lane) {
  int64_t problems = record.count, working_bytes = record.working_bytes;
  const std::vector<Record*> beside = ResidentsOf(lane), everywhere = All(Record::kResident);
  for (const Record* resident : beside) problems += resident->count;
  for (const Record* resident : everywhere) working_bytes += resident->working_bytes;
  return (beside.empty() || problems <= options_.max_resident_problems) &&
         (everywhere.empty() || working_bytes <= options_.max_working_bytes);
}

// The task that must be admitted next, if any.
Record* Simulation::Admissible(int lane) {
  const std::vector<Record*> window = Window();
  if (window.empty()) return nullptr;
  if (window.front()->passed_over >= options_.window) return Fits(*window.front(), lane) ? window.front() : nullptr;
  Record* best = nullptr;
  for (Record* record : window) {
    if (Fits(*record, lane) && (best == nullptr || record->deadline < best->deadline)) best = record;
  }
  return best;
}

void Simulation::Trace(const std::string& event) {
  for (const char c : event) trace_ = (trace_ ^ static_cast<unsigned char>(c)) * 1099511628211u;  // FNV-1a.
}

}  // namespace sinkhorn
