// The backend's threads: a ragged batch has the same bits on any number of threads and in any slices, and dropping
// solves half-way is safe. Run under TSan too; what the answers are worth is tests/conformance's business.
#include "kernels/cpu/cpu_backend.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace sinkhorn {
namespace {

// A point-cloud problem with its memory.
struct Clouds {
  std::vector<float> x, y, f, g, gradient;
  double value = 0;
  Problem problem;

  Clouds(int64_t count, int64_t n, int64_t m, int64_t dim, uint32_t seed)
      : x(count * n * dim), y(count * m * dim), f(count * n), g(count * m), gradient(count * n * dim) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> uniform(0, 1);
    for (float& v : x) v = uniform(random);
    for (float& v : y) v = uniform(random);
    problem.kind = ProblemKind::kPointCloud;
    problem.count = count;
    problem.n = n;
    problem.m = m;
    problem.dim = dim;
    problem.transport.x = {DType::kFloat32, x.data(), false};
    problem.transport.y = {DType::kFloat32, y.data(), false};
    problem.solver.epsilon = 0.02;
    problem.solver.max_iterations = 20;
    problem.solver.tolerance = seed % 2 == 0 ? 0 : 1e-3;
    problem.outputs.f = {DType::kFloat32, f.data()};
    problem.outputs.g = {DType::kFloat32, g.data()};
    problem.outputs.gradient_x = {DType::kFloat32, gradient.data()};
  }
};

std::vector<std::unique_ptr<Clouds>> RaggedBatch() {
  std::vector<std::unique_ptr<Clouds>> batch;
  uint32_t seed = 1;
  for (int64_t n : {1, 7, 64, 513}) {
    for (int64_t m : {3, 200, 450}) {
      batch.push_back(std::make_unique<Clouds>(1 + seed % 3, n, m, 1 + seed % 5, seed));
      ++seed;
    }
  }
  return batch;
}

void SolveAll(Backend& backend, const std::vector<std::unique_ptr<Clouds>>& batch, double slice_seconds) {
  std::vector<std::unique_ptr<Solve>> solves;
  for (const auto& clouds : batch) solves.push_back(backend.Admit(clouds->problem).value());
  for (;;) {
    std::vector<Solve*> active;
    for (const auto& solve : solves) {
      if (!solve->done()) active.push_back(solve.get());
    }
    if (active.empty()) break;
    ASSERT_TRUE(backend.Advance(0, active, slice_seconds).ok());
  }
  for (const auto& solve : solves) EXPECT_TRUE(solve->status().ok()) << solve->status();
}

TEST(CpuBackendTest, SameBitsOnAnyNumberOfThreadsInAnySlices) {
  const auto expected = RaggedBatch();
  SolveAll(*MakeCpuBackend({/*threads=*/1}), expected, 1.0);
  for (int threads : {2, 4}) {
    for (double slice_seconds : {1e-5, 1e-3, 1.0}) {
      const auto actual = RaggedBatch();
      SolveAll(*MakeCpuBackend({threads}), actual, slice_seconds);
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_EQ(actual[i]->f, expected[i]->f) << "problem " << i << ", " << threads << " threads";
        EXPECT_EQ(actual[i]->g, expected[i]->g) << "problem " << i << ", " << threads << " threads";
        EXPECT_EQ(actual[i]->gradient, expected[i]->gradient) << "problem " << i << ", " << threads << " threads";
      }
    }
  }
}

// The iterate reached is the answer of so many iterations, to the bit.
TEST(CpuBackendTest, FinishingSoonIsStoppingAtTheIterationReached) {
  const auto backend = MakeCpuBackend({/*threads=*/2});
  ASSERT_TRUE(backend->can_finish_soon());
  for (const auto& [n, m] : {std::pair<int, int>{60, 50}, {700, 600}}) {
    Clouds cut(1, n, m, 3, 7);
    cut.problem.solver.tolerance = 0;
    cut.problem.solver.max_iterations = 100000000;
    auto solve = backend->Admit(cut.problem).value();
    Solve* resident = solve.get();
    for (int i = 0; i < 2; ++i) ASSERT_TRUE(backend->Advance(0, absl::MakeConstSpan(&resident, 1), 2e-3).ok());
    ASSERT_FALSE(solve->done());
    solve->FinishSoon();
    solve->FinishSoon();  // Again.
    while (!solve->done()) ASSERT_TRUE(backend->Advance(0, absl::MakeConstSpan(&resident, 1), 2e-3).ok());
    ASSERT_TRUE(solve->status().ok()) << solve->status();
    const Convergence& reached = solve->report().convergence;
    EXPECT_GT(reached.iterations, 0);
    EXPECT_LT(reached.iterations, 100000);
    EXPECT_EQ(reached.stop_reason, StopReason::kTimeBudget);

    Clouds same(1, n, m, 3, 7);
    same.problem.solver.tolerance = 0;
    same.problem.solver.max_iterations = reached.iterations;
    auto whole = backend->Admit(same.problem).value();
    Solve* other = whole.get();
    while (!whole->done()) ASSERT_TRUE(backend->Advance(0, absl::MakeConstSpan(&other, 1), 1.0).ok());
    EXPECT_EQ(cut.f, same.f);
    EXPECT_EQ(cut.g, same.g);
    EXPECT_EQ(reached.marginal_error_a, whole->report().convergence.marginal_error_a);
  }
}

