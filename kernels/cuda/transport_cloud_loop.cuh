// What a block of a looped cloud (transport_cloud_loop.cu) has in shared memory, and how blocks tell each other what
// rows sum up to (Hopper).
//
// Rows pass by in rounds. A round's densities are made by teams (transport_cloud_loop_team.cuh), warpgroups side by
// side over the block's columns, and, where these are few enough for two, one behind the other over the round's rows.
// Four more warps do the rest: one fetches points and terms of the rounds to come, one tells all blocks what this one's
// columns add to the rows, two wait for the rows' whole sums.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_CLOUD_LOOP_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_CLOUD_LOOP_CUH_

#include "kernels/cuda/transport_cloud.cuh"
#include "kernels/cuda/transport_hopper.cuh"
#include "kernels/cuda/transport_stream_held.cuh"

namespace sinkhorn {
namespace cuda {

constexpr int kTeamRows = 64, kTeamThreads = 128;
constexpr int kTeamsThreads = kCloudLoopTeams * kTeamThreads;
constexpr int kCloudLoopThreads = kTeamsThreads + kTeamThreads;
constexpr int kCollectors = 2;  // Warps that wait for rows' sums.
constexpr int kRoundsHeld = 3;  // Whose densities wait for the weights of rows.
// Whose sums and weights have places: when a round's sums are made, the weights of kRoundsHeld before have been read.
constexpr int kRoundsKnown = kRoundsHeld + 1;

// kTeamsAcross teams side by side, of kTeamColumns columns each.
template <int kTeamsAcross, int kTeamColumns>
struct CloudLoopShape {
  static constexpr int kAcross = kTeamsAcross, kColumns = kTeamColumns;
  static constexpr int kDown = kCloudLoopTeams / kAcross;
  static constexpr int kRows = kDown * kTeamRows;  // Of a round.
  static constexpr int kAll = kAcross * kColumns;
  static constexpr int kStages = 2;                     // Rounds whose points are there or on their way.
  static constexpr int kWarpBytes = 16 * kColumns * 2;  // Densities of a warp, of a round.
  static constexpr int kHeldBytes = kTeamsThreads / 32 * kWarpBytes;
  __host__ __device__ static constexpr int Bytes(int row_bytes) {
    return (kAll + kStages * kRows) * row_bytes + kRoundsHeld * kHeldBytes + kPlaneAlignment;
  }
};

#if SINKHORN_HOPPER

__device__ inline char* AtShared(uint32_t address) {
  return DynamicShared() + (address - SharedAddress(DynamicShared()));
}

template <typename Shape>
struct CloudLoopMemory {
  StreamFrame frame;
  float factor;              // From products to exponents.
  float lift;                // Added to terms of columns.
  float row_unit, sum_unit;  // Of rows' weights; from sums as they are made to those of rows.
  const char *x, *y;
  unsigned long long* totals;  // [3, padded]
  float* frames;               // [3, padded]
  int64_t padded;              // Rows.
  int rank, rows, rounds;
  uint32_t columns_at, stages_at, held_at;  // Points of columns and of rounds, densities.
  int first_column, columns;
  int parity, left, passes;  // Of potentials; iterations to be made; these, and perhaps one that measures.
  bool is_even;              // Columns have the same mass.
  // The pass in which a row's sum was lost, or -1; whether warps are to stop; whether a column's sum has been lost.
  volatile int lost, stop, lost_column;
  alignas(16) float terms[Shape::kAll], terms_before[Shape::kAll];  // Of columns.
  alignas(16) __half masses[4][Shape::kAll + 8];  // Of columns, in units of their largest, as sums of three; no fourth.
  float frames_of[Shape::kStages][Shape::kRows];
  // Of rounds' rows: parts of sums; weights, as sums of three halves, no fourth.
  float parts[kRoundsKnown][Shape::kAcross][Shape::kRows];
  alignas(16) __half weights[kRoundsKnown][4][Shape::kRows + 8];
  uint64_t full[Shape::kStages], empty[Shape::kStages], summed[kRoundsKnown], weighed[kRoundsKnown];
  double scratch[kMostWarps];

  // A pass's buffers of rows' sums and terms; the latter's numbers say whether they are of it.
  __device__ unsigned long long* TotalsOf(int pass) const { return totals + pass % 3 * padded; }
  __device__ float* FramesOf(int pass) const { return frames + pass % 3 * padded; }
  __device__ static uint32_t TagOf(int pass) { return pass / 3 & 1; }
  // At the end of a pass, in the place of densities: what columns sum up to, of each team's warp and altogether.
  __device__ float* PartsOfColumns() const { return reinterpret_cast<float*>(AtShared(held_at)); }
  __device__ float* SumsOfColumns() const { return PartsOfColumns() + kTeamsThreads / 32 * Shape::kColumns; }
};

// Densities, relative to the product of the masses and 1 / m, are this many powers of two larger as halves: they have
// all digits where they are more than 2^-22 of a row, and of columns as well, and may be 2^8 times what they end as.
constexpr int kDensityLift = 8;
// Sums of rows as whole numbers, which give the same in any order: so many times the sum, and below it how many blocks
// have added.
constexpr float kSumUnit = 0x1p+36f, kSumLeast = 0x1p-13f, kSumMost = 0x1p+11f, kSumLost = 0x1p+12f;
constexpr float kColumnLeast = 0x1p-10f;  // What columns' sums, once of 1, may become.
constexpr int kCountBits = 8;
static_assert(kLoopBlocks < 1 << kCountBits, "blocks are counted");

__device__ inline bool IsWholeSum(unsigned long long total) { return (total & ((1 << kCountBits) - 1)) == kLoopBlocks; }
__device__ inline float SumOf(unsigned long long total) { return __ull2float_rn(total >> kCountBits) * (1 / kSumUnit); }
// A block's part, counted once.
__device__ inline unsigned long long CountedSum(float part) {
  const float counted = part < kSumLost ? part : kSumLost;  // No number: too large.
  return __float2ull_rn(counted * kSumUnit) << kCountBits | 1;
}
__device__ inline void AddToTotal(unsigned long long* total, unsigned long long x) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(total), "l"(x) : "memory");
}
// Of a row, without the bit that says of which pass it is.
__device__ inline float TermOf(uint32_t tagged) { return __uint_as_float(tagged & ~1u); }

// x as the sum of three halves.
struct ThreeHalves {
  __half part[3];
  __device__ explicit ThreeHalves(float x) {
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      part[k] = __float2half_rn(x);
      x -= __half2float(part[k]);
    }
  }
};

// Until the phase of this parity has ended, or the block is to stop: then whether it has.
__device__ inline bool WaitUnless(const volatile int& stop, uint64_t* barrier, unsigned parity) {
  while (!HasPhaseEnded(barrier, parity)) {
    if (stop) return HasPhaseEnded(barrier, parity);
  }
  return true;
}

#endif

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_CLOUD_LOOP_CUH_
