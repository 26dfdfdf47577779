// What ends a CUDA context ends the backend, for good, and is told from what a problem does to itself. A process of its
// own for each fault: CUDA does not recover within one. Skipped where there is no GPU.
#include <sys/wait.h>
#include <unistd.h>

#include <memory>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#if SINKHORN_HAVE_CUDA
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/echo_family.h"
#include "kernels/cuda/echo_problem.h"
#endif

namespace sinkhorn {
namespace cuda {
namespace {

#if SINKHORN_HAVE_CUDA

// Runs `body` in a child that starts before CUDA does. 0: no expectation of it failed; 2: there is no GPU.
template <class Body>
int InChild(const Body& body) {
  const pid_t child = fork();
  if (child == 0) {
    const auto devices = ListDevices();
    if (!devices.ok() || devices->empty()) _exit(2);
    body();
    _exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

std::unique_ptr<Backend> Make(CudaBackendOptions options) {
  options.families = {EchoFamily()};
  auto backend = MakeCudaBackend(0, options);
  EXPECT_TRUE(backend.ok()) << backend.status();
  return *std::move(backend);
}

absl::Status SolveOne(Backend* backend, const EchoProblem& problem, int lane) {
  auto solve = backend->Admit(problem.problem);
  if (!solve.ok()) return solve.status();
  Solve* const solves[] = {solve->get()};
  return backend->Advance(lane, solves, 5e-3);
}

void ExpectLost(Backend* backend) {
  const EchoProblem problem(1, 4, 4);
  for (int lane = 0; lane < backend->lanes(); ++lane) {
    const absl::Status status = SolveOne(backend, problem, lane);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("cuda:0: cudaError"));
  }
}

TEST(CudaFaultTest, AnInjectedFaultLosesTheDevice) {
  const int outcome = InChild([] {
    CudaBackendOptions options;
    options.fault_at_slice = 3;
    auto backend = Make(options);
    const EchoProblem problem(3, 5, 5);
    EXPECT_TRUE(SolveOne(backend.get(), problem, 0).ok());
    EXPECT_TRUE(SolveOne(backend.get(), problem, 1).ok());
    EXPECT_EQ(problem.Wrong(), "");
    EXPECT_EQ(SolveOne(backend.get(), problem, 0).code(), absl::StatusCode::kUnavailable);
    ExpectLost(backend.get());
  });
  if (outcome == 2) GTEST_SKIP() << "no GPU";
  EXPECT_EQ(outcome, 0);
}

// A resident of another lane, and one that waits, are lost with it; destroying them is safe.
TEST(CudaFaultTest, AKernelThatTrapsTakesEveryLaneWithIt) {
  const int outcome = InChild([] {
    auto backend = Make({});
    EchoProblem long_one(1, 300, 300), bad(1, 4, 4), waiting(1, 4, 4);
    long_one.Slices(100).Copied();
    bad.Behaves(kEchoTraps);
    auto resident = *backend->Admit(long_one.problem), admitted = *backend->Admit(waiting.problem);
    Solve* const residents[] = {resident.get()};
    EXPECT_TRUE(backend->Advance(0, residents, 5e-3).ok());
    EXPECT_EQ(SolveOne(backend.get(), bad, 1).code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(backend->Advance(0, residents, 5e-3).code(), absl::StatusCode::kUnavailable);
    ExpectLost(backend.get());
  });
  if (outcome == 2) GTEST_SKIP() << "no GPU";
  EXPECT_EQ(outcome, 0);
}

#else

TEST(CudaFaultTest, IsLeftOutOfThisBuild) { GTEST_SKIP() << "nvcc was not found when this was built"; }

#endif  // SINKHORN_HAVE_CUDA

}  // namespace
}  // namespace cuda
}  // namespace sinkhorn
