// Plain Highway loops with enough independent accumulators to hide latency.
#include "tests/bench/ceilings.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/bench/ceilings.cc"
#include "hwy/foreach_target.h"
// After foreach_target.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::bench {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr int kChains = 12;  // Two units of latency 4, and some to spare.

// Each returns a number that depends on all the work, so that none can be left out.
float FmaLoop(int64_t rounds, float seed, int64_t* operations) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  const V factor = hn::Set(d, 0.999f), add = hn::Set(d, seed);
  V a = add, b = factor, c = add, e = factor, f = add, g = factor, h = add, i = factor, j = add, k = factor, l = add,
    m = factor;
  for (int64_t r = 0; r < rounds; ++r) {
    a = hn::MulAdd(a, factor, add), b = hn::MulAdd(b, factor, add), c = hn::MulAdd(c, factor, add);
    e = hn::MulAdd(e, factor, add), f = hn::MulAdd(f, factor, add), g = hn::MulAdd(g, factor, add);
    h = hn::MulAdd(h, factor, add), i = hn::MulAdd(i, factor, add), j = hn::MulAdd(j, factor, add);
    k = hn::MulAdd(k, factor, add), l = hn::MulAdd(l, factor, add), m = hn::MulAdd(m, factor, add);
  }
  *operations = rounds * kChains * static_cast<int64_t>(hn::Lanes(d));
  const V sum = hn::Add(hn::Add(hn::Add(a, b), hn::Add(c, e)), hn::Add(hn::Add(f, g), hn::Add(h, i)));
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(sum, hn::Add(hn::Add(j, k), hn::Add(l, m)))));
}

// 2^x of every element of a small array: split off the integer, polynomial of degree 5, scale by
// adding to the exponent bits.
float ExpLoop(int64_t rounds, float seed, int64_t* operations) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  using V = hn::Vec<decltype(d)>;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  constexpr int kCount = 1024;
  HWY_ALIGN float in[kCount];
  for (int i = 0; i < kCount; ++i) in[i] = seed - 0.01f * static_cast<float>(i);
  [[maybe_unused]] const V magic = hn::Set(d, 12582912.0f);  // 1.5 * 2^23
  V sum0 = hn::Zero(d), sum1 = sum0, sum2 = sum0, sum3 = sum0;
  const auto exp2 = [&](const V x) HWY_ATTR {
#if HWY_TARGET <= HWY_AVX3
    const V t{_mm512_reduce_ps(x.raw, _MM_FROUND_TO_NEG_INF)};
#else
    const V shifted = hn::Add(x, magic);  // The integer nearest to x is in its low bits.
    const V t = hn::Sub(x, hn::Sub(shifted, magic));
#endif
    V p = hn::MulAdd(hn::Set(d, 1.339887440e-3f), t, hn::Set(d, 9.618437357e-3f));
    p = hn::MulAdd(p, t, hn::Set(d, 5.550332471e-2f));
    p = hn::MulAdd(p, t, hn::Set(d, 2.402264791e-1f));
    p = hn::MulAdd(p, t, hn::Set(d, 6.931472028e-1f));
    p = hn::MulAdd(p, t, hn::Set(d, 1.0f));
#if HWY_TARGET <= HWY_AVX3
    return V{_mm512_maskz_scalef_ps(0xFFFF, p.raw, x.raw)};
#else
    return hn::BitCast(d, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(hn::BitCast(di, shifted))));
#endif
  };
  for (int64_t r = 0; r < rounds; ++r) {
    for (int64_t i = 0; i < kCount; i += 4 * lanes) {
      sum0 = hn::Add(sum0, exp2(hn::Load(d, in + i)));
      sum1 = hn::Add(sum1, exp2(hn::Load(d, in + i + lanes)));
      sum2 = hn::Add(sum2, exp2(hn::Load(d, in + i + 2 * lanes)));
      sum3 = hn::Add(sum3, exp2(hn::Load(d, in + i + 3 * lanes)));
    }
    in[r % kCount] += 1e-6f;
  }
  *operations = rounds * kCount;
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3))));
}

float ReadLoop(int64_t rounds, const float* data, int64_t count) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  hn::Vec<decltype(d)> s[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
  for (int64_t r = 0; r < rounds; ++r) {
    for (int64_t i = 0; i < count; i += 4 * lanes) {
      s[0] = hn::Add(s[0], hn::Load(d, data + i));
      s[1] = hn::Add(s[1], hn::Load(d, data + i + lanes));
      s[2] = hn::Add(s[2], hn::Load(d, data + i + 2 * lanes));
      s[3] = hn::Add(s[3], hn::Load(d, data + i + 3 * lanes));
    }
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s[0], s[1]), hn::Add(s[2], s[3]))));
}

}  // namespace HWY_NAMESPACE
}  // namespace sinkhorn::bench
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sinkhorn::bench {
namespace {

HWY_EXPORT(FmaLoop);
HWY_EXPORT(ExpLoop);
HWY_EXPORT(ReadLoop);

using SteadyClock = std::chrono::steady_clock;
volatile float sink;

// Best rate of several runs of `work` (which returns its operations) on `threads` threads at once.
template <typename Work>
double Rate(int threads, const Work& work) {
  double best = 0;
  for (int run = 0; run < 7; ++run) {
    std::vector<int64_t> operations(threads, 0);
    std::vector<std::thread> pool;
    const SteadyClock::time_point start = SteadyClock::now();
    for (int t = 0; t < threads; ++t) pool.emplace_back([&, t] { operations[t] = work(t); });
    for (std::thread& thread : pool) thread.join();
    const double seconds = std::chrono::duration<double>(SteadyClock::now() - start).count();
    int64_t total = 0;
    for (int64_t count : operations) total += count;
    best = std::max(best, static_cast<double>(total) / seconds);
  }
  return best;
}

}  // namespace

double FmaRate(int threads) {
  return Rate(threads, [](int thread) {
    int64_t operations = 0;
    sink = HWY_DYNAMIC_DISPATCH(FmaLoop)(4000000, 1.0f + static_cast<float>(thread), &operations);
    return operations;
  });
}

double ExpRate(int threads) {
  return Rate(threads, [](int thread) {
    int64_t operations = 0;
    sink = HWY_DYNAMIC_DISPATCH(ExpLoop)(100000, 1.0f + static_cast<float>(thread), &operations);
    return operations;
  });
}

double ReadRate(int threads, int64_t bytes) {
  constexpr int64_t kStep = 1024;  // Floats; a multiple of what a turn of the loop reads.
  const int64_t count = std::max<int64_t>(bytes / threads / (4 * kStep), 1) * kStep;
  const int64_t rounds = std::max<int64_t>((int64_t{256} << 20) / (4 * count), 1);
  std::vector<float*> data(threads);
  for (float*& part : data) {
    part = static_cast<float*>(std::aligned_alloc(128, 4 * count));
    std::fill(part, part + count, 1.0f);
  }
  const double rate = Rate(threads, [&](int thread) {
    sink = HWY_DYNAMIC_DISPATCH(ReadLoop)(rounds, data[thread], count);
    return rounds * count * 4;
  });
  for (float* part : data) std::free(part);
  return rate;
}

}  // namespace sinkhorn::bench
#endif  // HWY_ONCE
