// What all forward solvers share: their memory, the sequence of passes, the stopping rule. (The certificate and the
// outputs: normalization_outputs-inl.h.)
//
// A recipe is P = diag(u) K diag(v), u and v updated in turn. The derived class (linear or log domain) supplies the
// arithmetic of a pass over some rows and the update of the columns after it; EndPass decides what comes next:
//
//   start | iterate [columns] ... iterate [columns] | final [| reverse ... reverse | gradient]
//
// Unrolled backward. A half step divides row i by h(s_i), s_i its sum in the current P, h the guard. With
// theta = d log h / d log s the adjoints of log u, log v and log K obey, for a row step with weights Q = K v / (K v)1,
//   bar K -= theta_i bar u_i Q_ij,  bar v_j -= sum_i theta_i bar u_i Q_ij,  bar u_i <- (1 - theta_i) bar u_i,
// and theta_i Q_ij = (u_i / r_i) K_ij v_j for every guard (theta = 0 where max is clamped). So the state of an
// iteration is two vectors, and its reverse two products with K.
#if defined(SINKHORN_KERNELS_CPU_NORMALIZATION_SOLVER_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SINKHORN_KERNELS_CPU_NORMALIZATION_SOLVER_INL_H_
#undef SINKHORN_KERNELS_CPU_NORMALIZATION_SOLVER_INL_H_
#else
#define SINKHORN_KERNELS_CPU_NORMALIZATION_SOLVER_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "hwy/highway.h"
#include "kernels/cpu/normalization_io-inl.h"
#include "kernels/cpu/normalization_kernels.h"
#include "kernels/cpu/normalization_marginals-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::cpu::normalization::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Rows per block: by shape alone, so that partial sums are always combined alike.
inline int64_t BlockRows(int64_t rows, int64_t cols) {
  constexpr int64_t kElements = 1 << 15;  // 128 KiB of float32: a thread's part stays in its own cache.
  if (rows * cols <= 4 * kElements) return rows;
  return std::min(rows, RoundUp(std::max<int64_t>(kElements / cols, 1), 16));
}

enum class Pass : uint8_t { kStart, kIterate, kColumns, kFinal, kReverse, kGradient, kDone };

template <class Derived, class Layout_, bool kLog>
class ForwardSolver : public MatrixSolver {
 public:
  using Layout = Layout_;
  using T = typename Layout::T;
  using D = typename Layout::D;
  using V = typename Layout::V;
  using Io = typename IoOf<Layout>::Type;
  static constexpr int64_t kLanes = Layout::kLanes;
  static constexpr int64_t kMembers = Layout::kMembers;
  using Scalar = LaneScalar<T, kLanes>;

  // `plan_copy`: P is written there too, by lane (LaneLayout) or as member 0.
  ForwardSolver(const NormalizationSpec& spec, Arena* arena, const MatrixTensor& plan_copy)
      : spec_(spec),
        layout_(spec.rows, spec.cols),
        io_(layout_, spec.transposed),
        plan_copy_(plan_copy),
        block_rows_(Layout::kPerLane ? spec.rows : BlockRows(spec.rows, spec.cols)),
        blocks_((spec.rows + block_rows_ - 1) / block_rows_),
        marginals_(spec, layout_, arena) {
    const int64_t matrix = layout_.matrix_elements(), row = layout_.row_elements(), col = layout_.col_elements();
    const int64_t slots = spec.unrolled ? spec.iterations + 1 : 2;
    matrix_ = arena->Take<T>(matrix);
    u_ = arena->Take<T>(slots * row);
    v_ = arena->Take<T>(slots * col);
    row_sum_ = arena->Take<T>(row);
    accumulator_ = arena->Take<T>(blocks_ * col);
    panel_ = arena->Take<T>(block_rows_ > kPanelRows ? blocks_ * 2 * col : 0);
    block_scalar_ = arena->Take<Scalar>(blocks_ * kBlockScalars);
    plan_ = matrix_;
    if (kLog || spec.unrolled) second_accumulator_ = arena->Take<T>(blocks_ * col);
    if (!spec.unrolled) return;
    plan_ = arena->Take<T>(matrix);
    cotangent_ = arena->Take<T>(matrix);
    if (kLog || spec.recipe.offset > 0) factor_ = arena->Take<T>(matrix);
    x_ = arena->Take<T>(slots * row);
    y_ = arena->Take<T>(slots * col);
    row_bar_ = arena->Take<T>(row);
    col_bar_ = arena->Take<T>(col);
  }

