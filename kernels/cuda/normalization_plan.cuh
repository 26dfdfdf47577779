// How many members a kernel has under way at a time, by a block or a cluster of blocks each.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAN_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAN_CUH_

#include <algorithm>
#include <atomic>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/normalization_kernels.h"
#include "kernels/cuda/transport_cluster.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

// On the calling thread's device, by `ranks` blocks each; 0: it cannot run the kernel.
inline int MembersAtATime(void (*kernel)(LaunchOf), int ranks, int threads, size_t shared_bytes, bool before_hopper,
                          int multiprocessors) {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) return 0;
  if (attributes.ptxVersion < 90 && !before_hopper) return 0;
  if (ranks > 1) return ClustersAtOnce(kernel, ranks, threads, shared_bytes);
  AllowShared(kernel, shared_bytes);
  int most = 0;
  const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&most, kernel, threads, shared_bytes);
  return error == cudaSuccess ? most * multiprocessors : 0;
}

// What a device has been asked once, by any threads.
class AskedOnce {
 public:
  // ask() is from 0 on; of a device that is not known, 0.
  template <class Ask>
  int Get(int device, Ask ask) {
    if (device < 0 || device >= kMostDevices) return 0;
    std::atomic<int>& known = known_[device];
    if (known == 0) {
      int before = device;
      (void)cudaGetDevice(&before);
      if (before != device) (void)cudaSetDevice(device);
      known = 1 + ask();
      if (before != device) (void)cudaSetDevice(before);
      (void)cudaGetLastError();  // That it cannot is no error.
    }
    return std::max(known - 1, 0);
  }

 private:
  static constexpr int kMostDevices = 64;
  std::atomic<int> known_[kMostDevices] = {};  // What it said + 1; 0: not asked yet.
};

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAN_CUH_
