// Gradients and projections of clouds of few coordinates whose exponents need float64 (kMixed): means of the other
// cloud's points under the plan's rows, by the tiles of its half steps (Hopper).
//
// A block has kTile rows of a side and all columns; of debiased problems it goes through the self-term's, too.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_exact_tiles.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_plan.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

#if SINKHORN_HOPPER

// Of a row, without its mass: the sum of its densities, and of their products with the columns' coordinates.
constexpr int kSums = 1 + kFewDims;
using RowSums = double[kTile][kSums];

__device__ void SumRows(const ExactSides& sides, const ExactTerms& of, const double* phi, const double* mass,
                        FewTiles::Memory* memory, RowSums* out) {
  __shared__ float parts[FewTiles::kGroups][kTile][kSums];
  FewTiles tiles(sides, memory);
  double start[FewTiles::kRows];
  float sums[FewTiles::kRows][kSums] = {};
#pragma unroll
  for (int r = 0; r < FewTiles::kRows; ++r) start[r] = StartOfRow(sides, of, phi, mass, FewTiles::Row(r));
  struct Points {
    float first[kFewDims], second[kFewDims];
  };
  const TileRange range = TilesOf<FewTiles>(sides.columns, 0, 1);
  TermsAlone terms(of);
  tiles.Each(
      range.first, range.last, start, &terms,
      [&](int, int slot, int column) {
        Points points;
#pragma unroll
        for (int k = 0; k < kFewDims; ++k) {
          points.first[k] = static_cast<float>(tiles.Point(slot, column, k));
          points.second[k] = static_cast<float>(tiles.Point(slot, column + 1, k));
        }
        return points;
      },
      [&](int r, double first, double second, const Points& points) {
        const float p = FixedPoint::Saturated(first), q = FixedPoint::Saturated(second);
        sums[r][0] += p;
        sums[r][0] += q;
#pragma unroll
        for (int k = 0; k < kFewDims; ++k) {
          sums[r][1 + k] = fmaf(q, points.second[k], fmaf(p, points.first[k], sums[r][1 + k]));
        }
      });
#pragma unroll
  for (int r = 0; r < FewTiles::kRows; ++r) {
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
      const float sum = SumOfQuad(sums[r][k]);
      if (threadIdx.x % 4 == 0) parts[FewTiles::Group()][FewTiles::Row(r)][k] = sum;
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < kTile * kSums; e += kThreads) {
    double sum = 0;
    for (int group = 0; group < FewTiles::kGroups; ++group) sum += parts[group][e / kSums][e % kSums];
    (*out)[e / kSums][e % kSums] = sum;
  }
  __syncthreads();
}

#endif

// A block's rows.
struct RowsOfSide {
  int64_t member;
  int side, block, terms;  // Of the gradient.
};

__global__ void __launch_bounds__(kThreads, 2) ExactGradientKernel(LaunchTable table) {
#if SINKHORN_HOPPER
  __shared__ FewTiles::Memory memory;
  __shared__ ExactSides sides;
  __shared__ ExactTerms terms;
  __shared__ RowSums sums;
  __shared__ RowsOfSide of;  // And the rest that registers have no room for.
  // 1. Whose rows.
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  if (threadIdx.x == 0) {
    const int64_t of_first = ExactGradientBlocks(job, 0), of_member = of_first + ExactGradientBlocks(job, 1);
    const int block = static_cast<int>(work.block % of_member), side = block < of_first ? 0 : 1;
    of.member = work.block / of_member;
    of.side = side;
    of.block = side == 0 ? block : block - static_cast<int>(of_first);
    of.terms = job.engines > 1 && WantsGradient(job, side) ? 2 : 1;
  }
  __syncthreads();
  const Member member{job, of.member};
  if (member.state(0)->mode != kMixed || !IsSolved(member)) return;
  // 2. Gradients of debiased problems have a second term. This thread has one of its coordinates.
  static_assert(kThreads >= kTile * (kFewDims + 1), "a thread for a row's coordinate");
  double gradient = 0;
  for (int t = 0; t < of.terms; ++t) {
    const int side = of.side;
    const PlanSide plan = PlanSide::Term(side, t);
    const EngineState& state = *member.state(plan.engine);
    const double *phi = member.phi(plan.engine, state.parity, plan.side), *own_mass = member.mass(plan.own);
    const double scale = kLog2E / state.epsilon;
    __syncthreads();  // What is there has been read.
    if (threadIdx.x == 0) {
      sides = ExactSidesOf(member, plan.engine, plan.side, of.block, scale);
      terms = ExactTermsOf(member, plan, scale);
    }
    __syncthreads();
    SumRows(sides, terms, phi, own_mass, &memory, &sums);
    // 3. What follows for the row.
    const int row = threadIdx.x / (kFewDims + 1), k = threadIdx.x % (kFewDims + 1);
    const int64_t i = sides.first_row + row;
    if (i >= sides.rows || k >= job.dim) continue;
    const double mass = own_mass[i] * sums[row][0], value = own_mass[i] * sums[row][1 + k];
    if (t == 0 && ProjectsMeans(job, side)) {
      StoreOutput(ProjectionOf(job, side), (member.index * sides.rows + i) * job.dim + k,
                  mass > 0 ? value / mass + member.At<double>(job.at.centre[plan.other])[k] : 0);
    }
    if (!WantsGradient(job, side)) continue;
    gradient += GradientTerm(member, side, t > 0, i, k, mass, value);
    if (t + 1 == of.terms) StoreGradient(member, side, i, k, gradient);
  }
#endif
}

}  // namespace

void LaunchExactGradient(const LaunchTable& table, int64_t blocks, cudaStream_t stream) {
  LaunchKernel(ExactGradientKernel, blocks, kThreads, 0, stream, table);
}

}  // namespace cuda
}  // namespace sinkhorn
