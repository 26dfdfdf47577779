// Exponents that need float64 to memory. To make them anew in every half step, as passes do, takes longer than
// everything else on a chip whose units for float64 are few.
//
// Of a problem on the chip, which makes its densities of them (transport_on_chip_solve.cuh): as they are, once.
// Of larger ones, for sweeps (transport_stream.cu): in the frame of the potentials, z_ij + (phi_i + phi_j) s, which is
// near 0 wherever the plan has mass, so that a float has all its digits. They lose them as potentials move on: by m
// units of epsilon, a density is off by m 4e-8. So frames are renewed now and then.
#include <type_traits>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_exact_tiles.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_tile.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

// Blocks have kTile rows and kTile columns. What MakeTile makes of columns behind the last repeats it.
template <Source kSource>
using ExactMemory = TileMemory<kSource == Source::kCosts, kMixed>;

template <Source kSource>
__global__ void __launch_bounds__(kThreads) ExactKernel(LaunchTable table) {
  __shared__ ExactMemory<kSource> memory;
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const EnginePart part = FindEnginePart<ExactBlocks>(job, AllEngines(job), work.block);
  const int64_t block = part.block;
  const int engine = part.engine;
  const Member member{job, part.member};
  if (member.state(engine)->mode != kMixed) return;
  const TileContext c = MakeTileContext(job, member.index, engine, 0, job.solver.epsilon);
  const int tiles = RowBlocks(job, engine, 1), columns = ExactColumns(job, engine);
  const int row0 = static_cast<int>(block / tiles) * kTile, col0 = static_cast<int>(block % tiles) * kTile;
  double z[4][4];
  MakeTileOf<kSource, kMixed>(c, row0, col0, &memory, z);
  const int j = col0 + 4 * c.col_lane;
  if (j >= columns) return;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int i = row0 + 4 * c.row_lane + r;
    if (i >= c.rows) continue;
    auto* to = reinterpret_cast<double2*>(member.At<double>(job.at.exact[engine]) + int64_t{i} * columns + j);
    to[0] = make_double2(z[r][0], z[r][1]);
    to[1] = make_double2(z[r][2], z[r][3]);
  }
}

// A frame's potentials of a side, from first to last; by a block.
__device__ void CopyFrame(const Member& member, int engine, int side, const double* phi, int first, int last) {
  double* frame = member.At<double>(member.job.at.frame[engine][side]);
  for (int i = first + threadIdx.x; i < last; i += kThreads) frame[i] = phi[i];
}
// And that there is one; by one thread.
__device__ void Frame(const Member& member, EngineState* state) {
  state->kept = kKept;
  *member.At<double>(member.job.at.stream_reference) = 0;
}

template <Source kSource>
__global__ void __launch_bounds__(kThreads) FrameKernel(LaunchTable table, bool first) {
  __shared__ ExactMemory<kSource> memory;
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const EnginePart part = FindEnginePart<FrameBlocks>(job, AllEngines(job), work.block);
  const int64_t block = part.block;
  const int engine = part.engine;
  const Member member{job, part.member};
  EngineState* state = member.state(engine);
  if (state->mode != kMixed || (state->stopped && !first)) return;
  const TileContext c = MakeTileContext(job, member.index, engine, 0, state->epsilon);
  const int columns = StreamColumns(job, engine), tiles = static_cast<int>(CeilDiv(columns, kTile));
  const int row0 = static_cast<int>(block / tiles) * kTile, col0 = static_cast<int>(block % tiles) * kTile;
  const double* row_phi = member.phi(engine, state->parity, 0);
  const double* column_phi = member.phi(engine, state->parity, 1);
  // 1. The frame, by the first blocks.
  if (col0 == 0) CopyFrame(member, engine, 0, row_phi, row0, min(row0 + kTile, c.rows));
  if (row0 == 0) CopyFrame(member, engine, 1, column_phi, col0, min(col0 + kTile, c.columns));
  if (block == 0 && threadIdx.x == 0) Frame(member, state);
  // 2. Exponents in it.
  double z[4][4];
  MakeTileOf<kSource, kMixed>(c, row0, col0, &memory, z);
  const int first_column = col0 + 4 * c.col_lane;
  if (first_column >= columns) return;
  double phi[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) phi[k] = column_phi[min(first_column + k, c.columns - 1)];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int row = row0 + 4 * c.row_lane + r;
    if (row >= c.rows) continue;
    float e[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) e[k] = static_cast<float>(fma(row_phi[row] + phi[k], c.scale, z[r][k]));
    float* to = member.At<float>(job.at.exponents[engine]) + int64_t{row} * columns + first_column;
    *reinterpret_cast<float4*>(to) = make_float4(e[0], e[1], e[2], e[3]);
  }
}

