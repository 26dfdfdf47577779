// The test tensors' own conversions, which nothing else checks.
#include "tests/conformance/tensor.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace sinkhorn::conformance {
namespace {

TEST(Tensor, RoundsToNearestEven) {
  const double half_ulp = std::ldexp(1.0, -11);
  EXPECT_EQ(Rounded(1 + half_ulp, DType::kFloat16), 1);
  EXPECT_EQ(Rounded(1 + 1.001 * half_ulp, DType::kFloat16), 1 + 2 * half_ulp);
  EXPECT_EQ(Rounded(1 + 3 * half_ulp, DType::kFloat16), 1 + 4 * half_ulp);
  EXPECT_EQ(Rounded(-1.00390625, DType::kBFloat16), -1);
  EXPECT_EQ(Rounded(65519, DType::kFloat16), 65504);
  EXPECT_EQ(Rounded(65520, DType::kFloat16), std::numeric_limits<double>::infinity());
  EXPECT_EQ(Rounded(1e-8, DType::kFloat16), 0);
  EXPECT_EQ(Rounded(4e-8, DType::kFloat16), std::ldexp(1.0, -24));
}

TEST(Tensor, KnownBits) {
  const auto first_bits = [](double value, DType dtype) {
    Tensor tensor = Tensor::Of({value}, dtype);
    const auto* bytes = static_cast<const unsigned char*>(tensor.view().data);
    return bytes[0] | bytes[1] << 8;
  };
  EXPECT_EQ(first_bits(1, DType::kFloat16), 0x3c00);
  EXPECT_EQ(first_bits(-2.5, DType::kFloat16), 0xc100);
  EXPECT_EQ(first_bits(65504, DType::kFloat16), 0x7bff);
  EXPECT_EQ(first_bits(std::ldexp(1.0, -24), DType::kFloat16), 0x0001);
  EXPECT_EQ(first_bits(1, DType::kBFloat16), 0x3f80);
  EXPECT_EQ(first_bits(-0.0, DType::kBFloat16), 0x8000);
  EXPECT_EQ(first_bits(1e39, DType::kBFloat16), 0x7f80);
}

TEST(Tensor, KeepsWhatTheDTypeHolds) {
  const Vector values = {0, -0.5, 1, 3.25, 1024, 0x1p-14, -0x1p-24};
  for (DType dtype : {DType::kFloat16, DType::kFloat32, DType::kFloat64}) {
    EXPECT_EQ(Tensor::Of(values, dtype).values(), values);
  }
  const Tensor batch = Tensor::Of({1, 2, 3, 4, 5, 6});
  EXPECT_EQ(batch.member(1, 2), Vector({4, 5, 6}));
  EXPECT_EQ(Tensor::Shared({7, 8}).member(1, 2), Vector({7, 8}));
  for (DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    EXPECT_TRUE(std::isnan(Tensor::Unwritten(3, dtype).values()[2]));
    EXPECT_EQ(Rounded(1 + UnitRoundoff(dtype), dtype), 1);
    EXPECT_GT(Rounded(1 + 1.01 * UnitRoundoff(dtype), dtype), 1);
    EXPECT_GT(Rounded(SmallestPositive(dtype), dtype), 0);
    EXPECT_EQ(Rounded(SmallestPositive(dtype) / 2, dtype), 0);
  }
}

}  // namespace
}  // namespace sinkhorn::conformance
