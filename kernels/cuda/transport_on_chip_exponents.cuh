// Exponents of a problem on the chip: costs, products of points on the matrix units, or distances.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_EXPONENTS_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_EXPONENTS_CUH_

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/transport_on_chip.cuh"

namespace sinkhorn {
namespace cuda {

template <Source kSource, int kTiles>
class OnChipExponents : public OnChipBlock<kSource, kTiles> {
 public:
  using Base = OnChipBlock<kSource, kTiles>;
  using Base::Base;
  using typename Base::S;

 protected:
  using Base::Column;
  using Base::first_row;
  using Base::job_;
  using Base::lane_;
  using Base::m_;
  using Base::member_;
  using Base::Read;
  using Base::ReadEntries;
  using Base::Row;
  using Base::scale;
  using Base::size;
  using Base::warp_;
  using Base::WriteEntries;

  // z of this thread's entries; what lies outside repeats some row or column.
  __device__ void MakeExponents() {
    if constexpr (kSource == Source::kCosts) {
      const float factor = static_cast<float>(-scale());
      const int64_t m = size(1), base = job_.in.cost.shared ? 0 : member_.index * size(0) * m;
      const bool aligned = job_.in.cost.dtype == DType::kFloat32 && m % S::kWidth == 0;
#pragma unroll
      for (int r = 0; r < S::kRows; ++r) {
        const int64_t row = base + min(first_row() + Row(r), size(0) - 1) * m;
#pragma unroll
        for (int g = 0; g < S::kGroups; ++g) {
          float e[S::kWidth];
          LoadCosts(row, Column(g), aligned, e);
#pragma unroll
          for (int k = 0; k < S::kWidth; ++k) e[k] *= factor;
          WriteEntries(e, r, g);
        }
      }
    } else if constexpr (kSource == Source::kDistances) {
      MeasureDistances();
    } else {
      MultiplyPoints();
    }
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

  // -|x - y| log2(e) / epsilon, of points in float32: a chunk of columns over kDepth coordinates at a time.
  __device__ void MeasureDistances() {
    const float* x = member_.template At<float>(job_.at.points32[0]);
    const float* y = member_.template At<float>(job_.at.points32[1]);
    const float factor = static_cast<float>(-scale());
    const int dim = job_.dim;
    float* columns = reinterpret_cast<float*>(m_.points);  // [coordinate][column of the chunk]
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
            for (int k = 0; k < S::kWidth; ++k) e[k] = Root(e[k]) * factor;
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

  // Products of split halves, 16 columns by 8 rows at a time. `points`: a chunk of columns over kDepth coordinates.
  __device__ void MultiplyPoints() {
    const EngineState& state = m_.state[0];
    const int row_bytes = CloudRowBytes(job_.dim), depths = CloudDepths(job_.dim), planes = PlanesOf(job_);
    const float factor = ProductFactor(job_, scale(), state.point_scale);
    const int last_tile = (size(1) - 1) / kCloudTile;
    // Code that runs once takes longer to arrive than to run: there is one copy of it for all rows and columns.
#pragma unroll 1
    for (int g = 0; g < S::kGroups; ++g) {
      for (int depth = 0; depth < depths; ++depth) {
        const int64_t tile = min(g * S::kChunk / kCloudTile, last_tile);
        __syncthreads();  // The points before have been multiplied.
        CopyPoints((tile * depths + depth) * planes, row_bytes, planes);
        __syncthreads();
        const int steps = min(kDepth / 16, static_cast<int>(CeilDiv(job_.dim - depth * kDepth, 16)));
#pragma unroll 1
        for (int r0 = 0; r0 < S::kRows; r0 += 8) {
          MultiplyRows(r0, depth, steps, row_bytes, planes);
          __syncwarp();
          AddStageTo(r0, g, depth == 0, factor);
          __syncwarp();  // The stage is free.
        }
      }
    }
    __syncthreads();  // The stages are parts again.
  }
  __device__ void CopyPoints(int64_t plane, int row_bytes, int planes) {
    const char* from = member_.template At<char>(job_.at.halves[1]) + plane * kCloudTile * row_bytes;
    const int bytes = S::kChunk * row_bytes;
    for (int p = 0; p < planes; ++p) {
      for (int at = 16 * threadIdx.x; at < bytes; at += 16 * S::kBlockThreads) {
        CopyAsync16(m_.points + p * bytes + at, from + p * kCloudTile * row_bytes + at);
      }
    }
    CommitCopies();
    WaitForCopies<0>();
  }
  // Rows r0 .. r0 + 7 of this warp times the chunk's points, into the warp's stage.
  __device__ void MultiplyRows(int r0, int depth, int steps, int row_bytes, int planes) {
    const int plane_bytes = S::kChunk * row_bytes;
    const int64_t i = min(first_row() + Row(r0) + lane_ / 4, size(0) - 1);
    const char* own = member_.template At<char>(job_.at.halves[0]) +
                      (i / kCloudTile * CloudDepths(job_.dim) + depth) * planes * kCloudTile * row_bytes;
    float acc[S::kChunk / 16][4];
#pragma unroll
    for (int t = 0; t < S::kChunk / 16; ++t) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0;
    uint32_t next[2][2];  // Of the rows: read ahead.
    ReadRowHalves(own, static_cast<int>(i % kCloudTile), 0, row_bytes, planes, next);
#pragma unroll 1
    for (int k = 0; k < steps; ++k) {
      const uint32_t b[2][2] = {{next[0][0], next[0][1]}, {next[1][0], next[1][1]}};
      if (k + 1 < steps) ReadRowHalves(own, static_cast<int>(i % kCloudTile), k + 1, row_bytes, planes, next);
#pragma unroll
      for (int t = 0; t < S::kChunk / 16; ++t) {
        const char* place = m_.points + SwizzledAt(16 * t + lane_ % 16, 2 * k + lane_ / 16, row_bytes);
        uint32_t high[4], low[4];
        LoadMatrices(place, high);
        if (planes == 2) {
          LoadMatrices(place + plane_bytes, low);
          MultiplyHalves(low, b[0][0], b[0][1], acc[t]);
          MultiplyHalves(high, b[1][0], b[1][1], acc[t]);
        }
        MultiplyHalves(high, b[0][0], b[0][1], acc[t]);
      }
    }
    float* stage = m_.stage[warp_];
#pragma unroll
    for (int t = 0; t < S::kChunk / 16; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        stage[(lane_ % 4 * 2 + e % 2) * (S::kChunk + 4) + 16 * t + lane_ / 4 + e / 2 * 8] = acc[t][e];
      }
    }
  }
  // 16 coordinates of a row, as a product's fragment.
  __device__ void ReadRowHalves(const char* tile, int row, int k, int row_bytes, int planes,
                                uint32_t (&to)[2][2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const char* at = tile + SwizzledAt(row, 2 * k + half, row_bytes) + lane_ % 4 * 4;
      to[0][half] = __ldg(reinterpret_cast<const uint32_t*>(at));
      to[1][half] = planes == 2 ? __ldg(reinterpret_cast<const uint32_t*>(at + kCloudTile * row_bytes)) : 0;
    }
  }
  // To registers, which are known by constants.
  __device__ void AddStageTo(int r0, int g, bool first, float factor) {
#pragma unroll
    for (int group = 0; group < S::kGroups; ++group) {
#pragma unroll
      for (int row = 0; row < S::kRows; row += 8) {
        if (group == g && row == r0) AddStage(row, group, first, factor);
      }
    }
  }
  __device__ void AddStage(int r0, int g, bool first, float factor) {
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      float e[S::kWidth], old[S::kWidth];
      Read(m_.stage[warp_] + r * (S::kChunk + 4) + lane_ * S::kWidth, e);
      if (!first) ReadEntries(r0 + r, g, old);
#pragma unroll
      for (int k = 0; k < S::kWidth; ++k) e[k] = first ? e[k] * factor : fmaf(e[k], factor, old[k]);
      WriteEntries(e, r0 + r, g);
    }
  }
};

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_EXPONENTS_CUH_
