// Blocks that are used again: fresh pages cost more than a sweep over them, and small problems are over before malloc
// is.
//
// Blocks of at least kPooledBytes come from mmap with huge pages where the system grants them. Returned blocks are kept
// up to kKeptBytes in all (the oldest leave first) and handed to the next request that fills at least half of one; one
// that nobody wants for kKeptSeconds goes back to the system when the next is returned, or when KeptBytes is asked.
// Smaller ones come from malloc, in four sizes for each power of two; each thread keeps what it returns, up to
// kThreadKeptBytes, for its own next requests. (Not under AddressSanitizer, which could not see stale uses then.)
#ifndef SINKHORN_KERNELS_CPU_MEMORY_POOL_H_
#define SINKHORN_KERNELS_CPU_MEMORY_POOL_H_

#include <cstddef>

namespace sinkhorn::cpu {

constexpr size_t kPooledBytes = size_t{1} << 20;
constexpr size_t kKeptBytes = size_t{512} << 20;
constexpr int kKeptSeconds = 10;
constexpr size_t kThreadKeptBytes = size_t{8} << 20;

// Memory of at least `bytes`, 128-byte aligned, contents undefined; null if there is none. Thread-safe.
void* AllocateBlock(size_t bytes);
// `bytes` as they were asked for.
void FreeBlock(void* block, size_t bytes);
// What is kept for the next requests, small blocks aside.
size_t KeptBytes();

}  // namespace sinkhorn::cpu

#endif  // SINKHORN_KERNELS_CPU_MEMORY_POOL_H_
