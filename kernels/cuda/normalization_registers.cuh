// Whole normalisations in registers: K = exp(W - row maximum) as tiles, scaling vectors u and v, all iterations, and
// the reverse of the steps.
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

#include "kernels/cuda/normalization_tile.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

// nats. Two sums of the square of it are multiplied in Reciprocals; the general recipes divide each alone.
constexpr float kPlainRange = 40, kGeneralRange = 60;
constexpr float kLowestRow = -40;  // log of the first row sums: guards see them.

// What a launch needs besides: where the scaling vectors of the iterations go.
constexpr int64_t kSharedHistoryBytes = 100 << 10;
template <class Shape>
constexpr int64_t HistoryBytes(int32_t iterations) {
  return (int64_t{iterations} + 1) * 2 * kThreads * Shape::kOwn * sizeof(float);
}

// ---- History: what each lane owns of u_t and v_t --------------------------------------------------------------------
template <int kOwn>
class History {
 public:
  __device__ explicit History(float* memory) : at_(memory + threadIdx.x * kOwn) {}
  __device__ void Put(int t, const float* u, const float* v) {
    float* to = at_ + t * 2 * kThreads * kOwn;
    PutOne(to, u);
    PutOne(to + kThreads * kOwn, v);
  }
  __device__ void GetU(int t, float* u) const { GetOne(at_ + 2 * t * kThreads * kOwn, u); }
  __device__ void GetV(int t, float* v) const { GetOne(at_ + (2 * t + 1) * kThreads * kOwn, v); }

 private:
  __device__ static void PutOne(float* to, const float* x) {
    if constexpr (kOwn == 4) {
      *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
    } else if constexpr (kOwn == 2) {
      *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]);
    } else {
      *to = *x;
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
      *x = *from;
    }
  }
  float* at_;
};

// ---- The tally of a lane, and of a block ----------------------------------------------------------------------------
struct LaneTally {
  float rows = 0, cols = 0;  // Errors of the kernel's rows and columns.
  int iterations = 0;
  uint32_t flags = 0;
};

