// Engines 1 and 2 of debiased problems that are held, OT(a, a) and OT(b, b): all iterations in one launch (Hopper).
//
// As in transport_stream_held.cu blocks have some whole rows, and hold their densities from one iteration to the next.
// A problem's two sides are the same points with the same masses, and so are their potentials: an iteration is a row's
// sum of densities times its columns' scales, and takes what the row is divided by halfway to that, in logarithms; its
// inverse, times the row's mass, is the scale of the column that is the same point. So nothing is summed up by columns,
// and blocks tell each other their rows' scales, once an iteration. What rows sum up to at the last potentials is known
// then, too, and with it how far marginals are from where they should be. Engines whose exponents need float64 are held
// between renewals of their frames.
#include <algorithm>
#include <vector>

#include "kernels/cuda/transport_stream_held_judge.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

#if SINKHORN_HOPPER

// A block's part of a problem. kJudged: there is a tolerance, or marginals are relaxed.
template <int kQuads, bool kReads, bool kJudged>
class HeldSelf : private HeldRows<kQuads, float, kReads, /*kSelf=*/true> {
  using Rows = HeldRows<kQuads, float, kReads, /*kSelf=*/true>;
  using Rows::Columns, Rows::Engine, Rows::Fetch, Rows::FirstRead, Rows::HasColumns, Rows::IsNear, Rows::IsRead;
  using Rows::kGroup, Rows::Lane, Rows::LogSumOfRow, Rows::MakeRead, Rows::Measure, Rows::member_, Rows::memory_;
  using Rows::part_, Rows::PhiOfRow, Rows::Scratch, Rows::StatsOfWarps, Rows::SumRows, Rows::TakeScales;
  using Rows::TellParts, Rows::Warp, Rows::WholeOfRow;

 public:
  __device__ HeldSelf(const Member& member, int engine, int blocks, HeldMemory* memory)
      : Rows(member, engine, blocks, memory),
        meeting_(member.At<unsigned>(member.job.at.arrivals) + engine * member.job.at.arrival_stride, blocks),
        judge_(member, memory->part) {}

  // Up to `most` iterations.
  __device__ void Run(int most) {
    const Job& job = member_.job;
    const EngineState& state = *member_.state(Engine());
    const int wanted = job.solver.max_iterations - state.iterations;
    int left = min(wanted, most), parity = state.parity, all = 0;
    if (judge_.IsThread()) judge_.SetState(1, state);
    Clear();
    meeting_.Arrive();
    for (bool again = false;; again = true) {
      Make(parity);
      if (!again) meeting_.Await();
      const int done = Iterate(left);
      all += done;
      left -= done;
      Store(parity ^ (done & 1), done > 0);
      parity ^= done & 1;
      if (left == 0 || done == 0 || stopped_) break;
      meeting_.Arrive();
      meeting_.Await();
    }
    const bool solved = kJudged ? stopped_ : left == 0 && wanted <= most;
    if (solved) MeasureRows(parity);
    if (part_.rank == 0 && judge_.IsThread()) judge_.Leave(turn_ + 1, false);
    const bool is_last = solved ? LastToArrive(meeting_.Other(), part_.blocks) : part_.rank == 0;
    if (!kJudged && is_last && threadIdx.x == 0 && all > 0) MovePlain(job, member_.state(Engine()), all, parity);
    if (is_last && solved) EndPlainMeasure(member_, Engine(), part_.blocks, Scratch());
    if (threadIdx.x == 0) meeting_.Leave();
  }

 private:
  // Scales that a turn leaves: where those of two before it were, which all have read. Tags say of which of the two.
  __device__ float* Scales(int turn) const { return part_.sums + (turn & 1) * part_.columns; }
  __device__ static uint32_t TagOf(int turn) { return (turn + 1) / 2 & 1; }
  // Of rows, by turn: what they are divided by; parts of their sums, which others may still read in the next turn.
  __device__ float* Divisors(int turn) const { return memory_.row_sums[turn & 1]; }
  __device__ typename Rows::Parts& PartsAt(int turn) const { return turn & 1 ? memory_.weights : memory_.parts; }

