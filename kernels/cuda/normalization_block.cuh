// What one block, or a team of them, has to work with when it solves a matrix as a whole: sums over its threads, sums
// over rows and columns.
//
// A warp takes a row, a lane a column; partial sums are combined in an order that the shape fixes, and the number of
// blocks. Those of a team are launched at once, since they wait for each other; what they share lies in global memory.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_BLOCK_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_BLOCK_CUH_

#include <cfloat>
#include <cstdint>

#include "kernels/cuda/native.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

constexpr int kBlockWarpsMax = 16;
constexpr unsigned kAllLanes = 0xffffffffu;

// max + log(sum).
struct LogSum {
  double max = -DBL_MAX, sum = 0;
  __device__ void Add(double x) {
    const double d = x - max, e = exp(-fabs(d));
    sum = d > 0 ? fma(sum, e, 1.0) : sum + e;
    if (d > 0) max = x;
  }
  // The same of four, whose exponentials need not wait for each other.
  __device__ void Add(const double (&x)[4]) {
    const double top = fmax(max, fmax(fmax(x[0], x[1]), fmax(x[2], x[3])));
    const double e01 = exp(x[0] - top) + exp(x[1] - top), e23 = exp(x[2] - top) + exp(x[3] - top);
    sum = fma(sum, exp(max - top), e01 + e23);
    max = top;
  }
  __device__ double value() const { return max + log(sum); }
};

// As many columns as a warp has lanes, as many partial results as a block has warps.
struct BlockMemory {
  double sums[kBlockWarpsMax];
  LogSum columns[kBlockWarpsMax][32];
  unsigned arrived;  // Of a team: how often all blocks have, at its last meeting. 0 at first.
};

// What the blocks of a team share.
struct TeamMemory {
  unsigned* arrivals = nullptr;  // 0 when they begin.
  double* sums = nullptr;        // [2, blocks]
  LogSum* columns = nullptr;     // Of TeamColumnParts.
};

// Parts that a team of so many blocks cuts the rows into for its columns' sums, so that all blocks have some; and what
// is left of these.
__host__ __device__ inline int TeamColumnParts(int blocks, int cols) {
  const int groups = (cols + 31) / 32;
  return blocks > groups ? blocks / groups : 1;
}

class Block {
 public:
  // One of `blocks`.
  __device__ Block(BlockMemory* memory, const TeamMemory& team, int block, int blocks)
      : thread(block * blockDim.x + threadIdx.x),
        threads(blocks * blockDim.x),
        warp(thread / 32),
        warps(threads / 32),
        lane(threadIdx.x % 32),
        memory_(memory),
        team_(team),
        block_(block),
        blocks_(blocks) {}

  // For all threads; orders what was written before it.
  __device__ void Sync() {
    __syncthreads();
    if (blocks_ == 1) return;
    if (threadIdx.x == 0) {
      CountUp(team_.arrivals);
      memory_->arrived += blocks_;
      while (Counted(team_.arrivals) < memory_->arrived) continue;
    }
    __syncthreads();
  }
  // Of all threads, to all threads. Order what was written before them.
  __device__ double Sum(double x) {
    return Combined(x, 0, [](double a, double b) { return a + b; });
  }
  __device__ double Max(double x) {
    return Combined(x, -DBL_MAX, [](double a, double b) { return fmax(a, b); });
  }
  __device__ bool Any(bool x) { return blocks_ == 1 ? __syncthreads_or(x) : Max(x ? 1 : 0) > 0; }
  __device__ static double WarpSum(double x) {
    for (int mask = 16; mask >= 1; mask /= 2) x += __shfl_xor_sync(kAllLanes, x, mask);
    return x;
  }

  // sum_k term(k), to all threads.
  template <class Term>
  __device__ double SumOf(int64_t size, Term term) {
    double sum = 0;
    for (int64_t k = thread; k < size; k += threads) sum += term(k);
    return Sum(sum);
  }
  // body(k) for all k; ordered before what follows.
  template <class Body>
  __device__ void ForEach(int64_t size, Body body) {
    for (int64_t k = thread; k < size; k += threads) body(k);
    Sync();
  }

  // use(i, sum_j term(i, j)) on every lane of the row's warp; ordered before what follows.
  template <class Term, class Use>
  __device__ void Rows(int rows, int cols, Term term, Use use) {
    for (int i = warp; i < rows; i += warps) {
      double sum = 0;
      for (int j = lane; j < cols; j += 32) sum += term(i, j);
      use(i, WarpSum(sum));
    }
    Sync();
  }
  template <class Term, class Use>
  __device__ void RowLogSums(int rows, int cols, Term term, Use use) {
    for (int i = warp; i < rows; i += warps) use(i, RowLogSum(i, cols, term));
    Sync();
  }
  // Of one row, by a whole warp.
  template <class Term>
  __device__ double RowLogSum(int i, int cols, Term term) {
    const LogSum sum = LogSumOf(lane, cols, 32, [&](int j) { return term(i, j); });
    double top = sum.max;
    for (int mask = 16; mask >= 1; mask /= 2) top = fmax(top, __shfl_xor_sync(kAllLanes, top, mask));
    return top + log(WarpSum(sum.sum * exp(sum.max - top)));
  }

