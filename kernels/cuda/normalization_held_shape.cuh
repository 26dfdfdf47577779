// The shapes of the kernel that holds matrices with sides from 65 to 1,024 on the chip, and the memory that each needs.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_SHAPE_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_SHAPE_CUH_

#include "kernels/cuda/normalization_stream_shape.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

// A warp holds 32 rows by 128 columns for each of a lane's quads: half of the rows in registers, half in shared memory.
// A block's warps lie side by side in `kColumnGroups`, one below the other otherwise; a member is one block's, or that
// of as many blocks (ranks), one below the other, as its rows need.
template <int kLaneQuads, int kBlockWarpCount, int kColumnGroups>
struct HeldShape {
  static constexpr int kQuads = kLaneQuads, C = 4 * kQuads, W = kBlockWarpCount, kAcross = kColumnGroups;
  static constexpr int kDown = W / kAcross, kThreadCount = 32 * W;
  static constexpr int kWarpRows = 32, kKept = 16, kGroup = 8;  // Rows: in registers; of what is moved at a time.
  static constexpr int kWarpColumns = 32 * C, kColumns = kWarpColumns * kAcross, kRows = kWarpRows * kDown;
  static constexpr int kRanksMost = kColumns / kRows;
  static constexpr bool kCluster = kRanksMost > 1;
  static_assert(kCluster || kThreadCount == kColumns, "a thread for each column");
  static_assert(!kCluster || kThreadCount >= kColumns / 4, "a thread for each quad of columns");
};
using Held128 = HeldShape<1, 4, 1>;
using Held256 = HeldShape<2, 8, 1>;
using Held512 = HeldShape<2, 8, 2>;
using Held1024 = HeldShape<2, 8, 4>;

// Floats of shared memory.
template <class Shape>
constexpr int kHeldSharedFloats =
    Shape::W*(Shape::kWarpRows - Shape::kKept + Shape::kGroup + 1) * Shape::kWarpColumns  // K, staging, sums
    + (Shape::kCluster ? 2 : 1) * Shape::kColumns + 32 * Shape::W                         // Vectors.
    + 2 * Shape::kAcross* Shape::kRows + 64;

// Floats of an iteration's history: u, x of the block's rows; v, y.
template <class Shape>
constexpr int kHeldStep = 2 * (Shape::kRows + Shape::kColumns);

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_SHAPE_CUH_
