// The shapes of the kernel that holds matrices with sides from 65 to 1,024 on the chip, and the memory that each needs.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_SHAPE_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_SHAPE_CUH_

#include "kernels/cuda/normalization_kernels.h"
#include "kernels/cuda/normalization_stream_shape.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

// A warp holds 32 rows by 128 columns for each of a lane's quads: most rows in registers, the others in shared memory.
// A block's warps lie side by side in `kColumnGroups`, one below the other otherwise; a member is one block's, or that
// of as many blocks (ranks), one below the other, as its rows need.
template <int kLaneQuads, int kBlockWarpCount, int kColumnGroups>
struct HeldShape {
  static constexpr int kQuads = kLaneQuads, C = 4 * kQuads, W = kBlockWarpCount, kAcross = kColumnGroups;
  static constexpr int kDown = W / kAcross, kThreadCount = 32 * W;
  static constexpr int kWarpRows = 32, kKept = 24;  // Rows in registers.
  static constexpr int kGroup = 8;                  // Rows in shared memory; those that are worked on at a time.
  static constexpr int kHalf = kWarpRows / 2;       // Rows whose unrolled gradient is made at a time.
  static constexpr int kBuffer = 3 * kGroup;        // Rows of a warp's shared memory.
  static constexpr int kWarpColumns = 32 * C, kColumns = kWarpColumns * kAcross, kRows = kWarpRows * kDown;
  static constexpr int kRanksMost = kColumns / kRows;
  static constexpr bool kCluster = kRanksMost > 1;
  static_assert(kKept + kGroup == kWarpRows, "all rows are somewhere");
  static_assert(kCluster || kThreadCount == kColumns, "a thread for each column");
  static_assert(!kCluster || kThreadCount >= kColumns / 4, "a thread for each quad of columns");
};
using Held128 = HeldShape<1, 4, 1>;
using Held256 = HeldShape<2, 8, 1>;
using Held512 = HeldShape<2, 8, 2>;
using Held1024 = HeldShape<2, 8, 4>;

// Floats of shared memory; of them those that say where what a cluster's blocks exchange goes.
template <class Shape>
constexpr int kHeldRouteFloats = Shape::kCluster ? 5 * Shape::kThreadCount + 4 : 0;
template <class Shape>
constexpr int kHeldSharedFloats = Shape::W*(Shape::kBuffer + 1) * Shape::kWarpColumns            // Rows, sums.
                                  + (Shape::kCluster ? 2 : 1) * Shape::kColumns + 64 * Shape::W  // Vectors.
                                  + 2 * Shape::kAcross* Shape::kRows + 2 * Shape::W +
                                  4 * (1 + Shape::kRanksMost) + kHeldRouteFloats<Shape>;

// Those that need no cluster and no more memory than compute capability 8.0 has for a block run there, too.
template <class Shape>
constexpr bool kHeldBeforeHopper = !Shape::kCluster && kHeldSharedFloats<Shape> * sizeof(float) <= 160 << 10;

// Floats of an iteration's history: u, x of the block's rows; v, y.
template <class Shape>
constexpr int kHeldStep = 2 * (Shape::kRows + Shape::kColumns);

// The kernel's instances, each of them in one file: normalization_held_{rows,softmax,columns}.cu of blocks, and
// ..._cluster.cu.
using HeldFunction = void (*)(LaunchOf);
template <class Shape, Lead kLead>
HeldFunction HeldKernelOf(Work work);

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_SHAPE_CUH_
