// Exponentials, logarithms and reciprocals for every Highway target, float and double, as short polynomials.
//
//   function       float: rel. error   double     domain
//   Exp2, Exp      2e-7                5e-16      any; 2^x is 0 for x < -126 (-1022), saturates for x > 127.99 (1023.9)
//   Exp2Bounded,   2e-7                5e-16      x < 128 (1024): no upper clamp; any lower bound
//     ExpBounded
//   ExpInRange     2e-7 + 2e-8 |x|                |x| <= 85; anything may come out beyond; 8e-8 |x| where multiplying
//                                                 and adding round apart (the scalar fallback)
//   Log2, Log      2e-7                5e-16      normal x > 0; 0 gives -inf
//   Reciprocal     1.2e-7              2.3e-16    normal |x| whose reciprocal is normal; 0 may give inf or NaN
//
// Exp2(0) = Exp(0) = 1 exactly. NaN stays NaN. Errors are checked by math_test.cc on every target that the machine
// runs. Include it after hwy/highway.h, inside foreach_target translation units.
#if defined(SINKHORN_KERNELS_CPU_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SINKHORN_KERNELS_CPU_MATH_INL_H_
#undef SINKHORN_KERNELS_CPU_MATH_INL_H_
#else
#define SINKHORN_KERNELS_CPU_MATH_INL_H_
#endif

#include <cstdint>
#include <limits>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// ---- Per type: limits and coefficients (minimax, Remez and Lawson in 50 digits) -------------------------------------
template <class T>
struct MathTraits;

template <>
struct MathTraits<float> {
  static constexpr float kExp2Min = -126.0f, kExp2Max = 127.99999f;
  static constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer.
  static constexpr int kMantissaBits = 23;
  static constexpr float kLog2EHigh = 1.44269502f, kLog2ELow = 1.92596303e-8f;
  static constexpr float kLn2High = 0.693145752f, kLn2Low = 1.42860677e-6f;  // High: 15 bits, so e * high is exact.
  static constexpr int32_t kSqrtHalfBits = 0x3f3504f3;
};
template <>
struct MathTraits<double> {
  static constexpr double kExp2Min = -1022.0, kExp2Max = 1023.9999999999999;
  static constexpr double kRounder = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr int kMantissaBits = 52;
  static constexpr double kLog2EHigh = 1.4426950408889634, kLog2ELow = 2.0355273740931033e-17;
  static constexpr double kLn2High = 0.69314718036912382, kLn2Low = 1.9082149292705877e-10;  // High: 33 bits.
  static constexpr int64_t kSqrtHalfBits = 0x3fe6a09e667f3bcd;
};

// 2^f for |f| <= 1/2: error 9e-8 with degree 5, 2e-17 with degree 11.
template <class D, class V = hn::Vec<D>, hwy::EnableIf<sizeof(hn::TFromD<D>) == 4>* = nullptr>
HWY_INLINE V Exp2Fraction(D d, V f) {
  V p = hn::MulAdd(f, hn::Set(d, 0.00132647950664f), hn::Set(d, 0.00967153783762f));
  p = hn::MulAdd(f, p, hn::Set(d, 0.0555073381927f));
  p = hn::MulAdd(f, p, hn::Set(d, 0.24022241712f));
  p = hn::MulAdd(f, p, hn::Set(d, 0.69314697741f));
  return hn::MulAdd(f, p, hn::Set(d, 1.0f));
}
template <class D, class V = hn::Vec<D>, hwy::EnableIf<sizeof(hn::TFromD<D>) == 8>* = nullptr>
HWY_INLINE V Exp2Fraction(D d, V f) {
  V p = hn::MulAdd(f, hn::Set(d, 4.0780685971094703479e-10), hn::Set(d, 7.0725704431105194828e-9));
  p = hn::MulAdd(f, p, hn::Set(d, 1.018064768355999675e-7));
  p = hn::MulAdd(f, p, hn::Set(d, 1.3215442675167652616e-6));
  p = hn::MulAdd(f, p, hn::Set(d, 1.5252727385128833615e-5));
  p = hn::MulAdd(f, p, hn::Set(d, 1.5403530441572405576e-4));
  p = hn::MulAdd(f, p, hn::Set(d, 0.0013333558153440041128));
  p = hn::MulAdd(f, p, hn::Set(d, 0.0096181291076070022245));
  p = hn::MulAdd(f, p, hn::Set(d, 0.055504108664790394186));
  p = hn::MulAdd(f, p, hn::Set(d, 0.24022650695910098007));
  p = hn::MulAdd(f, p, hn::Set(d, 0.69314718055994569676));
  return hn::MulAdd(f, p, hn::Set(d, 1.0));
}

