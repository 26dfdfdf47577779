// Whole solves of small float32 problems: the plan's densities stay in registers, all iterations in one launch.
//
// T_ij = 2^(z_ij + row frame_i + column frame_j) lies in the registers of a block, or of a cluster of blocks (Hopper),
// 64 to 256 entries a thread, and scalings are iterated: u_i = 1 / sum_j T_ij b_j v_j and v_j = 1 / sum_i T_ij a_i u_i,
// two fused multiply-adds an entry and iteration instead of two exponentials. Frames: potentials as T was made.
// When scalings drift away from 1 the iteration is done by log-sum-exps instead, and T made anew. In the first, frames
// of rows are such that the largest T of each is 1.
// Every kOnChipChunk iterations T is made anew whatever happens, so that a solve may be cut there without changing its
// bits.
//
// Problems that need float64 exponents are solved alike: those lie in memory, and what they are in the frames, which is
// near 0 where there is mass, becomes float.
//
// Symmetric updates move both sides from where both were. Engines of a measure with itself have as much residual on one
// side as on the other; of others, columns' residuals are added up as well, where there is a tolerance.
//
// While epsilon is annealed, iterations are done by log-sum-exps, from exponents that only change by a factor.
//
// A warp owns rows: their sums need no barrier. Columns are added up over a block's warps, then over the cluster's: by
// the block that owns them, whose new weights go to all blocks, or, of two blocks, by both. So all know the same and
// decide alike.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_SOLVE_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_SOLVE_CUH_

#include "kernels/cuda/transport_cluster.cuh"
#include "kernels/cuda/transport_hopper.cuh"
#include "kernels/cuda/transport_on_chip_safe.cuh"

namespace sinkhorn {
namespace cuda {

constexpr float kTiny = 0x1p-80f, kHuge = 0x1p+80f;  // Sums outside may have lost entries that count.
constexpr float kDrift = 0x1p+36f;                   // Scalings stay within [1 / kDrift, kDrift].

constexpr double kPullMost = 16;  // Beyond, what damping pulls a potential by leaves float too few digits of its move.

// What needs logarithms in double is called, not inlined: the densities need the registers. `shift`: what is added to
// the frame's part of the potential, in units of the cost.
static __device__ __noinline__ float RelaxedScaling(float frame, float old, float sum, double shift, double scale,
                                                    double epsilon, double rho, double relax) {
  const double phi = (frame + log2(static_cast<double>(old))) / scale;
  const double lse = log2(static_cast<double>(sum)) - frame;
  const double next = HalfStep(phi, lse, scale, shift, epsilon, rho, relax);
  return static_cast<float>(exp2(fmin(fmax(next * scale - frame, -100.0), 100.0)));
}
// The same from the old scaling by a factor, which is near 1 once the solve is near its end: of that float's logarithms
// have all digits. `pull`: (1 - damping) times the potential at the frame, in units of epsilon, base 2.
static __device__ __noinline__ float MovedScaling(float old, float sum, float damping, float pull, float relax) {
  const float move = -damping * log2f(old * sum) - (1 - damping) * log2f(old);
  return old * FastExp2(relax * (move - pull));
}
static __device__ __noinline__ double RelaxedTarget(float frame, float scaling, double shift, double scale,
                                                    double rho) {
  return TargetRatio((frame + log2(static_cast<double>(scaling))) / scale + shift, rho);
}

// How far column `owned` of those that a block owns, which is column `j` of all, was from its marginal before its sum
// became m.sums[parity ^ 1].
template <typename Memory>
static __device__ __noinline__ double ColumnError(const Memory& m, int owned, int j, int parity) {
  const double mass = m.mass[j], rho = m.rho[1];
  const float scaling = m.scaling[parity][owned];
  if (mass == 0) return 0;
  const double shift = m.shift[owned] + m.reference;
  const double target = isinf(rho) ? 1 : RelaxedTarget(m.frame[j], scaling, shift, m.scale, rho);
  return mass * fabs(static_cast<double>(scaling) * m.sums[parity ^ 1][owned] - target);
}

// The solve.
template <Source kSource, int kTiles>
class OnChip : private OnChipSafe<kSource, kTiles> {
 public:
  using Base = OnChipSafe<kSource, kTiles>;
  using Base::Base;
  using typename Base::Memory;
  using typename Base::S;

