// Inputs to the workspace: points centred on their own mean, masses and their logarithms, first potentials, and from
// the data's ranges the arithmetic that each member needs.
//
// Step 0  cosines: points on the unit sphere
// Step 1  sums and ranges of chunks of points, ranges of chunks of costs, and copies of those that sweeps cannot read
// Step 2  centres and boxes of the clouds
// Step 3  points, as sums of two halves too (of lean jobs alone), norms, masses, potentials
// Step 4  states, and what lean jobs turn out to lack
//
// Each is a launch, for which a member has as many blocks as are of use; of many small members one launch does all.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_hopper.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_prepare_points.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

// kSquares: of jobs that IsSquared alone.
template <bool kSquares, int kStep>
__global__ void __launch_bounds__(kThreads, kStep == kRangesStep ? 3 : 4) PrepareKernel(LaunchTable table, int points) {
  AllowNextKernel();
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  AwaitKernelBefore();
  if constexpr (kStep == kStatesStep) {
    const Member member{job, work.block};
    PrepareStates<kSquares>(member);
    if (!kSquares || !job.lean) return;
    __syncthreads();  // The state is there.
    if (member.state(0)->mode != kFloat) RestorePoints(member);
  } else if constexpr (kStep == kCentresStep) {
    const int64_t of_side = CeilDiv(job.dim, kCentreLanes), rest = work.block % (2 * of_side);
    CentreOf(Member{job, work.block / (2 * of_side)}, rest < of_side ? 0 : 1, static_cast<int>(rest % of_side));
  } else {
    if (kStep == kRangesStep && job.dense) {
      const int64_t of_member = CostChunks(job);
      return RangeOfCosts(Member{job, work.block / of_member}, work.block % of_member);
    }
    int chunks[2];
    for (int side = 0; side < 2; ++side) {
      chunks[side] = kStep == kRangesStep   ? PointChunks(job, side) * Slices(job, side)
                     : kStep == kPointsStep ? PaddedPointBlocks(job, side, points)
                                            : SphereBlocks(job, side);
    }
    const int64_t of_member = chunks[0] + chunks[1];
    const Member member{job, work.block / of_member};
    const int64_t rest = work.block % of_member;
    const int side = rest < chunks[0] ? 0 : 1, chunk = static_cast<int>(side == 0 ? rest : rest - chunks[0]);
    if constexpr (kStep == kSphereStep) {
      NormalizePoints(member, side, chunk);
    } else if constexpr (kStep == kPointsStep) {
      PreparePoints<kSquares, 2>(member, side, chunk, points);
    } else {
      SumChunk<kSquares>(member, side, chunk);
    }
  }
}

// All steps of a member that is solved on the chip, one after the other. All of a side's points are one chunk.
template <bool kSquares>
__device__ void PrepareAll(const Member& member) {
  const Job& job = member.job;
  // step(side, block) for so many blocks of each side.
  const auto each = [](int of_first, int of_second, auto step) {
#pragma unroll 1
    for (int block = 0; block < of_first + of_second; ++block) {
      step(block < of_first ? 0 : 1, block < of_first ? block : block - of_first);
      __syncthreads();  // Shared memory is free, and what was written is there.
    }
  };
  if (!kSquares && IsCosine(job)) {
    each(SphereBlocks(job, 0), SphereBlocks(job, 1), [&](int side, int k) { NormalizePoints(member, side, k); });
  }
  if (job.dense) {
    each(static_cast<int>(CostChunks(job)), 0, [&](int, int k) { RangeOfCosts(member, k); });
  } else {
    each(Slices(job, 0), Slices(job, 1), [&](int side, int k) { SumChunk<kSquares>(member, side, k); });
  }
  // Halves are padded to whole tiles.
  const int written[2] = {WrittenPoints(job, 0, true), WrittenPoints(job, 1, true)};
  each((written[0] + kCloudTile - 1) / kCloudTile, (written[1] + kCloudTile - 1) / kCloudTile,
       [&](int side, int k) { PreparePoints<kSquares, kSquares ? 4 : 2>(member, side, k, kCloudTile); });
  PrepareStates<kSquares>(member);
  if (!kSquares || !job.lean) return;
  __syncthreads();
  if (member.state(0)->mode != kFloat) RestorePoints(member);
}

template <bool kSquares>
__global__ void __launch_bounds__(kThreads, 2) PrepareAllKernel(LaunchTable table) {
  AllowNextKernel();
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  AwaitKernelBefore();
  PrepareAll<kSquares>(Member{job, work.block});
}

template <bool kSquares>
void LaunchStep(const LaunchTable& table, int64_t blocks, int step, int points, cudaStream_t stream) {
  switch (step) {
    case kSphereStep:
      return LaunchNext(PrepareKernel<false, kSphereStep>, blocks, kThreads, 0, stream, table, points);
    case kRangesStep:
      return LaunchNext(PrepareKernel<kSquares, kRangesStep>, blocks, kThreads, 0, stream, table, points);
    case kCentresStep:
      return LaunchNext(PrepareKernel<true, kCentresStep>, blocks, kThreads, 0, stream, table, points);
    case kPointsStep:
      return LaunchNext(PrepareKernel<kSquares, kPointsStep>, blocks, kThreads, 0, stream, table, points);
    default:
      return LaunchNext(PrepareKernel<kSquares, kStatesStep>, blocks, kThreads, 0, stream, table, points);
  }
}

}  // namespace

bool MayPrepareAll(const Job& job) { return OnChipTiles(job) > 0; }

void LaunchPrepareAll(const LaunchTable& table, int64_t blocks, bool squares, cudaStream_t stream) {
  LaunchNext(squares ? PrepareAllKernel<true> : PrepareAllKernel<false>, blocks, kThreads, 0, stream, table);
}

int PreparedPoints(int64_t all) {
  constexpr int64_t kBlocksAtOnce = 4 * kProcessors;
  constexpr int kMost = 64;
  int points = kStatsPoints;
  while (points < kMost && all > kBlocksAtOnce * points) points *= 2;
  return points;
}

int64_t PrepareBlocks(const Job& job, int step, int points) {
  switch (step) {
    case kSphereStep:
      return IsCosine(job) ? SphereBlocks(job, 0) + SphereBlocks(job, 1) : 0;
    case kRangesStep:
      return job.dense ? CostChunks(job) : PointChunks(job, 0) * Slices(job, 0) + PointChunks(job, 1) * Slices(job, 1);
    case kCentresStep:
      return job.dense || PointChunks(job, 0) * PointChunks(job, 1) == 1 ? 0 : 2 * CeilDiv(job.dim, kCentreLanes);
    case kPointsStep:
      return PaddedPointBlocks(job, 0, points) + PaddedPointBlocks(job, 1, points);
    default:
      return 1;
  }
}

int64_t PreparedStats(const Job& job) {
  return (job.dense ? CostChunks(job) : 0) + PointStats(job, 0) + PointStats(job, 1);
}

void LaunchPrepare(const LaunchTable& table, int64_t blocks, bool squares, int step, int points, cudaStream_t stream) {
  squares ? LaunchStep<true>(table, blocks, step, points, stream)
          : LaunchStep<false>(table, blocks, step, points, stream);
}

}  // namespace cuda
}  // namespace sinkhorn
