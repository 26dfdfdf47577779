// Gradients to the points and projections of clouds whose exponents are kept in memory (transport_exponents.cu), or are
// there in a frame (transport_exact.cu), on Hopper's matrix units. Of more than kDepth coordinates, since fewer take no
// longer to multiply than to read; in frames, of products of doubles, of more than half as many.
//
// A block has kGradientRows rows of a side, up to kKeptParts parts of kDepth coordinates of the other cloud, and a
// share of its tiles: evenly (transport_gradient_parts.cuh), or, of few, what the others of its cluster leave. Each
// warp brings the exponents of its own 16 rows through a ring of its own and makes matrix fragments of half a tile's,
// which its warpgroup multiplies by the tile's points as in transport_gradient.cu, while it makes the next. The second
// side's rows are columns in memory: what a warp reads of them lies side by side, in as many of the memory's rows as
// it wants columns.
#include "kernels/cuda/transport_cloud_stream.cuh"
#include "kernels/cuda/transport_gradient_parts.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_stream.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

constexpr int kKeptParts = 2;  // Of the coordinates, that a block has at most: registers hold no more sums.
constexpr int kHalfTile = kCloudTile / 2;

// Groups of parts of the coordinates; and, evenly, blocks of each.
__host__ __device__ inline int KeptGroups(const Job& job) {
  return static_cast<int>(CeilDiv(CloudDepths(job.dim), kKeptParts));
}
__host__ __device__ inline int EvenKeptParts(const Job& job) { return kProcessors / KeptGroups(job); }

// A warp's ring of exponents, as far as it can be known before: so many columns of the pass to a stage; the bytes from
// one of the memory's rows to the next, of the first side's and of the second's, so that threads meet in no bank.
template <int kPlanes>
struct KeptStages {
  static constexpr bool kShort = kPlanes == 1;
  static constexpr int kColumns = kHalfTile / 2, kStages = kShort ? 6 : 4;
  static constexpr int kFirstBytes = kShort ? 80 : 160, kSecondBytes = kShort ? 48 : 80;
  static constexpr int kStageBytes = kColumns * kSecondBytes;
  static constexpr int kBytes = kThreads / 32 * kStages * kStageBytes;
  static_assert(16 * kFirstBytes <= kStageBytes, "room for either");
};

// A ring of half tiles' points: a part of the coordinates has a plane for each half, and the parts lie side by side.
template <int kPlanes>
struct PointStages {
  static constexpr int kStages = 4;
  static constexpr int kPlaneBytes = kHalfTile * 2 * kDepth, kPartBytes = kPlanes * kPlaneBytes;
  static constexpr int kStageBytes = kKeptParts * kPartBytes, kBytes = kStages * kStageBytes;
};

#if SINKHORN_HOPPER

constexpr int kKeptTerms = 24;  // Tiles whose columns' terms a block has at once.

__device__ inline float2 LoadPair(const float* from) { return *reinterpret_cast<const float2*>(from); }
__device__ inline float2 LoadPair(const __half* from) {
  return __half22float2(*reinterpret_cast<const __half2*>(from));
}

__device__ inline float2 LoadPair(const Density* from) {
  float t[2];
  DensityPair::Unpack(*reinterpret_cast<const uint32_t*>(from), t);
  return {__log2f(t[0]), __log2f(t[1])};
}

// The exponents of a warp's own 16 rows, kSide's, which are rows of memory (0) or its columns (1).
template <class Stages, typename T, int kSide>
class KeptRing {
  static constexpr int kNumber = static_cast<int>(sizeof(T)), kChunk = 16 / kNumber;  // Numbers of a copy.
  // Of a stage: copies beside each other, of one of the memory's rows; rows at a time; times.
  static constexpr int kChunks = (kSide == 0 ? Stages::kColumns : 16) / kChunk, kLines = 32 / kChunks;
  static constexpr int kTimes = (kSide == 0 ? 16 : Stages::kColumns) / kLines;
  static constexpr int kRowBytes = kSide == 0 ? Stages::kFirstBytes : Stages::kSecondBytes;

