// Dense and point-cloud transport on the GPU: residents, and the launches of a slice.
//
// A resident is prepared in its first slice, which tells the host the arithmetic that its data need; then iterates, two
// passes an iteration, as many as fit the slice; and ends with the measuring passes and its outputs. Engines that have
// converged sit out the passes that are still enqueued. All decisions between passes are made on the device
// (transport_control.cuh), so that nothing waits for the host.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/family.h"
#include "kernels/cuda/transport_launch.h"

namespace sinkhorn {
namespace cuda {
namespace {

constexpr size_t kAlignment = 256;
// Tolerances: a slice may not enqueue more than this part of the iterations done so far, since most may be idle.
constexpr int kFirstIterations = 32;

// Hands out parts of a member's workspace.
class Partition {
 public:
  int64_t Take(int64_t bytes) {
    const int64_t at = bytes_;
    bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_ = 0;
};

Layout LayoutOf(const Job& job) {
  Layout at = {};
  Partition part;
  const int64_t size[2] = {job.size[0], job.size[1]}, dim = job.dim;
  const int64_t most = std::max(size[0], size[1]), blocks = CeilDiv(most, kTile);
  at.state = part.Take(job.engines * sizeof(EngineState));
  at.arrival_stride = blocks + 1;
  at.arrivals = part.Take(job.engines * at.arrival_stride * sizeof(unsigned));
  for (int side = 0; side < 2; ++side) {
    const int64_t vector = size[side] * sizeof(double);
    at.mass[side] = part.Take(vector);
    at.log_mass[side] = part.Take(vector);
    if (!job.dense) {
      at.linear[side] = part.Take(vector);
      at.norm2[side] = part.Take(vector);
      at.centre[side] = part.Take(dim * sizeof(double));
      at.points64[side] = part.Take(vector * dim);
      if (job.precision != Precision::kDouble) {
        at.points32[side] = part.Take(size[side] * dim * sizeof(float));
        at.halves[side] = part.Take(size[side] * PaddedDim(job) * 2 * sizeof(__half));
      }
      at.chunk_sums[side] = part.Take(CeilDiv(size[side], 512) * 3 * dim * sizeof(double));
    }
    if (job.wants_bound) {
      at.bound_psi[side] = part.Take(vector);
      at.bound_log_weight[side] = part.Take(vector);
      at.bound_lack[side] = part.Take(vector);
    }
  }
  for (int e = 0; e < job.engines; ++e) {
    for (int side = 0; side < 2; ++side) {
      const int64_t vector = EngineSize(job, e, side) * sizeof(double);
      for (int parity = 0; parity < 2; ++parity) at.phi[e][parity][side] = part.Take(vector);
      at.ratio[e][side] = part.Take(vector);
      at.stats[e][side] = part.Take(RowBlocks(job, e, side) * sizeof(BlockStats));
    }
    int64_t partial = 0;
    for (Geometry geometry : {Geometry::kPlain, Geometry::kCloud}) {
      for (int side = 0; side < 2; ++side) {
        partial = std::max<int64_t>(partial, int64_t{Splits(job, e, side, geometry)} * EngineSize(job, e, side));
      }
    }
    at.partial[e] = part.Take(partial * sizeof(double));
  }
  const int64_t chunks = PrepareBlocks(job, 2) + (job.dense ? PrepareBlocks(job, 0) : 0);
  at.chunk_stats = part.Take(chunks * sizeof(ChunkStats));
  at.linear_value = part.Take(blocks * sizeof(double));
  if (job.wants_bound) {
    at.bound_partial = part.Take(blocks * sizeof(double));
    at.bound_stats = part.Take(blocks * sizeof(BlockStats));
  }
  at.bytes = part.bytes();
  return at;
}

// Halves that a coordinate is the sum of.
int PlanesOf(const Job& job) { return job.precision == Precision::kFast && !job.dense ? 1 : 2; }

Job JobOf(const Problem& problem) {
  Job job = {};
  job.count = problem.count;
  job.size[0] = static_cast<int32_t>(problem.n);
  job.size[1] = static_cast<int32_t>(problem.m);
  job.dense = problem.kind == ProblemKind::kDense;
  job.dim = job.dense ? 0 : static_cast<int32_t>(problem.dim);
  job.engines = problem.solver.debias && !job.dense ? 3 : 1;
  job.symmetric = problem.solver.update_rule == UpdateRule::kSymmetric;
  job.starting = job.symmetric && !problem.transport.initial_f && !problem.transport.initial_g;
  job.relaxing = problem.solver.over_relaxation && problem.solver.tolerance > 0 && !job.symmetric &&
                 std::isinf(problem.solver.rho_a) && std::isinf(problem.solver.rho_b);
  job.wants_bound = problem.outputs.primal_bound != nullptr;
  job.precision = problem.solver.precision;
  job.in = problem.transport;
  job.solver = problem.solver;
  job.out = problem.outputs;
  job.at = LayoutOf(job);
  return job;
}

// ---- Residents ----------------------------------------------------------------------------------------------------

enum class Stage { kPrepare, kIterate, kFinish, kDone };

class TransportResident final : public Resident {
 public:
  TransportResident(const Problem& problem, void* workspace) : job_(JobOf(problem)) {
    job_.workspace = static_cast<char*>(workspace);
    report_.family = job_.dense ? "dense" : "point-cloud";
    report_.precision = job_.precision == Precision::kFast && job_.dense ? Precision::kStrict : job_.precision;
    passes_ = int64_t{job_.solver.max_iterations} + (job_.starting || job_.engines > 1 ? 1 : 0);
  }

