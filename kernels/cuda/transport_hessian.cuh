// Hessian-vector products of point clouds, by conjugate gradients on the device: what they keep of a member, and where.
// The formulas, and the course of the conjugate gradients, are those of kernels/cpu/transport_hessian.h.
//
// Each direction of each engine goes its own way from phase to phase (transport_hessian_step.cu), whatever others do:
// every pair of sweeps, P s by rows and P^T w by columns (transport_hessian_sweep.cu), takes each a step further. The
// entries of P are made anew in every sweep; vectors and scalars are doubles.
//
// All of it is the last part of a member's workspace: for each engine its states, arrivals, vectors and sums of sweeps;
// then steps as halves.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_HESSIAN_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_HESSIAN_CUH_

#include "kernels/cuda/transport_block.cuh"
#include "kernels/cuda/transport_hessian.h"

namespace sinkhorn {
namespace cuda {

// What the next pair of sweeps is for.
enum class Phase : int32_t {
  kReduce,    // The right-hand side of the columns: P^T of the rows' (no sweep of the rows).
  kMultiply,  // S times the step.
  kNeumann,   // A term of the preconditioner.
  kCheck,     // S times the solution, and df from it.
  kDone,
};

struct DirectionState {
  double norm, inner, checked, total;  // `total`: of the diagonal.
  Phase phase;
  int32_t iterations, neumann_left;
  int32_t padding;
  double largest;  // |df_i| + |dg_j|, at most; transport_hessian_halves.cu
};

// The vectors of one engine's directions: rows' have size[0] doubles, columns' size[1].
struct ProductVectors {
  DirectionState* states;
  unsigned* arrivals;  // [groups of directions, row blocks]
  double* vectors;
  double* partial;  // [splits, directions, rows]: sums of a sweep's parts
  int64_t size[2], count, row_blocks;

  // 1 / (r + p) and 1 / (c + q), 0 where there is no mass; p and q; c + q; what the preconditioner begins with.
  __device__ double* inverse(int side) const { return vectors + (side == 0 ? 0 : 2 * size[0]); }
  __device__ double* extra(int side) const { return inverse(side) + size[side]; }
  __device__ double* diagonal() const { return vectors + 2 * size[0] + 2 * size[1]; }
  __device__ double* condition() const { return diagonal() + size[1]; }
  // Of direction q: u and v; the right-hand sides; df - u and dg - v; what a sweep found.
  __device__ double* shift(int side, int64_t q) const { return Of(side, q, 0); }
  __device__ double* right(int side, int64_t q) const { return Of(side, q, 1); }
  __device__ double* potential(int side, int64_t q) const { return Of(side, q, 2); }
  __device__ double* image(int side, int64_t q) const { return Of(side, q, 3); }
  // Of the columns alone.
  __device__ double* residual(int64_t q) const { return Of(1, q, 4); }
  __device__ double* step(int64_t q) const { return Of(1, q, 5); }
  __device__ double* conditioned(int64_t q) const { return Of(1, q, 6); }
  // What the sweep of a side multiplies the plan with; null: it has nothing to do.
  __device__ const double* Source(int side, int64_t q) const {
    const Phase phase = q < count ? states[q].phase : Phase::kDone;
    if (phase == Phase::kDone || (phase == Phase::kReduce && side == 0)) return nullptr;
    if (side == 1) return image(0, q);
    return phase == Phase::kMultiply ? step(q) : phase == Phase::kNeumann ? conditioned(q) : potential(1, q);
  }

