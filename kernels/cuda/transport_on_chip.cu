// Whole solves of small float32 problems: the plan's densities stay in registers, all iterations in one launch.
//
// T_ij = 2^(z_ij + row frame_i + column frame_j) lies in the registers of a block, or of a cluster of blocks (Hopper),
// 64 entries a thread, and scalings are iterated: u_i = 1 / sum_j T_ij b_j v_j and v_j = 1 / sum_i T_ij a_i u_i, two
// fused multiply-adds an entry and iteration instead of two exponentials. Frames are potentials frozen when T was made.
// When scalings drift away from 1 the iteration is done by log-sum-exps instead, and T made anew; so is the first.
// Every kOnChipChunk iterations T is made anew whatever happens, so that a solve may be cut there without changing its
// bits.
//
// A warp owns rows: their sums need no barrier. Columns are added up over a block's warps, then over the blocks of the
// cluster: each sends its sums to all, so that all know the same columns and decide alike.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_cluster.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_on_chip.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

constexpr float kTiny = 0x1p-80f, kHuge = 0x1p+80f;  // Sums outside may have lost entries that count.
constexpr float kDrift = 0x1p+36f;                   // Scalings stay within [1 / kDrift, kDrift].

// What needs logarithms in double is called, not inlined: the densities need the registers. `shift`: what is added to
// the frame's part of the potential, in units of the cost.
__device__ __noinline__ float RelaxedScaling(float frame, float old, float sum, double shift, double scale,
                                             double epsilon, double rho, double relax) {
  const double phi = (frame + log2(static_cast<double>(old))) / scale;
  const double lse = log2(static_cast<double>(sum)) - frame;
  const double next = HalfStep(phi, lse, scale, shift, epsilon, rho, relax);
  return static_cast<float>(exp2(fmin(fmax(next * scale - frame, -100.0), 100.0)));
}
__device__ __noinline__ double RelaxedTarget(float frame, float scaling, double shift, double scale, double rho) {
  return TargetRatio((frame + log2(static_cast<double>(scaling))) / scale + shift, rho);
}

// The solve.
template <bool kDense, int kTiles>
class OnChip : private OnChipBlock<kDense, kTiles> {
 public:
  using Base = OnChipBlock<kDense, kTiles>;
  using Base::Base;
  using Base::kBlockThreads;
  using typename Base::Memory;
  using typename Base::S;

  __device__ void Run(int chunks) {
    Load();
    const bool simple = job_.solver.tolerance == 0;
    const int last = min(job_.solver.max_iterations, m_.state[0].iterations + chunks * kOnChipChunk);
    int parity = 0;  // Of scalings and state.
    bool safe = m_.state[0].iterations == 0;
    while (true) {
      if (safe) SafeIteration(&parity);
      const bool ends = m_.state[parity].stopped || m_.state[parity].iterations >= last;
      if (ends) Store(parity);
      if (ends && !m_.state[parity].stopped) return;
      MakeDensities(parity);
      if (ends) return Measure(parity);
      const int begun = m_.state[parity].iterations;
      const int until = min(last, (begun / kOnChipChunk + 1) * kOnChipChunk);
      safe = simple ? IterateSimply(&parity, until) : IterateJudged(&parity, until);
      FreezePotentials(parity);
    }
  }

 private:
  using Base::Column;
  using Base::CopyScalings;
  using Base::first_row;
  using Base::FreezePotentials;
  using Base::HasColumn;
  using Base::heard_error_;
  using Base::IsRow;
  using Base::job_;
  using Base::lane_;
  using Base::Load;
  using Base::m_;
  using Base::MakeDensities;
  using Base::MakeExponents;
  using Base::member_;
  using Base::rank_;
  using Base::ReadColumns;
  using Base::Row;
  using Base::scale;
  using Base::size;
  using Base::t_;
  using Base::warp_;
  using Base::WriteColumns;

  // ---- Iterations by log-sum-exps ---------------------------------------------------------------------------------

