// Gradients to the points and barycentric projections of clouds in float32, on Hopper's matrix units.
//
// A block has kRows rows, up to kAgain parts of kDepth coordinates of the other cloud, and a share of its tiles; the
// blocks of a cluster have the others. A tile of exponents is made as in the half steps; each row's densities, divided
// by its sum, become matrix fragments as sums of two halves, and are multiplied by the tile's points, part by part.
// Products of a tile are added up in the matrix units, those of all tiles in float32, in the end those of the cluster.
//
//   mean_i = sum_j P_ij y_j / sum_j P_ij;  d value / d x_i = 2 kappa sum_j P_ij (x_i - mean_i)
// Of negative dots x_i is no part of it. Projections of cosines are of other points: transport_apply.cu.
#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_cloud_stream.cuh"
#include "kernels/cuda/transport_cluster.cuh"
#include "kernels/cuda/transport_fragments.cuh"
#include "kernels/cuda/transport_launch.h"

namespace sinkhorn {
namespace cuda {
namespace {

constexpr int kRows = 128;
constexpr int kOwnGroups = 2;  // Of 64 rows.

// Parts of the coordinates that a block has at most.
__host__ __device__ constexpr int AgainOf(Parts parts) {
  return parts == Parts::kOne ? 1 : parts == Parts::kFew ? 2 : 3;
}
__host__ __device__ inline int PartGroups(const Job& job) {
  return static_cast<int>(CeilDiv(CloudDepths(job.dim), AgainOf(PartsOf(PlanesOf(job), job.dim))));
}
__host__ __device__ inline int64_t RowBlocksOf(const Job& job, int side) { return CeilDiv(job.size[side], kRows); }

#if SINKHORN_HOPPER

constexpr float kDensityBits = 12;  // Densities, at most about 1, are multiplied by 2^12: halves keep small ones.

// A tile's densities, whose exponents are acc * factor + terms + level, as matrix fragments.
__device__ void MakeDensities(float factor, const float (&acc)[16][4], const float* terms, const float (&level)[2],
                              uint32_t (&high)[8][4], uint32_t (&low)[8][4]) {
  const float2* mine = reinterpret_cast<const float2*>(terms) + threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const float2 term = mine[4 * j];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float p0 = FastExp2(fminf(fmaf(acc[j][2 * row], factor, term.x) + level[row], 15.5f));
      const float p1 = FastExp2(fminf(fmaf(acc[j][2 * row + 1], factor, term.y) + level[row], 15.5f));
      Split(p0, p1, &high[j / 2][j % 2 * 2 + row], &low[j / 2][j % 2 * 2 + row]);
    }
  }
}

// A thread's part of a pass: the rows' sums of the other cloud's points over this block's tiles.
template <int kPlanes, Parts kParts, int kColumns>
struct Sums {
  static constexpr int kAgain = AgainOf(kParts), kEntries = kAgain * kColumns / 2;
  using Columns = Stream<kPlanes, kParts, kOwnGroups, kAgain>;

  float total[kAgain][kColumns / 8][4];

  __device__ void Scale(float first, float second) {
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      float& entry = total[e / (kColumns / 2)][e % (kColumns / 2) / 4][e % 4];
      entry *= e % 4 / 2 == 0 ? first : second;
    }
  }
  // Times 2^kDensityBits, the points' scale and `weight`.
  __device__ void Add(const CloudContext& c, const float (&level)[2], const float (&weight)[2], int first_part,
                      float (&terms)[kOwnGroups][2][kCloudTile], Columns* stream) {
    const int group = threadIdx.x / 128, column = threadIdx.x % 128;
    const int depths = kParts == Parts::kOne ? 1 : c.depths;
    stream->Begin(first_part);
    terms[group][0][column] = c.TermOf(c.LoadTerm(c.first_tile * kCloudTile + column));
    float sums[kColumns / 8][4];
    for (int tile = c.first_tile, parity = 0; tile < c.last_tile; ++tile, parity ^= 1) {
      const ColumnTerm next = c.LoadTerm((tile + 1) * kCloudTile + column);
      float acc[16][4];
      for (int d = 0; d < depths; ++d) stream->Multiply(acc);
      WaitForTerms();
      uint32_t high[8][4], low[8][4];
      MakeDensities(c.factor, acc, terms[group][parity], level, high, low);
#pragma unroll
      for (int part = 0; part < kAgain; ++part) {
        AddProducts<kPlanes, kColumns>(c, high, low, MatrixAt(stream->Again(), c.row_bytes), weight, sums, total[part]);
        stream->Release();
      }
      terms[group][parity ^ 1][column] = c.TermOf(next);
    }
  }
  // Over the cluster, each block some of them: store(entry, sum). All threads of the cluster call it.
  template <typename Store>
  __device__ void Combine(int rank, int ranks, Store store) const {
    float* mine = reinterpret_cast<float*>(DynamicShared()) + threadIdx.x;
    __syncthreads();  // The last tile has been read.
#pragma unroll
    for (int e = 0; e < kEntries; ++e) mine[e * kThreads] = total[e / (kColumns / 2)][e % (kColumns / 2) / 4][e % 4];
    SyncCluster();
    const int share = kEntries / ranks;
    for (int e = rank * share; e < (rank + 1) * share; ++e) {
      float sum = 0;
      for (int k = 0; k < ranks; ++k) sum += LoadRemote(mine + e * kThreads, k);
      store(e, sum);
    }
    SyncCluster();
    FenceCopies();  // Copies may come again.
  }
};

