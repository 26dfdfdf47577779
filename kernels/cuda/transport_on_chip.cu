// Whole solves of small float32 problems (transport_on_chip_solve.cuh) of products and of costs.
#include "kernels/cuda/transport_on_chip_launch.cuh"

namespace sinkhorn {
namespace cuda {

std::vector<OnChipLaunch> OnChipLaunchesOf(const Job& job) {
  std::vector<OnChipLaunch> launches;
  for (int engine = 0; engine < job.engines && OnChipTiles(job) > 0; ++engine) {
    const OnChipShape shape = OnChipShapeOf(job, engine);
    const int ranks = OnChipCluster(shape.ranks);
    const auto same = std::find_if(launches.begin(), launches.end(), [&](const OnChipLaunch& launch) {
      return launch.tiles == shape.tiles && launch.ranks == ranks;
    });
    if (same != launches.end()) {
      same->engines |= 1u << engine;
    } else {
      launches.push_back({SourceOf(job), shape.tiles, ranks, 1u << engine});
    }
  }
  return launches;
}

int64_t OnChipBlocks(const Job& job, const OnChipLaunch& of) {
  return job.count * of.ranks * ((of.engines & 1) + (of.engines >> 1 & 1) + (of.engines >> 2 & 1));
}

bool HasWideClusters() {
  static FactOfDevice fact;
  return fact.Get([] {
    using S = Shape<kOnChipTilesMost>;
    const auto kernel = OnChipKernel<Source::kProducts, kOnChipTilesMost>;
    return ClustersAtOnce(kernel, kOnChipRanksMost, S::kBlockThreads, OnChipBytes<Source::kProducts, S>());
  }) > 0;
}

void LaunchOnChip(const LaunchTable& table, int64_t blocks, const OnChipLaunch& of, int chunks, cudaStream_t stream) {
  switch (of.source) {
    case Source::kProducts:
      return LaunchSolves<Source::kProducts>(table, blocks, of, chunks, stream);
    case Source::kDistances:
      return LaunchOnChipDistances(table, blocks, of, chunks, stream);
    case Source::kCosts:
      return LaunchSolves<Source::kCosts>(table, blocks, of, chunks, stream);
    case Source::kExact:
      return LaunchOnChipExact(table, blocks, of, chunks, stream);
  }
}

}  // namespace cuda
}  // namespace sinkhorn