  bool done() const override { return stage_ == Stage::kDone; }
  absl::Status status() const override { return status_; }
  SolveReport report() const override { return report_; }
  Convergence progress() const override { return report_.convergence; }

  const Job& job() const { return job_; }
  Stage stage() const { return stage_; }
  bool Has(Mode mode) const { return (modes_ & (1 << mode)) != 0; }
  int64_t passes_left() const { return passes_ - launched_; }
  // Iterations that may be enqueued before the host looks again.
  int64_t Allowance() const {
    if (job_.solver.tolerance == 0) return passes_left();
    const int64_t first = OnChip() ? kOnChipChunk : kFirstIterations;
    return std::min(passes_left(), std::max<int64_t>(first, launched_ / 2));
  }
  void CountPasses(int64_t count) { launched_ = std::min(passes_, launched_ + count); }
  // Engines in float32 are solved by the on-chip kernel.
  bool OnChip() const { return OnChipTiles(job_) > 0; }
  // Before the data are known: that all engines need float32 only, and that this slice finishes them.
  void Hope() {
    modes_ = 1 << kFloat;
    hopeful_ = true;
  }
  // All passes are enqueued, or all engines have stopped.
  void EndIterations() { stage_ = Stage::kFinish; }
  void ExpectReport(const JobReport* report, bool prepared, bool finished) {
    pending_ = report;
    prepared_ = prepared;
    finished_ = finished;
  }

  void Collect() {
    const JobReport r = *pending_;
    pending_ = nullptr;
    Convergence& c = report_.convergence;
    c.iterations = r.iterations;
    c.converged = finished_ && r.converged != 0;
    c.marginal_error_a = r.error[0];
    c.marginal_error_b = r.error[1];
    c.stop_reason = static_cast<StopReason>(r.reason);
    modes_ = r.modes;
    const bool disappointed = hopeful_ && (r.running > 0 || modes_ != 1 << kFloat);
    hopeful_ = false;
    if (finished_ && !disappointed) {
      stage_ = Stage::kDone;
      if (r.diverged >= 0) status_.Update(Diverged(r));
    } else if (prepared_) {
      stage_ = Stage::kIterate;
    } else if (r.running == 0) {
      stage_ = Stage::kFinish;
    }
  }

