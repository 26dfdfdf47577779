// A problem in the registers of a block, or of a cluster of blocks: where its densities lie, how they are made, and
// sums of columns over blocks.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_CUH_

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/transport_cluster.cuh"
#include "kernels/cuda/transport_rows.cuh"

namespace sinkhorn {
namespace cuda {

// How the densities of up to 64 kTiles rows and columns lie in registers.
template <int kTiles>
struct Shape {
  static constexpr int kRanks = kTiles <= 2 ? 1 : kTiles / 4 * kTiles / 4 * 2;  // Blocks of a cluster.
  static constexpr int kWarps = kTiles <= 2 ? 8 : 16;
  static constexpr int kMost = kTiles * kTile;  // Columns.
  static constexpr int kColumns = kMost / 32;   // Of a lane.
  static constexpr int kBlockRows = kMost / kRanks, kRows = kBlockRows / kWarps;
  static constexpr int kWidth = kColumns < 4 ? kColumns : 4;  // Columns of a lane side by side.
  static constexpr int kDepth = 32;                           // Coordinates of a step.
};

template <int kSize>
struct SideMemory {
  double phi[kSize], shift[kSize];
  float log_mass[kSize], mass[kSize];
  float frame[kSize];  // phi in units of epsilon, base 2, seen from `reference`.
  // By parity:
  float scaling[2][kSize];  // u or v
  float weight[2][kSize];   // mass * scaling
};

template <typename S>
struct OnChipMemory {
  SideMemory<S::kBlockRows> rows;
  SideMemory<S::kMost> columns;
  float parts[S::kWarps][S::kMost];              // Of column sums.
  float column_points[S::kDepth][S::kMost + 4];  // Coordinates, while densities are made.
  float row_points[S::kBlockRows][S::kDepth];
  float received[2][S::kRanks][S::kRanks > 1 ? S::kMost : 1];
  double errors[S::kWarps], received_error[2][S::kRanks];
  uint64_t arrived[2];  // Barriers of what is received.
  EngineState state[2];
  int discard;  // The residual says that the solve was finished before this iteration.
  double reference;
  double scale, epsilon, rho[2];
};

// Densities of a thread, and what the block shares.
template <bool kDense, int kTiles>
class OnChipBlock {
 public:
  using S = Shape<kTiles>;
  using Memory = OnChipMemory<S>;
  static constexpr int kBlockThreads = 32 * S::kWarps;

  __device__ OnChipBlock(const Job& job, int64_t index, int rank, Memory* memory)
      : job_(job), member_{job, index}, m_(*memory), rank_(rank), warp_(threadIdx.x / 32), lane_(threadIdx.x % 32) {}

 protected:
  // ---- Where things are -------------------------------------------------------------------------------------------

  __device__ double scale() const { return m_.scale; }
  __device__ int size(int side) const { return job_.size[side]; }
  __device__ int first_row() const { return rank_ * S::kBlockRows; }
  // Of the block, that this warp's r is.
  __device__ int Row(int r) const { return warp_ * S::kRows + r; }
  __device__ bool IsRow(int row) const { return first_row() + row < size(0); }
  // That this lane's c is.
  __device__ int Column(int c) const { return c / S::kWidth * 32 * S::kWidth + lane_ * S::kWidth + c % S::kWidth; }
  __device__ bool HasColumn() const { return threadIdx.x < S::kMost; }  // Threads have a column each.

  // This lane's columns of an array.
  __device__ void ReadColumns(const float* from, float (&to)[S::kColumns]) const {
#pragma unroll
    for (int c = 0; c < S::kColumns; c += S::kWidth) {
      if constexpr (S::kWidth == 4) {
        const float4 v = *reinterpret_cast<const float4*>(from + Column(c));
        to[c] = v.x, to[c + 1] = v.y, to[c + 2] = v.z, to[c + 3] = v.w;
      } else {
        const float2 v = *reinterpret_cast<const float2*>(from + Column(c));
        to[c] = v.x, to[c + 1] = v.y;
      }
    }
  }
  __device__ void WriteColumns(const float (&from)[S::kColumns], float* to) const {
#pragma unroll
    for (int c = 0; c < S::kColumns; c += S::kWidth) {
      if constexpr (S::kWidth == 4) {
        *reinterpret_cast<float4*>(to + Column(c)) = make_float4(from[c], from[c + 1], from[c + 2], from[c + 3]);
      } else {
        *reinterpret_cast<float2*>(to + Column(c)) = make_float2(from[c], from[c + 1]);
      }
    }
  }

  // ---- Beginnings -------------------------------------------------------------------------------------------------

