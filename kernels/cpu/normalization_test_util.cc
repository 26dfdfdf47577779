#include "kernels/cpu/normalization_test_util.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>

#include "kernels/cpu/half.h"

namespace sinkhorn {
namespace cpu {

Tensor::Tensor(DType dtype, const Vector& values)
    : dtype_(dtype), bytes_(values.size() * SizeOf(dtype)), size_(static_cast<int64_t>(values.size())) {
  StoreFromDouble(dtype, values.data(), size_, bytes_.data(), 0);
}

Vector Tensor::values() const {
  Vector values(size_);
  LoadAsDouble(dtype_, bytes_.data(), 0, size_, values.data());
  return values;
}

Answer Solve(const Request& request) {
  const bool has_dustbin = !request.dustbin.empty(), backward = !request.cotangent.empty();
  const bool forward = request.plan.empty();
  const int64_t n = request.n + has_dustbin, m = request.m + has_dustbin;
  const Tensor logits(request.dtype, request.logits), rows(request.dtype, request.row_marginals);
  const Tensor columns(request.dtype, request.column_marginals), dustbin(request.dtype, request.dustbin);
  const Tensor cotangent(request.dtype, request.cotangent), given(request.dtype, request.plan);
  const auto output = [&](bool wanted, int64_t size) {
    return Tensor(request.dtype, wanted ? Vector(request.count * size, NAN) : Vector());
  };
  Tensor plan = output(forward, n * m), row_sums = output(true, n), column_sums = output(true, m);
  Tensor gradient = output(backward, request.n * request.m), dustbin_gradient = output(backward && has_dustbin, 1);

  Problem problem;
  problem.kind = ProblemKind::kNormalization;
  problem.count = request.count;
  problem.n = request.n;
  problem.m = request.m;
  NormalizationInputs& in = problem.normalization;
  in.logits = logits.view();
  in.recipe = request.recipe;
  in.row_marginals = rows.view(request.shared_marginals);
  in.column_marginals = columns.view(request.shared_marginals);
  in.dustbin_score = dustbin.view();
  in.cotangent = cotangent.view();
  in.backward = request.mode;
  in.plan = given.view();
  problem.solver.max_iterations = request.iterations;
  problem.solver.tolerance = request.tolerance;
  problem.solver.precision = request.precision;
  Answer answer;
  answer.convergence.resize(request.count);
  problem.outputs.convergence = answer.convergence.data();
  problem.outputs.plan = plan.output();
  problem.outputs.row_sums = row_sums.output();
  problem.outputs.column_sums = column_sums.output();
  problem.outputs.gradient_logits = gradient.output();
  problem.outputs.gradient_dustbin_score = dustbin_gradient.output();

  const std::unique_ptr<Work> work = MakeNormalizationWork(problem);
  std::mt19937 random(17);
  Scratch scratch;
  while (const int64_t count = work->chunk_count()) {
    std::vector<int64_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    for (int64_t chunk : order) work->RunChunk(chunk, &scratch);
    work->EndPhase();
  }
  answer.status = work->status();
  answer.report = work->report();
  answer.plan = plan.values();
  answer.row_sums = row_sums.values();
  answer.column_sums = column_sums.values();
  answer.gradient = gradient.values();
  answer.dustbin_gradient = dustbin_gradient.values();
  return answer;
}

oracle::Normalization OracleProblem(const Request& request, int64_t member) {
  const auto rounded = [&](const Vector& values, int64_t size, bool shared) {
    if (values.empty()) return Vector();
    return Member(Tensor(request.dtype, values).values(), shared ? 0 : member, size);
  };
  oracle::Normalization problem;
  problem.n = request.n;
  problem.m = request.m;
  problem.logits = rounded(request.logits, request.n * request.m, false);
  problem.recipe = request.recipe;
  problem.iterations = request.iterations;
  problem.row_marginals = rounded(request.row_marginals, request.n, request.shared_marginals);
  problem.column_marginals = rounded(request.column_marginals, request.m, request.shared_marginals);
  if (request.dustbin.empty()) return problem;
  return oracle::WithDustbin(problem, rounded(request.dustbin, 1, false)[0]);
}

Vector OraclePlan(const Request& request, int64_t member) { return oracle::Normalize(OracleProblem(request, member)); }

Vector Uniform(int64_t count, double low, double high, uint32_t seed) {
  std::mt19937_64 random(seed);
  Vector values(count);
  for (double& value : values) value = low + (high - low) * static_cast<double>(random() >> 11) * 0x1p-53;
  return values;
}

Vector Gaussian(int64_t count, double deviation, uint32_t seed) {
  Vector values = Uniform(2 * count, 0, 1, seed);
  for (int64_t k = 0; k < count; ++k) {  // Box and Muller.
    values[k] = deviation * std::sqrt(-2 * std::log(1 - values[k])) * std::cos(6.283185307179586 * values[count + k]);
  }
  values.resize(count);
  return values;
}

Vector Member(const Vector& values, int64_t index, int64_t size) {
  return Vector(values.begin() + index * size, values.begin() + (index + 1) * size);
}

double MaxAbs(const Vector& values) {
  double largest = 0;
  for (double value : values) {
    if (!(std::abs(value) <= largest)) largest = std::abs(value);  // NaN too.
  }
  return largest;
}

double MaxDifference(const Vector& a, const Vector& b) {
  if (a.size() != b.size()) return INFINITY;
  Vector difference(a.size());
  for (size_t k = 0; k < a.size(); ++k) difference[k] = a[k] - b[k];
  return MaxAbs(difference);
}

}  // namespace cpu
}  // namespace sinkhorn
