// Implicit backward pass: the derivative of the fixed point, from P and the cotangent dP alone.
//
//   reduced  (diag(c) - P^T diag(1/r) P) beta = s_c - P^T diag(1/r) s_r,  alpha = (s_r - P beta) / r;
//            r, c: P's sums (IMPLICIT) or 1 (IMPLICIT_UNIT);  s_r, s_c: the sums of P * dP
//   full     [I P; P^T I] [alpha; beta] = [s_r; s_c]  (IMPLICIT_FULL)
//   then     dL/d log K = (dP - alpha_i - beta_j) P, and on to the logits through offset, softmax and floor.
//
// Both in float64, the null vector projected out: (1) and (1, -1). Where P's sums are not 1, IMPLICIT_UNIT's and
// IMPLICIT_FULL's systems are not definite (normalization_symmetric-inl.h).
#if defined(SINKHORN_KERNELS_CPU_NORMALIZATION_IMPLICIT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SINKHORN_KERNELS_CPU_NORMALIZATION_IMPLICIT_INL_H_
#undef SINKHORN_KERNELS_CPU_NORMALIZATION_IMPLICIT_INL_H_
#else
#define SINKHORN_KERNELS_CPU_NORMALIZATION_IMPLICIT_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/cpu/math-inl.h"
#include "kernels/cpu/normalization_laplacian-inl.h"
#include "kernels/cpu/normalization_log-inl.h"
#include "kernels/cpu/normalization_solver-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::cpu::normalization::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr double kLeastCurvature = 1e-14;  // What is below is rounding.

// [I P; P^T I] [alpha; beta] = [s_r; s_c], orthogonal to (1, -1).
template <class Layout>
class FullSystem {
 public:
  using T = typename Layout::T;
  using D = typename Layout::D;
  using V = typename Layout::V;
  static constexpr int64_t kLanes = Layout::kLanes;

  FullSystem(const Layout& layout, Arena* arena)
      : layout_(layout),
        rows_(layout.row_elements()),
        cols_(layout.col_elements()),
        solver_(layout, rows_ + cols_, 2 * (layout.rows() + layout.cols()) + 10, /*definite=*/false, kLeastCurvature,
                arena) {}

  // Padding must be 0.
  void Begin(const T* row_side, const T* col_side, double tolerance) {
    std::copy(row_side, row_side + rows_, solver_.right());
    std::copy(col_side, col_side + cols_, solver_.right() + rows_);
    std::fill(solver_.product(), solver_.product() + rows_ + cols_, T(0));
    Project(solver_.right());
    solver_.Begin(nullptr, tolerance);
  }
  bool done() const { return solver_.done(); }
  const T* row_direction() const { return solver_.direction(); }
  const T* col_direction() const { return solver_.direction() + rows_; }
  T* row_product() { return solver_.product(); }  // The owner stores row_direction + P col_direction there,
  const T* alpha() const { return solver_.solution(); }
  const T* beta() const { return solver_.solution() + rows_; }

  // and gives P^T row_direction.
  void Step(const T* product) {
    const D d;
    const T* p = col_direction();
    T* q = solver_.product();
    for (int64_t k = 0; k < cols_; k += kLanes) {
      hn::Store(hn::Add(hn::Load(d, p + k), hn::Load(d, product + k)), d, q + rows_ + k);
    }
    Project(q);
    solver_.Step();
  }

 private:
  // Twice, as in LaplacianSystem.
  void Project(T* x) const {
    for (int pass = 0; pass < 2; ++pass) ProjectOnce(x);
  }
  void ProjectOnce(T* x) const {
    const D d;
    const V difference =
        hn::Sub(SumOver(layout_, rows_, [&](int64_t k) HWY_ATTR { return hn::Load(d, x + k); }),
                SumOver(layout_, cols_, [&](int64_t k) HWY_ATTR { return hn::Load(d, x + rows_ + k); }));
    const V share = hn::Div(difference, hn::Set(d, static_cast<T>(layout_.rows() + layout_.cols())));
    if constexpr (Layout::kPerLane) {
      for (int64_t k = 0; k < rows_; k += kLanes) hn::Store(hn::Sub(hn::Load(d, x + k), share), d, x + k);
      for (int64_t k = rows_; k < rows_ + cols_; k += kLanes) hn::Store(hn::Add(hn::Load(d, x + k), share), d, x + k);
    } else {  // The padding stays 0.
      const T one_share = hn::GetLane(share);
      for (int64_t i = 0; i < layout_.rows(); ++i) x[i] -= one_share;
      for (int64_t j = 0; j < layout_.cols(); ++j) x[rows_ + j] += one_share;
    }
  }

