// The rules are tests on bit patterns: for an IEEE format whose infinity has the bits `kInfinity`, the non-negative
// finite numbers are the patterns below it, and negative ones have the top bit set. Integer loops without branches
// vectorise.
#include "server/scan.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace sinkhorn {
namespace {

template <class BitsType, BitsType kInfinityBits, BitsType kLeastBits>
struct Format {
  using Bits = BitsType;
  static constexpr Bits kInfinity = kInfinityBits;
  static constexpr Bits kLeast = kLeastBits;  // The smallest number that arithmetic is sure to keep.
  static constexpr Bits kSign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
};
using Float32 = Format<uint32_t, 0x7f800000u, 0x00800000u>;
using Float64 = Format<uint64_t, 0x7ff0000000000000u, 0x0010000000000000u>;
using Float16 = Format<uint16_t, 0x7c00u, 1>;
using BFloat16 = Format<uint16_t, 0x7f80u, 0x0080u>;

template <class F>
typename F::Bits Load(const void* data, int64_t index) {
  typename F::Bits bits;
  std::memcpy(&bits, static_cast<const char*>(data) + index * sizeof(bits), sizeof(bits));
  return bits;
}

// 1 where the rule is broken. Minus zero counts as zero.
template <class F, ElementRule kRule>
typename F::Bits Violates(typename F::Bits bits) {
  using Bits = typename F::Bits;
  switch (kRule) {
    case ElementRule::kFinite:
      return static_cast<Bits>(bits & ~F::kSign) >= F::kInfinity;
    case ElementRule::kFiniteNonNegative:
      return (bits >= F::kInfinity) & (bits != F::kSign);
    case ElementRule::kFinitePositive:
      return static_cast<Bits>(bits - 1) >= F::kInfinity - 1;
    case ElementRule::kNotNan:
      return static_cast<Bits>(bits & ~F::kSign) > F::kInfinity;
  }
  return 0;
}

template <class F, ElementRule kRule>
int64_t FirstViolationOf(const void* data, int64_t count) {
  constexpr int64_t kBlock = 4096;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(count, begin + kBlock);
    typename F::Bits any = 0;
    for (int64_t i = begin; i < end; ++i) any |= Violates<F, kRule>(Load<F>(data, i));
    if (!any) continue;
    for (int64_t i = begin; i < end; ++i) {
      if (Violates<F, kRule>(Load<F>(data, i))) return i;
    }
  }
  return -1;
}

template <class F>
int64_t FirstViolationOf(const void* data, int64_t count, ElementRule rule) {
  switch (rule) {
    case ElementRule::kFinite:
      return FirstViolationOf<F, ElementRule::kFinite>(data, count);
    case ElementRule::kFiniteNonNegative:
      return FirstViolationOf<F, ElementRule::kFiniteNonNegative>(data, count);
    case ElementRule::kFinitePositive:
      return FirstViolationOf<F, ElementRule::kFinitePositive>(data, count);
    case ElementRule::kNotNan:
      return FirstViolationOf<F, ElementRule::kNotNan>(data, count);
  }
  return -1;
}

template <class F>
int64_t FirstVoidRowOf(const void* data, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i) {
    int64_t k = 0;
    while (k < columns && static_cast<typename F::Bits>(Load<F>(data, i * columns + k) & ~F::kSign) < F::kLeast) ++k;
    if (k == columns) return i;
  }
  return -1;
}

double FromHalf(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  double magnitude = exponent == 0    ? std::ldexp(mantissa, -24)
                     : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                      : std::ldexp(1024 + mantissa, exponent - 25);
  return bits & 0x8000 ? -magnitude : magnitude;
}

double FromFloatBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

template <class F>
double ToDouble(typename F::Bits bits);
template <>
double ToDouble<Float32>(uint32_t bits) {
  return FromFloatBits(bits);
}
template <>
double ToDouble<Float64>(uint64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
template <>
double ToDouble<Float16>(uint16_t bits) {
  return FromHalf(bits);
}
template <>
double ToDouble<BFloat16>(uint16_t bits) {
  return FromFloatBits(static_cast<uint32_t>(bits) << 16);
}

template <class F>
double SumOf(const void* data, int64_t begin, int64_t count) {
  double sum = 0;
  for (int64_t i = begin; i < begin + count; ++i) sum += ToDouble<F>(Load<F>(data, i));
  return sum;
}

}  // namespace

int64_t FirstViolation(const TensorView& tensor, int64_t count, ElementRule rule) {
  switch (tensor.dtype) {
    case DType::kFloat32:
      return FirstViolationOf<Float32>(tensor.data, count, rule);
    case DType::kFloat64:
      return FirstViolationOf<Float64>(tensor.data, count, rule);
    case DType::kFloat16:
      return FirstViolationOf<Float16>(tensor.data, count, rule);
    case DType::kBFloat16:
      return FirstViolationOf<BFloat16>(tensor.data, count, rule);
  }
  return -1;
}

int64_t FirstVoidRow(const TensorView& tensor, int64_t rows, int64_t columns) {
  switch (tensor.dtype) {
    case DType::kFloat32:
      return FirstVoidRowOf<Float32>(tensor.data, rows, columns);
    case DType::kFloat64:
      return FirstVoidRowOf<Float64>(tensor.data, rows, columns);
    case DType::kFloat16:
      return FirstVoidRowOf<Float16>(tensor.data, rows, columns);
    case DType::kBFloat16:
      return FirstVoidRowOf<BFloat16>(tensor.data, rows, columns);
  }
  return -1;
}

double Element(const TensorView& tensor, int64_t index) { return Sum(tensor, index, 1); }

double Sum(const TensorView& tensor, int64_t begin, int64_t count) {
  switch (tensor.dtype) {
    case DType::kFloat32:
      return SumOf<Float32>(tensor.data, begin, count);
    case DType::kFloat64:
      return SumOf<Float64>(tensor.data, begin, count);
    case DType::kFloat16:
      return SumOf<Float16>(tensor.data, begin, count);
    case DType::kBFloat16:
      return SumOf<BFloat16>(tensor.data, begin, count);
  }
  return 0;
}

}  // namespace sinkhorn
