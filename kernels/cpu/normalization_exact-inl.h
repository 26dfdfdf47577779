// The EXACT recipe: P with the given marginals, by Newton's method on the column potentials.
//
// The row potentials are eliminated: given gamma, P_ij = r_i softmax_j(A_ij + gamma_j) has exact row sums. Its column
// sums c are matched by Newton steps S delta = c* - c, S = diag(c) - P^T diag(1/r) P. Safeguards: two sweeps first
// (gamma += log c* / c); a step is shortened to a range of kLongestStep (the entries of P change by factors of at most
// e^6, where the quadratic model still means something); one that does not reduce the residual is tried at a quarter
// and then replaced by a sweep. Each evaluation of P counts as an iteration. Measured: 4 x 4 Gaussian logits of
// deviation 2, 8, 16: 7, 9, 13 evaluations (median); 64 x 64 of deviation 4: 9.
#if defined(SINKHORN_KERNELS_CPU_NORMALIZATION_EXACT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SINKHORN_KERNELS_CPU_NORMALIZATION_EXACT_INL_H_
#undef SINKHORN_KERNELS_CPU_NORMALIZATION_EXACT_INL_H_
#else
#define SINKHORN_KERNELS_CPU_NORMALIZATION_EXACT_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/cpu/math-inl.h"
#include "kernels/cpu/normalization_laplacian-inl.h"
#include "kernels/cpu/normalization_outputs-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::cpu::normalization::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class Layout>
class ExactSolver final : public ForwardSolver<ExactSolver<Layout>, Layout, true> {
  using Base = ForwardSolver<ExactSolver<Layout>, Layout, true>;
  friend Base;

 public:
  using typename Base::D;
  using typename Base::Scalar;
  using typename Base::T;
  using typename Base::V;
  static constexpr int64_t kLanes = Base::kLanes;
  static constexpr bool kExact = true;

  ExactSolver(const NormalizationSpec& spec, Arena* arena, const MatrixTensor& plan_copy)
      : Base(spec, arena, plan_copy),
        dense_(Layout::kPerLane || spec.cols <= kDenseColumns),
        factor_of_(dense_ ? this->layout_ : Layout(1, 1), arena),
        cg_(this->layout_, /*definite=*/true, /*least_curvature=*/0, arena) {
    const int64_t col = this->layout_.col_elements();
    this->plan_ = arena->Take<T>(this->layout_.matrix_elements());
    sweep_ = arena->Take<T>(col);
    newton_ = arena->Take<T>(col);
    target_ = arena->Take<T>(col);
    missing_ = arena->Take<T>(col);
  }

 private:
  static constexpr int64_t kDenseColumns = 128;
  static constexpr int32_t kSweeps = 2;
  static constexpr double kLongestStep = 6;
  static constexpr double kRounding = 4e-15;  // L1 residual per unit of mass that is taken as exact,
  static constexpr double kStall = 1e-12;     // and below which a residual may stop falling.

  T* Gamma() const { return this->W(0); }
  T* Trial() const { return this->W(1); }

  void StartRows(int64_t begin, int64_t end, Scalar*) {
    const D d;
    const V floor =
        hn::Set(d, static_cast<T>(std::max<double>(this->spec_.recipe.logit_floor, std::numeric_limits<T>::lowest())));
    for (int64_t i = begin; i < end; ++i) {
      const T* row = this->LogitsRow(i);
      T* logarithms = this->matrix_ + i * this->layout_.stride();
      for (int64_t jv = 0; jv < this->layout_.vectors(); ++jv) {
        const V x = hn::LoadU(d, row + jv * kLanes);
        hn::Store(this->layout_.ReplacePads(jv, hn::Max(x, floor), x), d, logarithms + jv * kLanes);
      }
    }
  }
  void EndStart() {
    for (T* x : {Gamma(), Trial(), sweep_, newton_, missing_}) std::fill(x, x + this->layout_.col_elements(), T(0));
    error_.Fill(std::numeric_limits<T>::max());
    scale_.Fill(1);
    tries_.Fill(0);
    is_newton_.Fill(0);
    SetTarget();
  }

  // The column marginals, of the rows' total to the last bit: given totals may differ by 1e-5, rounded ones do.
  void SetTarget() {
    const D d;
    const auto total = [&](const T* x, int64_t elements) HWY_ATTR {
      return SumOver(this->layout_, elements, [&](int64_t k) HWY_ATTR { return hn::Load(d, x + k); });
    };
    const V rows = total(this->marginals_.row, this->layout_.row_elements());
    const V cols = total(this->marginals_.col, this->layout_.col_elements());
    const V scale = hn::Div(rows, cols);
    for (int64_t k = 0; k < this->layout_.col_elements(); k += kLanes) {
      hn::Store(hn::Mul(scale, hn::Load(d, this->marginals_.col + k)), d, target_ + k);
    }
    hn::Store(rows, d, total_.value);
    hn::Store(hn::Abs(hn::Sub(rows, cols)), d, difference_.value);
  }

