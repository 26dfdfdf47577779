// What is done to scalings, sums and potentials between sweeps: O(n), in double.
#if defined(SINKHORN_KERNELS_CPU_TRANSPORT_UPDATES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SINKHORN_KERNELS_CPU_TRANSPORT_UPDATES_INL_H_
#undef SINKHORN_KERNELS_CPU_TRANSPORT_UPDATES_INL_H_
#else
#define SINKHORN_KERNELS_CPU_TRANSPORT_UPDATES_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "kernels/cpu/math-inl.h"
#include "kernels/cpu/transport_vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
double BalancedRows(const double* sums, const T* u, const T* mass, bool keep, T* next, T* weight) {
  const hn::CappedTag<double, 8> d;
  const hn::Rebind<T, hn::CappedTag<double, 8>> dt;
  auto error = hn::Zero(d);
  const auto one = hn::Set(d, 1.0);
  for (size_t r = 0; r < kRowBlock; r += hn::Lanes(d)) {
    const auto s = hn::LoadU(d, sums + r);
    const auto old = hn::LoadU(dt, u + r);
    const auto m = hn::LoadU(dt, mass + r);
    // Rows that only pad have no sum.
    const auto inverse = Convert(dt, hn::Div(one, hn::IfThenElse(hn::Gt(s, hn::Zero(d)), s, one)));
    const auto w = keep ? old : inverse;
    hn::StoreU(inverse, dt, next + r);
    hn::StoreU(hn::IfThenElseZero(hn::Gt(m, hn::Zero(dt)), hn::Mul(m, w)), dt, weight + r);
    error = hn::MulAdd(Convert(d, m), hn::Abs(hn::MulSub(Convert(d, old), s, one)), error);
  }
  return hn::GetLane(hn::SumOfLanes(d, error));
}

template <typename T>
void BalancedColumns(int64_t count, int64_t size, const T* acc, int64_t slots, int64_t stride, const T* mass,
                     double* sums, T* next, T* weight, double* range) {
  const hn::CappedTag<double, 8> d;
  const hn::Rebind<T, hn::CappedTag<double, 8>> dt;
  const int64_t lanes = hn::Lanes(d);
  auto low = hn::Inf(d), high = hn::Zero(d);
  const auto one = hn::Set(d, 1.0);
  for (int64_t j = 0; j < count; j += lanes) {
    auto sum = Convert(d, hn::LoadU(dt, acc + j));
    for (int64_t slot = 1; slot < slots; ++slot) sum = hn::Add(sum, Convert(d, hn::LoadU(dt, acc + slot * stride + j)));
    if (j + lanes > size) sum = hn::IfThenElse(hn::FirstN(d, j < size ? size - j : 0), sum, one);
    hn::StoreU(sum, d, sums + j);
    low = hn::Min(low, sum);
    high = hn::Max(high, sum);
    const auto inverse = Convert(dt, hn::Div(one, sum));
    const auto m = hn::LoadU(dt, mass + j);
    hn::StoreU(inverse, dt, next + j);
    hn::StoreU(hn::IfThenElseZero(hn::Gt(m, hn::Zero(dt)), hn::Mul(m, inverse)), dt, weight + j);
  }
  range[0] = hn::GetLane(hn::MinOfLanes(d, low));
  range[1] = hn::GetLane(hn::MaxOfLanes(d, high));
}

template <typename T>
void Update(int64_t count, const double* sums, const T* u, const double* frame, const double* shift, double damping,
            double relax, T* u_new) {
  if (damping == 1 && relax == 1) {
    for (int64_t i = 0; i < count; ++i) u_new[i] = static_cast<T>(1.0 / sums[i]);
    return;
  }
  const hn::CappedTag<double, 8> d;
  const hn::Rebind<T, hn::CappedTag<double, 8>> dt;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t i = 0; i < count; i += lanes) {
    const auto s = hn::LoadU(d, sums + i);
    const auto f = hn::LoadU(d, frame + i);
    const auto p = hn::LoadU(d, shift + i);
    const auto old = hn::Add(f, Log2(d, Convert(d, hn::LoadU(dt, u + i))));
    const auto half_step = hn::Sub(f, Log2(d, s));
    const auto damped = hn::Sub(hn::Mul(hn::Set(d, damping), hn::Add(half_step, p)), p);
    const auto next = hn::MulAdd(hn::Set(d, relax), hn::Sub(damped, old), old);
    const auto scaling = hn::IfThenElse(hn::Gt(s, hn::Zero(d)), Exp2(d, hn::Sub(next, f)), hn::Inf(d));
    hn::StoreU(Convert(dt, scaling), dt, u_new + i);
  }
}

template <typename T>
void LogScaling(int64_t count, const T* u, const double* frame, double* out) {
  const hn::CappedTag<double, 8> d;
  const hn::Rebind<T, hn::CappedTag<double, 8>> dt;
  for (int64_t i = 0; i < count; i += hn::Lanes(d)) {
    hn::StoreU(hn::Add(hn::LoadU(d, frame + i), Log2(d, Convert(d, hn::LoadU(dt, u + i)))), d, out + i);
  }
}

template <typename T>
bool Within(int64_t count, const T* values, T low, T high) {
  const TagOf<T> d;
  const int64_t lanes = hn::Lanes(d);
  auto in = hn::Eq(hn::Zero(d), hn::Zero(d));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto v = hn::LoadU(d, values + i);
    in = hn::And(in, hn::And(hn::Gt(v, hn::Set(d, low)), hn::Lt(v, hn::Set(d, high))));
  }
  bool all = hn::AllTrue(d, in);
  for (; i < count; ++i) all = all && values[i] > low && values[i] < high;
  return all;
}

template <typename TE, typename T>
void Freeze(int64_t count, int64_t size, const double* potential, TE* term, double* frame, T* scaling) {
  const hn::CappedTag<double, 8> d;
  const hn::Rebind<TE, hn::CappedTag<double, 8>> de;
  const hn::Rebind<T, hn::CappedTag<double, 8>> dt;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t i = 0; i < count; i += lanes) {
    const auto exists = hn::FirstN(d, i < size ? size - i : 0);
    const auto p = hn::IfThenElse(exists, hn::LoadU(d, potential + i), hn::Set(d, kVoid));
    const auto rounded = Convert(de, p);
    const auto f = Convert(d, rounded);
    const auto left = hn::Min(hn::Max(hn::Sub(p, f), hn::Set(d, -100.0)), hn::Set(d, 100.0));
    hn::StoreU(rounded, de, term + i);
    hn::StoreU(hn::IfThenElseZero(exists, f), d, frame + i);
    hn::StoreU(Convert(dt, hn::IfThenElse(exists, Exp2(d, left), hn::Set(d, 1.0))), dt, scaling + i);
  }
}

}  // namespace sinkhorn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // SINKHORN_KERNELS_CPU_TRANSPORT_UPDATES_INL_H_
