// The primal bound: the primal value of P rounded to the marginals, in float64 (kernels/cpu/transport_bound.h):
//   P' = diag(min(1, a / r)) P;  P'' = P' diag(min(1, b / c'));  Q = P'' + L
//   L = (a - P'' 1)(b - P''^T 1)^T / |a - P'' 1|_1
//   bound = <C, Q> + eps KL(Q | a b^T)
// P'' is the plan at f' = f + eps log min(1, a / r) and g' = g + eps log min(1, b / c'), so that
// C + eps log(P'' / (a b)) is f' + g', of which the marginals of Q make sums of rows and of columns:
//   bound = <Q 1, f'> + <Q^T 1, g'> + eps sum_ij Q_ij log(1 + L_ij / P''_ij) + eps (|a| |b| - |Q|)
// What is left for pairs is as little as P lacks, and needs no float64. Three passes for sums come before: of kernels
// for all problems (transport_half_step.cu), or of exact tiles. What rounding may have taken off is added.
#include <type_traits>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_exact_tiles.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_rows.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

// Whether potentials are those of whole distances, or of products.
__host__ __device__ bool HasDistances(const Job& job) { return !MultipliesDoubles(job); }

// A point's potential f' (g'), without the constant that f and g may share, which would cost digits, and what it adds
// to an exponent: log2 of its part of |a| P'' / (a b).
struct BoundPoint {
  double potential, exponent;
  double size;  // Of the numbers that the exponent's parts were added up of.
};
__device__ BoundPoint PointOf(const Member& member, int side, int i) {
  const Job& job = member.job;
  const double scale = kLog2E / job.solver.epsilon, psi = member.At<double>(job.at.bound_psi[side])[i];
  const double log_mass = member.log_mass(side)[i];
  const double shrunk = member.At<double>(job.at.bound_log_weight[side])[i] - log_mass;
  const double shift = member.Shift(0, side, i, HasDistances(job));
  double exponent = fma(psi, scale, shrunk);
  // Products are as large as the norms; costs, which are seen from the pair, are not.
  const double products = HasDistances(job) ? 0 : member.At<double>(job.at.norm2[side])[i] * scale;
  const double size = fabs(psi * scale) + fabs(shrunk) + fabs(log_mass) + products;
  if (side == 0) exponent += log2(member.state(0)->total_mass[0]);
  return {psi + shift + shrunk / scale, exponent, size};
}

__host__ __device__ int StartBlocks(const Job& job) { return RowBlocks(job, 0, 0) + RowBlocks(job, 0, 1); }

__global__ void __launch_bounds__(kThreads) BoundStartKernel(LaunchTable table) {
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = table.jobs[work.job];
  const int blocks = StartBlocks(job);
  const Member member{job, work.block / blocks};
  const int block = static_cast<int>(work.block % blocks);
  const int side = block < RowBlocks(job, 0, 0) ? 0 : 1;
  const int i = (side == 0 ? block : block - RowBlocks(job, 0, 0)) * kTile + threadIdx.x;
  if (threadIdx.x >= kTile || i >= job.size[side]) return;
  const int parity = member.state(0)->parity;
  const auto psi = [&](int s, int k) {
    return member.phi(0, parity, s)[k] + member.Shift(0, s, k) - member.Shift(0, s, k, HasDistances(job));
  };
  const double reference = psi(1, 0);
  member.At<double>(job.at.bound_psi[side])[i] = side == 0 ? psi(0, i) + reference : psi(1, i) - reference;
  member.At<double>(job.at.bound_log_weight[side])[i] = member.log_mass(side)[i];
}

// ---- Sums by exact tiles --------------------------------------------------------------------------------------------

