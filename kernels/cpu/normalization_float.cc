// The float32 tier of the normalisation, for every target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/normalization_float.cc"
#include "kernels/cpu/targets.h"
//
#include "hwy/foreach_target.h"
//
#include "hwy/highway.h"
#include "kernels/cpu/normalization_kernels.h"
#include "kernels/cpu/normalization_lanes-inl.h"
#include "kernels/cpu/normalization_linear-inl.h"
#include "kernels/cpu/normalization_squares-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn {
namespace cpu {
namespace normalization {
namespace HWY_NAMESPACE {

void Lanes(const NormalizationSpec& spec, const int64_t* members, int64_t count, Scratch* scratch,
           NormalizationTally* tally) {
#if HWY_TARGET != HWY_SCALAR
  if (IsSquares(spec)) return SolveSquares(spec, members, count, scratch, tally);
#endif
  SolveForwardGroups<LinearSolver<LaneLayout<float>>>(spec, members, count, scratch, tally);
}
int64_t Bytes(const NormalizationSpec& spec) { return SolverBytes<LinearSolver<RowLayout<float>>>(spec); }
MatrixSolver* Make(const NormalizationSpec& spec, void* memory) {
  Arena arena(memory);
  return new LinearSolver<RowLayout<float>>(spec, &arena, MatrixTensor());
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

void FloatLanes(const NormalizationSpec& spec, const int64_t* members, int64_t count, Scratch* scratch,
                NormalizationTally* tally) {
  HWY_DYNAMIC_DISPATCH(Lanes)(spec, members, count, scratch, tally);
}
int64_t FloatForwardBytes(const NormalizationSpec& spec) { return HWY_DYNAMIC_DISPATCH(Bytes)(spec); }
MatrixSolver* MakeFloatForward(const NormalizationSpec& spec, void* memory) {
  return HWY_DYNAMIC_DISPATCH(Make)(spec, memory);
}

}  // namespace normalization
}  // namespace cpu
}  // namespace sinkhorn
#endif  // HWY_ONCE
