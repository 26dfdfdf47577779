// Laws that need no oracle: swapped sides, permuted and moved points, scaled units, costs shifted
// by u_i + v_j, padding with points of no mass. At a fixed number of iterations, so they hold step
// by step.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/conformance/backends.h"
#include "tests/conformance/check.h"
#include "tests/conformance/random_problems.h"

namespace sinkhorn::conformance {
namespace {

using oracle::Transport;

class LawsTest : public ConformanceTest {
 protected:
  Answer Solved(const Transport& problem, Precision precision, const std::string& name) {
    Case c = CaseOf(problem, name);
    c.solver().max_iterations = 6;
    c.solver().precision = precision;
    return SolveAlone(backend(), c);
  }

  // Both solutions may be off by the contract's tolerance.
  static double Room(const Transport& problem, Precision precision, const Answer& answer) {
    Case c;
    c.solver() = problem.solver;
    c.solver().precision = precision;
    return 2 * PotentialTolerance(c, {answer.f.values(), answer.g.values()});
  }

  static std::vector<Transport> Problems(double epsilon) {
    return {RandomClouds(27, 33, 3, epsilon, 1), RandomDense(33, 27, epsilon, 2)};
  }
};

constexpr Precision kPrecisions[] = {Precision::kStrict, Precision::kDouble};

TEST_P(LawsTest, Swap) {
  for (double epsilon : {0.01, 1.0}) {
    for (Transport problem : Problems(epsilon)) {
      problem.solver.update_rule = UpdateRule::kSymmetric;  // Alternating ones begin with f.
      problem.solver.rho_a = 0.5;
      for (Precision precision : kPrecisions) {
        const Answer plain = Solved(problem, precision, "plain");
        const Answer swapped = Solved(Swapped(problem), precision, "swapped");
        const double room = Room(problem, precision, plain);
        ExpectClose("swap, f", swapped.f.values(), plain.g.values(), room);
        ExpectClose("swap, g", swapped.g.values(), plain.f.values(), room);
        ExpectClose("swap, value", swapped.value, plain.value, 4 * room);
      }
    }
  }
}

TEST_P(LawsTest, PermutedPoints) {
  Random random(3);
  for (const Transport& problem : Problems(0.05)) {
    std::vector<int64_t> order(problem.n);
    std::iota(order.begin(), order.end(), 0);
    for (int64_t i = problem.n - 1; i > 0; --i) std::swap(order[i], order[random.Integer(0, i)]);
    Transport permuted = problem;
    const int64_t width = problem.cost.empty() ? problem.dim : problem.m;
    const Vector& from = problem.cost.empty() ? problem.x : problem.cost;
    Vector& to = problem.cost.empty() ? permuted.x : permuted.cost;
    for (int64_t i = 0; i < problem.n; ++i) {
      permuted.a[i] = problem.a[order[i]];
      std::copy_n(&from[order[i] * width], width, &to[i * width]);
    }
    for (Precision precision : kPrecisions) {
      const Answer plain = Solved(problem, precision, "plain");
      const Answer other = Solved(permuted, precision, "permuted");
      const double room = Room(problem, precision, plain);
      Vector expected(problem.n);
      for (int64_t i = 0; i < problem.n; ++i) expected[i] = plain.f.values()[order[i]];
      ExpectClose("permuted, f", other.f.values(), expected, room);
      ExpectClose("permuted, g", other.g.values(), plain.g.values(), room);
      ExpectClose("permuted, value", other.value, plain.value, 2 * room);
    }
  }
}

// Coordinates that are multiples of 2^-12 move by 512 without rounding.
TEST_P(LawsTest, Translation) {
  for (double epsilon : {1e-3, 0.1}) {
    Transport problem = RandomClouds(27, 33, 3, epsilon, 4);
    for (Vector* points : {&problem.x, &problem.y}) {
      for (double& value : *points) value = std::ldexp(std::round(std::ldexp(value, 12)), -12);
    }
    Transport moved = problem;
    for (double& value : moved.x) value += 512;
    for (double& value : moved.y) value += 512;
    for (Precision precision : kPrecisions) {
      const Answer plain = Solved(problem, precision, "plain");
      const Answer other = Solved(moved, precision, "moved by 512");
      const double room = Room(problem, precision, plain);
      ExpectClose("moved, f", other.f.values(), plain.f.values(), room);
      ExpectClose("moved, g", other.g.values(), plain.g.values(), room);
    }
  }
}

// Units: lengths times s, so costs, epsilon and rho times s^2, scale potentials and values by s^2.
TEST_P(LawsTest, Scaling) {
  for (double s2 : {std::ldexp(1.0, -20), 3.0, std::ldexp(1.0, 20)}) {
    for (const Transport& problem : Problems(0.05)) {
      Transport scaled = problem;
      for (double& cost : scaled.cost) cost *= s2;
      for (Vector* points : {&scaled.x, &scaled.y}) {
        for (double& value : *points) value = static_cast<float>(value * std::sqrt(s2));
      }
      if (problem.cost.empty() && s2 == 3.0) continue;  // Rounds the points.
      scaled.solver.epsilon *= s2;
      for (Precision precision : kPrecisions) {
        const Answer plain = Solved(problem, precision, "plain");
        const Answer other = Solved(scaled, precision, absl::StrCat("scaled by ", s2));
        const double room = s2 * Room(problem, precision, plain);
        Vector f = plain.f.values(), g = plain.g.values();
        for (double& value : f) value *= s2;
        for (double& value : g) value *= s2;
        const double rounding = s2 == 3.0 ? 2e-7 * s2 : 0;  // Of the costs.
        ExpectClose("scaled, f", other.f.values(), f, room + rounding);
        ExpectClose("scaled, g", other.g.values(), g, room + rounding);
        ExpectClose("scaled, value", other.value, {plain.value[0] * s2}, 2 * (room + rounding));
      }
    }
  }
}

// C_ij + u_i + v_j: f moves by u, g by v, from the first iteration on, and the plan stays.
TEST_P(LawsTest, Gauge) {
  Transport problem = RandomDense(21, 26, 0.05, 5);
  const Vector u = Random(6).Uniforms(21, -2, 2), v = Random(7).Uniforms(26, -2, 2);
  const auto grid = [](double value) { return std::ldexp(std::round(std::ldexp(value, 18)), -18); };
  for (double& cost : problem.cost) cost = grid(cost);  // The sums below are exact in float32.
  Transport shifted = problem;
  for (int64_t k = 0; k < 21 * 26; ++k) shifted.cost[k] += grid(u[k / 26]) + grid(v[k % 26]);
  // Started from v, the shifted iterations are those of the plain ones, shifted.
  shifted.initial_g.resize(26);
  for (int64_t j = 0; j < 26; ++j) shifted.initial_g[j] = grid(v[j]);
  for (Precision precision : kPrecisions) {
    const Answer plain = Solved(problem, precision, "plain");
    const Answer other = Solved(shifted, precision, "shifted");
    Vector f = plain.f.values(), g = plain.g.values();
    for (int64_t i = 0; i < 21; ++i) f[i] += grid(u[i]);
    for (int64_t j = 0; j < 26; ++j) g[j] += grid(v[j]);
    ExpectClose("gauge, f", other.f.values(), f, Room(problem, precision, other));
    ExpectClose("gauge, g", other.g.values(), g, Room(problem, precision, other));
  }
}

// A point without mass changes nobody else.
TEST_P(LawsTest, PointsWithoutMass) {
  Transport problem = RandomClouds(20, 22, 3, 0.05, 8);
  Transport padded = problem;
  padded.n = 23;
  padded.a.insert(padded.a.end(), 3, 0.0);
  padded.x.insert(padded.x.end(), {0.5, 0.5, 0.5, 0.25, 1, 0.75, 1, 0, 1});
  for (Precision precision : kPrecisions) {
    const Answer plain = Solved(problem, precision, "plain");
    const Answer other = Solved(padded, precision, "padded");
    const double room = Room(problem, precision, plain);
    Vector f = other.f.values();
    f.resize(20);
    ExpectClose("padded, f", f, plain.f.values(), room);
    ExpectClose("padded, g", other.g.values(), plain.g.values(), room);
    ExpectClose("padded, value", other.value, plain.value, 2 * room);
  }
}

// A point cut into two with the same total mass changes nothing.
TEST_P(LawsTest, SplitPoints) {
  Transport problem = RandomClouds(18, 19, 2, 0.05, 9);
  Transport cut = problem;
  cut.n = 19;
  cut.a[17] /= 2;
  cut.a.push_back(cut.a[17]);
  cut.x.insert(cut.x.end(), {problem.x[34], problem.x[35]});
  for (Precision precision : kPrecisions) {
    const Answer plain = Solved(problem, precision, "plain");
    const Answer other = Solved(cut, precision, "split");
    const double room = Room(problem, precision, plain);
    Vector f = plain.f.values();
    f.push_back(f[17]);
    ExpectClose("split, f", other.f.values(), f, room);
    ExpectClose("split, value", other.value, plain.value, 2 * room);
  }
}

INSTANTIATE_ON_BACKENDS(LawsTest);

}  // namespace
}  // namespace sinkhorn::conformance
