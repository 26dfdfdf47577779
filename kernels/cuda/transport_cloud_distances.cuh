// Clouds in float32 (transport_cloud_step.cuh) whose cost is |x - y|, the root of |x|^2 + |y|^2 - 2 <x, y>. What that
// loses in distances of near points is made good: their distances are made anew, from differences of coordinates.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_CLOUD_DISTANCES_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_CLOUD_DISTANCES_CUH_

#include "kernels/cuda/transport_cloud_step.cuh"

namespace sinkhorn {
namespace cuda {

// Squares are wrong by 3e-7 of the largest, r^2; so are distances D by 3e-7 r^2 / (2 D), which may be 3e-5 epsilon.
constexpr float kNear = 5e-3f;     // D epsilon / r^2 of near points.
constexpr float kNowhere = 1e30f;  // The square of what is no point.

class DistanceCost {
 public:
  static constexpr bool kIsProduct = false;

  __device__ DistanceCost(const Member& member, const CloudContext& c) {
    __shared__ float squares[SlotsOf(kGroups)][kCloudTile], row_squares[kCloudRows];
    __shared__ Shared shared;
    squares_ = squares;
    row_squares_ = row_squares;
    shared_ = &shared;
    const Job& job = member.job;
    const int own = MeasureOf(c.block.engine, c.own_side), other = MeasureOf(c.block.engine, 1 - c.own_side);
    if (threadIdx.x == 0) {
      const EngineState& state = *member.state(c.block.engine);
      const float radius = static_cast<float>(fmin(64 / state.point_scale, state.cost_max / 2));
      const float near = kNear * radius * radius / static_cast<float>(state.epsilon);
      shared = {member.At<float>(job.at.points32[own]),
                member.At<float>(job.at.points32[other]),
                member.At<double>(job.at.length[other]),
                near * near,
                c.factor / static_cast<float>(c.scale),
                static_cast<float>(-c.scale),
                job.dim};
    }
    const double* mine = member.At<double>(job.at.length[own]);
    if (threadIdx.x < kCloudRows) {
      row_squares[threadIdx.x] = c.IsRow(threadIdx.x) ? static_cast<float>(mine[c.Row(threadIdx.x)]) : kNowhere;
    }
    __syncthreads();
  }
  using Column = float;  // Its square.
  __device__ float Load(const CloudContext& c, int tile) {
    const int j = tile * kCloudTile + static_cast<int>(threadIdx.x) % 128;
    return j < c.columns ? static_cast<float>(shared_->squares[j]) : kNowhere;
  }
  __device__ void Store(int slot, float square) { squares_[slot][threadIdx.x % 128] = square; }
  // Products to -|x - y| log2(e) / epsilon.
  __device__ void Apply(const CloudContext& c, int tile, int slot, float (&acc)[16][4]) {
    const float2* theirs = reinterpret_cast<const float2*>(squares_[slot]) + threadIdx.x % 4;
    const float product = shared_->product, near2 = shared_->near2, factor = shared_->factor;
    const float mine[2] = {row_squares_[Row()], row_squares_[Row() + 8]};
    uint32_t near[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float2 square = theirs[4 * j];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float &e0 = acc[j][2 * row], &e1 = acc[j][2 * row + 1];
        e0 = fmaf(e0, -product, mine[row] + square.x);
        e1 = fmaf(e1, -product, mine[row] + square.y);
        near[row] |= (e0 < near2 ? 1u : 0u) << 2 * j | (e1 < near2 ? 2u : 0u) << 2 * j;
      }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      while (near[row] != 0) {
        const int at = __ffs(near[row]) - 1;
        near[row] &= near[row] - 1;
        const float square = Measure(c.first_row + Row() + 8 * row, tile * kCloudTile + ColumnOf(at));
#pragma unroll
        for (int e = 0; e < 32; ++e) {
          if (e == at) acc[e / 2][2 * row + e % 2] = square;
        }
      }
    }
#pragma unroll
    for (int e = 0; e < 64; ++e) acc[e / 4][e % 4] = Root(acc[e / 4][e % 4]) * factor;
  }

 private:
  struct Shared {
    const float *x, *y;     // Rows' and columns' points, centred.
    const double* squares;  // Of columns.
    float near2, product, factor;
    int dim;
  };
  // Of the block, this thread's first.
  __device__ static int Row() { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4; }
  // Of the tile, this thread's at-th.
  __device__ static int ColumnOf(int at) { return at / 2 * 8 + threadIdx.x % 4 * 2 + at % 2; }
  __device__ float Measure(int64_t i, int64_t j) const {
    const float* x = shared_->x + i * shared_->dim;
    const float* y = shared_->y + j * shared_->dim;
    float square = 0;
#pragma unroll 4
    for (int k = 0; k < shared_->dim; ++k) {
      const float difference = __ldg(x + k) - __ldg(y + k);
      square = fmaf(difference, difference, square);
    }
    return square;
  }

  float (*squares_)[kCloudTile];
  const Shared* shared_;
  const float* row_squares_;
};

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_CLOUD_DISTANCES_CUH_
