// How many blocks a cluster has.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_RANKS_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_RANKS_CUH_

#include "kernels/cuda/transport_cluster.cuh"
#include "kernels/cuda/transport_shape.cuh"

namespace sinkhorn {
namespace cuda {

// Blocks of a cluster that share `tiles` of each of `blocks`, so that waves of them on an H200 take the least time.
// `beside`: as many tiles as what a block has to do beside them takes.
inline int RanksOf(int64_t blocks, int64_t tiles, int64_t beside) {
  int best = 1;
  int64_t least = 0;
  for (int ranks = 1; ranks <= kPortableRanks && (ranks == 1 || 4 * ranks <= tiles); ranks *= 2) {
    const int64_t time = CeilDiv(blocks * ranks, ranks > 2 ? 128 : kProcessors) * (CeilDiv(tiles, ranks) + beside);
    if (ranks > 1 && time >= least) continue;
    least = time;
    best = ranks;
  }
  return best;
}

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_RANKS_CUH_
