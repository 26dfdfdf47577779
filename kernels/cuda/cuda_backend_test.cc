// The backend around an echo: what goes to the device comes back, whichever way it took and in whatever company, and
// every byte is given back. Skipped where there is no GPU.
#include <chrono>
#include <list>
#include <memory>
#include <thread>
#include <vector>

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

using testing::HasSubstr;

constexpr double kSlice = 5e-3;

class CudaBackendTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto devices = ListDevices();
    if (!devices.ok() || devices->empty()) GTEST_SKIP() << "no GPU: " << devices.status();
    Make({});
  }

  void Make(CudaBackendOptions options) {
    options.families = {EchoFamily()};
    auto made = MakeCudaBackend(0, options);
    ASSERT_TRUE(made.ok()) << made.status();
    backend_ = *std::move(made);
    at_rest_ = Used();
  }

  int64_t Of(const std::string& pool) const {
    for (const MemoryUse& use : backend_->memory()) {
      if (use.pool == pool) return use.bytes;
    }
    ADD_FAILURE() << pool;
    return 0;
  }
  std::vector<int64_t> Used() const { return {Of("device_used"), Of("pinned_used")}; }

  std::unique_ptr<Solve> Admit(const EchoProblem& problem) {
    auto solve = backend_->Admit(problem.problem);
    EXPECT_TRUE(solve.ok()) << solve.status();
    return *std::move(solve);
  }
  // Solves all of them together on `lane`.
  void SolveAll(const std::list<EchoProblem>& problems, int lane = 0) {
    std::vector<std::unique_ptr<Solve>> solves;
    for (const EchoProblem& problem : problems) solves.push_back(Admit(problem));
    for (;;) {
      std::vector<Solve*> left;
      for (const auto& solve : solves) {
        if (!solve->done()) left.push_back(solve.get());
      }
      if (left.empty()) break;
      const absl::Status status = backend_->Advance(lane, left, kSlice);
      ASSERT_TRUE(status.ok()) << status;
    }
    for (const auto& solve : solves) EXPECT_TRUE(solve->status().ok()) << solve->status();
    size_t i = 0;
    for (const EchoProblem& problem : problems) {
      EXPECT_EQ(problem.Wrong(), "") << "problem " << i << ": " << problem.problem.count << " x " << problem.problem.n
                                     << " x " << problem.problem.m;
      ++i;
    }
  }
  // Of all sizes; both ways.
  static std::list<EchoProblem> Mixed(uint32_t seed) {
    std::mt19937 random(seed);
    std::list<EchoProblem> problems;
    for (int i = 0; i < 40; ++i) {
      problems.emplace_back(1 + random() % 5, 1 + random() % 40, 1 + random() % 40, random());
      problems.back().Slices(1 + static_cast<int>(random() % 4));
      if (random() % 2) problems.back().Copied();
    }
    problems.emplace_back(3, 300, 1000, random());
    problems.emplace_back(1, 1500, 1100, random()).Slices(2);
    return problems;
  }

  std::unique_ptr<Backend> backend_;
  std::vector<int64_t> at_rest_;
};

TEST_F(CudaBackendTest, OneTinyProblem) {
  std::list<EchoProblem> problems;
  problems.emplace_back(32, 4, 4);
  SolveAll(problems);
  EXPECT_EQ(Used(), at_rest_);
}

TEST_F(CudaBackendTest, EveryWayThereAndBack) {
  for (int64_t problem_bytes : {0, 1 << 16, 1 << 30}) {
    for (int64_t slice_bytes : {1 << 14, 1 << 30}) {
      CudaBackendOptions options;
      options.zero_copy_problem_bytes = problem_bytes;
      options.zero_copy_slice_bytes = slice_bytes;
      ASSERT_NO_FATAL_FAILURE(Make(options));
      ASSERT_NO_FATAL_FAILURE(SolveAll(Mixed(problem_bytes + slice_bytes)));
      EXPECT_EQ(Used(), at_rest_);
    }
  }
}

