// What the sums of a held problem (transport_stream_held.cu) say when its iterations are over: potentials and, where
// the launch measures, how far marginals are from where they should be (Hopper).
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_HELD_END_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_HELD_END_CUH_

#include "kernels/cuda/transport_stream_held_rows.cuh"

namespace sinkhorn {
namespace cuda {

#if SINKHORN_HOPPER

template <int kQuads, typename T, bool kReads>
class HeldEnd : protected HeldRows<kQuads, T, kReads> {
  using Rows = HeldRows<kQuads, T, kReads>;
  using Rows::FirstOwned, Rows::IsVoid, Rows::Lane, Rows::member_, Rows::memory_, Rows::OwnColumn, Rows::OwnedOf;
  using Rows::OwnsColumn, Rows::part_, Rows::PhiOfColumn, Rows::PhiOfRow, Rows::QuadAt, Rows::term_, Rows::Warp;

 protected:
  __device__ HeldEnd(const Member& member, int blocks, HeldMemory* memory)
      : Rows(member, blocks, memory), meeting_(member.At<unsigned>(member.job.at.arrivals), blocks) {}

  // Of the column that the thread looks after; of rows, by turn.
  __device__ HeldSums& OwnSums() const { return memory_.column_sums[threadIdx.x]; }
  __device__ float* RowSums(int turn) const { return memory_.row_sums[turn & 1]; }
  __device__ static bool IsNear(float x) {
    constexpr float kMostDrift = HeldQuadOf<T>::kMostDrift;
    return x > 1 / kMostDrift && x < kMostDrift;
  }
  // The lane's row's sum.
  __device__ float WholeOfRow() const {
    float sum = 0;
    if (Lane() >= part_.rows) return sum;
#pragma unroll
    for (int w = 0; w < kHeldWarps; ++w) sum += memory_.parts[w][Lane()];
    return sum;
  }

  // ---- Potentials ---------------------------------------------------------------------------------------------------

  // From those of parity `from`, where densities were made: if there are new ones, those; and what sweeps want of them.
  __device__ void Store(int from, int to, bool moved) const {
    const int row = threadIdx.x;
    if (row < part_.rows && moved) {
      const int i = part_.first_row + row;
      const double power = memory_.terms[row] - log2(static_cast<double>(RowSums(turn_)[row]));
      member_.phi(0, to, 0)[i] = PhiOfRow(i, power);
    }
    if (!OwnsColumn()) return;
    const int j = OwnColumn();
    float* term = member_.template At<float>(member_.job.at.stream_terms[0]) + j;
    *term = static_cast<float>(kVoid);
    if (j >= member_.job.size[1]) return;
    const double base = BaseOf(member_, 0, 1, j), log_mass = member_.log_mass(1)[j];
    double phi = member_.phi(0, from, 1)[j];
    if (moved && log_mass > kVoid) {
      phi = PhiOfColumn(j, memory_.column_terms[threadIdx.x] - log2(static_cast<double>(OwnSums().last)));
    }
    member_.phi(0, to, 1)[j] = phi;
    *term = part_.frame.ColumnTerm(phi, base, log_mass);
  }

  // ---- What the plan's marginals are --------------------------------------------------------------------------------

  __device__ BlockStats* StatsOfWarps() const {
    static_assert(sizeof(memory_.columns) >= kHeldWarps * sizeof(BlockStats), "room");
    return reinterpret_cast<BlockStats*>(memory_.columns);
  }
  __device__ double* Scratch() const { return reinterpret_cast<double*>(memory_.weights); }

  // At the potentials of parity `to`, which have been stored: columns by what they summed up to in the last iteration,
  // rows by what they do in the one that would come next, which is known in parts.
  __device__ void Measure(int to) {
    meeting_.Arrive();
    meeting_.Await();
    const StreamFrame frame = part_.frame;
    const float sum = WholeOfRow();
    double seen = log2(static_cast<double>(sum)) - memory_.terms[Lane()];
    for (unsigned far = __ballot_sync(0xffffffffu, Lane() < part_.rows && !IsNear(sum)); far != 0; far &= far - 1) {
      const int r = __ffs(far) - 1;
      const double exact = LogSum(0, part_.first_row + r, to);
      if (Lane() == r) seen = exact;
    }
    FillVoid(to);
    const double reference = __ldcg(member_.phi(0, to, 1));
    BlockStats stats = NoStats();
    if (Warp() == 0 && Lane() < part_.rows) {
      const int i = part_.first_row + Lane();
      const double lse = seen + (frame.reference - BaseOf(member_, 0, 0, i)) * frame.scale;
      stats = MeasurePlain(member_, 0, i, member_.phi(0, to, 0)[i], reference, lse, frame.scale);
    }
    StoreStats(stats, true, member_.stats(0, 0) + part_.rank, StatsOfWarps());
    stats = NoStats();
    if (OwnsColumn() && OwnColumn() < member_.job.size[1]) {
      const int j = OwnColumn();
      const double phi = __ldcg(member_.phi(0, to, 1) + j);
      seen = log2(static_cast<double>(OwnSums().last)) - memory_.column_terms[threadIdx.x];
      const double lse = seen - (frame.reference + BaseOf(member_, 0, 1, j)) * frame.scale;
      stats = MeasurePlain(member_, 1, j, phi, -reference, IsVoid(j) ? -phi * frame.scale : lse, frame.scale);
    }
    StoreStats(stats, true, member_.stats(0, 1) + part_.rank, StatsOfWarps());
  }
  // Columns without mass, which no row sees.
  __device__ void FillVoid(int to) {
    const int size = member_.job.size[1];
    bool any = false;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        any = any || (4 * QuadAt(q) + k < size && term_[q][k] <= static_cast<float>(kVoid / 2));
      }
    }
    if (!__syncthreads_or(any)) return;  // The same in all blocks.
    for (int q = 0; q < kQuads; ++q) {
      for (int c = 0; c < OwnedOf(q); ++c) {
        const int j = FirstOwned(q) + c;
        if (j >= size || !IsVoid(j)) continue;
        const double phi = PhiOfColumn(j, -LogSum(1, j, to));
        if (threadIdx.x != 0) continue;
        member_.phi(0, to, 1)[j] = phi;
        member_.template At<float>(member_.job.at.stream_terms[0])[j] =
            part_.frame.ColumnTerm(phi, BaseOf(member_, 0, 1, j), kVoid);
      }
    }
    meeting_.Arrive();
    meeting_.Await();
  }
  // log2 of a row's or a column's sum, without its own term, in double.
  __device__ double LogSum(int side, int k, int to) const {
    const StreamFrame frame = part_.frame;
    const T* numbers = NumbersOf<T>(member_, 0);
    const double factor = AreCosts(member_) ? -frame.scale : 1, sign = side == 0 ? -1 : 1;
    return BlockLogSum(member_.job.size[1 - side], Scratch(), [&](int i) {
      const double phi = __ldcg(member_.phi(0, to, 1 - side) + i), base = BaseOf(member_, 0, 1 - side, i);
      const double number = LoadNumber(numbers + int64_t{side == 0 ? k : i} * part_.columns + (side == 0 ? i : k));
      return number * factor + (phi - base + sign * frame.reference) * frame.scale + member_.log_mass(1 - side)[i];
    });
  }

  HeldMeeting meeting_;
  int turn_ = 0;  // Iterations begun.
};

#endif

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_HELD_END_CUH_
