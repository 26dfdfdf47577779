// Which rows and columns of a held problem (transport_stream_held.cu) a block has, where its numbers are, and its rows'
// densities, in registers and shared memory (Hopper).
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_HELD_ROWS_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_HELD_ROWS_CUH_

#include <type_traits>

#include "kernels/cuda/transport_stream_held.cuh"

namespace sinkhorn {
namespace cuda {

#if SINKHORN_HOPPER

constexpr int kHeldWarps = kHeldThreads / 32;

// Which rows and columns a block has, and where numbers go: in shared memory, since registers are short.
struct HeldPart : TogetherPart {
  StreamFrame frame;
  int held;          // Of its rows, so many stay; the others are read in each iteration, four at a time.
  int owned, lanes;  // Columns of each span that it adds up; lanes that have four of them each.
};
__device__ inline HeldPart HeldPartOf(const Member& member, int blocks, bool reads) {
  const Job& job = member.job;
  HeldPart part;
  static_cast<TogetherPart&>(part) = TogetherPartOf(member, blocks);
  part.frame = StreamFrameOf(member, *member.state(0));
  part.held = part.rows - static_cast<int>(CeilDiv(max(part.rows - HeldRoom(job, !reads), 0), 4)) * 4;
  part.owned = HeldOwned(job, blocks);
  part.lanes = part.owned <= 16 ? 4 : part.owned <= 32 ? 8 : 16;
  return part;
}

// Of a column, the inverse of its scale, without its mass: its sum, unless that is over-relaxed or damped. Of the last
// iteration, and of the one before.
struct HeldSums {
  float last, before;
};
struct HeldMemory {
  HeldPart part;
  float parts[kHeldWarps][kHeldRowsMost];  // Of rows' sums, by warp.
  alignas(16) float weights[kHeldWarps][kHeldRowsMost];
  alignas(16) float columns[kHeldWarps][kHeldOwnedMost];  // Parts of owned columns' sums, by warp.
  float terms[kHeldRowsMost], masses[kHeldRowsMost], column_terms[kHeldOwnedMost], factor;
  float row_sums[2][kHeldRowsMost];  // As HeldSums; by turn.
  HeldSums column_sums[kHeldOwnedMost];
  bool measures;  // What rows sum up to after the last iteration is wanted, too.
};

// A thread has kQuads times four columns of every row. kReads: some rows are not held.
template <int kQuads, typename T, bool kReads>
class HeldRows {
 protected:
  using QuadOf = HeldQuadOf<T>;
  using Quad = typename QuadOf::Type;
  static constexpr int kKept = kReads ? 0 : HeldRowsOfRegisters(kQuads, sizeof(T)), kGroup = kKept < 8 ? 4 : 8;
  static constexpr float kUnit = QuadOf::kUnit;

  __device__ HeldRows(const Member& member, int blocks, HeldMemory* memory)
      : member_(member), memory_(*memory), part_(memory->part) {
    if (threadIdx.x == 0) memory->part = HeldPartOf(member, blocks, kReads);
    __syncthreads();
  }

  __device__ static int Warp() { return threadIdx.x / 32; }
  __device__ static int Lane() { return threadIdx.x % 32; }
  __device__ static int QuadAt(int q) { return threadIdx.x + kHeldThreads * q; }
  __device__ bool HasQuad(int q) const { return QuadAt(q) < part_.quads; }
  // Whether any thread of the warp has.
  __device__ bool HasColumns() const { return 32 * Warp() < part_.quads; }
  // One that is there: where there is none, the last, whose numbers then count for nothing.
  __device__ int QuadThere(int q) const { return min(QuadAt(q), part_.quads - 1); }
  // A span is all threads' quads q. Its columns that this block adds up, the first and how many.
  __device__ int FirstOwned(int q) const { return q * kHeldQuadColumns + part_.rank * part_.owned; }
  __device__ int OwnedOf(int q) const {
    return min(min((q + 1) * kHeldQuadColumns, part_.columns) - FirstOwned(q), part_.owned);
  }
  // The first threads look after them, a column each: as many for each span as it may have.
  static constexpr int kOwnedOfSpan = kHeldOwnedMost / kQuads;
  __device__ static bool IsOwner() { return threadIdx.x < kHeldOwnedMost; }
  __device__ static int OwnSpan() { return threadIdx.x / kOwnedOfSpan; }
  __device__ static int OwnPlace() { return threadIdx.x % kOwnedOfSpan; }
  __device__ bool OwnsColumn() const { return IsOwner() && OwnPlace() < OwnedOf(OwnSpan()); }
  __device__ int OwnColumn() const { return FirstOwned(OwnSpan()) + OwnPlace(); }
  __device__ bool IsVoid(int j) const { return j >= member_.job.size[1] || member_.log_mass(1)[j] <= kVoid; }
  // A quad's columns as they are before the first iteration: terms and scales, which are their mass.
  __device__ void TakeColumns(int q, int parity) {
    const int size = member_.job.size[1], first = 4 * QuadThere(q);
    const double *all_phi = member_.phi(0, parity, 1), *log_masses = member_.log_mass(1), *masses = member_.mass(1);
    const double* bases = AreCosts(member_) ? nullptr : member_.At<double>(member_.job.at.frame[0][1]);
    double phi[4], base[4], log_mass[4], mass[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int j = min(first + k, size - 1);
      phi[k] = all_phi[j], base[k] = bases != nullptr ? bases[j] : 0, log_mass[k] = log_masses[j], mass[k] = masses[j];
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const bool there = first + k < size && log_mass[k] > kVoid;
      term_[q][k] = there ? part_.frame.ColumnTerm(phi[k], base[k], 0) - QuadOf::kShift : static_cast<float>(kVoid);
      scale_[q][k] = there && HasQuad(q) ? static_cast<float>(mass[k]) * kUnit : 0;
    }
  }
  __device__ float TermOfColumn(int j, int parity) const {
    if (IsVoid(j)) return static_cast<float>(kVoid);
    return part_.frame.ColumnTerm(member_.phi(0, parity, 1)[j], BaseOf(member_, 0, 1, j), 0);
  }

