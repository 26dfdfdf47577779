// All iterations, in one launch, of problems whose densities so many blocks of a device together have room for: each
// has some whole rows and holds them from one iteration to the next (Hopper).
//
// Densities 2^(z + row term + column term), at the potentials it begins with, lie in registers and shared memory. From
// then on an iteration is a row's sum of densities times its columns' scales, and a column's of densities times its
// rows' weights. A thread has the same columns of every row. Columns' sums of a block's rows go to the blocks that add
// up those columns, and their scales come back from there, both through memory. Where rows are more than there is room
// for, the others' exponents are read again in each iteration, four rows at a time, whose sums and weights come first,
// so that they are read once. Potentials are what sums say at the end. Where one leaves the range in which densities
// have all their digits, the iteration before was the last, and densities are made anew at its potentials; if that does
// not help, sweeps (transport_stream.cu) go on.
//
// With a tolerance or relaxed marginals iterations are judged: each block tells all others how far its rows' sums are
// from where they should be, which is the residual before the iteration, and all know at its end whether it counts, and
// how much the next one is to be over-relaxed.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/transport_stream_held.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

#if SINKHORN_HOPPER

constexpr int kHeldWarps = kHeldThreads / 32;

// Which rows and columns a block has, and where numbers go: in shared memory, since registers are short.
struct HeldPart {
  StreamFrame frame;
  float* sums;    // [blocks, columns]
  float* scales;  // [columns]
  int blocks, rank, columns, quads;
  int first_row, rows;  // Perhaps none: it sends zeros then, so that nobody is a turn ahead of it.
  int held;             // Of these rows, so many stay; the others are read in each iteration, four at a time.
  int owned, lanes;     // Columns of each span that it adds up; lanes that have four of them each.
};
__device__ inline HeldPart HeldPartOf(const Member& member, int blocks, bool reads) {
  const Job& job = member.job;
  HeldPart part;
  part.frame = StreamFrameOf(member, *member.state(0));
  part.sums = member.At<float>(job.at.stream_sums[0]);
  part.scales = member.At<float>(job.at.stream_scales);
  part.blocks = blocks;
  part.rank = blockIdx.x % blocks;
  part.columns = StreamColumns(job, 0);
  part.quads = part.columns / 4;
  const int each = static_cast<int>(CeilDiv(job.size[0], blocks));
  part.first_row = min(part.rank * each, job.size[0]);
  part.rows = min(each, job.size[0] - part.first_row);
  part.held = part.rows - static_cast<int>(CeilDiv(max(part.rows - HeldRoom(job, !reads), 0), 4)) * 4;
  part.owned = HeldOwned(job, blocks);
  part.lanes = part.owned <= 16 ? 4 : 8;
  return part;
}

// Of a column, the inverse of its scale, without its mass: its sum, unless that is over-relaxed or damped. Of the last
// iteration, and of the one before.
struct HeldSums {
  float last, before;
};
// How much an iteration is relaxed; or that there is none, and whether the one before counts. It does not where the
// residual had been small enough already.
constexpr float kStopped = 0, kVoided = -1;
// The state after an iteration that began with this residual, and the verdict.
__device__ __noinline__ float JudgeIteration(const Job& job, const EngineState& state, double error,
                                             EngineState* next) {
  *next = state;
  EndRows(job, 0, next, error);
  if (!next->stopped) EndColumns(job, 0, next, 0);
  if (!next->stopped) return static_cast<float>(next->relax);
  return next->parity == state.parity ? kVoided : kStopped;
}

// Where iterations are judged. Relaxed marginals damp what a half step adds to the logarithm of a sum, and pull it by
// (1 - damping) times the potential at which densities were made, in units of epsilon, base 2.
struct HeldJudging {
  EngineState states[2];  // By turn: before it.
  float verdicts[2];      // Likewise.
  float damping[2], row_pulls[kHeldRowsMost], column_pulls[2][kHeldOwnedMost];
};
constexpr double kHeldPullMost = 16;  // Beyond, float leaves a sum too few digits.
// Columns are extrapolated from now on, as long as that pays, instead of being over-relaxed.
__device__ inline void BeginAnderson(EngineState* state) {
  state->anderson = 1;
  state->relaxation.weight = state->relax = 1;
  state->relaxation.plain = 0;
}

