// The general kernel's forward steps and their reverse: potentials log u, log v and log-sum-exps in float64.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_STEPS_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_STEPS_CUH_

#include "kernels/cuda/normalization_general.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

__device__ inline double LogAddExp(double a, double b) { return fmax(a, b) + log1p(exp(-fabs(a - b))); }

// NaN stays.
__device__ inline double Raised(double w, double floor) { return w < floor ? floor : w; }

// A member on its way. Vectors are the kernel's rows' and columns'.
struct Member {
  const Task& task;
  const Io io;
  const GeneralMemory memory;
  Block& block;
  Progress* const progress;          // In shared memory.
  const unsigned long long left_at;  // Nanoseconds.
  General result;

  // Between iterations, all threads: whether time is up.
  __device__ bool MustLeave() const { return block.Any(block.thread == 0 && GlobalNanoseconds() > left_at); }
  __device__ double* Row(int k) const { return memory.row + int64_t{k} * (task.rows + task.cols); }
  __device__ double* Col(int k) const { return memory.col + int64_t{k} * (task.rows + task.cols); }
  __device__ double* U(int t) const { return memory.u + int64_t{task.unrolled ? t : t & 1} * task.rows; }
  __device__ double* V(int t) const { return memory.v + int64_t{task.unrolled ? t : t & 1} * task.cols; }
  // UNROLLED: of half step t.
  __device__ double* RowSums(int t) const { return memory.row_sums + int64_t{t} * task.rows; }
  __device__ double* ColSums(int t) const { return memory.col_sums + int64_t{t} * task.cols; }
  __device__ int64_t At(int i, int j) const { return int64_t{i} * task.cols + j; }
};
enum { kMarginal, kSum, kMultiplier };  // Vectors of each side.

// ---- Marginals ------------------------------------------------------------------------------------------------------
__device__ inline void LoadMarginals(Member* m) {
  const Task& task = m->task;
  Block& block = m->block;
  const int bin = task.has_dustbin ? 1 : 0;
  double* side[] = {m->Row(kMarginal), m->Col(kMarginal)};
  const int size[] = {task.rows - bin, task.cols - bin};
  double total[2];
  // P's rows first: EXACT's columns share their total.
  const int first = task.transposed ? 1 : 0;
  double absent = 1;
  for (int k = 0; k < 2; ++k) {
    const int s = first ^ k;
    block.ForEach(size[s], [&](int64_t i) { side[s][i] = m->io.Marginal(s == 0, static_cast<int>(i), absent); });
    total[s] = block.SumOf(size[s], [&](int64_t i) { return side[s][i]; });
    if (task.exact) absent = total[s] / size[1 - s];
  }
  if (bin == 1 && block.thread == 0) {
    side[0][size[0]] = total[1];
    side[1][size[1]] = total[0];
  }
  block.Sync();
}

// ---- Start: log of the matrix before the first division -------------------------------------------------------------
__device__ inline void StartMatrix(Member* m) {
  const Task& task = m->task;
  Block& block = m->block;
  const double log_offset = log(task.offset);
  for (int i = block.warp; i < task.rows; i += block.warps) {
    const auto raised = [&](int, int j) { return Raised(m->io.Logit(i, j), task.floor); };
    const double shift = task.softmax ? log(m->Row(kMarginal)[i]) - block.RowLogSum(i, task.cols, raised) : 0.0;
    for (int j = block.lane; j < task.cols; j += 32) {
      const double start = raised(i, j) + shift;
      m->memory.a[m->At(i, j)] = task.offset > 0 ? LogAddExp(start, log_offset) : start;
    }
  }
  block.ForEach(task.rows, [&](int64_t i) { m->U(0)[i] = 0; });
  block.ForEach(task.cols, [&](int64_t j) { m->V(0)[j] = 0; });
}

// ---- Iterations -----------------------------------------------------------------------------------------------------
// The potential after a division: old + log marginal - log h(e^(old + sum)).
__device__ inline double Shifted(const Task& task, double log_sum, double old, double marginal) {
  switch (task.guard) {
    case Guard::kNone:
      return log(marginal) - log_sum;
    case Guard::kMax:
      return old + log(marginal) - fmax(old + log_sum, log(task.guard_value));
    case Guard::kAdd:
      return old + log(marginal) - LogAddExp(old + log_sum, log(task.guard_value));
  }
  return log_sum;
}

