// A team of a looped cloud's block (transport_cloud_loop.cuh): densities of the rows that pass by with the team's
// columns, and what they add to both (Hopper).
//
// A warp has kTeamRows / 4 rows of a round. Products are wgmma's; what becomes of their results, as fragments, goes to
// shared memory as halves, by matrices of 8 x 8, and is multiplied twice, by mma: at once by the columns' masses, and
// kRoundsHeld rounds later, turned, by the rows' weights.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_CLOUD_LOOP_TEAM_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_CLOUD_LOOP_TEAM_CUH_

#include "kernels/cuda/transport_cloud_loop.cuh"

namespace sinkhorn {
namespace cuda {

#if SINKHORN_HOPPER

template <typename Shape, int kProducts>
class CloudTeam {
  static constexpr int kColumns = Shape::kColumns, kRowBytes = CloudRowBytes(16 * kProducts);
  static constexpr int kSteps = kColumns / 16;  // Of tensor cores, over the team's columns.
  static constexpr int kSums = (kSteps + 1) / 2;
  static constexpr int kTeamsBarrier = 1;

 public:
  __device__ explicit CloudTeam(CloudLoopMemory<Shape>* memory) : m_(*memory) {}

  // All passes, or until rows' sums are lost. By all teams.
  __device__ void SumAll() {
    const int team = static_cast<int>(OfWarp(threadIdx.x / kTeamThreads));
    const int across = team % Shape::kAcross, down = team / Shape::kAcross;
    lane_ = Opaque(static_cast<int>(threadIdx.x % 32));
    row_ = down * kTeamRows + threadIdx.x % kTeamThreads / 32 * 16;
    held_ = m_.held_at + threadIdx.x / 32 * Shape::kWarpBytes + lane_ * 16;
    turned_ = held_ + ((lane_ / 8 & 1) - (lane_ / 16)) * 128;  // The second and the third matrix in each other's place.
    terms_ = reinterpret_cast<const float2*>(m_.terms + across * kColumns) + lane_ % 4;
    a_ = static_cast<uint32_t>(MatrixAt(OfWarp(m_.stages_at + down * kTeamRows * kRowBytes), kRowBytes));
    b_ = MatrixAt(OfWarp(m_.columns_at + across * kColumns * kRowBytes), kRowBytes);
    unsigned t = 0, slot = 0;  // Rounds so far; where the next one's densities lie, in bytes.
    for (int pass = 0; pass < m_.passes; ++pass) {
      float sums[kSums][4];
#pragma unroll
      for (int q = 0; q < kSums; ++q) {
#pragma unroll
        for (int k = 0; k < 4; ++k) sums[q][k] = 0;
      }
      const unsigned end = t + m_.rounds, first = t + kRoundsHeld;
#pragma unroll 1
      for (; t < end; ++t) {
        SumRound(t, slot, across, t >= first, sums);
        slot = After(slot);
      }
      // The last ones; there are that many.
#pragma unroll 1
      for (int k = kRoundsHeld; k > 0; --k, slot = After(slot)) AddRound(t - k, slot, sums);
      if (m_.lost >= 0) {  // By all warps of all blocks alike: the last round's weights are there.
        m_.stop = 1;
        return;
      }
      EndPass(across, sums, pass < m_.left);
    }
  }

