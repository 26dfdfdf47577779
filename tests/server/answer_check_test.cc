// What may be sent: infinite bounds and potentials, and nothing that is not a number.
#include "server/answer_check.h"

#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"

namespace sinkhorn {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

// An answer with a value, a bound, and a tensor of `T` whose one element can be set.
template <class T>
struct Answer {
  Convergence convergence;
  v1::SolveResponse response;
  Prepared prepared;

  explicit Answer(v1::DataType dtype) {
    response.add_value(1);
    response.add_dual_bound(-kInf);
    prepared.block_bytes = 5 * sizeof(T);
    prepared.block = NewBlock(prepared.block_bytes);
    for (int i = 0; i < 5; ++i) Set(i, T{});
    ReplyTensor tensor;
    tensor.dtype = dtype;
    tensor.shape = {4};
    tensor.offset = sizeof(T);
    tensor.bytes = 4 * sizeof(T);
    prepared.tensors.push_back(tensor);
  }

  void Set(int index, T value) { reinterpret_cast<T*>(prepared.block.get())[index] = value; }
  bool ok() const { return IsAnswer(convergence, response, prepared); }
};

TEST(AnswerCheckTest, NanInATensor) {
  for (int index = 0; index < 5; ++index) {
    Answer<float> answer(v1::DATA_TYPE_FLOAT32);
    answer.Set(index, std::nanf(""));
    EXPECT_EQ(answer.ok(), index == 0) << "the tensor is elements 1 to 4; " << index;
    answer.Set(index, -HUGE_VALF);
    EXPECT_TRUE(answer.ok()) << "the potential of a point without mass";
  }
}

TEST(AnswerCheckTest, NanOfEveryType) {
  Answer<double> float64(v1::DATA_TYPE_FLOAT64);
  EXPECT_TRUE(float64.ok());
  float64.Set(4, -kNan);
  EXPECT_FALSE(float64.ok());
  for (v1::DataType dtype : {v1::DATA_TYPE_FLOAT16, v1::DATA_TYPE_BFLOAT16}) {
    Answer<uint16_t> half(dtype);
    const uint16_t infinity = dtype == v1::DATA_TYPE_FLOAT16 ? 0x7c00 : 0x7f80;
    for (uint16_t sign : {0, 0x8000}) {
      half.Set(2, sign | infinity);
      EXPECT_TRUE(half.ok());
      half.Set(2, sign | infinity | 1);
      EXPECT_FALSE(half.ok());
    }
  }
}

TEST(AnswerCheckTest, ValuesAndErrorsAreFinite) {
  for (double bad : {kNan, kInf, -kInf}) {
    Answer<float> value(v1::DATA_TYPE_FLOAT32), linear(v1::DATA_TYPE_FLOAT32), error(v1::DATA_TYPE_FLOAT32);
    value.response.set_value(0, bad);
    EXPECT_FALSE(value.ok());
    linear.response.add_value_linear(bad);
    EXPECT_FALSE(linear.ok());
    error.convergence.marginal_error_b = bad;
    EXPECT_FALSE(error.ok());
  }
}

}  // namespace
}  // namespace sinkhorn
