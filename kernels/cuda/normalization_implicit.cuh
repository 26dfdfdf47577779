// The general kernel's linear systems: the implicit backward modes, and the Newton steps of EXACT.
//
//   reduced  (diag(c) - P^T diag(1/r) P) beta = s_c - P^T diag(1/r) s_r,  alpha = (s_r - P beta) / r;
//            r, c: P's sums (IMPLICIT) or 1 (IMPLICIT_UNIT);  s_r, s_c: the sums of P * dP
//   full     [I P; P^T I] [alpha; beta] = [s_r; s_c]  (IMPLICIT_FULL)
//   then     dL/d log K = (dP - alpha_i - beta_j) P
//
// By conjugate gradients, the null vector projected out: (1) and (1, -1).
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_IMPLICIT_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_IMPLICIT_CUH_

#include "kernels/cuda/normalization_steps.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

constexpr double kImplicitTolerance = 1e-14;
constexpr double kNothing = 1e-290;  // Sums below have no reciprocal.

// (diag(d) - P^T diag(1/r) P) x = b, preconditioned by diag(d), x orthogonal to the constant. P is [n, m], plan(i, j)
// its entries, inverse its 1/r. Memory: x, residual, p, q [m] and t [n].
template <class Plan>
__device__ void SolveReduced(Block& block, int n, int m, Plan plan, const double* inverse, const double* diagonal,
                             const double* b, double tolerance, double* x, double* residual, double* p, double* q,
                             double* t) {
  const auto inverted = [&](int64_t k) { return diagonal[k] > kNothing ? 1 / diagonal[k] : 0.0; };
  const double inverse_sum = 1 / block.SumOf(m, [&](int64_t k) { return diagonal[k]; });
  const auto project = [&](double* y) {
    const double share = block.SumOf(m, [&](int64_t k) { return y[k]; }) * inverse_sum;
    block.ForEach(m, [&](int64_t k) { y[k] -= share * diagonal[k]; });
  };
  const auto norm_of = [&] {
    return block.SumOf(m, [&](int64_t k) { return residual[k] * residual[k] * inverted(k); });
  };
  block.ForEach(m, [&](int64_t k) {
    residual[k] = b[k];
    x[k] = 0;
  });
  project(residual);
  double norm = norm_of();
  const double goal = norm * tolerance * tolerance;
  block.ForEach(m, [&](int64_t k) { p[k] = residual[k] * inverted(k); });
  for (int steps = 0; steps < 2 * m + 10 && norm > goal; ++steps) {
    block.Rows(
        n, m, [&](int i, int j) { return plan(i, j) * p[j]; }, [&](int i, double sum) { t[i] = sum * inverse[i]; });
    block.Columns(
        n, m, [&](int i, int j) { return plan(i, j) * t[i]; },
        [&](int j, double sum) { q[j] = diagonal[j] * p[j] - sum; });
    project(q);
    const double curvature = block.SumOf(m, [&](int64_t k) { return p[k] * q[k]; });
    if (curvature == 0) break;  // A direction that the matrix does not see.
    const double step = norm / curvature;
    block.ForEach(m, [&](int64_t k) {
      x[k] += step * p[k];
      residual[k] -= step * q[k];
    });
    const double next = norm_of(), turn = next / norm;
    norm = next;
    block.ForEach(m, [&](int64_t k) { p[k] = residual[k] * inverted(k) + turn * p[k]; });
  }
}

// [I P; P^T I] [alpha; beta] = b, orthogonal to (1, -1). Memory: x, residual, p, q [n + m]; b is in residual.
template <class Plan>
__device__ void SolveFull(Block& block, int n, int m, Plan plan, double* x, double* residual, double* p, double* q) {
  const int size = n + m;
  const auto project = [&](double* y) {
    const double share = block.SumOf(size, [&](int64_t k) { return k < n ? y[k] : -y[k]; }) / size;
    block.ForEach(size, [&](int64_t k) { y[k] -= k < n ? share : -share; });
  };
  project(residual);
  block.ForEach(size, [&](int64_t k) {
    p[k] = residual[k];
    x[k] = 0;
  });
  double norm = block.SumOf(size, [&](int64_t k) { return residual[k] * residual[k]; });
  const double goal = norm * kImplicitTolerance * kImplicitTolerance;
  for (int steps = 0; steps < 2 * size + 10 && norm > goal; ++steps) {
    block.Rows(
        n, m, [&](int i, int j) { return plan(i, j) * p[n + j]; }, [&](int i, double sum) { q[i] = p[i] + sum; });
    block.Columns(
        n, m, [&](int i, int j) { return plan(i, j) * p[i]; }, [&](int j, double sum) { q[n + j] = p[n + j] + sum; });
    project(q);
    const double curvature = block.SumOf(size, [&](int64_t k) { return p[k] * q[k]; });
    if (curvature == 0) break;
    const double step = norm / curvature;
    block.ForEach(size, [&](int64_t k) {
      x[k] += step * p[k];
      residual[k] -= step * q[k];
    });
    const double next = block.SumOf(size, [&](int64_t k) { return residual[k] * residual[k]; });
    const double turn = next / norm;
    norm = next;
    block.ForEach(size, [&](int64_t k) { p[k] = residual[k] + turn * p[k]; });
  }
}

