// Half steps between clouds in float32: products of split halves on tensor cores, log-sum-exps on the fly.
//
// A block has kCloudRows rows and streams over tiles of kCloudTile columns (transport_cloud_stream.cuh); each of its
// four warpgroups has 64 rows.
//
// Sums need no maximum: a row's potential before tells about how large its sum will be, and what it tells is taken off
// the exponents; all rows of a block share one such number where theirs are near. Where nothing is known yet, the first
// tile's largest exponent is: of each thread's columns of a row. Where sums have left a safe range, they are kept under
// running maxima.
//
// Before Hopper: the same tiles, one at a time, by mma.sync, whose results lie in registers alike.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_CLOUD_STEP_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_CLOUD_STEP_CUH_

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_cloud.cuh"
#include "kernels/cuda/transport_cloud_stream.cuh"
#include "kernels/cuda/transport_hopper.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_symmetric.cuh"

namespace sinkhorn {
namespace cuda {

// What becomes of products before they are exponents: nothing. transport_cloud_distances.cu has another.
struct ProductCost {
  static constexpr bool kIsProduct = true;  // They are multiplied by the context's factor.
  __device__ ProductCost(const Member&, const CloudContext&) {}
  // What it needs of this thread's column of a tile: loaded, then stored as EachTile says.
  struct Column {};
  __device__ Column Load(const CloudContext&, int /*tile*/) { return {}; }
  __device__ void Store(int /*slot*/, Column) {}
  __device__ void Apply(const CloudContext&, int /*tile*/, int /*slot*/, float (&)[16][4]) {}
};

// What exponents are taken off before they are summed.
enum class Level {
  kShared,    // One number for all rows of the block, which the columns' terms hold already.
  kExpected,  // What a row's sum is expected to be.
  kFirst,     // The largest exponent of a thread's columns of the first tile.
  kLargest,   // The largest exponent of a thread's columns so far.
};
constexpr float kSharedRange = 40;  // Powers of 2 from a shared level to a row's own: half of what is safe.

// A thread's two rows: sums of 2^(exponent - level).
struct Running {
  float level[2], sum[2];

  // `expected`: the levels, throughout, where they are known.
  template <Level kLevel>
  __device__ void Begin(const float (&expected)[2]) {
    for (int row = 0; row < 2; ++row) {
      const bool is_known = kLevel == Level::kShared || kLevel == Level::kExpected;
      level[row] = is_known ? expected[row] : static_cast<float>(kVoid);
      sum[row] = 0;
    }
  }
  // The exponents of one tile. `terms`: the tile's columns'; `first`: it is the first.
  template <Level kLevel>
  __device__ void Add(float (&acc)[16][4], float factor, const float* terms, bool first) {
    if constexpr (kLevel == Level::kFirst) {
      return first ? Add<Level::kLargest>(acc, factor, terms, true) : Add<Level::kExpected>(acc, factor, terms, false);
    }
    const float2* mine = reinterpret_cast<const float2*>(terms) + threadIdx.x % 4;
    if constexpr (kLevel != Level::kLargest) {
      float s[2][2] = {{sum[0], 0}, {sum[1], 0}};
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const float2 term = mine[4 * j];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          float e0 = fmaf(acc[j][2 * row], factor, term.x), e1 = fmaf(acc[j][2 * row + 1], factor, term.y);
          if constexpr (kLevel == Level::kExpected) e0 -= level[row], e1 -= level[row];
          s[row][0] += FastExp2(e0);
          s[row][1] += FastExp2(e1);
        }
      }
      sum[0] = s[0][0] + s[0][1];
      sum[1] = s[1][0] + s[1][1];
    } else {
      float largest[2] = {level[0], level[1]};
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const float2 term = mine[4 * j];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          float &e0 = acc[j][2 * row], &e1 = acc[j][2 * row + 1];
          e0 = fmaf(e0, factor, term.x);
          e1 = fmaf(e1, factor, term.y);
          largest[row] = fmaxf(largest[row], fmaxf(e0, e1));
        }
      }
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float s0 = sum[row] * FastExp2(level[row] - largest[row]), s1 = 0;
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          s0 += FastExp2(acc[j][2 * row] - largest[row]);
          s1 += FastExp2(acc[j][2 * row + 1] - largest[row]);
        }
        sum[row] = s0 + s1;
        level[row] = largest[row];
      }
    }
  }
  // The whole row's sum.
  __device__ ScaledSum Total(int row) const {
    float largest = level[row];
    for (int lane = 1; lane <= 2; lane *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lane));
    float total = sum[row] * FastExp2(level[row] - largest);
    for (int lane = 1; lane <= 2; lane *= 2) total += __shfl_xor_sync(0xffffffffu, total, lane);
    return {largest, total};
  }
  // Of rows whose level was expected; or that of the first tile, which each thread has its own of.
  __device__ bool IsSafe(int row, bool own) const {
    float total = sum[row];
    for (int lane = 1; lane <= 2 && !own; lane *= 2) total += __shfl_xor_sync(0xffffffffu, total, lane);
    return total > 0x1p-80f && total < 0x1p+100f;
  }
};

// What a tile's column adds.
template <typename Cost>
struct StepColumn {
  ColumnTerm term;
  typename Cost::Column of_cost;
};

