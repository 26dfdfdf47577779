// Every rule of the contract has a request that breaks it and is refused with the right field.
#include "tests/server/refused.h"

#include <ostream>
#include <string>

#include "gmock/gmock.h"
#include "tests/server/validated.h"

namespace sinkhorn {

std::ostream& operator<<(std::ostream& out, const Refused& refused) { return out << refused.name; }

namespace {

using testing::HasSubstr;

class RefusedTest : public testing::TestWithParam<Refused> {};

TEST_P(RefusedTest, NamesTheField) {
  v1::SolveRequest request = GetParam().base();
  ASSERT_FALSE(Check(request)->error.has_value()) << "the request must be valid before the change";
  GetParam().change(&request);

  Limits limits;
  limits.max_points = 50;
  limits.max_dimension = 40;
  limits.max_matrix_elements = 1000;
  limits.max_members = 100;
  limits.max_iterations = 5000;
  limits.max_reply_bytes = 20000;
  const auto run = Check(request, limits);

  ASSERT_TRUE(run->error.has_value());
  EXPECT_EQ(run->error->field, GetParam().field) << run->error->message;
  EXPECT_STREQ(run->error->reason, GetParam().reason) << run->error->message;
  EXPECT_EQ(run->error->code, absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(run->error->message, HasSubstr(GetParam().field));
  EXPECT_THAT(run->error->message, HasSubstr("; got "));
  EXPECT_EQ(run->prepared.block, nullptr) << "memory was allocated for a refused request";
}

std::string NameOf(const testing::TestParamInfo<Refused>& info) { return info.param.name; }
INSTANTIATE_TEST_SUITE_P(Tensor, RefusedTest, testing::ValuesIn(TensorRules()), NameOf);
INSTANTIATE_TEST_SUITE_P(Normalization, RefusedTest, testing::ValuesIn(NormalizationRules()), NameOf);
INSTANTIATE_TEST_SUITE_P(Transport, RefusedTest, testing::ValuesIn(TransportRules()), NameOf);
INSTANTIATE_TEST_SUITE_P(Solver, RefusedTest, testing::ValuesIn(SolverRules()), NameOf);
INSTANTIATE_TEST_SUITE_P(Output, RefusedTest, testing::ValuesIn(OutputRules()), NameOf);
INSTANTIATE_TEST_SUITE_P(Limit, RefusedTest, testing::ValuesIn(LimitRules()), NameOf);

}  // namespace
}  // namespace sinkhorn
