// Who shares a launch with whom, and who goes first: one promise of server/scheduler.h at a time, with a virtual clock.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>

#include "absl/time/time.h"
#include "tests/scheduler/scheduler_fixture.h"

namespace sinkhorn {
namespace {

using ::testing::ElementsAre;

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
