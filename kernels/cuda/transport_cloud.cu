// Half steps between clouds in float32: products of split halves on tensor cores, log-sum-exps on the fly.
//
// A coordinate is the sum of two halves (22 bits), and high high + high low + low high is its product with float32's
// accuracy; FAST has one half. A block has kCloudTile rows and streams over tiles of kCloudTile columns, double
// buffered; its eight warps have 32 rows by 64 columns each. Sums are kept under running maxima, which cost little
// beside the exponentials: a thread's 16 columns of a row share one a tile.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_rows.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

constexpr int kDepth = 64;                          // Coordinates of a step.
constexpr int kRowBytes = kDepth * sizeof(__half);  // Of a point in a tile: eight chunks of 16 bytes.
constexpr int kPlaneBytes = kCloudTile * kRowBytes;

// Chunks are exchanged within a row so that eight rows' equal chunks lie in different banks.
__device__ inline int ChunkAt(int row, int chunk) { return row * kRowBytes + ((chunk ^ (row & 7)) * 16); }

// One cloud as the kernel reads it.
struct HalfPoints {
  const __half* data;  // [planes, count, padded]
  int count, padded;
};

// Begins to copy coordinates [first, first + kDepth) of points [point0, point0 + kCloudTile); points beyond the last
// repeat it.
template <int kPlanes>
__device__ void CopyTile(const HalfPoints& points, int point0, int first, char* tile) {
  constexpr int kRowsAtOnce = kThreads / 8;
  const int chunk = threadIdx.x % 8, row0 = threadIdx.x / 8;
  if (first + chunk * 8 >= points.padded) return;
  const __half* from = points.data + first + chunk * 8;
  char* to = tile + ChunkAt(row0, chunk);  // Rows kRowsAtOnce apart exchange chunks alike.
#pragma unroll 1
  for (int row = row0; row < row0 + kCloudTile; row += kRowsAtOnce, to += kRowsAtOnce * kRowBytes) {
    int64_t point = min(point0 + row, points.count - 1);
#pragma unroll 1
    for (int plane = 0; plane < kPlanes; ++plane, point += points.count) {
      CopyAsync16(to + plane * kPlaneBytes, from + point * points.padded);
    }
  }
}

// acc += products of this warp's 32 rows and 64 columns over `steps` steps of 16 coordinates.
template <int kPlanes>
__device__ void MultiplyTiles(const char* rows, const char* columns, int steps, float (&acc)[2][8][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row0 = warp / 2 * 32 + lane % 16, row_chunk = lane / 16;
  const int col0 = warp % 2 * 64 + lane / 16 * 8 + lane % 8, col_chunk = lane / 8 % 2;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    uint32_t a[kPlanes][2][4];
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        LoadMatrices(rows + plane * kPlaneBytes + ChunkAt(row0 + 16 * half, 2 * step + row_chunk), a[plane][half]);
      }
    }
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      uint32_t b[kPlanes][4];
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) {
        LoadMatrices(columns + plane * kPlaneBytes + ChunkAt(col0 + 16 * pair, 2 * step + col_chunk), b[plane]);
      }
      // Small products first.
#pragma unroll
      for (int product = kPlanes == 2 ? 0 : 2; product < 3; ++product) {
        const int pa = product == 1 ? 1 : 0, pb = product == 0 ? 1 : 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int q = 0; q < 2; ++q) {
            MultiplyHalves(a[pa][half], b[pb][2 * q], b[pb][2 * q + 1], acc[half][2 * pair + q]);
          }
        }
      }
    }
  }
}

// Running maxima and sums: eight parts of each row, of two warps of four lanes. In shared memory between tiles, since
// registers are short; each thread has its own.
struct RunningSums {
  float max[8][kCloudTile + 8];  // The pad keeps a warp's parts in different banks.
  float sum[8][kCloudTile + 8];
  static __device__ int Part() { return threadIdx.x / 32 % 2 * 4 + threadIdx.x % 4; }
  // This thread's row 0..3.
  static __device__ int Row(int row) {
    return threadIdx.x / 64 * 32 + row / 2 * 16 + row % 2 * 8 + threadIdx.x % 32 / 4;
  }
};

