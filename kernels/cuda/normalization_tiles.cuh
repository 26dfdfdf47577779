// The registers kernel for all other recipes, shapes up to a tile's and types: marginals, guards, offset, softmax,
// floor, dustbin, tolerance. As PlainKernel, with more to look up.
//
// In the linear domain u and v are only free of drift if both sides have the same total, and P's scale matters to the
// guards alone. So the marginals are scaled to the total `rows`: after a row step the kernel's P is row_scale times the
// true one, after a column step col_scale times. All guards are one: u <- u r / max(u s + add, most), with add = 0
// where there is none, and `most` the smallest number where there is none: padding, whose sums are 0, ends as 0.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_TILES_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_TILES_CUH_

#include "kernels/cuda/normalization_registers.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

constexpr float kSmallest = 1e-37f;

// A side's division: what a lane owns of it.
template <int kOwn>
struct Side {
  float marginal[kOwn];  // Scaled; padding: 0.
  float add, most;       // The guard.

  __device__ float Rescaled(int k, float s, float old) const {
    return marginal[k] * old * Reciprocal(fmaxf(fmaf(old, s, add), most));
  }
  // The reverse in logarithms: bar = adjoint of log now. Returns theta * bar * now / marginal; *bar becomes the adjoint
  // of log old that does not pass through the sum.
  __device__ float Unscaled(int k, float old, float now, float* bar) const {
    const bool passes = now < marginal[k] * old * Reciprocal(most);  // As computed there; not for padding.
    const float multiplier = passes ? *bar * now / marginal[k] : 0.0f;
    if (passes) *bar = add > 0 ? multiplier * add / old : 0.0f;
    return multiplier;
  }
};

// A member's numbers.
template <int kOwn>
struct Terms {
  Side<kOwn> row, col;
  float row_scale, col_scale;  // Scaled marginal / marginal.
  float range;                 // log(largest / smallest) of the marginals, both sides added.
  bool guards_fit;
};

template <class Shape>
__device__ inline float TotalOf(const float (&x)[Shape::kOwn]) {
  float sum = 0;
#pragma unroll
  for (int k = 0; k < Shape::kOwn; ++k) sum += x[k];
  return OverMatrix<Shape, Sum>(sum);
}

// log(largest / smallest) of `size` numbers of which each lane has some, the first of them number `own`.
template <class Shape>
__device__ inline float LogRange(const float (&x)[Shape::kOwn], int own, int size) {
  float low = FLT_MAX, high = 0;
#pragma unroll
  for (int k = 0; k < Shape::kOwn; ++k) {
    if (own + k >= size) continue;
    low = fminf(low, x[k]);
    high = fmaxf(high, x[k]);
  }
  low = OverMatrix<Shape, Min>(low);
  high = OverMatrix<Shape, Max>(high);
  return low > 0 ? logf(high / low) : FLT_MAX;
}

template <class Shape>
__device__ __forceinline__ void LoadMarginal(const Tensor& tensor, int64_t member, int own, int size,
                                             float (&x)[Shape::kOwn]) {
  const int64_t base = tensor.shared ? 0 : member * size;
#pragma unroll
  for (int k = 0; k < Shape::kOwn; ++k) {
    const bool inside = own + k < size;
    x[k] = inside ? 1.0f : 0.0f;
    if (inside && tensor.data != nullptr) x[k] = LoadAs<float>(tensor.dtype, tensor.data, base + own + k);
  }
}

