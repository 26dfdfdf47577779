// Random problems against themselves: whoever is solved beside them, and whenever they are cut short. The seed of a
// failing one is in its name.
#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/str_cat.h"
#include "tests/conformance/backends.h"
#include "tests/conformance/check.h"
#include "tests/conformance/company.h"
#include "tests/conformance/random_draws.h"

namespace sinkhorn::conformance {
namespace {

class RandomCompanyTest : public ConformanceTest {
 protected:
  // Where both have an answer, a whole one.
  void ExpectAsFloat64(const Case& c, const Answer& got) {
    Case exact = c;
    exact.solver().precision = Precision::kDouble;
    const double tolerance = c.solver().tolerance;
    const bool fast = c.solver().precision == Precision::kFast;  // Its costs are others.
    if (fast || !got.status.ok() || (tolerance > 0 && !got.convergence[0].converged)) return;
    if (tolerance > 0) {
      const Convergence& end = got.convergence[0];
      EXPECT_LE(std::max(end.marginal_error_a, end.marginal_error_b), tolerance) << c.name;
      if (c.solver().debias) return;
      exact.solver().tolerance = 1.5 * tolerance;
      exact.solver().max_iterations = 2;
      exact.solver().epsilon_decay = 0;
      exact.initial_f = Tensor::Of(got.f.values(), DType::kFloat64);
      exact.initial_g = Tensor::Of(got.g.values(), DType::kFloat64);
      EXPECT_TRUE(SolveTogether(backend(), {&exact})[0].convergence[0].converged) << c.name;
      return;
    }
    const Answer answer = SolveTogether(backend(), {&exact})[0];
    if (!answer.status.ok()) return;
    EXPECT_EQ(got.convergence[0].iterations, answer.convergence[0].iterations) << c.name;
    double room = PotentialTolerance(c, {answer.f.values(), answer.g.values()});
    if (c.solver().debias) room = std::max(room, PotentialTolerance(c, {answer.f_aa.values(), answer.g_bb.values()}));
    EXPECT_LE(Distance(got, answer), room) << c.name;
  }

