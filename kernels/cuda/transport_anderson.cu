// Anderson acceleration of alternating updates: the rules and formulas of kernels/cpu/anderson.h, after each columns'
// half step that transport_control.cuh says is to be extrapolated.
//
// One block has one member's columns; sums are taken thread by thread in the same order.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_control.cuh"
#include "kernels/cuda/transport_launch.h"

namespace sinkhorn {
namespace cuda {
namespace {

constexpr int kAndersonThreads = 512;  // As many as have registers: each waits for what it reads.
constexpr int kWindow = kAndersonWindow;
constexpr int kTrial = 16;       // In so many iterations
constexpr double kGain = 1.2;    // the error falls by this factor,
constexpr double kGrowth = 4;    // and it grows by this one
constexpr int kRestartsMax = 3;  // no more often than that.
constexpr double kRidge = 1e-10;
constexpr double kUnsafeError = 1e6;  // Of the total mass: nothing linear is near.

__device__ void Restart(AndersonState* a) {
  a->count = 0;
  a->fresh = 1;
  a->least = INFINITY;
}

// False: this iteration is not extrapolated. `error`: in units of the total mass.
__device__ bool Judge(AndersonState* a, double error) {
  if (!(error < kUnsafeError)) {
    Restart(a);
    if (++a->skipped > kTrial) a->active = 0;
    return false;
  }
  if (a->iterations++ % kTrial == 0) {
    if (error * kGain > a->trial) a->active = 0;
    a->trial = error;
  }
  if (error > kGrowth * a->least) {
    if (++a->restarts > kRestartsMax) a->active = 0;
    Restart(a);
  }
  a->least = fmin(a->least, error);
  return a->active != 0;
}

// kCount sums over all threads, in a fixed order; every thread gets them.
template <int kCount>
__device__ void BlockSums(double (&sums)[kCount]) {
  __shared__ double parts[kAndersonThreads / 32][kCount];
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    for (int lane = 16; lane > 0; lane /= 2) sums[k] += __shfl_xor_sync(0xffffffffu, sums[k], lane);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32][k] = sums[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    sums[k] = 0;
    for (int warp = 0; warp < kAndersonThreads / 32; ++warp) sums[k] += parts[warp][k];
  }
}

// Least squares by Cholesky's factorisation of the normal equations, slightly damped. `weight`: the right side, then
// the answer.
__device__ void Fit(const AndersonState& a, int count, double (&factor)[kWindow][kWindow], double* weight) {
  double ridge = 0;
  for (int k = 0; k < count; ++k) ridge += kRidge * a.gram[k][k];
  for (int i = 0; i < count; ++i) {
    for (int j = 0; j <= i; ++j) {
      double sum = a.gram[i][j] + (i == j ? ridge : 0);
      for (int k = 0; k < j; ++k) sum -= factor[i][k] * factor[j][k];
      if (i == j && !(sum > 0)) sum = INFINITY;  // Nothing new in this one: its weight becomes 0.
      factor[i][j] = i == j ? sqrt(sum) : sum / factor[j][j];
    }
    for (int k = 0; k < i; ++k) weight[i] -= factor[i][k] * weight[k];
    weight[i] /= factor[i][i];
  }
  for (int i = count - 1; i >= 0; --i) {
    for (int k = i + 1; k < count; ++k) weight[i] -= factor[k][i] * weight[k];
    weight[i] /= factor[i][i];
  }
}

// What an iteration does, once judged.
struct Plan {
  bool go, differs;
  int at, known;  // Where the new difference goes; differences there are then.
};

__global__ void __launch_bounds__(kAndersonThreads, 1) AndersonKernel(LaunchTable table) {
  __shared__ Plan plan;
  __shared__ double factor[kWindow][kWindow], weight[kWindow];
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = table.jobs[work.job];
  const Member member{job, work.block};
  EngineState* state = member.state(0);
  AndersonState* a = member.anderson();
  // 1. Whether, and from what.
  if (threadIdx.x == 0) {
    plan.go = false;
    if (state->extrapolate) {
      plan.go = Judge(a, state->error[1] / state->total_mass[1]);
      plan.differs = !a->fresh;
      plan.at = a->count % kWindow;
      state->anderson = a->active;
      state->extrapolate = 0;
      if (plan.go) {
        a->fresh = 0;
        if (plan.differs) ++a->count;
        plan.known = min(a->count, kWindow);
      }
    }
  }
  __syncthreads();
  if (!plan.go) return;
  const int64_t size = job.size[1];
  const double* mass = member.mass(1);
  const double* from = member.phi(0, state->parity ^ 1, 1);
  double* to = member.phi(0, state->parity, 1);
  double* last = member.At<double>(job.at.anderson_vectors);
  double* last_residual = last + size;
  double* steps = last_residual + size;          // [kWindow, size]: differences of G,
  double* differences = steps + kWindow * size;  // and of the residual.

  // 2. The residual's mean: the constant that potentials are free to take.
  double sums[2] = {0, 0};
  for (int64_t j = threadIdx.x; j < size; j += kAndersonThreads) {
    sums[0] += mass[j] * (to[j] - from[j]);
    sums[1] += mass[j];
  }
  BlockSums(sums);
  const double mean = sums[0] / sums[1];

  // 3. The new difference, and products with all that are known.
  double dots[2 * kWindow] = {};  // With the new difference; with the residual.
  for (int64_t j = threadIdx.x; j < size; j += kAndersonThreads) {
    const double residual = sqrt(mass[j]) * (to[j] - from[j] - mean);
    if (plan.differs) {
      const double difference = residual - last_residual[j];
      steps[plan.at * size + j] = to[j] - last[j];
      differences[plan.at * size + j] = difference;
#pragma unroll
      for (int k = 0; k < kWindow; ++k) {
        if (k >= plan.known) continue;
        const double other = k == plan.at ? difference : differences[k * size + j];
        dots[k] += other * difference;
        dots[kWindow + k] += other * residual;
      }
    }
    last[j] = to[j];
    last_residual[j] = residual;
  }
  if (!plan.differs) return;
  BlockSums(dots);
  if (threadIdx.x == 0) {
#pragma unroll
    for (int k = 0; k < kWindow; ++k) {
      weight[k] = dots[kWindow + k];
      if (k < plan.known) a->gram[plan.at][k] = a->gram[k][plan.at] = dots[k];
    }
    Fit(*a, plan.known, factor, weight);
  }
  __syncthreads();

  // 4. Where to go on from.
  for (int64_t j = threadIdx.x; j < size; j += kAndersonThreads) {
    double sum = 0;
    for (int k = 0; k < plan.known; ++k) sum += weight[k] * steps[k * size + j];
    to[j] -= sum;
  }
}

}  // namespace

void LaunchAnderson(const LaunchTable& table, int64_t blocks, cudaStream_t stream) {
  LaunchKernel(AndersonKernel, blocks, kAndersonThreads, 0, stream, table);
}

}  // namespace cuda
}  // namespace sinkhorn
