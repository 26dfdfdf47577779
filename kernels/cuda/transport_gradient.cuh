// What the kernels for gradients to points and projections of clouds share: densities as matrix fragments, the rows'
// sums of the other cloud's points, which the blocks of a cluster add up, and what becomes of them.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_GRADIENT_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_GRADIENT_CUH_

#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_cloud.cuh"
#include "kernels/cuda/transport_cluster.cuh"
#include "kernels/cuda/transport_fragments.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_ranks.cuh"

namespace sinkhorn {
namespace cuda {

constexpr int kGradientRows = 128;  // Of a block that adds up points.
constexpr int kGradientGroups = 2;  // Its warpgroups, of 64 rows each.

__host__ __device__ inline int64_t GradientRowBlocks(const Job& job, int side) {
  return CeilDiv(job.size[side], kGradientRows);
}

// Of dynamic shared memory, to combine sums.
constexpr size_t PointSumBytes(int again, int columns) { return again * columns / 2 * kThreads * sizeof(float); }

#if SINKHORN_HOPPER

constexpr float kDensityBits = 12;  // Densities, at most about 1, are multiplied by 2^12: halves keep small ones.

// What a row adds to exponents, so that they are of its densities divided by their sum, times 2^kDensityBits. `phi`:
// its potential, as exponents lack it; `ratio`: that sum, over the row's mass.
__device__ inline float DensityLevel(const CloudContext& c, double phi, double ratio) {
  return ratio > 0 ? static_cast<float>(phi * c.scale - log2(ratio)) + kDensityBits : static_cast<float>(kVoid);
}

// The densities of a tile, or of some of its columns, whose exponents are acc * factor + terms + level, as matrix
// fragments: use(k, high, low), of 16 columns each.
template <int kEights, typename Use>
__device__ void EachFragment(float factor, const float (&acc)[kEights][4], const float* terms, const float (&level)[2],
                             Use use) {
  const float2* mine = reinterpret_cast<const float2*>(terms) + threadIdx.x % 4;
#pragma unroll
  for (int k = 0; k < kEights / 2; ++k) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const int j = 2 * k + q;
      const float2 term = mine[4 * j];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float p0 = FastExp2(fmaf(acc[j][2 * row], factor, term.x) + level[row]);
        const float p1 = FastExp2(fmaf(acc[j][2 * row + 1], factor, term.y) + level[row]);
        Split<PackFinite>(p0, p1, &high[2 * q + row], &low[2 * q + row]);
      }
    }
    use(k, high, low);
  }
}

// A thread's sums: of two rows, 8 apart, for kAgain parts of kColumns coordinates.
template <int kAgain, int kColumns>
struct PointSums {
  static constexpr int kEntries = kAgain * kColumns / 2;

  float total[kAgain][kColumns / 8][4];

