// What the one-promise-at-a-time tests share: a scheduler under a virtual clock, with named tasks.
#ifndef SINKHORN_TESTS_SCHEDULER_SCHEDULER_FIXTURE_H_
#define SINKHORN_TESTS_SCHEDULER_SCHEDULER_FIXTURE_H_

#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/scheduler.h"
#include "tests/scheduler/fake_backend.h"

namespace sinkhorn {

// What became of one task.
struct Outcome : FakeSpec {
  std::string name;
  TaskId id = 0;
  int done_count = 0;
  TaskResult result;
};

class SchedulerTest : public testing::Test {
 protected:
  SchedulerTest() : backend_(1) { Watch(&backend_); }

  // Launches are written down as "a b", the names in a launch; each takes 4 ms.
  void Watch(FakeBackend* backend) {
    backend->on_advance = [this](int, absl::Span<FakeSpec* const> specs) {
      std::string launch;
      for (FakeSpec* spec : specs) launch += (launch.empty() ? "" : " ") + static_cast<Outcome*>(spec)->name;
      launches_.push_back(launch);
      clock_.Step(absl::Milliseconds(4));
      return lost_ ? absl::UnavailableError("gone") : absl::OkStatus();
    };
  }

  Scheduler& scheduler() {
    if (scheduler_ == nullptr) {
      scheduler_ = std::make_unique<Scheduler>(&backend_, &clock_, options_,
                                               [this](const RoundInfo& info) { rounds_.push_back(info); });
    }
    return *scheduler_;
  }

  Outcome* New(const std::string& name) {
    outcomes_.emplace_back();
    outcomes_.back().name = name;
    return &outcomes_.back();
  }

  absl::Status Submit(Outcome* outcome, absl::Duration deadline = absl::InfiniteDuration(), int64_t bytes = 0) {
    Task task;
    task.problem = FakeProblem(outcome);
    task.bytes = bytes;
    task.deadline = clock_.Now() + deadline;
    task.done = [outcome](const TaskResult& result) {
      ++outcome->done_count;
      outcome->result = result;
    };
    return scheduler().Submit(&task, &outcome->id);
  }

  // Submits a one-slice task.
  Outcome* Add(const std::string& name, absl::Duration deadline = absl::InfiniteDuration()) {
    Outcome* outcome = New(name);
    EXPECT_TRUE(Submit(outcome, deadline).ok());
    return outcome;
  }

  void RunAll() {
    while (scheduler().RunRound(0)) {
    }
  }

  static absl::StatusCode CodeOf(const Outcome* outcome) { return outcome->result.status.code(); }

  VirtualClock clock_;
  FakeBackend backend_;
  SchedulerOptions options_;
  std::vector<std::string> launches_;
  std::vector<RoundInfo> rounds_;
  bool lost_ = false;
  std::deque<Outcome> outcomes_;
  std::unique_ptr<Scheduler> scheduler_;  // Last: ends first, and calls back.
};

}  // namespace sinkhorn

#endif  // SINKHORN_TESTS_SCHEDULER_SCHEDULER_FIXTURE_H_
