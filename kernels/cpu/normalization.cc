// A normalisation as Work: members cut into chunks, solved tier by tier.
//
// Small members are solved one per lane and many per chunk. Larger ones are solved one at a time: whole within a chunk
// where that is short, else kept resident in a window of members that advance pass by pass, their row blocks in
// parallel.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/cpu/buffer.h"
#include "kernels/cpu/normalization_kernels.h"
#include "kernels/cpu/normalization_spec.h"
#include "kernels/cpu/work.h"

namespace sinkhorn {
namespace cpu {
namespace normalization {

void NormalizationTally::Add(const Convergence& c, int64_t members) {
  if (members == 0) return;
  if (count == 0) worst = c;
  count += members;
  worst.iterations = std::max(worst.iterations, c.iterations);
  worst.converged &= c.converged;
  worst.marginal_error_a = std::max(worst.marginal_error_a, c.marginal_error_a);
  worst.marginal_error_b = std::max(worst.marginal_error_b, c.marginal_error_b);
  // The iteration limit is the worst reason, the tolerance the best.
  const auto rank = [](StopReason reason) {
    return reason == StopReason::kMaxIterations ? 2 : reason == StopReason::kPrecision ? 1 : 0;
  };
  if (rank(c.stop_reason) > rank(worst.stop_reason)) worst.stop_reason = c.stop_reason;
}

void NormalizationTally::Merge(const NormalizationTally& other) {
  finite &= other.finite;
  Add(other.worst, other.count);
}

// ---- The solvers' translation units ---------------------------------------------------------------------------------
#define SINKHORN_DECLARE_SOLVER(NAME)                       \
  int64_t NAME##SolverBytes(const NormalizationSpec& spec); \
  MatrixSolver* Make##NAME##Solver(const NormalizationSpec& spec, void* memory, double* plan);
SINKHORN_DECLARE_SOLVER(Float)
SINKHORN_DECLARE_SOLVER(Double)
SINKHORN_DECLARE_SOLVER(Log)
SINKHORN_DECLARE_SOLVER(Exact)
SINKHORN_DECLARE_SOLVER(Implicit)
#undef SINKHORN_DECLARE_SOLVER

int64_t SolverBytes(Kind kind, const NormalizationSpec& spec) {
  switch (kind) {
    case Kind::kFloat:
      return FloatSolverBytes(spec);
    case Kind::kDouble:
      return DoubleSolverBytes(spec);
    case Kind::kDoubleLog:
      return LogSolverBytes(spec);
    case Kind::kExact:
      return ExactSolverBytes(spec);
    case Kind::kImplicit:
      return ImplicitSolverBytes(spec);
  }
  return 0;
}

MatrixSolver* MakeSolver(Kind kind, const NormalizationSpec& spec, void* memory, double* plan) {
  switch (kind) {
    case Kind::kFloat:
      return MakeFloatSolver(spec, memory, plan);
    case Kind::kDouble:
      return MakeDoubleSolver(spec, memory, plan);
    case Kind::kDoubleLog:
      return MakeLogSolver(spec, memory, plan);
    case Kind::kExact:
      return MakeExactSolver(spec, memory, plan);
    case Kind::kImplicit:
      return MakeImplicitSolver(spec, memory, plan);
  }
  return nullptr;
}

bool SolvedInLanes(const NormalizationSpec& spec) {
  constexpr int64_t kLaneElements = 1024;
  return spec.n * spec.m <= kLaneElements;
}

int64_t StageBytes(const NormalizationSpec& spec) {
  // As many lines as a vector of up to 64 bytes has lanes: a line is a whole small matrix, or a part of a larger one's
  // row or column.
  const int64_t line = SolvedInLanes(spec) ? spec.n * spec.m + 16 : std::max(spec.n, spec.m);
  return 64 * ((line + 15) / 16 * 16);
}

namespace {

// ---- Predicted seconds ---------------------------------------------------------------------------------------------
// Nanoseconds on one AVX-512 core, fitted to measurements (65,536 x 4 x 4 ... 1,000 x 1,000).

bool SolvedInDouble(const NormalizationSpec& spec) {
  return SolvesInDouble(spec.problem) || spec.recipe.exact || spec.implicit;
}

// One iteration: a part per element, by the cache that holds K and its neighbours in lanes, and a part per row and
// column.
double IterationNanoseconds(const NormalizationSpec& spec) {
  const double elements = static_cast<double>(spec.n) * static_cast<double>(spec.m);
  const double lines = static_cast<double>(spec.n + spec.m);
  if (IsSquares(spec)) return .03 * elements + .08 * lines;
  if (SolvedInLanes(spec)) return (elements <= 512 ? .05 : .09) * elements + .08 * lines;
  return (elements <= 1e4 ? .05 : elements <= 4e5 ? .08 : .19) * elements + .3 * lines;
}

double ExactNanoseconds(const NormalizationSpec& spec) {
  constexpr double kEvaluations = 15;  // Usual; the limit on iterations is far beyond.
  const double rows = static_cast<double>(spec.rows), cols = static_cast<double>(spec.cols);
  const double factor = (SolvedInLanes(spec) ? .12 : .05) * cols * cols * (rows + cols / 3);
  const double gradients = 40 * .2 * rows * cols;
  return std::min<double>(spec.iterations, kEvaluations) * (25 + rows * cols + std::min(factor, gradients));
}

double MemberSeconds(const NormalizationSpec& spec) {
  const double elements = static_cast<double>(spec.n) * static_cast<double>(spec.m);
  const double iteration = IterationNanoseconds(spec), iterations = spec.iterations;
  double nanoseconds = 2 + .4 * elements;
  if (spec.forward && !spec.recipe.exact) nanoseconds += iterations * iteration;
  if (spec.unrolled) nanoseconds += .5 * elements + 1.5 * iterations * iteration;
  if (spec.implicit) nanoseconds += elements + std::min(static_cast<double>(spec.n + spec.m), 60.0) * iteration;
  if (SolvedInDouble(spec)) nanoseconds *= 2.2;
  if (spec.forward && spec.recipe.exact) nanoseconds += ExactNanoseconds(spec);
  return 1e-9 * nanoseconds;
}

// ---- Groups on their way --------------------------------------------------------------------------------------------
Kind FirstKind(const NormalizationSpec& spec) {
  if (!spec.forward) return Kind::kImplicit;
  if (spec.recipe.exact) return Kind::kExact;
  return SolvedInDouble(spec) ? Kind::kDouble : Kind::kFloat;
}
Kind NextKind(Kind kind) { return kind == Kind::kFloat ? Kind::kDouble : Kind::kDoubleLog; }

// Runs groups of members with one kind of solver and, if the spec wants that, the implicit backward pass from their P.
class GroupRun {
 public:
  // `memory`: Bytes(kind, spec), or null to have its own. The spec outlives this.
  GroupRun(Kind kind, const NormalizationSpec& spec, void* memory) : kind_(kind) {
    if (memory == nullptr) {
      own_memory_.Allocate(Bytes(kind, spec));
      memory = own_memory_.data();
    }
    char* next = static_cast<char*>(memory);
    double* plan = nullptr;
    if (NeedsPlan(kind, spec)) {
      plan = reinterpret_cast<double*>(next);
      next += PlanBytes(spec);
      const int64_t bytes = SolverBytes(kind, spec);
      implicit_.reset(MakeSolver(Kind::kImplicit, spec, next + bytes, plan));
    }
    solver_.reset(MakeSolver(kind, spec, next, plan));
  }
  static int64_t Bytes(Kind kind, const NormalizationSpec& spec) {
    const int64_t backward = NeedsPlan(kind, spec) ? PlanBytes(spec) + SolverBytes(Kind::kImplicit, spec) : 0;
    return SolverBytes(kind, spec) + backward;
  }