// Takes the exponents of one tile into this thread's running maxima and sums.
__device__ void AddTile(const float (&acc)[2][8][4], float factor, const float* terms, RunningSums* running) {
  const float2* mine = reinterpret_cast<const float2*>(terms + threadIdx.x / 32 % 2 * 64) + threadIdx.x % 4;
#pragma unroll
  for (int row = 0; row < 4; ++row) {
    const int half = row / 2, k = row % 2;
    float& max = running->max[RunningSums::Part()][RunningSums::Row(row)];
    float& sum = running->sum[RunningSums::Part()][RunningSums::Row(row)];
    const float before = max;
    float e[16];
    float largest = before;
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
      const float2 term = mine[4 * tile];
      e[2 * tile] = fmaf(acc[half][tile][2 * k], factor, term.x);
      e[2 * tile + 1] = fmaf(acc[half][tile][2 * k + 1], factor, term.y);
      largest = fmaxf(largest, fmaxf(e[2 * tile], e[2 * tile + 1]));
    }
    float s0 = sum * FastExp2(before - largest), s1 = 0;
#pragma unroll
    for (int j = 0; j < 16; j += 2) {
      s0 += FastExp2(e[j] - largest);
      s1 += FastExp2(e[j + 1] - largest);
    }
    sum = s0 + s1;
    max = largest;
  }
}

// What a block works on, in shared memory: registers are short.
struct BlockContext {
  RowBlock block;
  HalfPoints x, y;
  const double* phi;  // Of the columns, as the two that follow.
  const double* log_weight;
  double reference, scale;
  float factor;
  int first_tile, last_tile, depths;

  __device__ float Term(int j) const {
    return j < y.count ? static_cast<float>(cuda::Term(phi, log_weight, reference, scale, j))
                       : static_cast<float>(kVoid);
  }
};

// False if there is nothing to do.
__device__ bool MakeContext(const Job& job, int64_t index, int side, Pass pass, BlockContext* c) {
  const RowBlock b = FindRowBlock(job, index, side, job.engines, Geometry::kCloud);
  const Member member{job, b.member};
  const EngineState* state = member.state(b.engine);
  if (state->mode != kFloat || (pass == Pass::kIterate && state->stopped)) return false;
  if (threadIdx.x != 0) return true;
  const auto points_of = [&](int s) {
    const int measure = MeasureOf(b.engine, s);
    return HalfPoints{member.At<__half>(job.at.halves[measure]), job.size[measure], PaddedDim(job)};
  };
  const PassView view = ViewOf(member, b.engine, side, pass);
  c->block = b;
  c->x = points_of(side);
  c->y = points_of(1 - side);
  c->phi = view.phi[1 - side];
  c->log_weight = view.log_weight[1 - side];
  c->reference = c->phi[0];
  c->scale = kLog2E / state->epsilon;
  c->factor = static_cast<float>(2 * job.in.kappa * c->scale / (state->point_scale * state->point_scale));
  const int64_t tiles = CeilDiv(c->y.count, kCloudTile);
  c->first_tile = static_cast<int>(tiles * b.split / b.splits);
  c->last_tile = static_cast<int>(tiles * (b.split + 1) / b.splits);
  c->depths = static_cast<int>(CeilDiv(c->x.padded, kDepth));
  return true;
}

// Where a step's tiles lie: stages hold columns and, if there are several depths, rows.
template <int kPlanes>
struct Stages {
  static constexpr int kTileBytes = kPlanes * kPlaneBytes;
  static __device__ char* Columns(int step) { return DynamicShared() + (1 + step % 2) * kTileBytes; }
  static __device__ char* Rows(int step, bool deep) {
    return DynamicShared() + (deep && step % 2 == 1 ? 3 * kTileBytes : 0);
  }
  // Begins a step's copies: `step` counts depths within tiles.
  static __device__ void Begin(const BlockContext& c, int step, int tile, int depth) {
    if (tile < c.last_tile) {
      CopyTile<kPlanes>(c.y, tile * kCloudTile, depth * kDepth, Columns(step));
      if (c.depths > 1 || step == 0) {
        CopyTile<kPlanes>(c.x, c.block.block * kCloudTile, depth * kDepth, Rows(step, c.depths > 1));
      }
    }
    CommitCopies();
  }
};

