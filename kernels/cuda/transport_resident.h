// A resident transport problem: what is known of it between slices.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_RESIDENT_H_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_RESIDENT_H_

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/family.h"
#include "kernels/cuda/transport_hessian.h"
#include "kernels/cuda/transport_job.h"
#include "kernels/cuda/transport_launch.h"

namespace sinkhorn {
namespace cuda {

// Tolerances: a slice may not enqueue more than this part of the iterations done so far, since most may be idle.
constexpr int kFirstIterations = 8;
// Frames: iterations before they are held, until when they are renewed too soon; of a launch, with those after it.
constexpr int kHeldFramesLeast = 8, kHeldFramesMost = 64;
constexpr int kFirstPairs = 12;  // Of sweeps of Hessian-vector products.

// kHold: members that are held take turns, and some are left. kProducts: Hessian-vector products; all else is there.
enum class Stage { kPrepare, kHold, kIterate, kFinish, kProducts, kDone };

class TransportResident final : public Resident {
 public:
  TransportResident(const Problem& problem, void* workspace)
      : job_(JobOf(problem, {HasHopperKernels(), HasWideClusters(), HasHeldKernels()})) {
    job_.workspace = static_cast<char*>(workspace);
    report_.family = job_.dense ? "dense" : "point-cloud";
    report_.precision = job_.precision;
    // Only products are rounded.
    if (job_.precision == Precision::kFast && PlanesOf(job_) == 2) report_.precision = Precision::kStrict;
    passes_ = int64_t{job_.solver.max_iterations} + (job_.starting || job_.engines > 1 ? 1 : 0);
  }

  bool done() const override { return stage_ == Stage::kDone; }
  absl::Status status() const override { return status_; }
  SolveReport report() const override { return report_; }
  Convergence progress() const override { return report_.convergence; }

  void FinishSoon() override {
    if (stage_ == Stage::kHold) {  // Members that are left have done an iteration, and have no terms.
      EndHopes();
      swept_ = false;
    }
    if (stage_ != Stage::kPrepare && stage_ != Stage::kIterate) return;
    job_.finish_soon = true;
    turned_ = 0;
    const bool started = launched_ > 0 || !(job_.starting || job_.engines > 1);
    passes_ = std::min(passes_, launched_ + (started ? 1 : 2));
  }

