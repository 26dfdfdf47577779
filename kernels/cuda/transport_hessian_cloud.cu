// Sweeps of Hessian-vector products between clouds in float32: exponents as in the half steps (transport_cloud.cu), and
// each density at once multiplied with a number of its column for every direction of the block.
//
// A row's densities are divided by their sum, which is known by now: none is above 1, so no maximum is needed.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_cloud.cuh"
#include "kernels/cuda/transport_cloud_stream.cuh"
#include "kernels/cuda/transport_hessian_sweep.cuh"
#include "kernels/cuda/transport_hopper.cuh"
#include "kernels/cuda/transport_launch.h"

namespace sinkhorn {
namespace cuda {
namespace {

// Of tiles' columns: their terms, then a number for each direction.
template <int kTogether>
using ColumnNumbers = float[SlotsOf(kGroups)][1 + kTogether][kCloudTile];

// One column's, on the way.
template <int kTogether>
struct Column {
  ColumnTerm term;
  float source[kTogether];
};
template <int kTogether>
__device__ inline Column<kTogether> LoadColumn(const CloudContext& c, const double* const (&sources)[kTogether],
                                               int j) {
  Column<kTogether> column;
  column.term = c.LoadTerm(j);
#pragma unroll
  for (int q = 0; q < kTogether; ++q) {
    column.source[q] = sources[q] != nullptr && j < c.columns ? static_cast<float>(sources[q][j]) : 0;
  }
  return column;
}

// sum += the tile's densities times the columns' numbers.
template <int kTogether>
__device__ inline void AddTile(const float (&acc)[16][4], float factor,
                               const float (&columns)[1 + kTogether][kCloudTile], const float (&level)[2],
                               float (&sum)[kTogether][2]) {
  const auto pair = [&](int row, int j) {
    return reinterpret_cast<const float2*>(columns[row])[threadIdx.x % 4 + 4 * j];
  };
  float tile[kTogether][2] = {};
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const float2 term = pair(0, j);
    float2 source[kTogether];
#pragma unroll
    for (int q = 0; q < kTogether; ++q) source[q] = pair(1 + q, j);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float p0 = FastExp2(fmaf(acc[j][2 * row], factor, term.x) + level[row]);
      const float p1 = FastExp2(fmaf(acc[j][2 * row + 1], factor, term.y) + level[row]);
#pragma unroll
      for (int q = 0; q < kTogether; ++q) {
        tile[q][row] = fmaf(p1, source[q].y, fmaf(p0, source[q].x, tile[q][row]));
      }
    }
  }
#pragma unroll
  for (int q = 0; q < kTogether; ++q) {
    for (int row = 0; row < 2; ++row) sum[q][row] += tile[q][row];
  }
}

// A thread's two rows over all tiles of the block.
template <int kTogether, typename Columns>
__device__ void MultiplyTiles(const CloudContext& c, const double* const (&sources)[kTogether], const float (&level)[2],
                              ColumnNumbers<kTogether>& numbers, Columns* stream, float (&sum)[kTogether][2]) {
  const int column = threadIdx.x % 128;
  const auto load = [&](int tile) { return LoadColumn(c, sources, tile * kCloudTile + column); };
  const auto store = [&](int slot, const Column<kTogether>& of) {
    numbers[slot][0][column] = c.TermOf(of.term);
#pragma unroll
    for (int q = 0; q < kTogether; ++q) numbers[slot][1 + q][column] = of.source[q];
  };
  constexpr bool kAhead = kTogether == 1 || Columns::kOnePart;  // Where registers allow.
  EachTile<kAhead>(c, stream, load(FirstBrought<Columns>(c)), load, store,
                   [&](float(&acc)[16][4], int slot, int /*tile*/) {
                     AddTile<kTogether>(acc, c.factor, numbers[slot], level, sum);
                   });
}

// What takes a row's densities to a sum of 1, and its sum to that of the plan.
struct Level {
  float rounded;
  double weight;
};
__device__ inline Level LevelOf(const Member& member, const CloudContext& c, int side, int row) {
  const int i = c.first_row + row, engine = c.block.engine;
  const double ratio = i < c.rows ? member.ratio(engine, side)[i] : 0;
  if (!(ratio > 0)) return {static_cast<float>(kVoid), 0};
  const double level = (c.own_phi[i] + c.reference) * c.scale - log2(ratio);
  const float rounded = static_cast<float>(level);
  return {rounded, member.mass(MeasureOf(engine, side))[i] * ratio * exp2(level - rounded)};
}

template <int kPlanes, Parts kParts, int kTogether>
__global__ void __launch_bounds__(kCloudThreads, 1) CloudSweepKernel(LaunchTable table, int side) {
  constexpr int kStages = StagesOf(kPlanes, kParts, kGroups);
  using Columns = Stream<kPlanes, kParts, kGroups>;
  __shared__ CloudContext c;
  __shared__ ProductVectors v;
  __shared__ const double* sources[kTogether];
  __shared__ bool any;
  alignas(16) __shared__ ColumnNumbers<kTogether> numbers;
  __shared__ double sums[kTogether][kCloudRows];
  alignas(8) __shared__ uint64_t full[kStages], empty[kStages];
  // 1. Whose rows, and what to multiply.
  AllowNextKernel();
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const SweepBlock block = FindSweepBlock(job, work.block, side, Geometry::kCloud);
  const Member member{job, block.rows.member};
  const int engine = block.rows.engine;
  if (threadIdx.x == 0) {
    Columns::Init(full, empty);
    FillShape(member, block.rows, side, Pass::kMeasure, &c);
    v = VectorsOf(member, engine);
  }
  AwaitKernelBefore();
  if (member.state(engine)->mode != kFloat) return;
  if (threadIdx.x == 0) {
    FillState(member, &c);
    any = SourcesOf(v, block.group, side, sources);
  }
  __syncthreads();  // The context is there.
  if (!any) return;

  // 2. Levels by which a row's densities add up to 1.
  const int row0 = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;  // This thread's rows: this and 8 more.
  const float level[2] = {LevelOf(member, c, side, row0).rounded, LevelOf(member, c, side, row0 + 8).rounded};

  // 3. Tiles of columns.
  Columns stream(c, full, empty);
  stream.Begin();
  float sum[kTogether][2] = {};
  MultiplyTiles<kTogether>(c, sources, level, numbers, &stream, sum);

  // 4. What becomes of the rows.
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const double weight = LevelOf(member, c, side, row0 + 8 * row).weight;
#pragma unroll
    for (int q = 0; q < kTogether; ++q) {
      double total = sum[q][row];
      for (int lane = 1; lane <= 2; lane *= 2) total += __shfl_xor_sync(0xffffffffu, total, lane);
      if (threadIdx.x % 4 == 0) sums[q][row0 + 8 * row] = weight > 0 ? total * weight : 0;
    }
  }
  __syncthreads();
  double mine[kTogether];
  for (int q = 0; q < kTogether; ++q) mine[q] = sums[q][threadIdx.x % kCloudRows];
  FinishSweep(v, block, side, kCloudRows, sources, mine);
}