template <bool kFew>
__global__ void __launch_bounds__(kThreads, 2) ExactBoundKernel(LaunchTable table, int step) {
#if SINKHORN_HOPPER
  using Tiles = std::conditional_t<kFew, FewTiles, ManyTiles>;
  using Sum = LogSum<double, double>;
  __shared__ typename Tiles::Memory memory;
  __shared__ Sum parts[Tiles::kGroups][kTile];
  __shared__ RowBlock b;
  __shared__ ExactSides sides;
  __shared__ ExactTerms terms;
  const int side = step == 1 ? 1 : 0;
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  if (threadIdx.x == 0) b = FindRowBlock(job, work.block, side, 1, Geometry::kExact);
  __syncthreads();
  const Member member{job, b.member};
  const double scale = kLog2E / job.solver.epsilon;
  if (threadIdx.x == 0) {
    const PassView view = ViewOf(member, 0, side, Pass::kBound, 0);
    const double *phi = view.phi[1 - side], *log_weight = view.log_weight[1 - side];
    sides = ExactSidesOf(member, 0, side, b.block, scale);
    terms = {phi, log_weight, phi[0], scale, sides.columns};
  }
  __syncthreads();
  const TileRange range = TilesOf<Tiles>(sides.columns, b.split, b.splits);
  Tiles tiles(sides, &memory);
  const double start[Tiles::kRows] = {};
  Sum sums[Tiles::kRows];
#pragma unroll
  for (int r = 0; r < Tiles::kRows; ++r) sums[r] = Sum::OfNothing();
  TermsAlone columns(terms);
  tiles.Each(range.first, range.last, start, &columns, BeginNothing(),
             [&](int r, double first, double second, Nothing) {
               const double both[2] = {first, second};
               sums[r].Add(both);
             });
#pragma unroll
  for (int r = 0; r < Tiles::kRows; ++r) {
    for (int lane = 1; lane <= 2; lane *= 2) {
      const Sum other = {__shfl_xor_sync(0xffffffffu, sums[r].max, lane),
                         __shfl_xor_sync(0xffffffffu, sums[r].sum, lane)};
      sums[r].Add(other);
    }
    if (threadIdx.x % 4 == 0) parts[Tiles::Group()][Tiles::Row(r)] = sums[r];
  }
  __syncthreads();
  Sum all = Sum::OfNothing();
  for (int group = 0; group < Tiles::kGroups && threadIdx.x < kTile; ++group) all.Add(parts[group][threadIdx.x]);
  FinishRows(member, b, side, Pass::kBound, step, all.max + log2(all.sum), terms.reference * scale, scale,
             Geometry::kExact);
#endif
}

// ---- The value ------------------------------------------------------------------------------------------------------

// What a pair adds: (x + y) log(1 + y / x), of x = |a| P'' / (a b) = 2^exponent, `density`, and y = |a| L / (a b),
// `lack`.
__device__ double PairTerm(double density, double exponent, double lack) {
  if (!(lack > 0)) return 0;
  if (!(density > 0) || lack > 0x1p200 * density) {  // Nothing beside it.
    return fmax(0.0, lack * (log(lack) - exponent / kLog2E));
  }
  return (density + lack) * log1p(lack / density);
}
// By so much sums of them are raised.
template <typename T>
constexpr double kPairRounding = sizeof(T) == sizeof(float) ? 0x1p-12 : 0x1p-48;

// A side's part of what Q lacks in a pair.
struct Lacks {
  const double *lack, *mass;
  double factor;
  int count;
  __device__ double operator()(int i) const {
    return i < count && mass[i] > 0 ? fmin(lack[i] / mass[i] * factor, 1e30) : 0;
  }
};

