// The backend on one NVIDIA GPU: streams, memory and transfers around the kernel families of family.h.
//
// A slice of a lane: new problems' tensors go to the device, every family launches for all its residents at once, the
// stream is awaited, finished problems' outputs go back. Each lane has a stream of its own, so that copies of one batch
// overlap the solve of another. Tensors of small problems stay in pinned host memory, where kernels read and write them
// over the bus: that is one trip instead of three. Larger ones are copied through pinned staging, by several threads.
//
// Memory comes from pools that grow when they must: in the steady state no slice allocates from the driver. A problem
// that finds no memory fails alone. After an error that ends the CUDA context every call returns UNAVAILABLE.
//
// No CUDA header is included. Only there where SINKHORN_HAVE_CUDA is 1.
#ifndef SINKHORN_KERNELS_CUDA_CUDA_BACKEND_H_
#define SINKHORN_KERNELS_CUDA_CUDA_BACKEND_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"

namespace sinkhorn {

namespace cuda {
class Family;
}

struct CudaBackendOptions {
  int lanes = 2;             // Batches in flight.
  int64_t memory_bytes = 0;  // The most that the pool takes; 0: all but a reserve.
  // Inputs and outputs of a problem that may stay in host memory, and of all those that come in one slice. Measured
  // (slice_bench, H200): 28 against 44 us with 4 KiB in all, 74 against 90 with 512 KiB, even at 1 MiB.
  int64_t zero_copy_problem_bytes = 512 << 10;
  int64_t zero_copy_slice_bytes = 1 << 20;
  int copy_threads = 3;   // That help to copy large tensors.
  int64_t spin_us = 200;  // A lane waits this long without sleeping.
  // For tests.
  int64_t fault_at_slice = 0;                 // This one, counted from 1, meets a kernel that traps; 0: none.
  std::vector<const cuda::Family*> families;  // Instead of cuda::Families().
};

// `device`: CUDA's index (ListDevices). Creates the context, the pools and the lanes: some tenths of a second.
// UNAVAILABLE: no such device, no driver, or no memory.
absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(int device, const CudaBackendOptions& options);

}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_CUDA_BACKEND_H_
