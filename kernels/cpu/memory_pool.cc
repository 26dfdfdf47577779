#include "kernels/cpu/memory_pool.h"

#include <sys/mman.h>

#include <chrono>
#include <cstdlib>
#include <list>
#include <mutex>
#include <unordered_map>

namespace sinkhorn::cpu {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

// ---- Small blocks --------------------------------------------------------------------------------------------------

#if !defined(__SANITIZE_ADDRESS__)
constexpr int kSmallestLog2 = 7;
constexpr int kClasses = 4 * (20 - kSmallestLog2);
static_assert(size_t{128} << (kClasses / 4) == kPooledBytes);

// Class c has blocks of 128 * 2^(c / 4) * (1 + (c % 4 + 1) / 4) bytes.
size_t ClassBytes(int c) { return (size_t{128} << c / 4) / 4 * (5 + c % 4); }
int ClassOf(size_t bytes) {
  if (bytes <= 128) return 0;
  const int log2 = 63 - __builtin_clzll(bytes - 1);
  return 4 * (log2 - kSmallestLog2) + static_cast<int>((bytes - 1) >> (log2 - 2) & 3);
}

thread_local bool thread_ending = false;

// Blocks of one thread, listed through their first words.
class ThreadBlocks {
 public:
  ~ThreadBlocks() {
    thread_ending = true;
    for (int c = 0; c < kClasses; ++c) {
      while (void* block = Take(c)) std::free(block);
    }
  }
  void* Take(int c) {
    void* const block = first_[c];
    if (block == nullptr) return nullptr;
    first_[c] = *static_cast<void**>(block);
    bytes_ -= ClassBytes(c);
    return block;
  }
  bool Keep(void* block, int c) {
    if (bytes_ + ClassBytes(c) > kThreadKeptBytes) return false;
    *static_cast<void**>(block) = first_[c];
    first_[c] = block;
    bytes_ += ClassBytes(c);
    return true;
  }

 private:
  void* first_[kClasses] = {};
  size_t bytes_ = 0;
};

ThreadBlocks& GetThreadBlocks() {
  thread_local ThreadBlocks blocks;
  return blocks;
}

void* AllocateSmall(size_t bytes) {
  const int c = ClassOf(bytes);
  if (void* block = thread_ending ? nullptr : GetThreadBlocks().Take(c)) return block;
  return std::aligned_alloc(128, (ClassBytes(c) + 127) / 128 * 128);
}
void FreeSmall(void* block, size_t bytes) {
  if (thread_ending || !GetThreadBlocks().Keep(block, ClassOf(bytes))) std::free(block);
}
#else
void* AllocateSmall(size_t bytes) { return std::aligned_alloc(128, (bytes + 127) / 128 * 128); }
void FreeSmall(void* block, size_t) { std::free(block); }
#endif

// ---- Large blocks --------------------------------------------------------------------------------------------------

using KeptClock = std::chrono::steady_clock;

struct Block {
  void* memory;
  size_t bytes;
  KeptClock::time_point returned;
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

// The oldest leave: what is too much, and what nobody wanted for long.
void Trim(Pool* pool) {
  const auto stale = KeptClock::now() - std::chrono::seconds(kKeptSeconds);
  while (!pool->kept.empty() && (pool->kept_bytes > kKeptBytes || pool->kept.front().returned < stale)) {
    munmap(pool->kept.front().memory, pool->kept.front().bytes);
    pool->kept_bytes -= pool->kept.front().bytes;
    pool->kept.pop_front();
  }
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
  if (bytes < kPooledBytes) return AllocateSmall(bytes);
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
    block = {Map(wanted), wanted, {}};
    if (block.memory == nullptr) return nullptr;
  }
  pool.sizes[block.memory] = block.bytes;
  return block.memory;
}

void FreeBlock(void* memory, size_t bytes) {
  if (memory == nullptr) return;
  if (bytes < kPooledBytes) return FreeSmall(memory, bytes);
  Pool& pool = GetPool();
  std::lock_guard<std::mutex> lock(pool.mutex);
  const auto used = pool.sizes.find(memory);
  pool.kept.push_back({memory, used->second, KeptClock::now()});
  pool.kept_bytes += used->second;
  pool.sizes.erase(used);
  Trim(&pool);
}

size_t KeptBytes() {
  Pool& pool = GetPool();
  std::lock_guard<std::mutex> lock(pool.mutex);
  Trim(&pool);
  return pool.kept_bytes;
}

}  // namespace sinkhorn::cpu
