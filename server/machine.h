// What the machine, and the control groups that the process is in (a container's limits), let it have.
#ifndef SINKHORN_SERVER_MACHINE_H_
#define SINKHORN_SERVER_MACHINE_H_

#include <cstdint>
#include <string>

namespace sinkhorn {

// Cores that the process can keep busy: those that it may run on, but no more than its quotas of CPU time, rounded up.
// A thread more than that, and all are throttled. At least 1. `root`: where /proc and /sys are; another one in tests.
int AvailableCores(const std::string& root = "");

// The least of its control groups' memory limits and the machine's memory, in bytes.
int64_t MemoryLimitBytes(const std::string& root = "");

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_MACHINE_H_
