// A problem in the registers of a block, or of a cluster of blocks: its densities, and what is frozen into them.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_CUH_

#include <type_traits>

#include "kernels/cuda/transport_on_chip_sums.cuh"

namespace sinkhorn {
namespace cuda {

// The frame of columns that only fill the last tile: densities are nothing there. A power of two, which a float holds.
constexpr double kAbsent = -0x1p99;

// By one thread. Called, not inlined: the densities need the registers. Of what becomes exponents by a factor that is a
// float, `scale` is what that says: or else all costs were off by a part of themselves.
template <typename Memory>
static __device__ __noinline__ void SetEpsilon(double epsilon, Memory* memory) {
  using Factor = decltype(memory->factor);
  const bool exact = std::is_same_v<Factor, double>;
  const double scale = kLog2E / epsilon, unit = memory->unit;
  const Factor factor = static_cast<Factor>(exact ? unit / epsilon : unit * scale);
  memory->epsilon = epsilon;
  memory->factor = factor;
  memory->scale = exact ? scale : factor / unit;
  for (int side = 0; side < 2; ++side) memory->damping[side] = DampingOf(epsilon, memory->rho[side]);
}

// Densities of a thread, and what the block shares.
template <Source kSource, int kTiles>
class OnChipBlock : public OnChipSums<kSource, kTiles> {
 public:
  using Base = OnChipSums<kSource, kTiles>;
  using Base::Base;
  using typename Base::Memory;
  using typename Base::S;
  // Exponents that are read from memory, where they stay, rather than made in the place of densities.
  static constexpr bool kExact = kSource == Source::kExact;

 protected:
  using Base::engine;
  using Base::first_row;
  using Base::InitSums;
  using Base::IsOwner;
  using Base::job_;
  using Base::lane_;
  using Base::m_;
  using Base::member;
  using Base::OfOwner;
  using Base::Owned;
  using Base::OwnedColumn;
  using Base::OwnerOf;
  using Base::Read;
  using Base::scale;
  using Base::size;
  using Base::Spread;
  using Base::state;
  using Base::warp_;
  using Base::Write;

  // ---- Where things are -------------------------------------------------------------------------------------------

  // Of the block, that this warp's r is: eight at least lie side by side.
  __device__ int Row(int r) const {
    if constexpr (S::kPaired) return warp_ % 4 * 16 + warp_ / 4 * 8 + r;
    if constexpr (S::kWarpgroups > 0) return r / 16 * 16 * S::kWarps + warp_ * 16 + r % 16;
    return warp_ * S::kRows + r;
  }
  // The row of this warp that CombineRow leaves to this lane, and whether it is the first of those that have it.
  __device__ int RowOf() const { return Row(lane_ / (32 / S::kRows)); }
  __device__ bool IsRowsFirstLane() const { return lane_ % (32 / S::kRows) == 0; }
  __device__ bool IsRow(int row) const { return first_row() + row < size(0); }
  // The first of this lane's group g.
  __device__ int Column(int g) const { return g * S::kChunk + lane_ * S::kWidth; }
  // That have columns; whether those after kSure do.
  __device__ int Groups() const { return S::kGroups == 1 ? 1 : (size(1) + S::kChunk - 1) / S::kChunk; }
  __device__ bool HasUnsure() const { return S::kSure < S::kGroups && size(1) > S::kSure * S::kChunk; }
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

  // Adds exponents z of row r, group g, times `factor`, to `terms`; kExact.
  __device__ void AddExact(int r, int g, double factor, double (&terms)[S::kWidth]) const {
    const int row = min(first_row() + Row(r), size(0) - 1), columns = ExactColumns(job_, engine());
    const double* z = member().template At<double>(job_.at.exact[engine()]) + int64_t{row} * columns;
    const auto* pairs = reinterpret_cast<const double2*>(z + min(Column(g), columns - S::kWidth));
#pragma unroll
    for (int k = 0; k < S::kWidth; k += 2) {
      const double2 pair = pairs[k / 2];
      terms[k] = fma(pair.x, factor, terms[k]);
      terms[k + 1] = fma(pair.y, factor, terms[k + 1]);
    }
  }

  // ---- Beginnings -------------------------------------------------------------------------------------------------

