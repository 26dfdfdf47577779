// The registers kernel for the plain recipes: square, marginals 1, no guard that acts, a fixed number of iterations.
// Lean: of few matrices a solve is all latency.
//
// Matrices smaller than the tile are bordered with the unit matrix, whose scalings are and stay 1. So nothing but their
// way in and out tells them from whole ones.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_CUH_

#include <type_traits>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/normalization_plain_gauge.cuh"
#include "kernels/cuda/normalization_plain_kernels.h"
#include "kernels/cuda/normalization_plain_stage.cuh"
#include "kernels/cuda/normalization_registers.cuh"
#include "kernels/cuda/normalization_tiles_implicit.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

// ---- Choices --------------------------------------------------------------------------------------------------------
// kOne: one problem of whole tiles, its rows first, P wanted and nothing besides, whose task is read in the kernel's
// parameters. Of little code, too: a first execution waits for it. Else any number, of any size up to the tile's.
template <class Shape, Work kWork, bool kShort, bool kOne>
struct PlainTraits {
  static constexpr bool kUnrolled = kWork == Work::kUnrolled, kImplicit = kWork == Work::kImplicit;
  // Where a lane owns three rows or four, their scalings u_t take more memory than time: made again from v_(t-1).
  static constexpr int kHistoryVectors = Shape::kOwn >= 3 ? 1 : 2;
  // Where registers have no room for K and the adjoints together, they take turns, and the iterations' part of the
  // adjoints waits: two more vectors of each, in the workspace.
  static constexpr bool kDefers = kUnrolled && Shape::kSize > 32;
  // Logits come straight into registers: the other half of what a lane's 16 bytes bring from L2 waits in L1 for its
  // next load. No addresses, no wait but for the data.
  static constexpr bool kDirect = kOne && !kShort && kWork == Work::kForward && MayBeGauged<Shape>;
  // One buffer for what goes out and one for what comes in meanwhile; where they would leave too little room for other
  // blocks, the same for both, and nothing comes in meanwhile.
  static constexpr bool kFetches =
      !kDirect && (kUnrolled ? Shape::kSize == 16 || Shape::kSize == 32 : Shape::kSize < 64);
  static constexpr int kBuffers = kFetches ? 2 : 1;
  // Where registers have no room for it.
  static constexpr bool kSharedTally = kImplicit || Shape::kSize > 32 || Shape::R* Shape::C > 32;
  static constexpr int kBufferFloats = PlainStage<Shape, kShort, !kOne>::kBufferFloats;  // Of one.
  static constexpr int kBufferBytes = kWarps * kBuffers * kBufferFloats * static_cast<int>(sizeof(float));
  // Blocks per multiprocessor that registers must leave room for.
  static constexpr int kBlocks = Shape::kSize == 64   ? 2
                                 : kImplicit          ? (Shape::kSize == 4    ? 3
                                                         : Shape::kSize == 24 ? 2
                                                                              : 3)
                                 : Shape::kSize == 4  ? (kUnrolled ? 4
                                                         : kOne    ? 9
                                                                   : 6)
                                 : Shape::kSize == 20 ? 2
                                 : Shape::kSize == 24 ? (kUnrolled ? 2 : 3)
                                 : kUnrolled          ? 3
                                 : Shape::kSize == 12 ? 5
                                                      : (kOne && Shape::kSize != 16 && !kShort ? 5 : 4);
};

// Sizes whose tiles are powers of 2 have an instance of kOne.
template <class Shape>
constexpr bool HasOne = Shape::kSize <= 32 && (Shape::kSize & (Shape::kSize - 1)) == 0;

// Runs body(Shape) for a tile of kPlainSides.
template <class Body>
auto WithPlainShape(int size, Body body) {
  switch (size) {
    case 0:
      return body(Tile4());
    case 1:
      return body(Tile8());
    case 2:
      return body(Tile12());
    case 3:
      return body(Tile16());
    case 4:
      return body(Tile20());
    case 5:
      return body(Tile24());
    case 6:
      return body(Tile32());
    default:
      return body(Tile64());
  }
}

