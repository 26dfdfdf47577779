// Clusters of blocks (Hopper): launching them, stores to each other's shared memory, and barriers. A cluster of one
// block needs none of it.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_CLUSTER_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_CLUSTER_CUH_

#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/native.cuh"

namespace sinkhorn {
namespace cuda {

constexpr int kPortableRanks = 8;  // Blocks of a cluster that every Hopper device takes.

// What makes blocks come in clusters of `ranks` neighbours.
inline cudaLaunchAttribute ClusterOf(int ranks) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(ranks);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  return attribute;
}
// Before a kernel's first launch in clusters of so many.
template <typename... Parameters>
inline void AllowRanks(void (*kernel)(Parameters...), int ranks) {
  if (ranks > kPortableRanks) RaiseAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}
// A kernel whose blocks come so. No blocks: no launch.
template <typename... Parameters, typename... Arguments>
inline void LaunchCluster(void (*kernel)(Parameters...), int64_t blocks, int ranks, int threads, size_t smem_bytes,
                          cudaStream_t stream, const Arguments&... arguments) {
  if (ranks == 1) return LaunchKernel(kernel, blocks, threads, smem_bytes, stream, arguments...);
  if (blocks == 0) return;
  AllowRanks(kernel, ranks);
  AttributedLaunch launch(kernel, blocks, threads, smem_bytes, stream);
  launch.Add(ClusterOf(ranks));
  launch.Enqueue(kernel, arguments...);
}

// How many clusters of a kernel the calling thread's device has at once.
template <typename... Parameters>
inline int ClustersAtOnce(void (*kernel)(Parameters...), int ranks, int threads, size_t smem_bytes) {
  AllowRanks(kernel, ranks);
  AttributedLaunch launch(kernel, ranks, threads, smem_bytes, nullptr);
  launch.Add(ClusterOf(ranks));
  int clusters = 0;
  return cudaOccupancyMaxActiveClusters(&clusters, kernel, launch.config()) == cudaSuccess ? clusters : 0;
}

// All threads of all blocks that have not ended arrive before any goes on; what they wrote before, to shared memory or
// to memory, is seen.
__device__ inline void SyncCluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Blocks of the cluster, and which of them this is; 1 and 0 where there is none.
__device__ inline int ClusterRanks() {
#if __CUDA_ARCH__ >= 900
  int ranks;
  asm("mov.u32 %0, %cluster_nctaid.x;" : "=r"(ranks));
  return ranks;
#else
  return 1;
#endif
}
__device__ inline int ClusterRank() {
#if __CUDA_ARCH__ >= 900
  int rank;
  asm("mov.u32 %0, %cluster_ctaid.x;" : "=r"(rank));
  return rank;
#else
  return 0;
#endif
}

// Sending to the shared memory of blocks of the cluster: receivers wait until so many bytes have come. Each use of a
// barrier has the other parity, the first 0. Before Hopper there is nobody to send to.
#if __CUDA_ARCH__ >= 900
// By one thread, before a SyncCluster.
template <int kCount>
__device__ inline void InitReceiving(uint64_t (&barriers)[kCount]) {
  for (uint64_t& barrier : barriers) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(SharedAddress(&barrier)) : "memory");
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// By one thread, after `uses` of one and before others: their first has parity 0 again.
__device__ inline void EndUses(uint64_t* barrier, unsigned uses) {
  if (uses % 2 == 0) return;
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}
// By one thread, at each use; before or after bytes have come.
__device__ inline void ExpectReceived(uint64_t* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(bytes)
               : "memory");
}
// What has come is in shared memory: the fence is for that alone, and does not empty the processor's cache of memory.
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208
#define SINKHORN_AWAIT "relaxed"
#define SINKHORN_ACQUIRE "fence.acquire.sync_restrict::shared::cluster.cluster;"
#else
#define SINKHORN_AWAIT "acquire"
#define SINKHORN_ACQUIRE ""
#endif
__device__ inline void AwaitReceived(uint64_t* barrier, unsigned parity) {
  unsigned done = 0;
  while (done == 0) {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity." SINKHORN_AWAIT
                 ".cluster.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(SharedAddress(barrier)), "r"(parity)
                 : "memory");
  }
  asm volatile(SINKHORN_ACQUIRE ::: "memory");
}
#undef SINKHORN_AWAIT
#undef SINKHORN_ACQUIRE
// The place in the shared memory of block `rank` that `own` is in this block's.
__device__ inline uint32_t RemoteAddress(const void* own, int rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(SharedAddress(own)), "r"(rank));
  return address;
}
// What block `rank` has where `own` is in this block's; between SyncClusters.
__device__ inline float LoadRemote(const float* own, int rank) {
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(RemoteAddress(own, rank)) : "memory");
  return value;
}
__device__ inline double LoadRemote(const double* own, int rank) {
  double value;
  asm volatile("ld.shared::cluster.f64 %0, [%1];" : "=d"(value) : "r"(RemoteAddress(own, rank)) : "memory");
  return value;
}
// One number, or some side by side: to an address, telling a barrier, both RemoteAddresses of one block.
__device__ inline void SendTo(uint32_t to, float value, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
               "r"(__float_as_uint(value)), "r"(barrier)
               : "memory");
}
__device__ inline void SendTo(uint32_t to, const float (&value)[2], uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to),
               "r"(__float_as_uint(value[0])), "r"(__float_as_uint(value[1])), "r"(barrier)
               : "memory");
}
__device__ inline void SendTo(uint32_t to, const float (&value)[4], uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "r"(__float_as_uint(value[0])), "r"(__float_as_uint(value[1])), "r"(__float_as_uint(value[2])),
               "r"(__float_as_uint(value[3])), "r"(barrier)
               : "memory");
}
__device__ inline void SendTo(uint32_t to, const float (&value)[1], uint32_t barrier) { SendTo(to, value[0], barrier); }
__device__ inline void SendTo(uint32_t to, double value, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(to),
               "l"(__double_as_longlong(value)), "r"(barrier)
               : "memory");
}
#else
template <int kCount>
__device__ inline void InitReceiving(uint64_t (&)[kCount]) {}
__device__ inline void EndUses(uint64_t*, unsigned) {}
__device__ inline void ExpectReceived(uint64_t*, unsigned) {}
__device__ inline void AwaitReceived(uint64_t*, unsigned) {}
__device__ inline uint32_t RemoteAddress(const void*, int) { return 0; }
template <typename V>
__device__ inline void SendTo(uint32_t, const V&, uint32_t) {}
template <typename T>
__device__ inline T LoadRemote(const T* own, int) {
  return *own;
}
#endif
// The same to block `rank`, where both addresses are this block's.
template <typename T, typename V>
__device__ inline void Send(const T* own, const V& value, const uint64_t* barrier, int rank) {
  SendTo(RemoteAddress(own, rank), value, RemoteAddress(barrier, rank));
}

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_CLUSTER_CUH_