  // What the block needs of its member. Loads come together, before the first store; `meanwhile()` while they are under
  // way. `first`: the block has solved nothing yet.
  template <typename Meanwhile>
  __device__ void Load(bool first, Meanwhile meanwhile) {
    static_assert(S::kBlockRows <= S::kBlockThreads, "a thread has a row at most");
    const int parity = state()->parity;
    const Entry row = LoadEntry(0, parity, threadIdx.x < S::kBlockRows ? first_row() + threadIdx.x : size(0));
    const double row_shift = row.there ? member().Shift(engine(), 0, first_row() + threadIdx.x) : 0;
    const double shift = IsOwner() && OwnedColumn() < size(1) ? member().Shift(engine(), 1, OwnedColumn()) : 0;
    Entry columns[S::kOwn];
#pragma unroll
    for (int k = 0; k < S::kOwn; ++k) columns[k] = LoadEntry(1, parity, threadIdx.x + k * S::kBlockThreads);
    meanwhile();
    if (threadIdx.x < S::kBlockRows) {
      m_.rows.phi[threadIdx.x] = row.phi;
      m_.rows.shift[threadIdx.x] = row_shift;
      m_.rows.mass[threadIdx.x] = static_cast<float>(row.mass);
      m_.rows.log_mass[threadIdx.x] = static_cast<float>(row.log_mass + m_.log_size[0]);
    }
    if (IsOwner()) m_.shift[Owned()] = shift;
#pragma unroll
    for (int k = 0; k < S::kOwn; ++k) {
      const int j = threadIdx.x + k * S::kBlockThreads;
      m_.phi[j] = columns[k].phi;
      // So that times a scaling it is finite: see FreezePotential.
      m_.mass[j] = columns[k].mass < 0x1p90 ? static_cast<float>(columns[k].mass) : NAN;
      m_.log_mass[j] = static_cast<float>(columns[k].log_mass + m_.log_size[1]);
    }
    const bool voids = __syncthreads_or(row.there && row.mass == 0);
    if (threadIdx.x == 0) {
      m_.state[0] = *state();
      m_.discard = m_.unsafe = 0;
      m_.voids = voids ? 1 : 0;
      m_.unit = 1;  // MakeExponents will know it.
      for (int side = 0; side < 2; ++side) m_.rho[side] = RhoOf(job_, engine(), side);
      SetEpsilon(m_.state[0].epsilon, &m_);
    }
    if constexpr (S::kCluster) {
      InitSums(first);
      SyncCluster();  // All have read what the first will overwrite, and all may be sent to.
    }
    __syncthreads();
  }

