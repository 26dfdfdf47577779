// A block's way through the tiles of a bent plan on Hopper's matrix units (transport_hessian_matrix.cu).
//
// Of each tile of columns points and steps are in shared memory: products with the rows' make exponents, as in the half
// steps, and D. Densities and bent ones become matrix fragments as sums of two halves and are multiplied by the tile's
// steps and points.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_HESSIAN_MATRIX_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_HESSIAN_MATRIX_CUH_

#include "kernels/cuda/transport_cloud.cuh"
#include "kernels/cuda/transport_cloud_stream.cuh"
#include "kernels/cuda/transport_fragments.cuh"
#include "kernels/cuda/transport_hessian.cuh"
#include "kernels/cuda/transport_hopper.cuh"

namespace sinkhorn {
namespace cuda {

constexpr int kMatrixRows = 128;  // Two warpgroups of 64.

#if SINKHORN_HOPPER

constexpr float kDensityBits = 14;  // Densities, at most about 1, are multiplied by 2^14: halves keep small ones.

// Of a tile's columns: what they add to exponents, dg, and weights of squares. Two tiles in turn.
using ColumnNumbers = float[2][3][kCloudTile];

// A block's rows against its tiles of one engine's plan, for one direction. kColumns: coordinates, padding included.
template <int kPlanes, int kColumns>
class Bends {
 public:
  // All threads; `full`: barriers of this pass alone.
  __device__ Bends(const Member& member, const CloudContext& c, const ProductVectors& v, int side, int64_t q,
                   bool squared, bool bent, ColumnNumbers& numbers, uint64_t (&full)[2])
      : c_(c), numbers_(numbers), full_(full) {
    const Job& job = member.job;
    const int engine = c.block.engine, other = MeasureOf(engine, 1 - side);
    tile_bytes_ = kPlanes * c.plane_bytes;
    base_ = (SharedAddress(DynamicShared()) + kPlaneAlignment - 1) / kPlaneAlignment * kPlaneAlignment;
    steps_ = StepHalvesOf(member, other, q);
    own_steps_ = StepHalvesOf(member, MeasureOf(engine, side), q);
    potential_ = bent ? v.potential(1 - side, q) : nullptr;
    weight_ = squared ? v.inverse(0) : nullptr;
    const double point_scale = member.state(0)->point_scale, step_scale = StepScales(member)[q];
    bend_factor_ = static_cast<float>(-2 * job.in.kappa / (point_scale * step_scale));
    const int row0 = c.block.block * kMatrixRows + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int i = row0 + 8 * row;
      const bool there = i < c.rows;
      const double ratio = there ? member.ratio(engine, side)[i] : 0;
      const double level = ratio > 0 ? (c.own_phi[i] + c.reference) * c.scale - log2(ratio) : kVoid;
      level_[row] = static_cast<float>(level);
      own_potential_[row] = bent && there ? static_cast<float>(v.potential(side, q)[i]) : 0;
      mass[row] = ratio > 0 ? member.mass(MeasureOf(engine, side))[i] * ratio * exp2(level - level_[row]) : 0;
    }
  }

  // visit(densities, bent ones, columns' numbers, points, steps) of every tile; the last two in shared memory.
  template <typename Visit>
  __device__ void ForEachTile(Visit visit) {
    if (threadIdx.x == 0) {
      for (int tile = c_.first_tile; tile < min(c_.first_tile + 2, c_.last_tile); ++tile) Copy(tile);
    }
    Numbers next = Load(c_.first_tile);
    for (int tile = c_.first_tile; tile < c_.last_tile; ++tile) {
      const int stage = (tile - c_.first_tile) % 2;
      Store(stage, next);
      next = Load(tile + 1);
      float p[16][4], w[16][4];
      WaitForPhase(&full_[stage], (tile - c_.first_tile) / 2 & 1);
      const uint32_t points = base_ + (2 + 2 * stage) * tile_bytes_, steps = points + tile_bytes_;
      const uint32_t group = threadIdx.x / 128 * 64 * c_.row_bytes, mine = base_ + group, moves = mine + tile_bytes_;
      BeginProducts();
      Multiply(mine, points, false, p);
      Multiply(moves, points, false, w);
      Multiply(mine, steps, true, w);
      CommitProducts();
      WaitForProducts<0>();
      __syncthreads();  // The numbers are there.
      Make(numbers_[stage], p, w);
      visit(p, w, numbers_[stage], points, steps);
      __syncthreads();  // The tile has been read.
      if (threadIdx.x == 0 && tile + 2 < c_.last_tile) Copy(tile + 2);
    }
  }

