// P V, P^T U, points under the plan where transport_gradient.cu and those beside it do not go, and gradients to points
// of up to kWideRight coordinates (of more: transport_weights.cu) whose cost is |x - y|: sums of right-hand sides'
// rows, times the plan's or times P_ij / |x_i - y_j|. Exponents are tiles of transport_exact_tiles.cuh, and so are the
// products: weights lie in registers as the matrix units want them, if of eight columns those of even number are four
// factors, those of odd number the next four.
//
// A block has kTile rows of a side and a chunk of a right-hand side; the blocks of a cluster have shares of the
// columns, and add up what they have in the end.
#include <cmath>
#include <type_traits>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_cluster.cuh"
#include "kernels/cuda/transport_exact_distances.cuh"
#include "kernels/cuda/transport_exact_sums.cuh"
#include "kernels/cuda/transport_exact_tiles.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_plan.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

// What members of a mode are multiplied by; directions are of any mode.
__host__ __device__ RightsWanted ExactRightsOf(const Job& job, Mode mode, int side) {
  if (GivesDirections(job, side)) return {!WeighsDirections(job, side), false, false};
  if (!MultipliesDoubles(job)) return {false, false, false};
  RightsWanted wanted = RightsOf(job, side);
  wanted.points = wanted.points && mode == kMixed && !HasExactGradient(job);
  return wanted;
}
// Where more than kNarrowRight numbers of a row are wanted, chunks are wider, if rows have registers for that.
constexpr int kWideStride = kWideRight + 2;  // In shared memory: banks do not meet.
constexpr size_t kWideTileBytes = sizeof(double) * kManyColumns * kWideStride;
__host__ __device__ int ChunkWidth(const Job& job, Mode mode, int side) {
  const RightsWanted wanted = ExactRightsOf(job, mode, side);
  int width = wanted.points || wanted.given ? job.dim : 0;
  if (wanted.vectors) width = max(width, RightWidth(job, side, Right::kVectors));
  return job.dim <= kFewDims || width <= kNarrowRight ? kNarrowRight : kWideRight;
}
__host__ __device__ RightChunks ExactChunksOf(const Job& job, Mode mode, int side) {
  return RightChunksOf(job, side, ExactRightsOf(job, mode, side), ChunkWidth(job, mode, side));
}

// How a block goes about it: few coordinates; chunks of kEights times eight numbers.
constexpr bool HasMoreThreads(bool few, int eights, bool directions) { return !few && (eights > 1 || directions); }
constexpr int BlockThreads(bool few, int eights, bool directions) {
  return HasMoreThreads(few, eights, directions) ? 2 * kThreads : kThreads;
}
constexpr int BlocksAtOnce(bool few, int eights, bool directions) {
  return 2 * kThreads / BlockThreads(few, eights, directions);
}

#if SINKHORN_HOPPER

template <bool kFew, int kEights, bool kDirections>
using TilesFor =
    std::conditional_t<kFew, FewTilesOf<4>, ManyTilesOf<HasMoreThreads(kFew, kEights, kDirections) ? 2 : 4>>;

// Right-hand sides of two neighbouring columns, a number of each eight of the chunk.
template <int kEights>
struct RightPair {
  double of[kEights][2];
};

// Weights of the plan, or, kDirections, those by distance, times the right-hand side: of tiles of `range`.
template <typename Tiles, int kEights, bool kDirections>
class RightProducts {
 public:
  using Rights = RightSums<Tiles, kEights>;
  using Pair = RightPair<kEights>;

  // Wide chunks of a tile lie in shared memory, as double: `tile`.
  static constexpr bool kShares = kEights > 1;
  __device__ RightProducts(const ExactSides& sides, const ExactTerms& terms, const double* phi, const double* mass,
                           const RightSide& right, double* tile)
      : sides_(sides), terms_(terms), phi_(phi), mass_(mass), right_(right), tile_(tile) {}

  __device__ void Sum(const TileRange& range, typename Tiles::Memory* memory, Rights* sums) const {
    Tiles tiles(sides_, memory);
    double start[Tiles::kRows];
#pragma unroll
    for (int r = 0; r < Tiles::kRows; ++r) start[r] = StartOfRow(sides_, terms_, phi_, mass_, Tiles::Row(r));
    TermsAlone columns(terms_);
    double weights[4];
    Each(
        &tiles, range, start, &columns, [&](int tile, int /*slot*/, int column) { return Load(tile, column); },
        [&](int r, double first, double second, const Pair& pair) {
          weights[r % 2] = static_cast<double>(FixedPoint::Saturated(first));
          weights[2 + r % 2] = static_cast<double>(FixedPoint::Saturated(second));
          Add(r, weights, pair, sums);
        });
  }

