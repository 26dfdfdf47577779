// One random life of a scheduler under a virtual clock, watched by a model that knows only the promises of
// server/scheduler.h: it keeps its own list of tasks and checks every Admit, Advance and `done` against it.
#ifndef SINKHORN_TESTS_SCHEDULER_SIMULATION_H_
#define SINKHORN_TESTS_SCHEDULER_SIMULATION_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/scheduler.h"
#include "tests/scheduler/fake_backend.h"

namespace sinkhorn {

// The model's view of a task.
struct Record : FakeSpec {
  enum State { kRefused, kWaiting, kResident, kDone };
  State state = kRefused;
  int64_t sequence = 0;  // Order of submission.
  TaskId id = 0;
  int64_t bytes = 0;
  absl::Time submitted, deadline, first_launch;
  bool cancelled = false;
  int lane = -1;  // Once admitted.
  int tenant = 0;
  int64_t ahead = 0;              // Tasks of its tenant that waited when it was submitted.
  int64_t admissions_before = 0;  // Of its tenant's tasks, when it was submitted.
  int64_t passed_over = 0;        // Later tasks admitted while it waited.
  int64_t launches = 0, batch_problems = 0;
  int64_t sat_out = 0, company = 0;  // Slices in a row without it; the most residents meanwhile.
};

class Simulation {
 public:
  explicit Simulation(uint64_t seed);
  // Runs it to the end. Failed promises are gtest failures.
  void Run();

  // Everything that happened, in order, hashed.
  uint64_t trace() const { return trace_; }
  // How often each thing happened, to see that the seeds reach it.
  struct Coverage {
    int64_t accepted = 0, full = 0, ok = 0, cancelled_waiting = 0, cancelled_running = 0, expired_waiting = 0;
    int64_t expired_running = 0, admit_failed = 0, solve_failed = 0, unavailable = 0, forced = 0, shared_launches = 0;
    int64_t held = 0, turns = 0, infeasible = 0, share_full = 0;
  };
  const Coverage& coverage() const { return coverage_; }

 private:
  // -- Random events.
  void Act();
  void SubmitOne(bool exact);
  void CancelOne();
  void Drain();
  void CheckEnd();

  // -- What the scheduler does, and what the model says of it.
  void RunLane(int lane);
  void OnAdmit(Record* record);
  absl::Status OnAdvance(int lane, absl::Span<FakeSpec* const> specs);
  void OnDone(Record* record, const TaskResult& result);
  void CheckCode(const Record& record, const TaskResult& result);
  void CheckStats();
  void CheckOrder(const Record& record);
  void CheckIdle(int lane);

  // -- The model.
  bool Ended(const Record& record) { return record.cancelled || record.deadline <= clock_.Now(); }
  std::vector<Record*> All(Record::State state);
  std::vector<Record*> Window();
  std::vector<Record*> ResidentsOf(int lane);
  bool Fits(const Record& record, int lane);
  Record* Admissible(int lane);
  std::vector<Record*> WaitingOf(int tenant);
  absl::StatusCode ExpectedCode(const Record& record);
  bool RefusedByPrediction(const Record& record, const absl::Status& status, const Admission& admission);

  int64_t Pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_); }
  bool Chance(double p) { return std::uniform_real_distribution<double>(0, 1)(random_) < p; }
  void Trace(const std::string& event);

  std::mt19937_64 random_;
  VirtualClock clock_;
  SchedulerOptions options_;
  int lanes_ = 1;
  // In half of the seeds Admit takes time, and others submit and cancel in it and in `done`. The model then cannot know
  // what the scheduler saw when it chose, and leaves the order of admission unchecked.
  bool reentrant_ = false;
  // In the other half nothing is predicted: then nobody is refused for it, and all residents take part in each slice.
  bool predicts_ = false;
  int tenants_ = 1;  // Of weights 1, 2, 3. The model knows the order of one tenant's tasks.
  double load_ = 0, cancel_chance_ = 0, fail_chance_ = 0;
  int64_t lose_device_at_ = -1, stop_at_ = -1, stop_accepting_at_ = -1;

  FakeBackend backend_;
  std::deque<Record> records_;
  std::vector<Record*> live_;  // Accepted and not done, in order of submission.
  int current_lane_ = -1;
  bool admit_failed_ = false;  // In this round: the room it gives back is taken in the next.
  int64_t admissions_[3] = {0, 0, 0}, launches_ = 0, steps_ = 0;
  bool accepting_ = true, stopped_ = false, lost_ = false;
  absl::Duration lane_time_, shares_;  // Of all launches; of all replies.
  uint64_t trace_ = 14695981039346656037u;
  Coverage coverage_;
  std::unique_ptr<Scheduler> scheduler_;  // Last: ends first, and calls back.
};

}  // namespace sinkhorn

#endif  // SINKHORN_TESTS_SCHEDULER_SIMULATION_H_
