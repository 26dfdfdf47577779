// A problem in the registers of a block, or of a cluster of blocks: where its densities lie, what is frozen into them,
// and sums of columns over blocks.
//
// A block has `rows` rows and all columns; a warp has rows of its own (those that a warpgroup's products give it, where
// there is one), a lane kWidth columns side by side of each 32 kWidth. Each block looks after the potentials of `owned`
// columns: it alone has the cluster's sum of them. Of two blocks each looks after all columns: they exchange sums, and
// what follows from them need not travel.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_ON_CHIP_CUH_

#include "kernels/cuda/transport_cloud.cuh"
#include "kernels/cuda/transport_cluster.cuh"
#include "kernels/cuda/transport_rows.cuh"

namespace sinkhorn {
namespace cuda {

// The frame of columns that only fill the last tile: densities are nothing there. A power of two, which a float holds.
constexpr double kAbsent = -0x1p99;

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
  static constexpr int kGroups = kColumns / kWidth;          // Of kWidth columns.
  static constexpr int kHeld = kTiles == 16 ? 3 : 0;         // Rows of a warp that lie in shared memory.
  static constexpr int kOwn = kMost / kBlockThreads;         // Columns of a thread where threads share them out.
  static constexpr bool kShared = !kCluster || kTiles == 4;  // All blocks look after all columns.
  static constexpr bool kSplit = kCluster && !kShared;       // Sums travel in two halves of the columns.
  static constexpr int kOwnedMost = kShared ? kMost : kMost / 4;
  // Sums that a block hears: of its columns, from all blocks, which may be nearly twice as many as those that own some.
  static constexpr int kHeard = kSplit ? 2 * kMost : kCluster ? kMost : 1;
  static constexpr int kChunk = 32 * kWidth;  // Columns whose exponents are made together.
  // Groups that iterations go through whatever columns there are: the last quarter may be left out, where it is long.
  static constexpr int kSure = kTiles == 16 ? kGroups * 3 / 4 : kGroups;
  // Products by warpgroups: each has 64 rows a pass, and all columns of a chunk or, where two have the same rows, half.
  static constexpr int kWarpgroups = kWarps / 4;
  static constexpr bool kPaired = kWarpgroups * 64 > kBlockRows;
  static constexpr int kPasses = kWarpgroups == 0 || kPaired ? 1 : kBlockRows / (64 * kWarpgroups);
};

template <int kSize>
struct SideMemory {
  double phi[kSize], shift[kSize];
  float log_mass[kSize], mass[kSize];
  float frame[kSize];       // phi in units of epsilon, base 2, seen from `reference`.
  float scaling[2][kSize];  // By parity: u
  float weight[2][kSize];   // mass * scaling
};

// A plane of some columns' halves, whose copy is number `step`.
struct PlaneOfChunk {
  unsigned step;
  int g, depth, plane;
};

template <Source kSource, typename S>
struct OnChipMemory {
  static constexpr bool kHasPoints = kSource == Source::kProducts || kSource == Source::kDistances;
  static constexpr int kStageRow = S::kChunk + (S::kWarpgroups > 0 ? 8 : 4);  // Rows begin in banks of their own.
  static constexpr int kStage = kHasPoints ? 8 * kStageRow : 1;               // Floats: 8 rows of a chunk.
  static constexpr int kPlane = kHasPoints ? S::kChunk * 2 * kDepth : 8;      // Bytes: a half of a chunk's points.
  static constexpr int kRowPlane = kSource == Source::kProducts && S::kWarpgroups > 0 ? S::kBlockRows * 2 * kDepth : 8;
  static constexpr int kAlignment = kRowPlane > 8 ? kPlaneAlignment : 16;
  // Of a chunk's planes: two, which are multiplied together, and the next two where there is room for them.
  static constexpr int kBuffers = kRowPlane == 8 || S::kGroups == 1 || S::kHeld > 0 ? 2 : 4;
  // Where room is short, what is gathered lies where points did, which iterations need no more.
  static constexpr bool kGathersInPoints = kHasPoints && S::kHeld > 0;
  // Halves of points: of chunks, planes at a time, and of the rows.
  alignas(kAlignment) char points[kBuffers][kPlane];
  alignas(kAlignment) char row_points[2 * kRowPlane];
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
  alignas(16) float gathered[2][kGathersInPoints ? 1 : S::kHeard];
  double errors[S::kWarps], gathered_error[2][kOnChipRanksMost];
  // Barriers.
  uint64_t gathering[2], spreading[2][2];  // By turns; by halves of the blocks whose columns come.
  uint64_t copied[kBuffers], rows_copied;  // Of points, of row_points.
  PlaneOfChunk next_copy;
  // Where a warpgroup's rows and columns are, of the larger halves and of the first buffer (MatrixAt).
  struct {
    uint64_t rows, columns;
  } matrices[S::kWarpgroups > 0 ? S::kWarpgroups : 1];
  EngineState state[2];
  int discard;  // The residual says that the solve was finished before this iteration.
  int unsafe;   // Sums of P at the end are no use.
  double reference;
  float factor;  // From entries to exponents, before frames are added.
  double scale, epsilon, rho[2], damping[2];
  int64_t index;  // Of the member.
  int engine;
  bool symmetric;  // Both sides move from where both were.
  // Of the problem's blocks: which this is, how many there are, for how many there is room in what is gathered; how
  // many of them, the first ones, own columns, and how many each of those owns (a power of two); this block's first,
  // their number, and bytes that it hears of them.
  int rank, ranks, slots, owners, owned, owned_log2, first_own, own, heard_bytes;
  // Clouds as halves (transport_cloud.cuh), by side.
  int planes, depths, row_bytes;
  const char* halves[2];

