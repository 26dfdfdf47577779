// Sums of products with right-hand sides, as float64's matrix units leave them in threads of a block with exact tiles
// (transport_exact_tiles.cuh): added up over its warps, then over the blocks of a cluster.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_EXACT_SUMS_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_EXACT_SUMS_CUH_

#include "kernels/cuda/transport_cluster.cuh"
#include "kernels/cuda/transport_hopper.cuh"
#include "kernels/cuda/transport_types.cuh"

namespace sinkhorn {
namespace cuda {

#if SINKHORN_HOPPER

// A thread's sums: of the rows that it has, and the numbers 8 e + 2 (lane % 4) + 0..1 of the chunk.
template <typename Tiles, int kEights>
struct RightSums {
  double products[Tiles::kRows / 2][kEights][4];  // As matrix products leave them: two rows, each two numbers.
  double mass[Tiles::kRows];                      // Of the weights, over its own columns.

  __device__ void Clear() {
#pragma unroll
    for (int r = 0; r < Tiles::kRows; ++r) {
      mass[r] = 0;
#pragma unroll
      for (int e = 0; e < kEights; ++e) products[r / 2][e][r % 2 * 2] = products[r / 2][e][r % 2 * 2 + 1] = 0;
    }
  }
};

// What blocks leave each other.
template <int kEights>
struct SharedSums {
  double products[kTile][8 * kEights + 1];
  double mass[kTile];
};

// Of the block's warps, to shared memory.
template <typename Tiles, int kEights>
__device__ void AddUp(const RightSums<Tiles, kEights>& own, SharedSums<kEights>* shared) {
  const int lane = threadIdx.x % 32;
  for (int group = 0; group < Tiles::kGroups; ++group) {
    if (Tiles::Group() == group) {
#pragma unroll
      for (int r = 0; r < Tiles::kRows; ++r) {
        const int row = Tiles::Row(r);
        double mass = own.mass[r];
        for (int other = 1; other <= 2; other *= 2) mass += __shfl_xor_sync(0xffffffffu, mass, other);
        if (lane % 4 == 0) shared->mass[row] = group == 0 ? mass : shared->mass[row] + mass;
#pragma unroll
        for (int e = 0; e < kEights; ++e) {
#pragma unroll
          for (int q = 0; q < 2; ++q) {
            double* to = &shared->products[row][8 * e + 2 * (lane % 4) + q];
            const double value = own.products[r / 2][e][r % 2 * 2 + q];
            *to = group == 0 ? value : *to + value;
          }
        }
      }
    }
    __syncthreads();
  }
}

// store(row, k, value, mass) of the cluster's sums, of so many rows and numbers; each of its blocks has a share of the
// rows. All threads.
template <int kEights, typename Store>
__device__ void EachSum(SharedSums<kEights>* shared, int rank, int ranks, int row_count, int width, Store store) {
  constexpr int kWidth = 8 * kEights;
  if (ranks > 1) SyncCluster();
  const int rows = kTile / ranks;
  for (int e = threadIdx.x; e < rows * kWidth; e += blockDim.x) {
    const int row = rank * rows + e / kWidth, k = e % kWidth;
    if (row >= row_count || k >= width) continue;
    double value = 0, mass = 0;
    for (int other = 0; other < ranks; ++other) {
      value += ranks > 1 ? LoadRemote(&shared->products[row][k], other) : shared->products[row][k];
      mass += ranks > 1 ? LoadRemote(&shared->mass[row], other) : shared->mass[row];
    }
    store(row, k, value, mass);
  }
  if (ranks > 1) SyncCluster();  // What others have is read.
}

#endif

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_EXACT_SUMS_CUH_