  // One iteration from phi, under maxima.
  __device__ void SafeIteration(int* parity) {
    __syncthreads();
    const EngineState& state = m_.state[*parity];
    double reference = m_.columns.phi[0];  // Potentials may share a constant.
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {
      if (side == 1) {
        this->template Exchange<false>(0, true, rank_ == 0 ? m_.rows.phi[0] : 0);
        reference = heard_error_;
        __syncthreads();
      }
      MakeExponents();
      if (side == 0) {
        AddColumnTerms(reference);
        SafeRows(reference, state.relax);
      } else {
        AddRowTerms(reference);
        SafeColumns(reference, state.relax);
      }
      __syncthreads();
    }
    if (threadIdx.x == 0) {
      EngineState next = state;
      next.fresh = 0;
      EndColumns(job_, 0, &next, 0);
      m_.state[*parity ^ 1] = next;
    }
    *parity ^= 1;
    __syncthreads();
  }

  __device__ void AddColumnTerms(double reference) {
#pragma unroll
    for (int c = 0; c < S::kColumns; ++c) {
      const int j = Column(c);
      const float term = TermOf(m_.columns.phi[j], reference, m_.columns.log_mass[j]);
#pragma unroll
      for (int r = 0; r < S::kRows; ++r) t_[r][c] += term;
    }
  }
  __device__ void AddRowTerms(double reference) {
#pragma unroll
    for (int r = 0; r < S::kRows; ++r) {
      const float term = TermOf(m_.rows.phi[Row(r)], reference, m_.rows.log_mass[Row(r)]);
#pragma unroll
      for (int c = 0; c < S::kColumns; ++c) t_[r][c] += term;
    }
  }
  __device__ float TermOf(double phi, double reference, float log_mass) const {
    return static_cast<float>(fma(phi - reference, scale(), static_cast<double>(log_mass)));
  }
  template <int kSize>
  __device__ void Move(SideMemory<kSize>* side, int k, double lse, double rho, double relax) {
    side->phi[k] = HalfStep(side->phi[k], lse, scale(), side->shift[k], m_.epsilon, rho, relax);
  }
  __device__ void SafeRows(double reference, double relax) {
#pragma unroll
    for (int r = 0; r < S::kRows; ++r) {
      float max = t_[r][0], sum = 0;
#pragma unroll
      for (int c = 1; c < S::kColumns; ++c) max = fmaxf(max, t_[r][c]);
      for (int lane = 16; lane > 0; lane /= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, lane));
#pragma unroll
      for (int c = 0; c < S::kColumns; ++c) sum += FastExp2(t_[r][c] - max);
      for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
      if (lane_ == 0) {
        Move(&m_.rows, Row(r), max + log2(static_cast<double>(sum)) + reference * scale(), m_.rho[0], relax);
      }
    }
  }
  __device__ void SafeColumns(double reference, double relax) {
    float part[S::kColumns], max[S::kColumns];
#pragma unroll
    for (int c = 0; c < S::kColumns; ++c) {
      part[c] = t_[0][c];
#pragma unroll
      for (int r = 1; r < S::kRows; ++r) part[c] = fmaxf(part[c], t_[r][c]);
    }
    WriteColumns(part, m_.parts[warp_]);
    __syncthreads();
    const float largest = this->template Exchange<true>(this->template OverWarps<true>());
    __syncthreads();  // The parts have been read.
    if (HasColumn()) m_.columns.frame[threadIdx.x] = largest;
    __syncthreads();
    ReadColumns(m_.columns.frame, max);
#pragma unroll
    for (int c = 0; c < S::kColumns; ++c) {
      part[c] = 0;
#pragma unroll
      for (int r = 0; r < S::kRows; ++r) part[c] += FastExp2(t_[r][c] - max[c]);
    }
    WriteColumns(part, m_.parts[warp_]);
    __syncthreads();
    const float sum = this->template Exchange<false>(this->template OverWarps<false>());
    if (!HasColumn()) return;
    const double lse = largest + log2(static_cast<double>(sum)) + reference * scale();
    Move(&m_.columns, threadIdx.x, lse, m_.rho[1], relax);
  }

  // ---- Iterations by scalings -------------------------------------------------------------------------------------

  // The sum of row RowOf() of this warp over its lanes: halves of the rows change hands until one is left.
  __device__ float SumRow(float (&s)[S::kRows]) const {
    int lane = 16;
#pragma unroll
    for (int count = S::kRows / 2; count >= 1; count /= 2, lane /= 2) {
      const bool upper = (lane_ & lane) != 0;
#pragma unroll
      for (int k = 0; k < count; ++k) {
        const float send = upper ? s[k] : s[k + count], keep = upper ? s[k + count] : s[k];
        s[k] = keep + __shfl_xor_sync(0xffffffffu, send, lane);
      }
    }
    for (; lane > 0; lane /= 2) s[0] += __shfl_xor_sync(0xffffffffu, s[0], lane);
    return s[0];
  }
  __device__ int RowOf() const { return Row(lane_ / (32 / S::kRows)); }
  __device__ bool IsRowsFirstLane() const { return lane_ % (32 / S::kRows) == 0; }

  __device__ float RowSum(int parity) {
    float weight[S::kColumns], s[S::kRows];
    ReadColumns(m_.columns.weight[parity], weight);
#pragma unroll
    for (int r = 0; r < S::kRows; ++r) {
      s[r] = 0;
#pragma unroll
      for (int c = 0; c < S::kColumns; ++c) s[r] = fmaf(t_[r][c], weight[c], s[r]);
    }
    return SumRow(s);
  }
  // Into parts; `parity`: of the rows' weights.
  __device__ void AddColumns(int parity) {
    float weight[S::kRows], s[S::kColumns];
#pragma unroll
    for (int r = 0; r < S::kRows; ++r) weight[r] = m_.rows.weight[parity][Row(r)];
#pragma unroll
    for (int c = 0; c < S::kColumns; ++c) {
      s[c] = 0;
#pragma unroll
      for (int r = 0; r < S::kRows; ++r) s[c] = fmaf(t_[r][c], weight[r], s[c]);
    }
    WriteColumns(s, m_.parts[warp_]);
  }

  // The new scaling of a row or column whose sum is `sum`. `reference`: what its frame is seen from.
  template <int kSize>
  __device__ float NewScaling(const SideMemory<kSize>& side, int k, double reference, float old, float sum, double rho,
                              double relax) const {
    if (relax == 1 && isinf(rho)) return 1 / sum;
    return RelaxedScaling(side.frame[k], old, sum, side.shift[k] + reference, m_.scale, m_.epsilon, rho, relax);
  }
  __device__ static bool IsGood(float sum, float scaling) {
    return sum > kTiny && sum < kHuge && scaling < kDrift && scaling > 1 / kDrift;
  }
  __device__ double RowError(int k, float scaling, float sum) const {
    const double mass = m_.rows.mass[k], rho = m_.rho[0];
    if (mass == 0) return 0;
    const double shift = m_.rows.shift[k] - m_.reference;
    const double target = isinf(rho) ? 1 : RelaxedTarget(m_.rows.frame[k], scaling, shift, scale(), rho);
    return mass * fabs(static_cast<double>(scaling) * sum - target);
  }

  // Iterates up to `until` iterations; true if the next must be done by log-sum-exps. The number is fixed: nothing is
  // judged, and the state moves at the end.
  __device__ bool IterateSimply(int* parity, int until) {
    const int home = *parity;
    const int wanted = until - m_.state[home].iterations;
    int done = 0;
    while (done < wanted && Iterate(*parity, true)) {
      ++done;
      *parity ^= 1;
    }
    __syncthreads();
    if (threadIdx.x == 0 && done > 0) {
      EngineState next = m_.state[home];
      next.iterations += done;
      next.parity ^= done & 1;
      if (next.iterations >= job_.solver.max_iterations) Stop(job_, &next, StopReason::kMaxIterations);
      m_.state[*parity] = next;
    }
    __syncthreads();
    return done < wanted;
  }
  __device__ bool IterateJudged(int* parity, int until) {
    while (!m_.state[*parity].stopped && m_.state[*parity].iterations < until) {
      const bool good = Iterate(*parity, false);
      if (!m_.discard && !good) return true;
      *parity ^= 1;
      if (!m_.discard) continue;
      CopyScalings(*parity ^ 1, *parity);  // The state alone is new.
      __syncthreads();
    }
    return false;
  }

  // One iteration into the other parity; false if it must be done by log-sum-exps.
  __device__ bool Iterate(int parity, bool simple) {
    const double relax = simple ? 1 : m_.state[parity].relax;
    // 1. Rows: this warp's own.
    const int row = RowOf();
    const float old = m_.rows.scaling[parity][row], sum = RowSum(parity);
    const float u = NewScaling(m_.rows, row, -m_.reference, old, sum, m_.rho[0], relax);
    bool bad = IsRow(row) && !IsGood(sum, u);
    if (IsRowsFirstLane()) {
      m_.rows.scaling[parity ^ 1][row] = IsRow(row) ? u : 1;
      m_.rows.weight[parity ^ 1][row] = IsRow(row) ? m_.rows.mass[row] * u : 0;
    }
    if (!simple) {
      double error = IsRowsFirstLane() && IsRow(row) ? RowError(row, old, sum) : 0;
      for (int lane = 16; lane > 0; lane /= 2) error += __shfl_xor_sync(0xffffffffu, error, lane);
      if (lane_ == 0) m_.errors[warp_] = error;
    }
    __syncwarp();
    // 2. Columns: parts of all warps, of all blocks.
    AddColumns(parity ^ 1);
    bad = __syncthreads_or(bad) != 0;  // Parts and errors are there.
    double error = 0;
    for (int w = 0; w < S::kWarps && !simple; ++w) error += m_.errors[w];
    // Bad rows spoil the columns of all blocks.
    const float column = this->template Exchange<false>(bad ? NAN : this->template OverWarps<false>(), !simple, error);
    if (HasColumn()) {
      const int j = threadIdx.x;
      const float v = NewScaling(m_.columns, j, m_.reference, m_.columns.scaling[parity][j], column, m_.rho[1], relax);
      bad = bad || (j < size(1) && !IsGood(column, v));
      m_.columns.scaling[parity ^ 1][j] = j < size(1) ? v : 1;
      m_.columns.weight[parity ^ 1][j] = j < size(1) ? m_.columns.mass[j] * v : 0;
    }
    if (threadIdx.x == kBlockThreads - 1 && !simple) Decide(parity, heard_error_);
    return __syncthreads_or(bad) == 0;  // Scalings and state are there.
  }
  // The state after this iteration, should it be kept.
  __device__ void Decide(int parity, double error) {
    EngineState next = m_.state[parity];
    EndRows(job_, 0, &next, error);
    m_.discard = next.stopped;
    if (!next.stopped) EndColumns(job_, 0, &next, 0);
    m_.state[parity ^ 1] = next;
  }

  // What was written to memory is seen by the cluster's blocks.
  __device__ static void PublishToCluster() {
    __threadfence();
    if (S::kRanks > 1) SyncCluster();
    __syncthreads();
    __threadfence();
  }

  // ---- Ends -------------------------------------------------------------------------------------------------------

  __device__ void Store(int parity) {
    const int at = m_.state[parity].parity;
    for (int k = threadIdx.x; k < S::kBlockRows && IsRow(k); k += kBlockThreads) {
      member_.phi(0, at, 0)[first_row() + k] = m_.rows.phi[k];
    }
    if (rank_ == 0) {
      for (int j = threadIdx.x; j < size(1); j += kBlockThreads) member_.phi(0, at, 1)[j] = m_.columns.phi[j];
      if (threadIdx.x == 0) *member_.state(0) = m_.state[parity];
    }
    PublishToCluster();
  }

  // Sums of P at the final potentials.
  __device__ void Measure(int parity) {
    MakeDensities(parity);
    const float row = RowSum(parity);
    AddColumns(parity);
    __syncthreads();
    const float column = this->template Exchange<false>(this->template OverWarps<false>());
    // One thread a row, and a share of the columns for each block: through shared memory.
    if (HasColumn()) m_.columns.weight[parity][threadIdx.x] = column;
    if (IsRowsFirstLane()) m_.rows.weight[parity][RowOf()] = row;
    __syncthreads();
    const RowBlock block = {member_.index, 0, rank_, 0, 1};
    for (int side = 0; side < 2; ++side) {
      const int k = threadIdx.x, i = first_row() + k;
      BlockStats stats = {0, 0, 0, 0, 0, 1};
      if (k < S::kBlockRows && i < size(side)) {
        const float sum = side == 0 ? m_.rows.weight[parity][k] : m_.columns.weight[parity][i];
        const double frame = side == 0 ? m_.rows.frame[k] : m_.columns.frame[i];
        const double reference = side == 0 ? -m_.reference : m_.reference;
        const double lse = log2(static_cast<double>(sum)) - (frame / scale() + reference) * scale();
        MeasureRow(member_, block, side, i, lse, scale(), &stats);
      }
      if (first_row() < size(side)) StoreStats(stats, true, member_.stats(0, side) + rank_);
    }
    PublishToCluster();
    if (rank_ != 0) return;
    for (int side = 0; side < 2; ++side) {
      EndPass(member_, block, side, Pass::kMeasure, RowBlocks(job_, 0, side, Geometry::kOnChip));
      __syncthreads();
    }
  }
};

