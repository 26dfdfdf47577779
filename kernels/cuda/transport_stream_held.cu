// All iterations, in one launch, of problems whose densities so many blocks of a device together have room for: each
// has some whole rows and holds them from one iteration to the next (Hopper).
//
// Densities 2^(z + row term + column term), at the potentials it begins with, lie in registers and shared memory. From
// then on an iteration is a row's sum of densities times its columns' scales, and a column's of densities times its
// rows' weights. A thread has the same columns of every row. Columns' sums of a block's rows go to the blocks that add
// up those columns, and their scales come back from there, both through memory. Where rows are more than there is room
// for, the others' exponents are read again in each iteration, four rows at a time, whose sums and weights come first,
// so that they are read once. Potentials are what sums say at the end (transport_stream_held_end.cuh). Where one leaves
// the range in which densities have all their digits, the iteration before was the last, and densities are made anew at
// its potentials; if that does not help, sweeps (transport_stream.cu) go on.
//
// Where that takes less time than a sweep (HeldMeasures), the launch that makes the last of a fixed number of
// iterations measures as well.
//
// Members whose exponents need float64 are held between one renewal of their frames (transport_exact.cu) and the
// next.
//
// With a tolerance or relaxed marginals iterations are judged (transport_stream_held_judge.cuh): at the end of one all
// blocks know the residual before it, whether it counts, and how much the next one is to be over-relaxed. With a
// tolerance, and where an iteration takes long enough for that, columns are extrapolated (transport_joint.cuh).
//
// Symmetric updates weight columns' sums by rows as they were: both sides move at once, and both have a residual.
#include <algorithm>

#include "kernels/cuda/transport_joint.cuh"
#include "kernels/cuda/transport_stream_held_end.cuh"
#include "kernels/cuda/transport_stream_held_judge.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

// What a launch is to do: with members in this mode, up to so many iterations.
struct HeldTask {
  Mode mode;
  int most;
  bool last;  // There is no launch after it.
};

#if SINKHORN_HOPPER

// A block's part of a problem.
template <int kQuads, typename T, bool kReads, HeldKind kKind>
class HeldSweeps : private HeldEnd<kQuads, T, kReads> {
  using Rows = HeldRows<kQuads, T, kReads>;
  using End = HeldEnd<kQuads, T, kReads>;
  using End::Measure, End::meeting_, End::OwnSums, End::RowSums, End::Store, End::turn_;
  using Rows::EachGroup, Rows::Fetch, Rows::FirstOwned, Rows::FirstRead, Rows::HasColumns, Rows::HasQuad;
  using Rows::IsNear, Rows::IsOwner, Rows::IsRead, Rows::IsVoid, Rows::kGroup, Rows::kOwnedOfSpan, Rows::kUnit;
  using Rows::Lane, Rows::MakeRead, Rows::member_, Rows::memory_, Rows::OwnColumn, Rows::OwnedOf, Rows::OwnPlace;
  using Rows::OwnsColumn, Rows::OwnSpan, Rows::part_, Rows::PhiOfColumn, Rows::PhiOfRow, Rows::QuadAt, Rows::scale_;
  using Rows::Scratch, Rows::SumRows, Rows::TakeScales, Rows::TellParts, Rows::Warp, Rows::WholeOfRow;
  static constexpr bool kSymmetric = kKind == HeldKind::kSymmetric, kJoint = kKind == HeldKind::kExtrapolated;
  static constexpr bool kJudged = kSymmetric || kKind == HeldKind::kJudged;
  static constexpr bool kMeasures = HeldMeasures(kKind, kQuads, sizeof(T) == 2, kReads);
  using Joint = JointIterations<kHeldThreads, kHeldOwnedMost>;
  static constexpr int kAddingThreads = kJudged ? kHeldThreads - 32 : kHeldThreads;

 public:
  __device__ HeldSweeps(const Member& member, int blocks, HeldMemory* memory)
      : End(member, blocks, memory),
        judge_(member, memory->part),
        joint_(member, kJoint ? &JointOfBlock()->joint : nullptr, kJoint ? JointOfBlock()->masses : nullptr) {}

