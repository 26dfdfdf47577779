// What bends the plan along a direction, P_ij (D_ij - df_i - dg_j): its sums, which the conjugate gradients begin with,
// and the products in the end. Plain tiles, which serve where those of transport_hessian_matrix.cu and
// transport_hessian_weights.cu do not: it is done a few times, not every iteration.
//
//   D_ij = -2 kappa (<dx_i, y_j> + <x_i, dy_j>) of centred points
//   product_i = 2 kappa (rho_i (x_i - centre of y) + sum_j bent_ij y_j / eps + r_i dx_i - sum_j P_ij dy_j),
//   rho_i = -p_i df_i / eps, r = P 1;  debiased: less that of OT(a, a), whose points move on both sides
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_hessian.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_plan.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

// One direction's tiles of an engine's plan.
template <int kMode>
class BentPlan {
 public:
  using TE = ExponentOf<kMode>;
  using T = DensityOf<kMode>;
  struct Memory {
    TileMemory<false, kMode> tile;
    TE terms[2][kTile], potentials[2][kTile];  // Of rows and columns.
  };

  __device__ BentPlan(const Member& member, int engine, int side, int64_t q, Memory* memory)
      : c_(MakeTileContext(member.job, member.index, engine, side, member.state(engine)->epsilon)),
        member_(member),
        v_(VectorsOf(member, engine)),
        q_(q),
        memory_(*memory),
        own_(StepsOf(member, MeasureOf(engine, side), q)),
        others_(StepsOf(member, MeasureOf(engine, 1 - side), q)) {
    const int parity = member.state(engine)->parity;
    for (int s = 0; s < 2; ++s) {
      phi_[s] = member.phi(engine, parity, s);
      log_mass_[s] = member.log_mass(MeasureOf(engine, s));
      const int64_t at =
          sizeof(TE) == 4 ? member.job.at.points32[MeasureOf(engine, s)] : member.job.at.points64[MeasureOf(engine, s)];
      points_[s] = member.At<TE>(at);
    }
  }

  __device__ const TileContext& context() const { return c_; }
  __device__ const ProductVectors& vectors() const { return v_; }

