#include "tests/conformance/check.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>

#include "gtest/gtest.h"

namespace sinkhorn::conformance {
namespace {

using oracle::MaxAbs;
using oracle::Potentials;
using oracle::Sum;
using oracle::Transport;

struct Use {
  double ratio = 0;
  std::string where;
};

std::map<std::string, Use>& Uses() {
  static auto* uses = new std::map<std::string, Use>;
  return *uses;
}

std::string CurrentTest() {
  const testing::TestInfo* info = testing::UnitTest::GetInstance()->current_test_info();
  return info ? std::string(info->test_suite_name()) + "." + info->name() : "";
}

// Results below the smallest normal number may become 0: of float32 in STRICT, of float64 in DOUBLE.
double Flushed(const Case& c) { return std::ldexp(1.0, c.solver().precision == Precision::kDouble ? -1022 : -126); }

// Room for the output's dtype, whose subnormals may be flushed, and for STRICT results that were float32 on their way.
Vector WithRounding(Vector tolerance, const Case& c, const Vector& expected) {
  const bool strict = c.solver().precision != Precision::kDouble;
  const double working = UnitRoundoff(strict ? DType::kFloat32 : DType::kFloat64);
  const double relative = UnitRoundoff(c.output_dtype) + 2 * working;
  const double flushed = c.output_dtype == DType::kFloat64   ? std::ldexp(1.0, -1022)
                         : c.output_dtype == DType::kFloat16 ? SmallestPositive(DType::kFloat16)
                                                             : std::ldexp(1.0, -126);
  for (size_t k = 0; k < tolerance.size(); ++k) {
    tolerance[k] += relative * std::abs(expected[k]) + flushed + Flushed(c);
  }
  return tolerance;
}

// max_ij |x_i - y_j|_inf
double Spread(const Transport& problem) {
  double spread = 0;
  for (int64_t k = 0; k < problem.dim; ++k) {
    double low_x = 1e300, high_x = -1e300, low_y = 1e300, high_y = -1e300;
    for (int64_t i = 0; i < problem.n; ++i) {
      low_x = std::min(low_x, problem.x[i * problem.dim + k]);
      high_x = std::max(high_x, problem.x[i * problem.dim + k]);
    }
    for (int64_t j = 0; j < problem.m; ++j) {
      low_y = std::min(low_y, problem.y[j * problem.dim + k]);
      high_y = std::max(high_y, problem.y[j * problem.dim + k]);
    }
    spread = std::max({spread, high_x - low_y, high_y - low_x});
  }
  return spread;
}

// The checks of one member, sharing the tolerances.
class MemberCheck {
 public:
  MemberCheck(const Case& c, const Answer& answer, const Potentials& at, bool projects_light_rows)
      : c_(c),
        answer_(answer),
        problem_(MemberTransport(c)),
        at_(WithKnownPlan(problem_, at)),
        delta_(PotentialTolerance(c, at)),
        relative_(PlanTolerance(c, at)),
        negligible_(Negligible()),
        projects_light_rows_(projects_light_rows) {}

  void All() {
    Compare("f", answer_.f, at_.f, delta_);
    Compare("g", answer_.g, at_.g, delta_);
    Values();
    Bounds();
    if (answer_.plan.present()) Relative("plan", answer_.plan, Plan(problem_, at_));
    if (answer_.gradient_cost.present()) {
      Relative("gradient_cost", answer_.gradient_cost, Plan(problem_, at_));
    }
    Marginals();
    Gradients();
    Products();
  }

