// How iterations go that all blocks of a launch make together, where those are judged by a tolerance (Hopper):
// residuals, stopping and over-relaxation by the rules of transport_control.cuh, columns extrapolated by those of
// kernels/cpu/anderson.h.
//
// A block has some rows, and adds up some columns. At the end of an iteration each tells all others, in memory, its
// part of both residuals and of the products that a fit takes, in double; from the same sums in the same order all
// decide alike. What is extrapolated are the logarithms of columns' scales, base 2, as every block has seen them, less
// no mean: where rows are exact, what their common part is for is second to the residual.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_JOINT_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_JOINT_CUH_

#include "kernels/cuda/transport_anderson.cuh"
#include "kernels/cuda/transport_stream_held.cuh"

namespace sinkhorn {
namespace cuda {

#if SINKHORN_HOPPER

// In shared memory, of a block with up to kColumns columns of its own.
template <int kColumns>
struct JointMemory {
  EngineState states[2];         // By turn: before it.
  AndersonProgress progress[2];  // Likewise.
  double totals[kJointTold], gram[kAndersonWindow][kAndersonWindow];
  float weights[kAndersonWindow];
  // Of the columns' last turn: their logarithm and residual; their differences from turns before.
  float at[kColumns], residual[kColumns], error[kColumns];
  float steps[kAndersonWindow][kColumns], differences[kAndersonWindow][kColumns];
  bool extrapolates;  // If the solve goes on.
};

// Of blocks of kThreads threads. Turns are iterations begun.
template <int kThreads, int kColumns>
class JointIterations {
  static constexpr int kWindow = kAndersonWindow, kWarps = kThreads / 32;
  static constexpr int kOfColumns = 2 * kWindow, kOfRows = kOfColumns + 1;  // Places of residuals, behind products.
  static constexpr int kLanes = 8;                                          // That have one of them.
  static_assert(kOfRows < kJointTold && (kOfColumns + 1) * kLanes <= kThreads - 32, "the last warp has rows");

 public:
  using Memory = JointMemory<kColumns>;

  // `masses`: of the block's own columns, of which column c is first + c of all.
  __device__ JointIterations(const Member& member, Memory* memory, const float* masses)
      : member_(member), m_(*memory), masses_(masses) {}

  // By all threads; told and read when all blocks have met. `goes_on`: with what the launch before has left.
  __device__ void Begin(int rank, int blocks, int first, int columns, bool goes_on) {
    rank_ = rank, blocks_ = blocks, first_ = first, columns_ = columns;
    goes_on = goes_on && IsAccelerated(member_.job);
    if (threadIdx.x < 2 * kJointTold) {
      StoreTagged(ToldOf(threadIdx.x % 2) + threadIdx.x / 2 * kProcessors + rank, 0.0, 0);
    }
    const AndersonState* from = IsAccelerated(member_.job) ? member_.anderson() : nullptr;
    if (threadIdx.x == 0) {
      m_.states[1] = *member_.state(0);
      if (from != nullptr) m_.progress[1] = from->progress;
      if (!goes_on) RestartExtrapolation(&m_.progress[1]);
    }
    if (threadIdx.x < kColumns) {
      const int c = threadIdx.x;
      m_.at[c] = m_.residual[c] = m_.error[c] = 0;
      for (int k = 0; k < kWindow; ++k) m_.steps[k][c] = m_.differences[k][c] = 0;
    }
    if (!goes_on) return;
    if (threadIdx.x < kWindow * kWindow) {
      const int i = threadIdx.x / kWindow, j = threadIdx.x % kWindow;
      m_.gram[i][j] = from->gram[i][j];
    }
    EachNumber([](float* x, double* kept) { *x = static_cast<float>(*kept); });
  }
  // Before the turn to come; whether there is none.
  __device__ const EngineState& State() const { return m_.states[(turn_ + 1) & 1]; }
  __device__ bool IsStopped() const { return State().stopped != 0; }
  // Whether the last turn does not count: the residual before it was small enough.
  __device__ bool IsVoided() const { return turn_ > 0 && IsStopped() && State().parity == StateBefore().parity; }
  // By one thread: the last turn has not been. What comes after it is extrapolated from nothing before.
  __device__ void Undo() {
    m_.states[(turn_ + 1) & 1] = StateBefore();
    m_.progress[(turn_ + 1) & 1] = ProgressBefore();
    RestartExtrapolation(&m_.progress[(turn_ + 1) & 1]);
  }
  // What is left for those that go on in another way.
  __device__ void Leave(EngineState* state) const {
    *state = State();
    state->anderson = state->anderson && Progress().active;
  }