TEST(CpuBackendTest, FinishingBeforeTheFirstSliceDoesOneIteration) {
  const auto backend = MakeCpuBackend({/*threads=*/1});
  Clouds clouds(3, 80, 70, 2, 5);
  clouds.problem.solver.tolerance = 1e-30;
  clouds.problem.solver.max_iterations = 100000;
  auto solve = backend->Admit(clouds.problem).value();
  Solve* resident = solve.get();
  solve->FinishSoon();
  while (!solve->done()) ASSERT_TRUE(backend->Advance(0, absl::MakeConstSpan(&resident, 1), 1e-3).ok());
  EXPECT_TRUE(solve->status().ok());
  EXPECT_EQ(solve->report().convergence.iterations, 1);
  EXPECT_FALSE(solve->report().convergence.converged);
  EXPECT_EQ(solve->report().convergence.stop_reason, StopReason::kTimeBudget);
}

TEST(CpuBackendTest, UnfinishedSolvesMayBeDropped) {
  const auto backend = MakeCpuBackend({/*threads=*/4});
  for (uint32_t seed = 1; seed < 20; ++seed) {
    Clouds kept(1, 100, 100, 3, seed), dropped(1, 700, 600, 3, seed);
    dropped.problem.solver.max_iterations = 100000;
    dropped.problem.solver.tolerance = 0;
    auto a = backend->Admit(kept.problem).value();
    auto b = backend->Admit(dropped.problem).value();
    Solve* both[] = {a.get(), b.get()};
    ASSERT_TRUE(backend->Advance(0, both, 1e-4).ok());
    EXPECT_FALSE(b->done());
    b.reset();
    while (!a->done()) ASSERT_TRUE(backend->Advance(0, absl::MakeConstSpan(both, 1), 1e-4).ok());
    EXPECT_TRUE(a->status().ok());
  }
}

// Memory of large blocks is used again while others still hold theirs: no answer may show it.
TEST(CpuBackendTest, LargeProblemsReuseMemoryWithoutTraces) {
  const auto backend = MakeCpuBackend({/*threads=*/2});
  std::vector<float> first;
  for (int round = 0; round < 3; ++round) {
    std::vector<std::unique_ptr<Clouds>> batch;
    batch.push_back(std::make_unique<Clouds>(1, 600, 600, 2, 2));
    if (round == 1) batch.push_back(std::make_unique<Clouds>(1, 650, 640, 2, 4));
    SolveAll(*backend, batch, 1e-3);
    if (round == 0) first = batch[0]->f;
    EXPECT_EQ(batch[0]->f, first);
  }
}

// Relaxed and cut short far above epsilon, the sums of P and what they should be are both beyond all numbers: their
// difference is no number, and vanished in a maximum with 0.
TEST(CpuBackendTest, CertificateOfAnnealingCutShort) {
  for (bool debias : {false, true}) {
    Clouds clouds(1, 33, 37, 3, 2);
    SolverOptions& solver = clouds.problem.solver;
    solver.epsilon = 1e-4;
    solver.epsilon_decay = 0.5;
    solver.rho_a = solver.rho_b = 0.1;
    solver.max_iterations = 5;
    solver.debias = debias;
    const std::unique_ptr<Backend> backend = MakeCpuBackend(CpuBackendOptions());
    const std::unique_ptr<Solve> solve = backend->Admit(clouds.problem).value();
    Solve* const active = solve.get();
    while (!solve->done()) ASSERT_TRUE(backend->Advance(0, {&active, 1}, 0.01).ok());
    ASSERT_TRUE(solve->status().ok()) << solve->status();
    EXPECT_GT(solve->report().convergence.marginal_error_a, 1);
    EXPECT_GT(solve->report().convergence.marginal_error_b, 1);
    EXPECT_FALSE(solve->report().convergence.converged);
  }
}

}  // namespace
}  // namespace sinkhorn
