// A block's sums of the other cloud's points over tiles of it, in float32, on Hopper's matrix units: a tile of
// exponents is made as in the half steps; each row's densities, divided by its sum, become matrix fragments as sums of
// two halves, and are multiplied by the tile's points, part by part. Products of a tile are added up in the matrix
// units, those of all tiles in float32.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_GRADIENT_SUMS_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_GRADIENT_SUMS_CUH_

#include "kernels/cuda/transport_cloud_stream.cuh"
#include "kernels/cuda/transport_gradient.cuh"

namespace sinkhorn {
namespace cuda {

// Parts of the coordinates that a block has at most.
__host__ __device__ constexpr int AgainOf(Parts parts) {
  return parts == Parts::kOne ? 1 : parts == Parts::kFew ? 2 : 3;
}

// Pieces of a tile, made one after the other, and blocks that a multiprocessor has at once: of up to 16 coordinates
// exponentials are all that takes time, and four warps a scheduler, with half the registers, do them sooner.
__host__ __device__ constexpr int PiecesOf(Parts parts, int columns) {
  return parts == Parts::kOne && columns == 16 ? 2 : 1;
}

#if SINKHORN_HOPPER

// Tiles whose columns' terms a block has at once. Float64, in which they are made, waits until the matrix units are
// idle: of one part, where registers have room for a loop inside the tiles', many are made at a time.
constexpr int TermTiles(Parts parts) { return parts == Parts::kOne ? 32 : 2 * kGradientGroups; }

// A thread's part of a pass: the rows' sums of the other cloud's points over this block's tiles; kTiles 2: of either of
// two.
template <int kPlanes, Parts kParts, int kColumns, int kTiles>
struct Sums {
  static constexpr int kAgain = AgainOf(kParts);
  using Columns = Stream<kPlanes, kParts, kGradientGroups, kAgain>;
  using Rows = PointSums<kAgain, kColumns>;

  Rows rows[kTiles];

  // Times 2^kDensityBits, the points' scale and `weight`. `other_rows`: the stream has had others before.
  __device__ void Add(const CloudContext& c, const float (&level)[2], const float (&weight)[2], int first_part,
                      float (&terms)[TermTiles(kParts)][kCloudTile], Columns* stream, bool other_rows = false) {
    const int column = threadIdx.x % 128;
    stream->Begin(first_part, kAgain, other_rows);
    float sums[kColumns / 8][4];
    const auto load = [&](int tile) { return c.LoadTerm(tile * kCloudTile + column); };
    const auto store = [&](int slot, const ColumnTerm& of) { terms[slot][column] = c.TermOf(of); };
    constexpr int kPieces = PiecesOf(kParts, kColumns), kEights = 16 / kPieces;
    uint32_t high[kEights / 2][4], low[kEights / 2][4];
    const auto split = [&](const float(&acc)[kEights][4], const float* terms) {
      EachFragment(c.factor, acc, terms, level, [&](int k, const auto& h, const auto& l) {
#pragma unroll
        for (int e = 0; e < 4; ++e) high[k][e] = h[e], low[k][e] = l[e];
      });
    };
    if constexpr (kParts == Parts::kOne) {
      constexpr int kSlots = TermTiles(kParts);
      const auto terms_from = [&](int tile) {
        const int count = min(kSlots, c.last_tile - tile);
        __syncthreads();  // What is there has been read.
#pragma unroll 8
        for (int k = threadIdx.x / 128; k < count; k += kGradientGroups) store(k, load(tile + k));
        __syncthreads();
      };
      const auto end = [&] {
        if (kTiles > 1) {  // The tile before goes to the other.
          rows[0] = rows[kTiles - 1];
          rows[kTiles - 1] = {};
        }
        AddSums<kColumns>(weight, sums, rows[kTiles - 1].total[0]);
      };
      if (c.first_tile == c.last_tile) return;
      terms_from(c.first_tile);
      float acc[kEights][4];
      if constexpr (kPieces == 1) stream->template MultiplyFirst<kColumns / 16>(acc);
#pragma unroll 1
      for (int tile = c.first_tile, slot = 0;; ++tile) {
        if constexpr (kPieces == 1) {
          split(acc, terms[slot]);
          const uint64_t points = PointsAt<kColumns>(stream->Again());
          const auto begin = [&] { CommitSums<kPlanes, kColumns>(high, low, points, /*add=*/false, sums); };
          stream->template MultiplyNext<kColumns / 16>(begin, end, acc);
        } else {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            stream->template MultiplyHalf<kColumns / 16>(half, acc);
            split(acc, terms[slot] + half * kCloudTile / 2);
            const uint64_t points =
                PointsAt<kColumns>(stream->Again() + half * kCloudTile / 2 * CloudRowBytes(kColumns));
            BeginProducts();
            CommitSums<kPlanes, kColumns>(high, low, points, /*add=*/half > 0, sums);
            WaitForProducts<0>();
          }
          end();
          stream->Release();
        }
        if (tile + 1 == c.last_tile) break;
        if (++slot == kSlots) {
          slot = 0;
          terms_from(tile + 1);
        }
      }
    } else {
      EachTile(c, stream, load(c.first_tile), load, store, [&](float(&acc)[16][4], int slot, int /*tile*/) {
        split(acc, terms[slot]);
#pragma unroll
        for (int part = 0; part < kAgain; ++part) {
          AddProducts<kPlanes, kColumns>(high, low, stream->Again(), weight, sums, rows[0].total[part]);
          stream->Release();
        }
      });
    }
  }
};

// What exponents of row i get so that its densities are divided by their sum, and the mass that the plan has there.
struct RowLevel {
  float level;
  double mass;
};
__device__ inline RowLevel LevelOf(const Member& member, const CloudContext& c, int engine, int side, int i) {
  if (i >= c.rows) return {DensityLevel(c, c.own_phi[c.rows - 1] + c.reference, 0), 0};
  const double ratio = member.ratio(engine, side)[i];
  return {DensityLevel(c, c.own_phi[i] + c.reference, ratio), member.mass(MeasureOf(engine, side))[i] * ratio};
}

#endif

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_GRADIENT_SUMS_CUH_
