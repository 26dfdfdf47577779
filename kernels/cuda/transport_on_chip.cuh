// A problem in the registers of a block, or of a cluster of blocks: where its densities lie, what is frozen into them,
// and sums of columns over blocks.
//
// A block has `rows` rows and all columns; a warp has rows of its own, a lane kWidth columns side by side of each 32
// kWidth. Each block looks after the potentials of `owned` columns: it alone has the cluster's sum of them.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_CUH_

#include "kernels/cuda/transport_cloud.cuh"
#include "kernels/cuda/transport_cluster.cuh"
#include "kernels/cuda/transport_rows.cuh"

namespace sinkhorn {
namespace cuda {

// How the densities of up to 64 kTiles columns lie in a block.
template <int kTiles>
struct Shape {
  static constexpr int kWarps = kTiles == 1 ? 2 : kTiles == 2 ? 4 : 8, kBlockThreads = 32 * kWarps;
  static constexpr int kBlocksPerSm = kTiles == 1 ? 6 : kTiles == 2 ? 2 : 1;
  static constexpr bool kCluster = kTiles > 2;
  static constexpr int kMost = kTiles * kTile;  // Columns.
  static constexpr int kBlockRows = kTiles == 2 || kTiles == 4 ? 2 * kTile : kTile;
  static constexpr int kRows = kBlockRows / kWarps, kColumns = kMost / 32;  // Of a warp; of a lane.
  static constexpr int kWidth = kColumns < 4 ? kColumns : 4;
  static constexpr int kGroups = kColumns / kWidth;   // Of kWidth columns.
  static constexpr int kHeld = kTiles == 16 ? 3 : 0;  // Rows of a warp that lie in shared memory.
  static constexpr int kOwn = kMost / kBlockThreads;  // Columns of a thread where threads share them out.
  static constexpr int kOwnedMost = kTiles == 4 || kTiles <= 2 ? kBlockRows : kMost / 4;
  static constexpr int kChunk = 32 * kWidth;  // Columns whose exponents are made together.
};

template <int kSize>
struct SideMemory {
  double phi[kSize], shift[kSize];
  float log_mass[kSize], mass[kSize];
  float frame[kSize];       // phi in units of epsilon, base 2, seen from `reference`.
  float scaling[2][kSize];  // By parity: u
  float weight[2][kSize];   // mass * scaling
};

template <Source kSource, typename S>
struct OnChipMemory {
  static constexpr bool kDense = kSource == Source::kCosts;
  static constexpr int kStage = kDense ? 1 : 8 * (S::kChunk + 4);  // Floats: 8 rows of a chunk.
  SideMemory<S::kBlockRows> rows;
  // Of all columns:
  double phi[S::kMost];
  alignas(16) float weight[2][S::kMost];
  alignas(16) float frame[S::kMost];  // While iterations are done by log-sum-exps: what columns add to exponents.
  float log_mass[S::kMost], mass[S::kMost];
  // Of those that this block owns:
  double shift[S::kOwnedMost];
  float scaling[2][S::kOwnedMost];
  // Parts of column sums, a line a warp; while densities are made, products on their way.
  union {
    alignas(16) float parts[S::kWarps][S::kMost];
    alignas(16) float stage[S::kWarps][kStage];
  };
  alignas(16) float held[S::kHeld > 0 ? S::kHeld* S::kGroups* S::kWidth : 1][S::kHeld > 0 ? S::kBlockThreads : 1];
  alignas(16) char points[kDense ? 16 : 2 * S::kChunk * 2 * kDepth];  // Halves of a chunk's points.
  alignas(16) float gathered[2][S::kCluster ? S::kMost : 1];
  double errors[S::kWarps], gathered_error[2][kOnChipRanksMost];
  uint64_t gathering[2], spreading[2];  // Barriers.
  EngineState state[2];
  int discard;  // The residual says that the solve was finished before this iteration.
  double reference;
  double scale, epsilon, rho[2];
};

// Densities of a thread, and what the block shares.
template <Source kSource, int kTiles>
class OnChipBlock {
 public:
  using S = Shape<kTiles>;
  using Memory = OnChipMemory<kSource, S>;

  __device__ OnChipBlock(const Job& job, int64_t index, int rank, Memory* memory)
      : job_(job),
        member_{job, index},
        m_(*memory),
        rank_(rank),
        ranks_(S::kCluster ? OnChipShapeOf(job).ranks : 1),
        owned_(S::kCluster ? OnChipShapeOf(job).owned : S::kMost),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32) {}

 protected:
  // ---- Where things are -------------------------------------------------------------------------------------------

