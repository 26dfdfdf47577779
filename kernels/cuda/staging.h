// How bytes get to the device and back: arenas for a slice, and a ring of pinned chunks through which large copies go.
// Private to the backend.
#ifndef SINKHORN_KERNELS_CUDA_STAGING_H_
#define SINKHORN_KERNELS_CUDA_STAGING_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/cuda/block_pool.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/copy_team.h"

namespace sinkhorn {
namespace cuda {

// Memory for the length of a slice: a pointer that moves. Grows between slices to what the last one wanted.
class Arena {
 public:
  Arena(BlockPool* pool, size_t bytes) : pool_(pool), wanted_(bytes) {}
  // Everything taken so far is free again.
  void Reset();
  // 256-byte aligned; null: no memory.
  char* Take(size_t bytes);

 private:
  BlockPool* const pool_;
  PoolBlock block_;
  std::vector<PoolBlock> more_;  // What did not fit into the block.
  size_t bytes_ = 0, used_ = 0;
  size_t wanted_;
};

// One tensor on its way.
struct Transfer {
  char* device;
  char* host;
  size_t bytes;
};

// The end of what is enqueued on a stream, as a word in pinned memory that the device writes: polling it costs nobody
// anything, whereas each cudaEventQuery takes 1.5 us and a lock of the driver's that other lanes' launches want. An
// event that can be slept for is worse: wherever one is recorded, awaited or not, it interrupts a core and wakes a
// thread of the driver's. At some 20,000 of them a second a server of 64 clients answered 55,000 requests/s, the
// slowest hundredth in 14 ms; without, 178,000 and 1.6 ms. So it is recorded when someone is about to sleep.
class Signal {
 public:
  ~Signal();
  cudaError_t Init(BlockPool* pinned_pool);
  // To come when all that is on `stream` now is over.
  cudaError_t Mark(cudaStream_t stream);
  // Polls for `spin_us`, then sleeps, until what was marked last has come; at once if nothing was. Returns its error.
  cudaError_t Await(int64_t spin_us);

 private:
  struct Write;
  PoolBlock block_;
  volatile uint32_t* word_ = nullptr;
  uint32_t last_ = 0;
  bool written_ = true;  // By the device; or event_ was recorded.
  cudaStream_t stream_ = nullptr;
  cudaEvent_t event_ = nullptr;
};

// Copies between ordinary host memory and the device in chunks: while one is on the bus, the next is packed.
class Staging {
 public:
  explicit Staging(Context* context) : context_(context) {}
  absl::Status Init(cudaStream_t stream);

  // Enqueues all `transfers` to the device, in ascending order of device address. The host's memory has been read on
  // return. Neighbours less than a tensor's padding apart travel together.
  absl::Status In(absl::Span<const Transfer> transfers);
  // From the device, ascending likewise. The host's memory has been written on return.
  absl::Status Out(absl::Span<const Transfer> transfers);

 private:
  struct Chunk {
    char* memory = nullptr;
    Signal free;               // Its last copy is over.
    std::vector<Copy> copies;  // Out: what remains to be done when it has arrived.
  };
  // What goes to or from one chunk: a stretch of device memory.
  struct Stretch {
    char* device;
    size_t bytes;
  };
  Stretch Fill(absl::Span<const Transfer> transfers, size_t* next, size_t* skip, const char* memory, bool in);
  absl::Status AwaitChunk(Chunk* chunk);

  Context* const context_;
  cudaStream_t stream_ = nullptr;
  PoolBlock memory_;
  std::vector<Chunk> chunks_;
  size_t turn_ = 0;
  std::vector<Copy> copies_;
};

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_STAGING_H_
