// Half steps between clouds whose exponents need float64 (kMixed), by its matrix units (Hopper).
//
// As in float32 (transport_cloud_step.cuh) a row's potential before tells about how large its sum will be, and that is
// taken off the exponents. What is left is small, if it counts at all, so that it is fixed point from there on, which
// costs no conversion of doubles. Where nothing is known the largest exponent of the first tile is taken off, and a bit
// more, since others may be larger; where sums have left a safe range, that of all tiles, which a pass over
// whole-numbered exponents finds.
#include <type_traits>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_exact_tiles.cuh"
#include "kernels/cuda/transport_launch.h"

namespace sinkhorn {
namespace cuda {
namespace {

#if SINKHORN_HOPPER

// Powers of two that other exponents may be above those of the first tile, but for what a sum has room for.
constexpr float kMore = 56;

// What row threadIdx.x's log2 sum would be if its potential stayed, as a whole number.
__device__ float ExpectedLevel(const Member& member, int engine, int side, const ExactSides& sides,
                               const ExactTerms& of) {
  const EngineState& state = *member.state(engine);
  const int i = min(sides.first_row + static_cast<int>(threadIdx.x), sides.rows - 1);
  const double rho = RhoOf(member.job, engine, side), phi = member.phi(engine, state.parity, side)[i];
  const double shift = isinf(rho) ? 0 : member.Shift(engine, side, i);
  const double half_step = isinf(rho) ? phi : (phi + shift) * (1 + state.epsilon / rho) - shift;
  return static_cast<float>(rint(-(half_step + of.reference) * of.scale));
}

// Each row's largest exponent, as a whole number, and `more`, to `levels`. `scratch`: [kGroups][kTile].
template <typename Tiles>
__device__ void FindLevels(Tiles* tiles, const ExactTerms& of, const TileRange& range, float more,
                           float (*scratch)[kTile], float* levels) {
  double start[Tiles::kRows];
  int largest[Tiles::kRows];
#pragma unroll
  for (int r = 0; r < Tiles::kRows; ++r) {
    start[r] = kWholeStart;
    largest[r] = INT32_MIN;
  }
  TermsAlone terms(of);
  tiles->Each(range.first, range.last, start, &terms, BeginNothing(), [&](int r, double first, double second, Nothing) {
    largest[r] = max(largest[r], max(__double2loint(first), __double2loint(second)));
  });
#pragma unroll
  for (int r = 0; r < Tiles::kRows; ++r) {
    for (int lane = 1; lane <= 2; lane *= 2)
      largest[r] = max(largest[r], __shfl_xor_sync(0xffffffffu, largest[r], lane));
    if (threadIdx.x % 4 == 0) scratch[Tiles::Group()][Tiles::Row(r)] = static_cast<float>(largest[r]);
  }
  __syncthreads();
  if (threadIdx.x < kTile) {
    float level = scratch[0][threadIdx.x];
    for (int group = 1; group < Tiles::kGroups; ++group) level = fmaxf(level, scratch[group][threadIdx.x]);
    levels[threadIdx.x] = level + more;
  }
  __syncthreads();
}

// Row threadIdx.x's sum, times 2^-level; `safe`: whether nothing was too large for that.
template <typename Tiles>
__device__ float SumRows(Tiles* tiles, const ExactTerms& of, const TileRange& range, const float* levels,
                         float (*scratch)[kTile], bool* safe) {
  double start[Tiles::kRows];
  float sums[Tiles::kRows];
#pragma unroll
  for (int r = 0; r < Tiles::kRows; ++r) {
    start[r] = FixedPoint::kStart - levels[Tiles::Row(r)];
    sums[r] = 0;
  }
  FixedPoint fixed;
  TermsAlone terms(of);
  tiles->Each(range.first, range.last, start, &terms, BeginNothing(), [&](int r, double first, double second, Nothing) {
    sums[r] += fixed.Density(first);
    sums[r] += fixed.Density(second);
  });
#pragma unroll
  for (int r = 0; r < Tiles::kRows; ++r) {
    const float sum = SumOfQuad(sums[r]);
    if (threadIdx.x % 4 == 0) scratch[Tiles::Group()][Tiles::Row(r)] = sum;
  }
  *safe = __syncthreads_and(fixed.IsSafe()) != 0;
  float sum = 0;
  for (int group = 0; group < Tiles::kGroups && threadIdx.x < kTile; ++group) sum += scratch[group][threadIdx.x];
  __syncthreads();
  return sum;
}

#endif

template <bool kFew>
__global__ void __launch_bounds__(kThreads, 2) ExactStepKernel(LaunchTable table, int side, Pass pass) {
#if SINKHORN_HOPPER
  using Tiles = std::conditional_t<kFew, FewTiles, ManyTiles>;
  __shared__ typename Tiles::Memory memory;
  __shared__ float scratch[Tiles::kGroups][kTile], levels[kTile];
  __shared__ RowBlock b;  // And the rest that registers have no room for.
  __shared__ ExactSides sides;
  __shared__ ExactTerms terms;
  // 1. Whose rows.
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  if (threadIdx.x == 0) b = FindRowBlock(job, work.block, side, PassEngines(job, side), Geometry::kExact);
  __syncthreads();
  const Member member{job, b.member};
  const EngineState* state = member.state(b.engine);
  if (state->mode != kMixed || IsIdle(job, *state, pass)) return;
  if (IsKnown(job, side, pass)) return FinishKnown(member, b, side, Geometry::kExact);
  if (threadIdx.x == 0) {
    const PassView view = ViewOf(member, b.engine, side, pass, state->parity);
    const double* phi = side == 0 ? view.phi[1] : view.phi[0];
    const double* log_weight = side == 0 ? view.log_weight[1] : view.log_weight[0];
    sides = ExactSidesOf(member, b.engine, side, b.block, kLog2E / state->epsilon);
    terms = {phi, log_weight, phi[0], kLog2E / state->epsilon, sides.columns};
  }
  __syncthreads();
  const TileRange range = TilesOf<Tiles>(sides.columns, b.split, b.splits);
  Tiles tiles(sides, &memory);

  // 2. Sums. Their levels: what is expected of the rows, or by the first tile, or by all.
  const bool is_row = threadIdx.x < kTile;
  bool safe = false;
  float sum = 0;
  for (int trial = state->iterations > 0 && !state->starting ? 0 : 1; trial < 3 && !safe; ++trial) {
    if (trial == 0) {
      if (is_row) levels[threadIdx.x] = ExpectedLevel(member, b.engine, side, sides, terms);
      __syncthreads();
    } else {
      const TileRange seen = {range.first, trial == 1 ? min(range.first + 1, range.last) : range.last};
      FindLevels(&tiles, terms, seen, trial == 1 ? kMore : 0, scratch, levels);
    }
    sum = SumRows(&tiles, terms, range, levels, scratch, &safe);
    safe = __syncthreads_and(safe && (!is_row || (sum > 0x1p-80f && sum < 0x1p+100f))) != 0;
  }
  if (!safe) sum = NAN;

  // 3. What becomes of the rows. Levels of a row's parts may be far apart where their sums are not.
  int exponent = 0;
  const float mantissa = frexpf(sum, &exponent);
  const ScaledSum part = {levels[threadIdx.x % kTile] + static_cast<float>(exponent), mantissa};
  FinishRows(member, b, side, pass, 0, part, terms.reference * terms.scale, terms.scale, Geometry::kExact);
#endif
}

}  // namespace

void LaunchExactStep(const LaunchTable& table, int64_t blocks, int dim, int side, Pass pass, cudaStream_t stream) {
  const auto launch = [&](void (*kernel)(LaunchTable, int, Pass), size_t smem_bytes) {
    LaunchKernel(kernel, blocks, kThreads, smem_bytes, stream, table, side, pass);
  };
  dim <= kFewDims ? launch(ExactStepKernel<true>, 0) : launch(ExactStepKernel<false>, ManySharedBytes(dim));
}

}  // namespace cuda
}  // namespace sinkhorn
