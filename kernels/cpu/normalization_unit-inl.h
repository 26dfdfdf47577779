// A translation unit that makes the solvers of one kind, for every target and for the layout that the shape calls for.
// It says which before it includes this:
//   SINKHORN_SOLVER_INL    where the solver is,
//   SINKHORN_SOLVER        its class template, of a layout,
//   SINKHORN_SOLVER_TYPE   the layout's numbers,
//   SINKHORN_SOLVER_BYTES, SINKHORN_MAKE_SOLVER   the functions to define (normalization.cc).
// No include guard: foreach_target.h includes it once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/normalization_unit-inl.h"
#include "kernels/cpu/targets.h"
//
#include "hwy/foreach_target.h"
//
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/cpu/normalization_io-inl.h"
#include "kernels/cpu/normalization_kernels.h"
#include SINKHORN_SOLVER_INL

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::cpu::normalization::HWY_NAMESPACE {
namespace {

using LaneSolver = SINKHORN_SOLVER<LaneLayout<SINKHORN_SOLVER_TYPE>>;
using RowSolver = SINKHORN_SOLVER<RowLayout<SINKHORN_SOLVER_TYPE>>;

template <class Solver>
int64_t BytesOf(const NormalizationSpec& spec) {
  Arena measure(nullptr);
  const Solver solver(spec, &measure, MatrixTensor());
  return measure.used();
}
int64_t Bytes(const NormalizationSpec& spec) {
  return SolvedInLanes(spec) ? BytesOf<LaneSolver>(spec) : BytesOf<RowSolver>(spec);
}

MatrixSolver* Make(const NormalizationSpec& spec, void* memory, double* plan) {
  Arena arena(memory);
  const MatrixTensor tensor = {DType::kFloat64, plan, spec.n, spec.m, false};
  if (SolvedInLanes(spec)) return new LaneSolver(spec, &arena, tensor);
  return new RowSolver(spec, &arena, tensor);
}

}  // namespace
}  // namespace sinkhorn::cpu::normalization::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sinkhorn::cpu::normalization {
HWY_EXPORT(Bytes);
HWY_EXPORT(Make);

int64_t SINKHORN_SOLVER_BYTES(const NormalizationSpec& spec) { return HWY_DYNAMIC_DISPATCH(Bytes)(spec); }
MatrixSolver* SINKHORN_MAKE_SOLVER(const NormalizationSpec& spec, void* memory, double* plan) {
  return HWY_DYNAMIC_DISPATCH(Make)(spec, memory, plan);
}

}  // namespace sinkhorn::cpu::normalization
#endif  // HWY_ONCE
