// Iterations by log-sum-exps of a problem on the chip: those that scalings cannot do.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_SAFE_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_SAFE_CUH_

#include "kernels/cuda/transport_on_chip_exponents.cuh"

namespace sinkhorn {
namespace cuda {

template <Source kSource, int kTiles>
class OnChipSafe : public OnChipExponents<kSource, kTiles> {
 public:
  using Base = OnChipExponents<kSource, kTiles>;
  using Base::Base;
  using typename Base::S;

 protected:
  using Base::AddExact;
  using Base::Column;
  using Base::engine;
  using Base::IsOwner;
  using Base::job_;
  using Base::lane_;
  using Base::m_;
  using Base::Owned;
  using Base::OwnedColumn;
  using Base::Read;
  using Base::ReadEntries;
  using Base::Row;
  using Base::scale;
  using Base::Spread;
  using Base::warp_;
  using Base::Write;
  using Base::WriteEntries;

  // One iteration from phi, under maxima, after which epsilon may be another. Entries stay as they are; exact ones
  // become exponents in the frames of phi, which are near 0 where there is mass. `ends`: nothing moves, and log2 of the
  // sums of rows and of owned columns are left as sums of two floats, in the other parity's weights and scalings.
  __device__ void SafeIteration(int* parity, bool ends) {
    const EngineState& state = m_.state[*parity];
    BeginSafe();
    const int other = *parity ^ 1;
    const bool waits = ends || m_.symmetric;  // Columns see rows where they were.
    const double row_lse = LogSumOfRow();
    if (lane_ < S::kRows) {
      const int row = Row(lane_);
      if (waits) {
        StoreInParts(row_lse, &m_.rows.weight[other][row], &m_.rows.scaling[other][row]);
        if (Base::kExact) m_.rows.frame[row] = 0;
      } else {
        MoveRow(row, row_lse, state.relax);
      }
    }
    __syncthreads();
    // Some threads have the same column: read before one of them may spread what comes next.
    const double old = m_.phi[OwnedColumn()];
    const double lse = LogSumOfColumn(RowReference(), old);
    if (ends) {
      if (IsOwner()) StoreInParts(lse, &m_.weight[other][Owned()], &m_.scaling[other][Owned()]);
      __syncthreads();
      return;
    }
    Spread(Moved(old, m_.shift[Owned()], lse, m_.rho[1], state.relax), m_.phi);
    if (waits && lane_ < S::kRows) {
      const int row = Row(lane_);
      MoveRow(row, static_cast<double>(m_.rows.weight[other][row]) + m_.rows.scaling[other][row], state.relax);
    }
    if (threadIdx.x == 0) {
      EngineState next = state;
      next.fresh = 1;  // There is no residual to be judged.
      EndColumns(job_, engine(), &next, 0);
      m_.state[other] = next;
    }
    *parity = other;
    __syncthreads();
    if (job_.solver.epsilon_decay == 0) return;
    if (threadIdx.x == 0) SetEpsilon(m_.state[other].epsilon, &m_);
    __syncthreads();
  }

