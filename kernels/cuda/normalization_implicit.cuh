// The general kernel's linear systems: the implicit backward modes, and the Newton steps of EXACT.
//
//   reduced  (diag(c) - P^T diag(1/r) P) beta = s_c - P^T diag(1/r) s_r,  alpha = (s_r - P beta) / r;
//            r, c: P's sums (IMPLICIT) or 1 (IMPLICIT_UNIT);  s_r, s_c: the sums of P * dP
//   full     [I P; P^T I] [alpha; beta] = [s_r; s_c]  (IMPLICIT_FULL)
//   then     dL/d log K = (dP - alpha_i - beta_j) P
//
// The null vector projected out: (1) and (1, -1). Where P's sums are not 1, IMPLICIT_UNIT's and IMPLICIT_FULL's are not
// definite.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_IMPLICIT_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_IMPLICIT_CUH_

#include <type_traits>

#include "kernels/cuda/normalization_steps.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

constexpr double kImplicitTolerance = 1e-14;
constexpr double kLeastCurvature = 1e-14;  // What is below is rounding.
constexpr int kRounds = 2;                 // Of minimal residuals: the second for what rounding left of the first.
constexpr double kUnseen = 1e-12;          // Parts of its norm below are nothing that a solution can rest on.
constexpr double kNothing = 1e-290;        // Sums below have no reciprocal.

// What SolveSymmetric works with, [size] each; the second row where the system may be indefinite.
struct SolverMemory {
  double *x, *residual, *p, *q;
  double *v = nullptr, *old_v = nullptr, *old_w = nullptr;
};

// A x = b for a symmetric A by conjugate gradients, preconditioned by what inverted(k) gives. right(): b to the
// residual. apply(p, q): q = A p. Curvatures (p, A p) of up to least_curvature (p, p / inverted) are taken for 0.
// Unless kDefinite (positive semidefinite), a matrix that is found not to be is begun again with minimal residuals, as
// in kernels/cpu/normalization_symmetric-inl.h, where `inverted` must be 1.
template <bool kDefinite, class Inverted, class Right, class Apply>
__device__ void SolveSymmetric(Block& block, int size, int most_steps, double tolerance, double least_curvature,
                               Inverted inverted, Right right, Apply apply, SolverMemory m) {
  const auto dot = [&](const double* a, const double* b) {
    return block.SumOf(size, [&](int64_t k) { return a[k] * b[k]; });
  };
  const auto norm_of = [&] {
    return block.SumOf(size, [&](int64_t k) { return m.residual[k] * m.residual[k] * inverted(k); });
  };
  right();
  double norm = norm_of(), spread = norm;  // spread: (p, p / inverted)
  const double goal = norm * tolerance * tolerance;
  block.ForEach(size, [&](int64_t k) {
    m.x[k] = 0;
    m.p[k] = m.residual[k] * inverted(k);
  });
  bool definite = true;
  for (int steps = 0; steps < most_steps && norm > goal; ++steps) {
    apply(m.p, m.q);
    const double curvature = dot(m.p, m.q);
    const bool seen = fabs(curvature) > least_curvature * spread;
    definite = kDefinite || (seen && curvature > 0);
    if (!seen || !definite) break;
    const double step = norm / curvature;
    block.ForEach(size, [&](int64_t k) {
      m.x[k] += step * m.p[k];
      m.residual[k] -= step * m.q[k];
    });
    const double next = norm_of(), turn = next / norm;
    norm = next;
    spread = next + turn * turn * spread;
    block.ForEach(size, [&](int64_t k) { m.p[k] = m.residual[k] * inverted(k) + turn * m.p[k]; });
  }
  if constexpr (kDefinite) return;
  if (definite) return;

  // Names as there.
  const auto exchange = [](double*& a, double*& b) {
    double* const c = a;
    a = b;
    b = c;
  };
  double largest = 0;
  block.ForEach(size, [&](int64_t k) { m.x[k] = 0; });
  for (int round = 0; round < kRounds; ++round) {
    apply(m.x, m.q);
    right();
    block.ForEach(size, [&](int64_t k) { m.residual[k] -= m.q[k]; });
    norm = dot(m.residual, m.residual);
    double length = sqrt(norm), cosine = -1, sine = 0, beta = 0, bar = 0, above = 0;
    block.ForEach(size, [&](int64_t k) {
      m.old_v[k] = m.p[k] = m.old_w[k] = 0;
      m.v[k] = m.residual[k] / length;
    });
    for (int steps = 0; steps < 2 * most_steps && norm > goal; ++steps) {
      apply(m.v, m.q);
      block.ForEach(size, [&](int64_t k) { m.q[k] -= beta * m.old_v[k]; });
      const double alpha = dot(m.v, m.q);
      block.ForEach(size, [&](int64_t k) { m.q[k] -= alpha * m.v[k]; });
      const double next_square = dot(m.q, m.q), next = sqrt(next_square);
      const double delta = cosine * bar + sine * alpha, gamma_bar = sine * bar - cosine * alpha;
      const double gamma_square = gamma_bar * gamma_bar + next_square;
      largest = fmax(largest, beta * beta + alpha * alpha + next_square);
      if (!(gamma_square > kUnseen * kUnseen * largest)) break;
      const double inverse = 1 / sqrt(gamma_square);
      const double step = gamma_bar * inverse * length, scale = next > 0 ? 1 / next : 0;
      block.ForEach(size, [&](int64_t k) {
        m.old_w[k] = inverse * (m.v[k] - above * m.old_w[k] - delta * m.p[k]);
        m.x[k] += step * m.old_w[k];
        m.old_v[k] = scale * m.q[k];
      });
      exchange(m.v, m.old_v);
      exchange(m.p, m.old_w);
      beta = next;
      above = sine * next;
      bar = -cosine * next;
      cosine = gamma_bar * inverse;
      sine = next * inverse;
      length *= sine;
      norm = length * length;
    }
  }
}