  // `first`: of those that its blocks solve. What is the same in all threads is asked for when it is wanted: the
  // densities need the registers.
  __device__ __forceinline__ void Run(int chunks, bool first) {
    Load(first, [this, first] { InitPoints(first); });
    const int more = job_.finish_soon ? 1 : chunks * kOnChipChunk;
    if (threadIdx.x == 0) m_.last = min(job_.solver.max_iterations, m_.state[0].iterations + more);
    int parity = 0;  // Of scalings and state.
    const bool begins = m_.state[0].iterations == 0, anneals = job_.solver.epsilon_decay != 0 && m_.state[0].fresh;
    bool fresh = begins && m_.state[0].relax == 1 && !m_.symmetric && !anneals, safe = anneals || (begins && !fresh);
    bool has_exponents = false;
    while (true) {
      if (!has_exponents) {
        MakeExponents();
        if constexpr (Memory::kGathersInPoints) SyncCluster();  // All have, and may be sent to.
        if constexpr (S::kSplit) ClearSlots();
      }
      has_exponents = true;
      if (safe || m_.unsafe) {
        SafeIteration(&parity, m_.unsafe);
        if (m_.unsafe) break;
        // While epsilon is annealed, and once after that: potentials of another epsilon are no frames.
        if (m_.state[parity].fresh && !m_.state[parity].stopped) {
          if (Ends(parity)) break;
          continue;
        }
      }
      MakeDensities(parity, fresh);
      fresh = has_exponents = false;
      const int until = min(m_.last, (m_.state[parity].iterations / kOnChipChunk + 1) * kOnChipChunk);
      safe = IsPlain()      ? Iterate<Updates::kPlain>(&parity, until)
             : JudgesBoth() ? Iterate<Updates::kJudgedBoth>(&parity, until)
                            : Iterate<Updates::kAny>(&parity, until);
      // Far from its end a symmetric solve has potentials that frames in float cannot tell.
      if (!m_.symmetric || moved_) FreezePotentials(parity);
      if (!safe && Ends(parity) && !m_.unsafe) break;
      BeginPoints();
    }
    Store(parity);
    if (m_.state[parity].stopped) Measure(parity);
  }
  // Before the same blocks solve another problem.
  __device__ void Leave() {
    SyncCluster();  // All are through.
    if (threadIdx.x != 0) return;
    EndPoints();
    EndSums();
  }

 private:
  static constexpr int kHalf = S::kGroups / 2;  // Of the groups.
  // Iterations: alternating ones to the marginals, a fixed number, which are not judged and need no logarithms;
  // symmetric ones that both sides' residuals end; and all others.
  enum class Updates : int { kPlain, kJudgedBoth, kAny };

  using Base::AnyInCluster;
  using Base::AwaitSpread;
  using Base::BeginPoints;
  using Base::ClearSlots;
  using Base::Column;
  using Base::CombineRow;
  using Base::EndPoints;
  using Base::EndSums;
  using Base::engine;
  using Base::first_row;
  using Base::FreezePotentials;
  using Base::HasUnsure;
  using Base::HasVoidRows;
  using Base::heard_error_;
  using Base::InitPoints;
  using Base::IsOwner;
  using Base::IsRow;
  using Base::IsRowsFirstLane;
  using Base::job_;
  using Base::lane_;
  using Base::Load;
  using Base::m_;
  using Base::MakeDensities;
  using Base::MakeExponents;
  using Base::member;
  using Base::Owned;
  using Base::OwnedColumn;
  using Base::Read;
  using Base::ReadEntries;
  using Base::Row;
  using Base::RowOf;
  using Base::SafeIteration;
  using Base::scale;
  using Base::size;
  using Base::Spread;
  using Base::state;
  using Base::warp_;
  using Base::Write;
  template <bool kLargest>
  __device__ float Gather(bool told = false, double error = 0) {
    return Base::template Gather<kLargest>(told, error);
  }
  template <int kCount>
  __device__ void TellOwners(int first) {
    Base::template TellOwners<false, kCount>(first);
  }

