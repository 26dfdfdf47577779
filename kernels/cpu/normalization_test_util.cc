#include "kernels/cpu/normalization_test_util.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <set>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/cpu/half.h"

namespace sinkhorn::cpu {

Tensor::Tensor(DType dtype, const Vector& values)
    : dtype_(dtype), bytes_(values.size() * SizeOf(dtype)), size_(static_cast<int64_t>(values.size())) {
  StoreFromDouble(dtype, values.data(), size_, bytes_.data(), 0);
}

Vector Tensor::values() const {
  Vector values(size_);
  LoadAsDouble(dtype_, bytes_.data(), 0, size_, values.data());
  return values;
}

const std::vector<oracle::NamedRecipe>& TestRecipes() {
  using oracle::CustomRecipe;
  static const auto* recipes = new std::vector<oracle::NamedRecipe>{
      {"LOG_ROW_COLUMN", LogRowColumnRecipe()},
      {"EXP_COLUMN_ROW", ExpColumnRowRecipe()},
      {"DEEPSEEK", DeepSeekRecipe()},
      // Guards so large that they act on most sums.
      {"max, rows first", CustomRecipe(Start::kExp, 0, Order::kRowColumn, Guard::kMax, .5)},
      {"max, columns first", CustomRecipe(Start::kExp, 0, Order::kColumnRow, Guard::kMax, .5)},
      {"add, columns first, offset", CustomRecipe(Start::kExp, .01, Order::kColumnRow, Guard::kAdd, .25)},
      {"softmax", CustomRecipe(Start::kRowSoftmax, 0, Order::kRowColumn, Guard::kNone, 0)},
      {"softmax, max", CustomRecipe(Start::kRowSoftmax, .001, Order::kRowColumn, Guard::kMax, .9)},
      {"floor", CustomRecipe(Start::kExp, 0, Order::kRowColumn, Guard::kNone, 0, -.5)},
  };
  return *recipes;
}

Request RandomRequest(Shape shape, int64_t count, double deviation, Precision precision) {
  Request request;
  request.n = shape.n;
  request.m = shape.m;
  request.count = count;
  request.precision = precision;
  request.dtype = precision == Precision::kDouble ? DType::kFloat64 : DType::kFloat32;
  request.iterations = shape.n * shape.m > 2000 ? 3 : 7;
  request.logits = Gaussian(count * shape.n * shape.m, deviation, 7 + static_cast<uint32_t>(shape.n * 31 + shape.m));
  return request;
}

void AddCotangent(Request* request) {
  const int64_t border = !request->dustbin.empty();
  request->cotangent = Gaussian(request->count * (request->n + border) * (request->m + border), 1, 5);
}

std::string Name(const Request& request) {
  return absl::StrCat(request.n, "x", request.m, " count ", request.count, " dtype ", static_cast<int>(request.dtype),
                      request.precision == Precision::kDouble ? " DOUBLE" : " STRICT",
                      request.dustbin.empty() ? "" : " dustbin", request.row_marginals.empty() ? "" : " marginals");
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

void ExpectOracle(const Request& request, const Answer& answer) {
  SCOPED_TRACE(Name(request));
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  const bool dustbin = !request.dustbin.empty(), is_double = request.precision == Precision::kDouble;
  const int64_t n = request.n + dustbin, m = request.m + dustbin;
  for (int64_t member : std::set<int64_t>{0, request.count / 2, request.count - 1}) {
    const oracle::Normalization problem = OracleProblem(request, member);
    const Vector plan = oracle::Normalize(problem), actual = Member(answer.plan, member, n * m);
    const double largest = std::max(1e-3, MaxAbs(plan));
    EXPECT_LE(MaxDifference(actual, plan), (is_double ? 1e-11 : 1e-6) * largest) << "member " << member;
    const double sum_tolerance = (is_double ? 1e-11 : 1e-6) * largest * static_cast<double>(std::max(n, m));
    EXPECT_LE(MaxDifference(Member(answer.row_sums, member, n), oracle::RowSums(plan, n, m)), sum_tolerance);
    EXPECT_LE(MaxDifference(Member(answer.column_sums, member, m), oracle::ColumnSums(plan, n, m)), sum_tolerance);
    if (request.cotangent.empty()) continue;

    const Vector cotangent = Rounded(request, request.cotangent, member, n * m);
    const Vector gradient = oracle::UnrolledGradient(problem, cotangent);
    Vector inside(request.n * request.m);
    double border = 0, scale = 1e-3;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < m; ++j) {
        scale = std::max(scale, std::abs(plan[i * m + j] * cotangent[i * m + j]));
        if (i < request.n && j < request.m) {
          inside[i * request.m + j] = gradient[i * m + j];
        } else {
          border += gradient[i * m + j];
        }
      }
    }
    const double tolerance = (is_double ? 1e-10 : 1e-5) * scale;
    EXPECT_LE(MaxDifference(Member(answer.gradient, member, request.n * request.m), inside), tolerance);
    if (dustbin) {
      EXPECT_NEAR(answer.dustbin_gradient[member], border, tolerance * static_cast<double>(n + m));
    }
  }
}

Vector Rounded(const Request& request, const Vector& values, int64_t member, int64_t size) {
  return Member(Tensor(request.dtype, values).values(), member, size);
}

}  // namespace sinkhorn::cpu
