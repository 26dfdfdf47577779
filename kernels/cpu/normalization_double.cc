// Kind::kDouble for every target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/normalization_double.cc"
#include "kernels/cpu/targets.h"
//
#include "hwy/foreach_target.h"
//
#include "hwy/highway.h"
#include "kernels/cpu/normalization_linear-inl.h"
#include "kernels/cpu/normalization_make-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn {
namespace cpu {
namespace normalization {
namespace HWY_NAMESPACE {

int64_t DoubleBytes(const NormalizationSpec& spec) { return BytesOf<LinearSolver, double>(spec); }
MatrixSolver* MakeDouble(const NormalizationSpec& spec, void* memory, double* plan) {
  return MakeOf<LinearSolver, double>(spec, memory, plan);
}

}  // namespace HWY_NAMESPACE
}  // namespace normalization
}  // namespace cpu
}  // namespace sinkhorn
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sinkhorn {
namespace cpu {
namespace normalization {
HWY_EXPORT(DoubleBytes);
HWY_EXPORT(MakeDouble);

int64_t DoubleSolverBytes(const NormalizationSpec& spec) { return HWY_DYNAMIC_DISPATCH(DoubleBytes)(spec); }
MatrixSolver* MakeDoubleSolver(const NormalizationSpec& spec, void* memory, double* plan) {
  return HWY_DYNAMIC_DISPATCH(MakeDouble)(spec, memory, plan);
}

}  // namespace normalization
}  // namespace cpu
}  // namespace sinkhorn
#endif  // HWY_ONCE