  __device__ bool Ends(int parity) const { return m_.state[parity].stopped || m_.state[parity].iterations >= m_.last; }
  __device__ bool IsPlain() const {
    return job_.solver.tolerance == 0 && isinf(m_.rho[0]) && isinf(m_.rho[1]) && !m_.symmetric;
  }
  __device__ bool JudgesBoth() const { return job_.symmetric && engine() == 0 && job_.solver.tolerance > 0; }

  // ---- Iterations by scalings -------------------------------------------------------------------------------------

  // `arriving`: columns' weights are still being spread. *mass: of the row, or -1 if it is none.
  __device__ float RowSum(int parity, bool arriving, float* mass) const {
    float s[S::kRows];
#pragma unroll
    for (int r = 0; r < S::kRows; ++r) s[r] = 0;
    const bool unsure = HasUnsure();
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      if (g >= S::kSure && !unsure) break;
      if constexpr (S::kSplit) {
        if (arriving && g % kHalf == 0) AwaitSpread(g / kHalf);
      }
      float weight[S::kWidth];
      Read(m_.weight[parity] + Column(g), weight);
#pragma unroll
      for (int r = 0; r < S::kRows; ++r) {
        float e[S::kWidth];
        ReadEntries(r, g, e);
#pragma unroll
        for (int k = 0; k < S::kWidth; ++k) s[r] = fmaf(e[k], weight[k], s[r]);
      }
    }
    // Fetched here, where sums are still to be combined, it is not waited for.
    const float own = m_.rows.mass[RowOf()];
    *mass = IsRow(RowOf()) ? own : -1;
    return CombineRow(s, [](float a, float b) { return a + b; });
  }
  // Into parts, of groups kFirst to kLast - 1, those of columns that there are; `parity`: of the rows' weights.
  template <int kFirst, int kLast>
  __device__ void AddColumns(int parity) {
    float weight[S::kRows];
#pragma unroll
    for (int r = 0; r < S::kRows; ++r) weight[r] = m_.rows.weight[parity][Row(r)];
    AddColumns<kFirst, kLast>(weight);
  }
  template <int kFirst, int kLast>
  __device__ void AddColumns(const float (&weight)[S::kRows]) {
    const bool unsure = HasUnsure();
#pragma unroll
    for (int g = kFirst; g < kLast; ++g) {
      if (g >= S::kSure && !unsure) break;
      float s[S::kWidth];
#pragma unroll
      for (int k = 0; k < S::kWidth; ++k) s[k] = 0;
#pragma unroll
      for (int r = 0; r < S::kRows; ++r) {
        float e[S::kWidth];
        ReadEntries(r, g, e);
#pragma unroll
        for (int k = 0; k < S::kWidth; ++k) s[k] = fmaf(e[k], weight[r], s[k]);
      }
      Write(s, m_.parts[warp_] + Column(g));
    }
  }

  // The new scaling of a row or column whose sum is `sum`, and whether it may be kept. `shift`: what is added to the
  // frame's part of the potential.
  template <bool kPlain>
  __device__ bool NewScaling(int side, float frame, double shift, float old, float sum, double relax,
                             float* scaling) const {
    *scaling = FastReciprocal(sum);
    if constexpr (kPlain) return sum > 1 / kDrift && sum < kDrift;
    const double damping = m_.damping[side];
    if (relax != 1 || damping != 1) {
      const double pull = damping == 1 ? 0 : (1 - damping) * (frame + shift * m_.scale);
      if (fabs(pull) < kPullMost) {
        *scaling =
            MovedScaling(old, sum, static_cast<float>(damping), static_cast<float>(pull), static_cast<float>(relax));
      } else {
        *scaling = RelaxedScaling(frame, old, sum, shift, m_.scale, m_.epsilon, m_.rho[side], relax);
      }
    }
    return IsUsable(sum) && *scaling<kDrift&& * scaling> 1 / kDrift;
  }
  __device__ double RowError(int k, float scaling, float sum) const {
    const double mass = m_.rows.mass[k], rho = m_.rho[0];
    if (mass == 0) return 0;
    const double shift = m_.rows.shift[k] - m_.reference;
    const double target = isinf(rho) ? 1 : RelaxedTarget(m_.rows.frame[k], scaling, shift, scale(), rho);
    return mass * fabs(static_cast<double>(scaling) * sum - target);
  }