// What the value's kernels share: a block's rows and columns, and what its pairs' terms are part of.
class BoundBlock {
 public:
  __device__ BoundBlock(const Member& member, int block, double* scratch)
      : member_(member),
        splits_(BoundParts(member.job) / RowBlocks(member.job, 0, 0)),
        row_block_(block / splits_),
        split_(block % splits_) {
    const Job& job = member.job;
    double total = 0, columns = 0;
    for (int k = threadIdx.x; k < RowBlocks(job, 0, 0); k += kThreads) {
      total += member.At<BlockStats>(job.at.bound_stats)[k].error;
    }
    for (int j = threadIdx.x; j < job.size[1]; j += kThreads) columns += Lack(1)[j];
    total_ = BlockSum(total, scratch);
    surplus_ = total_ > 0 ? BlockSum(columns, scratch) / total_ - 1 : 0;
  }
  __device__ int row_block() const { return row_block_; }
  __device__ int split() const { return split_; }
  // Factors of L |a| / (a b).
  __device__ Lacks LacksOf(int side) const {
    const double factor = side == 1 ? 1 : total_ > 0 ? member_.state(0)->total_mass[0] / total_ : 0;
    return {Lack(side), member_.mass(side), factor, member_.job.size[side]};
  }
  // To memory: the pairs' part, of PairTerms in T times a b, of all threads together, and that of sums of rows and
  // columns, of which each has one block. `sizes`: of numbers that exponents' were added up of, likewise.
  template <typename T>
  __device__ void Store(double pairs, double sizes, double* scratch) const {
    const Job& job = member_.job;
    const double epsilon = job.solver.epsilon, masses = member_.state(0)->total_mass[0];
    Sums sums = {0, 0, epsilon * sizes / masses};
    const int rows = min((row_block_ + 1) * kTile, job.size[0]);
    for (int i = row_block_ * kTile + threadIdx.x; split_ == 0 && i < rows; i += kThreads) Add(0, i, &sums);
    for (int j = threadIdx.x + split_ * kThreads; row_block_ == 0 && j < job.size[1]; j += kThreads * splits_) {
      Add(1, j, &sums);
    }
    const double additions = 8.0 + job.size[0] + job.size[1];  // One after the other, at most.
    const double roundings = 8.0 + job.dim;                    // Of an exponent.
    constexpr double kRaised = 1 + kPairRounding<T>;
    double value = sums.value + epsilon * kRaised * pairs / masses;
    value += 0x1p-53 * (additions * sums.terms + roundings / kLog2E * sums.exponents);
    value = BlockSum(value, scratch);
    if (threadIdx.x != 0) return;
    const int block = row_block_ * splits_ + split_;
    member_.At<double>(job.at.bound_partial)[block] = value;
  }

 private:
  struct Sums {
    double value, terms, exponents;
  };
  __device__ const double* Lack(int side) const { return member_.At<double>(member_.job.at.bound_lack[side]); }
  // With Q's marginal: of rows what the columns lack more than they do is theirs, too. Where rows lack nothing there is
  // no L, and columns stay as they are.
  __device__ void Add(int side, int i, Sums* sums) const {
    const double mass = member_.mass(side)[i], epsilon = member_.job.solver.epsilon;
    if (!(mass > 0)) return;
    const double marginal = side == 0 ? mass + surplus_ * Lack(0)[i] : total_ > 0 ? mass : mass - Lack(1)[i];
    const BoundPoint point = PointOf(member_, side, i);
    const double other = side == 0 ? member_.state(0)->total_mass[1] : 0;
    sums->value += marginal * point.potential + epsilon * (mass * other - (side == 0 ? marginal : 0));
    sums->terms += mass * (fabs(point.potential) + epsilon * (1 + other));
    // Sums of its row or column are as wrong as exponents from where they are seen, too, and displace mass.
    const double from = member_.At<double>(member_.job.at.bound_psi[1 - side])[0] * kLog2E / epsilon;
    const double size = point.size + fabs(from);
    sums->exponents += 2 * mass * size * (epsilon + fabs(point.potential));
  }

  const Member& member_;
  const int splits_, row_block_, split_;
  double total_, surplus_;
};

