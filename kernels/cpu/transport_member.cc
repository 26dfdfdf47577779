#include "kernels/cpu/transport_member.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/transport_outputs.h"
#include "kernels/cpu/transport_typed_member.h"

namespace sinkhorn::cpu {

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
    costs_.push_back(
        std::make_unique<CostSource<TE, T>>(&cloud(Measure(which, 0)), &cloud(Measure(which, 1)), problem_.transport));
  } else {
    costs_.push_back(std::make_unique<CostSource<TE, T>>(problem_.transport.cost, index_, problem_.n, problem_.m));
  }
  engines_.push_back(std::make_unique<Engine>(costs_.back().get(), options));
  if (finish_soon_) engines_.back()->FinishSoon();
}

template <typename TE, typename T>
bool TypedMember<TE, T>::ExceedsFloat() const {
  const TransportAnswer& answer = engine().answer();
  if (answer.cut_short || !MakesFloatEntries(problem_.solver, out())) return false;
  const double error = std::max(answer.convergence.marginal_error_a, answer.convergence.marginal_error_b);
  return !HoldsEntries(error, answer.side[0].total_mass, answer.side[1].total_mass);
}

template <typename TE, typename T>
void TypedMember<TE, T>::EndPhase() {
  switch (stage_) {
    case Stage::kIterate:
      engines_.back()->EndPhase();
      if (!engine().finished()) return;
      if (!engine().answer().finite() || ExceedsFloat()) {
        status_ = absl::FailedPreconditionError(absl::StrCat(
            "the potentials or the plan are not finite after ", engine().convergence().iterations,
            " iterations; iterate on, increase epsilon (", problem_.solver.epsilon, ") or use precision DOUBLE"));
        stage_ = Stage::kDone;
        return;
      }
      if (problem_.solver.debias && engines_.size() < 3) return StartEngine();
      return PlanPasses();
    case Stage::kApply:
      for (double partial : linear_) linear_sum_ += partial;
      if (sparse_ != nullptr) sparse_->Store();
      sparse_ = nullptr;
      ++pass_;
      return StartPass();
    case Stage::kBound:
      bound_->EndPhase();
      if (bound_->chunk_count() == 0) StartHessian();
      return;
    case Stage::kHessian:
      hessian_->EndPhase();
      if (hessian_->chunk_count() == 0) Finish();
      return;
    case Stage::kDone:
      return;
  }
}

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
  // Products with the Hessian of cosines need the gradient.
  const bool chained = problem_.transport.point_cost == PointCost::kCosine && problem_.transport.hessian.count > 0;
  const bool gradient_x = out().gradient_x || (chained && out().hessian_x);
  const bool gradient_y = out().gradient_y || (chained && out().hessian_y);
  const bool points_x = gradient_x || out().projection_x, points_y = gradient_y || out().projection_y;
  const bool entries = out().plan || out().gradient_cost || out().sparse_plan.max_entries > 0;
  if (entries || out().plan_v || points_x || out().value_linear != nullptr) {
    passes_.push_back({0, 0});
  }
  if (out().plan_transpose_u || points_y) passes_.push_back({0, 1});
  if (problem_.solver.debias && gradient_x) passes_.push_back({1, 0});
  if (problem_.solver.debias && gradient_y) passes_.push_back({2, 0});
  if (gradient_x) gradient_[0].Resize(problem_.n * problem_.dim);
  if (gradient_y) gradient_[1].Resize(problem_.m * problem_.dim);
  StartPass();
}

template <typename TE, typename T>
void TypedMember<TE, T>::StartBound() {
  if (out().primal_bound == nullptr) return StartHessian();
  stage_ = Stage::kBound;
  if (point_cloud()) {
    bound_cost_ = std::make_unique<CostSource<double, double>>(&inputs_->x, &inputs_->y, problem_.transport);
  } else {
    bound_cost_ = std::make_unique<CostSource<double, double>>(problem_.transport.cost, index_, problem_.n, problem_.m);
  }
  const TransportAnswer::Side* sides = engines_[0]->answer().side;
  const Buffer<double>* masses[2] = {&sides[0].mass, &sides[1].mass};
  const Buffer<double>* potentials[2] = {&sides[0].potential, &sides[1].potential};
  bound_ = std::make_unique<PrimalBound>(bound_cost_.get(), problem_.solver.epsilon, masses, potentials);
}

template <typename TE, typename T>
void TypedMember<TE, T>::StartHessian() {
  if (problem_.transport.hessian.count == 0) return Finish();
  stage_ = Stage::kHessian;
  std::vector<SolvedProblem<TE, T>> solved;
  for (size_t k = 0; k < engines_.size(); ++k) {
    solved.push_back({costs_[k].get(), &engines_[k]->state(), &engines_[k]->answer()});
  }
  hessian_ = std::make_unique<HessianStage<TE, T>>(inputs_.get(), solved, gradient_, cache_bytes_);
  if (hessian_->chunk_count() == 0) Finish();
}

template <typename TE, typename T>
void TypedMember<TE, T>::Finish() {
  TransportResults results;
  if (problem_.transport.point_cost == PointCost::kCosine) TurnGradients();
  for (const auto& e : engines_) results.answers.push_back(&e->answer());
  for (int side = 0; side < 2; ++side) results.gradient[side] = gradient_[side].data();
  results.value_linear = -linear_sum_ * problem_.solver.epsilon / kLog2E;
  for (int side = 0; side < 2 && out().value_linear != nullptr; ++side) {
    const Buffer<double>& marginal = results.answers[0]->side[side].marginal;
    for (int64_t i = 0; i < size(side); ++i) results.value_linear += marginal[i] * costs_[0]->linear_shift(side, i);
  }
  if (bound_ != nullptr) results.primal_bound = bound_->value();
  for (int side = 0; side < 2 && hessian_ != nullptr; ++side) results.hessian[side] = hessian_->product(side).data();
  if (hessian_ != nullptr) results.hessian_convergence = hessian_->convergence();
  StoreOutputs(problem_, index_, results);
  stage_ = Stage::kDone;
}

template class TypedMember<float, float>;
template class TypedMember<double, float>;
template class TypedMember<double, double>;

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