  // Iterates up to `until` iterations; true if the next must be done by log-sum-exps. Once the solve has stopped, sums
  // of P at its end lie in the other parity's weights, of columns in the order of owned ones. Plain iterations are not
  // judged, and their state moves at the end. moved_: whether any was done; m_.unsafe: whether those sums are no use.
  template <Updates kUpdates>
  __device__ bool Iterate(int* parity, int until) {
    constexpr bool kPlain = kUpdates == Updates::kPlain;
    // What symmetric updates begin with is no iteration.
    const int home = *parity, wanted = until - m_.state[home].iterations + (m_.state[home].starting ? 1 : 0);
    const bool stopped = m_.state[home].stopped;
    moved_ = false;
    if (wanted <= 0 && !stopped) return false;
    int done = 0;
    float sum, mass;
    bool good;
    while (true) {
      sum = RowSum(*parity, kPlain && done > 0, &mass);
      good = !__any_sync(0xffffffffu, isnan(sum));
      if (!good || done >= wanted || (!kPlain && m_.state[*parity].stopped)) break;
      FinishIteration<kUpdates>(*parity, sum, mass);
      ++done;
      *parity ^= 1;
      if (!kPlain && m_.discard) {  // The state alone is new.
        CopyScalings(*parity ^ 1, *parity);
        --done;
      }
    }
    // Whether a sum was bad shows in all rows' sums, an iteration later: back to before it.
    if (!good && done > 0) --done, *parity ^= 1;
    moved_ = done > 0;
    if (kPlain) Advance(home, *parity, done);
    if (!stopped && (!good || !m_.state[*parity].stopped)) return !good;
    if (IsRowsFirstLane()) m_.rows.weight[*parity ^ 1][RowOf()] = sum;
    float column_sum = IsOwner() ? m_.sums[*parity][Owned()] : 0;
    if (done == 0 || m_.symmetric) {
      AddColumns<0, S::kGroups>(*parity);
      __syncthreads();
      column_sum = Gather<false>();
    }
    if (IsOwner()) m_.weight[*parity ^ 1][Owned()] = column_sum;
    // Balanced alternating updates have just made columns' sums 1; then rows' are no larger than masses allow: those of
    // rows that have one, if they are numbers.
    const bool balanced = good && (kPlain || (!m_.symmetric && isinf(m_.rho[0]) && isinf(m_.rho[1])));
    if (!balanced || (job_.in.a.data != nullptr && HasVoidRows())) {
      const bool row_counts = mass >= 0 && (!balanced || mass == 0);
      const bool column_counts = !balanced && IsOwner() && OwnedColumn() < size(1);
      const bool unsafe = AnyInCluster((row_counts && !IsUsable(sum)) || (column_counts && !IsUsable(column_sum)));
      if (threadIdx.x == 0) m_.unsafe = unsafe;
      __syncthreads();
    }
    return false;
  }
  __device__ static bool IsUsable(float sum) { return sum > kTiny && sum < kHuge; }
  __device__ void Advance(int from, int to, int iterations) {
    __syncthreads();
    if (threadIdx.x == 0 && iterations > 0) {
      EngineState next = m_.state[from];
      next.iterations += iterations;
      next.parity ^= iterations & 1;
      StopAtLimit(job_, &next);
      m_.state[to] = next;
    }
    __syncthreads();
  }
  __device__ void CopyScalings(int from, int to) {
    for (int k = threadIdx.x; k < S::kBlockRows; k += S::kBlockThreads) {
      m_.rows.scaling[to][k] = m_.rows.scaling[from][k];
      m_.rows.weight[to][k] = m_.rows.weight[from][k];
    }
    for (int j = threadIdx.x; j < S::kMost; j += S::kBlockThreads) m_.weight[to][j] = m_.weight[from][j];
    if (IsOwner()) {
      m_.scaling[to][Owned()] = m_.scaling[from][Owned()];
      m_.sums[to][Owned()] = m_.sums[from][Owned()];
    }
    __syncthreads();
  }