 private:
  absl::Status Diverged(const JobReport& r) const {
    const std::string who = job_.count == 1 ? "" : absl::StrCat("member ", r.diverged, ": ");
    return absl::FailedPreconditionError(absl::StrCat(who, "the potentials are not finite after ",
                                                      r.diverged_iterations, " iterations; increase epsilon (",
                                                      job_.solver.epsilon, ") or use precision DOUBLE"));
  }

  Job job_;
  Stage stage_ = Stage::kPrepare;
  int modes_ = 0;         // Of all engines, as bits; known once prepared.
  int64_t passes_ = 0;    // Iterations at most, the symmetric start included.
  int64_t launched_ = 0;  // Of them, enqueued.
  const JobReport* pending_ = nullptr;
  bool prepared_ = false, finished_ = false, hopeful_ = false;
  absl::Status status_;
  SolveReport report_;
};

TransportResident* Of(Resident* resident) { return static_cast<TransportResident*>(resident); }

// ---- Costs --------------------------------------------------------------------------------------------------------

constexpr double kLaunchSeconds = 3e-6;

// Of one iteration of all members, launches left out.
double IterationSeconds(const Job& job) {
  if (OnChipTiles(job) > 0) return (1 + job.count / 264.0) * 0.5e-6;
  const double slow = job.precision == Precision::kDouble ? 4 : 1;
  double pairs = 0;
  for (int e = 0; e < job.engines; ++e) pairs += 1.0 * EngineSize(job, e, 0) * EngineSize(job, e, 1);
  return job.count * (2 * pairs * slow * (8e-13 + 8e-14 * job.dim) + 2e-8);
}

// ---- Launches of a slice ------------------------------------------------------------------------------------------

// Lays out all launches of a slice first, so that their descriptors travel in one copy, then enqueues them.
class Slice {
 public:
  Slice(absl::Span<Resident* const> residents, LaunchContext* context) : context_(context) {
    for (Resident* resident : residents) residents_.push_back(Of(resident));
    jobs_ = JobsOf(Select([](const TransportResident&) { return true; }));
  }

  absl::Status Run(double slice_seconds) {
    const Set preparing = Select([](const TransportResident& r) { return r.stage() == Stage::kPrepare; });
    Prepare(preparing);
    // Small problems may be through at once.
    const Set hopeful = Among(preparing, [&](const TransportResident& r) {
      return r.OnChip() && r.job().solver.max_iterations * IterationSeconds(r.job()) < slice_seconds;
    });
    int most = 0;
    for (int k : hopeful) {
      residents_[k]->Hope();
      most = std::max(most, residents_[k]->job().solver.max_iterations);
    }
    RunOnChip(hopeful, most);
    Iterate(slice_seconds);
    Set finishing = Select([](const TransportResident& r) { return r.stage() == Stage::kFinish; });
    finishing.insert(finishing.end(), hopeful.begin(), hopeful.end());
    std::sort(finishing.begin(), finishing.end());
    Finish(finishing);
    Report(preparing, finishing);
    return Enqueue();
  }

 private:
  using Set = std::vector<int>;  // Of residents, by number.
  // A table whose parts are places in the descriptors' bytes.
  struct Table {
    size_t jobs = 0, first_block = 0;
    int32_t job_count = 0;
    int64_t blocks = 0;
  };

  cudaStream_t stream() const { return context_->stream(); }

  // Copies to the descriptors' bytes and says where.
  size_t Describe(const void* data, size_t bytes) {
    const size_t at = (bytes_.size() + 15) / 16 * 16;
    bytes_.resize(at + bytes);
    std::memcpy(bytes_.data() + at, data, bytes);
    return at;
  }
  size_t JobsOf(const Set& set) {
    std::vector<Job> jobs;
    for (int k : set) jobs.push_back(residents_[k]->job());
    return Describe(jobs.data(), jobs.size() * sizeof(Job));
  }
  // launch(LaunchTable, blocks) later, when descriptors have an address.
  template <typename Function>
  void Later(const Table& table, Function launch) {
    if (table.blocks > 0) launches_.push_back({table, launch});
  }