 public:
  // Of rows from `first_row` on, which is the warp's first, and the context's tiles; `memory`: all warps', behind the
  // beginning of the dynamic shared memory.
  __device__ KeptRing(const Member& member, int first_row, const CloudContext& c, int memory)
      : ring_(memory + static_cast<int>(threadIdx.x) / 32 * (Stages::kStages * Stages::kStageBytes)),
        row_bytes_(StreamColumns(member.job, 0) * kNumber),
        left_((c.last_tile - c.first_tile) * (kCloudTile / Stages::kColumns)) {
    const int first_column = c.first_tile * kCloudTile, first = kSide == 0 ? first_row : first_column;
    const int column = (kSide == 0 ? first_column : first_row) + Lane() % kChunks * kChunk;
    from_ = reinterpret_cast<const char*>(NumbersOf<T>(member, 0) + column) + int64_t{first + Line()} * row_bytes_;
    rows_ = member.job.size[0] - first;
    for (stage_ = 0; stage_ + 1 < Stages::kStages; ++stage_) Copy(stage_);
  }
  // From a row of this thread's to its second.
  static constexpr int kRowStep = kSide == 0 ? 8 : 1;
  __device__ static int FirstOfLane() { return Lane() / 4 * (kSide == 0 ? 1 : 2); }
  // The next stage's columns, as products of matrices lie; then Copy.
  __device__ void Next(float (&z)[Stages::kColumns / 8][4]) {
    WaitForCopies<Stages::kStages - 2>();
    __syncwarp();  // It is there, and the stage before has been read.
    if (++stage_ == Stages::kStages) stage_ = 0;
    const int quarter = Lane() % 4, eighth = Lane() / 4;
    const char* const at =
        DynamicShared() + ring_ + stage_ * Stages::kStageBytes +
        (kSide == 0 ? eighth * kRowBytes + 2 * quarter * kNumber : 2 * quarter * kRowBytes + 2 * eighth * kNumber);
#pragma unroll
    for (int j = 0; j < Stages::kColumns / 8; ++j) {
      // Of the first side pairs are of a row, of the second of a column.
      const char* const pair = at + j * 8 * (kSide == 0 ? kNumber : kRowBytes);
      const float2 a = LoadPair(reinterpret_cast<const T*>(pair));
      const float2 b = LoadPair(reinterpret_cast<const T*>(pair + kRowStep * kRowBytes));
      z[j][0] = a.x;
      z[j][1] = kSide == 0 ? a.y : b.x;
      z[j][2] = kSide == 0 ? b.x : a.y;
      z[j][3] = b.y;
    }
  }
  // In the place of those before.
  __device__ void Copy() { Copy(stage_ == 0 ? Stages::kStages - 1 : stage_ - 1); }

 private:
  __device__ static int Lane() { return static_cast<int>(threadIdx.x) % 32; }
  // Of the memory's rows, the first of this thread's copies, behind the stage's first.
  __device__ static int Line() { return Lane() / kChunks; }
  // The columns that are not yet on their way, if there are such. Rows behind the last are as that.
  __device__ void Copy(int stage) {
    if (left_ > 0) {
      const uint32_t to = SharedAddress(DynamicShared()) + ring_ + stage * Stages::kStageBytes + Line() * kRowBytes +
                          16 * (Lane() % kChunks);
      if (rows_ >= kLines * kTimes) {
#pragma unroll
        for (int k = 0; k < kTimes; ++k) {
          CopyAsync16(to + k * kLines * kRowBytes, from_ + int64_t{k * kLines} * row_bytes_);
        }
      } else {
#pragma unroll 1
        for (int k = 0; k < kTimes; ++k) {
          const int behind = max(Line() + k * kLines - (rows_ - 1), 0);
          CopyAsync16(to + k * kLines * kRowBytes, from_ + int64_t{k * kLines - behind} * row_bytes_);
        }
      }
      --left_;
      from_ += kSide == 0 ? Stages::kColumns * kNumber : Stages::kColumns * row_bytes_;
      if (kSide == 1) rows_ -= Stages::kColumns;
    }
    CommitCopies();
  }

  const int ring_, row_bytes_;
  int left_, rows_;   // Stages that are not yet on their way; the memory's rows from the next one's first on.
  const char* from_;  // Of this thread's first copy.
  int stage_;         // The one that was read last.
};

// What a block does next: of the coordinates so many parts from the first on.
struct KeptPiece : EvenPiece {
  int first_part, parts;
};

// The columns' points, half a tile after the other.
template <int kPlanes>
class PointRing {
 public:
  using Stages = PointStages<kPlanes>;

