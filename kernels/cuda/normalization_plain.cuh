// The registers kernel for the plain recipes: square, marginals 1, no guard that acts, a fixed number of iterations;
// and for those that begin with a softmax. Lean: of few matrices a solve is all latency.
//
// What a tile has outside a smaller matrix are copies of the matrix's first row and column, whose scalings are 0; of
// rows longer than a warp, the unit matrix, whose scalings are and stay 1.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_CUH_

#include <type_traits>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/normalization_plain_gauge.cuh"
#include "kernels/cuda/normalization_plain_kernels.h"
#include "kernels/cuda/normalization_plain_reverse.cuh"
#include "kernels/cuda/normalization_plain_softmax.cuh"
#include "kernels/cuda/normalization_plain_stage.cuh"
#include "kernels/cuda/normalization_plain_start.cuh"
#include "kernels/cuda/normalization_tiles_implicit.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

// ---- Choices --------------------------------------------------------------------------------------------------------
// kOne: one problem of whole tiles, its rows first, P wanted and nothing besides, whose task is read in the kernel's
// parameters. Of little code, too: a first execution waits for it. Else any number, of any size up to the tile's.
template <class Shape, Work kWork, bool kShort, bool kOne, bool kSoftmax>
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
  static constexpr bool kFetches = kUnrolled   ? (kOne && Shape::kSize == 16) || Shape::kSize == 32
                                   : kImplicit ? Shape::kSize < 64
                                               : !kDirect && (kOne || Shape::kSize < 20);
  static constexpr int kBuffers = kFetches ? 2 : 1;
  // Where registers have no room for it.
  static constexpr bool kSharedTally = kImplicit || Shape::kSize > 32 || Shape::R* Shape::C > 32;
  static constexpr int kLeast = LeastSide(Shape::kSize, kWork != Work::kForward);
  // Backward, copies gain nothing.
  using Way = PlainStage<Shape, kShort, !kOne, kWork == Work::kForward, kLeast>;
  static constexpr int kBufferFloats = Way::kBufferFloats;  // Of one.
  static constexpr int kBufferBytes = kWarps * kBuffers * kBufferFloats * static_cast<int>(sizeof(float));
  // Blocks per multiprocessor that registers must leave room for.
  static constexpr int Blocks() {
    constexpr int kSize = Shape::kSize;
    if (kSize == 64 || kSize == 28) return 2;
    if (kSize == 24) return kWork == Work::kForward ? (kSoftmax ? 3 : 4) : 2;
    if (kImplicit && kSize == 32 && Shape::kMembers == 2) return 2;
    if (kImplicit || kSize == 20) return 3;
    if (kSize == 4) return kUnrolled ? 4 : kOne ? 9 : 6;
    if (kUnrolled) return 3;
    if (kSize == 32) return kOne ? 3 : 4;
    if (kOne) return kSize == 8 && !kShort ? 5 : 4;
    return kSize == 8 || kSoftmax ? 4 : 5;
  }
  static constexpr int kBlocks = Blocks();
  // A few instances are the slower for what WarpNumber says.
  __device__ static int Warp() {
    constexpr bool kSlower = !kSoftmax && ((Shape::kSize == 4 && !kImplicit) ||                        //
                                           (Shape::kSize == 32 && kWork == Work::kForward && kOne) ||  //
                                           (Shape::kSize == 64 && kUnrolled && kOne && kShort));
    return kSlower ? static_cast<int>(threadIdx.x / 32) : WarpNumber();
  }
};

// Sizes whose tiles are powers of 2 have an instance of kOne; 64 where it gains most for the time it takes to compile.
template <class Shape, Work kWork, bool kSoftmax>
constexpr bool HasOne = (Shape::kSize & (Shape::kSize - 1)) == 0 &&
                        (Shape::kSize <= 32 || (kWork != Work::kForward && !kSoftmax));

// Runs body(Shape) for a tile of kPlainSides.
template <Work kWork, bool kSoftmax, class Body>
constexpr auto WithPlainShape(int size, Body body) {
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
      return body(Tile28());
    case 7:
      return body(std::conditional_t<PlainHalves(kWork, kSoftmax), Tile32Wide, Tile32>());
    default:
      return body(Tile64());
  }
}

// ---- The implicit modes ---------------------------------------------------------------------------------------------
// In float64 where registers have room for it.
template <class Shape>
using ImplicitFloat = std::conditional_t<(Shape::kSize > 32), float, double>;
template <class Shape>
constexpr bool ImplicitMayFail = Solving<ImplicitFloat<Shape>>::kMayFail;

