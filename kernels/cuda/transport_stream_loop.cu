// All iterations of a slice, in one launch, of problems that take a whole device to sweep once and are too large to be
// held on its chip (Hopper).
//
// A block has some whole rows; a thread has the same columns of every row. A few rows at a time, densities are made
// once: their sums are the rows' new potentials, and weighted by those they are added to the thread's columns. They are
// 2^(z + row term + column term), where z comes from memory, costs or exponents, or is made from points of few
// coordinates, which lie in shared memory; or, of FAST, they come from memory themselves (Density). What comes from
// memory does so by a ring of bulk copies, which goes on to the next iteration's rows while blocks tell each other the
// columns' sums; every other iteration begins with the rows that the one before ended with, which are in the cache.
// Columns' sums go to the blocks that add them up, and the columns' new terms come back from there, both through
// memory. Potentials are what sums say at the end; the last launch goes over all rows once more, and measures both
// marginals. Where a sum leaves its range, the iteration before was the last, and other kernels go on.
//
// With a tolerance iterations are judged, and columns extrapolated, by all blocks together (transport_joint.cuh). A
// launch that has met it measures at once; one that has not leaves all that extrapolation has learned to the next.
#include <utility>

#include "kernels/cuda/transport_joint.cuh"
#include "kernels/cuda/transport_stream_loop_rows.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

constexpr int kFewQuads = 6;  // Of points: as many, or kLoopQuadsMost.

// Rows at a time: what registers have room for, and shared memory twice.
template <typename T>
constexpr int LoopRowsOf(int quads) {
  return kIsRead<T> && quads > (sizeof(T) == sizeof(float) ? kFewQuads : 8) ? 2 : 4;
}

#if SINKHORN_HOPPER

// Whether the job's other engines are swept, which measures this one as well.
__device__ inline bool HasSweptEngines(const Job& job) { return job.engines > 1 && !job.loops_symmetric; }

// A block's part of a problem. A thread has kQuads times four columns, of kRows rows at a time.
template <typename T, int kQuads, int kRows, bool kJudged>
class LoopSweeps : private LoopRows<T, kQuads, kRows, kJudged> {
  using Rows = LoopRows<T, kQuads, kRows, kJudged>;
  using Rows::HasQuad, Rows::IsNear, Rows::kReads, Rows::kScales, Rows::PointsOfColumns, Rows::QuadAt, Rows::Lane;
  using Rows::memory_, Rows::present_, Rows::RelaxedRow, Rows::ring_, Rows::sum_, Rows::SumBefore, Rows::term_,
      Rows::Warp;
  using Joint = JointIterations<kLoopThreads, kLoopOwnedMost>;
  // The term of a column without mass, but for the bit that tells its turn.
  static constexpr float kNothing = kScales ? 0 : static_cast<float>(kVoid);
  static constexpr float kNearlyNothing = kScales ? 1e-44f : static_cast<float>(kVoid / 2);

 public:
  __device__ LoopSweeps(const Member& member, LoopMemory* memory)
      : Rows(memory),
        member_(member),
        meeting_(member.At<unsigned>(member.job.at.arrivals), kLoopBlocks),
        joint_(member, kJudged ? JointMemoryOfBlock() : nullptr, memory->column_masses) {}

  __device__ void Run(int most) {
    const Job& job = member_.job;
    const EngineState& state = *member_.state(0);
    const int all = job.solver.max_iterations - state.iterations, left = min(all, job.finish_soon ? 1 : most);
    const int parity = state.parity;
    bool ends = left == all || job.finish_soon;
    if (threadIdx.x == 0) Describe();
    __syncthreads();
    if constexpr (kReads) ring_.Begin(left + (ends || kJudged));
    Prepare(parity);
    if constexpr (kJudged) {
      const int before = HasSweptEngines(job) ? 2 : 1;  // The first launch.
      joint_.Begin(memory_.rank, kLoopBlocks, memory_.first_owned, memory_.owned, state.iterations > before);
    }
    meeting_.Arrive();
    meeting_.Await();
    int done = 0, to = parity;
    for (;;) {
      const int made = Iterate(present_ ? 1 : left);
      if (present_) break;
      done = made;
      to = parity ^ (done & 1);
      if constexpr (kJudged) ends = !lost_ && joint_.IsStopped();
      Store(parity, to, done);
      if (done > 0 && (ends || !kReads)) FillVoid(to);
      if (!ends || lost_ || HasSweptEngines(job)) break;
      BeginMeasuring(to);
    }
    if (present_) Measure(to);
    if constexpr (kReads) ring_.End();
    End(done, to);
  }

