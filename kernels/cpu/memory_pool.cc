#include "kernels/cpu/memory_pool.h"

#include <sys/mman.h>

#include <cstdlib>
#include <list>
#include <mutex>
#include <unordered_map>

namespace sinkhorn {
namespace cpu {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

struct Block {
  void* memory;
  size_t bytes;
};

struct Pool {
  std::mutex mutex;
  std::list<Block> kept;  // Oldest first.
  size_t kept_bytes = 0;
  std::unordered_map<void*, size_t> sizes;  // Of the blocks in use.
};

Pool& GetPool() {
  static Pool& pool = *new Pool;  // Outlives the threads that return blocks at exit.
  return pool;
}

size_t RoundToPages(size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

void* Map(size_t bytes) {
  // One huge page more, to align; the surplus goes back.
  char* memory =
      static_cast<char*>(mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (memory == MAP_FAILED) return nullptr;
  const size_t head = (kHugePage - reinterpret_cast<size_t>(memory) % kHugePage) % kHugePage;
  if (head > 0) munmap(memory, head);
  munmap(memory + head + bytes, kHugePage - head);
  madvise(memory + head, bytes, MADV_HUGEPAGE);
  return memory + head;
}

}  // namespace

void* AllocateBlock(size_t bytes) {
  if (bytes < kPooledBytes) return std::aligned_alloc(128, (bytes + 127) / 128 * 128);
  const size_t wanted = RoundToPages(bytes);
  Pool& pool = GetPool();
  std::lock_guard<std::mutex> lock(pool.mutex);
  auto best = pool.kept.end();
  for (auto it = pool.kept.begin(); it != pool.kept.end(); ++it) {
    if (it->bytes >= wanted && it->bytes / 2 <= wanted && (best == pool.kept.end() || it->bytes < best->bytes))
      best = it;
  }
  Block block;
  if (best != pool.kept.end()) {
    block = *best;
    pool.kept_bytes -= block.bytes;
    pool.kept.erase(best);
  } else {
    block = {Map(wanted), wanted};
    if (block.memory == nullptr) return nullptr;
  }
  pool.sizes[block.memory] = block.bytes;
  return block.memory;
}

void FreeBlock(void* memory, size_t bytes) {
  if (memory == nullptr) return;
  if (bytes < kPooledBytes) return std::free(memory);
  Pool& pool = GetPool();
  std::lock_guard<std::mutex> lock(pool.mutex);
  const auto used = pool.sizes.find(memory);
  pool.kept.push_back({memory, used->second});
  pool.kept_bytes += used->second;
  pool.sizes.erase(used);
  while (pool.kept_bytes > kKeptBytes) {
    munmap(pool.kept.front().memory, pool.kept.front().bytes);
    pool.kept_bytes -= pool.kept.front().bytes;
    pool.kept.pop_front();
  }
}

}  // namespace cpu
}  // namespace sinkhorn
