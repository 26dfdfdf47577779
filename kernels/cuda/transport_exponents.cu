// Exponents of clouds to memory, where transport_stream.cu reads them in every iteration from then on (Hopper).
//
// They are kept in the frame of the potentials that an iteration has left: z_ij + (phi_i + phi_j) s, which is near zero
// wherever the plan has mass. There a half says them as well as FAST's products are (its error, |exponent| / 4,096, is
// of densities that are 2^exponent of the largest), and later potentials add what they have moved by.
#include "kernels/cuda/transport_cloud_stream.cuh"
#include "kernels/cuda/transport_launch.h"

namespace sinkhorn {
namespace cuda {
namespace {

#if SINKHORN_HOPPER

// The exponents of a thread's columns in a row, as fragments: pair_of(k) are those of columns 8 k + 2 lane + 0..1,
// `lane` being the thread's place among four. All threads call it; of rows that are not `there` nothing is stored.
template <typename Pair>
__device__ inline void StoreRow(float* row, int lane, Pair pair_of, bool there) {
  if (!there) return;
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    *reinterpret_cast<float2*>(row + 8 * k + 2 * lane) = pair_of(k);
  }
}
// The same, of which each thread stores eight columns side by side: four threads exchange what they have of them.
template <typename Pair>
__device__ inline void StoreRow(__half* row, int lane, Pair pair_of, bool there) {
#pragma unroll
  for (int first = 0; first < 16; first += 4) {
    uint32_t pair[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const __half2 halves = __float22half2_rn(pair_of(first + k));
      pair[k] = reinterpret_cast<const uint32_t&>(halves);
    }
    // Thread t has columns k of its own; afterwards columns t of thread k.
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
      const bool upper = (lane & step) != 0;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (k & step) continue;
        const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? pair[k] : pair[k + step], step);
        if (upper) {
          pair[k] = other;
        } else {
          pair[k + step] = other;
        }
      }
    }
    if (there) *reinterpret_cast<uint4*>(row + 8 * (first + lane)) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
  }
}

// What a column adds to exponents; of those that only fill the last tile, what makes densities nothing.
__device__ inline float ColumnFrame(const CloudContext& c, int j) {
  return j < c.columns ? static_cast<float>((c.phi[j] - c.reference) * c.scale) : static_cast<float>(kVoid);
}

#endif

template <int kPlanes, Parts kParts>
__global__ void __launch_bounds__(kCloudThreads, 1) ExponentKernel(LaunchTable table) {
#if SINKHORN_HOPPER
  using T = std::conditional_t<kPlanes == 1, __half, float>;
  constexpr int kStages = StagesOf(kPlanes, kParts, kGroups);
  __shared__ CloudContext c;
  __shared__ float terms[kGroups][2][kCloudTile];
  __shared__ alignas(8) uint64_t full[kStages], empty[kStages];
  using Columns = Stream<kPlanes, kParts, kGroups>;
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const RowBlock block = FindRowBlock(job, work.block, 0, 1, Geometry::kCloud);
  const Member member{job, block.member};
  AwaitKernelBefore();
  EngineState* state = member.state(0);
  if (state->mode != kFloat) return;
  if (threadIdx.x == 0) {
    FillShape(member, block, 0, Pass::kMeasure, &c);
    FillState(member, &c);
    Columns::Init(full, empty);
    if (block.block == 0 && block.split == 0) state->kept = 1;
  }
  __syncthreads();
  Columns stream(c, full, empty);
  stream.Begin();
  // 1. The frame.
  const int group = threadIdx.x / 128, column = threadIdx.x % 128;
  const int row0 = c.first_row + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  if (block.split == 0 && threadIdx.x < kCloudRows && c.IsRow(threadIdx.x)) {
    const int i = c.first_row + threadIdx.x;
    member.At<double>(job.at.frame[0])[i] = c.own_phi[i];
  }
  if (block.block == 0) {
    const int last = min(c.last_tile * kCloudTile, c.columns);
    for (int j = c.first_tile * kCloudTile + threadIdx.x; j < last; j += kCloudThreads) {
      member.At<double>(job.at.frame[1])[j] = c.phi[j];
    }
  }
  float own[2];
  for (int row = 0; row < 2; ++row) {
    own[row] = static_cast<float>((c.own_phi[min(row0 + 8 * row, c.rows - 1)] + c.reference) * c.scale);
  }
  // 2. Exponents, tile by tile.
  const int64_t stride = StreamColumns(job);
  T* const out = member.At<T>(job.at.exponents) + row0 * stride;
  terms[group][0][column] = ColumnFrame(c, c.first_tile * kCloudTile + column);
  for (int tile = c.first_tile, parity = 0; tile < c.last_tile; ++tile, parity ^= 1) {
    const float next = ColumnFrame(c, (tile + 1) * kCloudTile + column);
    float acc[16][4];
    for (int d = 0; d < (kParts == Parts::kOne ? 1 : c.depths); ++d) stream.Multiply(acc);
    WaitForTerms();
    const float2* mine = reinterpret_cast<const float2*>(terms[group][parity]) + threadIdx.x % 4;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const auto pair_of = [&](int j) {
        const float2 term = mine[4 * j];
        return make_float2(fmaf(acc[j][2 * row], c.factor, term.x) + own[row],
                           fmaf(acc[j][2 * row + 1], c.factor, term.y) + own[row]);
      };
      StoreRow(out + 8 * row * stride + tile * kCloudTile, threadIdx.x % 4, pair_of, row0 + 8 * row < c.rows);
    }
    terms[group][parity ^ 1][column] = next;
  }
#endif
}

}  // namespace

void LaunchExponents(const LaunchTable& table, int64_t blocks, int planes, int dim, cudaStream_t stream) {
  const Parts parts = PartsOf(planes, dim);
  const auto launch = [&](void (*kernel)(LaunchTable)) {
    LaunchStreaming(kernel, blocks, planes, dim, true, stream, table);
  };
  switch (parts) {
    case Parts::kOne:
      return launch(planes == 2 ? ExponentKernel<2, Parts::kOne> : ExponentKernel<1, Parts::kOne>);
    case Parts::kFew:
      return launch(planes == 2 ? ExponentKernel<2, Parts::kFew> : ExponentKernel<1, Parts::kFew>);
    case Parts::kMany:
      return launch(planes == 2 ? ExponentKernel<2, Parts::kMany> : ExponentKernel<1, Parts::kMany>);
  }
}

}  // namespace cuda
}  // namespace sinkhorn