 private:
  // Absolute tolerance `tolerance` for all.
  void Compare(const std::string& what, const Tensor& actual, const Vector& expected, double tolerance) {
    Compare(what, actual, expected, Vector(expected.size(), tolerance));
  }
  void Compare(const std::string& what, const Tensor& actual, Vector expected, Vector tolerance) {
    if (!actual.present()) return;
    for (double& value : expected) {  // What the output's dtype cannot hold.
      if (std::isinf(Rounded(value, c_.output_dtype))) value = Rounded(value, c_.output_dtype);
    }
    ExpectClose(Label(what), actual.values(), expected, WithRounding(std::move(tolerance), c_, expected));
  }
  // Entries of the plan and sums of them.
  void Relative(const std::string& what, const Tensor& actual, const Vector& expected) {
    Vector tolerance = expected;
    for (double& value : tolerance) value = value * relative_ + negligible_;
    Compare(what, actual, expected, std::move(tolerance));
  }
  // What flushing may take off a sum of plan entries P_ij = (T_ij b_j) a_i: off T, times both masses; off T b, times a;
  // off the entry and off each partial sum.
  double Negligible() const {
    const double count = std::max(problem_.n, problem_.m), mass = std::max(Sum(problem_.a), Sum(problem_.b));
    const double largest = std::max(MaxAbs(problem_.a), MaxAbs(problem_.b));
    return Flushed(c_) * (largest * mass + count * largest + 2 * count);
  }
  std::string Label(const std::string& what) const { return LabelPrefix(c_) + what; }

  void Values() {
    const double plan_mass = Sum(PlanRowSums(problem_, at_));
    const double mass =
        TargetMass(problem_.a, at_.f, problem_.solver.rho_a) + TargetMass(problem_.b, at_.g, problem_.solver.rho_b);
    // A sum of k float64 terms is wrong by k 2^-53 of their total at most, here and in the oracle; 1e-14 is far less
    // than that for many terms.
    const double count = problem_.n + problem_.m;
    const double rounding = std::min(1e-14, 2 * (count + 4) * std::ldexp(1.0, -53));
    ExpectClose(Label("value"), answer_.value, {Value(problem_, at_)},
                mass * delta_ + problem_.solver.epsilon * plan_mass * relative_ +
                    rounding * (Terms(problem_.a, at_.f, problem_.solver.rho_a) +
                                Terms(problem_.b, at_.g, problem_.solver.rho_b) +
                                problem_.solver.epsilon * Sum(problem_.a) * Sum(problem_.b)));
    if (answer_.value_linear.empty()) return;
    ExpectClose(Label("value_linear"), answer_.value_linear, {ValueLinear(problem_, at_)},
                relative_ * AbsoluteLinear() + problem_.n * negligible_ * DefaultEpsilonStart(problem_));
  }

  // Any plan's primal value is above any dual bound; a plan with other totals than the problem's is
  // none.
  void Bounds() {
    const bool balanced_a = std::isinf(problem_.solver.rho_a);
    const bool balanced_b = std::isinf(problem_.solver.rho_b);
    if (balanced_a != balanced_b || (balanced_a && std::abs(Sum(problem_.a) - Sum(problem_.b)) > 1e-14)) return;
    const double primal = balanced_a ? PrimalBound(problem_, at_) : PrimalValue(problem_, Plan(problem_, at_));
    if (!std::isfinite(primal)) return;  // Entries are more than the oracle holds.
    const double plan_mass = std::min(Sum(problem_.a), Sum(problem_.b));
    // The oracle's own rounding: of sums of k terms about sqrt(k) 2^-53 of them (1e-13: k = 1e6), of exponents, and of
    // eps (a b - q), whose parts are each rounded by 2^-53 a few times.
    const double scale = MaxAbs(at_.f) + MaxAbs(at_.g), of_exponents = 1e-15 * scale / problem_.solver.epsilon;
    const double rounding = 1e-13 * (std::abs(primal) + scale) + of_exponents * std::abs(primal) +
                            1e-15 * problem_.solver.epsilon * plan_mass;
    EXPECT_LE(answer_.dual_bound[0], primal + rounding);
    if (answer_.primal_bound.empty()) return;
    EXPECT_GE(answer_.primal_bound[0], Value(problem_, at_) - rounding);
    // And that of its own potentials: mass that their error displaces may have to go the longest way.
    const double displaced = relative_ * plan_mass * DefaultEpsilonStart(problem_);
    EXPECT_LE(answer_.primal_bound[0], primal + 4 * (delta_ * plan_mass + displaced) + rounding) << Label("bound");
  }

  // sum_i of the dual's terms a_i rho (1 - exp(-f_i / rho)); of those larger than a_i f_i the potentials' tolerance
  // takes care.
  static double Terms(const Vector& mass, const Vector& potential, double rho) {
    double sum = 0;
    for (size_t i = 0; i < mass.size(); ++i) {
      const double f = potential[i];
      sum += mass[i] * std::min(std::abs(f), std::isinf(rho) ? std::abs(f) : std::abs(rho * std::expm1(-f / rho)));
    }
    return sum;
  }