struct HeldMemory {
  HeldPart part;
  float parts[kHeldWarps][kHeldRowsMost];  // Of rows' sums, by warp.
  alignas(16) float weights[kHeldWarps][kHeldRowsMost];
  alignas(16) float columns[2][kHeldWarps][kHeldOwnedMost];  // Parts of owned columns' sums, by span and warp.
  float terms[kHeldRowsMost], masses[kHeldRowsMost], column_terms[2][kHeldOwnedMost], factor;
  float row_sums[2][kHeldRowsMost];  // As HeldSums; by turn.
  HeldSums column_sums[2][kHeldOwnedMost];
};

// A block's part of a problem.
template <int kQuads, typename T, bool kReads, bool kJudged>
class HeldSweeps {
  using QuadOf = HeldQuadOf<T>;
  using Quad = typename QuadOf::Type;
  static constexpr int kKept = kReads ? 0 : HeldRowsOfRegisters(kQuads, sizeof(T)), kGroup = kKept < 8 ? 4 : 8;
  static constexpr float kMostDrift = QuadOf::kMostDrift, kUnit = QuadOf::kUnit;
  static constexpr int kAddingThreads = kJudged ? kHeldThreads - 32 : kHeldThreads;

 public:
  // `judging`: if iterations are judged.
  __device__ HeldSweeps(const Member& member, int blocks, HeldMemory* memory, HeldJudging* judging)
      : member_(member),
        memory_(*memory),
        judging_(judging),
        part_(memory->part),
        meeting_(member.At<unsigned>(member.job.at.arrivals), blocks) {
    if (threadIdx.x == 0) memory->part = HeldPartOf(member, blocks, kReads);
    __syncthreads();
  }

  // `last`: there is no launch after this one.
  __device__ void Run(bool last) {
    const Job& job = member_.job;
    const EngineState& state = *member_.state(0);
    int left = min(job.solver.max_iterations - state.iterations, kHeldIterationsMost), parity = state.parity, all = 0;
    if (Judges()) SetState(1, state);
    Clear();
    meeting_.Arrive();
    for (bool again = false;; again = true) {
      Make(parity);
      if (!again) meeting_.Await();
      const int done = Iterate(left);
      all += done;
      left -= done;
      Store(parity, parity ^ (done & 1), done > 0);
      parity ^= done & 1;
      if (left == 0 || done == 0 || stopped_) break;
      meeting_.Arrive();
      meeting_.Await();
    }
    if (part_.rank == 0 && Judges()) {
      *member_.state(0) = State(turn_ + 1);
      if (!stopped_ && last && IsAccelerated(job)) BeginAnderson(member_.state(0));
    }
    if (threadIdx.x != 0) return;
    if (part_.rank == 0 && !kJudged && all > 0) MovePlain(job, member_.state(0), all, parity);
    meeting_.Leave();
  }