// dL/dlog K in place of dL/dP in the buffer. plan(r, c): P. infinite: not 0 if some of it is not finite. False: too
// ill-conditioned.
template <class Shape, class Way, class Plan>
__device__ inline bool ReviseToImplicit(const Task& task, const Place<Shape>& place, int lane, int n, int64_t first,
                                        int count, Plan plan, float* buffer, float* infinite) {
  using T = ImplicitFloat<Shape>;
  T P[Shape::R][Shape::C], alpha[Shape::R], beta[Shape::C];
  float narrow[Shape::R][Shape::C];
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
  const bool good = ImplicitMultipliers<Shape, true>(place, P, n, n, unit, visit, alpha, beta, narrow);
  Way::Revise(place, lane, n, first, count, buffer, [&](int r, int c, float d) {
    const float gradient = TimesPlan<Shape, T>(d - alpha[r] - beta[c], P, narrow, r, c);
    *infinite = fmaf(gradient, 0.0f, *infinite);
    return gradient;
  });
  return good;
}

// ---- Launches that overlap ------------------------------------------------------------------------------------------
// A launch may start while the last blocks of that before are at work. What it shares nothing with it does not wait for
// until it ends, so that whatever comes behind finds all of them done; else it waits here, before it first touches what
// others may have written, or may read.
__device__ inline void AwaitMemory(const LaunchOf& launch) {
  if (!launch.independent) AwaitKernelBefore();
  if (launch.lets_next_begin) AllowNextKernel();  // Not before what this one waits for has ended.
}

// ---- The kernel -----------------------------------------------------------------------------------------------------
template <bool kOne>
__device__ inline const Task& TaskFrom(const LaunchOf& launch, const Task& copy) {
  if constexpr (kOne) {
    return launch.few[0];
  } else {
    return copy;
  }
}