  // Of the rows from row0 on, before their tiles. `bent`: potentials are known.
  __device__ void Begin(int row0, bool bent) {
    row0_ = row0;
    bent_ = bent;
    __syncthreads();  // The rows before have been read.
    LoadTerms(0, row0, c_.rows);
  }
  // p: the plan's entries, 0 beyond it; w: bent ones.
  __device__ void Make(int col0, T (&p)[4][4], T (&w)[4][4]) {
    TE z[4][4], bend[4][4] = {};
    __syncthreads();  // The columns before have been read.
    LoadTerms(1, col0, c_.columns);
    MakeTile<false, kMode>(c_, row0_, col0, &memory_.tile, z);
    const TE *x = points_[c_.side], *y = points_[1 - c_.side];
    const auto point = [&](const TE* points) { return [=](int64_t i) { return points[i]; }; };
    const auto step = [&](const Steps& steps) { return [=](int64_t i) { return steps.template At<TE>(i); }; };
    if (own_.data != nullptr) AddProducts(col0, step(own_), point(y), bend);
    if (others_.data != nullptr) AddProducts(col0, point(x), step(others_), bend);
    const TE factor = static_cast<TE>(-2 * member_.job.in.kappa);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int i = 4 * c_.row_lane + r;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int j = 4 * c_.col_lane + k;
        p[r][k] = Saturated(static_cast<T>(z[r][k] + (memory_.terms[0][i] + memory_.terms[1][j])));
        const TE e = factor * bend[r][k] - memory_.potentials[0][i] - memory_.potentials[1][j];
        w[r][k] = static_cast<T>(p[r][k] * e);
      }
    }
  }
  // Entry [j, k] of the columns' points and steps.
  __device__ T Point(int64_t j, int k) const { return static_cast<T>(points_[1 - c_.side][j * c_.dim + k]); }
  __device__ T Step(int64_t j, int k) const { return others_.template At<T>(j * c_.dim + k); }
  __device__ bool others_move() const { return others_.data != nullptr; }
  __device__ const Steps& own() const { return own_; }

 private:
  // which: 0 for rows, 1 for columns.
  __device__ void LoadTerms(int which, int first, int count) {
    if (threadIdx.x >= kTile) return;
    const int side = which == 0 ? c_.side : 1 - c_.side, i = first + threadIdx.x;
    const double reference = phi_[1 - c_.side][0];
    memory_.terms[which][threadIdx.x] = static_cast<TE>(
        i < count ? Term(phi_[side], log_mass_[side], which == 0 ? -reference : reference, c_.scale, i) : kVoid);
    memory_.potentials[which][threadIdx.x] = bent_ && i < count ? static_cast<TE>(v_.potential(side, q_)[i]) : TE(0);
  }

  // out += the products of rows(i) with columns(j).
  template <typename Rows, typename Columns>
  __device__ void AddProducts(int col0, Rows rows, Columns columns, TE (&out)[4][4]) {
    constexpr int kSteps = TileMemory<false, kMode>::kDepth;
    auto& tile = memory_.tile;
    for (int first = 0; first < c_.dim; first += kSteps) {
      const int depth = min(kSteps, c_.dim - first);
      __syncthreads();  // What is there has been read.
      for (int e = threadIdx.x; e < kSteps * kTile; e += kThreads) {
        const int k = e % kSteps, i = e / kSteps;
        const int64_t row = min(row0_ + i, c_.rows - 1), column = min(col0 + i, c_.columns - 1);
        tile.rows[k][i] = k < depth ? rows(row * c_.dim + first + k) : TE(0);
        tile.columns[k][i] = k < depth ? columns(column * c_.dim + first + k) : TE(0);
      }
      __syncthreads();
      for (int k = 0; k < depth; ++k) {
        TE a[4], b[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) a[r] = tile.rows[k][4 * c_.row_lane + r];
#pragma unroll
        for (int r = 0; r < 4; ++r) b[r] = tile.columns[k][4 * c_.col_lane + r];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
#pragma unroll
          for (int s = 0; s < 4; ++s) out[r][s] += a[r] * b[s];
        }
      }
    }
  }

  const TileContext c_;
  const Member member_;
  const ProductVectors v_;
  const int64_t q_;
  Memory& memory_;
  const Steps own_, others_;
  const double *phi_[2], *log_mass_[2];
  const TE* points_[2];
  int row0_ = 0;
  bool bent_ = false;
};

// ---- Setup: P o D's sums, and the diagonal of S -------------------------------------------------------------------

