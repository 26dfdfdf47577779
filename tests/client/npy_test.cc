// The .npy reader against files that NumPy wrote, the writer against the reader (test_cli_solve.py: NumPy),
// and both against files that are broken in every way a byte can break them.
#include "client/cpp/npy.h"

#include <cmath>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "client/cpp/tensor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace sinkhorn::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string DataPath(const std::string& name) { return "tests/client/testdata/" + name + ".npy"; }

std::string Contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream buffer;
  buffer << file.rdbuf();
  return buffer.str();
}

std::string RefusalOf(const std::string& name) {
  const absl::StatusOr<v1::Tensor> tensor = ReadNpy(DataPath(name));
  EXPECT_EQ(tensor.status().code(), absl::StatusCode::kInvalidArgument) << name;
  return std::string(tensor.status().message());
}

class NumpyFileTest : public testing::TestWithParam<std::pair<const char*, v1::DataType>> {};

TEST_P(NumpyFileTest, IsRead) {
  const auto& [name, dtype] = GetParam();

  const absl::StatusOr<v1::Tensor> tensor = ReadNpy(DataPath(name));

  ASSERT_TRUE(tensor.ok()) << tensor.status();
  EXPECT_EQ(tensor->dtype(), dtype);
  EXPECT_THAT(tensor->shape(), ElementsAre(2, 3));
  EXPECT_THAT(*ToDoubles(*tensor), ElementsAre(-0.5, -0.25, 0, 0.25, 0.5, 0.75));
}

// The writer's bytes are those of NumPy itself, so each side reads the other's files.
TEST_P(NumpyFileTest, IsWrittenToTheByteAsNumpyDoes) {
  const auto& [name, dtype] = GetParam();
  if (std::string(name) == "version2") GTEST_SKIP() << "written as version 1";

  EXPECT_EQ(*FormatNpy(*ReadNpy(DataPath(name))), Contents(DataPath(name)));
}

INSTANTIATE_TEST_SUITE_P(Types, NumpyFileTest,
                         testing::Values(std::make_pair("f2", v1::DATA_TYPE_FLOAT16),
                                         std::make_pair("f4", v1::DATA_TYPE_FLOAT32),
                                         std::make_pair("f8", v1::DATA_TYPE_FLOAT64),
                                         std::make_pair("version2", v1::DATA_TYPE_FLOAT32)),
                         [](const auto& info) { return std::string(info.param.first); });

TEST(NpyTest, ReadsScalarsVectorsAndEmptyArrays) {
  const absl::StatusOr<v1::Tensor> scalar = ReadNpy(DataPath("scalar"));
  const absl::StatusOr<v1::Tensor> vector = ReadNpy(DataPath("vector"));
  const absl::StatusOr<v1::Tensor> empty = ReadNpy(DataPath("empty"));

  ASSERT_TRUE(scalar.ok() && vector.ok() && empty.ok());
  EXPECT_EQ(scalar->shape_size(), 0);
  EXPECT_THAT(*ToDoubles(*scalar), ElementsAre(2.5));
  EXPECT_THAT(vector->shape(), ElementsAre(3));
  EXPECT_THAT(*ToDoubles(*vector), ElementsAre(1, 2.5, -3));
  EXPECT_THAT(empty->shape(), ElementsAre(0, 3));
  for (const char* name : {"scalar", "vector", "empty"}) {
    EXPECT_EQ(*FormatNpy(*ReadNpy(DataPath(name))), Contents(DataPath(name))) << name;
  }
}

TEST(NpyTest, KeepsSpecialValues) {
  const std::vector<double> values = *ToDoubles(*ReadNpy(DataPath("specials")));

  ASSERT_EQ(values.size(), 5u);
  EXPECT_TRUE(std::isnan(values[0]));
  EXPECT_EQ(values[1], INFINITY);
  EXPECT_EQ(values[2], -INFINITY);
  EXPECT_TRUE(values[3] == 0 && std::signbit(values[3]));
  EXPECT_EQ(values[4], 0x1p-24);  // 6e-8 is nearest to the smallest subnormal.
}

