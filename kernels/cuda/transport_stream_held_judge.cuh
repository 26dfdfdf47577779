// What a block that holds a problem (transport_stream_held.cu) knows of how its iterations go, where those are judged:
// by a tolerance, or because marginals are relaxed (Hopper).
//
// Each block tells all others how far its rows' sums are from where they should be, and they tell it: all decide alike,
// by the rules of transport_control.cuh. One warp does, and of it the first thread has the state.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_HELD_JUDGE_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_HELD_JUDGE_CUH_

#include "kernels/cuda/transport_stream_held_rows.cuh"

namespace sinkhorn {
namespace cuda {

#if SINKHORN_HOPPER

// How much an iteration is relaxed; or that there is none, and whether the one before counts. It does not where the
// residual had been small enough already.
constexpr float kStopped = 0, kVoided = -1;
// The state after an iteration that began with this residual, and the verdict.
static __device__ __noinline__ float JudgeIteration(const Job& job, int engine, const EngineState& state,
                                                    double row_error, double column_error, EngineState* next) {
  *next = state;
  EndRows(job, engine, next, row_error);
  if (!next->stopped) EndColumns(job, engine, next, column_error);
  if (!next->stopped) return static_cast<float>(next->relax);
  return next->parity == state.parity ? kVoided : kStopped;
}

// In shared memory. Relaxed marginals damp what a half step adds to the logarithm of a sum, and pull it by
// (1 - damping) times the potential at which densities were made, in units of epsilon, base 2.
struct HeldJudging {
  EngineState states[2];  // By turn: before it.
  float verdicts[2];      // Likewise.
  float damping[2], row_pulls[kHeldRowsMost], column_pulls[kHeldOwnedMost];
};
__device__ inline HeldJudging* JudgingOfBlock() {
  __shared__ HeldJudging judging;
  static_assert(sizeof(judging) <= kHeldJudgingBytes, "room");
  return &judging;
}
constexpr double kHeldPullMost = 16;  // Beyond, float leaves a sum too few digits.

// Of which sides' residuals: of engines 1 and 2 columns do as rows; symmetric updates leave both with one.
enum class Judged { kRows, kSelf, kBoth };

// Turns are iterations begun. `kThere`: iterations are judged.
template <bool kThere, Judged kSides>
class HeldJudge {
 public:
  __device__ HeldJudge(const Member& member, const HeldPart& part) : member_(member), part_(part) {
    if constexpr (kThere) judging_ = JudgingOfBlock();
  }

  // Of the warp that judges; of the thread that has the state. Not of the first warps, which look after columns.
  __device__ static bool IsWarp() { return kThere && threadIdx.x / 32 == kHeldWarps - 1; }
  __device__ static bool IsThread() { return IsWarp() && threadIdx.x % 32 == 0; }

  // By that thread: the state before a turn.
  __device__ const EngineState& State(int turn) const { return judging_->states[turn & 1]; }
  __device__ void SetState(int turn, const EngineState& state) {
    judging_->states[turn & 1] = state;
    judging_->verdicts[turn & 1] = static_cast<float>(state.relax);
  }
  // In the place of the one before it, for which nothing is left; and so where sweeps go on, which extrapolate columns
  // as long as that pays, instead of over-relaxing them.
  __device__ void Leave(int turn, bool extrapolates) const {
    EngineState* state = member_.state(Engine());
    *state = State(turn);
    if (!extrapolates || !IsAccelerated(member_.job)) return;
    state->anderson = 1;
    state->relaxation.weight = state->relax = 1;
    state->relaxation.plain = 0;
  }
  // By all: how a turn is to be made.
  __device__ float Verdict(int turn) const { return kThere ? judging_->verdicts[turn & 1] : 1; }

  // By two threads: what this block tells others says that it is of no turn.
  __device__ void Clear(int buffer) const {
    if (!kThere) return;
    StoreTagged(ErrorsOf(buffer) + part_.rank, 0.0f, 0);
    for (int warp = 0; warp < kColumnErrors; ++warp) StoreTagged(ColumnErrors(buffer) + warp, 0.0f, 0);
  }

  // ---- Relaxed marginals --------------------------------------------------------------------------------------------

  // By threads 0 and 1, of a side each.
  __device__ void TakeDamping(int side) { judging_->damping[side] = static_cast<float>(DampingOfSide(side)); }
  // Row k, point i; the thread's column, point j: at these potentials.
  __device__ void TakeRow(int k, int i, double phi) { judging_->row_pulls[k] = PullOf(0, i, phi); }
  __device__ void TakeColumn(int j, double phi) { judging_->column_pulls[threadIdx.x] = PullOf(1, j, phi); }
  // The inverse of a scale, after the half step of a turn from `before`.
  __device__ float RelaxedRow(int k, float before, float sum, int turn) const {
    return kThere ? Relaxed(0, before, sum, judging_->row_pulls[k], turn) : sum;
  }
  __device__ float RelaxedColumn(float before, float sum, int turn) const {
    return kThere ? Relaxed(1, before, sum, judging_->column_pulls[threadIdx.x], turn) : sum;
  }

  // ---- Residuals ----------------------------------------------------------------------------------------------------
  // They decide nothing of a fixed number of iterations: nobody tells, or waits for, any then.

