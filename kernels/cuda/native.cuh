// What nvcc alone compiles, of sm_80 and later, one function each: launches, dynamic shared memory and instructions
// that C++ has no name for. (Hopper's own: transport_cluster.cuh, transport_hopper.cuh.) tests/emulated_cuda has the
// same functions for processors.
#ifndef SINKHORN_KERNELS_CUDA_NATIVE_CUH_
#define SINKHORN_KERNELS_CUDA_NATIVE_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace sinkhorn {
namespace cuda {

// ---- Launches and shared memory -------------------------------------------------------------------------------------

// What became of the launch itself; of the kernel, a later call tells.
template <typename... Parameters, typename... Arguments>
inline cudaError_t LaunchNative(void (*kernel)(Parameters...), dim3 blocks, int threads, size_t smem_bytes,
                                cudaStream_t stream, const Arguments&... arguments) {
  kernel<<<blocks, threads, smem_bytes, stream>>>(arguments...);
  return cudaGetLastError();
}

// The block's dynamic shared memory.
__device__ inline char* DynamicShared() {
  extern __shared__ __align__(128) char dynamic_shared[];
  return dynamic_shared;
}
// The same of kernels that have no use for so much alignment.
__device__ inline float* DynamicFloats() {
  extern __shared__ __align__(16) float dynamic_floats[];
  return dynamic_floats;
}

__device__ inline uint32_t SharedAddress(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// ---- Tensor cores ---------------------------------------------------------------------------------------------------

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

// ---- Copies to shared memory ----------------------------------------------------------------------------------------

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

// The same, in order with the compiler's other accesses to memory; and of 4 bytes, aligned so.
template <typename T>
__device__ inline void FetchAsync16(uint32_t shared, const T* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
template <typename T>
__device__ inline void FetchAsync4(uint32_t shared, const T* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}
// Until all copies of this thread have ended.
__device__ inline void WaitForFetches() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- Special functions ----------------------------------------------------------------------------------------------

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

__device__ inline double FastReciprocal(double x) {  // To 20 bits or so, x far from the ends of the range.
  double y;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
  return y;
}
__device__ inline float FastRoot(float x) {
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- Threads --------------------------------------------------------------------------------------------------------

// Barrier `name` (1 to 15) of so many threads of the block.
template <int kThreads>
__device__ inline void SyncSome(int name) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "n"(kThreads) : "memory");
}
// The counter's old number. Releases what this thread knows to have been written, acquires what others so released.
__device__ inline unsigned CountUp(unsigned* counter) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}
// What it has been counted up to; acquires what those who did had released.
__device__ inline unsigned Counted(const unsigned* counter) {
  unsigned now;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  return now;
}
// x, and the compiler no longer knows what it is made of: what is computed from it is computed where it is used, not
// once for all, into a register for each entry.
__device__ inline int Opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ inline double Opaque(double x) {
  asm volatile("" : "+d"(x));
  return x;
}
template <class T>
__device__ inline T* Opaque(T* x) {
  asm volatile("" : "+l"(x));
  return x;
}
__device__ inline unsigned long long GlobalNanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
// The device is lost to this process.
__device__ inline void Trap() { asm volatile("trap;"); }

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NATIVE_CUH_