 private:
  __device__ static int Warp() { return threadIdx.x / 32; }
  __device__ static int Lane() { return threadIdx.x % 32; }
  __device__ static int QuadAt(int q) { return threadIdx.x + kHeldThreads * q; }
  __device__ bool HasQuad(int q) const { return QuadAt(q) < part_.quads; }
  // One that is there: where there is none, the last, whose numbers then count for nothing.
  __device__ int QuadThere(int q) const { return min(QuadAt(q), part_.quads - 1); }
  // A span is all threads' quads q. Its columns that this block adds up, the first and how many.
  __device__ int FirstOwned(int q) const { return q * kHeldQuadColumns + part_.rank * part_.owned; }
  __device__ int OwnedOf(int q) const {
    return min(min((q + 1) * kHeldQuadColumns, part_.columns) - FirstOwned(q), part_.owned);
  }
  // Warp q looks after those of span q, a column to each lane.
  __device__ bool OwnsColumn() const { return Warp() < kQuads && Lane() < OwnedOf(Warp()); }
  __device__ int OwnColumn() const { return FirstOwned(Warp()) + Lane(); }
  __device__ HeldSums& OwnSums() const { return memory_.column_sums[Warp()][Lane()]; }
  // One warp judges, and of it the first thread; not one that has columns to look after.
  __device__ static bool IsJudging() { return kJudged && Warp() == kHeldWarps - 1; }
  __device__ static bool Judges() { return IsJudging() && Lane() == 0; }
  // The state before an iteration.
  __device__ const EngineState& State(int turn) const { return judging_->states[turn & 1]; }
  __device__ void SetState(int turn, const EngineState& state) {
    judging_->states[turn & 1] = state;
    judging_->verdicts[turn & 1] = static_cast<float>(state.relax);
  }
  __device__ uint32_t Tag() const { return turn_ & 1; }
  // Blocks' errors, in the place of what is measured when all iterations are over: of a turn where those of two before
  // it were.
  __device__ float* ErrorsOf(int turn) const {
    return reinterpret_cast<float*>(member_.stats(0, 0)) + (turn & 1) * part_.blocks;
  }
  __device__ uint32_t ErrorTag() const { return (turn_ + 1) / 2 & 1; }
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
  __device__ static bool IsNear(float x) { return x > 1 / kMostDrift && x < kMostDrift; }

  // What this block reads of others says that it is of no turn.
  __device__ void Clear() const {
    const float nothing[4] = {0, 0, 0, 0};
    if (kJudged && threadIdx.x < 2) StoreTagged(ErrorsOf(threadIdx.x) + part_.rank, 0.0f, 0);
    const int lane = threadIdx.x % part_.lanes;
    for (int q = 0; q < kQuads; ++q) {
      if (4 * lane >= OwnedOf(q)) continue;
      const int column = FirstOwned(q) + 4 * lane;
      for (int k = threadIdx.x / part_.lanes; k < part_.blocks; k += kHeldThreads / part_.lanes) {
        StoreTagged(part_.sums + int64_t{k} * part_.columns + column, nothing, 0);
      }
      if (static_cast<int>(threadIdx.x) < part_.lanes) StoreTagged(part_.scales + column, nothing, 0);
    }
  }

  // ---- Densities ----------------------------------------------------------------------------------------------------

