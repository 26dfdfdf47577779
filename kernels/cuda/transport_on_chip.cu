// Whole solves of small float32 problems (transport_on_chip_solve.cuh) of products and of costs.
#include "kernels/cuda/transport_on_chip_solve.cuh"

namespace sinkhorn {
namespace cuda {

int64_t OnChipBlocks(const Job& job) { return job.count * OnChipShapeOf(job).ranks; }

bool HasWideClusters() {
  static FactOfDevice fact;
  return fact.Get([] {
    using S = Shape<kOnChipTilesMost>;
    const auto kernel = OnChipKernel<Source::kProducts, kOnChipTilesMost>;
    AllowRanks(kernel, kOnChipRanksMost);
    AttributedLaunch launch(kernel, kOnChipRanksMost, S::kBlockThreads, OnChipBytes<Source::kProducts, S>(), nullptr);
    launch.Add(ClusterOf(kOnChipRanksMost));
    int clusters = 0;
    return cudaOccupancyMaxActiveClusters(&clusters, kernel, launch.config()) == cudaSuccess && clusters > 0;
  });
}

void LaunchOnChip(const LaunchTable& table, int64_t blocks, Source source, int tiles, int ranks, int chunks,
                  cudaStream_t stream) {
  switch (source) {
    case Source::kProducts:
      return LaunchSolves<Source::kProducts>(table, blocks, tiles, ranks, chunks, stream);
    case Source::kDistances:
      return LaunchOnChipDistances(table, blocks, tiles, ranks, chunks, stream);
    case Source::kCosts:
      return LaunchSolves<Source::kCosts>(table, blocks, tiles, ranks, chunks, stream);
    case Source::kExact:
      return LaunchOnChipExact(table, blocks, tiles, ranks, chunks, stream);
  }
}

}  // namespace cuda
}  // namespace sinkhorn
