// What blocks that hold a problem together (transport_stream_held.cu) have of it and tell each other: densities in
// little room, numbers that say of which turn they are, and meetings of all (Hopper).
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_HELD_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_HELD_CUH_

#include "kernels/cuda/transport_stream_rows.cuh"

namespace sinkhorn {
namespace cuda {

#if SINKHORN_HOPPER

// Four densities of a row side by side, as they are held: times 2^-kShift, which is 1 / kUnit. kMostDrift: sums and
// scales, which begin at 1, stay within so much of it: densities that count then have all their digits.
template <typename T>
struct HeldQuadOf;
template <>
struct HeldQuadOf<float> {
  using Type = float4;
  static constexpr float kMostDrift = 0x1p+20f, kUnit = 1;
  static constexpr int kShift = 0;
  __device__ static float4 Pack(const float (&t)[4]) { return make_float4(t[0], t[1], t[2], t[3]); }
  __device__ static void Unpack(const float4& q, float (&t)[4]) { t[0] = q.x, t[1] = q.y, t[2] = q.z, t[3] = q.w; }
};
// 16 bits each: six of the exponent, ten of the fraction, as a float has them, its other bits being zero. Densities
// from 2^-46 to 2^16 have 11 digits. Of the second of a word the float's other bits are what the first leaves there.
template <>
struct HeldQuadOf<__half> {
  using Type = uint2;
  static constexpr float kMostDrift = 0x1p+14f, kUnit = 0x1p+80f;
  static constexpr int kShift = 80;
  __device__ static uint2 Pack(const float (&t)[4]) { return make_uint2(PackPair(t[0], t[1]), PackPair(t[2], t[3])); }
  __device__ static void Unpack(const uint2& q, float (&t)[4]) {
    t[0] = __uint_as_float(q.x << kBits & kMask), t[1] = __uint_as_float(q.x >> kRest);
    t[2] = __uint_as_float(q.y << kBits & kMask), t[3] = __uint_as_float(q.y >> kRest);
  }

 private:
  static constexpr int kBits = 13, kRest = 16 - kBits, kMask = 0xffff << kBits;
  __device__ static uint32_t PackPair(float t0, float t1) {
    const uint32_t first = Code(__float_as_int(t0));
    return first | Code(__float_as_int(t1) - static_cast<int>(first >> kRest)) << 16;
  }
  // The nearest; the largest there is says that a sum is too large.
  __device__ static uint32_t Code(int bits) { return min(max(bits + (1 << (kBits - 1)), 0) >> kBits, 0xffff); }
};

// A warp's sums of kRows rows, a power of two, of which a lane has one row's in the end: the lane's over 32 / kRows.
template <int kRows>
__device__ inline float SumOfRow(float (&sum)[kRows]) {
  constexpr int kLanes = 32 / kRows;  // That have the same row.
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int rows = kRows / 2; rows > 0; rows /= 2) {
    const int mask = kLanes * rows;
    const bool upper = lane & mask;
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const float other = __shfl_xor_sync(0xffffffffu, upper ? sum[r] : sum[r + rows], mask);
      sum[r] = (upper ? sum[r + rows] : sum[r]) + other;
    }
  }
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) sum[0] += __shfl_xor_sync(0xffffffffu, sum[0], lanes);
  return sum[0];
}

// What follows for what a row or a column is divided by, of a sum that is over-relaxed so much, from what it was.
__device__ inline float RelaxedSum(float before, float sum, float relax) {
  return relax == 1 ? sum : before * FastExp2(relax * log2f(sum / before));
}

// ---- Numbers that say of which turn they are ------------------------------------------------------------------------
// By their last bit: whoever waits for one needs no other sign, and none is to be cleared. One is written again only
// after answers have come from all that read it.

__device__ inline uint32_t Tagged(float x, uint32_t tag) { return (__float_as_uint(x) & ~1u) | tag; }
__device__ inline void StoreTagged(float* at, float x, uint32_t tag) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(Tagged(x, tag)) : "memory");
}
__device__ inline void StoreTagged(float* at, const float (&x)[4], uint32_t tag) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(Tagged(x[0], tag)),
               "r"(Tagged(x[1], tag)), "r"(Tagged(x[2], tag)), "r"(Tagged(x[3], tag))
               : "memory");
}
__device__ inline uint4 LoadTagged(const float* at) {
  uint4 x;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(at)
               : "memory");
  return x;
}
__device__ inline uint32_t LoadOneTagged(const float* at) {
  uint32_t x;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}
