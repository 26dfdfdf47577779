// Tensors from and to arrays; half precision against every one of its 65,536 patterns.
#include "client/cpp/tensor.h"

#include <cmath>
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace sinkhorn::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(TensorTest, HoldsTheBytesOfTheArray) {
  const std::vector<float> values = {1, -2, 0.5f, 3e38f, 0, -0.0f};

  const v1::Tensor tensor = MakeTensor(values, {2, 3});

  EXPECT_EQ(tensor.dtype(), v1::DATA_TYPE_FLOAT32);
  EXPECT_THAT(tensor.shape(), ElementsAre(2, 3));
  EXPECT_EQ(tensor.data(), std::string(reinterpret_cast<const char*>(values.data()), 24));
  EXPECT_TRUE(CheckTensor(tensor).ok());
}

TEST(TensorTest, LittleEndian) {
  EXPECT_EQ(MakeTensor(std::vector<float>{1}, {}).data(), std::string("\x00\x00\x80\x3f", 4));
  EXPECT_EQ(MakeTensor(std::vector<float>{1}, {}, v1::DATA_TYPE_FLOAT16).data(), std::string("\x00\x3c", 2));
  EXPECT_EQ(MakeTensor(std::vector<float>{1}, {}, v1::DATA_TYPE_BFLOAT16).data(), std::string("\x80\x3f", 2));
  EXPECT_EQ(MakeTensor(std::vector<double>{1}, {}).data(), std::string("\x00\x00\x00\x00\x00\x00\xf0\x3f", 8));
}

TEST(TensorTest, ViewsInPlace) {
  const v1::Tensor tensor = MakeTensor(std::vector<double>{1, 2, 3}, {3});

  const absl::StatusOr<absl::Span<const double>> view = View<double>(tensor);

  ASSERT_TRUE(view.ok());
  EXPECT_THAT(*view, ElementsAre(1, 2, 3));
  EXPECT_EQ(reinterpret_cast<const char*>(view->data()), tensor.data().data());
  EXPECT_FALSE(View<float>(tensor).ok());
  EXPECT_FALSE(View<uint16_t>(tensor).ok());
}

TEST(TensorTest, ConvertsBetweenAllTypes) {
  const std::vector<double> values = {0, 1, -2.5, 0.125, 1024};  // Exact in all of them.
  for (int from = 1; from <= 4; ++from) {
    for (int to = 1; to <= 4; ++to) {
      const v1::Tensor tensor = MakeTensor(values, {5}, static_cast<v1::DataType>(from));

      const absl::StatusOr<v1::Tensor> converted = Convert(tensor, static_cast<v1::DataType>(to));

      ASSERT_TRUE(converted.ok());
      EXPECT_EQ(converted->dtype(), to);
      EXPECT_THAT(*ToDoubles(*converted), testing::ElementsAreArray(values));
      EXPECT_THAT(*ToFloats(*converted), ElementsAre(0, 1, -2.5, 0.125, 1024));
    }
  }
}

TEST(TensorTest, ATensorThatIsNotWholeIsRefused) {
  v1::Tensor tensor = MakeTensor(std::vector<float>{1, 2, 3}, {2, 2});
  EXPECT_THAT(std::string(CheckTensor(tensor).message()), HasSubstr("4 elements of 4 bytes for shape [2, 2]; got 12"));
  EXPECT_FALSE(View<float>(tensor).ok());
  EXPECT_FALSE(ToDoubles(tensor).ok());
  tensor.set_shape(0, -2);
  EXPECT_FALSE(CheckTensor(tensor).ok());
  tensor.set_dtype(v1::DATA_TYPE_UNSPECIFIED);
  EXPECT_FALSE(CheckTensor(tensor).ok());
  EXPECT_FALSE(Convert(MakeTensor(std::vector<float>{1}, {}), v1::DATA_TYPE_UNSPECIFIED).ok());
}

TEST(TensorTest, CountsElementsWithoutOverflow) {
  EXPECT_EQ(*ElementCount(absl::Span<const int64_t>()), 1);
  EXPECT_EQ(*ElementCount({3, 0, 5}), 0);
  EXPECT_EQ(*ElementCount({1 << 20, 1 << 20}), int64_t{1} << 40);
  EXPECT_FALSE(ElementCount({int64_t{1} << 40, int64_t{1} << 40}).ok());
  EXPECT_FALSE(ElementCount({-1}).ok());
}

TEST(HalfTest, EveryPatternReturnsToItself) {
  for (int bits = 0; bits <= 0xffff; ++bits) {
    const float value = HalfToFloat(static_cast<uint16_t>(bits));
    const uint16_t back = FloatToHalf(value);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(HalfToFloat(back))) << bits;
    } else {
      ASSERT_EQ(back, bits);
    }
  }
}

// Neighbours, and the point midway between them, which goes to the even one. (Covers subnormals and overflow.)
TEST(HalfTest, RoundsToNearestEven) {
  for (uint16_t bits = 0; bits < 0x7c00; ++bits) {
    const float low = HalfToFloat(bits);
    const float high = bits == 0x7bff ? 65536.0f : HalfToFloat(static_cast<uint16_t>(bits + 1));
    const float middle = (low + high) / 2;
    ASSERT_EQ(FloatToHalf(middle), bits % 2 == 0 ? bits : bits + 1) << low;
    ASSERT_EQ(FloatToHalf(std::nextafter(middle, 0.0f)), bits) << low;
    ASSERT_EQ(FloatToHalf(std::nextafter(middle, INFINITY)), bits + 1) << low;
    ASSERT_EQ(FloatToHalf(-middle), 0x8000 | FloatToHalf(middle));
  }
  EXPECT_EQ(FloatToHalf(1e30f), 0x7c00);
  EXPECT_EQ(FloatToHalf(1e-30f), 0);
  EXPECT_EQ(HalfToFloat(0x3c00), 1.0f);
  EXPECT_EQ(HalfToFloat(0x0001), 0x1p-24f);
}

TEST(BFloat16Test, RoundsToNearestEven) {
  for (uint32_t bits = 0; bits < 0x7f80; ++bits) {
    const float low = BFloat16ToFloat(static_cast<uint16_t>(bits));
    ASSERT_EQ(FloatToBFloat16(low), bits);
    if (bits == 0x7f7f) continue;  // Its upper neighbour is infinity.
    const float high = BFloat16ToFloat(static_cast<uint16_t>(bits + 1));
    const float middle = static_cast<float>((static_cast<double>(low) + high) / 2);
    ASSERT_EQ(FloatToBFloat16(middle), bits % 2 == 0 ? bits : bits + 1) << low;
  }
  EXPECT_EQ(FloatToBFloat16(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_TRUE(std::isnan(BFloat16ToFloat(FloatToBFloat16(NAN))));
}

}  // namespace
}  // namespace sinkhorn::client