  int64_t capacity() const final { return kMembers; }
  void Begin(const MemberGroup& group) final {
    for (int64_t l = 0; l < kMembers; ++l) {
      group_.member[l] = group.members[l < group.count ? l : 0];
      group_.store[l] = l < group.count && (group.store == nullptr || group.store[l]);
      if (spec_.dustbin) group_.border[l] = spec_.DustbinScore(group_.member[l]);
    }
    Fetch(group);
    if (spec_.own_marginals || !begun_) marginals_.Load(group_);
    if (!Layout::kPerLane && !begun_) {  // The padding of row quantities takes part in sums.
      std::fill(row_sum_, row_sum_ + layout_.row_elements(), T(0));
      std::fill(u_, u_ + (spec_.unrolled ? spec_.iterations + 1 : 2) * layout_.row_elements(), T(0));
    }
    direct_logits_ = io_.Direct(Logits(), spec_.dustbin, group_);
    direct_plan_ = nullptr;
    if (!Derived::kExact && !plan_copy_) {  // EXACT works on P.
      direct_plan_ = io_.Direct(OutputTensor(outputs().plan, spec_.n, spec_.m), false, group_);
    }
    stopped_.Fill(0);
    tally_.redo.clear();
    tally_.count = 0;
    tally_.finite = true;
    begun_ = true;
    t_ = 0;
    pass_ = Pass::kStart;
  }

  int64_t blocks() const final { return blocks_; }
  const bool* stored() const final { return group_.store; }

  void RunBlock(int64_t block, void* stage) final {
    const int64_t begin = block * block_rows_, end = std::min(begin + block_rows_, layout_.rows());
    T* typed_stage = static_cast<T*>(stage);
    switch (pass_) {
      case Pass::kStart:
        if (direct_logits_ == nullptr) {
          io_.Load(Logits(), spec_.dustbin, group_, begin, end, std::numeric_limits<T>::lowest(), typed_stage, matrix_);
        }
        return derived().StartRows(begin, end, BlockScalars(block));
      case Pass::kIterate:
        for (int f = 0; f < 3; ++f) fetchers_[f].Some();
        return derived().IterateRows(block, begin, end);
      case Pass::kColumns:
        return derived().ColumnRows(block, begin, end);
      case Pass::kFinal:
        if (spec_.unrolled) {
          io_.Load(InputTensor(inputs().cotangent, spec_.n, spec_.m), false, group_, begin, end, 0, typed_stage,
                   cotangent_);
        }
        derived().FinalRows(block, begin, end);
        return StorePlan(begin, end, typed_stage);
      case Pass::kReverse:
        fetchers_[3].Some();
        return derived().ReverseRows(block, begin, end);
      case Pass::kGradient:
        derived().GradientRows(begin, end);
        FinishGradient(begin, end, BlockScalars(block));
        return io_.Store(cotangent_, group_, spec_.dustbin, begin, end, typed_stage,
                         OutputTensor(outputs().gradient_logits, spec_.problem.n, spec_.problem.m));
      case Pass::kDone:
        return;
    }
  }

