// Gradients to the points and projections of clouds whose exponents are kept in memory (transport_exponents.cu), or are
// there in a frame (transport_exact.cu), on Hopper's matrix units. Of more than kDepth coordinates, since fewer take no
// longer to multiply than to read; in frames, of products of doubles, of more than half as many.
//
// A block has kGradientRows rows of a side, up to kAgain parts of kDepth coordinates of the other cloud, and a share of
// its tiles; the blocks of a cluster have the others. Each warp brings the exponents of its own 16 rows through a ring
// of its own, some of a tile's columns to a stage, and makes matrix fragments of them, which are multiplied by the
// tile's points as in transport_gradient.cu. The second side's rows are columns in memory: what a warp reads of them
// lies side by side, in as many of the memory's rows as it wants columns.
#include <type_traits>

#include "kernels/cuda/transport_cloud_stream.cuh"
#include "kernels/cuda/transport_gradient.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_stream.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

// Parts of the coordinates that a block has at most.
__host__ __device__ constexpr int KeptAgainOf(int dim) { return dim <= 2 * kDepth ? 2 : 4; }
__host__ __device__ inline int KeptGroups(const Job& job) {
  return static_cast<int>(CeilDiv(CloudDepths(job.dim), KeptAgainOf(job.dim)));
}
// A tile's parts of the points fit, or one part and some of those to come.
constexpr int PointStages(int planes, int again) { return planes == 1 || again == 4 ? 4 : 3; }

// A warp's ring of exponents, as far as it can be known before: so many columns of the pass to a stage; the bytes from
// one of the memory's rows to the next, of the first side's and of the second's, so that threads meet in no bank.
template <int kPlanes, int kAgain>
struct KeptStages {
  static constexpr bool kShort = kPlanes == 1, kHalves = kShort || kAgain < 4;  // Of a tile; else quarters.
  static constexpr int kColumns = kCloudTile / (kHalves ? 2 : 4);
  static constexpr int kStages = kShort ? 5 : kHalves ? 3 : 4;
  static constexpr int kFirstBytes = kShort ? 144 : kHalves ? 288 : 160, kSecondBytes = kShort ? 48 : 80;
  static constexpr int kStageBytes = kColumns * kSecondBytes;
  static constexpr size_t Bytes() { return kThreads / 32 * kStages * kStageBytes; }
  static_assert(16 * kFirstBytes <= kStageBytes, "room for either");
};

#if SINKHORN_HOPPER

__device__ inline float2 LoadPair(const float* from) { return *reinterpret_cast<const float2*>(from); }
__device__ inline float2 LoadPair(const __half* from) {
  return __half22float2(*reinterpret_cast<const __half2*>(from));
}

__device__ inline float2 LoadPair(const Density* from) {
  float t[2];
  DensityPair::Unpack(*reinterpret_cast<const uint32_t*>(from), t);
  return {__log2f(t[0]), __log2f(t[1])};
}

template <class Stages, typename T>
class KeptRing {
  static constexpr int kNumber = static_cast<int>(sizeof(T)), kChunk = 16 / kNumber;  // Numbers of a copy.

