// The normalisation families: which kernel solves a problem, its workspace, and the course of its launches.
//
// Most problems take one launch. Members whose range of values the registers kernel cannot hold are told apart by it in
// `redo` and solved by the general kernel in the next slice; which they are depends on their own logits alone. Implicit
// systems that no other kernel solves are that kernel's, too, from the P that the first one leaves. It goes on in the
// next launch when its slice is over: thousands of iterations, or those of EXACT, take seconds.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/cuda/family.h"
#include "kernels/cuda/normalization_choice.h"
#include "kernels/cuda/normalization_kernels.h"

namespace sinkhorn {
namespace cuda {
namespace normalization {
namespace {

// ---- A problem on its way -------------------------------------------------------------------------------------------
class NormalizationResident final : public Resident {
 public:
  NormalizationResident(const Problem& problem, const char* family, void* workspace)
      : task(TaskOf(problem)),
        workspace(static_cast<char*>(workspace)),
        precision_(problem.solver.precision == Precision::kDouble ? Precision::kDouble : Precision::kStrict),
        family_(family),
        problem_(problem) {}

  bool done() const override { return done_; }
  absl::Status status() const override { return status_; }
  SolveReport report() const override {
    SolveReport report;
    report.convergence = worst_;
    report.precision = precision_;
    report.family = family_;
    return report;
  }
  Convergence progress() const override { return worst_; }

  void Fail(absl::Status status) {
    status_.Update(std::move(status));  // It was OK. (nvcc takes an assignment for a status that nobody reads.)
    done_ = true;
  }
  void Settle(const DeviceInfo& device) {
    if (settled_) return;
    shape = ShapeOf(device, problem_, task);
    settled_ = true;
  }
  // Members that the next launch solves, and how many blocks do.
  bool general() const { return shape.kernel == Kernel::kGeneral || redoing; }

  void Collect() {
    if (done_ || tallies == nullptr) return;
    bool redo = false, left = false;
    for (int32_t b = 0; b < tally_count; ++b) {
      Add(tallies[b]);
      redo |= (tallies[b].flags & Tally::kRedo) != 0;
      left |= (tallies[b].flags & Tally::kLeft) != 0;
    }
    tallies = nullptr;
    if (!general()) {
      redoing = redo || shape.then_general;
      done_ = !redoing;
    } else {
      task.resumes = left;
      if (!left) next = task.last;
      done_ = next == task.count;
    }
    if (done_ && !finite_) {
      status_.Update(absl::FailedPreconditionError(
          "the result of the normalization is not finite: scale the logits or the cotangent down"));
    }
  }

  Task task;
  Shape shape;
  char* const workspace;
  const Tally* tallies = nullptr;  // Of the launches that are on their way.
  int32_t tally_count = 0;
  bool redoing = false;
  int64_t next = 0;  // The first member that the general kernel has not seen.

 private:
  void Add(const Tally& tally) {
    if (tally.flags & Tally::kNotFinite) finite_ = false;
    if (!(tally.flags & Tally::kAny)) return;
    const StopReason reason = tally.flags & Tally::kStoppedByLimit       ? StopReason::kMaxIterations
                              : tally.flags & Tally::kStoppedByPrecision ? StopReason::kPrecision
                              : tally.flags & Tally::kNotIterated        ? StopReason::kNotIterated
                                                                         : StopReason::kTolerance;
    const bool converged = !(tally.flags & Tally::kNotConverged);
    const auto rank = [](StopReason r) {
      return r == StopReason::kMaxIterations ? 2 : r == StopReason::kPrecision ? 1 : 0;
    };
    if (!any_ || rank(reason) > rank(worst_.stop_reason)) worst_.stop_reason = reason;
    worst_.converged = converged && (!any_ || worst_.converged);
    worst_.iterations = std::max(worst_.iterations, tally.iterations);
    worst_.marginal_error_a = std::max(worst_.marginal_error_a, tally.error_a);
    worst_.marginal_error_b = std::max(worst_.marginal_error_b, tally.error_b);
    any_ = true;
  }

