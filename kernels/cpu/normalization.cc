// A normalisation as Work: members cut into chunks, solved tier by tier.
//
// Small members are solved one per lane and many per chunk. Larger ones are solved one at a time: whole within a chunk where
// that is short, else kept resident in a window of members that advance pass by pass, their row blocks in parallel.
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

int64_t StageBytes(const NormalizationSpec& spec) {
  // Lines of a block of rows, as many as a vector of up to 64 bytes has lanes.
  return 64 * ((std::max(spec.n, spec.m) + 15) / 16 * 16);
}

namespace {

// ---- Cost model: seconds of one member on one AVX-512 core (measured; see NormalizationSeconds in work.h) ------------------
struct Cost {
  double element;            // Of an element: loading, exponentials, storing.
  double element_iteration;  // Of an element in an iteration.
};

bool SolvedInDouble(const NormalizationSpec& spec) {
  return spec.problem.solver.precision == Precision::kDouble || spec.recipe.exact || spec.implicit;
}
bool SolvedInLanes(const NormalizationSpec& spec) { return spec.n * spec.m <= kLaneElements; }
Tier FirstTier(const NormalizationSpec& spec) { return SolvedInDouble(spec) ? Tier::kDouble : Tier::kFloat; }

double MemberSeconds(const NormalizationSpec& spec) {
  const double elements = static_cast<double>(spec.n) * static_cast<double>(spec.m);
  const double lines = static_cast<double>(spec.n + spec.m);
  const bool lanes = SolvedInLanes(spec);
  double nanoseconds = 20 + elements * (lanes ? .5 : .6);
  const double iteration = lanes ? .045 * elements + .06 * lines : .05 * elements + .3 * lines;
  if (spec.forward) nanoseconds += spec.iterations * iteration * (spec.recipe.exact ? 10 : 1);
  if (spec.unrolled) nanoseconds += elements + 2.2 * spec.iterations * iteration;
  if (spec.implicit) nanoseconds += elements + std::min(lines, 60.0) * iteration;
  return 1e-9 * nanoseconds * (SolvedInDouble(spec) ? 2.2 : 1);
}

// ---- One larger member on its way -------------------------------------------------------------------------------------------
// Forward by tiers until one holds it, then backward from P.
class MemberRun {
 public:
  // `memory`: FirstBytes(spec), or null to have its own.
  MemberRun(const NormalizationSpec& spec, void* memory) : spec_(spec), first_memory_(memory) {
    if (spec.forward && spec.implicit) plan_.Allocate(spec.n * spec.m);
  }
  static int64_t FirstBytes(const NormalizationSpec& spec) {
    return !spec.forward                         ? ImplicitBytes(spec)
           : FirstTier(spec) == Tier::kFloat ? FloatForwardBytes(spec)
                                                : DoubleForwardBytes(FirstTier(spec), spec);
  }

  void Begin(int64_t member, int64_t next) {
    member_ = member;
    next_ = next;
    Enter(FirstTier(spec_), !spec_.forward);
  }
  int64_t blocks() const { return solver_->blocks(); }
  Convergence progress() const { return solver_->progress(); }
  void RunBlock(int64_t block, void* stage) { solver_->RunBlock(block, stage); }
  // True: goes on.
  bool EndPass(NormalizationTally* tally) {
    if (solver_->EndPass()) return true;
    NormalizationTally result;
    solver_->Report(&result);
    tally->Merge(result);
    if (!result.redo.empty()) {
      Enter(tier_ == Tier::kFloat ? Tier::kDouble : Tier::kDoubleLog, false);
    } else if (spec_.forward && spec_.implicit && !backward_) {
      Enter(tier_, true);
    } else {
      return false;
    }
    return true;
  }

 private:
  void Enter(Tier tier, bool backward) {
    if (solver_ == nullptr || tier != tier_ || backward != backward_) {
      tier_ = tier;
      backward_ = backward;
      Make();
    }
    solver_->BeginMember(member_, next_);
  }

  void Make() {
    solver_.reset();
    const bool first = tier_ == FirstTier(spec_) && backward_ == !spec_.forward;
    const int64_t bytes = first                    ? FirstBytes(spec_)
                          : backward_              ? ImplicitBytes(spec_)
                          : tier_ == Tier::kFloat ? FloatForwardBytes(spec_)
                                                   : DoubleForwardBytes(tier_, spec_);
    void* memory = first_memory_;
    if (!first || memory == nullptr) {
      if (memory_.size() < bytes) memory_.Allocate(bytes);
      memory = memory_.data();
    }
    double* plan = spec_.forward && spec_.implicit ? plan_.data() : nullptr;
    solver_.reset(backward_                ? MakeImplicit(spec_, memory, plan)
                  : tier_ == Tier::kFloat ? MakeFloatForward(spec_, memory)
                                           : MakeDoubleForward(tier_, spec_, memory, plan));
  }