 private:
  __device__ static unsigned After(unsigned slot) {
    return slot == (kRoundsHeld - 1) * Shape::kHeldBytes ? 0 : slot + Shape::kHeldBytes;
  }
  // A round's densities, and what they add to the rows. In their place were those of kRoundsHeld rounds before, which
  // are added to the columns first, if there were any.
  __device__ void SumRound(unsigned t, unsigned slot, int across, bool adds, float (&sums)[kSums][4]) {
    if (adds) AddRound(t - kRoundsHeld, slot, sums);
    const unsigned stage = t % Shape::kStages;
    float acc[kColumns / 8][4];
    const uint64_t a = (b_ >> 32 << 32 | a_) + stage * (Shape::kRows * kRowBytes / 16);
    WaitForPhase(&m_.full[stage], t / Shape::kStages & 1);
    BeginProducts();
#pragma unroll
    for (int k = 0; k < kProducts; ++k) MultiplyGroup(a + 2 * k, b_ + 2 * k, k > 0, acc);
    CommitProducts();

    const uint32_t held = held_ + slot;
    const float* frames = &m_.frames_of[stage][row_ + lane_ / 4];
    const float frame[2] = {frames[0], frames[8]}, factor = m_.factor;
    const uint32_t one = lane_ / 4 == 0 ? 0x3c003c00 : 0;
    float2 next[2] = {terms_[0], terms_[4]};
    float whole[4] = {0, 0, 0, 0};
    WaitForProducts<0>();
    __syncwarp();
    if (lane_ == 0) Arrive(&m_.empty[stage]);
#pragma unroll
    for (int q = 0; q < kSteps; ++q) {
      uint32_t packed[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 term = next[half];
        float(&e)[4] = acc[2 * q + half];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const float t0 = FastExp2(fmaf(e[2 * k], factor, term.x) + frame[k]);
          const float t1 = FastExp2(fmaf(e[2 * k + 1], factor, term.y) + frame[k]);
          packed[2 * half + k] = PackHalves(t0, t1);
        }
        if (q + 1 < kSteps) next[half] = terms_[4 * (2 * q + 2 + half)];  // Before what is stored.
      }
      StoreMatrices(held + q * 512, packed);
      MultiplyHalves(packed, one, one, whole);
    }
    if (!m_.is_even) Weigh(held, across, whole);
    // Of three numbers that masses are sums of, a lane has two and the next one the third.
    whole[0] += whole[1] + __shfl_down_sync(0xffffffffu, whole[0], 1);
    whole[2] += whole[3] + __shfl_down_sync(0xffffffffu, whole[2], 1);
    if (lane_ % 4 == 0) {
      float* parts = &m_.parts[t % kRoundsKnown][across][row_ + lane_ / 4];
      parts[0] = whole[0], parts[8] = whole[2];
    }
    __syncwarp();
    if (lane_ == 0) Arrive(&m_.summed[t % kRoundsKnown]);
  }
  // The rows' sums, of columns of different mass.
  __device__ void Weigh(uint32_t held, int across, float (&whole)[4]) const {
    const auto* masses =
        reinterpret_cast<const uint32_t*>(&m_.masses[min(lane_ / 4, 3)][across * kColumns]) + lane_ % 4;
    for (float& sum : whole) sum = 0;
    __syncwarp();
#pragma unroll 1
    for (int q = 0; q < kSteps; ++q) {
      uint32_t d[4];
      LoadMatrices(AtShared(held + q * 512), d);
      MultiplyHalves(d, masses[8 * q], masses[8 * q + 4], whole);
    }
  }
  __device__ static uint32_t PackHalves(float x, float y) {
    const __half2 pair = __floats2half2_rn(x, y);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  // What a round adds to the columns, once its rows' weights are there. Of the eight columns of a product's result,
  // three are these, by the three parts of the weights, of sixteen of the team's columns, three more those of the next.
  __device__ void AddRound(unsigned t, unsigned slot, float (&sums)[kSums][4]) {
    const uint32_t held = turned_ + slot;
    uint32_t weights[2][2];
    const auto weights_at = [&](int part) {
      return reinterpret_cast<const uint32_t*>(
                 &m_.weights[t % kRoundsKnown][min(static_cast<unsigned>(part), 3u)][row_]) +
             lane_ % 4;
    };
    const uint32_t *even = weights_at(lane_ / 4), *odd = weights_at(lane_ / 4 - 3);
    WaitForPhase(&m_.weighed[t % kRoundsKnown], t / kRoundsKnown & 1);
    weights[0][0] = even[0], weights[0][1] = even[4], weights[1][0] = odd[0], weights[1][1] = odd[4];
    uint32_t d[kSteps][4];
#pragma unroll
    for (int q = 0; q < kSteps; ++q) LoadTransposed(held + q * 512, d[q]);
#pragma unroll
    for (int q = 0; q < kSteps; ++q) MultiplyHalves(d[q], weights[q % 2][0], weights[q % 2][1], sums[q / 2]);
  }
  // The columns' sums, and their new terms if they are to move.
  __device__ void EndPass(int across, const float (&sums)[kSums][4], bool moves) {
    float* parts = m_.PartsOfColumns();
    // All densities have been read: their place is for sums.
    SyncSome<kTeamsThreads>(kTeamsBarrier);
#pragma unroll
    for (int q = 0; q < kSteps; ++q) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float first = sums[q / 2][2 * half], second = sums[q / 2][2 * half + 1];
        const int both = q % 2 == 0 ? 0 : 2;  // The lane, of four, that has two of the parts; the second has the other.
        float sum = lane_ % 4 == both ? first + second : lane_ % 4 == 1 ? (q % 2 == 0 ? first : second) : 0;
        for (int other = 1; other <= 2; other *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
        if (lane_ % 4 == 0) parts[threadIdx.x / 32 * kColumns + 16 * q + 8 * half + lane_ / 4] = sum;
      }
    }
    SyncSome<kTeamsThreads>(kTeamsBarrier);
    if (static_cast<int>(threadIdx.x) < m_.columns) {
      const int team = threadIdx.x / kColumns, column = threadIdx.x % kColumns;
      float whole = 0;
#pragma unroll
      for (int d = 0; d < Shape::kDown; ++d) {
        const float* of_team = parts + (d * Shape::kAcross + team) * 4 * kColumns + column;
#pragma unroll
        for (int warp = 0; warp < 4; ++warp) whole += of_team[warp * kColumns];
      }
      const float ratio = whole / m_.row_unit * exp2f(-m_.lift), term = m_.terms[threadIdx.x];
      m_.SumsOfColumns()[threadIdx.x] = ratio;
      if (moves) {
        const bool near = ratio > kColumnLeast && ratio < 1 / kColumnLeast;
        if (!near) m_.lost_column = 1;
        m_.terms_before[threadIdx.x] = term;
        m_.terms[threadIdx.x] = near ? term - __log2f(ratio) : NAN;
      }
    }
    SyncSome<kTeamsThreads>(kTeamsBarrier);
  }

  CloudLoopMemory<Shape>& m_;
  // Of a warp: its lane and first row; where its densities lie, as they are stored and as they are read turned.
  int lane_, row_;
  uint32_t held_, turned_;
  // Where matrices of the team's points lie, as products want to know: of rows in the first stage (the lower half), and
  // of columns.
  uint32_t a_;
  uint64_t b_;
  const float2* terms_;  // Of its columns.
};

#endif

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_CLOUD_LOOP_TEAM_CUH_
