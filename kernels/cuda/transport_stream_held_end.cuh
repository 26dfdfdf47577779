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
  using Rows::FirstOwned, Rows::IsVoid, Rows::Lane, Rows::LogSum, Rows::LogSumOfRow, Rows::member_, Rows::memory_;
  using Rows::OwnColumn, Rows::OwnedOf, Rows::OwnsColumn, Rows::part_, Rows::PhiOfColumn, Rows::PhiOfRow, Rows::QuadAt;
  using Rows::StatsOfWarps, Rows::term_, Rows::Warp, Rows::WholeOfRow;

 protected:
  __device__ HeldEnd(const Member& member, int blocks, HeldMemory* memory)
      : Rows(member, 0, blocks, memory), meeting_(member.At<unsigned>(member.job.at.arrivals), blocks) {}

  // Of the column that the thread looks after; of rows, by turn.
  __device__ HeldSums& OwnSums() const { return memory_.column_sums[threadIdx.x]; }
  __device__ float* RowSums(int turn) const { return memory_.row_sums[turn & 1]; }

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
    if (moved && !IsVoid(j)) {
      phi = PhiOfColumn(j, memory_.column_terms[threadIdx.x] - log2(static_cast<double>(OwnSums().last)));
    }
    member_.phi(0, to, 1)[j] = phi;
    *term = part_.frame.ColumnTerm(phi, base, log_mass);
  }

  // ---- What the plan's marginals are --------------------------------------------------------------------------------

  // At the potentials of parity `to`, which have been stored: columns by what they summed up to in the last iteration,
  // rows by what they do in the one that would come next, which is known in parts.
  __device__ void Measure(int to) {
    meeting_.Arrive();
    meeting_.Await();
    const StreamFrame frame = part_.frame;
    double seen = LogSumOfRow(WholeOfRow(memory_.parts), to);
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

  HeldMeeting meeting_;
  int turn_ = 0;  // Iterations begun.
};

#endif

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_HELD_END_CUH_
