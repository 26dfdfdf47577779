// Backward of a member that is held on the chip by the implicit modes: as in normalization_implicit.cuh, by conjugate
// gradients in float32, whose steps are passes, too.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_IMPLICIT_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_IMPLICIT_CUH_

#include "kernels/cuda/normalization_held_forward.cuh"
#include "kernels/cuda/normalization_plain_softmax.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

template <class Shape, Lead kLead>
class HeldImplicit : protected HeldForward<Shape, Work::kImplicit, kLead> {
  using Base = HeldForward<Shape, Work::kImplicit, kLead>;

 protected:
  using Base::Base;
  using Base::Buffer;
  using Base::C;
  using Base::Columns;
  using Base::FinishRow;
  using Base::FirstRow;
  using Base::Further;
  using Base::HasRow;
  using Base::Inside;
  using Base::kColumns;
  using Base::kColumnsFirst;
  using Base::kGroup;
  using Base::kSoftmax;
  using Base::kWarpColumns;
  using Base::lane_;
  using Base::Line;
  using Base::Pass;
  using Base::Read;
  using Base::ReadVector;
  using Base::row_sum_;
  using Base::Rows;
  using Base::Side;
  using Base::task_;
  using Base::ToSoftmax;
  using Base::u_;
  using Base::Vector;
  using Base::Write;

