// Entries of the plan at the final potentials, with the same bits wherever they are stored; what the plan is multiplied
// by, and what becomes of the products.
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

// ---- Products with right-hand sides -------------------------------------------------------------------------------

enum class Right : int {
  kPoints,   // Of the other side, centred: gradients and projections.
  kGiven,    // The same as they were given: projections of cosines.
  kVectors,  // V, or U.
};
// Numbers of a row of a right-hand side.
__host__ __device__ inline int RightWidth(const Job& job, int side, Right what) {
  if (what != Right::kVectors) return job.dim;
  return static_cast<int>(side == 0 ? job.in.v_columns : job.in.u_columns);
}
// Which of them a side's rows are multiplied by, whoever does it.
struct RightsWanted {
  bool points, given, vectors;
};
__host__ __device__ inline RightsWanted RightsOf(const Job& job, int side) {
  const bool gradient = WantsGradient(job, side) && SourceOf(job) != Source::kDistances;
  return {gradient || ProjectsMeans(job, side), ProjectionOf(job, side).data != nullptr && IsCosine(job),
          (side == 0 ? job.out.plan_v.data : job.out.plan_transpose_u.data) != nullptr};
}
// Chunks of so many numbers, side by side: points first, then points as given, then vectors.
struct RightChunks {
  int points, given, all;
};
__host__ __device__ inline RightChunks RightChunksOf(const Job& job, int side, const RightsWanted& wanted, int width) {
  const auto chunks = [&](Right what) { return static_cast<int>(CeilDiv(RightWidth(job, side, what), width)); };
  RightChunks of = {wanted.points ? chunks(Right::kPoints) : 0, wanted.given ? chunks(Right::kGiven) : 0, 0};
  of.all = of.points + of.given + (wanted.vectors ? chunks(Right::kVectors) : 0);
  return of;
}

// A chunk of a right-hand side.
struct RightSide {
  Right what;
  int width;             // Of the side: numbers of a row.
  int first;             // Of the chunk.
  const double* points;  // Or null:
  DType dtype;
  const void* data;
  int64_t base;

  // Chunk `chunk` of those of `side`.
  __device__ void Begin(const Job& job, int side, const RightChunks& chunks, int chunk, int chunk_width) {
    what = chunk < chunks.points                  ? Right::kPoints
           : chunk < chunks.points + chunks.given ? Right::kGiven
                                                  : Right::kVectors;
    const int before = what == Right::kPoints  ? 0
                       : what == Right::kGiven ? chunks.points
                                               : chunks.points + chunks.given;
    width = RightWidth(job, side, what);
    first = (chunk - before) * chunk_width;
  }
  // For rows of an engine's side whose columns are measure `other`.
  __device__ void Find(const Member& member, int side, int other) {
    const Job& job = member.job;
    points = what == Right::kPoints ? member.At<double>(job.at.points64[other]) : nullptr;
    const TensorView& view =
        what == Right::kVectors ? (side == 0 ? job.in.v : job.in.u) : (side == 0 ? job.in.y : job.in.x);
    dtype = view.dtype;
    data = view.data;
    base = view.shared ? 0 : member.index * job.size[other] * width;
  }
  // Entry k of the chunk in row j. Points as given are seen from their first row.
  template <typename T>
  __device__ T At(int64_t j, int k) const {
    if (first + k >= width) return 0;
    const int64_t i = j * width + first + k;
    if (points != nullptr) return static_cast<T>(points[i]);
    if (what == Right::kGiven) return static_cast<T>(LoadDouble(dtype, data, base + i) - FirstRow(k));
    return LoadAs<T>(dtype, data, base + i);
  }
  __device__ double FirstRow(int k) const { return LoadDouble(dtype, data, base + first + k); }
};

// Stores entry k of the chunk of row i's product, `value`; `mass`: the row's. `term`: 1: of debiased problems' plan
// with the own cloud, the last of `terms`. `gradient` keeps what earlier terms have left.
__device__ inline void StoreProduct(const Member& member, int side, const RightSide& right, int term, int terms,
                                    int64_t i, int k, double mass, double value, double* gradient) {
  const Job& job = member.job;
  const int64_t column = right.first + k, at = (member.index * job.size[side] + i) * right.width + column;
  if (right.what == Right::kVectors) {
    return StoreOutput(side == 0 ? job.out.plan_v : job.out.plan_transpose_u, at, value);
  }
  const OutputView& projection = ProjectionOf(job, side);
  if (right.what == Right::kGiven) return StoreOutput(projection, at, mass > 0 ? value / mass + right.FirstRow(k) : 0);
  if (term == 0 && ProjectsMeans(job, side)) {
    const double centre = member.At<double>(job.at.centre[1 - side])[column];
    StoreOutput(projection, at, mass > 0 ? value / mass + centre : 0);
  }
  if (!WantsGradient(job, side)) return;
  *gradient += GradientTerm(member, side, term > 0, i, column, mass, value);
  if (term + 1 == terms) StoreGradient(member, side, i, column, *gradient);
}

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_PLAN_CUH_
