// The bent plan's sums and products (transport_hessian_bend.cu) on Hopper's matrix units: clouds in float32 of up to
// kDepth coordinates.
//
// A block has kMatrixRows rows and a share of the other cloud's tiles (transport_hessian_matrix.cuh); the blocks of a
// cluster have the others.
#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_cluster.cuh"
#include "kernels/cuda/transport_hessian_matrix.cuh"
#include "kernels/cuda/transport_hopper.cuh"
#include "kernels/cuda/transport_launch.h"

namespace sinkhorn {
namespace cuda {
namespace {

constexpr int kMatrixRows = 128;  // Two warpgroups of 64.
constexpr int kMatrixTiles = 6;   // In shared memory: the rows' points and steps, and two tiles' of the columns.
constexpr int kMatrixRanksMost = 8;

__host__ __device__ inline int64_t MatrixRows(const Job& job, int measure) {
  return CeilDiv(job.size[measure], kMatrixRows);
}
// Of a member; `store`: products, of what is wanted.
__host__ __device__ inline int64_t BlocksOf(const Job& job, int engine, int side, bool store) {
  const int measure = MeasureOf(engine, side);
  const bool wanted = store ? engine == 0 && ProductOf(job, measure).data != nullptr : HasProducts(job, engine);
  return wanted ? MatrixRows(job, measure) * job.in.hessian.count : 0;
}
__host__ __device__ inline int64_t AllBlocks(const Job& job, bool store) {
  int64_t blocks = 0;
  for (int e = 0; e < job.engines; ++e) blocks += BlocksOf(job, e, 0, store) + BlocksOf(job, e, 1, store);
  return blocks;
}

#if SINKHORN_HOPPER

// Which engine's rows, of which direction.
struct MatrixWork {
  int64_t member, q;
  int engine, side, block;
};
__device__ inline MatrixWork FindMatrixWork(const Job& job, int64_t index, bool store) {
  const int64_t blocks = AllBlocks(job, store), count = job.in.hessian.count;
  MatrixWork work = {index / blocks, 0, 0, 0, 0};
  int64_t rest = index % blocks;
  for (; rest >= BlocksOf(job, work.engine, work.side, store); work.engine += work.side, work.side ^= 1) {
    rest -= BlocksOf(job, work.engine, work.side, store);
  }
  work.q = rest % count;
  work.block = static_cast<int>(rest / count);
  return work;
}

// By all threads, before a pass over an engine.
template <int kPlanes>
__device__ inline void BeginPass(const Member& member, const RowBlock& rows, int side, CloudContext* c,
                                 ProductVectors* v, uint64_t (&full)[2]) {
  __syncthreads();  // The pass before is over.
  if (threadIdx.x == 0) {
    FillShape(member, rows, side, Pass::kMeasure, c);
    FillState(member, c);
    *v = VectorsOf(member, rows.engine);
    InitBarrier(&full[0], 1);
    InitBarrier(&full[1], 1);
    FenceBarriers();
  }
  __syncthreads();
}

// The sum over the cluster of entry e of each of its blocks' threads; the threads of block `rank` see its share:
// store(e, sum). All threads of the cluster call it.
template <int kEntries, typename Entry, typename Store>
__device__ void CombineRanks(int rank, int ranks, Entry entry, Store store) {
  float* mine = reinterpret_cast<float*>(DynamicShared()) + threadIdx.x;
  __syncthreads();  // The last tile has been read.
#pragma unroll
  for (int e = 0; e < kEntries; ++e) mine[e * kThreads] = entry(e);
  SyncCluster();
  for (int e = rank; e < kEntries; e += ranks) {
    float sum = 0;
    for (int k = 0; k < ranks; ++k) sum += LoadRemote(mine + e * kThreads, k);
    store(e, sum);
  }
  SyncCluster();
}

// A scale by which bent entries of densities up to 1 are at most 1: |D| <= 2 kappa (|dx| |y| + |x| |dy|).
__device__ inline double BentScale(const Member& member, const ProductVectors& v, int64_t q) {
  const Job& job = member.job;
  const double points = 64 / member.state(0)->point_scale, steps = 64 / StepScales(member)[q] * sqrt(1.0 * job.dim);
  const double bound = 4 * job.in.kappa * points * steps + v.states[q].largest;
  return bound > 0 && isfinite(bound) ? ldexp(1.0, -1 - ilogb(bound)) : 1;
}

#endif

// ---- Setup --------------------------------------------------------------------------------------------------------

template <int kPlanes, int kColumns>
__global__ void __launch_bounds__(kThreads, 1) MatrixSetupKernel(LaunchTable table, int ranks) {
#if SINKHORN_HOPPER
  __shared__ CloudContext c;
  __shared__ ProductVectors v;
  alignas(16) __shared__ ColumnNumbers numbers;
  alignas(8) __shared__ uint64_t full[2];
  const BlockWork found = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[found.job]);
  const int rank = static_cast<int>(found.block % ranks);
  const MatrixWork work = FindMatrixWork(job, found.block / ranks, false);
  const Member member{job, work.member};
  if (member.state(work.engine)->mode != kFloat) return;
  BeginPass<kPlanes>(member, RowBlock{work.member, work.engine, work.block, rank, ranks}, work.side, &c, &v, full);
  const bool squared = work.side == 1 && work.q == 0;
  float sums[2][2] = {};  // [sum, squares][row]
  Bends<kPlanes, kColumns> bends(member, c, v, work.side, work.q, squared, false, numbers, full);
  bends.ForEachTile(
      [&](const float(&p)[16][4], const float(&w)[16][4], const float(&of_columns)[3][kCloudTile], uint32_t, uint32_t) {
        float tile[2][2] = {};
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          const float2 weight = reinterpret_cast<const float2*>(of_columns[2])[threadIdx.x % 4 + 4 * j];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            tile[0][e / 2] += w[j][e];
            tile[1][e / 2] = fmaf(p[j][e] * (e % 2 == 0 ? weight.x : weight.y), p[j][e], tile[1][e / 2]);
          }
        }
        for (int e = 0; e < 4; ++e) sums[e / 2][e % 2] += tile[e / 2][e % 2];
      });
  for (int lane = 1; lane <= 2; lane *= 2) {
    for (int e = 0; e < 4; ++e) sums[e / 2][e % 2] += __shfl_xor_sync(0xffffffffu, sums[e / 2][e % 2], lane);
  }
  const int row0 = work.block * kMatrixRows + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  CombineRanks<4>(
      rank, ranks, [&](int e) { return e < 2 ? sums[0][e % 2] : sums[1][e % 2]; },
      [&](int e, float sum) {
        const int64_t i = row0 + 8 * (e % 2);
        if (threadIdx.x % 4 != 0 || i >= c.rows) return;
        const double mass = e % 2 == 0 ? bends.mass[0] : bends.mass[1];
        if (e < 2) StoreRight(v, work.side, work.q, i, mass > 0 ? mass * sum : 0);
        if (e >= 2 && squared) StoreCondition(job, v, i, mass > 0 ? mass * sum * mass : 0);
      });
#endif
}

