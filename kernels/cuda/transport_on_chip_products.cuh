// Products of points of a problem on the chip, on the matrix units.
//
// A chunk of columns at a time is multiplied by all rows of a block, and what comes out is exchanged through shared
// memory: a warp's stage takes 8 of its rows. Hopper's warpgroups multiply what bulk copies bring, a plane of a chunk's
// halves at a time, the next of them on their way meanwhile; elsewhere, and in blocks too small for a warpgroup, warps
// multiply 8 of their rows.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_PRODUCTS_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_PRODUCTS_CUH_

#include "kernels/cuda/native.cuh"
#include "kernels/cuda/transport_hopper.cuh"
#include "kernels/cuda/transport_on_chip.cuh"

namespace sinkhorn {
namespace cuda {

template <Source kSource, int kTiles>
class OnChipProducts : public OnChipBlock<kSource, kTiles> {
 public:
  using Base = OnChipBlock<kSource, kTiles>;
  using Base::Base;
  using typename Base::Memory;
  using typename Base::S;

 protected:
  using Base::first_row;
  using Base::Groups;
  using Base::job_;
  using Base::lane_;
  using Base::m_;
  using Base::member;
  using Base::Read;
  using Base::ReadEntries;
  using Base::Row;
  using Base::size;
  using Base::warp_;
  using Base::WriteEntries;

  // Lets the first points come. Once; then before each MultiplyPoints but the first.
  __device__ void InitPoints(bool first) {
#if SINKHORN_HOPPER
    if constexpr (kByGroups) {
      if (threadIdx.x != 0) return;
      if (first) {
        for (uint64_t& barrier : m_.copied) InitBarrier(&barrier, 1);
        InitBarrier(&m_.rows_copied, 1);
        FenceBarriers();
      }
      for (int group = 0; group < S::kWarpgroups; ++group) {
        const int row = S::kPaired ? 0 : 64 * group, column = S::kPaired ? group * kGroupColumns : 0;
        m_.matrices[group].rows = MatrixAt(SharedAddress(m_.row_points) + row * RowBytes(), RowBytes());
        m_.matrices[group].columns = MatrixAt(SharedAddress(m_.points[0]) + column * RowBytes(), RowBytes());
      }
      CopyRows(0);
    }
#endif
    BeginPoints();
  }
  __device__ void BeginPoints() {
#if SINKHORN_HOPPER
    if constexpr (kByGroups) {
      if (threadIdx.x != 0) return;
      if (Memory::kGathersInPoints) FenceCopies();
      if (Depths() > 1 && steps_ > 0) CopyRows(0);
      m_.next_copy = {steps_, 0, 0, Planes() - 1};
      CopyUntil(steps_ + Memory::kBuffers);
    }
#endif
  }

  // By one thread, before the same blocks solve another problem.
  __device__ void EndPoints() {
#if SINKHORN_HOPPER
    if constexpr (kByGroups) {
      for (int k = 0; k < Memory::kBuffers; ++k) {
        EndUses(&m_.copied[k], (steps_ + Memory::kBuffers - 1 - k) / Memory::kBuffers);
      }
      EndUses(&m_.rows_copied, Depths() == 1 ? 1 : steps_ / Planes());
    }
#endif
  }

  // Entries become products; of groups without columns, nothing.
  __device__ void MultiplyPoints() {
#if SINKHORN_HOPPER
    if constexpr (kByGroups) MultiplyByGroups();
#endif
    if constexpr (!kByGroups) MultiplyByWarps();
    const int groups = Groups();
#pragma unroll
    for (int g = 1; g < S::kGroups; ++g) {
      if (g < groups) continue;
#pragma unroll
      for (int r = 0; r < S::kRows; ++r) WriteEntries({}, r, g);
    }
  }
  // From them to exponents, of a scale of 1.
  __device__ double FactorOfProducts() const {
    // By groups, the first depth's smaller products are added while the sums are small (the first two always are).
    const int early = kByGroups && Planes() == 2 ? 2 * (StepsOf(0) - 1) : 0;
    return ProductFactor(UnscaledFactor(job_, 1, early), m_.state[0].point_scale);
  }

