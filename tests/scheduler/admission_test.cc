// Who is taken and who is refused, by prediction: one promise of server/scheduler.h at a time, with a virtual clock.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/time/time.h"
#include "tests/scheduler/scheduler_fixture.h"

namespace sinkhorn {
namespace {

using ::testing::ElementsAre;

class AdmissionTest : public SchedulerTest {
 protected:
  // Each task that takes part in a launch adds 4 ms to it: company does not come for free.
  AdmissionTest() {
    backend_.on_advance = [this, watch = backend_.on_advance](int lane, absl::Span<FakeSpec* const> specs) {
      clock_.Step(absl::Milliseconds(4) * static_cast<double>(specs.size() - 1));
      return watch(lane, specs);
    };
  }

  // A task of `slices` slices, 4 ms each, that is predicted to take `seconds`.
  Outcome* Predicted(const std::string& name, double seconds, int64_t slices = 1) {
    Outcome* outcome = New(name);
    outcome->predicted_seconds = seconds;
    outcome->slices = slices;
    return outcome;
  }
  absl::Status SubmitAs(int tenant, Outcome* outcome, absl::Duration deadline = absl::InfiniteDuration(),
                        int64_t bytes = 0) {
    Task task;
    task.problem = FakeProblem(outcome);
    task.bytes = bytes;
    task.deadline = clock_.Now() + deadline;
    task.tenant = tenant;
    task.done = [outcome](const TaskResult& result) {
      ++outcome->done_count;
      outcome->result = result;
    };
    admission_ = Admission();
    return scheduler().Submit(&task, &outcome->id, &admission_);
  }
  // Lets the class of all fake problems be known, with a ratio of 1.
  void Teach() {
    for (int i = 0; i < 8; ++i) {
      ASSERT_TRUE(Submit(Predicted("lesson", 0.004)).ok());
      RunAll();
    }
    launches_.clear();
  }

