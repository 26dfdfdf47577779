// What the oracle's own tests share.
#ifndef SINKHORN_TESTS_ORACLE_ORACLE_TEST_UTIL_H_
#define SINKHORN_TESTS_ORACLE_ORACLE_TEST_UTIL_H_

#include <cstddef>
#include <random>

#include "gtest/gtest.h"
#include "tests/oracle/linear_algebra.h"

namespace sinkhorn::oracle {

inline Vector Uniform(size_t count, double low, double high, unsigned seed) {
  std::mt19937_64 generator(seed);
  std::uniform_real_distribution<double> uniform(low, high);
  Vector values(count);
  for (double& value : values) value = uniform(generator);
  return values;
}

inline void ExpectAllNear(const Vector& actual, const Vector& expected, double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t k = 0; k < actual.size(); ++k) EXPECT_NEAR(actual[k], expected[k], tolerance) << k;
}

}  // namespace sinkhorn::oracle

#endif  // SINKHORN_TESTS_ORACLE_ORACLE_TEST_UTIL_H_