  __device__ float* Gathered(int buffer) {
    static_assert(!kGathersInPoints || S::kHeard * sizeof(float) <= kPlane, "room");
    return kGathersInPoints ? reinterpret_cast<float*>(points[buffer]) : gathered[buffer];
  }
};

// Dynamic shared memory of a block, with room to align it.
template <Source kSource, typename S>
constexpr size_t OnChipBytes() {
  return sizeof(OnChipMemory<kSource, S>) + alignof(OnChipMemory<kSource, S>);
}

// Densities of a thread, and what the block shares.
template <Source kSource, int kTiles>
class OnChipBlock {
 public:
  using S = Shape<kTiles>;
  using Memory = OnChipMemory<kSource, S>;
  // Exponents that are read from memory, where they stay, rather than made in the place of densities.
  static constexpr bool kExact = kSource == Source::kExact;
  using Number = std::conditional_t<kExact, double, float>;  // An exponent.

  // `job` has the engine's sizes.
  __device__ OnChipBlock(const Job& job, int64_t index, int engine, const OnChipShape& shape, Memory* memory)
      : job_(job), m_(*memory), warp_(threadIdx.x / 32), lane_(threadIdx.x % 32) {
    if (threadIdx.x == 0) {
      m_.index = index;
      m_.engine = engine;
      m_.symmetric = IsSymmetric(job, engine);
      m_.rank = S::kCluster ? ClusterRank() : 0;
      m_.ranks = shape.ranks;
      m_.slots = OnChipSlots(shape.ranks);
      m_.owned = shape.owned;
      m_.owned_log2 = __ffs(shape.owned) - 1;
      m_.owners = S::kMost >> m_.owned_log2;
      m_.own = m_.rank < m_.owners ? m_.owned : 0;
      m_.first_own = m_.rank * m_.own;
      m_.heard_bytes = m_.ranks * m_.own * static_cast<int>(sizeof(float));
      m_.planes = PlanesOf(job);
      m_.depths = CloudDepths(job.dim);
      m_.row_bytes = CloudRowBytes(job.dim);
      for (int side = 0; side < 2; ++side) {
        m_.halves[side] = member().template At<char>(job.at.halves[MeasureOf(engine, side)]);
      }
    }
    __syncthreads();
  }

