#include "kernels/cpu/work.h"

#include "kernels/cpu/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/work.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::cpu::HWY_NAMESPACE {

bool HasVectors() { return HWY_TARGET != HWY_SCALAR; }

}  // namespace sinkhorn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sinkhorn::cpu {

HWY_EXPORT(HasVectors);

bool SolvesInDouble(const Problem& problem) {
  return problem.solver.precision == Precision::kDouble || !HWY_DYNAMIC_DISPATCH(HasVectors)();
}

}  // namespace sinkhorn::cpu
#endif  // HWY_ONCE