// ---- Products -----------------------------------------------------------------------------------------------------

template <int kPlanes, int kColumns>
__global__ void __launch_bounds__(kThreads, 1) MatrixStoreKernel(LaunchTable table, int ranks) {
#if SINKHORN_HOPPER
  __shared__ CloudContext c;
  __shared__ ProductVectors v[2];  // Of the plans that products are made of.
  alignas(16) __shared__ ColumnNumbers numbers;
  alignas(8) __shared__ uint64_t full[2][2];
  const BlockWork found = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[found.job]);
  const int rank = static_cast<int>(found.block % ranks);
  const MatrixWork work = FindMatrixWork(job, found.block / ranks, true);
  const Member member{job, work.member};
  const int side = work.side;
  if (member.state(0)->mode != kFloat || !AreDone(member)) return;
  const double epsilon = job.solver.epsilon, step_scale = StepScales(member)[work.q];
  const double unscale = exp2(-static_cast<double>(kDensityBits));
  float total[kColumns / 8][4] = {};
  // Debiased problems have a second term.
  const int terms = job.engines > 1 && HasProducts(job, 1 + side) ? 2 : 1;
#pragma unroll 1
  for (int t = 0; t < terms; ++t) {
    const PlanSide plan = PlanSide::Term(side, t);
    BeginPass<kPlanes>(member, RowBlock{work.member, plan.engine, work.block, rank, ranks}, plan.side, &c, &v[t],
                       full[t]);
    Bends<kPlanes, kColumns> bends(member, c, v[t], plan.side, work.q, false, true, numbers, full[t]);
    const double bent_scale = BentScale(member, v[t], work.q), sign = t == 0 ? 1 : -1;
    float bent_weight[2], weight[2];
    for (int row = 0; row < 2; ++row) {
      const double all = sign * bends.mass[row] * unscale;
      bent_weight[row] = static_cast<float>(all / (epsilon * bent_scale * member.state(0)->point_scale));
      weight[row] = static_cast<float>(-all / step_scale);
    }
    const float scale = exp2f(kDensityBits), scale_of_bent = static_cast<float>(bent_scale * exp2f(kDensityBits));
    bends.ForEachTile([&](const float(&p)[16][4], const float(&w)[16][4], const float(&)[3][kCloudTile],
                          uint32_t points, uint32_t steps) {
      AddMatrix<kPlanes, kColumns>(w, scale_of_bent, points, bent_weight, total);
      AddMatrix<kPlanes, kColumns>(p, scale, steps, weight, total);
    });
  }
  const int row0 = work.block * kMatrixRows + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const Steps own = StepsOf(member, side, work.q);
  CombineRanks<kColumns / 2>(
      rank, ranks, [&](int e) { return total[e / 4][e % 4]; },
      [&](int e, float sum) {
        const int64_t i = row0 + 8 * (e % 4 / 2);
        const int k = e / 4 * 8 + threadIdx.x % 4 * 2 + e % 2;
        if (i >= job.size[side] || k >= job.dim) return;
        const double step = own.data != nullptr ? own.At<double>(i * job.dim + k) : 0;
        double product = sum + ProductOfRow(member, v[0], 0, side, work.q, i, k, step);
        if (terms > 1) product -= ProductOfRow(member, v[1], 1 + side, 0, work.q, i, k, step);
        StoreProduct(member, side, work.q, i, k, 2 * job.in.kappa * product);
      });