  // What this block tells others says that it is of no turn.
  __device__ void Clear() const {
    if (threadIdx.x < 2) judge_.Clear(threadIdx.x);
    for (int turn = 0; turn < 2 && Warp() == 0; ++turn) TellScale(turn, 0, 0);
  }
  // By the first warp: the lane's row's; and of columns that are not there, if the block has the last row.
  __device__ void TellScale(int turn, float scale, uint32_t tag) const {
    if (Lane() < part_.rows) StoreTagged(Scales(turn) + part_.first_row + Lane(), scale, tag);
    EachMissing([&](int j) { StoreTagged(Scales(turn) + j, 0.0f, tag); });
  }
  template <typename Visit>
  __device__ void EachMissing(Visit visit) const {
    if (part_.rows == 0 || part_.first_row + part_.rows < Columns()) return;
    for (int j = Columns() + Lane(); j < part_.columns; j += 32) visit(j);
  }
  __device__ void Make(int parity) {
    Rows::Make(parity);
    if constexpr (!kJudged) return;
    if (threadIdx.x == 0) judge_.TakeDamping(0);
    if (static_cast<int>(threadIdx.x) < part_.rows) {
      const int i = part_.first_row + threadIdx.x;
      judge_.TakeRow(threadIdx.x, i, PhiOfRow(i, memory_.terms[threadIdx.x]));
    }
  }

  // Up to `most`, or until the solve has stopped; how many count.
  __device__ int Iterate(int most) {
    if (Warp() < 2) Divisors(Warp())[Lane()] = 1;
    if (!HasColumns()) memory_.parts[Warp()][Lane()] = memory_.weights[Warp()][Lane()] = 0;
    bool lost = false;
    if constexpr (kReads) Fetch(FirstRead(turn_ & 1));
    for (int done = 0;; ++done) {
#pragma unroll
      for (int q = 0; q < kQuads && done > 0; ++q) lost = !TakeScales(q, Scales(turn_), TagOf(turn_)) || lost;
      SumRows(PartsAt(turn_));
      if constexpr (kReads) SumReadRows();
      // An iteration counts when all its scales are known to be numbers.
      lost = __syncthreads_or(lost);
      const float verdict = lost ? 1 : judge_.Verdict(turn_ + 1);
      stopped_ = verdict <= kStopped;
      if (lost || verdict == kVoided) {
        TakeBack(lost);
        return done - 1;
      }
      sum_ = WholeOfRow(PartsAt(turn_));
      if (done == most || stopped_) return done;
      ++turn_;
      MoveRows();
      if (judge_.IsWarp()) judge_.Judge(turn_);
    }
  }
  // The last iteration; `lost`: the state after it too.
  __device__ void TakeBack(bool lost) {
    sum_ = WholeOfRow(PartsAt(turn_ - 1));
    if (Warp() == 0) Divisors(turn_)[Lane()] = Divisors(turn_ + 1)[Lane()];
    if (judge_.IsThread() && lost) judge_.SetState(turn_ + 1, judge_.State(turn_));
  }
  __device__ void SumReadRows() {
    const bool backwards = turn_ & 1;
    const int step = backwards ? -kGroup : kGroup;
    const float factor = memory_.factor;
#pragma unroll 1
    for (int first = FirstRead(backwards); IsRead(first); first += step) {
      float t[kGroup][kQuads][4], sum[kGroup];
      MakeRead(first, factor, t, sum);
      Fetch(first + step);
      TellParts(first, part_.rows, sum, PartsAt(turn_));
    }
    Fetch(FirstRead(!backwards));
  }
  // A lane for each row, in the first warp, and in the last, which judges. What cannot be divided by is no number.
  __device__ void MoveRows() {
    if (Warp() != 0 && !judge_.IsWarp()) return;
    const float before = Divisors(turn_ + 1)[Lane()], mass = memory_.masses[Lane()];
    if (judge_.IsWarp()) judge_.TellError(turn_, mass, before, sum_);
    if (Warp() != 0) return;
    const float next = kJudged ? judge_.RelaxedRow(Lane(), before, sum_, turn_) : sqrtf(before * sum_);
    Divisors(turn_)[Lane()] = next;
    TellScale(turn_, IsNear(next) ? mass / next : NAN, TagOf(turn_));
  }

  // Both sides' potentials, if there are new ones; and what sweeps want of columns.
  __device__ void Store(int to, bool moved) const {
    if (Warp() != 0) return;
    float* terms = member_.template At<float>(member_.job.at.stream_terms[Engine()]);
    EachMissing([&](int j) { terms[j] = static_cast<float>(kVoid); });
    if (Lane() >= part_.rows) return;
    const int i = part_.first_row + Lane();
    double phi = member_.phi(Engine(), to, 1)[i];
    if (moved) {
      phi = PhiOfRow(i, memory_.terms[Lane()] - log2(static_cast<double>(Divisors(turn_)[Lane()])));
      for (int side = 0; side < 2; ++side) member_.phi(Engine(), to, side)[i] = phi;
    }
    terms[i] = part_.frame.ColumnTerm(phi, BaseOf(member_, Engine(), 1, i), member_.log_mass(Measure(1))[i]);
  }
  // At the potentials of parity `to`, which are the last, and at which rows' sums are known.
  __device__ void MeasureRows(int to) {
    meeting_.Arrive();
    meeting_.Await();
    const double scale = part_.frame.scale, seen = LogSumOfRow(sum_, to), first = __ldcg(member_.phi(Engine(), to, 1));
    for (int side = 0; side < 2; ++side) {
      BlockStats stats = NoStats();
      if (Warp() == 0 && Lane() < part_.rows) {
        const int i = part_.first_row + Lane(), measure = Measure(side);
        const double phi = member_.phi(Engine(), to, side)[i];
        const double lse = seen + (part_.frame.reference - BaseOf(member_, Engine(), 0, i)) * scale;
        const MeasuredPoint point = {phi,
                                     member_.Shift(Engine(), side, i),
                                     member_.mass(measure)[i],
                                     member_.log_mass(measure)[i],
                                     side == 0 ? first : -first,
                                     false};
        member_.ratio(Engine(), side)[i] = MeasurePoint(point, RhoOf(member_.job, Engine(), side), lse, scale, &stats);
      }
      StoreStats(stats, true, member_.stats(Engine(), side) + part_.rank, StatsOfWarps());
    }
  }

