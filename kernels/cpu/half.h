// Tensor elements of any dtype to and from the types that kernels compute in.
//
// All conversions round to nearest even, carry infinities and NaN through, turn what overflows into infinity and give
// the same bits whatever the processor's flush-to-zero mode (float16 and bfloat16 subnormals are exact). Pointers may
// have any alignment; `offset` and `count` are in elements. Source and destination must not overlap.
#ifndef SINKHORN_KERNELS_CPU_HALF_H_
#define SINKHORN_KERNELS_CPU_HALF_H_

#include <cstdint>

#include "kernels/problem.h"

namespace sinkhorn::cpu {

// dst[i] = src[offset + i], i < count.
void LoadAsFloat(DType dtype, const void* src, int64_t offset, int64_t count, float* dst);
void LoadAsDouble(DType dtype, const void* src, int64_t offset, int64_t count, double* dst);

// dst[offset + i] = src[i], i < count.
void StoreFromFloat(DType dtype, const float* src, int64_t count, void* dst, int64_t offset);
void StoreFromDouble(DType dtype, const double* src, int64_t count, void* dst, int64_t offset);

// The same by overload, for code that is a template of its arithmetic type.
inline void LoadRow(DType dtype, const void* src, int64_t offset, int64_t count, float* dst) {
  LoadAsFloat(dtype, src, offset, count, dst);
}
inline void LoadRow(DType dtype, const void* src, int64_t offset, int64_t count, double* dst) {
  LoadAsDouble(dtype, src, offset, count, dst);
}
inline void StoreRow(DType dtype, const float* src, int64_t count, void* dst, int64_t offset) {
  StoreFromFloat(dtype, src, count, dst, offset);
}
inline void StoreRow(DType dtype, const double* src, int64_t count, void* dst, int64_t offset) {
  StoreFromDouble(dtype, src, count, dst, offset);
}

}  // namespace sinkhorn::cpu

#endif  // SINKHORN_KERNELS_CPU_HALF_H_