// ScaleByPower: x * 2^n, zero where x_log2 < min. RoundedReciprocal14: 1 / x to 2^-14.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
#define SINKHORN_MATH_SCALE(V, PREFIX, SUFFIX)                                                                         \
  HWY_INLINE V ScaleByPower(V x, V n, V x_log2, V min) {                                                               \
    return V{                                                                                                          \
        PREFIX##_maskz_scalef_##SUFFIX(PREFIX##_cmp_##SUFFIX##_mask(x_log2.raw, min.raw, _CMP_NLT_UQ), x.raw, n.raw)}; \
  }                                                                                                                    \
  HWY_INLINE V RoundedReciprocal14(V x) { return V{PREFIX##_rcp14_##SUFFIX(x.raw)}; }
SINKHORN_MATH_SCALE(hn::Vec512<float>, _mm512, ps)
SINKHORN_MATH_SCALE(hn::Vec512<double>, _mm512, pd)
SINKHORN_MATH_SCALE(hn::Vec256<float>, _mm256, ps)
SINKHORN_MATH_SCALE(hn::Vec256<double>, _mm256, pd)
SINKHORN_MATH_SCALE(hn::Vec128<float>, _mm, ps)
SINKHORN_MATH_SCALE(hn::Vec128<double>, _mm, pd)
#undef SINKHORN_MATH_SCALE

// 2^(n + f), n the integer nearest to x_log2 and f = fraction(n), |f| <= 1/2.
template <class D, class V, class Fraction>
HWY_INLINE V Exp2Parts(D d, V x_log2, Fraction fraction) {
  const V n = hn::Round(x_log2);
  return ScaleByPower(Exp2Fraction(d, fraction(n)), n, x_log2, hn::Set(d, MathTraits<hn::TFromD<D>>::kExp2Min));
}
#else
template <class D, class V, class Fraction>
HWY_INLINE V Exp2Parts(D d, V x_log2, Fraction fraction) {
  using Traits = MathTraits<hn::TFromD<D>>;
  const hn::RebindToUnsigned<D> du;
  const V rounder = hn::Set(d, Traits::kRounder);
  // Where x is far below the minimum the rounding trick fails; the result is masked there.
  const V shifted = hn::Add(x_log2, rounder);
  const V p = Exp2Fraction(d, fraction(hn::Sub(shifted, rounder)));
  const auto exponent = hn::ShiftLeft<Traits::kMantissaBits>(hn::BitCast(du, shifted));
  const V scaled = hn::BitCast(d, hn::Add(hn::BitCast(du, p), exponent));
  const auto flushed = hn::Lt(x_log2, hn::Set(d, Traits::kExp2Min));
  return hn::IfThenZeroElse(flushed, hn::IfThenElse(hn::Eq(x_log2, x_log2), scaled, x_log2));
}
#endif

// 2^x. REQUIRES: x < 128 (double: 1024).
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Exp2Bounded(D d, V x) {
  return Exp2Parts(d, x, [x](V n) HWY_ATTR { return hn::Sub(x, n); });
}
// e^x. REQUIRES: x < 88.7 (double: 709.7).
template <class D, class V = hn::Vec<D>>
HWY_INLINE V ExpBounded(D d, V x) {
  using Traits = MathTraits<hn::TFromD<D>>;
  const V high = hn::Set(d, Traits::kLog2EHigh), low = hn::Set(d, Traits::kLog2ELow);
  return Exp2Parts(d, hn::Mul(x, high), [=](V n) HWY_ATTR {
#if HWY_NATIVE_FMA
    return hn::MulAdd(x, low, hn::MulSub(x, high, n));
#else  // Without FMA x * high is not exact, but n * ln2_high is.
    (void)low;
    const V ln2_high = hn::Set(d, Traits::kLn2High), ln2_low = hn::Set(d, Traits::kLn2Low);
    return hn::Mul(high, hn::Sub(hn::Sub(x, hn::Mul(n, ln2_high)), hn::Mul(n, ln2_low)));
#endif
  });
}

// e^x in ten operations, for loops that exponentials dominate.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V ExpInRange(D d, V x) {
  using Traits = MathTraits<float>;
  const hn::RebindToUnsigned<D> du;
  const V high = hn::Set(d, Traits::kLog2EHigh), rounder = hn::Set(d, Traits::kRounder);
  const V shifted = hn::MulAdd(x, high, rounder);
  const V p = Exp2Fraction(d, hn::MulSub(x, high, hn::Sub(shifted, rounder)));
  const auto exponent = hn::ShiftLeft<Traits::kMantissaBits>(hn::BitCast(du, shifted));
  return hn::BitCast(d, hn::Add(hn::BitCast(du, p), exponent));
}

// min(x, cap), NaN where x is.
template <class V>
HWY_INLINE V Capped(V x, V cap) {
#if HWY_TARGET == HWY_SCALAR
  return hn::IfThenElse(hn::Gt(x, cap), cap, x);
#else
  return hn::Min(cap, x);  // The second operand where one is NaN.
#endif
}
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Exp2(D d, V x) {
  return Exp2Bounded(d, Capped(x, hn::Set(d, MathTraits<hn::TFromD<D>>::kExp2Max)));
}
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Exp(D d, V x) {
  using T = hn::TFromD<D>;
  return ExpBounded(d, Capped(x, hn::Set(d, sizeof(T) == 4 ? T(88.72283) : T(709.782712893383))));
}

// log(1 + f) for 1 + f in [sqrt(1/2), sqrt(2)].
template <class D, class V = hn::Vec<D>, hwy::EnableIf<sizeof(hn::TFromD<D>) == 4>* = nullptr>
HWY_INLINE V Log1pReduced(D d, V f) {
  V q = hn::MulAdd(f, hn::Set(d, -0.07644977255f), hn::Set(d, 0.1292193716f));
  q = hn::MulAdd(f, q, hn::Set(d, -0.1324271982f));
  q = hn::MulAdd(f, q, hn::Set(d, 0.1417925629f));
  q = hn::MulAdd(f, q, hn::Set(d, -0.1660879579f));
  q = hn::MulAdd(f, q, hn::Set(d, 0.2000208779f));
  q = hn::MulAdd(f, q, hn::Set(d, -0.2500159848f));
  q = hn::MulAdd(f, q, hn::Set(d, 0.3333332423f));
  q = hn::MulAdd(f, q, hn::Set(d, -0.4999998817f));
  return hn::MulAdd(hn::Mul(f, f), q, f);
}
template <class D, class V = hn::Vec<D>, hwy::EnableIf<sizeof(hn::TFromD<D>) == 8>* = nullptr>
HWY_INLINE V Log1pReduced(D d, V f) {
  // 2 atanh(s), s = f / (2 + f); the leading term is taken as f - f^2/2 + s f^2/2 so that the division's rounding is
  // small.
  const V s = hn::Div(f, hn::Add(f, hn::Set(d, 2.0)));
  const V z = hn::Mul(s, s);
  V q = hn::MulAdd(z, hn::Set(d, 0.14795949569210827784), hn::Set(d, 0.15314050569389625568));
  q = hn::MulAdd(z, q, hn::Set(d, 0.18183564325236903875));
  q = hn::MulAdd(z, q, hn::Set(d, 0.22222198573206726798));
  q = hn::MulAdd(z, q, hn::Set(d, 0.28571428742387339071));
  q = hn::MulAdd(z, q, hn::Set(d, 0.3999999999941468003));
  q = hn::MulAdd(z, q, hn::Set(d, 0.66666666666667344119));
  const V half_square = hn::Mul(hn::Mul(f, f), hn::Set(d, 0.5));
  return hn::Sub(f, hn::NegMulAdd(s, hn::MulAdd(z, q, half_square), half_square));
}

// x = 2^exponent * (1 + fraction), 1 + fraction in [sqrt(1/2), sqrt(2)).
template <class D, class V>
HWY_INLINE void SplitForLog(D d, V x, V* exponent, V* fraction) {
  using Traits = MathTraits<hn::TFromD<D>>;
  const hn::RebindToSigned<D> di;
  const auto root = hn::Set(di, Traits::kSqrtHalfBits);
  const auto one = hn::BitCast(di, hn::Set(d, hn::TFromD<D>(1)));
  const auto bits = hn::Add(hn::BitCast(di, x), hn::Sub(one, root));
  // The biased exponent as a floating-point number, by the rounding constant: it is below 2^12.
  const auto biased = hn::ShiftRight<Traits::kMantissaBits>(hn::BitCast(hn::RebindToUnsigned<D>(), bits));
  const V rounder = hn::Set(d, Traits::kRounder);
  const V biased_float =
      hn::Sub(hn::BitCast(d, hn::Add(hn::BitCast(hn::RebindToUnsigned<D>(), rounder), biased)), rounder);
  *exponent = hn::Sub(biased_float, hn::Set(d, hn::TFromD<D>(sizeof(hn::TFromD<D>) == 4 ? 127 : 1023)));
  const auto mantissa_mask = hn::Set(di, (hwy::MakeSigned<hn::TFromD<D>>{1} << Traits::kMantissaBits) - 1);
  const V reduced = hn::BitCast(d, hn::Add(hn::And(bits, mantissa_mask), root));
  *fraction = hn::Sub(reduced, hn::Set(d, hn::TFromD<D>(1)));
}

// Natural logarithm.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Log(D d, V x) {
  using T = hn::TFromD<D>;
  using Traits = MathTraits<T>;
  V e, f;
  SplitForLog(d, x, &e, &f);
  const V tail = hn::MulAdd(e, hn::Set(d, Traits::kLn2Low), Log1pReduced(d, f));
  const V log = hn::MulAdd(e, hn::Set(d, Traits::kLn2High), tail);
  return hn::IfThenElse(hn::Eq(x, hn::Zero(d)), hn::Set(d, -std::numeric_limits<T>::infinity()), log);
}
// Base 2.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Log2(D d, V x) {
  using T = hn::TFromD<D>;
  using Traits = MathTraits<T>;
  V e, f;
  SplitForLog(d, x, &e, &f);
  const V ln = Log1pReduced(d, f);
  const V log2 = hn::MulAdd(ln, hn::Set(d, Traits::kLog2EHigh), hn::MulAdd(ln, hn::Set(d, Traits::kLog2ELow), e));
  return hn::IfThenElse(hn::Eq(x, hn::Zero(d)), hn::Set(d, -std::numeric_limits<T>::infinity()), log2);
}

// 1 / x to about one unit in the last place: the hardware's estimate and Newton steps, or a division where that is as
// fast.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Reciprocal(D d, V x) {
  const V one = hn::Set(d, hn::TFromD<D>(1));
  V r = RoundedReciprocal14(x);  // 2^-14
  if constexpr (sizeof(hn::TFromD<D>) == 8) {
    const V error = hn::NegMulAdd(x, r, one);
    r = hn::MulAdd(r, hn::MulAdd(error, error, error), r);  // 2^-42
  }
  return hn::MulAdd(r, hn::NegMulAdd(x, r, one), r);
}
#else
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Reciprocal(D d, V x) {
  return hn::Div(hn::Set(d, hn::TFromD<D>(1)), x);
}
#endif

}  // namespace sinkhorn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // SINKHORN_KERNELS_CPU_MATH_INL_H_