// ---- Start ----------------------------------------------------------------------------------------------------------
// K = exp(W - row maximum) in place of W. False: the range is too wide.
template <class Shape, bool kPadded>
__device__ inline bool PlainStart(const Task& task, const Place<Shape>& place, float (&K)[Shape::R][Shape::C]) {
  const auto inside = [&](int r, int c) { return !kPadded || (place.Row(r) < task.n && place.Col(c) < task.n); };
  float top[Shape::R];
#pragma unroll
  for (int r = 0; r < Shape::R; ++r) {
    top[r] = kPadded ? -FLT_MAX : K[r][0];
#pragma unroll
    for (int c = kPadded ? 0 : 1; c < Shape::C; ++c) {
      if (inside(r, c)) top[r] = fmaxf(top[r], K[r][c]);
    }
  }
  ScatterRows<Shape, Max>(top);
  GatherRows<Shape>(top);
  constexpr float kLog2E = 1.4426950408889634f;
  float lowest = 0, lowest_top = FLT_MAX;  // The former in units of log 2.
#pragma unroll
  for (int r = 0; r < Shape::R; ++r) {
    if (!kPadded || place.Row(r) < task.n) lowest_top = fminf(lowest_top, top[r]);
    const float shift = -kLog2E * top[r];  // Its rounding scales the row: nothing that u would not undo.
#pragma unroll
    for (int c = 0; c < Shape::C; ++c) {
      const float x = fmaf(kLog2E, K[r][c], shift);
      if (inside(r, c)) lowest = fminf(lowest, x);
      K[r][c] = inside(r, c) ? Exp2(x) : place.Row(r) == place.Col(c) ? 1.0f : 0.0f;
    }
  }
  // All logits within the range of their maximum, and above the floor.
  const bool safe = lowest >= -kLog2E * kPlainRange && lowest_top - kPlainRange > task.floor32;
  return OverMatrix<Shape, Min>(safe ? 1.0f : 0.0f) > 0;
}

// Whether a guard, a least number that sums are divided by, acts on none of them, so that members are solved as without
// it. Two half steps tell: the first sums of rows, which are e^top or more, and those of columns then, which are
// e^(W - top) / n or more of their every entry. All later ones are means of reciprocals of the sums before, n at most.
template <class Shape, bool kPadded>
__device__ inline bool GuardRests(const Task& task, const Place<Shape>& place, const float (&W)[Shape::R][Shape::C]) {
  const auto inside = [&](int r, int c) { return !kPadded || (place.Row(r) < task.n && place.Col(c) < task.n); };
  float top[Shape::R], most[Shape::C];
#pragma unroll
  for (int r = 0; r < Shape::R; ++r) {
    top[r] = -FLT_MAX;
#pragma unroll
    for (int c = 0; c < Shape::C; ++c) {
      if (inside(r, c)) top[r] = fmaxf(top[r], W[r][c]);
    }
  }
  ScatterRows<Shape, Max>(top);
  GatherRows<Shape>(top);
#pragma unroll
  for (int c = 0; c < Shape::C; ++c) {
    most[c] = -FLT_MAX;
#pragma unroll
    for (int r = 0; r < Shape::R; ++r) {
      if (inside(r, c)) most[c] = fmaxf(most[c], W[r][c] - top[r]);
    }
  }
  ScatterCols<Shape, Max>(most);
  const float guard = logf(static_cast<float>(task.guard_value)), of_column = guard + logf(static_cast<float>(task.n));
  bool rests = true;
#pragma unroll
  for (int r = 0; r < Shape::R; ++r) rests = rests && ((kPadded && place.Row(r) >= task.n) || top[r] > guard);
#pragma unroll
  for (int k = 0; k < Shape::kOwn; ++k) {
    rests = rests && ((kPadded && place.OwnCol(k) >= task.n) || most[k] > of_column);
  }
  return OverMatrix<Shape, Min>(rests ? 1.0f : 0.0f) > 0;
}

