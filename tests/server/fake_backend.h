// A backend whose answers can be checked at a glance and whose behaviour tests choose: it can hold its problems, fail
// them, or answer what is not a number.
//
//   plan = 2 * logits + 1 (float32), f = 1, g = 2, value = n + m, in every member; other outputs are zero.
#ifndef SINKHORN_TESTS_SERVER_FAKE_BACKEND_H_
#define SINKHORN_TESTS_SERVER_FAKE_BACKEND_H_

#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>

#include "absl/time/clock.h"
#include "kernels/backend.h"

namespace sinkhorn {

class FakeBackend final : public Backend {
 public:
  // While true, no problem finishes.
  std::atomic<bool> hold{false};
  std::atomic<const char*> unsupported{nullptr};  // The field that it says it cannot do.
  std::atomic<bool> anytime{false};               // Problems can be asked to finish soon, and then do, also when held.
  // Status of a finished problem; unset: OK. Set before the first request.
  std::function<absl::Status(const Problem&)> verdict;
  // Status of Admit; unset: OK.
  std::function<absl::Status(const Problem&)> admission;
  // What Advance returns from now on.
  std::atomic<bool> lost{false};
  std::atomic<double> predicted_seconds{1e-6};
  std::atomic<double> value_offset{0};  // Added to `value`: NaN makes the answer diverge.
  std::atomic<int64_t> admitted{0};     // Problems so far.
  std::atomic<int64_t> alive{0};        // Problems now.

  DeviceDescription device() const override { return {"fake device", "fake", 1 << 20}; }
  int lanes() const override { return 1; }
  bool can_finish_soon() const override { return anytime; }
  const char* Unsupported(const Problem&) const override { return unsupported; }
  int64_t WorkingBytes(const Problem&) const override { return 0; }
  double PredictedSeconds(const Problem&) const override { return predicted_seconds; }

  absl::StatusOr<std::unique_ptr<Solve>> Admit(const Problem& problem) override {
    if (admission) {
      if (absl::Status status = admission(problem); !status.ok()) return status;
    }
    ++admitted;
    return std::unique_ptr<Solve>(new FakeSolve(this, problem));
  }

  absl::Status Advance(int, absl::Span<Solve* const> solves, double) override {
    if (lost) return absl::UnavailableError("the fake device fell off the bus");
    if (hold) absl::SleepFor(absl::Milliseconds(1));
    for (Solve* solve : solves) {
      auto* fake = static_cast<FakeSolve*>(solve);
      if (!hold || fake->late) fake->Finish();
    }
    return absl::OkStatus();
  }

 private:
  class FakeSolve final : public Solve {
   public:
    FakeSolve(FakeBackend* backend, const Problem& problem) : backend_(backend), problem_(problem) {
      ++backend_->alive;
    }
    ~FakeSolve() override { --backend_->alive; }

    void Finish() {
      if (backend_->verdict) status_ = backend_->verdict(problem_);
      if (status_.ok()) Write();
      done_ = true;
    }

    bool late = false;
    void FinishSoon() override { late = true; }
    bool done() const override { return done_; }
    absl::Status status() const override { return status_; }
    SolveReport report() const override {
      SolveReport report;
      report.convergence = progress();
      report.family = "fake";
      return report;
    }
    Convergence progress() const override {
      Convergence convergence;
      convergence.iterations = problem_.solver.max_iterations;
      convergence.converged = true;
      convergence.marginal_error_a = 0.25;
      convergence.stop_reason = StopReason::kTolerance;
      if (late) {
        convergence.iterations = 1;
        convergence.converged = false;
        convergence.stop_reason = StopReason::kTimeBudget;
      }
      return convergence;
    }

   private:
    void Write() {
      const Outputs& out = problem_.outputs;
      const int64_t count = problem_.count, n = problem_.n, m = problem_.m;
      if (problem_.normalization.logits) {
        if (out.plan) WritePlan();
      } else {
        Fill(out.plan, count * n * m, 0);
      }
      Fill(out.f, count * n, 1);
      Fill(out.g, count * m, 2);
      Fill(out.row_sums, count * n, 0);
      Fill(out.column_sums, count * m, 0);
      Fill(out.gradient_logits, count * n * m, 0);
      for (int64_t i = 0; i < count; ++i) {
        if (out.value) out.value[i] = n + m + backend_->value_offset;
        if (out.dual_bound) out.dual_bound[i] = -INFINITY;
        if (out.convergence) out.convergence[i] = progress();
      }
    }

    void WritePlan() {
      const TensorView& logits = problem_.normalization.logits;
      const int64_t member = problem_.n * problem_.m;
      for (int64_t i = 0; i < problem_.count * member; ++i) {
        float w;
        std::memcpy(&w, static_cast<const char*>(logits.data) + (logits.shared ? i % member : i) * sizeof(w),
                    sizeof(w));
        w = 2 * w + 1;
        std::memcpy(static_cast<char*>(problem_.outputs.plan.data) + i * sizeof(w), &w, sizeof(w));
      }
    }

    static void Fill(const OutputView& view, int64_t elements, float value) {
      if (!view) return;
      for (int64_t i = 0; i < elements; ++i)
        std::memcpy(static_cast<char*>(view.data) + i * sizeof(value), &value, sizeof(value));
    }

    FakeBackend* const backend_;
    const Problem problem_;
    bool done_ = false;
    absl::Status status_;
  };
};

}  // namespace sinkhorn

#endif  // SINKHORN_TESTS_SERVER_FAKE_BACKEND_H_
