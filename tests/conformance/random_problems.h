// Seeded random problems. All numbers are exact in float32, so that an oracle and a backend see the
// same ones.
#ifndef SINKHORN_TESTS_CONFORMANCE_RANDOM_PROBLEMS_H_
#define SINKHORN_TESTS_CONFORMANCE_RANDOM_PROBLEMS_H_

#include <cstdint>
#include <random>

#include "tests/oracle/normalization.h"
#include "tests/oracle/transport.h"

namespace sinkhorn::conformance {

using oracle::Vector;

class Random {
 public:
  explicit Random(uint64_t seed) : generator_(seed) {}
  double Uniform(double low, double high);
  double Normal();
  int64_t Integer(int64_t low, int64_t high);  // Both ends included.
  bool Chance(double probability) { return Uniform(0, 1) < probability; }

  // Rounded to float32.
  Vector Uniforms(int64_t count, double low, double high);
  Vector Normals(int64_t count, double deviation);
  // Positive, in ratios up to 10, multiples of 2^-20 that add up to `total` exactly; above 16 of what float32 has.
  Vector Masses(int64_t count, double total = 1);

 private:
  std::mt19937_64 generator_;
};

// Points uniform in the unit cube, random masses, alternating updates.
oracle::Transport RandomClouds(int64_t n, int64_t m, int64_t dim, double epsilon, uint64_t seed);
// Costs uniform in [0, 1], random masses.
oracle::Transport RandomDense(int64_t n, int64_t m, double epsilon, uint64_t seed);
// Normal logits.
oracle::Normalization RandomLogits(int64_t n, int64_t m, const Recipe& recipe, int iterations, double deviation,
                                   uint64_t seed);

}  // namespace sinkhorn::conformance

#endif  // SINKHORN_TESTS_CONFORMANCE_RANDOM_PROBLEMS_H_