#endif
}

// [planes - 1][16, 32 or 64 coordinates]
using Kernels = void (*const[2][3])(LaunchTable, int);
constexpr Kernels kSetup = {{MatrixSetupKernel<1, 16>, MatrixSetupKernel<1, 32>, MatrixSetupKernel<1, 64>},
                            {MatrixSetupKernel<2, 16>, MatrixSetupKernel<2, 32>, MatrixSetupKernel<2, 64>}};
constexpr Kernels kStore = {{MatrixStoreKernel<1, 16>, MatrixStoreKernel<1, 32>, MatrixStoreKernel<1, 64>},
                            {MatrixStoreKernel<2, 16>, MatrixStoreKernel<2, 32>, MatrixStoreKernel<2, 64>}};

void Launch(const Kernels& kernels, const LaunchTable& table, int64_t blocks, int planes, int dim, int ranks,
            cudaStream_t stream) {
  const int row_bytes = CloudRowBytes(dim), width = row_bytes == 32 ? 0 : row_bytes == 64 ? 1 : 2;
  const size_t tile = static_cast<size_t>(planes) * kCloudTile * row_bytes;
  LaunchCluster(kernels[planes - 1][width], blocks, ranks, kThreads, kMatrixTiles * tile + kPlaneAlignment, stream,
                table, ranks);
}

}  // namespace

bool HasMatrixKernel(const Job& job, Mode mode) { return job.hopper && mode == kFloat && MayHaveStepHalves(job); }

int MatrixRanks(const Job& job) {
  // What a block has to do beside its tiles takes as long as so many of them.
  constexpr int64_t kBeside = 4;
  const int64_t blocks = AllBlocks(job, false), tiles = CeilDiv(std::max(job.size[0], job.size[1]), kCloudTile);
  int best = 1;
  int64_t least = 0;
  for (int ranks = 1; ranks <= kMatrixRanksMost && (ranks == 1 || 2 * ranks <= tiles); ranks *= 2) {
    // Waves of blocks on an H200.
    const int64_t time = CeilDiv(blocks * ranks, ranks > 2 ? 128 : 132) * (CeilDiv(tiles, ranks) + kBeside);
    if (ranks > 1 && time >= least) continue;
    least = time;
    best = ranks;
  }
  return best;
}

int64_t MatrixSetupBlocks(const Job& job) { return AllBlocks(job, false) * MatrixRanks(job); }
int64_t MatrixStoreBlocks(const Job& job) { return AllBlocks(job, true) * MatrixRanks(job); }

void LaunchMatrixSetup(const LaunchTable& table, int64_t blocks, int planes, int dim, int ranks, cudaStream_t stream) {
  Launch(kSetup, table, blocks, planes, dim, ranks, stream);
}
void LaunchMatrixStore(const LaunchTable& table, int64_t blocks, int planes, int dim, int ranks, cudaStream_t stream) {
  Launch(kStore, table, blocks, planes, dim, ranks, stream);
}

}  // namespace cuda
}  // namespace sinkhorn