  __device__ void Run(const HeldTask& task) {
    const Job& job = member_.job;
    const EngineState& state = *member_.state(0);
    const int wanted = job.solver.max_iterations - state.iterations;
    if (kMeasures && threadIdx.x == 0) memory_.measures = wanted <= task.most && task.mode == kFloat;
    int left = min(wanted, task.most), parity = state.parity, all = 0;
    if (judge_.IsThread()) judge_.SetState(1, state);
    Clear();
    if constexpr (kJoint) {
      if (IsOwner()) JointOfBlock()->masses[threadIdx.x] = MassOfOwn();
      joint_.Begin(part_.rank, part_.blocks, 0, kHeldOwnedMost, false);
    }
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
    if (part_.rank == 0 && judge_.IsThread()) judge_.Leave(turn_ + 1, !stopped_ && task.last);
    if constexpr (kJoint) joint_.End(false);
    bool is_last = part_.rank == 0, measured = false;
    if constexpr (kMeasures) {
      measured = memory_.measures && left == 0;
      if (measured) Measure(parity);
      if (measured) is_last = LastToArrive(meeting_.Other(), part_.blocks);
    }
    if (is_last && threadIdx.x == 0 && kKind == HeldKind::kPlain && all > 0) {
      MovePlain(job, member_.state(0), all, parity);
    }
    if constexpr (kMeasures) {
      if (is_last && measured) EndPlainMeasure(member_, 0, part_.blocks, Scratch());
    }
    if (threadIdx.x != 0) return;
    if (part_.rank == 0 && kJoint) joint_.Leave(member_.state(0));
    meeting_.Leave();
  }

 private:
  struct JointOf {
    typename Joint::Memory joint;
    float masses[kHeldOwnedMost];
  };
  static_assert(sizeof(JointOf) <= kHeldJointBytes, "room");
  __device__ static JointOf* JointOfBlock() {
    __shared__ JointOf joint;
    return &joint;
  }
  // Of the column that the thread looks after.
  __device__ float MassOfOwn() const {
    return !OwnsColumn() || IsVoid(OwnColumn()) ? 0 : static_cast<float>(member_.mass(1)[OwnColumn()]);
  }
  __device__ uint32_t Tag() const { return turn_ & 1; }