  Kind kind() const { return kind_; }
  int64_t capacity() const { return solver_->capacity(); }
  int64_t blocks() const { return now_->blocks(); }
  Convergence progress() const { return now_->progress(); }

  void Begin(const MemberGroup& group) {
    group_ = group;
    now_ = solver_.get();
    now_->Begin(group);
  }
  void RunBlock(int64_t block, void* stage) { now_->RunBlock(block, stage); }
  // True: another pass follows. False: the tally has it all, with the members to be solved again.
  bool EndPass(NormalizationTally* tally) {
    if (now_->EndPass()) return true;
    now_->Report(tally);
    if (now_ == implicit_.get() || implicit_ == nullptr) return false;
    now_ = implicit_.get();
    group_.store = solver_->stored();
    now_->Begin(group_);
    return true;
  }
  void RunToEnd(void* stage, NormalizationTally* tally) {
    do {
      for (int64_t b = 0; b < blocks(); ++b) RunBlock(b, stage);
    } while (EndPass(tally));
  }

 private:
  static bool NeedsPlan(Kind kind, const NormalizationSpec& spec) { return spec.implicit && kind != Kind::kImplicit; }
  static int64_t PlanBytes(const NormalizationSpec& spec) {
    const int64_t members = SolvedInLanes(spec) ? 8 : 1;  // Lanes of float64 in the widest vectors.
    return (members * spec.n * spec.m * 8 + 127) / 128 * 128;
  }

