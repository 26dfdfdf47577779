// Passes over the plan at the final potentials: the plan itself, <C, P>, P V and P^T U, and, where
// transport_gradient.cu and those beside it do not, gradients and projections of points. Gradients of |x - y|:
// transport_directions.cu.
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
  bool plan, linear, points, given, product;
};
__host__ __device__ Wanted WantedOf(const Job& job, int side, int mode) {
  const Outputs& out = job.out;
  Wanted w;
  w.plan = side == 0 && (out.plan.data != nullptr || out.gradient_cost.data != nullptr);
  w.linear = side == 0 && out.value_linear != nullptr && !HasWholeCosts(job);
  const bool gradient = WantsGradient(job, side) && SourceOf(job) != Source::kDistances;
  const bool projection = ProjectionOf(job, side).data != nullptr;
  w.given = projection && IsCosine(job);
  const bool elsewhere = HasGradientKernel(job, mode) || (mode == kMixed && HasExactGradient(job));
  w.points = (gradient || (projection && !w.given)) && !elsewhere;
  w.product = (side == 0 ? out.plan_v.data : out.plan_transpose_u.data) != nullptr;
  return w;
}
__host__ __device__ int64_t ProductColumns(const Job& job, int side) {
  return side == 0 ? job.in.v_columns : job.in.u_columns;
}
// Chunks of right-hand sides: points first, then points as given; or parts of the plan.
struct Chunks {
  int points, given, all;
  bool are_parts;
};
__host__ __device__ Chunks ChunksOf(const Job& job, int side, int mode) {
  const Wanted w = WantedOf(job, side, mode);
  const int of_dim = static_cast<int>(CeilDiv(job.dim, kTile));
  Chunks chunks = {w.points ? of_dim : 0, w.given ? of_dim : 0, 0, false};
  const int products = w.product ? static_cast<int>(CeilDiv(ProductColumns(job, side), kTile)) : 0;
  chunks.all = chunks.points + chunks.given + products;
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

// A right-hand side: entry [j, k] of points or of V, zero beyond.
template <typename T>
struct RightSide {
  const double* points;  // Or null:
  TensorView view;
  int64_t base;
  int64_t width;    // Of a row.
  int first;        // Column of this chunk.
  bool from_first;  // Seen from its first row.
  __device__ T At(int64_t j, int k) const {
    if (first + k >= width) return 0;
    const int64_t i = j * width + first + k;
    if (points != nullptr) return static_cast<T>(points[i]);
    if (from_first) return static_cast<T>(LoadDouble(view.dtype, view.data, base + i) - FirstRow(k));
    return LoadAs<T>(view.dtype, view.data, base + i);
  }
  __device__ double FirstRow(int k) const { return LoadDouble(view.dtype, view.data, base + first + k); }
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
                             const RightSide<DensityOf<kMode>>& right, RowProducts<DensityOf<kMode>>* out) {
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
      products->right[j][k] = col0 + j < c.columns ? right.At(col0 + j, k) : T(0);
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
__global__ void __launch_bounds__(kThreads) ApplyKernel(LaunchTable table, int side) {
  using T = DensityOf<kMode>;
  // 1. Which rows and right-hand sides.
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const Chunks chunks = ChunksOf(job, side, kMode);
  const int blocks = RowBlocks(job, 0, side), chunk = static_cast<int>(work.block % chunks.all);
  const int block = static_cast<int>(work.block / chunks.all % blocks);
  const Member member{job, work.block / chunks.all / blocks};
  if (member.state(0)->mode != kMode || !IsSolved(member)) return;
  const int row0 = block * kTile;
  Wanted w = WantedOf(job, side, kMode);
  if (chunk > 0 && !chunks.are_parts) w.plan = w.linear = false;
  const bool points = chunk < chunks.points, given = !points && chunk < chunks.points + chunks.given;
  // Whether exponents were kept only the member knows.
  const bool elsewhere = points && IsStreamed(job, *member.state(0)) && HasKeptGradient(job, kMode);
  if (elsewhere && !w.plan && !w.linear) return;
  const bool multiply = !elsewhere && (points || given || w.product);
  RightSide<T> right;
  right.first = (chunk - (points ? 0 : given ? chunks.points : chunks.points + chunks.given)) * kTile;
  right.from_first = given;

  // 2. Gradients of debiased problems have a second term.
  const bool wants_gradient = WantsGradient(job, side) && kSource != Source::kDistances;
  double gradient[4][4] = {};
  const int terms = points && job.engines > 1 && wants_gradient ? 2 : 1;
  for (int t = 0; t < terms; ++t) {
    const int engine = t == 0 ? 0 : 1 + side, pass_side = t == 0 ? side : 0;
    const TileContext c = MakeTileContext(job, member.index, engine, pass_side, member.state(engine)->epsilon);
    const int other = MeasureOf(engine, 1 - pass_side);
    if (points) {
      right.points = member.At<double>(job.at.points64[other]);
      right.width = job.dim;
    } else {
      right.points = nullptr;
      right.view = given ? (side == 0 ? job.in.y : job.in.x) : side == 0 ? job.in.v : job.in.u;
      right.width = given ? job.dim : ProductColumns(job, side);
      right.base = right.view.shared ? 0 : member.index * c.columns * right.width;
    }
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
    const double* centre = member.At<double>(job.at.centre[other]);
    const OutputView& projection = ProjectionOf(job, side);
    const OutputView& product = side == 0 ? job.out.plan_v : job.out.plan_transpose_u;
    for (int r = 0; r < 4; ++r) {
      const int64_t i = row0 + 4 * c.row_lane + r;
      for (int q = 0; q < 4; ++q) {
        const int64_t k = right.first + 4 * c.col_lane + q;
        if (i >= c.rows || k >= right.width) continue;
        const int64_t at = (member.index * c.rows + i) * right.width + k;
        const double value = rows.product[r][q];
        if (given) {
          StoreOutput(projection, at, mass[r] > 0 ? value / mass[r] + right.FirstRow(4 * c.col_lane + q) : 0);
          continue;
        }
        if (!points) {
          StoreOutput(product, at, value);
          continue;
        }
        if (t == 0 && projection.data != nullptr && !w.given) {
          StoreOutput(projection, at, mass[r] > 0 ? value / mass[r] + centre[k] : 0);
        }
        if (!wants_gradient) continue;
        gradient[r][q] += GradientTerm(member, side, t > 0, i, k, mass[r], value);
        if (t + 1 == terms) StoreGradient(member, side, i, k, gradient[r][q]);
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

int64_t ApplyBlocks(const Job& job, Mode mode, int side) {
  return int64_t{1} * RowBlocks(job, 0, side) * ChunksOf(job, side, mode).all;
}

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
