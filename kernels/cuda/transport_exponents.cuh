// Exponents of clouds to memory, where sweeps read them in every iteration from then on (Hopper); for loops of FAST
// (transport_stream_loop.cu) 2 to the power of them, unless the first iteration has left those
// (transport_first_columns.cu).
//
// They are kept in the frame of the potentials that an iteration has left: z_ij + (phi_i + phi_j) s, which is near zero
// wherever the plan has mass. There a half says them as well as FAST's products are (its error, |exponent| / 4,096, is
// of densities that are 2^exponent of the largest), and later potentials add what they have moved by. Without such a
// frame a float would lack digits where epsilon is small, and the first sums be far from 1.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_EXPONENTS_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_EXPONENTS_CUH_

#include "kernels/cuda/transport_cloud_step.cuh"
#include "kernels/cuda/transport_stream.cuh"

namespace sinkhorn {
namespace cuda {

#if SINKHORN_HOPPER

// Eight rows of a warp on their way to memory, some columns at a time: threads have them as fragments, 32 or 64 bytes
// side by side; by 128 memory is written as fast as it can be.
template <typename T>
struct RowStaging {
  static constexpr int kColumns = 128 / sizeof(T);
  static constexpr int kRowBytes = 128 + (sizeof(T) == 4 ? 32 : 16);  // Rows meet in no bank.
  alignas(16) char bytes[8][kRowBytes];
};
__device__ inline void StorePair(float* to, float2 pair) { *reinterpret_cast<float2*>(to) = pair; }
__device__ inline void StorePair(Density* to, float2 pair) {
  *reinterpret_cast<uint32_t*>(to) = DensityPair::Pack(FastExp2(pair.x), FastExp2(pair.y));
}
__device__ inline void StorePair(__half* to, float2 pair) { *reinterpret_cast<__half2*>(to) = __float22half2_rn(pair); }
// pair_of(k): columns 8 k + 2 (lane % 4) + 0..1 of row lane / 4, of a tile whose first row is at `out`. All of the warp
// call it; of the eight rows as many are stored as there are.
template <typename T, typename Pair>
__device__ inline void StoreRows(RowStaging<T>* staging, T* out, int64_t stride, int rows, Pair pair_of) {
  const int lane = threadIdx.x % 32;
  T* mine = reinterpret_cast<T*>(staging->bytes[lane / 4]) + 2 * (lane % 4);
#pragma unroll
  for (int first = 0; first < 16; first += RowStaging<T>::kColumns / 8) {
    __syncwarp();  // What is there has been stored.
#pragma unroll
    for (int k = 0; k < RowStaging<T>::kColumns / 8; ++k) StorePair(mine + 8 * k, pair_of(first + k));
    __syncwarp();
#pragma unroll
    for (int row = lane / 8; row < 8; row += 4) {
      const uint4 part = *reinterpret_cast<const uint4*>(staging->bytes[row] + lane % 8 * sizeof(uint4));
      if (row < rows) reinterpret_cast<uint4*>(out + row * stride + 8 * first)[lane % 8] = part;
    }
  }
}

// What a column adds to exponents, from its potential; of those that only fill the last tile, what makes densities
// nothing.
__device__ inline float ColumnFrame(const CloudContext& c, double phi) {
  return static_cast<float>(phi <= kVoid ? kVoid : (phi - c.reference) * c.scale);
}

// What a tile's column adds.
template <typename Cost>
struct ExponentColumn {
  double phi;
  typename Cost::Column of_cost;
};

#endif

// T: float, of FAST __half or Density. Cost: as CloudStepKernel's.
template <int kPlanes, Parts kParts, typename T, typename Cost>
__global__ void __launch_bounds__(kCloudThreads, 1) ExponentKernel(LaunchTable table) {
#if SINKHORN_HOPPER
  constexpr int kStages = StagesOf(kPlanes, kParts, kGroups);
  __shared__ CloudContext c;
  __shared__ float terms[SlotsOf(kGroups)][kCloudTile];
  __shared__ RowStaging<T> staging[kCloudThreads / 32];
  alignas(8) __shared__ uint64_t full[kStages], empty[kStages];
  using Columns = Stream<kPlanes, kParts, kGroups>;
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const RowBlock block = FindRowBlock(job, work.block, 0, job.engines, Geometry::kCloud);
  const Member member{job, block.member};
  AwaitKernelBefore();
  const int engine = block.engine;
  EngineState* state = member.state(engine);
  if (state->mode != kFloat) return;
  const int first = state->kept & ~kKept;  // As all blocks see it, whichever comes first.
  if (threadIdx.x == 0 && block.block == 0 && block.split == 0) state->kept = first | kKept;
  if (first == kFirstStored) return;  // They are there.
  if (threadIdx.x == 0) {
    FillShape(member, block, 0, Pass::kMeasure, &c);
    FillState(member, &c);
    Columns::Init(full, empty);
  }
  __syncthreads();
  Columns stream(c, full, empty);
  stream.Begin();
  // 1. The frame.
  const int column = threadIdx.x % 128, warp = threadIdx.x / 32;
  const int warp_row = c.first_row + 16 * warp, row0 = warp_row + threadIdx.x % 32 / 4;
  if (block.split == 0 && threadIdx.x < kCloudRows && c.IsRow(threadIdx.x)) {
    const int i = c.first_row + threadIdx.x;
    member.At<double>(job.at.frame[engine][0])[i] = c.own_phi[i];
  }
  if (block.block == 0) {
    const int last = min(c.last_tile * kCloudTile, c.columns);
    for (int j = c.first_tile * kCloudTile + threadIdx.x; j < last; j += kCloudThreads) {
      member.At<double>(job.at.frame[engine][1])[j] = c.phi[j];
    }
  }
  float own[2];
  for (int row = 0; row < 2; ++row) {
    own[row] = static_cast<float>((c.own_phi[min(row0 + 8 * row, c.rows - 1)] + c.reference) * c.scale);
  }
  // 2. Exponents, tile by tile.
  Cost cost(member, c);
  const float factor = Cost::kIsProduct ? c.factor : 1;
  const int64_t stride = StreamColumns(job, engine);
  T* const out = member.At<T>(job.at.exponents[engine]) + warp_row * stride;
  const auto load = [&](int tile) {
    const int j = tile * kCloudTile + column;
    return ExponentColumn<Cost>{j < c.columns ? c.phi[j] : kVoid, cost.Load(c, tile)};
  };
  const auto store = [&](int slot, const ExponentColumn<Cost>& of) {
    terms[slot][column] = ColumnFrame(c, of.phi);
    cost.Store(slot, of.of_cost);
  };
  EachTile(c, &stream, load(FirstBrought<Columns>(c)), load, store, [&](float(&acc)[16][4], int slot, int tile) {
    cost.Apply(c, tile, slot, acc);
    const float2* mine = reinterpret_cast<const float2*>(terms[slot]) + threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto pair_of = [&](int j) {
        const float2 term = mine[4 * j];
        return make_float2(fmaf(acc[j][2 * half], factor, term.x) + own[half],
                           fmaf(acc[j][2 * half + 1], factor, term.y) + own[half]);
      };
      StoreRows(&staging[warp], out + 8 * half * stride + tile * kCloudTile, stride, c.rows - warp_row - 8 * half,
                pair_of);
    }
  });
#endif
}

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_EXPONENTS_CUH_