  // sum_i a_i exp(-f_i / rho): the slope of the dual's terms, and what the rows should sum to.
  static double TargetMass(const Vector& mass, const Vector& potential, double rho) {
    double sum = 0;
    for (size_t i = 0; i < mass.size(); ++i) {
      sum += mass[i] * (std::isinf(rho) ? 1 : std::exp(-potential[i] / rho));
    }
    return sum;
  }

  // <|C|, P>
  double AbsoluteLinear() const {
    const Vector plan = Plan(problem_, at_);
    double total = 0;
    for (int64_t i = 0; i < problem_.n; ++i) {
      for (int64_t j = 0; j < problem_.m; ++j) {
        total += plan[i * problem_.m + j] * std::abs(problem_.Cost(i, j));
      }
    }
    return total;
  }

  void Marginals() {
    const Vector rows = PlanRowSums(problem_, at_), columns = PlanColumnSums(problem_, at_);
    Relative("row_sums", answer_.row_sums, rows);
    Relative("column_sums", answer_.column_sums, columns);
    const Convergence& convergence = answer_.convergence[0];
    const SolverOptions& solver = problem_.solver;
    const double plan_mass = Sum(rows);
    ExpectClose(Label("marginal_error"), {convergence.marginal_error_a, convergence.marginal_error_b},
                {MarginalErrorA(problem_, at_), MarginalErrorB(problem_, at_)},
                {plan_mass * relative_ + TargetRoom(problem_.a, at_.f, solver.rho_a),
                 plan_mass * relative_ + TargetRoom(problem_.b, at_.g, solver.rho_b)});
    EXPECT_EQ(convergence.iterations, c_.solver().max_iterations);
    EXPECT_EQ(convergence.stop_reason, StopReason::kMaxIterations);
  }

  // What the potentials' error does to a exp(-f / rho); masses, scalings and sums in float32; n sums of entries.
  double TargetRoom(const Vector& mass, const Vector& potential, double rho) const {
    const double target = TargetMass(mass, potential, rho);
    const bool strict = c_.solver().precision != Precision::kDouble;
    const double count = mass.size(), rounding = strict ? 2.4e-7 : std::ldexp(count + 4, -53);
    return target * ((std::isinf(rho) ? 0 : delta_ / rho) + rounding) + count * negligible_;
  }

  void Gradients() {
    if (answer_.gradient_x.present()) {
      const double slope = LargestSlope(problem_);
      const double scale = slope * relative_, flushed = 2 * slope * negligible_;  // Of r x and of P y.
      const auto tolerance = [&](const Vector& sums) {
        Vector each;
        for (double sum : sums) each.insert(each.end(), problem_.dim, scale * sum + flushed);
        return each;
      };
      Compare("gradient_x", answer_.gradient_x, GradientX(problem_, at_), tolerance(PlanRowSums(problem_, at_)));
      Compare("gradient_y", answer_.gradient_y, GradientY(problem_, at_), tolerance(PlanColumnSums(problem_, at_)));
    }
    if (answer_.gradient_a.present()) {
      GradientMass("gradient_a", answer_.gradient_a, problem_, at_);
      GradientMass("gradient_b", answer_.gradient_b, Swapped(problem_), {at_.g, at_.f});
    }
  }

  void GradientMass(const std::string& what, const Tensor& actual, const Transport& problem, const Potentials& at) {
    Compare(what, actual, oracle::GradientA(problem, at), GradientARoom(problem, at, delta_, relative_));
  }

  void Products() {
    if (answer_.plan_v.present()) {
      PlanProduct("plan_v", answer_.plan_v, problem_, at_, c_.v.values(), c_.problem.transport.v_columns);
    }
    if (answer_.plan_transpose_u.present()) {
      PlanProduct("plan_transpose_u", answer_.plan_transpose_u, Swapped(problem_), {at_.g, at_.f}, c_.u.values(),
                  c_.problem.transport.u_columns);
    }
    if (!answer_.projection_x.present()) return;
    Projection("projection_x", answer_.projection_x, ProjectionX(problem_, at_), problem_.a,
               PlanRowSums(problem_, at_));
    Projection("projection_y", answer_.projection_y, ProjectionY(problem_, at_), problem_.b,
               PlanColumnSums(problem_, at_));
  }

