#include "kernels/cpu/transport_member.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/half.h"
#include "kernels/cpu/transport_blocks.h"
#include "kernels/cpu/transport_bound.h"
#include "kernels/cpu/transport_engine.h"
#include "kernels/cpu/transport_outputs.h"

namespace sinkhorn::cpu {
namespace {

constexpr int64_t kChunkPairs = int64_t{1} << 20;
constexpr double kReadSeconds = 0.12e-9;  // Of a density, on one thread.

template <typename TE, typename T>
class TypedMember final : public TransportMember {
 public:
  TypedMember(const Problem& problem, int64_t index, int64_t cache_bytes, std::unique_ptr<MemberInputs> inputs)
      : problem_(problem), index_(index), cache_bytes_(cache_bytes), inputs_(std::move(inputs)) {
    StartEngine();
  }

  int64_t chunk_count() const override {
    switch (stage_) {
      case Stage::kIterate:
        return engine().chunk_count();
      case Stage::kApply:
        return apply_chunks_;
      case Stage::kBound:
        return bound_->chunk_count();
      case Stage::kDone:
        return 0;
    }
    return 0;
  }
  double chunk_seconds() const override {
    const double make = DensitySeconds(problem_.dim);
    const double width = sizeof(T) / sizeof(float);
    switch (stage_) {
      case Stage::kIterate:
        return engine().chunk_pairs() * width * (engine().cached() ? kReadSeconds : make);
      case Stage::kApply:
        return kChunkPairs * width * kReadSeconds;
      default:
        return kChunkPairs / 16 * 2 * make;
    }
  }
  void RunChunk(int64_t chunk, Scratch* scratch) override {
    if (stage_ == Stage::kIterate) return engines_.back()->RunChunk(chunk, scratch);
    if (stage_ == Stage::kBound) return bound_->RunChunk(chunk, scratch);
    const int64_t rows = costs_[pass().engine]->size(pass().side);
    const int64_t end = std::min(rows, (chunk + 1) * apply_blocks_ * kRowBlock);
    for (int64_t row = chunk * apply_blocks_ * kRowBlock; row < end; row += kRowBlock) {
      ApplyBlock(row, &linear_[chunk], scratch);
    }
  }
  void EndPhase() override;
  void FinishSoon() override {
    finish_soon_ = true;
    if (stage_ == Stage::kIterate) engines_.back()->FinishSoon();
  }
  absl::Status status() const override { return status_; }
  Convergence progress() const override { return stage_ == Stage::kIterate ? engine().convergence() : convergence_; }

 private:
  enum class Stage { kIterate, kApply, kBound, kDone };
  using Engine = TransportEngine<TE, T>;
  // Flushing takes digits off the entries of rows that weigh less.
  static constexpr double kLightRow = sizeof(T) == sizeof(float) ? 1e-25 : 1e-290;
  struct Pass {
    int engine, side;
  };

  const Engine& engine() const { return *engines_.back(); }
  const Pass& pass() const { return passes_[pass_]; }
  const Outputs& out() const { return problem_.outputs; }
  bool point_cloud() const { return problem_.kind == ProblemKind::kPointCloud; }
  int64_t size(int side) const { return side == 0 ? problem_.n : problem_.m; }
  const Cloud& cloud(int side) const { return side == 0 ? inputs_->x : inputs_->y; }
  // Which of x (0) and y (1) stands on a side of an engine's problem.
  static int Measure(int engine, int side) { return engine == 0 ? side : engine - 1; }

  void StartEngine();
  void PlanPasses();
  void StartPass();
  void ApplyBlock(int64_t row, double* linear, Scratch* scratch);
  void Project(int64_t i, double mass, const double* product) const;
  void AddGradient(int64_t i, double mass, const double* product);
  void StartBound();
  void Finish();

  const Problem& problem_;  // The work's: outlives this.
  const int64_t index_;
  const int64_t cache_bytes_;
  std::unique_ptr<MemberInputs> inputs_;
  std::vector<std::unique_ptr<CostSource<TE, T>>> costs_;
  std::vector<std::unique_ptr<Engine>> engines_;
  Stage stage_ = Stage::kIterate;
  bool finish_soon_ = false;
  Convergence convergence_;
  absl::Status status_;