  const Layout& layout_;
  const int64_t rows_, cols_;
  SymmetricSolver<Layout> solver_;
};

template <class Layout_>
class ImplicitSolver final : public MatrixSolver {
 public:
  using Layout = Layout_;
  using T = typename Layout::T;
  using D = typename Layout::D;
  using V = typename Layout::V;
  using Io = typename IoOf<Layout>::Type;
  using Scalar = LaneScalar<T, Layout::kLanes>;
  static constexpr int64_t kLanes = Layout::kLanes;
  static constexpr int64_t kMembers = Layout::kMembers;

  // `plan`: P of the members by lane (LaneLayout) or as member 0; none: the problem's own.
  ImplicitSolver(const NormalizationSpec& spec, Arena* arena, const MatrixTensor& plan)
      : spec_(spec),
        layout_(spec.n, spec.m),
        io_(layout_, /*transposed=*/false),
        staged_(plan),
        full_mode_(spec.problem.normalization.backward == BackwardMode::kImplicitFull),
        unit_mode_(spec.problem.normalization.backward == BackwardMode::kImplicitUnit),
        block_rows_(Layout::kPerLane ? spec.n : BlockRows(spec.n, spec.m)),
        blocks_((spec.n + block_rows_ - 1) / block_rows_),
        reduced_(layout_, !unit_mode_, kLeastCurvature, arena),
        full_(layout_, arena) {
    const int64_t row = layout_.row_elements(), col = layout_.col_elements();
    plan_ = arena->Take<T>(layout_.matrix_elements());
    cotangent_ = arena->Take<T>(layout_.matrix_elements());
    for (T** x : {&row_sum_, &row_inverse_, &row_side_}) *x = arena->Take<T>(row);
    diagonal_ = arena->Take<T>(col);
    accumulator_ = arena->Take<T>(blocks_ * 2 * col);
    block_scalar_ = arena->Take<Scalar>(blocks_ * kBlockScalars);
  }

  int64_t capacity() const override { return kMembers; }
  void Begin(const MemberGroup& group) override {
    for (int64_t l = 0; l < kMembers; ++l) {
      group_.member[l] = group.members[l < group.count ? l : 0];
      group_.store[l] = l < group.count && (group.store == nullptr || group.store[l]);
      if (spec_.dustbin) group_.border[l] = spec_.DustbinScore(group_.member[l]);
    }
    for (T* x : {row_sum_, row_inverse_, row_side_}) std::fill(x, x + layout_.row_elements(), T(0));
    pass_ = Pass::kStart;
    finite_ = true;
  }

  int64_t blocks() const override { return blocks_; }
  const bool* stored() const override { return group_.store; }
  void RunBlock(int64_t block, void* stage) override {
    const int64_t begin = block * block_rows_, end = std::min(begin + block_rows_, layout_.rows());
    T* typed_stage = static_cast<T*>(stage);
    if (pass_ == Pass::kStart) return StartRows(block, begin, end, typed_stage);
    if (pass_ == Pass::kIterate) return full_mode_ ? FullRows(block, begin, end) : ReducedRows(block, begin, end);
    GradientRows(begin, end);
    ChainToLogits(begin, end, typed_stage);
    Check(begin, end, block_scalar_ + block * kBlockScalars);
    io_.Store(cotangent_, group_, spec_.dustbin, begin, end, typed_stage,
              OutputTensor(spec_.problem.outputs.gradient_logits, spec_.problem.n, spec_.problem.m));
  }
  bool EndPass() override {
    if (pass_ == Pass::kStart) {
      EndStart();
    } else if (pass_ == Pass::kIterate) {
      Combine(0);
      full_mode_ ? full_.Step(accumulator_) : reduced_.Step(accumulator_);
    } else {
      EndGradient();
      pass_ = Pass::kDone;
      return false;
    }
    pass_ = (full_mode_ ? full_.done() : reduced_.done()) ? Pass::kGradient : Pass::kIterate;
    return true;
  }
  void Report(NormalizationTally* tally) const override {
    tally->finite &= finite_;
    if (spec_.forward) return;
    for (int64_t l = 0; l < kMembers; ++l) {
      if (group_.store[l]) tally->Add(convergence_[l], 1);
    }
  }
  Convergence progress() const override { return Convergence(); }