  double mass[2];  // What a row's densities have to be multiplied with.

 private:
  struct Numbers {
    float term, potential, weight;
  };

  __device__ Numbers Load(int tile) const {
    const int j = tile * kCloudTile + threadIdx.x;
    Numbers n = {0, 0, 0};
    if (threadIdx.x >= kCloudTile) return n;
    n.term = c_.TermOf(c_.LoadTerm(j));
    if (potential_ != nullptr && j < c_.columns) n.potential = static_cast<float>(potential_[j]);
    if (weight_ != nullptr && j < c_.columns) n.weight = static_cast<float>(weight_[j]);
    return n;
  }
  __device__ void Store(int stage, const Numbers& n) {
    if (threadIdx.x >= kCloudTile) return;
    numbers_[stage][0][threadIdx.x] = n.term;
    numbers_[stage][1][threadIdx.x] = n.potential;
    numbers_[stage][2][threadIdx.x] = n.weight;
  }

  // By one thread. The first tile's come with the rows'.
  __device__ void Copy(int tile) {
    const int stage = (tile - c_.first_tile) % 2;
    const uint32_t to = base_ + (2 + 2 * stage) * tile_bytes_;
    const bool rows = tile == c_.first_tile;
    ArriveExpecting(&full_[stage], (rows ? 4 : 2) * tile_bytes_);
    CopyBulk(to, c_.ColumnTile(tile, 0, kPlanes), tile_bytes_, &full_[stage]);
    CopyBulk(to + tile_bytes_, steps_ + int64_t{tile} * tile_bytes_, tile_bytes_, &full_[stage]);
    if (!rows) return;
    CopyBulk(base_, c_.RowTile(c_.block.block, 0, kPlanes), tile_bytes_, &full_[stage]);
    CopyBulk(base_ + tile_bytes_, own_steps_ + int64_t{c_.block.block} * tile_bytes_, tile_bytes_, &full_[stage]);
  }

  __device__ void Multiply(uint32_t rows, uint32_t columns, bool add, float (&acc)[16][4]) const {
    constexpr int kRowBytes = 2 * kColumns, kPlane = kCloudTile * kRowBytes / 16;  // As CloudRowBytes.
    const uint64_t a = MatrixAt(OfWarp(rows), kRowBytes), b = MatrixAt(OfWarp(columns), kRowBytes);
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k) {
#pragma unroll
      for (int product = kFirstProduct<kPlanes>; product < 3; ++product) {
        MultiplyGroup(a + RowPlane(product) * kPlane + 2 * k, b + ColumnPlane(product) * kPlane + 2 * k,
                      add || k > 0 || product > kFirstProduct<kPlanes>, acc);
      }
    }
  }

  // Products to densities and bent ones.
  __device__ void Make(const float (&numbers)[3][kCloudTile], float (&p)[16][4], float (&w)[16][4]) const {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int at = threadIdx.x % 4 + 4 * j;
      const float2 term = reinterpret_cast<const float2*>(numbers[0])[at];
      const float2 potential = reinterpret_cast<const float2*>(numbers[1])[at];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = e / 2;
        p[j][e] = FastExp2(fmaf(p[j][e], c_.factor, e % 2 == 0 ? term.x : term.y) + level_[row]);
        const float bend = fmaf(w[j][e], bend_factor_, -own_potential_[row]);
        w[j][e] = p[j][e] * (bend - (e % 2 == 0 ? potential.x : potential.y));
      }
    }
  }

  const CloudContext& c_;
  ColumnNumbers& numbers_;
  uint64_t (&full_)[2];
  uint32_t base_;
  int tile_bytes_;
  const char *steps_, *own_steps_;
  const double *potential_, *weight_;
  float bend_factor_, level_[2], own_potential_[2];
};

// total += weight * (entries * 2^kDensityBits * scale as halves) * the tile's columns.
template <int kPlanes, int kColumns>
__device__ inline void AddMatrix(const float (&entries)[16][4], float scale, uint32_t columns, const float (&weight)[2],
                                 float (&total)[kColumns / 8][4]) {
  uint32_t high[8][4], low[8][4];
  float sums[kColumns / 8][4];
#pragma unroll
  for (int j = 0; j < 16; ++j) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      Split(entries[j][2 * row] * scale, entries[j][2 * row + 1] * scale, &high[j / 2][j % 2 * 2 + row],
            &low[j / 2][j % 2 * 2 + row]);
    }
  }
  AddProducts<kPlanes, kColumns>(high, low, columns, weight, sums, total);
}

#endif

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_HESSIAN_MATRIX_CUH_