  absl::Status Enqueue() {
    const void* source = context_->Upload(bytes_.data(), bytes_.size());
    auto* base = static_cast<char*>(context_->Scratch(bytes_.size()));
    if (source == nullptr || base == nullptr) return absl::InternalError("transport: no room for descriptors");
    // What was uploaded may lie in host memory; every block reads it.
    (void)cudaMemcpyAsync(base, source, bytes_.size(), cudaMemcpyDefault, stream());
    for (const auto& [table, launch] : launches_) {
      launch({reinterpret_cast<const Job*>(base + table.jobs),
              reinterpret_cast<const int64_t*>(base + table.first_block), table.job_count},
             table.blocks);
    }
    const cudaError_t error = cudaGetLastError();
    if (error == cudaSuccess) return absl::OkStatus();
    return absl::UnavailableError(
        absl::StrCat("transport: ", cudaGetErrorName(error), ": ", cudaGetErrorString(error)));
  }

  template <typename Predicate>
  Set Select(Predicate wanted) const {
    Set set;
    for (size_t k = 0; k < residents_.size(); ++k) {
      if (wanted(*residents_[k])) set.push_back(static_cast<int>(k));
    }
    return set;
  }
  template <typename Predicate>
  Set Among(const Set& among, Predicate wanted) const {
    Set set;
    for (int k : among) {
      if (wanted(*residents_[k])) set.push_back(k);
    }
    return set;
  }

  // A table over the set, with `blocks_of` blocks for each job.
  template <typename BlocksOf>
  Table TableOf(const Set& set, BlocksOf blocks_of) {
    if (set.empty()) return Table();
    std::vector<int64_t> first = {0};
    for (int k : set) first.push_back(first.back() + blocks_of(residents_[k]->job()));
    Table table;
    table.jobs = set.size() == residents_.size() ? jobs_ : JobsOf(set);
    table.first_block = Describe(first.data(), first.size() * sizeof(int64_t));
    table.job_count = static_cast<int32_t>(set.size());
    table.blocks = first.back();
    return table;
  }

  void Prepare(const Set& set) {
    for (int step = 0; step < kPrepareSteps && !set.empty(); ++step) {
      const Table table = TableOf(set, [step](const Job& job) { return job.count * PrepareBlocks(job, step); });
      Later(table, [=](const LaunchTable& t, int64_t blocks) { LaunchPrepare(t, blocks, step, stream()); });
    }
  }

  // Two launches, one for each side, for every kernel in use.
  struct PassTables {
    bool dense;
    Mode mode;
    int planes;   // Of clouds in float32.
    int64_t dim;  // The largest.
    Table side[2];
  };
  std::vector<PassTables> TablesOf(const Set& set) {
    std::vector<PassTables> tables;
    for (bool dense : {false, true}) {
      for (Mode mode : {kFloat, kMixed, kDouble}) {
        for (int planes : {1, 2}) {
          const Set chosen = Among(set, [&](const TransportResident& r) {
            const bool on_chip = mode == kFloat && r.OnChip();
            return r.job().dense == dense && r.Has(mode) && !on_chip && PlanesOf(r.job()) == planes;
          });
          if (chosen.empty()) continue;
          PassTables pass{dense, mode, planes, 0, {}};
          for (int k : chosen) pass.dim = std::max<int64_t>(pass.dim, residents_[k]->job().dim);
          for (int side = 0; side < 2; ++side) {
            pass.side[side] = TableOf(chosen, [side, mode](const Job& job) {
              return job.count * PassBlocks(job, side, GeometryOf(job, mode));
            });
          }
          tables.push_back(pass);
        }
      }
    }
    return tables;
  }
  void RunPass(const std::vector<PassTables>& tables, Pass pass) {
    for (int side = 0; side < 2; ++side) {
      for (const PassTables& tables_of : tables) {
        Later(tables_of.side[side], [this, t = tables_of, side, pass](const LaunchTable& table, int64_t blocks) {
          if (!t.dense && t.mode == kFloat) {
            LaunchCloudStep(table, blocks, t.planes, t.dim, side, pass, stream());
          } else {
            LaunchHalfStep(table, blocks, t.dense, t.mode, side, pass, 0, stream());
          }
        });
      }
    }
  }

