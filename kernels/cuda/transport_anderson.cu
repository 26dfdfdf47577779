// Anderson acceleration of alternating updates: the rules and formulas of kernels/cpu/anderson.h, after each columns'
// half step that transport_control.cuh says is to be extrapolated.
//
// A cluster of blocks (before Hopper: one block) has one member's columns; sums are taken thread by thread and block by
// block in the same order. All blocks decide and fit alike; the first keeps what the next iteration needs.
#include "kernels/cuda/transport_anderson.cuh"
#include "kernels/cuda/transport_cluster.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_stream.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

constexpr int kAndersonThreads = 512;
constexpr int kTogether = 3;  // Columns of a thread.
constexpr int kWindow = kAndersonWindow;

// A warp's sums of kCount values, a power of two up to 32; each lane gets one, that of value LaneSum. Lanes that differ
// in a bit halve between them what is still to be summed.
template <int kCount>
__device__ double WarpSums(double (&values)[kCount]) {
  int lane = 16;
#pragma unroll
  for (int half = kCount / 2; half > 0; half /= 2, lane /= 2) {
    const bool upper = (threadIdx.x & lane) != 0;
#pragma unroll
    for (int k = 0; k < half; ++k) {
      const double kept = upper ? values[k + half] : values[k], given = upper ? values[k] : values[k + half];
      values[k] = kept + __shfl_xor_sync(0xffffffffu, given, lane);
    }
  }
  for (; lane > 0; lane /= 2) values[0] += __shfl_xor_sync(0xffffffffu, values[0], lane);
  return values[0];
}
template <int kCount>
__device__ int LaneSum() {
  return static_cast<int>(threadIdx.x % 32) / (32 / kCount);
}

// kCount sums over all threads of the cluster, in a fixed order; every thread gets them. Blocks may not end before a
// SyncCluster.
template <int kCount>
__device__ void ClusterSums(double (&sums)[kCount]) {
  constexpr int kWarps = kAndersonThreads / 32;
  __shared__ double of_warps[kWarps][kCount], of_block[kCount], totals[kCount];
  const double mine = WarpSums(sums);
  if (threadIdx.x % (32 / kCount) == 0) of_warps[threadIdx.x / 32][LaneSum<kCount>()] = mine;
  __syncthreads();
  if (threadIdx.x < kCount) {
    double sum = 0;
    for (int warp = 0; warp < kWarps; ++warp) sum += of_warps[warp][threadIdx.x];
    of_block[threadIdx.x] = sum;
  }
  SyncCluster();
  if (threadIdx.x < kCount) {
    double sum = 0;
    for (int rank = 0; rank < ClusterRanks(); ++rank) sum += LoadRemote(of_block + threadIdx.x, rank);
    totals[threadIdx.x] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kCount; ++k) sums[k] = totals[k];
}

int AndersonRanks() { return HasHopperKernels() ? kPortableRanks : 1; }

// What an iteration does, once judged.
struct Plan {
  bool go, differs;
  int at, known;  // Where the new difference goes; differences there are then.
};