// u, the lane's own rows of it, from v.
template <class Shape>
__device__ inline void RowStep(const float (&K)[Shape::R][Shape::C], const float (&v)[Shape::C], float (&u)[Shape::R]) {
  float s[Shape::R];
  TimesRows<Shape::R, Shape::C>(K, v, s);
  ScatterRows<Shape>(s);
  Reciprocals<Shape::kOwn>(s, u);
}

// ---- Backward -------------------------------------------------------------------------------------------------------
// A lane's adjoints of log K but for the factor K. Rows that registers have no room for stay in the buffer, in the
// lane's own places.
template <class Shape, class Way>
class Adjoints {
 public:
  static constexpr int R = Shape::R, C = Shape::C, kKept = Shape::kSize > 32 ? 0 : R;

  // From dL/dP in the buffer.
  __device__ Adjoints(const Place<Shape>& place, bool transposed, int lane, int n, int64_t first, int count,
                      float* buffer)
      : place_(place), transposed_(transposed), buffer_(buffer) {
    if constexpr (kKept == R) {
      Way::Read(place, transposed, lane, n, first, count, buffer, kept_);
    } else {
      Stage<Shape>::ForTile(place, transposed, [&](int r, int c, int at) {
        if (r < kKept) kept_[r][c] = buffer[at];
      });
    }
  }
  // x = body(r, c, x) for all entries, row by row.
  template <class Body>
  __device__ void ForEach(Body body) {
#pragma unroll
    for (int r = 0; r < kKept; ++r) {
#pragma unroll
      for (int c = 0; c < C; ++c) kept_[r][c] = body(r, c, kept_[r][c]);
    }
    if constexpr (kKept == R) return;
    if (transposed_) {
      Stage<Shape>::ForTile(place_, true, [&](int r, int c, int at) {
        if (r >= kKept) buffer_[at] = body(r, c, buffer_[at]);
      });
      return;
    }
    Stage<Shape>::template ForRuns<2>(place_, [&](int r, int c, int at) {
      if (r < kKept) return;
      float2* const pair = reinterpret_cast<float2*>(buffer_ + at);
      float2 x = *pair;
      x.x = body(r, c, x.x);
      x.y = body(r, c + 1, x.y);
      *pair = x;
    });
  }
  // All of it, where registers have room.
  __device__ float (&Kept())[R][C] {
    static_assert(kKept == R, "some is in the buffer");
    return kept_;
  }
  // To `buffer`, all of it; where some is in the buffer that it came in, that is the one.
  __device__ void Write(int lane, int n, int64_t first, int count, float* buffer) {
    if constexpr (kKept == R) {
      Way::WriteEach(place_, transposed_, lane, n, first, count, buffer, [&](int r, int c) { return kept_[r][c]; });
    } else {
      Stage<Shape>::ForTile(place_, transposed_, [&](int r, int c, int at) {
        if (r < kKept) buffer_[at] = kept_[r][c];
      });
    }
  }

 private:
  const Place<Shape>& place_;
  const bool transposed_;
  float* const buffer_;
  float kept_[kKept > 0 ? kKept : 1][C];
};