  __device__ double scale() const { return m_.scale; }
  __device__ int size(int side) const { return job_.size[side]; }
  __device__ int first_row() const { return rank_ * S::kBlockRows; }
  // Of the block, that this warp's r is.
  __device__ int Row(int r) const { return warp_ * S::kRows + r; }
  __device__ bool IsRow(int row) const { return first_row() + row < size(0); }
  // The first of this lane's group g.
  __device__ int Column(int g) const { return g * S::kChunk + lane_ * S::kWidth; }
  // The owned column, of the block, that this thread knows the sum of after Gather; and of all.
  __device__ int Owned() const { return S::kCluster ? static_cast<int>(threadIdx.x) % owned_ : threadIdx.x; }
  __device__ int OwnedColumn() const { return rank_ * owned_ + Owned(); }
  __device__ bool IsOwner() const { return !S::kCluster || static_cast<int>(threadIdx.x) < owned_; }

  // kCount floats side by side.
  template <int kCount>
  __device__ static void Read(const float* from, float (&to)[kCount]) {
    if constexpr (kCount == 4) {
      const float4 v = *reinterpret_cast<const float4*>(from);
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    } else if constexpr (kCount == 2) {
      const float2 v = *reinterpret_cast<const float2*>(from);
      to[0] = v.x, to[1] = v.y;
    } else {
      to[0] = *from;
    }
  }
  template <int kCount>
  __device__ static void Write(const float (&from)[kCount], float* to) {
    if constexpr (kCount == 4) {
      *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
    } else {
      *reinterpret_cast<float2*>(to) = make_float2(from[0], from[1]);
    }
  }
  // Entries of row r, group g.
  __device__ void ReadEntries(int r, int g, float (&e)[S::kWidth]) const {
    if (r >= S::kRows - S::kHeld) {
      Read(HeldAt(r, g), e);
    } else {
#pragma unroll
      for (int k = 0; k < S::kWidth; ++k) e[k] = t_[r][g * S::kWidth + k];
    }
  }
  __device__ void WriteEntries(const float (&e)[S::kWidth], int r, int g) {
    if (r >= S::kRows - S::kHeld) {
      Write(e, HeldAt(r, g));
    } else {
#pragma unroll
      for (int k = 0; k < S::kWidth; ++k) t_[r][g * S::kWidth + k] = e[k];
    }
  }

  // ---- Beginnings -------------------------------------------------------------------------------------------------

  __device__ void Load() {
    const int parity = member_.state(0)->parity;
    for (int k = threadIdx.x; k < S::kBlockRows; k += S::kBlockThreads) {
      const int i = first_row() + k;
      const bool there = i < size(0);
      m_.rows.phi[k] = there ? member_.phi(0, parity, 0)[i] : 0;
      m_.rows.shift[k] = there ? member_.Shift(0, 0, i) : 0;
      m_.rows.mass[k] = there ? static_cast<float>(member_.mass(0)[i]) : 0;
      m_.rows.log_mass[k] = static_cast<float>(there ? member_.log_mass(0)[i] : kVoid);
    }
    for (int j = threadIdx.x; j < S::kMost; j += S::kBlockThreads) {
      const bool there = j < size(1);
      m_.phi[j] = there ? member_.phi(0, parity, 1)[j] : 0;
      m_.mass[j] = there ? static_cast<float>(member_.mass(1)[j]) : 0;
      m_.log_mass[j] = static_cast<float>(there ? member_.log_mass(1)[j] : kVoid);
    }
    if (IsOwner()) m_.shift[Owned()] = OwnedColumn() < size(1) ? member_.Shift(0, 1, OwnedColumn()) : 0;
    if (threadIdx.x == 0) {
      m_.state[0] = *member_.state(0);
      m_.discard = 0;
      m_.epsilon = job_.solver.epsilon;
      m_.scale = kLog2E / m_.epsilon;
      m_.rho[0] = job_.solver.rho_a;
      m_.rho[1] = job_.solver.rho_b;
    }
    if constexpr (S::kCluster) {
      if (threadIdx.x == 0) InitReceiving(m_.gathering), InitReceiving(m_.spreading);
      SyncCluster();  // All have read what the first will overwrite, and all may be sent to.
    }
    __syncthreads();
  }

