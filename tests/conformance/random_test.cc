// Random problems from all over the contract's range, against the oracle: what the listed cases have not thought of.
// The seed of a failing one is in its name; --rounds asks for more of them, --largest for larger ones, which other
// kernels solve.
#include <algorithm>
#include <cmath>
#include <iostream>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/str_cat.h"
#include "tests/conformance/backends.h"
#include "tests/conformance/check.h"
#include "tests/conformance/check_hessian.h"
#include "tests/conformance/check_normalization.h"
#include "tests/conformance/company.h"
#include "tests/conformance/random_problems.h"

ABSL_FLAG(int, rounds, 1200, "Random problems of each kind.");
ABSL_FLAG(int, first_seed, 1, "Seed of the first one.");
ABSL_FLAG(bool, names, false, "Each one is named before it is solved.");
ABSL_FLAG(int, largest, 90, "Points, or rows and columns of costs, at most.");
ABSL_FLAG(int, largest_dim, 130, "Coordinates of points, at most.");
ABSL_FLAG(int, largest_matrix, 70, "Rows and columns of matrices to normalise, at most.");

namespace sinkhorn::conformance {
namespace {

using oracle::Transport;

double LogUniform(Random* random, double low, double high) {
  return std::exp(random->Uniform(std::log(low), std::log(high)));
}

DType AnyDType(Random* random) {
  return random->Chance(0.5) ? DType::kFloat32 : static_cast<DType>(random->Integer(0, 3));
}

int64_t AnySize(Random* random, int64_t largest) {
  return random->Chance(0.1) ? 1 : std::lround(LogUniform(random, 1, largest));
}

// Balanced or relaxed sides; masses with zeros, other totals, or none given.
void AnyMasses(Random* random, Transport* problem) {
  if (random->Chance(0.3)) {
    problem->solver.rho_a = LogUniform(random, 0.05, 50) * std::max(1.0, problem->solver.epsilon);
  }
  if (random->Chance(0.3)) {
    problem->solver.rho_b = LogUniform(random, 0.05, 50) * std::max(1.0, problem->solver.epsilon);
  }
  const bool balanced = std::isinf(problem->solver.rho_a) && std::isinf(problem->solver.rho_b);
  if (random->Chance(0.3)) {
    problem->a.clear();
    problem->b.clear();
    return;
  }
  const double total = random->Chance(0.7) ? 1 : std::ldexp(1.0, random->Integer(-4, 6));
  problem->a = random->Masses(problem->n, total);
  problem->b = random->Masses(problem->m, balanced ? total : total * random->Integer(1, 3));
  for (Vector* masses : {&problem->a, &problem->b}) {
    for (size_t k = 1; k < masses->size(); ++k) {
      if (!random->Chance(0.05)) continue;
      (*masses)[0] += (*masses)[k];
      (*masses)[k] = 0;
    }
  }
}

// Points scaled, moved, and in clusters.
void AnyPlaces(Random* random, Transport* problem) {
  const double scale = LogUniform(random, 0.1, 3);
  const double offset = random->Chance(0.3) ? random->Uniform(-1000, 1000) : 0;
  const double apart = random->Chance(0.2) ? random->Uniform(-30, 30) : 0;
  for (double& x : problem->x) x = static_cast<float>(x * scale + offset);
  for (double& y : problem->y) y = static_cast<float>(y * scale + offset + apart);
  for (double& cost : problem->cost) cost = static_cast<float>(cost * scale * scale + offset / 100);
}

Case AnyTransport(uint64_t seed) {
  Random random(seed);
  const int largest = absl::GetFlag(FLAGS_largest);
  const int64_t n = AnySize(&random, largest), m = AnySize(&random, largest);
  const int64_t dim = AnySize(&random, absl::GetFlag(FLAGS_largest_dim));
  const double epsilon = LogUniform(&random, 1e-3, 10);
  const bool dense = random.Chance(0.4);
  Transport problem = dense ? RandomDense(n, m, epsilon, seed) : RandomClouds(n, m, dim, epsilon, seed);
  AnyMasses(&random, &problem);
  AnyPlaces(&random, &problem);
  if (random.Chance(0.5)) problem.kappa = 0.5;
  if (random.Chance(0.4)) problem.solver.update_rule = UpdateRule::kSymmetric;
  if (random.Chance(0.2)) {
    problem.solver.epsilon_decay = random.Uniform(0.1, 0.5);  // At epsilon after 40 iterations.
    if (random.Chance(0.5)) problem.solver.epsilon_start = epsilon * random.Uniform(1, 20);
  }
  if (random.Chance(0.2)) {
    problem.initial_f = random.Uniforms(n, -epsilon, epsilon);
    problem.initial_g = random.Uniforms(m, -epsilon, epsilon);
  }
  Case c = CaseOf(problem, absl::StrCat("seed ", seed, ": ", dense ? "dense " : "clouds ", n, " x ", m, " d ", dim,
                                        " eps ", epsilon));
  const bool anneals = problem.solver.epsilon_decay > 0;
  c.solver().max_iterations = anneals ? random.Integer(40, 60) : std::lround(LogUniform(&random, 1, 60));
  if (random.Chance(0.3)) c.solver().precision = Precision::kDouble;
  absl::StrAppend(&c.name, ", rho ", problem.solver.rho_a, " ", problem.solver.rho_b,
                  problem.solver.update_rule == UpdateRule::kSymmetric ? ", symmetric" : "",
                  anneals ? ", annealed" : "", problem.a.empty() ? ", uniform" : "",
                  problem.initial_f.empty() ? "" : ", started", ", iterations ", c.solver().max_iterations);
  const bool balanced = std::isinf(problem.solver.rho_a) && std::isinf(problem.solver.rho_b);
  c.wanted = random.Integer(0, 2 * kProducts - 1);
  if (dense) c.wanted &= ~(kGradientPoints | kProjections);
  if (!dense) c.wanted &= ~kGradientCost;
  if (!balanced) c.wanted &= ~kPrimalBound;
  absl::StrAppend(&c.name, ", products ", absl::Hex(c.wanted));
  c.problem.transport.v_columns = random.Integer(1, 9);
  c.problem.transport.u_columns = random.Integer(1, 9);
  c.v = Tensor::Of(random.Normals(m * c.problem.transport.v_columns, 1), AnyDType(&random));
  c.u = Tensor::Of(random.Normals(n * c.problem.transport.u_columns, 1), AnyDType(&random));
  if (random.Chance(0.3)) c.output_dtype = DType::kFloat32;
  return c;
}

// Every other cloud gets another cost.
void AnyPointCost(uint64_t seed, Case* c) {
  Random random(seed + (uint64_t{1} << 40));
  if (c->problem.kind != ProblemKind::kPointCloud || random.Chance(0.5)) return;
  c->problem.transport.point_cost = static_cast<PointCost>(random.Integer(1, 3));
  absl::StrAppend(&c->name, ", cost ", static_cast<int>(c->problem.transport.point_cost));
}

class RandomTest : public ConformanceTest {};

// `known` ones, and one more of so many rounds.
std::vector<int> Seeds(std::vector<int> known, int of_rounds = 1) {
  const int first = absl::GetFlag(FLAGS_first_seed);
  for (int k = 0; k < absl::GetFlag(FLAGS_rounds) / of_rounds; ++k) known.push_back(first + k);
  return known;
}

void SayNext(const Case& c) {
  if (absl::GetFlag(FLAGS_names)) std::cerr << c.name << std::endl;
}

// By how many powers of two the plan's entries are more than what is asked for can be made of: infinitely, where not
// even float64 holds their densities; NaN where these are so close to its end that it is open.
double Excess(const Case& c, const Transport& problem, const oracle::Potentials& at) {
  const auto are_held = [&](double moved) {
    oracle::Potentials to = at;
    for (double& f : to.f) f += moved * problem.solver.epsilon;
    return std::isfinite(oracle::MaxAbs(oracle::GradientA(problem, to)) +
                         oracle::MaxAbs(oracle::GradientA(Swapped(problem), {to.g, to.f})));
  };
  constexpr double kClose = 16;  // More than masses and rounding come to.
  if (!are_held(-kClose)) return std::numeric_limits<double>::infinity();
  if (!are_held(kClose)) return std::numeric_limits<double>::quiet_NaN();
  constexpr uint32_t kOfEntries =
      kPlan | kValueLinear | kPrimalBound | kGradientPoints | kGradientCost | kProjections | kProducts;
  const bool limited = c.solver().precision != Precision::kDouble;
  if (!limited || (c.wanted & kOfEntries) == 0) return -std::numeric_limits<double>::infinity();
  const double error = std::max(MarginalErrorA(problem, at), MarginalErrorB(problem, at));
  return std::log2(error / (oracle::Sum(problem.a) * oracle::Sum(problem.b))) - 40;
}

TEST_P(RandomTest, TransportIterates) {
  // Those found faults which the first rounds do not: light rows' sums and projections; saturated densities where there
  // is no mass.
  for (int seed : Seeds({511, 2450, 3018, 8284})) {
    Case c = AnyTransport(seed);
    AnyPointCost(seed, &c);
    SayNext(c);
    const Transport problem = MemberTransport(c);
    const oracle::Potentials at = Iterate(problem, c.solver().max_iterations);
    const double excess = Excess(c, problem, at);
    if (std::isnan(excess)) continue;
    const double doubt = 2 * PotentialTolerance(c, at) / c.solver().epsilon / std::log(2);
    if (excess - doubt > 0) {
      EXPECT_EQ(SolveTogether(backend(), {&c})[0].status.code(), absl::StatusCode::kFailedPrecondition) << c.name;
    } else if (excess + doubt < 0 || SolveTogether(backend(), {&c})[0].status.ok()) {
      CheckIterates(backend(), c);
    }
  }
}

// Far from the solution and at it, whatever rounding or annealing does: bounds that a client may rely on.
TEST_P(RandomTest, BoundsBracketTheOptimum) {
  // Those found upper bounds that were none: FAST's, below the optimum; no number, where annealing was cut short.
  for (int seed : Seeds({71035, 3008138}, 4)) {
    Case c = AnyTransport(seed);
    AnyPointCost(seed, &c);
    Random random(seed + (uint64_t{1} << 43));
    c.solver().precision = static_cast<Precision>(random.Integer(0, 2));
    c.solver().max_iterations = std::lround(LogUniform(&random, 1, 400));  // Annealing may be cut short.
    if (random.Chance(0.5)) c.solver().tolerance = LogUniform(&random, 1e-7, 1e-1);
    const Transport problem = MemberTransport(c);
    const bool balanced = std::isinf(problem.solver.rho_a) && std::isinf(problem.solver.rho_b);
    c.wanted &= balanced ? ~0u : ~uint32_t{kPrimalBound};
    absl::StrAppend(&c.name, ", now ", c.solver().max_iterations, ", precision ",
                    static_cast<int>(c.solver().precision), ", to ", c.solver().tolerance);
    SayNext(c);
    const Answer answer = SolveTogether(backend(), {&c})[0];
    if (!answer.status.ok()) continue;
    // What the oracle has not reached is between its bounds; where it has none above, its error tells how far it is.
    double error = 0;
    const oracle::Potentials at = Converge(problem, &error);
    const double low = Value(problem, at), scale = oracle::MaxAbs(at.f) + oracle::MaxAbs(at.g);
    const bool relaxed = !std::isinf(problem.solver.rho_a) && !std::isinf(problem.solver.rho_b);
    const double high = balanced  ? PrimalBound(problem, at)
                        : relaxed ? PrimalValue(problem, Plan(problem, at))
                                  : low + error * scale;
    const double rounding = 1e-13 * (std::abs(low) + scale * std::max(oracle::Sum(problem.a), oracle::Sum(problem.b)));
    if (std::isnan(high)) continue;  // It has come nowhere.
    EXPECT_LE(answer.dual_bound[0], high + rounding) << c.name;
    if (!answer.primal_bound.empty()) {
      EXPECT_GE(answer.primal_bound[0], low - rounding) << c.name;
    }
  }
}

// After some iterations, or at a tolerance; its potentials as they are.
void AnyEnd(uint64_t seed, Case* c) {
  Random random(seed + (uint64_t{1} << 45));
  c->output_dtype = DType::kFloat64;
  c->solver().max_iterations = std::lround(LogUniform(&random, 1, 1000));  // Annealing may be cut short.
  if (random.Chance(0.8)) c->solver().tolerance = LogUniform(&random, 1e-7, 1e-1);
  if (random.Chance(0.3)) c->solver().over_relaxation = !c->solver().over_relaxation;
  absl::StrAppend(&c->name, ", now ", c->solver().max_iterations, ", to ", c->solver().tolerance);
}

// Wherever a solve ends, what it says and makes is of the potentials that it returns.
TEST_P(RandomTest, AnswersAreOfTheirPotentials) {
  // Those found annealing that ended where its first epsilon met the tolerance; a tolerance that was not met, but by
  // rounding; potentials that shared a constant beside which nothing was left of them.
  for (int seed : Seeds({2946, 2330, 20985}, 4)) {
    Case c = AnyTransport(seed);
    AnyPointCost(seed, &c);
    AnyEnd(seed, &c);
    c.wanted |= kPotentials;
    SayNext(c);
    SCOPED_TRACE(c.name);
    Answer answer = SolveTogether(backend(), {&c})[0];
    if (!answer.status.ok()) continue;
    Convergence& end = answer.convergence[0];
    const double error = std::max(end.marginal_error_a, end.marginal_error_b);
    EXPECT_EQ(end.converged, error <= c.solver().tolerance);
    EXPECT_TRUE(end.converged || end.stop_reason != StopReason::kTolerance);
    EXPECT_LE(end.iterations, c.solver().max_iterations);
    const Transport problem = MemberTransport(c);
    const oracle::Potentials returned{answer.f.values(), answer.g.values()};
    if (!(Excess(c, problem, returned) < 0)) continue;
    if (end.stop_reason == StopReason::kPrecision) {
      const double rounding = oracle::Sum(PlanRowSums(problem, returned)) * PlanTolerance(c, returned);
      EXPECT_LE(error, c.solver().tolerance + std::max(1e-5, rounding));
    }
    c.solver().max_iterations = end.iterations;
    end.stop_reason = StopReason::kMaxIterations;
    ExpectMatchesOracle(c, answer, returned, backend()->device().backend != "cuda");
  }
}

// Of all three problems of a debiased one.
TEST_P(RandomTest, DebiasedAnswersAreOfTheirPotentials) {
  for (int seed : Seeds({}, 4)) {
    Case c = AnyTransport(seed);
    if (c.problem.kind != ProblemKind::kPointCloud) continue;
    AnyPointCost(seed, &c);
    AnyEnd(seed, &c);
    c.solver().debias = true;
    c.wanted = kPotentials | kGradientPoints | kGradientMasses;
    SayNext(c);
    SCOPED_TRACE(c.name);
    const Answer answer = SolveTogether(backend(), {&c})[0];
    if (!answer.status.ok()) continue;
    const Transport problem = MemberTransport(c), of_a = SelfProblemA(problem), of_b = SelfProblemB(problem);
    const oracle::Potentials at{answer.f.values(), answer.g.values()};
    const Vector f_aa = answer.f_aa.values(), g_bb = answer.g_bb.values();
    const std::pair<const Transport&, oracle::Potentials> parts[] = {
        {problem, at}, {of_a, {f_aa, f_aa}}, {of_b, {g_bb, g_bb}}};
    if (std::any_of(std::begin(parts), std::end(parts),
                    [&](const auto& part) { return !(Excess(c, part.first, part.second) < 0); })) {
      continue;
    }
    // 1. What rounding may do to each.
    const double of_sums = c.solver().precision == Precision::kDouble ? 1e-13 : 2.4e-7;
    double room = 0, error_a = 0, error_b = 0, of_errors = 0, relative[3];
    for (int k = 0; k < 3; ++k) {
      const auto& [part, of_part] = parts[k];
      relative[k] = PlanTolerance(c, of_part);
      const double plan_mass = oracle::Sum(PlanRowSums(part, of_part));
      room += part.solver.epsilon * plan_mass * relative[k] + 1e-12 * std::abs(Value(part, of_part));
      room += 1e-12 * part.solver.epsilon * oracle::Sum(part.a) * oracle::Sum(part.b);
      error_a = std::max(error_a, MarginalErrorA(part, of_part));
      error_b = std::max(error_b, MarginalErrorB(part, of_part));
      of_errors = std::max(of_errors, (plan_mass + error_a + error_b) * (relative[k] + of_sums));
    }
    // 2. Value, errors, gradients.
    const std::string label = LabelPrefix(c) + "debiased ";
    ExpectClose(label + "value", answer.value, {Divergence(problem, at, f_aa, g_bb)}, room);
    const Convergence& end = answer.convergence[0];
    ExpectClose(label + "errors", {end.marginal_error_a, end.marginal_error_b}, {error_a, error_b}, of_errors);
    for (const bool is_x : {true, false}) {
      const Transport cross = is_x ? problem : Swapped(problem);
      const oracle::Potentials of_cross = is_x ? at : oracle::Potentials{at.g, at.f};
      const auto& [self, of_self] = parts[is_x ? 1 : 2];
      const double of_entries = std::max(relative[0], relative[is_x ? 1 : 2]);
      const Vector sums = PlanRowSums(cross, of_cross), self_sums = PlanRowSums(self, of_self);
      const double slope = std::max(LargestSlope(cross), LargestSlope(self));
      Vector of_points;
      for (int64_t i = 0; i < cross.n; ++i) {
        of_points.insert(of_points.end(), cross.dim, slope * (of_entries * (sums[i] + self_sums[i]) + 1e-30));
      }
      ExpectClose(label + "gradients", (is_x ? answer.gradient_x : answer.gradient_y).values(),
                  DivergenceGradientX(cross, of_cross, of_self.f), of_points);
      Vector of_masses = GradientARoom(cross, of_cross, 0, of_entries);
      const Vector of_self_masses = GradientARoom(self, of_self, 0, of_entries);
      const double size = oracle::MaxAbs(of_cross.f) + oracle::MaxAbs(of_self.f);
      const Vector expected = DivergenceGradientA(cross, of_cross, of_self.f);
      for (size_t i = 0; i < of_masses.size(); ++i) {
        of_masses[i] += of_self_masses[i] + 1e-12 * (size + std::abs(expected[i]));
      }
      ExpectClose(label + "gradients in masses", (is_x ? answer.gradient_a : answer.gradient_b).values(), expected,
                  of_masses);
    }
  }
}

// Directions for Hessian-vector products of a cloud's solution.
void AnyDirections(Random* random, Case* c) {
  HessianInputs& hessian = c->problem.transport.hessian;
  hessian.count = random->Integer(1, 7);
  hessian.preconditioner = static_cast<Preconditioner>(random->Integer(0, 2));
  hessian.neumann_terms = hessian.preconditioner == Preconditioner::kNeumann ? random->Integer(1, 4) : 0;
  const int sides = random->Integer(0, 4);  // 0, 1: of one alone.
  const int64_t values = hessian.count * c->problem.dim;
  if (sides != 0) c->direction_x = Tensor::Of(random->Normals(values * c->problem.n, 1), AnyDType(random));
  if (sides != 1) c->direction_y = Tensor::Of(random->Normals(values * c->problem.m, 1), AnyDType(random));
  absl::StrAppend(&c->name, ", directions ", hessian.count, " of ",
                  sides == 0   ? "y"
                  : sides == 1 ? "x"
                               : "both",
                  ", preconditioner ", static_cast<int>(hessian.preconditioner), " ", hessian.neumann_terms);
}

// Costs that have second derivatives, and an epsilon for which potentials and systems converge.
Case AnyHessian(uint64_t seed) {
  Random random(seed);
  const int largest = std::min(60, absl::GetFlag(FLAGS_largest));  // The oracle solves dense systems.
  Transport problem = RandomClouds(AnySize(&random, largest), AnySize(&random, largest), AnySize(&random, 40), 1, seed);
  // Cosines on a line have no slope, and dots far from the origin no relaxed solution that numbers hold.
  const PointCost costs[] = {PointCost::kSquaredEuclidean, PointCost::kNegativeDot, PointCost::kCosine};
  problem.point_cost = costs[random.Integer(0, problem.dim > 1 ? 2 : 1)];
  if (random.Chance(0.5)) problem.kappa = 0.5;
  if (problem.point_cost != PointCost::kNegativeDot) AnyPlaces(&random, &problem);
  const double spread = std::max(1e-3, oracle::DefaultEpsilonStart(problem));
  problem.solver.epsilon = spread * LogUniform(&random, 0.05, 2);
  AnyMasses(&random, &problem);
  Case c = CaseOf(problem,
                  absl::StrCat("seed ", seed, ": clouds ", problem.n, " x ", problem.m, " d ", problem.dim, " eps ",
                               problem.solver.epsilon, ", cost ", static_cast<int>(problem.point_cost), ", rho ",
                               problem.solver.rho_a, " ", problem.solver.rho_b, problem.a.empty() ? ", uniform" : ""));
  const bool strict = random.Chance(0.5);
  c.solver().precision = strict ? Precision::kStrict : Precision::kDouble;
  c.solver().max_iterations = 20000;
  const double mass = std::accumulate(problem.a.begin(), problem.a.end(), problem.a.empty() ? 1.0 : 0.0);
  c.solver().tolerance = (strict ? 1e-6 : 1e-13) * std::max(1.0, mass);
  c.solver().debias = random.Chance(0.3);
  AnyDirections(&random, &c);
  c.problem.transport.hessian.tolerance = strict ? 1e-5 : 1e-11;
  c.problem.transport.hessian.max_iterations = 1000;
  absl::StrAppend(&c.name, strict ? ", strict" : ", double", c.solver().debias ? ", debiased" : "");
  return c;
}

TEST_P(RandomTest, HessianVectorProducts) {
  const std::vector<int> seeds = Seeds({}, 20);
  // Relaxed dots may not: their self-terms weigh far more than what they are of. Nor, in float32, systems of few points
  // that are nearly singular.
  size_t converged = 0;
  for (int seed : seeds) {
    const Case c = AnyHessian(seed);
    SayNext(c);
    SCOPED_TRACE(c.name);
    const Answer answer = SolveAlone(backend(), c);
    if (!answer.status.ok() || !answer.convergence[0].converged) continue;
    converged += answer.hessian_convergence[0].converged;
    ExpectMatchesHessian(c, answer);
  }
  EXPECT_GE(converged, seeds.size() * 9 / 10);
}

// More members, that share some tensors and have others of their own, larger and smaller.
void AnyCount(Random* random, Case* c) {
  if (c->problem.n * c->problem.m > 1 << 16 || random->Chance(0.7)) return;
  c->problem.count = random->Integer(2, 4);
  absl::StrAppend(&c->name, ", count ", c->problem.count);
  for (Tensor Case::*input : {&Case::cost, &Case::x, &Case::y, &Case::a, &Case::b, &Case::initial_f, &Case::initial_g,
                              &Case::v, &Case::u, &Case::direction_x, &Case::direction_y}) {
    Tensor& tensor = c->*input;
    if (!tensor.present()) continue;
    const Vector of_one = tensor.values();
    if (random->Chance(0.4)) {
      tensor = Tensor::Shared(of_one, tensor.dtype());
      continue;
    }
    const bool masses = input == &Case::a || input == &Case::b;  // Totals stay: others have them in another order.
    Vector of_all;
    for (int64_t k = 0; k < c->problem.count; ++k) {
      const double factor = masses || random->Chance(0.5) ? 1 : random->Uniform(0.1, 2);
      for (size_t i = 0; i < of_one.size(); ++i) {
        of_all.push_back(of_one[masses ? (i + k) % of_one.size() : i] * factor);
      }
    }
    tensor = Tensor::Of(of_all, tensor.dtype());
  }
}

// The larger entries of the plan, all of which have room or not.
void AnySparsePlan(Random* random, Case* c) {
  if (random->Chance(0.8)) return;
  SparseOutput& sparse = c->problem.outputs.sparse_plan;
  sparse.threshold = random->Chance(0.2) ? 0 : LogUniform(random, 1e-6, 0.5);
  sparse.max_entries = random->Integer(1, c->problem.n * c->problem.m);
  absl::StrAppend(&c->name, ", entries from ", sparse.threshold, " on, ", sparse.max_entries);
}

// As float64, of which none becomes infinite.
void Scale(double factor, Tensor* tensor, bool first_alone = false) {
  if (!tensor->present()) return;
  Vector values = tensor->values();
  for (size_t k = 0; k < (first_alone ? 1 : values.size()); ++k) values[k] *= factor;
  *tensor = tensor->shared() ? Tensor::Shared(values, DType::kFloat64) : Tensor::Of(values, DType::kFloat64);
}

// Numbers that no one means: what becomes of them is told, or as they say, and costs nobody else anything.
void AnyExtremes(Random* random, Case* c) {
  if (random->Chance(0.75)) return;
  const auto factor = [&] { return random->Chance(0.5) ? 1 : std::pow(10, random->Uniform(-30, 30)); };
  const double points = factor(), masses = factor(), costs = factor();
  for (Tensor* tensor : {&c->x, &c->y}) Scale(points, tensor);
  for (Tensor* tensor : {&c->a, &c->b}) Scale(masses, tensor);
  Scale(costs, &c->cost);
  for (Tensor* tensor : {&c->x, &c->cost, &c->initial_g, &c->direction_x}) Scale(factor(), tensor, true);
  c->solver().epsilon *= factor();
  c->solver().epsilon_start = 0;
  c->solver().rho_a *= factor();
  absl::StrAppend(&c->name, ", extreme: points ", points, ", masses ", masses, ", costs ", costs, ", epsilon ",
                  c->solver().epsilon, ", rho ", c->solver().rho_a);
}

// In all precisions, until a tolerance is met, less the self-terms, with directions, some entries; in batches.
void AnySolver(uint64_t seed, Case* c) {
  Random random(seed + (uint64_t{1} << 41));
  if (random.Chance(0.4)) c->solver().precision = Precision::kFast;
  if (random.Chance(0.4)) {
    c->solver().tolerance = LogUniform(&random, 1e-6, 1e-2);
    c->solver().max_iterations += 100;
  }
  if (c->problem.kind == ProblemKind::kPointCloud && random.Chance(0.3)) {
    c->solver().debias = true;
    c->wanted &= kPotentials | kGradientPoints | kGradientMasses;
  }
  absl::StrAppend(&c->name, ", precision ", static_cast<int>(c->solver().precision), ", to ", c->solver().tolerance,
                  c->solver().debias ? ", debiased" : "");
  if (c->problem.kind == ProblemKind::kPointCloud && c->problem.transport.point_cost != PointCost::kEuclidean &&
      random.Chance(0.3)) {
    AnyDirections(&random, c);
  }
  AnySparsePlan(&random, c);
  AnyCount(&random, c);
  AnyExtremes(&random, c);
}

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

TEST_P(RandomTest, CompanyChangesNoBits) {
  ExpectCompanyChangesNoBits(backend(), [](int seed) {
    Case c = AnyTransport(seed);
    AnyPointCost(seed, &c);
    AnySolver(seed, &c);
    return c;
  });
}

// Points 1e10 apart beside a rho of 1e-22: float32 leaves out more of the potentials than scalings can hold. There is
// no answer, but in float64, which is all that it may cost. (A GPU's block parted at a barrier: the device was lost.)
TEST_P(RandomTest, PotentialsBeyondFloat32) {
  const absl::FlagSaver saver;
  absl::SetFlag(&FLAGS_largest, 300);
  constexpr int kSeed = 288000975;
  Case c = AnyTransport(kSeed);
  AnyPointCost(kSeed, &c);
  AnySolver(kSeed, &c);
  const absl::Status status = SolveTogether(backend(), {&c})[0].status;
  EXPECT_TRUE(status.ok() || status.code() == absl::StatusCode::kFailedPrecondition) << c.name << ": " << status;
}

// Whoever is cut short has what was reached, as if no more had been asked for: to the bit or, where iterations choose
// the kernel, as near as the precision is.
TEST_P(RandomTest, FinishesSoon) {
  for (int seed : Seeds({}, 10)) {
    Case c = AnyTransport(seed);
    AnyPointCost(seed, &c);
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

// ---- Normalisation --------------------------------------------------------------------------

Recipe AnyRecipe(Random* random) {
  const Recipe named[] = {LogRowColumnRecipe(), ExpColumnRowRecipe(), DeepSeekRecipe()};
  if (random->Chance(0.5)) return named[random->Integer(0, 2)];
  Recipe recipe;
  if (random->Chance(0.3)) recipe.start = Start::kRowSoftmax;
  if (random->Chance(0.5)) recipe.offset = LogUniform(random, 1e-8, 1);
  if (recipe.start == Start::kExp && random->Chance(0.5)) recipe.order = Order::kColumnRow;
  recipe.guard = static_cast<Guard>(random->Integer(0, 2));
  if (recipe.guard != Guard::kNone) recipe.guard_value = LogUniform(random, 1e-10, 1);
  if (random->Chance(0.3)) recipe.logit_floor = random->Uniform(-5, 0);
  return recipe;
}

constexpr int64_t kMostEntries = 1 << 20;  // Of a problem, or of a member more: the oracle takes its time.

Case AnyNormalization(uint64_t seed) {
  Random random(seed);
  const int largest = absl::GetFlag(FLAGS_largest_matrix);
  const int64_t n = AnySize(&random, largest), m = random.Chance(0.4) ? n : AnySize(&random, largest);
  const int iterations = std::lround(LogUniform(&random, 1, 40));
  const double deviation = LogUniform(&random, 0.1, random.Chance(0.2) ? 300 : 5);
  Case c = CaseOf(RandomLogits(n, m, AnyRecipe(&random), iterations, deviation, seed),
                  absl::StrCat("seed ", seed, ": ", n, " x ", m, " deviation ", deviation));
  c.problem.count = std::min(AnySize(&random, 40), 1 + kMostEntries / (n * m));
  c.logits = Tensor::Of(random.Normals(c.problem.count * n * m, deviation), AnyDType(&random));
  if (random.Chance(0.3)) c.row_marginals = Tensor::Shared(random.Uniforms(n, 0.125, 4));
  if (random.Chance(0.3)) c.column_marginals = Tensor::Of(random.Uniforms(c.problem.count * m, 0.125, 4));
  const int64_t bin = random.Chance(0.2) ? 1 : 0;
  if (bin) c.dustbin_score = Tensor::Of(random.Normals(c.problem.count, 1));
  c.cotangent = Tensor::Of(random.Normals(c.problem.count * (n + bin) * (m + bin), 1));
  c.problem.normalization.backward = BackwardMode::kUnrolled;
  if (random.Chance(0.3)) c.solver().precision = Precision::kDouble;
  return c;
}

TEST_P(RandomTest, NormalizationForwardAndBackward) {
  if (GetParam() == "cpu_streamed") GTEST_SKIP() << "the same as cpu";
  // These as well: scalings that an added guard drives apart by 30 orders of magnitude.
  for (int seed : Seeds({1230, 1643})) {
    const Case c = AnyNormalization(seed);
    SayNext(c);
    SCOPED_TRACE(c.name);
    const Answer answer = SolveAlone(backend(), c);
    if (!answer.status.ok()) continue;
    for (int64_t index = 0; index < c.problem.count; ++index) {
      const Case member = MemberCase(c, index);
      const Answer member_answer = MemberAnswer(answer, index, c.problem.count);
      ExpectMatchesRecipe(member, member_answer);
      ExpectMatchesUnrolled(LabelPrefix(c) + "unrolled", member, member_answer);
    }
  }
}

// Any derivative, EXACT among the recipes, until a tolerance is met, or the plan alone.
void AnyBackward(uint64_t seed, Case* c) {
  Random random(seed + (uint64_t{1} << 42));
  if (random.Chance(0.2)) {
    c->problem.normalization.recipe = Recipe();
    c->problem.normalization.recipe.exact = true;
    c->row_marginals = c->column_marginals = Tensor();  // Totals must be equal.
    c->dustbin_score = Tensor();
    c->cotangent = Tensor::Of(random.Normals(c->problem.count * c->problem.n * c->problem.m, 1));
    c->solver().max_iterations += 100;
  }
  const bool exact = c->problem.normalization.recipe.exact;
  c->problem.normalization.backward = static_cast<BackwardMode>(random.Integer(exact ? 1 : 0, 3));
  if (random.Chance(0.3)) c->cotangent = Tensor();
  if (exact || random.Chance(0.3)) c->solver().tolerance = LogUniform(&random, 1e-6, 1e-2);
  if (random.Chance(0.2)) {
    const double factor = std::pow(10, random.Uniform(-30, 30));
    absl::StrAppend(&c->name, ", extreme: logits ", factor);
    for (Tensor* tensor : {&c->logits, &c->cotangent, &c->row_marginals}) {
      if (tensor->present() && random.Chance(0.6)) Scale(factor, tensor);
    }
  }
  absl::StrAppend(&c->name, ", count ", c->problem.count, exact ? ", exact" : "", ", backward ",
                  c->cotangent.present() ? static_cast<int>(c->problem.normalization.backward) : -1, ", to ",
                  c->solver().tolerance);
}

TEST_P(RandomTest, MatricesInCompany) {
  ExpectCompanyChangesNoBits(backend(), [](int seed) {
    Case c = AnyNormalization(seed);
    AnyBackward(seed, &c);
    return c;
  });
}

INSTANTIATE_ON_BACKENDS(RandomTest);

}  // namespace
}  // namespace sinkhorn::conformance
