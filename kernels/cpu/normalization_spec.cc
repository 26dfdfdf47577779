#include "kernels/cpu/normalization_spec.h"

#include <algorithm>
#include <numeric>

#include "kernels/cpu/half.h"

namespace sinkhorn::cpu {
namespace {

// Without knobs that have no effect.
Recipe Resolved(Recipe recipe) {
  if (!recipe.exact) {
    if (recipe.guard_value == 0) recipe.guard = Guard::kNone;
    return recipe;
  }
  Recipe plain;
  plain.exact = true;
  plain.logit_floor = recipe.logit_floor;
  return plain;
}

bool Transposed(const Recipe& recipe, int64_t n, int64_t m) {
  // EXACT eliminates its rows and solves for its columns: the fewer, the better.
  return recipe.exact ? m > n : recipe.order == Order::kColumnRow;
}

void LoadOrFill(const TensorView& view, int64_t member, int64_t size, double absent, double* out) {
  if (!view) {
    std::fill(out, out + size, absent);
  } else {
    LoadAsDouble(view.dtype, view.data, view.shared ? 0 : member * size, size, out);
  }
}

}  // namespace

NormalizationSpec::NormalizationSpec(const Problem& p) : problem(p), recipe(Resolved(p.normalization.recipe)) {
  const NormalizationInputs& in = p.normalization;
  dustbin = static_cast<bool>(in.dustbin_score);
  n = p.n + (dustbin ? 1 : 0);
  m = p.m + (dustbin ? 1 : 0);
  forward = static_cast<bool>(in.logits);
  transposed = forward && Transposed(recipe, n, m);
  rows = transposed ? m : n;
  cols = transposed ? n : m;
  own_marginals = in.row_marginals || in.column_marginals;
  unit_marginals = n == m && !dustbin && !own_marginals;
  iterations = p.solver.max_iterations;
  tolerance = p.solver.tolerance;
  const bool backward = static_cast<bool>(in.cotangent);
  unrolled = backward && forward && in.backward == BackwardMode::kUnrolled;
  implicit = backward && !unrolled;
}

void NormalizationSpec::LoadMarginals(int64_t member, double* row_marginals, double* col_marginals) const {
  const NormalizationInputs& in = problem.normalization;
  double* r = transposed ? col_marginals : row_marginals;  // P's rows and columns
  double* c = transposed ? row_marginals : col_marginals;
  LoadOrFill(in.row_marginals, member, problem.n, 1, r);
  const double row_total = std::accumulate(r, r + problem.n, 0.0);
  LoadOrFill(in.column_marginals, member, problem.m, recipe.exact ? row_total / static_cast<double>(problem.m) : 1, c);
  if (dustbin) {
    r[n - 1] = std::accumulate(c, c + problem.m, 0.0);
    c[m - 1] = row_total;
  }
}

double NormalizationSpec::DustbinScore(int64_t member) const {
  const TensorView& view = problem.normalization.dustbin_score;
  double score;
  LoadAsDouble(view.dtype, view.data, view.shared ? 0 : member, 1, &score);
  return score;
}

}  // namespace sinkhorn::cpu