// A thread's two rows over all tiles of the block. `first`: of its column of the first that it brings something for.
template <Level kLevel, typename Columns, typename Cost>
__device__ void SumTiles(const CloudContext& c, const float (&expected)[2], const ColumnTerm& first,
                         float (&terms)[SlotsOf(kGroups)][kCloudTile], Columns* stream, Cost* cost, Running* running) {
  const int column = threadIdx.x % 128;
  const float factor = Cost::kIsProduct ? c.factor : 1, off = kLevel == Level::kShared ? expected[0] : 0;
  running->Begin<kLevel>(expected);
  const auto load = [&](int tile) {
    return StepColumn<Cost>{c.LoadTerm(tile * kCloudTile + column), cost->Load(c, tile)};
  };
  const auto store = [&](int slot, const StepColumn<Cost>& of) {
    terms[slot][column] = c.TermOf(of.term, off);
    cost->Store(slot, of.of_cost);
  };
  EachTile(c, stream, StepColumn<Cost>{first, cost->Load(c, FirstBrought<Columns>(c))}, load, store,
           [&](float(&acc)[16][4], int slot, int tile) {
             cost->Apply(c, tile, slot, acc);
             running->Add<kLevel>(acc, factor, terms[slot], tile == c.first_tile);
           });
}

template <int kPlanes, Parts kParts, typename Cost>
__global__ void __launch_bounds__(kCloudThreads, 1) CloudStepKernel(LaunchTable table, int side, Pass pass) {
  __shared__ CloudContext c;
  __shared__ float terms[SlotsOf(kGroups)][kCloudTile];
  __shared__ ScaledSum sums[kCloudRows];
  constexpr int kStages = StagesOf(kPlanes, kParts, kGroups);
  using Columns = Stream<kPlanes, kParts, kGroups>;
  alignas(8) __shared__ uint64_t full[kStages], empty[kStages];
  // 1. Whose rows.
  AllowNextKernel();
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const RowBlock block = FindRowBlock(job, work.block, side, PassEngines(job, side), Geometry::kCloud);
  const Member member{job, block.member};
  if (threadIdx.x == 0) {
    Columns::Init(full, empty);
    FillShape(member, block, side, pass, &c);
  }
  __syncthreads();  // The shape is there.
  AwaitKernelBefore();
  const EngineState* state = member.state(block.engine);
  if (state->mode != kFloat || IsIdle(job, *state, pass)) return;
  if (pass == Pass::kIterate && IsApart(job, block.engine, *state)) return;
  if (IsKnown(job, side, pass)) return FinishKnown(member, block, side, Geometry::kCloud);
  // Potentials, all at once: of the block's first row, of this thread's rows (the first and 8 more), of its column.
  const double *phi = c.phi_of[state->parity], *own_phi = c.own_phi_of[state->parity];
  const int row0 = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const double own[3] = {own_phi[c.Row(0)], own_phi[c.Row(row0)], own_phi[c.Row(row0 + 8)]};
  const int column = FirstBrought<Columns>(c) * kCloudTile + threadIdx.x % kCloudTile;
  const ColumnTerm term = c.LoadTerm(phi, column, phi[0]);
  if (threadIdx.x == kCloudThreads - 32) FillState(member, &c);  // A warp that copies nothing.
  Columns stream(c, full, empty);
  stream.Begin();   // Points, which take longer, come after these.
  __syncthreads();  // The context is there.

  // 2. Tiles of columns.
  Cost cost(member, c);
  Running running;
  // Products of more coordinates take longer than their exponentials either way, and leave rows further from what they
  // were.
  constexpr bool kHopes = kParts == Parts::kOne, kFinds = kHopes && Cost::kIsProduct;
  const bool known = kHopes && state->iterations > 0 && !state->starting, hopes = known || kFinds;
  bool safe = hopes;
  float expected[2] = {0, 0};
  if (known) {
    const float first = c.ExpectedLevel(c.Row(0), own[0]), shared[2] = {first, first};
    bool near = true;
    for (int row = 0; row < 2; ++row) {
      expected[row] = c.ExpectedLevel(c.Row(row0 + 8 * row), own[1 + row]);
      near = near && fabsf(expected[row] - first) < kSharedRange;
    }
    if (__syncthreads_and(near) != 0) {
      SumTiles<Level::kShared>(c, shared, term, terms, &stream, &cost, &running);
    } else {
      SumTiles<Level::kExpected>(c, expected, term, terms, &stream, &cost, &running);
    }
  } else if (kFinds) {
    SumTiles<Level::kFirst>(c, expected, term, terms, &stream, &cost, &running);
  }
  for (int row = 0; row < 2 && hopes; ++row) {
    safe = (running.IsSafe(row, !known) || !c.IsRow(row0 + 8 * row)) && safe;
  }
  if (__syncthreads_and(safe) == 0) {
    const float none[2] = {0, 0};
    if (hopes) stream.Begin();
    // Its term once more, for which the registers of the tiles before have no room.
    SumTiles<Level::kLargest>(c, none, c.LoadTerm(column), terms, &stream, &cost, &running);
  }

  // 3. What becomes of the rows.
  for (int row = 0; row < 2; ++row) {
    const ScaledSum total = running.Total(row);
    if (threadIdx.x % 4 == 0) sums[row0 + 8 * row] = total;
  }
  __syncthreads();
  FinishRows(member, c.block, side, pass, 0, sums[threadIdx.x % kCloudRows], c.reference * c.scale, c.scale,
             Geometry::kCloud);
}

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_CLOUD_STEP_CUH_