  // Passes over the plan.
  std::vector<Pass> passes_;
  size_t pass_ = 0;
  int64_t apply_chunks_ = 0, apply_blocks_ = 1, points_width_ = 0, columns_width_ = 0;
  Buffer<T> points_, columns_;  // [padded other side, width]: centred points; V or U
  Buffer<double> gradient_[2];  // [n, dim], [m, dim]
  Buffer<TE> zeros_;
  std::vector<double> linear_;  // per chunk: sum P z
  double linear_sum_ = 0;
  std::unique_ptr<CostSource<double, double>> bound_cost_;
  std::unique_ptr<PrimalBound> bound_;
};

template <typename TE, typename T>
void TypedMember<TE, T>::StartEngine() {
  const int which = static_cast<int>(engines_.size());
  EngineOptions options;
  options.solver = problem_.solver;
  options.solver.epsilon_start = inputs_->epsilon_start;
  options.cache_bytes = cache_bytes_;
  const std::vector<double>* masses[2] = {&inputs_->a, &inputs_->b};
  const std::vector<double>* initial[2] = {&inputs_->f, &inputs_->g};
  for (int side = 0; side < 2; ++side) {
    options.mass[side] = masses[Measure(which, side)]->data();
    options.initial[side] = which > 0 || initial[side]->empty() ? nullptr : initial[side]->data();
  }
  if (which > 0) {  // A measure against itself: f = g, and averaged updates converge in a few steps.
    options.solver.update_rule = UpdateRule::kSymmetric;
    (which == 1 ? options.solver.rho_b : options.solver.rho_a) =
        which == 1 ? options.solver.rho_a : options.solver.rho_b;
  }
  if (point_cloud()) {
    costs_.push_back(std::make_unique<CostSource<TE, T>>(&cloud(Measure(which, 0)), &cloud(Measure(which, 1)),
                                                         problem_.transport.kappa));
  } else {
    costs_.push_back(std::make_unique<CostSource<TE, T>>(problem_.transport.cost, index_, problem_.n, problem_.m));
  }
  engines_.push_back(std::make_unique<Engine>(costs_.back().get(), options));
  if (finish_soon_) engines_.back()->FinishSoon();
}

template <typename TE, typename T>
void TypedMember<TE, T>::EndPhase() {
  switch (stage_) {
    case Stage::kIterate:
      engines_.back()->EndPhase();
      if (!engine().finished()) return;
      if (!engine().answer().finite()) {
        status_ = absl::FailedPreconditionError(
            absl::StrCat("the potentials are not finite after ", engine().convergence().iterations,
                         " iterations; increase epsilon (", problem_.solver.epsilon, ") or use precision DOUBLE"));
        stage_ = Stage::kDone;
        return;
      }
      if (problem_.solver.debias && engines_.size() < 3) return StartEngine();
      return PlanPasses();
    case Stage::kApply:
      for (double partial : linear_) linear_sum_ += partial;
      ++pass_;
      return StartPass();
    case Stage::kBound:
      bound_->EndPhase();
      if (bound_->chunk_count() == 0) Finish();
      return;
    case Stage::kDone:
      return;
  }
}

// ---- Passes over the plan ------------------------------------------------------------------------------------------

template <typename TE, typename T>
void TypedMember<TE, T>::PlanPasses() {
  for (const auto& e : engines_) {
    const Convergence& c = e->convergence();
    convergence_.iterations = std::max(convergence_.iterations, c.iterations);
    convergence_.marginal_error_a = std::max(convergence_.marginal_error_a, c.marginal_error_a);
    convergence_.marginal_error_b = std::max(convergence_.marginal_error_b, c.marginal_error_b);
    const bool cut = e != engines_.front() && convergence_.stop_reason == StopReason::kTimeBudget;
    if (e == engines_.front() || (!c.converged && !cut)) convergence_.stop_reason = c.stop_reason;
    convergence_.converged = (e == engines_.front() || convergence_.converged) && c.converged;
  }
  stage_ = Stage::kApply;
  const bool points_x = out().gradient_x || out().projection_x, points_y = out().gradient_y || out().projection_y;
  if (out().plan || out().gradient_cost || out().plan_v || points_x || out().value_linear != nullptr) {
    passes_.push_back({0, 0});
  }
  if (out().plan_transpose_u || points_y) passes_.push_back({0, 1});
  if (problem_.solver.debias && out().gradient_x) passes_.push_back({1, 0});
  if (problem_.solver.debias && out().gradient_y) passes_.push_back({2, 0});
  if (out().gradient_x) gradient_[0].Resize(problem_.n * problem_.dim);
  if (out().gradient_y) gradient_[1].Resize(problem_.m * problem_.dim);
  StartPass();
}

template <typename TE, typename T>
void TypedMember<TE, T>::StartPass() {
  if (pass_ == passes_.size()) return StartBound();
  const CostSource<TE, T>& cost = *costs_[pass().engine];
  const int other = 1 - pass().side;
  const int64_t padded = cost.padded(other);
  // 1. Right-hand sides of the products.
  points_width_ = columns_width_ = 0;
  const bool needs_points = pass().side == 0 ? out().gradient_x || out().projection_x || pass().engine > 0
                                             : out().gradient_y || out().projection_y;
  if (needs_points) {
    const Cloud& points = cloud(Measure(pass().engine, other));
    points_width_ = RoundUp(points.dim, 16);
    points_.Resize(padded * points_width_);
    for (int64_t j = 0; j < points.count; ++j) {
      for (int64_t k = 0; k < points.dim; ++k) {
        points_[j * points_width_ + k] = static_cast<T>(points.points[j * points.dim + k]);
      }
    }
  }
  const TensorView& view = pass().side == 0 ? problem_.transport.v : problem_.transport.u;
  const OutputView& product = pass().side == 0 ? out().plan_v : out().plan_transpose_u;
  if (pass().engine == 0 && product) {
    const int64_t width = pass().side == 0 ? problem_.transport.v_columns : problem_.transport.u_columns;
    columns_width_ = RoundUp(width, 16);
    columns_.Resize(padded * columns_width_);
    const int64_t offset = view.shared ? 0 : index_ * size(other) * width;
    for (int64_t j = 0; j < size(other); ++j) {
      LoadRow(view.dtype, view.data, offset + j * width, width, columns_.data() + j * columns_width_);
    }
  }
  if (zeros_.size() < padded) zeros_.Resize(padded);
  // 2. Chunks.
  const int64_t blocks = RoundUp(cost.size(pass().side), kRowBlock) / kRowBlock;
  const int64_t weight = 4 + (problem_.dim + points_width_ + columns_width_) / 16;
  apply_blocks_ = std::min(blocks, std::max<int64_t>(1, kChunkPairs / weight / (kRowBlock * padded)));
  apply_chunks_ = (blocks + apply_blocks_ - 1) / apply_blocks_;
  linear_.assign(apply_chunks_, 0);
}

template <typename TE, typename T>
void TypedMember<TE, T>::ApplyBlock(int64_t row, double* linear, Scratch* scratch) {
  const auto& kernels = GetTransportKernels<TE, T>();
  const int side = pass().side, which = pass().engine;
  const CostSource<TE, T>& cost = *costs_[which];
  const int64_t columns = cost.padded(1 - side), count = cost.size(1 - side);
  const int64_t product_width = std::max(points_width_, columns_width_);
  int64_t rows[kRowBlock];
  for (int r = 0; r < kRowBlock; ++r) rows[r] = row + r < cost.size(side) ? row + r : -1;
  double* product = static_cast<double*>(scratch->Get(kRowBlock * product_width * sizeof(double) +
                                                      cost.block_size(side) * (sizeof(T) + sizeof(TE)) +
                                                      cost.WorkspaceSize(side) * sizeof(TE) + columns * sizeof(T)));
  TE* e = reinterpret_cast<TE*>(product + kRowBlock * product_width);
  TE* workspace = e + cost.block_size(side);
  T* plan = reinterpret_cast<T*>(workspace + cost.WorkspaceSize(side));
  T* plan_row = plan + cost.block_size(side);
  double sums[kRowBlock];
  PlanRows(engines_[which]->state(), side, rows, plan, sums, workspace);

  const bool first = which == 0 && side == 0;
  if (first && out().value_linear != nullptr) {
    const TE zero[kRowBlock] = {};
    cost.Exponents(0, rows, problem_.solver.epsilon, zero, zeros_.data(), e, workspace);
    *linear += kernels.dot(plan, columns, e);
  }
  for (int r = 0; r < kRowBlock && first && (out().plan || out().gradient_cost) && rows[r] >= 0; ++r) {
    const int64_t offset = (index_ * problem_.n + rows[r]) * problem_.m;
    for (int64_t j = 0; j < count; ++j) plan_row[j] = plan[BlockIndex(r, j)];
    for (const OutputView* view : {&out().plan, &out().gradient_cost}) {
      if (*view) StoreRow(view->dtype, plan_row, count, view->data, offset);
    }
  }
  if (columns_width_ > 0) {
    kernels.multiply(plan, columns, columns_.data(), columns_width_, product);
    const OutputView& view = side == 0 ? out().plan_v : out().plan_transpose_u;
    const int64_t width = side == 0 ? problem_.transport.v_columns : problem_.transport.u_columns;
    for (int r = 0; r < kRowBlock && rows[r] >= 0; ++r) {
      StoreFromDouble(view.dtype, product + r * columns_width_, width, view.data,
                      (index_ * size(side) + rows[r]) * width);
    }
  }
  if (points_width_ == 0) return;
  kernels.multiply(plan, columns, points_.data(), points_width_, product);
  for (int r = 0; r < kRowBlock && rows[r] >= 0; ++r) AddGradient(rows[r], sums[r], product + r * points_width_);
  const OutputView& projection = side == 0 ? out().projection_x : out().projection_y;
  if (which > 0 || !projection) return;
  // Last, since it may make the plan anew.
  if (std::any_of(sums, sums + kRowBlock, [](double sum) { return sum < kLightRow; })) {
    ScaledPlanRows(engines_[0]->state(), side, rows, plan, sums, e, workspace);
    kernels.multiply(plan, columns, points_.data(), points_width_, product);
  }
  for (int r = 0; r < kRowBlock && rows[r] >= 0; ++r) Project(rows[r], sums[r], product + r * points_width_);
}

// Barycentric projection sum_j P_ij y_j / r_i of point i from its row's mass, 0 where it has none, and product.
template <typename TE, typename T>
void TypedMember<TE, T>::Project(int64_t i, double mass, const double* product) const {
  const int side = pass().side;
  const Cloud& theirs = cloud(1 - side);
  const OutputView& view = side == 0 ? out().projection_x : out().projection_y;
  std::vector<double> mean(theirs.dim, 0.0);
  for (int64_t k = 0; k < theirs.dim && mass > 0; ++k) mean[k] = product[k] / mass + theirs.centre[k];
  StoreFromDouble(view.dtype, mean.data(), theirs.dim, view.data, (index_ * size(side) + i) * theirs.dim);
}

// Gradient 2 kappa (r_i x_i - sum_j P_ij y_j) of point i.
template <typename TE, typename T>
void TypedMember<TE, T>::AddGradient(int64_t i, double mass, const double* product) {
  const int which = pass().engine, own = Measure(which, pass().side), other = Measure(which, 1 - pass().side);
  if (gradient_[own].size() == 0) return;
  const Cloud& mine = cloud(own);
  const Cloud& theirs = cloud(other);
  const double scale = (which == 0 ? 2 : -2) * problem_.transport.kappa;
  for (int64_t k = 0; k < mine.dim; ++k) {
    const double x = mine.points[i * mine.dim + k] + (mine.centre[k] - theirs.centre[k]);
    gradient_[own][i * mine.dim + k] += scale * (mass * x - product[k]);
  }
}

template <typename TE, typename T>
void TypedMember<TE, T>::StartBound() {
  if (out().primal_bound == nullptr) return Finish();
  stage_ = Stage::kBound;
  if (point_cloud()) {
    bound_cost_ = std::make_unique<CostSource<double, double>>(&inputs_->x, &inputs_->y, problem_.transport.kappa);
  } else {
    bound_cost_ = std::make_unique<CostSource<double, double>>(problem_.transport.cost, index_, problem_.n, problem_.m);
  }
  const TransportAnswer::Side* sides = engines_[0]->answer().side;
  const Buffer<double>* masses[2] = {&sides[0].mass, &sides[1].mass};
  const Buffer<double>* potentials[2] = {&sides[0].potential, &sides[1].potential};
  bound_ = std::make_unique<PrimalBound>(bound_cost_.get(), problem_.solver.epsilon, masses, potentials);
}

template <typename TE, typename T>
void TypedMember<TE, T>::Finish() {
  TransportResults results;
  for (const auto& e : engines_) results.answers.push_back(&e->answer());
  for (int side = 0; side < 2; ++side) results.gradient[side] = gradient_[side].data();
  results.value_linear = -linear_sum_ * problem_.solver.epsilon / kLog2E;
  for (int side = 0; side < 2 && out().value_linear != nullptr; ++side) {
    const Buffer<double>& marginal = results.answers[0]->side[side].marginal;
    for (int64_t i = 0; i < size(side); ++i) results.value_linear += marginal[i] * costs_[0]->shift(side)[i];
  }
  if (bound_ != nullptr) results.primal_bound = bound_->value();
  StoreOutputs(problem_, index_, results);
  stage_ = Stage::kDone;
}

}  // namespace

template <typename TE, typename T>
std::unique_ptr<TransportMember> MakeTypedMember(const Problem& problem, int64_t index, int64_t cache_bytes,
                                                 std::unique_ptr<MemberInputs> inputs) {
  return std::make_unique<TypedMember<TE, T>>(problem, index, cache_bytes, std::move(inputs));
}
template std::unique_ptr<TransportMember> MakeTypedMember<float, float>(const Problem&, int64_t, int64_t,
                                                                        std::unique_ptr<MemberInputs>);
template std::unique_ptr<TransportMember> MakeTypedMember<double, float>(const Problem&, int64_t, int64_t,
                                                                         std::unique_ptr<MemberInputs>);
template std::unique_ptr<TransportMember> MakeTypedMember<double, double>(const Problem&, int64_t, int64_t,
                                                                          std::unique_ptr<MemberInputs>);

}  // namespace sinkhorn::cpu
