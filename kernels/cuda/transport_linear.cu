// <C, P> where the cost is a squared distance: kappa |x_i - y_j|^2 whole, of points seen from one place, so that
// nothing is left of those that coincide. Exponents and shifts would cancel where P is near such pairs alone.
//
// A block has kTile rows, and some of the columns.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_plan.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

// The points of one side as given, cosines: on the sphere, seen from the centre of x.
struct SeenPoints {
  TensorView view;
  int64_t base;
  const double* length;  // Null: as given.
  const double* from;
  int count, dim;

  __device__ SeenPoints(const Member& member, int side) {
    const Job& job = member.job;
    view = side == 0 ? job.in.x : job.in.y;
    count = job.size[side];
    dim = job.dim;
    base = view.shared ? 0 : member.index * count * dim;
    length = IsCosine(job) ? member.At<double>(job.at.length[side]) : nullptr;
    from = member.At<double>(job.at.centre[0]);
  }
  __device__ double At(int i, int k) const {
    const int64_t point = min(i, count - 1);
    const double value = LoadDouble(view.dtype, view.data, base + point * dim + k);
    return (length != nullptr ? value / length[point] : value) - from[k];
  }
};

// |x_i - y_j|^2 of a tile, as MakeTile has its exponents.
template <int kMode>
__device__ void MakeSquares(const TileContext& c, const SeenPoints& x, const SeenPoints& y, int row0, int col0,
                            TileMemory<false, kMode>* memory, ExponentOf<kMode> (&square)[4][4]) {
  using TE = ExponentOf<kMode>;
  constexpr int kDepth = TileMemory<false, kMode>::kDepth;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int q = 0; q < 4; ++q) square[r][q] = 0;
  }
  for (int first = 0; first < c.dim; first += kDepth) {
    const int depth = min(kDepth, c.dim - first);
    __syncthreads();  // The tile before has been read.
    for (int e = threadIdx.x; e < depth * kTile; e += kThreads) {
      const int k = e % depth, i = e / depth;
      memory->rows[k][i] = static_cast<TE>(x.At(row0 + i, first + k));
      memory->columns[k][i] = static_cast<TE>(y.At(col0 + i, first + k));
    }
    __syncthreads();
    for (int k = 0; k < depth; ++k) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const TE difference = memory->rows[k][4 * c.row_lane + r] - memory->columns[k][4 * c.col_lane + q];
          square[r][q] += difference * difference;
        }
      }
    }
  }
}

template <int kMode>
__global__ void __launch_bounds__(kThreads) LinearKernel(LaunchTable table) {
  using TE = ExponentOf<kMode>;
  __shared__ TileMemory<false, kMode> memory;
  __shared__ TE terms[2][kTile];  // Rows, columns.
  __shared__ double scratch[kMostWarps];
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int blocks = LinearParts(job), block = static_cast<int>(work.block % blocks), splits = OutputSplits(job);
  const int row0 = block / splits * kTile;
  const SplitTiles tiles = TilesOfSplit(job, block % splits);
  const Member member{job, work.block / blocks};
  if (member.state(0)->mode != kMode || !IsSolved(member)) return;
  const TileContext c = MakeTileContext(job, member.index, 0, 0, member.state(0)->epsilon);
  const SeenPoints x(member, 0), y(member, 1);
  if (threadIdx.x < kTile) terms[0][threadIdx.x] = PlanTerm<TE>(c, 0, row0 + threadIdx.x);
  double total = 0;
  for (int col0 = tiles.first * kTile; col0 < tiles.last * kTile; col0 += kTile) {
    __syncthreads();  // The tile before has been read.
    if (threadIdx.x < kTile) terms[1][threadIdx.x] = PlanTerm<TE>(c, 1, col0 + threadIdx.x);
    __syncthreads();
    TE z[4][4], square[4][4];
    MakeTileOf<Source::kProducts, kMode>(c, row0, col0, &memory, z);
    MakeSquares<kMode>(c, x, y, row0, col0, &memory, square);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        total += static_cast<double>(
                     PlanEntry<DensityOf<kMode>>(z[r][k], terms[0][4 * c.row_lane + r], terms[1][4 * c.col_lane + k])) *
                 square[r][k];
      }
    }
  }
  total = job.in.kappa * BlockSum(total, scratch);
  if (threadIdx.x == 0) member.At<double>(job.at.linear_value)[block] = total;
}

}  // namespace

int64_t LinearBlocks(const Job& job) {
  return HasWholeCosts(job) && job.out.value_linear != nullptr ? LinearParts(job) : 0;
}

void LaunchLinear(const LaunchTable& table, int64_t blocks, Mode mode, cudaStream_t stream) {
  const auto kernel = mode == kFloat   ? LinearKernel<kFloat>
                      : mode == kMixed ? LinearKernel<kMixed>
                                       : LinearKernel<kDouble>;
  LaunchKernel(kernel, blocks, kThreads, 0, stream, table);
}

}  // namespace cuda
}  // namespace sinkhorn
