// Passes over the plan at the final potentials: the plan itself, <C, P>, P V and P^T U, and, where
// transport_gradient.cu does not, gradients and projections of points.
//
// A block has kTile rows and one chunk of up to kTile columns of the right-hand sides (points of the other side, V or
// U); it makes the plan's tiles anew. The first chunk's block also stores the plan and adds up P z.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_tile.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

struct Wanted {
  bool plan, linear, points, product;
};
__host__ __device__ Wanted WantedOf(const Job& job, int side, int mode) {
  const Outputs& out = job.out;
  Wanted w;
  w.plan = side == 0 && (out.plan.data != nullptr || out.gradient_cost.data != nullptr);
  w.linear = side == 0 && out.value_linear != nullptr;
  w.points = side == 0 ? out.gradient_x.data != nullptr || out.projection_x.data != nullptr
                       : out.gradient_y.data != nullptr || out.projection_y.data != nullptr;
  if (HasGradientKernel(job, mode)) w.points = false;
  w.product = (side == 0 ? out.plan_v.data : out.plan_transpose_u.data) != nullptr;
  return w;
}
__host__ __device__ int64_t ProductColumns(const Job& job, int side) {
  return side == 0 ? job.in.v_columns : job.in.u_columns;
}
// Chunks of right-hand sides: points first.
__host__ __device__ int PointChunksOf(const Job& job, int side, int mode) {
  return WantedOf(job, side, mode).points ? static_cast<int>(CeilDiv(job.dim, kTile)) : 0;
}
__host__ __device__ int ChunksOf(const Job& job, int side, int mode) {
  const Wanted w = WantedOf(job, side, mode);
  const int chunks =
      PointChunksOf(job, side, mode) + (w.product ? static_cast<int>(CeilDiv(ProductColumns(job, side), kTile)) : 0);
  return chunks == 0 && (w.plan || w.linear) ? 1 : chunks;
}

template <typename T>
struct ProductMemory {
  T plan[kTile][kTile + 1];   // [column][row]
  T right[kTile][kTile + 1];  // [column][right-hand side]
};

// 2^x, never infinite: annealing may have been cut short.
__device__ float Saturated(float x) { return Exp2(fminf(x, 127.0f)); }
__device__ double Saturated(double x) { return Exp2(fmin(x, 1000.0)); }

// A right-hand side: entry [j, k] of points or of V, zero beyond.
template <typename T>
struct RightSide {
  const double* points;  // Or null:
  TensorView view;
  int64_t base;
  int64_t width;  // Of a row.
  int first;      // Column of this chunk.
  __device__ T At(int64_t j, int k) const {
    if (first + k >= width) return 0;
    const int64_t i = j * width + first + k;
    return points != nullptr ? static_cast<T>(points[i]) : LoadAs<T>(view.dtype, view.data, base + i);
  }
};

// The plan's rows against one right-hand side.
template <typename T>
struct RowProducts {
  T product[4][4];  // Rows 4 row_lane + r, right-hand columns 4 col_lane + k.
  T sums[4];        // Of this thread's part of the rows.
  double linear;    // sum P z likewise
};