  // Quads of a row in shared memory: all that threads may have, where that leaves room for enough rows, so that their
  // places are constants.
  __device__ int Row() const { return HeldRowsArePadded(kQuads, sizeof(T)) ? kQuads * kHeldThreads : part_.quads; }
  // Of row kKept, the first there: the thread's quad q.
  __device__ Quad* Shared(int q) const {
    return reinterpret_cast<Quad*>(DynamicShared()) + (HeldRowsArePadded(kQuads, sizeof(T)) ? QuadAt(q) : QuadThere(q));
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
  // By the threads that have taken the terms.
  __device__ void TakePulls() {
    if (threadIdx.x < 2) {
      const double rho = RhoOf(member_.job, 0, threadIdx.x);
      judging_->damping[threadIdx.x] = isinf(rho) ? 1 : static_cast<float>(1 / (1 + member_.job.solver.epsilon / rho));
    }
    if (static_cast<int>(threadIdx.x) < part_.rows) {
      const int i = part_.first_row + threadIdx.x;
      const double phi = PhiOfRow(i, memory_.terms[threadIdx.x]);
      judging_->row_pulls[threadIdx.x] = PullOf(0, i, phi);
    }
    if (OwnsColumn() && OwnColumn() < member_.job.size[1]) {
      const double phi = PhiOfColumn(OwnColumn(), memory_.column_terms[Warp()][Lane()]);
      judging_->column_pulls[Warp()][Lane()] = PullOf(1, OwnColumn(), phi);
    }
  }
  // No number if it is too much: sums are lost then. What has no mass may be pulled as far as it is.
  __device__ float PullOf(int side, int i, double phi) const {
    const double rho = RhoOf(member_.job, 0, side);
    if (isinf(rho)) return 0;
    const double damping = 1 / (1 + member_.job.solver.epsilon / rho);
    const double pull = (1 - damping) * part_.frame.scale * (phi + member_.Shift(0, side, i));
    const bool counts = member_.log_mass(side)[i] > kVoid;
    return counts && fabs(pull) >= kHeldPullMost ? NAN : static_cast<float>(pull);
  }
  __device__ double PhiOfRow(int i, double power) const {
    return power / part_.frame.scale + BaseOf(member_, 0, 0, i) - part_.frame.reference;
  }
  __device__ double PhiOfColumn(int j, double power) const {
    return power / part_.frame.scale + BaseOf(member_, 0, 1, j) + part_.frame.reference;
  }
  __device__ void Make(int parity) {
    if (threadIdx.x < kHeldRowsMost) {  // Of rows that are not there: densities are nothing.
      const int i = part_.first_row + threadIdx.x;
      const bool there = static_cast<int>(threadIdx.x) < part_.rows;
      memory_.terms[threadIdx.x] = static_cast<float>(
          there ? part_.frame.RowTerm(member_.phi(0, parity, 0)[i], BaseOf(member_, 0, 0, i)) : kVoid);
      memory_.masses[threadIdx.x] = there ? static_cast<float>(member_.mass(0)[i]) : 0;
    }
    if (threadIdx.x == 0) memory_.factor = AreCosts(member_) ? static_cast<float>(-part_.frame.scale) : 1;
    if (OwnsColumn()) memory_.column_terms[Warp()][Lane()] = TermOfColumn(OwnColumn(), parity);
    if constexpr (kJudged) TakePulls();
#pragma unroll
    for (int q = 0; q < kQuads; ++q) TakeColumns(q, parity);
    __syncthreads();
    const T* numbers = NumbersOf<T>(member_, 0) + int64_t{part_.first_row} * part_.columns;
#pragma unroll 1
    for (int first = kKept; first < part_.held; first += kGroup) {
      MakeGroup(numbers, first, [&](int r, int q, const Quad& made) {
        const bool own = HeldRowsArePadded(kQuads, sizeof(T)) || HasQuad(q);
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

  // ---- Iterations ---------------------------------------------------------------------------------------------------

  // Up to `most`, or until the solve has stopped; how many count.
  __device__ int Iterate(int most) {
    const bool is_void = !OwnsColumn() || IsVoid(OwnColumn());
    const float column_mass = is_void ? 0 : static_cast<float>(member_.mass(1)[OwnColumn()]);
    if (Warp() < 2) memory_.row_sums[Warp()][Lane()] = 1;
    if (Warp() < kQuads) memory_.column_sums[Warp()][Lane()] = {1, 1};
    bool lost = false;
    if constexpr (kReads) Fetch(FirstRead());
    for (int done = 0;; ++done) {
#pragma unroll
      for (int q = 0; q < kQuads && done > 0; ++q) lost = !TakeScales(q) || lost;
      if (done < most) {
        if constexpr (kReads) ReadRows();
        SumRows();
      }
      // An iteration counts when all its scales are known to be numbers.
      lost = __syncthreads_or(lost);
      const float verdict = kJudged && !lost ? judging_->verdicts[(turn_ + 1) & 1] : 1;
      stopped_ = verdict <= kStopped;
      if (lost || verdict == kVoided) {
        TakeBack(lost);
        return done - 1;
      }
      if (done == most || stopped_) return done;
      ++turn_;
      WeighRows();
#pragma unroll
      for (int q = 0; q < kQuads; ++q) SumColumns(q);
      if constexpr (kReads) Fetch(FirstRead());
      if (IsJudging()) Judge();
#pragma unroll
      for (int q = 0; q < kQuads; ++q) AddOwned(q, column_mass, is_void);
    }
  }
  // The last iteration; `lost`: the state after it too.
  __device__ void TakeBack(bool lost) {
    if (Warp() == 0) memory_.row_sums[turn_ & 1][Lane()] = memory_.row_sums[(turn_ + 1) & 1][Lane()];
    if (OwnsColumn()) OwnSums().last = OwnSums().before;
    if (Judges() && lost) SetState(turn_ + 1, State(turn_));
  }
  __device__ static uint32_t LoadOne(const float* at) {
    uint32_t x;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
  }
  // By one warp, while the others add up columns: the state after this iteration, of all blocks' errors.
  __device__ void Judge() {
    constexpr int kMost = static_cast<int>(CeilDiv(kProcessors, 32));
    const float* errors = ErrorsOf(turn_);
    uint32_t seen[kMost];
    bool there;
    do {
      there = true;
#pragma unroll
      for (int k = 0; k < kMost; ++k) seen[k] = LoadOne(errors + min(32 * k + Lane(), part_.blocks - 1));
#pragma unroll
      for (int k = 0; k < kMost; ++k) there = there && ((seen[k] ^ ErrorTag()) & 1) == 0;
    } while (!there);
    double error = 0;
#pragma unroll
    for (int k = 0; k < kMost; ++k) error += 32 * k + Lane() < part_.blocks ? __uint_as_float(seen[k]) : 0;
    for (int lanes = 16; lanes > 0; lanes /= 2) error += __shfl_xor_sync(0xffffffffu, error, lanes);
    if (Judges()) {
      judging_->verdicts[(turn_ + 1) & 1] =
          JudgeIteration(member_.job, State(turn_), error, &judging_->states[(turn_ + 1) & 1]);
    }
    __syncwarp();
  }

  // A warp's sums over its columns.
  __device__ void SumRows() {
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
      TellParts(first, part_.held, sum);
    });
  }
  // A warp's sums of a group of rows, those before `end`, of which a lane has one row's in the end.
  __device__ void TellParts(int first, int end, float (&sum)[kGroup]) {
    constexpr int kLanes = 32 / kGroup;  // That have the same row.
    const float of_warp = SumOfRow(sum);
    const int row = first + Lane() / kLanes;
    if (Lane() % kLanes == 0 && row < end) memory_.parts[Warp()][row] = of_warp;
  }
  // A lane for each row, in every warp; those that are read have their weights. What cannot be weighted is no number,
  // nor is any column's sum then.
  __device__ void WeighRows() {
    float sum = 0;
    if (Lane() < part_.rows) {
#pragma unroll
      for (int w = 0; w < kHeldWarps; ++w) sum += memory_.parts[w][Lane()];
    }
    float relaxed = sum;
    if constexpr (kJudged) {
      const float before = memory_.row_sums[(turn_ + 1) & 1][Lane()];
      relaxed = Relaxed(0, before, sum, judging_->row_pulls[Lane()], turn_);
      if (IsJudging()) TellError(Lane() < part_.rows ? ErrorOf(before, sum, judging_->row_pulls[Lane()]) : 0);
    }
    if (Warp() == 0) memory_.row_sums[turn_ & 1][Lane()] = relaxed;
    memory_.weights[Warp()][Lane()] = Lane() < part_.held ? WeightOf(Lane(), relaxed) : 0;
    __syncwarp();
  }
  // The inverse of a scale, after this half step of `side` from `before`.
  __device__ float Relaxed(int side, float before, float sum, float pull, int turn) const {
    const float relax = judging_->verdicts[turn & 1], damping = judging_->damping[side];
    if (relax == 1 && damping == 1) return sum;
    float move = log2f(sum / before);
    if (damping != 1) move = damping * move - (1 - damping) * log2f(before) + pull;
    return before * FastExp2(relax * move);
  }
  // How far a row's marginal is from where it should be, for its mass.
  __device__ float ErrorOf(float before, float sum, float pull) const {
    const float damping = judging_->damping[0];
    if (damping == 1) return fabsf(sum - before) / before;
    return fabsf(sum / before - FastExp2(((1 - damping) * log2f(before) - pull) / damping));
  }
  __device__ float WeightOf(int row, float sum) const {
    return IsNear(sum) ? memory_.masses[row] * FastReciprocal(sum) * kUnit : NAN;
  }
  // Of a row to each lane: how far its sum is from where it was, for its size.
  __device__ void TellError(float moved) const {
    float error = memory_.masses[Lane()] * moved;
    for (int lanes = 16; lanes > 0; lanes /= 2) error += __shfl_xor_sync(0xffffffffu, error, lanes);
    if (Lane() == 0) StoreTagged(ErrorsOf(turn_) + part_.rank, error, ErrorTag());
  }

  // ---- Rows that are read again in each iteration -------------------------------------------------------------------

  // Every other iteration begins with the rows that the one before ended with, which are in the cache.
  __device__ int FirstRead() const { return Tag() == 0 ? part_.held : part_.rows - kGroup; }
  // Numbers of kGroup rows from `first` on, on their way.
  __device__ void Fetch(int first) {
    if (first >= part_.rows || first < part_.held) return;
    const auto* numbers =
        reinterpret_cast<const float4*>(NumbersOf<T>(member_, 0)) + int64_t{part_.first_row + first} * part_.quads;
#pragma unroll
    for (int r = 0; r < kGroup; ++r) {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) read_[r][q] = __ldcg(numbers + r * part_.quads + QuadThere(q));
    }
  }
  // Their densities, sums, weights, and what they add to the columns, a group after the other.
  __device__ void ReadRows() {
    static_assert(!kReads || kGroup == 4, "eight lanes for a row");
    const float factor = memory_.factor;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
#pragma unroll
      for (int k = 0; k < 4; ++k) sum_[q][k] = 0;
    }
    const int step = Tag() == 0 ? kGroup : -kGroup;
#pragma unroll 1
    for (int first = FirstRead(); first >= part_.held && first < part_.rows; first += step) {
      float t[kGroup][kQuads][4], sum[kGroup];
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
      Fetch(first + step);
      TellParts(first, part_.rows, sum);
      __syncthreads();
      // Lane l: of row l / 8, of warps l % 8 and l % 8 + 8.
      const int mine = first + Lane() / 8;
      float whole = memory_.parts[Lane() % 8][mine] + memory_.parts[Lane() % 8 + 8][mine];
#pragma unroll
      for (int lanes = 4; lanes > 0; lanes /= 2) whole += __shfl_xor_sync(0xffffffffu, whole, lanes);
      if constexpr (kJudged) {
        whole = Relaxed(0, memory_.row_sums[turn_ & 1][mine], whole, judging_->row_pulls[mine], turn_ + 1);
      }
      const float weight_of = WeightOf(mine, whole);
#pragma unroll
      for (int r = 0; r < kGroup; ++r) {
        const float weight = __shfl_sync(0xffffffffu, weight_of, 8 * r);
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
#pragma unroll
          for (int k = 0; k < 4; ++k) sum_[q][k] = fmaf(t[r][q][k], weight, sum_[q][k]);
        }
      }
    }
  }

