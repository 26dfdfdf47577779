// All iterations of a slice, in one launch, of clouds of FAST that take a whole device: products and exponentials are
// made once in an iteration, for both sides (Hopper).
//
// A block has some columns, whose points stay in shared memory; all rows pass by, some at a time (a round). Densities
// 2^(z + row term + column term) are rounded to halves, and kept for kRoundsHeld rounds. All blocks' sums of a row
// are its new potential; as soon as those are there, the round's densities, weighted by them, are added to the columns.
// Both kinds of sums are made on tensor cores. Rows' sums meet in memory, as whole numbers, which in any order give the
// same. Columns have their sums where they are: an iteration ends without any meeting of blocks.
#include "kernels/cuda/transport_cloud_loop_team.cuh"
#include "kernels/cuda/transport_launch.h"

namespace sinkhorn {
namespace cuda {
namespace {

#if SINKHORN_HOPPER

// A block's part of a problem.
template <typename Shape, int kProducts>
class CloudLoop {
  using Memory = CloudLoopMemory<Shape>;
  static constexpr int kRows = Shape::kRows, kStages = Shape::kStages;
  static constexpr int kRowBytes = CloudRowBytes(16 * kProducts), kStageBytes = kRows * kRowBytes;

 public:
  __device__ CloudLoop(const Member& member, Memory* memory)
      : member_(member), m_(*memory), meeting_(member.At<unsigned>(member.job.at.arrivals), kLoopBlocks) {}

  __device__ void Run(int most) {
    if (threadIdx.x == 0) Describe(most);
    __syncthreads();
    Prepare();
    meeting_.Arrive();
    meeting_.Await();
    if (threadIdx.x < kTeamsThreads) {
      CloudTeam<Shape, kProducts>(&m_).SumAll();
    } else {
      const int other = threadIdx.x / 32 - kTeamsThreads / 32;
      if (other == 0) {
        Feed();
      } else if (other == 1) {
        Publish();
      } else {
        Collect(other - 2);
      }
    }
    __syncthreads();
    // Where a sum was lost, the columns' last terms may have been lost before; of the last ones others do not know yet.
    bool whole = m_.lost < 0;
    if (threadIdx.x == 0 && whole && m_.lost_column != 0) CountUp(meeting_.Other() + 1);
    meeting_.Arrive();
    meeting_.Await();
    int done = whole ? m_.left : max(m_.lost - 1, 0);
    if (whole && *static_cast<volatile unsigned*>(meeting_.Other() + 1) != 0) {
      done = max(m_.left - 1, 0);
      whole = false;
    }
    const int to = m_.parity ^ (done & 1);
    Store(to, done, whole);
    const bool measured = whole && m_.passes > m_.left;
    if (measured) Measure(to);
    End(done, to, whole, measured);
  }

 private:
  __device__ static int Lane() { return threadIdx.x % 32; }
  __device__ static bool IsNear(float x) { return x > kSumLeast && x < kSumMost; }
  __device__ bool OwnsColumn() const { return static_cast<int>(threadIdx.x) < m_.columns; }

  // ---- The beginning ------------------------------------------------------------------------------------------------

