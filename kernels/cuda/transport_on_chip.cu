// Whole solves of small float32 problems: the plan's densities stay in registers, all iterations in one launch.
//
// A block has one problem of up to 128 x 128: T_ij = 2^(z_ij + row frame_i + column frame_j), 8 x 8 of it per thread,
// and iterates scalings, u_i = 1 / sum_j T_ij b_j v_j and v_j = 1 / sum_i T_ij a_i u_i: two fused multiply-adds an
// entry and iteration instead of two exponentials. Frames are potentials frozen when T was made. When scalings drift
// away from 1 the iteration is done by log-sum-exps instead, and T made anew; so is the first. Every kChunk iterations
// T is made anew whatever happens, so that a solve may be cut there without changing its bits.
//
// A half warp owns the rows that it has registers of: row sums need no barrier. Columns are added up over eight warps.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_rows.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

constexpr int kWarps = kThreads / 32;
constexpr int kMost = kOnChipTiles * kTile;
constexpr float kTiny = 0x1p-80f, kHuge = 0x1p+80f;  // Sums outside may have lost entries that count.
constexpr float kDrift = 0x1p+36f;                   // Scalings stay within [1 / kDrift, kDrift].

template <bool kDense>
struct OnChipMemory {
  TileMemory<kDense, kFloat> tile;
  double phi[2][kMost], shift[2][kMost];
  float log_mass[2][kMost], mass[2][kMost];
  float frame[2][kMost];       // phi in units of epsilon, base 2, seen from `reference`.
  float scaling[2][2][kMost];  // [parity][side]: u, v
  float weight[2][2][kMost];   // mass * scaling
  float parts[kWarps][kMost];
  float maxima[kWarps][kMost];
  double errors[kWarps];
  EngineState state[2];
  int discard;  // The residual says that the solve was finished before this iteration.
  double reference;
  double scale, epsilon, rho[2];
};

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

// Everything of a block but its registers.
template <bool kDense, int kTiles>
class OnChip {
 public:
  static constexpr int kOwn = 4 * kTiles;  // Rows of a thread, and columns.

  __device__ OnChip(const Job& job, int64_t index, OnChipMemory<kDense>* memory)
      : job_(job), member_{job, index}, m_(*memory), ty_(threadIdx.x / 16), tx_(threadIdx.x % 16) {}

  __device__ void Run(int chunks) {
    Load();
    const bool simple = job_.solver.tolerance == 0;
    const int last = min(job_.solver.max_iterations, m_.state[0].iterations + chunks * kOnChipChunk);
    int parity = 0;  // Of scalings and state.
    while (!m_.state[parity].stopped && m_.state[parity].iterations < last) {
      const int begun = m_.state[parity].iterations;
      const int until = min(last, (begun / kOnChipChunk + 1) * kOnChipChunk);
      if (begun == 0) {
        SafeIteration(&parity);
      } else {
        MakeDensities(parity);
      }
      while (simple ? IterateSimply(&parity, until) : IterateJudged(&parity, until)) {
        FreezePotentials(parity);
        SafeIteration(&parity);
      }
      FreezePotentials(parity);
    }
    Store(parity);
    if (m_.state[parity].stopped) Measure(parity);
  }

 private:
  __device__ static int Row(int l, int lane) { return kTile * (l / 4) + 4 * lane + l % 4; }
  __device__ double scale() const { return m_.scale; }
  __device__ int size(int side) const { return job_.size[side]; }

  __device__ void Load() {
    if (threadIdx.x == 0) {
      m_.state[0] = *member_.state(0);
      m_.discard = 0;
      m_.epsilon = job_.solver.epsilon;
      m_.scale = kLog2E / m_.epsilon;
      m_.rho[0] = job_.solver.rho_a;
      m_.rho[1] = job_.solver.rho_b;
    }
    const int parity = member_.state(0)->parity;
    for (int e = threadIdx.x; e < 2 * kMost; e += kThreads) {
      const int side = e / kMost, i = e % kMost;
      const bool there = i < size(side);
      m_.phi[side][i] = there ? member_.phi(0, parity, side)[i] : 0;
      m_.shift[side][i] = there ? member_.Shift(0, side, i) : 0;
      m_.mass[side][i] = there ? static_cast<float>(member_.mass(side)[i]) : 0;
      m_.log_mass[side][i] = static_cast<float>(there ? member_.log_mass(side)[i] : kVoid);
    }
    __syncthreads();
  }