__device__ inline void StoreTally(const Task& task, int block, const LaneTally& mine) {
  __shared__ float rows[kWarps], cols[kWarps];
  __shared__ int iterations[kWarps];
  __shared__ uint32_t flags[kWarps];
  const int warp = threadIdx.x / 32;
  // Errors are >= 0: their bits compare as they do.
  const float row_error = __uint_as_float(__reduce_max_sync(kFullMask, __float_as_uint(mine.rows)));
  const float col_error = __uint_as_float(__reduce_max_sync(kFullMask, __float_as_uint(mine.cols)));
  const int most = __reduce_max_sync(kFullMask, mine.iterations);
  const uint32_t all_flags = __reduce_or_sync(kFullMask, mine.flags);
  if (threadIdx.x % 32 == 0) {
    rows[warp] = row_error;
    cols[warp] = col_error;
    iterations[warp] = most;
    flags[warp] = all_flags;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  Tally tally{};
  float a = 0, b = 0;
  for (int w = 0; w < kWarps; ++w) {
    a = fmaxf(a, rows[w]);
    b = fmaxf(b, cols[w]);
    tally.iterations = max(tally.iterations, iterations[w]);
    tally.flags |= flags[w];
  }
  tally.error_a = task.transposed ? b : a;
  tally.error_b = task.transposed ? a : b;
  task.tallies[block] = tally;
}

// Runs body(first member, how many) for this warp's share of the task.
template <class Shape, class Body>
__device__ inline void ForMembers(const Task& task, int block, Body body) {
  const int64_t step = int64_t{task.blocks} * kWarps * Shape::kMembers;
  const int64_t begin = (int64_t{static_cast<int>(threadIdx.x) / 32} * task.blocks + block) * Shape::kMembers;
  for (int64_t first = task.first + begin; first < task.last; first += step) {
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

// What a member came to, for the certificate.
template <class Shape>
__device__ inline void Certify(const Task& task, const Place<Shape>& place, int64_t member, float row_error,
                               float col_error, int iterations, LaneTally* tally) {
  const bool converged = fmaxf(row_error, col_error) <= task.tolerance32;
  const StopReason reason = converged && task.tolerance > 0 ? StopReason::kTolerance : StopReason::kMaxIterations;
  tally->rows = fmaxf(tally->rows, row_error);
  tally->cols = fmaxf(tally->cols, col_error);
  tally->iterations = max(tally->iterations, iterations);
  tally->flags |= Tally::kAny | (converged ? 0u : Tally::kNotConverged) |
                  (reason == StopReason::kMaxIterations ? Tally::kStoppedByLimit : 0u);
  if (place.first()) {
    StoreConvergence(task, member, iterations, task.transposed ? col_error : row_error,
                     task.transposed ? row_error : col_error, converged, reason);
  }
}

// ---- The plain recipes: square, whole tiles, marginals 1, no guard, a fixed number of iterations --------------------
// K = exp(W - row maximum) in place of W. False: the range is too wide.
template <class Shape>
__device__ inline bool PlainStart(const Task& task, float (&K)[Shape::R][Shape::C]) {
  float top[Shape::R];
#pragma unroll
  for (int r = 0; r < Shape::R; ++r) {
    top[r] = K[r][0];
#pragma unroll
    for (int c = 1; c < Shape::C; ++c) top[r] = fmaxf(top[r], K[r][c]);
  }
  ScatterRows<Shape, Max>(top);
  GatherRows<Shape>(top);
  constexpr float kLog2E = 1.4426950408889634f;
  float lowest = 0, lowest_top = top[0];  // The former in units of log 2.
#pragma unroll
  for (int r = 0; r < Shape::R; ++r) {
    lowest_top = fminf(lowest_top, top[r]);
    const float shift = -kLog2E * top[r];  // Its rounding scales the row: nothing that u would not undo.
#pragma unroll
    for (int c = 0; c < Shape::C; ++c) {
      const float x = fmaf(kLog2E, K[r][c], shift);
      lowest = fminf(lowest, x);
      K[r][c] = Exp2(x);
    }
  }
  // All logits within the range of their maximum, and above the floor.
  const bool safe = lowest >= -kLog2E * kPlainRange && lowest_top - kPlainRange > task.floor32;
  return OverMatrix<Shape, Min>(safe ? 1.0f : 0.0f) > 0;
}

// Blocks per multiprocessor that registers must leave room for.
template <class Shape, bool kBackward>
constexpr int kPlainBlocks = Shape::kLanes == 1 ? (kBackward ? 5 : 7) : (kBackward ? 3 : 5);

// kShort: tensors of 2 bytes an element, else float32.
template <class Shape, bool kBackward, bool kShort>
__global__ void __launch_bounds__(kThreads, kPlainBlocks<Shape, kBackward>)
    PlainKernel(const __grid_constant__ LaunchOf launch) {
  constexpr int R = Shape::R, C = Shape::C, kOwn = Shape::kOwn;
  __shared__ Task task;
  // One for what goes out and one for what comes in meanwhile; where they would leave too little room for other blocks,
  // the same for both, and nothing comes in meanwhile.
  constexpr bool kFetches = !(kBackward && Shape::kLanes == 2);
  __shared__ __align__(16) float buffers[kWarps][kFetches ? 2 : 1][Shape::kBufferFloats];
  extern __shared__ __align__(16) float history_memory[];
  const int block = LoadTask(launch, &task);
  const int lane = threadIdx.x % 32, iterations = task.iterations;
  const Place<Shape> place(lane);
  const bool transposed = task.transposed;
  float* const buffer = buffers[threadIdx.x / 32][0];
  float* const incoming = buffers[threadIdx.x / 32][kFetches ? 1 : 0];
  float* const memory =
      task.workspace == nullptr ? history_memory : reinterpret_cast<float*>(task.workspace + task.slot_bytes * block);
  LaneTally tally;
  const auto fetch = [&](const Tensor& tensor, int64_t first) {
    const int64_t left = task.last - first;
    if (left <= 0) return;
    if constexpr (!kShort)
      Stage<Shape>::Fetch(lane, tensor, first, static_cast<int>(min(int64_t{Shape::kMembers}, left)), incoming);
  };

  bool is_first = true;
  ForMembers<Shape>(task, block, [&](int64_t first, int count) {
    History<kOwn> history(memory);
    const int64_t member = first + place.member;
    // 1. K.
    float K[R][C];
    if (!kFetches || is_first) fetch(task.logits, first);
    is_first = false;
    Stage<Shape>::template Arrived<kShort>(lane, task.logits, first, count, incoming);
    Stage<Shape>::Read(place, transposed, incoming, K);
    __syncwarp();  // The buffer is free.
    const int64_t next = first + int64_t{task.blocks} * kWarps * Shape::kMembers;
    if constexpr (kBackward && kFetches) fetch(task.cotangent, first);
    if constexpr (!kBackward) fetch(task.logits, next);
    const bool safe = PlainStart<Shape>(task, K);

    // 2. Iterations. u and v: the first kOwn are the lane's own.
    float u[R], v[C], q[C];
#pragma unroll
    for (int c = 0; c < C; ++c) v[c] = 1;
#pragma unroll kBackward ? 1 : 2
    for (int t = 1; t <= iterations; ++t) {
      float s[R];
      TimesRows<R, C>(K, v, s);
      ScatterRows<Shape>(s);
      Reciprocals<kOwn>(s, u);
      GatherRows<Shape>(u);
      TimesCols<R, C>(K, u, q);
      ScatterCols<Shape>(q);
      Reciprocals<kOwn>(q, v);
      if constexpr (kBackward) history.Put(t, u, v);
      GatherCols<Shape>(v);
    }

    // 3. P and its sums.
    float s[R], ones[kOwn];
    TimesRows<R, C>(K, v, s);
    ScatterRows<Shape>(s);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      s[k] *= u[k];
      q[k] *= v[k];
      ones[k] = 1;
    }
    const float row_error = ErrorL1<Shape>(s, ones), col_error = ErrorL1<Shape>(q, ones);
    const bool there = place.member < count, good = safe && row_error + col_error < FLT_MAX;
    StoreRedo<Shape>(task, place, first, there && !good, lane);
    if (there && !good) tally.flags |= Tally::kRedo;
    if (there && good) Certify<Shape>(task, place, member, row_error, col_error, iterations, &tally);
    StoreSums<Shape>(task, place, lane, first, count, s, q, buffer);
    if (task.plan.data != nullptr || task.plan_copy.data != nullptr) {
      float plan[R][C];
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int c = 0; c < C; ++c) plan[r][c] = K[r][c] * u[r] * v[c];
      }
      Stage<Shape>::Write(place, transposed, plan, buffer);
      __syncwarp();  // P is there.
      if (task.plan.data != nullptr)
        Stage<Shape>::template StoreWhole<!kShort, kShort>(lane, task.plan, first, count, buffer);
      if (task.plan_copy.data != nullptr)
        Stage<Shape>::template StoreWhole<true, false>(lane, task.plan_copy, first, count, buffer);
      __syncwarp();  // The buffer is free.
    }
    if constexpr (kBackward) {
      // 4. The adjoints of the last step. G: those of log K, but for the factor K.
      float G[R][C], row_bar[R], col_bar[C], v_own[kOwn];
      if constexpr (!kFetches) fetch(task.cotangent, first);
      Stage<Shape>::template Arrived<kShort>(lane, task.cotangent, first, count, incoming);
      Stage<Shape>::Read(place, transposed, incoming, G);
      __syncwarp();  // The buffer is free.
      if constexpr (kFetches) fetch(task.logits, next);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        row_bar[r] = 0;
#pragma unroll
        for (int c = 0; c < C; ++c) {
          G[r][c] *= u[r] * v[c];
          const float bar = G[r][c] * K[r][c];
          row_bar[r] += bar;
          col_bar[c] = r == 0 ? bar : col_bar[c] + bar;
        }
      }
      ScatterRows<Shape>(row_bar);
      ScatterCols<Shape>(col_bar);
#pragma unroll
      for (int k = 0; k < kOwn; ++k) v_own[k] = v[k];

        // 5. The iterations backward.
#pragma unroll 1
      for (int t = iterations; t >= 1; --t) {
        float x[R], y[C];
#pragma unroll
        for (int k = 0; k < kOwn; ++k) {
          y[k] = col_bar[k] * v_own[k];
          v[k] = 1;
        }
        if (t < iterations) history.GetU(t, u);
        if (t > 1) history.GetV(t - 1, v);
        GatherCols<Shape>(y);
        GatherRows<Shape>(u);
        TimesRows<R, C>(K, y, s);
        ScatterRows<Shape>(s);
#pragma unroll
        for (int k = 0; k < kOwn; ++k) {
          x[k] = (row_bar[k] - u[k] * s[k]) * u[k];
          row_bar[k] = 0;
          v_own[k] = v[k];
        }
        GatherRows<Shape>(x);
        GatherCols<Shape>(v);
        TimesCols<R, C>(K, x, q);
        ScatterCols<Shape>(q);
#pragma unroll
        for (int k = 0; k < kOwn; ++k) col_bar[k] = -v_own[k] * q[k];
#pragma unroll
        for (int r = 0; r < R; ++r) {
#pragma unroll
          for (int c = 0; c < C; ++c) G[r][c] = fmaf(-u[r], y[c], fmaf(-x[r], v[c], G[r][c]));
        }
      }

      // 6. The gradient.
      float infinite = 0;
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int c = 0; c < C; ++c) {
          G[r][c] *= K[r][c];
          infinite = fmaf(G[r][c], 0.0f, infinite);
        }
      }
      if (there && good && !(infinite == 0)) tally.flags |= Tally::kNotFinite;
      Stage<Shape>::Write(place, transposed, G, buffer);
      __syncwarp();  // The gradient is there.
      Stage<Shape>::template StoreWhole<!kShort, kShort>(lane, task.gradient, first, count, buffer);
      __syncwarp();  // The buffer is free.
    }
  });
  StoreTally(task, block, tally);
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_REGISTERS_CUH_
