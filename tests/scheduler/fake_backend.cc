// A backend without arithmetic; see the header.
#include "tests/scheduler/fake_backend.h"

#include <vector>

namespace sinkhorn {
namespace {

FakeSpec* SpecOf(const Problem& problem) {
  return static_cast<FakeSpec*>(const_cast<void*>(problem.transport.cost.data));
}

class FakeSolve final : public Solve {
 public:
  explicit FakeSolve(FakeSpec* spec) : spec_(spec) { ++spec_->solves; }
  ~FakeSolve() override { --spec_->solves; }

  bool done() const override {
    return spec_->slices_done >= spec_->slices || (spec_->finish_soon && spec_->slices_done > asked_at_);
  }
  void FinishSoon() override {
    spec_->finish_soon = true;
    asked_at_ = spec_->slices_done;
  }
  absl::Status status() const override { return absl::Status(spec_->solve_code, "fake solve"); }
  SolveReport report() const override {
    SolveReport report;
    report.convergence = progress();
    report.family = "fake";
    return report;
  }
  Convergence progress() const override {
    Convergence convergence;
    convergence.iterations = static_cast<int32_t>(spec_->slices_done);
    return convergence;
  }

  FakeSpec* spec() const { return spec_; }

 private:
  FakeSpec* const spec_;
  int64_t asked_at_ = 0;
};

}  // namespace

Problem FakeProblem(FakeSpec* spec) {
  Problem problem;
  problem.kind = ProblemKind::kDense;
  problem.count = spec->count;
  problem.transport.cost.data = spec;
  return problem;
}

int64_t FakeBackend::WorkingBytes(const Problem& problem) const { return SpecOf(problem)->working_bytes; }

double FakeBackend::PredictedSeconds(const Problem& problem) const { return SpecOf(problem)->predicted_seconds; }

absl::StatusOr<std::unique_ptr<Solve>> FakeBackend::Admit(const Problem& problem) {
  FakeSpec* spec = SpecOf(problem);
  if (on_admit) on_admit(spec);
  if (spec->admit_code != absl::StatusCode::kOk) return absl::Status(spec->admit_code, "fake admit");
  return std::make_unique<FakeSolve>(spec);
}

absl::Status FakeBackend::Advance(int lane, absl::Span<Solve* const> solves, double) {
  std::vector<FakeSpec*> specs;
  if (lane < 0 || lane >= lanes_) ++violations_;
  for (Solve* solve : solves) {
    if (solve->done()) ++violations_;
    specs.push_back(static_cast<FakeSolve*>(solve)->spec());
    if (specs.back()->advancing.exchange(true)) ++violations_;
  }
  const absl::Status status = on_advance ? on_advance(lane, specs) : absl::OkStatus();
  for (FakeSpec* spec : specs) {
    if (status.ok()) ++spec->slices_done;
    spec->advancing = false;
  }
  return status;
}

}  // namespace sinkhorn