  // z of this thread's entries, into t_.
  __device__ void MakeExponents() {
    TileContext c = MakeTileContext(job_, member_.index, 0, 0, job_.solver.epsilon);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        float z[4][4];
        MakeTile<kDense, kFloat>(c, i * kTile, j * kTile, &m_.tile, z);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
#pragma unroll
          for (int k = 0; k < 4; ++k) t_[4 * i + r][4 * j + k] = z[r][k];
        }
      }
    }
  }

  // Frames at phi, scalings what is left of it; then T.
  __device__ void MakeDensities(int parity) {
    __syncthreads();
    const double reference = m_.phi[1][0];
    for (int e = threadIdx.x; e < 2 * kMost; e += kThreads) {
      const int side = e / kMost, i = e % kMost;
      const double term = (side == 0 ? m_.phi[0][i] + reference : m_.phi[1][i] - reference) * scale();
      const float frame = static_cast<float>(term);
      m_.frame[side][i] = frame;
      const float scaling = exp2f(static_cast<float>(term - frame));
      m_.scaling[parity][side][i] = scaling;
      m_.weight[parity][side][i] = m_.mass[side][i] * scaling;
    }
    if (threadIdx.x == 0) m_.reference = reference;
    __syncthreads();
    MakeExponents();
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      const float row = m_.frame[0][Row(r, ty_)];
#pragma unroll
      for (int k = 0; k < kOwn; ++k) {
        // What has no mass may have any density, but not infinity.
        t_[r][k] = FastExp2(fminf(t_[r][k] + (row + m_.frame[1][Row(k, tx_)]), 126.0f));
      }
    }
  }

  // phi at the present scalings.
  __device__ void FreezePotentials(int parity) {
    __syncthreads();
    for (int e = threadIdx.x; e < 2 * kMost; e += kThreads) {
      const int side = e / kMost, i = e % kMost;
      const double term = m_.frame[side][i] + log2(static_cast<double>(m_.scaling[parity][side][i]));
      m_.phi[side][i] = term / scale() + (side == 0 ? -m_.reference : m_.reference);
    }
    __syncthreads();
  }
  __device__ void CopyScalings(int from, int to) {
    for (int e = threadIdx.x; e < 2 * kMost; e += kThreads) {
      m_.scaling[to][e / kMost][e % kMost] = m_.scaling[from][e / kMost][e % kMost];
    }
  }

  // ---- Iterations by log-sum-exps ---------------------------------------------------------------------------------

  // One iteration from phi, under maxima; then T at what it found.
  __device__ void SafeIteration(int* parity) {
    __syncthreads();
    const EngineState& state = m_.state[*parity];
    for (int side = 0; side < 2; ++side) {
      const double reference = m_.phi[1 - side][0];
      MakeExponents();
      if (side == 0) {
        AddTerms<false>(reference);
        SafeRows(reference, state.relax);
      } else {
        AddTerms<true>(reference);
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
    MakeDensities(*parity);
  }

  template <bool kRowTerms>
  __device__ void AddTerms(double reference) {
    const auto term = [&](int side, int i) {
      return static_cast<float>(fma(m_.phi[side][i] - reference, scale(), static_cast<double>(m_.log_mass[side][i])));
    };
#pragma unroll
    for (int l = 0; l < kOwn; ++l) {
      const float added = term(kRowTerms ? 0 : 1, Row(l, kRowTerms ? ty_ : tx_));
#pragma unroll
      for (int k = 0; k < kOwn; ++k) (kRowTerms ? t_[l][k] : t_[k][l]) += added;
    }
  }
  __device__ void Move(int side, int i, double lse, double relax) {
    const double rho = m_.rho[side];
    m_.phi[side][i] = HalfStep(m_.phi[side][i], lse, scale(), m_.shift[side][i], m_.epsilon, rho, relax);
  }
  __device__ void SafeRows(double reference, double relax) {
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      float max = t_[r][0], sum = 0;
#pragma unroll
      for (int k = 1; k < kOwn; ++k) max = fmaxf(max, t_[r][k]);
      for (int lane = 8; lane > 0; lane /= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, lane));
#pragma unroll
      for (int k = 0; k < kOwn; ++k) sum += FastExp2(t_[r][k] - max);
      for (int lane = 8; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
      if (tx_ == 0) Move(0, Row(r, ty_), max + log2(static_cast<double>(sum)) + reference * scale(), relax);
    }
  }
  __device__ void SafeColumns(double reference, double relax) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      float max = t_[0][k], sum = 0;
#pragma unroll
      for (int r = 1; r < kOwn; ++r) max = fmaxf(max, t_[r][k]);
      max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 16));