  __device__ void Describe(int most) {
    const Job& job = member_.job;
    const EngineState& state = *member_.state(0);
    auto& m = m_;
    const int all = job.solver.max_iterations - state.iterations, parity = state.parity;
    m.parity = parity;
    m.left = min(all, job.finish_soon ? 1 : most);
    m.passes = m.left + (m.left == all || job.finish_soon);
    m.frame = StreamFrameOf(member_, state);
    m.factor = ProductFactor(UnscaledFactor(job, m.frame.scale), state.point_scale);
    m.x = member_.At<char>(job.at.halves[0]);
    m.y = member_.At<char>(job.at.halves[1]);
    m.totals = member_.At<unsigned long long>(job.at.loop_totals);
    m.frames = member_.At<float>(job.at.loop_frames);
    m.padded = PaddedPoints(job.size[0]);
    m.rank = blockIdx.x;
    m.rows = job.size[0];
    m.rounds = static_cast<int>(CeilDiv(m.rows, kRows));
    m.columns_at = (SharedAddress(DynamicShared()) + kPlaneAlignment - 1) / kPlaneAlignment * kPlaneAlignment;
    m.stages_at = m.columns_at + Shape::kAll * kRowBytes;
    m.held_at = m.stages_at + kStages * kStageBytes;
    const int each = CloudLoopColumns(job);
    m.lift = static_cast<float>(kDensityLift - log2(static_cast<double>(job.size[1])));
    m.row_unit = static_cast<float>(m.rows);
    m.first_column = min(m.rank * each, job.size[1]);
    m.columns = min(each, job.size[1] - m.first_column);
    m.lost = -1;
    m.stop = m.lost_column = 0;
    for (int k = 0; k < kStages; ++k) {
      InitBarrier(&m.full[k], 2);
      InitBarrier(&m.empty[k], kTeamsThreads / 32);
    }
    for (int k = 0; k < kRoundsKnown; ++k) {
      InitBarrier(&m.summed[k], kTeamsThreads / 32);
      InitBarrier(&m.weighed[k], 1);
    }
    FenceBarriers();
  }
  __device__ void Prepare() {
    const Job& job = member_.job;
    const int parity = m_.parity;
    // Rows: each block some.
    const int64_t each = CeilDiv(m_.padded, kLoopBlocks), last = min((m_.rank + 1) * each, m_.padded);
    for (int64_t i = m_.rank * each + threadIdx.x; i < last; i += kCloudLoopThreads) {
      const float term = i < m_.rows ? static_cast<float>(m_.frame.RowTerm(member_.phi(0, parity, 0)[i], 0))
                                     : static_cast<float>(kVoid);
      StoreTagged(m_.FramesOf(0) + i, term, 0);
      for (int k = 1; k < 3; ++k) StoreTagged(m_.FramesOf(k) + i, 0, 1);
      for (int k = 0; k < 3; ++k) m_.TotalsOf(k)[i] = 0;
    }
    // Columns: what fills a tile too.
    const int64_t padded = PaddedPoints(job.size[1]);
    const auto* from = reinterpret_cast<const uint4*>(m_.y + int64_t{m_.first_column} * kRowBytes);
    auto* to = reinterpret_cast<uint4*>(AtShared(m_.columns_at));
    const int quads = Shape::kAll * kRowBytes / 16;
    const int there = static_cast<int>(min(int64_t{Shape::kAll}, padded - m_.first_column)) * kRowBytes / 16;
    for (int k = threadIdx.x; k < quads; k += kCloudLoopThreads) to[k] = k < there ? from[k] : make_uint4(0, 0, 0, 0);
    FenceCopies();
    float mass = 0;
    if (threadIdx.x < Shape::kAll) {
      const int j = m_.first_column + threadIdx.x;
      float term = static_cast<float>(kVoid);
      if (OwnsColumn()) {
        mass = static_cast<float>(member_.mass(1)[j]);
        term = static_cast<float>((member_.phi(0, parity, 1)[j] - m_.frame.reference) * m_.frame.scale + m_.lift);
      }
      m_.terms[threadIdx.x] = m_.terms_before[threadIdx.x] = term;
    }
    const float most = static_cast<float>(BlockMax(mass, m_.scratch));
    if (threadIdx.x < Shape::kAll) {
      const ThreeHalves halves(most > 0 ? mass / most : 0);
      for (int k = 0; k < 3; ++k) m_.masses[k][threadIdx.x] = halves.part[k];
      m_.masses[3][threadIdx.x] = 0;
    }
    for (int k = threadIdx.x; k < kRoundsKnown * kRows; k += kCloudLoopThreads) m_.weights[k / kRows][3][k % kRows] = 0;
    const bool is_even = __syncthreads_and(!OwnsColumn() || mass == most) != 0;
    if (threadIdx.x == 0) {
      m_.is_even = is_even;
      m_.sum_unit = most * exp2f(-m_.lift);
    }
  }

  // ---- Other warps --------------------------------------------------------------------------------------------------