  // Of such sizes: the same bits alone, beside others and in slices of any length; what float64 says after as many
  // iterations, or a solution to it too.
  void ExpectRightInCompany(int smallest, int largest) {
    if (GetParam() != "cuda") GTEST_SKIP() << "sizes of a GPU";
    constexpr int kCompany = 3;
    const absl::FlagSaver saver;
    absl::SetFlag(&FLAGS_smallest, smallest), absl::SetFlag(&FLAGS_largest, largest);
    for (int seed : Seeds({}, 100)) {
      std::vector<Case> cases;
      for (int k = 0; k < kCompany; ++k) {
        cases.push_back(AnyTransport(kCompany * seed + k));
        AnyIterations(kCompany * seed + k, &cases.back());
        SayNext(cases.back());
      }
      std::vector<Answer> alone;
      for (const Case& c : cases) alone.push_back(SolveTogether(backend(), {&c})[0]);
      const std::vector<const Case*> order = PointersTo(cases);
      ExpectSameBits(order, SolveTogether(backend(), order), alone);
      ExpectSameBits(order, SolveTogether(backend(), order, 1e-5), alone);
      for (int k = 0; k < kCompany; ++k) ExpectAsFloat64(cases[k], alone[k]);
    }
  }
};

// Problems of each dozen of rounds' seeds, alone and together.
template <typename Any>
void ExpectCompanyChangesNoBits(Backend* backend, Any any) {
  constexpr int kCompany = 12;
  const int first = absl::GetFlag(FLAGS_first_seed);
  for (int company = 0; company < absl::GetFlag(FLAGS_rounds) / kCompany; ++company) {
    std::vector<Case> cases;
    for (int k = 0; k < kCompany; ++k) {
      cases.push_back(any(first + kCompany * company + k));
      SayNext(cases.back());
    }
    std::vector<Answer> alone;  // Some have no finite answer.
    for (const Case& c : cases) alone.push_back(SolveTogether(backend, {&c})[0]);
    const std::vector<const Case*> order = PointersTo(cases);
    ExpectSameBits(order, SolveTogether(backend, order), alone);
    if (backend->device().backend == "cuda") ExpectSameBits(order, SolveTogether(backend, order, 1e-5), alone);
  }
}

TEST_P(RandomCompanyTest, CompanyChangesNoBits) {
  ExpectCompanyChangesNoBits(backend(), [](int seed) {
    Case c = AnyTransport(seed);
    AnySolver(seed, &c);
    return c;
  });
}

// Points 1e10 apart beside a rho of 1e-22: float32 leaves out more of the potentials than scalings can hold. There is
// no answer, but in float64, which is all that it may cost. (A GPU's block parted at a barrier: the device was lost.)
TEST_P(RandomCompanyTest, PotentialsBeyondFloat32) {
  const absl::FlagSaver saver;
  absl::SetFlag(&FLAGS_largest, 300);
  constexpr int kSeed = 288000975;
  Case c = AnyTransport(kSeed);
  AnySolver(kSeed, &c);
  const absl::Status status = SolveTogether(backend(), {&c})[0].status;
  EXPECT_TRUE(status.ok() || status.code() == absl::StatusCode::kFailedPrecondition) << c.name << ": " << status;
}

// Whoever is cut short has what was reached, as if no more had been asked for: to the bit or, where iterations choose
// the kernel, as near as the precision is.
TEST_P(RandomCompanyTest, FinishesSoon) {
  for (int seed : Seeds({}, 10)) {
    Case c = AnyTransport(seed);
    AnySolver(seed, &c);
    if (c.problem.count > 1 || c.solver().debias) continue;  // Not all of it reaches the same iteration.
    Random random(seed + (uint64_t{1} << 44));
    c.solver().max_iterations = std::lround(LogUniform(&random, 1, 5000));
    c.wanted |= kPotentials;
    const int slices = random.Integer(1, 4);
    absl::StrAppend(&c.name, ", of ", c.solver().max_iterations, ", after ", slices);
    SayNext(c);
    int taken = 0;
    const Answer cut = SolveTogether(backend(), {&c}, 1e-5, [&](Solve* solve) {
      if (++taken >= slices && !solve->done()) solve->FinishSoon();
    })[0];
    if (!cut.status.ok()) continue;
    if (cut.convergence[0].stop_reason != StopReason::kTimeBudget) continue;
    c.solver().max_iterations = cut.convergence[0].iterations;
    Answer whole = SolveTogether(backend(), {&c})[0];
    for (Convergence& member : whole.convergence) member.stop_reason = StopReason::kTimeBudget;
    if (DifferenceInBits(cut, whole).empty()) continue;
    EXPECT_EQ(backend()->device().backend, "cuda") << c.name;
    const bool fast = c.solver().precision == Precision::kFast;
    const double tolerance = PotentialTolerance(c, {whole.f.values(), whole.g.values()});
    EXPECT_LE(Distance(cut, whole), fast ? 0.1 * c.solver().epsilon : 2 * tolerance)
        << c.name << ", reached " << cut.convergence[0].iterations;
  }
}

// Sizes that a GPU solves on one chip; those that take a whole one, or a part of it; and those that none holds.
TEST_P(RandomCompanyTest, SizesOfAChip) { ExpectRightInCompany(1, 1024); }
TEST_P(RandomCompanyTest, LargeSizes) { ExpectRightInCompany(512, 2600); }
TEST_P(RandomCompanyTest, LargerSizes) { ExpectRightInCompany(2600, 9000); }

TEST_P(RandomCompanyTest, MatricesInCompany) {
  ExpectCompanyChangesNoBits(backend(), [](int seed) {
    Case c = AnyNormalization(seed);
    AnyBackward(seed, &c);
    return c;
  });
}

INSTANTIATE_ON_BACKENDS(RandomCompanyTest);

}  // namespace
}  // namespace sinkhorn::conformance
