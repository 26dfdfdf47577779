// Gradients to the points and barycentric projections of clouds in float32, on Hopper's matrix units.
//
// A block has kRows rows and one part of kDepth coordinates of the other cloud. A tile of exponents is made as in the
// half steps; each row's densities, divided by its sum, become matrix fragments as sums of two halves, and are
// multiplied by the points of the tile, which the same shared memory holds. Products of a tile are added up in the
// matrix units, those of all tiles in float32.
//
//   mean_i = sum_j P_ij y_j / sum_j P_ij;  d value / d x_i = 2 kappa sum_j P_ij (x_i - mean_i)
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_cloud_stream.cuh"
#include "kernels/cuda/transport_launch.h"

namespace sinkhorn {
namespace cuda {
namespace {

constexpr int kRows = 128;

__host__ __device__ inline int64_t BlocksOfMember(const Job& job, int side) {
  return CeilDiv(job.size[side], kRows) * CloudDepths(job.dim);
}

#if SINKHORN_HOPPER

constexpr int kOwnGroups = 2;       // Of 64 rows.
constexpr float kDensityBits = 12;  // Densities, at most about 1, are multiplied by 2^12: halves keep small ones.

// c (+)= a b: 64 x 16 halves in registers by 16 x kColumns halves in shared memory, whose rows are contiguous.
template <int kColumns>
__device__ inline void MultiplyRows(const uint32_t (&a)[4], uint64_t b, bool add, float (&c)[kColumns / 8][4]);
template <>
__device__ inline void MultiplyRows<16>(const uint32_t (&a)[4], uint64_t b, bool add, float (&c)[2][4]) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, "
      "p, "
      "1, 1, 1;\n}"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]),
        "+f"(c[1][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
template <>
__device__ inline void MultiplyRows<32>(const uint32_t (&a)[4], uint64_t b, bool add, float (&c)[4][4]) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
      "%14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1, 1;\n}"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]),
        "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]),
        "+f"(c[3][2]), "+f"(c[3][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
template <>
__device__ inline void MultiplyRows<64>(const uint32_t (&a)[4], uint64_t b, bool add, float (&c)[8][4]) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
      "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, "
      "%35}, "
      "%36, p, 1, 1, 1;\n}"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]),
        "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]),
        "+f"(c[3][2]), "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]),
        "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]),
        "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

// Two numbers as sums of two halves each.
__device__ inline void Split(float x, float y, uint32_t* high, uint32_t* low) {
  const __half2 h = __floats2half2_rn(x, y);
  const float2 back = __half22float2(h);
  const __half2 l = __floats2half2_rn(x - back.x, y - back.y);
  *high = *reinterpret_cast<const uint32_t*>(&h);
  *low = *reinterpret_cast<const uint32_t*>(&l);
}

// total += the densities of a tile, whose exponents are acc * factor + terms + level, times its points.
template <int kPlanes, int kColumns>
__device__ void AddTile(const CloudContext& c, const float (&acc)[16][4], const float* terms, const float (&level)[2],
                        uint32_t points, float (&total)[kColumns / 8][4]) {
  const float2* mine = reinterpret_cast<const float2*>(terms) + threadIdx.x % 4;
  const float factor = c.factor;
  uint32_t high[8][4], low[8][4];
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const float2 term = mine[4 * j];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float p0 = FastExp2(fminf(fmaf(acc[j][2 * row], factor, term.x) + level[row], 15.5f));
      const float p1 = FastExp2(fminf(fmaf(acc[j][2 * row + 1], factor, term.y) + level[row], 15.5f));
      Split(p0, p1, &high[j / 2][j % 2 * 2 + row], &low[j / 2][j % 2 * 2 + row]);
    }
  }
  float sums[kColumns / 8][4];
  const uint64_t first = MatrixAt(points, c.row_bytes);
  const int plane = c.plane_bytes / 16, step = 16 * c.row_bytes / 16;
  BeginProducts();
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    MultiplyRows<kColumns>(low[k], first + k * step, k > 0, sums);
    if (kPlanes == 2) MultiplyRows<kColumns>(high[k], first + plane + k * step, true, sums);
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) MultiplyRows<kColumns>(high[k], first + k * step, true, sums);
  CommitProducts();
  WaitForProducts<0>();
#pragma unroll
  for (int e = 0; e < kColumns / 2; ++e) total[e / 4][e % 4] += sums[e / 4][e % 4];
}

// The rows' means of the other cloud of one engine, times 2^kDensityBits and the points' scale.
template <int kPlanes, bool kDeep, int kColumns>
__device__ void SumMeans(const CloudContext& c, const float (&level)[2], int depth,
                         float (&terms)[kOwnGroups][2][kCloudTile], Stream<kPlanes, kDeep, kOwnGroups, true>* stream,
                         float (&total)[kColumns / 8][4]) {
  const int group = threadIdx.x / 128, column = threadIdx.x % 128;
  const int depths = kDeep ? c.depths : 1;
  stream->WantAgain(depth);
  stream->Begin();
#pragma unroll
  for (int e = 0; e < kColumns / 2; ++e) total[e / 4][e % 4] = 0;
  terms[group][0][column] = c.TermOf(c.LoadTerm(c.first_tile * kCloudTile + column));
  for (int tile = c.first_tile, parity = 0; tile < c.last_tile; ++tile, parity ^= 1) {
    const ColumnTerm next = c.LoadTerm((tile + 1) * kCloudTile + column);
    float acc[16][4];
    for (int d = 0; d < depths; ++d) stream->Multiply(acc);
    const uint32_t points = stream->Again();
    WaitForTerms();
    AddTile<kPlanes, kColumns>(c, acc, terms[group][parity], level, points, total);
    stream->Release();
    terms[group][parity ^ 1][column] = c.TermOf(next);
  }
}