// The adjoints of the last step, in place of the cotangents. row_bar, col_bar: of what the lane owns. Roundings are
// spelled out: all instances have the same.
template <class Shape, bool kPadded, class Way>
__device__ inline void LastAdjoints(const Place<Shape>& place, int n, const float (&K)[Shape::R][Shape::C],
                                    const float (&u)[Shape::R], const float (&v)[Shape::C], Adjoints<Shape, Way>* G,
                                    float (&row_bar)[Shape::R], float (&col_bar)[Shape::C]) {
  G->ForEach([&](int r, int c, float cotangent) {
    const bool inside = !kPadded || Shape::kSize > 32 || (place.Row(r) < n && place.Col(c) < n);
    const float g = inside ? __fmul_rn(cotangent, __fmul_rn(u[r], v[c])) : 0.0f, bar = __fmul_rn(g, K[r][c]);
    row_bar[r] = c == 0 ? bar : row_bar[r] + bar;
    col_bar[c] = r == 0 ? bar : col_bar[c] + bar;
    return g;
  });
  ScatterRows<Shape>(row_bar);
  ScatterCols<Shape>(col_bar);
}

// The iterations backward. u, v: of the last iteration. add(t, u, x, v, y): G loses u_t y_t^T + x_t v_(t-1)^T; of each
// the first kOwn are the lane's own.
template <class Shape, class Memory, class Add>
__device__ inline void ReversePlain(const float (&K)[Shape::R][Shape::C], const Memory& history, int iterations,
                                    float (&u)[Shape::R], float (&v)[Shape::C], float (&row_bar)[Shape::R],
                                    float (&col_bar)[Shape::C], Add add) {
  constexpr int R = Shape::R, C = Shape::C, kOwn = Shape::kOwn;
  float v_own[kOwn];
#pragma unroll
  for (int k = 0; k < kOwn; ++k) v_own[k] = v[k];
#pragma unroll Shape::kLanes == 1 ? 2 : 1
  for (int t = iterations; t >= 1; --t) {
    float x[R], y[C], s[R], q[C];
#pragma unroll
    for (int k = 0; k < kOwn; ++k) y[k] = col_bar[k] * v_own[k];
    if constexpr (Memory::kHasU) history.GetU(t, u);
    history.GetV(t - 1, v);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) v_own[k] = v[k];
    GatherCols<Shape>(y);
    GatherCols<Shape>(v);
    if constexpr (!Memory::kHasU) RowStep<Shape>(K, v, u);
    GatherRows<Shape>(u);
    TimesRows<R, C>(K, y, s);
    ScatterRows<Shape>(s);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      x[k] = __fmul_rn(fmaf(-u[k], s[k], row_bar[k]), u[k]);
      row_bar[k] = 0;
    }
    GatherRows<Shape>(x);
    TimesCols<R, C>(K, x, q);
    ScatterCols<Shape>(q);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) col_bar[k] = -v_own[k] * q[k];
    add(t, u, x, v, y);
  }
}

// G of all iterations at once. vectors: their x and y.
template <class Shape, class Memory>
__device__ inline void AddIterations(const Memory& history, const Memory& vectors, int iterations,
                                     float (&G)[Shape::R][Shape::C]) {
  constexpr int R = Shape::R, C = Shape::C, kOwn = Shape::kOwn;
  float next_x[R], next_y[C];  // On their way.
  vectors.GetU(iterations, next_x);
  vectors.GetV(iterations, next_y);
#pragma unroll 1
  for (int t = iterations; t >= 1; --t) {
    float u[R], x[R], v[C], y[C];
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      x[k] = next_x[k];
      y[k] = next_y[k];
    }
    history.GetU(t, u);
    history.GetV(t - 1, v);
    if (t > 1) {
      vectors.GetU(t - 1, next_x);
      vectors.GetV(t - 1, next_y);
    }
    GatherRows<Shape>(u);
    GatherRows<Shape>(x);
    GatherCols<Shape>(v);
    GatherCols<Shape>(y);
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int c = 0; c < C; ++c) G[r][c] = fmaf(-u[r], y[c], fmaf(-x[r], v[c], G[r][c]));
    }
  }
}

// Puts x in the place of y, which it returns.
__device__ inline float Exchanged(float* y, float x) {
  const float old = *y;
  *y = x;
  return old;
}

