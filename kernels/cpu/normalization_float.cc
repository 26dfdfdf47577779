// Kind::kFloat for every target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/normalization_float.cc"
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

int64_t FloatBytes(const NormalizationSpec& spec) { return BytesOf<LinearSolver, float>(spec); }
MatrixSolver* MakeFloat(const NormalizationSpec& spec, void* memory, double* plan) {
  return MakeOf<LinearSolver, float>(spec, memory, plan);
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
HWY_EXPORT(FloatBytes);
HWY_EXPORT(MakeFloat);

int64_t FloatSolverBytes(const NormalizationSpec& spec) { return HWY_DYNAMIC_DISPATCH(FloatBytes)(spec); }
MatrixSolver* MakeFloatSolver(const NormalizationSpec& spec, void* memory, double* plan) {
  return HWY_DYNAMIC_DISPATCH(MakeFloat)(spec, memory, plan);
}

}  // namespace normalization
}  // namespace cpu
}  // namespace sinkhorn
#endif  // HWY_ONCE
