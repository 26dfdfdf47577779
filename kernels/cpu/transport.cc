// Dense and point-cloud transport on the CPU: members of a request, their engines, and the outputs made from the
// solution.
//
// A member goes through engines (its own problem; debiased also OT(a, a) and OT(b, b)), then passes over the plan for
// what needs one, then stores. Small members run from end to end in one chunk each, unless there is nothing else to do;
// large ones offer their engine's chunks.
#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/anytime_work.h"
#include "kernels/cpu/half.h"
#include "kernels/cpu/transport_member.h"
#include "kernels/cpu/work.h"

namespace sinkhorn::cpu {
namespace {

constexpr int64_t kSmallPairs = 131072;     // A member this small is one chunk.
constexpr double kSplitSeconds = 150e-6;    // A phase this short is not worth two threads: they share its densities.
constexpr double kSurveySeconds = 1.5e-10;  // Of a cost.
constexpr double kLoadSeconds = 1e-9;       // Of a coordinate.
constexpr double kSerialSeconds = 2e-3;     // How long such a chunk may run before it yields.
constexpr double kOwnCacheBytes = 1.5e6;    // Of densities, in a core's own cache.
constexpr double kCachedBytes = 256e6;      // Of densities that are kept rather than made in each iteration.
constexpr double kFloatExponentMax = 400;   // Cost over epsilon up to which float32 exponents serve STRICT.

// Of making all densities, on one thread.
double TransportMakeSeconds(const Problem& problem) {
  const double pairs = static_cast<double>(problem.n) * problem.m;
  const double width = SolvesInDouble(problem) ? 3 : 1;
  const double root = problem.transport.point_cost == PointCost::kEuclidean ? 2 : 1;
  return pairs * width * root * DensitySeconds(problem.dim);
}

class TransportWork final : public AnytimeWork {
 public:
  TransportWork(const Problem& problem, int64_t kernel_cache_bytes)
      : problem_(problem),
        small_(problem.n * problem.m <= kSmallPairs),
        whole_(small_),
        members_(problem.count),
        inputs_(problem.count),
        part_count_(MemberInputs::PartCount(problem)) {
    const int64_t member_bytes = problem.n * RoundUp(problem.m, kColumnPad) * (SolvesInDouble(problem) ? 8 : 4);
    cache_bytes_ = member_bytes <= kernel_cache_bytes ? member_bytes * 2 : 0;
    // Large members are resident a few at a time, so that the budget holds for the request.
    window_ = small_ ? problem.count : std::max<int64_t>(1, std::min<int64_t>(64, kernel_cache_bytes / member_bytes));
    Refill();
  }

  int64_t chunk_count() const override { return chunks_; }
  double chunk_seconds() const override { return chunk_seconds_; }
  void SetAlone(bool alone) override {
    alone_ = alone;
    if (small_ && problem_.count == 1) Refill();
  }

  bool WillSplit() const override { return !whole_ && chunks_ > 0; }

  void FinishSoon() override {
    finish_soon_ = true;
    for (const auto& member : members_) {
      if (member != nullptr) member->FinishSoon();
    }
  }

  void RunChunk(int64_t chunk, Scratch* scratch) override {
    const auto unit = std::upper_bound(units_.begin(), units_.end(), chunk,
                                       [](int64_t c, const Unit& u) { return c < u.first_chunk; }) -
                      1;
    auto& member = members_[unit->member];
    if (!whole_) {
      switch (unit->stage) {
        case Stage::kSurvey:
          return inputs_[unit->member]->SurveyPart(chunk - unit->first_chunk);
        case Stage::kMake:
          return Make(unit->member);
        case Stage::kRun:
          return member->RunChunk(chunk - unit->first_chunk, scratch);
      }
    }
    if (member == nullptr) {
      auto& inputs = inputs_[unit->member];
      if (unit->stage == Stage::kSurvey) inputs = std::make_unique<MemberInputs>(problem_, unit->member);
      for (int64_t part = 0; unit->stage == Stage::kSurvey && part < part_count_; ++part) inputs->SurveyPart(part);
      Make(unit->member);
    }
    for (double left = kSerialSeconds; left > 0 && member->chunk_count() > 0;) {
      const int64_t count = member->chunk_count();
      left -= count * member->chunk_seconds();
      for (int64_t c = 0; c < count; ++c) member->RunChunk(c, scratch);
      member->EndPhase();
    }
  }

  void EndPhase() override {
    std::vector<Unit> units;
    units.swap(units_);
    for (const Unit& unit : units) {
      auto& member = members_[unit.member];
      if (!whole_ && unit.stage == Stage::kRun) member->EndPhase();
      if (member == nullptr || member->chunk_count() > 0) {
        units_.push_back({unit.member, 0, member == nullptr ? Stage::kMake : Stage::kRun});
        continue;
      }
      Absorb(unit.member, *member);
      member.reset();
    }
    Refill();
  }