template <class Shape>
__device__ __forceinline__ void LoadTerms(const Task& task, const Place<Shape>& place, int64_t member,
                                          Terms<Shape::kOwn>* terms) {
  const int bin = task.has_dustbin ? 1 : 0, i = place.OwnRow(0), j = place.OwnCol(0);
  float(&r)[Shape::kOwn] = terms->row.marginal, (&c)[Shape::kOwn] = terms->col.marginal;
  LoadMarginal<Shape>(task.transposed ? task.column_marginals : task.row_marginals, member, i, task.rows - bin, r);
  LoadMarginal<Shape>(task.transposed ? task.row_marginals : task.column_marginals, member, j, task.cols - bin, c);
  float row_total = TotalOf<Shape>(r), col_total = TotalOf<Shape>(c);
  if (bin == 1) {
#pragma unroll
    for (int k = 0; k < Shape::kOwn; ++k) {
      r[k] = i + k == task.rows - 1 ? col_total : r[k];
      c[k] = j + k == task.cols - 1 ? row_total : c[k];
    }
    row_total = col_total = row_total + col_total;
  }
  terms->range = 0;
  if (task.own_marginals || bin == 1) {
    terms->range = LogRange<Shape>(r, i, task.rows) + LogRange<Shape>(c, j, task.cols);
  }
  const float total = static_cast<float>(task.rows);
  terms->row_scale = total / row_total;
  terms->col_scale = total / col_total;
#pragma unroll
  for (int k = 0; k < Shape::kOwn; ++k) {
    r[k] *= terms->row_scale;
    c[k] *= terms->col_scale;
  }
  // The kernel's P is scaled as the step before left it.
  const float guard = static_cast<float>(task.guard_value);
  const float row_guard = guard * terms->col_scale, col_guard = guard * terms->row_scale;
  const bool add = task.guard == Guard::kAdd, most = task.guard == Guard::kMax;
  terms->row.add = add ? row_guard : 0;
  terms->col.add = add ? col_guard : 0;
  terms->row.most = most ? row_guard : kSmallest;
  terms->col.most = most ? col_guard : kSmallest;
  // Else old / guard could overflow, or a large guard shrink P to nothing.
  terms->guards_fit =
      task.guard == Guard::kNone || (fmaxf(row_guard, col_guard) <= 1e6f && fminf(row_guard, col_guard) >= 1e-12f);
}

// NaN stays.
__device__ inline float Raised(float w, float floor) { return w < floor ? floor : w; }

// ---- Start: from logits to K ----------------------------------------------------------------------------------------
// Of a row: K = scale e^(max(W, floor) - top) + added.
struct RowStart {
  float top, scale, added;
};

// Row maxima and, for softmax, sums, to all lanes of a row. W in K.
template <class Shape>
__device__ __forceinline__ void StartRows(const Task& task, const Place<Shape>& place, const Terms<Shape::kOwn>& terms,
                                          const float (&K)[Shape::R][Shape::C], RowStart (&start)[Shape::R]) {
  float top[Shape::R], sum[Shape::R];
#pragma unroll
  for (int r = 0; r < Shape::R; ++r) {
    top[r] = task.floor32;
#pragma unroll
    for (int c = 0; c < Shape::C; ++c) {
      if (place.Col(c) < task.cols) top[r] = fmaxf(top[r], K[r][c]);
    }
  }
  ScatterRows<Shape, Max>(top);
  GatherRows<Shape>(top);
  const float log_offset = logf(static_cast<float>(task.offset));  // -inf where there is none.
#pragma unroll
  for (int r = 0; r < Shape::R; ++r) {
    if (place.Row(r) >= task.rows) top[r] = 0;
    start[r] = {top[r], 1, 0};
    if (!task.softmax && task.offset > 0) {
      start[r].top = fmaxf(top[r], log_offset);
      start[r].added = Exp(log_offset - start[r].top);
    }
  }
  if (!task.softmax) return;
#pragma unroll
  for (int r = 0; r < Shape::R; ++r) {
    sum[r] = 0;
#pragma unroll
    for (int c = 0; c < Shape::C; ++c) {
      if (place.Col(c) < task.cols) sum[r] += Exp(Raised(K[r][c], task.floor32) - top[r]);
    }
  }
  ScatterRows<Shape>(sum);
#pragma unroll
  for (int k = 0; k < Shape::kOwn; ++k) {
    sum[k] = place.OwnRow(k) < task.rows ? terms.row.marginal[k] / (terms.row_scale * sum[k]) : 0.0f;
  }
  GatherRows<Shape>(sum);
#pragma unroll
  for (int r = 0; r < Shape::R; ++r) {
    start[r].scale = sum[r];
    start[r].added = static_cast<float>(task.offset);
  }
}