TEST(NpyTest, RefusesWhatItCannotReadAndSaysWhatToDo) {
  EXPECT_THAT(RefusalOf("fortran"), HasSubstr("ascontiguousarray"));
  EXPECT_THAT(RefusalOf("big_endian"), HasSubstr("astype('<f4')"));
  EXPECT_THAT(RefusalOf("integers"), HasSubstr("'<i8' must be float16, float32 or float64"));
  EXPECT_THAT(RefusalOf("structured"), HasSubstr("structured"));
  EXPECT_THAT(RefusalOf("version3"), HasSubstr("version 3"));
  EXPECT_EQ(ReadNpy("no/such/file.npy").status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(ParseNpy("PK\x03\x04 a zip").status().message()), HasSubstr("NUMPY"));
  EXPECT_FALSE(ParseNpy("").ok());
}

TEST(NpyTest, RefusesEveryTruncationAndTrailingBytes) {
  const std::string whole = Contents(DataPath("f4"));
  ASSERT_TRUE(ParseNpy(whole).ok());
  const std::string path = testing::TempDir() + "/truncated.npy";

  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_FALSE(ParseNpy(whole.substr(0, size)).ok()) << size;
    std::ofstream(path, std::ios::binary) << whole.substr(0, size);
    EXPECT_FALSE(ReadNpy(path).ok()) << size;
  }
  EXPECT_FALSE(ParseNpy(whole + '\0').ok());
}

// Any byte of the header changed to anything: refused, or read as something whole; never a crash (run under ASan too).
TEST(NpyTest, SurvivesEveryChangedByte) {
  std::string bytes = Contents(DataPath("f4"));
  const size_t header_size = bytes.size() - 6 * sizeof(float);
  int refused = 0;
  for (size_t i = 0; i < header_size; ++i) {
    const char original = bytes[i];
    for (int value = 0; value < 256; ++value) {
      bytes[i] = static_cast<char>(value);
      const absl::StatusOr<v1::Tensor> tensor = ParseNpy(bytes);
      refused += !tensor.ok();
      if (tensor.ok()) {
        EXPECT_TRUE(CheckTensor(*tensor).ok()) << i << " " << value;
      }
    }
    bytes[i] = original;
  }
  EXPECT_GT(refused, 60 * 255);  // The magic, version, length and the 60 characters of the dictionary.
}

TEST(NpyTest, RefusesHugeClaims) {
  for (const char* shape : {"(9223372036854775807,)", "(4611686018427387904, 4)", "(99999999999999999999,)", "(-1,)"}) {
    const std::string header = std::string("{'descr': '<f4', 'fortran_order': False, 'shape': ") + shape + ", }\n";
    std::string bytes("\x93NUMPY\x01\x00", 8);
    bytes.push_back(static_cast<char>(header.size()));
    bytes.push_back(0);
    EXPECT_EQ(ParseNpy(bytes + header).status().code(), absl::StatusCode::kInvalidArgument) << shape;
  }
}

TEST(NpyTest, WritesFilesThatItReads) {
  const std::string path = testing::TempDir() + "/written.npy";
  const v1::Tensor tensor = MakeTensor(std::vector<double>{1, 2, 3, 4, 5, 6}, {1, 3, 2});

  ASSERT_TRUE(WriteNpy(path, tensor).ok());
  const absl::StatusOr<v1::Tensor> back = ReadNpy(path);

  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->SerializeAsString(), tensor.SerializeAsString());
  EXPECT_FALSE(std::ifstream(path + ".tmp").good());
}

TEST(NpyTest, WritesBFloat16AsFloat32) {
  const v1::Tensor tensor = MakeTensor(std::vector<float>{1, -2.5}, {2}, v1::DATA_TYPE_BFLOAT16);

  const absl::StatusOr<v1::Tensor> back = ParseNpy(*FormatNpy(tensor));

  EXPECT_EQ(back->dtype(), v1::DATA_TYPE_FLOAT32);
  EXPECT_THAT(*ToFloats(*back), ElementsAre(1, -2.5));
}

TEST(NpyTest, AnUnwritablePathIsAnError) {
  const v1::Tensor tensor = MakeTensor(std::vector<float>{1}, {1});

  EXPECT_EQ(WriteNpy("no/such/folder/a.npy", tensor).code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace sinkhorn::client
