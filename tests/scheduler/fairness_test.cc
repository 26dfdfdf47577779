// Tenants share by weight: many random lives of a scheduler under a virtual clock, with two to five tenants that always
// have work, and one that is quiet. Predictions are wrong by up to a factor of two, which no tenant may gain by.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/scheduler.h"
#include "tests/scheduler/fake_backend.h"

namespace sinkhorn {
namespace {

constexpr absl::Duration kSlice = absl::Milliseconds(5);

struct Work : FakeSpec {
  int tenant = 0;
  double needs = 0, had = 0;  // Seconds of the device.
  absl::Time submitted;
};

// The device of one life: a slice gives all who take part equal parts of it.
class Life {
 public:
  Life(uint64_t seed, int tenants, bool overloaded) : random_(seed), backend_(1), overloaded_(overloaded) {
    for (int t = 0; t < tenants; ++t) weights_.push_back(1 << std::uniform_int_distribution<int>(0, 2)(random_));
    served_.resize(tenants);
    waiting_.resize(tenants);
    longest_.resize(tenants);
    for (int t = 0; t < tenants; ++t) sizes_.push_back(0.001 * std::uniform_int_distribution<int>(1, 40)(random_));
    options_.slice = kSlice;
    next_quiet_ = clock_.Now() + absl::Seconds(1);
    options_.max_queue_requests = 1000;
    if (overloaded && seed % 2 == 0) options_.max_resident_problems = 8;  // The others wait in the queue.
    backend_.on_advance = [this](int, absl::Span<FakeSpec* const> specs) { return Advance(specs); };
    scheduler_ = std::make_unique<Scheduler>(&backend_, &clock_, options_);
  }

  void Run(absl::Duration time) {
    const absl::Time end = clock_.Now() + time;
    while (clock_.Now() < end) {
      for (size_t t = 0; t < weights_.size(); ++t) Feed(static_cast<int>(t));
      if (!scheduler_->RunRound(0)) clock_.Step(absl::Milliseconds(1));
    }
    over_ = true;
  }

  const std::vector<double>& weights() const { return weights_; }
  double served(int tenant) const { return served_[tenant]; }
  double size(int tenant) const { return sizes_[tenant]; }
  // From submission to the end; the last tenant's in a life that is not overloaded.
  absl::Duration longest(int tenant) const { return longest_[tenant]; }

 private:
  // Keeps ten tasks of a tenant in the scheduler. The last tenant is quiet if not overloaded: one at a time, a tenth of
  // the time.
  void Feed(int tenant) {
    const bool quiet = !overloaded_ && tenant + 1 == static_cast<int>(weights_.size());
    if (quiet && clock_.Now() < next_quiet_) return;
    while (waiting_[tenant] < (quiet ? 1 : 10)) {
      if (quiet) next_quiet_ = clock_.Now() + absl::Seconds(10 * sizes_[tenant] * weights_.size());
      works_.emplace_back();
      Work* work = &works_.back();
      work->tenant = tenant;
      work->needs = sizes_[tenant] * std::uniform_real_distribution<double>(0.5, 1.5)(random_);
      work->predicted_seconds = sizes_[tenant] * std::uniform_real_distribution<double>(0.5, 2)(random_);
      work->slices = 1 << 30;
      work->submitted = clock_.Now();
      Task task;
      task.problem = FakeProblem(work);
      task.tenant = tenant;
      task.weight = weights_[tenant];
      task.done = [this, work](const TaskResult& result) {
        EXPECT_TRUE(result.status.ok() || over_) << result.status;
        --waiting_[work->tenant];
        longest_[work->tenant] = std::max(longest_[work->tenant], clock_.Now() - work->submitted);
      };
      TaskId id = 0;
      ASSERT_TRUE(scheduler_->Submit(&task, &id).ok());
      ++waiting_[tenant];
      if (quiet) return;
    }
  }

  absl::Status Advance(absl::Span<FakeSpec* const> specs) {
    // Until the slice is over, or nobody has anything left.
    double left = absl::ToDoubleSeconds(kSlice), used = 0;
    std::vector<Work*> active;
    for (FakeSpec* spec : specs) active.push_back(static_cast<Work*>(spec));
    while (left > 1e-9 && !active.empty()) {
      double part = left / static_cast<double>(active.size());
      for (Work* work : active) part = std::min(part, work->needs - work->had);
      for (Work* work : active) {
        work->had += part;
        served_[work->tenant] += part;
        left -= part;
        used += part;
      }
      const auto done = [](Work* work) { return work->needs - work->had < 1e-9; };
      for (Work* work : active) {
        if (done(work)) work->slices = work->slices_done + 1;
      }
      active.erase(std::remove_if(active.begin(), active.end(), done), active.end());
    }
    clock_.Step(absl::Seconds(used));
    return absl::OkStatus();
  }

  std::mt19937_64 random_;
  VirtualClock clock_;
  FakeBackend backend_;
  const bool overloaded_;
  bool over_ = false;
  SchedulerOptions options_;
  std::vector<double> weights_, served_, sizes_;
  std::vector<int> waiting_;
  std::vector<absl::Duration> longest_;
  absl::Time next_quiet_;
  std::deque<Work> works_;
  std::unique_ptr<Scheduler> scheduler_;  // Last: ends first, and calls back.
};

TEST(FairnessTest, TenantsThatAlwaysHaveWorkShareByWeight) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    const int tenants = 2 + static_cast<int>(seed % 4);
    Life life(seed, tenants, /*overloaded=*/true);
    constexpr double kSeconds = 10;
    life.Run(absl::Seconds(kSeconds));
    double weights = 0;
    for (const double weight : life.weights()) weights += weight;
    for (int t = 0; t < tenants; ++t) {
      const double share = life.weights()[t] / weights;
      // What a tenant may be ahead: its credit at the start, and slices and tasks that do not divide.
      EXPECT_NEAR(life.served(t) / kSeconds, share, 0.03) << "tenant " << t << " of " << tenants;
    }
    if (HasFailure()) return;
  }
}

TEST(FairnessTest, AQuietTenantIsServedAtOnceBesideFloodingOnes) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    const int tenants = 2 + static_cast<int>(seed % 4);
    Life life(seed, tenants, /*overloaded=*/false);
    life.Run(absl::Seconds(10));
    const int quiet = tenants - 1;
    // The longest of its tasks takes 1.5 times the mean. Beside it: the slice under way and, as its size is small
    // beside its credit, the slices in which others go first because they have sat out longest.
    const absl::Duration lone = absl::Seconds(1.5 * life.size(quiet));
    EXPECT_LE(life.longest(quiet), 2 * lone + 2 * kSlice) << "of " << tenants << " tenants";
    EXPECT_GT(life.served(quiet), 0);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace sinkhorn
