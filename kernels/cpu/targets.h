// The instruction sets that kernels are compiled for: the baseline, AVX2 and AVX-512. Include it before
// hwy/foreach_target.h.
#ifndef SINKHORN_KERNELS_CPU_TARGETS_H_
#define SINKHORN_KERNELS_CPU_TARGETS_H_

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)

#endif  // SINKHORN_KERNELS_CPU_TARGETS_H_
