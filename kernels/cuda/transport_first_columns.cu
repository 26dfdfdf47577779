// The columns' first half step of FAST clouds whose densities lie in memory from then on (KeepsDensities): those are
// stored as they are summed, and not made once more after the iteration by transport_exponents.cu (Hopper).
//
// A block has columns' points and streams over the rows', as half steps do: a column's sum is its threads' own. Memory
// has rows, so that densities are turned on their way.
//
// Their frame are the rows' new potentials and the columns' initial ones: sums are what columns will move by, and far
// from 1 where epsilon is small. Where one leaves the range that iterations by densities begin in, its block sums as
// other half steps do, and the densities are made after the iteration, by transport_exponents.cu.
#include "kernels/cuda/transport_cloud_step.cuh"
#include "kernels/cuda/transport_stream.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

constexpr int kTurnedRows = 64;  // That are turned at a time, of a warpgroup's 64 columns.
constexpr int kTurnedBytes = kTurnedRows * 64 * static_cast<int>(sizeof(Density));

#if SINKHORN_HOPPER

// Columns move up, rather than down: at potentials of 0 rows give most of their mass to the nearest ones. So densities
// are raised by a power of two; their sums may then be within another of 1, which leaves iterations, whose sums may be
// within 2^60, room to move.
constexpr float kRaised = 24, kLeastFirstSum = 0x1p-36f, kMostFirstSum = 0x1p+36f;

using Rows = Stream<1, Parts::kOne, kGroups>;

// A thread's densities of two rows and column lane / 4, as those of a DensityPair. What the pair's first leaves in its
// second is in another thread: that takes it to be what a number near 2^-7 would leave, so that it may be wrong by a
// quarter of its last digit more.
__device__ inline uint32_t PackTurned(float t0, float t1) {
  constexpr uint32_t kHalf = 0x8000, kLeft = 0x3c00;
  const uint32_t rounding = threadIdx.x / 4 % 2 == 1 ? kHalf - kLeft : kHalf;
  return __byte_perm(__float_as_uint(t0) + rounding, __float_as_uint(t1) + rounding, 0x7632);
}

// A warpgroup's densities on their way to memory: some rows of its 64 columns. Chunks of eight columns are exchanged as
// SwizzledAt says.
class Turning {
 public:
  // `columns`: of memory, the warpgroup's first; `rows`: as many as there are.
  __device__ Turning(char* bytes, Density* columns, int stride, int rows)
      : step_(16 * stride * static_cast<int>(sizeof(Density))) {
    const int lane = threadIdx.x % 32, chunk = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
    const int row = threadIdx.x % 128 / 8, part = threadIdx.x % 8;
    bytes += threadIdx.x / 128 * kTurnedBytes;
    put_ = SharedAddress(bytes) + SwizzledAt(lane / 16 * 8 + lane % 8, chunk, kRowBytes);
    from_ = bytes + SwizzledAt(row, part, kRowBytes);
    to_ = reinterpret_cast<char*>(columns + int64_t{row} * stride + 8 * part);
    left_ = rows - row;
  }
  // Of rows 8 k + 0..15 of those that are turned, and columns lane / 4 + 0, 8 of the warp's 16.
  __device__ void Put(int k, const uint32_t (&densities)[4]) const {
    StoreTransposed(put_ + 8 * k * kRowBytes, densities);
  }
  // All of them, behind those that were stored before.
  __device__ void Store() {
#pragma unroll
    for (int k = 0; k < kTurnedRows / 16; ++k, to_ += step_, left_ -= 16) {
      const uint4 part = *reinterpret_cast<const uint4*>(from_ + 16 * k * kRowBytes);
      if (left_ > 0) *reinterpret_cast<uint4*>(to_) = part;
    }
  }

 private:
  static constexpr int kRowBytes = 64 * static_cast<int>(sizeof(Density));
  const int step_;    // Bytes to the thread's next row, 16 further on.
  uint32_t put_;      // Where its warp's first matrix has the row that it names.
  const char* from_;  // Its part of a row, as turned,
  char* to_;          // and in memory.
  int left_;          // Rows from there on.
};

#endif