  // use(number, entry) for each.
  template <typename Use>
  __device__ void Each(Use use) {
#pragma unroll
    for (int e = 0; e < kEntries; ++e) use(e, total[e / (kColumns / 2)][e % (kColumns / 2) / 4][e % 4]);
  }
  __device__ void Scale(float first, float second) {
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      float& entry = total[e / (kColumns / 2)][e % (kColumns / 2) / 4][e % 4];
      entry *= e % 4 / 2 == 0 ? first : second;
    }
  }
  // Over the cluster, each block some of them, of the thread's two rows and two neighbouring coordinates, [row][which],
  // at a time: load(coordinate, beside), then store(coordinate, sum, beside); coordinates from the first part's first.
  // All threads of the cluster call it. Blocks have kTiles of these; those of `cuts` neighbours are added up first, in
  // their order. Little code: it runs once or twice, and waits for its instructions.
  template <int kTiles, typename Load, typename Store>
  __device__ static void Combine(const PointSums (&tiles)[kTiles], int rank, int ranks, int cuts, Load load,
                                 Store store) {
    float* mine = reinterpret_cast<float*>(DynamicShared()) + threadIdx.x;
    __syncthreads();  // The last tile has been read.
#pragma unroll
    for (int k = 0; k < kTiles * kEntries; ++k) {
      const int e = k % kEntries;
      mine[k * kThreads] = tiles[k / kEntries].total[e / (kColumns / 2)][e % (kColumns / 2) / 4][e % 4];
    }
    SyncCluster();
    constexpr int kQuads = kEntries / 4, kQuadsOfPart = kColumns / 8;
    const int last = kQuads * (rank + 1) / ranks;
#pragma unroll 1
    for (int quad = kQuads * rank / ranks; quad < last; ++quad) {
      const int coordinate =
          static_cast<int>(quad / kQuadsOfPart * kDepth + quad % kQuadsOfPart * 8 + threadIdx.x % 4 * 2);
      const float* const from = mine + 4 * quad * kThreads;
      double beside[2][2];
      float sum[2][2] = {};
      load(coordinate, beside);
      if constexpr (kTiles == 1) {
#pragma unroll 4
        for (int block = 0; block < ranks; ++block) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[e / 2][e % 2] += LoadRemote(from + e * kThreads, block);
        }
      } else {
        float neighbours[4] = {};
#pragma unroll 2
        for (int block = 0; block < ranks; ++block) {
          const bool ends = (block + 1) % cuts == 0;
#pragma unroll
          for (int e = 0; e < 4; ++e) {
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
              neighbours[e] += LoadRemote(from + (tile * kEntries + e) * kThreads, block);
            }
            if (ends) sum[e / 2][e % 2] += neighbours[e], neighbours[e] = 0;
          }
        }
      }
      store(coordinate, sum, beside);
    }
    SyncCluster();
    FenceCopies();  // Copies may come again.
  }
  // The same by a block alone, of its own sums, four times two rows and coordinates at a time: all are loaded before
  // the first is stored.
  template <typename Load, typename Store>
  __device__ void Own(Load load, Store store) const {
    constexpr int kQuads = kEntries / 4, kQuadsOfPart = kColumns / 8, kDeep = 4;
    static_assert(kQuadsOfPart % kDeep == 0, "of one part");
    float* mine = reinterpret_cast<float*>(DynamicShared()) + threadIdx.x;
    __syncthreads();  // The last tile has been read.
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      mine[e * kThreads] = total[e / (kColumns / 2)][e % (kColumns / 2) / 4][e % 4];
    }
#pragma unroll 1
    for (int first = 0; first < kQuads; first += kDeep) {
      const int coordinate =
          static_cast<int>(first / kQuadsOfPart * kDepth + first % kQuadsOfPart * 8 + threadIdx.x % 4 * 2);
      double beside[kDeep][2][2];
#pragma unroll
      for (int quad = 0; quad < kDeep; ++quad) load(coordinate + 8 * quad, beside[quad]);
#pragma unroll
      for (int quad = 0; quad < kDeep; ++quad) {
        float sum[2][2];
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[e / 2][e % 2] = mine[(4 * (first + quad) + e) * kThreads];
        store(coordinate + 8 * quad, sum, beside[quad]);
      }
    }
    __syncthreads();
    FenceCopies();  // Copies may come again.
  }
};

// What becomes of a row's sums, which are of densities divided by their sum:
//   mean_i = sum_j P_ij y_j / sum_j P_ij;  d value / d x_i = 2 kappa sum_j P_ij (x_i - mean_i)
// Of negative dots x_i is no part of it.
struct PointOutputs {
  const Member& member;
  const int side;
  const bool projects, moves;  // Projections are wanted; gradients.
  const bool is_negative_dot;
  const int dim;
  const double* const points;
  const double* const centre;
  const double* const theirs;
  const double unscale, twice_kappa;

  __device__ PointOutputs(const Member& member, int side)
      : member(member),
        side(side),
        projects(ProjectsMeans(member.job, side)),
        moves(WantsGradient(member.job, side)),
        is_negative_dot(IsNegativeDot(member.job)),
        dim(member.job.dim),
        points(member.At<double>(member.job.at.points64[side])),
        centre(member.At<double>(member.job.at.centre[side])),
        theirs(member.At<double>(member.job.at.centre[1 - side])),
        unscale(exp2(-static_cast<double>(kDensityBits)) / member.state(0)->point_scale),
        twice_kappa(2 * member.job.in.kappa) {}