  const NormalizationSpec& spec_;
  void* const first_memory_;
  int64_t member_ = 0, next_ = -1;
  Tier tier_ = Tier::kFloat;
  bool backward_ = false;
  Buffer<char> memory_;
  Buffer<double> plan_;
  std::unique_ptr<MatrixSolver> solver_;
};

// ---- Work ---------------------------------------------------------------------------------------------------------------------
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
    report.precision = problem_.solver.precision == Precision::kDouble ? Precision::kDouble : Precision::kStrict;
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
    if (SolvedInLanes(spec_)) {
      SolveLanes(first, count, scratch, &tally);
    } else {
      SolveSingly(first, count, scratch, &tally);
    }
    tallies_[chunk] = std::move(tally);
  }
  void EndPhase() override {
    for (const NormalizationTally& tally : tallies_) tally_.Merge(tally);
    finished_ = true;
  }

 private:
  static constexpr double kChunkSeconds = 100e-6;

  void SolveLanes(int64_t first, int64_t count, Scratch* scratch, NormalizationTally* total) const {
    std::vector<int64_t> members(count);
    std::iota(members.begin(), members.end(), first);
    Tier tier = FirstTier(spec_);
    while (!members.empty()) {
      NormalizationTally tally;
      const int64_t size = static_cast<int64_t>(members.size());
      if (tier == Tier::kFloat) {
        FloatLanes(spec_, members.data(), size, scratch, &tally);
        tier = Tier::kDouble;
      } else {
        DoubleLanes(tier, spec_, members.data(), size, scratch, &tally);
        tier = Tier::kDoubleLog;
      }
      total->Merge(tally);
      members = std::move(tally.redo);
    }
  }

  void SolveSingly(int64_t first, int64_t count, Scratch* scratch, NormalizationTally* total) const {
    const int64_t memory = MemberRun::FirstBytes(spec_);
    char* block = static_cast<char*>(scratch->Get(static_cast<size_t>(memory + StageBytes(spec_))));
    MemberRun run(spec_, block);
    for (int64_t member = first; member < first + count; ++member) {
      run.Begin(member, member + 1 < first + count ? member + 1 : -1);
      do {
        for (int64_t b = 0; b < run.blocks(); ++b) run.RunBlock(b, block + memory);
      } while (run.EndPass(total));
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
    const auto [run, block] = chunks_[chunk];
    void* stage = scratch->Get(static_cast<size_t>(StageBytes(spec_)));
    run->member.RunBlock(block, stage);
    if (run->member.blocks() > 1) return;
    for (int64_t pass = 1; pass < passes_per_phase_; ++pass) {
      if (!(run->alive = run->member.EndPass(&run->tally))) return;
      if (run->member.blocks() > 1) {  // The backward pass may be cut otherwise.
        run->between_passes = true;
        return;
      }
      run->member.RunBlock(0, stage);
    }
  }
  void EndPhase() override {
    for (auto& run : window_) {
      if (!run->alive || std::exchange(run->between_passes, false)) continue;
      run->alive = run->member.EndPass(&run->tally);
    }
    for (auto& run : window_) {
      if (!run->alive) tally_.Merge(run->tally);
    }
    window_.erase(std::remove_if(window_.begin(), window_.end(), [](const auto& run) { return !run->alive; }),
                  window_.end());
    Refill();
  }
  Convergence progress() const override { return window_.empty() ? tally_.worst : window_.front()->member.progress(); }

 private:
  static constexpr double kPhaseSeconds = 500e-6;

  struct Run {
    Run(const NormalizationSpec& spec, int64_t index) : member(spec, nullptr) { member.Begin(index, -1); }
    MemberRun member;
    NormalizationTally tally;
    bool alive = true;
    bool between_passes = false;
  };

  void Refill() {
    const int64_t size = Window(spec_, problem_.count);
    while (static_cast<int64_t>(window_.size()) < size && next_ < problem_.count) {
      window_.push_back(std::make_unique<Run>(spec_, next_++));
    }
    chunks_.clear();
    for (const auto& run : window_) {
      for (int64_t b = 0; b < run->member.blocks(); ++b) chunks_.emplace_back(run.get(), b);
    }
  }

  int64_t passes_per_phase_;
  int64_t next_ = 0;
  std::vector<std::unique_ptr<Run>> window_;
  std::vector<std::pair<Run*, int64_t>> chunks_;
};

// Whether members are solved whole within a chunk. By shape and options alone.
bool SolvedWhole(const NormalizationSpec& spec) {
  constexpr double kLongestMember = 3e-3;
  return SolvedInLanes(spec) || MemberSeconds(spec) <= kLongestMember;
}

int64_t MemberBytes(const NormalizationSpec& spec) {
  int64_t bytes = 0;
  if (spec.forward) {
    bytes = DoubleForwardBytes(spec.recipe.exact ? Tier::kDouble : Tier::kDoubleLog, spec);  // The largest tier.
    if (spec.implicit) bytes = std::max(bytes, ImplicitBytes(spec)) + spec.n * spec.m * 8;
  } else {
    bytes = ImplicitBytes(spec);
  }
  return bytes;
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
  if (SolvedInLanes(spec)) return 16 * MemberBytes(spec);  // A group of lanes, on the thread that solves it.
  return MemberBytes(spec) * (SolvedWhole(spec) ? 1 : ResidentMembersWork::Window(spec, problem.count));
}

double NormalizationSeconds(const Problem& problem) {
  return normalization::MemberSeconds(NormalizationSpec(problem)) * static_cast<double>(problem.count);
}

}  // namespace cpu
}  // namespace sinkhorn
