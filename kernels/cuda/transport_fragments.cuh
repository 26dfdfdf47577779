// A tile's entries, as matrix fragments of halves, times what its columns have in shared memory (Hopper).
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_FRAGMENTS_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_FRAGMENTS_CUH_

#include "kernels/cuda/transport_cloud.cuh"
#include "kernels/cuda/transport_hopper.cuh"

namespace sinkhorn {
namespace cuda {

// The nearest halves.
__device__ inline uint32_t PackHalves(float x, float y) {
  const __half2 halves = __floats2half2_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&halves);
}
// Two numbers as sums of two halves each.
template <uint32_t (*kPack)(float, float) = PackHalves>
__device__ inline void Split(float x, float y, uint32_t* high, uint32_t* low) {
  *high = kPack(x, y);
  const float2 back = __half22float2(*reinterpret_cast<const __half2*>(high));
  *low = kPack(x - back.x, y - back.y);
}

#if SINKHORN_HOPPER

// The nearest finite halves.
__device__ inline uint32_t PackFinite(float x, float y) {
  uint32_t halves;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(y), "f"(x));
  return halves;
}

// sums (+)= entries of 16 kCount columns * their points (or steps), at `columns` in shared memory: begun, as a group of
// products. kRows: of a plane.
template <int kPlanes, int kColumns, int kRows = kCloudTile, int kCount>
__device__ inline void CommitSums(const uint32_t (&high)[kCount][4], const uint32_t (&low)[kCount][4], uint64_t columns,
                                  bool add, float (&sums)[kColumns / 8][4]) {
  constexpr int kRowBytes = 2 * kColumns;                            // As CloudRowBytes.
  constexpr int kPlane = kRows * kRowBytes / 16, kStep = kRowBytes;  // 16 rows of them, in units of 16 bytes.
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    MultiplyRows<kColumns>(low[k], columns + k * kStep, k > 0 || add, sums);
    if (kPlanes == 2) MultiplyRows<kColumns>(high[k], columns + kPlane + k * kStep, true, sums);
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) MultiplyRows<kColumns>(high[k], columns + k * kStep, true, sums);
  CommitProducts();
}
template <int kColumns>
__device__ inline uint64_t PointsAt(uint32_t columns) {
  return MatrixAt(OfWarp(columns), 2 * kColumns);
}
// total += weight * sums.
template <int kColumns>
__device__ inline void AddSums(const float (&weight)[2], const float (&sums)[kColumns / 8][4],
                               float (&total)[kColumns / 8][4]) {
#pragma unroll
  for (int e = 0; e < kColumns / 2; ++e) {
    total[e / 4][e % 4] = fmaf(sums[e / 4][e % 4], weight[e % 4 / 2], total[e / 4][e % 4]);
  }
}

// Both. `sums`: registers for this alone, of all calls the same.
template <int kPlanes, int kColumns>
__device__ inline void AddProducts(const uint32_t (&high)[8][4], const uint32_t (&low)[8][4], uint32_t columns,
                                   const float (&weight)[2], float (&sums)[kColumns / 8][4],
                                   float (&total)[kColumns / 8][4]) {
  const uint64_t points = PointsAt<kColumns>(columns);
  BeginProducts();
  CommitSums<kPlanes, kColumns>(high, low, points, /*add=*/false, sums);
  WaitForProducts<0>();
  AddSums<kColumns>(weight, sums, total);
}

#endif

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_FRAGMENTS_CUH_
