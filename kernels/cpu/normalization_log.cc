// Kind::kDoubleLog for every target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/normalization_log.cc"
#include "kernels/cpu/targets.h"
//
#include "hwy/foreach_target.h"
//
#include "hwy/highway.h"
#include "kernels/cpu/normalization_log-inl.h"
#include "kernels/cpu/normalization_make-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn {
namespace cpu {
namespace normalization {
namespace HWY_NAMESPACE {

int64_t LogBytes(const NormalizationSpec& spec) { return BytesOf<LogSolver, double>(spec); }
MatrixSolver* MakeLog(const NormalizationSpec& spec, void* memory, double* plan) {
  return MakeOf<LogSolver, double>(spec, memory, plan);
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
HWY_EXPORT(LogBytes);
HWY_EXPORT(MakeLog);

int64_t LogSolverBytes(const NormalizationSpec& spec) { return HWY_DYNAMIC_DISPATCH(LogBytes)(spec); }
MatrixSolver* MakeLogSolver(const NormalizationSpec& spec, void* memory, double* plan) {
  return HWY_DYNAMIC_DISPATCH(MakeLog)(spec, memory, plan);
}

}  // namespace normalization
}  // namespace cpu
}  // namespace sinkhorn
#endif  // HWY_ONCE
