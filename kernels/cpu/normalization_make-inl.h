// Makes a solver for the layout that the shape calls for.
#if defined(SINKHORN_KERNELS_CPU_NORMALIZATION_MAKE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SINKHORN_KERNELS_CPU_NORMALIZATION_MAKE_INL_H_
#undef SINKHORN_KERNELS_CPU_NORMALIZATION_MAKE_INL_H_
#else
#define SINKHORN_KERNELS_CPU_NORMALIZATION_MAKE_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "kernels/cpu/normalization_io-inl.h"
#include "kernels/cpu/normalization_kernels.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn {
namespace cpu {
namespace normalization {
namespace HWY_NAMESPACE {

template <class Solver>
int64_t BytesOfSolver(const NormalizationSpec& spec) {
  Arena measure(nullptr);
  const Solver solver(spec, &measure, MatrixTensor());
  return measure.used();
}
template <template <class> class Solver, class T>
int64_t BytesOf(const NormalizationSpec& spec) {
  return SolvedInLanes(spec) ? BytesOfSolver<Solver<LaneLayout<T>>>(spec) : BytesOfSolver<Solver<RowLayout<T>>>(spec);
}

template <template <class> class Solver, class T>
MatrixSolver* MakeOf(const NormalizationSpec& spec, void* memory, double* plan) {
  Arena arena(memory);
  const MatrixTensor tensor = {DType::kFloat64, plan, spec.n, spec.m, false};
  if (SolvedInLanes(spec)) return new Solver<LaneLayout<T>>(spec, &arena, tensor);
  return new Solver<RowLayout<T>>(spec, &arena, tensor);
}

}  // namespace HWY_NAMESPACE
}  // namespace normalization
}  // namespace cpu
}  // namespace sinkhorn
HWY_AFTER_NAMESPACE();

#endif  // SINKHORN_KERNELS_CPU_NORMALIZATION_MAKE_INL_H_
