// Steps of Hessian-vector products as sums of two halves, for the matrix units, and the scales that keep them, and what
// they bend, within a half's range.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_cloud.cuh"
#include "kernels/cuda/transport_hessian.cuh"
#include "kernels/cuda/transport_launch.h"

namespace sinkhorn {
namespace cuda {
namespace {

constexpr int kBlockPoints = 64;

// A power of two for each direction, of x and of y alike: steps are at most 64 then. One block.
__global__ void __launch_bounds__(kThreads) StepScaleKernel(LaunchTable table) {
  __shared__ double scratch[kMostWarps];
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int64_t q = work.block % job.in.hessian.count;
  const Member member{job, work.block / job.in.hessian.count};
  double largest = 0;
  for (int measure = 0; measure < 2; ++measure) {
    const Steps steps = StepsOf(member, measure, q);
    const int64_t size = steps.data == nullptr ? 0 : int64_t{job.size[measure]} * job.dim;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < size; i += kThreads) largest = fmax(largest, fabs(steps.At<double>(i)));
  }
  largest = BlockMax(largest, scratch);
  if (threadIdx.x == 0) StepScales(member)[q] = largest > 0 && isfinite(largest) ? ldexp(1.0, 5 - ilogb(largest)) : 1;
}

// Of a measure, padding included as far as kernels read.
__host__ __device__ int64_t SplitBlocksOf(const Job& job, int measure) {
  return CeilDiv(job.size[measure], kCloudTile) * (kCloudTile / kBlockPoints);
}

// As points are split in transport_prepare_points.cuh. A thread makes chunks of 8 coordinates.
__global__ void __launch_bounds__(kThreads) StepSplitKernel(LaunchTable table) {
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int64_t of_x = SplitBlocksOf(job, 0), blocks = of_x + SplitBlocksOf(job, 1), count = job.in.hessian.count;
  const int64_t block = work.block % blocks, q = work.block / blocks % count;
  const Member member{job, work.block / blocks / count};
  const int measure = block < of_x ? 0 : 1, dim = job.dim, planes = PlanesOf(job);
  const int64_t first = (measure == 0 ? block : block - of_x) * kBlockPoints;
  const Steps steps = StepsOf(member, measure, q);
  const double scale = StepScales(member)[q];
  const int row_bytes = CloudRowBytes(dim), chunks = row_bytes / 16, plane_bytes = kCloudTile * row_bytes;
  char* out = StepHalvesOf(member, measure, q);
  for (int e = threadIdx.x; e < kBlockPoints * chunks; e += kThreads) {
    const int chunk = e % chunks;
    const int64_t i = first + e / chunks;
    alignas(16) __half high[8], low[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const int k = chunk * 8 + c;
      const bool there = k < dim && i < job.size[measure] && steps.data != nullptr;
      const float value = there ? static_cast<float>(steps.At<double>(i * dim + k) * scale) : 0;
      high[c] = __float2half_rn(value);
      low[c] = __float2half_rn(value - __half2float(high[c]));
    }
    char* to =
        out + i / kCloudTile * planes * plane_bytes + SwizzledAt(static_cast<int>(i % kCloudTile), chunk, row_bytes);
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(high);
    if (planes == 2) *reinterpret_cast<uint4*>(to + plane_bytes) = *reinterpret_cast<const uint4*>(low);
  }
}

// How large potentials are. One block a direction of an engine.
__global__ void __launch_bounds__(kThreads) PotentialBoundKernel(LaunchTable table) {
  __shared__ double scratch[kMostWarps];
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int64_t count = job.in.hessian.count, q = work.block % count;
  const int engine = static_cast<int>(work.block / count % job.engines);
  const Member member{job, work.block / count / job.engines};
  if (!HasProducts(job, engine) || !AreDone(member)) return;
  const ProductVectors v = VectorsOf(member, engine);
  double bound = 0;
  for (int side = 0; side < 2; ++side) {
    double largest = 0;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < v.size[side]; i += kThreads) {
      largest = fmax(largest, fabs(v.potential(side, q)[i]));
    }
    bound += BlockMax(largest, scratch);
  }
  if (threadIdx.x == 0) v.states[q].largest = bound;
}

}  // namespace

int64_t StepScaleBlocks(const Job& job) { return job.in.hessian.count; }
int64_t StepSplitBlocks(const Job& job) {
  return job.in.hessian.count * (SplitBlocksOf(job, 0) + SplitBlocksOf(job, 1));
}
int64_t PotentialBoundBlocks(const Job& job) { return job.in.hessian.count * job.engines; }

void LaunchStepScale(const LaunchTable& table, int64_t blocks, cudaStream_t stream) {
  LaunchKernel(StepScaleKernel, blocks, kThreads, 0, stream, table);
}
void LaunchStepSplit(const LaunchTable& table, int64_t blocks, cudaStream_t stream) {
  LaunchKernel(StepSplitKernel, blocks, kThreads, 0, stream, table);
}
void LaunchPotentialBound(const LaunchTable& table, int64_t blocks, cudaStream_t stream) {
  LaunchKernel(PotentialBoundKernel, blocks, kThreads, 0, stream, table);
}

}  // namespace cuda
}  // namespace sinkhorn
