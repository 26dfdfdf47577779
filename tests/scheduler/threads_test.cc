// The scheduler with its own threads, under load from many: built to be run under TSan. The clock is the real one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/scheduler.h"
#include "tests/scheduler/fake_backend.h"

namespace sinkhorn {
namespace {

struct Job : FakeSpec {
  std::atomic<int> done_count{0};
  bool accepted = false;
  int output = 0;  // Written by the backend, read in `done`: no lock of its own, so TSan sees whether they are ordered.
};

// Submitters and cancellers around one scheduler with two lanes.
class Crowd {
 public:
  explicit Crowd(const SchedulerOptions& options) : backend_(2) {
    backend_.on_advance = [this](int, absl::Span<FakeSpec* const> specs) { return OnAdvance(specs); };
    scheduler_ = std::make_unique<Scheduler>(&backend_, RealClock(), options,
                                             [this](const RoundInfo& info) { rounds_ += info.request_count > 0; });
    scheduler_->Start();
  }

  // Each of 4 threads submits up to `jobs` tasks, until refused as UNAVAILABLE; 2 threads cancel now and then.
  void Begin(int jobs) {
    for (int t = 0; t < 4; ++t) {
      jobs_.emplace_back();
      threads_.emplace_back([this, t, jobs, mine = &jobs_.back()] { SubmitMany(t, jobs, mine); });
    }
    for (int t = 0; t < 2; ++t) cancellers_.emplace_back([this, t] { CancelMany(t); });
  }
  // For a while under load.
  void AwaitLoad() {
    while (launches_ == 0) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  void AwaitSubmitters() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }
  void End() {
    AwaitSubmitters();
    ending_ = true;
    for (std::thread& thread : cancellers_) thread.join();
    scheduler_->Stop();
  }

  // Exactly one reply for each accepted task and none for a refused one; nothing is left.
  void CheckEnd() {
    int64_t accepted = 0;
    for (const std::deque<Job>& jobs : jobs_) {
      for (const Job& job : jobs) {
        accepted += job.accepted;
        EXPECT_EQ(job.done_count, job.accepted ? 1 : 0);
        EXPECT_EQ(job.solves, 0);
      }
    }
    EXPECT_GT(accepted, 0);
    EXPECT_EQ(backend_.violations(), 0);
    EXPECT_EQ(bad_results_, 0);
    EXPECT_GT(rounds_, 0);
    const SchedulerStats stats = scheduler_->stats();
    EXPECT_EQ(stats.queue_requests + stats.queue_bytes + stats.resident_requests + stats.resident_problems, 0);
    EXPECT_EQ(stats.bytes + stats.working_bytes, 0);
    EXPECT_EQ(stats.queue_predicted_seconds, 0);
  }

  Scheduler& scheduler() { return *scheduler_; }
  int64_t replies(absl::StatusCode code) const { return replies_[static_cast<int>(code)]; }
  void LoseDevice() { lost_ = true; }

 private:
  absl::Status OnAdvance(absl::Span<FakeSpec* const> specs) {
    if (lost_) return absl::UnavailableError("gone");
    for (FakeSpec* spec : specs) ++static_cast<Job*>(spec)->output;
    if (++launches_ % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
    return absl::OkStatus();
  }

  void SubmitMany(int seed, int jobs, std::deque<Job>* mine) {
    std::mt19937 random(seed);
    for (int i = 0; i < jobs; ++i) {
      mine->emplace_back();
      Job* job = &mine->back();
      job->slices = 1 + random() % 3;
      job->count = 1 + random() % 3;
      job->working_bytes = random() % 50;
      job->predicted_seconds = 1e-5;
      if (random() % 50 == 0) job->admit_code = absl::StatusCode::kResourceExhausted;
      if (random() % 50 == 0) job->solve_code = absl::StatusCode::kFailedPrecondition;
      Task task = MakeTask(job, random() % 4 == 0 ? absl::Microseconds(random() % 2000) : absl::Hours(1));
      TaskId id = 0;
      absl::Status status;
      while (absl::IsResourceExhausted(status = scheduler_->Submit(&task, &id))) std::this_thread::yield();
      job->accepted = status.ok();
      if (status.ok()) last_id_ = id;
      if (absl::IsUnavailable(status)) return;
      if (random() % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
    }
  }

  Task MakeTask(Job* job, absl::Duration timeout) {
    Task task;
    task.problem = FakeProblem(job);
    task.bytes = 100;
    task.deadline = absl::Now() + timeout;
    task.done = [this, job](const TaskResult& result) {
      ++job->done_count;
      ++replies_[static_cast<int>(result.status.code())];
      if (result.status.ok() && job->output != job->slices) ++bad_results_;
      if (result.status.ok() && result.timing.launch_count != job->slices) ++bad_results_;
      if (job->solves != 0) ++bad_results_;
    };
    return task;
  }

  void CancelMany(int seed) {
    std::mt19937 random(seed);
    while (!ending_) {
      const TaskId last = last_id_;
      scheduler_->Cancel(last - random() % 8);
      if (random() % 8 == 0) (void)scheduler_->stats();
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 100));
    }
  }

