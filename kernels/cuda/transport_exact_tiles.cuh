// Exponents of clouds in float64, tile by tile, by its matrix units (Hopper): half steps of members in kMixed are made
// of them, and what is wanted of any member's plan. A block has kTile rows and streams columns past them.
//
// A value is start + term + product of a row and a column. Each() calls, for every two neighbouring columns,
//   use(r, value of the first, value of the second, begin(tile, slot, column of the tile))
// where r counts the rows that a thread has (Row() of the block), a constant once inlined; perhaps not for eights of
// columns behind those wanted. Of a tile's columns threads bring one each: its term is columns->Load(j), and
// columns->Store(slot, column) may leave more in shared memory, where two tiles have slots by turns, before a barrier.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_EXACT_TILES_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_EXACT_TILES_CUH_

#include "kernels/cuda/transport_hopper.cuh"
#include "kernels/cuda/transport_rows.cuh"

namespace sinkhorn {
namespace cuda {

// One side of an engine: rows, and the columns that are streamed.
struct ExactSides {
  const double *x, *y;  // Their points.
  int rows, columns, dim, first_row;
  double factor;          // Of products.
  int wanted;             // Columns: all, or more where those behind the last are wanted, too.
  const double *dx, *dy;  // Steps of x and y, or null: they do not move.
};
__device__ inline ExactSides ExactSidesOf(const Member& member, int engine, int side, int block, double scale) {
  const Job& job = member.job;
  const int own = MeasureOf(engine, side), other = MeasureOf(engine, 1 - side);
  return {member.At<double>(job.at.points64[own]),
          member.At<double>(job.at.points64[other]),
          job.size[own],
          job.size[other],
          job.dim,
          block * kTile,
          2 * job.in.kappa * scale,
          job.size[other],
          nullptr,
          nullptr};
}

// How many coordinates are streamed: sixteen at a time, with room for so many steps of columns; up to so many steps
// rows stay in shared memory.
constexpr int kManyChunk = 16, kManyStride = kManyChunk + 4;  // Doubles from point to point.
constexpr int kManyStages = 3, kManyResident = 4;
__host__ __device__ inline int ManyChunks(int dim) { return static_cast<int>(CeilDiv(dim, kManyChunk)); }
// Steps that rows have room for.
__host__ __device__ inline int ManyRowSteps(int chunks) { return chunks <= kManyResident ? chunks : kManyStages; }
// For launches of up to `dim` coordinates: fewer may take more steps. `planes`: points alone, or steps as well.
inline size_t ManySharedBytes(int dim, int planes = 1) {
  const int steps = ManyChunks(dim) < kManyResident ? ManyChunks(dim) : kManyResident;
  return sizeof(double) * kManyStride * planes * (steps * kTile + kManyStages * kManyColumns);
}
static_assert(kManyStages <= kManyResident, "room");

#if SINKHORN_HOPPER

// Terms of columns without mass, or behind the last: so far below all others that they vanish beside them, and small
// enough for whole numbers.
constexpr double kNoTerm = -1e9;

// d = c + a b: 16 rows by 8 columns, of 4 products. Lane l has of rows l / 4 and l / 4 + 8, and of column l / 4, factor
// l % 4; of c and d columns 2 (l % 4) + 0..1 of these rows. Volatile: where a warp's lanes part, none may be moved to.
__device__ inline void MultiplyDoubles(const double (&a)[2], double b, const double (&c)[4], double (&d)[4]) {
  asm volatile("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
               : "=d"(d[0]), "=d"(d[1]), "=d"(d[2]), "=d"(d[3])
               : "d"(a[0]), "d"(a[1]), "d"(b), "d"(c[0]), "d"(c[1]), "d"(c[2]), "d"(c[3]));
}
// d += a b.
__device__ inline void AddDoubles(const double (&a)[2], const double (&b)[1], double (&d)[4]) {
  asm volatile("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
               : "d"(a[0]), "d"(a[1]), "d"(b[0]));
}
// The same of 8 products: those of 4, and of 4 more. Of a, both rows' first factors, then their second.
__device__ inline void AddDoubles(const double (&a)[4], const double (&b)[2], double (&d)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
}
// The same number in another register.
__device__ inline double Again(double x) {
  double y;
  asm volatile("mov.f64 %0, %1;" : "=d"(y) : "d"(x));
  return y;
}
// 8 bytes; `there`: or zeros.
__device__ inline void CopyDouble(uint32_t shared, const double* global, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared), "l"(global), "r"(there ? 8 : 0)
               : "memory");
}

