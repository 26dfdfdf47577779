// A tile's entries, as matrix fragments of halves, times what its columns have in shared memory (Hopper).
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_FRAGMENTS_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_FRAGMENTS_CUH_

#include "kernels/cuda/transport_cloud.cuh"
#include "kernels/cuda/transport_hopper.cuh"

namespace sinkhorn {
namespace cuda {

// Two numbers as sums of two halves each.
__device__ inline void Split(float x, float y, uint32_t* high, uint32_t* low) {
  const __half2 h = __floats2half2_rn(x, y);
  const float2 back = __half22float2(h);
  const __half2 l = __floats2half2_rn(x - back.x, y - back.y);
  *high = *reinterpret_cast<const uint32_t*>(&h);
  *low = *reinterpret_cast<const uint32_t*>(&l);
}

#if SINKHORN_HOPPER

// total += weight * entries * the columns' points (or steps), at `columns` in shared memory. `sums`: registers for this
// alone, of all calls the same.
template <int kPlanes, int kColumns>
__device__ inline void AddProducts(const uint32_t (&high)[8][4], const uint32_t (&low)[8][4], uint32_t columns,
                                   const float (&weight)[2], float (&sums)[kColumns / 8][4],
                                   float (&total)[kColumns / 8][4]) {
  constexpr int kRowBytes = 2 * kColumns;                                 // As CloudRowBytes.
  constexpr int kPlane = kCloudTile * kRowBytes / 16, kStep = kRowBytes;  // 16 rows of them, in units of 16 bytes.
  const uint64_t first = MatrixAt(OfWarp(columns), kRowBytes);
  BeginProducts();
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    MultiplyRows<kColumns>(low[k], first + k * kStep, k > 0, sums);
    if (kPlanes == 2) MultiplyRows<kColumns>(high[k], first + kPlane + k * kStep, true, sums);
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) MultiplyRows<kColumns>(high[k], first + k * kStep, true, sums);
  CommitProducts();
  WaitForProducts<0>();
#pragma unroll
  for (int e = 0; e < kColumns / 2; ++e) {
    total[e / 4][e % 4] = fmaf(sums[e / 4][e % 4], weight[e % 4 / 2], total[e / 4][e % 4]);
  }
}

#endif

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_FRAGMENTS_CUH_