// The same of products of clouds: blocks have kTile rows and a part of the columns.
template <bool kFew>
__global__ void __launch_bounds__(kThreads, 2) FrameTilesKernel(LaunchTable table, bool first) {
#if SINKHORN_HOPPER
  using Tiles = std::conditional_t<kFew, FewTiles, ManyTiles>;
  __shared__ typename Tiles::Memory memory;
  __shared__ ExactSides sides;
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const EnginePart part = FindEnginePart<FrameBlocks>(job, AllEngines(job), work.block);
  const int engine = part.engine, splits = Splits(job, engine, 0, Geometry::kExact);
  const int block = static_cast<int>(part.block / splits), split = static_cast<int>(part.block % splits);
  const Member member{job, part.member};
  EngineState* state = member.state(engine);
  if (state->mode != kMixed || (state->stopped && !first)) return;
  const double scale = kLog2E / state->epsilon;
  const int columns = StreamColumns(job, engine);
  if (threadIdx.x == 0) {
    sides = ExactSidesOf(member, engine, 0, block, scale);
    sides.wanted = columns;
  }
  __syncthreads();
  const double* row_phi = member.phi(engine, state->parity, 0);
  const double* column_phi = member.phi(engine, state->parity, 1);
  const TileRange range = TilesOf<Tiles>(sides.columns, split, splits);
  // 1. The frame, by the first blocks.
  if (split == 0) CopyFrame(member, engine, 0, row_phi, sides.first_row, min(sides.first_row + kTile, sides.rows));
  if (block == 0) {
    const int end = min(range.last * Tiles::kColumns, sides.columns);
    CopyFrame(member, engine, 1, column_phi, range.first * Tiles::kColumns, end);
  }
  if (part.block == 0 && threadIdx.x == 0) Frame(member, state);
  // 2. Exponents in it.
  Tiles tiles(sides, &memory);
  double start[Tiles::kRows];
#pragma unroll
  for (int r = 0; r < Tiles::kRows; ++r) {
    start[r] = row_phi[min(sides.first_row + Tiles::Row(r), sides.rows - 1)] * scale;
  }
  float* exponents = member.At<float>(job.at.exponents[engine]);
  const auto term = [&](int j) { return column_phi[min(j, sides.columns - 1)] * scale; };
  TermsAlone terms(term);
  tiles.Each(
      range.first, range.last, start, &terms, [](int tile, int, int column) { return tile * Tiles::kColumns + column; },
      [&](int r, double z0, double z1, int j) {
        const int64_t i = sides.first_row + Tiles::Row(r);
        if (i >= sides.rows || j >= columns) return;
        const float2 both = make_float2(static_cast<float>(z0), static_cast<float>(z1));
        *reinterpret_cast<float2*>(exponents + i * columns + j) = both;
      });
#endif
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

void LaunchFrames(const LaunchTable& table, int64_t blocks, Source source, int dim, bool first, cudaStream_t stream) {
  const auto launch = [&](void (*kernel)(LaunchTable, bool), size_t smem_bytes = 0) {
    LaunchKernel(kernel, blocks, kThreads, smem_bytes, stream, table, first);
  };
  switch (source) {
    case Source::kProducts:
      return dim <= kFewDims ? launch(FrameTilesKernel<true>) : launch(FrameTilesKernel<false>, ManySharedBytes(dim));
    case Source::kDistances:
      return launch(FrameKernel<Source::kDistances>);
    case Source::kCosts:
      return launch(FrameKernel<Source::kCosts>);
    case Source::kExact:
      return;
  }
}

}  // namespace cuda
}  // namespace sinkhorn
