// Instances of the plain recipes' kernel.
#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/normalization_kernels.h"
#include "kernels/cuda/normalization_plain.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {
namespace {

// Runs body(Shape) for a tile.
template <class Body>
auto WithTile(int tile, Body body) {
  switch (tile) {
    case 0:
      return body(Tile4());
    case 1:
      return body(Tile8());
    case 2:
      return body(Tile16());
    case 3:
      return body(Tile32());
    default:
      return body(Tile64());
  }
}

template <class Shape, bool kBackward, bool kOne>
void LaunchShape(bool is_short, const LaunchOf& launch, int blocks, int threads, int64_t history_bytes,
                 cudaStream_t stream) {
  auto* const kernel =
      is_short ? PlainKernel<Shape, kBackward, true, kOne> : PlainKernel<Shape, kBackward, false, kOne>;
  const int64_t bytes = PlainTraits<Shape, kBackward, false, kOne>::kBufferBytes + history_bytes;
  LaunchKernel(kernel, blocks, threads, bytes * threads / kThreads, stream, launch);
}

template <class Shape, bool kBackward>
void LaunchOneOrAny(const PlainKind& kind, const LaunchOf& launch, int blocks, int threads, int64_t history_bytes,
                    cudaStream_t stream) {
  if constexpr (Shape::kSize <= 32) {
    const Task& task = launch.only;
    const bool plan_alone = task.plan.data != nullptr && task.plan_copy.data == nullptr &&
                            task.row_sums.data == nullptr && task.column_sums.data == nullptr;
    if (launch.tasks == nullptr && !kind.padded && !task.transposed && plan_alone) {
      return LaunchShape<Shape, kBackward, true>(kind.is_short, launch, blocks, threads, history_bytes, stream);
    }
  }
  LaunchShape<Shape, kBackward, false>(kind.is_short, launch, blocks, threads, history_bytes, stream);
}

template <class Traits>
int BlocksOf(int64_t history_bytes) {
  constexpr int64_t kSharedBytes = 227 << 10;  // Of Hopper's; with fewer the last blocks wait for others.
  constexpr int64_t kStaticBytes = 2 << 10;    // And what the system takes.
  const int64_t fitting = kSharedBytes / (Traits::kBufferBytes + history_bytes + kStaticBytes);
  return static_cast<int>(std::clamp<int64_t>(fitting, 1, Traits::kBlocks));
}

}  // namespace

cudaError_t LaunchPlain(int tile, const PlainKind& kind, const LaunchOf& launch, int blocks, int threads,
                        int64_t history_bytes, cudaStream_t stream) {
  WithTile(tile, [&](auto shape) {
    using Shape = decltype(shape);
    if (!kind.backward) {
      LaunchOneOrAny<Shape, false>(kind, launch, blocks, threads, 0, stream);
    } else {
      LaunchOneOrAny<Shape, true>(kind, launch, blocks, threads, history_bytes, stream);
    }
  });
  return cudaGetLastError();
}

int64_t PlainHistoryBytes(int tile, int32_t iterations) {
  return WithTile(tile, [&](auto shape) {
    using Shape = decltype(shape);
    return HistoryBytes<Shape>(PlainTraits<Shape, true, false, true>::kHistoryVectors, iterations);
  });
}
int PlainBlocks(int tile, bool is_short, bool backward, int64_t history_bytes) {
  return WithTile(tile, [&](auto shape) {
    using Shape = decltype(shape);
    return backward   ? BlocksOf<PlainTraits<Shape, true, false, true>>(history_bytes)
           : is_short ? BlocksOf<PlainTraits<Shape, false, true, true>>(history_bytes)
                      : BlocksOf<PlainTraits<Shape, false, false, true>>(history_bytes);
  });
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