  __device__ PointRing(const CloudContext& c, const KeptPiece& piece, uint64_t* full, uint64_t* empty)
      : c_(c), piece_(piece), full_(full), empty_(empty) {}
  // By one thread, before all others may go on.
  __device__ static void Init(uint64_t* full, uint64_t* empty) {
    for (int stage = 0; stage < Stages::kStages; ++stage) {
      InitBarrier(&full[stage], kPlanes * kKeptParts);
      InitBarrier(&empty[stage], kGradientGroups);
    }
    FenceBarriers();
  }
  // The tiles of a piece, which the context has; what was asked for before has been read.
  __device__ void Begin() {
    first_ = step_ = static_cast<int>(OfWarp(step_));
    for (int k = 0; k < Stages::kStages; ++k) Copy(k % kGradientGroups, k);
  }
  // Where the next ones lie, once they are there.
  __device__ uint32_t Next() const {
    WaitForPhase(&full_[step_ % Stages::kStages], step_ / Stages::kStages & 1);
    return Base() + step_ % Stages::kStages * Stages::kStageBytes;
  }
  // This warpgroup has read them. In turns, one asks for what takes the place of those before, so that it need not wait
  // for the other.
  __device__ void Release() {
    if (threadIdx.x % 128 == 0) Arrive(&empty_[step_ % Stages::kStages]);
    if (step_ > first_) Copy(step_ % kGradientGroups, Stages::kStages - 1);
    ++step_;
  }
  // Behind the stages, from the beginning of the dynamic shared memory.
  __device__ static int End() { return static_cast<int>(Base() - SharedAddress(DynamicShared())) + Stages::kBytes; }

 private:
  __device__ static uint32_t Base() {
    return (SharedAddress(DynamicShared()) + kPlaneAlignment - 1) / kPlaneAlignment * kPlaneAlignment;
  }
  // Begins the copies of the stage that is so many ahead, if there is something for it, when it is free: a plane by
  // each warp of a warpgroup, since a thread takes hundreds of cycles to begin a copy.
  __device__ void Copy(int group, int ahead) {
    const int plane = static_cast<int>(threadIdx.x) / 32 - 4 * group;
    if (threadIdx.x % 32 == 0 && plane >= 0 && plane < kPlanes * kKeptParts) {
      const int step = step_ + ahead, stage = step % Stages::kStages, at = step - first_;
      const int tile = c_.first_tile + at / 2;
      if (tile < c_.last_tile) {
        if (step >= Stages::kStages) WaitForPhase(&empty_[stage], (step / Stages::kStages - 1) & 1);
        if (plane < piece_.parts * kPlanes) {
          const char* const from = c_.ColumnTile(tile, piece_.first_part, kPlanes);
          const uint32_t to = Base() + stage * Stages::kStageBytes + plane * Stages::kPlaneBytes;
          ArriveExpecting(&full_[stage], Stages::kPlaneBytes);
          CopyBulk(to, from + (2 * plane + at % 2) * Stages::kPlaneBytes, Stages::kPlaneBytes, &full_[stage]);
        } else {
          Arrive(&full_[stage]);
        }
      }
    }
    __syncwarp();
  }

  const CloudContext& c_;
  const KeptPiece& piece_;
  uint64_t* const full_;
  uint64_t* const empty_;
  int step_ = 0, first_ = 0;  // The next half tile; the first of these tiles'.
};

// What a block does with some tiles of a block of rows.
template <int kPlanes, typename T>
struct KeptBlock {
  using Stages = KeptStages<kPlanes>;
  static constexpr int kEights = Stages::kColumns / 8;
  using Points = PointRing<kPlanes>;
  using Terms = float[kKeptTerms][kCloudTile];
  using Rows = PointSums<kKeptParts, kDepth>;

