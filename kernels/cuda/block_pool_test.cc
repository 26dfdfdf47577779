// The pool alone, on ordinary memory: what it hands out is disjoint and aligned, and all of it comes back.
#include "kernels/cuda/block_pool.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace sinkhorn {
namespace cuda {
namespace {

class HeapSource final : public SlabSource {
 public:
  explicit HeapSource(size_t capacity = size_t{1} << 30) : capacity_(capacity) {}
  ~HeapSource() override { EXPECT_TRUE(slabs_.empty()) << "slabs never returned"; }
  void* Take(size_t bytes) override {
    if (bytes > capacity_ - taken_) return nullptr;
    void* slab = std::aligned_alloc(BlockPool::kAlignment, bytes);
    slabs_[slab] = bytes;
    taken_ += bytes;
    return slab;
  }
  void Return(void* slab) override {
    const auto found = slabs_.find(slab);
    ASSERT_NE(found, slabs_.end());
    taken_ -= found->second;
    slabs_.erase(found);
    std::free(slab);
  }
  size_t slab_count() const { return slabs_.size(); }

 private:
  const size_t capacity_;
  size_t taken_ = 0;
  std::map<void*, size_t> slabs_;
};

TEST(BlockPoolTest, BlocksAreAlignedDisjointAndReused) {
  HeapSource source;
  BlockPool pool(&source, /*slab_bytes=*/1 << 20, /*limit_bytes=*/1 << 24);
  std::mt19937 random(7);
  struct Held {
    unsigned char* data;
    size_t bytes;
    unsigned char mark;
  };
  std::vector<Held> held;
  for (int step = 0; step < 5000; ++step) {
    if (held.empty() || random() % 2 == 0) {
      const size_t bytes = random() % 3 == 0 ? random() % 200000 : random() % 2000;
      auto* data = static_cast<unsigned char*>(pool.Allocate(bytes));
      if (data == nullptr) continue;
      ASSERT_EQ(reinterpret_cast<uintptr_t>(data) % BlockPool::kAlignment, 0u);
      const auto mark = static_cast<unsigned char>(random());
      std::memset(data, mark, bytes);
      held.push_back({data, bytes, mark});
    } else {
      std::swap(held[random() % held.size()], held.back());
      const Held last = held.back();
      for (size_t i = 0; i < last.bytes; ++i) ASSERT_EQ(last.data[i], last.mark) << "another block wrote here";
      pool.Free(last.data);
      held.pop_back();
    }
  }
  for (const Held& h : held) pool.Free(h.data);
  EXPECT_EQ(pool.stats().used_bytes, 0u);
  EXPECT_EQ(pool.stats().block_count, 0u);
  EXPECT_LE(pool.stats().reserved_bytes, size_t{1} << 24);
  // Everything was merged again: the whole of a slab can be had without another one.
  const size_t slabs = source.slab_count();
  PoolBlock whole(&pool, 1 << 20);
  EXPECT_NE(whole.data(), nullptr);
  EXPECT_EQ(source.slab_count(), slabs);
}

TEST(BlockPoolTest, CountsBytesInMultiplesOfTheAlignment) {
  HeapSource source;
  BlockPool pool(&source, 1 << 20, 1 << 24);
  EXPECT_TRUE(pool.Reserve());
  EXPECT_EQ(pool.stats().reserved_bytes, size_t{1} << 20);
  {
    PoolBlock a(&pool, 1), b(&pool, 257), none(&pool, 0);
    EXPECT_EQ(pool.stats().used_bytes, 256u + 512u + 256u);
    EXPECT_EQ(pool.stats().block_count, 3u);
    PoolBlock moved = std::move(a);
    EXPECT_EQ(pool.stats().block_count, 3u);
  }
  EXPECT_EQ(pool.stats().used_bytes, 0u);
  EXPECT_EQ(pool.stats().used_bytes_max, 1024u);
}

TEST(BlockPoolTest, RefusesWhatIsNotWithinTheLimitAndRecovers) {
  HeapSource source;
  BlockPool pool(&source, 1 << 20, 3 << 20);
  EXPECT_EQ(pool.Allocate(~size_t{0}), nullptr);
  EXPECT_EQ(pool.Allocate((3 << 20) + 1), nullptr);
  PoolBlock first(&pool, 2 << 20);
  ASSERT_NE(first.data(), nullptr);
  EXPECT_EQ(pool.Allocate(2 << 20), nullptr);
  PoolBlock second(&pool, 1 << 20);
  EXPECT_NE(second.data(), nullptr) << "what is left can still be had";
}

// Small slabs that lie idle are given back for one large block.
TEST(BlockPoolTest, IdleSlabsMakeRoomForALargeBlock) {
  HeapSource source(/*capacity=*/4 << 20);
  BlockPool pool(&source, 1 << 20, size_t{1} << 30);
  {
    std::vector<PoolBlock> blocks;
    for (int i = 0; i < 4; ++i) blocks.emplace_back(&pool, 1 << 20);
    for (const PoolBlock& block : blocks) ASSERT_NE(block.data(), nullptr);
    EXPECT_EQ(pool.Allocate(1), nullptr);
  }
  PoolBlock large(&pool, 4 << 20);
  EXPECT_NE(large.data(), nullptr);
  EXPECT_EQ(source.slab_count(), 1u);
}

TEST(BlockPoolTest, IsSharedByThreads) {
  HeapSource source;
  BlockPool pool(&source, 1 << 20, 1 << 26);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&pool, t] {
      std::mt19937 random(t);
      for (int i = 0; i < 2000; ++i) {
        const size_t bytes = 1 + random() % 5000;
        PoolBlock block(&pool, bytes);
        ASSERT_NE(block.data(), nullptr);
        std::memset(block.data(), t, bytes);
        ASSERT_EQ(block.data()[bytes - 1], t);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool.stats().used_bytes, 0u);
}

}  // namespace
}  // namespace cuda
}  // namespace sinkhorn
