// The instruction sets that kernels are compiled for: the baseline, AVX2 and AVX-512. Include it before
// hwy/foreach_target.h.
//
// Sanitizers make each set take minutes to compile and see the same in all of them: how kernels use memory in the
// narrowest and the widest, how threads share it in the narrowest.
#ifndef SINKHORN_KERNELS_CPU_TARGETS_H_
#define SINKHORN_KERNELS_CPU_TARGETS_H_

#if defined(__SANITIZE_THREAD__)
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX2 | HWY_AVX3 | HWY_AVX3_DL)
#elif defined(__SANITIZE_ADDRESS__)
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX2 | HWY_AVX3_DL)
#else
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#endif

#endif  // SINKHORN_KERNELS_CPU_TARGETS_H_
