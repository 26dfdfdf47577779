// <C, P> where the cost is a squared distance, or one in disguise: kappa |x_i - y_j|^2 whole, of points seen from one
// place, so that nothing is left of those that coincide: exponents and shifts would cancel where P is near such pairs
// alone. In float64 they do so of the nearest pairs only, so that exponents tell all others, by the tiles of
// transport_exact_tiles.cuh.
//
// A block has kTile rows, and some of the columns.
#include <cmath>
#include <type_traits>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_exact_tiles.cuh"
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

// ---- By exponents in float64 ---------------------------------------------------------------------------------------

#if SINKHORN_HOPPER

// |x_i - y_j|^2.
__device__ double SquareOf(const Member& member, int i, int j) {
  const SeenPoints x(member, 0), y(member, 1);
  double square = 0;
  for (int k = 0; k < x.dim; ++k) {
    const double difference = x.At(i, k) - y.At(j, k);
    square = fma(difference, difference, square);
  }
  return square;
}

// A block's part: of which pairs, and what their costs are made of.
template <typename Tiles>
struct LinearPart {
  const Member& member;
  const ExactSides& sides;
  const ExactTerms& terms;
  TileRange range;
  typename Tiles::Memory* memory;
  double (*whole)[2][Tiles::kColumns];  // Room for what is made of terms and shifts.
  double near;  // Costs below are made anew, from coordinates; in units of epsilon / log2(e), as those that follow.
};
// What it adds to <C, P>. kNear: of near pairs; or of all others, and `*found` is whether there are such. A cost is
// what row, column and their shifts make of an exponent, less the exponent.
template <typename Tiles, bool kNear>
__device__ double SumOf(const LinearPart<Tiles>& part, bool* found) {
  const Member& member = part.member;
  const ExactTerms& terms = part.terms;
  const double near = part.near;
  const double* phi = member.phi(0, member.state(0)->parity, 0);
  double start[Tiles::kRows], row_whole[Tiles::kRows], sums[Tiles::kRows];
#pragma unroll
  for (int r = 0; r < Tiles::kRows; ++r) {
    const int i = min(part.sides.first_row + Tiles::Row(r), part.sides.rows - 1);
    start[r] = member.mass(0)[i] > 0 ? (phi[i] + terms.reference) * terms.scale : kNoTerm;
    row_whole[r] = fma(member.Shift(0, 0, i), terms.scale, start[r]);
    sums[r] = 0;
  }
  bool any = false;
  const auto add = [&](int r, double exponent, double cost, int j) {
    if constexpr (kNear) {
      if (!(cost < near)) return;
      cost = SquareOf(member, part.sides.first_row + Tiles::Row(r), j) * member.job.in.kappa * terms.scale;
    } else {
      const bool is_near = cost < near;
      any = any || is_near;
      if (is_near) cost = 0;
    }
    sums[r] = fma(static_cast<double>(FixedPoint::Saturated(exponent + FixedPoint::kStart)), cost, sums[r]);
  };
  struct Of {
    double2 whole;
    int column;
  };
  Tiles tiles(part.sides, part.memory);
  const auto whole_of = [&](int j) { return fma(member.Shift(0, 1, min(j, terms.count - 1)), terms.scale, terms(j)); };
  TermsBeside columns(terms, whole_of, *part.whole);
  tiles.Each(
      part.range.first, part.range.last, start, &columns,
      [&](int tile, int slot, int column) {
        const double2 whole = *reinterpret_cast<const double2*>(&(*part.whole)[slot][column]);
        return Of{whole, tile * Tiles::kColumns + column};
      },
      [&](int r, double first, double second, const Of& of) {
        add(r, first, row_whole[r] + of.whole.x - first, of.column);
        add(r, second, row_whole[r] + of.whole.y - second, of.column + 1);
        if (kNear) __syncwarp();
      });
  if (!kNear) *found = any;
  double total = 0;
#pragma unroll
  for (int r = 0; r < Tiles::kRows; ++r) {
    const int i = part.sides.first_row + Tiles::Row(r);
    if (i < part.sides.rows) total += member.mass(0)[i] * sums[r];
  }
  return total;
}
// Rare, and not to take registers from others.
template <typename Tiles>
__device__ __noinline__ double SumOfNear(const LinearPart<Tiles>& part) {
  return SumOf<Tiles, true>(part, nullptr);
}

#endif

template <bool kFew>
__global__ void __launch_bounds__(kThreads, 2) ExactLinearKernel(LaunchTable table) {
#if SINKHORN_HOPPER
  using Tiles = std::conditional_t<kFew, FewTiles, ManyTiles>;
  __shared__ typename Tiles::Memory memory;
  alignas(16) __shared__ double whole[2][Tiles::kColumns];
  __shared__ double scratch[kMostWarps];
  __shared__ ExactSides sides;
  __shared__ ExactTerms terms;
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int blocks = LinearParts(job), block = static_cast<int>(work.block % blocks), splits = job.exact_splits[0][0];
  const Member member{job, work.block / blocks};
  const EngineState& state = *member.state(0);
  if (!IsSolved(member)) return;
  const double scale = kLog2E / state.epsilon;
  if (threadIdx.x == 0) {
    sides = ExactSidesOf(member, 0, 0, block / splits, scale);
    terms = ExactTermsOf(member, PlanSide(0, 0), scale);
  }
  __syncthreads();
  // Others are right to 2^-26 of themselves. Costs of dots may be anything.
  const double near = IsNegativeDot(job) ? -INFINITY : 0x1p-26 * state.cost_max * scale;
  const TileRange range = TilesOf<Tiles>(sides.columns, block % splits, splits);
  const LinearPart<Tiles> part = {member, sides, terms, range, &memory, &whole, near};
  bool found = false;
  double total = SumOf<Tiles, false>(part, &found);
  if (__syncthreads_or(found)) total += SumOfNear(part);
  total = BlockSum(total, scratch);
  if (threadIdx.x == 0) member.At<double>(job.at.linear_value)[block] = total / scale;
#endif
}

}  // namespace

int64_t LinearBlocks(const Job& job) {
  return HasWholeCosts(job) && job.out.value_linear != nullptr ? LinearParts(job) : 0;
}

void LaunchLinear(const LaunchTable& table, int64_t blocks, Exact exact, int dim, Mode mode, cudaStream_t stream) {
  if (exact == Exact::kFew) return LaunchKernel(ExactLinearKernel<true>, blocks, kThreads, 0, stream, table);
  if (exact == Exact::kMany) {
    return LaunchKernel(ExactLinearKernel<false>, blocks, kThreads, ManySharedBytes(dim), stream, table);
  }
  const auto kernel = mode == kFloat   ? LinearKernel<kFloat>
                      : mode == kMixed ? LinearKernel<kMixed>
                                       : LinearKernel<kDouble>;
  LaunchKernel(kernel, blocks, kThreads, 0, stream, table);
}

}  // namespace cuda
}  // namespace sinkhorn