  bool EndPass() final {
    switch (pass_) {
      case Pass::kStart:
        derived().EndStart();
        pass_ = StoresAny() ? Pass::kIterate : Pass::kDone;
        t_ = 1;
        break;
      case Pass::kIterate:
        derived().EndRows();
        break;
      case Pass::kColumns:
        derived().EndColumns();
        break;
      case Pass::kFinal:
        Certify();
        pass_ = Pass::kDone;
        if (spec_.unrolled && StoresAny()) BeginReverse();
        break;
      case Pass::kReverse:
        derived().EndReverse();
        --t_;
        BeginReverseStep();
        break;
      case Pass::kGradient:
        EndGradient();
        pass_ = Pass::kDone;
        break;
      case Pass::kDone:
        break;
    }
    return pass_ != Pass::kDone;
  }

  void Report(NormalizationTally* tally) const final {
    tally->Merge(tally_);
    tally->redo.insert(tally->redo.end(), tally_.redo.begin(), tally_.redo.end());
  }
  Convergence progress() const final {
    Convergence now = tally_.worst;
    if (pass_ < Pass::kFinal) now.iterations = std::max(t_ - 1, 0);
    return now;
  }

 protected:
  enum { kSmallest, kLowestRow, kLowestLogit, kBorder, kInfinite, kBlockScalars };

  Derived& derived() { return static_cast<Derived&>(*this); }
  const NormalizationInputs& inputs() const { return spec_.problem.normalization; }
  const Outputs& outputs() const { return spec_.problem.outputs; }
  MatrixTensor Logits() const { return InputTensor(inputs().logits, spec_.problem.n, spec_.problem.m); }
  // Where row i's logits are and its P goes: unaligned.
  const T* LogitsRow(int64_t i) const {
    return (direct_logits_ != nullptr ? direct_logits_ : matrix_) + i * layout_.stride();
  }
  T* PlanRow(int64_t i) const { return (direct_plan_ != nullptr ? direct_plan_ : plan_) + i * layout_.stride(); }

  // State of iteration t, 0 before the first. Only the backward pass needs more than the last two.
  T* U(int32_t t) const { return u_ + (spec_.unrolled ? t : t & 1) * layout_.row_elements(); }
  T* W(int32_t t) const { return v_ + (spec_.unrolled ? t : t & 1) * layout_.col_elements(); }
  // The reverse of iteration t: row and column multipliers.
  T* X(int32_t t) const { return x_ + t * layout_.row_elements(); }
  T* Y(int32_t t) const { return y_ + t * layout_.col_elements(); }
  T* Accumulator(int64_t block) const { return accumulator_ + block * layout_.col_elements(); }
  T* SecondAccumulator(int64_t block) const { return second_accumulator_ + block * layout_.col_elements(); }
  Scalar* BlockScalars(int64_t block) const { return block_scalar_ + block * kBlockScalars; }
  bool row_step_is_done() const { return spec_.softmax() && t_ == 1; }
  bool stops_early() const { return spec_.tolerance > 0; }

  // Combines a scalar of all blocks.
  template <class F>
  V Combined(int which, F combine) const {
    V result = hn::Load(D(), BlockScalars(0)[which].value);
    for (int64_t b = 1; b < blocks_; ++b) result = combine(result, hn::Load(D(), BlockScalars(b)[which].value));
    return result;
  }
  // Adds up the blocks' partial columns into the first one, in order.
  void CombineColumns(T* partial) const {
    for (int64_t b = 1; b < blocks_; ++b) AddColumns(partial + b * layout_.col_elements(), partial);
  }
  void AddColumns(const T* more, T* sum) const {
    const D d;
    for (int64_t k = 0; k < layout_.col_elements(); k += kLanes) {
      hn::Store(hn::Add(hn::Load(d, sum + k), hn::Load(d, more + k)), d, sum + k);
    }
  }
  // Runs body(begin, end, sums, second sums) for rows [begin, end), panel by panel, and adds up their column sums in
  // the block's accumulators. `second` may be null.
  template <class Body>
  void InPanels(int64_t block, int64_t begin, int64_t end, T* sums, T* second, Body body) const {
    body(begin, std::min(begin + kPanelRows, end), sums, second);
    T* panel = panel_ + block * 2 * layout_.col_elements();
    T* second_panel = second == nullptr ? nullptr : panel + layout_.col_elements();
    for (int64_t first = begin + kPanelRows; first < end; first += kPanelRows) {
      body(first, std::min(first + kPanelRows, end), panel, second_panel);
      AddColumns(panel, sums);
      if (second != nullptr) AddColumns(second_panel, second);
    }
  }