 private:
  __device__ double BaseAt(int side, int i) const { return kReads ? BaseOf(member_, 0, side, i) : 0; }
  __device__ bool OwnsColumn() const { return static_cast<int>(threadIdx.x) < memory_.owned; }

  __device__ void Describe() {
    const Job& job = member_.job;
    auto& m = memory_;
    m.frame = kReads ? StreamFrameOf(member_, *member_.state(0))
                     : StreamFrame{member_.phi(0, member_.state(0)->parity, 1)[0], kLog2E / member_.state(0)->epsilon};
    static_cast<TogetherPart&>(m) = TogetherPartOf(member_, 0, kLoopBlocks);
    const int owned = LoopOwned(job);
    m.first_owned = min(m.rank * owned, m.columns);
    m.owned = min(owned, m.columns - m.first_owned);
    if constexpr (kReads) {
      m.factor = AreCosts(member_) ? static_cast<float>(-m.frame.scale) : 1;
      m.numbers = reinterpret_cast<const char*>(NumbersOf<T>(member_, 0) + int64_t{m.first_row} * m.columns);
      m.row_bytes = m.columns * static_cast<int>(sizeof(T));
    }
  }

  // ---- The beginning ------------------------------------------------------------------------------------------------

  // Point i of a side, times `factor`.
  __device__ void LoadPoint(int side, int i, float factor, float (&point)[3]) const {
    const int dim = member_.job.dim;
    const float* all = member_.At<float>(member_.job.at.points32[side]) + int64_t{i} * dim;
#pragma unroll
    for (int k = 0; k < 3; ++k) point[k] = k < dim ? all[k] * factor : 0;
  }
  __device__ void Prepare(int parity) {
    const Job& job = member_.job;
    const StreamFrame frame = memory_.frame;
    for (int r = threadIdx.x; r < memory_.rows; r += kLoopThreads) {
      const int i = memory_.first_row + r;
      const double term = frame.RowTerm(member_.phi(0, parity, 0)[i], BaseAt(0, i));
      memory_.row_terms[r] = kScales ? 0 : static_cast<float>(term);
      memory_.row_masses[r] = static_cast<float>(member_.mass(0)[i]);
      memory_.last_rows[r] = {0, kScales && kJudged ? FastExp2(static_cast<float>(-term)) : 1};
      if constexpr (!kReads) {
        float point[3];
        LoadPoint(0, i, static_cast<float>(2 * job.in.kappa * frame.scale), point);
        for (int k = 0; k < 3; ++k) memory_.points[r][k] = point[k];
      }
    }
    if constexpr (!kReads) {
#pragma unroll 1
      for (int c = 0; c < 4 * kQuads; ++c) {
        float y[3];
        LoadPoint(1, min(4 * QuadAt(c / 4) + c % 4, job.size[1] - 1), 1, y);
        PointsOfColumns()[c * kLoopThreads] = make_float4(y[0], y[1], y[2], kNothing);
      }
    }
    if (OwnsColumn()) {
      const int j = memory_.first_owned + threadIdx.x;
      const double log_mass = j < job.size[1] ? member_.log_mass(1)[j] : kVoid;
      const bool is_void = log_mass <= kVoid;
      memory_.column_masses[threadIdx.x] = is_void ? 0 : static_cast<float>(member_.mass(1)[j]);
      memory_.last_columns[threadIdx.x] = {0, 1};
      float term = kNothing;
      if (!is_void) {
        term = frame.ColumnTerm(member_.phi(0, parity, 1)[j], BaseAt(1, j), log_mass);
        if (kScales) term = FastExp2(term);
      }
      SendTerm(term);
    }
    if (threadIdx.x == 0) memory_.relax = static_cast<float>(member_.state(0)->relax);
    // What this block reads of others says that it is of no turn.
    const float nothing[4] = {0, 0, 0, 0};
    const int lanes = LoopOwned(job) / 4, column = 4 * (threadIdx.x % lanes);
    for (int k = threadIdx.x / lanes; k < kLoopBlocks && column < memory_.owned; k += kLoopThreads / lanes) {
      if (static_cast<int>(threadIdx.x) >= kLoopThreads / lanes * lanes) break;
      StoreTagged(memory_.sums + int64_t{k} * memory_.columns + memory_.first_owned + column, nothing, 0);
    }
  }

