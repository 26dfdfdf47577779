// In order: the task, the kernel, blocks and memory, predictions.
#include "kernels/cuda/normalization_choice.h"

#include <cmath>
#include <iterator>
#include <limits>

#include "kernels/cuda/normalization_kernels.h"

namespace sinkhorn {
namespace cuda {
namespace normalization {
namespace {

constexpr int64_t kWorkspaceLimit = int64_t{1} << 30;  // Of the slots of one problem.
constexpr int64_t kSlotsPerMultiprocessor = 4;
constexpr int64_t kStaticSharedBytes = 4 << 10;  // Of any kernel.
// Guards of the plain kernels, at most: they must be less than 1 / 64, as GuardRests says; and, added, such that the
// square of 24 of them is nothing to float32 (normalization_plain_softmax.cuh, for the offset too).
constexpr double kPlainGuardMost = 1e-3, kPlainAddMost = 1e-5, kPlainOffsetLeast = 1e-16;
constexpr double kHeldGuardMost = 0.5;  // Times the side.

// That a block may have.
int64_t SharedBytes(const DeviceInfo& device) {
  return device.smem_per_block_bytes > 0 ? device.smem_per_block_bytes : 99 << 10;
}

int64_t Padded(int64_t bytes) { return (bytes + 255) / 256 * 256; }

Tensor TensorOf(const TensorView& view) { return {view.data, view.dtype, view.shared}; }
Output OutputOf(const OutputView& view) { return {view.data, view.dtype}; }

}  // namespace

// ---- From a problem to a task ---------------------------------------------------------------------------------------
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
  const bool packed = !task.logits.shared && !task.cotangent.shared && IsUniform(task);
  const bool alike = task.n == task.m && !task.has_dustbin && !task.own_marginals && task.tolerance == 0 && packed;
  const bool bare = !task.softmax && task.offset == 0, unguarded = task.guard == Guard::kNone;
  const bool rests = bare && (unguarded || (task.guard == Guard::kMax && task.guard_value <= kPlainGuardMost));
  const bool adds = task.softmax && task.offset >= kPlainOffsetLeast && task.offset <= 1 &&
                    task.floor32 == std::numeric_limits<float>::lowest() &&
                    (unguarded || (task.guard == Guard::kAdd && task.guard_value <= kPlainAddMost));
  const bool beyond = task.n > std::end(kPlainSides)[-1];
  const bool plain = alike && !beyond && (rests || adds);
  const bool columns = bare && task.transposed &&
                       (unguarded || (task.guard == Guard::kMax && task.guard_value * task.n <= kHeldGuardMost));
  const bool held = alike && beyond && ((bare && unguarded && !task.transposed) || adds || columns);
  // Where sums are not to be 1, IMPLICIT_UNIT's system is not definite; kGeneral alone is made for that.
  const bool definite =
      task.backward == BackwardMode::kImplicit ||
      (task.backward == BackwardMode::kImplicitUnit && task.n == task.m && !task.has_dustbin && !task.own_marginals);
  if (!task.forward || task.exact || (task.implicit && !definite) || problem.solver.precision == Precision::kDouble ||
      task.logits.dtype == DType::kFloat64 ||
      (!IsStreamSize(task.rows, task.cols) && !IsSpreadSize(task.rows, task.cols))) {
    return Kernel::kGeneral;
  }
  if (plain) return Kernel::kPlain;
  if (held) return Kernel::kHeld;  // Another where the device cannot.
  return in_registers ? Kernel::kTiles : Kernel::kStream;
}

int GeneralThreads(const Task& task) {
  const int64_t area = int64_t{task.n} * task.m;
  return area <= 256 ? 64 : area <= 4096 ? 128 : area <= 65536 ? 256 : 512;
}
int GeneralRanks(const DeviceInfo& device, const Task& task) {
  constexpr int64_t kArea = 8192;  // Of a block, where a pass takes several times what the blocks' meeting does.
  // Elimination is a block's.
  if (!device.is_cooperative || (task.exact && task.cols <= kDenseColumns)) return 1;
  const int64_t most = std::min<int64_t>(128, device.sm_count);
  return static_cast<int>(std::clamp<int64_t>(int64_t{task.n} * task.m / kArea, 1, most));
}
int64_t GeneralAtOnce(const DeviceInfo& device, const Task& task) {
  return int64_t{std::max(device.sm_count, 1)} * (kGeneralThreadsAtOnce / GeneralThreads(task));
}

// ---- Blocks and workspace -------------------------------------------------------------------------------------------
// Blocks for `warps` warps' worth of members: four of them a block or, where those are more than `most` times what the
// device runs at a time, `times` as many as it does.
int32_t BlocksFor(int64_t warps, int64_t at_a_time, int64_t most = 2, int64_t times = 1) {
  const int64_t blocks = (warps + kBlockWarps - 1) / kBlockWarps;
  return static_cast<int32_t>(blocks <= most * at_a_time ? blocks : times * at_a_time);
}

// Of members that are held on the chip. False: the device cannot.
bool ShapePlanned(const MemberPlan& plan, const Task& task, Shape* shape) {
  if (plan.at_a_time == 0) return false;
  shape->size = plan.size;
  shape->ranks = plan.ranks;
  shape->redo_bytes = Padded(4 * task.count);
  shape->first_slot_bytes = plan.slot_bytes;
  shape->shared_bytes = plan.shared_bytes;
  int64_t members = std::min(task.count, plan.at_a_time);
  if (plan.slot_bytes > 0) {
    members = std::clamp<int64_t>(4 * kWorkspaceLimit / (plan.slot_bytes * plan.ranks), 1, members);
  }
  shape->blocks = static_cast<int32_t>(members * plan.ranks);
  return true;
}
// Where the device cannot hold it, kernel becomes another.
void ShapeHeld(const DeviceInfo& device, const Task& task, Shape* shape) {
  if (ShapePlanned(HeldPlanOf(device.index, device.sm_count, task), task, shape)) return;
  shape->kernel = Kernel::kStream;
}
void ShapeStream(const DeviceInfo& device, const Task& task, Shape* shape) {
  if (task.implicit) {
    shape->then_general = true;
    shape->plan_bytes = Padded(task.count * task.n * task.m * static_cast<int64_t>(sizeof(float)));
  }
  if (IsSpreadSize(task.rows, task.cols) &&
      ShapePlanned(SpreadPlanOf(device.index, device.sm_count, task), task, shape)) {
    return;
  }
  if (!IsStreamSize(task.rows, task.cols)) {
    *shape = Shape();  // The general kernel does it all.
    return;
  }
  shape->size = StreamIndex(task.rows, task.cols);
  // Where K does not fit into shared memory, the next larger matrices' kernel reads it from L2.
  if (StreamSharedBytes(shape->size, task.rows) + kStaticSharedBytes > SharedBytes(device)) ++shape->size;
  shape->redo_bytes = Padded(4 * task.count);
  shape->redo_members = 1;
  shape->first_slot_bytes = StreamSlotBytes(shape->size, task);
  shape->shared_bytes = StreamSharedBytes(shape->size, task.rows);
  shape->blocks =
      static_cast<int32_t>(std::min({task.count, int64_t{std::max(device.sm_count, 1)} * kStreamBlocks[shape->size],
                                     std::max<int64_t>(4 * kWorkspaceLimit / shape->first_slot_bytes, 1)}));
}

// Of kPlain and kTiles.
void ShapeTiles(const DeviceInfo& device, const Task& task, Shape* shape) {
  const bool plain = shape->kernel == Kernel::kPlain;
  const int side = std::max(task.n, task.m);
  const int64_t multiprocessors = std::max(device.sm_count, 1);
  const Work work = task.unrolled ? Work::kUnrolled : task.implicit ? Work::kImplicit : Work::kForward;
  shape->size = plain ? PlainIndex(side, work != Work::kForward) : TileIndex(side);
  shape->padded = !plain || side != kPlainSides[shape->size];
  shape->redo_members = plain ? PlainMembers(shape->size, work, task.softmax) : kWarpMembers[shape->size];
  const int64_t warps = (task.count + shape->redo_members - 1) / shape->redo_members;
  shape->redo_bytes = Padded(4 * warps);
  int64_t at_a_time = multiprocessors * 5;
  if (task.unrolled) {
    const int64_t history =
        plain ? PlainHistoryBytes(shape->size, task.iterations) : HistoryBytes(shape->size, task.iterations);
    const int64_t room = SharedBytes(device) - kStaticSharedBytes - (side > 16 ? 64 << 10 : 40 << 10);  // Buffers.
    shape->first_slot_bytes = plain ? PlainWaitingBytes(shape->size, task.iterations) : 0;
    if (history <= std::min(SharedHistoryBytes(), room)) {
      shape->shared_bytes = history;
    } else {
      shape->first_slot_bytes += history;
    }
    if (shape->first_slot_bytes > 0) {
      at_a_time = std::clamp<int64_t>(4 * kWorkspaceLimit / shape->first_slot_bytes, 1, multiprocessors * 4);
    }
  }
  if (plain) {
    const PlainKind kind = {work, IsShort(task), shape->padded, task.softmax ? Lead::kSoftmax : Lead::kRows};
    const int64_t fitting = multiprocessors * PlainBlocks(shape->size, kind, shape->shared_bytes);
    at_a_time = shape->first_slot_bytes > 0 ? std::min(at_a_time, fitting) : fitting;
  }
  // A warp each while there is a multiprocessor for each.
  if (warps <= multiprocessors) {
    shape->blocks = static_cast<int32_t>(warps);
  } else if (!plain) {
    shape->blocks = BlocksFor(warps, at_a_time);
  } else {  // Warps that begin together do not end together: others come in where some have ended.
    shape->blocks = task.unrolled   ? BlocksFor(warps, at_a_time, 4, 2)
                    : task.implicit ? BlocksFor(warps, at_a_time, 4)
                                    : BlocksFor(warps, at_a_time, 8, 4);
  }
  if (shape->first_slot_bytes > 0) shape->blocks = static_cast<int32_t>(std::min<int64_t>(shape->blocks, at_a_time));
  if (plain || !task.implicit) return;
  shape->plan_bytes = Padded(task.count * task.n * task.m * static_cast<int64_t>(sizeof(float)));
  const int64_t members = kWarpMembers[TileIndex(side)];
  shape->backward_blocks = BlocksFor((task.count + members - 1) / members, multiprocessors * (side <= 8 ? 5 : 4));
}

Shape ShapeOf(const DeviceInfo& device, const Problem& problem, const Task& task) {
  Shape shape;
  shape.kernel = KernelOf(problem, task);
  if (shape.kernel == Kernel::kHeld) ShapeHeld(device, task, &shape);
  if (shape.kernel == Kernel::kStream) ShapeStream(device, task, &shape);
  shape.general_ranks = GeneralRanks(device, task);
  shape.slot_bytes = GeneralSlotBytes(task, shape.general_ranks);
  const int64_t multiprocessors = std::max(device.sm_count, 1);
  const bool general = shape.kernel == Kernel::kGeneral || shape.then_general;
  // Few of the registers kernel's members need it.
  const int64_t most = shape.general_ranks > 1 ? GeneralAtOnce(device, task) / shape.general_ranks
                       : general ? multiprocessors * (GeneralThreads(task) <= 128 ? 8 : kSlotsPerMultiprocessor)
                                 : 64;
  const int64_t fitting = std::max<int64_t>((general ? kWorkspaceLimit : kWorkspaceLimit / 8) / shape.slot_bytes, 1);
  shape.general_blocks = static_cast<int32_t>(std::min({task.count, most, fitting})) * shape.general_ranks;
  if (shape.kernel == Kernel::kPlain || shape.kernel == Kernel::kTiles) ShapeTiles(device, task, &shape);
  return shape;
}

// ---- Predictions ----------------------------------------------------------------------------------------------------
double GeneralSeconds(const Task& task, int ranks, bool has_plan) {
  // Measured on an H200: exponentials, a warp's rows one after the other, groups of columns, and, of teams, meetings.
  const double area = static_cast<double>(task.n) * task.m, rows = task.rows, cols = task.cols;
  const double block = GeneralThreads(task), threads = block * ranks;
  const double pass = (ranks > 1 ? 4e-6 : 1e-6) + 0.25e-6 * area / threads +
                      0.5e-6 * std::max(1.0, 32 * rows / threads) + 0.3e-6 * std::ceil(std::ceil(cols / 32) / ranks);
  double passes = 4;
  if (task.forward && !has_plan) passes += 2.0 * (task.exact ? std::min(task.iterations, 8) : task.iterations);
  if (task.unrolled) passes += 2.0 * task.iterations;
  if (task.implicit) passes += 16;
  double seconds = passes * pass;
  if (task.exact) {
    seconds +=
        4 * (task.cols <= kDenseColumns ? cols * 3e-6 + cols * cols * (rows + cols / 3) * 4e-9 / block : 6 * pass);
  }
  return seconds;
}

// Of the kernels that iterate in float32.
double FirstSeconds(const DeviceInfo& device, const Shape& shape, const Task& task) {
  if (shape.kernel == Kernel::kHeld) {
    const double rounds = std::ceil(static_cast<double>(task.count) * shape.ranks / shape.blocks);
    // Measured on an H200, starts and ends too: tests/bench/results/gpu_normalization.md.
    const double iteration = shape.size == 0 ? 0.8e-6 : shape.size == 1 ? 1.35e-6 : 2.7e-6;
    const double passes = task.unrolled   ? 3.0 * task.iterations
                          : task.implicit ? task.iterations + 10.0
                                          : task.iterations;
    return 1e-5 + rounds * (passes * iteration + (task.unrolled ? 60e-6 : task.implicit ? 40e-6 : 20e-6));
  }
  if (shape.kernel == Kernel::kStream && shape.size >= kSpreadIndex) {
    const double rounds = std::ceil(static_cast<double>(task.count) * shape.ranks / shape.blocks);
    // Measured on an H200: an exchange, a warp's rows; in a start and an end those take more.
    constexpr int kWarpsOfBlock = 8;
    const double rows = std::ceil(static_cast<double>(task.rows) / shape.ranks / kWarpsOfBlock);
    const double lane_columns = 2 << (shape.size - kSpreadIndex);
    const double iteration = 1.7e-6 + rows * (0.01e-6 + 0.004e-6 * lane_columns);
    const double ends = 20e-6 + rows * (1e-6 + 0.14e-6 * lane_columns);
    return 1e-5 + rounds * ((task.unrolled ? 4.5 : 1) * task.iterations * iteration + (task.unrolled ? 2 : 1) * ends);
  }
  if (shape.kernel == Kernel::kStream) {
    const bool tall = shape.size >= kTallIndex;
    const int size = tall ? shape.size - kTallIndex : shape.size;
    const double area = static_cast<double>(task.rows) * (64 << size);
    const double rounds = std::ceil(static_cast<double>(task.count) / shape.blocks);
    // Where the matrix is read from memory each time it is memory's rate; a start and an end cost about six iterations.
    const double iteration = 1.5e-6 + area / (size > 2 || tall ? 9e9 : 32e9) * (size > 1 || tall ? 1 : .25);
    return 1e-5 + rounds * ((task.unrolled ? 3 : 1) * task.iterations + 6) * iteration;
  }
  const double side = shape.kernel == Kernel::kPlain ? kPlainSides[shape.size] : 4 << shape.size, area = side * side;
  const double factor = (shape.kernel == Kernel::kPlain ? 1 : 1.5) * (task.unrolled ? 3.2 : task.implicit ? 2.5 : 1);
  const double lanes = 128.0 * std::max(device.sm_count, 1) * 1.7e9;
  const double work = static_cast<double>(task.count) * area * (3.0 * task.iterations * factor + 20) / lanes;
  const double alone = task.iterations * 80e-9 * factor;
  return 3e-6 + std::max(work, alone) + static_cast<double>(task.count) * area * 8 / 3e12;
}

double Seconds(const DeviceInfo& device, const Shape& shape, const Task& task) {
  const bool general = shape.kernel == Kernel::kGeneral;
  const double first = general ? 5e-6 : FirstSeconds(device, shape, task);
  if (!general && !shape.then_general) return first;
  const double rounds = std::ceil(static_cast<double>(task.count) / shape.general_slots());
  return first + rounds * GeneralSeconds(task, shape.general_ranks, shape.then_general);
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