// From dL/dP to dL/d log of the start matrix, both in m->memory.bar; P is in m->memory.plan.
__device__ inline void ReverseImplicit(Member* m) {
  const Task& task = m->task;
  Block& block = m->block;
  const bool full = task.backward == BackwardMode::kImplicitFull;
  const bool unit = full || task.backward == BackwardMode::kImplicitUnit;
  const int64_t row_step = task.transposed ? 1 : task.cols, col_step = task.transposed ? task.cols : 1;
  const auto plan = [&](int i, int j) { return m->memory.plan[i * row_step + j * col_step]; };  // P's own orientation.
  double* bar = m->memory.bar;
  const auto cotangent = [&](int i, int j) { return bar[i * row_step + j * col_step]; };
  double *side = m->Row(1), *inverse = m->Row(2), *t = m->Row(3), *right = m->Row(4), *diagonal = m->Row(5);
  double *x = m->Col(1), *residual = m->Col(2), *p = m->Col(3), *q = m->Col(4);

  for (int i = block.warp; i < task.rows; i += block.warps) {
    for (int j = block.lane; j < task.cols; j += 32) bar[m->At(i, j)] = m->io.Cotangent(i, j);
  }
  __syncthreads();  // The cotangent is there.
  block.Rows(task.n, task.m, plan, [&](int i, double sum) {
    inverse[i] = unit ? 1.0 : sum > kNothing ? 1 / sum : 0.0;
  });
  block.Rows(
      task.n, task.m, [&](int i, int j) { return plan(i, j) * cotangent(i, j); },
      [&](int i, double sum) { side[i] = sum; });
  block.Columns(task.n, task.m, plan, [&](int j, double sum) { diagonal[j] = unit ? 1.0 : sum; });
  block.Columns(
      task.n, task.m,
      [&](int i, int j) { return (cotangent(i, j) - (full ? 0.0 : side[i] * inverse[i])) * plan(i, j); },
      [&](int j, double sum) { right[j] = sum; });
  const double* beta = x;
  double* alpha = t;
  if (full) {
    block.ForEach(task.n + task.m, [&](int64_t k) { residual[k] = k < task.n ? side[k] : right[k - task.n]; });
    SolveFull(block, task.n, task.m, plan, x, residual, p, q);
    alpha = x;
    beta = x + task.n;
  } else {
    SolveReduced(block, task.n, task.m, plan, inverse, diagonal, right, kImplicitTolerance, x, residual, p, q, t);
    block.Rows(
        task.n, task.m, [&](int i, int j) { return plan(i, j) * beta[j]; },
        [&](int i, double sum) { alpha[i] = (side[i] - sum) * inverse[i]; });
  }
  for (int i = block.warp; i < task.rows; i += block.warps) {
    for (int j = block.lane; j < task.cols; j += 32) {
      const int64_t at = m->At(i, j);
      const int n = task.transposed ? j : i, k = task.transposed ? i : j;
      bar[at] = (bar[at] - alpha[n] - beta[k]) * m->memory.plan[at];
    }
  }
  __syncthreads();  // The gradient is there.
}

// A plan that was given: to m->memory.plan, its sums and errors.
__device__ inline void TakeGivenPlan(Member* m) {
  const Task& task = m->task;
  Block& block = m->block;
  for (int i = block.warp; i < task.rows; i += block.warps) {
    for (int j = block.lane; j < task.cols; j += 32) m->memory.plan[m->At(i, j)] = m->io.Given(i, j);
  }
  __syncthreads();  // P is there.
  SumPlan(m, &m->result.row_error, &m->result.col_error);
  m->result.converged = fmax(m->result.row_error, m->result.col_error) <= task.tolerance;
  m->result.reason = StopReason::kNotIterated;
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_IMPLICIT_CUH_