  // Points and terms of the rounds to come; the next one's terms are on their way while a stage is waited for.
  __device__ void Feed() {
    const int rounds = m_.passes * m_.rounds;
    int pass = 0, r = 0, t = 0;
    uint32_t seen[kRows / 32];
    const auto load = [&] {
      const float* frames = m_.FramesOf(pass) + r * kRows + Lane();
#pragma unroll
      for (int k = 0; k < kRows / 32; ++k) seen[k] = LoadOneTagged(frames + 32 * k);
    };
    load();
    for (; t < rounds; ++t) {
      const int stage = t % kStages;
      if (t >= kStages && !WaitUnless(m_.stop, &m_.empty[stage], (t / kStages - 1) & 1)) break;
      if (Lane() == 0) {
        ArriveExpecting(&m_.full[stage], kStageBytes);
        CopyBulk(m_.stages_at + stage * kStageBytes, m_.x + int64_t{r} * kStageBytes, kStageBytes, &m_.full[stage]);
      }
      const uint32_t tag = m_.TagOf(pass);
      for (;;) {
        bool there = true;
#pragma unroll
        for (int k = 0; k < kRows / 32; ++k) there = there && ((seen[k] ^ tag) & 1) == 0;
        if (there || m_.stop) break;
        load();
      }
#pragma unroll
      for (int k = 0; k < kRows / 32; ++k) m_.frames_of[stage][32 * k + Lane()] = TermOf(seen[k]);
      __syncwarp();
      if (Lane() == 0) Arrive(&m_.full[stage]);
      if (++r == m_.rounds) r = 0, ++pass;
      if (t + 1 < rounds) load();
    }
    // What has been fetched for nothing.
    if (t < rounds) {
      for (int k = max(t - kStages, 0); k < t; ++k) WaitForPhase(&m_.full[k % kStages], k / kStages & 1);
    }
  }
  // This block's part of rows' sums, to all.
  __device__ void Publish() {
    int t = 0;
    const float unit = m_.sum_unit;
    for (int pass = 0; pass < m_.passes; ++pass) {
      __threadfence();  // The pass before last left its totals empty.
      unsigned long long* totals = m_.TotalsOf(pass) + Lane();
      for (int r = 0; r < m_.rounds; ++r, ++t, totals += kRows) {
        if (!WaitUnless(m_.stop, &m_.summed[t % kRoundsKnown], t / kRoundsKnown & 1)) return;
        unsigned long long counted[kRows / 32];
#pragma unroll
        for (int k = 0; k < kRows / 32; ++k) {
          float part = m_.parts[t % kRoundsKnown][0][32 * k + Lane()];
#pragma unroll
          for (int a = 1; a < Shape::kAcross; ++a) part += m_.parts[t % kRoundsKnown][a][32 * k + Lane()];
          counted[k] = CountedSum(part * unit);
        }
#pragma unroll
        for (int k = 0; k < kRows / 32; ++k) AddToTotal(totals + 32 * k, counted[k]);
      }
    }
  }
  // Rows' whole sums, and what they weigh, of every other round; one block for each leaves the rows' new terms.
  __device__ void Collect(int collector) {
    constexpr int kEach = kRows / 32;
    float mass[kEach];
    const auto load = [&](int r) {
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        mass[k] = m_.row_unit * static_cast<float>(member_.mass(0)[min(r * kRows + 32 * k + Lane(), m_.rows - 1)]);
      }
    };
    int t = 0;
    load(collector % m_.rounds);
    for (int pass = 0; pass < m_.passes; ++pass) {
      const bool present = pass == m_.left;
      __threadfence();
      for (int r = 0; r < m_.rounds; ++r, ++t) {
        if (t % kCollectors != collector) continue;
        const int first = r * kRows + Lane();
        const unsigned long long* totals = m_.TotalsOf(pass) + first;
        unsigned long long seen[kEach];
        bool there;
        // One number until it is there, then all: to look at all would hold up those that add.
        const unsigned long long* one = m_.TotalsOf(pass) + min((r + 1) * kRows, m_.rows) - 1;
        while (!IsWholeSum(LoadRelaxed(one)) && !m_.stop) continue;
        do {
          there = true;
#pragma unroll
          for (int k = 0; k < kEach; ++k) seen[k] = LoadRelaxed(totals + 32 * k);
#pragma unroll
          for (int k = 0; k < kEach; ++k) there = there && IsWholeSum(seen[k]);
          there = __all_sync(0xffffffffu, there || m_.stop);
        } while (!there);
        if (m_.stop) return;
        float sum[kEach];
        bool near = true;
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
          sum[k] = SumOf(seen[k]);
          const bool is_row = first + 32 * k < m_.rows, is_near = IsNear(sum[k]);
          near = near && (is_near || !is_row);
          const ThreeHalves weight(!is_row ? 0 : present ? mass[k] : is_near ? mass[k] * FastReciprocal(sum[k]) : NAN);
#pragma unroll
          for (int part = 0; part < 3; ++part) m_.weights[t % kRoundsKnown][part][32 * k + Lane()] = weight.part[part];
        }
        if (!__all_sync(0xffffffffu, near)) m_.lost = pass;
        __syncwarp();
        if (Lane() == 0) Arrive(&m_.weighed[t % kRoundsKnown]);
        if (r % kLoopBlocks == m_.rank && !present) {
#pragma unroll
          for (int k = 0; k < kEach; ++k) {
            const int i = first + 32 * k;
            const float term = i < m_.rows ? TermOf(LoadOneTagged(m_.FramesOf(pass) + i)) - __log2f(sum[k])
                                           : static_cast<float>(kVoid);
            StoreTagged(m_.FramesOf(pass + 1) + i, term, m_.TagOf(pass + 1));
            m_.TotalsOf(pass + 2)[i] = 0;
          }
          __threadfence();
        }
        load((r + kCollectors) % m_.rounds);
      }
      if (m_.lost >= 0) return;
    }
  }

