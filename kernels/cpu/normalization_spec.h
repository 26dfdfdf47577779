// A normalisation as its kernels see it: the recipe resolved, the orientation chosen, the marginals of a member.
//
// Kernels scale the rows of their matrix first and its columns second. Recipes that start with columns are solved on
// the transpose: `transposed` says so, `rows` and `cols` are the kernel's, `n` and `m` those of P (dustbin included).
#ifndef SINKHORN_KERNELS_CPU_NORMALIZATION_SPEC_H_
#define SINKHORN_KERNELS_CPU_NORMALIZATION_SPEC_H_

#include <cstdint>

#include "kernels/problem.h"

namespace sinkhorn::cpu {

struct NormalizationSpec {
  explicit NormalizationSpec(const Problem& problem);

  // Marginals of a member for the kernel's rows and columns.
  void LoadMarginals(int64_t member, double* row_marginals, double* col_marginals) const;
  // The dustbin's score of a member. REQUIRES: dustbin.
  double DustbinScore(int64_t member) const;

  const Problem& problem;
  Recipe recipe;
  int64_t n = 0, m = 0;
  bool dustbin = false;
  bool transposed = false;
  int64_t rows = 0, cols = 0;
  bool own_marginals = false;   // Members may have different ones.
  bool unit_marginals = false;  // Square and all 1: scaled marginals are exactly 1.
  int32_t iterations = 0;
  double tolerance = 0;
  bool forward = false;   // From logits; false: backward from the plan alone.
  bool unrolled = false;  // Backward by the reverse of the steps.
  bool implicit = false;  // Backward from P.

  bool softmax() const { return recipe.start == Start::kRowSoftmax; }
};

}  // namespace sinkhorn::cpu

#endif  // SINKHORN_KERNELS_CPU_NORMALIZATION_SPEC_H_
