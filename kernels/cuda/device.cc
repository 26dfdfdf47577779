// Asks the CUDA runtime. What cudaDeviceProp lost in CUDA 13, the clocks, is asked as attributes.
#include "kernels/cuda/device.h"

#include <cuda_runtime.h>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace sinkhorn {
namespace {

absl::Status RuntimeError(cudaError_t error, absl::string_view doing) {
  return absl::InternalError(absl::StrCat(doing, ": ", cudaGetErrorName(error), ": ", cudaGetErrorString(error)));
}

// 0 if this driver does not know the attribute.
int Attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, attribute, device) != cudaSuccess) {
    (void)cudaGetLastError();  // Not sticky: forget it.
    return 0;
  }
  return value;
}

std::string FormatUuid(const cudaUUID_t& uuid) {
  const std::string hex = absl::BytesToHexString(absl::string_view(uuid.bytes, sizeof(uuid.bytes)));
  return absl::StrCat("GPU-", hex.substr(0, 8), "-", hex.substr(8, 4), "-", hex.substr(12, 4), "-", hex.substr(16, 4),
                      "-", hex.substr(20));
}

absl::StatusOr<DeviceInfo> Describe(int index) {
  cudaDeviceProp properties;
  if (cudaError_t error = cudaGetDeviceProperties(&properties, index); error != cudaSuccess) {
    return RuntimeError(error, absl::StrCat("cudaGetDeviceProperties(", index, ")"));
  }
  DeviceInfo info;
  info.index = index;
  info.name = properties.name;
  info.uuid = FormatUuid(properties.uuid);
  info.compute_major = properties.major;
  info.compute_minor = properties.minor;
  info.sm_count = properties.multiProcessorCount;
  info.is_cooperative = Attribute(cudaDevAttrCooperativeLaunch, index) != 0;
  info.smem_per_block_bytes = properties.sharedMemPerBlockOptin;
  info.l2_bytes = properties.l2CacheSize;
  info.memory_bytes = properties.totalGlobalMem;
  // Clock in kHz times bytes per transfer, twice: both edges of the clock carry data.
  info.memory_bandwidth_bytes_per_s =
      2.0 * 1e3 * Attribute(cudaDevAttrMemoryClockRate, index) * Attribute(cudaDevAttrGlobalMemoryBusWidth, index) / 8;
  return info;
}

}  // namespace

absl::StatusOr<std::vector<DeviceInfo>> ListDevices() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorNoDevice) {
    (void)cudaGetLastError();
    return std::vector<DeviceInfo>();
  }
  if (error == cudaErrorInsufficientDriver) {
    (void)cudaGetLastError();
    int driver = 0;
    (void)cudaDriverGetVersion(&driver);  // 0: none installed.
    if (driver == 0) return absl::UnavailableError("no NVIDIA driver on this machine");
    return absl::UnavailableError(absl::StrCat("the NVIDIA driver is too old: it serves CUDA ", driver / 1000, ".",
                                               driver % 1000 / 10, ", this build needs ", CUDART_VERSION / 1000, ".",
                                               CUDART_VERSION % 1000 / 10));
  }
  if (error != cudaSuccess) return RuntimeError(error, "cudaGetDeviceCount");

  std::vector<DeviceInfo> devices;
  for (int index = 0; index < count; ++index) {
    absl::StatusOr<DeviceInfo> info = Describe(index);
    if (!info.ok()) return info.status();
    devices.push_back(*std::move(info));
  }
  return devices;
}

}  // namespace sinkhorn
