// What the lanes of one device share: its description, its memory, the threads that help to copy, and whether it is
// still there. Private to the backend.
#ifndef SINKHORN_KERNELS_CUDA_CONTEXT_H_
#define SINKHORN_KERNELS_CUDA_CONTEXT_H_

#include <cuda_runtime.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/cuda/block_pool.h"
#include "kernels/cuda/copy_team.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/family.h"

namespace sinkhorn {
namespace cuda {

class DeviceMemory final : public SlabSource {
 public:
  explicit DeviceMemory(int device) : device_(device) {}
  void* Take(size_t bytes) override;
  void Return(void* slab) override;

 private:
  const int device_;
};

class PinnedMemory final : public SlabSource {
 public:
  explicit PinnedMemory(int device) : device_(device) {}
  void* Take(size_t bytes) override;
  void Return(void* slab) override;

 private:
  const int device_;
};

class Context {
 public:
  // `info`: of a device that exists. UNAVAILABLE: it cannot be used.
  static absl::StatusOr<std::unique_ptr<Context>> Make(const DeviceInfo& info, const CudaBackendOptions& options);

  // OK, or what the call's error means. UNAVAILABLE: the device is lost, for good.  RESOURCE_EXHAUSTED: no memory.
  // INTERNAL: a bug; the device goes on.
  absl::Status Check(cudaError_t error, absl::string_view doing);
  // OK, or why the device is lost.
  absl::Status Health() const;
  // Counts a slice. True: this is the one that a test wants to fail.
  bool CountSlice();

  const DeviceInfo info;
  const CudaBackendOptions options;
  const std::vector<const Family*> families;

 private:
  Context(const DeviceInfo& info, const CudaBackendOptions& options, size_t memory_bytes);

  DeviceMemory device_memory_;
  PinnedMemory pinned_memory_;

 public:
  BlockPool device_pool;
  BlockPool pinned_pool;
  CopyTeam copy_team;

 private:
  std::atomic<int64_t> slices_{0};
  std::atomic<bool> lost_{false};
  mutable std::mutex mutex_;
  std::string why_;  // Guarded by mutex_.
};

// A kernel that traps: an error that ends the CUDA context. For tests.
void LaunchFault(cudaStream_t stream);

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_CONTEXT_H_