// (diag(d) - P^T diag(1/r) P) x = b, preconditioned by diag(d), x orthogonal to the constant. P is [n, m], plan(i, j)
// its entries, inverse its 1/r. Memory: t [n], and of size m.
template <bool kDefinite, class Plan>
__device__ void SolveReduced(Block& block, int n, int m, Plan plan, const double* inverse, const double* diagonal,
                             const double* b, double tolerance, double least_curvature, double* t,
                             const SolverMemory& memory) {
  const auto inverted = [&](int64_t k) { return diagonal[k] > kNothing ? 1 / diagonal[k] : 0.0; };
  const double inverse_sum = 1 / block.SumOf(m, [&](int64_t k) { return diagonal[k]; });
  // Twice where the constant's image is not 0: what is left of it at first may be more than all the rest.
  const auto project = [&](double* y) {
    for (int pass = 0; pass < (kDefinite ? 1 : 2); ++pass) {
      const double share = block.SumOf(m, [&](int64_t k) { return y[k]; }) * inverse_sum;
      block.ForEach(m, [&](int64_t k) { y[k] -= share * diagonal[k]; });
    }
  };
  const auto right = [&] {
    block.ForEach(m, [&](int64_t k) { memory.residual[k] = b[k]; });
    project(memory.residual);
  };
  const auto apply = [&](const double* p, double* q) {
    block.Rows(
        n, m, [&](int i, int j) { return plan(i, j) * p[j]; }, [&](int i, double sum) { t[i] = sum * inverse[i]; });
    block.Columns(
        n, m, [&](int i, int j) { return plan(i, j) * t[i]; },
        [&](int j, double sum) { q[j] = diagonal[j] * p[j] - sum; });
    project(q);
  };
  SolveSymmetric<kDefinite>(block, m, 2 * m + 10, tolerance, least_curvature, inverted, right, apply, memory);
}

// [I P; P^T I] [alpha; beta] = [side; right], orthogonal to (1, -1). Memory: of size n + m.
template <class Plan>
__device__ void SolveFull(Block& block, int n, int m, Plan plan, const double* side, const double* right,
                          const SolverMemory& memory) {
  const int size = n + m;
  const auto project = [&](double* y) {
    for (int pass = 0; pass < 2; ++pass) {
      const double share = block.SumOf(size, [&](int64_t k) { return k < n ? y[k] : -y[k]; }) / size;
      block.ForEach(size, [&](int64_t k) { y[k] -= k < n ? share : -share; });
    }
  };
  const auto to_residual = [&] {
    block.ForEach(size, [&](int64_t k) { memory.residual[k] = k < n ? side[k] : right[k - n]; });
    project(memory.residual);
  };
  const auto apply = [&](const double* p, double* q) {
    block.Rows(
        n, m, [&](int i, int j) { return plan(i, j) * p[n + j]; }, [&](int i, double sum) { q[i] = p[i] + sum; });
    block.Columns(
        n, m, [&](int i, int j) { return plan(i, j) * p[i]; }, [&](int j, double sum) { q[n + j] = p[n + j] + sum; });
    project(q);
  };
  SolveSymmetric<false>(
      block, size, 2 * size + 10, kImplicitTolerance, kLeastCurvature, [](int64_t) { return 1.0; }, to_residual, apply,
      memory);
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
  const SolverMemory memory = {m->Col(1), m->Col(2), m->Col(3), m->Col(4), m->Col(5), m->Col(6), m->Row(6)};

  for (int i = block.warp; i < task.rows; i += block.warps) {
    for (int j = block.lane; j < task.cols; j += 32) bar[m->At(i, j)] = m->io.Cotangent(i, j);
  }
  block.Sync();  // The cotangent is there.
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
  const double* beta = memory.x;
  double* alpha = t;
  if (full) {
    SolveFull(block, task.n, task.m, plan, side, right, memory);
    alpha = memory.x;
    beta = memory.x + task.n;
  } else {
    const auto solve = [&](auto definite) {
      SolveReduced<decltype(definite)::value>(block, task.n, task.m, plan, inverse, diagonal, right, kImplicitTolerance,
                                              kLeastCurvature, t, memory);
    };
    unit ? solve(std::false_type()) : solve(std::true_type());
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
  block.Sync();  // The gradient is there.
}

// A plan that was given, or that another kernel left: to m->memory.plan, its sums and errors.
__device__ inline void TakeGivenPlan(Member* m) {
  const Task& task = m->task;
  Block& block = m->block;
  for (int i = block.warp; i < task.rows; i += block.warps) {
    for (int j = block.lane; j < task.cols; j += 32) {
      const double p = m->io.Given(i, j);
      m->memory.plan[m->At(i, j)] = p;
      if (task.has_plans) m->io.StorePlan(i, j, p);
    }
  }
  block.Sync();  // P is there.
  SumPlan(m, &m->result.row_error, &m->result.col_error);
  m->result.converged = fmax(m->result.row_error, m->result.col_error) <= task.tolerance;
  m->result.reason = StopReason::kNotIterated;
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_IMPLICIT_CUH_