// By tiles in float64.
template <Source kSource>
__global__ void __launch_bounds__(kThreads) BoundValueKernel(LaunchTable table) {
  __shared__ TileMemory<kSource == Source::kCosts, kDouble> memory;
  __shared__ double scratch[kMostWarps];
  __shared__ double exponents[2][kTile], masses[2][kTile];  // Rows, columns.
  __shared__ double lacks[2][kTile];
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = table.jobs[work.job];
  const int blocks = BoundParts(job);
  const Member member{job, work.block / blocks};
  const BoundBlock b(member, static_cast<int>(work.block % blocks), scratch);
  const TileContext c = MakeTileContext(job, member.index, 0, 0, job.solver.epsilon);
  const Lacks lacks_of[2] = {b.LacksOf(0), b.LacksOf(1)};
  const auto load = [&](int side, int first) {
    const int k = threadIdx.x, i = min(first + k, job.size[side] - 1);
    if (k >= kTile) return;
    exponents[side][k] = PointOf(member, side, i).exponent;
    masses[side][k] = first + k < job.size[side] ? member.mass(side)[i] : 0;
    lacks[side][k] = lacks_of[side](first + k);
  };
  const int row0 = b.row_block() * kTile;
  const SplitTiles tiles = TilesOfSplit(job, b.split());
  load(0, row0);
  double pairs = 0, sizes = 0;
  for (int col0 = tiles.first * kTile; col0 < tiles.last * kTile; col0 += kTile) {
    __syncthreads();  // The tile before has been read.
    load(1, col0);
    __syncthreads();
    double z[4][4];
    MakeTileOf<kSource, kDouble>(c, row0, col0, &memory, z);
    for (int r = 0; r < 4; ++r) {
      for (int k = 0; k < 4; ++k) {
        const int row = 4 * c.row_lane + r, column = 4 * c.col_lane + k;
        const double product = masses[0][row] * masses[1][column];
        if (!(product > 0)) continue;
        const double exponent = z[r][k] + (exponents[0][row] + exponents[1][column]);
        const double density = exp2(fmin(exponent, 1000.0)), lack = lacks[0][row] * lacks[1][column];
        pairs += product * PairTerm(density, exponent, lack);
        sizes += product * (density + lack) * fabs(z[r][k]);
      }
    }
  }
  b.Store<double>(pairs, sizes, scratch);
}

#if SINKHORN_HOPPER

// Right to 2^-13 of itself.
__device__ float PairTerm(float density, double exponent, float lack) {
  constexpr float kLn2 = 0.693147181f;
  const float ratio = lack * FastReciprocal(density);
  float log2 = __log2f(1 + ratio);
  // Nothing beside it, or nothing of it.
  if (!(ratio < 0x1p100f)) log2 = lack > 0 ? fmaxf(0.0f, __log2f(lack) - static_cast<float>(exponent)) : 0;
  const float log = ratio < 0x1p-8f ? ratio * fmaf(ratio, fmaf(ratio, 1.0f / 3, -0.5f), 1.0f) : kLn2 * log2;
  return (density + lack) * log;
}

// What columns add to exponents, and, beside that, their masses and what they lack.
template <typename Tiles>
class BoundColumns {
 public:
  struct Memory {
    alignas(16) double mass[2][Tiles::kColumns];
    alignas(8) float lack[2][Tiles::kColumns];
  };
  __device__ BoundColumns(const Member& member, const Lacks& lacks, Memory* out)
      : member_(member), lacks_(lacks), out_(*out) {}
  __device__ double Load(int j) {
    own_mass_ = j < lacks_.count ? lacks_.mass[j] : 0;
    own_lack_ = static_cast<float>(lacks_(j));
    return own_mass_ > 0 ? fmax(PointOf(member_, 1, j).exponent, kNoTerm) : kNoTerm;
  }
  __device__ void Store(int slot, int column) {
    out_.mass[slot][column] = own_mass_;
    out_.lack[slot][column] = own_lack_;
  }

 private:
  const Member& member_;
  const Lacks& lacks_;
  Memory& out_;
  double own_mass_ = 0;
  float own_lack_ = 0;
};

#endif