  // ---- Densities ----------------------------------------------------------------------------------------------------

  // Quads of a row in shared memory: of halves all that threads may have, so that their places are constants.
  __device__ int Row() const { return HeldRowsArePadded(sizeof(T)) ? kQuads * kHeldThreads : part_.quads; }
  // Of row kKept, the first there: the thread's quad q.
  __device__ Quad* Shared(int q) const {
    return reinterpret_cast<Quad*>(DynamicShared()) + (HeldRowsArePadded(sizeof(T)) ? QuadAt(q) : QuadThere(q));
  }
  // visit(first, densities) for groups of kGroup rows: densities(r, q, t) are quad q of row first + r; of rows that are
  // not there, some numbers. Those in registers first, since their places are constants.
  template <typename Visit>
  __device__ void EachGroup(Visit visit) const {
#pragma unroll
    for (int first = 0; first < kKept; first += kGroup) {
      if (first >= part_.held) return;
      visit(first, [&](int r, int q, float(&t)[4]) { QuadOf::Unpack(kept_[first + r][q], t); });
    }
    const Quad* at[kQuads];
#pragma unroll
    for (int q = 0; q < kQuads; ++q) at[q] = Shared(q);
    const int row = Row(), rows = part_.held;
    int first = kKept;
#pragma unroll 1
    for (; first + kGroup <= rows; first += kGroup) {
      visit(first, [&](int r, int q, float(&t)[4]) { QuadOf::Unpack(at[q][r * row], t); });
#pragma unroll
      for (int q = 0; q < kQuads; ++q) at[q] += kGroup * row;
    }
    if (first >= rows) return;
    const int last = rows - 1 - first;
    visit(first, [&](int r, int q, float(&t)[4]) { QuadOf::Unpack(at[q][min(r, last) * row], t); });
  }
  // Of kGroup rows from `first` on, all of which are read before the first is made; store(r, q, densities).
  template <typename Store>
  __device__ void MakeGroup(const T* numbers, int first, Store store) const {
    using Numbers = std::conditional_t<sizeof(T) == 2, uint2, float4>;
    const float factor = memory_.factor;
    Numbers read[kGroup][kQuads];
#pragma unroll
    for (int r = 0; r < kGroup; ++r) {
      const auto* row =
          reinterpret_cast<const Numbers*>(numbers + int64_t{min(first + r, part_.rows - 1)} * part_.columns);
#pragma unroll
      for (int q = 0; q < kQuads; ++q) read[r][q] = row[QuadThere(q)];
    }
#pragma unroll
    for (int r = 0; r < kGroup; ++r) {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        float z[4];
        LoadQuad(reinterpret_cast<const T*>(&read[r][q]), 0, z);
#pragma unroll
        for (int k = 0; k < 4; ++k) z[k] = FastExp2(fmaf(z[k], factor, term_[q][k]) + memory_.terms[first + r]);
        store(r, q, QuadOf::Pack(z));
      }
    }
  }
  __device__ double PhiOfRow(int i, double power) const {
    return power / part_.frame.scale + BaseOf(member_, 0, 0, i) - part_.frame.reference;
  }
  __device__ double PhiOfColumn(int j, double power) const {
    return power / part_.frame.scale + BaseOf(member_, 0, 1, j) + part_.frame.reference;
  }
  // At the potentials of this parity.
  __device__ void Make(int parity) {
    if (threadIdx.x < kHeldRowsMost) {  // Of rows that are not there: densities are nothing.
      const int i = part_.first_row + threadIdx.x;
      const bool there = static_cast<int>(threadIdx.x) < part_.rows;
      memory_.terms[threadIdx.x] = static_cast<float>(
          there ? part_.frame.RowTerm(member_.phi(0, parity, 0)[i], BaseOf(member_, 0, 0, i)) : kVoid);
      memory_.masses[threadIdx.x] = there ? static_cast<float>(member_.mass(0)[i]) : 0;
    }
    if (threadIdx.x == 0) memory_.factor = AreCosts(member_) ? static_cast<float>(-part_.frame.scale) : 1;
    if (OwnsColumn()) memory_.column_terms[threadIdx.x] = TermOfColumn(OwnColumn(), parity);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) TakeColumns(q, parity);
    __syncthreads();
    const T* numbers = NumbersOf<T>(member_, 0) + int64_t{part_.first_row} * part_.columns;
#pragma unroll 1
    for (int first = kKept; first < part_.held; first += kGroup) {
      MakeGroup(numbers, first, [&](int r, int q, const Quad& made) {
        const bool own = HeldRowsArePadded(sizeof(T)) || HasQuad(q);
        if (own && first + r < part_.held) Shared(q)[(first + r - kKept) * Row()] = made;
      });
    }
#pragma unroll
    for (int first = 0; first < kKept; first += kGroup) {
      if (first >= part_.held) break;
      MakeGroup(numbers, first, [&](int r, int q, const Quad& made) { kept_[first + r][q] = made; });
    }
    __syncthreads();
  }

  const Member& member_;
  HeldMemory& memory_;
  const HeldPart& part_;
  Quad kept_[kKept > 0 ? kKept : 1][kQuads];
  float term_[kQuads][4], scale_[kQuads][4];  // Of the thread's columns; scales: their mass over their last sums.
};

#endif

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_HELD_ROWS_CUH_
