// Limits of control groups, read from files of the test's.
#include "server/machine.h"

#include <sys/stat.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "gtest/gtest.h"

namespace sinkhorn {
namespace {

class MachineTest : public testing::Test {
 protected:
  const std::string root_ = testing::TempDir() + "/" + testing::UnitTest::GetInstance()->current_test_info()->name();

  void Write(const std::string& path, const std::string& text) {
    for (size_t slash = 0; slash != std::string::npos; slash = path.find('/', slash + 1)) {
      mkdir((root_ + path.substr(0, slash)).c_str(), 0700);
    }
    std::ofstream(root_ + path) << text;
  }
};

TEST_F(MachineTest, WithoutGroupsItIsTheMachine) {
  EXPECT_GE(AvailableCores(root_), 1);
  EXPECT_GT(MemoryLimitBytes(root_), 1 << 20);
}

TEST_F(MachineTest, TheSecondVersionsLimitsCount) {
  Write("/proc/self/cgroup", "0::/pods/one\n");
  Write("/sys/fs/cgroup/pods/one/cpu.max", "50000 100000\n");
  Write("/sys/fs/cgroup/pods/one/memory.max", "max\n");
  Write("/sys/fs/cgroup/pods/memory.max", "12345678\n");
  EXPECT_EQ(AvailableCores(root_), 1) << "half a core is rounded up";
  EXPECT_EQ(MemoryLimitBytes(root_), 12345678) << "an ancestor's";
}

TEST_F(MachineTest, AContainersGroupMayBeTheRoot) {
  Write("/proc/self/cgroup", "0::/\n");
  Write("/sys/fs/cgroup/cpu.max", "100000 100000\n");
  Write("/sys/fs/cgroup/memory.max", "7654321\n");
  EXPECT_EQ(AvailableCores(root_), 1);
  EXPECT_EQ(MemoryLimitBytes(root_), 7654321);
}

TEST_F(MachineTest, TheFirstVersionsLimitsCount) {
  Write("/proc/self/cgroup", "5:memory:/pod\n4:cpu,cpuacct:/pod\n");
  Write("/sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us", "80000\n");
  Write("/sys/fs/cgroup/cpu/pod/cpu.cfs_period_us", "100000\n");
  Write("/sys/fs/cgroup/memory/pod/memory.limit_in_bytes", "1048576\n");
  EXPECT_EQ(AvailableCores(root_), 1);
  EXPECT_EQ(MemoryLimitBytes(root_), 1048576);
}

TEST_F(MachineTest, NoLimitIsNone) {
  const int cores = AvailableCores(root_);
  const int64_t memory = MemoryLimitBytes(root_);
  Write("/proc/self/cgroup", "4:cpu,cpuacct:/\n0::/pod\n");
  Write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  Write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  Write("/sys/fs/cgroup/pod/cpu.max", "max 100000\n");
  Write("/sys/fs/cgroup/pod/memory.max", "max\n");
  EXPECT_EQ(AvailableCores(root_), cores);
  EXPECT_EQ(MemoryLimitBytes(root_), memory);
}

}  // namespace
}  // namespace sinkhorn