// ---- The implicit modes ---------------------------------------------------------------------------------------------
// In float64 where registers have room for it.
template <class Shape>
using ImplicitFloat = std::conditional_t<(Shape::kSize > 32), float, double>;
template <class Shape>
constexpr bool ImplicitMayFail = Solving<ImplicitFloat<Shape>>::kLeastCurvature > 0;

// dL/dlogits in place of dL/dP in the buffer. plan(r, c): P. infinite: not 0 if some of it is not finite. False: too
// ill-conditioned.
template <class Shape, class Way, class Plan>
__device__ inline bool ReviseToImplicit(const Task& task, const Place<Shape>& place, int lane, int n, int64_t first,
                                        int count, Plan plan, float* buffer, float* infinite) {
  ImplicitFloat<Shape> P[Shape::R][Shape::C], alpha[Shape::R], beta[Shape::C];
#pragma unroll
  for (int r = 0; r < Shape::R; ++r) {
#pragma unroll
    for (int c = 0; c < Shape::C; ++c) {
      const bool inside = !Way::kPads || (place.Row(r) < n && place.Col(c) < n);
      P[r][c] = inside ? plan(r, c) : 0.0f;
    }
  }
  const auto visit = [&](auto body) { Way::Visit(place, lane, n, first, count, buffer, body); };
  const bool unit = task.backward == BackwardMode::kImplicitUnit;
  const bool good = ImplicitMultipliers<Shape, true>(place, P, n, n, unit, visit, alpha, beta);
  Way::Revise(place, lane, n, first, count, buffer, [&](int r, int c, float d) {
    const float gradient = static_cast<float>((d - alpha[r] - beta[c]) * P[r][c]);
    *infinite = fmaf(gradient, 0.0f, *infinite);
    return gradient;
  });
  return good;
}

// ---- Launches that overlap ------------------------------------------------------------------------------------------
// A launch may start while the last blocks of that before are at work. What it shares nothing with it does not wait for
// until it ends, so that whatever comes behind finds all of them done; else it waits before it touches memory.
__device__ inline void LetDependentsStart() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void AwaitLaunchBefore() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Before the first access to what other launches may have written, or may read.
__device__ inline void AwaitMemory(const LaunchOf& launch) {
  if (!launch.independent) AwaitLaunchBefore();
  if (launch.lets_next_begin) LetDependentsStart();  // Not before what this one waits for has ended.
}

// ---- The kernel -----------------------------------------------------------------------------------------------------
template <bool kOne>
__device__ inline const Task& TaskFrom(const LaunchOf& launch, const Task& copy) {
  if constexpr (kOne) {
    return launch.only;
  } else {
    return copy;
  }
}

