// The normalisation kernels as their launcher sees them.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_KERNELS_H_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/normalization_task.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

// What a kernel does of a plain problem. kImplicit: IMPLICIT or IMPLICIT_UNIT.
enum class Work { kForward, kUnrolled, kImplicit };
// How its iterations begin: with a step of rows; with a softmax, which is one; with a step of columns, and so end with
// one of rows.
enum class Lead { kRows, kSoftmax, kColumns };

// ---- Any problem: a block per member, or a team of them, float64 ----------------------------------------------------
constexpr int kDenseColumns = 128;  // EXACT: Newton steps by elimination up to here, by conjugate gradients beyond.
// Of a multiprocessor at a time, of any that there are kernels for.
constexpr int kGeneralThreadsAtOnce = 512;
// Workspace of a member under way, by `ranks` blocks.
int64_t GeneralSlotBytes(const Task& task, int ranks);
// `threads`, a multiple of 32 up to 512, and `ranks`, blocks of a member: the same for the same shape. Of teams all
// `blocks` begin at once, or none: no more than the device has room for.
cudaError_t LaunchGeneral(const LaunchOf& launch, int ranks, int blocks, int threads, cudaStream_t stream);

// ---- Sides from 33 to 1,024, or more rows of few columns, float32 ---------------------------------------------------
// How a member is solved on the chip.
struct MemberPlan {
  int size = 0, ranks = 1;                   // Of the kernel's instance; blocks of a member.
  int64_t at_a_time = 0;                     // Members; 0: the device cannot.
  int64_t shared_bytes = 0, slot_bytes = 0;  // Of a block.
};

constexpr int kStreamSide = 1024, kTallColumns = 256, kTallRows = 4096;
// What a block can solve. What does not fit into its memory is read in each iteration.
constexpr bool IsStreamSize(int rows, int cols) {
  return cols <= kStreamSide && rows <= (cols <= kTallColumns ? kTallRows : kStreamSide);
}
// Sizes of matrix that there are kernels for: sides of 64, 128, 256, 512 and 1,024; and 64, 128 and 256 columns of any
// rows.
constexpr int StreamIndex(int side) { return side <= 64 ? 0 : side <= 128 ? 1 : side <= 256 ? 2 : side <= 512 ? 3 : 4; }
constexpr int kTallIndex = 5;  // Of the first of those.
constexpr int StreamIndex(int rows, int cols) {
  const bool tall = cols <= kTallColumns && rows > (cols <= 64 ? 128 : 256);
  return tall ? kTallIndex + StreamIndex(cols) : StreamIndex(rows > cols ? rows : cols);
}
constexpr int kStreamBlocks[] = {5, 1, 1, 1, 1, 1, 1, 1};  // Of a multiprocessor at a time.
int64_t StreamSlotBytes(int size, const Task& task);
int64_t StreamSharedBytes(int size, int64_t rows);

// And by clusters of blocks that hold it (Hopper): 64, 128, 256, 512 and 1,024 columns, of so many entries a block.
constexpr int kSpreadIndex = 8;  // Of the first of those.
constexpr int kSpreadArea = 65536, kSpreadRanks = 16;
// From so many rows on, as measured: below, a block alone is faster, or does more where there are many.
constexpr int kSpreadLeastRows[] = {1537, 769, 257, 193, 97};
constexpr bool IsSpreadSize(int rows, int cols) {
  return cols <= kStreamSide && rows >= kSpreadLeastRows[StreamIndex(cols)] &&
         rows <= kSpreadRanks * (kSpreadArea / (64 << StreamIndex(cols)));
}
// Their blocks: numbers that processors of a Hopper device, which come in groups of 16 or 18, are shared by well.
constexpr int SpreadRanks(int rows, int cols) {
  const int least = (rows * (64 << StreamIndex(cols)) + kSpreadArea - 1) / kSpreadArea;
  return least <= 5 ? least : least <= 8 ? 8 : kSpreadRanks;
}
// The device is asked once for each size.
MemberPlan SpreadPlanOf(int device, int multiprocessors, const Task& task);

// `shared_bytes`: the largest of all tasks. `blocks`: a multiple of `ranks`.
cudaError_t LaunchStream(int size, int ranks, const LaunchOf& launch, int blocks, int64_t shared_bytes,
                         cudaStream_t stream);

