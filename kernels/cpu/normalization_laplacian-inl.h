// Solves with the Schur complement of a plan P with row sums r and a diagonal d:
//
//   S = diag(d) - P^T diag(1/r) P,    S 1 = 0 when d are P's column sums: a weighted graph Laplacian.
//
// LaplacianSystem: by SymmetricSolver, preconditioned by diag(d), the constant vector projected out; the owner
// supplies P^T diag(1/r) P p, one sweep over P per step. LaplacianFactor: elimination for few columns. It forms the
// weights of the graph, which are sums of positive terms, and takes each diagonal entry as a sum of weights, never as a
// difference, so that even couplings far below rounding are resolved to full relative accuracy.
#if defined(SINKHORN_KERNELS_CPU_NORMALIZATION_LAPLACIAN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SINKHORN_KERNELS_CPU_NORMALIZATION_LAPLACIAN_INL_H_
#undef SINKHORN_KERNELS_CPU_NORMALIZATION_LAPLACIAN_INL_H_
#else
#define SINKHORN_KERNELS_CPU_NORMALIZATION_LAPLACIAN_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/cpu/normalization_layout-inl.h"
#include "kernels/cpu/normalization_marginals-inl.h"
#include "kernels/cpu/normalization_symmetric-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::cpu::normalization::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class Layout>
class LaplacianSystem {
 public:
  using T = typename Layout::T;
  using D = typename Layout::D;
  using V = typename Layout::V;
  static constexpr int64_t kLanes = Layout::kLanes;

  // definite: S is positive semidefinite, as it is where r and d are P's sums. least_curvature: SymmetricSolver's.
  LaplacianSystem(const Layout& layout, bool definite, double least_curvature, Arena* arena)
      : layout_(layout),
        size_(layout.col_elements()),
        projections_(definite ? 1 : 2),
        solver_(layout, size_, 2 * layout.cols() + 10, definite, least_curvature, arena) {
    diagonal_ = arena->Take<T>(size_);
    inverse_ = arena->Take<T>(size_);
  }

  // S x = b, to a residual of `tolerance` in the norm of the preconditioner. Copies its arguments. Padding must be 0.
  void Begin(const T* b, const T* diagonal, double tolerance) {
    const D d;
    for (int64_t k = 0; k < size_; k += kLanes) {
      const V diag = hn::Load(d, diagonal + k);
      hn::Store(diag, d, diagonal_ + k);
      hn::Store(hn::IfThenZeroElse(hn::Le(diag, hn::Zero(d)), hn::Div(hn::Set(d, T(1)), diag)), d, inverse_ + k);
      hn::Store(hn::Load(d, b + k), d, solver_.right() + k);
    }
    const V sum = SumOver(layout_, size_, [&](int64_t k) HWY_ATTR { return hn::Load(d, diagonal_ + k); });
    hn::Store(hn::Div(hn::Set(d, T(1)), sum), d, inverse_sum_.value);
    Project(solver_.right());
    solver_.Begin(inverse_, tolerance);
  }
  bool done() const { return solver_.done(); }
  const T* direction() const { return solver_.direction(); }
  T* solution() { return solver_.solution(); }

  // product = P^T diag(1/r) P direction().
  void Step(const T* product) {
    const D d;
    const T* p = direction();
    T* q = solver_.product();
    for (int64_t k = 0; k < size_; k += kLanes) {
      hn::Store(hn::MulSub(hn::Load(d, diagonal_ + k), hn::Load(d, p + k), hn::Load(d, product + k)), d, q + k);
    }
    Project(q);
    solver_.Step();
  }

 private:
  // Keeps x orthogonal to the constant: subtracts diag(d) 1 (1^T x) / (1^T d). What is left of it is a rounding of what
  // there was, which is more than all the rest at times where S 1 is not 0: once more then.
  void Project(T* x) const {
    const D d;
    for (int pass = 0; pass < projections_; ++pass) {
      const V sum = SumOver(layout_, size_, [&](int64_t k) HWY_ATTR { return hn::Load(d, x + k); });
      const V share = hn::Mul(sum, hn::Load(d, inverse_sum_.value));
      for (int64_t k = 0; k < size_; k += kLanes) {
        hn::Store(hn::NegMulAdd(share, hn::Load(d, diagonal_ + k), hn::Load(d, x + k)), d, x + k);
      }
    }
  }

  const Layout& layout_;
  const int64_t size_;
  const int projections_;
  SymmetricSolver<Layout> solver_;
  T *diagonal_, *inverse_;
  LaneScalar<T, kLanes> inverse_sum_;
};

