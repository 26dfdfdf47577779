// Sweeps of Hessian-vector products between clouds whose exponents need float64 (kMixed), by the tiles of their half
// steps (Hopper): the plan times a vector for each direction, in float32.
#include <type_traits>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_exact_tiles.cuh"
#include "kernels/cuda/transport_hessian_sweep.cuh"
#include "kernels/cuda/transport_launch.h"

namespace sinkhorn {
namespace cuda {
namespace {

#if SINKHORN_HOPPER

// A column's numbers, for kTogether directions, beside its term.
template <int kTogether, int kColumns>
class SweepColumns {
 public:
  using Memory = float[2][kTogether][kColumns];
  struct Pair {  // Of two columns.
    float2 of[kTogether];
  };
  __device__ SweepColumns(const ExactTerms& terms, const double* const* sources, Memory* memory)
      : terms_(terms), sources_(sources), memory_(*memory) {}
  __device__ double Load(int j) {
#pragma unroll
    for (int q = 0; q < kTogether; ++q) {
      const bool is_there = sources_[q] != nullptr && j < terms_.count;
      next_[q] = is_there ? static_cast<float>(sources_[q][j]) : 0;
    }
    return terms_(j);
  }
  __device__ void Store(int slot, int column) {
#pragma unroll
    for (int q = 0; q < kTogether; ++q) memory_[slot][q][column] = next_[q];
  }
  __device__ Pair At(int slot, int column) const {
    Pair pair;
#pragma unroll
    for (int q = 0; q < kTogether; ++q) pair.of[q] = *reinterpret_cast<const float2*>(&memory_[slot][q][column]);
    return pair;
  }

 private:
  const ExactTerms& terms_;
  const double* const* const sources_;
  Memory& memory_;
  float next_[kTogether];
};

#endif

template <bool kFew, int kTogether>
__global__ void __launch_bounds__(kThreads, 2) ExactSweepKernel(LaunchTable table, int side) {
#if SINKHORN_HOPPER
  using Tiles = std::conditional_t<kFew, FewTiles, ManyTiles>;
  using Columns = SweepColumns<kTogether, Tiles::kColumns>;
  __shared__ typename Tiles::Memory memory;
  alignas(16) __shared__ typename Columns::Memory numbers;
  __shared__ float parts[Tiles::kGroups][kTile][kTogether];
  __shared__ SweepBlock b;  // And the rest that registers have no room for.
  __shared__ ExactSides sides;
  __shared__ ExactTerms terms;
  __shared__ const double* sources[kTogether];
  __shared__ bool any;
  // 1. Which rows, and what to multiply.
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  if (threadIdx.x == 0) b = FindSweepBlock(job, work.block, side, Geometry::kExact);
  __syncthreads();
  const int engine = b.rows.engine;
  const Member member{job, b.rows.member};
  const EngineState* state = member.state(engine);
  if (state->mode != kMixed) return;
  const ProductVectors v = VectorsOf(member, engine);
  const double* phi = member.phi(engine, state->parity, side);
  if (threadIdx.x == 0) {
    any = SourcesOf(v, b.group, side, sources);
    const double scale = kLog2E / state->epsilon;
    sides = ExactSidesOf(member, engine, side, b.rows.block, scale);
    terms = ExactTermsOf(member, PlanSide(engine, side), scale);
  }
  __syncthreads();
  if (!any) return;

  // 2. Tiles of columns.
  const double* mass = member.mass(MeasureOf(engine, side));
  Tiles tiles(sides, &memory);
  double start[Tiles::kRows];
  float sums[Tiles::kRows][kTogether] = {};
#pragma unroll
  for (int r = 0; r < Tiles::kRows; ++r) start[r] = StartOfRow(sides, terms, phi, mass, Tiles::Row(r));
  Columns columns(terms, sources, &numbers);
  const TileRange range = TilesOf<Tiles>(sides.columns, b.rows.split, b.rows.splits);
  tiles.Each(
      range.first, range.last, start, &columns, [&](int, int slot, int column) { return columns.At(slot, column); },
      [&](int r, double first, double second, const typename Columns::Pair& pair) {
        const float p = FixedPoint::Saturated(first), q = FixedPoint::Saturated(second);
#pragma unroll
        for (int d = 0; d < kTogether; ++d) sums[r][d] = fmaf(q, pair.of[d].y, fmaf(p, pair.of[d].x, sums[r][d]));
      });

  // 3. Over the threads of a row.
#pragma unroll
  for (int r = 0; r < Tiles::kRows; ++r) {
#pragma unroll
    for (int d = 0; d < kTogether; ++d) {
      const float sum = SumOfQuad(sums[r][d]);
      if (threadIdx.x % 4 == 0) parts[Tiles::Group()][Tiles::Row(r)][d] = sum;
    }
  }
  __syncthreads();
  const int row = threadIdx.x % kTile;
  const double of_row = mass[min(sides.first_row + row, sides.rows - 1)];
  double mine[kTogether];
  for (int d = 0; d < kTogether; ++d) {
    double sum = 0;
    for (int group = 0; group < Tiles::kGroups; ++group) sum += parts[group][row][d];
    mine[d] = sum * of_row;
  }
  FinishSweep(VectorsOf(member, engine), b, side, kTile, sources, mine);
#endif
}

}  // namespace

void LaunchExactSweep(const LaunchTable& table, int64_t blocks, int dim, bool alone, int side, cudaStream_t stream) {
  const auto launch = [&](void (*of_one)(LaunchTable, int), void (*of_some)(LaunchTable, int), size_t smem_bytes) {
    LaunchKernel(alone ? of_one : of_some, blocks, kThreads, smem_bytes, stream, table, side);
  };
  dim <= kFewDims ? launch(ExactSweepKernel<true, 1>, ExactSweepKernel<true, kSweepTogether>, 0)
                  : launch(ExactSweepKernel<false, 1>, ExactSweepKernel<false, kSweepTogether>, ManySharedBytes(dim));
}

}  // namespace cuda
}  // namespace sinkhorn