  // use(j, sum_i term(i, j)), by one thread for each j.
  template <class Term, class Use>
  __device__ void Columns(int rows, int cols, Term term, Use use) {
    ColumnGroups<false>(rows, cols, term, use);
  }
  template <class Term, class Use>
  __device__ void ColumnLogSums(int rows, int cols, Term term, Use use) {
    ColumnGroups<true>(rows, cols, term, use);
  }

  const int thread, threads, warp, warps, lane;  // Of the team.

 private:
  // `nothing`: what changes nothing.
  template <class Combine>
  __device__ double Combined(double x, double nothing, Combine combine) {
    const auto of_warp = [&](double y) {
      for (int mask = 16; mask >= 1; mask /= 2) y = combine(y, __shfl_xor_sync(kAllLanes, y, mask));
      return y;
    };
    x = of_warp(x);
    __syncthreads();  // The memory is free.
    if (lane == 0) memory_->sums[threadIdx.x / 32] = x;
    __syncthreads();  // The warps' are there.
    double all = memory_->sums[0];
    for (int w = 1; w < static_cast<int>(blockDim.x) / 32; ++w) all = combine(all, memory_->sums[w]);
    if (blocks_ == 1) return all;
    // By turns in two places: whoever writes to one again knows that all have read it.
    double* const sums = team_.sums + (turn_ ^= 1) * blocks_;
    if (threadIdx.x == 0) sums[block_] = all;
    Sync();
    all = nothing;
    for (int k = lane; k < blocks_; k += 32) all = combine(all, sums[k]);
    return of_warp(all);
  }

  // Of term(k), for k from `first` on.
  template <class Term>
  __device__ static LogSum LogSumOf(int first, int size, int step, Term term) {
    LogSum sum;
    int k = first;
    for (; k + 3 * step < size; k += 4 * step)
      sum.Add({term(k), term(k + step), term(k + 2 * step), term(k + 3 * step)});
    for (; k < size; k += step) sum.Add(term(k));
    return sum;
  }
  // Of `count` parts, part(k).
  template <bool kLog, class Part>
  __device__ static LogSum Total(int count, Part part) {
    LogSum all;
    for (int k = 0; k < count && kLog; ++k) all.max = fmax(all.max, part(k).max);
#pragma unroll 4
    for (int k = 0; k < count; ++k) all.sum += kLog ? part(k).sum * exp(part(k).max - all.max) : part(k).sum;
    return all;
  }
  template <bool kLog>
  __device__ static double ValueOf(const LogSum& sum) {
    return kLog ? sum.value() : sum.sum;
  }
  // A block takes 32 columns at a time; of few, some of the rows.
  template <bool kLog, class Term, class Use>
  __device__ void ColumnGroups(int rows, int cols, Term term, Use use) {
    const int parts = blocks_ == 1 ? 1 : TeamColumnParts(blocks_, cols), groups = (cols + 31) / 32;
    const int own_warp = threadIdx.x / 32, own_warps = blockDim.x / 32;
    for (int piece = block_; piece < groups * parts; piece += blocks_) {
      const int group = parts == 1 ? piece : piece / parts, part = piece - group * parts, j = group * 32 + lane;
      const int first = part * own_warps + own_warp, step = parts * own_warps;
      LogSum sum;
      if constexpr (kLog) {
        if (j < cols) sum = LogSumOf(first, rows, step, [&](int i) { return term(i, j); });
      } else {
        for (int i = first; i < rows && j < cols; i += step) sum.sum += term(i, j);
      }
      memory_->columns[own_warp][lane] = sum;
      __syncthreads();  // The warps' parts are there.
      if (own_warp == 0 && j < cols) {
        sum = Total<kLog>(own_warps, [&](int w) { return memory_->columns[w][lane]; });
        if (parts > 1) {
          team_.columns[part * cols + j] = sum;
        } else {
          use(j, ValueOf<kLog>(sum));
        }
      }
      __syncthreads();  // They are free; what `use` wrote is there.
    }
    if (blocks_ == 1) return;
    Sync();
    if (parts == 1) return;
    for (int j = thread; j < cols; j += threads) {
      use(j, ValueOf<kLog>(Total<kLog>(parts, [&](int part) { return team_.columns[part * cols + j]; })));
    }
    Sync();
  }

  BlockMemory* const memory_;
  const TeamMemory team_;
  const int block_, blocks_;
  int turn_ = 0;
};

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_BLOCK_CUH_
