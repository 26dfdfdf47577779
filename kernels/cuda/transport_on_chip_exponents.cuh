// Exponents of a problem on the chip: costs, products of points, or distances. Exact ones lie in memory.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_EXPONENTS_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_EXPONENTS_CUH_

#include "kernels/cuda/transport_on_chip_products.cuh"

namespace sinkhorn {
namespace cuda {

template <Source kSource, int kTiles>
class OnChipExponents : public OnChipProducts<kSource, kTiles> {
 public:
  using Base = OnChipProducts<kSource, kTiles>;
  using Base::Base;
  using typename Base::S;

 protected:
  using Base::Column;
  using Base::engine;
  using Base::first_row;
  using Base::job_;
  using Base::lane_;
  using Base::m_;
  using Base::member;
  using Base::Read;
  using Base::ReadEntries;
  using Base::Row;
  using Base::size;
  using Base::warp_;
  using Base::WriteEntries;

  // z of this thread's entries, divided by m_.factor; what lies outside repeats some row or column. Exact ones lie in
  // memory already.
  __device__ void MakeExponents() {
    if constexpr (kSource == Source::kCosts) {
      const int64_t m = size(1), base = job_.in.cost.shared ? 0 : member().index * size(0) * m;
      const bool aligned = job_.in.cost.dtype == DType::kFloat32 && m % S::kWidth == 0;
#pragma unroll
      for (int r = 0; r < S::kRows; ++r) {
        const int64_t row = base + min(first_row() + Row(r), size(0) - 1) * m;
#pragma unroll
        for (int g = 0; g < S::kGroups; ++g) {
          float e[S::kWidth];
          LoadCosts(row, Column(g), aligned, e);
          WriteEntries(e, r, g);
        }
      }
    } else if constexpr (kSource == Source::kDistances) {
      MeasureDistances();
    } else if constexpr (kSource == Source::kProducts) {
      this->MultiplyPoints();
    }
    // Seen after the next barrier.
    if (threadIdx.x != 0) return;
    if constexpr (kSource == Source::kExact) {
      m_.unit = job_.solver.epsilon;
    } else if constexpr (kSource == Source::kProducts) {
      m_.unit = this->FactorOfProducts();
    } else {
      m_.unit = -1;
    }
    SetEpsilon(m_.epsilon, &m_);
  }

 private:
  // Costs side by side of the row that begins at entry `row`; `aligned`: all at once.
  __device__ void LoadCosts(int64_t row, int column, bool aligned, float (&e)[S::kWidth]) const {
    if (aligned) {
      const float* costs = static_cast<const float*>(job_.in.cost.data) + row;
      return Read(costs + min(column, size(1) - S::kWidth), e);
    }
#pragma unroll
    for (int k = 0; k < S::kWidth; ++k) {
      e[k] = LoadFloat(job_.in.cost.dtype, job_.in.cost.data, row + min(column + k, size(1) - 1));
    }
  }

  // |x - y|, of points in float32: a chunk of columns over kDepth coordinates at a time.
  __device__ void MeasureDistances() {
    const float* x = member().template At<float>(job_.at.points32[MeasureOf(engine(), 0)]);
    const float* y = member().template At<float>(job_.at.points32[MeasureOf(engine(), 1)]);
    const int dim = job_.dim;
    float* columns = reinterpret_cast<float*>(m_.points[0]);  // [coordinate][column of the chunk]
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      for (int first = 0; first < dim; first += kDepth) {
        const int depth = min(kDepth, dim - first);
        __syncthreads();  // The points before have been read.
        for (int e = threadIdx.x; e < depth * S::kChunk; e += S::kBlockThreads) {
          const int64_t j = min(g * S::kChunk + e % S::kChunk, size(1) - 1);
          columns[e] = y[j * dim + first + e / S::kChunk];
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < S::kRows; ++r) {
          const float* row = x + int64_t{min(first_row() + Row(r), size(0) - 1)} * dim + first;
          float e[S::kWidth] = {};
          if (first > 0) ReadEntries(r, g, e);
          AddSquares(row, columns, depth, e);
          if (first + depth == dim) {
#pragma unroll
            for (int k = 0; k < S::kWidth; ++k) e[k] = Root(e[k]);
          }
          WriteEntries(e, r, g);
        }
      }
    }
  }
  __device__ void AddSquares(const float* row, const float* columns, int depth, float (&sum)[S::kWidth]) {
#pragma unroll 1
    for (int q = 0; q < depth; ++q) {
      const float own = __ldg(row + q);
      float theirs[S::kWidth];
      Read(columns + q * S::kChunk + lane_ * S::kWidth, theirs);
#pragma unroll
      for (int k = 0; k < S::kWidth; ++k) {
        const float difference = own - theirs[k];
        sum[k] = fmaf(difference, difference, sum[k]);
      }
    }
  }
};

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_EXPONENTS_CUH_
