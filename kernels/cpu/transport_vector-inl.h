// What the loops of transport share: register tiles, vectors of a block's columns, conversions.
#if defined(SINKHORN_KERNELS_CPU_TRANSPORT_VECTOR_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SINKHORN_KERNELS_CPU_TRANSPORT_VECTOR_INL_H_
#undef SINKHORN_KERNELS_CPU_TRANSPORT_VECTOR_INL_H_
#else
#define SINKHORN_KERNELS_CPU_TRANSPORT_VECTOR_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "kernels/cpu/transport_kernels.h"

#ifndef SINKHORN_UNROLL
#define SINKHORN_UNROLL _Pragma("GCC unroll 8")
#endif

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Register rows per pass: AVX-512 has 32 registers, the others 16.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET >= HWY_SSSE3
constexpr int kTileRows = 4;
#else
constexpr int kTileRows = 8;
#endif
constexpr int64_t kFloatColumns = 4096;  // Columns that a sum in T spans before it goes to double.

template <typename TE>
using TagOf = hn::CappedTag<TE, 16>;  // At most half a column pad.

// Where the columns from j on begin in row 0 of a block; row r is r * kTile further. A product where it can be one: the
// inner loops have little time for addresses.
template <class D>
HWY_INLINE int64_t ColumnIndex(D d, int64_t j) {
  return hn::Lanes(d) == kTile ? j * kRowBlock : BlockIndex(0, j);
}

// Between the types of exponents, densities and doubles, lane by lane.
template <class D, class V>
HWY_INLINE hn::Vec<D> Convert(D d, V v) {
  if constexpr (sizeof(hn::TFromD<D>) < sizeof(hn::TFromV<V>)) {
    return hn::DemoteTo(d, v);
  } else if constexpr (sizeof(hn::TFromD<D>) > sizeof(hn::TFromV<V>)) {
    return hn::PromoteTo(d, v);
  } else {
    return v;
  }
}

}  // namespace sinkhorn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // SINKHORN_KERNELS_CPU_TRANSPORT_VECTOR_INL_H_
