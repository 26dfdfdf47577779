// Gradients to points whose cost is no squared distance of them.
//
//   |x - y|        sum_j P_ij (x_i - y_j) / |x_i - y_j|, nothing of those that coincide: nothing cancels, as it would
//                  in a product, and all is float64, whatever the plan's arithmetic was. Where Hopper's own kernels do
//                  not make them (transport_exact_apply.cu, transport_weights.cu).
//   1 - cos(x, y)  (g - <g, x> x) / |point|, x on the unit sphere and g the gradient there, which the kernels for
//                  squared distances have left in the workspace.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_plan.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

constexpr int kTurnPoints = 64;  // Of a block.

struct DirectionMemory {
  double weight[kTile][kTile + 1];  // [column][row]: P_ij / |x_i - y_j|
  double points[kTile][kTile + 1];  // [column][coordinate]
};

// A thread's rows 4 row_lane + r and coordinates first + 4 col_lane + q.
struct Directions {
  double point[4][4], sum[4][4];

  __device__ void Load(const TileContext& c, const double* points, int row0, int first) {
    for (int r = 0; r < 4; ++r) {
      const int64_t row = min(row0 + 4 * c.row_lane + r, c.rows - 1);
      for (int q = 0; q < 4; ++q) {
        const int k = first + 4 * c.col_lane + q;
        point[r][q] = k < c.dim ? points[row * c.dim + k] : 0;
      }
    }
  }
  __device__ void Add(const TileContext& c, const DirectionMemory& memory) {
    for (int j = 0; j < kTile; ++j) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const double weight = memory.weight[j][4 * c.row_lane + r];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          sum[r][q] = fma(weight, point[r][q] - memory.points[j][4 * c.col_lane + q], sum[r][q]);
        }
      }
    }
  }
};

// The weights of a tile, times `sign`.
__device__ void MakeWeights(const TileContext& c, int row0, int col0, double sign, DirectionMemory* out) {
  __shared__ TileMemory<false, kDouble> memory;
  __shared__ double terms[2][kTile];  // Rows, columns.
  if (threadIdx.x < kTile) {
    terms[0][threadIdx.x] = PlanTerm<double>(c, c.side, row0 + threadIdx.x);
    terms[1][threadIdx.x] = PlanTerm<double>(c, 1 - c.side, col0 + threadIdx.x);
  }
  __syncthreads();
  double z[4][4];
  MakeTileOf<Source::kDistances, kDouble>(c, row0, col0, &memory, z);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int row = 4 * c.row_lane + r, column = 4 * c.col_lane + k;
      const double distance = -z[r][k] / c.scale;
      const double density = PlanEntry<double>(z[r][k], terms[0][row], terms[1][column]);
      out->weight[column][row] = distance > 0 ? sign * density / distance : 0;
    }
  }
}

// A block has kTile rows and a chunk of up to kTile coordinates.
__global__ void __launch_bounds__(kThreads) DirectionsKernel(LaunchTable table, int side) {
  auto* memory = reinterpret_cast<DirectionMemory*>(DynamicShared());
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int chunks = static_cast<int>(CeilDiv(job.dim, kTile)), blocks = RowBlocks(job, 0, side);
  const int first = static_cast<int>(work.block % chunks) * kTile;
  const int row0 = static_cast<int>(work.block / chunks % blocks) * kTile;
  const Member member{job, work.block / chunks / blocks};
  if (!IsSolved(member)) return;
  Directions own = {};
  // Debiased problems have a second term.
  for (int t = 0; t < (job.engines > 1 ? 2 : 1); ++t) {
    const PlanSide plan = PlanSide::Term(side, t);
    const TileContext c =
        MakeTileContext(job, member.index, plan.engine, plan.side, member.state(plan.engine)->epsilon);
    const double* points = member.At<double>(job.at.points64[plan.other]);
    if (t == 0) own.Load(c, member.At<double>(job.at.points64[side]), row0, first);
    for (int col0 = 0; col0 < c.columns; col0 += kTile) {
      __syncthreads();  // The tile before has been read.
      MakeWeights(c, row0, col0, t == 0 ? 1 : -1, memory);
      for (int e = threadIdx.x; e < kTile * kTile; e += kThreads) {
        const int64_t j = min(col0 + e / kTile, c.columns - 1);
        const int k = first + e % kTile;
        memory->points[e / kTile][e % kTile] = k < c.dim ? points[j * c.dim + k] : 0;
      }
      __syncthreads();
      own.Add(c, *memory);
    }
  }
  const int row_lane = threadIdx.x / 16, col_lane = threadIdx.x % 16;
  for (int r = 0; r < 4; ++r) {
    for (int q = 0; q < 4; ++q) {
      const int i = row0 + 4 * row_lane + r, k = first + 4 * col_lane + q;
      if (i < job.size[side] && k < job.dim) StoreGradient(member, side, i, k, own.sum[r][q]);
    }
  }
}

