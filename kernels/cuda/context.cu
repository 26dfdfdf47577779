#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/families.h"
#include "kernels/cuda/native.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

constexpr size_t kDeviceSlabBytes = size_t{256} << 20;
constexpr size_t kPinnedSlabBytes = size_t{64} << 20;
constexpr size_t kReserveBytes = size_t{1} << 30;  // For the driver, kernels' stacks, and others on this device.

__global__ void FaultKernel() { Trap(); }

}  // namespace

// ---- Memory from the driver -----------------------------------------------------------------------------------------

void* DeviceMemory::Take(size_t bytes) {
  cudaSetDevice(device_);
  void* slab = nullptr;
  if (cudaMalloc(&slab, bytes) == cudaSuccess) return slab;
  (void)cudaGetLastError();  // The next check must not take it for its own.
  return nullptr;
}

void DeviceMemory::Return(void* slab) {
  cudaSetDevice(device_);
  (void)cudaFree(slab);  // Fails if the device is lost, and then nothing helps.
}

void* PinnedMemory::Take(size_t bytes) {
  cudaSetDevice(device_);
  void* slab = nullptr;
  // Portable: one pool would do for several devices. With unified addressing the device's name for it is the host's.
  if (cudaHostAlloc(&slab, bytes, cudaHostAllocMapped | cudaHostAllocPortable) == cudaSuccess) return slab;
  (void)cudaGetLastError();
  return nullptr;
}

void PinnedMemory::Return(void* slab) {
  cudaSetDevice(device_);
  (void)cudaFreeHost(slab);
}

// ---- The context ----------------------------------------------------------------------------------------------------

Context::Context(const DeviceInfo& info, const CudaBackendOptions& options, size_t memory_bytes)
    : info(info),
      options(options),
      families(options.families.empty() ? Families() : options.families),
      device_memory_(info.index),
      pinned_memory_(info.index),
      device_pool(&device_memory_, std::min(kDeviceSlabBytes, memory_bytes), memory_bytes),
      pinned_pool(&pinned_memory_, kPinnedSlabBytes, /*limit_bytes=*/size_t{1} << 40),
      copy_team(options.copy_threads) {}

absl::StatusOr<std::unique_ptr<Context>> Context::Make(const DeviceInfo& info, const CudaBackendOptions& options) {
  const auto fail = [&](cudaError_t error) {
    return absl::UnavailableError(
        absl::StrCat("cuda:", info.index, " (", info.name, ") cannot be used: ", cudaGetErrorString(error)));
  };
  if (cudaError_t error = cudaSetDevice(info.index); error != cudaSuccess) return fail(error);
  size_t free_bytes = 0, total_bytes = 0;
  if (cudaError_t error = cudaMemGetInfo(&free_bytes, &total_bytes); error != cudaSuccess) return fail(error);
  int unified = 0;
  (void)cudaDeviceGetAttribute(&unified, cudaDevAttrUnifiedAddressing, info.index);
  if (!unified) return absl::UnavailableError(absl::StrCat("cuda:", info.index, " has no unified addressing"));
  size_t memory_bytes = free_bytes > 2 * kReserveBytes ? free_bytes - kReserveBytes : free_bytes / 2;
  if (options.memory_bytes > 0) memory_bytes = std::min<size_t>(memory_bytes, options.memory_bytes);
  std::unique_ptr<Context> context(new Context(info, options, memory_bytes));
  if (!context->device_pool.Reserve() || !context->pinned_pool.Reserve()) return fail(cudaErrorMemoryAllocation);
  return context;
}

// An error belongs to one call or to the context. The latter comes back from every call that follows.
absl::Status Context::Check(cudaError_t error, absl::string_view doing) {
  if (error == cudaSuccess) return absl::OkStatus();
  (void)cudaGetLastError();
  size_t free_bytes = 0, total_bytes = 0;
  const bool sticky = cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess;
  const std::string what = absl::StrCat("cuda:", info.index, ": ", cudaGetErrorName(error), ": ",
                                        cudaGetErrorString(error), " (", doing, ")");
  if (!sticky) {
    (void)cudaGetLastError();
    return error == cudaErrorMemoryAllocation ? absl::ResourceExhaustedError(what) : absl::InternalError(what);
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (why_.empty()) why_ = what;
  }
  lost_.store(true, std::memory_order_release);
  return absl::UnavailableError(what);
}

absl::Status Context::Health() const {
  if (!lost_.load(std::memory_order_acquire)) return absl::OkStatus();
  std::lock_guard<std::mutex> lock(mutex_);
  return absl::UnavailableError(why_);
}

bool Context::CountSlice() {
  if (options.fault_at_slice <= 0) return false;
  return slices_.fetch_add(1) + 1 == options.fault_at_slice;
}

void LaunchFault(cudaStream_t stream) { LaunchNative(FaultKernel, 1, 1, 0, stream); }

}  // namespace cuda
}  // namespace sinkhorn
