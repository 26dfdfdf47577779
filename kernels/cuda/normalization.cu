// The normalisation families: which kernel solves a problem, its workspace, and the course of its launches.
//
// Most problems take one launch. Members whose range of values the registers kernel cannot hold are told apart by it in
// `redo` and solved by the general kernel in the next slice; which they are depends on their own logits alone.
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
#include "kernels/cuda/normalization_kernels.h"

namespace sinkhorn {
namespace cuda {
namespace normalization {
namespace {

constexpr int64_t kRegisterSide = 32;
constexpr int64_t kWorkspaceLimit = int64_t{1} << 30;  // Of the slots of one problem.
constexpr int64_t kSlotsPerMultiprocessor = 4;

int64_t Padded(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// ---- From a problem to a task ---------------------------------------------------------------------------------------
Tensor TensorOf(const TensorView& view) { return {view.data, view.dtype, view.shared}; }
Output OutputOf(const OutputView& view) { return {view.data, view.dtype}; }

Task TaskOf(const Problem& problem) {
  const NormalizationInputs& in = problem.normalization;
  const Recipe& recipe = in.recipe;
  Task task{};
  task.logits = TensorOf(in.logits);
  task.row_marginals = TensorOf(in.row_marginals);
  task.column_marginals = TensorOf(in.column_marginals);
  task.dustbin = TensorOf(in.dustbin_score);
  task.cotangent = TensorOf(in.cotangent);
  task.given_plan = TensorOf(in.plan);
  task.plan = OutputOf(problem.outputs.plan);
  task.row_sums = OutputOf(problem.outputs.row_sums);
  task.column_sums = OutputOf(problem.outputs.column_sums);
  task.gradient = OutputOf(problem.outputs.gradient_logits);
  task.dustbin_gradient = OutputOf(problem.outputs.gradient_dustbin_score);
  task.convergence = problem.outputs.convergence;

  task.count = task.last = problem.count;
  task.has_dustbin = static_cast<bool>(in.dustbin_score);
  task.n = static_cast<int32_t>(problem.n) + task.has_dustbin;
  task.m = static_cast<int32_t>(problem.m) + task.has_dustbin;
  task.forward = static_cast<bool>(in.logits);
  task.exact = task.forward && recipe.exact;
  // EXACT eliminates its rows and solves for its columns: the fewer, the better.
  task.transposed = task.forward && (recipe.exact ? task.m > task.n : recipe.order == Order::kColumnRow);
  task.rows = task.transposed ? task.m : task.n;
  task.cols = task.transposed ? task.n : task.m;
  task.iterations = problem.solver.max_iterations;
  task.tolerance = problem.solver.tolerance;
  task.tolerance32 = static_cast<float>(task.tolerance);
  const bool backward = static_cast<bool>(in.cotangent);
  task.unrolled = backward && task.forward && in.backward == BackwardMode::kUnrolled;
  task.implicit = backward && !task.unrolled;
  task.backward = in.backward;
  task.own_marginals = in.row_marginals || in.column_marginals;
  const bool steps = task.forward && !recipe.exact;  // EXACT and a given plan have neither start nor guard.
  task.softmax = steps && recipe.start == Start::kRowSoftmax;
  task.offset = steps ? recipe.offset : 0;
  task.guard = steps && recipe.guard_value != 0 ? recipe.guard : Guard::kNone;
  task.guard_value = recipe.guard_value;
  task.floor = std::max(recipe.logit_floor, std::numeric_limits<double>::lowest());
  task.floor32 = static_cast<float>(std::max<double>(task.floor, std::numeric_limits<float>::lowest()));
  return task;
}

// ---- Which kernel ---------------------------------------------------------------------------------------------------
enum class Kernel { kPlain, kTiles, kStream, kBackward, kGeneral };

// All tensors float32, or all of 2 bytes an element.
bool IsUniform(const Task& task) {
  const size_t size = SizeOf(task.logits.dtype);
  const auto fits = [&](DType dtype, const void* data) { return data == nullptr || SizeOf(dtype) == size; };
  return fits(task.cotangent.dtype, task.cotangent.data) && fits(task.plan.dtype, task.plan.data) &&
         fits(task.gradient.dtype, task.gradient.data);
}
bool IsShort(const Task& task) { return SizeOf(task.logits.dtype) == 2; }

// By shape, types and options alone.
Kernel KernelOf(const Problem& problem, const Task& task) {
  const bool in_registers = std::max(task.n, task.m) <= kRegisterSide;
  const bool backward_in_registers = in_registers && task.backward != BackwardMode::kImplicitFull;
  if (!task.forward || task.exact || (task.implicit && !backward_in_registers) ||
      problem.solver.precision == Precision::kDouble || task.logits.dtype == DType::kFloat64 ||
      std::max(task.n, task.m) > kStreamSide) {
    return Kernel::kGeneral;
  }
  if (!in_registers) return Kernel::kStream;
  const int side = 4 << TileIndex(task.n);
  const bool packed = !task.logits.shared && !task.cotangent.shared && IsUniform(task);
  const bool plain = task.n == task.m && task.n == side && !task.has_dustbin && !task.own_marginals && !task.softmax &&
                     task.offset == 0 && task.guard == Guard::kNone && task.tolerance == 0 && packed;
  return plain ? Kernel::kPlain : Kernel::kTiles;
}

int GeneralThreads(const Task& task) {
  const int64_t area = int64_t{task.n} * task.m;
  return area <= 256 ? 64 : area <= 4096 ? 128 : area <= 65536 ? 256 : 512;
}

// ---- Blocks and workspace -------------------------------------------------------------------------------------------
struct Shape {
  Kernel kernel = Kernel::kGeneral;  // Of the first launch,
  int size = 0;                      // for matrices of this size,
  int32_t blocks = 0;                // by so many blocks,
  int64_t first_slot_bytes = 0;      // of so much workspace each,
  int64_t shared_bytes = 0;          // and dynamic shared memory.
  int64_t redo_bytes = 0, redo_members = 1;
  int64_t plan_bytes = 0;      // P for the implicit modes' kernel.
  int32_t general_blocks = 0;  // Of the general kernel.
  int64_t slot_bytes = 0;

  int64_t slots_bytes() const { return std::max(first_slot_bytes * blocks, slot_bytes * general_blocks); }
};

Shape ShapeOf(const DeviceInfo& device, const Problem& problem, const Task& task) {
  Shape shape;
  shape.kernel = KernelOf(problem, task);
  shape.slot_bytes = GeneralSlotBytes(task);
  const int64_t multiprocessors = std::max(device.sm_count, 1);
  const bool general = shape.kernel == Kernel::kGeneral;
  // Few of the registers kernel's members need it.
  const int64_t most = general ? multiprocessors * (GeneralThreads(task) <= 128 ? 8 : kSlotsPerMultiprocessor) : 64;
  const int64_t fitting = std::max<int64_t>((general ? kWorkspaceLimit : kWorkspaceLimit / 8) / shape.slot_bytes, 1);
  shape.general_blocks = static_cast<int32_t>(std::min({task.count, most, fitting}));
  if (general) return shape;

  if (shape.kernel == Kernel::kStream) {
    shape.size = StreamIndex(std::max(task.n, task.m));
    shape.redo_bytes = Padded(4 * task.count);
    shape.redo_members = 1;
    shape.first_slot_bytes = StreamSlotBytes(shape.size, task);
    shape.shared_bytes = StreamSharedBytes(shape.size, task.rows);
    shape.blocks = static_cast<int32_t>(std::min({task.count, multiprocessors * kStreamBlocks[shape.size],
                                                  std::max<int64_t>(4 * kWorkspaceLimit / shape.first_slot_bytes, 1)}));
    return shape;
  }
  shape.size = TileIndex(std::max(task.n, task.m));
  shape.redo_members = kWarpMembers[shape.size];
  const int64_t warps = (task.count + kWarpMembers[shape.size] - 1) / kWarpMembers[shape.size];
  shape.redo_bytes = Padded(4 * warps);
  if (task.implicit) shape.plan_bytes = Padded(task.count * task.n * task.m * static_cast<int64_t>(sizeof(float)));
  int64_t limit = multiprocessors * 16;
  if (task.unrolled) {
    const int64_t history = HistoryBytes(shape.size, task.iterations);
    if (history <= SharedHistoryBytes()) {
      shape.shared_bytes = history;
    } else {
      shape.first_slot_bytes = history;
      limit = std::clamp<int64_t>(4 * kWorkspaceLimit / history, 1, multiprocessors * 4);
    }
  }
  // A warp each while there is a multiprocessor for each.
  const int64_t blocks = warps <= multiprocessors ? warps : (warps + kBlockWarps - 1) / kBlockWarps;
  shape.blocks = static_cast<int32_t>(std::min(blocks, limit));
  return shape;
}

// ---- Predictions ----------------------------------------------------------------------------------------------------
// One member by the general kernel, one of many blocks at work.
double GeneralSeconds(const Task& task) {
  const double area = static_cast<double>(task.n) * task.m, lines = static_cast<double>(task.n) + task.m;
  const double threads = GeneralThreads(task);
  const double pass = 2e-6 + 1e-7 * std::ceil(static_cast<double>(task.cols) / 32) + area * 60e-9 / threads;
  double passes = 4;
  if (task.forward) passes += 2.0 * (task.exact ? std::min(task.iterations, 20) : task.iterations);
  if (task.unrolled) passes += 3.0 * task.iterations;
  if (task.implicit) passes += 3 * std::min(2 * lines, 60.0);
  double seconds = passes * pass;
  if (task.exact) {
    const double cols = task.cols;
    seconds +=
        10 * (task.cols <= 128 ? cols * 3e-6 + cols * cols * (task.rows + cols / 3) * 4e-9 / threads : 80 * pass);
  }
  return seconds;
}

double Seconds(const DeviceInfo& device, const Shape& shape, const Task& task) {
  if (shape.kernel == Kernel::kGeneral) {
    const double rounds = std::ceil(static_cast<double>(task.count) / shape.general_blocks);
    return 5e-6 + rounds * GeneralSeconds(task);
  }
  if (shape.kernel == Kernel::kStream) {
    const double area = static_cast<double>(task.rows) * (64 << shape.size);
    const double rounds = std::ceil(static_cast<double>(task.count) / shape.blocks);
    const double iteration = 1.5e-6 + area / 32e9 * (shape.size > 1 ? 1 : .25);
    return 1e-5 + rounds * (task.unrolled ? 3 : 1) * task.iterations * iteration;
  }
  const double side = 4 << shape.size, area = side * side;
  const double factor = (shape.kernel == Kernel::kPlain ? 1 : 1.5) * (task.unrolled ? 3.2 : task.implicit ? 2.5 : 1);
  const double lanes = 128.0 * std::max(device.sm_count, 1) * 1.7e9;
  const double work = static_cast<double>(task.count) * area * (3.0 * task.iterations * factor + 20) / lanes;
  const double alone = task.iterations * 80e-9 * factor;
  return 3e-6 + std::max(work, alone) + static_cast<double>(task.count) * area * 8 / 3e12;
}

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
    bool redo = false;
    for (int32_t b = 0; b < tally_count; ++b) {
      Add(tallies[b]);
      redo |= (tallies[b].flags & Tally::kRedo) != 0;
    }
    tallies = nullptr;
    if (!general()) {
      redoing = redo;
      done_ = !redo;
    } else {
      next = task.last;
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
  bool backward = false, is_short = false;
  int threads = 0;
  bool operator<(const Key& other) const {
    return std::tie(kernel, size, backward, is_short, threads) <
           std::tie(other.kernel, other.size, other.backward, other.is_short, other.threads);
  }
};

Key KeyOf(const NormalizationResident& resident) {
  if (resident.general()) return {Kernel::kGeneral, 0, false, false, GeneralThreads(resident.task)};
  const bool is_short = resident.shape.kernel == Kernel::kPlain && IsShort(resident.task);
  return {resident.shape.kernel, resident.shape.size, resident.task.unrolled, is_short, 0};
}

// The task of the next launch. False: the problem has failed.
// `sharing`: blocks that the launch has for each that the device can run at a time.
bool Prepare(NormalizationResident* resident, double seconds, int64_t sharing, LaunchContext* context) {
  Task& task = resident->task;
  const Shape& shape = resident->shape;
  char* const plan = resident->workspace + shape.redo_bytes;
  char* const slots = plan + shape.plan_bytes;
  uint32_t* const redo = reinterpret_cast<uint32_t*>(resident->workspace);
  if (resident->general()) {
    const double rounds = std::clamp(seconds / GeneralSeconds(task), 1.0, 1e6);
    const int64_t members = resident->redoing ? task.count : static_cast<int64_t>(rounds) * shape.general_blocks;
    task.first = resident->next;
    task.last = std::min(task.count, task.first + members);
    task.blocks = shape.general_blocks;
    task.slot_bytes = shape.slot_bytes;
    task.workspace = slots;
    task.redo = resident->redoing ? redo : nullptr;
    task.redo_members = shape.redo_members;
  } else {
    task.blocks = static_cast<int32_t>((shape.blocks + sharing - 1) / sharing);
    task.slot_bytes = shape.first_slot_bytes;
    task.workspace = shape.first_slot_bytes == 0 ? nullptr : slots;
    task.redo = redo;
    if (shape.plan_bytes > 0) task.plan_copy = {plan, DType::kFloat32};
  }
  // The implicit modes' kernel has tallies of its own.
  void* address = nullptr;
  const int parts = !resident->general() && shape.plan_bytes > 0 ? 2 : 1;
  resident->tally_count = parts * task.blocks;
  resident->tallies = static_cast<const Tally*>(context->HostVisible(resident->tally_count * sizeof(Tally), &address));
  task.tallies = static_cast<Tally*>(address);
  if (resident->tallies != nullptr) return true;
  resident->Fail(absl::ResourceExhaustedError("no pinned memory for the normalization's results"));
  return false;
}

cudaError_t LaunchKernelOf(const Key& key, const LaunchOf& launch, int blocks, int64_t shared_bytes,
                           cudaStream_t stream) {
  switch (key.kernel) {
    case Kernel::kPlain:
      return LaunchPlain(key.size, key.is_short, key.backward, launch, blocks, shared_bytes, stream);
    case Kernel::kTiles:
      return LaunchTiles(key.size, key.backward, launch, blocks, shared_bytes, stream);
    case Kernel::kStream:
      return LaunchStream(key.size, launch, blocks, shared_bytes, stream);
    case Kernel::kBackward:
      return LaunchBackward(key.size, launch, blocks, stream);
    case Kernel::kGeneral:
      return LaunchGeneral(launch, blocks, key.threads, stream);
  }
  return cudaErrorInvalidValue;
}

// The task of the implicit modes' kernel.
Task BackwardTask(const Task& forward) {
  Task task = forward;
  task.given_plan = {forward.plan_copy.data, DType::kFloat32, false};
  task.transposed = false;
  task.rows = task.n;
  task.cols = task.m;
  task.tallies += task.blocks;
  return task;
}

absl::Status LaunchTasks(const Key& key, const std::vector<Task>& tasks, int64_t shared_bytes, LaunchContext* context) {
  LaunchOf launch{};
  int64_t blocks = 0;
  for (const Task& task : tasks) blocks += task.blocks;
  if (tasks.size() == 1) {
    launch.only = tasks[0];
  } else {
    std::vector<BlockOf> of;
    of.reserve(blocks);
    for (size_t k = 0; k < tasks.size(); ++k) {
      for (int32_t b = 0; b < tasks[k].blocks; ++b) of.push_back({static_cast<int32_t>(k), b});
    }
    launch.tasks = static_cast<const Task*>(context->Upload(tasks.data(), tasks.size() * sizeof(Task)));
    launch.blocks = static_cast<const BlockOf*>(context->Upload(of.data(), of.size() * sizeof(BlockOf)));
    if (launch.tasks == nullptr || launch.blocks == nullptr) {
      return absl::ResourceExhaustedError("no memory for the normalization's descriptors");
    }
  }
  const cudaError_t error = LaunchKernelOf(key, launch, static_cast<int>(blocks), shared_bytes, context->stream());
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("normalization: ", cudaGetErrorName(error), ": ", cudaGetErrorString(error)));
}

absl::Status LaunchTogether(const Key& key, const std::vector<NormalizationResident*>& residents,
                            LaunchContext* context) {
  std::vector<Task> tasks, backward;
  int64_t shared_bytes = 0;
  for (const NormalizationResident* resident : residents) {
    tasks.push_back(resident->task);
    shared_bytes = std::max(shared_bytes, resident->shape.shared_bytes);
    if (!resident->general() && resident->shape.plan_bytes > 0) backward.push_back(BackwardTask(resident->task));
  }
  absl::Status status = LaunchTasks(key, tasks, shared_bytes, context);
  if (status.ok() && !backward.empty()) {
    status.Update(LaunchTasks({Kernel::kBackward, key.size, false, false, 0}, backward, 0, context));
  }
  if (!absl::IsResourceExhausted(status)) return status;
  for (NormalizationResident* resident : residents) resident->Fail(status);
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
    const int64_t at_a_time = 4 * std::max(context->device().sm_count, 1);
    for (Resident* resident : residents) {
      auto* mine = static_cast<NormalizationResident*>(resident);
      const Key key = KeyOf(*mine);
      const int64_t sharing = std::clamp<int64_t>(blocks[key] / at_a_time, 1, 4);
      if (Prepare(mine, slice_seconds / residents.size(), sharing, context)) groups[key].push_back(mine);
    }
    for (const auto& [key, group] : groups) {
      if (absl::Status status = LaunchTogether(key, group, context); !status.ok()) return status;
    }
    return absl::OkStatus();
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
