// The course of a member that is held on the chip, and the kernel.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_CUH_

#include <type_traits>

#include "kernels/cuda/normalization_held_implicit.cuh"
#include "kernels/cuda/normalization_held_unrolled.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template <class Shape, Work kWork, Lead kLead>
using HeldOf = std::conditional_t<
    kWork == Work::kUnrolled, HeldUnrolled<Shape, kLead>,
    std::conditional_t<kWork == Work::kImplicit, HeldImplicit<Shape, kLead>, HeldForward<Shape, kWork, kLead>>>;

template <class Shape, Work kWork, Lead kLead>
class Held : private HeldOf<Shape, kWork, kLead> {
  using Base = HeldOf<Shape, kWork, kLead>;
  using Base::C;
  using Base::kBackward;
  using Base::kColumnsFirst;
  using Base::kImplicit;
  using Base::kUnrolled;
  using Base::member_;
  using Base::rank_;
  using Base::task_;

 public:
  __device__ Held(const Task& task, float* slot, uint64_t (&barriers)[kHeldBarriers], int rank, int ranks)
      : Base(task, slot, barriers, rank, ranks) {}

  // `tally`: in shared memory.
  __device__ void Solve(int64_t member, LaneTally* tally) {
    member_ = member;
    bool safe = this->template Start<kLead>();
    if constexpr (kBackward) this->BeginStream();
    const float col_error = this->Iterate(&safe);
    float row_bar = 0, col_bars[C];
    const float row_error = this->FinishForward(&row_bar, col_bars);
    if constexpr (kImplicit) safe = this->SolveImplicit(row_bar, col_bars) && safe;
    this->KeepTotals(row_error, col_error, safe);
    bool finite = true;
    if constexpr (kUnrolled) {
      this->Reverse(row_bar, col_bars);
      finite = this->FinishGradient();
    } else if constexpr (kImplicit) {
      finite = this->FinishImplicit();
    }
    const float4 totals = this->MemberTotals(finite);
    if (rank_ == 0 && threadIdx.x == 0) {
      const bool good = totals.z == 0 && totals.x + totals.y < FLT_MAX;
      task_.redo[member] = good ? 0 : 1;
      if (!good) tally->flags |= Tally::kRedo;
      if (good && totals.w != 0) tally->flags |= Tally::kNotFinite;
      // Where columns come first Certify takes them for rows.
      const float first_error = kColumnsFirst ? totals.y : totals.x, second_error = kColumnsFirst ? totals.x : totals.y;
      if (good) Certify(task_, member, true, first_error, second_error, task_.iterations, tally);
    }
    __syncthreads();  // Shared memory and the slot are free.
  }
};

template <class Shape, Work kWork, Lead kLead>
__global__ void __launch_bounds__(Shape::kThreadCount, Shape::kThreadCount == 128 ? 3 : 1)
    HeldKernel(const __grid_constant__ LaunchOf launch) {
#if __CUDA_ARCH__ >= 900
  constexpr bool kRuns = true;
#else
  constexpr bool kRuns = kHeldBeforeHopper<Shape>;
#endif
  if constexpr (kRuns) {
    __shared__ Task task;
    __shared__ uint64_t barriers[kHeldBarriers];
    const int block = LoadTask(launch, &task);
    const int ranks = Shape::kCluster ? task.ranks : 1, rank = block % ranks, clusters = task.blocks / ranks;
    __shared__ LaneTally tally;  // Thread 0's; registers have no room for it.
    if (threadIdx.x == 0) tally = LaneTally();
    Held<Shape, kWork, kLead> held(task, reinterpret_cast<float*>(task.workspace + task.slot_bytes * block), barriers,
                                   rank, ranks);
    for (int64_t member = task.first + block / ranks; member < task.last; member += clusters)
      held.Solve(member, &tally);
    if constexpr (Shape::kCluster) SyncCluster();  // Nobody sends to a block that is gone.
    if (threadIdx.x == 0) StoreTally(task, block, tally.rows, tally.cols, tally.iterations, tally.flags);
  }
}

template <class Shape, Lead kLead>
HeldFunction HeldKernelOf(Work work) {
  return work == Work::kImplicit   ? HeldKernel<Shape, Work::kImplicit, kLead>
         : work == Work::kUnrolled ? HeldKernel<Shape, Work::kUnrolled, kLead>
                                   : HeldKernel<Shape, Work::kForward, kLead>;
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_CUH_