// Two side by side; both addresses are multiples of 16.
__device__ inline void CopyDoubles(uint32_t shared, const double* global, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(there ? 16 : 0)
               : "memory");
}

// Points of up to three coordinates: a column's term is the fourth, and all of a step are multiplied at once. Threads
// have kOwnRows rows: of half as many a block is two halves of warps.
template <int kOwnRows>
class FewTilesOf {
 public:
  static constexpr int kRows = kOwnRows;
  static constexpr int kBlockThreads = kThreads;
  static constexpr int kGroups = kThreads / 32 * kRows * 8 / kTile;  // Of columns, a warp each.
  static constexpr int kColumns = kFewColumns;                       // Of a step: a thread brings one.
  struct Memory {
    alignas(16) double columns[2][kColumns][4];
  };

  __device__ FewTilesOf(const ExactSides& of, Memory* memory) : of_(of), memory_(memory) {
    const int k = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t i = min(of.first_row + Row(r), of.rows - 1);
      rows_[r / 2][r % 2] = k == 3 ? 1 : k < of.dim ? of.x[i * of.dim + k] * of.factor : 0;
    }
  }
  __device__ static int Row(int r) {
    return static_cast<int>(threadIdx.x) / (32 * kGroups) * 8 * kRows + 8 * r + static_cast<int>(threadIdx.x) % 32 / 4;
  }
  __device__ static int Group() { return static_cast<int>(threadIdx.x) / 32 % kGroups; }
  // Coordinate k of a column of the tile in this slot.
  __device__ double Point(int slot, int column, int k) const { return memory_->columns[slot][column][k]; }

  template <typename Columns, typename Begin, typename Use>
  __device__ void Each(int first, int last, const double (&start)[kRows], Columns* columns, Begin begin, Use use) {
    double next[4], from[kRows / 2][4];  // Registers side by side, as products want them.
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      from[r / 2][r % 2 * 2] = start[r];
      from[r / 2][r % 2 * 2 + 1] = Again(start[r]);
    }
    Load(first, columns, next);
    __syncthreads();  // What is there has been read.
    for (int tile = first; tile < last; ++tile) {
      const int slot = (tile - first) % 2;
      auto* to = reinterpret_cast<double2*>(memory_->columns[slot][threadIdx.x]);
      to[0] = make_double2(next[0], next[1]);
      to[1] = make_double2(next[2], next[3]);
      columns->Store(slot, threadIdx.x);
      __syncthreads();
      if (tile + 1 < last) Load(tile + 1, columns, next);
      const double* points = &memory_->columns[slot][0][0] + threadIdx.x % 32;
#pragma unroll 1
      for (int eight = Group(); eight < min(kColumns, of_.wanted - tile * kColumns + 7) / 8; eight += kGroups) {
        const double column = points[32 * eight];
        const int at = 8 * eight + 2 * (threadIdx.x % 4);
        const auto begun = begin(tile, slot, at);
#pragma unroll
        for (int m = 0; m < kRows / 2; ++m) {
          double d[4];
          MultiplyDoubles(rows_[m], column, from[m], d);
          use(2 * m, d[0], d[1], begun);
          use(2 * m + 1, d[2], d[3], begun);
        }
      }
    }
  }

 private:
  template <typename Columns>
  __device__ void Load(int tile, Columns* columns, double (&next)[4]) const {
    const int64_t j = int64_t{tile} * kColumns + threadIdx.x;
#pragma unroll
    for (int k = 0; k < 3; ++k) next[k] = k < of_.dim && j < of_.columns ? of_.y[j * of_.dim + k] : 0;
    next[3] = columns->Load(static_cast<int>(j));
  }

  const ExactSides& of_;
  Memory* const memory_;
  double rows_[kRows / 2][2];
};

