// The kernel of whole solves of small problems (transport_on_chip_solve.cuh), and its launches: of blocks, as many as a
// processor has room for; of clusters; of the widest, which solve one problem after the other.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_LAUNCH_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_LAUNCH_CUH_

#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_cluster.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_on_chip_solve.cuh"

namespace sinkhorn {
namespace cuda {

constexpr size_t kProcessorBytes = 228 << 10;  // Shared memory of a Hopper processor.

template <Source kSource, int kTiles>
__global__ void __launch_bounds__(Shape<kTiles>::kBlockThreads, Shape<kTiles>::kBlocksPerSm)
    OnChipKernel(LaunchTable table, int64_t blocks, unsigned engines, int chunks) {
#if __CUDA_ARCH__ < 900
  if constexpr (!Shape<kTiles>::kCluster) {
#endif
    using Kernel = OnChip<kSource, kTiles>;
    using S = typename Kernel::S;
    const unsigned base = SharedAddress(DynamicShared()), alignment = alignof(typename Kernel::Memory);
    auto* memory = reinterpret_cast<typename Kernel::Memory*>(DynamicShared() + (0 - base) % alignment);
    // Clusters may be fewer than problems: then the next kernel waits until they end.
    const bool turns = S::kSplit && gridDim.x < blocks;
    if (!turns) AllowNextKernel();
    bool solved = false;
    for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
      const BlockWork work = FindWork(table, block);
      Job& job = CopyJob(table.jobs[work.job]);
      int64_t index = S::kCluster ? static_cast<unsigned>(work.block) / ClusterRanks() : work.block;
      int engine = 0;
      if (engines != 1) {  // Of a member, one after the other.
        const int count = __popc(engines);
        unsigned left = engines;
        for (int before = static_cast<int>(index % count); before > 0; --before) left &= left - 1;
        engine = __ffs(left) - 1;
        index /= count;
        // Both sides of an engine of its own are of one size, which all that asks for it finds in either.
        if (engine > 0 && threadIdx.x == 0) job.size[0] = job.size[1] = EngineSize(job, engine, 0);
        __syncthreads();
      }
      AwaitKernelBefore();
      OnChipShape shape = {kTiles, S::kCluster ? 2 : 1, S::kBlockRows, S::kBlockRows};
      if constexpr (S::kSplit) {
        shape = OnChipShapeOf(job, engine);
        if (ClusterRank() >= shape.ranks) return;  // Nor will it be wanted for those that follow.
      }
      const EngineState* state = Member{job, index}.state(engine);
      const bool wanted = state->mode == (kSource == Source::kExact ? kMixed : kFloat) && !state->stopped;
      if (wanted) {
        Kernel kernel(job, index, engine, shape, memory);
        kernel.Run(chunks, !solved);
        solved = true;
        if (turns) kernel.Leave();
      }
      if (!turns) return;
      __syncthreads();
    }
#if __CUDA_ARCH__ < 900
  }
#endif
}

template <Source kSource, int kTiles>
void LaunchTiles(const LaunchTable& table, int64_t blocks, const OnChipLaunch& of, int chunks, cudaStream_t stream) {
  const int ranks = of.ranks;
  using S = Shape<kTiles>;
  static_assert((S::kRows - S::kHeld) * S::kColumns <= 192 && S::kMost == S::kOwn * S::kBlockThreads, "registers");
  const auto kernel = OnChipKernel<kSource, kTiles>;
  // Blocks that begin while the kernel before ends would crowd on the processors that it has left: they take so much
  // that no processor has room for more than its share.
  const int64_t share = CeilDiv(blocks, kProcessors);
  const size_t crowded = share < S::kBlocksPerSm ? kProcessorBytes / (share + 1) : 0;
  const size_t smem_bytes = std::max(OnChipBytes<kSource, S>(), ranks == 1 && HasHopperKernels() ? crowded : 0);
  if (ranks == 1) {
    return LaunchNext(kernel, blocks, S::kBlockThreads, smem_bytes, stream, table, blocks, of.engines, chunks);
  }
  if (blocks == 0) return;
  AllowRanks(kernel, ranks);
  int64_t grid = blocks;
  if (of.IsWide()) {
    static FactOfDevice fact;
    const int at_once = fact.Get([&] { return ClustersAtOnce(kernel, ranks, S::kBlockThreads, smem_bytes); });
    grid = std::min<int64_t>(grid, std::max(at_once, 1) * ranks);
  }
  AttributedLaunch launch(kernel, grid, S::kBlockThreads, smem_bytes, stream);
  launch.Add(ClusterOf(ranks));
  launch.Add(Overlapping());
  launch.Enqueue(kernel, table, blocks, of.engines, chunks);
}
template <Source kSource>
void LaunchSolves(const LaunchTable& table, int64_t blocks, const OnChipLaunch& of, int chunks, cudaStream_t stream) {
  switch (of.tiles) {
    case 1:
      return LaunchTiles<kSource, 1>(table, blocks, of, chunks, stream);
    case 2:
      return LaunchTiles<kSource, 2>(table, blocks, of, chunks, stream);
    case 4:
      return LaunchTiles<kSource, 4>(table, blocks, of, chunks, stream);
    case 8:
      return LaunchTiles<kSource, 8>(table, blocks, of, chunks, stream);
    default:
      return LaunchTiles<kSource, 16>(table, blocks, of, chunks, stream);
  }
}

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_LAUNCH_CUH_