  __device__ void SumColumns(int q) const {
    float sum[4] = {0, 0, 0, 0};
    if constexpr (kReads) {
#pragma unroll
      for (int k = 0; k < 4; ++k) sum[k] = sum_[q][k];
    }
    EachGroup([&](int first, auto densities) {
      float weight[kGroup];
#pragma unroll
      for (int r = 0; r < kGroup; r += 4) {
        const float4 four = *reinterpret_cast<const float4*>(&memory_.weights[Warp()][first + r]);
        weight[r] = four.x, weight[r + 1] = four.y, weight[r + 2] = four.z, weight[r + 3] = four.w;
      }
#pragma unroll
      for (int r = 0; r < kGroup; ++r) {
        float t[4];
        densities(r, q, t);
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[k] = fmaf(t[k], weight[r], sum[k]);
      }
    });
    if (HasQuad(q)) StoreTagged(part_.sums + int64_t{part_.rank} * part_.columns + 4 * QuadAt(q), sum, Tag());
  }
  // The sums of a span's owned columns over all blocks, and their scales.
  __device__ void AddOwned(int q, float mass, bool is_void) {
    const int owned = OwnedOf(q);
    if (owned <= 0 || IsJudging()) return __syncthreads();  // Parts of rows' sums have been read.
    constexpr int kMost = static_cast<int>(CeilDiv(kProcessors, kAddingThreads / 8));
    const int lane = threadIdx.x % part_.lanes, slice = threadIdx.x / part_.lanes;
    const int step = kAddingThreads / part_.lanes;
    float sum[4] = {0, 0, 0, 0};
    if (4 * lane < owned) {
      const float* from = part_.sums + int64_t{slice} * part_.columns + FirstOwned(q) + 4 * lane;
      const int64_t stride = int64_t{step} * part_.columns;
      uint4 first[kMost];
#pragma unroll
      for (int k = 0; k < kMost; ++k) {
        if (slice + k * step < part_.blocks) first[k] = LoadTagged(from + k * stride);
      }
#pragma unroll
      for (int k = 0; k < kMost; ++k) {
        if (slice + k * step >= part_.blocks) break;
        float part[4];
        AwaitTagged(from + k * stride, first[k], Tag(), part);
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[c] += part[c];
      }
    }
    for (int lanes = part_.lanes; lanes < 32; lanes *= 2) {
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[c] += __shfl_xor_sync(0xffffffffu, sum[c], lanes);
    }
    if (Lane() < part_.lanes) {
      *reinterpret_cast<float4*>(&memory_.columns[q][Warp()][4 * lane]) = make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
    __syncthreads();
    if (Warp() != q || Lane() >= owned) return;
    float parts[4] = {0, 0, 0, 0};
#pragma unroll
    for (int w = 0; w < kAddingThreads / 32; ++w) parts[w % 4] += memory_.columns[q][w][Lane()];
    const float whole = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    float relaxed = whole;
    if constexpr (kJudged) relaxed = Relaxed(1, OwnSums().last, whole, judging_->column_pulls[q][Lane()], turn_);
    OwnSums() = {relaxed, OwnSums().last};
    StoreTagged(part_.scales + OwnColumn(), is_void ? 0 : IsNear(relaxed) ? mass / relaxed : NAN, Tag());
  }
  // The thread's columns' new scales; whether they are numbers.
  __device__ bool TakeScales(int q) {
    const float* from = part_.scales + 4 * QuadThere(q);
    // One lane for each 128 bytes looks until they are there: all looking would hold up those that write.
    bool there;
    do {
      there = Lane() % 8 != 0 || IsOf(LoadTagged(from), Tag());
    } while (!__all_sync(0xffffffffu, there));
    AwaitTagged(from, LoadTagged(from), Tag(), scale_[q]);
    bool numbers = true;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      numbers = numbers && !isnan(scale_[q][k]);
      scale_[q][k] = HasQuad(q) ? scale_[q][k] * kUnit : 0;
    }
    return numbers;
  }

