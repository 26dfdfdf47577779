// What threads of an emulated block do together, and what ends the process.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/launch.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

__global__ void SumsOfBlocks(const int* values, int* sums) {
  __shared__ int parts[4];
  int sum = values[blockIdx.x * blockDim.x + threadIdx.x];
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) sums[blockIdx.x] = parts[0] + parts[1] + parts[2] + parts[3];
}

TEST(EmulatedBlock, SharedMemoryBarriersAndShuffles) {
  std::vector<int> values(3 * 128), sums(3), expected(3);
  for (int i = 0; i < 3 * 128; ++i) expected[i / 128] += values[i] = i * i % 101;
  LaunchKernel(SumsOfBlocks, 3, 128, 0, nullptr, values.data(), sums.data());
  EXPECT_EQ(sums, expected);
}

// Lanes that have ended are not waited for; halves of a warp that go apart meet by themselves.
__global__ void Votes(unsigned* out) {
  const unsigned lane = threadIdx.x;
  if (lane == 31) return;
  out[lane] = __ballot_sync(0xffffffffu, lane % 3 == 0);
  const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  for (unsigned k = 0; k < (lane < 16 ? 3u : 1u); ++k) out[32 + lane] = __reduce_max_sync(half, lane ^ k);
  out[64 + lane] = static_cast<unsigned>(__syncthreads_or(lane == 7)) + 2 * __syncthreads_and(lane != 7);
}

TEST(EmulatedBlock, VotesOfThoseWhoAreThere) {
  unsigned out[96] = {};
  LaunchKernel(Votes, 1, 32, 0, nullptr, &out[0]);
  for (unsigned lane = 0; lane < 31; ++lane) {
    EXPECT_EQ(out[lane], 0x49249249u & 0x7fffffffu) << lane;
    EXPECT_EQ(out[32 + lane], lane < 16 ? 15u : 30u) << lane;
    EXPECT_EQ(out[64 + lane], 1u) << lane;
  }
}

__global__ void Product(const __half* a, const __half* b, float* c) {
  alignas(16) __shared__ __half left[16][16];
  const int lane = threadIdx.x, row = lane / 4, pair = 2 * (lane % 4);
  for (int i = lane; i < 256; i += 32) left[i / 16][i % 16] = a[i];
  __syncwarp();
  uint32_t fragments[4];
  LoadMatrices(&left[lane % 16][lane / 16 * 8], fragments);
  const auto two = [&](int k) { return uint32_t{b[k * 8 + row].bits} | uint32_t{b[(k + 1) * 8 + row].bits} << 16; };
  float sums[4] = {1, 1, 1, 1};
  MultiplyHalves(fragments, two(pair), two(pair + 8), sums);
  for (int q = 0; q < 4; ++q) c[(row + 8 * (q / 2)) * 8 + pair + q % 2] = sums[q];
}

TEST(EmulatedBlock, ProductsOfMatrices) {
  std::vector<__half> a, b;
  for (int i = 0; i < 256; ++i) a.push_back(__float2half_rn(static_cast<float>(i * 7 % 23 - 11)));
  for (int i = 0; i < 128; ++i) b.push_back(__float2half_rn(static_cast<float>(i * 5 % 17 - 8)));
  std::vector<float> c(128);
  LaunchKernel(Product, 1, 32, 0, nullptr, a.data(), b.data(), c.data());
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 8; ++j) {
      float sum = 1;
      for (int k = 0; k < 16; ++k) sum += __half2float(a[i * 16 + k]) * __half2float(b[k * 8 + j]);
      EXPECT_EQ(c[i * 8 + j], sum) << i << ", " << j;
    }
  }
}

__global__ void Unwritten(bool* found) { *found = isnan(reinterpret_cast<const float*>(DynamicShared())[threadIdx.x]); }

TEST(EmulatedBlock, DynamicSharedMemoryBeginsAsNotANumber) {
  bool found = false;
  LaunchKernel(Unwritten, 1, 1, 64, nullptr, &found);
  EXPECT_TRUE(found);
}

__global__ void WaitInVain() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    SyncSome<96>(1);
  }
}
__global__ void WaitInTwoPlaces() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void MeetForTwoThings() {
  if (threadIdx.x == 0) {
    (void)__ballot_sync(0xffffffffu, 1);
  } else {
    __syncwarp();
  }
}

TEST(EmulatedBlockDeathTest, ThreadsThatWouldWaitForever) {
  EXPECT_DEATH(LaunchKernel(WaitInVain, 1, 64, 0, nullptr), "all threads wait for each other");
  EXPECT_DEATH(LaunchKernel(WaitInTwoPlaces, 1, 64, 0, nullptr), "threads of a block wait at different places");
  EXPECT_DEATH(LaunchKernel(MeetForTwoThings, 1, 32, 0, nullptr), "lanes of a warp meet for different things");
  EXPECT_DEATH(LaunchKernel(WaitInVain, 1, 2048, 0, nullptr), "no block may be so large");
}

__global__ void WriteByte(int at) { DynamicShared()[at] = 0; }

TEST(EmulatedBlockDeathTest, WritesBehindSharedMemory) {
  LaunchKernel(WriteByte, 1, 32, 64, nullptr, 63);
  EXPECT_DEATH(LaunchKernel(WriteByte, 1, 32, 64, nullptr, 64), "written behind the block's shared memory");
}

TEST(EmulatedBlock, ALaunchWithTooMuchSharedMemoryIsRefused) {
  LaunchKernel(WaitInVain, 1, 64, 200 << 10, nullptr);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);  // Which may have forgotten it.
  EXPECT_EQ(TakeLaunchError(), cudaErrorInvalidValue);
  EXPECT_EQ(TakeLaunchError(), cudaSuccess);
}

}  // namespace
}  // namespace cuda
}  // namespace sinkhorn