  // The CUDA backend divides flushed sums: below them a row has 0, its projection or what digits are left of it.
  void Projection(const std::string& what, const Tensor& actual, const Vector& expected, const Vector& mass,
                  const Vector& sums) {
    const double light = c_.solver().precision == Precision::kDouble ? 1e-300 : 1e-33;
    Vector tolerance(expected.size(), 2 * relative_ * Spread(problem_));
    for (size_t k = 0; k < expected.size() && !projects_light_rows_; ++k) {
      const int64_t i = k / problem_.dim;
      if (mass[i] > 0 && sums[i] < light) tolerance[k] += Spread(problem_) + std::abs(expected[k]);
    }
    Compare(what, actual, expected, std::move(tolerance));
  }

  void PlanProduct(const std::string& what, const Tensor& actual, const Transport& problem, const Potentials& at,
                   const Vector& v, int64_t columns) {
    Vector magnitude = v;
    for (double& value : magnitude) value = std::abs(value);
    Vector tolerance = PlanTimes(problem, at, magnitude, columns);
    for (double& value : tolerance) value = value * relative_ + negligible_ * std::max(1.0, MaxAbs(v));
    Compare(what, actual, PlanTimes(problem, at, v, columns), std::move(tolerance));
  }

  const Case& c_;
  const Answer& answer_;
  const Transport problem_;
  const Potentials at_;
  const double delta_;
  const double relative_;
  const double negligible_;
  const bool projects_light_rows_;
};

// What it may do to a cost that coordinates, seen from somewhere among the points, are rounded to 11 bits: each point
// is moved by 2^-12 of its way from there.
double FastCostError(const Transport& problem) {
  if (problem.x.empty()) return 0;
  double reach2 = 0, norm2 = 0;
  for (int64_t k = 0; k < problem.dim; ++k) {
    double low = HUGE_VAL, high = -HUGE_VAL;
    for (const Vector* points : {&problem.x, &problem.y}) {
      for (size_t i = k; i < points->size(); i += problem.dim) {
        low = std::min(low, (*points)[i]);
        high = std::max(high, (*points)[i]);
      }
    }
    reach2 += (high - low) * (high - low);
    norm2 += std::max(low * low, high * high);
  }
  const double moved = std::ldexp(2 * std::sqrt(reach2), -12);  // Both points.
  switch (problem.point_cost) {
    case PointCost::kSquaredEuclidean:
      return 2 * problem.kappa * std::sqrt(reach2) * moved;
    case PointCost::kEuclidean:
      return moved;
    case PointCost::kCosine:
      return std::ldexp(4.0, -12);
    case PointCost::kNegativeDot:
      return std::sqrt(norm2) * moved;
  }
  return 0;
}

}  // namespace

void ExpectClose(const std::string& what, const Vector& actual, const Vector& expected, const Vector& tolerance) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  double worst = 0;
  size_t at = 0;
  for (size_t k = 0; k < actual.size(); ++k) {
    const double error = actual[k] == expected[k] ? 0 : std::abs(actual[k] - expected[k]);
    const double ratio = error == 0 ? 0 : std::isfinite(error) ? error / tolerance[k] : HUGE_VAL;
    if (ratio > worst) worst = ratio, at = k;
  }
  Use& use = Uses()[what];
  if (worst > use.ratio) use = {worst, CurrentTest()};
  EXPECT_LE(worst, 1) << what << ": element " << at << " of " << actual.size() << " is " << actual[at] << ", expected "
                      << expected[at] << " +- " << tolerance[at];
}

void ExpectClose(const std::string& what, const Vector& actual, const Vector& expected, double tolerance) {
  ExpectClose(what, actual, expected, Vector(expected.size(), tolerance));
}