  // Frames at phi, scalings what is left of it; then exponents become densities. Columns' weights are finite or NaN, so
  // that rows' sums are numbers in all warps or in none: those go on by log-sum-exps together. Infinite ones would make
  // NaN of densities that are 0 alone.
  __device__ void FreezePotential(double term, float mass, float* frame, float* scaling, float* weight) const {
    constexpr double kMostLeft = 30;
    *frame = static_cast<float>(term);
    const double left = fmin(fmax(term - *frame, -100.0), 100.0);
    *scaling = exp2f(static_cast<float>(left));
    *weight = fabs(left) <= kMostLeft ? mass * *scaling : NAN;
  }
  // `fresh`: rows' potentials are still unknown, and their frames make the largest density of each 1.
  __device__ void MakeDensities(int parity, bool fresh) {
    __syncthreads();
    const double reference = m_.phi[0];
    for (int k = threadIdx.x; k < S::kBlockRows; k += S::kBlockThreads) {
      FreezePotential((m_.rows.phi[k] + reference) * scale(), m_.rows.mass[k], &m_.rows.frame[k],
                      &m_.rows.scaling[parity][k], &m_.rows.weight[parity][k]);
    }
    for (int j = threadIdx.x; j < S::kMost; j += S::kBlockThreads) {
      float scaling;
      const double term = j < size(1) ? (m_.phi[j] - reference) * scale() : kAbsent;
      FreezePotential(term, m_.mass[j], &m_.frame[j], &scaling, &m_.weight[parity][j]);
      if (S::kShared || OwnerOf(j) == m_.rank) m_.scaling[parity][S::kShared ? j : OfOwner(j)] = scaling;
    }
    if (threadIdx.x == 0) m_.reference = reference;
    __syncthreads();
    float largest = 0;
    if constexpr (kExact) {
      if (fresh) largest = LargestOfRow();
    } else {
      largest = AddColumnFrames();
    }
    if (fresh && IsRowsFirstLane()) {
      const int row = RowOf();
      m_.rows.frame[row] = -largest;
      m_.rows.scaling[parity][row] = 1;
      m_.rows.weight[parity][row] = m_.rows.mass[row];
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < S::kRows; ++r) {
      const float row = m_.rows.frame[Row(r)];
#pragma unroll
      for (int g = 0; g < S::kGroups; ++g) {
        float e[S::kWidth];
        if constexpr (kExact) {
          FramedExponents(r, g, row, e);
        } else {
          ReadEntries(r, g, e);
#pragma unroll
          for (int k = 0; k < S::kWidth; ++k) e[k] += row;
        }
        // What has no mass may have any density, but neither infinity nor NaN.
#pragma unroll
        for (int k = 0; k < S::kWidth; ++k) e[k] = FastExp2(fminf(e[k], 126.0f));
        WriteEntries(e, r, g);
      }
    }
  }
  // To exponents; then the largest of row RowOf().
  __device__ float AddColumnFrames() {
    const float factor = m_.factor;
    float largest[S::kRows];
#pragma unroll
    for (int r = 0; r < S::kRows; ++r) largest[r] = static_cast<float>(kVoid);
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      float column[S::kWidth];
      Read(m_.frame + Column(g), column);
#pragma unroll
      for (int r = 0; r < S::kRows; ++r) {
        float e[S::kWidth];
        ReadEntries(r, g, e);
#pragma unroll
        for (int k = 0; k < S::kWidth; ++k) largest[r] = fmaxf(largest[r], e[k] = fmaf(e[k], factor, column[k]));
        WriteEntries(e, r, g);
      }
    }
    return CombineRow(largest, [](float a, float b) { return fmaxf(a, b); });
  }
  // kExact: exponents in the frames of columns and in `row`.
  __device__ void FramedExponents(int r, int g, double row, float (&e)[S::kWidth]) const {
    float column[S::kWidth];
    Read(m_.frame + Column(g), column);
    double z[S::kWidth];
#pragma unroll
    for (int k = 0; k < S::kWidth; ++k) z[k] = column[k] + row;
    AddExact(r, g, 1, z);
#pragma unroll
    for (int k = 0; k < S::kWidth; ++k) e[k] = static_cast<float>(z[k]);
  }
  // kExact: as AddColumnFrames, of entries that are not there yet.
  __device__ float LargestOfRow() const {
    float largest[S::kRows];
#pragma unroll
    for (int r = 0; r < S::kRows; ++r) {
      largest[r] = static_cast<float>(kVoid);
#pragma unroll
      for (int g = 0; g < S::kGroups; ++g) {
        float e[S::kWidth];
        FramedExponents(r, g, 0, e);
#pragma unroll
        for (int k = 0; k < S::kWidth; ++k) largest[r] = fmaxf(largest[r], e[k]);
      }
    }
    return CombineRow(largest, [](float a, float b) { return fmaxf(a, b); });
  }
  // What row RowOf() of this warp has over its lanes: halves of the rows change hands until one is left.
  template <int kCount = S::kRows / 2, typename Combine>
  __device__ float CombineRow(float (&s)[S::kRows], Combine combine) const {
    constexpr int kLane = 32 * kCount / S::kRows;
    const bool upper = (lane_ & kLane) != 0;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const float send = upper ? s[k] : s[k + kCount], keep = upper ? s[k + kCount] : s[k];
      s[k] = combine(keep, __shfl_xor_sync(0xffffffffu, send, kLane));
    }
    if constexpr (kCount > 1) {
      return CombineRow<kCount / 2>(s, combine);
    } else {
      for (int lane = 16 / S::kRows; lane > 0; lane /= 2) {
        s[0] = combine(s[0], __shfl_xor_sync(0xffffffffu, s[0], lane));
      }
      return s[0];
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

 private:
  struct Entry {
    bool there;
    double phi, mass, log_mass;
  };
  __device__ Entry LoadEntry(int side, int parity, int i) const {
    if (i >= size(side)) return {false, 0, 0, kVoid};
    const int measure = MeasureOf(engine(), side);
    return {true, member().phi(engine(), parity, side)[i], member().mass(measure)[i], member().log_mass(measure)[i]};
  }
  __device__ float* HeldAt(int r, int g) const {
    return m_.held[((r - (S::kRows - S::kHeld)) * S::kGroups + g) * S::kWidth] + S::kWidth * threadIdx.x;
  }

  float t_[S::kRows - S::kHeld][S::kColumns];
};

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_CUH_
