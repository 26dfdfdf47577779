// Tiles of exponents: kTile rows of one side of an engine against kTile columns of the other, 4 x 4 per thread, from
// points or from a cost matrix. The plain arithmetic that serves every problem; faster kernels have their own.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_TILE_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_TILE_CUH_

#include <type_traits>

#include "kernels/cuda/transport_block.cuh"

namespace sinkhorn {
namespace cuda {

template <int kMode>
using ExponentOf = std::conditional_t<kMode == kFloat, float, double>;
template <int kMode>
using DensityOf = std::conditional_t<kMode == kDouble, double, float>;

__device__ inline float Exp2(float x) { return exp2f(x); }
__device__ inline double Exp2(double x) { return exp2(x); }
__device__ inline float Root(float x) { return FastRoot(x); }
__device__ inline double Root(double x) { return sqrt(x); }

// One side of an engine at one epsilon: what a block needs to make exponents.
struct TileContext {
  const Job* job;
  int64_t member;
  int engine, side;
  int rows, columns, dim;
  double scale;            // log2(e) / epsilon
  int row_lane, col_lane;  // This thread's rows are 4 row_lane + 0..3 of the tile, its columns likewise.
};

__device__ inline TileContext MakeTileContext(const Job& job, int64_t member, int engine, int side, double epsilon) {
  TileContext c;
  c.job = &job;
  c.member = member;
  c.engine = engine;
  c.side = side;
  c.rows = EngineSize(job, engine, side);
  c.columns = EngineSize(job, engine, 1 - side);
  c.dim = job.dim;
  c.scale = kLog2E / epsilon;
  // Neighbouring threads read neighbouring costs.
  const bool across = job.dense && side == 1;
  c.row_lane = across ? threadIdx.x % 16 : threadIdx.x / 16;
  c.col_lane = across ? threadIdx.x / 16 : threadIdx.x % 16;
  return c;
}

template <bool kDense, int kMode>
struct TileMemory {
  using TE = ExponentOf<kMode>;
  static constexpr int kDepth = kDense ? 1 : sizeof(TE) == 4 ? 16 : 8;
  alignas(16) TE rows[kDepth][kTile + 4];
  alignas(16) TE columns[kDepth][kTile + 4];
};

// z of rows row0 + 4 row_lane + r, columns col0 + 4 col_lane + c; what lies outside repeats the last row or column.
// kDistance: whole squared distances, for clouds in double; kRoot: their roots. Barriers inside (clouds).
template <bool kDense, int kMode, bool kDistance = kMode == kDouble, bool kRoot = false>
__device__ inline void MakeTile(const TileContext& c, int row0, int col0, TileMemory<kDense, kMode>* memory,
                                ExponentOf<kMode> (&z)[4][4]) {
  using TE = ExponentOf<kMode>;
  const Job& job = *c.job;
  if constexpr (kDense) {
    const int64_t m = job.size[1];
    const int64_t base = job.in.cost.shared ? 0 : c.member * job.size[0] * m;
    const TE factor = static_cast<TE>(-c.scale);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int64_t row = min(row0 + 4 * c.row_lane + r, c.rows - 1);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int64_t column = min(col0 + 4 * c.col_lane + k, c.columns - 1);
        const int64_t at = base + (c.side == 0 ? row * m + column : column * m + row);
        z[r][k] = LoadAs<TE>(job.in.cost.dtype, job.in.cost.data, at) * factor;
      }
    }
  } else {
    constexpr int kDepth = TileMemory<kDense, kMode>::kDepth;
    const Member member{job, c.member};
    const int own = MeasureOf(c.engine, c.side), other = MeasureOf(c.engine, 1 - c.side);
    const auto points = [&](int measure) {
      return member.template At<TE>(sizeof(TE) == 4 ? job.at.points32[measure] : job.at.points64[measure]);
    };
    const TE* x = points(own);
    const TE* y = points(other);
    const TE factor = kDistance ? TE(1) : static_cast<TE>(2 * job.in.kappa * c.scale);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int k = 0; k < 4; ++k) z[r][k] = 0;
    }
    for (int first = 0; first < c.dim; first += kDepth) {
      const int depth = min(kDepth, c.dim - first);
      __syncthreads();  // The tile before has been read.
      for (int e = threadIdx.x; e < kDepth * kTile; e += kThreads) {
        const int k = e % kDepth, i = e / kDepth;
        const bool there = k < depth;
        const int64_t row = min(row0 + i, c.rows - 1), column = min(col0 + i, c.columns - 1);
        memory->rows[k][i] = there ? x[row * c.dim + first + k] * factor : TE(0);
        memory->columns[k][i] = there ? y[column * c.dim + first + k] : TE(0);
      }
      __syncthreads();
      for (int k = 0; k < depth; ++k) {
        TE a[4], b[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) a[r] = memory->rows[k][4 * c.row_lane + r];
#pragma unroll
        for (int r = 0; r < 4; ++r) b[r] = memory->columns[k][4 * c.col_lane + r];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            if constexpr (kDistance) {
              const TE difference = a[r] - b[q];
              z[r][q] += difference * difference;
            } else {
              z[r][q] += a[r] * b[q];
            }
          }
        }
      }
    }
    if constexpr (kDistance) {
      const TE whole = static_cast<TE>(-job.in.kappa * c.scale);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
#pragma unroll
        for (int q = 0; q < 4; ++q) z[r][q] = (kRoot ? Root(z[r][q]) : z[r][q]) * whole;
      }
    }
  }
}

// The same for a source of exponents.
template <Source kSource, int kMode>
__device__ inline void MakeTileOf(const TileContext& c, int row0, int col0,
                                  TileMemory<kSource == Source::kCosts, kMode>* memory, ExponentOf<kMode> (&z)[4][4]) {
  constexpr bool kRoot = kSource == Source::kDistances;
  MakeTile<kSource == Source::kCosts, kMode, kRoot || kMode == kDouble, kRoot>(c, row0, col0, memory, z);
}

// (phi - reference) s + log2 mass of one side's point: what its weight adds to an exponent. Potentials may share a
// large constant; seen from `reference`, the first of the columns', none is larger than the cost's range makes it.
__device__ inline double Term(const double* phi, const double* log_mass, double reference, double scale, int i) {
  return fma(phi[i] - reference, scale, log_mass[i]);
}

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_TILE_CUH_