  // The same by distance.
  __device__ void SumDirections(const TileRange& range, const Distances<Tiles>& distances,
                                typename Tiles::Memory* memory, Rights* sums) const {
    Tiles tiles(sides_, memory);
    double weights[4];
    distances.EachWeight([&](const double(&start)[Tiles::kRows], auto* columns, auto begin,
                             auto use) { Each(&tiles, range, start, columns, begin, use); },
                         [&](int tile, int column) { return Load(tile, column); },
                         [&](int r, float first, float second, const Pair& pair) {
                           weights[r % 2] = first;
                           weights[2 + r % 2] = second;
                           Add(r, weights, pair, sums);
                         });
  }

 private:
  template <typename Columns, typename Begin, typename Use>
  __device__ void Each(Tiles* tiles, const TileRange& range, const double (&start)[Tiles::kRows], Columns* columns,
                       Begin begin, Use use) const {
    if constexpr (kShares) {
      tiles->Each(range.first, range.last, start, columns, begin, use, [this](int tile) { ShareTile(tile); });
    } else {
      tiles->Each(range.first, range.last, start, columns, begin, use);
    }
  }
  __device__ void ShareTile(int tile) const {
#pragma unroll
    for (int q = 0; q < Tiles::kColumns * kWideRight / Tiles::kBlockThreads; ++q) {
      const int e = threadIdx.x + q * Tiles::kBlockThreads, column = e / kWideRight;
      tile_[column * kWideStride + e % kWideRight] = At(tile * Tiles::kColumns + column, e % kWideRight);
    }
  }
  __device__ double At(int j, int k) const { return j < sides_.columns ? right_.At<double>(j, k) : 0; }
  __device__ Pair Load(int tile, int column) const {
    Pair pair;
#pragma unroll
    for (int e = 0; e < kEights; ++e) {
      const int k = 8 * e + static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        pair.of[e][q] = kShares ? tile_[(column + q) * kWideStride + k] : At(tile * Tiles::kColumns + column + q, k);
      }
    }
    return pair;
  }
  // Of row r, the second of two that go together: both's.
  __device__ static void Add(int r, const double (&weights)[4], const Pair& pair, Rights* sums) {
    sums->mass[r] += weights[r % 2] + weights[2 + r % 2];
    if (r % 2 == 0) return;
#pragma unroll
    for (int e = 0; e < kEights; ++e) AddDoubles(weights, pair.of[e], sums->products[r / 2][e]);
  }

  const ExactSides& sides_;
  const ExactTerms& terms_;
  const double *const phi_, *const mass_;
  const RightSide& right_;
  double* const tile_;
};

#endif

// Whose rows, and which chunk.
struct ExactWork {
  int64_t member;
  int block, chunk, rank;
};

template <bool kFew, int kEights, bool kDirections>
__global__ void __launch_bounds__(BlockThreads(kFew, kEights, kDirections), BlocksAtOnce(kFew, kEights, kDirections))
    ExactApplyKernel(LaunchTable table, Mode mode, int side, int ranks, int tile_at) {
#if SINKHORN_HOPPER
  using Tiles = TilesFor<kFew, kEights, kDirections>;
  constexpr int kWidth = 8 * kEights;
  __shared__ typename Tiles::Memory memory;
  __shared__ SharedSums<kEights> shared;
  __shared__ double gradient[kTile][kWidth];
  __shared__ ExactSides sides;
  __shared__ ExactTerms terms;
  __shared__ RightSide right;
  __shared__ ExactWork of;  // And the rest that registers have no room for.
  // 1. Whose rows. Blocks of a cluster go on or leave together.
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  if (threadIdx.x == 0) {
    const RightChunks chunks = ExactChunksOf(job, mode, side);
    const int64_t index = work.block / ranks, blocks = RowBlocks(job, 0, side);
    of.rank = static_cast<int>(work.block % ranks);
    of.chunk = static_cast<int>(index % chunks.all);
    of.block = static_cast<int>(index / chunks.all % blocks);
    of.member = index / chunks.all / blocks;
    right.Begin(job, side, chunks, of.chunk, kWidth);
  }
  __syncthreads();
  const Member member{job, of.member};
  const EngineState& first_state = *member.state(0);
  if (!IsSolved(member) || (!kDirections && first_state.mode != mode)) return;
  // Whether exponents were kept only the member knows.
  const bool points = right.what == Right::kPoints;
  if (!kDirections && points && IsStreamed(job, first_state) && HasKeptGradient(job, mode)) return;

  // 2. Gradients of debiased problems have a second term.
  const bool is_gradient = points && WantsGradient(job, side);
  const int all_terms = is_gradient && job.engines > 1 ? 2 : 1;
  for (int t = 0; t < all_terms; ++t) {
    const int engine = t == 0 ? 0 : 1 + side, pass_side = t == 0 ? side : 0;
    const EngineState& state = *member.state(engine);
    const int own = MeasureOf(engine, pass_side), other = MeasureOf(engine, 1 - pass_side);
    const double* phi = member.phi(engine, state.parity, pass_side);
    const double* column_phi = member.phi(engine, state.parity, 1 - pass_side);
    const double scale = kLog2E / state.epsilon;
    __syncthreads();  // What is there has been read.
    if (threadIdx.x == 0) {
      sides = ExactSidesOf(member, engine, pass_side, of.block, scale);
      if (kDirections) sides.factor = DistanceFactor(scale);
      terms = {column_phi, member.log_mass(other), column_phi[0], scale, job.size[other]};
      right.Find(member, side, other);
    }
    __syncthreads();
    const TileRange range = TilesOf<Tiles>(sides.columns, of.rank, ranks);
    RightSums<Tiles, kEights> sums;
    sums.Clear();
    auto* tile = reinterpret_cast<double*>(DynamicShared() + tile_at);
    const RightProducts<Tiles, kEights, kDirections> products(sides, terms, phi, member.mass(own), right, tile);
    if constexpr (kDirections) {
      __shared__ typename Distances<Tiles>::Memory distance_memory;
      const Distances<Tiles> distances(member, own, other, sides, terms, phi, &distance_memory);
      products.SumDirections(range, distances, &memory, &sums);
    } else {
      products.Sum(range, &memory, &sums);
    }
    AddUp<Tiles, kEights>(sums, &shared);

    // 3. What follows for the rows, of which the cluster's blocks have shares.
    const auto store = [&](int row, int k, double value, double weights) {
      const int64_t i = sides.first_row + row;
      const double mass = member.mass(own)[i];
      double* kept = &gradient[row][k];
      if (t == 0) *kept = 0;
      if constexpr (kDirections) {
        const double sum = mass * scale * (weights * sides.x[i * job.dim + right.first + k] - value);
        *kept += t == 0 ? sum : -sum;
        if (t + 1 == all_terms) StoreGradient(member, side, i, right.first + k, *kept);
      } else {
        StoreProduct(member, side, right, t, all_terms, i, k, mass * weights, mass * value, kept);
      }
    };
    EachSum(&shared, of.rank, ranks, sides.rows - sides.first_row, right.width - right.first, store);
  }
#endif
}

