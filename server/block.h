// Memory for tensors: uninitialised, aligned, and on huge pages where it is large, because the first touch of 64 MiB in
// pages of 4 KiB takes as long as copying it.
#ifndef SINKHORN_SERVER_BLOCK_H_
#define SINKHORN_SERVER_BLOCK_H_

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <memory>

namespace sinkhorn {

struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};
using Block = std::unique_ptr<char, FreeDeleter>;

constexpr size_t kBlockAlignment = 64;  // A cache line, a vector.

// `bytes` rounded up to what the block holds; null when there is no memory.
inline Block NewBlock(size_t bytes) {
  constexpr size_t kHugePage = size_t{2} << 20;
  const size_t alignment = bytes >= 2 * kHugePage ? kHugePage : kBlockAlignment;
  const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  Block block(static_cast<char*>(std::aligned_alloc(alignment, rounded)));
  if (block != nullptr && alignment == kHugePage) madvise(block.get(), rounded, MADV_HUGEPAGE);  // A wish.
  return block;
}

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_BLOCK_H_
