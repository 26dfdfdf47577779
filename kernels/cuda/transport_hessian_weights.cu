// The bent plan's sums and products (transport_hessian_bend.cu) by tiles of float64's matrix units (Hopper), which make
// D beside exponents: of members in kMixed, and of clouds in float32 of more coordinates than those of
// transport_hessian_matrix.cu.
//
// Products take the weights P o (D - df - dg) and P of a chunk of rows, made once (transport_weights.cuh), by points
// and by steps. An item is a direction's kTile rows; of debiased problems, both plans' weights.
#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_cluster.cuh"
#include "kernels/cuda/transport_hessian.cuh"
#include "kernels/cuda/transport_job.h"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_ranks.cuh"
#include "kernels/cuda/transport_weights.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

constexpr int kStepBlock = 64 * kThreads;  // Numbers that a block brings.

__host__ __device__ inline bool IsBent(const Job& job, int mode) {
  return MultipliesDoubles(job) && mode != kDouble && (mode != kFloat || !MayHaveStepHalves(job));
}

// Whether a plan's columns move.
__host__ __device__ inline bool OthersMove(const Job& job, const PlanSide& plan) {
  return DirectionOf(job, plan.other).data != nullptr;
}
__host__ __device__ inline int TermsOf(const Job& job, int side) {
  return job.engines > 1 && HasProducts(job, 1 + side) ? 2 : 1;
}
__host__ __device__ inline int64_t BentBytes(const Job& job, const PlanSide& plan) {
  return WeightColumnBytes(job.size[plan.other]) * (OthersMove(job, plan) ? 2 : 1);
}
__host__ __device__ inline int64_t ItemBytes(const Job& job, int side) {
  int64_t bytes = 0;
  for (int t = 0; t < TermsOf(job, side); ++t) bytes += BentBytes(job, PlanSide::Term(side, t));
  return bytes;
}
__host__ __device__ inline int64_t ItemsOf(const Job& job, int side) {
  return ProductOf(job, side).data == nullptr ? 0 : RowBlocks(job, 0, side) * job.in.hessian.count;
}
// Of the setup: an engine's rows.
__host__ __device__ inline int64_t SetupBlocksOf(const Job& job, int engine, int side) {
  return HasProducts(job, engine) ? RowBlocks(job, engine, side) * job.in.hessian.count : 0;
}
__host__ __device__ inline int64_t SetupBlocks(const Job& job) {
  int64_t blocks = 0;
  for (int e = 0; e < job.engines; ++e) blocks += SetupBlocksOf(job, e, 0) + SetupBlocksOf(job, e, 1);
  return blocks;
}

__global__ void __launch_bounds__(kThreads) StepDoublesKernel(LaunchTable table) {
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int64_t doubles[2] = {StepDoubles(job, 0), StepDoubles(job, 1)};
  const int64_t blocks[2] = {CeilDiv(doubles[0], kStepBlock), CeilDiv(doubles[1], kStepBlock)};
  const Member member{job, work.block / (blocks[0] + blocks[1])};
  const int64_t block = work.block % (blocks[0] + blocks[1]);
  const int measure = block < blocks[0] ? 0 : 1;
  const Steps steps = GivenSteps(member, measure, 0);
  if (steps.data == nullptr) return;
  double* out = StepDoublesOf(member, measure);
  const int64_t first = (measure == 0 ? block : block - blocks[0]) * kStepBlock;
  const int64_t last = min(doubles[measure], first + kStepBlock);
  for (int64_t e = first + threadIdx.x; e < last; e += kThreads) out[e] = steps.At<double>(e);
}

#if SINKHORN_HOPPER

using BentTiles = ManyTilesOf<4, true>;

// Of a block: a direction's rows of a plan.
struct BentRows {
  int64_t member, q;
  int engine, side, block, part;
};

// A vector, zeros where there is none.
struct ColumnVector {
  const double* data;
  int count;
  __device__ double operator()(int j) const { return data != nullptr && j < count ? data[j] : 0; }
};

