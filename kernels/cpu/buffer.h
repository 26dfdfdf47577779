// A zero-initialised array aligned for SIMD. Throws std::bad_alloc.
#ifndef SINKHORN_KERNELS_CPU_BUFFER_H_
#define SINKHORN_KERNELS_CPU_BUFFER_H_

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace sinkhorn {
namespace cpu {

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
    const size_t bytes = (static_cast<size_t>(size) * sizeof(T) + 127) / 128 * 128;
    void* memory = std::aligned_alloc(128, bytes == 0 ? 128 : bytes);
    if (memory == nullptr) throw std::bad_alloc();
    data_.reset(static_cast<T*>(memory));
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
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  int64_t size_ = 0;
};

}  // namespace cpu
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CPU_BUFFER_H_
