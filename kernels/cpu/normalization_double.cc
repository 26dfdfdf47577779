// The float64 tiers of the normalisation, EXACT and the implicit backward passes, for every target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/normalization_double.cc"
#include "kernels/cpu/targets.h"
//
#include "hwy/foreach_target.h"
//
#include "hwy/highway.h"
#include "kernels/cpu/normalization_exact-inl.h"
#include "kernels/cpu/normalization_implicit-inl.h"
#include "kernels/cpu/normalization_kernels.h"
#include "kernels/cpu/normalization_lanes-inl.h"
#include "kernels/cpu/normalization_linear-inl.h"
#include "kernels/cpu/normalization_log-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn {
namespace cpu {
namespace normalization {
namespace HWY_NAMESPACE {

// Calls body(forward solver type) for the tier and the recipe.
template <class Layout, class Body>
auto WithForward(Tier tier, const NormalizationSpec& spec, Body body) {
  if (spec.recipe.exact) return body(static_cast<ExactSolver<Layout>*>(nullptr));
  if (tier == Tier::kDoubleLog) return body(static_cast<LogSolver<Layout>*>(nullptr));
  return body(static_cast<LinearSolver<Layout>*>(nullptr));
}

void Lanes(Tier tier, const NormalizationSpec& spec, const int64_t* members, int64_t count, Scratch* scratch,
           NormalizationTally* tally) {
  using Layout = LaneLayout<double>;
  WithForward<Layout>(tier, spec, [&](auto* solver) {
    using Forward = std::remove_pointer_t<decltype(solver)>;
    if (spec.implicit) {
      SolveImplicitGroups<Forward, ImplicitSolver<Layout>>(spec, members, count, scratch, tally);
    } else {
      SolveForwardGroups<Forward>(spec, members, count, scratch, tally);
    }
  });
}

MatrixTensor PlanTensor(const NormalizationSpec& spec, double* plan) {
  return {DType::kFloat64, plan, spec.n, spec.m, false};
}
int64_t Bytes(Tier tier, const NormalizationSpec& spec) {
  return WithForward<RowLayout<double>>(tier, spec, [&](auto* solver) {
    return SolverBytes<std::remove_pointer_t<decltype(solver)>>(spec);
  });
}
MatrixSolver* Make(Tier tier, const NormalizationSpec& spec, void* memory, double* plan_copy) {
  return WithForward<RowLayout<double>>(tier, spec, [&](auto* type) -> MatrixSolver* {
    Arena arena(memory);
    return new std::remove_pointer_t<decltype(type)>(spec, &arena, PlanTensor(spec, plan_copy));
  });
}

int64_t ImplicitBytesOf(const NormalizationSpec& spec) { return SolverBytes<ImplicitSolver<RowLayout<double>>>(spec); }
MatrixSolver* MakeImplicitOf(const NormalizationSpec& spec, void* memory, const double* plan) {
  Arena arena(memory);
  return new ImplicitSolver<RowLayout<double>>(spec, &arena, PlanTensor(spec, const_cast<double*>(plan)));  // Only read.
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
HWY_EXPORT(Lanes);
HWY_EXPORT(Bytes);
HWY_EXPORT(Make);
HWY_EXPORT(ImplicitBytesOf);
HWY_EXPORT(MakeImplicitOf);

void DoubleLanes(Tier tier, const NormalizationSpec& spec, const int64_t* members, int64_t count, Scratch* scratch,
                 NormalizationTally* tally) {
  HWY_DYNAMIC_DISPATCH(Lanes)(tier, spec, members, count, scratch, tally);
}
int64_t DoubleForwardBytes(Tier tier, const NormalizationSpec& spec) { return HWY_DYNAMIC_DISPATCH(Bytes)(tier, spec); }
MatrixSolver* MakeDoubleForward(Tier tier, const NormalizationSpec& spec, void* memory, double* plan_copy) {
  return HWY_DYNAMIC_DISPATCH(Make)(tier, spec, memory, plan_copy);
}
int64_t ImplicitBytes(const NormalizationSpec& spec) { return HWY_DYNAMIC_DISPATCH(ImplicitBytesOf)(spec); }
MatrixSolver* MakeImplicit(const NormalizationSpec& spec, void* memory, const double* plan) {
  return HWY_DYNAMIC_DISPATCH(MakeImplicitOf)(spec, memory, plan);
}

}  // namespace normalization
}  // namespace cpu
}  // namespace sinkhorn
#endif  // HWY_ONCE