  const Precision precision_;
  const char* const family_;
  const Problem problem_;
  bool settled_ = false, done_ = false, finite_ = true, any_ = false;
  absl::Status status_;
  Convergence worst_;
};

// ---- Launching ------------------------------------------------------------------------------------------------------
// Which launch a problem takes part in.
struct Key {
  Kernel kernel;
  int size = 0;
  PlainKind plain = {};  // work: of the other kernels too; lead: of kHeld.
  int ranks = 1;         // kHeld, kStream, kGeneral
  int threads = 0;       // kGeneral
  bool operator<(const Key& other) const {
    const auto tie = [](const Key& key) {
      const PlainKind& plain = key.plain;
      return std::tie(key.kernel, key.size, plain.work, plain.is_short, plain.lead, key.ranks, key.threads);
    };
    return tie(*this) < tie(other);
  }
};

// Whole tiles and smaller matrices go together.
Key KeyOf(const NormalizationResident& resident) {
  if (resident.general()) return {Kernel::kGeneral, 0, {}, resident.shape.general_ranks, GeneralThreads(resident.task)};
  const Kernel kernel = resident.shape.kernel;
  const bool whole = kernel == Kernel::kPlain || kernel == Kernel::kHeld;  // The implicit modes' backward, too.
  const Work work = resident.task.unrolled            ? Work::kUnrolled
                    : whole && resident.task.implicit ? Work::kImplicit
                                                      : Work::kForward;
  const Lead lead = whole && resident.task.softmax                        ? Lead::kSoftmax
                    : kernel == Kernel::kHeld && resident.task.transposed ? Lead::kColumns
                                                                          : Lead::kRows;
  const PlainKind kind = {work, kernel == Kernel::kPlain && IsShort(resident.task), resident.shape.padded, lead};
  return {kernel, resident.shape.size, kind, resident.shape.ranks, 0};
}

// The task of the next launch. False: the problem has failed.
// `share`: of the slice. `sharing`: blocks that the launch has for each that the device can run at a time.
bool Prepare(NormalizationResident* resident, double slice_seconds, double share, int64_t sharing,
             LaunchContext* context) {
  Task& task = resident->task;
  const Shape& shape = resident->shape;
  char* const plan = resident->workspace + shape.redo_bytes;
  char* const slots = plan + shape.plan_bytes;
  uint32_t* const redo = reinterpret_cast<uint32_t*>(resident->workspace);
  if (resident->general()) {
    const double seconds = GeneralSeconds(task, shape.general_ranks, shape.then_general);
    const double rounds = std::clamp(slice_seconds * share / seconds, 1.0, 1e6);
    // Those that the other kernel could not hold are few.
    const bool few = resident->redoing && !shape.then_general;
    const int64_t members = few ? task.count : static_cast<int64_t>(rounds) * shape.general_slots();
    task.first = resident->next;
    if (!task.resumes) task.last = std::min(task.count, task.first + members);
    task.budget_ns = static_cast<int64_t>(slice_seconds * 1e9);  // All blocks are at work at the same time.
    task.ranks = shape.general_ranks;
    task.blocks = shape.general_blocks;
    task.slot_bytes = shape.slot_bytes;
    task.workspace = slots;
    task.redo = resident->redoing ? redo : nullptr;
    task.has_plans = shape.then_general;
    if (task.has_plans) task.given_plan = {plan, DType::kFloat32, false};
    task.redo_members = shape.redo_members;
  } else {
    task.ranks = shape.ranks;
    task.blocks = static_cast<int32_t>((shape.blocks / shape.ranks + sharing - 1) / sharing) * shape.ranks;
    task.slot_bytes = shape.first_slot_bytes;
    task.workspace = shape.first_slot_bytes == 0 ? nullptr : slots;
    task.redo = redo;
    task.redo_members = shape.redo_members;
    if (shape.plan_bytes > 0) task.plan_copy = {plan, DType::kFloat32};
  }
  // The implicit modes' kernel has tallies of its own.
  void* address = nullptr;
  resident->tally_count =
      static_cast<int32_t>(resident->general() ? shape.general_slots() : task.blocks + shape.backward_blocks);
  resident->tallies = static_cast<const Tally*>(context->HostVisible(resident->tally_count * sizeof(Tally), &address));
  task.tallies = static_cast<Tally*>(address);
  if (resident->tallies == nullptr) {
    resident->Fail(absl::ResourceExhaustedError("no pinned memory for the normalization's results"));
    return false;
  }
  if (!resident->general() || task.ranks == 1) return true;
  const size_t arrivals = resident->tally_count * sizeof(unsigned);
  task.arrivals = static_cast<unsigned*>(context->Scratch(arrivals));
  if (task.arrivals != nullptr && cudaMemsetAsync(task.arrivals, 0, arrivals, context->stream()) == cudaSuccess) {
    return true;
  }
  resident->Fail(absl::ResourceExhaustedError("no memory for the normalization's blocks to meet at"));
  return false;
}

// A launch with all that it needs in the device's hands.
struct Ready {
  Key key;
  LaunchOf launch = {};
  int64_t blocks = 0, shared_bytes = 0;
  bool warp_each = true;  // A block for each warp's worth of members.
};

// `early`: see LaunchPlain.
cudaError_t LaunchReady(const Ready& ready, bool early, cudaStream_t stream) {
  const Key& key = ready.key;
  const LaunchOf& launch = ready.launch;
  const int blocks = static_cast<int>(ready.blocks);
  const int64_t shared_bytes = ready.shared_bytes;
  switch (key.kernel) {
    case Kernel::kPlain:
      return LaunchPlain(key.size, key.plain, launch, blocks, ready.warp_each ? 32 : 128, shared_bytes, early, stream);
    case Kernel::kTiles:
      return LaunchTiles(key.size, key.plain.work == Work::kUnrolled, launch, blocks, shared_bytes, stream);
    case Kernel::kHeld:
      return LaunchHeld(key.size, key.ranks, key.plain.work, key.plain.lead, launch, blocks, shared_bytes, stream);
    case Kernel::kStream:
      return LaunchStream(key.size, key.ranks, launch, blocks, shared_bytes, stream);
    case Kernel::kBackward:
      return LaunchBackward(key.size, launch, blocks, stream);
    case Kernel::kGeneral:
      return LaunchGeneral(launch, key.ranks, blocks, key.threads, stream);
  }
  return cudaErrorInvalidValue;
}

// The task of the implicit modes' kernel.
Task BackwardTask(const Task& forward, int32_t blocks) {
  Task task = forward;
  task.given_plan = {forward.plan_copy.data, DType::kFloat32, false};
  task.transposed = false;
  task.rows = task.n;
  task.cols = task.m;
  task.tallies += task.blocks;
  task.blocks = blocks;
  return task;
}

// False: no memory.
bool MakeReady(const std::vector<Task>& tasks, LaunchContext* context, Ready* ready) {
  for (const Task& task : tasks) {
    ready->blocks += task.blocks;
    ready->warp_each &= task.blocks * task.redo_members >= task.count;
  }
  if (tasks.size() <= kFew) {
    std::copy(tasks.begin(), tasks.end(), ready->launch.few);
    return true;
  }
  std::vector<BlockOf> of;
  of.reserve(ready->blocks);
  for (size_t k = 0; k < tasks.size(); ++k) {
    for (int32_t b = 0; b < tasks[k].blocks; ++b) of.push_back({static_cast<int32_t>(k), b});
  }
  ready->launch.tasks = static_cast<const Task*>(context->Upload(tasks.data(), tasks.size() * sizeof(Task)));
  ready->launch.blocks = static_cast<const BlockOf*>(context->Upload(of.data(), of.size() * sizeof(BlockOf)));
  return ready->launch.tasks != nullptr && ready->launch.blocks != nullptr;
}

// A group's launches: to `first`, and what waits for it to `second`. Without memory the group fails.
void AddLaunches(const Key& key, const std::vector<NormalizationResident*>& residents, LaunchContext* context,
                 std::vector<Ready>* first, std::vector<Ready>* second) {
  std::vector<Task> tasks, backward;
  Ready ready, after;
  ready.key = key;
  for (const NormalizationResident* resident : residents) {
    tasks.push_back(resident->task);
    ready.shared_bytes = std::max(ready.shared_bytes, resident->shape.shared_bytes);
    if (resident->general() || resident->shape.then_general || resident->shape.plan_bytes == 0) continue;
    after.key = {Kernel::kBackward, TileIndex(std::max(resident->task.n, resident->task.m))};
    backward.push_back(BackwardTask(resident->task, resident->shape.backward_blocks));
  }
  if (!MakeReady(tasks, context, &ready) || (!backward.empty() && !MakeReady(backward, context, &after))) {
    for (NormalizationResident* resident : residents) {
      resident->Fail(absl::ResourceExhaustedError("no memory for the normalization's descriptors"));
    }
    return;
  }
  first->push_back(ready);
  if (!backward.empty()) second->push_back(after);
}

// Those that go in a launch together: of teams, which begin at once, as many as the device has room for.
std::vector<std::vector<NormalizationResident*>> Launches(const Key& key,
                                                          const std::vector<NormalizationResident*>& residents,
                                                          const DeviceInfo& device) {
  if (key.kernel != Kernel::kGeneral || key.ranks == 1) return {residents};
  std::vector<std::vector<NormalizationResident*>> launches;
  int64_t room = 0;
  for (NormalizationResident* resident : residents) {
    if (resident->task.blocks > room) {
      launches.emplace_back();
      room = GeneralAtOnce(device, resident->task);
    }
    launches.back().push_back(resident);
    room -= resident->task.blocks;
  }
  for (NormalizationResident* resident : residents) resident->task.budget_ns /= static_cast<int64_t>(launches.size());
  return launches;
}

// Whether a launch of kPlain may begin while the one before in the stream, which it waits for, is at work. One of few
// blocks would be spread unevenly then, over what that one leaves: backward, that costs more. `alone`: in its slice.
bool MayBeginEarly(const Ready& ready, bool alone, int64_t multiprocessors) {
  const int64_t fitting = multiprocessors * PlainBlocks(ready.key.size, ready.key.plain, ready.shared_bytes);
  return ready.key.plain.work == Work::kForward ||
         (alone && (ready.blocks <= multiprocessors || 4 * ready.blocks >= 3 * fitting));
}

// Launches that share nothing.
absl::Status LaunchAll(std::vector<Ready>* launches, LaunchContext* context) {
  const int64_t multiprocessors = context->device().sm_count;
  bool plain = false;  // The launch before is one of kPlain's of these.
  for (Ready& ready : *launches) {
    const bool mine = ready.key.kernel == Kernel::kPlain && context->device().compute_major >= 9;
    const bool alone = launches->size() == 1, forward = ready.key.plain.work == Work::kForward;
    ready.launch.independent = plain && mine;
    ready.launch.lets_next_begin = !alone || (forward && ready.blocks > multiprocessors);
    const bool early = mine && (ready.launch.independent || MayBeginEarly(ready, alone, multiprocessors));
    const cudaError_t error = LaunchReady(ready, early, context->stream());
    if (error != cudaSuccess) {
      return absl::InternalError(
          absl::StrCat("normalization: ", cudaGetErrorName(error), ": ", cudaGetErrorString(error)));
    }
    plain = mine;
  }
  return absl::OkStatus();
}

class NormalizationFamily final : public Family {
 public:
  NormalizationFamily(const char* name, int64_t largest_side) : name_(name), largest_side_(largest_side) {}

