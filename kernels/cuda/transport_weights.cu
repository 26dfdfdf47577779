// Gradients to points of many coordinates whose cost is |x - y| (transport_directions.cu): weights by distance, made
// once for all coordinates and multiplied by the columns' points afterwards, a chunk of rows after the other.
#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_exact_distances.cuh"
#include "kernels/cuda/transport_job.h"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_weights.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

// Debiased problems have a second term.
__host__ __device__ int TermsOf(const Job& job) { return job.engines > 1 ? 2 : 1; }
__host__ __device__ int64_t ItemsOf(const Job& job, int side) {
  return WeighsDirections(job, side) ? RowBlocks(job, 0, side) : 0;
}
WeightShape ShapeOf(const Job& job, int side) {
  const int terms = TermsOf(job), columns = terms > 1 ? std::max(job.size[0], job.size[1]) : job.size[1 - side];
  return {ItemsOf(job, side), DirectionItemBytes(job, side), terms, CeilDiv(columns, kManyColumns), kWeightBytesMost};
}

#if SINKHORN_HOPPER

// Whose rows.
struct ItemWork {
  int64_t member;
  int item, term, part;  // Of the chunk; of a cluster, or of columns.
};

#endif

__global__ void __launch_bounds__(kThreads, 2)
    DirectionWeightsKernel(LaunchTable table, int side, int chunk, int splits) {
#if SINKHORN_HOPPER
  using Tiles = ManyTiles;
  __shared__ Tiles::Memory memory;
  __shared__ Distances<Tiles>::Memory distance_memory;
  __shared__ ExactSides sides;
  __shared__ ExactTerms terms;
  __shared__ ItemWork of;  // And the rest that registers have no room for.
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  if (threadIdx.x == 0) {
    const int64_t items = ItemsOfChunk(job, side, ItemsOf(job, side), chunk), index = work.block / splits;
    of.part = static_cast<int>(work.block % splits);
    of.term = static_cast<int>(index % TermsOf(job));
    of.item = static_cast<int>(index / TermsOf(job) % items);
    of.member = index / TermsOf(job) / items;
  }
  __syncthreads();
  const Member member{job, of.member};
  if (!IsSolved(member)) return;
  const PlanSide plan = PlanSide::Term(side, of.term);
  const EngineState& state = *member.state(plan.engine);
  const double* phi = member.phi(plan.engine, state.parity, plan.side);
  if (threadIdx.x == 0) {
    const double scale = kLog2E / state.epsilon;
    const int block = chunk * job.weight_items[side] + of.item;
    sides = ExactSidesOf(member, plan.engine, plan.side, block, scale);
    sides.factor = DistanceFactor(scale);
    terms = ExactTermsOf(member, plan, scale);
  }
  __syncthreads();
  char* const segment = WeightsOfItem(member, of.item, DirectionItemBytes(job, side)) +
                        (of.term == 0 ? 0 : WeightColumnBytes(job.size[1 - side]));
  Tiles tiles(sides, &memory);
  const Distances<Tiles> distances(member, plan.own, plan.other, sides, terms, phi, &distance_memory);
  const TileRange range = TilesOf<Tiles>(sides.columns, of.part, splits);
  // In units of the first term.
  const float sign = of.term == 0 ? 1 : static_cast<float>(-member.state(0)->epsilon / state.epsilon);
  float before[2] = {};
  distances.EachWeightMended(
      [&](const double(&start)[Tiles::kRows], auto* columns, auto begin, auto use, auto share) {
        tiles.Each(range.first, range.last, start, columns, begin, use, share);
      },
      [](int tile, int column) { return int64_t{tile} * Tiles::kColumns + column; },
      [&](int r, float first, float second, int64_t column) {
        const float even = sign * first, odd = sign * second;
        if (r % 2 == 1) __stcg(WeightsAt<Tiles>(segment, column, r), make_float4(before[0], even, before[1], odd));
        before[0] = even;
        before[1] = odd;
      },
      [&](int r, int64_t column, float weight) {
        float* weights = reinterpret_cast<float*>(WeightsAt<Tiles>(segment, column, r));
        __stcg(weights + column % 2 * 2 + r % 2, sign * weight);
      });
#endif
}

__global__ void __launch_bounds__(kSumThreads, 1)
    DirectionSumsKernel(LaunchTable table, int side, int chunk, int ranks) {
#if SINKHORN_HOPPER
  __shared__ WeightSegments segments;
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const SumWork of = SumWork::Find(job, side, ItemsOf(job, side), chunk, work.block, ranks);
  const Member member{job, of.member};
  if (!IsSolved(member)) return;
  if (threadIdx.x == 0) {
    segments.Begin();
    char* weights = WeightsOfItem(member, of.item, DirectionItemBytes(job, side));
    for (int t = 0; t < TermsOf(job); ++t) {
      const int other = PlanSide::Term(side, t).other;
      weights = segments.Add(weights, member.At<double>(job.at.points64[other]), job.size[other]);
    }
  }
  __syncthreads();
  const int64_t first_row = of.of_all * kTile;
  const double* points = member.At<double>(job.at.points64[side]);
  const double scale = kLog2E / member.state(0)->epsilon;
  AddWeighted<true>(segments, job.dim, of, ranks, job.size[side] - first_row,
                    [&](int row, int k, double value, double weights) {
                      const int64_t i = first_row + row;
                      const double mass = member.mass(side)[i] * scale;
                      StoreGradient(member, side, i, k, mass * (weights * points[i * job.dim + k] - value));
                    });
#endif
}

}  // namespace

int DirectionItems(const Job& job, int side) { return WeightItems(job, ShapeOf(job, side)); }
WeightLaunch DirectionLaunchOf(const Job& job, int side) {
  return WeightLaunchOf(job, side, ShapeOf(job, side), 2 * kProcessors);
}
int64_t DirectionWeightBlocks(const Job& job, int side, int chunk, int splits) {
  return job.count * ItemsOfChunk(job, side, ItemsOf(job, side), chunk) * TermsOf(job) * splits;
}
int64_t DirectionSumBlocks(const Job& job, int side, int chunk, int ranks) {
  return job.count * ItemsOfChunk(job, side, ItemsOf(job, side), chunk) * WeightGroups(job.dim).groups * ranks;
}
void LaunchDirectionWeights(const LaunchTable& table, int64_t blocks, int dim, int splits, int side, int chunk,
                            cudaStream_t stream) {
  LaunchKernel(DirectionWeightsKernel, blocks, kThreads, ManySharedBytes(dim), stream, table, side, chunk, splits);
}
void LaunchDirectionSums(const LaunchTable& table, int64_t blocks, int ranks, int side, int chunk,
                         cudaStream_t stream) {
  LaunchCluster(DirectionSumsKernel, blocks, ranks, kSumThreads, kWeightSharedBytes, stream, table, side, chunk, ranks);
}

}  // namespace cuda
}  // namespace sinkhorn