  // By a thread for each column of the block: column c's scale in this turn, as a logarithm, and what its marginal is
  // to its mass.
  __device__ void Tell(int c, float at, float ratio) {
    const float residual = -log2f(ratio), change = residual - m_.residual[c];
    const int slot = Progress().count % kWindow;
    m_.steps[slot][c] = at - m_.at[c] + change;
    m_.differences[slot][c] = change;
    m_.at[c] = at;
    m_.residual[c] = residual;
    m_.error[c] = masses_[c] * fabsf(ratio - 1);
  }
  // By all threads, when columns have been told; of the last warp, lanes' parts of the rows' residual. Then the state
  // after the turn is known.
  __device__ void Decide(double error_of_rows) {
    ++turn_;
    __syncthreads();
    TellOthers(error_of_rows);
    Collect();
    __syncthreads();
    Judge();
    __syncthreads();
  }
  // As the turn in progress relaxes it: what a row is divided by, and was before.
  __device__ float RelaxedRow(float before, float sum) const {
    return RelaxedSum(before, sum, static_cast<float>(State().relax));
  }
  // By what a column's sum is multiplied to be over-relaxed, or extrapolated.
  __device__ float FactorOf(int c, float ratio) const {
    if (m_.extrapolates && !IsStopped()) {
      float sum = 0;
#pragma unroll
      for (int k = 0; k < kWindow; ++k) sum += m_.weights[k] != 0 ? m_.weights[k] * m_.steps[k][c] : 0;
      return FastExp2(sum);
    }
    const float relax = static_cast<float>(StateBefore().relax);
    return relax == 1 ? 1 : FastExp2((relax - 1) * log2f(ratio));
  }
  // What others go on from: how extrapolation goes; `differences`: for a launch of this kind, with those of its window.
  __device__ void End(bool differences) {
    if (!IsAccelerated(member_.job)) return;
    AndersonState* to = member_.anderson();
    if (rank_ == 0 && threadIdx.x == 0) {
      to->progress = Progress();
      if (!differences) RestartExtrapolation(&to->progress);
    }
    if (!differences) return;
    if (rank_ == 0 && threadIdx.x < kWindow * kWindow) {
      const int i = threadIdx.x / kWindow, j = threadIdx.x % kWindow;
      to->gram[i][j] = m_.gram[i][j];
    }
    EachNumber([](float* x, double* kept) { *kept = *x; });
  }

 private:
  // Before the last turn.
  __device__ const EngineState& StateBefore() const { return m_.states[turn_ & 1]; }
  __device__ const AndersonProgress& Progress() const { return m_.progress[(turn_ + 1) & 1]; }
  __device__ const AndersonProgress& ProgressBefore() const { return m_.progress[turn_ & 1]; }
  // Of a turn: where the one before the last was, which all have read by now.
  __device__ double* ToldOf(int turn) const {
    return member_.At<double>(member_.job.at.joint_told) + int64_t{turn & 1} * kJointTold * kProcessors;
  }
  __device__ uint32_t Tag() const { return (turn_ + 1) / 2 & 1; }

  // By a thread for each column: visit(number, where it is kept between launches).
  template <typename Visit>
  __device__ void EachNumber(Visit visit) {
    const int c = threadIdx.x;
    const int64_t size = member_.job.size[1];
    if (c >= columns_ || first_ + c >= size) return;
    double* kept = member_.At<double>(member_.job.at.anderson_vectors) + first_ + c;
    visit(&m_.at[c], kept);
    visit(&m_.residual[c], kept + size);
    for (int k = 0; k < kWindow; ++k) {
      visit(&m_.steps[k][c], kept + (2 + k) * size);
      visit(&m_.differences[k][c], kept + (2 + kWindow + k) * size);
    }
  }

