// Faults on purpose: a backend that does as another does until something is to go wrong. For tests of what stands
// around the server (clients, load balancers, orchestrators), since real devices do not fail when asked.
#ifndef SINKHORN_SERVER_FAULT_H_
#define SINKHORN_SERVER_FAULT_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/backend.h"

namespace sinkhorn {

// Numbers count from 1, the golden problems that the server checks itself with included; 0: never.
struct Faults {
  int64_t device_lost = 0;    // This launch and all later ones find the device lost.
  int64_t device_memory = 0;  // There is no working memory for this problem.
  int64_t bug = 0;            // This problem meets a bug.
  int64_t kernel_trap =
      0;  // CUDA: this slice of a device meets a kernel that traps. The CUDA backend does that itself.
  absl::Duration slow_start;  // What the first launch takes longer.

  // Anything for MakeFaultyBackend.
  bool any() const { return device_lost || device_memory || bug || slow_start > absl::ZeroDuration(); }
};

// "device_lost@N", "device_memory@N", "bug@N", "kernel_trap@N", "slow_start@DURATION", several separated by commas; "":
// none.
// INVALID_ARGUMENT: anything else.
absl::StatusOr<Faults> ParseFaults(absl::string_view text);

std::unique_ptr<Backend> MakeFaultyBackend(const Faults& faults, std::unique_ptr<Backend> backend);

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_FAULT_H_