// kShort: tensors of 2 bytes an element, else float32.
template <class Shape, Work kWork, bool kShort, bool kOne>
__global__ void __launch_bounds__(kThreads, PlainTraits<Shape, kWork, kShort, kOne>::kBlocks)
    PlainKernel(const __grid_constant__ LaunchOf launch) {
  if constexpr (kWork == Work::kUnrolled) AwaitMemory(launch);
  constexpr int R = Shape::R, C = Shape::C, kOwn = Shape::kOwn;
  constexpr bool kPadded = !kOne, kUnrolled = kWork == Work::kUnrolled, kImplicit = kWork == Work::kImplicit;
  using Traits = PlainTraits<Shape, kWork, kShort, kOne>;
  constexpr bool kMayBeGauged = MayBeGauged<Shape>, kPlanned = kMayBeGauged && !kUnrolled;
  using Way = PlainStage<Shape, kShort, kPadded>;
  __shared__ Task copy;
  int block = blockIdx.x;
  if constexpr (!kOne) block = LoadTask(launch, &copy);
  const Task& task = TaskFrom<kOne>(launch, copy);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int n = kPadded ? task.n : Shape::kSize;
  const Place<Shape> place(lane);
  // The same, known anew: what is computed from it for each entry is not kept.
  const auto here = [&] { return Way::kPacked ? Place<Shape>(Opaque(lane)) : place; };
  const bool transposed = !kOne && task.transposed;
  const int iterations = task.iterations;
  float* const shared = reinterpret_cast<float*>(DynamicShared());
  float* const buffer = shared + warp * Traits::kBuffers * Traits::kBufferFloats;
  float* const incoming = buffer + (Traits::kBuffers - 1) * Traits::kBufferFloats;
  float* const logits_buffer = kImplicit ? buffer : incoming;
  // What waits is in the slot, behind it the history where shared memory has no room for it.
  float* const slot = reinterpret_cast<float*>(task.workspace + task.slot_bytes * block);
  const int64_t waiting = Traits::kDefers ? HistoryBytes<Shape>(2, iterations) : 0;
  float* const memory = task.slot_bytes == waiting ? shared + blockDim.x / 32 * Traits::kBuffers * Traits::kBufferFloats
                                                   : slot + waiting / static_cast<int64_t>(sizeof(float));
  History<kOwn, Traits::kHistoryVectors> history(memory);
  LaneTally own_tally;
  __shared__ LaneTally tallies[Traits::kSharedTally ? kThreads : 1];
  LaneTally& tally = Traits::kSharedTally ? tallies[threadIdx.x] : own_tally;
  tally = LaneTally();
  const auto fetch_after = [&](auto before, const Tensor& tensor, int64_t first, float* to) {
    const int64_t left = task.last - first;
    if (left > 0) Way::Fetch(lane, tensor, n, first, static_cast<int>(min(int64_t{Shape::kMembers}, left)), to, before);
  };
  const auto fetch = [&](const Tensor& tensor, int64_t first, float* to) { fetch_after([] {}, tensor, first, to); };

  if constexpr (kUnrolled && !kMayBeGauged) {
    float ones[kOwn];  // The scalings before the first iteration.
#pragma unroll
    for (int k = 0; k < kOwn; ++k) ones[k] = 1;
    history.Put(0, ones, ones);
  }

  bool is_first = true;
  ForMembers<Shape>(task, block, [&](int64_t first, int count) {
    const int64_t member = first + place.member;
    // 1. K.
    float K[R][C];
    if constexpr (Traits::kDirect) {
      if (is_first) AwaitMemory(launch);
      Way::Load(task.logits, first + min(lane, count - 1), K);
    } else if (!Traits::kFetches || is_first) {
      if constexpr (kUnrolled) {
        fetch(task.logits, first, logits_buffer);
      } else {
        fetch_after(
            [&] {
              if (is_first) AwaitMemory(launch);
            },
            task.logits, first, logits_buffer);
      }
    }
    is_first = false;
    if constexpr (!Traits::kDirect) {
      Way::Arrived(lane, task.logits, n, first, count, logits_buffer);
      Way::Read(place, transposed, lane, n, first, count, logits_buffer, K);
      __syncwarp();  // The buffer is free.
    }
    if constexpr (Traits::kFetches) {
      if (kUnrolled || kImplicit) {
        fetch(task.cotangent, first, incoming);
      } else {
        fetch(task.logits, first + MemberStep<Shape>(task), logits_buffer);
      }
    }
    // By each matrix's own logits, whatever its neighbours do.
    bool rests = true;
    if constexpr (!kOne) rests = task.guard == Guard::kNone || GuardRests<Shape, kPadded>(task, here(), K);
    float u[R], v[C], s[R], q[C];
    bool gauged = false;
    if constexpr (kMayBeGauged) gauged = (!kPadded || n == kGauged) && GaugeStart<!kUnrolled>(task.floor32, K, v);
    const bool safe = (gauged || PlainStart<Shape, kPadded>(task, here(), K)) && rests;

    // 2. Iterations. u and v: the first kOwn are the lane's own. kPlanned: K becomes P here or below.
    if constexpr (kMayBeGauged) {
      if (gauged) {
        if constexpr (kPlanned) {
          GaugePlan<6>(iterations, K, v, s, q);
        } else {
          GaugeIterate<5>(iterations, K, u, v, q, [&](int t, auto& v) { history.Put(t, nullptr, v); });
        }
      }
    }
    if (!gauged) {
#pragma unroll
      for (int c = 0; c < C; ++c) v[c] = 1;
      if constexpr (kUnrolled && kMayBeGauged) history.Put(0, nullptr, v);
#pragma unroll kWork != Work::kForward || Shape::kSize == 64 ? 1 : 2
      for (int t = 1; t <= iterations; ++t) {
        RowStep<Shape>(K, v, u);
        GatherRows<Shape>(u);
        TimesCols<R, C>(K, u, q);
        ScatterCols<Shape>(q);
        Reciprocals<kOwn>(q, v);
        if constexpr (kUnrolled) history.Put(t, u, v);
        GatherCols<Shape>(v);
      }
    }

    // 3. P and its sums.
    const auto scaled = [&](int r, int c) { return K[r][c] * u[r] * v[c]; };
    const auto plan = [&](int r, int c) { return kPlanned ? K[r][c] : scaled(r, c); };
    if (!kPlanned || !gauged) {
      TimesRows<R, C>(K, v, s);
      ScatterRows<Shape>(s);
#pragma unroll
      for (int k = 0; k < kOwn; ++k) {
        s[k] = __fmul_rn(s[k], u[k]);
        q[k] = __fmul_rn(q[k], v[k]);
      }
      if constexpr (kPlanned) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
#pragma unroll
          for (int c = 0; c < C; ++c) K[r][c] = scaled(r, c);
        }
      }
    }
    float expected_rows[kOwn], expected_cols[kOwn];
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      expected_rows[k] = kPadded && place.OwnRow(k) >= n ? s[k] : 1.0f;  // The border is no error's.
      expected_cols[k] = kPadded && place.OwnCol(k) >= n ? q[k] : 1.0f;
    }
    const float row_error = ErrorL1<Shape>(s, expected_rows), col_error = ErrorL1<Shape>(q, expected_cols);
    const bool there = place.member < count;
    bool good = safe && row_error + col_error < FLT_MAX;
    const auto settle = [&] {
      StoreRedo<Shape>(task, place, first, there && !good, lane);
      if (there && !good) tally.flags |= Tally::kRedo;
      if (there && good) Certify(task, member, place.first(), row_error, col_error, iterations, &tally);
    };
    constexpr bool kMayFail = kImplicit && ImplicitMayFail<Shape>;
    constexpr bool kSettles =
        !kMayFail && !(kUnrolled && Shape::kSize == 24);  // Later registers are the better for it.
    if constexpr (kSettles) settle();
    if constexpr (!kOne) StoreSums<Shape>(task, place, lane, first, count, s, q, buffer);
    if (kOne || task.plan.data != nullptr) {
      Way::WriteEach(place, transposed, lane, n, first, count, buffer, plan);
      __syncwarp();  // P is there.
      Way::Store(lane, task.plan, n, first, count, buffer);
      __syncwarp();  // The buffer is free.
    }
    if constexpr (kImplicit) {
      // 4. The gradient, at the fixed point. P's own rows come first there.
      if (transposed) {
        Way::WriteEach(place, true, lane, n, first, count, buffer, plan);
        __syncwarp();  // P is there.
        Way::Read(place, false, lane, n, first, count, buffer, K);
        __syncwarp();  // The buffer is free.
#pragma unroll
        for (int r = 0; r < R; ++r) u[r] = 1;
#pragma unroll
        for (int c = 0; c < C; ++c) v[c] = 1;
      }
      if constexpr (!Traits::kFetches) fetch(task.cotangent, first, incoming);
      Way::Arrived(lane, task.cotangent, n, first, count, incoming);
      if (Way::kWide && n < Shape::kSize) Way::ClearBorder(lane, n, incoming);
      if constexpr (Traits::kFetches) fetch(task.logits, first + MemberStep<Shape>(task), logits_buffer);
      float infinite = 0;
      good &= ReviseToImplicit<Shape, Way>(task, here(), lane, n, first, count, plan, incoming, &infinite);
      if (there && good && !(infinite == 0)) tally.flags |= Tally::kNotFinite;
      __syncwarp();  // The gradient is there.
      Way::Store(lane, task.gradient, n, first, count, incoming);
      __syncwarp();  // The buffer is free.
    }
    if constexpr (!kSettles) settle();
    if constexpr (kUnrolled) {
      // 4. The iterations backward.
      float row_bar[R], col_bar[C];
      if constexpr (!Traits::kFetches) fetch(task.cotangent, first, incoming);
      Way::Arrived(lane, task.cotangent, n, first, count, incoming);
      if (kPadded && Way::kWide && n < Shape::kSize) Way::ClearBorder(lane, n, incoming);
      Adjoints<Shape, Way> G(place, transposed, lane, n, first, count, incoming);
      __syncwarp();  // The buffer is free, but for G's own.
      if constexpr (Traits::kFetches) fetch(task.logits, first + MemberStep<Shape>(task), logits_buffer);
      LastAdjoints<Shape, kPadded>(here(), n, K, u, v, &G, row_bar, col_bar);
      float infinite = 0;
      const auto watched = [&](float gradient) {
        infinite = fmaf(gradient, 0.0f, infinite);
        return gradient;
      };
      const auto last = [&](float g, float k) { return watched(__fmul_rn(g, k)); };
      if constexpr (Traits::kDefers) {
        History<kOwn> vectors(slot);
        ReversePlain<Shape>(K, history, iterations, u, v, row_bar, col_bar,
                            [&](int t, auto&, auto& x, auto&, auto& y) { vectors.Put(t, x, y); });
        G.ForEach([&](int r, int c, float g) { return Exchanged(&K[r][c], g); });
        AddIterations<Shape>(history, vectors, iterations, K);
        // 5. The gradient.
        G.ForEach([&](int r, int c, float k) { return last(K[r][c], k); });
      } else {
        if constexpr (kMayBeGauged) {
          if (gauged) {
            GaugeReverse(K, iterations, row_bar, col_bar, G.Kept(), [&](int t, auto& v) { history.GetV(t, v); });
            G.ForEach([&](int, int, float gradient) { return watched(gradient); });
          }
        }
        if (!gauged) {
          ReversePlain<Shape>(
              K, history, iterations, u, v, row_bar, col_bar, [&](int, auto& u, auto& x, auto& v, auto& y) {
                G.ForEach([&](int r, int c, float g) { return fmaf(-u[r], y[c], fmaf(-x[r], v[c], g)); });
              });
          // 5. The gradient.
          G.ForEach([&](int r, int c, float g) { return last(g, K[r][c]); });
        }
      }
      if (there && good && !(infinite == 0)) tally.flags |= Tally::kNotFinite;
      G.Write(lane, n, first, count, buffer);
      __syncwarp();  // The gradient is there.
      Way::Store(lane, task.gradient, n, first, count, buffer);
      __syncwarp();  // The buffer is free.
    }
  });
  LetDependentsStart();
  StoreTally(task, block, tally);
  AwaitLaunchBefore();
}

// Null: there is none.
template <Work kWork, bool kShort>
PlainFunction PlainKernelOf(int size, bool one) {
  return WithPlainShape(size, [&](auto shape) -> PlainFunction {
    using Shape = decltype(shape);
    if constexpr (kWork != Work::kForward && Shape::kSize == 20) {
      return nullptr;
    } else {
      if constexpr (HasOne<Shape>) {
        if (one) return PlainKernel<Shape, kWork, kShort, true>;
      }
      return one ? nullptr : PlainKernel<Shape, kWork, kShort, false>;
    }
  });
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_CUH_