  // The rows' sums over a piece, which the context is of.
  template <int kSide>
  static __device__ void Add(const Member& member, const CloudContext& c, const KeptPiece& piece, Terms& terms,
                             Points* points, Rows* rows) {
    const int warp_row = piece.block * kGradientRows + static_cast<int>(threadIdx.x) / 32 * 16;
    KeptRing<Stages, T, kSide> ring(member, warp_row, c, points->End());
    // What rows and columns add to exponents, beyond their frames.
    float level[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int i = min(warp_row + ring.FirstOfLane() + ring.kRowStep * row, c.rows - 1);
      level[row] = DensityLevel(c, c.own_phi[i] - BaseOf(member, 0, kSide, i), member.ratio(0, kSide)[i]);
    }
    const double* const frame = member.At<double>(member.job.at.frame[0][1 - kSide]);
    // Of many tiles at a time: float64, in which they are made, waits until the matrix units are idle.
    const auto terms_from = [&](int first) {
      const int column = threadIdx.x % 128, last = min(first + kKeptTerms, c.last_tile);
      __syncthreads();  // What is there has been read.
      for (int tile = first + static_cast<int>(threadIdx.x) / 128; tile < last; tile += 4 * kGradientGroups) {
        double phi[4], base[4], log_weight[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int at = min((tile + k * kGradientGroups) * kCloudTile + column, c.columns - 1);
          phi[k] = c.phi[at];
          base[k] = frame[at];
          log_weight[k] = c.log_weight[at];
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int of = tile + k * kGradientGroups;
          const bool there = of * kCloudTile + column < c.columns && log_weight[k] > kVoid;
          const float term = static_cast<float>(there ? fma(phi[k] - base[k], c.scale, log_weight[k]) : kVoid);
          if (of < last) terms[of - first][column] = term;
        }
      }
      __syncthreads();
    };
    const float whole[2] = {1, 1};
    struct Fragments {
      uint32_t high[kHalfTile / 16][4], low[kHalfTile / 16][4];
    };
    // A quarter of a tile: half of these. The exponents of the quarter after it are read before its exponentials.
    float z[2][kEights][4];
    const auto make = [&](int half, int quarter, Fragments& fragments) {
      ring.Next(z[1 - quarter]);
      const float* const of_columns = terms[0] + half % (2 * kKeptTerms) * kHalfTile + quarter * Stages::kColumns;
      EachFragment(1.0f, z[quarter], of_columns, level, [&](int k, const auto& h, const auto& l) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          fragments.high[quarter * kEights / 2 + k][e] = h[e];
          fragments.low[quarter * kEights / 2 + k][e] = l[e];
        }
      });
      ring.Copy();
    };
    // While the products of half a tile are made, part by part, a quarter of the next with each. (Of one part the
    // second one's are of what is there, and for nothing.)
    const auto add = [&](int half, const Fragments& now, Fragments& next) {
      if ((half + 1) % (2 * kKeptTerms) == 0) terms_from(c.first_tile + (half + 1) / 2);
      const uint32_t at = points->Next();
      float sums[kDepth / 8][4];
#pragma unroll
      for (int part = 0; part < kKeptParts; ++part) {
        const uint64_t columns = PointsAt<kDepth>(at + part * PointStages<kPlanes>::kPartBytes);
        BeginProducts();
        CommitSums<kPlanes, kDepth, kHalfTile>(now.high, now.low, columns, /*add=*/false, sums);
        make(half + 1, part, next);
#pragma unroll
        for (int k = part * kEights / 2; k < (part + 1) * kEights / 2; ++k) {  // Before the products are waited for.
#pragma unroll
          for (int e = 0; e < 4; ++e) asm volatile("" : "+r"(next.high[k][e]), "+r"(next.low[k][e]));
        }
        WaitForProducts<0>();
        AddSums<kDepth>(whole, sums, rows->total[part]);
      }
      points->Release();
    };
    const int halves = 2 * (c.last_tile - c.first_tile);
    Fragments even, odd;
    terms_from(c.first_tile);
    ring.Next(z[0]);
    ring.Copy();
    make(0, 0, even);
    make(0, 1, even);
#pragma unroll 1
    for (int half = 0; half < halves; half += 2) {
      add(half, even, odd);
      add(half + 1, odd, even);
    }
  }
};

#endif

