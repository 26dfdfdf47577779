#include "kernels/cpu/transport_outputs.h"

#include <cmath>

#include "kernels/cpu/half.h"

namespace sinkhorn::cpu {
namespace {

class Store {
 public:
  Store(const Problem& problem, int64_t index, const TransportResults& results)
      : problem_(problem), out_(problem.outputs), index_(index), results_(results), own_(*results.answers[0]) {}

  void All() const {
    Scalars();
    Values(out_.f, own_.side[0].potential.data(), problem_.n);
    Values(out_.g, own_.side[1].potential.data(), problem_.m);
    Values(out_.row_sums, own_.side[0].marginal.data(), problem_.n);
    Values(out_.column_sums, own_.side[1].marginal.data(), problem_.m);
    for (size_t self = 1; self < results_.answers.size(); ++self) SelfPotentials(self);
    Values(out_.gradient_x, results_.gradient[0], problem_.n * problem_.dim);
    Values(out_.gradient_y, results_.gradient[1], problem_.m * problem_.dim);
    const int64_t directions = problem_.transport.hessian.count;
    Values(out_.hessian_x, results_.hessian[0], directions * problem_.n * problem_.dim);
    Values(out_.hessian_y, results_.hessian[1], directions * problem_.m * problem_.dim);
    if (out_.hessian_convergence != nullptr) out_.hessian_convergence[index_] = results_.hessian_convergence;
    MassGradient(out_.gradient_a, 0);
    MassGradient(out_.gradient_b, 1);
  }

 private:
  void Values(const OutputView& view, const double* values, int64_t count) const {
    if (view) StoreFromDouble(view.dtype, values, count, view.data, index_ * count);
  }

  void Scalars() const {
    double value = out_.value != nullptr || out_.dual_bound != nullptr ? own_.DualValue() : 0;
    if (out_.dual_bound != nullptr) out_.dual_bound[index_] = value - own_.DualValueRounding();
    if (out_.primal_bound != nullptr) out_.primal_bound[index_] = results_.primal_bound;
    if (out_.value_linear != nullptr) out_.value_linear[index_] = results_.value_linear;
    if (out_.value == nullptr) return;
    if (problem_.solver.debias) {
      const double difference = own_.side[0].total_mass - own_.side[1].total_mass;
      value += own_.epsilon / 2 * difference * difference;
      for (int self = 1; self <= 2; ++self) value -= results_.answers[self]->DualValue() / 2;
    }
    out_.value[index_] = value;
  }

  void SelfPotentials(size_t self) const {
    const TransportAnswer::Side* sides = results_.answers[self]->side;
    Buffer<double> mean(sides[0].size);
    for (int64_t i = 0; i < mean.size(); ++i) mean[i] = (sides[0].potential[i] + sides[1].potential[i]) / 2;
    Values(self == 1 ? out_.f_aa : out_.g_bb, mean.data(), mean.size());
  }

  void MassGradient(const OutputView& view, int side) const {
    if (!view) return;
    const double rho = own_.side[side].rho;
    Buffer<double> gradient(own_.side[side].size);
    for (int64_t i = 0; i < gradient.size(); ++i) {
      gradient[i] = MassDerivative(own_, side, rho, i);
      if (!problem_.solver.debias) continue;
      const TransportAnswer& self = *results_.answers[1 + side];
      gradient[i] -= (MassDerivative(self, 0, rho, i) + MassDerivative(self, 1, rho, i)) / 2;
      gradient[i] += own_.epsilon * (own_.side[side].total_mass - own_.side[1 - side].total_mass);
    }
    Values(view, gradient.data(), gradient.size());
  }

  // d(dual) / d mass_i of one problem, one argument at a time.
  static double MassDerivative(const TransportAnswer& answer, int side, double rho, int64_t i) {
    const double f = answer.side[side].potential[i];
    return (std::isinf(rho) ? f : -rho * std::expm1(-f / rho)) -
           answer.epsilon * (answer.side[side].ratio[i] - answer.side[1 - side].total_mass);
  }

  const Problem& problem_;
  const Outputs& out_;
  const int64_t index_;
  const TransportResults& results_;
  const TransportAnswer& own_;
};

}  // namespace

void StoreOutputs(const Problem& problem, int64_t index, const TransportResults& results) {
  Store(problem, index, results).All();
}

}  // namespace sinkhorn::cpu
