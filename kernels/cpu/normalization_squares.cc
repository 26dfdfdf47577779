// The squares' kernels for every target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/normalization_squares.cc"
#include "kernels/cpu/targets.h"
//
#include "hwy/foreach_target.h"
//
#include "hwy/highway.h"
#include "kernels/cpu/normalization_kernels.h"
#if HWY_TARGET != HWY_SCALAR
#include "kernels/cpu/normalization_squares-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::cpu::normalization::HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR  // No vectors to fill.
bool Takes(const NormalizationSpec&) { return false; }
void Squared(const NormalizationSpec&, const int64_t*, int64_t, Scratch*, NormalizationTally*) {}
#else
bool Takes(const NormalizationSpec& spec) {
  const double guard = spec.recipe.guard_value;
  return spec.unit_marginals && (spec.n == 4 || spec.n == 8) && spec.tolerance == 0 &&
         (spec.recipe.guard == Guard::kNone || (guard >= kSmallestGuard && guard <= kLargestGuard));
}
void Squared(const NormalizationSpec& spec, const int64_t* members, int64_t count, Scratch* scratch,
             NormalizationTally* tally) {
  WithGuard(spec.recipe.guard, [&](auto guard) HWY_ATTR {
    return spec.n == 4 ? SolveAll<Squares<4, guard()> >(spec, members, count, scratch, tally)
                       : SolveAll<Squares<8, guard()> >(spec, members, count, scratch, tally);
  });
}
#endif

}  // namespace sinkhorn::cpu::normalization::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sinkhorn::cpu::normalization {
HWY_EXPORT(Takes);
HWY_EXPORT(Squared);

bool IsSquares(const NormalizationSpec& spec) { return HWY_DYNAMIC_DISPATCH(Takes)(spec); }
void SolveSquares(const NormalizationSpec& spec, const int64_t* members, int64_t count, Scratch* scratch,
                  NormalizationTally* tally) {
  HWY_DYNAMIC_DISPATCH(Squared)(spec, members, count, scratch, tally);
}

}  // namespace sinkhorn::cpu::normalization
#endif  // HWY_ONCE
