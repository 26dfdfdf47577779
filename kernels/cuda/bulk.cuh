// Bulk copies (Hopper) between memory and shared memory, and the barriers that they complete on, one function each.
// SINKHORN_HOPPER is 1 where Hopper's own instructions exist (sm_90a).
#ifndef SINKHORN_KERNELS_CUDA_BULK_CUH_
#define SINKHORN_KERNELS_CUDA_BULK_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/native.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SINKHORN_HOPPER 1
#else
#define SINKHORN_HOPPER 0
#endif

namespace sinkhorn {
namespace cuda {

#if SINKHORN_HOPPER

// Copies that begin from now on come after what this thread has read and written.
__device__ inline void FenceCopies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- Barriers in shared memory ------------------------------------------------------------------------------------

__device__ inline void InitBarrier(uint64_t* barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(arrivals) : "memory");
}
// By a thread that knows that nobody waits: its memory is free for something else, or for InitBarrier.
__device__ inline void EndBarrier(uint64_t* barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}
// After InitBarrier, before others use them.
__device__ inline void FenceNewBarriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// The same, and FenceCopies.
__device__ inline void FenceBarriers() {
  FenceNewBarriers();
  FenceCopies();
}
__device__ inline void Arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}
// Arrives, and lets the phase end only when so many more bytes have been copied.
__device__ inline void ArriveExpecting(uint64_t* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(bytes)
               : "memory");
}
// Whether the phase of this parity has ended.
__device__ inline bool HasPhaseEnded(uint64_t* barrier, unsigned parity) {
  unsigned done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(SharedAddress(barrier)), "r"(parity)
               : "memory");
  return done != 0;
}
// Until it has.
__device__ inline void WaitForPhase(uint64_t* barrier, unsigned parity) {
  while (!HasPhaseEnded(barrier, parity)) continue;
}

// ---- Copies -------------------------------------------------------------------------------------------------------

// 16-byte multiples, both ends aligned so.
__device__ inline void CopyBulk(uint32_t shared, const void* global, unsigned bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(SharedAddress(barrier))
               : "memory");
}
// From shared memory, likewise.
__device__ inline void StoreBulk(void* global, uint32_t shared, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
}
// Until this thread's have read all of it.
__device__ inline void AwaitStoresRead() {
  asm volatile("cp.async.bulk.commit_group;");
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

#else  // Named by code that never runs.
__device__ inline void InitBarrier(uint64_t*, unsigned) {}
__device__ inline void FenceNewBarriers() {}
__device__ inline void ArriveExpecting(uint64_t*, unsigned) {}
__device__ inline void WaitForPhase(uint64_t*, unsigned) {}
__device__ inline void CopyBulk(uint32_t, const void*, unsigned, uint64_t*) {}
__device__ inline void FenceCopies() {}
__device__ inline void StoreBulk(void*, uint32_t, unsigned) {}
__device__ inline void AwaitStoresRead() {}
#endif

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_BULK_CUH_
