// Kind::kImplicit for every target.
#define SINKHORN_SOLVER_INL "kernels/cpu/normalization_implicit-inl.h"
#define SINKHORN_SOLVER ImplicitSolver
#define SINKHORN_SOLVER_TYPE double
#define SINKHORN_SOLVER_BYTES ImplicitSolverBytes
#define SINKHORN_MAKE_SOLVER MakeImplicitSolver
#include "kernels/cpu/normalization_unit-inl.h"