  // By the warp that judges, a row to each lane: how far the block's marginals are from where they should be.
  __device__ void TellError(int turn, float mass, float before, float sum) const {
    if (!IsDecided()) return;
    const int lane = threadIdx.x % 32;
    float error = mass * (lane < part_.rows ? ErrorOf(0, before, sum, judging_->row_pulls[lane]) : 0);
    for (int lanes = 16; lanes > 0; lanes /= 2) error += __shfl_xor_sync(0xffffffffu, error, lanes);
    if (lane == 0) StoreTagged(ErrorsOf(turn) + part_.rank, error, ErrorTag(turn));
  }
  // By the warps that look after columns, a column to each lane.
  __device__ void TellColumnError(int turn, float error) const {
    if (!IsDecided()) return;
    for (int lanes = 16; lanes > 0; lanes /= 2) error += __shfl_xor_sync(0xffffffffu, error, lanes);
    if (threadIdx.x % 32 == 0) StoreTagged(ColumnErrors(turn) + threadIdx.x / 32, error, ErrorTag(turn));
  }
  // What a column that the thread looks after tells.
  __device__ float ColumnError(float mass, float before, float sum) const {
    return mass > 0 ? mass * ErrorOf(1, before, sum, judging_->column_pulls[threadIdx.x]) : 0;
  }
  // By that warp, while the others add up columns: the state after a turn, of all blocks' errors.
  __device__ void Judge(int turn) {
    constexpr int kMost = static_cast<int>(CeilDiv(kProcessors * (1 + kColumnErrors), 32));
    const int count = part_.blocks * (1 + kColumnErrors);
    const int lane = threadIdx.x % 32;
    const float* errors = ErrorsOf(turn);
    uint32_t seen[kMost] = {};
    bool there = !IsDecided();
    while (!there) {
      there = true;
#pragma unroll
      for (int k = 0; k < kMost; ++k) seen[k] = LoadOneTagged(errors + min(32 * k + lane, count - 1));
#pragma unroll
      for (int k = 0; k < kMost; ++k) there = there && ((seen[k] ^ ErrorTag(turn)) & 1) == 0;
    }
    double rows = 0, columns = 0;
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      const int at = 32 * k + lane;
      const double error = at < count ? __uint_as_float(seen[k]) : 0;
      (at < part_.blocks ? rows : columns) += error;
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      rows += __shfl_xor_sync(0xffffffffu, rows, lanes);
      if (kSides == Judged::kBoth) columns += __shfl_xor_sync(0xffffffffu, columns, lanes);
    }
    if (IsThread()) {
      const double other = kSides == Judged::kSelf ? rows : columns;
      judging_->verdicts[(turn + 1) & 1] =
          JudgeIteration(member_.job, Engine(), State(turn), rows, other, &judging_->states[(turn + 1) & 1]);
    }
    __syncwarp();
  }

 private:
  __device__ bool IsDecided() const { return member_.job.solver.tolerance > 0; }  // By residuals.
  __device__ int Engine() const { return kSides == Judged::kSelf ? part_.engine : 0; }
  static constexpr int kColumnErrors = kSides == Judged::kBoth ? kHeldOwnedMost / 32 : 0;  // Of a block.
  // Blocks' errors, in the place of what is measured when all iterations are over: of a turn where those of two before
  // it were. Those of all blocks' rows, then of their columns.
  __device__ float* ErrorsOf(int turn) const {
    static_assert(2 * (1 + kColumnErrors) * sizeof(float) <= sizeof(BlockStats), "room");
    return reinterpret_cast<float*>(member_.stats(Engine(), 0)) + (turn & 1) * part_.blocks * (1 + kColumnErrors);
  }
  __device__ float* ColumnErrors(int turn) const {  // Of this one.
    return ErrorsOf(turn) + part_.blocks + part_.rank * kColumnErrors;
  }
  __device__ static uint32_t ErrorTag(int turn) { return (turn + 1) / 2 & 1; }

  __device__ double DampingOfSide(int side) const {
    return DampingOf(member_.job.solver.epsilon, RhoOf(member_.job, Engine(), side));
  }
  // No number if it is too much: sums are lost then. What has no mass may be pulled as far as it is.
  __device__ float PullOf(int side, int i, double phi) const {
    const double damping = DampingOfSide(side);
    if (damping == 1) return 0;
    const double pull = (1 - damping) * part_.frame.scale * (phi + member_.Shift(Engine(), side, i));
    const bool counts = member_.log_mass(MeasureOf(Engine(), side))[i] > kVoid;
    return counts && fabs(pull) >= kHeldPullMost ? NAN : static_cast<float>(pull);
  }
  __device__ float Relaxed(int side, float before, float sum, float pull, int turn) const {
    const float relax = Verdict(turn), damping = judging_->damping[side];
    if (relax == 1 && damping == 1) return sum;
    float move = log2f(sum / before);
    if (damping != 1) move = damping * move - (1 - damping) * log2f(before) + pull;
    return before * FastExp2(relax * move);
  }
  // How far a marginal is from where it should be, for its mass.
  __device__ float ErrorOf(int side, float before, float sum, float pull) const {
    const float damping = judging_->damping[side];
    if (damping == 1) return fabsf(sum - before) / before;
    return fabsf(sum / before - FastExp2(((1 - damping) * log2f(before) - pull) / damping));
  }

  const Member& member_;
  const HeldPart& part_;
  HeldJudging* judging_ = nullptr;
};

#endif

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_HELD_JUDGE_CUH_
