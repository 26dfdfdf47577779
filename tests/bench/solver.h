// Timed solves on the CPU backend, for benchmarks.
//
// A solve is timed from Admit to the last output written: conversion of inputs and outputs
// included.
#ifndef SINKHORN_TESTS_BENCH_SOLVER_H_
#define SINKHORN_TESTS_BENCH_SOLVER_H_

#include <cstdint>
#include <type_traits>

#include "absl/status/status.h"
#include "kernels/backend.h"

namespace sinkhorn::bench {

// kernels/problem.h in plain types, so that a driver in another language can fill it in.
// Enumerations are that header's values; null: absent.
struct TimedProblem {
  int32_t kind;   // ProblemKind
  int32_t dtype;  // DType of all tensors, outputs included.
  int64_t count, n, m, dim;
  const void* logits;     // [count, n, m]; recipe LOG_ROW_COLUMN
  const void* cotangent;  // [count, n, m]; its gradient is the unrolled one.
  const void* cost;       // [count, n, m]
  const void *x, *y;      // [count, n, dim], [count, m, dim]; cost |x - y|^2
  double epsilon;
  double tolerance;  // 0: max_iterations are done.
  int32_t max_iterations;
  int32_t precision;      // Precision
  void *f, *g;            // [count, n], [count, m]
  void* plan;             // [count, n, m]
  void* gradient_logits;  // [count, n, m]
};
static_assert(std::is_trivially_copyable_v<TimedProblem>);

struct TimedReport {
  int32_t iterations;
  int32_t converged;
  int32_t stop_reason;  // StopReason
  int32_t padding;
  double marginal_error_a, marginal_error_b;
  char family[64];
};
static_assert(std::is_trivially_copyable_v<TimedReport>);

// Solves `warmups` times, then `repeats` times, and writes each of the latter's seconds.
absl::Status SolveTimed(Backend* backend, const TimedProblem& problem, int warmups, int repeats, double* seconds,
                        TimedReport* report);

}  // namespace sinkhorn::bench

#endif  // SINKHORN_TESTS_BENCH_SOLVER_H_