  void BeginSlice(double slice_seconds) {
    ++slices_;
    loops_apart_ = false;
    job_.odd_before = launched_ % 2 == 1;
    job_.turn_first = turned_;
    job_.turn_members = std::min(job_.count - turned_, TurnMembers(job_, slice_seconds));
  }
  // Of those that take turns, the first: it has had fewer slices, or waited for more.
  bool ComesBefore(const TransportResident& other) const {
    return slices_ != other.slices_ ? slices_ < other.slices_ : waited_ > other.waited_;
  }
  void Wait() { ++waited_; }
  // Whether the slice that comes has launches of it that take a whole device.
  bool TakesDevice() const {
    if (stage_ == Stage::kPrepare) return HoldsAll(job_) || (job_.engines == 1 && job_.looped);
    if (stage_ == Stage::kHold) return true;
    if (stage_ != Stage::kIterate) return false;
    if (HoldsFrames(job_) && Has(kMixed)) return true;
    return job_.looped || (job_.looped_beside && crossing_) || (job_.held && !HoldsAll(job_) && !beside_) ||
           LeavesApart();
  }
  const Job& job() const { return job_; }
  Stage stage() const { return stage_; }
  bool Has(Mode mode) const { return (modes_ & (1 << mode)) != 0; }
  int64_t passes_left() const { return passes_ - launched_; }
  // Iterations that may be enqueued before the host looks again.
  int64_t Allowance() const {
    if (job_.solver.tolerance == 0) return passes_left();
    const int64_t first = IsOnChipAlone() ? kOnChipChunk : kFirstIterations;
    return std::min(passes_left(), std::max<int64_t>(first, launched_ / 2));
  }
  void CountPasses(int64_t count) { launched_ = std::min(passes_, launched_ + count); }
  // Engines in float32 are solved by the on-chip kernel; those of a mode; all that there are.
  bool OnChip() const { return OnChipTiles(job_) > 0; }
  bool OnChip(Mode mode) const { return GeometryOf(job_, mode) == Geometry::kOnChip; }
  bool IsOnChipAlone() const { return OnChip() && (!Has(kMixed) || OnChip(kMixed)); }
  // Whether engines that are solved there lack their exact exponents; MakeExact: those are enqueued.
  bool LacksExact() const { return !has_exact_ && Has(kMixed) && OnChip(kMixed); }
  void MakeExact() { has_exact_ = true; }
  // Whether engines in float32 are streamed from now on. KeepExponents: clouds, whose exponents are enqueued.
  bool Streams() const { return job_.streamed && (job_.dense || kept_); }
  // `done`: passes enqueued that are not counted yet. Potentials that symmetric updates begin with are twice what they
  // should be, which is no frame: one iteration more.
  bool MayKeepExponents(int64_t done) const { return job_.streamed && !Streams() && launched_ + done >= FirstPasses(); }
  int64_t FirstPasses() const { return job_.symmetric || job_.engines > 1 ? 2 : 1; }
  void KeepExponents() { kept_ = true; }
  // Whether the columns' half step that comes leaves densities; KeepFirst: it is enqueued.
  bool MayKeepFirst() const { return KeepsFirstDensities(job_) && !kept_first_; }
  void KeepFirst() { kept_first_ = true; }
  // The same for engines in kMixed; frames are renewed after 1, 2, 4, 8 ... iterations: later ones move potentials
  // less.
  bool StreamsFrames() const { return framed_; }
  bool WantsFrames() const {
    const bool mixed = job_.framed && Has(kMixed) && turned_ == 0;
    return mixed && launched_ > 0 && (launched_ & (launched_ - 1)) == 0;
  }
  void RenewFrames() {
    framed_ = true;
    swept_ = false;  // Columns' terms are of the frame before.
  }
  // Iterations of members in kMixed that are held before the one that comes: all but the last one or two of those
  // before frames are renewed, an even number, by which sweeps turn round as they would. By what has been enqueued
  // alone, since how many a launch makes is seen in the last digits. HoldFrames: they are enqueued, for the turn's
  // members; whether for all.
  int FramesToHold() const {
    const bool held = HoldsFrames(job_) && framed_ && Has(kMixed) && !lags_;
    if (!held || launched_ < kHeldFramesLeast || passes_left() == 0) return 0;
    int64_t renewed = kHeldFramesLeast;
    while (renewed <= launched_) renewed *= 2;
    const int64_t most = std::min({renewed - launched_, passes_left(), int64_t{kHeldFramesMost}});
    return most < kHeldFramesLeast ? 0 : static_cast<int>((most - 1) / 2 * 2);
  }
  bool HoldFrames() {
    const int count = FramesToHold();
    frames_held_ = true;
    EndTurn();
    if (turned_ == 0) CountPasses(count);
    return turned_ == 0;
  }
  // Whether iterations may have been enqueued that some members have not made.
  bool MayLag() const { return frames_held_; }
  // Whether the next iterations are made on the chip of a whole device, `done`: see MayKeepExponents; Hold: those are
  // enqueued.
  bool MayHold(int64_t done) const { return HoldsAll(job_) && Streams() && launched_ + done >= FirstPasses(); }
  void Hold() {
    swept_ = true;
    measures_ = HeldMeasures(job_) && !job_.finish_soon;
    EndTurn();
  }
  // Whether members are left to be.
  bool HoldsOn() const { return HoldsAll(job_) && turned_ > 0 && stage_ != Stage::kIterate; }
  // Whether those of engine 0 are, before the others are swept; HoldBeside: the turn's are enqueued.
  bool MayHoldBeside() const { return job_.held && !HoldsAll(job_) && Streams() && !beside_ && !job_.finish_soon; }
  void HoldBeside() {
    swept_ = true;
    EndTurn();
    beside_ = turned_ == 0;
  }
  // Whether they are made in launches of many, before the others go on, or beside their launches.
  bool MayLoopBeside(int64_t done) const {
    const int64_t before = job_.loops_symmetric ? 1 : FirstPasses();
    return job_.looped_beside && crossing_ && (Streams() || LoopsPoints(job_)) &&
           (loops_beside_ || launched_ + done >= before);
  }
  void LoopBeside() {
    swept_ = loops_beside_ = true;
    EndTurn();
  }
  // Whether engines that are apart still iterate, as far as is known, and others; whether the former may now: engine 0
  // from cold, at an epsilon that may be too small for that, after a pass.
  bool LeavesApart() const { return job_.loops_symmetric && apart_; }
  bool LeavesOthers() const { return others_; }
  bool MayLoopApart(int64_t done) const {
    return LeavesApart() && !loops_apart_ &&
           launched_ + done >= (job_.symmetric && job_.starting && !Anneals() ? 1 : 0);
  }
  void LoopApart() {
    loops_apart_ = true;
    EndTurn();
  }
  bool LoopsApart() const { return loops_apart_; }  // In this slice.
  // Whether a lone engine's next iterations are made in launches of many; Loop: those are enqueued.
  bool MayLoop(int64_t done) const {
    return job_.looped && (Streams() || LoopsPoints(job_) || LoopsClouds(job_)) && launched_ + done >= 1;
  }
  void Loop() { looping_ = swept_ = true; }
  // So many launches of the turn's members: of all of them once the last have had theirs.
  void CountLoops(int64_t launches, int chunk) {
    EndTurn();
    if (turned_ > 0) return;
    looped_ = true;
    CountPasses(launches * chunk);
  }
  // Whether the launch that makes its last iterations measures it as well.
  bool IsMeasured() const { return looping_ || measures_; }
  bool HasKeptGradient(Mode mode) const {
    return Has(mode) && (mode == kFloat ? kept_ : framed_) && cuda::HasKeptGradient(job_, mode);
  }
  // Whether the columns' terms are those of their potentials at this epsilon, as a sweep has left them where residuals
  // decide nothing.
  bool HasTerms() const { return swept_ && job_.solver.tolerance == 0 && !Anneals(); }
  bool Anneals() const { return job_.solver.epsilon_decay != 0; }
  void Sweep() { swept_ = true; }
  // Before the data are known: that all engines need float32 only, and that this slice finishes them.
  void Hope() {
    hoped_modes_ = modes_ = 1 << (job_.precision == Precision::kDouble ? kDouble : kFloat);
    hopeful_ = true;
  }
  // All passes are enqueued, or all engines have stopped.
  void EndIterations() { stage_ = Stage::kFinish; }
  void ExpectReport(const JobReport* report, bool prepared, bool finished) {
    pending_ = report;
    prepared_ = prepared;
    finished_ = finished;
  }

