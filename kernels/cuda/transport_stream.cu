// Large dense problems in float32: an iteration, or the measuring of the end, reads the costs once (Hopper).
//
// A block has a slab of rows, whose costs a ring of bulk copies brings to shared memory ahead of their use; a thread
// owns the same columns of every row. A row's densities T = 2^(z + row term + column term), at the potentials before,
// are made once: their sum gives the row's new potential, and weighted by that they are added to the thread's column
// sums at once. So nothing is read twice, and no maximum is needed: the terms keep densities near the plan's. Where
// they do not, sums leave a safe range and the iteration is left to the passes of transport_half_step.cu, which follow
// in any case and find nothing to do otherwise.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_hopper.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_rows.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

constexpr int kStreamThreads = 512;
constexpr int kColumnsOfQuads = 4 * kStreamThreads;  // A quad a thread.
constexpr size_t kRingBytes = 200 * 1024;
constexpr float kLeastSum = 0x1p-80f, kMostSum = 0x1p+80f;

__device__ inline bool IsSafe(float sum) { return sum > kLeastSum && sum < kMostSum; }

#if SINKHORN_HOPPER

constexpr int kStreamWarps = kStreamThreads / 32;
constexpr int kMostStages = 8;

// Bytes of a stage of the ring: a row.
__device__ inline int RowBytes(const Job& job) { return job.size[1] * static_cast<int>(sizeof(float)); }

// What a block needs to know of its member.
struct Slab {
  int64_t member;
  int index, first, last;  // Rows.
  double reference, scale;
};
__device__ inline Slab SlabOf(const Job& job, int64_t block) {
  const int slabs = StreamSlabs(job), rows = StreamRows(job);
  Slab s;
  s.member = block / slabs;
  s.index = static_cast<int>(block % slabs);
  s.first = s.index * rows;
  s.last = min(job.size[0], s.first + rows);
  return s;
}

// The sum over the block of one value of each thread, in every thread. `parts`: of this row's parity.
__device__ inline float SumOverBlock(float value, float* parts) {
  for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(0xffffffffu, value, lane);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  value = parts[threadIdx.x % kStreamWarps];
  for (int lane = kStreamWarps / 2; lane > 0; lane /= 2) value += __shfl_xor_sync(0xffffffffu, value, lane);
  return value;
}

// What the new potential of a row multiplies its densities by, in one row's weight.
__device__ inline float RowWeight(const Member& member, const EngineState& state, Pass pass, int i, double phi,
                                  double reference, double scale, float term, float sum) {
  const float mass = static_cast<float>(member.mass(0)[i]);
  if (pass == Pass::kMeasure) return mass;
  const double rho = member.job.solver.rho_a;
  if (state.relax == 1 && isinf(rho)) return mass / sum;
  const double lse = log2(static_cast<double>(sum)) - term + reference * scale;
  const double next = HalfStep(phi, lse, scale, 0, state.epsilon, rho, state.relax);
  return mass * FastExp2(static_cast<float>((next + reference) * scale - term));
}