 private:
  enum { kBorder, kInfinite, kBlockScalars };
  static constexpr double kTolerance = 1e-14;

  // Partial column sums of a block: two kinds.
  T* Partial(int64_t block, int64_t kind) const {
    return accumulator_ + (kind * blocks_ + block) * layout_.col_elements();
  }
  void Combine(int64_t kind) const {
    const D d;
    T* sum = Partial(0, kind);
    for (int64_t b = 1; b < blocks_; ++b) {
      for (int64_t k = 0; k < layout_.col_elements(); k += kLanes) {
        hn::Store(hn::Add(hn::Load(d, sum + k), hn::Load(d, Partial(b, kind) + k)), d, sum + k);
      }
    }
  }

  // ---- Sums of P and of P * dP, and the right-hand side -------------------------------------------------------------
  void StartRows(int64_t block, int64_t begin, int64_t end, T* stage) {
    const D d;
    Group<kMembers> from = group_;
    if (staged_) {
      for (int64_t l = 0; l < kMembers; ++l) from.member[l] = l;
    }
    const NormalizationInputs& inputs = spec_.problem.normalization;
    io_.Load(staged_ ? staged_ : InputTensor(inputs.plan, spec_.n, spec_.m), false, from, begin, end, 0, stage, plan_);
    io_.Load(InputTensor(inputs.cotangent, spec_.n, spec_.m), false, group_, begin, end, 0, stage, cotangent_);
    T* right = Partial(block, 0);
    T* col_sum = Partial(block, 1);
    std::fill(right, right + layout_.col_elements(), T(0));
    std::fill(col_sum, col_sum + layout_.col_elements(), T(0));
    for (int64_t i = begin; i < end; ++i) {
      const T* p = plan_ + i * layout_.stride();
      const T* dp = cotangent_ + i * layout_.stride();
      V sum = hn::Zero(d), side = hn::Zero(d);
      for (int64_t k = 0; k < layout_.stride(); k += kLanes) {
        sum = hn::Add(sum, hn::Load(d, p + k));
        side = hn::MulAdd(hn::Load(d, p + k), hn::Load(d, dp + k), side);
        hn::Store(hn::Add(hn::Load(d, col_sum + k), hn::Load(d, p + k)), d, col_sum + k);
      }
      sum = layout_.Reduce(sum);
      side = layout_.Reduce(side);
      const V one = hn::Set(d, T(1));
      const V inverse =
          unit_mode_ || full_mode_ ? one : hn::IfThenElseZero(hn::Gt(sum, hn::Zero(d)), hn::Div(one, sum));
      layout_.StoreRow(sum, row_sum_, i);
      layout_.StoreRow(side, row_side_, i);
      layout_.StoreRow(inverse, row_inverse_, i);
      const V share = full_mode_ ? hn::Zero(d) : hn::Mul(side, inverse);
      for (int64_t k = 0; k < layout_.stride(); k += kLanes) {
        const V rest = hn::Sub(hn::Load(d, dp + k), share);
        hn::Store(hn::MulAdd(rest, hn::Load(d, p + k), hn::Load(d, right + k)), d, right + k);
      }
    }
  }

  void EndStart() {
    Combine(0);
    Combine(1);
    if (!spec_.forward) Certify();
    if (full_mode_) return full_.Begin(row_side_, Partial(0, 0), kTolerance);
    for (int64_t jv = 0; jv < layout_.vectors(); ++jv) {
      const V one = layout_.KeepColumns(jv, hn::Set(D(), T(1)));
      hn::Store(unit_mode_ ? one : hn::Load(D(), Partial(0, 1) + jv * kLanes), D(), diagonal_ + jv * kLanes);
    }
    reduced_.Begin(Partial(0, 0), diagonal_, kTolerance);
  }

  void ReducedRows(int64_t block, int64_t begin, int64_t end) {
    const T* inverse = row_inverse_;
    layout_.Sweep(plan_, begin, end, reduced_.direction(), Partial(block, 0),
                  [=](auto row, V s) HWY_ATTR { return hn::Mul(s, row.Load(inverse)); });
  }
  void FullRows(int64_t block, int64_t begin, int64_t end) {
    const T* direction = full_.row_direction();
    T* product = full_.row_product();
    layout_.Sweep(plan_, begin, end, full_.col_direction(), Partial(block, 0), [=](auto row, V s) HWY_ATTR {
      const V p = row.Load(direction);
      row.Store(hn::Add(p, s), product);
      return p;
    });
  }

