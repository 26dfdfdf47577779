// A looped problem's rows, some at a time, by a block that has them whole: their densities, made once of one of three
// things, their sums, and what they add to the columns (Hopper).
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_LOOP_ROWS_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_LOOP_ROWS_CUH_

#include <type_traits>

#include "kernels/cuda/transport_stream_loop_ring.cuh"

namespace sinkhorn {
namespace cuda {

#if SINKHORN_HOPPER

// A thread has kQuads times four columns, of kRows rows at a time. Densities are 2^(z + row term + column term), where
// z is read (T: float) or made of Points; or they are read themselves (Density), and columns' terms are their scales.
template <typename T, int kQuads, int kRows, bool kJudged>
class LoopRows {
 protected:
  static constexpr bool kReads = kIsRead<T>, kScales = std::is_same_v<T, Density>;
  static constexpr float kMostSum = 0x1p+60f;

  __device__ explicit LoopRows(LoopMemory* memory) : memory_(*memory), ring_(memory) {}

  __device__ static int Warp() { return threadIdx.x / 32; }
  __device__ static int Lane() { return threadIdx.x % 32; }
  __device__ static int QuadAt(int q) { return threadIdx.x + kLoopThreads * q; }
  __device__ bool HasQuad(int q) const { return QuadAt(q) < memory_.quads; }
  // One that is there: where there is none, the last, whose numbers then count for nothing.
  __device__ int QuadThere(int q) const { return min(QuadAt(q), memory_.quads - 1); }
  __device__ static bool IsNear(float x) { return x > 1 / kMostSum && x < kMostSum; }
  // Of the thread's columns, 4 q + k times kLoopThreads further on: coordinates, and the term.
  __device__ float4* PointsOfColumns() const { return reinterpret_cast<float4*>(DynamicShared()) + threadIdx.x; }

  // What a row's sum would have been without its term's last move, and, of one that is, as the iteration in progress
  // relaxes it.
  __device__ float SumBefore(int row) const { return kScales ? memory_.last_rows[row].sum : 1; }
  __device__ float RelaxedRow(int row, float sum) const {
    return kJudged ? RelaxedSum(SumBefore(row), sum, memory_.relax) : sum;
  }

  // All of them; the thread's columns' sums are then what those add up to.
  __device__ void SumAll() {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
#pragma unroll
      for (int k = 0; k < 4; ++k) sum_[q][k] = 0;
    }
    const int groups = ring_.Groups();
#pragma unroll 1
    for (int k = 0; k < groups; ++k) SumGroup(backwards_ ? groups - 1 - k : k, k % 2);
    backwards_ = !backwards_;
  }

  LoopMemory& memory_;
  LoopRing<T, kRows, kJudged> ring_;
  bool present_ = false;                                 // Whether rows are weighted by their mass alone.
  float term_[kReads ? kQuads : 1][4], sum_[kQuads][4];  // Of the thread's columns; terms of Points: with those.

 private:
  static constexpr int kLanes = 32 / kRows;  // Of a warp, that have a row's sum.