  const Kind kind_;
  MemberGroup group_;
  Buffer<char> own_memory_;
  std::unique_ptr<MatrixSolver> solver_, implicit_;
  MatrixSolver* now_ = nullptr;
};

// ---- Work -----------------------------------------------------------------------------------------------------------
class NormalizationWork : public Work {
 public:
  explicit NormalizationWork(const Problem& problem)
      : problem_(problem), spec_(problem_), member_seconds_(MemberSeconds(spec_)) {}

  absl::Status status() const override {
    if (tally_.finite) return absl::OkStatus();
    return absl::FailedPreconditionError(
        "the result of the normalization is not finite: scale the logits or the cotangent down");
  }
  SolveReport report() const override {
    SolveReport report;
    report.convergence = tally_.worst;
    report.precision = SolvesInDouble(problem_) ? Precision::kDouble : Precision::kStrict;
    report.family = SolvedInLanes(spec_) ? "cpu-registers" : "cpu-on-chip";
    return report;
  }
  Convergence progress() const override { return tally_.worst; }

 protected:
  const Problem problem_;
  const NormalizationSpec spec_;
  const double member_seconds_;
  NormalizationTally tally_;
};

// One phase; a chunk solves some members from beginning to end.
class WholeMembersWork final : public NormalizationWork {
 public:
  explicit WholeMembersWork(const Problem& problem) : NormalizationWork(problem) {
    // Whole groups of lanes, so that a chunk wastes none.
    const int64_t step = SolvedInLanes(spec_) ? 64 : 1;
    const double fitting = std::min(kChunkSeconds / member_seconds_, 1e9);
    per_chunk_ = std::max<int64_t>(static_cast<int64_t>(fitting) / step * step, step);
    tallies_.resize((problem_.count + per_chunk_ - 1) / per_chunk_);
  }
  int64_t chunk_count() const override { return finished_ ? 0 : static_cast<int64_t>(tallies_.size()); }
  double chunk_seconds() const override {
    return member_seconds_ * static_cast<double>(std::min(per_chunk_, problem_.count));
  }
  void RunChunk(int64_t chunk, Scratch* scratch) override {
    const int64_t first = chunk * per_chunk_, count = std::min(per_chunk_, problem_.count - first);
    NormalizationTally tally;  // Apart from the other chunks' until the end.
    SolveMembers(first, count, scratch, &tally);
    tallies_[chunk] = std::move(tally);
  }
  void EndPhase() override {
    for (const NormalizationTally& tally : tallies_) tally_.Merge(tally);
    finished_ = true;
  }

 private:
  static constexpr double kChunkSeconds = 100e-6;

  // With one kind of solver after the other, until each member has found its own.
  void SolveMembers(int64_t first, int64_t count, Scratch* scratch, NormalizationTally* total) const {
    std::vector<int64_t> members(count);
    std::iota(members.begin(), members.end(), first);
    for (Kind kind = FirstKind(spec_); !members.empty(); kind = NextKind(kind)) {
      NormalizationTally tally;
      if (kind == Kind::kFloat && IsSquares(spec_)) {
        SolveSquares(spec_, members.data(), static_cast<int64_t>(members.size()), scratch, &tally);
      } else {
        SolveGroups(kind, members, scratch, &tally);
      }
      total->Merge(tally);
      members = std::move(tally.redo);
    }
  }

  void SolveGroups(Kind kind, const std::vector<int64_t>& members, Scratch* scratch, NormalizationTally* tally) const {
    const int64_t bytes = GroupRun::Bytes(kind, spec_), count = static_cast<int64_t>(members.size());
    char* memory = static_cast<char*>(scratch->Get(static_cast<size_t>(bytes + StageBytes(spec_))));
    GroupRun run(kind, spec_, memory);
    for (int64_t begin = 0; begin < count; begin += run.capacity()) {
      MemberGroup group;
      group.members = members.data() + begin;
      group.count = std::min(run.capacity(), count - begin);
      group.next = begin + group.count < count ? members[begin + group.count] : 0;
      group.next_count = std::min(run.capacity(), count - begin - group.count);
      run.Begin(group);
      run.RunToEnd(memory + bytes, tally);
    }
  }

  int64_t per_chunk_;
  std::vector<NormalizationTally> tallies_;
  bool finished_ = false;
};

// A window of members; a phase is one pass of each, or several where a pass is a single short block.
class ResidentMembersWork final : public NormalizationWork {
 public:
  explicit ResidentMembersWork(const Problem& problem) : NormalizationWork(problem) {
    const double passes = spec_.iterations + 2;
    passes_per_phase_ = std::max<int64_t>(1, static_cast<int64_t>(kPhaseSeconds * passes / member_seconds_));
    Refill();
  }
  // Members that are resident at a time: enough blocks for many threads.
  static int64_t Window(const NormalizationSpec& spec, int64_t count) {
    constexpr int64_t kElements = int64_t{1} << 20;
    return std::min(count, std::max<int64_t>(kElements / (spec.n * spec.m), 1));
  }

