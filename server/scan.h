// Looks at every element of a tensor: which breaks a rule, what is their total. Reads any alignment.
#ifndef SINKHORN_SERVER_SCAN_H_
#define SINKHORN_SERVER_SCAN_H_

#include <cstdint>

#include "kernels/problem.h"

namespace sinkhorn {

enum class ElementRule : uint8_t { kFinite, kFiniteNonNegative, kFinitePositive, kNotNan };

// Index of the first of `count` elements that breaks `rule`, or -1.
int64_t FirstViolation(const TensorView& tensor, int64_t count, ElementRule rule);

// Index of the first of `rows` rows of `columns` elements that holds only zeros and subnormal numbers (of FLOAT16: only
// zeros), or -1.
int64_t FirstVoidRow(const TensorView& tensor, int64_t rows, int64_t columns);

// Element `index` as a double.
double Element(const TensorView& tensor, int64_t index);

// Sum of elements [begin, begin + count) in double.
double Sum(const TensorView& tensor, int64_t begin, int64_t count);

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_SCAN_H_
