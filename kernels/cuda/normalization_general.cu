#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/normalization_exact.cuh"
#include "kernels/cuda/normalization_kernels.h"

namespace sinkhorn {
namespace cuda {
namespace normalization {
namespace {

__device__ void SolveMember(const Task& task, Block& block, const GeneralMemory& memory, int64_t index, Tally* tally) {
  Member member{task, Io(task, index), memory, block, General()};
  LoadMarginals(&member);
  if (!task.forward) {
    TakeGivenPlan(&member);
  } else {
    StartMatrix(&member);
    if (task.exact) {
      SolveExactly(&member);
    } else {
      Iterate(&member);
      FinishForward(&member);
    }
  }
  if (task.unrolled) ReverseSteps(&member);
  if (task.implicit) ReverseImplicit(&member);
  if (task.unrolled || task.implicit) FinishGradient(&member);
  __syncthreads();  // The slot is free.

  if (block.thread != 0) return;
  const General& result = member.result;
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
}

__global__ void __launch_bounds__(32 * kBlockWarpsMax) GeneralKernel(const __grid_constant__ LaunchOf launch) {
  __shared__ Task task;
  __shared__ BlockMemory block_memory;
  __shared__ bool wanted[32 * kBlockWarpsMax];
  const int index = LoadTask(launch, &task);
  Block block(&block_memory);
  GeneralMemory memory;
  memory.Carve(task, task.workspace + index * task.slot_bytes);
  Tally tally{};
  // As many of the block's members at a time as it has threads: are they wanted?
  for (int64_t begin = task.first + index; begin < task.last; begin += int64_t{task.blocks} * block.threads) {
    const int64_t mine = begin + int64_t{block.thread} * task.blocks;
    __syncthreads();  // The flags are free.
    wanted[block.thread] = mine < task.last && (task.redo == nullptr ||
                                                (task.redo[mine / task.redo_members] >> mine % task.redo_members & 1));
    __syncthreads();  // The flags are there.
    for (int k = 0; k < block.threads; ++k) {
      if (wanted[k]) SolveMember(task, block, memory, begin + int64_t{k} * task.blocks, &tally);
    }
  }
  if (block.thread == 0) task.tallies[index] = tally;
}

}  // namespace

int64_t GeneralSlotBytes(const Task& task) { return GeneralMemory().Carve(task, nullptr); }

cudaError_t LaunchGeneral(const LaunchOf& launch, int blocks, int threads, cudaStream_t stream) {
  LaunchKernel(GeneralKernel, blocks, threads, 0, stream, launch);
  return TakeLaunchError();
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