  int64_t chunk_count() const override { return static_cast<int64_t>(chunks_.size()); }
  double chunk_seconds() const override {
    return std::min(member_seconds_ / (spec_.iterations + 2) * static_cast<double>(passes_per_phase_), kPhaseSeconds);
  }
  void RunChunk(int64_t chunk, Scratch* scratch) override {
    const auto [resident, block] = chunks_[chunk];
    void* stage = scratch->Get(static_cast<size_t>(StageBytes(spec_)));
    resident->run->RunBlock(block, stage);
    if (resident->run->blocks() > 1) return;
    for (int64_t pass = 1; pass < passes_per_phase_; ++pass) {
      if (!(resident->alive = resident->EndPass(spec_))) return;
      if (resident->run->blocks() > 1) {  // The backward pass may be cut otherwise.
        resident->between_passes = true;
        return;
      }
      resident->run->RunBlock(0, stage);
    }
  }
  void EndPhase() override {
    for (auto& resident : window_) {
      if (!resident->alive || std::exchange(resident->between_passes, false)) continue;
      resident->alive = resident->EndPass(spec_);
    }
    for (auto& resident : window_) {
      if (!resident->alive) tally_.Merge(resident->tally);
    }
    window_.erase(std::remove_if(window_.begin(), window_.end(), [](const auto& resident) { return !resident->alive; }),
                  window_.end());
    Refill();
  }
  Convergence progress() const override { return window_.empty() ? tally_.worst : window_.front()->run->progress(); }

 private:
  static constexpr double kPhaseSeconds = 500e-6;

  struct Resident {
    Resident(const NormalizationSpec& spec, int64_t index) : member(index) { Enter(FirstKind(spec), spec); }
    void Enter(Kind kind, const NormalizationSpec& spec) {
      run.reset();  // Its memory first.
      run = std::make_unique<GroupRun>(kind, spec, nullptr);
      MemberGroup group;
      group.members = &member;
      group.count = 1;
      run->Begin(group);
    }
    // True: another pass follows, maybe of the next kind of solver.
    bool EndPass(const NormalizationSpec& spec) {
      if (run->EndPass(&tally)) return true;
      if (tally.redo.empty()) return false;
      tally.redo.clear();
      Enter(NextKind(run->kind()), spec);
      return true;
    }

    const int64_t member;
    std::unique_ptr<GroupRun> run;
    NormalizationTally tally;
    bool alive = true;
    bool between_passes = false;
  };

  void Refill() {
    const int64_t size = Window(spec_, problem_.count);
    while (static_cast<int64_t>(window_.size()) < size && next_ < problem_.count) {
      window_.push_back(std::make_unique<Resident>(spec_, next_++));
    }
    chunks_.clear();
    for (const auto& resident : window_) {
      for (int64_t b = 0; b < resident->run->blocks(); ++b) chunks_.emplace_back(resident.get(), b);
    }
  }

  int64_t passes_per_phase_;
  int64_t next_ = 0;
  std::vector<std::unique_ptr<Resident>> window_;
  std::vector<std::pair<Resident*, int64_t>> chunks_;
};

// Whether members are solved whole within a chunk. By shape and options alone.
bool SolvedWhole(const NormalizationSpec& spec) {
  constexpr double kLongestMember = 1e-3;
  return SolvedInLanes(spec) || MemberSeconds(spec) <= kLongestMember;
}

// Of one group, with the solver that needs most.
int64_t GroupBytes(const NormalizationSpec& spec) {
  const Kind first = FirstKind(spec);
  return GroupRun::Bytes(first == Kind::kFloat || first == Kind::kDouble ? Kind::kDoubleLog : first, spec);
}

}  // namespace
}  // namespace normalization

std::unique_ptr<Work> MakeNormalizationWork(const Problem& problem) {
  using namespace normalization;
  if (SolvedWhole(NormalizationSpec(problem))) return std::make_unique<WholeMembersWork>(problem);
  return std::make_unique<ResidentMembersWork>(problem);
}

int64_t NormalizationBytes(const Problem& problem) {
  using namespace normalization;
  const NormalizationSpec spec(problem);
  return GroupBytes(spec) * (SolvedWhole(spec) ? 1 : ResidentMembersWork::Window(spec, problem.count));
}

double NormalizationSeconds(const Problem& problem) {
  return normalization::MemberSeconds(NormalizationSpec(problem)) * static_cast<double>(problem.count);
}

}  // namespace cpu
}  // namespace sinkhorn
