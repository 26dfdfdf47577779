// float16: a number of 16 bits and its conversions, to the nearest, ties to even.
#ifndef SINKHORN_TESTS_EMULATED_CUDA_CUDA_FP16_H_
#define SINKHORN_TESTS_EMULATED_CUDA_CUDA_FP16_H_

#include "cuda_runtime.h"

struct __half {
  uint16_t bits;
  operator float() const { return static_cast<float>(EmulatedBits<_Float16>(bits)); }
};
struct alignas(4) __half2 {
  __half x, y;
};
inline __half __float2half_rn(float x) { return {EmulatedBits<uint16_t>(static_cast<_Float16>(x))}; }
inline __half __double2half(double x) { return {EmulatedBits<uint16_t>(static_cast<_Float16>(x))}; }
inline float __half2float(__half x) { return x; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline __half2 __float22half2_rn(float2 x) { return __floats2half2_rn(x.x, x.y); }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }

#endif  // SINKHORN_TESTS_EMULATED_CUDA_CUDA_FP16_H_
