// Exponentials of many numbers are Highway's, of as many at once as the processor has room for.
#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/oracle/exponential.cc"
// Those that kernels are compiled for, so that tests by one instruction set are so throughout.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
//
#include "hwy/foreach_target.h"
//
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "tests/oracle/linear_algebra.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::oracle::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Highway's is for finite numbers up to 704. Up to 710 it is as near; from there on infinity, and NaN stays.
template <class D, class V = hn::Vec<D>>
V Exponential(D d, V x) {
  const V within = hn::Max(hn::Min(x, hn::Set(d, 710)), hn::Set(d, -746));
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(d, within));
}

void EachExponential(double* values, int64_t count) {
  const hn::ScalableTag<double> d;
  const int64_t lanes = hn::Lanes(d);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(Exponential(d, hn::LoadU(d, values + i)), d, values + i);
  HWY_ALIGN double rest[hn::MaxLanes(d)] = {};
  std::copy(values + i, values + count, rest);
  hn::Store(Exponential(d, hn::Load(d, rest)), d, rest);
  std::copy(rest, rest + count - i, values + i);
}

}  // namespace sinkhorn::oracle::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sinkhorn::oracle {

HWY_EXPORT(EachExponential);
void Exponentials(double* values, int64_t count) { HWY_DYNAMIC_DISPATCH(EachExponential)(values, count); }

}  // namespace sinkhorn::oracle
#endif