  // P at these column potentials, with exact rows, and its column sums.
  void Evaluate(const T* gamma, int64_t block, int64_t begin, int64_t end) {
    const D d;
    const Layout& layout = this->layout_;
    T* col_sums = this->Accumulator(block);
    std::fill(col_sums, col_sums + layout.col_elements(), T(0));
    for (int64_t i = begin; i < end; ++i) {
      const T* a = this->matrix_ + i * layout.stride();
      T* p = this->plan_ + i * layout.stride();
      V max = hn::Set(d, std::numeric_limits<T>::lowest());
      for (int64_t k = 0; k < layout.stride(); k += kLanes) {
        max = hn::Max(max, hn::Add(hn::Load(d, a + k), hn::Load(d, gamma + k)));
      }
      max = layout.ReduceMax(max);
      V sum = hn::Zero(d);
      for (int64_t k = 0; k < layout.stride(); k += kLanes) {
        const V e = ExpBounded(d, hn::Sub(hn::Add(hn::Load(d, a + k), hn::Load(d, gamma + k)), max));
        hn::Store(e, d, p + k);
        sum = hn::Add(sum, e);
      }
      const V scale = hn::Div(layout.LoadRow(this->marginals_.row, i), layout.Reduce(sum));
      V row_sum = hn::Zero(d);
      for (int64_t k = 0; k < layout.stride(); k += kLanes) {
        const V entry = hn::Mul(hn::Load(d, p + k), scale);
        hn::Store(entry, d, p + k);
        row_sum = hn::Add(row_sum, entry);
        hn::Store(hn::Add(hn::Load(d, col_sums + k), entry), d, col_sums + k);
      }
      layout.StoreRow(layout.Reduce(row_sum), this->row_sum_, i);
    }
  }
  void IterateRows(int64_t block, int64_t begin, int64_t end) { Evaluate(Trial(), block, begin, end); }
  void FinalRows(int64_t block, int64_t begin, int64_t end) { Evaluate(Gamma(), block, begin, end); }

  // ---- After an evaluation: accept, stop, or plan the next trial ----------------------------------------------------
  void EndRows() {
    const D d;
    const Layout& layout = this->layout_;
    this->CombineColumns(this->Accumulator(0));
    const T* sums = this->Accumulator(0);
    const V error = this->L1(layout.col_elements(), [&](int64_t k) HWY_ATTR {
      return hn::Sub(hn::Load(d, target_ + k), hn::Load(d, sums + k));
    });
    const V zero = hn::Zero(d), old_error = hn::Load(d, error_.value);
    const auto newton = hn::Ne(hn::Load(d, is_newton_.value), zero);
    const auto goes_on = hn::Eq(hn::Load(d, this->stopped_.value), zero);
    const auto accepted = hn::And(goes_on, hn::Or(hn::Not(newton), hn::Lt(error, old_error)));
    Accept(accepted, sums);
    const V now = hn::IfThenElse(accepted, error, old_error);
    hn::Store(now, d, error_.value);

    const V total = hn::Load(d, total_.value);
    const V goal = hn::Max(hn::Set(d, static_cast<T>(this->spec_.tolerance)), hn::Mul(total, hn::Set(d, T(kRounding))));
    const auto stalled = hn::AndNot(accepted, hn::And(newton, hn::Le(now, hn::Mul(total, hn::Set(d, T(kStall))))));
    const auto stops = hn::And(goes_on, hn::Or(hn::Le(now, goal), stalled));
    const V stopped = hn::IfThenElse(stops, hn::Set(d, static_cast<T>(this->t_)), hn::Load(d, this->stopped_.value));
    hn::Store(stopped, d, this->stopped_.value);
    if (hn::AllTrue(d, hn::Ne(stopped, zero)) || this->t_ == this->spec_.iterations) {
      this->last_ = this->t_;
      this->pass_ = Pass::kFinal;
      return;
    }
    const V tries = hn::IfThenElse(accepted, zero, hn::Add(hn::Load(d, tries_.value), hn::Set(d, T(1))));
    hn::Store(tries, d, tries_.value);
    const V shorter = hn::Mul(hn::Load(d, scale_.value), hn::Set(d, T(0.25)));
    hn::Store(hn::IfThenElse(accepted, hn::Set(d, T(1)), shorter), d, scale_.value);
    if (this->t_ < kSweeps || hn::AllFalse(d, accepted)) return PlanTrial();
    if (dense_) {
      factor_of_.Solve(layout, this->plan_, this->marginals_.row_inverse, missing_, step_of_trial());
      TakeStep(accepted, step_of_trial());
      return PlanTrial();
    }
    cg_.Begin(missing_, sums, 1e-3);
    this->pass_ = Pass::kColumns;
  }