using FewTiles = FewTilesOf<8>;

// Points of any number of coordinates, sixteen of them at a time. Rows of few coordinates stay in shared memory.
// Threads have kOwnRows rows; of half as many there are twice as many threads. kBends: beside values there are products
// with steps, <dx, y> + <x, dy>: use(r, value of the first, of the second, product of the first, of the second, begun).
template <int kOwnRows, bool kBends = false>
class ManyTilesOf {
 public:
  static constexpr int kRows = kOwnRows;
  static constexpr int kGroups = 4;
  static constexpr int kBlockThreads = 32 * kGroups * kTile / (8 * kRows);
  static constexpr int kColumns = kManyColumns, kChunk = kManyChunk, kStride = kManyStride, kStages = kManyStages;
  static constexpr int kPlanes = kBends ? 2 : 1;  // Points; steps.
  static constexpr int kStep = kBends ? 8 : 4;    // Coordinates that are multiplied at once: what registers allow.
  struct Memory {
    alignas(16) double terms[kColumns];
    double start[kTile];
  };

  __device__ ManyTilesOf(const ExactSides& of, Memory* memory)
      : of_(of),
        memory_(memory),
        chunks_(ManyChunks(of.dim)),
        even_(of.dim % 2 == 0),
        moves_{of.dx != nullptr, of.dy != nullptr},
        base_(SharedAddress(DynamicShared())) {}
  __device__ static int Row(int r) {
    return static_cast<int>(threadIdx.x) / 128 * 8 * kRows + 8 * r + static_cast<int>(threadIdx.x) % 32 / 4;
  }
  __device__ static int Group() { return static_cast<int>(threadIdx.x) / 32 % kGroups; }

