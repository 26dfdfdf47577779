// Element conversions: one SIMD loop per pair of types that occurs in volume, exact integer code for the rest and for
// tails.
#include "kernels/cpu/half.h"

#include <cstring>

#include "kernels/cpu/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/half.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

// ---- Exact conversions of one element -------------------------------------------------------------------------------
#ifndef SINKHORN_KERNELS_CPU_HALF_CC_SCALAR
#define SINKHORN_KERNELS_CPU_HALF_CC_SCALAR
namespace sinkhorn::cpu {
namespace {

template <class To, class From>
To BitsAs(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// A 16-bit format with an implicit leading bit: float16 is <5, 10>, bfloat16 is <8, 7>.
template <int kExponentBits, int kMantissaBits>
struct Format16 {
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr int kMinExponent = 1 - kBias;
  static constexpr uint16_t kInfinity = ((1 << kExponentBits) - 1) << kMantissaBits;
  static constexpr uint16_t kQuietBit = 1 << (kMantissaBits - 1);

  // Integers only: neither the rounding mode nor flush-to-zero touch it, and a double is rounded once.
  static uint16_t FromDouble(double value) {
    const uint64_t bits = BitsAs<uint64_t>(value);
    const uint16_t sign = static_cast<uint16_t>((bits >> 63) << 15);
    const uint64_t magnitude = bits & ~(uint64_t{1} << 63);
    constexpr uint64_t kDoubleInfinity = uint64_t{0x7ff} << 52;
    if (magnitude > kDoubleInfinity) return sign | kInfinity | kQuietBit;
    const int exponent = static_cast<int>(magnitude >> 52) - 1023;
    if (exponent > kBias) return sign | kInfinity;
    const int kept_exponent = exponent < kMinExponent ? kMinExponent : exponent;
    const int shift = 52 - kMantissaBits + (kept_exponent - exponent);
    if (shift > 53) return sign;  // Below half of the smallest subnormal.
    const uint64_t significand = (magnitude & ((uint64_t{1} << 52) - 1)) | (uint64_t{1} << 52);
    uint64_t rounded = significand >> shift;
    const uint64_t rest = significand & ((uint64_t{1} << shift) - 1);
    const uint64_t half = uint64_t{1} << (shift - 1);
    rounded += rest > half || (rest == half && (rounded & 1));
    // The leading bit of `rounded` adds one to the exponent field, and so does a carry: up to infinity itself.
    const uint64_t field = static_cast<uint64_t>(kept_exponent - kMinExponent) << kMantissaBits;
    return sign | static_cast<uint16_t>(field + rounded);
  }

  static double ToDouble(uint16_t half) {
    const uint64_t sign = static_cast<uint64_t>(half >> 15) << 63;
    const int exponent = (half & kInfinity) >> kMantissaBits;
    const uint64_t mantissa = half & ((1 << kMantissaBits) - 1);
    if (exponent == 0) {
      const double unit = BitsAs<double>(static_cast<uint64_t>(kMinExponent - kMantissaBits + 1023) << 52);
      return BitsAs<double>(BitsAs<uint64_t>(static_cast<double>(mantissa) * unit) | sign);
    }
    const uint64_t wide = (half & kInfinity) == kInfinity ? 0x7ff : exponent - kBias + 1023;
    return BitsAs<double>(sign | (wide << 52) | (mantissa << (52 - kMantissaBits)));
  }
};
using Float16 = Format16<5, 10>;
using BFloat16 = Format16<8, 7>;

inline uint16_t LoadBits16(const void* src, int64_t i) {
  uint16_t bits;
  std::memcpy(&bits, static_cast<const char*>(src) + 2 * i, 2);
  return bits;
}
inline void StoreBits16(uint16_t bits, void* dst, int64_t i) { std::memcpy(static_cast<char*>(dst) + 2 * i, &bits, 2); }

inline float FloatFromBFloat16(uint16_t bits) { return BitsAs<float>(static_cast<uint32_t>(bits) << 16); }
inline uint16_t BFloat16FromFloat(float value) {
  const uint32_t bits = BitsAs<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | BFloat16::kQuietBit);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

}  // namespace
}  // namespace sinkhorn::cpu
#endif  // SINKHORN_KERNELS_CPU_HALF_CC_SCALAR

// ---- Loops ----------------------------------------------------------------------------------------------------------
HWY_BEFORE_NAMESPACE();
namespace sinkhorn::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using DF = hn::ScalableTag<float>;

// The vector unit converts float16 itself (F16C and AVX-512): exactly, and untouched by flush-to-zero.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
constexpr bool kHardwareFloat16 = true;
#else
constexpr bool kHardwareFloat16 = false;
#endif

void FloatFromFloat16(const void* src, int64_t count, float* dst) {
  int64_t i = 0;
  if constexpr (kHardwareFloat16) {
    const DF df;
    const hn::Rebind<hwy::float16_t, DF> dh;
    const auto* from = static_cast<const hwy::float16_t*>(src);
    for (const int64_t step = hn::Lanes(df); i + step <= count; i += step) {
      hn::StoreU(hn::PromoteTo(df, hn::LoadU(dh, from + i)), df, dst + i);
    }
  }
  for (; i < count; ++i) dst[i] = static_cast<float>(Float16::ToDouble(LoadBits16(src, i)));
}

void Float16FromFloat(const float* src, int64_t count, void* dst) {
  int64_t i = 0;
  if constexpr (kHardwareFloat16) {
    const DF df;
    const hn::Rebind<hwy::float16_t, DF> dh;
    auto* to = static_cast<hwy::float16_t*>(dst);
    for (const int64_t step = hn::Lanes(df); i + step <= count; i += step) {
      hn::StoreU(hn::DemoteTo(dh, hn::LoadU(df, src + i)), dh, to + i);
    }
  }
  for (; i < count; ++i) StoreBits16(Float16::FromDouble(src[i]), dst, i);
}

void FloatFromBFloat16Row(const void* src, int64_t count, float* dst) {
  const DF df;
  const hn::RebindToUnsigned<DF> du;
  const hn::Rebind<uint16_t, DF> dh;
  const auto* from = static_cast<const uint16_t*>(src);
  int64_t i = 0;
  for (const int64_t step = hn::Lanes(df); i + step <= count; i += step) {
    const auto wide = hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(dh, from + i)));
    hn::StoreU(hn::BitCast(df, wide), df, dst + i);
  }
  for (; i < count; ++i) dst[i] = FloatFromBFloat16(LoadBits16(src, i));
}

