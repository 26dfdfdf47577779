// A case: a Problem with all the memory that it points to, and the answer of a backend.
#ifndef SINKHORN_TESTS_CONFORMANCE_CASE_H_
#define SINKHORN_TESTS_CONFORMANCE_CASE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/backend.h"
#include "kernels/problem.h"
#include "tests/conformance/tensor.h"
#include "tests/oracle/normalization.h"
#include "tests/oracle/transport.h"

namespace sinkhorn::conformance {

// What a case asks for. Values and convergence are always asked of transport; a normalisation with
// a cotangent gets gradients.
enum Wanted : uint32_t {
  kPotentials = 1,
  kPlan = 2,
  kSums = 4,
  kValueLinear = 8,
  kPrimalBound = 16,
  kGradientPoints = 32,
  kGradientMasses = 64,
  kGradientCost = 128,
  kProjections = 256,
  kProducts = 512,  // P V and P^T U, for `v` and `u`.
};

struct Case {
  std::string name;
  Problem problem;  // Kind, sizes and options; the views stay empty.
  Tensor logits, row_marginals, column_marginals, dustbin_score, cotangent, plan;
  Tensor cost, x, y, a, b, initial_f, initial_g, v, u;
  Tensor direction_x, direction_y;  // Of Hessian-vector products; transport.hessian has the rest.
  uint32_t wanted = kPotentials;
  DType output_dtype = DType::kFloat64;

  SolverOptions& solver() { return problem.solver; }
  const SolverOptions& solver() const { return problem.solver; }
};

// Outputs not asked for are absent.
struct Answer {
  absl::Status status;
  SolveReport report;
  std::vector<Convergence> convergence;
  Vector value, value_linear, dual_bound, primal_bound;
  Tensor f, g, f_aa, g_bb, plan, row_sums, column_sums;
  Tensor gradient_logits, gradient_dustbin_score;
  Tensor gradient_x, gradient_y, gradient_a, gradient_b, gradient_cost;
  Tensor plan_v, plan_transpose_u, projection_x, projection_y;
  Tensor hessian_x, hessian_y;
  std::vector<HessianConvergence> hessian_convergence;
  std::vector<int64_t> sparse_offsets;  // With room in the problem's outputs.sparse_plan.
  std::vector<int32_t> sparse_columns;
  Tensor sparse_values;
  Vector sparse_mass;
};

// Solves all cases in one company: admitted in order, advanced in shared slices of `slice_seconds`
// on one lane. `after_slice`, if given, sees each that was advanced.
std::vector<Answer> SolveTogether(Backend* backend, const std::vector<const Case*>& cases, double slice_seconds = 0.005,
                                  const std::function<void(Solve*)>& after_slice = nullptr, int lane = 0);
// One alone. Fails the test unless the status is OK.
Answer SolveAlone(Backend* backend, const Case& the_case);

// Empty if all outputs have the same bits, else the name of one that has not.
std::string DifferenceInBits(const Answer& p, const Answer& q);

// Member `index` as a case, and as an answer, of its own.
Case MemberCase(const Case& the_case, int64_t index);
Answer MemberAnswer(const Answer& answer, int64_t index, int64_t count);

// Member `index` as the oracle wants it; its numbers are those of the packed tensors.
oracle::Transport MemberTransport(const Case& the_case, int64_t index = 0);
oracle::Normalization MemberNormalization(const Case& the_case, int64_t index = 0);

// Transport as a case; tensors of `dtype`.
Case CaseOf(const oracle::Transport& problem, std::string name, DType dtype = DType::kFloat32);
// Normalisation as a case.
Case CaseOf(const oracle::Normalization& problem, std::string name, DType dtype = DType::kFloat32);

}  // namespace sinkhorn::conformance

#endif  // SINKHORN_TESTS_CONFORMANCE_CASE_H_
