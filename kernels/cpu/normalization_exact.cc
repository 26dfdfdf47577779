// Kind::kExact for every target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/normalization_exact.cc"
#include "kernels/cpu/targets.h"
//
#include "hwy/foreach_target.h"
//
#include "hwy/highway.h"
#include "kernels/cpu/normalization_exact-inl.h"
#include "kernels/cpu/normalization_make-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn {
namespace cpu {
namespace normalization {
namespace HWY_NAMESPACE {

int64_t ExactBytes(const NormalizationSpec& spec) { return BytesOf<ExactSolver, double>(spec); }
MatrixSolver* MakeExact(const NormalizationSpec& spec, void* memory, double* plan) {
  return MakeOf<ExactSolver, double>(spec, memory, plan);
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
HWY_EXPORT(ExactBytes);
HWY_EXPORT(MakeExact);

int64_t ExactSolverBytes(const NormalizationSpec& spec) { return HWY_DYNAMIC_DISPATCH(ExactBytes)(spec); }
MatrixSolver* MakeExactSolver(const NormalizationSpec& spec, void* memory, double* plan) {
  return HWY_DYNAMIC_DISPATCH(MakeExact)(spec, memory, plan);
}

}  // namespace normalization
}  // namespace cpu
}  // namespace sinkhorn
#endif  // HWY_ONCE