// T: float, of FAST __half or Density. Without ranks: evenly.
template <int kPlanes, typename T>
__global__ void __launch_bounds__(kThreads, 1) KeptGradientKernel(LaunchTable table, Sides sides, int ranks) {
#if SINKHORN_HOPPER
  using Block = KeptBlock<kPlanes, T>;
  constexpr int kStages = PointStages<kPlanes>::kStages;
  __shared__ CloudContext c;
  __shared__ KeptPiece piece;
  __shared__ typename Block::Terms terms;
  alignas(8) __shared__ uint64_t full[kStages], empty[kStages];
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const bool evenly = ranks == 0;
  const int groups = KeptGroups(job), parts = EvenKeptParts(job), blocks = parts * groups;
  const int index = static_cast<int>(work.block % blocks), part = index / groups;
  const GradientPlace place = evenly ? GradientPlace{0, 0, index % groups, 0, work.block / blocks}
                                     : PlaceOf(job, work.block, sides, ranks, groups);
  const Member member{job, place.member};
  if (!IsStreamed(job, *member.state(0)) || !HasKeptGradient(job, member.state(0)->mode) || !IsSolved(member)) return;
  const auto tiles_of = [&] { return EvenTiles(job, EvenKeptParts(job), KeptGroups(job)); };
  // By one thread: what is next, all of the context's tiles or some.
  const auto fill = [&](const EvenPiece& next) {
    const int depths = CloudDepths(job.dim), first_part = depths * place.group / groups;
    piece = {next, first_part, depths * (place.group + 1) / groups - first_part};
    FillShape(member, RowBlock{member.index, 0, next.block, place.rank, max(ranks, 1)}, next.side, Pass::kMeasure, &c);
    FillState(member, &c);
    if (!evenly) return;
    c.first_tile = next.first_tile;
    c.last_tile = next.last_tile;
  };
  if (threadIdx.x == 0) Block::Points::Init(full, empty);
  typename Block::Points points(c, piece, full, empty);
  int at = evenly ? tiles_of().FirstOf(part) : 0;
  const int until = evenly ? tiles_of().FirstOf(part + 1) : 0;
#pragma unroll 1
  do {
    const EvenPiece next = evenly ? tiles_of().PieceAt(at, part) : EvenPiece{place.side, place.block, 0, 0, 0};
    at = next.end;
    if (evenly && next.first_tile == next.last_tile) continue;
    __syncthreads();  // Shared memory is free.
    if (threadIdx.x == 0) fill(next);
    __syncthreads();
    points.Begin();
    typename Block::Rows rows[1] = {};
    piece.side == 0 ? Block::template Add<0>(member, c, piece, terms, &points, &rows[0])
                    : Block::template Add<1>(member, c, piece, terms, &points, &rows[0]);
    const int eighth = threadIdx.x % 32 / 4, of_warp = piece.block * kGradientRows + threadIdx.x / 32 * 16;
    const int row0 = of_warp + (piece.side == 0 ? eighth : 2 * eighth), row_step = piece.side == 0 ? 8 : 1;
    if (!evenly) {
      StoreSums(rows, member, piece.side, row0, row_step, piece.first_part, piece.parts, place.rank, ranks);
    } else if (tiles_of().MakeWhole(member, piece, part, place.group, &rows[0])) {
      StoreOwnSums(rows[0], member, piece.side, row0, row_step, piece.first_part, piece.parts);
    }
  } while (at < until);
#endif
}

// Whether blocks of rows are shared out evenly, not by clusters.
bool IsEvenlyKept(const Job& job) {
  return HasFrames(job) && (HasKeptGradient(job, kFloat) || HasKeptGradient(job, kMixed)) &&
         FillDevice(job, KeptGroups(job));
}

}  // namespace

GradientLaunch KeptGradientLaunchOf(const Job& job, int side) {
  if (!IsEvenlyKept(job)) return LaunchOfGroups(job, side, KeptGroups(job), /*beside=*/4);
  return {side == 0 ? Sides::kBoth : Sides::kNone, /*ranks=*/0};
}
int64_t KeptGradientBlocks(const Job& job, const GradientLaunch& launch) {
  if (launch.ranks == 0) return job.count * EvenKeptParts(job) * KeptGroups(job);
  return BlocksOfGroups(job, launch, KeptGroups(job));
}
int64_t KeptGradientBytes(const Job& job) {
  return IsEvenlyKept(job) ? PartialSumBytes(kProcessors, kKeptParts * kDepth) : 0;
}
int64_t KeptGradientCounters(const Job& job) {
  return IsEvenlyKept(job) ? PartialSumCounters(job, KeptGroups(job)) : 0;
}

void LaunchKeptGradient(const LaunchTable& table, int64_t blocks, int planes, bool densities, const GradientLaunch& of,
                        cudaStream_t stream) {
  const auto launch = [&](void (*kernel)(LaunchTable, Sides, int), int rings) {
    const size_t bytes = std::max<size_t>(kPlaneAlignment + rings, PointSumBytes(kKeptParts, kDepth));
    LaunchCluster(kernel, blocks, std::max(of.ranks, 1), kThreads, bytes, stream, table, of.sides, of.ranks);
  };
  if (planes == 2) return launch(KeptGradientKernel<2, float>, KeptStages<2>::kBytes + PointStages<2>::kBytes);
  launch(densities ? KeptGradientKernel<1, Density> : KeptGradientKernel<1, __half>,
         KeptStages<1>::kBytes + PointStages<1>::kBytes);
}

}  // namespace cuda
}  // namespace sinkhorn