 private:
  static constexpr bool kByGroups = SINKHORN_HOPPER && kSource == Source::kProducts && S::kWarpgroups > 0;

  // ---- From stages ------------------------------------------------------------------------------------------------

  // Of this warp's rows r0 .. r0 + 7. To registers, which are known by constants.
  __device__ void AddStageTo(int r0, int g, bool first) {
#pragma unroll
    for (int group = 0; group < S::kGroups; ++group) {
#pragma unroll
      for (int row = 0; row < S::kRows; row += 8) {
        if (group == g && row == r0) AddStage(row, group, first);
      }
    }
  }
  __device__ void AddStage(int r0, int g, bool first) {
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      float e[S::kWidth], old[S::kWidth];
      Read(m_.stage[warp_] + r * Memory::kStageRow + lane_ * S::kWidth, e);
      if (!first) ReadEntries(r0 + r, g, old);
#pragma unroll
      for (int k = 0; k < S::kWidth && !first; ++k) e[k] += old[k];
      WriteEntries(e, r0 + r, g);
    }
  }
  __device__ int RowBytes() const { return m_.row_bytes; }
  __device__ int Depths() const { return m_.depths; }
  __device__ int Planes() const { return m_.planes; }
  // A plane of a tile; of what fits on a chip they are less than 2^31 bytes.
  __device__ const char* Halves(int side, int tile, int depth, int plane) const {
    return m_.halves[side] + ((tile * Depths() + depth) * Planes() + plane) * (kCloudTile * RowBytes());
  }
  // The tile that has the columns of chunk g.
  __device__ int TileOf(int g) const { return min(g * S::kChunk, size(1) - 1) / kCloudTile; }
  // Products that a depth takes.
  __device__ int StepsOf(int depth) const {
    return min(kDepth / 16, static_cast<int>(CeilDiv(job_.dim - depth * kDepth, 16)));
  }

  // ---- By warpgroups ----------------------------------------------------------------------------------------------
#if SINKHORN_HOPPER

  static constexpr int kGroupColumns = S::kPaired ? S::kChunk / 2 : S::kChunk;
  using Sums = float[kGroupColumns / 8][4];

