// A backend without arithmetic: a problem needs a given number of slices, and tests decide what happens in between.
#ifndef SINKHORN_TESTS_SCHEDULER_FAKE_BACKEND_H_
#define SINKHORN_TESTS_SCHEDULER_FAKE_BACKEND_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "server/scheduler.h"

namespace sinkhorn {

// What one problem does. Outlives it.
struct FakeSpec {
  virtual ~FakeSpec() = default;
  int64_t count = 1;
  int64_t slices = 1;
  int64_t working_bytes = 0;
  double predicted_seconds = 0;
  absl::StatusCode admit_code = absl::StatusCode::kOk;
  absl::StatusCode solve_code = absl::StatusCode::kOk;

  bool finish_soon = false;            // It was asked to.
  int64_t slices_done = 0;             // Written by the lane that advances it.
  std::atomic<int> solves{0};          // Alive now.
  std::atomic<bool> advancing{false};  // Two lanes at once would be a bug.
};

// A problem that FakeBackend understands.
Problem FakeProblem(FakeSpec* spec);

class FakeBackend final : public Backend {
 public:
  explicit FakeBackend(int lanes) : lanes_(lanes) {}

  // Called in Admit before anything else.
  std::function<void(FakeSpec*)> on_admit;
  // Called in Advance before the problems progress; not OK: they do not, and Advance returns it.
  std::function<absl::Status(int lane, absl::Span<FakeSpec* const>)> on_advance;

  DeviceDescription device() const override { return {"fake", "fake", 0}; }
  int lanes() const override { return lanes_; }
  int64_t WorkingBytes(const Problem& problem) const override;
  double PredictedSeconds(const Problem& problem) const override;
  absl::StatusOr<std::unique_ptr<Solve>> Admit(const Problem& problem) override;
  absl::Status Advance(int lane, absl::Span<Solve* const> solves, double slice_seconds) override;

  // Calls that broke the contract of backend.h: a finished or a shared Solve advanced, an unknown lane. Must stay 0.
  int64_t violations() const { return violations_; }

 private:
  const int lanes_;
  std::atomic<int64_t> violations_{0};
};

class VirtualClock final : public Clock {
 public:
  absl::Time Now() override { return now_; }
  void Step(absl::Duration by) { now_ += by; }

 private:
  absl::Time now_ = absl::FromUnixSeconds(1000);
};

}  // namespace sinkhorn

#endif  // SINKHORN_TESTS_SCHEDULER_FAKE_BACKEND_H_