// By exact tiles.
template <bool kFew>
__global__ void __launch_bounds__(kThreads, 2) ExactValueKernel(LaunchTable table) {
#if SINKHORN_HOPPER
  using Tiles = std::conditional_t<kFew, FewTiles, ManyTiles>;
  using Columns = BoundColumns<Tiles>;
  __shared__ typename Tiles::Memory memory;
  __shared__ typename Columns::Memory column_memory;
  __shared__ double scratch[kMostWarps];
  __shared__ ExactSides sides;
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int blocks = BoundParts(job);
  const Member member{job, work.block / blocks};
  const BoundBlock b(member, static_cast<int>(work.block % blocks), scratch);
  const double scale = kLog2E / job.solver.epsilon;
  if (threadIdx.x == 0) sides = ExactSidesOf(member, 0, 0, b.row_block(), scale);
  __syncthreads();
  const Lacks row_lacks = b.LacksOf(0), column_lacks = b.LacksOf(1);
  double start[Tiles::kRows], sums[Tiles::kRows];
  float lack[Tiles::kRows];
#pragma unroll
  for (int r = 0; r < Tiles::kRows; ++r) {
    const int i = min(sides.first_row + Tiles::Row(r), sides.rows - 1);
    start[r] = row_lacks.mass[i] > 0 ? PointOf(member, 0, i).exponent : kNoTerm;
    lack[r] = static_cast<float>(row_lacks(sides.first_row + Tiles::Row(r)));
    sums[r] = 0;
  }
  Tiles tiles(sides, &memory);
  Columns columns(member, column_lacks, &column_memory);
  const TileRange range = TilesOf<Tiles>(sides.columns, b.split(), job.exact_splits[0][0]);
  struct Of {
    double2 mass;
    float2 lack;
  };
  const auto term = [](double exponent, float lack) {
    return PairTerm(FixedPoint::Saturated(exponent + FixedPoint::kStart), exponent, lack);
  };
  tiles.Each(
      range.first, range.last, start, &columns,
      [&](int /*tile*/, int slot, int column) {
        return Of{*reinterpret_cast<const double2*>(&column_memory.mass[slot][column]),
                  *reinterpret_cast<const float2*>(&column_memory.lack[slot][column])};
      },
      [&](int r, double first, double second, const Of& of) {
        sums[r] += of.mass.x * term(first, lack[r] * of.lack.x);
        sums[r] += of.mass.y * term(second, lack[r] * of.lack.y);
      });
  double pairs = 0;
#pragma unroll
  for (int r = 0; r < Tiles::kRows; ++r) {
    const int i = sides.first_row + Tiles::Row(r);
    if (i < sides.rows) pairs += member.mass(0)[i] * sums[r];
  }
  b.Store<float>(pairs, 0, scratch);
#endif
}

}  // namespace

int64_t BoundStartBlocks(const Job& job) { return StartBlocks(job); }
int64_t BoundStepBlocks(const Job& job, int step) {
  return EngineBlocks(job, 0, step == 1 ? 1 : 0, HasDistances(job) ? Geometry::kPlain : Geometry::kExact);
}
int64_t BoundBlocks(const Job& job) { return BoundParts(job); }

void LaunchBoundStart(const LaunchTable& table, int64_t blocks, cudaStream_t stream) {
  LaunchKernel(BoundStartKernel, blocks, kThreads, 0, stream, table);
}
void LaunchBoundStep(const LaunchTable& table, int64_t blocks, Source source, Exact exact, int dim, int step,
                     cudaStream_t stream) {
  switch (exact) {
    case Exact::kNone:
      return LaunchHalfStep(table, blocks, source, kDouble, step == 1 ? 1 : 0, Pass::kBound, step, stream);
    case Exact::kFew:
      return LaunchKernel(ExactBoundKernel<true>, blocks, kThreads, 0, stream, table, step);
    case Exact::kMany:
      return LaunchKernel(ExactBoundKernel<false>, blocks, kThreads, ManySharedBytes(dim), stream, table, step);
  }
}
void LaunchBoundValue(const LaunchTable& table, int64_t blocks, Source source, Exact exact, int dim,
                      cudaStream_t stream) {
  if (exact == Exact::kFew) return LaunchKernel(ExactValueKernel<true>, blocks, kThreads, 0, stream, table);
  if (exact == Exact::kMany) {
    return LaunchKernel(ExactValueKernel<false>, blocks, kThreads, ManySharedBytes(dim), stream, table);
  }
  const auto kernel = source == Source::kProducts    ? BoundValueKernel<Source::kProducts>
                      : source == Source::kDistances ? BoundValueKernel<Source::kDistances>
                                                     : BoundValueKernel<Source::kCosts>;
  LaunchKernel(kernel, blocks, kThreads, 0, stream, table);
}

}  // namespace cuda
}  // namespace sinkhorn
