// Half steps f_i = -epsilon LSE_j[log b_j + (g_j - C_ij) / epsilon] and the sums of the plan, for every problem and
// every arithmetic: tiles of exponents under a running maximum.
//
// A block has kTile rows of one engine and a part of its columns.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_rows.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

// log2 sum over this block's columns for row threadIdx.x < kTile.
template <Source kSource, int kMode>
__device__ double SumTiles(const TileContext& c, const PassView& view, int row0, int first_tile, int last_tile) {
  using TE = ExponentOf<kMode>;
  using T = DensityOf<kMode>;
  __shared__ TileMemory<kSource == Source::kCosts, kMode> memory;
  __shared__ TE terms[kTile];
  __shared__ TE maxima[16][kTile + 1];
  __shared__ T sums[16][kTile + 1];
  const double* phi = view.phi[1 - c.side];
  const double* log_weight = view.log_weight[1 - c.side];
  const double reference = phi[0];
  LogSum<TE, T> rows[4];
  for (auto& row : rows) row = LogSum<TE, T>::OfNothing();
  for (int tile = first_tile; tile < last_tile; ++tile) {
    const int col0 = tile * kTile;
    __syncthreads();  // The terms before have been read.
    if (threadIdx.x < kTile) {
      const int j = col0 + threadIdx.x;
      terms[threadIdx.x] = static_cast<TE>(j < c.columns ? Term(phi, log_weight, reference, c.scale, j) : kVoid);
    }
    __syncthreads();
    TE z[4][4];
    MakeTileOf<kSource, kMode>(c, row0, col0, &memory, z);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int k = 0; k < 4; ++k) z[r][k] += terms[4 * c.col_lane + k];
      rows[r].Add(z[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    maxima[c.col_lane][4 * c.row_lane + r] = rows[r].max;
    sums[c.col_lane][4 * c.row_lane + r] = rows[r].sum;
  }
  __syncthreads();
  if (threadIdx.x >= kTile) return 0;
  double max = kVoid, sum = 0;
  for (int k = 0; k < 16; ++k) max = fmax(max, static_cast<double>(maxima[k][threadIdx.x]));
  for (int k = 0; k < 16; ++k) sum += sums[k][threadIdx.x] * exp2(maxima[k][threadIdx.x] - max);
  return max + log2(sum) + reference * c.scale;
}

template <Source kSource, int kMode>
__global__ void __launch_bounds__(kThreads, 2) HalfStepKernel(LaunchTable table, int side, Pass pass, int step) {
  // 1. Whose rows.
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int engines = pass == Pass::kBound ? 1 : PassEngines(job, side);
  const RowBlock b = FindRowBlock(job, work.block, side, engines, Geometry::kPlain);
  const Member member{job, b.member};
  const EngineState* state = member.state(b.engine);
  if (pass != Pass::kBound && state->mode != kMode) return;
  if (IsIdle(job, *state, pass)) return;
  if (IsKnown(job, side, pass)) return FinishKnown(member, b, side, Geometry::kPlain);
  // 2. Their sums over this block's columns, then what follows.
  const TileContext c = MakeTileContext(job, b.member, b.engine, side, state->epsilon);
  const int tiles = static_cast<int>(CeilDiv(c.columns, kTile)), row0 = b.block * kTile;
  const double lse = SumTiles<kSource, kMode>(c, ViewOf(member, b.engine, side, pass, state->parity), row0,
                                              static_cast<int>(int64_t{tiles} * b.split / b.splits),
                                              static_cast<int>(int64_t{tiles} * (b.split + 1) / b.splits));
  FinishRows(member, b, side, pass, step, lse, 0, c.scale, Geometry::kPlain);
}

template <Source kSource>
void Launch(const LaunchTable& table, int64_t blocks, Mode mode, int side, Pass pass, int step, cudaStream_t stream) {
  const auto launch = [&](void (*kernel)(LaunchTable, int, Pass, int)) {
    LaunchKernel(kernel, blocks, kThreads, 0, stream, table, side, pass, step);
  };
  switch (mode) {
    case kFloat:  // Products: transport_cloud.cu.
      if constexpr (kSource != Source::kProducts) launch(HalfStepKernel<kSource, kFloat>);
      return;
    case kMixed:
      return launch(HalfStepKernel<kSource, kMixed>);
    case kDouble:
      return launch(HalfStepKernel<kSource, kDouble>);
  }
}

}  // namespace

void LaunchHalfStep(const LaunchTable& table, int64_t blocks, Source source, Mode mode, int side, Pass pass, int step,
                    cudaStream_t stream) {
  switch (source) {
    case Source::kProducts:
      return Launch<Source::kProducts>(table, blocks, mode, side, pass, step, stream);
    case Source::kDistances:
      return Launch<Source::kDistances>(table, blocks, mode, side, pass, step, stream);
    case Source::kCosts:
      return Launch<Source::kCosts>(table, blocks, mode, side, pass, step, stream);
    case Source::kExact:
      return;  // On the chip alone.
  }
}

}  // namespace cuda
}  // namespace sinkhorn