  template <typename Columns, typename Begin, typename Use>
  __device__ void Each(int first, int last, const double (&start)[kRows], Columns* columns, Begin begin, Use use) {
    Each(first, last, start, columns, begin, use, [](int /*tile*/) {});
  }
  // `share(tile)`, by all threads, may leave what begin() wants of a tile in shared memory.
  template <typename Columns, typename Begin, typename Use, typename Share>
  __device__ void Each(int first, int last, const double (&start)[kRows], Columns* columns, Begin begin, Use use,
                       Share share) {
    __syncthreads();  // What is there has been read.
    if (Group() == 0 && threadIdx.x % 4 == 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) memory_->start[Row(r)] = start[r];
    }
    Ahead ahead = {first, 0, 0};
    for (int step = 0; step < kStages - 1; ++step) Copy(first, last, &ahead);
    int slot = 0;
    for (int tile = first; tile < last; ++tile) {
      double own_term = 0, acc[kPlanes][kRows / 2][4][4];
      if (threadIdx.x < kColumns) own_term = columns->Load(tile * kColumns + static_cast<int>(threadIdx.x));
#pragma unroll
      for (int e = 0; e < kRows / 2 * 16; ++e) {
#pragma unroll
        for (int plane = 0; plane < kPlanes; ++plane) acc[plane][e / 16][e / 4 % 4][e % 4] = 0;
      }
      for (int chunk = 0; chunk < chunks_; ++chunk, slot = After(slot)) {
        WaitForCopies<kStages - 2>();
        __syncthreads();
        Copy(first, last, &ahead);
        const double* rows = Shared() + RowsAt(slot, chunk) + Row(0) * kStride + threadIdx.x % 4;
        const double* points = Shared() + PointsAt(slot) +
                               (32 * Group() + static_cast<int>(threadIdx.x) % 32 / 4) * kStride + threadIdx.x % 4;
        if (of_.dim - chunk * kChunk >= kChunk) {
#pragma unroll
          for (int k = 0; k < kChunk; k += kStep) Multiply(rows + k, points + k, acc);
        } else {
#pragma unroll 1
          for (int k = 0; chunk * kChunk + k < of_.dim; k += kStep) Multiply(rows + k, points + k, acc);
        }
      }
      if (threadIdx.x < kColumns) {
        memory_->terms[threadIdx.x] = own_term;
        columns->Store(0, threadIdx.x);
      }
      share(tile);
      __syncthreads();
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int at = 32 * Group() + 8 * n + 2 * (threadIdx.x % 4);
        const double2 terms = *reinterpret_cast<const double2*>(memory_->terms + at);
        const auto begun = begin(tile, 0, at);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const double* d = &acc[0][r / 2][n][r % 2 * 2];
          const double from = memory_->start[Row(r)];
          const double first = fma(d[0], of_.factor, from + terms.x), second = fma(d[1], of_.factor, from + terms.y);
          if constexpr (kBends) {
            const double* bend = &acc[1][r / 2][n][r % 2 * 2];
            use(r, first, second, bend[0], bend[1], begun);
          } else {
            use(r, first, second, begun);
          }
        }
      }
    }
  }

 private:
  using RowFactors = double[kStep / 2];
  using PointFactors = double[kStep / 4];
  // What is to be brought next, and where to.
  struct Ahead {
    int tile, chunk, slot;
  };
  __device__ static int After(int slot) { return slot + 1 == kStages ? 0 : slot + 1; }
  __device__ bool Stays() const { return chunks_ <= kManyResident; }
  __device__ static double* Shared() { return reinterpret_cast<double*>(DynamicShared()); }
  // Places there, in doubles.
  __device__ int RowsAt(int slot, int chunk) const { return (Stays() ? chunk : slot) * kPlanes * kTile * kStride; }
  __device__ int PointsAt(int slot) const {
    return (ManyRowSteps(chunks_) * kTile + slot * kColumns) * kPlanes * kStride;
  }
  // kStep coordinates of this warp's rows and columns.
  __device__ void Multiply(const double* rows, const double* points, double (&acc)[kPlanes][kRows / 2][4][4]) const {
    RowFactors a[kRows / 2];
    PointFactors b[4];
    LoadRows(rows, a);
    LoadPoints(points, b);
    AddAll(a, b, acc[0]);
    if constexpr (kBends) {
      RowFactors moved[kRows / 2];
      if (moves_[0]) {
        LoadRows(rows + kTile * kStride, moved);
        AddAll(moved, b, acc[1]);
      }
      if (moves_[1]) {
        LoadPoints(points + kColumns * kStride, b);
        AddAll(a, b, acc[1]);
      }
    }
  }
  __device__ static void LoadRows(const double* rows, RowFactors (&a)[kRows / 2]) {
#pragma unroll
    for (int k = 0; k < kStep; k += 4) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) a[r / 2][k / 2 + r % 2] = rows[8 * r * kStride + k];
    }
  }
  __device__ static void LoadPoints(const double* points, PointFactors (&b)[4]) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int k = 0; k < kStep; k += 4) b[n][k / 4] = points[8 * n * kStride + k];
    }
  }
  __device__ static void AddAll(const RowFactors (&a)[kRows / 2], const PointFactors (&b)[4],
                                double (&acc)[kRows / 2][4][4]) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int m = 0; m < kRows / 2; ++m) AddDoubles(a[m], b[n], acc[m][n]);
    }
  }
  // A step's points. Copies of each are a group, if there are none, too.
  __device__ void Copy(int first, int last, Ahead* ahead) const {
    if (ahead->tile < last) {
      const int chunk = ahead->chunk, column = ahead->tile * kColumns;
      const bool rows = !Stays() || ahead->tile == first;
      const int points_at = PointsAt(ahead->slot), rows_at = RowsAt(ahead->slot, chunk);
      CopyPoints<kColumns>(of_.y, column, of_.columns, chunk, points_at);
      if (rows) CopyPoints<kTile>(of_.x, of_.first_row, of_.rows, chunk, rows_at);
      if constexpr (kBends) {
        if (moves_[1]) CopyPoints<kColumns>(of_.dy, column, of_.columns, chunk, points_at + kColumns * kStride);
        if (moves_[0] && rows) CopyPoints<kTile>(of_.dx, of_.first_row, of_.rows, chunk, rows_at + kTile * kStride);
      }
      ahead->slot = After(ahead->slot);
      if (++ahead->chunk == chunks_) ahead->chunk = 0, ++ahead->tile;
    }
    CommitCopies();
  }
  // To a place in shared memory. Rows of an even number of coordinates are brought two by two.
  template <int kPoints>
  __device__ void CopyPoints(const double* points, int first, int count, int chunk, int at) const {
    even_ ? CopyPoints<kPoints, 2>(points, first, count, chunk, at)
          : CopyPoints<kPoints, 1>(points, first, count, chunk, at);
  }
  template <int kPoints, int kSideBySide>
  __device__ void CopyPoints(const double* points, int first, int count, int chunk, int at) const {
    constexpr int kThreadsOfPoint = kChunk / kSideBySide, kTogether = kBlockThreads / kThreadsOfPoint;
    static_assert(kPoints % kTogether == 0, "whole rounds");
    const int own = threadIdx.x / kThreadsOfPoint, k = threadIdx.x % kThreadsOfPoint * kSideBySide;
    const int dim = of_.dim, coordinate = chunk * kChunk + k;  // Not looked up again after each copy.
    const bool there = coordinate < dim;
    const double* from = points + (there ? coordinate : 0);
    const uint32_t shared = base_ + (at + own * kStride + k) * static_cast<uint32_t>(sizeof(double));
    constexpr int kRounds = kPoints / kTogether;
    constexpr uint32_t kRoundBytes = kTogether * kStride * sizeof(double);
    const auto copy = [&](int q, const double* point) {
      kSideBySide == 2 ? CopyDoubles(shared + q * kRoundBytes, point, there)
                       : CopyDouble(shared + q * kRoundBytes, point, there);
    };
    if (first + kPoints <= count) {
      const double* point = from + int64_t{first + own} * dim;
      const int step = kTogether * dim;
#pragma unroll
      for (int q = 0; q < kRounds; ++q, point += step) copy(q, point);
    } else {
#pragma unroll 1
      for (int q = 0; q < kRounds; ++q) copy(q, from + int64_t{min(first + own + q * kTogether, count - 1)} * dim);
    }
  }

  const ExactSides& of_;
  Memory* const memory_;
  const int chunks_;
  const bool even_, moves_[2];
  const uint32_t base_;  // Of shared memory.
};

