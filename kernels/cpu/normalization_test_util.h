// Runs normalisations the way the backend does, on tensors of any dtype, and their oracle beside them.
#ifndef SINKHORN_KERNELS_CPU_NORMALIZATION_TEST_UTIL_H_
#define SINKHORN_KERNELS_CPU_NORMALIZATION_TEST_UTIL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/cpu/work.h"
#include "kernels/problem.h"
#include "tests/oracle/normalization.h"
#include "tests/oracle/recipes.h"

namespace sinkhorn::cpu {

using Vector = std::vector<double>;

// Values as tensors of `dtype`, rounded to it.
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, const Vector& values);
  TensorView view(bool shared = false) const { return {dtype_, bytes_.empty() ? nullptr : bytes_.data(), shared}; }
  OutputView output() { return {dtype_, bytes_.data()}; }
  Vector values() const;

 private:
  DType dtype_ = DType::kFloat32;
  std::vector<char> bytes_;
  int64_t size_ = 0;
};

// A batch of normalisations. Empty vectors: not given.
struct Request {
  int64_t n = 0, m = 0, count = 1;
  DType dtype = DType::kFloat32;
  Precision precision = Precision::kStrict;
  Recipe recipe = LogRowColumnRecipe();
  int32_t iterations = 20;
  double tolerance = 0;
  Vector logits, row_marginals, column_marginals, dustbin, cotangent, plan;
  bool shared_marginals = false;
  BackwardMode mode = BackwardMode::kUnrolled;
};

struct Answer {
  absl::Status status;
  SolveReport report;
  Vector plan, row_sums, column_sums, gradient, dustbin_gradient;
  std::vector<Convergence> convergence;
};

struct Shape {
  int64_t n, m;
};
// A recipe of each kind, named.
const std::vector<oracle::NamedRecipe>& TestRecipes();
// Logits of the deviation, the same for the same shape; few iterations; the precision's own dtype.
Request RandomRequest(Shape shape, int64_t count, double deviation, Precision precision);
void AddCotangent(Request* request);
std::string Name(const Request& request);

// Solves with chunks in a shuffled order on this thread.
Answer Solve(const Request& request);

// Compares up to three members of an unrolled request with the oracle.
// Tolerances. STRICT: entries of P within 1e-6 of the largest (float32 rounding is 6e-8, a sum of products of a few
// roundings each); gradients within 1e-5 of the largest |P dP|, of which they are differences. DOUBLE: 1e-11, since
// rounding logits of 1e4 alone makes 2e-12.
void ExpectOracle(const Request& request, const Answer& answer);

// One member's inputs as the kernels see them (rounded to the dtype), with the dustbin's border if there is one.
oracle::Normalization OracleProblem(const Request& request, int64_t member);
// What the oracle says of a member: P; the gradient of (dustbin: bordered) logits.
Vector OraclePlan(const Request& request, int64_t member);

// P and cotangent of a member as the kernels see them.
Vector Rounded(const Request& request, const Vector& values, int64_t member, int64_t size);

// `count` values; the same for the same seed.
Vector Uniform(int64_t count, double low, double high, uint32_t seed);
Vector Gaussian(int64_t count, double deviation, uint32_t seed);

// Member `index` of a batch of `size` elements each.
Vector Member(const Vector& values, int64_t index, int64_t size);
double MaxAbs(const Vector& values);
double MaxDifference(const Vector& a, const Vector& b);

}  // namespace sinkhorn::cpu

#endif  // SINKHORN_KERNELS_CPU_NORMALIZATION_TEST_UTIL_H_
