// A problem in the registers of a block, or of a cluster of blocks: how its densities lie there, and what blocks have
// in shared memory.
//
// A block has kBlockRows rows and all columns; a warp has rows of its own (those that a warpgroup's products give it,
// where there is one), a lane kWidth columns side by side of each 32 kWidth.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_MEMORY_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_MEMORY_CUH_

#include "kernels/cuda/transport_cloud.cuh"

namespace sinkhorn {
namespace cuda {

// How the densities of up to 64 kTiles columns lie in a block.
template <int kTiles>
struct Shape {
  static constexpr int kWarps = kTiles == 1 ? 2 : kTiles == 2 ? 4 : 8, kBlockThreads = 32 * kWarps;
  static constexpr int kBlocksPerSm = kTiles == 1 ? 6 : kTiles == 2 ? 2 : 1;
  static constexpr bool kCluster = kTiles > 2;
  static constexpr int kMost = kTiles * kTile;  // Columns.
  static constexpr int kBlockRows = kTiles == 2 || kTiles == 4 ? 2 * kTile : kTile;
  static constexpr int kRows = kBlockRows / kWarps, kColumns = kMost / 32;  // Of a warp; of a lane.
  static constexpr int kWidth = kColumns < 4 ? kColumns : 4;
  static constexpr int kGroups = kColumns / kWidth;          // Of kWidth columns.
  static constexpr int kHeld = kTiles == 16 ? 2 : 0;         // Rows of a warp that lie in shared memory.
  static constexpr int kOwn = kMost / kBlockThreads;         // Columns of a thread where threads share them out.
  static constexpr bool kShared = !kCluster || kTiles == 4;  // All blocks look after all columns.
  static constexpr bool kSplit = kCluster && !kShared;       // Sums travel in two halves of the columns.
  static constexpr int kOwnedMost = kShared ? kMost : kMost / 4;
  // Sums that a block hears: of its columns, from all blocks, which may be nearly twice as many as those that own some.
  static constexpr int kHeard = kSplit ? 2 * kMost : kCluster ? kMost : 1;
  static constexpr int kChunk = 32 * kWidth;  // Columns whose exponents are made together.
  // Groups that iterations go through whatever columns there are: the last quarter may be left out, where it is long.
  static constexpr int kSure = kTiles == 16 ? kGroups * 3 / 4 : kGroups;
  // Products by warpgroups: each has 64 rows a pass, and all columns of a chunk or, where two have the same rows, half.
  static constexpr int kWarpgroups = kWarps / 4;
  static constexpr bool kPaired = kWarpgroups * 64 > kBlockRows;
  static constexpr int kPasses = kWarpgroups == 0 || kPaired ? 1 : kBlockRows / (64 * kWarpgroups);
};

template <int kSize>
struct SideMemory {
  double phi[kSize], shift[kSize];
  float log_mass[kSize], mass[kSize];  // log2 of the mass, and log_size.
  float frame[kSize];                  // phi in units of epsilon, base 2, seen from `reference`; see MoveRow, too.
  float scaling[2][kSize];             // By parity: u
  float weight[2][kSize];              // mass * scaling
};

// A plane of some columns' halves, whose copy is number `step`.
struct PlaneOfChunk {
  unsigned step;
  int g, depth, plane;
};

template <Source kSource, typename S>
struct OnChipMemory {
  static constexpr bool kHasPoints = kSource == Source::kProducts || kSource == Source::kDistances;
  static constexpr int kStageRow = S::kChunk + (S::kWarpgroups > 0 ? 8 : 4);  // Rows begin in banks of their own.
  static constexpr int kStage = kHasPoints ? 8 * kStageRow : 1;               // Floats: 8 rows of a chunk.
  static constexpr int kPlane = kHasPoints ? S::kChunk * 2 * kDepth : 8;      // Bytes: a half of a chunk's points.
  static constexpr int kRowPlane = kSource == Source::kProducts && S::kWarpgroups > 0 ? S::kBlockRows * 2 * kDepth : 8;
  static constexpr int kAlignment = kRowPlane > 8 ? kPlaneAlignment : 16;
  // Of a chunk's planes: two, which are multiplied together, and the next two if there are more.
  static constexpr int kBuffers = kRowPlane == 8 || S::kGroups == 1 ? 2 : 4;
  // Where room is short, what is gathered lies where points did, which iterations need no more.
  static constexpr bool kGathersInPoints = kHasPoints && S::kHeld > 0;
  // Halves of points: of chunks, planes at a time, and of the rows.
  alignas(kAlignment) char points[kBuffers][kPlane];
  alignas(kAlignment) char row_points[2 * kRowPlane];
  SideMemory<S::kBlockRows> rows;
  // Of all columns:
  double phi[S::kMost];
  alignas(16) float weight[2][S::kMost];
  alignas(16) float frame[S::kMost];  // While iterations are done by log-sum-exps: what columns add to exponents.
  float log_mass[S::kMost], mass[S::kMost];  // As of rows.
  // Of those that this block owns:
  double shift[S::kOwnedMost];
  float scaling[2][S::kOwnedMost];
  float sums[2][S::kOwnedMost];  // That led to those.
  // Parts of column sums, a line a warp; while densities are made, products on their way.
  union {
    alignas(16) float parts[S::kWarps][S::kMost];
    alignas(16) float stage[S::kWarps][kStage];
  };
  alignas(16) float held[S::kHeld > 0 ? S::kHeld* S::kGroups* S::kWidth : 1][S::kHeld > 0 ? S::kBlockThreads : 1];
  alignas(16) float gathered[2][kGathersInPoints ? 1 : S::kHeard];
  double errors[S::kWarps], column_errors[S::kWarps], gathered_error[2][kOnChipRanksMost];
  // Barriers.
  uint64_t gathering[2], spreading[2][2];  // By turns; by halves of the blocks whose columns come.
  uint64_t copied[kBuffers], rows_copied;  // Of points, of row_points.
  PlaneOfChunk next_copy;
  // Where a warpgroup's rows and columns are, of the larger halves and of the first buffer (MatrixAt).
  struct {
    uint64_t rows, columns;
  } matrices[S::kWarpgroups > 0 ? S::kWarpgroups : 1];
  EngineState state[2];
  int last;     // The iteration that this launch ends after.
  int discard;  // The residual says that the solve was finished before this iteration.
  int unsafe;   // Sums of P at the end are no use.
  double reference;
  // From entries, or from exact exponents in memory, to those of this epsilon, before frames are added; the same where
  // `scale`, or epsilon, is 1.
  std::conditional_t<kSource == Source::kExact, double, float> factor;
  double unit;
  float said;   // By this block's threads: AnyInCluster.
  float voids;  // Whether this block has rows without mass.
  double scale, epsilon, rho[2], damping[2];
  // About log2 of the number of points, from which masses' logarithms are seen: those of equal ones have no digits that
  // a float would lack, of which large epsilons would leave something in all potentials.
  double log_size[2];
  int64_t index;  // Of the member.
  int engine;
  bool symmetric;  // Both sides move from where both were.
  // Of the problem's blocks: which this is, how many there are, for how many there is room in what is gathered; how
  // many of them, the first ones, own columns, and how many each of those owns (a power of two); this block's first,
  // their number, and bytes that it hears of them.
  int rank, ranks, slots, owners, owned, owned_log2, first_own, own, heard_bytes;
  // Clouds as halves (transport_cloud.cuh), by side.
  int planes, depths, row_bytes;
  const char* halves[2];

  __device__ float* Gathered(int buffer) {
    static_assert(!kGathersInPoints || S::kHeard * sizeof(float) <= kPlane, "room");
    return kGathersInPoints ? reinterpret_cast<float*>(points[buffer]) : gathered[buffer];
  }
};

// Dynamic shared memory of a block, with room to align it.
template <Source kSource, typename S>
constexpr size_t OnChipBytes() {
  return sizeof(OnChipMemory<kSource, S>) + alignof(OnChipMemory<kSource, S>);
}

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_MEMORY_CUH_