  void Accept(hn::Mask<D> accepted, const T* sums) {
    const D d;
    for (int64_t jv = 0; jv < this->layout_.vectors(); ++jv) {
      const int64_t k = jv * kLanes;
      const V target = hn::Load(d, target_ + k), sum = hn::Load(d, sums + k);
      const V ratio = hn::Div(target, hn::Max(sum, hn::Set(d, T(1e-300))));
      const V sweep = this->layout_.KeepColumns(jv, Log(d, hn::Min(ratio, hn::Set(d, T(1e300)))));
      const auto put = [&](V value, T* x)
                           HWY_ATTR { hn::Store(hn::IfThenElse(accepted, value, hn::Load(d, x + k)), d, x + k); };
      put(sweep, sweep_);
      put(hn::Load(d, Trial() + k), Gamma());
      put(hn::Sub(target, sum), missing_);
    }
  }

  // Where accepted: the Newton step, no longer than kLongestStep.
  void TakeStep(hn::Mask<D> accepted, const T* step) {
    const D d;
    const Layout& layout = this->layout_;
    const V huge = hn::Set(d, std::numeric_limits<T>::max());
    V low = huge, high = hn::Neg(huge);
    for (int64_t jv = 0; jv < layout.vectors(); ++jv) {
      const V x = hn::Load(d, step + jv * kLanes);
      low = hn::Min(low, layout.ReplacePads(jv, x, huge));
      high = hn::Max(high, layout.ReplacePads(jv, x, hn::Neg(huge)));
    }
    const V range = hn::Sub(layout.ReduceMax(high), layout.ReduceMin(low));
    const V longest = hn::Set(d, T(kLongestStep));
    const V scale = hn::Div(longest, hn::Max(range, longest));
    for (int64_t jv = 0; jv < layout.vectors(); ++jv) {
      const int64_t k = jv * kLanes;
      const V x = layout.KeepColumns(jv, hn::Mul(scale, hn::Load(d, step + k)));
      hn::Store(hn::IfThenElse(accepted, x, hn::Load(d, newton_ + k)), d, newton_ + k);
    }
  }

  void PlanTrial() {
    const D d;
    const V tries = hn::Load(d, tries_.value), zero = hn::Zero(d), one = hn::Set(d, T(1));
    const auto first_sweeps = hn::And(hn::Eq(tries, zero), hn::Lt(hn::Set(d, T(this->t_)), hn::Set(d, T(kSweeps))));
    const auto sweeps = hn::Or(first_sweeps, hn::Ge(tries, hn::Set(d, T(2))));
    const auto goes_on = hn::Eq(hn::Load(d, this->stopped_.value), zero);
    const V scale = hn::Load(d, scale_.value);
    for (int64_t k = 0; k < this->layout_.col_elements(); k += kLanes) {
      const V step = hn::IfThenElse(sweeps, hn::Load(d, sweep_ + k), hn::Mul(scale, hn::Load(d, newton_ + k)));
      hn::Store(hn::Add(hn::Load(d, Gamma() + k), hn::IfThenElseZero(goes_on, step)), d, Trial() + k);
    }
    hn::Store(hn::IfThenZeroElse(sweeps, one), d, is_newton_.value);
    ++this->t_;
    this->pass_ = Pass::kIterate;
  }

  // ---- Newton step by conjugate gradients, where there are many columns ---------------------------------------------
  void ColumnRows(int64_t block, int64_t begin, int64_t end) {
    const T* inverse = this->marginals_.row_inverse;
    this->layout_.Sweep(this->plan_, begin, end, cg_.direction(), this->Accumulator(block),
                        [=](auto row, V s) HWY_ATTR { return hn::Mul(s, row.Load(inverse)); });
  }
  void EndColumns() {
    this->CombineColumns(this->Accumulator(0));
    cg_.Step(this->Accumulator(0));
    if (!cg_.done()) return;
    TakeStep(hn::Eq(hn::Load(D(), tries_.value), hn::Zero(D())), cg_.solution());
    PlanTrial();
  }
  T* step_of_trial() { return cg_.solution(); }  // Memory of its size; the two methods are not mixed.

  void Judge(int64_t l, double error, Convergence* convergence) const {
    const double tolerance = this->spec_.tolerance, total = total_.value[l];
    const bool stopped = this->stopped_.value[l] != 0;
    convergence->converged = error <= std::max(tolerance, kStall * total + 1.001 * difference_.value[l]);
    convergence->stop_reason = !stopped                              ? StopReason::kMaxIterations
                               : tolerance > 0 && error <= tolerance ? StopReason::kTolerance
                                                                     : StopReason::kPrecision;
  }

  // No unrolled backward pass.
  void BeginReverseStep() {}
  void ReverseRows(int64_t, int64_t, int64_t) {}
  void EndReverse() {}
  void GradientRows(int64_t, int64_t) {}
  void SoftmaxBackward(int64_t, V) {}

  const bool dense_;
  LaplacianFactor<Layout> factor_of_;
  LaplacianSystem<Layout> cg_;
  T *sweep_, *newton_, *target_, *missing_;
  Scalar error_, scale_, tries_, is_newton_, total_;
  Scalar difference_;  // Of the given totals.
};

}  // namespace sinkhorn::cpu::normalization::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // SINKHORN_KERNELS_CPU_NORMALIZATION_EXACT_INL_H_
