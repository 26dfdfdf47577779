#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/normalization_exact.cuh"
#include "kernels/cuda/normalization_kernels.h"

namespace sinkhorn {
namespace cuda {
namespace normalization {
namespace {

// Whether it is one that another kernel could not hold.
__device__ bool IsRedone(const Task& task, int64_t member) {
  return task.redo[member / task.redo_members] >> member % task.redo_members & 1;
}

// False: it has left, and *progress says where. `progress`: in shared memory.
__device__ __noinline__ bool SolveMember(const Task& task, Block& block, const GeneralMemory& memory, int64_t index,
                                         unsigned long long left_at, Progress* progress, Tally* tally) {
  Member member{task, Io(task, index), memory, block, progress, left_at, General()};
  if (!progress->started) LoadMarginals(&member);
  const bool has_plan = task.has_plans && !IsRedone(task, index);  // And the other kernel has certified it.
  if (!task.forward || has_plan) {
    TakeGivenPlan(&member);
  } else {
    if (!progress->started) StartMatrix(&member);
    if (!(task.exact ? SolveExactly(&member) : Iterate(&member))) return false;
    if (!task.exact) FinishForward(&member);
  }
  if (task.unrolled) ReverseSteps(&member);
  if (task.implicit) ReverseImplicit(&member);
  if (task.unrolled || task.implicit) FinishGradient(&member);
  block.Sync();  // The slot is free, and progress has been read.

  if (threadIdx.x == 0) *progress = {index + 1, false, false, 0, 0, 0, 0};
  if (block.thread != 0) return true;
  const General& result = member.result;
  if (has_plan) {
    if (!result.finite) tally->flags |= Tally::kNotFinite;
    return true;
  }
  const double a = task.transposed ? result.col_error : result.row_error;
  const double b = task.transposed ? result.row_error : result.col_error;
  StoreConvergence(task, index, result.iterations, a, b, result.converged, result.reason);
  tally->error_a = fmax(tally->error_a, a);
  tally->error_b = fmax(tally->error_b, b);
  tally->iterations = max(tally->iterations, result.iterations);
  tally->flags |= Tally::kAny | (result.finite ? 0u : Tally::kNotFinite) |
                  (result.converged ? 0u : Tally::kNotConverged) |
                  (result.reason == StopReason::kMaxIterations ? Tally::kStoppedByLimit
                   : result.reason == StopReason::kPrecision   ? Tally::kStoppedByPrecision
                   : result.reason == StopReason::kNotIterated ? Tally::kNotIterated
                                                               : 0u);
  return true;
}

__global__ void __launch_bounds__(32 * kBlockWarpsMax) GeneralKernel(const __grid_constant__ LaunchOf launch) {
  __shared__ Task task;
  __shared__ BlockMemory block_memory;
  __shared__ bool wanted[32 * kBlockWarpsMax];
  __shared__ Progress progress;
  const int index = LoadTask(launch, &task), slot = index / task.ranks, slots = task.blocks / task.ranks;
  const unsigned long long left_at = GlobalNanoseconds() + task.budget_ns;
  GeneralMemory memory;
  memory.Carve(task, task.workspace + slot * task.slot_bytes);
  memory.team.arrivals = task.arrivals + slot;
  Block block(&block_memory, memory.team, index % task.ranks, task.ranks);
  if (threadIdx.x == 0) {
    progress = task.resumes ? *memory.progress : Progress{};
    block_memory.arrived = 0;
  }
  Tally tally{};
  bool left = false;
  // As many of the slot's members at a time as a block has threads: are they wanted?
  const int together = blockDim.x;
  for (int64_t begin = task.first + slot; begin < task.last && !left; begin += int64_t{slots} * together) {
    const int64_t mine = begin + int64_t{threadIdx.x} * slots;
    __syncthreads();  // The flags are free.
    wanted[threadIdx.x] =
        mine < task.last && mine >= progress.member && (task.redo == nullptr || task.has_plans || IsRedone(task, mine));
    __syncthreads();  // The flags are there.
    for (int k = 0; k < together && !left; ++k) {
      if (!wanted[k]) continue;
      left = !SolveMember(task, block, memory, begin + int64_t{k} * slots, left_at, &progress, &tally);
      __syncthreads();  // Progress is there.
    }
  }
  if (block.thread != 0) return;
  if (left) tally.flags |= Tally::kLeft;
  *memory.progress = progress;
  task.tallies[slot] = tally;
}

}  // namespace

int64_t GeneralSlotBytes(const Task& task, int ranks) {
  Task of_team = task;
  of_team.ranks = ranks;
  return GeneralMemory().Carve(of_team, nullptr);
}

cudaError_t LaunchGeneral(const LaunchOf& launch, int ranks, int blocks, int threads, cudaStream_t stream) {
  if (ranks > 1) {
    AttributedLaunch together(GeneralKernel, blocks, threads, 0, stream);
    together.Add(Together());
    together.Enqueue(GeneralKernel, launch);
  } else {
    LaunchKernel(GeneralKernel, blocks, threads, 0, stream, launch);
  }
  return TakeLaunchError();
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
