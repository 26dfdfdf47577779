// bfloat16: a number of 16 bits and its conversions, to the nearest, ties to even.
#ifndef SINKHORN_TESTS_EMULATED_CUDA_CUDA_BF16_H_
#define SINKHORN_TESTS_EMULATED_CUDA_CUDA_BF16_H_

#include "cuda_runtime.h"

struct __nv_bfloat16 {
  uint16_t bits;
  operator float() const { return __uint_as_float(uint32_t{bits} << 16); }
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const uint32_t bits = __float_as_uint(x);
  if (isnan(x)) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
// Rounded to odd first, so that rounding twice is rounding once.
inline __nv_bfloat16 __double2bfloat16(double x) {
  float near = static_cast<float>(x);
  if (near != x && !isnan(x) && !isinf(near)) {
    if (std::fabs(near) > std::fabs(x)) near = std::nextafter(near, 0.0f);
    near = __uint_as_float(__float_as_uint(near) | 1);
  }
  return __float2bfloat16_rn(near);
}
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}

#endif  // SINKHORN_TESTS_EMULATED_CUDA_CUDA_BF16_H_