__device__ inline void RowStep(Member* m, int t) {
  const Task& task = m->task;
  const double* gamma = m->V(t - 1);
  const double* a = m->memory.a;
  if (task.softmax && t == 1) {  // The softmax was the first one.
    m->block.ForEach(task.rows, [&](int64_t i) { m->U(t)[i] = m->U(t - 1)[i]; });
    return;
  }
  m->block.RowLogSums(
      task.rows, task.cols, [&](int i, int j) { return a[m->At(i, j)] + gamma[j]; },
      [&](int i, double log_sum) {
        if (m->block.lane != 0) return;
        const double old = m->U(t - 1)[i];
        m->U(t)[i] = Shifted(task, log_sum, old, m->Row(kMarginal)[i]);
        m->Row(kSum)[i] = old + log_sum;
        if (task.unrolled) m->RowSums(t)[i] = log_sum;
      });
}
// Stores |column sum - marginal| in Col(kSum).
__device__ inline void ColumnStep(Member* m, int t) {
  const Task& task = m->task;
  const double* phi = m->U(t);
  const double* a = m->memory.a;
  m->block.ColumnLogSums(
      task.rows, task.cols, [&](int i, int j) { return a[m->At(i, j)] + phi[i]; },
      [&](int j, double log_sum) {
        const double marginal = m->Col(kMarginal)[j];
        const double gamma = Shifted(task, log_sum, m->V(t - 1)[j], marginal);
        m->V(t)[j] = gamma;
        if (task.unrolled) m->ColSums(t)[j] = log_sum;
        m->Col(kSum)[j] = fabs(exp(gamma + log_sum) - marginal);
      });
}

// The row sums that iteration t meets are those of the result of t - 1: where both errors are small enough that result
// stands. False: it has left.
__device__ inline bool Iterate(Member* m) {
  const Task& task = m->task;
  const Progress from = *m->progress;
  double col_error = from.started ? from.error : DBL_MAX;
  m->result.iterations = task.iterations;
  for (int t = from.started ? from.t : 1; t <= task.iterations; ++t) {
    RowStep(m, t);
    if (task.tolerance > 0 && t > 1) {
      const double row_error =
          m->block.SumOf(task.rows, [&](int64_t i) { return fabs(exp(m->Row(kSum)[i]) - m->Row(kMarginal)[i]); });
      if (row_error <= task.tolerance && col_error <= task.tolerance) {
        m->result.iterations = t - 1;
        m->result.row_error = row_error;
        m->result.col_error = col_error;
        m->result.converged = true;
        m->result.reason = StopReason::kTolerance;
        return true;
      }
    }
    ColumnStep(m, t);
    if (task.tolerance > 0) col_error = m->block.SumOf(task.cols, [&](int64_t j) { return m->Col(kSum)[j]; });
    if (t == task.iterations || !m->MustLeave()) continue;
    if (threadIdx.x == 0) *m->progress = {from.member, true, false, t + 1, 0, col_error, 0};
    return false;
  }
  return true;
}

// ---- P, its sums and errors -----------------------------------------------------------------------------------------
// P is in m->memory.plan. Sums to Row(kSum), Col(kSum) and the outputs.
__device__ inline void SumPlan(Member* m, double* row_error, double* col_error) {
  const Task& task = m->task;
  Block& block = m->block;
  const double* plan = m->memory.plan;
  block.Rows(
      task.rows, task.cols, [&](int i, int j) { return plan[m->At(i, j)]; },
      [&](int i, double sum) {
        if (block.lane != 0) return;
        m->Row(kSum)[i] = sum;
        m->io.StoreSum(true, i, sum);
      });
  block.Columns(
      task.rows, task.cols, [&](int i, int j) { return plan[m->At(i, j)]; },
      [&](int j, double sum) {
        m->Col(kSum)[j] = sum;
        m->io.StoreSum(false, j, sum);
      });
  *row_error = block.SumOf(task.rows, [&](int64_t i) { return fabs(m->Row(kSum)[i] - m->Row(kMarginal)[i]); });
  *col_error = block.SumOf(task.cols, [&](int64_t j) { return fabs(m->Col(kSum)[j] - m->Col(kMarginal)[j]); });
}

__device__ inline void FinishForward(Member* m) {
  const Task& task = m->task;
  Block& block = m->block;
  const double *phi = m->U(m->result.iterations), *gamma = m->V(m->result.iterations);
  for (int i = block.warp; i < task.rows; i += block.warps) {
    for (int j = block.lane; j < task.cols; j += 32) {
      const double p = exp(m->memory.a[m->At(i, j)] + phi[i] + gamma[j]);
      m->memory.plan[m->At(i, j)] = p;
      m->io.StorePlan(i, j, p);
    }
  }
  block.Sync();  // P is there.
  double row_error, col_error;
  SumPlan(m, &row_error, &col_error);
  if (!(row_error + col_error < DBL_MAX)) m->result.finite = false;
  if (m->result.reason == StopReason::kTolerance) return;  // The errors that stopped it differ from these by rounding.
  m->result.row_error = row_error;
  m->result.col_error = col_error;
  m->result.converged = fmax(row_error, col_error) <= task.tolerance;
  if (m->result.converged && task.tolerance > 0) m->result.reason = StopReason::kTolerance;
}

