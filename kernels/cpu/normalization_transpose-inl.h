// Transposition of squares of vectors, in registers and between registers and memory.
#if defined(SINKHORN_KERNELS_CPU_NORMALIZATION_TRANSPOSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SINKHORN_KERNELS_CPU_NORMALIZATION_TRANSPOSE_INL_H_
#undef SINKHORN_KERNELS_CPU_NORMALIZATION_TRANSPOSE_INL_H_
#else
#define SINKHORN_KERNELS_CPU_NORMALIZATION_TRANSPOSE_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::cpu::normalization::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#undef SINKHORN_UNROLLED
#define SINKHORN_UNROLLED HWY_UNROLL(16)

#if HWY_TARGET == HWY_SCALAR
template <class D, class V>
HWY_INLINE void Transpose(D, V*) {}
#else
// (a, b) -> the lower and the upper halves of their 128-bit blocks, interleaved element by element.
template <class D, class V>
HWY_INLINE void Interleave(D d, V& a, V& b) {
  const V lower = hn::InterleaveLower(d, a, b);
  b = hn::InterleaveUpper(d, a, b);
  a = lower;
}

// Transposes the blocks of v[0], v[stride], ...: as many vectors as a vector has blocks.
template <class D, class V>
HWY_INLINE void TransposeBlocks(D d, V* v, int stride) {
  constexpr int kBlocks = static_cast<int>(hn::MaxLanes(D()) * sizeof(hn::TFromD<D>) / 16);
  if constexpr (kBlocks == 2) {
    const V a = v[0], b = v[stride];
    v[0] = hn::ConcatLowerLower(d, b, a);
    v[stride] = hn::ConcatUpperUpper(d, b, a);
  } else if constexpr (kBlocks == 4) {
    const V a = v[0], b = v[stride], c = v[2 * stride], e = v[3 * stride];
    const V ab_even = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(b), a);
    const V ab_odd = hn::OddEvenBlocks(b, hn::SwapAdjacentBlocks(a));
    const V ce_even = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(e), c);
    const V ce_odd = hn::OddEvenBlocks(e, hn::SwapAdjacentBlocks(c));
    v[0] = hn::ConcatLowerLower(d, ce_even, ab_even);
    v[stride] = hn::ConcatLowerLower(d, ce_odd, ab_odd);
    v[2 * stride] = hn::ConcatUpperUpper(d, ce_even, ab_even);
    v[3 * stride] = hn::ConcatUpperUpper(d, ce_odd, ab_odd);
  } else {
    static_assert(kBlocks == 1, "vectors of 128 to 512 bits");
  }
}

// Transposes each block of v[0], v[1], ...: as many vectors as a block has lanes.
template <class D, class V>
HWY_INLINE void TransposeWithinBlocks(D d, V* v) {
  Interleave(d, v[0], v[1]);
  if constexpr (sizeof(hn::TFromD<D>) == 4) {
    Interleave(d, v[2], v[3]);
    const hn::Repartition<double, D> d64;
    auto a = hn::BitCast(d64, v[0]), b = hn::BitCast(d64, v[2]);
    auto c = hn::BitCast(d64, v[1]), e = hn::BitCast(d64, v[3]);
    Interleave(d64, a, b);
    Interleave(d64, c, e);
    v[0] = hn::BitCast(d, a);
    v[1] = hn::BitCast(d, b);
    v[2] = hn::BitCast(d, c);
    v[3] = hn::BitCast(d, e);
  }
}

// v: as many vectors as lanes. After it, lane l of v[k] is what lane k of v[l] was.
template <class D, class V>
HWY_INLINE void Transpose(D d, V* v) {
  constexpr int kL = static_cast<int>(hn::MaxLanes(D()));
  constexpr int kPerBlock = 16 / sizeof(hn::TFromD<D>);
  SINKHORN_UNROLLED for (int q = 0; q < kL; q += kPerBlock) TransposeWithinBlocks(d, v + q);
  // v[q + k], block b: column b * kPerBlock + k of rows q .. q + kPerBlock - 1.
  SINKHORN_UNROLLED for (int k = 0; k < kPerBlock; ++k) TransposeBlocks(d, v + k, kPerBlock);
}

// 128-bit blocks from places `stride` apart: half of a transposition that shuffles nothing.
template <class D, class T = hn::TFromD<D> >
HWY_INLINE hn::Vec<D> LoadBlocks(D d, const T* from, int64_t stride) {
  constexpr int kBlocks = static_cast<int>(hn::MaxLanes(D()) * sizeof(T) / 16);
  if constexpr (kBlocks == 1) {
    return hn::LoadU(d, from);
  } else {
    const hn::Half<D> half;
    return hn::Combine(d, LoadBlocks(half, from + kBlocks / 2 * stride, stride), LoadBlocks(half, from, stride));
  }
}

// A square of `from`, `stride` between its rows: lane l of v[k] is from[l * stride + k]. And back.
template <class D, class V, class T = hn::TFromD<D> >
HWY_INLINE void LoadTransposed(D d, const T* from, int64_t stride, V* v) {
  constexpr int kL = static_cast<int>(hn::MaxLanes(D())), kPerBlock = 16 / sizeof(T);
  SINKHORN_UNROLLED for (int q = 0; q < kL; q += kPerBlock) {
    SINKHORN_UNROLLED for (int k = 0; k < kPerBlock; ++k) {
      v[q + k] = LoadBlocks(d, from + k * stride + q, kPerBlock * stride);
    }
    TransposeWithinBlocks(d, v + q);
  }
}
template <class D, class V, class T = hn::TFromD<D> >
HWY_INLINE void StoreTransposed(D d, V* v, T* to, int64_t stride) {
  // Not block by block: parts of a line cost a store each, and a shuffle too.
  constexpr int kL = static_cast<int>(hn::MaxLanes(D()));
  Transpose(d, v);
  SINKHORN_UNROLLED for (int k = 0; k < kL; ++k) hn::StoreU(v[k], d, to + k * stride);
}
#endif

}  // namespace sinkhorn::cpu::normalization::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // SINKHORN_KERNELS_CPU_NORMALIZATION_TRANSPOSE_INL_H_
