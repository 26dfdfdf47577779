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
namespace sinkhorn {
namespace cpu {
namespace normalization {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR  // No vectors to fill.
bool Takes(const NormalizationSpec&) { return false; }
void Squared(const NormalizationSpec&, const int64_t*, int64_t, Scratch*, NormalizationTally*) {}
#else
bool Takes(const NormalizationSpec& spec) {
  const double guard = spec.recipe.guard_value;
  return spec.unit_marginals && (spec.n == 4 || spec.n == 8) && spec.tolerance == 0 &&
         (spec.recipe.guard == Guard::kNone || (guard >= 1e-12 && guard <= 1e6));
}
void Squared(const NormalizationSpec& spec, const int64_t* members, int64_t count, Scratch* scratch,
             NormalizationTally* tally) {
  const auto guarded = [&](auto n) {
    switch (spec.recipe.guard) {
      case Guard::kNone:
        return SolveAll<Squares<n(), Guard::kNone> >(spec, members, count, scratch, tally);
      case Guard::kMax:
        return SolveAll<Squares<n(), Guard::kMax> >(spec, members, count, scratch, tally);
      case Guard::kAdd:
        return SolveAll<Squares<n(), Guard::kAdd> >(spec, members, count, scratch, tally);
    }
  };
  return spec.n == 4 ? guarded(std::integral_constant<int, 4>()) : guarded(std::integral_constant<int, 8>());
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace normalization
}  // namespace cpu
}  // namespace sinkhorn
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sinkhorn {
namespace cpu {
namespace normalization {
HWY_EXPORT(Takes);
HWY_EXPORT(Squared);

bool IsSquares(const NormalizationSpec& spec) { return HWY_DYNAMIC_DISPATCH(Takes)(spec); }
void SolveSquares(const NormalizationSpec& spec, const int64_t* members, int64_t count, Scratch* scratch,
                  NormalizationTally* tally) {
  HWY_DYNAMIC_DISPATCH(Squared)(spec, members, count, scratch, tally);
}

}  // namespace normalization
}  // namespace cpu
}  // namespace sinkhorn
#endif  // HWY_ONCE