#endif

// kColumns: coordinates of a part.
template <int kPlanes, bool kDeep, int kColumns>
__global__ void __launch_bounds__(kThreads, 1) GradientKernel(LaunchTable table, int side) {
#if SINKHORN_HOPPER
  __shared__ CloudContext c;
  __shared__ float terms[kOwnGroups][2][kCloudTile];
  __shared__ alignas(8) uint64_t full[2][kStages<kDeep>], empty[2][kStages<kDeep>];
  using Columns = Stream<kPlanes, kDeep, kOwnGroups, true>;
  // 1. Which rows, and which coordinates.
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int64_t blocks = BlocksOfMember(job, side);
  const Member member{job, work.block / blocks};
  const int depths = CloudDepths(job.dim), depth = static_cast<int>(work.block % blocks % depths);
  const int block = static_cast<int>(work.block % blocks / depths);
  if (member.state(0)->mode != kFloat || !IsSolved(member)) return;
  const OutputView& gradient_out = side == 0 ? job.out.gradient_x : job.out.gradient_y;
  const OutputView& projection_out = side == 0 ? job.out.projection_x : job.out.projection_y;
  const int row0 = block * kRows + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  float gradient[kColumns / 8][4] = {};

  // 2. Gradients of debiased problems have a second term.
  const int engines = job.engines > 1 && gradient_out.data != nullptr ? 2 : 1;
#pragma unroll 1
  for (int t = 0; t < engines; ++t) {
    const int engine = t == 0 ? 0 : 1 + side, pass_side = t == 0 ? side : 0;
    const int other = MeasureOf(engine, 1 - pass_side);
    __syncthreads();
    if (threadIdx.x == 0) {
      FillContext(member, RowBlock{member.index, engine, block, 0, 1}, pass_side, Pass::kMeasure, &c);
      Columns::Init(full[t], empty[t]);
    }
    __syncthreads();
    // A row's densities divided by their sum.
    float level[2];
    double mass[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int i = row0 + 8 * row;
      const double ratio = i < c.rows ? member.ratio(engine, pass_side)[i] : 0;
      mass[row] = i < c.rows ? member.mass(MeasureOf(engine, pass_side))[i] * ratio : 0;
      level[row] = ratio > 0 ? static_cast<float>((c.own_phi[i] + c.reference) * c.scale - log2(ratio)) + kDensityBits
                             : static_cast<float>(kVoid);
    }
    Columns stream(c, full[t], empty[t]);
    float total[kColumns / 8][4];
    SumMeans<kPlanes, kDeep, kColumns>(c, level, depth, terms, &stream, total);

    // 3. Store.
    const double unscale = exp2(-static_cast<double>(kDensityBits)) / member.state(0)->point_scale;
    const double* mine = member.At<double>(job.at.points64[side]);
    const double* my_centre = member.At<double>(job.at.centre[side]);
    const double* centre = member.At<double>(job.at.centre[other]);
#pragma unroll
    for (int e = 0; e < kColumns / 2; ++e) {
      const int row = e % 4 / 2, k = depth * kDepth + e / 4 * 8 + threadIdx.x % 4 * 2 + e % 2;
      const int64_t i = row0 + 8 * row;
      if (i >= c.rows || k >= job.dim) continue;
      const int64_t at = (member.index * c.rows + i) * job.dim + k;
      const double mean = total[e / 4][e % 4] * unscale;
      if (t == 0 && projection_out.data != nullptr) {
        StoreOutput(projection_out, at, mass[row] > 0 ? mean + centre[k] : 0);
      }
      if (gradient_out.data == nullptr) continue;
      const double x = mine[i * job.dim + k] + (my_centre[k] - centre[k]);
      gradient[e / 4][e % 4] += static_cast<float>((t == 0 ? 2 : -2) * job.in.kappa * mass[row] * (x - mean));
      if (t + 1 == engines) StoreOutput(gradient_out, at, gradient[e / 4][e % 4]);
    }
  }
#endif
}

}  // namespace

int64_t GradientBlocks(const Job& job, int side) {
  const bool wanted = side == 0 ? job.out.gradient_x.data != nullptr || job.out.projection_x.data != nullptr
                                : job.out.gradient_y.data != nullptr || job.out.projection_y.data != nullptr;
  return wanted ? job.count * BlocksOfMember(job, side) : 0;
}

void LaunchGradient(const LaunchTable& table, int64_t blocks, int planes, int dim, int side, cudaStream_t stream) {
  const bool deep = CloudDepths(dim) > 1;
  const size_t tile = static_cast<size_t>(planes) * kCloudTile * CloudRowBytes(dim);
  const size_t tiles = deep ? kStreamTiles<true, 1> : kStreamTiles<false, 1>;
  const auto launch = [&](void (*kernel)(LaunchTable, int)) {
    LaunchKernel(kernel, blocks, kThreads, tiles * tile + kPlaneAlignment, stream, table, side);
  };
  if (deep) return launch(planes == 2 ? GradientKernel<2, true, 64> : GradientKernel<1, true, 64>);
  switch (CloudRowBytes(dim)) {
    case 32:
      return launch(planes == 2 ? GradientKernel<2, false, 16> : GradientKernel<1, false, 16>);
    case 64:
      return launch(planes == 2 ? GradientKernel<2, false, 32> : GradientKernel<1, false, 32>);
    default:
      return launch(planes == 2 ? GradientKernel<2, false, 64> : GradientKernel<1, false, 64>);
  }
}

}  // namespace cuda
}  // namespace sinkhorn