  // Frames at phi, scalings what is left of it; then exponents become densities.
  __device__ void FreezePotential(double term, float mass, float* frame, float* scaling, float* weight) const {
    *frame = static_cast<float>(term);
    *scaling = exp2f(static_cast<float>(term - *frame));
    *weight = mass * *scaling;
  }
  __device__ void MakeDensities(int parity) {
    __syncthreads();
    const double reference = m_.phi[0];
    for (int k = threadIdx.x; k < S::kBlockRows; k += S::kBlockThreads) {
      FreezePotential((m_.rows.phi[k] + reference) * scale(), m_.rows.mass[k], &m_.rows.frame[k],
                      &m_.rows.scaling[parity][k], &m_.rows.weight[parity][k]);
    }
    for (int j = threadIdx.x; j < S::kMost; j += S::kBlockThreads) {
      float scaling;
      FreezePotential((m_.phi[j] - reference) * scale(), m_.mass[j], &m_.frame[j], &scaling, &m_.weight[parity][j]);
      if (j / owned_ == rank_) m_.scaling[parity][j % owned_] = scaling;
    }
    if (threadIdx.x == 0) m_.reference = reference;
    __syncthreads();
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      float column[S::kWidth];
      Read(m_.frame + Column(g), column);
#pragma unroll
      for (int r = 0; r < S::kRows; ++r) {
        const float row = m_.rows.frame[Row(r)];
        float e[S::kWidth];
        ReadEntries(r, g, e);
        // What has no mass may have any density, but neither infinity nor NaN.
#pragma unroll
        for (int k = 0; k < S::kWidth; ++k) e[k] = FastExp2(fminf(e[k] + (row + column[k]), 126.0f));
        WriteEntries(e, r, g);
      }
    }
  }
  // phi at the present scalings.
  __device__ void FreezePotentials(int parity) {
    __syncthreads();
    const double reference = m_.reference;
    for (int k = threadIdx.x; k < S::kBlockRows; k += S::kBlockThreads) {
      m_.rows.phi[k] = Thawed(m_.rows.frame[k], m_.rows.scaling[parity][k]) - reference;
    }
    const double phi = Thawed(m_.frame[OwnedColumn()], m_.scaling[parity][Owned()]) + reference;
    Spread(phi, m_.phi);
  }
  __device__ double Thawed(float frame, float scaling) const {
    return (frame + log2(static_cast<double>(scaling))) / scale();
  }

  // ---- Over the cluster -------------------------------------------------------------------------------------------

  // Column Owned()'s sum over all warps of all blocks, or the largest, from `parts`. Errors are added up too, into
  // heard_error_, if they are `told`. Parts may be written again once something has been Spread.
  template <bool kLargest>
  __device__ float Gather(bool told = false, double error = 0) {
    const auto combine = [](float a, float b) { return kLargest ? fmaxf(a, b) : a + b; };
    heard_error_ = error;
    float own[S::kOwn];
    Read(m_.parts[0] + S::kOwn * threadIdx.x, own);
#pragma unroll
    for (int w = 1; w < S::kWarps; ++w) {
      float part[S::kOwn];
      Read(m_.parts[w] + S::kOwn * threadIdx.x, part);
#pragma unroll
      for (int k = 0; k < S::kOwn; ++k) own[k] = combine(own[k], part[k]);
    }
    if constexpr (S::kCluster) {
      const int buffer = gathered_ & 1, column = S::kOwn * threadIdx.x;
      uint64_t* barrier = &m_.gathering[buffer];
      if (threadIdx.x == 0) ExpectReceived(barrier, S::kMost * sizeof(float) + (told ? ranks_ * sizeof(double) : 0));
      Send(&m_.gathered[buffer][rank_ * owned_ + column % owned_], own, barrier, column / owned_);
      if (told && threadIdx.x < ranks_) Send(&m_.gathered_error[buffer][rank_], error, barrier, threadIdx.x);
      AwaitReceived(barrier, gathered_ >> 1 & 1);
      ++gathered_;
      own[0] = kLargest ? static_cast<float>(kVoid) : 0;
      for (int k = 0; k < ranks_; k += 2) {  // There are 2, 4, 8 or 16.
        const float* two = &m_.gathered[buffer][k * owned_ + Owned()];
        own[0] = combine(own[0], combine(two[0], two[owned_]));
      }
      if (told) {
        heard_error_ = m_.gathered_error[buffer][0];
        for (int k = 1; k < ranks_; ++k) heard_error_ += m_.gathered_error[buffer][k];
      }
    }
    return own[0];
  }
  // What column Owned() has now to all blocks' `to`, an array of all columns. Afterwards it is there.
  template <typename T>
  __device__ void Spread(T value, T* to) {
    if constexpr (S::kCluster) {
      uint64_t* barrier = &m_.spreading[spread_ & 1];
      if (threadIdx.x == 0) ExpectReceived(barrier, S::kMost * sizeof(T));
      // Each of the threads that know it tells kOwn blocks.
      const int first = static_cast<int>(threadIdx.x) / owned_ * S::kOwn;
#pragma unroll
      for (int k = 0; k < S::kOwn; ++k) Send(&to[OwnedColumn()], value, barrier, first + k);
      AwaitReceived(barrier, spread_ >> 1 & 1);
      ++spread_;
    } else {
      to[threadIdx.x] = value;
    }
    __syncthreads();  // It is there; and parts have been read, which the cluster knew before this block's threads.
  }

  const Job& job_;
  const Member member_;
  Memory& m_;
  const int rank_, ranks_, owned_, warp_, lane_;
  unsigned gathered_ = 0, spread_ = 0;
  double heard_error_ = 0;

 private:
  __device__ float* HeldAt(int r, int g) const {
    return m_.held[((r - (S::kRows - S::kHeld)) * S::kGroups + g) * S::kWidth] + S::kWidth * threadIdx.x;
  }

  float t_[S::kRows - S::kHeld][S::kColumns];
};

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_CUH_