 private:
  __device__ double* Of(int side, int64_t q, int64_t which) const {
    const int64_t of_direction = 4 * size[0] + 7 * size[1];
    return condition() + size[1] + q * of_direction + (side == 0 ? which * size[0] : 4 * size[0] + which * size[1]);
  }
};

// Of an engine's part, in bytes.
struct ProductSizes {
  int64_t states, arrivals, vectors, partial;
  __host__ __device__ int64_t total() const { return (states + arrivals + vectors + partial + 255) / 256 * 256; }
};
__host__ __device__ inline int64_t SweepGroups(const Job& job) { return CeilDiv(job.in.hessian.count, kSweepTogether); }
__host__ __device__ inline ProductSizes ProductSizesOf(const Job& job, int engine) {
  const int64_t count = job.in.hessian.count, n = EngineSize(job, engine, 0), m = EngineSize(job, engine, 1);
  const int64_t row_blocks = CeilDiv(n > m ? n : m, kTile);
  int64_t parts = 0;
  for (int side = 0; side < 2; ++side) {
    for (Geometry geometry : {Geometry::kPlain, Geometry::kCloud, Geometry::kExact}) {
      const int64_t size = int64_t{Splits(job, engine, side, geometry)} * (side == 0 ? n : m);
      parts = size > parts ? size : parts;
    }
  }
  ProductSizes sizes;
  sizes.states = count * static_cast<int64_t>(sizeof(DirectionState));
  sizes.arrivals = CeilDiv(SweepGroups(job) * row_blocks, 2) * 8;
  sizes.vectors = 8 * (2 * n + 4 * m + count * (4 * n + 7 * m));
  sizes.partial = 8 * count * parts;
  return sizes;
}
// Steps as halves, like points (transport_cloud.cuh): a scale for each direction, then those of x and those of y.
__host__ __device__ inline bool MayHaveStepHalves(const Job& job) {  // Whatever the device.
  return SourceOf(job) == Source::kProducts && job.precision != Precision::kDouble && job.dim <= kDepth;
}
__host__ __device__ inline int64_t ScaleBytes(const Job& job) { return CeilDiv(job.in.hessian.count * 8, 256) * 256; }
__host__ __device__ inline int64_t StepHalvesBytes(const Job& job) {
  const int64_t count = job.in.hessian.count;
  return MayHaveStepHalves(job) ? ScaleBytes(job) + count * (HalvesBytes(job, 0) + HalvesBytes(job, 1)) : 0;
}
__host__ __device__ inline const TensorView& DirectionOf(const Job& job, int measure) {
  return measure == 0 ? job.in.hessian.x : job.in.hessian.y;
}
// Steps as doubles, double[count, size, dim], of x and of y, where exact tiles take them; of cosines, those on the unit
// sphere, and products there, of whatever moves: transport_hessian_sphere.cu.
__host__ __device__ inline int64_t StepDoubles(const Job& job, int measure) {
  const bool kept = IsCosine(job) || (MultipliesDoubles(job) && DirectionOf(job, measure).data != nullptr);
  return kept ? job.in.hessian.count * job.size[measure] * job.dim : 0;
}
__host__ __device__ inline int64_t StepBytes(const Job& job) {
  const int64_t doubles = StepDoubles(job, 0) + StepDoubles(job, 1);
  return CeilDiv(8 * doubles * (IsCosine(job) ? 2 : 1), 256) * 256;
}
__host__ __device__ inline int64_t ProductBytes(const Job& job) {
  if (job.in.hessian.count == 0) return 0;
  int64_t bytes = StepHalvesBytes(job) + StepBytes(job);
  for (int e = 0; e < job.engines; ++e) bytes += ProductSizesOf(job, e).total();
  return bytes;
}
__device__ inline double* StepScales(const Member& member) {
  return member.At<double>(member.job.at.bytes - StepBytes(member.job) - StepHalvesBytes(member.job));
}
__device__ inline char* StepHalvesOf(const Member& member, int measure, int64_t q) {
  const Job& job = member.job;
  const int64_t before = measure == 0 ? 0 : job.in.hessian.count * HalvesBytes(job, 0);
  return reinterpret_cast<char*>(StepScales(member)) + ScaleBytes(job) + before + q * HalvesBytes(job, measure);
}

__device__ inline double* StepDoublesOf(const Member& member, int measure) {
  const Job& job = member.job;
  return member.At<double>(job.at.bytes - StepBytes(job)) + (measure == 0 ? 0 : StepDoubles(job, 0));
}
__device__ inline double* SphereProducts(const Member& member, int measure) {
  return StepDoublesOf(member, measure) + StepDoubles(member.job, 0) + StepDoubles(member.job, 1);
}

__device__ inline ProductVectors VectorsOf(const Member& member, int engine) {
  const Job& job = member.job;
  int64_t at = job.at.bytes - ProductBytes(job);
  for (int e = 0; e < engine; ++e) at += ProductSizesOf(job, e).total();
  const ProductSizes sizes = ProductSizesOf(job, engine);
  ProductVectors v;
  v.states = member.At<DirectionState>(at);
  v.arrivals = member.At<unsigned>(at + sizes.states);
  v.vectors = member.At<double>(at + sizes.states + sizes.arrivals);
  v.partial = member.At<double>(at + sizes.states + sizes.arrivals + sizes.vectors);
  v.count = job.in.hessian.count;
  for (int side = 0; side < 2; ++side) v.size[side] = EngineSize(job, engine, side);
  v.row_blocks = CeilDiv(v.size[0] > v.size[1] ? v.size[0] : v.size[1], kTile);
  return v;
}

// ---- Directions ---------------------------------------------------------------------------------------------------

__host__ __device__ inline const OutputView& ProductOf(const Job& job, int measure) {
  return measure == 0 ? job.out.hessian_x : job.out.hessian_y;
}
// OT(a, a) counts where its points move, on both sides at once, and their products are wanted.
__host__ __device__ inline bool HasProducts(const Job& job, int engine) {
  return engine == 0 || (DirectionOf(job, engine - 1).data != nullptr && ProductOf(job, engine - 1).data != nullptr);
}

// A measure's steps along direction q of a member, or none.
struct Steps {
  DType dtype;
  const void* data;
  int64_t base;
  template <typename T>
  __device__ T At(int64_t i) const {
    return LoadAs<T>(dtype, data, base + i);
  }
};
__device__ inline Steps GivenSteps(const Member& member, int measure, int64_t q) {
  const Job& job = member.job;
  const TensorView& view = DirectionOf(job, measure);
  return {view.dtype, view.data,
          ((view.shared ? 0 : member.index * job.in.hessian.count) + q) * job.size[measure] * job.dim};
}
// The same on the unit sphere where points are there.
__device__ inline Steps StepsOf(const Member& member, int measure, int64_t q) {
  const Job& job = member.job;
  if (!IsCosine(job) || DirectionOf(job, measure).data == nullptr) return GivenSteps(member, measure, q);
  return {DType::kFloat64, StepDoublesOf(member, measure), q * job.size[measure] * job.dim};
}

// What row i's term of the cost adds to its gradient, coordinate k: seen from the other cloud's centre; of negative
// dots that centre alone.
__device__ inline double ApartOf(const Member& member, int engine, int side, int64_t i, int k) {
  const Job& job = member.job;
  const int own = MeasureOf(engine, side);
  const double theirs = member.At<double>(job.at.centre[MeasureOf(engine, 1 - side)])[k];
  if (IsNegativeDot(job)) return -theirs;
  return member.At<double>(job.at.points64[own])[i * job.dim + k] + (member.At<double>(job.at.centre[own])[k] - theirs);
}

// ---- What sums of the bent plan become ----------------------------------------------------------------------------

// Row i's sum of P o D.
__device__ inline void StoreRight(const ProductVectors& v, int side, int64_t q, int64_t i, double sum) {
  const double right = sum - v.extra(side)[i] * v.shift(side, q)[i];
  v.right(side, q)[i] = right;
  if (side == 0) v.image(0, q)[i] = right * v.inverse(0)[i];
}
// `squares`: sum_i P_ij^2 / (r + p)_i.
__device__ inline void StoreCondition(const Job& job, const ProductVectors& v, int64_t j, double squares) {
  const double diagonal = v.diagonal()[j];
  switch (job.in.hessian.preconditioner) {
    case Preconditioner::kNone:
      v.condition()[j] = 1;
      return;
    case Preconditioner::kNeumann:
      v.condition()[j] = v.inverse(1)[j];
      return;
    case Preconditioner::kJacobi:
      // A column that shares its rows with nobody has 0 there, up to rounding.
      v.condition()[j] = diagonal > 0 ? 1 / fmax(diagonal - squares, 1e-6 * diagonal) : 0;
      return;
  }
}
// Coordinate k of row i's product: what the plan's sums leave out, in units of 2 kappa. `step`: of the row, or 0.
__device__ inline double ProductOfRow(const Member& member, const ProductVectors& v, int engine, int side, int64_t q,
                                      int64_t i, int k, double step) {
  const Job& job = member.job;
  const double total = -v.extra(side)[i] * (v.potential(side, q)[i] + v.shift(side, q)[i]) / job.solver.epsilon;
  const double mass = member.mass(MeasureOf(engine, side))[i];
  const double moved = mass > 0 && !IsNegativeDot(job) ? mass * member.ratio(engine, side)[i] * step : 0;
  return total * ApartOf(member, engine, side, i, k) + moved;
}
// To the output; of cosines, to the sphere's.
__device__ inline void StoreProduct(const Member& member, int side, int64_t q, int64_t i, int k, double value) {
  const Job& job = member.job;
  const int64_t at = (q * job.size[side] + i) * job.dim + k;
  if (IsCosine(job)) {
    SphereProducts(member, side)[at] = value;
    return;
  }
  StoreOutput(ProductOf(job, side), member.index * job.in.hessian.count * job.size[side] * job.dim + at, value);
}

// Whether all directions of a member are.
__device__ inline bool AreDone(const Member& member) {
  for (int e = 0; e < member.job.engines; ++e) {
    const ProductVectors v = VectorsOf(member, e);
    for (int64_t q = 0; q < v.count; ++q) {
      if (v.states[q].phase != Phase::kDone) return false;
    }
  }
  return true;
}

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_HESSIAN_CUH_
