#include "tests/conformance/tensor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace sinkhorn::conformance {
namespace {

constexpr size_t kMisalignment = 1;

// An IEEE-like 16-bit format: a sign, then exponent, then fraction bits.
struct Format16 {
  int fraction_bits;
  int min_exponent;  // Of the smallest normal number.
  int max_exponent;  // Of the largest.
};
constexpr Format16 kHalf = {10, -14, 15};
constexpr Format16 kBFloat = {7, -126, 127};

Format16 FormatOf(DType dtype) { return dtype == DType::kFloat16 ? kHalf : kBFloat; }

double RoundedTo16(double value, const Format16& format) {
  if (value == 0 || !std::isfinite(value)) return value;
  const int exponent = std::max(std::ilogb(value), format.min_exponent);
  const double quantum = std::ldexp(1.0, exponent - format.fraction_bits);
  const double rounded = std::nearbyint(value / quantum) * quantum;  // Both exact: powers of two.
  if (std::abs(rounded) < std::ldexp(1.0, format.max_exponent + 1)) return rounded;
  return std::copysign(std::numeric_limits<double>::infinity(), value);
}

uint16_t Encode16(double value, const Format16& format) {
  const double rounded = RoundedTo16(value, format);
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const int exponent_ones = format.max_exponent - format.min_exponent + 2;
  if (std::isinf(rounded)) return sign | exponent_ones << format.fraction_bits;
  if (std::isnan(rounded)) return sign | exponent_ones << format.fraction_bits | 1;
  const double magnitude = std::abs(rounded);
  if (magnitude < std::ldexp(1.0, format.min_exponent)) {  // Subnormal or zero.
    return sign | static_cast<uint16_t>(std::ldexp(magnitude, format.fraction_bits - format.min_exponent));
  }
  const int exponent = std::ilogb(magnitude);
  const double fraction = std::ldexp(magnitude, format.fraction_bits - exponent);
  return sign | (exponent - format.min_exponent + 1) << format.fraction_bits |
         (static_cast<int>(fraction) - (1 << format.fraction_bits));
}

double Decode16(uint16_t bits, const Format16& format) {
  const int fraction = bits & ((1 << format.fraction_bits) - 1);
  const int exponent = (bits & 0x7fff) >> format.fraction_bits;
  double magnitude;
  if (exponent == format.max_exponent - format.min_exponent + 2) {
    magnitude = fraction ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  } else if (exponent == 0) {
    magnitude = std::ldexp(fraction, format.min_exponent - format.fraction_bits);
  } else {
    magnitude =
        std::ldexp(fraction + (1 << format.fraction_bits), exponent - 1 + format.min_exponent - format.fraction_bits);
  }
  return bits & 0x8000 ? -magnitude : magnitude;
}

template <class T>
void Put(T value, unsigned char* at) {
  std::memcpy(at, &value, sizeof(T));
}

template <class T>
T Get(const unsigned char* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

void Encode(double value, DType dtype, unsigned char* at) {
  switch (dtype) {
    case DType::kFloat32:
      return Put(static_cast<float>(value), at);
    case DType::kFloat64:
      return Put(value, at);
    case DType::kFloat16:
    case DType::kBFloat16:
      return Put(Encode16(value, FormatOf(dtype)), at);
  }
}

double Decode(const unsigned char* at, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return Get<float>(at);
    case DType::kFloat64:
      return Get<double>(at);
    case DType::kFloat16:
    case DType::kBFloat16:
      return Decode16(Get<uint16_t>(at), FormatOf(dtype));
  }
  return 0;
}

}  // namespace

double Rounded(double value, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<float>(value);
    case DType::kFloat64:
      return value;
    case DType::kFloat16:
    case DType::kBFloat16:
      return RoundedTo16(value, FormatOf(dtype));
  }
  return value;
}

double UnitRoundoff(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return std::ldexp(1.0, -24);
    case DType::kFloat64:
      return std::ldexp(1.0, -53);
    case DType::kFloat16:
      return std::ldexp(1.0, -11);
    case DType::kBFloat16:
      return std::ldexp(1.0, -8);
  }
  return 0;
}

double SmallestPositive(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return std::numeric_limits<float>::denorm_min();
    case DType::kFloat64:
      return std::numeric_limits<double>::denorm_min();
    case DType::kFloat16:
    case DType::kBFloat16:
      return Decode16(1, FormatOf(dtype));
  }
  return 0;
}

Tensor Tensor::Of(const Vector& values, DType dtype) {
  Tensor tensor = Unwritten(values.size(), dtype);
  for (size_t k = 0; k < values.size(); ++k) {
    Encode(values[k], dtype, &tensor.bytes_[kMisalignment + k * SizeOf(dtype)]);
  }
  return tensor;
}

Tensor Tensor::Shared(const Vector& values, DType dtype) {
  Tensor tensor = Of(values, dtype);
  tensor.shared_ = true;
  return tensor;
}

Tensor Tensor::Unwritten(int64_t size, DType dtype) {
  Tensor tensor;
  tensor.dtype_ = dtype;
  tensor.bytes_.assign(kMisalignment + size * SizeOf(dtype),
                       0xff);  // All ones is a NaN in each dtype.
  return tensor;
}

int64_t Tensor::size() const { return present() ? (bytes_.size() - kMisalignment) / SizeOf(dtype_) : 0; }

TensorView Tensor::view() const {
  if (!present()) return {};
  return {dtype_, bytes_.data() + kMisalignment, shared_};
}

OutputView Tensor::output() {
  if (!present()) return {};
  return {dtype_, bytes_.data() + kMisalignment};
}

Vector Tensor::values() const {
  Vector values(size());
  for (int64_t k = 0; k < size(); ++k) {
    values[k] = Decode(&bytes_[kMisalignment + k * SizeOf(dtype_)], dtype_);
  }
  return values;
}

Vector Tensor::member(int64_t index, int64_t count) const {
  if (!present()) return {};
  if (shared_) return values();
  const int64_t member_size = size() / count;
  Vector values(member_size);
  for (int64_t k = 0; k < member_size; ++k) {
    values[k] = Decode(&bytes_[kMisalignment + (index * member_size + k) * SizeOf(dtype_)], dtype_);
  }
  return values;
}

Tensor Tensor::MemberTensor(int64_t index, int64_t count) const {
  if (!present()) return {};
  return Of(member(index, count), dtype_);
}

}  // namespace sinkhorn::conformance
