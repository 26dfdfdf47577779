// The contract between the CUDA backend and its kernel families.
//
// The backend owns streams, device memory and transfers; a family owns kernels. Between them a problem is a `Problem`
// whose every view (inputs, outputs, scalars, convergence) has been replaced by a device-accessible address, so that
// families know nothing of hosts and the backend nothing of arithmetic.
//
//   family = the first that Takes(problem)            // By the problem's own shape and options, never by company.
//   resident = family->Make(device_problem, workspace)
//   until resident->done(), a slice of the scheduler each time:
//     family->Launch(residents, slice, context)       // Enqueues on context->stream(); blocks on nothing.
//     (the backend synchronises the stream)
//     family->Collect(residents)                      // Reads what the launches left in host-visible memory.
//
// Launches serve all residents at once, ragged: sizes, options and outputs of their own. The bits of a problem's answer
// depend on that problem alone: sums are taken in an order fixed by its shape.
//
// No CUDA header is included: C++ code may use this one.
#ifndef SINKHORN_KERNELS_CUDA_FAMILY_H_
#define SINKHORN_KERNELS_CUDA_FAMILY_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/cuda/device.h"
#include "kernels/problem.h"

struct CUstream_st;

namespace sinkhorn {
namespace cuda {

constexpr size_t kMappedUploadBytes = 16 << 10;  // Uploads up to this stay in pinned memory, read over the bus.

// What one slice may use. Belongs to one lane; everything it hands out lives until the slice's Collect calls have
// returned.
class LaunchContext {
 public:
  virtual ~LaunchContext() = default;
  virtual const DeviceInfo& device() const = 0;
  // All work of the slice is enqueued here (a cudaStream_t).
  virtual CUstream_st* stream() const = 0;
  // But for what may run beside it: that is enqueued on side_stream() between a Fork, after which it sees what stream()
  // has done before, and a Join, after which stream() sees what it has done. By default there is one stream.
  virtual CUstream_st* side_stream() const { return stream(); }
  virtual void Fork() {}
  virtual void Join() {}
  // A device-accessible copy of `bytes` bytes (descriptor arrays), 256-byte aligned, valid for work enqueued from now
  // on. `data` may be overwritten on return. nullptr: no room, or the copy failed.
  virtual const void* Upload(const void* data, size_t bytes) = 0;
  // Device memory, 256-byte aligned, contents undefined. nullptr: none left; the family fails the problem, not the
  // device.
  virtual void* Scratch(size_t bytes) = 0;
  // Pinned memory that the device may write and the host reads in Collect, 256-byte aligned; zeroed. `*device_address`
  // is the device's name for it.
  virtual void* HostVisible(size_t bytes, void** device_address) = 0;
};

// A problem on the device. Destroyed only when no enqueued work refers to it.
class Resident {
 public:
  virtual ~Resident() = default;
  // As Solve's (kernels/backend.h); they change in Collect only.
  virtual bool done() const = 0;
  virtual absl::Status status() const = 0;
  virtual SolveReport report() const = 0;
  virtual Convergence progress() const = 0;
  // Solve::FinishSoon, between a Collect and the next Launch. Only transport heeds it.
  virtual void FinishSoon() {}
};

class Family {
 public:
  virtual ~Family() = default;
  virtual const char* name() const = 0;  // "registers": a string literal, for replies and metrics.
  // Whether this family solves such a problem. Looks at shape, types, options and at which views are there; addresses
  // may be the host's.
  virtual bool Takes(const DeviceInfo& device, const Problem& problem) const = 0;
  // Device memory held while resident, beyond the tensors.
  virtual int64_t WorkspaceBytes(const DeviceInfo& device, const Problem& problem) const = 0;
  // Predicted seconds alone on an idle device, to within a factor of two or so, transfers left out. For a tolerance: of
  // max_iterations.
  virtual double PredictedSeconds(const DeviceInfo& device, const Problem& problem) const = 0;
  // Whether the kernels read each input about once, so that a small problem's may stay in pinned host memory, which is
  // read over the bus. False where iterations read them again.
  virtual bool ReadsInputsOnce(const DeviceInfo& /*device*/, const Problem& problem) const {
    return problem.kind == ProblemKind::kNormalization;
  }
  // `problem`: every view device-accessible and 256-byte aligned at its start (members are packed, so later ones are
  // only as aligned as their size makes them); small problems' tensors may lie in pinned host memory, so each input is
  // read once where that is possible and each output written once, never read. `workspace`: WorkspaceBytes of device
  // memory, 256-byte aligned, contents undefined. No launch happens here.
  virtual std::unique_ptr<Resident> Make(const Problem& problem, void* workspace) const = 0;
  // Enqueues the next work of all `residents` (all of this family, none done): about slice_seconds in total, progress
  // for each. An error is the device's (UNAVAILABLE) or a bug (INTERNAL); a problem's own failure is its status after
  // Collect.
  virtual absl::Status Launch(absl::Span<Resident* const> residents, double slice_seconds,
                              LaunchContext* context) const = 0;
  // The stream has been synchronised since Launch. Short: it runs on the lane's thread.
  virtual void Collect(absl::Span<Resident* const> residents) const = 0;
};

// The families, most specialised first; each lives as long as the process. One function per .cu file group.
const Family* RegisterNormalization();  // n, m <= 32 (dustbin included)
const Family* OnChipNormalization();    // up to 1,024 and beyond: whatever the first does not take
const Family* Transport();              // dense cost matrices and point clouds

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_FAMILY_H_
