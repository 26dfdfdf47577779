// The solver library's vocabulary: problem, options, solution. Plain structs of views and sizes; nothing here owns
// tensor memory. Formulas and meanings are those of proto/sinkhorn/v1/sinkhorn.proto, field by field.
//
// A Problem is `count` independent members of one shape (n, m, dim) with one set of options. Tensors are row-major and
// packed; a tensor of the batch has `count` members back to back, a shared one has a single member (`shared = true`).
// Ragged batches are lists of Problems.
#ifndef SINKHORN_KERNELS_PROBLEM_H_
#define SINKHORN_KERNELS_PROBLEM_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace sinkhorn {

enum class DType : uint8_t { kFloat32, kFloat64, kFloat16, kBFloat16 };

constexpr size_t SizeOf(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

// An input tensor: absent when data == nullptr. Alignment: any.
struct TensorView {
  DType dtype = DType::kFloat32;
  const void* data = nullptr;
  bool shared = false;  // One member serves the whole batch.
  explicit operator bool() const { return data != nullptr; }
};

// An output tensor of `count` members, memory of the caller: not wanted when data == nullptr. Every element is
// written when the solution's status is OK. Alignment: any.
struct OutputView {
  DType dtype = DType::kFloat32;
  void* data = nullptr;
  explicit operator bool() const { return data != nullptr; }
};

enum class ProblemKind : uint8_t { kNormalization, kDense, kPointCloud };
enum class Precision : uint8_t { kStrict, kFast, kDouble };
enum class Start : uint8_t { kExp, kRowSoftmax };
enum class Order : uint8_t { kRowColumn, kColumnRow };
enum class Guard : uint8_t { kNone, kMax, kAdd };
enum class BackwardMode : uint8_t { kUnrolled, kImplicit, kImplicitUnit, kImplicitFull };
enum class PointCost : uint8_t { kSquaredEuclidean, kEuclidean, kCosine, kNegativeDot };
enum class Preconditioner : uint8_t { kNone, kJacobi, kNeumann };
enum class UpdateRule : uint8_t { kAlternating, kSymmetric };
// kTimeBudget: it was asked to end (Solve::FinishSoon).
enum class StopReason : uint8_t { kTolerance, kMaxIterations, kPrecision, kNotIterated, kTimeBudget };
constexpr int kStopReasons = 5;

// The steps of a normalisation (proto: CustomRecipe). `exact` overrides the other fields.
struct Recipe {
  bool exact = false;
  Start start = Start::kExp;
  double offset = 0;  // Added to each entry after the start.
  Order order = Order::kRowColumn;
  Guard guard = Guard::kNone;
  double guard_value = 0;
  double logit_floor = -std::numeric_limits<double>::infinity();
};
constexpr Recipe LogRowColumnRecipe() { return {false, Start::kExp, 0, Order::kRowColumn, Guard::kNone, 0, -1e5}; }
constexpr Recipe ExpColumnRowRecipe() {
  return {false, Start::kExp, 0, Order::kColumnRow, Guard::kMax, 1e-10, -std::numeric_limits<double>::infinity()};
}
constexpr Recipe DeepSeekRecipe() {
  return {
      false, Start::kRowSoftmax, 1e-6, Order::kRowColumn, Guard::kAdd, 1e-6, -std::numeric_limits<double>::infinity()};
}
constexpr Recipe ExactRecipe() {
  Recipe recipe;
  recipe.exact = true;
  return recipe;
}

// Inputs of a normalisation. REQUIRES: logits, or plan and cotangent; marginals > 0.
struct NormalizationInputs {
  TensorView logits;  // [n, m]
  Recipe recipe;
  TensorView row_marginals;  // [n]; absent: all 1 (with a dustbin the added row's is the sum of the column marginals).
  TensorView column_marginals;  // [m]; absent: all 1; exact: sum of row marginals / m.
  TensorView dustbin_score;     // [1]; present: P is [n + 1, m + 1]; marginals keep n and m entries.
  TensorView cotangent;         // of P's shape
  BackwardMode backward = BackwardMode::kUnrolled;
  TensorView plan;  // [n, m]; backward from P alone.
};

// Hessian-vector products of the value in the points, along `count` directions at once, by conjugate gradients.
struct HessianInputs {
  TensorView x, y;    // [count, n, dim], [count, m, dim]; absent: 0
  int64_t count = 0;  // 0: no products.
  Preconditioner preconditioner = Preconditioner::kJacobi;
  int32_t neumann_terms = 0;  // >= 1 with kNeumann
  double tolerance = 1e-5;    // Of the residual, relative.
  int32_t max_iterations = 200;
};

// Inputs of a transport problem. The cost of point clouds is kappa |x - y|^2, |x - y|, 1 - cos(x, y) or -<x, y>.
struct TransportInputs {
  TensorView cost;  // dense: [n, m]
  TensorView x, y;  // point cloud: [n, dim], [m, dim]
  PointCost point_cost = PointCost::kSquaredEuclidean;
  double kappa = 1;                 // 1 or 1/2; of squared distances
  TensorView a, b;                  // [n], [m]; absent: uniform, mass 1
  TensorView initial_f, initial_g;  // absent: 0
  TensorView v, u;                  // [m, v_columns], [n, u_columns]: P V and P^T U
  int64_t v_columns = 0, u_columns = 0;
  HessianInputs hessian;
};

// The factor of the squared distance that a cost of points is, up to terms of rows and columns; of |x - y| that of the
// distance.
inline double CostFactor(const TransportInputs& in) {
  switch (in.point_cost) {
    case PointCost::kSquaredEuclidean:
      return in.kappa;
    case PointCost::kEuclidean:
      return 1;
    case PointCost::kCosine:
    case PointCost::kNegativeDot:
      return 0.5;
  }
  return 1;
}

// Accuracy and iterations. Lengths are resolved to energies: rho, epsilon.
struct SolverOptions {
  double epsilon = 0;        // > 0 (transport)
  double epsilon_decay = 0;  // scaling^p; 0: fixed epsilon
  double epsilon_start = 0;  // 0: largest cost
  UpdateRule update_rule = UpdateRule::kAlternating;
  bool over_relaxation = true;                             // Automatic; has an effect only with tolerance > 0.
  int32_t max_iterations = 0;                              // >= 1
  double tolerance = 0;                                    // L1, units of mass; 0: exactly max_iterations
  double rho_a = std::numeric_limits<double>::infinity();  // infinity: balanced
  double rho_b = std::numeric_limits<double>::infinity();
  bool debias = false;
  Precision precision = Precision::kStrict;
};

struct Convergence {
  int32_t iterations = 0;
  bool converged = false;
  double marginal_error_a = 0;
  double marginal_error_b = 0;
  StopReason stop_reason = StopReason::kMaxIterations;
};

// How the conjugate gradients of Hessian-vector products ended: the worst direction.
struct HessianConvergence {
  int32_t iterations = 0;
  double residual = 0;  // Of the linear system, relative, computed anew from the solution.
  bool converged = false;
};

// Room for the entries of P that are >= threshold, and > 0, by rows (CSR); entries are those of the dense plan.
struct SparseOutput {
  double threshold = 0;
  int64_t max_entries = 0;         // Of a member; 0: not wanted. <= n m
  int64_t* row_offsets = nullptr;  // [count, n + 1]; the last is the number of entries, also when they are too many.
  int32_t* columns = nullptr;      // [count, max_entries]; unwritten when they are.
  OutputView values;               // The same.
  double* mass = nullptr;          // [count]: the sum of all entries found.
};

// Where the answers go: the memory named here belongs to the caller and outlives the solve. Scalars: [count].
struct Outputs {
  double* value = nullptr;
  double* value_linear = nullptr;
  double* dual_bound = nullptr;
  double* primal_bound = nullptr;
  Convergence* convergence = nullptr;  // [count]; optional
  OutputView f, g, f_aa, g_bb;
  OutputView plan, row_sums, column_sums;
  OutputView gradient_logits, gradient_dustbin_score;
  OutputView gradient_x, gradient_y, gradient_a, gradient_b, gradient_cost;
  OutputView plan_v, plan_transpose_u;
  OutputView projection_x, projection_y;
  OutputView hessian_x, hessian_y;
  SparseOutput sparse_plan;
  HessianConvergence* hessian_convergence = nullptr;  // [count]; optional
};

// Whether some output is made of the plan's entries, in float32.
constexpr bool MakesFloatEntries(const SolverOptions& solver, const Outputs& out) {
  if (solver.precision == Precision::kDouble) return false;
  for (const OutputView* view :
       {&out.plan, &out.gradient_x, &out.gradient_y, &out.gradient_cost, &out.plan_v, &out.plan_transpose_u,
        &out.projection_x, &out.projection_y, &out.hessian_x, &out.hessian_y}) {
    if (view->data != nullptr) return true;
  }
  return out.value_linear != nullptr || out.primal_bound != nullptr || out.sparse_plan.max_entries > 0;
}

// Whether float32 may make entries of a plan that is so far from its marginals: on average up to 2^40 a_i b_j. Beyond,
// some may be more than it holds, or rounding alone. Annealing may be cut short at potentials that no plan goes with:
// what there is of one must do then.
constexpr bool HoldsEntries(double marginal_error, double mass_a, double mass_b) {
  return marginal_error <= 0x1p40 * mass_a * mass_b;  // NaN: no.
}

// One request's worth of work. Views must stay valid until the solve is finished or dropped.
struct Problem {
  ProblemKind kind = ProblemKind::kNormalization;
  int64_t count = 1;  // members, >= 1
  int64_t n = 0, m = 0;
  int64_t dim = 0;  // point clouds
  NormalizationInputs normalization;
  TransportInputs transport;
  SolverOptions solver;
  Outputs outputs;
};

// What a finished solve says of itself, besides the outputs.
struct SolveReport {
  Convergence convergence;  // The worst member: largest iterations and errors.
  Precision precision = Precision::kStrict;
  const char* family = "";  // A string literal.
  // Copies to and from the device, those of the problems that it shared a slice with included. 0 where there are none.
  double h2d_seconds = 0, d2h_seconds = 0;
};

}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_PROBLEM_H_
