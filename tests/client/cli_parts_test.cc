// What the command line reads and prints: arrays from text, names of enums, JSON.
#include <cmath>
#include <fstream>
#include <string>
#include <vector>

#include "client/cli/array_input.h"
#include "client/cli/json.h"
#include "client/cli/names.h"
#include "client/cpp/npy.h"
#include "client/cpp/tensor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace sinkhorn::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string ErrorOf(const absl::StatusOr<v1::Tensor>& tensor) {
  EXPECT_EQ(tensor.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(tensor.status().message());
}

// ---- Arrays ----

TEST(ArrayInputTest, ReadsNumbersInPlace) {
  const absl::StatusOr<v1::Tensor> tensor = ReadArray("0, 1.5; -2e-3,4", 2);

  ASSERT_TRUE(tensor.ok()) << tensor.status();
  EXPECT_EQ(tensor->dtype(), v1::DATA_TYPE_FLOAT32);
  EXPECT_THAT(tensor->shape(), ElementsAre(2, 2));
  EXPECT_THAT(*ToFloats(*tensor), ElementsAre(0, 1.5f, -2e-3f, 4));
}

TEST(ArrayInputTest, TheRankFollowsTheFlag) {
  EXPECT_THAT(ReadArray("1,2,3", 2)->shape(), ElementsAre(1, 3));
  EXPECT_THAT(ReadArray("1,2,3", 1)->shape(), ElementsAre(3));
  EXPECT_THAT(ReadArray("1;2;3", 2)->shape(), ElementsAre(3, 1));
  EXPECT_THAT(ReadArray("1;2;3", 1)->shape(), ElementsAre(3));
  EXPECT_THAT(ReadArray("1", 2)->shape(), ElementsAre(1, 1));
  EXPECT_THAT(ReadArray("1", 1)->shape(), ElementsAre(1));
  EXPECT_THAT(ReadArray("1", 0)->shape(), IsEmpty());
  EXPECT_THAT(ReadArray("1,2", 0)->shape(), ElementsAre(2));
  EXPECT_THAT(ReadArray("1,2;3,4", 1)->shape(), ElementsAre(2, 2));
}

TEST(ArrayInputTest, ReadsTextFiles) {
  const std::string path = testing::TempDir() + "/points.csv";
  std::ofstream(path) << "# two points\n0, 0.5\t1\r\n\n2 3,4  # the second\n";

  const absl::StatusOr<v1::Tensor> tensor = ReadArray(path, 2);

  ASSERT_TRUE(tensor.ok()) << tensor.status();
  EXPECT_THAT(tensor->shape(), ElementsAre(2, 3));
  EXPECT_THAT(*ToFloats(*tensor), ElementsAre(0, 0.5f, 1, 2, 3, 4));
}

TEST(ArrayInputTest, ReadsNpyFilesAsTheyAre) {
  const std::string path = testing::TempDir() + "/vector.npy";
  ASSERT_TRUE(WriteNpy(path, MakeTensor(std::vector<double>{1, 2}, {2})).ok());

  const absl::StatusOr<v1::Tensor> tensor = ReadArray(path, 2);

  ASSERT_TRUE(tensor.ok()) << tensor.status();
  EXPECT_EQ(tensor->dtype(), v1::DATA_TYPE_FLOAT64);
  EXPECT_THAT(tensor->shape(), ElementsAre(2));
}

TEST(ArrayInputTest, ErrorsSayWhereAndWhat) {
  EXPECT_THAT(ErrorOf(ReadArray("0,1;1,x", 2)), HasSubstr("row 2: 'x' is not a number"));
  EXPECT_THAT(ErrorOf(ReadArray("0,1;1", 2)), HasSubstr("row 2 has 1 numbers where the rows before it have 2"));
  EXPECT_THAT(ErrorOf(ReadArray("points.np", 2)), HasSubstr("neither a .npy, .csv, .tsv or .txt file nor numbers"));
  EXPECT_THAT(ErrorOf(ReadArray(";", 2)), HasSubstr("no numbers"));
  EXPECT_EQ(ReadArray("absent.npy", 2).status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(ReadArray("absent.csv", 2).status().message()), HasSubstr("cannot open absent.csv"));
  const std::string path = testing::TempDir() + "/not.npy";
  std::ofstream(path) << "0,1";
  EXPECT_THAT(ErrorOf(ReadArray(path, 2)), HasSubstr("not.npy: not a valid .npy file"));
}

// ---- Names ----

TEST(NamesTest, AreShortAndReadBack) {
  EXPECT_EQ(ShortName(v1::STOP_REASON_MAX_ITERATIONS), "max_iterations");
  EXPECT_EQ(ShortName(v1::DATA_TYPE_BFLOAT16), "bfloat16");
  EXPECT_EQ(ShortName(static_cast<v1::Precision>(77)), "77");
  for (const google::protobuf::EnumDescriptor* type :
       {v1::Output_descriptor(), v1::NormalizationRecipe_descriptor(), v1::CostFunction_descriptor()}) {
    for (int i = 1; i < type->value_count(); ++i) {
      EXPECT_EQ(*FromShortName(type, ShortName(type, type->value(i)->number())), type->value(i)->number());
    }
  }
  EXPECT_EQ(*FromShortName(v1::Precision_descriptor(), "STRICT"), v1::PRECISION_STRICT);
  EXPECT_EQ(FromShortName(v1::Precision_descriptor(), "sharp").status().message(),
            "must be one of strict, fast, double; got sharp");
  EXPECT_FALSE(FromShortName(v1::Precision_descriptor(), "unspecified").ok());
}

// ---- JSON ----

TEST(JsonTest, NumbersReadBack) {
  EXPECT_EQ(JsonNumber(0.1), "0.1");
  EXPECT_EQ(JsonNumber(0.1f), "0.1");
  EXPECT_EQ(JsonNumber(1.0 / 3), "0.33333333333333331");
  EXPECT_EQ(JsonNumber(1.0f / 3), "0.333333343");
  EXPECT_EQ(JsonNumber(12.0), "12");
  EXPECT_EQ(JsonNumber(static_cast<double>(NAN)), "null");
  EXPECT_EQ(JsonNumber(static_cast<double>(INFINITY)), "null");
}

TEST(JsonTest, StringsAreEscaped) { EXPECT_EQ(JsonString("a\"b\\c\nd\te\x01"), "\"a\\\"b\\\\c\\nd\\te\\u0001\""); }

TEST(JsonTest, MessagesBecomeObjects) {
  v1::SolveResponse response;
  response.add_value(0.5);
  response.mutable_convergence()->set_iterations(7);
  response.mutable_convergence()->set_stop_reason(v1::STOP_REASON_TOLERANCE);
  *response.mutable_f() = MakeTensor(std::vector<float>{1, 2}, {2});

  EXPECT_EQ(JsonMembers(response,
                        [](const std::string& name, const v1::Tensor& tensor) {
                          return "\"" + name + " of " + std::to_string(tensor.shape(0)) + "\"";
                        }),
            R"("request_id": "", "convergence": {"iterations": 7, "converged": false, "marginal_error_a": 0, )"
            R"("marginal_error_b": 0, "stop_reason": "tolerance"}, "value": [0.5], "f": "f of 2")");
}

TEST(JsonTest, TensorsNest) {
  EXPECT_EQ(JsonElements(MakeTensor(std::vector<float>{1, 2, 3, 4.5}, {2, 1, 2})), "[[[1, 2]], [[3, 4.5]]]");
  EXPECT_EQ(JsonElements(MakeTensor(std::vector<double>{0.1}, {})), "0.1");
}

}  // namespace
}  // namespace sinkhorn::client