__device__ double SumOfRow(double sum) {  // Over the 16 threads of a row.
  for (int lane = 8; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
  return sum;
}

__host__ __device__ int64_t SetupBlocks(const Job& job) {
  int64_t blocks = 0;
  for (int e = 0; e < job.engines; ++e) {
    blocks += HasProducts(job, e) ? RowBlocks(job, e, 0) + RowBlocks(job, e, 1) : 0;
  }
  return blocks * job.in.hessian.count;
}

template <int kMode>
__global__ void __launch_bounds__(kThreads) SetupKernel(LaunchTable table) {
  using T = DensityOf<kMode>;
  __shared__ typename BentPlan<kMode>::Memory memory;
  __shared__ T weights[kTile];  // Of columns.
  // 1. Which rows, which direction.
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int64_t blocks = SetupBlocks(job), count = job.in.hessian.count;
  const Member member{job, work.block / blocks};
  const int64_t q = work.block % blocks % count;
  int64_t block = work.block % blocks / count;
  int engine = 0, side = 0;
  for (; !HasProducts(job, engine) || block >= RowBlocks(job, engine, side); engine += side, side ^= 1) {
    if (HasProducts(job, engine)) block -= RowBlocks(job, engine, side);
  }
  if (member.state(engine)->mode != kMode) return;
  const int row0 = static_cast<int>(block) * kTile;

  // 2. Sums over the columns.
  BentPlan<kMode> plan(member, engine, side, q, &memory);
  const TileContext& c = plan.context();
  const ProductVectors& v = plan.vectors();
  const bool squared = side == 1 && q == 0;
  double sums[4] = {}, squares[4] = {};
  plan.Begin(row0, false);
  for (int col0 = 0; col0 < c.columns; col0 += kTile) {
    if (threadIdx.x < kTile) {  // Read after the barriers of Make, as what was there.
      const int j = col0 + threadIdx.x;
      weights[threadIdx.x] = squared && j < c.columns ? static_cast<T>(v.inverse(0)[j]) : T(0);
    }
    T p[4][4], w[4][4];
    plan.Make(col0, p, w);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      T sum = 0, square = 0;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        sum += w[r][k];
        // P / (r + p) first: squares of plan entries may be too small for T.
        square += p[r][k] * weights[4 * c.col_lane + k] * p[r][k];
      }
      sums[r] += sum;
      squares[r] += square;
    }
    __syncthreads();  // Weights have been read.
  }

  // 3. Right-hand sides.
  for (int r = 0; r < 4; ++r) {
    const double sum = SumOfRow(sums[r]), square = SumOfRow(squares[r]);
    const int i = row0 + 4 * c.row_lane + r;
    if (c.col_lane != 0 || i >= c.rows) continue;
    StoreRight(v, side, q, i, sum);
    if (squared) StoreCondition(job, v, i, square);
  }
}

// ---- Products -----------------------------------------------------------------------------------------------------

template <typename T>
struct StoreMemory {
  T plan[kTile][kTile + 1];   // [column][row]
  T right[kTile][kTile + 1];  // [column][coordinate]
};

// out += weight * the tile in registers times `right`.
template <typename T, typename Right>
__device__ void AddTile(const TileContext& c, const T (&entries)[4][4], T weight, Right right, StoreMemory<T>* memory,
                        T (&out)[4][4]) {
  __syncthreads();  // What is there has been read.
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int k = 0; k < 4; ++k) memory->plan[4 * c.col_lane + k][4 * c.row_lane + r] = entries[r][k] * weight;
  }
  for (int e = threadIdx.x; e < kTile * kTile; e += kThreads) {
    memory->right[e / kTile][e % kTile] = right(e / kTile, e % kTile);
  }
  __syncthreads();
  for (int j = 0; j < kTile; ++j) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        out[r][k] += memory->plan[j][4 * c.row_lane + r] * memory->right[j][4 * c.col_lane + k];
      }
    }
  }
}

__host__ __device__ int64_t StoreBlocksOf(const Job& job, int side) {
  if (ProductOf(job, side).data == nullptr) return 0;
  return RowBlocks(job, 0, side) * job.in.hessian.count * CeilDiv(job.dim, kTile);
}

// One engine's part: rows 4 row_lane + r, coordinates first + 4 col_lane + k.
template <int kMode>
__device__ void AddEngine(const Member& member, int engine, int side, int64_t q, int row0, int first, double sign,
                          typename BentPlan<kMode>::Memory* memory, double (&product)[4][4]) {
  using T = DensityOf<kMode>;
  const Job& job = member.job;
  BentPlan<kMode> plan(member, engine, side, q, memory);
  const TileContext& c = plan.context();
  const ProductVectors& v = plan.vectors();
  const double epsilon = job.solver.epsilon;
  T sums[4][4] = {};
  plan.Begin(row0, true);
  for (int col0 = 0; col0 < c.columns; col0 += kTile) {
    T p[4][4], w[4][4];
    plan.Make(col0, p, w);
    auto* tiles = reinterpret_cast<StoreMemory<T>*>(DynamicShared());
    const auto there = [&](int j, int k) { return col0 + j < c.columns && first + k < c.dim; };
    AddTile(
        c, w, static_cast<T>(1 / epsilon),
        [&](int j, int k) { return there(j, k) ? plan.Point(col0 + j, first + k) : T(0); }, tiles, sums);
    if (!plan.others_move()) continue;
    AddTile(
        c, p, T(-1), [&](int j, int k) { return there(j, k) ? plan.Step(col0 + j, first + k) : T(0); }, tiles, sums);
  }
  for (int r = 0; r < 4; ++r) {
    const int64_t i = row0 + 4 * c.row_lane + r;
    if (i >= c.rows) continue;
    for (int s = 0; s < 4; ++s) {
      const int k = first + 4 * c.col_lane + s;
      if (k >= c.dim) continue;
      const double step = plan.own().data != nullptr ? plan.own().template At<double>(i * c.dim + k) : 0;
      const double rest = ProductOfRow(member, v, engine, side, q, i, k, step);
      product[r][s] += sign * 2 * job.in.kappa * (sums[r][s] + rest);
    }
  }
}