  void RunOnChip(const Set& set, int64_t iterations) {
    const int chunks = static_cast<int>(CeilDiv(iterations, kOnChipChunk));
    for (bool dense : {false, true}) {
      for (int tiles = 1; tiles <= kOnChipTiles; ++tiles) {
        const Set chosen = Among(set, [&](const TransportResident& r) {
          return r.job().dense == dense && OnChipTiles(r.job()) == tiles && r.Has(kFloat);
        });
        const Table table = TableOf(chosen, [](const Job& job) { return job.count; });
        Later(table,
              [=](const LaunchTable& t, int64_t blocks) { LaunchOnChip(t, blocks, dense, tiles, chunks, stream()); });
      }
    }
  }

  void Iterate(double slice_seconds) {
    Set set = Select([](const TransportResident& r) { return r.stage() == Stage::kIterate; });
    if (set.empty()) return;
    double seconds = 0;
    for (int k : set) seconds += IterationSeconds(residents_[k]->job());
    const int64_t iterations =
        std::max<int64_t>(1, static_cast<int64_t>(std::min(1e6, slice_seconds / (seconds + 2 * kLaunchSeconds))));
    std::vector<int64_t> allowance(residents_.size(), 0);
    int64_t most = 0;
    for (int k : set) {
      allowance[k] = residents_[k]->Allowance();
      if (residents_[k]->OnChip()) most = std::max(most, std::min(iterations, allowance[k]));
    }
    RunOnChip(set, most);
    Set passing;  // Not on the chip alone.
    for (int k : set) {
      TransportResident* r = residents_[k];
      if (!r->OnChip() || r->Has(kMixed)) {
        passing.push_back(k);
        continue;
      }
      r->CountPasses(CeilDiv(most, kOnChipChunk) * kOnChipChunk);
      if (r->passes_left() == 0) r->EndIterations();
    }
    set = passing;
    std::vector<PassTables> tables = TablesOf(set);
    for (int64_t done = 0; done < iterations && !set.empty(); ++done) {
      RunPass(tables, Pass::kIterate);
      Set left;
      for (int k : set) {
        residents_[k]->CountPasses(1);
        if (residents_[k]->passes_left() == 0) residents_[k]->EndIterations();
        if (done + 1 < allowance[k]) left.push_back(k);
      }
      if (left.size() == set.size()) continue;
      set = left;
      tables = TablesOf(set);
    }
  }

  void Finish(const Set& set) {
    if (set.empty()) return;
    RunPass(TablesOf(set), Pass::kMeasure);
    for (int side = 0; side < 2; ++side) {
      for (bool dense : {false, true}) {
        for (Mode mode : {kFloat, kMixed, kDouble}) {
          const Set chosen = Among(set, [&](const TransportResident& r) {
            return r.job().dense == dense && r.Has(mode) && ApplyBlocks(r.job(), side) > 0;
          });
          const Table table = TableOf(chosen, [side](const Job& job) { return job.count * ApplyBlocks(job, side); });
          Later(table,
                [=](const LaunchTable& t, int64_t blocks) { LaunchApply(t, blocks, dense, mode, side, stream()); });
        }
      }
    }
    Bound(Among(set, [](const TransportResident& r) { return r.job().wants_bound; }));
    const Table store = TableOf(set, [](const Job& job) { return job.count * StoreBlocks(job); });
    Later(store, [=](const LaunchTable& t, int64_t blocks) { LaunchStore(t, blocks, stream()); });
    const Table scalars = TableOf(set, [](const Job& job) { return job.count; });
    Later(scalars, [=](const LaunchTable& t, int64_t blocks) { LaunchScalars(t, blocks, stream()); });
  }

