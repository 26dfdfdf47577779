// Kind::kFloat for every target.
#define SINKHORN_SOLVER_INL "kernels/cpu/normalization_linear-inl.h"
#define SINKHORN_SOLVER LinearSolver
#define SINKHORN_SOLVER_TYPE float
#define SINKHORN_SOLVER_BYTES FloatSolverBytes
#define SINKHORN_MAKE_SOLVER MakeFloatSolver
#include "kernels/cpu/normalization_unit-inl.h"
