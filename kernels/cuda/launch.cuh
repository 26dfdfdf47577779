// A kernel on a stream, with dynamic shared memory if it wants any, and beginning early if it may.
#ifndef SINKHORN_KERNELS_CUDA_LAUNCH_CUH_
#define SINKHORN_KERNELS_CUDA_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/native.cuh"

namespace sinkhorn {
namespace cuda {

// Before a launch with so much dynamic shared memory, which may be above 48 KiB with what the kernel has of its own.
template <typename... Parameters>
inline void AllowShared(void (*kernel)(Parameters...), size_t smem_bytes) {
  if (smem_bytes <= 16 * 1024) return;
  RaiseAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem_bytes));
}

// No blocks: no launch.
template <typename... Parameters, typename... Arguments>
inline void LaunchKernel(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t smem_bytes,
                         cudaStream_t stream, const Arguments&... arguments) {
  if (blocks == 0) return;
  AllowShared(kernel, smem_bytes);
  KeepLaunchError(LaunchNative(kernel, dim3(static_cast<unsigned>(blocks)), threads, smem_bytes, stream, arguments...));
}

// A launch with attributes.
class AttributedLaunch {
 public:
  template <typename... Parameters>
  AttributedLaunch(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t smem_bytes, cudaStream_t stream) {
    AllowShared(kernel, smem_bytes);
    config_.gridDim = dim3(static_cast<unsigned>(blocks));
    config_.blockDim = dim3(static_cast<unsigned>(threads));
    config_.dynamicSmemBytes = smem_bytes;
    config_.stream = stream;
    config_.attrs = attributes_;
  }
  AttributedLaunch(const AttributedLaunch&) = delete;
  AttributedLaunch& operator=(const AttributedLaunch&) = delete;
  // Two at most.
  void Add(const cudaLaunchAttribute& attribute) { attributes_[config_.numAttrs++] = attribute; }
  const cudaLaunchConfig_t* config() const { return &config_; }
  template <typename... Parameters, typename... Arguments>
  void Enqueue(void (*kernel)(Parameters...), const Arguments&... arguments) const {
    KeepLaunchError(cudaLaunchKernelEx(&config_, kernel, arguments...));
  }

 private:
  cudaLaunchAttribute attributes_[2];
  cudaLaunchConfig_t config_ = {};
};

// ---- Kernels that begin while the one before ends -----------------------------------------------------------------

// Lets a kernel begin early: it calls AwaitKernelBefore before it touches what the one before it in the stream leaves.
inline cudaLaunchAttribute Overlapping() {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}
// Lets all blocks of a kernel begin at once, or none.
inline cudaLaunchAttribute Together() {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  return attribute;
}
// A kernel that may begin early. No blocks: no launch.
template <typename... Parameters, typename... Arguments>
inline void LaunchOverlapping(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t smem_bytes,
                              cudaStream_t stream, const Arguments&... arguments) {
  if (blocks == 0) return;
  AttributedLaunch launch(kernel, blocks, threads, smem_bytes, stream);
  launch.Add(Overlapping());
  launch.Enqueue(kernel, arguments...);
}
__device__ inline void AwaitKernelBefore() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void AllowNextKernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_LAUNCH_CUH_