// ---- The reverse of the steps ---------------------------------------------------------------------------------------
// d log h / d log sum of a division whose potential was `old` and whose log-sum-exp `log_sum` without it.
__device__ inline double Slope(const Task& task, double log_sum, double old) {
  const double log_guard = log(task.guard_value);
  switch (task.guard) {
    case Guard::kNone:
      return 1;
    case Guard::kMax:
      return old + log_sum > log_guard ? 1 : 0;
    case Guard::kAdd:
      return exp(old + log_sum - LogAddExp(old + log_sum, log_guard));
  }
  return 1;
}

// From dL/dP in m->memory.bar to dL/d log of the start matrix. A line's adjoints lose their total, times the slope, in
// the shares that its entries have of the line's sum. Those are taken from the sum that the division met: the share of
// a line's only entry is 1 to the last bit, and nothing is left where nothing should be.
__device__ inline void ReverseSteps(Member* m) {
  const Task& task = m->task;
  Block& block = m->block;
  const double* a = m->memory.a;
  double *bar = m->memory.bar, *x = m->Row(kMultiplier), *y = m->Col(kMultiplier);
  const int last = m->result.iterations;
  for (int i = block.warp; i < task.rows; i += block.warps) {
    for (int j = block.lane; j < task.cols; j += 32) {
      bar[m->At(i, j)] = m->io.Cotangent(i, j) * m->memory.plan[m->At(i, j)];
    }
  }
  block.Sync();  // The adjoints are there.
  const auto column_multiplier = [&](int t, int j, double total) {
    y[j] = total * Slope(task, m->ColSums(t)[j], m->V(t - 1)[j]);
  };
  block.Columns(
      task.rows, task.cols, [&](int i, int j) { return bar[m->At(i, j)]; },
      [&](int j, double total) { column_multiplier(last, j, total); });
  for (int t = last; t >= 1; --t) {
    const bool skip = task.softmax && t == 1;  // The softmax was the first row step.
    const double *phi = m->U(t), *gamma = m->V(t - 1), *row_sums = m->RowSums(t), *col_sums = m->ColSums(t);
    block.Rows(
        task.rows, task.cols,
        [&](int i, int j) { return bar[m->At(i, j)] -= exp(a[m->At(i, j)] + phi[i] - col_sums[j]) * y[j]; },
        [&](int i, double total) {
          if (block.lane == 0) x[i] = skip ? 0 : total * Slope(task, row_sums[i], m->U(t - 1)[i]);
        });
    if (skip) break;
    block.Columns(
        task.rows, task.cols,
        [&](int i, int j) { return bar[m->At(i, j)] -= exp(a[m->At(i, j)] + gamma[j] - row_sums[i]) * x[i]; },
        [&](int j, double total) {
          if (t > 1) column_multiplier(t - 1, j, total);
        });
  }
}

// ---- From log of the start matrix to the logits: offset, softmax, floor; and out ------------------------------------
__device__ inline void FinishGradient(Member* m) {
  const Task& task = m->task;
  Block& block = m->block;
  double infinite = 0, border = 0;
  for (int i = block.warp; i < task.rows; i += block.warps) {
    double* g = m->memory.bar + m->At(i, 0);
    double log_sum = 0, total = 0;
    if (task.softmax) {
      const auto raised = [&](int, int j) { return Raised(m->io.Logit(i, j), task.floor); };
      log_sum = block.RowLogSum(i, task.cols, raised);
      for (int j = block.lane; j < task.cols; j += 32) {
        if (task.offset > 0) g[j] /= 1 + task.offset / (exp(raised(i, j) - log_sum) * m->Row(kMarginal)[i]);
        total += g[j];
      }
      total = Block::WarpSum(total);
    }
    for (int j = block.lane; j < task.cols; j += 32) {
      double gradient = g[j];
      if (task.forward) {
        const double logit = m->io.Logit(i, j), raised = Raised(logit, task.floor);
        if (task.softmax) {
          gradient -= exp(raised - log_sum) * total;
        } else if (task.offset > 0) {
          gradient /= 1 + task.offset / exp(raised);
        }
        if (logit <= task.floor) gradient = 0;
      }
      infinite = fma(gradient, 0.0, infinite);
      border += m->io.StoreGradient(i, j, gradient);
    }
  }
  infinite = block.Sum(infinite);
  border = block.Sum(border);
  if (!(infinite == 0)) m->result.finite = false;
  if (task.has_dustbin && block.thread == 0) m->io.StoreDustbinGradient(border);
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_STEPS_CUH_
