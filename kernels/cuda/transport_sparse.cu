// The plan's larger entries, in compressed sparse rows: those of a row are counted, counts become places, entries are
// stored there. Entries are made both times as transport_apply.cu makes the whole plan: to the bit.
//
// A block has kTile rows and some of the columns; each warp collects its own rows', a tile of columns after the other.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_plan.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

constexpr int kWarpRows = kTile / (kThreads / 32);

// What a warp has found of its rows.
struct Found {
  int64_t entries[kWarpRows];
  double mass[kWarpRows];  // Of this lane's.
};

template <typename T>
using PlanTile = T[kTile][kTile + 1];  // [row][column]; 0 outside the plan.

// Of a tile; stored too if `storing`, the first of row r at entries[r].
template <typename T>
__device__ void Collect(const Member& member, const PlanTile<T>& plan, int col0, bool storing, Found* found) {
  const SparseOutput& out = member.job.out.sparse_plan;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int k = 32 * half + lane;
      const T entry = plan[warp * kWarpRows + r][k];
      const bool counts = entry >= out.threshold && entry > 0;
      const unsigned all = __ballot_sync(0xffffffffu, counts);
      if (counts && storing) {
        const int64_t at = member.index * out.max_entries + found->entries[r] + __popc(all & ((1u << lane) - 1));
        out.columns[at] = col0 + k;
        StoreOutput(out.values, at, entry);
      }
      if (counts) found->mass[r] += entry;
      found->entries[r] += __popc(all);
    }
  }
}

template <Source kSource, int kMode>
__global__ void __launch_bounds__(kThreads) SparseKernel(LaunchTable table, bool storing) {
  using TE = ExponentOf<kMode>;
  using T = DensityOf<kMode>;
  __shared__ TileMemory<kSource == Source::kCosts, kMode> memory;
  __shared__ PlanTile<T> plan;
  __shared__ TE terms[2][kTile];  // Rows, columns.
  // 1. Which rows.
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int blocks = OutputParts(job), splits = OutputSplits(job), block = static_cast<int>(work.block % blocks);
  const int split = block % splits, row0 = block / splits * kTile;
  const SplitTiles tiles = TilesOfSplit(job, split);
  const Member member{job, work.block / blocks};
  if (member.state(0)->mode != kMode || !IsSolved(member)) return;
  const TileContext c = MakeTileContext(job, member.index, 0, 0, member.state(0)->epsilon);
  int64_t* offsets = job.out.sparse_plan.row_offsets + member.index * (int64_t{c.rows} + 1);
  if (storing && offsets[c.rows] > job.out.sparse_plan.max_entries) return;
  const int first = row0 + static_cast<int>(threadIdx.x) / 32 * kWarpRows;  // Of this warp.
  int* counts = member.At<int>(job.at.row_counts);
  Found found = {};
  for (int r = 0; r < kWarpRows && storing; ++r) {
    const int i = min(first + r, c.rows - 1);
    found.entries[r] = offsets[i] + counts[i * splits + split];
  }

  // 2. Their entries.
  if (threadIdx.x < kTile) terms[0][threadIdx.x] = PlanTerm<TE>(c, 0, row0 + threadIdx.x);
  for (int col0 = tiles.first * kTile; col0 < tiles.last * kTile; col0 += kTile) {
    __syncthreads();  // The tile before has been read.
    if (threadIdx.x < kTile) terms[1][threadIdx.x] = PlanTerm<TE>(c, 1, col0 + threadIdx.x);
    __syncthreads();
    TE z[4][4];
    MakeTileOf<kSource, kMode>(c, row0, col0, &memory, z);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int row = 4 * c.row_lane + r, column = 4 * c.col_lane + k;
        const bool inside = row0 + row < c.rows && col0 + column < c.columns;
        plan[row][column] = inside ? PlanEntry<T>(z[r][k], terms[0][row], terms[1][column]) : T(0);
      }
    }
    __syncthreads();
    Collect<T>(member, plan, col0, storing, &found);
  }
  if (storing) return;

    // 3. Their numbers and masses.
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
    double mass = found.mass[r];
    for (int lane = 16; lane > 0; lane /= 2) mass += __shfl_xor_sync(0xffffffffu, mass, lane);
    if (threadIdx.x % 32 != 0 || first + r >= c.rows) continue;
    const int64_t at = int64_t{first + r} * splits + split;
    counts[at] = static_cast<int>(found.entries[r]);
    member.At<double>(job.at.row_mass)[at] = mass;
  }
}

// Numbers of entries of rows' parts to the first's place of each row and of what would follow the last, and of each
// part in its row.
__global__ void __launch_bounds__(kThreads) PlacesKernel(LaunchTable table) {
  __shared__ double scratch[kMostWarps];
  __shared__ int64_t sums[kThreads];
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = table.jobs[work.job];
  const Member member{job, work.block};
  if (!IsSolved(member)) return;
  const int rows = job.size[0], splits = OutputSplits(job);
  int* counts = member.At<int>(job.at.row_counts);
  int64_t* offsets = job.out.sparse_plan.row_offsets + member.index * (int64_t{rows} + 1);
  const int64_t each = CeilDiv(rows, kThreads);
  const int64_t begin = min(int64_t{rows}, threadIdx.x * each), end = min(int64_t{rows}, begin + each);
  int64_t sum = 0;
  double mass = 0;
  for (int64_t i = begin * splits; i < end * splits; ++i) {
    sum += counts[i];
    mass += member.At<double>(job.at.row_mass)[i];
  }
  sums[threadIdx.x] = sum;
  mass = BlockSum(mass, scratch);
  __syncthreads();
  int64_t place = 0;
  for (int k = 0; k < static_cast<int>(threadIdx.x); ++k) place += sums[k];
  for (int64_t i = begin; i < end; ++i) {
    int in_row = 0;
    for (int split = 0; split < splits; ++split) {
      const int count = counts[i * splits + split];
      counts[i * splits + split] = in_row;
      in_row += count;
    }
    place += in_row;
    offsets[i + 1] = place;
  }
  if (threadIdx.x != 0) return;
  offsets[0] = 0;
  job.out.sparse_plan.mass[member.index] = mass;
}

template <Source kSource>
void Launch(const LaunchTable& table, int64_t blocks, Mode mode, bool storing, cudaStream_t stream) {
  const auto kernel = mode == kFloat   ? SparseKernel<kSource, kFloat>
                      : mode == kMixed ? SparseKernel<kSource, kMixed>
                                       : SparseKernel<kSource, kDouble>;
  LaunchKernel(kernel, blocks, kThreads, 0, stream, table, storing);
}

}  // namespace

int64_t SparseBlocks(const Job& job) { return OutputParts(job); }

void LaunchSparse(const LaunchTable& table, int64_t blocks, Source source, Mode mode, bool storing,
                  cudaStream_t stream) {
  switch (source) {
    case Source::kProducts:
      return Launch<Source::kProducts>(table, blocks, mode, storing, stream);
    case Source::kDistances:
      return Launch<Source::kDistances>(table, blocks, mode, storing, stream);
    case Source::kCosts:
      return Launch<Source::kCosts>(table, blocks, mode, storing, stream);
    case Source::kExact:
      return;  // On the chip alone.
  }
}

void LaunchSparsePlaces(const LaunchTable& table, int64_t blocks, cudaStream_t stream) {
  LaunchKernel(PlacesKernel, blocks, kThreads, 0, stream, table);
}

}  // namespace cuda
}  // namespace sinkhorn
