// Passes over the plan at the final potentials: the plan itself, <C, P>, and, where Hopper's own kernels do not
// (transport_exact_apply.cu, transport_gradient.cu and those beside it), P V and P^T U, gradients and projections of
// points. Gradients of |x - y|: transport_directions.cu.
//
// A block has kTile rows and one chunk of up to kTile columns of the right-hand sides (points of the other side, V or
// U; cosines: what is projected are the points as they were given); it makes the plan's tiles anew. The first chunk's
// block also stores the plan and adds up P z. Where the plan alone is stored, a block has some of its columns.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_plan.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

struct Wanted {
  bool plan, linear;
  RightsWanted rights;
};
__host__ __device__ Wanted WantedOf(const Job& job, int side) {
  const Outputs& out = job.out;
  Wanted w;
  w.plan = side == 0 && (out.plan.data != nullptr || out.gradient_cost.data != nullptr);
  w.linear = side == 0 && out.value_linear != nullptr && !HasWholeCosts(job);
  w.rights = MultipliesDoubles(job) ? RightsWanted() : RightsOf(job, side);
  return w;
}
// Chunks of right-hand sides, or parts of the plan.
struct Chunks {
  RightChunks rights;
  int all;
  bool are_parts;
};
__host__ __device__ Chunks ChunksOf(const Job& job, int side) {
  const Wanted w = WantedOf(job, side);
  Chunks chunks = {RightChunksOf(job, side, w.rights, kTile), 0, false};
  chunks.all = chunks.rights.all;
  if (chunks.all > 0 || !(w.plan || w.linear)) return chunks;
  chunks.are_parts = !w.linear;
  chunks.all = chunks.are_parts ? OutputSplits(job) : 1;
  return chunks;
}

template <typename T>
struct ProductMemory {
  T plan[kTile][kTile + 1];   // [column][row]
  T right[kTile][kTile + 1];  // [column][right-hand side]
};

// The plan's rows against one right-hand side.
template <typename T>
struct RowProducts {
  T product[4][4];  // Rows 4 row_lane + r, right-hand columns 4 col_lane + k.
  T sums[4];        // Of this thread's part of the rows.
  double linear;    // sum P z likewise
};

template <Source kSource, int kMode>
__device__ void MultiplyPlan(const TileContext& c, int row0, const SplitTiles& tiles, const Wanted& w, bool multiply,
                             const RightSide& right, RowProducts<DensityOf<kMode>>* out) {
  using TE = ExponentOf<kMode>;
  using T = DensityOf<kMode>;
  __shared__ TileMemory<kSource == Source::kCosts, kMode> memory;
  auto* products = reinterpret_cast<ProductMemory<T>*>(DynamicShared());
  __shared__ TE terms[2][kTile];  // Rows, columns.
  if (threadIdx.x < kTile) terms[0][threadIdx.x] = PlanTerm<TE>(c, c.side, row0 + threadIdx.x);
  for (int r = 0; r < 4; ++r) {
    out->sums[r] = 0;
    for (int k = 0; k < 4; ++k) out->product[r][k] = 0;
  }
  out->linear = 0;
  for (int col0 = tiles.first * kTile; col0 < tiles.last * kTile; col0 += kTile) {
    // 1. The plan's tile.
    __syncthreads();  // The tile before has been read.
    if (threadIdx.x < kTile) terms[1][threadIdx.x] = PlanTerm<TE>(c, 1 - c.side, col0 + threadIdx.x);
    __syncthreads();
    TE z[4][4];
    MakeTileOf<kSource, kMode>(c, row0, col0, &memory, z);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int i = row0 + 4 * c.row_lane + r;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int j = col0 + 4 * c.col_lane + k;
        const T p = PlanEntry<T>(z[r][k], terms[0][4 * c.row_lane + r], terms[1][4 * c.col_lane + k]);
        if (w.plan && i < c.rows && j < c.columns) {
          const int64_t at = (c.member * c.rows + i) * c.columns + j;
          if (c.job->out.plan.data != nullptr) StoreOutput(c.job->out.plan, at, p);
          if (c.job->out.gradient_cost.data != nullptr) StoreOutput(c.job->out.gradient_cost, at, p);
        }
        if (w.linear) out->linear += static_cast<double>(p) * z[r][k];
        out->sums[r] += p;
        if (multiply) products->plan[4 * c.col_lane + k][4 * c.row_lane + r] = p;
      }
    }
    if (!multiply) continue;
    // 2. Times the right-hand sides.
    for (int e = threadIdx.x; e < kTile * kTile; e += kThreads) {
      const int j = e / kTile, k = e % kTile;
      products->right[j][k] = col0 + j < c.columns ? right.At<T>(col0 + j, k) : T(0);
    }
    __syncthreads();
    for (int j = 0; j < kTile; ++j) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          out->product[r][k] += products->plan[j][4 * c.row_lane + r] * products->right[j][4 * c.col_lane + k];
        }
      }
    }
  }
}

