// Memory taken in slabs from an expensive source (cudaMalloc, cudaHostAlloc) and handed out in blocks at the price of a
// map look-up. Best fit; neighbours are merged when freed, so nothing leaks into fragments that are never joined.
//
// No CUDA here: the source is injected, so it is tested without a GPU.
#ifndef SINKHORN_KERNELS_CUDA_BLOCK_POOL_H_
#define SINKHORN_KERNELS_CUDA_BLOCK_POOL_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace sinkhorn {
namespace cuda {

// Where slabs come from. Take: null when there is no memory.
class SlabSource {
 public:
  virtual ~SlabSource() = default;
  virtual void* Take(size_t bytes) = 0;
  virtual void Return(void* slab) = 0;
};

class BlockPool {
 public:
  static constexpr size_t kAlignment = 256;  // Of blocks; REQUIRES: of the source's slabs too.

  // Slabs of at least `slab_bytes`; never more than `limit_bytes` in all.
  BlockPool(SlabSource* source, size_t slab_bytes, size_t limit_bytes)
      : source_(source), slab_bytes_(slab_bytes), limit_bytes_(limit_bytes) {}
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;
  // REQUIRES: every block was freed.
  ~BlockPool();

  // A block of `bytes`, or null: not within the limit, or the source has none, not even after giving back all slabs
  // without blocks. 0 bytes: a block of the smallest size.
  void* Allocate(size_t bytes);
  void Free(void* block);  // Null: nothing happens.
  // Takes a first slab now rather than with the first block. False: there is no memory.
  bool Reserve();

  struct Stats {
    size_t reserved_bytes = 0;  // In slabs.
    size_t used_bytes = 0;      // In blocks.
    size_t used_bytes_max = 0;  // Ever.
    size_t block_count = 0;
  };
  Stats stats() const;
  size_t limit_bytes() const { return limit_bytes_; }

 private:
  struct Piece {
    size_t bytes = 0;
    char* slab = nullptr;  // Pieces of different slabs are never merged, even if they touch.
    bool free = false;
  };
  using Pieces = std::map<char*, Piece>;

  bool AddSlab(size_t bytes);
  void ReturnEmptySlabs();
  void Erase(Pieces::iterator piece);

  SlabSource* const source_;
  const size_t slab_bytes_, limit_bytes_;
  mutable std::mutex mutex_;
  Pieces pieces_;                            // All, by address.
  std::set<std::pair<size_t, char*>> free_;  // The free ones, by size.
  Stats stats_;
};

// Gives a block back when it goes.
class PoolBlock {
 public:
  PoolBlock() = default;
  PoolBlock(BlockPool* pool, size_t bytes) : pool_(pool), data_(static_cast<char*>(pool->Allocate(bytes))) {}
  PoolBlock(PoolBlock&& other) noexcept
      : pool_(std::exchange(other.pool_, nullptr)), data_(std::exchange(other.data_, nullptr)) {}
  PoolBlock& operator=(PoolBlock&& other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~PoolBlock() {
    if (data_ != nullptr) pool_->Free(data_);
  }
  char* data() const { return data_; }  // Null: there was no memory.

 private:
  BlockPool* pool_ = nullptr;
  char* data_ = nullptr;
};

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_BLOCK_POOL_H_