  // Eight lanes for each sum over the block's columns, the last warp for its rows.
  __device__ void TellOthers(double error_of_rows) const {
    const int place = threadIdx.x / kLanes, k = place % kWindow, slot = ProgressBefore().count % kWindow;
    const bool of_rows = threadIdx.x / 32 == kWarps - 1;
    double sum = of_rows ? error_of_rows : 0;
    if (!of_rows && place <= kOfColumns) {
      const bool of_errors = place == kOfColumns;
      const bool known = of_errors || (!ProgressBefore().fresh && k < min(ProgressBefore().count + 1, kWindow));
      const float *of = of_errors ? m_.error : m_.differences[k],
                  *by = place < kWindow ? m_.differences[slot] : m_.residual;
#pragma unroll
      for (int first = 0; first < kColumns; first += kLanes) {
        const int c = first + threadIdx.x % kLanes;
        const double term = of_errors ? of[c] : static_cast<double>(masses_[c] * of[c]) * by[c];
        sum += known && c < columns_ ? term : 0;
      }
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
      const double other = __shfl_xor_sync(0xffffffffu, sum, mask);
      if (of_rows || mask < kLanes) sum += other;
    }
    if (of_rows ? threadIdx.x % 32 == 0 : threadIdx.x % kLanes == 0 && place <= kOfColumns) {
      StoreTagged(ToldOf(turn_) + (of_rows ? kOfRows : place) * kProcessors + rank_, sum, Tag());
    }
  }
  // A warp for each sum over all blocks. First one warp looks until one number of each block is there: all looking
  // would hold up those that are late.
  __device__ void Collect() const {
    constexpr int kEach = static_cast<int>(CeilDiv(kJointTold, kWarps));
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == 0) AwaitTold(kOfColumns);
    __syncthreads();
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int place = warp + kWarps * e;
      if (place >= kJointTold) break;
      double sum = AwaitTold(place);
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
      if (lane == 0) m_.totals[place] = sum;
    }
  }
  // The lane's part of a sum over all blocks, once all have told theirs.
  __device__ double AwaitTold(int place) const {
    constexpr int kMost = static_cast<int>(CeilDiv(kProcessors, 32));
    const int lane = threadIdx.x % 32;
    const double* told = ToldOf(turn_) + place * kProcessors;
    unsigned long long seen[kMost];
    for (bool there = false; !there;) {
      there = true;
#pragma unroll
      for (int k = 0; k < kMost; ++k) seen[k] = LoadOneTagged(told + min(32 * k + lane, blocks_ - 1));
#pragma unroll
      for (int k = 0; k < kMost; ++k) there = there && ((seen[k] ^ Tag()) & 1) == 0;
    }
    double sum = 0;
#pragma unroll
    for (int k = 0; k < kMost; ++k) sum += 32 * k + lane < blocks_ ? __longlong_as_double(seen[k]) : 0;
    return sum;
  }
  // The state after the turn, by one warp; by another, in case it goes on, from what columns are extrapolated.
  __device__ void Judge() {
    if (threadIdx.x == 32) EndTurn(&m_.states[(turn_ + 1) & 1]);
    if (threadIdx.x >= 32) return;
    const int lane = threadIdx.x;
    AndersonProgress* progress = &m_.progress[(turn_ + 1) & 1];
    if (lane == 0) {
      *progress = ProgressBefore();
      m_.extrapolates =
          StateBefore().anderson && Extrapolates(progress, m_.totals[kOfColumns] / StateBefore().total_mass[1]);
    }
    __syncwarp();
    if (!m_.extrapolates) return;
    const int known = min(progress->count, kWindow), slot = (progress->count - 1) % kWindow;
    if (lane < known) m_.gram[slot][lane] = m_.gram[lane][slot] = m_.totals[lane];
    __syncwarp();
    const double fitted = FitResidual(m_.gram, known, m_.totals[kWindow + lane % kWindow]);
    if (lane < kWindow) m_.weights[lane] = lane < known ? static_cast<float>(fitted) : 0;
  }
  __device__ void EndTurn(EngineState* next) const {
    *next = StateBefore();
    next->extrapolate = 0;
    next->anderson = next->anderson && ProgressBefore().active;
    EndRows(member_.job, 0, next, m_.totals[kOfRows]);
    if (!next->stopped) EndColumns(member_.job, 0, next, m_.totals[kOfColumns]);
  }
  // Whether there is something to extrapolate from.
  static __device__ bool Extrapolates(AndersonProgress* progress, double error) {
    const bool goes = JudgeExtrapolation(progress, error), differs = !progress->fresh;
    if (goes) progress->fresh = 0;
    if (goes && differs) ++progress->count;
    return goes && differs;
  }

  const Member& member_;
  Memory& m_;
  const float* const masses_;
  int rank_ = 0, blocks_ = 0, first_ = 0, columns_ = 0;
  int turn_ = 0;
};

#endif

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_JOINT_CUH_