// Blocks of a cluster, which share the columns: by a job's shape, so that waves on an H200 take the least time. What
// blocks begin and end with counts for more where a multiprocessor has one at a time.
int RanksOf(const Job& job, Mode mode, int side) {
  constexpr double kBeside = 2;  // A block's beginning and end, in tiles.
  const bool few = job.dim <= kFewDims;
  const int blocks_at_once = BlocksAtOnce(few, ChunkWidth(job, mode, side) / 8, GivesDirections(job, side));
  const int64_t blocks = int64_t{1} * RowBlocks(job, 0, side) * ExactChunksOf(job, mode, side).all;
  const int64_t tiles = CeilDiv(job.size[1 - side], few ? kFewColumns : kManyColumns);
  const int64_t least_tiles = blocks_at_once == 1 ? 4 : 2;  // Of a block.
  int best = 1;
  double least = INFINITY;
  for (int ranks = 1; ranks <= kPortableRanks && (ranks == 1 || least_tiles * ranks <= tiles); ranks *= 2) {
    const double time = CeilDiv(blocks * ranks, kProcessors * blocks_at_once) * (CeilDiv(tiles, ranks) + kBeside);
    if (time < 0.95 * least) best = ranks, least = time;
  }
  return best;
}

}  // namespace

ExactApplyLaunch ExactApplyLaunchOf(const Job& job, Mode mode, int side) {
  return {ExactChunksOf(job, mode, side).all > 0, SourceOf(job) == Source::kDistances, job.dim <= kFewDims,
          ChunkWidth(job, mode, side) > kNarrowRight, RanksOf(job, mode, side)};
}
int64_t ExactApplyBlocks(const Job& job, const ExactApplyLaunch& of, Mode mode, int side) {
  return job.count * RowBlocks(job, 0, side) * ExactChunksOf(job, mode, side).all * of.ranks;
}

void LaunchExactApply(const LaunchTable& table, int64_t blocks, const ExactApplyLaunch& of, int dim, Mode mode,
                      int side, cudaStream_t stream) {
  const size_t tile_at = of.few ? 0 : ManySharedBytes(dim);
  const auto launch = [&](auto eights, auto directions, auto few) {
    constexpr int kEights = decltype(eights)::value;
    constexpr bool kDirections = decltype(directions)::value, kFew = decltype(few)::value;
    LaunchCluster(ExactApplyKernel<kFew, kEights, kDirections>, blocks, of.ranks,
                  BlockThreads(kFew, kEights, kDirections), tile_at + (of.wide ? kWideTileBytes : 0), stream, table,
                  mode, side, of.ranks, static_cast<int>(tile_at));
  };
  const auto launch_of = [&](auto directions) {
    constexpr std::integral_constant<int, kNarrowRight / 8> narrow;
    if (of.few) return launch(narrow, directions, std::true_type());
    if (!of.wide) return launch(narrow, directions, std::false_type());
    launch(std::integral_constant<int, kWideRight / 8>(), directions, std::false_type());
  };
  of.directions ? launch_of(std::true_type()) : launch_of(std::false_type());
}

}  // namespace cuda
}  // namespace sinkhorn
