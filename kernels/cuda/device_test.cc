// Passes with a GPU, without one, without a driver and without CUDA in the build.
#include "kernels/cuda/device.h"

#include "absl/status/status.h"
#include "gtest/gtest.h"

namespace sinkhorn {
namespace {

#if SINKHORN_HAVE_CUDA

TEST(ListDevices, DescribesEveryDeviceOrSaysWhyThereIsNone) {
  const absl::StatusOr<std::vector<DeviceInfo>> devices = ListDevices();
  if (!devices.ok()) {
    EXPECT_EQ(devices.status().code(), absl::StatusCode::kUnavailable) << devices.status();
    GTEST_SKIP() << devices.status();
  }
  if (devices->empty()) GTEST_SKIP() << "no GPU";

  for (size_t i = 0; i < devices->size(); ++i) {
    const DeviceInfo& device = (*devices)[i];
    EXPECT_EQ(device.index, static_cast<int>(i));
    EXPECT_FALSE(device.name.empty());
    EXPECT_EQ(device.uuid.size(), std::string("GPU-00000000-0000-0000-0000-000000000000").size());
    EXPECT_GE(device.compute_major, 7);
    EXPECT_GT(device.sm_count, 0);
    EXPECT_GE(device.smem_per_block_bytes, 48 << 10);
    EXPECT_GT(device.l2_bytes, 0);
    EXPECT_GT(device.memory_bytes, int64_t{1} << 30);
    EXPECT_GE(device.memory_bandwidth_bytes_per_s, 0);
    RecordProperty("device", device.name);
  }
}

// A machine without a GPU answers the same every time: no error of the first call sticks to the
// second.
TEST(ListDevices, AnswersTheSameTwice) {
  const auto first = ListDevices();
  const auto second = ListDevices();
  EXPECT_EQ(first.status(), second.status());
  if (first.ok() && second.ok()) {
    EXPECT_EQ(first->size(), second->size());
  }
}

#else

TEST(ListDevices, IsLeftOutOfThisBuild) { GTEST_SKIP() << "nvcc was not found when this was built"; }

#endif  // SINKHORN_HAVE_CUDA

}  // namespace
}  // namespace sinkhorn
