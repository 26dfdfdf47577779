// Entries of the plan at the final potentials, with the same bits wherever they are made.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_PLAN_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_PLAN_CUH_

#include "kernels/cuda/transport_tile.cuh"

namespace sinkhorn {
namespace cuda {

// 2^x, never infinite: annealing may have been cut short.
__device__ inline float Saturated(float x) { return Exp2(fminf(x, 127.0f)); }
__device__ inline double Saturated(double x) { return Exp2(fmin(x, 1000.0)); }

// Sums that no product is drawn into.
__device__ inline float Plus(float x, float y) { return __fadd_rn(x, y); }
__device__ inline double Plus(double x, double y) { return __dadd_rn(x, y); }

// What row (c.side) or column i adds to exponents.
template <typename TE>
__device__ inline TE PlanTerm(const TileContext& c, int side, int i) {
  if (i >= (side == c.side ? c.rows : c.columns)) return static_cast<TE>(kVoid);
  const Member member{*c.job, c.member};
  const int parity = member.state(c.engine)->parity;
  const double reference = member.phi(c.engine, parity, 1 - c.side)[0];
  return static_cast<TE>(Term(member.phi(c.engine, parity, side), member.log_mass(MeasureOf(c.engine, side)),
                              side == c.side ? -reference : reference, c.scale, i));
}

template <typename T, typename TE>
__device__ inline T PlanEntry(TE z, TE row_term, TE column_term) {
  return Saturated(static_cast<T>(Plus(z, Plus(row_term, column_term))));
}

// A term of coordinate k of the gradient to row i of a side, by the row's mass and sum_j P_ij y_jk: of the plan with
// the other cloud; `self`: of debiased problems' plan with its own, which is taken off.
__device__ inline double GradientTerm(const Member& member, int side, bool self, int64_t i, int64_t k, double mass,
                                      double value) {
  const Job& job = member.job;
  const double mine = member.At<double>(job.at.centre[side])[k];
  const double theirs = self ? mine : member.At<double>(job.at.centre[1 - side])[k];
  const double* points = member.At<double>(job.at.points64[side]);
  const double x = IsNegativeDot(job) ? -theirs : points[i * job.dim + k] + (mine - theirs);
  return (self ? -2 : 2) * job.in.kappa * (mass * x - value);
}

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_PLAN_CUH_