  // Coordinate k of a row whose plan has this mass.
  __device__ double Mean(int k, double mass, float sum) const { return mass > 0 ? sum * unscale + theirs[k] : 0; }
  __device__ double Moved(double mass, float sum, double apart) const {
    return twice_kappa * (mass * (apart - sum * unscale));
  }
  // Debiased, of row i: `own` of the self-term's plan, whose sums have been taken off.
  __device__ double MovedApart(int64_t i, int k, double mass, double own, float sum, double apart) const {
    return twice_kappa * (mass * apart - own * (is_negative_dot ? -centre[k] : Point(i, k)) - sum * unscale);
  }
  // What a row's coordinate k has to be moved by, or is by itself, to be seen from the other cloud's centre.
  __device__ double Shift(int k) const { return is_negative_dot ? -theirs[k] : centre[k] - theirs[k]; }
  // Of two rows and the coordinates k, k + 1, or what is next to them: the rows' points.
  __device__ void LoadPoints(const int64_t (&rows)[2], int k, double (&point)[2][2]) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      point[e / 2][e % 2] = Point(max(rows[e / 2], int64_t{0}), min(k + e % 2, dim - 1));
    }
  }
  // Of the same: as they are seen from the other cloud's centre.
  __device__ void LoadApart(const int64_t (&rows)[2], int k, double (&apart)[2][2]) const {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      if (k + which >= dim) continue;
      const double shift = Shift(k + which);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        if (rows[row] >= 0) apart[row][which] = is_negative_dot ? shift : Point(rows[row], k + which) + shift;
      }
    }
  }
  // Of the same: means and gradients, where they are wanted: mean(row, which) and moved(row, which), 0 or 1 each.
  // Negative rows are not there.
  template <typename MeanOf, typename MovedOf>
  __device__ void Store(bool means, bool gradients, const int64_t (&rows)[2], int k, MeanOf mean, MovedOf moved) const {
    const int64_t first = member.index * member.job.size[side] * dim + k;
    const auto is_there = [&](int e) { return rows[e / 2] >= 0 && k + e % 2 < dim; };
    double value[4];
    const auto fill = [&](const auto& of) {
#pragma unroll
      for (int e = 0; e < 4; ++e) value[e] = is_there(e) ? of(e / 2, e % 2) : 0;
    };
    const auto store = [&](auto* entries) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (is_there(e)) StoreDouble(value[e], entries + rows[e / 2] * dim + e % 2);
      }
    };
    if (means) {
      fill(mean);
      WithEntries(ProjectionOf(member.job, side), [&](auto* entries) { store(entries + first); });
    }
    if (!gradients) return;
    fill(moved);
    if (IsCosine(member.job)) {  // As transport_block.cuh's StoreGradient.
      store(member.At<double>(member.job.at.gradient[side]) + k);
    } else {
      WithEntries(GradientOf(member.job, side), [&](auto* entries) { store(entries + first); });
    }
  }

 private:
  __device__ double Point(int64_t i, int k) const { return points[i * dim + k]; }
};

// The thread's rows, `row0` and `row_step` behind it, -1 where there is none, and their masses.
struct OwnRows {
  int64_t rows[2];
  double masses[2];

  __device__ OwnRows(const Member& member, int side, int64_t row0, int row_step) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int64_t i = row0 + row_step * row;
      rows[row] = i < member.job.size[side] ? i : -1;
      masses[row] = rows[row] < 0 ? 0 : member.mass(side)[i] * member.ratio(0, side)[i];
    }
  }
  // Means and gradients at the coordinates k, k + 1, of which these are sums, and points seen from the other centre.
  __device__ void Store(const PointOutputs& outputs, int k, const float (&sum)[2][2],
                        const double (&apart)[2][2]) const {
    outputs.Store(
        outputs.projects, outputs.moves, rows, k,
        [&](int row, int which) { return outputs.Mean(k + which, masses[row], sum[row][which]); },
        [&](int row, int which) { return outputs.Moved(masses[row], sum[row][which], apart[row][which]); });
  }
};