  __device__ void Make(int parity) {
    Rows::Make(parity);
    if constexpr (kJudged) TakePulls();
  }
  // By the threads that have taken the terms.
  __device__ void TakePulls() {
    if (threadIdx.x < 2) judge_.TakeDamping(threadIdx.x);
    if (static_cast<int>(threadIdx.x) < part_.rows) {
      const int i = part_.first_row + threadIdx.x;
      judge_.TakeRow(threadIdx.x, i, PhiOfRow(i, memory_.terms[threadIdx.x]));
    }
    if (OwnsColumn() && OwnColumn() < member_.job.size[1]) {
      judge_.TakeColumn(OwnColumn(), PhiOfColumn(OwnColumn(), memory_.column_terms[threadIdx.x]));
    }
  }
  // What this block reads of others says that it is of no turn.
  __device__ void Clear() const {
    const float nothing[4] = {0, 0, 0, 0};
    if (threadIdx.x < 2) judge_.Clear(threadIdx.x);
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

  // ---- Iterations ---------------------------------------------------------------------------------------------------

  // Up to `most`, or until the solve has stopped; how many count.
  __device__ int Iterate(int most) {
    const bool is_void = !OwnsColumn() || IsVoid(OwnColumn());
    const float column_mass = own_scale_ = MassOfOwn();
    if (Warp() < 2) RowSums(Warp())[Lane()] = 1;
    if (IsOwner()) OwnSums() = {1, 1};
    if (!HasColumns()) memory_.parts[Warp()][Lane()] = 0;
    bool lost = false;
    if constexpr (kReads) Fetch(FirstRead(Tag() != 0));
    for (int done = 0;; ++done) {
#pragma unroll
      for (int q = 0; q < kQuads && done > 0; ++q) lost = !TakeScales(q, part_.scales, Tag()) || lost;
      if constexpr (kJoint) stopped_ = joint_.IsStopped();
      if ((done < most || (kMeasures && memory_.measures)) && !stopped_) {
        if constexpr (kReads) ReadRows();
        SumRows(memory_.parts);
      }
      // An iteration counts when all its scales are known to be numbers.
      lost = __syncthreads_or(lost);
      bool voided = false;
      if constexpr (kJoint) {
        stopped_ = stopped_ && !lost;
        voided = stopped_ && joint_.IsVoided();
      } else {
        const float verdict = lost ? 1 : judge_.Verdict(turn_ + 1);
        stopped_ = verdict <= kStopped, voided = verdict == kVoided;
      }
      if (lost || voided) {
        TakeBack(lost);
        return done - 1;
      }
      if (done == most || stopped_) return done;
      ++turn_;
      WeighRows();
#pragma unroll
      for (int q = 0; q < kQuads; ++q) SumColumns(q);
      if constexpr (kReads) Fetch(FirstRead(Tag() != 0));
      if (!kSymmetric && judge_.IsWarp()) judge_.Judge(turn_);
#pragma unroll
      for (int q = 0; q < kQuads; ++q) AddOwned(q, column_mass, is_void);
      if constexpr (kJoint) Judge(column_mass, is_void);
      if constexpr (kSymmetric) JudgeBoth();
    }
  }
  // The last iteration; `lost`: the state after it too.
  __device__ void TakeBack(bool lost) {
    if (Warp() == 0) RowSums(turn_)[Lane()] = RowSums(turn_ + 1)[Lane()];
    if (OwnsColumn()) OwnSums().last = OwnSums().before;
    if (judge_.IsThread() && lost) judge_.SetState(turn_ + 1, judge_.State(turn_));
    if (kJoint && threadIdx.x == 0 && lost) joint_.Undo();
  }
  // A lane for each row, in every warp that has columns, and in the last, which judges; those that are read have their
  // weights. What cannot be weighted is no number, nor is any column's sum then.
  __device__ void WeighRows() {
    if (!HasColumns() && Warp() != kHeldWarps - 1) return;
    const float sum = WholeOfRow(memory_.parts);
    const float before = kKind == HeldKind::kPlain ? 0 : RowSums(turn_ + 1)[Lane()];
    const float relaxed = RelaxedRow(Lane(), before, sum, turn_);
    if constexpr (kJoint) row_error_ = Lane() < part_.rows ? memory_.masses[Lane()] * fabsf(sum - before) / before : 0;
    if (judge_.IsWarp()) judge_.TellError(turn_, memory_.masses[Lane()], before, sum);
    if (Warp() == 0) RowSums(turn_)[Lane()] = relaxed;
    memory_.weights[Warp()][Lane()] = Lane() < part_.held ? WeightOf(Lane(), Seen(before, relaxed)) : 0;
    __syncwarp();
  }
  __device__ float RelaxedRow(int row, float before, float sum, int turn) const {
    if constexpr (kJoint) return joint_.RelaxedRow(before, sum);
    return judge_.RelaxedRow(row, before, sum, turn);
  }
  // What a row is divided by where columns see it: symmetric updates move both sides at once.
  __device__ static float Seen(float before, float relaxed) { return kSymmetric && IsNear(relaxed) ? before : relaxed; }
  __device__ float WeightOf(int row, float sum) const {
    return IsNear(sum) ? memory_.masses[row] * FastReciprocal(sum) * kUnit : NAN;
  }
  // ---- Rows that are read again in each iteration -------------------------------------------------------------------

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
    for (int first = FirstRead(Tag() != 0); IsRead(first); first += step) {
      float t[kGroup][kQuads][4], sum[kGroup];
      MakeRead(first, factor, t, sum);
      Fetch(first + step);
      TellParts(first, part_.rows, sum, memory_.parts);
      __syncthreads();
      // Lane l: of row l / 8, of warps l % 8 and l % 8 + 8.
      const int mine = first + Lane() / 8;
      float whole = memory_.parts[Lane() % 8][mine] + memory_.parts[Lane() % 8 + 8][mine];
#pragma unroll
      for (int lanes = 4; lanes > 0; lanes /= 2) whole += __shfl_xor_sync(0xffffffffu, whole, lanes);
      const float before = RowSums(turn_)[mine];
      if constexpr (kSymmetric) {  // How much both sides move is not known yet.
        whole = Seen(before, whole);
      } else if constexpr (kKind != HeldKind::kPlain) {
        whole = RelaxedRow(mine, before, whole, turn_ + 1);
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
    if (!HasColumns()) return;
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
  // The sums of a span's owned columns over all blocks, and their scales, unless those are to be judged first.
  __device__ void AddOwned(int q, float mass, bool is_void) {
    const int owned = OwnedOf(q);
    if (owned <= 0 || judge_.IsWarp()) return __syncthreads();  // Parts of rows' sums have been read.
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
      float* mine = memory_.columns[Warp()] + q * kOwnedOfSpan + 4 * lane;
      *reinterpret_cast<float4*>(mine) = make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
    __syncthreads();
    if (!IsOwner() || OwnSpan() != q || OwnPlace() >= owned) return;
    float parts[4] = {0, 0, 0, 0};
#pragma unroll
    for (int w = 0; w < kAddingThreads / 32; ++w) parts[w % 4] += memory_.columns[w][threadIdx.x];
    const float whole = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    if constexpr (kJoint) {
      own_sum_ = whole;
    } else {
      if constexpr (kSymmetric) own_error_ = judge_.ColumnError(mass, OwnSums().last, whole);
      Move(judge_.RelaxedColumn(OwnSums().last, whole, turn_), mass, is_void);
    }
  }
  // Of the iteration whose sums are known: what the block's columns say, and, in the end, what all do.
  __device__ void JudgeBoth() {
    if (Warp() < kHeldOwnedMost / 32) judge_.TellColumnError(turn_, own_error_);
    if (judge_.IsWarp()) judge_.Judge(turn_);
  }
  // The thread's column, to this inverse of a scale.
  __device__ void Move(float sum, float mass, bool is_void) {
    OwnSums() = {sum, OwnSums().last};
    const float scale = is_void ? 0 : IsNear(sum) ? mass / sum : NAN;
    StoreTagged(part_.scales + OwnColumn(), scale, Tag());
    if (kJoint) own_scale_ = __uint_as_float(Tagged(scale, Tag()));
  }
  // With all others, the iteration whose sums are known, and columns where it sends them.
  __device__ void Judge(float mass, bool is_void) {
    float ratio = 1;
    if (OwnsColumn()) {
      if (mass > 0) ratio = own_sum_ * own_scale_ / mass;
      joint_.Tell(threadIdx.x, mass > 0 ? log2f(own_scale_) : 0, ratio);
    }
    joint_.Decide(row_error_);
    if (OwnsColumn()) Move(own_sum_ * joint_.FactorOf(threadIdx.x, ratio), mass, is_void);
  }

  HeldJudge<kJudged, kSymmetric ? Judged::kBoth : Judged::kRows> judge_;
  Joint joint_;
  bool stopped_ = false;               // By the last one.
  float sum_[kReads ? kQuads : 1][4];  // What rows that are read have added to the columns.
  // The thread's column's, where all are judged together; of the last warp, the lane's row's part of the residual.
  float own_scale_ = 0, own_sum_ = 0, row_error_ = 0;
  float own_error_ = 0;  // And its part of the columns' residual, where both sides have one.
};

#endif

// Groups of `blocks` blocks, each of which solves one problem after the other.
template <int kQuads, typename T, bool kReads, HeldKind kKind>
__global__ void __launch_bounds__(kHeldThreads, 1)
    HeldKernel(LaunchTable table, int64_t problems, int blocks, HeldTask task) {
#if SINKHORN_HOPPER
  __shared__ HeldMemory memory;
  const int groups = gridDim.x / blocks;
  for (int64_t problem = blockIdx.x / blocks; problem < problems; problem += groups) {
    const BlockWork work = FindWork(table, problem);
    const Job& job = CopyJob(table.jobs[work.job]);
    const Member member{job, job.turn_first + work.block};
    const EngineState& state = *member.state(0);
    if (state.mode == task.mode && IsStreamed(job, state) && !state.stopped) {
      HeldSweeps<kQuads, T, kReads, kKind>(member, blocks, &memory).Run(task);
    }
    __syncthreads();  // What it had of this problem has been read.
  }
#endif
}

template <HeldKind kKind, typename Function>
void WithHeldKernel(const HeldLaunch& of, Function function) {
  if (of.reads) return function(HeldKernel<2, float, true, kKind>);
  function(of.quads == 2 ? HeldKernel<2, float, false, kKind> : HeldKernel<1, float, false, kKind>);
}
template <typename Function>
void WithHeldKernel(const HeldLaunch& of, Function function) {
  if (of.kind == HeldKind::kExtrapolated) return WithHeldKernel<HeldKind::kExtrapolated>(of, function);
  if (of.kind == HeldKind::kJudged) return WithHeldKernel<HeldKind::kJudged>(of, function);
  if (of.kind == HeldKind::kSymmetric) return WithHeldKernel<HeldKind::kSymmetric>(of, function);
  if (!of.halves) return WithHeldKernel<HeldKind::kPlain>(of, function);
  function(of.quads == 1 ? HeldKernel<1, __half, false, HeldKind::kPlain>
                         : HeldKernel<2, __half, false, HeldKind::kPlain>);
}

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
  return {HeldKindOf(job, kFloat), KeepsHalves(job),  HeldReads(job), HeldQuads(job),
          HeldBlocks(job),         HeldLaunches(job), kFloat,         kHeldIterationsMost};
}

HeldLaunch FramedLaunchOf(const Job& job, int iterations) {
  HeldLaunch of = HeldLaunchOf(job);
  of.kind = HeldKindOf(job, kMixed), of.launches = 1, of.mode = kMixed, of.iterations = iterations;
  return of;
}

void LaunchHeld(const LaunchTable& table, int64_t problems, const HeldLaunch& of, cudaStream_t stream) {
  if (problems == 0) return;
  const int64_t groups = std::min<int64_t>(problems, kProcessors / of.blocks);
  WithHeldKernel(of, [&](auto kernel) {
    for (int left = of.launches; left > 0; --left) {
      AttributedLaunch launch(kernel, groups * of.blocks, kHeldThreads, HeldBytes(of.kind), stream);
      launch.Add(Together());
      launch.Enqueue(kernel, table, problems, of.blocks,
                     HeldTask{of.mode, of.iterations, left == 1 && of.mode == kFloat});
    }
  });
}

}  // namespace cuda
}  // namespace sinkhorn
