// What the registers kernels share: the vectors of the iterations, the tally, which members a warp takes, certificates.
//
// They solve whole normalisations in registers: K = exp(W - row maximum) as tiles, scaling vectors u and v, all
// iterations, and the reverse of the steps.
//
// Unrolled backward. A half step divides row i by h(s_i), s_i its sum in the current P, h the guard. With
// theta = d log h / d log s the adjoints of log u, log v and log K obey, for a row step with weights Q = K v / (K v)1,
//   bar K -= theta_i bar u_i Q_ij,  bar v_j -= sum_i theta_i bar u_i Q_ij,  bar u_i <- (1 - theta_i) bar u_i,
// and theta_i Q_ij = (u_i / r_i) K_ij v_j for every guard (theta = 0 where max is clamped). So the state of an
// iteration is two vectors, kept in shared memory (in the workspace if they are too many), its reverse is two products
// with K, and dL/d log K = dP * P - K * sum_t (u_t y_t^T + x_t v_(t-1)^T).
//
// Safe while no entry of K that matters underflows: scalings stay within the range of K (they are ratios of its
// entries). Members beyond kRange are left to the general kernel: their bit in `redo` says so.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_REGISTERS_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_REGISTERS_CUH_

#include "kernels/cuda/normalization_stage.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

// nats. Two sums of the square of it are multiplied in Reciprocals; the general recipes divide each alone.
constexpr float kPlainRange = 40;
constexpr float kGeneralRange = 60;
constexpr float kLowestRow = -40;    // log of the first row sums: guards see them.
constexpr float kSmallest = 1e-37f;  // Sums below are not divided by: near the smallest normal number.

// Whether a scaling, multiplied with others, keeps its digits: guards may drive those of the sides apart, a little with
// every iteration.
__device__ inline bool KeepsDigits(float scaling) { return scaling > 1e-30f && scaling < 1e30f; }

// NaN stays.
__device__ inline float Raised(float w, float floor) { return w < floor ? floor : w; }

// The reverse of now = marginal * old / max(old * sum + add, most) in logarithms: bar = adjoint of log now. Returns
// theta * bar * now / marginal; *bar becomes the adjoint of log old that does not pass through the sum.
__device__ inline float Unscaled(float old, float now, float marginal, float add, float most, float* bar) {
  const bool passes = now < marginal * old * Reciprocal(most);  // As computed there; not for padding.
  // Large guards shrink scalings to nothing: no infinite reciprocal meets a 0.
  const float multiplier = passes ? *bar * now * Reciprocal(fmaxf(marginal, kSmallest)) : 0.0f;
  if (passes) *bar = add > 0 ? multiplier * add * Reciprocal(fmaxf(old, kSmallest)) : 0.0f;
  return multiplier;
}

// What a launch needs besides: where the scaling vectors of the iterations go.
constexpr int64_t kSharedHistoryBytes = 100 << 10;
template <class Shape>
constexpr int64_t HistoryBytes(int vectors, int32_t iterations) {
  return (int64_t{iterations} + 1) * vectors * kThreads * Shape::kOwn * static_cast<int64_t>(sizeof(float));
}

// ---- History: what each lane owns of v_t, or of v_t and u_t ---------------------------------------------------------
template <int kOwn, int kVectors = 2>
class History {
 public:
  static constexpr bool kHasU = kVectors == 2;
  __device__ explicit History(float* memory) : at_(memory + threadIdx.x * kOwn), step_(kVectors * blockDim.x * kOwn) {}
  __device__ void Put(int t, const float* u, const float* v) {
    float* const at = At(t);
    PutOne(at, v);
    if constexpr (kHasU) PutOne(at + step_ / 2, u);
  }
  __device__ void GetU(int t, float* u) const { GetOne(At(t) + step_ / 2, u); }
  __device__ void GetV(int t, float* v) const { GetOne(At(t), v); }

 private:
  __device__ static void PutOne(float* to, const float* x) {
    if constexpr (kOwn == 4) {
      *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
    } else if constexpr (kOwn == 2) {
      *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]);
    } else {
#pragma unroll
      for (int k = 0; k < kOwn; ++k) to[k] = x[k];
    }
  }
  __device__ static void GetOne(const float* from, float* x) {
    if constexpr (kOwn == 4) {
      const float4 y = *reinterpret_cast<const float4*>(from);
      x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
    } else if constexpr (kOwn == 2) {
      const float2 y = *reinterpret_cast<const float2*>(from);
      x[0] = y.x, x[1] = y.y;
    } else {
#pragma unroll
      for (int k = 0; k < kOwn; ++k) x[k] = from[k];
    }
  }
  // The product is opaque where that keeps addresses in fewer instructions, and registers.
  __device__ float* At(int t) const { return at_ + (kOwn == 2 ? t * step_ : Opaque(t * step_)); }

  float* const at_;
  const int step_;
};

// ---- The tally of a lane, and of a block ----------------------------------------------------------------------------
struct LaneTally {
  float rows = 0, cols = 0;  // Errors of the kernel's rows and columns.
  int iterations = 0;
  uint32_t flags = 0;
};