template <int kPlanes>
__global__ void __launch_bounds__(kThreads, 2) CloudStepKernel(LaunchTable table, int side, Pass pass) {
  __shared__ float terms[2][kCloudTile];
  __shared__ RunningSums running;
  __shared__ BlockContext c;
  // 1. Whose rows.
  const BlockWork work = FindWork(table, blockIdx.x);
  if (!MakeContext(table.jobs[work.job], work.block, side, pass, &c)) return;
  __syncthreads();  // The context is there.

  // 2. Steps: tiles of columns, and within them depths.
  Stages<kPlanes>::Begin(c, 0, c.first_tile, 0);
  if (threadIdx.x < kCloudTile) terms[0][threadIdx.x] = c.Term(c.first_tile * kCloudTile + threadIdx.x);
  for (int row = 0; row < 4; ++row) {
    running.max[RunningSums::Part()][RunningSums::Row(row)] = static_cast<float>(kVoid);
    running.sum[RunningSums::Part()][RunningSums::Row(row)] = 0;
  }
  for (int tile = c.first_tile, step = 0, parity = 0; tile < c.last_tile; ++tile, parity ^= 1) {
    float acc[2][8][4] = {};
    float next_term = 0;
    if (threadIdx.x < kCloudTile) next_term = c.Term((tile + 1) * kCloudTile + threadIdx.x);
    for (int depth = 0; depth < c.depths; ++depth, ++step) {
      const bool last = depth + 1 == c.depths;
      Stages<kPlanes>::Begin(c, step + 1, last ? tile + 1 : tile, last ? 0 : depth + 1);
      WaitForCopies<1>();
      __syncthreads();  // This step's tiles are full.
      MultiplyTiles<kPlanes>(Stages<kPlanes>::Rows(step, c.depths > 1), Stages<kPlanes>::Columns(step),
                             min(kDepth, c.x.padded - depth * kDepth) / 16, acc);
      __syncthreads();  // They are free to overwrite.
    }
    AddTile(acc, c.factor, terms[parity], &running);
    if (threadIdx.x < kCloudTile) terms[parity ^ 1][threadIdx.x] = next_term;
  }

  // 3. The parts of each row.
  __syncthreads();
  double lse = 0;
  if (threadIdx.x < kCloudTile) {
    float largest = static_cast<float>(kVoid);
    for (int part = 0; part < 8; ++part) largest = fmaxf(largest, running.max[part][threadIdx.x]);
    float total = 0;
    for (int part = 0; part < 8; ++part) {
      total += running.sum[part][threadIdx.x] * FastExp2(running.max[part][threadIdx.x] - largest);
    }
    lse = largest + log2(static_cast<double>(total)) + c.reference * c.scale;
  }
  const Job& job = table.jobs[work.job];
  FinishRows(Member{job, c.block.member}, c.block, side, pass, 0, lse, Geometry::kCloud);
}

}  // namespace

void LaunchCloudStep(const LaunchTable& table, int64_t blocks, int planes, int64_t dim, int side, Pass pass,
                     cudaStream_t stream) {
  const bool deep = dim > kDepth;
  const size_t tiles = deep ? 4 : 3;
  if (planes == 2) {
    return LaunchKernel(CloudStepKernel<2>, blocks, kThreads, tiles * 2 * kPlaneBytes, stream, table, side, pass);
  }
  return LaunchKernel(CloudStepKernel<1>, blocks, kThreads, tiles * kPlaneBytes, stream, table, side, pass);
}

}  // namespace cuda
}  // namespace sinkhorn