 public:
  // Of rows from `first_row` on, which is the warp's first; `memory`: all warps'.
  __device__ KeptRing(const Member& member, int side, int first_row, const CloudContext& c, char* memory)
      : is_first_(side == 0),
        stride_(StreamColumns(member.job, 0)),
        last_row_(member.job.size[0] - 1),
        ring_(memory + threadIdx.x / 32 * (Stages::kStages * Stages::kStageBytes)),
        next_(c.first_tile * kCloudTile),
        end_(c.last_tile * kCloudTile) {
    const int lane = threadIdx.x % 32, quarter = lane % 4, eighth = lane / 4;
    // Copies: some lanes have one of the memory's rows.
    const int chunks = (is_first_ ? Stages::kColumns : 16) / kChunk, line = lane / chunks, chunk = lane % chunks;
    step_ = 32 / chunks;
    row_ = line + (is_first_ ? first_row : 0);
    from_ = NumbersOf<T>(member, 0) + kChunk * chunk + (is_first_ ? 0 : first_row);
    row_bytes_ = is_first_ ? Stages::kFirstBytes : Stages::kSecondBytes;
    to_ = SharedAddress(ring_) + line * row_bytes_ + 16 * chunk;
    // Reading.
    at_ = is_first_ ? eighth * row_bytes_ + 2 * quarter * kNumber : 2 * quarter * row_bytes_ + 2 * eighth * kNumber;
    for (int stage = 0; stage + 1 < Stages::kStages; ++stage) Copy(stage);
    filling_ = Stages::kStages - 1;
  }
  // From a row of this thread's to its second.
  __device__ static int RowStep(int side) { return side == 0 ? 8 : 1; }
  __device__ static int FirstOfLane(int side) {
    const int eighth = threadIdx.x % 32 / 4;
    return side == 0 ? eighth : 2 * eighth;
  }
  // The next stage's columns, as products of matrices lie.
  __device__ void Next(float (&z)[Stages::kColumns / 8][4]) {
    WaitForCopies<Stages::kStages - 2>();
    __syncwarp();  // It is there, and the stage before has been read.
    Copy(filling_);
    if (++filling_ == Stages::kStages) filling_ = 0;
    const char* const first = ring_ + reading_ * Stages::kStageBytes + at_;
    const char* const second = first + (is_first_ ? 8 : 1) * row_bytes_;
    const int to_next = 8 * (is_first_ ? kNumber : row_bytes_);
#pragma unroll
    for (int j = 0; j < Stages::kColumns / 8; ++j) {
      // Of the first side pairs are of a row, of the second of a column.
      const float2 a = LoadPair(reinterpret_cast<const T*>(first + j * to_next));
      const float2 b = LoadPair(reinterpret_cast<const T*>(second + j * to_next));
      z[j][0] = a.x;
      z[j][1] = is_first_ ? a.y : b.x;
      z[j][2] = is_first_ ? b.x : a.y;
      z[j][3] = b.y;
    }
    if (++reading_ == Stages::kStages) reading_ = 0;
  }

 private:
  // The next stage that is not yet on its way, if there is one.
  __device__ void Copy(int stage) {
    if (next_ < end_) {
      const int row = is_first_ ? row_ : row_ + next_;
      const T* const from = is_first_ ? from_ + next_ : from_;
      const uint32_t to = to_ + stage * Stages::kStageBytes;
#pragma unroll
      for (int k = 0; k < 16 * Stages::kColumns / kChunk / 32; ++k) {
        CopyAsync16(to + k * step_ * row_bytes_, from + int64_t{min(row + k * step_, last_row_)} * stride_);
      }
      next_ += Stages::kColumns;
    }
    CommitCopies();
  }

  const bool is_first_;
  const int stride_, last_row_;  // Of the memory's rows.
  char* const ring_;
  int next_;  // Column.
  const int end_;
  int step_, row_, row_bytes_, at_;
  const T* from_;
  uint32_t to_;
  int filling_ = 0, reading_ = 0;
};

#endif

