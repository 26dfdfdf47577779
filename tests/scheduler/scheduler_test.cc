// Limits, deadlines, failures and the end of a task: one promise of server/scheduler.h at a time, with a virtual clock.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "absl/time/time.h"
#include "tests/scheduler/scheduler_fixture.h"

namespace sinkhorn {
namespace {

using ::testing::ElementsAre;

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

}  // namespace
}  // namespace sinkhorn
