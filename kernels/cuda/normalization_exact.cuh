// The EXACT recipe: P with the given marginals, by Newton's method on the column potentials.
//
// The row potentials are eliminated: given gamma, P_ij = r_i softmax_j(A_ij + gamma_j) has exact row sums. Its column
// sums c are matched by Newton steps S delta = c* - c, S = diag(c) - P^T diag(1/r) P. Safeguards: two sweeps first
// (gamma += log c* / c); a step is shortened to a range of kLongestStep; one that does not reduce the residual is tried
// at a quarter and then replaced by a sweep. Each evaluation of P counts as an iteration.
#ifndef SINKHORN_KERNELS_CUDA_NORMALIZATION_EXACT_CUH_
#define SINKHORN_KERNELS_CUDA_NORMALIZATION_EXACT_CUH_

#include "kernels/cuda/normalization_implicit.cuh"

namespace sinkhorn {
namespace cuda {
namespace normalization {

constexpr int kSweeps = 2;
constexpr double kLongestStep = 6;
constexpr double kRounding = 4e-15;  // L1 residual per unit of mass that is taken as exact,
constexpr double kStall = 1e-12;     // and below which a residual may stop falling.
constexpr double kCoupled = 1e-290;  // Nodes below have no neighbours left.

// x = S^+ b up to a constant, by elimination. It forms the weights of the graph whose Laplacian S is, sums of positive
// terms, and takes each diagonal entry as a sum of weights, never as a difference, so that even couplings far below
// rounding are resolved to full relative accuracy. b is overwritten.
__device__ inline void SolveDense(Member* m, const double* marginal, double* b, double* degree, double* x) {
  const Task& task = m->task;
  Block& block = m->block;
  const int size = task.cols;
  double* weights = m->memory.weights;
  const double* plan = m->memory.plan;
  block.ForEach(int64_t{size} * size, [&](int64_t k) {
    const int row = static_cast<int>(k) / size, col = static_cast<int>(k) % size;
    if (col == row) weights[k] = 0;  // Not used.
    if (col >= row) return;
    double sum = 0;
    for (int i = 0; i < task.rows; ++i) sum = fma(plan[m->At(i, row)] / marginal[i], plan[m->At(i, col)], sum);
    weights[k] = sum;
    weights[col * size + row] = sum;
  });
  for (int k = size - 1; k > 0; --k) {  // Node k leaves: its neighbours are coupled through it.
    const double* last = weights + k * size;
    const double sum = block.SumOf(k, [&](int64_t j) { return last[j]; });
    const double inverse = sum > kCoupled ? 1 / sum : 0;
    if (block.thread == 0) degree[k] = sum;
    block.ForEach(int64_t{k} * k, [&](int64_t e) {
      const int row = static_cast<int>(e) / k, col = static_cast<int>(e) % k;
      weights[row * size + col] = fma(last[row] * inverse, last[col], weights[row * size + col]);
      if (col == 0) b[row] = fma(last[row] * inverse, b[k], b[row]);
    });
  }
  if (block.warp == 0) {
    if (block.lane == 0) x[0] = 0;
    __syncwarp();
    for (int k = 1; k < size; ++k) {
      double sum = 0;
      for (int j = block.lane; j < k; j += 32) sum = fma(weights[k * size + j], x[j], sum);
      sum = Block::WarpSum(sum) + b[k];
      if (block.lane == 0) x[k] = degree[k] > kCoupled ? sum / degree[k] : 0;  // Alone: any value will do.
      __syncwarp();
    }
  }
  block.Sync();  // x is there.
}

// P at the column potentials gamma, with exact rows, to m->memory.plan; its column sums to Col(kSum).
__device__ inline void Evaluate(Member* m, const double* gamma) {
  const Task& task = m->task;
  Block& block = m->block;
  const double* a = m->memory.a;
  double* plan = m->memory.plan;
  for (int i = block.warp; i < task.rows; i += block.warps) {
    double top = -DBL_MAX, sum = 0;
    for (int j = block.lane; j < task.cols; j += 32) top = fmax(top, a[m->At(i, j)] + gamma[j]);
    for (int mask = 16; mask >= 1; mask /= 2) top = fmax(top, __shfl_xor_sync(kAllLanes, top, mask));
    for (int j = block.lane; j < task.cols; j += 32) {
      const double e = exp(a[m->At(i, j)] + gamma[j] - top);
      plan[m->At(i, j)] = e;
      sum += e;
    }
    const double scale = m->Row(kMarginal)[i] / Block::WarpSum(sum);
    for (int j = block.lane; j < task.cols; j += 32) plan[m->At(i, j)] *= scale;
  }
  block.Sync();  // P is there.
  block.Columns(
      task.rows, task.cols, [&](int i, int j) { return plan[m->At(i, j)]; },
      [&](int j, double sum) { m->Col(kSum)[j] = sum; });
}

// The step for `missing` = c* - c, no longer than kLongestStep, to newton[].
__device__ inline void NewtonStep(Member* m, const double* missing, double* newton) {
  const Task& task = m->task;
  Block& block = m->block;
  double* x = m->Col(6);
  if (task.cols <= kDenseColumns) {
    double* b = m->Row(2);
    block.ForEach(task.cols, [&](int64_t j) { b[j] = missing[j]; });
    SolveDense(m, m->Row(kMarginal), b, m->Row(3), x);
  } else {
    double* inverse = m->Row(2);
    block.ForEach(task.rows, [&](int64_t i) { inverse[i] = 1 / m->Row(kMarginal)[i]; });
    const auto plan = [&](int i, int j) { return m->memory.plan[m->At(i, j)]; };
    SolveReduced<true>(block, task.rows, task.cols, plan, inverse, m->Col(kSum), missing, 1e-3, 0.0, m->Row(6),
                       {x, m->Row(3), m->Row(4), m->Row(5)});
  }
  double low = DBL_MAX, high = -DBL_MAX;
  for (int64_t j = block.thread; j < task.cols; j += block.threads) {
    low = fmin(low, x[j]);
    high = fmax(high, x[j]);
  }
  const double range = block.Max(high) + block.Max(-low);
  const double scale = kLongestStep / fmax(range, kLongestStep);
  block.ForEach(task.cols, [&](int64_t j) { newton[j] = scale * x[j]; });
}

// False: it has left.
__device__ inline bool SolveExactly(Member* m) {
  const Task& task = m->task;
  Block& block = m->block;
  double *gamma = m->V(0), *trial = m->V(1), *target = m->Col(2), *sweep = m->Col(3), *newton = m->Col(4),
         *missing = m->Col(5);
  // The column marginals, of the rows' total to the last bit: given totals may differ by 1e-5, rounded ones do.
  const double row_total = block.SumOf(task.rows, [&](int64_t i) { return m->Row(kMarginal)[i]; });
  const double col_total = block.SumOf(task.cols, [&](int64_t j) { return m->Col(kMarginal)[j]; });
  const double goal = fmax(task.tolerance, row_total * kRounding);
  double error = DBL_MAX, scale = 1;
  bool is_newton = false, stopped = false;
  int tries = 0, t = 1;
  const Progress from = *m->progress;
  if (from.started) {
    error = from.error, scale = from.scale, is_newton = from.is_newton, tries = from.tries, t = from.t;
  } else {
    block.ForEach(task.cols, [&](int64_t j) {
      target[j] = m->Col(kMarginal)[j] * (row_total / col_total);
      gamma[j] = trial[j] = newton[j] = 0;
    });
  }
  for (;; ++t) {
    Evaluate(m, trial);
    const double now = block.SumOf(task.cols, [&](int64_t j) { return fabs(target[j] - m->Col(kSum)[j]); });
    const bool accepted = !is_newton || now < error;
    if (accepted) {
      error = now;
      block.ForEach(task.cols, [&](int64_t j) {
        const double sum = m->Col(kSum)[j];
        sweep[j] = log(fmin(target[j] / fmax(sum, 1e-300), 1e300));
        gamma[j] = trial[j];
        missing[j] = target[j] - sum;
      });
    }
    stopped = error <= goal || (!accepted && is_newton && error <= row_total * kStall);
    if (stopped || t >= task.iterations) break;
    tries = accepted ? 0 : tries + 1;
    scale = accepted ? 1 : scale / 4;
    if (accepted && t >= kSweeps) NewtonStep(m, missing, newton);
    const bool sweeps = (tries == 0 && t < kSweeps) || tries >= 2;
    block.ForEach(task.cols, [&](int64_t j) { trial[j] = gamma[j] + (sweeps ? sweep[j] : scale * newton[j]); });
    is_newton = !sweeps;
    if (!m->MustLeave()) continue;
    if (threadIdx.x == 0) *m->progress = {from.member, true, is_newton, t + 1, tries, error, scale};
    return false;
  }

  Evaluate(m, gamma);
  for (int i = block.warp; i < task.rows; i += block.warps) {
    for (int j = block.lane; j < task.cols; j += 32) m->io.StorePlan(i, j, m->memory.plan[m->At(i, j)]);
  }
  General* result = &m->result;
  result->iterations = t;
  SumPlan(m, &result->row_error, &result->col_error);
  if (!(result->row_error + result->col_error < DBL_MAX)) result->finite = false;
  const double larger = fmax(result->row_error, result->col_error);
  result->converged = larger <= fmax(task.tolerance, kStall * row_total + 1.001 * fabs(row_total - col_total));
  result->reason = !stopped                                         ? StopReason::kMaxIterations
                   : task.tolerance > 0 && larger <= task.tolerance ? StopReason::kTolerance
                                                                    : StopReason::kPrecision;
  return true;
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NORMALIZATION_EXACT_CUH_