  // A step is a plane of a depth of a chunk's columns, the smaller half first. Steps are numbered, which finds buffers.
  // Begins the copies of those before `until` that have not begun, as far as there are columns.
  __device__ void CopyUntil(unsigned until) {
    PlaneOfChunk next = m_.next_copy;
    const int depths = Depths(), planes = Planes(), groups = Groups();
    for (; next.step < until && next.g < groups; ++next.step) {
      CopyPlane(next);
      if (--next.plane >= 0) continue;
      next.plane = planes - 1;
      if (++next.depth == depths) next.depth = 0, ++next.g;
    }
    m_.next_copy = next;
  }
  __device__ void CopyPlane(const PlaneOfChunk& of) {
    const unsigned bytes = S::kChunk * RowBytes(), buffer = of.step % Memory::kBuffers;
    const char* from = Halves(1, TileOf(of.g), of.depth, of.plane);
    ArriveExpecting(&m_.copied[buffer], bytes);
    CopyBulk(SharedAddress(m_.points[buffer]), from, bytes, &m_.copied[buffer]);
  }
  __device__ void CopyRows(int depth) {
    const unsigned bytes = S::kBlockRows * RowBytes();
    const int tile = min(first_row() / kCloudTile, (size(0) - 1) / kCloudTile);
    ArriveExpecting(&m_.rows_copied, Planes() * bytes);
    for (int plane = 0; plane < Planes(); ++plane) {
      CopyBulk(SharedAddress(m_.row_points) + plane * bytes,
               Halves(0, tile, depth, plane) + first_row() % kCloudTile * RowBytes(), bytes, &m_.rows_copied);
    }
  }
  __device__ void MultiplyByGroups() {
    const int depths = Depths(), groups = Groups();
    // Code that runs once takes longer to arrive than to run: there is one copy of it for all columns.
#pragma unroll 1
    for (int g = 0; g < groups; ++g) {
      Sums sums[S::kPasses] = {};
#pragma unroll 1
      for (int depth = 0; depth < depths; ++depth) {
        // Rows come once where they have one depth.
        if (depths > 1 || steps_ == 0) WaitForPhase(&m_.rows_copied, steps_ / Planes() & 1);
        const int steps = StepsOf(depth);
#pragma unroll 1
        for (int plane = Planes() - 1; plane >= 0; --plane, ++steps_) {
          const unsigned buffer = steps_ % Memory::kBuffers;
          WaitForPhase(&m_.copied[buffer], steps_ / Memory::kBuffers & 1);
          // The rows' smaller halves are multiplied with the larger ones only.
#pragma unroll 1
          for (int other = plane == 0 ? Planes() - 1 : 0; other >= 0; --other) {
            MultiplyPlanes(other, buffer, steps, sums);
          }
        }
        if (threadIdx.x == 0) CopyUntil(steps_ - Planes() + Memory::kBuffers);  // Buffers of steps before.
        WaitForProducts<0>();
        __syncthreads();  // All have multiplied.
        if (threadIdx.x != 0) continue;
        CopyUntil(steps_ + Planes());
        if (depths > 1 && (depth + 1 < depths || g + 1 < groups)) CopyRows((depth + 1) % depths);
      }
#pragma unroll
      for (int pass = 0; pass < S::kPasses; ++pass) {
        if constexpr (S::kPaired) {
          ExchangePaired(sums[pass], g);
        } else {
          ExchangeOwn(sums[pass], pass, g);
        }
      }
    }
    __syncthreads();  // The stages are parts again.
  }
  // Begins the products of a plane of the rows with one of columns, `steps` of 16 coordinates.
  __device__ void MultiplyPlanes(int plane, int buffer, int steps, Sums (&sums)[S::kPasses]) {
    const uint64_t rows = m_.matrices[warp_ / 4].rows + plane * (S::kBlockRows * RowBytes() / 16);
    const uint64_t columns = m_.matrices[warp_ / 4].columns + buffer * (Memory::kPlane / 16);
    switch (steps) {
      case 1:
        return MultiplySteps<1>(rows, columns, sums);
      case 2:
        return MultiplySteps<2>(rows, columns, sums);
      case 3:
        return MultiplySteps<3>(rows, columns, sums);
      default:
        return MultiplySteps<4>(rows, columns, sums);
    }
  }
  // At once: branches among them would have each wait for the one before.
  template <int kSteps>
  __device__ void MultiplySteps(uint64_t rows, uint64_t columns, Sums (&sums)[S::kPasses]) {
    const int pass_rows = S::kPasses > 1 ? S::kWarps * RowBytes() : 0;  // 16 rows a warp, in units of 16 bytes.
    BeginProducts();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int pass = 0; pass < S::kPasses; ++pass) {
        MultiplyGroup(rows + pass * pass_rows + 2 * k, columns + 2 * k, true, sums[pass]);
      }
    }
    CommitProducts();
  }
  // To the warps that have the rows: this one and the one of the other warpgroup that made the same rows' products.
  __device__ void ExchangePaired(const Sums& sums, int g) {
    const int first = warp_ / 4 * kGroupColumns;
#pragma unroll
    for (int half = 0; half < 2; ++half) StoreSums(sums, half, m_.stage[warp_ % 4 + 4 * half] + first);
    WaitAt(1 + warp_ % 4, 64);
    AddStageTo(0, g, true);  // The stage is free after the next chunk's products.
  }
  __device__ void ExchangeOwn(const Sums& sums, int pass, int g) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      StoreSums(sums, half, m_.stage[warp_]);
      __syncwarp();
      AddStageTo(16 * pass + 8 * half, g, true);
      __syncwarp();  // The stage is free.
    }
  }
  // Eight of the warp's 16 rows.
  __device__ void StoreSums(const Sums& sums, int half, float* stage) const {
#pragma unroll
    for (int j = 0; j < kGroupColumns / 8; ++j) {
      *reinterpret_cast<float2*>(stage + lane_ / 4 * Memory::kStageRow + 8 * j + lane_ % 4 * 2) =
          make_float2(sums[j][2 * half], sums[j][2 * half + 1]);
    }
  }