// Tiles of a direction's rows. All threads of the block.
struct BentMemory {
  BentTiles::Memory tiles;
  alignas(16) double columns[2][BentTiles::kColumns];
  ExactSides sides;
  ExactTerms terms;
  ProductVectors v;
};
class BentPlan {
 public:
  __device__ BentPlan(const Member& member, const BentRows& of, BentMemory* memory)
      : member_(member), memory_(*memory) {
    const PlanSide plan(of.engine, of.side);
    const EngineState& state = *member.state(of.engine);
    phi_ = member.phi(of.engine, state.parity, of.side);
    mass_ = member.mass(plan.own);
    if (threadIdx.x == 0) {
      const double scale = kLog2E / state.epsilon;
      memory_.sides = ExactSidesOf(member, of.engine, of.side, of.block, scale);
      memory_.sides.dx = StepsOfDirection(plan.own, of.q);
      memory_.sides.dy = StepsOfDirection(plan.other, of.q);
      memory_.terms = ExactTermsOf(member, plan, scale);
      memory_.v = VectorsOf(member, of.engine);
    }
    __syncthreads();
  }

  __device__ const ExactSides& sides() const { return memory_.sides; }
  __device__ const ProductVectors& vectors() const { return memory_.v; }
  __device__ const double* mass() const { return mass_; }

  // use(r, densities of two neighbours, products with steps, begin(column, numbers of theirs)). A product times
  // bend_factor() is D.
  __device__ double bend_factor() const { return -2 * member_.job.in.kappa; }
  template <typename Begin, typename Use>
  __device__ void Each(const TileRange& range, const ColumnVector& numbers, Begin begin, Use use) const {
    BentTiles tiles(memory_.sides, &memory_.tiles);
    double start[BentTiles::kRows];
#pragma unroll
    for (int r = 0; r < BentTiles::kRows; ++r) {
      start[r] = StartOfRow(memory_.sides, memory_.terms, phi_, mass_, BentTiles::Row(r));
    }
    TermsBeside columns(memory_.terms, numbers, memory_.columns);
    tiles.Each(
        range.first, range.last, start, &columns,
        [&](int tile, int slot, int column) {
          return begin(int64_t{tile} * BentTiles::kColumns + column,
                       *reinterpret_cast<const double2*>(&memory_.columns[slot][column]));
        },
        [&](int r, double first, double second, double bend, double next_bend, const auto& begun) {
          const float densities[2] = {FixedPoint::Saturated(first), FixedPoint::Saturated(second)};
          const double bends[2] = {bend, next_bend};
          use(r, densities, bends, begun);
        });
  }

 private:
  __device__ const double* StepsOfDirection(int measure, int64_t q) const {
    const Job& job = member_.job;
    if (DirectionOf(job, measure).data == nullptr) return nullptr;
    return StepDoublesOf(member_, measure) + q * job.size[measure] * job.dim;
  }

  const Member& member_;
  BentMemory& memory_;
  const double *phi_, *mass_;
};

#endif