  // ---- Potentials ---------------------------------------------------------------------------------------------------

  // From those of parity `from`, where densities were made: if there are new ones, those; and what sweeps want of them.
  __device__ void Store(int from, int to, bool moved) const {
    if (Warp() == 0 && Lane() < part_.rows && moved) {
      const int i = part_.first_row + Lane();
      const double power = memory_.terms[Lane()] - log2(static_cast<double>(memory_.row_sums[turn_ & 1][Lane()]));
      member_.phi(0, to, 0)[i] = PhiOfRow(i, power);
    }
    if (!OwnsColumn()) return;
    const int j = OwnColumn();
    float* term = member_.At<float>(member_.job.at.stream_terms[0]) + j;
    *term = static_cast<float>(kVoid);
    if (j >= member_.job.size[1]) return;
    const double base = BaseOf(member_, 0, 1, j), log_mass = member_.log_mass(1)[j];
    double phi = member_.phi(0, from, 1)[j];
    if (moved && log_mass > kVoid) {
      const double power = memory_.column_terms[Warp()][Lane()] - log2(static_cast<double>(OwnSums().last));
      phi = PhiOfColumn(j, power);
    }
    member_.phi(0, to, 1)[j] = phi;
    *term = part_.frame.ColumnTerm(phi, base, log_mass);
  }

