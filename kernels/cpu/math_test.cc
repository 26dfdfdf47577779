// Errors of math-inl.h against the C library in long double, on every target that this machine runs.
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/math_test.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::cpu::HWY_NAMESPACE {

// y = ExpInRange(x).
void ApplyInRange(const float* x, int64_t count, float* y) {
  const hn::ScalableTag<float> d;
  for (int64_t i = 0; i < count; i += static_cast<int64_t>(hn::Lanes(d))) {
    hn::StoreU(ExpInRange(d, hn::LoadU(d, x + i)), d, y + i);
  }
}

// y = function(x) over whole vectors. REQUIRES: count a multiple of 64.
template <class T>
void Apply(const char* name, const T* x, int64_t count, T* y) {
  const hn::ScalableTag<T> d;
  const std::string function = name;
  for (int64_t i = 0; i < count; i += static_cast<int64_t>(hn::Lanes(d))) {
    const auto v = hn::LoadU(d, x + i);
    const auto result = function == "Exp2"          ? Exp2(d, v)
                        : function == "Exp2Bounded" ? Exp2Bounded(d, v)
                        : function == "Exp"         ? Exp(d, v)
                        : function == "ExpBounded"  ? ExpBounded(d, v)
                        : function == "Log2"        ? Log2(d, v)
                        : function == "Log"         ? Log(d, v)
                                                    : Reciprocal(d, v);
    hn::StoreU(result, d, y + i);
  }
}
void ApplyFloat(const char* name, const float* x, int64_t count, float* y) { Apply(name, x, count, y); }
void ApplyDouble(const char* name, const double* x, int64_t count, double* y) { Apply(name, x, count, y); }

}  // namespace sinkhorn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sinkhorn::cpu {
namespace {

HWY_EXPORT(ApplyFloat);
HWY_EXPORT(ApplyDouble);
HWY_EXPORT(ApplyInRange);
void Apply(const char* name, const float* x, int64_t count, float* y) {
  HWY_DYNAMIC_DISPATCH(ApplyFloat)(name, x, count, y);
}
void Apply(const char* name, const double* x, int64_t count, double* y) {
  HWY_DYNAMIC_DISPATCH(ApplyDouble)(name, x, count, y);
}

long double Exact(const std::string& name, long double x) {
  if (name == "Exp2" || name == "Exp2Bounded") return std::exp2(x);
  if (name == "Exp" || name == "ExpBounded") return std::exp(x);
  if (name == "Log2") return std::log2(x);
  if (name == "Log") return std::log(x);
  return 1 / x;
}

// Largest relative error over an even grid of [lo, hi] and a logarithmic one around 1.
template <class T>
double LargestError(const char* name, T lo, T hi) {
  constexpr int64_t kCount = 1 << 17;
  std::vector<T> x(kCount), y(kCount);
  for (int64_t i = 0; i < kCount; ++i) {
    x[i] = lo + (hi - lo) * static_cast<T>(i) / (kCount - 1);
    const T near_one = 1 + std::exp2(T(-1) - static_cast<T>(i % 4096) / 220) * (i % 8192 < 4096 ? 1 : -1);
    if (i % 2 && lo <= near_one && near_one <= hi) x[i] = near_one;
  }
  Apply(name, x.data(), kCount, y.data());
  double largest = 0;
  for (int64_t i = 0; i < kCount; ++i) {
    const long double exact = Exact(name, x[i]);
    const double error = exact == 0 ? std::abs(y[i]) : static_cast<double>(std::abs((y[i] - exact) / exact));
    if (!(error <= largest)) largest = error;  // NaN too.
  }
  return largest;
}

// Runs `body` once per target.
template <class Body>
void OnEveryTarget(Body body) {
  for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    SCOPED_TRACE(hwy::TargetName(target));
    body();
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

TEST(Math, ErrorsAreAsStated) {
  OnEveryTarget([] {
    for (const char* name : {"Exp2", "Exp2Bounded"}) {
      EXPECT_LT(LargestError<float>(name, -125.99f, 127.9f), 2e-7) << name;
      EXPECT_LT(LargestError<double>(name, -1021.9, 1023.9), 5e-16) << name;
      EXPECT_LT(LargestError<double>(name, -2, 2), 5e-16) << name;
    }
    for (const char* name : {"Exp", "ExpBounded"}) {
      EXPECT_LT(LargestError<float>(name, -87.3f, 88.6f), 2e-7) << name;
      EXPECT_LT(LargestError<double>(name, -708, 709), 5e-16) << name;
      EXPECT_LT(LargestError<double>(name, -2, 2), 5e-16) << name;
    }
    for (const char* name : {"Log2", "Log"}) {
      for (double top : {2.0, 1e3, 1e30}) {
        EXPECT_LT(LargestError<float>(name, 1e-3f, static_cast<float>(top)), 2e-7) << name;
        EXPECT_LT(LargestError<double>(name, 1e-3, top), 5e-16) << name;
      }
      EXPECT_LT(LargestError<float>(name, 1.2e-38f, 1e-37f), 2e-7) << name;
      EXPECT_LT(LargestError<double>(name, 2.3e-308, 1e-306), 5e-16) << name;
    }
    EXPECT_LT(LargestError<float>("Reciprocal", 1e-37f, 1e37f), 1.2e-7);
    EXPECT_LT(LargestError<float>("Reciprocal", .5f, 4.f), 1.2e-7);
    EXPECT_LT(LargestError<double>("Reciprocal", .5, 4), 2.3e-16);
  });
}

TEST(Math, ExpInRangeIsAsStated) {
  OnEveryTarget([] {
    constexpr int64_t kCount = 1 << 16;
    std::vector<float> x(kCount), y(kCount);
    for (int64_t i = 0; i < kCount; ++i) x[i] = 85 * (2 * static_cast<float>(i) / kCount - 1);
    HWY_DYNAMIC_DISPATCH(ApplyInRange)(x.data(), kCount, y.data());
    const double per_unit = (hwy::SupportedTargets() & (HWY_AVX2 | HWY_AVX3)) != 0 ? 2e-8 : 8e-8;
    for (int64_t i = 0; i < kCount; ++i) {
      const double exact = std::exp(static_cast<double>(x[i]));
      ASSERT_NEAR(y[i] / exact, 1, 2e-7 + per_unit * std::abs(x[i])) << x[i];
    }
  });
}

template <class T>
std::vector<T> Values(const char* name, std::vector<T> x) {
  const size_t count = x.size();
  x.resize(64);
  std::vector<T> y(64);
  Apply(name, x.data(), 64, y.data());
  y.resize(count);
  return y;
}

template <class T>
void CheckEdges() {
  const T infinity = std::numeric_limits<T>::infinity(), nan = std::numeric_limits<T>::quiet_NaN();
  const T big = sizeof(T) == 4 ? T(1e30) : T(1e300);
  for (const char* name : {"Exp2", "Exp2Bounded", "Exp", "ExpBounded"}) {
    const std::vector<T> y = Values<T>(name, {0, -big, -infinity, nan, sizeof(T) == 4 ? T(-200) : T(-1200)});
    EXPECT_EQ(y[0], 1) << name;
    EXPECT_EQ(y[1], 0) << name;
    EXPECT_EQ(y[2], 0) << name;
    EXPECT_TRUE(std::isnan(y[3])) << name;
    EXPECT_EQ(y[4], 0) << name;
  }
  for (const char* name : {"Exp2", "Exp"}) {
    const std::vector<T> y = Values<T>(name, {big, infinity});
    EXPECT_GT(y[0], std::numeric_limits<T>::max() / 2) << name;
    EXPECT_GT(y[1], std::numeric_limits<T>::max() / 2) << name;
  }
  for (const char* name : {"Log2", "Log"}) {
    const std::vector<T> y = Values<T>(name, {0, 1});
    EXPECT_EQ(y[0], -infinity) << name;
    EXPECT_EQ(y[1], 0) << name;
  }
}
TEST(Math, Edges) {
  OnEveryTarget([] {
    CheckEdges<float>();
    CheckEdges<double>();
  });
}

}  // namespace
}  // namespace sinkhorn::cpu
#endif  // HWY_ONCE