__host__ __device__ int64_t TurnBlocksOf(const Job& job, int side) {
  return IsCosine(job) && GradientOf(job, side).data != nullptr ? CeilDiv(job.size[side], kTurnPoints) : 0;
}

// A warp a point.
__device__ void Turn(const Member& member, int side, int64_t i) {
  const Job& job = member.job;
  const double* centred = member.At<double>(job.at.points64[side]) + i * job.dim;
  const double* centre = member.At<double>(job.at.centre[side]);
  const double* gradient = member.At<double>(job.at.gradient[side]) + i * job.dim;
  double along = 0;
  for (int k = threadIdx.x % 32; k < job.dim; k += 32) along += gradient[k] * (centred[k] + centre[k]);
  for (int lane = 16; lane > 0; lane /= 2) along += __shfl_xor_sync(0xffffffffu, along, lane);
  const double length = member.At<double>(job.at.length[side])[i];
  const int64_t at = (member.index * job.size[side] + i) * job.dim;
  for (int k = threadIdx.x % 32; k < job.dim; k += 32) {
    StoreOutput(GradientOf(job, side), at + k, (gradient[k] - along * (centred[k] + centre[k])) / length);
  }
}

__global__ void __launch_bounds__(kThreads) TurnKernel(LaunchTable table) {
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int64_t blocks[2] = {TurnBlocksOf(job, 0), TurnBlocksOf(job, 1)};
  const Member member{job, work.block / (blocks[0] + blocks[1])};
  if (!IsSolved(member)) return;
  const int64_t block = work.block % (blocks[0] + blocks[1]);
  const int side = block < blocks[0] ? 0 : 1;
  const int64_t first = (side == 0 ? block : block - blocks[0]) * kTurnPoints;
  const int64_t last = min(int64_t{job.size[side]}, first + kTurnPoints);
  for (int64_t i = first + threadIdx.x / 32; i < last; i += kThreads / 32) Turn(member, side, i);
}

}  // namespace

int64_t DirectionBlocks(const Job& job, int side) {
  if (SourceOf(job) != Source::kDistances || GradientOf(job, side).data == nullptr) return 0;
  if (GivesDirections(job, side)) return 0;
  return RowBlocks(job, 0, side) * CeilDiv(job.dim, kTile);
}
void LaunchDirections(const LaunchTable& table, int64_t blocks, int side, cudaStream_t stream) {
  LaunchKernel(DirectionsKernel, blocks, kThreads, sizeof(DirectionMemory), stream, table, side);
}

int64_t TurnBlocks(const Job& job) { return TurnBlocksOf(job, 0) + TurnBlocksOf(job, 1); }
void LaunchTurn(const LaunchTable& table, int64_t blocks, cudaStream_t stream) {
  LaunchKernel(TurnKernel, blocks, kThreads, 0, stream, table);
}

}  // namespace cuda
}  // namespace sinkhorn