  // The rest of an iteration into the other parity, when rows' sums are known; `mass`: as RowSum tells. What is bad
  // spoils the weights of columns: rows of a block its parts of them, columns their own; and they, every row's sum of
  // the next iteration.
  template <Updates kUpdates>
  __device__ void FinishIteration(int parity, float sum, float mass) {
    constexpr bool kPlain = kUpdates == Updates::kPlain, kBoth = kUpdates == Updates::kJudgedBoth;
    const double relax = kPlain ? 1 : m_.state[parity].relax;
    const bool judged = kBoth || (!kPlain && job_.solver.tolerance > 0);
    // 1. Rows: this warp's own.
    const int row = RowOf();
    const float old = m_.rows.scaling[parity][row];
    float u;
    const double row_shift = kPlain ? 0 : m_.rows.shift[row] - m_.reference;
    const bool good = NewScaling<kPlain>(0, m_.rows.frame[row], row_shift, old, sum, relax, &u);
    const float own = mass >= 0 ? (good ? mass * u : NAN) : 0;
    const bool symmetric = kBoth || (!kPlain && m_.symmetric);
    if (IsRowsFirstLane()) {
      m_.rows.scaling[parity ^ 1][row] = mass >= 0 ? u : 1;
      m_.rows.weight[parity ^ 1][row] = own;
      if (symmetric && isnan(own)) m_.rows.weight[parity][row] = NAN;  // Those that columns see; nothing else does.
    }
    if (judged) {
      double error = IsRowsFirstLane() && IsRow(row) ? RowError(row, old, sum) : 0;
      for (int lane = 16; lane > 0; lane /= 2) error += __shfl_xor_sync(0xffffffffu, error, lane);
      if (lane_ == 0) m_.errors[warp_] = error;
    }
    __syncwarp();
    const int seen = symmetric ? parity : parity ^ 1;
    // 2. Columns: parts of all warps, of all blocks. What the first half comes to travels beside the second's sums.
    if constexpr (S::kSplit) {
      float weights[S::kRows];  // Those few are here sooner from lane to lane.
      const float weight = symmetric ? m_.rows.weight[parity][row] : own;
#pragma unroll
      for (int r = 0; r < S::kRows; ++r) weights[r] = __shfl_sync(0xffffffffu, weight, r * (32 / S::kRows));
      AddColumns<0, kHalf>(weights);
      __syncthreads();
      TellOwners<S::kOwn / 2>(0);
      AddColumns<kHalf, S::kGroups>(seen);
    } else {
      AddColumns<0, S::kGroups>(seen);
    }
    __syncthreads();  // Parts and errors are there.
    double error = 0;
    for (int w = 0; w < S::kWarps && judged; ++w) error += m_.errors[w];
    const int j = OwnedColumn();
    const bool there = j < size(1);
    const float column_mass = m_.mass[j];
    [[maybe_unused]] typename Base::SpreadPlan plan;
    float column_sum;
    if constexpr (S::kSplit) {
      TellOwners<S::kOwn / 2>(S::kMost / 2);
      if constexpr (kPlain) plan = Base::PlanSpread(m_.weight[parity ^ 1]);
      column_sum = Base::template Hear<false>(judged, error);
    } else {
      column_sum = Gather<false>(judged, error);
    }
    float v;
    const double column_shift = kPlain ? 0 : m_.shift[Owned()] + m_.reference;
    const bool kept =
        NewScaling<kPlain>(1, m_.frame[j], column_shift, m_.scaling[parity][Owned()], column_sum, relax, &v);
    const float weight = there ? (kept ? column_mass * v : NAN) : 0.0f;
    if constexpr (kPlain && S::kSplit) Base::EndSpread(weight, plan);  // RowSum waits for it.
    if (IsOwner()) {
      m_.scaling[parity ^ 1][Owned()] = there ? v : 1;
      m_.sums[parity ^ 1][Owned()] = column_sum;
    }
    const double row_error = judged ? heard_error_ : 0;
    if (!kPlain && !kBoth && threadIdx.x == 0) Decide(parity, row_error, row_error);
    if constexpr (!kPlain || !S::kSplit) Spread(weight, m_.weight[parity ^ 1]);
    if constexpr (kBoth) {
      const double own = IsOwner() && there ? ColumnError(m_, Owned(), j, parity) : 0;
      const double column_error = this->SumOfColumns(own);
      if (threadIdx.x == 0) Decide(parity, row_error, isnan(column_error) ? INFINITY : column_error);
      __syncthreads();
    }
  }
  // The state after this iteration, should it be kept.
  __device__ void Decide(int parity, double row_error, double column_error) {
    EngineState next = m_.state[parity];
    EndRows(job_, engine(), &next, row_error);
    if (!next.stopped) EndColumns(job_, engine(), &next, column_error);
    m_.discard = next.stopped && next.parity == m_.state[parity].parity;
    m_.state[parity ^ 1] = next;
  }