 private:
  __device__ static void StoreInParts(double value, float* high, float* low) {
    *high = static_cast<float>(value);
    *low = static_cast<float>(value - *high);
  }
  __device__ void BeginSafe() {
    __syncthreads();
    const double reference = m_.phi[0];  // Potentials may share a constant.
    for (int j = threadIdx.x; j < S::kMost; j += S::kBlockThreads) {
      m_.frame[j] = Base::kExact ? m_.log_mass[j] : static_cast<float>(TermOf(m_.phi[j], reference, m_.log_mass[j]));
    }
    if constexpr (Base::kExact) FrameExact();
    __syncthreads();
  }
  __device__ void FrameExact() {
    const double s = scale(), factor = m_.factor;
#pragma unroll
    for (int r = 0; r < S::kRows; ++r) {
      const double row = m_.rows.phi[Row(r)];
#pragma unroll
      for (int g = 0; g < S::kGroups; ++g) {
        double z[S::kWidth];
        float e[S::kWidth];
#pragma unroll
        for (int k = 0; k < S::kWidth; ++k) z[k] = (row + m_.phi[Column(g) + k]) * s;
        AddExact(r, g, factor, z);
#pragma unroll
        for (int k = 0; k < S::kWidth; ++k) e[k] = static_cast<float>(z[k]);
        WriteEntries(e, r, g);
      }
    }
  }
  // Adds what row r, group g has of exponents, in the frames of phi where they are exact, to `terms`.
  __device__ void AddEntries(int r, int g, float (&terms)[S::kWidth]) const {
    float e[S::kWidth];
    ReadEntries(r, g, e);
#pragma unroll
    for (int k = 0; k < S::kWidth; ++k) terms[k] = Base::kExact ? terms[k] + e[k] : fmaf(e[k], m_.factor, terms[k]);
  }
  // What rows' potentials are seen from: something near them, and the same in all blocks. Alternating updates have them
  // near minus the columns'.
  __device__ double RowReference() const {
    if (Base::kExact || !m_.symmetric) return -m_.phi[0];
    if constexpr (!S::kCluster) return m_.rows.phi[0];
    SyncCluster();
    return LoadRemote(&m_.rows.phi[0], 0);
  }
  __device__ double TermOf(double phi, double reference, float log_mass) const {
    return fma(phi - reference, scale(), static_cast<double>(log_mass));
  }
  // The potential after a half step to -lse.
  __device__ double Moved(double phi, double shift, double lse, double rho, double relax) const {
    return HalfStep(phi, lse, scale(), shift, m_.epsilon, rho, relax);
  }
  // Exact exponents are in the frames before: m_.rows.frame says how far from there.
  __device__ void MoveRow(int row, double lse, double relax) {
    const double old = m_.rows.phi[row], phi = Moved(old, m_.rows.shift[row], lse, m_.rho[0], relax);
    m_.rows.phi[row] = phi;
    if (Base::kExact) m_.rows.frame[row] = static_cast<float>((phi - old) * scale());
  }
  // Of the warp's row number lane_, if there is one.
  __device__ double LogSumOfRow() const {
    float mine_max = 0, mine_sum = 1;  // Of row lane_.
#pragma unroll
    for (int r = 0; r < S::kRows; ++r) {
      float max = static_cast<float>(kVoid), sum = 0;
#pragma unroll
      for (int g = 0; g < S::kGroups; ++g) {
        float e[S::kWidth];
        Read(m_.frame + Column(g), e);
        AddEntries(r, g, e);
#pragma unroll
        for (int k = 0; k < S::kWidth; ++k) max = fmaxf(max, e[k]);
      }
      for (int lane = 16; lane > 0; lane /= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, lane));
#pragma unroll
      for (int g = 0; g < S::kGroups; ++g) {
        float e[S::kWidth];
        Read(m_.frame + Column(g), e);
        AddEntries(r, g, e);
#pragma unroll
        for (int k = 0; k < S::kWidth; ++k) sum += FastExp2(e[k] - max);
      }
      for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
      if (lane_ == r) mine_max = max, mine_sum = sum;
    }
    const double seen_from = Base::kExact ? -m_.rows.phi[Row(lane_ % S::kRows)] : m_.phi[0];
    return mine_max + log2(static_cast<double>(mine_sum)) + (seen_from * scale() - m_.log_size[1]);
  }
  // Parts of columns: `join(part, term(exponent, largest of the column))` over this warp's rows, eights of which come
  // together first, since sums of them all one after the other lose digits.
  template <typename Term, typename Join>
  __device__ void FoldColumns(double reference, float first, Term term, Join join) {
    float row_term[S::kRows];
#pragma unroll
    for (int r = 0; r < S::kRows; ++r) {
      const float log_mass = m_.rows.log_mass[Row(r)];
      row_term[r] = Base::kExact ? m_.rows.frame[Row(r)] + log_mass
                                 : static_cast<float>(TermOf(m_.rows.phi[Row(r)], reference, log_mass));
    }
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      float part[S::kWidth], eight[S::kWidth], largest[S::kWidth];
      Read(m_.frame + Column(g), largest);
#pragma unroll
      for (int k = 0; k < S::kWidth; ++k) part[k] = first;
#pragma unroll
      for (int r = 0; r < S::kRows; ++r) {
        float e[S::kWidth];
#pragma unroll
        for (int k = 0; k < S::kWidth; ++k) e[k] = row_term[r];
        AddEntries(r, g, e);
#pragma unroll
        for (int k = 0; k < S::kWidth; ++k) {
          const float own = term(e[k], largest[k]);
          eight[k] = r % 8 == 0 ? own : join(eight[k], own);
          if (r % 8 == 7) part[k] = join(part[k], eight[k]);
        }
      }
      Write(part, m_.parts[warp_] + Column(g));
    }
    __syncthreads();
  }
  // Of column Owned(), whose potential is `phi`; `reference`: what rows are seen from. Afterwards m_.frame has the
  // largest exponents.
  __device__ double LogSumOfColumn(double reference, double phi) {
    FoldColumns(
        reference, static_cast<float>(kVoid), [](float e, float) { return e; },
        [](float a, float b) { return fmaxf(a, b); });
    const float largest = this->template Gather<true>();
    Spread(largest, m_.frame);
    FoldColumns(
        reference, 0, [](float e, float max) { return FastExp2(e - max); }, [](float a, float b) { return a + b; });
    const float sum = this->template Gather<false>();
    const double seen_from = Base::kExact ? -phi : reference;
    return largest + log2(static_cast<double>(sum)) + (seen_from * scale() - m_.log_size[0]);
  }
};

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_SAFE_CUH_