template <int kMode>
__global__ void __launch_bounds__(kThreads) ProductStoreKernel(LaunchTable table) {
  __shared__ typename BentPlan<kMode>::Memory memory;
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int64_t of_rows = StoreBlocksOf(job, 0), blocks = of_rows + StoreBlocksOf(job, 1);
  const Member member{job, work.block / blocks};
  const int side = work.block % blocks < of_rows ? 0 : 1;
  const int64_t rest = work.block % blocks - (side == 0 ? 0 : of_rows), chunks = CeilDiv(job.dim, kTile);
  const int64_t count = job.in.hessian.count, q = rest / chunks % count;
  const int first = static_cast<int>(rest % chunks) * kTile, row0 = static_cast<int>(rest / chunks / count) * kTile;
  if (member.state(0)->mode != kMode || !AreDone(member)) return;
  double product[4][4] = {};
  AddEngine<kMode>(member, 0, side, q, row0, first, 1, &memory, product);
  if (job.engines > 1 && HasProducts(job, 1 + side)) {
    AddEngine<kMode>(member, 1 + side, 0, q, row0, first, -1, &memory, product);
  }
  const int row_lane = threadIdx.x / 16, col_lane = threadIdx.x % 16;
  for (int r = 0; r < 4; ++r) {
    const int64_t i = row0 + 4 * row_lane + r;
    for (int s = 0; s < 4; ++s) {
      const int k = first + 4 * col_lane + s;
      if (i >= job.size[side] || k >= job.dim) continue;
      StoreProduct(member, side, q, i, k, product[r][s]);
    }
  }
}

}  // namespace

int64_t ProductSetupBlocks(const Job& job) { return SetupBlocks(job); }
int64_t ProductStoreBlocks(const Job& job) { return StoreBlocksOf(job, 0) + StoreBlocksOf(job, 1); }

void LaunchProductSetup(const LaunchTable& table, int64_t blocks, Mode mode, cudaStream_t stream) {
  switch (mode) {
    case kFloat:
      return LaunchKernel(SetupKernel<kFloat>, blocks, kThreads, 0, stream, table);
    case kMixed:
      return LaunchKernel(SetupKernel<kMixed>, blocks, kThreads, 0, stream, table);
    case kDouble:
      return LaunchKernel(SetupKernel<kDouble>, blocks, kThreads, 0, stream, table);
  }
}

void LaunchProductStore(const LaunchTable& table, int64_t blocks, Mode mode, cudaStream_t stream) {
  constexpr size_t kFloatBytes = sizeof(StoreMemory<float>), kDoubleBytes = sizeof(StoreMemory<double>);
  switch (mode) {
    case kFloat:
      return LaunchKernel(ProductStoreKernel<kFloat>, blocks, kThreads, kFloatBytes, stream, table);
    case kMixed:
      return LaunchKernel(ProductStoreKernel<kMixed>, blocks, kThreads, kFloatBytes, stream, table);
    case kDouble:
      return LaunchKernel(ProductStoreKernel<kDouble>, blocks, kThreads, kDoubleBytes, stream, table);
  }
}

}  // namespace cuda
}  // namespace sinkhorn