  FakeBackend backend_;
  std::deque<std::deque<Job>> jobs_;
  std::vector<std::thread> threads_, cancellers_;
  std::atomic<bool> ending_{false}, lost_{false};
  std::atomic<TaskId> last_id_{0};
  std::atomic<int64_t> launches_{0}, rounds_{0}, bad_results_{0};
  std::atomic<int64_t> replies_[17] = {};
  std::unique_ptr<Scheduler> scheduler_;
};

// With and without lanes that are lent to those who submit.
class SchedulerThreadsTest : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Lanes, SchedulerThreadsTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Lent" : "NotLent"; });

SchedulerOptions Options(bool lent = false) {
  SchedulerOptions options;
  if (lent) options.lend = absl::Milliseconds(1);
  options.max_queue_requests = 32;
  options.max_queue_bytes = 6000;
  options.max_working_bytes = 400;
  options.max_resident_problems = 8;
  options.window = 4;
  return options;
}

TEST_P(SchedulerThreadsTest, EveryTaskOfACrowdEndsOnce) {
  Crowd crowd(Options(GetParam()));
  crowd.Begin(2000);
  crowd.AwaitSubmitters();
  EXPECT_TRUE(crowd.scheduler().AwaitEmpty(absl::Now() + absl::Seconds(60)));
  crowd.End();
  crowd.CheckEnd();
  EXPECT_EQ(crowd.replies(absl::StatusCode::kUnavailable), 0);
  for (const absl::StatusCode code : {absl::StatusCode::kOk, absl::StatusCode::kCancelled,
                                      absl::StatusCode::kResourceExhausted, absl::StatusCode::kFailedPrecondition}) {
    EXPECT_GT(crowd.replies(code), 0) << absl::StatusCodeToString(code);
  }
}

TEST_P(SchedulerThreadsTest, BatchingOffWithABatchDelay) {
  SchedulerOptions options = Options(GetParam());
  options.max_resident_problems = 1;
  options.max_batch_delay = absl::Microseconds(50);
  Crowd crowd(options);
  crowd.Begin(500);
  crowd.AwaitSubmitters();
  EXPECT_TRUE(crowd.scheduler().AwaitEmpty(absl::Now() + absl::Seconds(60)));
  crowd.End();
  crowd.CheckEnd();
}

TEST_P(SchedulerThreadsTest, ADrainUnderLoadLosesNothing) {
  for (int run = 0; run < 5; ++run) {
    Crowd crowd(Options(GetParam()));
    crowd.Begin(1 << 20);
    crowd.AwaitLoad();
    crowd.scheduler().StopAccepting();
    EXPECT_TRUE(crowd.scheduler().AwaitEmpty(absl::Now() + absl::Seconds(60)));
    crowd.End();
    crowd.CheckEnd();
    EXPECT_EQ(crowd.replies(absl::StatusCode::kUnavailable), 0);
  }
}

TEST_P(SchedulerThreadsTest, AStopUnderLoadEndsAll) {
  for (int run = 0; run < 5; ++run) {
    Crowd crowd(Options(GetParam()));
    crowd.Begin(1 << 20);
    crowd.AwaitLoad();
    std::thread other([&] { crowd.scheduler().Stop(); });
    crowd.scheduler().Stop();
    other.join();
    crowd.End();
    crowd.CheckEnd();
  }
}

TEST_P(SchedulerThreadsTest, ADeviceLostUnderLoadEndsAll) {
  for (int run = 0; run < 5; ++run) {
    Crowd crowd(Options(GetParam()));
    crowd.Begin(1 << 20);
    crowd.AwaitLoad();
    crowd.LoseDevice();
    crowd.AwaitSubmitters();  // They see UNAVAILABLE.
    EXPECT_TRUE(crowd.scheduler().AwaitEmpty(absl::Now() + absl::Seconds(60)));
    EXPECT_TRUE(crowd.scheduler().stats().device_lost);
    crowd.End();
    crowd.CheckEnd();
    EXPECT_GT(crowd.replies(absl::StatusCode::kUnavailable), 0);
  }
}

// One task at a time with pauses around the time it takes a lane to fall asleep: a lost wake-up would never return.
TEST_P(SchedulerThreadsTest, ASleepingLaneAlwaysWakes) {
  FakeBackend backend(2);
  Scheduler scheduler(&backend, RealClock(), Options(GetParam()));
  scheduler.Start();
  std::mutex mutex;
  std::condition_variable changed;
  std::mt19937 random(1);
  for (int i = 0; i < 3000; ++i) {
    FakeSpec spec;
    spec.predicted_seconds = 1e-5;
    spec.slices = 1 + i % 2;
    bool done = false;
    Task task;
    task.problem = FakeProblem(&spec);
    task.done = [&](const TaskResult&) {
      std::lock_guard<std::mutex> lock(mutex);
      done = true;
      changed.notify_one();
    };
    TaskId id = 0;
    ASSERT_TRUE(scheduler.Submit(&task, &id).ok());
    if (i % 3 == 0) scheduler.Cancel(id);
    std::unique_lock<std::mutex> lock(mutex);
    ASSERT_TRUE(changed.wait_for(lock, std::chrono::seconds(30), [&] { return done; })) << "lost wake-up";
    lock.unlock();
    const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(random() % 20000);
    while (std::chrono::steady_clock::now() < until) {
    }
  }
}

// Room that one lane gives back is enough for two: it takes one task itself and must wake the other lane for the other.
TEST_P(SchedulerThreadsTest, ALaneWakesTheOtherForWhatItHasNoRoomFor) {
  SchedulerOptions options = Options(GetParam());
  options.max_resident_problems = 1;
  options.max_working_bytes = 2;
  FakeBackend backend(2);
  std::mutex mutex;
  std::condition_variable changed;
  bool go = false;
  int together = 0;
  FakeSpec first, second, third;
  first.working_bytes = 2;
  second.working_bytes = third.working_bytes = 1;
  backend.on_advance = [&](int, absl::Span<FakeSpec* const> specs) {
    std::unique_lock<std::mutex> lock(mutex);
    if (specs[0] != &first) ++together;
    changed.notify_all();
    const auto released = [&] { return specs[0] == &first ? go : together == 2; };
    EXPECT_TRUE(changed.wait_for(lock, std::chrono::seconds(30), released)) << "the other lane sleeps";
    return absl::OkStatus();
  };
  Scheduler scheduler(&backend, RealClock(), options);
  scheduler.Start();
  for (FakeSpec* spec : {&first, &second, &third}) {
    Task task;
    task.problem = FakeProblem(spec);
    TaskId id = 0;
    ASSERT_TRUE(scheduler.Submit(&task, &id).ok());
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // The other lane finds no room and sleeps.
  {
    std::lock_guard<std::mutex> lock(mutex);
    go = true;
    changed.notify_all();
  }
  EXPECT_TRUE(scheduler.AwaitEmpty(absl::Now() + absl::Seconds(60)));
  EXPECT_EQ(together, 2);
}

class LentLaneTest : public ::testing::Test {
 protected:
  LentLaneTest() : backend_(1), scheduler_(&backend_, RealClock(), Options(/*lent=*/true)) { scheduler_.Start(); }

  // The threads that a task's slices and its `done` ran on, once it is done.
  std::vector<std::thread::id> Solve(FakeSpec* spec) {
    std::vector<std::thread::id> threads;
    backend_.on_advance = [&](int, absl::Span<FakeSpec* const>) {
      threads.push_back(std::this_thread::get_id());
      return absl::OkStatus();
    };
    Task task;
    task.problem = FakeProblem(spec);
    task.done = [&](const TaskResult& result) {
      EXPECT_TRUE(result.status.ok());
      threads.push_back(std::this_thread::get_id());
    };
    TaskId id = 0;
    EXPECT_TRUE(scheduler_.Submit(&task, &id).ok());
    EXPECT_TRUE(scheduler_.AwaitEmpty(absl::Now() + absl::Seconds(60)));
    return threads;
  }
  // As Solve, but the lane's thread slept before, of which the first slice on this thread is proof.
  std::vector<std::thread::id> SolveWithASleepingLane(FakeSpec* spec) {
    for (int i = 0; i < 10000; ++i) {
      spec->slices_done = 0;
      std::vector<std::thread::id> threads = Solve(spec);
      if (threads.front() == std::this_thread::get_id()) return threads;
      absl::SleepFor(absl::Milliseconds(1));
    }
    ADD_FAILURE() << "never on this thread";
    return {};
  }

  FakeBackend backend_;
  Scheduler scheduler_;
};

TEST_F(LentLaneTest, AShortTaskAloneIsSolvedByWhoSubmitsIt) {
  FakeSpec spec;
  spec.predicted_seconds = 1e-5;
  EXPECT_THAT(SolveWithASleepingLane(&spec), ::testing::Each(std::this_thread::get_id()));
}

TEST_F(LentLaneTest, WhatIsNotOverAfterASliceGoesToTheLanesThread) {
  FakeSpec spec;
  spec.predicted_seconds = 1e-5;
  spec.slices = 3;
  const std::vector<std::thread::id> threads = SolveWithASleepingLane(&spec);
  ASSERT_EQ(threads.size(), 4u);
  for (size_t i = 1; i < threads.size(); ++i) EXPECT_NE(threads[i], std::this_thread::get_id());
}

TEST_F(LentLaneTest, ALongOrAnUnknownTaskIsTheLanesThreads) {
  for (const double seconds : {0.0, 1.0}) {
    for (int i = 0; i < 20; ++i) {
      FakeSpec spec;
      spec.predicted_seconds = seconds;
      EXPECT_THAT(Solve(&spec), ::testing::Each(::testing::Ne(std::this_thread::get_id())));
      absl::SleepFor(absl::Milliseconds(1));
    }
  }
}

}  // namespace
}  // namespace sinkhorn