  // Lanes that this tier cannot hold: not stored, handed on.
  template <class M>
  void HandOn(M lanes) {
    HWY_ALIGN T flag[kLanes];
    hn::Store(hn::IfThenElse(lanes, hn::Set(D(), T(1)), hn::Zero(D())), D(), flag);
    for (int64_t l = 0; l < kMembers; ++l) {
      if (!group_.store[l] || flag[l] == 0) continue;
      group_.store[l] = false;
      tally_.redo.push_back(group_.member[l]);
    }
  }

  const NormalizationSpec& spec_;
  const Layout layout_;
  const Io io_;
  const MatrixTensor plan_copy_;
  const int64_t block_rows_, blocks_;
  ScaledMarginals<Layout, kLog> marginals_;
  Group<kMembers> group_;
  Pass pass_ = Pass::kDone;
  int32_t t_ = 0;  // The iteration that is being done or reversed, from 1.
  int32_t last_ = 0;
  Scalar stopped_;  // 0: goes on; else the iteration whose result stands.

  const T* direct_logits_ = nullptr;  // The tensors themselves; null: they pass through matrix_ and plan_.
  T* direct_plan_ = nullptr;
  T* matrix_ = nullptr;  // K, or its logarithm
  T* plan_ = nullptr;
  T* cotangent_ = nullptr;  // dL/dP; then bar K as it develops; then the gradient
  T* factor_ = nullptr;     // d log K / d W; null: 1
  T *u_ = nullptr, *v_ = nullptr, *x_ = nullptr, *y_ = nullptr;
  T *row_sum_ = nullptr, *row_bar_ = nullptr, *col_bar_ = nullptr;
  T *accumulator_ = nullptr, *second_accumulator_ = nullptr, *panel_ = nullptr;
  Scalar* block_scalar_ = nullptr;

 private:
  // Lines are fetched for groups in order, and where one thread does all passes.
  void Fetch(const MemberGroup& group) {
    const int64_t first = group.members[0], times = spec_.iterations;
    const bool in_order = group.members[group.count - 1] - first == group.count - 1 && blocks_ == 1;
    const int64_t count = in_order ? group.count : 0;
    fetchers_[0] = Fetcher(OutputTensor(outputs().plan, spec_.n, spec_.m), first, count, times);
    fetchers_[1] = Fetcher(Logits(), group.next, in_order ? group.next_count : 0, times);
    fetchers_[2] = Fetcher(InputTensor(inputs().cotangent, spec_.n, spec_.m), first, spec_.unrolled ? count : 0, times);
    fetchers_[3] =
        Fetcher(OutputTensor(outputs().gradient_logits, spec_.problem.n, spec_.problem.m), first, count, times);
  }

  bool StoresAny() const {
    return std::any_of(group_.store, group_.store + kMembers, [](bool store) { return store; });
  }

 protected:
  // ---- The end of an iteration --------------------------------------------------------------------------------------
  void EndIteration() {
    if (stops_early() && t_ > 1) Stop();
    derived().UpdateColumns();
    if (t_ == spec_.iterations || AllStopped()) {
      pass_ = Pass::kFinal;
      last_ = t_;
    } else {
      ++t_;
      pass_ = Pass::kIterate;
    }
  }