  const Member& member_;
  HeldMemory& memory_;
  HeldJudging* const judging_;
  const HeldPart& part_;
  HeldMeeting meeting_;
  int turn_ = 0;          // Iterations begun.
  bool stopped_ = false;  // By the last one.
  Quad kept_[kKept > 0 ? kKept : 1][kQuads];
  float term_[kQuads][4], scale_[kQuads][4];  // Of the thread's columns; scales: their mass over their last sums.
  float4 read_[kReads ? kGroup : 1][kQuads];  // Of the rows that are read next,
  float sum_[kReads ? kQuads : 1][4];         // and what such rows have added to the columns.
};

__device__ inline HeldJudging* JudgingOfBlock() {
  __shared__ HeldJudging judging;
  static_assert(sizeof(judging) <= kHeldJudgingBytes, "room");
  return &judging;
}

#endif

// Groups of `blocks` blocks, each of which solves one problem after the other.
template <int kQuads, typename T, bool kReads, bool kJudged>
__global__ void __launch_bounds__(kHeldThreads, 1)
    HeldKernel(LaunchTable table, int64_t problems, int blocks, bool last) {
#if SINKHORN_HOPPER
  __shared__ HeldMemory memory;
  HeldJudging* judging = nullptr;
  if constexpr (kJudged) judging = JudgingOfBlock();
  const int groups = gridDim.x / blocks;
  for (int64_t problem = blockIdx.x / blocks; problem < problems; problem += groups) {
    const BlockWork work = FindWork(table, problem);
    const Job& job = CopyJob(table.jobs[work.job]);
    const Member member{job, work.block};
    const EngineState& state = *member.state(0);
    if (IsStreamed(job, state) && !state.stopped) {
      HeldSweeps<kQuads, T, kReads, kJudged>(member, blocks, &memory, judging).Run(last);
    }
    __syncthreads();  // What it had of this problem has been read.
  }
#endif
}