// Several staging chunks, with and without helpers.
TEST_F(CudaBackendTest, LargeTensors) {
  for (int copy_threads : {0, 3}) {
    CudaBackendOptions options;
    options.copy_threads = copy_threads;
    ASSERT_NO_FATAL_FAILURE(Make(options));
    std::list<EchoProblem> problems;
    problems.emplace_back(1, 4000, 3001, 5);  // 48 MB each way.
    problems.emplace_back(7, 1, 3, 6);
    problems.emplace_back(1, 1024, 1024, 7);  // A chunk to the byte.
    SolveAll(problems);
    EXPECT_EQ(Used(), at_rest_);
  }
}

TEST_F(CudaBackendTest, SharedInputsTravelOnce) {
  EchoProblem member(1, 6, 9, 3);
  EchoProblem batch(4, 6, 9, 4);
  batch.Copied();
  batch.problem.transport.cost = {DType::kFloat32, member.problem.transport.cost.data, /*shared=*/true};
  auto solve = Admit(batch);
  Solve* const solves[] = {solve.get()};
  ASSERT_TRUE(backend_->Advance(0, solves, kSlice).ok());
  const auto* cost = static_cast<const float*>(member.problem.transport.cost.data);
  const auto* plan = static_cast<const float*>(batch.problem.outputs.plan.data);
  for (int i = 0; i < 4 * 54; ++i) ASSERT_EQ(plan[i], 2 * cost[i % 54] + 1) << i;
}

TEST_F(CudaBackendTest, ReportsFamilyTransfersAndDevice) {
  EchoProblem problem(1, 500, 500);
  auto solve = Admit(problem);
  EXPECT_STREQ(solve->family(), "echo");
  Solve* const solves[] = {solve.get()};
  ASSERT_TRUE(backend_->Advance(0, solves, kSlice).ok());
  ASSERT_TRUE(solve->done());
  const SolveReport report = solve->report();
  EXPECT_STREQ(report.family, "echo");
  EXPECT_GT(report.h2d_seconds, 1e6 / 500e9) << "1 MB cannot be that fast";
  EXPECT_LT(report.h2d_seconds, 1);
  EXPECT_GT(report.d2h_seconds, 1e6 / 500e9);
  EXPECT_LT(report.d2h_seconds, 1);
  EXPECT_EQ(backend_->device().backend, "cuda");
  EXPECT_EQ(backend_->device().index, 0);
  EXPECT_THAT(backend_->device().name, HasSubstr("NVIDIA"));
}

TEST_F(CudaBackendTest, AnAbandonedProblemGivesItsMemoryBack) {
  EchoProblem mapped(4, 8, 8), copied(4, 800, 80), finishing(4, 8, 8);
  mapped.Slices(100);
  copied.Slices(100).Copied();
  {
    auto a = Admit(mapped), b = Admit(copied), c = Admit(finishing), never = Admit(mapped);
    Solve* const solves[] = {a.get(), b.get(), c.get()};
    ASSERT_TRUE(backend_->Advance(0, solves, kSlice).ok());
    EXPECT_FALSE(a->done());
    EXPECT_EQ(a->progress().iterations, 1);
    EXPECT_TRUE(c->done());
    EXPECT_NE(Used(), at_rest_);
    EXPECT_GE(Of("device_used") - at_rest_[0], 2 * 4 * 800 * 80 * 4);
  }
  EXPECT_EQ(Used(), at_rest_);
  EXPECT_TRUE(mapped.Untouched());
  EXPECT_EQ(finishing.Wrong(), "");
}

TEST_F(CudaBackendTest, NothingIsAllocatedInTheSteadyState) {
  SolveAll(Mixed(1));
  SolveAll(Mixed(1));
  const int64_t device = Of("device_reserved"), pinned = Of("pinned_reserved");
  for (int i = 0; i < 20; ++i) SolveAll(Mixed(1));
  EXPECT_EQ(Of("device_reserved"), device);
  EXPECT_EQ(Of("pinned_reserved"), pinned);
}