// K in place of W. False: beyond the kernel.
template <class Shape>
__device__ __forceinline__ bool Start(const Task& task, const Place<Shape>& place, const Terms<Shape::kOwn>& terms,
                                      float (&K)[Shape::R][Shape::C], float (&u)[Shape::R]) {
  RowStart start[Shape::R];
  StartRows<Shape>(task, place, terms, K, start);
  const bool plain = !task.softmax && task.offset == 0;
  float narrow = 0, smallest = 1, lowest_row = FLT_MAX, lowest_logit = FLT_MAX;
#pragma unroll
  for (int r = 0; r < Shape::R; ++r) {
    const bool row = place.Row(r) < task.rows;
    if (row) lowest_row = fminf(lowest_row, start[r].top);
#pragma unroll
    for (int c = 0; c < Shape::C; ++c) {
      const bool inside = row && place.Col(c) < task.cols;
      const float w = K[r][c], x = Raised(w, task.floor32) - start[r].top;
      K[r][c] = inside ? fmaf(start[r].scale, Exp(x), start[r].added) : 0.0f;
      if (inside) {
        lowest_logit = fminf(lowest_logit, w);
        narrow = fminf(narrow, x);
        smallest = fminf(smallest, K[r][c]);
      }
    }
    u[r] = 1;
    if (task.softmax) {
      u[r] = terms.row_scale;
    } else if (task.guard != Guard::kNone) {
      u[r] = expf(fminf(start[r].top, kGeneralRange)) * terms.col_scale;
    }
    if (!row) u[r] = 0;
  }
  const float range = kGeneralRange - terms.range;
  bool safe = terms.guards_fit && range > 0 && (plain ? narrow >= -range : smallest >= Exp(-range));
  if (task.guard != Guard::kNone && !task.softmax) safe = safe && lowest_row >= kLowestRow;
  // Here no derivative is cut off at the floor.
  if (task.unrolled) safe = safe && lowest_logit > task.floor32;
  return OverMatrix<Shape, Min>(safe ? 1.0f : 0.0f) > 0;
}

// From d log K to dW: through offset and softmax. W is read again.
template <class Shape>
__device__ __forceinline__ void ChainToLogits(const Task& task, const Place<Shape>& place,
                                              const Terms<Shape::kOwn>& terms, const float (&W)[Shape::R][Shape::C],
                                              float (&G)[Shape::R][Shape::C]) {
  RowStart start[Shape::R];
  StartRows<Shape>(task, place, terms, W, start);
  float total[Shape::R];
#pragma unroll
  for (int r = 0; r < Shape::R; ++r) {
    total[r] = 0;
#pragma unroll
    for (int c = 0; c < Shape::C; ++c) {
      const float e = start[r].scale * Exp(Raised(W[r][c], task.floor32) - start[r].top), entry = e + start[r].added;
      G[r][c] = entry > 0 ? G[r][c] * (e / entry) : 0.0f;
      if (place.Col(c) < task.cols) total[r] += G[r][c];
    }
  }
  if (!task.softmax) return;
  ScatterRows<Shape>(total);
#pragma unroll
  for (int k = 0; k < Shape::kOwn; ++k) {
    total[k] = place.OwnRow(k) < task.rows ? total[k] * terms.row_scale / terms.row.marginal[k] : 0.0f;
  }
  GatherRows<Shape>(total);
#pragma unroll
  for (int r = 0; r < Shape::R; ++r) {
#pragma unroll
    for (int c = 0; c < Shape::C; ++c) {
      const float e = start[r].scale * Exp(Raised(W[r][c], task.floor32) - start[r].top);
      G[r][c] -= e * total[r];
    }
  }
}