#pragma unroll
      for (int r = 0; r < kOwn; ++r) sum += FastExp2(t_[r][k] - max);
      sum += __shfl_xor_sync(0xffffffffu, sum, 16);
      if (lane < 16) {
        m_.maxima[warp][Row(k, tx_)] = max;
        m_.parts[warp][Row(k, tx_)] = sum;
      }
    }
    __syncthreads();
    if (threadIdx.x >= kTiles * kTile) return;
    float max = m_.maxima[0][threadIdx.x], sum = 0;
    for (int w = 1; w < kWarps; ++w) max = fmaxf(max, m_.maxima[w][threadIdx.x]);
    for (int w = 0; w < kWarps; ++w) sum += m_.parts[w][threadIdx.x] * FastExp2(m_.maxima[w][threadIdx.x] - max);
    Move(1, threadIdx.x, max + log2(static_cast<double>(sum)) + reference * scale(), relax);
  }

  // ---- Iterations by scalings -------------------------------------------------------------------------------------

  // The sum of row RowOf(tx) of this half warp's over its 16 lanes: halves of the rows change hands until one is left.
  __device__ float SumRow(float (&s)[kOwn]) const {
    int lane = 8;
#pragma unroll
    for (int count = kOwn / 2; count >= 1; count /= 2, lane /= 2) {
      const bool upper = (tx_ & lane) != 0;
#pragma unroll
      for (int k = 0; k < count; ++k) {
        const float send = upper ? s[k] : s[k + count], keep = upper ? s[k + count] : s[k];
        s[k] = keep + __shfl_xor_sync(0xffffffffu, send, lane);
      }
    }
    for (; lane > 0; lane /= 2) s[0] += __shfl_xor_sync(0xffffffffu, s[0], lane);
    return s[0];
  }
  __device__ int RowOf() const { return Row(tx_ / (16 / kOwn), ty_); }
  __device__ bool IsRowsFirstLane() const { return tx_ % (16 / kOwn) == 0; }

  __device__ float RowSum(int parity) {
    float weight[kOwn], s[kOwn];
#pragma unroll
    for (int k = 0; k < kOwn; ++k) weight[k] = m_.weight[parity][1][Row(k, tx_)];
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      s[r] = 0;
#pragma unroll
      for (int k = 0; k < kOwn; ++k) s[r] = fmaf(t_[r][k], weight[k], s[r]);
    }
    return SumRow(s);
  }
  // Into parts; `parity`: of the rows' weights.
  __device__ void AddColumns(int parity) {
    float weight[kOwn];
#pragma unroll
    for (int r = 0; r < kOwn; ++r) weight[r] = m_.weight[parity][0][Row(r, ty_)];
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      float s = 0;
#pragma unroll
      for (int r = 0; r < kOwn; ++r) s = fmaf(t_[r][k], weight[r], s);
      s += __shfl_xor_sync(0xffffffffu, s, 16);
      if (threadIdx.x % 32 < 16) m_.parts[threadIdx.x / 32][Row(k, tx_)] = s;
    }
  }
  __device__ float ColumnSum(int j) const {
    float sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += m_.parts[w][j];
    return sum;
  }

  // The new scaling of a row or column whose sum is `sum`.
  __device__ float NewScaling(int side, int i, float old, float sum, double relax) const {
    const double rho = m_.rho[side];
    if (relax == 1 && isinf(rho)) return 1 / sum;
    const double shift = m_.shift[side][i] + (side == 0 ? -m_.reference : m_.reference);
    return RelaxedScaling(m_.frame[side][i], old, sum, shift, m_.scale, m_.epsilon, rho, relax);
  }
  __device__ static bool IsGood(float sum, float scaling) {
    return sum > kTiny && sum < kHuge && scaling < kDrift && scaling > 1 / kDrift;
  }
  __device__ double RowError(int i, float scaling, float sum) const {
    const double mass = m_.mass[0][i], rho = m_.rho[0];
    if (mass == 0) return 0;
    const double shift = m_.shift[0][i] - m_.reference;
    const double target = isinf(rho) ? 1 : RelaxedTarget(m_.frame[0][i], scaling, shift, scale(), rho);
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
    const int warp = threadIdx.x / 32;
    const double relax = simple ? 1 : m_.state[parity].relax;
    // 1. Rows: this half warp's own.
    const int i = RowOf();
    const float old = m_.scaling[parity][0][i], sum = RowSum(parity);
    const float u = NewScaling(0, i, old, sum, relax);
    const bool bad = i < size(0) && !IsGood(sum, u);
    if (IsRowsFirstLane()) {
      m_.scaling[parity ^ 1][0][i] = i < size(0) ? u : 1;
      m_.weight[parity ^ 1][0][i] = i < size(0) ? m_.mass[0][i] * u : 0;
    }
    if (!simple) {
      double error = IsRowsFirstLane() && i < size(0) ? RowError(i, old, sum) : 0;
      for (int lane = 16; lane > 0; lane /= 2) error += __shfl_xor_sync(0xffffffffu, error, lane);
      if (threadIdx.x % 32 == 0) m_.errors[warp] = error;
    }
    __syncwarp();
    // 2. Columns: parts of all warps.
    AddColumns(parity ^ 1);
    __syncthreads();  // Parts and errors are there.
    bool bad_column = false;
    if (threadIdx.x < kTiles * kTile) {
      const int j = threadIdx.x;
      const float column = ColumnSum(j), v = NewScaling(1, j, m_.scaling[parity][1][j], column, relax);
      bad_column = j < size(1) && !IsGood(column, v);
      m_.scaling[parity ^ 1][1][j] = j < size(1) ? v : 1;
      m_.weight[parity ^ 1][1][j] = j < size(1) ? m_.mass[1][j] * v : 0;
    }
    if (threadIdx.x == kThreads - 1 && !simple) Decide(parity);
    return __syncthreads_or(bad || bad_column) == 0;  // Scalings and state are there.
  }
  // The state after this iteration, should it be kept.
  __device__ void Decide(int parity) {
    EngineState next = m_.state[parity];
    double error = 0;
    for (int w = 0; w < kWarps; ++w) error += m_.errors[w];
    EndRows(job_, 0, &next, error);
    m_.discard = next.stopped;
    if (!next.stopped) EndColumns(job_, 0, &next, 0);
    m_.state[parity ^ 1] = next;
  }

  // ---- Ends -------------------------------------------------------------------------------------------------------

  __device__ void Store(int parity) {
    EngineState* state = member_.state(0);
    const int at = m_.state[parity].parity;
    for (int e = threadIdx.x; e < 2 * kMost; e += kThreads) {
      const int side = e / kMost, i = e % kMost;
      if (i < size(side)) member_.phi(0, at, side)[i] = m_.phi[side][i];
    }
    if (threadIdx.x == 0) *state = m_.state[parity];
    __syncthreads();
  }

  // Sums of P at the final potentials.
  __device__ void Measure(int parity) {
    MakeDensities(parity);
    const RowBlock block = {member_.index, 0, 0, 0, 1};
    const float row = RowSum(parity);
    AddColumns(parity);
    __syncthreads();
    // One thread a row: through shared memory.
    if (IsRowsFirstLane()) m_.maxima[0][RowOf()] = row;
    const float column = threadIdx.x < kTiles * kTile ? ColumnSum(threadIdx.x) : 1;
    __syncthreads();
    for (int side = 0; side < 2; ++side) {
      const int i = threadIdx.x;
      BlockStats stats = {0, 0, 0, 0, 0, 1};
      if (i < kTiles * kTile && i < size(side)) {
        const float sum = side == 0 ? m_.maxima[0][i] : column;
        const double frame = m_.frame[side][i] / scale() + (side == 0 ? -m_.reference : m_.reference);
        MeasureRow(member_, block, side, i, log2(static_cast<double>(sum)) - frame * scale(), scale(), &stats);
      }
      StoreStats(stats, true, member_.stats(0, side));
      __syncthreads();
      EndPass(member_, block, side, Pass::kMeasure, 1);
      __syncthreads();
    }
  }

  const Job& job_;
  const Member member_;
  OnChipMemory<kDense>& m_;
  const int ty_, tx_;
  float t_[kOwn][kOwn];
};

template <bool kDense, int kTiles>
__global__ void __launch_bounds__(kThreads, kTiles == 1 ? 3 : 2) OnChipKernel(LaunchTable table, int chunks) {
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = table.jobs[work.job];
  const EngineState* state = Member{job, work.block}.state(0);
  if (state->mode != kFloat || state->stopped) return;
  if (OnChipTiles(job) != kTiles) return;
  OnChip<kDense, kTiles>(job, work.block, reinterpret_cast<OnChipMemory<kDense>*>(DynamicShared())).Run(chunks);
}

}  // namespace

void LaunchOnChip(const LaunchTable& table, int64_t blocks, bool dense, int tiles, int chunks, cudaStream_t stream) {
  const auto launch = [&](void (*kernel)(LaunchTable, int), size_t bytes) {
    LaunchKernel(kernel, blocks, kThreads, bytes, stream, table, chunks);
  };
  if (dense) return launch(tiles == 1 ? OnChipKernel<true, 1> : OnChipKernel<true, 2>, sizeof(OnChipMemory<true>));
  return launch(tiles == 1 ? OnChipKernel<false, 1> : OnChipKernel<false, 2>, sizeof(OnChipMemory<false>));
}

}  // namespace cuda
}  // namespace sinkhorn
