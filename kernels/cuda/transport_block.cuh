// A block of a transport kernel: where a member's data are, and how the block finds its work, adds up and arrives.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_BLOCK_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_BLOCK_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "kernels/cuda/native.cuh"
#include "kernels/cuda/transport_shape.cuh"

namespace sinkhorn {
namespace cuda {

// ---- Addresses ----------------------------------------------------------------------------------------------------

// A member's workspace.
struct Member {
  const Job& job;
  int64_t index;

  template <typename T>
  __device__ T* At(int64_t offset) const {
    return reinterpret_cast<T*>(job.workspace + index * job.at.bytes + offset);
  }
  __device__ EngineState* state(int engine) const { return At<EngineState>(job.at.state) + engine; }
  __device__ AndersonState* anderson() const { return At<AndersonState>(job.at.anderson); }
  __device__ double* mass(int side) const { return At<double>(job.at.mass[side]); }
  __device__ double* log_mass(int side) const { return At<double>(job.at.log_mass[side]); }
  __device__ double* phi(int engine, int parity, int side) const {
    return At<double>(job.at.phi[engine][parity][side]);
  }
  __device__ double* ratio(int engine, int side) const { return At<double>(job.at.ratio[engine][side]); }
  __device__ BlockStats* stats(int engine, int side) const { return At<BlockStats>(job.at.stats[engine][side]); }

  // The part of shifts that whole distances lack too; null: none.
  __device__ const double* Linear(int engine, int side) const {
    if (engine == 0) return At<double>(job.at.linear[side]);
    return IsNegativeDot(job) ? At<double>(job.at.self_linear[MeasureOf(engine, side)]) : nullptr;
  }
  // What is added to phi to get the potential: `distance` says whether z holds whole distances or products.
  __device__ double Shift(int engine, int side, int i, bool distance) const {
    if (job.dense) return 0;
    const double* all = Linear(engine, side);
    const double linear = all != nullptr ? all[i] : 0;
    return distance ? linear : linear + At<double>(job.at.norm2[MeasureOf(engine, side)])[i];
  }
  __device__ double Shift(int engine, int side, int i) const {
    return Shift(engine, side, i, job.precision == Precision::kDouble);
  }
};

// Whether all that was asked for was stored before others of a looped job went on in another way.
__device__ inline bool IsStored(const Job& job, const EngineState& state) { return state.stored && !job.looped; }
// False where a slice enqueued the end of what turned out to need more, or of what is stored.
__device__ inline bool IsSolved(const Member& member) {
  if (IsStored(member.job, *member.state(0))) return false;
  for (int e = 0; e < member.job.engines; ++e) {
    if (!member.state(e)->stopped) return false;
  }
  return true;
}

__device__ inline double LoadDouble(DType dtype, const void* data, int64_t i) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(data)[i];
    case DType::kFloat64:
      return static_cast<const double*>(data)[i];
    case DType::kFloat16:
      return __half2float(static_cast<const __half*>(data)[i]);
    case DType::kBFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
  }
  return 0;
}
// The same to float: what is no double needs no double.
__device__ inline float LoadFloat(DType dtype, const void* data, int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[i];
  return static_cast<float>(LoadDouble(dtype, data, i));
}
template <typename T>
__device__ inline T LoadAs(DType dtype, const void* data, int64_t i) {
  if constexpr (sizeof(T) == sizeof(float)) return LoadFloat(dtype, data, i);
  return static_cast<T>(LoadDouble(dtype, data, i));
}
// Element i of a member's tensor of `size` elements.
__device__ inline double LoadInput(const TensorView& view, int64_t member, int64_t size, int64_t i) {
  return LoadDouble(view.dtype, view.data, (view.shared ? 0 : member * size) + i);
}
// use(the output's entries, as what they are).
template <typename Use>
__device__ inline void WithEntries(const OutputView& view, Use use) {
  switch (view.dtype) {
    case DType::kFloat32:
      return use(static_cast<float*>(view.data));
    case DType::kFloat64:
      return use(static_cast<double*>(view.data));
    case DType::kFloat16:
      return use(static_cast<__half*>(view.data));
    case DType::kBFloat16:
      return use(static_cast<__nv_bfloat16*>(view.data));
  }
}
__device__ inline void StoreDouble(double value, float* to) { *to = static_cast<float>(value); }
__device__ inline void StoreDouble(double value, double* to) { *to = value; }
__device__ inline void StoreDouble(double value, __half* to) { *to = __double2half(value); }
__device__ inline void StoreDouble(double value, __nv_bfloat16* to) { *to = __double2bfloat16(value); }
__device__ inline void StoreOutput(const OutputView& view, int64_t i, double value) {
  WithEntries(view, [&](auto* entries) { StoreDouble(value, entries + i); });
}

// Coordinate k of the gradient to point i: to the output; of cosines, where transport_directions.cu finds it.
__device__ inline void StoreGradient(const Member& member, int side, int64_t i, int64_t k, double value) {
  const Job& job = member.job;
  if (IsCosine(job)) {
    member.At<double>(job.at.gradient[side])[i * job.dim + k] = value;
    return;
  }
  const int64_t at = (member.index * job.size[side] + i) * job.dim + k;
  StoreOutput(GradientOf(job, side), at, value);
}

