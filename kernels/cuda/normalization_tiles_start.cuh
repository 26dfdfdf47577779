// Marginals, guards and start of the registers kernels: from logits to K, and from d log K back to the logits.
//
// In the linear domain u and v are only free of drift if both sides have the same total, and P's scale matters to the
// guards alone. So the marginals are scaled to the total `rows`: after a row step the kernel's P is row_scale times the
// true one, after a column step col_scale times. All guards are one: u <- u r / max(u s + add, most), with add = 0
// where there is none, and `most` the smallest number where there is none: padding, whose sums are 0, ends as 0.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_TILES_START_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_TILES_START_CUH_

#include "kernels/cuda/normalization_registers.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

// A side's division: what a lane owns of it.
template <int kOwn>
struct Side {
  float marginal[kOwn];  // Scaled; padding: 0.
  float add, most;       // The guard.

  __device__ float Rescaled(int k, float s, float old) const {
    return marginal[k] * old * Reciprocal(fmaxf(fmaf(old, s, add), most));
  }
  __device__ float Unscaled(int k, float old, float now, float* bar) const {
    return normalization::Unscaled(old, now, marginal[k], add, most, bar);
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

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_TILES_START_CUH_
