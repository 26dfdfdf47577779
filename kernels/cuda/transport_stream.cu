// Problems whose costs, or exponents (transport_exponents.cu), lie in memory, in float32: an iteration, or the
// measuring of the end, reads them once (Hopper).
//
// A block has a slab of rows, which a ring of bulk copies brings to shared memory ahead of their use; a thread owns the
// same columns of every row. A row's densities T = 2^(z + row term + column term), at the potentials before, are made
// once: their sum gives the row's new potential, and weighted by that they are added to the thread's column sums at
// once. So nothing is read twice. The terms keep densities near the plan's; a row whose sum is still far from 1 is
// made again, from shared memory, under its maximum; a column whose sum is far from its mass is read again, in double.
// Symmetric updates weight rows by their mass as they are: a sweep is then both sides' half steps from the same
// densities.
#include <algorithm>
#include <utility>

#include "kernels/cuda/transport_stream_rows.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

template <int kQuads, typename T>
__global__ void __launch_bounds__(GroupsOf(kQuads) * kGroupThreads, 1)
    StreamKernel(LaunchTable table, unsigned engines, Pass pass, bool odd) {
#if SINKHORN_HOPPER
  constexpr int kGroups = GroupsOf(kQuads), kRing = RingBytes(kQuads), kRows = SlabMemory<kGroups>::kRows;
  alignas(8) __shared__ uint64_t full[kGroups][kMostStages];
  __shared__ typename RowRing<T>::Copies copies[kGroups];
  __shared__ SlabMemory<kGroups> memories[kGroups];
  __shared__ StreamFrame frame;  // As all that is for long: registers are short.
  __shared__ RowRule rule;
  __shared__ RowBlock block;
  AllowNextKernel();
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const EnginePart part = FindEnginePart<StreamSlabs>(job, engines, work.block);
  const int engine = part.engine, slab = static_cast<int>(part.block), slab_first = slab * StreamRows(job);
  const int slab_rows = min(EngineSize(job, engine, 0) - slab_first, StreamRows(job));
  const int group = Group::Index(), thread = Group::Thread();
  const bool backwards = pass == Pass::kIterate && job.odd_before != odd;
  const int first = slab_first + slab_rows * group / kGroups, last = slab_first + slab_rows * (group + 1) / kGroups;
  SlabMemory<kGroups>& memory = memories[group];
  // The rows in the order that they are read in: every other iteration finds the last ones before in the cache.
  const auto row_at = [=](int k) { return max(first, backwards ? last - 1 - k : min(first + k, last - 1)); };
  const Member member{job, part.member};
  if (IsIdleAlready(member, engine, pass)) return;
  // 1. Copies begin, of what no kernel changes.
  const int row_numbers = StreamColumns(job, engine);
  RowRing<T> ring(row_numbers, backwards, DynamicShared() + group * kRing, kRing, full[group], &copies[group]);
  if (thread == 0) ring.Begin(NumbersOf<T>(member, engine) + int64_t{first} * row_numbers, last - first);
  AwaitKernelBefore();
  // 2. The columns' and the rows' terms. All that is read is on its way at once.
  StreamColumnsOf<kQuads, T> columns(member.At<float>(job.at.stream_terms[engine]), row_numbers);
  const EngineState& state = *member.state(engine);
  RowSource source = LoadRowSource(member, engine, row_at(thread));
  const bool idle = !IsStreamed(job, state) || IsIdle(job, state, pass);
  if (threadIdx.x == 0) {
    frame = StreamFrameOf(member, state);
    rule = RowRuleOf(member, engine, state, pass);
    block = {member.index, engine, slab, 0, 1};
  }
  __syncthreads();  // They are there.
  if (idle) {
    if (thread == 0) ring.Abandon(last - first);
    return;
  }
  columns.factor = AreCosts(member) ? static_cast<float>(-frame.scale) : 1;
  // 3. Rows.
  const bool judged = pass != Pass::kIterate || job.solver.tolerance > 0;
  if (thread < kRows) memory.stats[thread] = NoStats();
  for (int begin = 0; begin < last - first; begin += kRows) {
    const int rows = min(kRows, last - first - begin), i = row_at(begin + thread);
    const bool mine = thread < rows;
    if (mine) StoreRow(frame, state, source, thread, rule, &memory);
    Group::Wait();
    SumRows(&ring, rows, rule, &memory, &columns);
    source = LoadRowSource(member, block.engine, row_at(begin + kRows + thread));
    if (!mine) continue;
    // Of the row's sum without its own term.
    const double lse =
        LogOf(memory.sums[thread]) + memory.rows[thread].rounding - memory.steps[thread].phi * frame.scale;
    BlockStats own = NoStats();
    if (pass == Pass::kIterate) {
      IterateRow(member, block, 0, i, memory.steps[thread], lse, frame.scale, judged, &own);
    } else {
      MeasureRow(member, block, 0, i, lse, frame.scale, &own);
    }
    memory.stats[thread] = Combine(memory.stats[thread], own);
  }
  // 4. The columns' sums, and what the rows say.
  columns.Store(member.At<float>(job.at.stream_sums[block.engine]) + int64_t{block.block} * row_numbers);
  const BlockStats stats = thread < kRows ? memory.stats[thread] : NoStats();
  if (judged) StoreStats(stats, pass == Pass::kMeasure, member.stats(block.engine, 0) + block.block);
#endif
}

// By a kernel for `of.quads`, one of kQuads.
template <int... kQuads>
void LaunchQuads(std::integer_sequence<int, kQuads...>, const LaunchTable& table, int64_t blocks,
                 const StreamLaunch& of, Pass pass, bool odd, cudaStream_t stream) {
  const auto launch = [&](auto kernel, int quads) {
    if (of.quads != quads) return;
    LaunchOverlapping(kernel, blocks, GroupsOf(quads) * kGroupThreads, kStreamBytes, stream, table, of.engines, pass,
                      odd);
  };
  (launch(of.halves ? StreamKernel<kQuads, __half> : StreamKernel<kQuads, float>, kQuads), ...);
}

}  // namespace

std::vector<StreamLaunch> StreamLaunchesOf(const Job& job) {
  std::vector<StreamLaunch> launches;
  for (int e = 0; e < job.engines; ++e) {
    const int quads = static_cast<int>(CeilDiv(StreamColumns(job, e), kQuadColumns));
    const int of = quads > 12 ? 16 : static_cast<int>(CeilDiv(quads, 2)) * 2;
    auto same = std::find_if(launches.begin(), launches.end(), [of](const StreamLaunch& l) { return l.quads == of; });
    if (same == launches.end()) same = launches.insert(same, {KeepsHalves(job), of, 0});
    same->engines |= 1u << e;
  }
  return launches;
}

int64_t StreamBlocks(const Job& job, const StreamLaunch& of) {
  return job.count * BlocksOf<StreamSlabs>(job, of.engines);
}

void LaunchStream(const LaunchTable& table, int64_t blocks, const StreamLaunch& of, Pass pass, bool odd,
                  cudaStream_t stream) {
  LaunchQuads(std::integer_sequence<int, 2, 4, 6, 8, 10, 12, 16>(), table, blocks, of, pass, odd, stream);
}

}  // namespace cuda
}  // namespace sinkhorn
