// Tensors that own their memory, for tests: any dtype, converted from and to float64 by code that
// shares nothing with the kernels. Elements lie at an odd address on purpose: views promise no
// alignment.
#ifndef SINKHORN_TESTS_CONFORMANCE_TENSOR_H_
#define SINKHORN_TESTS_CONFORMANCE_TENSOR_H_

#include <cstdint>
#include <vector>

#include "kernels/problem.h"
#include "tests/oracle/linear_algebra.h"

namespace sinkhorn::conformance {

using oracle::Vector;

// The value of `dtype` nearest to `value`, ties to even; infinity beyond the largest.
double Rounded(double value, DType dtype);
// Half the distance from 1 to the next larger value of `dtype`.
double UnitRoundoff(DType dtype);
// The smallest positive value of `dtype`.
double SmallestPositive(DType dtype);

class Tensor {
 public:
  Tensor() = default;  // Absent.
  // Packs `values`, `member_size` elements per member. Shared: one member.
  static Tensor Of(const Vector& values, DType dtype = DType::kFloat32);
  static Tensor Shared(const Vector& values, DType dtype = DType::kFloat32);
  // Room for an output, filled with NaN so that an element not written shows.
  static Tensor Unwritten(int64_t size, DType dtype);

  bool present() const { return !bytes_.empty(); }
  bool shared() const { return shared_; }
  DType dtype() const { return dtype_; }
  int64_t size() const;
  TensorView view() const;
  OutputView output();

  Vector values() const;
  // Member `index` of `count`.
  Vector member(int64_t index, int64_t count) const;
  // The same elements as a tensor of one member.
  Tensor MemberTensor(int64_t index, int64_t count) const;

  friend bool operator==(const Tensor& p, const Tensor& q) { return p.dtype_ == q.dtype_ && p.bytes_ == q.bytes_; }

 private:
  DType dtype_ = DType::kFloat32;
  bool shared_ = false;
  std::vector<unsigned char> bytes_;  // One byte of padding, then the elements.
};

}  // namespace sinkhorn::conformance

#endif  // SINKHORN_TESTS_CONFORMANCE_TENSOR_H_