template <int kTogether>
void Launch(const LaunchTable& table, int64_t blocks, int planes, int dim, bool hopper, int side, cudaStream_t stream) {
  const auto launch = [&](void (*kernel)(LaunchTable, int)) {
    LaunchStreaming(kernel, blocks, planes, dim, hopper, stream, table, side);
  };
  switch (PartsOf(planes, dim)) {
    case Parts::kOne:
      return launch(planes == 2 ? CloudSweepKernel<2, Parts::kOne, kTogether>
                                : CloudSweepKernel<1, Parts::kOne, kTogether>);
    case Parts::kFew:
      return launch(planes == 2 ? CloudSweepKernel<2, Parts::kFew, kTogether>
                                : CloudSweepKernel<1, Parts::kFew, kTogether>);
    case Parts::kMany:
      return launch(planes == 2 ? CloudSweepKernel<2, Parts::kMany, kTogether>
                                : CloudSweepKernel<1, Parts::kMany, kTogether>);
  }
}

}  // namespace

void LaunchCloudSweep(const LaunchTable& table, int64_t blocks, int planes, int dim, bool alone, bool hopper, int side,
                      cudaStream_t stream) {
  alone ? Launch<1>(table, blocks, planes, dim, hopper, side, stream)
        : Launch<kSweepTogether>(table, blocks, planes, dim, hopper, side, stream);
}

}  // namespace cuda
}  // namespace sinkhorn
