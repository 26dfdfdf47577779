// A zero-initialised array aligned for SIMD. Throws std::bad_alloc.
#ifndef SINKHORN_KERNELS_CPU_BUFFER_H_
#define SINKHORN_KERNELS_CPU_BUFFER_H_

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "kernels/cpu/memory_pool.h"

namespace sinkhorn::cpu {

template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t size) { Resize(size); }

  // Zeroes all.
  void Resize(int64_t size) {
    Allocate(size);
    std::memset(static_cast<void*>(data_.get()), 0, size * sizeof(T));
  }
  // Leaves the contents undefined.
  void Allocate(int64_t size) {
    data_.reset();
    const size_t bytes = static_cast<size_t>(size > 0 ? size : 1) * sizeof(T);
    void* memory = AllocateBlock(bytes);
    if (memory == nullptr) throw std::bad_alloc();
    data_ = std::unique_ptr<T, Free>(static_cast<T*>(memory), Free{bytes});
    size_ = size;
  }
  int64_t size() const { return size_; }
  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  T& operator[](int64_t i) { return data_.get()[i]; }
  const T& operator[](int64_t i) const { return data_.get()[i]; }
  T* begin() { return data(); }
  T* end() { return data() + size_; }
  const T* begin() const { return data(); }
  const T* end() const { return data() + size_; }

 private:
  struct Free {
    size_t bytes = 0;
    void operator()(T* p) const { FreeBlock(p, bytes); }
  };
  std::unique_ptr<T, Free> data_;
  int64_t size_ = 0;
};

}  // namespace sinkhorn::cpu

#endif  // SINKHORN_KERNELS_CPU_BUFFER_H_