#endif
  // ---- By warps ---------------------------------------------------------------------------------------------------

  // 16 columns by 8 rows at a time. `points`: a chunk of columns over kDepth coordinates.
  __device__ void MultiplyByWarps() {
    const int groups = Groups();
#pragma unroll 1
    for (int g = 0; g < groups; ++g) {
      for (int depth = 0; depth < Depths(); ++depth) {
        // Rows are far away: their first eight come beside the columns, the others each eight ahead.
        Fragments next;
        ReadRows(0, depth, next);
        __syncthreads();  // The points before have been multiplied.
        CopyPoints(TileOf(g), depth);
        __syncthreads();
#pragma unroll 1
        for (int r0 = 0; r0 < S::kRows; r0 += 8) {
          Fragments rows;
#pragma unroll
          for (int e = 0; e < kDepth / 4; ++e) rows[e / 4][e % 4] = next[e / 4][e % 4];
          if (r0 + 8 < S::kRows) ReadRows(r0 + 8, depth, next);
          MultiplyRows(rows, StepsOf(depth));
          __syncwarp();
          AddStageTo(r0, g, depth == 0);
          __syncwarp();  // The stage is free.
        }
      }
    }
    __syncthreads();  // The stages are parts again.
  }
  __device__ void CopyPoints(int tile, int depth) {
    const int bytes = S::kChunk * RowBytes(), planes = Planes();
    for (int plane = 0; plane < planes; ++plane) {
      const char* from = Halves(1, tile, depth, plane);
      for (int at = 16 * threadIdx.x; at < bytes; at += 16 * S::kBlockThreads) {
        CopyAsync16(m_.points[plane] + at, from + at);
      }
    }
    CommitCopies();
    WaitForCopies<0>();
  }
  // Eight rows over kDepth coordinates, as products' fragments: of 16 coordinates two of larger, two of smaller halves.
  using Fragments = uint32_t[kDepth / 16][4];
  // Rows r0 .. r0 + 7 of this warp.
  __device__ void ReadRows(int r0, int depth, Fragments& to) const {
    const int i = min(first_row() + Row(r0) + lane_ / 4, size(0) - 1), row_bytes = RowBytes(), planes = Planes();
    const char* own = Halves(0, i / kCloudTile, depth, 0) + lane_ % 4 * 4;
    const int last = StepsOf(depth) - 1;
#pragma unroll
    for (int e = 0; e < kDepth / 8; ++e) {
      const char* at = own + SwizzledAt(i % kCloudTile, 2 * min(e / 2, last) + e % 2, row_bytes);
      to[e / 2][e % 2] = __ldg(reinterpret_cast<const uint32_t*>(at));
      to[e / 2][2 + e % 2] = planes == 2 ? __ldg(reinterpret_cast<const uint32_t*>(at + kCloudTile * row_bytes)) : 0;
    }
  }
  // Rows times the chunk's points, into the warp's stage.
  __device__ void MultiplyRows(const Fragments& rows, int steps) {
    const int row_bytes = RowBytes(), planes = Planes();
    float acc[S::kChunk / 16][4];
#pragma unroll
    for (int t = 0; t < S::kChunk / 16; ++t) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0;
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      if (k == steps) break;
#pragma unroll
      for (int t = 0; t < S::kChunk / 16; ++t) {
        const int place = SwizzledAt(16 * t + lane_ % 16, 2 * k + lane_ / 16, row_bytes);
        uint32_t high[4], low[4];
        LoadMatrices(m_.points[0] + place, high);
        if (planes == 2) {
          LoadMatrices(m_.points[1] + place, low);
          MultiplyHalves(low, rows[k][0], rows[k][1], acc[t]);
          MultiplyHalves(high, rows[k][2], rows[k][3], acc[t]);
        }
        MultiplyHalves(high, rows[k][0], rows[k][1], acc[t]);
      }
    }
    float* stage = m_.stage[warp_];
#pragma unroll
    for (int t = 0; t < S::kChunk / 16; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        stage[(lane_ % 4 * 2 + e % 2) * Memory::kStageRow + 16 * t + lane_ / 4 + e / 2 * 8] = acc[t][e];
      }
    }
  }

  unsigned steps_ = 0;  // Done so far.
};

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_PRODUCTS_CUH_