  // alpha, and v beta in the vector. False: too ill-conditioned for float32.
  __device__ bool SolveImplicit(float row_bar, const float (&col_bars)[C]) {
    constexpr int kMostSteps = 64;
    constexpr float kSolved = 1e-7f, kLeastCurvature = 0.1f;
    inverse_ = !HasRow() ? 0.0f : task_.backward == BackwardMode::kImplicitUnit ? 1.0f : 1 / row_sum_;
    float x[C], q[C];
    ReadVector(x);
    __syncthreads();  // The rows' parts are read.
    if constexpr (kColumnsFirst) {
      (void)Pass(x, q, [&](float) { return u_; });
#pragma unroll
      for (int k = 0; k < kMine; ++k) Mine(kV, k) = Vector()[MyColumn(k)];
      Columns(q, [](int, float sum) { return sum; });
      const bool unit = task_.backward == BackwardMode::kImplicitUnit;
#pragma unroll
      for (int k = 0; k < kMine; ++k) Mine(kSum, k) = unit ? 1.0f : Mine(kV, k) * Vector()[MyColumn(k)];
      SetVector([&](int k) { return Mine(kV, k); });
    }
    const float side = row_bar * inverse_ * u_;
    (void)Pass(x, q, [&](float) { return side; });
#pragma unroll
    for (int c = 0; c < C; ++c) q[c] = fmaf(-x[c], q[c], col_bars[c]);
#pragma unroll
    for (int k = 0; k < kMine; ++k) Mine(kV, k) = Vector()[MyColumn(k)];
    Columns(q, [](int, float sum) { return sum; });
    // The residual: the right-hand side without its part along the constant.
    float total[1] = {};
#pragma unroll
    for (int k = 0; k < kMine; ++k) total[0] += Vector()[MyColumn(k)];
    BlockSums(total, 0);
    float norm[1] = {};
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
      const float residual = MyColumn(k) < Side() ? Vector()[MyColumn(k)] - total[0] / Side() : 0.0f;
      Mine(kX, k) = 0;
      Mine(kResidual, k) = Mine(kDirection, k) = residual;
      norm[0] = fmaf(residual, residual, norm[0]);
    }
    BlockSums(norm, 4);
    const float goal = norm[0] * kSolved * kSolved;
    bool good = norm[0] < FLT_MAX;
#pragma unroll 1
    for (int step = 0; norm[0] > goal && good; ++step) {
      SetVector([&](int k) { return Mine(kV, k) * Mine(kDirection, k); });
      ReadVector(x);
      (void)Pass(x, q, [&](float product) { return u_ * u_ * inverse_ * product; });
      Columns(q, [](int, float product) { return product; });
      float sums[3] = {};  // Of direction * product, direction^2, the product.
      float product[kMine];
#pragma unroll
      for (int k = 0; k < kMine; ++k) {
        const float direction = Mine(kDirection, k);
        const float own = kColumnsFirst ? Mine(kSum, k) * direction : direction;
        product[k] = MyColumn(k) < Side() ? fmaf(-Mine(kV, k), Vector()[MyColumn(k)], own) : 0.0f;
        sums[0] = fmaf(direction, product[k], sums[0]);
        sums[1] = fmaf(direction, direction, sums[1]);
        sums[2] += product[k];
      }
      BlockSums(sums, 0);
      good = step < kMostSteps && sums[0] > kLeastCurvature * sums[1];
      const float stride = norm[0] / sums[0], share = sums[2] / Side();
      float next[1] = {};
#pragma unroll
      for (int k = 0; k < kMine; ++k) {
        const float residual = MyColumn(k) < Side() ? fmaf(-stride, product[k] - share, Mine(kResidual, k)) : 0.0f;
        Mine(kX, k) = fmaf(stride, Mine(kDirection, k), Mine(kX, k));
        Mine(kResidual, k) = residual;
        next[0] = fmaf(residual, residual, next[0]);
      }
      BlockSums(next, 4);
      const float turn = next[0] / norm[0];
#pragma unroll
      for (int k = 0; k < kMine; ++k) Mine(kDirection, k) = fmaf(turn, Mine(kDirection, k), Mine(kResidual, k));
      norm[0] = next[0];
    }
    SetVector([&](int k) { return Mine(kV, k) * Mine(kX, k); });
    ReadVector(x);
    (void)Pass(x, q, [&](float product) {
      alpha_ = fmaf(-u_, product, row_bar) * inverse_;
      return 0.0f;
    });
    return good && norm[0] <= goal;
  }

  // dL/dlogits = (dP - alpha_i - beta_j) P. True: this thread's part is finite.
  __device__ bool FinishImplicit() {
    const HeldRows<Shape> rows = Rows();
    float v[C], shares[C], infinite = 0;
    ReadVector(shares);
    __syncthreads();  // The vector is free.
    SetVector([&](int k) { return Mine(kV, k); });
    ReadVector(v);
    Line()[lane_] = u_;
    __syncwarp();  // The multipliers are there.
#pragma unroll 1
    for (int first = 0; first < Shape::kWarpRows; first += kGroup) {
      rows.Fetch(task_.cotangent, first, kGroup, Buffer(0));
      const float* const k_rows = this->RowsOfK(first);
      rows.Arrived();
#pragma unroll
      for (int k = 0; k < kGroup; ++k) {
        const float u = Line()[first + k], alpha = __shfl_sync(kFullMask, alpha_, first + k);
#pragma unroll
        for (int h = 0; h < Shape::kQuads; ++h) {
          float g[4], d[4];
          this->ReadQuad(k_rows + k * kWarpColumns, h, g);
          this->ReadQuad(Buffer(k), h, d);
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            g[c] *= u * fmaf(d[c] - alpha, v[4 * h + c], -shares[4 * h + c]);
            if (FirstRow() + first + k < Side() && Inside(4 * h + c)) infinite = fmaf(g[c], 0.0f, infinite);
          }
          this->WriteQuad(g, Buffer(k), h);
        }
      }
      if constexpr (kSoftmax) ChainGroup(first, &infinite);
      rows.Store(task_.gradient, first, kGroup, Buffer(0));
      __syncwarp();  // The buffers are free.
    }
    return infinite == 0;
  }

 private:
  // Columns of P sum up to 1, or to kSum. A thread has some columns' numbers, in every block of a cluster the same;
  // they are kept where rows come and go.
  static constexpr int kMine = kColumns / Shape::kThreadCount;
  enum Number { kX, kResidual, kDirection, kV, kSum };
  __device__ float& Mine(Number number, int k) const { return Buffer(number)[32 * k + lane_]; }
  __device__ static int MyColumn(int k) { return static_cast<int>(threadIdx.x) + Shape::kThreadCount * k; }
  // The vector becomes number(k), of the own columns.
  template <class NumberOf>
  __device__ void SetVector(NumberOf number) {
#pragma unroll
    for (int k = 0; k < kMine; ++k) Vector()[MyColumn(k)] = MyColumn(k) < Side() ? number(k) : 0.0f;
    __syncthreads();  // The vector is there.
  }
  // Sums over the block. Uses of the same `first` need a barrier between them, and a pass.
  template <int kCount>
  __device__ void BlockSums(float (&x)[kCount], int first) const {
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      x[e] = WarpSum(x[e]);
      if (lane_ == 0) Line()[first + e] = x[e];
    }
    __syncthreads();  // The warps' are there.
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      x[e] = 0;
#pragma unroll
      for (int w = 0; w < Shape::W; ++w) x[e] += Line()[32 * (w - this->warp_) + first + e];
    }
  }

  // From dL/dlog K, a group of rows in the buffer, to dL/dlogits.
  __device__ void ChainGroup(int first, float* infinite) const {
    const float offset = static_cast<float>(task_.offset);
    __syncwarp();  // The rows of K are read.
    Rows().Fetch(task_.logits, first, kGroup, Further(0));
    Rows().Arrived();
    float totals[kGroup];
#pragma unroll
    for (int k = 0; k < kGroup; ++k) {
      float s[C], g[C];
      ToSoftmax(first + k, Further(k), s);
      Read(Buffer(k), g);
      totals[k] = 0;
#pragma unroll
      for (int c = 0; c < C; ++c) {
        g[c] = OfSoftmax<true>(g[c], s[c], offset);
        totals[k] = fmaf(s[c], g[c], totals[k]);
      }
      Write(g, Buffer(k));
    }
    const float total = this->template AcrossWarps<Sum>(Scatter<kGroup>(totals, lane_), first / kGroup % 2);
#pragma unroll
    for (int k = 0; k < kGroup; ++k) {
      float g[C];
      Read(Buffer(k), g);
      FinishRow(total, first + k, Further(k), g, infinite);
      Write(g, Buffer(k));
    }
  }

  float inverse_ = 0, alpha_ = 0;  // Of the own row.
};

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_HELD_IMPLICIT_CUH_