  // ---- The end ------------------------------------------------------------------------------------------------------

  __device__ int FirstRow() const {
    return static_cast<int>(min(m_.rank * CeilDiv(m_.rows, kLoopBlocks), int64_t{m_.rows}));
  }
  __device__ int LastRow() const {
    return static_cast<int>(min((m_.rank + 1) * CeilDiv(m_.rows, kLoopBlocks), int64_t{m_.rows}));
  }
  // Potentials are those whose terms these are again: it is all the same where slices end.
  __device__ double PhiOfRow(int pass, int i) const {
    return TermOf(LoadOneTagged(m_.FramesOf(pass) + i)) / m_.frame.scale - m_.frame.reference;
  }
  __device__ double PhiOfColumn(float term) const {
    return (static_cast<double>(term) - m_.lift) / m_.frame.scale + m_.frame.reference;
  }
  __device__ void Store(int to, int done, bool whole) {
    if (done == 0) return;
    for (int i = FirstRow() + threadIdx.x; i < LastRow(); i += kCloudLoopThreads) {
      member_.phi(0, to, 0)[i] = PhiOfRow(done, i);
    }
    if (!OwnsColumn()) return;
    const int j = m_.first_column + threadIdx.x;
    member_.phi(0, to, 1)[j] = PhiOfColumn(whole ? m_.terms[threadIdx.x] : m_.terms_before[threadIdx.x]);
  }
  __device__ void Measure(int to) {
    meeting_.Arrive();
    meeting_.Await();  // The first column's potential.
    const double reference = __ldcg(member_.phi(0, to, 1));
    BlockStats stats = NoStats();
    for (int i = FirstRow() + threadIdx.x; i < LastRow(); i += kCloudLoopThreads) {
      const float sum = SumOf(LoadRelaxed(m_.TotalsOf(m_.left) + i));
      stats = Combine(stats, MeasureAt(0, i, PhiOfRow(m_.left, i), reference, sum));
    }
    StoreStats(stats, true, member_.stats(0, 0) + m_.rank);
    stats = NoStats();
    if (OwnsColumn()) {
      const int j = m_.first_column + threadIdx.x;
      stats = MeasureAt(1, j, PhiOfColumn(m_.terms[threadIdx.x]), -reference, m_.SumsOfColumns()[threadIdx.x]);
    }
    StoreStats(stats, true, member_.stats(0, 1) + m_.rank);
  }
  // Point i of a side, whose potential phi is, and whose part of the marginal is `ratio` times its mass.
  __device__ BlockStats MeasureAt(int side, int i, double phi, double reference, float ratio) const {
    const double scale = m_.frame.scale, lse = log2(static_cast<double>(ratio)) - phi * scale;
    return MeasurePlain(member_, side, i, phi, reference, lse, scale);
  }
  // The state after `done` iterations more, with the present potentials those of parity `to`; `whole`: all of them.
  __device__ void End(int done, int to, bool whole, bool measured) {
    const bool is_last = LastToArrive(meeting_.Other(), kLoopBlocks);
    if (is_last && threadIdx.x == 0) {
      meeting_.Other()[1] = 0;
      if (!whole) Fall(member_.job, member_.state(0));
      if (done > 0) MovePlain(member_.job, member_.state(0), done, to);
    }
    if (is_last && measured) EndPlainMeasure(member_, 0, kLoopBlocks, m_.scratch);
    if (threadIdx.x != 0) return;
    meeting_.Leave();
    for (int k = 0; k < kStages; ++k) EndBarrier(&m_.full[k]), EndBarrier(&m_.empty[k]);
    for (int k = 0; k < kRoundsKnown; ++k) EndBarrier(&m_.summed[k]), EndBarrier(&m_.weighed[k]);
  }