// By one thread.
__device__ inline void StoreTally(const Task& task, int block, float row_error, float col_error, int iterations,
                                  uint32_t flags) {
  // In words: all of it, in two stores.
  static_assert(sizeof(Tally) == 32 && offsetof(Tally, iterations) == 16 && offsetof(Tally, flags) == 20, "see below");
  const float a = task.transposed ? col_error : row_error, b = task.transposed ? row_error : col_error;
  ulonglong2* const to = reinterpret_cast<ulonglong2*>(task.tallies + block);
  to[0] = make_ulonglong2(__double_as_longlong(a), __double_as_longlong(b));
  to[1] = make_ulonglong2(static_cast<uint32_t>(iterations) | static_cast<uint64_t>(flags) << 32, 0);
}
// By a block of warps, each lane with its own.
__device__ inline void StoreTally(const Task& task, int block, const LaneTally& mine) {
  __shared__ float rows[kWarps], cols[kWarps];
  __shared__ int iterations[kWarps];
  __shared__ uint32_t flags[kWarps];
  // Errors are >= 0: their bits compare as they do.
  float row_error = __uint_as_float(__reduce_max_sync(kFullMask, __float_as_uint(mine.rows)));
  float col_error = __uint_as_float(__reduce_max_sync(kFullMask, __float_as_uint(mine.cols)));
  int most = __reduce_max_sync(kFullMask, mine.iterations);
  uint32_t all_flags = __reduce_or_sync(kFullMask, mine.flags);
  if (blockDim.x > 32) {
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) {
      rows[warp] = row_error;
      cols[warp] = col_error;
      iterations[warp] = most;
      flags[warp] = all_flags;
    }
    __syncthreads();
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      row_error = fmaxf(row_error, rows[w]);
      col_error = fmaxf(col_error, cols[w]);
      most = max(most, iterations[w]);
      all_flags |= flags[w];
    }
  }
  if (threadIdx.x == 0) StoreTally(task, block, row_error, col_error, most, all_flags);
}

// From a warp's members to its next.
template <class Shape>
__device__ inline int64_t MemberStep(const Task& task) {
  return int64_t{task.blocks} * (blockDim.x / 32 * Shape::kMembers);
}
// Runs body(first member, how many) for the share of the task that the block's warp has.
template <class Shape, class Body>
__device__ inline void ForMembers(const Task& task, int block, int warp, Body body) {
  const int64_t begin = (int64_t{warp} * task.blocks + block) * Shape::kMembers;
  for (int64_t first = task.first + begin; first < task.last; first += MemberStep<Shape>(task)) {
    body(first, static_cast<int>(min(int64_t{Shape::kMembers}, task.last - first)));
  }
}

// The first `count` members' bits of those whose lanes say `bad`: bit m of word first / kMembers is member first + m.
template <class Shape>
__device__ inline void StoreRedo(const Task& task, const Place<Shape>& place, int64_t first, bool bad, int lane) {
  const uint32_t lanes = __ballot_sync(kFullMask, bad && place.first());
  uint32_t bits = lanes;
  if (Shape::kLanes > 1 && lanes != 0) {
    bits = 0;
    for (int m = 0; m < Shape::kMembers; ++m) bits |= (lanes >> (m * Shape::kLanes) & 1u) << m;
  }
  if (lane == 0) task.redo[first / Shape::kMembers] = bits;
}

// Sums of the kernel's rows and columns, of which each lane has its own.
template <class Shape>
__device__ inline void StoreSums(const Task& task, const Place<Shape>& place, int lane, int64_t first, int count,
                                 const float* row_sums, const float* col_sums, float* buffer) {
  const Output& of_rows = task.transposed ? task.column_sums : task.row_sums;
  const Output& of_cols = task.transposed ? task.row_sums : task.column_sums;
  if (of_rows.data != nullptr) {
    Stage<Shape>::StoreOwned(lane, of_rows, task.rows, first, count, place.member, place.OwnRow(0), row_sums, buffer);
  }
  if (of_cols.data != nullptr) {
    Stage<Shape>::StoreOwned(lane, of_cols, task.cols, first, count, place.member, place.OwnCol(0), col_sums, buffer);
  }
}

// sum_k |x_k - y_k| of what the lanes of a matrix own.
template <class Shape>
__device__ inline float ErrorL1(const float* x, const float* y) {
  float sum = 0;
#pragma unroll
  for (int k = 0; k < Shape::kOwn; ++k) sum += fabsf(x[k] - y[k]);
  return OverMatrix<Shape, Sum>(sum);
}

// What a member came to, for the certificate. `writes`: this lane does, for all that call it.
__device__ inline void Certify(const Task& task, int64_t member, bool writes, float row_error, float col_error,
                               int iterations, LaneTally* tally) {
  const bool converged = fmaxf(row_error, col_error) <= task.tolerance32;
  const StopReason reason = converged && task.tolerance > 0 ? StopReason::kTolerance : StopReason::kMaxIterations;
  tally->rows = fmaxf(tally->rows, row_error);
  tally->cols = fmaxf(tally->cols, col_error);
  tally->iterations = max(tally->iterations, iterations);
  tally->flags |= Tally::kAny | (converged ? 0u : Tally::kNotConverged) |
                  (reason == StopReason::kMaxIterations ? Tally::kStoppedByLimit : 0u);
  if (writes) {
    StoreConvergence(task, member, iterations, task.transposed ? col_error : row_error,
                     task.transposed ? row_error : col_error, converged, reason);
  }
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_REGISTERS_CUH_