  // ---- Iterations ---------------------------------------------------------------------------------------------------

  // x, and what follows from it is made where it is used: not before all iterations, for which registers are short.
  __device__ static int Anew(int x) {
    asm volatile("" : "+r"(x));
    return x;
  }
  // Up to `most`; how many could be made.
  __device__ int Iterate(int most) {
    for (int done = 0;; ++done) {
      lost_ = __syncthreads_or(!TakeTerms());
      if (lost_) return max(done - 1, 0);
      if constexpr (kJudged) {
        if (!present_ && joint_.IsStopped()) return done - joint_.IsVoided();
        if (!present_ && threadIdx.x == 0) memory_.relax = static_cast<float>(joint_.State().relax);
      }
      if (done == most) return done;
      SumRows();
      if (!kJudged && present_) break;
      MoveOwned();
      for (int r = threadIdx.x; r < memory_.rows; r += kLoopThreads) {
        const float sum = RelaxedRow(r, memory_.row_sums[r]);
        memory_.rows_before[r] = memory_.last_rows[r];
        memory_.last_rows[r] = {memory_.row_terms[r], sum};
        if (!kScales) memory_.row_terms[r] -= __log2f(sum);
      }
    }
    __syncthreads();  // Rows' sums are there.
    return most;
  }
  // All rows; what columns sum up to, where somebody wants to know, is on its way to those that add it up.
  __device__ void SumRows() {
    tag_ ^= 1;
    Rows::SumAll();
    if (!kJudged && present_) return;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      if (!HasQuad(q)) continue;
      StoreTagged(memory_.sums + int64_t{memory_.rank} * memory_.columns + 4 * QuadAt(q), sum_[q], tag_);
    }
  }
  // The thread's columns' new terms; whether they are numbers.
  __device__ bool TakeTerms() {
    const int quads = Anew(memory_.quads), first = Anew(threadIdx.x);
    const auto term_at = [&](int q) { return memory_.scales + 4 * min(first + kLoopThreads * q, quads - 1); };
    uint4 seen[kQuads];
    bool there;
    do {  // One lane for each 128 bytes looks until they are there: all looking would hold up those that write.
      there = true;
      if (Lane() % 8 == 0) {
#pragma unroll
        for (int q = 0; q < kQuads; ++q) seen[q] = LoadTagged(term_at(q));
#pragma unroll
        for (int q = 0; q < kQuads; ++q) there = there && IsOf(seen[q], tag_);
      }
    } while (!__all_sync(0xffffffffu, there));
    bool numbers = true;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) seen[q] = LoadTagged(term_at(q));
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      float term[4];
      AwaitTagged(term_at(q), seen[q], tag_, term);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        numbers = numbers && !isnan(term[k]);
        const float own = first + kLoopThreads * q < quads ? term[k] : kNothing;
        if constexpr (kReads) {
          term_[q][k] = own;
        } else {
          PointsOfColumns()[(4 * q + k) * kLoopThreads].w = own;
        }
      }
    }
    return numbers;
  }

  // The owned columns' sums over all blocks, and their new terms.
  __device__ void MoveOwned() {
    constexpr int kMost = static_cast<int>(CeilDiv(kLoopBlocks, kLoopThreads / (kLoopOwnedMost / 4)));
    const int lanes = Anew(LoopOwned(member_.job) / 4), slices = kLoopThreads / lanes;
    const int lane = threadIdx.x % lanes, slice = threadIdx.x / lanes;
    if (slice < slices && 4 * lane < memory_.owned) {
      const auto part_of = [&](int k) {  // Of a block that is not there: the last's, which counts for nothing.
        const int block = min(slice + k * slices, kLoopBlocks - 1);
        return memory_.sums + int64_t{block} * memory_.columns + memory_.first_owned + 4 * lane;
      };
      // Until the last is there, then until all are: one after the other would take as many ways to memory.
      while (!IsOf(LoadTagged(part_of(kMost - 1)), tag_)) continue;
      uint4 seen[kMost];
      for (bool there = false; !there;) {
        there = true;
#pragma unroll
        for (int k = 0; k < kMost; ++k) seen[k] = LoadTagged(part_of(k));
#pragma unroll
        for (int k = 0; k < kMost; ++k) there = there && IsOf(seen[k], tag_);
      }
      float sum[4] = {0, 0, 0, 0};
#pragma unroll
      for (int k = 0; k < kMost; ++k) {
        if (slice + k * slices >= kLoopBlocks) continue;
        sum[0] += __uint_as_float(seen[k].x), sum[1] += __uint_as_float(seen[k].y);
        sum[2] += __uint_as_float(seen[k].z), sum[3] += __uint_as_float(seen[k].w);
      }
      memory_.parts_of_columns[slice * lanes + lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
    __syncthreads();
    const float* parts = reinterpret_cast<const float*>(memory_.parts_of_columns) + threadIdx.x;
    float whole = 0;
#pragma unroll 4
    for (int s = 0; s < slices && OwnsColumn(); ++s) whole += parts[4 * lanes * s];
    if constexpr (kJudged) {
      if (!present_) whole *= Judge(whole);
    }
    if (!OwnsColumn()) return;
    memory_.columns_before[threadIdx.x] = memory_.last_columns[threadIdx.x];
    memory_.last_columns[threadIdx.x] = {kScales ? 0 : own_term_, whole};
    if constexpr (kJudged) {
      if (!present_ && joint_.IsVoided()) return SendTerm(own_term_);
    }
    const float mass = memory_.column_masses[threadIdx.x], ratio = kScales ? whole : whole / mass;
    if (mass == 0) return SendTerm(kNothing);
    SendTerm(!IsNear(ratio) ? NAN : kScales ? mass / whole : own_term_ - __log2f(ratio));
  }
  // With all others, the iteration whose rows and columns have been added up; by what the thread's column's sum is to
  // be multiplied then.
  __device__ float Judge(float whole) {
    const int c = threadIdx.x;
    float ratio = 1;
    if (OwnsColumn()) {
      const float mass = memory_.column_masses[c];
      if (mass > 0) ratio = kScales ? whole * own_term_ / mass : whole / mass;
      joint_.Tell(c, kScales && mass > 0 ? log2f(own_term_) : own_term_, ratio);
    }
    double error = 0;
    for (int r = Lane(); r < memory_.rows && Warp() == kLoopWarps - 1; r += 32) {
      const float before = SumBefore(r);
      error += memory_.row_masses[r] * fabsf(memory_.row_sums[r] - before) / before;
    }
    joint_.Decide(error);
    return OwnsColumn() ? joint_.FactorOf(c, ratio) : 1;
  }
  // The owned column's, as others see it.
  __device__ void SendTerm(float term) {
    own_term_ = __uint_as_float(Tagged(term, tag_));
    StoreTagged(memory_.scales + memory_.first_owned + threadIdx.x, term, tag_);
  }

  // ---- Potentials ---------------------------------------------------------------------------------------------------

  // Whether the last iteration does not count.
  __device__ bool IsTakenBack() const {
    if constexpr (kJudged) return lost_ || joint_.IsVoided();
    return lost_;
  }
  // After `done` iterations from those of parity `from`; what sweeps want of them, too.
  __device__ void Store(int from, int to, int done) const {
    const Job& job = member_.job;
    const StreamFrame frame = memory_.frame;
    const auto power = [&](const LoopSum& last, const LoopSum& before) {
      const LoopSum& s = IsTakenBack() ? before : last;
      return s.term - log2(static_cast<double>(s.sum));
    };
    for (int r = threadIdx.x; r < memory_.rows && done > 0; r += kLoopThreads) {
      const int i = memory_.first_row + r;
      const double phi = power(memory_.last_rows[r], memory_.rows_before[r]) / frame.scale;
      member_.phi(0, to, 0)[i] = phi + BaseAt(0, i) - frame.reference;
    }
    if (!OwnsColumn()) return;
    const int j = memory_.first_owned + threadIdx.x;
    float term = static_cast<float>(kVoid);
    if (j < job.size[1]) {
      const double base = BaseAt(1, j), log_mass = member_.log_mass(1)[j];
      double phi = member_.phi(0, from, 1)[j];
      if (done > 0 && log_mass > kVoid) {
        phi = power(memory_.last_columns[threadIdx.x], memory_.columns_before[threadIdx.x]) / frame.scale;
        phi += base + frame.reference;
      }
      member_.phi(0, to, 1)[j] = phi;
      term = frame.ColumnTerm(phi, base, log_mass);
    }
    if (kReads) member_.At<float>(job.at.stream_terms[0])[j] = term;
  }
  // Columns without mass, which no row sees, at potentials of parity `to`.
  __device__ void FillVoid(int to) {
    const Job& job = member_.job;
    bool any = false;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float term = kReads ? term_[kReads ? q : 0][k] : PointsOfColumns()[(4 * q + k) * kLoopThreads].w;
        any = any || (4 * QuadAt(q) + k < job.size[1] && term <= kNearlyNothing);
      }
    }
    if (!__syncthreads_or(any)) return;  // The same in all blocks.
    meeting_.Arrive();
    meeting_.Await();
    const StreamFrame frame = memory_.frame;
    const double factor = kReads ? memory_.factor : 2 * job.in.kappa * frame.scale;
    for (int k = 0; k < memory_.owned; ++k) {
      const int j = memory_.first_owned + k;
      if (j >= job.size[1] || member_.log_mass(1)[j] > kVoid) continue;
      const auto exponent = [&](int i) {
        const double phi = __ldcg(member_.phi(0, to, 0) + i);
        return NumberAt(i, j) * factor + frame.RowTerm(phi, BaseAt(0, i)) + member_.log_mass(0)[i];
      };
      const double lse = BlockLogSum(job.size[0], memory_.scratch, exponent);
      const double phi = BaseAt(1, j) + frame.reference - lse / frame.scale;
      if (threadIdx.x != 0) continue;
      member_.phi(0, to, 1)[j] = phi;
      if (kReads) member_.At<float>(job.at.stream_terms[0])[j] = frame.ColumnTerm(phi, BaseAt(1, j), kVoid);
    }
  }
  // Of row i and column j: a number, or a product of points.
  __device__ double NumberAt(int i, int j) const {
    if constexpr (kReads) {
      return LoadNumber(NumbersOf<T>(member_, 0) + int64_t{i} * memory_.columns + j);
    } else {
      float x[3], y[3];
      LoadPoint(0, i, 1, x);
      LoadPoint(1, j, 1, y);
      return fmaf(x[2], y[2], fmaf(x[1], y[1], x[0] * y[0]));
    }
  }

  // ---- What the plan's marginals are --------------------------------------------------------------------------------

  // At the potentials of parity `to`, which have been stored and whose terms the columns have. Plain columns were added
  // up at these rows: those alone are added up once more. Of judged ones both are to be, rows weighted by their mass
  // where they are.
  __device__ void BeginMeasuring(int to) {
    meeting_.Arrive();
    const int r = threadIdx.x, i = memory_.first_row + r;
    static_assert(kLoopRowsMost == kLoopThreads, "a thread for each row");
    if (kJudged && r < memory_.rows) {
      const double term = memory_.frame.RowTerm(member_.phi(0, to, 0)[i], BaseAt(0, i));
      memory_.row_masses[r] *= FastExp2(static_cast<float>(term - memory_.row_terms[r]));
    }
    if (threadIdx.x == 0) memory_.relax = 1;
    present_ = true;
    __syncthreads();
  }
  // From what rows and columns then sum up to.
  __device__ void Measure(int to) {
    meeting_.Await();  // The first column's potential.
    const StreamFrame frame = memory_.frame;
    const double reference = __ldcg(member_.phi(0, to, 1));
    const auto log_sum = [](const LoopSum& last) { return log2(static_cast<double>(last.sum)) - last.term; };
    BlockStats stats = NoStats();
    const int r = threadIdx.x, i = memory_.first_row + r, j = memory_.first_owned + r;
    if (r < memory_.rows) {
      const LoopSum seen = kJudged ? memory_.last_rows[r] : LoopSum{memory_.row_terms[r], memory_.row_sums[r]};
      const double lse = log_sum(seen) + (frame.reference - BaseAt(0, i)) * frame.scale;
      stats = MeasurePlain(member_, 0, i, member_.phi(0, to, 0)[i], reference, lse, frame.scale);
    }
    StoreStats(stats, true, member_.stats(0, 0) + memory_.rank);
    stats = NoStats();
    if (OwnsColumn() && j < member_.job.size[1]) {
      const double phi = __ldcg(member_.phi(0, to, 1) + j);
      const bool is_void = member_.log_mass(1)[j] <= kVoid;
      const double lse = log_sum(memory_.last_columns[r]) - (frame.reference + BaseAt(1, j)) * frame.scale;
      stats = MeasurePlain(member_, 1, j, phi, -reference, is_void ? -phi * frame.scale : lse, frame.scale);
    }
    StoreStats(stats, true, member_.stats(0, 1) + memory_.rank);
  }
  // The last thing: the state after `done` iterations more, with the present potentials those of parity `to`.
  __device__ void End(int done, int to) {
    const bool is_last = present_ ? LastToArrive(meeting_.Other(), kLoopBlocks) : memory_.rank == 0;
    if (is_last && threadIdx.x == 0) {
      EngineState* state = member_.state(0);
      if constexpr (kJudged) {
        if (lost_ && !present_) joint_.Undo();
        joint_.Leave(state);
      } else if (done > 0) {
        MovePlain(member_.job, state, done, to);
      }
      if (lost_ && !present_) Fall(member_.job, state);
    }
    if constexpr (kJudged) joint_.End(!lost_ && !present_);
    if (is_last && present_) EndPlainMeasure(member_, 0, kLoopBlocks, memory_.scratch);
    if (threadIdx.x == 0) meeting_.Leave();
  }

  __device__ static typename Joint::Memory* JointMemoryOfBlock() {
    __shared__ typename Joint::Memory memory;
    return &memory;
  }

  const Member& member_;
  HeldMeeting meeting_;
  Joint joint_;
  uint32_t tag_ = 0;
  bool lost_ = false;   // The last iteration.
  float own_term_ = 0;  // Of the column that the thread looks after.
};