using ManyTiles = ManyTilesOf<4>;

// Columns of whom nothing is wanted but their terms.
template <typename Term>
class TermsAlone {
 public:
  __device__ explicit TermsAlone(const Term& term) : term_(term) {}
  __device__ double Load(int j) const { return term_(j); }
  __device__ void Store(int /*slot*/, int /*column*/) const {}

 private:
  const Term& term_;
};
// The same, and beside a term another number of its column, left in shared memory.
template <typename Term, typename Beside, int kColumns>
class TermsBeside {
 public:
  __device__ TermsBeside(const Term& term, const Beside& beside, double (&out)[2][kColumns])
      : term_(term), beside_(beside), out_(out) {}
  __device__ double Load(int j) {
    own_ = beside_(j);
    return term_(j);
  }
  __device__ void Store(int slot, int column) { out_[slot][column] = own_; }

 private:
  const Term& term_;
  const Beside& beside_;
  double (&out_)[2][kColumns];
  double own_ = 0;
};
// What columns' potentials add to exponents, seen from `reference`.
struct ExactTerms {
  const double *phi, *log_weight;
  double reference, scale;
  int count;
  __device__ double operator()(int j) const {
    return j < count ? fmax(Term(phi, log_weight, reference, scale, j), kNoTerm) : kNoTerm;
  }
};
// At the present potentials, which are in double.
__device__ inline ExactTerms ExactTermsOf(const Member& member, const PlanSide& plan, double scale) {
  const double* phi = member.phi(plan.engine, member.state(plan.engine)->parity, 1 - plan.side);
  return {phi, member.log_mass(plan.other), phi[0], scale, member.job.size[plan.other]};
}
// A block's part of the columns' tiles.
struct TileRange {
  int first, last;
};
__device__ inline TileRange RangeOf(int64_t tiles, int part, int parts) {
  return {static_cast<int>(tiles * part / parts), static_cast<int>(tiles * (part + 1) / parts)};
}
template <typename Tiles>
__device__ inline TileRange TilesOf(int columns, int split, int splits) {
  return RangeOf(CeilDiv(columns, Tiles::kColumns), split, splits);
}
struct Nothing {};
struct BeginNothing {
  __device__ Nothing operator()(int /*tile*/, int /*slot*/, int /*column*/) const { return {}; }
};