  Admission admission_;
};

// ---- Deadlines ------------------------------------------------------------------------------------------------------

TEST_F(AdmissionTest, WorkBeforeItAndHalfOfItsOwnMustFitTheDeadline) {
  Teach();
  ASSERT_TRUE(SubmitAs(0, Predicted("before", 0.1), absl::Milliseconds(150)).ok());
  // 1.5 * 100 ms + 20 ms / 2 = 160 ms.
  EXPECT_EQ(SubmitAs(0, Predicted("a", 0.02), absl::Milliseconds(159)).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(admission_.infeasible);
  EXPECT_EQ(admission_.left, absl::Milliseconds(159));
  EXPECT_NEAR(absl::ToDoubleSeconds(admission_.needed), 0.16, 1e-4);
  EXPECT_TRUE(SubmitAs(0, Predicted("b", 0.02), absl::Milliseconds(161)).ok());
}

TEST_F(AdmissionTest, AnUnknownClassIsBelievedForAQuarter) {
  EXPECT_TRUE(SubmitAs(0, Predicted("a", 0.1), absl::Milliseconds(26)).ok());
  EXPECT_FALSE(SubmitAs(0, Predicted("b", 100), absl::Milliseconds(20000)).ok());
  EXPECT_TRUE(admission_.infeasible);
}

TEST_F(AdmissionTest, AToleranceOfAnUnknownClassIsNotRefusedForItsOwnWork) {
  Outcome* outcome = Predicted("a", 1000);
  Task task;
  task.problem = FakeProblem(outcome);
  task.problem.solver.tolerance = 1e-3;
  task.deadline = clock_.Now() + absl::Milliseconds(10);
  EXPECT_TRUE(scheduler().Submit(&task, &outcome->id).ok());
}

TEST_F(AdmissionTest, AWrongRatioDoesNotRefuseForEver) {
  for (int i = 0; i < 20; ++i) {  // Each takes a thousand times what is predicted.
    ASSERT_TRUE(Submit(Predicted("lesson", 4e-6)).ok());
    RunAll();
  }
  // Now they would take as long as predicted, and 5 ms are enough. It is believed at most four times the formula.
  int refused = 0;
  while (!SubmitAs(0, Predicted("a", 0.004), absl::Milliseconds(5)).ok()) ASSERT_LT(++refused, 200);
  EXPECT_GT(refused, 0);
}

TEST_F(AdmissionTest, ALongTaskIsNotBeforeAShortOneThatPassesIt) {
  Teach();
  ASSERT_TRUE(SubmitAs(0, Predicted("long", 600, 5)).ok());  // Without a deadline.
  EXPECT_TRUE(SubmitAs(0, Predicted("short", 0.004), absl::Milliseconds(20)).ok());
  EXPECT_FALSE(SubmitAs(0, Predicted("as long", 600), absl::Minutes(12)).ok());
  RunAll();
  EXPECT_EQ(launches_[0], "short");
}

TEST_F(AdmissionTest, ADeadlineThatWasAcceptedIsBeforeALaterOne) {
  Teach();
  ASSERT_TRUE(SubmitAs(0, Predicted("long", 0.5), absl::Seconds(1)).ok());
  EXPECT_FALSE(SubmitAs(0, Predicted("later", 0.5), absl::Seconds(0.8)).ok()) << "both need a second";
  EXPECT_TRUE(SubmitAs(0, Predicted("earlier", 0.3), absl::Seconds(0.8)).ok());
  EXPECT_FALSE(SubmitAs(0, Predicted("earlier", 0.3), absl::Seconds(0.8)).ok()) << "the long one would be late";
  EXPECT_TRUE(admission_.infeasible);
}

// What was accepted meets its deadline when predictions are right, however much is offered.
TEST_F(AdmissionTest, AcceptedDeadlinesAreMetUnderOverload) {
  Teach();
  int accepted = 0, in_time = 0, refused = 0;
  std::vector<Outcome*> all;
  for (int step = 0; step < 3000; ++step) {
    for (int i = 0; i < 2; ++i) {  // Two to eight times what a launch does.
      Outcome* outcome = Predicted("x", step % 4 == 0 ? 0.016 : 0.004, step % 4 == 0 ? 4 : 1);
      if (SubmitAs(0, outcome, absl::Milliseconds(step % 3 == 0 ? 100 : 300)).ok()) {
        ++accepted;
        all.push_back(outcome);
      } else {
        EXPECT_TRUE(admission_.infeasible);
        ++refused;
      }
    }
    scheduler().RunRound(0);
  }
  RunAll();
  for (Outcome* outcome : all) in_time += outcome->result.status.ok();
  EXPECT_GT(refused, accepted / 2);
  EXPECT_GE(in_time, accepted * 99 / 100) << in_time << " of " << accepted;
  // A launch of 4 ms does 4 ms of work.
  EXPECT_GT(accepted, 1500) << "the device was kept busy";
}

// ---- Predicted work -------------------------------------------------------------------------------------------------

TEST_F(AdmissionTest, QueueFullByPredictedWorkTellsWhenThereIsRoom) {
  options_.max_queue_time = absl::Seconds(1);
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(SubmitAs(0, Predicted("a", 0.3)).ok()) << i;
  EXPECT_EQ(SubmitAs(0, Predicted("b", 0.3)).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(admission_.infeasible);
  EXPECT_NEAR(absl::ToDoubleSeconds(admission_.retry_after), 0.205, 1e-6);
  EXPECT_TRUE(SubmitAs(0, Predicted("short", 0.001)).ok()) << "it passes them";
  RunAll();
  EXPECT_TRUE(SubmitAs(0, Predicted("b", 0.3)).ok());
}

TEST_F(AdmissionTest, AnIdleDeviceTakesAnyOne) {
  options_.max_queue_time = absl::ZeroDuration();
  EXPECT_TRUE(SubmitAs(0, Predicted("a", 1e5)).ok());
  EXPECT_EQ(SubmitAs(0, Predicted("b", 1e5)).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(admission_.retry_after, absl::Minutes(1)) << "at most a minute";
}

// ---- Tenants --------------------------------------------------------------------------------------------------------

TEST_F(AdmissionTest, AFloodingTenantFindsTheQueueFullFirst) {
  options_.max_queue_requests = 40;
  options_.max_resident_problems = 1;
  ASSERT_TRUE(SubmitAs(2, New("seen lately")).ok());
  RunAll();
  int flood = 0;
  while (SubmitAs(1, New("flood")).ok()) ++flood;
  EXPECT_EQ(flood, 20) << "half of the queue is for others";
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(SubmitAs(2, New("quiet")).ok()) << i;
  EXPECT_EQ(SubmitAs(2, New("quiet")).code(), absl::StatusCode::kResourceExhausted) << "by then it has its part too";
  EXPECT_GT(admission_.retry_after, absl::ZeroDuration());
}

TEST_F(AdmissionTest, ALoneTenantHasTheWholeQueue) {
  options_.max_queue_requests = 40;
  int flood = 0;
  while (SubmitAs(1, New("flood")).ok()) ++flood;
  EXPECT_EQ(flood, 40);
}

TEST_F(AdmissionTest, AFloodingTenantFindsTheBytesTakenFirst) {
  options_.max_queue_bytes = 1000;
  ASSERT_TRUE(SubmitAs(2, New("seen lately")).ok());
  RunAll();
  int flood = 0;
  while (SubmitAs(1, New("flood"), absl::InfiniteDuration(), 10).ok()) ++flood;
  EXPECT_EQ(flood, 50);
  EXPECT_TRUE(SubmitAs(2, New("quiet"), absl::InfiniteDuration(), 400).ok()) << "its first is always let in";
}

TEST_F(AdmissionTest, AnothersBacklogDoesNotMakeADeadlineInfeasible) {
  Teach();
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(SubmitAs(1, Predicted("flood", 0.01), absl::Seconds(10)).ok());
  // A second of the other's; in turns, 10 ms take 20 ms and a slice.
  EXPECT_TRUE(SubmitAs(2, Predicted("quiet", 0.01), absl::Milliseconds(60)).ok());
  EXPECT_FALSE(SubmitAs(1, Predicted("flood", 0.01), absl::Milliseconds(60)).ok());
}

// ---- Anytime --------------------------------------------------------------------------------------------------------

TEST_F(AdmissionTest, WhoseTimeIsUpFinishesInTheNextSlice) {
  Outcome* anytime = New("anytime");
  anytime->slices = 1000;
  Task task;
  task.problem = FakeProblem(anytime);
  task.finish_by = clock_.Now() + absl::Milliseconds(10);  // After the third slice of 4 ms.
  task.done = [anytime](const TaskResult& result) {
    ++anytime->done_count;
    anytime->result = result;
  };
  ASSERT_TRUE(scheduler().Submit(&task, &anytime->id).ok());
  RunAll();
  EXPECT_EQ(anytime->done_count, 1);
  EXPECT_TRUE(anytime->result.status.ok()) << anytime->result.status;
  EXPECT_EQ(anytime->slices_done, 4);
}

TEST_F(AdmissionTest, WhoseTimeWasUpInTheQueueHasOneSlice) {
  Outcome* anytime = New("anytime");
  anytime->slices = 1000;
  Task task;
  task.problem = FakeProblem(anytime);
  task.finish_by = clock_.Now() + absl::Milliseconds(10);
  task.done = [anytime](const TaskResult& result) { anytime->result = result; };
  ASSERT_TRUE(scheduler().Submit(&task, &anytime->id).ok());
  clock_.Step(absl::Milliseconds(50));
  RunAll();
  EXPECT_TRUE(anytime->result.status.ok());
  EXPECT_EQ(anytime->slices_done, 1);
}

TEST_F(AdmissionTest, AnAnytimeTaskIsNotRefusedForItsOwnWorkAndPassesOthersWhenItsTimeIsUp) {
  Teach();
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(SubmitAs(0, Predicted("other", 0.04, 10)).ok());
  Outcome* anytime = Predicted("anytime", 1000, 100000);
  Task task;
  task.problem = FakeProblem(anytime);
  task.finish_by = clock_.Now() + absl::Milliseconds(20);
  task.deadline = clock_.Now() + absl::Milliseconds(400);
  task.done = [anytime](const TaskResult& result) { anytime->result = result; };
  ASSERT_TRUE(scheduler().Submit(&task, &anytime->id).ok());
  RunAll();
  EXPECT_TRUE(anytime->result.status.ok()) << anytime->result.status;
  EXPECT_LT(anytime->result.timing.queue + anytime->result.timing.compute, absl::Milliseconds(45));
}

// ---- Turns ----------------------------------------------------------------------------------------------------------

TEST_F(AdmissionTest, WhatFitsASliceSharesItAndMoreTakesTurns) {
  ASSERT_TRUE(Submit(Predicted("a", 0.002)).ok());
  ASSERT_TRUE(Submit(Predicted("b", 0.003)).ok());
  RunAll();
  ASSERT_TRUE(Submit(Predicted("c", 0.008, 2)).ok());
  ASSERT_TRUE(Submit(Predicted("d", 0.012, 3)).ok());
  RunAll();
  EXPECT_EQ(launches_[0], "a b");
  EXPECT_EQ(std::vector<std::string>(launches_.begin() + 1, launches_.begin() + 3),
            (std::vector<std::string>{"c", "c"}));
  EXPECT_EQ(launches_.size(), 6u);
  EXPECT_EQ(rounds_[1].sat_out, 1);
}

TEST_F(AdmissionTest, ManyMembersSideBySideTakeNoTurns) {
  options_.turn_problems = 2;
  ASSERT_TRUE(Submit(Predicted("c", 0.008, 2)).ok());
  ASSERT_TRUE(Submit(Predicted("d", 0.008, 2)).ok());
  RunAll();
  EXPECT_THAT(launches_, ElementsAre("c d", "c d"));
}

TEST_F(AdmissionTest, ShortTasksPassALongOneThatStillMovesOn) {
  Outcome* long_one = Predicted("long", 60, 100);
  ASSERT_TRUE(Submit(long_one).ok());
  for (int i = 0; i < 320; ++i) {
    ASSERT_TRUE(Submit(Predicted("s", 0.005)).ok());
    scheduler().RunRound(0);
  }
  EXPECT_GE(long_one->slices_done, 320 / (2 * kRotation));  // There are two residents, at times three.
  EXPECT_LE(long_one->slices_done, 320 / 8);
}

TEST_F(AdmissionTest, WhoWouldMissItsDeadlineGoesFirst) {
  Teach();
  ASSERT_TRUE(SubmitAs(0, Predicted("relaxed", 0.02, 5)).ok());
  ASSERT_TRUE(SubmitAs(0, Predicted("urgent", 0.04, 10), absl::Milliseconds(60)).ok());
  RunAll();
  EXPECT_EQ(launches_[0], "urgent");
}

TEST_F(AdmissionTest, TenantsTakeTurnsByWhatTheyHaveHad) {
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(SubmitAs(1, Predicted("flood", 0.4, 100)).ok());
  for (int i = 0; i < 50; ++i) scheduler().RunRound(0);  // 200 ms for the flooding tenant.
  launches_.clear();
  Outcome* quiet = Predicted("quiet", 0.08, 20);
  ASSERT_TRUE(SubmitAs(2, quiet).ok());
  for (int i = 0; i < 22; ++i) scheduler().RunRound(0);
  EXPECT_EQ(quiet->done_count, 1) << "within its credit it goes first";
}

}  // namespace
}  // namespace sinkhorn