template <bool kJudged, typename Function>
void WithHeldKernel(const HeldLaunch& of, Function function) {
  if (of.reads) return function(HeldKernel<2, float, true, kJudged>);
  function(of.quads == 1 ? HeldKernel<1, float, false, kJudged> : HeldKernel<2, float, false, kJudged>);
}
template <typename Function>
void WithHeldKernel(const HeldLaunch& of, Function function) {
  if (of.judged) return WithHeldKernel<true>(of, function);
  if (!of.halves) return WithHeldKernel<false>(of, function);
  function(of.quads == 1 ? HeldKernel<1, __half, false, false> : HeldKernel<2, __half, false, false>);
}

// Of judged iterations: how many there will be is not known, and one for which nothing is left takes 5 us.
constexpr int kHeldLaunchesMost = 2;

}  // namespace

bool HasHeldKernels() {
  static FactOfDevice fact;
  return fact.Get([] {
    int device = 0, cooperative = 0, processors = 0, bytes = 0;
    const bool known = cudaGetDevice(&device) == cudaSuccess &&
                       cudaDeviceGetAttribute(&cooperative, cudaDevAttrCooperativeLaunch, device) == cudaSuccess &&
                       cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) == cudaSuccess &&
                       cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess;
    return known && cooperative != 0 && processors >= kProcessors && bytes >= kHeldBytesMost ? 1 : 0;
  }) > 0;
}

HeldLaunch HeldLaunchOf(const Job& job) {
  return {!IsPlain(job), KeepsHalves(job), HeldReads(job), HeldQuads(job), HeldBlocks(job)};
}

void LaunchHeld(const LaunchTable& table, int64_t problems, const HeldLaunch& of, cudaStream_t stream) {
  if (problems == 0) return;
  const int64_t groups = std::min<int64_t>(problems, kProcessors / of.blocks);
  WithHeldKernel(of, [&](auto kernel) {
    for (int left = of.judged ? kHeldLaunchesMost : 1; left > 0; --left) {
      AttributedLaunch launch(kernel, groups * of.blocks, kHeldThreads, HeldBytes(of.judged), stream);
      launch.Add(Together());
      launch.Enqueue(kernel, table, problems, of.blocks, left == 1);
    }
  });
}

}  // namespace cuda
}  // namespace sinkhorn