  // ---- (dP - alpha_i - beta_j) P, in place of the cotangent ---------------------------------------------------------
  void GradientRows(int64_t begin, int64_t end) {
    const D d;
    const T* beta = full_mode_ ? full_.beta() : reduced_.solution();
    for (int64_t i = begin; i < end; ++i) {
      const T* p = plan_ + i * layout_.stride();
      T* gradient = cotangent_ + i * layout_.stride();
      V alpha;
      if (full_mode_) {
        alpha = layout_.LoadRow(full_.alpha(), i);
      } else {
        V product = hn::Zero(d);
        for (int64_t k = 0; k < layout_.stride(); k += kLanes) {
          product = hn::MulAdd(hn::Load(d, p + k), hn::Load(d, beta + k), product);
        }
        alpha =
            hn::Mul(hn::Sub(layout_.LoadRow(row_side_, i), layout_.Reduce(product)), layout_.LoadRow(row_inverse_, i));
      }
      for (int64_t k = 0; k < layout_.stride(); k += kLanes) {
        const V rest = hn::Sub(hn::Sub(hn::Load(d, gradient + k), alpha), hn::Load(d, beta + k));
        hn::Store(hn::Mul(rest, hn::Load(d, p + k)), d, gradient + k);
      }
    }
  }

  // From log K to the logits: the start of the recipe. The logits take P's place.
  void ChainToLogits(int64_t begin, int64_t end, T* stage) {
    const Recipe& recipe = spec_.recipe;
    const bool floored = recipe.logit_floor > std::numeric_limits<double>::lowest();
    if (!spec_.forward || (!floored && recipe.offset == 0 && !spec_.softmax())) return;
    const TensorView& logits = spec_.problem.normalization.logits;
    io_.Load(InputTensor(logits, spec_.problem.n, spec_.problem.m), spec_.dustbin, group_, begin, end,
             std::numeric_limits<T>::lowest(), stage, plan_);
    for (int64_t i = begin; i < end; ++i) {
      ChainRow(i, plan_ + i * layout_.stride(), cotangent_ + i * layout_.stride());
    }
  }
  void ChainRow(int64_t i, const T* logits, T* gradient) const {
    const D d;
    const double lowest = std::numeric_limits<T>::lowest();
    const V floor = hn::Set(d, static_cast<T>(std::max<double>(spec_.recipe.logit_floor, lowest)));
    const V offset = hn::Set(d, static_cast<T>(spec_.recipe.offset));
    const V one = hn::Set(d, T(1));
    V log_scale = hn::Zero(d), marginal = one;
    if (spec_.softmax()) {
      marginal = RowMarginal(i);
      log_scale = hn::Neg(RowLogSum(logits, floor));
    }
    V total = hn::Zero(d);
    for (int64_t jv = 0; jv < layout_.vectors(); ++jv) {
      const V x = hn::Load(d, logits + jv * kLanes), raised = hn::Max(x, floor);
      V factor = one;
      if (spec_.recipe.offset > 0) {  // start / (start + offset), which does not overflow like this
        const V start = hn::Mul(marginal, Exp(d, hn::Add(raised, log_scale)));
        factor = hn::Div(one, hn::Add(one, hn::Div(offset, start)));
      }
      const V g = layout_.KeepColumns(jv, hn::Mul(factor, hn::Load(d, gradient + jv * kLanes)));
      hn::Store(g, d, gradient + jv * kLanes);
      total = hn::Add(total, g);
    }
    // Raised logits take part in the softmax, but theirs is no derivative.
    total = spec_.softmax() ? layout_.Reduce(total) : hn::Zero(d);
    for (int64_t jv = 0; jv < layout_.vectors(); ++jv) {
      const V x = hn::Load(d, logits + jv * kLanes);
      V g = hn::Load(d, gradient + jv * kLanes);
      if (spec_.softmax()) g = hn::NegMulAdd(Exp(d, hn::Add(hn::Max(x, floor), log_scale)), total, g);
      hn::Store(hn::IfThenElseZero(hn::Gt(x, floor), g), d, gradient + jv * kLanes);
    }
  }
  V RowLogSum(const T* logits, V floor) const {
    const D d;
    V max = floor, sum = hn::Zero(d);
    for (int64_t k = 0; k < layout_.stride(); k += kLanes) max = hn::Max(max, hn::Load(d, logits + k));
    max = layout_.ReduceMax(max);
    for (int64_t jv = 0; jv < layout_.vectors(); ++jv) {
      const V x = hn::Max(hn::Load(d, logits + jv * kLanes), floor);
      sum = hn::Add(sum, layout_.KeepColumns(jv, ExpBounded(d, hn::Sub(x, max))));
    }
    return hn::Add(max, Log(d, layout_.Reduce(sum)));
  }
  V RowMarginal(int64_t i) const {
    std::vector<double> r(spec_.rows), c(spec_.cols);
    Scalar marginal;
    for (int64_t l = 0; l < kMembers; ++l) {
      spec_.LoadMarginals(group_.member[l], r.data(), c.data());
      if (Layout::kPerLane) {
        marginal.value[l] = spec_.transposed ? c[i] : r[i];
      } else {
        marginal.Fill(spec_.transposed ? c[i] : r[i]);
      }
    }
    return hn::Load(D(), marginal.value);
  }

