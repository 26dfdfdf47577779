// Which device takes the next request.
#include "server/executors.h"

#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "tests/server/fake_backend.h"

namespace sinkhorn {
namespace {

class ExecutorsTest : public testing::Test {
 protected:
  static constexpr int kDevices = 3;
  ExecutorsTest() {
    std::vector<Executor> executors;
    for (int i = 0; i < kDevices; ++i) {
      backends_[i].hold = true;  // What is submitted stays.
      schedulers_[i] = std::make_unique<Scheduler>(&backends_[i], RealClock(), SchedulerOptions());
      executors.emplace_back(&backends_[i], schedulers_[i].get());
    }
    executors_ = std::make_unique<Executors>(std::move(executors));
  }
  // Submits where the least load is, a problem predicted to take `seconds`; returns that device.
  int Submit(double seconds) {
    const Executor& executor = executors_->LeastLoaded();
    for (int i = 0; i < kDevices; ++i) {
      if (executor.scheduler != schedulers_[i].get()) continue;
      backends_[i].predicted_seconds = seconds;
      Task task;
      TaskId id;
      EXPECT_TRUE(executor.scheduler->Submit(&task, &id).ok());
      return i;
    }
    ADD_FAILURE();
    return -1;
  }

  FakeBackend backends_[kDevices];
  std::unique_ptr<Scheduler> schedulers_[kDevices];
  std::unique_ptr<Executors> executors_;
};

TEST_F(ExecutorsTest, IdleDevicesTakeTurns) {
  std::vector<int> counts(kDevices);
  for (int i = 0; i < 30; ++i) {
    for (int d = 0; d < kDevices; ++d) counts[d] += executors_->LeastLoaded().backend == &backends_[d];
  }
  for (int count : counts) EXPECT_EQ(count, 30);
}

TEST_F(ExecutorsTest, TheLeastLoadedIsChosenByPredictedSeconds) {
  const int loaded = Submit(10);
  std::vector<int> counts(kDevices);
  for (int i = 0; i < 20; ++i) ++counts[Submit(0.5)];
  // 20 problems of half a second fill the other two to 5 s each.
  for (int d = 0; d < kDevices; ++d) {
    EXPECT_EQ(counts[d], d == loaded ? 0 : 10);
  }
  EXPECT_DOUBLE_EQ(schedulers_[loaded]->LoadSeconds(), 10);
}

TEST_F(ExecutorsTest, WhatIsFinishedWeighsNothing) {
  const int device = Submit(10);
  backends_[device].hold = false;
  while (schedulers_[device]->RunRound(0)) {
  }
  EXPECT_EQ(schedulers_[device]->LoadSeconds(), 0);
}

}  // namespace
}  // namespace sinkhorn
