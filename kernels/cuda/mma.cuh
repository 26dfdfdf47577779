// Tensor-core and copy instructions of sm_80 and later, one function each: 16-bit matrix fragments and asynchronous
// copies to shared memory.
#ifndef SINKHORN_KERNELS_CUDA_MMA_CUH_
#define SINKHORN_KERNELS_CUDA_MMA_CUH_

#include <cstdint>

namespace sinkhorn {
namespace cuda {

__device__ inline uint32_t SharedAddress(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Four 8 x 8 matrices of halves: lane l names row l % 8 of matrix l / 8; r[k] holds elements (lane / 4, 2 (lane % 4) +
// 0..1) of matrix k.
__device__ inline void LoadMatrices(const void* row, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(SharedAddress(row)));
}

// c += a b: 16 x 16 by 16 x 8, halves to float. c[0..1]: row lane / 4, columns 2 (lane % 4) + 0..1; c[2..3]: row + 8.
__device__ inline void MultiplyHalves(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float (&c)[4]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16 bytes, both addresses 16-byte aligned.
__device__ inline void CopyAsync16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global));
}
__device__ inline void CopyAsync16(void* shared, const void* global) { CopyAsync16(SharedAddress(shared), global); }
__device__ inline void CommitCopies() { asm volatile("cp.async.commit_group;"); }
// Waits until at most `kGroups` groups of this thread are under way.
template <int kGroups>
__device__ inline void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups));
}

// 2^x by the special-function unit: 2 ulp, results below 2^-126 are 0.
__device__ inline float FastExp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x by the same unit: 1 ulp, and 0 where it would be below 2^-126.
__device__ inline float FastReciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_MMA_CUH_
