// Gradients to the points and barycentric projections of clouds in float32, on Hopper's matrix units.
//
// A block has kGradientRows rows, up to kAgain parts of kDepth coordinates of the other cloud, and a share of its
// tiles; the blocks of a cluster have the others, and add up their sums in the end. Where a launch leaves processors
// free, those shares are cut further. Where there are more parts, exponents are made anew for each kAgain of them;
// transport_gradient_wide.cu does without. Problems that fill a device by themselves: transport_gradient_even.cu.
#include <type_traits>

#include "kernels/cuda/transport_gradient_sums.cuh"
#include "kernels/cuda/transport_launch.h"

namespace sinkhorn {
namespace cuda {
namespace {

__host__ __device__ inline int PartGroups(const Job& job) {
  return static_cast<int>(CeilDiv(CloudDepths(job.dim), AgainOf(PartsOf(PlanesOf(job), job.dim))));
}

// kColumns: coordinates of a part. kTiles: 1, or kCutTiles where blocks' tiles are cut.
template <int kPlanes, Parts kParts, int kColumns, int kTiles>
__global__ void __launch_bounds__(kThreads, kTiles > 1 ? 1 : PiecesOf(kParts, kColumns))
    GradientKernel(LaunchTable table, Sides sides, int ranks, int cuts) {
#if SINKHORN_HOPPER
  constexpr int kStages = StagesOf(kPlanes, kParts, kGradientGroups), kAgain = AgainOf(kParts);
  __shared__ CloudContext c;
  __shared__ float terms[TermTiles(kParts)][kCloudTile];
  alignas(8) __shared__ uint64_t full[2][kStages], empty[2][kStages];
  using Rows = Sums<kPlanes, kParts, kColumns, kTiles>;
  // 1. Which rows, which coordinates, which tiles.
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const GradientPlace place = PlaceOf(job, work.block, sides, ranks, PartGroups(job));
  const Member member{job, place.member};
  const int side = place.side, rank = place.rank, block = place.block, first_part = place.group * kAgain;
  if (member.state(0)->mode != kFloat || !IsSolved(member)) return;
  const int row0 = block * kGradientRows + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  double mass[2][2] = {};  // [term][row]
  Rows sums = {};

  // 2. Gradients of debiased problems have a second term.
  const int terms_of = job.engines > 1 && WantsGradient(job, side) ? 2 : 1;
#pragma unroll 1
  for (int t = 0; t < terms_of; ++t) {
    const PlanSide plan = PlanSide::Term(side, t);
    __syncthreads();
    if (threadIdx.x == 0) {
      FillShape(member, RowBlock{member.index, plan.engine, block, rank / cuts, ranks / cuts}, plan.side,
                Pass::kMeasure, &c);
      if (kTiles > 1) {
        c.first_tile = min(c.first_tile + rank % cuts * kTiles, c.last_tile);
        c.last_tile = min(c.first_tile + kTiles, c.last_tile);
      }
      FillState(member, &c);
      Rows::Columns::Init(full[t], empty[t]);
    }
    __syncthreads();
    float level[2], weight[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const RowLevel of = LevelOf(member, c, plan.engine, plan.side, row0 + 8 * row);
      t == 0 ? mass[0][row] = of.mass : mass[1][row] = of.mass;
      level[row] = of.level;
      weight[row] = t == 0 ? 1 : static_cast<float>(-of.mass);
    }
    if (t == 1) sums.rows[0].Scale(static_cast<float>(mass[0][0]), static_cast<float>(mass[0][1]));
    typename Rows::Columns stream(c, full[t], empty[t]);
    sums.Add(c, level, weight, first_part, terms, &stream);

    // 3. Store.
    if (t + 1 < terms_of && !ProjectsMeans(job, side)) continue;
    const PointOutputs outputs(member, side);
    const bool moves = outputs.moves && t + 1 == terms_of;
    const int64_t indices[2] = {row0 < c.rows ? row0 : -1, row0 + 8 < c.rows ? row0 + 8 : -1};
    const auto load = [&](int coordinate, double(&apart)[2][2]) {
      if (moves) outputs.LoadApart(indices, first_part * kDepth + coordinate, apart);
    };
    const auto store = [&](int coordinate, const float(&sum)[2][2], const double(&apart)[2][2]) {
      const int k = first_part * kDepth + coordinate;
      outputs.Store(
          t == 0 && outputs.projects, moves, indices, k,
          [&](int row, int which) { return outputs.Mean(k + which, mass[0][row], sum[row][which]); },
          [&](int row, int which) {
            return terms_of == 1 ? outputs.Moved(mass[0][row], sum[row][which], apart[row][which])
                                 : outputs.MovedApart(indices[row], k + which, mass[0][row], mass[1][row],
                                                      sum[row][which], apart[row][which]);
          });
    };
    Rows::Rows::Combine(sums.rows, rank, ranks, cuts, load, store);
  }
#endif
}

}  // namespace

GradientLaunch GradientLaunchOf(const Job& job, int side) {
  if (HasWideGradient(job) || HasEvenGradient(job)) return {Sides::kNone, 1};
  const Parts parts = PartsOf(PlanesOf(job), job.dim);
  return LaunchOfGroups(job, side, PartGroups(job), parts == Parts::kOne ? 12 : parts == Parts::kFew ? 4 : 2);
}

int GradientCuts(const Job& job, const GradientLaunch& launch) {
  if (job.engines > 1 || PartsOf(PlanesOf(job), job.dim) != Parts::kOne) return 1;
  const int64_t tiles = CeilDiv(std::max(job.size[0], job.size[1]), kCloudTile);
  const int64_t wanted = CeilDiv(CeilDiv(tiles, launch.ranks), kCutTiles);
  int cuts = 1;
  while (cuts < wanted) cuts *= 2;
  return launch.ranks * cuts <= kPortableRanks ? cuts : 1;
}

int64_t GradientBlocks(const Job& job, const GradientLaunch& launch) {
  return BlocksOfGroups(job, launch, PartGroups(job));
}

void LaunchGradient(const LaunchTable& table, int64_t blocks, int planes, int dim, const GradientLaunch& of,
                    cudaStream_t stream) {
  const Parts parts = PartsOf(planes, dim);
  const size_t tile = static_cast<size_t>(planes) * kCloudTile * CloudRowBytes(dim);
  const size_t tiles = StreamTiles(planes, parts, CloudDepths(dim), kGradientGroups);
  const int ranks = of.ranks * of.cuts;
  const auto launch = [&](void (*kernel)(LaunchTable, Sides, int, int)) {
    LaunchCluster(kernel, blocks, ranks, kThreads, tiles * tile + kPlaneAlignment, stream, table, of.sides, ranks,
                  of.cuts);
  };
  if (parts == Parts::kFew) {
    return launch(planes == 2 ? GradientKernel<2, Parts::kFew, 64, 1> : GradientKernel<1, Parts::kFew, 64, 1>);
  }
  if (parts == Parts::kMany) {
    return launch(planes == 2 ? GradientKernel<2, Parts::kMany, 64, 1> : GradientKernel<1, Parts::kMany, 64, 1>);
  }
  const auto launch_one = [&](auto columns) {
    constexpr int kColumns = decltype(columns)::value;
    if (of.cuts > 1) {
      return launch(planes == 2 ? GradientKernel<2, Parts::kOne, kColumns, kCutTiles>
                                : GradientKernel<1, Parts::kOne, kColumns, kCutTiles>);
    }
    launch(planes == 2 ? GradientKernel<2, Parts::kOne, kColumns, 1> : GradientKernel<1, Parts::kOne, kColumns, 1>);
  };
  switch (CloudRowBytes(dim)) {
    case 32:
      return launch_one(std::integral_constant<int, 16>());
    case 64:
      return launch_one(std::integral_constant<int, 32>());
    default:
      return launch_one(std::integral_constant<int, 64>());
  }
}

}  // namespace cuda
}  // namespace sinkhorn