template <bool kDense, int kTiles>
__global__ void __launch_bounds__(32 * Shape<kTiles>::kWarps, kTiles == 1   ? 3
                                                              : kTiles == 2 ? 2
                                                                            : 1)
    OnChipKernel(LaunchTable table, int chunks) {
  constexpr int kRanks = Shape<kTiles>::kRanks;
#if __CUDA_ARCH__ < 900
  if constexpr (kRanks == 1) {
#endif
    const BlockWork work = FindWork(table, blockIdx.x);
    const Job& job = CopyJob(table.jobs[work.job]);
    const int64_t index = work.block / kRanks;
    const EngineState* state = Member{job, index}.state(0);
    if (state->mode != kFloat || state->stopped) return;
    using Kernel = OnChip<kDense, kTiles>;
    Kernel(job, index, static_cast<int>(work.block % kRanks),
           reinterpret_cast<typename Kernel::Memory*>(DynamicShared()))
        .Run(chunks);
#if __CUDA_ARCH__ < 900
  }
#endif
}

template <bool kDense, int kTiles>
void Launch(const LaunchTable& table, int64_t blocks, int chunks, cudaStream_t stream) {
  using S = Shape<kTiles>;
  static_assert(S::kRows * S::kColumns <= 64 && S::kColumns % S::kWidth == 0, "registers");
  LaunchCluster(OnChipKernel<kDense, kTiles>, blocks, S::kRanks, 32 * S::kWarps, sizeof(OnChipMemory<S>), stream, table,
                chunks);
}
template <bool kDense>
void Launch(const LaunchTable& table, int64_t blocks, int tiles, int chunks, cudaStream_t stream) {
  switch (tiles) {
    case 1:
      return Launch<kDense, 1>(table, blocks, chunks, stream);
    case 2:
      return Launch<kDense, 2>(table, blocks, chunks, stream);
    case 4:
      return Launch<kDense, 4>(table, blocks, chunks, stream);
    default:
      return Launch<kDense, 8>(table, blocks, chunks, stream);
  }
}

}  // namespace

int64_t OnChipBlocks(const Job& job) { return job.count * CeilDiv(OnChipTiles(job) * kTile, OnChipRows(job)); }

void LaunchOnChip(const LaunchTable& table, int64_t blocks, bool dense, int tiles, int chunks, cudaStream_t stream) {
  return dense ? Launch<true>(table, blocks, tiles, chunks, stream)
               : Launch<false>(table, blocks, tiles, chunks, stream);
}

}  // namespace cuda
}  // namespace sinkhorn