// ---- Blocks and their work ----------------------------------------------------------------------------------------

// A copy of a job in shared memory, which everything reads again and again. Barriers inside; all threads of a block
// call it, once.
__device__ inline Job& CopyJob(const Job& job) {
  alignas(16) __shared__ uint64_t words[sizeof(Job) / sizeof(uint64_t)];
  static_assert(sizeof(Job) % sizeof(uint64_t) == 0, "Job");
  const auto* from = reinterpret_cast<const uint64_t*>(&job);
  for (int k = threadIdx.x; k < static_cast<int>(sizeof(Job) / sizeof(uint64_t)); k += blockDim.x) words[k] = from[k];
  __syncthreads();
  return *reinterpret_cast<Job*>(words);
}

// The job of this block and the block's number within it. Barriers inside.
struct BlockWork {
  int job;
  int64_t block;
};
__device__ inline BlockWork FindWork(const LaunchTable& table, int64_t block) {
  if (table.job_count == 1) return {0, block};  // No wait for memory.
  __shared__ BlockWork found;
  for (int k = threadIdx.x; k < table.job_count; k += blockDim.x) {
    const int64_t first = table.first_block[k];
    if (first <= block && block < table.first_block[k + 1]) found = {k, block - first};
  }
  __syncthreads();
  return found;
}

// Adds up one value of each thread, always in the same order; every thread gets the sum. `neutral` changes none;
// `scratch`: a double for each warp.
template <typename Combine>
__device__ inline double BlockReduce(double value, double neutral, double* scratch, Combine combine) {
  const auto combine_lanes = [&] {
    for (int lane = 16; lane > 0; lane /= 2) value = combine(value, __shfl_xor_sync(0xffffffffu, value, lane));
  };
  combine_lanes();
  __syncthreads();  // What is there has been read.
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  value = threadIdx.x % 32 < blockDim.x / 32 ? scratch[threadIdx.x % 32] : neutral;
  combine_lanes();
  return value;
}
// Several at once, in place: sums, and the largest of others.
template <int kSums, int kMost>
__device__ inline void BlockReduce(double (&sums)[kSums], double (&most)[kMost]) {
  __shared__ double scratch[kMostWarps][kSums + kMost];
  const auto reduce = [&](auto sum_with, auto most_with) {
#pragma unroll
    for (int k = 0; k < kSums; ++k) sums[k] += sum_with(k, sums[k]);
#pragma unroll
    for (int k = 0; k < kMost; ++k) most[k] = fmax(most[k], most_with(k, most[k]));
  };
#pragma unroll 1
  for (int lane = 16; lane > 0; lane /= 2) {
    const auto other = [=](int, double value) { return __shfl_xor_sync(0xffffffffu, value, lane); };
    reduce(other, other);
  }
  __syncthreads();  // What is there has been read.
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int k = 0; k < kSums; ++k) scratch[threadIdx.x / 32][k] = sums[k];
#pragma unroll
    for (int k = 0; k < kMost; ++k) scratch[threadIdx.x / 32][kSums + k] = most[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kSums; ++k) sums[k] = 0;
#pragma unroll
  for (int k = 0; k < kMost; ++k) most[k] = -INFINITY;
#pragma unroll 1
  for (int warp = 0; warp < static_cast<int>(blockDim.x) / 32; ++warp) {
    reduce([&](int k, double) { return scratch[warp][k]; }, [&](int k, double) { return scratch[warp][kSums + k]; });
  }
}
__device__ inline double BlockSum(double value, double* scratch) {
  return BlockReduce(value, 0, scratch, [](double a, double b) { return a + b; });
}
__device__ inline double BlockMax(double value, double* scratch) {
  return BlockReduce(value, -INFINITY, scratch, [](double a, double b) { return fmax(a, b); });
}

// Counts the arrivals of `expected` blocks at a counter that is 0 before and after; true in the last one, which then
// sees what the others wrote before (past the first cache: __ldcg). By one thread, after a barrier, for all that the
// block wrote.
__device__ inline bool CountArrival(unsigned* counter, unsigned expected) {
  const bool last = CountUp(counter) + 1 == expected;
  if (last) *counter = 0;
  return last;
}
// The same by a block: all its threads call it.
__device__ inline bool LastToArrive(unsigned* counter, unsigned expected) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) last = CountArrival(counter, expected);
  __syncthreads();
  return last;
}
// At two counters at once; `other_expected` 0: at the first alone.
struct LastOf {
  bool first, second;
};
__device__ inline LastOf LastToArrive(unsigned* counter, unsigned expected, unsigned* other, unsigned other_expected) {
  __shared__ bool last[2];
  __syncthreads();
  if (threadIdx.x < 2) {
    const bool first = threadIdx.x == 0;
    const unsigned wanted = first ? expected : other_expected;
    last[threadIdx.x] = wanted > 0 && CountArrival(first ? counter : other, wanted);
  }
  __syncthreads();
  return {last[0], last[1]};
}

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_BLOCK_CUH_
