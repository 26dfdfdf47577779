// Exponents in float64 to memory, from where a problem on the chip makes its densities (transport_on_chip_solve.cuh).
//
// To make them anew in every half step, as passes do, takes longer than everything else on a chip whose units for
// float64 are few; here that is done once.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_tile.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

// A block has kTile rows and kTile columns. Columns behind the last repeat it.
template <Source kSource>
__global__ void __launch_bounds__(kThreads) ExactKernel(LaunchTable table) {
  __shared__ TileMemory<kSource == Source::kCosts, kMixed> memory;
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int64_t blocks = ExactBlocks(job), block = work.block % blocks;
  const Member member{job, work.block / blocks};
  const EngineState& state = *member.state(0);
  if (state.mode != kMixed) return;
  const TileContext c = MakeTileContext(job, member.index, 0, 0, state.epsilon);
  const int tiles = RowBlocks(job, 0, 1), columns = ExactColumns(job);
  const int row0 = static_cast<int>(block / tiles) * kTile, col0 = static_cast<int>(block % tiles) * kTile;
  double z[4][4];
  MakeTileOf<kSource, kMixed>(c, row0, col0, &memory, z);
  const int j = col0 + 4 * c.col_lane;
  if (j >= columns) return;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int i = row0 + 4 * c.row_lane + r;
    if (i >= c.rows) continue;
    auto* to = reinterpret_cast<double2*>(member.At<double>(job.at.exact) + int64_t{i} * columns + j);
    to[0] = make_double2(z[r][0], z[r][1]);
    to[1] = make_double2(z[r][2], z[r][3]);
  }
}

}  // namespace

void LaunchExact(const LaunchTable& table, int64_t blocks, Source source, cudaStream_t stream) {
  switch (source) {
    case Source::kProducts:
      return LaunchKernel(ExactKernel<Source::kProducts>, blocks, kThreads, 0, stream, table);
    case Source::kDistances:
      return LaunchKernel(ExactKernel<Source::kDistances>, blocks, kThreads, 0, stream, table);
    case Source::kCosts:
      return LaunchKernel(ExactKernel<Source::kCosts>, blocks, kThreads, 0, stream, table);
    case Source::kExact:
      return;  // No job's own.
  }
}

}  // namespace cuda
}  // namespace sinkhorn
