// The preparation's steps 0 to 2: points on the sphere, what chunks of points and costs add up to, and the clouds'
// centres.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_PREPARE_SUMS_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_PREPARE_SUMS_CUH_

#include "kernels/cuda/transport_prepare_states.cuh"

namespace sinkhorn {
namespace cuda {

// Step 0: one warp a point. The largest coordinate is taken out first: no square over- or underflows.
__device__ inline void NormalizePoints(const Member& member, int side, int block) {
  const Job& job = member.job;
  const TensorView& view = side == 0 ? job.in.x : job.in.y;
  const int dim = job.dim, count = job.size[side], first = block * kSpherePoints, lane = threadIdx.x % 32;
  for (int i = first + static_cast<int>(threadIdx.x) / 32; i < min(count, first + kSpherePoints); i += kWarps) {
    double* out = member.At<double>(job.at.points64[side]) + int64_t{i} * dim;
    double largest = 0, norm2 = 0;
    for (int k = lane; k < dim; k += 32) {
      out[k] = LoadInput(view, member.index, int64_t{count} * dim, int64_t{i} * dim + k);
      largest = fmax(largest, fabs(out[k]));
    }
    for (int other = 16; other > 0; other /= 2) largest = fmax(largest, __shfl_xor_sync(0xffffffffu, largest, other));
    if (!(largest > 0)) largest = 1;
    for (int k = lane; k < dim; k += 32) {
      out[k] /= largest;
      norm2 += out[k] * out[k];
    }
    for (int other = 16; other > 0; other /= 2) norm2 += __shfl_xor_sync(0xffffffffu, norm2, other);
    const double norm = norm2 > 0 ? sqrt(norm2) : 1;
    for (int k = lane; k < dim; k += 32) out[k] /= norm;
    if (lane == 0) member.At<double>(job.at.length[side])[i] = largest * norm;
  }
}

// A cloud before it is centred: as given, or where step 0 left it.
template <bool kSquares>
__device__ const TensorView& PointsOf(const Member& member, int side, TensorView* sphere) {
  const Job& job = member.job;
  if (kSquares || !IsCosine(job)) return side == 0 ? job.in.x : job.in.y;
  *sphere = {DType::kFloat64, member.At<double>(job.at.points64[side]), /*shared=*/true};
  return *sphere;
}

// Coordinates side by side of a tensor whose entries for the member begin at `first`.
template <int kWidth, typename Number>
__device__ void LoadCoordinates(const TensorView& view, int64_t first, int64_t e, Number (&to)[kWidth]) {
  if constexpr (kWidth == 4) {
    const float4 v = __ldg(reinterpret_cast<const float4*>(static_cast<const float*>(view.data) + first + e));
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else {
    to[0] = LoadDouble(view.dtype, view.data, first + e);
  }
}
// Whether float32 coordinates may be read so many at a time.
__device__ inline bool AreSideBySide(const TensorView& view, int dim, int width) {
  return view.dtype == DType::kFloat32 && dim % width == 0 &&
         reinterpret_cast<uintptr_t>(view.data) % (width * sizeof(float)) == 0;
}

// Step 1, points: a block adds up a slice of the coordinates of a chunk of points; thread t kWidth of them, those at
// t % lanes (or further), of every rows-th row. Float32 numbers are added up in eights, so that few are made double: as
// eighths, which do not overflow below 1.7e38, of what they are more than the chunk's first point, which may be far
// from 0.
template <int kWidth>
__device__ void SumCoordinates(const Member& member, const TensorView& view, int side, int chunk, int slice) {
  using Number = std::conditional_t<kWidth == 4, float, double>;
  constexpr int kTogether = 8;
  const Job& job = member.job;
  __shared__ double scratch[3][kWidth][kThreads];
  const int dim = job.dim, count = job.size[side], begin = slice * SliceCoordinates(job, side) / kWidth;
  const int groups = min(dim, (slice + 1) * SliceCoordinates(job, side)) / kWidth - begin;
  const int lanes = min(groups, kThreads), rows = kThreads / lanes;
  const int lane = threadIdx.x % lanes, row = threadIdx.x / lanes;
  const int first = chunk * ChunkPoints(count), last = min(count, first + ChunkPoints(count));
  const int64_t start = view.shared ? 0 : member.index * count * dim;
  double* out = member.At<double>(job.at.chunk_sums[side]) + int64_t{3} * dim * chunk;
  double* centre = count <= ChunkPoints(count) ? member.At<double>(job.at.centre[side]) : nullptr;  // All are here.
  for (int g0 = 0; g0 < groups; g0 += lanes) {
    const int k = (begin + g0 + lane) * kWidth;
    double sum[kWidth];
    Number low[kWidth], high[kWidth];
#pragma unroll
    for (int q = 0; q < kWidth; ++q) sum[q] = 0, low[q] = INFINITY, high[q] = -INFINITY;
    if (row < rows && g0 + lane < groups) {
      constexpr Number kEighth = 0.125;
      Number base[kWidth];
      LoadCoordinates(view, start, int64_t{first} * dim + k, base);
      int taken = 0;
      for (int i0 = first + row; i0 < last; i0 += kTogether * rows) {
        Number value[kTogether][kWidth], part[kWidth] = {};
#pragma unroll
        for (int t = 0; t < kTogether; ++t) {
          if (i0 + t * rows >= last) break;
          LoadCoordinates(view, start, int64_t{i0 + t * rows} * dim + k, value[t]);
        }
#pragma unroll
        for (int t = 0; t < kTogether; ++t) {
          if (i0 + t * rows >= last) break;
          ++taken;
#pragma unroll
          for (int q = 0; q < kWidth; ++q) {
            part[q] += fma(value[t][q], kEighth, -kEighth * base[q]);
            low[q] = min(low[q], value[t][q]);
            high[q] = max(high[q], value[t][q]);
          }
        }
#pragma unroll
        for (int q = 0; q < kWidth; ++q) sum[q] += part[q];
      }
#pragma unroll
      for (int q = 0; q < kWidth; ++q) sum[q] = sum[q] / kEighth + static_cast<double>(taken) * base[q];
    }
    __syncthreads();
#pragma unroll
    for (int q = 0; q < kWidth; ++q) {
      scratch[0][q][threadIdx.x] = sum[q];
      scratch[1][q][threadIdx.x] = low[q];
      scratch[2][q][threadIdx.x] = high[q];
    }
    __syncthreads();
    // Rows to kParts of them, in turn, and those to one: a thread for each coordinate, and part.
    const int taken = min(rows, last - first), coordinates = min(lanes, groups - g0) * kWidth;
    const auto fold = [&](int e, int from, int step, int until) {
      const int q = e % kWidth, at = e / kWidth;
      double all = 0, least = INFINITY, most = -INFINITY;
#pragma unroll 8
      for (int r = from; r < until; r += step) {
        all += scratch[0][q][r * lanes + at];
        least = fmin(least, scratch[1][q][r * lanes + at]);
        most = fmax(most, scratch[2][q][r * lanes + at]);
      }
      scratch[0][q][from * lanes + at] = all;
      scratch[1][q][from * lanes + at] = least;
      scratch[2][q][from * lanes + at] = most;
    };
    constexpr int kParts = 16;
    if (taken > kParts) {
      for (int e = threadIdx.x; e < kParts * coordinates; e += kThreads) {
        fold(e % coordinates, e / coordinates, kParts, taken);
      }
      __syncthreads();
    }
    for (int e = threadIdx.x; e < coordinates; e += kThreads) {
      fold(e, 0, 1, min(taken, kParts));
      const int q = e % kWidth, at = e / kWidth, to = (begin + g0) * kWidth + e;
      const double all = scratch[0][q][at];
      out[to] = all;
      if (centre != nullptr) centre[to] = all / count;
      out[dim + to] = scratch[1][q][at];
      out[2 * dim + to] = scratch[2][q][at];
    }
  }
}
template <bool kSquares>
__device__ void SumChunk(const Member& member, int side, int block) {
  const int slices = Slices(member.job, side), chunk = block / slices, slice = block % slices;
  TensorView sphere;
  const TensorView& view = PointsOf<kSquares>(member, side, &sphere);
  if (AreSideBySide(view, member.job.dim, 4)) return SumCoordinates<4>(member, view, side, chunk, slice);
  SumCoordinates<1>(member, view, side, chunk, slice);
}

// Cost k of all, and with a row's first ones zeros behind its last.
__device__ inline void CopyCost(const Member& member, int64_t k, float cost) {
  const Job& job = member.job;
  const unsigned columns = job.size[1], row = static_cast<unsigned>(k) / columns, column = k - row * columns;
  const int64_t stride = StreamColumns(job, 0);
  float* const copy = member.At<float>(job.at.exponents[0]) + row * stride;
  copy[column] = cost;
  if (columns + column < stride) copy[columns + column] = 0;
}

__device__ inline void RangeOfCosts(const Member& member, int64_t chunk) {
  const Job& job = member.job;
  __shared__ double scratch[kMostWarps];
  const int64_t size = int64_t{job.size[0]} * job.size[1], first = chunk * kChunkCosts;
  const int64_t last = min(size, first + kChunkCosts), start = job.in.cost.shared ? 0 : member.index * size;
  double low = INFINITY, high = -INFINITY;
  const bool copies = CopiesCosts(job);
  if (!copies && AreSideBySide(job.in.cost, static_cast<int>(size % 4), 4)) {
    float least = INFINITY, most = -INFINITY;
#pragma unroll 4
    for (int64_t i = first + 4 * threadIdx.x; i < last; i += 4 * kThreads) {
      float cost[4];
      LoadCoordinates(job.in.cost, start, i, cost);
      least = fminf(least, fminf(fminf(cost[0], cost[1]), fminf(cost[2], cost[3])));
      most = fmaxf(most, fmaxf(fmaxf(cost[0], cost[1]), fmaxf(cost[2], cost[3])));
    }
    low = least;
    high = most;
  } else {
    for (int64_t i = first + threadIdx.x; i < last; i += kThreads) {
      const double cost = LoadDouble(job.in.cost.dtype, job.in.cost.data, start + i);
      low = fmin(low, cost);
      high = fmax(high, cost);
      if (copies) CopyCost(member, i, static_cast<float>(cost));
    }
  }
  low = -BlockMax(-low, scratch);
  high = BlockMax(high, scratch);
  if (threadIdx.x == 0) member.At<ChunkStats>(job.at.chunk_stats)[chunk] = {low, high, 0};
}

// Step 2, unless one chunk has all: the chunks' sums to the centre; their ranges to those of the cloud, in place of the
// first chunk's. A block has kCentreLanes coordinates; a warp every kWarps-th chunk of them.
__device__ inline void CentreOf(const Member& member, int side, int block) {
  const Job& job = member.job;
  __shared__ double scratch[3][kWarps][kCentreLanes];
  const int dim = job.dim, chunks = PointChunks(job, side), lane = threadIdx.x % kCentreLanes;
  const int warp = threadIdx.x / kCentreLanes, k = block * kCentreLanes + lane;
  double* in = member.At<double>(job.at.chunk_sums[side]);
  double sum = 0, low = INFINITY, high = -INFINITY;
#pragma unroll 4
  for (int c = warp; c < chunks && k < dim; c += kWarps) {
    const double* chunk = in + int64_t{3} * dim * c;
    sum += chunk[k];
    low = fmin(low, chunk[dim + k]);
    high = fmax(high, chunk[2 * dim + k]);
  }
  scratch[0][warp][lane] = sum;
  scratch[1][warp][lane] = low;
  scratch[2][warp][lane] = high;
  __syncthreads();  // All have read.
  if (warp > 0 || k >= dim) return;
  for (int w = 1; w < kWarps; ++w) {
    sum += scratch[0][w][lane];
    low = fmin(low, scratch[1][w][lane]);
    high = fmax(high, scratch[2][w][lane]);
  }
  in[dim + k] = low;
  in[2 * dim + k] = high;
  member.At<double>(job.at.centre[side])[k] = sum / job.size[side];
}

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_PREPARE_SUMS_CUH_
