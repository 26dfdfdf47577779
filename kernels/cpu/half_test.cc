// Conversions against exhaustive tables: every 16-bit pattern round-trips, and rounding is to nearest even at every
// midpoint.
#include "kernels/cpu/half.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "gtest/gtest.h"

namespace sinkhorn::cpu {
namespace {

// The value of a 16-bit pattern by definition: (-1)^s 2^(e - bias) 1.m, subnormal 2^(1 - bias) 0.m.
double ValueOf(DType dtype, uint16_t bits) {
  const int mantissa_bits = dtype == DType::kFloat16 ? 10 : 7;
  const int bias = dtype == DType::kFloat16 ? 15 : 127;
  const int top = dtype == DType::kFloat16 ? 31 : 255;
  const int exponent = (bits & 0x7fff) >> mantissa_bits;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == top) return mantissa ? std::numeric_limits<double>::quiet_NaN() : sign * INFINITY;
  const double fraction = std::ldexp(mantissa, -mantissa_bits);
  return sign * (exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias));
}

class Half : public testing::TestWithParam<DType> {};

TEST_P(Half, EveryPatternIsReadAndWrittenBack) {
  std::vector<uint16_t> bits(1 << 16);
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(i);
  const int64_t count = static_cast<int64_t>(bits.size());
  std::vector<float> floats(count);
  std::vector<double> doubles(count);
  LoadAsFloat(GetParam(), bits.data(), 0, count, floats.data());
  LoadAsDouble(GetParam(), bits.data(), 0, count, doubles.data());
  std::vector<uint16_t> from_floats(count), from_doubles(count);
  StoreFromFloat(GetParam(), floats.data(), count, from_floats.data(), 0);
  StoreFromDouble(GetParam(), doubles.data(), count, from_doubles.data(), 0);
  for (int64_t i = 0; i < count; ++i) {
    const double value = ValueOf(GetParam(), bits[i]);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(floats[i]) && std::isnan(doubles[i])) << i;
      ASSERT_TRUE(std::isnan(ValueOf(GetParam(), from_floats[i]))) << i;
      ASSERT_TRUE(std::isnan(ValueOf(GetParam(), from_doubles[i]))) << i;
      continue;
    }
    ASSERT_EQ(floats[i], value) << i;
    ASSERT_EQ(doubles[i], value) << i;
    ASSERT_EQ(from_floats[i], bits[i]) << i;
    ASSERT_EQ(from_doubles[i], bits[i]) << i;
  }
}

// Between neighbours lo and hi (bit patterns one apart): the midpoint goes to the even one, anything else to the
// nearer.
TEST_P(Half, RoundsToNearestEven) {
  const uint16_t infinity = GetParam() == DType::kFloat16 ? 0x7c00 : 0x7f80;
  std::vector<double> values;
  std::vector<uint16_t> expected;
  for (uint16_t lo = 0; lo + 1 < infinity; ++lo) {
    const double a = ValueOf(GetParam(), lo), b = ValueOf(GetParam(), lo + 1), middle = a + (b - a) / 2;
    for (double value : {middle, a + (b - a) * .499, a + (b - a) * .501}) {
      const uint16_t nearest = value < middle ? lo : value > middle ? lo + 1 : lo + (lo & 1);
      values.push_back(value), expected.push_back(nearest);
      values.push_back(-value), expected.push_back(nearest | 0x8000);
    }
  }
  const int64_t count = static_cast<int64_t>(values.size());
  std::vector<uint16_t> actual(count);
  StoreFromDouble(GetParam(), values.data(), count, actual.data(), 0);
  for (int64_t i = 0; i < count; ++i) ASSERT_EQ(actual[i], expected[i]) << values[i];

  std::vector<float> floats(values.begin(), values.end());  // Still on the same side of the midpoint, or on it.
  StoreFromFloat(GetParam(), floats.data(), count, actual.data(), 0);
  for (int64_t i = 0; i < count; ++i) ASSERT_EQ(actual[i], expected[i]) << values[i];
}

TEST_P(Half, OverflowsToInfinityAndDoublesAreRoundedOnce) {
  const bool half = GetParam() == DType::kFloat16;
  const double largest = half ? 65504 : ValueOf(DType::kBFloat16, 0x7f7f);
  const double midpoint = half ? 65520 : largest + std::ldexp(1.0, 119);
  // Just below a midpoint by less than a float can tell: rounding through float would go up.
  const double tie = 1 + std::ldexp(1.0, half ? -11 : -8), above = tie + std::ldexp(1.0, -40);
  const std::vector<double> values = {midpoint, std::nextafter(midpoint, 0), 1e300, -1e300, above, tie, 1e-300};
  std::vector<uint16_t> actual(values.size());
  StoreFromDouble(GetParam(), values.data(), static_cast<int64_t>(values.size()), actual.data(), 0);
  EXPECT_EQ(ValueOf(GetParam(), actual[0]), INFINITY);
  EXPECT_EQ(ValueOf(GetParam(), actual[1]), largest);
  EXPECT_EQ(ValueOf(GetParam(), actual[2]), INFINITY);
  EXPECT_EQ(ValueOf(GetParam(), actual[3]), -INFINITY);
  EXPECT_EQ(ValueOf(GetParam(), actual[4]), 1 + std::ldexp(1.0, half ? -10 : -7));
  EXPECT_EQ(ValueOf(GetParam(), actual[5]), 1.0);
  EXPECT_EQ(actual[6], 0);
}

INSTANTIATE_TEST_SUITE_P(Formats, Half, testing::Values(DType::kFloat16, DType::kBFloat16));

// Any alignment, any offset, any count; nothing outside the range is written.
TEST(Rows, UnalignedAndInBounds) {
  for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16}) {
    const int64_t size = static_cast<int64_t>(SizeOf(dtype));
    for (int64_t count : {0, 1, 7, 16, 33}) {
      std::vector<float> values(count), read(count);
      std::vector<double> read_double(count);
      for (int64_t i = 0; i < count; ++i) values[i] = static_cast<float>(i) - 3;
      std::vector<char> memory((count + 4) * size + 1, 'x');
      char* tensor = memory.data() + 1;
      StoreFromFloat(dtype, values.data(), count, tensor, 2);
      LoadAsFloat(dtype, tensor, 2, count, read.data());
      LoadAsDouble(dtype, tensor, 2, count, read_double.data());
      EXPECT_EQ(read, values);
      EXPECT_EQ(read_double, std::vector<double>(values.begin(), values.end()));
      for (int64_t i = 0; i < 2 * size; ++i) {
        EXPECT_EQ(tensor[i], 'x');
        EXPECT_EQ(tensor[(count + 2) * size + i], 'x');
      }
    }
  }
}

}  // namespace
}  // namespace sinkhorn::cpu
