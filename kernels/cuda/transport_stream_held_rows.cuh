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
  int engine;
  StreamFrame frame;
  int held;          // Of its rows, so many stay; the others are read in each iteration, four at a time.
  int owned, lanes;  // Columns of each span that it adds up; lanes that have four of them each.
};
__device__ inline HeldPart HeldPartOf(const Member& member, int engine, int blocks, bool reads) {
  const Job& job = member.job;
  HeldPart part;
  static_cast<TogetherPart&>(part) = TogetherPartOf(member, engine, blocks);
  part.engine = engine;
  part.frame = StreamFrameOf(member, *member.state(engine));
  const int room = engine > 0 ? SelfRoom(job, engine, !reads) : HeldRoom(job, !reads);
  part.held = part.rows - static_cast<int>(CeilDiv(max(part.rows - room, 0), 4)) * 4;
  part.owned = engine > 0 ? 0 : HeldOwned(job, blocks);
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

// A thread has kQuads times four columns of every row. kReads: some rows are not held. kSelf: of engine 1 or 2, whose
// columns are at its rows' potentials.
template <int kQuads, typename T, bool kReads, bool kSelf = false>
class HeldRows {
 protected:
  using QuadOf = HeldQuadOf<T>;
  using Quad = typename QuadOf::Type;
  static constexpr int kKept = kReads ? 0 : HeldRowsOfRegisters(kQuads, sizeof(T)), kGroup = kKept < 8 ? 4 : 8;
  static constexpr float kUnit = QuadOf::kUnit;

  __device__ HeldRows(const Member& member, int engine, int blocks, HeldMemory* memory)
      : member_(member), memory_(*memory), part_(memory->part) {
    if (threadIdx.x == 0) memory->part = HeldPartOf(member, engine, blocks, kReads);
    __syncthreads();
  }

  // What it is of; whose points, or masses, a side's are; of which side are the columns' potentials.
  __device__ int Engine() const { return kSelf ? part_.engine : 0; }
  __device__ int Measure(int side) const { return MeasureOf(Engine(), side); }
  static constexpr int kColumnPhis = kSelf ? 0 : 1;

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
  __device__ int Columns() const { return member_.job.size[Measure(1)]; }  // That there are.
  // Columns whose scales are nothing whatever they sum up to: not those without mass of symmetric updates, which move.
  __device__ bool IsVoid(int j) const {
    return j >= Columns() || (!MovesAll() && member_.log_mass(Measure(1))[j] <= kVoid);
  }
  __device__ bool MovesAll() const { return !kSelf && member_.job.symmetric; }
  // A quad's columns as they are before the first iteration: terms and scales, which are their mass.
  __device__ void TakeColumns(int q, int parity) {
    const int size = Columns(), first = 4 * QuadThere(q), measure = Measure(1);
    const double* all_phi = member_.phi(Engine(), parity, kColumnPhis);
    const double *log_masses = member_.log_mass(measure), *masses = member_.mass(measure);
    const double* bases = AreCosts(member_) ? nullptr : member_.At<double>(member_.job.at.frame[Engine()][1]);
    double phi[4], base[4], log_mass[4], mass[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int j = min(first + k, size - 1);
      phi[k] = all_phi[j], base[k] = bases != nullptr ? bases[j] : 0, log_mass[k] = log_masses[j], mass[k] = masses[j];
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const bool there = first + k < size && (MovesAll() || log_mass[k] > kVoid);
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
    return power / part_.frame.scale + BaseOf(member_, Engine(), 0, i) - part_.frame.reference;
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
          there ? part_.frame.RowTerm(member_.phi(Engine(), parity, 0)[i], BaseOf(member_, Engine(), 0, i)) : kVoid);
      memory_.masses[threadIdx.x] = there ? static_cast<float>(member_.mass(Measure(0))[i]) : 0;
    }
    if (threadIdx.x == 0) memory_.factor = AreCosts(member_) ? static_cast<float>(-part_.frame.scale) : 1;
    if (!kSelf && OwnsColumn()) memory_.column_terms[threadIdx.x] = TermOfColumn(OwnColumn(), parity);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) TakeColumns(q, parity);
    __syncthreads();
    const T* numbers = NumbersOf<T>(member_, Engine()) + int64_t{part_.first_row} * part_.columns;
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

  // ---- Rows' sums ---------------------------------------------------------------------------------------------------

  using Parts = float[kHeldWarps][kHeldRowsMost];
  // A warp's sums over its columns, of rows that are held.
  __device__ void SumRows(Parts& parts) const {
    if (!HasColumns()) return;
    EachGroup([&](int first, auto densities) {
      float sum[kGroup];
#pragma unroll
      for (int r = 0; r < kGroup; ++r) {
        sum[r] = 0;
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
          float t[4];
          densities(r, q, t);
#pragma unroll
          for (int k = 0; k < 4; ++k) sum[r] = fmaf(t[k], scale_[q][k], sum[r]);
        }
      }
      TellParts(first, part_.held, sum, parts);
    });
  }
  // A warp's sums of a group of rows, those before `end`, of which a lane has one row's in the end.
  __device__ static void TellParts(int first, int end, float (&sum)[kGroup], Parts& parts) {
    constexpr int kLanes = 32 / kGroup;  // That have the same row.
    const float of_warp = SumOfRow(sum);
    const int row = first + Lane() / kLanes;
    if (Lane() % kLanes == 0 && row < end) parts[Warp()][row] = of_warp;
  }
  // The lane's row's sum.
  __device__ float WholeOfRow(const Parts& parts) const {
    float sum = 0;
    if (Lane() >= part_.rows) return sum;
#pragma unroll
    for (int w = 0; w < kHeldWarps; ++w) sum += parts[w][Lane()];
    return sum;
  }
  __device__ static bool IsNear(float x) {
    constexpr float kMostDrift = HeldQuadOf<T>::kMostDrift;
    return x > 1 / kMostDrift && x < kMostDrift;
  }
  // Four columns' new scales, from there; whether they are numbers.
  __device__ bool TakeScales(int q, const float* scales, uint32_t tag) {
    if (!HasColumns()) return true;
    const float* from = scales + 4 * QuadThere(q);
    // One lane for each 128 bytes looks until they are there: all looking would hold up those that write.
    bool there;
    do {
      there = Lane() % 8 != 0 || IsOf(LoadTagged(from), tag);
    } while (!__all_sync(0xffffffffu, there));
    AwaitTagged(from, LoadTagged(from), tag, scale_[q]);
    bool numbers = true;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      numbers = numbers && !isnan(scale_[q][k]);
      scale_[q][k] = HasQuad(q) ? scale_[q][k] * kUnit : 0;
    }
    return numbers;
  }

  // ---- Rows that are read again in each iteration -------------------------------------------------------------------

  // Every other iteration begins with the rows that the one before ended with, which are in the cache.
  __device__ int FirstRead(bool backwards) const { return backwards ? part_.rows - kGroup : part_.held; }
  __device__ bool IsRead(int row) const { return row >= part_.held && row < part_.rows; }
  // Numbers of kGroup rows from `first` on, on their way.
  __device__ void Fetch(int first) {
    if (!IsRead(first)) return;
    const auto* numbers = reinterpret_cast<const float4*>(NumbersOf<T>(member_, Engine())) +
                          int64_t{part_.first_row + first} * part_.quads;
#pragma unroll
    for (int r = 0; r < kGroup; ++r) {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) read_[r][q] = __ldcg(numbers + r * part_.quads + QuadThere(q));
    }
  }
  // Their densities, and a thread's sums of them.
  __device__ void MakeRead(int first, float factor, float (&t)[kGroup][kQuads][4], float (&sum)[kGroup]) const {
#pragma unroll
    for (int r = 0; r < kGroup; ++r) {
      const float term = memory_.terms[first + r];
      sum[r] = 0;
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        QuadOf::Unpack(read_[r][q], t[r][q]);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          t[r][q][k] = FastExp2(fmaf(t[r][q][k], factor, term_[q][k]) + term);
          sum[r] = fmaf(t[r][q][k], scale_[q][k], sum[r]);
        }
      }
    }
  }

  // ---- What the plan's marginals are --------------------------------------------------------------------------------

  __device__ BlockStats* StatsOfWarps() const {
    static_assert(sizeof(memory_.columns) >= kHeldWarps * sizeof(BlockStats), "room");
    return reinterpret_cast<BlockStats*>(memory_.columns);
  }
  __device__ double* Scratch() const { return reinterpret_cast<double*>(memory_.weights); }
  // log2 of a row's or a column's sum, without its own term, at the potentials of parity `to`, in double.
  __device__ double LogSum(int side, int k, int to) const {
    const StreamFrame frame = part_.frame;
    const T* numbers = NumbersOf<T>(member_, Engine());
    const double* phis = member_.phi(Engine(), to, 1 - side);
    const double* log_masses = member_.log_mass(Measure(1 - side));
    const double factor = AreCosts(member_) ? -frame.scale : 1, sign = side == 0 ? -1 : 1;
    return BlockLogSum(member_.job.size[Measure(1 - side)], Scratch(), [&](int i) {
      const double phi = __ldcg(phis + i), base = BaseOf(member_, Engine(), 1 - side, i);
      const double number = LoadNumber(numbers + int64_t{side == 0 ? k : i} * part_.columns + (side == 0 ? i : k));
      return number * factor + (phi - base + sign * frame.reference) * frame.scale + log_masses[i];
    });
  }
  // The lane's row's sum at those potentials, which is that of densities, `sum`, if it is near enough; without its own
  // term. All threads call it.
  __device__ double LogSumOfRow(float sum, int to) const {
    double seen = log2(static_cast<double>(sum)) - memory_.terms[Lane()];
    for (unsigned far = __ballot_sync(0xffffffffu, Lane() < part_.rows && !IsNear(sum)); far != 0; far &= far - 1) {
      const int r = __ffs(far) - 1;
      const double exact = LogSum(0, part_.first_row + r, to);
      if (Lane() == r) seen = exact;
    }
    return seen;
  }

  const Member& member_;
  HeldMemory& memory_;
  const HeldPart& part_;
  Quad kept_[kKept > 0 ? kKept : 1][kQuads];
  float term_[kQuads][4], scale_[kQuads][4];  // Of the thread's columns; scales: their mass over their last sums.
  float4 read_[kReads ? kGroup : 1][kQuads];  // Of the rows that are read next.
};

#endif

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_HELD_ROWS_CUH_