  const Member& member_;
  Memory& m_;
  HeldMeeting meeting_;
};

#endif

// All blocks for one problem after the other.
template <typename Shape, int kProducts>
__global__ void __launch_bounds__(kCloudLoopThreads, 1) CloudLoopKernel(LaunchTable table, int64_t problems, int most) {
#if SINKHORN_HOPPER
  __shared__ CloudLoopMemory<Shape> memory;
  for (int64_t problem = 0; problem < problems; ++problem) {
    const BlockWork work = FindWork(table, problem);
    const Job& job = CopyJob(table.jobs[work.job]);
    const Member member{job, job.turn_first + work.block};
    const EngineState& state = *member.state(0);
    const bool here = state.mode == kFloat && !state.stopped && !state.fallen;
    if (here) CloudLoop<Shape, kProducts>(member, &memory).Run(most);
    __syncthreads();  // What it had of this problem has been read.
  }
#endif
}

template <int kProducts, typename... Shapes>
void LaunchShapes(const LaunchTable& table, int64_t problems, const CloudLoopLaunch& of, int most,
                  cudaStream_t stream) {
  const auto launch = [&](auto shape) {
    using Shape = decltype(shape);
    if (of.across != Shape::kAcross || of.columns != Shape::kColumns) return;
    const auto kernel = CloudLoopKernel<Shape, kProducts>;
    AttributedLaunch attributed(kernel, kLoopBlocks, kCloudLoopThreads, Shape::Bytes(CloudRowBytes(16 * kProducts)),
                                stream);
    attributed.Add(Together());
    attributed.Enqueue(kernel, table, problems, most);
  };
  (launch(Shapes()), ...);
}
template <int kProducts>
void LaunchProducts(const LaunchTable& table, int64_t problems, const CloudLoopLaunch& of, int most,
                    cudaStream_t stream) {
  LaunchShapes<kProducts, CloudLoopShape<2, 64>, CloudLoopShape<2, 80>, CloudLoopShape<2, 96>, CloudLoopShape<4, 64>,
               CloudLoopShape<4, 80>, CloudLoopShape<4, 96>>(table, problems, of, most, stream);
}

}  // namespace

CloudLoopLaunch CloudLoopLaunchOf(const Job& job) {
  const int columns = CloudLoopColumns(job), across = columns <= 2 * kCloudLoopColumnsMost ? 2 : 4;
  const int each = static_cast<int>(CeilDiv(columns, 16 * across)) * 16,
            products = static_cast<int>(CeilDiv(job.dim, 16));
  return {across, each < kCloudLoopColumnsLeast ? kCloudLoopColumnsLeast : each, products == 3 ? 4 : products};
}

void LaunchCloudLoop(const LaunchTable& table, int64_t problems, const CloudLoopLaunch& of, int most,
                     cudaStream_t stream) {
  if (problems == 0) return;
  const auto launch = of.products == 1 ? LaunchProducts<1> : of.products == 2 ? LaunchProducts<2> : LaunchProducts<4>;
  launch(table, problems, of, most, stream);
}

}  // namespace cuda
}  // namespace sinkhorn