// kShort: tensors of 2 bytes an element, else float32.
template <class Shape, Work kWork, bool kShort, bool kOne, bool kSoftmax>
__global__ void __launch_bounds__(kThreads, PlainTraits<Shape, kWork, kShort, kOne, kSoftmax>::kBlocks)
    PlainKernel(const __grid_constant__ LaunchOf launch) {
  if constexpr (kWork == Work::kUnrolled) AwaitMemory(launch);
  constexpr int R = Shape::R, C = Shape::C, kOwn = Shape::kOwn;
  constexpr bool kPadded = !kOne, kUnrolled = kWork == Work::kUnrolled, kImplicit = kWork == Work::kImplicit;
  using Traits = PlainTraits<Shape, kWork, kShort, kOne, kSoftmax>;
  using Way = typename Traits::Way;
  // A softmax's logits come once more behind the cotangent, where registers have room for both.
  constexpr bool kChains = kSoftmax && Shape::kSize <= 32;
  constexpr bool kMayBeGauged = !kSoftmax && MayBeGauged<Shape>, kPlanned = kMayBeGauged && !kUnrolled;
  // K becomes P before its rows are summed up: registers have no room for it and all scalings and sums.
  constexpr bool kScaled = kWork == Work::kForward && R * C > 64 && !Way::kWide;
  __shared__ Task copy;
  int block = blockIdx.x;
  Way::Begin();
  if constexpr (!kOne) block = LoadTask(launch, &copy);
  const Task& task = TaskFrom<kOne>(launch, copy);
  const int lane = threadIdx.x % 32, warp = Traits::Warp();
  const int n = kPadded ? task.n : Shape::kSize;
  const Place<Shape> place(lane);
  // Outside, K is the unit matrix, or scalings are cleared.
  constexpr bool kUnit = kPadded && Way::kWide, kClears = kPadded && !kUnit;
  const Border<Shape, Traits::kLeast, kClears> border(place, n);
  // The same, known anew: what is computed from it for each entry is not kept.
  const auto here = [&] { return Way::kPacked ? Place<Shape>(Opaque(lane)) : place; };
  const bool transposed = !kOne && task.transposed;
  const int iterations = task.iterations;
  const float guard = kSoftmax && task.guard != Guard::kNone ? static_cast<float>(task.guard_value) : 0.0f;
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
  const auto fetch = [&](const Tensor& tensor, int64_t first, float* to) {
    fetch_after([] { Way::Free(); }, tensor, first, to);
  };

  if constexpr (kUnrolled && !kSoftmax && !kMayBeGauged) {
    float ones[kOwn];  // The scalings before the first iteration.
#pragma unroll
    for (int k = 0; k < kOwn; ++k) ones[k] = 1;
    border.ClearCols(ones);
    history.Put(0, ones, ones);
  }

  bool is_first = true;
  ForMembers<Shape>(task, block, warp, [&](int64_t first, int count) {
    const int64_t member = first + place.member;
    if (!is_first) Way::Free();
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
    if constexpr (!kOne && !kSoftmax) rests = task.guard == Guard::kNone || GuardRests<Shape, kUnit>(task, here(), K);
    float u[R], v[C], s[R], q[C];
    bool gauged = false;
    if constexpr (kMayBeGauged) gauged = (!kPadded || n == kGauged) && GaugeStart<!kUnrolled>(task.floor32, K, v);
    const bool safe = (gauged || StartOf<Shape, kPadded, kUnit, kSoftmax>(task, here(), K)) && rests;

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
    if constexpr (kSoftmax) {
      SoftmaxIterate<Shape>(K, border, guard, iterations, u, v, q, [&](int t, auto& u, auto& v) {
        if constexpr (kUnrolled) history.Put(t, u, v);
      });
    } else if (!gauged) {
#pragma unroll
      for (int c = 0; c < C; ++c) v[c] = 1;
      border.ClearCols(v);
      if constexpr (kUnrolled && kMayBeGauged) history.Put(0, nullptr, v);
      if constexpr (kClears) GatherCols<Shape>(v);
#pragma unroll kWork != Work::kForward || Shape::kSize == 64 || Shape::kSize == 28 ? 1 : 2
      for (int t = 1; t <= iterations; ++t) {
        RowStep<Shape>(K, v, border, u);
        GatherRows<Shape>(u);
        TimesCols<R, C>(K, u, q);
        ScatterCols<Shape>(q);
        Reciprocals<kOwn>(q, v);
        border.ClearCols(v);
        if constexpr (kUnrolled) history.Put(t, u, v);
        GatherCols<Shape>(v);
      }
    }

    // Those of the next members; a softmax's own come once more before.
    const auto fetch_logits = [&](bool again) {
      fetch(task.logits, again ? first : first + MemberStep<Shape>(task), logits_buffer);
    };
    // dL/dlogits in place of what SoftmaxChain takes.
    const auto chain_to_logits = [&](auto of_log, auto& gradient, float* infinite) {
      constexpr bool kOfLog = decltype(of_log)::value;
      Way::Arrived(lane, task.logits, n, first, count, logits_buffer);
      Way::Read(place, false, lane, n, first, count, logits_buffer, K);
      __syncwarp();  // The buffer is free.
      if constexpr (Traits::kFetches) fetch_logits(false);
      SoftmaxChain<Shape, kPadded, kOfLog>(task, here(), K, gradient, infinite);
    };

    // 3. P and its sums.
    const auto scaled = [&](int r, int c) { return K[r][c] * u[r] * v[c]; };
    const auto plan = [&](int r, int c) { return kPlanned || kScaled ? K[r][c] : scaled(r, c); };
    if constexpr (kScaled) {
#pragma unroll
      for (int k = 0; k < kOwn; ++k) q[k] = __fmul_rn(q[k], v[k]);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        s[r] = 0;
#pragma unroll
        for (int c = 0; c < C; ++c) {
          K[r][c] = scaled(r, c);
          s[r] += K[r][c];
        }
      }
      ScatterRows<Shape>(s);
    } else if (!kPlanned || !gauged) {
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
      const bool may_leave = kPadded && Place<Shape>::Last(k) >= Traits::kLeast;  // Outside there is no error.
      expected_rows[k] = may_leave && place.OwnRow(k) >= n ? s[k] : 1.0f;
      expected_cols[k] = may_leave && place.OwnCol(k) >= n ? q[k] : 1.0f;
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
        !kMayFail && Shape::kSize != 24 && Shape::kSize != 28;  // Later registers are the better for it.
    if constexpr (kSettles) settle();
    if constexpr (!kOne) StoreSums<Shape>(task, place, lane, first, count, s, q, buffer);
    const bool wants_plan = kOne || task.plan.data != nullptr, turns = kImplicit && transposed;
    if (wants_plan || turns) {
      Way::WriteEach(place, transposed, lane, n, first, count, buffer, plan);
      __syncwarp();  // P is there.
      if (wants_plan) Way::Store(lane, task.plan, n, first, count, buffer);
      if (turns) {  // The gradient is of P's own rows.
        Way::Read(place, false, lane, n, first, count, buffer, K);
#pragma unroll
        for (int r = 0; r < R; ++r) u[r] = 1;
#pragma unroll
        for (int c = 0; c < C; ++c) v[c] = 1;
      }
      __syncwarp();  // The buffer is free.
    }
    if constexpr (kImplicit) {
      // 4. The gradient, at the fixed point.
      if constexpr (!Traits::kFetches) fetch(task.cotangent, first, incoming);
      Way::Arrived(lane, task.cotangent, n, first, count, incoming);
      if (Way::kWide && n < Shape::kSize) Way::ClearBorder(lane, n, incoming);
      if constexpr (kChains || Traits::kFetches) fetch_logits(kChains);
      float infinite = 0;
      good &= ReviseToImplicit<Shape, Way>(task, here(), lane, n, first, count, plan, incoming, &infinite);
      if constexpr (kChains) {
        float G[R][C];
        __syncwarp();  // dL/dlog K is there.
        Way::Visit(place, lane, n, first, count, incoming, [&](int r, int c, float g) { G[r][c] = g; });
        chain_to_logits(std::true_type(), G, &infinite);
        Way::WriteEach(place, false, lane, n, first, count, incoming, [&](int r, int c) { return G[r][c]; });
      } else if constexpr (kSoftmax) {
        __syncwarp();  // dL/dlog K is there.
        SoftmaxChainRows<Shape, kShort, true>(task, lane, n, member, incoming, &infinite);
      }
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
      if constexpr (kChains || Traits::kFetches) fetch_logits(kChains);
      LastAdjoints<Shape, kUnit>(here(), n, K, u, v, &G, row_bar, col_bar);
      float infinite = 0;
      const auto watched = [&](float gradient) {
        infinite = fmaf(gradient, 0.0f, infinite);
        return gradient;
      };
      const auto last = [&](float g, float k) { return watched(__fmul_rn(g, k)); };
      const auto add = [&](int, auto& u, auto& x, auto& v, auto& y) {
        G.ForEach([&](int r, int c, float g) { return fmaf(-u[r], y[c], fmaf(-x[r], v[c], g)); });
      };
      if constexpr (kSoftmax && !Traits::kDefers) {
        SoftmaxReverse<Shape>(K, border, guard, history, iterations, u, v, row_bar, col_bar, add);
        // 5. The gradient.
        chain_to_logits(std::false_type(), G.Kept(), &infinite);
      } else if constexpr (Traits::kDefers) {
        History<kOwn> vectors(slot);
        const auto wait = [&](int t, auto&, auto& x, auto&, auto& y) { vectors.Put(t, x, y); };
        if constexpr (kSoftmax) {
          SoftmaxReverse<Shape>(K, border, guard, history, iterations, u, v, row_bar, col_bar, wait);
        } else {
          ReversePlain<Shape>(K, border, history, iterations, u, v, row_bar, col_bar, wait);
        }
        G.ForEach([&](int r, int c, float g) { return Exchanged(&K[r][c], g); });
        AddIterations<Shape>(history, vectors, iterations, K);
        // 5. The gradient.
        if constexpr (kSoftmax) {
          G.ForEach([&](int r, int c, float) { return K[r][c]; });
          __syncwarp();  // dL/dK is there.
          SoftmaxChainRows<Shape, kShort, false>(task, lane, n, member, buffer, &infinite);
        } else {
          G.ForEach([&](int r, int c, float k) { return last(K[r][c], k); });
        }
      } else {
        if constexpr (kMayBeGauged) {
          if (gauged) {
            GaugeReverse(K, iterations, row_bar, col_bar, G.Kept(), [&](int t, auto& v) { history.GetV(t, v); });
            G.ForEach([&](int, int, float gradient) { return watched(gradient); });
          }
        }
        if (!gauged) {
          ReversePlain<Shape>(K, border, history, iterations, u, v, row_bar, col_bar, add);
          // 5. The gradient.
          G.ForEach([&](int r, int c, float g) { return last(g, K[r][c]); });
        }
      }
      if (there && good && !(infinite == 0)) tally.flags |= Tally::kNotFinite;
      Way::Free();
      G.Write(lane, n, first, count, buffer);
      __syncwarp();  // The gradient is there.
      Way::Store(lane, task.gradient, n, first, count, buffer);
      __syncwarp();  // The buffer is free.
    }
  });
  AllowNextKernel();
  StoreTally(task, block, tally);
  Way::Free();  // Before it ends.
  // So that the launch does not end before the one before. One block is enough: others leave their place to those that
  // have not begun.
  if (blockIdx.x == gridDim.x - 1) AwaitKernelBefore();
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_PLAIN_CUH_
