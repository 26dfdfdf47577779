// When columns are extrapolated, and from what: the rules and formulas of kernels/cpu/anderson.h.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_ANDERSON_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_ANDERSON_CUH_

#include "kernels/cuda/transport_control.cuh"

namespace sinkhorn {
namespace cuda {

constexpr double kUnsafeError = 1e6;  // Of the total mass: nothing linear is near.

__device__ inline void RestartExtrapolation(AndersonProgress* a) {
  a->count = 0;
  a->fresh = 1;
  a->least = INFINITY;
}

// False: this iteration is not extrapolated. `error`: in units of the total mass.
__device__ inline bool JudgeExtrapolation(AndersonProgress* a, double error) {
  constexpr int kTrial = 16;       // In so many iterations
  constexpr double kGain = 1.2;    // the error falls by this factor,
  constexpr double kGrowth = 4;    // and it grows by this one
  constexpr int kRestartsMax = 3;  // no more often than that.
  if (!(error < kUnsafeError)) {
    RestartExtrapolation(a);
    if (++a->skipped > kTrial) a->active = 0;
    return false;
  }
  if (a->iterations++ % kTrial == 0) {
    if (error * kGain > a->trial) a->active = 0;
    a->trial = error;
  }
  if (error > kGrowth * a->least) {
    if (++a->restarts > kRestartsMax) a->active = 0;
    RestartExtrapolation(a);
  }
  a->least = fmin(a->least, error);
  return a->active != 0;
}

// Least squares by the normal equations, slightly damped, a row of them to each of the first kAndersonWindow lanes of a
// warp: the answer's component of this lane. `right`: of the right side.
__device__ inline double FitResidual(const double (&gram)[kAndersonWindow][kAndersonWindow], int count, double right) {
  constexpr int kWindow = kAndersonWindow;
  constexpr double kRidge = 1e-10;
  constexpr unsigned kAll = 0xffffffffu;
  const int lane = threadIdx.x % 32, row = lane < count ? lane : 0;
  double ridge = 0;
  for (int k = 0; k < count; ++k) ridge += kRidge * gram[k][k];
  double left[kWindow];
#pragma unroll
  for (int k = 0; k < kWindow; ++k) left[k] = gram[row][k] + (k == row ? ridge : 0);
  double own_inverse = 0;
  // Row k is taken off all others.
#pragma unroll
  for (int k = 0; k < kWindow; ++k) {
    if (k >= count) break;
    const double pivot = __shfl_sync(kAll, left[k], k);
    double inverse = FastReciprocal(pivot);
#pragma unroll
    for (int step = 0; step < 2; ++step) inverse += inverse * fma(-pivot, inverse, 1.0);
    if (!(pivot > 0)) inverse = 0;  // Nothing new in this one: its weight becomes 0.
    const double share = lane == k ? 0 : left[k] * inverse;
    if (lane == k) own_inverse = inverse;
    right -= share * __shfl_sync(kAll, right, k);
#pragma unroll
    for (int j = k + 1; j < kWindow; ++j) left[j] -= share * __shfl_sync(kAll, left[j], k);
  }
  return right * own_inverse;
}

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_ANDERSON_CUH_
