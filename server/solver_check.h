// Checks the options of a request that have nothing to do with tensors: the solver's, and a normalisation's recipe.
#ifndef SINKHORN_SERVER_SOLVER_CHECK_H_
#define SINKHORN_SERVER_SOLVER_CHECK_H_

#include "absl/types/optional.h"
#include "kernels/problem.h"
#include "server/status.h"
#include "server/validate.h"
#include "sinkhorn/v1/sinkhorn.pb.h"

namespace sinkhorn {

// Transport: lengths become energies (epsilon = blur^p, rho = reach^p), defaults are filled in.
absl::optional<Error> CheckTransportSolver(const v1::SolverOptions& in, ProblemKind kind, const Limits& limits,
                                           SolverOptions* out);

// Normalisation: only max_iterations, tolerance and precision may be set; with `backward_only` (a plan is given) only
// the precision.
absl::optional<Error> CheckNormalizationSolver(const v1::SolverOptions& in, bool exact, bool backward_only,
                                               const Limits& limits, SolverOptions* out);

absl::optional<Error> CheckRecipe(const v1::NormalizationProblem& in, Recipe* out);

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_SOLVER_CHECK_H_