 protected:
  // ---- Where things are -------------------------------------------------------------------------------------------

  __device__ Member member() const { return {job_, m_.index}; }
  __device__ double scale() const { return m_.scale; }
  __device__ int engine() const { return m_.engine; }
  __device__ int size(int side) const { return job_.size[side]; }
  __device__ EngineState* state() const { return member().state(engine()); }
  __device__ int first_row() const { return m_.rank * S::kBlockRows; }
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
  // The block that owns a column, and which of its columns that is.
  __device__ int OwnerOf(int column) const { return column >> m_.owned_log2; }
  __device__ int OfOwner(int column) const { return column & (m_.owned - 1); }
  // The owned column, of the block, that this thread knows the sum of after Gather; and of all. In a block that owns
  // none, some column, which it knows nothing of.
  __device__ int Owned() const { return S::kShared ? threadIdx.x : OfOwner(threadIdx.x); }
  __device__ int OwnedColumn() const { return S::kShared ? threadIdx.x : m_.first_own + Owned(); }
  __device__ bool OwnsColumns() const { return S::kShared || m_.own > 0; }
  __device__ bool IsOwner() const { return S::kShared || static_cast<int>(threadIdx.x) < m_.own; }

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

  // Adds exponents z of row r, group g to `terms`; kExact, or while entries are exponents divided by m_.factor.
  __device__ void AddExponents(int r, int g, Number (&terms)[S::kWidth]) const {
    if constexpr (kExact) {
      const int row = min(first_row() + Row(r), size(0) - 1), columns = ExactColumns(job_);
      const double* z = member().template At<double>(job_.at.exact) + int64_t{row} * columns;
      const auto* pairs = reinterpret_cast<const double2*>(z + min(Column(g), columns - S::kWidth));
#pragma unroll
      for (int k = 0; k < S::kWidth; k += 2) {
        const double2 pair = pairs[k / 2];
        terms[k] += pair.x, terms[k + 1] += pair.y;
      }
    } else {
      float e[S::kWidth];
      ReadEntries(r, g, e);
#pragma unroll
      for (int k = 0; k < S::kWidth; ++k) terms[k] = fmaf(e[k], m_.factor, terms[k]);
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
      m_.rows.log_mass[threadIdx.x] = static_cast<float>(row.log_mass);
    }
    if (IsOwner()) m_.shift[Owned()] = shift;
#pragma unroll
    for (int k = 0; k < S::kOwn; ++k) {
      const int j = threadIdx.x + k * S::kBlockThreads;
      m_.phi[j] = columns[k].phi;
      m_.mass[j] = static_cast<float>(columns[k].mass);
      m_.log_mass[j] = static_cast<float>(columns[k].log_mass);
    }
    if (threadIdx.x == 0) {
      m_.state[0] = *state();
      m_.discard = m_.unsafe = 0;
      m_.epsilon = job_.solver.epsilon;
      m_.scale = kLog2E / m_.epsilon;
      for (int side = 0; side < 2; ++side) {
        const double rho = m_.rho[side] = RhoOf(job_, engine(), side);
        m_.damping[side] = isinf(rho) ? 1 : 1 / (1 + m_.epsilon / rho);
      }
    }
    if constexpr (S::kCluster) {
      if (threadIdx.x == 0 && first) {
        InitReceiving(m_.gathering);
        for (auto& barriers : m_.spreading) InitReceiving(barriers);
      }
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
    Number z[S::kWidth];
#pragma unroll
    for (int k = 0; k < S::kWidth; ++k) z[k] = column[k] + row;
    AddExponents(r, g, z);
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

  // ---- Over the cluster -------------------------------------------------------------------------------------------

  // Of kCount columns from `column` on, the sums over this block's warps, or the largest, from `parts`.
  template <bool kLargest, int kCount>
  __device__ void CombineParts(int column, float (&own)[kCount]) const {
    Read(m_.parts[0] + column, own);
#pragma unroll
    for (int w = 1; w < S::kWarps; ++w) {
      float part[kCount];
      Read(m_.parts[w] + column, part);
#pragma unroll
      for (int k = 0; k < kCount; ++k) own[k] = kLargest ? fmaxf(own[k], part[k]) : own[k] + part[k];
    }
  }
  // Column Owned()'s sum over all warps of all blocks, or the largest. Errors are added up too, into heard_error_, if
  // they are `told`. Parts may be written again once something has been Spread.
  template <bool kLargest>
  __device__ float Gather(bool told = false, double error = 0) {
    if constexpr (S::kSplit) {
      TellOwners<kLargest, S::kOwn>(0);
      return Hear<kLargest>(told, error);
    } else {
      heard_error_ = error;
      float own[S::kOwn];
      CombineParts<kLargest>(S::kOwn * threadIdx.x, own);
      if constexpr (S::kCluster) {
        const int buffer = gathered_ & 1, column = S::kOwn * threadIdx.x;
        uint64_t* barrier = &m_.gathering[buffer];
        if (threadIdx.x == 0) ExpectReceived(barrier, S::kMost * sizeof(float) + (told ? sizeof(double) : 0));
        Send(m_.Gathered(buffer) + column, own, barrier, m_.rank ^ 1);
        if (told && threadIdx.x == 0) Send(&m_.gathered_error[buffer][0], error, barrier, m_.rank ^ 1);
        AwaitReceived(barrier, gathered_ >> 1 & 1);
        const float other = m_.Gathered(buffer)[column];
        own[0] = kLargest ? fmaxf(own[0], other) : own[0] + other;
        if (told) heard_error_ = error + m_.gathered_error[buffer][0];
        ++gathered_;
      }
      return own[0];
    }
  }
  // What this block's parts of kCount columns a thread, from `first` on, come to: to the blocks that own them.
  template <bool kLargest, int kCount>
  __device__ void TellOwners(int first) {
    const int buffer = gathered_ & 1, column = first + kCount * threadIdx.x;
    float own[kCount];
    CombineParts<kLargest>(column, own);
    float* to = m_.Gathered(buffer) + m_.rank * m_.owned + OfOwner(column);
    Send(to, own, &m_.gathering[buffer], OwnerOf(column));
  }
  // What is heard of blocks that there are not, before the first Hear of sums.
  __device__ void ClearSlots() {
    for (int k = m_.ranks * m_.owned + threadIdx.x; k < m_.slots * m_.owned; k += S::kBlockThreads) {
      m_.Gathered(0)[k] = m_.Gathered(1)[k] = 0;
    }
  }
  template <int kSlots>
  __device__ static float AddSlots(const float* first, int owned) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < kSlots; k += 4) {
      const float* four = first + k * owned;
      sum += (four[0] + four[owned]) + (four[2 * owned] + four[3 * owned]);
    }
    return sum;
  }
  // What all blocks have told of this one's columns; of none, something that is no use.
  template <bool kLargest>
  __device__ float Hear(bool told, double error) {
    const int buffer = gathered_ & 1;
    uint64_t* barrier = &m_.gathering[buffer];
    if (threadIdx.x == 0) ExpectReceived(barrier, m_.heard_bytes + (told ? m_.ranks * sizeof(double) : 0));
    if (told && threadIdx.x < m_.ranks) Send(&m_.gathered_error[buffer][m_.rank], error, barrier, threadIdx.x);
    // All wait for what comes after this wait: the rest is fetched before.
    const int slots = m_.slots, ranks = m_.ranks, owned = m_.owned;
    const float* first = m_.Gathered(buffer) + Owned();
    AwaitReceived(barrier, gathered_ >> 1 & 1);
    float sum = static_cast<float>(kVoid);
    if constexpr (kLargest) {
      for (int k = 0; k < ranks; ++k) sum = fmaxf(sum, first[k * owned]);
    } else {
      sum = slots == 16  ? AddSlots<16>(first, owned)
            : slots == 8 ? AddSlots<8>(first, owned)
                         : AddSlots<4>(first, owned);
    }
    heard_error_ = 0;
    for (int k = 0; k < m_.ranks && told; ++k) heard_error_ += m_.gathered_error[buffer][k];
    ++gathered_;
    return sum;
  }
  // What column Owned() has now to all blocks' `to`, an array of all columns. Afterwards it is there.
  template <typename T>
  __device__ void Spread(T value, T* to) {
    if constexpr (S::kSplit) {
      BeginSpread(value, to);
      AwaitSpread(0);
      AwaitSpread(1);
    } else {
      to[threadIdx.x] = value;
    }
    __syncthreads();  // It is there; and parts have been read, which the cluster knew before this block's threads.
  }
  // The same, there for a thread that has called AwaitSpread for the column's half.
  template <typename T>
  __device__ void BeginSpread(T value, T* to) {
    if constexpr (sizeof(T) == sizeof(float)) {
      EndSpread(value, PlanSpread(to));
    } else {
      const uint64_t* barrier = ExpectSpread<T>();
      const int first = OwnerOf(threadIdx.x) * S::kOwn;
      for (int k = 0; k < S::kOwn && m_.own > 0; ++k) {
        Send(&to[OwnedColumn()], value, barrier, first + k);
        const int other = first + k + m_.owners;
        if (other < m_.ranks) Send(&to[OwnedColumn()], value, barrier, other);
      }
    }
  }
  // The same in two steps, of which the first needs no value. Each of the threads that know it tells kOwn blocks of it,
  // and perhaps those that come as many as there are owners later: of floats, one block kOwn of them side by side.
  struct SpreadPlan {
    uint32_t to[2], barrier[2];  // In one block, and in another;
    int blocks;                  // or in fewer.
  };
  __device__ SpreadPlan PlanSpread(float* to) {
    const uint64_t* barrier = ExpectSpread<float>();
    const float* own = &to[OwnedColumn() / S::kOwn * S::kOwn];
    const int rank = OwnerOf(threadIdx.x) * S::kOwn + lane_ % S::kOwn, other = rank + m_.owners;
    const int blocks = m_.own == 0 ? 0 : other < m_.ranks ? 2 : 1;
    return {{RemoteAddress(own, rank), RemoteAddress(own, other)},
            {RemoteAddress(barrier, rank), RemoteAddress(barrier, other)},
            blocks};
  }
  __device__ void EndSpread(float value, const SpreadPlan& plan) {
    float values[S::kOwn];
    const int from = lane_ / S::kOwn * S::kOwn;
#pragma unroll
    for (int k = 0; k < S::kOwn; ++k) values[k] = __shfl_sync(0xffffffffu, value, from + k);
    if (plan.blocks > 0) SendTo(plan.to[0], values, plan.barrier[0]);
    if (plan.blocks > 1) SendTo(plan.to[1], values, plan.barrier[1]);
  }
  // The barrier that this block's columns tell, of either half of them. `T`: the type that comes.
  template <typename T>
  __device__ const uint64_t* ExpectSpread() {
    uint64_t(&barriers)[2] = m_.spreading[spread_++ & 1];
    if (threadIdx.x == 0) {
      for (uint64_t& barrier : barriers) ExpectReceived(&barrier, S::kMost / 2 * sizeof(T));
    }
    return &barriers[m_.rank >= m_.owners / 2 ? 1 : 0];
  }
  __device__ void AwaitSpread(int half) const {
    const unsigned last = spread_ - 1;
    AwaitReceived(&m_.spreading[last & 1][half], last >> 1 & 1);
  }

  const Job& job_;
  Memory& m_;
  const int warp_, lane_;
  unsigned gathered_ = 0, spread_ = 0;
  double heard_error_ = 0;

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
