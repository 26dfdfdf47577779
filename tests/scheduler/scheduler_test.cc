// One promise of server/scheduler.h at a time, with a virtual clock.
#include "server/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "tests/scheduler/fake_backend.h"

namespace sinkhorn {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

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

// ---- Batches ------------------------------------------------------------------------------------------------------

TEST_F(SchedulerTest, WaitingTasksShareOneLaunch) {
  Outcome* a = New("a");
  a->count = 5;
  ASSERT_TRUE(Submit(a).ok());
  Outcome* b = Add("b");
  RunAll();

  EXPECT_THAT(launches_, ElementsAre("a b"));
  for (Outcome* outcome : {a, b}) {
    EXPECT_EQ(outcome->done_count, 1);
    EXPECT_TRUE(outcome->result.status.ok());
    EXPECT_EQ(outcome->result.report.convergence.iterations, 1);
    EXPECT_EQ(outcome->result.timing.batch_problem_count, 6);
    EXPECT_EQ(outcome->result.timing.launch_count, 1);
    EXPECT_EQ(outcome->result.timing.compute, absl::Milliseconds(4));
  }
  ASSERT_EQ(rounds_.size(), 1u);
  EXPECT_EQ(rounds_[0].problem_count, 6);
  EXPECT_EQ(rounds_[0].request_count, 2);
  EXPECT_DOUBLE_EQ(rounds_[0].seconds, 0.004);
}

TEST_F(SchedulerTest, NewcomersJoinALargeResidentAtTheNextSliceAndDoNotStopIt) {
  Outcome* large = New("large");
  large->slices = 4;
  ASSERT_TRUE(Submit(large).ok());
  for (const char* name : {"a", "b", "c", "d"}) {
    scheduler().RunRound(0);
    Add(name);
  }
  RunAll();

  EXPECT_THAT(launches_, ElementsAre("large", "large a", "large b", "large c", "d"));
  EXPECT_EQ(large->result.timing.launch_count, 4);
  EXPECT_EQ(large->result.timing.compute, absl::Milliseconds(16));
}

TEST_F(SchedulerTest, OneResidentProblemTurnsBatchingOff) {
  options_.max_resident_problems = 1;
  Outcome* many = New("many");
  many->count = 100;
  many->slices = 2;
  Add("a");
  ASSERT_TRUE(Submit(many).ok());
  Add("b");
  RunAll();

  EXPECT_THAT(launches_, ElementsAre("a", "many", "many", "b"));
  EXPECT_EQ(many->result.timing.batch_problem_count, 100);
}

TEST_F(SchedulerTest, WorkingBytesAreBoundedButOneProblemIsLetIn) {
  options_.max_working_bytes = 10;
  for (const auto& [name, bytes] : {std::pair<const char*, int>{"huge", 50}, {"a", 6}, {"b", 6}, {"c", 4}}) {
    Outcome* outcome = New(name);
    outcome->working_bytes = bytes;
    ASSERT_TRUE(Submit(outcome).ok());
  }
  RunAll();

  EXPECT_THAT(launches_, ElementsAre("huge", "a c", "b"));
}

// ---- Order --------------------------------------------------------------------------------------------------------

TEST_F(SchedulerTest, EarliestDeadlineGoesFirst) {
  options_.max_resident_problems = 1;
  Add("none");
  Add("late", absl::Seconds(9));
  Add("early", absl::Seconds(1));
  Add("late too", absl::Seconds(9));
  RunAll();

  EXPECT_THAT(launches_, ElementsAre("early", "late", "late too", "none"));
}

TEST_F(SchedulerTest, OnlyTheWindowIsReordered) {
  options_.max_resident_problems = 1;
  options_.window = 2;
  Add("a", absl::Seconds(9));
  Add("b", absl::Seconds(8));
  Add("c", absl::Seconds(1));
  RunAll();

  EXPECT_THAT(launches_, ElementsAre("b", "c", "a"));
}

TEST_F(SchedulerTest, PassedOverWindowTimesThenNext) {
  options_.max_resident_problems = 1;
  options_.window = 3;
  Add("patient");
  for (int i = 0; i < 6; ++i) Add("urgent", absl::Seconds(1));
  RunAll();

  EXPECT_THAT(launches_, ElementsAre("urgent", "urgent", "urgent", "patient", "urgent", "urgent", "urgent"));
}

TEST_F(SchedulerTest, AWideTaskIsNotStarvedByNarrowOnesThatFitBesideTheResidents) {
  options_.max_resident_problems = 2;
  options_.window = 3;
  Outcome* resident = New("resident");
  resident->slices = 9;
  ASSERT_TRUE(Submit(resident).ok());
  scheduler().RunRound(0);
  Outcome* wide = New("wide");
  wide->count = 2;
  ASSERT_TRUE(Submit(wide).ok());
  for (int i = 0; i < 5; ++i) Add("n");
  RunAll();

  EXPECT_THAT(launches_, ElementsAre("resident", "resident n", "resident n", "resident n", "resident", "resident",
                                     "resident", "resident", "resident", "wide", "n n"));
}

// ---- Limits -------------------------------------------------------------------------------------------------------

TEST_F(SchedulerTest, RefusesBeyondTheRequestLimitAndLeavesTheTaskAlone) {
  options_.max_queue_requests = 2;
  Add("a");
  Add("b");
  Outcome* c = New("c");
  Task task;
  task.problem = FakeProblem(c);
  task.bytes = 7;
  task.done = [](const TaskResult&) { ADD_FAILURE() << "done of a refused task"; };
  TaskId id = 77;
  EXPECT_EQ(scheduler().Submit(&task, &id).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(id, 77u);
  EXPECT_EQ(task.bytes, 7);
  EXPECT_EQ(task.problem.transport.cost.data, c);
  EXPECT_TRUE(task.done != nullptr);

  RunAll();
  EXPECT_TRUE(Submit(c).ok()) << "room again";
}

TEST_F(SchedulerTest, BytesCountUntilTheEndNotOnlyInTheQueue) {
  options_.max_queue_bytes = 100;
  Outcome* a = New("a");
  a->slices = 2;
  ASSERT_TRUE(Submit(a, absl::InfiniteDuration(), 60).ok());
  scheduler().RunRound(0);
  EXPECT_EQ(scheduler().stats().queue_bytes, 0);
  EXPECT_EQ(scheduler().stats().bytes, 60);
  EXPECT_EQ(Submit(New("b"), absl::InfiniteDuration(), 41).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(Submit(New("c"), absl::InfiniteDuration(), 40).ok());
  RunAll();
  EXPECT_EQ(scheduler().stats().bytes, 0);
}

TEST_F(SchedulerTest, PushbackGrowsWithTheQueueAndFallsAgain) {
  absl::Duration last = scheduler().PushbackHint();
  EXPECT_GT(last, absl::ZeroDuration());
  for (int i = 0; i < 5; ++i) {
    Outcome* outcome = New("a");
    outcome->predicted_seconds = 0.1;
    ASSERT_TRUE(Submit(outcome).ok());
    EXPECT_NEAR(absl::ToDoubleSeconds(scheduler().PushbackHint() - last), 0.1, 1e-6);
    last = scheduler().PushbackHint();
  }
  EXPECT_NEAR(scheduler().stats().queue_predicted_seconds, 0.5, 1e-6);
  RunAll();
  EXPECT_EQ(scheduler().PushbackHint(), options_.slice);
  EXPECT_EQ(scheduler().stats().queue_predicted_seconds, 0);
}

TEST_F(SchedulerTest, PushbackLearnsHowLongTasksReallyTake) {
  options_.max_resident_problems = 1;
  for (int i = 0; i < 100; ++i) {  // Predicted 1 ms each, take 4 ms.
    Outcome* outcome = New("a");
    outcome->predicted_seconds = 0.001;
    ASSERT_TRUE(Submit(outcome).ok());
  }
  EXPECT_NEAR(scheduler().stats().queue_predicted_seconds, 0.1, 1e-6);
  RunAll();
  Outcome* next = New("next");
  next->predicted_seconds = 1;
  ASSERT_TRUE(Submit(next).ok());
  EXPECT_NEAR(scheduler().stats().queue_predicted_seconds, 4, 0.1);
}

TEST_F(SchedulerTest, UnusablePredictionsDoNoHarm) {
  for (const double seconds : {std::nan(""), -1.0, 1e300, static_cast<double>(INFINITY)}) {
    Outcome* outcome = New("a");
    outcome->predicted_seconds = seconds;
    ASSERT_TRUE(Submit(outcome).ok());
    EXPECT_LE(scheduler().PushbackHint(), absl::Minutes(1));
  }
  RunAll();
  EXPECT_EQ(scheduler().stats().queue_predicted_seconds, 0);
}

// ---- Deadlines and cancellation -----------------------------------------------------------------------------------

TEST_F(SchedulerTest, APassedDeadlineIsRefused) {
  EXPECT_EQ(Submit(New("a"), absl::ZeroDuration()).code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(SchedulerTest, ExpiresInTheQueueAndWhileRunning) {
  Outcome* running = New("running");
  running->slices = 9;
  ASSERT_TRUE(Submit(running, absl::Milliseconds(10)).ok());  // A launch takes 4 ms: leaves after the third.
  Outcome* waiting = Add("waiting", absl::Milliseconds(1));
  clock_.Step(absl::Milliseconds(1));
  RunAll();

  EXPECT_THAT(launches_, ElementsAre("running", "running", "running"));
  EXPECT_EQ(CodeOf(running), absl::StatusCode::kDeadlineExceeded);
  EXPECT_STREQ(running->result.stage, "running");
  EXPECT_EQ(CodeOf(waiting), absl::StatusCode::kDeadlineExceeded);
  EXPECT_STREQ(waiting->result.stage, "queue");
  EXPECT_EQ(waiting->result.timing.queue, absl::Milliseconds(1));
}

TEST_F(SchedulerTest, ADeadlineThatPassesWhileAdmittingIsNotLaunched) {
  backend_.on_admit = [this](FakeSpec*) { clock_.Step(absl::Milliseconds(3)); };
  Outcome* a = Add("a", absl::Milliseconds(5));  // Admitted at 0, launched at 6 ms otherwise.
  Outcome* b = Add("b");
  RunAll();

  EXPECT_THAT(launches_, ElementsAre("b"));
  EXPECT_EQ(CodeOf(a), absl::StatusCode::kDeadlineExceeded);
  EXPECT_STREQ(a->result.stage, "queue");
  EXPECT_TRUE(b->result.status.ok());
}

TEST_F(SchedulerTest, CancelsWaitingAndRunning) {
  Outcome* running = New("running");
  running->slices = 9;
  ASSERT_TRUE(Submit(running).ok());
  scheduler().RunRound(0);
  Outcome* waiting = Add("waiting");
  scheduler().Cancel(waiting->id);
  scheduler().Cancel(running->id);
  scheduler().Cancel(running->id);  // Again.
  RunAll();

  EXPECT_THAT(launches_, ElementsAre("running"));
  EXPECT_EQ(CodeOf(waiting), absl::StatusCode::kCancelled);
  EXPECT_STREQ(waiting->result.stage, "queue");
  EXPECT_EQ(CodeOf(running), absl::StatusCode::kCancelled);
  EXPECT_STREQ(running->result.stage, "running");
  EXPECT_EQ(running->done_count, 1);
  EXPECT_EQ(running->solves, 0);
}

TEST_F(SchedulerTest, CancellingAnUnknownOrFinishedTaskIsIgnored) {
  scheduler().Cancel(0);
  scheduler().Cancel(12345);
  Outcome* a = Add("a");
  RunAll();
  scheduler().Cancel(a->id);
  Outcome* b = Add("b");
  RunAll();
  EXPECT_EQ(a->done_count, 1);
  EXPECT_TRUE(b->result.status.ok());
}

// ---- Failures -----------------------------------------------------------------------------------------------------

TEST_F(SchedulerTest, AFailureLeavesTheOthersAlone) {
  Outcome* bad_admit = New("bad_admit");
  bad_admit->admit_code = absl::StatusCode::kResourceExhausted;
  Outcome* bad_solve = New("bad_solve");
  bad_solve->solve_code = absl::StatusCode::kFailedPrecondition;
  ASSERT_TRUE(Submit(bad_admit).ok());
  ASSERT_TRUE(Submit(bad_solve).ok());
  Outcome* good = Add("good");
  RunAll();

  EXPECT_THAT(launches_, ElementsAre("bad_solve good"));
  EXPECT_EQ(CodeOf(bad_admit), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(CodeOf(bad_solve), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(good->result.status.ok());
  EXPECT_EQ(scheduler().stats().working_bytes, 0);
}

TEST_F(SchedulerTest, ALostDeviceEndsEverything) {
  options_.max_resident_problems = 1;
  Outcome* running = Add("running");
  Outcome* waiting = Add("waiting");
  EXPECT_FALSE(scheduler().stats().device_lost);
  lost_ = true;
  RunAll();

  EXPECT_THAT(launches_, ElementsAre("running"));
  EXPECT_EQ(CodeOf(running), absl::StatusCode::kUnavailable);
  EXPECT_EQ(CodeOf(waiting), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(scheduler().stats().device_lost);
  EXPECT_EQ(Submit(New("later")).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(scheduler().AwaitEmpty(absl::InfinitePast()));
}

// ---- Callbacks ----------------------------------------------------------------------------------------------------

TEST_F(SchedulerTest, DoneMaySubmitCancelAndAsk) {
  options_.max_queue_requests = 1;
  Outcome* next = New("next");
  Outcome* first = New("first");
  int stats_calls = 0;
  Task task;
  task.problem = FakeProblem(first);
  task.done = [&](const TaskResult&) {
    EXPECT_EQ(scheduler().stats().resident_requests, 0) << "its place is free by now";
    ++stats_calls;
    EXPECT_TRUE(Submit(next).ok());
    scheduler().Cancel(first->id);
    EXPECT_GT(scheduler().PushbackHint(), absl::ZeroDuration());
    EXPECT_FALSE(scheduler().AwaitEmpty(absl::InfinitePast())) << "a done is running";
  };
  ASSERT_TRUE(scheduler().Submit(&task, &first->id).ok());
  RunAll();

  EXPECT_EQ(stats_calls, 1);
  EXPECT_TRUE(next->result.status.ok());
  EXPECT_THAT(launches_, ElementsAre("first", "next"));
}

// ---- Waiting for company ------------------------------------------------------------------------------------------

TEST_F(SchedulerTest, MaxBatchDelayHoldsAnIdleLaneForCompany) {
  options_.max_batch_delay = absl::Milliseconds(10);
  Add("a");
  EXPECT_FALSE(scheduler().RunRound(0));
  clock_.Step(absl::Milliseconds(9));
  Add("b");
  EXPECT_FALSE(scheduler().RunRound(0));
  clock_.Step(absl::Milliseconds(1));
  EXPECT_TRUE(scheduler().RunRound(0));
  EXPECT_THAT(launches_, ElementsAre("a b"));
}

TEST_F(SchedulerTest, MaxBatchDelayDoesNotHoldNewcomersOfABusyLane) {
  options_.max_batch_delay = absl::Milliseconds(10);
  Outcome* a = New("a");
  a->slices = 2;
  ASSERT_TRUE(Submit(a).ok());
  clock_.Step(absl::Milliseconds(10));
  scheduler().RunRound(0);
  Add("b");
  scheduler().RunRound(0);
  EXPECT_THAT(launches_, ElementsAre("a", "a b"));
}

TEST_F(SchedulerTest, MaxBatchDelayIsCutShortByAFullBatch) {
  options_.max_batch_delay = absl::Milliseconds(10);
  options_.max_resident_problems = 2;
  Add("a");
  EXPECT_FALSE(scheduler().RunRound(0));
  Add("b");
  EXPECT_TRUE(scheduler().RunRound(0));
  EXPECT_THAT(launches_, ElementsAre("a b"));
}

TEST_F(SchedulerTest, MaxBatchDelayIsCutShortByADeadline) {
  options_.max_batch_delay = absl::Milliseconds(10);
  Outcome* a = New("a");
  a->predicted_seconds = 0.003;
  ASSERT_TRUE(Submit(a, absl::Milliseconds(8)).ok());  // Has to start at 5 ms.
  clock_.Step(absl::Microseconds(4999));
  EXPECT_FALSE(scheduler().RunRound(0));
  clock_.Step(absl::Microseconds(1));
  EXPECT_TRUE(scheduler().RunRound(0));
  EXPECT_TRUE(a->result.status.ok());
}

TEST_F(SchedulerTest, MaxBatchDelayIsCutShortByADrain) {
  options_.max_batch_delay = absl::Milliseconds(10);
  Outcome* a = Add("a");
  scheduler().StopAccepting();
  RunAll();
  EXPECT_TRUE(a->result.status.ok());
  EXPECT_EQ(Submit(New("b")).code(), absl::StatusCode::kUnavailable);
}

// ---- The end ------------------------------------------------------------------------------------------------------

TEST_F(SchedulerTest, StopEndsWhatIsLeft) {
  Outcome* running = New("running");
  running->slices = 9;
  ASSERT_TRUE(Submit(running).ok());
  scheduler().RunRound(0);
  Outcome* waiting = Add("waiting");
  scheduler().Stop();
  scheduler().Stop();

  EXPECT_THAT(launches_, ElementsAre("running"));
  EXPECT_EQ(CodeOf(running), absl::StatusCode::kUnavailable);
  EXPECT_EQ(CodeOf(waiting), absl::StatusCode::kUnavailable);
  EXPECT_EQ(waiting->done_count, 1);
  EXPECT_EQ(Submit(New("later")).code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(scheduler().RunRound(0));
  EXPECT_FALSE(scheduler().stats().device_lost);
}

// ---- Several lanes ------------------------------------------------------------------------------------------------

class TwoLanesTest : public SchedulerTest {
 protected:
  TwoLanesTest() {
    Watch(&two_);
    options_.max_resident_problems = 1;
    scheduler_ = std::make_unique<Scheduler>(&two_, &clock_, options_);
  }
  ~TwoLanesTest() override { scheduler_.reset(); }
  FakeBackend two_{2};
};

TEST_F(TwoLanesTest, ShareOneQueue) {
  Outcome* a = New("a");
  a->slices = 3;
  ASSERT_TRUE(Submit(a).ok());
  Add("b");
  scheduler().RunRound(0);
  scheduler().RunRound(1);
  scheduler().RunRound(1);  // Nothing waits; residents of the other lane are not its own.
  EXPECT_THAT(launches_, ElementsAre("a", "b"));
}

TEST_F(TwoLanesTest, ADeviceLostOnOneLaneEndsTheOthersResidents) {
  Outcome* a = New("a");
  a->slices = 3;
  ASSERT_TRUE(Submit(a).ok());
  scheduler().RunRound(0);
  Outcome* b = Add("b");
  lost_ = true;
  scheduler().RunRound(1);
  EXPECT_EQ(CodeOf(b), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(scheduler().RunRound(0));
  EXPECT_EQ(CodeOf(a), absl::StatusCode::kUnavailable);
  EXPECT_THAT(launches_, ElementsAre("a", "b"));
  EXPECT_EQ(scheduler().stats().resident_requests, 0);
}

}  // namespace
}  // namespace sinkhorn