  const char* name() const override { return name_; }
  bool Takes(const DeviceInfo&, const Problem& problem) const override {
    const int64_t bin = problem.normalization.dustbin_score ? 1 : 0;
    return problem.kind == ProblemKind::kNormalization && std::max(problem.n, problem.m) + bin <= largest_side_;
  }
  bool ReadsInputsOnce(const DeviceInfo& device, const Problem& problem) const override {
    const Task task = TaskOf(problem);
    return KernelOf(problem, task) != Kernel::kGeneral;
  }
  int64_t WorkspaceBytes(const DeviceInfo& device, const Problem& problem) const override {
    const Shape shape = ShapeOf(device, problem, TaskOf(problem));
    return shape.redo_bytes + shape.plan_bytes + shape.slots_bytes();
  }
  double PredictedSeconds(const DeviceInfo& device, const Problem& problem) const override {
    const Task task = TaskOf(problem);
    return Seconds(device, ShapeOf(device, problem, task), task);
  }
  std::unique_ptr<Resident> Make(const Problem& problem, void* workspace) const override {
    return std::make_unique<NormalizationResident>(problem, name_, workspace);
  }
  absl::Status Launch(absl::Span<Resident* const> residents, double slice_seconds,
                      LaunchContext* context) const override {
    std::map<Key, std::vector<NormalizationResident*>> groups;
    std::map<Key, int64_t> blocks;
    for (Resident* resident : residents) {
      auto* mine = static_cast<NormalizationResident*>(resident);
      mine->Settle(context->device());
      blocks[KeyOf(*mine)] += mine->shape.blocks;
    }
    // Several times as many blocks as the device runs at a time: whichever are left over in the end are short.
    const int64_t wanted = 16 * std::max(context->device().sm_count, 1);
    for (Resident* resident : residents) {
      auto* mine = static_cast<NormalizationResident*>(resident);
      const Key key = KeyOf(*mine);
      const int64_t sharing = std::clamp<int64_t>(blocks[key] / wanted, 1, 4);
      if (Prepare(mine, slice_seconds, 1.0 / residents.size(), sharing, context)) groups[key].push_back(mine);
    }
    // The largest first: the last blocks at work are short ones.
    std::vector<Ready> first, second;
    for (auto group = groups.rbegin(); group != groups.rend(); ++group) {
      for (const auto& together : Launches(group->first, group->second, context->device())) {
        AddLaunches(group->first, together, context, &first, &second);
      }
    }
    if (absl::Status status = LaunchAll(&first, context); !status.ok()) return status;
    return LaunchAll(&second, context);
  }
  void Collect(absl::Span<Resident* const> residents) const override {
    for (Resident* resident : residents) static_cast<NormalizationResident*>(resident)->Collect();
  }

 private:
  const char* const name_;
  const int64_t largest_side_;
};

}  // namespace
}  // namespace normalization

const Family* RegisterNormalization() {
  static const auto* const kFamily = new normalization::NormalizationFamily("registers", normalization::kRegisterSide);
  return kFamily;
}

const Family* OnChipNormalization() {
  static const auto* const kFamily =
      new normalization::NormalizationFamily("on-chip", std::numeric_limits<int32_t>::max());
  return kFamily;
}

}  // namespace cuda
}  // namespace sinkhorn