__global__ void __launch_bounds__(kAndersonThreads, 1) AndersonKernel(LaunchTable table) {
  __shared__ Plan plan;
  __shared__ double gram[kWindow][kWindow], weight[kWindow];
  AllowNextKernel();
  const int ranks = ClusterRanks(), rank = ClusterRank();
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = table.jobs[work.job];
  const Member member{job, work.block / ranks};
  EngineState* state = member.state(0);
  AndersonState* a = member.anderson();
  AwaitKernelBefore();
  if (!state->extrapolate) return;
  // 1. Whether, and from what. What is read here the first block changes when all have read it.
  AndersonProgress next;
  const bool keeps = rank == 0 && threadIdx.x == 0;
  if (threadIdx.x < kWindow * kWindow) {
    const int i = threadIdx.x / kWindow, j = threadIdx.x % kWindow;
    gram[i][j] = a->gram[i][j];
  }
  if (threadIdx.x == 0) {
    next = a->progress;
    plan.go = JudgeExtrapolation(&next, state->error[1] / state->total_mass[1]);
    plan.differs = !next.fresh;
    plan.at = next.count % kWindow;
    if (plan.go) {
      next.fresh = 0;
      if (plan.differs) ++next.count;
      plan.known = min(next.count, kWindow);
    }
  }
  const int first = rank * kAndersonThreads + threadIdx.x, step = ranks * kAndersonThreads;
  const int64_t size = job.size[1];
  const double* __restrict__ mass = member.mass(1);
  const double* __restrict__ from = member.phi(0, state->parity ^ 1, 1);
  double* __restrict__ to = member.phi(0, state->parity, 1);
  double* __restrict__ last = member.At<double>(job.at.anderson_vectors);
  double* __restrict__ last_residual = last + size;
  double* __restrict__ steps = last_residual + size;          // [kWindow, size]: differences of G,
  double* __restrict__ differences = steps + kWindow * size;  // and of the residual.

  // 2. The residual's mean: the constant that potentials are free to take.
  double sums[2] = {0, 0};
#pragma unroll 4
  for (int64_t j = first; j < size; j += step) {
    sums[0] += mass[j] * (to[j] - from[j]);
    sums[1] += mass[j];
  }
  ClusterSums(sums);
  const double mean = sums[0] / sums[1];
  if (keeps) {
    a->progress = next;
    state->anderson = next.active;
    state->extrapolate = 0;
  }
  if (!plan.go) return SyncCluster();

  // 3. The new difference, and products with all that are known. What is read of some columns is on its way at once.
  double dots[2 * kWindow] = {};  // With the new difference; with the residual.
  for (int64_t begin = first; begin < size; begin += kTogether * step) {
    double residual[kTogether], before[kTogether], others[kTogether][kWindow];
#pragma unroll
    for (int c = 0; c < kTogether; ++c) {
      const int64_t j = min(begin + c * step, size - 1);
      residual[c] = sqrt(mass[j]) * (to[j] - from[j] - mean);
      before[c] = plan.differs ? last_residual[j] : 0;
#pragma unroll
      for (int k = 0; k < kWindow; ++k) {
        others[c][k] = k < plan.known && k != plan.at ? differences[k * size + j] : 0;
      }
    }
#pragma unroll
    for (int c = 0; c < kTogether; ++c) {
      const int64_t j = begin + c * step;
      if (j >= size) continue;
      const double difference = residual[c] - before[c];
      if (plan.differs) {
        steps[plan.at * size + j] = to[j] - last[j];
        differences[plan.at * size + j] = difference;
#pragma unroll
        for (int k = 0; k < kWindow; ++k) {
          const double other = k == plan.at ? difference : others[c][k];
          dots[k] += other * difference;
          dots[kWindow + k] += other * residual[c];
        }
      }
      last[j] = to[j];
      last_residual[j] = residual[c];
    }
  }
  if (!plan.differs) return SyncCluster();
  ClusterSums(dots);
  if (static_cast<int>(threadIdx.x) < plan.known) {
    const int k = threadIdx.x;
#pragma unroll
    for (int i = 0; i < kWindow; ++i) {
      if (i == k) gram[plan.at][k] = gram[k][plan.at] = dots[i], weight[k] = dots[kWindow + i];
    }
    if (rank == 0) a->gram[plan.at][k] = a->gram[k][plan.at] = gram[plan.at][k];
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const double fitted = FitResidual(gram, plan.known, weight[threadIdx.x % kWindow]);
    __syncwarp();  // The right side has been read.
    if (static_cast<int>(threadIdx.x) < plan.known) weight[threadIdx.x] = fitted;
  }
  __syncthreads();

  // 4. Where to go on from, and sweeps.
#pragma unroll kTogether
  for (int64_t j = first; j < size; j += step) {
    double sum = 0;
#pragma unroll
    for (int k = 0; k < kWindow; ++k) {
      if (k < plan.known) sum += weight[k] * steps[k * size + j];
    }
    to[j] -= sum;
  }
#if SINKHORN_HOPPER
  for (int64_t j = first; j < size && IsStreamed(job, *state); j += step) {
    StoreTerm(member, 0, *state, static_cast<int>(j));
  }
#endif
  SyncCluster();
}

}  // namespace

int64_t AndersonBlocks(const Job& job) { return job.count * AndersonRanks(); }

void LaunchAnderson(const LaunchTable& table, int64_t blocks, cudaStream_t stream) {
  if (blocks == 0) return;
  if (AndersonRanks() == 1) return LaunchKernel(AndersonKernel, blocks, kAndersonThreads, 0, stream, table);
  AttributedLaunch launch(AndersonKernel, blocks, kAndersonThreads, 0, stream);
  launch.Add(ClusterOf(AndersonRanks()));
  launch.Add(Overlapping());
  launch.Enqueue(AndersonKernel, table);
}

}  // namespace cuda
}  // namespace sinkhorn
