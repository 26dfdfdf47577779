// The cost model: the formula, and what it learns.
#include "server/cost_model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "server/cost_table.h"

namespace sinkhorn {
namespace {

// Predicts a millisecond an iteration, or what a test says.
class Figures final : public Backend {
 public:
  explicit Figures(const char* name) : name_(name) {}
  double fixed = -1;
  DeviceDescription device() const override { return {name_, name_, 0}; }
  int lanes() const override { return 1; }
  int64_t WorkingBytes(const Problem&) const override { return 0; }
  double PredictedSeconds(const Problem& problem) const override {
    return fixed != -1 ? fixed : 1e-3 * problem.solver.max_iterations;
  }
  absl::StatusOr<std::unique_ptr<Solve>> Admit(const Problem&) override { return absl::UnimplementedError(""); }
  absl::Status Advance(int, absl::Span<Solve* const>, double) override { return absl::UnimplementedError(""); }

 private:
  const char* const name_;
};

Problem Dense(int64_t n, int32_t iterations, double tolerance) {
  Problem problem;
  problem.kind = ProblemKind::kDense;
  problem.n = problem.m = n;
  problem.solver.max_iterations = iterations;
  problem.solver.tolerance = tolerance;
  return problem;
}

TEST(CostModelTest, AFixedNumberOfIterationsIsTheTablesRowOfTheBackendsFigure) {
  const Figures cpu("cpu");
  const CostModel model(&cpu);
  const CostRow& row = kCpuCosts[static_cast<int>(CostFamily::kDense)];
  const CostModel::Formula formula = model.FormulaOf(Dense(64, 200, 0));
  EXPECT_DOUBLE_EQ(formula.seconds, row.overhead_seconds + row.factor * 0.2);
  EXPECT_FALSE(formula.guessed);
}

TEST(CostModelTest, AToleranceTakesTheUsualIterationsOrAllIfTheyAreFewer) {
  const Figures cpu("cpu");
  const CostModel model(&cpu);
  const CostRow& row = kCpuCosts[static_cast<int>(CostFamily::kDenseTolerance)];
  ASSERT_GT(row.iterations, 2);
  EXPECT_DOUBLE_EQ(model.FormulaOf(Dense(64, 1000, 1e-3)).seconds,
                   row.overhead_seconds + row.factor * 1e-3 * row.iterations);
  EXPECT_DOUBLE_EQ(model.FormulaOf(Dense(64, 2, 1e-3)).seconds, row.overhead_seconds + row.factor * 2e-3);
  EXPECT_TRUE(model.FormulaOf(Dense(64, 2, 1e-3)).guessed);
}

TEST(CostModelTest, OtherBackendsFiguresStandAsTheyAre) {
  const Figures other("cuda");
  const CostModel model(&other);
  EXPECT_DOUBLE_EQ(model.FormulaOf(Dense(64, 200, 0)).seconds, 0.2);
}

TEST(CostModelTest, UnusableFiguresAreZeroOrBounded) {
  Figures cpu("cpu");
  const CostModel model(&cpu);
  for (const double figure : {std::nan(""), -2.0, 0.0}) {
    cpu.fixed = figure;
    EXPECT_EQ(model.FormulaOf(Dense(64, 200, 0)).seconds, 0);
  }
  cpu.fixed = std::numeric_limits<double>::infinity();
  EXPECT_LE(model.FormulaOf(Dense(64, 200, 0)).seconds, 1e6);
}

TEST(CostModelTest, AClassLearnsItsRatioAndForgetsTheOldOne) {
  const Figures cpu("cpu");
  CostModel model(&cpu);
  const int taught = model.FormulaOf(Dense(64, 200, 0)).problem_class;
  EXPECT_EQ(model.ratio(taught), 1);
  for (int i = 0; i < 7; ++i) model.Measured(taught, 0.1, 0.3);
  EXPECT_FALSE(model.known(taught));
  model.Measured(taught, 0.1, 0.3);
  EXPECT_TRUE(model.known(taught));
  EXPECT_NEAR(model.ratio(taught), 3, 0.01);
  for (int i = 0; i < 100; ++i) model.Measured(taught, 0.1, 0.05);
  EXPECT_NEAR(model.ratio(taught), 0.5, 0.01);
}

TEST(CostModelTest, LongProblemsCountMoreBecauseSumsArePredicted) {
  const Figures cpu("cpu");
  CostModel model(&cpu);
  const int taught = model.FormulaOf(Dense(64, 200, 0)).problem_class;
  for (int i = 0; i < 100; ++i) model.Measured(taught, i % 2 ? 1 : 0.01, i % 2 ? 1 : 0.1);
  EXPECT_NEAR(model.ratio(taught), 1.1 / 1.01, 0.02);
}

TEST(CostModelTest, ClassesLearnApart) {
  const Figures cpu("cpu");
  CostModel model(&cpu);
  Problem exact = Dense(64, 200, 0), large = Dense(1024, 200, 0), tolerance = Dense(64, 200, 1e-3);
  exact.solver.precision = Precision::kDouble;
  const int taught = model.FormulaOf(Dense(64, 200, 0)).problem_class;
  model.Measured(taught, 0.1, 0.3);
  for (const Problem& other : {exact, large, tolerance}) {
    EXPECT_EQ(model.ratio(model.FormulaOf(other).problem_class), 1);
  }
  EXPECT_EQ(model.FormulaOf(Dense(80, 10, 0)).problem_class, taught) << "of about the same size";
}

TEST(CostModelTest, EveryProblemHasAClass) {
  const Figures cpu("cpu");
  const CostModel model(&cpu);
  for (int64_t n = 1; n < int64_t{1} << 40; n *= 3) {
    for (ProblemKind kind : {ProblemKind::kNormalization, ProblemKind::kDense, ProblemKind::kPointCloud}) {
      Problem problem = Dense(n, 5, n % 2 ? 0 : 1e-3);
      problem.kind = kind;
      problem.solver.precision = n % 4 == 3 ? Precision::kDouble : Precision::kStrict;
      const int problem_class = model.FormulaOf(problem).problem_class;
      EXPECT_GE(problem_class, 0);
      EXPECT_LT(problem_class, CostModel::kClasses);
      EXPECT_STRNE(CostFamilyName(CostFamilyOf(problem)), "");
    }
  }
}

TEST(CostModelTest, RatiosAreBounded) {
  const Figures cpu("cpu");
  CostModel model(&cpu);
  for (int i = 0; i < 1000; ++i) {
    model.Measured(0, 1e-3, 1e9);
    model.Measured(1, 1e9, 0);
    model.Measured(2, 0, 1e9);
  }
  EXPECT_EQ(model.ratio(0), 1e4);
  EXPECT_EQ(model.ratio(1), 1e-4);
  EXPECT_EQ(model.ratio(2), 1) << "a formula of nothing teaches nothing";
}

TEST(CostModelTest, OneOddProblemDoesNotSpeakForAll) {
  const Figures cpu("cpu");
  CostModel model(&cpu);
  for (int i = 0; i < 100; ++i) model.Measured(0, 0.01, 0.01);
  model.Measured(0, 0.01, 1000);
  EXPECT_LT(model.ratio(0), 2);
}

TEST(CostModelTest, DoubtLeadsBackToTheFormula) {
  const Figures cpu("cpu");
  CostModel model(&cpu);
  for (int i = 0; i < 100; ++i) model.Measured(0, 0.01, 0.16);
  ASSERT_NEAR(model.ratio(0), 16, 0.1);
  for (int i = 0; i < 64; ++i) model.Doubt(0);
  EXPECT_LT(model.ratio(0), 1.5);
}

}  // namespace
}  // namespace sinkhorn