void DoubleFromFloat(const void* src, int64_t count, double* dst) {
  const hn::ScalableTag<double> dd;
  const hn::Rebind<float, hn::ScalableTag<double>> df;
  const auto* from = static_cast<const float*>(src);
  int64_t i = 0;
  for (const int64_t step = hn::Lanes(dd); i + step <= count; i += step) {
    hn::StoreU(hn::PromoteTo(dd, hn::LoadU(df, from + i)), dd, dst + i);
  }
  for (; i < count; ++i) {
    float value;
    std::memcpy(&value, from + i, sizeof value);
    dst[i] = value;
  }
}

void BFloat16FromFloatRow(const float* src, int64_t count, void* dst) {
  const DF df;
  const hn::RebindToSigned<DF> di;
  const hn::RebindToUnsigned<DF> du;
  const hn::Rebind<uint16_t, DF> dh;
  auto* to = static_cast<uint16_t*>(dst);
  int64_t i = 0;
  for (const int64_t step = hn::Lanes(df); i + step <= count; i += step) {
    const auto bits = hn::BitCast(du, hn::LoadU(df, src + i));
    const auto top = hn::ShiftRight<16>(bits);
    const auto rounded =
        hn::ShiftRight<16>(hn::Add(bits, hn::Add(hn::Set(du, 0x7fffu), hn::And(top, hn::Set(du, 1u)))));
    const auto is_nan = hn::Gt(hn::BitCast(di, hn::And(bits, hn::Set(du, 0x7fffffffu))), hn::Set(di, 0x7f800000));
    const auto quiet = hn::Or(top, hn::Set(du, uint32_t{BFloat16::kQuietBit}));
    const auto half = hn::IfThenElse(hn::RebindMask(du, is_nan), quiet, rounded);
    // Every value is below 2^16. DemoteTo saturates signed input, hence the truncation.
    hn::StoreU(hn::TruncateTo(dh, half), dh, to + i);
  }
  for (; i < count; ++i) StoreBits16(BFloat16FromFloat(src[i]), dst, i);
}

}  // namespace sinkhorn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sinkhorn::cpu {
namespace {

HWY_EXPORT(FloatFromFloat16);
HWY_EXPORT(Float16FromFloat);
HWY_EXPORT(FloatFromBFloat16Row);
HWY_EXPORT(BFloat16FromFloatRow);
HWY_EXPORT(DoubleFromFloat);

// Unaligned element access of a plain type.
template <class T>
T At(const void* src, int64_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(src) + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}
template <class T>
void Put(T value, void* dst, int64_t i) {
  std::memcpy(static_cast<char*>(dst) + i * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}

const void* Advanced(DType dtype, const void* src, int64_t offset) {
  return static_cast<const char*>(src) + offset * static_cast<int64_t>(SizeOf(dtype));
}
void* Advanced(DType dtype, void* dst, int64_t offset) {
  return static_cast<char*>(dst) + offset * static_cast<int64_t>(SizeOf(dtype));
}

}  // namespace

void LoadAsFloat(DType dtype, const void* src, int64_t offset, int64_t count, float* dst) {
  if (count <= 0) return;  // An empty row may have no address.
  src = Advanced(dtype, src, offset);
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(dst, src, count * sizeof(float));
      return;
    case DType::kFloat64:
      for (int64_t i = 0; i < count; ++i) dst[i] = static_cast<float>(At<double>(src, i));
      return;
    case DType::kFloat16:
      HWY_DYNAMIC_DISPATCH(FloatFromFloat16)(src, count, dst);
      return;
    case DType::kBFloat16:
      HWY_DYNAMIC_DISPATCH(FloatFromBFloat16Row)(src, count, dst);
      return;
  }
}