// ---- Setup --------------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads, 1) BentSetupKernel(LaunchTable table, int ranks) {
#if SINKHORN_HOPPER
  __shared__ BentMemory memory;
  __shared__ BentRows of;
  __shared__ double parts[2][BentTiles::kGroups][kTile], sums[2][kTile];  // P o D, squares.
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  if (threadIdx.x == 0) {
    const int64_t blocks = SetupBlocks(job), index = work.block / ranks, count = job.in.hessian.count;
    of = {index / blocks, 0, 0, 0, 0, static_cast<int>(work.block % ranks)};
    int64_t rest = index % blocks;
    for (; rest >= SetupBlocksOf(job, of.engine, of.side); of.engine += of.side, of.side ^= 1) {
      rest -= SetupBlocksOf(job, of.engine, of.side);
    }
    of.q = rest % count;
    of.block = static_cast<int>(rest / count);
  }
  __syncthreads();
  const Member member{job, of.member};
  if (!IsBent(job, member.state(of.engine)->mode)) return;
  const BentPlan plan(member, of, &memory);
  const bool squared = of.side == 1 && of.q == 0;
  const ColumnVector weights = {squared ? plan.vectors().inverse(0) : nullptr, plan.sides().columns};
  const float factor = static_cast<float>(plan.bend_factor());
  SplitSum sums_of_rows[BentTiles::kRows] = {};
  double squares[BentTiles::kRows] = {};
  plan.Each(
      TilesOf<BentTiles>(plan.sides().columns, of.part, ranks), weights,
      [](int64_t /*column*/, const double2& weight) { return weight; },
      [&](int r, const float(&p)[2], const double(&bends)[2], const double2& weight) {
        sums_of_rows[r].Add(p[0] * (factor * static_cast<float>(bends[0])));
        sums_of_rows[r].Add(p[1] * (factor * static_cast<float>(bends[1])));
        if (squared) {
          // P / (r + p) first: squares of plan entries may be too small for float.
          squares[r] = fma(p[1] * weight.y, p[1], fma(p[0] * weight.x, p[0], squares[r]));
        }
      });
#pragma unroll
  for (int r = 0; r < BentTiles::kRows; ++r) {
    double own = sums_of_rows[r].value();
    for (int lane = 1; lane <= 2; lane *= 2) {
      own += __shfl_xor_sync(0xffffffffu, own, lane);
      squares[r] += __shfl_xor_sync(0xffffffffu, squares[r], lane);
    }
    if (threadIdx.x % 4 != 0) continue;
    parts[0][BentTiles::Group()][BentTiles::Row(r)] = own;
    parts[1][BentTiles::Group()][BentTiles::Row(r)] = squares[r];
  }
  __syncthreads();
  const int row = threadIdx.x % kTile, which = threadIdx.x / kTile;
  if (which < 2) {
    double sum = 0;
    for (int group = 0; group < BentTiles::kGroups; ++group) sum += parts[which][group][row];
    sums[which][row] = sum;
  }
  if (ranks > 1) SyncCluster();
  const int64_t i = plan.sides().first_row + row;
  if (of.part == 0 && which < 2 && i < plan.sides().rows) {
    double sum = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      sum += ranks > 1 ? LoadRemote(&sums[which][row], rank) : sums[which][row];
    }
    const double mass = plan.mass()[i];
    if (which == 0) StoreRight(plan.vectors(), of.side, of.q, i, mass * sum);
    if (which == 1 && squared) StoreCondition(job, plan.vectors(), i, mass * sum * mass);
  }
  if (ranks > 1) SyncCluster();  // What others have is read.
#endif
}

// ---- Products -----------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads, 1) BentWeightsKernel(LaunchTable table, int side, int chunk, int splits) {
#if SINKHORN_HOPPER
  __shared__ BentMemory memory;
  __shared__ BentRows of;
  __shared__ char* segments[2];  // Of bent weights, and of the plan's, or null.
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  if (threadIdx.x == 0) {
    const int64_t items = ItemsOfChunk(job, side, ItemsOf(job, side), chunk), index = work.block / splits;
    const int terms = TermsOf(job, side), term = static_cast<int>(index % terms);
    const int64_t item = index / terms % items, all = int64_t{chunk} * job.weight_items[side] + item;
    const PlanSide plan = PlanSide::Term(side, term);
    of = {index / terms / items,
          all % job.in.hessian.count,
          plan.engine,
          plan.side,
          static_cast<int>(all / job.in.hessian.count),
          static_cast<int>(work.block % splits)};
    segments[0] = WeightsOfItem(Member{job, of.member}, item, ItemBytes(job, side)) +
                  (term == 0 ? 0 : BentBytes(job, PlanSide::Term(side, 0)));
    segments[1] = OthersMove(job, plan) ? segments[0] + WeightColumnBytes(job.size[plan.other]) : nullptr;
  }
  __syncthreads();
  const Member member{job, of.member};
  if (!IsBent(job, member.state(0)->mode) || !AreDone(member)) return;
  const BentPlan plan(member, of, &memory);
  double own[BentTiles::kRows];
