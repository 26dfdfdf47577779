// What the normalisation kernels are told: a problem as plain numbers and device addresses, and the tally they leave.
//
// Kernels scale the rows of their matrix first and its columns second. Recipes that start with columns are solved on
// the transpose: `transposed` says so; `rows` and `cols` are the kernel's, `n` and `m` those of P (dustbin included).
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_TASK_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_TASK_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "kernels/problem.h"

namespace sinkhorn {
namespace cuda {
namespace normalization {

// What a block says of the members that it solved: the worst of each.
struct Tally {
  enum : uint32_t {
    kAny = 1,             // It solved some.
    kNotFinite = 2,       // A result is not finite.
    kNotConverged = 4,    // An error is above the tolerance.
    kStoppedByLimit = 8,  // StopReason::kMaxIterations
    kStoppedByPrecision = 16,
    kRedo = 32,  // Some members' range of values is beyond the kernel: see `redo`.
    kNotIterated = 64,
    kLeft = 128,  // Others are for launches to come: Task::budget_ns.
  };
  double error_a, error_b;
  int32_t iterations;
  uint32_t flags;
  uint64_t unused;
};

struct Tensor {
  const void* data;
  DType dtype;
  bool shared;
};
struct Output {
  void* data;
  DType dtype;
};

struct Task {
  Tensor logits, row_marginals, column_marginals, dustbin, cotangent, given_plan;
  Output plan, row_sums, column_sums, gradient, dustbin_gradient;
  Output plan_copy;  // P in float32 for the kernel that goes on with implicit modes; or none.
  Convergence* convergence;

  int64_t count;        // Members.
  int64_t first, last;  // Those of this launch.
  int32_t n, m;         // P's
  int32_t rows, cols;   // The kernel's.
  int32_t iterations;
  int32_t blocks;  // That share the members of this launch,
  int32_t ranks;   // so many of them a member.
  bool has_dustbin, transposed, softmax, exact, forward, unrolled, implicit;
  bool own_marginals;  // Members may have different ones.
  Guard guard;
  BackwardMode backward;
  double offset, guard_value, floor;  // No floor: the lowest double.
  double tolerance;
  float floor32, tolerance32;  // The same, rounded.

  Tally* tallies;        // [blocks], host-visible
  uint32_t* redo;        // A bit per member that the registers kernel could not hold; null: all are to be solved.
  int64_t redo_members;  // Of a word of `redo`.
  char* workspace;       // A slot for each block; of the general kernel, for each member under way.
  int64_t slot_bytes;
  unsigned* arrivals;  // Of the general kernel's members under way, one each, 0 at first; of one block each: null.
  int64_t budget_ns;  // After which blocks of the general kernel leave the member that they are at, between iterations.
  bool has_plans;     // given_plan has P of the members whose bits in `redo` are not set.
  bool resumes;       // They go on where they left in the launch before, which was of the same members and blocks.
};

// A block's part of a launch.
struct BlockOf {
  int32_t task, block;
};

// Many problems: `tasks` and `blocks` in device memory. Few: in the kernel's own parameters, one's blocks after the
// other's; those that are not there have none.
constexpr int kFew = 4;
struct LaunchOf {
  const Task* tasks;
  const BlockOf* blocks;
  Task few[kFew];
  bool independent;      // Shares nothing with the launch before in the stream, and need not wait for it.
  bool lets_next_begin;  // At once, not when blocks are about to end.
};

#ifdef __CUDACC__
// Copies the block's task to `*task` (shared memory) and returns which of its blocks this one is.
__device__ inline int LoadTask(const LaunchOf& launch, Task* task) {
  static_assert(sizeof(Task) % 8 == 0, "copied in words");
  constexpr int kWords = sizeof(Task) / 8;
  uint64_t* to = reinterpret_cast<uint64_t*>(task);
  int block = blockIdx.x;
  if (launch.tasks == nullptr) {  // Straight from the constant bank.
    int which = 0;
    for (; block >= launch.few[which].blocks; ++which) block -= launch.few[which].blocks;
    const uint64_t* from = reinterpret_cast<const uint64_t*>(launch.few + which);
    for (int k = threadIdx.x; k < kWords; k += blockDim.x) to[k] = from[k];
  } else {
    const BlockOf mine = launch.blocks[blockIdx.x];
    block = mine.block;
    const uint64_t* from = reinterpret_cast<const uint64_t*>(launch.tasks + mine.task);
    for (int k = threadIdx.x; k < kWords; k += blockDim.x) to[k] = from[k];
  }
  __syncthreads();
  return block;
}

template <class T>
__device__ inline T LoadAs(DType dtype, const void* data, int64_t at) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<T>(static_cast<const float*>(data)[at]);
    case DType::kFloat64:
      return static_cast<T>(static_cast<const double*>(data)[at]);
    case DType::kFloat16:
      return static_cast<T>(__half2float(static_cast<const __half*>(data)[at]));
    case DType::kBFloat16:
      return static_cast<T>(__bfloat162float(static_cast<const __nv_bfloat16*>(data)[at]));
  }
  return T(0);
}

__device__ inline __half ToHalf(float x) { return __float2half_rn(x); }
__device__ inline __half ToHalf(double x) { return __double2half(x); }
__device__ inline __nv_bfloat16 ToBFloat16(float x) { return __float2bfloat16_rn(x); }
__device__ inline __nv_bfloat16 ToBFloat16(double x) { return __double2bfloat16(x); }

template <class T>
__device__ inline void StoreAs(DType dtype, void* data, int64_t at, T value) {
  switch (dtype) {
    case DType::kFloat32:
      static_cast<float*>(data)[at] = static_cast<float>(value);
      return;
    case DType::kFloat64:
      static_cast<double*>(data)[at] = static_cast<double>(value);
      return;
    case DType::kFloat16:
      static_cast<__half*>(data)[at] = ToHalf(value);
      return;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(data)[at] = ToBFloat16(value);
      return;
  }
}

__device__ inline void StoreConvergence(const Task& task, int64_t member, int iterations, double error_a,
                                        double error_b, bool converged, StopReason reason) {
  if (task.convergence == nullptr) return;
  // In words, the padding included: initcheck sees it copied.
  static_assert(sizeof(Convergence) == 32 && sizeof(StopReason) == 1, "see the words below");
  static_assert(offsetof(Convergence, converged) == 4 && offsetof(Convergence, marginal_error_a) == 8, "likewise");
  static_assert(offsetof(Convergence, marginal_error_b) == 16 && offsetof(Convergence, stop_reason) == 24, "likewise");
  ulonglong2* to = reinterpret_cast<ulonglong2*>(task.convergence + member);
  to[0] = make_ulonglong2(static_cast<uint32_t>(iterations) | (converged ? 1ull << 32 : 0ull),
                          __double_as_longlong(error_a));
  to[1] = make_ulonglong2(__double_as_longlong(error_b), static_cast<uint64_t>(reason));
}
#endif  // __CUDACC__

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_TASK_CUH_