  template <int kSize>
  __device__ void LoadSide(int side, int first, SideMemory<kSize>* to) {
    const int parity = member_.state(0)->parity;
    for (int k = threadIdx.x; k < kSize; k += kBlockThreads) {
      const int i = first + k;
      const bool there = i < size(side);
      to->phi[k] = there ? member_.phi(0, parity, side)[i] : 0;
      to->shift[k] = there ? member_.Shift(0, side, i) : 0;
      to->mass[k] = there ? static_cast<float>(member_.mass(side)[i]) : 0;
      to->log_mass[k] = static_cast<float>(there ? member_.log_mass(side)[i] : kVoid);
    }
  }
  __device__ void Load() {
    if (threadIdx.x == 0) {
      m_.state[0] = *member_.state(0);
      m_.discard = 0;
      m_.epsilon = job_.solver.epsilon;
      m_.scale = kLog2E / m_.epsilon;
      m_.rho[0] = job_.solver.rho_a;
      m_.rho[1] = job_.solver.rho_b;
    }
    LoadSide(0, first_row(), &m_.rows);
    LoadSide(1, 0, &m_.columns);
    if constexpr (S::kRanks > 1) {
      if (threadIdx.x == 0) InitReceiving(m_.arrived);
      SyncCluster();  // All have read what the first will overwrite, and all may be sent to.
    }
    __syncthreads();
  }

  // z of this thread's entries, into t_; what lies outside repeats the last row or column.
  __device__ void MakeExponents() {
    if constexpr (kDense) {
      const float factor = static_cast<float>(-scale());
      const int64_t m = size(1), base = job_.in.cost.shared ? 0 : member_.index * size(0) * m;
      if (job_.in.cost.dtype == DType::kFloat32 && m % S::kWidth == 0) return LoadRows(base, factor);
      float* line = m_.parts[warp_];
      __syncthreads();  // Parts have been read.
#pragma unroll
      for (int r = 0; r < S::kRows; ++r) {
        const int64_t row = base + min(first_row() + Row(r), size(0) - 1) * m;
        __syncwarp();
        LoadLine(row, line);
        __syncwarp();
        ReadColumns(line, t_[r]);
#pragma unroll
        for (int c = 0; c < S::kColumns; ++c) t_[r][c] *= factor;
      }
      __syncthreads();  // Parts are free.
    } else {
      MultiplyPoints(static_cast<float>(2 * job_.in.kappa * scale()));
    }
  }
  // Costs in float32, rows of whole kWidths: this thread's own at once. Columns outside are 0.
  __device__ void LoadRows(int64_t base, float factor) {
    const float* costs = static_cast<const float*>(job_.in.cost.data) + base;
#pragma unroll
    for (int r = 0; r < S::kRows; ++r) {
      const float* row = costs + int64_t{min(first_row() + Row(r), size(0) - 1)} * size(1);
#pragma unroll
      for (int c = 0; c < S::kColumns; c += S::kWidth) {
        const bool there = Column(c) < size(1);
        if constexpr (S::kWidth == 4) {
          const float4 v = there ? __ldg(reinterpret_cast<const float4*>(row + Column(c))) : make_float4(0, 0, 0, 0);
          t_[r][c] = v.x * factor, t_[r][c + 1] = v.y * factor;
          t_[r][c + 2] = v.z * factor, t_[r][c + 3] = v.w * factor;
        } else {
          const float2 v = there ? __ldg(reinterpret_cast<const float2*>(row + Column(c))) : make_float2(0, 0);
          t_[r][c] = v.x * factor, t_[r][c + 1] = v.y * factor;
        }
      }
    }
  }
  // A row of costs from entry `first` on, by a warp.
  __device__ void LoadLine(int64_t first, float* line) const {
    const int columns = size(1);
#pragma unroll 1
    for (int j = lane_; j < S::kMost; j += 32) {
      line[j] = LoadFloat(job_.in.cost.dtype, job_.in.cost.data, first + min(j, columns - 1));
    }
  }
  __device__ void MultiplyPoints(float factor) {
    const float* x = member_.template At<float>(job_.at.points32[0]);
    const float* y = member_.template At<float>(job_.at.points32[1]);
    const int dim = job_.dim;
#pragma unroll
    for (int e = 0; e < S::kRows * S::kColumns; ++e) t_[e / S::kColumns][e % S::kColumns] = 0;
    for (int first = 0; first < dim; first += S::kDepth) {
      __syncthreads();  // What is there has been read.
      for (int e = threadIdx.x; e < S::kMost * S::kDepth; e += kBlockThreads) {
        const int k = e % S::kDepth;
        const int64_t j = min(e / S::kDepth, size(1) - 1);
        m_.column_points[k][e / S::kDepth] = first + k < dim ? y[j * dim + first + k] : 0;
      }
      for (int e = threadIdx.x; e < S::kBlockRows * S::kDepth; e += kBlockThreads) {
        const int k = e % S::kDepth;
        const int64_t i = min(first_row() + e / S::kDepth, size(0) - 1);
        m_.row_points[e / S::kDepth][k] = first + k < dim ? x[i * dim + first + k] * factor : 0;
      }
      __syncthreads();
      const int depth = min(S::kDepth, dim - first);
      for (int k = 0; k < depth; ++k) {
        float b[S::kColumns];
        ReadColumns(m_.column_points[k], b);
#pragma unroll
        for (int r = 0; r < S::kRows; ++r) {
          const float a = m_.row_points[Row(r)][k];
#pragma unroll
          for (int c = 0; c < S::kColumns; ++c) t_[r][c] = fmaf(a, b[c], t_[r][c]);
        }
      }
    }
  }