// ---- Plain recipes, sides from 65 to 1,024, held on the chip, float32 (above 128: Hopper) ---------------------------
// By a block a member, or a cluster of them.
// The device is asked once for each size.
MemberPlan HeldPlanOf(int device, int multiprocessors, const Task& task);
// `blocks`: a multiple of `ranks`.
cudaError_t LaunchHeld(int size, int ranks, Work work, Lead lead, const LaunchOf& launch, int blocks,
                       int64_t shared_bytes, cudaStream_t stream);

// ---- Plain recipes, sides up to 64 in registers, float32 ------------------------------------------------------------
// Square, marginals 1, no guard that acts or, after a softmax, a small one that is added, a fixed number of iterations,
// all tensors float32 or all of 2 bytes an element.
// Sizes of tile that there are kernels for, and the members of a warp; members of a block are four times as many.
constexpr int kPlainSides[] = {4, 8, 12, 16, 20, 24, 28, 32, 64};
// Whether a matrix of 32 has half a warp rather than a whole one: fewer exchanges, but more registers and instructions.
// Unrolled, few matrices are the slower for it, and ragged ones; so is implicit backward after a softmax, whose code is
// longer than the instructions' cache then.
constexpr bool PlainHalves(Work work, bool softmax) {
  return work == Work::kForward || (work == Work::kImplicit && !softmax);
}
constexpr int64_t PlainMembers(int size, Work work, bool softmax) {
  constexpr int64_t kMembers[] = {32, 16, 8, 4, 8, 4, 8, 2, 1};
  return kPlainSides[size] == 32 && !PlainHalves(work, softmax) ? 1 : kMembers[size];
}
// Backward there is none of 20 and 28: K and the adjoints, or P in float64, would not fit into registers.
constexpr bool HasBackward(int tile_side) { return tile_side != 20 && tile_side != 28; }
constexpr int PlainIndex(int side, bool backward) {
  int index = 0;
  while (kPlainSides[index] < side || (backward && !HasBackward(kPlainSides[index]))) ++index;
  return index;
}
// The smallest side that a tile is for.
constexpr int LeastSide(int tile_side, bool backward) {
  int side = tile_side;
  while (side > 1 && kPlainSides[PlainIndex(side - 1, backward)] == tile_side) --side;
  return side;
}
struct PlainKind {
  Work work;  // kImplicit: not `transposed`.
  bool is_short;
  bool padded;  // Sides may be smaller than the tile's.
  Lead lead;    // kColumns are kRows, `transposed`.
};
// `threads`: of a block, 32 or 128. `history_bytes`: for 128, the largest of all tasks. `early`: the device can begin
// with it before the launch before in the stream has ended (Hopper).
cudaError_t LaunchPlain(int size, const PlainKind& kind, const LaunchOf& launch, int blocks, int threads,
                        int64_t history_bytes, bool early, cudaStream_t stream);
// Blocks of 128 threads that a multiprocessor runs at a time. `history_bytes`: of shared memory.
int PlainBlocks(int size, const PlainKind& kind, int64_t history_bytes);
// Bytes that a block needs for the scaling vectors of all iterations.
int64_t PlainHistoryBytes(int size, int32_t iterations);
// And of its slot, before those if they are in it.
int64_t PlainWaitingBytes(int size, int32_t iterations);

// ---- Other recipes, sides up to 32 in registers, float32 ------------------------------------------------------------
// Sizes of tile that there are kernels for: 4, 8, 16 and 32. Members as above.
constexpr int TileIndex(int side) { return side <= 4 ? 0 : side <= 8 ? 1 : side <= 16 ? 2 : 3; }
constexpr int64_t kWarpMembers[] = {32, 16, 4, 1};
constexpr int64_t kBlockWarps = 4;

// As above, and how many of them may be shared memory.
int64_t HistoryBytes(int tile, int32_t iterations);
int64_t SharedHistoryBytes();
// `shared_bytes`: of history, the largest of all tasks.
cudaError_t LaunchTiles(int tile, bool backward, const LaunchOf& launch, int blocks, int64_t shared_bytes,
                        cudaStream_t stream);
// After these: IMPLICIT and IMPLICIT_UNIT from the P that it left in `given_plan`; not `transposed`.
cudaError_t LaunchBackward(int tile, const LaunchOf& launch, int blocks, cudaStream_t stream);

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_KERNELS_H_
