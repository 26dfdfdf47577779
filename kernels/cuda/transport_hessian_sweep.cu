// Sweeps of Hessian-vector products by plain tiles: the plan times a vector for each direction, where exponents are
// doubles. transport_hessian_cloud.cu has those of float32, transport_hessian_exact.cu Hopper's own.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_hessian_sweep.cuh"
#include "kernels/cuda/transport_launch.h"

namespace sinkhorn {
namespace cuda {
namespace {

template <int kMode, int kTogether>
__global__ void __launch_bounds__(kThreads) SweepKernel(LaunchTable table, int side) {
  using TE = ExponentOf<kMode>;
  using T = DensityOf<kMode>;
  __shared__ TileMemory<false, kMode> memory;
  __shared__ TE terms[2][kTile];  // Rows, columns.
  __shared__ double columns[kTogether][kTile], sums_of_rows[kTogether][kTile];
  // 1. Which rows, and what to multiply.
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const SweepBlock b = FindSweepBlock(job, work.block, side, Geometry::kPlain);
  const int engine = b.rows.engine;
  const Member member{job, b.rows.member};
  const EngineState* state = member.state(engine);
  if (state->mode != kMode) return;
  const ProductVectors v = VectorsOf(member, engine);
  const double* sources[kTogether];
  if (!SourcesOf(v, b.group, side, sources)) return;
  const TileContext c = MakeTileContext(job, member.index, engine, side, state->epsilon);
  const int row0 = b.rows.block * kTile;
  const double reference = member.phi(engine, state->parity, 1 - side)[0];
  const auto term = [&](int s, int i, int count) {
    return static_cast<TE>(i < count ? Term(member.phi(engine, state->parity, s), member.log_mass(MeasureOf(engine, s)),
                                            s == side ? -reference : reference, c.scale, i)
                                     : kVoid);
  };
  if (threadIdx.x < kTile) terms[0][threadIdx.x] = term(side, row0 + threadIdx.x, c.rows);

  // 2. Tiles of columns.
  double sums[kTogether][4] = {};
  const int64_t tiles = CeilDiv(c.columns, kTile);
  const int last = static_cast<int>(tiles * (b.rows.split + 1) / b.rows.splits);
  for (int t = static_cast<int>(tiles * b.rows.split / b.rows.splits); t < last; ++t) {
    const int col0 = t * kTile, lane = threadIdx.x % kTile, q = threadIdx.x / kTile;
    static_assert(kThreads >= kTogether * kTile, "a thread loads one column's number for one direction");
    __syncthreads();  // The columns before have been read.
    if (q == 0) terms[1][lane] = term(1 - side, col0 + lane, c.columns);
    if (q < kTogether) {
      const double* source = sources[q];
      columns[q][lane] = source != nullptr && col0 + lane < c.columns ? source[col0 + lane] : 0;
    }
    TE z[4][4];
    MakeTile<false, kMode>(c, row0, col0, &memory, z);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const TE row_term = terms[0][4 * c.row_lane + r], col_term = terms[1][4 * c.col_lane + k];
        const T p = Exp2(static_cast<T>(z[r][k] + (row_term + col_term)));
#pragma unroll
        for (int direction = 0; direction < kTogether; ++direction) {
          sums[direction][r] += p * columns[direction][4 * c.col_lane + k];
        }
      }
    }
  }

  // 3. Over the 16 threads of a row.
#pragma unroll
  for (int q = 0; q < kTogether; ++q) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      double sum = sums[q][r];
      for (int lane = 8; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
      if (c.col_lane == 0) sums_of_rows[q][4 * c.row_lane + r] = sum;
    }
  }
  __syncthreads();
  double mine[kTogether];
  for (int q = 0; q < kTogether; ++q) mine[q] = sums_of_rows[q][threadIdx.x % kTile];
  FinishSweep(v, b, side, kTile, sources, mine);
}

}  // namespace

int64_t SweepBlocks(const Job& job, Mode mode, int side) {
  const Geometry geometry = SweepGeometry(job, mode);
  int64_t blocks = 0;
  for (int e = 0; e < job.engines; ++e) blocks += EngineBlocks(job, e, side, geometry);
  return SweepGroups(job) * blocks;
}

void LaunchSweep(const LaunchTable& table, int64_t blocks, Mode mode, bool alone, int side, cudaStream_t stream) {
  const auto launch = [&](void (*of_one)(LaunchTable, int), void (*of_some)(LaunchTable, int)) {
    LaunchKernel(alone ? of_one : of_some, blocks, kThreads, 0, stream, table, side);
  };
  mode == kMixed ? launch(SweepKernel<kMixed, 1>, SweepKernel<kMixed, kSweepTogether>)
                 : launch(SweepKernel<kDouble, 1>, SweepKernel<kDouble, kSweepTogether>);
}

}  // namespace cuda
}  // namespace sinkhorn