  // Pairs of sweeps enqueued so far, and how many more may be before the host looks again.
  int64_t pairs() const { return pairs_; }
  int64_t PairsAllowed() const { return std::max<int64_t>(kFirstPairs, pairs_ / 2); }
  void CountPairs(int64_t count) { pairs_ += count; }
  void ExpectProducts(const ProductReport* report) { products_ = report; }

  void Collect() {
    if (stage_ == Stage::kProducts) {
      if (products_->running == 0) stage_ = Stage::kDone;
      return;
    }
    if (pending_ == nullptr) return;  // It was not its turn.
    const JobReport r = *pending_;
    pending_ = nullptr;
    Convergence& c = report_.convergence;
    c.iterations = r.iterations;
    c.converged = finished_ && r.converged != 0;
    c.marginal_error_a = r.error[0];
    c.marginal_error_b = r.error[1];
    c.stop_reason = static_cast<StopReason>(r.reason);
    modes_ = r.modes;
    if (frames_held_ && r.running > 0 && passes_left() == 0) {  // Sums of some have left the range of those launches.
      passes_ += job_.solver.max_iterations - r.fewest;
      lags_ = true;
    }
    crossing_ = r.crossing > 0;
    if (job_.loops_symmetric) CountApart(r);
    // Members of looped jobs whose sums have left the range of floats, or that need float64, wait until all others are
    // through, and stored. Then they go on as they would alone: what was kept for loops is not for them, and passes
    // count from 0.
    const bool waited = job_.looped && r.running > 0 && r.looping == 0;
    const bool left = waited && (finished_ || r.running == job_.count);
    if (job_.looped && r.looping > 0) modes_ = 1 << kFloat;
    if (left) {
      job_.looped = kept_ = swept_ = looping_ = false;
      launched_ = turned_ = 0;
      // No more than are wanted: exponents kept after the last would measure it otherwise than in slices.
      passes_ = job_.finish_soon ? 1 : job_.solver.max_iterations - r.fewest;
    }
    if (HoldsOn() && (r.modes & (1 << kFloat)) != 0) {
      stage_ = Stage::kHold;
      return;
    }
    // What the first iteration has brought to its end is measured by its loop, as in a slice that hopes.
    const bool loops_on = job_.looped && job_.solver.tolerance > 0 && job_.engines == 1 && !looped_ &&
                          modes_ == 1 << kFloat && launched_ > 0 && launched_ < passes_;
    const bool disappointed = left || (hopeful_ && (r.running > 0 || modes_ != hoped_modes_));
    hopeful_ = false;
    if (disappointed) EndHopes();
    if (finished_ && !disappointed) {
      stage_ = job_.in.hessian.count > 0 && r.diverged < 0 ? Stage::kProducts : Stage::kDone;
      if (r.diverged >= 0) status_.Update(Diverged(r));
    } else if (prepared_) {
      stage_ = Stage::kIterate;
    } else if ((r.running == 0 && !loops_on) || (waited && !left)) {
      stage_ = Stage::kFinish;
    }
  }

