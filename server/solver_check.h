// Checks the options of a request that have nothing to do with tensors: the solver's, a normalisation's recipe, costs,
// and what Hessian-vector products and sparse plans are asked for with.
#ifndef SINKHORN_SERVER_SOLVER_CHECK_H_
#define SINKHORN_SERVER_SOLVER_CHECK_H_

#include "absl/types/optional.h"
#include "kernels/problem.h"
#include "server/status.h"
#include "server/validate.h"
#include "sinkhorn/v1/sinkhorn.pb.h"

namespace sinkhorn {

// Transport: lengths become energies (epsilon = blur^p, rho = reach^p), defaults are filled in.
absl::optional<Error> CheckTransportSolver(const v1::SolverOptions& in, ProblemKind kind, PointCost cost,
                                           const Limits& limits, SolverOptions* out);

// The cost of points.
absl::optional<Error> CheckCostFunction(v1::CostFunction cost, TransportInputs* out);

// Room for a sparse plan, as asked for.
absl::optional<Error> CheckSparsePlanOptions(const v1::SparsePlanOptions& in, const Limits& limits, SparseOutput* out);

// The conjugate gradients of Hessian-vector products.
absl::optional<Error> CheckHessianOptions(const v1::HessianProducts& in, const Limits& limits, HessianInputs* out);

// Normalisation: only max_iterations, tolerance and precision may be set; with `backward_only` (a plan is given) only
// the precision.
absl::optional<Error> CheckNormalizationSolver(const v1::SolverOptions& in, bool exact, bool backward_only,
                                               const Limits& limits, SolverOptions* out);

absl::optional<Error> CheckRecipe(const v1::NormalizationProblem& in, Recipe* out);

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_SOLVER_CHECK_H_