#endif

// A group of all blocks for one problem after the other.
template <typename T, int kQuads, int kRows, bool kJudged>
__global__ void __launch_bounds__(kLoopThreads, 1) LoopKernel(LaunchTable table, int64_t problems, int most) {
#if SINKHORN_HOPPER
  __shared__ LoopMemory memory;
  for (int64_t problem = 0; problem < problems; ++problem) {
    const BlockWork work = FindWork(table, problem);
    const Job& job = CopyJob(table.jobs[work.job]);
    const Member member{job, job.turn_first + work.block};
    const EngineState& state = *member.state(0);
    const bool here = state.mode == kFloat && (!kIsRead<T> || IsStreamed(job, state));
    const bool through = state.stopped && (!kJudged || state.measured > 0 || job.engines > 1);
    if (here && !through && !state.fallen) LoopSweeps<T, kQuads, kRows, kJudged>(member, &memory).Run(most);
    __syncthreads();  // What it had of this problem has been read.
  }
#endif
}

// By a kernel for `of.quads`, one of kQuads.
template <typename T, int... kQuads>
void LaunchQuads(std::integer_sequence<int, kQuads...>, const LaunchTable& table, int64_t problems,
                 const LoopLaunch& of, int most, cudaStream_t stream) {
  const auto launch = [&](auto kernel, int quads, bool judged) {
    if (quads != of.quads || judged != of.judged) return;
    AttributedLaunch attributed(kernel, kLoopBlocks, kLoopThreads, LoopBytes(judged), stream);
    attributed.Add(Together());
    attributed.Enqueue(kernel, table, problems, most);
  };
  (launch(LoopKernel<T, kQuads, LoopRowsOf<T>(kQuads), false>, kQuads, false), ...);
  (launch(LoopKernel<T, kQuads, LoopRowsOf<T>(kQuads), true>, kQuads, true), ...);
}

}  // namespace

LoopLaunch LoopLaunchOf(const Job& job) {
  const int quads = static_cast<int>(CeilDiv(StreamColumns(job, 0), 8 * kLoopThreads)) * 2;
  const bool judged = !IsFixed(job);
  if (LoopsPoints(job)) return {judged, job.dim > 2 ? 3 : 2, false, quads <= kFewQuads ? kFewQuads : kLoopQuadsMost};
  return {judged, 0, KeepsDensities(job), quads};
}

void LaunchLoop(const LaunchTable& table, int64_t problems, const LoopLaunch& of, int most, cudaStream_t stream) {
  if (problems == 0) return;
  constexpr std::integer_sequence<int, 2, 4, kFewQuads, 8, kLoopQuadsMost> numbers;
  constexpr std::integer_sequence<int, kFewQuads, kLoopQuadsMost> points;
  const auto launch = [&](auto number, auto sequence) {
    LaunchQuads<decltype(number)>(sequence, table, problems, of, most, stream);
  };
  if (of.dims > 0) return of.dims == 3 ? launch(Points<3>(), points) : launch(Points<2>(), points);
  of.densities ? launch(Density(), numbers) : launch(0.0f, numbers);
}

}  // namespace cuda
}  // namespace sinkhorn