// Stores means and gradients of the thread's rows, and of `parts` parts of kDepth coordinates. All threads of the
// cluster call it.
template <int kAgain, int kColumns>
__device__ inline void StoreSums(const PointSums<kAgain, kColumns> (&sums)[1], const Member& member, int side,
                                 int64_t row0, int row_step, int first_part, int parts, int rank, int ranks) {
  const PointOutputs outputs(member, side);
  const OwnRows own(member, side, row0, row_step);
  const auto load = [&](int coordinate, double(&apart)[2][2]) {
    if (outputs.moves && coordinate < parts * kDepth) {
      outputs.LoadApart(own.rows, first_part * kDepth + coordinate, apart);
    }
  };
  const auto store = [&](int coordinate, const float(&sum)[2][2], const double(&apart)[2][2]) {
    if (coordinate < parts * kDepth) own.Store(outputs, first_part * kDepth + coordinate, sum, apart);
  };
  PointSums<kAgain, kColumns>::Combine(sums, rank, ranks, /*cuts=*/1, load, store);
}
// The same of a block that has all tiles' sums.
template <int kAgain, int kColumns>
__device__ inline void StoreOwnSums(const PointSums<kAgain, kColumns>& sums, const Member& member, int side,
                                    int64_t row0, int row_step, int first_part, int parts) {
  __shared__ double shifts[kAgain * kDepth];
  const PointOutputs outputs(member, side);
  const OwnRows own(member, side, row0, row_step);
  for (int k = threadIdx.x; k < kAgain * kDepth; k += kThreads) {
    shifts[k] = outputs.Shift(min(first_part * kDepth + k, outputs.dim - 1));
  }
  const auto load = [&](int coordinate, double(&point)[2][2]) {
    outputs.LoadPoints(own.rows, first_part * kDepth + coordinate, point);
  };
  const auto store = [&](int coordinate, const float(&sum)[2][2], const double(&point)[2][2]) {
    if (coordinate >= parts * kDepth) return;
    double apart[2][2];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      apart[e / 2][e % 2] = shifts[coordinate + e % 2] + (outputs.is_negative_dot ? 0 : point[e / 2][e % 2]);
    }
    own.Store(outputs, first_part * kDepth + coordinate, sum, apart);
  };
  sums.Own(load, store);
}

// Which part of a launch a block is. Of both sides, blocks of the first come first; each of its blocks of rows is
// `groups` of coordinates for each member, and each of those `ranks` blocks.
struct GradientPlace {
  int side, rank, group, block;
  int64_t member;
};
__device__ inline GradientPlace PlaceOf(const Job& job, int64_t index, Sides sides, int ranks, int groups) {
  const int64_t of_first = sides == Sides::kBoth ? job.count * GradientRowBlocks(job, 0) * groups * ranks : 0;
  const int side = sides == Sides::kFirst || (sides == Sides::kBoth && index < of_first) ? 0 : 1;
  if (side == 1) index -= of_first;
  const int64_t blocks = GradientRowBlocks(job, side) * groups, cluster = index / ranks;
  return {side, static_cast<int>(index % ranks), static_cast<int>(cluster % blocks % groups),
          static_cast<int>(cluster % blocks / groups), cluster / blocks};
}

#endif

// The launch that a side is part of, whose blocks of rows are `groups` of coordinates each.
inline GradientLaunch LaunchOfGroups(const Job& job, int side, int groups, int64_t beside) {
  if (!MakesMeans(job, side)) return {Sides::kNone, 1};
  const int64_t row_blocks[2] = {GradientRowBlocks(job, 0), GradientRowBlocks(job, 1)};
  const bool together =
      MakesMeans(job, 1 - side) && row_blocks[0] <= 2 * row_blocks[1] && row_blocks[1] <= 2 * row_blocks[0];
  if (together && side == 1) return {Sides::kNone, 1};
  const int64_t blocks = row_blocks[side] + (together ? row_blocks[1 - side] : 0);
  const int longer = together ? std::max(job.size[0], job.size[1]) : job.size[1 - side];
  const int ranks = RanksOf(blocks * groups, CeilDiv(longer, kCloudTile), beside);
  return {together ? Sides::kBoth : side == 0 ? Sides::kFirst : Sides::kSecond, ranks};
}
inline int64_t BlocksOfGroups(const Job& job, const GradientLaunch& launch, int groups) {
  const int64_t first = launch.sides == Sides::kSecond ? 0 : GradientRowBlocks(job, 0);
  const int64_t second = launch.sides == Sides::kFirst ? 0 : GradientRowBlocks(job, 1);
  return job.count * (first + second) * groups * launch.ranks * launch.cuts;
}

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_GRADIENT_CUH_
