// The threads of a kernel's blocks, as coroutines of the thread that launches it: each runs until it must wait for
// others, and then any of those that can, another one each time: tests that compare bits see where that matters. Blocks
// run one after another, launches of several threads too.
//
// Ends the process, saying why, where hardware would hang or do as it likes: threads that wait for each other at
// different places, lanes of one meeting that came for different things, memory behind a block's own that was written.
#ifndef SINKHORN_TESTS_EMULATED_CUDA_BLOCK_H_
#define SINKHORN_TESTS_EMULATED_CUDA_BLOCK_H_

#include <cstddef>
#include <cstdint>
#include <functional>

namespace sinkhorn {
namespace emulated_cuda {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
constexpr size_t kMostSharedBytes = size_t{163} << 10;  // What a block of an A100 may have.
// Runs kernel() by each thread of each block.
void RunGrid(Index grid, unsigned threads, size_t shared_bytes, const std::function<void()>& kernel);
char* SharedMemory();  // Of the block that runs; its dynamic part.

// ---- Called by a kernel's threads -----------------------------------------------------------------------------------

// The block's barrier: all threads that have not ended, from the same `line`. Returns how many of them came with
// `counted`.
int SyncBlock(bool counted, int line);
// Another one, by its number, of so many threads.
void SyncNamed(int name, int threads);
// Ends this grid; the runtime's functions fail from then on.
[[noreturn]] void LoseDevice();
bool DeviceIsLost();

// The lanes of the warp that `mask` names and that have not ended meet; the last one calls complete(requests, present):
// requests[l] is lane l's where `present` has bit l.
using MeetingEnd = void (*)(void (*complete)(), void* const* requests, unsigned present);
void Meet(unsigned mask, void* request, void (*complete)(), MeetingEnd end);

template <typename Request>
void Together(unsigned mask, Request* request, void (*complete)(Request* const* requests, unsigned present)) {
  Meet(mask, request, reinterpret_cast<void (*)()>(complete),
       [](void (*typeless)(), void* const* requests, unsigned present) {
         Request* typed[32];
         for (int lane = 0; lane < 32; ++lane) typed[lane] = static_cast<Request*>(requests[lane]);
         reinterpret_cast<void (*)(Request* const*, unsigned)>(typeless)(typed, present);
       });
}

}  // namespace emulated_cuda
}  // namespace sinkhorn

// Of the thread that runs.
extern sinkhorn::emulated_cuda::Index threadIdx, blockIdx, blockDim, gridDim;

#endif  // SINKHORN_TESTS_EMULATED_CUDA_BLOCK_H_
