// Kind::kDouble for every target.
#define SINKHORN_SOLVER_INL "kernels/cpu/normalization_linear-inl.h"
#define SINKHORN_SOLVER LinearSolver
#define SINKHORN_SOLVER_TYPE double
#define SINKHORN_SOLVER_BYTES DoubleSolverBytes
#define SINKHORN_MAKE_SOLVER MakeDoubleSolver
#include "kernels/cpu/normalization_unit-inl.h"
