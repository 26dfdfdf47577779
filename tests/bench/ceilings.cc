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

#undef UNROLLED
#define UNROLLED HWY_UNROLL(12)

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::bench {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr int kChains = 12;  // Two units of latency 4, and some to spare.

// Each returns a number that depends on all the work, so that none can be left out.
float FmaLoop(int64_t rounds, float seed, int64_t* operations) {
  const hn::ScalableTag<float> d;
  const auto factor = hn::Set(d, 0.999f), add = hn::Set(d, seed);
  // Each begins with a number of its own: the compiler makes one chain of two that it knows to be equal.
  hn::Vec<decltype(d)> chain[kChains];
  UNROLLED for (int c = 0; c < kChains; ++c) chain[c] = hn::Set(d, seed + static_cast<float>(c));
  for (int64_t r = 0; r < rounds; ++r) {
    UNROLLED for (int c = 0; c < kChains; ++c) chain[c] = hn::MulAdd(chain[c], factor, add);
  }
  *operations = rounds * kChains * static_cast<int64_t>(hn::Lanes(d));
  UNROLLED for (int c = 1; c < kChains; ++c) chain[0] = hn::Add(chain[0], chain[c]);
  return hn::GetLane(hn::SumOfLanes(d, chain[0]));
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
  constexpr int kSums = 8;  // Two additions of latency 4 at a time.
  hn::Vec<decltype(d)> sum[kSums];
  UNROLLED for (int c = 0; c < kSums; ++c) sum[c] = hn::Zero(d);
  for (int64_t r = 0; r < rounds; ++r) {
    for (int64_t i = 0; i < count; i += kSums * lanes) {
      UNROLLED for (int c = 0; c < kSums; ++c) sum[c] = hn::Add(sum[c], hn::Load(d, data + i + c * lanes));
    }
  }
  UNROLLED for (int c = 1; c < kSums; ++c) sum[0] = hn::Add(sum[0], sum[c]);
  return hn::GetLane(hn::SumOfLanes(d, sum[0]));
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