  // ---- Ends -------------------------------------------------------------------------------------------------------

  __device__ void Store(int parity) {
    __syncthreads();
    const int at = m_.state[parity].parity;
    for (int k = threadIdx.x; k < S::kBlockRows && IsRow(k); k += S::kBlockThreads) {
      member().phi(engine(), at, 0)[first_row() + k] = m_.rows.phi[k];
    }
    if (m_.rank != 0) return;
    for (int j = threadIdx.x; j < size(1); j += S::kBlockThreads) member().phi(engine(), at, 1)[j] = m_.phi[j];
    if (threadIdx.x == 0) *state() = m_.state[parity];
  }

  // What the sums of P at the final potentials tell, which Iterate has left.
  __device__ void Measure(int parity) {
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {
      // A warp has rows or columns where there are warps enough.
      const bool apart = S::kBlockRows + m_.owned <= S::kBlockThreads;
      const int k = static_cast<int>(threadIdx.x) - (side == 1 && apart ? S::kBlockRows : 0);
      const int first = side == 0 ? first_row() : m_.rank * m_.owned, i = first + k;
      BlockStats stats = {0, 0, 0, 0, 0, 1};
      if (k >= 0 && k < (side == 0 ? S::kBlockRows : m_.owned) && i < size(side)) {
        const double phi = side == 0 ? m_.rows.phi[k] : m_.phi[i], frame = side == 0 ? m_.rows.frame[k] : m_.frame[i];
        const int owned = S::kShared ? i : k;
        const double sum = side == 0 ? m_.rows.weight[parity ^ 1][k] : m_.weight[parity ^ 1][owned];
        const double sign = side == 0 ? 1 : -1;
        const int measure = MeasureOf(engine(), side);
        const MeasuredPoint point = {phi,
                                     side == 0 ? m_.rows.shift[k] : m_.shift[owned],
                                     member().mass(measure)[i],
                                     member().log_mass(measure)[i],
                                     sign * m_.phi[0],
                                     m_.state[parity].cut_short != 0};
        const double low = side == 0 ? m_.rows.scaling[parity ^ 1][k] : m_.scaling[parity ^ 1][owned];
        const double lse = m_.unsafe ? sum + low : log2(sum) - (frame - sign * m_.reference * scale());
        member().ratio(engine(), side)[i] = MeasurePoint(point, m_.rho[side], lse, scale(), &stats);
      }
      if (first < size(side)) StoreStats(stats, true, member().stats(engine(), side) + m_.rank);
    }
    // Seen by the cluster's blocks.
    __threadfence();
    if (S::kCluster) SyncCluster();
    __syncthreads();
    if (m_.rank == 0 && warp_ == 0) EndMeasuring();
  }
  // As EndPass, of both sides: blocks' statistics of rows to 16 lanes, those of columns to the others.
  __device__ void EndMeasuring() {
    const int side = lane_ / 16, k = lane_ % 16;
    double error = 0, finite = 1;
    if (k < RowBlocks(job_, engine(), side, Geometry::kOnChip)) {
      const BlockStats* stats = member().stats(engine(), side) + k;
      error = __ldcg(&stats->error);
      finite = __ldcg(&stats->finite);
    }
    for (int lane = 8; lane > 0; lane /= 2) {
      error += __shfl_xor_sync(0xffffffffu, error, lane);
      finite = fmin(finite, __shfl_xor_sync(0xffffffffu, finite, lane));
    }
    const double other = __shfl_down_sync(0xffffffffu, error, 16);
    finite = fmin(finite, __shfl_down_sync(0xffffffffu, finite, 16));
    if (lane_ != 0) return;
    EngineState* end = state();
    end->error[0] = error;
    end->error[1] = other;
    end->finite = finite > 0;
    end->converged = fmax(error, other) <= job_.solver.tolerance;
  }

  bool moved_ = false;
};

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_SOLVE_CUH_