__global__ void __launch_bounds__(kCloudThreads, 1) FirstColumnsKernel(LaunchTable table) {
#if SINKHORN_HOPPER
  constexpr int kStages = StagesOf(1, Parts::kOne, kGroups);
  __shared__ CloudContext c;
  alignas(16) __shared__ float2 weighed[SlotsOf(kGroups)][kCloudTile];
  __shared__ float terms[SlotsOf(kGroups)][kCloudTile];
  __shared__ ScaledSum sums[kCloudRows];
  alignas(8) __shared__ uint64_t full[kStages], empty[kStages];
  // 1. Whose columns.
  AllowNextKernel();
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const RowBlock block = FindRowBlock(job, work.block, 1, PassEngines(job, 1), Geometry::kCloud);
  const Member member{job, block.member};
  if (threadIdx.x == 0) {
    Rows::Init(full, empty);
    FillShape(member, block, 1, Pass::kIterate, &c);
  }
  __syncthreads();  // The shape is there.
  AwaitKernelBefore();
  const EngineState* state = member.state(block.engine);
  if (state->mode != kFloat || IsIdle(job, *state, Pass::kIterate)) return;
  if (threadIdx.x == kCloudThreads - 32) FillState(member, &c);  // A warp that copies nothing.
  Rows stream(c, full, empty);
  stream.Begin();
  __syncthreads();  // The context is there.

  // 2. The frame.
  if (block.split == 0 && threadIdx.x < kCloudRows && c.IsRow(threadIdx.x)) {
    const int j = c.first_row + threadIdx.x;
    member.At<double>(job.at.frame[block.engine][1])[j] = c.own_phi[j] + kRaised / c.scale;
  }
  if (block.block == 0) {
    const int last = min(c.last_tile * kCloudTile, c.columns);
    for (int i = c.first_tile * kCloudTile + threadIdx.x; i < last; i += kCloudThreads) {
      member.At<double>(job.at.frame[block.engine][0])[i] = c.phi[i];
    }
  }
  const int row0 = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  float own[2];
  for (int row = 0; row < 2; ++row) {
    const int j = row0 + 8 * row;
    own[row] = c.IsRow(j) ? static_cast<float>((c.own_phi[c.Row(j)] + c.reference) * c.scale + kRaised)
                          : static_cast<float>(kVoid);
  }

  // 3. Densities, tile by tile.
  const int stride = StreamColumns(job, block.engine);
  const int first_column = c.first_row + threadIdx.x / 128 * 64;
  const int first_row = c.first_tile * kCloudTile;
  Density* const densities = member.At<Density>(job.at.exponents[block.engine]) + int64_t{first_row} * stride;
  Turning turning(stream.End(), densities + first_column, stride, first_column < stride ? c.columns - first_row : 0);
  float sum[2] = {0, 0};
  const auto load = [&](int tile) {
    const int i = tile * kCloudTile + threadIdx.x % kCloudTile;
    return i < c.columns ? ColumnTerm{c.phi[i], c.log_weight[i]} : ColumnTerm{kVoid, kVoid};
  };
  const auto store = [&](int slot, const ColumnTerm& of) {
    const double term = of.phi <= kVoid ? kVoid : (of.phi - c.reference) * c.scale;
    weighed[slot][threadIdx.x % kCloudTile] =
        make_float2(static_cast<float>(term), FastExp2(static_cast<float>(of.log_weight)));
  };
  EachTile(c, &stream, load(FirstBrought<Rows>(c)), load, store, [&](float(&acc)[16][4], int slot, int) {
    const float4* mine = reinterpret_cast<const float4*>(weighed[slot]) + threadIdx.x % 4;
#pragma unroll
    for (int first = 0; first < 16; first += kTurnedRows / 8) {
      WaitForTerms();  // Those before have been stored.
#pragma unroll
      for (int k = 0; k < kTurnedRows / 8; k += 2) {
        uint32_t turned[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = e % 2;
          const float4 of = mine[4 * (first + k + e / 2)];
          const float(&products)[4] = acc[first + k + e / 2];
          const float t0 = FastExp2(fmaf(products[2 * row], c.factor, of.x) + own[row]);
          const float t1 = FastExp2(fmaf(products[2 * row + 1], c.factor, of.z) + own[row]);
          sum[row] = fmaf(t1, of.w, fmaf(t0, of.y, sum[row]));
          turned[e] = PackTurned(t0, t1);
        }
        turning.Put(k, turned);
      }
      WaitForTerms();
      turning.Store();
    }
  });

  // 4. What becomes of the columns.
  bool safe = true;
  for (int row = 0; row < 2; ++row) {
    for (int lane = 1; lane <= 2; lane *= 2) sum[row] += __shfl_xor_sync(0xffffffffu, sum[row], lane);
    safe = safe && (!c.IsRow(row0 + 8 * row) || (sum[row] > kLeastFirstSum && sum[row] < kMostFirstSum));
    if (threadIdx.x % 4 == 0) sums[row0 + 8 * row] = {-own[row], sum[row]};
  }
  safe = __syncthreads_and(safe) != 0;
  const Member again{job, c.block.member};  // Registers were short.
  if (threadIdx.x == 0) {
    atomicMax(&again.state(c.block.engine)->kept, safe ? kFirstStored : kFirstRefused);
  }
  if (!safe) {
    ProductCost cost(again, c);
    Running running;
    const float none[2] = {0, 0};
    stream.Begin();
    const ColumnTerm term = c.LoadTerm(FirstBrought<Rows>(c) * kCloudTile + threadIdx.x % kCloudTile);
    SumTiles<Level::kLargest>(c, none, term, terms, &stream, &cost, &running);
    for (int row = 0; row < 2; ++row) {
      const ScaledSum total = running.Total(row);
      if (threadIdx.x % 4 == 0) sums[row0 + 8 * row] = total;
    }
    __syncthreads();
  }
  FinishRows(again, c.block, 1, Pass::kIterate, 0, sums[threadIdx.x % kCloudRows], c.reference * c.scale, c.scale,
             Geometry::kCloud);
#endif
}

}  // namespace

void LaunchFirstColumns(const LaunchTable& table, int64_t blocks, int dim, cudaStream_t stream) {
  const int tile_bytes = kCloudTile * CloudRowBytes(dim), tiles = StreamTiles(1, Parts::kOne, 1, kGroups);
  LaunchOverlapping(FirstColumnsKernel, blocks, kCloudThreads,
                    tiles * tile_bytes + kPlaneAlignment + kGroups * kTurnedBytes, stream, table);
}

}  // namespace cuda
}  // namespace sinkhorn
