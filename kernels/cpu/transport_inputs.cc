#include "kernels/cpu/transport_inputs.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/half.h"

namespace sinkhorn::cpu {
namespace {

constexpr int64_t kPartPairs = int64_t{1} << 18;  // Of a cost matrix, loaded at a time.

std::vector<double> LoadMember(const TensorView& view, int64_t index, int64_t count) {
  std::vector<double> values;
  if (view) {
    values.resize(count);
    LoadAsDouble(view.dtype, view.data, view.shared ? 0 : index * count, count, values.data());
  }
  return values;
}

std::vector<double> Masses(const TensorView& view, int64_t index, int64_t count) {
  return view ? LoadMember(view, index, count) : std::vector<double>(count, 1.0 / count);
}

double LargestNorm(const Cloud& cloud) {
  double centre2 = 0;
  for (double value : cloud.centre) centre2 += value * value;
  return cloud.radius + std::sqrt(centre2);
}

// The clouds as their cost wants them, and `cost_max`. Returns the range of the costs, where anybody asks.
double LoadClouds(const Problem& problem, int64_t index, MemberInputs* out) {
  const TransportInputs& in = problem.transport;
  const SolverOptions& solver = problem.solver;
  const bool unbalanced = !std::isinf(solver.rho_a) || !std::isinf(solver.rho_b);
  const bool cosine = in.point_cost == PointCost::kCosine, euclidean = in.point_cost == PointCost::kEuclidean;
  Cloud &x = out->x, &y = out->y;
  x = MakeCloud(in.x, index, problem.n, problem.dim, cosine);
  y = MakeCloud(in.y, index, problem.m, problem.dim, cosine);
  if (euclidean) ShareCentre(&x, &y);
  if (cosine && problem.outputs.projection_x) out->given_y = MakeCloud(in.y, index, problem.m, problem.dim);
  if (cosine && problem.outputs.projection_y) out->given_x = MakeCloud(in.x, index, problem.n, problem.dim);
  const double radius = std::max(x.radius, y.radius), kappa = CostFactor(in);
  out->cost_max = euclidean ? 2 * radius : 2 * kappa * (solver.debias ? radius * radius : x.radius * y.radius);
  if (!unbalanced && !(solver.epsilon_decay > 0)) return 0;
  const double diagonal2 = BoxDiagonal2(x, y);
  const double range = cosine ? 2 : euclidean ? std::sqrt(diagonal2) : kappa * diagonal2;
  if (unbalanced) {  // Damping acts on whole potentials: their shift no longer cancels.
    out->cost_max += range;
    if (in.point_cost == PointCost::kNegativeDot) {
      const double norm_x = LargestNorm(x), norm_y = LargestNorm(y), norm = std::max(norm_x, norm_y);
      out->cost_max += solver.debias ? norm * norm : norm_x * norm_y;
    }
  }
  return range;
}

}  // namespace

int64_t MemberInputs::PartCount(const Problem& problem) {
  if (problem.kind == ProblemKind::kPointCloud) return 0;
  return std::min({problem.n, int64_t{64}, (problem.n * problem.m + kPartPairs - 1) / kPartPairs});
}

void MemberInputs::SurveyPart(int64_t part) {
  const int64_t parts = costs.size();
  costs[part] = RangeOf(problem.transport.cost, index, problem.n, problem.m, problem.n * part / parts,
                        problem.n * (part + 1) / parts);
}

void MemberInputs::Load() {
  const TransportInputs& in = problem.transport;
  const SolverOptions& solver = problem.solver;
  a = Masses(in.a, index, problem.n);
  b = Masses(in.b, index, problem.m);
  f = LoadMember(in.initial_f, index, problem.n);
  g = LoadMember(in.initial_g, index, problem.m);
  double range = 0;
  if (problem.kind == ProblemKind::kDense) {
    CostRange all = costs[0];
    for (const CostRange& some : costs) all = {std::min(all.min, some.min), std::max(all.max, some.max)};
    cost_max = std::max(std::abs(all.min), std::abs(all.max));
    range = all.max - all.min;
  } else {
    range = LoadClouds(problem, index, this);
  }
  epsilon_start = std::max(solver.epsilon, solver.epsilon_start > 0 ? solver.epsilon_start : range);
}

}  // namespace sinkhorn::cpu