 private:
  // Those of the turn have had what they get in this slice.
  void EndTurn() {
    turned_ += job_.turn_members;
    if (turned_ == job_.count) turned_ = 0;
  }
  void EndHopes() {
    stage_ = Stage::kIterate;
    hopeful_ = measures_ = false;
    turned_ = 0;
  }
  // Passes are for engines that are not apart, or no longer: as many as the one lacks that has made the fewest
  // iterations.
  void CountApart(const JobReport& r) {
    const int apart = job_.symmetric ? r.looping : r.looping - r.crossing;
    apart_ = apart > 0;
    others_ = r.running > apart;
    if (r.running == 0) return;
    const int64_t lacking = job_.finish_soon ? 1 : job_.solver.max_iterations - r.fewest;
    passes_ = launched_ + lacking + 1;
  }
  absl::Status Diverged(const JobReport& r) const {
    const std::string who = job_.count == 1 ? "" : absl::StrCat("member ", r.diverged, ": ");
    return absl::FailedPreconditionError(
        absl::StrCat(who, "the potentials or the plan are not finite after ", r.diverged_iterations,
                     " iterations; iterate on, increase epsilon (", job_.solver.epsilon, ") or use precision DOUBLE"));
  }

  Job job_;
  Stage stage_ = Stage::kPrepare;
  int modes_ = 0;  // Of all engines, as bits; known once prepared.
  int hoped_modes_ = 0;
  int64_t passes_ = 0;               // Iterations at most, the symmetric start included.
  int64_t launched_ = 0;             // Of them, enqueued.
  int64_t turned_ = 0;               // Members that have had their turn, of those before the next round.
  int64_t slices_ = 0, waited_ = 0;  // Slices that it had a part in, and that it had not.
  const JobReport* pending_ = nullptr;
  int64_t pairs_ = 0;
  const ProductReport* products_ = nullptr;
  bool prepared_ = false, finished_ = false, hopeful_ = false, kept_ = false, swept_ = false, has_exact_ = false,
       framed_ = false, looping_ = false, looped_ = false, kept_first_ = false, measures_ = false, beside_ = false,
       frames_held_ = false, lags_ = false, crossing_ = true, loops_beside_ = false, loops_apart_ = false,
       apart_ = true, others_ = true;
  absl::Status status_;
  SolveReport report_;
};

inline TransportResident* Of(Resident* resident) { return static_cast<TransportResident*>(resident); }

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_RESIDENT_H_
