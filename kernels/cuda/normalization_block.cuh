// What a block has to work with when it solves a matrix as a whole: sums over its threads, sums over rows and columns.
//
// A warp takes a row, a lane a column; partial sums are combined in an order that the shape fixes.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_BLOCK_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_BLOCK_CUH_

#include <cfloat>
#include <cstdint>

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
  __device__ void Add(const LogSum& other) {
    const double top = fmax(max, other.max);
    sum = sum * exp(max - top) + other.sum * exp(other.max - top);
    max = top;
  }
  __device__ double value() const { return max + log(sum); }
};

// As many columns as a warp has lanes, as many partial results as a block has warps.
struct BlockMemory {
  double sums[kBlockWarpsMax];
  LogSum columns[kBlockWarpsMax][32];
};

class Block {
 public:
  __device__ explicit Block(BlockMemory* memory)
      : thread(threadIdx.x),
        threads(blockDim.x),
        warp(threadIdx.x / 32),
        warps(blockDim.x / 32),
        lane(threadIdx.x % 32),
        memory_(memory) {}

  // Of all threads, to all threads. Orders what was written before it.
  __device__ double Sum(double x) {
    x = WarpSum(x);
    __syncthreads();  // The memory is free.
    if (lane == 0) memory_->sums[warp] = x;
    __syncthreads();  // The warps' sums are there.
    double sum = memory_->sums[0];
    for (int w = 1; w < warps; ++w) sum += memory_->sums[w];
    return sum;
  }
  __device__ double Max(double x) {
    for (int mask = 16; mask >= 1; mask /= 2) x = fmax(x, __shfl_xor_sync(kAllLanes, x, mask));
    __syncthreads();  // The memory is free.
    if (lane == 0) memory_->sums[warp] = x;
    __syncthreads();  // The warps' are there.
    double max = memory_->sums[0];
    for (int w = 1; w < warps; ++w) max = fmax(max, memory_->sums[w]);
    return max;
  }
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
    __syncthreads();
  }

  // use(i, sum_j term(i, j)) on every lane of the row's warp; `finish` afterwards orders all.
  template <class Term, class Use>
  __device__ void Rows(int rows, int cols, Term term, Use use) {
    for (int i = warp; i < rows; i += warps) {
      double sum = 0;
      for (int j = lane; j < cols; j += 32) sum += term(i, j);
      use(i, WarpSum(sum));
    }
    __syncthreads();
  }
  template <class Term, class Use>
  __device__ void RowLogSums(int rows, int cols, Term term, Use use) {
    for (int i = warp; i < rows; i += warps) use(i, RowLogSum(i, cols, term));
    __syncthreads();
  }
  // Of one row, by a whole warp.
  template <class Term>
  __device__ double RowLogSum(int i, int cols, Term term) {
    LogSum sum;
    for (int j = lane; j < cols; j += 32) sum.Add(term(i, j));
    for (int mask = 16; mask >= 1; mask /= 2) {
      LogSum other;
      other.max = __shfl_xor_sync(kAllLanes, sum.max, mask);
      other.sum = __shfl_xor_sync(kAllLanes, sum.sum, mask);
      sum.Add(other);
    }
    return sum.value();
  }

  // use(j, sum_i term(i, j)), by one thread for each j.
  template <class Term, class Use>
  __device__ void Columns(int rows, int cols, Term term, Use use) {
    ColumnBlocks<false>(rows, cols, term, use);
  }
  template <class Term, class Use>
  __device__ void ColumnLogSums(int rows, int cols, Term term, Use use) {
    ColumnBlocks<true>(rows, cols, term, use);
  }

  const int thread, threads, warp, warps, lane;

 private:
  template <bool kLog, class Term, class Use>
  __device__ void ColumnBlocks(int rows, int cols, Term term, Use use) {
    for (int first = 0; first < cols; first += 32) {
      const int j = first + lane;
      LogSum sum;
      if (j < cols) {
        for (int i = warp; i < rows; i += warps) {
          if constexpr (kLog) {
            sum.Add(term(i, j));
          } else {
            sum.sum += term(i, j);
          }
        }
      }
      memory_->columns[warp][lane] = sum;
      __syncthreads();  // The warps' parts are there.
      if (warp == 0 && j < cols) {
        for (int w = 1; w < warps; ++w) {
          if constexpr (kLog) {
            sum.Add(memory_->columns[w][lane]);
          } else {
            sum.sum += memory_->columns[w][lane].sum;
          }
        }
        use(j, kLog ? sum.value() : sum.sum);
      }
      __syncthreads();  // They are free; what `use` wrote is there.
    }
  }

  BlockMemory* memory_;
};

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_BLOCK_CUH_