double PotentialTolerance(const Case& the_case, const Potentials& reference) {
  const double scale = std::max(MaxAbs(reference.f), MaxAbs(reference.g));
  const double eps = the_case.solver().epsilon;
  if (the_case.solver().precision == Precision::kDouble) return 1e-9 * (eps + scale);
  const double strict = 1e-4 * eps + 1e-6 * scale;
  return the_case.solver().precision == Precision::kFast ? strict + FastCostError(MemberTransport(the_case)) : strict;
}

double PlanTolerance(const Case& the_case, const Potentials& reference) {
  const double of_potentials = std::expm1(2 * PotentialTolerance(the_case, reference) / the_case.solver().epsilon);
  constexpr double kFastDensities = 2e-3;
  return the_case.solver().precision == Precision::kFast ? of_potentials + kFastDensities : of_potentials;
}

double LargestSlope(const Transport& problem) {
  double shortest2 = HUGE_VAL;
  for (const Vector* points : {&problem.x, &problem.y}) {
    for (size_t i = 0; i < points->size(); i += problem.dim) {
      double norm2 = 0;
      for (int64_t k = 0; k < problem.dim; ++k) norm2 += (*points)[i + k] * (*points)[i + k];
      shortest2 = std::min(shortest2, norm2);
    }
  }
  switch (problem.point_cost) {
    case PointCost::kSquaredEuclidean:
      return 2 * problem.kappa * Spread(problem);
    case PointCost::kEuclidean:
      return 1;
    case PointCost::kCosine:
      return 1 / std::sqrt(shortest2);
    case PointCost::kNegativeDot:
      return std::max(MaxAbs(problem.x), MaxAbs(problem.y));
  }
  return 0;
}

// rho (1 - exp(-f / rho)) - eps (r_i / a_i - mass_b); both terms feel the potentials' errors.
Vector GradientARoom(const Transport& problem, const Potentials& at, double potential_error, double plan_error) {
  const double rho = problem.solver.rho_a, eps = problem.solver.epsilon, mass_b = Sum(problem.b);
  Vector room = oracle::GradientA(problem, at);
  for (size_t i = 0; i < room.size(); ++i) {
    const double first = std::isinf(rho) ? at.f[i] : -rho * std::expm1(-at.f[i] / rho);
    const double slope = std::isinf(rho) ? 1 : std::exp(-at.f[i] / rho);
    const double ratio = (first - room[i]) / eps + mass_b;
    room[i] = potential_error * slope + eps * plan_error * (ratio + mass_b);
  }
  return room;
}

void ExpectMatchesOracle(const Case& member_case, const Answer& member, const Potentials& reference,
                         bool projects_light_rows) {
  MemberCheck(member_case, member, reference, projects_light_rows).All();
}

void CheckIterates(Backend* backend, const Case& the_case) {
  SCOPED_TRACE(the_case.name);
  const Answer answer = SolveAlone(backend, the_case);
  if (!answer.status.ok()) return;
  for (int64_t index = 0; index < the_case.problem.count; ++index) {
    const Case member = MemberCase(the_case, index);
    const Potentials reference = Iterate(MemberTransport(member), the_case.solver().max_iterations);
    ExpectMatchesOracle(member, MemberAnswer(answer, index, the_case.problem.count), reference,
                        backend->device().backend != "cuda");
  }
}

Potentials Centered(const Potentials& potentials) {
  Potentials centered = potentials;
  const double mean = oracle::Sum(potentials.f) / potentials.f.size();
  for (double& value : centered.f) value -= mean;
  for (double& value : centered.g) value += mean;
  return centered;
}

std::string LabelPrefix(const Case& the_case) {
  const Precision precision = the_case.solver().precision;
  std::string prefix = precision == Precision::kDouble ? "DOUBLE "
                       : precision == Precision::kFast ? "FAST "
                                                       : "STRICT ";
  if (the_case.output_dtype != DType::kFloat64) prefix += "rounded ";
  return prefix;
}

void PrintToleranceUse() {
  if (Uses().empty()) return;
  std::printf("Largest part of each tolerance used (1 = all of it):\n");
  for (const auto& [what, use] : Uses()) {
    std::printf("  %-32s %9.2g  %s\n", what.c_str(), use.ratio, use.where.c_str());
  }
}

}  // namespace sinkhorn::conformance