void LoadAsDouble(DType dtype, const void* src, int64_t offset, int64_t count, double* dst) {
  if (count <= 0) return;  // An empty row may have no address.
  src = Advanced(dtype, src, offset);
  switch (dtype) {
    case DType::kFloat32:
      HWY_DYNAMIC_DISPATCH(DoubleFromFloat)(src, count, dst);
      return;
    case DType::kFloat64:
      std::memcpy(dst, src, count * sizeof(double));
      return;
    case DType::kFloat16:
      for (int64_t i = 0; i < count; ++i) dst[i] = Float16::ToDouble(LoadBits16(src, i));
      return;
    case DType::kBFloat16:
      for (int64_t i = 0; i < count; ++i) dst[i] = BFloat16::ToDouble(LoadBits16(src, i));
      return;
  }
}

void StoreFromFloat(DType dtype, const float* src, int64_t count, void* dst, int64_t offset) {
  if (count <= 0) return;  // An empty row may have no address.
  dst = Advanced(dtype, dst, offset);
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(dst, src, count * sizeof(float));
      return;
    case DType::kFloat64:
      for (int64_t i = 0; i < count; ++i) Put<double>(src[i], dst, i);
      return;
    case DType::kFloat16:
      HWY_DYNAMIC_DISPATCH(Float16FromFloat)(src, count, dst);
      return;
    case DType::kBFloat16:
      HWY_DYNAMIC_DISPATCH(BFloat16FromFloatRow)(src, count, dst);
      return;
  }
}

void StoreFromDouble(DType dtype, const double* src, int64_t count, void* dst, int64_t offset) {
  if (count <= 0) return;  // An empty row may have no address.
  dst = Advanced(dtype, dst, offset);
  switch (dtype) {
    case DType::kFloat32:
      for (int64_t i = 0; i < count; ++i) Put<float>(static_cast<float>(src[i]), dst, i);
      return;
    case DType::kFloat64:
      std::memcpy(dst, src, count * sizeof(double));
      return;
    case DType::kFloat16:
      for (int64_t i = 0; i < count; ++i) StoreBits16(Float16::FromDouble(src[i]), dst, i);
      return;
    case DType::kBFloat16:
      for (int64_t i = 0; i < count; ++i) StoreBits16(BFloat16::FromDouble(src[i]), dst, i);
      return;
  }
}

}  // namespace sinkhorn::cpu
#endif  // HWY_ONCE