  absl::Status status() const override { return status_; }
  SolveReport report() const override { return report_; }
  Convergence progress() const override {
    for (const Unit& unit : units_) {
      if (members_[unit.member] != nullptr && !whole_) return members_[unit.member]->progress();
    }
    return report_.convergence;
  }

 private:
  enum class Stage { kSurvey, kMake, kRun };
  struct Unit {
    int64_t member;
    int64_t first_chunk;
    Stage stage;  // Where its next phase begins; whole members go on to their end.
  };

  void Make(int64_t index) {
    auto& inputs = inputs_[index];
    if (inputs == nullptr) inputs = std::make_unique<MemberInputs>(problem_, index);
    inputs->Load();
    members_[index] = MakeTransportMember(std::move(inputs), cache_bytes_);
    if (finish_soon_) members_[index]->FinishSoon();
  }

  // Lets members in and lays out the next phase.
  void Refill() {
    while (next_member_ < problem_.count && static_cast<int64_t>(units_.size()) < window_) {
      units_.push_back({next_member_++, 0, part_count_ > 0 ? Stage::kSurvey : Stage::kMake});
    }
    whole_ = small_ && !WorthSplitting();
    chunks_ = 0;
    double seconds = 0;
    for (Unit& unit : units_) {
      unit.first_chunk = chunks_;
      const auto& member = members_[unit.member];
      if (whole_) {
        ++chunks_;
        seconds += std::min(kSerialSeconds, TransportSeconds(problem_) / problem_.count);
      } else if (unit.stage == Stage::kSurvey) {
        inputs_[unit.member] = std::make_unique<MemberInputs>(problem_, unit.member);
        chunks_ += part_count_;
        seconds += kSurveySeconds * problem_.n * problem_.m;
      } else if (unit.stage == Stage::kMake) {
        ++chunks_;
        seconds += kLoadSeconds * (problem_.n + problem_.m) * (problem_.dim + 4);
      } else {
        chunks_ += member->chunk_count();
        seconds += member->chunk_count() * member->chunk_seconds();
      }
    }
    chunk_seconds_ = chunks_ > 0 ? seconds / chunks_ : 0;
  }

  // A small member alone: the coming phase is long enough for several threads.
  bool WorthSplitting() const {
    if (!alone_ || problem_.count > 1 || units_.empty()) return false;
    const auto& member = members_[0];
    return (member == nullptr ? TransportMakeSeconds(problem_) : member->chunk_count() * member->chunk_seconds()) >
           kSplitSeconds;
  }

  void Absorb(int64_t index, const TransportMember& member) {
    const Convergence& c = member.progress();
    if (problem_.outputs.convergence != nullptr) problem_.outputs.convergence[index] = c;
    Convergence& worst = report_.convergence;
    if (absorbed_++ == 0) {
      worst = c;
    } else {
      if (!c.converged && worst.stop_reason != StopReason::kTimeBudget) worst.stop_reason = c.stop_reason;
      worst.converged = worst.converged && c.converged;
      worst.iterations = std::max(worst.iterations, c.iterations);
      worst.marginal_error_a = std::max(worst.marginal_error_a, c.marginal_error_a);
      worst.marginal_error_b = std::max(worst.marginal_error_b, c.marginal_error_b);
    }
    report_.precision = SolvesInDouble(problem_) ? Precision::kDouble : Precision::kStrict;
    report_.family = problem_.kind == ProblemKind::kDense ? "cpu-dense" : "cpu-point-cloud";
    if (status_.ok() && !member.status().ok()) {
      status_ = problem_.count == 1 ? member.status()
                                    : absl::Status(member.status().code(),
                                                   absl::StrCat("member ", index, ": ", member.status().message()));
    }
  }

