// A kernel on a stream, with dynamic shared memory if it wants any.
#ifndef SINKHORN_KERNELS_CUDA_LAUNCH_CUH_
#define SINKHORN_KERNELS_CUDA_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "kernels/cuda/native.cuh"

namespace sinkhorn {
namespace cuda {

// The most dynamic shared memory that a kernel may be launched with, by kernel and device. It is the kernel's, not the
// calling thread's: were it what each launch takes, another thread's smaller one could come in between.
struct SharedLimits {
  std::mutex mutex;
  std::map<std::pair<const void*, int>, size_t> bytes;
};
inline SharedLimits& AllSharedLimits() {
  static auto* const limits = new SharedLimits;
  return *limits;
}
// Before a launch with `smem_bytes` of it, which may be above 48 KiB with what the kernel has of its own.
template <typename... Parameters>
inline void AllowShared(void (*kernel)(Parameters...), size_t smem_bytes) {
  if (smem_bytes <= 16 * 1024) return;
  int device = 0;
  (void)cudaGetDevice(&device);
  SharedLimits& limits = AllSharedLimits();
  const std::lock_guard<std::mutex> lock(limits.mutex);
  size_t& limit = limits.bytes[{reinterpret_cast<const void*>(kernel), device}];
  if (smem_bytes <= limit) return;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem_bytes));
  if (error == cudaSuccess) limit = smem_bytes;
}

// No blocks: no launch.
template <typename... Parameters, typename... Arguments>
inline void LaunchKernel(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t smem_bytes,
                         cudaStream_t stream, const Arguments&... arguments) {
  if (blocks == 0) return;
  AllowShared(kernel, smem_bytes);
  LaunchNative(kernel, dim3(static_cast<unsigned>(blocks)), threads, smem_bytes, stream, arguments...);
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

 private:
  cudaLaunchAttribute attributes_[2];
  cudaLaunchConfig_t config_ = {};
};

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_LAUNCH_CUH_
