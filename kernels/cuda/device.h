// Device discovery: which GPUs this process may use, and the few facts that kernels and metrics are
// sized by.
//
// No CUDA header is included, so C++ code may use this one. It is only there where
// SINKHORN_HAVE_CUDA is 1.
#ifndef KERNELS_CUDA_DEVICE_H_
#define KERNELS_CUDA_DEVICE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace sinkhorn {

struct DeviceInfo {
  int index = 0;          // CUDA's ordinal, after CUDA_VISIBLE_DEVICES.
  std::string name;       // "NVIDIA H100 80GB HBM3"
  std::string uuid;       // "GPU-1b2c...", the name nvidia-smi and the device plugin use.
  int compute_major = 0;  // 9 for Hopper.
  int compute_minor = 0;
  int sm_count = 0;
  bool is_cooperative = false;       // Blocks of a kernel can be launched all at once, and so wait for each other.
  int64_t smem_per_block_bytes = 0;  // With opt-in, the most one block may have.
  int64_t l2_bytes = 0;
  int64_t memory_bytes = 0;
  double memory_bandwidth_bytes_per_s = 0;  // Peak, from clock and bus width; 0 if the driver does not tell.
};

// The GPUs of this machine, in CUDA's order. Creates no context, so it is cheap and takes no device
// memory.
//
// An empty list is an ordinary answer: a machine without a GPU.  UNAVAILABLE: there is no driver,
// or one too old for this build; the message says which.  INTERNAL: any other failure of the
// runtime.
absl::StatusOr<std::vector<DeviceInfo>> ListDevices();

}  // namespace sinkhorn

#endif  // KERNELS_CUDA_DEVICE_H_
