#include "tests/conformance/random_draws.h"

#include <algorithm>
#include <cmath>
#include <iostream>
#include <numeric>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"

ABSL_FLAG(int, rounds, 1200, "Random problems of each kind.");
ABSL_FLAG(int, first_seed, 1, "Seed of the first one.");
ABSL_FLAG(bool, names, false, "Each one is named before it is solved.");
ABSL_FLAG(int, largest, 90, "Points, or rows and columns of costs, at most.");
ABSL_FLAG(int, smallest, 1, "The same, at least.");
ABSL_FLAG(int, largest_dim, 130, "Coordinates of points, at most.");
ABSL_FLAG(int, largest_matrix, 70, "Rows and columns of matrices to normalise, at most.");

namespace sinkhorn::conformance {
namespace {

using oracle::Transport;

DType AnyDType(Random* random) {
  return random->Chance(0.5) ? DType::kFloat32 : static_cast<DType>(random->Integer(0, 3));
}

int64_t AnySize(Random* random, int64_t largest, int64_t smallest = 1) {
  return random->Chance(0.1) ? smallest : std::lround(LogUniform(random, smallest, largest));
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

// Every other cloud gets another cost.
void AnyPointCost(uint64_t seed, Case* c) {
  Random random(seed + (uint64_t{1} << 40));
  if (c->problem.kind != ProblemKind::kPointCloud || random.Chance(0.5)) return;
  c->problem.transport.point_cost = static_cast<PointCost>(random.Integer(1, 3));
  absl::StrAppend(&c->name, ", cost ", static_cast<int>(c->problem.transport.point_cost));
}

}  // namespace

std::vector<int> Seeds(std::vector<int> known, int of_rounds) {
  const int first = absl::GetFlag(FLAGS_first_seed);
  for (int k = 0; k < absl::GetFlag(FLAGS_rounds) / of_rounds; ++k) known.push_back(first + k);
  return known;
}

void SayNext(const Case& c) {
  if (absl::GetFlag(FLAGS_names)) std::cerr << c.name << std::endl;
}

double LogUniform(Random* random, double low, double high) {
  return std::exp(random->Uniform(std::log(low), std::log(high)));
}

// ---- Transport ------------------------------------------------------------------------------

Case AnyTransport(uint64_t seed) {
  Random random(seed);
  const int largest = absl::GetFlag(FLAGS_largest), smallest = absl::GetFlag(FLAGS_smallest);
  const int64_t n = AnySize(&random, largest, smallest), m = AnySize(&random, largest, smallest);
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
  AnyPointCost(seed, &c);
  return c;
}

void AnyEnd(uint64_t seed, Case* c) {
  Random random(seed + (uint64_t{1} << 45));
  c->output_dtype = DType::kFloat64;
  c->solver().max_iterations = std::lround(LogUniform(&random, 1, 1000));  // Annealing may be cut short.
  if (random.Chance(0.8)) c->solver().tolerance = LogUniform(&random, 1e-7, 1e-1);
  if (random.Chance(0.3)) c->solver().over_relaxation = !c->solver().over_relaxation;
  absl::StrAppend(&c->name, ", now ", c->solver().max_iterations, ", to ", c->solver().tolerance);
}

void AnyIterations(uint64_t seed, Case* c) {
  Random random(seed + (uint64_t{1} << 46));
  SolverOptions& solver = c->solver();
  solver.precision = random.Chance(0.3) ? Precision::kFast : Precision::kStrict;
  solver.debias = c->problem.kind == ProblemKind::kPointCloud && random.Chance(0.5);
  if (random.Chance(0.4)) {
    const Vector masses = c->a.values();
    const double total = std::accumulate(masses.begin(), masses.end(), masses.empty() ? 1.0 : 0.0);
    solver.tolerance = LogUniform(&random, 1e-5, 1e-2) * std::max(1.0, total);
    solver.max_iterations += 200;
  }
  c->wanted = kPotentials;
  c->output_dtype = DType::kFloat64;
  absl::StrAppend(&c->name, ", precision ", static_cast<int>(solver.precision), ", to ", solver.tolerance,
                  solver.debias ? ", debiased" : "");
}

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

Case AnyHessian(uint64_t seed) {
  Random random(seed);
  const int largest = std::min(60, absl::GetFlag(FLAGS_largest));  // The oracle solves dense systems.
  Transport problem =
      RandomClouds(AnySize(&random, largest), AnySize(&random, largest), AnySize(&random, 150), 1, seed);
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

// ---- Normalisation --------------------------------------------------------------------------

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

}  // namespace sinkhorn::conformance