  // Frames at phi, scalings what is left of it; then T.
  template <int kSize>
  __device__ void FreezeSide(double reference, int parity, SideMemory<kSize>* side) {
    for (int k = threadIdx.x; k < kSize; k += kBlockThreads) {
      const double term = (side->phi[k] + reference) * scale();
      const float frame = static_cast<float>(term);
      side->frame[k] = frame;
      const float scaling = exp2f(static_cast<float>(term - frame));
      side->scaling[parity][k] = scaling;
      side->weight[parity][k] = side->mass[k] * scaling;
    }
  }
  __device__ void MakeDensities(int parity) {
    __syncthreads();
    const double reference = m_.columns.phi[0];
    FreezeSide(reference, parity, &m_.rows);
    FreezeSide(-reference, parity, &m_.columns);
    if (threadIdx.x == 0) m_.reference = reference;
    __syncthreads();
    MakeExponents();
    float column[S::kColumns];
    ReadColumns(m_.columns.frame, column);
#pragma unroll
    for (int r = 0; r < S::kRows; ++r) {
      const float row = m_.rows.frame[Row(r)];
#pragma unroll
      for (int c = 0; c < S::kColumns; ++c) {
        // What has no mass may have any density, but not infinity.
        t_[r][c] = FastExp2(fminf(t_[r][c] + (row + column[c]), 126.0f));
      }
    }
  }

  // phi at the present scalings.
  template <int kSize>
  __device__ void ThawSide(double reference, int parity, SideMemory<kSize>* side) {
    for (int k = threadIdx.x; k < kSize; k += kBlockThreads) {
      const double term = side->frame[k] + log2(static_cast<double>(side->scaling[parity][k]));
      side->phi[k] = term / scale() - reference;
    }
  }
  __device__ void FreezePotentials(int parity) {
    __syncthreads();
    ThawSide(m_.reference, parity, &m_.rows);
    ThawSide(-m_.reference, parity, &m_.columns);
    __syncthreads();
  }
  __device__ void CopyScalings(int from, int to) {
    for (int k = threadIdx.x; k < S::kBlockRows; k += kBlockThreads) m_.rows.scaling[to][k] = m_.rows.scaling[from][k];
    for (int k = threadIdx.x; k < S::kMost; k += kBlockThreads) m_.columns.scaling[to][k] = m_.columns.scaling[from][k];
  }

  // ---- Over the cluster -------------------------------------------------------------------------------------------

  // This thread's column over all blocks, from this block's: the sum, or the largest. Errors are added up too, into
  // heard_error_, if they are `told`.
  template <bool kLargest>
  __device__ float Exchange(float own, bool told = false, double error = 0) {
    heard_error_ = error;
    if constexpr (S::kRanks > 1) {
      const int buffer = exchange_ & 1;
      if (threadIdx.x == 0) {
        ExpectReceived(&m_.arrived[buffer], S::kRanks * (S::kMost * sizeof(float) + (told ? sizeof(double) : 0)));
      }
      if (HasColumn()) {
#pragma unroll
        for (int k = 0; k < S::kRanks; ++k) Send(&m_.received[buffer][rank_][threadIdx.x], own, &m_.arrived[buffer], k);
      }
      if (told && threadIdx.x < S::kRanks) {
        Send(&m_.received_error[buffer][rank_], error, &m_.arrived[buffer], threadIdx.x);
      }
      AwaitReceived(&m_.arrived[buffer], exchange_ >> 1 & 1);
      ++exchange_;
      if (HasColumn()) {
        own = m_.received[buffer][0][threadIdx.x];
#pragma unroll
        for (int k = 1; k < S::kRanks; ++k) {
          const float part = m_.received[buffer][k][threadIdx.x];
          own = kLargest ? fmaxf(own, part) : own + part;
        }
      }
      if (told) {
        heard_error_ = m_.received_error[buffer][0];
        for (int k = 1; k < S::kRanks; ++k) heard_error_ += m_.received_error[buffer][k];
      }
    }
    return own;
  }
  // This thread's column over the block's warps.
  template <bool kLargest>
  __device__ float OverWarps() const {
    if (!HasColumn()) return 0;
    float all = m_.parts[0][threadIdx.x];
#pragma unroll
    for (int w = 1; w < S::kWarps; ++w) {
      const float part = m_.parts[w][threadIdx.x];
      all = kLargest ? fmaxf(all, part) : all + part;
    }
    return all;
  }

  const Job& job_;
  const Member member_;
  Memory& m_;
  const int rank_, warp_, lane_;
  int exchange_ = 0;
  double heard_error_ = 0;
  float t_[S::kRows][S::kColumns];
};

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_CUH_