// For matrices of few columns; the work is rows * cols^2 + cols^3 / 3 and not cut into blocks.
template <class Layout>
class LaplacianFactor {
 public:
  using T = typename Layout::T;
  using D = typename Layout::D;
  using V = typename Layout::V;
  static constexpr int64_t kLanes = Layout::kLanes;

  LaplacianFactor(const Layout& layout, Arena* arena) : square_(layout.cols(), layout.cols()) {
    weights_ = arena->Take<T>(square_.matrix_elements());
    degree_ = arena->Take<T>(square_.row_elements());
    entries_ = arena->Take<T>(square_.row_elements());
  }

  // x = S^+ b up to a constant, for S of `plan` (of `rows` rows, with 1 / its row sums).
  void Solve(const Layout& layout, const T* plan, const T* inverse_row_sums, const T* b, T* x) {
    Form(layout, plan, inverse_row_sums);
    const D d;
    const int64_t size = square_.cols();
    for (int64_t j = 0; j < size; ++j) square_.StoreRow(Entry(b, j), entries_, j);
    for (int64_t k = size - 1; k > 0; --k) Eliminate(k);
    Set(x, 0, hn::Zero(d));
    for (int64_t k = 1; k < size; ++k) {
      V sum = square_.LoadRow(entries_, k);
      for (int64_t j = 0; j < k; ++j) sum = hn::MulAdd(Weight(k, j), Entry(x, j), sum);
      const V degree = square_.LoadRow(degree_, k);
      // Nodes without neighbours that are left: any value will do.
      Set(x, k, hn::IfThenElseZero(Coupled(degree), hn::Div(sum, degree)));
    }
  }

 private:
  static hn::Mask<D> Coupled(V degree) { return hn::Gt(degree, hn::Set(D(), T(1e-290))); }
  T* Row(int64_t j) const { return weights_ + j * square_.stride(); }
  V Weight(int64_t j, int64_t k) const { return Entry(Row(j), k); }
  // Element j of a column quantity as a lane scalar.
  static V Entry(const T* x, int64_t j) {
    if constexpr (Layout::kPerLane) {
      return hn::Load(D(), x + j * kLanes);
    } else {
      return hn::Set(D(), x[j]);
    }
  }
  static void Set(T* x, int64_t j, V value) {
    if constexpr (Layout::kPerLane) {
      hn::Store(value, D(), x + j * kLanes);
    } else {
      x[j] = hn::GetLane(value);
    }
  }

  // Weights w_jk = sum_i P_ij P_ik / r_i. (The diagonal is not used.)
  void Form(const Layout& layout, const T* plan, const T* inverse_row_sums) {
    const D d;
    std::fill(weights_, weights_ + square_.matrix_elements(), T(0));
    for (int64_t i = 0; i < layout.rows(); ++i) {
      const T* p = plan + i * layout.stride();
      const V inverse = layout.LoadRow(inverse_row_sums, i);
      for (int64_t j = 0; j < layout.cols(); ++j) {
        const V scale = hn::Mul(Entry(p, j), inverse);
        T* row = Row(j);
        for (int64_t k = 0; k < layout.stride(); k += kLanes) {
          hn::Store(hn::MulAdd(scale, hn::Load(d, p + k), hn::Load(d, row + k)), d, row + k);
        }
      }
    }
  }

  // Node k leaves: its neighbours are coupled through it.
  void Eliminate(int64_t k) {
    const D d;
    const T* last = Row(k);
    V degree = hn::Zero(d);
    for (int64_t j = 0; j < k; ++j) degree = hn::Add(degree, Entry(last, j));
    square_.StoreRow(degree, degree_, k);
    const V inverse = hn::IfThenElseZero(Coupled(degree), hn::Div(hn::Set(d, T(1)), degree));
    const V b = square_.LoadRow(entries_, k);
    const int64_t used = Layout::kPerLane ? k * kLanes : RoundUp(k, kLanes);
    for (int64_t j = 0; j < k; ++j) {
      const V share = hn::Mul(Entry(last, j), inverse);
      square_.StoreRow(hn::MulAdd(share, b, square_.LoadRow(entries_, j)), entries_, j);
      T* row = Row(j);
      for (int64_t c = 0; c < used; c += kLanes) {
        hn::Store(hn::MulAdd(share, hn::Load(d, last + c), hn::Load(d, row + c)), d, row + c);
      }
    }
  }

  const Layout square_;
  T *weights_, *degree_, *entries_;
};

}  // namespace sinkhorn::cpu::normalization::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // SINKHORN_KERNELS_CPU_NORMALIZATION_LAPLACIAN_INL_H_
