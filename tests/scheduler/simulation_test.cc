// Hundreds of random lives of a scheduler under a virtual clock: arrivals, sizes, deadlines, cancellations, failures,
// lost devices, stops. simulation.h says what is checked in each.
#include "tests/scheduler/simulation.h"

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace sinkhorn {
namespace {

#ifdef __SANITIZE_THREAD__
constexpr uint64_t kSeeds = 100;  // One thread: TSan can find little here.
#else
constexpr uint64_t kSeeds = 1000;
#endif

TEST(SchedulerSimulationTest, KeepsItsPromisesForEverySeed) {
  Simulation::Coverage total;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    Simulation simulation(seed);
    simulation.Run();
    if (HasFailure()) return;  // The first bad seed is the one to look at.

    const Simulation::Coverage& c = simulation.coverage();
    total.accepted += c.accepted;
    total.full += c.full;
    total.ok += c.ok;
    total.cancelled_waiting += c.cancelled_waiting;
    total.cancelled_running += c.cancelled_running;
    total.expired_waiting += c.expired_waiting;
    total.expired_running += c.expired_running;
    total.admit_failed += c.admit_failed;
    total.solve_failed += c.solve_failed;
    total.unavailable += c.unavailable;
    total.forced += c.forced;
    total.shared_launches += c.shared_launches;
    total.held += c.held;
    total.turns += c.turns;
    total.infeasible += c.infeasible;
    total.share_full += c.share_full;
  }
  // Each reply was one of these, and the seeds reach every case often.
  EXPECT_EQ(total.accepted, total.ok + total.cancelled_waiting + total.cancelled_running + total.expired_waiting +
                                total.expired_running + total.admit_failed + total.solve_failed + total.unavailable);
  for (const int64_t count :
       {total.full, total.ok, total.cancelled_waiting, total.cancelled_running, total.expired_waiting,
        total.expired_running, total.admit_failed, total.solve_failed, total.unavailable, total.forced,
        total.shared_launches, total.held, total.turns, total.infeasible, total.share_full}) {
    EXPECT_GT(count, static_cast<int64_t>(kSeeds / 10));
  }
}

TEST(SchedulerSimulationTest, SameSeedSameHistory) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    Simulation first(seed), second(seed);
    first.Run();
    second.Run();
    EXPECT_EQ(first.trace(), second.trace()) << "seed " << seed;
    Simulation other(seed + 1);
    other.Run();
    EXPECT_NE(first.trace(), other.trace()) << "the trace says nothing";
  }
}

}  // namespace
}  // namespace sinkhorn