  const Problem problem_;
  const bool small_;
  bool alone_ = false;
  bool finish_soon_ = false;
  bool whole_;  // Chunks run members from end to end.
  int64_t cache_bytes_ = 0, window_ = 1, next_member_ = 0, absorbed_ = 0;
  std::vector<std::unique_ptr<TransportMember>> members_;
  std::vector<std::unique_ptr<MemberInputs>> inputs_;  // Until the member is made.
  const int64_t part_count_;
  std::vector<Unit> units_;
  int64_t chunks_ = 0;
  double chunk_seconds_ = 0;
  absl::Status status_;
  SolveReport report_;
};

}  // namespace

std::unique_ptr<TransportMember> MakeTransportMember(std::unique_ptr<MemberInputs> inputs, int64_t cache_bytes) {
  const Problem& problem = inputs->problem;
  const int64_t index = inputs->index;
  if (SolvesInDouble(problem)) {
    return MakeTypedMember<double, double>(problem, index, cache_bytes, std::move(inputs));
  }
  // A float32 exponent of size E is off by about 1e-8 E: it must not spoil the potentials, nor a certificate that is
  // asked for.
  const double exponent = inputs->cost_max / problem.solver.epsilon;
  if (exponent > kFloatExponentMax || (problem.solver.tolerance > 0 && 2e-8 * exponent > problem.solver.tolerance)) {
    return MakeTypedMember<double, float>(problem, index, cache_bytes, std::move(inputs));
  }
  return MakeTypedMember<float, float>(problem, index, cache_bytes, std::move(inputs));
}

std::unique_ptr<Work> MakeTransportWork(const Problem& problem, int64_t kernel_cache_bytes) {
  return std::make_unique<TransportWork>(problem, kernel_cache_bytes);
}

int64_t TransportBytes(const Problem& problem, int64_t kernel_cache_bytes) {
  const int64_t width = SolvesInDouble(problem) ? 8 : 4;
  const int64_t pairs = problem.n * RoundUp(problem.m, kColumnPad);
  const int64_t cache = pairs * width <= kernel_cache_bytes ? pairs * width : 0;
  const int64_t points = (problem.n + problem.m) * (3 * problem.dim + 20) * 8;
  const int64_t accumulators = std::min<int64_t>(64, pairs / 65536 + 1) * problem.m * width;
  const int64_t extrapolation = problem.solver.tolerance > 0 && problem.solver.over_relaxation ? problem.m * 22 * 8 : 0;
  // Hessian-vector products: of each direction, its steps in both types, vectors of the gradients, accumulators.
  const HessianInputs& hessian = problem.transport.hessian;
  const int64_t slots =
      std::max<int64_t>(1, std::min<int64_t>(64, (int64_t{1} << 24) / (hessian.count + 1) / problem.m));
  const int64_t products = hessian.count == 0
                               ? 0
                               : hessian.count * (problem.n + problem.m) * (5 * problem.dim + 12) * 8 +
                                     slots * (hessian.count + 1) * problem.m * width + pairs * (cache > 0 ? width : 0);
  const int64_t entries = problem.outputs.sparse_plan.max_entries * (width + 4) * 2;  // Of vectors that grow.
  const int64_t member =
      entries + cache + points * (problem.solver.debias ? 3 : 1) + accumulators + extrapolation + products;
  const int64_t resident =
      problem.n * problem.m <= kSmallPairs
          ? problem.count
          : std::min<int64_t>({problem.count, 64, std::max<int64_t>(1, kernel_cache_bytes / (pairs * width))});
  return member * resident;
}

double TransportSeconds(const Problem& problem) {
  const Outputs& out = problem.outputs;
  const bool is_double = SolvesInDouble(problem);
  const double pairs = static_cast<double>(problem.n) * problem.m;
  const double bytes = pairs * (is_double ? 8 : 4), make = TransportMakeSeconds(problem);
  const double read = bytes <= kOwnCacheBytes ? (is_double ? 0.115e-9 : 0.07e-9) : (is_double ? 0.37e-9 : 0.14e-9);
  const double iteration = 0.35e-6 + (bytes <= kCachedBytes ? pairs * read : make);
  // Passes over the plan: the first two make it in this arithmetic, the bound's four in float64.
  const bool rows = out.plan || out.sparse_plan.max_entries > 0 || out.gradient_cost || out.plan_v || out.gradient_x ||
                    out.projection_x || out.value_linear != nullptr;
  const bool columns = out.plan_transpose_u || out.gradient_y || out.projection_y;
  const double passes = rows + columns + (out.primal_bound == nullptr ? 0 : is_double ? 4 : 12);
  // An upper end, as for a tolerance: sweeps of the conjugate gradients, and five that make bent plans.
  const HessianInputs& hessian = problem.transport.hessian;
  const double sweeps = hessian.max_iterations * (1 + hessian.neumann_terms) *
                        ((bytes <= kCachedBytes ? pairs * read : make) + hessian.count * pairs * read);
  const double products =
      hessian.count == 0 ? 0 : (problem.solver.debias ? 3 : 1) * (sweeps + 5 * hessian.count * 3 * make);
  const double solve = 6e-6 + 2 * make + (problem.solver.max_iterations + 1) * iteration;
  return problem.count * ((problem.solver.debias ? 3 : 1) * solve + passes * make + products);
}

}  // namespace sinkhorn::cpu