#endif

// kColumns: coordinates of a part.
template <int kPlanes, Parts kParts, int kColumns>
__global__ void __launch_bounds__(kThreads, 1) GradientKernel(LaunchTable table, int side, int ranks) {
#if SINKHORN_HOPPER
  constexpr int kStages = StagesOf(kPlanes, kParts, kOwnGroups), kAgain = AgainOf(kParts);
  __shared__ CloudContext c;
  __shared__ float terms[kOwnGroups][2][kCloudTile];
  __shared__ alignas(8) uint64_t full[2][kStages], empty[2][kStages];
  using Rows = Sums<kPlanes, kParts, kColumns>;
  // 1. Which rows, which coordinates, which tiles.
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int groups = PartGroups(job), rank = static_cast<int>(work.block % ranks);
  const int64_t blocks = RowBlocksOf(job, side) * groups, index = work.block / ranks;
  const Member member{job, index / blocks};
  const int first_part = static_cast<int>(index % blocks % groups) * kAgain;
  const int block = static_cast<int>(index % blocks / groups);
  if (member.state(0)->mode != kFloat || !IsSolved(member)) return;
  const bool projects = ProjectionOf(job, side).data != nullptr && !IsCosine(job);
  const bool wants_gradient = WantsGradient(job, side);
  const int row0 = block * kRows + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const double* points = member.At<double>(job.at.points64[side]);
  const double* centre = member.At<double>(job.at.centre[side]);
  const double* theirs = member.At<double>(job.at.centre[1 - side]);
  const double unscale = exp2(-static_cast<double>(kDensityBits)) / member.state(0)->point_scale;
  double mass[2][2] = {};  // [term][row]
  Rows rows = {};

  // 2. Gradients of debiased problems have a second term.
  const int terms_of = job.engines > 1 && wants_gradient ? 2 : 1;
#pragma unroll 1
  for (int t = 0; t < terms_of; ++t) {
    const int engine = t == 0 ? 0 : 1 + side, pass_side = t == 0 ? side : 0;
    __syncthreads();
    if (threadIdx.x == 0) {
      FillShape(member, RowBlock{member.index, engine, block, rank, ranks}, pass_side, Pass::kMeasure, &c);
      FillState(member, &c);
      Rows::Columns::Init(full[t], empty[t]);
    }
    __syncthreads();
    // A row's densities divided by their sum.
    float level[2], weight[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int i = row0 + 8 * row;
      const double ratio = i < c.rows ? member.ratio(engine, pass_side)[i] : 0;
      const double own = i < c.rows ? member.mass(MeasureOf(engine, pass_side))[i] * ratio : 0;
      t == 0 ? mass[0][row] = own : mass[1][row] = own;
      level[row] = ratio > 0 ? static_cast<float>((c.own_phi[i] + c.reference) * c.scale - log2(ratio)) + kDensityBits
                             : static_cast<float>(kVoid);
      weight[row] = t == 0 ? 1 : static_cast<float>(-own);
    }
    if (t == 1) rows.Scale(static_cast<float>(mass[0][0]), static_cast<float>(mass[0][1]));
    typename Rows::Columns stream(c, full[t], empty[t]);
    rows.Add(c, level, weight, first_part, terms, &stream);

    // 3. Store.
    if (t + 1 < terms_of && !projects) continue;
    rows.Combine(rank, ranks, [&](int e, float sum) {
      const int row = e % 4 / 2, q = e % (kColumns / 2);
      const int k = (first_part + e / (kColumns / 2)) * kDepth + q / 4 * 8 + threadIdx.x % 4 * 2 + q % 2;
      const int64_t i = row0 + 8 * row;
      if (i >= c.rows || k >= job.dim) return;
      const int64_t at = (member.index * c.rows + i) * job.dim + k;
      const double first = row == 0 ? mass[0][0] : mass[0][1], second = row == 0 ? mass[1][0] : mass[1][1];
      if (t == 0 && projects) StoreOutput(ProjectionOf(job, side), at, first > 0 ? sum * unscale + theirs[k] : 0);
      if (!wants_gradient || t + 1 < terms_of) return;
      // Seen from their centre and from its own.
      const bool dot = IsNegativeDot(job);
      const double x = points[i * job.dim + k], own = dot ? -centre[k] : x;
      const double apart = dot ? -theirs[k] : x + (centre[k] - theirs[k]);
      const double moved =
          terms_of == 1 ? first * (apart - sum * unscale) : first * apart - second * own - sum * unscale;
      StoreGradient(member, side, i, k, 2 * job.in.kappa * moved);
    });
  }
#endif
}

}  // namespace