 private:
  // The row sums that iteration t_ met are those of the result of iteration t_ - 1: where both errors are small enough
  // that result stands, so u keeps its old value (and UpdateColumns will keep v).
  void Stop() {
    const D d;
    const V row_error = derived().RowErrorBefore();
    const V col_error = hn::Load(d, col_error_.value);
    const V tolerance = hn::Set(d, static_cast<T>(spec_.tolerance));
    const V stopped = hn::Load(d, stopped_.value);
    const auto stops =
        hn::And(hn::Eq(stopped, hn::Zero(d)), hn::And(hn::Le(row_error, tolerance), hn::Le(col_error, tolerance)));
    hn::Store(hn::IfThenElse(stops, hn::Set(d, static_cast<T>(t_ - 1)), stopped), d, stopped_.value);
    hn::Store(hn::IfThenElse(stops, row_error, hn::Load(d, row_error_.value)), d, row_error_.value);
    hn::Store(hn::IfThenElse(stops, col_error, hn::Load(d, stopped_col_error_.value)), d, stopped_col_error_.value);
    KeepStopped(U(t_ - 1), layout_.row_elements(), U(t_));
  }

  bool AllStopped() const {
    return stops_early() && hn::AllTrue(D(), hn::Ne(hn::Load(D(), stopped_.value), hn::Zero(D())));
  }

 protected:
  // Copies old over now in the lanes that have stopped.
  void KeepStopped(const T* old, int64_t elements, T* now) const {
    const D d;
    const auto stopped = hn::Ne(hn::Load(d, stopped_.value), hn::Zero(d));
    for (int64_t k = 0; k < elements; k += kLanes) {
      hn::Store(hn::IfThenElse(stopped, hn::Load(d, old + k), hn::Load(d, now + k)), d, now + k);
    }
  }
  // sum_k |difference_k|, a lane scalar; difference(k) gives the vector of elements k, k + 1, ... A lane may add up
  // thousands of terms: with what each addition rounds off.
  template <class Difference>
  V L1(int64_t elements, Difference difference) const {
    V sum = hn::Zero(D()), excess = hn::Zero(D());
    for (int64_t k = 0; k < elements; k += kLanes) {
      const V term = hn::Sub(hn::Abs(difference(k)), excess), next = hn::Add(sum, term);
      excess = hn::Sub(hn::Sub(next, sum), term);
      sum = next;
    }
    return layout_.Reduce(sum);
  }
  Scalar col_error_;  // After the last column step; kept by UpdateColumns when stops_early().

  // Whether and why member l, with the larger of its errors, counts as converged.
  void Judge(int64_t, double error, Convergence* convergence) const {
    convergence->converged = error <= spec_.tolerance;
    convergence->stop_reason =
        convergence->converged && stops_early() ? StopReason::kTolerance : StopReason::kMaxIterations;
  }

 private:
  // ---- Backward -----------------------------------------------------------------------------------------------------
  void BeginReverse() {
    CombineColumns(SecondAccumulator(0));  // sum_i dP_ij P_ij
    std::copy(SecondAccumulator(0), SecondAccumulator(0) + layout_.col_elements(), col_bar_);
    BeginReverseStep();
  }
  void BeginReverseStep() {
    if (t_ == 0) {
      pass_ = Pass::kGradient;
      return;
    }
    pass_ = Pass::kReverse;
    derived().BeginReverseStep();
  }

  // ---- The certificate and the outputs: normalization_outputs-inl.h ------------------------------------------------
  void Certify();
  template <class M>
  void Fail(M lanes);
  void WriteConvergence();
  void TallyTogether(V rows, V cols);
  void StoreSums() const;
  void StoreVector(const T* x, int64_t size, const OutputView& view) const;
  void StorePlan(int64_t begin, int64_t end, T* stage) const;
  void FinishGradient(int64_t begin, int64_t end, Scalar* scalars);
  void EndGradient();

  Fetcher fetchers_[4];  // P, the next logits, the cotangent, the gradient.
  NormalizationTally tally_;
  Scalar row_error_, stopped_col_error_;
  bool begun_ = false;
};

}  // namespace sinkhorn::cpu::normalization::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // SINKHORN_KERNELS_CPU_NORMALIZATION_SOLVER_INL_H_