// T: float, of FAST __half or Density.
template <int kPlanes, int kAgain, typename T>
__global__ void __launch_bounds__(kThreads, 1) KeptGradientKernel(LaunchTable table, Sides sides, int ranks) {
#if SINKHORN_HOPPER
  using Stages = KeptStages<kPlanes, kAgain>;
  constexpr int kStages = PointStages(kPlanes, kAgain), kEights = Stages::kColumns / 8;
  __shared__ CloudContext c;
  __shared__ float terms[2 * kGradientGroups][kCloudTile];
  alignas(8) __shared__ uint64_t full[kStages], empty[kStages];
  using Columns = Stream<kPlanes, Parts::kFew, kGradientGroups, kAgain, false, kStages>;
  // 1. Which rows, which coordinates, which tiles.
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int groups = KeptGroups(job), depths = CloudDepths(job.dim);
  const GradientPlace place = PlaceOf(job, work.block, sides, ranks, groups);
  const Member member{job, place.member};
  const int side = place.side, first_part = depths * place.group / groups;
  const int parts = depths * (place.group + 1) / groups - first_part;
  if (!IsStreamed(job, *member.state(0)) || !HasKeptGradient(job, member.state(0)->mode) || !IsSolved(member)) return;
  if (threadIdx.x == 0) {
    FillShape(member, RowBlock{member.index, 0, place.block, place.rank, ranks}, side, Pass::kMeasure, &c);
    FillState(member, &c);
    Columns::Init(full, empty);
  }
  __syncthreads();
  Columns stream(c, full, empty);
  stream.Begin(first_part, parts);
  const int warp_row = place.block * kGradientRows + threadIdx.x / 32 * 16;
  KeptRing<Stages, T> ring(member, side, warp_row, c, stream.End());
  // 2. What rows and columns add to exponents, beyond their frames.
  const int row0 = warp_row + ring.FirstOfLane(side), row_step = ring.RowStep(side);
  float level[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int i = min(row0 + row_step * row, c.rows - 1);
    level[row] = DensityLevel(c, c.own_phi[i] - BaseOf(member, 0, side, i), member.ratio(0, side)[i]);
  }
  const int group = threadIdx.x / 128, column = threadIdx.x % 128;
  const double* const frame = member.At<double>(job.at.frame[0][1 - side]);
  struct Loaded {
    double phi, frame, log_weight;
  };
  const auto load = [&](int tile) {
    const int j = min(tile * kCloudTile + column, c.columns - 1);
    return Loaded{c.phi[j], frame[j], c.log_weight[j]};
  };
  const auto store = [&](int slot, int tile, const Loaded& of) {
    const bool there = tile * kCloudTile + column < c.columns && of.log_weight > kVoid;
    terms[slot][column] = static_cast<float>(there ? fma(of.phi - of.frame, c.scale, of.log_weight) : kVoid);
  };
  // 3. Sums, tile by tile.
  PointSums<kAgain, kDepth> rows[1] = {};
  float sums[kDepth / 8][4];
  const float whole[2] = {1, 1};
  store(2 * group, c.first_tile, load(c.first_tile));
  for (int tile = c.first_tile, step = 0; tile < c.last_tile; ++tile, ++step) {
    const Loaded next = load(tile + 1);
    WaitForTerms();
    uint32_t high[8][4], low[8][4];
#pragma unroll
    for (int first = 0; first < 8; first += kEights / 2) {
      float z[kEights][4];
      ring.Next(z);
      EachFragment(1.0f, z, terms[2 * group + step % 2] + 16 * first, level, [&](int k, const auto& h, const auto& l) {
#pragma unroll
        for (int e = 0; e < 4; ++e) high[first + k][e] = h[e], low[first + k][e] = l[e];
      });
    }
    store(2 * group + (step + 1) % 2, tile + 1, next);
#pragma unroll
    for (int part = 0; part < kAgain; ++part) {
      if (part >= parts) break;
      AddProducts<kPlanes, kDepth>(high, low, stream.Again(), whole, sums, rows[0].total[part]);
      stream.Release();
    }
  }
  StoreSums(rows, member, side, row0, row_step, first_part, parts, place.rank, ranks);
#endif
}

}  // namespace

int KeptParts(const Job& job) { return KeptAgainOf(job.dim); }

GradientLaunch KeptGradientLaunchOf(const Job& job, int side) { return LaunchOfGroups(job, side, KeptGroups(job), 4); }

int64_t KeptGradientBlocks(const Job& job, const GradientLaunch& launch) {
  return BlocksOfGroups(job, launch, KeptGroups(job));
}

void LaunchKeptGradient(const LaunchTable& table, int64_t blocks, int planes, bool densities, int parts,
                        const GradientLaunch& of, cudaStream_t stream) {
  const auto launch = [&](void (*kernel)(LaunchTable, Sides, int), size_t ring) {
    const size_t points = static_cast<size_t>(PointStages(planes, parts)) * planes * kCloudTile * CloudRowBytes(kDepth);
    const size_t bytes = std::max(points + kPlaneAlignment + ring, PointSumBytes(parts, kDepth));
    LaunchCluster(kernel, blocks, of.ranks, kThreads, bytes, stream, table, of.sides, of.ranks);
  };
  if (planes == 2) {
    return parts == 2 ? launch(KeptGradientKernel<2, 2, float>, KeptStages<2, 2>::Bytes())
                      : launch(KeptGradientKernel<2, 4, float>, KeptStages<2, 4>::Bytes());
  }
  if (densities) {
    return parts == 2 ? launch(KeptGradientKernel<1, 2, Density>, KeptStages<1, 2>::Bytes())
                      : launch(KeptGradientKernel<1, 4, Density>, KeptStages<1, 4>::Bytes());
  }
  parts == 2 ? launch(KeptGradientKernel<1, 2, __half>, KeptStages<1, 2>::Bytes())
             : launch(KeptGradientKernel<1, 4, __half>, KeptStages<1, 4>::Bytes());
}

}  // namespace cuda
}  // namespace sinkhorn