// Rows' sums are where the member's ratios will be.
template <int kQuads>
__device__ void SumSlab(const Member& member, const Slab& s, Pass pass, float (&acc)[kQuads][4]) {
  __shared__ alignas(8) uint64_t full[kMostStages];
  __shared__ float parts[2][kStreamWarps];
  const Job& job = member.job;
  const EngineState& state = *member.state(0);
  const int columns = job.size[1], bytes = RowBytes(job);
  const int stages = min(static_cast<int>(kRingBytes) / bytes, kMostStages);
  const float* costs =
      static_cast<const float*>(job.in.cost.data) + (job.in.cost.shared ? 0 : member.index * job.size[0] * columns);
  const float factor = static_cast<float>(-s.scale);
  const double* phi = member.phi(0, state.parity, 0);
  double* sums = member.ratio(0, 0);
  const auto copy = [&](int row) {
    const int stage = (row - s.first) % stages;
    ArriveExpecting(&full[stage], bytes);
    CopyBulk(SharedAddress(DynamicShared()) + stage * bytes, costs + int64_t{row} * columns, bytes, &full[stage]);
  };
  // 1. Copies begin; the columns' terms.
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) InitBarrier(&full[stage], 1);
    FenceBarriers();
    for (int row = s.first; row < min(s.last, s.first + stages); ++row) copy(row);
  }
  __syncthreads();
  float terms[kQuads][4];
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int j = 4 * (threadIdx.x + kStreamThreads * q) + k;
      terms[q][k] =
          j < columns
              ? static_cast<float>(Term(member.phi(0, state.parity, 1), member.log_mass(1), s.reference, s.scale, j))
              : static_cast<float>(kVoid);
      acc[q][k] = 0;
    }
  }
  // 2. Rows.
  double next_phi = phi[s.first];
  for (int row = s.first; row < s.last; ++row) {
    const double own_phi = next_phi;
    const int stage = (row - s.first) % stages;
    if (row + 1 < s.last) next_phi = phi[row + 1];
    const float term = static_cast<float>((own_phi + s.reference) * s.scale);
    const float4* quads = reinterpret_cast<const float4*>(DynamicShared() + stage * bytes);
    WaitForPhase(&full[stage], (row - s.first) / stages & 1);
    float t[kQuads][4];
    float sum = 0;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const int quad = threadIdx.x + kStreamThreads * q;
      const float4 cost = 4 * quad < columns ? quads[quad] : make_float4(0, 0, 0, 0);
      const float c[4] = {cost.x, cost.y, cost.z, cost.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        t[q][k] = FastExp2(fminf(fmaf(c[k], factor, terms[q][k]) + term, 126.0f));
        sum += t[q][k];
      }
    }
    sum = SumOverBlock(sum, parts[row & 1]);
    // All have read the row.
    if (threadIdx.x == 0) {
      sums[row] = sum;
      if (row + stages < s.last) copy(row + stages);
    }
    const float weight = RowWeight(member, state, pass, row, own_phi, s.reference, s.scale, term, sum);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
#pragma unroll
      for (int k = 0; k < 4; ++k) acc[q][k] = fmaf(t[q][k], weight, acc[q][k]);
    }
  }
}

// What becomes of a slab's rows; whether their sums were safe.
__device__ bool EndSlab(const Member& member, const Slab& s, Pass pass, bool judged) {
  const EngineState& state = *member.state(0);
  const RowBlock block = {member.index, 0, s.index, 0, 1};
  BlockStats stats = {0, 0, 0, 0, 0, 1};
  bool safe = true;
  for (int i = s.first + threadIdx.x; i < s.last; i += kStreamThreads) {
    const float sum = static_cast<float>(member.ratio(0, 0)[i]);
    const float term = static_cast<float>((member.phi(0, state.parity, 0)[i] + s.reference) * s.scale);
    const double lse = log2(static_cast<double>(sum)) - term + s.reference * s.scale;
    safe = safe && IsSafe(sum);
    BlockStats own = {0, 0, 0, 0, 0, 1};
    if (pass == Pass::kIterate) {
      IterateRow(member, block, 0, i, LoadRow(member, block, 0, i, judged), lse, s.scale, judged, &own);
    } else {
      MeasureRow(member, block, 0, i, lse, s.scale, &own);
    }
    stats.error += own.error;
    stats.dual += own.dual;
    stats.plan_mass += own.plan_mass;
    stats.largest = fmax(stats.largest, own.largest);
    stats.terms += own.terms;
    stats.finite = fmin(stats.finite, own.finite);
  }
  if (judged) StoreStats(stats, pass == Pass::kMeasure, member.stats(0, 0) + s.index);
  return safe;
}

#endif

template <int kQuads>
__global__ void __launch_bounds__(kStreamThreads, 1) StreamKernel(LaunchTable table, Pass pass) {
#if SINKHORN_HOPPER
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  Slab s = SlabOf(job, work.block);
  const Member member{job, s.member};
  EngineState* state = member.state(0);
  if (state->mode != kFloat || state->unsafe || (pass == Pass::kIterate && state->stopped)) return;
  s.reference = member.phi(0, state->parity, 1)[0];
  s.scale = kLog2E / state->epsilon;
  float acc[kQuads][4];
  SumSlab<kQuads>(member, s, pass, acc);
  float* out = member.At<float>(job.at.stream_partial) + int64_t{s.index} * job.size[1];
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const int quad = threadIdx.x + kStreamThreads * q;
    if (4 * quad >= job.size[1]) continue;
    reinterpret_cast<float4*>(out)[quad] = make_float4(acc[q][0], acc[q][1], acc[q][2], acc[q][3]);
  }
  __syncthreads();  // The rows' sums are there.
  if (!EndSlab(member, s, pass, pass != Pass::kIterate || job.solver.tolerance > 0)) state->bad = 1;