template <bool kDense, int kMode>
__device__ void MultiplyPlan(const TileContext& c, int row0, const Wanted& w, bool multiply,
                             const RightSide<DensityOf<kMode>>& right, RowProducts<DensityOf<kMode>>* out) {
  using TE = ExponentOf<kMode>;
  using T = DensityOf<kMode>;
  __shared__ TileMemory<kDense, kMode> memory;
  auto* products = reinterpret_cast<ProductMemory<T>*>(DynamicShared());
  __shared__ TE terms[2][kTile];  // Rows, columns.
  const Member member{*c.job, c.member};
  const int parity = member.state(c.engine)->parity;
  const double reference = member.phi(c.engine, parity, 1 - c.side)[0];
  const auto term = [&](int side, int i, int count) {
    return static_cast<TE>(i < count
                               ? Term(member.phi(c.engine, parity, side), member.log_mass(MeasureOf(c.engine, side)),
                                      side == c.side ? -reference : reference, c.scale, i)
                               : kVoid);
  };
  if (threadIdx.x < kTile) terms[0][threadIdx.x] = term(c.side, row0 + threadIdx.x, c.rows);
  for (int r = 0; r < 4; ++r) {
    out->sums[r] = 0;
    for (int k = 0; k < 4; ++k) out->product[r][k] = 0;
  }
  out->linear = 0;
  for (int col0 = 0; col0 < c.columns; col0 += kTile) {
    // 1. The plan's tile.
    __syncthreads();  // The tile before has been read.
    if (threadIdx.x < kTile) terms[1][threadIdx.x] = term(1 - c.side, col0 + threadIdx.x, c.columns);
    __syncthreads();
    TE z[4][4];
    MakeTile<kDense, kMode>(c, row0, col0, &memory, z);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int i = row0 + 4 * c.row_lane + r;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int j = col0 + 4 * c.col_lane + k;
        const TE row_term = terms[0][4 * c.row_lane + r], col_term = terms[1][4 * c.col_lane + k];
        const T p = Saturated(static_cast<T>(z[r][k] + (row_term + col_term)));
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

template <bool kDense, int kMode>
__global__ void __launch_bounds__(kThreads) ApplyKernel(LaunchTable table, int side) {
  using T = DensityOf<kMode>;
  // 1. Which rows and right-hand sides.
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int blocks = RowBlocks(job, 0, side), chunks = ChunksOf(job, side, kMode);
  const int chunk = static_cast<int>(work.block % chunks), block = static_cast<int>(work.block / chunks % blocks);
  const Member member{job, work.block / chunks / blocks};
  if (member.state(0)->mode != kMode || !IsSolved(member)) return;
  const int row0 = block * kTile, point_chunks = PointChunksOf(job, side, kMode);
  Wanted w = WantedOf(job, side, kMode);
  if (chunk > 0) w.plan = w.linear = false;
  const bool points = chunk < point_chunks;
  const bool multiply = points || w.product;
  RightSide<T> right;
  right.first = (points ? chunk : chunk - point_chunks) * kTile;

  // 2. Gradients of debiased problems have a second term.
  const OutputView& gradient_out = side == 0 ? job.out.gradient_x : job.out.gradient_y;
  double gradient[4][4] = {};
  const int terms = points && job.engines > 1 && gradient_out.data != nullptr ? 2 : 1;
  for (int t = 0; t < terms; ++t) {
    const int engine = t == 0 ? 0 : 1 + side, pass_side = t == 0 ? side : 0;
    const TileContext c = MakeTileContext(job, member.index, engine, pass_side, member.state(engine)->epsilon);
    const int other = MeasureOf(engine, 1 - pass_side);
    if (points) {
      right.points = member.At<double>(job.at.points64[other]);
      right.width = job.dim;
    } else {
      right.points = nullptr;
      right.view = side == 0 ? job.in.v : job.in.u;
      right.width = ProductColumns(job, side);
      right.base = right.view.shared ? 0 : member.index * c.columns * right.width;
    }
    RowProducts<T> rows;
    if (t > 0) w.plan = w.linear = false;
    MultiplyPlan<kDense, kMode>(c, row0, w, multiply, right, &rows);

    // 3. Store.
    double mass[4];
    SumRows(c, rows.sums, mass);
    if (t == 0 && w.linear) {
      __shared__ double scratch[kMostWarps];
      const double linear = BlockSum(rows.linear, scratch);
      if (threadIdx.x == 0) member.At<double>(job.at.linear_value)[block] = linear;
    }
    if (!multiply) continue;
    const double* mine = member.At<double>(job.at.points64[side]);
    const double* my_centre = member.At<double>(job.at.centre[side]);
    const double* centre = member.At<double>(job.at.centre[other]);
    const OutputView& projection = side == 0 ? job.out.projection_x : job.out.projection_y;
    const OutputView& product = side == 0 ? job.out.plan_v : job.out.plan_transpose_u;
    for (int r = 0; r < 4; ++r) {
      const int64_t i = row0 + 4 * c.row_lane + r;
      for (int q = 0; q < 4; ++q) {
        const int64_t k = right.first + 4 * c.col_lane + q;
        if (i >= c.rows || k >= right.width) continue;
        const int64_t at = (member.index * c.rows + i) * right.width + k;
        const double value = rows.product[r][q];
        if (!points) {
          StoreOutput(product, at, value);
          continue;
        }
        if (t == 0 && projection.data != nullptr) {
          StoreOutput(projection, at, mass[r] > 0 ? value / mass[r] + centre[k] : 0);
        }
        const double x = mine[i * job.dim + k] + (my_centre[k] - centre[k]);
        gradient[r][q] += (t == 0 ? 2 : -2) * job.in.kappa * (mass[r] * x - value);
        if (t + 1 == terms && gradient_out.data != nullptr) StoreOutput(gradient_out, at, gradient[r][q]);
      }
    }
  }
}

template <bool kDense>
void Launch(const LaunchTable& table, int64_t blocks, Mode mode, int side, cudaStream_t stream) {
  constexpr size_t kFloatBytes = sizeof(ProductMemory<float>), kDoubleBytes = sizeof(ProductMemory<double>);
  switch (mode) {
    case kFloat:
      return LaunchKernel(ApplyKernel<kDense, kFloat>, blocks, kThreads, kFloatBytes, stream, table, side);
    case kMixed:
      return LaunchKernel(ApplyKernel<kDense, kMixed>, blocks, kThreads, kFloatBytes, stream, table, side);
    case kDouble:
      return LaunchKernel(ApplyKernel<kDense, kDouble>, blocks, kThreads, kDoubleBytes, stream, table, side);
  }
}

}  // namespace

int64_t ApplyBlocks(const Job& job, Mode mode, int side) {
  return int64_t{1} * RowBlocks(job, 0, side) * ChunksOf(job, side, mode);
}

void LaunchApply(const LaunchTable& table, int64_t blocks, bool dense, Mode mode, int side, cudaStream_t stream) {
  return dense ? Launch<true>(table, blocks, mode, side, stream) : Launch<false>(table, blocks, mode, side, stream);
}

}  // namespace cuda
}  // namespace sinkhorn