template <class Shape>
__device__ inline void LoadLogits(const Task& task, const Place<Shape>& place, int lane, int64_t first, int count,
                                  float* buffer, float (&W)[Shape::R][Shape::C]) {
  const int bin = task.has_dustbin ? 1 : 0;
  Stage<Shape>::Load(lane, task.logits, task.n - bin, task.m - bin, first, count, buffer);
  if (bin == 1) Stage<Shape>::FillBorder(lane, task.dustbin, task.n, task.m, first, count, buffer);
  __syncwarp();  // The logits are there.
  Stage<Shape>::Read(place, task.transposed, buffer, W);
  __syncwarp();  // The buffer is free.
}

template <class Shape, bool kBackward>
constexpr int kTilesBlocks = Shape::kLanes == 1 ? (kBackward ? 4 : 5) : (kBackward ? 2 : 4);

template <class Shape, bool kBackward>
__global__ void __launch_bounds__(kThreads, kTilesBlocks<Shape, kBackward>)
    TilesKernel(const __grid_constant__ LaunchOf launch) {
  constexpr int R = Shape::R, C = Shape::C, kOwn = Shape::kOwn;
  __shared__ Task task;
  // Forward: one for what goes out and one for what comes in meanwhile. Backward: the same for both.
  __shared__ __align__(16) float buffers[kWarps][kBackward ? 1 : 2][Shape::kBufferFloats];
  extern __shared__ __align__(16) float history_memory[];
  const int block = LoadTask(launch, &task);
  const int lane = threadIdx.x % 32;
  const Place<Shape> place(lane);
  float* const buffer = buffers[threadIdx.x / 32][0];
  float* const incoming = buffers[threadIdx.x / 32][kBackward ? 0 : 1];
  bool fetched = false;  // The logits of the members that come next are on their way.
  float* const memory =
      task.workspace == nullptr ? history_memory : reinterpret_cast<float*>(task.workspace + task.slot_bytes * block);
  LaneTally tally;

  ForMembers<Shape>(task, block, [&](int64_t first, int count) {
    History<kOwn> history(memory);
    const bool there = place.member < count;
    const int64_t member = first + min(place.member, count - 1);
    // 1. K, u_0 and v_0.
    float K[R][C], u[R], v[C], s[R], q[C];
    Terms<kOwn> terms;
    LoadTerms<Shape>(task, place, member, &terms);
    if (fetched) {
      asm volatile("cp.async.wait_all;" ::: "memory");
      __syncwarp();  // The logits are there.
      Stage<Shape>::Read(place, task.transposed, incoming, K);
      __syncwarp();  // The buffer is free.
    } else {
      LoadLogits<Shape>(task, place, lane, first, count, incoming, K);
    }
    if constexpr (!kBackward) {
      const int64_t next = first + MemberStep<Shape>(task), left = task.last - next;
      fetched = left > 0 && !task.has_dustbin &&
                Stage<Shape>::FetchRows(lane, task.logits, task.n, task.m, next,
                                        static_cast<int>(min(int64_t{Shape::kMembers}, left)), incoming);
    }
    const bool safe = Start<Shape>(task, place, terms, K, u);
#pragma unroll
    for (int c = 0; c < C; ++c) v[c] = place.Col(c) < task.cols ? 1 : 0;
    if constexpr (kBackward) history.Put(0, u, v);

    // 2. Iterations. The row sums that iteration t meets are those of the result of t - 1: where both errors are small
    // enough that result stands.
    int stopped = 0, last = task.iterations;
    float stopped_row_error = 0, stopped_col_error = 0, col_error = FLT_MAX;
#pragma unroll 1
    for (int t = 1; t <= task.iterations; ++t) {
      TimesRows<R, C>(K, v, s);
      ScatterRows<Shape>(s);
      if (task.tolerance32 > 0 && t > 1) {
        float sum = 0;
#pragma unroll
        for (int k = 0; k < kOwn; ++k) {
          sum += fabsf(u[k] * s[k] / terms.col_scale - terms.row.marginal[k] / terms.row_scale);
        }
        const float row_error = OverMatrix<Shape, Sum>(sum);
        if (stopped == 0 && row_error <= task.tolerance32 && col_error <= task.tolerance32) {
          stopped = t - 1;
          stopped_row_error = row_error;
          stopped_col_error = col_error;
        }
        if (__all_sync(kFullMask, stopped != 0 || !there || !safe)) {
          last = t - 1;
          break;
        }
      }
      if (!(task.softmax && t == 1)) {
#pragma unroll
        for (int k = 0; k < kOwn; ++k) {
          const float now = terms.row.Rescaled(k, s[k], u[k]);
          if (stopped == 0) u[k] = now;
        }
      }
      GatherRows<Shape>(u);
      TimesCols<R, C>(K, u, q);
      ScatterCols<Shape>(q);
#pragma unroll
      for (int k = 0; k < kOwn; ++k) {
        const float now = terms.col.Rescaled(k, q[k], v[k]);
        if (stopped == 0) v[k] = now;
      }
      if constexpr (kBackward) history.Put(t, u, v);
      if (task.tolerance32 > 0) {
        float sum = 0;
#pragma unroll
        for (int k = 0; k < kOwn; ++k) sum += fabsf(v[k] * q[k] - terms.col.marginal[k]);
        col_error = OverMatrix<Shape, Sum>(sum) / terms.col_scale;
      }
      GatherCols<Shape>(v);
    }

    // 3. P and its sums.
    const float unscale = 1 / terms.col_scale;
    TimesRows<R, C>(K, v, s);
    ScatterRows<Shape>(s);
    TimesCols<R, C>(K, u, q);
    ScatterCols<Shape>(q);
    float row_marginal[kOwn], col_marginal[kOwn];
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      s[k] *= u[k] * unscale;
      q[k] *= v[k] * unscale;
      row_marginal[k] = terms.row.marginal[k] / terms.row_scale;
      col_marginal[k] = terms.col.marginal[k] * unscale;
    }
    float row_error = ErrorL1<Shape>(s, row_marginal), last_col_error = ErrorL1<Shape>(q, col_marginal);
    const bool good = safe && row_error + last_col_error < FLT_MAX;
    if (stopped != 0) {
      row_error = stopped_row_error;
      last_col_error = stopped_col_error;
    }
    StoreRedo<Shape>(task, place, first, there && !good, lane);
    if (there && !good) tally.flags |= Tally::kRedo;
    if (there && good) {
      Certify<Shape>(task, place, member, row_error, last_col_error, stopped != 0 ? stopped : task.iterations, &tally);
    }
    StoreSums<Shape>(task, place, lane, first, count, s, q, buffer);
    if (task.plan.data != nullptr || task.plan_copy.data != nullptr) {
      float plan[R][C];
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int c = 0; c < C; ++c) plan[r][c] = K[r][c] * (u[r] * unscale) * v[c];
      }
      Stage<Shape>::Write(place, task.transposed, plan, buffer);
      __syncwarp();  // P is there.
      if (task.plan.data != nullptr) Stage<Shape>::Store(lane, task.plan, task.n, task.m, first, count, buffer);
      if (task.plan_copy.data != nullptr)
        Stage<Shape>::Store(lane, task.plan_copy, task.n, task.m, first, count, buffer);
      __syncwarp();  // The buffer is free.
    }
    if constexpr (kBackward) {
      // 4. The adjoints of the last step. G: those of log K, but for the factor K.
      float G[R][C], row_bar[R], col_bar[C], v_now[kOwn];
      Stage<Shape>::Load(lane, task.cotangent, task.n, task.m, first, count, buffer);
      __syncwarp();  // dL/dP is there.
      Stage<Shape>::Read(place, task.transposed, buffer, G);
      __syncwarp();  // The buffer is free.
#pragma unroll
      for (int r = 0; r < R; ++r) {
        row_bar[r] = 0;
#pragma unroll
        for (int c = 0; c < C; ++c) {
          const bool inside = place.Row(r) < task.rows && place.Col(c) < task.cols;
          G[r][c] = inside ? G[r][c] * (u[r] * unscale) * v[c] : 0.0f;
          const float bar = G[r][c] * K[r][c];
          row_bar[r] += bar;
          col_bar[c] = r == 0 ? bar : col_bar[c] + bar;
        }
      }
      ScatterRows<Shape>(row_bar);
      ScatterCols<Shape>(col_bar);
#pragma unroll
      for (int k = 0; k < kOwn; ++k) v_now[k] = v[k];

        // 5. The iterations backward; those that a member did not do pass by.
#pragma unroll 1
      for (int t = last; t >= 1; --t) {
        const bool idle = stopped != 0 && stopped < t;
        float x[R], y[C], u_now[kOwn], u_old[kOwn];
        history.GetU(t, u_now);
        history.GetU(t - 1, u_old);
        history.GetV(t - 1, v);
#pragma unroll
        for (int k = 0; k < kOwn; ++k) {
          float bar = col_bar[k];
          const float multiplier = terms.col.Unscaled(k, v[k], v_now[k], &bar);
          y[k] = idle ? 0.0f : multiplier;
          if (!idle) col_bar[k] = bar;
          u[k] = u_now[k];
        }
        GatherCols<Shape>(y);
        GatherRows<Shape>(u);
        TimesRows<R, C>(K, y, s);
        ScatterRows<Shape>(s);
#pragma unroll
        for (int k = 0; k < kOwn; ++k) {
          float bar = row_bar[k] - u_now[k] * s[k];
          const float multiplier = terms.row.Unscaled(k, u_old[k], u_now[k], &bar);
          x[k] = idle || (task.softmax && t == 1) ? 0.0f : multiplier;
          if (!idle) row_bar[k] = bar;
          v_now[k] = v[k];
        }
        GatherRows<Shape>(x);
        GatherCols<Shape>(v);
        TimesCols<R, C>(K, x, q);
        ScatterCols<Shape>(q);
#pragma unroll
        for (int k = 0; k < kOwn; ++k) col_bar[k] -= v_now[k] * q[k];
#pragma unroll
        for (int r = 0; r < R; ++r) {
#pragma unroll
          for (int c = 0; c < C; ++c) G[r][c] = fmaf(-u[r], y[c], fmaf(-x[r], v[c], G[r][c]));
        }
      }

      // 6. The gradient.
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int c = 0; c < C; ++c) G[r][c] *= K[r][c];
      }
      if (task.softmax || task.offset > 0) {
        LoadLogits<Shape>(task, place, lane, first, count, buffer, K);
        ChainToLogits<Shape>(task, place, terms, K, G);
      }
      float infinite = 0, border = 0;
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int c = 0; c < C; ++c) {
          const int i = place.Row(r), j = place.Col(c);
          if (i >= task.rows || j >= task.cols) continue;
          infinite = fmaf(G[r][c], 0.0f, infinite);
          if (i == task.rows - 1 || j == task.cols - 1) border += G[r][c];
        }
      }
      if (there && good && !(infinite == 0)) tally.flags |= Tally::kNotFinite;
      border = OverMatrix<Shape, Sum>(border);
      const int bin = task.has_dustbin ? 1 : 0;
      if (bin == 1 && there && place.first() && task.dustbin_gradient.data != nullptr) {
        StoreAs(task.dustbin_gradient.dtype, task.dustbin_gradient.data, member, border);
      }
      Stage<Shape>::Write(place, task.transposed, G, buffer);
      __syncwarp();  // The gradient is there.
      Stage<Shape>::Store(lane, task.gradient, task.n - bin, task.m - bin, first, count, buffer);
      __syncwarp();  // The buffer is free.
    }
  });
  StoreTally(task, block, tally);
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_TILES_CUH_
