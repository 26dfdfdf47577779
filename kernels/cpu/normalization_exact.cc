// Kind::kExact for every target.
#define SINKHORN_SOLVER_INL "kernels/cpu/normalization_exact-inl.h"
#define SINKHORN_SOLVER ExactSolver
#define SINKHORN_SOLVER_TYPE double
#define SINKHORN_SOLVER_BYTES ExactSolverBytes
#define SINKHORN_MAKE_SOLVER MakeExactSolver
#include "kernels/cpu/normalization_unit-inl.h"