__device__ inline void StoreTagged(double* at, double x, uint32_t tag) {
  const unsigned long long bits = (static_cast<unsigned long long>(__double_as_longlong(x)) & ~1ull) | tag;
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(bits) : "memory");
}
__device__ inline unsigned long long LoadRelaxed(const unsigned long long* at) {
  unsigned long long x;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(at) : "memory");
  return x;
}
__device__ inline unsigned long long LoadOneTagged(const double* at) {
  return LoadRelaxed(reinterpret_cast<const unsigned long long*>(at));
}
__device__ inline bool IsOf(const uint4& x, uint32_t tag) {
  return (((x.x ^ tag) | (x.y ^ tag) | (x.z ^ tag) | (x.w ^ tag)) & 1) == 0;
}
// Four numbers of the turn, once they are there; `first`: as they were when first looked at.
__device__ inline void AwaitTagged(const float* at, uint4 first, uint32_t tag, float (&x)[4]) {
  while (!IsOf(first, tag)) first = LoadTagged(at);
  x[0] = __uint_as_float(first.x), x[1] = __uint_as_float(first.y);
  x[2] = __uint_as_float(first.z), x[3] = __uint_as_float(first.w);
}

// ---- What a launch of many plain iterations measures at their end --------------------------------------------------

// log2 of the sum of 2^exponent(i), i < count, in double, under their maximum. All threads of a block call it;
// `scratch`: as BlockSum's.
template <typename Exponent>
__device__ inline double BlockLogSum(int count, double* scratch, Exponent exponent) {
  double max = kVoid, sum = 0;
  for (int i = threadIdx.x; i < count; i += blockDim.x) max = fmax(max, exponent(i));
  max = BlockMax(max, scratch);
  for (int i = threadIdx.x; i < count; i += blockDim.x) sum += exp2(exponent(i) - max);
  return max + log2(BlockSum(sum, scratch));
}

// Point i of a side, whose potential phi is: `lse` is log2 of its sum without its own term, `reference` the first
// column's potential, with the sign that makes phi a difference from it.
__device__ inline BlockStats MeasurePlain(const Member& member, int side, int i, double phi, double reference,
                                          double lse, double scale) {
  const MeasuredPoint point = {
      phi, member.Shift(0, side, i), member.mass(side)[i], member.log_mass(side)[i], reference, false};
  BlockStats stats = NoStats();
  member.ratio(0, side)[i] = MeasurePoint(point, INFINITY, lse, scale, &stats);
  return stats;
}
// By the last block, when all have left their statistics. `scratch`: as BlockSum's.
__device__ inline void EndPlainMeasure(const Member& member, int engine, int blocks, double* scratch) {
  __syncthreads();
  const RowBlock all = {member.index, engine, 0, 0, 1};
  for (int side = 0; side < 2; ++side) EndPass(member, all, side, Pass::kMeasure, blocks, scratch);
  if (threadIdx.x == 0) member.state(engine)->measured = blocks;
}

// ---- What a block has ----------------------------------------------------------------------------------------------

// Of a problem that so many blocks solve together, which rows, and where numbers go.
struct TogetherPart {
  float* sums;    // [blocks, columns]
  float* scales;  // [columns], of engine 0
  int blocks, rank, columns, quads;
  int first_row, rows;  // Perhaps none: it sends zeros then, so that nobody is a turn ahead of it.
};
__device__ inline TogetherPart TogetherPartOf(const Member& member, int engine, int blocks) {
  const Job& job = member.job;
  const int rank = blockIdx.x % blocks, columns = StreamColumns(job, engine), size = EngineSize(job, engine, 0);
  const int each = static_cast<int>(CeilDiv(size, blocks)), first_row = min(rank * each, size);
  return {member.At<float>(job.at.stream_sums[engine]),
          member.At<float>(job.at.stream_scales),
          blocks,
          rank,
          columns,
          columns / 4,
          first_row,
          min(each, size - first_row)};
}

// ---- Meetings -------------------------------------------------------------------------------------------------------

// All of a problem's blocks arrive before any goes on. The counter is 0 before and after.
class HeldMeeting {
 public:
  __device__ HeldMeeting(unsigned* counter, int blocks) : counter_(counter), blocks_(blocks) {}
  // By all threads.
  __device__ void Arrive() {
    ++meetings_;
    __syncthreads();
    if (threadIdx.x == 0) CountUp(counter_);
  }
  __device__ void Await() const {
    if (threadIdx.x == 0) {
      unsigned count = 0;
      while (count < meetings_ * blocks_) {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter_) : "memory");
      }
    }
    __syncthreads();
  }
  // Another counter of the problem's, for LastToArrive.
  __device__ unsigned* Other() const { return counter_ + 1; }
  // By one thread, at the end.
  __device__ void Leave() const {
    if (CountUp(counter_) + 1 == (meetings_ + 1) * blocks_) *counter_ = 0;
  }

 private:
  unsigned* const counter_;
  const unsigned blocks_;
  unsigned meetings_ = 0;
};

#endif

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_HELD_CUH_