#pragma unroll
  for (int r = 0; r < BentTiles::kRows; ++r) {
    const int i = min(plan.sides().first_row + BentTiles::Row(r), plan.sides().rows - 1);
    own[r] = plan.vectors().potential(of.side, of.q)[i];
  }
  const double factor = plan.bend_factor();
  const float sign = of.engine == 0 ? 1 : -1, scale = static_cast<float>(sign / job.solver.epsilon);
  struct Of {
    double2 potentials;
    int64_t column;
  };
  float bent[2] = {}, densities[2] = {};
  plan.Each(
      TilesOf<BentTiles>(plan.sides().columns, of.part, splits),
      ColumnVector{plan.vectors().potential(1 - of.side, of.q), plan.sides().columns},
      [](int64_t column, const double2& potentials) {
        return Of{potentials, column};
      },
      [&](int r, const float(&p)[2], const double(&bends)[2], const Of& of_columns) {
        const double even_bend = fma(factor, bends[0], -(own[r] + of_columns.potentials.x));
        const double odd_bend = fma(factor, bends[1], -(own[r] + of_columns.potentials.y));
        const float even = p[0] * (scale * static_cast<float>(even_bend));
        const float odd = p[1] * (scale * static_cast<float>(odd_bend));
        const float next[2] = {-sign * p[0], -sign * p[1]};
        if (r % 2 == 1) {
          __stcg(WeightsAt<BentTiles>(segments[0], of_columns.column, r), make_float4(bent[0], even, bent[1], odd));
          if (segments[1] != nullptr) {
            __stcg(WeightsAt<BentTiles>(segments[1], of_columns.column, r),
                   make_float4(densities[0], next[0], densities[1], next[1]));
          }
        }
        bent[0] = even, bent[1] = odd;
        densities[0] = next[0], densities[1] = next[1];
      });
#endif
}

__global__ void __launch_bounds__(kSumThreads, 1) BentSumsKernel(LaunchTable table, int side, int chunk, int ranks) {
#if SINKHORN_HOPPER
  __shared__ WeightSegments segments;
  __shared__ ProductVectors v[2];  // Of the plans that products are made of.
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const SumWork of = SumWork::Find(job, side, ItemsOf(job, side), chunk, work.block, ranks);
  const int64_t count = job.in.hessian.count, q = of.of_all % count;
  const Member member{job, of.member};
  if (!IsBent(job, member.state(0)->mode) || !AreDone(member)) return;
  const int terms = TermsOf(job, side);
  if (threadIdx.x == 0) {
    segments.Begin();
    char* weights = WeightsOfItem(member, of.item, ItemBytes(job, side));
    for (int t = 0; t < terms; ++t) {
      const PlanSide plan = PlanSide::Term(side, t);
      const int columns = job.size[plan.other];
      v[t] = VectorsOf(member, plan.engine);
      weights = segments.Add(weights, member.At<double>(job.at.points64[plan.other]), columns);
      if (!OthersMove(job, plan)) continue;
      weights = segments.Add(weights, StepDoublesOf(member, plan.other) + q * columns * job.dim, columns);
    }
  }
  __syncthreads();
  const int64_t first_row = of.of_all / count * kTile;
  const Steps own = StepsOf(member, side, q);
  AddWeighted<false>(segments, job.dim, of, ranks, job.size[side] - first_row,
                     [&](int row, int k, double value, double /*mass*/) {
                       const int64_t i = first_row + row;
                       const double step = own.data != nullptr ? own.At<double>(i * job.dim + k) : 0;
                       double product = member.mass(side)[i] * value;
                       for (int t = 0; t < terms; ++t) {
                         const PlanSide plan = PlanSide::Term(side, t);
                         const double rest = ProductOfRow(member, v[t], plan.engine, plan.side, q, i, k, step);
                         product += t == 0 ? rest : -rest;
                       }
                       StoreProduct(member, side, q, i, k, 2 * job.in.kappa * product);
                     });
#endif
}