  // ---- Certificate and checks --------------------------------------------------------------------------------------
  // Of a plan that was given: its sums against the marginals.
  void Certify() {
    const int64_t step = Layout::kPerLane ? kLanes : 1;
    std::vector<double> r(spec_.n), c(spec_.m), rows(spec_.n), cols(spec_.m);
    for (int64_t l = 0; l < kMembers; ++l) {
      if (!group_.store[l]) continue;
      spec_.LoadMarginals(group_.member[l], r.data(), c.data());
      Convergence& convergence = convergence_[l];
      convergence = Convergence();
      convergence.stop_reason = StopReason::kNotIterated;
      for (int64_t i = 0; i < spec_.n; ++i) {
        rows[i] = row_sum_[i * step + l];
        convergence.marginal_error_a += std::abs(rows[i] - r[i]);
      }
      for (int64_t j = 0; j < spec_.m; ++j) {
        cols[j] = Partial(0, 1)[j * step + l];
        convergence.marginal_error_b += std::abs(cols[j] - c[j]);
      }
      convergence.converged = std::max(convergence.marginal_error_a, convergence.marginal_error_b) <= spec_.tolerance;
      const Outputs& out = spec_.problem.outputs;
      const int64_t member = group_.member[l];
      if (out.convergence != nullptr) out.convergence[member] = convergence;
      if (out.row_sums) StoreRow(out.row_sums.dtype, rows.data(), spec_.n, out.row_sums.data, member * spec_.n);
      if (out.column_sums)
        StoreRow(out.column_sums.dtype, cols.data(), spec_.m, out.column_sums.data, member * spec_.m);
    }
  }

  void Check(int64_t begin, int64_t end, Scalar* scalars) const {
    const D d;
    V infinite = hn::Zero(d);
    for (int64_t k = begin * layout_.stride(); k < end * layout_.stride(); k += kLanes) {
      infinite = hn::MulAdd(hn::Load(d, cotangent_ + k), hn::Zero(d), infinite);
    }
    hn::Store(layout_.Reduce(infinite), d, scalars[kInfinite].value);
    hn::Store(layout_.BorderSum(cotangent_, begin, end), d, scalars[kBorder].value);
  }
  void EndGradient() {
    const OutputView& view = spec_.problem.outputs.gradient_dustbin_score;
    for (int64_t l = 0; l < kMembers; ++l) {
      if (!group_.store[l]) continue;
      T infinite = 0, border = 0;
      for (int64_t b = 0; b < blocks_; ++b) {
        infinite += block_scalar_[b * kBlockScalars + kInfinite].value[l];
        border += block_scalar_[b * kBlockScalars + kBorder].value[l];
      }
      if (!(infinite == 0)) finite_ = false;
      if (spec_.dustbin && view) StoreRow(view.dtype, &border, 1, view.data, group_.member[l]);
    }
  }

  const NormalizationSpec& spec_;
  const Layout layout_;
  const Io io_;
  const MatrixTensor staged_;
  const bool full_mode_, unit_mode_;
  const int64_t block_rows_, blocks_;
  LaplacianSystem<Layout> reduced_;
  FullSystem<Layout> full_;
  Group<kMembers> group_;
  Pass pass_ = Pass::kDone;
  T *plan_, *cotangent_, *row_sum_, *row_inverse_, *row_side_, *diagonal_, *accumulator_;
  Scalar* block_scalar_;
  Convergence convergence_[kMembers];
  bool finite_ = true;
};

}  // namespace sinkhorn::cpu::normalization::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // SINKHORN_KERNELS_CPU_NORMALIZATION_IMPLICIT_INL_H_
