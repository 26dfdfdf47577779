// What is taken of a device's memory before its kernels can be asked must be what they lay out: no GPU needed.
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

}  // namespace
}  // namespace cuda
}  // namespace sinkhorn