  // BoundStart, three passes for sums, and the value; scalars add it up.
  void Bound(const Set& set) {
    for (bool dense : {false, true}) {
      const Set chosen = Among(set, [&](const TransportResident& r) { return r.job().dense == dense; });
      if (chosen.empty()) continue;
      const Table start =
          TableOf(chosen, [](const Job& job) { return job.count * (RowBlocks(job, 0, 0) + RowBlocks(job, 0, 1)); });
      Later(start, [=](const LaunchTable& t, int64_t blocks) { LaunchBoundStart(t, blocks, stream()); });
      for (int step = 0; step < 3; ++step) {
        const int side = step == 1 ? 1 : 0;
        const Table pass = TableOf(chosen, [side](const Job& job) {
          return job.count * int64_t{RowBlocks(job, 0, side)} * Splits(job, 0, side);
        });
        Later(pass, [=](const LaunchTable& t, int64_t blocks) {
          LaunchHalfStep(t, blocks, dense, kDouble, side, Pass::kBound, step, stream());
        });
      }
      const Table value = TableOf(chosen, [](const Job& job) { return job.count * BoundBlocks(job); });
      Later(value, [=](const LaunchTable& t, int64_t blocks) { LaunchBoundValue(t, blocks, dense, stream()); });
    }
  }

  void Report(const Set& preparing, const Set& finishing) {
    void* address = nullptr;
    auto* reports = static_cast<JobReport*>(context_->HostVisible(residents_.size() * sizeof(JobReport), &address));
    auto* device_reports = static_cast<JobReport*>(address);
    const Table table = TableOf(Select([](const TransportResident&) { return true; }), [](const Job&) { return 1; });
    Later(table, [=](const LaunchTable& t, int64_t) { LaunchReport(t, device_reports, stream()); });
    for (size_t k = 0; k < residents_.size(); ++k) {
      const int number = static_cast<int>(k);
      residents_[k]->ExpectReport(&reports[k], std::binary_search(preparing.begin(), preparing.end(), number),
                                  std::binary_search(finishing.begin(), finishing.end(), number));
    }
  }

  LaunchContext* context_;
  std::vector<TransportResident*> residents_;
  std::vector<char> bytes_;  // Descriptors.
  size_t jobs_ = 0;          // Where those of all residents are.
  std::vector<std::pair<Table, std::function<void(const LaunchTable&, int64_t)>>> launches_;
};

// ---- The family ---------------------------------------------------------------------------------------------------

class TransportFamily final : public Family {
 public:
  const char* name() const override { return "transport"; }
  bool Takes(const DeviceInfo& /*device*/, const Problem& problem) const override {
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 1024;
    return problem.kind != ProblemKind::kNormalization && problem.n <= kMost && problem.m <= kMost;
  }
  int64_t WorkspaceBytes(const DeviceInfo& /*device*/, const Problem& problem) const override {
    return problem.count * JobOf(problem).at.bytes;
  }
  double PredictedSeconds(const DeviceInfo& /*device*/, const Problem& problem) const override {
    const double iteration = IterationSeconds(JobOf(problem));
    return problem.solver.max_iterations * (iteration + 2 * kLaunchSeconds) + 3 * iteration + 20 * kLaunchSeconds;
  }
  std::unique_ptr<Resident> Make(const Problem& problem, void* workspace) const override {
    return std::make_unique<TransportResident>(problem, workspace);
  }
  absl::Status Launch(absl::Span<Resident* const> residents, double slice_seconds,
                      LaunchContext* context) const override {
    return Slice(residents, context).Run(slice_seconds);
  }
  void Collect(absl::Span<Resident* const> residents) const override {
    for (Resident* resident : residents) Of(resident)->Collect();
  }
};

}  // namespace

const Family* Transport() {
  static const TransportFamily family;
  return &family;
}

}  // namespace cuda
}  // namespace sinkhorn