TEST_F(CudaBackendTest, ABadProblemFailsAlone) {
  for (const bool copied : {false, true}) {
    EchoProblem good(2, 30, 30), diverging(2, 30, 30), greedy(2, 30, 30);
    diverging.Behaves(kEchoDiverges);
    greedy.Behaves(kEchoWantsTheMoon);
    if (copied) {
      good.Copied();
      diverging.Copied();
      greedy.Copied();
    }
    auto a = Admit(diverging), b = Admit(good), c = Admit(greedy);
    Solve* const solves[] = {a.get(), b.get(), c.get()};
    ASSERT_TRUE(backend_->Advance(0, solves, kSlice).ok());
    EXPECT_EQ(a->status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(a->status().message(), "this problem diverges");
    EXPECT_TRUE(b->status().ok()) << b->status();
    EXPECT_EQ(c->status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(good.Wrong(), "");
    EXPECT_TRUE(diverging.Untouched()) << "a failed problem's outputs are left alone";
  }
}

TEST_F(CudaBackendTest, ALaunchThatIsRefusedIsNotForgotten) {
  EchoProblem refused(2, 30, 30), good(2, 30, 30);
  refused.Behaves(kEchoIsRefused);
  for (int round = 0; round < 2; ++round) {
    auto a = Admit(refused), b = Admit(good);
    Solve* const first[] = {a.get()};
    const absl::Status status = backend_->Advance(0, first, kSlice);
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("nvalid"));
    Solve* const second[] = {b.get()};
    ASSERT_TRUE(backend_->Advance(0, second, kSlice).ok());
    EXPECT_EQ(good.Wrong(), "");
  }
}

TEST_F(CudaBackendTest, AProblemWithoutMemoryFailsAlone) {
  CudaBackendOptions options;
  options.memory_bytes = 64 << 20;
  ASSERT_NO_FATAL_FAILURE(Make(options));
  for (int round = 0; round < 3; ++round) {
    EchoProblem small(1, 20, 20), fits(1, 1500, 1000), huge(1, 4000, 4000);
    small.Copied();
    auto a = Admit(small), b = Admit(huge), c = Admit(fits);
    Solve* const solves[] = {a.get(), b.get(), c.get()};
    ASSERT_TRUE(backend_->Advance(0, solves, kSlice).ok());
    EXPECT_TRUE(a->status().ok()) << a->status();
    EXPECT_EQ(b->status().code(), absl::StatusCode::kResourceExhausted) << b->status();
    EXPECT_THAT(std::string(b->status().message()), HasSubstr("128"));  // 2 x 64,000,000 bytes and a little.
    EXPECT_TRUE(c->status().ok()) << c->status();
    EXPECT_EQ(small.Wrong() + fits.Wrong(), "");
    EXPECT_LE(Of("device_reserved"), 64 << 20);
  }
  EXPECT_EQ(Used(), at_rest_);
}

TEST_F(CudaBackendTest, LanesWorkAtTheSameTime) {
  ASSERT_GE(backend_->lanes(), 2);
  std::vector<std::thread> threads;
  for (int lane = 0; lane < backend_->lanes(); ++lane) {
    threads.emplace_back([this, lane] {
      for (int i = 0; i < 10; ++i) SolveAll(Mixed(100 * lane + i), lane);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(Used(), at_rest_);

  // Each takes 30 ms of the device, side by side.
  const auto begin = std::chrono::steady_clock::now();
  threads.clear();
  for (int lane = 0; lane < 2; ++lane) {
    threads.emplace_back([this, lane] {
      std::list<EchoProblem> problems;
      problems.emplace_back(1, 4, 4).Takes(0.03);
      SolveAll(problems, lane);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  EXPECT_GE(seconds, 0.03);
  EXPECT_LT(seconds, 0.055);
}

TEST_F(CudaBackendTest, SaysWhatNoFamilySolves) {
  EchoProblem problem(1, 5, 7);
  problem.problem.kind = ProblemKind::kNormalization;
  problem.problem.normalization.logits = {DType::kFloat16, problem.problem.transport.cost.data, false};
  const auto solve = backend_->Admit(problem.problem);
  EXPECT_EQ(solve.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(solve.status().message()), HasSubstr("normalization 5 x 7 FLOAT16"));
}

TEST(MakeCudaBackendTest, RefusesADeviceThatIsNotThere) {
  const auto backend = MakeCudaBackend(1000, {});
  EXPECT_EQ(backend.status().code(), absl::StatusCode::kUnavailable) << backend.status();
}

#else

TEST(CudaBackendTest, IsLeftOutOfThisBuild) { GTEST_SKIP() << "nvcc was not found when this was built"; }

#endif  // SINKHORN_HAVE_CUDA

}  // namespace
}  // namespace cuda
}  // namespace sinkhorn