// Clouds that halves serve, but for members in kMixed, have less memory.
WeightShape ShapeOf(const Job& job, int side) {
  const int terms = TermsOf(job, side), columns = terms > 1 ? std::max(job.size[0], job.size[1]) : job.size[1 - side];
  return {ItemsOf(job, side), ItemBytes(job, side), terms, CeilDiv(columns, kManyColumns),
          MayHaveStepHalves(job) ? kWeightBytesMost / 4 : kWeightBytesMost};
}

}  // namespace

bool BendsExactly(const Job& job, Mode mode) { return IsBent(job, mode); }

int64_t BentWeightBytes(const Job& job) {
  if (job.in.hessian.count == 0 || !MultipliesDoubles(job)) return 0;
  int64_t bytes = 0;
  for (int side = 0; side < 2; ++side) {
    if (ItemsOf(job, side) > 0) bytes = std::max(bytes, job.weight_items[side] * ItemBytes(job, side));
  }
  return bytes;
}

int64_t StepDoubleBlocks(const Job& job) {
  return IsCosine(job) ? 0 : CeilDiv(StepDoubles(job, 0), kStepBlock) + CeilDiv(StepDoubles(job, 1), kStepBlock);
}
void LaunchStepDoubles(const LaunchTable& table, int64_t blocks, cudaStream_t stream) {
  LaunchKernel(StepDoublesKernel, blocks, kThreads, 0, stream, table);
}

int BentSetupRanks(const Job& job) {
  return RanksOf(SetupBlocks(job), CeilDiv(std::max(job.size[0], job.size[1]), kManyColumns), 2);
}
int64_t BentSetupBlocks(const Job& job) { return SetupBlocks(job) * BentSetupRanks(job); }
void LaunchBentSetup(const LaunchTable& table, int64_t blocks, int dim, int ranks, cudaStream_t stream) {
  LaunchCluster(BentSetupKernel, blocks, ranks, kThreads, ManySharedBytes(dim, 2), stream, table, ranks);
}

int BentItems(const Job& job, int side) {
  if (job.in.hessian.count == 0 || !MultipliesDoubles(job)) return 0;
  return WeightItems(job, ShapeOf(job, side));
}
WeightLaunch BentLaunchOf(const Job& job, int side) {
  return WeightLaunchOf(job, side, ShapeOf(job, side), kProcessors);
}
int64_t BentWeightBlocks(const Job& job, int side, int chunk, int splits) {
  return job.count * ItemsOfChunk(job, side, ItemsOf(job, side), chunk) * TermsOf(job, side) * splits;
}
int64_t BentSumBlocks(const Job& job, int side, int chunk, int ranks) {
  return job.count * ItemsOfChunk(job, side, ItemsOf(job, side), chunk) * WeightGroups(job.dim).groups * ranks;
}
void LaunchBentWeights(const LaunchTable& table, int64_t blocks, int dim, int splits, int side, int chunk,
                       cudaStream_t stream) {
  LaunchKernel(BentWeightsKernel, blocks, kThreads, ManySharedBytes(dim, 2), stream, table, side, chunk, splits);
}
void LaunchBentSums(const LaunchTable& table, int64_t blocks, int ranks, int side, int chunk, cudaStream_t stream) {
  LaunchCluster(BentSumsKernel, blocks, ranks, kSumThreads, kWeightSharedBytes, stream, table, side, chunk, ranks);
}

}  // namespace cuda
}  // namespace sinkhorn
