// Kind::kImplicit for every target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/normalization_implicit.cc"
#include "kernels/cpu/targets.h"
//
#include "hwy/foreach_target.h"
//
#include "hwy/highway.h"
#include "kernels/cpu/normalization_implicit-inl.h"
#include "kernels/cpu/normalization_make-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn {
namespace cpu {
namespace normalization {
namespace HWY_NAMESPACE {

int64_t ImplicitBytes(const NormalizationSpec& spec) { return BytesOf<ImplicitSolver, double>(spec); }
MatrixSolver* MakeImplicit(const NormalizationSpec& spec, void* memory, double* plan) {
  return MakeOf<ImplicitSolver, double>(spec, memory, plan);
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
HWY_EXPORT(ImplicitBytes);
HWY_EXPORT(MakeImplicit);

int64_t ImplicitSolverBytes(const NormalizationSpec& spec) { return HWY_DYNAMIC_DISPATCH(ImplicitBytes)(spec); }
MatrixSolver* MakeImplicitSolver(const NormalizationSpec& spec, void* memory, double* plan) {
  return HWY_DYNAMIC_DISPATCH(MakeImplicit)(spec, memory, plan);
}

}  // namespace normalization
}  // namespace cpu
}  // namespace sinkhorn
#endif  // HWY_ONCE
