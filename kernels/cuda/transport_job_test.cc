// What is known of a job before a GPU is asked: what is taken of its memory, which must be what kernels lay out; how
// long outputs will take.
#include "kernels/cuda/transport_job.h"

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace sinkhorn {
namespace cuda {
namespace {

TEST(TransportJobTest, LayoutsDoNotDependOnWideClusters) {
  const int64_t sizes[] = {1, 64, 500, 513, 1000, 1023, 1024, 1025, 2048, 16384};
  for (int64_t n : sizes) {
    for (int64_t m : sizes) {
      for (int64_t dim : {0, 3, 17, 64, 300}) {
        for (Precision precision : {Precision::kStrict, Precision::kFast}) {
          Problem problem;
          problem.kind = dim == 0 ? ProblemKind::kDense : ProblemKind::kPointCloud;
          problem.n = n, problem.m = m, problem.dim = dim;
          problem.solver.epsilon = 0.1, problem.solver.max_iterations = 10, problem.solver.precision = precision;
          const Job with = JobOf(problem, {true, true, true}), without = JobOf(problem, {true, false, false});
          EXPECT_EQ(with.at.bytes, without.at.bytes) << absl::StrCat(n, " x ", m, " d ", dim);
          EXPECT_EQ(with.streamed, without.streamed) << absl::StrCat(n, " x ", m, " d ", dim);
          EXPECT_EQ(with.framed, without.framed) << absl::StrCat(n, " x ", m, " d ", dim);
        }
      }
    }
  }
}

// Within twice what they took beside 20 iterations of n x n points on an H200: tests/bench/gpu_shapes.cc.
TEST(TransportJobTest, OutputsArePredictedAsMeasured) {
  enum { kEntries, kLinear, kBound, kSparse, kProducts, kWideProducts, kDistances };
  const struct {
    int64_t n, dim;
    int output;
    double milliseconds;
  } measured[] = {{4000, 64, kEntries, 0.232},    {10000, 64, kEntries, 2.14},   {4000, 64, kLinear, 0.0803},
                  {10000, 128, kLinear, 0.933},   {1000, 64, kBound, 0.174},     {4000, 3, kBound, 0.246},
                  {10000, 64, kBound, 2.45},      {1000, 3, kSparse, 0.0542},    {4000, 128, kSparse, 0.811},
                  {2000, 64, kProducts, 0.105},   {10000, 128, kProducts, 2.03}, {10000, 64, kWideProducts, 4.06},
                  {10000, 3, kWideProducts, 3.7}, {1000, 3, kDistances, 0.0477}, {3000, 64, kDistances, 0.224},
                  {10000, 128, kDistances, 3.39}, {10000, 512, kDistances, 11.1}};
  for (const auto& of : measured) {
    double number = 0;
    const OutputView some = {DType::kFloat32, &number};
    Problem problem;
    problem.kind = ProblemKind::kPointCloud;
    problem.n = problem.m = of.n, problem.dim = of.dim;
    problem.solver.epsilon = 0.1, problem.solver.max_iterations = 20;
    Outputs& out = problem.outputs;
    if (of.output == kEntries) out.plan = some;
    if (of.output == kLinear) out.value_linear = &number;
    if (of.output == kBound) out.primal_bound = &number;
    if (of.output == kSparse) out.sparse_plan.max_entries = 1;
    if (of.output == kProducts || of.output == kWideProducts) {
      out.plan_v = out.plan_transpose_u = some;
      problem.transport.v_columns = problem.transport.u_columns = of.output == kProducts ? 4 : 64;
    }
    if (of.output == kDistances) {
      problem.transport.point_cost = PointCost::kEuclidean;
      out.gradient_x = out.gradient_y = some;
    }
    const double predicted = 1e3 * OutputSeconds(JobOf(problem, {true, true, true}));
    EXPECT_GT(predicted, of.milliseconds / 2) << of.n << " d " << of.dim << " output " << of.output;
    EXPECT_LT(predicted, of.milliseconds * 2) << of.n << " d " << of.dim << " output " << of.output;
  }
}

}  // namespace
}  // namespace cuda
}  // namespace sinkhorn