// ---- 2 to the power of values ---------------------------------------------------------------------------------------

// Exponents as fixed point: added to kStart, their sum's lower word has 24 binary digits behind the point, and the
// upper one is kHigh from -128 to 128.
class FixedPoint {
 public:
  static constexpr double kStart = 0x1.8p28 + 128;
  // 2^x, 0 for x below -126, of kStart + x.
  __device__ float Density(double sum) {
    const int high = __double2hiint(sum);
    highest_ = max(highest_, high);
    return Exp2(high == kHigh ? Fixed(sum) : INT32_MIN);
  }
  // The same, 2^127 from there on.
  __device__ static float Saturated(double sum) {
    const int high = __double2hiint(sum);
    return Exp2(high > kHigh ? 127 << 24 : high == kHigh ? min(Fixed(sum), 127 << 24) : INT32_MIN);
  }
  // Of kStart + x + more.
  __device__ static float Saturated(double sum, float more) {
    const int high = __double2hiint(sum);
    const float x = fmaf(static_cast<float>(Fixed(sum)), 0x1p-24f, more);
    return FastExp2(high > kHigh ? 127 : high == kHigh ? fminf(x, 127) : -128);
  }
  // Whether all that Density saw were below 128, and numbers.
  __device__ bool IsSafe() const { return highest_ <= kHigh; }

 private:
  static constexpr int kHigh = 0x41b80000;
  __device__ static int Fixed(double sum) { return __double2loint(sum) ^ INT32_MIN; }
  __device__ static float Exp2(int fixed) { return FastExp2(static_cast<float>(fixed) * 0x1p-24f); }
  int highest_ = 0;
};
// What the plan's exponents in row i of the block begin with, its mass left out: saturated densities times masses are
// the plan. Rows without mass have none.
__device__ inline double StartOfRow(const ExactSides& sides, const ExactTerms& of, const double* phi,
                                    const double* mass, int row) {
  const int i = min(sides.first_row + row, sides.rows - 1);
  return FixedPoint::kStart + (mass[i] > 0 ? (phi[i] + of.reference) * of.scale : kNoTerm);
}
// Over the four threads that have columns of a row.
__device__ inline float SumOfQuad(float sum) {
  for (int lane = 1; lane <= 2; lane *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
  return sum;
}
// Added to this, exponents are rounded to whole numbers, in the sum's lower word.
constexpr double kWholeStart = 0x1.8p52;

#endif

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_EXACT_TILES_CUH_
