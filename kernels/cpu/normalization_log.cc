// Kind::kDoubleLog for every target.
#define SINKHORN_SOLVER_INL "kernels/cpu/normalization_log-inl.h"
#define SINKHORN_SOLVER LogSolver
#define SINKHORN_SOLVER_TYPE double
#define SINKHORN_SOLVER_BYTES LogSolverBytes
#define SINKHORN_MAKE_SOLVER MakeLogSolver
#include "kernels/cpu/normalization_unit-inl.h"