  // Densities of a group's rows, their sums, and what they add to the columns. Every other time another turn.
  __device__ void SumGroup(int g, int turn) {
    const int count = ring_.CountOf(g);
    if constexpr (kScales) {
      uint2 packed[kRows][kQuads];
      float sum[kRows], weight[kRows];
      const Density* rows[kRows];
      ring_.Await(count, rows);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        sum[r] = 0;
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
          packed[r][q] = reinterpret_cast<const uint2*>(rows[r])[QuadThere(q)];
          float t[4];
          DensityPair::Unpack(packed[r][q], t);
#pragma unroll
          for (int k = 0; k < 4; ++k) sum[r] = fmaf(t[k], term_[q][k], sum[r]);
        }
      }
      WeighRows(g, turn, count, sum, weight);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
          float t[4];
          DensityPair::Unpack(packed[r][q], t);
#pragma unroll
          for (int k = 0; k < 4; ++k) sum_[q][k] = fmaf(t[k], weight[r], sum_[q][k]);
        }
      }
    } else {
      float t[kRows][kQuads][4], sum[kRows], weight[kRows];
      kReads ? ReadGroup(g, count, t, sum) : MakeGroup(g, count, t, sum);
      WeighRows(g, turn, count, sum, weight);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
#pragma unroll
          for (int k = 0; k < 4; ++k) sum_[q][k] = fmaf(t[r][q][k], weight[r], sum_[q][k]);
        }
      }
    }
  }
  // Of a row that is not there: some other's, which counts for nothing.
  __device__ static int RowThere(int r, int count) { return r < count ? r : 0; }
  __device__ void ReadGroup(int g, int count, float (&t)[kRows][kQuads][4], float (&sum)[kRows]) {
    if constexpr (kReads && !kScales) {
      const T* rows[kRows];
      ring_.Await(count, rows);
      const float factor = memory_.factor;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float row_term = memory_.row_terms[g * kRows + RowThere(r, count)];
        sum[r] = 0;
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
          LoadQuad(rows[r], QuadThere(q), t[r][q]);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            t[r][q][k] = FastExp2(fmaf(t[r][q][k], factor, term_[q][k]) + row_term);
            sum[r] += t[r][q][k];
          }
        }
      }
    }
  }
  __device__ void MakeGroup(int g, int count, float (&t)[kRows][kQuads][4], float (&sum)[kRows]) {
    constexpr int kDims = kDimsOf<T>;
    float x[kRows][3], row_term[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int there = g * kRows + RowThere(r, count);
      row_term[r] = memory_.row_terms[there];
#pragma unroll
      for (int k = 0; k < kDims; ++k) x[r][k] = memory_.points[there][k];
      sum[r] = 0;
    }
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float4 y = PointsOfColumns()[(4 * q + k) * kLoopThreads];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float e = fmaf(x[r][1], y.y, fmaf(x[r][0], y.x, y.w + row_term[r]));
          if constexpr (kDims > 2) e = fmaf(x[r][2], y.z, e);
          t[r][q][k] = FastExp2(e);
          sum[r] += t[r][q][k];
        }
      }
    }
  }
  // From threads' parts of the rows' sums to what densities are weighted by; what cannot be weighted is no number, nor
  // is any column's sum then.
  __device__ void WeighRows(int g, int turn, int count, float (&sum)[kRows], float (&weight)[kRows]) {
    auto& parts = memory_.parts_of_rows[turn];
    const float of_warp = SumOfRow(sum);
    if (Lane() % kLanes == 0) parts[Lane() / kLanes][Warp()] = of_warp;
    __syncthreads();
    if constexpr (kReads) ring_.Release();
    static_assert(kLoopWarps == 8 && kLanes >= kLoopWarps, "eight lanes for a row");
    const int mine = Lane() / kLoopWarps % kRows, row = g * kRows + RowThere(mine, count);
    float whole = parts[mine][Lane() % kLoopWarps];
#pragma unroll
    for (int lanes = kLoopWarps / 2; lanes > 0; lanes /= 2) whole += __shfl_xor_sync(0xffffffffu, whole, lanes);
    const float mass = memory_.row_masses[row];
    const float sum_of_mine = RelaxedRow(row, whole);
    const float of_mine = mine >= count         ? 0
                          : present_            ? mass
                          : IsNear(sum_of_mine) ? mass * FastReciprocal(sum_of_mine)
                                                : NAN;
#pragma unroll
    for (int r = 0; r < kRows; ++r) weight[r] = __shfl_sync(0xffffffffu, of_mine, kLoopWarps * r);
    if (Warp() == g % kLoopWarps && mine < count) memory_.row_sums[row] = whole;
  }

  bool backwards_ = false;  // The next pass, as the ring's.
};

#endif

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_LOOP_ROWS_CUH_