// Masses of the block's rows, from the parts that the threads have.
template <typename T>
__device__ void SumRows(const TileContext& c, const T (&sums)[4], double (&mass)[4]) {
  __shared__ double parts[16][kTile + 1];
  __syncthreads();
  for (int r = 0; r < 4; ++r) parts[c.col_lane][4 * c.row_lane + r] = sums[r];
  __syncthreads();
  for (int r = 0; r < 4; ++r) {
    mass[r] = 0;
    for (int k = 0; k < 16; ++k) mass[r] += parts[k][4 * c.row_lane + r];
  }
}

template <Source kSource, int kMode>
__global__ void __launch_bounds__(kThreads, kMode == kDouble ? 1 : 2) ApplyKernel(LaunchTable table, int side) {
  using T = DensityOf<kMode>;
  // 1. Which rows and right-hand sides.
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const Chunks chunks = ChunksOf(job, side);
  const int blocks = RowBlocks(job, 0, side), chunk = static_cast<int>(work.block % chunks.all);
  const int block = static_cast<int>(work.block / chunks.all % blocks);
  const Member member{job, work.block / chunks.all / blocks};
  if (member.state(0)->mode != kMode || !IsSolved(member)) return;
  const int row0 = block * kTile;
  Wanted w = WantedOf(job, side);
  if (chunk > 0 && !chunks.are_parts) w.plan = w.linear = false;
  const bool multiply = chunks.rights.all > 0;
  RightSide right;
  right.Begin(job, side, chunks.rights, chunk, kTile);

  // 2. Gradients of debiased problems have a second term.
  double gradient[4][4] = {};
  const bool is_gradient = right.what == Right::kPoints && WantsGradient(job, side);
  const int terms = multiply && is_gradient && job.engines > 1 ? 2 : 1;
  for (int t = 0; t < terms; ++t) {
    const PlanSide plan = PlanSide::Term(side, t);
    const TileContext c =
        MakeTileContext(job, member.index, plan.engine, plan.side, member.state(plan.engine)->epsilon);
    right.Find(member, side, plan.other);
    RowProducts<T> rows;
    if (t > 0) w.plan = w.linear = false;
    const int all_tiles = static_cast<int>(CeilDiv(c.columns, kTile));
    const SplitTiles tiles = chunks.are_parts ? TilesOfSplit(job, chunk) : SplitTiles{0, all_tiles};
    MultiplyPlan<kSource, kMode>(c, row0, tiles, w, multiply, right, &rows);

    // 3. Store.
    double mass[4];
    SumRows(c, rows.sums, mass);
    if (t == 0 && w.linear) {
      __shared__ double scratch[kMostWarps];
      const double linear = BlockSum(rows.linear, scratch);
      if (threadIdx.x == 0) member.At<double>(job.at.linear_value)[block] = linear;
    }
    if (!multiply) continue;
    for (int r = 0; r < 4; ++r) {
      const int64_t i = row0 + 4 * c.row_lane + r;
      for (int q = 0; q < 4; ++q) {
        const int k = 4 * c.col_lane + q;
        if (i >= c.rows || right.first + k >= right.width) continue;
        StoreProduct(member, side, right, t, terms, i, k, mass[r], rows.product[r][q], &gradient[r][q]);
      }
    }
  }
}

template <Source kSource>
void Launch(const LaunchTable& table, int64_t blocks, Mode mode, int side, cudaStream_t stream) {
  constexpr size_t kFloatBytes = sizeof(ProductMemory<float>), kDoubleBytes = sizeof(ProductMemory<double>);
  switch (mode) {
    case kFloat:
      return LaunchKernel(ApplyKernel<kSource, kFloat>, blocks, kThreads, kFloatBytes, stream, table, side);
    case kMixed:
      return LaunchKernel(ApplyKernel<kSource, kMixed>, blocks, kThreads, kFloatBytes, stream, table, side);
    case kDouble:
      return LaunchKernel(ApplyKernel<kSource, kDouble>, blocks, kThreads, kDoubleBytes, stream, table, side);
  }
}

}  // namespace

int64_t ApplyBlocks(const Job& job, int side) { return int64_t{1} * RowBlocks(job, 0, side) * ChunksOf(job, side).all; }

void LaunchApply(const LaunchTable& table, int64_t blocks, Source source, Mode mode, int side, cudaStream_t stream) {
  switch (source) {
    case Source::kProducts:
      return Launch<Source::kProducts>(table, blocks, mode, side, stream);
    case Source::kDistances:
      return Launch<Source::kDistances>(table, blocks, mode, side, stream);
    case Source::kCosts:
      return Launch<Source::kCosts>(table, blocks, mode, side, stream);
    case Source::kExact:
      return;  // On the chip alone.
  }
}

}  // namespace cuda
}  // namespace sinkhorn