#endif
}

// Columns: the slabs' sums, and what follows for the engine.
__global__ void __launch_bounds__(kThreads) StreamEndKernel(LaunchTable table, Pass pass) {
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int blocks = static_cast<int>(CeilDiv(job.size[1], kThreads)), slabs = StreamSlabs(job);
  const Member member{job, work.block / blocks};
  const RowBlock block = {member.index, 0, static_cast<int>(work.block % blocks), 0, 1};
  EngineState* state = member.state(0);
  if (state->mode != kFloat || state->unsafe || (pass == Pass::kIterate && state->stopped)) return;
  const bool judged = pass != Pass::kIterate || job.solver.tolerance > 0;
  const int j = block.block * kThreads + threadIdx.x;
  BlockStats stats = {0, 0, 0, 0, 0, 1};
  if (j < job.size[1]) {
    const double scale = kLog2E / state->epsilon, reference = member.phi(0, state->parity, 1)[0];
    const float* parts = member.At<float>(job.at.stream_partial) + j;
    double sum = 0;
    for (int k = 0; k < slabs; ++k) sum += parts[int64_t{k} * job.size[1]];
    const float term =
        static_cast<float>(Term(member.phi(0, state->parity, 1), member.log_mass(1), reference, scale, j));
    const double lse = log2(sum) - term - reference * scale;
    if (!IsSafe(static_cast<float>(sum))) state->bad = 1;
    if (pass == Pass::kIterate) {
      IterateRow(member, block, 1, j, LoadRow(member, block, 1, j, judged), lse, scale, judged, &stats);
    } else {
      MeasureRow(member, block, 1, j, lse, scale, &stats);
    }
  }
  if (judged) StoreStats(stats, pass == Pass::kMeasure, member.stats(0, 1) + block.block);
  unsigned* arrivals = member.At<unsigned>(job.at.arrivals) + job.at.arrival_stride - 1;
  if (!LastToArrive(arrivals, blocks)) return;
  const bool bad = __ldcg(&state->bad) != 0;
  __syncthreads();
  if (bad) {
    if (threadIdx.x == 0) {
      state->bad = 0;
      state->unsafe = 1;
    }
    return;
  }
  if (!judged) {  // Not by MoveState, whose copy of the state would lie in local memory here.
    if (threadIdx.x == 0) EndColumns(job, 0, state, 0);
    return;
  }
  EndPass(member, block, 0, pass, slabs);
  __syncthreads();
  if (pass == Pass::kIterate && state->stopped) return;  // The potentials before were the answer.
  EndPass(member, block, 1, pass, blocks);
}

template <int kQuads>
void Launch(const LaunchTable& table, int64_t blocks, Pass pass, cudaStream_t stream) {
  LaunchKernel(StreamKernel<kQuads>, blocks, kStreamThreads, kRingBytes, stream, table, pass);
}

}  // namespace

int StreamQuads(const Job& job) {
  int quads = 1;
  while (quads * kColumnsOfQuads < job.size[1]) quads *= 2;
  return quads;
}
int64_t StreamEndBlocks(const Job& job) { return job.count * CeilDiv(job.size[1], kThreads); }

void LaunchStream(const LaunchTable& table, int64_t blocks, int quads, Pass pass, cudaStream_t stream) {
  switch (quads) {
    case 1:
      return Launch<1>(table, blocks, pass, stream);
    case 2:
      return Launch<2>(table, blocks, pass, stream);
    case 4:
      return Launch<4>(table, blocks, pass, stream);
    default:
      return Launch<8>(table, blocks, pass, stream);
  }
}
void LaunchStreamEnd(const LaunchTable& table, int64_t blocks, Pass pass, cudaStream_t stream) {
  LaunchKernel(StreamEndKernel, blocks, kThreads, 0, stream, table, pass);
}

}  // namespace cuda
}  // namespace sinkhorn
