// A transport member's inputs as doubles, and what is derived from them.
#ifndef SINKHORN_KERNELS_CPU_TRANSPORT_INPUTS_H_
#define SINKHORN_KERNELS_CPU_TRANSPORT_INPUTS_H_

#include <cstdint>
#include <vector>

#include "kernels/cpu/transport_cost.h"
#include "kernels/problem.h"

namespace sinkhorn::cpu {

struct MemberInputs {
  // Costs are surveyed in parts, by any threads, before all else is loaded.
  static int64_t PartCount(const Problem& problem);  // 0: point clouds.
  MemberInputs(const Problem& problem, int64_t index) : problem(problem), index(index), costs(PartCount(problem)) {}
  void SurveyPart(int64_t part);
  void Load();

  const Problem& problem;
  const int64_t index;
  std::vector<CostRange> costs;  // Of each part's rows.
  Cloud x, y;                    // Point clouds only; as their cost wants them.
  Cloud given_x, given_y;        // Where they were normalised and projections are wanted: as they came.
  std::vector<double> a, b;      // Masses.
  std::vector<double> f, g;      // Initial potentials; empty: none given.
  double cost_max = 0;           // Bound of what the exponents' terms are made of, in units of the cost.
  double epsilon_start = 0;      // Of an annealed schedule.
};

}  // namespace sinkhorn::cpu

#endif  // SINKHORN_KERNELS_CPU_TRANSPORT_INPUTS_H_