int GradientRanks(const Job& job, int side) {
  const int64_t blocks = RowBlocksOf(job, side) * PartGroups(job), tiles = CeilDiv(job.size[1 - side], kCloudTile);
  // What a block has to do beside its tiles takes as long as so many of them.
  const Parts parts = PartsOf(PlanesOf(job), job.dim);
  const int64_t beside = parts == Parts::kOne ? 12 : parts == Parts::kFew ? 4 : 2;
  int best = 1;
  int64_t least = 0;
  for (int ranks = 1; ranks <= kGradientRanksMost && (ranks == 1 || 4 * ranks <= tiles); ranks *= 2) {
    // Waves of blocks on an H200.
    const int64_t time = CeilDiv(blocks * ranks, ranks > 2 ? 128 : 132) * (CeilDiv(tiles, ranks) + beside);
    if (ranks > 1 && time >= least) continue;
    least = time;
    best = ranks;
  }
  return best;
}

int64_t GradientBlocks(const Job& job, int side) {
  const bool wanted = WantsGradient(job, side) || (ProjectionOf(job, side).data != nullptr && !IsCosine(job));
  return wanted ? job.count * RowBlocksOf(job, side) * PartGroups(job) * GradientRanks(job, side) : 0;
}

void LaunchGradient(const LaunchTable& table, int64_t blocks, int planes, int dim, int ranks, int side,
                    cudaStream_t stream) {
  const Parts parts = PartsOf(planes, dim);
  const size_t tile = static_cast<size_t>(planes) * kCloudTile * CloudRowBytes(dim);
  const size_t tiles = StreamTiles(planes, parts, CloudDepths(dim), kOwnGroups);
  const auto launch = [&](void (*kernel)(LaunchTable, int, int)) {
    LaunchCluster(kernel, blocks, ranks, kThreads, tiles * tile + kPlaneAlignment, stream, table, side, ranks);
  };
  if (parts == Parts::kFew) {
    return launch(planes == 2 ? GradientKernel<2, Parts::kFew, 64> : GradientKernel<1, Parts::kFew, 64>);
  }
  if (parts == Parts::kMany) {
    return launch(planes == 2 ? GradientKernel<2, Parts::kMany, 64> : GradientKernel<1, Parts::kMany, 64>);
  }
  switch (CloudRowBytes(dim)) {
    case 32:
      return launch(planes == 2 ? GradientKernel<2, Parts::kOne, 16> : GradientKernel<1, Parts::kOne, 16>);
    case 64:
      return launch(planes == 2 ? GradientKernel<2, Parts::kOne, 32> : GradientKernel<1, Parts::kOne, 32>);
    default:
      return launch(planes == 2 ? GradientKernel<2, Parts::kOne, 64> : GradientKernel<1, Parts::kOne, 64>);
  }
}

}  // namespace cuda
}  // namespace sinkhorn
