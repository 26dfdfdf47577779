// What this machine can do: the floors of the tables divide by these rates.
#ifndef SINKHORN_TESTS_BENCH_CEILINGS_H_
#define SINKHORN_TESTS_BENCH_CEILINGS_H_

#include <cstdint>

namespace sinkhorn::bench {

// Of `threads` threads together, the best of several runs: fused multiply-adds of floats per
// second, exponentials (2^x, a polynomial of degree 5) per second, and bytes per second read from a
// working set of `bytes` shared out among them.
double FmaRate(int threads);
double ExpRate(int threads);
double ReadRate(int threads, int64_t bytes);

}  // namespace sinkhorn::bench

#endif  // SINKHORN_TESTS_BENCH_CEILINGS_H_