  HeldMeeting meeting_;
  HeldJudge<kJudged, Judged::kSelf> judge_;
  int turn_ = 0;  // Iterations begun.
  bool stopped_ = false;
  float sum_ = 0;  // Of the lane's row, at the potentials before the turn; in the end at the last.
};

#endif

// Groups of `blocks` blocks, each of which solves one problem after the other: engines of the mask, of each member.
template <int kQuads, bool kReads, bool kJudged>
__global__ void __launch_bounds__(kHeldThreads, 1)
    HeldSelfKernel(LaunchTable table, int64_t problems, int blocks, unsigned engines, Mode mode, int most) {
#if SINKHORN_HOPPER
  __shared__ HeldMemory memory;
  const int groups = gridDim.x / blocks, each = __popc(engines), first = __ffs(engines) - 1;
  for (int64_t problem = blockIdx.x / blocks; problem < problems; problem += groups) {
    const BlockWork work = FindWork(table, problem);
    const Job& job = CopyJob(table.jobs[work.job]);
    const Member member{job, job.turn_first + work.block / each};
    const int engine = first + static_cast<int>(work.block % each);
    const EngineState& state = *member.state(engine);
    if (state.mode == mode && IsStreamed(job, state) && !state.stopped) {
      HeldSelf<kQuads, kReads, kJudged>(member, engine, blocks, &memory).Run(most);
    }
    __syncthreads();  // What it had of this problem has been read.
  }
#endif
}

template <bool kJudged, typename Function>
void WithSelfKernel(const SelfLaunch& of, Function function) {
  if (of.reads) return function(HeldSelfKernel<2, true, kJudged>);
  function(of.quads == 2 ? HeldSelfKernel<2, false, kJudged> : HeldSelfKernel<1, false, kJudged>);
}

std::vector<SelfLaunch> LaunchesOf(const Job& job, int launches, Mode mode, int iterations) {
  std::vector<SelfLaunch> all;
  for (int engine : {1, 2}) {
    SelfLaunch of = {!IsFixed(job),
                     SelfReads(job, engine),
                     HeldQuads(job, engine),
                     SelfBlocks(job, engine),
                     launches,
                     mode,
                     iterations,
                     1u << engine};
    if (engine == 2 && of.Kind() == all[0].Kind()) {
      all[0].engines |= of.engines;
    } else {
      all.push_back(of);
    }
  }
  return all;
}

}  // namespace

std::vector<SelfLaunch> SelfLaunchesOf(const Job& job) {
  return LaunchesOf(job, HeldLaunches(job), kFloat, kHeldIterationsMost);
}
std::vector<SelfLaunch> FramedSelfLaunchesOf(const Job& job, int iterations) {
  return LaunchesOf(job, 1, kMixed, iterations);
}

int64_t SelfProblems(const Job& job, const SelfLaunch& of) {
  return job.turn_members * ((of.engines >> 1 & 1) + (of.engines >> 2 & 1));
}

void LaunchSelf(const LaunchTable& table, int64_t problems, const SelfLaunch& of, cudaStream_t stream) {
  if (problems == 0) return;
  const int64_t groups = std::min<int64_t>(problems, kProcessors / of.blocks);
  const auto launch_all = [&](auto kernel) {
    for (int left = of.launches; left > 0; --left) {
      AttributedLaunch launch(kernel, groups * of.blocks, kHeldThreads, HeldBytes(HeldKind::kJudged), stream);
      launch.Add(Together());
      launch.Enqueue(kernel, table, problems, of.blocks, of.engines, of.mode, of.iterations);
    }
  };
  of.judged ? WithSelfKernel<true>(of, launch_all) : WithSelfKernel<false>(of, launch_all);
}

}  // namespace cuda
}  // namespace sinkhorn
